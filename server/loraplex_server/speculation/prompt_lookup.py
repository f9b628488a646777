"""Prompt lookup proposer: continues earlier occurrences of the last tokens.

Appending a token costs a few dictionary operations, nothing is rebuilt, and the tokens themselves stay with the
scheduler. What a sequence has written goes into the history when it ends, where later ones of the same adapter, tenant
and cache salt look too, and no others.

Where a copy comes to a separator that comes out as another token (see Separators), it goes on: behind a value in the
earlier output that the sequence follows, behind a key with the prompt's value, or else with the token that came
instead. How likely a draft is right is the policy's to learn, from its sources and the length of its match.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from loraplex_contracts.plan import Candidate
from loraplex_contracts.request import SpeculationParams
from loraplex_server.speculation.history import MAX_MATCH, MIN_RUN, TOKEN_BITS, History, Outputs, Reader, Separators
from loraplex_server.speculation.proposer import PROMPT_LOOKUP, Ask, Piece, Proposer

# Measured on records whose answers copy names and numbers out of the prompt: nothing above 4 changes a draft, and a
# floor of 2 misses the first token of most copies. Single tokens pay because of the rule in `Match`.
DEFAULT_MIN_NGRAM = 1
DEFAULT_MAX_NGRAM = 4
# Longer bounds are met by looking at the tokens before the match: an index of every length up to 64 would cost more
# than it tells.
MAX_INDEXED_NGRAM = 8
# Runs that end in the last this many tokens can be found, and up to twice as many: some 400 bytes each.
WINDOW = 16_384

# A copy of so many tokens is not by chance: the prompt's next token is a separator then.
MIN_COPIED = 3

_FEW = 8


# Where the tokens of a draft come from. Its beginning: the sequence's own text, earlier outputs, or the place in one of
# them that the sequence left a little before. Behind that: an earlier output behind a value, the prompt's value behind
# a key, or the token that replaces a separator.
Source = Literal["own", "history", "resumed", "behind", "value", "separator"]
_STARTS: frozenset[Source] = frozenset(("own", "history", "resumed"))
_EARLIER: frozenset[Source] = frozenset(("history", "resumed", "behind"))  # whose positions are in earlier outputs


class Known(NamedTuple):
    """Texts that a draft is made of."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    names: Mapping[int, int]  # tokens that stand once in the prompt, and the position behind them
    separators: Separators
    outputs: Outputs | None  # earlier ones


class Match(NamedTuple):
    """A place where the sequence's last tokens stood before: the longest run of them, and of its places the latest.

    A single token is a match only where it stands once in the prompt: names and numbers do, and are copied; of words
    that stand everywhere, or that the completion itself has repeated, one alone says nothing. In earlier outputs it is
    one only where `history.Reader` resumes.
    """

    position: int  # of the token that followed
    num_tokens: int  # how many tokens before agree, MAX_MATCH at most: the more, the likelier is what followed
    source: Source = "own"


