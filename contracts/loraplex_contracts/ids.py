"""Syntax of adapter ids, request ids, cache salts and chat roles.

Allow-lists, each one regular expression without backtracking. Imports nothing beyond the standard library, because the
engine checks adapter ids too and runs without gRPC and protobuf.
"""

from __future__ import annotations

import re
from typing import NewType

from loraplex_contracts.errors import InvalidAdapterId, InvalidArgument

AdapterId = NewType("AdapterId", str)  # a name that `check_adapter_id` has passed; empty for none
NO_ADAPTER = AdapterId("")

MAX_ADAPTER_ID_CHARS = 128
MAX_ID_CHARS = 128
MAX_ROLE_CHARS = 64

# "org/name" as the Hub has it, or a plain name. ASCII only (no look-alikes), no dot segments, never absolute.
_SEGMENT = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
_ADAPTER_ID = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})?\Z")
_ID = re.compile(r"[A-Za-z0-9._:-]+\Z")
_ROLE = re.compile(r"[A-Za-z0-9_-]+\Z")


def check_adapter_id(adapter_id: str, *, field: str = "adapter_id") -> AdapterId:
    """Returns `adapter_id` when it is a well-formed name: checked once, where it comes in.

    Raises InvalidAdapterId otherwise: an id is never a path, an address or anything that could be read as one.
    """
    if len(adapter_id) > MAX_ADAPTER_ID_CHARS or ".." in adapter_id or not _ADAPTER_ID.match(adapter_id):
        raise InvalidAdapterId(
            f"{field} {_shown(adapter_id)} is not a valid name: use letters, digits, '.', '_' and '-', with at most "
            f"one '/', {MAX_ADAPTER_ID_CHARS} characters at most",
            field=field,
        )
    return AdapterId(adapter_id)


def check_id(value: str, *, field: str) -> str:
    """A request id or a cache salt; never read as anything but an opaque string. Raises InvalidArgument."""
    if len(value) > MAX_ID_CHARS or not _ID.match(value):
        raise InvalidArgument(
            f"{field} {_shown(value)} is not valid: use letters, digits, '.', '_', ':' and '-', {MAX_ID_CHARS} "
            "characters at most",
            field=field,
        )
    return value


def check_role(role: str, *, field: str) -> str:
    """A chat role. Plain words only: templates write it between control tokens, where text could forge a turn."""
    if len(role) > MAX_ROLE_CHARS or not _ROLE.match(role):
        raise InvalidArgument(
            f"{field} {_shown(role)} is not a role: use 'system', 'user', 'assistant' or another plain word that the "
            "base model's chat template knows",
            field=field,
        )
    return role


def _shown(value: str) -> str:
    """For a message or a log line: ASCII, quoted, bounded."""
    return ascii(value[:40]) + ("..." if len(value) > 40 else "")
