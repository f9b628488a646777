"""Embeddings and classifiers in mixed batches equal Transformers and PEFT."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.dense import greedy, make_dense
from support.peft_files import SPECS, save_adapter
from support.pooling_models import classifier, feature_extraction, hidden_states
from support.zoo import VOCAB_SIZE, random_model
from torch import nn
from transformers import PreTrainedModel

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.errors import ClassifiesOnly, Code, NoClassifier
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
BATCH = BatchConfig(max_running=6, max_step_tokens=11)


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
    """The values of a request [num_rows, num_columns]."""
    (found,) = [event for event in events if isinstance(event, Pooled)]
    return np.frombuffer(found.values).reshape(-1, found.num_columns)


def engine_for(base: PreTrainedModel, root: Path, *, num_slots: int, kv_bytes: int = 1 << 20) -> Engine:
    adapters = AdaptersConfig(
        root=root, device_bytes=1 << 20, host_bytes=1 << 20, disk_bytes=1 << 20, num_device_slots=num_slots
    )
    model = ModelConfig(str(root))  # a directory without a tokenizer
    config = EngineConfig(model, KvConfig(block_size=4, memory_bytes=kv_bytes), BATCH, adapters)
    return assemble(adopt_model(copy.deepcopy(base)), config, lambda text: None, lambda: None)


@pytest.fixture(params=["llama", "gpt2"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, dict[str, nn.Module]]]:
    base = make_dense(random_model(request.param))
    models: dict[str, nn.Module] = {"": base}
    for seed, spec in enumerate(SPECS[:2]):
        models[spec.name] = save_adapter(base, spec, tmp_path / spec.name, seed)
    models["features"] = feature_extraction(base, tmp_path / "features")
    engine = engine_for(base, tmp_path, num_slots=2)  # for three adapters: each is evicted and comes back
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


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_classifiers_beside_generation_and_embeddings(family: str, tmp_path: Path) -> None:
    """Three of texts with 2, 3 and 7 labels and one of tokens, in two slots: before and after eviction."""
    base = make_dense(random_model(family))
    models: dict[str, nn.Module] = {}
    for number in (2, 3, 7):
        models[f"cls-{number}"] = classifier(base, tmp_path / f"cls-{number}", number)
    models["tokens"] = classifier(base, tmp_path / "tokens", 5, per_token=True)
    models["lora"] = save_adapter(base, SPECS[1], tmp_path / "lora")
    config_path = tmp_path / "cls-3" / "adapter_config.json"
    fields = json.loads(config_path.read_text()) | {"id2label": {"0": "red", "1": "green", "2": "blue"}}
    config_path.write_text(json.dumps(fields))
    engine = engine_for(base, tmp_path, num_slots=2)
    dice = np.random.default_rng(5)
    for _ in range(2):
        names = ["cls-2", "lora", "tokens", "cls-7", "cls-3", "lora", "cls-2", "tokens", "cls-3", "cls-7"]
        prompts = [dice.integers(2, VOCAB_SIZE, int(dice.integers(1, 30))).tolist() for _ in names]
        requests = [
            generation(f"{i}", prompt, name)
            if name == "lora"
            else pooling(f"{i}", prompt, name, PoolingParams("classify"))
            for i, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        ]
        requests.append(pooling("embed", prompts[0], "cls-2", PoolingParams("embed", "mean")))
        events = run(engine, requests)
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            found = events[f"{i}"]
            assert isinstance(found[-1], CompletionEnd), found[-1]
            if name == "lora":
                tokens = [t for event in found if isinstance(event, Tokens) for t in event.token_ids]
                assert tokens == greedy(models[name], prompt, NUM_TOKENS)
                continue
            with torch.no_grad():
                want = models[name](input_ids=torch.tensor([prompt])).logits.numpy()
            np.testing.assert_allclose(
                values_of(found), want[0] if name == "tokens" else want, rtol=1e-9, atol=1e-9, err_msg=name
            )
            (pooled,) = [event for event in found if isinstance(event, Pooled)]
            assert pooled.per_token is (name == "tokens")
            labels = ("red", "green", "blue") if name == "cls-3" else tuple(f"LABEL_{n}" for n in range(want.shape[-1]))
            assert pooled.labels == labels
        base_of = models["cls-2"].get_base_model()
        with torch.no_grad():
            states = getattr(base_of, base.base_model_prefix)(input_ids=torch.tensor([prompts[0]])).last_hidden_state
        np.testing.assert_allclose(values_of(events["embed"])[0], states[0].mean(dim=0).numpy(), rtol=1e-9, atol=1e-9)
    assert engine._cache.usage().device_evictions > 2  # pyright: ignore[reportPrivateUsage]
    assert engine.integrity_report() == ""
    engine.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_values_survive_preemption_and_steps_that_overlap(ahead: bool, tmp_path: Path) -> None:
    base = make_dense(random_model("llama"))
    model = classifier(base, tmp_path / "tokens", 4, per_token=True)
    engine = engine_for(base, tmp_path, num_slots=1, kv_bytes=48 << 10)  # 24 blocks: not enough for all rows at once
    engine._runner.overlaps = ahead  # pyright: ignore[reportPrivateUsage]
    dice = np.random.default_rng(9)
    prompts = [dice.integers(2, VOCAB_SIZE, int(dice.integers(8, 40))).tolist() for _ in range(24)]
    requests = [
        Request(f"{i}", tuple(prompt), StoppingParams(40, ignore_eos=True))
        if i % 2
        else pooling(f"{i}", prompt, "tokens", PoolingParams("embed" if i % 4 else "classify", "mean"))
        for i, prompt in enumerate(prompts)
    ]
    events = run(engine, requests)
    assert engine._scheduler.load().num_preemptions > 0  # pyright: ignore[reportPrivateUsage]
    for i, prompt in enumerate(prompts):
        found = events[f"{i}"]
        assert isinstance(found[-1], CompletionEnd), found[-1]
        if i % 2:
            tokens = [t for event in found if isinstance(event, Tokens) for t in event.token_ids]
            assert tokens == greedy(base, prompt, 40)
            continue
        with torch.no_grad():
            out = model(input_ids=torch.tensor([prompt]), output_hidden_states=True)
        want = out.hidden_states[-1][0].mean(dim=0, keepdim=True) if i % 4 else out.logits[0]
        np.testing.assert_allclose(values_of(found), want.numpy(), rtol=1e-9, atol=1e-9)
    assert engine.integrity_report() == ""
    engine.close()


def test_adapters_are_not_asked_for_what_they_cannot_do(tmp_path: Path) -> None:
    base = make_dense(random_model("llama"))
    classifier(base, tmp_path / "cls", 3)
    save_adapter(base, SPECS[1], tmp_path / "lora")
    engine = engine_for(base, tmp_path, num_slots=2)
    classify, next_token = PoolingParams("classify"), PoolingParams("next_token", token_ids=(5,))
    requests = [
        generation("text", [5, 6], "cls"),
        pooling("next", [5, 6], "cls", next_token),
        pooling("lora", [5, 6], "lora", classify),
        pooling("base", [5, 6], "", classify),
        pooling("fine", [5, 6], "cls", classify),
    ]
    events = run(engine, requests)
    errors = {name: found[-1].error for name, found in events.items() if isinstance(found[-1], RequestFailed)}
    assert {name: type(error) for name, error in errors.items()} == {
        "text": ClassifiesOnly,
        "next": ClassifiesOnly,
        "lora": NoClassifier,
        "base": NoClassifier,
    }
    assert all(error.code is Code.FAILED_PRECONDITION for error in errors.values())
    assert engine.integrity_report() == ""
    engine.close()
