"""The kernels' view of a step, before any kernel reads it. Needs no triton."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from loraplex_adapters.ops.base import Segment
from loraplex_adapters.ops.triton.plan import FEW_ROWS, MANY_ROWS, build_plan

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(20))
def test_blocks_hold_every_term_once_and_layers_no_row_twice(seed: int) -> None:
    chooser = random.Random(seed)
    segments: list[Segment] = []
    for _ in range(chooser.randrange(1, 12)):
        start = chooser.randrange(200)
        end = min(200, start + chooser.choice([0, 1, 1, 3, 70]))
        segments.append(Segment(start, end, chooser.randrange(4), chooser.choice([1.0, 0.25])))
    plan = build_plan(segments, CPU)
    found: Counter[tuple[int, int, float]] = Counter()
    for first_block, num_blocks in plan.layers:
        rows_of_layer: list[int] = []
        for first, num_rows, slot in plan.blocks[first_block : first_block + num_blocks].tolist():
            assert 0 < num_rows <= plan.block_rows
            rows = plan.rows[first : first + num_rows].tolist()
            weights = plan.weights[first : first + num_rows].tolist()
            found.update((row, slot, weight) for row, weight in zip(rows, weights, strict=True))
            rows_of_layer += rows
        assert len(set(rows_of_layer)) == len(rows_of_layer)
    assert found == Counter((row, s.slot, s.weight) for s in segments for row in range(s.start, s.end))
    assert sum(n for _, n in plan.layers) == plan.num_blocks == len(plan.blocks)
    assert plan.num_positions == len(plan.rows) == len(plan.weights)


def test_scattered_rows_of_one_adapter_share_a_block() -> None:
    plan = build_plan([Segment(0, 1, 5), Segment(1, 2, 3), Segment(4, 6, 5)], CPU)
    assert plan.blocks.tolist() == [[0, 1, 3], [1, 3, 5]]
    assert plan.rows.tolist() == [1, 0, 4, 5]
    assert plan.layers == ((0, 2),)
    assert plan.slots == (3, 5)


def test_a_mixture_takes_a_layer_per_adapter() -> None:
    plan = build_plan([Segment(0, 4, 0, 0.5), Segment(0, 4, 1, 0.5), Segment(4, 5, 1)], CPU)
    assert len(plan.layers) == 2


def test_decode_takes_small_blocks_and_prefill_large_ones() -> None:
    assert build_plan([Segment(i, i + 1, i) for i in range(9)], CPU).block_rows == FEW_ROWS
    assert build_plan([Segment(0, FEW_ROWS + 1, 0)], CPU).block_rows == MANY_ROWS
    assert build_plan([Segment(0, MANY_ROWS + 1, 0)], CPU).blocks.tolist() == [[0, MANY_ROWS, 0], [MANY_ROWS, 1, 0]]


def test_no_segment_is_no_block() -> None:
    plan = build_plan([Segment(3, 3, 0)], CPU)
    assert (plan.num_blocks, plan.num_positions, plan.layers, plan.slots) == (0, 0, (), ())
