"""Requests whose adapter is still being fetched, by adapter.

Owns the waiting requests. The cache is asked again only when a load has finished, and once for all requests of one
adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from loraplex_contracts.adapters import AdapterId, AdapterKey
from loraplex_contracts.errors import LoraplexError, unexpected
from loraplex_contracts.request import Request

# As AdapterManager.resolve: the key, held once more; None while it is fetched; or a typed error.
Resolve = Callable[[AdapterId, float], AdapterKey | None]


class PendingAdapters:
    """Holds requests until their adapter's key, or the error, is known. `adapter_id_of`: of a request."""

    def __init__(self, resolve: Resolve, adapter_id_of: Callable[[Request], AdapterId]) -> None:
        self._resolve = resolve
        self._adapter_id_of = adapter_id_of
        # By adapter id, in the order of arrival, and so are their requests.
        self._groups: dict[AdapterId, dict[str, Request]] = {}
        self._unasked: dict[AdapterId, None] = {}  # that the cache has not been asked for yet
        self._next_deadline_s = math.inf  # none is earlier
        self.num_requests = 0
        self.num_completions = 0

    def add(self, request: Request) -> None:
        group = self._adapter_id_of(request)
        if group not in self._groups:
            self._groups[group] = {}
            self._unasked[group] = None
        self._groups[group][request.request_id] = request
        self.num_requests += 1
        self.num_completions += request.n
        if request.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)

    def discard(self, request: Request) -> None:
        """Removes the request, if it waits here."""
        group = self._adapter_id_of(request)
        waiting = self._groups.get(group, {})
        if waiting.pop(request.request_id, None) is not None:
            self.num_requests -= 1
            self.num_completions -= request.n
            if not waiting:
                del self._groups[group]
                self._unasked.pop(group, None)

    def take_expired(self, now: float) -> list[Request]:
        """Removes and returns those whose deadline has passed."""
        if now < self._next_deadline_s:
            return []
        dated = [
            (request.deadline_s, request)
            for group in self._groups.values()
            for request in group.values()
            if request.deadline_s is not None
        ]
        expired = [request for deadline_s, request in dated if deadline_s <= now]
        self._next_deadline_s = min((deadline_s for deadline_s, _ in dated if deadline_s > now), default=math.inf)
        for request in expired:
            self.discard(request)
        return expired

    def take_resolved(self, has_loaded: bool, now: float) -> list[tuple[Request, AdapterKey | LoraplexError]]:
        """Removes and returns those with an outcome, each with its own hold on the key. `has_loaded`: whether
        AdapterManager.poll has returned true since the last call."""
        groups, self._unasked = self._groups if has_loaded else self._unasked, {}
        taken = [outcome for group in list(groups) for outcome in self._ask(self._groups[group], now)]
        for request, _ in taken:
            self.discard(request)
        return taken

    def _ask(self, waiting: dict[str, Request], now: float) -> list[tuple[Request, AdapterKey | LoraplexError]]:
        taken: list[tuple[Request, AdapterKey | LoraplexError]] = []
        for request in waiting.values():
            try:
                adapter_key = self._resolve(self._adapter_id_of(request), now)
            except Exception as error:
                # All get the same error: asking again might start another load.
                typed = error if isinstance(error, LoraplexError) else unexpected(error, "resolving an adapter")
                return [*taken, *((other, typed) for other in list(waiting.values())[len(taken) :])]
            if adapter_key is None:
                return taken
            taken.append((request, adapter_key))
        return taken
