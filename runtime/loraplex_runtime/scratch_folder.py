"""Folder for the temporary files of a child process.

Parent and child hold its lock. The next parent removes folders that nobody holds: those whose processes were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from loraplex_contracts.errors import FailedPrecondition

_LOCK_NAME: Final = "lock"
# A folder this young may belong to a process that is about to lock it.
_ABANDONED_S: Final = 60.0


class Scratch:
    """Owner of a folder for the temporary files of a child, in its parent."""

    def __init__(self, prefix: str) -> None:
        """Makes the folder, and removes abandoned ones whose names begin with `prefix`, as its own does. Raises
        FailedPrecondition where there is no room for temporary files."""
        try:
            _remove_abandoned(Path(tempfile.gettempdir()), prefix)
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock_fd = _hold(self.path)
        except OSError as error:
            raise FailedPrecondition(
                f"there is no place for temporary files ({error.strerror or error}); name a folder that can be written "
                "with the variable TMPDIR, or make room"
            ) from error

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def use_scratch(path: Path) -> None:
    """Makes this process, the child, put its temporary files in `path`."""
    _hold(path)
    tempfile.tempdir = str(path)


def _hold(path: Path) -> int:
    """Takes a shared lock on the folder. Removing an abandoned folder needs the exclusive one."""
    fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes this user's folders in `parent` whose processes are gone without having removed them (killed)."""
    for root in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(root)


def _remove_if_abandoned(root: Path) -> None:
    """Removes a folder of this user that no process holds. Raises OSError where there is none, or it is held."""
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    fd = os.open(root / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if time.time() - os.fstat(fd).st_mtime < _ABANDONED_S:
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(fd)
