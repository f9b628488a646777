"""Files that are read again when they change, and TLS credentials made of them.

    files = Reloader()
    token = files.follow([(path, "--worker-token-file")], parse_token)   # raises what is wrong with it now
    files.start()
    token.value                                                           # what the file says now
    files.stop()

Contents are compared, because a file may be replaced within one tick of its time stamp, and paths are opened again each
time, because Kubernetes replaces a mounted secret by swapping a link in its path. A new content counts when two
readings in a row agree, so that a file that is being written is left alone, and when it can be parsed. Until then what
was read before stays in force, and the log says once what is wrong.
"""

from __future__ import annotations

import base64
import logging
import re
import ssl
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import grpc

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_runtime.regular_files import read_regular

log = logging.getLogger(__name__)

# A change is in force after one to two of these.
POLL_S: Final = 1.0

T = TypeVar("T")


def read_file(path: Path, flag: str) -> bytes:
    """The content of a file. Raises InvalidArgument, naming the flag."""
    try:
        return read_regular(path)
    except OSError as error:
        raise InvalidArgument(f"{flag} {path} cannot be read: {error.strerror}", field=flag) from error


class Followed(Generic[T]):
    """The parsed content of some files together. `value` changes as a whole and may be read from any thread."""

    def __init__(self, files: Sequence[tuple[Path, str]], parse: Callable[..., T]) -> None:
        """`files` are paths with their flags; `parse` takes the content of each. Raises what `read_file` and `parse`
        raise."""
        self._files = tuple(files)
        self._parse = parse
        self._in_force = self._read()
        self.value = self._parsed(self._in_force)
        # Contents, or the sentence why there are none.
        self._last_seen: tuple[bytes, ...] | str = self._in_force
        self._refused: tuple[bytes, ...] | str | None = None  # logged as refused, while the files hold it

    def poll(self) -> None:
        """Looks once more. Never raises."""
        try:
            seen = self._read()
        except Exception as error:
            seen = self._sentence(error)
        has_settled = seen == self._last_seen
        self._last_seen = seen
        if seen == self._in_force:
            if self._refused is not None:
                log.info("%s: as before again", self._names)
            self._refused = None
        elif has_settled:
            self._take(seen)

    def _take(self, seen: tuple[bytes, ...] | str) -> None:
        # What was refused is tried again: a parser may look at more than the contents, such as the files themselves.
        try:
            if isinstance(seen, str):
                raise InvalidArgument(seen)
            self.value = self._parsed(seen)
        except Exception as error:
            if seen != self._refused:
                log.error("%s; what was read before stays in force", self._sentence(error))
            self._refused = seen
        else:
            self._in_force, self._refused = seen, None
            log.info("%s: read again, in force from now on", self._names)

    def _parsed(self, seen: tuple[bytes, ...]) -> T:
        value = self._parse(*seen)
        if self._read() != seen:  # the parser may have looked at the files
            raise InvalidArgument(f"{self._names} changed while they were read")
        return value

    def _read(self) -> tuple[bytes, ...]:
        return tuple(read_file(path, flag) for path, flag in self._files)

    def _sentence(self, error: Exception) -> str:
        # Errors that are not ours were not foreseen, and their text may quote a secret.
        return error.message if isinstance(error, LoraplexError) else f"{self._names}: {type(error).__name__}"

    @property
    def _names(self) -> str:
        return " and ".join(f"{flag} {path}" for path, flag in self._files)


