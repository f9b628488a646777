"""Chain of a worker's sources, and a watch that lists them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from loraplex_adapters.io.source_files import AdapterFiles, AdapterSource
from loraplex_adapters.io.throttle import Throttle, throttled
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.sources.hub import HubSource
from loraplex_contracts.errors import AdapterNotFound, AdapterOutsideRoot, adapter_not_found


class ChainSource:
    """Asks each source in turn. A source that fails ends the search: the same name must not mean something else
    because a disk was away for a moment."""

    def __init__(self, sources: Sequence[AdapterSource]) -> None:
        self._sources = tuple(sources)

    def open(self, adapter_id: str) -> AdapterFiles:
        for source in self._sources:
            try:
                return source.open(adapter_id)
            except AdapterOutsideRoot:
                raise  # it has the name
            except AdapterNotFound:
                continue
        raise adapter_not_found(adapter_id)

    def list(self) -> Sequence[str]:
        found = [names for source in self._sources if (names := source.list())]
        return found[0] if len(found) == 1 else sorted({name for names in found for name in names})


def make_source(
    root: Path | None,
    hub: bool = False,
    hub_token: str | None = None,
    first: Sequence[AdapterSource] = (),
    *,
    with_templates: bool = False,
) -> AdapterSource:
    """The source that a worker's configuration asks for. The Hub only when `hub` says so. Sources in `first` come
    before both. `with_templates`: those of adapters are wanted too."""
    sources = list(first)
    if root is not None:
        sources.append(DirectorySource(root))
    if hub:
        sources.append(HubSource(token=hub_token, with_templates=with_templates))
    return ChainSource(sources)


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
