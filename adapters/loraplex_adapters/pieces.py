"""An adapter file's tensors, read, converted and written in small pieces.

Pieces bound the memory of a load, whatever the adapter's size, and keep torch's element-wise kernels on the loader's
own thread (they fan out from 32,768 elements on, and a second team of threads would fight the step loop for the cores).
Reading, converting, hashing and writing a piece all release the interpreter lock. Knows nothing of what tensors mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_adapters.formats.safetensors_header import DTYPE_BYTES, TensorInfo
from loraplex_adapters.sources.base import SourceFile
from loraplex_proto.errors import AdapterUnsupported, NonFinite

PIECE_ELEMENTS = 32_000
DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FILE_DTYPES: Mapping[str, str] = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

WriteFn = Callable[[memoryview], None]


class PieceWriter:
    """Writes pieces one after the other and knows how far it has come."""

    def __init__(self, write: WriteFn, position: int = 0) -> None:
        self._write = write
        self.position = position

    def write(self, piece: Tensor) -> None:
        data = bytes_of(piece)
        self._write(data)
        self.position += data.nbytes

    def pad_to(self, position: int) -> None:
        """Zeros up to `position`."""
        if position > self.position:
            self._write(memoryview(bytes(position - self.position)))
            self.position = position


def check_float(tensor: TensorInfo) -> None:
    """Raises AdapterUnsupported for a dtype that is not read."""
    if tensor.dtype not in FILE_DTYPES:
        raise AdapterUnsupported(f"{tensor.where} has dtype {tensor.dtype}; {', '.join(FILE_DTYPES)} are served")


def float_pieces(
    tensor: TensorInfo, file: SourceFile, dtype: str, start: int = 0, count: int | None = None
) -> Iterator[Tensor]:
    """The tensor's elements in order (`count` of them from `start` on), converted to `dtype` and finite. A piece is
    valid until the next one. Raises NonFinite, or what the file raises."""
    itemsize = DTYPE_BYTES[tensor.dtype]
    source_dtype = DTYPES[FILE_DTYPES[tensor.dtype]]
    end = tensor.num_bytes // itemsize if count is None else start + count
    buffer = bytearray(min(end - start, PIECE_ELEMENTS) * itemsize)
    for begin in range(start, end, PIECE_ELEMENTS):
        num = min(PIECE_ELEMENTS, end - begin)
        file.read_into(memoryview(buffer)[: num * itemsize], tensor.offset + begin * itemsize)
        piece = torch.frombuffer(buffer, dtype=source_dtype, count=num).to(DTYPES[dtype])
        _check_finite(piece, tensor, dtype)
        yield piece


def sha256_of(tensor: TensorInfo, file: SourceFile, dtype: str) -> str:
    """Of the tensor's bytes in `dtype`: comparable with TargetModule.weight_sha256."""
    digest = hashlib.sha256()
    for piece in float_pieces(tensor, file, dtype):
        digest.update(bytes_of(piece))
    return digest.hexdigest()


def weight_sha256(weight: Tensor) -> str:
    """What TargetModule.weight_sha256 holds, of a weight already in the base model's dtype."""
    digest = hashlib.sha256()
    for rows in weight.detach().split(max(1, (8 << 20) // max(1, weight[0].numel() * weight.element_size()))):
        digest.update(bytes_of(rows.contiguous().cpu()))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array.data


def _check_finite(piece: Tensor, tensor: TensorInfo, dtype: str) -> None:
    low, high = torch.aminmax(piece)  # a NaN anywhere is both
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise NonFinite(f"{tensor.where} has NaN or Inf (in {dtype}, the base model's dtype)")
