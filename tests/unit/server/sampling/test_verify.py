"""Speculation changes neither a seed's tokens nor the distribution of any."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from support.sampling_oracle import noise_field, processed, sequence
from torch import Tensor

from loraplex_contracts.request import SamplingParams
from loraplex_server.sampling.draw import row_keys
from loraplex_server.sampling.sampler import Sampler, verify_chain

VOCAB = 32


def test_chain() -> None:
    assert verify_chain([], [7]) == (7,)
    assert verify_chain([1, 2, 3], [1, 2, 3, 4]) == (1, 2, 3, 4)
    assert verify_chain([1, 2, 3], [1, 9, 3, 4]) == (1, 9)
    assert verify_chain([1, 2, 3], [9, 2, 3, 4]) == (9,)
    with pytest.raises(ValueError, match="needs 3"):
        verify_chain([1, 2], [1, 2])


class Model:
    """Logits that are a function of the last two tokens; some are -inf."""

    def __init__(self, seed: int, sharpness: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64) * sharpness
        self.table.masked_fill_(torch.rand(self.table.shape, generator=generator) < 0.2, -torch.inf)

    def __call__(self, history: list[int]) -> Tensor:
        return self.table[history[-2], history[-1]]


Propose = Callable[[list[int]], list[int]]


def generate(
    model: Model, sampler: Sampler, row: int, prompt: list[int], num_new: int, propose: Propose | None = None
) -> list[int]:
    """Generates as the engine does for one sequence: a step runs the draft, samples behind each position, verifies."""
    tokens = torch.full((row + 1, len(prompt) + num_new + 8), 5)
    known = list(prompt)
    while len(known) < len(prompt) + num_new:
        draft = propose(known) if propose else []
        run = known + draft
        tokens[row, : len(run)] = torch.tensor(run)
        positions = list(range(len(known), len(run) + 1))
        logits = torch.stack([model(run[:position]) for position in positions])
        sampled = sampler.sample(logits, [row] * len(positions), positions, tokens).to_host()
        assert not any(sampled.is_bad)
        known += verify_chain(draft, sampled.token_ids)
    return known[len(prompt) : len(prompt) + num_new]


PAIRS = tuple((a, b) for a in range(32) for b in range(32) if (a + b) % 3 == 0)

PARAMS = {
    "greedy": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "temperature": SamplingParams(temperature=1.0),
    "bad words": SamplingParams(bad_words=PAIRS),
    "bad words, drawn": SamplingParams(
        temperature=1.0,
        bad_words=((4,), (3, 9, 3), *PAIRS),
    ),
    "allowed": SamplingParams(temperature=1.1, allowed_token_ids=tuple(range(3, 32, 2))),
    "typical": SamplingParams(temperature=1.1, typical_p=0.6, top_k=24),
    "all": SamplingParams(
        temperature=1.2,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.3,
        presence_penalty=0.1,
        logit_bias=((4, 1.0),),
    ),
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_seed_gives_the_same_tokens_with_every_proposer(name: str) -> None:
    model, prompt = Model(1), [3, 9, 3]
    for seed in range(4):
        params = replace(PARAMS[name], seed=seed)
        sampler = Sampler(1, VOCAB, "cpu")
        sampler.set_row(0, sequence(prompt, params, min_tokens=6, banned=frozenset({0, 1, 2})))
        plain = generate(model, sampler, 0, prompt, 30)
        rng = random.Random(seed)

        def right(known: list[int], plain: list[int] = plain) -> list[int]:
            return plain[len(known) - len(prompt) :][:4]

        def wrong(known: list[int], plain: list[int] = plain) -> list[int]:
            return [(token + 1) % VOCAB for token in right(known, plain)]

        def mixed(known: list[int], plain: list[int] = plain, rng: random.Random = rng) -> list[int]:
            draft = right(known, plain)[: rng.randint(0, 4)]
            return [rng.randrange(VOCAB) if rng.random() < 0.4 else token for token in draft]

        for propose in (right, wrong, mixed):
            assert generate(model, sampler, 0, prompt, 30, propose) == plain


Verify = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


class TwoTokens:
    """Two tokens in a row behind one prompt, for many seeds, against the target's exact joint probabilities."""

    prompt = (3, 9)
    params = SamplingParams(temperature=1.1, top_k=24, top_p=0.97)

    def __init__(self) -> None:
        self.model = Model(6, sharpness=1.0)
        self.first = self.probabilities([])
        rows = [self.probabilities([a]) if self.first[a] > 0 else self.first for a in range(VOCAB)]
        self.joint = self.first.unsqueeze(1) * torch.stack(rows)
        self.likely = self.first.argsort(descending=True).tolist()

    def probabilities(self, new: list[int]) -> Tensor:
        history = [*self.prompt, *new]
        return processed(self.model(history), sequence(list(self.prompt), self.params), history).softmax(0)

    def count(self, drafts: list[list[int]], verify: Verify) -> tuple[Counter[tuple[int, int]], int]:
        """Counts the pairs that came for seeds 0, 1, ..., and the first tokens that were drafted. Each row has three
        positions in a batch."""
        n, start = len(drafts), len(self.prompt)
        sampler, tokens = Sampler(n, VOCAB, "cpu"), torch.zeros(n, 8, dtype=torch.int64)
        for row, draft in enumerate(drafts):
            sampler.set_row(row, sequence(list(self.prompt), replace(self.params, seed=row), row=row))
            tokens[row, : start + 2] = torch.tensor([*self.prompt, *draft])
        runs = [[*self.prompt, *draft[:length]] for draft in drafts for length in range(3)]
        rows = [row for row in range(n) for _ in range(3)]
        logits = torch.stack([self.model(run) for run in runs])
        ids = sampler.sample(logits, rows, [len(run) for run in runs], tokens).to_host().token_ids
        outs = [list(verify(draft, ids[3 * row : 3 * row + 3])) for row, draft in enumerate(drafts)]
        # The next step, for rows whose draft failed at once.
        short = [row for row in range(n) if len(outs[row]) == 1]
        logits = torch.stack([self.model([*self.prompt, *outs[row]]) for row in short])
        again = sampler.sample(logits, short, [start + 1] * len(short), tokens).to_host().token_ids
        for row, token_id in zip(short, again, strict=True):
            outs[row].append(token_id)
        return Counter((out[0], out[1]) for out in outs), n - len(short)


