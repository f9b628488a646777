"""PEFT LoRA: plan against the base model, classifier, saved parameters, and bytes.

The plan is made of the configuration and the file's header. Every tensor of the file ends up in the plan, or the load
fails with its name; so does a module that the base model lacks, a wrong shape, a rank over the limit. Modules may have
ranks and scales of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME, WEIGHTS_NAME
from loraplex_adapters.formats.peft_config import CLASSIFIER_NAMES, MAX_LABELS, PeftLoraConfig, path_ends
from loraplex_adapters.formats.peft_patterns import Budget, match_budget
from loraplex_adapters.io.safetensors import (
    DTYPE_BYTES,
    DTYPES,
    PieceReader,
    PieceWriter,
    TensorInfo,
    check_float,
)
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.weights import (
    AdapterLayout,
    BaseTargets,
    ClassifierShape,
    FactorShape,
    SavedShape,
    TargetModule,
)
from loraplex_contracts.adapters import ClassifierInfo
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    BaseMismatch,
    NonFinite,
    RankLimit,
    ShapeMismatch,
)

_PREFIX = "base_model.model."
Factor = Literal["a", "b", "magnitude", "lora_bias", "bias"]
# What a key says, and which tensor of a module that is. Embeddings have the second two in the place of the first two.
_LINEAR_FACTORS: Mapping[str, Factor] = {"lora_A": "a", "lora_B": "b"}
_EMBEDDING_FACTORS: Mapping[str, Factor] = {"lora_embedding_A": "a", "lora_embedding_B": "b"}
_FACTORS: Mapping[str, Factor] = {**_LINEAR_FACTORS, **_EMBEDDING_FACTORS, "lora_magnitude_vector": "magnitude"}
_REFUSED_PARTS: Mapping[str, str] = {
    "lora_diag": "a diagonal of KaSA",
    "lora_E": "AdaLoRA",
    "lora_ranknum": "AdaLoRA",
}


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """One module's tensors in the file, checked."""

    shape: FactorShape
    target: TargetModule
    a: TensorInfo | None  # both or none
    b: TensorInfo | None
    magnitude: TensorInfo | None = None  # of DoRA [out]
    lora_bias: TensorInfo | None = None  # of B [out]
    bias: TensorInfo | None = None  # in the place of the base model's [out]
    gain: TensorInfo | None = None  # of IA3 [out, 1]
    # Makes A [rank, in] and B [out, rank] of an adapter that has them in another form, from tensors that it reads.
    made: Callable[[Callable[[TensorInfo], Tensor]], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True, slots=True)
class PlannedClassifier:
    """A classifier's tensors in the file, checked."""

    shape: ClassifierShape
    weight: TensorInfo
    bias: TensorInfo | None


@dataclass(frozen=True, slots=True)
class PlannedSaved:
    """A parameter in the file that takes the place of the base model's."""

    shape: SavedShape
    tensor: TensorInfo
    weight_sha256: str = ""  # of the base model's: a mere copy of it is left out


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The tensors to read. `modules` are in the layout's order."""

    modules: tuple[PlannedModule, ...]
    saved: tuple[PlannedSaved, ...]
    warnings: tuple[str, ...]
    classifier: PlannedClassifier | None = None


# The tensors of one module as they turn up.
_Found = dict[Factor, TensorInfo]


