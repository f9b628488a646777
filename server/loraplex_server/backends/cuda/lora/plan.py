"""Plan of a step for the LoRA kernels: blocks of rows, tile sizes.

Built on the host (sorting on the device would synchronise every step), in one array that goes to the device in one
copy; into memory of its own, or into a buffer that stays where it is, for CUDA graphs. Imports no triton.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_server.backends.cuda.kernel_shapes import next_power
from loraplex_server.layers.lora import Segment, join_neighbours
from loraplex_server.layers.transfer import host_ints

ALIGN_BYTES = 16  # of the kernels' widest load
# Adapters on one row that a reserved plan has room for.
MAX_TERMS = 4
# Blocks in a reserved plan beyond what its slots can need, for mixtures: every one is a set of slots of its own.
SPARE_BLOCKS = 8
BLOCK_INTS = 6

Terms = tuple[tuple[int, float], ...]  # (slot, weight) in order: equal sets add up in the same order everywhere
Words = npt.NDArray[np.int32]


@dataclass(slots=True)
class KernelPlan:
    """A step's blocks of rows on the device. Positions list the rows of every block one after the other; a row is in
    one block at most.

    Rows need no order in the step: blocks name theirs, of several through `rows`, so that activations are not permuted.
    A block of no rows is a program that ends at once. All four tensors are parts of `words`. Of a reserved plan the
    contents change, of others nothing.
    """

    slots: tuple[int, ...] | None  # distinct, for the host's own look at ranks; None: reserved, they change
    num_slots: int  # that there are
    block_rows: int
    max_terms: int  # adapters on one row, at most
    words: Tensor  # int32
    # int32 [num_blocks, 6]: first position, number of rows, first term, number of terms, first row, first term's slot
    blocks: Tensor
    rows: Tensor  # int32 [num_positions]
    term_slots: Tensor  # int32 [num_terms]
    term_weights: Tensor  # float32 [num_terms]
    contents: tuple[Segment, ...] = ()  # what a reserved plan was refilled with

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def num_positions(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A kernel plan on the host, by its parts."""

    blocks: Words  # [num_blocks, 6], see KernelPlan
    rows: Words
    term_slots: Words
    term_weights: npt.NDArray[np.float32]
    max_terms: int


def build_plan(
    segments: Sequence[Segment], num_slots: int, device: torch.device, choose_block_rows: Callable[[int], int]
) -> KernelPlan:
    """A plan for these segments and no others. `choose_block_rows` is told how many rows the most popular have."""
    groups = group_rows(segments)
    longest = max((sum(end - start for start, end in ranges) for _, ranges in groups), default=0)
    block_rows = choose_block_rows(longest)
    host = _host_plan(groups, block_rows)
    sizes = (len(host.blocks), len(host.rows), len(host.term_slots))
    words = host_ints(sum(_spans(*sizes)), device)
    _write(host, words.numpy(), sizes)
    slots = tuple(np.unique(host.term_slots).tolist())
    return _view(words.to(device, non_blocking=True), sizes, block_rows, host.max_terms, slots, num_slots)


