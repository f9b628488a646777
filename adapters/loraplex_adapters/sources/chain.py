"""Chain of sources: the first that has the name wins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loraplex_adapters.io.source_files import AdapterFiles, AdapterSource
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
    root: Path | None, hub: bool = False, hub_token: str | None = None, first: Sequence[AdapterSource] = ()
) -> AdapterSource:
    """The source that a worker's configuration asks for. The Hub only when `hub` says so. Sources in
    `first` come before both."""
    sources = list(first)
    if root is not None:
        sources.append(DirectorySource(root))
    if hub:
        sources.append(HubSource(token=hub_token))
    return ChainSource(sources)
