"""Files that are read or written once: the system is asked not to keep their pages.

Every page that the system keeps is one that it has to find, and where a virtual machine gives unused memory back to its
host, each new page costs a fault there: 10 us or more, half of the time of a load. Linux has had a flag for this since
6.14; what does not know it (an older kernel or C library, a file system in memory) reads and writes as always. What is
in the system's cache already stays there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

# RWF_DONTCACHE of linux/fs.h, which Python has no name for. Without preadv2 it knows none of its kind.
_ONCE: Final = 0x80 if hasattr(os, "RWF_HIPRI") else 0
_UNKNOWN: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})

PAGE_BYTES: Final = 4096
# Written at a time: part of a page would be read again for its other part, and more is not done with before more comes.
CHUNK_BYTES: Final = 256 << 10
# Smaller reads are of files of which more is read soon, a part of a page or a row after the other.
MIN_READ_BYTES: Final = 64 << 10


def read_once(fd: int, buffer: memoryview, offset: int) -> int:
    """As os.preadv: how many bytes were read, 0 at the end of the file."""
    if buffer.nbytes < MIN_READ_BYTES:
        return os.preadv(fd, [buffer], offset)
    return _once(os.preadv, fd, buffer, offset)


def write_once(fd: int, data: memoryview, offset: int) -> None:
    """All of `data`. Raises OSError."""
    while data.nbytes > 0:
        done = _once(os.pwritev, fd, data, offset)
        data, offset = data[done:], offset + done


def _once(call: Callable[..., int], fd: int, data: memoryview, offset: int) -> int:
    """os.preadv or os.pwritev with the flag, or without it where the system refuses it."""
    if _ONCE:
        try:
            return call(fd, [data], offset, _ONCE)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    return call(fd, [data], offset)


class ChunkWriter:
    """Writes what it is given to a file from `start` on, in whole chunks, and shows every piece to `see` first. Owns
    what is not written yet, in `memory` where that is given: then all that was given is there, one after the other."""

    def __init__(
        self, fd: int, start: int, see: Callable[[memoryview], None], memory: memoryview | None = None
    ) -> None:
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
        write_once(self._fd, self._memory[first : first + num].data, self._start + self._num_written)
        self._num_written = self.num_bytes
