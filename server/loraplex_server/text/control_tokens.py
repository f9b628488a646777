"""Control tokens in the texts of a chat, encoded as plain text.

The texts are marked before the template sees them, so that its own control tokens are known from theirs. Those of the
template then become placeholders, which are tokens of a copy of the tokenizer that has no other control tokens. Only
chats whose texts hold control tokens come this way, and those in which they could make one: together with each other or
with what the template writes around them, or when the tokenizer normalizes them.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

from tokenizers import Tokenizer

# Private use characters: around what a text holds, and around a placeholder's number.
_BEGIN, _END, _OPEN, _CLOSE = "\U000f0000", "\U000f0001", "\U000f0002", "\U000f0003"
_RESERVED: Final = re.compile(f"[{_BEGIN}{_END}{_OPEN}{_CLOSE}]")
_PLACEHOLDER: Final = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


@dataclass(frozen=True, slots=True)
class SafeText:
    """A chat's text with placeholders for the control tokens that its template wrote."""

    text: str
    controls: tuple[str, ...]  # placeholder K is the K-th

    @property
    def num_controls(self) -> int:
        """Number of control tokens that the template wrote."""
        return len(_PLACEHOLDER.findall(self.text))

    @property
    def plain(self) -> str:
        return _PLACEHOLDER.sub(lambda found: self.controls[int(found[1])], self.text)


class ControlTokens:
    """The tokens that only a template may write."""

    def __init__(self, contents: Iterable[str]) -> None:
        self.contents = tuple(dict.fromkeys(contents))
        either = _either(self.contents)
        self._any = re.compile(either)
        self._written = re.compile(f"{_BEGIN}(?:{either}){_END}|({either})")
        self._numbers = {content: number for number, content in enumerate(self.contents)}

    def in_text(self, text: str) -> list[str]:
        """The control tokens in a text, one after the other."""
        return self._any.findall(text)

    def are_in(self, value: Any) -> bool:
        """True if a text anywhere in the value, the keys of mappings included, holds a control token."""
        return _has_text(value, lambda text: self._any.search(text) is not None)

    def marked(self, value: Any, edges: Edges | None = None) -> Any:
        """The value with each of its control tokens marked, in all texts, and with marks at those `edges`."""
        match value:
            case str():
                text = self._any.sub(f"{_BEGIN}\\g<0>{_END}", _RESERVED.sub("", value))
                return text if edges is None else edges.marked(text)
            case Mapping():
                items = cast("Mapping[Any, Any]", value).items()
                return {self.marked(key, edges): self.marked(one, edges) for key, one in items}
            case list():
                return [self.marked(one, edges) for one in cast("list[Any]", value)]
            case _:
                return value

    def resolved(self, rendered: str) -> SafeText:
        """The text that a template made of marked values. Marks that the template tore apart separate what is around
        them."""
        text = self._written.sub(self._placeholder, rendered)
        return SafeText(text.replace(_BEGIN, "").replace(_END, ""), self.contents)

    def _placeholder(self, found: re.Match[str]) -> str:
        return found[0] if found[1] is None else f"{_OPEN}{self._numbers[found[1]]}{_CLOSE}"


def _either(contents: Iterable[str]) -> str:
    """Pattern of any of the contents; where several fit, the longest. As a tree of their beginnings: alternatives one
    by one would all be tried at each `<` of a text, a thousand of them in some vocabularies."""
    words = sorted(set(contents))
    return _branches(words) if words else "(?!)"


