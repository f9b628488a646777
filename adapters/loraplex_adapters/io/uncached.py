"""Reads and writes that leave no pages in the system's cache.

The system has to find memory for every page that it keeps, and where a virtual machine gives unused memory back to its
host, each new page costs a fault there: 10 us or more, half of the time of a load. Linux has a flag for this since
6.14; an older kernel or C library, or a file system in memory, reads and writes as always. Pages that are in the cache
already stay there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

# RWF_DONTCACHE of linux/fs.h, which Python has no name for. Without RWF_HIPRI there is no preadv2 to give it to.
_DONTCACHE: Final = 0x80 if hasattr(os, "RWF_HIPRI") else 0
_UNKNOWN: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})

PAGE_BYTES: Final = 4096
# Written at a time, in whole pages: for part of a page the system would read the rest of it back.
CHUNK_BYTES: Final = 256 << 10
# Smaller reads go through the cache: the next one is often in the same page.
MIN_READ_BYTES: Final = 64 << 10


def read_uncached(fd: int, buffer: memoryview, offset: int) -> int:
    """Reads as os.preadv does. Returns how many bytes were read, 0 at the end of the file."""
    if buffer.nbytes < MIN_READ_BYTES:
        return os.preadv(fd, [buffer], offset)
    return _call_uncached(os.preadv, fd, buffer, offset)


def write_uncached(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data`. Raises OSError."""
    while data.nbytes > 0:
        done = _call_uncached(os.pwritev, fd, data, offset)
        data, offset = data[done:], offset + done


def _call_uncached(call: Callable[..., int], fd: int, data: memoryview, offset: int) -> int:
    """Calls os.preadv or os.pwritev with the flag, or without it where the system refuses it."""
    if _DONTCACHE:
        try:
            return call(fd, [data], offset, _DONTCACHE)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    return call(fd, [data], offset)


class ChunkWriter:
    """Writes pieces to a file from `start` on, in whole chunks, and shows each to `see` first. Owns the bytes not
    written yet. They are in `memory` where that is given, which then holds all pieces, one after the other."""

    def __init__(self, fd: int, start: int, see: Callable[[memoryview], None], memory: memoryview | None) -> None:
        self._fd = fd
        self._start = start
        self._see = see
        self._memory: NDArray[np.uint8] = np.frombuffer(memory or bytearray(CHUNK_BYTES), dtype=np.uint8)
        self._num_written = 0
        self.num_bytes = 0

    def __call__(self, data: memoryview) -> None:
        self._see(data)
        while data.nbytes > 0:
            at = self.num_bytes % len(self._memory)
            end = min(self._num_written + CHUNK_BYTES - self.num_bytes + at, len(self._memory))
            num = min(data.nbytes, end - at)
            # By numpy, without the interpreter lock: the system may have to clear memory that is new.
            np.copyto(self._memory[at : at + num], np.frombuffer(data[:num], dtype=np.uint8))
            self.num_bytes += num
            if at + num == end:
                self.flush()
            data = data[num:]

    def flush(self) -> None:
        """Writes what is left."""
        num = self.num_bytes - self._num_written
        if num == 0:
            return
        first = self._num_written % len(self._memory)
        write_uncached(self._fd, self._memory[first : first + num].data, self._start + self._num_written)
        self._num_written = self.num_bytes
