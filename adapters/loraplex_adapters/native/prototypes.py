"""The C functions of the native library, as ctypes sees them. One row for each function; the loader reads the table.

Belongs to src/*.cpp: whoever changes a function's arguments there changes its row here and ABI_VERSION in both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

ABI_VERSION: Final = 1  # kAbiVersion in src/version.cpp


class Prototype(NamedTuple):
    """What a function returns (None: nothing) and takes."""

    returns: Any
    arguments: tuple[Any, ...] = ()


# Those that say what the library is; they never change, or no old library could be told from a new one.
IDENTITY: Final[Mapping[str, Prototype]] = {
    "lp_abi_version": Prototype(ctypes.c_int),
    "lp_source_hash": Prototype(ctypes.c_char_p),
    "lp_isa": Prototype(ctypes.c_char_p),
}

KERNELS: Final[Mapping[str, Prototype]] = {
    "lp_use_isa": Prototype(ctypes.c_int, (ctypes.c_char_p,)),
}
