"""Medusa heads: configuration, tensor names, plan, and bytes.

The tensors decide how many heads and layers there are, and whether heads have a projection of their own. Configurations
lie (published ones say 2 heads where there are 5), so they are only compared and warned about. One thing is taken from
them: vLLM's `original_lm_head`, without which one projection for many heads would be a damaged file. Every tensor ends
up in the plan, or the load fails with its name.

Tensor names come in two families: `{head}.{layer}.linear.weight` with the projection as the layer behind the last
residual layer (the reference code, TGI, LoRAX, ModelOpt), and `blocks.{head}.layers.{layer}.weight` with
`lm_heads.{head}.weight` (vLLM). Both are found under several prefixes.

Beside heads alone, `config.json` is theirs; in a whole model it is the base model's with a few fields more, so unknown
fields are left alone. A whole model is `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
File names in an index are untrusted: only files that the source itself has listed are opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex_adapters.formats.files import (
    CONFIG_NAME,
    MEDUSA_PICKLE_NAMES,
    MEDUSA_WEIGHTS_NAME,
    MODEL_CONFIG_NAME,
    MODEL_INDEX_NAME,
    MODEL_WEIGHTS_NAME,
)
from loraplex_adapters.io.safetensors import (
    MAX_TENSORS,
    PieceReader,
    PieceWriter,
    TensorInfo,
    check_float,
    read_header,
)
from loraplex_adapters.io.source_files import AdapterFiles, SourceFile, parse_object, read_all
from loraplex_adapters.weights import AdapterLayout, BaseTargets, HeadsShape
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported, ShapeMismatch

# --- configuration --------------------------------------------------------------------------------------------------

MAX_MODEL_CONFIG_BYTES = 1 << 20
MAX_BASE_CHARS = 512


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """The fields of a configuration; None where one is missing or makes no sense."""

    is_heads_only: bool  # `model_type: medusa`: the directory's model is the heads
    base_model: str
    num_heads: int | None
    num_layers: int | None
    hidden_size: int | None
    original_lm_head: bool


def parse_medusa_config(data: bytes) -> MedusaConfig:
    """The configuration of these bytes. Raises AdapterInvalid when they are not a JSON object."""
    fields = parse_object(data, MODEL_CONFIG_NAME, MAX_MODEL_CONFIG_BYTES)
    is_heads_only = fields.get("model_type") == "medusa"
    base = fields.get("base_model_name_or_path")
    return MedusaConfig(
        is_heads_only=is_heads_only,
        base_model=base if isinstance(base, str) and len(base) <= MAX_BASE_CHARS else "",
        num_heads=_count(fields, "medusa_num_heads", "num_heads" if is_heads_only else None),
        # In a base model's configuration num_hidden_layers counts the model's.
        num_layers=_count(fields, "medusa_num_layers", "num_hidden_layers" if is_heads_only else None),
        hidden_size=_count(fields, "hidden_size", None),
        original_lm_head=fields.get("original_lm_head") is True,
    )


def read_medusa_config(files: AdapterFiles) -> MedusaConfig | None:
    """The config.json of heads; None without one. Raises AdapterInvalid when it is not a JSON object."""
    if MODEL_CONFIG_NAME not in files.names:
        return None
    return parse_medusa_config(read_all(files.open(MODEL_CONFIG_NAME), MAX_MODEL_CONFIG_BYTES))


def _count(fields: Mapping[str, Any], name: str, other: str | None) -> int | None:
    value = fields.get(name)
    if value is None and other is not None:
        value = fields.get(other)
    return value if type(value) is int and value >= 0 else None


# --- names of tensors -----------------------------------------------------------------------------------------------

Part = Literal["weight", "bias", "projection", "projection_bias", "shared_projection", "token_map"]
Family = Literal["sequential", "vllm", "either"]

# The module in which the training code kept the heads.
PREFIXES = ("medusa_heads.", "medusa_head.", "heads.")
# Those that a base model's own tensors never have.
MODEL_PREFIXES = ("medusa_heads.", "medusa_head.")
_N = r"(0|[1-9]\d{0,3})"
_PATTERNS: tuple[tuple[re.Pattern[str], Part, Family], ...] = (
    (re.compile(rf"{_N}\.{_N}\.linear\.weight"), "weight", "sequential"),
    (re.compile(rf"{_N}\.{_N}\.linear\.bias"), "bias", "sequential"),
    (re.compile(rf"{_N}\.{_N}\.weight"), "projection", "sequential"),
    (re.compile(rf"{_N}\.{_N}\.bias"), "projection_bias", "sequential"),
    (re.compile(rf"blocks\.{_N}\.layers\.{_N}\.weight"), "weight", "vllm"),
    (re.compile(rf"blocks\.{_N}\.layers\.{_N}\.bias"), "bias", "vllm"),
    (re.compile(rf"lm_heads\.{_N}\.weight"), "projection", "vllm"),
    (re.compile(rf"lm_heads\.{_N}\.bias"), "projection_bias", "vllm"),
    (re.compile(r"lm_head\.weight"), "shared_projection", "vllm"),
    (re.compile(r"token_map"), "token_map", "either"),
)


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor of a set of heads. `layer` of a sequential projection is its place behind the layers."""

    info: TensorInfo
    part: Part
    family: Family
    head: int = -1
    layer: int = -1