def plan_lora(config: PeftLoraConfig, tensors: Mapping[str, TensorInfo], targets: BaseTargets) -> LoraPlan:
    """Raises AdapterInvalid or one of its kinds (AdapterUnsupported, BaseMismatch, ShapeMismatch, RankLimit)."""
    found: dict[str, _Found] = {}
    others: list[TensorInfo] = []
    saved: dict[str, TensorInfo] = {}  # of a classifier
    for tensor in tensors.values():
        checkpoint()
        path, which = _parts(tensor)
        if which is not None:
            if found.setdefault(path, {}).setdefault(which, tensor) is not tensor:
                raise AdapterInvalid(f"{tensor.where} is a second {which} for the same module")
        elif config.classifies != "no" and (name := _name_in_classifier(tensor)):
            if saved.setdefault(name, tensor) is not tensor:
                raise AdapterInvalid(f"{tensor.where} is a second {name} of a classifier")
        else:
            others.append(tensor)
    above = _above(found, targets)
    if not found:
        raise AdapterInvalid(f"{WEIGHTS_NAME} has no LoRA tensors")
    own: list[PlannedSaved] = []
    for tensor in others:
        path, name = _saved_name(tensor)
        if name == "bias" and above + path in targets.modules:
            if found.setdefault(path, {}).setdefault("bias", tensor) is not tensor:
                raise AdapterInvalid(f"{tensor.where} is a second bias for the same module")
        else:
            own.append(_saved(tensor, above + path, name, config, targets))
    own = _tied(own, config, targets)
    _check_saved(own, saved, config)
    budget = match_budget()
    modules = [_module(path, above, entry, config, targets, budget) for path, entry in found.items()]
    modules.sort(key=lambda module: module.shape)
    return LoraPlan(
        tuple(modules),
        tuple(sorted(own, key=lambda one: (one.shape.path, one.shape.name))),
        tuple(_warnings(config, targets, found)),
        None if config.classifies == "no" else _classifier(config, saved, targets),
    )


def _name_in_classifier(tensor: TensorInfo) -> str:
    """`weight` or `bias`; empty for a tensor that is not a classifier's."""
    module, _, name = tensor.name.removeprefix(_PREFIX).partition(".")
    name = name.removeprefix("modules_to_save.").removeprefix("default.")
    return name if module in CLASSIFIER_NAMES and name in ("weight", "bias") else ""


def _classifier(config: PeftLoraConfig, saved: Mapping[str, TensorInfo], targets: BaseTargets) -> PlannedClassifier:
    weight, bias = saved.get("weight"), saved.get("bias")
    if weight is None:
        raise AdapterInvalid(
            f"{CONFIG_NAME} says that the adapter classifies {config.classifies}, but {WEIGHTS_NAME} has no "
            f"{' or '.join(f'{name}.weight' for name in CLASSIFIER_NAMES)}: save it with modules_to_save"
        )
    num_labels = weight.shape[0] if len(weight.shape) == 2 else 0
    if not 1 <= num_labels <= MAX_LABELS:
        raise ShapeMismatch(f"{weight.where} has shape {list(weight.shape)}; a classifier has 1 to {MAX_LABELS} labels")
    check_shape(weight, (num_labels, targets.hidden_size))
    check_float(weight)
    if bias is not None:
        check_shape(bias, (num_labels,))
        check_float(bias)
    labels = config.labels or tuple(f"LABEL_{number}" for number in range(num_labels))
    if len(labels) != num_labels:
        raise AdapterInvalid(f"{CONFIG_NAME}: id2label has {len(labels)} labels; {weight.where} has {num_labels} rows")
    info = ClassifierInfo(labels, config.classifies == "tokens")
    return PlannedClassifier(ClassifierShape(info, targets.hidden_size, bias is not None), weight, bias)


def _parts(tensor: TensorInfo) -> tuple[str, Factor | None]:
    """Module path and which of its tensors a key such as `base_model.model.<path>.lora_A[.<adapter name>][.weight]`
    names; None when the key is not of that form."""
    name = tensor.name.removeprefix(_PREFIX)
    words = name.split(".")
    # The part is the last word but three at most: `lora_A`, `.name`, `.weight`. A module's own name may say lora_A too.
    for idx in range(len(words) - 1, max(len(words) - 4, 0), -1):
        if words[idx] in _FACTORS:
            return ".".join(words[:idx]), _factor(tensor, words[idx], words[idx + 1 :])
    return name, None


