"""Decode and verification steps by batch and popularity, with their bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpu_bench.adapters import choose_slots
from gpu_bench.deadline import Deadline
from gpu_bench.floors import adapter_bytes, kv_bytes, weight_bytes
from gpu_bench.shapes import POPULARITIES, Shape
from gpu_bench.stepper import NUM_UNTIMED, Scenario, Stepper

BASE, UNUSED, VERIFY = "base", "unused", "verification"


@dataclass(frozen=True)
class StepFigure:
    """One line of the table."""

    batch: int
    scenario: str
    num_distinct: int
    step_ms: float  # median of the rounds
    min_ms: float
    max_ms: float
    ratio: float  # to the scenario that it is compared with: median of the rounds' ratios
    floor_ms: float  # weights, KV and the factors of the distinct adapters at the device's read bandwidth
    times_floor: float


@dataclass(frozen=True)
class Bar:
    """A figure to reach; `better` is a figure to hope for."""

    scenario: str
    batch: int  # 0: every one
    limit: float
    better: float | None
    is_of_floor: bool = False  # the limit is on the ratio to the floor


BARS = (
    Bar(BASE, 0, 1.5, 1.35, is_of_floor=True),
    Bar(UNUSED, 0, 1.01, None),
    Bar("identical", 8, 1.15, 1.06),
    Bar("distinct", 8, 1.20, 1.12),
    Bar("distinct", 32, 1.40, 1.30),
    Bar(VERIFY, 8, 1.15, None),
    Bar(f"{VERIFY}, distinct", 8, 1.15, None),
)


def decode_scenarios(batch: int) -> list[Scenario]:
    plain: tuple[int | None, ...] = (None,) * batch
    return [
        Scenario(BASE, plain, is_installed=False),
        Scenario(UNUSED, plain),
        *(Scenario(name, tuple(choose_slots(name, batch))) for name in POPULARITIES),
    ]


def verify_scenarios(shape: Shape) -> list[Scenario]:
    """Scenarios of `verify_batch` requests, without adapters and with: a plain step, and one that verifies a draft."""
    batch, num = shape.verify_batch, shape.num_draft_tokens
    plain: tuple[int | None, ...] = (None,) * batch
    distinct = tuple(choose_slots("distinct", batch))
    return [
        Scenario(BASE, plain, is_installed=False),
        Scenario(VERIFY, plain, is_installed=False, num_draft_tokens=num),
        Scenario("distinct", distinct),
        Scenario(f"{VERIFY}, distinct", distinct, num_draft_tokens=num, over="distinct"),
    ]


def measure(stepper: Stepper, scenarios: Sequence[Scenario], bandwidth: float) -> list[StepFigure]:
    """Scenarios take turns, so that whatever disturbs the machine disturbs all."""
    shape = stepper.shape
    seconds: dict[str, list[float]] = {scenario.name: [] for scenario in scenarios}
    for round_idx in range(shape.num_rounds + 1):
        for scenario in scenarios:
            stepper.install(scenario.batch if scenario.is_installed else 0)
            found = stepper.time_steps(scenario, shape.num_steps if round_idx else 1)
            if round_idx:  # before that kernels are compiled
                seconds[scenario.name].append(found)
    return [_figure(stepper, scenario, seconds, bandwidth) for scenario in scenarios]


def _figure(stepper: Stepper, scenario: Scenario, seconds: dict[str, list[float]], bandwidth: float) -> StepFigure:
    shape, loaded, found = stepper.shape, stepper.loaded, seconds[scenario.name]
    num_bytes = weight_bytes(loaded) + kv_bytes(loaded, shape, scenario.batch)
    num_bytes += scenario.num_distinct * adapter_bytes(loaded, shape.rank)
    ratios = [one / other for one, other in zip(found, seconds[scenario.over], strict=True)]
    median = statistics.median(found)
    floor = num_bytes / bandwidth
    return StepFigure(
        batch=scenario.batch,
        scenario=scenario.name,
        num_distinct=scenario.num_distinct,
        step_ms=1000 * median,
        min_ms=1000 * min(found),
        max_ms=1000 * max(found),
        ratio=statistics.median(ratios),
        floor_ms=1000 * floor,
        times_floor=median / floor,
    )


def expected_s(stepper: Stepper, scenarios: Sequence[Scenario]) -> float:
    """An upper bound of `measure`'s time, from one step of each; the first may compile kernels."""
    shape, seconds = stepper.shape, 0.0
    for scenario in scenarios:
        stepper.install(scenario.batch if scenario.is_installed else 0)
        seconds += stepper.time_steps(scenario, 1)
    # Beside the steps: entering rows, installing adapters.
    return (shape.num_steps + NUM_UNTIMED + 2) * (shape.num_rounds + 1) * seconds * 1.2 + 1.0


def all_steps(
    stepper: Stepper, bandwidth: float, deadline: Deadline, say: Callable[[str], None]
) -> Iterator[StepFigure]:
    """Batches in the shape's order, the verification after the first."""
    shape = stepper.shape
    parts = [(f"decode steps at batch {batch}", decode_scenarios(batch)) for batch in shape.batches]
    parts.insert(1, ("verification", verify_scenarios(shape)))
    for what, scenarios in parts:
        if not (deadline.allows(what, 1.0) and deadline.allows(what, expected_s(stepper, scenarios))):
            continue
        say(what)
        found = measure(stepper, scenarios, bandwidth)
        yield from found if what != "verification" else [figure for figure in found if VERIFY in figure.scenario]
    stepper.install(0)


def check_bars(figures: Sequence[StepFigure]) -> list[dict[str, Any]]:
    """Every bar with what was found; a bar nothing was measured for is neither reached nor missed."""
    rows: list[dict[str, Any]] = []
    for bar in BARS:
        found = [f for f in figures if f.scenario == bar.scenario and bar.batch in (0, f.batch)]
        for figure in found:
            value = figure.times_floor if bar.is_of_floor else figure.ratio
            rows.append(
                {
                    **asdict(bar),
                    "batch": figure.batch,
                    "found": value,
                    "is_reached": value <= bar.limit,
                    "is_better": bar.better is not None and value <= bar.better,
                }
            )
        if not found:
            rows.append({**asdict(bar), "found": None, "is_reached": None, "is_better": None})
    return rows