def head_tensor(info: TensorInfo) -> HeadTensor | None:
    """The tensor's place in a set of heads, by its name; None when it is not one of a head."""
    prefix = next((prefix for prefix in PREFIXES if info.name.startswith(prefix)), "")
    name = info.name[len(prefix) :]
    for pattern, part, family in _PATTERNS:
        match = pattern.fullmatch(name)
        if match is not None:
            numbers = [int(group) for group in match.groups()]
            return HeadTensor(info, part, family, *numbers)
    return None


def split_heads(tensors: Iterable[TensorInfo]) -> tuple[list[HeadTensor], list[TensorInfo]]:
    """(the heads' tensors, the others). Names that others use too (`lm_head.weight`) are heads' only among heads."""
    heads: list[HeadTensor] = []
    others: list[TensorInfo] = []
    for info in tensors:
        found = head_tensor(info)
        if found is None:
            others.append(info)
        else:
            heads.append(found)
    if not any(tensor.head >= 0 for tensor in heads):
        return [], [*others, *(tensor.info for tensor in heads)]
    return heads, others


# --- plan and bytes -------------------------------------------------------------------------------------------------

MAX_HEADS = 64
MAX_LAYERS = 16


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """The tensors to read, in the layout's order."""

    shape: HeadsShape
    weights: tuple[tuple[TensorInfo, ...], ...]  # by layer, by head
    biases: tuple[tuple[TensorInfo, ...], ...]  # the same; empty without biases
    projections: tuple[TensorInfo, ...]
    token_map: TensorInfo | None
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Found:
    """Tensors as they turn up. `ends` are the layers at which sequential projections stand."""

    weights: dict[tuple[int, int], TensorInfo] = field(default_factory=dict[tuple[int, int], TensorInfo])
    biases: dict[tuple[int, int], TensorInfo] = field(default_factory=dict[tuple[int, int], TensorInfo])
    projections: dict[int, TensorInfo] = field(default_factory=dict[int, TensorInfo])  # by head; -1: for all of them
    ends: dict[int, int] = field(default_factory=dict[int, int])
    token_map: TensorInfo | None = None


