"""Steps of the real runner, with plans made by the benchmark.

Owns rows, blocks and positions, as the scheduler does otherwise. KV pages hold random numbers: decode steps follow no
prompt. Timed is everything between one step's plan and the next: planning, staging, the model, sampling, the tokens'
way back.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpu_bench.adapters import make_adapter
from gpu_bench.machine import synchronize
from gpu_bench.shapes import Shape
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.plan import AdapterUse, NewSequence, Span, StepPlan
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.config import (
    AdaptersConfig,
    BatchConfig,
    EngineConfig,
    KvConfig,
    ModelConfig,
    SpeculationConfig,
)
from loraplex_server.engine.assembly import assemble
from loraplex_server.layers.attention import kv_block_bytes
from loraplex_server.model.isolation import StepHandle
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.runner import ModelRunner

BLOCK_SIZE = 16
NUM_UNTIMED = 3
DEFAULT_MAX_RANK = AdaptersConfig().max_rank


@dataclass(frozen=True)
class Scenario:
    """A batch whose rows all do the same kind of step."""

    name: str
    slots: tuple[int | None, ...]  # of each row's adapter
    is_installed: bool = True  # whether any adapter is on the device at all
    num_draft_tokens: int = 0
    over: str = "base"  # the scenario that it is compared with

    @property
    def batch(self) -> int:
        return len(self.slots)

    @property
    def num_distinct(self) -> int:
        return len({slot for slot in self.slots if slot is not None})


@dataclass
class _Row:
    """One sequence's state between steps."""

    sequence_id: str
    row: int
    blocks: list[int]  # not given out yet
    num_known: int
    num_blocks: int = 0


