"""Plan of a step for attention on CUDA, built with numpy on the host.

The kernels read pieces of work from one int32 buffer.

A piece is a block of one span's queries against a range of its keys. Long contexts are split into ranges, whose partial
results a second kernel puts together in order. How a span is cut depends on the span alone, so its result
does not depend on its neighbours. Knows no tensors of the model and imports no triton.

Spans are ragged block tables and slots, padded with empty spans where a plan is reserved. Slots follow
from the block tables, so nothing is read from the device; only for a reserved plan, whose slots are on the host, it is
looked up which tokens are not written. FlashInfer's plans begin with the same spans.

The buffer, in this order: number of pieces by launch | slot by token | (first partial, step, number of partials) by
token, for each shape | pieces by launch | block tables, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_server.backends.cuda.kernel_shapes import next_power
from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, Reach, Reserved
from loraplex_server.layers.transfer import host_ints

Ints = npt.NDArray[np.int64]

# The integers of a piece: first token, number of queries, position of the first, first key, end of the keys, start of
# the block table, first partial or -1 for a result that is complete, unused.
PIECE_INTS = 8
NO_PIECES: Ints = np.zeros((0, PIECE_INTS), np.int64)
PARTIAL_INTS = 3
# Key ranges begin at multiples of this; tiles of keys are as large at most.
KEY_ALIGN = 64
MIN_ROWS, MAX_ROWS = 16, 128  # the least is what a tensor core takes
ROW_BYTES = 32 << 10  # of a block of queries
# A range has at least this many keys, and this many per row of the block: partial results cost little beside the keys.
MIN_SPLIT_KEYS, SPLIT_KEYS_PER_ROW = 128, 8
# Pieces that a span is cut into at most in order to fill a GPU.
MAX_SPLIT_PIECES = 64
# Chunks of prompts behind long contexts that a reserved plan has room for.
MAX_SPLIT_CHUNKS = 2


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of a step. Empty ones have no context."""

    query_lens: Ints  # [num_spans]
    context_lens: Ints  # [num_spans]
    first_tokens: Ints  # [num_spans]
    table_starts: Ints  # [num_spans] in the concatenated block tables
    tables: Ints  # the blocks of all spans, one span after the other
    slots: Ints  # [num_tokens]; -1: nowhere

    @property
    def starts(self) -> Ints:
        """Position of each span's first query."""
        return self.context_lens - self.query_lens


