"""Routes of the server itself: health, version, load, status, metrics."""

from __future__ import annotations

from fastapi import FastAPI, Request
from google.protobuf import json_format
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from loraplex_proto import __version__, validate
from loraplex_proto.v1 import status_pb2
from loraplex_router.http.fields import unicode_text
from loraplex_router.http.metrics import EngineMetrics
from loraplex_router.http.router_calls import RouterCalls
from loraplex_runtime.auth import current_identity
from loraplex_runtime.metrics import encoded


class OperationRoutes:
    """The handlers, over one router."""

    def __init__(self, router: RouterCalls) -> None:
        self._router = router
        with_vllm = router.options.metrics_names == "vllm"
        # The page asks for no credential.
        hides_tenants = router.credentials is not None
        self._metrics = EngineMetrics(
            router.registry, router.replicas, with_vllm=with_vllm, hides_tenants=hides_tenants
        )

    def add_to(self, app: FastAPI) -> None:
        for path in ("/health", "/ping", "/health_generate"):
            app.get(path, response_class=Response)(self.health)
        app.get("/version")(self.version)
        app.get("/load")(self.load)
        app.get("/v1/status", response_class=Response)(self.status)
        app.get("/metrics", response_class=Response)(self.metrics)

    async def health(self) -> Response:
        return Response(status_code=200 if self._router.is_ready() else 503)

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def load(self) -> Response:
        """Number of requests that this server has under way, in vLLM's form."""
        return JSONResponse({"server_load": len(self._router.calls)})

    async def status(self, adapters: int = 0, prefix: str = "") -> Response:
        """GetStatusResponse in protobuf's JSON: 64-bit integers are strings. For the page at /status."""
        question = status_pb2.GetStatusRequest(
            max_adapters=min(max(adapters, 0), validate.MAX_STATUS_ADAPTERS),
            adapter_prefix=unicode_text(prefix, "prefix"),
        )
        found = self._router.status.status(question, current_identity())
        content = json_format.MessageToJson(
            found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
        )
        return Response(content, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        if not self._router.options.shows_metrics:
            raise HTTPException(404)
        page, content_type = encoded(self._metrics, request.url.query)
        return Response(page, headers={"content-type": content_type})
