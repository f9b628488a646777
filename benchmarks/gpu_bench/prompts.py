"""Steps with prompts, from graphs and launched one by one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpu_bench.deadline import Deadline
from gpu_bench.stepper import Stepper

NEEDED_S = 15.0  # for the shape of an 8B model; host and device take turns


@dataclass(frozen=True)
class PromptFigure:
    """One step of new prompts, from its plan to its first tokens on the host. Medians of the rounds."""

    num_prompts: int
    num_tokens: int  # of each
    scenario: str
    graph_ms: float
    eager_ms: float
    ratio: float  # graph to eager, of rounds in turns


def all_prompts(stepper: Stepper, deadline: Deadline, say: Callable[[str], None]) -> Iterator[PromptFigure]:
    """Figures of each step of the shape, without an adapter and with one; none where there are no graphs."""
    if stepper.num_graphs == 0:
        deadline.left_out.append("prompts (there are no graphs)")
        return
    stepper.install(1)
    for num_prompts, num_tokens in stepper.shape.prompts:
        for scenario, slot in (("base", None), ("adapter", 0)):
            if not deadline.allows(f"prompts {num_prompts} x {num_tokens} {scenario}", NEEDED_S):
                continue
            say(f"prompts {num_prompts} x {num_tokens}, {scenario}")
            yield _figure(stepper, num_prompts, num_tokens, scenario, slot)


def _figure(stepper: Stepper, num_prompts: int, num_tokens: int, scenario: str, slot: int | None) -> PromptFigure:
    shape = stepper.shape
    graph: list[float] = []
    eager: list[float] = []
    for round_idx in range(shape.num_rounds + 1):
        for found, replays in ((graph, True), (eager, False)):
            num_steps = shape.num_steps // 2 if round_idx else 1
            seconds = stepper.time_prompts(num_prompts, num_tokens, slot, num_steps, replays=replays)
            if round_idx:  # before that kernels are compiled
                found.append(seconds)
    return PromptFigure(
        num_prompts=num_prompts,
        num_tokens=num_tokens,
        scenario=scenario,
        graph_ms=1000 * statistics.median(graph),
        eager_ms=1000 * statistics.median(eager),
        ratio=statistics.median(one / other for one, other in zip(graph, eager, strict=True)),
    )
