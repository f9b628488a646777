"""One listing out of several workers' pages.

Every page is asked for by the adapter before it, of whoever is there: a worker that comes or goes between two pages
changes which rows an adapter has. It neither breaks a token nor repeats an adapter. Owns nothing but the turns in
which pages are put together, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from loraplex_contracts.errors import Internal
from loraplex_proto.paging import MAX_PAGE_SIZE, ListQuery, Page, last_of_page, visible_part
from loraplex_proto.v1 import adapter_pb2
from loraplex_runtime.auth import Identity

# Of all workers together, asked for at once: reading them takes the event loop some milliseconds.
MAX_ROWS = 1000
MIN_PAGE_SIZE = 50

Response = adapter_pb2.ListAdaptersResponse
Ask = Callable[[ListQuery], Awaitable[Sequence[Response]]]


class MergedListing:
    """Pages for clients."""

    def __init__(self, max_rows: int = MAX_ROWS, min_page_size: int = MIN_PAGE_SIZE) -> None:
        self._max_rows = max_rows
        self._min_page_size = min_page_size
        self._turn = asyncio.Semaphore()

    async def page(self, query: ListQuery, identity: Identity, num_workers: int, ask: Ask) -> Response:
        """The page that the client asked for. `ask` puts a query to all workers. Raises ListingTooLarge."""
        page = Page(query)
        part = visible_part(query, identity.adapters)
        if part is None:
            return page.response
        max_size = min(MAX_PAGE_SIZE, max(self._min_page_size, self._max_rows // max(1, num_workers)))
        # One more than fits on the page, because it has a token only if another adapter follows.
        size = min(query.page_size + 1, max_size) if query.page_size else max_size
        while True:
            part = replace(part, page_size=size)
            responses = await ask(part)
            async with self._turn:
                end = _common_end(part, responses)
                for adapter_id, rows in _by_adapter(responses, end):
                    if identity.may_use(adapter_id) and not page.add(adapter_id, rows):
                        return page.response
                await asyncio.sleep(0)  # others have theirs, however many listings there are
            if end is None:
                return page.response
            part, size = replace(part, after=end), max_size


def _common_end(part: ListQuery, responses: Sequence[Response]) -> str | None:
    """The adapter up to which every worker has said all; None where nobody has more to say."""
    ends = [last_of_page(part, response.next_page_token) for response in responses if response.next_page_token]
    end = min(ends, default=None)
    if end is not None and end <= part.after:
        raise Internal("a worker's listing does not go on; see that workers and router have the same version")
    return end


def _by_adapter(responses: Sequence[Response], end: str | None) -> Iterator[tuple[str, list[adapter_pb2.Adapter]]]:
    """In order of adapters, and for each in order of workers; a worker's own order stays."""
    rows = [row for response in responses for row in response.adapters if end is None or row.adapter_id <= end]
    rows.sort(key=attrgetter("adapter_id", "worker"))
    for adapter_id, of_one in groupby(rows, key=attrgetter("adapter_id")):
        yield adapter_id, list(of_one)
