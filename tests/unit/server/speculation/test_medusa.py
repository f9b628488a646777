"""Medusa proposer on real models."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from support.dense import greedy, make_dense
from support.driver import Job, Rig, make_rig, random_prompts
from support.medusa_cases import best_token, expected_draft, head_logits, head_weights, last_hidden, random_head
from support.zoo import VOCAB_SIZE, random_model
from transformers import PreTrainedModel

from loraplex_adapters.weights import AdapterWeights, LoraFactors, MedusaHead
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import AdapterUse, Candidate, StepPlan
from loraplex_contracts.request import Request, SpeculationParams, StoppingParams
from loraplex_server.backends.cpu.torch_lora import CpuDense
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.medusa_heads import HeadSlots
from loraplex_server.speculation.medusa import MedusaProposer
from loraplex_server.speculation.proposer import MEDUSA, Ask, Proposer

NUM_TOKENS = 12
MAX_DRAFT = 4
FAMILIES = ("llama", "gemma", "mistral", "mixtral", "gemma2", "cohere")


class FakeCache:
    """Lends what is in its slots."""

    def __init__(self) -> None:
        self.slots: dict[AdapterKey, int] = {}
        self.wanted: list[AdapterKey] = []

    def borrow(self, key: AdapterKey) -> int | None:
        self.wanted.append(key)
        return self.slots.get(key)


class Bench:
    """A rig whose sequences keep their hidden states, with heads in slots, and a proposer."""

    def __init__(self, family: str, seed: int = 0) -> None:
        self.model = make_dense(random_model(family))
        self.rig: Rig = make_rig(adopt_model(copy.deepcopy(self.model)), seed=seed)
        self.cache = FakeCache()
        self.heads = HeadSlots(self.rig.loaded, self.rig.slots, CpuDense())
        self.proposer = MedusaProposer(self.rig.runner, self.cache, self.heads)
        execute = self.rig.runner.execute

        def keeping(plan: StepPlan) -> object:
            entered = tuple(replace(sequence, keeps_hidden=True) for sequence in plan.entered)
            return execute(replace(plan, entered=entered))

        self.rig.runner.execute = keeping  # type: ignore[assignment, method-assign]

    def install(self, slot: int, weights: AdapterWeights) -> AdapterKey:
        self.rig.slots.install(slot, weights)
        self.heads.install(slot, weights)
        self.cache.slots[weights.key] = slot
        return weights.key


def ask_for(job: Job, key: AdapterKey | None, num_tokens: int = MAX_DRAFT) -> Ask:
    request = Request(job.sequence_id, tuple(job.prompt), StoppingParams(job.num_tokens))
    slot = job.adapters[0].adapter_slot if job.adapters else None
    candidate = Candidate(job.sequence_id, job.row, job.all_tokens, len(job.prompt), 99, request, job.sampling, slot)
    return Ask(candidate, num_tokens, SpeculationParams(kind="medusa"), key)


def expected(model: PreTrainedModel, heads: Sequence[MedusaHead], job: Job, num_tokens: int) -> tuple[int, ...]:
    """The latest token was made of the state of the one before it."""
    head = model.get_output_embeddings()
    assert head is not None
    return expected_draft(heads, head, last_hidden(model, job.all_tokens[:-1]), num_tokens)


def hidden_size(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    assert head is not None
    return int(head.weight.shape[1])


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_heads_on_transformers_hidden_states(family: str) -> None:
    """Before every step of texts whose drafts were accepted whole, in part or not at all, in chunks and in company."""
    bench = Bench(family)
    model, width = bench.model, hidden_size(bench.model)
    sets = [
        [random_head(width) for _ in range(3)],
        [random_head(width, 2, num_rows=VOCAB_SIZE) for _ in range(4)],
    ]
    keys = [bench.install(slot, head_weights(str(slot), heads)) for slot, heads in enumerate(sets)]
    dice = random.Random(1)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in random_prompts(5, VOCAB_SIZE, seed=4)]
    texts = [greedy(model, job.prompt, NUM_TOKENS) for job in jobs]
    num_checked = 0

    def propose(job: Job, which: int, text: Sequence[int]) -> list[int]:
        nonlocal num_checked
        num_tokens = dice.randint(1, 5)
        drafts = bench.proposer.propose([ask_for(job, keys[which], num_tokens)])
        assert list(drafts) == [expected(model, sets[which], job, num_tokens)]
        num_checked += 1
        # What is verified is another draft, so that any number of its tokens is accepted.
        right = list(text[len(job.tokens) : len(job.tokens) + dice.randint(0, MAX_DRAFT)])
        wrong = [(token + 1) % VOCAB_SIZE for token in text[len(job.tokens) + len(right) :]]
        return (right + wrong)[:MAX_DRAFT]

    for i, (job, text) in enumerate(zip(jobs, texts, strict=True)):
        job.propose = lambda _, job=job, which=i % 2, text=text: propose(job, which, text)
    bench.rig.run(jobs)
    assert [job.tokens for job in jobs] == texts
    assert num_checked >= 12
    assert 0 < sum(job.num_accepted for job in jobs) < MAX_DRAFT * num_checked


@pytest.mark.parametrize("family", ["llama", "gemma", "mixtral"])
def test_a_mixed_batch_equals_one_at_a_time(family: str) -> None:
    """Sets of other lengths, depths and vocabularies, a LoRA on one row, heads not there, and none: before every step,
    for all rows at once; the heads' own drafts are what is verified, and change no text."""
    bench = Bench(family)
    model, width = bench.model, hidden_size(bench.model)
    sets: list[list[MedusaHead]] = [
        [random_head(width) for _ in range(3)],
        [random_head(width, 2, num_rows=40, vocab_size=VOCAB_SIZE) for _ in range(2)],
        [random_head(width, 1, num_rows=VOCAB_SIZE), random_head(width, 0), random_head(width, 3)],
    ]
    keys: list[AdapterKey | None] = [
        bench.install(slot + 1, head_weights(str(slot), heads)) for slot, heads in enumerate(sets)
    ]
    keys += [None, AdapterKey("medusa", "f" * 64)]
    jobs = [Job(prompt, NUM_TOKENS) for prompt in random_prompts(5, VOCAB_SIZE, seed=8)]
    texts = [greedy(model, job.prompt, NUM_TOKENS) for job in jobs]
    largest = 0

    def look(plan: StepPlan) -> None:
        nonlocal largest
        ids = {span.sequence_id for span in plan.spans}
        ready = [(job, which) for which, job in enumerate(jobs) if job.tokens and job.sequence_id in ids]
        asks = [ask_for(job, keys[which], 1 + which) for job, which in ready]
        drafts = bench.proposer.propose(asks)
        assert len(drafts) == len(asks)
        for ask, draft, (job, which) in zip(asks, drafts, ready, strict=True):
            assert list(bench.proposer.propose([ask])) == [draft]
            heads = sets[which] if which < len(sets) else []
            assert draft == expected(model, heads, job, 1 + which)
        largest = max(largest, len(ready))

    bench.rig.on_plan = look
    for job, key in zip(jobs, keys, strict=True):
        job.propose = lambda _, job=job, key=key: list(bench.proposer.propose([ask_for(job, key)])[0])
    bench.rig.run(jobs)
    assert [job.tokens for job in jobs] == texts
    assert largest >= 4


