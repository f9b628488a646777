"""Watching every worker's load: reports, silence, reconnection with backoff.

Owns a task per worker that opens WatchLoad and feeds `Replicas`. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from random import Random
from typing import Any, Final

from google.protobuf.message import DecodeError

from loraplex_proto.v1 import inference_pb2, worker_pb2
from loraplex_router.config import WatchConfig
from loraplex_router.replicas import Replicas
from loraplex_router.upstream import INFERENCE, WORKER, Upstream, UpstreamFailure
from loraplex_runtime.auth import DEFAULT_TENANT

log = logging.getLogger(__name__)

# For a worker's first answer on a new connection.
CONNECT_TIMEOUT_S: Final = 3.0
# How often this process checks whether it stood still itself, and how late a check is then.
LOOK_S: Final = 0.5
PAUSE_S: Final = 0.5


class Watcher:
    """Runs from `start` to `stop`."""

    def __init__(self, replicas: Replicas, upstreams: Mapping[str, Upstream], config: WatchConfig) -> None:
        self._replicas = replicas
        self._upstreams = upstreams
        self._config = config
        self._random = Random()
        self._tasks: list[asyncio.Task[None]] = []
        # Of the current connection.
        self._num_reports = dict.fromkeys(upstreams, 0)
        # Last logged reason of workers that are not available.
        self._said: dict[str, str] = {}
        # Of workers that have neither reported nor failed yet.
        self._unsettled = {worker_id: asyncio.Event() for worker_id in upstreams}

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._follow(upstream), name=f"watch {worker_id}")
            for worker_id, upstream in self._upstreams.items()
        ]
        self._tasks.append(asyncio.create_task(self._allow_for_pauses(), name="allow for pauses"))

    async def settled(self, timeout_s: float) -> None:
        """Returns when every worker has reported or failed for the first time, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for event in self._unsettled.values():
                    await event.wait()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _allow_for_pauses(self) -> None:
        """Forever: takes pauses of this process (stopped, frozen with its machine) off its workers' silence."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            pause_s = time.monotonic() - before_s - LOOK_S
            if pause_s >= PAUSE_S:
                for upstream in self._upstreams.values():
                    upstream.excuse(pause_s)

    async def _follow(self, upstream: Upstream) -> None:
        """Forever: connects, reads reports until they stop, says so and waits."""
        replica = self._replicas[upstream.worker_id]
        num_failures = 0
        while True:
            self._num_reports[upstream.worker_id] = 0
            started_s = time.monotonic()
            why = await self._until_broken(upstream)
            has_reported = self._num_reports[upstream.worker_id] > 0
            has_lasted = has_reported and time.monotonic() - started_s >= self._config.min_stream_s
            if has_lasted and replica.is_routable and why != self._silent:
                # Connections end on their own (age, a balancer). Only a worker that cannot be reached again at once is
                # lost; one that was killed refuses within a millisecond.
                continue
            num_failures = 1 if has_reported and not replica.is_draining else num_failures + 1
            self._replicas.on_lost(upstream.worker_id, why)
            if self._is_silent(upstream) and (num_given_up := upstream.give_up()):
                log.warning("worker %s: %d requests that it had are given up", upstream.worker_id, num_given_up)
            self._unsettled[upstream.worker_id].set()
            if why != self._said.get(upstream.worker_id):
                self._said[upstream.worker_id] = why
                log.warning("worker %s is not available: %s", upstream.worker_id, why)
            await asyncio.sleep(self._backoff_s(num_failures))

    async def _until_broken(self, upstream: Upstream) -> str:
        """Reads reports until they end; returns the reason."""
        try:
            await self._read_reports(upstream)
        except TimeoutError:
            return self._silent
        except UpstreamFailure as failure:
            return f"{failure.code.name}: {failure.details}"
        except DecodeError as error:
            return f"an answer that is not loraplex.v1: {error}"
        is_draining = self._replicas[upstream.worker_id].is_draining
        return "the worker is shutting down" if is_draining else "the worker ended its reports"

    @property
    def _silent(self) -> str:
        return f"silent for {self._config.stale_after_s:g} s"

    def _is_silent(self, upstream: Upstream) -> bool:
        """Whether the worker has sent nothing for so long that it is taken for dead."""
        return upstream.silent_s >= self._config.stale_after_s

    def _backoff_s(self, num_failures: int) -> float:
        """Doubles up to the limit; spread, so that routers do not come back in step."""
        doubled = self._config.min_backoff_s * 2.0 ** min(num_failures - 1, 16)
        return min(doubled, self._config.max_backoff_s) * self._random.uniform(0.5, 1.0)

    async def _read_reports(self, upstream: Upstream) -> None:
        worker_id, stale_after_s = upstream.worker_id, self._config.stale_after_s
        metadata = upstream.credentials.metadata(DEFAULT_TENANT)
        timeout_s = min(stale_after_s, CONNECT_TIMEOUT_S)
        raw_info = await upstream.ask(f"/{INFERENCE}/GetInfo", b"", timeout_s, metadata)
        self._replicas.on_info(worker_id, inference_pb2.GetInfoResponse.FromString(raw_info))
        request = worker_pb2.WatchLoadRequest(min_interval_s=self._config.min_interval_s)
        channel = upstream.channel
        call = upstream.stream(f"/{WORKER}/WatchLoad", request.SerializeToString(), None, metadata)
        try:
            # Where other authorities are trusted, requests go by another connection. Reports must say whether it works.
            while upstream.channel is channel:
                with upstream.failures_of(call):
                    raw = await self._read_report(upstream, call)
                if not isinstance(raw, bytes):  # EOF
                    return
                report = worker_pb2.WatchLoadResponse.FromString(raw)
                self._tell_changes(worker_id, report.load)
                self._replicas.on_report(worker_id, report.load, time.monotonic())
                self._num_reports[worker_id] += 1
                if self._num_reports[worker_id] == 1:
                    self._compare(worker_id)
                self._unsettled[worker_id].set()
                if report.load.draining and not self._replicas[worker_id].num_in_flight:
                    return  # an open stream would keep the worker from ending
        finally:
            call.cancel()

    def _tell_changes(self, worker_id: str, load: worker_pb2.Load) -> None:
        """Logs what a report changes in whether the worker can take requests."""
        replica = self._replicas[worker_id]
        if load.stalled and not replica.is_stalled:
            log.warning("worker %s is not available: its engine does not respond", worker_id)
        elif not (load.draining or load.stalled or replica.is_routable):
            self._said.pop(worker_id, None)
            log.info("worker %s is available", worker_id)

    async def _read_report(self, upstream: Upstream, call: Any) -> Any:
        """The next report. Raises TimeoutError when the worker has said nothing for `stale_after_s`, on any call."""
        read = asyncio.ensure_future(call.read())
        try:
            while True:
                timeout_s = max(0.0, self._config.stale_after_s - upstream.silent_s)
                done, _ = await asyncio.wait([read], timeout=timeout_s)
                if done:
                    report = read.result()
                    upstream.has_spoken()
                    return report
                if self._is_silent(upstream):
                    raise TimeoutError
        finally:
            read.cancel()

    def _compare(self, worker_id: str) -> None:
        """Logs an error about a newly connected worker that serves another model than the rest."""
        own = self._replicas[worker_id].info
        for other in self._replicas.connected():
            if own is None or other.info is None:
                continue
            here, there = (f"{info.model_id} in {info.dtype}" for info in (own, other.info))
            if here != there:
                log.error(
                    "worker %s serves %s and worker %s serves %s; answers will depend on where a request lands",
                    *(worker_id, here, other.worker_id, there),
                )