def _branches(words: Sequence[str]) -> str:
    """The pattern of sorted words that differ."""
    branches: list[str] = []
    for _, group in itertools.groupby(filter(None, words), key=lambda word: word[0]):
        same = list(group)
        shared = os.path.commonprefix(same)  # noqa: RUF071  # of words, not of paths
        branches.append(re.escape(shared) + _branches([word.removeprefix(shared) for word in same]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'' if words[0] else '?'}"


# Filters and methods by which templates leave out the middle of a text.
_REWRITES: Final = re.compile(r"replace|join")
_MAX_LITERALS: Final = 256
_LITERAL: Final = re.compile(r"'([^'\n]{2,})'|\"([^\"\n]{2,})\"")


def _has_text(value: Any, is_one: Callable[[str], bool]) -> bool:
    """True if `is_one` holds for a text anywhere in the value, the keys of mappings included."""
    match value:
        case str():
            return is_one(value)
        case Mapping():
            items = cast("Mapping[Any, Any]", value).items()
            return any(_has_text(one, is_one) for item in items for one in item)
        case list():
            return any(_has_text(one, is_one) for one in cast("list[Any]", value))
        case _:
            return False


class Edges:
    """Edges of texts that begin with the end of a control token, end with its beginning, or are its middle: the token
    could be whole in what a template writes. Whitespace at the ends, which templates strip, is passed over. Under a
    template that leaves out parts of texts also where a token begins within one: what is between its halves may go."""

    def __init__(self, contents: Iterable[str], template: str) -> None:
        known = tuple(contents)
        self._beginnings = _beginnings(known, template) if known and _REWRITES.search(template) else None
        self._heads = frozenset(one[:end] for one in known for end in range(1, len(one)))
        self._tails = frozenset(one[begin:] for one in known for begin in range(1, len(one)))
        self._inner = "\n".join(one[1:-1] for one in known)
        self._max_chars = max(map(len, known), default=1) - 1

    def are_in(self, value: Any) -> bool:
        """True if a text anywhere in the value, the keys of mappings included, has such an edge."""
        return _has_text(value, lambda text: any(self._of(text.strip())) or self._with_beginnings(text) != text)

    def marked(self, text: str) -> str:
        """The text with a mark at each edge: what is around the text does not join it."""
        text = self._with_beginnings(text)
        core = text.strip()
        at_begin, at_end = self._of(core)
        if not (at_begin or at_end):
            return text
        begin = text.index(core)
        marked = f"{_END if at_begin else ''}{core}{_END if at_end else ''}"
        return text[:begin] + marked + text[begin + len(core) :]

    def _with_beginnings(self, text: str) -> str:
        if self._beginnings is None:
            return text
        return self._beginnings.sub(lambda found: found[0] if found[1] is None else f"{found[1]}{_END}", text)

    def _of(self, text: str) -> tuple[bool, bool]:
        if not text:
            return False, False
        if text in self._inner:
            return True, True
        sizes = range(1, min(len(text), self._max_chars) + 1)
        return any(text[:size] in self._tails for size in sizes), any(text[-size:] in self._heads for size in sizes)


def _beginnings(contents: Sequence[str], template: str) -> re.Pattern[str]:
    """Finds whole control tokens, and literals of the template that its own statements look for; or, as the first
    group, the first character of what is neither but begins like a token."""
    heads = "".join(re.escape(one) for one in sorted({content[0] for content in contents}))
    literals = (re.search(f"[{heads}].+", one or other) for one, other in _LITERAL.findall(template))
    looked_for = list(dict.fromkeys(found[0] for found in literals if found is not None))[:_MAX_LITERALS]
    apart = (one for one in looked_for if not any(one in content or content in one for content in contents))
    return re.compile(f"{_either((*contents, *apart))}|([{heads}])")


class NormalizedControlTokens:
    """Control tokens in texts as a tokenizer normalizes them."""

    def __init__(self, contents: Sequence[str], normalize: Callable[[str], str]) -> None:
        self._normalize = normalize
        self._known = ControlTokens([*contents, *map(normalize, contents)])
        printable = "".join(map(chr, range(0x21, 0x7F)))
        self._changes_ascii = printable not in normalize(printable)

    def num_in(self, text: str) -> int:
        """Lower bound of the number of control tokens in a text; 0 for one in which the normalizer changes nothing that
        matters."""
        if text.isascii() and not self._changes_ascii:
            return 0
        return len(self._known.in_text(self._normalize(text)))


class PlainTokenizer:
    """A copy of a tokenizer in which placeholders stand for the control tokens, and nothing else is one."""

    def __init__(self, serialized: str, controls: Sequence[str]) -> None:
        state: dict[str, Any] = json.loads(serialized)
        names = {content: f"{_OPEN}{number}{_CLOSE}" for number, content in enumerate(controls)}
        self._lengths = [len(content) for content in controls]
        ids: dict[str, int] = {token["content"]: token["id"] for token in state["added_tokens"]}
        _rename(state["model"], names)
        for token in state["added_tokens"]:
            if token["content"] in names:
                token["content"], token["normalized"] = names[token["content"]], False
        state["post_processor"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(state))
        found = {names.get(content, content): token_id for content, token_id in ids.items()}
        # The library renumbers added tokens.
        numbered = ((self._tokenizer.token_to_id(content), token_id) for content, token_id in found.items())
        self._ids = {new: old for new, old in numbered if new is not None}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, as the whole tokenizer numbers them."""
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        return [self._ids.get(token_id, token_id) for token_id in encoding.ids]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text, as the whole tokenizer numbers them, and their offsets in the plain text."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        ids = [self._ids.get(token_id, token_id) for token_id in encoding.ids]
        ends, shifts = [0], [0]
        for found in _PLACEHOLDER.finditer(text):
            ends.append(found.end())
            shifts.append(shifts[-1] + len(found[0]) - self._lengths[int(found[1])])

        def plain(offset: int) -> int:
            return offset - shifts[bisect.bisect_right(ends, offset) - 1]

        return ids, [(plain(start), plain(end)) for start, end in encoding.offsets]


@lru_cache(maxsize=2)
def plain_tokenizer(serialized: str, controls: tuple[str, ...]) -> PlainTokenizer:
    """The tokenizer with placeholders for these controls. Those of two templates are kept."""
    return PlainTokenizer(serialized, controls)


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Puts placeholders in the place of control tokens in a model's vocabulary."""
    vocabulary: Any = model["vocab"]
    if isinstance(vocabulary, dict):
        pieces = cast("dict[str, int]", vocabulary)
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in pieces.items()}
    else:
        model["vocab"] = [
            [names.get(piece, piece), score] for piece, score in cast("list[tuple[str, float]]", vocabulary)
        ]
    if model.get("merges"):
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
