"""PEFT's VeRA, LoHa, LoKr, IA3, OFT and BOFT as low-rank terms, gains and rotations.

VeRA (arXiv 2310.11454): B and A are random and shared, and scaled by vectors: diag(b) B diag(d) A.
LoHa (arXiv 2108.06098): (W1a W1b) * (W2a W2b) by elements; each pair of their ranks is a rank of the product.
LoKr (LyCORIS): the Kronecker product of W1 and W2, of which each may have two factors; ranks multiply.
IA3 (arXiv 2205.05638): outputs, or in feed-forward layers inputs, are scaled by a vector.
OFT and BOFT rotate inputs (`peft_rotations.py`).

With VeRA, OFT and BOFT PEFT may train biases of the base model too (`bias`): of adapted modules or of all.

The ranks are those of the terms: LoHa of rank 8 becomes a LoRA of rank 64, and counts so against the server's limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME, MAX_BASE_CHARS, WEIGHTS_NAME
from loraplex_adapters.formats.peft_config import PEFT_DEFAULT, alpha, compiled_patterns, rank, refuse_unknown
from loraplex_adapters.formats.peft_patterns import (
    Budget,
    ModulePattern,
    WholePattern,
    compile_budget,
    compile_whole,
    match_budget,
)
from loraplex_adapters.formats.peft_places import PREFIX, Places, no_such_module
from loraplex_adapters.formats.peft_plan import (
    LoraPlan,
    PlannedModule,
    PlannedSaved,
    Read,
    check_bias,
    check_shape,
    not_named,
    rank_limit,
)
from loraplex_adapters.formats.peft_rotations import NO_ROTATION, Rotation, parse_blocks, plan_boft
from loraplex_adapters.formats.peft_saved import plan_parameter, saved_name
from loraplex_adapters.formats.peft_targets import TargetChoice, parse_targets
from loraplex_adapters.io.safetensors import TensorInfo, check_float, weight_sha256
from loraplex_adapters.weights import BaseTargets, FactorShape, SavedShape, TargetModule
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported, ShapeMismatch

Factors = tuple[Tensor, Tensor]  # A [rank, in] and B [out, rank]

_COMMON: Final = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "bias",
})  # fmt: skip
_LYCORIS: Final = frozenset({
    "r", "alpha", "rank_pattern", "alpha_pattern", "rank_dropout", "module_dropout", "use_effective_conv2d",
    "init_weights",
})  # fmt: skip
_OFT: Final = frozenset({
    "r", "oft_block_size", "module_dropout", "init_weights", "coft", "eps", "block_share", "use_cayley_neumann",
    "num_cayley_neumann_terms",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Variant:
    fields: Set[str]  # of the configuration, beside _COMMON
    names: Set[str]  # of a module's tensors
    adapts_conv1d: bool = False  # PEFT makes it for Conv1D, too
    has_biases: bool = False  # PEFT trains biases beside it where `bias` says so


_VARIANTS: Final[Mapping[str, _Variant]] = {
    "VERA": _Variant(
        {"r", "projection_prng_key", "save_projection", "vera_dropout", "d_initial", "init_weights"},
        {"vera_lambda_b", "vera_lambda_d"},
        adapts_conv1d=True,
        has_biases=True,
    ),
    "LOHA": _Variant(_LYCORIS, {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}),
    "LOKR": _Variant(
        _LYCORIS | {"decompose_both", "decompose_factor", "rank_dropout_scale"},
        {"lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"},
    ),
    "IA3": _Variant({"feedforward_modules", "init_ia3_weights"}, {"ia3_l"}, adapts_conv1d=True),
    "OFT": _Variant(_OFT, {"oft_R.weight"}, has_biases=True),
    "BOFT": _Variant(
        {"boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout", "init_weights"},
        {"boft_R", "boft_s"},
        has_biases=True,
    ),
}
VARIANTS: Final = tuple(_VARIANTS)
_VERA_RANK: Final = 256  # PEFT's default
_PROJECTIONS: Final = ("base_model.vera_A", "base_model.vera_B")


@dataclass(frozen=True, slots=True)
class _Config:
    """The part of the configuration that serving needs."""

    kind: str
    r: int
    alpha: float
    rank_pattern: tuple[tuple[ModulePattern, int], ...]
    alpha_pattern: tuple[tuple[ModulePattern, float], ...]
    rotation: Rotation = NO_ROTATION
    blocks: tuple[int, int] = (0, 0)  # of BOFT: size and number, one of which is 0
    decompose_both: bool = False  # of LoKr
    decompose_factor: int = -1
    scales_inputs: frozenset[str] | WholePattern | None = None  # of IA3: the modules; None: the tensors tell

    def rank_and_scale(self, path: str, budget: Budget) -> tuple[int, float]:
        """A module's rank in the tensors, and the scale of its term."""
        rank = next((value for pattern, value in self.rank_pattern if pattern.matches(path, budget)), self.r)
        if self.kind == "VERA":
            return rank, 1.0
        own = next((value for pattern, value in self.alpha_pattern if pattern.matches(path, budget)), self.alpha)
        # PEFT has LoHa's in float32.
        return rank, own / rank if self.kind != "LOHA" else torch.tensor(own / rank, dtype=torch.float32).item()

    def is_input_scaled(self, path: str, budget: Budget) -> bool | None:
        """True if IA3 scales a module's inputs, False if its outputs; None where the configuration does not tell."""
        if self.scales_inputs is None:
            return None
        if isinstance(self.scales_inputs, WholePattern):
            budget.spend(self.scales_inputs.cost(path))
            return self.scales_inputs.matches(path)
        return any(path.endswith(name) for name in self.scales_inputs)  # as in PEFT, not by whole words


