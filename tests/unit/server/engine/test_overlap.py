"""Overlapping steps of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
import torch
from support.engine_fakes import EOS, Done, FakeCache, FakeRunner, make_engine
from support.zoo import VOCAB_SIZE, random_model

from loraplex_contracts.errors import Cancelled, Draining
from loraplex_contracts.plan import SpanResult, StepPlan, StepResult
from loraplex_contracts.request import (
    CompletionEnd,
    Event,
    Request,
    RequestFailed,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    Tokens,
)
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig
from loraplex_server.engine import assembly as build
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Cancel, Submit
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.runner import ModelRunner
from loraplex_server.speculation.speculator import Speculator


@dataclass
class _Late:
    runner: LateRunner
    done: Done

    def result(self) -> StepResult:
        self.runner.log.append(f"result {self.done.step.step}")
        return self.done.result()


@dataclass
class LateRunner(FakeRunner):
    """Records the calls and results, in order."""

    log: list[str] = field(default_factory=list)
    overlaps: bool = True

    def execute(self, plan: StepPlan) -> _Late:  # type: ignore[override]
        self.log.append(f"execute {plan.step}")
        return _Late(self, super().execute(plan))


def request(request_id: str, *, max_tokens: int = 4, **more: object) -> Request:
    return Request(request_id, (20, 21, 22, 23, 24), StoppingParams(max_tokens), **more)  # type: ignore[arg-type]


def run(engine: Engine, max_turns: int = 400) -> list[Event]:
    events: list[Event] = []
    for _ in range(max_turns):
        batch = engine.turn()
        events += batch.events if batch is not None else ()
        if not engine.can_step:
            return events
    raise AssertionError("still not done")


def test_a_step_is_handed_over_before_the_last_result() -> None:
    runner = LateRunner()
    engine = make_engine(runner)
    engine.handle(Submit(request("r")))
    events = run(engine)
    assert [t for e in events if isinstance(e, Tokens) for t in e.token_ids] == [15, 16, 17, 18]
    assert runner.log == [
        "execute 1", "execute 2", "result 1", "execute 3", "result 2", "execute 4", "result 3", "result 4",
    ]  # fmt: skip
    assert isinstance(events[-1], CompletionEnd)
    assert engine.integrity_report() == ""


def test_the_loop_comes_round_after_the_last_result() -> None:
    """A turn follows the last result: requests that waited for blocks can run now, and nothing else would wake the
    engine."""
    engine = make_engine(LateRunner())
    engine.handle(Submit(request("r", max_tokens=1)))
    assert engine.turn() is not None
    assert engine.can_step
    run(engine)
    assert not engine.can_step


def test_drafts_follow_tokens_that_are_known() -> None:
    """The engine waits for every result while a sequence that speculates decodes; the others run ahead before and
    after."""
    runner = LateRunner()
    engine = make_engine(runner)
    engine.handle(Submit(request("plain", max_tokens=12)))
    for _ in range(3):
        engine.turn()
    engine.handle(Submit(request("drafts", max_tokens=3, speculation=SpeculationParams(kind="prompt_lookup"))))
    run(engine)
    first = runner.log.index("execute 5")  # step 4 computes the prompt
    assert runner.log[first - 3 : first] == ["execute 4", "result 3", "result 4"]
    serial = [f"{what} {step}" for step in (5, 6) for what in ("execute", "result")]
    assert runner.log[first : first + 4] == serial
    assert runner.log[-3:] == ["execute 12", "result 11", "result 12"]


def test_one_that_speculates_and_waits_costs_the_others_nothing() -> None:
    runner = LateRunner()
    engine = make_engine(runner, max_running=1)
    engine.handle(Submit(request("plain", max_tokens=8)))
    engine.turn()
    engine.handle(Submit(request("drafts", max_tokens=2, speculation=SpeculationParams(kind="prompt_lookup"))))
    run(engine)
    for step in range(2, 8):
        assert runner.log.index(f"execute {step + 1}") < runner.log.index(f"result {step}")
    assert engine.integrity_report() == ""


def test_steps_overlap_while_nothing_may_be_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps overlap, for example, in a cooldown after drafts that were rejected."""
    monkeypatch.setattr(Speculator, "may_draft", lambda self, decoding: False)
    runner = LateRunner()
    engine = make_engine(runner)
    engine.handle(Submit(request("drafts", max_tokens=6, speculation=SpeculationParams(kind="prompt_lookup"))))
    run(engine)
    assert all(runner.log.index(f"execute {n + 1}") < runner.log.index(f"result {n}") for n in range(1, 6))


