"""Choice of LoRA kernel and tile sizes by rows and module shape.

Pure; imports no triton.

Three variants:

    fused   one launch. Every program computes the rows' A products itself and adds its columns of B to them: a launch
            and a round trip through memory are saved, and A is read once per block of columns
    rows    two launches, for few rows per adapter: a program keeps one tile of A in registers while rows pass by
    tiles   two launches, for many rows per adapter: products of tiles on the tensor cores

None of the figures has been measured on a GPU. They are derived from an H200's data sheet and from what is known of
other engines, as the comments say; `benchmarks/kernel_times.py --device cuda` is what to tune them with.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

Variant = Literal["fused", "rows", "tiles"]

# Rows per block. A program that takes several rows one after the other waits for x, for what is between the halves and
# for y each time (some 0.5 us), so up to MAX_ONE rows each has programs of its own, and a popular adapter's factors
# come from L2 again and again: 32 rows x 256 KB (rank 16, 4,096 x 4,096) are 1.5 us of its 5.5 TB/s. Beyond that FEW.
# SOME is the least that a tensor core takes: a tile costs the same for 1 row and for 16. Verified drafts of a full
# batch are hundreds of rows; prompts want large tiles, so that B is read less often.
ONE_ROW = 1
FEW_ROWS = 4
SOME_ROWS = 16
MANY_ROWS = 64
# Largest number of rows (of one adapter, or of a reserved step) for ONE_ROW, FEW_ROWS and SOME_ROWS.
MAX_ONE = 32
MAX_FEW = 64
MAX_SOME = 512

# A fused program reads all of A: up to so many elements of A (16 x 2048 in bfloat16 are 64 KB) that is as fast as the
# launch and the round trip that it saves (about 1 us; one SM takes in some 100 KB/us from L2).
MAX_FUSED_A = 16 * 2048
# And all its programs together should be on the device at once (132 SMs).
MAX_FUSED_PROGRAMS = 264


class Launch(NamedTuple):
    """Block sizes of one module's launch or two. `block_in` counts inputs, `block_out` outputs, `block_rank` ranks."""

    variant: Variant
    block_in: int  # of one step of the loop over inputs
    num_steps: int  # of that loop in one program
    num_splits: int  # programs that share the inputs; added up by the second half, always in the same order
    num_lanes: int  # programs that share an adapter's ranks, one block of ranks after the other each
    block_rank: int
    block_out: int
    num_stages: int  # pieces of the loop over inputs that are under way at a time, and the one that is used
    num_warps: int = 4


class DenseLaunch(NamedTuple):
    """Block sizes of a dense product."""

    block_in: int
    block_out: int
    num_stages: int


def choose_block_rows(num_rows: int, variant: Variant | None = None) -> int:
    """Rows per block where the most popular adapters of a step have `num_rows`; with a variant, what that can take."""
    if variant is None:
        variant = "rows" if num_rows <= MAX_FEW else "tiles"
    if variant != "tiles":
        return ONE_ROW if num_rows <= MAX_ONE else FEW_ROWS
    return SOME_ROWS if num_rows <= MAX_SOME else MANY_ROWS


@lru_cache(maxsize=4096)
def choose_launch(
    block_rows: int,
    num_blocks: int,
    in_features: int,
    out_features: int,
    max_rank: int,
    element_bytes: int,
    variant: Variant | None = None,
) -> Launch:
    """For blocks of so many rows, in a module of this shape with ranks up to `max_rank`. A variant that is asked for is
    taken, if blocks of so many rows have it."""
    if block_rows > FEW_ROWS:
        return _tiles(block_rows, in_features, max_rank, element_bytes)
    # Longer pieces of A make fewer programs and fewer terms in the second half's sum; shorter ones more that load at
    # once. 16 ranks x 512 inputs are 64 elements for each of 128 threads, all asked for before the first is used.
    block_in = 512 if in_features > 512 else _next_power(in_features)
    num_splits = -(-in_features // block_in)
    block_rank = 16  # fewer are masked, which reads nothing
    # Ranks up to 64 in one go; a program of an adapter with fewer ends at once. One of two, as every choice that looks
    # at ranks: what was never chosen before is compiled in the middle of serving.
    num_lanes = 1 if max_rank <= block_rank else 4
    block_out = 128
    num_programs = num_blocks * -(-out_features // block_out)
    pays = max_rank * in_features <= MAX_FUSED_A and num_programs <= MAX_FUSED_PROGRAMS
    if variant == "fused" or (variant is None and pays):
        return Launch("fused", block_in, num_splits, 1, 1, block_rank, block_out, num_stages=3)
    return Launch("rows", block_in, 1, num_splits, num_lanes, block_rank, block_out, num_stages=1)


def _tiles(block_rows: int, in_features: int, max_rank: int, element_bytes: int) -> Launch:
    # Depends on the module alone, so that a row's sum is taken in the same order whatever else is in the step.
    num_splits = 1 if in_features < 1024 else 4 if in_features < 8192 else 8
    block_in = 256 // element_bytes  # with 64 rows and 64 ranks three pieces of 32 KB are under way
    # Wide tiles of ranks read x less often; 16 is the least that a tensor core takes.
    block_rank = 16 if max_rank <= 16 else 64
    return Launch(
        variant="tiles",
        block_in=block_in,
        num_steps=-(-in_features // (num_splits * block_in)),
        num_splits=num_splits,
        num_lanes=1 if max_rank <= block_rank else 4,
        block_rank=block_rank,
        # Many rows read B once per 64 of them; few have too few programs with wide blocks.
        block_out=128 if block_rows == MANY_ROWS else 64,
        num_stages=3,
        # With fewer a thread has more of a large tile than it has registers for (which the compiler says).
        num_warps=8 if block_rows == MANY_ROWS else 4,
    )


def choose_dense_rows(num_rows: int) -> int:
    """Rows per block where the most popular weight of a step has `num_rows`. Weights are large and a block reads one
    whole, so that two small blocks would cost more than a large one that is half empty."""
    return SOME_ROWS if num_rows <= SOME_ROWS else MANY_ROWS


def choose_dense_launch(block_rows: int, element_bytes: int) -> DenseLaunch:
    """For few rows reading is all: 32 outputs per program make 128 programs for 4,096 (of 132 SMs), and of each three
    pieces of 16 KB are under way, more than the 30 KB per SM that fill an H200's 4.8 TB/s for the time of a read."""
    if block_rows == SOME_ROWS:
        return DenseLaunch(block_in=512 // element_bytes, block_out=32, num_stages=4)
    return DenseLaunch(block_in=128 // element_bytes, block_out=64, num_stages=4)


def _next_power(number: int) -> int:
    """The smallest power of two that is not less, at least 1."""
    return 1 << max(0, number - 1).bit_length()