def plan_variant(fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], targets: BaseTargets) -> LoraPlan:
    """The plan of an adapter whose `peft_type` is one of VARIANTS. Raises AdapterInvalid or one of its kinds."""
    config, choice = _parsed(fields), TargetChoice(fields)
    variant = _VARIANTS[config.kind]
    projections = {name: tensors[name] for name in _PROJECTIONS if name in tensors}
    if config.kind == "VERA" and len(projections) < len(_PROJECTIONS):
        raise AdapterUnsupported(f"{WEIGHTS_NAME} has no projections; save the adapter with save_projection=True")
    found: dict[str, dict[str, TensorInfo]] = {}
    biases: list[TensorInfo] = []
    heads: list[TensorInfo] = []  # copies of a head, which PEFT writes where that is a target
    for tensor in tensors.values():
        if tensor.name in _PROJECTIONS and config.kind == "VERA":
            check_float(tensor)
            continue
        path, wrapper, name = saved_name(tensor)
        if name == "bias" and wrapper in ("", "base_layer") and variant.has_biases:
            biases.append(tensor)
            continue
        if wrapper == "base_layer":
            heads.append(tensor)
            continue
        path, name = _path_and_name(tensor, config.kind)
        if name not in variant.names:
            raise AdapterUnsupported(
                f"{tensor.where} is not a tensor of {config.kind}, and no tensor is left out silently"
            )
        found.setdefault(path, {})[name] = tensor
        check_float(tensor)
    if not found:
        raise AdapterInvalid(f"{WEIGHTS_NAME} has no tensors of {config.kind}")
    budget = match_budget()
    modules: list[PlannedModule] = []
    saved: list[PlannedSaved] = []
    places = Places(found, targets)
    for path, parts in found.items():
        target = targets.modules.get(places.of(path))
        first = next(iter(parts.values()))
        if target is None:
            raise no_such_module(path, first, targets)
        if field := choice.field_against(path):
            raise not_named(first, field)
        if target.kind != "linear" or (target.is_conv1d and not variant.adapts_conv1d):
            raise AdapterUnsupported(
                f"{first.where} adapts a module of another kind than a linear, which is not served"
            )
        if config.kind == "IA3":
            _plan_scaling(first, target, config.is_input_scaled(path, budget), modules, saved)
            continue
        if config.kind == "OFT":
            saved.append(config.rotation.plan(first, target))
            continue
        if config.kind == "BOFT":
            _all_of(parts, ("boft_R", "boft_s"))
            rotation, scale = plan_boft(parts, target, *config.blocks)
            saved.append(rotation)
            modules.append(_scaling(scale, target, has_shift=target.has_bias))
            continue
        rank, scale = config.rank_and_scale(path, budget)
        factors, num_ranks = _MAKERS[config.kind]({**parts, **projections}, target, rank, config)
        if num_ranks > targets.max_rank:
            raise rank_limit(f"{first.where} makes a term of", num_ranks, targets.max_rank)
        shape = FactorShape(target.path, num_ranks, target.in_features, target.out_features, scale)
        modules.append(PlannedModule(shape, target, None, None, made=factors))
    modules = _with_biases(modules, biases, places, targets, saved)
    copies = tuple(_head_copy(tensor, places, targets) for tensor in heads)
    modules.sort(key=lambda module: module.shape)
    saved.sort(key=lambda one: (one.shape.path, one.shape.name))
    base_model = str(fields.get("base_model_name_or_path") or "")[:MAX_BASE_CHARS]
    return LoraPlan(tuple(modules), tuple(saved), (), format=config.kind, base_model=base_model, copies=copies)


