"""Runner steps: isolated faults and repeatable results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.dense import dense_logits, greedy, make_dense
from support.driver import BLOCK_SIZE, Job, Rig, make_rig, random_prompts
from support.replay import ReplayableReference
from support.zoo import MAX_LEN, VOCAB_SIZE, random_model
from torch import Tensor
from transformers import PreTrainedModel

from loraplex_adapters.weights import AdapterWeights, LoraFactors
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import Internal, InvalidArgument, NonFinite, OutOfMemory
from loraplex_contracts.plan import AdapterUse, BlockCopy, NewSequence, Span, SpanResult, StepPlan
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.backends.reference import TorchPagedAttention
from loraplex_server.layers.linear import AdaptedLinear
from loraplex_server.model import runner as module
from loraplex_server.model.isolation import execute_isolated
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.states import StateMemory, StateStep

NUM_TOKENS = 8
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_dense(random_model("llama"))


@pytest.fixture
def rig(model: PreTrainedModel) -> Rig:
    return make_rig(adopt_model(copy.deepcopy(model)))


def lora(a: float, b: float, path: str = Q_PROJ, out_features: int = 32) -> AdapterWeights:
    """A constant adapter of rank 1."""
    factors = LoraFactors(
        torch.full((1, 32), a, dtype=torch.float64), torch.full((out_features, 1), b, dtype=torch.float64), 1.0
    )
    return AdapterWeights(AdapterKey("lora", "0" * 64), torch.zeros(0, dtype=torch.uint8), {path: factors})


def enter(name: str, row: int, tokens: Sequence[int], **fields: Any) -> NewSequence:
    return NewSequence(
        name,
        row,
        tuple(tokens),
        fields.pop("num_prompt", len(tokens)),
        fields.pop("sampling", SamplingParams()),
        fields.pop("output", OutputParams()),
        **fields,
    )


def prefill(name: str, row: int, num_tokens: int, blocks: Sequence[int], **fields: Any) -> Span:
    return Span(name, row, 0, num_tokens, 1, tuple(blocks), **fields)


# --- logprobs ---------------------------------------------------------------------------------------------------------


def test_logprobs_of_prompt_and_output(model: PreTrainedModel, rig: Rig) -> None:
    """Logprobs are the model's own distribution, in chunks and beside others, whatever the sampling parameters are."""
    prompts = random_prompts(3, VOCAB_SIZE, seed=2)[1:]
    wanted = OutputParams(logprobs=True, top_logprobs=3, prompt_logprobs=True)
    jobs = [Job(prompt, NUM_TOKENS, output=wanted) for prompt in prompts]
    jobs[1].sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=5, repetition_penalty=1.3)
    rig.run([*jobs, Job(prompts[0], NUM_TOKENS)])
    for job in jobs:
        text = job.prompt + job.tokens
        want = torch.log_softmax(dense_logits(model, text[:1], text[1:]), -1)
        got = job.prompt_logprobs + job.logprobs
        assert [entry.token_id for entry in got] == text[1:]
        for entry, row in zip(got, want, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-9)
            best = row.topk(3)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_sampling_does_not_depend_on_the_batch(rig: Rig) -> None:
    prompts = random_prompts(5, VOCAB_SIZE, seed=6)
    jobs = [Job(p, NUM_TOKENS, sampling=SamplingParams(temperature=1.0, seed=i)) for i, p in enumerate(prompts)]
    rig.run(jobs)
    for job in jobs:
        alone = Job(job.prompt, NUM_TOKENS, sampling=job.sampling)
        rig.run([alone])
        assert alone.tokens == job.tokens


# --- failures ---------------------------------------------------------------------------------------------------------


def test_not_finite_fails_alone_and_leaves_nothing(model: PreTrainedModel, rig: Rig) -> None:
    """An adapter whose product overflows ends its own requests, now and for whoever gets its blocks afterwards."""
    rig.slots.install(0, lora(1e200, 1e200))
    prompts = random_prompts(6, VOCAB_SIZE, seed=3)
    bad = Job(prompts[5], NUM_TOKENS, (AdapterUse(0),))
    good = [Job(prompt, NUM_TOKENS) for prompt in prompts[:5]]
    rig.run([*good[:2], bad, *good[2:]])
    assert isinstance(bad.error, NonFinite)
    assert "adapter" in str(bad.error)
    for job in good:
        assert job.tokens == greedy(model, job.prompt, NUM_TOKENS)
    # Every block of the cache has been the bad one's by now; what it left must not be multiplied into others.
    for layer in rig.cache.layers:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    again = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    rig.run(again)
    for job in again:
        assert job.tokens == greedy(model, job.prompt, NUM_TOKENS)


