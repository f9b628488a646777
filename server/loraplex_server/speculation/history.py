"""Earlier outputs, indexed for prompt lookup.

Kept in memory only. A namespace is an adapter, a tenant and a cache salt, as for the prefix cache: nothing is ever
found across namespaces, and within one an earlier output changes no text, only how soon it comes (and what `usage`
counts as drafted and accepted).

At most `num_tokens` tokens in one namespace and `MAX_FULL` times that in all, in `MAX_NAMESPACES` namespaces; what was
used least recently goes first. A token takes some 25 bytes in texts that repeat each other, 160 where no two runs are
equal, never 200: with 16,384 tokens that is at most 3.3 MB a namespace and 210 MB in all, and 0.2 MB a namespace for
its separators.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

MAX_NAMESPACES = 256
MAX_FULL = 64

# Tokens of the prompt that are kept before each output: they tell how outputs begin.
NUM_CONTEXT = 4
# Length of the runs that are looked up: single tokens stand everywhere.
MIN_RUN = 2
# The places that are compared, latest first, and how far back; the best one is followed back to MAX_MATCH. Together
# they bound what a search costs.
MAX_PLACES = 32
MAX_COMPARED = 8
MAX_MATCH = 64
# Distance behind the place that was followed within which the next token may stand.
MAX_SKIP = 64

_END = -1  # of an output; no token
TOKEN_BITS = 32  # of a token's id, in keys of several
MAX_SEPARATORS = 2048  # tokens of which something is remembered, some 100 bytes each; then it starts over
_WRITTEN = -1


class Place(NamedTuple):
    """A place in earlier outputs that may go on as the sequence does."""

    position: int  # of the token that followed
    num_tokens: int  # how many tokens before agree, MAX_MATCH at most
    is_resumed: bool  # see Reader


class Separators:
    """Tokens of prompts in place of which outputs write others, learned where a copy begins or ends. A token that an
    output has written itself is not a separator: it may be copied."""

    def __init__(self) -> None:
        self._instead: dict[int, int] = {}  # by token of prompts; _WRITTEN: outputs have it too
        self.ends: set[int] = set()  # tokens that came in place of others: what ends a value

    def is_separator(self, token_id: int) -> bool:
        return self._instead.get(token_id, _WRITTEN) != _WRITTEN

    def instead(self, token_id: int) -> int:
        """The token that came in place of that separator the last time."""
        return self._instead[token_id]

    def first(self, token_ids: Sequence[int]) -> int:
        """The index of the first token that would not be copied, or how many there are."""
        known = self._instead
        for idx, token_id in enumerate(token_ids):
            if known.get(token_id, _WRITTEN) != _WRITTEN:
                return idx
        return len(token_ids)

    def learn(self, token_id: int, came: int) -> None:
        """Learns that next to tokens that were copied, `came` stands where the prompt has `token_id`."""
        if self._instead.get(token_id, 0) != _WRITTEN:
            self._instead[token_id] = came
            self.ends.add(came)

    def write(self, token_ids: Iterable[int]) -> None:
        """Marks tokens that an output has written."""
        known = self._instead
        if len(known) > MAX_SEPARATORS:
            known.clear()
            self.ends.clear()
        for token_id in token_ids:
            came = known.get(token_id)
            if came != _WRITTEN:
                known[token_id] = _WRITTEN
                if came is not None:
                    self.ends.discard(came)


class History:
    """Earlier outputs by namespace. With `num_tokens` 0 it remembers nothing."""

    def __init__(self, num_tokens: int) -> None:
        self._max_tokens = num_tokens
        self._outputs: OrderedDict[Hashable, Outputs] = OrderedDict()  # least recently used first
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all namespaces, the ends of outputs included."""
        return self._num_tokens

    @property
    def num_namespaces(self) -> int:
        return len(self._outputs)

    def add(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        separators: Separators | None = None,
    ) -> None:
        """Adds the output of a sequence of that namespace that has ended. Takes about a microsecond a token.
        `separators`: kept where it was the first."""
        if len(token_ids) <= num_prompt_tokens or self._max_tokens <= 0:
            return
        outputs = self._outputs.get(namespace)
        if outputs is None:
            outputs = self._outputs[namespace] = Outputs(self._max_tokens, separators)
        self._outputs.move_to_end(namespace)
        num_before = len(outputs)
        outputs.add(token_ids, num_prompt_tokens)
        self._num_tokens += len(outputs) - num_before
        while self._num_tokens > self._max_tokens * MAX_FULL or len(self._outputs) > MAX_NAMESPACES:
            _, dropped = self._outputs.popitem(last=False)
            self._num_tokens -= len(dropped)

    def outputs(self, namespace: Hashable) -> Outputs | None:
        """The outputs of a namespace; None where nothing is known."""
        outputs = self._outputs.get(namespace)
        if outputs is not None:
            self._outputs.move_to_end(namespace)
        return outputs

    def clear(self) -> None:
        self._outputs.clear()
        self._num_tokens = 0


