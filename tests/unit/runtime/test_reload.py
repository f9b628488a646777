"""Files that change under a running server, certificates and keys among them."""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.certificates import Pair, certificate_of, new_pair
from support.processes import wait_until

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime import reload
from loraplex_runtime.listener import bind
from loraplex_runtime.reload import Followed, Reloader, check_pair, checked_authorities, server_credentials


def parse(raw: bytes) -> int:
    """Digits only. A parser with a bug for 13."""
    if not raw.isdigit():
        raise InvalidArgument("--number is not a number")
    if raw == b"13":
        raise RuntimeError("13 is secret")
    return int(raw)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


@pytest.fixture
def number(path: Path, caplog: pytest.LogCaptureFixture) -> Followed[int]:
    caplog.set_level(logging.INFO)
    return Followed([(path, "--number")], parse)


def settle(followed: Followed[int]) -> int:
    followed.poll()
    followed.poll()
    return followed.value


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_change_that_size_and_time_do_not_show(path: Path, number: Followed[int]) -> None:
    stat = path.stat()
    path.write_text("2")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert settle(number) == 2


def test_nothing_is_said_while_nothing_changes(number: Followed[int], caplog: pytest.LogCaptureFixture) -> None:
    assert settle(number) == 1
    assert not caplog.records


def test_a_file_that_is_being_written_is_left_alone(
    path: Path, number: Followed[int], caplog: pytest.LogCaptureFixture
) -> None:
    for written in ("", "2", "2x", "23"):
        path.write_text(written)
        number.poll()
        assert number.value == 1
    number.poll()
    assert number.value == 23
    assert not errors(caplog)


def test_a_broken_content_is_told_once(path: Path, number: Followed[int], caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("x")
    assert settle(number) == settle(number) == 1
    assert errors(caplog) == ["--number is not a number; what was read before stays in force"]
    path.write_text("y")
    assert settle(number) == settle(number) == 1
    assert len(errors(caplog)) == 2, "another broken content"
    path.write_text("1")
    assert settle(number) == 1
    assert caplog.messages[-1] == f"--number {path}: as before again"
    path.write_text("x")
    settle(number)
    assert len(errors(caplog)) == 3, "it had been well in between"
    path.write_text("2")
    assert settle(number) == 2
    assert caplog.messages[-1] == f"--number {path}: read again, in force from now on"


def test_a_file_that_vanishes_and_comes_back(
    path: Path, number: Followed[int], caplog: pytest.LogCaptureFixture
) -> None:
    path.unlink()
    assert settle(number) == settle(number) == 1
    (said,) = errors(caplog)
    assert f"--number {path} cannot be read: No such file or directory" in said
    path.write_text("2")
    assert settle(number) == 2


def test_a_fifo_is_refused_at_once(path: Path, number: Followed[int], caplog: pytest.LogCaptureFixture) -> None:
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidArgument, match=f"--number {path} cannot be read: it is not a regular file"):
        Followed([(path, "--number")], parse)
    assert settle(number) == 1
    (said,) = errors(caplog)
    assert "it is not a regular file; what was read before stays in force" in said
    path.unlink()
    path.write_text("2")
    assert settle(number) == 2


def test_a_file_that_is_away_while_it_is_replaced_is_not_worth_a_word(
    path: Path, number: Followed[int], caplog: pytest.LogCaptureFixture
) -> None:
    path.unlink()
    number.poll()
    path.write_text("2")
    assert settle(number) == 2
    assert not errors(caplog)