def test_not_finite_without_adapter_is_internal(model: PreTrainedModel) -> None:
    rig = make_rig(adopt_model(copy.deepcopy(model)))
    rig.loaded.targets["lm_head"].weight[3] = float("nan")
    job = Job([5, 6, 7], NUM_TOKENS)
    rig.run([job])
    assert isinstance(job.error, Internal)


def test_draft_tokens_before_an_error_stay(rig: Rig) -> None:
    """They may end the completion. A bad sample has token 0, which the draft may have there, too."""
    sampling = SamplingParams(allowed_token_ids=(7,), bad_words=((7, 7, 7),))
    entered = enter("a", 0, [3, 4], sampling=sampling, output=OutputParams(logprobs=True))
    first = rig.runner.execute(StepPlan(0, (prefill("a", 0, 2, [5, 6]),), (entered,))).result().spans["a"]
    assert first.token_ids == (7,)
    found = rig.runner.execute(StepPlan(1, (Span("a", 0, 2, 4, 4, draft=(7, 0, 7)),))).result().spans["a"]
    assert (found.token_ids, [one.token_id for one in found.logprobs]) == ((7,), [7])
    assert isinstance(found.error, InvalidArgument)


def test_a_sequence_that_does_not_fit_fails_alone(model: PreTrainedModel, rig: Rig) -> None:
    """The row may have been another sequence's before."""
    prompt = [3, 4, 5]
    too_long = [7] * (MAX_LEN + 1)
    plan = StepPlan(
        0,
        (prefill("a", 0, 3, [0]), prefill("b", 1, 3, [1])),
        (enter("a", 0, prompt), enter("b", 1, too_long)),
    )
    spans = rig.runner.execute(plan).result().spans
    assert spans["a"].token_ids == tuple(greedy(model, prompt, 1))
    assert isinstance(spans["b"].error, Internal)
    after = StepPlan(1, (prefill("c", 1, 3, [2]),), (enter("c", 1, prompt),), (1,))
    assert rig.runner.execute(after).result().spans["c"].token_ids == tuple(greedy(model, prompt, 1))


@pytest.mark.parametrize(
    "span",
    [
        Span("a", 0, 0, 4, 1, (1,)),  # more tokens than are known
        Span("a", 0, 0, 3, 1),  # no blocks
        Span("a", 1, 0, 3, 1, (1,)),  # nobody's row
        Span("b", 0, 0, 3, 1, (1,)),  # somebody else's row
        Span("a", 0, 0, 3, 2, (1,)),  # samples without drafts
    ],
)
def test_impossible_spans_fail_alone(model: PreTrainedModel, rig: Rig, span: Span) -> None:
    plan = StepPlan(0, (span, prefill("good", 2, 3, [0])), (enter("a", 0, [3, 4, 5]), enter("good", 2, [6, 7, 8])))
    spans = rig.runner.execute(plan).result().spans
    assert isinstance(spans[span.sequence_id].error, Internal)
    assert spans["good"].token_ids == tuple(greedy(model, [6, 7, 8], 1))


class Fuse:
    """Makes the model's forward raise: on every call with more than one request in it, or when `when` says so."""

    def __init__(self, rig: Rig, when: Callable[[Tensor], bool], error: Exception, *, late: bool) -> None:
        self.num_raised = 0
        inner = rig.loaded.model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            raises = when(kwargs["input_ids"][0])
            if raises and not late:
                self.num_raised += 1
                raise error
            out = inner(*args, **kwargs)
            if raises:
                self.num_raised += 1
                raise error  # keys and values are written by now
            return out

        rig.loaded.model.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_raised_is_run_again_span_by_span(model: PreTrainedModel, rig: Rig, late: bool) -> None:
    """Each step with token 99 in it raises; execute_isolated then runs every span by itself, drafts and all."""
    fuse = Fuse(rig, lambda ids: bool((ids == 99).any()), MemoryError(), late=late)
    prompts = [[t for t in p if t != 99] or [5] for p in random_prompts(5, VOCAB_SIZE, seed=9)]
    want = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    prompts[2] = [*prompts[2], 99]
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    for job, tokens in zip(jobs, want, strict=True):
        text = job.prompt + tokens
        job.propose = lambda so_far, text=text: [t for t in text[len(so_far) : len(so_far) + 2] if t != 99]
    execute = rig.runner.execute
    rig.runner.execute = lambda plan: _Isolated(execute_isolated(execute, plan))  # type: ignore[method-assign]
    rig.run(jobs)
    assert fuse.num_raised
    assert isinstance(jobs[2].error, OutOfMemory)
    for i in (0, 1, 3, 4):
        cut = want[i].index(99) + 1 if 99 in want[i] else NUM_TOKENS
        assert jobs[i].tokens[:cut] == want[i][:cut]
        assert (jobs[i].error is None) == (99 not in want[i][:-1])


