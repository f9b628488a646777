"""The HTTP port: bounds, end, certificates."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from support.certificates import Pair, certificate_of, new_pair
from support.fake_workers import until
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from loraplex_contracts.errors import InvalidArgument
from loraplex_router.http import server as http_server
from loraplex_router.http.server import CANCEL_S, MAX_HEAD_BYTES, HttpServer, bind_http
from loraplex_runtime import reload
from loraplex_runtime.refusals import MAX_LINES, Refusals
from loraplex_runtime.reload import Reloader

ENDLESS = b"x" * 10_000
SHORT_S = 0.2
BIG = b"z" * 8_000_000  # more than the system's buffers hold


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes in the body, /endless without an end, /slow in two halves, /stream in parts,
    /big with many bytes, /early before the body, /failing fails behind its answer."""
    if scope["path"] in ("/big", "/early"):
        body = BIG if scope["path"] == "/big" else b"early"
        size = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
        await send({"type": "http.response.body", "body": body})
        return
    if scope["path"] == "/failing":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"whole"})
        await asyncio.sleep(SHORT_S)
        raise RuntimeError("behind the answer")
    if scope["path"] == "/endless":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        is_gone = asyncio.ensure_future(receive_disconnect(receive))
        while not is_gone.done():
            await send({"type": "http.response.body", "body": ENDLESS, "more_body": True})
            await asyncio.sleep(0)
        return
    if scope["path"] == "/slow":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await asyncio.sleep(3 * SHORT_S)
        await send({"type": "http.response.body", "body": b"half"})
        return
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    num_bytes, is_whole = 0, False
    while not is_whole:
        message = await receive()
        num_bytes, is_whole = num_bytes + len(message.get("body", b"")), not message.get("more_body")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % num_bytes})


async def receive_disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def serving(
    shown: Pair | None = None, refusals: Refusals | None = None, client_ca: Path | None = None
) -> AsyncIterator[str]:
    files = Reloader()
    with closing(bind_http("127.0.0.1", 0)) as bound:
        tls = None if shown is None else (shown.cert, shown.key)
        server = await HttpServer.start(app, bound, "127.0.0.1", files, tls, refusals or Refusals(), client_ca)
        files.start()
        try:
            yield server.address
        finally:
            files.stop()
            await server.stop()


HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


