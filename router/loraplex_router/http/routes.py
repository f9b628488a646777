"""OpenAI's routes, and those of health, version and metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from loraplex_contracts.errors import LoraplexError
from loraplex_proto import __version__
from loraplex_proto.v1 import adapter_pb2, inference_pb2
from loraplex_router.http import answers, openai
from loraplex_router.http.backend import Backend, adapter_of, ignored_header, request_id_of
from loraplex_router.http.errors import error_object, is_missing_model, model_not_found
from loraplex_router.http.models import ChatCompletionRequest, CompletionRequest, TokenizeRequest, ignored_fields
from loraplex_router.http.openai import Job
from loraplex_router.http.streaming import EventStream, events_of

PAGE_SIZE: Final = 500


class Routes:
    """The handlers, over one router."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tokenize = backend.handler("Tokenize", backend.relay.tokenize)
        self._list = backend.handler("ListAdapters", backend.adapters.list)
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
        return await self._answer(
            openai.completion_job(body, names, request_id_of(request), int(time.time())), names, request
        )

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        names = self._backend.base_names()
        return await self._answer(
            openai.chat_job(body, names, request_id_of(request), int(time.time())), names, request
        )

    async def _answer(self, job: Job, base_names: Sequence[str], request: Request) -> Response:
        """Runs the job's calls."""
        headers = {"x-request-id": job.request_id, **ignored_header(job.ignored)}
        if not job.model:
            job = openai.with_model(job, base_names[0])
        try:
            if not job.is_streamed:
                found = await self._backend.generate(job.requests, request)
                return JSONResponse(answers.response_of(job, found), headers=headers)
            calls, first = await self._backend.generate_stream(job.requests, request)
        except LoraplexError as error:
            raise _named(error, job.model) from error
        chunks = answers.Chunks(job)
        events = events_of(calls, first, chunks.events, chunks.end, lambda error: _error_event(error, job))
        return EventStream(calls, events, headers)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        headers = ignored_header(ignored_fields(body))
        names = self._backend.base_names()
        if adapter_id := adapter_of(body.model, names):
            await self._backend.adapter_rows(adapter_id, request)
        answer = inference_pb2.TokenizeResponse.FromString(
            await self._backend.ask(self._tokenize, openai.tokenize_request(body).SerializeToString(), request)
        )
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
            question = adapter_pb2.ListAdaptersRequest(include_unloaded=True, page_size=PAGE_SIZE, page_token=token)
            page = adapter_pb2.ListAdaptersResponse.FromString(
                await self._backend.ask(self._list, question.SerializeToString(), request)
            )
            seen = {row.adapter_id: row for row in page.adapters}
            cards += [self._adapter_card(row, base) for row in seen.values()]
            token = page.next_page_token
            if not token:
                return JSONResponse({"object": "list", "data": cards})

    async def model(self, model_id: str, request: Request) -> Response:
        names = self._backend.base_names()
        if not model_id:
            raise model_not_found(model_id)
        adapter_id = adapter_of(model_id, names)
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
    return answers.error_event(error_object(_named(error, job.model)))