class _Isolated:
    def __init__(self, done: Any) -> None:
        self.done = done

    def result(self) -> Any:
        return self.done


def test_nothing_of_a_failed_step_counts(model: PreTrainedModel, rig: Rig) -> None:
    """Blocks are attached, and tokens known, only by a step that succeeded."""
    prompt = [3, 4, 5, 6, 7]
    entered = (enter("a", 0, prompt),)
    failing = [True]
    Fuse(rig, lambda _: failing[0], RuntimeError("boom"), late=True)
    plan = StepPlan(0, (prefill("a", 0, 5, [8, 9]),), entered)
    with pytest.raises(RuntimeError, match="boom"):
        rig.runner.execute(plan)
    assert rig.runner.mirror.block_ids(0) == []
    assert rig.loaded.context.attention is None
    failing[0] = False
    result = rig.runner.execute(plan).result()
    assert result.spans["a"].token_ids == tuple(greedy(model, prompt, 1))
    assert rig.runner.mirror.block_ids(0) == [8, 9]


def test_a_place_of_a_state_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, used = StateMemory.begin, list[StateMemory]()

    def recorded(memory: StateMemory, spans: Sequence[Span]) -> StateStep:
        used.append(memory)
        return begin(memory, spans)

    monkeypatch.setattr(StateMemory, "begin", recorded)
    rig = make_rig(adopt_model(random_model("lfm2"), verify=False))
    rig.run([Job(prompt, 4) for prompt in random_prompts(3, VOCAB_SIZE)])
    rig.runner.check_integrity()
    used[0].take(used[0].spare(0))
    with pytest.raises(AssertionError, match="place of a state is lost"):
        rig.runner.check_integrity()


# --- rows and blocks --------------------------------------------------------------------------------------------------


def decode(rig: Rig, step: int, name: str, row: int, start: int, blocks: Sequence[int] = ()) -> SpanResult:
    plan = StepPlan(step, (Span(name, row, start, 1, 1, tuple(blocks)),))
    return rig.runner.execute(plan).result().spans[name]


def test_a_fork_copies_its_half_filled_block(model: PreTrainedModel, rig: Rig) -> None:
    """Two completions of one prefill: full blocks shared, the last one copied; what one writes the other never sees."""
    prompt = [11, 7, 30, 9, 54, 80]
    rig.runner.execute(StepPlan(0, (prefill("a", 0, 6, [10, 11]),), (enter("a", 0, prompt),)))
    other = [*prompt, 42]  # the sibling drew something else
    plan = StepPlan(
        1,
        (Span("a", 0, 6, 1, 1), Span("b", 1, 6, 1, 1, (10, 20))),
        (enter("b", 1, other, num_prompt=6),),
        copies=(BlockCopy(11, 20),),
    )
    spans = rig.runner.execute(plan).result().spans
    want_a = greedy(model, prompt, 3)
    want_b = greedy(model, other, 2)
    assert spans["a"].token_ids == (want_a[1],)
    assert spans["b"].token_ids == (want_b[0],)
    assert decode(rig, 2, "b", 1, 7).token_ids == (want_b[1],)
    assert decode(rig, 3, "a", 0, 7).token_ids == (want_a[2],)


def test_reentry_after_preemption(model: PreTrainedModel, rig: Rig) -> None:
    """The same sequence in another row and other blocks, with everything known so far computed anew."""
    prompt = [11, 7, 30, 9, 54]
    want = greedy(model, prompt, 4)
    rig.runner.execute(StepPlan(0, (prefill("a", 0, 5, [1, 2]),), (enter("a", 0, prompt),)))
    decode(rig, 1, "a", 0, 5)
    so_far = [*prompt, *want[:2]]
    plan = StepPlan(2, (prefill("a", 3, 7, [5, 6]),), (enter("a", 3, so_far, num_prompt=5),), (0,))
    assert rig.runner.execute(plan).result().spans["a"].token_ids == (want[2],)
    assert decode(rig, 3, "a", 3, 7).token_ids == (want[3],)


