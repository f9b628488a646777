"""Disk store of verified, kernel-ready adapters, addressed by content.

One file per adapter: magic, length of the header, header (canonical JSON: kind, payload size, layout), zeros up to a
page, payload. The digest is SHA-256 over header and payload, and it is the file's name; so equal content is one file
under any number of names, and a changed file is noticed. Files appear by rename, complete or not at all. The index is
rebuilt from the files after a restart; a payload from an earlier process is hashed again before its first use. Files of
later formats are left alone, so that the release that wrote them finds them again.

Owns its directory (one process at a time). Does not know formats, sources, or what a layout means. Thread-safe.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from loraplex_adapters.io.uncached import PAGE_BYTES, ChunkWriter, write_uncached
from loraplex_contracts.adapters import AdapterKey, AdapterKind
from loraplex_contracts.errors import DiskFull, FailedPrecondition, Unavailable

log = logging.getLogger(__name__)

MAGIC = b"LPXADPT1"  # other digits are later formats
FORMAT = 1  # of the header
MAX_HEADER_BYTES = 16 << 20
REMEMBERED_HEADERS = 16  # parsed; most adapters of a server have one of a few layouts
RETRY_FULL_S = 5.0
_SUFFIX = ".adapter"
_TEMPORARY = ".incoming-"
LOCK_NAME = "lock"
_NAME = re.compile(r"(lora|medusa|combined)-([0-9a-f]{64})\.adapter\Z")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Errors that say that there is no such file. With others the file may be good.
_NO_FILE = frozenset({errno.ENOENT, errno.ELOOP})
_OF_THE_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

WriteFn = Callable[[memoryview], None]


class _LaterFormat(ValueError):
    """A file that a later release wrote."""


@dataclass(slots=True)
class _Entry:
    file_bytes: int
    is_verified: bool


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """One adapter, mapped read-only. The mapping outlives the file's name, so eviction does not disturb it.

    It takes a file descriptor for as long as the payload is kept."""

    key: AdapterKey
    header: bytes  # the same, byte for byte, of adapters of one layout
    payload: memoryview


class AdapterStore:
    """Disk store of adapters. `is_in_use` says which keys may not be evicted; it is called from any thread. A store
    that is not `durable` goes with the process, so nothing waits for the disk."""

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        is_in_use: Callable[[AdapterKey], bool] = lambda key: False,
        durable: bool = True,
    ) -> None:
        self._root = root
        self._budget_bytes = budget_bytes
        self._is_in_use = is_in_use
        self._durable = durable
        self._lock = threading.Lock()
        self._entries: OrderedDict[AdapterKey, _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0  # of the entries, and what is being written
        self._num_written = 0
        self._lock_fd = _open_locked(root)
        self._rebuild()

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, those being written included."""
        return self._num_bytes

    def keys(self) -> list[AdapterKey]:
        """All keys, least recently used first."""
        with self._lock:
            return list(self._entries)

    def __contains__(self, key: AdapterKey) -> bool:
        with self._lock:
            return key in self._entries

    def put(
        self,
        kind: AdapterKind,
        layout: Mapping[str, Any],
        payload_bytes: int,
        fill: Callable[[WriteFn], None],
        memory: memoryview | None = None,
    ) -> AdapterKey:
        """Stores the payload that `fill` writes: exactly `payload_bytes`, which are left in `memory` too.

        Raises DiskFull, Unavailable or an error of `fill`, whose sources raise typed errors; then nothing is left
        behind."""
        header = _header(kind, layout, payload_bytes)
        start = _payload_start(header)
        file_bytes = start + payload_bytes
        try:
            self._reserve(file_bytes)
        except OSError as error:
            raise _unwritable(error) from error
        with self._lock:
            self._num_written += 1
            path = self._root / f"{_TEMPORARY}{self._num_written}"
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._allocate(fd, file_bytes)
            digest = hashlib.sha256(header)
            prefix = MAGIC + len(header).to_bytes(8, "little") + header
            write_uncached(fd, memoryview(prefix.ljust(start, b"\0")), 0)
            write = ChunkWriter(fd, start, digest.update, memory)
            fill(write)
            write.flush()
            assert write.num_bytes == payload_bytes, "a payload is as large as its layout says"
            if self._durable:
                os.fsync(fd)
            key = AdapterKey(kind, digest.hexdigest())
            self._adopt(path, key, file_bytes)
            return key
        except BaseException as error:
            with self._lock:
                self._num_bytes -= file_bytes
            with contextlib.suppress(OSError):
                path.unlink()
            if not isinstance(error, OSError):
                raise
            if error.errno in _FULL:
                raise self._no_room(error, file_bytes) from error
            raise _unwritable(error) from error
        finally:
            if fd >= 0:
                os.close(fd)

    def open(self, key: AdapterKey) -> StoredAdapter | None:
        """The adapter, or None when the store does not have it. A file that fails its digest is removed and counts as
        missing. Raises OSError when the process cannot open it now; then the file stays."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            is_verified = entry.is_verified
        path = self._path(key)
        try:
            stored = _map(path, key, check_digest=not is_verified)
        except (OSError, ValueError) as error:
            if not _is_bad_file(error):
                raise
            self.remove(key)
            return None
        with contextlib.suppress(OSError):
            # The order of use survives a restart; the kernel's own clock of files stands still for milliseconds.
            os.utime(path, ns=(time.time_ns(), time.time_ns()))
        entry.is_verified = True
        return stored

    def remove(self, key: AdapterKey) -> None:
        with self._lock:
            self._remove_locked(key)

    def close(self) -> None:
        os.close(self._lock_fd)

    # --- private ---------------------------------------------------------------------------------------------------

    def _path(self, key: AdapterKey) -> Path:
        return self._root / f"{key.kind}-{key.digest}{_SUFFIX}"

    def _rebuild(self) -> None:
        """Rebuilds the index from files of an earlier process. Half-written and malformed ones go, and those of a later
        release stay; no other process can be writing here."""
        found: list[tuple[int, AdapterKey, int]] = []
        num_later = 0
        for path in self._root.iterdir():
            if path.name.startswith(_TEMPORARY):
                if not _unlink(path):
                    number = path.name.removeprefix(_TEMPORARY)  # of which no file is made then
                    self._num_written = max(self._num_written, int(number) if number.isdecimal() else 0)
                continue
            name = _NAME.match(path.name)
            if name is None:
                continue  # not ours
            key = AdapterKey(cast(AdapterKind, name[1]), name[2])
            try:
                _map(path, key, check_digest=False)
                status = path.stat()
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
                    raise
                if isinstance(error, _LaterFormat):
                    num_later += 1
                elif _is_bad_file(error):
                    _unlink(path)
                else:
                    log.warning("the adapter store leaves %s out, which cannot be read: %s", path, error)
                continue
            found.append((status.st_mtime_ns, key, status.st_size))
        if num_later:
            log.warning(
                "the adapter store %s leaves out adapters of a later release (%d): they stay there, beside what "
                "--adapter-disk allows; remove the folder where this release is to stay",
                self._root, num_later,
            )  # fmt: skip
        for _, key, file_bytes in sorted(found):
            self._entries[key] = _Entry(file_bytes, is_verified=False)
            self._num_bytes += file_bytes
        with self._lock:
            while self._num_bytes > self._budget_bytes and self._evict_one_locked():
                pass

    def _reserve(self, file_bytes: int) -> None:
        with self._lock:
            if file_bytes > self._budget_bytes:
                limit = f"the adapter store may have {self._budget_bytes} at most (--adapter-disk)"
                raise never_fits(file_bytes, limit)
            excess_bytes = self._num_bytes + file_bytes - self._budget_bytes
            can_fit = self._can_evict_locked(excess_bytes)
            while self._num_bytes + file_bytes > self._budget_bytes:
                if not can_fit or not self._evict_one_locked():
                    in_use = "too much of the adapter store is in use; unload adapters, or raise --adapter-disk"
                    raise full_for_now(file_bytes, in_use)
            self._num_bytes += file_bytes

    def _no_room(self, error: OSError, file_bytes: int) -> DiskFull:
        """The error for the file system's refusal: it says whether a file of that size could ever fit."""
        if error.errno == errno.EFBIG:
            return never_fits(file_bytes, "the file system of the adapter store takes no file of that size")
        status = os.statvfs(self._root)
        disk_bytes = status.f_blocks * status.f_frsize
        if file_bytes > disk_bytes:
            return never_fits(file_bytes, f"the file system of the adapter store has {disk_bytes}")
        return full_for_now(
            file_bytes, "the disk of the adapter store is full; make room there, or name another one (--adapter-store)"
        )

    def _allocate(self, fd: int, file_bytes: int) -> None:
        """Takes the room now, so that a full disk shows before the work; makes room when the disk is smaller than
        the budget, and nothing leaves in vain."""
        can_fit = False
        while True:
            try:
                os.posix_fallocate(fd, 0, file_bytes)
                return
            except OSError as error:
                if error.errno not in _FULL:
                    os.ftruncate(fd, file_bytes)  # a file system without fallocate
                    return
                with self._lock:
                    can_fit = can_fit or self._can_make_room_locked(fd, file_bytes, error)
                    if not can_fit or not self._evict_one_locked():
                        raise

    def _can_make_room_locked(self, fd: int, file_bytes: int, error: OSError) -> bool:
        """False where the file would find no room even if all that is not in use left."""
        if error.errno != errno.ENOSPC:
            return error.errno == errno.EDQUOT  # nobody says how much of a quota is left
        status = os.statvfs(self._root)
        own_bytes = os.fstat(fd).st_blocks * 512  # the part of it that found room
        return self._can_evict_locked(file_bytes - status.f_bfree * status.f_frsize - own_bytes)

    def _adopt(self, path: Path, key: AdapterKey, file_bytes: int) -> None:
        with self._lock:
            path.replace(self._path(key))
            if key in self._entries:  # the same content under another name, or from an earlier process
                self._num_bytes -= self._entries[key].file_bytes
            self._entries[key] = _Entry(file_bytes, is_verified=True)
            self._entries.move_to_end(key)
            if self._durable:
                with contextlib.suppress(OSError):  # at worst a power cut loses the file, and a fetch brings it back
                    _sync_folder(self._root)

    def _can_evict_locked(self, num_bytes: int) -> bool:
        """True if the entries that are not in use have so many bytes. Looks at no more of them than it takes."""
        for key, entry in self._entries.items():
            if num_bytes <= 0:
                break
            if not self._is_in_use(key):
                num_bytes -= entry.file_bytes
        return num_bytes <= 0

    def _evict_one_locked(self) -> bool:
        victim = next((key for key in self._entries if not self._is_in_use(key)), None)
        if victim is not None:
            self._remove_locked(victim)
        return victim is not None

    def _remove_locked(self, key: AdapterKey) -> None:
        if key in self._entries:
            _unlink(self._path(key))
            self._num_bytes -= self._entries.pop(key).file_bytes


