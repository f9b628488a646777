"""Adapters that are no LoRA: refusals by name. Parity tests compare what they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft.tuners.lokr.layer import factorization
from peft.tuners.oft.layer import OFTLayer
from safetensors.torch import save
from support.adapter_files import HIDDEN, VOCAB, BytesFile, base_targets

from loraplex_adapters.formats.peft_rotations import near_divisor
from loraplex_adapters.formats.peft_saved import without_base_copies
from loraplex_adapters.formats.peft_variants import factorized, plan_variant
from loraplex_adapters.io.safetensors import PieceReader, TensorInfo, read_header, weight_sha256
from loraplex_adapters.weights import BaseTargets
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    BaseMismatch,
    LoraplexError,
    RankLimit,
    ShapeMismatch,
)

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
NORM = "base_model.model.model.norm"
LOHA = {"hada_w1_a": (HIDDEN, 2), "hada_w1_b": (2, HIDDEN), "hada_w2_a": (HIDDEN, 2), "hada_w2_b": (2, HIDDEN)}
VERA = {"vera_lambda_b": (HIDDEN,), "vera_lambda_d": (4,)}
PROJECTIONS = {"base_model.vera_A": (4, 2 * HIDDEN), "base_model.vera_B": (HIDDEN, 4)}
FIELDS: dict[str, dict[str, Any]] = {
    "VERA": {"r": 4},
    "LOHA": {"r": 2, "alpha": 4},
    "LOKR": {"r": 2, "alpha": 4},
    "IA3": {},
    "OFT": {"oft_block_size": 8},
    "BOFT": {},
}
LOKR = {"lokr_w1": (4, 4), "lokr_w2": (4, 4)}
OFT = {"oft_R.weight": (HIDDEN // 8, 28)}
BOFT = {"boft_R": (1, HIDDEN // 4, 4, 4), "boft_s": (HIDDEN, 1)}


def header(shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, dtype, shape, 0, 0, "adapter_model.safetensors") for name, shape in shapes.items()}


def of_q(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{Q_PROJ}.{name}": shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("kind", "shapes", "fields", "error", "named"),
    [
        ("VERA", of_q(VERA), {}, AdapterUnsupported, "save_projection=True"),
        ("VERA", of_q(VERA) | PROJECTIONS | {"base_model.vera_A": (4, HIDDEN - 1)}, {}, ShapeMismatch, "vera_A"),
        ("VERA", of_q(VERA | {"vera_lambda_d": (3,)}) | PROJECTIONS, {}, ShapeMismatch, "vera_lambda_d"),
        ("VERA", of_q({"vera_lambda_d": (4,)}) | PROJECTIONS, {}, AdapterInvalid, "no vera_lambda_b"),
        ("LOHA", of_q(LOHA | {"hada_t1": (2, 2)}), {}, AdapterUnsupported, "hada_t1"),
        ("LOHA", of_q(LOHA | {"hada_w1_b": (3, HIDDEN)}), {}, ShapeMismatch, "hada_w1_b"),
        ("LOHA", of_q(LOHA), {"fan_in_fan_out": True}, AdapterUnsupported, "LOHA on other modules"),
        ("LOHA", of_q(LOHA), {"a_field_of_tomorrow": 1}, AdapterUnsupported, "a_field_of_tomorrow"),
        ("LOHA", of_q(LOHA), {"r": 0}, AdapterInvalid, "rank"),
        ("LOHA", {f"base_model.model.no.such.{n}": s for n, s in LOHA.items()}, {}, BaseMismatch, "no.such"),
        ("LOHA", {}, {}, AdapterInvalid, "no tensors of LOHA"),
        ("LOKR", of_q(LOKR | {"lokr_w2": (4, 5)}), {}, ShapeMismatch, r"lokr_w2' has shape .* make it \[4, 4\]"),
        ("LOKR", of_q({"lokr_w1": (4, 4), "lokr_w2_a": (4, 1)}), {"r": 1}, AdapterInvalid, "no lokr_w2_b"),
        ("LOKR", of_q(LOKR | {"lokr_w1": (4,)}), {}, ShapeMismatch, r"lokr_w1' has shape \[4\]"),
        ("LOKR", of_q(LOKR), {}, RankLimit, f"rank {HIDDEN}"),
        (
            "LOKR",
            of_q(LOKR | {"lokr_w1_a": (4, 1)}),
            {},
            ShapeMismatch,
            "lokr_w1_a' is there, where .* lokr_w1, lokr_w2",
        ),
        ("IA3", of_q({"ia3_l": (HIDDEN + 1, 1)}), {}, ShapeMismatch, "ia3_l"),
        (
            "IA3",
            of_q({"ia3_l": (HIDDEN, 1)}),
            {"modules_to_save": ["lm_head"]},
            AdapterUnsupported,
            "modules_to_save together with peft_type IA3 is not served",
        ),
        (
            "IA3",
            {"base_model.model.model.vision_tower.layers.0.q_proj.ia3_l": (HIDDEN, 1)},
            {},
            AdapterUnsupported,
            "vision_tower.*part for images",
        ),
        ("OFT", of_q({"oft_R.weight": (HIDDEN // 8, 27)}), {}, ShapeMismatch, r"make it \[2, 28\]"),
        ("OFT", of_q({"oft_R.weight": (1, 28)}), {}, ShapeMismatch, r"make it \[2, 28\]"),
        ("OFT", of_q({"oft_R.weight": (2, 28)}), {"block_share": True}, ShapeMismatch, r"make it \[1, 28\]"),
        ("OFT", of_q({"oft_R": (HIDDEN // 8, 28)}), {}, AdapterUnsupported, "not a tensor of OFT"),
        ("OFT", of_q({"oft_R.weight": (HIDDEN // 8, 28)}), {"num_cayley_neumann_terms": 99}, AdapterInvalid, "terms"),
        ("OFT", of_q({"oft_R.weight": (HIDDEN // 8, 28)}), {"eps": float("nan")}, AdapterInvalid, "eps"),
        ("BOFT", of_q(BOFT | {"boft_R": (2, HIDDEN // 4, 4, 4)}), {}, AdapterUnsupported, "2 butterfly factors"),
        ("BOFT", of_q(BOFT | {"boft_R": (1, 3, 4, 4)}), {}, ShapeMismatch, r"make it \[1, 4, 4, 4\]"),
        ("BOFT", of_q(BOFT | {"boft_R": (1, HIDDEN // 4, 4, 5)}), {}, ShapeMismatch, "boft_R"),
        ("BOFT", of_q({"boft_s": (HIDDEN, 1)}), {}, AdapterInvalid, "no boft_R"),
        ("IA3", of_q({"ia3_l": (HIDDEN, 1), "base_layer.weight": (HIDDEN, HIDDEN)}), {}, AdapterUnsupported, "no copy"),
        ("IA3", of_q({"ia3_l": (HIDDEN, 1)}), {"target_modules": ["v_proj"]}, AdapterInvalid, "target_modules .*name"),
        ("LOHA", of_q(LOHA), {"exclude_modules": ".*q_proj"}, AdapterInvalid, "exclude_modules .* leaves its module"),
        ("IA3", {"base_model.model.model.embed_tokens.ia3_l": (1, HIDDEN)}, {}, AdapterUnsupported, "embed_tokens"),
        ("OFT", of_q(OFT | {"base_layer.bias": (HIDDEN,)}), {}, AdapterInvalid, "is a bias, which .*q_proj"),
        ("OFT", of_q(OFT | {"modules_to_save.bias": (HIDDEN,)}), {}, AdapterUnsupported, "not a tensor of OFT"),
        ("BOFT", of_q(BOFT) | {f"{NORM}.bias": (HIDDEN,)}, {}, AdapterUnsupported, "norm.bias' is not a parameter"),
        ("LOHA", of_q(LOHA | {"base_layer.bias": (HIDDEN,)}), {}, AdapterUnsupported, "no copy of a head"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    kind: str, shapes: dict[str, tuple[int, ...]], fields: dict[str, Any], error: type[LoraplexError], named: str
) -> None:
    with pytest.raises(error, match=named) as raised:
        plan_variant({"peft_type": kind, **FIELDS[kind], **fields}, header(shapes), base_targets(max_rank=HIDDEN - 1))
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("kind", "shapes", "fields", "error", "named"),
    [
        ("VERA", of_q(VERA) | PROJECTIONS, {"r": 2}, ShapeMismatch, "vera_A' has shape .* but r in .* is 2"),
        ("VERA", of_q(VERA) | PROJECTIONS | {"base_model.vera_A": (3, HIDDEN)}, {}, ShapeMismatch, "vera_A' has shape"),
        ("VERA", of_q(VERA) | PROJECTIONS | {"base_model.vera_B": (HIDDEN, 5)}, {}, ShapeMismatch, "vera_B' has shape"),
        ("LOHA", of_q(LOHA), {"r": 3}, ShapeMismatch, r"hada_w1_a' .* make it \[16, 3\]"),
        ("LOHA", of_q(LOHA), {"rank_pattern": {"q_proj": 1}}, ShapeMismatch, r"hada_w1_a' .* make it \[16, 1\]"),
        ("LOHA", of_q(LOHA | {"hada_w2_a": (HIDDEN, 1)}), {}, ShapeMismatch, r"hada_w2_a' .* make it \[16, 2\]"),
        ("LOKR", of_q(LOKR), {"r": 1}, ShapeMismatch, "lokr_w2' is there, where .* lokr_w1, lokr_w2_a, lokr_w2_b"),
        ("LOKR", of_q(LOKR), {"r": 4, "decompose_factor": 2}, ShapeMismatch, r"lokr_w1' .* make it \[2, 2\]"),
        ("LOKR", of_q(LOKR), {"r": 1, "decompose_both": True}, ShapeMismatch, "lokr_w1' is there"),
        ("LOKR", of_q(LOKR), {"decompose_factor": "4"}, AdapterInvalid, "decompose_factor must be a whole number"),
        ("OFT", of_q(OFT), {"oft_block_size": 4}, ShapeMismatch, r"make it \[4, 6\]"),
        ("OFT", of_q(OFT), {"oft_block_size": 0, "r": 4}, ShapeMismatch, r"make it \[4, 6\]"),
        ("OFT", of_q(OFT), {"r": 2}, AdapterInvalid, "one of oft_block_size and r must be"),
        ("BOFT", of_q(BOFT), {"boft_block_size": 8}, ShapeMismatch, r"make it \[1, 2, 8, 8\]"),
        ("BOFT", of_q(BOFT), {"boft_block_size": 0, "boft_block_num": 2}, ShapeMismatch, r"make it \[1, 2, 8, 8\]"),
        ("BOFT", of_q(BOFT), {"boft_block_size": 3}, ShapeMismatch, "makes no blocks for the 16 inputs"),
        ("IA3", of_q({"ia3_l": (HIDDEN, 1)}), {"feedforward_modules": ["q_proj"]}, ShapeMismatch, r"make it \[1, 16\]"),
        ("IA3", of_q({"ia3_l": (HIDDEN, 1)}), {"feedforward_modules": ".*_proj"}, ShapeMismatch, r"make it \[1, 16\]"),
        ("IA3", of_q({"ia3_l": (1, HIDDEN)}), {"feedforward_modules": []}, ShapeMismatch, r"make it \[16, 1\]"),
    ],
)
def test_a_configuration_of_other_tensors_is_refused(
    kind: str, shapes: dict[str, tuple[int, ...]], fields: dict[str, Any], error: type[LoraplexError], named: str
) -> None:
    """PEFT fails to load such an adapter, too."""
    with pytest.raises(error, match=named) as raised:
        plan_variant({"peft_type": kind, **FIELDS[kind], **fields}, header(shapes), base_targets())
    assert type(raised.value) is error


def test_sizes_are_pefts() -> None:
    for size in range(1, 200):
        for wanted in range(1, 60):
            assert near_divisor(size, wanted) == OFTLayer.adjust_oft_parameters(None, size, wanted)
            assert factorized(size, wanted) == factorization(size, wanted)
        for factor in (-2, -1, 0):
            assert factorized(size, factor) == factorization(size, factor)


def test_fields_that_are_left_out_are_as_in_peft() -> None:
    shapes = of_q(VERA | {"vera_lambda_d": (256,)})
    shapes |= {"base_model.vera_A": (256, HIDDEN), "base_model.vera_B": (HIDDEN, 256)}
    (module,) = plan_variant({"peft_type": "VERA"}, header(shapes), base_targets(max_rank=256)).modules
    assert module.shape.rank == 256
    for shape in ((HIDDEN, 1), (1, HIDDEN)):  # without feedforward_modules the tensor tells
        found = plan_variant({"peft_type": "IA3"}, header(of_q({"ia3_l": shape})), base_targets())
        assert (len(found.modules), len(found.saved)) == ((1, 0) if shape[1] == 1 else (0, 1))


def with_head_bias(targets: BaseTargets, head: torch.Tensor, bias: torch.Tensor) -> BaseTargets:
    module = replace(targets.modules["lm_head"], has_bias=True, weights=lambda: (head, bias))
    return replace(targets, modules={**targets.modules, "lm_head": module})


def test_a_copy_of_the_head_has_to_be_one() -> None:
    """PEFT writes the head's weight beside what it trained there."""
    head = torch.randn(VOCAB, HIDDEN)
    name = "base_model.model.lm_head"
    bias = torch.randn(VOCAB)
    copies = {f"{name}.base_layer.weight": head, f"{name}.base_layer.bias": bias}
    tensors = {f"{name}.ia3_l": torch.ones(VOCAB, 1), **copies}
    file = BytesFile(save(tensors))
    known = read_header(file)
    reader = PieceReader({info.file: file for info in known.values()}, "float32")
    targets = with_head_bias(base_targets(weight_sha256=weight_sha256(head)), head, bias)
    found = plan_variant({"peft_type": "IA3"}, known, targets)
    assert [module.shape.path for module in found.modules] == ["lm_head"]
    assert without_base_copies(found, reader).saved == ()
    for other_head, other_bias in ((head + 1, bias), (head, bias + 1)):
        other = with_head_bias(base_targets(weight_sha256=weight_sha256(other_head)), head, other_bias)
        with pytest.raises(AdapterUnsupported, match="another weight than the base model's"):
            without_base_copies(plan_variant({"peft_type": "IA3"}, known, other), reader)


