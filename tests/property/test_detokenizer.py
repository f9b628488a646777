"""Detokenized text does not depend on how its tokens arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import KINDS, tiny_tokenizer

from loraplex_server.text.detokenizer import MAX_HELD_BYTES, StopMatcher, new_detokenizer
from loraplex_server.text.vocabulary import Vocabulary, byte_level_bytes

VOCABULARIES = {kind: Vocabulary(tiny_tokenizer(kind).backend_tokenizer) for kind in KINDS}


@st.composite
def token_ids(draw: st.DrawFn, kind: str) -> list[int]:
    """Tokens of some text, and any at all, those beyond the vocabulary included."""
    tokenizer = tiny_tokenizer(kind)
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            text = draw(st.text(alphabet="aé 你😀\u200d.,'né[tool]\n\ufffd", max_size=8))
            ids += tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        else:
            ids += draw(st.lists(st.integers(0, len(tokenizer) + 1), max_size=6))
    return ids[:MAX_HELD_BYTES]


def cut(draw: st.DrawFn, length: int) -> list[slice]:
    """Cuts a list into consecutive chunks."""
    places = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=6))})
    return [slice(a, b) for a, b in pairwise(places)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_chunking_gives_the_text_that_decoding_everything_adds(kind: str, data: st.DataObject) -> None:
    backend = tiny_tokenizer(kind).backend_tokenizer
    ids = data.draw(token_ids(kind))
    split = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:split], ids[split:]
    detokenizer = new_detokenizer(VOCABULARIES[kind], prompt)
    pieces = [detokenizer.push(output[part]) for part in cut(data.draw, len(output))]
    pieces.append(detokenizer.finish())
    for piece in pieces:
        piece.encode("utf-8")
    whole, before = backend.decode(ids), backend.decode(prompt)
    common = next((i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), len(before))
    assert "".join(pieces) == whole[common:]


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=12))
def test_byte_level_spelling(parts: list[bytes]) -> None:
    """Bytes to the vocabulary's spelling, as the library has it, and back."""
    backend = tiny_tokenizer("byte_level").backend_tokenizer
    alphabet = {byte_level_bytes(char): char for char in map(chr, range(33, 324)) if len(byte_level_bytes(char)) == 1}
    assert len(alphabet) == 256
    tokens = ["".join(alphabet[bytes((value,))] for value in part) for part in parts]
    assert b"".join(map(byte_level_bytes, tokens)) == b"".join(parts)
    assert backend.decoder.decode(tokens) == b"".join(parts).decode("utf-8", errors="replace")


TEXT = st.text(alphabet="abAB\n", max_size=30)
STOPS = st.lists(st.text(alphabet="abAB\n", min_size=1, max_size=5), max_size=4)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), text=TEXT, stops=STOPS, include_stop=st.booleans())
def test_stop_strings_are_found_as_in_the_whole_text(
    data: st.DataObject, text: str, stops: list[str], include_stop: bool
) -> None:
    """The match that ends first, and of those the longest; nothing of it is shown before it is found."""
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    matcher, shown = StopMatcher(stops, include_stop=include_stop), ""
    for count, part in enumerate(cut(data.draw, len(text)), start=1):
        shown += matcher.push(text[part], num_tokens=count)
        held = text[: part.stop].removeprefix(shown)
        if matcher.matched is None:
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    shown += matcher.finish()
    if ends:
        end, _, stop = min(ends)
        assert matcher.matched == stop
        assert shown == text[: end if include_stop else end - len(stop)]
    else:
        assert matcher.matched is None
        assert shown == text


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(st.text(alphabet="ab", max_size=4), max_size=10),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_min_tokens_shifts_the_search(chunks: list[str], stops: list[str], min_tokens: int) -> None:
    """A match has to end in the text of a token behind the first `min_tokens`."""
    text, protected = "".join(chunks), len("".join(chunks[:min_tokens]))
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(max(len(stop), protected + 1), len(text) + 1)
        if text.endswith(stop, 0, end)
    ]
    matcher = StopMatcher(stops, min_tokens=min_tokens)
    shown = "".join(matcher.push(chunk, num_tokens=count) for count, chunk in enumerate(chunks, start=1))
    shown += matcher.finish()
    if ends:
        end, _, stop = min(ends)
        assert (matcher.matched, shown) == (stop, text[: end - len(stop)])
    else:
        assert (matcher.matched, shown) == (None, text)
