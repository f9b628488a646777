"""Sampling with drafts keeps the target's distribution: chi-square tests.

The first two tokens against exact probabilities, for a proposer of one fixed token, one with a model of its own, and
one that shares the target's noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from support.sampling_oracle import processed, sequence
from torch import Tensor

from loraplex_contracts.request import SamplingParams
from loraplex_server.sampling.sampler import Sampler, verify_chain

VOCAB = 32
PROMPT = (3,)
NUM_SEEDS = 6000

PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "truncated": SamplingParams(temperature=1.2, top_k=20, top_p=0.95, min_p=0.01),
    # What is drawn second depends on what was drafted first, and accepted.
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=1.0),
}
Verify = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


def table(seed: int, near: Tensor | None = None) -> Tensor:
    """Logits by the last token [vocab, vocab], a quarter of them -inf; not far from those of another table."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    logits = noise if near is None else near.nan_to_num(neginf=-1.0) + 0.4 * noise
    return logits.masked_fill(torch.rand(VOCAB, VOCAB, generator=generator) < 0.25, -torch.inf)


TARGET = table(1)
DRAFT = table(2, TARGET)


class TwoTokens:
    """Two tokens behind one prompt, for seeds 0, 1, ..., and what their probabilities are."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self.first = self._probabilities([])
        rows = [self._probabilities([a]) if self.first[a] > 0 else torch.zeros_like(self.first) for a in range(VOCAB)]
        self.joint = self.first.unsqueeze(1) * torch.stack(rows)

    def _probabilities(self, new: list[int]) -> Tensor:
        history = [*PROMPT, *new]
        return processed(TARGET[history[-1]], sequence(list(PROMPT), self._params), history).softmax(0)

    def sampler(self, first_seed: int) -> Sampler:
        sampler = Sampler(NUM_SEEDS, VOCAB, "cpu")
        for row in range(NUM_SEEDS):
            sampler.set_row(row, sequence(list(PROMPT), replace(self._params, seed=first_seed + row), row=row))
        return sampler

    def drafts(self, proposer: str) -> Tensor:
        """Draft tokens [num_seeds, 2]."""
        if proposer == "likely":
            return torch.tensor([divmod(int(self.joint.argmax()), VOCAB)]).repeat(NUM_SEEDS, 1)
        if proposer == "impossible":
            never = int((self.first == 0).nonzero()[0])
            return torch.tensor([[never, 1]]).repeat(NUM_SEEDS, 1)
        if proposer == "half impossible":
            a = int(self.first.argmax())
            return torch.tensor([[a, int((self.joint[a] == 0).nonzero()[0])]]).repeat(NUM_SEEDS, 1)
        sampler = self.sampler(0 if proposer == "shared noise" else 10**9)
        tokens, rows = new_tokens(), list(range(NUM_SEEDS))
        for at in (1, 2):
            tokens[:, at] = sampler.sample(DRAFT[tokens[:, at - 1]], rows, [at] * NUM_SEEDS, tokens).token_ids
        return tokens[:, 1:3]

    def draw(self, drafts: Tensor, verify: Verify = verify_chain) -> tuple[Tensor, float]:
        """Counts of each pair [vocab, vocab], and the share of first draft tokens that was accepted. The three
        positions of each draft go into one batch, as in a step."""
        sampler, tokens = self.sampler(0), new_tokens()
        tokens[:, 1:3] = drafts
        rows = [row for row in range(NUM_SEEDS) for _ in range(3)]
        logits = TARGET[tokens[:, :3].reshape(-1)]
        sampled = sampler.sample(logits, rows, [1, 2, 3] * NUM_SEEDS, tokens).token_ids.view(NUM_SEEDS, 3).tolist()
        outs = [list(verify(draft, ids)) for draft, ids in zip(drafts.tolist(), sampled, strict=True)]
        # The next step, where the draft failed at once.
        short = [row for row in range(NUM_SEEDS) if len(outs[row]) == 1]
        tokens[:, 1] = torch.tensor([out[0] for out in outs])
        again = sampler.sample(TARGET[tokens[short, 1]], short, [2] * len(short), tokens).token_ids.tolist()
        for row, token_id in zip(short, again, strict=True):
            outs[row].append(token_id)
        pairs = torch.tensor([out[0] * VOCAB + out[1] for out in outs])
        return pairs.bincount(minlength=VOCAB * VOCAB).view(VOCAB, VOCAB), 1 - len(short) / NUM_SEEDS


def new_tokens() -> Tensor:
    tokens = torch.zeros(NUM_SEEDS, 8, dtype=torch.int64)
    tokens[:, 0] = PROMPT[0]
    return tokens


def excess(seen: Tensor, probabilities: Tensor) -> float:
    """Standard deviations by which chi-square is above what chance gives. Cells that are expected fewer than 8 times
    count as one; infinite where something impossible was seen."""
    seen, expected = seen.flatten().double(), probabilities.flatten() * NUM_SEEDS
    if bool((seen[expected == 0] > 0).any()):
        return math.inf
    is_rare = expected < 8
    counts = torch.cat((seen[~is_rare], seen[is_rare].sum().view(1)))
    means = torch.cat((expected[~is_rare], expected[is_rare].sum().clamp(min=1e-9).view(1)))
    num_free = len(counts) - 1
    assert num_free > 10
    return (float(((counts - means) ** 2 / means).sum()) - num_free) / math.sqrt(2 * num_free)


@pytest.fixture(scope="module", params=PARAMS)
def two_tokens(request: pytest.FixtureRequest) -> TwoTokens:
    return TwoTokens(PARAMS[request.param])


@pytest.mark.parametrize("proposer", ["likely", "impossible", "half impossible", "own noise", "shared noise"])
def test_both_tokens_are_distributed_as_without_drafts(proposer: str, two_tokens: TwoTokens) -> None:
    drafts = two_tokens.drafts(proposer)
    seen, share = two_tokens.draw(drafts)
    joint = two_tokens.joint
    assert int((two_tokens.first == 0).sum()) > 5
    assert float(joint.sum()) == pytest.approx(1.0)
    assert excess(seen.sum(1), joint.sum(1)) < 4
    assert excess(seen.sum(0), joint.sum(0)) < 4
    assert excess(seen, joint) < 4
    least = {"likely": 0.05, "half impossible": 0.05, "own noise": 0.02, "shared noise": 0.5}.get(proposer, 0.0)
    assert least <= share < 0.95
    assert proposer != "impossible" or share == 0.0


@pytest.mark.parametrize("proposer", ["likely", "shared noise"])
def test_the_seed_decides_and_not_the_drafts(proposer: str, two_tokens: TwoTokens) -> None:
    plain, _ = two_tokens.draw(two_tokens.drafts("impossible"))
    assert torch.equal(two_tokens.draw(two_tokens.drafts(proposer))[0], plain)


def test_the_test_can_fail(two_tokens: TwoTokens) -> None:
    """The test fails for drafts that are taken as they come, and for a rule that takes every tenth of them unseen."""
    drafts = two_tokens.drafts("shared noise")
    seen, _ = two_tokens.draw(drafts, lambda draft, sampled: draft)
    assert excess(seen.sum(1), two_tokens.joint.sum(1)) > 10
    count = iter(range(NUM_SEEDS))

    def careless(draft: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
        return (draft[0], sampled[1]) if next(count) % 10 == 0 else verify_chain(draft, sampled)

    seen, _ = two_tokens.draw(two_tokens.drafts("likely"), careless)
    assert excess(seen.sum(1), two_tokens.joint.sum(1)) > 10
