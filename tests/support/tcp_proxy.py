"""TCP proxy that can stop forwarding."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class TcpProxy:
    """Owns its connections. While it is stopped it accepts and keeps them, and no byte passes either way."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._forwards = asyncio.Event()
        self._forwards.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop_forwarding(self) -> None:
        self._forwards.clear()

    def resume(self) -> None:
        self._forwards.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            await self._forwards.wait()
            to_reader, to_writer = await asyncio.open_connection(*self._target)
            writers.append(to_writer)
            await asyncio.gather(self._copy(reader, to_writer), self._copy(to_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the proxy is closed
        finally:
            self._tasks.discard(task)
            for one in writers:
                one.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._forwards.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # ends the other direction too


@contextlib.asynccontextmanager
async def tcp_proxy(address: str) -> AsyncIterator[TcpProxy]:
    """A proxy in front of `address`, host:port."""
    host, _, port = address.rpartition(":")
    proxy = TcpProxy(host, int(port))
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
