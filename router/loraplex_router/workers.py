"""Connections to workers: members join and leave while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

from loraplex_router.membership import Member, Membership
from loraplex_router.replicas import Replicas
from loraplex_router.upstream import Upstream
from loraplex_router.watch import Watcher

log = logging.getLogger(__name__)

# Seconds between two looks at whether a worker that leaves has ended its requests, and seconds that its other calls
# (a load of an adapter) get to end.
LOOK_S: Final = 0.2
CLOSE_S: Final = 30.0


class Workers:
    """Owns the connections, one for each member and for each worker that is leaving."""

    def __init__(self, replicas: Replicas, watcher: Watcher, connect: Callable[[Member], Upstream]) -> None:
        self.upstreams: dict[str, Upstream] = {}
        self._replicas = replicas
        self._watcher = watcher
        self._connect = connect
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, members: Sequence[Member]) -> None:
        """Makes these the members from here on."""
        wanted = {self._id_of(member): member for member in members}
        for worker_id in self.upstreams.keys() - wanted.keys():
            if not (replica := self._replicas[worker_id]).is_leaving:
                log.info("worker %s leaves with %d requests", worker_id, replica.num_in_flight)
                self._replicas.leave(worker_id)
        for worker_id, member in wanted.items():
            is_new = worker_id not in self.upstreams
            self._replicas.join(worker_id, member.name)
            if is_new:
                upstream = self.upstreams[worker_id] = self._connect(member)
                self._watcher.add(upstream)

    def _id_of(self, member: Member) -> str:
        """The id of the worker at the member's address. One whose name came later keeps the id, the connection and the
        requests that it has."""
        is_known_without_name = member.worker_id not in self.upstreams and member.address in self.upstreams
        return member.address if is_known_without_name else member.worker_id

    def start(self, membership: Membership | None) -> None:
        """Watches the workers, and follows the list where there is one to follow."""
        self._watcher.start()
        if membership is not None:
            self._tasks = [
                asyncio.create_task(self._follow(membership), name="follow the members"),
                asyncio.create_task(self._end_leaving(), name="end workers that leave"),
            ]

    async def _follow(self, membership: Membership) -> None:
        async for members in membership.changes():
            before = self._staying()
            self.update(members)
            joined = [worker_id for worker_id in self._staying() if worker_id not in before]
            log.info("%d members%s", len(members), f", new: {', '.join(joined)}" if joined else "")

    def _staying(self) -> list[str]:
        return [worker_id for worker_id in self.upstreams if not self._replicas[worker_id].is_leaving]

    async def _end_leaving(self) -> None:
        """Closes the connections of workers that have left, once nothing runs there. Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for worker_id in [one for one in self.upstreams if self._replicas.has_left(one)]:
                self._watcher.remove(worker_id)
                self._replicas.forget(worker_id)
                closing = asyncio.create_task(self.upstreams.pop(worker_id).close(CLOSE_S))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
                log.info("worker %s has left", worker_id)

    async def stop(self) -> None:
        for task in (*self._tasks, *self._closing):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, *self._closing, return_exceptions=True)
        await self._watcher.stop()
        for upstream in self.upstreams.values():
            await upstream.close()
