"""The worker's gRPC server."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from support.engine_fakes import build_slow
from support.fake_workers import until
from support.light_worker import light_worker

from loraplex import AsyncClient
from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, Unavailable
from loraplex_runtime.listener import check_free
from loraplex_server.config import ChatConfig, EngineConfig, ModelConfig, WorkerConfig
from loraplex_server.engine.client import EngineClient
from loraplex_server.engine.engine import Engine
from loraplex_server.grpc import server
from loraplex_server.grpc.server import run_worker, start_worker


async def test_a_worker_holds_its_port_while_its_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    is_loaded = threading.Event()

    def build(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
        is_loaded.wait(60)
        return build_slow(config, progress, notify)

    def is_taken() -> bool:
        try:
            check_free("127.0.0.1", port)
        except FailedPrecondition:
            return True
        return False

    async def serve() -> str:
        async with light_worker(build, inline=True, port=port) as worker, AsyncClient(worker.address) as client:
            return (await client.generate("hello", max_tokens=2)).finish_reason

    serving = asyncio.ensure_future(serve())
    try:
        await until(is_taken)
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(Unavailable, match="this worker is starting") as refused:
                await client.generate("hello", max_tokens=2)
            assert refused.value.retry_after_s == 1.0
    finally:
        is_loaded.set()
    assert await serving == "length"


@pytest.mark.parametrize("stalled", ["", "it has been in one step for 70 s"])
async def test_an_engine_that_stalls_before_the_worker_serves_is_not_served(
    monkeypatch: pytest.MonkeyPatch, stalled: str
) -> None:
    monkeypatch.setattr(EngineClient, "stalled", stalled)
    async with light_worker(build_slow, inline=True) as worker:
        assert worker.listener.health.is_ready == (not stalled)


async def test_a_chat_template_of_another_syntax_is_refused_at_the_start(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}\n{{ m.content }}{% endif %}")
    engine = EngineConfig(ModelConfig("m"))
    config = WorkerConfig(engine, ChatConfig(template), port=0)
    with pytest.raises(InvalidArgument, match=r"chat\.jinja is not a chat template: line 2: .*endif") as refused:
        await start_worker(config, inline=True, builder=build_slow)
    assert refused.value.field == "--chat-template"


async def test_transformers_is_imported_while_the_model_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    is_imported, found = threading.Event(), list[bool]()
    monkeypatch.setattr(server, "import_library", is_imported.set)

    def build(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
        found.append(is_imported.wait(30))
        return build_slow(config, progress, notify)

    template = tmp_path / "chat.jinja"  # refused once the engine is ready
    template.write_text("{%")
    with pytest.raises(InvalidArgument, match="is not a chat template"):
        await start_worker(
            WorkerConfig(EngineConfig(ModelConfig("m")), ChatConfig(template), port=0), inline=True, builder=build
        )
    assert found == [True]


async def test_a_start_without_an_engine_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise InvalidArgument("no process")

    imported = list[bool]()
    monkeypatch.setattr(server, "import_library", lambda: imported.append(True))
    monkeypatch.setattr(EngineClient, "start", fails)
    with pytest.raises(InvalidArgument, match="no process"):
        await start_worker(WorkerConfig(EngineConfig(ModelConfig("m")), port=0), inline=True, builder=build_slow)
    assert not imported


async def test_collections_do_not_go_through_what_a_worker_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Mock(engine=Mock(lost=asyncio.Event(), stop=AsyncMock()))
    worker.engine.lost.set()
    monkeypatch.setattr(server, "start_worker", AsyncMock(return_value=worker))
    monkeypatch.setattr(server, "Ending", lambda: Mock(asked=asyncio.Event(), announce_s=Mock(), drain=AsyncMock()))
    counts: list[int] = []
    gc.unfreeze()
    try:
        assert await run_worker(Mock(), on_ready=lambda _: counts.append(gc.get_freeze_count())) == 1
    finally:
        gc.unfreeze()
    assert counts[0] > 0
