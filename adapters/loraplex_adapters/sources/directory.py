"""A root directory of adapters: adapter NAME (or ORG/NAME) is the folder of that name.

Every step below the root is opened relative to the one before and never through a symbolic link, so nothing outside the
root can be reached, whatever is put into it. A single folder that the operator has named is another matter: it is
whatever they say, links included (the Hub's cache is made of links). Owns no descriptors beyond an open adapter's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from loraplex_adapters.formats.detect import ADAPTER_NAMES, PICKLE_NAMES, has_model_layout
from loraplex_adapters.formats.model_files import describe_medusa_model
from loraplex_adapters.key import check_adapter_id
from loraplex_adapters.once import read_once
from loraplex_adapters.sources.base import SourceFile, not_found
from loraplex_proto.errors import AdapterInvalid, InvalidAdapterId, LoraplexError, SourceUnavailable

log = logging.getLogger(__name__)

MAX_FILES = 4096
MAX_LISTED = 100_000
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# What a symbolic link, a missing step or a file in a directory's place look like.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO})


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
                count = read_once(self._fd, buffer[done:], offset + done)
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


class DirectoryFiles:
    """The files of one adapter's folder. Owns the folder's descriptor and those of the files opened through it."""

    def __init__(self, fd: int, adapter_id: str, follows_links: bool = False) -> None:
        self._fd = fd
        self._adapter_id = adapter_id
        self._flags = _FILE & ~os.O_NOFOLLOW if follows_links else _FILE
        self._open: list[int] = []
        self.names = frozenset(_names(fd))

    def open(self, name: str) -> SourceFile:
        if name not in self.names:
            raise not_found(self._adapter_id)
        try:
            fd = os.open(name, self._flags, dir_fd=self._fd)
        except OSError as error:
            raise _translated(error, self._adapter_id, name) from error
        self._open.append(fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            log.warning("adapter %s: %s is no regular file", ascii(self._adapter_id), ascii(name))
            raise not_found(self._adapter_id)
        return OpenFile(fd, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for fd in (*self._open, self._fd):
            os.close(fd)
        self._open.clear()


class FolderSource:
    """One adapter, whatever its folder is called: a model's own directory with Medusa heads in it, say. The operator
    names the folder, and links in it are followed unless `follows_links` says otherwise."""

    def __init__(self, adapter_id: str, folder: Path, follows_links: bool = True) -> None:
        self._adapter_id = adapter_id
        self._folder = folder
        self._follows_links = follows_links

    def open(self, adapter_id: str) -> DirectoryFiles:
        if adapter_id != self._adapter_id:
            raise not_found(adapter_id)
        return open_folder(self._folder, adapter_id, self._follows_links)

    def list(self) -> Sequence[str]:
        return [self._adapter_id]


class DirectorySource:
    """Adapters in a directory of the operator's."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, adapter_id: str) -> DirectoryFiles:
        check_adapter_id(adapter_id)
        fd = self._open_root()
        try:
            for step in adapter_id.split("/"):
                inner = os.open(step, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
        except OSError as error:
            os.close(fd)
            raise _translated(error, adapter_id, "the folder") from error
        return open_files(fd, adapter_id)

    def list(self) -> Sequence[str]:
        try:
            fd = self._open_root()
        except SourceUnavailable:
            log.warning("the directory of adapters cannot be read")
            return []
        try:
            return sorted(self._adapters_in(fd, "", is_top=True))
        finally:
            os.close(fd)

    def _open_root(self) -> int:
        try:
            # The root is the operator's own word: it may be a link.
            return os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unavailable("the directory of adapters cannot be opened", error) from error

    def _adapters_in(self, fd: int, prefix: str, is_top: bool) -> Iterator[str]:
        """Folders with an adapter's files in them, one or two levels below the root."""
        for entry in itertools.islice(_entries(fd), MAX_LISTED):
            adapter_id = prefix + entry
            with contextlib.suppress(OSError, InvalidAdapterId):
                check_adapter_id(adapter_id)
                inner = os.open(entry, _DIRECTORY, dir_fd=fd)
                try:
                    if _holds_adapter(inner, adapter_id):
                        yield adapter_id
                    elif is_top:
                        yield from self._adapters_in(inner, entry + "/", is_top=False)
                finally:
                    os.close(inner)


def open_files(fd: int, adapter_id: str, follows_links: bool = False) -> DirectoryFiles:
    """The adapter in an open folder; takes over the descriptor."""
    try:
        return DirectoryFiles(fd, adapter_id, follows_links)
    except BaseException:
        os.close(fd)
        raise


def open_folder(folder: Path, adapter_id: str = "", follows_links: bool = True) -> DirectoryFiles:
    """The files of a folder that the operator has named. Raises SourceUnavailable when it cannot be opened."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unavailable(f"the folder of {adapter_id!a} cannot be opened", error) from error
    return open_files(fd, adapter_id, follows_links)


def _holds_adapter(fd: int, adapter_id: str) -> bool:
    """By the names of its files; what is laid out like a whole model is one when it has heads in it."""
    names = set(_entries(fd))
    if not names.isdisjoint((*ADAPTER_NAMES, *PICKLE_NAMES)):
        return True
    if not has_model_layout(names):
        return False
    with open_files(os.dup(fd), adapter_id) as files:
        try:
            return describe_medusa_model(files).content != "none"
        except LoraplexError:
            return True  # damaged: whoever asks for it hears why it is refused


def _entries(fd: int) -> Iterator[str]:
    with os.scandir(fd) as entries:
        for entry in entries:
            yield entry.name


def _names(fd: int) -> Iterator[str]:
    for count, name in enumerate(_entries(fd), start=1):
        if count > MAX_FILES:
            raise AdapterInvalid(f"the adapter's folder has more than {MAX_FILES} files")
        yield name


def _translated(error: OSError, adapter_id: str, what: str) -> Exception:
    """Links are answered like missing files: a message that told them apart would tell about files elsewhere."""
    if error.errno in _NOT_THERE:
        if error.errno != errno.ENOENT:
            log.warning("adapter %s: %s is not followed (%s)", ascii(adapter_id), ascii(what), error.strerror)
        return not_found(adapter_id)
    return _unavailable(f"{what} of adapter {adapter_id!a} cannot be opened", error)


def _unavailable(what: str, error: OSError) -> SourceUnavailable:
    return SourceUnavailable(f"{what} ({error.strerror or 'unknown reason'}); try again later", retry_after_s=5.0)