def check_store(root: Path) -> None:
    """Raises FailedPrecondition where no store can be kept in this folder now, so that nobody finds out late."""
    os.close(_open_locked(root))


def _open_locked(root: Path) -> int:
    """The descriptor of the folder's lock, which is held until it is closed. Makes the folder. Raises
    FailedPrecondition."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FailedPrecondition(
            f"the adapter store {root} cannot be used: {error.strerror}; name another directory (--adapter-store)"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise FailedPrecondition(
            f"the adapter store {root} is used by another process; give each worker a directory of its own"
        ) from None
    return fd


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _header(kind: AdapterKind, layout: Mapping[str, Any], payload_bytes: int) -> bytes:
    content = {"format": FORMAT, "kind": kind, "layout": layout, "payload_bytes": payload_bytes}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@lru_cache(maxsize=REMEMBERED_HEADERS)
def header_content(header: bytes) -> dict[str, Any]:
    """The content that `_header` wrote, to be read only. Raises ValueError on anything else."""
    content = json.loads(header)
    number = content.get("format") if isinstance(content, dict) else None
    if type(number) is int and number > FORMAT:
        raise _LaterFormat
    if number != FORMAT or not isinstance(content.get("layout"), dict):
        raise ValueError("not a file of the store")
    return content


def _payload_start(header: bytes) -> int:
    return -(-(len(MAGIC) + 8 + len(header)) // PAGE_BYTES) * PAGE_BYTES


def _map(path: Path, key: AdapterKey, check_digest: bool) -> StoredAdapter:
    """Maps a file of the store. Raises OSError or ValueError when the file is not what its name says, or of a later
    release."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would hold the thread
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        mapped = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
    prefix_bytes = len(MAGIC) + 8
    header_bytes = int.from_bytes(mapped[len(MAGIC) : prefix_bytes], "little")
    magic = bytes(mapped[: len(MAGIC)])
    if magic != MAGIC and magic[:-1] == MAGIC[:-1] and magic[-1:].isdigit():
        raise _LaterFormat
    if magic != MAGIC or header_bytes > min(MAX_HEADER_BYTES, mapped.nbytes):
        raise ValueError("not a file of the store")
    header = bytes(mapped[prefix_bytes : prefix_bytes + header_bytes])
    content = header_content(header)
    start = _payload_start(header)
    if content.get("kind") != key.kind or content.get("payload_bytes") != mapped.nbytes - start:
        raise ValueError("cut short, or another kind of adapter")
    payload = mapped[start:]
    if check_digest:
        digest = hashlib.sha256(header)
        for piece in _pieces(payload):
            digest.update(piece)
        if digest.hexdigest() != key.digest:
            raise ValueError("the content is not what its name says")
    return StoredAdapter(key, header, payload)


