"""ASGI middleware of the HTTP port: request id, credentials, bounds on bodies."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, LoraplexError, MessageTooLarge, RequestTimeout, as_typed
from loraplex_proto.services import ADAPTERS, INFERENCE, STATUS, path_of
from loraplex_router.http.errors import dialect_of, error_headers, error_object, note_refusal, status_of, tgi_error
from loraplex_router.http.page import is_page, page_response
from loraplex_router.http.pooling import routes as pooling_routes
from loraplex_runtime.auth import Credentials, admit, current_identity
from loraplex_runtime.listener import is_public, join_address
from loraplex_runtime.refusals import MAX_METHOD_CHARS, Refusals, tenant_of
from loraplex_runtime.request_record import RequestRecord

MAX_BODY_BYTES: Final = 8 << 20
BODY_TIMEOUT_S: Final = 60.0
# Seconds in which the rest of a body may come behind an answer that did not wait for it.
DROP_S: Final = 5.0

# The method of gRPC whose roles a route asks for. Other routes need a credential of any role.
_METHODS: Final[Mapping[str, str]] = {
    "/v1/completions": path_of(INFERENCE, "Generate"),
    "/v1/chat/completions": path_of(INFERENCE, "Generate"),
    "/v1/responses": path_of(INFERENCE, "Generate"),
    "/": path_of(INFERENCE, "Generate"),
    "/generate": path_of(INFERENCE, "Generate"),
    "/generate_stream": path_of(INFERENCE, "Generate"),
    "/tokenize": path_of(INFERENCE, "Tokenize"),
    "/v1/tokenize": path_of(INFERENCE, "Tokenize"),
    "/detokenize": path_of(INFERENCE, "Detokenize"),
    "/v1/detokenize": path_of(INFERENCE, "Detokenize"),
    "/tokenizer_info": path_of(INFERENCE, "GetTokenizerInfo"),
    **pooling_routes.METHODS,
    "/v1/load_lora_adapter": path_of(ADAPTERS, "LoadAdapter"),
    "/load_lora_adapter": path_of(ADAPTERS, "LoadAdapter"),
    "/v1/unload_lora_adapter": path_of(ADAPTERS, "UnloadAdapter"),
    "/unload_lora_adapter": path_of(ADAPTERS, "UnloadAdapter"),
    "/chat_tokenize": path_of(INFERENCE, "Tokenize"),
    "/v1/status": path_of(STATUS, "GetStatus"),
}
_ANY_ROLE: Final = path_of(INFERENCE, "GetInfo")
_OPEN_PATHS: Final = frozenset({"/health", "/ping", "/health_generate", "/version", "/metrics"})


# Answers are data: a browser that is shown one runs nothing of it. A page sends a policy of its own.
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class HostNames:
    """Names that requests may be sent to. A page in a browser can have its own name lead to this machine, but not
    send requests with another one."""

    def __init__(self, names: Sequence[str], listens_on: str) -> None:
        """`names` may have "*". Without any: localhost and addresses where `listens_on` is an address of this machine
        only, else any name."""
        self._names = frozenset(name.lower() for name in names)
        self._allows_any = "*" in self._names or (not names and not _is_local(listens_on))

    def check(self, host: str | None) -> None:
        """Checks the Host header's value. Raises InvalidArgument."""
        if self._allows_any or host is None:
            return
        name = _without_port(host).lower()
        if name not in self._names if self._names else not _is_address_or_local(name):
            raise InvalidArgument("this server is not asked for under that name; see --allowed-host", field="host")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_local(name: str) -> bool:
    return not is_public(_without_port(name))


