"""Cost of drafts that are never accepted, by two engines in turns.

    python benchmarks/speculation_paired.py IN_DIR [--proposers lookup medusa draft] [--batch 1 8 32] [--output 512]
        [--threads N]

On a machine that others use too, runs one after the other differ by more than speculation costs; of two steps that
follow each other both are disturbed alike. One engine speculates with adaptive lengths and the proposers of
`speculation.py synthetic`, of whose tokens none counts as accepted; the other one runs the same requests without.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paired import Side, forget, ratios, run
from speculation import KINDS, OFF, always_match, rolled_acceptance, synthetic_engine
from workloads import WorkItem, read_workload

from loraplex_contracts.request import Request, SpeculationParams, StoppingParams

WARM_TOKENS = 24


def requests(items: Sequence[WorkItem], params: SpeculationParams, tag: str, max_tokens: int) -> list[Request]:
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Request(f"{tag}-{idx}", item.prompt_ids, stopping, speculation=params) for idx, item in enumerate(items)]


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
        plain, spec = Side(engines[0]), Side(engines[1])
        for num_prompts in args.batch:
            for kind in args.proposers:
                drafting = replace(KINDS[kind], max_draft_tokens=args.draft_tokens)
                for tag, num_tokens in (("warm", WARM_TOKENS), ("run", args.output)):
                    forget(plain, spec)
                    for side, params in ((plain, OFF), (spec, drafting)):
                        side.submit(requests(items[:num_prompts], params, f"{num_prompts}-{kind}-{tag}", num_tokens))
                    run(plain, spec)
                found = {"case": kind, "batch": num_prompts, **ratios(plain, spec), "num_drafted": spec.num_drafted}
                print(json.dumps(found), flush=True)
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
