"""Index of the adapters in a root directory, kept between two looks.

A folder is read again when its modification time is another one. A look reads the times of the root and of the folders
in it that are not adapters, so that it costs next to nothing where no folder came or went. An adapter's folder that has
lost its files, or a link that leads elsewhere by now, shows at every FULL_LOOK_EVERY-th look. Owns the names found;
opens only folders beneath the root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from loraplex_adapters.io.confined_folder import BadPath, Folder
from loraplex_adapters.io.throttle import checkpoint
from loraplex_contracts.adapters import check_adapter_id
from loraplex_contracts.errors import InvalidAdapterId

FULL_LOOK_EVERY = 16
MAX_LISTED = 100_000  # folders in one
MAX_DEPTH = 2  # NAME or ORG/NAME
# Another change within this time may leave the modification time as it was: file systems count in steps.
TIME_STEP_NS = 2_000_000_000


@dataclass(slots=True)
class _Known:
    inode: int
    changed_ns: int | None = None  # None: read it again
    is_adapter: bool = False
    inner: dict[str, _Known] = field(default_factory=dict[str, "_Known"])  # where it is not an adapter


class DirectoryIndex:
    """`holds_adapter` says whether an open folder with these entries is the adapter of that name. For one thread."""

    def __init__(
        self, holds_adapter: Callable[[Folder, set[str], str], bool], now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._holds_adapter = holds_adapter
        self._now_ns = now_ns
        self._root = _Known(inode=0)
        self._names: list[str] = []
        self._num_looks = 0
        self._is_full_look = True
        self._has_changed = True

    def look(self, root: Folder) -> Sequence[str]:
        """The present names, sorted; the same object as before where nothing has changed."""
        self._is_full_look = self._num_looks % FULL_LOOK_EVERY == 0
        self._num_looks += 1
        self._look_into(root, self._root, "", 0)
        if self._has_changed:
            found = set(_names(self._root, ""))
            kept = [name for name in self._names if name in found]
            # Two sorted runs: merging them takes a fraction of what sorting all of it does.
            self._names = sorted(kept + sorted(found.difference(kept)))
            self._has_changed = False
        return self._names

    def _look_into(self, folder: Folder, known: _Known, path: str, depth: int) -> None:
        checkpoint()
        changed_ns = os.fstat(folder.fd).st_mtime_ns
        if known.changed_ns != changed_ns:
            self._read(folder, known, path, depth)
            known.changed_ns = changed_ns if self._now_ns() - changed_ns > TIME_STEP_NS else None
        prefix = path + "/" if path else ""
        for name, inner in known.inner.items():
            if inner.is_adapter and not (self._is_full_look and _has_other_time(folder.fd, name, inner)):
                continue
            try:
                opened = folder.open_folder(name)
            except (OSError, BadPath):  # gone, not to be read, or a link that leads out
                self._has_changed |= inner.is_adapter or bool(inner.inner)
                known.inner[name] = _Known(inner.inode)  # the same key: the iteration goes on
                continue
            try:
                self._look_into(opened, inner, prefix + name, depth + 1)
            finally:
                opened.close()

    def _read(self, folder: Folder, known: _Known, path: str, depth: int) -> None:
        """Reads the folder: its kind, and the folders in it; those that are known already are kept."""
        entries = {entry.name: entry for entry in itertools.islice(_entries(folder.fd), MAX_LISTED)}
        is_adapter = depth > 0 and self._holds_adapter(folder, set(entries), path)
        inner: dict[str, _Known] = {}
        if not is_adapter and depth < MAX_DEPTH:
            prefix = path + "/" if path else ""
            for name, entry in entries.items():
                if not _is_folder(entry, prefix):
                    continue
                before = known.inner.get(name)
                inner[name] = before if before and before.inode == entry.inode() else _Known(entry.inode())
        self._has_changed |= is_adapter != known.is_adapter or inner != known.inner
        known.is_adapter, known.inner = is_adapter, inner


def _entries(fd: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(fd) as entries:
        yield from entries


def _is_folder(entry: os.DirEntry[str], prefix: str) -> bool:
    """Whether it may be an adapter or hold some. A link counts: its target shows when it is opened."""
    with contextlib.suppress(OSError, InvalidAdapterId):
        check_adapter_id(prefix + entry.name)
        return entry.is_dir(follow_symlinks=False) or entry.is_symlink()
    return False


def _has_other_time(fd: int, name: str, folder: _Known) -> bool:
    """A link's own time differs from its target's, so it is followed anew each time."""
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime_ns != folder.changed_ns
    except OSError:
        return True


def _names(known: _Known, path: str) -> Iterator[str]:
    if known.is_adapter:
        yield path
    for name, inner in known.inner.items():
        yield from _names(inner, f"{path}/{name}" if path else name)