class Reloader:
    """Polls the files of one server, on a thread of its own: a file system that hangs holds up nothing else."""

    def __init__(self) -> None:
        self._followed: list[Followed[Any]] = []
        self._stopped = threading.Event()

    def follow(self, files: Sequence[tuple[Path, str]], parse: Callable[..., T]) -> Followed[T]:
        """The content of files that are read again when they change. Call it before `start`. Raises what `Followed`
        raises."""
        followed = Followed(files, parse)
        self._followed.append(followed)
        return followed

    def start(self) -> None:
        if self._followed:
            threading.Thread(target=self._run, name="reload-files", daemon=True).start()

    def stop(self) -> None:
        """Returns at once; the thread ends by itself."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            for followed in self._followed:
                followed.poll()


# --- TLS --------------------------------------------------------------------------------------------------------------
# gRPC accepts contents that it cannot use and says so to its own log only, so they are checked here, with OpenSSL.

_CERTIFICATE: Final = re.compile(rb"(?ms)^-----BEGIN ([A-Z0-9 ]*)CERTIFICATE-----[ \t\r]*$(.*?)^-----END")
# The algorithm of a certificate's key, as DER. gRPC's servers read no other kinds of keys but P-521 and Ed25519, and
# with those its clients, ours among them, end every handshake.
_KEY_ALGORITHMS: Final = (
    bytes.fromhex("300d06092a864886f70d0101010500"),  # RSA
    bytes.fromhex("301306072a8648ce3d020106082a8648ce3d030107"),  # P-256
    bytes.fromhex("301006072a8648ce3d020106052b81040022"),  # P-384
)

# Of a certificate as DER: the times from which and until which it holds, each UTCTime or GeneralizedTime.
_VALIDITY: Final = re.compile(rb"(?:\x17\x0d\d{12}|\x18\x0f\d{14})Z(?:\x17\x0d|\x18\x0f)(\d{12,14}Z)")


PAIR_FLAGS: Final = ("--tls-cert", "--tls-key")
CLIENT_CA_FLAG: Final = "--tls-client-ca"


def tls_files(cert: Path, key: Path, client_ca: Path | None) -> list[tuple[Path, str]]:
    """The files of a port with TLS, as `follow` takes them."""
    ca = [] if client_ca is None else [(client_ca, CLIENT_CA_FLAG)]
    return [*zip((cert, key), PAIR_FLAGS, strict=True), *ca]


def server_credentials(
    files: Reloader, cert: Path | None, key: Path | None, client_ca: Path | None = None
) -> grpc.ServerCredentials | None:
    """Credentials of a server's port; None without files. With `client_ca`, clients have to show a certificate that it
    has signed, in each connection anew: no session is resumed, for it would outlive the certificate. New connections
    get what `files` read last, open ones keep theirs. Raises InvalidArgument for files that cannot be read, do not
    belong together or are of no use to gRPC."""
    if cert is None or key is None:
        return None

    def parse(cert_pem: bytes, key_pem: bytes, ca_pem: bytes = b"") -> Callable[[], Any]:
        check_pair(cert, key)
        _warn_of_expiry(check_key(cert_pem, cert), cert)
        ca = None if client_ca is None else authorities(client_ca, CLIENT_CA_FLAG)(ca_pem)
        pair = _ascii(key_pem), _ascii(cert_pem)
        return lambda: grpc.ssl_server_certificate_configuration([pair], ca)

    asks_clients = client_ca is not None
    followed = files.follow(tls_files(cert, key, client_ca), parse)
    given = followed.value

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, one at a time: the configuration, or None for the one of before, whose
        sessions gRPC resumes."""
        nonlocal given
        before, given = given, followed.value
        return given() if asks_clients or given is not before else None

    untyped: Any = fetch  # gRPC's stub forgets the None
    return grpc.dynamic_ssl_server_credentials(given(), untyped, require_client_authentication=asks_clients)


def client_pair(cert: Path, key: Path, flags: tuple[str, str]) -> Callable[[bytes, bytes], tuple[bytes, bytes]]:
    """Parser of the certificate and the key that a client shows: the key and the certificate, as gRPC takes them. It
    raises what `server_credentials` raises."""

    def parse(cert_pem: bytes, key_pem: bytes) -> tuple[bytes, bytes]:
        check_pair(cert, key, flags)
        _warn_of_expiry(check_key(cert_pem, cert, flags[0]), cert, flags[0])
        return _ascii(key_pem), _ascii(cert_pem)

    return parse


