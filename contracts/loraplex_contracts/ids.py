"""Syntax of adapter ids, request ids, cache salts and chat roles.

Each is an allow-list in one regular expression without backtracking.
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
