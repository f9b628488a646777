"""A Hub on 127.0.0.1: repositories out of folders, spoken as huggingface_hub expects it.

The API's description with commit, sizes and digests; `resolve`, with a redirect for large files; tokens, private and
gated repositories. What a test sets wrong is served wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    folder: Path
    tokens: frozenset[str] | None = None  # None: public
    is_gated: bool = False
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    # Lies, by file name.
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    digests: dict[str, str] = field(default_factory=dict[str, str])
    bodies: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])  # in the place of the file, in turn
    redirects: dict[str, str] = field(default_factory=dict[str, str])


class HubServer:
    """`asked` has (path, token, number of the connection) of every request. `status` answers all of them with it.
    Answers to paths with `drips` in them have a byte every 20 ms."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.status: int | None = None
        self.info: bytes | None = None
        self.drips = ""
        self.hold = threading.Event()  # answers wait while it is cleared
        self.hold.set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                try:
                    hub.answer(self)
                except ConnectionError:
                    self.close_connection = True

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloads(self) -> list[str]:
        """The files that were asked for, in order."""
        return [path.rsplit("/", 1)[1] for path, _ in self.asked if "/resolve/" in path]

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: Any) -> None:
        authorization = request.headers.get("authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        self.asked.append((request.path, token))
        self.hold.wait()
        path = urlsplit(request.path).path
        if self.status is not None:
            return self._send(request, self.status, b"hub.invalid/secret")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[0] == "cdn":
            return self._file(request, self.repositories["/".join(parts[1:3])], parts[-1])
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        repository = self.repositories.get(name)
        if repository is None or (repository.tokens is not None and token not in repository.tokens):
            return self._send(request, 401 if token is None else 404, b"", {"X-Error-Code": "RepoNotFound"})
        if parts[0] == "api":
            return self._describe(request, repository, parts[5] if len(parts) > 5 else "main")
        if repository.is_gated and token is None:
            return self._send(request, 403, b"", {"X-Error-Code": "GatedRepo"})
        if parts[2] != "resolve" or parts[3] not in repository.revisions.values():
            return self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        file = "/".join(parts[4:])
        if not (repository.folder / file).is_file():
            return self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        if file.endswith(".safetensors"):
            target = repository.redirects.get(file, f"/cdn/{name}/{file}")
            return self._send(request, 302, b"", {"Location": target})
        return self._file(request, repository, file)

    def _describe(self, request: Any, repository: Repository, revision: str) -> None:
        if revision not in repository.revisions:
            self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings: list[dict[str, Any]] = []
        for path in sorted(repository.folder.rglob("*")):
            if path.is_dir():
                continue
            data = path.read_bytes()
            size = repository.sizes.get(path.name, len(data))
            sha1 = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            one: dict[str, Any] = {
                "rfilename": path.relative_to(repository.folder).as_posix(),
                "size": size,
                "blobId": repository.digests.get(path.name, sha1),
            }
            if path.suffix == ".safetensors":
                sha256 = repository.digests.get(path.name, hashlib.sha256(data).hexdigest())
                one["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 133}
            siblings.append(one)
        body = {"id": "x", "sha": repository.revisions[revision], "siblings": siblings, "private": False}
        self._send(request, 200, self.info if self.info is not None else json.dumps(body).encode())

    def _file(self, request: Any, repository: Repository, name: str) -> None:
        bodies = repository.bodies.get(name)
        data = (repository.folder / name).read_bytes() if not bodies else bodies.pop(0)
        self._send(request, 200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _send(self, request: Any, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        request.send_response(status)
        for name, value in {"Set-Cookie": "session=1", **(headers or {}), "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if not self.drips or self.drips not in request.path:
            request.wfile.write(body)
            return
        for byte in body:
            request.wfile.write(bytes([byte]))
            time.sleep(0.02)


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()
