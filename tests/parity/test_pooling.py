"""Embeddings in mixed batches equal Transformers' and PEFT's hidden states."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from support.dense import greedy, make_dense
from support.peft_files import SPECS, linear_names, save_adapter
from support.zoo import VOCAB_SIZE, random_model
from torch import nn
from transformers import PreTrainedModel

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.request import (
    CompletionEnd,
    Event,
    Pooled,
    PoolingParams,
    Request,
    RequestFailed,
    SpeculationParams,
    StoppingParams,
    Tokens,
)
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig
from loraplex_server.engine.assembly import assemble
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Submit
from loraplex_server.model.loader import adopt_model

NUM_TOKENS = 8
CONFIG = EngineConfig(
    ModelConfig("m"),
    KvConfig(block_size=4, memory_bytes=1 << 20),
    BatchConfig(max_running=6, max_step_tokens=11),
)


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Event]]:
    """The events of each request, all of which run together."""
    for request in requests:
        engine.handle(Submit(request))
    events: dict[str, list[Event]] = defaultdict(list)
    num_open = len(requests)
    while num_open:
        batch = engine.turn()
        for event in batch.events if batch is not None else ():
            events[event.request_id].append(event)
            num_open -= isinstance(event, CompletionEnd | RequestFailed)
    return events


def generation(name: str, prompt: Sequence[int], adapter_id: str) -> Request:
    stopping = StoppingParams(NUM_TOKENS, ignore_eos=True)
    return Request(name, tuple(prompt), stopping, adapter_id=AdapterId(adapter_id))


def pooling(name: str, prompt: Sequence[int], adapter_id: str, params: PoolingParams) -> Request:
    off = SpeculationParams(kind="off")
    return Request(
        name, tuple(prompt), StoppingParams(1), pooling=params, adapter_id=AdapterId(adapter_id), speculation=off
    )


def values_of(events: Sequence[Event]) -> np.ndarray:
    """[num_rows, num_columns]."""
    (found,) = [event for event in events if isinstance(event, Pooled)]
    return np.frombuffer(found.values).reshape(-1, found.num_columns)


def hidden_states(model: nn.Module, prompt: Sequence[int]) -> np.ndarray:
    """[num_tokens, hidden] behind the last norm, by the model's own code."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    backbone = getattr(base, base.base_model_prefix) if hasattr(base, "lm_head") else base
    with torch.no_grad():
        return backbone(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0].numpy()


def feature_extraction(base: PreTrainedModel, folder: Path) -> PeftModel:
    """PEFT's model over the base model without its head; its files are in `folder` afterwards."""
    torch.manual_seed(7)
    backbone = copy.deepcopy(getattr(base, base.base_model_prefix))
    config = LoraConfig(
        task_type=TaskType.FEATURE_EXTRACTION,
        r=3,
        target_modules=linear_names(base)[0],
        init_lora_weights=False,
        fan_in_fan_out=base.config.model_type == "gpt2",
    )
    peft = get_peft_model(backbone, config)
    peft.save_pretrained(folder)
    return peft.eval()


@pytest.fixture(params=["llama", "gpt2"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, dict[str, nn.Module]]]:
    base = make_dense(random_model(request.param))
    models: dict[str, nn.Module] = {"": base}
    for seed, spec in enumerate(SPECS[:2]):
        models[spec.name] = save_adapter(base, spec, tmp_path / spec.name, seed)
    models["features"] = feature_extraction(base, tmp_path / "features")
    # Two slots for three adapters: each is evicted and comes back.
    adapters = AdaptersConfig(
        root=tmp_path, device_bytes=1 << 20, host_bytes=1 << 20, disk_bytes=1 << 20, num_device_slots=2
    )
    config = EngineConfig(CONFIG.model, CONFIG.kv, CONFIG.batch, adapters)
    engine = assemble(adopt_model(copy.deepcopy(base)), config, lambda text: None, lambda: None)
    yield engine, models
    assert engine.integrity_report() == ""
    engine.close()


def test_embeddings_beside_generation(world: tuple[Engine, dict[str, nn.Module]]) -> None:
    engine, models = world
    dice = np.random.default_rng(3)
    names = list(models)
    prompts = [dice.integers(2, VOCAB_SIZE, int(dice.integers(1, 30))).tolist() for _ in range(16)]
    owners = [names[i % len(names)] for i in range(len(prompts))]
    kinds = [None, "last", "mean", "next_token"]
    for repeat in range(2):  # the second time with the prefix cache
        requests: list[Request] = []
        for i, (prompt, owner) in enumerate(zip(prompts, owners, strict=True)):
            kind = kinds[i // 4 % 4]
            if kind is None:
                requests.append(generation(f"{i}", prompt, owner))
            elif kind == "next_token":
                requests.append(pooling(f"{i}", prompt, owner, PoolingParams("next_token", token_ids=(5, 3, 60))))
            else:
                requests.append(pooling(f"{i}", prompt, owner, PoolingParams("embed", kind)))
        events = run(engine, requests)
        num_cached = 0
        for i, (prompt, owner) in enumerate(zip(prompts, owners, strict=True)):
            kind, found = kinds[i // 4 % 4], events[f"{i}"]
            end = found[-1]
            assert isinstance(end, CompletionEnd), end
            assert end.num_prompt_tokens == len(prompt)
            num_cached += end.num_cached_tokens
            if kind is None:
                tokens = [t for event in found if isinstance(event, Tokens) for t in event.token_ids]
                if owner != "features":  # PEFT's model of it has no head
                    assert tokens == greedy(models[owner], prompt, NUM_TOKENS)
                continue
            states = hidden_states(models[owner], prompt)
            if kind == "next_token":
                if owner != "features":
                    with torch.no_grad():
                        logits = models[owner](input_ids=torch.tensor([prompt])).logits[0, -1]
                    np.testing.assert_allclose(values_of(found)[0], logits[[5, 3, 60]].numpy(), rtol=1e-9, atol=1e-9)
                continue
            want = states[-1] if kind == "last" else states.mean(axis=0)
            np.testing.assert_allclose(values_of(found), want[None], rtol=1e-9, atol=1e-9)
            if owner and len(prompt) > 1:
                assert not np.allclose(want, hidden_states(models[""], prompt)[-1], atol=1e-3)
        assert (num_cached > 0) is (repeat > 0)
    assert engine._cache.usage().device_evictions > 0  # pyright: ignore[reportPrivateUsage]
