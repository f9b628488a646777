"""Tensors of adapter files, read, converted and written in small pieces.

Pieces bound the memory of a load of any size. They fit into a core's cache and are no smaller,
because the loader pauses after each and finds the cache full of other things. They end with a page of the file, or the
page would be read twice. torch converts them in parts, on the loader's own thread: it fans out from 32,768 elements on,
and more threads would fight the step loop for the cores. Reading, converting, hashing and writing a piece all release
the interpreter lock. Knows nothing of what tensors mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_adapters.io.safetensors_header import DTYPE_BYTES, TensorInfo
from loraplex_adapters.io.source_files import SourceFile
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.io.uncached import PAGE_BYTES
from loraplex_contracts.errors import AdapterUnsupported, NonFinite

SERIAL_ELEMENTS = 30_720  # that torch's element-wise kernels work on without other threads; whole pages
PIECE_BYTES = 2 * SERIAL_ELEMENTS * 4
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """The memory of a piece. Most are of one shape, and the tensors take longer to make than to fill."""

    shape: tuple[torch.dtype, torch.dtype, int]  # as it is read, as it is given out, number of elements
    target: Tensor
    parts: tuple[tuple[Tensor, Tensor], ...]  # as read and as given out, SERIAL_ELEMENTS at most


class PieceReader:
    """Reads tensors piece by piece, each into the memory of the one before. Owns that memory."""

    def __init__(self) -> None:
        self._source = bytearray()
        self._target = torch.empty(0)
        self._piece: _Piece | None = None

    def pieces(
        self, tensor: TensorInfo, file: SourceFile, dtype: str, start: int = 0, count: int | None = None
    ) -> Iterator[Tensor]:
        """The tensor's elements in order (`count` of them from `start` on), converted to `dtype` and finite. A piece is
        valid until the next one is asked for. Raises NonFinite, or what the file raises."""
        itemsize = DTYPE_BYTES[tensor.dtype]
        end = tensor.num_bytes // itemsize if count is None else start + count
        while start < end:
            offset = tensor.offset + start * itemsize
            num = min((PIECE_BYTES - offset % PAGE_BYTES) // itemsize, end - start)
            piece = self._memory(DTYPES[FILE_DTYPES[tensor.dtype]], DTYPES[dtype], num)
            file.read_into(memoryview(self._source)[: num * itemsize], offset)
            for part, converted in piece.parts:
                converted.copy_(part)
                _check_finite(converted, tensor, dtype)
            yield piece.target
            checkpoint()
            start += num

    def sha256(self, tensor: TensorInfo, file: SourceFile, dtype: str) -> str:
        """Of the tensor's bytes in `dtype`: comparable with TargetModule.weight_sha256."""
        digest = hashlib.sha256()
        for piece in self.pieces(tensor, file, dtype):
            digest.update(bytes_of(piece))
        return digest.hexdigest()

    def _memory(self, source: torch.dtype, target: torch.dtype, num: int) -> _Piece:
        """`num` elements as they are read and as they are given out. New memory for every piece would be cleared for
        every piece, which takes longer than the work."""
        shape = (source, target, num)
        if self._piece is not None and self._piece.shape == shape:
            return self._piece
        if len(self._source) < num * source.itemsize:
            self._source = bytearray(num * source.itemsize)
        if self._target.dtype != target or self._target.numel() < num:
            self._target = torch.empty(num, dtype=target)
        read, given = torch.frombuffer(self._source, dtype=source, count=num), self._target[:num]
        parts = tuple(zip(read.split(SERIAL_ELEMENTS), given.split(SERIAL_ELEMENTS), strict=True))
        self._piece = _Piece(shape, given, parts)
        return self._piece


def weight_sha256(weight: Tensor) -> str:
    """TargetModule.weight_sha256 of a weight that is already in the base model's dtype."""
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