def _head_copy(tensor: TensorInfo, places: Places, targets: BaseTargets) -> PlannedSaved:
    """A copy of the head's weight or bias. Raises AdapterUnsupported for one of another module."""
    path, _, name = saved_name(tensor)
    target = targets.modules.get(places.of(path))
    digests = {} if target is None else {"weight": target.weight_sha256}
    if target is not None and target.weight_sha256 and name == "bias" and target.weights is not None:
        bias = target.weights()[1]
        digests["bias"] = "" if bias is None else weight_sha256(bias.detach())
    if target is None or not (digest := digests.get(name)):
        raise AdapterUnsupported(f"{tensor.where} is no copy of a head, and no tensor is left out silently")
    check_float(tensor)
    shape = (target.out_features, target.in_features) if name == "weight" else (target.out_features,)
    check_shape(tensor, shape)
    return PlannedSaved(SavedShape(target.path, name, shape), tensor, digest)


def _with_biases(
    modules: Iterable[PlannedModule],
    biases: Iterable[TensorInfo],
    places: Places,
    targets: BaseTargets,
    saved: list[PlannedSaved],
) -> list[PlannedModule]:
    """The modules with biases in the place of the base model's. Those of other modules than linears are `saved`."""
    found = {one.shape.path: one for one in modules}
    seen: set[str] = set()
    for tensor in biases:
        path = places.of(saved_name(tensor)[0])
        if path in seen:
            raise AdapterInvalid(f"{tensor.where} is a second bias for the same module")
        seen.add(path)
        check_float(tensor)
        target = targets.modules.get(path)
        if target is None or target.kind != "linear":
            saved.append(plan_parameter(tensor, path, "bias", targets))
            continue
        check_shape(tensor, (target.out_features,))
        check_bias(tensor, target, targets)
        alone = FactorShape(path, 0, target.in_features, target.out_features, 1.0)
        module = found.get(path) or PlannedModule(alone, target, None, None)
        found[path] = replace(module, shape=replace(module.shape, has_shift=True), bias=tensor)
    return list(found.values())


def _path_and_name(tensor: TensorInfo, kind: str) -> tuple[str, str]:
    """Path of the module that a tensor belongs to, and the tensor's name in it."""
    words = tensor.name.removeprefix(PREFIX).split(".")
    num_words = 2 if kind == "OFT" else 1
    return ".".join(words[:-num_words]), ".".join(words[-num_words:])


