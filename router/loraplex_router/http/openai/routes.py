"""OpenAI's routes: texts, tokens and models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_proto.v1 import adapter_pb2, inference_pb2
from loraplex_router.http.dialects import respond
from loraplex_router.http.errors import model_not_found, with_names_of
from loraplex_router.http.fields import Fields, adapter_in, adapter_of, harmless_fields, header_names
from loraplex_router.http.openai import answers, requests, responses
from loraplex_router.http.openai.fields import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    ignored_fields,
)
from loraplex_router.http.openai.requests import Job
from loraplex_router.http.openai.responses import ResponsesRequest
from loraplex_router.http.origins import names_origin
from loraplex_router.http.router_calls import RouterCalls, request_id_of
from loraplex_router.http.streaming import json_bytes, json_in_parts


class OpenAIRoutes:
    """The handlers, over one router."""

    def __init__(self, router: RouterCalls) -> None:
        self._router = router
        self._tokenize = router.handler("Tokenize", router.relay.tokenize)
        self._detokenize = router.handler("Detokenize", router.relay.detokenize)
        self._tokenizer_info = router.handler("GetTokenizerInfo", router.relay.get_tokenizer_info)
        self._started = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{model_id:path}")(self.model)
        app.post("/v1/completions", response_class=Response)(self.completions)
        app.post("/v1/chat/completions", response_class=Response)(self.chat_completions)
        app.post("/v1/responses", response_class=Response)(self.responses)
        app.post("/v1/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        app.post("/v1/detokenize")(self.detokenize)
        app.get("/tokenizer_info")(self.tokenizer_info)

    # --- generation ------------------------------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        names, defaults = await self._router.names_for(body.model, request), self._router.sampling_defaults()
        try:
            job = requests.completion_job(body, names, request_id_of(request), int(time.time()), defaults)
        except InvalidArgument as error:  # some are the wire's
            raise with_names_of(error, request.scope) from None
        return await self._answer(job, body, names, request)

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        names, defaults = await self._router.names_for(body.model, request), self._router.sampling_defaults()
        job = requests.chat_job(
            body,
            names,
            request_id_of(request),
            int(time.time()),
            defaults,
            old_names=self._router.options.reasoning_content,
        )
        return await self._answer(job, body, names, request)

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        chat = responses.chat_request(body)
        names, defaults = await self._router.names_for(body.model, request), self._router.sampling_defaults()
        try:
            job = requests.chat_job(chat, names, request_id_of(request), int(time.time()), defaults)
        except LoraplexError as error:
            raise responses.named(error, body) from None
        ignored = header_names([*job.ignored, *responses.ignored_parts(body)])
        job = replace(job, model=job.model or names[0], wants_usage=True, ignored=ignored)
        headers = {"x-request-id": job.request_id, **self._router.ignored(job.ignored, harmless_fields(chat))}
        return await respond(self._router, responses.Answer(job, body), request, headers)

    async def _answer(self, job: Job, body: Fields, base_names: Sequence[str], request: Request) -> Response:
        """Runs the job's calls."""
        headers = {"x-request-id": job.request_id, **self._router.ignored(job.ignored, harmless_fields(body))}
        if not job.model:
            job = replace(job, model=base_names[0])
        return await respond(self._router, answers.Answer(job), request, headers)

    # --- the tokenizer ---------------------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        headers, adapter_id = await self._check_model(body, request)
        message = requests.tokenize_request(body, adapter_id)
        raw = await self._router.ask(self._tokenize, message.SerializeToString(), request)
        answer = inference_pb2.TokenizeResponse.FromString(raw)
        content: dict[str, Any] = {
            "count": len(answer.token_ids),
            "max_model_len": self._router.replicas.max_context_tokens,
            "tokens": list(answer.token_ids),
            "token_strs": list(answer.tokens) if body.return_token_strs else None,
        }
        if body.return_offsets:
            content["offsets"] = list(zip(answer.starts, answer.ends, strict=True))
            content["rendered"] = body.prompt if body.messages is None else answer.rendered
        return JSONResponse(content, headers=headers)

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """vLLM keeps special tokens unless told otherwise; SGLang, whose path begins with /v1, does not."""
        headers, _ = await self._check_model(body, request)
        message = requests.detokenize_request(body, omits_special=request.url.path.startswith("/v1/"))
        raw = await self._router.ask(self._detokenize, message.SerializeToString(), request)
        text = inference_pb2.DetokenizeResponse.FromString(raw).text
        return JSONResponse({"prompt": text, "text": text}, headers=headers)

    async def tokenizer_info(self, request: Request) -> Response:
        info = inference_pb2.GetTokenizerInfoResponse.FromString(
            await self._router.ask(self._tokenizer_info, b"", request)
        )
        named = ("bos", "eos", "pad", "unk")
        content: dict[str, Any] = {
            f"{name}_token": getattr(info, name).text if info.HasField(name) else None for name in named
        }
        content["additional_special_tokens"] = [one.text for one in info.special_tokens]
        content["chat_template"] = info.chat_template or None
        content["model_max_length"] = self._router.replicas.max_context_tokens
        return JSONResponse(content)

    async def _check_model(
        self, body: TokenizeRequest | DetokenizeRequest, request: Request
    ) -> tuple[dict[str, str], str]:
        """Headers of the answer, and the adapter. All have the base model's tokenizer, but an unknown one is an
        error."""
        headers = self._router.ignored(ignored_fields(body), harmless_fields(body))
        adapter_id = adapter_in(body.adapter_names(), await self._router.names_for(body.model, request))
        if adapter_id and not (isinstance(body, TokenizeRequest) and names_origin(body)):
            await self._router.adapter_rows(adapter_id, request)
        return headers, adapter_id

    # --- models ----------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        base, *_ = self._router.base_names()
        parts = [b'{"object":"list","data":[' + json_bytes(self._card(base, parent=None))]
        async for rows in self._router.adapter_pages(request, include_unloaded=True):
            parts.append(b"".join(b"," + json_bytes(self._adapter_card(row, base)) for row in _one_for_each(rows)))
        parts.append(b"]}")
        return json_in_parts(parts)

    async def model(self, model_id: str, request: Request) -> Response:
        if not model_id:
            raise model_not_found(model_id)
        names = await self._router.names_for(model_id, request)
        adapter_id = adapter_of(model_id, names)
        if not adapter_id:
            return JSONResponse(self._card(model_id, parent=None))
        rows = await self._router.adapter_rows(adapter_id, request)
        return JSONResponse(self._adapter_card(_one_for_each(rows)[0], names[0]))

    def _card(self, name: str, parent: str | None, root: str | None = None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "loraplex",
            "root": root or name,
            "parent": parent,
            "max_model_len": self._router.replicas.max_context_tokens,
            "permission": [],
        }

    def _adapter_card(self, row: adapter_pb2.Adapter, base: str) -> dict[str, Any]:
        own: dict[str, Any] = {"digest": row.digest or None, "kind": row.kind or None, "rank": row.rank or None}
        if row.labels:
            own["labels"] = list(row.labels)
        return {**self._card(row.adapter_id, parent=base, root=row.digest or None), "loraplex": own}


def _one_for_each(rows: Sequence[adapter_pb2.Adapter]) -> list[adapter_pb2.Adapter]:
    """A row for each adapter, in their order: of workers that have loaded it, if any."""
    found: dict[str, adapter_pb2.Adapter] = {}
    for row in rows:
        known = found.get(row.adapter_id)
        if known is None or (row.digest and not known.digest):
            found[row.adapter_id] = row
    return list(found.values())
