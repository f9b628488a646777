"""A mark is what something else came for, and what no output has written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex_server.speculation.marks import MAX_MARKS, Marks

EQUALS, SEMICOLON, COLON, COMMA = 1, 2, 11, 12


def test_what_came_last_counts() -> None:
    marks = Marks()
    assert not marks.is_mark(EQUALS)
    marks.learn(EQUALS, COMMA)
    marks.learn(EQUALS, COLON)
    assert marks.is_mark(EQUALS)
    assert marks.instead(EQUALS) == COLON
    assert marks.ends == {COMMA, COLON}
    assert marks.first([50, 51, EQUALS, 52]) == 2
    assert marks.first([50, 51]) == 2
    assert marks.first([]) == 0


def test_what_an_output_has_written_is_copied_from_then_on() -> None:
    marks = Marks()
    marks.learn(EQUALS, COLON)
    marks.write([50, EQUALS])
    assert not marks.is_mark(EQUALS)
    assert marks.ends == set()
    marks.learn(EQUALS, COLON)
    assert not marks.is_mark(EQUALS)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_a_mark_was_learned_and_never_written(events: list[tuple[bool, int, int]]) -> None:
    marks = Marks()
    came: dict[int, int] = {}
    written: set[int] = set()
    for is_written, token_id, other in events:
        if is_written:
            marks.write([token_id])
            written.add(token_id)
        else:
            marks.learn(token_id, other)
            came[token_id] = other
    for token_id in range(10):
        assert marks.is_mark(token_id) == (token_id in came and token_id not in written)
        if marks.is_mark(token_id):
            assert marks.instead(token_id) == came[token_id]


def test_memory_is_bounded() -> None:
    marks = Marks()
    for token_id in range(5 * MAX_MARKS):
        marks.write([token_id])
    assert len(marks._instead) <= MAX_MARKS + 1  # pyright: ignore[reportPrivateUsage]
