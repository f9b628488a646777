"""Workers' listings without engines."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from loraplex_adapters.cache.listing import Listing
from loraplex_adapters.sources.watch import SourceWatch
from loraplex_contracts.adapters import AdapterInfo, AdapterState, AdapterTier
from loraplex_proto.paging import list_query
from loraplex_proto.v1 import adapter_pb2
from loraplex_runtime.auth import EVERYBODY, Identity
from loraplex_server.grpc.adapter_service import AdapterListing

Response = adapter_pb2.ListAdaptersResponse


def info(name: str, state: AdapterState = "on_device", tier: AdapterTier = "device", digest: str = "d") -> AdapterInfo:
    return AdapterInfo(name, "lora", digest, state, tier, 1, 8, 0, False)


class ListingWorker:
    """The listing of one worker."""

    def __init__(self, found: Iterable[str] = (), own: tuple[str, ...] = ()) -> None:
        self.held = Listing()
        self.source = SimpleNamespace(names=sorted(found), has_looked=True)
        self._listing = AdapterListing(lambda: self.held, cast(SourceWatch, self.source), own)

    def put(self, *rows: AdapterInfo) -> None:
        self.held.apply_changes({(row.adapter_id, row.digest): (row,) for row in rows})  # type: ignore[misc]

    def drop(self, name: str, digest: str = "d") -> None:
        self.held.apply_changes({(name, digest): ()})  # type: ignore[dict-item]

    async def ask(self, identity: Identity = EVERYBODY, **fields: Any) -> Response:
        return await self._listing.page(list_query(adapter_pb2.ListAdaptersRequest(**fields)), identity)

    async def walk(self, identity: Identity = EVERYBODY, **fields: Any) -> list[Response]:
        pages = [await self.ask(identity, **fields)]
        while token := pages[-1].next_page_token:
            pages.append(await self.ask(identity, page_token=token, **fields))
        return pages


def names_of(*pages: Response) -> list[str]:
    return [row.adapter_id for page in pages for row in page.adapters]
