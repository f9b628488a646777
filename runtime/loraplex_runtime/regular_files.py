"""Reads of regular files, which nothing else in their place can hold up."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, max_bytes: int = -1) -> bytes:
    """The content of a regular file, `max_bytes` of it at most. Raises OSError, for a FIFO at once: one would hold the
    thread until somebody writes to it."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return file.read(max_bytes)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
