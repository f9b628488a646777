"""Child processes of a server: start, supervision, restart, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from loraplex_contracts.errors import FailedPrecondition, LoraplexError
from loraplex_runtime.config import child_environment
from loraplex_runtime.reports import Progress, failure_of, report_of
from loraplex_runtime.shutdown import ends_before

log = logging.getLogger(__name__)

RESTART_DELAYS_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
# A child that has not been heard for so many checks is killed and started again: it may be frozen for good.
# Checks are counted, so that a pause of this process is not taken for the worker's.
CHECK_S: Final = 5.0
MAX_SILENT_CHECKS: Final = 6
MAX_SILENT_LINE_CHECKS: Final = 3  # of one that writes lines: while it is frozen, its part of a shared port waits
# A child that starts and says nothing for so long is killed: imports alone may take minutes from a cold disk.
START_SILENT_S: Final = 300.0
# Longer lines of a child are cut.
MAX_LINE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The command of a child; `--port N --supervised` is appended, and `--metrics-port` where there is a first one."""

    command: tuple[str, ...]
    metrics_port: int | None = None  # of the first child; the others follow. 0: free ones
    what: str = "worker"
    port: int = 0  # that all of them share; 0: each has one of its own
    placement: str = "--placement"  # flag that tells each of several its place among them; empty: none does


@dataclass
class _Child:
    process: asyncio.subprocess.Process
    address: str
    metrics_ports: list[int]
    num_lines: int = 0  # that it has written since it was ready
    reader: asyncio.Task[None] | None = None

    async def read(self, lines: AsyncGenerator[bytes]) -> None:
        """Keeps the pipe empty; later lines go to the log."""
        async for line in lines:
            self.num_lines += 1
            log.debug("%s", line.decode(errors="replace"))


