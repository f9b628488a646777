"""ASGI application of the HTTP port, from its routes and middleware."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from loraplex_contracts.errors import Cancelled, InvalidArgument, LoraplexError, Unimplemented, unexpected
from loraplex_proto import __version__
from loraplex_router.http import page
from loraplex_router.http.admin import AdminRoutes
from loraplex_router.http.errors import body_dialect, dialect_of, fields_in, note_refusal
from loraplex_router.http.faults import fault_of
from loraplex_router.http.middleware import HostNames, Middleware, error_response
from loraplex_router.http.openai.routes import OpenAIRoutes
from loraplex_router.http.operations import OperationRoutes
from loraplex_router.http.pooling.routes import PoolingRoutes
from loraplex_router.http.router_calls import RouterCalls
from loraplex_router.http.sglang.routes import SglangRoutes
from loraplex_router.http.shared_routes import SharedRoutes
from loraplex_router.http.tgi.routes import TgiRoutes

# Depth of lists and objects in each other: what has been read can be written again, whatever calls it.
MAX_JSON_DEPTH: Final = 500
# Of answers, for pages of other origins.
_EXPOSED_HEADERS: Final = ("x-request-id", "x-loraplex-ignored", "retry-after", "retry-after-ms", "x-should-retry")


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body as JSON. Raises ValueError for what is not JSON, and InvalidArgument for NaN, for what is nested too
        deep or has an object with one key twice: what stands in front of this server may have read the other one."""
        if not hasattr(self, "_json"):
            body = await self.body()
            found = _parsed(body)
            if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH and _is_deep(found):
                raise InvalidArgument("the body is nested too deep", field="body")
            self.state.dialect = body_dialect(self.url.path, found)
            self.state.fields = fields_in(found)
            self._json = found
        return self._json


class StrictRoute(APIRoute):
    """A route whose JSON bodies have each key once. What its handler raises is typed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            try:
                return await handle(_StrictRequest(request.scope, request.receive))
            except (LoraplexError, RequestValidationError, HTTPException):
                raise
            except Exception as error:  # Starlette would answer by itself, with a plain text
                raise unexpected(error, "answering an HTTP request") from error

        return strict


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in inner if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise InvalidArgument("the body is not valid JSON: it is not UTF-8", field="body") from error
    except ValueError as error:  # of Python's integers
        raise InvalidArgument("the body has a number of more digits than can be read", field="body") from error


def _refuse(constant: str) -> None:
    raise InvalidArgument(f"the body is not valid JSON: it has {constant}", field="body")


def _finite(number: str) -> float:
    found = float(number)
    if math.isinf(found):  # JSON has no word for it, and workers get parts of a body as JSON
        raise InvalidArgument(f"the body has a number that is too large: {number[:20]}", field="body")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidArgument("the body has an object with the same key twice", field="body")
    return found


def make_app(router: RouterCalls, allowed_hosts: HostNames) -> ASGIApp:
    """The ASGI application of the port."""
    # Documents that load scripts from elsewhere stay off.
    errors: dict[int | str, dict[str, Any]] = {"default": {"description": "An error, in the form of the dialect"}}
    # A redirect would have a client send its prompt again, behind a proxy with TLS in clear text.
    app = FastAPI(
        title="Loraplex",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=errors,
    )
    app.router.route_class = StrictRoute
    dialects = OpenAIRoutes(router), TgiRoutes(router), SglangRoutes(router)
    others = OperationRoutes(router), PoolingRoutes(router), AdminRoutes(router), SharedRoutes(*dialects)
    for routes in (*dialects, *others):
        routes.add_to(app)

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_invalid(error), request.scope)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, LoraplexError):  # of `receive`, while FastAPI read the body
            return error_response(error.__cause__, request.scope)
        if isinstance(error.__cause__, ClientDisconnect):
            return error_response(Cancelled("the client has left before its body was here"), request.scope)
        if isinstance(error.__cause__, RecursionError):
            return error_response(InvalidArgument("the body is nested too deeply", field="body"), request.scope)
        status, headers = error.status_code, dict(error.headers or {})
        kinds = {404: "there is no such route", 405: "this route takes another method"}
        if status == 405 or (status == 404 and request.scope["path"] in page.PATHS):
            status, headers["Allow"] = 405, ", ".join(_methods_of(app, request.scope))
        message = kinds.get(status, "the body must be JSON")
        if status == 404 and (path := _without_slash(app, request.scope)):
            message += f"; there is {path}, without the slash at the end"
        note_refusal((Unimplemented if status in kinds else InvalidArgument)(message), request.scope)
        if dialect_of(request.scope) == "tgi":
            content: Any = {"error": message, "error_type": "validation"}
        else:
            content = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return JSONResponse(content, status, headers=headers)

    app.add_exception_handler(LoraplexError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    whole = Middleware(app, router.credentials, allowed_hosts, router.refusals)
    return _for_origins(whole, router.options.cors_origins) if router.options.cors_origins else whole


def _for_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application for pages of these origins, too. It answers preflights by itself, which have no credential, and
    pages can read its errors."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        expose_headers=_EXPOSED_HEADERS,
    )


def _methods_of(app: FastAPI, scope: Scope) -> list[str]:
    """The methods that the path takes, of all its routes and pages."""
    methods = set(page.METHODS) if scope["path"] in page.PATHS else set[str]()
    for route in app.routes:
        if route.matches(scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)  # the middleware makes one the other


def _without_slash(app: FastAPI, scope: Scope) -> str:
    """The path without slashes at its end, where it has any and that is a route's; else empty."""
    path = scope["path"].rstrip("/")
    is_route = any(route.matches({**scope, "path": path})[0] is not Match.NONE for route in app.routes)
    return path if path != scope["path"] and is_route else ""


def _invalid(error: RequestValidationError) -> InvalidArgument:
    """The error for the first fault of a body or a query."""
    errors: list[dict[str, Any]] = list(error.errors())
    if errors[0]["type"] == "json_invalid":
        return InvalidArgument("the body is not valid JSON", field="body")
    place, *names = errors[0]["loc"]
    given = error.body if place == "body" else dict.fromkeys(names)
    return fault_of([{**one, "loc": one["loc"][1:]} for one in errors], given)
