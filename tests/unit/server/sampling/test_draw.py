"""Gumbel noise, and shortcuts of drawing that equal the definition."""

from __future__ import annotations

import math

import pytest
import torch
from support.draw_cases import SHAPES, rows_of, scores_of
from support.sampling_oracle import noise_field
from torch import Tensor

from loraplex_contracts.request import seed_of_completion
from loraplex_server.sampling import draw
from loraplex_server.sampling.draw import (
    BLOCK,
    BOUND_SHIFT,
    NoiseField,
    block_ids,
    block_max,
    draw_dense,
    draw_narrow,
    draw_open,
    row_argmax,
    row_keys,
    seed_to_int64,
)

torch.set_num_threads(1)


def critical(num_free: int, z: float = 4.75) -> float:
    """Chi-square's critical value at one in a million, by Wilson and Hilferty."""
    return num_free * (1 - 2 / (9 * num_free) + z * math.sqrt(2 / (9 * num_free))) ** 3


def chi_square(counts: Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


def keys_of(seeds: list[int] | Tensor, positions: list[int] | Tensor) -> Tensor:
    return row_keys(torch.as_tensor(seeds), torch.as_tensor(positions))


@pytest.fixture(scope="module")
def field() -> NoiseField:
    return NoiseField(5000, "cpu")


def test_known_values_never_change() -> None:
    """A seed's text is a promise across versions."""
    noise = NoiseField(8, "cpu").dense(keys_of([0, 1, seed_to_int64(2**64 - 1)], [0, 5, 2**31]))
    expected = [
        [1.2193, 0.5519, 1.0527, 3.512, 0.3095, -0.291, 0.6306, 0.4199],
        [1.1468, 0.6212, 0.9042, 0.6737, -0.0115, -0.8913, 0.1268, 0.9895],
        [-0.3446, -0.8274, -0.6826, 1.9737, 2.0439, -0.9621, 0.1234, 1.0521],
    ]
    assert [[round(value, 4) for value in row] for row in noise.tolist()] == expected


def test_does_not_depend_on_shape_order_or_batch(field: NoiseField) -> None:
    keys = keys_of(range_tensor(7), range_tensor(7) * 3)
    noise = field.dense(keys)
    assert torch.equal(field.dense(keys[4:5]), noise[4:5])
    assert torch.equal(field.dense(keys, 100, 117), noise[:, 100:117])
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(field.at(keys.flip(0), order.expand(7, -1)), noise.flip(0)[:, order])
    strided = torch.arange(5000).view(50, 100).T.reshape(1, -1)
    assert torch.equal(field.at(keys[2:3], strided), noise[2:3, strided[0]])
    assert torch.equal(NoiseField(12, "cpu").dense(keys), noise[:, :12])


def range_tensor(n: int) -> Tensor:
    return torch.arange(n)


def test_is_accurate(field: NoiseField) -> None:
    """The noise is compared with logarithms in float64 of the same hashes."""
    from loraplex_server.sampling.draw import _hash  # pyright: ignore[reportPrivateUsage]

    keys = keys_of(range_tensor(50), range_tensor(50))
    hashes = _hash(keys, field.mixed_ids).double()
    x = hashes.abs().clamp_min(0.5) / 2**32
    exact = torch.where(hashes < 0, -(-(-x).log1p()).log(), -(-x.log()).log())
    assert float((field.dense(keys) - exact).abs().max()) < 2e-5


def test_bounds_hold_and_are_tight_above(field: NoiseField) -> None:
    keys = keys_of(range_tensor(40), range_tensor(40) + 7)
    noise = field.dense(keys)
    slack = field.bounds(keys, 0, 5000) + BOUND_SHIFT - noise
    assert float(slack.min()) > 0
    assert float(slack[noise > 3].max()) < 0.1


def test_moments(field: NoiseField) -> None:
    noise = field.dense(keys_of(range_tensor(100), torch.zeros(100, dtype=torch.int64))).double()
    assert noise.isfinite().all()
    n = noise.numel()
    assert abs(float(noise.mean()) - 0.5772157) < 5 * math.sqrt(math.pi**2 / 6 / n)
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03


@pytest.mark.parametrize("varies", ["seed", "position", "completion"])
def test_winners_are_uniform_and_independent(varies: str) -> None:
    """The token that wins among equals, over neighbouring coordinates, and its pair with the next one's."""
    field, n = NoiseField(32, "cpu"), 200_000
    steps = range_tensor(n)
    if varies == "seed":
        keys = row_keys(steps, torch.full((n,), 17))
    elif varies == "position":
        keys = row_keys(torch.full((n,), 12345), steps)
    else:
        seeds = [seed_to_int64(seed_of_completion(99, index)) for index in range(n)]
        keys = keys_of(seeds, torch.full((n,), 3))
    winners = field.dense(keys).argmax(1)
    assert chi_square(torch.bincount(winners, minlength=32).double()) < critical(31)
    pairs = winners[1:] * 32 + winners[:-1]
    assert chi_square(torch.bincount(pairs, minlength=1024).double()) < critical(1023)


def test_winners_follow_probabilities() -> None:
    """argmax(log p + noise) is distributed as p."""
    field, n = NoiseField(6, "cpu"), 300_000
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.0099, 0.0001], dtype=torch.float64)
    keys = row_keys(range_tensor(n) % 1000, range_tensor(n) // 1000)
    counts = torch.bincount((p.log() + field.dense(keys)).argmax(1), minlength=6).double()
    assert float(((counts - n * p) ** 2 / (n * p)).sum()) < critical(5)


def test_no_correlation_between_tokens_or_positions(field: NoiseField) -> None:
    n = 2000
    noise = field.dense(row_keys(torch.full((n,), 4), range_tensor(n)), 0, 500).double()
    standard = (noise - noise.mean()) / noise.std()
    tokens = standard.T @ standard / n
    tokens.fill_diagonal_(0)
    # 125,000 pairs of deviation 1/sqrt(n) each.
    assert float(tokens.pow(2).mean()) == pytest.approx(1 / n, rel=0.03)
    assert float(tokens.abs().max()) < 6.5 / math.sqrt(n)
    for lag in (1, 2, 3, 16, 256):
        product = (standard[lag:] * standard[:-lag]).mean()
        assert abs(float(product)) < 5 / math.sqrt(standard[lag:].numel())


def test_largest_of_many_is_gumbel() -> None:
    """The maximum over a large vocabulary has the shape that sampling from flat distributions relies on."""
    vocab_size, n = 50_000, 600
    keys = row_keys(range_tensor(n), torch.full((n,), 1))
    field = NoiseField(vocab_size, "cpu")
    top = torch.cat([field.dense(part).amax(1) for part in keys.split(50)]).double() - math.log(vocab_size)
    uniform = (-(-top.sort().values).exp()).exp()
    steps = (range_tensor(n).double() + 0.5) / n
    assert float((uniform - steps).abs().max()) < 2.0 / math.sqrt(n)  # Kolmogorov-Smirnov, about one in a thousand


def test_seeds_keep_their_64_bits() -> None:
    assert seed_to_int64(2**64 - 1) == -1
    assert seed_to_int64(2**63) == -(2**63)
    field = NoiseField(16, "cpu")
    high = field.dense(keys_of([seed_to_int64(1 << bit) for bit in range(64)], [0] * 64))
    assert len({tuple(row) for row in high.tolist()}) == 64


SIZES = [1, 2, 63, 64, 65, 700, 2500]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_open_rows(shape: str, vocab_size: int, dtype: torch.dtype) -> None:
    scores, rows = scores_of(shape, vocab_size, dtype), rows_of([0], [1.0], [0.0], dtype)
    noise = noise_field(vocab_size)
    expected = draw_dense(scores, rows, noise, truncates=False)
    found = draw_open(scores, rows, noise)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_narrow_rows(shape: str, vocab_size: int, dtype: torch.dtype) -> None:
    scores, noise = scores_of(shape, vocab_size, dtype), noise_field(vocab_size)
    top_k = [min(k, vocab_size) for k in (0, 1, 5, 0, 60, 64, 70, 1500, 0)]
    top_p = [0.9, 0.5, 1.0, 1e-3, 0.99, 1.0, 0.999, 0.97]
    min_p = [0.0, 0.05, 1.0, 0.0, 0.3]
    for rows in (
        rows_of(top_k, top_p, min_p, dtype),
        rows_of(top_k, [1.0], [0.0], dtype),
        rows_of([0], top_p, [0.0], dtype),
        rows_of([0], [1.0], [0.1, 0.9, 1e-6], dtype),
        rows_of([0], [0.9999], [1e-4], dtype),
    ):
        expected = draw_dense(scores, rows, noise, truncates=True)
        found = draw_narrow(scores, rows, noise)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("num_values", [700, 768, 2500])
def test_the_place_where_a_sum_is_reached(num_values: int) -> None:
    """The place that a search in blocks finds is that of a search place by place."""
    generator = torch.Generator().manual_seed(num_values)
    weights = torch.rand(60, num_values, dtype=torch.float64, generator=generator).pow(8).sort(descending=True).values
    weights[:10, 300:] = 0.0
    total = weights.sum(-1, keepdim=True)
    limit = total * torch.tensor([0.0, 1e-9, 0.3, 0.9, 0.999, 1.5], dtype=torch.float64).repeat(10).unsqueeze(1)
    before = weights.cumsum(-1) - weights
    want = (before < limit).sum(-1, keepdim=True)
    assert len(want.unique()) > 20
    found = draw._count_before(weights, limit)  # pyright: ignore[reportPrivateUsage]
    assert torch.equal(found, want)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = scores_of("normal", 2500, torch.float32)
    noise = noise_field(2500)
    is_open, narrow = rows_of([0], [1.0], [0.0], scores.dtype), rows_of([0, 7, 300], [0.9, 1.0], [0.0], scores.dtype)
    expected = draw_open(scores, is_open, noise)[0], draw_narrow(scores, narrow, noise)[0]
    monkeypatch.setattr(draw, "_CHUNK_COLS", 3 * BLOCK)
    monkeypatch.setattr(draw, "_CHUNK_ROWS", 5)
    monkeypatch.setattr(draw, "_MAX_ELEMENTS", 7000)
    assert torch.equal(draw_open(scores, is_open, noise)[0], expected[0])
    assert torch.equal(draw_narrow(scores, narrow, noise)[0], expected[1])
    assert torch.equal(draw_dense(scores, is_open, noise, truncates=False)[0], expected[0])
    assert torch.equal(draw_dense(scores, narrow, noise, truncates=True)[0], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_values", [1, 64, 511, 512, 513, 1024, 1281])
def test_row_argmax(num_values: int, dtype: torch.dtype) -> None:
    """bfloat16 rounds to many ties, of which the lowest index wins."""
    values = torch.randn(50, num_values, generator=torch.Generator().manual_seed(1)).to(dtype)
    best, idx = row_argmax(values)
    for row in range(50):
        highest = max(values[row].tolist())
        assert float(best[row]) == highest
        assert int(idx[row]) == values[row].tolist().index(highest)


def test_row_argmax_of_a_view() -> None:
    values = torch.randn(6, 4000)[::2, 100:3100]
    assert torch.equal(row_argmax(values)[1], values.argmax(1))


def test_blocks_cover_a_row_once() -> None:
    values = torch.arange(150.0).unsqueeze(0)
    assert block_max(values).tolist() == [[63.0, 127.0, 149.0]]
    ids, exists = block_ids(torch.tensor([[0, 1, 2]]), 150)
    assert ids[exists].tolist() == list(range(150))
    assert int(ids.max()) == 149
