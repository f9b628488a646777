"""Tokens per step of Medusa heads, measured by decoding on the engine.

Accuracy at held-out positions promises more than serving gives: it counts whole drafts from each position, while an
engine chooses draft lengths by what was accepted and computes in the dtype and by the kernels that it serves with.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex_adapters.formats.files import (
    ADDED_TOKENS_NAME,
    CONFIG_NAME,
    MEDUSA_WEIGHTS_NAME,
    MODEL_CONFIG_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
)
from loraplex_contracts.adapters import NO_ADAPTER, AdapterId
from loraplex_contracts.errors import FailedPrecondition
from loraplex_contracts.request import CompletionEnd, Request, RequestFailed, SpeculationParams, StoppingParams, Tokens
from loraplex_runtime.reports import no_progress
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig
from loraplex_server.engine.assembly import build_engine
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Submit
from loraplex_training.progress import Advance
from loraplex_training.target import Example

MAX_PROMPTS: Final = 32  # minutes on a CPU, for models of a few billion parameters
MAX_TEXT_PROMPT: Final = 32  # tokens of a text that was given whole, as the prompt of its rest
LORA: Final = AdapterId("lora")
HEADS: Final = AdapterId("heads")
# Their files that serving reads.
LORA_NAMES: Final = (CONFIG_NAME, WEIGHTS_NAME, TOKENIZER_NAME, ADDED_TOKENS_NAME)
HEADS_NAMES: Final = (MODEL_CONFIG_NAME, MEDUSA_WEIGHTS_NAME)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of decoding."""

    num_prompts: int
    num_tokens: int
    num_steps: int  # of the model, for these tokens

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / max(1, self.num_steps)


def prompts_of(heldout: Sequence[Example]) -> list[list[int]]:
    """Prompts to decode: those given, or the beginnings of texts."""
    found = [
        each.token_ids[: each.num_given or min(MAX_TEXT_PROMPT, max(1, len(each.token_ids) // 4))] for each in heldout
    ]
    return [prompt for prompt in found if prompt][:MAX_PROMPTS]


def decode(
    base: str,
    heads: Path,
    prompts: Sequence[Sequence[int]],
    *,
    adapter: Path | None,
    max_new_tokens: int,
    dtype: str,
    device: str,
    advance: Advance,
) -> Decoded:
    """Greedy answers to the prompts, one at a time, with the engine's own choice of draft lengths. `adapter`: the LoRA
    that the heads draft for. Raises LoraplexError where the engine cannot serve the model or them, or where there is no
    room for copies of their files."""
    gc.collect()  # a model that was just trained on may be part of cycles
    with _copies(adapter, heads) as scratch, _quiet_engine():
        config = EngineConfig(
            model=ModelConfig(base, dtype=dtype, device=device),
            kv=KvConfig(prefix_caching=False),
            batch=BatchConfig(max_running=1),
            adapters=AdaptersConfig(root=scratch / "adapters", store_dir=scratch / "store"),
            log_level="error",
        )
        engine = build_engine(config, no_progress, lambda: None)
        try:
            num_tokens = num_steps = 0
            for number, prompt in enumerate(prompts):
                request = Request(
                    str(number),
                    tuple(prompt),
                    StoppingParams(max_tokens=max_new_tokens),
                    adapter_id=LORA if adapter is not None else NO_ADAPTER,
                    speculation=SpeculationParams("medusa", medusa_id=HEADS),
                )
                tokens, steps = _answer(engine, request)
                num_tokens += tokens
                num_steps += steps
                advance(f"{num_tokens / max(1, num_steps):.2f} tokens per step")
        finally:
            engine.close()
    return Decoded(len(prompts), num_tokens, num_steps)


@contextmanager
def _copies(adapter: Path | None, heads: Path) -> Generator[Path]:
    """A temporary folder with the files that serving reads. Raises FailedPrecondition where they cannot be copied."""
    with contextlib.ExitStack() as scratch:
        try:
            made = tempfile.TemporaryDirectory(prefix="loraplex-", ignore_cleanup_errors=True)
            folder = Path(scratch.enter_context(made))
            if adapter is not None:
                _copy_files(adapter, LORA_NAMES, folder / "adapters" / LORA)
            _copy_files(heads, HEADS_NAMES, folder / "adapters" / HEADS)
        except OSError as error:
            raise FailedPrecondition(f"the temporary folder cannot be used: {error.strerror or error}") from error
        yield folder


def _copy_files(source: Path, names: Sequence[str], folder: Path) -> None:
    """Copies those of the files that are there. What else lies beside an adapter may be anything."""
    folder.mkdir(parents=True)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


@contextmanager
def _quiet_engine() -> Generator[None]:
    """Silences the engine's warnings, which would break up the bars. Its errors are raised."""
    # build_engine sets the level of the second.
    loggers = [logging.getLogger(name) for name in ("loraplex_adapters", "loraplex_server")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _answer(engine: Engine, request: Request) -> tuple[int, int]:
    """Number of tokens and of steps."""
    engine.handle(Submit(request))
    num_tokens = num_steps = 0
    while True:
        batch = engine.turn()
        for event in batch.events if batch is not None else ():
            if isinstance(event, RequestFailed):
                raise event.error
            if isinstance(event, Tokens):
                num_tokens += len(event.token_ids)
                num_steps += event.num_steps
            if isinstance(event, CompletionEnd):
                return num_tokens, num_steps
