"""Tokens per step of Medusa heads, measured by decoding on the engine.

Accuracy at held-out positions promises more than serving gives: it counts whole drafts from each position, while an
engine chooses draft lengths by what was accepted and computes in the dtype and by the kernels that it serves with.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex_contracts.adapters import NO_ADAPTER, AdapterId
from loraplex_contracts.request import CompletionEnd, Request, RequestFailed, SpeculationParams, StoppingParams, Tokens
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
    that the heads draft for. Raises LoraplexError where the engine cannot serve the model or them."""
    gc.collect()  # a model that was just trained on may be part of cycles
    with tempfile.TemporaryDirectory(prefix="loraplex-") as scratch:
        root, store = Path(scratch) / "adapters", Path(scratch) / "store"
        for name, source in ((LORA, adapter), (HEADS, heads)):
            if source is not None:
                shutil.copytree(source, root / name)
        config = EngineConfig(
            model=ModelConfig(base, dtype=dtype, device=device),
            kv=KvConfig(prefix_caching=False),
            batch=BatchConfig(max_running=1),
            adapters=AdaptersConfig(root=root, store_dir=store),
        )
        engine = build_engine(config, lambda _: None, lambda: None)
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
