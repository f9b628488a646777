"""Proposers of draft tokens: their interface and names.

A draft only ever changes how soon a text comes: the target model samples every position itself and keeps what agrees
(`verify_chain`). So a proposer may be wrong, slow to start or silent. It is called from the engine's loop, between two
steps, and must not wait for anything but its own work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import Candidate
from loraplex_contracts.request import SpeculationParams

MEDUSA = "medusa"
PROMPT_LOOKUP = "prompt_lookup"
DRAFT_MODEL = "draft_model"
UNIVERSAL = "universal"
GRAMMAR = "grammar"

OWN = "own"  # the source of drafts that have no other


class Ask(NamedTuple):
    """A request for a draft of at most `num_tokens` tokens, 1 or more, for `candidate`."""

    candidate: Candidate
    num_tokens: int
    params: SpeculationParams  # the request's, with the server's defaults filled in
    medusa_key: AdapterKey | None = None  # its Medusa heads


class Piece(NamedTuple):
    """Consecutive tokens of a draft from one source. Each source has acceptance rates of its own."""

    source: str
    num_tokens: int
    evidence: int = 0  # how many tokens agree before it
    position: int = 0  # of its first token in the source, where it is a copy


class Proposer(ABC):
    """One kind of drafting. Owns what it remembers of sequences; state is by sequence_id, made on the first ask.

    What the policy has to know of a proposer is here too. The defaults suit one that makes a draft token by token, and
    cannot tell anything of it before.
    """

    # In counters and answers: one of the names above.
    name: str
    # Acceptance rates before anything is known, by level; the last one holds for all levels beyond. Hopeful: a proposer
    # that is never tried is never known.
    prior: tuple[float, ...] = (0.95,)
    # A draft is made when `pieces` tells of it: a call costs nothing more.
    is_free: bool = False
    # All tokens of a draft are made in one round, however many they are.
    drafts_at_once: bool = False
    # Drafts from a sequence's last hidden state (`ModelRunner.last_hidden`), which is kept only for such proposers.
    reads_hidden: bool = False
    # Sources that a draft may begin with, where the next one may begin with another or with more evidence, so that what
    # became of the last says little about it. Empty where all drafts begin alike.
    starts: frozenset[str] = frozenset()

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        """A draft for each ask, in order: up to `num_tokens` ids of the target's vocabulary, empty for none.

        A sequence's tokens may have grown by any number since its last ask, and it may come for the first time at any
        length. An error that concerns one sequence gives that one an empty draft.
        """

    def pieces(self, ask: Ask) -> Sequence[Piece]:
        """The pieces that the ask's draft would have, as far as they are known before it is made; empty where there
        will be no draft."""
        return (Piece(OWN, ask.num_tokens),)

    def rates_key(self, choice: Choice) -> Hashable:
        """Key of the acceptance rates beside the source: the weights, where requests bring their own."""
        return None

    def num_behind(self, candidate: Candidate) -> int:
        """Number of tokens to read before the sequence's first draft: all of a sequence that is new to a draft model,
        none where only what the last steps brought is missing. Read once, they are no part of what drafting costs."""
        return 0

    # Without effect where nothing is kept.

    def suspend(self, sequence_id: str) -> None:  # noqa: B027
        """Drops what is costly to keep of a sequence that waits and may come back. Harmless for one that is not
        known."""

    def end(self, sequence_id: str) -> None:  # noqa: B027
        """Drops the state of a sequence that has ended. Harmless for one that is not known."""

    def close(self) -> None:  # noqa: B027
        """Gives up all that it holds."""


class ForcedTokenProposer(Proposer):
    """Drafts the tokens that a grammar leaves no choice about, such as the keys of an object."""

    name = GRAMMAR
    is_free = True

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        return [_forced_tokens(ask) for ask in asks]

    def pieces(self, ask: Ask) -> Sequence[Piece]:
        num_forced = len(_forced_tokens(ask))
        return (Piece(OWN, num_forced),) if num_forced else ()


def _forced_tokens(ask: Ask) -> tuple[int, ...]:
    matcher = ask.candidate.matcher
    return () if matcher is None else tuple(matcher.forced())[: ask.num_tokens]


@dataclass(frozen=True, slots=True)
class Choice:
    """A request's proposers by the speculator's name for them, none where it does not speculate."""

    proposers: tuple[str, ...] = ()
    params: SpeculationParams = SpeculationParams(kind="off")  # defaults filled in
    medusa_key: AdapterKey | None = None  # its Medusa heads


MAX_KNOWN = 4096  # adapters of which something is remembered beyond their sequences

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Adds an entry, in the place of the oldest where there are MAX_KNOWN."""
    if len(known) >= MAX_KNOWN:
        del known[next(iter(known))]
    known[key] = value


def draft_key(name: str) -> str:
    """The speculator's name of one of several draft models."""
    return f"{DRAFT_MODEL}:{name}"
