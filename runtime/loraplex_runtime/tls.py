"""TLS credentials from PEM files that may be replaced.

A server's certificate and key, and the authorities that a client trusts. gRPC accepts contents that it cannot use and
says so to its own log only, so they are checked here, with OpenSSL.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.reload import Followed, Reloader


def server_credentials(files: Reloader, cert: Path | None, key: Path | None) -> grpc.ServerCredentials | None:
    """For a server's port; None without files. New connections get the pair that `files` read last, open ones keep
    theirs. Raises InvalidArgument for files that cannot be read or do not belong together."""
    if cert is None or key is None:
        return None

    def parse(cert_pem: bytes, key_pem: bytes) -> grpc.ServerCertificateConfiguration:
        check_pair(cert, key)
        return grpc.ssl_server_certificate_configuration([(key_pem, cert_pem)])

    pair = files.follow([(cert, "--tls-cert"), (key, "--tls-key")], parse)
    fetch: Any = _Changes(pair)  # its stub forgets the None
    return grpc.dynamic_ssl_server_credentials(pair.value, fetch)


class _Changes:
    """Asked by gRPC before each handshake, one at a time: the pair if it has changed since the last time, else None."""

    def __init__(self, pair: Followed[grpc.ServerCertificateConfiguration]) -> None:
        self._pair = pair
        self._given = pair.value

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        value = self._pair.value
        if value is self._given:
            return None  # the same again would cost a parse, and clients their TLS sessions
        self._given = value
        return value


def check_pair(cert: Path, key: Path) -> None:
    """Raises InvalidArgument where the two files are not a certificate and its key.

    Read by their paths, as Python's OpenSSL wants it; if they change right now, gRPC keeps the pair that it has.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # clients decide how strong a key must be
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # never ask a terminal
    except OSError as error:  # ssl.SSLError is one
        is_mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        what = (
            "do not fit together" if is_mismatch else "are not a certificate and its key, both PEM, without a password"
        )
        raise InvalidArgument(f"--tls-cert {cert} and --tls-key {key} {what}", field="--tls-cert") from error


def checked_authorities(pem: bytes, path: Path, flag: str) -> bytes:
    """`pem`, which is the content of `path`. Raises InvalidArgument where it has no certificate or a broken one."""
    try:
        # OpenSSL skips what stands between certificates, and wants text.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(f"{flag} {path} does not hold certificates (PEM)", field=flag) from error
    return pem
