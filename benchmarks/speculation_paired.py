"""What speculation costs where nothing is accepted, to a percent: two engines in one process take steps in turn.

    python benchmarks/speculation_paired.py IN_DIR [--proposers lookup medusa draft] [--batch 1 8 32] [--output 512]
        [--threads N]

On a machine that others use too, runs one after the other differ by more than speculation costs; of two steps that
follow each other both are disturbed alike. One engine speculates with adaptive lengths and the proposers of
`speculation.py synthetic`, of whose tokens none counts as accepted; the other one runs the same requests without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from speculation import KINDS, OFF, Prompt, always_match, rolled_acceptance, synthetic_engine
from workloads import read_workload

from loraplex_server.engine.core import Engine
from loraplex_server.engine.messages import Submit
from loraplex_server.events import CompletionEnd, Tokens
from loraplex_server.request import Request, SpeculationParams, StoppingParams


@dataclass
class Side:
    """One engine, and its steps."""

    engine: Engine
    params: SpeculationParams
    num_open: int = 0
    num_drafted: int = 0
    times_s: list[float] = field(default_factory=list[float])

    def submit(self, prompts: Sequence[Prompt], tag: str) -> None:
        for idx, prompt in enumerate(prompts):
            stopping = StoppingParams(max_tokens=prompt.max_tokens, ignore_eos=True)
            request = Request(f"{tag}-{idx}", prompt.token_ids, stopping, speculation=self.params)
            self.engine.handle(Submit(request))
        self.num_open = len(prompts)

    def step(self) -> None:
        start_s = time.perf_counter()
        batch = self.engine.turn()
        self.times_s.append(time.perf_counter() - start_s)
        for event in batch.events if batch is not None else ():
            if isinstance(event, Tokens):
                self.num_drafted += event.num_drafted
            self.num_open -= isinstance(event, CompletionEnd)


def run(sides: tuple[Side, Side], prompts: Sequence[Prompt], tag: str) -> None:
    for idx, side in enumerate(sides):
        side.submit(prompts, f"{tag}-{idx}")
    while any(side.num_open for side in sides):
        sides = sides[1], sides[0]  # whoever comes second finds other things in the caches
        for side in sides:
            if side.num_open:
                side.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--proposers", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: all cores")
    args = parser.parse_args()
    always_match()
    items = read_workload(args.inputs, "base-32")
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other, rolled_acceptance(0.0):
        engines = [synthetic_engine(args.inputs, Path(work), args.threads, adaptive=True) for work in (one, other)]
        for num_prompts in args.batch:
            for kind in args.proposers:
                sides = (
                    Side(engines[0], OFF),
                    Side(engines[1], replace(KINDS[kind], max_draft_tokens=args.draft_tokens)),
                )
                prompts = [Prompt(item.prompt_ids, max_tokens=args.output) for item in items[:num_prompts]]
                run(sides, [replace(prompt, max_tokens=24) for prompt in prompts], f"{num_prompts}-{kind}-warm")
                for side in sides:
                    side.times_s.clear()
                    side.num_drafted = 0
                run(sides, prompts, f"{num_prompts}-{kind}")
                print(json.dumps(figures(kind, num_prompts, *sides)), flush=True)
        for engine in engines:
            engine.close()


def figures(kind: str, num_prompts: int, plain: Side, spec: Side) -> dict[str, object]:
    medians = [statistics.median(side.times_s) for side in (plain, spec)]
    return {
        "case": kind,
        "batch": num_prompts,
        "ratio": round(sum(plain.times_s) / sum(spec.times_s), 3),
        "median_step_ms": [round(1000 * median, 2) for median in medians],
        "ratio_of_medians": round(medians[0] / medians[1], 3),
        "num_drafted": spec.num_drafted,
    }


if __name__ == "__main__":
    main()