class Stepper:
    """An engine's runner, and the adapters that it is given."""

    def __init__(self, loaded: LoadedModel, shape: Shape, say: Callable[[str], None]) -> None:
        self.loaded = loaded
        self.shape = shape
        self.num_row_blocks = -(-loaded.spec.max_context_tokens // BLOCK_SIZE)
        num_blocks = shape.max_batch * self.num_row_blocks + 2
        config = EngineConfig(
            ModelConfig(shape.name, device=str(loaded.device), dtype=loaded.dtype_name),
            KvConfig(BLOCK_SIZE, num_blocks * kv_block_bytes(loaded.spec, BLOCK_SIZE, loaded.dtype.itemsize), False),
            BatchConfig(shape.max_batch, max_step_tokens=shape.max_step_tokens),
            AdaptersConfig(num_device_slots=shape.max_batch, max_rank=shape.max_rank or DEFAULT_MAX_RANK),
            SpeculationConfig(shape.num_draft_tokens, max_draft_tokens=shape.num_draft_tokens),
        )
        self.engine = assemble(loaded, config, say, lambda: None)
        runner = self.engine._runner
        assert isinstance(runner, ModelRunner)
        self.runner = runner
        for layer in loaded.attention:
            assert layer.kv is not None
            layer.kv.k.normal_()
            layer.kv.v.normal_()
        self._adapters: list[AdapterWeights] = []
        self._num_installed = 0
        self._num_steps = 0
        dice = random.Random(0)
        self._ids = [dice.randrange(2, loaded.spec.vocab_size) for _ in range(1 << 14)]
        self._next_id = 0

    @property
    def num_graphs(self) -> int:
        graphs = self.runner._graphs
        return graphs.num_graphs if graphs is not None else 0

    def close(self) -> None:
        self.engine.close()

    def install(self, num_adapters: int) -> None:
        """Installs or removes adapters until there are so many on the device, in slots 0 and up."""
        for slot in range(self._num_installed, num_adapters):
            if slot == len(self._adapters):
                self._adapters.append(make_adapter(self.loaded, self.shape.rank, slot))
            self.runner._slots.install(slot, self._adapters[slot])
        for slot in range(num_adapters, self._num_installed):
            self.runner._slots.install(slot, None)
        self._num_installed = num_adapters

    def time_steps(self, scenario: Scenario, num_steps: int) -> float:
        """Seconds per step. The first steps, in which sequences enter, do not count."""
        rows = self._rows(scenario)
        self._run(rows, scenario, 1, self._entered(rows, scenario))
        self._run(rows, scenario, NUM_UNTIMED - 1)
        synchronize(self.loaded.device)
        start = time.perf_counter()
        self._run(rows, scenario, num_steps)
        synchronize(self.loaded.device)
        return (time.perf_counter() - start) / num_steps

    def time_prompts(
        self, num_prompts: int, num_tokens: int, slot: int | None, num_steps: int, *, replays: bool
    ) -> float:
        """Seconds per step of so many new prompts of `num_tokens` tokens each, from the plan to the first tokens on the
        host. `replays`: from graphs; else every kernel is launched."""
        scenario = Scenario("prompts", (slot,) * num_prompts)
        graphs = self.runner._graphs
        if replays and (graphs is None or graphs.num_graphs < graphs.num_wanted):
            raise RuntimeError("not all steps were captured")
        self.runner._graphs = graphs if replays else None
        try:
            self._run_prompts(scenario, num_tokens)
            synchronize(self.loaded.device)
            start = time.perf_counter()
            for _ in range(num_steps):
                self._run_prompts(scenario, num_tokens)
            return (time.perf_counter() - start) / num_steps
        finally:
            self.runner._graphs = graphs

    def _run_prompts(self, scenario: Scenario, num_tokens: int) -> None:
        rows = [replace(row, num_known=num_tokens) for row in self._rows(scenario)]
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        spans = tuple(Span(row.sequence_id, row.row, 0, num_tokens, 1, tuple(row.blocks[:num_blocks])) for row in rows)
        self._num_steps += 1
        released = tuple(range(self.shape.max_batch))
        plan = StepPlan(self._num_steps, spans, self._entered(rows, scenario), released)
        self._take(rows, self.runner.execute(plan), is_known=True)

    def _rows(self, scenario: Scenario) -> list[_Row]:
        """Rows of a scenario, each with blocks of its own; block 0 is nobody's."""
        per_row, context = self.num_row_blocks, self.shape.context
        return [
            _Row(f"{scenario.name}-{row}", row, list(range(1 + row * per_row, 1 + (row + 1) * per_row)), context)
            for row in range(scenario.batch)
        ]

    def _entered(self, rows: Sequence[_Row], scenario: Scenario) -> tuple[NewSequence, ...]:
        return tuple(
            NewSequence(
                row.sequence_id,
                row.row,
                self._random_ids(row.num_known),
                row.num_known,
                SamplingParams(),
                OutputParams(),
                () if slot is None else (AdapterUse(slot),),
            )
            for row, slot in zip(rows, scenario.slots, strict=True)
        )

    def _random_ids(self, num: int) -> tuple[int, ...]:
        """Random ids, drawn before: drawing takes longer than a scheduler takes to copy a draft."""
        if self._next_id + num > len(self._ids):
            self._next_id = 0
        self._next_id += num
        return tuple(self._ids[self._next_id - num : self._next_id])

    def _run(
        self, rows: Sequence[_Row], scenario: Scenario, num_steps: int, entered: tuple[NewSequence, ...] = ()
    ) -> None:
        """Runs steps as the engine does: it hands a step over before it asks for the result of the one before, where
        the runner allows that and nobody drafts."""
        released = tuple(range(self.shape.max_batch)) if entered else ()
        overlaps = self.runner.overlaps and not scenario.num_draft_tokens
        under_way: StepHandle | None = None
        for _ in range(num_steps):
            spans = tuple(self._span(row, self._random_ids(scenario.num_draft_tokens)) for row in rows)
            self._num_steps += 1
            handle = self.runner.execute(StepPlan(self._num_steps, spans, entered, released))
            if overlaps:
                for row in rows:
                    row.num_known += 1
                handle, under_way = under_way, handle
            if handle is not None:
                self._take(rows, handle, is_known=overlaps)
        if under_way is not None:
            self._take(rows, under_way, is_known=True)

    def _take(self, rows: Sequence[_Row], handle: StepHandle, *, is_known: bool) -> None:
        """Takes a step's result. `is_known`: how many tokens come was counted when the step was planned."""
        results = handle.result().spans
        for row in rows:
            result = results[row.sequence_id]
            if result.error is not None:
                raise RuntimeError(f"{row.sequence_id}: {result.error}")
            if not is_known:
                row.num_known += len(result.token_ids)

    @staticmethod
    def _span(row: _Row, draft: tuple[int, ...]) -> Span:
        start, num_tokens = row.num_known - 1, 1 + len(draft)
        num_new = -(-(start + num_tokens) // BLOCK_SIZE) - row.num_blocks
        new = tuple(row.blocks[row.num_blocks : row.num_blocks + num_new])
        row.num_blocks += num_new
        return Span(row.sequence_id, row.row, start, num_tokens, num_tokens, new, draft)
