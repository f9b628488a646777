"""A worker with the real front end and an engine that computes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from loraplex_server.config import EngineConfig, ModelConfig, WorkerConfig
from loraplex_server.engine.process import EngineBuilder
from loraplex_server.grpc.server import Worker, start_worker
from loraplex_server.text.tokenizer import TextTokenizer
from support.engine_fakes import INFO, build_slow
from support.tiny_tokenizers import tiny_tokenizer


@contextlib.asynccontextmanager
async def light_worker(
    builder: EngineBuilder = build_slow, *, inline: bool = False, engine: Any = None, **settings: Any
) -> AsyncIterator[Worker]:
    """In this event loop; the engine in a process of its own, unless `inline`."""
    config = WorkerConfig(EngineConfig(ModelConfig(INFO.model_id), **(engine or {})), **{"port": 0, **settings})
    tokenizer = TextTokenizer(tiny_tokenizer("byte_level"))
    worker = await start_worker(config, inline=inline, builder=builder, tokenizer=tokenizer)
    try:
        yield worker
    finally:
        await worker.drain(0.0)
