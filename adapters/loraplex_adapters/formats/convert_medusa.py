"""From the tensors of one or more files to the bytes of the heads' layout. Pieces are pieces.py's.

Only token ids and rows chosen by them need more than a copy: a projection over the whole vocabulary beside a token map
is cut down to the rows that the map names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_adapters.formats.medusa import HeadsPlan
from loraplex_adapters.io.safetensors_header import TensorInfo
from loraplex_adapters.io.source_files import SourceFile
from loraplex_adapters.io.tensor_pieces import PieceReader, PieceWriter, WriteFn
from loraplex_adapters.layout.medusa import HeadsLayout
from loraplex_adapters.targets import BaseTargets
from loraplex_contracts.errors import AdapterInvalid

Files = Mapping[str, SourceFile]  # the open ones, by name


def write_heads(
    plan: HeadsPlan, layout: HeadsLayout, files: Files, vocab_size: int, write: WriteFn, reader: PieceReader
) -> None:
    """Writes the bytes from the end of the LoRA to the end of the layout. Raises NonFinite, AdapterInvalid, or what
    the files raise."""
    dtype = layout.dtype
    out = PieceWriter(write, layout.start)
    for layer in range(layout.shape.num_layers):
        out.pad_to(layout.weights[layer])
        for head in plan.blocks:
            _copy(head[layer].weight, files, dtype, out, reader)
        if layout.shape.has_bias:
            out.pad_to(layout.biases[layer])
            for head in plan.blocks:
                bias = head[layer].bias
                assert bias is not None, "a plan with biases has all of them"
                _copy(bias, files, dtype, out, reader)
    token_ids: NDArray[np.int64] | None = None
    if plan.token_map is not None:
        out.pad_to(layout.token_ids)
        token_ids = _token_ids(plan.token_map, files[plan.token_map.file], vocab_size)
        out.write(torch.from_numpy(token_ids))
    out.pad_to(layout.projections)
    for projection in plan.projections:
        if token_ids is not None and projection.shape[0] != token_ids.size:
            for piece in _rows(projection, token_ids, files, dtype, reader):
                out.write(piece)
        else:
            _copy(projection, files, dtype, out, reader)
    out.pad_to(layout.end)


def without_base_head(plan: HeadsPlan, files: Files, targets: BaseTargets, reader: PieceReader) -> HeadsPlan:
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
    if digests and all(reader.sha256(p, files[p.file], targets.dtype) in digests for p in plan.projections):
        return plan.without_projections()
    return plan


def _copy(tensor: TensorInfo, files: Files, dtype: str, out: PieceWriter, reader: PieceReader) -> None:
    for piece in reader.pieces(tensor, files[tensor.file], dtype):
        out.write(piece)


def _rows(
    tensor: TensorInfo, token_ids: NDArray[np.int64], files: Files, dtype: str, reader: PieceReader
) -> Iterator[Tensor]:
    hidden = tensor.shape[1]
    for token_id in token_ids.tolist():
        yield from reader.pieces(tensor, files[tensor.file], dtype, token_id * hidden, hidden)


def _token_ids(tensor: TensorInfo, file: SourceFile, vocab_size: int) -> NDArray[np.int64]:
    """At most as many as the vocabulary has (the plan has seen to it)."""
    data = bytearray(tensor.num_bytes)
    file.read_into(memoryview(data), tensor.offset)
    found = np.frombuffer(data, dtype=np.int64 if tensor.dtype == "I64" else np.int32).astype(np.int64)
    if found.min() < 0 or found.max() >= vocab_size:
        raise AdapterInvalid(f"{tensor.where} names tokens outside the base model's vocabulary of {vocab_size}")
    if np.unique(found).size != found.size:
        raise AdapterInvalid(f"{tensor.where} names a token twice")
    return found
