"""Isolation of the sequences that fail a step.

A step that raised runs again span by span, and only the spans that raise alone fail. A lost device is no request's
failure: that error leaves, and the engine ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from loraplex_contracts.errors import LoraplexError, OutOfMemory, is_out_of_memory, unexpected
from loraplex_contracts.plan import SpanResult, StepPlan, StepResult

log = logging.getLogger(__name__)


class StepHandle(Protocol):
    """A step under way; `result` waits for it."""

    def result(self) -> StepResult: ...


class Execute(Protocol):
    """Starts a step. May raise, as may the handle's `result`; nothing of the step is committed then."""

    def __call__(self, plan: StepPlan) -> StepHandle: ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a step that is over."""

    done: StepResult

    def result(self) -> StepResult:
        return self.done


def execute_isolated(execute: Execute, plan: StepPlan) -> StepResult:
    """Runs `plan`. A failing sequence gets `SpanResult.error`, its neighbours their tokens.

    Raises only errors of a lost device, which every later step would raise too.
    """
    try:
        return execute(plan).result()
    except Exception as error:
        return _run_apart(execute, plan, error)


def start_isolated(execute: Execute, plan: StepPlan) -> StepHandle:
    """Does what `execute_isolated` does, for a step that may be followed by another one before its result is read.

    A failure at the start runs the spans apart at once. A later one (the device's answer cannot be read) fails all
    sequences of the step: the next step has used their tokens already.
    """
    try:
        return _Reading(plan, execute(plan))
    except Exception as error:
        return FinishedStep(_run_apart(execute, plan, error))


@dataclass(frozen=True, slots=True)
class _Reading:
    """The handle of a step whose result may raise."""

    plan: StepPlan
    handle: StepHandle

    def result(self) -> StepResult:
        try:
            return self.handle.result()
        except Exception as error:
            _raise_if_lost(error)
            return _all_failed(self.plan, error)


def _run_apart(execute: Execute, plan: StepPlan, error: Exception) -> StepResult:
    """Runs the spans of a plan that has raised `error` one by one. Raises errors of a lost device."""
    _raise_if_lost(error)
    if len(plan.spans) == 1:
        return _all_failed(plan, error)
    log.warning("step %d raised %s; running its %d spans apart", plan.step, type(error).__name__, len(plan.spans))
    # Rows enter and leave, and blocks are copied, before any span: one that ran without its copy would read, and
    # publish to the prefix cache, what another sequence left in the block.
    try:
        execute(StepPlan(plan.step, (), plan.entered, plan.released, plan.copies)).result()
    except Exception as error:
        _raise_if_lost(error)
        return _all_failed(plan, error)
    results: dict[str, SpanResult] = {}
    for span in plan.spans:
        try:
            results[span.sequence_id] = execute(StepPlan(plan.step, (span,))).result().spans[span.sequence_id]
        except Exception as error:
            _raise_if_lost(error)
            results[span.sequence_id] = SpanResult(error=typed_error(error))
    return StepResult(plan.step, results)


def typed_error(error: Exception, doing: str = "running a step") -> LoraplexError:
    """The typed error for what a step, or a part of one, raised."""
    if isinstance(error, LoraplexError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory("this request's step did not fit the memory; try a shorter prompt", retry_after_s=1.0)
    return unexpected(error, doing)


def _all_failed(plan: StepPlan, error: Exception) -> StepResult:
    failed = SpanResult(error=typed_error(error))
    return StepResult(plan.step, {span.sequence_id: failed for span in plan.spans})


def _raise_if_lost(error: Exception) -> None:
    """Raises errors of a lost device: after an illegal access or a failed assertion every call raises the same."""
    if _is_of_the_device(error) and not is_out_of_memory(error):
        raise error


def _is_of_the_device(error: Exception) -> bool:
    """True if torch says that the device raised the error. Older versions of torch raise a plain RuntimeError."""
    is_plain = isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
    return is_plain or type(error).__name__ == "AcceleratorError"