def _parsed(fields: Mapping[str, Any]) -> _Config:
    kind = str(fields["peft_type"])
    beside = next((name for name in ("modules_to_save", "trainable_token_indices") if fields.get(name)), "")
    if beside:
        raise AdapterUnsupported(f"{CONFIG_NAME}: {beside} together with peft_type {kind} is not served")
    refuse_unknown(fields, _COMMON | _VARIANTS[kind].fields)
    if fields.get("fan_in_fan_out") and not _VARIANTS[kind].adapts_conv1d:
        raise AdapterUnsupported(f"{CONFIG_NAME}: {kind} on other modules than linears is not served")
    if kind == "IA3":
        return _Config(kind, 0, 0.0, (), (), scales_inputs=_scaled_inputs(fields.get("feedforward_modules")))
    if kind == "BOFT":
        return _Config(kind, 0, 0.0, (), (), blocks=parse_blocks(fields, "boft_block_size", "boft_block_num", 4))
    if kind == "OFT":
        return _Config(kind, 0, 0.0, (), (), Rotation.parsed(fields))
    budget = compile_budget()
    ranks, alphas = (compiled_patterns(fields, name, budget) for name in ("rank_pattern", "alpha_pattern"))
    return _Config(
        kind,
        rank(fields.get("r", _VERA_RANK if kind == "VERA" else PEFT_DEFAULT), "r"),
        1.0 if kind == "VERA" else alpha(fields.get("alpha", PEFT_DEFAULT), "alpha"),
        tuple((pattern, rank(value, "rank_pattern")) for pattern, value in ranks),
        tuple((pattern, alpha(value, "alpha_pattern")) for pattern, value in alphas),
        decompose_both=bool(fields.get("decompose_both")),
        decompose_factor=_decompose_factor(fields),
    )


def _decompose_factor(fields: Mapping[str, Any]) -> int:
    factor = fields.get("decompose_factor", -1)
    if type(factor) is not int:
        raise AdapterInvalid(f"{CONFIG_NAME}: decompose_factor must be a whole number")
    return factor


def _scaled_inputs(value: Any) -> frozenset[str] | WholePattern | None:
    return compile_whole(value) if isinstance(value, str) else parse_targets(value, "feedforward_modules")


def _plan_scaling(
    tensor: TensorInfo,
    target: TargetModule,
    is_of_inputs: bool | None,
    modules: list[PlannedModule],
    saved: list[PlannedSaved],
) -> None:
    """IA3's vector is a column where it scales outputs, a row where it scales inputs. `is_of_inputs`: None where only
    the tensor tells."""
    if is_of_inputs is None:
        is_of_inputs = tensor.shape != (target.out_features, 1)
    check_shape(tensor, (1, target.in_features) if is_of_inputs else (target.out_features, 1))
    if is_of_inputs:
        saved.append(PlannedSaved(SavedShape(target.path, "input_gain", (target.in_features,)), tensor))
    else:
        modules.append(_scaling(tensor, target))


def _scaling(tensor: TensorInfo, target: TargetModule, *, has_shift: bool = False) -> PlannedModule:
    """The planned scaling of a module's outputs. `has_shift`: the base's bias is not scaled."""
    shape = FactorShape(target.path, 0, target.in_features, target.out_features, 1.0, True, has_shift)
    return PlannedModule(shape, target, None, None, gain=tensor)


# --- factors ----------------------------------------------------------------------------------------------------------

Made = tuple[Callable[[Read], Factors], int]  # how they are made when the tensors are read, and their rank


def _vera(parts: Mapping[str, TensorInfo], target: TargetModule, rank: int, config: _Config) -> Made:
    by_out, by_rank = _all_of(parts, ("vera_lambda_b", "vera_lambda_d"))
    whole_a, whole_b = (parts[name] for name in _PROJECTIONS)
    for whole, of_ranks, least in ((whole_a, 0, target.in_features), (whole_b, 1, target.out_features)):
        if len(whole.shape) != 2 or whole.shape[of_ranks] != rank:
            raise ShapeMismatch(f"{whole.where} has shape {list(whole.shape)}, but r in {CONFIG_NAME} is {rank}")
        if whole.shape[1 - of_ranks] < least:
            raise ShapeMismatch(f"{whole.where} has shape {list(whole.shape)}, too small for {target.path!a}")
    check_shape(by_rank, (rank,))
    check_shape(by_out, (target.out_features,))

    def make(read: Read) -> Factors:
        a = read(whole_a)[:, : target.in_features] * read(by_rank)[:, None]
        return a, read(whole_b)[: target.out_features] * read(by_out)[:, None]

    return make, rank


