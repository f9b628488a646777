"""Benchmark of grammars: steps beside free rows, and first tokens.

    python benchmarks/grammars.py MODEL [--rows 32] [--grammar-rows 8] [--steps 16] [--rounds 24] [--json FILE] [FLAG]

MODEL is a base model with a tokenizer; further flags as `loraplex worker` takes them. Runs the engine in this process,
greedy, without speculation. Prints one JSON line per row: the median step in ms with no grammar in the batch and with
some, in turns, and the median ratio of neighbouring turns; and the median time to the first token in ms without a
grammar, with a schema of 10 kB that is new, and with one that is known, from the schema's text on, and what a new one
adds, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count

from inprocess import engine_config
from results import Record, add_json_option, recording

from loraplex_contracts.errors import Cancelled
from loraplex_contracts.request import Grammar, Request, RequestFailed, StoppingParams, Tokens
from loraplex_server.engine.assembly import build_engine
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Cancel, Submit
from loraplex_server.grammars import source

PROMPT = tuple(range(5, 25))
SCHEMA_BYTES = 10_000
NUM_FIRST_TOKENS = 20
WARM_STEPS = 8


def endless() -> Grammar:
    """Does not end within a benchmark."""
    part = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "size": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "size", "ok"],
        "additionalProperties": False,
    }
    return source.json_schema(json.dumps({"type": "array", "items": part, "minItems": 1000}))


def large(number: int) -> str:
    """A schema of its own for each number."""
    part = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["x", "y"]}}}
    num_parts = SCHEMA_BYTES // len(json.dumps({f"field_{number}_000": part}))
    properties = {f"field_{number}_{index}": part for index in range(num_parts)}
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})


class Bench:
    """An engine, and requests to it."""

    def __init__(self, engine: Engine, woken: threading.Event) -> None:
        self.engine = engine
        self._woken = woken  # when a grammar has been compiled
        self._ids = count()

    def submit(self, grammar: Grammar | None, max_tokens: int) -> str:
        name = f"r{next(self._ids)}"
        stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=grammar is None)
        self.engine.handle(Submit(Request(name, PROMPT, stopping, grammar=grammar)))
        return name

    def turn(self) -> Iterator[Tokens]:
        if not self.engine.can_step:
            self._woken.wait(self.engine.idle_timeout_s())
        self._woken.clear()
        batch = self.engine.turn()
        for event in batch.events if batch is not None else ():
            if isinstance(event, RequestFailed) and not isinstance(event.error, Cancelled):
                raise SystemExit(f"{event.request_id}: {event.error}")
            if isinstance(event, Tokens):
                yield event

    def step_s(self, grammars: Sequence[Grammar | None], num_steps: int) -> float:
        """The median step of a batch with these rows."""
        names = [self.submit(grammar, 2 * num_steps + 4 * WARM_STEPS) for grammar in grammars]
        waiting = set(names)
        while waiting:  # until all of them decode
            waiting -= {event.request_id for event in self.turn()}
        times: list[float] = []
        for _ in range(num_steps + WARM_STEPS):
            start = time.perf_counter()
            for _ in self.turn():
                pass
            times.append(time.perf_counter() - start)
        for name in names:
            self.engine.handle(Cancel(name, Cancelled("measured")))
        return statistics.median(times[WARM_STEPS:])

    def first_token_s(self, schema: str | None) -> float:
        start = time.perf_counter()
        self.submit(None if schema is None else source.json_schema(schema), 1)
        while not list(self.turn()):
            pass
        return time.perf_counter() - start


def measure(bench: Bench, args: argparse.Namespace, record: Record) -> None:
    grammar = endless()
    free: list[Grammar | None] = [None] * args.rows
    mixed = [*free[args.grammar_rows :], *[grammar] * args.grammar_rows]
    bench.step_s(mixed, WARM_STEPS)
    frees, mixeds = [bench.step_s(free, args.steps)], list[float]()
    for _ in range(args.rounds):
        mixeds.append(bench.step_s(mixed, args.steps))
        frees.append(bench.step_s(free, args.steps))
    ratios = [2 * one / (before + after) for one, before, after in zip(mixeds, frees, frees[1:], strict=False)]
    record(
        {
            "measured": "step",
            "rows": args.rows,
            "grammar_rows": args.grammar_rows,
            "free_ms": round(statistics.median(frees) * 1e3, 3),
            "mixed_ms": round(statistics.median(mixeds) * 1e3, 3),
            "ratio": round(statistics.median(ratios), 4),
        }
    )
    bench.first_token_s(large(999))
    firsts: dict[str, list[float]] = {"none": [], "new": [], "known": []}
    for number in range(NUM_FIRST_TOKENS):
        schema = large(number)
        firsts["none"].append(bench.first_token_s(None))
        firsts["new"].append(bench.first_token_s(schema))
        firsts["known"].append(bench.first_token_s(schema))
    medians = {f"{name}_ms": round(statistics.median(times) * 1e3, 3) for name, times in firsts.items()}
    added = statistics.median(new - none for new, none in zip(firsts["new"], firsts["none"], strict=True))
    record({"measured": "first token", "schema_bytes": SCHEMA_BYTES, **medians, "new_adds_ms": round(added * 1e3, 3)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--grammar-rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=24)
    add_json_option(parser)
    args, flags = parser.parse_known_args()
    config = engine_config([args.model, "--no-prefix-caching", "--max-running", str(args.rows), *flags])
    woken = threading.Event()
    engine = build_engine(config, lambda text: None, woken.set)
    try:
        with recording(args.json) as record:
            measure(Bench(engine, woken), args, record)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
