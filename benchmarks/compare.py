"""Comparison of systems in turns: ratios of medians with their spread.

Absolute figures drift from machine to machine and from minute to minute; the ratio of two systems that took turns
within one run does not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from systems import Latency, Run, System

OWN = "loraplex"
OWN_OFF = "loraplex, LoRA off"
MIXED = "loraplex, mixed ranks"
WORKER = "loraplex worker"
ROUTER = "loraplex router"
HTTP = "loraplex serve, HTTP"
HTTP_OFF = "loraplex serve, HTTP, LoRA off"
VLLM = "vLLM"
VLLM_OFF = "vLLM, LoRA off"
VLLM_HTTP = "vLLM, HTTP"
VLLM_HTTP_OFF = "vLLM, HTTP, LoRA off"
PEFT = "PEFT"
BEFORE = ", before"  # behind the name of a system that another checkout has

Figures = dict[str, dict[str, list[float]]]  # system -> workload -> tokens per second, by round
Latencies = dict[str, dict[str, list[Latency]]]  # system -> workload -> of all rounds' requests


def takes_part(system: str, workload: str) -> bool:
    """True if a system is asked to run a workload."""
    is_base = workload.startswith("base-")
    system = system.removesuffix(BEFORE)
    if system.endswith("LoRA off"):
        return is_base
    match system:
        case "loraplex, mixed ranks":
            return workload.startswith("distinct-")
        case "PEFT":
            return not is_base
        case _:
            return True


@dataclass(slots=True)
class Comparison:
    """Owns the figures of one run."""

    systems: Sequence[System]
    workloads: Sequence[str]
    num_rounds: int
    max_rounds: Mapping[str, int] = field(default_factory=dict[str, int])  # of slow systems, fewer
    pause_s: float = 0.5  # between runs, in which another system's threads go to sleep
    figures: Figures = field(default_factory=Figures)
    latencies: Latencies = field(default_factory=Latencies)  # of the systems that tell them

    def run(self, told: Callable[[str, str, Run | None], None]) -> None:
        """`told` hears of every run, with None before it. The first round warms up and is not counted."""
        for number in range(self.num_rounds + 1):
            for workload in self.workloads:
                for system in self._order(workload, number):
                    time.sleep(self.pause_s)
                    told(system.name, workload, None)
                    run = system.run(workload)
                    if number:
                        told(system.name, workload, run)
                        rounds = self.figures.setdefault(system.name, {}).setdefault(workload, [])
                        rounds.append(run.tokens_per_s)
                        if run.latencies:
                            self.latencies.setdefault(system.name, {}).setdefault(workload, []).extend(run.latencies)

    def _order(self, workload: str, number: int) -> list[System]:
        """The systems in this round's order, turned by one each time, so that none always follows the same other."""
        asked = [
            one
            for one in self.systems
            if takes_part(one.name, workload) and number <= self.max_rounds.get(one.name, number)
        ]
        turn = number % len(asked) if asked else 0
        return asked[turn:] + asked[:turn]


@dataclass(frozen=True, slots=True)
class Ratio:
    """One system's workload against another's (or its own)."""

    what: str
    value: float  # of the medians
    least: float  # of the rounds
    most: float
    to_reach: float | None
    better: float | None

    @property
    def is_reached(self) -> bool | None:
        return None if self.to_reach is None else self.value >= self.to_reach


@dataclass(frozen=True, slots=True)
class _Pair:
    over: tuple[str, str]  # system, workload
    under: tuple[str, str]
    to_reach: float | None = None
    better: float | None = None


# workload -> what is aimed at against vLLM with LoRA on: to reach, better still
_AGAINST_VLLM = {
    "identical-1": (2.0, 2.3),
    "identical-8": (2.7, 3.1),
    "distinct-8": (2.8, 3.4),
    "identical-32": (3.0, 3.6),
    "uniform-32": (3.0, 3.6),
    "skewed-32": (3.0, 3.6),
    "distinct-32": (3.0, 3.6),
}


def _pairs(workloads: Sequence[str]) -> list[_Pair]:
    pairs: list[_Pair] = []
    for workload in workloads:
        if workload.startswith("base-"):
            pairs.append(_Pair((OWN_OFF, workload), (VLLM_OFF, workload), 1.0, 1.1))
        pairs.append(_Pair((OWN, workload), (VLLM, workload), *_AGAINST_VLLM.get(workload, (None, None))))
        kind, _, batch = workload.rpartition("-")
        if kind == "distinct":
            goal = (0.7, 0.85) if batch == "32" else (None, None)
            pairs.append(_Pair((OWN, workload), (VLLM_OFF, f"base-{batch}"), *goal))
    pairs += [_Pair((HTTP_OFF, workload), (VLLM_HTTP_OFF, workload)) for workload in workloads]
    pairs += [_Pair((HTTP, workload), (VLLM_HTTP, workload)) for workload in workloads]
    pairs += [_Pair((OWN, workload), (PEFT, workload)) for workload in workloads]
    pairs += [_Pair((OWN, workload), (OWN_OFF, workload), 0.98, 1.0) for workload in workloads]
    pairs += [_Pair((MIXED, workload), (OWN, workload), 0.95) for workload in workloads]
    # Nothing gets slower from one commit to the next.
    pairs += [
        _Pair((name, workload), (before(name), workload), 0.98)
        for name in (OWN, OWN_OFF, WORKER, ROUTER, HTTP, HTTP_OFF)
        for workload in workloads
    ]
    pairs += [_Pair((WORKER, workload), (OWN, workload), 0.95) for workload in workloads]
    pairs += [_Pair((ROUTER, workload), (OWN, workload), 0.90) for workload in workloads]
    pairs += [_Pair((HTTP, workload), (OWN, workload)) for workload in workloads]
    return pairs


def before(name: str) -> str:
    """The same system as another checkout has it."""
    return name + BEFORE


def ratios(figures: Mapping[str, Mapping[str, Sequence[float]]], workloads: Sequence[str]) -> list[Ratio]:
    """Every pair of which both were measured."""
    found: list[Ratio] = []
    for pair in _pairs(workloads):
        over, under = (figures.get(system, {}).get(workload, ()) for system, workload in (pair.over, pair.under))
        if not over or not under:
            continue
        what = f"{pair.over[1]}: {pair.over[0]} / {pair.under[0]}"
        if pair.under[1] != pair.over[1]:
            what += f" on {pair.under[1]}"
        found.append(_ratio(what, over, under, pair))
    return found


def _ratio(what: str, over: Sequence[float], under: Sequence[float], pair: _Pair) -> Ratio:
    num_rounds = min(len(over), len(under))  # a slow system takes part in the first ones only
    over, under = over[:num_rounds], under[:num_rounds]
    by_round = [ours / theirs for ours, theirs in zip(over, under, strict=True)]
    value = statistics.median(over) / statistics.median(under)
    return Ratio(what, value, min(by_round), max(by_round), pair.to_reach, pair.better)
