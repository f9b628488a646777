"""S3-compatible buckets as a source, where the operator names them.

A load's `source` s3:BUCKET/PREFIX is the adapter whose files lie under that prefix. obstore finds the worker's own
credentials (environment, web identity, container, instance) and signs addresses; requests are made here, since obstore
follows redirects and shows a session token to the host that they lead to. No redirect is followed. Errors have names of
buckets and objects, never addresses: these are signed.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urljoin, urlsplit

from loraplex_adapters.formats.files import (
    MEDUSA_WEIGHTS_NAME,
    MODEL_CONFIG_NAME,
    MODEL_INDEX_NAME,
    MODEL_WEIGHTS_NAME,
    PICKLE_NAMES,
    TEMPLATE_NAMES,
    WANTED_NAMES,
    WEIGHTS_NAME,
)
from loraplex_adapters.io.source_files import MAX_FILES, parse_object
from loraplex_adapters.sources.remote import (
    MAX_BYTES,
    MODEL_WEIGHTS,
    START_S,
    FetchedFiles,
    HttpClient,
    RemoteFile,
    RemoteFolder,
    temporary_folder,
    unavailable,
)
from loraplex_contracts.adapters import OWN_ORIGIN, S3_SOURCE, AdapterOrigin, check_adapter_id
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    InvalidArgument,
    PermissionDenied,
    Unimplemented,
    adapter_not_found,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

log = logging.getLogger(__name__)

SIGNED_FOR: Final = timedelta(minutes=5)  # an address; a download that has begun goes on
MAX_REFUSAL_BYTES: Final = 64 << 10
REFUSAL_S: Final = 5.0
MAX_INDEX_BYTES: Final = 16 << 20
# Timeouts for asking a service for credentials.
_TIMEOUTS: Final[ClientConfig] = {"connect_timeout": "5s", "timeout": "20s"}
_RETRIES: Final[RetryConfig] = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}
_KEY = re.compile(r"[A-Za-z0-9!_.*'()=@+ -]+(/[A-Za-z0-9!_.*'()=@+ -]+)*\Z")
_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_REGION = re.compile(r"[a-z0-9-]{1,40}\Z")


class S3Source:
    """Adapters in `buckets`: endpoints by name, empty for AWS's. Downloads lie in `temporary` (default: the system's
    place) until they are in the store. `unsigned`: buckets are public, and asked without credentials."""

    def __init__(
        self,
        buckets: Mapping[str, str],
        max_bytes: int = MAX_BYTES,
        temporary: Path | None = None,
        with_templates: bool = False,
        unsigned: bool = False,
    ) -> None:
        self._buckets = dict(buckets)
        self._unsigned = unsigned
        self._wanted = (*WANTED_NAMES, *(TEMPLATE_NAMES if with_templates else ()))
        self._max_bytes = max_bytes
        self._temporary = temporary
        self._stores: dict[str, _Bucket] = {}

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> FetchedFiles:
        bucket, prefix = self._place(adapter_id, origin)
        place = f"{S3_SOURCE}{bucket}/{prefix}"
        with temporary_folder(self._temporary, place, "the bucket") as folder:
            with contextlib.closing(HttpClient()) as client:
                remote = _Prefix(client, self._bucket(bucket), prefix, place)
                remote.look(self._wanted)
                remote.fetch(folder, self._wanted, self._max_bytes)
                remote.check_unchanged()
            return FetchedFiles(folder, adapter_id)

    def list(self) -> Sequence[str]:
        return []

    def _place(self, adapter_id: str, origin: AdapterOrigin) -> tuple[str, str]:
        """Bucket and prefix of an adapter. Raises AdapterNotFound where it is no place of this source's,
        InvalidArgument."""
        check_adapter_id(adapter_id)
        if not origin.source.startswith(S3_SOURCE):
            raise adapter_not_found(adapter_id)
        bucket, _, prefix = origin.source.removeprefix(S3_SOURCE).rstrip("/").partition("/")
        if not _KEY.match(prefix):
            raise InvalidArgument(
                f"`source` {origin.source[:100]!a} is not a place in a bucket: write s3:BUCKET/PREFIX, with letters, "
                "digits, spaces and !_.*'()=@+- in PREFIX",
                field="source",
            )
        if bucket not in self._buckets:
            raise AdapterNotFound(
                f"this server reads no bucket {bucket[:100]!a}; its operator can allow it (--s3-bucket)",
                field="source",
                resource=adapter_id,
            )
        return bucket, prefix

    def _bucket(self, name: str) -> _Bucket:
        if name not in self._stores:
            self._stores[name] = _Bucket(name, self._buckets[name], self._unsigned)
        return self._stores[name]


class _Bucket:
    """Addresses of one bucket's objects, signed with the worker's credentials."""

    def __init__(self, name: str, endpoint: str, unsigned: bool) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError:
            raise Unimplemented(
                "this worker cannot read buckets: it lacks the extra `s3`; its operator can add it "
                "(pip install 'loraplex[s3]')",
                field="source",
            ) from None
        options: dict[str, Any] = {}
        if endpoint:
            options["endpoint"] = endpoint
        if unsigned:  # signed with no key of any worth, and sent without the signature
            options |= {"access_key_id": "none", "secret_access_key": "none"}
        self._unsigned = unsigned
        self.name = name
        client_options: ClientConfig = {**_TIMEOUTS, "allow_http": endpoint.startswith("http://")}
        self._store = S3Store(name, client_options=client_options, retry_config=_RETRIES, **options)
        self._sign = obstore.sign

    def address(self, method: Literal["GET", "HEAD"], key: str) -> str:
        """The signed address of an object. Raises SourceUnavailable where there are no credentials."""
        try:
            signed = self._sign(self._store, method, key, SIGNED_FOR)
        except Exception as error:  # its text may have addresses
            log.debug("no credentials for bucket %s: %s", self.name, type(error).__name__)
            raise unavailable(
                f"this worker has no credentials for bucket {self.name!a} now (AWS_ACCESS_KEY_ID, "
                "AWS_WEB_IDENTITY_TOKEN_FILE, or those of its container or instance)"
            ) from None
        return signed.partition("?")[0] if self._unsigned else signed


class _Prefix(RemoteFolder):
    """The objects under one prefix. They are asked for by name: listing needs a further permission."""

    def __init__(self, client: HttpClient, bucket: _Bucket, prefix: str, place: str) -> None:
        super().__init__(place, "the bucket", client)
        self._bucket = bucket
        self._prefix = prefix

    def look(self, wanted: Sequence[str]) -> None:
        """Asks for names and sizes. Raises AdapterNotFound where there is none of an adapter's files."""
        self._describe(wanted)
        if WEIGHTS_NAME not in self.files and MEDUSA_WEIGHTS_NAME not in self.files:
            self._describe((MODEL_WEIGHTS_NAME, MODEL_INDEX_NAME) if MODEL_CONFIG_NAME in self.files else ())
            self._describe(PICKLE_NAMES)
        if not self.files:
            with self.get(WANTED_NAMES[0]):  # the answer says whether there is the bucket
                raise unavailable(f"files were added to {self.name!a} while it was read")

    def check_unchanged(self) -> None:
        """Raises SourceUnavailable where objects were replaced since they were described."""
        before = dict(self.files)
        self._describe(tuple(before))
        if self.files != before:
            raise unavailable(f"{self.name!a} was changed while it was fetched")

    def model_weights(self, folder: Path) -> list[str]:
        if MODEL_INDEX_NAME not in self.files:
            return [MODEL_WEIGHTS_NAME]
        self.fetch_files(folder, [MODEL_INDEX_NAME], MAX_INDEX_BYTES)
        index = parse_object((folder / MODEL_INDEX_NAME).read_bytes(), MODEL_INDEX_NAME, MAX_INDEX_BYTES)
        files: object = index.get("weight_map")
        names = sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []
        if len(names) > MAX_FILES or not all(map(MODEL_WEIGHTS.fullmatch, names)):
            raise AdapterInvalid(f"{MODEL_INDEX_NAME} names files that are not a model's weights")
        self._describe(names)
        return [name for name in names if name in self.files]

    @contextlib.contextmanager
    def get(self, name: str) -> Generator[Iterator[bytes]]:
        with self._ask("GET", name) as response:
            if response.status_code == 404:
                raise self._not_found(self._code(response))
            yield response.iter_raw()

    def _describe(self, names: Sequence[str]) -> None:
        self.client.allow(START_S)
        for name in names:
            self.files.pop(name, None)
            with self._ask("HEAD", name) as response:
                if response.status_code != 404:
                    self.files[name] = _described(response, name)

    @contextlib.contextmanager
    def _ask(self, method: Literal["GET", "HEAD"], name: str) -> Generator[Any]:
        """The answer, which has the object or says 404. Raises typed errors for others."""
        url = self._bucket.address(method, f"{self._prefix}/{name}")
        with self.client.stream(method, url, {}) as response:
            status = response.status_code
            if status in (200, 404):
                yield response
                return
            about = f"{name} of {self.name!a}"
            if response.has_redirect_location:
                host = urlsplit(urljoin(url, response.headers["location"])).hostname or ""
                raise unavailable(
                    f"the bucket's server redirected to {host[:100]!a} for {about}, which this server does not follow; "
                    "its operator can name the right endpoint (--s3-bucket NAME=ENDPOINT) or region (AWS_REGION)"
                )
            code = self._code(response)
            if status in (401, 403):
                raise PermissionDenied(
                    f"the bucket does not give out {about} to this worker's credentials{code}; they need s3:GetObject, "
                    "and s3:ListBucket, without which what is not there is forbidden as well",
                    field="source",
                )
            region = response.headers.get("x-amz-bucket-region", "")
            where = f"; it is in region {region} (AWS_REGION)" if _REGION.match(region) else ""
            raise unavailable(f"the bucket's server answered {status}{code} for {about}{where}")

    def _code(self, response: Any) -> str:
        """The code in a refusal's body, in brackets; empty where there is none. A body may be endless, slow or cut: the
        status says enough."""
        self.client.allow(REFUSAL_S)
        data = b""
        with contextlib.suppress(Exception):
            for piece in response.iter_raw():
                data += piece
                if len(data) >= MAX_REFUSAL_BYTES:
                    break
        found = _CODE.search(data[:MAX_REFUSAL_BYTES])
        return "" if found is None else f" ({found[1].decode()})"

    def _not_found(self, code: str) -> AdapterNotFound:
        what = f"bucket {self._bucket.name!a}" if "NoSuchBucket" in code else f"adapter under {self.name!a}"
        return AdapterNotFound(f"there is no {what}", field="source")


def _described(response: Any, name: str) -> RemoteFile:
    """The object that an answer describes. Raises SourceUnavailable where it has no size."""
    try:
        num_bytes = int(response.headers["content-length"])
        if num_bytes < 0:
            raise ValueError(num_bytes)
    except (KeyError, ValueError):
        raise unavailable(f"the bucket's server does not say how large {name} is") from None
    digest = response.headers.get("x-amz-meta-sha256", "").lower()
    return RemoteFile(num_bytes, digest if _SHA256.match(digest) else "", response.headers.get("etag", ""))
