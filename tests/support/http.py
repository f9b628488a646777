"""The HTTP port of a router in front of scripted workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import httpx2

from loraplex_proto.v1 import adapter_pb2
from support.fake_workers import Cluster, cluster, until


class Http(httpx2.AsyncClient):
    """A client of the cluster's HTTP port."""

    async def complete(self, **fields: Any) -> httpx2.Response:
        return await self.post("/v1/completions", json={"prompt": "hi", **fields})


@contextlib.asynccontextmanager
async def http_cluster(num_workers: int = 1, **options: Any) -> AsyncGenerator[tuple[Cluster, Http]]:
    async with cluster(num_workers, http_port=0, **options) as c:
        assert c.router.http is not None
        await until(lambda: c.router.replicas.num_routable == num_workers)
        async with Http(base_url=f"http://{c.router.http.address}", timeout=20, trust_env=False) as client:
            yield c, client


def adapters_of(c: Cluster, *names: str) -> None:
    """Gives all workers these adapters."""
    for worker in c.workers:
        for name in names:
            worker.adapters[name] = adapter_pb2.Adapter(adapter_id=name, digest=name[:1] * 64, kind="lora", rank=8)
