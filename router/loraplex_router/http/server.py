"""uvicorn in the router's event loop: port, bounds on headers, TLS, drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, Unauthenticated
from loraplex_router.http.middleware import MAX_BODY_BYTES
from loraplex_runtime.listener import bound_socket, join_address, why_not_listening
from loraplex_runtime.refusals import Refusals
from loraplex_runtime.reload import CLIENT_CA_FLAG, Reloader, check_key, checked_authorities, load_pair, tls_files
from loraplex_runtime.request_record import RequestRecord

log = logging.getLogger(__name__)

# Bounds of request line and headers together, and of the time for their arrival.
MAX_HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 10.0
# Bytes of a request as it travels, the sizes of its chunks and its trailers included; the body has a bound of its own.
MAX_REQUEST_BYTES: Final = 4 * MAX_BODY_BYTES
# Seconds of a connection from an answer to the next request, whatever comes between.
KEEP_ALIVE_S: Final = 60
# Seconds for which what a client sends behind our last answer is read and dropped, so that it can read the answer.
LINGER_S: Final = 5.0
BACKLOG: Final = 2048
# Requests of a connection that wait behind the one under way, with bodies of MAX_BODY_BYTES together, before it is read
# no further, and a client that leaves is no longer noticed.
MAX_PIPELINED: Final = 16
# Seconds that answers under way get to be read at the end, and seconds after which uvicorn cancels what is left then.
END_S: Final = 1.0
CANCEL_S: Final = 3


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose requests are bounded: heads and what comes behind an answer in size and time, all of it in size;
    trailers are dropped."""

    _head_bytes = 0
    _request_bytes = 0
    _is_in_head = True
    _has_ended = False  # a message has, in the bytes that are being read
    _timer: asyncio.TimerHandle | None = None
    _is_last = False  # the next answer, or the one under way
    _wants_more = False  # the client, by its latest head
    _lingers = False  # the last answer has been sent
    _tls: ssl.SSLContext | None = None  # of the connection

    def __init__(
        self, *args: Any, refusals: Refusals, latest_tls: Callable[[], ssl.SSLContext | None], **kwargs: Any
    ) -> None:
        """`latest_tls`: the context that new connections get; those of an older one end with their next answer."""
        super().__init__(*args, **kwargs)
        self._refusals = refusals
        self._latest_tls = latest_tls
        self._open: deque[RequestResponseCycle] = deque()  # without their whole answer, the one under way first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if (connection := transport.get_extra_info("ssl_object")) is not None:
            self._tls = connection.context
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        self._unset_keepalive_if_required()  # where TLS broke, uvicorn's timer would hold all of this
        super().connection_lost(exc)
        for cycle in self._open:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._request_bytes = 0
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_parse` reads this head again
        self._is_in_head = False
        self._head_bytes = 0
        self._end_timer()
        super().on_headers_complete()
        if self._tls is not self._latest_tls():
            self._is_last = True
        self.cycle.transport = cast(Any, _AnswerTransport(self))
        self._wants_more = self.cycle.keep_alive
        self.cycle.keep_alive &= not self._is_last
        if self.scope["http_version"] == "1.0":
            _leave_out_chunks(self.cycle)
        self._open.append(self.cycle)
        self._read_on()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.pipeline:  # the body under way is read as its app asks for it
            self._read_on()

    def _read_on(self) -> None:
        """Reads on where uvicorn waits for the answer under way."""
        if len(self._open) <= MAX_PIPELINED and sum(len(cycle.body) for cycle in self._open) <= MAX_BODY_BYTES:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._has_ended = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._open.popleft()
        if self._lingers:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            return
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last:
            # uvicorn's own timer ends with any byte, be it of a body that is not read or a line's end.
            self._close_after(HEAD_TIMEOUT_S if self._is_in_head else KEEP_ALIVE_S)

    def end_with_an_answer(self) -> None:
        """Has one more answer sent at most, which says `connection: close`."""
        self._is_last = True
        if self.cycle:
            self.cycle.keep_alive = False

    def close_behind_answer(self) -> None:
        """Ends the connection behind the answer under way. Where the client would go on, what it sends meanwhile is
        read and dropped: else TCP and TLS break the answer off (RFC 9112, 9.6)."""
        if self._lingers:
            return
        if self._is_last and self._wants_more and self._open and self._open[0].response_complete:
            self._lingers = True
            self._close_after(LINGER_S)
        else:
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._lingers or self.transport.is_closing():
            return
        self._request_bytes += len(data)
        if self._request_bytes > MAX_REQUEST_BYTES:
            self._close()
            return
        self._has_ended = False
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self._refuse()
            return
        # How many of these bytes belong to the next head is unknown; there are no more than asyncio reads at a time.
        if self._is_in_head and not self._has_ended:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._close()

    def _parse(self, data: memoryview) -> None:
        """Parses. A request to upgrade is answered as the one of HTTP/1.1 that it is (RFC 9110, 7.8). httptools ends it
        behind its head, so that its body would be read as the next request, which may be another client's behind a
        proxy: a new parser reads the head again, without that header. Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                data = data[stop.args[0] :]
            method = self.parser.get_method()
            if method == b"CONNECT":  # upgrades without the header
                raise httptools.HttpParserInvalidMethodError
            lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
            lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            with contextlib.suppress(AttributeError):  # of httptools before 0.6.3; uvicorn does the same
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _refuse(self) -> None:
        """Answers what cannot be read, whose sender has no credential."""
        message = "Invalid HTTP request received."
        peer = join_address(*self.client) if self.client else ""
        self._refusals.note(RequestRecord("HTTP request", peer=peer), InvalidArgument(message))
        cycle = self.cycle
        is_in_body = cycle and cycle.more_body and not (cycle.response_started or self.pipeline)
        if not cycle or cycle.response_complete or is_in_body:
            self.send_400_response(message)
        else:
            self._close()  # the client of the request under way would take a 400 for that one's answer

    def _await_head(self) -> None:
        self._is_in_head = True
        if not self.cycle or self.cycle.response_complete:  # else from the end of the answer on
            self._close_after(HEAD_TIMEOUT_S)

    def _close_after(self, seconds: float) -> None:
        self._end_timer()
        self._timer = self.loop.call_later(seconds, self._close)

    def shutdown(self) -> None:
        if self._lingers:
            self._close()
        elif not self.transport.is_closing():
            super().shutdown()

    def _close(self) -> None:
        if not self.transport.is_closing():  # asyncio's TLS can be aborted after one close, but not after two
            self.transport.close()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _AnswerTransport:
    """The connection as uvicorn's answers have it."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)

    def close(self) -> None:
        self._protocol.close_behind_answer()


def _leave_out_chunks(cycle: RequestResponseCycle) -> None:
    """Has the cycle send as HTTP/1.0 does, which knows no chunks (RFC 9112, 7.1): an answer of unknown length ends with
    its connection."""
    send = cycle.send
    is_sized = False

    async def send_plain(message: Any) -> None:
        nonlocal is_sized
        if message["type"] == "http.response.start":
            is_sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if is_sized else False
        elif message["type"] == "http.response.body" and not is_sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are the router's."""
        yield


def bind_http(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket that is bound but does not listen yet. Raises FailedPrecondition."""
    try:
        options = [socket.SO_REUSEADDR, *([socket.SO_REUSEPORT] if reuse_port else [])]
        bound = bound_socket(host, port, options)
    except OSError as error:
        raise FailedPrecondition(
            f"cannot listen on {join_address(host, port)}: {why_not_listening(host)}; see --http-host and --http-port "
            "(of `loraplex http`: --host and --port)",
            field="--http-port",
        ) from error
    bound.setblocking(False)
    return bound


class HttpServer:
    """The HTTP port of a router."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], address: str) -> None:
        self.address = address
        self._server = server
        self._task = task

    @classmethod
    async def start(
        cls,
        app: ASGIApp,
        bound: socket.socket,
        host: str,
        files: Reloader,
        tls: tuple[Path, Path] | None,
        refusals: Refusals,
        client_ca: Path | None = None,
    ) -> HttpServer:
        """Serves `app` on `bound`. `tls`: certificate and key, `client_ca`: of the certificates that clients have to
        show; they are read again when they change. `refusals` counts and logs what is no HTTP, and handshakes that
        end for want of a certificate."""
        latest = (lambda: None) if tls is None else _follow_tls(files, *tls, client_ca, refusals)
        config = uvicorn.Config(
            app,
            http=functools.partial(  # pyright: ignore[reportArgumentType]
                BoundedProtocol, refusals=refusals, latest_tls=latest
            ),
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CANCEL_S,
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = latest()
        server = _Server(config)
        address = join_address(host, bound.getsockname()[1])
        task = asyncio.create_task(server.serve([bound]), name="http")
        while not server.started and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # uvicorn has no event for it
        if task.done():
            await task
        return cls(server, task, address)

    def leave_port(self) -> None:
        """Stops listening, and has each connection end with its next answer: clients connect again, and reach another
        process on the port."""
        for listening in self._server.servers:
            listening.close()
        for connection in self._server.server_state.connections:
            assert isinstance(connection, BoundedProtocol)
            connection.end_with_an_answer()

    def close_idle(self) -> None:
        """Closes each connection without a request, and the others once their answers have been sent."""
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        """Closes the port. Answers under way get a second to end; a client that does not read its answer loses it."""
        self._server.should_exit = True
        aborting = asyncio.get_running_loop().call_later(END_S, self._abort_connections)
        try:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self._task
        finally:
            aborting.cancel()

    def _abort_connections(self) -> None:
        """Ends what is left, as clients do that go away: what uvicorn cancels itself is a traceback in the log."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


def _follow_tls(
    files: Reloader, cert: Path, key: Path, client_ca: Path | None, refusals: Refusals
) -> Callable[[], ssl.SSLContext]:
    """The context that `files` read last. A port that listens with any of them has each new connection get the last."""

    def parse(cert_pem: bytes, _key: bytes, ca_pem: bytes = b"") -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        load_pair(context, cert, key)
        check_key(cert_pem, cert)  # the router's other port has the same pair, and each port keeps what it can use
        if client_ca is not None:
            _demand_certificates(context, checked_authorities(ca_pem, client_ca, CLIENT_CA_FLAG))
        context.sni_callback = use_latest
        context.sslobject_class = Connection
        return context

    def use_latest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called by OpenSSL in every handshake, also without a name."""
        connection.context = pair.value

    class Connection(ssl.SSLObject):
        """TLS of a connection. asyncio tells nobody of a handshake that fails."""

        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except ssl.SSLError as error:
                if why := _why_refused(error):
                    refusals.note(RequestRecord("TLS handshake"), Unauthenticated(why))
                raise

    pair = files.follow(tls_files(cert, key, client_ca), parse)
    return lambda: pair.value


def _why_refused(error: ssl.SSLError) -> str:
    """The sentence on a client that was refused for its certificate; empty where a handshake ended for another
    reason."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is refused: {error.verify_message}"
    return "the client shows no certificate" if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE" else ""


def _demand_certificates(context: ssl.SSLContext, ca: bytes) -> None:
    """Has clients show a certificate that `ca` has signed, in each connection anew: a session that a client resumed
    would outlive its authority, for the sessions are of the context that listens. TLS 1.2 cannot be told to have none.
    """
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST  # as gRPC does
    context.load_verify_locations(cadata=ca.decode())
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
