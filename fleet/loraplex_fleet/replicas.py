"""Replicas of Ray Serve, each around one child process that serves by itself.

No request passes through Ray: clients talk to routers, routers to workers. A replica starts its child, says to the
directory where it is, and drains it in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import ray.util
from ray import serve
from ray.exceptions import RayError

from loraplex_contracts.errors import FailedPrecondition, LoraplexError
from loraplex_fleet.commands import router_command, worker_command
from loraplex_fleet.directory import DirectoryClient
from loraplex_fleet.entries import (
    DRAINING,
    HEARTBEAT_S,
    READY,
    ROUTER,
    STARTING,
    WORKER,
    Entry,
    View,
    follow,
    members_text,
)
from loraplex_fleet.probe import Probe, read_authorities
from loraplex_fleet.spec import ClusterSpec, from_plain
from loraplex_fleet.supervisor import Child
from loraplex_runtime.locks import try_hold

log = logging.getLogger(__name__)

MAX_STORES: Final = 1024
# A child that has answered no probe for so long is taken for frozen. Less would kill one on a machine that has too much
# to do, and its requests with it; routers leave one alone that they have not heard for six seconds.
MAX_SILENT_S: Final = 15.0
NO_WORKER: Final = "no worker is healthy yet"
# The child's command line, and the probe of its address where it gets one.
Plan = tuple[tuple[str, ...], Callable[[str], Probe] | None]


class Replica:
    """Owns the child and its entry in the directory. Serve calls `check_health`, and `__del__` at the end."""

    def __init__(self, spec: ClusterSpec, kind: str) -> None:
        _log_with_serve()
        context = serve.get_replica_context()
        self._spec = spec
        self._node = ray.util.get_node_ip_address()
        self._entry = Entry(context.replica_tag, kind, self._node)
        self._directory = DirectoryClient(spec.name)
        self._child: Child | None = None
        self._probe: Probe | None = None
        self._silent_since_s: float | None = None  # the first probe that the child has not answered, and none since
        self._beating: asyncio.Task[None] | None = None

    async def run(self, prepare: Callable[[], Plan]) -> None:
        """Starts the child that `prepare` plans, and returns once it is ready. Raises RuntimeError with the error's
        words, or the child's own: what a constructor raises is what Serve shows."""
        self._beating = asyncio.create_task(self._beat_forever())
        try:
            self._spec.check_reach([self._node])
            command, probe = prepare()
            self._child = Child(command, self._progress)
            ready = await asyncio.to_thread(self._child.start)
        except LoraplexError as error:
            await self._fail(error.message)
            raise RuntimeError(error.message) from None
        self._probe = None if probe is None else probe(ready["address"])
        self._entry = replace(
            self._entry,
            state=READY,
            address=ready["address"],
            http=ready.get("http", ""),
            metrics_ports=tuple(ready.get("metrics_ports", ())),
            pid=self._child.pid,
            text=NO_WORKER if self._entry.kind == ROUTER else "",
        )

    async def check_health(self) -> None:
        """Raises where the child has ended or is frozen; after three times in a row Serve replaces this."""
        if self._child is None or self._entry.state != READY:
            return
        if end := self._child.end:
            raise RuntimeError(end)
        if await self._is_frozen():
            raise RuntimeError(f"the process has not answered for {MAX_SILENT_S:.0f} s")

    async def _is_frozen(self) -> bool:
        """Asks the child. One that does not answer is frozen once it has not for a while."""
        if self._probe is None:
            return False
        asked_s = time.monotonic()
        try:
            await self._probe.answers()
        except grpc.aio.AioRpcError as error:
            log.warning("the process does not answer: %s", error.code().name)
            self._silent_since_s = asked_s if self._silent_since_s is None else self._silent_since_s
            return time.monotonic() - self._silent_since_s > MAX_SILENT_S
        self._silent_since_s = None
        return False

    async def __del__(self) -> None:
        """Ends the child: its requests get their time to end, unless it is frozen."""
        child = self._child
        if child is None:
            return
        self._entry = replace(self._entry, state=DRAINING)  # the next heartbeat takes it out of the members
        reason = child.end
        if not reason and await self._is_frozen():
            reason = "the process did not answer and was killed"
            await asyncio.to_thread(child.kill)
        elif not reason:
            await asyncio.to_thread(child.stop, self._spec.drain_s)
        await self._leave(reason)

    async def _fail(self, reason: str) -> None:
        """Leaves the directory, which keeps the reason only of replicas that it has heard of."""
        with contextlib.suppress(RayError, TimeoutError):
            await self._directory.beat(asdict(self._entry))
        await self._leave(reason)

    async def _leave(self, reason: str) -> None:
        if self._beating is not None:
            self._beating.cancel()
        if self._probe is not None:
            await self._probe.close()
        with contextlib.suppress(RayError, TimeoutError):
            await self._directory.drop(self._entry.replica_id, reason)
        self._clean()

    def _clean(self) -> None:
        """Removes what it has put on the node's disk."""

    def _progress(self, text: str) -> None:
        self._entry = replace(self._entry, text=text)
        log.info("%s", text)

    async def _beat_forever(self) -> None:
        while True:
            try:
                entry = await self._measured(self._entry)
                name, view = await self._directory.beat(asdict(entry))
                if name != self._entry.name:
                    log.info("this is %s", name)
                    self._entry = replace(self._entry, name=name)
                self._see(view)
            except (RayError, TimeoutError) as error:
                log.warning("the directory does not answer: %s", type(error).__name__)
            except Exception:  # one heartbeat that fails must not be the last
                log.exception("a heartbeat failed")
            await asyncio.sleep(HEARTBEAT_S)

    async def _measured(self, entry: Entry) -> Entry:
        """The entry with the child's load, where it has one."""
        return entry

    def _see(self, view: View) -> None:
        """Takes in the directory's view, at each heartbeat."""