def _loha(parts: Mapping[str, TensorInfo], target: TargetModule, rank: int, config: _Config) -> Made:
    wanted = _all_of(parts, ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"))
    for idx, tensor in enumerate(wanted):
        check_shape(tensor, (rank, target.in_features) if idx % 2 else (target.out_features, rank))

    def make(read: Read) -> Factors:
        one_b, one_a, other_b, other_a = map(read, wanted)
        # Row i of a product by elements is the product of row i's of both, for each pair of ranks.
        b = (one_b[:, :, None] * other_b[:, None, :]).flatten(1)
        return (one_a[:, None, :] * other_a[None, :, :]).flatten(0, 1), b

    return make, rank * rank


def _lokr(parts: Mapping[str, TensorInfo], target: TargetModule, rank: int, config: _Config) -> Made:
    outs, ins = (factorized(size, config.decompose_factor) for size in (target.out_features, target.in_features))
    # Which of the two matrices PEFT has in two factors.
    has_factors = (
        config.decompose_both and rank < max(outs[0], ins[0]) / 2,
        rank < max(outs[1], ins[1]) / 2,
    )
    shapes = [
        {f"{name}_a": (num_out, rank), f"{name}_b": (rank, num_in)} if is_split else {name: (num_out, num_in)}
        for name, is_split, num_out, num_in in zip(("lokr_w1", "lokr_w2"), has_factors, outs, ins, strict=True)
    ]
    wanted = {name: shape for side in shapes for name, shape in side.items()}
    if strange := sorted(parts.keys() - wanted.keys()):
        raise ShapeMismatch(
            f"{parts[strange[0]].where} is there, where base model and {CONFIG_NAME} make {', '.join(wanted)}"
        )
    tensors = dict(zip(wanted, _all_of(parts, wanted), strict=True))
    for name, shape in wanted.items():
        check_shape(tensors[name], shape)
    sides = [[tensors[name] for name in side] for side in shapes]
    ranks = [rank if is_split else min(side[0].shape) for side, is_split in zip(sides, has_factors, strict=True)]

    def make(read: Read) -> Factors:
        factors = [_two_factors([read(tensor) for tensor in side]) for side in sides]
        return torch.kron(factors[0][0], factors[1][0]), torch.kron(factors[0][1], factors[1][1])

    return make, ranks[0] * ranks[1]


def factorized(size: int, factor: int) -> tuple[int, int]:
    """Two numbers whose product is `size`, as LoKr in PEFT chooses them: `factor` and another, or with the smaller one
    as large as `factor` lets it be. -1 sets no limit."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = math.isqrt(size) if factor == -1 else min(math.isqrt(size), factor)
    smaller = next((one for one in range(most, 1, -1) if size % one == 0), 1)
    return smaller, size // smaller


def _two_factors(matrices: list[Tensor]) -> Factors:
    """A and B of a matrix that has two factors, or of one that is its own factor beside the identity."""
    if len(matrices) == 2:
        return matrices[1], matrices[0]
    (whole,) = matrices
    num_out, num_in = whole.shape
    if num_in <= num_out:
        return torch.eye(num_in, dtype=whole.dtype), whole
    return whole, torch.eye(num_out, dtype=whole.dtype)


_MAKERS: Final[Mapping[str, Callable[..., Made]]] = {"VERA": _vera, "LOHA": _loha, "LOKR": _lokr}


def _all_of(parts: Mapping[str, TensorInfo], names: Iterable[str]) -> tuple[TensorInfo, ...]:
    missing = [name for name in names if name not in parts]
    if missing:
        raise AdapterInvalid(f"{next(iter(parts.values())).where} has no {missing[0]} beside it")
    return tuple(parts[name] for name in names)
