"""SGLang's routes."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from loraplex_contracts.errors import LoraplexError
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.errors import error_object, naming_missing
from loraplex_router.http.router_calls import RouterCalls, request_id_of
from loraplex_router.http.sglang import answers
from loraplex_router.http.sglang.fields import GenerateRequest
from loraplex_router.http.sglang.requests import Job, generate_job
from loraplex_router.http.streaming import EventStream, data_event, events_of


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
        headers = self._router.ignored(job.ignored)
        try:
            if not job.is_streamed:
                found = await self._router.generate(job.requests, request)
                content = answers.response_of(job, found, time.monotonic() - started_s)
                return JSONResponse(content, headers=headers)
            calls, first = await self._router.generate_stream(job.requests, request)
        except LoraplexError as error:
            raise _named(error, job) from error
        events = answers.Events(job)

        def of_error(error: LoraplexError) -> bytes:
            return data_event(error_object(_named(error, job)))

        return EventStream(calls, events_of(calls, first, events.events, lambda: (), of_error), headers)

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


def _named(error: LoraplexError, job: Job) -> LoraplexError:
    names = [name for name in job.adapter_names if name]
    shown = error.resource if error.resource in names else ", ".join(dict.fromkeys(names))
    return naming_missing(error, shown or "", job.requests[0])
