"""What several kernels read in the same way."""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# pyright: reportMissingParameterType=false
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pointer_to(address, like, IS_ALIGNED: tl.constexpr):
    """A factor's address as a pointer to what `like` points to. Only a known alignment makes loads wide."""
    pointer = address.to(tl.pointer_type(like.dtype.element_ty))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def sum_of_ranks(ranks_ptr, term_slots_ptr, first_term, num_terms):
    """0: the terms' adapters leave this module alone. y must then stay as it is: even adding nothing would turn a -0.0
    into 0.0."""
    total = 0
    term = 0
    while term < num_terms:
        total += tl.load(ranks_ptr + tl.load(term_slots_ptr + first_term + term))
        term += 1
    return total


@triton.jit
def block_at(blocks_ptr, block):
    """Of a block its first position, number of rows, first term, number of terms."""
    at = blocks_ptr + block * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def sibling_of(column_block, end_0, end_1, out_features, BLOCK_OUT: tl.constexpr):
    """Of a block of columns its sibling, the block's number in it, and the sibling's first and last column."""
    num_0 = tl.cdiv(end_0, BLOCK_OUT)
    num_1 = tl.cdiv(end_1 - end_0, BLOCK_OUT)
    sibling = (column_block >= num_0).to(tl.int32) + (column_block >= num_0 + num_1).to(tl.int32)
    before = tl.where(sibling == 0, 0, tl.where(sibling == 1, num_0, num_0 + num_1))
    start = tl.where(sibling == 0, 0, tl.where(sibling == 1, end_0, end_1))
    end = tl.where(sibling == 0, end_0, tl.where(sibling == 1, end_1, out_features))
    return sibling, column_block - before, start, end