def _factor(tensor: TensorInfo, part: str, words: list[str]) -> Factor:
    """Of a key's part and the words behind it, an adapter's name among them or not."""
    kind = words.pop() if words and words[-1] in ("weight", "bias") else ""
    if part == "lora_B" and kind == "bias" and len(words) <= 1:
        return "lora_bias"
    is_wrong = (part in _LINEAR_FACTORS and not kind) or (part in _EMBEDDING_FACTORS and kind)
    if len(words) > 1 or kind == "bias" or is_wrong:
        raise AdapterInvalid(f"{tensor.where} is not named as PEFT names its tensors")
    return _FACTORS[part]


def _above(found: Mapping[str, _Found], targets: BaseTargets) -> str:
    """The prefix of the adapter's paths in the base model: an adapter of a model without a head
    (FEATURE_EXTRACTION) leaves out where that model is in the one with its head."""
    backbone = f"{targets.backbone}."
    is_headless = not any(path in targets.modules for path in found)
    return backbone if is_headless and any(backbone + path in targets.modules for path in found) else ""


_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"


def _saved_name(tensor: TensorInfo) -> tuple[str, str]:
    """Module path and name of a parameter that is not part of a LoRA; the name is empty of rows for some tokens."""
    name = tensor.name.removeprefix(_PREFIX)
    if name.endswith(_TOKEN_ROWS):
        return name.removesuffix(_TOKEN_ROWS), ""
    path, _, last = name.rpartition(".")
    path = re.sub(r"\.(?:base_layer|modules_to_save(?:\.default)?)$", "", path)
    return path, last


def _saved(tensor: TensorInfo, path: str, name: str, config: PeftLoraConfig, targets: BaseTargets) -> PlannedSaved:
    """Raises AdapterUnsupported for a tensor that has no place in the model."""
    for word in tensor.name.split("."):
        if word in _REFUSED_PARTS:
            raise AdapterUnsupported(f"{tensor.where} is {_REFUSED_PARTS[word]}, which is not served")
    check_float(tensor)
    module = targets.modules.get(path)
    if module is not None and name in ("weight", ""):
        is_transposed = module.kind == "embedding" or module.is_conv1d
        rows, columns = module.out_features, module.in_features
        shape = (columns, rows) if is_transposed else (rows, columns)
        if not name:
            token_ids = config.token_rows(path, targets)
            if any(token_id >= shape[0] for token_id in token_ids) or module.is_conv1d:
                raise ShapeMismatch(f"{tensor.where} has rows for tokens that {targets.model_id!a} does not have")
            shape = (len(token_ids), shape[1])
            check_shape(tensor, shape)
            return PlannedSaved(SavedShape(path, "weight", shape, token_ids), tensor)
        if tensor.shape != shape and path in (targets.embedding, targets.tied_head or targets.embedding):
            raise ShapeMismatch(
                f"{tensor.where} has shape {list(tensor.shape)}, the base model's is {list(shape)}: an adapter that "
                "adds tokens is not served; use a base model with as many token embeddings"
            )
        check_shape(tensor, shape)
        is_kept = not module.weight_sha256 or any(end in config.modules_to_save for end in path_ends(path))
        return PlannedSaved(SavedShape(path, name, shape), tensor, "" if is_kept else module.weight_sha256)
    found = targets.parameters.get(path, {}).get(name)
    if found is None:
        raise AdapterUnsupported(
            f"{tensor.where} is not a parameter of {targets.model_id!a} that an adapter can bring, and no tensor is "
            "left out silently"
        )
    check_shape(tensor, found)
    return PlannedSaved(SavedShape(path, name, found), tensor)