class Outputs:
    """One namespace's outputs, one behind the other. Positions count from the first one ever; the oldest are gone.

    A dictionary tells the latest place of each run of two tokens, and each place how far back the one before is.
    """

    def __init__(self, max_tokens: int, separators: Separators | None = None) -> None:
        self.separators = separators or Separators()
        self._max_tokens = max_tokens
        self._base = 0  # position of the first token that is still here
        self._tokens = array("i")
        self._gaps = array("i")  # by place, to the place before behind the same run; 0 for none
        self._latest: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Adds everything behind the prompt, as much as there is room for; if need be, without its beginning."""
        begin = max(0, num_prompt_tokens - NUM_CONTEXT, len(token_ids) - (self._max_tokens - 1))
        self._drop(len(self._tokens) + len(token_ids) - begin + 1 - self._max_tokens)
        # Only outputs are continued, but a run may begin in the prompt.
        first = max(begin + MIN_RUN, num_prompt_tokens)
        added = array("i", token_ids[begin:])
        added.append(_END)
        gaps = array("i", bytes(added.itemsize * len(added)))
        latest, base = self._latest, self._base + len(self._tokens)
        for idx in range(first - begin, len(added) - 1):
            key = added[idx - 2] << TOKEN_BITS | added[idx - 1]
            before = latest.get(key)
            if before is not None:
                gaps[idx] = base + idx - before
            latest[key] = base + idx
        self._tokens += added
        self._gaps += gaps

    def find(self, token_ids: Sequence[int]) -> Place | None:
        """The longest run, of two tokens at least, that ends the sequence and stood here; of its places the latest."""
        if len(token_ids) < MIN_RUN:
            return None
        position = self._latest.get(token_ids[-2] << TOKEN_BITS | token_ids[-1])
        if position is None:
            return None
        known, base, gaps = self._tokens, self._base, self._gaps
        tail = token_ids[: -MAX_COMPARED - 1 : -1]  # backwards
        best, num_best = position, 1
        for _ in range(MAX_PLACES):
            at = position - base - 1
            most = min(len(tail), at + 1)
            # A place that is no better than the best one so far mostly differs where that one ends.
            if most > num_best and known[at - num_best] == tail[num_best]:
                num_tokens = MIN_RUN
                while num_tokens < most and known[at - num_tokens] == tail[num_tokens]:
                    num_tokens += 1
                if num_tokens > num_best:
                    best, num_best = position, num_tokens
                    if num_best == len(tail):
                        break
            gap = gaps[at + 1]
            if gap == 0 or at + 1 - gap < MIN_RUN:
                break
            position -= gap
        return Place(best, self.agreeing(best, token_ids), is_resumed=False)

    def agreeing(self, position: int, token_ids: Sequence[int]) -> int:
        """Number of tokens before `position` that are those at the sequence's end, MAX_MATCH at most."""
        known, at, end = self._tokens, position - self._base - 1, len(token_ids) - 1
        num_tokens, most = 0, min(MAX_MATCH, at + 1, end + 1)
        while num_tokens < most and known[at - num_tokens] == token_ids[end - num_tokens]:
            num_tokens += 1
        return num_tokens

    def followed(self, position: int, token_ids: Sequence[int]) -> int:
        """The new `position` after the sequence has gone on like that, as far as it has."""
        known, at = self._tokens, position - self._base
        for token_id in token_ids:
            if not 0 <= at < len(known) or known[at] != token_id:
                break
            at += 1
        return at + self._base

    def behind_next(self, position: int, token_id: int) -> int | None:
        """The position behind the first `token_id` from `position` on, in the same output and not far."""
        found = self.next_of(position, (token_id,))
        return found + 1 if found is not None and self._tokens[found + 1 - self._base] != _END else None

    def next_of(self, position: int, token_ids: Collection[int]) -> int | None:
        """The position of the first of these tokens from `position` on, in the same output and not far."""
        known, at = self._tokens, position - self._base
        if at < 0:
            return None
        for idx in range(at, min(at + MAX_SKIP, len(known))):
            if known[idx] in token_ids:
                return idx + self._base
            if known[idx] == _END:
                break
        return None

    def continuation(self, position: int, num_tokens: int) -> tuple[int, ...]:
        """The tokens that followed, to the end of that output at most."""
        at = position - self._base
        copied = tuple(self._tokens[at : at + num_tokens]) if at >= 0 else ()
        return copied[: copied.index(_END)] if _END in copied else copied

    def _drop(self, num_tokens: int) -> None:
        """Drops the oldest tokens, and the runs that they were part of."""
        num_tokens = min(num_tokens, len(self._tokens))
        if num_tokens <= 0:
            return
        known, base, latest = self._tokens, self._base, self._latest
        for idx in range(MIN_RUN, min(num_tokens + MIN_RUN, len(known))):
            key = known[idx - 2] << TOKEN_BITS | known[idx - 1]
            if latest.get(key) == base + idx:
                del latest[key]
        del self._tokens[:num_tokens]
        del self._gaps[:num_tokens]
        self._base += num_tokens


