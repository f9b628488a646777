"""Draft model runner: one more token of all sequences per step.

The first step brings every sequence up to date (tokens that came since, or a chunk of a new prompt) and draws its first
token; each further step draws one more for the sequences that want one. Owns the draft model's runner, KV cache and
rows. Knows neither the target model nor the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from loraplex_contracts.errors import OutOfMemory
from loraplex_contracts.plan import Span, SpanResult, StepPlan
from loraplex_server.backends.reference.lora import ReferenceOps
from loraplex_server.backends.registry import make_attention
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.layers.kv_memory import KvCache, num_blocks_for
from loraplex_server.model.fault_isolation import execute_isolated
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.runner import ModelRunner
from loraplex_server.sampling.sampler import Sampler
from loraplex_server.speculation.draft_model.rows import DraftedSequence, DraftRows, Wanted
from loraplex_server.speculation.step_costs import StepCosts, measure_runner

log = logging.getLogger(__name__)

# A sequence that lacks no more tokens is brought up to date at once; more are a prompt, and run within its budget.
_CATCH_UP_TOKENS = 32
_MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Limits of what a draft model keeps."""

    max_rows: int
    kv_bytes: int
    block_size: int = 16
    prefix_caching: bool = True
    max_prompt_tokens: int = 512  # of new prompts, in one ask
    max_len: int | None = None  # tokens of one sequence; None: the model's own limit


@dataclass(slots=True)
class _Run:
    """One sequence in one ask."""

    seq: DraftedSequence
    want: Wanted
    max_tokens: int  # that can be drafted
    drafted: list[int] = field(default_factory=list[int])
    is_over: bool = False

    @property
    def goes_on(self) -> bool:
        """Its row is up to date, and another token is wanted."""
        return not self.is_over and 0 < len(self.drafted) < self.max_tokens


