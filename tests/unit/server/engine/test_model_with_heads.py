"""Base models that bring Medusa heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.world import make_world

from loraplex_contracts.errors import UnsupportedModel
from loraplex_contracts.request import CompletionEnd, Request, SpeculationParams, StoppingParams, Tokens
from loraplex_server.config import EngineConfig, KvConfig, ModelConfig
from loraplex_server.engine.assembly import build_engine
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Submit

NUM_HEADS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    make_world(root)
    return root / "model"


def heads_for(base: Path) -> dict[str, torch.Tensor]:
    hidden = json.loads((base / "config.json").read_text())["hidden_size"]
    generator = torch.Generator().manual_seed(0)
    heads: dict[str, torch.Tensor] = {}
    for idx in range(NUM_HEADS):
        heads[f"{idx}.0.linear.weight"] = 0.1 * torch.randn(hidden, hidden, generator=generator)
        heads[f"{idx}.0.linear.bias"] = torch.zeros(hidden)
    return heads


def heads_only(base: Path, path: Path, **config: object) -> Path:
    path.mkdir()
    save_file(heads_for(base), path / "medusa_lm_head.safetensors")
    said = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2", **config}  # there are three
    (path / "config.json").write_text(json.dumps(said))
    return path


def whole_model(base: Path, path: Path) -> Path:
    shutil.copytree(base, path)
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"medusa_head.{name}": tensor for name, tensor in heads_for(base).items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def engine_of(model: Path) -> Engine:
    config = EngineConfig(model=ModelConfig(str(model), dtype="float64"), kv=KvConfig(memory_bytes=16 << 20))
    return build_engine(config, lambda text: None, lambda: None)


@pytest.mark.parametrize("kind", ["heads only", "whole model"])
def test_requests_draft_with_the_models_own_heads(kind: str, base: Path, tmp_path: Path) -> None:
    if kind == "heads only":
        model = heads_only(base, tmp_path / "given", base_model_name_or_path=str(base))
    else:
        model = whole_model(base, tmp_path / "given")
    engine = engine_of(model)
    assert Path(engine.info.base) == (base if kind == "heads only" else model)
    texts: dict[str, list[int]] = {}
    drafted: dict[str, int] = {}
    for name, params in {
        "off": SpeculationParams("off"),
        "silent": SpeculationParams(),
        "asked": SpeculationParams("medusa", fixed_length=True),
    }.items():
        engine.handle(Submit(Request(name, (5, 6, 7, 8), StoppingParams(20, ignore_eos=True), speculation=params)))
    num_open = 3
    while num_open:
        batch = engine.turn()
        for event in batch.events if batch is not None else ():
            if isinstance(event, Tokens):
                texts.setdefault(event.request_id, []).extend(event.token_ids)
                drafted[event.request_id] = drafted.get(event.request_id, 0) + event.num_drafted
            num_open -= isinstance(event, CompletionEnd)
    assert texts["silent"] == texts["asked"] == texts["off"]
    assert drafted["off"] == 0
    assert drafted["silent"] > 0
    assert drafted["asked"] > drafted["silent"] or drafted["asked"] >= NUM_HEADS
    assert engine.integrity_report() == ""
    engine.close()


def test_a_base_beside_the_heads_is_found(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "beside")
    engine = engine_of(heads_only(base, tmp_path / "given", base_model_name_or_path="../beside"))
    assert Path(engine.info.base).resolve() == (tmp_path / "beside").resolve()
    engine.close()


def test_heads_that_name_no_base_say_what_to_do(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="--default-medusa"):
        engine_of(heads_only(base, tmp_path / "given"))
