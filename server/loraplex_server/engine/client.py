"""The asyncio side of the engine's pipe.

Owns the pipe, the process and the event streams of the requests under way. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from loraplex_adapters.cache.listing import Listing
from loraplex_contracts.adapters import (
    OWN_ORIGIN,
    PLAIN_LOAD,
    AdapterId,
    AdapterInfo,
    AdapterOrigin,
    AdapterUser,
    AdapterVersion,
    CacheUsage,
    LoadOptions,
)
from loraplex_contracts.errors import (
    ClientTooSlow,
    EngineLost,
    FailedPrecondition,
    Internal,
    LoraplexError,
    WorkerLost,
    draining,
)
from loraplex_contracts.load import Load
from loraplex_contracts.request import CompletionEnd, Event, Request, RequestFailed, Tokens
from loraplex_runtime.auth import current_identity
from loraplex_runtime.reports import Progress, no_progress
from loraplex_runtime.scratch_folder import Scratch
from loraplex_runtime.shutdown import start_shielded
from loraplex_server.config import EngineConfig
from loraplex_server.engine.liveness import LivenessMonitor
from loraplex_server.engine.output_batching import SendCostMeter
from loraplex_server.engine.pipe import (
    Abandon,
    AdapterCommand,
    AdapterVerb,
    Batch,
    Cancel,
    Command,
    CommandWriter,
    FrameReader,
    FromEngine,
    ModelInfo,
    Ready,
    Reply,
    SendCost,
    Shutdown,
    StartFailed,
    Starting,
    StopCompletion,
    Stopped,
    Submit,
)
from loraplex_server.engine.process import EngineBuilder, engine_process, serve_engine
from loraplex_server.engine.step_sizes import StepSizes

log = logging.getLogger(__name__)

SCRATCH_PREFIX: Final = "loraplex-engine-"


class ChangeSignal:
    """Wakes all waiting tasks at each change. Belongs to one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """An event, set at the next change. Take it before looking at what may change, so that none is missed."""
        return self._next

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


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
        self._num_open = request.n
        self.is_over = False

    def push(self, event: Event) -> None:
        """Takes an event in and wakes the reader."""
        if self.is_over:
            return
        match event:
            case Tokens():
                # The event that has just come does not count, however long: the reader had no time for it.
                if self._num_unread_tokens > self._max_unread_tokens:
                    limit = f"more than {self._max_unread_tokens} tokens were left unread"
                    self._cancel(self, ClientTooSlow(f"{limit}; read the stream faster or ask for less at a time"))
                    return
                self._num_unread_tokens += len(event.token_ids)
            case CompletionEnd():
                self._num_open -= 1
                self.is_over = self._num_open == 0
            case RequestFailed():
                self.is_over = True
            case _:
                pass
        self._events.append(event)
        self._ready.set()

    @property
    def is_read(self) -> bool:
        """True if the request is over and every event was read."""
        return self.is_over and not self._events

    async def next(self) -> list[Event]:
        """Waits for events and returns all that have come since the last call."""
        await self._ready.wait()
        self._ready.clear()
        events, self._events = self._events, []
        self._num_unread_tokens = 0
        return events


# Another worker may take a request at once; a client of this worker alone waits for its successor.
RETRY_LOST_S: Final = 1.0
# Bytes that are read from the engine's pipe at a time; its buffer holds less.
READ_BYTES: Final = 1 << 20


@dataclass
class EngineState:
    """The engine's last report."""

    load: Load
    usage: CacheUsage | None = None
    listing: Listing = field(default_factory=Listing)  # adapters that are not just available
    steps: StepSizes = StepSizes()  # frozen


