"""Model runner driver: random chunks, rows, blocks and drafts.

Not a scheduler: it has no policy, and rolls dice for everything that must not change a text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from loraplex_contracts.plan import AdapterUse, NewSequence, Span, SpanResult, StateUse, StepPlan
from loraplex_contracts.request import OutputParams, PositionLogprobs, SamplingParams
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.reference import ReferenceOps
from loraplex_server.backends.registry import make_attention
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.attention import KvCache, PagedAttention
from loraplex_server.layers.lora import SegmentedLora
from loraplex_server.model.loader import LoadedModel
from loraplex_server.model.runner import ModelRunner
from loraplex_server.sampling.sampler import Sampled, Sampler

BLOCK_SIZE = 4


@dataclass
class Job:
    """One request, and what it has so far."""

    prompt: list[int]
    num_tokens: int
    adapters: tuple[AdapterUse, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output: OutputParams = field(default_factory=OutputParams)
    # Proposes a draft behind the tokens so far.
    propose: Callable[[list[int]], list[int]] | None = None

    row: int = -1
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    num_accepted: int = 0
    num_blocks: int = 0
    error: Exception | None = None

    @property
    def sequence_id(self) -> str:
        return f"seq-{id(self)}"

    @property
    def all_tokens(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def is_done(self) -> bool:
        return self.error is not None or len(self.tokens) >= self.num_tokens


class RecordingSampler(Sampler):
    """Keeps the logits that it draws from."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        super().__init__(max_rows, vocab_size, device)
        self.sequence_ids: dict[int, str] = {}
        self.logits: dict[tuple[str, int], torch.Tensor] = {}  # by sequence and position of the token that is drawn

    def set_row(self, row: int, sequence: NewSequence) -> None:
        super().set_row(row, sequence)
        self.sequence_ids[row] = sequence.sequence_id

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int] | torch.Tensor,
        positions: Sequence[int] | torch.Tensor,
        tokens: torch.Tensor,
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> Sampled:
        for row, position, values in zip(rows, positions, logits, strict=True):
            self.logits[self.sequence_ids[int(row)], int(position)] = values.clone()
        return super().sample(logits, rows, positions, tokens, drafts or {})