def _unlink(path: Path) -> bool:
    """Removes a file of the store. False where a folder is in its place, which stays."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        log.warning("the adapter store leaves the folder %s as it is; remove it", path)
        return False
    return True


def _is_bad_file(error: OSError | ValueError) -> bool:
    return isinstance(error, ValueError) or error.errno in _NO_FILE


def _pieces(data: memoryview) -> Iterator[memoryview]:
    """Pieces of the data; each is hashed without the interpreter lock."""
    return (data[start : start + (1 << 20)] for start in range(0, data.nbytes, 1 << 20))


def _unwritable(error: OSError) -> Unavailable:
    log.warning("the adapter store cannot be written: %s", error)
    return Unavailable(
        f"the adapter store of this worker cannot be written ({error.strerror or 'input or output'}); try again later, "
        "once its operator has mended the folder (--adapter-store) or started the worker again",
        resource="adapter store",
        retry_after_s=RETRY_FULL_S,
    )


def never_fits(file_bytes: int, why: str) -> DiskFull:
    """The error without a retry hint: no waiting helps."""
    return DiskFull(
        f"the adapter takes {file_bytes} bytes on disk, and {why}; change that, or use a smaller adapter",
        resource="adapter store",
        metadata={"can_ever_fit": "false"},
    )


def full_for_now(file_bytes: int, why: str) -> DiskFull:
    return DiskFull(
        f"there is no room for {file_bytes} bytes at the moment: {why}",
        resource="adapter store",
        retry_after_s=RETRY_FULL_S,
        metadata={"can_ever_fit": "true"},
    )
