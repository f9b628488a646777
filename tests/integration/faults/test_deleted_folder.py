"""Fault of a server whose working directory is deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from support.faults import Stopwatch, fault
from support.processes import loraplex
from support.world import TinyWorld

from loraplex import AsyncClient, Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
LONG_TEXT = "ab " * 100_000  # tokenized in a process of its own
CHAT = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ messages[0].content }}", "max_tokens": 3}


@fault(
    "working directory of `serve` deleted, then its engine killed",
    clients_see="nothing of the first; then ENGINE_LOST, and another worker takes its place",
    within_s=90,
)
async def test_a_deleted_working_directory(tiny_world: TinyWorld, tmp_path: Path, stopwatch: Stopwatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = ("serve", str(tiny_world.model), "--adapters", str(tiny_world.adapters), "--port", "0", "--threads", "1")
    with loraplex(*command, "--request-templates", folder=folder) as serve:
        folder.rmdir()

        async def ask(client: AsyncClient) -> str:
            assert len((await client.tokenize(LONG_TEXT)).token_ids) >= len(LONG_TEXT)
            assert (await client.generate(**CHAT)).text  # type: ignore[arg-type]
            return (await client.generate("hello", adapter_id=tiny_world.names[0], max_tokens=8)).text

        async with AsyncClient(serve.address, retries=0) as client:
            (worker,) = (one for one in psutil.Process(serve.process.pid).children() if "worker" in one.cmdline())
            (engine,) = (one for one in worker.children() if "spawn_main" in str(one.cmdline()))
            text = await ask(client)
            engine.kill()
            stopwatch.start()
            async with asyncio.timeout(100):
                while True:
                    try:
                        assert await ask(client) == text
                        break
                    except Unavailable:
                        await asyncio.sleep(0.2)
            stopwatch.stop()
        assert serve.end() == 0