async def test_a_request_with_a_body_may_be_followed_by_a_part_of_the_next_head() -> None:
    body = b"x" * (MAX_HEAD_BYTES + 1000)
    first = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(first + HEAD)
        async with asyncio.timeout(10.0):
            assert (await reader.readuntil(b"%8d" % len(body))).startswith(b"HTTP/1.1 200")
            writer.write(b"content-length: 2\r\n\r\nab")
            assert (await reader.readuntil(b"%8d" % 2)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize(
    ("method", "version", "body"),
    [
        (b"GET", b"1.0", b"onetwo"),
        (b"GET", b"1.1", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
        (b"HEAD", b"1.0", b""),
    ],
)
async def test_clients_of_http_1_0_get_no_chunks(method: bytes, version: bytes, body: bytes) -> None:
    async with serving() as address:
        for path, expected in ((b"/stream", body), (b"/", b"" if method == b"HEAD" else b"%8d" % 0)):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(b"%s %s HTTP/%s\r\nhost: localhost\r\nconnection: close\r\n\r\n" % (method, path, version))
            async with asyncio.timeout(10.0):
                head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert (rest, b"transfer-encoding" in head) == (expected, version == b"1.1" and path == b"/stream")


async def test_a_head_behind_another_request_has_its_bound() -> None:
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(HEAD + b"content-length: 0\r\n\r\n" + HEAD)
        async with asyncio.timeout(10.0):
            await reader.readuntil(b"%8d" % 0)
            with suppress(ConnectionError):
                for _ in range(20):
                    writer.write(b"x-header: " + b"y" * 8192 + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
                assert await reader.read() == b""
        writer.close()


async def test_a_part_of_a_head_behind_a_running_answer_does_not_cut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for the head begins when the answer has ended, that of the last one where several are asked for."""
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", SHORT_S)
    slow = b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with serving() as address:
        for num_requests in (1, 2):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(slow * num_requests + b"GET /v1/mod")
            async with asyncio.timeout(10.0):
                for _ in range(num_requests):
                    await reader.readuntil(b"halfhalf")
                assert await reader.read() == b""
            writer.close()


async def test_requests_that_wait_are_not_looked_at_again_for_each_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0

    class Counted(RequestResponseCycle):
        def __getattribute__(self, name: str) -> Any:
            nonlocal num_looks
            num_looks += name == "response_complete"
            return super().__getattribute__(name)

    monkeypatch.setattr(httptools_impl, "RequestResponseCycle", Counted)
    num_requests = 2000
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET /slow HTTP/1.1\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n" * num_requests)
        async with asyncio.timeout(10.0):
            await reader.readuntil(b"halfhalf")
        assert num_looks < 10 * num_requests
        writer.close()


UPGRADE = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAE\r\n"
BODY = b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n"  # a request of its own, if it is taken for one
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nupgrade: h2c\r\n\r\n" % (len(BODY), BODY)
PLAIN = b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.mark.parametrize(
    ("request_", "num_bytes"),
    [
        (UPGRADE + PLAIN, len(BODY)),
        (UPGRADE + CHUNKED, len(BODY)),
        (UPGRADE + b"\r\n", 0),
        (UPGRADE + b"upgrade: websocket\r\ncontent-length: 0\r\n\r\n", 0),
        (HEAD + b"upgrade: h2c\r\n" + PLAIN, len(BODY)),  # without the header `connection`
        (HEAD + b"connection: upgrade\r\n" + CHUNKED, len(BODY)),
    ],
)
async def test_a_request_to_upgrade_is_answered_as_any_other(request_: bytes, num_bytes: int) -> None:
    """Its body is no request of its own, wherever reads end, and it says nothing of the requests behind it."""
    async with serving() as address, asyncio.timeout(20.0):
        for part_bytes in (1, 7, len(request_) // 2, len(request_), 3 * len(request_)):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            sent = 3 * request_ + HEAD + b"content-length: 3\r\n\r\nabc"
            for start in range(0, len(sent), part_bytes):
                writer.write(sent[start : start + part_bytes])
                await asyncio.sleep(0)  # the server reads it
            for expected in (num_bytes, num_bytes, num_bytes, 3):
                answer = await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(8)
                assert answer.startswith(b"HTTP/1.1 200")
                assert int(answer[-8:]) == expected
            writer.close()


@pytest.mark.parametrize(
    "request_",
    [
        b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n" + PLAIN,
        UPGRADE + b"transfer-encoding: gzip\r\n\r\n" + BODY,
        UPGRADE + b"content-length: 1\r\n" + CHUNKED,
    ],
)
async def test_nothing_is_read_behind_a_request_of_unknown_length(request_: bytes) -> None:
    async with serving() as address, asyncio.timeout(10.0):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(request_ + HEAD + b"\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1
        writer.close()


SLOW = b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n"
NO_CHUNK = b"transfer-encoding: chunked\r\n\r\nno size\r\n"


@pytest.mark.parametrize("behind", [b"garbage\r\n\r\n", SLOW + b"garbage\r\n\r\n", HEAD + NO_CHUNK])
async def test_what_is_no_http_behind_a_running_answer_is_not_answered_in_it(behind: bytes) -> None:
    async with serving() as address, asyncio.timeout(10.0):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(SLOW)
        await reader.readuntil(b"half")
        writer.write(behind)
        assert await reader.read() == b""
        writer.close()


async def test_a_body_that_is_no_http_is_answered() -> None:
    async with serving() as address, asyncio.timeout(10.0):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(HEAD + NO_CHUNK)
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_callers_without_a_credential_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    refusals = Refusals()
    refusals.show_in(CollectorRegistry(), "router")
    async with serving(refusals=refusals) as address, asyncio.timeout(20.0):
        for _ in range(MAX_LINES + 5):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(b"garbage\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
        reader, writer = await asyncio.open_connection(*address.split(":"))
        for _ in range(MAX_LINES + 5):
            writer.write(UPGRADE + b"\r\n")
            await reader.readuntil(b"%8d" % 0)
        writer.close()
    assert len(caplog.records) == MAX_LINES
    assert "peer=127.0.0.1:" in caplog.text
    (family,) = refusals.collect()
    assert max(sample.value for sample in family.samples) == MAX_LINES + 5


async def test_the_end_does_not_wait_for_a_client_that_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readexactly(1000)
        await asyncio.sleep(0.5)  # until all buffers are full
        before_s = time.monotonic()
    assert time.monotonic() - before_s < CANCEL_S - 0.5
    assert caplog.records == []
    writer.transport.abort()


async def test_a_port_that_is_left_answers_each_connection_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may have sent a request when it hears of the end; one that has heard sends no more."""
    monkeypatch.setattr(http_server, "LINGER_S", SHORT_S)
    with closing(bind_http("127.0.0.1", 0)) as bound:
        server = await HttpServer.start(app, bound, "127.0.0.1", Reloader(), None, Refusals())
        connections = [await asyncio.open_connection(*server.address.split(":")) for _ in range(3)]
        async with asyncio.timeout(10.0):
            for reader, writer in connections:
                writer.write(HEAD + b"content-length: 0\r\n\r\n")
                assert b"connection: close" not in await reader.readuntil(b"%8d" % 0)
            (idle, _), (used, use), (slow, wait) = connections
            wait.write(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await slow.readuntil(b"half")
            server.leave_port()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*server.address.split(":"))
            use.write(HEAD + b"content-length: 2\r\n\r\nab")
            answer = await used.read()
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in answer
            assert not idle.at_eof()
            server.close_idle()
            assert await idle.read() == b""
            assert await slow.read() == b"half"
        for _, writer in connections:
            writer.close()
        await server.stop()


@pytest.mark.parametrize("has_tls", [True, False])
@pytest.mark.parametrize("end", ["a second request", "a body"])
async def test_the_last_answer_is_whole_whatever_a_client_sends_behind_it(
    has_tls: bool, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "LINGER_S", 10 * SHORT_S)
    shown = new_pair(tmp_path, "shown") if has_tls else None
    context = ssl.create_default_context(cafile=shown.cert) if shown else None
    files = Reloader()
    with closing(bind_http("127.0.0.1", 0)) as bound:
        tls = (shown.cert, shown.key) if shown else None
        server = await HttpServer.start(app, bound, "127.0.0.1", files, tls, Refusals())
        try:
            async with asyncio.timeout(30.0):
                host, _, port = server.address.rpartition(":")
                named = {"server_hostname": "localhost"} if has_tls else {}
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context, limit=1 << 24, **named)
                writer.write(HEAD + b"content-length: 0\r\n\r\n")
                await reader.readuntil(b"%8d" % 0)
                server.leave_port()
                if end == "a body":
                    writer.write(b"POST /early HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000000\r\n\r\n")
                    for _ in range(40):
                        await asyncio.sleep(SHORT_S / 40)
                        writer.write(ENDLESS * 10)
                        await writer.drain()
                    assert (await reader.readuntil(b"early")).startswith(b"HTTP/1.1 200")
                else:
                    writer.write(b"GET /big HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(b"GET /big HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    await asyncio.sleep(SHORT_S)
                    assert await reader.readexactly(len(BIG)) == BIG
                assert await reader.read() == b"", "a second request gets no answer"
                writer.close()
        finally:
            await server.stop()


@pytest.mark.parametrize("is_left_first", [True, False])
async def test_an_app_may_fail_behind_the_last_answer(is_left_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    unseen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    with closing(bind_http("127.0.0.1", 0)) as bound:
        server = await HttpServer.start(app, bound, "127.0.0.1", Reloader(), None, Refusals())
        async with asyncio.timeout(10.0):
            reader, writer = await asyncio.open_connection(*server.address.split(":"))
            writer.write(HEAD + b"content-length: 0\r\n\r\n")
            await reader.readuntil(b"%8d" % 0)
            if is_left_first:
                server.leave_port()
            writer.write(b"GET /failing HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"whole")
            server.leave_port()
            await until(lambda: "behind the answer" in caplog.text)
            assert await reader.read() == b""
            writer.close()
        await server.stop()
    gc.collect()
    assert unseen == []


async def test_clients_that_never_close_do_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "END_S", SHORT_S)
    shown = new_pair(tmp_path, "shown")
    context = ssl.create_default_context(cafile=shown.cert)
    with closing(bind_http("127.0.0.1", 0)) as bound:
        tls = shown.cert, shown.key
        server = await HttpServer.start(app, bound, "127.0.0.1", Reloader(), tls, Refusals())
        port = int(server.address.rpartition(":")[2])

        def ask() -> ssl.SSLSocket:
            connection = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="localhost")
            connection.sendall(HEAD + b"content-length: 0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            return connection

        with await asyncio.to_thread(ask):  # and then it reads nothing
            server.leave_port()
            server.close_idle()
            await server.stop()
    assert "timeout graceful shutdown exceeded" not in caplog.text


async def test_nothing_is_left_of_a_connection_that_has_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = new_pair(tmp_path, "shown")
    context = ssl.create_default_context(cafile=shown.cert)

    def ask() -> None:
        plain = socket.create_connection((host, int(port)))
        with context.wrap_socket(plain, server_hostname="localhost") as connection:
            connection.sendall(HEAD + b"content-length: 0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")  # and it leaves without a word

    made: list[weakref.ref[Any]] = []
    connect = http_server.BoundedProtocol.connection_made

    def connection_made(protocol: Any, transport: Any) -> None:
        made.append(weakref.ref(protocol))
        connect(protocol, transport)

    def is_gone() -> bool:
        gc.collect()
        return made[0]() is None

    monkeypatch.setattr(http_server.BoundedProtocol, "connection_made", connection_made)
    async with serving(shown) as address:
        host, _, port = address.rpartition(":")
        await asyncio.to_thread(ask)
        await until(is_gone)


async def shown_by(address: str, ciphers: str = "") -> str:
    return await asyncio.to_thread(certificate_of, address, ciphers)


async def test_a_port_shows_its_pair_until_another_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "POLL_S", 0.02)
    caplog.set_level("INFO")
    first, second, rsa = (new_pair(tmp_path, name, key=kind) for name, kind in (("1", "ec"), ("2", "ec"), ("3", "rsa")))
    pems = [pair.cert.read_text() for pair in (first, second, rsa)]
    shown = Pair(tmp_path / "shown.crt", tmp_path / "shown.key")
    first.copy_to(shown)
    async with serving(shown) as address:
        assert await shown_by(address) == pems[0]
        shown.cert.write_text(pems[1])
        await until(lambda: "stays in force" in caplog.text)
        assert await shown_by(address) == pems[0]
        second.copy_to(shown)
        await until(lambda: "in force from now on" in caplog.text)
        assert await shown_by(address) == pems[1]
        # Of another kind of key: nothing is left of the one before.
        caplog.clear()
        rsa.copy_to(shown)
        await until(lambda: "in force from now on" in caplog.text)
        assert await shown_by(address, "ECDHE-RSA-AES128-GCM-SHA256") == pems[2]
        with pytest.raises(ssl.SSLError):
            await shown_by(address, "ECDHE-ECDSA-AES128-GCM-SHA256")


@pytest.mark.parametrize("name", ["localhost", None])  # with SNI, and without
async def test_clients_show_a_certificate_of_the_authority_that_is_asked_for(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "POLL_S", 0.02)
    caplog.set_level("INFO")
    shown, authority, foreign = (new_pair(tmp_path, kind) for kind in ("shown", "authority", "foreign"))
    middle = new_pair(tmp_path, "middle", by=authority)
    ca = tmp_path / "ca"
    ca.write_text(middle.cert.read_text())  # no root: it is trusted as it is
    client = new_pair(tmp_path, "client", by=middle)
    contexts = [ssl.create_default_context(cafile=shown.cert) for _ in range(4)]
    for context, own in zip(contexts, (client, foreign, client), strict=False):
        context.load_cert_chain(own.cert, own.key)
    contexts[2].maximum_version = ssl.TLSVersion.TLSv1_2
    sessions: dict[ssl.SSLContext, ssl.SSLSession | None] = dict.fromkeys(contexts)

    def answer(context: ssl.SSLContext) -> bool:
        context.check_hostname = name is not None
        plain = socket.create_connection(("127.0.0.1", int(address.split(":")[1])), 10)
        try:
            with context.wrap_socket(plain, server_hostname=name, session=sessions[context]) as connection:
                connection.sendall(HEAD + b"content-length: 0\r\nconnection: close\r\n\r\n")
                has_answered = connection.recv(100).startswith(b"HTTP/1.1 200")
                sessions[context] = connection.session
                return has_answered
        except OSError:
            return False
        finally:
            plain.close()

    async def answers() -> list[bool]:
        return [await asyncio.to_thread(answer, context) for context in contexts]

    async with serving(shown, client_ca=ca) as address:
        assert await answers() == [True, False, False, False]
        for why in ("the client's certificate is refused: self-signed certificate", "the client shows no certificate"):
            assert f"TLS handshake failed: UNAUTHENTICATED: {why}" in caplog.text
        ca.write_text(foreign.cert.read_text())
        await until(lambda: "in force from now on" in caplog.text)
        assert await answers() == [False, True, False, False], "a session of before is not resumed"


async def test_connections_end_with_an_answer_once_others_may_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "POLL_S", 0.02)
    monkeypatch.setattr(http_server, "LINGER_S", SHORT_S)
    caplog.set_level("INFO")
    shown, client, other = (new_pair(tmp_path, kind) for kind in ("shown", "client", "other"))
    ca = tmp_path / "ca"
    ca.write_text(client.cert.read_text())
    context = ssl.create_default_context(cafile=shown.cert)
    context.load_cert_chain(client.cert, client.key)
    async with serving(shown, client_ca=ca) as address, asyncio.timeout(30.0):
        host, _, port = address.rpartition(":")
        connections = [
            await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost") for _ in range(2)
        ]
        for reader, writer in connections:
            for _ in range(2):  # by one connection, while nothing changes
                writer.write(HEAD + b"content-length: 0\r\n\r\n")
                assert b"connection: close" not in await reader.readuntil(b"%8d" % 0)
        (used, use), (slow, wait) = connections
        wait.write(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await slow.readuntil(b"half")
        ca.write_text(other.cert.read_text())
        await until(lambda: "in force from now on" in caplog.text)
        assert await slow.read(4) == b"half"  # the answer under way did not say that it is the last
        for reader, writer in ((used, use), (slow, wait)):
            writer.write(HEAD + b"content-length: 2\r\n\r\nab")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in answer
        for writer in (use, wait):
            writer.close()


async def test_a_pair_that_changes_before_the_port_listens_changes_later_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "POLL_S", 0.02)
    pairs = [new_pair(tmp_path, name) for name in "123"]
    shown = Pair(tmp_path / "shown.crt", tmp_path / "shown.key")
    pairs[0].copy_to(shown)
    load, follow = uvicorn.Config.load, Reloader.follow
    followed: list[Any] = []

    def load_late(config: uvicorn.Config) -> None:
        pairs[1].copy_to(shown)
        for _ in range(2):
            followed[0].poll()
        load(config)

    def follow_here(files: Reloader, *args: Any) -> Any:
        followed.append(follow(files, *args))
        return followed[-1]

    monkeypatch.setattr(Reloader, "follow", follow_here)
    monkeypatch.setattr(uvicorn.Config, "load", load_late)
    async with serving(shown) as address:
        assert await shown_by(address) == pairs[1].cert.read_text()
        pairs[2].copy_to(shown)
        await asyncio.sleep(SHORT_S)
        assert await shown_by(address) == pairs[2].cert.read_text()


async def test_a_key_that_the_port_of_grpc_cannot_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="kind that gRPC cannot use"):
        async with serving(new_pair(tmp_path, "strange", key="ed25519")):
            pass


async def test_a_key_that_is_too_weak_for_https_is_said_to_be(tmp_path: Path) -> None:
    weak = new_pair(tmp_path, "weak", key="weak")
    with pytest.raises(InvalidArgument, match="are too weak"):
        async with serving(weak):
            pass
