"""From the tensors of a file to the kernel-ready bytes of a layout, in small pieces.

Pieces bound the memory of a load, whatever the adapter's size, and keep torch's element-wise kernels on the loader's
own thread (they fan out from 32,768 elements on, and a second team of threads would fight the step loop for the cores).
Reading, converting, hashing and writing a piece all release the interpreter lock.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_adapters.formats.detect import WEIGHTS_NAME
from loraplex_adapters.formats.peft import FLOAT_DTYPES, LoraPlan
from loraplex_adapters.formats.safetensors_header import DTYPE_BYTES, TensorInfo
from loraplex_adapters.lora.layout import DTYPES
from loraplex_adapters.sources.base import SourceFile
from loraplex_proto.errors import AdapterUnsupported, NonFinite

PIECE_ELEMENTS = 32_000

WriteFn = Callable[[memoryview], None]


def write_payload(plan: LoraPlan, file: SourceFile, write: WriteFn) -> None:
    """Writes exactly `plan.layout.num_bytes` bytes. Raises NonFinite, or what the file raises."""
    position = 0
    for module, placed in zip(plan.modules, plan.layout.placed, strict=True):
        for tensor, offset in ((module.a, placed.a_offset), (module.b, placed.b_offset)):
            position += _pad(write, offset - position)
            for piece in _pieces(tensor, file, plan.layout.dtype):
                _check_finite(piece, tensor, plan.layout.dtype)
                position += _write(write, piece)
    _pad(write, plan.layout.num_bytes - position)


def check_base_copies(plan: LoraPlan, file: SourceFile) -> None:
    """Raises AdapterUnsupported when a saved weight is not the base model's own."""
    for tensor, module in plan.base_copies:
        digest = hashlib.sha256()
        for piece in _pieces(tensor, file, plan.layout.dtype):
            digest.update(_bytes_of(piece))
        if digest.hexdigest() != module.weight_sha256:
            raise AdapterUnsupported(
                f"{WEIGHTS_NAME}: {tensor.shown} replaces a weight of the base model by another, which is not served"
            )


def weight_sha256(weight: Tensor) -> str:
    """What TargetModule.weight_sha256 holds, of a weight already in the base model's dtype."""
    digest = hashlib.sha256()
    for rows in weight.detach().split(max(1, (8 << 20) // max(1, weight[0].numel() * weight.element_size()))):
        digest.update(_bytes_of(rows.contiguous().cpu()))
    return digest.hexdigest()


def _pieces(tensor: TensorInfo, file: SourceFile, dtype: str) -> Iterator[Tensor]:
    """The tensor's elements in order, converted. A piece is valid until the next one."""
    source_dtype = DTYPES[FLOAT_DTYPES[tensor.dtype]]
    itemsize = DTYPE_BYTES[tensor.dtype]
    num_elements = tensor.num_bytes // itemsize
    buffer = bytearray(min(num_elements, PIECE_ELEMENTS) * itemsize)
    for start in range(0, num_elements, PIECE_ELEMENTS):
        count = min(PIECE_ELEMENTS, num_elements - start)
        file.read_into(memoryview(buffer)[: count * itemsize], tensor.offset + start * itemsize)
        yield torch.frombuffer(buffer, dtype=source_dtype, count=count).to(DTYPES[dtype])


def _check_finite(piece: Tensor, tensor: TensorInfo, dtype: str) -> None:
    low, high = torch.aminmax(piece)  # a NaN anywhere is both
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise NonFinite(f"{WEIGHTS_NAME}: {tensor.shown} has NaN or Inf (in {dtype}, the base model's dtype)")


def _write(write: WriteFn, piece: Tensor) -> int:
    data = _bytes_of(piece)
    write(data)
    return data.nbytes


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array.data


def _pad(write: WriteFn, num_bytes: int) -> int:
    if num_bytes > 0:
        write(memoryview(bytes(num_bytes)))
    return num_bytes
