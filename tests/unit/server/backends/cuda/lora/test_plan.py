"""The LoRA kernels' view of a step, and their choice. Needs no triton."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from loraplex_server.backends.cuda.lora.plan import (
    MANY_ROWS,
    MAX_TERMS,
    ONE_ROW,
    SOME_ROWS,
    SPARE_BLOCKS,
    KernelPlan,
    build_plan,
    choose_block_rows,
    choose_dense_launch,
    choose_dense_rows,
    choose_launch,
    refill_plan,
    reserve_plan,
)
from loraplex_server.layers.lora import Segment

CPU = torch.device("cpu")
Found = Counter[tuple[int, int, float]]


def plan_of(segments: list[Segment], block_rows: int = 16) -> KernelPlan:
    return build_plan(segments, 9, CPU, lambda _num_rows: block_rows)


def found_in(plan: KernelPlan) -> Found:
    """Every row with each of its terms, read as a kernel does."""
    found: Found = Counter()
    seen: list[int] = []
    for first, num_rows, first_term, num_terms, first_row, first_slot in plan.blocks.tolist():
        assert 0 <= num_rows <= plan.block_rows
        rows = plan.rows[first : first + num_rows].tolist()
        assert len(rows) == num_rows
        assert num_rows == 0 or (first_row, first_slot) == (rows[0], plan.term_slots[first_term])
        seen += rows
        assert num_rows == 0 or 0 < num_terms <= plan.max_terms
        terms = slice(first_term, first_term + num_terms)
        for slot, weight in zip(plan.term_slots[terms].tolist(), plan.term_weights[terms].tolist(), strict=True):
            found.update((row, slot, weight) for row in rows)
    assert len(set(seen)) == len(seen), "a row in two blocks"
    return found


def wanted(segments: list[Segment]) -> Found:
    return Counter((row, s.adapter_slot, s.weight) for s in segments for row in range(s.start, s.end))


def random_step(chooser: random.Random, num_rows: int, max_terms: int = 12) -> list[Segment]:
    """Segments that overlap at will, but no more than `max_terms` on a row."""
    segments: list[Segment] = []
    for _ in range(chooser.randrange(1, 12)):
        start = chooser.randrange(num_rows)
        end = min(num_rows, start + chooser.choice([0, 1, 1, 3, 70]))
        new = Segment(start, end, chooser.randrange(4), chooser.choice([1.0, 0.25]))
        load = Counter(row for s in [*segments, new] for row in range(s.start, s.end))
        if max(load.values(), default=0) <= max_terms:
            segments.append(new)
    return segments


@pytest.mark.parametrize("seed", range(30))
def test_blocks_hold_every_term_once_and_every_row_in_one_place(seed: int) -> None:
    chooser = random.Random(seed)
    segments = random_step(chooser, 200)
    plan = plan_of(segments, chooser.choice([4, 16, 64]))
    assert found_in(plan) == wanted(segments)
    assert plan.slots == tuple(sorted({s.adapter_slot for s in segments if s.end > s.start}))
    assert plan.num_positions == len({row for s in segments for row in range(s.start, s.end)})


def test_scattered_rows_of_one_adapter_share_a_block() -> None:
    plan = plan_of([Segment(0, 1, 5), Segment(1, 2, 3), Segment(4, 6, 5)])
    assert plan.blocks.tolist() == [[0, 1, 0, 1, 1, 3], [1, 3, 1, 1, 0, 5]]
    assert plan.rows.tolist() == [1, 0, 4, 5]
    assert plan.term_slots.tolist() == [3, 5]
    assert plan.slots == (3, 5)


def test_rows_with_the_same_mixture_share_a_block() -> None:
    segments = [Segment(0, 4, 1, 0.5), Segment(0, 4, 0, 0.5), Segment(4, 5, 1), Segment(7, 8, 0, 0.5)]
    plan = plan_of([*segments, Segment(7, 8, 1, 0.5)])
    assert plan.rows.tolist() == [0, 1, 2, 3, 7, 4]
    assert plan.blocks.tolist() == [[0, 5, 0, 2, 0, 0], [5, 1, 2, 1, 4, 1]]
    assert plan.term_slots.tolist() == [0, 1, 1]
    assert plan.term_weights.tolist() == [0.5, 0.5, 1.0]


def test_long_groups_are_cut() -> None:
    asked: list[int] = []

    def block_rows(num_rows: int) -> int:
        asked.append(num_rows)
        return 64

    plan = build_plan([Segment(0, 65, 0), Segment(65, 67, 1)], 2, CPU, block_rows)
    assert plan.blocks[:, :2].tolist() == [[0, 64], [64, 1], [65, 2]]
    assert asked == [65]


def test_no_segment_is_no_block() -> None:
    plan = plan_of([Segment(3, 3, 0)])
    assert (plan.num_blocks, plan.num_positions, plan.slots) == (0, 0, ())


def test_parts_begin_where_wide_loads_want_them() -> None:
    """Parts that begin elsewhere would make Triton compile the kernels once more, in the middle of serving."""
    for num_rows in range(1, 9):
        plan = plan_of([Segment(i, i + 1, i % 3) for i in range(num_rows)])
        start = plan.words.data_ptr()
        for part in (plan.blocks, plan.rows, plan.term_slots, plan.term_weights):
            assert (part.data_ptr() - start) % 16 == 0


# --- reserved ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_reserved_plan_is_refilled_in_place(seed: int) -> None:
    chooser = random.Random(seed)
    plan = reserve_plan(60, 4, CPU, chooser.choice([4, 16]))
    assert found_in(plan) == Counter()
    address, shape = plan.words.data_ptr(), plan.blocks.shape
    for _ in range(6):
        segments = random_step(chooser, 60, MAX_TERMS)
        for _ in range(chooser.choice([1, 2])):
            refill_plan(plan, segments)
        assert found_in(plan) == wanted(segments)
    refill_plan(plan, [])
    assert found_in(plan) == Counter()
    assert (plan.words.data_ptr(), plan.blocks.shape) == (address, shape)


def test_a_step_like_the_last_is_not_copied_again() -> None:
    plan = reserve_plan(8, 4, CPU, 4)
    refill_plan(plan, [Segment(0, 3, 1), Segment(3, 4, 2)])
    plan.words.fill_(7)
    refill_plan(plan, [Segment(0, 3, 1), Segment(3, 4, 2)])
    assert (plan.words == 7).all()
    refill_plan(plan, [Segment(0, 3, 1), Segment(3, 4, 2, 0.5)])
    assert found_in(plan) == wanted([Segment(0, 3, 1), Segment(3, 4, 2, 0.5)])


@pytest.mark.parametrize("block_rows", [4, 16, 64])
@pytest.mark.parametrize("num_slots", [1, 3, 100])
def test_every_composition_of_adapters_fits(block_rows: int, num_slots: int) -> None:
    num_rows = 50
    plan = reserve_plan(num_rows, num_slots, CPU, block_rows)
    assert plan.num_blocks <= num_rows
    chooser = random.Random(num_slots)
    for popularity in (1, 2, num_slots):
        segments = [Segment(row, row + 1, chooser.randrange(min(popularity, num_slots))) for row in range(num_rows)]
        refill_plan(plan, segments)
        assert found_in(plan) == wanted(segments)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    plan = reserve_plan(40, 2, CPU, 16)
    refill_plan(plan, [Segment(0, 3, 1)])
    before = plan.words.clone()
    too_many_sets = [Segment(row, row + 1, 0, 1 / (row + 1)) for row in range(2 + 2 + SPARE_BLOCKS + 1)]
    for segments in (too_many_sets, [Segment(0, 1, 0, 0.1 * i) for i in range(MAX_TERMS + 1)]):
        with pytest.raises(ValueError, match="do not fit"):
            refill_plan(plan, segments)
        assert torch.equal(plan.words, before)


WIDTHS = (1, 48, 512, 576, 1000, 2048, 4096, 14336, 53248)


@pytest.mark.parametrize("block_rows", [ONE_ROW, SOME_ROWS, MANY_ROWS])
def test_every_launch_covers_all_inputs_and_fits_the_hardware(block_rows: int) -> None:
    for in_features, out_features, max_rank, num_blocks, element_bytes in itertools.product(
        WIDTHS, WIDTHS, (1, 13, 16, 64, 256, 4096), (1, 8, 500), (2, 4)
    ):
        launch = choose_launch(block_rows, num_blocks, in_features, out_features, max_rank, element_bytes)
        assert launch.num_splits * launch.num_steps * launch.block_in >= in_features
        assert launch.num_lanes in (1, 4)
        assert (launch.variant == "tiles") == (block_rows > ONE_ROW)
        sizes = (launch.block_in, launch.block_rank, launch.block_out)
        assert all(size & (size - 1) == 0 for size in sizes)  # Triton's own rule
        if launch.variant == "tiles":
            assert min(sizes) >= 16  # a tensor core's
        if launch.variant == "fused":
            assert launch.num_splits == 1


def test_decode_gets_small_blocks_and_prompts_large_ones() -> None:
    assert [choose_block_rows(n) for n in (0, 1, 64, 65, 512, 513, 8192)] == [1, 1, 1, 16, 16, 64, 64]
    assert [choose_dense_rows(n) for n in (1, 16, 17)] == [16, 16, 64]


def test_splits_say_nothing_of_the_step() -> None:
    """A row's sum is taken in the same order whatever else is in the step."""
    for block_rows in (ONE_ROW, SOME_ROWS):
        launches = {choose_launch(block_rows, n, 4096, 4096, 256, 2)._replace(num_lanes=1) for n in (1, 7, 64, 300)}
        assert len(launches) == 1


