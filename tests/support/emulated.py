"""Pytest plugin: native kernels of another library, whose path is in LORAPLEX_TEST_KERNELS."""

from __future__ import annotations

import os
from pathlib import Path

from loraplex_server.backends.cpu.native import library

VARIABLE = "LORAPLEX_TEST_KERNELS"

if path := os.environ.get(VARIABLE):  # now: folders' conftest.py already ask for instruction sets
    library.LIBRARY = Path(path)  # pyright: ignore[reportConstantRedefinition]