def test_lora_and_heads_on_one_request() -> None:
    """A combined adapter: the hidden state is the adapted model's, and the shared head has the adapter's part."""
    bench = Bench("llama")
    width = hidden_size(bench.model)
    factors: Mapping[str, LoraFactors] = {
        path: LoraFactors(torch.randn(4, width).double(), torch.randn(outputs, 4).double() * 0.1, 0.5)
        for path, outputs in (("lm_head", VOCAB_SIZE), ("model.layers.1.self_attn.q_proj", width))
    }
    heads = [random_head(width) for _ in range(3)]
    key = bench.install(2, head_weights("c", heads, dict(factors)))
    merged = copy.deepcopy(bench.model)
    for path, lora in factors.items():
        cast(torch.Tensor, merged.get_submodule(path).weight).data += lora.scale * lora.b @ lora.a
    jobs = [Job(prompt, NUM_TOKENS, (AdapterUse(2),) * (i % 2)) for i, prompt in enumerate(random_prompts(4, 101))]
    num_different = 0

    def propose(job: Job) -> list[int]:
        nonlocal num_different
        draft = bench.proposer.propose([ask_for(job, key)])[0]
        assert draft == expected(merged if job.adapters else bench.model, heads, job, MAX_DRAFT)
        num_different += draft != expected(bench.model, heads, job, MAX_DRAFT)
        return list(draft)

    for job in jobs:
        job.propose = lambda _, job=job: propose(job)
    bench.rig.run(jobs)
    for job in jobs:
        assert job.tokens == greedy(merged if job.adapters else bench.model, job.prompt, NUM_TOKENS)
    assert num_different > 0


def test_right_heads_are_accepted() -> None:
    """Heads that know what follows one text: all their tokens come out, three to a step."""
    bench = Bench("llama")
    prompt = random_prompts(2, VOCAB_SIZE, seed=12)[1]
    text = greedy(bench.model, prompt, NUM_TOKENS)
    whole = prompt + text
    width = hidden_size(bench.model)
    # Projections fitted to the states of this text: head i names the token 2 + i places on.
    states = torch.stack([last_hidden(bench.model, whole[: i + 1]) for i in range(len(prompt) - 1, len(whole) - 1)])
    heads: list[MedusaHead] = []
    for i in range(2):
        goals = [*text[1 + i :], *[0] * (1 + i)]
        wanted = torch.nn.functional.one_hot(torch.tensor(goals), VOCAB_SIZE).double()
        heads.append(MedusaHead((), torch.linalg.lstsq(states, wanted).solution.T.contiguous()))
        assert all(
            best_token(heads[i], head_logits(heads[i], torch.nn.Identity(), states[j])) == goals[j] for j in range(8)
        )
    assert width >= NUM_TOKENS
    key = bench.install(0, head_weights("0", heads))
    job = Job(prompt, NUM_TOKENS)
    job.propose = lambda _: list(bench.proposer.propose([ask_for(job, key)])[0])
    bench.rig.run([job])
    assert job.tokens == text
    assert job.num_accepted == 7  # 12 tokens: one of the prefill, then 3, 3, 3 and 2


