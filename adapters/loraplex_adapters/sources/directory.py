"""A root directory as a source: adapter NAME (or ORG/NAME) is that folder.

Links are followed as far as they stay inside the root (io/confined_folder.py), so its content cannot lead outside. In a
single folder that the operator has named, links lead anywhere. Owns only the descriptors of open adapters.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loraplex_adapters.formats.files import (
    ADAPTER_NAMES,
    MODEL_INDEX_NAME,
    PICKLE_NAMES,
    POOLING_NAME,
    TEMPLATE_NAMES,
    WANTED_NAMES,
    has_model_layout,
)
from loraplex_adapters.io.confined_folder import BadPath, Folder, NamedFolder
from loraplex_adapters.io.source_files import MAX_FILES, AdapterFiles, open_error, source_unavailable
from loraplex_adapters.io.throttle import checkpoint
from loraplex_contracts.adapters import HUB_SOURCE, OWN_ORIGIN, S3_SOURCE, AdapterOrigin, check_adapter_id
from loraplex_contracts.errors import (
    AdapterNotFound,
    AdapterOutsideRoot,
    InvalidAdapterId,
    LoraplexError,
    SourceUnavailable,
    adapter_not_found,
    no_such_folder,
)

log = logging.getLogger(__name__)

# A folder's state. For each file that serving may read: name, bytes, inode, times of the last modification and change.
# Copies may set the former (`cp -p`, `tar -x`); the latter is the file system's own.
FileState = tuple[str, int, int, int, int]
Fingerprint = tuple[FileState, ...]
_READ_NAMES = frozenset({*WANTED_NAMES, *TEMPLATE_NAMES, MODEL_INDEX_NAME})


class FolderSource:
    """One adapter in a folder of any name: a model's own directory with Medusa heads in it, say. The operator names the
    folder, so links in it are followed wherever they lead: the Hub's cache is made of links."""

    def __init__(self, adapter_id: str, folder: Path) -> None:
        self._adapter_id = adapter_id
        self._folder = folder

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterFiles:
        if adapter_id != self._adapter_id or origin.source:
            raise adapter_not_found(adapter_id)
        return open_folder(self._folder, adapter_id)

    def list(self) -> Sequence[str]:
        return [self._adapter_id]


class DirectorySource:
    """Adapters in a directory of the operator's. Links in it are followed where they stay inside it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._index = DirectoryIndex(_holds_adapter)

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterFiles:
        try:
            return DirectoryFiles(self._open_folder(adapter_id, origin), adapter_id)
        except (OSError, BadPath) as error:
            failed = open_error(error, adapter_id, "its folder")
            raise (no_such_place(adapter_id, origin) if type(failed) is AdapterNotFound else failed) from error

    def fingerprint(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> Fingerprint | None:
        """The files in its folder as they are now, by their names and times only; None where there is no folder. One
        that is refused has a fingerprint as well."""
        try:
            folder = self._open_folder(adapter_id, origin)
        except BadPath as error:
            return ((error.why, 0, 0, 0, 0),)
        except (OSError, LoraplexError):
            return None
        try:
            return _fingerprint(folder)
        except OSError:
            return None
        finally:
            folder.close()

    def _open_folder(self, adapter_id: str, origin: AdapterOrigin) -> Folder:
        """Opens an adapter's folder. Raises OSError or BadPath, and typed errors."""
        check_adapter_id(adapter_id)
        if origin.revision or origin.source.startswith(S3_SOURCE):  # folders have none, whatever their names
            raise no_such_place(adapter_id, origin)
        path = self._path_of(origin.source) if origin.source else adapter_id
        root = self._open_root()
        try:
            return root.open_folder(path)
        finally:
            root.close()

    def _path_of(self, source: str) -> str:
        """The path below the root of a `source` that passed `check_adapter_source`. Raises AdapterOutsideRoot."""
        if not source.startswith("/"):
            return source
        for root in (os.path.abspath(self._root), os.path.realpath(self._root)):
            if source.startswith(root.rstrip("/") + "/"):
                return source[len(root) :].lstrip("/")
        raise AdapterOutsideRoot(
            "`source` is not in the server's directory of adapters; give the path of a folder in there",
            field="source",
        )

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
            raise source_unavailable("the directory of adapters cannot be opened", error) from error


