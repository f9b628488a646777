"""Medusa proposer on real models."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from support.dense import greedy, make_dense
from support.driver import Job, Rig, make_rig, random_prompts
from support.medusa_cases import best_token, expected_draft, head_logits, head_weights, last_hidden, random_head
from support.zoo import VOCAB_SIZE, random_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from loraplex_adapters.weights import AdapterWeights, LoraFactors, MedusaHead, ResidualLayer
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import AdapterUse, Candidate, StepPlan
from loraplex_contracts.request import Request, SpeculationParams, StoppingParams
from loraplex_server.backends.cpu.torch_lora import CpuDense, CpuOps
from loraplex_server.backends.cuda.lora.plan import MANY_ROWS, SOME_ROWS, choose_dense_rows
from loraplex_server.backends.reference import ReferenceDense, ReferenceOps
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.lora import DenseTable, PreparedSegments, Segment, SegmentedDense, SegmentedLora
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import adopt_model
from loraplex_server.speculation import proposer as module
from loraplex_server.speculation.medusa import HeadAsk, HeadSlots, MedusaProposer
from loraplex_server.speculation.proposer import MEDUSA, Ask, Piece, Proposer

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


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_heads_on_transformers_hidden_states(family: str) -> None:
    """Drafts are compared before every step of texts whose drafts were accepted whole, in part or not at all, in chunks
    and in a batch."""
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


def test_every_size_of_block_of_the_products_comes_up() -> None:
    loaded = adopt_model(random_model("llama"))
    sizes: list[int] = []

    class Dense(CpuDense):
        def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
            super().apply(y, x, table, prepared)
            assert not y.any()
            sizes.append(choose_dense_rows(len(x)))

    slots = HeadSlots(loaded, make_rig(loaded).slots, Dense())
    slots.warm_up()
    assert sizes == [SOME_ROWS, MANY_ROWS]


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


def test_no_more_is_promised_than_there_are_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is known once they have been borrowed."""
    monkeypatch.setattr(module, "MAX_KNOWN", 1)
    slots, runner, cache, heads, key = small()
    proposer = MedusaProposer(runner, cache, slots)
    ask = ask_for(job_in(4), key)
    assert list(proposer.pieces(ask)) == [Piece("own", MAX_DRAFT)]
    (draft,) = proposer.propose([ask])
    assert list(proposer.pieces(ask)) == [Piece("own", len(heads))] == [Piece("own", len(draft))]
    assert list(proposer.pieces(ask._replace(num_tokens=1))) == [Piece("own", 1)]
    more = head_weights("more", [random_head(32) for _ in range(3)])
    slots.install(2, more)
    cache.slots[more.key] = 2
    proposer.propose([ask_for(job_in(4), more.key)])
    assert list(proposer.pieces(ask_for(job_in(4), more.key))) == [Piece("own", 3)]
    assert len(proposer._num_heads) == 1  # pyright: ignore[reportPrivateUsage]


def test_bad_heads_and_bad_keys_cost_their_own_draft_only(caplog: pytest.LogCaptureFixture) -> None:
    slots, runner, cache, _, key = small()
    broken = [random_head(32), random_head(32)]
    broken[0].layers[0].weight[1, 1] = float("nan")
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


HIDDEN = 32
NUM_SLOTS = 6


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))
    random.seed(request.node.name)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model("llama")


@pytest.fixture
def loaded(model: PreTrainedModel) -> LoadedModel:
    return adopt_model(copy.deepcopy(model), verify=False)


class CountingDense:
    """Keeps what it was asked to do."""

    def __init__(self) -> None:
        self.inner = CpuDense()
        self.applied: list[PreparedSegments] = []

    @property
    def name(self) -> str:
        return "counting"

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        return self.inner.prepare(segments, num_rows, num_slots, device)

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        self.applied.append(prepared)
        self.inner.apply(y, x, table, prepared)


def make_slots(
    loaded: LoadedModel, dense: SegmentedDense | None = None, ops: SegmentedLora | None = None
) -> tuple[HeadSlots, AdapterSlots]:
    slots = loaded.adapter_slots(ops or ReferenceOps(), NUM_SLOTS)
    return HeadSlots(loaded, slots, dense or ReferenceDense()), slots


