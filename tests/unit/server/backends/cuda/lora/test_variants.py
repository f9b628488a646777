"""Choice of LoRA kernel variants.

Needs no triton.
"""

from __future__ import annotations

import itertools

import pytest

from loraplex_server.backends.cuda.lora.variants import (
    FEW_ROWS,
    MANY_ROWS,
    ONE_ROW,
    SOME_ROWS,
    choose_block_rows,
    choose_dense_launch,
    choose_dense_rows,
    choose_launch,
)

WIDTHS = (1, 48, 512, 576, 1000, 2048, 4096, 14336, 53248)


@pytest.mark.parametrize("block_rows", [ONE_ROW, FEW_ROWS, SOME_ROWS, MANY_ROWS])
def test_every_launch_covers_all_inputs_and_fits_the_hardware(block_rows: int) -> None:
    for in_features, out_features, max_rank, num_blocks, element_bytes in itertools.product(
        WIDTHS, WIDTHS, (1, 13, 16, 64, 256, 4096), (1, 8, 500), (2, 4)
    ):
        launch = choose_launch(block_rows, num_blocks, in_features, out_features, max_rank, element_bytes)
        assert launch.num_splits * launch.num_steps * launch.block_in >= in_features
        assert launch.num_lanes in (1, 4)
        assert (launch.variant == "tiles") == (block_rows > FEW_ROWS)
        sizes = (launch.block_in, launch.block_rank, launch.block_out)
        assert all(size & (size - 1) == 0 for size in sizes)  # Triton's own rule
        if launch.variant == "tiles":
            assert min(sizes) >= 16  # a tensor core's
        if launch.variant == "fused":
            assert launch.num_splits == 1


def test_decode_gets_small_blocks_and_prompts_large_ones() -> None:
    assert [choose_block_rows(n) for n in (0, 1, 32, 33, 64, 65, 512, 513, 8192)] == [1, 1, 1, 4, 4, 16, 16, 64, 64]
    assert [choose_dense_rows(n) for n in (1, 16, 17)] == [16, 16, 64]


def test_splits_say_nothing_of_the_step() -> None:
    """A row's sum is taken in the same order whatever else is in the step."""
    for block_rows in (FEW_ROWS, SOME_ROWS):
        launches = {choose_launch(block_rows, n, 4096, 4096, 256, 2) for n in (1, 7, 64, 300)}
        assert len(launches) == 1


def test_one_launch_where_a_is_small_and_programs_are_few() -> None:
    assert choose_launch(FEW_ROWS, 4, 1024, 1024, 16, 2).variant == "fused"
    assert choose_launch(FEW_ROWS, 64, 1024, 8192, 16, 2).variant == "rows"  # A would be read too often
    assert choose_launch(FEW_ROWS, 4, 4096, 4096, 16, 2).variant == "rows"  # A is too large for one program
    assert choose_launch(FEW_ROWS, 4, 1024, 1024, 256, 2).variant == "rows"


def test_a_variant_can_be_asked_for() -> None:
    assert choose_block_rows(1000, "rows") == FEW_ROWS
    assert choose_block_rows(1, "fused") == ONE_ROW
    assert choose_block_rows(1, "tiles") == SOME_ROWS
    for variant in ("rows", "fused"):
        assert choose_launch(FEW_ROWS, 4, 1024, 1024, 16, 2, variant).variant == variant


def test_dense_pieces_are_as_many_bytes_in_every_dtype() -> None:
    for block_rows in (SOME_ROWS, MANY_ROWS):
        launches = [choose_dense_launch(block_rows, element_bytes) for element_bytes in (2, 4)]
        assert launches[0].block_in == 2 * launches[1].block_in >= 32