@pytest.mark.parametrize(
    ("kind", "shapes"), [("VERA", of_q(VERA) | PROJECTIONS), ("OFT", of_q(OFT)), ("BOFT", of_q(BOFT))]
)
def test_biases_take_the_place_of_the_base_models(kind: str, shapes: dict[str, tuple[int, ...]]) -> None:
    targets = base_targets()
    modules = {path: replace(one, has_bias=one.kind == "linear") for path, one in targets.modules.items()}
    targets = replace(targets, modules=modules, parameters={"model.norm": {"bias": (HIDDEN,)}})
    other = Q_PROJ.replace("layers.0", "layers.1")
    biases = {f"{path}.bias": (HIDDEN,) for path in (f"{Q_PROJ}.base_layer", other, NORM)}
    fields = {"peft_type": kind, **FIELDS[kind], "bias": "all"}
    plan = plan_variant(fields, header(shapes | biases), targets)
    found = {one.shape.path: one for one in plan.modules}
    assert [one.bias is not None and one.shape.has_shift for one in found.values()] == [True, True]
    alone = found["model.layers.1.self_attn.q_proj"].shape
    assert (alone.rank, alone.has_gain) == (0, False)
    assert "model.norm" in [one.shape.path for one in plan.saved if one.shape.name == "bias"]
    for strange, error, named in (
        ({f"{Q_PROJ}.bias": (HIDDEN,)}, AdapterInvalid, "second bias"),
        ({f"{other}.bias": (HIDDEN + 1,)}, ShapeMismatch, r"make it \[16\]"),
    ):
        with pytest.raises(error, match=named):
            plan_variant(fields, header(shapes | biases | strange), targets)
    with pytest.raises(AdapterUnsupported, match=r"bias.* has dtype I64"):
        plan_variant(fields, header(shapes) | header(biases, "I64"), targets)


