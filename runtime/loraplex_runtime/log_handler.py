"""Log handler that never waits for the reader of its lines."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from typing import Final

# Lines that wait while nobody reads: 3 MB of 300 bytes each. Later ones are dropped and counted.
MAX_WAITING: Final = 10_000
# What is said last is worth a moment at the end of the process, but a stopped reader must not hold it up.
FLUSH_S: Final = 2.0


class UnblockedHandler(logging.Handler):
    """Writes each record as a line to a file descriptor, in a thread of its own.

    A pipe to a program that is frozen, a terminal after Ctrl-S, a disk that hangs: each would else stop every request
    of the process at its next log line. Owns the waiting lines.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: deque[str] = deque()
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition(threading.Lock())  # over the three above
        # Now, because an interpreter that ends starts no threads.
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(line)
                self._changed.notify_all()
            else:
                self._num_dropped += 1

    def flush(self) -> None:
        """Waits until all lines are written, `FLUSH_S` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, FLUSH_S)

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                lines, num_dropped = list(self._waiting), self._num_dropped
                self._waiting.clear()
                self._num_dropped = 0
                self._is_writing = True
            if num_dropped:
                text = f"{num_dropped} log lines were dropped, because nobody read them"
                lines.append(self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)))
            self._write("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))

    def _write(self, data: bytes) -> None:
        """Writes to the descriptor itself: a lock of `sys.stderr` held here would block other writers and the end."""
        with contextlib.suppress(OSError):  # the reader is gone, or the disk is full: these lines are lost
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # another program has made it non-blocking
                    select.select([], [self._descriptor], [])
