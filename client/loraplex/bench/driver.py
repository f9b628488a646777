"""Open-loop driver: a load from its plan to its recording.

Every request is sent when it is due. The recording is valid at any moment, so that an interrupted load still has
figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from loraplex.aio import AsyncClient
from loraplex.bench.arrivals import Arrival, LoadSpec, plan
from loraplex.bench.outcomes import Failure, Outcome, Summary, summarize
from loraplex.types import Adapter, GenerateOptions, ServerInfo
from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_runtime.flags import option

_option = partial(option, panel="Adapters")

LISTING_INTERVAL_S: Final = 1.0  # between listings of the adapters that are loaded

# The first listing of a server may still be empty: it is repeated this often, at this interval.
_NUM_LISTINGS: Final = 5
_EMPTY_INTERVAL_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Selection:
    """Adapters of a load: those that are named, else those that the server lists."""

    named: tuple[str, ...] = _option(
        (),
        "Adapter to ask for, the most popular first; may be given several times. Default: all that the server lists.",
        "--adapter",
        "-a",
    )
    prefix: str = _option("", "Of what the server lists, only names that begin so.", "--adapters-prefix")
    num_adapters: int | None = _option(None, "Only the first so many of them.", "--num-adapters")
    base_only: bool = _option(False, "Ask for no adapter at all.", "--base")

    def __post_init__(self) -> None:
        if self.num_adapters is not None and self.num_adapters < 1:
            raise InvalidArgument("--num-adapters must be at least 1; --base asks for none", field="--num-adapters")
        if self.base_only and (self.named or self.prefix or self.num_adapters):
            raise InvalidArgument(
                "--base asks for no adapter; leave out --adapter, --adapters-prefix and --num-adapters", field="--base"
            )
        if self.named and self.prefix:
            raise InvalidArgument("give --adapter or --adapters-prefix, not both", field="--adapters-prefix")

    async def find(self, client: AsyncClient) -> tuple[str, ...]:
        """Adapter ids, the most popular first. Raises InvalidArgument where the server lists too few."""
        if self.base_only:
            return ()
        names = self.named or tuple(await _list(client, self.prefix))
        if self.prefix and not names:
            raise InvalidArgument(
                f"the server lists no adapter that begins with {self.prefix!a}", field="--adapters-prefix"
            )
        if self.num_adapters is not None and self.num_adapters > len(names):
            raise InvalidArgument(
                f"--num-adapters asks for {self.num_adapters} adapters, and there are {len(names)}",
                field="--num-adapters",
            )
        return names[: self.num_adapters]


async def _list(client: AsyncClient, prefix: str) -> list[str]:
    """Adapters that a request can name; heads that only speculate are not among them."""
    for attempt in range(_NUM_LISTINGS):
        if attempt:
            await asyncio.sleep(_EMPTY_INTERVAL_S)
        if rows := await client.adapters.list(include_unloaded=True, prefix=prefix):
            return sorted({row.adapter_id for row in rows if row.kind != "medusa" and row.state != "failed"})
    return []


class Session:
    """One load: plans, sends and records it. `run` once."""

    def __init__(self, spec: LoadSpec, selection: Selection, options: GenerateOptions) -> None:
        self.recording = Recording()
        self._spec = spec  # completed by `run`
        self._selection = selection
        self._options = options
        self._info: ServerInfo | None = None

    async def run(self, client: AsyncClient) -> None:
        """Raises the server's error to `info` and listings, and InvalidArgument for an empty load. Errors of single
        requests are in the recording."""
        self._info = await client.info()
        self._spec = replace(
            self._spec,
            adapter_ids=await self._selection.find(client),
            vocab_size=self._info.vocab_size,
            excluded_ids=frozenset(self._info.eos_token_ids),
        )
        arrivals = plan(self._spec)
        if not arrivals:
            raise InvalidArgument("no request arrives within --duration; raise it, or --rate", field="--duration")
        await run_load(client, arrivals, self._options, self.recording, max_in_flight=self._spec.max_in_flight)

    def described(self) -> dict[str, Any]:
        """Server and load, as plain data."""
        spec, info = self._spec, self._info
        return {
            "server": None if info is None else {"role": info.role, "model": info.model_id, "version": info.version},
            "load": {
                "rate": spec.rate if math.isfinite(spec.rate) else "inf",
                "cv": spec.cv,
                "duration_s": spec.duration_s,
                "num_requests": spec.num_requests,
                "popularity": str(spec.popularity),
                "num_adapters": len(spec.adapter_ids),
                "prompt_tokens": None if spec.texts else str(spec.prompt_tokens),
                "num_texts": len(spec.texts),
                "output_tokens": str(spec.output_tokens),
                "seed": spec.seed,
                "max_inflight": spec.max_in_flight,
            },
        }


@dataclass(slots=True)
class Recording:
    """Outcomes so far."""

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
    """Returns when every request has ended; a cancellation ends those under way.

    Every request takes `options`. While `max_in_flight` are under way, due requests wait; the wait counts as latency.
    """
    recording.num_scheduled = len(arrivals)
    await _Driver(client, options, recording, max_in_flight).run(arrivals)


class Residency:
    """Adapters that are ready to run, by the last listing and the answers since. The server may have evicted some
    of them."""

    def __init__(self) -> None:
        self._ready: set[str] = set()

    def update(self, rows: Iterable[Adapter]) -> None:
        """Takes a listing. Behind a router any worker's row counts: requests go where their adapter is."""
        self._ready = {row.adapter_id for row in rows if row.state == "on_device"}

    def answered(self, adapter_id: str) -> None:
        """Takes the first token of an answer."""
        self._ready.add(adapter_id)

    def is_cold(self, adapter_id: str) -> bool:
        return bool(adapter_id) and adapter_id not in self._ready


class _Driver:
    """Sends the requests of one load."""

    def __init__(self, client: AsyncClient, options: GenerateOptions, recording: Recording, max_in_flight: int) -> None:
        self._client = client
        self._options = options
        self._recording = recording
        self._in_flight = asyncio.Semaphore(max_in_flight)
        self._residency = Residency()
        self._start = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def run(self, arrivals: Sequence[Arrival]) -> None:
        has_adapters = any(arrival.adapter_id for arrival in arrivals)
        if has_adapters:
            await self._list()
        listing = asyncio.create_task(self._keep_listing()) if has_adapters else None
        self._start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for arrival in arrivals:
                    if (wait_s := arrival.at_s - self._now()) > 0:
                        await asyncio.sleep(wait_s)
                    outcome = Outcome(arrival, was_held=self._in_flight.locked())
                    self._recording.outcomes.append(outcome)
                    await self._in_flight.acquire()
                    group.create_task(self._send(outcome))
        finally:
            self._recording.elapsed_s = self._now()
            if listing is not None:
                listing.cancel()

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
            self._in_flight.release()

    async def _keep_listing(self) -> None:
        while True:
            await asyncio.sleep(LISTING_INTERVAL_S)
            await self._list()

    async def _list(self) -> None:
        """Without permission to list, only answers tell which adapters are ready."""
        with contextlib.suppress(LoraplexError):
            self._residency.update(await self._client.adapters.list(state="on_device"))