def plan_heads(config: MedusaConfig | None, tensors: Sequence[HeadTensor], targets: BaseTargets) -> HeadsPlan:
    """The plan of a set of heads. Raises AdapterInvalid or one of its kinds (AdapterUnsupported, ShapeMismatch)."""
    found = _sort(tensors)
    any_tensor = tensors[0].info
    num_heads = _count_heads(found, any_tensor)
    num_layers = _count_layers(found, num_heads, any_tensor)
    _check_layers(found, num_heads, num_layers, targets)
    weights, biases = (
        tuple(tuple(part[head, layer] for head in range(num_heads)) for layer in range(num_layers) if part)
        for part in (found.weights, found.biases)
    )
    projections = _projections(found, num_heads, config)
    num_rows = _num_rows(projections, found.token_map, targets)
    shape = HeadsShape(
        num_heads, num_layers, targets.hidden_size, bool(biases), len(projections), num_rows,
        found.token_map is not None,
    )  # fmt: skip
    warnings = () if config is None else tuple(_warnings(config, shape, targets))
    return HeadsPlan(shape, weights, biases, projections, found.token_map, warnings)


def _sort(tensors: Sequence[HeadTensor]) -> _Found:
    """Sorts tensors by part. A part that comes twice, under two prefixes or in two files, is an error."""
    found = _Found()
    families = {tensor.family for tensor in tensors} - {"either"}
    for tensor in tensors:
        info, place = tensor.info, (tensor.head, tensor.layer)
        if len(families) > 1 and tensor.family == "vllm":
            raise AdapterInvalid(f"{info.where} is named as vLLM names heads, others are not; use one layout")
        if tensor.head >= MAX_HEADS or (tensor.layer >= MAX_LAYERS and tensor.part != "projection"):
            raise AdapterUnsupported(f"{info.where}: at most {MAX_HEADS} heads of {MAX_LAYERS} layers are served")
        match tensor.part:
            case "weight":
                first = found.weights.setdefault(place, info)
            case "bias":
                first = found.biases.setdefault(place, info)
            case "projection" | "shared_projection":
                first = found.projections.setdefault(tensor.head, info)
                if tensor.family == "sequential":
                    found.ends.setdefault(tensor.head, tensor.layer)
            case "token_map":
                first = found.token_map = found.token_map or info
            case "projection_bias":
                raise AdapterUnsupported(f"{info.where} is a bias of a projection, which is not served")
        if first is not info:
            raise AdapterInvalid(f"{info.where} is there twice, under another name or in another file")
    return found


def _count_heads(found: _Found, any_tensor: TensorInfo) -> int:
    """Counts heads by their names. A gap between them is a damaged file."""
    # vLLM's `lm_heads.0` may stand for all heads, so there the layers count; of sequential heads either shows them.
    heads = {head for head, _ in found.weights} | found.ends.keys() | {head for head, _ in found.biases}
    heads = heads or found.projections.keys() - {-1}
    for head in range(max(heads, default=-1) + 1):
        if head not in heads:
            raise AdapterInvalid(f"{any_tensor.file}: head {head} is missing, though there is a head {max(heads)}")
    if not heads:
        raise AdapterInvalid(f"{any_tensor.file} has no Medusa head")
    stray = sorted(found.projections.keys() - heads - {-1})
    if stray:
        raise AdapterInvalid(f"{found.projections[stray[0]].where} is the projection of a head that is not there")
    return len(heads)


def _count_layers(found: _Found, num_heads: int, any_tensor: TensorInfo) -> int:
    """Counts layers, the same number for all heads; a projection stands right behind the last layer."""
    layers = [layer for _, layer in (*found.weights, *found.biases)]
    num_layers = max((*layers, *(end - 1 for end in found.ends.values())), default=-1) + 1
    for head in range(num_heads):
        for layer in range(num_layers):
            if (head, layer) not in found.weights:
                raise AdapterInvalid(
                    f"{any_tensor.file}: the weight of head {head}, layer {layer} is missing; layers that share their "
                    "memory must be cloned before they are saved"
                )
        if found.ends and found.ends.get(head) != num_layers:
            end = found.ends.get(head)
            raise AdapterInvalid(
                f"{any_tensor.file}: the projection of head {head} "
                + ("is missing, other heads have theirs" if end is None else f"stands before layer {num_layers - 1}")
            )
    return num_layers


