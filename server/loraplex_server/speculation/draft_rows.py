"""Rows and KV blocks of the sequences that a draft model keeps."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from loraplex_contracts.plan import NewSequence, StateUse
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.kv.blocks import BlockPool, KeyChain, Namespace
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.kv.states import NO_STATE


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence's ask for a draft, in the draft model's own tokens."""

    sequence_id: str
    token_ids: Sequence[int]  # all known ones; not kept
    num_tokens: int  # to draft at most
    num_prompt_tokens: int = 0
    # Known tokens that are unchanged since the last ask. None: all that were known then.
    num_same: int | None = None
    # Known tokens that no later ask changes: full blocks of them enter the prefix cache. None: all.
    num_settled: int | None = None
    sampling: SamplingParams = SamplingParams()
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()  # a draft ends with one of these, and has none before `min_tokens`
    tenant: str = ""
    cache_salt: str = ""


@dataclass(slots=True)
class DraftRow:
    """One sequence that the draft model keeps."""

    sequence_id: str
    row: int
    tokens: list[int]  # that its row holds: the known ones, then guesses
    num_known: int  # of them were known on the last ask
    num_computed: int  # of them have K/V
    chain: KeyChain
    block_ids: list[int]
    num_published: int  # blocks at its beginning that are in the prefix cache
    rope_key: int  # see RopeScaling.key
    last_asked: int
    num_sent_blocks: int = 0
    # In models with states: tokens before the state that is kept, before the one behind all that was run, and of the
    # known ones those that no later ask changes, except for the last, which always runs.
    num_kept: int = 0
    num_run: int = 0
    num_certain: int = 0
    entry: NewSequence | None = field(default=None, repr=False)  # without tokens; None once the runner has it

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.num_computed


