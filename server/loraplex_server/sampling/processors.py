"""Logits processors and warpers: one class for each sampling option.

Definitions and order are those of Transformers' `generate()`. Frequency and presence penalties, which it lacks, come
after its repetition penalty and look at the output only. A new option is a class here and its place in `processors`.
draw.py applies temperature, top-k, top-p and min-p, often without a look at all tokens; `Truncation` applies the last
three here only where a warper follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_contracts.plan import GrammarMatcher, NewSequence, Span
from loraplex_server.grammars.matcher import Bits, MaskThread, allowed_tokens
from loraplex_server.sampling.draw import DrawTable, truncate

# Elements of the table of counts at once. On a CPU several rounds in the cache are faster than one beyond it.
_MAX_ELEMENTS_CPU, _MAX_ELEMENTS = 1 << 19, 1 << 26

State = TypeVar("State")


class Part:
    """The samples of a step that use one option: rows of `scores`, whose positions are behind their histories."""

    def __init__(
        self,
        scores: Tensor,  # [num_samples, vocab_size] of all samples, changed in place
        members: list[int],  # indices of the samples in it
        rows: list[int],  # of the batch, one for each member
        positions: list[int],  # of the sampled tokens: a history ends before it
        tokens: Tensor,  # [max_rows, max_len] every row's tokens, drafts included
        upload: Callable[[Tensor], Tensor],  # to the device of the scores, without waiting for it
        drafts: Mapping[int, Sequence[int]],  # by row of the batch, where there are any; on the host
    ) -> None:
        self.scores = scores
        self.members = members
        self.rows = rows
        self.positions = positions
        self.upload = upload
        self.drafts = drafts
        self._tokens = tokens

    @cached_property
    def idx(self) -> Tensor:
        """`members` on the device."""
        return self.upload(torch.tensor(self.members))

    def column(self, values: Sequence[float]) -> Tensor:
        """One value for each member, `[n, 1]` as the scores."""
        return self.upload(torch.tensor(values, dtype=torch.float64).to(self.scores.dtype)).unsqueeze(1)

    def places(self, token_ids: Tensor) -> Tensor:
        """Indices into flattened scores of `token_ids [n, m]`."""
        return self.idx.unsqueeze(1) * self.scores.shape[1] + token_ids

    def flat_places(self, token_ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Indices into the scores, row by row, of any number of token ids for each member."""
        counts = torch.tensor([len(ids) for ids in token_ids])
        return self.upload(torch.tensor(self.members).repeat_interleave(counts)), self.upload(torch.cat([*token_ids]))

    def history(self) -> tuple[Tensor, Tensor]:
        """Token ids `[n, max_position]` of prompt and output, and a mask of those in the history."""
        longest = max(self.positions)
        ids = self._tokens[:, :longest].index_select(0, self._row_idx[0]).to(torch.int64)
        return ids, torch.arange(longest, device=ids.device) < self._row_idx[1].unsqueeze(1)

    def output(self, num_prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token ids `[n, max_output]` behind the prompts, and a mask of those in the history."""
        longest = max(position - start for position, start in zip(self.positions, num_prompt, strict=True))
        starts = self.upload(torch.tensor(num_prompt)).unsqueeze(1)
        places = starts + torch.arange(max(0, longest), device=starts.device)
        is_valid = places < self._row_idx[1].unsqueeze(1)
        places = places.clamp(max=self._tokens.shape[1] - 1)
        return self._tokens[self._row_idx[0].unsqueeze(1), places].to(torch.int64), is_valid

    def last_tokens(self, count: int) -> Tensor:
        """The last tokens of each history `[n, count]`; -1 before its beginning."""
        places = self._row_idx[1].unsqueeze(1) + torch.arange(-count, 0, device=self.scores.device)
        ids = self._tokens[self._row_idx[0].unsqueeze(1), places.clamp(min=0)].to(torch.int64)
        return ids.masked_fill_(places < 0, -1)

    @cached_property
    def _row_idx(self) -> Tensor:
        """`[2, n]` rows and positions on the device."""
        return self.upload(torch.tensor([self.rows, self.positions]))


class Processor(ABC, Generic[State]):
    """One option: its state for each row that uses it, and its change of their scores."""

    bans: ClassVar[bool] = False  # may remove all tokens

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._states: dict[int, State] = {}

    def set(self, row: int, sequence: NewSequence) -> bool:
        """Sets a cleared `row` for a sequence that enters it. True if the sequence uses the option."""
        state = self.state_of(sequence)
        if state is not None:
            self._states[row] = state
        return state is not None

    def clear(self, row: int) -> None:
        self._states.pop(row, None)

    def is_due(self, row: int, position: int) -> bool:
        """True if the option changes the scores of a row that uses it at `position`."""
        return True

    def run(self, part: Part) -> None:
        self.apply(part, [self._states[row] for row in part.rows])

    @abstractmethod
    def state_of(self, sequence: NewSequence) -> State | None:
        """The option's state for a sequence; None where the sequence does not use it."""

    @abstractmethod
    def apply(self, part: Part, states: list[State]) -> None:
        """Changes the members' scores in place, without waiting for the device. `states` are the members'."""

    def ids_within(self, token_ids: Sequence[int] | frozenset[int]) -> Tensor:
        """The ids that are in the vocabulary, ascending."""
        return torch.tensor(sorted(i for i in set(token_ids) if 0 <= i < self.vocab_size), dtype=torch.int64)


class LogitBias(Processor[tuple[Tensor, Tensor]]):
    """Adds to the logits of some tokens. State: token ids, values."""

    def state_of(self, sequence: NewSequence) -> tuple[Tensor, Tensor] | None:
        bias = [(token_id, value) for token_id, value in sequence.sampling.logit_bias if token_id < self.vocab_size]
        if not bias:
            return None
        ids, values = zip(*bias, strict=True)
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float64)

    def apply(self, part: Part, states: list[tuple[Tensor, Tensor]]) -> None:
        places = part.flat_places([ids for ids, _ in states])
        values = part.upload(torch.cat([values for _, values in states]))
        part.scores.index_put_(places, values.to(part.scores.dtype), accumulate=True)


