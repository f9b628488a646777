"""Instruction sets of the CPU that a measurement may be limited to.

Our kernels are told by their library. oneDNN, which torch, vLLM and the floor multiply with, and torch itself read the
environment of their process when they first compute.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# The best first, with what limits the others to them. On Arm torch and oneDNN have settings too, never tried, and what
# they call (Compute Library) looks at the CPU itself: there our kernels alone are limited.
ISAS: Mapping[str, Mapping[str, str]] = {
    "amx": {},
    "avx512bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "sve256": {},
    "neonbf16": {},
    "neon": {},
}


def limit_environment(isa: str | None) -> None:
    """Limits the CPU for this process, where it has not computed yet, and for all that it starts. None: no limit."""
    os.environ.update(ISAS[isa] if isa is not None else {})


def use_isa(isa: str | None) -> None:
    """Limits our kernels in this process. None: the best that there is."""
    if isa is None:
        return
    from loraplex_server.backends.cpu.native.library import load

    library, status = load()
    if library is None:
        raise SystemExit(f"no native CPU kernels here: {status.reason}")
    if library.functions.lp_use_isa(isa.encode()) != 0:
        raise SystemExit(f"no kernels for {isa} here; the best are those for {library.isa}")
