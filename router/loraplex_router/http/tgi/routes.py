"""LoRAX's and TGI's routes."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import MAX_COMPLETIONS, MAX_STOP_STRINGS
from loraplex_router.http.dialects import respond
from loraplex_router.http.fields import adapter_in, harmless_fields
from loraplex_router.http.openai.fields import ChatCompletionRequest, ignored_fields
from loraplex_router.http.openai.requests import chat_job
from loraplex_router.http.origins import names_origin
from loraplex_router.http.router_calls import RouterCalls, request_id_of
from loraplex_router.http.tgi import answers
from loraplex_router.http.tgi.fields import GenerateRequest, Parameters, TokenizeRequest, ignored_in
from loraplex_router.http.tgi.requests import Job, adapter_id_of, generate_job, tokenize_request


class TgiRoutes:
    """The handlers, over one router."""

    def __init__(self, router: RouterCalls) -> None:
        self._router = router
        self._tokenize = router.handler("Tokenize", router.relay.tokenize)
        self._get_tokenizer_info = router.handler("GetTokenizerInfo", router.relay.get_tokenizer_info)
        self._special_ids: Collection[int] | None = None

    def add_to(self, app: FastAPI) -> None:
        app.get("/")(self.info)
        app.get("/info")(self.info)
        app.post("/", response_class=Response)(self.generate_either)
        app.post("/generate_stream", response_class=Response)(self.generate_stream)
        app.post("/chat_tokenize")(self.chat_tokenize)

    # --- generation ------------------------------------------------------------------------------------------------

    async def generate_either(self, body: GenerateRequest, request: Request) -> Response:
        """Answers POST / with a stream, or with a list of one answer."""
        if body.stream:
            return await self.generate_stream(body, request)
        return await self.generate(body, request, is_in_list=True)

    async def generate_stream(self, body: GenerateRequest, request: Request) -> Response:
        job = self._job(body, request, is_streamed=True)
        headers = self._headers(job)
        answer = answers.Answer(job, await self._special_ids_for(job, request))
        return await respond(self._router, answer, request, headers)

    async def generate(self, body: GenerateRequest, request: Request, *, is_in_list: bool = False) -> Response:
        started_s = time.monotonic()
        job = self._job(body, request, is_streamed=False)
        if body.stream:  # on /generate, where LoRAX and TGI do not look at it
            job = replace(job, ignored=(*job.ignored, "stream"))
        headers = self._headers(job)
        special_ids = await self._special_ids_for(job, request)
        answer = answers.Answer(job, special_ids, started_s=started_s, is_in_list=is_in_list)
        return await respond(self._router, answer, request, headers)

    def _job(self, body: GenerateRequest, request: Request, *, is_streamed: bool) -> Job:
        return generate_job(body, self._router.base_names(), request_id_of(request), is_streamed=is_streamed)

    def _headers(self, job: Job) -> dict[str, str]:
        info = self._router.replicas.model_info or pb.GetInfoResponse()
        return {
            **answers.stream_headers(job, self._router.base_names()[0], info.device),
            **self._router.ignored(job.ignored),
        }

    async def _special_ids_for(self, job: Job, request: Request) -> Collection[int]:
        """The base model's special tokens, where the answer has candidates: those do not say whether they are."""
        if not job.num_top:
            return ()
        if self._special_ids is None:
            raw = await self._router.ask(self._get_tokenizer_info, b"", request)
            rows = pb.GetTokenizerInfoResponse.FromString(raw).special_tokens
            self._special_ids = frozenset(row.token_id for row in rows)
        return self._special_ids

    # --- tokens ----------------------------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        given = body.parameters or Parameters()
        names = await self._router.names_for(body.model, request)
        headers = self._router.ignored(ignored_in(body, given, names), harmless_fields(body))
        asked = {"model": body.model, "parameters.adapter_id": adapter_id_of(given.adapter_id or "", names)}
        adapter_id = adapter_in(asked, names)
        if adapter_id and not names_origin(given):
            await self._router.adapter_rows(adapter_id, request)
        answer = await self._ask_tokens(tokenize_request(body, adapter_id), request)
        return JSONResponse(answers.tokens_of(body.inputs, answer), headers=headers)

    async def chat_tokenize(self, body: ChatCompletionRequest, request: Request) -> Response:
        """The text that the template makes of `messages`, and its tokens."""
        job = chat_job(body, await self._router.names_for(body.model, request), request_id_of(request), 0)
        asked = job.requests[0]
        if job.adapter_id and not names_origin(body):
            await self._router.adapter_rows(job.adapter_id, request)
        message = pb.TokenizeRequest(
            chat=asked.chat, offsets=True, adapter_id=job.adapter_id, in_bucket=asked.in_bucket
        )
        if asked.HasField("hub"):
            message.hub.CopyFrom(asked.hub)
        answer = await self._ask_tokens(message, request)
        content = {
            "tokenize_response": answers.tokens_of(answer.rendered, answer),
            "templated_text": answer.rendered,
        }
        return JSONResponse(content, headers=self._router.ignored(ignored_fields(body), harmless_fields(body)))

    async def _ask_tokens(self, message: pb.TokenizeRequest, request: Request) -> pb.TokenizeResponse:
        return pb.TokenizeResponse.FromString(
            await self._router.ask(self._tokenize, message.SerializeToString(), request)
        )

    # --- the server ------------------------------------------------------------------------------------------------

    async def info(self) -> Response:
        name, *_ = self._router.base_names()  # raises before a worker has said its model
        info = self._router.replicas.model_info or pb.GetInfoResponse()
        most = self._router.calls.max_in_flight
        return JSONResponse(answers.info_of(name, info, most, MAX_COMPLETIONS, MAX_STOP_STRINGS))