def no_such_place(adapter_id: str, origin: AdapterOrigin) -> AdapterNotFound:
    if not origin.source:
        return adapter_not_found(adapter_id)
    if origin.source.startswith(S3_SOURCE):
        message = "this server reads no buckets; its operator can allow some (--s3-bucket)"
    elif origin.source.startswith(HUB_SOURCE):
        message = "this server does not ask the Hub; its operator can allow it (--hub-adapters)"
    else:
        return no_such_folder(origin.source, adapter_id)
    return AdapterNotFound(message, field="source", resource=adapter_id)


def open_folder(folder: Path, adapter_id: str = "") -> AdapterFiles:
    """The files of a folder that the operator has named. Raises SourceUnavailable when it cannot be opened."""
    try:
        named = NamedFolder(folder)
    except OSError as error:
        raise source_unavailable(f"the folder of {adapter_id!a} cannot be opened", error) from error
    return AdapterFiles(named, adapter_id)


class DirectoryFiles(AdapterFiles):
    """The files of an adapter in a directory, whose owner may replace one after the other while they are read."""

    def __init__(self, folder: Folder, adapter_id: str) -> None:
        """Takes over the folder, also where this raises."""
        self._confined = folder
        try:
            self._before = _fingerprint(folder)
        except BaseException:
            folder.close()
            raise
        super().__init__(folder, adapter_id)

    def check_unchanged(self) -> None:
        """Raises SourceUnavailable when there are other files than at first: those that were read may not belong
        together."""
        super().check_unchanged()
        try:
            is_unchanged = _fingerprint(self._confined) == self._before
        except OSError as error:
            raise source_unavailable("the adapter's folder cannot be read", error) from error
        if not is_unchanged:
            raise SourceUnavailable(
                "its files were replaced while they were read; try again once they stay as they are", retry_after_s=1.0
            )


def _fingerprint(folder: Folder) -> Fingerprint:
    return tuple(sorted(_fingerprints(folder)))


def _fingerprints(folder: Folder) -> Iterator[FileState]:
    for entry in itertools.islice(_entries(folder.fd), MAX_FILES):
        if entry.name not in _READ_NAMES and not entry.name.endswith(".safetensors"):
            continue
        with contextlib.suppress(FileNotFoundError):  # it has just gone
            found = entry.stat(follow_symlinks=False)
            num_bytes = found.st_size
            if stat.S_ISLNK(found.st_mode):
                try:
                    fd = folder.open_file(entry.name)
                except (OSError, BadPath):
                    num_bytes = -1
                else:
                    found = os.fstat(fd)
                    num_bytes = found.st_size
                    os.close(fd)
            yield entry.name, num_bytes, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
    with contextlib.suppress(OSError):  # most have none
        found = os.stat(POOLING_NAME, dir_fd=folder.fd)
        yield POOLING_NAME, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _holds_adapter(folder: Folder, names: set[str], adapter_id: str) -> bool:
    """True for an adapter, by the names of its files; a whole model is one when it has heads in it."""
    if not names.isdisjoint((*ADAPTER_NAMES, *PICKLE_NAMES)):
        return True
    if not has_model_layout(names):
        return False
    from loraplex_adapters.formats.medusa import describe_medusa_model  # late: it imports torch

    with AdapterFiles(folder.open_folder("."), adapter_id) as files:
        try:
            return describe_medusa_model(files).content != "none"
        except LoraplexError:
            return True  # damaged: a request for it is told why it is refused


FULL_LOOK_EVERY = 16
MAX_LISTED = 100_000  # folders in one
MAX_DEPTH = 2  # NAME or ORG/NAME
MAX_MISNAMED = 100  # folders that are logged
# Another change within this time may leave the time of the last one as it was: file systems count in steps.
TIME_STEP_NS = 2_000_000_000


# A folder's device, inode and times of the last modification and change. Copies and archives set the first, perhaps to
# the one that it had; some file systems in user space leave out the second. Trees may have equal times, so time alone
# says nothing of a folder that a link leads to.
_State = tuple[int, int, int, int]


