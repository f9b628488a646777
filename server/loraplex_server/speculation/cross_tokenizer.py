"""Draft models of another tokenizer: drafts by way of text, recoded between two vocabularies.

Tokenizers do not commute with cutting a text, so every cut is made where both sides see a border, some way behind the
beginning of what is encoded: prefixes that tokenizers add, and words that were cut, stay outside. Where none is found
the tokens are put together anyhow: a draft that is worse costs acceptance, never a text.

Special tokens have no text. Those that both vocabularies spell alike go over as what they are, others are left out.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Collection, Sequence

from loraplex_server.speculation.draft_model import Drafter, DraftModelProposer, num_tokens_of
from loraplex_server.speculation.draft_rows import DraftRequest
from loraplex_server.speculation.proposer import UNIVERSAL, Ask
from loraplex_server.text.detokenizer import REPLACEMENT
from loraplex_server.text.tokenizer import TextTokenizer
from loraplex_server.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)

_MAX_RATIO = 4.0  # draft tokens for one of the target's
# Characters at the end of the text that are encoded again as it grows; borders are looked for behind the margin.
_WINDOW, _MARGIN = 96, 32
# Characters, or tokens, in front of what is encoded or decoded, for its context.
_CONTEXT = 48
# Known tokens by which the place of a draft is recognised, and how far from where it should be.
_MATCH = 3
_MAX_HELD = 8  # tokens without text
_Spans = list[tuple[int, int, int]]


class Recoder:
    """A target vocabulary and a draft model's vocabulary."""

    def __init__(self, target: Vocabulary, draft: Vocabulary, draft_prefix: Sequence[int]) -> None:
        """`draft_prefix`: what the draft model's texts begin with, `<s>` as a rule."""
        self.target = target
        self.draft = draft
        self.draft_prefix = tuple(draft_prefix)
        self.draft_specials = frozenset(draft.special_ids.values())
        specials = target.special_ids
        # Special tokens of the target by id, with the text that stands for them.
        self.text_of_special = {
            token_id: content if content in draft.special_ids else "" for content, token_id in specials.items()
        }

    def draft_tokens(self, text: str) -> tuple[list[int], list[int]]:
        """The draft model's tokens of a whole text, and where each starts."""
        spans = self.draft.spans(text)
        ids = [token_id for token_id, _, _ in spans]
        starts = [start for _, start, _ in spans]
        if ids[: len(self.draft_prefix)] != list(self.draft_prefix):
            ids = [*self.draft_prefix, *ids]
            starts = [*(-1 for _ in self.draft_prefix), *starts]
        return ids, starts

    def target_tokens(self, known: str, known_ids: Sequence[int], num_held: int, text: str) -> list[int]:
        """`text` as the target's tokens where it follows the text `known`.

        `known_ids` are the last ones that are known; `num_held` of them have no text in `known` yet, and come out of
        `text` once more.
        """
        before = known[-_CONTEXT:]
        spans = self.target.spans(before + text)
        border, is_across = _border(spans, len(before))
        place = _place_behind([token_id for token_id, _, _ in spans], known_ids, border + num_held)
        if place is None and num_held:
            return []
        if place is None and is_across:
            # A line's end joins with hardly anything.
            spans = self.target.spans("\n" + text)
            border, is_across = _border(spans, 1)
            if is_across:
                spans, border = self.target.spans(text), 0
        return [token_id for token_id, _, _ in spans[border if place is None else place :]]


