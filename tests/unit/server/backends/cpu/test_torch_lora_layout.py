"""Choice of products in torch LoRA on a CPU."""

from __future__ import annotations

import random

import pytest
import torch

from loraplex_server.backends.cpu.torch_lora import Alone, Packed, Profile, lay_out
from loraplex_server.layers.lora import Segment


def profile(dtype: torch.dtype, width: int, ranks: list[int], *, fast_half: bool = True) -> Profile:
    return Profile(dtype, 2 * width, width, tuple(ranks), tuple(1.0 for _ in ranks), fast_half)


def one_row_each(num_rows: int) -> list[Segment]:
    return [Segment(i, i + 1, i) for i in range(num_rows)]


def first_columns(piece: Packed, ranks: list[int]) -> list[int]:
    return [sum(ranks[slot] for slot in piece.slots[:i]) for i in range(len(piece.slots))]


def test_many_small_half_precision_segments_share_one_product() -> None:
    pieces = lay_out(one_row_each(32), range(32), profile(torch.bfloat16, 512, [16] * 32))
    assert len(pieces) == 1
    (piece,) = pieces
    assert isinstance(piece, Packed)
    assert piece.rows == (0, 32)
    assert piece.keep.shape == (32, 512)
    assert piece.keep.sum() == -512
    assert piece.factors is None


def test_packs_stay_small() -> None:
    pieces = lay_out(one_row_each(65), range(65), profile(torch.bfloat16, 512, [16] * 65))
    assert [len(p.slots) for p in pieces if isinstance(p, Packed)] == [21, 22, 22]


def test_the_copies_of_a_module_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = profile(torch.bfloat16, 512, [16] * 64)
    one_pack = 32 * 16 * 1024 * 2  # adapters, rank, features, bytes
    for max_bytes, num_packs in ((2 * one_pack, 2), (2 * one_pack - 1, 1), (one_pack - 1, 0)):
        monkeypatch.setattr("loraplex_server.backends.cpu.torch_lora.MAX_PACKED_BYTES", max_bytes)
        pieces = lay_out(one_row_each(64), range(64), shape)
        assert sum(isinstance(p, Packed) for p in pieces) == num_packs


def test_scattered_rows_of_one_adapter_share_a_product_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex_server.backends.cpu.torch_lora.MAX_PACKED_BYTES", 0)
    segments = [Segment(2 * i, 2 * i + 1, 0) for i in range(8)]
    (piece,) = lay_out(segments, [0], profile(torch.bfloat16, 1024, [16]))
    assert isinstance(piece, Packed)
    assert isinstance(piece.rows, torch.Tensor)
    assert piece.rows.tolist() == list(range(0, 16, 2))


def test_large_float32_segments_stay_alone() -> None:
    pieces = lay_out(one_row_each(16), range(16), profile(torch.float32, 4096, [64] * 16))
    assert all(isinstance(p, Alone) and not p.upcast for p in pieces)
    assert len(pieces) == 16


def test_half_precision_is_upcast_where_starting_onednn_costs_more_and_where_it_is_missing() -> None:
    small = [Segment(0, 1, 0)]
    long = [Segment(0, 65, 0)]
    assert lay_out(small, [0], profile(torch.bfloat16, 1024, [16])) == (Alone(0, 1, 0, 1.0, True),)
    assert lay_out(small, [0], profile(torch.bfloat16, 64, [16])) == (Alone(0, 1, 0, 1.0, False),)
    assert lay_out(long, [0], profile(torch.bfloat16, 1024, [64])) == (Alone(0, 65, 0, 1.0, False),)
    assert lay_out(long, [0], profile(torch.bfloat16, 1024, [64], fast_half=False)) == (Alone(0, 65, 0, 1.0, True),)


def test_a_slot_without_factors_gets_no_product() -> None:
    pieces = lay_out([Segment(0, 3, 0), Segment(3, 4, 1)], [0, 1], profile(torch.float32, 64, [0, 8]))
    assert pieces == (Alone(3, 4, 1, 1.0, False),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_every_term_exactly_once(dtype: torch.dtype, seed: int) -> None:
    chooser = random.Random(seed)
    num_rows, ranks = 40, [chooser.choice([0, 1, 2, 5]) for _ in range(6)]
    segments = [
        Segment(i, i + chooser.choice([1, 1, 2]), chooser.randrange(6), chooser.choice([1.0, 0.5]))
        for i in sorted(chooser.sample(range(num_rows - 2), 20))
    ]
    shape = profile(dtype, 64, ranks)
    wanted = torch.zeros(num_rows, 6)
    for s in segments:
        wanted[s.start : s.end, s.adapter_slot] += s.weight * (ranks[s.adapter_slot] > 0)

    found = torch.zeros(num_rows, 6)
    for piece in lay_out(segments, range(6), shape):
        if isinstance(piece, Alone):
            found[piece.start : piece.end, piece.adapter_slot] += piece.alpha
            continue
        rows = piece.rows if isinstance(piece.rows, torch.Tensor) else torch.arange(*piece.rows)
        factors = piece.factors if piece.factors is not None else piece.alpha * piece.keep.ne(0).float()
        assert torch.equal(piece.keep == -1, factors != 0)
        for slot, first in zip(piece.slots, first_columns(piece, ranks), strict=True):
            columns = factors[:, first : first + ranks[slot]]
            assert (columns == columns[:, :1]).all()
            found[rows, slot] += columns[:, 0]
        # The same terms once more, for factors that cannot be packed.
        apart = torch.zeros(num_rows, 6)
        for part in piece.apart:
            apart[part.start : part.end, part.adapter_slot] += part.alpha
        assert apart.sum() == sum(factors[:, column].sum() for column in first_columns(piece, ranks))
    assert torch.equal(found, wanted)