def test_blocks_that_come_with_content_are_kept(model: PreTrainedModel, rig: Rig) -> None:
    """A prefix-cache hit: the span starts behind blocks that another sequence filled."""
    prompt = [11, 7, 30, 9, 54, 80, 3, 16, 22, 5]
    rig.runner.execute(StepPlan(0, (prefill("a", 0, 10, [1, 2, 3]),), (enter("a", 0, prompt),)))
    start = 2 * BLOCK_SIZE
    plan = StepPlan(1, (Span("b", 1, start, 2, 1, (1, 2, 7)),), (enter("b", 1, prompt),), (0,))
    assert rig.runner.execute(plan).result().spans["b"].token_ids == tuple(greedy(model, prompt, 1))


def test_the_last_position_of_the_context_can_be_drawn(model: PreTrainedModel, rig: Rig) -> None:
    prompt = [3 + i % 90 for i in range(MAX_LEN)]
    plan = StepPlan(0, (prefill("a", 0, MAX_LEN, range(MAX_LEN // BLOCK_SIZE)),), (enter("a", 0, prompt),))
    assert len(rig.runner.execute(plan).result().spans["a"].token_ids) == 1


def test_an_empty_plan_only_changes_rows(rig: Rig) -> None:
    result = rig.runner.execute(StepPlan(7, (), (enter("a", 0, [3]),), (0, 4))).result()
    assert (result.step, dict(result.spans)) == (7, {})


def test_a_step_without_samples_gives_nothing(model: PreTrainedModel, rig: Rig) -> None:
    prompt = [3, 4, 5, 6]
    entered = (enter("a", 0, prompt),)
    first = rig.runner.execute(StepPlan(0, (Span("a", 0, 0, 3, 0, (5,)),), entered)).result()
    assert first.spans["a"] == SpanResult()
    second = rig.runner.execute(StepPlan(1, (Span("a", 0, 3, 1, 1),))).result()
    assert second.spans["a"].token_ids == tuple(greedy(model, prompt, 1))


def test_the_state_behind_the_last_token_that_counts_is_kept(model: PreTrainedModel, rig: Rig) -> None:
    """Post-norm hidden states, what a Medusa head reads: not that of a rejected draft, nor a neighbour's."""
    prompt = [3, 4, 5, 6]
    keeper = replace(enter("a", 2, prompt), keeps_hidden=True)
    other = enter("b", 1, [9, 8, 7])
    rig.runner.execute(StepPlan(0, (prefill("a", 2, 4, [5, 6]), prefill("b", 1, 3, [7])), (other, keeper)))
    assert [rig.runner.has_hidden(row) for row in (0, 1, 2)] == [False, False, True]
    torch.testing.assert_close(rig.runner.last_hidden([2])[0], hidden(model, prompt), rtol=1e-9, atol=1e-9)
    first, second, third = greedy(model, prompt, 3)
    wrong = (third + 1) % 90
    plan = StepPlan(1, (Span("a", 2, 4, 3, 3, draft=(second, wrong)),))
    assert rig.runner.execute(plan).result().spans["a"].token_ids == (second, third)
    want = hidden(model, [*prompt, first, second])
    torch.testing.assert_close(rig.runner.last_hidden([2])[0], want, rtol=1e-9, atol=1e-9)


def hidden(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """The hidden state [hidden] that the head makes the next token of."""
    with torch.inference_mode():
        return model.model(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state[0, -1]


# --- results that come later ------------------------------------------------------------------------------------------


class Slow:
    """A transfer to the host that is over when it is waited for."""

    def __init__(self, values: Tensor, log: list[str]) -> None:
        self.values = values.clone()  # as they were when the copy was asked for
        self.log = log

    def wait(self) -> Tensor:
        self.log.append("waited")
        return self.values


@pytest.fixture
def log(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps of the rig overlap from here on."""
    found: list[str] = []
    rig.runner.overlaps = True
    monkeypatch.setattr(module, "download", lambda values: Slow(values, found))
    return found


def test_a_result_is_waited_for_by_who_asks(model: PreTrainedModel, rig: Rig, log: list[str]) -> None:
    prompt = [3, 4, 5, 6]
    want = greedy(model, prompt, 3)
    handles = [rig.runner.execute(StepPlan(0, (prefill("a", 0, 4, [5, 6]),), (enter("a", 0, prompt),)))]
    handles += [rig.runner.execute(StepPlan(step, (Span("a", 0, 3 + step, 1, 1),))) for step in (1, 2)]
    assert log == []
    assert [handle.result().spans["a"].token_ids for handle in handles] == [(token,) for token in want]
    assert handles[0].result() is handles[0].result()
    assert log == ["waited"] * 3


def test_a_result_does_not_look_into_rows(model: PreTrainedModel, rig: Rig, log: list[str]) -> None:
    """Its row is somebody else's by the time that it is asked for: an adapter's NaN is said of the right one."""
    rig.slots.install(0, lora(1e200, 1e200, Q_PROJ.replace("q_proj", "v_proj"), out_features=16))
    prompt = [3, 4, 5]
    entered = enter("bad", 0, prompt, adapters=(AdapterUse(0),))
    first = rig.runner.execute(StepPlan(0, (prefill("bad", 0, 3, [1]),), (entered,)))
    after = StepPlan(1, (prefill("good", 0, 3, [2]),), (enter("good", 0, prompt),), (0,))
    second = rig.runner.execute(after)
    assert isinstance(first.result().spans["bad"].error, NonFinite)
    assert second.result().spans["good"].token_ids == tuple(greedy(model, prompt, 1))


def test_what_follows_a_draft_needs_its_result(model: PreTrainedModel, rig: Rig, log: list[str]) -> None:
    prompt = [3, 4, 5, 6]
    first, second, third = greedy(model, prompt, 3)
    rig.runner.execute(StepPlan(0, (prefill("a", 0, 4, [5, 6]),), (enter("a", 0, prompt),)))
    drafted = rig.runner.execute(StepPlan(1, (Span("a", 0, 4, 2, 2, draft=(second,)),)))
    too_early = rig.runner.execute(StepPlan(2, (Span("a", 0, 6, 1, 1),)))
    assert isinstance(too_early.result().spans["a"].error, Internal)
    assert drafted.result().spans["a"].token_ids == (second, third)
    assert len(rig.runner.execute(StepPlan(3, (Span("a", 0, 6, 1, 1),))).result().spans["a"].token_ids) == 1
    assert first != second


class Planned(TorchPagedAttention):
    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.contexts: list[int] = []

    def plan(self, batch, dtype, device):  # type: ignore[no-untyped-def]
        self.lengths += batch.query_lens.tolist()
        self.contexts += batch.context_lens.tolist()
        return super().plan(batch, dtype, device)


@pytest.mark.parametrize(("max_tokens", "lengths"), [(20, [1, 2, 4, 8, 16, 20]), (16, [1, 2, 4, 8, 16]), (1, [1])])
def test_every_size_of_block_comes_up(max_tokens: int, lengths: list[int]) -> None:
    attention, ops = Planned(), ReplayableReference()
    rig = make_rig(adopt_model(random_model("llama")), ops=ops, attention=attention)
    said: list[str] = []
    rig.runner.warm_up(max_tokens, said.append)
    assert attention.lengths == [*lengths, 1]
    assert attention.contexts == [*lengths, MAX_LEN]
    num_linears = sum(isinstance(target, AdaptedLinear) for target in rig.loaded.targets.values())
    assert ops.num_applied == (len(lengths) + 1) * (num_linears - 1)  # the head's adapters are another matter
    assert said == []


def test_no_longer_than_the_cache_or_the_context() -> None:
    attention = Planned()
    rig = make_rig(adopt_model(random_model("llama"), max_context_tokens=50), attention=attention, num_blocks=3)
    rig.runner.warm_up(1000, lambda text: None)
    assert (attention.lengths[-2], attention.contexts[-1]) == (12, 12)
    rig = make_rig(adopt_model(random_model("llama"), max_context_tokens=50), attention=attention)
    rig.runner.warm_up(1000, lambda text: None)
    assert (attention.lengths[-2], attention.contexts[-1]) == (50, 50)


def test_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.0)
    rig = make_rig(adopt_model(random_model("llama")))
    said: list[str] = []
    rig.runner.warm_up(3, said.append)
    assert said[0] == "compiling kernels: 1 of 3 lengths of steps"
    assert "kernels compiled in 0 s" in said[-1]


def test_texts_are_what_they_were() -> None:
    prompts = random_prompts(4, VOCAB_SIZE)
    texts: list[list[list[int]]] = []
    for warms_up in (False, True):
        rig = make_rig(adopt_model(random_model("llama")))
        if warms_up:
            rig.runner.warm_up(64, lambda text: None)
            for layer in rig.cache.layers:
                layer.k.fill_(torch.nan)
        jobs = [Job(prompt, 6) for prompt in prompts]
        rig.run(jobs)
        texts.append([job.tokens for job in jobs])
    assert texts[0] == texts[1]
