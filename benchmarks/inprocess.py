"""Loraplex's engine in the benchmark's own process, without gRPC.

    python inprocess.py IN_DIR [--lora-off] [--isa avx2] [FLAG ...]   as a system under comparison (see peers/lines.py)

Prefix cache off, greedy, `ignore_eos`, requests when they are due. FLAGs as `loraplex worker` takes them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import typer
from isa import ISAS, use_isa
from peers.lines import answer, take_stdout
from workloads import WorkItem, read_workload

import loraplex_proto
from loraplex_contracts.request import CompletionEnd, Request, RequestFailed, StoppingParams, Tokens
from loraplex_contracts.sampling import SamplingParams
from loraplex_server.backends.cpu.native.library import load
from loraplex_server.cli.worker import worker, worker_config
from loraplex_server.config import EngineConfig
from loraplex_server.engine.assembly import build_engine
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Submit

IDLE_S = 0.001  # at most, between turns without a step: arrivals are looked at then


def worker_flags(inputs: Path, store: Path, *, lora: bool) -> list[str]:
    """Flags of the engine, the same in process and for `loraplex worker`."""
    flags = [str(inputs / "model"), "--device", "cpu", "--no-prefix-caching", "--kv-memory", "1GiB"]
    flags += ["--max-running", "32", "--max-step-tokens", "2048", "--adapter-store", str(store)]
    flags += ["--max-queue-wait", "0"]  # nothing is refused for its expected wait
    return [*flags, "--adapters", str(inputs / "adapters")] if lora else flags


def engine_config(flags: Sequence[str]) -> EngineConfig:
    """The engine's configuration, from the command line of `loraplex worker`."""
    app = typer.Typer(add_completion=False)
    app.command()(worker)
    given = typer.main.get_command(app).make_context("worker", list(flags)).params
    return worker_config(given["model"], given).engine


def build(
    inputs: Path, store: Path, lora: bool, flags: Sequence[str] = (), notify: Callable[[], None] = lambda: None
) -> Engine:
    config = engine_config([*worker_flags(inputs, store, lora=lora), *flags])
    if load().library is None:
        print(f"no native CPU kernels, so PyTorch's are measured: {load().status.reason}", file=sys.stderr)
    return build_engine(config, lambda text: None, notify)


class EngineSystem:
    """Runs workloads on an engine, one after the other."""

    def __init__(self, inputs: Path, store: Path, lora: bool, flags: Sequence[str] = ()) -> None:
        self._has_news = threading.Event()
        self._engine = build(inputs, store, lora, flags, self._has_news.set)
        self._inputs = inputs
        self._ids = count()

    def close(self) -> None:
        self._engine.close()

    def prepare(self, workload: str) -> Callable[[], int]:
        items = read_workload(self._inputs, workload)
        return lambda: self._run(items)

    def _run(self, items: list[WorkItem]) -> int:
        """Runs the items, from first submission to last completion. Returns the number of tokens that came out."""
        num_tokens, num_open = 0, len(items)
        waiting = deque(sorted(items, key=lambda item: item.arrival_s))
        start_s = time.perf_counter()
        while num_open:
            now_s = time.perf_counter() - start_s
            while waiting and waiting[0].arrival_s <= now_s:
                self._engine.handle(Submit(self._request(waiting.popleft())))
            self._has_news.clear()
            batch = self._engine.turn()
            if not self._engine.can_step:  # a loop without a pause would take the interpreter from those who load
                self._has_news.wait(IDLE_S)
            for event in batch.events if batch is not None else ():
                if isinstance(event, RequestFailed):
                    raise SystemExit(f"{event.request_id}: {event.error}")
                if isinstance(event, Tokens):
                    num_tokens += len(event.token_ids)
                num_open -= isinstance(event, CompletionEnd)
        return num_tokens

    def _request(self, item: WorkItem) -> Request:
        stopping = StoppingParams(max_tokens=item.max_tokens, ignore_eos=True)
        sampling: Any = {"temperature": 0.0, **item.sampling}
        return Request(
            f"r{next(self._ids)}", item.prompt_ids, stopping, SamplingParams(**sampling), adapter_id=item.adapter_id
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--lora-off", action="store_true", help="serve no adapters at all")
    parser.add_argument("--isa", choices=ISAS, help="a lesser instruction set than the best")
    args, flags = parser.parse_known_args()
    replies = take_stdout()
    use_isa(args.isa)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the store goes with the process
    with tempfile.TemporaryDirectory() as store:
        system = EngineSystem(args.inputs, Path(store), lora=not args.lora_off, flags=flags)
        answer(system.prepare, {"loraplex": loraplex_proto.__version__, "torch": str(torch.__version__)}, replies)
        system.close()


if __name__ == "__main__":
    main()
