"""Stop strings, however the text is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loraplex_server.text.stops import StopMatcher


def feed(matcher: StopMatcher, chunks: Sequence[str]) -> list[str]:
    """One token per chunk."""
    return [matcher.push(chunk, num_tokens=count) for count, chunk in enumerate(chunks, start=1)]


def test_found_within_and_across_chunks() -> None:
    for chunks in (["one STOP two"], ["one S", "TO", "P two"], list("one STOP two")):
        matcher = StopMatcher(["STOP"])
        assert "".join(feed(matcher, chunks)) == "one "
        assert matcher.matched == "STOP"
        assert matcher.finish() == ""


def test_include_stop() -> None:
    matcher = StopMatcher(["STOP"], include_stop=True)
    assert "".join(feed(matcher, list("one STOP two"))) == "one STOP"


def test_holds_back_only_what_could_begin_one() -> None:
    matcher = StopMatcher(["</s>", "\n\n"])
    assert feed(matcher, ["a<", "b", "\n", "c</", "s", "x"]) == ["a", "<b", "", "\nc", "", "</sx"]
    assert matcher.finish() == ""
    assert matcher.matched is None
    held = StopMatcher(["abc"])
    assert feed(held, ["xab"]) == ["x"]
    assert held.finish() == "ab"


def test_overlapping_beginnings() -> None:
    matcher = StopMatcher(["aab"])
    assert feed(matcher, list("aaaab")) == ["", "", "a", "a", ""]
    assert matcher.matched == "aab"


@pytest.mark.parametrize("chunks", [["xabcdy"], list("xabcdy")])
def test_the_one_that_is_complete_first_wins(chunks: list[str]) -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert "".join(feed(matcher, chunks)) == "xa"
    assert matcher.matched == "bc"


@pytest.mark.parametrize("chunks", [["xabcdy"], list("xabcdy")])
def test_of_two_that_end_together_the_longer_wins(chunks: list[str]) -> None:
    matcher = StopMatcher(["cd", "abcd", "d"])
    assert "".join(feed(matcher, chunks)) == "x"
    assert matcher.matched == "abcd"


def test_min_tokens() -> None:
    """The third token is the first that may end one; a stop string may begin before it."""
    assert feed(StopMatcher(["ab"], min_tokens=2), ["ab", "ab", "ab", "c"]) == ["ab", "ab", "", ""]
    across = StopMatcher(["ab"], min_tokens=2)
    assert feed(across, ["x", "a", "b"]) == ["x", "", ""]
    assert across.matched == "ab"
    # One that came too early may be the beginning of the next.
    again = StopMatcher(["aa"], min_tokens=1)
    assert feed(again, ["aa", "a"]) == ["a", ""]
    assert again.matched == "aa"
    # Text that came late, with a token behind min_tokens, counts for that token.
    late = StopMatcher(["ab"], min_tokens=2)
    assert feed(late, ["", "", "ab"]) == ["", "", ""]
    assert late.matched == "ab"


def test_text_of_the_last_flush_is_looked_at() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("end.", num_tokens=0) == "end"
    assert matcher.matched == "."


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert feed(matcher, ["a.b", "c", "."]) == ["a", "", ""]
    assert matcher.finish() == ""


def test_without_stop_strings_everything_passes() -> None:
    for stops in ([], [""]):
        matcher = StopMatcher(stops)
        assert feed(matcher, ["a", "b"]) == ["a", "b"]
        assert matcher.matched is None


def test_a_long_repetitive_stop_costs_no_more_per_character() -> None:
    """Hostile: each character could be the beginning of 16 long stop strings."""
    matcher = StopMatcher(["a" * 255 + chr(ord("b") + i) for i in range(16)])
    text = "".join(matcher.push("a", num_tokens=count) for count in range(1, 3000))
    assert len(text) == 2999 - 255
    assert matcher.finish() == "a" * 255
