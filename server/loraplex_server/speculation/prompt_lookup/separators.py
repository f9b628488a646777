"""Copying across separators that differ between prompt and answer.

Where a copy comes to a separator that comes out as another token (see `history.Separators`), it goes on: behind a value
in the earlier output that the sequence follows, behind a key with the prompt's value, or else with the token that came
instead. Pure, without state of its own; knows neither requests nor proposers, and not how likely its guesses are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from loraplex_server.speculation.prompt_lookup.history import Outputs, Separators

# Where the tokens of a draft come from. Its beginning: the sequence's own text, earlier outputs, or the place in one of
# them that the sequence left a little before. Behind that: an earlier output behind a value, the prompt's value behind
# a key, or the token that replaces a separator.
Source = Literal["own", "history", "resumed", "behind", "value", "separator"]
STARTS: frozenset[Source] = frozenset(("own", "history", "resumed"))
EARLIER: frozenset[Source] = frozenset(("history", "resumed", "behind"))  # positions are those of earlier outputs


class Piece(NamedTuple):
    """So many tokens of a draft, from one source."""

    source: Source
    num_tokens: int
    evidence: int = 0  # how many tokens agree before it
    position: int = 0  # of its first token there

    @property
    def is_earlier(self) -> bool:
        return self.source in EARLIER


class Known(NamedTuple):
    """What a draft is made of."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    names: Mapping[int, int]  # tokens that stand once in the prompt, and the position behind them
    separators: Separators
    outputs: Outputs | None  # earlier ones


def compose(
    known: Known, source: Source, evidence: int, own: int | None, place: int | None, num_tokens: int
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Up to `num_tokens` tokens that may follow, and where they come from.

    They begin at position `own` of the sequence's text, or where that is None at `place` in the earlier outputs, which
    else is where the sequence has come to there.
    """
    drafted: list[int] = []
    pieces: list[Piece] = []
    while (room := num_tokens - len(drafted)) > 0:
        if own is not None:
            run, stop = _own_run(known, own, room)
            if run:
                drafted += run
                pieces.append(Piece(source, len(run), evidence, own))
            if stop is None:
                break
            end = _behind_value(known, place)
            if end is not None:
                source, own, place = "behind", None, end
            elif len(run) < room:
                drafted.append(known.separators.instead(known.token_ids[stop]))
                pieces.append(Piece("separator", 1, 0, stop))
                source, own = "value", stop + 1
        else:
            assert place is not None, "a draft begins somewhere"
            last = drafted[-1] if drafted else known.token_ids[-1]
            run, value = _earlier_run(known, place, room, last, is_behind=source == "behind")
            if run:
                drafted += run
                pieces.append(Piece(source, len(run), evidence, place))
            if value is None:
                break
            source, own, place = "value", value, place + len(run)
        evidence = 0
    return tuple(drafted), tuple(pieces)


def _own_run(known: Known, position: int, room: int) -> tuple[Sequence[int], int | None]:
    """What follows in the sequence's own text, and the position of the separator that ends it."""
    run = known.token_ids[position : position + room]
    num_prompt = known.num_prompt_tokens - position
    if num_prompt > 0:
        num_copied = known.separators.first(run[:num_prompt])
        if num_copied < min(len(run), num_prompt):
            return run[:num_copied], position + num_copied
    return (run if len(run) == room else continuation(known.token_ids, position, room)), None


def _behind_value(known: Known, place: int | None) -> int | None:
    """Where earlier outputs go on behind the value that stands at `place` there."""
    if known.outputs is None or place is None:
        return None
    return known.outputs.next_of(place, known.separators.ends)


def _earlier_run(
    known: Known, place: int, room: int, last: int, *, is_behind: bool
) -> tuple[Sequence[int], int | None]:
    """What follows in an earlier output, up to where a value out of the prompt belongs, and that one's position: behind
    a key of the prompt's (`last` is what stands before) with a separator on both sides."""
    assert known.outputs is not None, "a place in earlier outputs needs the outputs"
    run = known.outputs.continuation(place, room)
    for idx, token_id in enumerate(run):
        if token_id in known.separators.ends and not (is_behind and idx == 0):
            position = known.names.get(last, known.num_prompt_tokens)
            if position < known.num_prompt_tokens and known.separators.is_separator(known.token_ids[position]):
                return run[: idx + 1], position + 1
        last = token_id
    return run, None


def continuation(token_ids: Sequence[int], position: int, num_tokens: int) -> tuple[int, ...]:
    """What follows if the text repeats itself from `position` on; past its end, what it has just repeated, again."""
    copied = tuple(token_ids[position : position + num_tokens])
    period = len(token_ids) - position
    if num_tokens <= period or not copied:
        return copied
    return (copied * (num_tokens // period + 1))[:num_tokens]