class PromptLookupProposer(Proposer):
    """Drafts by copying. Owns an index per sequence that it has been asked for, and what those have written."""

    name = PROMPT_LOOKUP
    prior = (0.3, 0.4, 0.7, 0.8)  # a draft's first tokens are as likely as its match is long
    is_free = True
    starts = _STARTS

    def __init__(self, window: int = WINDOW, history: History | None = None) -> None:
        self._window = window
        self._history = history or History(0)
        self._texts: dict[str, _Text] = {}

    def match(self, candidate: Candidate, params: SpeculationParams) -> Match | None:
        """The match that a draft would continue; None where there is no draft."""
        return self._text(candidate, params).match

    def pieces(self, ask: Ask) -> tuple[Piece, ...]:
        return self._composed(self._text(ask.candidate, ask.params), ask.num_tokens)[1]

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        return [
            self._composed(self._text(ask.candidate, ask.params), ask.num_tokens)[0][: ask.num_tokens] for ask in asks
        ]

    def end(self, sequence_id: str) -> None:
        """Puts the sequence's output into the history."""
        text = self._texts.pop(sequence_id, None)
        if text is not None:
            candidate = text.candidate
            self._history.add(text.namespace, candidate.token_ids, candidate.num_prompt_tokens, text.separators)

    def close(self) -> None:
        self._texts.clear()
        self._history.clear()

    def _text(self, candidate: Candidate, params: SpeculationParams) -> _Text:
        """The sequence's state, with all its tokens indexed and their match."""
        text = self._texts.get(candidate.sequence_id)
        num_tokens = len(candidate.token_ids)
        if text is not None and text.params is params and text.index.num_indexed == num_tokens:
            return text
        bounds = _bounds(params) if text is None or text.params is not params else text.index.bounds
        namespace = text.namespace if text is not None else _namespace(candidate)
        outputs = self._history.outputs(namespace) if self._history.num_namespaces else None
        if text is None or text.index.bounds != bounds or text.index.num_indexed > num_tokens:
            index = _Index(bounds, candidate.num_prompt_tokens, self._window)
            separators = outputs.separators if outputs is not None else Separators()
            text = self._texts[candidate.sequence_id] = _Text(index, Reader(), separators, namespace, candidate, params)
        num_known = max(text.index.num_indexed, candidate.num_prompt_tokens)
        text.candidate, text.params, text.outputs = candidate, params, outputs
        if text.draft is not None:
            self._review(text, *text.draft, num_known)
        text.separators.write(candidate.token_ids[num_known:])
        text.index.extend(candidate.token_ids)
        own = text.index.find(candidate.token_ids)
        if own is not None:
            self._learn(text, own)
        text.match = self._better(own, text, bounds)
        text.draft = None
        return text

    def _review(self, text: _Text, drafted: Sequence[int], pieces: Sequence[Piece], start: int) -> None:
        """Learns from the last draft, which began at `start`: how far the sequence has come in the earlier outputs, and
        what came in place of the token at which it left the prompt."""
        token_ids = text.candidate.token_ids
        for piece in pieces:
            num_left = min(piece.num_tokens, len(token_ids) - start)
            num_right = 0
            while num_right < num_left and drafted[num_right] == token_ids[start + num_right]:
                num_right += 1
            position, start = piece.position + num_right, start + num_right
            if piece.source in _EARLIER:
                if num_right:
                    text.reader.move(position, start)
            elif (
                num_right < num_left
                and num_right + piece.evidence >= MIN_COPIED
                and position < text.candidate.num_prompt_tokens
            ):
                text.separators.learn(token_ids[position], token_ids[start])
            if num_right < piece.num_tokens:
                break
            drafted = drafted[num_right:]

    def _learn(self, text: _Text, own: Match) -> None:
        """Learns the separator in front of what is being copied out of the prompt."""
        token_ids = text.candidate.token_ids
        there, here = own.position - 1 - own.num_tokens, len(token_ids) - 1 - own.num_tokens
        if there >= 0 and own.position <= text.candidate.num_prompt_tokens <= here:
            text.separators.learn(token_ids[there], token_ids[here])

    def _better(self, own: Match | None, text: _Text, bounds: tuple[int, int]) -> Match | None:
        """The longer match; of equal ones the sequence's own, except where it is a single token: a place says more."""
        place = text.reader.find(text.outputs, text.candidate.token_ids) if text.outputs is not None else None
        if place is None or place.num_tokens < bounds[0] or bounds[1] < MIN_RUN:
            return own
        if own is not None and own.num_tokens >= max(place.num_tokens, MIN_RUN):
            return own
        return Match(place.position, place.num_tokens, "resumed" if place.is_resumed else "history")

    def _composed(self, text: _Text, num_tokens: int) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
        """A draft of `num_tokens` tokens or more, and its pieces. Made once per step."""
        if text.draft is None or text.num_composed < num_tokens:
            text.num_composed = num_tokens
            text.draft = ((), ())
            if text.match is not None:
                position, evidence, source = text.match
                tokens, num_prompt = text.candidate.token_ids, text.candidate.num_prompt_tokens
                known = Known(tokens, num_prompt, text.index.names, text.separators, text.outputs)
                own, place = (position, text.reader.position) if source == "own" else (None, position)
                text.draft = compose(known, source, evidence, own, place, num_tokens)
        return text.draft


def _namespace(candidate: Candidate) -> tuple[str, str, str]:
    """The sequences that share a history: those of one tenant, cache salt and adapters."""
    request = candidate.request
    return request.tenant, request.cache_salt, request.adapter_name


def _bounds(params: SpeculationParams) -> tuple[int, int]:
    """Shortest and longest length of a match. A parameter that is 0 means its default, which gives way to the other."""
    longest = params.max_ngram or max(DEFAULT_MAX_NGRAM, params.min_ngram)
    shortest = params.min_ngram or min(DEFAULT_MIN_NGRAM, longest)
    return shortest, longest


@dataclass(slots=True)
class _Text:
    """One sequence's state. The candidate's tokens go on growing until the sequence ends."""

    index: _Index
    reader: Reader
    separators: Separators  # shared by all of its namespace
    namespace: tuple[str, str, str]
    candidate: Candidate
    params: SpeculationParams
    outputs: Outputs | None = None
    match: Match | None = None
    draft: tuple[tuple[int, ...], tuple[Piece, ...]] | None = None
    num_composed: int = 0


