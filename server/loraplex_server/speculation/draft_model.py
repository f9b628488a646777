"""Draft model proposer, and the runner of its model.

The first step of a call brings every sequence up to date (tokens that came since, or a chunk of a new prompt) and draws
its first token; each further step draws one more for the sequences that want one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from loraplex_contracts.errors import OutOfMemory
from loraplex_contracts.plan import Candidate, Span, SpanResult, StepPlan
from loraplex_server.backends.reference import ReferenceOps
from loraplex_server.backends.registry import make_attention
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.layers.attention import KvCache, num_blocks_for
from loraplex_server.model.isolation import execute_isolated
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.memory import state_slot_bytes
from loraplex_server.model.runner import ModelRunner
from loraplex_server.sampling.sampler import Sampler
from loraplex_server.speculation.draft_rows import DraftRequest, DraftRow, DraftRows
from loraplex_server.speculation.proposer import DRAFT_MODEL, Ask, Proposer
from loraplex_server.speculation.step_costs import StepCosts, measure_runner

log = logging.getLogger(__name__)

# A sequence that lacks no more tokens is brought up to date at once; more are a prompt, and run within its budget.
_CATCH_UP_TOKENS = 32
_MAX_FAILURES = 3
# Share of the draft model's memory for the states of models that keep some.
MAX_STATE_SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Limits of what a draft model keeps."""

    max_rows: int
    kv_bytes: int
    block_size: int = 16
    max_prompt_tokens: int = 512  # of new prompts, in one ask
    max_len: int | None = None  # tokens of one sequence; None: the model's own limit


@dataclass(slots=True)
class _Run:
    """One sequence in one ask."""

    seq: DraftRow
    request: DraftRequest
    max_tokens: int  # that can be drafted
    drafted: list[int] = field(default_factory=list[int])
    is_over: bool = False

    @property
    def goes_on(self) -> bool:
        """True if the row is up to date and another token is wanted."""
        return not self.is_over and 0 < len(self.drafted) < self.max_tokens


