"""Working directory of child processes, where this process's own is of no use.

It may be deleted while a server runs, and a server may be started in one that its user may not enter. Then no relative
path leads anywhere, and children start in `/`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Final

ROOT: Final = "/"


def child_folder() -> str | None:
    """None where a child can start in this process's working directory, else the one where it can."""
    try:
        return None if os.access(os.getcwd(), os.X_OK) else ROOT
    except OSError:  # deleted
        return ROOT


@contextlib.contextmanager
def in_child_folder() -> Generator[None]:
    """Has this process in `child_folder` while it starts a child of multiprocessing, which goes where its parent is. It
    returns where that can be done, so that relative paths go on leading nowhere."""
    folder = child_folder()
    if folder is None:
        yield
        return
    own = -1
    with contextlib.suppress(OSError):
        own = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
    os.chdir(folder)
    try:
        yield
    finally:
        if own >= 0:
            with contextlib.suppress(OSError):
                os.fchdir(own)
            os.close(own)
