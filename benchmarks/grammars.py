"""Benchmark of grammars: steps beside free rows, and first tokens.

    python benchmarks/grammars.py MODEL [--rows 32] [--grammar-rows 8] [--steps 64] [--rounds 5] [--json FILE] [FLAG]

MODEL is a base model with a tokenizer; further flags as `loraplex worker` takes them. Runs the engine in this process,
greedy, without speculation. Prints one JSON line per row: the median step in ms with no grammar in the batch and with
some, in turns, with the ratio of the medians; and the median time to the first token in ms without a grammar, with a
schema of 10 kB that is new, and with one that is known.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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


def large(number: int) -> Grammar:
    """A schema of its own for each number."""
    properties: dict[str, object] = {}
    while len(json.dumps(properties)) < SCHEMA_BYTES:
        name = f"field_{number}_{len(properties)}"
        properties[name] = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["x", "y"]}}}
    return source.json_schema(json.dumps({"type": "object", "properties": properties, "required": list(properties)}))


class Bench:
    """An engine, and requests to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = count()

    def submit(self, grammar: Grammar | None, max_tokens: int) -> str:
        name = f"r{next(self._ids)}"
        stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=grammar is None)
        self.engine.handle(Submit(Request(name, PROMPT, stopping, grammar=grammar)))
        return name

    def turn(self) -> Iterator[Tokens]:
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

    def first_token_s(self, make: Callable[[], Grammar | None]) -> float:
        start = time.perf_counter()
        self.submit(make(), 1)
        while not list(self.turn()):
            pass
        return time.perf_counter() - start


def measure(bench: Bench, args: argparse.Namespace, record: Record) -> None:
    grammar = endless()
    free: list[Grammar | None] = [None] * args.rows
    mixed = [*free[args.grammar_rows :], *[grammar] * args.grammar_rows]
    bench.step_s(mixed, WARM_STEPS)
    found: dict[str, list[float]] = {"free": [], "mixed": []}
    for _ in range(args.rounds):
        found["free"].append(bench.step_s(free, args.steps))
        found["mixed"].append(bench.step_s(mixed, args.steps))
    free_s, mixed_s = (statistics.median(times) for times in found.values())
    record(
        {
            "measured": "step",
            "rows": args.rows,
            "grammar_rows": args.grammar_rows,
            "free_ms": round(free_s * 1e3, 3),
            "mixed_ms": round(mixed_s * 1e3, 3),
            "ratio": round(mixed_s / free_s, 4),
        }
    )
    numbers = range(NUM_FIRST_TOKENS)
    firsts = {
        "none": [bench.first_token_s(lambda: None) for _ in numbers],
        "new": [bench.first_token_s(partial(large, number)) for number in numbers],
        "known": [bench.first_token_s(partial(large, number)) for number in numbers],
    }
    medians = {f"{name}_ms": round(statistics.median(times) * 1e3, 3) for name, times in firsts.items()}
    record({"measured": "first token", "schema_bytes": SCHEMA_BYTES, **medians})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--grammar-rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    args, flags = parser.parse_known_args()
    config = engine_config([args.model, "--no-prefix-caching", "--max-running", str(args.rows), *flags])
    engine = build_engine(config, lambda text: None, lambda: None)
    try:
        with recording(args.json) as record:
            measure(Bench(engine), args, record)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
