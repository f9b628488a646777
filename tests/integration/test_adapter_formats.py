"""Adapters of many formats against PEFT: alone, together, speculated, and after eviction."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, PeftModel, VeraConfig
from support.inline_worker import inline_worker
from support.peft_files import save_variant
from support.world import TinyWorld
from torch import nn
from transformers import AutoModelForCausalLM

from loraplex import Client
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, WorkerConfig

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 8
LINEARS = ["q_proj", "v_proj", "down_proj"]
FORMATS: dict[str, PeftConfig] = {
    "lora": LoraConfig(r=4, target_modules=LINEARS),
    "dora": LoraConfig(r=4, target_modules=LINEARS, use_dora=True),
    "lora-bias": LoraConfig(r=4, target_modules=LINEARS, lora_bias=True),
    "saved-head": LoraConfig(r=2, target_modules=LINEARS, modules_to_save=["lm_head", "norm"]),
    "saved-embedding": LoraConfig(r=2, target_modules=LINEARS, modules_to_save=["embed_tokens", "input_layernorm"]),
    "token-rows": LoraConfig(r=2, target_modules=LINEARS, trainable_token_indices=[70, 100, 101, 110, 120]),
    "vera": VeraConfig(r=8, target_modules=LINEARS),
    "loha": LoHaConfig(r=2, target_modules=LINEARS),
    "lokr": LoKrConfig(r=2, target_modules=LINEARS, decompose_factor=4),
    "ia3": IA3Config(target_modules=LINEARS, feedforward_modules=["down_proj"]),
}
PROMPTS = ("Ask me anything", "dddddxxxdddxx xd")


@dataclass
class Served:
    client: Client
    expected: dict[tuple[str, str], list[int]]


@pytest.fixture(scope="module")
def served(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("formats")
    base = AutoModelForCausalLM.from_pretrained(tiny_world.model, dtype=torch.float64)
    engine = EngineConfig(
        ModelConfig(str(tiny_world.model), dtype="float64"),
        KvConfig(memory_bytes=4 << 20),
        BatchConfig(max_running=8, max_queued=64),
        AdaptersConfig(root=root, num_device_slots=4),
    )
    models = {name: save_variant(base, config, root / name) for name, config in FORMATS.items()}
    with inline_worker(WorkerConfig(engine, port=0)) as worker, Client(worker.address) as client:
        expected = {
            (name, prompt): _greedy(client, model, prompt) for name, model in models.items() for prompt in PROMPTS
        }
        yield Served(client, expected)


def _greedy(client: Client, model: PeftModel, prompt: str) -> list[int]:
    ids = list(client.tokenize(prompt).token_ids)
    assert isinstance(model, nn.Module)
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([ids]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
        )
    return out[0, len(ids) :].tolist()


def tokens(served: Served, name: str, prompt: str, speculation: str = "off") -> list[int]:
    found = served.client.generate(
        prompt, adapter_id=name, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, speculation=speculation
    )
    return list(found.completions[0].token_ids)


def test_formats_make_different_texts(served: Served) -> None:
    for prompt in PROMPTS:
        assert len({tuple(served.expected[name, prompt]) for name in FORMATS}) > len(FORMATS) - 2


@pytest.mark.parametrize("name", FORMATS)
def test_alone_and_after_eviction(served: Served, name: str) -> None:
    """Four slots for all of them: each call of another adapter may evict this one."""
    for prompt in PROMPTS:
        assert tokens(served, name, prompt) == served.expected[name, prompt]


@pytest.mark.parametrize("speculation", ["off", "prompt_lookup"])
def test_together(served: Served, speculation: str) -> None:
    with ThreadPoolExecutor(16) as threads:
        found = dict(
            zip(
                served.expected,
                threads.map(lambda case: tokens(served, *case, speculation), served.expected),
                strict=True,
            )
        )
    wrong = {case for case, got in found.items() if got != served.expected[case]}
    assert not wrong