class Drafter:
    """One draft model with all that it needs to run."""

    def __init__(
        self,
        loaded: LoadedModel,
        memory: DraftMemory,
        *,
        model_digest: str = "",
    ) -> None:
        """Raises OutOfMemory when the KV cache would hold less than three blocks. `model_digest`: of the weights,
        adapter included."""
        spec = loaded.spec
        num_blocks = num_blocks_for(spec, memory.block_size, loaded.dtype, memory.kv_bytes)
        if num_blocks < 3:
            raise OutOfMemory(
                f"{memory.kv_bytes / 2**20:.0f} MiB of KV cache for {loaded.model_id} hold less than three blocks; "
                "give more with --draft-kv-memory"
            )
        # As many blocks as all rows can fill at most; block 0 is for padding.
        max_len = min(
            memory.max_len or spec.max_context_tokens, spec.max_context_tokens, (num_blocks - 1) * memory.block_size
        )
        num_blocks = min(num_blocks, memory.max_rows * -(-max_len // memory.block_size) + 1)
        cache = KvCache(spec, num_blocks, memory.block_size, loaded.dtype, loaded.device)
        self.loaded = loaded
        self.runner = ModelRunner(
            loaded,
            cache,
            make_attention("auto", loaded.backend, spec.layers, loaded.dtype),
            loaded.adapter_slots(ReferenceOps(), 1),  # always empty
            Sampler(memory.max_rows, spec.num_logits, loaded.device, argmax=loaded.backend.argmax()),
            max_rows=memory.max_rows,
            max_len=max_len,
        )
        pool = BlockPool(num_blocks, memory.block_size, prefix_caching=memory.prefix_caching)
        self.rows = DraftRows(pool, memory.max_rows, max_len, spec.vocab_size, f"draft {model_digest}")
        self._max_len = max_len
        self._max_rows = memory.max_rows
        self._max_prompt_tokens = memory.max_prompt_tokens
        self._num_steps = 0
        self._num_failures = 0  # in a row

    def draft(self, wants: Sequence[Wanted]) -> list[list[int]]:
        """A draft for each, in order; empty where the sequence does not fit or its prompt is not read yet.

        Raises nothing: after three failures in a row there are no more drafts.
        """
        if self._num_failures >= _MAX_FAILURES:
            return [[] for _ in wants]
        try:
            found = self._draft(wants)
        except Exception as error:
            self._num_failures += 1
            ending = ", for the last time" if self._num_failures == _MAX_FAILURES else ""
            fields = {"proposer": "draft_model", "error_type": type(error).__name__}
            log.exception("the draft model %s failed%s", self.loaded.model_id, ending, extra=fields)
            self.rows.clear()
            return [[] for _ in wants]
        self._num_failures = 0
        return found

    def measure(self) -> StepCosts:
        """Measures the model's steps, of up to two blocks of tokens. Before the first draft only."""
        pool = self.rows.pool
        num_rows = min(2, self._max_rows)
        return measure_runner(self.runner, max_rows=num_rows, num_blocks=pool.num_blocks, block_size=pool.block_size)

    def num_behind(self, sequence_id: str, num_known: int) -> int:
        """Tokens of a prompt to be read before the sequence's first draft: all known ones of a new sequence, though the
        prefix cache may have some of them."""
        seq = self.rows.get(sequence_id)
        if seq is None:
            return num_known
        return seq.num_missing if seq.num_missing > _CATCH_UP_TOKENS else 0

    def has_refused(self, sequence_id: str) -> bool:
        """No draft will come for it."""
        return self.rows.has_refused(sequence_id)

    def forget(self, sequence_id: str) -> None:
        self.rows.forget(sequence_id)

    def close(self) -> None:
        self.rows.clear()
        self.runner.close()

    # --- one ask ------------------------------------------------------------------------------------------------------

    def _draft(self, wants: Sequence[Wanted]) -> list[list[int]]:
        runs = self._seat(wants)
        self.runner.mirror.rewrite(self.rows.take_rewrites())
        self._step(self._catch_up(list(runs.values())))
        while going := [run for run in runs.values() if run.goes_on]:
            self._step([(run, 1) for run in going])
        return [runs[want.sequence_id].drafted if want.sequence_id in runs else [] for want in wants]

    def _seat(self, wants: Sequence[Wanted]) -> dict[str, _Run]:
        self.rows.begin(want.sequence_id for want in wants)
        runs: dict[str, _Run] = {}
        for want in wants:
            seq = self.rows.seat(want) if want.num_tokens > 0 else None
            if seq is not None:
                # The last token drawn is no input: it needs neither a block nor a place in the context.
                num_positions = min(self._max_len, len(seq.block_ids) * self.rows.pool.block_size)
                max_tokens = min(want.num_tokens, num_positions - len(want.token_ids) + 1)
                runs[want.sequence_id] = _Run(seq, want, max_tokens)
        return runs

    def _catch_up(self, runs: Sequence[_Run]) -> list[tuple[_Run, int]]:
        """The known tokens that each sequence runs now: all of them, or of a new prompt what the budget has left."""
        num_left = self._max_prompt_tokens
        pieces: list[tuple[_Run, int]] = []
        for run in runs:
            num_tokens = run.seq.num_missing
            if num_tokens > _CATCH_UP_TOKENS:
                num_tokens = min(num_tokens, num_left)
                num_left -= num_tokens
            if num_tokens:
                pieces.append((run, num_tokens))
        return pieces

    def _step(self, pieces: Sequence[tuple[_Run, int]]) -> None:
        """Runs so many tokens of each sequence, and draws a token for those that have none left."""
        if not pieces:
            return
        rows = self.rows
        entered = [entry for run, _ in pieces if (entry := rows.take_entry(run.seq)) is not None]
        spans = tuple(self._span(run.seq, num_tokens) for run, num_tokens in pieces)
        plan = StepPlan(self._num_steps, spans, tuple(entered), rows.take_released())
        self._num_steps += 1
        results = execute_isolated(self.runner.execute, plan).spans
        for run, num_tokens in pieces:
            self._take(run, num_tokens, results[run.seq.sequence_id])

    def _span(self, seq: DraftedSequence, num_tokens: int) -> Span:
        end = seq.num_computed + num_tokens
        return Span(
            sequence_id=seq.sequence_id,
            row=seq.row,
            start=seq.num_computed,
            num_tokens=num_tokens,
            num_samples=1 if end == len(seq.tokens) else 0,
            new_block_ids=self.rows.take_blocks(seq),
        )

    def _take(self, run: _Run, num_tokens: int, result: SpanResult) -> None:
        seq = run.seq
        if result.error is not None:
            log.warning("no more drafts for %s: %s", seq.sequence_id, result.error)
            run.is_over = True
            self.rows.refuse(seq.sequence_id)
            return
        seq.num_computed += num_tokens
        self.rows.publish(seq, run.want.num_settled)
        if result.token_ids:
            token_id = result.token_ids[0]
            seq.tokens.append(token_id)
            run.drafted.append(token_id)
            run.is_over = token_id in run.want.stop_ids
