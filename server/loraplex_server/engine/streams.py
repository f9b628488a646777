"""The events of requests that are under way, between the engine's pipe and those who read them.

Owns what is unread. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loraplex_proto.errors import ClientTooSlow, LoraplexError
from loraplex_server.engine.pacing import Pacer
from loraplex_server.events import CompletionEnd, Event, RequestFailed, Tokens
from loraplex_server.request import Request


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
        self._begun: set[int] = set()  # completions whose first tokens have come
        # The reader finds stop strings: until it has looked, the engine writes on.
        self._is_watched = bool(request.stopping.stop)
        self._num_open = request.n
        self.is_over = False

    def push(self, event: Event) -> None:
        """Takes an event in. First tokens and ends, which somebody waits for, wake the reader, as does what may bring a
        stop string; other tokens do when they are released, together with the next such event, or when so many are
        held that a quick reader would be taken for a slow one."""
        if self.is_over:
            return
        wakes = False
        match event:
            case Tokens():
                self._num_unread_tokens += len(event.token_ids)
                if self._num_unread_tokens > self._max_unread_tokens:
                    self._cancel(self, _too_slow(self._max_unread_tokens))
                    return
                is_first = event.index not in self._begun
                is_much = 2 * self._num_unread_tokens > self._max_unread_tokens
                wakes = is_first or is_much or self._is_watched
                self._begun.add(event.index)
            case CompletionEnd():
                self._num_open -= 1
                self.is_over = self._num_open == 0
                wakes = True
            case RequestFailed():
                self.is_over = wakes = True
            case _:
                pass
        self._events.append(event)
        if wakes:
            self.release()

    def release(self) -> None:
        """Wakes the reader if there is something to read."""
        if self._events:
            self._ready.set()

    @property
    def is_held(self) -> bool:
        """There is something to read of which the reader was not told."""
        return bool(self._events) and not self._ready.is_set()

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


class HeldStreams:
    """Streams with tokens that wait to be sent together with later ones, for `max_wait_s` at most."""

    def __init__(self, pacer: Pacer, max_wait_s: float) -> None:
        self._pacer = pacer
        self._max_wait_s = max_wait_s
        self._held: set[RequestStream] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._called_at_s = 0.0

    def add(self, stream: RequestStream) -> None:
        if stream.is_held:
            self._held.add(stream)

    def release_when_due(self) -> None:
        """To be called after each step's events: now, or when they have waited long enough."""
        loop = asyncio.get_running_loop()
        step_s, self._called_at_s = loop.time() - self._called_at_s, loop.time()
        if not self._held:
            return
        # Nothing is gained by waiting for a step that comes too late.
        if step_s >= self._max_wait_s or self._pacer.is_due():
            self._release()
        elif self._timer is None:
            self._timer = loop.call_later(self._max_wait_s, self._release)

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pacer.sent(len(self._held))
        for stream in self._held:
            stream.release()
        self._held.clear()


def _too_slow(limit: int) -> ClientTooSlow:
    return ClientTooSlow(f"more than {limit} tokens were left unread; read the stream faster or ask for less at a time")