@dataclass(slots=True)
class _Known:
    entry: tuple[int, int]  # the device of the folder that it is in, and its inode there: a link's own
    state: _State | None = None  # when it was read; None: read it again
    is_adapter: bool = False
    inner: dict[str, _Known] = field(default_factory=dict[str, "_Known"])  # where it is not an adapter


class DirectoryIndex:
    """Index of a root's adapters. `holds_adapter` says whether an open folder with these entries is the adapter of that
    name. For one thread."""

    def __init__(self, holds_adapter: Callable[[Folder, set[str], str], bool]) -> None:
        self._holds_adapter = holds_adapter
        self._root = _Known(entry=(0, 0))
        self._names: list[str] = []
        self._num_looks = 0
        self._is_full_look = True
        self._has_changed = True
        self._misnamed: set[str] = set()  # paths of folders that were logged

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
        state = _state(os.fstat(folder.fd))
        if known.state != state:
            device, _, modified_ns, changed_ns = state
            self._read(folder, known, path, depth, device)
            now_ns = time.time_ns()
            is_settled = now_ns - changed_ns > TIME_STEP_NS and abs(now_ns - modified_ns) > TIME_STEP_NS
            known.state = state if is_settled else None
        prefix = path + "/" if path else ""
        for name, inner in known.inner.items():
            if inner.is_adapter and not (self._is_full_look and _differs(folder.fd, name, inner)):
                continue
            try:
                opened = folder.open_folder(name)
            except (OSError, BadPath):  # gone, not to be read, or a link that leads out
                self._has_changed |= inner.is_adapter or bool(inner.inner)
                known.inner[name] = _Known(inner.entry)  # the same key: the iteration goes on
                continue
            try:
                self._look_into(opened, inner, prefix + name, depth + 1)
            finally:
                opened.close()

    def _read(self, folder: Folder, known: _Known, path: str, depth: int, device: int) -> None:
        """Reads the folder: its kind, and the folders in it; those that are known already are kept."""
        entries = {entry.name: entry for entry in itertools.islice(_entries(folder.fd), MAX_LISTED)}
        is_adapter = depth > 0 and self._holds_adapter(folder, set(entries), path)
        inner: dict[str, _Known] = {}
        if not is_adapter and depth < MAX_DEPTH:
            prefix = path + "/" if path else ""
            for name, entry in entries.items():
                if not _is_folder(entry) or not self._may_be_named(prefix + name):
                    continue
                before, place = known.inner.get(name), (device, entry.inode())
                inner[name] = before if before and before.entry == place else _Known(place)
        self._has_changed |= is_adapter != known.is_adapter or inner != known.inner
        known.is_adapter, known.inner = is_adapter, inner

    def _may_be_named(self, path: str) -> bool:
        """True where an adapter id leads to the folder. Another one is logged once, unless it is hidden."""
        try:
            check_adapter_id(path, field="the folder")
        except InvalidAdapterId as error:
            is_hidden = path.rpartition("/")[2].startswith(".")
            if not is_hidden and path not in self._misnamed and len(self._misnamed) < MAX_MISNAMED:
                self._misnamed.add(path)
                log.warning("left out of the adapters: %s", error)
            return False
        return True


def _entries(fd: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(fd) as entries:
        yield from entries


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """True if the entry may be an adapter or hold some. A link counts: its target shows when it is opened."""
    with contextlib.suppress(OSError):
        return entry.is_dir(follow_symlinks=False) or entry.is_symlink()
    return False


def _state(found: os.stat_result) -> _State:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _differs(fd: int, name: str, folder: _Known) -> bool:
    """True if a folder was changed since it was read. A link's own inode differs from its target's, so it is followed
    again each time."""
    try:
        return _state(os.stat(name, dir_fd=fd, follow_symlinks=False)) != folder.state
    except OSError:
        return True


def _names(known: _Known, path: str) -> Iterator[str]:
    if known.is_adapter:
        yield path
    for name, inner in known.inner.items():
        yield from _names(inner, f"{path}/{name}" if path else name)
