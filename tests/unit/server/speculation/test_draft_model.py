"""Drafts of a smaller model."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.dense import dense_logits, greedy, make_dense
from support.drafting import ask, speculate
from support.driver import Job, make_rig, random_prompts
from support.scheduler_harness import num_cached_blocks
from support.zoo import LIMIT, MAX_LEN, VOCAB_SIZE, random_model
from torch import Tensor
from transformers import PreTrainedModel

from loraplex_contracts.errors import OutOfMemory
from loraplex_contracts.plan import StepPlan
from loraplex_contracts.request import SamplingParams, StoppingParams
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import adopt_model
from loraplex_server.sampling.sampler import Sampled, Sampler
from loraplex_server.speculation.draft_model import Drafter, DraftMemory, DraftModelProposer

BLOCK = 4
EOS = 7
NUM_TOKENS = 9
# Two layers, K and V, of 2 heads of 8 float64 values.
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 8 * 8

SAMPLINGS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.8, seed=11),
    "nucleus": SamplingParams(temperature=1.2, top_p=0.8, top_k=30, min_p=0.01, seed=12),
    "penalties": SamplingParams(
        temperature=1.0,
        seed=13,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias=((5, 3.0), (9, -50.0)),
    ),
    "greedy penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, logit_bias=((5, 3.0),)),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_dense(random_model("llama"))


@cache
def adopted(model: PreTrainedModel) -> LoadedModel:
    """The model, made once; who makes the next proposer with it takes it from the one before."""
    return adopt_model(copy.deepcopy(model), verify=False)


def make(model: PreTrainedModel, *, num_blocks: int = 200, max_rows: int = 6, **memory: Any) -> DraftModelProposer:
    return DraftModelProposer(
        Drafter(
            adopted(model),
            DraftMemory(max_rows, num_blocks * BLOCK_BYTES, BLOCK, **memory),
            model_digest="draft",
        ),
        num_target_ids=VOCAB_SIZE,
        eos_token_ids=[EOS],
    )


def drafter(proposer: DraftModelProposer) -> Drafter:
    return proposer.drafter


def check(proposer: DraftModelProposer) -> None:
    drafter(proposer).rows.check_integrity()


# --- drafts that are what the target draws ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_draft_of_the_same_model_is_always_accepted(model: PreTrainedModel, name: str) -> None:
    """Drafts are accepted whatever the parameters: noise, penalties, bias and truncation are the same on both sides."""
    rig = make_rig(adopt_model(copy.deepcopy(model)))
    proposer = make(model)
    prompts = random_prompts(4, VOCAB_SIZE, seed=4)
    samplings = [replace(SAMPLINGS[name], seed=SAMPLINGS[name].seed + i) for i in range(4)]
    jobs = [Job(prompt, NUM_TOKENS, sampling=one) for prompt, one in zip(prompts, samplings, strict=True)]
    plain = [Job(prompt, NUM_TOKENS, sampling=one) for prompt, one in zip(prompts, samplings, strict=True)]
    drafted: list[int] = []
    rig.on_plan = lambda plan: drafted.extend(len(span.draft) for span in plan.spans)
    rig.run([speculate(job, proposer, 3) for job in jobs])
    assert sum(drafted) == sum(job.num_accepted for job in jobs) > 4 * 4
    rig.run(plain)
    assert [job.tokens for job in jobs] == [job.tokens for job in plain]
    check(proposer)


def test_min_tokens_bans_what_would_end_the_text(model: PreTrainedModel) -> None:
    """No stop token is drafted until `min_tokens`; from then on one ends the draft."""
    prompt = random_prompts(2, VOCAB_SIZE, seed=5)[1]
    bias = SamplingParams(logit_bias=((EOS, 1e4),))
    banned = greedy_without(model, prompt, 4, {EOS, 8})
    free = make(model)
    stopping = StoppingParams(100, min_tokens=2, stop_token_ids=frozenset({8}))
    asked = ask("a", prompt, 5, sampling=bias, stopping=stopping)
    assert free.propose([asked]) == [(*banned[:2], EOS)]
    ignoring = StoppingParams(100, min_tokens=2, ignore_eos=True)
    assert free.propose([ask("b", prompt, 5, sampling=bias, stopping=ignoring)]) == [(EOS,) * 5]


def greedy_without(model: PreTrainedModel, prompt: Sequence[int], num: int, banned: set[int]) -> list[int]:
    tokens: list[int] = []
    for _ in range(num):
        logits = dense_logits(model, [*prompt, *tokens], [0])[0].clone()
        logits[list(banned)] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize(("target_family", "draft_family"), [("opt", "opt"), ("gemma2", "llama"), ("llama", "gpt2")])
def test_drafts_of_other_models_change_no_text(target_family: str, draft_family: str) -> None:
    target = random_model(target_family)
    rig = make_rig(adopt_model(copy.deepcopy(target)))
    proposer = make(random_model(draft_family, seed=3))
    prompts = random_prompts(3, VOCAB_SIZE, seed=8)
    samplings = [SamplingParams(), SamplingParams(temperature=0.9, seed=3), SamplingParams(repetition_penalty=1.3)]
    pairs = list(zip(prompts, samplings, strict=True))
    plain = [Job(prompt, NUM_TOKENS, sampling=sampling) for prompt, sampling in pairs]
    jobs = [speculate(Job(prompt, NUM_TOKENS, sampling=sampling), proposer, 3) for prompt, sampling in pairs]
    rig.run(plain + jobs)
    assert [job.tokens for job in jobs] == [job.tokens for job in plain]
    check(proposer)


# --- catching up ------------------------------------------------------------------------------------------------------


class Recorder(Sampler):
    """Keeps the logits of each draw by position of the drawn token."""

    def __init__(self, inner: Sampler) -> None:
        self.__dict__ = inner.__dict__
        self.logits: dict[tuple[int, int], Tensor] = {}

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        tokens: Tensor,
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> Sampled:
        for row, position, values in zip(rows, positions, logits, strict=True):
            self.logits[int(row), int(position)] = values.clone()
        return super().sample(logits, rows, positions, tokens, drafts or {})


def record(proposer: DraftModelProposer) -> dict[tuple[int, int], Tensor]:
    runner = drafter(proposer).runner
    recorder = Recorder(runner._sampler)
    runner._sampler = recorder
    return recorder.logits


@pytest.mark.parametrize("seed", range(4))
def test_after_any_acceptance_drafts_equal_fresh_ones(model: PreTrainedModel, seed: int) -> None:
    """Some of the draft comes true, then something else; drafts have any length. K/V behind the first difference is
    written anew: logits equal those of a dense run over the known tokens."""
    dice = random.Random(seed)
    proposer = make(model, max_rows=2)
    logits = record(proposer)
    texts = {name: prompt[:] for name, prompt in zip("ab", random_prompts(3, VOCAB_SIZE, seed=seed)[1:], strict=True)}
    for _ in range(12):
        chosen = [name for name in texts if dice.random() < 0.8] or ["a"]
        logits.clear()
        asked = [ask(name, texts[name], dice.randint(1, 6)) for name in chosen]
        drafts = proposer.propose(asked)
        check(proposer)
        for name, one, draft in zip(chosen, asked, drafts, strict=True):
            text = texts[name]
            assert list(draft) == greedy(model, text, one.num_tokens)
            row = drafter(proposer).rows.get(name).row  # type: ignore[union-attr]
            got = torch.stack([logits[row, len(text) + i] for i in range(len(draft))])
            torch.testing.assert_close(got, dense_logits(model, text, draft), rtol=0, atol=1e-9)
            # Between two asks any number of tokens may have come.
            text += draft[: dice.randint(0, len(draft))]
            text += [dice.randrange(10, VOCAB_SIZE) for _ in range(dice.choice([0, 1, 1, 2, 9]))]


def test_asked_again_for_the_same_tokens(model: PreTrainedModel) -> None:
    """The scheduler may have left the draft out, or cut it: with the last known token at the end of a block, too."""
    proposer = make(model)
    for num_prompt in (7, 8, 9):
        prompt = random_prompts(9, VOCAB_SIZE, seed=2, longest=9)[5][:1] * num_prompt
        want = greedy(model, prompt, 6)
        for num_tokens in (5, 2, 6, 1):
            assert proposer.propose([ask(str(num_prompt), prompt, num_tokens)]) == [tuple(want[:num_tokens])]
        cut = [*prompt, *want[:2]]
        assert proposer.propose([ask(str(num_prompt), cut, 4)]) == [tuple(want[2:6])]
    check(proposer)


def test_drafts_do_not_depend_on_the_batch(model: PreTrainedModel) -> None:
    prompts = random_prompts(6, VOCAB_SIZE, seed=9)
    asks = [
        ask(f"s{i}", prompt, 1 + i, sampling=replace(SAMPLINGS["penalties"], seed=i))
        for i, prompt in enumerate(prompts)
    ]
    together = make(model).propose(asks)
    assert [len(draft) for draft in together] == [1, 2, 3, 4, 5, 6]
    alone = make(model)
    assert [alone.propose([one])[0] for one in asks] == list(together)


def test_rows_share_the_steps(model: PreTrainedModel) -> None:
    proposer = make(model)
    plans = watch(proposer)
    proposer.propose([ask(f"s{i}", prompt, 3 + i % 2) for i, prompt in enumerate(random_prompts(5, VOCAB_SIZE))])
    assert [len(plan.spans) for plan in plans] == [5, 5, 5, 2]


def watch(proposer: DraftModelProposer) -> list[StepPlan]:
    """The plans that the draft model runs."""
    runner = drafter(proposer).runner
    plans: list[StepPlan] = []
    execute = runner.execute

    def watched(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    runner.execute = watched  # type: ignore[method-assign]
    return plans


# --- prompts ----------------------------------------------------------------------------------------------------------


def long_text(length: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(10, VOCAB_SIZE) for _ in range(length)]


def test_a_long_prompt_comes_in_pieces_beside_others(model: PreTrainedModel) -> None:
    """The prompt gets no draft before it is through; sequences that run already are not held up."""
    proposer = make(model, max_prompt_tokens=40)
    plans = watch(proposer)
    short, prompt = long_text(9, seed=1), long_text(100, seed=2)
    for turn in range(3):
        drafts = proposer.propose([ask("long", prompt, 3), ask("short", short, 3)])
        assert drafts[1] == tuple(greedy(model, short, 3))
        assert drafts[0] == (() if turn < 2 else tuple(greedy(model, prompt, 3)))
        prompt.append(20 + turn)  # it goes on without drafts meanwhile
        short.append(30 + turn)
    pieces = [span.num_tokens for plan in plans for span in plan.spans if span.sequence_id == "long"]
    assert pieces[:3] == [40, 40, 22]
    check(proposer)


def test_two_prompts_share_the_budget(model: PreTrainedModel) -> None:
    """One that gets nothing of it in the round in which it comes enters later, with what has come until then."""
    proposer = make(model, max_prompt_tokens=50)
    first, second = long_text(50, seed=1), long_text(40, seed=2)
    assert proposer.propose([ask("a", first, 2), ask("b", second, 2)]) == [tuple(greedy(model, first, 2)), ()]
    second += [11, 12]
    drafts = proposer.propose([ask("a", first, 2), ask("b", second, 2)])
    assert drafts == [tuple(greedy(model, text, 2)) for text in (first, second)]
    check(proposer)


def test_prefix_cache(model: PreTrainedModel) -> None:
    """Prompts that begin alike share blocks of known tokens, within one tenant and salt; drafts never enter it."""
    proposer = make(model)
    plans = watch(proposer)
    prompt = long_text(14, seed=3)
    want = tuple(greedy(model, prompt, 5))
    assert proposer.propose([ask("a", prompt, 5)]) == [want]
    num_cached = num_cached_blocks(drafter(proposer).rows.pool)
    assert num_cached == 14 // BLOCK
    for name, fields, num_run in (
        ("same", {}, 2),
        ("tenant", {"tenant": "other"}, 14),
        ("salt", {"cache_salt": "s"}, 14),
    ):
        plans.clear()
        assert proposer.propose([ask(name, prompt, 5, **fields)]) == [want]
        assert plans[0].spans[0].num_tokens == num_run, name
    # What its first draft proposed and did not come is not found by somebody for whom it came.
    proposer.propose([ask("a", [*prompt, 99], 1)])
    plans.clear()
    came = [*prompt, *want]
    assert proposer.propose([ask("b", came, 3)]) == [tuple(greedy(model, came, 3))]
    assert plans[0].spans[0].start == 12
    check(proposer)


def test_forgotten_sequences_leave_their_prefix_behind(model: PreTrainedModel) -> None:
    proposer = make(model)
    plans = watch(proposer)
    prompt = long_text(20, seed=3)
    proposer.propose([ask("a", prompt, 5)])
    proposer.end("a")
    proposer.end("a")
    proposer.end("never seen")
    check(proposer)
    assert drafter(proposer).rows.num_sequences == 0
    plans.clear()
    proposer.propose([ask("a", prompt, 5)])
    assert plans[0].spans[0].start == 16


# --- limits -----------------------------------------------------------------------------------------------------------


def test_rows_run_out(model: PreTrainedModel) -> None:
    """Sequences asked for together do not push each other out; the one that was not asked for the longest goes."""
    proposer = make(model, max_rows=2)
    texts = {name: long_text(6 + i, seed=i) for i, name in enumerate("abcd")}
    want = {name: tuple(greedy(model, text, 3)) for name, text in texts.items()}

    def propose(names: str) -> list[bool]:
        drafts = proposer.propose([ask(name, texts[name], 3) for name in names])
        check(proposer)
        assert all(draft in ((), want[name]) for name, draft in zip(names, drafts, strict=True))
        return [bool(draft) for draft in drafts]

    assert propose("abc") == [True, True, False]
    assert propose("abc") == [True, True, False]
    assert propose("b") == [True]
    assert propose("d") == [True]  # a left
    assert {name for name in texts if drafter(proposer).rows.get(name)} == {"b", "d"}
    proposer.end("d")
    assert propose("bc") == [True, True]


def test_blocks_run_out(model: PreTrainedModel) -> None:
    proposer = make(model, num_blocks=14, max_len=MAX_LEN)  # block 0 is not handed out
    texts = {name: long_text(18, seed=i) for i, name in enumerate("abc")}
    want = {name: tuple(greedy(model, text, 3)) for name, text in texts.items()}

    def propose(names: str) -> list[tuple[int, ...]]:
        drafts = list(proposer.propose([ask(name, texts[name], 3) for name in names]))
        check(proposer)
        return drafts

    assert propose("abc") == [want["a"], want["b"], ()]
    assert propose("c") == [want["c"]]
    assert drafter(proposer).rows.get("a") is None
    assert drafter(proposer).rows.get("b") is not None
    assert make(model, num_blocks=4).propose([ask("a", texts["a"], 3)]) == [()]


def test_whoever_cannot_grow_leaves(model: PreTrainedModel) -> None:
    proposer = make(model, num_blocks=10, max_len=MAX_LEN)
    a, b = long_text(13, seed=1), long_text(13, seed=2)
    assert all(proposer.propose([ask("a", a, 3), ask("b", b, 3)]))
    a += long_text(6, seed=3)
    b += long_text(6, seed=4)
    # The last block that is free holds one position behind the known ones.
    assert proposer.propose([ask("a", a, 3), ask("b", b, 3)]) == [tuple(greedy(model, a, 2)), ()]
    check(proposer)
    assert drafter(proposer).rows.get("b") is None
    assert proposer.propose([ask("a", a, 3), ask("b", b, 3)]) == [tuple(greedy(model, a, 3)), ()]


def test_a_last_block_cuts_the_draft(model: PreTrainedModel) -> None:
    proposer = make(model, num_blocks=5, max_len=MAX_LEN)
    text = long_text(14, seed=1)
    assert proposer.propose([ask("a", text, 9)]) == [tuple(greedy(model, text, 3))]


def test_no_draft_beyond_the_models_context(model: PreTrainedModel) -> None:
    proposer = make(model, max_len=20)
    text = long_text(17, seed=1)
    # Positions 17, 18, 19, and one that is drawn behind the last.
    assert proposer.propose([ask("a", text, 9)]) == [tuple(greedy(model, text, 4))]
    text += greedy(model, text, 3)
    assert proposer.propose([ask("a", text, 9)]) == [tuple(greedy(model, text, 1))]
    text += [11]
    assert proposer.propose([ask("a", text, 9)]) == [()]
    assert drafter(proposer).rows.num_sequences == 0
    check(proposer)


@pytest.mark.parametrize("family", ["phi3-longrope", "llama-dynamic"])
def test_rotations_follow_the_length_of_the_text(family: str) -> None:
    """A short text finds no keys of a long one, nor the other way round, and a text that outgrows the limit is computed
    anew where the target does so too."""
    model = make_dense(random_model(family))
    restarts, text = family == "phi3-longrope", long_text(40, seed=2)
    alone = {num: make(model).propose([ask("a", text[:num], 7)]) for num in (LIMIT - 4, 40)}
    proposer = make(model)
    for name, num_tokens in zip("abcd", (40, LIMIT - 4) * 2, strict=True):
        assert proposer.propose([ask(name, text[:num_tokens], 7)]) == alone[num_tokens], name
    if restarts:
        assert list(alone.values()) == [[tuple(greedy(model, text[:17], 5))], [tuple(greedy(model, text, 7))]]
        for num_tokens, num_drafted in ((LIMIT, 1), (LIMIT + 1, 7), (LIMIT + 6, 7)):
            wanted = greedy(model, text[:num_tokens], num_drafted)
            assert proposer.propose([ask("b", text[:num_tokens], 7)]) == [tuple(wanted)]
        # As with another tokenizer, the end may change.
        assert proposer.propose([ask("a", text[:LIMIT], 7)]) == [tuple(greedy(model, text[:LIMIT], 1))]
    check(proposer)


def test_no_more_than_there_is_room_for(model: PreTrainedModel) -> None:
    proposer = make(model)
    text = long_text(9)
    assert len(proposer.propose([ask("a", text, 5, num_room=2)])[0]) == 2
    assert proposer.propose([ask("a", text, 5, num_room=0)]) == [()]


def test_vocabularies_padded_to_different_sizes(model: PreTrainedModel) -> None:
    """No id that the target lacks comes out, none that the draft model lacks goes in."""
    proposer = make(model)
    text = long_text(9)
    bias = SamplingParams(logit_bias=((98, 1e4),))
    assert proposer.propose([ask("a", text, 3, sampling=bias)]) == [(98, 98, 98)]
    proposer._num_target_ids = 98
    assert proposer.propose([ask("a", text, 3, sampling=bias)]) == [()]
    for bad in (VOCAB_SIZE, -1):
        name = f"bad{bad}"
        assert proposer.propose([ask(name, [*text, bad, 5], 3), ask("b", text, 3)])[0] == ()
        assert proposer.propose([ask(name, [*text, bad, 5, 6], 3)]) == [()]
    grown = make(model)
    assert len(grown.propose([ask("a", text, 3)])[0]) == 3
    assert grown.propose([ask("a", [*text, VOCAB_SIZE], 3)]) == [()]
    check(grown)


def test_too_little_memory_is_said(model: PreTrainedModel) -> None:
    with pytest.raises(OutOfMemory, match="--draft-kv-memory"):
        make(model, num_blocks=2)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_step_that_raises_is_run_row_by_row(model: PreTrainedModel) -> None:
    """Whoever raises alone gets no draft until it is forgotten; the others have theirs."""
    proposer = make(model)
    texts = {name: long_text(9, seed=i) for i, name in enumerate("abc")}
    runner = drafter(proposer).runner
    execute = runner.execute

    def failing(plan: StepPlan) -> Any:
        if any(span.sequence_id == "b" and span.start >= 10 for span in plan.spans):
            raise RuntimeError("no step with b from there on")
        return execute(plan)

    runner.execute = failing  # type: ignore[method-assign]
    drafts = proposer.propose([ask(name, text, 4) for name, text in texts.items()])
    assert [drafts[0], drafts[2]] == [tuple(greedy(model, texts[name], 4)) for name in "ac"]
    assert drafts[1] == tuple(greedy(model, texts["b"], 2))
    runner.execute = execute  # type: ignore[method-assign]
    assert proposer.propose([ask("b", texts["b"], 4)]) == [()]
    check(proposer)
    proposer.end("b")
    assert proposer.propose([ask("b", texts["b"], 4)]) == [tuple(greedy(model, texts["b"], 4))]


def test_not_finite_gives_no_draft(model: PreTrainedModel) -> None:
    proposer = make(copy.deepcopy(model))
    drafter(proposer).loaded.targets["lm_head"].weight[3] = float("nan")
    assert proposer.propose([ask("a", long_text(5)), ask("b", long_text(6))]) == [(), ()]
    check(proposer)


def test_no_exception_leaves(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    """No exception of the drafter's own leaves either. It starts afresh, and when that does not help, stays silent."""
    proposer = make(model)
    text = long_text(9)
    good = [tuple(greedy(model, text, 4))]
    mirror = drafter(proposer).runner.mirror
    rewrite = mirror.rewrite

    def broken(changes: object) -> None:
        raise RuntimeError("broken")

    for _ in range(2):
        assert proposer.propose([ask("a", text)]) == good
        mirror.rewrite = broken  # type: ignore[method-assign]
        assert proposer.propose([ask("a", [*text, 9])]) == [()]
        check(proposer)
        mirror.rewrite = rewrite  # type: ignore[method-assign]
    assert proposer.propose([ask("a", text)]) == good
    mirror.rewrite = broken  # type: ignore[method-assign]
    for _ in range(4):
        assert proposer.propose([ask("a", text)]) == [()]
    assert len([entry for entry in caplog.records if entry.levelname == "ERROR"]) == 2 + 3
    mirror.rewrite = rewrite  # type: ignore[method-assign]
    assert proposer.propose([ask("a", text)]) == [()]


def test_close_gives_everything_back(model: PreTrainedModel) -> None:
    proposer = make(model)
    proposer.propose([ask("a", long_text(9)), ask("b", long_text(9))])
    proposer.close()
    check(proposer)
    assert drafter(proposer).rows.num_sequences == 0
