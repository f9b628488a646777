"""Limit of a process's open files: each connection is one."""

from __future__ import annotations

import contextlib
import resource
from typing import Final

# Beyond what a process can use; a hard limit may be a billion, which programs that close all descriptors go through.
MAX_FILES: Final = 1 << 20


def raise_file_limit() -> None:
    """Raises the soft limit to the hard one, or to MAX_FILES, for this process and those that it starts. The usual soft
    limit of 1024 is there for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # some systems have a lower bound that they do not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
