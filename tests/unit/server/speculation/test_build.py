"""Loading of draft models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from support.dense import greedy, make_dense
from support.drafting import ask
from support.tiny_tokenizers import tiny_tokenizer
from support.world import TinyWorld, byte_tokenizer
from support.zoo import random_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    FailedPrecondition,
    InvalidArgument,
    LoraplexError,
    UnsafeFormat,
    UnsupportedModel,
)
from loraplex_server.config import DraftModelConfig, EngineConfig, ModelConfig, SpeculationConfig
from loraplex_server.layers.attention import ModelSpec
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.medusa_model import ServedModel
from loraplex_server.speculation import build
from loraplex_server.speculation.build import (
    DraftTarget,
    have_same_ids,
    load_draft,
)
from loraplex_server.speculation.draft_model import DraftMemory, DraftModelProposer
from loraplex_server.speculation.proposer import DRAFT_MODEL, UNIVERSAL
from loraplex_server.speculation.step_costs import StepCosts
from loraplex_server.text.tokenizer import TextTokenizer

MEMORY = DraftMemory(max_rows=4, kv_bytes=1 << 20)
NUM_IDS = len(byte_tokenizer())


def spec(vocab_size: int = NUM_IDS, max_context_tokens: int = 100) -> ModelSpec:
    return ModelSpec((), vocab_size, vocab_size, 32, max_context_tokens, (257,))


@pytest.fixture(scope="module")
def target() -> DraftTarget:
    return DraftTarget(spec(), TextTokenizer(byte_tokenizer()))


@pytest.fixture(scope="module")
def nameless() -> DraftTarget:
    """A target without a tokenizer."""
    return DraftTarget(spec(), TextTokenizer(None))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 450 tokens and no tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    config = LlamaConfig(
        vocab_size=450,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(
    config: DraftModelConfig, target: DraftTarget, memory: DraftMemory = MEMORY, dtype: str = "auto"
) -> DraftModelProposer:
    return load_draft(config, target, memory, dtype=dtype, device="cpu")


def test_the_kernels_of_draft_models_on_a_gpu_are_compiled_first(
    tiny_world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    runner = SimpleNamespace(
        warm_up=lambda *given: asked.append(("warm up", given[0])), capture=lambda *_: asked.append(("capture",))
    )
    drafter = SimpleNamespace(runner=runner, measure=lambda: StepCosts({1: 1.0, 2: 2.0}))
    monkeypatch.setattr(build, "load_draft", lambda *_, **__: SimpleNamespace(name=DRAFT_MODEL, drafter=drafter))
    loaded = replace(adopt_model(random_model("llama")), device=torch.device("cuda"))
    model = str(tiny_world.model)
    config = EngineConfig(ModelConfig(model), speculation=SpeculationConfig(draft_models=(f"small={model}",)))
    drafts = build.load_drafts(config, loaded, ServedModel(model), lambda text: None)
    assert list(drafts.proposers) == list(drafts.least_costs) == ["draft_model:small"]
    assert asked == [("warm up", 512), ("capture",)]


# --- which proposer fits ----------------------------------------------------------------------------------------------


def test_the_same_tokenizer(tiny_world: TinyWorld, target: DraftTarget) -> None:
    draft = load(DraftModelConfig("small", str(tiny_world.model)), target)
    assert draft.name == DRAFT_MODEL
    assert draft.drafter.rows.max_len == 100  # the target's context is the shorter one
    model = AutoModelForCausalLM.from_pretrained(tiny_world.model)
    prompt = [70, 71, 72, 73, 74]
    assert draft.propose([ask("a", prompt, 5)]) == [tuple(greedy(model, prompt, 5))]
    draft.close()


def test_the_memory_may_set_a_shorter_limit(tiny_world: TinyWorld, target: DraftTarget) -> None:
    draft = load(DraftModelConfig("small", str(tiny_world.model)), target, replace(MEMORY, max_len=60))
    assert draft.drafter.rows.max_len == 60


def test_another_tokenizer_in_its_directory(other: Path, target: DraftTarget, tmp_path: Path) -> None:
    folder = tmp_path / "with"
    shutil.copytree(other, folder)
    tiny_tokenizer("byte_level").save_pretrained(folder)
    draft = load(DraftModelConfig("o", str(folder)), target)
    assert draft.name == UNIVERSAL
    assert len(draft.propose([ask("a", target.tokenizer.encode("SELECT name"), 3)])) == 1
    assert draft.drafter.rows.num_sequences == 1


def test_another_tokenizer_from_elsewhere(other: Path, target: DraftTarget, tmp_path: Path) -> None:
    tiny_tokenizer("byte_level").save_pretrained(tmp_path)
    draft = load(DraftModelConfig("o", str(other), tokenizer=str(tmp_path)), target)
    assert draft.name == UNIVERSAL


def test_without_tokenizers_the_size_decides(tiny_world: TinyWorld, other: Path, nameless: DraftTarget) -> None:
    same = load(DraftModelConfig("small", str(tiny_world.model)), nameless)
    assert same.name == DRAFT_MODEL
    bare = DraftTarget(spec(450), TextTokenizer(None))
    assert load(DraftModelConfig("o", str(other)), bare).name == DRAFT_MODEL


def test_the_same_but_for_a_few() -> None:
    pieces = {f"piece{i}": i for i in range(1000)}
    renamed = {f"other{i}" if i < 8 else f"piece{i}": i for i in range(1000)}
    assert have_same_ids(pieces, pieces)
    assert have_same_ids(pieces, renamed)
    assert have_same_ids(pieces, pieces | {f"more{i}": 1000 + i for i in range(10)})
    assert not have_same_ids(pieces, pieces | {f"more{i}": 1000 + i for i in range(100)})
    assert not have_same_ids(pieces, {piece: i + 1 for piece, i in pieces.items()})


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_an_adapter_is_merged(tiny_world: TinyWorld, target: DraftTarget) -> None:
    folder = tiny_world.adapters / tiny_world.names[1]
    draft = load(DraftModelConfig("small", str(tiny_world.model), adapter=str(folder)), target, dtype="float64")
    model = AutoModelForCausalLM.from_pretrained(tiny_world.model, dtype=torch.float64)
    peft = PeftModel.from_pretrained(make_dense(model), folder).double()
    prompt = [70, 71, 72, 73, 74]
    want = greedy(peft, prompt, 5)
    plain = greedy(AutoModelForCausalLM.from_pretrained(tiny_world.model), prompt, 5)
    assert want != plain
    assert draft.propose([ask("a", prompt, 5)]) == [tuple(want)]


def test_adapters_that_cannot_be_merged(tiny_world: TinyWorld, target: DraftTarget, tmp_path: Path) -> None:
    good = tiny_world.adapters / tiny_world.names[0]

    def error_with(folder: Path) -> LoraplexError:
        with pytest.raises(LoraplexError, match=r"--draft-adapter|PEFT cannot merge") as caught:
            load(DraftModelConfig("small", str(tiny_world.model), adapter=str(folder)), target)
        assert caught.value.field == "--draft-adapter"
        return caught.value

    assert isinstance(error_with(tmp_path / "missing"), AdapterNotFound)

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(good / "adapter_config.json", pickled)
    (pickled / "adapter_model.bin").write_bytes(b"")
    assert isinstance(error_with(pickled), UnsafeFormat)

    for name, change in {"rank": {"r": 5}, "kind": {"peft_type": "NEW"}, "targets": {"target_modules": ["w9"]}}.items():
        folder = tmp_path / name
        shutil.copytree(good, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        refused = error_with(folder)
        assert isinstance(refused, AdapterInvalid), name
        assert "size mismatch for" in refused.message or name != "rank"

    stranger = tmp_path / "stranger"
    shutil.copytree(good, stranger)
    config = json.loads((stranger / "adapter_config.json").read_text())
    (stranger / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["lm_head"]}))
    assert isinstance(error_with(stranger), AdapterInvalid)


# --- what is missing --------------------------------------------------------------------------------------------------


def test_no_way_to_the_vocabulary(other: Path, target: DraftTarget, nameless: DraftTarget, tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="--draft-tokenizer o=PATH"):
        load(DraftModelConfig("o", str(other)), target)
    tiny_tokenizer("byte_level").save_pretrained(tmp_path)
    with pytest.raises(FailedPrecondition, match="base model has no tokenizer"):
        load(DraftModelConfig("o", str(other), tokenizer=str(tmp_path)), nameless)


def test_a_tokenizer_that_is_not_there(other: Path, target: DraftTarget, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no tokenizer in") as caught:
        load(DraftModelConfig("o", str(other), tokenizer=str(tmp_path)), target)
    assert caught.value.field == "--draft-tokenizer"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="draft model o: the tokenizer") as caught:
        load(DraftModelConfig("o", str(other), tokenizer=str(tmp_path)), target)
    assert caught.value.field == "--draft-tokenizer"


def test_a_model_that_is_not_there(target: DraftTarget, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    for path in (tmp_path / "missing", tmp_path, file):
        with pytest.raises(UnsupportedModel, match="draft model small: ") as caught:
            load(DraftModelConfig("small", str(path)), target)
        assert caught.value.field == "--draft-model"


def test_a_dtype_that_does_not_exist(tiny_world: TinyWorld, target: DraftTarget) -> None:
    with pytest.raises(InvalidArgument, match="dtype"):
        load(DraftModelConfig("small", str(tiny_world.model)), target, dtype="int4")


def test_full_memory_is_no_fault_of_an_adapter(
    tiny_world: TinyWorld, target: DraftTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PeftModel, "from_pretrained", fail)
    folder = tiny_world.adapters / tiny_world.names[0]
    with pytest.raises(torch.OutOfMemoryError):  # which `load_drafts` tells of
        load(DraftModelConfig("small", str(tiny_world.model), adapter=str(folder)), target)