class RepetitionPenalty(Processor[float]):
    """Divides positive and multiplies negative scores of tokens in prompt or output."""

    def state_of(self, sequence: NewSequence) -> float | None:
        penalty = sequence.sampling.repetition_penalty
        return None if penalty == 1.0 else penalty

    def apply(self, part: Part, states: list[float]) -> None:
        ids, is_valid = part.history()
        # Places past the history repeat its first token: duplicates write equal values.
        places = part.places(torch.where(is_valid, ids, ids[:, :1]))
        penalty, flat = part.column(states), part.scores.view(-1)
        old = flat[places]
        flat[places] = torch.where(old < 0, old * penalty, old / penalty)


class CountPenalties(Processor[tuple[float, float, int]]):
    """Subtracts the frequency penalty per occurrence in the output and the presence penalty once. State: both, and the
    prompt's length."""

    def state_of(self, sequence: NewSequence) -> tuple[float, float, int] | None:
        frequency, presence = sequence.sampling.frequency_penalty, sequence.sampling.presence_penalty
        return (frequency, presence, sequence.num_prompt_tokens) if frequency or presence else None

    def apply(self, part: Part, states: list[tuple[float, float, int]]) -> None:
        frequency, presence = part.column([one[0] for one in states]), part.column([one[1] for one in states])
        ids, is_valid = part.output([one[2] for one in states])
        if ids.shape[1] == 0:
            return
        # Places past the history stand for token 0, with its own count: duplicates write equal values.
        ids = ids.masked_fill(~is_valid, 0)
        weights = is_valid.to(part.scores.dtype)
        places, flat = part.places(ids), part.scores.view(-1)
        limit = _MAX_ELEMENTS_CPU if flat.device.type == "cpu" else _MAX_ELEMENTS
        chunk = max(1, limit // self.vocab_size)
        for start in range(0, len(ids), chunk):
            some = slice(start, start + chunk)
            counts = part.scores.new_zeros(len(ids[some]), self.vocab_size).scatter_add_(1, ids[some], weights[some])
            count = counts.gather(1, ids[some])
            flat[places[some]] = flat[places[some]] - frequency[some] * count - presence[some] * (count > 0)


class MinTokens(Processor[tuple[Tensor, int]]):
    """Bans end-of-sequence and stop tokens before min_tokens. State: their ids, the position where the ban ends."""

    bans = True

    def state_of(self, sequence: NewSequence) -> tuple[Tensor, int] | None:
        banned = self.ids_within(sequence.banned_until_min)
        return (
            (banned, sequence.num_prompt_tokens + sequence.min_tokens) if len(banned) and sequence.min_tokens else None
        )

    def is_due(self, row: int, position: int) -> bool:
        return position < self._states[row][1]

    def apply(self, part: Part, states: list[tuple[Tensor, int]]) -> None:
        part.scores.index_put_(part.flat_places([ids for ids, _ in states]), part.scores.new_full((), -torch.inf))


class BadWords(Processor[list[tuple[int, ...]]]):
    """Bans the last token of a sequence behind its other tokens. State: the sequences."""

    bans = True

    def state_of(self, sequence: NewSequence) -> list[tuple[int, ...]] | None:
        return [word for word in sequence.sampling.bad_words if max(word) < self.vocab_size] or None

    def apply(self, part: Part, states: list[list[tuple[int, ...]]]) -> None:
        words = [word for state in states for word in state]
        longest = max(map(len, words)) - 1
        padded = torch.tensor([(-2,) * (longest + 1 - len(word)) + word for word in words])
        owners = torch.arange(len(states)).repeat_interleave(torch.tensor([len(state) for state in states]))
        before, owners, padded = part.last_tokens(longest), part.upload(owners), part.upload(padded)
        prefixes = padded[:, :-1]
        matches = ((before.index_select(0, owners) == prefixes) | (prefixes == -2)).all(-1)
        bias = part.scores.new_zeros(len(words)).masked_fill_(matches, -torch.inf)
        part.scores.index_put_((part.idx.index_select(0, owners), padded[:, -1]), bias, accumulate=True)


class AllowedTokenIds(Processor[Tensor]):
    """Bans all tokens but some. State: their ids."""

    bans = True

    def state_of(self, sequence: NewSequence) -> Tensor | None:
        allowed = sequence.sampling.allowed_token_ids
        return self.ids_within(allowed) if allowed else None

    def apply(self, part: Part, states: list[Tensor]) -> None:
        places = part.flat_places(states)
        scores = part.scores[places]
        removed = part.scores.index_select(0, part.idx).sub_(torch.inf)  # NaN and inf give NaN: a bad row
        part.scores.index_copy_(0, part.idx, removed).index_put_(places, scores)


class GrammarMask(Processor[GrammarMatcher]):
    """Bans the tokens that cannot come next in the grammar. State: the sequence's matcher."""

    bans = True

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._thread = MaskThread()
        self._coming: dict[int, int] | None = None  # of rows whose masks the thread makes, the first mask
        self._made: tuple[dict[int, int], Bits] | None = None

    def state_of(self, sequence: NewSequence) -> GrammarMatcher | None:
        return sequence.matcher

    def begin(self, spans: Sequence[Span]) -> None:
        """Has the masks of a step's spans made, beside other work."""
        if not self._states:
            return
        self.end()
        jobs: list[tuple[GrammarMatcher, int, Sequence[int]]] = []
        firsts: dict[int, int] = {}
        num_masks = 0
        for span in spans:
            if span.num_samples and (matcher := self._states.get(span.row)) is not None:
                firsts[span.row] = num_masks
                jobs.append((matcher, num_masks, span.draft))
                num_masks += span.num_samples
        if jobs:
            self._thread.start(jobs, num_masks)
            self._coming = firsts

    def end(self) -> None:
        """Lets go of the masks, when the step is over."""
        if self._coming is not None:
            self._take()
        self._made = None

    def _take(self) -> None:
        assert self._coming is not None
        firsts, self._coming = self._coming, None
        self._made = firsts, self._thread.wait()

    def masks(self, rows: Sequence[int], drafts: Mapping[int, Sequence[int]]) -> Bits:
        """The masks of samples; `rows`: the row of each. A row's samples follow each other: behind its last token, then
        behind each of its draft tokens."""
        firsts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1]]
        if self._coming is not None:
            self._take()
        if self._made is not None and all(rows[first] in self._made[0] for first in firsts):
            of_rows, bits = self._made
            places = [of_rows[row] + i - first for first, row, i in _in_runs(rows)]
            return bits if places == list(range(len(bits))) else bits[places]
        jobs = [(self._states[rows[first]], first, drafts.get(rows[first], ())) for first in firsts]
        return allowed_tokens(jobs, len(rows))

    def apply(self, part: Part, states: list[GrammarMatcher]) -> None:
        bits = self.masks(part.rows, part.drafts)
        if part.scores.device.type == "cpu":
            rows = slice(None) if len(part.members) == len(part.scores) else part.members
            scores = part.scores.numpy()
            with np.errstate(invalid="ignore"):  # NaN and inf give NaN: a bad row
                scores[rows] -= removed_by(bits, self.vocab_size).astype(scores.dtype, copy=False)
            return
        is_allowed = unpack_bits(part.upload(torch.from_numpy(bits)), self.vocab_size)
        scores = part.scores.index_select(0, part.idx)
        removed = scores - torch.inf  # as above
        part.scores.index_copy_(0, part.idx, torch.where(is_allowed, scores, removed))


