"""The HTTP port's certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Pair, certificate_of, new_pair
from support.fake_workers import until

from loraplex_contracts.errors import InvalidArgument
from loraplex_router.http.server import HttpServer, bind_http
from loraplex_runtime import reload
from loraplex_runtime.reload import Reloader


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("handshakes alone are tested")


@asynccontextmanager
async def serving(shown: Pair) -> AsyncIterator[str]:
    files = Reloader()
    with closing(bind_http("127.0.0.1", 0)) as bound:
        server = await HttpServer.start(app, bound, "127.0.0.1", files, (shown.cert, shown.key))
        files.start()
        try:
            yield server.address
        finally:
            files.stop()
            await server.stop()


async def shown_by(address: str, ciphers: str = "") -> str:
    return await asyncio.to_thread(certificate_of, address, ciphers)


async def test_a_port_shows_its_pair_until_another_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "POLL_S", 0.02)
    caplog.set_level("INFO")
    first, second, rsa = (new_pair(tmp_path, name, key=kind) for name, kind in (("1", "ec"), ("2", "ec"), ("3", "rsa")))
    pems = [pair.cert.read_text() for pair in (first, second, rsa)]
    shown = Pair(tmp_path / "shown.crt", tmp_path / "shown.key")
    first.copy_to(shown)
    async with serving(shown) as address:
        assert await shown_by(address) == pems[0]
        shown.cert.write_text(pems[1])
        await until(lambda: "stays in force" in caplog.text)
        assert await shown_by(address) == pems[0]
        second.copy_to(shown)
        await until(lambda: "in force from now on" in caplog.text)
        assert await shown_by(address) == pems[1]
        # Of another kind of key: nothing is left of the one before.
        caplog.clear()
        rsa.copy_to(shown)
        await until(lambda: "in force from now on" in caplog.text)
        assert await shown_by(address, "ECDHE-RSA-AES128-GCM-SHA256") == pems[2]
        with pytest.raises(ssl.SSLError):
            await shown_by(address, "ECDHE-ECDSA-AES128-GCM-SHA256")


async def test_a_key_that_is_too_weak_for_https_is_said_to_be(tmp_path: Path) -> None:
    weak = new_pair(tmp_path, "weak", key="weak")
    with pytest.raises(InvalidArgument, match="are too weak"):
        async with serving(weak):
            pass
