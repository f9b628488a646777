"""Hostile proposers: no text changes, nothing leaks, other requests go on."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.dense import make_dense
from support.peft_files import SPECS
from support.speculation import BLOCK_SIZE, World, loopy, make_bench, request
from support.zoo import MAX_LEN, VOCAB_SIZE, random_model

from loraplex_contracts.plan import StepPlan
from loraplex_contracts.request import OutputParams, Request, SamplingParams, SpeculationParams, StoppingParams
from loraplex_server.model.isolation import StepHandle
from loraplex_server.speculation.proposer import DRAFT_MODEL, Ask, Proposer

EOS = 48
STOP = 39


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model = make_dense(loopy(random_model("llama"), 0.2))
    model.generation_config.eos_token_id = EOS
    made = World(model, tmp_path_factory.mktemp("world"))
    made.add_lora("lora", SPECS[1], seed=1)
    yield made
    made.close()


def requests(name: str) -> list[Request]:
    """One of everything that ends a completion, greedy and seeded."""
    dice = random.Random(3)
    prompts = [[dice.randrange(2, VOCAB_SIZE) for _ in range(dice.randint(1, 9))] for _ in range(6)]
    # As far as the context goes.
    prompts[1] = [dice.randrange(2, VOCAB_SIZE) for _ in range(MAX_LEN - 9)]
    seeded = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=11)
    found = [
        request(f"{name} length", prompts[0], 13, output=OutputParams(True, 2)),
        request(f"{name} context", prompts[1], 60, sampling=seeded),
        request(f"{name} eos", prompts[2], 30, stopping=StoppingParams(30), sampling=replace(seeded, seed=5), n=2),
        request(f"{name} stop", prompts[3], 30, stopping=StoppingParams(30, stop_token_ids=frozenset({STOP, 61}))),
        request(
            f"{name} min tokens",
            prompts[4],
            30,
            stopping=StoppingParams(30, min_tokens=7, stop_token_ids=frozenset({STOP})),
            sampling=replace(seeded, logit_bias=((EOS, 2.0), (STOP, 2.0))),
        ),
        request(f"{name} lora", prompts[5], 9, sampling=seeded, adapter_id="lora"),
    ]
    return [
        replace(one, speculation=SpeculationParams("draft_model", draft_name=name, fixed_length=idx % 2 == 0))
        for idx, one in enumerate(found)
    ]


# --- what they answer -------------------------------------------------------------------------------------------------

# What is asked for, what is true (all tokens that follow), and dice.
Answer = Callable[[Ask, list[int], random.Random], Any]


def _wrong(truth: Sequence[int]) -> list[int]:
    return [(token_id + 1) % VOCAB_SIZE for token_id in truth]


def _raise(*_: object) -> Any:
    raise RuntimeError("no draft today")


ANSWERS: dict[str, Answer] = {
    "right": lambda ask, truth, dice: tuple(truth[: ask.num_tokens]),
    "right and on": lambda ask, truth, dice: tuple([*truth, 1, 2, 3, 4, 5, 6, 7, 8][: ask.num_tokens]),
    "wrong": lambda ask, truth, dice: tuple(_wrong([*truth, 1, 1, 1])[: ask.num_tokens]),
    "random": lambda ask, truth, dice: tuple(
        dice.choices((EOS, STOP, 61, 83, 2, *truth[:1], *truth[:1]), k=ask.num_tokens)
    ),
    "right for a while": lambda ask, truth, dice: (
        *truth[: dice.randint(0, 3)],
        *_wrong(truth[: dice.randint(0, 3)]),
    ),
    "ends in the middle": lambda ask, truth, dice: (*truth[: dice.randint(0, 2)], EOS, *truth, EOS),
    "stops in the middle": lambda ask, truth, dice: (*truth[: dice.randint(0, 2)], STOP, *truth[2:], STOP, 61),
    "too long": lambda ask, truth, dice: (*truth, *range(2, 90)),
    "too long by far": lambda ask, truth, dice: tuple([*truth, 3] * 400),
    "the last id": lambda ask, truth, dice: (*truth[:1], VOCAB_SIZE - 1, 0, VOCAB_SIZE - 1),
    "beyond the last id": lambda ask, truth, dice: (*truth[: dice.randint(0, 1)], VOCAB_SIZE, *truth[2:]),
    "negative": lambda ask, truth, dice: (*truth[: dice.randint(0, 1)], -1, *truth[2:]),
    "huge": lambda ask, truth, dice: (*truth[: dice.randint(0, 1)], 1 << 70, -(1 << 70)),
    "empty": lambda ask, truth, dice: (),
    "a list": lambda ask, truth, dice: list(truth[: ask.num_tokens]),
    "nothing": lambda ask, truth, dice: None,
    "text": lambda ask, truth, dice: "beat",
    "halves": lambda ask, truth, dice: tuple(token_id + 0.5 for token_id in truth[:3]),
    "raises": _raise,
    "raises at times": lambda ask, truth, dice: _raise() if dice.random() < 0.5 else tuple(truth[:3]),
    "does not forget": lambda ask, truth, dice: tuple(truth[:3]),
    "one answer": lambda ask, truth, dice: tuple(truth[:3]),
    "one answer more": lambda ask, truth, dice: tuple(truth[:3]),
    "an iterator": lambda ask, truth, dice: tuple(truth[:3]),
}
# Whom nothing can be accepted of, and whom nothing is even verified of.
NEVER_RIGHT = {"wrong", "halves"}
NEVER_USED = {"empty", "nothing", "text", "raises", "one answer more"}
ALWAYS_RIGHT = {"right", "a list", "does not forget", "an iterator", "raises at times"}


class Adversary(Proposer):
    """Knows every request's text."""

    name = DRAFT_MODEL

    def __init__(self, kind: str, world: World) -> None:
        self.kind = kind
        self.num_closed = 0
        self._answer = ANSWERS[kind]
        self._world = world
        self._dice = random.Random(kind)

    def propose(self, asks: Sequence[Ask]) -> Any:
        answers = [self._answer(ask, self._truth(ask), self._dice) for ask in asks]
        match self.kind:
            case "one answer":
                return answers[:1]
            case "one answer more":
                return [*answers, (1, 2)]
            case "an iterator":
                return iter(answers)
            case _:
                return answers

    def suspend(self, sequence_id: str) -> None:
        self.end(sequence_id)

    def end(self, sequence_id: str) -> None:
        if self.kind == "does not forget":
            raise RuntimeError("never")

    def close(self) -> None:
        self.num_closed += 1
        if self.kind == "raises":
            _raise()

    def _truth(self, ask: Ask) -> list[int]:
        candidate = ask.candidate
        index = int(candidate.sequence_id.rpartition("#")[2].partition("@")[0])
        text = self._world.text(candidate.request, index)
        num_known = len(candidate.token_ids) - candidate.num_prompt_tokens
        assert list(candidate.token_ids[candidate.num_prompt_tokens :]) == text[:num_known]
        return text[num_known:]


