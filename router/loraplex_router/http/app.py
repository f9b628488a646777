"""Routes of the HTTP port, their credentials, and bounds on bodies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import choose_encoder
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import (
    Internal,
    InvalidArgument,
    LoraplexError,
    MessageTooLarge,
    RequestTimeout,
    unexpected,
)
from loraplex_proto import __version__
from loraplex_proto.v1 import adapter_pb2, inference_pb2
from loraplex_router.http import openai
from loraplex_router.http.backend import Backend, ignored_header, request_id_of
from loraplex_router.http.errors import (
    error_headers,
    error_object,
    is_missing_model,
    model_not_found,
    status_of,
)
from loraplex_router.http.models import ChatCompletionRequest, CompletionRequest, TokenizeRequest, ignored_fields
from loraplex_router.http.openai import Job
from loraplex_router.http.streaming import EventStream, FanOut, events_of, metadata_of, while_connected
from loraplex_runtime.auth import Credentials, admit

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 8 << 20
BODY_TIMEOUT_S: Final = 60.0
PAGE_SIZE: Final = 500

# The method of gRPC whose roles a route asks for. Other routes need a credential of any role.
_METHODS: Final[Mapping[str, str]] = {
    "/v1/completions": "/loraplex.v1.InferenceService/Generate",
    "/v1/chat/completions": "/loraplex.v1.InferenceService/Generate",
    "/tokenize": "/loraplex.v1.InferenceService/Tokenize",
}
_ANY_ROLE: Final = "/loraplex.v1.InferenceService/GetInfo"
_OPEN_PATHS: Final = frozenset({"/health", "/ping", "/version", "/metrics"})


class Routes:
    """The handlers, over one router."""

    def __init__(self, backend: Backend) -> None:
        calls, relay = backend.calls, backend.relay
        self._backend = backend
        self._generate = calls.handler("Generate", relay.generate)
        self._generate_stream = calls.handler("GenerateStream", relay.generate_stream)
        self._tokenize = calls.handler("Tokenize", relay.tokenize)
        self._list = calls.handler("ListAdapters", backend.adapters.list)
        self._started = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        app.get("/health")(self.health)
        app.get("/ping")(self.health)
        app.get("/version")(self.version)
        app.get("/metrics")(self.metrics)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{model_id:path}")(self.model)
        app.post("/v1/completions", response_class=Response)(self.completions)
        app.post("/v1/chat/completions", response_class=Response)(self.chat_completions)
        app.post("/tokenize")(self.tokenize)

    # --- generation ------------------------------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        names = self._backend.base_names()
        job = openai.completion_job(body, names, request_id_of(request), int(time.time()))
        return await self._answer(job, names, request)

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        names = self._backend.base_names()
        return await self._answer(
            openai.chat_job(body, names, request_id_of(request), int(time.time())), names, request
        )

    async def _answer(self, job: Job, base_names: Sequence[str], request: Request) -> Response:
        """Runs the job's calls. Nothing is sent before the first message, so that errors have their real status."""
        headers = {"x-request-id": job.request_id, **ignored_header(job.ignored)}
        raws = [one.SerializeToString() for one in job.requests]
        handle = self._generate_stream if job.is_streamed else self._generate
        if not job.model:
            job = openai.with_model(job, base_names[0])
        calls = FanOut(handle, raws, metadata_of(request))
        try:
            if not job.is_streamed:
                found = await while_connected(request.receive, calls.answers())
                answers = [inference_pb2.GenerateResponse.FromString(raw) for raw in found]
                return JSONResponse(openai.response_of(job, answers), headers=headers)
            first = await while_connected(request.receive, calls.next())
            if first is None:
                raise Internal("a worker has ended its answer without a message")
        except BaseException as error:
            calls.cancel()
            if isinstance(error, LoraplexError):
                raise _named(error, job.model) from error
            raise
        chunks = openai.Chunks(job)
        events = events_of(calls, first, chunks.events, chunks.end, lambda error: _error_event(error, job))
        return EventStream(calls, events, headers)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        headers = ignored_header(ignored_fields(body))
        names = self._backend.base_names()
        if adapter_id := openai.adapter_of(body.model, names):
            await self._backend.adapter_rows(adapter_id, request)
        raw = openai.tokenize_request(body).SerializeToString()
        answer = inference_pb2.TokenizeResponse.FromString(await self._backend.ask(self._tokenize, raw, request))
        content = {
            "count": len(answer.token_ids),
            "max_model_len": self._backend.replicas.max_context_tokens,
            "tokens": list(answer.token_ids),
            "token_strs": list(answer.tokens) if body.return_token_strs else None,
        }
        return JSONResponse(content, headers=headers)

    # --- models ----------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        base, *_ = self._backend.base_names()
        cards = [self._card(base, parent=None)]
        token = ""
        while True:
            question = adapter_pb2.ListAdaptersRequest(
                include_unloaded=True, page_size=PAGE_SIZE, page_token=token
            ).SerializeToString()
            page = adapter_pb2.ListAdaptersResponse.FromString(await self._backend.ask(self._list, question, request))
            seen = {row.adapter_id: row for row in page.adapters}
            cards += [self._adapter_card(row, base) for row in seen.values()]
            token = page.next_page_token
            if not token:
                return JSONResponse({"object": "list", "data": cards})

    async def model(self, model_id: str, request: Request) -> Response:
        names = self._backend.base_names()
        if not model_id:
            raise model_not_found(model_id)
        adapter_id = openai.adapter_of(model_id, names)
        if not adapter_id:
            return JSONResponse(self._card(model_id, parent=None))
        rows = await self._backend.adapter_rows(adapter_id, request)
        return JSONResponse(self._adapter_card(rows[0], names[0]))

    def _card(self, name: str, parent: str | None, root: str | None = None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "loraplex",
            "root": root or name,
            "parent": parent,
            "max_model_len": self._backend.replicas.max_context_tokens,
            "permission": [],
        }

    def _adapter_card(self, row: adapter_pb2.Adapter, base: str) -> dict[str, Any]:
        own = {"digest": row.digest or None, "kind": row.kind or None, "rank": row.rank or None}
        return {**self._card(row.adapter_id, parent=base, root=row.digest or None), "loraplex": own}

    # --- the server ------------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        return Response(status_code=200 if self._backend.is_ready() else 503)

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        if self._backend.registry is None:
            raise HTTPException(404)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._backend.registry), headers={"content-type": content_type})