def read_spans(batch: AttentionBatch, reserved: Reserved | None = None) -> Spans:
    """The spans of a step. With `reserved`, padded with empty spans; raises ValueError where the step does not fit into
    it."""
    # Tokens that are in the cache already; what is on the device names none.
    is_kept = batch.slots.numpy() < 0 if reserved is not None and batch.slots.device.type == "cpu" else None
    query_lens, context_lens = batch.query_lens, batch.context_lens
    num_blocks = -(-context_lens // batch.block_size)  # [num_spans]
    places = np.arange(batch.block_tables.shape[1])
    tables = batch.block_tables[places < num_blocks[:, None]]
    table_starts = np.cumsum(num_blocks) - num_blocks
    if reserved is not None:
        empty_lens = _empty_lens(query_lens, num_blocks, reserved)
        query_lens = np.concatenate([query_lens, empty_lens])
        context_lens = np.concatenate([context_lens, np.zeros_like(empty_lens)])
        table_starts = np.concatenate([table_starts, np.zeros_like(empty_lens)])
    first_tokens = np.cumsum(query_lens) - query_lens
    num_tokens = int(query_lens.sum())
    owners = np.repeat(np.arange(len(query_lens)), query_lens)  # [num_tokens] span of each token
    positions = (context_lens - query_lens - first_tokens)[owners] + np.arange(num_tokens)
    slots = np.full(num_tokens, -1, np.int64)
    is_real = context_lens[owners] > 0
    positions, at = positions[is_real], table_starts[owners[is_real]]
    slots[is_real] = tables[at + positions // batch.block_size] * batch.block_size + positions % batch.block_size
    if is_kept is not None:
        slots[: len(is_kept)][is_kept] = -1
    return Spans(query_lens, context_lens, first_tokens, table_starts, tables, slots)


def _empty_lens(query_lens: Ints, num_blocks: Ints, reserved: Reserved) -> Ints:
    """Query lengths of the empty spans that a step is padded with; a ragged one has one of them at most. Raises
    ValueError where the step does not fit."""
    num_spans = reserved.num_spans - len(query_lens)
    num_tokens = reserved.num_tokens - int(query_lens.sum())
    has_right_lens = reserved.is_ragged or (query_lens == reserved.query_len).all()
    if num_spans < 0 or num_tokens < 0 or not has_right_lens or (num_blocks > reserved.max_blocks).any():
        raise ValueError(
            f"{len(query_lens)} spans of up to {query_lens.max(initial=0)} tokens and {num_blocks.max(initial=0)} "
            f"blocks do not fit into {reserved}"
        )
    if reserved.is_ragged:
        return np.full(min(1, num_tokens), num_tokens)
    return np.full(num_spans, reserved.query_len)


def no_spans(block_size: int) -> AttentionBatch:
    """An empty step."""
    none = np.zeros(0, np.int64)
    return AttentionBatch(none, none, np.zeros((0, 1), np.int64), block_size, torch.empty(0, dtype=torch.int64))


def host_copy(values: Ints, device: torch.device) -> Tensor:
    """`values` in host memory from which a copy to `device` is asynchronous."""
    host = host_ints(len(values), device)
    host.numpy()[:] = values
    return host


# --- pieces -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of an attention layer that decide how spans are cut."""

    reach: Reach
    num_groups: int
    max_rows: int  # of a block: queries times the query heads of one KV head


@dataclass(frozen=True, slots=True)
class Launch:
    """Pieces with blocks of one size."""

    block_rows: int
    count_at: int
    pieces_at: int
    max_pieces: int


@dataclass(frozen=True, slots=True)
class Work:
    """The launches of the layers of one shape."""

    launches: tuple[Launch, ...]
    partials_at: int
    num_partials: int  # 0: no result is put together from parts


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """A step on the device. Offsets count int32 values of `buffer`."""

    buffer: Tensor  # int32
    num_tokens: int
    block_size: int
    dtype: torch.dtype
    slots_at: int
    tables_at: int
    works: dict[Shape, Work]
    reserved: Reserved | None = None

    @property
    def slots(self) -> Tensor:
        """The places [num_tokens] where keys and values go; -1: nowhere."""
        return self.buffer[self.slots_at : self.slots_at + self.num_tokens]


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of spans into pieces for layers of one shape."""

    pieces: dict[int, Ints]  # [num_pieces, PIECE_INTS] by rows of a block
    partials: Ints  # [num_tokens, PARTIAL_INTS]
    num_partials: int


def shape_of(spec: AttentionSpec, dtype: torch.dtype) -> Shape:
    """The shape of a layer. Blocks are as tall as registers allow; float32, which tensor cores do not compute, needs
    more of them."""
    row_bytes = max(spec.k_dim, spec.v_dim) * dtype.itemsize
    fitting = ROW_BYTES // (row_bytes if dtype.itemsize == 2 else 2 * row_bytes)
    max_rows = min(MAX_ROWS, max(MIN_ROWS, 1 << max(0, fitting.bit_length() - 1)))
    return Shape(spec.reach, spec.num_groups, max(max_rows, next_power(spec.num_groups)))


def build_plan(batch: AttentionBatch, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> KernelPlan:
    """A plan for one step."""
    spans = read_spans(batch)
    cuts = {shape: cut_spans(spans, shape) for shape in shapes}
    sizes = {shape: {rows: len(found) for rows, found in cut.pieces.items()} for shape, cut in cuts.items()}
    partials = {shape: cut.num_partials for shape, cut in cuts.items()}
    plan = _lay_out(sizes, partials, len(spans.slots), batch.block_size, dtype)
    host = _fill(plan, spans, cuts, device)
    return replace(plan, buffer=host.to(device, non_blocking=True))


def reserve_plan(
    reserved: Reserved, block_size: int, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device
) -> KernelPlan:
    """A plan for steps of up to `reserved.num_spans` spans, all of them empty."""
    room = _ragged_room if reserved.is_ragged else _uniform_room
    sizes: dict[Shape, dict[int, int]] = {}
    partials: dict[Shape, int] = {}
    for shape in shapes:
        sizes[shape], partials[shape] = room(reserved, shape, reserved.max_blocks * block_size)
    plan = _lay_out(sizes, partials, reserved.num_tokens, block_size, dtype)
    buffer = torch.zeros(plan.tables_at + reserved.num_spans * reserved.max_blocks, dtype=torch.int32, device=device)
    plan = replace(plan, buffer=buffer, reserved=reserved)
    refill_plan(plan, no_spans(block_size))
    return plan


def _uniform_room(reserved: Reserved, shape: Shape, num_keys: int) -> tuple[dict[int, int], int]:
    """The most pieces by rows, and the most partial results, of spans of one length before up to `num_keys` keys."""
    rows = int(_block_rows(np.array([reserved.query_len]), shape)[0])
    num_blocks = -(-reserved.query_len // (rows // shape.num_groups))
    num_splits = min(_most_splits(rows, num_keys), max(1, MAX_SPLIT_PIECES // num_blocks))
    num_partials = reserved.num_tokens * num_splits if num_splits > 1 else 0
    return {rows: reserved.num_spans * num_blocks * num_splits}, num_partials


def _ragged_room(reserved: Reserved, shape: Shape, num_keys: int) -> tuple[dict[int, int], int]:
    """The most pieces by rows, and room for partial results, of ragged spans before up to `num_keys` keys. Partial
    results are large, and few steps have many: there is room for those of all spans as decode steps, and of
    MAX_SPLIT_CHUNKS chunks of prompts."""
    num_spans, num_tokens = reserved.num_spans, reserved.num_tokens
    rows, tallest = (int(rows) for rows in _block_rows(np.array([1, num_tokens]), shape))
    num_partials = MAX_SPLIT_PIECES * (num_spans + MAX_SPLIT_CHUNKS * (tallest // shape.num_groups))
    most_splits = min(_most_splits(rows, num_keys), MAX_SPLIT_PIECES)
    num_partials = min(num_partials, num_tokens * most_splits) if most_splits > 1 else 0
    sizes: dict[int, int] = {}
    least_len = 1  # of a span whose blocks have so many rows
    while rows <= tallest:
        most_spans = min(num_spans, num_tokens // least_len)
        num_blocks = 1 + most_spans  # the first: of the span that is padding
        if rows == shape.max_rows:
            num_blocks += num_tokens // (rows // shape.num_groups)
        num_splits = min(_most_splits(rows, num_keys), MAX_SPLIT_PIECES)
        sizes[rows] = min(num_blocks * num_splits, num_blocks + most_spans * MAX_SPLIT_PIECES)
        least_len = rows // shape.num_groups + 1
        rows *= 2
    return sizes, num_partials


def _most_splits(block_rows: int, num_keys: int) -> int:
    return int(-(-num_keys // _min_split(np.array([block_rows]))[0]))


def refill_plan(plan: KernelPlan, batch: AttentionBatch) -> None:
    """Puts a step into a reserved plan. Raises ValueError when it does not fit."""
    reserved = plan.reserved
    assert reserved is not None
    spans = read_spans(batch, reserved)
    cuts = {shape: cut_spans(spans, shape) for shape in plan.works}
    for shape, work in plan.works.items():
        if cuts[shape].num_partials > work.num_partials:
            raise ValueError(f"{cuts[shape].num_partials} partial results do not fit into {work.num_partials}")
    host = _fill(plan, spans, cuts, plan.buffer.device)
    plan.buffer[: len(host)].copy_(host, non_blocking=True)


# --- cutting ----------------------------------------------------------------------------------------------------------


def cut_spans(spans: Spans, shape: Shape) -> Cut:
    """The pieces of all spans, for layers of one shape."""
    lens, ends = spans.query_lens, spans.context_lens
    block_rows = _block_rows(lens, shape)
    block_queries = block_rows // shape.num_groups
    num_blocks = -(-lens // block_queries)
    lows = _first_key(spans.starts, shape)
    split_keys = _split_keys(num_blocks, lows, ends, _min_split(block_rows))
    num_splits = _num_splits(lows, ends, split_keys)
    num_partials = np.where(num_splits > 1, num_splits * lens, 0)
    first_partials = np.cumsum(num_partials) - num_partials

    counts = num_blocks * num_splits
    owners = np.repeat(np.arange(len(lens)), counts)  # [num_pieces] span of each piece
    place = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    query = place // num_splits[owners] * block_queries[owners]  # first query of the block
    split = place % num_splits[owners]
    num_queries = np.minimum(block_queries[owners], lens[owners] - query)
    position = spans.starts[owners] + query
    begin = (lows[owners] // split_keys[owners] + split) * split_keys[owners]
    pieces = np.zeros((len(owners), PIECE_INTS), np.int64)
    pieces[:, 0] = spans.first_tokens[owners] + query
    pieces[:, 1] = num_queries
    pieces[:, 2] = position
    pieces[:, 3] = np.maximum(begin, _first_key(position, shape))
    pieces[:, 4] = np.minimum(begin + split_keys[owners], position + num_queries)
    pieces[:, 5] = spans.table_starts[owners]
    pieces[:, 6] = np.where(num_splits[owners] > 1, first_partials[owners] + split * lens[owners] + query, -1)

    token_owners = np.repeat(np.arange(len(lens)), lens)
    partials = np.zeros((len(token_owners), PARTIAL_INTS), np.int64)
    partials[:, 0] = (first_partials - spans.first_tokens)[token_owners] + np.arange(len(token_owners))
    partials[:, 1] = lens[token_owners]
    partials[:, 2] = np.where(num_splits > 1, num_splits, 0)[token_owners]
    rows_of_pieces = block_rows[owners]
    by_rows = {int(rows): pieces[rows_of_pieces == rows] for rows in np.unique(block_rows)}
    return Cut(by_rows, partials, int(num_partials.sum()))


def _block_rows(query_lens: Ints, shape: Shape) -> Ints:
    """Rows of a span's blocks: a power of two, no larger than the span needs."""
    wanted = np.maximum(query_lens * shape.num_groups, MIN_ROWS)
    return np.minimum(1 << np.ceil(np.log2(wanted)).astype(np.int64), shape.max_rows)


def _first_key(positions: Ints, shape: Shape) -> Ints:
    """The first key that a query at a position can see, or one before it."""
    return shape.reach.first_keys(positions) // KEY_ALIGN * KEY_ALIGN


def _min_split(block_rows: Ints) -> Ints:
    return np.maximum(MIN_SPLIT_KEYS, SPLIT_KEYS_PER_ROW * block_rows)


def _num_splits(lows: Ints, ends: Ints, split_keys: Ints) -> Ints:
    return np.maximum(-(-ends // split_keys) - lows // split_keys, 1)


def _split_keys(num_blocks: Ints, lows: Ints, ends: Ints, split_keys: Ints) -> Ints:
    """Keys of a range, by span: doubled until the span has few enough pieces, or is whole."""
    while True:
        num_splits = _num_splits(lows, ends, split_keys)
        is_more = (num_splits > 1) & (num_blocks * num_splits > MAX_SPLIT_PIECES)
        if not is_more.any():
            return split_keys
        split_keys = np.where(is_more, 2 * split_keys, split_keys)


# --- the buffer -------------------------------------------------------------------------------------------------------


def _lay_out(
    sizes: dict[Shape, dict[int, int]], partials: dict[Shape, int], num_tokens: int, block_size: int, dtype: torch.dtype
) -> KernelPlan:
    """The layout of all parts, with an empty buffer. `sizes`: pieces that there is room for, by shape and rows."""
    slots_at = sum(len(by_rows) for by_rows in sizes.values())
    partials_at = slots_at + num_tokens
    pieces_at = partials_at + PARTIAL_INTS * num_tokens * len(sizes)
    works: dict[Shape, Work] = {}
    count_at = 0
    for shape, by_rows in sizes.items():
        launches: list[Launch] = []
        for rows, max_pieces in by_rows.items():
            launches.append(Launch(rows, count_at, pieces_at, max_pieces))
            count_at += 1
            pieces_at += PIECE_INTS * max_pieces
        works[shape] = Work(tuple(launches), partials_at, partials[shape])
        partials_at += PARTIAL_INTS * num_tokens
    return KernelPlan(torch.empty(0, dtype=torch.int32), num_tokens, block_size, dtype, slots_at, pieces_at, works)


def _fill(plan: KernelPlan, spans: Spans, cuts: dict[Shape, Cut], device: torch.device) -> Tensor:
    """The buffer's content on the host; what lies between the sections is never read."""
    host = host_ints(plan.tables_at + len(spans.tables), device)
    view: npt.NDArray[np.int32] = host.numpy()
    view[plan.slots_at : plan.slots_at + plan.num_tokens] = spans.slots
    view[plan.tables_at :] = spans.tables
    for shape, work in plan.works.items():
        cut = cuts[shape]
        view[work.partials_at : work.partials_at + cut.partials.size] = cut.partials.ravel()
        assert cut.pieces.keys() <= {launch.block_rows for launch in work.launches}
        for launch in work.launches:
            pieces = cut.pieces.get(launch.block_rows, NO_PIECES)
            assert len(pieces) <= launch.max_pieces
            view[launch.count_at] = len(pieces)
            view[launch.pieces_at : launch.pieces_at + pieces.size] = pieces.ravel()
    return host