def lm_head(model: PreTrainedModel) -> nn.Module:
    return cast(nn.Module, model.get_output_embeddings())


def states(num: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(num, HIDDEN, dtype=torch.float64).to(dtype)


def all_kinds() -> list[tuple[MedusaHead, ...]]:
    """One set per slot: numbers of heads and blocks, own and shared projections, vocabularies, no bias, no block."""
    deep = tuple(random_head(HIDDEN, num_blocks) for num_blocks in (0, 2, 3))
    truncated = tuple(random_head(HIDDEN, num_rows=40, vocab_size=VOCAB_SIZE) for _ in range(2))
    mixed = (
        random_head(HIDDEN, 2, num_rows=VOCAB_SIZE),
        random_head(HIDDEN, 1, has_bias=False),
        random_head(HIDDEN, 1, num_rows=17, vocab_size=VOCAB_SIZE),
        random_head(HIDDEN, 0, num_rows=50),
    )
    return [
        tuple(random_head(HIDDEN) for _ in range(4)),
        tuple(random_head(HIDDEN, num_rows=VOCAB_SIZE) for _ in range(3)),
        deep,
        truncated,
        mixed,
        tuple(random_head(HIDDEN) for _ in range(7)),
    ]


# --- guesses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [ReferenceDense(), CpuDense()], ids=lambda dense: dense.name)
def test_every_kind_in_one_batch(model: PreTrainedModel, loaded: LoadedModel, dense: SegmentedDense) -> None:
    """Each guess is what its head alone makes of its row; rows in any order, several of a set, asks of any length."""
    slots, _ = make_slots(loaded, dense)
    sets = all_kinds()
    for slot, heads in enumerate(sets):
        slots.install(slot, head_weights(str(slot), heads))
    asks = [HeadAsk(slot, random.randint(1, 8)) for slot in range(NUM_SLOTS) for _ in range(random.randint(1, 4))]
    random.shuffle(asks)
    hidden = states(len(asks))
    before = hidden.clone()
    got = slots.guess(hidden, asks)
    for row, ask in enumerate(asks):
        want = expected_draft(sets[ask.adapter_slot], lm_head(model), hidden[row], ask.num_tokens)
        assert got[row] == want, (row, ask)
        assert len(want) == min(ask.num_tokens, len(sets[ask.adapter_slot]))
        assert slots.guess(hidden[row : row + 1], [ask]) == [want]
    assert torch.equal(hidden, before)


def test_one_product_per_layer_whoever_asks(loaded: LoadedModel) -> None:
    """Two block layers and the own projections; rows only of heads that somebody wants."""
    dense = CountingDense()
    slots, _ = make_slots(loaded, dense)
    slots.install(0, head_weights("0", [random_head(HIDDEN, 2) for _ in range(5)]))
    slots.install(1, head_weights("1", [random_head(HIDDEN, 1, num_rows=60) for _ in range(3)]))
    asks = [HeadAsk(i % 2, 1 + i % 3) for i in range(24)]
    slots.guess(states(24), asks)
    deep = sum(ask.num_tokens for ask in asks if ask.adapter_slot == 0)
    own = sum(ask.num_tokens for ask in asks if ask.adapter_slot == 1)
    assert [prepared.num_rows for prepared in dense.applied] == [deep + own, deep, own]
    assert all(len(prepared.segments) <= 6 for prepared in dense.applied)


class Nothing(CountingDense):
    """Launches one kernel, in which nothing happens."""

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        self.applied.append(prepared)
        y.zero_()


class Launches(TorchDispatchMode):
    """Counts operations, but for those that only look at memory in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").partition(".")[0]
        if not func.is_view and name not in ("empty", "empty_like", "detach", "_to_copy", "lift_fresh"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, in one launch as on CUDA."""
    best = logits.max(dim=-1)
    return best.values, best.indices


def test_a_guess_is_few_launches_however_many_heads_guess(loaded: LoadedModel) -> None:
    """The launches are so few that a CUDA graph would save nothing."""
    slots = HeadSlots(loaded, loaded.adapter_slots(ReferenceOps(), NUM_SLOTS), Nothing(), argmax=largest)
    for slot in range(NUM_SLOTS):
        slots.install(slot, head_weights(str(slot), [random_head(HIDDEN) for _ in range(5)]))
    counts: list[int] = []
    for asks in ([HeadAsk(0, 1)], [HeadAsk(slot, 5) for slot in range(NUM_SLOTS)]):
        hidden = states(len(asks))
        slots.guess(hidden, asks)  # what is laid out is kept
        with Launches() as launches:
            slots.guess(hidden, asks)
        counts.append(len(launches.names))
    assert counts[0] == counts[1] <= 10, launches.names


def test_heads_that_nobody_wants_are_not_computed(model: PreTrainedModel, loaded: LoadedModel) -> None:
    """The third head is broken: it matters to those who ask for three."""
    slots, _ = make_slots(loaded)
    heads = [random_head(HIDDEN) for _ in range(4)]
    heads[2].layers[0].weight[0, 0] = float("nan")
    slots.install(3, head_weights("3", heads))
    hidden = states(3)
    got = slots.guess(hidden, [HeadAsk(3, 2), HeadAsk(3, 3), HeadAsk(3, 1)])
    assert got[0] == expected_draft(heads, lm_head(model), hidden[0], 2)
    assert got[1] == ()
    assert got[2] == expected_draft(heads, lm_head(model), hidden[2], 1)


@pytest.mark.parametrize("dense", [ReferenceDense(), CpuDense()], ids=lambda dense: dense.name)
@pytest.mark.parametrize("place", ["weight", "bias", "projection"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_nan_is_an_empty_draft_of_its_own_rows(
    model: PreTrainedModel, loaded: LoadedModel, dense: SegmentedDense, place: str, bad: float
) -> None:
    slots, _ = make_slots(loaded, dense)
    good = [random_head(HIDDEN), random_head(HIDDEN)]
    broken = [random_head(HIDDEN), random_head(HIDDEN, num_rows=30)]
    block = broken[1].layers[0]
    tensor = {"weight": block.weight, "bias": block.bias, "projection": broken[1].projection}[place]
    assert tensor is not None
    tensor[3] = bad
    slots.install(0, head_weights("0", good))
    slots.install(1, head_weights("1", broken))
    hidden = states(3)
    got = slots.guess(hidden, [HeadAsk(0, 2), HeadAsk(1, 2), HeadAsk(0, 2)])
    assert got[0] == expected_draft(good, lm_head(model), hidden[0], 2)
    assert got[2] == expected_draft(good, lm_head(model), hidden[2], 2)
    logits = head_logits(broken[1], lm_head(model), hidden[1])
    assert (got[1] == ()) == bool(logits.isnan().any())
    if bad != bad:
        assert got[1] == ()


def test_a_state_that_is_not_finite_is_an_empty_draft(model: PreTrainedModel, loaded: LoadedModel) -> None:
    slots, _ = make_slots(loaded, CpuDense())
    heads = [random_head(HIDDEN), random_head(HIDDEN)]
    slots.install(0, head_weights("0", heads))
    hidden = states(3)
    hidden[1] = float("nan")
    got = slots.guess(hidden, [HeadAsk(0, 2)] * 3)
    assert got[1] == ()
    for row in (0, 2):
        assert got[row] == expected_draft(heads, lm_head(model), hidden[row], 2)


def test_a_draft_ends_before_a_token_that_the_model_does_not_know(model: PreTrainedModel, loaded: LoadedModel) -> None:
    """Files may name any token; a projection may have more rows than the model has tokens."""
    slots, _ = make_slots(loaded)
    first = random_head(HIDDEN)
    for strange in (VOCAB_SIZE, 10**12, -7):
        stray = MedusaHead((), torch.ones(2, HIDDEN, dtype=torch.float64), torch.tensor([strange, strange]))
        slots.install(0, head_weights("0", [first, stray, first]))
        hidden = states(1)
        assert slots.guess(hidden, [HeadAsk(0, 3)]) == [expected_draft([first], lm_head(model), hidden[0], 1)]
    wide = torch.zeros(VOCAB_SIZE + 9, HIDDEN, dtype=torch.float64)
    wide[VOCAB_SIZE + 3] = hidden[0]
    slots.install(0, head_weights("0", [MedusaHead((), wide)]))
    assert slots.guess(hidden, [HeadAsk(0, 1)]) == [()]


@pytest.mark.parametrize("ops", [ReferenceOps(), CpuOps()], ids=lambda ops: ops.name)
def test_the_base_models_head_has_the_rows_lora(
    model: PreTrainedModel, loaded: LoadedModel, ops: SegmentedLora
) -> None:
    """One set under three LoRAs and none: of these two change the head, one does not. Own projections are as they
    are."""
    slots, adapters = make_slots(loaded, CpuDense(), ops)
    shared = [random_head(HIDDEN) for _ in range(3)]
    owned = [random_head(HIDDEN, num_rows=VOCAB_SIZE) for _ in range(2)]
    slots.install(0, head_weights("0", shared))
    slots.install(1, head_weights("1", owned))
    factors: dict[int, LoraFactors] = {}
    for slot, rank in ((2, 4), (3, 8)):
        a, b = torch.randn(rank, HIDDEN).double(), torch.randn(VOCAB_SIZE, rank).double()
        factors[slot] = LoraFactors(a, b, 0.5)
        adapters.install(slot, head_weights(str(slot), (), {"lm_head": factors[slot]}))
    q_proj = LoraFactors(torch.randn(4, HIDDEN).double(), torch.randn(HIDDEN, 4).double(), 0.5)
    adapters.install(4, head_weights("4", (), {"model.layers.0.self_attn.q_proj": q_proj}))
    asks = [HeadAsk(i % 2, 3, (None, 2, 3, 4)[i % 4]) for i in range(8)] + [HeadAsk(0, 2, i) for i in (3, 2, 3)]
    random.shuffle(asks)
    hidden = states(len(asks))
    got = slots.guess(hidden, asks)
    changed = 0
    for row, ask in enumerate(asks):
        head = _WithLora(lm_head(model), factors.get(ask.lora_slot or -1))
        want = expected_draft(shared if ask.adapter_slot == 0 else owned, head, hidden[row], ask.num_tokens)
        assert got[row] == want, ask
        changed += want != expected_draft(shared if ask.adapter_slot == 0 else owned, lm_head(model), hidden[row], 3)
    assert changed >= 3
    assert loaded.context.head_segments is None


class _WithLora(nn.Module):
    def __init__(self, base: nn.Module, factors: LoraFactors | None) -> None:
        super().__init__()
        self.base = base
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        f = self.factors
        return self.base(x) if f is None else self.base(x) + f.scale * (f.b @ (f.a @ x))


def test_nothing_of_a_failed_guess_stays(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, adapters = make_slots(loaded)
    slots.install(0, head_weights("0", [random_head(HIDDEN)]))
    factors = LoraFactors(torch.randn(4, HIDDEN).double(), torch.randn(VOCAB_SIZE, 4).double(), 0.5)
    adapters.install(1, head_weights("1", (), {"lm_head": factors}))

    def fail(*args: Any) -> None:
        assert loaded.context.head_segments is not None
        raise MemoryError

    monkeypatch.setattr(adapters.ops, "apply", fail)
    with pytest.raises(MemoryError):
        slots.guess(states(1), [HeadAsk(0, 1, 1)])
    assert loaded.context.head_segments is None


def test_half_precision(model: PreTrainedModel) -> None:
    """The guessed token's exact logit is the largest but for rounding."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = copy.deepcopy(model)
        nn.Module.to(narrow, dtype)
        exact = lm_head(copy.deepcopy(narrow)).requires_grad_(False).double()
        slots, _ = make_slots(adopt_model(narrow, verify=False), CpuDense())
        sets = [
            [random_head(HIDDEN, 1, dtype=dtype) for _ in range(3)],
            [random_head(HIDDEN, 2, num_rows=VOCAB_SIZE, dtype=dtype) for _ in range(2)],
        ]
        for slot, heads in enumerate(sets):
            slots.install(slot, head_weights(str(slot), heads))
        hidden = states(6, dtype)
        asks = [HeadAsk(i % 2, 3) for i in range(6)]
        for row, (ask, guess) in enumerate(zip(asks, slots.guess(hidden, asks), strict=True)):
            assert len(guess) == len(sets[ask.adapter_slot])
            for head, token in zip(sets[ask.adapter_slot], guess, strict=True):
                logits = head_logits(_double(head), exact, hidden[row].double())
                eps = torch.finfo(dtype).eps * 16
                assert float(logits[token]) >= float(logits.max()) - eps * float(logits.abs().max())


def _double(head: MedusaHead) -> MedusaHead:
    blocks = tuple(ResidualLayer(b.weight.double(), None if b.bias is None else b.bias.double()) for b in head.layers)
    return MedusaHead(blocks, None if head.projection is None else head.projection.double(), head.token_ids)


# --- slots ------------------------------------------------------------------------------------------------------------


def test_sets_come_and_go(model: PreTrainedModel, loaded: LoadedModel) -> None:
    """A slot's next set has fewer heads, fewer blocks, another projection; the neighbours do not notice."""
    slots, _ = make_slots(loaded, CpuDense())
    neighbour = [random_head(HIDDEN, 2) for _ in range(3)]
    slots.install(1, head_weights("a", neighbour))
    hidden = states(2)
    for heads in [*all_kinds(), (), *reversed(all_kinds())]:
        slots.install(0, head_weights("b", heads))
        assert slots.heads(0) == tuple(heads)
        got = slots.guess(hidden, [HeadAsk(0, 9), HeadAsk(1, 9)])
        assert got[0] == expected_draft(heads, lm_head(model), hidden[0], 9)
        assert got[1] == expected_draft(neighbour, lm_head(model), hidden[1], 9)
    slots.install(0, None)
    assert slots.heads(0) == ()
    assert slots.guess(hidden, [HeadAsk(0, 9), HeadAsk(2, 1)]) == [(), ()]
    assert slots.guess(hidden[:0], []) == []


def test_a_lora_alone_has_no_heads(loaded: LoadedModel) -> None:
    slots, adapters = make_slots(loaded)
    factors = LoraFactors(torch.randn(4, HIDDEN).double(), torch.randn(VOCAB_SIZE, 4).double(), 0.5)
    weights: AdapterWeights = head_weights("1", (), {"lm_head": factors})
    for install in (adapters.install, slots.install):
        install(1, weights)
    assert slots.guess(states(1), [HeadAsk(1, 4, 1)]) == [()]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (random_head(HIDDEN + 1), "block of Medusa head 1 has another width"),
        (MedusaHead((ResidualLayer(torch.zeros(HIDDEN, HIDDEN).double(), torch.zeros(3).double()),)), "another width"),
        (random_head(HIDDEN + 1, 0, num_rows=9), "projection of Medusa head 1 has another width"),
        (random_head(HIDDEN, dtype=torch.float32), "another dtype"),
        (MedusaHead((), torch.zeros(5, HIDDEN).double(), torch.arange(4)), "another number of rows"),
        (MedusaHead((), None, torch.arange(4)), "another number of rows"),
    ],
    ids=["block", "bias", "projection", "dtype", "token_ids", "token_ids-alone"],
)
def test_heads_for_another_model_are_refused_whole(
    model: PreTrainedModel, loaded: LoadedModel, head: MedusaHead, message: str
) -> None:
    slots, _ = make_slots(loaded)
    before = [random_head(HIDDEN)]
    slots.install(0, head_weights("0", before))
    with pytest.raises(ValueError, match=message):
        slots.install(0, head_weights("1", [random_head(HIDDEN), head]))
    hidden = states(1)
    assert slots.guess(hidden, [HeadAsk(0, 4)]) == [expected_draft(before, lm_head(model), hidden[0], 4)]
