"""The deadline of fetches, against servers that send a little now and then."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from support.certificates import new_pair

from loraplex_adapters.sources.remote import HttpClient, TooSlow

OK = b"HTTP/1.1 200 OK\r\n"
DRIPS = {
    "hints": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "headers": (OK, b"a: b\r\n"),
    "body": (OK + b"content-length: 1000000\r\n\r\n", b"x"),
    "chunk": (OK + b"transfer-encoding: chunked\r\n\r\n1;", b"x"),
}


@contextlib.contextmanager
def dripping(start: bytes, drop: bytes, context: ssl.SSLContext | None = None) -> Generator[str]:
    """A server that answers with `start`, and then with a drop every 20 ms without end."""
    is_over = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError):
            accepted, _ = listener.accept()
            with accepted if context is None else context.wrap_socket(accepted, server_side=True) as connection:
                connection.recv(1 << 16)
                connection.sendall(start)
                while not is_over.wait(0.02):
                    connection.sendall(drop)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{'http' if context is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}/file"
        is_over.set()
        thread.join()


def read(url: str, time_s: float) -> bytes:
    with contextlib.closing(HttpClient()) as client:
        client.allow(time_s)
        with client.stream("GET", url, {}) as response:
            return b"".join(response.iter_raw())


@pytest.mark.parametrize("drip", DRIPS)
def test_drips_meet_the_deadline(drip: str) -> None:
    with dripping(*DRIPS[drip]) as url, pytest.raises(TooSlow):
        read(url, 0.3)


@pytest.mark.parametrize("drip", ["headers", "body"])
def test_drips_over_tls_meet_the_deadline(drip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = new_pair(tmp_path, "hub")
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.cert))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    with dripping(*DRIPS[drip], context) as url, pytest.raises(TooSlow):
        read(url, 0.5)


def test_silence_meets_the_deadline() -> None:
    with dripping(OK, b"") as url, pytest.raises(TooSlow):
        read(url, 0.1)


def test_a_slow_body_within_the_deadline_is_whole() -> None:
    with dripping(OK + b"content-length: 3\r\n\r\n", b"x") as url:
        assert read(url, 10.0) == b"xxx"
