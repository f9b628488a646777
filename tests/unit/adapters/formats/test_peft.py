"""PEFT tensors against the base model: all used, or a named error."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from support.adapter_files import (
    DOWN_PROJ,
    HIDDEN,
    PREFIX,
    Q_PROJ,
    VOCAB,
    BytesFile,
    base_targets,
    lora_config,
    lora_tensors,
)
from torch import Tensor

from loraplex_adapters.formats.peft import LoraPlan, plan_lora
from loraplex_adapters.formats.peft_config import parse_peft_config
from loraplex_adapters.io.safetensors import read_header
from loraplex_adapters.weights import BaseTargets, ClassifierShape, place_adapter
from loraplex_contracts.adapters import ClassifierInfo
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    BaseMismatch,
    LoraplexError,
    RankLimit,
    ShapeMismatch,
)


def plan(tensors: dict[str, Tensor], targets: BaseTargets | None = None, rank: int = 4, **fields: Any) -> LoraPlan:
    header = read_header(BytesFile(save(tensors), "adapter_model.safetensors"))
    config = parse_peft_config(json.dumps(lora_config(rank, **fields)).encode())
    return plan_lora(config, header, targets or base_targets())


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def test_every_tensor_has_its_place() -> None:
    found = plan(lora_tensors(paths=[Q_PROJ, DOWN_PROJ, "model.embed_tokens", "lm_head"]))
    shapes = {m.shape.path: (m.shape.rank, m.shape.in_features, m.shape.out_features) for m in found.modules}
    assert shapes == {
        Q_PROJ: (4, HIDDEN, HIDDEN),
        DOWN_PROJ: (4, 2 * HIDDEN, HIDDEN),
        "model.embed_tokens": (4, VOCAB, HIDDEN),
        "lm_head": (4, HIDDEN, VOCAB),
    }
    assert all(m.shape.scale == 2.0 for m in found.modules)
    layout = place_adapter("float32", [m.shape for m in found.modules])
    offsets = [o for p in layout.factors for o in (p.a_offset, p.b_offset)]
    assert offsets == sorted(offsets)
    assert all(offset % 64 == 0 for offset in offsets)
    assert not found.warnings


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PREFIX, ""),
        (".lora_A.", ".lora_A.default."),
        (".weight", ".sql.weight"),
    ],
)
def test_keys_with_and_without_prefix_and_adapter_name(old: str, new: str) -> None:
    tensors = renamed(lora_tensors(), old, new)
    if new == ".lora_A.default.":
        tensors = renamed(tensors, ".lora_B.", ".lora_B.default.")
    assert {m.shape.path for m in plan(tensors).modules} == {Q_PROJ, DOWN_PROJ}


def test_embedding_keys_with_an_adapter_name() -> None:
    tensors = {f"{name}.default": t for name, t in lora_tensors(paths=["model.embed_tokens"]).items()}
    assert [m.shape.path for m in plan(tensors).modules] == ["model.embed_tokens"]


def test_modules_have_ranks_and_scales_of_their_own() -> None:
    """Never the padded rank, never the rank of the module before."""
    tensors = lora_tensors(8, paths=[Q_PROJ]) | lora_tensors(2, paths=[DOWN_PROJ])
    found = plan(tensors, rank=8, lora_alpha=8, rank_pattern={"down_proj": 2}, alpha_pattern={"q_proj": 4})
    assert {m.shape.path: (m.shape.rank, m.shape.scale) for m in found.modules} == {
        Q_PROJ: (8, 0.5),
        DOWN_PROJ: (2, 4.0),
    }


def test_a_module_that_one_layer_lacks_drops_no_other() -> None:
    paths = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.down_proj"]
    assert {m.shape.path for m in plan(lora_tensors(paths=paths)).modules} == set(paths)


BAD_TENSORS: dict[str, tuple[dict[str, Tensor], type[LoraplexError], str]] = {
    "no such module": (
        renamed(lora_tensors(), "q_proj", "query_key_value"),
        BaseMismatch,
        "query_key_value",
    ),
    "no such layer": (renamed(lora_tensors(), "layers.0", "layers.7"), BaseMismatch, "layers.7"),
    "experts": (renamed(lora_tensors(), "self_attn.q_proj", "mlp.experts.3.up_proj"), AdapterUnsupported, "experts"),
    "fused experts": (
        renamed(lora_tensors(), "self_attn.q_proj", "mlp.experts.base_layer"),
        AdapterUnsupported,
        "experts",
    ),
    "A without B": (
        {n: t for n, t in lora_tensors().items() if "q_proj.lora_B" not in n},
        AdapterInvalid,
        "q_proj.lora_A",
    ),
    "B without A": (
        {n: t for n, t in lora_tensors().items() if "q_proj.lora_A" not in n},
        AdapterInvalid,
        "q_proj.lora_B",
    ),
    "wrong in": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.zeros(4, HIDDEN + 1)},
        ShapeMismatch,
        "q_proj.lora_A",
    ),
    "wrong out": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_B.weight": torch.zeros(HIDDEN - 1, 4)},
        ShapeMismatch,
        "q_proj.lora_B",
    ),
    "transposed": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.zeros(HIDDEN, 4)},
        ShapeMismatch,
        "q_proj.lora_A",
    ),
    "rank other than the configuration's": (lora_tensors(3), ShapeMismatch, "lora_A"),
    "four dimensions": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.zeros(4, HIDDEN, 1, 1)},
        ShapeMismatch,
        "q_proj.lora_A",
    ),
    "no dimension": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.tensor(1.0)},
        ShapeMismatch,
        "q_proj.lora_A",
    ),
    "linear factors on an embedding": (
        {
            f"{PREFIX}model.embed_tokens.lora_A.weight": torch.zeros(4, VOCAB),
            f"{PREFIX}model.embed_tokens.lora_B.weight": torch.zeros(HIDDEN, 4),
        },
        ShapeMismatch,
        "embed_tokens",
    ),
    "embedding factors on a linear": (
        {
            f"{PREFIX}{Q_PROJ}.lora_embedding_A": torch.zeros(4, HIDDEN),
            f"{PREFIX}{Q_PROJ}.lora_embedding_B": torch.zeros(HIDDEN, 4),
        },
        ShapeMismatch,
        "q_proj",
    ),
    "integers": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.zeros(4, HIDDEN, dtype=torch.int8)},
        AdapterUnsupported,
        "I8",
    ),
    "float8": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.zeros(4, HIDDEN, dtype=torch.float8_e4m3fn)},
        AdapterUnsupported,
        "F8_E4M3",
    ),
    "two adapters in one file": (
        renamed(renamed(lora_tensors(), "lora_A.", "lora_A.x."), "lora_B.", "lora_B.x.") | lora_tensors(),
        AdapterInvalid,
        "second",
    ),
    "magnitude of DoRA": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_magnitude_vector": torch.zeros(HIDDEN)},
        AdapterInvalid,
        "use_dora",
    ),
    "bias on lora_B": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_B.bias": torch.zeros(HIDDEN)},
        AdapterInvalid,
        "lora_bias",
    ),
    "bias of the base": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.bias": torch.zeros(HIDDEN)},
        AdapterInvalid,
        "q_proj.bias",
    ),
    "token rows": (
        lora_tensors() | {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": torch.zeros(2, HIDDEN)},
        AdapterInvalid,
        "trainable_token_indices",
    ),
    "a whole module that the base lacks": (
        lora_tensors() | {f"{PREFIX}model.vision.weight": torch.zeros(VOCAB, HIDDEN)},
        AdapterUnsupported,
        "model.vision.weight",
    ),
    "a parameter twice": (
        lora_tensors()
        | {f"{PREFIX}lm_head.{name}weight": torch.zeros(VOCAB, HIDDEN) for name in ("", "modules_to_save.")},
        AdapterInvalid,
        "a second weight",
    ),
    "the base's module beside its copy": (
        lora_tensors() | {f"{PREFIX}lm_head.original_module.weight": torch.zeros(VOCAB, HIDDEN)},
        AdapterUnsupported,
        "original_module",
    ),
    "added tokens": (
        lora_tensors() | {f"{PREFIX}lm_head.weight": torch.zeros(VOCAB + 8, HIDDEN)},
        ShapeMismatch,
        "lm_head.weight",
    ),
    "AdaLoRA": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_E": torch.zeros(4, 1)},
        AdapterUnsupported,
        "lora_E",
    ),
    "a tensor of nothing known": (
        lora_tensors() | {"something.else": torch.zeros(1)},
        AdapterUnsupported,
        "something.else",
    ),
    "a strange suffix": (
        lora_tensors() | {f"{PREFIX}{Q_PROJ}.lora_A.x.y": torch.zeros(4, HIDDEN)},
        AdapterInvalid,
        "lora_A.x.y",
    ),
    "nothing": ({}, AdapterInvalid, "no LoRA"),
}


@pytest.mark.parametrize(("tensors", "error", "named"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_what_does_not_fit_is_refused_by_name(
    tensors: dict[str, Tensor], error: type[LoraplexError], named: str
) -> None:
    with pytest.raises(error, match=named) as raised:
        plan(tensors)
    assert type(raised.value) is error


def test_rank_limit() -> None:
    assert plan(lora_tensors(16), rank=16)
    with pytest.raises(RankLimit, match="17"):
        plan(lora_tensors(17), rank=17)
    with pytest.raises(RankLimit):  # the tensors have it, whatever the configuration says
        plan(lora_tensors(64), rank=4)
    with pytest.raises(RankLimit):
        plan(lora_tensors(4), rank=4, rank_pattern={"q_proj": 4096})


def test_tensors_that_the_configuration_does_not_name_are_refused() -> None:
    with pytest.raises(AdapterInvalid, match="target_modules"):
        plan(lora_tensors(), target_modules=["q_proj"])


def test_what_is_merely_odd_is_a_warning() -> None:
    found = plan(lora_tensors(), base_model_name_or_path="another/base", target_modules=["q_proj", "down_proj", "x"])
    assert "another/base" in found.warnings[0]
    assert "'x'" in found.warnings[1]


@pytest.mark.parametrize("name", ["score", "classifier"])
@pytest.mark.parametrize("task_type", ["SEQ_CLS", "TOKEN_CLS"])
def test_a_classifier_has_its_labels(name: str, task_type: str) -> None:
    tensors = lora_tensors() | {
        f"{PREFIX}{name}.weight": torch.randn(3, HIDDEN),
        f"{PREFIX}{name}.bias": torch.randn(3),
    }
    fields: dict[str, Any] = {"task_type": task_type, "modules_to_save": ["classifier", "score"]}
    found = plan(tensors, **fields).classifier
    assert found is not None
    assert found.shape == ClassifierShape(
        ClassifierInfo(("LABEL_0", "LABEL_1", "LABEL_2"), task_type == "TOKEN_CLS"), HIDDEN, has_bias=True
    )
    named = plan(tensors, **fields, id2label={"2": "c", "0": "a", "1": "b"}).classifier
    assert named is not None
    assert named.shape.info.labels == ("a", "b", "c")
    del tensors[f"{PREFIX}{name}.bias"]
    without = plan(tensors, **fields).classifier
    assert without is not None
    assert (without.bias, without.shape.has_bias) == (None, False)


@pytest.mark.parametrize(
    ("tensors", "fields", "error", "said"),
    [
        ({}, {}, AdapterInvalid, "has no score.weight or classifier.weight"),
        ({"score.weight": (3, HIDDEN + 1)}, {}, ShapeMismatch, "score.weight"),
        ({"score.weight": (HIDDEN,)}, {}, ShapeMismatch, "score.weight"),
        ({"score.weight": (3, HIDDEN), "score.bias": (2,)}, {}, ShapeMismatch, "score.bias"),
        ({"score.weight": (3, HIDDEN), "classifier.weight": (3, HIDDEN)}, {}, AdapterInvalid, "a second weight"),
        ({"score.weight": (3, HIDDEN)}, {"id2label": {"0": "a", "1": "b"}}, AdapterInvalid, "2 labels"),
        ({"score.weight": (3, HIDDEN)}, {"id2label": {"0": "a", "2": "b"}}, AdapterInvalid, "id2label"),
        ({"score.weight": (3, HIDDEN)}, {"id2label": ["a"]}, AdapterInvalid, "id2label"),
        (
            {"score.weight": (3, HIDDEN)},
            {"modules_to_save": ["score", "lm_head"]},
            AdapterInvalid,
            "modules_to_save names .'lm_head'.",
        ),
        ({"score.dense.weight": (3, HIDDEN)}, {}, AdapterUnsupported, "score.dense.weight"),
        ({"score.weight": (3, HIDDEN)}, {"task_type": "CAUSAL_LM"}, AdapterUnsupported, "score.weight"),
    ],
)
def test_a_classifier_that_does_not_fit_is_refused(
    tensors: dict[str, tuple[int, ...]], fields: dict[str, Any], error: type[LoraplexError], said: str
) -> None:
    saved = {f"{PREFIX}{name}": torch.randn(*shape) for name, shape in tensors.items()}
    with pytest.raises(error, match=said):
        plan(lora_tensors() | saved, **{"task_type": "SEQ_CLS", **fields})


def test_an_adapter_of_a_model_without_head_lacks_its_path() -> None:
    whole = lora_tensors(paths=[Q_PROJ, DOWN_PROJ])
    targets = replace(base_targets(), backbone="model")
    found = plan(renamed(whole, f"{PREFIX}model.", PREFIX), targets, task_type="FEATURE_EXTRACTION")
    assert [m.shape for m in found.modules] == [m.shape for m in plan(whole, targets).modules]
    mixed = lora_tensors(paths=[Q_PROJ]) | renamed(lora_tensors(paths=[DOWN_PROJ]), f"{PREFIX}model.", PREFIX)
    with pytest.raises(BaseMismatch):
        plan(mixed, targets)


def test_a_copy_of_the_base_weight_is_planned_for_a_comparison() -> None:
    targets = base_targets(weight_sha256="0" * 64)
    head = {f"{PREFIX}lm_head.base_layer.weight": torch.zeros(VOCAB, HIDDEN)}
    embedding = {f"{PREFIX}model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    found = plan(lora_tensors() | head | embedding, targets)
    assert [(one.shape.path, one.weight_sha256) for one in found.saved] == [
        ("lm_head", "0" * 64),
        ("model.embed_tokens", "0" * 64),
    ]
    named = plan(lora_tensors() | head | embedding, targets, modules_to_save=["lm_head"])
    assert [(one.shape.path, one.weight_sha256) for one in named.saved] == [
        ("lm_head", ""),
        ("model.embed_tokens", "0" * 64),
    ]
    resized = {f"{PREFIX}lm_head.base_layer.weight": torch.zeros(VOCAB + 8, HIDDEN)}
    with pytest.raises(ShapeMismatch):
        plan(lora_tensors() | resized, targets)