class _Index:
    """The last end of each run of 1 to `MAX_INDEXED_NGRAM` tokens of one sequence, as far as something followed it.

    Keys are the tokens of a run packed into one integer: exact, and unlike tuples of no interest to the collector.
    Two generations: when the young one has a window's worth of tokens, it becomes the old one, and the old one goes.
    """

    def __init__(self, bounds: tuple[int, int], num_prompt_tokens: int, window: int) -> None:
        self.bounds = bounds
        self.num_indexed = 0  # runs that end before this position, and the token there, are in
        self._shortest = min(bounds[0], MAX_INDEXED_NGRAM)
        self._longest = min(bounds[1], MAX_INDEXED_NGRAM)
        self._num_prompt_tokens = num_prompt_tokens
        self._window = window
        self._names: dict[int, int] | None = None
        self._young = self._new_generation()
        self._old = self._new_generation()
        self._num_young = 0

    @property
    def names(self) -> Mapping[int, int]:
        """Tokens that stand once in the prompt, and the position behind them."""
        return self._names or {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes in what has been appended since. A run is in once it is known what followed."""
        if self._names is None:
            self._names = self._find_names(token_ids)
        end = len(token_ids)
        begin = max(self.num_indexed, 1, end - 2 * self._window)
        while begin < end:
            upto = min(end, begin + self._window - self._num_young)
            self._add(token_ids, begin, upto)
            self._num_young += upto - begin
            if self._num_young == self._window:
                self._old, self._young = self._young, self._new_generation()
                self._num_young = 0
            begin = upto
        self.num_indexed = end

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """The longest run that ends the sequence and stood in it before."""
        end = len(token_ids)
        num_tokens, position, key = 0, 0, 0
        for length in range(1, min(self._longest, end - 1) + 1):
            key |= token_ids[end - length] << (TOKEN_BITS * (length - 1))
            if length < self._shortest:
                continue
            if length == 1:
                found = self._names.get(key) if self._names else None
                if found == end:  # nothing has followed it yet
                    found = None
            else:
                found = self._young[length].get(key) or self._old[length].get(key)
            if found is not None:
                num_tokens, position = length, found
            elif length > 1:
                break  # what has not stood here has not stood here with one token more
        if not num_tokens:
            return None
        most = min(MAX_MATCH, position)
        while num_tokens < most and token_ids[position - 1 - num_tokens] == token_ids[end - 1 - num_tokens]:
            num_tokens += 1
        return Match(position, num_tokens) if num_tokens >= self.bounds[0] else None

    def _add(self, token_ids: Sequence[int], begin: int, end: int) -> None:
        """Adds the runs that end before positions `begin` to `end`, of every length: later ones replace earlier
        ones."""
        if end - begin <= _FEW:
            self._add_few(token_ids, begin, end)
            return
        keys = list(token_ids[begin - 1 : end - 1])
        positions = list(range(begin, end))  # one integer for all lengths
        for length in range(2, min(self._longest, end - 1) + 1):
            # The sequence's first positions have no run of that length before them.
            first = max(begin, length)
            added = token_ids[first - length : end - length]
            shift = TOKEN_BITS * (length - 1)
            keys = [key | token_id << shift for key, token_id in zip(keys[-len(added) :], added, strict=True)]
            if length >= self._shortest:
                self._young[length].update(zip(keys, islice(positions, first - begin, None), strict=True))

    def _add_few(self, token_ids: Sequence[int], begin: int, end: int) -> None:
        """Does what `_add` does, for the few tokens of a step: with these, lists of keys are most of the work."""
        for position in range(begin, end):
            key = token_ids[position - 1]
            for length in range(2, min(self._longest, position) + 1):
                key |= token_ids[position - length] << (TOKEN_BITS * (length - 1))
                if length >= self._shortest:
                    self._young[length][key] = position

    def _find_names(self, token_ids: Sequence[int]) -> dict[int, int]:
        if self._shortest > 1:
            return {}
        prompt = token_ids[: self._num_prompt_tokens]
        counts = Counter(prompt)
        return {token_id: idx + 1 for idx, token_id in enumerate(prompt) if counts[token_id] == 1}

    def _new_generation(self) -> list[dict[int, int]]:
        return [{} for _ in range(self._longest + 1)]


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
            # Where earlier outputs go on behind the value that stands at `place` there.
            end = (
                known.outputs.next_of(place, known.separators.ends)
                if known.outputs is not None and place is not None
                else None
            )
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
    """The tokens that follow in the sequence's own text, and the position of the separator that ends them."""
    run = known.token_ids[position : position + room]
    num_prompt = known.num_prompt_tokens - position
    if num_prompt > 0:
        num_copied = known.separators.first(run[:num_prompt])
        if num_copied < min(len(run), num_prompt):
            return run[:num_copied], position + num_copied
    return (run if len(run) == room else continuation(known.token_ids, position, room)), None


def _earlier_run(
    known: Known, place: int, room: int, last: int, *, is_behind: bool
) -> tuple[Sequence[int], int | None]:
    """The tokens that follow in an earlier output, up to a value out of the prompt, and that one's position: behind
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
    """The tokens that follow if the text repeats itself from `position` on; past its end, the repeated ones again."""
    copied = tuple(token_ids[position : position + num_tokens])
    period = len(token_ids) - position
    if num_tokens <= period or not copied:
        return copied
    return (copied * (num_tokens // period + 1))[:num_tokens]
