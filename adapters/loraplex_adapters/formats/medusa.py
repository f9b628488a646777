"""Medusa heads held against the base model: from headers to a checked plan.

The tensors decide: how many heads and layers there are, whether heads have a projection of their own. Configurations
lie (published ones say 2 heads where there are 5), so they are only compared and warned about; the one thing that is
taken from them is vLLM's `original_lm_head`, without which one projection for many heads would be a damaged file.
Every tensor ends up in the plan, or the load fails with its name. Nothing but headers is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from loraplex_adapters.formats.medusa_config import MODEL_CONFIG_NAME, MedusaConfig
from loraplex_adapters.formats.medusa_keys import HeadTensor
from loraplex_adapters.io.safetensors_header import TensorInfo
from loraplex_adapters.io.tensor_pieces import check_float
from loraplex_adapters.layout.medusa import HeadsShape
from loraplex_adapters.targets import BaseTargets
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported, ShapeMismatch

MAX_HEADS = 64
MAX_LAYERS = 16


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One residual block's tensors in the files, checked."""

    weight: TensorInfo
    bias: TensorInfo | None


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """What to read, in the layout's order."""

    shape: HeadsShape
    blocks: tuple[tuple[PlannedBlock, ...], ...]  # by head, by layer
    projections: tuple[TensorInfo, ...]
    token_map: TensorInfo | None
    warnings: tuple[str, ...]

    def without_projections(self) -> HeadsPlan:
        """The same with the base model's own head in their place."""
        return replace(self, shape=replace(self.shape, num_projections=0, num_rows=0), projections=())


@dataclass(slots=True)
class _Found:
    """Tensors as they turn up. `ends` are the layers at which sequential projections stand."""

    weights: dict[tuple[int, int], TensorInfo] = field(default_factory=dict[tuple[int, int], TensorInfo])
    biases: dict[tuple[int, int], TensorInfo] = field(default_factory=dict[tuple[int, int], TensorInfo])
    projections: dict[int, TensorInfo] = field(default_factory=dict[int, TensorInfo])
    ends: dict[int, int] = field(default_factory=dict[int, int])
    shared: TensorInfo | None = None
    token_map: TensorInfo | None = None


def plan_heads(config: MedusaConfig | None, tensors: Sequence[HeadTensor], targets: BaseTargets) -> HeadsPlan:
    """Raises AdapterInvalid or one of its kinds (AdapterUnsupported, ShapeMismatch)."""
    found = _sort(tensors)
    any_tensor = tensors[0].info
    num_heads = _count_heads(found, any_tensor)
    num_layers = _count_layers(found, num_heads, any_tensor)
    blocks = tuple(
        tuple(PlannedBlock(found.weights[head, layer], found.biases.get((head, layer))) for layer in range(num_layers))
        for head in range(num_heads)
    )
    _check_blocks(found, blocks, targets)
    projections = _projections(found, num_heads, config)
    num_rows = _num_rows(projections, found.token_map, targets)
    shape = HeadsShape(
        num_heads, num_layers, targets.hidden_size, bool(found.biases), len(projections), num_rows,
        found.token_map is not None,
    )  # fmt: skip
    warnings = () if config is None else tuple(_warnings(config, shape, targets))
    return HeadsPlan(shape, blocks, projections, found.token_map, warnings)


def _sort(tensors: Sequence[HeadTensor]) -> _Found:
    """By part. No part may come twice, as it can under two prefixes or in two files."""
    found = _Found()
    families = {tensor.family for tensor in tensors} - {"either"}
    for tensor in tensors:
        if len(families) > 1 and tensor.family == "vllm":
            raise AdapterInvalid(f"{tensor.info.where} is named as vLLM names heads, others are not; use one layout")
        if tensor.head >= MAX_HEADS or (tensor.layer >= MAX_LAYERS and tensor.part != "projection"):
            raise AdapterUnsupported(
                f"{tensor.info.where}: at most {MAX_HEADS} heads of {MAX_LAYERS} layers are served"
            )
        if not _take(found, tensor):
            raise AdapterInvalid(f"{tensor.info.where} is there twice, under another name or in another file")
    return found


def _take(found: _Found, tensor: HeadTensor) -> bool:
    """False when the tensor's place is taken."""
    info, place = tensor.info, (tensor.head, tensor.layer)
    match tensor.part:
        case "weight":
            return found.weights.setdefault(place, info) is info
        case "bias":
            return found.biases.setdefault(place, info) is info
        case "projection":
            if tensor.family == "sequential":
                found.ends.setdefault(tensor.head, tensor.layer)
            return found.projections.setdefault(tensor.head, info) is info
        case "shared_projection":
            found.shared = found.shared or info
            return found.shared is info
        case "token_map":
            found.token_map = found.token_map or info
            return found.token_map is info
        case "projection_bias":
            raise AdapterUnsupported(f"{info.where} is a bias of a projection, which is not served")


def _count_heads(found: _Found, any_tensor: TensorInfo) -> int:
    """From the keys. A head that is missing between others is a damaged file."""
    # vLLM's `lm_heads.0` may stand for all heads, so there the blocks count; of sequential heads either shows them.
    heads = {head for head, _ in found.weights} | found.ends.keys() | {head for head, _ in found.biases}
    heads = heads or set(found.projections)
    for head in range(max(heads, default=-1) + 1):
        if head not in heads:
            raise AdapterInvalid(f"{any_tensor.file}: head {head} is missing, though there is a head {max(heads)}")
    if not heads:
        raise AdapterInvalid(f"{any_tensor.file} has no Medusa head")
    stray = sorted(found.projections.keys() - heads)
    if stray:
        raise AdapterInvalid(f"{found.projections[stray[0]].where} is the projection of a head that is not there")
    return len(heads)


def _count_layers(found: _Found, num_heads: int, any_tensor: TensorInfo) -> int:
    """The same for all heads; a projection stands right behind the last block."""
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


def _check_blocks(found: _Found, blocks: Sequence[Sequence[PlannedBlock]], targets: BaseTargets) -> None:
    hidden = targets.hidden_size
    for head, layers in enumerate(blocks):
        for layer, block in enumerate(layers):
            _check(block.weight, (hidden, hidden), targets)
            if block.bias is not None:
                _check(block.bias, (hidden,), targets)
            elif found.biases:
                raise AdapterInvalid(
                    f"{block.weight.file}: the bias of head {head}, layer {layer} is missing; other blocks have theirs"
                )


def _projections(found: _Found, num_heads: int, config: MedusaConfig | None) -> tuple[TensorInfo, ...]:
    """None, one for all heads, or one for each."""
    if found.shared is not None:
        if found.projections:
            raise AdapterInvalid(f"{found.shared.where} is for all heads, but there are projections for single ones")
        return (found.shared,)
    shares = config is not None and config.original_lm_head
    if set(found.projections) == {0} and not found.ends and (shares or num_heads == 1):
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
    """Where the configuration says something else than the tensors."""
    warnings: list[str] = []
    if config.base_model and config.base_model != targets.model_id:
        warnings.append(f"was trained on {config.base_model!a}, served on {targets.model_id!a}")
    found = {
        "num_heads": (config.num_heads, shape.num_heads),
        "num_layers": (config.num_layers, shape.num_layers),
        "hidden_size": (config.hidden_size, shape.hidden_size),
    }
    for what, (said, is_there) in found.items():
        if said is not None and said != is_there:
            warnings.append(f"says {what} = {said} in its {MODEL_CONFIG_NAME}; its tensors say {is_there}")
    return warnings
