"""Certificates and keys, and changes of their files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import grpc
import grpc.aio
import pytest
from support.certificates import Pair, certificate_of, new_pair

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.ports import bind
from loraplex_runtime.reload import Reloader
from loraplex_runtime.tls import check_pair, checked_authorities, server_credentials


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    folder = tmp_path_factory.mktemp("tls")
    return [new_pair(folder, name) for name in ("first", "second")]


def test_pairs(pairs: list[Pair], tmp_path: Path) -> None:
    first, second = pairs
    check_pair(first.cert, first.key)
    empty, half, none = (tmp_path / name for name in ("empty", "half", "none"))
    empty.touch()
    half.write_bytes(first.cert.read_bytes()[:300])
    for cert, key, says in (
        (first.cert, second.key, "do not fit together"),
        (empty, empty, "are not a certificate and its key"),
        (half, first.key, "are not a certificate and its key"),
        (first.cert, first.cert, "are not a certificate and its key"),
        (none, first.key, "are not a certificate and its key"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            check_pair(cert, key)


def test_a_key_with_a_password_asks_no_terminal(pairs: list[Pair], tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", str(pairs[0].key), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(InvalidArgument, match="without a password"):
        check_pair(pairs[0].cert, locked)


def test_authorities(pairs: list[Pair]) -> None:
    first, second = (pair.cert.read_bytes() for pair in pairs)
    for pem in (first, first + second, "# für uns\n".encode() + first):
        assert checked_authorities(pem, Path("ca.pem"), "--worker-ca") == pem
    for pem in (b"", b"x", first[:300], first + second[:300], pairs[0].key.read_bytes()):
        with pytest.raises(InvalidArgument, match=r"--worker-ca ca\.pem does not hold certificates"):
            checked_authorities(pem, Path("ca.pem"), "--worker-ca")


async def test_new_connections_get_the_pair_that_fits(pairs: list[Pair], tmp_path: Path) -> None:
    first, second = pairs
    given = Pair(tmp_path / "given.crt", tmp_path / "given.key")
    first.copy_to(given)
    files = Reloader()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = bind(server, "127.0.0.1", 0, server_credentials(files, given.cert, given.key))
    await server.start()
    (pair,) = files._followed  # pyright: ignore[reportPrivateUsage]

    def shown() -> str:
        for _ in range(2):
            pair.poll()
        return certificate_of(f"127.0.0.1:{port}")

    assert shown() == first.cert.read_text()
    shutil.copyfile(second.cert, given.cert)
    assert shown() == first.cert.read_text(), "the key is not there yet"
    shutil.copyfile(second.key, given.key)
    assert shown() == shown() == second.cert.read_text()
    given.cert.write_text("x")
    assert shown() == second.cert.read_text()
    await server.stop(None)