def test_vera_adapts_conv1d_too() -> None:
    targets = base_targets()
    modules = {path: replace(one, is_conv1d=True) for path, one in targets.modules.items()}
    fields = {"peft_type": "VERA", **FIELDS["VERA"], "fan_in_fan_out": True}
    (module,) = plan_variant(fields, header(of_q(VERA) | PROJECTIONS), replace(targets, modules=modules)).modules
    assert module.shape.rank == 4


def test_ranks_are_those_of_the_terms() -> None:
    (module,) = plan_variant({"peft_type": "LOHA", **FIELDS["LOHA"]}, header(of_q(LOHA)), base_targets()).modules
    assert (module.shape.rank, module.shape.scale) == (4, 2.0)
    with pytest.raises(AdapterUnsupported, match="I8"):
        plan_variant({"peft_type": "LOHA", **FIELDS["LOHA"]}, header(of_q(LOHA), "I8"), base_targets())


def test_shared_projections_are_floats_too() -> None:
    tensors = header(of_q(VERA)) | header(PROJECTIONS, "I64")
    with pytest.raises(AdapterUnsupported, match=r"vera_A.* has dtype I64"):
        plan_variant({"peft_type": "VERA", **FIELDS["VERA"]}, tensors, base_targets())


def test_paths_of_other_classes_of_model_are_understood() -> None:
    """A model without its head has no `model` in front."""
    tensors = header({"base_model.model.layers.0.self_attn.q_proj.ia3_l": (HIDDEN, 1)})
    targets = replace(base_targets(), backbone="model")
    (module,) = plan_variant({"peft_type": "IA3", **FIELDS["IA3"]}, tensors, targets).modules
    assert module.shape.path == "model.layers.0.self_attn.q_proj"


def test_an_old_rotation_is_refused() -> None:
    with pytest.raises(AdapterUnsupported, match=r"before 0\.14"):
        plan_variant({"peft_type": "OFT", "r": 4}, header(of_q({"oft_R.weight": (4, 6)})), base_targets())
