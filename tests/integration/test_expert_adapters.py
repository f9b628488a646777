"""Adapters of experts through a worker: alone, together, speculated, and after eviction."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from peft import LoraConfig
from support.dense import greedy
from support.worker_parity import NUM_TOKENS, check_worker
from support.world import byte_tokenizer
from support.zoo import random_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
ADAPTERS: dict[str, LoraConfig] = {
    **{f"all-{number}": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") for number in range(3)},
    "down": LoraConfig(r=3, target_modules=["q_proj"], target_parameters=["experts.down_proj"]),
    "plain": LoraConfig(r=4, target_modules=["q_proj", "o_proj"]),
}
PROMPTS = ("Ask me anything", "dddddxxxdddxx xd")


def test_through_a_worker_equals_peft(tmp_path: Path) -> None:
    base = random_model("mixtral", changes={"vocab_size": len(byte_tokenizer())})
    check_worker(base, ADAPTERS, tmp_path, PROMPTS, partial(greedy, num_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS))
