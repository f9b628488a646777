"""A root directory as a source: adapter NAME (or ORG/NAME) is that folder.

Links are followed as far as they stay inside the root (io/confined_folder.py), so its content cannot lead outside. In a
single folder that the operator has named, links lead anywhere. Owns only the descriptors of open adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loraplex_adapters.formats.files import ADAPTER_NAMES, PICKLE_NAMES, has_model_layout
from loraplex_adapters.formats.whole_model import describe_medusa_model
from loraplex_adapters.io.confined_folder import BadPath, Folder, NamedFolder
from loraplex_adapters.io.source_files import AdapterFiles, open_error, source_unavailable
from loraplex_adapters.sources.index import DirectoryIndex
from loraplex_contracts.adapters import check_adapter_id
from loraplex_contracts.errors import LoraplexError, adapter_not_found


class FolderSource:
    """One adapter in a folder of any name: a model's own directory with Medusa heads in it, say. The operator names the
    folder, so links in it are followed wherever they lead: the Hub's cache is made of links."""

    def __init__(self, adapter_id: str, folder: Path) -> None:
        self._adapter_id = adapter_id
        self._folder = folder

    def open(self, adapter_id: str) -> AdapterFiles:
        if adapter_id != self._adapter_id:
            raise adapter_not_found(adapter_id)
        return open_folder(self._folder, adapter_id)

    def list(self) -> Sequence[str]:
        return [self._adapter_id]


class DirectorySource:
    """Adapters in a directory of the operator's. Links in it are followed where they stay inside it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._index = DirectoryIndex(_holds_adapter)

    def open(self, adapter_id: str) -> AdapterFiles:
        check_adapter_id(adapter_id)
        root = self._open_root()
        try:
            folder = root.open_folder(adapter_id)
        except (OSError, BadPath) as error:
            raise open_error(error, adapter_id, "its folder") from error
        finally:
            root.close()
        return AdapterFiles(folder, adapter_id)

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


def open_folder(folder: Path, adapter_id: str = "") -> AdapterFiles:
    """The files of a folder that the operator has named. Raises SourceUnavailable when it cannot be opened."""
    try:
        named = NamedFolder(folder)
    except OSError as error:
        raise source_unavailable(f"the folder of {adapter_id!a} cannot be opened", error) from error
    return AdapterFiles(named, adapter_id)


def _holds_adapter(folder: Folder, names: set[str], adapter_id: str) -> bool:
    """Whether it is an adapter, by the names of its files; a whole model is one when it has heads in it."""
    if not names.isdisjoint((*ADAPTER_NAMES, *PICKLE_NAMES)):
        return True
    if not has_model_layout(names):
        return False
    with AdapterFiles(folder.open_folder("."), adapter_id) as files:
        try:
            return describe_medusa_model(files).content != "none"
        except LoraplexError:
            return True  # damaged: a request for it is told why it is refused
