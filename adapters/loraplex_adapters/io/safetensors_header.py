"""Header of a safetensors file, read without trust.

The format: 8 bytes of length (little-endian), that many bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the
data, which the tensors cover without gap or overlap. Every rule is checked here, because offsets from a file decide
where later code reads. Knows nothing of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplex_adapters.io.source_files import parse_object
from loraplex_adapters.io.throttle import checkpoint
from loraplex_contracts.errors import AdapterInvalid

# A LoRA on every linear of a 126-layer model has 0.3 MB of header. The limit also bounds how long parsing it holds up
# the other threads of the process.
MAX_HEADER_BYTES = 4 << 20
MAX_TENSORS = 1 << 15
MAX_NAME_CHARS = 512
MAX_DIMS = 8
MAX_DIM = 1 << 40

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

# Reads `num_bytes` at `offset`; raises AdapterInvalid when the file ends before.
ReadAt = Callable[[int, int], bytes]


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
        """File and name, for a message."""
        return f"{self.file}: {self.shown}"

    @property
    def shown(self) -> str:
        """The name for a message: ASCII and bounded."""
        return ascii(self.name[:160])


def read_header(read_at: ReadAt, file_bytes: int, what: str) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file of `file_bytes`, by name. `what` names the file. Raises AdapterInvalid."""
    if file_bytes < 8:
        raise AdapterInvalid(f"{what} is cut short: {file_bytes} bytes are not a safetensors file")
    prefix = read_at(0, 8)
    if prefix == b"version ":
        raise AdapterInvalid(f"{what} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise AdapterInvalid(f"{what} claims a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are read")
    data_start = 8 + header_bytes
    if data_start > file_bytes:
        raise AdapterInvalid(f"{what} is cut short: its header says {header_bytes} bytes, the file has {file_bytes}")
    entries = parse_object(read_at(8, header_bytes), f"the header of {what}", MAX_HEADER_BYTES)
    entries.pop("__metadata__", None)  # free text; nothing here depends on it
    if len(entries) > MAX_TENSORS:
        raise AdapterInvalid(f"{what} has {len(entries)} tensors; at most {MAX_TENSORS} are read")
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        checkpoint()
        tensors[name] = _tensor(name, entry, data_start, what)
    _check_cover(tensors, data_start, file_bytes, what)
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
    """The tensors must cover the data exactly once."""
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
