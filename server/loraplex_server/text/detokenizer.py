"""Text of a completion, piece by piece: incremental detokenizer and stop strings.

The text of a completion is what it adds to its prompt: `decode(prompt + output)` without the beginning that it shares
with `decode(prompt)`, special tokens left out, nothing cleaned up. So a completion of "Hello" may begin with a space,
which decoding the output alone would lose; and a character that the prompt left unfinished belongs to the output. The
pieces, concatenated, are exactly that text. A piece never ends inside a character.

Two ways, both in constant time and memory per token:
- Byte-level vocabularies concatenate bytes, and an incremental UTF-8 decoder does the rest.
- For the others a token's text is what it adds to the token before it, and that is decoded. Only runs of byte tokens
  (`<0xE4>`) look further: the library reads a whole run as UTF-8, and one bad byte turns all of it into U+FFFD. So a
  run is held until it ends or has become invalid, at most `MAX_HELD_BYTES`: past that, whole characters go out, and
  should the run turn out invalid later, they stay (there alone, more is readable than in the library's text).

The library's own `DecodeStream` is not used: on byte-level and byte-fallback vocabularies it drops a character that the
prompt left unfinished, gives nothing after an invalid byte, and raises on some sequences.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from loraplex_server.text.vocabulary import Vocabulary

MAX_HELD_BYTES = 64
# Tokens whose text ends in U+FFFD and may yet become something else, for decoders of unknown kind: a character has at
# most four bytes.
_MAX_HELD_TOKENS = 4
REPLACEMENT: Final = "\ufffd"


class Detokenizer(Protocol):
    """Turns one completion's tokens into text. Not to be used after `finish`."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens made certain."""
        ...

    def pending(self) -> str:
        """The text held back, where it is whole characters, which an invalid byte may yet make unreadable."""
        ...

    def take_unfinished(self) -> str:
        """The end of the prompt's own text that stands for an unfinished character: U+FFFD once or twice, if not empty.
        From now on it belongs to the completion, whose text is whole then. Before the first `push` only."""
        ...

    def finish(self) -> str:
        """The text held back; an unfinished character as U+FFFD."""
        ...


def new_detokenizer(
    vocabulary: Vocabulary, prompt_ids: Sequence[int], dropped_ids: frozenset[int] = frozenset()
) -> Detokenizer:
    """A detokenizer for a completion of this prompt. Tokens in `dropped_ids` (those that end a completion) have no
    text."""
    kind = _ByteLevelDetokenizer if vocabulary.is_byte_level else _PieceDetokenizer
    return kind(vocabulary, prompt_ids, dropped_ids)


class _ByteLevelDetokenizer:
    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], dropped_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._dropped_ids = dropped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # An unfinished character at the end has at most four bytes.
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = vocabulary.bytes(token_id) + tail
            if len(tail) >= 4:
                break
        self._decoder.decode(tail)
        unfinished, _ = self._decoder.getstate()
        self._shown = unfinished.decode("utf-8", "replace")  # half a surrogate, ED A0, is U+FFFD twice

    def push(self, token_ids: Sequence[int]) -> str:
        kept = (token_id for token_id in token_ids if token_id not in self._dropped_ids)
        return self._new(self._decoder.decode(b"".join(map(self._vocabulary.bytes, kept))))

    def pending(self) -> str:
        return ""  # whole characters go out at once

    def take_unfinished(self) -> str:
        shown, self._shown = self._shown, ""
        return shown

    def finish(self) -> str:
        return self._new(self._decoder.decode(b"", final=True))

    def _new(self, text: str) -> str:
        if text and self._shown:
            text, self._shown = text.removeprefix(self._shown), ""
        return text