class Worker(Replica):
    """A worker of the fleet."""

    async def __init__(self, plain: dict[str, Any]) -> None:
        spec = from_plain(plain)
        super().__init__(spec, WORKER)
        self._store_lock: int | None = None
        await self.run(self._prepare)

    def _prepare(self) -> Plan:
        """Claims the store, and reads the token and the authorities, which may change. Raises FailedPrecondition."""
        spec = self._spec
        store, self._store_lock = claim_store(spec.worker.store)
        token = read_token(spec.secrets.worker_token_file) if spec.secrets.worker_token_file else ""
        read_ca = partial(read_authorities, spec.tls.ca) if spec.tls.ca else None
        ca = None if read_ca is None else read_ca()
        return worker_command(spec, self._node, store, token), lambda address: Probe(address, ca, read_ca, token)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"pending_tokens": float(self._entry.pending_tokens)}

    async def _measured(self, entry: Entry) -> Entry:
        if self._probe is None:
            return entry
        with contextlib.suppress(grpc.RpcError):
            work = await self._probe.work()
            entry = replace(self._entry, running=work.running, queued=work.queued, pending_tokens=work.pending_tokens)
            self._entry = entry
        return entry


class Router(Replica):
    """A router of the fleet. Owns the file that the router follows, which keeps the last view while Ray is away."""

    async def __init__(self, plain: dict[str, Any]) -> None:
        spec = from_plain(plain)
        super().__init__(spec, ROUTER)
        self._folder = tempfile.TemporaryDirectory(prefix="loraplex-router-")
        self._members: dict[str, str] = {}
        self._path = Path(self._folder.name) / "members"
        self._write()
        # Whose certificate it would have to trust is the clients' affair: its process and its file are watched then.
        has_tls = "--tls-cert" in spec.router.flags
        command = router_command(spec, self._node, self._path)
        await self.run(lambda: (command, None if has_tls else Probe))

    async def _measured(self, entry: Entry) -> Entry:
        if entry.state == STARTING:
            return entry
        with contextlib.suppress(grpc.RpcError):
            # The file is as old as the last heartbeat: the process has read it.
            is_ready = bool(self._members) if self._probe is None else await self._probe.is_ready()
            # In a drain it takes no requests, whatever workers there are.
            text = "" if is_ready or self._entry.state == DRAINING else NO_WORKER
            entry = self._entry = replace(self._entry, text=text)
        return entry

    def _clean(self) -> None:
        self._folder.cleanup()  # the child has ended

    def _see(self, view: View) -> None:
        members = follow(self._members, view)
        if members != self._members:
            self._members = members
            self._write()

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(members_text(self._members), encoding="ascii")
        os.replace(part, self._path)


def claim_store(root: str) -> tuple[Path | None, int | None]:
    """A folder for the child's adapter store, the first that no other replica of this node has. The store's own lock
    may still be with a child whose replica is gone; the new child waits for it. Raises FailedPrecondition."""
    if not root:
        return None, None
    try:
        Path(root).mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise FailedPrecondition(f"worker.store, {root}, cannot be made on this node: {error.strerror}") from error
    for number in range(MAX_STORES):
        folder = Path(root) / f"w{number}"
        if (lock := try_hold(folder.with_suffix(".replica"), f"the folder {folder}")) is not None:
            return folder, lock
    raise FailedPrecondition(f"{root} has {MAX_STORES} folders in use")


def _log_with_serve() -> None:
    """Writes this package's lines, and with them the child's, to the file that Serve keeps for the replica."""
    ours = logging.getLogger("loraplex_fleet")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    ours.handlers = list(logging.getLogger("ray.serve").handlers)


def read_token(path: str) -> str:
    """The token that the file holds. Raises FailedPrecondition, also for an empty one: workers without a token serve
    whoever reaches them."""
    key = "secrets.worker-token-file"
    try:
        raw = Path(path).read_bytes().strip()
    except OSError as error:
        raise FailedPrecondition(f"{key}, {path}, cannot be read on this node: {error.strerror}") from error
    if not raw:
        raise FailedPrecondition(f"{key}, {path}, is empty on this node")
    if not raw.isascii():
        raise FailedPrecondition(f"{key}, {path}, cannot be read on this node: it has other bytes than ASCII")
    return raw.decode("ascii")
