"""Certificates that a router and a worker ask of their clients."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.certificates import Pair, new_pair
from support.fake_workers import FAST_WATCH, FakeWorker, until

from loraplex import AsyncClient, ServerUnreachable, Tls
from loraplex_router.config import HttpServerConfig, RouterConfig
from loraplex_router.server import Router, start_router
from loraplex_runtime import reload


@dataclass
class Site:
    """A router before a worker, with the files that it follows."""

    folder: Path
    authority: Pair  # of clients
    foreign: Pair
    alice: Pair  # a client
    server: Pair  # of both servers
    shown: Pair  # of the router, to its worker
    ca: Path  # of the router's clients
    router: Router

    async def is_let_in(self, pair: Pair | None) -> tuple[bool, bool]:
        """True where a client with this pair gets an answer, by gRPC and by HTTP."""
        return await self._by_grpc(pair), await asyncio.to_thread(self._by_http, pair)

    async def _by_grpc(self, pair: Pair | None) -> bool:
        own = () if pair is None else (pair.key.read_bytes(), pair.cert.read_bytes())
        tls = Tls(self.server.cert.read_bytes(), *own)
        async with AsyncClient(self.router.address, tls=tls, retries=0) as client:
            try:
                return bool((await client.generate("x", timeout_s=10)).text)
            except ServerUnreachable:
                return False

    def _by_http(self, pair: Pair | None) -> bool:
        context = ssl.create_default_context(cafile=self.server.cert)
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        assert self.router.http is not None
        try:
            return httpx2.get(f"https://{self.router.http.address}/health", verify=context).status_code == 200
        except httpx2.TransportError:
            return False


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(reload, "POLL_S", 0.05)
    authority, foreign, server = (new_pair(tmp_path, name) for name in ("authority", "foreign", "server"))
    alice, shown = (new_pair(tmp_path, name, by=authority) for name in ("alice", "shown"))
    ca = tmp_path / "ca"
    ca.write_bytes(authority.cert.read_bytes())
    worker = await FakeWorker("w", tls=(server.key, server.cert), client_ca=authority.cert).start()
    config = RouterConfig(
        workers=(worker.address,),
        port=0,
        http_port=0,
        tls_cert=server.cert,
        tls_key=server.key,
        tls_client_ca=ca,
        worker_ca=server.cert,
        worker_client_cert=shown.cert,
        worker_client_key=shown.key,
        watch=FAST_WATCH,
    )
    router = await start_router(config)
    try:
        yield Site(tmp_path, authority, foreign, alice, server, shown, ca, router)
    finally:
        await router.drain(0.0)
        await worker.stop()


async def test_clients_with_a_certificate_are_let_in_alone(site: Site) -> None:
    assert await site.is_let_in(site.alice) == (True, True)
    assert await site.is_let_in(None) == (False, False)
    assert await site.is_let_in(site.foreign) == (False, False)
    # Both authorities, then the other one alone.
    site.ca.write_bytes(site.authority.cert.read_bytes() + site.foreign.cert.read_bytes())
    await _until(lambda: site.is_let_in(site.foreign))
    assert await site.is_let_in(site.alice) == (True, True)
    site.ca.write_bytes(site.foreign.cert.read_bytes())
    await _until(lambda: site.is_let_in(site.alice), (False, False))
    assert await site.is_let_in(site.foreign) == (True, True)


async def test_a_router_shows_its_workers_the_certificate_of_now(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert site.router.replicas.num_routable == 1
    good = Pair(site.folder / "good.crt", site.folder / "good.key")
    site.shown.copy_to(good)
    site.foreign.copy_to(site.shown)
    await until(lambda: site.router.replicas.num_routable == 0)
    await until(lambda: "it may refuse the certificate shown: --worker-client-cert" in caplog.text)
    good.copy_to(site.shown)
    await until(lambda: site.router.replicas.num_routable == 1)
    assert await site.is_let_in(site.alice) == (True, True)


async def test_an_http_port_by_itself_before_a_server_that_asks(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    before = HttpServerConfig(server=site.router.address, port=0, server_ca=site.server.cert)
    for own, num_routable in (({}, 0), ({"cert": site.alice.cert, "key": site.alice.key}, 1)):
        shown = {f"server_client_{name}": path for name, path in own.items()}
        router = await start_router(replace(before, **shown).router())
        try:
            assert router.replicas.num_routable == num_routable
        finally:
            await router.drain(0.0)
    assert "it may ask for a certificate: --server-client-cert" in caplog.text


async def _until(look: Any, wanted: tuple[bool, bool] = (True, True)) -> None:
    async with asyncio.timeout(10.0):
        while await look() != wanted:
            await asyncio.sleep(0.05)
