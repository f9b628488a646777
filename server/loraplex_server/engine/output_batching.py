"""Output batching on the way to the front end.

Batches of tokens that can wait are kept until the pause after the last sending is over, and go out as one. Anything
that a client waits for goes at once, with all that is kept. The loop puts and the writer takes, each from a thread of
its own; while tokens are kept neither is woken.

A message costs about the same with one token or ten, and waking up costs more than a message. Where the engine computes
on the same cores, sending takes time from the engine. So the pause is as long as it takes for sending to stay within a
share of the CPU: short with few streams, longer with many or with short steps. The front end, which sends, measures the
cost of a message; the tokens wait in the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loraplex_contracts.request import Event, Tokens
from loraplex_server.backends.cpu.cores import own_cpus
from loraplex_server.engine.pipe import Batch, FromEngine


class OutputQueue:
    """Queue of messages for the front end. Until `throttle` is set, everything goes at once."""

    def __init__(self) -> None:
        self.throttle = SendThrottle(share=1.0, max_wait_s=0.0)
        self._changed = threading.Condition()
        self._messages: list[FromEngine] = []
        self._is_urgent = False  # a client waits for one of them
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
        """Closes the queue: nothing follows."""
        with self._changed:
            self._is_urgent = self._is_closed = True
            self._changed.notify()

    def take(self) -> list[FromEngine]:
        """Waits until something is to be sent, and returns all there is: nothing once it is closed and empty."""
        with self._changed:
            self._is_pausing = True
            self._changed.wait_for(lambda: self._is_urgent, self._due_at_s - time.monotonic())
            self._is_pausing = False
            self._changed.wait_for(lambda: self._messages or self._is_closed)
            messages, self._messages, self._is_urgent = self._messages, [], self._is_closed
        messages = _join_batches(messages)
        num_messages = sum(len(message.events) for message in messages if isinstance(message, Batch))
        self._due_at_s = time.monotonic() + self.throttle.pause_s(num_messages)
        return messages


def can_wait(message: FromEngine) -> bool:
    """True if a message may wait: one with tokens that can, or with changes of residency alone."""
    if not isinstance(message, Batch) or message.replies or not (message.events or message.changes):
        return False
    return all(isinstance(event, Tokens) and event.can_wait for event in message.events)


def _join_batches(messages: Sequence[FromEngine]) -> list[FromEngine]:
    """Messages in which batches that follow each other are one."""
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
    """One batch with the contents of all."""
    if len(batches) == 1:
        return batches[0]
    changes = [batch.changes for batch in batches if batch.changes is not None]
    return Batch(
        _join_events([event for batch in batches for event in batch.events]),
        tuple(reply for batch in batches for reply in batch.replies),
        batches[-1].load,
        {about: rows for one in changes for about, rows in one.items()} if changes else None,
        next((batch.usage for batch in reversed(batches) if batch.usage is not None), None),
        next((batch.steps for batch in reversed(batches) if batch.steps is not None), None),
    )


def _join_events(events: Sequence[Event]) -> tuple[Event, ...]:
    """Joins a completion's consecutive tokens that can wait and have the same proposer. A completion's events keep
    their order, because only tokens come between its tokens."""
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


# Share of the CPU for sending: of all cores where the engine computes on them too, of one core where it does not.
# Clients and routers on the same machine take about as much again, each.
CPU_SHARE = 0.006
DEVICE_SHARE = 0.5
FIRST_MESSAGE_S = 1e-4  # assumed until there is a median
MEDIAN_STEP = 0.1
# The fixed cost of a sending, in messages.
MESSAGES_PER_WAKE = 8
TOLD_CHANGE = 1.25  # smaller changes are not sent


class SendCostMeter:
    """Measures CPU seconds of one message: those of this process from a sending to the next look.

    A running median, so that other work, such as a request that comes in between, does not count.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._cpu_clock = cpu_clock
        self._message_s = self._told_s = FIRST_MESSAGE_S
        self._num_messages = 0
        self._cpu_at_s = 0.0

    def sent(self, num_messages: int) -> None:
        """Begins a measurement: `num_messages` are being sent."""
        self._num_messages, self._cpu_at_s = num_messages, self._cpu_clock()

    def look(self) -> float | None:
        """Ends a measurement, when the next tokens have come. CPU seconds of a message, if they have changed; else
        None."""
        if not self._num_messages:
            return None
        usual_s = self._message_s * (MESSAGES_PER_WAKE + self._num_messages)
        self._message_s *= 1 + MEDIAN_STEP if self._cpu_clock() - self._cpu_at_s > usual_s else 1 - MEDIAN_STEP
        self._num_messages = 0
        if 1 / TOLD_CHANGE < self._message_s / self._told_s < TOLD_CHANGE:
            return None
        self._told_s = self._message_s
        return self._message_s


@dataclass(slots=True)
class SendThrottle:
    """Pause between sendings, so that the front end takes `share` of one core for them."""

    share: float
    max_wait_s: float  # no token waits longer
    message_s: float = FIRST_MESSAGE_S  # CPU seconds of one message, which the front end measures

    def pause_s(self, num_messages: int) -> float:
        """Seconds from a sending of so many messages to the next one."""
        return min(self.max_wait_s, self.message_s * (MESSAGES_PER_WAKE + num_messages) / self.share)


def delivery_share(device: str) -> float:
    """Share of one core that the front end may take for sending, beside an engine on `device`."""
    if not device.startswith("cpu"):
        return DEVICE_SHARE
    return min(DEVICE_SHARE, CPU_SHARE * len(own_cpus()))
