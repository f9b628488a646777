"""The next step of running sequences: decodes first, then pieces of prompts.

A sequence gets the blocks of all its known tokens when it enters, so only decoding needs more. When blocks run out, the
sequence that is last in the order is preempted: it waits again and computes its tokens anew, or finds them in the
prefix cache. The first one is never preempted and fits alone (see Scheduler.add), so at least one sequence always
advances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loraplex_contracts.plan import BlockCopy, Draft, NewSequence
from loraplex_server.scheduler.sequence_table import SequenceTable
from loraplex_server.scheduler.states import SequenceState, SequenceStatus


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making: sequences with the number of their tokens to run, and with their drafts."""

    num_left: int  # of the step's token budget
    spans: list[tuple[SequenceState, int, Draft | None]] = field(
        default_factory=list[tuple[SequenceState, int, Draft | None]]
    )
    entered: list[NewSequence] = field(default_factory=list[NewSequence])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])
    num_preempted: int = 0
    is_full: bool = False  # a sequence waits for a row, for blocks or for the budget

    def add(self, seq: SequenceState, num_tokens: int) -> None:
        self.num_left -= num_tokens
        self.spans.append((seq, num_tokens, None))


def plan_running(table: SequenceTable, step: PlanBuilder, drafts: Mapping[str, Draft]) -> None:
    """Puts every running sequence that can go on into `step`, as far as budget and blocks reach."""
    decodes: list[SequenceState] = []
    prefills: list[SequenceState] = []
    for seq in table.running:
        num_tokens = len(seq.token_ids) + seq.num_coming
        # Nothing to plan while its last token, or the verification of its draft, is still to come.
        if seq.is_draft_coming or num_tokens >= seq.max_total_tokens:
            continue
        # One that speculates waits for its token: a draft follows a token that is known.
        if seq.num_coming and seq.sequence_id in drafts:
            continue
        (decodes if num_tokens - seq.num_computed == 1 else prefills).append(seq)
    # In order, so that a sequence is preempted before its own turn.
    going = [seq for seq in decodes if _make_room(table, step, seq)]
    step.num_left -= len(going)
    chosen = _choose_drafts(table, step, going, drafts, has_more_work=bool(prefills) or len(table.waiting) > 0)
    for seq in going:
        step.spans.append((seq, 1, chosen.get(seq.sequence_id)))
    for seq in prefills:
        if seq.status is SequenceStatus.RUNNING and step.num_left > 0:
            step.add(seq, min(step.num_left, seq.num_tokens - seq.num_computed))


def _make_room(table: SequenceTable, step: PlanBuilder, seq: SequenceState) -> bool:
    """Allocates the block of the next token, by preemption if need be. False when `seq` itself was preempted."""
    if seq.status is not SequenceStatus.RUNNING:
        return False
    blocks = table.blocks
    if seq.num_computed < len(seq.block_ids) * blocks.block_size:
        return True
    while blocks.num_free == 0:
        if table.drop_shared_prompt():
            continue
        victim = table.running.last()
        table.preempt(victim)
        step.num_preempted += 1
        if victim is seq:
            return False
    seq.block_ids += blocks.allocate(1)
    return True


def _choose_drafts(
    table: SequenceTable,
    step: PlanBuilder,
    going: Iterable[SequenceState],
    drafts: Mapping[str, Draft],
    *,
    has_more_work: bool,
) -> dict[str, Draft]:
    """As much of each draft as may run: within the budget, the completion's end, and free blocks.

    A draft may be rejected, so it takes clean blocks only. The exception is the sequence's next block, which its own
    tokens will need anyway: for that one, the least recently used block of the prefix cache may be evicted.
    """
    chosen: dict[str, Draft] = {}
    if not drafts:
        return chosen
    budget = step.num_left // 2 if has_more_work else step.num_left  # drafts are a bet, prompts are not
    blocks = table.blocks
    for seq in going:
        draft = drafts.get(seq.sequence_id)
        if draft is None or not draft.token_ids:
            continue
        num_drafted = min(len(draft.token_ids), budget, seq.max_total_tokens - len(seq.token_ids) - 1)
        num_missing = blocks.num_blocks_for(seq.num_computed + 1 + num_drafted) - len(seq.block_ids)
        if num_missing > 0:
            seq.block_ids += blocks.allocate(min(num_missing, max(1, blocks.num_clean), blocks.num_free))
            num_drafted = min(num_drafted, len(seq.block_ids) * blocks.block_size - seq.num_computed - 1)
        if num_drafted > 0:
            chosen[seq.sequence_id] = Draft(draft.token_ids[:num_drafted], draft.proposer)
            budget -= num_drafted
            step.num_left -= num_drafted
    return chosen
