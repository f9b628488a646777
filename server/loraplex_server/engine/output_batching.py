"""What the engine has to say, on its way to the front end.

Batches with nothing but tokens that can wait are held until the pause behind the last sending is over, and go out as
one; whatever somebody waits for goes at once, and takes along what is held. The loop puts and the writer takes, each
from a thread of its own; while tokens are held neither is woken. Owns what has not been sent, and the pace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from loraplex_contracts.events import Event, Tokens
from loraplex_server.engine.messages import Batch, FromEngine
from loraplex_server.engine.send_pacing import Pacer


class Outbox:
    """Without a pacer of its own everything goes at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.pacer = Pacer(share=1.0, max_wait_s=0.0)
        self._clock = clock
        self._changed = threading.Condition()
        self._messages: list[FromEngine] = []
        self._is_urgent = False  # somebody waits for one of them
        self._is_pausing = False  # the writer sleeps, and is woken for what is urgent only
        self._is_closed = False
        self._due_at_s = 0.0

    def put(self, message: FromEngine) -> None:
        with self._changed:
            self._messages.append(message)
            self._is_urgent = self._is_urgent or not can_wait(message)
            if self._is_urgent or not self._is_pausing:
                self._changed.notify()

    def close(self) -> None:
        """Nothing follows."""
        with self._changed:
            self._is_urgent = self._is_closed = True
            self._changed.notify()

    def take(self) -> list[FromEngine]:
        """Waits until something is to be sent, and returns all there is: nothing once it is closed and empty."""
        with self._changed:
            self._is_pausing = True
            self._changed.wait_for(lambda: self._is_urgent, self._due_at_s - self._clock())
            self._is_pausing = False
            self._changed.wait_for(lambda: self._messages or self._is_closed)
            messages, self._messages, self._is_urgent = self._messages, [], self._is_closed
        messages = _join_batches(messages)
        num_messages = sum(len(message.events) for message in messages if isinstance(message, Batch))
        self._due_at_s = self._clock() + self.pacer.pause_s(num_messages)
        return messages


def can_wait(message: FromEngine) -> bool:
    """Whether nobody misses it for a moment. Who asks what is resident asks several times a second at most."""
    if not isinstance(message, Batch) or message.replies or not (message.events or message.changes):
        return False
    return all(isinstance(event, Tokens) and event.can_wait for event in message.events)


def _join_batches(messages: Sequence[FromEngine]) -> list[FromEngine]:
    """Batches that follow each other become one."""
    joined: list[FromEngine] = []
    run: list[Batch] = []
    for message in messages:
        if isinstance(message, Batch):
            run.append(message)
            continue
        if run:
            joined.append(join(run))
            run = []
        joined.append(message)
    return [*joined, join(run)] if run else joined


def join(batches: Sequence[Batch]) -> Batch:
    """One batch that says what these say."""
    if len(batches) == 1:
        return batches[0]
    changes = [batch.changes for batch in batches if batch.changes is not None]
    return Batch(
        _join_events([event for batch in batches for event in batch.events]),
        tuple(reply for batch in batches for reply in batch.replies),
        batches[-1].load,
        {about: rows for one in changes for about, rows in one.items()} if changes else None,
        next((batch.usage for batch in reversed(batches) if batch.usage is not None), None),
    )


def _join_events(events: Sequence[Event]) -> tuple[Event, ...]:
    """A completion's tokens that could wait are one event, as long as the same proposer drafted them. Its events stay
    in their order: nothing but tokens comes between its tokens."""
    joined: list[Event] = []
    runs: dict[int, list[Tokens]] = {}  # tokens that become one event, by its place in `joined`
    places: dict[tuple[str, int], int] = {}  # of each completion's last run
    for event in events:
        if isinstance(event, Tokens) and event.can_wait:
            completion = event.request_id, event.index
            place = places.get(completion)
            if place is not None and runs[place][0].proposer == event.proposer:
                runs[place].append(event)
                continue
            places[completion] = len(joined)
            runs[len(joined)] = [event]
        joined.append(event)
    for place, run in runs.items():
        if len(run) > 1:
            joined[place] = _join_tokens(run)
    return tuple(joined)


def _join_tokens(run: Sequence[Tokens]) -> Tokens:
    return replace(
        run[0],
        token_ids=tuple(token_id for tokens in run for token_id in tokens.token_ids),
        logprobs=tuple(one for tokens in run for one in tokens.logprobs),
        num_drafted=sum(tokens.num_drafted for tokens in run),
        num_accepted=sum(tokens.num_accepted for tokens in run),
        num_steps=sum(tokens.num_steps for tokens in run),
    )
