"""Texts of a worker with adapters, in mixed batches, beside those of PEFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel

from loraplex import Client
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, WorkerConfig
from support.inline_worker import inline_worker
from support.peft_files import save_variant
from support.world import byte_tokenizer

NUM_TOKENS = 8


def check_worker(
    base: PreTrainedModel,
    adapters: Mapping[str, PeftConfig],
    folder: Path,
    prompts: Sequence[str],
    wanted: Callable[[nn.Module, Sequence[int]], list[int]],
) -> None:
    """Each adapter and the base model alone, then all together several times over: with prefix hits, speculation, and
    two slots, so that each may evict another, from the device and back from the store. `wanted`: the NUM_TOKENS tokens
    of a model behind a prompt."""
    base.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    root = folder / "adapters"
    models = {
        name: save_variant(base, config, root / name, seed) for seed, (name, config) in enumerate(adapters.items())
    }
    engine = EngineConfig(
        ModelConfig(str(folder / "model"), dtype="float64"),
        KvConfig(block_size=4, memory_bytes=4 << 20),
        BatchConfig(max_running=8, max_queued=64, max_step_tokens=16),
        AdaptersConfig(root=root, num_device_slots=2),
    )
    with inline_worker(WorkerConfig(engine, port=0)) as worker, Client(worker.address) as client:
        expected = {
            (name, prompt): wanted(model, client.tokenize(prompt).token_ids)
            for name, model in {**models, "": base}.items()
            for prompt in prompts
        }
        assert len({tuple(found) for found in expected.values()}) > len(expected) - 3

        def tokens(name: str, prompt: str, speculation: str) -> list[list[int]]:
            found = client.generate(
                prompt, adapter_id=name, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, speculation=speculation, n=2
            )
            return [list(completion.token_ids) for completion in found.completions]

        for case in expected:
            assert tokens(*case, "off") == [expected[case]] * 2, case
        for speculation in ("off", "prompt_lookup", "off"):
            with ThreadPoolExecutor(16) as threads:
                found = list(threads.map(lambda case: tokens(*case, speculation), expected))  # noqa: B023
            wrong = [case for case, got in zip(expected, found, strict=True) if got != [expected[case]] * 2]
            assert not wrong
