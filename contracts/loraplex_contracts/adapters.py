"""Adapter identity, states and listing rows; syntax of names off the wire.

An *adapter id* is the name in a request; an *adapter key* identifies the content that the name is bound to. Two ids
with the same bytes share one key; an id whose files changed gets another one. The syntax of each kind of name is an
allow-list in one regular expression without backtracking.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NewType

from loraplex_contracts.errors import InvalidAdapterId, InvalidArgument

AdapterId = NewType("AdapterId", str)  # a name that `check_adapter_id` has passed; empty for none
NO_ADAPTER = AdapterId("")

AdapterKind = Literal["lora", "medusa", "combined"]
# Clients read a state or tier of a newer server as "unknown"; servers never send that.
AdapterState = Literal["unknown", "known", "fetching", "on_host", "on_device", "draining", "failed"]
AdapterTier = Literal["unknown", "source", "disk", "host", "device"]


@dataclass(frozen=True, slots=True, order=True)
class AdapterKey:
    """Content of an adapter: equal keys have equal weights, bit for bit."""

    kind: AdapterKind
    digest: str  # 64 hexadecimal digits (SHA-256)

    def __str__(self) -> str:
        return f"{self.kind}:{self.digest}"


@dataclass(frozen=True, slots=True)
class ClassifierInfo:
    """Labels of an adapter's classifier, of texts or of each token."""

    labels: tuple[str, ...]  # in the order of its rows
    per_token: bool = False


MAX_TEMPLATE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class AdapterTemplates:
    """Templates that an adapter brings. Empty where it has none."""

    chat: str = ""  # Jinja
    chat_with_tools: str = ""  # in its place for chats with tools
    response: str = ""  # JSON

    def chat_for(self, *, has_tools: bool) -> str:
        return (self.chat_with_tools if has_tools else "") or self.chat


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """The content that an adapter id is bound to, and the templates that it brings."""

    adapter_id: str
    digest: str
    templates: AdapterTemplates | None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One row of a listing."""

    adapter_id: str
    kind: str  # an AdapterKind; empty before the first fetch has ended
    digest: str
    state: AdapterState
    tier: AdapterTier
    num_bytes: int
    rank: int
    num_running: int
    pinned: bool
    error: str = ""
    error_reason: str = ""
    num_heads: int = 0  # Medusa heads
    classifier: ClassifierInfo | None = None


# Changed rows by adapter key, or by adapter id while it has no key. An empty tuple removes the rows.
ListingChanges = dict[AdapterKey | str, tuple[AdapterInfo, ...]]


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Bytes in use and allowed, by tier, and counters since the start."""

    device_bytes: int
    device_budget_bytes: int
    host_bytes: int
    host_budget_bytes: int
    num_device_slots: int
    num_device_slots_used: int
    hits: int = 0
    misses: int = 0
    device_evictions: int = 0
    host_evictions: int = 0
    load_seconds_total: float = 0.0
    loads_total: int = 0


MAX_ADAPTER_ID_CHARS = 128
MAX_ID_CHARS = 128
MAX_ROLE_CHARS = 64

# "org/name" as the Hub has it, or a plain name. ASCII only (no look-alikes), no dot segments, never absolute.
_SEGMENT = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
_ADAPTER_ID = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})?\Z")
_ID = re.compile(r"[A-Za-z0-9._:-]+\Z")
_ROLE = re.compile(r"[A-Za-z0-9_-]+\Z")


def check_adapter_id(adapter_id: str, *, field: str = "adapter_id") -> AdapterId:
    """Returns a well-formed `adapter_id`; checked once, where it comes in.

    Raises InvalidAdapterId: an id is never a path or an address and cannot be read as one.
    """
    if len(adapter_id) > MAX_ADAPTER_ID_CHARS or ".." in adapter_id or not _ADAPTER_ID.match(adapter_id):
        raise InvalidAdapterId(
            f"{field} {_shown(adapter_id)} is not a valid name: use letters, digits, '.', '_' and '-', with at most "
            f"one '/', {MAX_ADAPTER_ID_CHARS} characters at most",
            field=field,
        )
    return AdapterId(adapter_id)


def check_id(value: str, *, field: str) -> str:
    """Returns a well-formed request id or cache salt, which is an opaque string. Raises InvalidArgument."""
    if len(value) > MAX_ID_CHARS or not _ID.match(value):
        raise InvalidArgument(
            f"{field} {_shown(value)} is not valid: use letters, digits, '.', '_', ':' and '-', {MAX_ID_CHARS} "
            "characters at most",
            field=field,
        )
    return value


def check_role(role: str, *, field: str) -> str:
    """Returns a well-formed chat role. Raises InvalidArgument. Only plain words are allowed: templates write the role
    between control tokens, where other text could forge a turn."""
    if len(role) > MAX_ROLE_CHARS or not _ROLE.match(role):
        raise InvalidArgument(
            f"{field} {_shown(role)} is not a role: use 'system', 'user', 'assistant' or another plain word that the "
            "base model's chat template knows",
            field=field,
        )
    return role


def _shown(value: str) -> str:
    """The value in quotes for a message: ASCII, at most 40 characters."""
    return ascii(value[:40]) + ("..." if len(value) > 40 else "")
