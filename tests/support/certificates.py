"""Certificates for loopback, and which of them a server shows."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Pair:
    """PEM files."""

    cert: Path
    key: Path

    def copy_to(self, other: Pair) -> None:
        """Overwrites the other pair in place, the certificate first: for a moment the two do not fit together."""
        shutil.copyfile(self.cert, other.cert)
        shutil.copyfile(self.key, other.key)


KEYS = {
    "ec": ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"],
    **{curve: ["ec", "-pkeyopt", f"ec_paramgen_curve:{curve}"] for curve in ("secp384r1", "secp521r1", "secp256k1")},
    "ed25519": ["ed25519"],
    "rsa": ["rsa:2048"],
    "rsa-pss": ["rsa-pss"],
    "weak": ["rsa:1024"],
}


def new_pair(
    folder: Path, name: str, addresses: Sequence[str] = ("127.0.0.1",), key: str = "ec", by: Pair | None = None
) -> Pair:
    """A certificate and its key. `by` signs it; by default it signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificates with openssl")
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    names = ",".join(["DNS:localhost", *(f"IP:{address}" for address in addresses)])
    subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={names}"]
    command = ["openssl", "req", "-x509", "-newkey", *KEYS[key], "-nodes"]
    command += ["-keyout", str(pair.key), "-out", str(pair.cert), "-days", "2", *subject]
    command += ["-CA", str(by.cert), "-CAkey", str(by.key)] if by is not None else []
    subprocess.run(command, check=True, capture_output=True)
    return pair


def certificate_of(address: str, ciphers: str = "") -> str:
    """PEM of what a new connection is shown. `ciphers`: those of TLS 1.2 that it has to be."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ciphers:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(ciphers)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(plain) as connection:
        der = connection.getpeercert(binary_form=True)
    assert der is not None
    return ssl.DER_cert_to_PEM_cert(der)
