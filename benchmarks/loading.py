"""Benchmark of step times with and without adapters being loaded.

    python benchmarks/loading.py IN_DIR [--rows 8] [--seconds 5] [--rounds 12] [--every 1]

IN_DIR as in workloads.py. `--rows` base requests decode all the time, each at another place of its text, so that every
step reads contexts of the same lengths in all. Idle and loading windows take turns, so that both see the same machine,
and each goes first in every other round. An adapter
that has come up is unloaded at once, so that the next load of it is as cold as the first (file read, checked,
converted, stored, copied to its slot). Prints one JSON line: median and 99th percentile of the step times in ms, their
ratios, how long a load took, and the longest that a turn did anything but compute its step (taking in what has been
loaded, planning, reporting): a step that waited for a load would show there.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

from inprocess import build
from results import add_json_option, recording
from workloads import adapter_names, read_workload

from loraplex_contracts.plan import StepPlan, StepResult
from loraplex_contracts.request import CompletionEnd, Request, StoppingParams
from loraplex_server.engine.engine import Engine, Runner
from loraplex_server.engine.pipe import AdapterCommand, Submit
from loraplex_server.model.isolation import StepHandle

OUTPUT_TOKENS = 1024


class TimedRunner:
    """A runner, and how long it has computed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.overlaps = runner.overlaps
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepHandle:
        start = time.perf_counter()
        handle = self._runner.execute(plan)
        self.seconds += time.perf_counter() - start
        return TimedHandle(handle, self)

    def check_integrity(self) -> None:
        self._runner.check_integrity()


@dataclass
class TimedHandle:
    """A step under way; waiting for it is the runner's time too."""

    handle: StepHandle
    runner: TimedRunner

    def result(self) -> StepResult:
        start = time.perf_counter()
        result = self.handle.result()
        self.runner.seconds += time.perf_counter() - start
        return result


@dataclass
class Turns:
    """Seconds of the turns in one kind of window."""

    steps: list[float] = field(default_factory=list[float])
    others: list[float] = field(default_factory=list[float])  # of each what was not its step's computation


class Bench:
    """Keeps `num_rows` requests decoding, and loads adapters when told to."""

    def __init__(self, engine: Engine, inputs: Path, num_rows: int, load_every_s: float) -> None:
        self._engine = engine
        # Nobody else has to see what a turn is made of.
        self._runner = engine._runner = TimedRunner(engine._runner)  # pyright: ignore[reportPrivateUsage]
        self._prompt = read_workload(inputs, "base-1")[0].prompt_ids
        self._names: Iterator[str] = cycle(adapter_names(inputs))
        self._ids = count()
        self._loading: dict[int, tuple[str, float]] = {}
        self.load_seconds: list[float] = []
        self._load_every_s = load_every_s
        for row in range(num_rows):
            self._submit(OUTPUT_TOKENS * (row + 1) // num_rows)

    def _submit(self, num_tokens: int = OUTPUT_TOKENS) -> None:
        stopping = StoppingParams(max_tokens=num_tokens, ignore_eos=True)
        self._engine.handle(Submit(Request(f"r{next(self._ids)}", self._prompt, stopping)))

    def window(self, seconds: float, *, loads: bool, into: Turns) -> None:
        start = time.perf_counter()
        next_load = start
        while (now := time.perf_counter()) < start + seconds:
            if loads and now >= next_load:
                next_load += self._load_every_s
                self._load(now)
            self._turn(into)
        while self._loading:  # a load that began in this window belongs to it
            self._turn(into)

    def _load(self, now: float) -> None:
        operation = next(self._ids)
        self._loading[operation] = (next(self._names), now)
        self._engine.handle(AdapterCommand(operation, "load", self._loading[operation][0]))

    def _turn(self, into: Turns) -> None:
        self._runner.seconds = 0.0
        start = time.perf_counter()
        batch = self._engine.turn()
        seconds = time.perf_counter() - start
        into.steps.append(seconds)
        into.others.append(seconds - self._runner.seconds)
        for event in batch.events if batch is not None else ():
            if isinstance(event, CompletionEnd):
                self._submit()
        for reply in batch.replies if batch is not None else ():
            if reply.operation_id in self._loading:
                name, started = self._loading.pop(reply.operation_id)
                if reply.error is not None:
                    raise SystemExit(str(reply.error))
                self.load_seconds.append(time.perf_counter() - started)
                self._engine.handle(AdapterCommand(next(self._ids), "unload", name))


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between loads")
    parser.add_argument("--flags", type=shlex.split, default=[], help="of `loraplex worker`, in one string")
    add_json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as store, recording(args.json) as record:
        engine = build(args.inputs, Path(store), lora=True, flags=args.flags)
        bench = Bench(engine, args.inputs, args.rows, args.every)
        bench.window(3.0, loads=True, into=Turns())  # warm-up
        bench.load_seconds.clear()
        idle, loading = Turns(), Turns()
        for number in range(args.rounds):
            for loads in (False, True) if number % 2 == 0 else (True, False):
                bench.window(args.seconds, loads=loads, into=loading if loads else idle)
        row: dict[str, object] = {
            "rows": args.rows,
            "steps": [len(idle.steps), len(loading.steps)],
            "loads": len(bench.load_seconds),
            "load_s": round(statistics.median(bench.load_seconds), 3),
        }
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            alone, busy = percentile(idle.steps, share), percentile(loading.steps, share)
            row[name] = {"idle_ms": _ms(alone), "loading_ms": _ms(busy), "ratio": round(busy / alone, 3)}
        row["longest_besides_step"] = {"idle_ms": _ms(max(idle.others)), "loading_ms": _ms(max(loading.others))}
        record(row)
        engine.close()


if __name__ == "__main__":
    main()