def _check_layers(found: _Found, num_heads: int, num_layers: int, targets: BaseTargets) -> None:
    hidden = targets.hidden_size
    for head in range(num_heads):
        for layer in range(num_layers):
            weight, bias = found.weights[head, layer], found.biases.get((head, layer))
            _check(weight, (hidden, hidden), targets)
            if bias is not None:
                _check(bias, (hidden,), targets)
            elif found.biases:
                raise AdapterInvalid(
                    f"{weight.file}: the bias of head {head}, layer {layer} is missing; other blocks have theirs"
                )


def _projections(found: _Found, num_heads: int, config: MedusaConfig | None) -> tuple[TensorInfo, ...]:
    """The projections: none, one for all heads, or one for each."""
    shared = found.projections.get(-1)
    if shared is not None:
        if len(found.projections) > 1:
            raise AdapterInvalid(f"{shared.where} is for all heads, but there are projections for single ones")
        return (shared,)
    is_shared = num_heads == 1 or (config is not None and config.original_lm_head)
    if set(found.projections) == {0} and not found.ends and is_shared:
        return (found.projections[0],)
    for head in range(num_heads):
        if found.projections and head not in found.projections:
            some = next(iter(found.projections.values()))
            raise AdapterInvalid(
                f"{some.file}: the projection of head {head} is missing, other heads have theirs; one for all needs "
                '"original_lm_head": true in config.json'
            )
    return tuple(found.projections[head] for head in range(num_heads) if found.projections)


def _num_rows(projections: Sequence[TensorInfo], token_map: TensorInfo | None, targets: BaseTargets) -> int:
    """Rows of the projections as served: the vocabulary, or as many as the token map names."""
    if token_map is None:
        for projection in projections:
            if len(projection.shape) == 2 and projection.shape[0] < targets.vocab_size:
                raise ShapeMismatch(
                    f"{projection.where} has {projection.shape[0]} rows for the base model's vocabulary of "
                    f"{targets.vocab_size}, and there is no token_map that says which"
                )
            _check(projection, (targets.vocab_size, targets.hidden_size), targets)
        return targets.vocab_size if projections else 0
    if not projections:
        raise AdapterUnsupported(f"{token_map.where} is served only beside projections of the heads' own")
    if token_map.dtype not in ("I64", "I32"):
        raise AdapterUnsupported(f"{token_map.where} has dtype {token_map.dtype}; I64 and I32 are served")
    if len(token_map.shape) != 1 or not 1 <= token_map.shape[0] <= targets.vocab_size:
        raise ShapeMismatch(
            f"{token_map.where} has shape {list(token_map.shape)}; it names 1 to {targets.vocab_size} tokens"
        )
    num_rows = token_map.shape[0]
    first = projections[0].shape
    is_cut = bool(first) and first[0] == num_rows
    for projection in projections:
        _check(projection, (num_rows if is_cut else targets.vocab_size, targets.hidden_size), targets)
    return num_rows


def _check(tensor: TensorInfo, expected: tuple[int, ...], targets: BaseTargets) -> None:
    if tensor.shape != expected:
        raise ShapeMismatch(
            f"{tensor.where} has shape {list(tensor.shape)}; with {targets.model_id!a} it must be {list(expected)}: "
            "the heads were made for another base model"
        )
    check_float(tensor)


def _warnings(config: MedusaConfig, shape: HeadsShape, targets: BaseTargets) -> list[str]:
    """Differences between configuration and tensors."""
    warnings: list[str] = []
    if config.base_model and not targets.is_called(config.base_model):
        warnings.append(f"was trained on {config.base_model!a}, served on {targets.model_id!a}")
    found = {
        "num_heads": (config.num_heads, shape.num_heads),
        "num_layers": (config.num_layers, shape.num_layers),
        "hidden_size": (config.hidden_size, shape.hidden_size),
    }
    for name, (declared, actual) in found.items():
        if declared is not None and declared != actual:
            warnings.append(f"says {name} = {declared} in its {MODEL_CONFIG_NAME}; its tensors say {actual}")
    return warnings


