"""Confinement of paths, links included, to a root directory.

Every step of a path is opened relative to the folder before it and never through a symbolic link. A link's target is
resolved here, step by step, so that it cannot lead out of the root even if links are swapped meanwhile. Only regular
files are opened: a FIFO would wait for a writer. Portable. Owns the descriptors that it hands out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Final, Self

MAX_LINKS: Final = 40  # on one path, as Linux has it

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, a FIFO that has just replaced a file would wait for a writer.
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# Errors of opening a step that has become something else since it was looked at.
_CHANGED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO})


class BadPath(Exception):
    """A path that leads to nothing usable. `why` goes on from its name: "is a FIFO"."""

    def __init__(self, why: str, leads_out: bool = False) -> None:
        self.why = why
        self.leads_out = leads_out
        super().__init__(why)


class Folder:
    """An open folder beneath a root. It holds the root and the folders in between too: where `..` in a link leads."""

    def __init__(self, fds: list[int], root_paths: tuple[str, ...]) -> None:
        """Takes over the descriptors, the root's first. `root_paths`: what absolute links call the root."""
        self._fds = fds
        self._root_paths = root_paths

    @classmethod
    def root(cls, path: Path) -> Self:
        """The root folder. Its path is the operator's own word: it may be a link. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return cls([fd], tuple({os.path.abspath(path), os.path.realpath(path)}))

    @property
    def fd(self) -> int:
        return self._fds[-1]

    def open_folder(self, path: str) -> Folder:
        """The folder at a path below this one. Raises OSError or BadPath."""
        fds, file = self._walk(path)
        if file is None:
            return Folder(fds, self._root_paths)
        os.close(file)
        _close(fds)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def open_file(self, path: str) -> int:
        """The descriptor of a regular file, which is the caller's. Raises OSError or BadPath."""
        fds, file = self._walk(path)
        _close(fds)
        if file is None:
            raise BadPath("is a folder")
        return file

    def close(self) -> None:
        _close(self._fds)

    def _walk(self, path: str) -> tuple[list[int], int | None]:
        """The descriptors of the folders on the way, and the file's where one is at the end."""
        fds: list[int] = []
        try:
            for fd in self._fds:
                fds.append(os.dup(fd))
            return fds, self._walk_from(fds, path)
        except BaseException:
            _close(fds)
            raise

    def _walk_from(self, fds: list[int], path: str) -> int | None:
        """Walks a path. `fds` grows and shrinks with the way. Returns the descriptor of the file at its end, if there
        is one."""
        pending = path.split("/")[::-1]
        num_links = num_turns = 0  # a turn is a link, or a step that changed while it was taken
        while pending:
            step = pending.pop()
            if step in ("", "."):
                continue
            if step == "..":
                if len(fds) == 1:
                    raise _leads_out()
                os.close(fds.pop())
                continue
            try:
                found = _open_step(step, fds[-1], is_last=not pending)
            except FileNotFoundError:
                if num_links:
                    raise BadPath("is a link to nothing") from None
                raise
            if isinstance(found, str):
                pending += self._from_root(found, fds).split("/")[::-1]
                num_links += 1
            elif found is None:
                pending.append(step)
            elif stat.S_ISDIR(os.fstat(found).st_mode):
                fds.append(found)
                continue
            else:
                return found
            num_turns += 1
            if num_turns > MAX_LINKS:
                raise BadPath("is a link that leads round in a circle, or through too many others")
        return None

    def _from_root(self, target: str, fds: list[int]) -> str:
        """A link's target, relative to where the walk stands. An absolute one starts at the root again."""
        if not target.startswith("/"):
            return target
        for root in self._root_paths:
            if target == root or target.startswith(root.rstrip("/") + "/"):
                while len(fds) > 1:
                    os.close(fds.pop())
                return target[len(root) :]
        raise _leads_out()


class NamedFolder:
    """A folder that the operator has named: links in it lead wherever they lead. Owns its descriptor."""

    def __init__(self, path: Path) -> None:
        """Opens the folder. Raises OSError."""
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


def _open_step(step: str, parent: int, is_last: bool) -> int | str | None:
    """A descriptor, a link's target, or None where the step has changed since it was looked at."""
    mode = os.stat(step, dir_fd=parent, follow_symlinks=False).st_mode
    try:
        if stat.S_ISLNK(mode):
            return os.readlink(step, dir_fd=parent)
        if stat.S_ISDIR(mode):
            return os.open(step, _DIRECTORY, dir_fd=parent)
        if not is_last:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), step)
        if not stat.S_ISREG(mode):
            raise BadPath(f"is a {_kind_of(mode)}")
        fd = os.open(step, _FILE, dir_fd=parent)
    except NotADirectoryError:
        if stat.S_ISDIR(mode):
            return None
        raise
    except OSError as error:
        if error.errno in _CHANGED or (stat.S_ISLNK(mode) and error.errno == errno.EINVAL):
            return None
        raise
    opened = os.fstat(fd).st_mode
    if stat.S_ISREG(opened):
        return fd
    os.close(fd)
    return None


def _kind_of(mode: int) -> str:
    """The kind in words, of anything but a regular file."""
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise BadPath(f"is a {_kind_of(mode)}")


def _leads_out() -> BadPath:
    return BadPath("is a link that leads out of the server's directory of adapters", leads_out=True)


def _close(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