class _PieceDetokenizer:
    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], dropped_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._dropped_ids = dropped_ids
        self._held: list[int] = []  # visible tokens whose text is not out
        self._run = _ByteRun()  # of byte tokens, the last ones so far
        # Visible tokens before those that are held: enough of them to decode these.
        self._context, behind = _prompt_tail(vocabulary, prompt_ids)
        for token_id, value in behind:
            self._held.append(token_id)
            self._run.push(value)
        # The prompt's own text of the tokens that are held.
        self._shown = self._added() if self._held else ""

    def push(self, token_ids: Sequence[int]) -> str:
        kept = (token_id for token_id in token_ids if token_id not in self._dropped_ids)
        return "".join([self._push(token_id) for token_id in kept if self._vocabulary.is_visible(token_id)])

    def pending(self) -> str:
        if not self._held or self._run.num_unfinished:
            return ""
        return _without_common_prefix(self._added(), self._shown)

    def take_unfinished(self) -> str:
        if not self._run.num_unfinished:
            return ""
        shown, self._shown = self._shown, ""
        return shown

    def finish(self) -> str:
        return self._release() if self._held else ""

    def _push(self, token_id: int) -> str:
        value = self._vocabulary.byte(token_id)
        if value is not None:
            return self._push_byte(token_id, value)
        self._run = _ByteRun()
        self._held.append(token_id)
        text = self._added()
        if text.endswith(REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._emit(text, context=[token_id])

    def _push_byte(self, token_id: int, value: int) -> str:
        was_invalid = self._run.is_invalid
        self._run.push(value)
        self._held.append(token_id)
        if was_invalid:
            # Each byte of such a run is shown as U+FFFD, whatever follows.
            return self._emit(REPLACEMENT * len(self._held), context=[token_id])
        if self._run.is_invalid:
            return self._release()
        if len(self._held) < MAX_HELD_BYTES:
            return ""
        # Whole characters go out, an unfinished one stays.
        num_out = len(self._held) - self._run.num_unfinished
        unfinished = self._held[num_out:]
        self._held = self._held[:num_out]
        text = self._emit(self._added(), context=self._held)
        self._held = unfinished
        return text

    def _added(self) -> str:
        """The text that the held tokens add."""
        decode = self._vocabulary.decode
        return _without_common_prefix(decode(self._context + self._held), decode(self._context))

    def _release(self) -> str:
        return self._emit(self._added(), context=self._held[-1:])

    def _emit(self, text: str, context: list[int]) -> str:
        """The text of all held tokens, which are then held no longer."""
        self._context, self._held = context, []
        if text and self._shown:
            text, self._shown = _without_common_prefix(text, self._shown), ""
        return text


class _ByteRun:
    """Consecutive byte tokens, read as UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self.is_invalid = False  # can become nothing valid any more

    def push(self, value: int) -> None:
        if not self.is_invalid:
            try:
                self._decoder.decode(bytes((value,)))
            except UnicodeDecodeError:
                self.is_invalid = True

    @property
    def num_unfinished(self) -> int:
        """Number of bytes at the end which are not a whole character yet."""
        return len(self._decoder.getstate()[0])


def _prompt_tail(vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The context behind a prompt, and the byte tokens at its end with their values: the output may continue them."""
    run: list[tuple[int, int]] = []  # last one first
    for token_id in reversed(prompt_ids):
        if not vocabulary.is_visible(token_id):
            continue
        value = vocabulary.byte(token_id)
        if value is None:
            return [token_id], run[::-1]
        run.append((token_id, value))
        if len(run) > MAX_HELD_BYTES:
            # Long enough. The first whole character is the context.
            run.reverse()
            starts = [idx for idx, (_, value) in enumerate(run) if value & 0xC0 != 0x80]
            begin, end = starts[:2] if len(starts) > 1 else (0, len(run))
            return [token_id for token_id, _ in run[begin:end]], run[end:]
    return [], run[::-1]


def _without_common_prefix(text: str, other: str) -> str:
    if text.startswith(other):
        return text[len(other) :]
    pairs = enumerate(zip(text, other, strict=False))
    return text[next((idx for idx, (a, b) in pairs if a != b), len(text)) :]


class StopMatcher:
    """Finds one completion's stop strings. Pushes after a match give nothing.

    The stop string that is complete first ends the text, whatever pieces the text comes in; of several that end with
    the same character, the longest. Text is held back only while it could be the beginning of one.

    The text ends before the stop string (after it with `include_stop`). The token that completed the stop string is the
    completion's last, so token ids may hold more than the text does. The caller drops the tokens after it. `ends_with`
    finds one that ends in text which is still to come.

    A stop string may begin in the first `min_tokens` tokens, but has to end after them.

    `stops_of_tokens` has stop strings that are special tokens, by token id: such a token ends the text even where it
    has no text.
    """

    def __init__(
        self,
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        stops_of_tokens: Mapping[int, str] | None = None,
    ) -> None:
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops) if stop]
        self._include_stop = include_stop
        self._stops_of_tokens = stops_of_tokens or {}
        self._min_tokens = min_tokens
        self._held = ""  # could be the beginning of a stop string
        self._looked_at = ""  # text to be pushed next, in which no stop string may end
        self.matched: str | None = None

    def push(self, text: str, *, num_tokens: int, read: str = "") -> str:
        """Text that is safe to show. `num_tokens`: of the completion, with the one that brought this text. `read`: as
        many characters in its place, in which stop strings are looked for."""
        if self.matched is not None:
            return ""
        may_match = self._may_match(num_tokens)
        num_looked_at = len(self._looked_at) if text.startswith(self._looked_at) else 0
        for end, char in enumerate(read or text, start=1):
            found = [pattern.text for pattern in self._patterns if pattern.push(char)]
            if found and may_match and end > num_looked_at:
                return self._stop(max(found, key=len), self._held + text[:end])
        if text:
            self._looked_at = ""
        unsafe = max((pattern.num_matched for pattern in self._patterns), default=0)
        text = self._held + text
        safe, self._held = text[: len(text) - unsafe], text[len(text) - unsafe :]
        return safe

    def ends_with(self, pending: str, *, num_tokens: int) -> bool:
        """True if a stop string ends where `pending` does: the text to be pushed next, if nothing changes it. It grows
        by a character at a time, and none is looked at twice, so that each counts for the token that brought it."""
        if not pending or pending == self._looked_at:
            return False
        if self._may_match(num_tokens) and any(pattern.ends_with(pending) for pattern in self._patterns):
            return True
        self._looked_at = pending
        return False

    def is_stop(self, token_id: int, *, num_tokens: int) -> bool:
        """True if the token, the completion's `num_tokens`-th, is a stop string by itself."""
        return token_id in self._stops_of_tokens and self._may_match(num_tokens)

    def stop_at(self, token_id: int) -> str:
        """The text held back, as this token is the stop string."""
        self.matched = self._stops_of_tokens[token_id]
        return self.finish()

    def finish(self) -> str:
        """The text held back, as no stop string came."""
        held, self._held = self._held, ""
        return held

    def _may_match(self, num_tokens: int) -> bool:
        return num_tokens > self._min_tokens or self._min_tokens == 0

    def _stop(self, stop: str, text: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include_stop else text[: len(text) - len(stop)]


class _Pattern:
    """Search for one stop string by Knuth-Morris-Pratt: constant amortised time per character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0  # the text so far ends with this many characters of the pattern, and not with all of them
        # For each number of matched characters the next smaller number that also matches.
        self._fallback = [0, 0]
        for idx in range(1, len(text)):
            length = self._fallback[idx]
            while length and text[length] != text[idx]:
                length = self._fallback[length]
            self._fallback.append(length + 1 if text[length] == text[idx] else 0)

    def push(self, char: str) -> bool:
        """Takes one more character. True if the pattern ends here."""
        matched, text = self.num_matched, self.text
        while matched and text[matched] != char:
            matched = self._fallback[matched]
        if text[matched] == char:
            matched += 1
        is_complete = matched == len(text)
        self.num_matched = self._fallback[matched] if is_complete else matched
        return is_complete

    def ends_with(self, pending: str) -> bool:
        """True if the pattern ends where `pending` does, behind the text so far."""
        return (self.text[: self.num_matched] + pending).endswith(self.text)
