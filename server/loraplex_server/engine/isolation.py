"""One request's failure never fails the batch: a step that raised is run again span by span, and whoever raises alone
is the one that fails."""

from __future__ import annotations

import logging
from typing import Protocol

from loraplex_proto.errors import LoraplexError, OutOfMemory, unexpected
from loraplex_server.scheduler.plan import SpanResult, StepPlan, StepResult

log = logging.getLogger(__name__)


class StepHandle(Protocol):
    """A step under way; `result` waits for it."""

    def result(self) -> StepResult: ...


class Execute(Protocol):
    """Starts a step. May raise, as may the handle's `result`; nothing of the step is committed then."""

    def __call__(self, plan: StepPlan) -> StepHandle: ...


def execute_isolated(execute: Execute, plan: StepPlan) -> StepResult:
    """Runs `plan`; never raises. A failing sequence gets `SpanResult.error`, its neighbours their tokens."""
    try:
        return execute(plan).result()
    except Exception as error:
        if len(plan.spans) == 1:
            span = plan.spans[0]
            return StepResult(plan.step, {span.sequence_id: SpanResult(error=typed(error))})
        log.warning("step %d raised %s; running its %d spans apart", plan.step, type(error).__name__, len(plan.spans))
    results: dict[str, SpanResult] = {}
    for num_done, span in enumerate(plan.spans):
        # Rows enter and leave once, blocks are copied once: with the first of them.
        is_first = num_done == 0
        alone = StepPlan(
            step=plan.step,
            spans=(span,),
            entered=plan.entered if is_first else (),
            released=plan.released if is_first else (),
            copies=plan.copies if is_first else (),
        )
        try:
            results[span.sequence_id] = execute(alone).result().spans[span.sequence_id]
        except Exception as error:
            results[span.sequence_id] = SpanResult(error=typed(error))
    return StepResult(plan.step, results)


def typed(error: Exception) -> LoraplexError:
    """The typed error for what a step raised."""
    if isinstance(error, LoraplexError):
        return error
    if isinstance(error, MemoryError) or type(error).__name__ in {"OutOfMemoryError", "AcceleratorError"}:
        return OutOfMemory("this request's step did not fit the memory; try a shorter prompt", retry_after_s=1.0)
    return unexpected(error, "running a step")
