"""Safetensors files read without trust: header, and tensors in small pieces.

The format: 8 bytes of length (little-endian), that many bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the
data, which the tensors cover without gap or overlap. Every rule is checked, because offsets from a file decide where
later code reads.

Pieces bound the memory of a load of any size. They fit into a core's cache and are no smaller, because the loader
pauses after each and finds the cache full of other things. They end with a page of the file, or the page would be read
twice. torch converts them in parts, on the loader's own thread: it fans out from 32,768 elements on, and more threads
would fight the step loop for the cores. Reading, converting, hashing and writing a piece all release the interpreter
lock.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_adapters.io.source_files import SourceFile, read_json_header
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.io.uncached import PAGE_BYTES
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported, NonFinite

MAX_TENSORS = 1 << 15
MAX_NAME_CHARS = 512
MAX_DIMS = 8
MAX_DIM = 1 << 40

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. `offset` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    file: str  # which file, as the reader of its header called it

    @property
    def where(self) -> str:
        """The tensor's file and name, for a message."""
        return f"{self.file}: {self.shown}"

    @property
    def shown(self) -> str:
        """The name for a message: ASCII and bounded."""
        return ascii(self.name[:160])


def read_header(file: SourceFile) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, checked, by name. Raises AdapterInvalid, or what the file raises."""
    what = file.name
    entries, data_start = read_json_header(file)
    entries.pop("__metadata__", None)  # free text; nothing here depends on it
    if len(entries) > MAX_TENSORS:
        raise AdapterInvalid(f"{what} has {len(entries)} tensors; at most {MAX_TENSORS} are read")
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        checkpoint()
        tensors[name] = _tensor(name, entry, data_start, what)
    _check_cover(tensors, data_start, file.num_bytes, what)
    return tensors


def _tensor(name: str, entry: Any, data_start: int, what: str) -> TensorInfo:
    """One checked entry of the header."""
    where = f"{what}: tensor {name[:160]!a}"
    if not name or len(name) > MAX_NAME_CHARS:
        raise AdapterInvalid(f"{where} has a name of {len(name)} characters; 1 to {MAX_NAME_CHARS} are accepted")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise AdapterInvalid(f"{where} must have exactly dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise AdapterInvalid(f"{where} has the unknown dtype {ascii(dtype)[:40]}")
    shape = _numbers(entry["shape"], MAX_DIM)
    if shape is None or len(shape) > MAX_DIMS:
        raise AdapterInvalid(f"{where} has no usable shape: {MAX_DIMS} dimensions at most, none negative or absurd")
    offsets = _numbers(entry["data_offsets"], 1 << 62)
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise AdapterInvalid(f"{where} has no usable data_offsets")
    num_bytes = offsets[1] - offsets[0]
    if math.prod(shape) * DTYPE_BYTES[dtype] != num_bytes:
        raise AdapterInvalid(f"{where} of shape {list(shape)} and {dtype} does not have {num_bytes} bytes")
    return TensorInfo(name, dtype, shape, data_start + offsets[0], num_bytes, what)


def _numbers(value: Any, maximum: int) -> tuple[int, ...] | None:
    """A list of plain integers from 0 to `maximum` (True does not count as one), or None."""
    if not isinstance(value, list):
        return None
    numbers = tuple(n for n in value if type(n) is int and 0 <= n <= maximum)
    return numbers if len(numbers) == len(value) else None


def _check_cover(tensors: Mapping[str, TensorInfo], data_start: int, file_bytes: int, what: str) -> None:
    """Raises AdapterInvalid unless the tensors cover the data exactly once."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset < position:
            raise AdapterInvalid(f"{what}: tensor {tensor.shown} overlaps another one")
        if tensor.offset > position:
            raise AdapterInvalid(f"{what}: there are bytes of no tensor before {tensor.shown}")
        position += tensor.num_bytes
        if position > file_bytes:
            raise AdapterInvalid(f"{what} is cut short: tensor {tensor.shown} ends after the file does")
    if position != file_bytes:
        raise AdapterInvalid(f"{what} has {file_bytes - position} bytes after the last tensor")


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

    def __init__(self, write: WriteFn) -> None:
        self._write = write
        self.position = 0

    def write(self, piece: Tensor) -> None:
        data = bytes_of(piece)
        self._write(data)
        self.position += data.nbytes

    def pad_to(self, position: int) -> None:
        """Writes zeros up to `position`."""
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
    """Reads tensors of an adapter's files piece by piece, converted to `dtype`, each piece into the memory of the one
    before. Owns that memory."""

    def __init__(self, files: Mapping[str, SourceFile], dtype: str) -> None:
        """`files`: the open ones, by name."""
        self.files = files
        self._dtype = dtype
        self._source = bytearray()
        self._target = torch.empty(0)
        self._piece: _Piece | None = None

    def pieces(self, tensor: TensorInfo, start: int = 0, count: int | None = None) -> Iterator[Tensor]:
        """The tensor's elements in order (`count` of them from `start` on), converted and finite. A piece is valid
        until the next one is asked for. Raises NonFinite, or what the file raises."""
        file = self.files[tensor.file]
        itemsize = DTYPE_BYTES[tensor.dtype]
        end = tensor.num_bytes // itemsize if count is None else start + count
        while start < end:
            offset = tensor.offset + start * itemsize
            num = min((PIECE_BYTES - offset % PAGE_BYTES) // itemsize, end - start)
            piece = self._memory(DTYPES[FILE_DTYPES[tensor.dtype]], DTYPES[self._dtype], num)
            file.read_into(memoryview(self._source)[: num * itemsize], offset)
            for part, converted in piece.parts:
                converted.copy_(part)
                _check_finite(converted, tensor, self._dtype)
            yield piece.target
            checkpoint()
            start += num

    def whole(self, tensor: TensorInfo, dtype: torch.dtype) -> Tensor:
        """All of the tensor in memory of its own, converted and then widened to `dtype`. Raises as `pieces` does."""
        found = torch.empty(tensor.shape, dtype=dtype)
        flat, start = found.view(-1), 0
        for piece in self.pieces(tensor):
            for part in piece.split(SERIAL_ELEMENTS):
                flat[start : start + part.numel()] = part
                start += part.numel()
        return found

    def sha256(self, tensor: TensorInfo) -> str:
        """SHA-256 of the tensor's converted bytes: comparable with TargetModule.weight_sha256."""
        digest = hashlib.sha256()
        for piece in self.pieces(tensor):
            digest.update(bytes_of(piece))
        return digest.hexdigest()

    def _memory(self, source: torch.dtype, target: torch.dtype, num: int) -> _Piece:
        """Memory for `num` elements as they are read and as they are given out. New memory for every piece would be
        cleared for every piece, which takes longer than the work."""
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
