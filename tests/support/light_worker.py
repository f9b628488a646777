"""A worker with the real front end and an engine that computes nothing."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from loraplex_server.config import EngineConfig, ModelConfig, WorkerConfig
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.process import EngineBuilder
from loraplex_server.grpc.server import Worker, start_worker
from loraplex_server.text.tokenizer import TextTokenizer
from support.engine_fakes import INFO, FakeCache, ScriptedRunner, build_slow, make_engine
from support.tiny_tokenizers import tiny_tokenizer


@contextlib.asynccontextmanager
async def light_worker(
    builder: EngineBuilder = build_slow,
    *,
    inline: bool = False,
    engine: Any = None,
    tokenizer: TextTokenizer | None = None,
    **settings: Any,
) -> AsyncIterator[Worker]:
    """A worker in this event loop, with the engine in a process of its own, unless `inline`."""
    config = WorkerConfig(EngineConfig(ModelConfig(INFO.model_id), **(engine or {})), **{"port": 0, **settings})
    tokenizer = tokenizer or TextTokenizer(tiny_tokenizer("byte_level"))
    worker = await start_worker(config, inline=inline, builder=builder, tokenizer=tokenizer)
    try:
        yield worker
    finally:
        await worker.drain(0.0)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}{# <tool_call> #}"
)


@contextlib.asynccontextmanager
async def scripted_worker(text: str, cache: FakeCache | None = None, **settings: Any) -> AsyncIterator[Worker]:
    """Answers every request with this text, token by token."""
    tokenizer = copy.copy(tiny_tokenizer("byte_level"))
    tokenizer.chat_template = CHAT_TEMPLATE
    script = tuple(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    info = replace(INFO, vocab_size=len(tokenizer))

    def build(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
        return make_engine(ScriptedRunner(script=script), cache, clock=time.monotonic, info=info)

    async with light_worker(build, inline=True, tokenizer=TextTokenizer(tokenizer), **settings) as worker:
        yield worker
