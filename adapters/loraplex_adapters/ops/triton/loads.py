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
