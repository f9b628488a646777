"""What loading adapters costs the requests that run: step times with a cold adapter coming up per second, and without.

    python benchmarks/loading.py IN_DIR [--rows 8] [--seconds 20] [--rounds 3]

IN_DIR as in workloads.py. `--rows` base requests decode all the time; idle and loading windows take turns, so that both
see the same machine. An adapter that has come up is unloaded at once, so that the next load of it is as cold as the
first (file read, checked, converted, stored, copied to its slot). Prints one JSON line: median and 99th percentile of
the step times in ms, their ratios, and how long a load took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import count, cycle
from pathlib import Path

from inprocess import build
from workloads import adapter_names, read_workload

from loraplex_server.engine.core import Engine
from loraplex_server.engine.messages import AdapterCommand, Submit
from loraplex_server.events import CompletionEnd
from loraplex_server.request import Request, StoppingParams

LOAD_EVERY_S = 1.0


class Bench:
    """Keeps `num_rows` requests decoding, and loads adapters when told to."""

    def __init__(self, engine: Engine, inputs: Path, num_rows: int) -> None:
        self._engine = engine
        self._prompt = read_workload(inputs, "base-1")[0].prompt_ids
        self._names: Iterator[str] = cycle(adapter_names(inputs))
        self._ids = count()
        self._loading: dict[int, tuple[str, float]] = {}
        self.load_seconds: list[float] = []
        for _ in range(num_rows):
            self._submit()

    def _submit(self) -> None:
        stopping = StoppingParams(max_tokens=512, ignore_eos=True)
        self._engine.handle(Submit(Request(f"r{next(self._ids)}", self._prompt, stopping)))

    def window(self, seconds: float, *, loads: bool) -> list[float]:
        """Step times of a window, in seconds."""
        times: list[float] = []
        start = time.perf_counter()
        next_load = start
        while (now := time.perf_counter()) < start + seconds:
            if loads and now >= next_load:
                next_load += LOAD_EVERY_S
                self._load(now)
            times.append(self._turn())
        while self._loading:  # a load that began in this window belongs to it
            times.append(self._turn())
        return times

    def _load(self, now: float) -> None:
        operation = next(self._ids)
        self._loading[operation] = (next(self._names), now)
        self._engine.handle(AdapterCommand(operation, "load", self._loading[operation][0]))

    def _turn(self) -> float:
        start = time.perf_counter()
        batch = self._engine.turn()
        seconds = time.perf_counter() - start
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
        return seconds


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        engine = build(args.inputs, Path(store), lora=True)
        bench = Bench(engine, args.inputs, args.rows)
        bench.window(3.0, loads=True)  # warm-up
        bench.load_seconds.clear()
        idle: list[float] = []
        loading: list[float] = []
        for _ in range(args.rounds):
            idle += bench.window(args.seconds, loads=False)
            loading += bench.window(args.seconds, loads=True)
        row: dict[str, object] = {
            "rows": args.rows,
            "steps": [len(idle), len(loading)],
            "loads": len(bench.load_seconds),
            "load_s": round(statistics.median(bench.load_seconds), 2),
        }
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            alone, busy = percentile(idle, share), percentile(loading, share)
            ms = (round(alone * 1e3, 2), round(busy * 1e3, 2))
            row[name] = {"idle_ms": ms[0], "loading_ms": ms[1], "ratio": round(busy / alone, 3)}
        print(json.dumps(row))
        engine.close()


if __name__ == "__main__":
    main()
