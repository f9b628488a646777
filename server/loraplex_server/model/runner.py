"""Model runner: executes step plans.

Owns the batch mirror and connects the model to its KV cache, adapter slots and sampler. A step that raises may be run
again, whole or span by span: rows that entered or left stay so, and nothing that it attached or drew counts.

On a device with a queue of its own (CUDA) `execute` returns when a step has been handed over, and its result is waited
for when it is asked for. Until then another step may be handed over: what a step draws stays on the device for the next
one, and nothing that a result needs is looked up in rows, which may be another sequence's by then.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_contracts.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    LoraplexError,
    NonFinite,
)
from loraplex_contracts.plan import NewSequence, PooledValues, Span, SpanResult, StepPlan, StepResult
from loraplex_contracts.request import PositionLogprobs
from loraplex_runtime.reports import Progress
from loraplex_server.backends.cuda.graphs import GraphShape, StepGraphs
from loraplex_server.layers.adapter_slots import AdapterSlots, as_if_installed
from loraplex_server.layers.attention import AttentionBatch, KvCache, PagedAttention
from loraplex_server.layers.lora import PreparedSegments, ReplayableLora, Segment
from loraplex_server.layers.step import Row, StagedStep, StepResources
from loraplex_server.layers.transfer import Download, download, upload
from loraplex_server.model.batch import BatchMirror
from loraplex_server.model.isolation import FinishedStep, typed_error
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.states import StateMemory, StateStep
from loraplex_server.sampling.sampler import (
    HostSampled,
    Logprobs,
    Sampled,
    Sampler,
    prompt_logprobs,
    verify_chain,
)

log = logging.getLogger(__name__)

REPORT_EVERY_S = 5.0  # of compiling kernels
# Tokens of a context that attention on CUDA cuts into ranges, whatever the model's heads.
LONG_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class _Pooled:
    """The pooled values of a step's spans."""

    so_far: dict[int, Tensor]  # by row, of a prompt's tokens so far: the sum of their states, or the logits of each
    shapes: dict[str, tuple[int, int]]  # by sequence id, of those that end: rows and columns
    values: Download  # of theirs, one after the other


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launched step, with what is needed to read its results."""

    staged: StagedStep
    samples: Sampled
    values: Download  # of `samples`
    keepers: list[int]  # spans whose hidden state is kept
    hidden: Tensor | None  # [num_head_rows, hidden], where there are keepers or pooled spans
    pooled: _Pooled | None = None
    states: StateStep | None = None


class StepUnderWay:
    """The handle of a step that may still run on the device."""

    def __init__(self, runner: ModelRunner, step: int, refused: Mapping[str, SpanResult], launched: _Launched) -> None:
        self._runner = runner
        self._step = step
        self._refused = refused
        self._launched: _Launched | None = launched
        self._done: StepResult | None = None

    def result(self) -> StepResult:
        if self._done is None:
            assert self._launched is not None, "a step whose result raised has none"
            launched, self._launched = self._launched, None
            self._done = StepResult(self._step, {**self._refused, **self._runner.finish(launched)})
        return self._done


class ModelRunner:
    """Executes the steps of one model."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KvCache,
        attention: PagedAttention,
        slots: AdapterSlots,
        sampler: Sampler,
        *,
        max_rows: int,
        max_len: int | None = None,
        overlaps: bool | None = None,
        states: StateMemory | None = None,
    ) -> None:
        """`overlaps`: whether `execute` returns before the step has run; by default where the device has a queue.
        `states`: of a model whose mixers keep some."""
        assert (states is not None) == bool(loaded.states), "a model with states needs memory for them"
        self._loaded = loaded
        self._model = loaded.model
        self._context = loaded.context
        self._cache = cache
        self._attention = attention
        self._slots = slots
        self._sampler = sampler
        self._states = states
        self._device = loaded.device
        self.overlaps = loaded.device.type == "cuda" if overlaps is None else overlaps
        self._graphs: StepGraphs | None = None
        max_len = max_len or loaded.spec.max_context_tokens
        self.mirror = BatchMirror(max_rows, max_len, cache.block_size, loaded.device, loaded.spec.rope)
        # By row, what its latest token was sampled from: post-norm hidden states of a step [num_head_rows, hidden], and
        # which one. None where it is not kept.
        self._hidden: list[tuple[Tensor, int] | None] = [None] * max_rows
        self._pooled: dict[int, Tensor] = {}  # as `_Pooled.so_far`
        # Sequences that could not enter; their spans answer with this.
        self._refused: dict[int, LoraplexError] = {}
        loaded.bind_kv(cache, attention)

    def has_hidden(self, row: int) -> bool:
        """True if `last_hidden` has the row: its sequence keeps hidden states and has drawn a token."""
        return self._hidden[row] is not None

    def last_hidden(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), hidden]: the head's input for each row's latest token. Only for rows with `has_hidden`."""
        kept = [self._hidden[row] for row in rows]
        found = [state for state in kept if state is not None]
        assert len(found) == len(kept), "a row without a hidden state"
        hidden, idx = found[0]
        if len(found) == 1:
            return hidden[idx : idx + 1]
        if all(states is hidden for states, _ in found):
            places = torch.tensor([idx for _, idx in found], dtype=torch.int64)
            return hidden.index_select(0, upload(places, self._device))
        return torch.stack([states[idx] for states, idx in found])

    def execute(self, plan: StepPlan) -> FinishedStep | StepUnderWay:
        """Runs a step. May raise; nothing of the step is committed then. See Execute."""
        with torch.inference_mode():
            self._change_rows(plan)
            results: dict[str, SpanResult] = {}
            spans: list[Span] = []
            for span in plan.spans:
                error = self._reason_against(span)
                if error is None:
                    spans.append(span)
                else:
                    results[span.sequence_id] = SpanResult(error=error)
            if spans:
                launched = self._launch(spans)
                if self.overlaps:
                    self._commit(launched)
                    return StepUnderWay(self, plan.step, results, launched)
                found = self._results(launched)
                self._replay_states(launched, found)
                self._commit(launched)
                self._settle(launched, found)
                results |= found
        return FinishedStep(StepResult(plan.step, results))

    def _replay_states(self, launched: _Launched, results: Mapping[str, SpanResult]) -> None:
        """Computes the states behind accepted drafts: as many tokens of a span count as it gave."""
        if launched.states is not None:
            kept = {span.sequence_id: len(results[span.sequence_id].token_ids) for span in launched.staged.spans}
            launched.states.replay(kept)

    def _commit(self, launched: _Launched) -> None:
        self.mirror.commit(launched.staged)
        if launched.states is not None:
            launched.states.commit()
        if launched.pooled is not None:
            self._pooled |= launched.pooled.so_far

    def finish(self, launched: _Launched) -> dict[str, SpanResult]:
        """The results of a step under way, for its handle. Waits for the step."""
        with torch.inference_mode():
            try:
                results = self._results(launched)
                self._replay_states(launched, results)
            except Exception:
                if launched.states is not None:
                    launched.states.settle()  # as if no draft had been accepted
                raise
            self._settle(launched, results)
        return results

    def capture(self, shapes: Sequence[GraphShape], progress: Progress) -> None:
        """Captures steps of these shapes as graphs, which are replayed from then on. Before the first request only.

        What cannot be captured runs as before, and `progress` is told.
        """
        reasons = {
            "this model's mixers keep states": self._states is not None,
            "this model's rotations depend on the lengths of texts": self._loaded.spec.rope is not None,
        }
        if reason := next((text for text, holds in reasons.items() if holds), ""):
            if shapes:
                progress(f"steps run without CUDA graphs: {reason}")
            return
        steps = StepResources(self._model, self._context, self.mirror.tokens, self._cache, self._attention, self._slots)
        self._graphs = self._loaded.backend.capture_steps(steps, shapes, progress)

    def warm_up(self, max_tokens: int, progress: Progress) -> None:
        """Compiles kernels for steps of up to `max_tokens` tokens, which happens when they first run, so that no
        request waits for a compiler. Before the first request only.

        Runs one text of each length that is a power of two, and the longest step that there may be: so each size of
        block comes up that attention and adapters choose among. Then one token behind a long context, whose attention
        is put together from parts. Adapter kernels run over segments without adapters. Writes to unused KV blocks.
        `progress` is told where it takes long, as it does the first time.
        """
        num_positions = min(self._cache.num_blocks * self._cache.block_size, self._loaded.spec.max_context_tokens)
        longest = min(max_tokens, num_positions)
        lengths = [*(1 << exponent for exponent in range((longest - 1).bit_length())), longest]
        start_s = said_s = time.perf_counter()
        with torch.inference_mode(), as_if_installed(self._loaded.targets):
            for done, num_tokens in enumerate(lengths):
                self._run_empty(num_tokens)
                if (now_s := time.perf_counter()) - said_s > REPORT_EVERY_S:
                    progress(f"compiling kernels: {done + 1} of {len(lengths)} lengths of steps")
                    said_s = now_s
            self._run_empty(1, min(num_positions, LONG_CONTEXT) - 1)
            self._sampler.warm_up()
        if said_s > start_s:
            progress(f"kernels compiled in {time.perf_counter() - start_s:.0f} s; the next start finds them on disk")

    def _run_empty(self, num_tokens: int, num_before: int = 0) -> None:
        context, cache, slots, device = self._context, self._cache, self._slots, self._device
        query_lens = np.array([num_tokens], dtype=np.int64)
        tables = np.arange(-(-(num_before + num_tokens) // cache.block_size), dtype=np.int64)[None, :]
        places = torch.arange(num_before, num_before + num_tokens, device=device)
        try:
            batch = AttentionBatch(query_lens, query_lens + num_before, tables, cache.block_size, places)
            context.attention = self._attention.plan(batch, cache.dtype, device)
            if isinstance(slots.ops, ReplayableLora):
                context.token_segments = slots.ops.reserve(num_tokens, slots.num_slots, device)
            ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
            if self._states is not None:
                context.states = self._states.begin([Span("", 0, 0, num_tokens, 0)])
            self._loaded.logits(ids, places.unsqueeze(0), places[-1:] - num_before)
        finally:
            context.clear()

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Clears blocks that were never written, so that they can be read. For measurements of steps."""
        with torch.inference_mode():
            self._cache.clear_blocks(block_ids)

    def check_integrity(self) -> None:
        """Raises AssertionError for a place of a state that is lost or used twice. Call it while no step runs."""
        if self._states is not None:
            self._states.check_integrity()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _change_rows(self, plan: StepPlan) -> None:
        for row in plan.released:
            self._release(row)
        for sequence in plan.entered:
            self._enter(sequence)
        self._cache.copy_blocks([copy.source for copy in plan.copies], [copy.target for copy in plan.copies])

    def _release(self, row: int) -> None:
        self.mirror.release(row)
        self._sampler.clear_row(row)
        self._hidden[row] = None
        self._pooled.pop(row, None)
        self._refused.pop(row, None)

    def _enter(self, sequence: NewSequence) -> None:
        """Enters a sequence. One that cannot enter fails alone."""
        self._release(sequence.row)
        try:
            self.mirror.enter(sequence)
            self._sampler.set_row(sequence.row, sequence)
        except Exception as error:
            self._refused[sequence.row] = typed_error(error, f"sequence {sequence.sequence_id} entered its row")

    def _reason_against(self, span: Span) -> LoraplexError | None:
        if span.row in self._refused:
            return self._refused[span.row]
        try:
            self.mirror.check(span)
        except ValueError as error:
            log.error("span refused: %s", error)
            return Internal("this request's state was lost; send it again")
        return None

    # --- a step -------------------------------------------------------------------------------------------------------

    def _launch(self, spans: Sequence[Span]) -> _Launched:
        try:
            self._sampler.begin(spans)
            return self._compute(spans)
        finally:
            self._sampler.end()

    def _compute(self, spans: Sequence[Span]) -> _Launched:
        staged = self.mirror.stage(spans)
        if self._attention.needs_clean_blocks:
            self._cache.clear_blocks(staged.fresh_blocks)
        keepers = [i for i, row in enumerate(staged.rows) if row.sequence.keeps_hidden and staged.spans[i].num_samples]
        pools = bool(staged.pooled) or any(span.ends_pooling for span in spans)
        states = None if self._states is None else self._states.begin(staged.spans)
        logits, hidden = (None if pools else self._replay(staged, keepers)) or self._forward(
            staged, states, capture=bool(keepers or staged.pooled)
        )
        samples = self._sample(staged, logits)
        pooled = self._pool(staged, logits, hidden) if pools else None
        return _Launched(staged, samples, download(samples.pack()), keepers, hidden, pooled, states)

    def _pool(self, staged: StagedStep, logits: Tensor, hidden: Tensor | None) -> _Pooled:
        """The values of spans that end pooling, and what is kept of those that go on."""
        so_far: dict[int, Tensor] = {}
        values: dict[str, Tensor] = {}  # [rows, columns] each
        for one in staged.pooled:
            row, span = staged.rows[one.span_idx], staged.spans[one.span_idx]
            assert hidden is not None, "hidden states of pooled rows are captured"
            states = hidden[one.start : one.start + one.num_rows]
            pooling, before = row.sequence.pooling, self._pooled.get(span.row)
            assert pooling is not None
            if pooling.task == "classify":
                states = self._classify(row, states)
            if pooling.positions == "mean":
                states = states.to(torch.float64).sum(dim=0, keepdim=True)
                so_far[span.row] = total = states if before is None else before + states
                states = total / (span.start + span.num_tokens)
            elif pooling.positions == "each":
                so_far[span.row] = states = states if before is None else torch.cat([before, states])
            if span.ends_pooling:
                values[span.sequence_id] = states
        for row, span, start in zip(staged.rows, staged.spans, staged.head_starts, strict=True):
            pooling = row.sequence.pooling
            if span.ends_pooling and pooling is not None and pooling.task == "next_token":
                ids = upload(torch.tensor(pooling.token_ids, dtype=torch.int64), self._device)
                values[span.sequence_id] = logits[start : start + 1].index_select(1, ids)
        shapes = {sequence_id: (one.shape[0], one.shape[1]) for sequence_id, one in values.items()}
        flat = [one.reshape(-1).to(torch.float64) for one in values.values()]
        packed = torch.cat(flat) if flat else torch.empty(0, dtype=torch.float64, device=self._device)
        return _Pooled(so_far, shapes, download(packed))

    def _classify(self, row: Row, states: Tensor) -> Tensor:
        """Logits [num_rows, num_labels] of hidden states, by the classifier of the row's adapter."""
        (use,) = row.sequence.adapters
        weights = self._slots.installed(use.adapter_slot)
        assert weights is not None, "an adapter in use stays in its slot"
        assert weights.classifier is not None, "requests to classify name an adapter with a classifier"
        return F.linear(states, weights.classifier.weight, weights.classifier.bias)

    def _settle(self, launched: _Launched, results: Mapping[str, SpanResult]) -> None:
        """Applies how much of each draft was accepted, which is known once the host has the tokens."""
        staged = launched.staged
        if launched.states is not None:
            launched.states.settle()
        for row, span in zip(staged.rows, staged.spans, strict=True):
            if span.draft:
                self.mirror.settle(row, span, len(results[span.sequence_id].token_ids))
        if launched.hidden is not None:
            for i in launched.keepers:
                # The last accepted token's; states of rejected drafts come after it.
                num_accepted = max(0, len(results[staged.spans[i].sequence_id].token_ids) - 1)
                place = staged.head_starts[i] + staged.num_prompt_rows[i] + num_accepted
                self._hidden[staged.spans[i].row] = launched.hidden, place

    def _replay(self, staged: StagedStep, keepers: Sequence[int]) -> tuple[Tensor, Tensor | None] | None:
        """The results of `_forward`, from a graph; None where the step does not fit one."""
        if self._graphs is None or (found := self._graphs.run(staged)) is None:
            return None
        logits, hidden = found
        return logits, hidden.clone() if keepers else None  # the next replay overwrites it

    def _forward(self, staged: StagedStep, states: StateStep | None, capture: bool) -> tuple[Tensor, Tensor | None]:
        """Logits [num_head_rows, num_logits] and, where asked for, what they were made of [num_head_rows, hidden]."""
        context = self._context
        inputs = self.mirror.inputs(staged)
        try:
            context.states = states
            context.rope_lengths = staged.rope_lengths
            context.head_rows = staged.head_rows
            context.capture_head_input = capture
            context.num_logit_rows = staged.num_logit_rows if staged.pooled else None
            context.token_segments = self._prepare(staged.token_segments, staged.num_tokens)
            context.head_segments = self._prepare(staged.head_segments, staged.num_logit_rows)
            context.attention = self._attention.plan(inputs.attention, self._cache.dtype, self._device)
            with self._loaded.torch_threads(staged.num_tokens):
                logits = self._loaded.logits(inputs.input_ids, inputs.position_ids, inputs.head_rows)
            return logits, context.head_input
        finally:
            context.clear()

    def _prepare(self, segments: Sequence[Segment], num_rows: int) -> PreparedSegments | None:
        """The segments prepared for the kernels; None where no row has an adapter: modules then compute the base
        product alone."""
        if not segments:
            return None
        return self._slots.ops.prepare(segments, num_rows, self._slots.num_slots, self._device)

    def _sample(self, staged: StagedStep, logits: Tensor) -> Sampled:
        """Draws all samples, writes them to the mirror, and computes the prompts' logprobs."""
        rows: list[int] = []
        positions: list[int] = []
        head_idx: list[int] = []
        prompts: list[Logprobs] = []
        for row, span, start, num_prompt in zip(
            staged.rows, staged.spans, staged.head_starts, staged.num_prompt_rows, strict=True
        ):
            first = start + num_prompt
            rows += [span.row] * span.num_samples
            end = span.start + span.num_tokens
            positions += range(end - span.num_samples + 1, end + 1)  # of the tokens that are drawn
            head_idx += range(first, first + span.num_samples)
            if num_prompt:
                following = self.mirror.tokens[span.row, span.start + 1 : span.start + 1 + num_prompt]
                num_top = row.sequence.output.top_logprobs
                prompts.append(prompt_logprobs(logits[start:first], following, num_top))
        if len(head_idx) != logits.shape[0]:
            logits = logits.index_select(0, upload(torch.tensor(head_idx, dtype=torch.int64), self._device))
        drafts = {span.row: span.draft for span in staged.spans if span.draft}
        sampled = self._sampler.sample(logits, rows, positions, self.mirror.tokens, drafts)
        if rows:
            self.mirror.keep_drawn(rows, positions, sampled.token_ids)
        return replace(sampled, others=tuple(prompts)) if prompts else sampled

    def _results(self, launched: _Launched) -> dict[str, SpanResult]:
        """The results of a launched step by sequence id. Waits for the device."""
        staged = launched.staged
        sampled = launched.samples.unpack(launched.values.wait())
        results: dict[str, SpanResult] = {}
        prompts = iter(sampled.others)
        start = 0
        for row, span, num_prompt in zip(staged.rows, staged.spans, staged.num_prompt_rows, strict=True):
            prompt = next(prompts) if num_prompt else ()
            end = start + span.num_samples
            results[span.sequence_id] = _span_result(row, span, sampled, start, end, prompt)
            start = end
        if launched.pooled is not None:
            results |= _pooled_results(staged, launched.pooled)
        return results


