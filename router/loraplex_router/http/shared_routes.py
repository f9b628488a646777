"""Routes that two dialects have, of which the body tells the one."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Discriminator, Tag
from starlette.responses import Response

from loraplex_router.http.errors import body_dialect
from loraplex_router.http.openai import fields as openai
from loraplex_router.http.openai.routes import OpenAIRoutes
from loraplex_router.http.sglang import fields as sglang
from loraplex_router.http.sglang.routes import SglangRoutes
from loraplex_router.http.tgi import fields as tgi
from loraplex_router.http.tgi.routes import TgiRoutes


def _generate_dialect(body: Any) -> str:
    return body_dialect("/generate", body)


def _tokenize_dialect(body: Any) -> str:
    return body_dialect("/tokenize", body)


GenerateBody = Annotated[
    Annotated[tgi.GenerateRequest, Tag("tgi")] | Annotated[sglang.GenerateRequest, Tag("openai")],
    Discriminator(_generate_dialect),
]
TokenizeBody = Annotated[
    Annotated[tgi.TokenizeRequest, Tag("tgi")] | Annotated[openai.TokenizeRequest, Tag("openai")],
    Discriminator(_tokenize_dialect),
]


class SharedRoutes:
    """The handlers, over those of the dialects."""

    def __init__(self, of_openai: OpenAIRoutes, of_tgi: TgiRoutes, of_sglang: SglangRoutes) -> None:
        self._openai = of_openai
        self._tgi = of_tgi
        self._sglang = of_sglang

    def add_to(self, app: FastAPI) -> None:
        app.post("/generate", response_class=Response)(self.generate)
        app.post("/tokenize")(self.tokenize)

    async def generate(self, body: GenerateBody, request: Request) -> Response:
        if isinstance(body, sglang.GenerateRequest):
            return await self._sglang.generate(body, request)
        return await self._tgi.generate(body, request)

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        if isinstance(body, openai.TokenizeRequest):
            return await self._openai.tokenize(body, request)
        return await self._tgi.tokenize(body, request)
