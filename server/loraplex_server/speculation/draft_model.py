"""Drafts by a smaller model that shares the target's vocabulary.

It draws with the completion's own parameters, its seed included: noise depends on seed, position and token, so where
the two models' distributions agree, so do their draws, also far from greedy. Knows the request's rules (stop tokens,
min_tokens) and the target's vocabulary; the drafting itself is the Drafter's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from loraplex_contracts.plan import Candidate
from loraplex_server.speculation.base import DRAFT_MODEL, Ask
from loraplex_server.speculation.draft_rows import Wanted
from loraplex_server.speculation.drafting import Drafter


class DraftModelProposer:
    """Implements speculation.base.Proposer. Owns the drafter."""

    def __init__(self, drafter: Drafter, *, num_target_ids: int, eos_token_ids: Collection[int]) -> None:
        """`num_target_ids`: token ids below it are the target's. `eos_token_ids`: the target's."""
        self._drafter = drafter
        self._num_target_ids = num_target_ids
        self._eos_token_ids = frozenset(eos_token_ids)

    @property
    def name(self) -> str:
        return DRAFT_MODEL

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        drafts = self._drafter.draft([self._want(ask) for ask in asks])
        return [self._within_vocabulary(draft) for draft in drafts]

    def num_behind(self, candidate: Candidate) -> int:
        return self._drafter.num_behind(candidate.sequence_id, len(candidate.token_ids))

    def suspend(self, sequence_id: str) -> None:
        self.end(sequence_id)

    def end(self, sequence_id: str) -> None:
        self._drafter.forget(sequence_id)

    def close(self) -> None:
        self._drafter.close()

    def _want(self, ask: Ask) -> Wanted:
        candidate = ask.candidate
        request, stopping = candidate.request, candidate.request.stopping
        stop_ids = stop_ids_of(candidate, self._eos_token_ids)
        return Wanted(
            sequence_id=candidate.sequence_id,
            token_ids=candidate.token_ids,
            num_tokens=min(ask.num_tokens, candidate.num_room),
            num_prompt_tokens=candidate.num_prompt_tokens,
            sampling=candidate.sampling,
            min_tokens=stopping.min_tokens,
            banned_until_min=stop_ids,
            stop_ids=stop_ids,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
        )

    def _within_vocabulary(self, draft: Sequence[int]) -> tuple[int, ...]:
        """Models of one tokenizer may be padded to different sizes."""
        for idx, token_id in enumerate(draft):
            if token_id >= self._num_target_ids:
                return tuple(draft[:idx])
        return tuple(draft)


def stop_ids_of(candidate: Candidate, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end the completion, as the scheduler sees it."""
    stopping = candidate.request.stopping
    return stopping.stop_token_ids | (frozenset() if stopping.ignore_eos else eos_token_ids)
