"""Native CPU kernels for tests, by instruction set."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from loraplex_server.backends.cpu.native.build import this_machine
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.cpu.native.library import Library, Loaded, load


@cache
def loaded() -> Loaded:
    return load()


def library_or_skip() -> Library:
    library, status = loaded()
    if library is None:
        pytest.skip(f"no native CPU kernels here: {status.reason}")
    return library


@cache
def isas() -> tuple[str, ...]:
    """Instruction sets that have kernels and run on this machine, the best one first; one empty name where there are
    none."""
    library = loaded().library
    if library is None:
        return ("",)
    best = library.isa
    try:
        usable = [name for name in this_machine().variants if _use(library, name)]
    finally:
        _use(library, best)
    return tuple(reversed(usable))


def best_first() -> list[Any]:
    """Parameters of a fixture: the best of them, and the others for the long suite."""
    first, *others = isas()
    return [first, *(pytest.param(isa, marks=pytest.mark.slow) for isa in others)]


@contextmanager
def using(isa: str) -> Generator[Library]:
    """Runs this variant until the end of the block; skips the test where there is no library."""
    library = library_or_skip()
    best = library.isa
    assert _use(library, isa), isa
    try:
        yield library
    finally:
        _use(library, best)


def native_kernels(num_threads: int = 2) -> NativeKernels:
    """Kernels of the variant that is in use. More threads than cores are as good a test as any."""
    return NativeKernels(library_or_skip(), num_threads)


def _use(library: Library, isa: str) -> bool:
    return bool(library.functions.lp_use_isa(isa.encode()) == 0)
