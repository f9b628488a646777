"""The events of requests that are under way, between the engine's pipe and those who read them.

Owns what is unread. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loraplex_contracts.errors import ClientTooSlow, LoraplexError
from loraplex_contracts.events import CompletionEnd, Event, RequestFailed, Tokens
from loraplex_contracts.request import Request


class RequestStream:
    """One request's events, in order. Bounded: a reader that falls too far behind loses the request, not the engine."""

    def __init__(
        self, request: Request, cancel: Callable[[RequestStream, LoraplexError], None], max_unread_tokens: int
    ) -> None:
        self.request = request
        self._cancel = cancel
        self._max_unread_tokens = max_unread_tokens
        self._num_unread_tokens = 0
        self._events: list[Event] = []
        self._ready = asyncio.Event()
        self._num_open = request.n
        self.is_over = False

    def push(self, event: Event) -> None:
        """Takes an event in and wakes the reader."""
        if self.is_over:
            return
        match event:
            case Tokens():
                # What comes just now, be it much, is no fault of the reader's.
                if self._num_unread_tokens > self._max_unread_tokens:
                    self._cancel(self, _too_slow(self._max_unread_tokens))
                    return
                self._num_unread_tokens += len(event.token_ids)
            case CompletionEnd():
                self._num_open -= 1
                self.is_over = self._num_open == 0
            case RequestFailed():
                self.is_over = True
            case _:
                pass
        self._events.append(event)
        self._ready.set()

    @property
    def is_read(self) -> bool:
        """Over, and nothing is left to read. Being over alone says nothing of that: the end may have come meanwhile."""
        return self.is_over and not self._events

    async def next(self) -> list[Event]:
        """Waits for news and returns all there is: what piled up while the reader was busy comes together."""
        await self._ready.wait()
        self._ready.clear()
        events, self._events = self._events, []
        self._num_unread_tokens = 0
        return events


def _too_slow(limit: int) -> ClientTooSlow:
    return ClientTooSlow(f"more than {limit} tokens were left unread; read the stream faster or ask for less at a time")