def test_a_bug_in_a_parser_keeps_what_is_in_force_and_a_secret(
    path: Path, number: Followed[int], caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("13")
    assert settle(number) == 1
    assert errors(caplog) == [f"--number {path}: RuntimeError; what was read before stays in force"]


def test_a_secret_as_kubernetes_swaps_it(tmp_path: Path) -> None:
    """name -> ..data/name, ..data -> a folder; a new folder comes by renaming a new link over ..data."""
    for name, text in (("old", "1"), ("new", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "number").write_text(text)
    (tmp_path / "..data").symlink_to("old")
    (tmp_path / "number").symlink_to("..data/number")
    number = Followed([(tmp_path / "number", "--number")], parse)
    (tmp_path / "..tmp").symlink_to("new")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    assert settle(number) == 2


def test_files_that_belong_together_change_together(tmp_path: Path) -> None:
    def equal(first: bytes, second: bytes) -> int:
        if first != second:
            raise InvalidArgument("they differ")
        return parse(first)

    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("1")
    second.write_text("1")
    both = Followed([(first, "--first"), (second, "--second")], equal)
    first.write_text("2")
    assert settle(both) == 1
    second.write_text("2")
    assert settle(both) == 2


def test_files_that_change_under_their_parser_are_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writes: list[str] = []

    def parse_late(raw: bytes) -> int:
        if writes:
            path.write_text(writes.pop())
        return parse(raw)

    number = Followed([(path, "--number")], parse_late)
    path.write_text("2")
    writes.append("3")
    assert settle(number) == 1
    assert f"--number {path} changed while they were read; what was read before stays in force" in caplog.text
    assert settle(number) == 3
    writes.append("4")
    with pytest.raises(InvalidArgument, match="changed while"):
        Followed([(path, "--number")], parse_late)


@pytest.mark.parametrize("text", [None, "x"])
def test_a_start_wants_a_file_that_is_sound(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "number"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument):
        Reloader().follow([(path, "--number")], parse)


def test_a_thread_polls_until_it_is_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "POLL_S", 0.01)
    files = Reloader()
    number = files.follow([(path, "--number")], parse)
    files.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "reload-files"]
    path.write_text("2")
    wait_until(lambda: number.value == 2)
    path.write_text("x")
    files.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_without_files_there_is_no_thread() -> None:
    before = threading.active_count()
    Reloader().start()
    assert threading.active_count() == before


# --- certificates and keys --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    folder = tmp_path_factory.mktemp("tls")
    return [new_pair(folder, name) for name in ("first", "second")]