def write_heads(plan: HeadsPlan, layout: AdapterLayout, vocab_size: int, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the heads behind the factors. Raises NonFinite, AdapterInvalid, or what the files raise."""
    places = layout.heads
    assert places is not None, "heads have their place in the layout"
    for layer in range(plan.shape.num_layers):
        out.pad_to(places.weights[layer])
        for weight in plan.weights[layer]:
            _copy(weight, out, reader)
        if plan.biases:
            out.pad_to(places.biases[layer])
            for bias in plan.biases[layer]:
                _copy(bias, out, reader)
    token_ids: NDArray[np.int64] | None = None
    if plan.token_map is not None:
        out.pad_to(places.token_ids)
        token_ids = _token_ids(plan.token_map, reader.files[plan.token_map.file], vocab_size)
        out.write(torch.from_numpy(token_ids))
    out.pad_to(places.projections)
    for projection in plan.projections:
        if token_ids is not None and projection.shape[0] != token_ids.size:
            hidden = projection.shape[1]
            for token_id in token_ids.tolist():
                for piece in reader.pieces(projection, token_id * hidden, hidden):
                    out.write(piece)
        else:
            _copy(projection, out, reader)


def without_base_head(plan: HeadsPlan, targets: BaseTargets, reader: PieceReader) -> HeadsPlan:
    """The plan without its projections when they are copies of the base model's own head, as vLLM's `original_lm_head`
    makes them: then the base model's head does, and all such adapters share it."""
    if plan.token_map is not None or not plan.projections or plan.shape.num_layers == 0:
        return plan
    shape = (targets.vocab_size, targets.hidden_size)
    digests = {
        module.weight_sha256
        for module in targets.modules.values()
        if module.kind == "linear" and module.weight_sha256 and (module.out_features, module.in_features) == shape
    }
    if digests and all(reader.sha256(p) in digests for p in plan.projections):
        return replace(plan, shape=replace(plan.shape, num_projections=0, num_rows=0), projections=())
    return plan


def _copy(tensor: TensorInfo, out: PieceWriter, reader: PieceReader) -> None:
    for piece in reader.pieces(tensor):
        out.write(piece)


def _token_ids(tensor: TensorInfo, file: SourceFile, vocab_size: int) -> NDArray[np.int64]:
    """The ids, checked. There are at most as many as tokens in the vocabulary, by the plan."""
    data = bytearray(tensor.num_bytes)
    file.read_into(memoryview(data), tensor.offset)
    found = np.frombuffer(data, dtype=np.int64 if tensor.dtype == "I64" else np.int32).astype(np.int64)
    if found.min() < 0 or found.max() >= vocab_size:
        raise AdapterInvalid(f"{tensor.where} names tokens outside the base model's vocabulary of {vocab_size}")
    if np.unique(found).size != found.size:
        raise AdapterInvalid(f"{tensor.where} names a token twice")
    return found


# --- whole models with heads ----------------------------------------------------------------------------------------

# Limit for an adapter's index. Parsing holds up the other threads of the process.
MAX_INDEX_BYTES = 4 << 20
# Limit for the served model's index, read before serving: large mixtures of experts have indexes of 9 MB.
MAX_BASE_INDEX_BYTES = 64 << 20
MAX_SHARDS = 1024
_OTHER_MODEL_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class MedusaModel:
    """The content of a directory that is given as the model.

    heads_only: heads without a model; `base_model` is the configuration's, or empty. with_heads: a whole model and its
    heads, which FolderSource gives out as an adapter. none: a model without heads.
    """

    content: Literal["none", "heads_only", "with_heads"]
    base_model: str = ""


def describe_medusa_model(files: AdapterFiles) -> MedusaModel:
    """Looks at names, config.json, and the index or the header of the model; never at weights. Pickled heads count as
    heads: loading them says why they are refused. Raises AdapterInvalid when one of those files is damaged."""
    config = read_medusa_config(files)
    base_model = "" if config is None else config.base_model
    has_heads_file = not files.names.isdisjoint((MEDUSA_WEIGHTS_NAME, *MEDUSA_PICKLE_NAMES))
    has_model = not files.names.isdisjoint((MODEL_WEIGHTS_NAME, MODEL_INDEX_NAME, *_OTHER_MODEL_NAMES))
    if (config is not None and config.is_heads_only) or (has_heads_file and not has_model):
        return MedusaModel("heads_only", base_model)
    if has_model and (has_heads_file or _holds_heads(files)):
        return MedusaModel("with_heads", base_model)
    return MedusaModel("none")


def model_tensors(files: AdapterFiles, config: MedusaConfig | None) -> list[TensorInfo]:
    """The adapter's tensors in files that are laid out like a whole model: all where the configuration says that the
    model is the heads, or where a LoRA's lies beside it; else those under `medusa_head`."""
    is_all = CONFIG_NAME in files.names or (config is not None and config.is_heads_only)
    wanted: Callable[[str], bool] = (lambda name: True) if is_all else _is_heads
    found: list[TensorInfo] = []
    if MODEL_WEIGHTS_NAME in files.names:
        found = [tensor for name, tensor in read_header(files.open(MODEL_WEIGHTS_NAME)).items() if wanted(name)]
    else:
        for shard, listed in _shards(files, wanted).items():
            tensors = {name: tensor for name, tensor in read_header(files.open(shard)).items() if wanted(name)}
            odd = sorted(tensors.keys() ^ listed)
            if odd:
                raise AdapterInvalid(f"{MODEL_INDEX_NAME} and {shard} disagree about {odd[0][:160]!a}")
            found += tensors.values()
    if not found:
        raise AdapterInvalid("this is a whole model without Medusa heads; an adapter is a LoRA, Medusa heads, or both")
    return found


def _holds_heads(files: AdapterFiles) -> bool:
    if MODEL_WEIGHTS_NAME in files.names:
        return any(_is_heads(name) for name in read_header(files.open(MODEL_WEIGHTS_NAME)))
    if MODEL_INDEX_NAME in files.names:
        return any(_is_heads(name) for name in _weight_map(files, MAX_BASE_INDEX_BYTES))
    return False


def _is_heads(name: str) -> bool:
    return name.startswith(MODEL_PREFIXES)


def _shards(files: AdapterFiles, wanted: Callable[[str], bool]) -> dict[str, set[str]]:
    """The names of wanted tensors, by the file that has them according to the index."""
    shards: dict[str, set[str]] = {}
    num_tensors = 0
    for name, shard in _weight_map(files, MAX_INDEX_BYTES).items():
        if wanted(name):
            num_tensors += 1
            if shard not in files.names or not shard.endswith(".safetensors"):
                raise AdapterInvalid(f"{MODEL_INDEX_NAME} names the file {shard[:160]!a}, which is not there")
            shards.setdefault(shard, set()).add(name)
    if num_tensors > MAX_TENSORS or len(shards) > MAX_SHARDS:
        raise AdapterInvalid(f"{MODEL_INDEX_NAME} has more than {MAX_TENSORS} tensors or {MAX_SHARDS} files to read")
    return shards


def _weight_map(files: AdapterFiles, max_bytes: int) -> Mapping[str, str]:
    fields = parse_object(read_all(files.open(MODEL_INDEX_NAME), max_bytes), MODEL_INDEX_NAME, max_bytes)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise AdapterInvalid(f"{MODEL_INDEX_NAME} has no weight_map of names to files")
    return weight_map
