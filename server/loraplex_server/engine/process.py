"""Runs an engine behind a pipe: commands in, batches of events out.

The loop's thread never touches the pipe. A reader thread fills the inbox and a writer thread empties the outputs, so
that neither a slow front end nor pickling delays a step. Owns inbox, outputs and the two threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import dumps
from typing import TYPE_CHECKING, Final

from loraplex_contracts.errors import Internal, LoraplexError
from loraplex_runtime.logs import setup_logging
from loraplex_runtime.scratch_folder import use_scratch
from loraplex_runtime.shutdown import begin_shielded, exit_at_once
from loraplex_server.config import EngineConfig
from loraplex_server.engine.liveness import Heartbeat, StepBound, TurnTimer
from loraplex_server.engine.output_batching import OutputQueue, SendThrottle, delivery_share
from loraplex_server.engine.pipe import (
    Command,
    Connection,
    Ready,
    SendCost,
    Shutdown,
    StartFailed,
    Starting,
    Stopped,
    Wake,
)

if TYPE_CHECKING:
    from loraplex_server.engine.engine import Engine  # the front end does without torch: seconds and memory

log = logging.getLogger(__name__)

# Time for a busy engine to end by itself: when its front end is gone, and when the front end has told it to. In the
# second case the front end kills it after as long.
ORPHAN_END_S: Final = 5.0
SHUTDOWN_END_S: Final = 10.0

# Builds the engine from its configuration, a callback for progress and one that wakes the loop.
EngineBuilder = Callable[[EngineConfig, Callable[[str], None], Callable[[], None]], "Engine"]


def engine_process(
    conn: Connection,
    config: EngineConfig,
    max_stream_wait_s: float,
    heartbeat: Heartbeat,
    builder: EngineBuilder | None,
    scratch: Path,
) -> None:
    """Entry point of the spawned process; does not return. `scratch` is the folder for its temporary files."""
    # Ctrl-C and a closed terminal reach the whole process group, and a SIGTERM aimed at the group too; the front end
    # decides when the engine ends, and a front end that is gone shows as the end of the pipe.
    begin_shielded()
    use_scratch(scratch)
    setup_logging(config.log_level, config.log_format)
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # its own is a semaphore between processes, which would outlive this one
    kill_after = partial(_kill_after, scratch)
    serve_engine(conn, config, max_stream_wait_s, heartbeat, builder, kill_after)
    shutil.rmtree(scratch, ignore_errors=True)  # the front end may be gone
    exit_at_once(0)


def _kill_after(scratch: Path, seconds: float) -> None:
    time.sleep(seconds)
    shutil.rmtree(scratch, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def serve_engine(
    conn: Connection,
    config: EngineConfig,
    max_stream_wait_s: float,
    heartbeat: Heartbeat,
    builder: EngineBuilder | None,
    kill_after: Callable[[float], None] = lambda seconds: None,
) -> None:
    """Builds the engine, then turns it until Shutdown or until the other end of the pipe is gone.

    Tokens of a stream may wait up to `max_stream_wait_s` for later ones, where sending them costs too much.
    `builder`: None for `build_engine`. `kill_after` is called in a thread of its own once the engine has to end.
    """
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    outputs = OutputQueue()
    writer = threading.Thread(target=_write, args=(conn, outputs), name="engine-writer", daemon=True)
    writer.start()
    # Before anything slow: a model that loads must notice a front end that is gone.
    threading.Thread(target=_read, args=(conn, inbox, kill_after), name="engine-reader", daemon=True).start()
    engine: Engine | None = None
    integrity = ""
    try:
        if builder is None:
            from loraplex_server.engine.assembly import build_engine as builder  # late: it needs a model
        engine = builder(config, lambda text: outputs.put(Starting(text)), lambda: inbox.put(Wake()))
        outputs.throttle = SendThrottle(delivery_share(engine.info.device), max_stream_wait_s)
        timer = TurnTimer(heartbeat, StepBound(config.step_timeout_s))
        engine.on_step = timer.step
        with heartbeat.beating():
            outputs.put(Ready(engine.info))
            _loop(engine, inbox, outputs, timer)
        integrity = engine.integrity_report()
    except LoraplexError as error:
        outputs.put(StartFailed(error))
    except Exception:
        log.exception("the engine ended on an unexpected error")
        outputs.put(StartFailed(Internal("the engine could not go on; its log says why")))
    finally:
        if engine is not None:
            _close(engine)
            outputs.put(Stopped(integrity))
        outputs.close()
        writer.join(timeout=10)
        with contextlib.suppress(OSError):
            conn.close()


def _close(engine: Engine) -> None:
    try:
        engine.close()
    except Exception:  # nothing can be freed on a lost device; the front end is told of the end all the same
        log.exception("the engine could not be closed")


def _loop(engine: Engine, inbox: queue.SimpleQueue[Command], outputs: OutputQueue, timer: TurnTimer) -> None:
    while True:
        timeout_s = 0.0 if engine.can_step else engine.idle_timeout_s()
        commands = _take(inbox, timeout_s)
        timer.begin()
        for command in commands:
            if isinstance(command, Shutdown):
                outputs.put(engine.abort_all())
                return
            if isinstance(command, SendCost):
                outputs.throttle.message_s = command.cpu_s
            else:
                engine.handle(command)
        batch = engine.turn()
        timer.end()
        if batch is not None:
            outputs.put(batch)


def _take(inbox: queue.SimpleQueue[Command], timeout_s: float | None) -> list[Command]:
    """Everything in the inbox; waits up to `timeout_s` for the first (None: for ever)."""
    commands: list[Command] = []
    try:
        if timeout_s is None or timeout_s > 0:
            commands.append(inbox.get(timeout=timeout_s))
        while True:
            commands.append(inbox.get_nowait())
    except queue.Empty:
        return commands


def _read(conn: Connection, inbox: queue.SimpleQueue[Command], kill_after: Callable[[float], None]) -> None:
    try:
        # Nothing counts after a Shutdown, and the connection is closed soon.
        while not isinstance(command := conn.recv(), Shutdown):
            inbox.put(command)
    except (EOFError, OSError, TypeError):  # TypeError: `serve_engine` has closed it amid a message
        inbox.put(Shutdown())
        kill_after(ORPHAN_END_S)
    else:
        inbox.put(command)
        kill_after(SHUTDOWN_END_S)


def _write(conn: Connection, outputs: OutputQueue) -> None:
    try:
        while messages := outputs.take():
            for message in messages:
                conn.send_bytes(dumps(message))
    except (BrokenPipeError, OSError):
        return  # the front end is gone; the reader sees it too and ends the loop