@dataclass
class Rig:
    """A model with everything around it, and a driver's state."""

    loaded: LoadedModel
    cache: KvCache
    slots: AdapterSlots
    runner: ModelRunner
    free_blocks: list[int]
    max_rows: int
    max_chunk: int
    dice: random.Random
    sampler: RecordingSampler
    num_steps: int = 0
    on_plan: Callable[[StepPlan], None] | None = None

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs all jobs to their end, as many at a time as there are rows."""
        waiting = list(jobs)
        running: list[Job] = []
        free_rows = list(range(self.max_rows))
        released: list[int] = []
        while waiting or running:
            entered: list[NewSequence] = []
            while waiting and free_rows and (not running or self.dice.random() < 0.6):
                job = waiting.pop(0)
                job.row = free_rows.pop(self.dice.randrange(len(free_rows)))
                running.append(job)
                entered.append(self._sequence(job))
            chosen = [job for job in running if self.dice.random() < 0.8] or list(running)
            plan = StepPlan(self.num_steps, tuple(self._span(job) for job in chosen), tuple(entered), tuple(released))
            released = []
            if self.on_plan is not None:
                self.on_plan(plan)
            results = self.runner.execute(plan).result().spans
            self.num_steps += 1
            for span, job in zip(plan.spans, chosen, strict=True):
                self._take(job, span, results[span.sequence_id])
                rope = self.loaded.spec.rope
                num_tokens = len(job.all_tokens)
                has_outgrown = rope is not None and rope.outgrown(
                    num_tokens - len(results[span.sequence_id].token_ids), num_tokens
                )
                if has_outgrown and not job.is_done:  # as the scheduler does
                    waiting.insert(0, job)
                    job.num_computed = job.num_blocks = 0
                if job.is_done or has_outgrown:
                    running.remove(job)
                    released.append(job.row)
                    free_rows.append(job.row)
                    self.free_blocks += self.runner.mirror.block_ids(job.row)
                    self.dice.shuffle(self.free_blocks)

    def logits(self, job: Job) -> torch.Tensor:
        """Logits [num_tokens, vocab] that a finished job's tokens were drawn from."""
        start = len(job.prompt)
        return torch.stack([self.sampler.logits[job.sequence_id, start + i] for i in range(len(job.tokens))])

    def _sequence(self, job: Job) -> NewSequence:
        return NewSequence(
            sequence_id=job.sequence_id,
            row=job.row,
            token_ids=tuple(job.all_tokens),
            num_prompt_tokens=len(job.prompt),
            sampling=job.sampling,
            output=job.output,
            adapters=job.adapters,
        )

    def _span(self, job: Job) -> Span:
        left = len(job.all_tokens) - job.num_computed
        num_tokens = self.dice.randint(1, min(left, self.max_chunk))
        draft: list[int] = []
        if num_tokens == left and job.tokens and job.propose is not None:
            draft = job.propose(job.all_tokens)[: job.num_tokens - len(job.tokens) - 1]
            rope = self.loaded.spec.rope
            if rope is not None:
                draft = draft[: rope.num_room(len(job.all_tokens))]
        end = job.num_computed + num_tokens + len(draft)
        missing = max(0, -(-end // BLOCK_SIZE) - job.num_blocks)
        job.num_blocks += missing
        return Span(
            sequence_id=job.sequence_id,
            row=job.row,
            start=job.num_computed,
            num_tokens=num_tokens + len(draft),
            num_samples=1 + len(draft) if num_tokens == left else 0,
            new_block_ids=tuple(self.free_blocks.pop() for _ in range(missing)),
            draft=tuple(draft),
            prompt_logprobs=job.output.prompt_logprobs,
            # A row's state slot is its number; 0 is the beginning of a text.
            state=StateUse(job.row + 1 if job.num_computed else 0, job.row + 1) if self.loaded.states else None,
        )

    @staticmethod
    def _take(job: Job, span: Span, result: SpanResult) -> None:
        job.error = result.error
        job.prompt_logprobs += result.prompt_logprobs
        job.tokens += result.token_ids
        job.logprobs += result.logprobs
        job.num_accepted += max(0, len(result.token_ids) - 1)
        job.num_computed += span.num_tokens - len(span.draft) + max(0, len(result.token_ids) - 1)


def make_rig(
    loaded: LoadedModel,
    *,
    max_rows: int = 5,
    num_blocks: int = 160,
    num_slots: int = 8,
    max_chunk: int = 7,
    seed: int = 0,
    ops: SegmentedLora | None = None,
    attention: str | PagedAttention = "auto",
    num_states: int | None = None,
) -> Rig:
    """Everything around a loaded model. Pages start poisoned: what was not written must not be read."""
    cache = KvCache(loaded.spec, num_blocks, BLOCK_SIZE, loaded.dtype, loaded.device)
    for layer in cache.layers:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    slots = loaded.adapter_slots(ops or ReferenceOps(), num_slots)
    sampler = RecordingSampler(max_rows, loaded.spec.num_logits, loaded.device)
    backend = make_attention(attention, Backend(loaded.device)) if isinstance(attention, str) else attention
    states = loaded.state_memory(num_states or max_rows, max_rows)
    if states is not None:
        for tensor in states.tensors:
            tensor[1:].fill_(float("nan"))
    runner = ModelRunner(loaded, cache, backend, slots, sampler, max_rows=max_rows, states=states)
    dice = random.Random(seed)
    free = list(range(num_blocks))
    dice.shuffle(free)
    return Rig(loaded, cache, slots, runner, free, max_rows, max_chunk, dice, sampler)


def random_prompts(num: int, vocab_size: int, seed: int = 0, longest: int = 19) -> list[list[int]]:
    """Prompts of different lengths, the first of a single token."""
    dice = random.Random(seed)
    return [
        [dice.randrange(2, vocab_size) for _ in range(1 if i == 0 else dice.randint(2, longest))] for i in range(num)
    ]