def _check_saved(own: list[PlannedSaved], classifier: Mapping[str, TensorInfo], config: PeftLoraConfig) -> None:
    """Raises AdapterInvalid where a parameter comes twice, or the configuration names what the file does not have."""
    seen: set[tuple[str, str]] = set()
    for one in own:
        if (place := (one.shape.path, one.shape.name)) in seen:
            raise AdapterInvalid(f"{one.tensor.where} is a second {one.shape.name} for the same module")
        seen.add(place)
    ends = {end for one in own for end in path_ends(one.shape.path)}
    names = set(config.modules_to_save) - ends
    names -= {name for name in names if any(f".{name}." in f".{one.shape.path}." for one in own)}
    if classifier:
        names -= set(CLASSIFIER_NAMES)
    if names:
        raise AdapterInvalid(f"{CONFIG_NAME}: modules_to_save names {ascii(sorted(names))[:200]}, which is not there")
    if config.token_indices and not any(one.shape.token_ids is not None for one in own):
        raise AdapterInvalid(f"{CONFIG_NAME} has trainable_token_indices, but {WEIGHTS_NAME} has no rows for them")


def _tied(saved: list[PlannedSaved], config: PeftLoraConfig, targets: BaseTargets) -> list[PlannedSaved]:
    """With the parameters that stand for two, because the base model ties its head to its embedding: rows of tokens,
    and where the configuration says so (ensure_weight_tying) whole weights."""
    if not targets.tied_head:
        return saved
    by_path = {one.shape.path: one for one in saved if one.shape.name == "weight"}
    ends = (targets.embedding, targets.tied_head)
    for here, there in (ends, ends[::-1]):
        one = by_path.get(here)
        if one is not None and there not in by_path and (one.shape.token_ids is not None or config.ties_weights):
            saved = [*saved, replace(one, shape=replace(one.shape, path=there))]
    return saved


def _module(
    path: str, above: str, entry: _Found, config: PeftLoraConfig, targets: BaseTargets, budget: Budget
) -> PlannedModule:
    tensor = next(iter(entry.values()))
    a, b, magnitude = entry.get("a"), entry.get("b"), entry.get("magnitude")
    if (a is None) is not (b is None) or (a is None and "bias" not in entry):
        missing = "A" if a is None else "B"
        raise AdapterInvalid(f"{tensor.where} has no lora_{missing} beside it")
    module = targets.modules.get(above + path)
    if module is None:
        raise _no_such_module(path, tensor, targets)
    rank, scale = 0, 1.0
    if a is not None and b is not None:
        if ("lora_embedding_A" in a.name) is not (module.kind == "embedding"):
            raise ShapeMismatch(f"{a.where} does not fit: {path!a} is of kind {module.kind}")
        if not config.names_target(path):
            raise AdapterInvalid(
                f"{a.where} is there, but target_modules in {CONFIG_NAME} does not name its module: the two "
                "files do not belong together"
            )
        rank, scale = config.rank_and_scale(path, budget)
        largest = max(rank, a.shape[0] if a.shape else 0)
        if largest > targets.max_rank:
            raise RankLimit(f"{a.shown} has rank {largest}; this server takes ranks up to {targets.max_rank}")
        check_shape(a, (rank, module.in_features))
        check_shape(b, (module.out_features, rank))
        for name, is_wanted, which in (
            ("use_dora", config.use_dora, "magnitude"),
            ("lora_bias", config.lora_bias and module.kind == "linear", "lora_bias"),
        ):
            if is_wanted is not (which in entry):
                raise AdapterInvalid(
                    f"{a.where} has {'no' if is_wanted else 'a'} {which.replace('_', ' ')} beside it, but {name} in "
                    f"{CONFIG_NAME} is {str(is_wanted).lower()}: the two files do not belong together"
                )
    for which in ("magnitude", "lora_bias", "bias"):
        if which in entry:
            check_shape(entry[which], (module.out_features,))
    if "bias" in entry and not module.has_bias:
        raise AdapterInvalid(f"{entry['bias'].where} is a bias, which {path!a} of {targets.model_id!a} does not have")
    for one in entry.values():
        check_float(one)
    has_shift = "bias" in entry or "lora_bias" in entry or (magnitude is not None and module.has_bias)
    shape = FactorShape(
        module.path, rank, module.in_features, module.out_features, scale, magnitude is not None, has_shift
    )
    return PlannedModule(shape, module, a, b, magnitude, entry.get("lora_bias"), entry.get("bias"))


