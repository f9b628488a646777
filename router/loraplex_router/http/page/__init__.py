"""Pages for the browser: plain files with a strict content security policy."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

_FILES: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status": ("status.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/status.css": ("status.css", "text/css; charset=utf-8"),
    "/page/common.js": ("common.js", "text/javascript; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/status.js": ("status.js", "text/javascript; charset=utf-8"),
}
PATHS: Final = frozenset(_FILES)
METHODS: Final = ("GET", "HEAD")
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept",
}


def is_page(scope: Scope) -> bool:
    """True for a request that gets a file of a page. The files say nothing about the server, so that they need no
    credentials; the pages ask for them. `/` is for programs, too: only a client that asks for HTML is a browser."""
    if scope["method"] not in METHODS or scope["path"] not in PATHS:
        return False
    return scope["path"] != "/" or "text/html" in Headers(scope=scope).get("accept", "")


def page_response(path: str) -> Response:
    """A file of a page, by its path on the port."""
    name, media_type = _FILES[path]
    content = resources.files(__name__).joinpath(name).read_bytes()
    return Response(content, media_type=media_type, headers=dict(_HEADERS))
