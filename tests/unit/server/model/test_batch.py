"""Batch mirror: spans, staging and commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from loraplex_contracts.plan import AdapterUse, NewSequence, Span
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.layers.lora import Segment
from loraplex_server.layers.step import StagedStep
from loraplex_server.model.batch import BatchMirror

BLOCK = 4


def mirror(max_rows: int = 8, max_len: int = 32) -> BatchMirror:
    return BatchMirror(max_rows, max_len, BLOCK, torch.device("cpu"))


def sequence(name: str, row: int, num_tokens: int, *uses: AdapterUse, num_prompt: int | None = None) -> NewSequence:
    """Tokens 100 * row, 100 * row + 1, ..."""
    tokens = tuple(range(100 * row, 100 * row + num_tokens))
    return NewSequence(
        name, row, tokens, num_tokens if num_prompt is None else num_prompt, SamplingParams(), OutputParams(), uses
    )


def span(name: str, row: int, start: int, num: int, samples: int, *blocks: int, **fields: Any) -> Span:
    return Span(name, row, start, num, samples, tuple(blocks), **fields)


def token_ids(batch: BatchMirror, staged: StagedStep) -> list[int]:
    return batch.inputs(staged).input_ids[0].tolist()


def drew(batch: BatchMirror, staged: StagedStep, *token_ids: int) -> None:
    """Commits a step that has run and drawn these tokens, one for each sampled span."""
    sampled = [s for s in staged.spans if s.num_samples]
    batch.keep_drawn([s.row for s in sampled], [s.start + s.num_tokens for s in sampled], torch.tensor(token_ids))
    batch.commit(staged)


def test_one_row_of_tokens_positions_and_slots() -> None:
    batch = mirror()
    batch.enter(sequence("a", 3, 6))
    batch.enter(sequence("b", 1, 2))
    staged = batch.stage([span("a", 3, 0, 6, 1, 9, 4), span("b", 1, 0, 2, 0, 7)])
    # Shorter spans come first.
    assert [s.sequence_id for s in staged.spans] == ["b", "a"]
    inputs = batch.inputs(staged)
    assert inputs.input_ids.tolist() == [[100, 101, 300, 301, 302, 303, 304, 305]]
    assert inputs.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 4, 5]]
    assert inputs.attention.slots.tolist() == [28, 29, 36, 37, 38, 39, 16, 17]
    assert inputs.attention.query_lens.tolist() == [2, 6]
    assert inputs.attention.context_lens.tolist() == [2, 6]
    assert inputs.head_rows.tolist() == staged.head_rows.tolist() == [7]
    assert staged.fresh_blocks == (7, 9, 4)


@pytest.mark.parametrize(("restarts", "num_first"), [(False, 4), (True, 6)])
def test_tokens_are_scaled_by_what_their_text_had_at_first(restarts: bool, num_first: int) -> None:
    rope = RopeScaling(5, has_one_set=True, restarts=restarts)
    batch = BatchMirror(8, 32, BLOCK, torch.device("cpu"), rope)
    batch.enter(sequence("a", 3, 6, num_prompt=4))
    batch.enter(sequence("b", 1, 2))
    staged = batch.stage([span("a", 3, 0, 6, 1, 9, 4), span("b", 1, 0, 2, 0, 7)])
    assert staged.rope_lengths is not None
    assert staged.rope_lengths.tolist() == [2, 2, *[num_first] * 4, *([6, 6] if restarts else [5, 6])]
    assert mirror().rope is None


def test_a_chunk_continues_where_the_last_one_ended() -> None:
    batch = mirror()
    batch.enter(sequence("a", 0, 9))
    first = batch.stage([span("a", 0, 0, 5, 0, 1, 2, 3)])
    batch.commit(first)
    second = batch.stage([span("a", 0, 5, 4, 1)])
    assert second.tokens[1:].tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert second.fresh_blocks == ()
    drew(batch, second, 77)
    third = batch.stage([span("a", 0, 9, 1, 1)])
    assert token_ids(batch, third) == [77]


def test_staging_again_gives_the_same() -> None:
    batch = mirror()
    batch.enter(sequence("a", 0, 3))
    spans = [span("a", 0, 0, 5, 3, 1, 2, draft=(8, 9))]
    one, other = batch.stage(spans), batch.stage(spans)
    assert token_ids(batch, one) == token_ids(batch, other) == [0, 1, 2, 8, 9]
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.tokens[2].tolist() == [4, 5, 6, 7, 8]
    assert batch.block_ids(0) == []
    batch.keep_drawn([0, 0, 0], [3, 4, 5], torch.tensor([8, 30, 31]))
    batch.commit(one)
    batch.settle(one.rows[0], one.spans[0], 2)  # the first draft token was right
    assert batch.block_ids(0) == [1, 2]
    after = batch.stage([span("a", 0, 4, 1, 1)])
    assert token_ids(batch, after) == [30]
    with pytest.raises(ValueError, match="known"):
        batch.check(span("a", 0, 5, 1, 1))


def test_samples_and_prompt_logprobs_share_the_heads_rows() -> None:
    batch = mirror()
    batch.enter(sequence("a", 0, 5))
    batch.enter(sequence("b", 1, 3))
    staged = batch.stage([span("a", 0, 2, 3, 1, 1, 2, prompt_logprobs=True), span("b", 1, 0, 5, 3, 3, 4, draft=(6, 7))])
    # a: tokens 2, 3, 4 of the prompt, the first two with a next one; b: the last three of five.
    assert staged.head_rows.tolist() == [0, 1, 2, 5, 6, 7]
    assert staged.head_starts == (0, 3)
    assert staged.num_prompt_rows == (2, 0)


def test_prompt_logprobs_end_with_the_prompt() -> None:
    """A sequence that comes back after a preemption has output behind its prompt."""
    batch = mirror()
    batch.enter(sequence("a", 0, 8, num_prompt=4))
    staged = batch.stage([span("a", 0, 0, 8, 1, 1, 2, prompt_logprobs=True)])
    assert staged.head_rows.tolist() == [0, 1, 2, 7]


def test_neighbours_with_one_adapter_are_one_segment() -> None:
    batch = mirror()
    one, two = AdapterUse(5), AdapterUse(2)
    batch.enter(sequence("a", 0, 2, one))
    batch.enter(sequence("b", 1, 2))
    batch.enter(sequence("c", 2, 2, one))
    batch.enter(sequence("d", 3, 2, two))
    batch.enter(sequence("e", 4, 2, AdapterUse(5, 0.5)))
    batch.enter(sequence("f", 5, 2, AdapterUse(1, 0.5), AdapterUse(2, 2.0)))
    spans = [span(name, row, 0, 2, row % 2, row + 1) for row, name in enumerate("abcdef")]
    staged = batch.stage(spans)
    assert [s.sequence_id for s in staged.spans] == ["b", "f", "d", "e", "a", "c"]
    assert staged.token_segments == (
        Segment(2, 4, 1, 0.5),
        Segment(2, 4, 2, 2.0),
        Segment(4, 6, 2),
        Segment(6, 8, 5, 0.5),
        Segment(8, 12, 5),
    )
    # b, d and f are sampled: only their rows reach the head.
    assert staged.head_rows.tolist() == [1, 3, 5]
    assert staged.head_segments == (Segment(1, 2, 1, 0.5), Segment(1, 2, 2, 2.0), Segment(2, 3, 2))


def test_an_activated_adapter_has_the_tokens_from_its_first_one_on() -> None:
    batch = mirror()
    for row, name in enumerate("abcd"):
        batch.enter(replace(sequence(name, row, 4, AdapterUse(1)), adapted_from=2 * row))
    spans = [span(name, row, 0, 4, 1, row + 1, prompt_logprobs=name == "b") for row, name in enumerate("abcd")]
    staged = batch.stage(spans)
    assert staged.token_segments == (Segment(0, 4, 1), Segment(6, 8, 1))
    # Of b also the rows of positions 0 to 2, of which the last is its adapter's.
    assert staged.head_rows.tolist() == [3, 4, 5, 6, 7, 11, 15]
    assert staged.head_segments == (Segment(0, 1, 1), Segment(3, 7, 1))


def test_a_row_belongs_to_who_entered_last() -> None:
    batch = mirror()
    batch.enter(sequence("a", 0, 2))
    batch.enter(sequence("b", 0, 2))
    with pytest.raises(ValueError, match="does not hold"):
        batch.check(span("a", 0, 0, 2, 1, 1))
    batch.release(0)
    batch.release(0)
    with pytest.raises(ValueError, match="does not hold"):
        batch.check(span("b", 0, 0, 2, 1, 1))


def test_what_fills_the_context_is_drawn_and_not_kept() -> None:
    batch = mirror(max_len=8)
    batch.enter(sequence("a", 0, 8))
    batch.enter(sequence("b", 1, 3))
    drew(batch, batch.stage([span("a", 0, 0, 8, 1, 1, 2), span("b", 1, 0, 3, 1, 3)]), 77, 78)
    assert batch.tokens[:2].tolist() == [list(range(8)), [100, 101, 102, 77, 0, 0, 0, 0]]
    batch.enter(sequence("b", 1, 8))
    drew(batch, batch.stage([span("b", 1, 0, 8, 1, 1, 2)]), 79)
    assert batch.tokens[1].tolist() == list(range(100, 108))


def test_a_result_that_comes_late_leaves_the_rows_new_sequence_alone() -> None:
    batch = mirror()
    batch.enter(sequence("a", 0, 3))
    staged = batch.stage([span("a", 0, 0, 5, 3, 1, 2, draft=(8, 9))])
    batch.commit(staged)
    batch.enter(sequence("b", 0, 2))
    batch.settle(staged.rows[0], staged.spans[0], 3)
    batch.check(span("b", 0, 0, 2, 1, 1))
    with pytest.raises(ValueError):
        batch.check(span("b", 0, 2, 1, 1, 1))


def test_rewriting_what_was_guessed() -> None:
    batch = mirror()
    batch.enter(sequence("a", 0, 5))
    batch.enter(sequence("b", 2, 3))
    drew(batch, batch.stage([span("a", 0, 0, 5, 1, 1, 2), span("b", 2, 0, 3, 1, 3)]), 78, 77)
    batch.rewrite([(0, 4, [50, 51, 52]), (2, 3, [])])
    assert batch.tokens[0, :7].tolist() == [0, 1, 2, 3, 50, 51, 52]
    batch.check(span("a", 0, 4, 3, 1))
    for late in (span("a", 0, 4, 4, 1), span("b", 2, 3, 1, 1)):
        with pytest.raises(ValueError):
            batch.check(late)
    staged = batch.stage([span("a", 0, 4, 3, 1)])
    assert token_ids(batch, staged) == [50, 51, 52]
    assert staged.tokens[2].tolist() == [8, 9, 10]
    assert staged.fresh_blocks == ()


@pytest.mark.parametrize("change", [(1, 0, [5]), (0, 6, [5]), (0, 5, [5] * 28)])
def test_rewriting_what_is_not_there(change: tuple[int, int, list[int]]) -> None:
    """Nobody's row, a gap before the tokens, more than the row holds."""
    batch = mirror()
    batch.enter(sequence("a", 0, 5))
    with pytest.raises(ValueError, match="rewritten"):
        batch.rewrite([change])
    assert batch.tokens[0, :6].tolist() == [0, 1, 2, 3, 4, 0]