@pytest.fixture(scope="module")
def two_tokens() -> TwoTokens:
    return TwoTokens()


NUM_SEEDS = 6000


@pytest.mark.parametrize("proposer", ["likely", "unlikely", "sampled"])
def test_speculation_leaves_the_distribution_unchanged(proposer: str, two_tokens: TwoTokens) -> None:
    likely, rng = two_tokens.likely, random.Random(7)
    match proposer:
        case "likely":
            drafts = [[likely[0], int(two_tokens.probabilities([likely[0]]).argmax())]] * NUM_SEEDS
        case "unlikely":
            drafts = [[likely[10], likely[-1]]] * NUM_SEEDS
        case _:
            drafts = [rng.choices(range(VOCAB), weights=two_tokens.first.tolist(), k=2) for _ in range(NUM_SEEDS)]
    pairs, num_accepted = two_tokens.count(drafts, verify_chain)
    assert num_accepted > NUM_SEEDS // 100
    assert int((two_tokens.joint == 0).sum()) > 100
    assert float(two_tokens.joint.sum()) == pytest.approx(1.0)
    assert chi_square_fits(pairs, two_tokens.joint, NUM_SEEDS)


def test_the_chi_square_test_can_fail(two_tokens: TwoTokens) -> None:
    """A rule that takes one draft in ten unseen is caught."""
    rng = random.Random(1)

    def careless(draft: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
        return (draft[0], sampled[1]) if rng.random() < 0.1 else verify_chain(draft, sampled)

    drafts = [two_tokens.likely[1:3]] * NUM_SEEDS
    assert not chi_square_fits(two_tokens.count(drafts, careless)[0], two_tokens.joint, NUM_SEEDS)


def chi_square_fits(pairs: Counter[tuple[int, int]], joint: Tensor, n: int) -> bool:
    """Cells that are expected fewer than 8 times count as one; cells of probability zero must be empty."""
    rest_seen, rest_expected, statistic, free = 0, 0.0, 0.0, 0
    for a in range(VOCAB):
        for b in range(VOCAB):
            seen, expected = pairs[a, b], n * float(joint[a, b])
            if expected == 0.0 and seen:
                return False
            if expected < 8:
                rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
            else:
                statistic, free = statistic + (seen - expected) ** 2 / expected, free + 1
    statistic += (rest_seen - rest_expected) ** 2 / max(rest_expected, 1e-9)
    return free > 20 and statistic < free + 5 * math.sqrt(2 * free)


def test_drafts_that_share_the_noise_are_mostly_accepted() -> None:
    """A draft model with another distribution and the target's noise agrees as often as coupling by a maximum does."""
    n = 20_000
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(VOCAB, generator=generator, dtype=torch.float64) * 2
    draft = target + torch.randn(VOCAB, generator=generator, dtype=torch.float64) * 0.3
    keys = row_keys(torch.arange(n), torch.full((n,), 11))
    noise = noise_field(VOCAB).dense(keys)
    agreed = float(((target + noise).argmax(1) == (draft + noise).argmax(1)).double().mean())
    distance = float((target.softmax(0) - draft.softmax(0)).abs().sum() / 2)
    unshared = float((target.softmax(0) * draft.softmax(0)).sum())
    assert distance > 0.05
    assert agreed > (1 - distance) / (1 + distance) - 0.01
    assert agreed > unshared + 0.3
