"""Watches of a worker's sources: their listing, and folders that are replaced."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loraplex_adapters.io.source_files import AdapterSource
from loraplex_adapters.io.throttle import Throttle, checkpoint, throttled
from loraplex_adapters.sources.directory import DirectorySource, Fingerprint
from loraplex_contracts.adapters import AdapterOrigin

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Share of a core for looking, where that takes long.
MAX_SHARE = 0.05
CLOSE_TIMEOUT_S = 1.0
# Longer than the steps in which file systems count time: another write within one may not show.
QUIET_S = 3.0
# After a load that may succeed with the same files: the disk was full, or the queue of loads.
RETRY_S = 30.0


class Looks:
    """A thread that calls `look` from the start until it is closed."""

    def __init__(self, name: str, look: Callable[[], None], interval_s: float) -> None:
        self._look = look
        self._interval_s = interval_s
        self._closed = threading.Event()
        # A daemon: a source that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with throttled(Throttle()):
            while not self._closed.is_set():
                started_s, cpu_started_s = time.monotonic(), time.thread_time()
                self._look()
                took_s, worked_s = time.monotonic() - started_s, time.thread_time() - cpu_started_s
                # The throttle's pauses and waiting for a core are no work. A slow file system gets as long a rest.
                self._closed.wait(max(self._interval_s, took_s, worked_s / MAX_SHARE))


class SourceWatch:
    """Lists the source from the start until it is closed."""

    def __init__(self, source: AdapterSource, interval_s: float = INTERVAL_S) -> None:
        self.names: Sequence[str] = ()  # sorted
        self.has_looked = False
        self._source = source
        self._is_away = False
        self._looks = Looks("source-watch", self._look, interval_s)

    def close(self) -> None:
        self._looks.close()

    def _look(self) -> None:
        try:
            self.names = self._source.list()
            self._is_away = False
        except Exception as error:
            if not self._is_away:
                log.warning("adapters cannot be listed, listings show those that were found before: %s", error)
            self._is_away = True
        self.has_looked = True


@dataclass(slots=True)
class _Folder:
    origin: AdapterOrigin
    files: Fingerprint  # that were loaded last, or tried
    retry_s: float = math.inf
    seen: Fingerprint | None = None
    since_s: float = 0.0


class ReplacedFolders:
    """Decides by the fingerprints of loaded adapters' folders which ones are loaded again. Pure."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._folders: dict[str, _Folder] = {}

    def origins(self) -> dict[str, AdapterOrigin]:
        """The origins of all names."""
        return {name: folder.origin for name, folder in self._folders.items()}

    def loaded(self, name: str, origin: AdapterOrigin, files: Fingerprint | None) -> None:
        """Takes in that the name is bound to these files; None where they do not come from a folder below the root."""
        self._folders.pop(name, None)
        if files is not None:
            self._folders[name] = _Folder(origin, files)

    def failed(self, name: str, origin: AdapterOrigin, files: Fingerprint | None, *, may_retry: bool) -> None:
        """Takes in that a load of these files has failed; the name goes on with what it is bound to. Of another origin
        than its own the files say nothing."""
        folder = self._folders.get(name)
        if folder is not None and files is not None and origin == folder.origin:
            folder.files = files
            if not may_retry:
                folder.retry_s = math.inf

    def forget(self, name: str) -> None:
        self._folders.pop(name, None)

    def is_due(self, name: str, files: Fingerprint | None, now: float) -> bool:
        """True when these files, which are there now, are others than those of the last load and have been there for
        `quiet_s`. Asked again it is false, until they change or that load has failed and may be tried again."""
        folder = self._folders.get(name)
        if folder is None:
            return False
        if files != folder.seen:
            folder.seen, folder.since_s = files, now
        is_other = files != folder.files or now >= folder.retry_s
        if files is None or not is_other or now - folder.since_s < self._quiet_s:
            return False
        folder.files, folder.retry_s = files, now + RETRY_S
        return True


class FolderWatch:
    """Looks at the folders of loaded adapters, on a thread of its own that calls `on_replaced` with a name. The methods
    are for any thread."""

    def __init__(self, source: DirectorySource, on_replaced: Callable[[str], None]) -> None:
        self.fingerprint = source.fingerprint
        self._on_replaced = on_replaced
        self._lock = threading.Lock()
        self._folders = ReplacedFolders(QUIET_S)
        self._looks = Looks("folder-watch", self._look, INTERVAL_S)

    def loaded(self, name: str, origin: AdapterOrigin, files: Fingerprint | None) -> None:
        with self._lock:
            self._folders.loaded(name, origin, files)

    def failed(self, name: str, origin: AdapterOrigin, files: Fingerprint | None, *, may_retry: bool) -> None:
        with self._lock:
            self._folders.failed(name, origin, files, may_retry=may_retry)

    def forget(self, name: str) -> None:
        with self._lock:
            self._folders.forget(name)

    def close(self) -> None:
        self._looks.close()

    def _look(self) -> None:
        with self._lock:
            origins = self._folders.origins()
        for name, origin in origins.items():
            checkpoint()
            files = self.fingerprint(name, origin)
            with self._lock:
                is_due = self._folders.is_due(name, files, time.monotonic())
            if is_due:
                self._on_replaced(name)
