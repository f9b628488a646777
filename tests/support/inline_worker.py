"""A whole worker in threads of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, WorkerConfig
from loraplex_server.grpc.server import Worker, start_worker


def small_engine(model: Path, adapters: AdaptersConfig) -> EngineConfig:
    """In float64, with little memory."""
    return EngineConfig(
        ModelConfig(str(model), dtype="float64"),
        KvConfig(memory_bytes=4 << 20),
        BatchConfig(max_running=8, max_queued=64),
        adapters,
    )


@contextlib.contextmanager
def inline_worker(config: WorkerConfig) -> Iterator[Worker]:
    """Runs until the block ends; then drains and requires that nothing is unaccounted for."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="worker-loop", daemon=True)
    thread.start()

    def call(coroutine: object, timeout_s: float = 120) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)  # type: ignore[arg-type]

    worker = call(start_worker(config, inline=True))
    assert isinstance(worker, Worker)
    try:
        yield worker
    finally:
        call(worker.drain(1.0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
    assert worker.engine.integrity == ""