class Children:
    """Owns the processes. A child keeps its port when it is started again, so that the router finds it there."""

    def __init__(self, spec: ChildSpec, num_children: int, on_progress: Progress) -> None:
        self._spec = spec
        self._num_children = num_children
        self._on_progress = on_progress
        self._children: list[_Child] = []
        self._starting: list[asyncio.subprocess.Process] = []
        self._is_stopping = False

    @property
    def metrics_ports(self) -> list[int]:
        return [port for child in self._children for port in child.metrics_ports]

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    async def start(self, stop: asyncio.Event) -> list[str] | None:
        """Starts all of them, one after the other (loading is memory-hungry); returns their addresses. None when `stop`
        came first.

        Raises the error that a child reported."""
        for number in range(self._num_children):
            starting = asyncio.ensure_future(self._start_one(number, self._spec.port, self._on_progress))
            if not await ends_before(starting, stop):
                return None
            self._children.append(starting.result())
        return [child.address for child in self._children]

    async def watch(self) -> None:
        """Starts children that ended again, with growing pauses. Runs until cancelled."""
        await asyncio.gather(*(self._watch_one(index) for index in range(len(self._children))))

    async def kill_silent(self, heard_s: Callable[[str], float] | None = None) -> None:
        """Kills children that have fallen silent; `watch` starts them again. Runs until cancelled.

        `heard_s` tells when the child at an address was last heard, by any clock. Without it children are heard by the
        lines that they write."""
        max_checks = MAX_SILENT_LINE_CHECKS if heard_s is None else MAX_SILENT_CHECKS
        last: list[float] = [-1.0] * len(self._children)
        num_silent_checks = [0] * len(self._children)
        while True:
            await asyncio.sleep(CHECK_S)
            for index, child in enumerate(self._children):
                heard = child.num_lines if heard_s is None else heard_s(child.address)
                is_silent = child.process.returncode is None and heard == last[index]
                num_silent_checks[index] = num_silent_checks[index] + 1 if is_silent else 0
                last[index] = heard
                if num_silent_checks[index] >= max_checks:
                    log.error("%s is silent and is killed", self._name(index))
                    child.process.kill()
                    num_silent_checks[index] = 0

    async def stop(self, drain_s: float, grace_s: float = 10.0) -> None:
        """Has all of them drain, `drain_s` and `grace_s` for all to end, then SIGKILL. Returns when every process is
        reaped.

        A second call has them end at once."""
        # What starts has nothing to drain. What serves may get systemd's SIGTERM beside ours: see `Ending.ask`.
        drains = signal.SIGINT if self._is_stopping else signal.SIGHUP
        self._is_stopping = True
        signals = [(child.process, drains) for child in self._children]
        signals += [(process, signal.SIGTERM) for process in self._starting]
        processes = [process for process, _ in signals]
        for process, number in signals:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
        try:
            async with asyncio.timeout(drain_s + grace_s):
                await asyncio.gather(*(process.wait() for process in processes))
        except TimeoutError:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(process.wait() for process in processes))
        for child in self._children:
            if child.reader is not None:
                child.reader.cancel()

    async def _watch_one(self, index: int) -> None:
        num_failures = 0
        while True:
            child = self._children[index]
            code = await child.process.wait()
            port = int(child.address.rpartition(":")[2])
            delay_s = RESTART_DELAYS_S[min(num_failures, len(RESTART_DELAYS_S) - 1)]
            log.error("%s ended with status %s; starting it again in %.0f s", self._name(index), code, delay_s)
            await asyncio.sleep(delay_s)
            try:
                self._children[index] = await self._start_one(index, port, partial(log.info, "%s"))
                num_failures = 0
            except LoraplexError as error:
                num_failures += 1
                log.error("%s does not start: %s", self._name(index), error.message)
            except Exception:  # such as no memory for a process: the next try may succeed
                num_failures += 1
                log.exception("%s does not start", self._name(index))

    async def _start_one(self, number: int, port: int, on_progress: Progress) -> _Child:
        """Starts one child. Progress of one that is started again goes to the log: a print would wait for its reader,
        and what else runs in this process with it."""
        first = self._spec.metrics_port
        metrics = () if first is None else ("--metrics-port", str(first and first + number))
        several = self._num_children > 1
        placement = self._spec.placement
        process = await asyncio.create_subprocess_exec(
            *self._spec.command,
            *metrics,
            *((placement, f"{number}/{self._num_children}") if several and placement else ()),
            "--port",
            str(port),
            "--supervised",
            stdout=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.PIPE,  # closes with this process
            env=child_environment(),
            # Ctrl-C and the end of a terminal are for the supervisor alone: it drains, then tells the children.
            start_new_session=True,
        )
        self._starting.append(process)
        prefix = f"{self._name(number)}: " if several else ""
        assert process.stdout is not None
        lines = _lines(process.stdout)
        try:
            ready = await self._until_ready(process, lines, prefix, on_progress)
        except Exception:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            self._starting.remove(process)
            raise
        self._starting.remove(process)
        child = _Child(process, ready["address"], ready.get("metrics_ports", []))
        child.reader = asyncio.ensure_future(child.read(lines))
        return child

    def _name(self, number: int) -> str:
        return f"{self._spec.what} {number}"

    async def _until_ready(
        self,
        process: asyncio.subprocess.Process,
        lines: AsyncGenerator[bytes],
        prefix: str,
        on_progress: Progress,
    ) -> dict[str, Any]:
        """The child's report that it is ready. Raises the error that it reports instead."""
        while True:
            try:
                line = await asyncio.wait_for(anext(lines), START_SILENT_S)
            except TimeoutError:
                raise FailedPrecondition(
                    f"the {self._spec.what} said nothing for {START_SILENT_S:g} s before it was ready: it is frozen, "
                    "or its machine is overloaded; look at its log and start it again"
                ) from None
            except StopAsyncIteration:
                break
            message = report_of(line)
            match message.get("event"):
                case "progress":
                    on_progress(prefix + message["text"])
                case "ready":
                    return message
                case "failed":
                    raise failure_of(message)
                case "alive":
                    pass
                case _:
                    log.info("%s%s", prefix, line.decode(errors="replace"))
        raise FailedPrecondition(f"the {self._spec.what} ended with status {await process.wait()} before it was ready")


async def _lines(stream: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """Lines of any length, to the end. (StreamReader's own methods raise for long ones.)"""
    rest = b""
    while chunk := await stream.read(MAX_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line[:MAX_LINE_BYTES]
        rest = rest[:MAX_LINE_BYTES]
    if rest:
        yield rest
