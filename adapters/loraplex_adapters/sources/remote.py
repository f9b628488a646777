"""Downloads of adapters from other machines into temporary folders.

Only the files that serving reads are fetched, by name: a place may just as well hold a whole model. Weights under a
whole model's names are fetched only when its configuration says that the model is Medusa heads.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from loraplex_adapters.formats.files import MODEL_INDEX_NAME, detect_kind
from loraplex_adapters.io.confined_folder import Folder
from loraplex_adapters.io.source_files import AdapterFiles
from loraplex_adapters.sources.directory import open_folder
from loraplex_contracts.errors import AdapterInvalid, DiskFull, LoraplexError, SourceUnavailable, is_disk_full

TIMEOUT_S: Final = 20.0  # of each read
START_S: Final = 60.0  # for descriptions, and of a download beside the time for its bytes
SLOWEST_BYTES_PER_S: Final = 1 << 20
RETRY_AFTER_S: Final = 15.0
PIECE_BYTES: Final = 1 << 18
MAX_BYTES: Final = 8 << 30  # of one adapter
MODEL_WEIGHTS: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

# These libraries log addresses, at INFO those that are asked for, at DEBUG those of redirects; some are signed.
for _name in ("httpx", "httpx2", "httpcore", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)


class TooSlow(Exception):
    """The time for what is fetched is over."""


class HttpClient:
    """HTTP requests, one at a time, without cookies or tokens of others; no redirect is followed.

    Owns the deadline of all that is read, headers included: a server that sends a byte now and then meets it, though
    each byte starts TIMEOUT_S again. After it reads raise TooSlow."""

    def __init__(self) -> None:
        from huggingface_hub import get_session

        self._client: Any = type(get_session())(timeout=TIMEOUT_S, follow_redirects=False)
        self.allow(START_S)

    def allow(self, time_s: float) -> None:
        """Sets the deadline."""
        self._until_s = time.monotonic() + time_s

    def stream(self, method: str, url: str, headers: Mapping[str, str]) -> AbstractContextManager[Any]:
        """The response, whose body is bytes as they are stored."""
        headers = {**headers, "accept-encoding": "identity"}
        return self._client.stream(method, url, headers=headers, extensions={"trace": self._trace})

    def close(self) -> None:
        self._client.close()

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Called by the client for what it does. Bounds the reads of new connections."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            stream = info["return_value"]
            stream.read = partial(self._read, stream.read)

    def _read(self, read: Callable[..., bytes], max_bytes: int, timeout: float | None = None) -> bytes:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TooSlow
        try:
            return read(max_bytes, timeout=left_s if timeout is None else min(timeout, left_s))
        except Exception as error:
            if time.monotonic() >= self._until_s:
                raise TooSlow from error
            raise


class FetchedFiles(AdapterFiles):
    """One downloaded adapter. Owns the temporary folder too."""

    def __init__(self, folder: Path, adapter_id: str) -> None:
        super().__init__(Folder.root(folder), adapter_id)
        self._path = folder

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its server describes it."""

    num_bytes: int
    digest: str = ""  # empty: it says none
    version: str = ""  # changes with the content
    new_hash: Callable[[], Any] = hashlib.sha256


class Damaged(Exception):
    """Bytes that are not those that the server has described. The text goes on from the file's name."""


