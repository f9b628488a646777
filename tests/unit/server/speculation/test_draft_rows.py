"""A draft model's rows, with a runner that remembers what they hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
from support.scheduler_harness import num_cached_blocks
from support.zoo import VOCAB_SIZE, random_model

from loraplex_contracts.plan import NewSequence, Span, SpanResult, StepPlan, StepResult
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import adopt_model
from loraplex_server.speculation.draft_model import Drafter, DraftMemory
from loraplex_server.speculation.draft_rows import DraftRequest

BLOCK = 4
# Two layers, K and V, of 2 heads of 8 float64 values.
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 8 * 8
NUM_IDS = 5  # few, so that texts begin alike and drafts come true by chance


def says(tokens: Sequence[int]) -> int:
    """The token that the draft model says behind these tokens."""
    return (sum(tokens[-3:]) * 7 + len(tokens)) % NUM_IDS


@dataclass
class Row:
    sequence_id: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list[int])


@dataclass
class RememberingRunner:
    """Stands in for runner and mirror. It knows for each slot the tokens up to its own, which K/V depends on."""

    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    num_run: int = 0

    @property
    def mirror(self) -> RememberingRunner:
        return self

    def rewrite(self, changes: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        for row_idx, start, token_ids in changes:
            tokens = self.rows[row_idx].tokens
            assert start <= len(tokens)
            tokens[start:] = token_ids

    def execute(self, plan: StepPlan) -> RememberingRunner:
        for row_idx in plan.released:
            del self.rows[row_idx]
        for entry in plan.entered:
            self._enter(entry)
        self._results = {span.sequence_id: self._run(span) for span in plan.spans}
        return self

    def result(self) -> StepResult:
        return StepResult(0, self._results)

    def close(self) -> None:
        pass

    def _enter(self, entry: NewSequence) -> None:
        assert entry.row not in self.rows
        self.rows[entry.row] = Row(entry.sequence_id, list(entry.token_ids))

    def _run(self, span: Span) -> SpanResult:
        row = self.rows[span.row]
        assert row.sequence_id == span.sequence_id
        row.blocks += span.new_block_ids
        end = span.start + span.num_tokens
        assert end <= len(row.tokens)
        for position in range(end):
            slot = row.blocks[position // BLOCK] * BLOCK + position % BLOCK
            computed_for = tuple(row.tokens[: position + 1])
            if position < span.start:
                assert self.slots[slot] == computed_for, f"{span.sequence_id} reads K/V of other tokens at {position}"
            else:
                self.slots[slot] = computed_for
        self.num_run += span.num_tokens
        if not span.num_samples:
            return SpanResult()
        assert end == len(row.tokens)
        row.tokens.append(says(row.tokens))
        return SpanResult((row.tokens[-1],))


@cache
def loaded() -> LoadedModel:
    return adopt_model(random_model("llama"), verify=False)


def make_small(num_blocks: int, max_rows: int, max_prompt_tokens: int = 512) -> tuple[Drafter, RememberingRunner]:
    memory = DraftMemory(max_rows, num_blocks * BLOCK_BYTES, BLOCK, max_prompt_tokens=max_prompt_tokens)
    drafter = Drafter(loaded(), memory)
    runner = RememberingRunner()
    drafter.runner = runner  # type: ignore[assignment]
    return drafter, runner


@dataclass
class Text:
    tokens: list[int]
    num_same: int = 0
    num_settled: int = 0

    def grow(self, dice: random.Random) -> None:
        """A part of the draft comes true, or something else; as with another tokenizer, the end may change."""
        if dice.random() < 0.3 and len(self.tokens) > self.num_settled:
            place = dice.randint(self.num_settled, len(self.tokens))
            self.num_same = min(self.num_same, place)
            del self.tokens[place:]
        for _ in range(dice.choice([0, 1, 1, 2, 4, 7])):
            is_as_said = self.tokens and dice.random() < 0.6
            self.tokens.append(says(self.tokens) if is_as_said else dice.randrange(NUM_IDS))
        if not self.tokens:
            self.tokens.append(1)
        self.num_settled = max(self.num_settled, len(self.tokens) - dice.randint(2, 8))


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic(seed: int) -> None:
    dice = random.Random(seed)
    num_blocks, max_rows = dice.choice([(9, 3), (25, 4), (60, 6)])
    drafter, _runner = make_small(num_blocks, max_rows, dice.choice([40, 512]))
    texts: dict[str, Text] = {}
    num_drafted = 0
    for turn in range(250):
        if len(texts) < 7 and dice.random() < 0.4:
            texts[f"s{turn}"] = Text([dice.randrange(NUM_IDS) for _ in range(dice.choice([1, 4, 9, 40]))])
        chosen = [name for name in texts if dice.random() < 0.7]
        requests: list[DraftRequest] = []
        for name in chosen:
            text = texts[name]
            text.grow(dice)
            requests.append(
                DraftRequest(
                    name,
                    text.tokens,
                    dice.randint(1, 5),
                    num_same=text.num_same,
                    num_settled=text.num_settled,
                    cache_salt="s" if name.endswith("3") else "",
                )
            )
            text.num_same = len(text.tokens)
        drafts = drafter.draft(requests)
        drafter.rows.check_integrity()
        for request, draft in zip(requests, drafts, strict=True):
            expected = list(request.token_ids)
            for token_id in draft:
                assert token_id == says(expected)
                expected.append(token_id)
            assert len(draft) <= request.num_tokens
            num_drafted += len(draft)
        for name in [name for name in texts if dice.random() < 0.03 or len(texts[name].tokens) > 100]:
            del texts[name]
            drafter.rows.forget(name)
    assert drafter._num_failures == 0
    assert num_drafted > 200
    for name in texts:
        drafter.rows.forget(name)
    drafter.rows.check_integrity()
    assert drafter.rows.num_sequences == 0


def test_an_end_that_changes_is_not_found_by_others() -> None:
    """Blocks behind what has settled stay out of the prefix cache; those before it are in."""
    drafter, runner = make_small(60, 4)
    tokens = [1, 2, 3, 4] * 5
    drafter.draft([DraftRequest("a", tokens, 1, num_settled=9)])
    assert num_cached_blocks(drafter.rows.pool) == 2
    changed = [*tokens[:10], 0, 0, 0, 0, 0, 0, 0]
    drafter.draft([DraftRequest("a", changed, 1, num_same=10, num_settled=13)])
    assert runner.num_run == 20 + 7
    drafter.draft([DraftRequest("b", changed, 1, num_settled=0)])
    assert runner.num_run == 20 + 7 + 5


def test_blocks_are_found_by_what_they_hold_in_the_end() -> None:
    """Blocks are found by their content, not by what stood there when the prefix cache was asked for it."""
    drafter, _runner = make_small(60, 4)
    tokens = [1, 2, 3, 4] * 3
    drafter.draft([DraftRequest("a", tokens, 1, num_settled=2)])
    changed = [*tokens[:2], *[0] * 11]
    drafter.draft([DraftRequest("a", changed, 1, num_same=2)])
    assert drafter.draft([DraftRequest("b", tokens, 1)]) == [[says(tokens)]]
    assert drafter.draft([DraftRequest("c", changed, 1)]) == [[says(changed)]]


def test_guesses_are_not_found() -> None:
    drafter, runner = make_small(60, 4)
    tokens = [1, 2, 3, 4, 1, 2]
    (guesses,) = drafter.draft([DraftRequest("a", tokens, 5)])
    assert num_cached_blocks(drafter.rows.pool) == 1
    num_run = runner.num_run
    drafter.draft([DraftRequest("b", [*tokens, *guesses], 1)])
    assert runner.num_run - num_run == len(tokens) + len(guesses) - BLOCK


def test_an_ask_that_raises_halfway_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, _runner = make_small(60, 4)
    drafter.draft([DraftRequest("a", [1, 2], 1), DraftRequest("b", [1, 2], 1)])
    place = drafter.rows.place
    monkeypatch.setattr(drafter.rows, "place", lambda request: place(request) if request.sequence_id == "a" else 1 / 0)
    assert drafter.draft([DraftRequest("a", [1, 2, 4], 1), DraftRequest("b", [1, 2, 4], 1)]) == [[], []]
    assert drafter.rows.take_rewrites() == []
    drafter.rows.check_integrity()
    monkeypatch.undo()
    assert drafter.draft([DraftRequest("b", [1, 2, 3], 1)]) == [[says([1, 2, 3])]]


def test_even_what_had_settled_may_change() -> None:
    """A settled text that changes breaks the promise and enters anew: a sequence that shares its blocks sees nothing of
    it."""
    drafter, runner = make_small(60, 4)
    tokens = [1, 2, 3, 4] * 5
    drafter.draft([DraftRequest("a", tokens, 2), DraftRequest("c", tokens[:3], 1)])
    drafter.draft([DraftRequest("b", tokens, 2)])
    changed = [*tokens[:5], *[0] * 14]
    num_run = runner.num_run
    assert drafter.draft([DraftRequest("a", changed, 1, num_same=5)]) == [[says(changed)]]
    assert runner.num_run - num_run == len(changed) - BLOCK
    assert drafter.draft([DraftRequest("b", [*tokens, 2], 1)]) == [[says([*tokens, 2])]]
    drafter.rows.check_integrity()


def test_padding_is_not_in_any_vocabulary() -> None:
    """Ids are checked where they are new, not over and over: a bad one never gets in."""
    drafter, runner = make_small(60, 4)
    assert drafter.draft([DraftRequest("a", [1, 2, VOCAB_SIZE], 1), DraftRequest("b", [1, 2], 1)]) == [
        [],
        [says([1, 2])],
    ]
    assert drafter.rows.has_refused("a")
    assert not drafter.rows.has_refused("b")
    assert drafter.draft([DraftRequest("b", [1, 2, 3, VOCAB_SIZE], 1)]) == [[]]
    assert all(max(row.tokens) < VOCAB_SIZE for row in runner.rows.values())
    drafter.rows.forget("a")
    assert drafter.draft([DraftRequest("a", [1, 2], 1)]) == [[says([1, 2])]]
