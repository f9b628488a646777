"""The Hugging Face Hub as a source, where it is enabled.

Adapter ORG/NAME is the repository of that name. Only the files that serving reads are fetched, by name: an id may just
as well name a whole model. Weights under a whole model's names are fetched only when its configuration says that the
model is Medusa heads. Files are fetched into a temporary folder and read from there; what is kept is up to the store.
The Hub's own client speaks to the network, with the operator's token and never a client's.
"""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loraplex_adapters.formats.files import MODEL_INDEX_NAME, TEMPLATE_NAMES, WANTED_NAMES, detect_kind
from loraplex_adapters.io.confined_folder import Folder
from loraplex_adapters.io.source_files import AdapterFiles
from loraplex_adapters.sources.directory import open_folder
from loraplex_contracts.adapters import check_adapter_id
from loraplex_contracts.errors import AdapterInvalid, DiskFull, LoraplexError, SourceUnavailable, adapter_not_found

TIMEOUT_S = 20.0
RETRY_AFTER_S = 15.0
_MODEL_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class HubFiles(AdapterFiles):
    """One downloaded adapter. Owns the temporary folder too."""

    def __init__(self, folder: Path, adapter_id: str) -> None:
        super().__init__(Folder.root(folder), adapter_id)
        self._path = folder

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._path, ignore_errors=True)


class HubSource:
    """Adapters on the Hub. Downloads lie in `temporary` (default: the system's place) until they are in the store.
    `repo_info` and `download` are the Hub client's functions; tests give others."""

    def __init__(
        self,
        token: str | None = None,
        max_bytes: int = 8 << 30,
        temporary: Path | None = None,
        repo_info: Callable[..., Any] | None = None,
        download: Callable[..., Any] | None = None,
        with_templates: bool = False,
    ) -> None:
        import huggingface_hub

        self._token = token
        self._wanted = (*WANTED_NAMES, *(TEMPLATE_NAMES if with_templates else ()))
        self._max_bytes = max_bytes
        self._temporary = temporary
        self._repo_info: Callable[..., Any] = repo_info or huggingface_hub.HfApi().repo_info
        self._download: Callable[..., Any] = download or huggingface_hub.snapshot_download

    def open(self, adapter_id: str) -> HubFiles:
        check_adapter_id(adapter_id)
        if "/" not in adapter_id:
            raise adapter_not_found(adapter_id)
        folder = Path(tempfile.mkdtemp(prefix="loraplex-hub-", dir=self._temporary))
        try:
            self._fetch(adapter_id, folder)
            return HubFiles(folder, adapter_id)
        except LoraplexError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise _translated(error, adapter_id) from error

    def list(self) -> Sequence[str]:
        return []

    def _fetch(self, adapter_id: str, folder: Path) -> None:
        """Asks for names and sizes, then fetches the files of exactly that revision."""
        info: Any = self._repo_info(adapter_id, files_metadata=True, timeout=TIMEOUT_S, token=self._token)
        sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
        kind = detect_kind(sizes)  # a pickle is refused here, before it is fetched
        wanted = [name for name in self._wanted if name in sizes]
        self._fetch_files(adapter_id, info.sha, folder, wanted, sizes)
        if kind == "model":
            with open_folder(folder, adapter_id) as files:
                from loraplex_adapters.formats.medusa import read_medusa_config  # late: it imports torch

                config = read_medusa_config(files)
            if config is None or not config.is_heads_only:
                raise AdapterInvalid("this is a whole model on the Hub; an adapter is a LoRA, Medusa heads, or both")
            weights = [name for name in sizes if name == MODEL_INDEX_NAME or _MODEL_WEIGHTS.fullmatch(name)]
            self._fetch_files(adapter_id, info.sha, folder, weights, sizes)

    def _fetch_files(
        self, adapter_id: str, revision: str, folder: Path, names: Sequence[str], sizes: Mapping[str, int]
    ) -> None:
        """Raises AdapterInvalid or DiskFull before it fetches too much."""
        total_bytes = sum(sizes[name] for name in names)
        if total_bytes > self._max_bytes:
            raise AdapterInvalid(
                f"the adapter has {total_bytes} bytes on the Hub; at most {self._max_bytes} are fetched"
            )
        disk_bytes = shutil.disk_usage(folder).total
        if total_bytes > disk_bytes:
            raise DiskFull(
                f"the adapter has {total_bytes} bytes on the Hub, and the disk of temporary files has {disk_bytes}; "
                "it fits only when that is changed (TMPDIR)",
                resource="temporary files",
                metadata={"can_ever_fit": "false"},
            )
        self._download(
            adapter_id,
            revision=revision,
            local_dir=folder,
            allow_patterns=list(names),
            token=self._token,
            etag_timeout=TIMEOUT_S,
            max_workers=2,
        )


def _translated(error: Exception, adapter_id: str) -> LoraplexError:
    """The Hub client's exceptions, without its addresses."""
    from huggingface_hub import errors

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"the disk is full for now, so that {adapter_id!a} cannot be fetched from the Hub; make room in the folder "
            "of temporary files",
            resource="temporary files",
            retry_after_s=RETRY_AFTER_S,
            metadata={"can_ever_fit": "true"},
        )
    missing = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
    offline = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)
    if isinstance(error, missing) and not isinstance(error, offline):
        return adapter_not_found(adapter_id)  # a private or gated repository looks the same from here
    if isinstance(error, errors.HFValidationError):
        return adapter_not_found(adapter_id)
    return SourceUnavailable(
        f"the Hub did not give out {adapter_id!a} ({type(error).__name__}); try again later, or put the adapter "
        "into the server's directory of adapters",
        resource=adapter_id,
        retry_after_s=RETRY_AFTER_S,
    )
