"""Runs plans: the only place of the engine with tensors.

Owns the batch mirror and connects the model to its KV cache, adapter slots and sampler. A step that raises may be run
again, whole or span by span: rows that entered or left stay so, and nothing that it attached or drew counts. Decides
nothing: which sequence runs, and where its blocks are, is the plan's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_adapters.ops.base import PreparedSegments, Segment
from loraplex_proto.errors import Internal, LoraplexError, NonFinite, unexpected
from loraplex_server.model.adapt import AdapterSlots
from loraplex_server.model.attention.base import PagedAttention
from loraplex_server.model.batch import BatchMirror, StagedStep
from loraplex_server.model.kv import KvCache
from loraplex_server.model.loaded import LoadedModel
from loraplex_server.sampling.logprobs import Logprobs, prompt_logprobs
from loraplex_server.sampling.sampler import HostSampled, Sampler
from loraplex_server.sampling.verify import verify_chain
from loraplex_server.scheduler.plan import NewSequence, Span, SpanResult, StepPlan, StepResult, TokenLogprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a step that has been run already. Implements engine.isolation.StepHandle."""

    done: StepResult

    def result(self) -> StepResult:
        return self.done


class ModelRunner:
    """One model's steps."""

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
    ) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._context = loaded.context
        self._cache = cache
        self._attention = attention
        self._slots = slots
        self._sampler = sampler
        self._device = loaded.device
        self._mirror = BatchMirror(max_rows, max_len or loaded.spec.max_context_tokens, cache.block_size, loaded.device)
        # The post-norm hidden state that each row's latest token was sampled from; see `last_hidden`.
        self._hidden = torch.zeros(max_rows, loaded.spec.hidden_size, dtype=loaded.dtype, device=loaded.device)
        # Sequences that could not enter; their spans answer with this.
        self._refused: dict[int, LoraplexError] = {}
        loaded.bind_kv(cache, attention)

    @property
    def mirror(self) -> BatchMirror:
        return self._mirror

    def last_hidden(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), hidden]: what the head made each row's latest token of. Of sequences that keep it only."""
        return self._hidden.index_select(0, torch.tensor(rows, dtype=torch.int64).to(self._device))

    def execute(self, plan: StepPlan) -> FinishedStep:
        """Runs a step. May raise; nothing of the step is committed then. See engine.isolation.Execute."""
        with torch.inference_mode():
            self._change_rows(plan)
            results: dict[str, SpanResult] = {}
            spans: list[Span] = []
            for span in plan.spans:
                error = self._reason_against(span)
                if error is None:
                    spans.append(span)
                else:
                    results[span.sequence_id] = SpanResult(num_drafted=len(span.draft), error=error)
            if spans:
                results |= self._run(spans)
        return FinishedStep(StepResult(plan.step, results))

    def close(self) -> None:
        """Nothing runs on by itself."""

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _change_rows(self, plan: StepPlan) -> None:
        for row in plan.released:
            self._release(row)
        for sequence in plan.entered:
            self._enter(sequence)
        self._cache.copy_blocks([copy.source for copy in plan.copies], [copy.target for copy in plan.copies])

    def _release(self, row: int) -> None:
        self._mirror.release(row)
        self._sampler.clear_row(row)
        self._refused.pop(row, None)

    def _enter(self, sequence: NewSequence) -> None:
        """A sequence that cannot enter fails alone."""
        self._release(sequence.row)
        try:
            self._mirror.enter(sequence)
            self._sampler.set_row(sequence.row, sequence)
        except Exception as error:
            self._refused[sequence.row] = unexpected(error, f"sequence {sequence.sequence_id} entered its row")

    def _reason_against(self, span: Span) -> LoraplexError | None:
        if span.row in self._refused:
            return self._refused[span.row]
        try:
            self._mirror.check(span)
        except ValueError as error:
            log.error("span refused: %s", error)
            return Internal("this request's state was lost; send it again")
        return None

    # --- a step -------------------------------------------------------------------------------------------------------

    def _run(self, spans: Sequence[Span]) -> dict[str, SpanResult]:
        staged = self._mirror.stage(spans)
        self._cache.clear_blocks(staged.fresh_blocks)
        keepers = [i for i, span in enumerate(staged.spans) if span.num_samples and self._keeps_hidden(span)]
        logits, hidden = self._forward(staged, capture=bool(keepers))
        sampled = self._sample(staged, logits)
        results, new_tokens = self._results(staged, sampled)
        self._mirror.commit(staged.spans, new_tokens)
        if hidden is not None:
            self._keep_hidden(staged, keepers, new_tokens, hidden)
        return results

    def _keeps_hidden(self, span: Span) -> bool:
        return self._mirror.row(span).sequence.keeps_hidden

    def _keep_hidden(
        self, staged: StagedStep, keepers: Sequence[int], new_tokens: Sequence[Sequence[int]], hidden: Tensor
    ) -> None:
        """Of each keeper the state behind its last token that counts: rejected drafts come after it."""
        rows = [staged.spans[i].row for i in keepers]
        found = [staged.head_starts[i] + staged.num_prompt_rows[i] + max(0, len(new_tokens[i]) - 1) for i in keepers]
        packed = torch.tensor([rows, found], dtype=torch.int64).to(self._device)
        self._hidden.index_copy_(0, packed[0], hidden.index_select(0, packed[1]))

    def _forward(self, staged: StagedStep, capture: bool) -> tuple[Tensor, Tensor | None]:
        """Logits [num_head_rows, num_logits] and, where asked for, what they were made of [num_head_rows, hidden]."""
        context = self._context
        try:
            context.capture_head_input = capture
            context.token_segments = self._prepare(staged.token_segments, staged.input_ids.shape[1])
            context.head_segments = self._prepare(staged.head_segments, staged.head_rows.shape[0])
            context.attention = self._attention.plan(staged.attention, self._cache.dtype, self._device)
            out = self._model(
                input_ids=staged.input_ids,
                position_ids=staged.position_ids,
                use_cache=False,
                logits_to_keep=staged.head_rows,
            )
            return out.logits[0], context.head_input
        finally:
            context.clear()

    def _prepare(self, segments: Sequence[Segment], num_rows: int) -> PreparedSegments | None:
        """None when no row has an adapter: the modules then do nothing besides the base product."""
        if not segments:
            return None
        return self._slots.ops.prepare(segments, num_rows, self._slots.num_slots, self._device)

    def _sample(self, staged: StagedStep, logits: Tensor) -> HostSampled:
        """Draws all samples, and takes the prompts' logprobs, with one transfer to the host."""
        rows: list[int] = []
        positions: list[int] = []
        head_idx: list[int] = []
        prompts: list[Logprobs] = []
        for span, start, num_prompt in zip(staged.spans, staged.head_starts, staged.num_prompt_rows, strict=True):
            first = start + num_prompt
            rows += [span.row] * span.num_samples
            end = span.start + span.num_tokens
            positions += range(end - span.num_samples + 1, end + 1)  # of the tokens that are drawn
            head_idx += range(first, first + span.num_samples)
            if num_prompt:
                following = self._mirror.tokens[span.row, span.start + 1 : span.start + 1 + num_prompt]
                num_top = self._mirror.row(span).sequence.output.top_logprobs
                prompts.append(prompt_logprobs(logits[start:first], following, num_top))
        if len(head_idx) != logits.shape[0]:
            logits = logits.index_select(0, torch.tensor(head_idx, dtype=torch.int64).to(self._device))
        return self._sampler.sample(logits, rows, positions, self._mirror.tokens).to_host(prompts)

    def _results(self, staged: StagedStep, sampled: HostSampled) -> tuple[dict[str, SpanResult], list[list[int]]]:
        """What each span gave, and the tokens that its row goes on with."""
        results: dict[str, SpanResult] = {}
        new_tokens: list[list[int]] = []
        prompts = iter(sampled.others)
        start = 0
        for span, num_prompt in zip(staged.spans, staged.num_prompt_rows, strict=True):
            prompt = next(prompts) if num_prompt else ()
            end = start + span.num_samples
            result = self._span_result(span, sampled, start, end, prompt)
            results[span.sequence_id] = result
            new_tokens.append(list(result.token_ids))
            start = end
        return results, new_tokens

    def _span_result(
        self, span: Span, sampled: HostSampled, start: int, end: int, prompt: tuple[TokenLogprobs, ...]
    ) -> SpanResult:
        num_drafted = len(span.draft)
        token_ids = verify_chain(span.draft, sampled.token_ids[start:end]) if end > start else ()
        # Behind the first token that disagrees with the draft nothing counts, not even what is wrong there.
        came = slice(start, start + len(token_ids))
        if any(sampled.is_bad[came]) or any(math.isnan(entry.logprob) for entry in prompt):
            return SpanResult(num_drafted=num_drafted, error=self._not_finite(span))
        logprobs = tuple(entry for entry in sampled.logprobs[came] if entry is not None)
        return SpanResult(token_ids, logprobs, prompt, num_drafted)

    def _not_finite(self, span: Span) -> LoraplexError:
        if self._mirror.row(span).sequence.adapters:
            return NonFinite("with this adapter the model computes NaN or Inf; check its weights and its alpha")
        return Internal("the model computed NaN or Inf for this request")
