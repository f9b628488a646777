"""Locks of files (flock): one process at a time has a device or folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loraplex_contracts.errors import FailedPrecondition

LOOK_S: Final = 0.1


def hold(path: Path, what: str, wait_s: float, on_wait: Callable[[str], None]) -> int:
    """The descriptor that holds the lock, until it is closed or the process ends. Another holder gets `wait_s` to end,
    and `on_wait` is told so once. Raises FailedPrecondition."""
    descriptor = _open(path, what)
    until_s, has_said = time.monotonic() + wait_s, False
    while not _try(descriptor):
        if time.monotonic() >= until_s:
            os.close(descriptor)
            raise FailedPrecondition(
                f"{what} is still used by another process after {wait_s:.0f} s; end that one, or give this one another"
            )
        if not has_said:
            on_wait(f"waiting for up to {wait_s:.0f} s until the process before this one leaves {what}")
            has_said = True
        time.sleep(LOOK_S)
    return descriptor


def try_hold(path: Path, what: str) -> int | None:
    """The descriptor that `hold` gives, without a wait: None where another process holds it."""
    descriptor = _open(path, what)
    if _try(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _open(path: Path, what: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise FailedPrecondition(f"{path}, the lock of {what}, cannot be opened: {error.strerror}") from error


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
