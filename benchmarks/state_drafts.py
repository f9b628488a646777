"""Cost of the state behind a draft's last accepted token, had in three ways.

    python benchmarks/state_drafts.py [--shape delta] [--batch 1 8 32] [--drafts 1 4 8] [--rounds 5]

replay  as the engine does it: a step keeps the inputs of its recurrences, and these run again over the accepted tokens.
keep    a step writes the state behind each of its tokens to a place of its own, and what counts is chosen.
pass    the whole model runs again over the accepted tokens, from the state before them.

Verification steps of the models of `hybrids.py`, all sequences with a draft of the same length. Each round takes every
kind of step once and commits none, so all begin with the same states; how much of a draft counts is chosen, not drawn.
States of `replay` and `keep` are compared bit by bit. One JSON line for each batch and length: medians in ms, of
`replay` and `pass` by how many of the draft's tokens are accepted; bytes for one sequence.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hybrids import SHAPES, make_model, owners_of, requests
from inprocess import build
from paired import Side
from results import add_json_option, recording

from loraplex_contracts.plan import Span, StepPlan
from loraplex_server.model.runner import ModelRunner
from loraplex_server.model.states import StateMemory, StateStep, _Piece


class KeepingStep(StateStep):
    """A step that keeps the state behind each token of a span with a draft. Not to be committed."""

    def __init__(self, memory: StateMemory, spans: Sequence[Span]) -> None:
        self.places: list[list[int]] = []  # by span, one for each of its tokens
        super().__init__(memory, spans)

    def _cut_one(self, idx: int, span: Span, start: int) -> list[_Piece]:
        assert span.state is not None
        first = idx * span.num_tokens
        self.places.append([self._memory.spare(first + i) for i in range(span.num_tokens)])
        source = self._memory.place_of(span.state.source)
        return [_Piece(idx, start + i, 1, source, (place,), i > 0) for i, place in enumerate(self.places[-1])]


def widen(memory: StateMemory, num_more: int) -> None:
    """Gives the memory so many more spare places."""
    num_places = len(memory.tensors[0])
    for idx, tensor in enumerate(memory.tensors):
        memory.tensors[idx] = torch.cat([tensor, tensor.new_zeros(num_more, *tensor.shape[1:])])
    for place in range(num_places, num_places + num_more):
        memory.give_back(place)


def kept_bytes(step: StateStep) -> int:
    """Bytes of the inputs that a step keeps for `replay`."""
    storages = [x.untyped_storage() for _, inputs in step._passes.values() for x in inputs]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def measure(runner: ModelRunner, spans: Sequence[Span], num_drafted: int, num_rounds: int) -> dict[str, Any]:
    """Steps of these spans of one token each, with drafts behind them. Leaves no trace."""
    memory = runner._states
    assert memory is not None
    dice = torch.Generator().manual_seed(1)
    drafts = torch.randint(10, 500, (len(spans), num_drafted), generator=dice).tolist()
    num_tokens = 1 + num_drafted
    drafted = [
        replace(span, num_tokens=num_tokens, num_samples=num_tokens, draft=tuple(draft))
        for span, draft in zip(spans, drafts, strict=True)
    ]
    times_s: defaultdict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        found = call()
        times_s[name].append(time.perf_counter() - start_s)
        return found

    def step(asked: Sequence[Span]) -> Any:
        launched = runner._launch(asked)
        runner._results(launched)
        return launched.states

    accepted = sorted({0, num_drafted // 2, num_drafted})
    for number in range(1 + num_rounds):  # the first touches the memory, and is not counted
        timed("plain", partial(step, spans))
        with patch.object(memory, "begin", partial(KeepingStep, memory)):
            kept = timed("keep", partial(step, drafted))
        behind = [] if number else [tensor[torch.tensor(kept.places)] for tensor in memory.tensors]
        for count in accepted:
            # A step of its own for each: behind another replay it would find its states in the caches.
            launched = timed("replay", partial(step, drafted))
            num_bytes = kept_bytes(launched)
            counts = {span.sequence_id: 1 + count for span in drafted}
            timed(f"replay {count}", partial(launched.replay, counts))
            places = list(launched._drafted.values())
            for tensor, found in zip(memory.tensors, behind, strict=False):
                assert torch.equal(tensor[places], found[:, count]), "keep and replay give other states"
            if count < num_drafted:
                again = [replace(span, num_tokens=1 + count, num_samples=0, draft=()) for span in drafted]
                timed(f"pass {count}", partial(step, again))
        if not number:
            times_s.clear()
    medians = {name: round(1000 * statistics.median(found), 2) for name, found in times_s.items()}
    state_bytes = sum(one[0].nbytes for one in memory.tensors)
    pairs = zip(times_s["keep"], times_s["replay"][:: len(accepted)], strict=True)
    return {
        "draft": num_drafted,
        "step_ms": {"without draft": medians["plain"], "replay": medians["replay"], "keep": medians["keep"]},
        "keep_beside_replay": round(statistics.median(one / other for one, other in pairs), 3),
        "then_ms": {
            way: {count: medians[f"{way} {count}"] for count in accepted if f"{way} {count}" in medians}
            for way in ("replay", "pass")
        },
        "sequence_bytes": {
            "state": state_bytes,
            "replay": state_bytes + num_bytes // len(spans),
            "keep": num_tokens * state_bytes,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="delta")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 4, 8], help="lengths, below the size of a block")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt, a multiple of the block size")
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    args = parser.parse_args()
    config = SHAPES[args.shape]()
    with tempfile.TemporaryDirectory() as name, recording(args.json) as record:
        make_model(config, Path(name) / "model")
        engine = build(Path(name), Path(name) / "store", lora=False, flags=["--state-memory", "2GiB"])
        runner = engine._runner
        assert isinstance(runner, ModelRunner)
        assert runner._states is not None
        widen(runner._states, max(args.batch) * (1 + max(args.drafts)))
        vocab = config.get_text_config().vocab_size
        prompts = torch.randint(10, vocab, (max(args.batch), args.prompt), generator=torch.Generator().manual_seed(7))
        execute, block_size = runner.execute, runner.mirror.block_size
        for batch in args.batch:
            has_run = False

            def measured(plan: StepPlan) -> Any:
                """The step that all take behind the first token of a block: with room there for a draft."""
                nonlocal has_run
                is_it = all(span.num_tokens == 1 and span.start % block_size == 1 for span in plan.spans)
                if not has_run and is_it and len(plan.spans) == batch:  # noqa: B023
                    has_run = True
                    for num_drafted in args.drafts:
                        with torch.inference_mode():
                            found = measure(runner, plan.spans, num_drafted, args.rounds)
                        record({"case": f"{args.shape}-{batch}", **found})  # noqa: B023
                return execute(plan)

            side = Side(engine)
            with patch.object(runner, "execute", measured):
                side.submit(requests(prompts[:batch], owners_of(batch, 0), f"{batch}", block_size + 3))
                while side.num_open:
                    side.step()
            assert has_run, "no step had all sequences behind the first token of a block"
        engine.close()


if __name__ == "__main__":
    main()