# --- by itself --------------------------------------------------------------------------------------------------------


class FakeRunner:
    """Hidden states by row."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states
        self.rows: list[int] = []
        self.without: set[int] = set()

    def has_hidden(self, row: int) -> bool:
        return row not in self.without

    def last_hidden(self, rows: Sequence[int]) -> torch.Tensor:
        self.rows += rows
        return self.states[list(rows)]


def small() -> tuple[HeadSlots, FakeRunner, FakeCache, list[MedusaHead], AdapterKey]:
    loaded = adopt_model(random_model("llama"), verify=False)
    slots = HeadSlots(loaded, make_rig(loaded).slots, CpuDense())
    heads = [random_head(32) for _ in range(2)]
    weights = head_weights("0", heads)
    slots.install(5, weights)
    cache = FakeCache()
    cache.slots[weights.key] = 5
    return slots, FakeRunner(torch.randn(8, 32).double()), cache, heads, weights.key


def job_in(row: int) -> Job:
    return Job([3, 4], 9, row=row, tokens=[5])


def test_it_is_a_proposer_without_memory() -> None:
    slots, runner, cache, _, key = small()
    proposer: Proposer = MedusaProposer(runner, cache, slots)
    assert proposer.name == MEDUSA
    ask = ask_for(job_in(4), key)
    first = proposer.propose([ask])
    proposer.end(ask.candidate.sequence_id)
    proposer.end("unknown")
    assert list(proposer.propose([ask])) == list(first)
    assert runner.rows == [4, 4]
    proposer.close()


def test_a_row_that_still_computes_its_prompt_costs_nobody_else_a_draft() -> None:
    slots, runner, cache, _, key = small()
    proposer = MedusaProposer(runner, cache, slots)
    runner.without = {3}
    before, at_prompt, behind = proposer.propose([ask_for(job_in(row), key) for row in (2, 3, 4)])
    assert before
    assert behind
    assert not at_prompt
    assert runner.rows == [2, 4]


def test_one_loan_for_a_key_and_no_work_without_heads() -> None:
    slots, runner, cache, heads, key = small()
    missing = AdapterKey("medusa", "e" * 64)
    lora_only = AdapterKey("lora", "d" * 64)
    cache.slots[lora_only] = 1
    proposer = MedusaProposer(runner, cache, slots)
    asks = [ask_for(job_in(row), heads_key) for row, heads_key in enumerate([missing, key, None, key, lora_only])]
    drafts = proposer.propose(asks)
    assert [len(draft) for draft in drafts] == [0, 2, 0, 2, 0]
    assert sorted(map(str, cache.wanted)) == sorted(map(str, {missing, key, lora_only}))
    assert runner.rows == [1, 3]
    assert list(proposer.propose([asks[0], asks[2], asks[4]])) == [(), (), ()]
    assert list(proposer.propose([])) == []
    assert runner.rows == [1, 3]
    assert drafts[1] == expected_draft(heads, slots._head, runner.states[1], MAX_DRAFT)  # pyright: ignore[reportPrivateUsage]


def test_bad_heads_and_bad_keys_cost_their_own_draft_only(caplog: pytest.LogCaptureFixture) -> None:
    slots, runner, cache, _, key = small()
    broken = [random_head(32), random_head(32)]
    broken[0].blocks[0].weight[1, 1] = float("nan")
    bad = head_weights("b", broken)
    slots.install(0, bad)
    cache.slots[bad.key] = 0
    runner.states[6] = float("nan")
    stranger = AdapterKey("medusa", "9" * 64)
    lend = cache.borrow

    def borrow(wanted: AdapterKey) -> int | None:
        if wanted == stranger:
            raise KeyError(wanted)
        return lend(wanted)

    cache.borrow = borrow  # type: ignore[method-assign]
    proposer = MedusaProposer(runner, cache, slots)
    asks = [ask_for(job_in(row), k) for row, k in ((1, key), (2, bad.key), (6, key), (3, stranger), (4, key))]
    drafts = proposer.propose(asks)
    assert [len(draft) for draft in drafts] == [2, 0, 0, 0, 2]
    assert "cannot be used" in caplog.text
    # Heads that were unloaded while they serve are asked for in every step, and stay so.
    assert [len(draft) for draft in proposer.propose(asks)] == [2, 0, 0, 0, 2]
    assert caplog.text.count("cannot be used") == 1
