"""Proposers of draft tokens: their contract and their names.

A draft only ever changes how soon a text comes: the target model samples every position itself and keeps what agrees
(`verify_chain`). So a proposer may be wrong, slow to start or silent. It is called from the engine's loop, between two
steps, and must not wait for anything but its own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import Candidate
from loraplex_contracts.request import SpeculationParams

MEDUSA = "medusa"
PROMPT_LOOKUP = "prompt_lookup"
DRAFT_MODEL = "draft_model"
UNIVERSAL = "universal"
GRAMMAR = "grammar"


class Ask(NamedTuple):
    """A request for a draft of at most `num_tokens` tokens, 1 or more, for `candidate`."""

    candidate: Candidate
    num_tokens: int
    params: SpeculationParams  # the request's, with the server's defaults filled in
    medusa_key: AdapterKey | None = None  # its Medusa heads


class Proposer(Protocol):
    """One kind of drafting. Owns what it remembers of sequences; state is by sequence_id, made on the first ask."""

    @property
    def name(self) -> str:
        """The proposer's name in counters and answers: one of those above."""
        ...

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        """A draft for each ask, in order: up to `num_tokens` ids of the target's vocabulary, empty for none.

        A sequence's tokens may have grown by any number since its last ask, and it may come for the first time at any
        length. An error that concerns one sequence gives that one an empty draft.
        """
        ...

    def num_behind(self, candidate: Candidate) -> int:
        """Number of tokens to read before the sequence's first draft: all of a sequence that is new to a draft model,
        none where only what the last steps brought is missing. Read once, they are no part of what drafting costs."""
        ...

    def suspend(self, sequence_id: str) -> None:
        """Drops what is costly to keep of a sequence that waits and may come back. Harmless for one that is not
        known."""
        ...

    def end(self, sequence_id: str) -> None:
        """Drops the state of a sequence that has ended. Harmless for one that is not known."""
        ...

    def close(self) -> None: ...


class ForcedTokenProposer:
    """Drafts the tokens that a grammar leaves no choice about, such as the keys of an object."""

    name = GRAMMAR

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        return [forced_tokens(ask.candidate)[: ask.num_tokens] for ask in asks]

    def num_behind(self, candidate: Candidate) -> int:
        return 0

    def suspend(self, sequence_id: str) -> None: ...

    def end(self, sequence_id: str) -> None: ...

    def close(self) -> None: ...


def forced_tokens(candidate: Candidate) -> tuple[int, ...]:
    """The tokens that the sequence's grammar leaves no choice about; none without a grammar."""
    return () if candidate.matcher is None else tuple(candidate.matcher.forced())


@dataclass(frozen=True, slots=True)
class Choice:
    """A request's proposers by the speculator's name for them, none where it does not speculate."""

    proposers: tuple[str, ...] = ()
    params: SpeculationParams = SpeculationParams(kind="off")  # defaults filled in
    medusa_key: AdapterKey | None = None  # its Medusa heads

    @property
    def uses_heads(self) -> bool:
        return MEDUSA in self.proposers


def draft_key(name: str) -> str:
    """The speculator's name of one of several draft models."""
    return f"{DRAFT_MODEL}:{name}"
