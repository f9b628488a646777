"""Recorded calls of the native library, for this machine and for an emulator."""

from __future__ import annotations

import bisect
import ctypes
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex_server.backends.cpu.native.library import KERNELS, Library

Bytes = NDArray[np.uint8]
ALIGN = 64


@dataclass(slots=True)
class Program:
    """Memory and calls over it. Addresses are those of this process."""

    buffers: list[Bytes] = field(default_factory=list[Bytes])
    dtypes: list[np.dtype[Any]] = field(default_factory=list[np.dtype[Any]])  # of what was put into them
    structs: list[Any] = field(default_factory=list[Any])  # keeps what they point to alive
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list[tuple[str, tuple[Any, ...]]])
    pointers: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])  # buffer, offset, address
    _starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def put(self, values: NDArray[Any], *, are_pointers: bool = False) -> int:
        """The address of a copy."""
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        place = np.zeros(data.nbytes + ALIGN, np.uint8)
        start = -place.ctypes.data % ALIGN
        buffer = place[start : start + data.nbytes]
        buffer[:] = data
        self.buffers.append(buffer)
        self.dtypes.append(values.dtype)
        idx = len(self.buffers) - 1
        bisect.insort(self._starts, (buffer.ctypes.data, idx))
        if are_pointers:
            self.pointers += [(idx, 8 * n, int(address)) for n, address in enumerate(values.reshape(-1)) if address]
        return buffer.ctypes.data

    def put_struct(self, value: Any) -> int:
        """The address of a copy of a ctypes structure, whose pointers are addresses of what was put before."""
        address = self.put(np.frombuffer(bytes(value), np.uint8))
        idx = len(self.buffers) - 1
        self.structs.append(value)
        self.pointers += [(idx, offset, to) for offset, to in _pointers_in(value) if to]
        return address

    def call(self, name: str, *arguments: Any) -> None:
        """Records a call, its pointers as addresses or None; the pool is left out."""
        self.calls.append((name, arguments))

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self, library: Library, num_threads: int = 2) -> None:
        """Runs the program here, in its own memory."""
        functions = library.functions
        pool = functions.lp_pool_new(num_threads)
        for name, arguments in self.calls:
            kinds = KERNELS[name].arguments[1:]
            given = [
                ctypes.cast(value, kind) if hasattr(kind, "contents") and value is not None else value
                for kind, value in zip(kinds, arguments, strict=True)
            ]
            getattr(functions, name)(pool, *given)
        functions.lp_pool_free(pool)

    def run_by(self, command: Sequence[str], folder: Path, isa: str) -> list[Bytes]:
        """Runs the program by native_driver.cpp, from the memory as it is. Returns the memory after the run."""
        (folder / "in").write_bytes(self._serialized())
        done = subprocess.run(
            [*command, str(folder / "in"), str(folder / "out"), isa],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == isa
        raw, found, start = (folder / "out").read_bytes(), list[Bytes](), 0
        for buffer in self.buffers:
            found.append(np.frombuffer(raw[start : start + buffer.nbytes], np.uint8))
            start += buffer.nbytes
        assert start == len(raw)
        return found

    def _place(self, address: int) -> bytes:
        _, idx = self._starts[bisect.bisect_right(self._starts, (address, len(self.buffers))) - 1]
        offset = address - self.buffers[idx].ctypes.data
        assert 0 <= offset < max(1, self.buffers[idx].nbytes), "an address outside the program's memory"
        return struct.pack("<iq", idx, offset)

    def _serialized(self) -> bytes:
        parts = [struct.pack("<i", len(self.buffers))]
        for buffer in self.buffers:
            parts += [struct.pack("<q", buffer.nbytes), buffer.tobytes()]
        parts.append(struct.pack("<i", len(self.pointers)))
        for idx, offset, to in self.pointers:
            parts += [struct.pack("<iq", idx, offset), self._place(to)]
        for name, arguments in self.calls:
            parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<i", len(arguments) + 1), b"p"]
            parts += [
                self._argument(kind, value) for kind, value in zip(KERNELS[name].arguments[1:], arguments, strict=True)
            ]
        return b"".join(parts)

    def _argument(self, kind: Any, value: Any) -> bytes:
        if kind is ctypes.c_float:
            return b"f" + struct.pack("<f", value)
        if kind in (ctypes.c_int, ctypes.c_int64):
            return b"i" + struct.pack("<q", value)
        return b"0" if value is None else b"b" + self._place(value)


def _pointers_in(value: Any, base: int = 0) -> list[tuple[int, int]]:
    """Offsets and addresses of a structure's pointers."""
    found: list[tuple[int, int]] = []
    for name, kind in value._fields_:
        offset, content = base + getattr(type(value), name).offset, getattr(value, name)
        if isinstance(content, ctypes.Structure):
            found += _pointers_in(content, offset)
        elif kind is ctypes.c_void_p:
            found.append((offset, content or 0))
        elif hasattr(kind, "contents"):
            found.append((offset, ctypes.cast(content, ctypes.c_void_p).value or 0))
    return found
