"""Tensors beside unreadable memory, to catch kernels that read too far."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_NOTHING, _READ_WRITE = 0, 3  # PROT_NONE, PROT_READ | PROT_WRITE
_PRIVATE_ANONYMOUS = 0x22
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def at_end(values: Tensor) -> Tensor:
    """A contiguous copy whose last byte is the last that can be read."""
    num_bytes = values.numel() * values.element_size()
    size = -(-max(num_bytes, 1) // PAGE) * PAGE
    return _copy(values, size, size - num_bytes)


def at_start(values: Tensor) -> Tensor:
    """A contiguous copy whose first byte is the first that can be read."""
    size = -(-max(values.numel() * values.element_size(), 1) // PAGE) * PAGE
    return _copy(values, size, 0)


def _copy(values: Tensor, size: int, offset: int) -> Tensor:
    whole = size + 2 * PAGE
    base = _libc.mmap(None, whole, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    assert base != _FAILED, "no memory"
    for wall in (base, base + PAGE + size):
        assert _libc.mprotect(wall, PAGE, _NOTHING) == 0
    buffer = (ctypes.c_uint8 * size).from_address(base + PAGE)
    weakref.finalize(buffer, _libc.munmap, base, whole)  # the tensor keeps the buffer
    count = math.prod(values.shape)
    if count == 0:
        return torch.empty_like(values)
    copy = torch.frombuffer(buffer, dtype=values.dtype, count=count, offset=offset).view(values.shape)
    copy.copy_(values)
    return copy