def _in_runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Each place with its row, and the place at which the run of that row begins."""
    first = 0
    for i, row in enumerate(rows):
        if row != rows[first]:
            first = i
        yield first, row, i


# [256, 8] float32: infinity where a bit of a byte, the lowest first, is 0.
_REMOVED_BY_BYTE: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little"), 0.0, np.inf
).astype(np.float32)


def removed_by(words: NDArray[np.int32], num_bits: int) -> NDArray[np.float32]:
    """`[n, num_bits]` for `words [n, num_words]`: infinity where a bit is 0, the lowest bit of each word first. A byte
    at a time: for random bits a twentieth of the time of `torch.where`."""
    parts = _REMOVED_BY_BYTE.take(words.view(np.uint8), axis=0, mode="clip")
    return parts.reshape(len(words), -1)[:, :num_bits]


def unpack_bits(words: Tensor, num_bits: int) -> Tensor:
    """`[n, num_bits]` bool of `words [n, num_words]` int32, the lowest bit of each first; on their device."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, :num_bits]


class Warper(Processor[tuple[float, float]]):
    """An option on the probabilities after temperature, top-k, top-p and min-p. State: the temperature, the option's
    value."""

    def state_of(self, sequence: NewSequence) -> tuple[float, float] | None:
        value = None if sequence.sampling.is_greedy else self.value_of(sequence)
        return None if value is None else (sequence.sampling.temperature, value)

    def apply(self, part: Part, states: list[tuple[float, float]]) -> None:
        # One by one: sums over a row must not depend on how many rows there are.
        for member, (temperature, value) in zip(part.members, states, strict=True):
            scores = part.scores[member : member + 1]
            scores.masked_fill_(~self.keeps(scores / temperature, value), -torch.inf)

    @abstractmethod
    def value_of(self, sequence: NewSequence) -> float | None:
        """The option's value; None where the sequence does not use it."""

    @abstractmethod
    def keeps(self, scores: Tensor, value: float) -> Tensor:
        """Mask of the tokens of one row that may be drawn, `[1, vocab_size]`, from its scores divided by the
        temperature. Keeps all tokens of a row whose scores are not finite, so that it counts as bad."""