def test_ranks_are_shared_by_programs_where_these_are_few() -> None:
    assert [choose_launch(ONE_ROW, n, 4096, 4096, 256, 2).num_lanes for n in (1, 16, 17, 64)] == [4, 4, 1, 1]
    assert choose_launch(ONE_ROW, 1, 4096, 4096, 16, 2).num_lanes == 1


def test_one_launch_where_a_is_small_and_programs_are_few() -> None:
    assert choose_launch(ONE_ROW, 4, 1024, 1024, 16, 2).variant == "fused"
    assert choose_launch(ONE_ROW, 64, 1024, 8192, 16, 2).variant == "rows"  # A would be read too often
    assert choose_launch(ONE_ROW, 4, 4096, 4096, 16, 2).variant == "rows"  # A is too large for one program
    assert choose_launch(ONE_ROW, 4, 1024, 1024, 256, 2).variant == "rows"


def test_a_variant_can_be_asked_for() -> None:
    assert choose_block_rows(1000, "rows") == ONE_ROW
    assert choose_block_rows(1, "fused") == ONE_ROW
    assert choose_block_rows(1, "tiles") == SOME_ROWS
    for variant in ("rows", "fused"):
        assert choose_launch(ONE_ROW, 4, 1024, 1024, 16, 2, variant).variant == variant


def test_dense_pieces_are_as_many_bytes_in_every_dtype() -> None:
    for block_rows in (SOME_ROWS, MANY_ROWS):
        launches = [choose_dense_launch(block_rows, element_bytes) for element_bytes in (2, 4)]
        assert launches[0].block_in == 2 * launches[1].block_in >= 32