class EngineClient:
    """Starts an engine, submits requests, routes its events. `lost` is set when the engine has ended, `changes` wakes
    tasks that watch `state`, `lost` or `stalled`."""

    def __init__(self, config: EngineConfig, *, max_unread_tokens: int = 16384, max_stream_wait_s: float = 0.0) -> None:
        """`max_stream_wait_s`: the time that tokens of a stream may wait for later ones, where sending them costs too
        much."""
        self._config = config
        self._max_unread_tokens = max_unread_tokens
        self._max_stream_wait_s = max_stream_wait_s
        self._meter = SendCostMeter()
        self._streams: dict[str, RequestStream] = {}
        self._operations: dict[int, asyncio.Future[Reply]] = {}
        self._operation_ids = itertools.count(1)
        self._request_numbers = itertools.count(1)
        self._conn: Any = None
        self._commands: CommandWriter | None = None
        self._frames = FrameReader()
        self._worker: Any = None
        self._scratch: Scratch | None = None  # of an engine in a process of its own
        self._stopping = False
        self._started: asyncio.Future[ModelInfo] | None = None
        self._on_progress: Progress = no_progress
        self._liveness = LivenessMonitor(self._on_liveness, self._kill)
        self.lost = asyncio.Event()
        self.on_stalled: Callable[[bool], None] = lambda is_stalled: None
        self.changes = ChangeSignal()
        self.state = EngineState(Load())
        self.integrity = ""

    async def start(
        self,
        on_progress: Progress = no_progress,
        *,
        inline: bool = False,
        builder: EngineBuilder | None = None,
    ) -> ModelInfo:
        """Starts the engine in a process of its own (`inline`: in a thread, for tests) and waits until it is ready.

        Raises what the engine's start raised. A wait that fails or is cancelled ends the process too.
        """
        self._on_progress = on_progress
        if not inline:
            self._scratch = Scratch(SCRATCH_PREFIX)
        context = multiprocessing.get_context("spawn")
        with self._starting():
            self._conn, theirs = context.Pipe(duplex=True)
        self._commands = CommandWriter(self._conn)
        args = (theirs, self._config, self._max_stream_wait_s, self._liveness.heartbeat, builder)
        if self._scratch is None:
            self._worker = threading.Thread(target=serve_engine, args=args, name="engine", daemon=True)
            self._worker.start()
        else:
            process = context.Process(
                target=engine_process, args=(*args, self._scratch.path), name="loraplex-engine", daemon=True
            )
            with theirs, self._starting():
                start_shielded(process)
            self._worker = process
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        loop.add_reader(self._conn.fileno(), self._on_readable)
        try:
            info = await self._started
        except BaseException:
            await self._give_up()
            raise
        self._liveness.start(self.pid)
        return info

    @contextmanager
    def _starting(self) -> Generator[None]:
        """Raises FailedPrecondition where the system gives no pipe or process; nothing is left of the engine then."""
        try:
            yield
        except OSError as error:
            if self._commands is not None:
                self._commands.close()
            self._remove_scratch()
            raise FailedPrecondition(
                f"the engine's process cannot be started: {error.strerror or error}; look at the limits of this user "
                "and container for processes, open files and memory"
            ) from error

    @property
    def pid(self) -> int | None:
        """The engine's process id; None when it runs inline."""
        return getattr(self._worker, "pid", None)

    @property
    def stalled(self) -> str:
        """The reason that the engine counts as stalled; empty while it does not."""
        return self._liveness.stalled

    def unique_id(self, request_id: str) -> str:
        """The engine's id of one request of a call; clients may choose equal ids."""
        return f"{request_id}/{next(self._request_numbers)}"

    def submit(self, request: Request) -> RequestStream:
        """Hands the request over; its id must not be in use. Raises EngineLost."""
        assert request.request_id not in self._streams, "request ids are unique while in use"
        self._check_alive()
        stream = RequestStream(request, self.cancel, self._max_unread_tokens)
        self._streams[request.request_id] = stream
        self._send(Submit(request))
        return stream

    def cancel(self, stream: RequestStream, error: LoraplexError) -> None:
        """Ends the request. The stream's reader gets `error` at once; the engine frees what it held."""
        request_id = stream.request.request_id
        self._streams.pop(request_id, None)
        if not stream.is_over:
            self._send(Cancel(request_id, error))
            stream.push(RequestFailed(request_id, error))

    def stop_completion(self, stream: RequestStream, index: int) -> None:
        """Ends completion `index`, in which a stop string was met."""
        self._send(StopCompletion(stream.request.request_id, index))

    async def load_adapter(
        self, adapter_id: AdapterId, *, pin: bool = False, options: LoadOptions = PLAIN_LOAD
    ) -> tuple[AdapterInfo, ...]:
        """Loads an adapter. Raises the cache's typed error, as do those below."""
        return (await self._operate("load", adapter_id, pin=pin, options=options)).adapters

    async def unload_adapter(self, adapter_id: AdapterId, *, if_unused: bool) -> tuple[AdapterInfo, ...]:
        return (await self._operate("unload", adapter_id, if_unused=if_unused)).adapters

    async def get_adapter(self, adapter_id: AdapterId) -> tuple[AdapterInfo, ...]:
        return (await self._operate("get", adapter_id)).adapters

    async def adapter_version(self, adapter_id: AdapterId, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterVersion:
        """The version that requests get now, with its templates; it is fetched where it has to be. Raises as a request
        for it would."""
        found = (await self._operate("templates", adapter_id, options=LoadOptions(origin))).version
        assert found is not None, "the engine answers what it was asked"
        return found

    async def _operate(self, verb: AdapterVerb, adapter_id: AdapterId, **given: Any) -> Reply:
        """The engine's reply to one adapter operation. `given`: other fields of the AdapterCommand."""
        self._check_alive()
        operation_id = next(self._operation_ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._operations[operation_id] = future
        caller = current_identity()
        user = AdapterUser(caller.tenant, caller.limits.max_resident_adapter_bytes)
        self._send(AdapterCommand(operation_id, verb, adapter_id, user=user, **given))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(Abandon(operation_id))
            raise
        finally:
            self._operations.pop(operation_id, None)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the engine; requests still under way fail as Draining, at once, however long the engine takes."""
        if self._worker is None:
            return
        self._stopping = True
        self._liveness.stop()  # from here on the end of the engine is bounded below
        error = draining()
        for stream in list(self._streams.values()):
            self.cancel(stream, error)
        self._send(Shutdown())
        if self.stalled:
            self._kill()
        try:
            await asyncio.wait_for(self.lost.wait(), timeout_s)
        except TimeoutError:
            log.warning("the engine did not end within %.0f s; killing it", timeout_s)
            self._kill()
        await asyncio.to_thread(self._worker.join, timeout_s)
        self._worker = None
        self._remove_scratch()

    async def _give_up(self) -> None:
        """Ends an engine that is still loading, which may take minutes: it does not listen yet."""
        self._stopping = True
        worker, self._worker = self._worker, None
        is_process = hasattr(worker, "kill")
        if is_process:
            worker.kill()
        self._on_lost()
        if is_process:  # a thread ends once its engine is built, because nobody is at the other end
            await asyncio.to_thread(worker.join, 10.0)
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()

    def _check_alive(self) -> None:
        if self.lost.is_set():
            raise EngineLost("this worker's engine has ended; try another worker", retry_after_s=RETRY_LOST_S)
        if self.stalled:
            raise EngineLost("this worker's engine does not respond; try another worker", retry_after_s=RETRY_LOST_S)

    def _send(self, command: Command) -> None:
        if self.lost.is_set():
            return
        assert self._commands is not None, "the engine was started"
        try:
            self._commands.send(command)
        except OSError:
            self._on_lost()

    def _on_liveness(self) -> None:
        """Called when the engine has stalled, which ends its requests, or works again."""
        self.on_stalled(bool(self.stalled))
        self.changes.notify()
        if not self.stalled:
            log.warning("the engine works again")
            return
        log.error("the engine does not respond (%s); its %d requests end", self.stalled, len(self._streams))
        for stream in list(self._streams.values()):
            self.cancel(stream, WorkerLost("the worker does not respond; send the request again", retry_after_s=0.0))
        self._fail_operations(
            EngineLost("this worker's engine does not respond; try again", retry_after_s=RETRY_LOST_S)
        )

    def _kill(self) -> None:
        if hasattr(self._worker, "kill"):  # a thread cannot be killed
            self._worker.kill()

    def _on_readable(self) -> None:
        try:
            self._read_messages()
        except MemoryError:  # what was said may be lost, and the next read would find no more memory
            log.error(
                "there is no memory for what the engine says, which ends; look at the limits of this user and "
                "container for memory"
            )
            self._kill()
            self._on_lost()

    def _read_messages(self) -> None:
        """Handles the messages that are complete. An engine may freeze in the middle of one."""
        try:
            data = os.read(self._conn.fileno(), READ_BYTES)
        except OSError:
            data = b""
        for frame in self._frames.feed(data):
            if not self.lost.is_set():
                self._on_message(pickle.loads(frame))
        if not data:
            self._on_lost()

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case Batch():
                self._on_batch(message)
            case Starting(text):
                self._on_progress(text)
            case Ready(info):
                if self._started is not None and not self._started.done():
                    self._started.set_result(info)
            case StartFailed(error):
                if self._started is not None and not self._started.done():
                    self._stopping = True  # its end is expected
                    self._started.set_exception(error)
                else:
                    log.error("the engine ended: %s", error)
            case Stopped(integrity):
                self.integrity = integrity
                if integrity:
                    log.error("the engine ended with something unaccounted for: %s", integrity)
                self._on_lost()  # nothing follows

    def _on_batch(self, batch: Batch) -> None:
        message_s = self._meter.look()
        if message_s is not None:
            self._send(SendCost(message_s))
        for event in batch.events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue  # cancelled here already
            stream.push(event)
            if stream.is_over:
                self._streams.pop(event.request_id, None)
        self._meter.sent(len(batch.events))
        for reply in batch.replies:
            self._on_reply(reply)
        self.state.load = batch.load
        if batch.changes is not None:
            self.state.listing.apply_changes(batch.changes)
        if batch.usage is not None:
            self.state.usage = batch.usage
        if batch.steps is not None:
            self.state.steps = batch.steps
        self.changes.notify()

    def _on_reply(self, reply: Reply) -> None:
        future = self._operations.get(reply.operation_id)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(reply.error)
        else:
            future.set_result(reply)

    def _on_lost(self) -> None:
        if self.lost.is_set():
            return
        assert self._commands is not None, "the engine was started"
        asyncio.get_running_loop().remove_reader(self._conn.fileno())
        self._commands.close()
        self._liveness.stop()
        self.lost.set()
        self.changes.notify()
        error = EngineLost(
            "this worker's engine ended unexpectedly; send the request again, another worker will take it",
            retry_after_s=RETRY_LOST_S,
        )
        if not self._stopping:
            log.error("the engine's process is gone; %d requests fail", len(self._streams))
        for stream in list(self._streams.values()):
            stream.push(RequestFailed(stream.request.request_id, error))
        self._streams.clear()
        self._fail_operations(error)
        if self._started is not None and not self._started.done():
            self._started.set_exception(Internal("the engine's process ended while it was starting; its log says why"))

    def _fail_operations(self, error: LoraplexError) -> None:
        for future in self._operations.values():
            if not future.done():
                future.set_exception(error)
