"""Loader of the native CPU library, with the reason where it cannot be used.

A library of another version or other sources is refused. prototypes.py lists its functions, kernels.py calls them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from loraplex_server.backends.cpu.native.build import (
    LIBRARY,
    SOURCES,
    BuildError,
    built_from,
    source_hash,
    this_machine,
)
from loraplex_server.backends.cpu.native.prototypes import ABI_VERSION, IDENTITY, KERNELS, Prototype

_HOW: Final = "python -m loraplex_server.backends.cpu.native.build"


class NativeStatus(NamedTuple):
    usable: bool
    reason: str  # why it cannot be used; empty where it can
    isa: str  # the instruction set that runs here; empty where none does


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library. Its functions are called as `library.functions.lp_name(...)`, without the GIL."""

    functions: Any  # ctypes.CDLL; each function of prototypes.py has its types
    path: Path

    @property
    def isa(self) -> str:
        """The instruction set of the variant that runs."""
        name: bytes = self.functions.lp_isa()
        return name.decode()


class Loaded(NamedTuple):
    """The library, or none and why."""

    library: Library | None
    status: NativeStatus


def load(path: Path = LIBRARY, sources: Path = SOURCES, kernels: Mapping[str, Prototype] = KERNELS) -> Loaded:
    """Loads the library at `path` if it was made of `sources` as they are, is of this version, and runs on this CPU."""
    try:
        library = _open(path, sources, kernels)
    except _Refused as refused:
        return Loaded(None, NativeStatus(False, str(refused), ""))
    return Loaded(library, NativeStatus(True, "", library.isa))


class _Refused(Exception):
    """The library cannot be used, and why."""


def _open(path: Path, sources: Path, kernels: Mapping[str, Prototype]) -> Library:
    try:
        this_machine()
        present = source_hash(sources)
    except BuildError as error:
        raise _Refused(str(error)) from None
    if not path.exists():
        raise _Refused(f"not built; with a C++ compiler, {_HOW} builds it")
    # Before it is loaded, so that nothing of a stale library ever runs.
    if built_from(path) != present:
        raise _Refused(f"built from other sources than those that are there; {_HOW} builds it anew")
    try:
        functions = ctypes.CDLL(str(path))
        _declare(functions, IDENTITY)
        version = functions.lp_abi_version()
        if version != ABI_VERSION:
            raise _Refused(f"of version {version}, and this package is made for {ABI_VERSION}; {_HOW} builds it anew")
        _declare(functions, kernels)
    except (OSError, AttributeError) as error:  # a system library that is missing or too old; a function that is
        raise _Refused(f"does not load: {error}") from None
    library = Library(functions, path)
    if not functions.lp_has_kernels():
        raise _Refused("this CPU has none of the instruction sets that it was built for")
    return library


def _declare(functions: ctypes.CDLL, prototypes: Mapping[str, Prototype]) -> None:
    for name, prototype in prototypes.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = prototype.returns, prototype.arguments