def _span_result(
    row: Row, span: Span, sampled: HostSampled, start: int, end: int, prompt: tuple[PositionLogprobs, ...]
) -> SpanResult:
    if any(math.isnan(entry.logprob) for entry in prompt):
        return SpanResult(error=_not_finite(row))
    token_ids = verify_chain(span.draft, sampled.token_ids[start:end]) if end > start else ()
    # Errors behind the first token that disagrees with the draft do not count.
    came = range(start, start + len(token_ids))
    bad = next((idx for idx in came if sampled.is_bad[idx]), None)
    error = None
    if bad is not None:
        came, token_ids = range(start, bad), token_ids[: bad - start]
        error = _no_token(row) if bad in sampled.without_token else _not_finite(row)
    logprobs = tuple(entry for entry in sampled.logprobs[came.start : came.stop] if entry is not None)
    return SpanResult(token_ids, logprobs, prompt, error=error)


def _pooled_results(staged: StagedStep, pooled: _Pooled) -> dict[str, SpanResult]:
    rows = {span.sequence_id: row for row, span in zip(staged.rows, staged.spans, strict=True)}
    packed = pooled.values.wait().numpy()
    results: dict[str, SpanResult] = {}
    start = 0
    for sequence_id, (num_rows, num_columns) in pooled.shapes.items():
        part = packed[start : start + num_rows * num_columns]
        start += len(part)
        values: array[float] = array("d")
        values.frombytes(part.view(np.uint8).data)
        is_finite = np.isfinite(part).all()
        results[sequence_id] = (
            SpanResult(pooled=PooledValues(values, num_columns))
            if is_finite
            else SpanResult(error=_not_finite(rows[sequence_id]))
        )
    return results


def _no_token(row: Row) -> LoraplexError:
    matcher = row.sequence.matcher
    if matcher is not None:
        if matcher.error:
            return FailedPrecondition(matcher.error, field="grammar")
        return FailedPrecondition(
            "the grammar, the sampling options and `stopping.min_tokens` together leave no token that may come next; "
            "allow more",
            field="grammar",
        )
    return InvalidArgument(
        "the sampling options, and `stopping.min_tokens`, together leave no token that may come next; allow more",
        field="sampling",
    )


def _not_finite(row: Row) -> LoraplexError:
    if row.sequence.adapters:
        return NonFinite("with this adapter the model computes NaN or Inf; check its weights and its alpha")
    return Internal("the model computed NaN or Inf for this request")
