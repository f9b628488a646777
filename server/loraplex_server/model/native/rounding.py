"""A model's linears rounded to what eight bits hold, before anything is made of it.

All that follows (the proof of a stack, the comparison with Transformers, packing) sees the rounded model and nothing
else, so serving it is as exact as serving any other.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_adapters.lora.convert import weight_sha256
from loraplex_adapters.native.int8 import round_
from loraplex_adapters.native.kernels import NativeKernels
from loraplex_proto.errors import Unimplemented, UnsupportedModel


def round_linears(model: PreTrainedModel, kernels: NativeKernels) -> dict[str, str]:
    """Rounds the weights of all linears that the kernels know, in place; an embedding that is tied to one is rounded
    with it. Returns the SHA-256 by path of what the embedding and the head were before.

    Raises Unimplemented where there is no such linear, UnsupportedModel where a weight is not finite.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    digests = {
        path: weight_sha256(_weight(module))
        for path, module in model.named_modules()
        if any(module is end for end in ends)
    }
    rounded: set[int] = set()
    with torch.no_grad():
        for path, module in model.named_modules():
            if not (type(module) is nn.Linear or isinstance(module, Conv1D)):
                continue
            weight = _weight(module)
            matrix = weight.t() if isinstance(module, Conv1D) else weight  # [out, in]
            if not kernels.can_pack(matrix) or weight.data_ptr() in rounded:
                continue
            if not torch.isfinite(matrix).all():
                raise UnsupportedModel(f"weights of {path} are not finite: eight bits cannot stand for them")
            round_(matrix)
            rounded.add(weight.data_ptr())
    if not rounded:
        raise Unimplemented(
            f"--quantize int8 is there for linears in bfloat16 or float32 with a multiple of 32 inputs; this model, in "
            f"{str(model.dtype).removeprefix('torch.')}, has none",
            field="--quantize",
        )
    return digests


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight).detach()
