"""Runs workloads on the engine in process and prints one JSON line each: output tokens per second, prefill included.

    python benchmarks/serving.py IN_DIR WORKLOAD [WORKLOAD ...] [--repeat 3] [--lora-off]

IN_DIR as in workloads.py. Greedy, `ignore_eos`, prefix cache off, all requests at once: what a peer's script does with
the same files can be compared. Absolute figures drift between machines; compare interleaved runs on one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from workloads import WorkItem, read_workload

from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig
from loraplex_server.engine.build import build_engine
from loraplex_server.engine.core import Engine
from loraplex_server.engine.messages import Submit
from loraplex_server.events import CompletionEnd, RequestFailed
from loraplex_server.request import Request, StoppingParams


def run_once(engine: Engine, items: list[WorkItem], tag: str) -> float:
    """Seconds from the first submission to the last completion."""
    start = time.perf_counter()
    for number, item in enumerate(items):
        stopping = StoppingParams(max_tokens=item.max_tokens, ignore_eos=True)
        engine.handle(Submit(Request(f"{tag}-{number}", item.prompt_ids, stopping, adapter_id=item.adapter_id)))
    num_open = len(items)
    while num_open:
        batch = engine.turn()
        for event in batch.events if batch is not None else ():
            if isinstance(event, RequestFailed):
                raise SystemExit(f"{event.request_id}: {event.error}")
            num_open -= isinstance(event, CompletionEnd)
    return time.perf_counter() - start


def build(inputs: Path, store: Path, lora: bool) -> Engine:
    adapters = AdaptersConfig(root=inputs / "adapters", store_dir=store) if lora else AdaptersConfig(store_dir=store)
    config = EngineConfig(
        model=ModelConfig(str(inputs / "model"), device="cpu"),
        kv=KvConfig(prefix_caching=False, memory_bytes=1 << 30),
        batch=BatchConfig(max_running=32, max_step_tokens=2048),
        adapters=adapters,
    )
    return build_engine(config, lambda text: None, lambda: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--lora-off", action="store_true", help="serve no adapters at all")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        engine = build(args.inputs, Path(store), lora=not args.lora_off)
        for name in args.workloads:
            items = read_workload(args.inputs, name)
            # The first run warms up (and loads the adapters) and is not counted.
            seconds = [run_once(engine, items, f"{name}-{i}") for i in range(args.repeat + 1)][1:]
            num_tokens = sum(item.max_tokens for item in items)
            median = statistics.median(seconds)
            row = {
                "system": "loraplex" + ("-lora-off" if args.lora_off else ""),
                "workload": name,
                "seconds": round(median, 3),
                "tokens": num_tokens,
                "tokens_per_s": round(num_tokens / median, 1),
                "spread": [round(num_tokens / s, 1) for s in (max(seconds), min(seconds))],
            }
            print(json.dumps(row), flush=True)
        engine.close()


if __name__ == "__main__":
    main()
