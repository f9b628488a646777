"""Environment variables of the native kernels: compiler, number of threads."""

from __future__ import annotations

import os
import shlex


def compiler_from_environment() -> tuple[str, ...]:
    """$CXX as words (it may hold arguments, or ccache in front), none where it is not set."""
    return tuple(shlex.split(os.environ.get("CXX", "")))


def threads_from_environment() -> int | None:
    """$OMP_NUM_THREADS; of a list (one number for each level of nesting) the first. None where there is no number."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None
