"""Adapter identity, states and listing rows; syntax of names off the wire.

An *adapter id* is the name in a request; an *adapter key* identifies the content that the name is bound to. Two ids
with the same bytes share one key; an id whose files changed gets another one. The syntax of each kind of name is an
allow-list in one regular expression without backtracking.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, NewType

from loraplex_contracts.errors import InvalidAdapterId, InvalidArgument, Unimplemented

# A name that `check_adapter_id` has passed, in requests also with a version (`check_adapter_ref`); empty for none.
AdapterId = NewType("AdapterId", str)
NO_ADAPTER = AdapterId("")

AdapterKind = Literal["lora", "medusa", "combined"]
# Clients read a state or tier of a newer server as "unknown"; servers never send that.
AdapterState = Literal["unknown", "known", "fetching", "on_host", "on_device", "draining", "failed"]
AdapterTier = Literal["unknown", "source", "disk", "host", "device"]


@dataclass(frozen=True, slots=True, order=True)
class AdapterKey:
    """Identity of an adapter's content: equal keys have equal weights, bit for bit."""

    kind: AdapterKind
    digest: str  # 64 hexadecimal digits (SHA-256)

    @property
    def has_heads(self) -> bool:
        """True if Medusa heads are in it, perhaps beside a LoRA."""
        return self.kind != "lora"

    @property
    def changes_kv(self) -> bool:
        """True if it changes the keys and values that a sequence leaves in the KV cache. Medusa heads alone do not:
        they read the last hidden state and draft."""
        return self.kind != "medusa"

    def __str__(self) -> str:
        return f"{self.kind}:{self.digest}"


@dataclass(frozen=True, slots=True)
class AdapterUser:
    """The tenant that uses an adapter, and the bytes of adapters that it may have in memory; None: any number."""

    tenant: str = ""
    max_bytes: int | None = None


NOBODY = AdapterUser()


@dataclass(frozen=True, slots=True)
class AdapterOrigin:
    """Origin of a name's files. Without a `source` it is the place of that name in the server's sources."""

    source: str = ""
    revision: str = ""
    token: str = field(default="", repr=False)  # the caller's own, for the Hub

    @property
    def without_token(self) -> AdapterOrigin:
        """The origin without its token, as it may be kept: a token is for one fetch."""
        return replace(self, token="") if self.token else self


OWN_ORIGIN = AdapterOrigin()


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of one LoadAdapter. `origin` without a source: where the name was loaded from before."""

    origin: AdapterOrigin = OWN_ORIGIN
    expected_digest: str = ""  # empty: any
    if_absent: bool = False  # a name that is bound stays as it is
    is_reload: bool = False  # by the server itself, for files that were replaced: the pin stays as it is


PLAIN_LOAD = LoadOptions()


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
    source: str = ""  # of its AdapterOrigin
    base: str = ""  # that its files name
    num_uses: int = 0  # requests for its name
    last_error: str = ""  # of the last load under this name, where that failed
    last_error_reason: str = ""
    is_sourced: bool = False  # a load in this process has bound it to a source that is not its own


# Changed rows by adapter key, or by adapter id while it has no key. An empty tuple removes the rows.
ListingChanges = dict[AdapterKey | str, tuple[AdapterInfo, ...]]


class ReadCount(NamedTuple):
    """Adapters read from one tier since the start."""

    num: int = 0
    seconds: float = 0.0
    num_bytes: int = 0

    def plus(self, seconds: float, num_bytes: int) -> ReadCount:
        """These counts with one more read of `num_bytes` in `seconds`."""
        return ReadCount(self.num + 1, self.seconds + seconds, self.num_bytes + num_bytes)


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Bytes in use and allowed, by tier, and counters since the start."""

    device_bytes: int
    device_budget_bytes: int
    host_bytes: int
    host_budget_bytes: int
    num_device_slots: int
    device_evictions: int = 0
    host_evictions: int = 0
    load_seconds_total: float = 0.0
    loads_total: int = 0
    source_reads: ReadCount = ReadCount()
    disk_reads: ReadCount = ReadCount()
    host_reads: ReadCount = ReadCount()  # by a device with memory of its own


MAX_ADAPTER_ID_CHARS = 128
MIN_VERSION_CHARS = 8  # of a digest, so that it says which content is meant
MAX_ID_CHARS = 128
MAX_SOURCE_CHARS = 1024
HUB_SOURCE = "hub:"  # a `source` that is a repository, ORG/NAME
S3_SOURCE = "s3:"  # one that is in a bucket, BUCKET/PREFIX
MAX_ROLE_CHARS = 64
MAX_HUB_TOKEN_CHARS = 512

# "org/name" as the Hub has it, or a plain name. ASCII only (no look-alikes), no dot segments, never absolute.
_SEGMENT = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
_ADAPTER_ID = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})?\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_VERSION = re.compile(rf"[0-9a-f]{{{MIN_VERSION_CHARS},64}}\Z")
_ID = re.compile(r"[A-Za-z0-9._:-]+\Z")
_REVISION = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._/-]{{0,{MAX_ID_CHARS - 1}}}\Z")
_HUB_TOKEN = re.compile(rf"[\x21-\x7e]{{1,{MAX_HUB_TOKEN_CHARS}}}\Z")
_ROLE = re.compile(r"[A-Za-z0-9_-]+\Z")


