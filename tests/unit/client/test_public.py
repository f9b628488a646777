"""Public names of the SDK: complete, and free of protobuf and gRPC."""

from __future__ import annotations

import codecs
import dataclasses
import inspect
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.certificates import new_pair

import loraplex
from loraplex_contracts import errors

PAIRS = [
    (loraplex.Client, loraplex.AsyncClient),
    (loraplex.Adapters, loraplex.AsyncAdapters),
]
PUBLIC = [getattr(loraplex, name) for name in loraplex.__all__]


def methods(cls: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_both_clients_take_the_same(blocking: type, asynchronous: type) -> None:
    ours, theirs = methods(blocking), methods(asynchronous)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert list(ours[name].parameters.values()) == list(theirs[name].parameters.values()), name


def test_every_error_is_there() -> None:
    for cls in errors.by_reason().values():
        assert cls.__name__ in loraplex.__all__
        assert getattr(loraplex, cls.__name__) is cls


@pytest.mark.parametrize("cls", [c for c in PUBLIC if inspect.isclass(c)], ids=lambda cls: cls.__name__)
def test_signatures_know_nothing_of_the_wire(cls: Any) -> None:
    texts = [str(one.annotation) for s in methods(cls).values() for one in s.parameters.values()]
    texts += [str(s.return_annotation) for s in methods(cls).values()]
    texts += [str(hint) for hint in inspect.get_annotations(cls).values()]
    assert not [text for text in texts if "pb2" in text or "grpc" in text]
    assert cls.__doc__


def test_answers_cannot_be_changed() -> None:
    answers = [c for c in PUBLIC if dataclasses.is_dataclass(c)]
    assert loraplex.Generation in answers
    for cls in answers:
        assert cls.__dataclass_params__.frozen, cls  # type: ignore[union-attr]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(tmp_path: Path) -> None:
    import grpc

    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", str(key), "-out", str(cert), "-days", "1", "-subj", "/CN=box", "-addext", "subjectAltName=DNS:box"],
        check=True, capture_output=True,
    )  # fmt: skip
    server = grpc.server(None)
    pair = (key.read_bytes(), cert.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    asking = grpc.ssl_server_credentials([pair], root_certificates=pair[1], require_client_auth=True)
    asking_port = server.add_secure_port("127.0.0.1:0", asking)
    server.start()
    try:
        tls = loraplex.Tls(root_certificates=codecs.BOM_UTF8 + cert.read_bytes(), server_name="box")
        with loraplex.Client(f"127.0.0.1:{port}", tls=tls) as client, pytest.raises(loraplex.Unimplemented):
            client.info(timeout_s=10)  # it got through: a server without services says so
        ca, marked_key, marked_cert = (codecs.BOM_UTF8 + pem for pem in (pair[1], *pair))
        tls = loraplex.Tls(ca, client_certificate=marked_cert, client_key=marked_key, server_name="box")
        with loraplex.Client(f"127.0.0.1:{asking_port}", tls=tls) as client, pytest.raises(loraplex.Unimplemented):
            client.info(timeout_s=10)
        refused = pytest.raises(loraplex.ServerUnreachable, match=r"vouches for its certificate.*\(--ca-cert\)")
        with loraplex.Client(f"127.0.0.1:{port}", tls=True) as client, refused:
            client.info(timeout_s=10)
        tls = loraplex.Tls(root_certificates=cert.read_bytes())
        refused = pytest.raises(loraplex.ServerUnreachable, match=r"certificate has another name.*--tls-name")
        with loraplex.Client(f"127.0.0.1:{port}", tls=tls) as client, refused:
            client.info(timeout_s=10)
        refused = pytest.raises(loraplex.ServerUnreachable, match=r"takes certificates, no key")
        with loraplex.Client(f"127.0.0.1:{port}", tls=loraplex.Tls(key.read_bytes())) as client, refused:
            client.info(timeout_s=10)
        refused = pytest.raises(loraplex.ServerUnreachable, match="TLS")
        with loraplex.Client(f"127.0.0.1:{port}") as client, refused:
            client.info(timeout_s=10)
        tls = loraplex.Tls(cert.read_bytes(), server_name="box")
        refused = pytest.raises(loraplex.ServerUnreachable, match=r"certificate of the client.*\(--client-key")
        with loraplex.Client(f"127.0.0.1:{asking_port}", tls=tls) as client, refused:
            client.info(timeout_s=10)
        foreign = new_pair(tmp_path, "foreign")
        tls = dataclasses.replace(
            tls, client_key=foreign.key.read_bytes(), client_certificate=foreign.cert.read_bytes()
        )
        refused = pytest.raises(
            loraplex.ServerUnreachable, match=r"do not accept the client's certificate.*--client-cert"
        )
        with loraplex.Client(f"127.0.0.1:{asking_port}", tls=tls) as client, refused:
            client.info(timeout_s=10)
    finally:
        server.stop(None)
