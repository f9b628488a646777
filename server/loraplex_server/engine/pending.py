"""Requests that wait for what they name: adapters being fetched, grammars being compiled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from loraplex_contracts.errors import LoraplexError, as_typed
from loraplex_contracts.request import Request

Name = TypeVar("Name")
Found = TypeVar("Found")


class Pending(Generic[Name, Found]):
    """Requests that wait for what they name, by name, until it is found or the error is known: an adapter that is
    fetched, a grammar that is compiled.

    `resolve` gives what is found (of adapters the keys, held once more), or None while there is none yet, or raises.
    It is asked again only when there is news, and once for all requests of one name. `name_of`: of a request.
    `forget` is told of a name that no request waits for any more. `doing`: what is done meanwhile, for errors.
    """

    def __init__(
        self,
        doing: str,
        resolve: Callable[[Name, float], Found | None],
        name_of: Callable[[Request], Name],
        forget: Callable[[Name], None] = lambda _: None,
    ) -> None:
        self.doing = doing
        self._resolve = resolve
        self._name_of = name_of
        self._forget = forget
        # By name, in the order of arrival, and so are their requests.
        self._groups: dict[Name, dict[str, Request]] = {}
        self._unasked: dict[Name, None] = {}  # that `resolve` has not been asked for yet
        self._next_deadline_s = math.inf  # none is earlier
        self.num_requests = 0
        self.num_completions = 0
        self.num_of_tenant: Counter[str] = Counter()

    def add(self, request: Request) -> None:
        group = self._name_of(request)
        if group not in self._groups:
            self._groups[group] = {}
            self._unasked[group] = None
        self._groups[group][request.request_id] = request
        self.num_requests += 1
        self.num_of_tenant[request.tenant] += 1
        self.num_completions += request.n
        if request.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)

    def discard(self, request: Request) -> None:
        """Removes the request, if it waits here."""
        group = self._name_of(request)
        waiting = self._groups.get(group, {})
        if waiting.pop(request.request_id, None) is not None:
            self.num_requests -= 1
            self.num_of_tenant[request.tenant] -= 1
            if not self.num_of_tenant[request.tenant]:
                del self.num_of_tenant[request.tenant]
            self.num_completions -= request.n
            if not waiting:
                del self._groups[group]
                self._unasked.pop(group, None)
                self._forget(group)

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

    def take_resolved(self, has_changes: bool, now: float) -> list[tuple[Request, Found | LoraplexError]]:
        """Removes and returns those with an outcome. `has_changes`: whether something was found since the last call."""
        groups, self._unasked = self._groups if has_changes else self._unasked, {}
        taken = [outcome for group in list(groups) for outcome in self._ask(self._groups[group], now)]
        for request, _ in taken:
            self.discard(request)
        return taken

    def _ask(self, waiting: dict[str, Request], now: float) -> list[tuple[Request, Found | LoraplexError]]:
        taken: list[tuple[Request, Found | LoraplexError]] = []
        for request in waiting.values():
            try:
                found = self._resolve(self._name_of(request), now)
            except Exception as error:
                # All get the same error: asking again might start another load.
                typed = as_typed(error, self.doing)
                return [*taken, *((other, typed) for other in list(waiting.values())[len(taken) :])]
            if found is None:
                return taken
            taken.append((request, found))
        return taken
