"""The folder for temporary files of one engine process: the adapter store, and what is downloaded.

The front end makes it and removes it when the engine has ended, however it ended. An engine that loses its front end
removes it itself. Each holds a lock on it for as long as it lives; the next start removes what both left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from loraplex_adapters.store import LOCK_NAME, remove_abandoned

PREFIX: Final = "loraplex-engine-"


class Scratch:
    """The front end's side: owns the folder."""

    def __init__(self) -> None:
        """Raises OSError where there is no room for temporary files."""
        remove_abandoned(Path(tempfile.gettempdir()), PREFIX)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock_fd = _hold(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def use_scratch(path: Path) -> None:
    """The engine's side: from here on this process makes its temporary files in `path`."""
    _hold(path)
    tempfile.tempdir = str(path)


def _hold(path: Path) -> int:
    """Locks the folder, together with others. Whoever removes abandoned folders wants the lock alone."""
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd
