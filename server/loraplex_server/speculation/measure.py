"""Times steps of a runner that nobody uses yet, for the table that draft lengths are chosen by.

A row of such a step is a token that is run and sampled, as a drafted token is. It has tokens before it, as later ones
have, so that the step comes out of a graph where theirs will. Writes to KV blocks that nobody has.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from loraplex_contracts.plan import NewSequence, Span, StepPlan
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.model.runner import ModelRunner
from loraplex_server.speculation.costs import DEFAULT_SIZES, StepCosts, measure_step_costs

LIMIT_S = 2.0
NUM_REPEATS = 3


def measure_runner(runner: ModelRunner, *, max_rows: int, num_blocks: int, block_size: int) -> StepCosts:
    """Takes about LIMIT_S, or two steps where they are longer. Before the first request only."""
    num_sequences = min(max_rows, num_blocks)
    # Each sequence in a block of its own, and no longer than the context.
    max_len = min(block_size, runner.mirror.max_len)
    # Kernels compute rows in blocks, and the row behind a full batch may well be the first of another one.
    sizes = [size for size in {*DEFAULT_SIZES, max_rows, max_rows + 1} if size <= num_sequences * max_len]
    runner.clear_blocks(range(num_sequences))
    run = _timer(runner, num_sequences, max_len)
    costs = measure_step_costs(run, sizes=sizes, num_repeats=NUM_REPEATS, limit_s=LIMIT_S)
    runner.execute(StepPlan(0, (), released=tuple(range(num_sequences))))
    return costs


def _timer(runner: ModelRunner, num_sequences: int, max_len: int) -> Callable[[int], float]:
    """Runs a step of so many rows, on as many sequences as there may be."""

    def run(num_rows: int) -> float:
        num_entered = min(num_rows, num_sequences)
        spans: list[Span] = []
        entered: list[NewSequence] = []
        for row in range(num_entered):
            num_tokens = min(max_len, num_rows // num_entered + (row < num_rows % num_entered))
            draft = (0,) * (num_tokens - 1)
            name = f"timing-{row}"
            start = max_len - num_tokens
            known = (0,) * (start + 1)
            entered.append(NewSequence(name, row, known, len(known), SamplingParams(), OutputParams()))
            spans.append(Span(name, row, start, num_tokens, num_tokens, (row,), draft))
        plan = StepPlan(0, tuple(spans), tuple(entered))
        start_s = time.perf_counter()
        runner.execute(plan).result()
        return time.perf_counter() - start_s

    return run
