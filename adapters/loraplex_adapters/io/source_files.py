"""Files of adapters as sources open them; JSON read without trust.

A source finds an adapter's files by its name and reads them; it does not know formats, digests, or what becomes of the
bytes. Everything here is called from a background thread and may block. Files are read with explicit reads, never
mapped: a file that is cut while it is mapped would kill the process.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from loraplex_adapters.io.confined_folder import BadPath, Folder, NamedFolder
from loraplex_adapters.io.uncached import read_uncached
from loraplex_contracts.adapters import OWN_ORIGIN, AdapterOrigin
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterOutsideRoot,
    LoraplexError,
    SourceUnavailable,
    adapter_not_found,
)

log = logging.getLogger(__name__)

MAX_FILES = 4096
# A LoRA on every linear of a 126-layer model has 0.3 MB of header. The limit also bounds how long parsing it holds up
# the other threads of the process.
MAX_HEADER_BYTES = 4 << 20
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR})  # a file in a folder's place is not an adapter


class SourceFile:
    """A regular file, read by position. Owns its descriptor."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self._fd = fd
        self._opened = os.fstat(fd)

    @property
    def num_bytes(self) -> int:
        return self._opened.st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills all of `buffer` from `offset`. Raises AdapterInvalid when the file ends before."""
        done = 0
        while done < len(buffer):
            try:
                count = read_uncached(self._fd, buffer[done:], offset + done)
            except OSError as error:
                raise source_unavailable(f"{self.name} cannot be read", error) from error
            if count == 0:
                raise AdapterInvalid(f"{self.name} is cut short: it ends at byte {offset + done}")
            done += count

    def check_unchanged(self) -> None:
        """Raises SourceUnavailable when the file was written to since it was opened."""
        now, then = os.fstat(self._fd), self._opened
        # `cp -p` puts the time of modification back. That of the last change also moves where the name was given to
        # another file, and then the count of links does.
        is_changed = now.st_ctime_ns != then.st_ctime_ns and now.st_nlink == then.st_nlink
        if is_changed or (now.st_size, now.st_mtime_ns, now.st_ino) != (then.st_size, then.st_mtime_ns, then.st_ino):
            raise SourceUnavailable(
                f"{self.name} was written to while it was read; replace files by renaming, and load the adapter again",
                retry_after_s=1.0,
            )

    def close(self) -> None:
        os.close(self._fd)


class AdapterFiles:
    """The files of one adapter, each opened once, until the end of the `with` block. Owns the folder and the files."""

    def __init__(self, folder: Folder | NamedFolder, adapter_id: str) -> None:
        """Takes over the folder, also where this raises."""
        self._folder = folder
        self._adapter_id = adapter_id
        self.opened: dict[str, SourceFile] = {}
        try:
            self.names = frozenset(_names(folder.fd))
        except BaseException:
            folder.close()
            raise

    def open(self, name: str) -> SourceFile:
        """The open file of a name. Raises AdapterInvalid when it is not a regular file, AdapterOutsideRoot when it is a
        link to elsewhere."""
        if name in self.opened:
            return self.opened[name]
        if name not in self.names:
            raise adapter_not_found(self._adapter_id)
        return self._open(name)

    def find(self, name: str) -> SourceFile | None:
        """Does what `open` does, also for a file in a folder of the adapter's. None where there is none."""
        if name in self.opened:
            return self.opened[name]
        try:
            os.stat(name, dir_fd=self._folder.fd)
        except OSError:
            return None
        return self._open(name)

    def _open(self, name: str) -> SourceFile:
        try:
            fd = self._folder.open_file(name)
        except (OSError, BadPath) as error:
            raise open_error(error, self._adapter_id, name) from error
        file = self.opened[name] = SourceFile(fd, name)
        return file

    def check_unchanged(self) -> None:
        """Raises SourceUnavailable when one of the files was written to since it was opened."""
        for file in self.opened.values():
            file.check_unchanged()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self.opened.values():
            file.close()
        self.opened.clear()
        self._folder.close()


class AdapterSource(Protocol):
    """Finds adapters by name."""

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterFiles:
        """The files of a name; with a `origin.source` those that are there. Raises AdapterNotFound, also where the
        source has no such places, or SourceUnavailable when it cannot be read now."""
        ...

    def list(self) -> Sequence[str]:
        """The present names, sorted; empty for a source that cannot be listed. For one thread; a source keeps what it
        found, so that listing again costs little. Raises SourceUnavailable."""
        ...


def read_all(file: SourceFile, max_bytes: int) -> bytes:
    """The content of a small file. Raises AdapterInvalid when it is larger than `max_bytes`."""
    if file.num_bytes > max_bytes:
        raise AdapterInvalid(f"{file.name} has {file.num_bytes} bytes; at most {max_bytes} are read")
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


def read_json_header(file: SourceFile) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, its entries not checked, and the byte where its data begins. Raises
    AdapterInvalid, or what the file raises."""
    file_bytes, what = file.num_bytes, file.name
    if file_bytes < 8:
        raise AdapterInvalid(f"{what} is cut short: {file_bytes} bytes are not a safetensors file")
    prefix = _read(file, 0, 8)
    if prefix == b"version ":
        raise AdapterInvalid(f"{what} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise AdapterInvalid(f"{what} claims a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are read")
    data_start = 8 + header_bytes
    if data_start > file_bytes:
        raise AdapterInvalid(f"{what} is cut short: its header says {header_bytes} bytes, the file has {file_bytes}")
    entries = parse_object(_read(file, 8, header_bytes), f"the header of {what}", MAX_HEADER_BYTES)
    return entries, data_start


def _read(file: SourceFile, offset: int, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    file.read_into(memoryview(data), offset)
    return bytes(data)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice[:80]!a} appears twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _names(fd: int) -> Iterator[str]:
    with os.scandir(fd) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > MAX_FILES:
                raise AdapterInvalid(f"the adapter's folder has more than {MAX_FILES} files")
            yield entry.name


def open_error(error: OSError | BadPath, adapter_id: str, what: str) -> LoraplexError:
    """The typed error for a path that cannot be opened. The message about a link depends on the link alone, never on
    its target outside."""
    if isinstance(error, BadPath):
        log.warning("adapter %s: %s %s", ascii(adapter_id), ascii(what), error.why)
        cls = AdapterOutsideRoot if error.leads_out else AdapterInvalid
        advice = "put what it leads to in there too" if error.leads_out else "put a regular file in its place"
        return cls(
            f"adapter {adapter_id!a} cannot be read: {what} {error.why}; {advice}",
            field="adapter_id",
            resource=adapter_id,
        )
    if error.errno in _NOT_THERE:
        return adapter_not_found(adapter_id)
    return source_unavailable(f"{what} of adapter {adapter_id!a} cannot be opened", error)


def source_unavailable(what: str, error: OSError) -> SourceUnavailable:
    return SourceUnavailable(f"{what} ({error.strerror or 'unknown reason'}); try again later", retry_after_s=5.0)