def check_adapter_id(adapter_id: str, *, field: str = "adapter_id") -> AdapterId:
    """Returns a well-formed `adapter_id`; checked once, where it comes in.

    Raises InvalidAdapterId: an id is never a path or an address and cannot be read as one.
    """
    if len(adapter_id) > MAX_ADAPTER_ID_CHARS or ".." in adapter_id or not _ADAPTER_ID.match(adapter_id):
        raise InvalidAdapterId(
            f"{field} {_shown(adapter_id)} is not a valid name: use ASCII letters, digits, '.', '_' and '-' (none of "
            f"these three first, no '.' last or twice in a row), at most one '/' and {MAX_ADAPTER_ID_CHARS} characters",
            field=field,
        )
    return AdapterId(adapter_id)


def check_adapter_ref(ref: str, *, field: str = "adapter_id") -> AdapterId:
    """Returns a well-formed adapter id, or one with a version: NAME@DIGEST, of whose digits some suffice. Raises
    InvalidAdapterId."""
    name, at, version = ref.partition("@")
    check_adapter_id(name, field=field)
    if at and not _VERSION.match(version):
        raise InvalidAdapterId(
            f"{field} {_shown(ref)} names no version: give at least {MIN_VERSION_CHARS} hexadecimal digits of the "
            "digest after '@', in lower case",
            field=field,
        )
    return AdapterId(ref)


def name_in(ref: str) -> str:
    """The adapter's name in a reference, without the version."""
    return ref.partition("@")[0]


def held_name(ref: str, origin: AdapterOrigin) -> str:
    """The name that a request for `ref` holds an adapter by; empty for a caller's own access, which no listing has."""
    return "" if origin.source else name_in(ref)


def check_adapter_source(source: str, *, field: str = "source") -> str:
    """Returns a well-formed place: a repository, a place in a bucket, or the path of a folder, absolute or below the
    adapter root; the source sees that it stays there. Raises InvalidArgument, and Unimplemented for an address."""
    if "://" in source:
        raise Unimplemented(
            f"`{field}` {_shown(source)} is an address: adapters come from folders in the server's directory of "
            "adapters, from hub:ORG/NAME or from s3:BUCKET/PREFIX",
            field=field,
        )
    if source.startswith(HUB_SOURCE):
        check_repository(source.removeprefix(HUB_SOURCE), field=field)
        return source
    steps = source.removeprefix("/").removesuffix("/").split("/")
    if len(source) > MAX_SOURCE_CHARS or not source.isprintable() or not {"", ".", ".."}.isdisjoint(steps):
        is_bucket = source.startswith(S3_SOURCE)
        wanted = "a place in a bucket: write s3:BUCKET/PREFIX" if is_bucket else "the path of a folder: write it"
        raise InvalidArgument(
            f"`{field}` {_shown(source)} is not {wanted} without '.', '..' and empty steps, {MAX_SOURCE_CHARS} "
            "characters at most",
            field=field,
        )
    return source


def check_repository(name: str, *, field: str = "source") -> AdapterId:
    """Returns a well-formed name of a repository on the Hub, that of a `field` hub:ORG/NAME. Raises InvalidArgument."""
    if "/" not in name or len(name) > MAX_ADAPTER_ID_CHARS or ".." in name or not _ADAPTER_ID.match(name):
        raise InvalidArgument(
            f"`{field}` {_shown(name)} is not a repository on the Hub: write hub:ORG/NAME, with letters, digits, '.', "
            f"'_' and '-', {MAX_ADAPTER_ID_CHARS} characters at most",
            field=field,
        )
    return AdapterId(name)


def check_on_hub(source: str, *, field: str) -> None:
    """Raises Unimplemented for a `field` that goes with a `source` on the Hub only."""
    if not source.startswith(HUB_SOURCE):
        raise Unimplemented(
            f"`{field}` is of repositories on the Hub: give `source` as hub:ORG/NAME beside it, or leave it out",
            field=field,
        )


def check_revision(revision: str, *, field: str = "revision") -> str:
    """Returns a well-formed branch, tag or commit of a repository. Raises InvalidArgument."""
    if not _REVISION.match(revision) or ".." in revision:
        raise InvalidArgument(
            f"`{field}` {_shown(revision)} is not a branch, a tag or a commit: use letters, digits, '.', '_', '-' and "
            f"'/', {MAX_ID_CHARS} characters at most",
            field=field,
        )
    return revision


def check_hub_token(token: str, *, field: str) -> str:
    """Returns a well-formed token for the Hub. Raises InvalidArgument, which does not show it."""
    if not _HUB_TOKEN.match(token):
        raise InvalidArgument(
            f"`{field}` is not a token: printable ASCII without spaces, {MAX_HUB_TOKEN_CHARS} characters at most",
            field=field,
        )
    return token


def check_digest(digest: str) -> str:
    """Returns a well-formed digest of an adapter. Raises InvalidArgument."""
    if not _DIGEST.match(digest):
        raise InvalidArgument(
            f"`expected_digest` {_shown(digest)} is not a digest: give all 64 hexadecimal digits, in lower case",
            field="expected_digest",
        )
    return digest


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