def reserve_plan(num_rows: int, num_slots: int, device: torch.device, block_rows: int) -> KernelPlan:
    """Room for every composition of `num_rows` rows out of `num_slots` adapters, and for some mixtures. Empty."""
    # One block per adapter is not full, at most.
    num_blocks = min(num_rows, num_rows // block_rows + num_slots + SPARE_BLOCKS)
    sizes = (num_blocks, num_rows, num_blocks * MAX_TERMS)
    words = torch.zeros(sum(_spans(*sizes)), dtype=torch.int32, device=device)
    return _view(words, sizes, block_rows, MAX_TERMS, None, num_slots)


def refill_plan(plan: KernelPlan, segments: Sequence[Segment]) -> None:
    """Puts other segments into a reserved plan. Raises ValueError, and changes nothing, where they do not fit."""
    contents = tuple(segments)
    if contents == plan.contents:  # decoding repeats itself, step after step
        return
    host = _host_plan(group_rows(segments), plan.block_rows)
    sizes = (plan.num_blocks, plan.num_positions, len(plan.term_slots))
    found = (len(host.blocks), len(host.rows), len(host.term_slots))
    if host.max_terms > plan.max_terms or any(f > s for f, s in zip(found, sizes, strict=True)):
        raise ValueError(
            f"{found[0]} blocks of {found[1]} rows with up to {host.max_terms} adapters each do not fit the "
            f"{sizes[0]} blocks of {sizes[1]} rows with up to {plan.max_terms} that were reserved; prepare them instead"
        )
    # New memory every time: the caching allocator hands none out again before its copy has happened, so that nobody
    # has to wait for the step before.
    words = host_ints(plan.words.shape[0], plan.words.device)
    _write(host, words.numpy(), sizes)
    plan.words.copy_(words, non_blocking=True)
    plan.contents = contents


def group_rows(segments: Sequence[Segment]) -> list[tuple[Terms, list[tuple[int, int]]]]:
    """Ranges of rows by the adapters that they have, ordered by these."""
    groups: dict[Terms, list[tuple[int, int]]] = {}
    for start, end, terms in _ranges(join_neighbours(segments)):
        groups.setdefault(terms, []).append((start, end))
    return sorted(groups.items())


def _ranges(segments: Sequence[Segment]) -> Iterable[tuple[int, int, Terms]]:
    """Disjoint ranges of rows with everything that they have, from segments in row order that may overlap."""
    if all(before.end <= after.start for before, after in pairwise(segments)):
        for s in segments:
            yield s.start, s.end, ((s.adapter_slot, s.weight),)
        return
    changes = [(s.start, 1, (s.adapter_slot, s.weight)) for s in segments] + [
        (s.end, 0, (s.adapter_slot, s.weight)) for s in segments
    ]
    active: list[tuple[int, float]] = []
    since = 0
    for row, begins, term in sorted(changes):
        if row > since and active:
            yield since, row, tuple(active)
        since = row
        if begins:
            insort(active, term)
        else:
            active.remove(term)


def _host_plan(groups: Sequence[tuple[Terms, list[tuple[int, int]]]], block_rows: int) -> HostPlan:
    ranges = np.array([r for _, of_group in groups for r in of_group], dtype=np.int64).reshape(-1, 2)
    owner = np.repeat(np.arange(len(groups)), [len(of_group) for _, of_group in groups])
    lengths = ranges[:, 1] - ranges[:, 0]
    rows = np.repeat(ranges[:, 0], lengths) + _within(lengths)

    num_rows = np.bincount(owner, lengths, minlength=len(groups)).astype(np.int64)  # by group, as all that follows
    num_terms = np.array([len(terms) for terms, _ in groups], dtype=np.int64)
    num_blocks = -(-num_rows // block_rows)
    of_block = np.repeat(np.arange(len(groups)), num_blocks)
    offset = _within(num_blocks) * block_rows  # of each block in its group
    term_slots = np.array([slot for terms, _ in groups for slot, _ in terms], dtype=np.int32)
    blocks = np.empty((len(of_block), BLOCK_INTS), dtype=np.int32)
    blocks[:, 0] = (np.cumsum(num_rows) - num_rows)[of_block] + offset
    blocks[:, 1] = np.minimum(block_rows, num_rows[of_block] - offset)
    blocks[:, 2] = (np.cumsum(num_terms) - num_terms)[of_block]
    blocks[:, 3] = num_terms[of_block]
    blocks[:, 4] = rows[blocks[:, 0]]
    blocks[:, 5] = term_slots[blocks[:, 2]]
    return HostPlan(
        blocks=blocks,
        rows=rows.astype(np.int32),
        term_slots=term_slots,
        term_weights=np.array([weight for terms, _ in groups for _, weight in terms], dtype=np.float32),
        max_terms=int(num_terms.max(initial=0)),
    )


def _within(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Numbers 0, 1, ... for each length in turn."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def _spans(num_blocks: int, num_positions: int, num_terms: int) -> list[int]:
    """Words of each part, in the order in which they lie. Multiples of 16 bytes: Triton compiles a kernel once more for
    pointers that are none."""
    return [-(-size // 4) * 4 for size in (BLOCK_INTS * num_blocks, num_positions, num_terms, num_terms)]


def _write(host: HostPlan, words: Words, sizes: tuple[int, int, int]) -> None:
    """Writes the plan into `words` and zeros into the rest of them, so that an unused block has no rows."""
    words.fill(0)
    start = 0
    parts = (host.blocks.reshape(-1), host.rows, host.term_slots, host.term_weights.view(np.int32))
    for part, span in zip(parts, _spans(*sizes), strict=True):
        words[start : start + len(part)] = part
        start += span


def _view(
    words: Tensor,
    sizes: tuple[int, int, int],
    block_rows: int,
    max_terms: int,
    slots: tuple[int, ...] | None,
    num_slots: int,
) -> KernelPlan:
    blocks, rows, term_slots, term_weights = words.split(_spans(*sizes))
    num_blocks, num_positions, num_terms = sizes
    return KernelPlan(
        slots=slots,
        num_slots=num_slots,
        block_rows=block_rows,
        max_terms=max_terms,
        words=words,
        blocks=blocks[: BLOCK_INTS * num_blocks].view(num_blocks, BLOCK_INTS),
        rows=rows[:num_positions],
        term_slots=term_slots[:num_terms],
        term_weights=term_weights[:num_terms].view(torch.float32),
    )


# --- choice of kernel and tile sizes ----------------------------------------------------------------------------------

# fused   One launch. Every program computes its row's A product itself and adds its columns of B to it: a launch and a
#         round trip through memory are saved, and A is read once per row and block of columns.
# rows    Two launches, for few rows per adapter: a program multiplies one tile of a factor by one row.
# tiles   Two launches, for many rows per adapter: products of tiles on the tensor cores.
#
# Figures measured on an H200 say so. The others are derived from its data sheet and from what is known of other
# engines; `scripts/gpu_check.py launches` is what to tune them with.


Variant = Literal["fused", "rows", "tiles"]

# Rows per block. A program that takes several rows one after the other waits for x, for what is between the halves and
# for y each time (some 0.5 us), so up to MAX_ONE rows each has programs of its own, and a popular adapter's factors
# come from L2 again and again. On an H200 eight verified drafts of five tokens took 0.94 of what they took in blocks of
# four rows, and 64 rows of one adapter 0.97. SOME is the least that a tensor core takes: a tile costs the same for 1
# row and for 16. Verified drafts of a full batch are hundreds of rows; prompts want large tiles, so that B is read less
# often.
ONE_ROW = 1
SOME_ROWS = 16
MANY_ROWS = 64
# Largest number of rows (of one adapter, or of a reserved step) for ONE_ROW and SOME_ROWS.
MAX_ONE = 64
MAX_SOME = 512

# A fused program reads all of A: up to so many elements of A (16 x 2048 in bfloat16 are 64 KB) that is as fast as the
# launch and the round trip that it saves (about 1 us; one SM takes in some 100 KB/us from L2).
MAX_FUSED_A = 16 * 2048
# All programs of a fused launch together should be on the device at once (132 SMs).
MAX_FUSED_PROGRAMS = 264
# Blocks of one row up to which programs share an adapter's ranks.
MAX_SHARED_BLOCKS = 16


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
    shrink_warps: int = 4
    expand_warps: int = 4


class DenseLaunch(NamedTuple):
    """Block sizes of a dense product."""

    block_in: int
    block_out: int
    num_stages: int


def choose_block_rows(num_rows: int, variant: Variant | None = None) -> int:
    """Rows per block where the most popular adapters of a step have `num_rows`; with a variant, what that can take."""
    if variant != "tiles" and (variant is not None or num_rows <= MAX_ONE):
        return ONE_ROW
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
    """The launch for blocks of so many rows, in a module of this shape with ranks up to `max_rank`. A variant that is
    asked for is taken, if blocks of so many rows have it."""
    if block_rows > ONE_ROW:
        return _tiles(block_rows, in_features, max_rank, element_bytes)
    # Longer pieces of A make fewer programs and fewer terms in the second half's sum; shorter ones more that load at
    # once. 16 ranks x 512 inputs are 64 elements for each of 128 threads, all asked for before the first is used.
    block_in = 512 if in_features > 512 else next_power(in_features)
    num_splits = -(-in_features // block_in)
    block_rank = 16  # fewer are masked, which reads nothing
    # Of few blocks the ranks are shared by programs, up to 64 in one go; a program without a rank ends at once. Of many
    # blocks such programs cost more than they save: with rank 16 and 32 rows shrink took 1.2 times as long on an H200,
    # with 64 rows 1.4 times.
    num_lanes = 1 if max_rank <= block_rank or num_blocks > MAX_SHARED_BLOCKS else 4
    block_out = 128
    num_programs = num_blocks * -(-out_features // block_out)
    pays = max_rank * in_features <= MAX_FUSED_A and num_programs <= MAX_FUSED_PROGRAMS
    if variant == "fused" or (variant is None and pays):
        return Launch("fused", block_in, num_splits, 1, 1, block_rank, block_out, num_stages=3)
    # With 4 warps expand took 1.07 times as long on an H200.
    return Launch("rows", block_in, 1, num_splits, num_lanes, block_rank, block_out, num_stages=1, expand_warps=2)


def _tiles(block_rows: int, in_features: int, max_rank: int, element_bytes: int) -> Launch:
    # Depends on the module alone, so that a row's sum is taken in the same order whatever else is in the step.
    num_splits = 1 if in_features < 1024 else 4 if in_features < 8192 else 8
    block_in = 256 // element_bytes  # with 64 rows and 64 ranks three pieces of 32 KB are under way
    # Wide tiles of ranks read x less often; 16 is the least that a tensor core takes.
    block_rank = 16 if max_rank <= 16 else 64
    # With fewer a thread has more of a large tile than it has registers for (which the compiler says).
    num_warps = 8 if block_rows == MANY_ROWS else 4
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
        shrink_warps=num_warps,
        expand_warps=num_warps,
    )


def choose_dense_rows(num_rows: int) -> int:
    """Rows per block where the most popular weight of a step has `num_rows`. Weights are large and a block reads one
    whole, so that two small blocks would cost more than a large one that is half empty."""
    return SOME_ROWS if num_rows <= SOME_ROWS else MANY_ROWS


def choose_dense_launch(block_rows: int, element_bytes: int) -> DenseLaunch:
    """The launch of a dense product. For few rows reading is all: 32 outputs per program make 128 programs for 4,096
    (of 132 SMs), and each has three pieces of 16 KB under way, more than the 30 KB per SM that fill an H200's 4.8 TB/s
    for the time of a read."""
    if block_rows == SOME_ROWS:
        return DenseLaunch(block_in=512 // element_bytes, block_out=32, num_stages=4)
    return DenseLaunch(block_in=128 // element_bytes, block_out=64, num_stages=4)
