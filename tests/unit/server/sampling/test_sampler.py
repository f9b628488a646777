"""Sampler against Transformers' processors; logprobs and the single transfer of a step."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from support.sampling_oracle import drawn, processed, sequence
from torch import Tensor

from loraplex_contracts.plan import NewSequence
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.sampling import sampler as module
from loraplex_server.sampling.sampler import (
    HostSampled,
    Sampler,
    compute_logprobs,
    highest_by_keys,
    highest_ids,
    prompt_logprobs,
)

torch.set_num_threads(1)

VOCAB = 160
PARAMS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "cold": SamplingParams(temperature=1e-4),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_k_1": SamplingParams(temperature=1.0, top_k=1),
    "top_k_all": SamplingParams(temperature=1.0, top_k=VOCAB),
    "top_k_beyond": SamplingParams(temperature=1.0, top_k=10 * VOCAB),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "top_p_tiny": SamplingParams(temperature=1.0, top_p=1e-6),
    "top_p_nearly_1": SamplingParams(temperature=2.0, top_p=0.9999),
    "min_p": SamplingParams(temperature=1.3, min_p=0.1),
    "min_p_1": SamplingParams(temperature=1.3, min_p=1.0),
    "all_truncations": SamplingParams(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02),
    "top_p_and_min_p": SamplingParams(temperature=2.5, top_p=0.99, min_p=0.2),
    "min_p_behind_top_k_and_top_p": SamplingParams(temperature=2.5, top_k=60, top_p=0.7, min_p=0.15),
    "bad_words": SamplingParams(temperature=1.0, bad_words=((3,), (1, 2), *((a, a + 1) for a in range(9)))),
    "bad_words_greedy": SamplingParams(bad_words=tuple((a, b) for a in range(9) for b in range(0, VOCAB, 2))),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(4, 20, 21, 150)),
    "allowed_greedy": SamplingParams(allowed_token_ids=(9, 150, 3)),
    "allowed_of_the_likeliest": SamplingParams(temperature=1.0, top_k=3, allowed_token_ids=tuple(range(0, VOCAB, 2))),
    "typical_p": SamplingParams(temperature=1.0, typical_p=0.5),
    "typical_p_tiny": SamplingParams(temperature=1.0, typical_p=1e-6),
    "all_warpers": SamplingParams(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02, typical_p=0.7),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "repetition_reward": SamplingParams(temperature=1.0, repetition_penalty=0.6),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "presence": SamplingParams(temperature=1.0, presence_penalty=-1.5),
    "bias": SamplingParams(logit_bias=((3, 5.0), (7, -100.0), (159, 2.5))),
    "everything": SamplingParams(
        temperature=1.1,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias=((1, 4.0), (2, -3.0)),
    ),
}


class Batch:
    """Rows with random histories, and their logits in float64."""

    def __init__(self, params: list[SamplingParams], seed: int, vocab_size: int = VOCAB) -> None:
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.sequences: list[NewSequence] = []
        self.histories: list[list[int]] = []
        self.tokens = torch.randint(0, vocab_size, (len(params), 64), generator=generator)  # garbage past the history
        self.logits = torch.randn(len(params), vocab_size, generator=generator, dtype=torch.float64) * 2.5
        for row, one in enumerate(params):
            prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 12))]
            output = [rng.randrange(min(vocab_size, 9)) for _ in range(rng.randint(0, 20))]
            banned = frozenset(rng.sample(range(vocab_size), 3)) if rng.random() < 0.3 else frozenset[int]()
            min_tokens = rng.choice([0, 3, 40])
            seeded = replace(one, seed=rng.getrandbits(64))
            self.sequences.append(sequence(prompt, seeded, row=row, min_tokens=min_tokens, banned=banned))
            self.histories.append(prompt + output)
            self.tokens[row, : len(self.histories[row])] = torch.tensor(self.histories[row])

    def sampler(self) -> Sampler:
        sampler = Sampler(len(self.sequences), self.logits.shape[1], "cpu")
        for new in self.sequences:
            sampler.set_row(new.row, new)
        return sampler

    def sample(self, sampler: Sampler, rows: list[int] | None = None, logits: Tensor | None = None) -> HostSampled:
        rows = list(range(len(self.sequences))) if rows is None else rows
        logits = self.logits[rows] if logits is None else logits
        return sampler.sample(logits, rows, [len(self.histories[r]) for r in rows], self.tokens).to_host()

    def expected(self, row: int) -> int:
        return drawn(self.logits[row], self.sequences[row], self.histories[row])


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("vocab_size", [VOCAB, 3001])
def test_equals_transformers(name: str, vocab_size: int) -> None:
    batch = Batch([PARAMS[name]] * 25, seed=len(name), vocab_size=vocab_size)
    expected = [batch.expected(row) for row in range(25)]
    assert list(batch.sample(batch.sampler()).token_ids) == expected


@pytest.mark.parametrize("vocab_size", [VOCAB, 3001])
def test_mixed_batch_equals_transformers_and_each_row_alone(vocab_size: int) -> None:
    batch = Batch(list(PARAMS.values()) * 2, seed=5, vocab_size=vocab_size)
    sampler, num_rows = batch.sampler(), len(batch.sequences)
    expected = [batch.expected(row) for row in range(num_rows)]
    before = batch.logits.clone()
    assert list(batch.sample(sampler).token_ids) == expected
    assert torch.equal(batch.logits, before), "the caller's logits were changed"
    assert [batch.sample(sampler, [row]).token_ids[0] for row in range(num_rows)] == expected
    order = random.Random(0).sample(range(num_rows), num_rows)
    assert list(batch.sample(sampler, order).token_ids) == [expected[row] for row in order]


def test_draws_have_the_distribution_of_transformers() -> None:
    """Counts over many positions follow the processed scores' softmax: more than the same arithmetic."""
    n, vocab_size = 40_000, 32
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.93, seed=8)
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    new = sequence([1], params)
    p = processed(logits.double(), new, [1]).softmax(0)
    assert 0 < int((p == 0).sum()) < vocab_size
    sampler = Sampler(1, vocab_size, "cpu")
    sampler.set_row(0, new)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    ids = sampler.sample(logits.expand(n, -1), [0] * n, list(range(1, n + 1)), tokens).token_ids
    counts = torch.bincount(ids, minlength=vocab_size).double()
    assert int(counts[p == 0].sum()) == 0
    expected = n * p[p > 0]
    statistic = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    free = len(expected) - 1
    assert statistic < free + 6 * math.sqrt(2 * free)


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for vocab_size in (5, 160, 1111, 5000):
            logits = torch.zeros(4, vocab_size, dtype=dtype)
            logits[0] = 1.0
            logits[1, vocab_size // 2 :] = 2.0
            logits[2, -1] = 1.0
            logits[3, [1, vocab_size - 1]] = 0.5
            sampler = Sampler(4, vocab_size, "cpu")
            ids = sampler.sample(logits, range(4), [1] * 4, torch.zeros(4, 4, dtype=torch.int64)).to_host().token_ids
            assert ids == (0, vocab_size // 2, vocab_size - 1, 1), (dtype, vocab_size)


def test_ties_at_a_threshold_are_all_kept() -> None:
    """Seven equal tokens at the edge: none of them depends on the order in which a device sorts."""
    vocab_size, n = 600, 2000
    logits = torch.full((1, vocab_size), -20.0)
    tied = torch.arange(40, 600, 80)
    logits[0, tied], logits[0, 0] = 1.0, 1.5
    for params in (SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1.0, top_p=0.3)):
        sampler = Sampler(1, vocab_size, "cpu")
        sampler.set_row(0, sequence([1], params))
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        ids = sampler.sample(logits.expand(n, -1), [0] * n, list(range(1, n + 1)), tokens).token_ids
        counts = torch.bincount(ids, minlength=vocab_size)
        assert set(counts.nonzero().squeeze(1).tolist()) == {0, *tied.tolist()}
        assert float(counts[tied].min()) > 0.7 * float(counts[tied].float().mean())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bad_logits_hurt_their_own_row_only(bad: float, dtype: torch.dtype) -> None:
    batch = Batch(list(PARAMS.values()), seed=9, vocab_size=1500)
    num_rows = len(batch.sequences)
    logits = batch.logits.to(dtype)
    expected = batch.sample(batch.sampler(), logits=logits)
    assert not any(expected.is_bad)
    broken = list(range(0, num_rows, 3))
    sick = logits.clone()
    for row in broken:
        sick[row, slice(None) if bad == -math.inf else row * 7] = bad
    found = batch.sample(batch.sampler(), logits=sick)
    assert [row for row in range(num_rows) if found.is_bad[row]] == broken
    positions = [len(history) for history in batch.histories]
    on_device = batch.sampler().sample(sick, range(num_rows), positions, batch.tokens)
    assert on_device.bad_rows.nonzero().squeeze(1).tolist() == broken
    assert set(on_device.token_ids[broken].tolist()) == {0}, "what the next step would look up"
    healthy = [row for row in range(num_rows) if row not in broken]
    assert [found.token_ids[row] for row in healthy] == [expected.token_ids[row] for row in healthy]


def test_a_row_whose_tokens_are_all_banned_is_bad() -> None:
    sampler = Sampler(2, 4, "cpu")
    sampler.set_row(0, sequence([1], min_tokens=2, banned=frozenset(range(4))))
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    found = sampler.sample(torch.zeros(2, 4), [0, 1], [1, 1], tokens).to_host()
    assert found.is_bad == (True, False)
    assert found.without_token == {0}
    sampler.set_row(0, sequence([1], min_tokens=2, banned=frozenset({0})))
    found = sampler.sample(torch.full((2, 4), math.nan), [0, 1], [1, 1], tokens).to_host()
    assert found.is_bad == (True, True)
    assert found.without_token == set(), "NaN is the model's"


def test_bans_end_with_min_tokens_and_ids_beyond_the_vocabulary_are_harmless() -> None:
    sampler = Sampler(1, 6, "cpu")
    params = SamplingParams(logit_bias=((6, 5.0), (2, 1.0)))
    sampler.set_row(0, sequence([1, 1], params, min_tokens=2, banned=frozenset({5, 77})))
    logits, tokens = torch.tensor([[0.0, 0, 0, 0, 0, 9]]), torch.zeros(1, 8, dtype=torch.int64)
    found = [sampler.sample(logits, [0], [position], tokens).to_host().token_ids[0] for position in (2, 3, 4)]
    assert found == [2, 2, 5]


def test_a_cleared_row_is_plain_again() -> None:
    sampler = Sampler(1, 6, "cpu")
    output = OutputParams(logprobs=True, top_logprobs=2)
    params = SamplingParams(temperature=1.0, top_k=2, repetition_penalty=3.0, logit_bias=((4, 50.0),))
    sampler.set_row(0, sequence([1], params, output=output, min_tokens=5, banned=frozenset({3})))
    logits, tokens = torch.tensor([[0.0, 0, 0, 9, 0, 0]]), torch.ones(1, 8, dtype=torch.int64)
    assert sampler.sample(logits, [0], [1], tokens).to_host().token_ids == (4,)
    for _ in range(2):
        sampler.clear_row(0)
    found = sampler.sample(logits, [0], [1], tokens).to_host()
    assert found.token_ids == (3,)
    assert found.logprobs == (None,)


def test_history_ends_before_the_sampled_position() -> None:
    """Drafts stand behind the known tokens: each position sees those before it, and not its own or later ones."""
    vocab_size = 40
    logits = torch.randn(1, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = logits.abs()  # so that a penalty can only lower
    history = [3, 5, 7, 9, 11, 13, 15]
    tokens = torch.tensor([history])
    params = SamplingParams(repetition_penalty=4.0, frequency_penalty=1.0, presence_penalty=0.5)
    new = sequence(history[:2], params)
    sampler = Sampler(1, vocab_size, "cpu")
    sampler.set_row(0, new)
    positions = [3, 4, 5, 6, 7]
    ids = sampler.sample(logits.expand(5, -1), [0] * 5, positions, tokens).to_host().token_ids
    assert list(ids) == [drawn(logits[0], new, history[:position]) for position in positions]


def test_inputs_may_be_tensors_and_empty() -> None:
    batch = Batch(list(PARAMS.values()), seed=2)
    rows = torch.arange(len(batch.sequences))
    positions = torch.tensor([len(history) for history in batch.histories])
    sampler = batch.sampler()
    found = sampler.sample(batch.logits, rows, positions, batch.tokens.to(torch.int32)).to_host()
    assert found == batch.sample(sampler)
    assert sampler.sample(batch.logits[:0], [], [], batch.tokens).to_host() == HostSampled((), (), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_draws_from_what_it_holds(dtype: torch.dtype) -> None:
    """The same tokens as from a float64 copy of the rounded logits, but for rounding in the last step."""
    batch = Batch(list(PARAMS.values()) * 4, seed=4, vocab_size=700)
    rounded = batch.logits.to(dtype)
    batch.logits = rounded.double()
    found = batch.sample(batch.sampler(), logits=rounded).token_ids
    exact = batch.sample(batch.sampler()).token_ids
    assert sum(a != b for a, b in zip(found, exact, strict=True)) <= 1


def test_logprobs_are_the_models_own() -> None:
    """Logprobs are those of raw logits, only for rows that ask, best alternatives first, whatever changes the
    scores."""
    batch = Batch(list(PARAMS.values()), seed=12, vocab_size=600)
    wants = {row: row % 4 for row in range(0, len(batch.sequences), 2)}
    for row, num_top in wants.items():
        output = OutputParams(logprobs=True, top_logprobs=num_top)
        batch.sequences[row] = replace(batch.sequences[row], output=output)
    found = batch.sample(batch.sampler())
    reference = batch.logits.log_softmax(-1)
    for row, logprobs in enumerate(found.logprobs):
        if row not in wants:
            assert logprobs is None
            continue
        assert logprobs is not None
        assert logprobs.token_id == found.token_ids[row]
        assert logprobs.logprob == pytest.approx(float(reference[row, logprobs.token_id]), abs=1e-12)
        best = reference[row].topk(wants[row])
        assert [token_id for token_id, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-12)


def test_logprobs_of_a_bad_row_are_none() -> None:
    sampler = Sampler(2, 8, "cpu")
    for row in range(2):
        sampler.set_row(row, sequence([1], row=row, output=OutputParams(logprobs=True)))
    logits = torch.zeros(2, 8)
    logits[0, 3] = math.nan
    found = sampler.sample(logits, [0, 1], [1, 1], torch.zeros(2, 4, dtype=torch.int64)).to_host()
    assert found.logprobs[0] is None
    assert found.logprobs[1] is not None
    assert found.logprobs[1].logprob == pytest.approx(-math.log(8))


def test_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    next_tokens = torch.arange(9, dtype=torch.int32) * 5
    reference = logits.log_softmax(-1)
    found = prompt_logprobs(logits, next_tokens, 3).to_host()
    for i, one in enumerate(found):
        assert one.token_id == 5 * i
        assert one.logprob == pytest.approx(float(reference[i, 5 * i]), abs=1e-12)
        assert [token_id for token_id, _ in one.top] == reference[i].topk(3).indices.tolist()
    monkeypatch.setattr(module, "_MAX_ELEMENTS", 120)
    assert prompt_logprobs(logits, next_tokens, 3).to_host() == found
    assert all(one.top == () for one in prompt_logprobs(logits, next_tokens, 0).to_host())
    assert prompt_logprobs(logits[:0], next_tokens[:0], 3).to_host() == ()


def test_low_precision_is_computed_in_float32() -> None:
    logits = (torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)) * 8).bfloat16()
    ids = logits.argmax(1)
    found = compute_logprobs(logits, ids, [0] * 4).values
    assert found.dtype == torch.float32
    assert torch.allclose(found, logits.float().log_softmax(1).gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-6)
    certain = torch.full((1, 3000), -50.0)
    certain[0, 7] = 20.0
    assert prompt_logprobs(certain, torch.tensor([7]), 1).to_host()[0].logprob == 0.0


def test_alternatives_stop_at_the_vocabulary_and_ties_come_by_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    (found,) = compute_logprobs(logits, torch.tensor([0]), [20]).to_host()
    assert [token_id for token_id, _ in found.top] == [1, 2, 3, 0]
    assert math.fsum(math.exp(value) for _, value in found.top) == pytest.approx(1.0)


def test_without_alternatives_nothing_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    for name in ("sort", "topk", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    found = compute_logprobs(torch.randn(4, 12), torch.arange(4), [0] * 4).to_host()
    assert [one.top for one in found] == [()] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_alternatives_do_not_depend_on_how_many_others_want(dtype: torch.dtype) -> None:
    """bfloat16 has many equal logits, and some are negative zeros or banned."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 1003, generator=generator) * 2).bfloat16().to(dtype)
    logits[:, 5], logits[:, 9], logits[3, 20:] = -0.0, 0.0, -torch.inf
    ids = logits.argmax(1)
    both = compute_logprobs(logits, ids, [3, 20] * 32).to_host()
    for row, found in enumerate(both):
        num = (3, 20)[row % 2]
        (alone,) = compute_logprobs(logits[row : row + 1], ids[row : row + 1], [num]).to_host()
        assert alone == found
        ordered = logits[row].float().sort(descending=True, stable=True).indices[:num].tolist()
        assert [token_id for token_id, _ in found.top] == ordered
        assert found.top[0][0] == int(ids[row])
    if dtype != torch.float64:
        assert torch.equal(highest_ids(logits.float(), 20), highest_by_keys(logits.float(), 20))
    assert highest_ids(torch.full((2, 8), torch.nan, dtype=dtype), 3).shape == (2, 3)  # a bad row's are not looked at


def test_prompt_logprobs_travel_with_the_samples() -> None:
    sampler = Sampler(2, 12, "cpu")
    sampler.set_row(1, sequence([1], SamplingParams(temperature=1.0), output=OutputParams(True, 2)))
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    sampled = sampler.sample(logits, [0, 1], [1, 1], torch.ones(2, 4, dtype=torch.int64))
    first, second = prompt_logprobs(logits, torch.tensor([4, 5]), 3), prompt_logprobs(logits[:1], torch.tensor([0]), 0)
    together = replace(sampled, others=(first, second)).to_host()
    assert together.others == (first.to_host(), second.to_host())
    alone = sampled.to_host()
    assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)
    assert together.logprobs[0] is None
    assert together.logprobs[1] is not None
    assert replace(sampled, others=(second,)).to_host().others == (second.to_host(),)