def check_pair(cert: Path, key: Path, flags: tuple[str, str] = PAIR_FLAGS) -> None:
    """Raises InvalidArgument where the two files, read by their paths as Python's OpenSSL wants it, are not a
    certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # the other side decides how strong a key must be
    load_pair(context, cert, key, flags)


def check_key(cert_pem: bytes, cert: Path, flag: str = PAIR_FLAGS[0]) -> bytes:
    """The certificate, which OpenSSL took, as DER. Raises InvalidArgument where gRPC's servers or clients cannot use
    its key."""
    found = _CERTIFICATE.search(_ascii(cert_pem))
    if found is None or found[1].strip() not in (b"", b"X509"):
        raise InvalidArgument(f"{flag} {cert} has no line -----BEGIN CERTIFICATE-----", field=flag)
    der = base64.b64decode(found[2])
    if not any(algorithm in der for algorithm in _KEY_ALGORITHMS):
        raise InvalidArgument(
            f"{flag} {cert} has a key of a kind that gRPC cannot use; make one that is RSA, P-256 or P-384",
            field=flag,
        )
    return der


def _warn_of_expiry(der: bytes, cert: Path, flag: str = PAIR_FLAGS[0]) -> None:
    if ended := _expired(der):
        others = "clients" if flag in PAIR_FLAGS else "servers"
        log.warning("%s %s expired on %s; %s refuse it", flag, cert, ended, others)


def _expired(der: bytes) -> str:
    """The time at which the certificate has expired; empty where it has not."""
    if (validity := _VALIDITY.search(der)) is None:
        return ""
    until = validity[1].decode()
    ended = datetime.strptime(until, "%y%m%d%H%M%SZ" if len(until) == 13 else "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
    return f"{ended:%Y-%m-%d %H:%M} UTC" if ended < datetime.now(UTC) else ""


def load_pair(context: ssl.SSLContext, cert: Path, key: Path, flags: tuple[str, str] = PAIR_FLAGS) -> None:
    """Loads a certificate and its key. Raises InvalidArgument where the files are something else; a context that has
    a pair already is of no use then, for OpenSSL takes the certificate before it looks at the key."""
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # never ask a terminal
    except OSError as error:  # ssl.SSLError is one
        reason = str(getattr(error, "reason", None))
        what = "are not a certificate and its key, both PEM, without a password"
        if reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
            what = "do not fit together"
        elif reason.endswith(("TOO_SMALL", "TOO_WEAK")):
            what = f"are too weak ({reason}); use a longer key and a newer signature"
        raise InvalidArgument(f"{flags[0]} {cert} and {flags[1]} {key} {what}", field=flags[0]) from error


def authorities(path: Path, flag: str) -> Callable[[bytes], bytes]:
    """Parser of authorities, as `checked_authorities`; the log says which of them have expired."""

    def parse(pem: bytes) -> bytes:
        checked = checked_authorities(pem, path, flag)
        for found in _CERTIFICATE.finditer(checked):
            if ended := _expired(base64.b64decode(found[2])):
                log.warning("%s %s: an authority expired on %s; what it signed is refused", flag, path, ended)
        return checked

    return parse


def checked_authorities(pem: bytes, path: Path, flag: str) -> bytes:
    """The part of `pem`, the content of `path`, that gRPC can use. Raises InvalidArgument where it has no certificate
    or a broken one."""
    text = _ascii(pem)
    # gRPC trusts such a one, and Python's OpenSSL leaves it out.
    if re.search(rb"(?m)^-----BEGIN TRUSTED CERTIFICATE-----", text):
        raise InvalidArgument(
            f"{flag} {path} has a BEGIN TRUSTED CERTIFICATE; `openssl x509` writes it as a BEGIN CERTIFICATE",
            field=flag,
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode())
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(f"{flag} {path} does not hold certificates (PEM)", field=flag) from error
    return text


def _ascii(pem: bytes) -> bytes:
    """PEM without what is not ASCII: what stands between certificates is skipped, but gRPC does not see the first one
    behind a byte order mark."""
    return pem.decode("ascii", "ignore").encode()
