"""Logits processors against those of Transformers."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.sampling_oracle import processed, sequence
from torch import Tensor

from loraplex_contracts.plan import Span
from loraplex_contracts.request import SamplingParams
from loraplex_server.grammars import matcher as matcher_module
from loraplex_server.layers.masks import RowMasks
from loraplex_server.sampling import sampler as module
from loraplex_server.sampling.draw import DrawRows, NoiseField, draw_open, row_argmax
from loraplex_server.sampling.processors import removed_by, unpack_bits
from loraplex_server.sampling.sampler import HostSampled, Sampler

VOCAB = 700
# Option -> values of it; each is tested alone and with everything else, greedy and drawn.
OPTIONS: dict[str, list[SamplingParams]] = {
    "bad_words": [
        SamplingParams(temperature=1.0, bad_words=((5,), (9,), (5,))),
        SamplingParams(temperature=1.0, bad_words=((699,), *((a, b) for a in range(40) for b in (3, 8)))),
        SamplingParams(temperature=0.9, bad_words=((7, 8, 9), (1,), (2,) * 40, *((a, 1) for a in range(40)))),
        SamplingParams(temperature=1.1, top_k=0, bad_words=((4,),), repetition_penalty=1.2, logit_bias=((4, 90.0),)),
    ],
    "allowed_token_ids": [
        SamplingParams(temperature=1.0, allowed_token_ids=(5,)),
        SamplingParams(temperature=0.8, allowed_token_ids=tuple(range(0, VOCAB, 3))),
        SamplingParams(temperature=1.2, allowed_token_ids=(0, VOCAB - 1), logit_bias=((VOCAB - 1, 2.0), (7, 50.0))),
        SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(40)), repetition_penalty=1.3),
    ],
    "typical_p": [
        SamplingParams(temperature=1.0, typical_p=0.2),
        SamplingParams(temperature=0.7, typical_p=0.9),
        SamplingParams(temperature=2.0, typical_p=0.999),
        SamplingParams(temperature=1.5, typical_p=1e-6),
        SamplingParams(temperature=1.2, top_k=50, typical_p=0.5),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, typical_p=0.8, repetition_penalty=1.2),
    ],
}
OTHERS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.3, logit_bias=((3, 5.0),)),
]


class Seen:
    """Scores as they reach the draws: of rows that draw without truncation, and of greedy rows with processors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: list[Tensor] = []
        self.greedy: list[Tensor] = []

        def draw(scores: Tensor, rows: DrawRows, noise: NoiseField) -> tuple[Tensor, Tensor]:
            self.drawn += scores.clone()
            return draw_open(scores, rows, noise)

        monkeypatch.setattr(module, "draw_open", draw)

    def argmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        self.greedy += scores.clone()
        return row_argmax(scores)


def histories(num_rows: int) -> tuple[Tensor, list[int]]:
    tokens = torch.randint(0, 40, (num_rows, 32), generator=torch.Generator().manual_seed(1))
    return tokens, [5 + (row * 7) % 23 for row in range(num_rows)]


WARPERS = {"typical_p"}  # do nothing to greedy rows
CASES = [(name, is_greedy) for is_greedy in (False, True) for name in OPTIONS if not (is_greedy and name in WARPERS)]