class DraftRows:
    """The sequences that a draft model keeps, each in a row. Owns the rows, the block pool with its own prefix cache,
    and every reference into it; every method leaves them consistent.

    A row holds the known tokens and the last draft: on each ask it is compared with the sequence, and rewritten from
    the first difference on. Published blocks are never rewritten: a sequence that differs there leaves, and enters
    again, and so does one whose length now asks for other rotations. When room is short the sequence that was asked for
    the longest ago leaves.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_rows: int,
        max_len: int,
        vocab_size: int,
        model_digest: str,
        *,
        has_states: bool,
        rope: RopeScaling | None,
    ) -> None:
        """`has_states`: the model's layers keep states, so there is no prefix cache. `rope`: the model's rotations
        depend on the lengths of texts."""
        self.pool = pool
        self._has_states = has_states
        self._rope = rope
        self.max_len = max_len
        self._vocab_size = vocab_size
        self._model_digest = model_digest
        self._free_rows = list(range(max_rows))  # a heap
        # In order of their last asks, the oldest first.
        self._sequences: dict[str, DraftRow] = {}
        self._refused: set[str] = set()  # sequences that get no draft as long as they live
        self._released: list[int] = []
        self._rewrites: list[tuple[int, int, Sequence[int]]] = []
        self._round = 0

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def get(self, sequence_id: str) -> DraftRow | None:
        return self._sequences.get(sequence_id)

    # --- one ask ------------------------------------------------------------------------------------------------------

    def begin(self, sequence_ids: Iterable[str]) -> None:
        """Begins a round of asks for these sequences: none of them is evicted in it."""
        self._round += 1
        for sequence_id in sequence_ids:
            seq = self._sequences.pop(sequence_id, None)
            if seq is not None:
                seq.last_asked = self._round
                self._sequences[sequence_id] = seq

    def place(self, request: DraftRequest) -> DraftRow | None:
        """The sequence, with the known tokens in its row and blocks for them; None where it does not fit."""
        if request.sequence_id in self._refused:
            return None
        num_known = len(request.token_ids)
        seq = self._sequences.get(request.sequence_id)
        start = _first_difference(seq, request) if seq is not None else 0
        if not self._can_run(request.token_ids, start):
            self.refuse(request.sequence_id)
            return None
        if seq is not None and (
            start < max(seq.num_published * self.pool.block_size, seq.num_kept)
            or seq.rope_key != self._rope_key(request)
        ):
            self.leave(request.sequence_id)
            seq = None
        if seq is None:
            return self._enter(request)
        missing = self._missing_blocks(request, len(seq.block_ids))
        if missing is None:
            self.leave(request.sequence_id)
            return None
        seq.block_ids += self.pool.allocate(missing)
        if start < len(seq.tokens) or start < num_known:
            fresh = request.token_ids[start:]
            del seq.chain.keys[start // self.pool.block_size :]
            seq.tokens[start:] = fresh
            if seq.entry is None:
                self._rewrites.append((seq.row, start, fresh))
        seq.num_known = num_known
        # The last token always runs, because its logits are wanted.
        seq.num_computed = min(seq.num_computed, start, num_known - 1)
        if self._has_states:
            self._go_back(seq, request)
        return seq

    def num_room(self, num_positions: int, num_tokens: int) -> int:
        """Number of tokens that may run behind `num_tokens` in so many positions, and in the same rotations."""
        num_scaled = None if self._rope is None else self._rope.num_room(num_tokens)
        num_left = num_positions - num_tokens
        return num_left if num_scaled is None else min(num_left, num_scaled)

    def _rope_key(self, request: DraftRequest) -> int:
        return 0 if self._rope is None else self._rope.key(request.num_prompt_tokens, len(request.token_ids))

    def _go_back(self, seq: DraftRow, request: DraftRequest) -> None:
        """Takes a sequence back to its kept state where its own state, that behind all tokens that were run, does not
        end with the tokens computed."""
        num_settled = seq.num_known if request.num_settled is None else request.num_settled
        seq.num_certain = min(num_settled, seq.num_known - 1)
        if seq.num_run != seq.num_computed:
            seq.num_computed = seq.num_kept

    def state_use(self, seq: DraftRow, num_tokens: int) -> StateUse | None:
        """The slots of the sequence's next `num_tokens` tokens."""
        if not self._has_states:
            return None
        start, own = seq.num_computed, 1 + 2 * seq.row
        source = own if seq.num_run == start else own + 1
        is_passed = start < seq.num_certain <= start + num_tokens
        return StateUse(source if start else NO_STATE, own, ((seq.num_certain, own + 1),) if is_passed else ())

    def on_run(self, seq: DraftRow, num_tokens: int) -> None:
        """Counts the sequence's next `num_tokens` tokens as computed."""
        if seq.num_computed < seq.num_certain <= seq.num_computed + num_tokens:
            seq.num_kept = seq.num_certain
        seq.num_computed += num_tokens
        seq.num_run = seq.num_computed

    def leave(self, sequence_id: str) -> None:
        """Frees the sequence's row and blocks. Harmless for an unknown one."""
        seq = self._sequences.pop(sequence_id, None)
        if seq is None:
            return
        heapq.heappush(self._free_rows, seq.row)
        if seq.entry is None:
            self._released.append(seq.row)
        self.pool.release(seq.block_ids)

    def refuse(self, sequence_id: str) -> None:
        """Frees the sequence, which gets no draft until it is forgotten."""
        self.leave(sequence_id)
        self._refused.add(sequence_id)

    def has_refused(self, sequence_id: str) -> bool:
        return sequence_id in self._refused

    def forget(self, sequence_id: str) -> None:
        self.leave(sequence_id)
        self._refused.discard(sequence_id)

    def clear(self) -> None:
        """Frees all sequences."""
        for sequence_id in list(self._sequences):
            self.leave(sequence_id)
        self._rewrites.clear()

    # --- for the runner -----------------------------------------------------------------------------------------------

    def take_rewrites(self) -> list[tuple[int, int, Sequence[int]]]:
        """Rows whose tokens have changed, for BatchMirror.rewrite."""
        found, self._rewrites = self._rewrites, []
        return found

    def take_released(self) -> tuple[int, ...]:
        found, self._released = tuple(self._released), []
        return found

    def take_entry(self, seq: DraftRow) -> NewSequence | None:
        """The entry of the sequence for the runner's batch; None when it is in there."""
        entry, seq.entry = seq.entry, None
        return replace(entry, token_ids=tuple(seq.tokens)) if entry is not None else None

    def take_blocks(self, seq: DraftRow) -> tuple[int, ...]:
        """Blocks that the runner has not been told of."""
        fresh = tuple(seq.block_ids[seq.num_sent_blocks :])
        seq.num_sent_blocks = len(seq.block_ids)
        return fresh

    def publish(self, seq: DraftRow, num_settled: int | None) -> None:
        """Puts full blocks of known tokens into the prefix cache, up to `num_settled` of them (None: all)."""
        num_certain = min(seq.num_computed, seq.num_known)
        if num_settled is not None:
            num_certain = min(num_certain, num_settled)
        num_full = 0 if self._has_states else num_certain // self.pool.block_size
        for idx in range(seq.num_published, num_full):
            self.pool.publish(seq.block_ids[idx], seq.chain.key(idx, seq.tokens))
        seq.num_published = max(seq.num_published, num_full)

    def check_integrity(self) -> None:
        """Raises AssertionError when a row or a block is unaccounted for."""
        self.pool.check_integrity(Counter(block for seq in self._sequences.values() for block in seq.block_ids))
        rows = sorted([seq.row for seq in self._sequences.values()] + self._free_rows)
        assert rows == list(range(len(rows))), f"rows leaked: {rows}"

    # --- entering -----------------------------------------------------------------------------------------------------

    def _can_run(self, token_ids: Sequence[int], start: int) -> bool:
        """True if the model has a place for so many tokens, and an embedding for each of those from `start` on."""
        if not 0 < len(token_ids) <= self.max_len:
            return False
        fresh = token_ids[start:]
        return not fresh or (min(fresh) >= 0 and max(fresh) < self._vocab_size)

    def _enter(self, request: DraftRequest) -> DraftRow | None:
        """A new sequence, with the blocks that the prefix cache has of it."""
        size = self.pool.block_size
        if not self._free_rows and not self._evict_one():
            return None
        rope_key = self._rope_key(request)
        namespace = Namespace(self._model_digest, tenant=request.tenant, cache_salt=request.cache_salt, rope=rope_key)
        chain = KeyChain(namespace.digest(), size)
        found: list[int] = []
        for idx in range(0 if self._has_states else (len(request.token_ids) - 1) // size):
            block_id = self.pool.find(chain.key(idx, request.token_ids))
            if block_id is None:
                break
            found.append(block_id)
        self.pool.share(found)
        missing = self._missing_blocks(request, len(found), is_new=True)
        if missing is None:
            self.pool.release(found)
            return None
        tokens, row = list(request.token_ids), heapq.heappop(self._free_rows)
        seq = DraftRow(
            sequence_id=request.sequence_id,
            row=row,
            tokens=tokens,
            num_known=len(tokens),
            num_computed=len(found) * size,
            chain=chain,
            block_ids=found + self.pool.allocate(missing),
            num_published=len(found),
            rope_key=rope_key,
            last_asked=self._round,
            entry=NewSequence(
                sequence_id=request.sequence_id,
                row=row,
                token_ids=(),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                output=OutputParams(),
                min_tokens=request.min_tokens,
                banned_until_min=request.stop_ids if request.min_tokens else frozenset(),
            ),
        )
        self._sequences[request.sequence_id] = seq
        if self._has_states:
            self._go_back(seq, request)
        return seq

    def _missing_blocks(self, request: DraftRequest, num_held: int, *, is_new: bool = False) -> int | None:
        """The blocks to take for the whole draft, or else for the known tokens; None when these do not fit."""
        # The last token of a draft is never an input.
        whole = min(len(request.token_ids) + max(0, request.num_tokens - 1), self.max_len)
        for num_positions in dict.fromkeys((whole, len(request.token_ids))):
            missing = max(0, self.pool.num_blocks_for(num_positions) - num_held)
            if self._make_room(missing, is_new=is_new):
                return missing
        return None

    def _make_room(self, num_blocks: int, *, is_new: bool) -> bool:
        """True if so many blocks are free, after evicting sequences that were not asked for in this round."""
        idle = [seq for seq in self._sequences.values() if seq.last_asked < self._round]
        # A new sequence leaves the others a block each to grow into, or they would evict each other in turns.
        num_wanted = num_blocks + (len(self._sequences) - len(idle) if is_new else 0)
        if self.pool.num_free + sum(len(seq.block_ids) for seq in idle) < num_wanted:
            return False
        while self.pool.num_free < num_wanted:
            if not self._evict_one():
                return False
        return True

    def _evict_one(self) -> bool:
        oldest = next(iter(self._sequences.values()), None)
        if oldest is None or oldest.last_asked >= self._round:
            return False
        self.leave(oldest.sequence_id)
        return True


def _first_difference(seq: DraftRow, request: DraftRequest) -> int:
    """Number of tokens in the sequence's row that still agree with the known ones."""
    known, held = request.token_ids, seq.tokens
    num_same = seq.num_known if request.num_same is None else request.num_same
    end = min(len(known), len(held))
    start = min(num_same, end)
    while start < end and known[start] == held[start]:
        start += 1
    return start