class Drafter:
    """One draft model with all that it needs to run.

    A model whose layers keep states has two slots for each row: the state behind all that was run, and the one behind
    tokens that are known for good, from which a sequence goes on where its guesses were wrong; and a spare place.
    """

    def __init__(self, loaded: LoadedModel, memory: DraftMemory, *, model_digest: str = "") -> None:
        """Raises OutOfMemory when the KV cache would hold less than three blocks. `model_digest`: of the weights,
        adapter included."""
        spec = loaded.spec
        max_rows, row_bytes = memory.max_rows, 3 * state_slot_bytes(loaded)
        if row_bytes:
            max_rows = min(max_rows, int(memory.kv_bytes * MAX_STATE_SHARE) // row_bytes)
        if max_rows < 1:
            raise OutOfMemory(
                f"{memory.kv_bytes / 2**20:.0f} MiB for {loaded.model_id} do not hold the states of one sequence, "
                f"{row_bytes / 2**20:.1f} MiB; give more with --draft-kv-memory"
            )
        kv_bytes = memory.kv_bytes - max_rows * row_bytes
        num_blocks = num_blocks_for(spec, memory.block_size, loaded.dtype, kv_bytes)
        if num_blocks < 3:
            raise OutOfMemory(
                f"{memory.kv_bytes / 2**20:.0f} MiB of KV cache for {loaded.model_id} hold less than three blocks; "
                "give more with --draft-kv-memory"
            )
        # As many blocks as all rows can fill at most; block 0 is for padding.
        max_len = min(
            memory.max_len or spec.max_context_tokens, spec.max_context_tokens, (num_blocks - 1) * memory.block_size
        )
        num_blocks = min(num_blocks, max_rows * -(-max_len // memory.block_size) + 1)
        cache = KvCache(spec, num_blocks, memory.block_size, loaded.dtype, loaded.device)
        self.loaded = loaded
        self.runner = ModelRunner(
            loaded,
            cache,
            make_attention("auto", loaded.backend, spec.layers, loaded.dtype),
            loaded.adapter_slots(ReferenceOps(), 1),  # always empty
            Sampler(
                max_rows,
                spec.num_logits,
                loaded.device,
                argmax=loaded.backend.argmax(),
                noisy_argmax=loaded.backend.noisy_argmax(),
                draw=loaded.backend.draw(),
            ),
            max_rows=max_rows,
            max_len=max_len,
            states=loaded.state_memory(2 * max_rows, max_rows),
        )
        pool = BlockPool(num_blocks, memory.block_size)
        self.rows = DraftRows(
            pool,
            max_rows,
            max_len,
            spec.vocab_size,
            f"draft {model_digest}",
            has_states=bool(loaded.states),
            rope=spec.rope,
        )
        self._max_rows = max_rows
        self._max_prompt_tokens = memory.max_prompt_tokens
        self._num_steps = 0
        self._num_failures = 0  # in a row

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """A draft for each, in order; empty where the sequence does not fit or its prompt is not read yet.

        Raises nothing: after three failures in a row there are no more drafts.
        """
        if self._num_failures >= _MAX_FAILURES:
            return [[] for _ in requests]
        try:
            found = self._draft(requests)
        except Exception as error:
            self._num_failures += 1
            ending = ", for the last time" if self._num_failures == _MAX_FAILURES else ""
            fields = {"proposer": "draft_model", "error_type": type(error).__name__}
            log.exception("the draft model %s failed%s", self.loaded.model_id, ending, extra=fields)
            self.rows.clear()
            return [[] for _ in requests]
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

    def close(self) -> None:
        self.rows.clear()

    # --- one ask ------------------------------------------------------------------------------------------------------

    def _draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        runs = self._place(requests)
        self.runner.mirror.rewrite(self.rows.take_rewrites())
        self._step(self._catch_up(list(runs.values())))
        while going := [run for run in runs.values() if run.goes_on]:
            self._step([(run, 1) for run in going])
        return [runs[request.sequence_id].drafted if request.sequence_id in runs else [] for request in requests]

    def _place(self, requests: Sequence[DraftRequest]) -> dict[str, _Run]:
        self.rows.begin(request.sequence_id for request in requests)
        runs: dict[str, _Run] = {}
        for request in requests:
            seq = self.rows.place(request) if request.num_tokens > 0 else None
            if seq is not None:
                # The last token drawn is no input: it needs neither a block nor a place in the context.
                num_positions = min(self.rows.max_len, len(seq.block_ids) * self.rows.pool.block_size)
                num_room = self.rows.num_room(num_positions, len(request.token_ids))
                max_tokens = min(request.num_tokens, num_room + 1)
                runs[request.sequence_id] = _Run(seq, request, max_tokens)
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
        entered = [entry for run, _ in pieces if (entry := self.rows.take_entry(run.seq)) is not None]
        spans: list[Span] = []
        for run, num_tokens in pieces:
            seq = run.seq
            num_samples = 1 if seq.num_computed + num_tokens == len(seq.tokens) else 0
            blocks, state = self.rows.take_blocks(seq), self.rows.state_use(seq, num_tokens)
            spans.append(Span(seq.sequence_id, seq.row, seq.num_computed, num_tokens, num_samples, blocks, state=state))
        plan = StepPlan(self._num_steps, tuple(spans), tuple(entered), self.rows.take_released())
        self._num_steps += 1
        results = execute_isolated(self.runner.execute, plan).spans
        for run, num_tokens in pieces:
            self._take(run, num_tokens, results[run.seq.sequence_id])

    def _take(self, run: _Run, num_tokens: int, result: SpanResult) -> None:
        seq = run.seq
        if result.error is not None:
            log.warning("no more drafts for %s: %s", seq.sequence_id, result.error)
            run.is_over = True
            self.rows.refuse(seq.sequence_id)
            return
        self.rows.on_run(seq, num_tokens)
        self.rows.publish(seq, run.request.num_settled)
        if result.token_ids:
            token_id = result.token_ids[0]
            seq.tokens.append(token_id)
            run.drafted.append(token_id)
            run.is_over = token_id in run.request.stop_ids


class DraftModelProposer(Proposer):
    """Drafts by a draft model of the target's token ids. Owns the drafter."""

    name = DRAFT_MODEL

    def __init__(self, drafter: Drafter, *, num_target_ids: int, eos_token_ids: Collection[int]) -> None:
        """`num_target_ids`: token ids below it are the target's. `eos_token_ids`: the target's."""
        self.drafter = drafter
        self._num_target_ids = num_target_ids
        self._eos_token_ids = frozenset(eos_token_ids)

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        drafts = self.drafter.draft([self._request(ask) for ask in asks])
        return [self._within_vocabulary(draft) for draft in drafts]

    def num_behind(self, candidate: Candidate) -> int:
        return self.drafter.num_behind(candidate.sequence_id, len(candidate.token_ids))

    def suspend(self, sequence_id: str) -> None:
        self.end(sequence_id)

    def end(self, sequence_id: str) -> None:
        self.drafter.rows.forget(sequence_id)

    def close(self) -> None:
        self.drafter.close()

    def _request(self, ask: Ask) -> DraftRequest:
        candidate, request = ask.candidate, ask.candidate.request
        return DraftRequest(
            sequence_id=candidate.sequence_id,
            token_ids=candidate.token_ids,
            num_tokens=num_tokens_of(ask),
            num_prompt_tokens=candidate.num_prompt_tokens,
            sampling=candidate.sampling,
            min_tokens=request.stopping.min_tokens,
            stop_ids=request.stopping.ending_ids(self._eos_token_ids),
            tenant=request.tenant,
            cache_salt=request.cache_salt,
        )

    def _within_vocabulary(self, draft: Sequence[int]) -> tuple[int, ...]:
        """The draft up to a token that the target does not have: models of one tokenizer may be padded to different
        sizes."""
        for idx, token_id in enumerate(draft):
            if token_id >= self._num_target_ids:
                return tuple(draft[:idx])
        return tuple(draft)


def num_tokens_of(ask: Ask) -> int:
    return min(ask.num_tokens, ask.candidate.num_room)
