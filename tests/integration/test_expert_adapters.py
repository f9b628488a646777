"""Adapters of experts through a worker: alone, together, speculated, and after eviction."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from peft import LoraConfig
from support.dense import greedy
from support.inline_worker import inline_worker
from support.peft_files import save_variant
from support.world import byte_tokenizer
from support.zoo import random_model

from loraplex import Client
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, WorkerConfig

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
NUM_TOKENS = 8
ADAPTERS: dict[str, LoraConfig] = {
    **{f"all-{number}": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") for number in range(3)},
    "down": LoraConfig(r=3, target_modules=["q_proj"], target_parameters=["experts.down_proj"]),
    "plain": LoraConfig(r=4, target_modules=["q_proj", "o_proj"]),
}
PROMPTS = ("Ask me anything", "dddddxxxdddxx xd")


def test_through_a_worker_equals_peft(tmp_path: Path) -> None:
    """Two slots for five adapters: each may evict another, from the device and back from the store."""
    tokenizer = byte_tokenizer()
    base = random_model("mixtral", changes={"vocab_size": len(tokenizer)})
    base.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    root = tmp_path / "adapters"
    models = {
        name: save_variant(base, config, root / name, seed) for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    engine = EngineConfig(
        ModelConfig(str(tmp_path / "model"), dtype="float64"),
        KvConfig(memory_bytes=4 << 20),
        BatchConfig(max_running=8, max_queued=64, max_step_tokens=16),
        AdaptersConfig(root=root, num_device_slots=2),
    )
    with inline_worker(WorkerConfig(engine, port=0)) as worker, Client(worker.address) as client:
        expected: dict[tuple[str, str], list[int]] = {}
        for name, model in {**models, "": base}.items():
            for prompt in PROMPTS:
                ids = client.tokenize(prompt).token_ids
                expected[name, prompt] = greedy(model, ids, NUM_TOKENS, min_tokens=NUM_TOKENS)
        assert len({tuple(found) for found in expected.values()}) > len(expected) - 3

        def tokens(name: str, prompt: str, speculation: str) -> list[int]:
            found = client.generate(
                prompt, adapter_id=name, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, speculation=speculation
            )
            return list(found.completions[0].token_ids)

        for case in expected:
            assert tokens(*case, "off") == expected[case], case
        for speculation in ("off", "prompt_lookup"):
            with ThreadPoolExecutor(16) as threads:
                found = list(threads.map(lambda case: tokens(*case, speculation), expected))  # noqa: B023
            wrong = [case for case, got in zip(expected, found, strict=True) if got != expected[case]]
            assert not wrong