class TypicalP(Warper):
    """Keeps the tokens whose log probability is closest to the entropy, until they have the share of the probability;
    the likeliest tokens may be removed. Uses the operations of Transformers' TypicalLogitsWarper."""

    def value_of(self, sequence: NewSequence) -> float | None:
        return sequence.sampling.typical_p if sequence.sampling.typical_p < 1.0 else None

    def keeps(self, scores: Tensor, value: float) -> Tensor:
        logprobs = scores.log_softmax(-1)
        entropy = -(logprobs * logprobs.exp()).nansum(-1, keepdim=True)
        distance = (-logprobs - entropy).abs()
        ordered, order = distance.sort()
        shares = scores.gather(1, order).softmax(-1).cumsum(-1)
        last = (shares < value).sum(-1, keepdim=True).clamp_(max=self.vocab_size - 1)
        return ~(distance > ordered.gather(1, last))


class Truncation(Processor[bool]):
    """Applies top-k, top-p and min-p to rows that use a warper; the draw then skips them."""

    def __init__(self, vocab_size: int, draws: DrawTable, warpers: Sequence[Warper]) -> None:
        super().__init__(vocab_size)
        self._draws = draws
        self._warpers = warpers

    def state_of(self, sequence: NewSequence) -> bool | None:
        return any(warper.state_of(sequence) is not None for warper in self._warpers) or None

    def apply(self, part: Part, states: list[bool]) -> None:
        rows = self._draws.rows(part.rows, part.positions, part.scores.dtype, part.upload)
        part.scores.index_copy_(0, part.idx, truncate(part.scores.index_select(0, part.idx), rows))


def processors(vocab_size: int, draws: DrawTable) -> tuple[Processor[Any], ...]:
    """One processor of each kind, in the order of application."""
    warpers: tuple[Warper, ...] = (TypicalP(vocab_size),)
    return (
        *(LogitBias(vocab_size), RepetitionPenalty(vocab_size), CountPenalties(vocab_size)),
        *(BadWords(vocab_size), MinTokens(vocab_size), AllowedTokenIds(vocab_size)),
        GrammarMask(vocab_size),
        *(Truncation(vocab_size, draws, warpers), *warpers),
    )
