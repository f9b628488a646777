"""The same mixed batch in PEFT, with Transformers' cache and attention."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from gpu_bench.machine import synchronize
from gpu_bench.shapes import Shape, make_model

NEEDED_S = 60.0
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def problem() -> str:
    return "" if find_spec("peft") is not None else "the package peft is not installed"


def mixed_batch(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a decode step of Transformers, and of PEFT's mixed batch: no request has an adapter, each has its
    own."""
    batch = shape.verify_batch
    model = make_model(shape, device).eval()
    names = [f"a{idx}" for idx in range(batch)]
    found: dict[str, Any] = {"batch": batch}
    with torch.inference_mode():
        found["base_ms"] = 1000 * _step_s(model, shape, batch, device)
        peft = _with_adapters(model, shape, names)
        found["unnamed_ms"] = 1000 * _step_s(peft, shape, batch, device, adapter_names=["__base__"] * batch)
        found["distinct_ms"] = 1000 * _step_s(peft, shape, batch, device, adapter_names=names)
    del model, peft
    gc.collect()
    return found


def _with_adapters(model: PreTrainedModel, shape: Shape, names: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=shape.rank, lora_alpha=2 * shape.rank, target_modules=LINEARS, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, config, adapter_name=names[0], autocast_adapter_dtype=False)
        for name in names[1:]:
            peft.add_adapter(name, config)
    return peft.eval()


def _step_s(model: nn.Module, shape: Shape, batch: int, device: torch.device, **how: Any) -> float:
    ids = torch.randint(2, shape.fields["vocab_size"], (batch, shape.context), device=device)
    cache = DynamicCache()
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **how)
    seconds: list[float] = []
    last = ids[:, -1:]
    for _ in range(shape.num_steps):
        synchronize(device)
        start = time.perf_counter()
        out = model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=1, **how)
        last = out.logits[:, -1:].argmax(-1)
        last.tolist()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