@dataclass
class GuessedWrong(LateRunner):
    """Samples what prompt lookup guesses wrong too often; a request's second completion ends with its first token."""

    random: Random = field(default_factory=lambda: Random(1))

    def execute(self, plan: StepPlan) -> _Late:  # type: ignore[override]
        self.log.append(f"execute {plan.step}")
        results = {
            span.sequence_id: SpanResult((EOS if "#1@" in span.sequence_id else self.random.choice((2, 3)),))
            for span in plan.spans
        }
        return _Late(self, Done(StepResult(plan.step, results)))


@pytest.mark.parametrize(("n", "waiting"), [(1, False), (1, True), (2, False)])
def test_steps_overlap_in_a_cooldown_whoever_was_never_drafted_for(n: int, waiting: bool) -> None:
    """A request that waits for the only row, and a completion that ended before it could have a draft."""
    runner = GuessedWrong()
    engine = make_engine(runner, max_running=n)
    prompt = tuple(Random(2).choices((2, 3), k=30))
    speculation = SpeculationParams("prompt_lookup")
    engine.handle(Submit(Request("r", prompt, StoppingParams(100), speculation=speculation, n=n)))
    if waiting:
        engine.handle(Submit(Request("waits", prompt, StoppingParams(1), speculation=speculation)))
    run(engine)
    num_steps = sum(entry.startswith("execute") for entry in runner.log)
    places = [(runner.log.index(f"execute {step + 1}"), runner.log.index(f"result {step}")) for step in range(1, 90)]
    assert num_steps > 90
    assert sum(following < result for following, result in places) > 20


def test_a_shutdown_waits_for_the_step_under_way() -> None:
    cache = FakeCache()
    engine = make_engine(LateRunner(), cache)
    engine.handle(Submit(request("r", max_tokens=50, adapter_id="a")))
    for _ in range(3):
        engine.turn()
    (end,) = [e for e in engine.abort_all().events if isinstance(e, RequestFailed)]
    assert isinstance(end.error, Draining)
    assert engine.integrity_report() == ""


def test_a_cancelled_requests_last_step_counts_for_nobody() -> None:
    engine = make_engine(LateRunner())
    engine.handle(Submit(request("r", max_tokens=50, adapter_id="a")))
    for _ in range(3):
        engine.turn()
    engine.handle(Cancel("r", Cancelled("gone")))
    events = run(engine)
    assert [type(event) for event in events] == [RequestFailed]
    assert engine.integrity_report() == ""


@pytest.mark.parametrize("seed", [0, 1])
def test_texts_do_not_depend_on_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real runner and scheduler, few blocks, stop tokens, several completions, sampled and greedy."""
    torch.set_num_threads(1)

    def texts(overlaps: bool) -> dict[tuple[str, int], list[int]]:
        monkeypatch.setattr(build, "ModelRunner", partial(ModelRunner, overlaps=overlaps))
        config = EngineConfig(
            ModelConfig("./none"),
            KvConfig(block_size=4, memory_bytes=30 * 4 * 2 * 2 * 16 * 2 * 8),
            BatchConfig(4, 16),
            AdaptersConfig(device_bytes=1 << 20, host_bytes=1 << 20, disk_bytes=1 << 20, num_device_slots=2),
        )
        engine = build.assemble(adopt_model(random_model("llama")), config, lambda text: None, lambda: None)
        torch.manual_seed(seed)
        for idx in range(8):
            length = 1 + int(torch.randint(20, ()))
            stopping = StoppingParams(10, stop_token_ids=frozenset(range(90, VOCAB_SIZE)))
            sampling = SamplingParams(temperature=0.8 if idx % 2 else 0.0, seed=idx, repetition_penalty=1.2)
            prompt = tuple(torch.randint(2, VOCAB_SIZE, (length,)).tolist())
            engine.handle(Submit(Request(f"r{idx}", prompt, stopping, sampling=sampling, n=1 + idx % 2)))
        found: dict[tuple[str, int], list[int]] = {}
        events = run(engine)
        assert not any(isinstance(event, RequestFailed) for event in events)
        for event in events:
            if isinstance(event, Tokens):
                found.setdefault((event.request_id, event.index), []).extend(event.token_ids)
        assert engine.integrity_report() == ""
        engine.close()
        return found

    assert texts(overlaps=True) == texts(overlaps=False)
