"""Medusa guesses in one native call, for heads that share the model's own head.

A guess costs a few small products; as tensor operations it would mostly be overhead between them. Owns the memory that
a guess needs. Knows neither slots nor which heads are in them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loraplex_server.backends.cpu.linear import NativeLinear
from loraplex_server.backends.cpu.lora import MAX_DENSE_ROWS
from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels
from loraplex_server.backends.cpu.native.library import Block, Guesses, GuessScratch, Head
from loraplex_server.layers.linear import AdaptedHead
from loraplex_server.layers.lora import DenseWeight


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows `start` to `end` of a batch have this block in a layer."""

    start: int
    end: int
    weight: DenseWeight


@dataclass(frozen=True, slots=True)
class GuessPlan:
    """The layout of a batch of guesses, as the kernels read it, and the buffers of their results."""

    struct: Guesses
    best: Any  # float[num_rows]
    columns: Any  # int64[num_rows]
    kept_alive: tuple[Any, ...]


class NativeGuesser:
    """Guesses of heads that are blocks before the model's own head."""

    def __init__(self, kernels: NativeKernels, head: NativeLinear, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._linear = head  # owns what the struct points to
        packed, bias = head.packed, head.bias
        self._head = Head(
            features=packed.num_inputs,
            num_outputs=packed.num_outputs,
            packed=packed.address,
            bias=bias.data_ptr() if bias is not None else None,
            format=packed.format.code if packed.format is not None else 0,
        )
        self._memory: tuple[Tensor, ...] = ()
        self._num_rows = 0  # that there is memory for
        self._scratch = GuessScratch()

    def plan(self, sources: Sequence[int], layers: Sequence[Sequence[BlockRows]]) -> GuessPlan | None:
        """The plan of a batch of guesses: guess `i` begins as hidden state `sources[i]`. None where a product of
        tensors is faster."""
        blocks = [block for layer in layers for block in layer]
        if any(block.end - block.start > MAX_DENSE_ROWS for block in blocks):
            return None
        num_rows = len(sources)
        self._reserve(num_rows)
        rows = (ctypes.c_int32 * num_rows)(*sources)
        num_blocks = (ctypes.c_int32 * len(layers))(*(len(layer) for layer in layers))
        array = (Block * len(blocks))(*(_block(block) for block in blocks))
        addresses = (ctypes.addressof(part) for part in (rows, num_blocks, array))
        return GuessPlan(
            Guesses(DTYPES[self._dtype], num_rows, len(layers), *addresses),
            (ctypes.c_float * num_rows)(),
            (ctypes.c_int64 * num_rows)(),
            (rows, num_blocks, array, blocks),
        )

    def run(self, hidden: Tensor, plan: GuessPlan) -> tuple[list[float], list[int]]:
        """The guesses of a plan: hidden [num_states, hidden] -> of each guess the largest logit, NaN where any is, and
        its column."""
        states = hidden if hidden.is_contiguous() else hidden.contiguous()
        self._kernels.guess(plan.struct, self._head, states, self._scratch, plan.best, plan.columns)
        return plan.best[:], plan.columns[:]

    def _reserve(self, num_rows: int) -> None:
        """Reserves memory for batches of so many rows and all smaller ones."""
        if num_rows > self._num_rows:
            self._num_rows = max(num_rows, 2 * self._num_rows)
            sizes = (self._head.features, self._head.features, self._head.num_outputs)
            self._memory = tuple(torch.empty(self._num_rows * size, dtype=self._dtype) for size in sizes)
            self._scratch = GuessScratch(*(part.data_ptr() for part in self._memory))


def native_guesser(kernels: NativeKernels | None, head: nn.Module, dtype: torch.dtype) -> NativeGuesser | None:
    """The guesser for the model's own `head`; None where the kernels do not compute that head."""
    if kernels is None or not isinstance(head, AdaptedHead) or not isinstance(head.base, NativeLinear):
        return None
    return NativeGuesser(kernels, head.base, dtype)


def _block(rows: BlockRows) -> Block:
    bias = rows.weight.bias
    return Block(rows.start, rows.end, rows.weight.weight.data_ptr(), bias.data_ptr() if bias is not None else None)
