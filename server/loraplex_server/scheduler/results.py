"""Results of a step: tokens are committed, blocks published, completions ended.

Where a token ends a completion, whatever was computed behind it is dropped. A result finds its sequence by object, not
by name: sequences that have ended meanwhile are passed over, and the token of a preempted one still counts.
"""

from __future__ import annotations

from collections.abc import Callable

from loraplex_contracts.errors import Internal, LoraplexError
from loraplex_contracts.plan import Span, SpanResult, StepResult
from loraplex_contracts.request import CompletionEnd, Event, FinishReason, PromptLogprobs, Tokens
from loraplex_server.scheduler.overload import StepSpeed
from loraplex_server.scheduler.sequence_table import SequenceTable
from loraplex_server.scheduler.states import InFlight, RequestState, SequenceState, SequenceStatus

_NOTHING = SpanResult()


class ResultProcessor:
    """Applies results to the table's sequences and emits their events. Owns nothing."""

    def __init__(
        self,
        table: SequenceTable,
        speed: StepSpeed,
        eos_token_ids: frozenset[int],
        emit: Callable[[Event], None],
        fail: Callable[[RequestState, LoraplexError], None],
    ) -> None:
        self._table = table
        self._speed = speed
        self._eos_token_ids = eos_token_ids
        self._emit = emit
        self._fail = fail

    def commit(self, flight: InFlight, result: StepResult) -> None:
        """Takes in the result of a plan that is no longer under way."""
        for seq, span in flight.spans:
            if seq.last_plan is flight:
                seq.last_plan = None
            if span.draft:
                seq.is_draft_coming = False
            elif span.num_samples:
                seq.num_coming -= 1
            if seq.status is SequenceStatus.FINISHED:
                continue
            out = result.spans.get(span.sequence_id, _NOTHING)
            error = out.error or _broken_contract(span, out)
            if error is not None:
                self._fail(seq.request, error)
            else:
                self._commit_span(seq, span, out)
        for adapter_key in flight.ended_leases:
            self._table.release_adapter(adapter_key)

    def finish(self, seq: SequenceState, reason: FinishReason, stop_token_id: int | None) -> None:
        """Ends a completion well; the request's last one ends the request."""
        request = seq.request
        if seq.num_left:
            self._speed.on_early_end()
        self._table.finish(seq)
        self._emit(
            CompletionEnd(
                request.request.request_id,
                seq.index,
                reason,
                stop_token_id,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
            )
        )
        if request.num_open == 0:
            self._table.end_request(request)

    def _commit_span(self, seq: SequenceState, span: Span, out: SpanResult) -> None:
        if span.prompt_logprobs:
            _take_prompt_logprobs(seq.request, span, out)
        num_accepted = max(0, len(out.token_ids) - 1)
        num_rejected = len(span.draft) - num_accepted
        # One that was preempted meanwhile has no blocks any more, and cannot be back yet (see SequenceTable.enter).
        is_running = seq.status is SequenceStatus.RUNNING
        if is_running:
            seq.num_computed -= num_rejected
        kept, reason, stop_token_id = self._cut(seq, out.token_ids)
        seq.token_ids += kept
        if is_running:
            # Only K/V of the text is published, not that of rejected drafts or behind a stop.
            self._publish(seq, min(span.start + span.num_tokens - num_rejected, len(seq.token_ids)))
        if kept:
            self._emit_tokens(seq, span, out, kept, num_accepted)
        if reason is not None:
            self.finish(seq, reason, stop_token_id)

    def _cut(
        self, seq: SequenceState, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """The tokens up to the one that ends the completion, and why it ends."""
        stopping = seq.request.request.stopping
        num_tokens = len(seq.token_ids)
        for num_kept, token_id in enumerate(token_ids, start=1):
            num_output = num_tokens + num_kept - seq.num_prompt_tokens
            if token_id in seq.request.stop_ids and num_output > stopping.min_tokens:
                is_eos = token_id in self._eos_token_ids and not stopping.ignore_eos
                return token_ids[:num_kept], FinishReason.EOS if is_eos else FinishReason.STOP, token_id
            if num_tokens + num_kept >= seq.max_total_tokens:
                return token_ids[:num_kept], FinishReason.LENGTH, None
        return token_ids, None, None

    def _publish(self, seq: SequenceState, num_committed: int) -> None:
        blocks = self._table.blocks
        num_full = num_committed // blocks.block_size
        if seq.chain is None or num_full <= seq.num_published:
            return
        for block_idx in range(seq.num_published, num_full):
            blocks.publish(seq.block_ids[block_idx], seq.chain.key(block_idx, seq.token_ids))
        seq.num_published = num_full

    def _emit_tokens(
        self, seq: SequenceState, span: Span, out: SpanResult, kept: tuple[int, ...], num_accepted: int
    ) -> None:
        request = seq.request
        request_id = request.request.request_id
        is_first = len(seq.token_ids) - len(kept) == seq.num_prompt_tokens
        if request.request.output.prompt_logprobs and not request.prompt_logprobs_sent:
            request.prompt_logprobs_sent = True
            self._emit(PromptLogprobs(request_id, tuple(request.prompt_logprobs)))
        self._emit(
            Tokens(
                request_id,
                seq.index,
                kept,
                out.logprobs[: len(kept)],
                num_drafted=len(span.draft),
                num_accepted=min(num_accepted, len(kept)),
                proposer=span.proposer,
                # The front end finds stop strings, and the sequence runs on until it has.
                can_wait=not is_first and not request.request.stopping.stop,
            )
        )


def _take_prompt_logprobs(request: RequestState, span: Span, out: SpanResult) -> None:
    """Positions that are not known yet; a prompt that was computed twice gives some twice."""
    num_known = len(request.prompt_logprobs)
    num_new = min(span.start + span.num_tokens, request.num_prompt_tokens - 1) - num_known
    if num_new > 0:
        first = num_known - span.start
        request.prompt_logprobs += out.prompt_logprobs[first : first + num_new]


def _broken_contract(span: Span, out: SpanResult) -> LoraplexError | None:
    """The error of a span with no token where it sampled, or with more tokens than it sampled; else None."""
    num_wanted = 1 if span.num_samples else 0
    if num_wanted <= len(out.token_ids) <= span.num_samples:
        return None
    return Internal(
        f"a step gave {len(out.token_ids)} tokens where {span.num_samples} were sampled; please report this"
    )