def test_pairs(pairs: list[Pair], tmp_path: Path) -> None:
    first, second = pairs
    check_pair(first.cert, first.key)
    rsa = new_pair(tmp_path, "rsa", key="rsa")
    empty, half, none = (tmp_path / name for name in ("empty", "half", "none"))
    empty.touch()
    half.write_bytes(first.cert.read_bytes()[:300])
    for cert, key, says in (
        (first.cert, second.key, "do not fit together"),
        (first.cert, rsa.key, "do not fit together"),
        (rsa.cert, first.key, "do not fit together"),
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
    for pem in (first, first + second, b"# for us\n" + first, b"# once -----BEGIN TRUSTED CERTIFICATE-----\n" + first):
        assert checked_authorities(pem, Path("ca.pem"), "--worker-ca") == pem
    for before, kept in (("# für uns\n".encode(), b"# fr uns\n"), (codecs.BOM_UTF8, b"")):
        pem = checked_authorities(before + first, Path("ca.pem"), "--worker-ca")
        assert pem == kept + first, "gRPC gets what was checked"
    trusted = b"TRUSTED CERTIFICATE".join(second.split(b"CERTIFICATE"))
    for pem in (trusted, first + trusted):  # of which gRPC and OpenSSL differ
        with pytest.raises(InvalidArgument, match=r"--worker-ca ca\.pem has a BEGIN TRUSTED CERTIFICATE"):
            checked_authorities(pem, Path("ca.pem"), "--worker-ca")
    for pem in (b"", b"x", first[:300], first + second[:300], pairs[0].key.read_bytes()):
        with pytest.raises(InvalidArgument, match=r"--worker-ca ca\.pem does not hold certificates"):
            checked_authorities(pem, Path("ca.pem"), "--worker-ca")


async def handshake(pair: Pair) -> str:
    """The answer of a server that has the pair, to a gRPC client that trusts its certificate."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = bind(server, "127.0.0.1", 0, server_credentials(Reloader(), pair.cert, pair.key))
    await server.start()
    trusted = grpc.ssl_channel_credentials(pair.cert.read_bytes().removeprefix(codecs.BOM_UTF8))
    async with grpc.aio.secure_channel(f"localhost:{port}", trusted) as channel:
        method: Any = channel.unary_unary("/a.Service/Method")
        try:
            await method(b"", timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.details() or ""
        finally:
            await server.stop(None)
    return ""


@pytest.mark.parametrize("key", ["ec", "rsa", "secp384r1"])
async def test_keys_that_grpc_can_use(tmp_path: Path, key: str) -> None:
    pair = new_pair(tmp_path, key, key=key)
    assert await handshake(pair) == "Method not found!"
    for path in (pair.cert, pair.key):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert await handshake(pair) == "Method not found!"


@pytest.mark.parametrize("key", ["secp521r1", "ed25519", "secp256k1", "rsa-pss"])
def test_keys_that_grpc_cannot_use(tmp_path: Path, key: str) -> None:
    pair = new_pair(tmp_path, key, key=key)
    check_pair(pair.cert, pair.key)  # OpenSSL takes it
    with pytest.raises(InvalidArgument, match="RSA, P-256 or P-384") as caught:
        server_credentials(Reloader(), pair.cert, pair.key)
    assert caught.value.field == "--tls-cert"


def test_a_certificate_that_has_expired_is_told(
    pairs: list[Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server_credentials(Reloader(), pairs[0].cert, pairs[0].key)
    assert not caplog.records
    old = tmp_path / "old.crt"
    command = ["openssl", "x509", "-in", str(pairs[0].cert), "-signkey", str(pairs[0].key), "-days", "-1"]
    subprocess.run([*command, "-out", str(old)], check=True, capture_output=True)
    server_credentials(Reloader(), old, pairs[0].key)
    assert f"--tls-cert {old} expired on " in caplog.text
    both = tmp_path / "both"
    both.write_text(pairs[1].cert.read_text() + old.read_text())
    server_credentials(Reloader(), pairs[1].cert, pairs[1].key, both)
    assert caplog.text.count(f"--tls-client-ca {both}: an authority expired on ") == 1


def test_lines_of_pem_in_a_comment_are_none(pairs: list[Pair], tmp_path: Path) -> None:
    comment = b"# from -----BEGIN CERTIFICATE----- to -----END CERTIFICATE-----\n"
    cert, ca = tmp_path / "cert", tmp_path / "ca"
    cert.write_bytes(codecs.BOM_UTF8 + comment + pairs[0].cert.read_bytes())
    ca.write_bytes(comment + pairs[1].cert.read_bytes().replace(b"\n", b"\r\n"))
    server_credentials(Reloader(), cert, pairs[0].key, ca)


def test_a_trusted_certificate_is_none_for_grpc(pairs: list[Pair], tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.crt"
    command = ["openssl", "x509", "-in", str(pairs[0].cert), "-trustout", "-out", str(trusted)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(InvalidArgument, match="BEGIN CERTIFICATE"):
        server_credentials(Reloader(), trusted, pairs[0].key)


async def test_clients_show_a_certificate_of_the_authority_that_is_asked_for(
    pairs: list[Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pairs
    ca = tmp_path / "ca"
    with pytest.raises(InvalidArgument, match=r"--tls-client-ca .*ca cannot be read"):
        server_credentials(Reloader(), first.cert, first.key, ca)
    ca.write_text("x")
    with pytest.raises(InvalidArgument, match=r"--tls-client-ca .*ca does not hold certificates"):
        server_credentials(Reloader(), first.cert, first.key, ca)
    shutil.copyfile(second.cert, ca)
    files = Reloader()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = bind(server, "127.0.0.1", 0, server_credentials(files, first.cert, first.key, ca))
    await server.start()
    (followed,) = files._followed  # pyright: ignore[reportPrivateUsage]

    async def is_let_in(shown: Pair | None) -> bool:
        own = () if shown is None else (shown.key.read_bytes(), shown.cert.read_bytes())
        tls = grpc.ssl_channel_credentials(first.cert.read_bytes(), *own)
        async with grpc.aio.secure_channel(f"localhost:{port}", tls) as channel:
            method: Any = channel.unary_unary("/a.Service/Method")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(b"", timeout=10)
            return caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    signed = new_pair(tmp_path, "signed", by=second)
    assert [await is_let_in(shown) for shown in (signed, first, None)] == [True, False, False]
    for content in (first.cert.read_text(), "x"):  # what is none changes nothing
        ca.write_text(content)
        for _ in range(2):
            followed.poll()
        assert [await is_let_in(shown) for shown in (signed, first, None)] == [False, True, False]
    assert "--tls-client-ca" in caplog.text
    await server.stop(None)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_outlives_a_certificate_that_is_asked_for(
    pairs: list[Pair], version: ssl.TLSVersion, asks: bool
) -> None:
    shown, client = pairs
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    credentials = server_credentials(Reloader(), shown.cert, shown.key, client.cert if asks else None)
    port = bind(server, "127.0.0.1", 0, credentials)
    await server.start()
    context = ssl.create_default_context(cafile=shown.cert)
    context.load_cert_chain(client.cert, client.key)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])

    def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            assert connection.recv(100)  # the client is let in, and a ticket of TLS 1.3 has come
            return connection.session, connection.session_reused

    session, _ = await asyncio.to_thread(connect, None)
    assert session is not None
    _, is_resumed = await asyncio.to_thread(connect, session)
    assert is_resumed is not asks
    await server.stop(None)


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
