"""Log handler that never waits for the reader of its lines."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

# Lines that wait while nobody reads: 3 MB of 300 bytes each. Later ones are dropped and counted.
MAX_WAITING: Final = 10_000
# What is said last is worth a moment at the end of the process, but a stopped reader must not hold it up.
FLUSH_S: Final = 2.0
# One write to a pipe is in one piece up to PIPE_BUF: processes that share it do not cut each other's lines. One byte of
# it ends a line that was cut before.
PIECE_BYTES: Final = select.PIPE_BUF - 1


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
        # The thread's own: lines that could not be written, why, and whether the last one was cut.
        self._num_lost = 0
        self._why_lost = ""
        self._is_cut = False
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
                lines.append(self._remark(f"{num_dropped} log lines were dropped, because nobody read them"))
            if self._num_lost:
                remark = self._remark(f"up to {self._num_lost} log lines could not be written: {self._why_lost}")
                self._num_lost *= not self._write([remark])
            self._num_lost += len(lines) - self._write(lines)

    def _remark(self, text: str) -> str:
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))

    def _write(self, lines: Sequence[str]) -> int:
        """How many of the lines were written, all or the first ones: the reader is gone, or the disk is full.

        Writes to the descriptor itself: a lock of `sys.stderr` held here would block other writers and the end."""
        num_written = 0
        for piece, num_lines in _pieces(lines):
            data = b"\n" * self._is_cut + piece
            try:
                while data:
                    try:
                        num_bytes = os.write(self._descriptor, data)
                        data, self._is_cut = data[num_bytes:], num_bytes < len(data)
                    except BlockingIOError:  # another program has made it non-blocking
                        select.select([], [self._descriptor], [])
            except OSError as error:
                self._why_lost = error.strerror or str(error)
                return num_written
            num_written += num_lines
        return num_written


def _pieces(lines: Iterable[str]) -> Iterator[tuple[bytes, int]]:
    """Lines together up to PIECE_BYTES, longer ones by themselves; with their number."""
    piece, num_lines = b"", 0
    for line in lines:
        data = f"{line}\n".encode(errors="backslashreplace")
        if piece and len(piece) + len(data) > PIECE_BYTES:
            yield piece, num_lines
            piece, num_lines = b"", 0
        piece, num_lines = piece + data, num_lines + 1
    if piece:
        yield piece, num_lines
