"""Spans cut into pieces for the attention kernels.

Needs no triton.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from support.attention_cases import CPU, make_problem, spec_of

from loraplex_server.backends.cuda.attention.plan import (
    KEY_ALIGN,
    MAX_SPLIT_PIECES,
    Shape,
    build_plan,
    cut_spans,
    read_spans,
    refill_plan,
    reserve_plan,
    shape_of,
)
from loraplex_server.layers.attention import AttentionBatch, Reach, Reserved


def batch_of(spans: list[tuple[int, int]], block_size: int = 16) -> AttentionBatch:
    lens = np.array([new for _, new in spans], dtype=np.int64)
    contexts = np.array([past + new for past, new in spans], dtype=np.int64)
    max_blocks = int(contexts.max()) // block_size + 1
    tables = np.arange(len(spans) * max_blocks).reshape(len(spans), max_blocks)
    return AttentionBatch(lens, contexts, tables, block_size, torch.empty(0))


def first_seen(reach: Reach, position: int) -> int:
    if reach.chunk is not None:
        return position // reach.chunk * reach.chunk
    return 0 if reach.window is None else max(0, position - reach.window + 1)


@pytest.mark.parametrize("seed", range(30))
def test_every_query_meets_every_key_that_it_sees_once(seed: int) -> None:
    chooser = random.Random(seed)
    spans = [
        (chooser.choice([0, 3, 127, 128, 500, 9000]), chooser.choice([1, 1, 2, 5, 40, 300]))
        for _ in range(chooser.randrange(1, 6))
    ]
    reach = Reach(*chooser.choice([(None, None), (1, None), (100, None), (4096, None), (None, 70), (None, 4096)]))
    shape = Shape(reach, chooser.choice([1, 3, 4, 8]), chooser.choice([16, 128]))
    cut = cut_spans(read_spans(batch_of(spans)), shape)
    seen: dict[int, list[tuple[int, int]]] = {}  # token -> ranges of keys
    parts: dict[int, int] = {}
    for rows, pieces in cut.pieces.items():
        for token, num_queries, position, start, end, _, partial, _ in pieces.tolist():
            assert 0 < num_queries * shape.num_groups <= rows <= shape.max_rows
            assert start % KEY_ALIGN == 0
            if reach != Reach() and start < end:
                assert start > first_seen(reach, position) - KEY_ALIGN, "keys are read that no query sees"
            for i in range(num_queries):
                first = first_seen(reach, position + i)
                seen.setdefault(token + i, []).append((max(start, first), min(end, position + i + 1)))
                parts[token + i] = parts.get(token + i, 0) + (partial >= 0)
    token = 0
    for past, new in spans:
        for i in range(new):
            first = first_seen(reach, past + i)
            ranges = sorted(one for one in seen.pop(token) if one[0] < one[1])
            assert ranges[0][0] == first
            assert ranges[-1][1] == past + i + 1
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
            assert parts[token] == cut.partials[token, 2] != 1
            token += 1
    assert not seen


@pytest.mark.parametrize("seed", range(5))
def test_partial_results_have_places_of_their_own(seed: int) -> None:
    chooser = random.Random(seed)
    spans = [(chooser.choice([0, 300, 5000]), chooser.choice([1, 4, 60, 200])) for _ in range(6)]
    cut = cut_spans(read_spans(batch_of(spans)), shape_of(spec_of(), torch.float32))
    written = [
        partial + i
        for pieces in cut.pieces.values()
        for _, num_queries, *_, partial, _ in pieces.tolist()
        for i in range(num_queries if partial >= 0 else 0)
    ]
    read = [first + step * i for first, step, count in cut.partials.tolist() for i in range(count)]
    assert sorted(written) == sorted(read) == list(range(cut.num_partials))


def test_a_span_is_cut_the_same_in_any_batch() -> None:
    shape = shape_of(spec_of(window=200), torch.bfloat16)
    spans = [(3000, 1), (100, 3), (700, 90), (0, 5)]
    together = cut_spans(read_spans(batch_of(spans)), shape)
    for idx, span in enumerate(spans):
        alone = cut_spans(read_spans(batch_of([span])), shape)
        ((rows, pieces),) = alone.pieces.items()
        first_token = sum(new for _, new in spans[:idx])
        mine = [piece for piece in together.pieces[rows].tolist() if first_token <= piece[0] < first_token + span[1]]
        assert [piece[1:5] for piece in mine] == pieces[:, 1:5].tolist()


def test_long_contexts_fill_the_gpu_and_no_more() -> None:
    shape = shape_of(spec_of(num_heads=32, num_kv_heads=8, k_dim=128, v_dim=128), torch.bfloat16)
    for past in (100, 1000, 10_000, 131_071):
        cut = cut_spans(read_spans(batch_of([(past, 1)])), shape)
        assert list(cut.pieces) == [16]
        assert min(past // 256, MAX_SPLIT_PIECES // 2) <= len(cut.pieces[16]) <= MAX_SPLIT_PIECES
    assert cut_spans(read_spans(batch_of([(100, 1)])), shape).num_partials == 0
    prompt = cut_spans(read_spans(batch_of([(60_000, 4096)])), shape)
    assert prompt.num_partials == 0, "a long chunk has blocks enough"


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_slots_are_those_of_the_block_tables(block_size: int) -> None:
    problem = make_problem([(5, 1), (0, 13), (40, 3)], spec_of(), torch.float32, block_size=block_size)
    plan = build_plan(problem.batch, [shape_of(problem.spec, torch.float32)], torch.float32, CPU)
    assert plan.slots.tolist() == problem.batch.slots.tolist()


@pytest.mark.parametrize("query_len", [1, 5, 60])
@pytest.mark.parametrize("window", [None, 1000])
def test_what_is_reserved_holds_the_worst_step(query_len: int, window: int | None) -> None:
    max_blocks, block_size = 600, 16
    shape = Shape(Reach(window), 4, 128)
    plan = reserve_plan(Reserved(2, query_len, max_blocks=max_blocks), block_size, [shape], torch.bfloat16, CPU)
    (launch,) = plan.works[shape].launches
    most = 0
    for past in range(0, max_blocks * block_size - query_len, 37):
        cut = cut_spans(read_spans(batch_of([(past, query_len)] * 2)), shape)
        assert list(cut.pieces) == [launch.block_rows]
        assert cut.num_partials <= plan.works[shape].num_partials
        most = max(most, len(cut.pieces[launch.block_rows]))
    assert most <= launch.max_pieces
    if window is None:
        assert most >= launch.max_pieces // 2, "far more is reserved than is ever needed"


@pytest.mark.parametrize(("num_groups", "max_rows"), [(1, 128), (4, 128), (4, 16), (20, 32)])
@pytest.mark.parametrize("window", [None, 1000])
def test_what_is_reserved_holds_ragged_steps(num_groups: int, max_rows: int, window: int | None) -> None:
    """Random steps of prompts, drafts and decoding, and the worst: all spans of one length behind long contexts. Only
    partial results may be more than there is room for."""
    max_blocks, block_size, num_spans, num_tokens = 300, 16, 9, 400
    shape = Shape(Reach(window), num_groups, max_rows)
    reserved = Reserved(num_spans, 1, num_tokens, max_blocks=max_blocks)
    plan = reserve_plan(reserved, block_size, [shape], torch.bfloat16, CPU)
    work = plan.works[shape]
    room = {launch.block_rows: launch.max_pieces for launch in work.launches}
    dice = random.Random(5)
    steps = [[length] * num_spans for length in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 44)]
    steps += [[1, 1, 1, 1, 1, 1, 1, 1, 392], [400], [1] * 8 + [33], [44] * 9]
    for _ in range(300):
        lens = [dice.choice((1, 1, 2, 5, 30, dice.randint(1, 300))) for _ in range(dice.randint(1, num_spans))]
        if sum(lens) <= num_tokens:
            steps.append(sorted(lens))
    refused = 0
    for lens in steps:
        most = max_blocks * block_size
        pasts = [dice.choice((0, dice.randint(0, most - n), most - n)) for n in lens]
        batch = batch_of(list(zip(pasts, lens, strict=True)))
        cut = cut_spans(read_spans(batch, reserved), shape)
        assert all(len(pieces) <= room[rows] for rows, pieces in cut.pieces.items())
        try:
            refill_plan(plan, batch)
        except ValueError:
            assert cut.num_partials > work.num_partials
            refused += 1
            continue
        words = plan.buffer.numpy()
        for launch in work.launches:
            pieces = cut.pieces.get(launch.block_rows, np.zeros((0, 8)))
            assert words[launch.count_at] == len(pieces)
            got = words[launch.pieces_at : launch.pieces_at + 8 * len(pieces)]
            assert got.tolist() == pieces.ravel().tolist()
    assert refused < len(steps) // 4


def test_ragged_padding_writes_nothing() -> None:
    batch = batch_of([(5, 1), (0, 20)])
    spans = read_spans(batch, Reserved(4, 1, 30, max_blocks=10))
    assert spans.query_lens.tolist() == [1, 20, 9]
    assert spans.context_lens.tolist() == [6, 20, 0]
    assert (spans.slots[21:] == -1).all()
    assert (spans.slots[:21] >= 0).all()
    full = read_spans(batch, Reserved(2, 1, 21, max_blocks=10))
    assert full.query_lens.tolist() == [1, 20]
    for too_small in (
        Reserved(1, 1, 30, max_blocks=10),
        Reserved(4, 1, 20, max_blocks=10),
        Reserved(4, 1, 30, max_blocks=1),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            read_spans(batch, too_small)
