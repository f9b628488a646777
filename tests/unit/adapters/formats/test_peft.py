"""PEFT tensors against the base model: all used, or a named error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
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

from loraplex_adapters.formats.peft import plan_lora
from loraplex_adapters.formats.peft_config import parse_lora_config, parse_peft_fields
from loraplex_adapters.formats.peft_plan import LoraPlan
from loraplex_adapters.io.safetensors import read_header
from loraplex_adapters.weights import BaseTargets, ClassifierShape, TargetModule, place_adapter
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
    config = parse_lora_config(parse_peft_fields(json.dumps(lora_config(rank, **fields)).encode()))
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


def test_an_activated_adapter_leaves_tokens_before_its_own_alone() -> None:
    fields: dict[str, Any] = {"alora_invocation_tokens": [VOCAB - 1, 0], "task_type": "CAUSAL_LM"}
    assert plan(lora_tensors(), **fields).invocation == (VOCAB - 1, 0)
    with pytest.raises(AdapterInvalid, match=f"names token {VOCAB}"):
        plan(lora_tensors(), **fields | {"alora_invocation_tokens": [VOCAB]})
    with pytest.raises(AdapterUnsupported, match=r"LoRA on 'model\.embed_tokens' is not served"):
        plan(lora_tensors(paths=[Q_PROJ, "model.embed_tokens"]), **fields)
    saved = {**lora_tensors(), f"{PREFIX}lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    with pytest.raises(AdapterUnsupported, match=r"lm_head.weight' would change the tokens before"):
        plan(saved, **fields, modules_to_save=["lm_head"])
    # PEFT writes the head's weight beside what it trained there, which has to be a copy.
    beside = {
        **lora_tensors(paths=[Q_PROJ, "lm_head"]),
        f"{PREFIX}lm_head.base_layer.weight": torch.zeros(VOCAB, HIDDEN),
    }
    found = plan(beside, base_targets(weight_sha256="0" * 64), **fields)
    assert [(one.shape.path, one.weight_sha256) for one in found.copies] == [("lm_head", "0" * 64)]
    assert found.saved == ()


def test_an_initialisation_that_peft_repeats_takes_as_many_ranks_again() -> None:
    found = plan(lora_tensors(), init_lora_weights="pissa")
    assert {(m.shape.rank, m.shape.scale, m.a) for m in found.modules} == {(8, 2.0, None)}
    with pytest.raises(RankLimit, match="a term of rank 18"):
        plan(lora_tensors(rank=9), rank=9, init_lora_weights="olora")
    large = replace(base_targets(), max_rank=64)
    found = plan(lora_tensors(rank=HIDDEN, paths=[Q_PROJ]), large, rank=17, init_lora_weights="olora")
    assert {(m.shape.rank, m.shape.scale) for m in found.modules} == {(2 * HIDDEN, 2.0)}
    with pytest.raises(ShapeMismatch, match=r"lora_A.* has shape \[17, .* make it \[16, "):
        plan(lora_tensors(rank=17), large, rank=17, init_lora_weights="pissa")
    tied = replace(base_targets(), tied_head="lm_head")
    with pytest.raises(AdapterUnsupported, match=r"'lm_head' .the head, whose weight is the embedding's"):
        plan(lora_tensors(paths=["lm_head"]), tied, init_lora_weights="pissa")
    shared = {path: replace(module, is_shared=path == Q_PROJ) for path, module in base_targets().modules.items()}
    with pytest.raises(AdapterUnsupported, match=r"whose weight other modules share: PEFT takes a part out"):
        plan(lora_tensors(), replace(base_targets(), modules=shared), init_lora_weights="pissa")
    with pytest.raises(AdapterUnsupported, match=r"'model.embed_tokens' .of kind embedding"):
        plan(lora_tensors(paths=[Q_PROJ, "model.embed_tokens"]), init_lora_weights="olora")
    path, large = Q_PROJ, 1 << 14
    module = replace(base_targets().modules[path], in_features=large, out_features=large)
    shapes = {f"{PREFIX}{path}.lora_A.weight": (4, large), f"{PREFIX}{path}.lora_B.weight": (large, 4)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(AdapterUnsupported, match="takes too long at load; convert the adapter"):
        plan(tensors, replace(base_targets(), modules={path: module}), init_lora_weights="pissa")


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


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"target_modules": ["q_proj", "k_proj"]}, "target_modules .* does not name its module"),
        ({"target_modules": r".*\.k_proj"}, "target_modules .* does not name its module"),
        (
            {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
            "exclude_modules .* leaves its module out",
        ),
        ({"exclude_modules": r".*layers\.0\.self_attn\..*"}, "exclude_modules .* leaves its module out"),
        ({"layers_to_transform": [1]}, "layers_to_transform .* does not name its module"),
    ],
)
def test_tensors_that_the_configuration_leaves_out(fields: dict[str, Any], named: str) -> None:
    """PEFT passes over them, and writes no such file."""
    tensors = lora_tensors(4)  # in layer 0 and in layer 1
    own = {"target_modules": ["q_proj", "down_proj"]}
    plan(tensors, **own, layers_to_transform=[0, 1])
    with pytest.raises(AdapterInvalid, match=named + ".* do not belong together"):
        plan(tensors, **(own | fields))


def test_modules_have_ranks_and_scales_of_their_own() -> None:
    """A module never gets the padded rank, nor that of the module before."""
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
    "added tokens in the embedding": (
        lora_tensors() | {f"{PREFIX}model.embed_tokens.weight": torch.zeros(VOCAB + 2, HIDDEN)},
        ShapeMismatch,
        "embed_tokens.weight' has 26 tokens, 'tiny-base' has 24: an adapter that adds tokens is not served",
    ),
    "added tokens in the head": (
        lora_tensors() | {f"{PREFIX}lm_head.weight": torch.zeros(VOCAB + 1, HIDDEN)},
        ShapeMismatch,
        "lm_head.weight' has 25 tokens.*adds tokens",
    ),
    "added tokens in a LoRA on the embedding": (
        {
            f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(4, VOCAB + 1),
            f"{PREFIX}model.embed_tokens.lora_embedding_B": torch.zeros(HIDDEN, 4),
        },
        ShapeMismatch,
        "lora_embedding_A' has 25 tokens.*adds tokens",
    ),
    "added tokens in a LoRA on the head": (
        {
            f"{PREFIX}lm_head.lora_A.weight": torch.zeros(4, HIDDEN),
            f"{PREFIX}lm_head.lora_B.weight": torch.zeros(VOCAB + 1, 4),
        },
        ShapeMismatch,
        "lm_head.lora_B.weight' has 25 tokens.*adds tokens",
    ),
    "vision tower": (
        renamed(lora_tensors(), "model.layers.0", "model.vision_tower.encoder.layers.0"),
        AdapterUnsupported,
        "vision_tower.*part for images, audio or video; 'tiny-base' is served for texts alone",
    ),
    "the part that speaks": (
        renamed(lora_tensors(), "model.layers.0", "talker.model.layers.0"),
        AdapterUnsupported,
        "talker.*part for images, audio or video; 'tiny-base' is served for texts alone",
    ),
    "a wrapper's name": (
        renamed(lora_tensors(), PREFIX, f"{PREFIX}_orig_mod."),
        AdapterInvalid,
        r"_orig_mod.*not named as PEFT names.*'model.layers.0.self_attn.q_proj' of 'tiny-base'",
    ),
    "wrappers inside": (
        renamed(lora_tensors(), "layers.0.", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module."),
        AdapterInvalid,
        r"_fsdp_wrapped.*not named as PEFT names.*'model.layers.0.self_attn.q_proj' of 'tiny-base'",
    ),
    "the prefix twice": (
        renamed(lora_tensors(), PREFIX, PREFIX + PREFIX),
        AdapterInvalid,
        "not named as PEFT names its tensors",
    ),
    "projector of images": (
        lora_tensors() | {f"{PREFIX}model.multi_modal_projector.linear.weight": torch.zeros(4, 4)},
        AdapterUnsupported,
        "multi_modal_projector.*part for images",
    ),
    "module of another kind": (
        renamed(lora_tensors(), "self_attn.q_proj", "self_attn.rotation"),
        AdapterUnsupported,
        "rotation.*adapts a module of 'tiny-base' that takes no adapters here",
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
        "second lora_A",
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
        | {f"{PREFIX}lm_head.{name}weight": torch.zeros(VOCAB, HIDDEN) for name in ("base_layer.", "modules_to_save.")},
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


def test_saved_modules_are_named_as_peft_matches_them() -> None:
    """PEFT matches saved modules by the end of their names, not by whole words; names that the base model does not have
    are passed over."""
    head = {f"{PREFIX}lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    found = plan(lora_tensors() | head, modules_to_save=["head", "classifier", "input_layernorm"])
    assert [one.shape.path for one in found.saved] == ["lm_head"]
    assert (
        found.warnings[-1]
        == "names ['classifier', 'input_layernorm'] in modules_to_save, which the base model does not have"
    )
    for name in ("lm_head", "head", "q_proj", "layers.1.mlp"):
        with pytest.raises(AdapterInvalid, match=rf"modules_to_save names \['{name}'\], which is not there"):
            plan(lora_tensors(), modules_to_save=[name])
    rows = {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": torch.zeros(2, HIDDEN)}
    found = plan(lora_tensors() | rows, trainable_token_indices={"tokens": [3, 5]})
    assert [one.shape.token_ids for one in found.saved] == [(3, 5)]
    for path, changes, tied_head, says in (
        ("lm_head", {"has_bias": True}, "lm_head", "that the model's head shares, whose bias PEFT leaves out"),
        ("model.embed_tokens", {"is_lookup": False}, "", "an embedding that does more than look rows up"),
    ):
        modules = dict(base_targets().modules)
        modules[path] = replace(modules[path], **changes)
        other = replace(base_targets(), modules=modules, embedding="model.embed_tokens", tied_head=tied_head)
        with pytest.raises(AdapterUnsupported, match=says):
            plan(lora_tensors() | rows, other, trainable_token_indices={"tokens": [3, 5]})


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


def test_another_path_of_the_base_models_folder_is_not_odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "link").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    fields = {"base_model_name_or_path": str(base), "target_modules": ["q_proj", "down_proj"]}
    for served, is_odd in (("base", False), ("./base/", False), (str(base), False), ("link", False), ("other", True)):
        targets = replace(base_targets(), model_id=served)
        assert bool(plan(lora_tensors(), targets, **fields).warnings) is is_odd, served


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


EXPERTS = "model.layers.0.mlp.experts"
FUSED_NAMES = ("gate_up_proj", "down_proj")
NUM_EXPERTS, INNER = 3, 6


def mixture_targets() -> BaseTargets:
    """The base model with fused experts and a router in the first layer."""
    base = base_targets()
    up, down = (f"{EXPERTS}.{name}" for name in FUSED_NAMES)
    router = "model.layers.0.mlp.gate"
    more = {
        up: TargetModule(up, "experts", HIDDEN, 2 * INNER, num_experts=NUM_EXPERTS),
        down: TargetModule(down, "experts", INNER, HIDDEN, num_experts=NUM_EXPERTS),
        router: TargetModule(router, "router", HIDDEN, NUM_EXPERTS),
    }
    return replace(base, modules={**base.modules, **more}, experts={EXPERTS: FUSED_NAMES})


def pair(path: str, rank: int, num_in: int, num_out: int) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{path}.lora_A.weight": torch.zeros(rank, num_in),
        f"{PREFIX}{path}.lora_B.weight": torch.zeros(num_out, rank),
    }


def fused_tensors(rank: int = 4) -> dict[str, Tensor]:
    up = pair(f"{EXPERTS}.base_layer", NUM_EXPERTS * rank, HIDDEN, 2 * INNER)
    return up | pair(EXPERTS, NUM_EXPERTS * rank, INNER, HIDDEN)


def single_tensors(rank: int = 4) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for expert in range(NUM_EXPERTS):
        for name in ("gate_proj", "up_proj"):
            found |= pair(f"{EXPERTS}.{expert}.{name}", rank, HIDDEN, INNER)
        found |= pair(f"{EXPERTS}.{expert}.down_proj", rank, INNER, HIDDEN)
    return found


def test_parameters_of_experts_are_told_by_their_order() -> None:
    fields: dict[str, Any] = {"target_parameters": ["gate.weight", *FUSED_NAMES], "rank_pattern": {r"gate\.weight": 2}}
    found = plan(fused_tensors() | pair("model.layers.0.mlp.gate", 2, HIDDEN, NUM_EXPERTS), mixture_targets(), **fields)
    shapes = {one.shape.path: (one.shape.rank, one.shape.out_features, one.shape.num_experts) for one in found.modules}
    assert shapes == {
        f"{EXPERTS}.gate_up_proj": (4, 2 * INNER, NUM_EXPERTS),
        f"{EXPERTS}.down_proj": (4, HIDDEN, NUM_EXPERTS),
        "model.layers.0.mlp.gate": (2, NUM_EXPERTS, 0),
    }
    alone = plan(
        pair(EXPERTS, NUM_EXPERTS * 4, HIDDEN, 2 * INNER), mixture_targets(), target_parameters=FUSED_NAMES[:1]
    )
    assert [one.shape.path for one in alone.modules] == [f"{EXPERTS}.gate_up_proj"], "the outermost is the only one"


def test_linears_of_single_experts_become_fused_ones() -> None:
    found = plan(single_tensors(), mixture_targets(), target_modules=["gate_proj", "up_proj", "down_proj"])
    shapes = {one.shape.path: (one.shape.rank, one.shape.scale, one.shape.num_experts) for one in found.modules}
    assert shapes == {
        f"{EXPERTS}.gate_up_proj": (8, 2.0, NUM_EXPERTS),
        f"{EXPERTS}.down_proj": (4, 2.0, NUM_EXPERTS),
    }
    assert not found.warnings


BOTH: dict[str, Any] = {"target_parameters": list(FUSED_NAMES)}
SINGLE: dict[str, Any] = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
BAD_EXPERTS: dict[str, tuple[dict[str, Tensor], dict[str, Any], type[LoraplexError], str]] = {
    "not named": (fused_tensors(), {}, AdapterInvalid, "target_parameters"),
    "a layer too many": (fused_tensors(), {"target_parameters": ["down_proj"]}, AdapterInvalid, "experts"),
    "a layer too few": (
        {name: one for name, one in fused_tensors().items() if "base_layer" not in name},
        BOTH,
        AdapterInvalid,
        "gate_up_proj, down_proj",
    ),
    "exchanged": (
        pair(EXPERTS, 12, HIDDEN, 2 * INNER) | pair(f"{EXPERTS}.base_layer", 12, INNER, HIDDEN),
        BOTH,
        ShapeMismatch,
        "lora_A",
    ),
    "rank of another number of experts": (fused_tensors(3), BOTH, ShapeMismatch, "lora_A"),
    "A without B": (
        {name: one for name, one in fused_tensors().items() if "experts.lora_B" not in name},
        BOTH,
        AdapterInvalid,
        "no lora_B",
    ),
    "a magnitude": (
        fused_tensors() | {f"{PREFIX}{EXPERTS}.lora_magnitude_vector": torch.zeros(HIDDEN)},
        BOTH,
        AdapterUnsupported,
        "magnitude",
    ),
    "a router's weight": (
        fused_tensors() | {f"{PREFIX}model.layers.0.mlp.gate.weight": torch.zeros(NUM_EXPERTS, HIDDEN)},
        BOTH,
        AdapterUnsupported,
        "gate.weight",
    ),
    "aLoRA": (
        fused_tensors(),
        BOTH | {"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"},
        AdapterUnsupported,
        "alora_invocation_tokens",
    ),
    "of a layer that is left out": (
        single_tensors(),
        SINGLE | {"exclude_modules": r".*layers\.0\..*"},
        AdapterInvalid,
        "exclude_modules",
    ),
    "one expert missing": (
        {name: one for name, one in single_tensors().items() if ".1.up_proj" not in name},
        SINGLE,
        AdapterInvalid,
        "up_proj of expert 1",
    ),
    "gate without up": (
        {name: one for name, one in single_tensors().items() if "up_proj" not in name},
        SINGLE,
        AdapterInvalid,
        "neighbour",
    ),
    "an expert too many": (
        single_tensors() | pair(f"{EXPERTS}.{NUM_EXPERTS}.down_proj", 4, INNER, HIDDEN),
        SINGLE,
        AdapterUnsupported,
        "experts.3.down_proj",
    ),
    "ranks that differ": (
        single_tensors() | pair(f"{EXPERTS}.1.down_proj", 2, INNER, HIDDEN),
        SINGLE | {"rank_pattern": {r"1\.down_proj": 2}},
        AdapterUnsupported,
        "several ranks",
    ),
    "fused and single": (
        fused_tensors() | single_tensors(),
        BOTH | SINGLE,
        AdapterInvalid,
        "twice",
    ),
    "rank over the limit": (fused_tensors(65), BOTH | {"r": 65}, RankLimit, "rank 65"),
}


@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_experts_that_do_not_fit_are_refused_by_name(case: str) -> None:
    tensors, fields, error, match = BAD_EXPERTS[case]
    with pytest.raises(error, match=match):
        plan(tensors, mixture_targets(), **fields)
