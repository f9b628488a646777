"""Incremental detokenizer, for every kind of vocabulary; stop strings, however the text is cut."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from support.tiny_tokenizers import KINDS, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from loraplex_server.text.detokenizer import MAX_HELD_BYTES, StopMatcher, new_detokenizer
from loraplex_server.text.vocabulary import Vocabulary

SAMPLES = [
    "The quick brown fox",
    " leading and  double   spaces ",
    "naïve café: 你好\uff0c世界 😀 👩‍👩‍👧!",
    "line\nbreaks\n\n\tand tabs",
    "doesn't [tool] né stop.",
    "",
]


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str, *, special: bool = False) -> list[int]:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids


def expected_text(
    tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int], *, keep_special: bool = False
) -> str:
    """The text by definition: the decoding of everything."""
    both, before = (
        tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=not keep_special)
        for ids in (prompt + output, prompt)
    )
    common = 0
    while common < min(len(both), len(before)) and both[common] == before[common]:
        common += 1
    return both[common:]


def pieces(
    tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int], *, keep_special: bool = False
) -> list[str]:
    vocabulary = Vocabulary(tokenizer.backend_tokenizer, keep_special=keep_special)
    detokenizer = new_detokenizer(vocabulary, prompt)
    return [*(detokenizer.push((token_id,)) for token_id in output), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_continues_the_prompt(kind: str) -> None:
    """The text continues the prompt at every split of a text into prompt and output."""
    tokenizer = tiny_tokenizer(kind)
    for text in SAMPLES:
        ids = ids_of(tokenizer, text, special=True)
        for cut in range(len(ids) + 1):
            found = "".join(pieces(tokenizer, ids[:cut], ids[cut:]))
            assert found == expected_text(tokenizer, ids[:cut], ids[cut:]), (text, cut)
        assert "".join(pieces(tokenizer, [], ids)) == tokenizer.backend_tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_kept(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = ids_of(tokenizer, "The quick<|turn|> brown fox</s><|turn|>jumps né", special=True)
    for cut in range(len(ids) + 1):
        found = "".join(pieces(tokenizer, ids[:cut], ids[cut:], keep_special=True))
        assert found == expected_text(tokenizer, ids[:cut], ids[cut:], keep_special=True), cut
    assert "<|turn|>" in "".join(pieces(tokenizer, [], ids, keep_special=True))


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens(kind: str) -> None:
    """The tokens are those of a model with random weights: broken characters, special tokens, ids beyond the
    vocabulary."""
    tokenizer, rng = tiny_tokenizer(kind), random.Random(kind)
    for _ in range(400):
        ids = [rng.randrange(len(tokenizer) + 3) for _ in range(20)]
        if rng.random() < 0.5:
            ids = [rng.choice(ids_of(tokenizer, "é你😀 a") or [0]) for _ in range(20)]
        cut = rng.randint(0, 8)
        assert "".join(pieces(tokenizer, ids[:cut], ids[cut:])) == expected_text(tokenizer, ids[:cut], ids[cut:])


@pytest.mark.parametrize("kind", ["llama_bpe", "metaspace", "wordpiece", "suffix_bpe"])
def test_the_first_space_stays(kind: str) -> None:
    """The first space stays where decoding the output alone would lose it."""
    tokenizer = tiny_tokenizer(kind)
    ids = ids_of(tokenizer, "The quick brown fox jumps over the lazy dog")
    num_found = 0
    for cut in range(1, len(ids)):
        alone = tokenizer.backend_tokenizer.decode(ids[cut:])
        found = "".join(pieces(tokenizer, ids[:cut], ids[cut:]))
        assert found in (alone, " " + alone)
        num_found += found != alone
    assert num_found >= 3


def test_text_comes_as_soon_as_it_is_certain() -> None:
    for kind in KINDS:
        tokenizer = tiny_tokenizer(kind)
        ids = ids_of(tokenizer, "The quick brown fox")
        assert all(piece or token_id == 4 for piece, token_id in zip(pieces(tokenizer, [], ids), ids, strict=False)), (
            kind
        )


@pytest.mark.parametrize("kind", ["byte_level", "llama_bpe", "gemma_bpe"])
def test_characters_are_never_split(kind: str) -> None:
    """A prompt that ends within a character does not split it either."""
    tokenizer = tiny_tokenizer(kind)
    text = "a😀é你b"
    ids = ids_of(tokenizer, text)
    for cut in range(len(ids)):
        found = pieces(tokenizer, ids[:cut], ids[cut:])
        assert "\ufffd" not in "".join(found)
        assert text.endswith("".join(found))


def test_invalid_bytes_do_not_hold_back_what_follows() -> None:
    tokenizer = tiny_tokenizer("byte_level")
    bad = tokenizer.convert_tokens_to_ids("ÿ")  # the byte 0xFF
    letter = tokenizer.convert_tokens_to_ids("a")
    assert pieces(tokenizer, [], [bad, bad, letter, bad]) == ["\ufffd", "\ufffd", "a", "\ufffd", ""]


def test_a_prompt_that_ends_in_half_a_surrogate() -> None:
    tokenizer = tiny_tokenizer("byte_level")
    prompt = [tokenizer.convert_tokens_to_ids(char) for char in "a\u00ed\u0142"]  # the bytes 61 ED A0
    output = ids_of(tokenizer, "b")
    assert tokenizer.backend_tokenizer.decode(prompt + output) == "a\ufffd\ufffdb"
    assert "".join(pieces(tokenizer, prompt, output)) == "b"
    detokenizer = new_detokenizer(Vocabulary(tokenizer.backend_tokenizer), prompt)
    assert detokenizer.take_unfinished() == "\ufffd\ufffd"
    assert detokenizer.push(output) + detokenizer.finish() == "\ufffd\ufffdb"


class TestByteRuns:
    """`<0xE4>` and its like."""

    tokenizer = tiny_tokenizer("llama_bpe")

    def run(self, data: bytes) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(f"<0x{value:02X}>") for value in data]

    def test_held_until_the_run_ends(self) -> None:
        (letter,) = ids_of(self.tokenizer, "fox")[-1:]
        found = pieces(self.tokenizer, [letter], [*self.run("你".encode()), letter])
        assert found[:3] == ["", "", ""]
        assert "".join(found).startswith("你")
        assert found[3] != ""

    def test_shown_at_once_when_nothing_can_save_it(self) -> None:
        assert pieces(self.tokenizer, [], self.run(b"\xe4\xbd\xff\x41")) == ["", "", "\ufffd" * 3, "\ufffd", ""]

    def test_long_runs_come_in_whole_characters(self) -> None:
        text = "你好世界" * 40
        found = pieces(self.tokenizer, [], self.run(text.encode()))
        assert "".join(found) == text
        assert max(map(len, found)) <= MAX_HELD_BYTES

    def test_a_long_run_that_becomes_invalid_keeps_what_was_shown(self) -> None:
        text = "你好世界" * 10
        found = "".join(pieces(self.tokenizer, [], self.run(text.encode() + b"\xff\x41")))
        assert found.startswith(text[:20])
        assert set(found.replace("\ufffd", "")) <= set(text)
        assert found.endswith("\ufffd\ufffd")

    @pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 66, 67, 68, 200])
    def test_a_prompt_may_end_in_a_run(self, length: int) -> None:
        text = "你好世界é😀" * 20
        data = text.encode()
        num_chars = len(data[:length].decode(errors="ignore"))
        end = len(text[: num_chars + 12].encode())
        ids = self.run(data[:end])
        found = "".join(pieces(self.tokenizer, ids[:length], ids[length:]))
        if end <= MAX_HELD_BYTES:
            assert found == expected_text(self.tokenizer, ids[:length], ids[length:])
        # The character that the cut goes through belongs to the output.
        assert text[num_chars : num_chars + 12] in found


def test_special_tokens_do_not_break_the_context() -> None:
    """Behind a special token that is left out, the next piece still stands within a text."""
    for kind in KINDS:
        tokenizer = tiny_tokenizer(kind)
        turn = tokenizer.convert_tokens_to_ids("<|turn|>")
        words = ids_of(tokenizer, "The quick brown fox")
        for cut in range(1, len(words)):
            ids = [*words[:cut], turn, turn, *words[cut:]]
            for split in range(len(ids)):
                assert "".join(pieces(tokenizer, ids[:split], ids[split:])) == expected_text(
                    tokenizer, ids[:split], ids[split:]
                )


def test_dropped_tokens_have_no_text() -> None:
    for kind in KINDS:
        tokenizer = tiny_tokenizer(kind)
        tool = tokenizer.convert_tokens_to_ids("[tool]")
        words = ids_of(tokenizer, "The quick")
        detokenizer = new_detokenizer(Vocabulary(tokenizer.backend_tokenizer), words, frozenset({tool}))
        assert detokenizer.push((tool,)) + detokenizer.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_cost_does_not_grow(kind: str) -> None:
    """The last tokens of a long text cost what the first did, also where nothing becomes certain."""
    tokenizer = tiny_tokenizer(kind)
    vocabulary = Vocabulary(tokenizer.backend_tokenizer)
    broken = tokenizer.convert_tokens_to_ids({"byte_level": "ð", "llama_bpe": "<0xF0>"}.get(kind, "[tool]"))
    detokenizer = new_detokenizer(vocabulary, [broken] * 5000)

    def time_of(count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            detokenizer.push((broken,))
        return time.thread_time() - start

    early = time_of(300)
    time_of(6000)
    assert min(time_of(300) for _ in range(5)) < 8 * early + 0.01


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