class RemoteFolder(ABC):
    """The files of one adapter on a server."""

    def __init__(self, name: str, server: str, client: HttpClient) -> None:
        """`server` names its kind in errors: "the Hub"."""
        self.name = name
        self.server = server
        self.client = client
        self.files: dict[str, RemoteFile] = {}

    @abstractmethod
    def get(self, name: str) -> AbstractContextManager[Iterator[bytes]]:
        """The bytes of one of `files`, as they come. Raises typed errors."""

    def model_weights(self, folder: Path) -> list[str]:
        """Names of the weight files of a model that is Medusa heads, whose configuration is in `folder` already."""
        return [name for name in self.files if name == MODEL_INDEX_NAME or MODEL_WEIGHTS.fullmatch(name)]

    def fetch(self, folder: Path, wanted: Sequence[str], max_bytes: int) -> None:
        kind = detect_kind(self.files)  # a pickle is refused here, before it is fetched
        self.fetch_files(folder, [name for name in wanted if name in self.files], max_bytes)
        if kind == "model":
            with open_folder(folder, self.name) as files:
                from loraplex_adapters.formats.medusa import read_medusa_config  # late: it imports torch

                config = read_medusa_config(files)
            if config is None or not config.is_heads_only:
                raise AdapterInvalid(
                    f"this is a whole model {_on(self.server)}; an adapter is a LoRA, Medusa heads, or both"
                )
            self.fetch_files(folder, self.model_weights(folder), max_bytes)

    def fetch_files(self, folder: Path, names: Sequence[str], max_bytes: int) -> None:
        """Fetches the named files. Raises AdapterInvalid or DiskFull before it fetches too much."""
        total_bytes = sum(self.files[name].num_bytes for name in names)
        _check_room(total_bytes, max_bytes, folder, _on(self.server))
        self.client.allow(START_S + total_bytes / SLOWEST_BYTES_PER_S)
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            self.download(name, folder / name)

    def download(self, name: str, target: Path) -> None:
        """Downloads the whole file, in two tries."""
        for is_last in (False, True):
            try:
                self._download(name, target)
                return
            except Damaged as damage:
                if is_last:
                    raise unavailable(f"{name} of {self.name!a} {_on(self.server)} {damage}") from damage

    def _download(self, name: str, target: Path) -> None:
        remote = self.files[name]
        hasher, num_bytes = remote.new_hash(), 0
        with target.open("wb", buffering=PIECE_BYTES) as out, self.get(name) as pieces:
            for piece in _whole(pieces):
                num_bytes += len(piece)
                if num_bytes > remote.num_bytes:
                    raise Damaged(f"has more than the {remote.num_bytes} bytes of its description")
                hasher.update(piece)
                out.write(piece)
        if num_bytes < remote.num_bytes:
            raise Damaged(f"ended after {num_bytes} of {remote.num_bytes} bytes")
        if remote.digest and hasher.hexdigest() != remote.digest:
            raise Damaged("does not have the digest of its description")


def _whole(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a body. Raises Damaged where the connection ends before it does."""
    try:
        yield from pieces
    except TooSlow:
        raise
    except Exception as error:
        raise Damaged(f"was cut off ({type(error).__name__})") from error


@contextlib.contextmanager
def temporary_folder(parent: Path | None, name: str, server: str) -> Generator[Path]:
    """A folder to fetch into, which stays where the block ends well. Exceptions of the client and the disk become typed
    ones, without addresses."""
    folder = Path(tempfile.mkdtemp(prefix="loraplex-fetch-", dir=parent))
    try:
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, LoraplexError) or not isinstance(error, Exception):
            raise
        raise _translated(error, name, server) from error


def unavailable(what: str) -> SourceUnavailable:
    return SourceUnavailable(f"{what}; try again later", retry_after_s=RETRY_AFTER_S)


def _on(server: str) -> str:
    return f"on {server}" if server == "the Hub" else f"in {server}"


def _check_room(total_bytes: int, max_bytes: int, folder: Path, where: str) -> None:
    """Raises AdapterInvalid, or DiskFull for what never fits."""
    if total_bytes > max_bytes:
        raise AdapterInvalid(f"the adapter has {total_bytes} bytes {where}; at most {max_bytes} are fetched")
    disk_bytes = shutil.disk_usage(folder).total
    if total_bytes > disk_bytes:
        raise DiskFull(
            f"the adapter has {total_bytes} bytes {where}, and the disk of temporary files has {disk_bytes}; "
            "point TMPDIR at a larger disk",
            resource="temporary files",
            metadata={"can_ever_fit": "false"},
        )


def _translated(error: Exception, name: str, server: str) -> LoraplexError:
    if isinstance(error, TooSlow):
        return unavailable(f"{name!a} came too slowly from {server}")
    if is_disk_full(error):
        return DiskFull(
            f"the disk is full for now, so that {name!a} cannot be fetched from {server}; make room in the folder of "
            "temporary files",
            resource="temporary files",
            retry_after_s=RETRY_AFTER_S,
            metadata={"can_ever_fit": "true"},
        )
    return SourceUnavailable(
        f"{server} did not give out {name!a} ({type(error).__name__}); try again later, or put the adapter "
        "into the server's directory of adapters",
        resource=name,
        retry_after_s=RETRY_AFTER_S,
    )
