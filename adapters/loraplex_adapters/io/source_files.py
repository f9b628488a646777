"""Interfaces of sources and their open files; JSON read without trust.

A source finds an adapter's files by its name and reads them; it does not know formats, digests, or what becomes of the
bytes. Everything here is called from a background thread and may block. Files are read with explicit reads, never
mapped: a file that is cut while it is mapped would kill the process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from loraplex_contracts.errors import AdapterInvalid


class SourceFile(Protocol):
    """One open regular file."""

    @property
    def num_bytes(self) -> int: ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills all of `buffer` from `offset`. Raises AdapterInvalid when the file ends before."""
        ...

    def check_unchanged(self) -> None:
        """Raises SourceUnavailable when the file was written to since it was opened."""
        ...


class AdapterFiles(Protocol):
    """The files of one adapter, open until the end of the `with` block."""

    @property
    def names(self) -> frozenset[str]: ...

    def open(self, name: str) -> SourceFile:
        """Raises AdapterInvalid when it is not a regular file, AdapterOutsideRoot when it is a link to elsewhere."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class AdapterSource(Protocol):
    """Finds adapters by name."""

    def open(self, adapter_id: str) -> AdapterFiles:
        """Raises AdapterNotFound, or SourceUnavailable when the source cannot be read now."""
        ...

    def list(self) -> Sequence[str]:
        """The present names, sorted; empty for a source that cannot be listed. For one thread; a source keeps what it
        found, so that listing again costs little. Raises SourceUnavailable."""
        ...


def read_all(file: SourceFile, max_bytes: int, what: str) -> bytes:
    """A small file at once. Raises AdapterInvalid when it is larger than `max_bytes`."""
    if file.num_bytes > max_bytes:
        raise AdapterInvalid(f"{what} has {file.num_bytes} bytes; at most {max_bytes} are read")
    data = bytearray(file.num_bytes)
    file.read_into(memoryview(data), 0)
    return bytes(data)


def parse_object(data: bytes, what: str, max_bytes: int) -> dict[str, Any]:
    """The JSON object in `data`. `what` names the file in the errors. Raises AdapterInvalid."""
    if len(data) > max_bytes:
        raise AdapterInvalid(f"{what} has {len(data)} bytes; at most {max_bytes} are read")
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise AdapterInvalid(f"{what} is nested too deeply") from None
    except ValueError as error:  # malformed JSON, bad UTF-8, a number of thousands of digits
        raise AdapterInvalid(f"{what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(parsed, dict):
        raise AdapterInvalid(f"{what} is not a JSON object")
    return parsed


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice[:80]!a} appears twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
