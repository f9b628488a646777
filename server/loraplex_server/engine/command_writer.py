"""Writer of the engine's commands: sends at once what the pipe takes at once, and the rest from a thread.

The pipe of a frozen engine fills up, and a write to it would then hold the event loop of the front end for good.
"""

from __future__ import annotations

import contextlib
import queue
import select
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Final

from loraplex_server.engine.messages import Command, Connection

# A pipe that Linux calls writable takes this much without blocking: three quarters of its buffer of 208 KiB are free.
DIRECT_BYTES: Final = 1 << 16 if sys.platform == "linux" else 0


class CommandWriter:
    """Owns the thread, what is not sent yet, and the end of the connection. Commands arrive in their order."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._poll = select.poll()
        self._poll.register(conn.fileno(), select.POLLOUT)
        self._unsent: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._num_unsent = 0  # put to the queue and not yet written; the lock holds it
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="engine-commands", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """Raises OSError when the engine is gone."""
        payload = ForkingPickler.dumps(command)
        with self._lock:
            is_direct = not self._num_unsent and len(payload) <= DIRECT_BYTES and bool(self._poll.poll(0))
            self._num_unsent += not is_direct
        if is_direct:
            self._conn.send_bytes(payload)
        else:
            self._unsent.put(payload)

    def close(self) -> None:
        """Closes the connection as soon as no write is under way; one to an engine that is gone ends at once."""
        self._unsent.put(None)

    def _write(self) -> None:
        while (payload := self._unsent.get()) is not None:
            with contextlib.suppress(OSError):  # the engine is gone, which the reader of the pipe sees too
                self._conn.send_bytes(payload)
            with self._lock:
                self._num_unsent -= 1
        self._conn.close()
