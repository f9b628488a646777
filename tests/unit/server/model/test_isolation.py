"""Steps that raise: spans run apart, a lost device ends the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.engine_fakes import AcceleratorError, FakeRunner

from loraplex_contracts.errors import Internal, OutOfMemory
from loraplex_contracts.plan import BlockCopy, NewSequence, Span, StepPlan, StepResult
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.model.isolation import StepHandle, execute_isolated, start_isolated


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


ILLEGAL = "CUDA error: an illegal memory access was encountered"


def plan_of(*names: str) -> StepPlan:
    """Each enters; the second one's last block is a copy."""
    return StepPlan(
        step=3,
        spans=tuple(Span(name, row, 4, 2, 1) for row, name in enumerate(names)),
        entered=tuple(
            NewSequence(name, row, (5, 6, 7, 8, 9, 10), 6, SamplingParams(), OutputParams())
            for row, name in enumerate(names)
        ),
        released=(7,),
        copies=(BlockCopy(1, 2),),
    )


def raising(error: Exception, when: Callable[[StepPlan], bool] = lambda plan: True) -> FakeRunner:
    def fail(plan: StepPlan) -> None:
        if when(plan):
            raise error

    return FakeRunner(fail)


def test_rows_and_copies_come_once_and_before_the_spans() -> None:
    runner = raising(KeyError("a"), lambda plan: any(span.sequence_id == "a" for span in plan.spans))
    plan = plan_of("a", "b", "c")
    result = execute_isolated(runner.execute, plan)
    first, *lone = runner.plans
    assert (first.spans, first.entered, first.released, first.copies) == (
        (), plan.entered, plan.released, plan.copies
    )  # fmt: skip
    assert [(one.spans, one.entered, one.released, one.copies) for one in lone] == [
        ((span,), (), (), ()) for span in plan.spans[1:]
    ]
    assert isinstance(result.spans["a"].error, Internal)
    assert all(result.spans[name].error is None and result.spans[name].token_ids for name in "bc")


def test_without_its_copies_no_span_runs() -> None:
    """A span whose block was not copied would read what somebody else wrote there."""
    runner = raising(MemoryError(), lambda plan: bool(plan.copies))
    result = execute_isolated(runner.execute, plan_of("a", "b", "c"))
    assert runner.plans == []
    assert all(isinstance(result.spans[name].error, OutOfMemory) for name in "abc")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:40],
)
@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_what_did_not_fit_is_the_requests(error: Exception, names: tuple[str, ...]) -> None:
    result = execute_isolated(raising(error).execute, plan_of(*names))
    assert [type(result.spans[name].error) for name in names] == [OutOfMemory] * len(names)


@pytest.mark.parametrize(
    "error",
    [AcceleratorError(ILLEGAL), RuntimeError(ILLEGAL), RuntimeError("CUDA error: device-side assert triggered")],
    ids=lambda error: f"{type(error).__name__} {error}"[:40],
)
@pytest.mark.parametrize(
    "when",
    [
        lambda plan: True,
        lambda plan: not plan.spans,
        lambda plan: len(plan.spans) == 1,
    ],
    ids=["whole step", "rows and copies", "lone span"],
)
def test_a_lost_device_is_nobodys_failure(error: Exception, when: Callable[[StepPlan], bool]) -> None:
    """Every later step would raise the same, and tell its requests to try a shorter prompt."""

    def fail(plan: StepPlan) -> None:
        if when(plan):
            raise error
        if len(plan.spans) > 1:
            raise KeyError

    with pytest.raises(type(error), match="CUDA error"):
        execute_isolated(FakeRunner(fail).execute, plan_of("a", "b"))


# --- steps behind which another one is started ------------------------------------------------------------------------


class Late:
    """Every step is handed over; what it raises comes with its result."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def execute(self, plan: StepPlan) -> StepHandle:
        return self

    def result(self) -> StepResult:
        raise self.error


def test_what_cannot_be_handed_over_is_run_apart_at_once() -> None:
    runner = raising(KeyError("a"), lambda plan: any(span.sequence_id == "a" for span in plan.spans))
    handle = start_isolated(runner.execute, plan_of("a", "b"))
    assert [[span.sequence_id for span in plan.spans] for plan in runner.plans] == [[], ["b"]]
    result = handle.result()
    assert isinstance(result.spans["a"].error, Internal)
    assert result.spans["b"].token_ids


def test_an_answer_that_cannot_be_read_fails_the_whole_step() -> None:
    handle = start_isolated(Late(MemoryError()).execute, plan_of("a", "b"))
    assert all(isinstance(handle.result().spans[name].error, OutOfMemory) for name in "ab")


def test_a_device_that_is_lost_meanwhile_is_nobodys_failure() -> None:
    handle = start_isolated(Late(AcceleratorError(ILLEGAL)).execute, plan_of("a", "b"))
    with pytest.raises(AcceleratorError):
        handle.result()
    with pytest.raises(AcceleratorError):
        start_isolated(raising(AcceleratorError(ILLEGAL)).execute, plan_of("a", "b"))