class RecodedText:
    """One sequence's text, from the target's tokens. `ids` are the draft model's tokens for the same text."""

    def __init__(self, recoder: Recoder, token_ids: Sequence[int]) -> None:
        self._recoder = recoder
        self._out: list[int] = []  # the last of the target's tokens whose text is complete, special ones excepted
        self._held: list[int] = []  # tokens behind them that end in a part of a character
        text = self._text_of(token_ids)
        self.ids, self._starts = recoder.draft_tokens(text)  # one start per id, in characters
        self._num_chars = len(text)
        self._tail = text[-_WINDOW - _CONTEXT :]
        self._num_seen = len(token_ids)
        self._num_same = 0

    @property
    def num_settled(self) -> int:
        """The number of `ids` that stay whatever follows."""
        return bisect_left(self._starts, self._num_chars - _WINDOW)

    @property
    def ratio(self) -> float:
        """The draft model's tokens for one of the target's."""
        return len(self.ids) / max(1, self._num_seen)

    def take_num_same(self) -> int:
        """The number of `ids` that have not changed since the last call."""
        num_same, self._num_same = self._num_same, len(self.ids)
        return num_same

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes in the target's tokens as they are now: those of the last time and any number behind them."""
        text = self._text_of(token_ids[self._num_seen :])
        self._num_seen = len(token_ids)
        if text:
            self._append(text)

    def proposal(self, drafted: Sequence[int]) -> list[int]:
        """`drafted`, the draft model's tokens behind the text, as the target's tokens."""
        before = self.ids[-_CONTEXT:]
        text = added_text(self._recoder.draft, before, drafted)
        if not text:
            return []
        return self._recoder.target_tokens(self._tail, self._out + self._held, len(self._held), text)

    def _text_of(self, fresh: Sequence[int]) -> str:
        """The text of the target's next tokens."""
        specials = self._recoder.text_of_special
        parts: list[str] = []
        start = 0
        for idx, token_id in enumerate(fresh):
            if token_id in specials:
                parts += (self._text_of_run(fresh[start:idx]), specials[token_id])
                start = idx + 1
                self._out, self._held = [], []
        parts.append(self._text_of_run(fresh[start:]))
        return "".join(parts)

    def _text_of_run(self, fresh: Sequence[int]) -> str:
        """The text of the target's next tokens, none of which is special."""
        if not fresh:
            return ""
        vocabulary, out, held = self._recoder.target, self._out, [*self._held, *fresh]
        num_out, text = len(held), added_text(vocabulary, out, held)
        if vocabulary.decode([*out, *held]).endswith(REPLACEMENT):
            # Bytes of a character that is not finished. They may hide those in front of them, so the tokens before
            # them are what has the most text.
            shorter = range(len(held), max(0, len(held) - _MAX_HELD) - 1, -1)
            texts = {end: added_text(vocabulary, out, held[:end]) for end in shorter}
            num_out = max(texts, key=lambda end: (len(texts[end]), -end))
            text = texts[num_out]
            if len(held) - num_out >= _MAX_HELD:
                num_out = len(held)  # no character has so many: this is something else
        self._held = held[num_out:]
        self._out = [*out, *held[:num_out]][-_CONTEXT:]
        while self._out and (vocabulary.byte(self._out[0]) or 0) & 0xC0 == 0x80:
            del self._out[0]  # the rest of a character would spoil all the bytes behind it
        return text

    def _append(self, text: str) -> None:
        """Appends text. Tokens near the old end may come out differently now."""
        end = self._num_chars
        self._num_chars += len(text)
        tail = self._tail + text
        self._tail = tail[-_WINDOW - _CONTEXT :]
        if end <= _WINDOW:
            self.ids, self._starts = self._recoder.draft_tokens(tail)
            self._num_same = 0
            return
        start = end - _WINDOW
        spans = self._recoder.draft.spans(tail[len(tail) - len(text) - _WINDOW :])
        place, spans = self._splice(spans, start, end)
        if place is None:
            place, start, spans = len(self.ids), end, self._recoder.draft.spans(text)
        self.ids[place:] = [token_id for token_id, _, _ in spans]
        self._starts[place:] = [start + first for _, first, _ in spans]
        self._num_same = min(self._num_same, place)

    def _splice(self, spans: _Spans, start: int, end: int) -> tuple[int | None, _Spans]:
        """Joins the text's new tokens from `start` on to the old ones, which go up to `end`. Returns an index into the
        old ones, and the new ones that come behind it."""
        for idx, (_, first, _) in enumerate(spans):
            at = start + first
            if first < _MARGIN:
                continue
            if at >= end:
                return (len(self.ids), spans[idx:]) if at == end else (None, [])
            place = bisect_left(self._starts, at)
            if place < len(self._starts) and self._starts[place] == at:
                return place, spans[idx:]
        return None, []


