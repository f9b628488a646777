"""SGLang's routes."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.dialects import respond
from loraplex_router.http.router_calls import RouterCalls, request_id_of
from loraplex_router.http.sglang import answers
from loraplex_router.http.sglang.fields import GenerateRequest
from loraplex_router.http.sglang.requests import generate_job


class SglangRoutes:
    """The handlers, over one router."""

    def __init__(self, router: RouterCalls) -> None:
        self._router = router

    def add_to(self, app: FastAPI) -> None:
        for path in ("/model_info", "/get_model_info"):
            app.get(path)(self.model_info)
        for path in ("/server_info", "/get_server_info"):
            app.get(path)(self.server_info)

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        started_s = time.monotonic()
        job = generate_job(body, await self._router.names_for(body.model, request), request_id_of(request))
        return await respond(self._router, answers.Answer(job, started_s), request, self._router.ignored(job.ignored))

    async def model_info(self) -> Response:
        return JSONResponse(answers.model_info_of(self._model_info()))

    async def server_info(self) -> Response:
        info = self._model_info()
        return JSONResponse(answers.server_info_of(self._router.base_names()[0], info))

    def _model_info(self) -> pb.GetInfoResponse:
        """The model's facts, as workers tell them. Raises NoWorker before any has."""
        if (info := self._router.replicas.model_info) is None:
            raise self._router.replicas.no_worker()
        return info
