"""Open-loop driver: every request is sent when it is due.

Owns the clock and the tasks; what was measured goes into a `Recording`, which is good at any moment, so that a load
that is broken off still has figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from loraplex.aio import AsyncClient
from loraplex.bench.arrivals import Arrival
from loraplex.bench.outcomes import Failure, Outcome, Summary, summarize
from loraplex.types import Adapter, GenerateOptions
from loraplex_contracts.errors import LoraplexError

LOOK_EVERY_S = 1.0  # at the adapters that are loaded


@dataclass(slots=True)
class Recording:
    """What has happened so far."""

    num_scheduled: int = 0
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    elapsed_s: float = 0.0

    def summary(self) -> Summary:
        return summarize(self.outcomes, self.num_scheduled, self.elapsed_s)


async def run_load(
    client: AsyncClient,
    arrivals: Sequence[Arrival],
    options: GenerateOptions,
    recording: Recording,
    *,
    max_in_flight: int,
) -> None:
    """Returns when every request has ended; cancelling it ends those under way.

    `options` go with every request. A request that is due while `max_in_flight` are under way waits, and that counts.
    """
    recording.num_scheduled = len(arrivals)
    await _Driver(client, options, recording, max_in_flight).run(arrivals)


class Residency:
    """The adapters that are ready to run, from listings and from answers since. A little old: the server may
    evict between two looks."""

    def __init__(self) -> None:
        self._ready: set[str] = set()

    def look(self, rows: Iterable[Adapter]) -> None:
        """A listing. Behind a router any worker that has it will do: requests go where their adapter is."""
        self._ready = {row.adapter_id for row in rows if row.state == "on_device"}

    def answered(self, adapter_id: str) -> None:
        """A first token of it came."""
        self._ready.add(adapter_id)

    def is_cold(self, adapter_id: str) -> bool:
        return bool(adapter_id) and adapter_id not in self._ready


class _Driver:
    """One run."""

    def __init__(self, client: AsyncClient, options: GenerateOptions, recording: Recording, max_in_flight: int) -> None:
        self._client = client
        self._options = options
        self._recording = recording
        self._places = asyncio.Semaphore(max_in_flight)
        self._residency = Residency()
        self._start = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def run(self, arrivals: Sequence[Arrival]) -> None:
        has_adapters = any(arrival.adapter_id for arrival in arrivals)
        if has_adapters:
            await self._look()
        looking = asyncio.create_task(self._keep_looking()) if has_adapters else None
        self._start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for arrival in arrivals:
                    if (wait_s := arrival.at_s - self._now()) > 0:
                        await asyncio.sleep(wait_s)
                    outcome = Outcome(arrival, was_held=self._places.locked())
                    self._recording.outcomes.append(outcome)
                    await self._places.acquire()
                    group.create_task(self._send(outcome))
        finally:
            self._recording.elapsed_s = self._now()
            if looking is not None:
                looking.cancel()

    async def _send(self, outcome: Outcome) -> None:
        arrival = outcome.arrival
        outcome.is_cold = self._residency.is_cold(arrival.adapter_id)
        options: GenerateOptions = {
            **self._options,
            "adapter_id": arrival.adapter_id or None,
            "max_tokens": arrival.max_tokens,
            "token_ids": arrival.token_ids,
        }
        try:
            outcome.sent_s = self._now()
            async with self._client.stream(arrival.text, **options) as chunks:
                async for chunk in chunks:
                    if outcome.first_token_s is None:
                        self._residency.answered(arrival.adapter_id)
                    outcome.take(len(chunk.token_ids), self._now())
                    outcome.usage = chunk.usage or outcome.usage
            outcome.ended_s = self._now()
        except LoraplexError as error:
            outcome.failure = Failure(error.code.name, error.reason, error.message)
        finally:
            self._places.release()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        """A server that does not let us look leaves the picture to its answers."""
        with contextlib.suppress(LoraplexError):
            self._residency.look(await self._client.adapters.list(state="on_device"))
