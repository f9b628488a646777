"""What the build of the native kernels takes from the environment. The only place here that reads it."""

from __future__ import annotations

import os
import shlex


def compiler_from_environment() -> tuple[str, ...]:
    """$CXX as words (it may hold arguments, or ccache in front), none where it is not set."""
    return tuple(shlex.split(os.environ.get("CXX", "")))
