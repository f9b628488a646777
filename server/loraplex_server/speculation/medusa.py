"""Medusa proposer: drafts by the heads of each sequence's adapter.

Owns nothing. Heads are adapters: the cache has them in device slots, and one is borrowed for the time of a `propose`,
between two steps, when nothing moves. A sequence whose heads are not there yet gets no draft and runs on, and so does
one of whose prompt the last token is still to be computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import Candidate
from loraplex_server.model.medusa_heads import HeadAsk, HeadSlots
from loraplex_server.speculation.proposer import MEDUSA, Ask

log = logging.getLogger(__name__)


class HiddenStates(Protocol):
    """The runner's hidden states, as the heads read them."""

    def has_hidden(self, row: int) -> bool:
        """Whether there is one: no token has been drawn in a row that still computes its prompt."""
        ...

    def last_hidden(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), hidden]: post-norm, what the head made each row's latest token of."""
        ...


class Lender(Protocol):
    """Lends device slots: the adapter cache."""

    def borrow(self, key: AdapterKey) -> int | None:
        """The device slot, valid until the cache is called next; None when it is not on the device, where it is wanted
        from here on."""
        ...


class MedusaProposer:
    """Implements Proposer. Keeps no state of sequences: a hidden state is all that heads read."""

    def __init__(self, runner: HiddenStates, cache: Lender, head_slots: HeadSlots) -> None:
        self._runner = runner
        self._cache = cache
        self._heads = head_slots
        self._missing: set[AdapterKey] = set()  # heads that cannot be borrowed, in the log already

    @property
    def name(self) -> str:
        return MEDUSA

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        slots = {key: self._borrow(key) for key in dict.fromkeys(ask.medusa_key for ask in asks) if key is not None}
        wanted: list[int] = []  # positions in `asks`
        rows: list[int] = []
        head_asks: list[HeadAsk] = []
        for idx, ask in enumerate(asks):
            slot = slots[ask.medusa_key] if ask.medusa_key is not None else None
            if slot is not None and self._heads.heads(slot) and self._runner.has_hidden(ask.candidate.row):
                wanted.append(idx)
                rows.append(ask.candidate.row)
                head_asks.append(HeadAsk(slot, ask.num_tokens, ask.candidate.adapter_slot))
        drafts: list[tuple[int, ...]] = [()] * len(asks)
        if wanted:
            guesses = self._heads.guess(self._runner.last_hidden(rows), head_asks)
            for idx, guess in zip(wanted, guesses, strict=True):
                drafts[idx] = guess
        return drafts

    def num_behind(self, candidate: Candidate) -> int:
        """Heads read what the target has left."""
        return 0

    def suspend(self, sequence_id: str) -> None:
        """Nothing is kept."""

    def end(self, sequence_id: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to end."""

    def _borrow(self, key: AdapterKey) -> int | None:
        """None also of heads that the cache does not have any more: default heads may be unloaded while they serve.
        Their requests draft in another way, or not at all."""
        try:
            slot = self._cache.borrow(key)
        except Exception as error:
            if key not in self._missing:
                self._missing.add(key)
                fields = {"proposer": MEDUSA, "error_type": type(error).__name__}
                log.error("the heads %s cannot be used: %s", key, error, exc_info=error, extra=fields)
            return None
        self._missing.discard(key)
        return slot