class Reader:
    """One sequence's place in the earlier outputs.

    Outputs of one shape differ in their values: where the sequence left the output that it followed, it comes back to
    it behind the value. So a place is kept, and when the sequence's last token stands a little behind it, it is resumed
    there, though one token alone is no match: it knows which `", "` of many this one is.
    """

    def __init__(self) -> None:
        self._position: int | None = None
        self._num_seen = 0

    @property
    def position(self) -> int | None:
        """The sequence's position in the earlier outputs; none where it has left them."""
        return self._position

    def move(self, position: int, num_seen: int) -> None:
        """Moves to `position`, to which the sequence's first `num_seen` tokens have come by a way round a value."""
        self._position, self._num_seen = position, num_seen

    def find(self, outputs: Outputs, token_ids: Sequence[int]) -> Place | None:
        """The place in the outputs to continue. Called once for every length of the sequence."""
        found = outputs.find(token_ids)
        resumed = self._resumed(outputs, token_ids)
        # A run of two is as weak as that, and knows less.
        if found is None or (resumed is not None and found.num_tokens <= max(resumed.num_tokens, MIN_RUN)):
            found = resumed
        if found is not None and (found.is_resumed or self._position is None or found.num_tokens > MIN_RUN):
            self._position = found.position
        self._num_seen = len(token_ids)
        return found

    def _resumed(self, outputs: Outputs, token_ids: Sequence[int]) -> Place | None:
        if self._position is None:
            return None
        self._position = outputs.followed(self._position, token_ids[self._num_seen : -1])
        position = outputs.behind_next(self._position, token_ids[-1])
        if position is None:
            return None
        return Place(position, outputs.agreeing(position, token_ids), is_resumed=True)