def _named(error: LoraplexError, model: str) -> LoraplexError:
    return model_not_found(model) if is_missing_model(error) else error


def _error_event(error: LoraplexError, job: Job) -> bytes:
    return openai.error_event(error_object(_named(error, job.model)))


def make_app(backend: Backend) -> ASGIApp:
    """The ASGI application of the port."""
    # Documents that load scripts from elsewhere stay off.
    app = FastAPI(title="Loraplex", version=__version__, docs_url=None, redoc_url=None)
    Routes(backend).add_to(app)

    async def on_error(_: Request, error: Exception) -> Response:
        return _error_response(error)

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _error_response(_invalid(error))

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, LoraplexError):  # of `receive`, while FastAPI read the body
            return _error_response(error.__cause__)
        kinds = {404: "there is no such route", 405: "this route takes another method"}
        message = kinds.get(error.status_code, "the body must be JSON")
        content = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": content}, error.status_code, headers=error.headers)

    app.add_exception_handler(LoraplexError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    return _Middleware(app, backend.credentials)


class _Middleware:
    """Request id, credentials, bounds on the body; every exception becomes an answer."""

    def __init__(self, app: ASGIApp, credentials: Callable[[], Credentials] | None) -> None:
        self._app = app
        self._credentials = credentials

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, no lifespan
        headers = Headers(scope=scope)
        request_id = _id_in(headers)
        scope["state"] = {"request_id": request_id}
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message).setdefault("x-request-id", request_id)
            await send(message)

        try:
            self._admit(scope)
            await self._app(scope, _bounded(headers, receive), send_with_id)
        except Exception as error:
            if has_begun:
                raise  # the connection is closed, which the client notices
            await _error_response(error)(scope, receive, send_with_id)

    def _admit(self, scope: Scope) -> None:
        path: str = scope["path"]
        if self._credentials is None or path in _OPEN_PATHS:
            return
        pairs = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
        admit(self._credentials, _METHODS.get(path, _ANY_ROLE), pairs)


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


def _invalid(error: RequestValidationError) -> InvalidArgument:
    """The first of what is wrong, by the name of its field."""
    first: dict[str, Any] = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return InvalidArgument("the body is not valid JSON", field="body")
    if not where:
        return InvalidArgument("the body must be a JSON object, sent as application/json", field="body")
    name = ascii(where[0][:60])[1:-1]
    said = str(first["msg"]).removeprefix("Input ")
    return InvalidArgument(f"`{name}` is not valid: {said[:1].lower()}{said[1:]}", field=name)


def _error_response(error: Exception) -> Response:
    typed = error if isinstance(error, LoraplexError) else unexpected(error, "answering an HTTP request")
    return JSONResponse(error_object(typed), status_of(typed), headers=error_headers(typed))