def _no_such_module(path: str, tensor: TensorInfo, targets: BaseTargets) -> AdapterInvalid:
    if "experts" in path.split("."):
        return AdapterUnsupported(f"{tensor.where} adapts the experts of a mixture, which is not served")
    return BaseMismatch(
        f"{tensor.where} adapts a module that {targets.model_id!a} does not have; the adapter was "
        "made for another base model"
    )


def check_shape(tensor: TensorInfo, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ShapeMismatch(
            f"{tensor.where} has shape {list(tensor.shape)}; base model and {CONFIG_NAME} make it {list(expected)}"
        )


def _warnings(config: PeftLoraConfig, targets: BaseTargets, found: Mapping[str, _Found]) -> list[str]:
    """Oddities that do no harm."""
    warnings: list[str] = []
    if config.base_model and config.base_model != targets.model_id:
        warnings.append(f"was trained on {config.base_model!a}, served on {targets.model_id!a}")
    served = {end for path in found for end in path_ends(path)}
    missing = sorted((config.target_modules or frozenset()) - served)
    if missing:
        warnings.append(f"names the targets {ascii(missing)[:200]} but has no tensors for them")
    return warnings


def write_lora(plan: LoraPlan, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the factors from the beginning of the layout on. Raises NonFinite, or what the file raises."""
    for run in _runs(plan, layout):
        if isinstance(run, PlannedModule):
            for place, tensor in _computed(run, layout, reader):
                out.pad_to(place)
                out.write(tensor)
            continue
        out.pad_to(run.target)
        try:
            for piece in reader.pieces(run.whole):
                out.write(piece)
        except NonFinite:
            for tensor in run.tensors:  # which one is it?
                for _ in reader.pieces(tensor):
                    pass
            raise


def write_classifier(plan: PlannedClassifier, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the classifier at its place. Raises NonFinite, or what the file raises."""
    placed = layout.classifier
    assert placed is not None, "a classifier has its place in the layout"
    for tensor, place in ((plan.weight, placed.weight), (plan.bias, placed.bias)):
        if tensor is not None:
            out.pad_to(place)
            for piece in reader.pieces(tensor):
                out.write(piece)


def write_saved(plan: LoraPlan, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the saved parameters at their places. Raises NonFinite, or what the file raises."""
    for saved, placed in zip(plan.saved, layout.saved, strict=True):
        out.pad_to(placed.offset)
        for piece in reader.pieces(saved.tensor):
            out.write(piece)


def without_base_copies(plan: LoraPlan, reader: PieceReader) -> LoraPlan:
    """The plan without parameters that are mere copies of the base model's, which PEFT saves beside a LoRA on
    embeddings."""
    kept = tuple(one for one in plan.saved if not one.weight_sha256 or reader.sha256(one.tensor) != one.weight_sha256)
    return replace(plan, saved=kept)


@dataclass(slots=True)
class _Run:
    """Tensors without a gap between them."""

    tensors: list[TensorInfo]
    target: int  # where their bytes begin in the layout

    @property
    def whole(self) -> TensorInfo:
        """As one tensor, with the first one's name."""
        return replace(self.tensors[0], num_bytes=sum(tensor.num_bytes for tensor in self.tensors))


def _runs(plan: LoraPlan, layout: AdapterLayout) -> Iterator[_Run | PlannedModule]:
    """In the layout's order. A module comes by itself for what is computed of its tensors."""
    itemsize = DTYPES[layout.dtype].itemsize
    run: _Run | None = None
    source_end = target_end = -1
    for module, placed in zip(plan.modules, layout.factors, strict=True):
        for tensor, target in ((module.a, placed.a_offset), (module.b, placed.b_offset)):
            if tensor is None:
                continue
            if run and (tensor.offset, target, tensor.dtype) == (source_end, target_end, run.tensors[0].dtype):
                run.tensors.append(tensor)
            else:
                if run:
                    yield run
                run = _Run([tensor], target)
            source_end = tensor.offset + tensor.num_bytes
            target_end = target + tensor.num_bytes // DTYPE_BYTES[tensor.dtype] * itemsize
        if not module.shape.is_plain or module.made is not None:
            if run:
                yield run
            run = None
            yield module
    if run:
        yield run


def _computed(module: PlannedModule, layout: AdapterLayout, reader: PieceReader) -> Iterator[tuple[int, Tensor]]:
    """Places and values that are computed of a module's tensors, in the order of the places."""
    placed = next(placed for placed in layout.factors if placed.shape.path == module.shape.path)
    if module.made is not None:
        a, b = module.made(partial(_read, reader=reader, dtype=_wide(layout.dtype)))
        yield placed.a_offset, _narrow(a, layout.dtype, module)
        yield placed.b_offset, _narrow(b, layout.dtype, module)
    gain, shift = rescaling(module, layout.dtype, reader)
    if gain is not None:
        yield placed.gain_offset, _narrow(gain, layout.dtype, module)
    if shift is not None:
        yield placed.shift_offset, _narrow(shift, layout.dtype, module)


def _read(tensor: TensorInfo, reader: PieceReader, dtype: torch.dtype) -> Tensor:
    """A whole tensor, widened. Raises NonFinite, or what the file raises."""
    return torch.cat([piece.to(dtype) for piece in reader.pieces(tensor)]).view(tensor.shape)


def _wide(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32


# Of a base weight, that are compared with an adapter's at once.
_BLOCK_BYTES = 8 << 20


def rescaling(module: PlannedModule, dtype: str, reader: PieceReader) -> tuple[Tensor | None, Tensor | None]:
    """(gain [out], shift [out]) of y = gain * (W x + bias + scale * B A x) + shift, in float32 at least.

    DoRA (arXiv 2402.09353): gain is the magnitude over the norm of each row of W + scale * B A. Raises NonFinite, or
    what the file raises.
    """
    wide = _wide(dtype)
    if module.gain is not None:
        return _read(module.gain, reader, wide).flatten(), None
    if module.shape.is_plain:
        return None, None
    assert module.target.weights is not None, "targets of a loaded model have their weights"
    weight, base_bias = module.target.weights()

    def read(tensor: TensorInfo | None) -> Tensor | None:
        return None if tensor is None else _read(tensor, reader, wide).to(weight.device)

    magnitude, lora_bias, bias = read(module.magnitude), read(module.lora_bias), read(module.bias)
    gain: Tensor | None = None
    if magnitude is not None:
        a, b = read(module.a), read(module.b)
        assert a is not None, "a magnitude has its factors"
        assert b is not None
        norms: list[Tensor] = []
        num_rows = max(1, _BLOCK_BYTES // (weight.shape[1] * wide.itemsize))
        for start in range(0, weight.shape[0], num_rows):
            update = b[start : start + num_rows] @ a
            rows = weight[start : start + num_rows].to(wide) + module.shape.scale * update
            norms.append(torch.linalg.vector_norm(rows, dim=1))
            checkpoint()
        gain = magnitude / torch.cat(norms)
    if not module.shape.has_shift:
        return gain, None
    old = base_bias.to(wide) if base_bias is not None else torch.zeros_like(weight[:, 0], dtype=wide)
    shift = -old if gain is None else -gain * old
    shift += old if bias is None else bias
    if lora_bias is not None:
        shift += module.shape.scale * lora_bias
    return gain, shift


def _narrow(tensor: Tensor, dtype: str, module: PlannedModule) -> Tensor:
    """As it is stored. Raises NonFinite."""
    found = tensor.to(DTYPES[dtype]).contiguous().cpu()
    if not bool(torch.isfinite(found).all()):
        raise NonFinite(
            f"{module.shape.path!a}: what is computed of its tensors is not finite in the base model's dtype"
        )
    return found