def added_text(vocabulary: Vocabulary, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text that tokens add to the text of those before them, without an incomplete character at its end."""
    start = vocabulary.decode(before).rstrip(REPLACEMENT)
    text = vocabulary.decode([*before, *token_ids]).rstrip(REPLACEMENT)
    return text[len(start) :] if text.startswith(start) else ""


def _border(spans: _Spans, border: int) -> tuple[int, bool]:
    """Number of tokens that start before `border`, and whether one lies across it."""
    idx = bisect_left(spans, border, key=lambda span: span[1])
    return idx, idx > 0 and spans[idx - 1][2] > border


def _place_behind(ids: Sequence[int], known_ids: Sequence[int], expected: int) -> int | None:
    """The index in `ids` behind the last of `known_ids`, near to `expected`; None when these do not come out."""
    last = list(known_ids[-_MATCH:])
    if not last:
        return None
    for distance in range(_MATCH):
        for place in {expected + distance, expected - distance}:
            if len(last) <= place <= len(ids) and list(ids[place - len(last) : place]) == last:
                return place
    return None


def prefix_of(encoded: Sequence[int], plain: Sequence[int]) -> tuple[int, ...]:
    """The special tokens that a tokenizer puts in front of a text: in front of `plain` within `encoded`."""
    for start in range(len(encoded) - len(plain) + 1):
        if list(encoded[start : start + len(plain)]) == list(plain):
            return tuple(encoded[:start])
    return ()


class UniversalProposer(DraftModelProposer):
    """Drafts by way of text: the draft model has another vocabulary. Both tokenizers have text."""

    name = UNIVERSAL

    def __init__(
        self,
        drafter: Drafter,
        *,
        target_tokenizer: TextTokenizer,
        draft_tokenizer: TextTokenizer,
        num_target_ids: int,
        eos_token_ids: Collection[int],
    ) -> None:
        super().__init__(drafter, num_target_ids=num_target_ids, eos_token_ids=eos_token_ids)
        target, draft = target_tokenizer.vocabulary, draft_tokenizer.vocabulary
        assert target is not None, "drafting by way of text needs the target's tokenizer"
        assert draft is not None, "drafting by way of text needs the draft model's tokenizer"
        plain = draft_tokenizer.encode("a", add_special_tokens=False)
        self._recoder = Recoder(target, draft, prefix_of(draft_tokenizer.encode("a"), plain))
        self._draft_eos_ids = draft_tokenizer.eos_token_ids | frozenset(drafter.loaded.spec.eos_token_ids)
        self._draft_stop_ids = self._recoder.draft_specials | self._draft_eos_ids
        self._texts: dict[str, RecodedText | None] = {}  # None: recoding failed

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        texts = [self._text(ask) for ask in asks]
        requests = [self._request_of_text(ask, text) for ask, text in zip(asks, texts, strict=True) if text is not None]
        found = iter(self.drafter.draft(requests))
        return [
            self._proposal(ask, text, next(found)) if text is not None else ()
            for ask, text in zip(asks, texts, strict=True)
        ]

    def end(self, sequence_id: str) -> None:
        self._texts.pop(sequence_id, None)
        super().end(sequence_id)

    def close(self) -> None:
        self._texts.clear()
        super().close()

    def _text(self, ask: Ask) -> RecodedText | None:
        """The sequence's text up to its last token; None when no draft can come."""
        candidate = ask.candidate
        sequence_id = candidate.sequence_id
        if num_tokens_of(ask) < 1 or self.drafter.rows.has_refused(sequence_id):
            return None
        try:
            if sequence_id not in self._texts:
                self._texts[sequence_id] = RecodedText(self._recoder, candidate.token_ids)
            text = self._texts[sequence_id]
            if text is not None:
                text.extend(candidate.token_ids)
        except Exception as error:  # a tokenizer may fail on an arbitrary text
            self._give_up(sequence_id, error)
            return None
        # A text of special tokens alone may be empty in the other vocabulary.
        return text if text is not None and text.ids else None

    def _request_of_text(self, ask: Ask, text: RecodedText) -> DraftRequest:
        request = ask.candidate.request
        return DraftRequest(
            sequence_id=ask.candidate.sequence_id,
            token_ids=text.ids,
            num_tokens=math.ceil(num_tokens_of(ask) * min(text.ratio, _MAX_RATIO)),
            num_same=text.take_num_same(),
            num_settled=text.num_settled,
            stop_ids=self._draft_stop_ids,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
        )

    def _proposal(self, ask: Ask, text: RecodedText, drafted: Sequence[int]) -> tuple[int, ...]:
        if not drafted:
            return ()
        ends = drafted[-1] in self._draft_eos_ids
        spoken = drafted[:-1] if drafted[-1] in self._draft_stop_ids else drafted
        try:
            found = text.proposal(spoken)
        except Exception as error:
            self._give_up(ask.candidate.sequence_id, error)
            return ()
        if ends and (found or not spoken):
            found += sorted(ask.candidate.request.stopping.ending_ids(self._eos_token_ids) & self._eos_token_ids)[:1]
        return self._within_vocabulary(found)[: num_tokens_of(ask)]

    def _give_up(self, sequence_id: str, error: Exception) -> None:
        fields = {"proposer": self.name, "error_type": type(error).__name__}
        message = "no drafts for %s: its text cannot be put into the other vocabulary: %s"
        log.warning(message, sequence_id, error, extra=fields)
        self._texts[sequence_id] = None
