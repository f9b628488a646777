"""Routes of LoRAX and TGI, and those shared with other dialects."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Discriminator, Tag
from starlette.responses import JSONResponse, Response

from loraplex_contracts.errors import LoraplexError
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import MAX_COMPLETIONS, MAX_STOP_STRINGS
from loraplex_router.http import openai, sglang, tgi, tgi_answers
from loraplex_router.http.backend import Backend, adapter_in, request_id_of
from loraplex_router.http.errors import body_dialect, error_object, naming_missing, tgi_error
from loraplex_router.http.models import ChatCompletionRequest, TokenizeRequest, harmless_fields, ignored_fields
from loraplex_router.http.origins import names_origin
from loraplex_router.http.routes import Routes
from loraplex_router.http.streaming import EventStream, data_event, events_of


def _tokenize_dialect(body: Any) -> str:
    return body_dialect("/tokenize", body)


# Two dialects have these routes, and the body decides.
AnyTokenizeRequest = Annotated[
    Annotated[tgi.TokenizeRequest, Tag("tgi")] | Annotated[TokenizeRequest, Tag("openai")],
    Discriminator(_tokenize_dialect),
]


def _generate_dialect(body: Any) -> str:
    return body_dialect("/generate", body)


AnyGenerateRequest = Annotated[
    Annotated[tgi.GenerateRequest, Tag("tgi")] | Annotated[sglang.GenerateRequest, Tag("openai")],
    Discriminator(_generate_dialect),
]


class TgiRoutes:
    """The handlers, over one router."""

    def __init__(self, backend: Backend, openai_routes: Routes) -> None:
        self._backend = backend
        self._openai = openai_routes
        self._tokenize = backend.handler("Tokenize", backend.relay.tokenize)
        self._get_tokenizer_info = backend.handler("GetTokenizerInfo", backend.relay.get_tokenizer_info)
        self._special_ids: Collection[int] | None = None

    def add_to(self, app: FastAPI) -> None:
        app.get("/")(self.info)
        app.get("/info")(self.info)
        app.post("/", response_class=Response)(self.generate_either)
        app.post("/generate", response_class=Response)(self.generate)
        app.post("/generate_stream", response_class=Response)(self.generate_stream)
        app.post("/tokenize")(self.tokenize)
        app.post("/chat_tokenize")(self.chat_tokenize)
        for path in ("/model_info", "/get_model_info"):
            app.get(path)(self.sglang_model_info)
        for path in ("/server_info", "/get_server_info"):
            app.get(path)(self.sglang_server_info)

    # --- generation ------------------------------------------------------------------------------------------------

    async def generate_either(self, body: tgi.GenerateRequest, request: Request) -> Response:
        """Answers POST / with a stream, or with a list of one answer."""
        if body.stream:
            return await self.generate_stream(body, request)
        return await self._answer(body, request, is_in_list=True)

    async def generate(self, body: AnyGenerateRequest, request: Request) -> Response:
        if isinstance(body, sglang.GenerateRequest):
            return await self._answer_sglang(body, request)
        return await self._answer(body, request, is_in_list=False)

    async def generate_stream(self, body: tgi.GenerateRequest, request: Request) -> Response:
        job = self._job(body, request, is_streamed=True)
        headers = self._headers(job)
        try:
            special_ids = await self._special_ids_for(job, request)
            calls, first = await self._backend.generate_stream([job.request], request)
        except LoraplexError as error:
            raise _named(error, job) from error
        events = tgi_answers.Events(job, special_ids)
        stream = events_of(calls, first, events.events, lambda: (), lambda error: _error_event(error, job), done=b"")
        return EventStream(calls, stream, headers)

    async def _answer(self, body: tgi.GenerateRequest, request: Request, *, is_in_list: bool) -> Response:
        started_s = time.monotonic()
        job = self._job(body, request, is_streamed=False)
        if body.stream:  # on /generate, where LoRAX and TGI do not look at it
            job = replace(job, ignored=(*job.ignored, "stream"))
        headers = self._headers(job)
        try:
            special_ids = await self._special_ids_for(job, request)
            (answer,) = await self._backend.generate([job.request], request)
        except LoraplexError as error:
            raise _named(error, job) from error
        found = tgi_answers.response_of(job, answer, special_ids)
        headers |= tgi_answers.answer_headers(answer, time.monotonic() - started_s)
        return JSONResponse([found] if is_in_list else found, headers=headers)

    async def _answer_sglang(self, body: sglang.GenerateRequest, request: Request) -> Response:
        started_s = time.monotonic()
        job = sglang.generate_job(body, await self._backend.names_for(body.model, request), request_id_of(request))
        headers = self._backend.ignored(job.ignored)
        try:
            if not job.is_streamed:
                answers = await self._backend.generate(job.requests, request)
                content = sglang.response_of(job, answers, time.monotonic() - started_s)
                return JSONResponse(content, headers=headers)
            calls, first = await self._backend.generate_stream(job.requests, request)
        except LoraplexError as error:
            raise _named_sglang(error, job) from error
        events = sglang.Events(job)

        def of_error(error: LoraplexError) -> bytes:
            return data_event(error_object(_named_sglang(error, job)))

        return EventStream(calls, events_of(calls, first, events.events, lambda: (), of_error), headers)

    def _job(self, body: tgi.GenerateRequest, request: Request, *, is_streamed: bool) -> tgi.Job:
        return tgi.generate_job(body, self._backend.base_names(), request_id_of(request), is_streamed=is_streamed)

    def _headers(self, job: tgi.Job) -> dict[str, str]:
        info = self._backend.replicas.model_info or pb.GetInfoResponse()
        return {
            **tgi_answers.stream_headers(job, self._backend.base_names()[0], info.device),
            **self._backend.ignored(job.ignored),
        }

    async def _special_ids_for(self, job: tgi.Job, request: Request) -> Collection[int]:
        """The base model's special tokens, where the answer has candidates: those do not say whether they are."""
        if not job.num_top:
            return ()
        if self._special_ids is None:
            raw = await self._backend.ask(self._get_tokenizer_info, b"", request)
            rows = pb.GetTokenizerInfoResponse.FromString(raw).special_tokens
            self._special_ids = frozenset(row.token_id for row in rows)
        return self._special_ids

    # --- tokens ----------------------------------------------------------------------------------------------------

    async def tokenize(self, body: AnyTokenizeRequest, request: Request) -> Response:
        if isinstance(body, TokenizeRequest):
            return await self._openai.tokenize(body, request)
        given = body.parameters or tgi.Parameters()
        names = await self._backend.names_for(body.model, request)
        headers = self._backend.ignored(tgi.ignored_in(body, given, names), harmless_fields(body))
        asked = {"model": body.model, "parameters.adapter_id": tgi.adapter_id_of(given.adapter_id or "", names)}
        adapter_id = adapter_in(asked, names)
        if adapter_id and not names_origin(given):
            await self._backend.adapter_rows(adapter_id, request)
        answer = await self._ask_tokens(tgi.tokenize_request(body, adapter_id), request)
        return JSONResponse(tgi_answers.tokens_of(body.inputs, answer), headers=headers)

    async def chat_tokenize(self, body: ChatCompletionRequest, request: Request) -> Response:
        """The text that the template makes of `messages`, and its tokens."""
        job = openai.chat_job(body, await self._backend.names_for(body.model, request), request_id_of(request), 0)
        asked = job.requests[0]
        if job.adapter_id and not names_origin(body):
            await self._backend.adapter_rows(job.adapter_id, request)
        message = pb.TokenizeRequest(
            chat=asked.chat, offsets=True, adapter_id=job.adapter_id, in_bucket=asked.in_bucket
        )
        if asked.HasField("hub"):
            message.hub.CopyFrom(asked.hub)
        answer = await self._ask_tokens(message, request)
        content = {
            "tokenize_response": tgi_answers.tokens_of(answer.rendered, answer),
            "templated_text": answer.rendered,
        }
        return JSONResponse(content, headers=self._backend.ignored(ignored_fields(body), harmless_fields(body)))

    async def _ask_tokens(self, message: pb.TokenizeRequest, request: Request) -> pb.TokenizeResponse:
        return pb.TokenizeResponse.FromString(
            await self._backend.ask(self._tokenize, message.SerializeToString(), request)
        )

    # --- the server ------------------------------------------------------------------------------------------------

    async def info(self) -> Response:
        name, *_ = self._backend.base_names()  # raises before a worker has said its model
        info = self._backend.replicas.model_info or pb.GetInfoResponse()
        most = self._backend.calls.max_in_flight
        return JSONResponse(tgi_answers.info_of(name, info, most, MAX_COMPLETIONS, MAX_STOP_STRINGS))

    async def sglang_model_info(self) -> Response:
        return JSONResponse(sglang.model_info_of(self._model_info()))

    async def sglang_server_info(self) -> Response:
        info = self._model_info()
        return JSONResponse(sglang.server_info_of(self._backend.base_names()[0], info))

    def _model_info(self) -> pb.GetInfoResponse:
        """The model's facts, as workers tell them. Raises NoWorker before any has."""
        if (info := self._backend.replicas.model_info) is None:
            raise self._backend.replicas.no_worker()
        return info


def _named(error: LoraplexError, job: tgi.Job) -> LoraplexError:
    return naming_missing(error, job.adapter_name, job.request)


def _named_sglang(error: LoraplexError, job: sglang.Job) -> LoraplexError:
    names = [name for name in job.adapter_names if name]
    shown = error.resource if error.resource in names else ", ".join(dict.fromkeys(names))
    return naming_missing(error, shown or "", job.requests[0])


def _error_event(error: LoraplexError, job: tgi.Job) -> bytes:
    _, content = tgi_error(_named(error, job))
    return data_event(content)
