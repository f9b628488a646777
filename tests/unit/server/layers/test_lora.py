"""Segments that are joined and checked, and tables of dense weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex_server.layers.lora import DenseTable, DenseWeight, Segment, check_segments, join_neighbours

NUM_ROWS = 12


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    start = draw(st.integers(0, NUM_ROWS))
    return Segment(
        start, draw(st.integers(start, NUM_ROWS)), draw(st.integers(0, 2)), draw(st.sampled_from([1.0, 0.5]))
    )


def terms(found: list[Segment]) -> Counter[tuple[int, int, float]]:
    return Counter((row, s.adapter_slot, s.weight) for s in found for row in range(s.start, s.end))


@given(st.lists(segments(), max_size=8))
def test_joining_keeps_every_term(found: list[Segment]) -> None:
    joined = join_neighbours(found)
    assert terms(joined) == terms(found)
    assert all(s.start < s.end for s in joined)
    assert joined == sorted(joined, key=lambda s: s.start)


def test_neighbours_become_one() -> None:
    mixture = [Segment(0, 2, 0, 0.5), Segment(0, 2, 1, 0.5), Segment(2, 4, 0, 0.5), Segment(2, 4, 1, 0.5)]
    assert join_neighbours(mixture) == [Segment(0, 4, 0, 0.5), Segment(0, 4, 1, 0.5)]
    apart = [Segment(0, 1, 0), Segment(1, 2, 1), Segment(2, 3, 1, 0.5), Segment(4, 5, 1, 0.5)]
    assert join_neighbours(apart) == apart


def test_the_message_names_the_segment_and_the_limit() -> None:
    with pytest.raises(ValueError, match=r"start=3, end=9, .* is not inside the step's 8 rows"):
        check_segments([Segment(3, 9, 0)], 8, 1)
    with pytest.raises(ValueError, match=r"slot=4.* outside 0\.\.3"):
        check_segments([Segment(3, 4, 4)], 8, 4)


def test_a_table_refuses_another_width() -> None:
    with pytest.raises(ValueError, match="33 inputs"):
        DenseTable(32).set(0, DenseWeight(torch.zeros(4, 33), None))
