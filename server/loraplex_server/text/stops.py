"""Stop strings over a stream of text.

The stop string that is complete first ends the text, whatever pieces the text comes in; of several that end with the
same character, the longest. Text is held back only while it could be the beginning of one.

The text ends before the stop string (after it with `include_stop`). The token that completed the stop string is the
completion's last, so token ids may hold more than the text does. The caller drops the tokens after it.

A stop string may begin in the first `min_tokens` tokens, but has to end after them.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One completion's stop strings. Pushes after a match give nothing."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0) -> None:
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops) if stop]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""  # could be the beginning of a stop string
        self.matched: str | None = None

    def push(self, text: str, *, num_tokens: int) -> str:
        """Text that is safe to show. `num_tokens`: of the completion, with the one that brought this text."""
        if self.matched is not None:
            return ""
        may_match = num_tokens > self._min_tokens or self._min_tokens == 0
        for end, char in enumerate(text, start=1):
            found = [pattern.text for pattern in self._patterns if pattern.push(char)]
            if found and may_match:
                return self._stop(max(found, key=len), self._held + text[:end])
        unsafe = max((pattern.num_matched for pattern in self._patterns), default=0)
        text = self._held + text
        safe, self._held = text[: len(text) - unsafe], text[len(text) - unsafe :]
        return safe

    def finish(self) -> str:
        """The text held back, as no stop string came."""
        held, self._held = self._held, ""
        return held

    def _stop(self, stop: str, text: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include_stop else text[: len(text) - len(stop)]


class _Pattern:
    """Knuth-Morris-Pratt: constant amortised time per character."""

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
        """Whether the pattern ends here."""
        matched, text = self.num_matched, self.text
        while matched and text[matched] != char:
            matched = self._fallback[matched]
        if text[matched] == char:
            matched += 1
        is_complete = matched == len(text)
        self.num_matched = self._fallback[matched] if is_complete else matched
        return is_complete
