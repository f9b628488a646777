"""A root directory as a source: adapter NAME (or ORG/NAME) is that folder.

Links are followed as far as they stay inside the root (io/confined_folder.py), so its content cannot lead outside. In a
single folder that the operator has named, links lead anywhere. Owns only the descriptors of open adapters.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from loraplex_adapters.formats.files import ADAPTER_NAMES, PICKLE_NAMES, has_model_layout
from loraplex_adapters.formats.whole_model import describe_medusa_model
from loraplex_adapters.io.confined_folder import BadPath, Folder, kind_of
from loraplex_adapters.io.source_files import SourceFile
from loraplex_adapters.io.uncached import read_uncached
from loraplex_adapters.sources.index import DirectoryIndex
from loraplex_contracts.adapters import check_adapter_id
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterOutsideRoot,
    LoraplexError,
    SourceUnavailable,
    adapter_not_found,
)

log = logging.getLogger(__name__)

MAX_FILES = 4096
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR})  # a file in a folder's place is not an adapter


class OpenFile:
    """A regular file, read by position."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name
        self._opened = os.fstat(fd)

    @property
    def num_bytes(self) -> int:
        return self._opened.st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = read_uncached(self._fd, buffer[done:], offset + done)
            except OSError as error:
                raise _unavailable(f"{self._name} cannot be read", error) from error
            if count == 0:
                raise AdapterInvalid(f"{self._name} is cut short: it ends at byte {offset + done}")
            done += count

    def check_unchanged(self) -> None:
        now, then = os.fstat(self._fd), self._opened
        if (now.st_size, now.st_mtime_ns, now.st_ino) != (then.st_size, then.st_mtime_ns, then.st_ino):
            raise SourceUnavailable(
                f"{self._name} was written to while it was read; replace files by renaming, and load the adapter again",
                retry_after_s=1.0,
            )


class OpenFolder(Protocol):
    """A folder whose files are read: one beneath a root (confined_folder.Folder), or one that the operator named."""

    @property
    def fd(self) -> int: ...

    def open_file(self, path: str) -> int:
        """The descriptor of a regular file. Raises OSError or BadPath."""
        ...

    def close(self) -> None: ...


class NamedFolder:
    """A folder that the operator has named: links in it lead wherever they lead. Owns its descriptor."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._is_open = True

    @property
    def fd(self) -> int:
        return self._fd

    def open_file(self, path: str) -> int:
        try:
            _check_regular(os.stat(path, dir_fd=self._fd).st_mode)
            # Without O_NONBLOCK, what is a FIFO by now would wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        except FileNotFoundError:
            raise BadPath("is a link to nothing") from None
        try:
            _check_regular(os.fstat(fd).st_mode)
        except BadPath:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._fd)


class DirectoryFiles:
    """The files of one adapter's folder. Owns the folder and the files opened through it."""

    def __init__(self, folder: OpenFolder, adapter_id: str) -> None:
        """Takes over the folder, also where it raises."""
        self._folder = folder
        self._adapter_id = adapter_id
        self._open: list[int] = []
        try:
            self.names = frozenset(_names(folder.fd))
        except BaseException:
            folder.close()
            raise

    def open(self, name: str) -> SourceFile:
        if name not in self.names:
            raise adapter_not_found(self._adapter_id)
        try:
            fd = self._folder.open_file(name)
        except (OSError, BadPath) as error:
            raise _translated(error, self._adapter_id, name) from error
        self._open.append(fd)
        return OpenFile(fd, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)
        self._open.clear()
        self._folder.close()


class FolderSource:
    """One adapter in a folder of any name: a model's own directory with Medusa heads in it, say. The operator names the
    folder, so links in it are followed wherever they lead: the Hub's cache is made of links."""

    def __init__(self, adapter_id: str, folder: Path) -> None:
        self._adapter_id = adapter_id
        self._folder = folder

    def open(self, adapter_id: str) -> DirectoryFiles:
        if adapter_id != self._adapter_id:
            raise adapter_not_found(adapter_id)
        return open_folder(self._folder, adapter_id)

    def list(self) -> Sequence[str]:
        return [self._adapter_id]


class DirectorySource:
    """Adapters in a directory of the operator's. Links in it are followed as far as they lead to what is in it too."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._index = DirectoryIndex(_holds_adapter)

    def open(self, adapter_id: str) -> DirectoryFiles:
        check_adapter_id(adapter_id)
        root = self._open_root()
        try:
            folder = root.open_folder(adapter_id)
        except (OSError, BadPath) as error:
            raise _translated(error, adapter_id, "its folder") from error
        finally:
            root.close()
        return DirectoryFiles(folder, adapter_id)

    def list(self) -> Sequence[str]:
        root = self._open_root()
        try:
            return self._index.look(root)
        finally:
            root.close()

    def _open_root(self) -> Folder:
        try:
            return Folder.root(self._root)
        except OSError as error:
            raise _unavailable("the directory of adapters cannot be opened", error) from error


def open_folder(folder: Path, adapter_id: str = "") -> DirectoryFiles:
    """The files of a folder that the operator has named. Raises SourceUnavailable when it cannot be opened."""
    try:
        named = NamedFolder(folder)
    except OSError as error:
        raise _unavailable(f"the folder of {adapter_id!a} cannot be opened", error) from error
    return DirectoryFiles(named, adapter_id)


def _holds_adapter(folder: Folder, names: set[str], adapter_id: str) -> bool:
    """By the names of its files; what is laid out like a whole model is one when it has heads in it."""
    if not names.isdisjoint((*ADAPTER_NAMES, *PICKLE_NAMES)):
        return True
    if not has_model_layout(names):
        return False
    with DirectoryFiles(folder.open_folder("."), adapter_id) as files:
        try:
            return describe_medusa_model(files).content != "none"
        except LoraplexError:
            return True  # damaged: a request for it is told why it is refused


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise BadPath(f"is a {kind_of(mode)}")


def _names(fd: int) -> Iterator[str]:
    with os.scandir(fd) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > MAX_FILES:
                raise AdapterInvalid(f"the adapter's folder has more than {MAX_FILES} files")
            yield entry.name


def _translated(error: OSError | BadPath, adapter_id: str, what: str) -> LoraplexError:
    """The message about a link depends on the link alone, never on its target outside."""
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
    return _unavailable(f"{what} of adapter {adapter_id!a} cannot be opened", error)


def _unavailable(what: str, error: OSError) -> SourceUnavailable:
    return SourceUnavailable(f"{what} ({error.strerror or 'unknown reason'}); try again later", retry_after_s=5.0)
