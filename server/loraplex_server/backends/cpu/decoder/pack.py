"""Packing of decoder layers' weights, where a layer's parts are of known shapes."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex_server.backends.cpu.attention import reason_against
from loraplex_server.backends.cpu.decoder.kinds import HEAD_NORMS, LayerNames
from loraplex_server.backends.cpu.decoder.weights import (
    LayerShape,
    LayerWeights,
    MixerWeights,
    StackShape,
    linears_of,
    packed_sizes,
    projection_outputs,
)
from loraplex_server.backends.cpu.native.kernels import BAND, NativeKernels, PackedWeight
from loraplex_server.backends.cpu.recurrences import DIM_MULTIPLE, MAX_DIM, MAX_WIDTH, has_floats
from loraplex_server.backends.fusion import norm_eps
from loraplex_server.layers.attention import AttentionSpec
from loraplex_server.layers.mixers import MixerSpec, recurrences_of

SCALE: Final = "layer_scalar"  # of a layer's output


class NoMatch(Exception):
    """A reason to leave a model's layers as they are."""


@contextmanager
def model_code() -> Generator[None]:
    """Turns errors of a model's own code, called in a way that it does not know, into NoMatch."""
    try:
        with torch.inference_mode():
            yield
    except Exception as error:  # whatever a model's code raises
        raise NoMatch(f"they are called in another way ({error})") from error


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layer_shape(layer: nn.Module, names: LayerNames, token_mixer: AttentionSpec | MixerSpec | None) -> LayerShape:
    spec = token_mixer if isinstance(token_mixer, AttentionSpec) else None
    linears = {part: path for part, path in names.linears.items() if _has(layer, path)}
    if "k" in linears and "v" not in linears:  # values are keys before their norm
        linears = {part: linears.get(part, linears["k"]) for part in names.linears if part == "v" or part in linears}
    ffn_size = cast(nn.Linear, layer.get_submodule(linears["down"])).in_features if "down" in linears else 0
    if names.merges_gate_up and ffn_size % (BAND // 2):
        raise NoMatch("linears of gate and up together, of unusual shapes")
    mixer = token_mixer if isinstance(token_mixer, MixerSpec) else None
    own = LayerShape(spec, ffn_size, linears, mixer, gates_heads=_gates_heads(layer, names, spec))
    if spec is not None and ("k" in names.linears and "k" not in linears) != own.shares_kv:
        raise NoMatch("keys and values of earlier layers, of an unusual kind")
    return own


def _gates_heads(layer: nn.Module, names: LayerNames, spec: AttentionSpec | None) -> bool:
    """True if the linear of queries has a gate of each head's output, too."""
    if spec is None or names.merges_qkv:
        return False
    return cast(nn.Linear, layer.get_submodule(names.linears["q"])).out_features == 2 * spec.num_heads * spec.k_dim


def _has(layer: nn.Module, path: str) -> bool:
    """True if the layer has this module."""
    return any(name == path for name, _ in layer.named_modules())


def _check_attention(spec: AttentionSpec, shape: StackShape) -> None:
    """Raises NoMatch where the stack does not attend in this way."""
    if reason := reason_against(spec, shape.dtype):
        raise NoMatch(reason)
    if spec.chunk is not None or spec.key_bias is not None or spec.v_dim != spec.k_dim:
        raise NoMatch("chunks, biases or values of another size in attention")
    panel = BAND // 2
    if not shape.names.merges_qkv and (spec.k_dim * spec.num_heads % panel or spec.k_dim * spec.num_kv_heads % panel):
        raise NoMatch(f"{spec.num_heads} and {spec.num_kv_heads} heads of {spec.k_dim}, in all no multiple of {panel}")


def pack(
    layer: nn.Module, token_mixer: AttentionSpec | MixerSpec | None, shape: StackShape, kernels: NativeKernels
) -> LayerWeights:
    """`token_mixer`: attention, or what stands in its place; None: a module of the model's own does. Raises NoMatch."""
    own = _layer_shape(layer, shape.names, token_mixer)
    linears = {part: cast(nn.Linear, layer.get_submodule(path)) for part, path in own.linears.items()}
    if own.attention is not None:
        _check_attention(own.attention, shape)
    if own.mixer is not None:
        _check_mixer(own.mixer)
    if {part: tuple(linear.weight.shape) for part, linear in linears.items()} != _shapes_of_linears(shape, own):
        raise NoMatch("linears of unusual shapes")
    if not all(kernels.can_pack(one.weight) and one.weight.dtype == shape.dtype for one in linears.values()):
        raise NoMatch("a number of features that the kernels do not know")
    biased = [part for part in linears if part not in ("q", "k", "v", "o") and _bias(linears[part]) is not None]
    if biased:
        raise NoMatch(f"biases in {'a mixer' if biased[0].startswith('mixer') else 'the feed-forward part'}")
    norms = {name: layer.get_submodule(path) for name, path in norms_of(layer, shape).items()}
    widths = _widths_of_norms(shape, own)
    for name, norm in norms.items():
        found = {part: (one.dtype, tuple(one.shape)) for part, one in norm.named_parameters()}
        may_miss = shape.is_layer_norm or (name in shape.names.head_norms and not found)
        wanted = dict.fromkeys(found if may_miss else ("weight",), (shape.dtype, (widths[name],)))
        if found != wanted or norm_eps(norm) is None or (shape.is_layer_norm and name in shape.names.head_norms):
            raise NoMatch(f"the norm {type(norm).__name__}")
    qkv = [linears[part] for part in ("q", "k", "v") if part in linears]
    gate_up, down = _pack_feed_forward(linears, shape, kernels)
    return LayerWeights(
        shape=own,
        qkv=kernels.pack([linear.weight for linear in qkv], shape.format) if qkv else None,
        o=kernels.pack([linears["o"].weight], shape.format) if qkv else None,
        gate_up=gate_up,
        down=down,
        qkv_bias=_joined_bias(qkv),
        o_bias=_bias(linears["o"]) if qkv else None,
        norms={name: _weight_of(norm, widths[name], shape) for name, norm in norms.items()},
        eps=_one_eps([norms[name] for name in shape.names.norms]),
        qk_eps=_one_eps([norms[name] for name in shape.names.head_norms if name in norms]),
        norm_biases={
            name: bias for name, norm in norms.items() if isinstance(bias := getattr(norm, "bias", None), Tensor)
        },
        input_gate=kernels.pack([linears["input_gate"].weight], shape.format) if shape.input_size else None,
        input_projection=kernels.pack([linears["input_projection"].weight], shape.format) if shape.input_size else None,
        scale=_scale(layer),
        mixer=_pack_mixer(layer, own.mixer, linears, shape, kernels) if own.mixer is not None else None,
    )


def _check_mixer(spec: MixerSpec) -> None:
    """Raises NoMatch where the kernels do not know heads of these sizes."""
    panel = BAND // 2
    if spec.num_heads % spec.num_keys:
        raise NoMatch(f"{spec.num_heads} heads of a mixer with {spec.num_keys} of keys")
    if spec.v_dim % DIM_MULTIPLE or max(spec.k_dim, spec.v_dim) > MAX_DIM:
        raise NoMatch(f"a mixer's heads of {spec.k_dim} and {spec.v_dim}")
    if spec.size % spec.norm_size:
        raise NoMatch(f"norms of {spec.norm_size} of {spec.size} features in a mixer")
    if spec.channels % panel:
        raise NoMatch(f"{spec.channels} channels in a mixer, no multiple of {panel}")


def _pack_mixer(
    layer: nn.Module, spec: MixerSpec, linears: Mapping[str, nn.Linear], shape: StackShape, kernels: NativeKernels
) -> MixerWeights:
    module: Any = layer.get_submodule(shape.names.mixer)
    convolution, attention = recurrences_of(module)
    weight, bias = convolution.weight.detach(), convolution.bias
    eps, norm = norm_eps(module.norm), module.norm.weight
    if eps is None or norm.dtype != shape.dtype or norm.dim() != 1 or len(norm) not in (spec.norm_size, spec.size):
        raise NoMatch(f"the norm {type(module.norm).__name__}")
    if weight.dtype != shape.dtype or weight.shape[1] > MAX_WIDTH:
        raise NoMatch("a convolution of another kind")
    if not has_floats(attention):
        raise NoMatch("gates of another kind")
    weights = [linears[part].weight for part in projection_outputs(spec)]
    filled = [
        one if len(one) == size else F.pad(one, (0, 0, 0, size - len(one)))
        for one, size in zip(weights, packed_sizes(spec), strict=True)
    ]
    # A norm of single heads is given these as rows, so that no adapter may have its own (see `_norm_places`).
    return MixerWeights(
        spec=spec,
        projection=kernels.pack(filled, shape.format),
        o=kernels.pack([linears["mixer_out"].weight], shape.format),
        convolution=convolution,
        attention=attention,
        conv_weight=weight.float().t().contiguous(),
        conv_bias=None if bias is None else bias.detach().float().contiguous(),
        norm=norm.detach() if len(norm) == spec.size else norm.detach().repeat(spec.size // len(norm)),
        norm_eps=eps,
        has_whole_norm=len(norm) == spec.size,
    )


def _scale(layer: nn.Module) -> float:
    """The factor of a layer's output, by the name that Gemma 4 has for it."""
    scale: Tensor | None = getattr(layer, SCALE, None)
    if scale is not None and scale.numel() != 1:
        raise NoMatch("factors of a layer's features")
    return 1.0 if scale is None else scale.item()


def _weight_of(norm: nn.Module, num_features: int, shape: StackShape) -> Tensor:
    """A norm's weight; of one without a weight that which leaves values as they are."""
    weight: Tensor | None = getattr(norm, "weight", None)
    if weight is not None:
        return weight
    return torch.full((num_features,), 1.0 - shape.norm_form.offset, dtype=shape.dtype)


def _pack_feed_forward(
    linears: Mapping[str, nn.Linear], shape: StackShape, kernels: NativeKernels
) -> tuple[PackedWeight | None, PackedWeight | None]:
    if shape.names.feed_forward:
        return None, None
    gate, up = [linears[part].weight for part in ("gate", "up")] if "up" in linears else linears["gate"].weight.chunk(2)
    return kernels.pack_pair(gate, up, shape.format), kernels.pack([linears["down"].weight], shape.format)


def _shapes_of_linears(shape: StackShape, own: LayerShape) -> dict[str, tuple[int, int]]:
    rows, kv_rows = shape.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    outputs = {"q": rows * (2 if own.gates_heads else 1)}
    if not own.shares_kv:
        outputs |= {"k": kv_rows, "v": kv_rows}
    common = {"o": (shape.hidden_size, rows)}
    if own.attention is None:
        outputs, common = {}, {}
    if (mixer := own.mixer) is not None:
        outputs |= projection_outputs(mixer)
        common["mixer_out"] = shape.hidden_size, mixer.size
    elif shape.names.merges_qkv:
        outputs = {"q": rows + 2 * kv_rows}
    if not shape.names.feed_forward:
        common["down"] = shape.hidden_size, own.ffn_size
        both = {"gate": 2 * own.ffn_size}
        outputs |= both if shape.names.merges_gate_up else {"gate": own.ffn_size, "up": own.ffn_size}
    if shape.input_size:
        outputs["input_gate"] = shape.input_size
        common["input_projection"] = shape.hidden_size, shape.input_size
    return common | {part: (num_outputs, shape.hidden_size) for part, num_outputs in outputs.items()}


def _widths_of_norms(shape: StackShape, own: LayerShape) -> dict[str, int]:
    heads = (shape.num_heads, own.num_kv_heads, 1) if shape.norms_all_heads else (1, 1, 1)
    of_heads = {name: num * own.head_dim for name, num in zip(HEAD_NORMS, heads, strict=True)}
    return of_heads | dict.fromkeys(shape.names.norms, shape.hidden_size)


def drop_weights(layer: nn.Module, own: LayerShape) -> None:
    """Frees a layer's plain weights; their shapes stay."""
    for name in own.linears.values():
        linear = cast(nn.Linear, layer.get_submodule(name))
        linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)


def give_back(layer: nn.Module, weights: LayerWeights, shape: StackShape, kernels: NativeKernels) -> None:
    """Gives a layer its plain weights again."""
    for name, linear in zip(weights.shape.linears.values(), linears_of(weights, shape, kernels), strict=True):
        plain = linear.matrix().contiguous()
        cast(nn.Linear, layer.get_submodule(name)).weight = nn.Parameter(plain, requires_grad=False)


def norms_of(layer: nn.Module, shape: StackShape) -> Mapping[str, str]:
    """Paths of the norms that it has."""
    return {**shape.names.norms, **{name: path for name, path in shape.names.head_norms.items() if _has(layer, path)}}


def _one_eps(norms: list[nn.Module]) -> float:
    found = {norm_eps(norm) for norm in norms}
    if len(found) > 1:
        raise NoMatch("norms of different epsilon")
    return next(iter(found), None) or 0.0


def _bias(linear: nn.Linear) -> Tensor | None:
    return cast(Tensor | None, linear.bias)


def _joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    biases = [_bias(linear) for linear in linears]
    if all(bias is None for bias in biases):
        return None
    rows = [
        bias.detach() if bias is not None else linear.weight.new_zeros(linear.out_features)
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return torch.cat(rows)
