"""Who an adapter is. Torch-free, because the router reads it too.

A *name* (adapter id) is what a request says; a *key* is what it means: the kind and the digest of the content. Two names
with the same bytes share one key; a name whose files changed gets another one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from loraplex_proto.errors import InvalidAdapterId

AdapterKind = Literal["lora", "medusa", "combined"]

MAX_ADAPTER_ID_CHARS = 128
# "org/name" as the Hub has it, or a plain name. ASCII only (no look-alikes), no dot segments, never absolute.
_SEGMENT = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
_ADAPTER_ID = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})?\Z")


@dataclass(frozen=True, slots=True, order=True)
class AdapterKey:
    """Identity by content: equal keys have equal weights, bit for bit."""

    kind: AdapterKind
    digest: str  # 64 hexadecimal digits (SHA-256)

    def __str__(self) -> str:
        return f"{self.kind}:{self.digest}"


def check_adapter_id(adapter_id: str) -> str:
    """Returns `adapter_id` when it is a well-formed name.

    Raises InvalidAdapterId otherwise: an id is never a path, an address or anything that could be read as one.
    """
    if len(adapter_id) > MAX_ADAPTER_ID_CHARS or ".." in adapter_id or not _ADAPTER_ID.match(adapter_id):
        shown = ascii(adapter_id[:40])
        raise InvalidAdapterId(
            f"adapter_id {shown} is not a valid name: use letters, digits, '.', '_' and '-', with at most one '/', "
            f"{MAX_ADAPTER_ID_CHARS} characters at most",
            field="adapter_id",
        )
    return adapter_id
