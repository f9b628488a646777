"""Chain of a worker's sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from loraplex_adapters.io.source_files import AdapterFiles, AdapterSource
from loraplex_adapters.sources.directory import DirectorySource, no_such_place
from loraplex_contracts.adapters import OWN_ORIGIN, AdapterOrigin
from loraplex_contracts.errors import AdapterNotFound, AdapterOutsideRoot


class ChainSource:
    """Asks each source in turn. A source that fails ends the search: the same name must not mean something else
    because a disk was away for a moment."""

    def __init__(self, sources: Sequence[AdapterSource]) -> None:
        self._sources = tuple(sources)

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterFiles:
        missing = no_such_place(adapter_id, origin)
        for source in self._sources:
            try:
                return source.open(adapter_id, origin)
            except AdapterOutsideRoot:
                raise  # it has the name
            except AdapterNotFound as error:
                missing = error  # the last source is the one that says most
        raise missing

    def list(self) -> Sequence[str]:
        found = [names for source in self._sources if (names := source.list())]
        return found[0] if len(found) == 1 else sorted({name for names in found for name in names})


class RoutedSource:
    """Sources by the prefix of their places (`hub:`), and one for all others."""

    def __init__(self, routes: Mapping[str, AdapterSource], others: AdapterSource) -> None:
        self._routes = dict(routes)
        self._others = others

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterFiles:
        prefix, colon, _ = origin.source.partition(":")
        return self._routes.get(prefix + colon, self._others).open(adapter_id, origin)

    def list(self) -> Sequence[str]:
        return self._others.list()


def make_source(root: Path | None, first: Sequence[AdapterSource] = ()) -> AdapterSource:
    """A worker's sources on its own machine: those in `first`, then the directory."""
    return ChainSource((*first, *(() if root is None else (DirectorySource(root),))))
