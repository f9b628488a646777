"""Parts of a step by spans."""

from __future__ import annotations

import numpy as np
import torch

from loraplex_server.backends.cpu.step_parts import StepPart, split_step, take_rows
from loraplex_server.layers.attention import AttentionBatch
from loraplex_server.layers.lora import Segment


def batch() -> AttentionBatch:
    """Spans of 2, 3, 1 and 2 rows."""
    return AttentionBatch(
        query_lens=np.array([2, 3, 1, 2]),
        context_lens=np.array([2, 9, 5, 7]),
        block_tables=np.array([[0, 0], [1, 2], [3, 3], [4, 4]]),
        block_size=8,
        slots=torch.arange(100, 108),
    )


def split(*segments: Segment, apart: int = 9) -> tuple[StepPart | None, StepPart | None]:
    return split_step(batch(), segments, lambda segment: segment.adapter_slot == apart)


def test_spans_go_apart_whole() -> None:
    """A segment that is apart takes its spans along, of which it may have some rows only."""
    rest, apart = split(Segment(0, 2, 1), Segment(4, 6, 9), Segment(6, 8, 2))
    assert rest is not None
    assert apart is not None
    assert apart.rows.tolist() == [2, 3, 4, 5]
    assert apart.attention.query_lens.tolist() == [3, 1]
    assert apart.attention.context_lens.tolist() == [9, 5]
    assert apart.attention.block_tables.tolist() == [[1, 2], [3, 3]]
    assert apart.attention.slots.tolist() == [102, 103, 104, 105]
    assert apart.segments == (Segment(2, 4, 9),)
    assert rest.rows.tolist() == [0, 1, 6, 7]
    assert rest.segments == (Segment(0, 2, 1), Segment(2, 4, 2))


def test_a_segment_over_spans_of_both_parts() -> None:
    rest, apart = split(Segment(0, 8, 1, 0.5), Segment(2, 5, 9))
    assert rest is not None
    assert apart is not None
    assert rest.segments == (Segment(0, 5, 1, 0.5),)
    assert apart.segments == (Segment(0, 3, 1, 0.5), Segment(0, 3, 9))


def test_steps_of_one_part() -> None:
    rest, apart = split(Segment(0, 8, 1), Segment(3, 3, 9))
    assert rest is not None
    assert apart is None
    rest, apart = split(Segment(1, 8, 9))
    assert rest is None
    assert apart is not None
    assert apart.rows.tolist() == list(range(8))


def test_rows_of_arguments() -> None:
    rows = torch.tensor([1, 3])
    wide, flat = torch.arange(8).view(1, 4, 2), torch.arange(4)
    found = take_rows((wide, None, flat, torch.tensor(3.0), torch.zeros(1, 5), "x"), rows, 4)
    assert found[0].tolist() == [[[2, 3], [6, 7]]]
    assert found[1] is None
    assert found[2].tolist() == [1, 3]
    assert found[3].shape == ()
    assert found[4].shape == (1, 5)
    assert found[5] == "x"
