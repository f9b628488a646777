"""Rounding of a model's linears and experts to weights of few bits.

Weights are rounded before anything is made of a model. All later checks and packing see the rounded model alone, so
serving it is as exact as serving any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_adapters.io.safetensors import weight_sha256
from loraplex_contracts.errors import Unimplemented, UnsupportedModel
from loraplex_server.layers.experts import DOWN, UP
from loraplex_server.layers.quantization import BLOCK, WeightFormat

log = logging.getLogger(__name__)


def round_weights(
    model: PreTrainedModel, form: WeightFormat, round_: Callable[[Tensor], None] | None = None
) -> dict[str, str]:
    """Rounds the weights of all linears and fused experts that the format is there for; an embedding that is tied to
    one is rounded with it. `round_`: does what `form.round_` does, faster. Returns the SHA-256 by path of what the
    embedding and the head were before.

    Raises Unimplemented where there is no such linear, UnsupportedModel where a weight is not finite or too large.
    """
    digests = _digests(model)
    weights = list(_weights(model))
    known = [one for one in weights if can_round(_matrix(*one[1:]))]
    if not known:
        raise Unimplemented(
            f"--quantize {form.name} is there for linears in float32, or in bfloat16 with a multiple of {BLOCK} "
            f"inputs; this model, in {str(model.dtype).removeprefix('torch.')}, has none: leave it out",
            field="--quantize",
        )
    if len(known) < len(weights):
        log.info("%d of %d linears are not rounded: no multiple of 32 inputs", len(weights) - len(known), len(weights))
    done: set[int] = set()
    with torch.no_grad():
        for path, parameter, is_transposed in known:
            if id(parameter) in done:
                continue
            if not parameter.detach().abs().amax() < form.too_large:  # NaN fails too
                raise UnsupportedModel(
                    f"weights of {path} are not finite, or larger than {form.words} are made for: leave out --quantize"
                )
            # A copy: what comes from a file is mapped into memory, and stays in it once it is written to.
            parameter.data = parameter.detach().clone()
            matrix = _matrix(parameter, is_transposed)
            for one in matrix.unbind() if matrix.dim() == 3 else (matrix,):
                (round_ or form.round_)(one)
            done.add(id(parameter))
    return digests


def can_round(matrix: Tensor) -> bool:
    """True if a weight [..., out, in] is one that kernels have products for."""
    return matrix.dtype == torch.float32 or (matrix.dtype == torch.bfloat16 and matrix.shape[-1] % BLOCK == 0)


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Path, parameter, and whether it is [..., in, out]."""
    for path, module in model.named_modules():
        if type(module) is nn.Linear or isinstance(module, Conv1D):
            yield path, cast(nn.Parameter, module.weight), isinstance(module, Conv1D)
        elif hasattr(module, "_apply_gate"):  # experts of a form that Transformers' `use_experts_implementation` has
            for name in (UP, DOWN):
                weight = getattr(module, name, None)
                if isinstance(weight, nn.Parameter) and weight.dim() == 3:
                    yield f"{path}.{name}", weight, bool(getattr(module, "is_transposed", False))


def _matrix(parameter: nn.Parameter, is_transposed: bool) -> Tensor:
    """The parameter as [..., out, in]."""
    weight = parameter.detach()
    return weight.mT if is_transposed else weight


def _digests(model: PreTrainedModel) -> dict[str, str]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    known: dict[int, str] = {}  # tied weights are read once
    digests: dict[str, str] = {}
    for path, module in model.named_modules():
        if any(module is end for end in ends):
            weight = cast(Tensor, module.weight).detach()
            if weight.data_ptr() not in known:
                known[weight.data_ptr()] = weight_sha256(weight)
            digests[path] = known[weight.data_ptr()]
    return digests
