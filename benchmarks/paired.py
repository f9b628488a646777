"""Paired benchmark: two engines in one process take steps in turn.

    python benchmarks/paired.py IN_DIR {unused,ranks,int8,int4} [WORKLOAD ...] [--output 256] [--rounds 3] [--isa avx2]

unused  LoRA switched on, but no request asks for an adapter, against an engine without adapters; default: base-8.
ranks   adapters of ranks 8, 8, 16, 32 against adapters that are all of rank 16; default: distinct-8.
int8    weights in few bits, against those of the checkpoint; default: base-1. The ratio of medians is that of decode
int4    steps, most of the steps there are.

On a machine that others use too, runs one after the other, and processes of the same code, differ by more than what is
looked for here; of two steps that follow each other both are disturbed alike. Prints one JSON line per workload: how
fast the second engine is beside the first. IN_DIR as `serving.py make` leaves it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inprocess import build
from isa import ISAS, limit_environment, use_isa
from results import add_json_option, recording
from workloads import read_workload

from loraplex_contracts.request import CompletionEnd, Request, RequestFailed, StoppingParams, Tokens
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Submit

WARM_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Variant:
    """How an engine is built."""

    lora: bool = True
    adapters: str = "."  # the folder in IN_DIR
    flags: tuple[str, ...] = ()


# What is compared, by name: the default workload, the first engine and the second.
CASES = {
    "unused": ("base-8", Variant(lora=False), Variant()),
    "ranks": ("distinct-8", Variant(), Variant(adapters="mixed-ranks")),
    "int8": ("base-1", Variant(), Variant(flags=("--quantize", "int8"))),
    "int4": ("base-1", Variant(), Variant(flags=("--quantize", "int4"))),
}


@dataclass
class Side:
    """One engine, and its steps."""

    engine: Engine
    num_open: int = 0
    num_drafted: int = 0
    times_s: list[float] = field(default_factory=list[float])

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.handle(Submit(request))
        self.num_open = len(requests)

    def step(self) -> None:
        start_s = time.perf_counter()
        batch = self.engine.turn()
        self.times_s.append(time.perf_counter() - start_s)
        for event in batch.events if batch is not None else ():
            if isinstance(event, RequestFailed):
                raise SystemExit(f"{event.request_id}: {event.error}")
            if isinstance(event, Tokens):
                self.num_drafted += event.num_drafted
            self.num_open -= isinstance(event, CompletionEnd)


def forget(*sides: Side) -> None:
    """Clears the counts of these sides."""
    for side in sides:
        side.times_s.clear()
        side.num_drafted = 0


def run(first: Side, second: Side) -> None:
    """Runs both until each has ended its requests."""
    sides = first, second
    while any(side.num_open for side in sides):
        sides = sides[1], sides[0]  # the second finds other things in the caches
        for side in sides:
            if side.num_open:
                side.step()


def ratios(first: Side, second: Side) -> dict[str, object]:
    """Of speed, the second beside the first: above 1 it is the faster one."""
    medians = [statistics.median(side.times_s) for side in (first, second)]
    return {
        "ratio": round(sum(first.times_s) / sum(second.times_s), 3),
        "median_step_ms": [round(1000 * median, 2) for median in medians],
        "ratio_of_medians": round(medians[0] / medians[1], 3),
    }


# --- adapters ---------------------------------------------------------------------------------------------------------


def requests(inputs: Path, workload: str, tag: str, max_tokens: int) -> list[Request]:
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    items = read_workload(inputs, workload)
    return [
        Request(f"{tag}-{idx}", item.prompt_ids, stopping, adapter_id=item.adapter_id) for idx, item in enumerate(items)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("what", choices=CASES)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--output", type=int, default=256, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", choices=ISAS, help="a lesser instruction set than the best")
    add_json_option(parser)
    args = parser.parse_args()
    limit_environment(args.isa)
    use_isa(args.isa)
    default, *variants = CASES[args.what]
    folders = [args.inputs / variant.adapters for variant in variants]
    folder = tempfile.TemporaryDirectory
    with folder() as one, folder() as other, recording(args.json) as record:
        first, second = (
            Side(build(inputs, Path(store), lora=variant.lora, flags=variant.flags))
            for inputs, store, variant in zip(folders, (one, other), variants, strict=True)
        )
        for workload in args.workloads or [default]:
            for number in range(args.rounds + 1):  # the first loads what is asked for, and is not counted
                for side, folder in zip((first, second), folders, strict=True):
                    num_tokens = args.output if number else WARM_TOKENS
                    side.submit(requests(folder, workload, f"{workload}-{number}", num_tokens))
                run(first, second)
                if number == 0:
                    forget(first, second)
            isa = {} if args.isa is None else {"isa": args.isa}
            record({"case": args.what, "workload": workload, **isa, **ratios(first, second)})
            forget(first, second)
        for side in (first, second):
            side.engine.close()


if __name__ == "__main__":
    main()
