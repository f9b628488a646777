"""Moto's S3 server on 127.0.0.1, a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "secretsecret", "AWS_SESSION_TOKEN": "tokentoken"}
_AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=AKIATEST/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
START_S = 60.0
_PACKAGES = ("obstore", "moto", "flask", "flask_cors")


class S3Server:
    """An S3 server that shows only public objects to requests without a signature; it does not check signatures."""

    def __init__(self, process: subprocess.Popen[bytes], endpoint: str) -> None:
        self.process = process
        self.endpoint = endpoint

    def put(self, path: str, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        sent = {"content-type": "application/octet-stream", "authorization": _AUTHORIZATION, **(headers or {})}
        request = urllib.request.Request(f"{self.endpoint}/{path}", data, sent, method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            pass

    def put_folder(self, prefix: str, folder: Path, headers: Mapping[str, str] | None = None) -> None:
        for file in folder.iterdir():
            self.put(f"{prefix}/{file.name}", file.read_bytes(), headers)


def needs_s3() -> None:
    """Skips the test where packages of the development extra are missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot be imported; they come with the extra `dev`")


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    needs_s3()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with tempfile.NamedTemporaryFile() as log:  # it says a line for each request
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until_s = time.monotonic() + START_S
            while not (found := re.search(r"http://127\.0\.0\.1:\d+", Path(log.name).read_text())):
                assert process.poll() is None, Path(log.name).read_text()
                assert time.monotonic() < until_s, "moto did not start"
                time.sleep(0.05)
            yield S3Server(process, found[0])
        finally:
            process.kill()
            process.wait()
