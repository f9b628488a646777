"""The Hugging Face Hub as a source, where it is enabled.

Adapter ORG/NAME is the repository of that name. Its files are fetched into a temporary folder (`remote.py`) and read
from there; what is kept is up to the store.

Only the operator's endpoints are asked, and redirects lead to hosts that the operator has named. A token goes to the
endpoint alone. Every file has the size and the digest that the Hub says, or it is fetched once more and then refused.
Nothing outlives an `open`: no connection, cookie or token of one caller is there for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

from loraplex_adapters.formats.files import TEMPLATE_NAMES, WANTED_NAMES
from loraplex_adapters.io.source_files import parse_object
from loraplex_adapters.sources.remote import (
    MAX_BYTES,
    FetchedFiles,
    HttpClient,
    RemoteFile,
    RemoteFolder,
    temporary_folder,
    unavailable,
)
from loraplex_contracts.adapters import HUB_SOURCE, OWN_ORIGIN, AdapterOrigin, check_adapter_id, check_repository
from loraplex_contracts.errors import AdapterInvalid, AdapterNotFound, adapter_not_found

# The public Hub keeps large files on hosts of this domain.
_FILE_HOSTS: Final = {"huggingface.co": ".hf.co"}
MAX_INFO_BYTES: Final = 16 << 20
TLS = "https"  # of redirects to other hosts
MAX_REDIRECTS: Final = 5
_COMMIT = re.compile(r"[0-9a-f]{40,64}\Z")


class HubSource:
    """Adapters on the Hub. The first endpoint (default: HF_ENDPOINT, else the public Hub) is for plain names, and
    `token`, the operator's, for it alone. `redirect_hosts` are names of hosts, or domains with a leading dot. Downloads
    lie in `temporary` (default: the system's place) until they are in the store."""

    def __init__(
        self,
        endpoints: Sequence[str] = (),
        token: str | None = None,
        redirect_hosts: Sequence[str] = (),
        max_bytes: int = MAX_BYTES,
        temporary: Path | None = None,
        with_templates: bool = False,
    ) -> None:
        from huggingface_hub import constants

        self._endpoints = tuple(one.rstrip("/") for one in endpoints or (constants.ENDPOINT,))
        self._token = token
        self._redirect_hosts = tuple(redirect_hosts)
        self._wanted = (*WANTED_NAMES, *(TEMPLATE_NAMES if with_templates else ()))
        self._max_bytes = max_bytes
        self._temporary = temporary

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> FetchedFiles:
        endpoint, repo = self._place(adapter_id, origin)
        token = origin.token or (self._token if endpoint == self._endpoints[0] else None)
        with temporary_folder(self._temporary, repo, "the Hub") as folder:
            with _Session(endpoint, token, self._redirect_hosts) as session:
                repository = _Repository(session, repo, origin.revision)
                repository.look()
                repository.fetch(folder, self._wanted, self._max_bytes)
            return FetchedFiles(folder, adapter_id)

    def list(self) -> Sequence[str]:
        return []

    def _place(self, adapter_id: str, origin: AdapterOrigin) -> tuple[str, str]:
        """Endpoint and repository. Raises AdapterNotFound where it is no place of this source's, InvalidArgument."""
        check_adapter_id(adapter_id)
        if origin.source.startswith(HUB_SOURCE):
            return self._endpoints[0], check_repository(origin.source.removeprefix(HUB_SOURCE))
        named = [one for one in self._endpoints if origin.source.startswith(one + "/")]
        if named:
            return named[0], check_repository(origin.source.removeprefix(named[0] + "/"))
        if origin.source or "/" not in adapter_id:
            raise adapter_not_found(adapter_id)
        return self._endpoints[0], adapter_id


class _Repository(RemoteFolder):
    """One repository at one commit."""

    def __init__(self, session: _Session, name: str, revision: str) -> None:
        super().__init__(name, "the Hub", session.client)
        self._session = session
        self._revision = revision
        self._commit = ""

    def look(self) -> None:
        """Asks the Hub for the commit and its files."""
        path = f"/api/models/{self.name}"
        if self._revision:
            path += f"/revision/{quote(self._revision, safe='')}"
        with self._session.get(f"{path}?blobs=true", self._about()) as pieces:
            data = bytearray()
            for piece in pieces:
                data += piece
                if len(data) > MAX_INFO_BYTES:
                    raise AdapterInvalid(f"the Hub describes it in more than {MAX_INFO_BYTES} bytes")
        try:
            description = parse_object(bytes(data), "the Hub's description", MAX_INFO_BYTES)
            self._commit = _checked(_COMMIT, description["sha"])
            self.files = {str(one["rfilename"]): _described(one) for one in description["siblings"]}
        except (AdapterInvalid, KeyError, TypeError, ValueError) as error:
            raise unavailable(f"the Hub did not describe {self.name!a} as it describes repositories") from error

    def get(self, name: str) -> contextlib.AbstractContextManager[Iterator[bytes]]:
        return self._session.get(f"/{self.name}/resolve/{self._commit}/{name}", self._about())

    def _about(self) -> str:
        return f"{self.name!a} at revision {self._revision!a}" if self._revision else f"{self.name!a}"


class _Session:
    """Requests with one caller's token, to one endpoint and to where it may redirect."""

    def __init__(self, endpoint: str, token: str | None, redirect_hosts: Sequence[str]) -> None:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise unavailable("this server does not ask the Hub: HF_HUB_OFFLINE is set")
        self._endpoint = endpoint
        self._token = token
        public = _FILE_HOSTS.get(urlsplit(endpoint).hostname or "")
        self._redirect_hosts = (*redirect_hosts, *((public,) if public else ()))
        self.client = HttpClient()

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @contextlib.contextmanager
    def get(self, path: str, about: str) -> Generator[Iterator[bytes]]:
        """The body's bytes as they come. Raises AdapterNotFound or SourceUnavailable."""
        url = self._endpoint + path
        for _ in range(MAX_REDIRECTS + 1):
            with self.client.stream("GET", url, self._headers(url)) as response:
                if not response.has_redirect_location:
                    _check_status(response, about, has_token=bool(self._token))
                    yield response.iter_raw()
                    return
                url = self._redirected(url, urljoin(url, response.headers["location"]), about)
        raise unavailable(f"the Hub redirected more than {MAX_REDIRECTS} times for {about}")

    def _headers(self, url: str) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers

        is_own = _origin(url) == _origin(self._endpoint)
        # False: not the token that this machine may have been logged in with either.
        return build_hf_headers(token=self._token or False if is_own else False, library_name="loraplex")

    def _redirected(self, url: str, target: str, about: str) -> str:
        """The address that a redirect leads to. Raises SourceUnavailable for a host that the operator has not named, or
        where it leads out of TLS."""
        scheme, host, port = _origin(target)
        is_named = any(host == one or (one.startswith(".") and host.endswith(one)) for one in self._redirect_hosts)
        if _origin(target) == _origin(self._endpoint) or (is_named and scheme == TLS):
            return target
        where = f"{scheme}://{host[:100]}" + (f":{port}" if port else "")
        allowed = (
            "its operator can allow the host (--hub-redirect-host)" if scheme == TLS else f"only {TLS} is followed"
        )
        raise unavailable(f"the Hub redirected to {where!a} for {about}, which this server does not follow; {allowed}")


def _described(sibling: Mapping[str, Any]) -> RemoteFile:
    lfs = sibling.get("lfs")
    size = lfs["size"] if lfs else sibling["size"]
    if type(size) is not int or size < 0:
        raise ValueError(size)
    if lfs:
        return RemoteFile(size, _checked(_COMMIT, lfs["sha256"]))
    git_hash = partial(hashlib.sha1, f"blob {size}\0".encode(), usedforsecurity=False)
    return RemoteFile(size, _checked(_COMMIT, sibling["blobId"]), new_hash=git_hash)


def _checked(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or not pattern.match(value):
        raise ValueError(value)
    return value


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _check_status(response: Any, about: str, *, has_token: bool) -> None:
    """Raises the typed error of a refusal. Its body is not read: it says nothing that the code does not, and may be
    endless."""
    status, code = response.status_code, response.headers.get("x-error-code", "")
    if status == 200:
        return
    if status == 403 or code == "GatedRepo":
        raise AdapterNotFound(
            f"the Hub does not give out {about} to "
            + ("the account of this token; ask its owner for access" if has_token else "everybody; send a token"),
            field="adapter_id",
        )
    if status in (401, 404):  # of a private repository, as of one that there is not
        raise AdapterNotFound(f"the Hub has no {about} that this caller may see", field="adapter_id")
    raise unavailable(f"the Hub answered {status} for {about}")
