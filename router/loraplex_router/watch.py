"""Watching every worker's load: reports, silence, reconnection with backoff."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from random import Random
from typing import Any, Final

from google.protobuf.message import DecodeError

from loraplex_proto.services import INFERENCE, WORKER, path_of
from loraplex_proto.v1 import inference_pb2, worker_pb2
from loraplex_router.config import WatchConfig
from loraplex_router.replicas import Replicas
from loraplex_router.upstream import Upstream, UpstreamFailure
from loraplex_runtime.auth import EVERYBODY

log = logging.getLogger(__name__)

# Seconds for a worker's first answer on a new connection.
CONNECT_TIMEOUT_S: Final = 3.0
# How often this process checks whether it stood still itself, and how late a check is then.
LOOK_S: Final = 0.5
PAUSE_S: Final = 0.5


class Watcher:
    """Owns a task per worker that feeds its reports to `Replicas`, until the worker is removed or to `stop`."""

    def __init__(self, replicas: Replicas, config: WatchConfig) -> None:
        self._replicas = replicas
        self._config = config
        self._watches: dict[str, WorkerWatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pauses: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._pauses = asyncio.create_task(self._allow_for_pauses(), name="allow for pauses")

    def add(self, upstream: Upstream) -> None:
        """Watches a worker that `Replicas` knows, from now on."""
        worker_id = upstream.worker_id
        watch = self._watches[worker_id] = WorkerWatch(upstream, self._replicas, self._config)
        self._tasks[worker_id] = asyncio.create_task(watch.run(), name=f"watch {worker_id}")

    def remove(self, worker_id: str) -> None:
        del self._watches[worker_id]
        self._tasks.pop(worker_id).cancel()

    async def settled(self, timeout_s: float) -> None:
        """Returns when every worker has reported or failed for the first time, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for watch in list(self._watches.values()):
                    await watch.settled.wait()

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([] if self._pauses is None else [self._pauses])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _allow_for_pauses(self) -> None:
        """Takes pauses of this process (stopped, frozen with its machine) off its workers' silence. Runs until
        cancelled."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            pause_s = time.monotonic() - before_s - LOOK_S
            if pause_s >= PAUSE_S:
                for watch in self._watches.values():
                    watch.upstream.excuse(pause_s)


class WorkerWatch:
    """Watches one worker by WatchLoad."""

    def __init__(self, upstream: Upstream, replicas: Replicas, config: WatchConfig) -> None:
        self.upstream = upstream
        self.settled = asyncio.Event()  # it has reported or failed
        self._worker_id = upstream.worker_id
        self._replica = replicas[upstream.worker_id]
        self._replicas = replicas
        self._config = config
        self._random = Random()
        self._num_reports = 0  # of the current connection
        self._logged = ""  # why it is not available
        self._silent = f"silent for {config.stale_after_s:g} s"

    async def run(self) -> None:
        """Connects, reads reports until they stop, says so and waits, again and again. Runs until cancelled."""
        num_failures = 0
        while True:
            self._num_reports = 0
            started_s = time.monotonic()
            why = await self._until_broken()
            has_lasted = self._num_reports > 0 and time.monotonic() - started_s >= self._config.min_stream_s
            if has_lasted and self._replica.is_routable and why != self._silent:
                # Connections end on their own (age, a balancer). Only a worker that cannot be reached again at once is
                # lost; one that was killed refuses within a millisecond.
                continue
            num_failures = 1 if self._num_reports and not self._replica.is_draining else num_failures + 1
            self._replicas.on_lost(self._worker_id, why)
            if self._is_silent() and (num_given_up := self.upstream.give_up()):
                log.warning("worker %s: %d requests that it had are given up", self._worker_id, num_given_up)
            self.settled.set()
            if why != self._logged:
                self._logged = why
                log.warning("worker %s is not available: %s", self._worker_id, why)
            await asyncio.sleep(self._backoff_s(num_failures))

    async def _until_broken(self) -> str:
        """Reads reports until they end; returns the reason."""
        try:
            await self._read_reports()
        except TimeoutError:
            return self._silent
        except UpstreamFailure as failure:
            return self.upstream.reason_of(failure)
        except DecodeError as error:
            return f"an answer that is not loraplex.v1: {error}"
        return "the worker is shutting down" if self._replica.is_draining else "the worker ended its reports"

    def _is_silent(self) -> bool:
        """True if the worker has sent nothing for so long that it is taken for dead."""
        return self.upstream.silent_s >= self._config.stale_after_s

    def _backoff_s(self, num_failures: int) -> float:
        """Seconds until the next try: doubled up to the limit, and spread, so that routers do not come back in step."""
        doubled = self._config.min_backoff_s * 2.0 ** min(num_failures - 1, 16)
        return min(doubled, self._config.max_backoff_s) * self._random.uniform(0.5, 1.0)

    async def _read_reports(self) -> None:
        upstream = self.upstream
        metadata = upstream.credentials.metadata(EVERYBODY)
        timeout_s = min(self._config.stale_after_s, CONNECT_TIMEOUT_S)
        raw_info = await upstream.ask(path_of(INFERENCE, "GetInfo"), b"", timeout_s, metadata)
        self._replicas.on_info(self._worker_id, inference_pb2.GetInfoResponse.FromString(raw_info))
        request = worker_pb2.WatchLoadRequest(min_interval_s=self._config.min_interval_s)
        channel = upstream.channel
        call = upstream.stream(path_of(WORKER, "WatchLoad"), request.SerializeToString(), None, metadata)
        try:
            # Where other authorities are trusted, requests go by another connection. Reports must say whether it works.
            while upstream.channel is channel:
                with upstream.failures_of(call):
                    raw = await self._read_report(call)
                if not isinstance(raw, bytes):  # EOF
                    return
                load = worker_pb2.WatchLoadResponse.FromString(raw).load
                self._log_changes(load)
                self._replicas.on_report(self._worker_id, load, time.monotonic())
                self._num_reports += 1
                if self._num_reports == 1:
                    self._compare()
                self.settled.set()
                if load.draining and not self._replica.num_in_flight:
                    return  # an open stream would keep the worker from ending
        finally:
            call.cancel()

    async def _read_report(self, call: Any) -> Any:
        """The next report. Raises TimeoutError when the worker has said nothing for `stale_after_s`, on any call."""
        read = asyncio.ensure_future(call.read())
        try:
            while True:
                timeout_s = max(0.0, self._config.stale_after_s - self.upstream.silent_s)
                done, _ = await asyncio.wait([read], timeout=timeout_s)
                if done:
                    report = read.result()
                    self.upstream.has_spoken()
                    return report
                if self._is_silent():
                    raise TimeoutError
        finally:
            read.cancel()

    def _log_changes(self, load: worker_pb2.Load) -> None:
        """Logs what a report changes in whether the worker can take requests."""
        if load.stalled and not self._replica.is_stalled:
            log.warning("worker %s is not available: its engine does not respond", self._worker_id)
        elif not (load.draining or load.stalled or self._replica.is_healthy):
            self._logged = ""
            log.info("worker %s is available", self._worker_id)

    def _compare(self) -> None:
        """Logs an error about a newly connected worker that serves another model than the rest."""
        own = self._replica.info
        for other in self._replicas.connected():
            if own is None or other.info is None:
                continue
            here, there = (f"{info.model_id} in {info.dtype}" for info in (own, other.info))
            if here != there:
                log.error(
                    "worker %s serves %s and worker %s serves %s; answers will depend on where a request lands",
                    *(self._worker_id, here, other.worker_id, there),
                )
