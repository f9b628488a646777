"""Watch of a source: a thread that lists its adapters every second.

Owns the thread and the names found last. They are replaced as a whole, so that they can be read from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from loraplex_adapters.io.source_files import AdapterSource
from loraplex_adapters.io.throttle import Throttle, throttled

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Share of the time spent listing, where that takes long.
MAX_SHARE = 0.05
CLOSE_TIMEOUT_S = 1.0


class SourceWatch:
    """Lists the source from the start until it is closed."""

    def __init__(self, source: AdapterSource, interval_s: float = INTERVAL_S) -> None:
        self.names: Sequence[str] = ()  # sorted
        self.has_looked = False
        self._source = source
        self._interval_s = interval_s
        self._closed = threading.Event()
        # A daemon: a source that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="source-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_away = False
        with throttled(Throttle()):
            while not self._closed.is_set():
                started_s = time.monotonic()
                try:
                    self.names = self._source.list()
                    is_away = False
                except Exception as error:
                    if not is_away:
                        log.warning("adapters cannot be listed, listings show those that were found before: %s", error)
                    is_away = True
                self.has_looked = True
                took_s = time.monotonic() - started_s
                self._closed.wait(max(self._interval_s, took_s / MAX_SHARE))
