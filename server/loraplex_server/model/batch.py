"""Running batch: tokens and block tables by row, and the inputs of a step.

Owns the token mirror (on the device) and the block tables (on the host). Staging a step changes nothing that another
attempt at the same step would see: blocks count as attached, and tokens as known, only after `commit`. What a step
draws goes from the device into the mirror (`keep_drawn`), so that the next step can be staged before the host knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex_contracts.plan import NewSequence, Span
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.layers.attention import AttentionBatch
from loraplex_server.layers.lora import Segment
from loraplex_server.layers.step import Ints, PooledSpan, Row, StagedStep
from loraplex_server.layers.transfer import upload


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's inputs on the device, as long as they have to be."""

    input_ids: Tensor  # [1, num_tokens]
    position_ids: Tensor  # [1, num_tokens]
    head_rows: Tensor  # [num_head_rows]
    attention: AttentionBatch


class BatchMirror:
    """Rows of the running batch. Owned by the runner."""

    def __init__(
        self, max_rows: int, max_len: int, block_size: int, device: torch.device, rope: RopeScaling | None = None
    ) -> None:
        self.rope = rope
        self.max_rows = max_rows
        self.max_len = max_len
        self.block_size = block_size
        self.device = device
        self.tokens = torch.zeros(max_rows, max_len, dtype=torch.int64, device=device)
        # The same memory as a numpy array on a CPU: writing a handful of tokens costs less than a tensor operation.
        self._on_host: Ints | None = self.tokens.view(-1).numpy() if device.type == "cpu" else None
        self._block_tables: Ints = np.zeros((max_rows, -(-max_len // block_size)), dtype=np.int64)
        self._rows: list[Row | None] = [None] * max_rows
        self._pooling_rows: set[int] = set()

    def release(self, row: int) -> None:
        """Empties a row. Harmless to repeat."""
        self._rows[row] = None
        self._pooling_rows.discard(row)

    def enter(self, sequence: NewSequence) -> None:
        """Enters a sequence without blocks; it may re-enter after a preemption. Harmless to repeat."""
        num_tokens = len(sequence.token_ids)
        if num_tokens > self.max_len:
            raise ValueError(f"{num_tokens} tokens do not fit a row of {self.max_len}")
        ids = torch.tensor(sequence.token_ids, dtype=torch.int64)
        self.tokens[sequence.row, :num_tokens] = upload(ids, self.device)
        self._rows[sequence.row] = Row(sequence, num_tokens, 0)
        if sequence.pooling is not None:
            self._pooling_rows.add(sequence.row)

    def row(self, span: Span) -> Row:
        """The row of a span. Raises ValueError when another sequence, or none, is there."""
        found = self._rows[span.row]
        if found is None or found.sequence.sequence_id != span.sequence_id:
            raise ValueError(f"row {span.row} does not hold sequence {span.sequence_id}")
        return found

    def block_ids(self, row: int) -> list[int]:
        """The blocks of a row, for tests and checks."""
        found = self._rows[row]
        return self._block_tables[row, : found.num_blocks].tolist() if found else []

    # --- staging ------------------------------------------------------------------------------------------------------

    def stage(self, spans: Sequence[Span]) -> StagedStep:
        """Lays out a step of one or more spans, all of which `check` has passed."""
        spans = sorted(spans, key=self._order)
        fresh = tuple(block for span in spans for block in self._attach(span))
        self._write_drafts(spans)
        rows = np.array([span.row for span in spans], dtype=np.int64)
        starts = np.array([span.start for span in spans], dtype=np.int64)
        lens = np.array([span.num_tokens for span in spans], dtype=np.int64)
        first = np.cumsum(lens) - lens  # [num_spans] first token of each span in the row
        positions = np.repeat(starts - first, lens) + np.arange(int(lens.sum()))
        token_rows = np.repeat(rows, lens)
        blocks = self._block_tables[token_rows, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        max_blocks = int((starts + lens - 1).max()) // self.block_size + 1
        head_starts, num_prompt_rows, num_head_rows, head_rows = self._head(spans, first)
        pooled, pooled_rows = self._pooled(spans, first, len(head_rows)) if self._pooling_rows else ((), [])
        if pooled:
            head_rows = np.concatenate([head_rows, *pooled_rows])
        return StagedStep(
            spans=tuple(spans),
            rows=tuple(self.row(span) for span in spans),
            tokens=np.stack([token_rows * self.max_len + positions, positions, slots]),
            query_lens=lens,
            context_lens=starts + lens,
            block_tables=self._block_tables[rows, :max_blocks],
            block_size=self.block_size,
            token_segments=self._segments(spans, [(span.num_tokens, span.num_tokens) for span in spans]),
            head_rows=head_rows,
            head_segments=self._segments(spans, list(zip(num_head_rows, num_prompt_rows, strict=True))),
            head_starts=tuple(head_starts),
            num_prompt_rows=tuple(num_prompt_rows),
            fresh_blocks=fresh,
            pooled=pooled,
            rope_lengths=self._rope_lengths(spans, positions, lens),
        )

    def inputs(self, staged: StagedStep) -> StepInputs:
        """The step on the device: one transfer for everything that is as long as the row."""
        packed = upload(torch.from_numpy(staged.tokens), self.device)
        return StepInputs(
            input_ids=self.tokens.view(-1).index_select(0, packed[0]).unsqueeze(0),
            position_ids=packed[1].unsqueeze(0),
            head_rows=upload(torch.from_numpy(staged.head_rows), self.device),
            attention=staged.attention(packed[2]),
        )

    def _rope_lengths(self, spans: Sequence[Span], positions: Ints, lens: Ints) -> Ints | None:
        rope = self.rope
        if rope is None:
            return None
        entered = [self.row(span).sequence for span in spans]
        num_first = [rope.num_first(one.num_prompt_tokens, len(one.token_ids)) for one in entered]
        # A text's first tokens are scaled by its length then, each that follows by what there is with it.
        firsts = np.repeat(np.array(num_first, dtype=np.int64), lens)
        return np.where(positions < firsts, firsts, positions + 1)

    def _order(self, span: Span) -> tuple[int, tuple[tuple[int, float], ...]]:
        """Sort key of spans: those of one length lie together (attention computes them at once), in them those of one
        adapter."""
        adapters = self.row(span).sequence.adapters
        return (span.num_tokens, tuple((use.adapter_slot, use.weight) for use in adapters))

    def check(self, span: Span) -> None:
        """Raises ValueError on a span that its row cannot satisfy."""
        row = self.row(span)
        end = span.start + span.num_tokens
        num_blocks = row.num_blocks + len(span.new_block_ids)
        if end - len(span.draft) > row.num_known or end > self.max_len or span.num_tokens < 1:
            raise ValueError(f"a span to {end} of {span.sequence_id}, of which {row.num_known} tokens are known")
        if num_blocks * self.block_size < end or num_blocks > self._block_tables.shape[1]:
            raise ValueError(f"{num_blocks} blocks for {end} tokens of {span.sequence_id}")
        if span.num_samples not in (0, 1 + len(span.draft)):
            raise ValueError(f"{span.num_samples} samples with a draft of {len(span.draft)}")

    def _attach(self, span: Span) -> Iterator[int]:
        """Writes the span's new blocks into its table, where a failed step leaves no trace; yields the empty ones."""
        row = self.row(span)
        num_blocks = row.num_blocks + len(span.new_block_ids)
        self._block_tables[span.row, row.num_blocks : num_blocks] = span.new_block_ids
        for idx, block_id in enumerate(span.new_block_ids, start=row.num_blocks):
            # Blocks before the span's start came with content: from the prefix cache, or copied from a sibling.
            if idx * self.block_size >= span.start:
                yield block_id

    def _write_drafts(self, spans: Sequence[Span]) -> None:
        """Writes drafts behind the known tokens, where sampling (penalties) and verification read them."""
        places: list[int] = []
        values: list[int] = []
        for span in spans:
            place = span.row * self.max_len + span.start + span.num_tokens - len(span.draft)
            places += range(place, place + len(span.draft))
            values += span.draft
        self._put(places, values)

    def _segments(self, spans: Sequence[Span], num_rows: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
        """Adapter segments over rows laid out span by span; neighbours with the same single adapter become one.
        `num_rows`: of each span, and how many of them are its first tokens."""
        segments: list[Segment] = []
        start, may_grow = 0, False
        for span, (count, num_first) in zip(spans, num_rows, strict=True):
            if not count:
                continue
            sequence = self.row(span).sequence
            end, uses = start + count, sequence.adapters
            if sequence.adapted_from > span.start and uses:
                num_before = min(sequence.adapted_from - span.start, num_first)
                start, may_grow = start + num_before, may_grow and not num_before
            if start == end:
                continue
            for use in uses:
                last = segments[-1] if may_grow and len(uses) == 1 else None
                if last is not None and (last.adapter_slot, last.weight) == (use.adapter_slot, use.weight):
                    segments[-1] = Segment(last.start, end, use.adapter_slot, use.weight)
                else:
                    segments.append(Segment(start, end, use.adapter_slot, use.weight))
            start, may_grow = end, len(uses) == 1
        return tuple(segments)

    def _head(self, spans: Sequence[Span], first: Ints) -> tuple[list[int], list[int], list[int], Ints]:
        """The tokens that reach the head: by span the first one's place, how many are of the prompt, and how many in
        all; and their rows [num_head_rows]."""
        starts: list[int] = []
        num_prompt_rows: list[int] = []
        num_rows: list[int] = []
        rows: list[int] = []
        total = 0
        for span, begin in zip(spans, first.tolist(), strict=True):
            num_prompt = 0
            if span.prompt_logprobs:
                # Of position p the logits tell about the prompt's token p + 1.
                num_prompt = max(0, min(span.num_tokens, self.row(span).sequence.num_prompt_tokens - 1 - span.start))
            starts.append(total)
            num_prompt_rows.append(num_prompt)
            num_last = span.num_samples
            if span.ends_pooling and _wants_logits(self.row(span)):
                num_last = 1
            num_rows.append(num_prompt + num_last)
            end = begin + span.num_tokens
            rows += range(begin, begin + num_prompt)
            rows += range(end - num_last, end)
            total += num_prompt + num_last
        return starts, num_prompt_rows, num_rows, np.array(rows, dtype=np.int64)

    def _pooled(
        self, spans: Sequence[Span], first: Ints, num_logit_rows: int
    ) -> tuple[tuple[PooledSpan, ...], list[Ints]]:
        """The tokens whose hidden states are pooled, as rows of the head behind those with logits."""
        found: list[PooledSpan] = []
        pieces: list[Ints] = []
        start = num_logit_rows
        for idx, span in enumerate(spans):
            pooling = self.row(span).sequence.pooling
            if pooling is None or pooling.task == "next_token" or not (pooling.needs_all or span.ends_pooling):
                continue
            end = int(first[idx]) + span.num_tokens
            num_rows = span.num_tokens if pooling.needs_all else 1
            found.append(PooledSpan(idx, start, num_rows))
            pieces.append(np.arange(end - num_rows, end, dtype=np.int64))
            start += num_rows
        return tuple(found), pieces

    # --- after a step -------------------------------------------------------------------------------------------------

    def keep_drawn(self, rows: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> None:
        """Writes drawn tokens at these positions. They count as known after `commit` or `settle` only: tokens behind a
        rejected draft token are garbage until they are overwritten."""
        if max(positions) >= self.max_len:  # the token that fills the context is never an input
            kept = [i for i, position in enumerate(positions) if position < self.max_len]
            if not kept:
                return
            rows, positions = [rows[i] for i in kept], [positions[i] for i in kept]
            token_ids = token_ids.index_select(0, upload(torch.tensor(kept), self.device))
        places = [row * self.max_len + position for row, position in zip(rows, positions, strict=True)]
        if self._on_host is not None:
            self._on_host[places] = token_ids.numpy()
        else:
            at = upload(torch.tensor(places, dtype=torch.int64), self.device)
            self.tokens.view(-1).index_copy_(0, at, token_ids)

    def commit(self, staged: StagedStep) -> None:
        """Makes the step count: its blocks are attached, and where no draft was checked the drawn token is known."""
        for row, span in zip(staged.rows, staged.spans, strict=True):
            row.num_blocks += len(span.new_block_ids)
            if span.num_samples and not span.draft:
                row.num_known = min(span.start + span.num_tokens + 1, self.max_len)

    def settle(self, row: Row, span: Span, num_tokens: int) -> None:
        """Accepts `num_tokens` of the tokens that were drawn for a span with a draft."""
        if num_tokens:
            row.num_known = min(span.start + span.num_tokens - len(span.draft) + num_tokens, self.max_len)

    def rewrite(self, changes: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Replaces a row's tokens from a position on: (row, start, token ids) each. Between steps.

        For draft models, whose own guesses give way to the target's tokens. K/V before `start` stays valid.
        """
        places: list[int] = []
        values: list[int] = []
        for row_idx, start, token_ids in changes:
            row = self._rows[row_idx]
            end = start + len(token_ids)
            if row is None or start > row.num_known or end > self.max_len:
                raise ValueError(f"row {row_idx} cannot be rewritten from {start} to {end}")
            places += range(row_idx * self.max_len + start, row_idx * self.max_len + end)
            values += token_ids
            row.num_known = end
        self._put(places, values)

    def _put(self, places: Sequence[int], values: Sequence[int]) -> None:
        if places and self._on_host is not None:
            self._on_host[places] = values
        elif places:
            packed = upload(torch.tensor([places, values], dtype=torch.int64), self.device)
            self.tokens.view(-1).index_copy_(0, packed[0], packed[1])


def _wants_logits(row: Row) -> bool:
    pooling = row.sequence.pooling
    return pooling is not None and pooling.task == "next_token"
