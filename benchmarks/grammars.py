"""Benchmark of grammars: steps beside free rows, and first tokens.

    python benchmarks/grammars.py MODEL [--rows 32] [--grammar-rows 8] [--steps 48] [--rounds 2] [--json FILE] [FLAG]

MODEL is a base model with a tokenizer; further flags as `loraplex worker` takes them. Runs the engine in this process,
greedy, without speculation. Prints one JSON line per row: the median step in ms with no grammar in the batch and with
some, of two engines that take steps in turn, and the ratio of both, on the whole and by round; and the median time to
the first token in ms without a grammar, with a schema of 10 kB that is new, and with one that is known, from its text
on, and what a new one adds, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from inprocess import engine_config
from results import Record, add_json_option, recording

from loraplex_contracts.errors import Cancelled
from loraplex_contracts.request import Grammar, Request, RequestFailed, StoppingParams, Tokens
from loraplex_server.config import EngineConfig
from loraplex_server.engine.assembly import build_engine
from loraplex_server.engine.pipe import Cancel, Submit
from loraplex_server.grammars import source

PROMPT = tuple(range(5, 25))
SCHEMA_BYTES = 10_000
NUM_FIRST_TOKENS = 20
WARM_STEPS = 8


def endless() -> Grammar:
    """A grammar whose texts do not end within a benchmark."""
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

    def __init__(self, config: EngineConfig) -> None:
        self._woken = threading.Event()  # when a grammar has been compiled
        self.engine = build_engine(config, lambda text: None, self._woken.set)
        self._ids = count()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

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

    @contextmanager
    def decoding(self, grammars: Sequence[Grammar | None], num_steps: int) -> Iterator[None]:
        """A batch with these rows, all of which decode for `num_steps` steps at least."""
        names = [self.submit(grammar, num_steps + len(grammars)) for grammar in grammars]
        waiting = set(names)
        while waiting:
            waiting -= {event.request_id for event in self.turn()}
        yield
        for name in names:
            self.engine.handle(Cancel(name, Cancelled("measured")))

    def step_s(self) -> float:
        """The time of one step."""
        start = time.perf_counter()
        for _ in self.turn():
            pass
        return time.perf_counter() - start

    def first_token_s(self, schema: str | None) -> float:
        start = time.perf_counter()
        self.submit(None if schema is None else source.json_schema(schema), 1)
        while not list(self.turn()):
            pass
        return time.perf_counter() - start


def measure_steps(engines: tuple[Bench, Bench], args: argparse.Namespace, record: Record) -> None:
    """Two engines take steps in turn. Each has the grammars in every other round, since where its weights lie makes one
    of them the slower."""
    without: list[Grammar | None] = [None] * args.rows
    some = [*without[args.grammar_rows :], *[endless()] * args.grammar_rows]
    frees: list[float] = []
    mixeds: list[float] = []
    ratios: list[float] = []
    for free, mixed in (engines, engines[::-1]):  # parts of a grammar are made when they are first needed
        step_pairs(free, mixed, without, some, args.steps)
    for free, mixed in (engines, engines[::-1]) * args.rounds:
        pairs = step_pairs(free, mixed, without, some, args.steps)
        free_s, mixed_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        frees.append(free_s)
        mixeds.append(mixed_s)
        ratios.append(mixed_s / free_s)
    record(
        {
            "measured": "step",
            "rows": args.rows,
            "grammar_rows": args.grammar_rows,
            "free_ms": round(statistics.mean(frees) * 1e3, 3),
            "mixed_ms": round(statistics.mean(mixeds) * 1e3, 3),
            "ratio": round(statistics.geometric_mean(ratios), 4),
            "ratios": [round(ratio, 4) for ratio in ratios],
        }
    )


def step_pairs(
    free: Bench, mixed: Bench, without: Sequence[None], some: Sequence[Grammar | None], num_pairs: int
) -> list[tuple[float, float]]:
    """Times of steps that follow each other, in s: those without grammars, and those with some."""
    pairs: list[tuple[float, float]] = []
    num_steps = num_pairs + WARM_STEPS
    with free.decoding(without, num_steps), mixed.decoding(some, num_steps):
        for number in range(num_steps):
            # The second of a pair finds other things in the caches.
            if number % 2:
                mixed_s, free_s = mixed.step_s(), free.step_s()
            else:
                free_s, mixed_s = free.step_s(), mixed.step_s()
            pairs.append((free_s, mixed_s))
    return pairs[WARM_STEPS:]


def measure_first_tokens(bench: Bench, record: Record) -> None:
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
    parser.add_argument("--steps", type=int, default=48, help="pairs of a round")
    parser.add_argument("--rounds", type=int, default=2, help="two of each, with the engines exchanged")
    add_json_option(parser)
    args, flags = parser.parse_known_args()
    config = engine_config([args.model, "--no-prefix-caching", "--max-running", str(args.rows), *flags])
    with recording(args.json) as record, Bench(config) as one:
        with Bench(config) as other:
            measure_steps((one, other), args, record)
        measure_first_tokens(one, record)


if __name__ == "__main__":
    main()