def _is_address_or_local(name: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name in ("", "localhost") or name.endswith(".localhost")


class Middleware:
    """Request id, host names, credentials, bounds on the body; every exception becomes an answer."""

    def __init__(
        self,
        app: ASGIApp,
        credentials: Callable[[], Credentials] | None,
        allowed_hosts: HostNames,
        refusals: Refusals,
    ) -> None:
        self._app = app
        self._credentials = credentials
        self._allowed_hosts = allowed_hosts
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, no lifespan
        headers = Headers(scope=scope)
        request_id = _id_in(headers)
        record = RequestRecord(f"{scope['method']} {scope['path'][:MAX_METHOD_CHARS]}", request_id=request_id)
        record.peer = join_address(*scope["client"]) if scope.get("client") else ""
        scope["state"] = {"request_id": request_id, "record": record, "refusals": self._refusals}
        has_begun = is_whole = False

        async def receive_noted() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = not message.get("more_body", False)  # or the connection has ended
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                sent = MutableHeaders(scope=message)
                for name, value in {"x-request-id": request_id, **_HEADERS}.items():
                    sent.setdefault(name, value)
            elif not is_whole and not message.get("more_body", False):
                # Closing a connection on which bytes are unread destroys the answer on its way (a proxy says 502).
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DROP_S):
                        while not is_whole:
                            await receive_noted()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            _check_host(scope, headers)
            self._allowed_hosts.check(headers.get("host"))
            _check_path(scope["path"])
            if is_page(scope):
                await page_response(scope["path"])(scope, receive_noted, send_with_id)
                return
            self._admit(scope, record)
            _check_encoding(headers)
            # A server leaves out the body of what it is asked for by HEAD. Every route that takes GET takes that, too.
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(asked, _bounded(headers, receive_noted), send_with_id)
        except Exception as error:
            if has_begun:
                raise  # the connection is closed, which the client notices
            await error_response(error, scope)(scope, receive_noted, send_with_id)

    def _admit(self, scope: Scope, record: RequestRecord) -> None:
        """Checks the credential where one is asked for. The record gets the tenant of one that is known."""
        path: str = scope["path"]
        if self._credentials is not None:
            if path in _OPEN_PATHS:
                return
            pairs = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
            try:
                admit(self._credentials, _METHODS.get(path, _ANY_ROLE), pairs)
            except LoraplexError as error:
                record.tenant = tenant_of(error)
                raise
        record.tenant = current_identity().tenant


def _check_host(scope: Scope, headers: Headers) -> None:
    """Raises InvalidArgument for no `Host` from HTTP/1.1 on, and for two of them (RFC 9112, 3.2): what stands in front
    of this server may have read the other one."""
    num_hosts = len(headers.getlist("host"))
    if num_hosts > 1 or (num_hosts == 0 and scope["http_version"] not in ("0.9", "1.0")):
        raise InvalidArgument(f"send one `Host` header: the request has {num_hosts or 'none'}", field="host")


def _check_path(path: str) -> None:
    """Raises InvalidArgument for control characters: a route would match in spite of a line's end behind its path, and
    `_METHODS` would not."""
    if any(char < " " or char == "\x7f" for char in path):
        raise InvalidArgument("the path has a control character", field="path")


def _check_encoding(headers: Headers) -> None:
    """Raises InvalidArgument for a compressed body: its length says nothing of what it holds."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidArgument("a body with a content-encoding is not read: send it as it is", field="content-encoding")


def _bounded(headers: Headers, receive: Receive) -> Receive:
    """`receive` that raises MessageTooLarge and RequestTimeout while the body arrives."""
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    num_bytes = 0
    is_complete = False
    deadline_s = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

    async def bounded() -> Message:
        nonlocal num_bytes, is_complete
        if is_complete:
            return await receive()  # the end of the connection
        try:
            async with asyncio.timeout_at(deadline_s):
                message = await receive()
        except TimeoutError as error:
            raise RequestTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        is_complete = not message.get("more_body", False)
        return message

    return bounded


def _too_large() -> MessageTooLarge:
    return MessageTooLarge(f"a body has at most {MAX_BODY_BYTES} bytes; send less", field="body")


def _id_in(headers: Headers) -> str:
    """The client's x-request-id where it is one, else a new one."""
    with contextlib.suppress(InvalidArgument):
        if given := headers.get("x-request-id"):
            return check_id(given, field="x-request-id")
    return uuid.uuid4().hex


def error_response(error: Exception, scope: Scope) -> Response:
    """An error in the form of the request's dialect, counted and logged."""
    typed = as_typed(error, "answering an HTTP request")
    note_refusal(typed, scope)
    if dialect_of(scope) == "tgi":
        status, content = tgi_error(typed)
        return JSONResponse(content, status, headers=error_headers(typed))
    return JSONResponse(error_object(typed), status_of(typed), headers=error_headers(typed))