def test_no_proposer_changes_a_text(world: World) -> None:
    """All adversaries draft in one batch, with requests that nobody drafts for among them."""
    adversaries = {kind.replace(" ", "-"): Adversary(kind, world) for kind in ANSWERS}
    asked = [one for name in adversaries for one in requests(name)]
    asked += [replace(one, speculation=SpeculationParams("off")) for one in requests("nobody")]
    random.Random(1).shuffle(asked)
    for one in asked:
        world.twin(one)  # before anybody is asked for the truth
    bench = make_bench(world.model, world.root, num_blocks=40, max_running=8, max_step_tokens=32, drafts=adversaries)
    bench.may_fail = True
    bench.load("lora")
    outcomes = bench.run(asked, random.Random(2))
    world.check(outcomes)
    assert bench.num_preemptions > 0
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for outcome in outcomes.values():
        kind = outcome.request.speculation.draft_name.replace("-", " ")
        drafted[kind] += sum(outcome.drafted.values())
        accepted[kind] += sum(outcome.accepted.values())
    for kind in ANSWERS:
        assert (drafted[kind] > 0) == (kind not in NEVER_USED), kind
        assert (accepted[kind] > 0) == (kind not in NEVER_USED | NEVER_RIGHT), kind
        assert kind not in ALWAYS_RIGHT or accepted[kind] == drafted[kind], kind
    bench.close()
    assert all(adversary.num_closed == 1 for adversary in adversaries.values())


