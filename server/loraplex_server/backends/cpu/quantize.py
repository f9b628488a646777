"""Rounding of a model's linears to eight bits, before anything else.

All later checks and packing see the rounded model alone, so serving it is as exact as serving any other.
"""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_adapters.io.safetensors import weight_sha256
from loraplex_contracts.errors import Unimplemented, UnsupportedModel
from loraplex_server.backends.cpu.native.int8 import TOO_LARGE, round_
from loraplex_server.backends.cpu.native.kernels import NativeKernels

log = logging.getLogger(__name__)


def round_linears(model: PreTrainedModel, kernels: NativeKernels) -> dict[str, str]:
    """Rounds the weights of all linears that the kernels know; an embedding that is tied to one is rounded with it.
    Returns the SHA-256 by path of what the embedding and the head were before.

    Raises Unimplemented where there is no such linear, UnsupportedModel where a weight is not finite or too large.
    """
    digests = _digests(model)
    linears = [
        (path, module)
        for path, module in model.named_modules()
        if type(module) is nn.Linear or isinstance(module, Conv1D)
    ]
    known = [(path, module) for path, module in linears if kernels.can_pack(_matrix(module))]
    if not known:
        raise Unimplemented(
            "--quantize int8 is there for linears in float32, or in bfloat16 with a multiple of 32 inputs; this model, "
            f"in {str(model.dtype).removeprefix('torch.')}, has none: leave it out",
            field="--quantize",
        )
    if len(known) < len(linears):
        log.info("%d of %d linears are not rounded: no multiple of 32 inputs", len(linears) - len(known), len(linears))
    done: set[int] = set()
    with torch.no_grad():
        for path, module in known:
            parameter = cast(nn.Parameter, module.weight)
            if id(parameter) in done:
                continue
            if not _weight(module).abs().amax() < TOO_LARGE:  # NaN fails too
                raise UnsupportedModel(
                    f"weights of {path} are not finite, or larger than eight bits are made for: leave out --quantize"
                )
            # A copy: what comes from a file is mapped into memory, and stays in it once it is written to.
            parameter.data = parameter.detach().clone()
            round_(_matrix(module))
            done.add(id(parameter))
    return digests


def _digests(model: PreTrainedModel) -> dict[str, str]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    known: dict[int, str] = {}  # tied weights are read once
    digests: dict[str, str] = {}
    for path, module in model.named_modules():
        if any(module is end for end in ends):
            weight = _weight(module)
            if weight.data_ptr() not in known:
                known[weight.data_ptr()] = weight_sha256(weight)
            digests[path] = known[weight.data_ptr()]
    return digests


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight).detach()


def _matrix(module: nn.Module) -> Tensor:
    """[out, in]"""
    return _weight(module).t() if isinstance(module, Conv1D) else _weight(module)
