"""Oracle for hybrids: Transformers' recurrences in float64, over whole texts.

Transformers computes them in float32, which in a float64 comparison is the larger error; and some families continue
from a cache wrongly, so that the whole text without a cache is what counts.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

NAMES = (
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
)


@contextmanager
def exact(model: nn.Module) -> Generator[None]:
    """The model's recurrences compute in float64 within the block."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    before: list[tuple[Any, str, Any]] = []
    for module in modules:
        for name in NAMES:
            if (function := vars(module).get(name)) is not None:
                before.append((module, name, function))
                setattr(module, name, _in_float64(inspect.unwrap(function), vars(module)))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _in_float64(function: Any, scope: dict[str, Any]) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]
    source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    source = re.sub(r"^def \w+", "def copied", source)
    found: dict[str, Any] = {}
    exec(source, scope | {}, found)  # the installed Transformers' own code
    return found["copied"]


def whole_text_greedy(
    model: nn.Module, prompt: Sequence[int], num_tokens: int, allowed: Sequence[int] = ()
) -> list[int]:
    """The most probable tokens behind `prompt`, of those allowed where some are named, each from a run over the whole
    text."""
    tokens: list[int] = []
    with torch.inference_mode(), exact(model):
        for _ in range(num_tokens):
            ids = torch.tensor([[*prompt, *tokens]])
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
            tokens.append(allowed[int(logits[list(allowed)].argmax())] if allowed else int(logits.argmax()))
    return tokens