@pytest.mark.parametrize("seed", range(2))
def test_steps_that_raise_are_run_again(world: World, seed: int) -> None:
    """A step that raised runs again with its drafts, sequence by sequence: what was written for it does not count."""
    kinds = ("right", "right for a while", "wrong", "too long")
    adversaries = {kind.replace(" ", "-"): Adversary(kind, world) for kind in kinds}
    asked = [one for name in adversaries for one in requests(name)]
    bench = make_bench(world.model, world.root, num_blocks=60, max_running=6, max_step_tokens=24, drafts=adversaries)
    bench.load("lora")
    runner, dice = bench.engine._runner, random.Random(seed)
    execute, num_raised = runner.execute, 0

    def failing(plan: StepPlan) -> StepHandle:
        nonlocal num_raised
        fails = len(plan.spans) > 1 and dice.random() < 0.3
        # Before the step has run, or with everything written.
        handle = None if fails and dice.random() < 0.5 else execute(plan) if not fails else _interrupted(execute, plan)
        if handle is None:
            num_raised += 1
            raise RuntimeError("this step does not want to")
        return handle

    def _interrupted(execute: Callable[[StepPlan], StepHandle], plan: StepPlan) -> None:
        commit = runner.mirror.commit  # type: ignore[attr-defined]
        runner.mirror.commit = _raise  # type: ignore[attr-defined]
        try:
            execute(plan)
        except RuntimeError:
            pass
        finally:
            runner.mirror.commit = commit  # type: ignore[attr-defined]

    runner.execute = failing  # type: ignore[method-assign, assignment]
    outcomes = bench.run(asked, random.Random(2))
    world.check(outcomes)
    assert num_raised > 5
    assert sum(bench.speculator.accepted.values()) > 50
    bench.close()


@pytest.mark.parametrize("kind", ["wrong", "right for a while", "right and on", "ends in the middle"])
def test_what_was_said_is_found_again_as_it_was(kind: str, world: World) -> None:
    """Later prompts go on from texts that ended at the end of a block, with rejected drafts behind them: what the
    prefix cache has of them is K/V of the text."""
    dice = random.Random(4)
    first: list[Request] = []
    for idx in range(8):
        prompt = [dice.randrange(2, VOCAB_SIZE) for _ in range(dice.randint(1, 9))]
        text = world.text(request("probe", prompt, 20))
        ends = [at for at in range(3, 20) if (len(prompt) + at + 1) % BLOCK_SIZE == 0 and text[at] not in text[:at]]
        stopping = StoppingParams(30, stop_token_ids=frozenset({text[ends[idx % len(ends)]]}), ignore_eos=True)
        first.append(request(f"first {idx}", prompt, 30, stopping=stopping))
    way = SpeculationParams("draft_model", fixed_length=True, max_draft_tokens=4)
    first = [replace(one, speculation=way) for one in first]
    second = [
        request(f"second {idx}", [*one.prompt_token_ids, *world.text(one), 9], 8, output=OutputParams(True))
        for idx, one in enumerate(first)
    ]
    bench = make_bench(world.model, world.root, drafts={"d": Adversary(kind, world)})
    world.check(bench.run(first))
    outcomes = bench.run(second)
    world.check(outcomes)
    for one in second:
        num_missing = len(one.prompt_token_ids) - 1 - outcomes[one.request_id].ends[0].num_cached_tokens
        # A last token that nobody drafted was never run, so the block that it fills is not there.
        assert num_missing in ((BLOCK_SIZE,) if kind == "wrong" else (0, BLOCK_SIZE))
    assert bench.speculator.drafted.total() > bench.speculator.accepted.total()
    bench.close()
