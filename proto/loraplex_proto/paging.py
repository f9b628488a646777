"""Pages of a listing of adapters, the same in router and worker.

A page token names the adapter before the next page, one that the caller was shown. It does not count adapters: those
that come or go between two pages make no other one appear twice or not at all. Pages hold whole adapters, all rows of
each. Owns the limits and the token's format; keeps nothing between two pages.
"""

from __future__ import annotations

import base64
import os.path
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from loraplex_contracts.adapters import MAX_ADAPTER_ID_CHARS, check_adapter_ref
from loraplex_contracts.errors import InvalidAdapterId, InvalidArgument, ListingTooLarge
from loraplex_proto.v1 import adapter_pb2

MAX_PAGE_SIZE: Final = 1000
MAX_PAGE_BYTES: Final = 1 << 20
MAX_ANSWER_BYTES: Final = 4 << 20  # what a gRPC client takes unless it was told otherwise

_VERSION: Final = b"\x01"
_HEADER_BYTES: Final = 5  # the version, and which listing it belongs to
_PREFIX = re.compile(r"[A-Za-z0-9._/@-]*\Z")


@dataclass(frozen=True, slots=True)
class ListQuery:
    """A ListAdaptersRequest, checked."""

    include_unloaded: bool = False
    prefix: str = ""
    state: int = adapter_pb2.ADAPTER_STATE_UNSPECIFIED  # any
    page_size: int = 0  # all
    after: str = ""  # the adapter before the first one of this page

    def request(self) -> adapter_pb2.ListAdaptersRequest:
        """The request that asks another server for the same page."""
        return adapter_pb2.ListAdaptersRequest(
            include_unloaded=self.include_unloaded,
            page_size=self.page_size,
            page_token=page_token(self, self.after) if self.after else "",
            prefix=self.prefix,
            state=self.state,  # pyright: ignore[reportArgumentType]  # any number is one on the wire
        )


def list_query(request: adapter_pb2.ListAdaptersRequest) -> ListQuery:
    """The request, checked. Raises InvalidArgument with the field."""
    if request.page_size < 0:
        raise InvalidArgument(
            f"`page_size` must be 0 (all at once) or more; it is {request.page_size}", field="page_size"
        )
    if len(request.prefix) > MAX_ADAPTER_ID_CHARS or not _PREFIX.match(request.prefix):
        raise InvalidArgument(
            "no adapter id begins with `prefix`: use letters, digits, '.', '_', '-', '/' and '@', "
            f"{MAX_ADAPTER_ID_CHARS} characters at most",
            field="prefix",
        )
    query = ListQuery(request.include_unloaded, request.prefix, request.state, min(request.page_size, MAX_PAGE_SIZE))
    return replace(query, after=last_of_page(query, request.page_token)) if request.page_token else query


def page_token(query: ListQuery, after: str) -> str:
    """The token of the page behind the adapter `after`."""
    return base64.urlsafe_b64encode(_VERSION + _checksum(query) + after.encode()).decode()


def visible_part(query: ListQuery, allowed: Sequence[str]) -> ListQuery | None:
    """The part of the listing that can hold adapters of the caller (`allowed`: globs of adapter ids), so that the rest
    is not read; None: no part."""
    literal = [re.split(r"[*?[]", glob, maxsplit=1)[0] for glob in allowed]
    theirs = os.path.commonprefix(literal)  # noqa: RUF071  # of names, not of paths
    if not allowed or not (theirs.startswith(query.prefix) or query.prefix.startswith(theirs)):
        return None
    return replace(query, prefix=max(theirs, query.prefix, key=len))


class Page:
    """An answer that is put together adapter by adapter, in their order."""

    def __init__(self, query: ListQuery) -> None:
        self.response = adapter_pb2.ListAdaptersResponse()
        self._query = query
        self._num_adapters = 0
        self._num_bytes = 0
        self._last = ""

    def add(self, adapter_id: str, rows: Sequence[adapter_pb2.Adapter]) -> bool:
        """Adds an adapter's rows. False: the page is full, and this adapter begins the next one. Raises ListingTooLarge
        where everything was to come at once."""
        num_bytes = self._num_bytes + sum([row.ByteSize() + 4 for row in rows])  # with the tag and the length of each
        if not self._query.page_size:
            if num_bytes > MAX_ANSWER_BYTES:
                raise ListingTooLarge(
                    f"the listing takes more than {MAX_ANSWER_BYTES >> 20} MiB: set `page_size` (up to "
                    f"{MAX_PAGE_SIZE}) and follow `next_page_token`, or narrow it down with `prefix` or `state`",
                    field="page_size",
                )
        elif self._num_adapters == self._query.page_size or (self._num_adapters and num_bytes > MAX_PAGE_BYTES):
            self.response.next_page_token = page_token(self._query, self._last)
            return False
        self.response.adapters.extend(rows)
        self._num_adapters += 1
        self._num_bytes = num_bytes
        self._last = adapter_id
        return True


def _checksum(query: ListQuery) -> bytes:
    """Checksum of the fields that a token belongs to, so that a token of another listing is noticed."""
    return zlib.crc32(f"{query.include_unloaded} {query.state} {query.prefix}".encode()).to_bytes(4, "big")


def last_of_page(query: ListQuery, token: str) -> str:
    """The last adapter of the page that came with `token`. Raises InvalidArgument."""
    try:
        raw = base64.b64decode(token, altchars=b"-_", validate=True)
        if raw[:1] != _VERSION:
            raise ValueError("another version")
        after = check_adapter_ref(raw[_HEADER_BYTES:].decode("ascii"))
    except (ValueError, InvalidAdapterId) as error:
        raise InvalidArgument(
            "`page_token` is not a token of this listing: send `next_page_token` as it came, or none to begin again",
            field="page_token",
        ) from error
    if raw[1:_HEADER_BYTES] != _checksum(query):
        raise InvalidArgument(
            "`page_token` belongs to another listing: leave `include_unloaded`, `prefix` and `state` as they were",
            field="page_token",
        )
    return after