@pytest.mark.parametrize(("name", "is_greedy"), CASES)
def test_scores_are_those_of_transformers(name: str, is_greedy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [replace(one, temperature=0.0) if is_greedy else one for one in OPTIONS[name]]
    mixed = [one for pair in zip(params * len(OTHERS), OTHERS * len(params), strict=True) for one in pair]
    seen = Seen(monkeypatch)
    sampler = Sampler(len(mixed), VOCAB, "cpu", argmax=seen.argmax)
    logits = torch.randn(len(mixed), VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    tokens, positions = histories(len(mixed))
    sequences = [sequence(tokens[row, :4].tolist(), one, row=row) for row, one in enumerate(mixed)]
    for new in sequences:
        sampler.set_row(new.row, new)
    sampler.sample(logits, range(len(mixed)), positions, tokens)
    scores = seen.greedy if is_greedy else seen.drawn
    for row in range(0, len(mixed), 2):  # every other row is one of OTHERS
        temperature = mixed[row].temperature or 1.0
        expected = processed(logits[row], sequences[row], tokens[row, : positions[row]].tolist())
        assert any(torch.equal(one / temperature, expected) for one in scores), mixed[row]
        assert torch.isneginf(expected).any(), "the option removes something"


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    params = [one for group in OPTIONS.values() for one in group] + OTHERS
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    tokens, positions = histories(len(params))
    sampler = Sampler(len(params), VOCAB, "cpu")
    for row, one in enumerate(params):
        sampler.set_row(row, sequence(tokens[row, :4].tolist(), replace(one, seed=row), row=row))
    together = sampler.sample(logits, range(len(params)), positions, tokens).to_host().token_ids
    alone = [
        sampler.sample(logits[row : row + 1], [row], [positions[row]], tokens).to_host().token_ids[0]
        for row in range(len(params))
    ]
    assert list(together) == alone


def among(logits: Tensor, masks: RowMasks) -> tuple[Tensor, Tensor]:
    """The masked argmax, as the native kernels compute it."""
    scores = logits.clone()
    for row, number in enumerate(masks.numbers):
        if number >= 0:
            scores[row] -= torch.from_numpy(removed_by(masks.bits[number : number + 1], VOCAB))[0]
    return row_argmax(scores)


class GivenMasks:
    """A matcher, and the library's below it, with masks that are known. `is_allowed [num_positions, VOCAB]`."""

    error = ""
    num_slow = 0
    num_words = -(-VOCAB // 32)

    def __init__(self, is_allowed: npt.NDArray[np.bool_]) -> None:
        self.inner: Any = self
        self.num_made = self.num_copied = 0
        self._position = 0
        self._first = self
        padded = np.zeros((len(is_allowed), 32 * self.num_words), dtype=bool)
        padded[:, :VOCAB] = is_allowed
        self._bits = np.packbits(padded, axis=1, bitorder="little")

    def deep_copy(self) -> GivenMasks:
        self._first.num_copied += 1
        return copy.copy(self)

    def consume_token(self, token_id: int) -> None:
        assert token_id == (7, 8)[self._position]
        self._position += 1

    def is_error(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        assert num_bytes == 4 * self.num_words
        self._first.num_made += 1
        ctypes.memmove(address, self._bits[self._position].tobytes(), num_bytes)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["when they are wanted", "ahead"])
@pytest.mark.parametrize("masked_argmax", [None, among], ids=["by scores", "by argmax"])
@pytest.mark.parametrize("free_draws", [False, True], ids=["all special", "beside another"])
def test_grammars_mask_each_draft_position(
    free_draws: bool, masked_argmax: Any, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 0 and 2 have one, row 0 with a draft of two tokens; row 1 is free, row 3's allows nothing."""
    monkeypatch.setattr(matcher_module, "AT_ONCE_S", 60.0)  # the library's threads take its own matchers only,
    monkeypatch.setattr(matcher_module, "SLOW_S", 60.0)  # and get those that were slow once
    dice = np.random.default_rng(4)
    is_allowed = dice.random((5, VOCAB)) < 0.1
    is_allowed[4] = False
    tokens, _ = histories(4)
    matchers = [GivenMasks(is_allowed[:3]), None, GivenMasks(is_allowed[3:4]), GivenMasks(is_allowed[4:])]
    num_made = lambda: sum(one.num_made for one in matchers if one is not None)  # noqa: E731
    sampler = Sampler(4, VOCAB, "cpu", masked_argmax=masked_argmax)
    drawing = (1, 2) if free_draws else (2,)
    for row, matcher in enumerate(matchers):
        new = sequence(tokens[row, :4].tolist(), SamplingParams(temperature=float(row in drawing)), row=row)
        sampler.set_row(row, replace(new, matcher=cast(Any, matcher)))
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    spans = [
        Span("d", 3, 6, 1, 1),  # in another order than the samples
        *(Span("a", 0, 6, 3, 3, draft=(7, 8)), Span("b", 1, 6, 1, 1), Span("c", 2, 6, 1, 1), Span("e", 2, 0, 4, 0)),
    ]

    def sample() -> HostSampled:
        if is_ahead:
            sampler.begin(spans)
        try:
            return sampler.sample(logits, [0, 0, 0, 1, 2, 3], [6, 7, 8, 6, 6, 6], tokens, {0: (7, 8)}).to_host()
        finally:
            sampler.end()

    found = sample()
    assert num_made() == 5, "each once"
    assert [one.num_copied for one in matchers if one is not None] == [1, 0, 0], "a copy takes longer than a mask"
    allowed = torch.from_numpy(is_allowed)
    masked = logits[[0, 1, 2, 4]].masked_fill(~allowed[:4], -torch.inf)
    assert found.token_ids[:3] == tuple(masked[:3].argmax(-1).tolist())
    assert free_draws or found.token_ids[3] == int(logits[3].argmax())
    assert is_allowed[3, found.token_ids[4]]
    assert found.is_bad == (False, False, False, False, False, True)
    assert found.without_token == {5}
    logits[0, int((~allowed[0]).nonzero()[0])] = torch.nan  # of a token that may not come
    found = sample()
    assert found.is_bad == (True, False, False, False, False, True)
    sampler.begin(spans)  # of a step that was given up
    sampler.end()
    assert sample().without_token == {5}


@pytest.mark.parametrize("min_tokens", range(5))
def test_grammars_mask_drafts_across_the_end_of_min_tokens(min_tokens: int) -> None:
    """Only the first positions of the draft ban the end then, and have to be sampled from scores."""
    is_allowed = np.random.default_rng(6).random((3, VOCAB)) < 0.1
    tokens, _ = histories(1)
    tokens[0, 4:6] = torch.tensor((7, 8))
    sampler = Sampler(1, VOCAB, "cpu", masked_argmax=among)
    banned = frozenset({VOCAB - 1})
    new = sequence(tokens[0, :4].tolist(), SamplingParams(), min_tokens=min_tokens, banned=banned)
    sampler.set_row(0, replace(new, matcher=cast(Any, GivenMasks(is_allowed))))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7))
    sampler.begin([Span("a", 0, 3, 3, 3, draft=(7, 8))])
    found = sampler.sample(logits, [0, 0, 0], [4, 5, 6], tokens, {0: (7, 8)}).to_host()
    sampler.end()
    is_allowed[:min_tokens, VOCAB - 1] = False
    assert found.token_ids == tuple(logits.masked_fill(~torch.from_numpy(is_allowed), -torch.inf).argmax(-1).tolist())


@pytest.mark.parametrize("num_bits", [1, 31, 32, 33, 700])
def test_bits_are_unpacked_on_the_device(num_bits: int) -> None:
    bits = np.random.default_rng(num_bits).integers(0, 256, (3, 4 * -(-num_bits // 32)), dtype=np.uint8)
    expected = np.unpackbits(bits, axis=1, count=num_bits, bitorder="little").astype(bool)
    assert torch.equal(unpack_bits(torch.from_numpy(bits.view(np.int32)), num_bits), torch.from_numpy(expected))
    assert np.array_equal(removed_by(bits.view(np.int32), num_bits), np.where(expected, 0, np.inf))
