"""The source of buckets, against a server's process and against servers that misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.adapter_files import Engine, write_adapter
from support.medusa_files import vllm_config, vllm_tensors, write_shards
from support.s3_server import KEYS, S3Server, needs_s3, s3_server

from loraplex_adapters.io.source_files import read_all
from loraplex_adapters.sources.chain import ChainSource, RoutedSource
from loraplex_adapters.sources.s3 import S3Source
from loraplex_contracts.adapters import S3_SOURCE, AdapterId, AdapterOrigin, LoadOptions
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    DigestMismatch,
    InvalidArgument,
    LoraplexError,
    PermissionDenied,
    SourceUnavailable,
    Unimplemented,
    UnsafeFormat,
)

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
SQL = AdapterOrigin("s3:models/team/sql")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        for bucket in ("models", "empty"):
            server.put(bucket)
        yield server


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_s3()
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def sql(server: S3Server, tmp_path: Path) -> Path:
    folder = write_adapter(tmp_path / "sql")
    server.put_folder("models/team/sql", folder)
    return folder


def source_of(endpoint: str, temporary: Path, **options: Any) -> S3Source:
    return S3Source(dict.fromkeys(("models", "empty", "away"), endpoint), temporary=temporary, **options)


def test_the_files_of_a_prefix(server: S3Server, sql: Path, temporary: Path) -> None:
    server.put("models/team/sql/run.py", b"evil")
    server.put("models/team/sql/chat_template.jinja", b"{{ evil }}")
    with source_of(server.endpoint, temporary).open("mine", SQL) as files:
        assert files.names == {CONFIG, WEIGHTS}
        assert read_all(files.open(WEIGHTS), 1 << 20) == (sql / WEIGHTS).read_bytes()
        assert len(list(temporary.iterdir())) == 1
    assert not list(temporary.iterdir())
    with source_of(server.endpoint, temporary, with_templates=True).open("mine", SQL) as files:
        assert "chat_template.jinja" in files.names


@pytest.mark.parametrize("prefix", ["a b/c", "x=1@v+2", "(v1)!_.*'"])
def test_names_of_objects(server: S3Server, sql: Path, temporary: Path, prefix: str) -> None:
    from urllib.parse import quote

    server.put_folder(f"models/{quote(prefix)}", sql)
    source_of(server.endpoint, temporary).open("mine", AdapterOrigin(f"s3:models/{prefix}/")).close()


def test_what_there_is_not(server: S3Server, temporary: Path) -> None:
    source = source_of(server.endpoint, temporary)
    for place, said in (
        ("s3:models/nowhere", "no adapter under 's3:models/nowhere'"),
        ("s3:empty/team/sql", "no adapter under"),
        ("s3:away/team/sql", "no bucket 'away'"),
        ("s3:others/team/sql", "reads no bucket 'others'.*--s3-bucket"),
        ("hub:org/sql", "no adapter 'mine'"),
        ("", "no adapter 'mine'"),
    ):
        with pytest.raises(AdapterNotFound, match=said):
            source.open("mine", AdapterOrigin(place))
    for place in ("s3:models", "s3:models/", "s3:models/a?b", "s3:models/a%2e", "s3:models/\u0430", "s3:models//x"):
        with pytest.raises(InvalidArgument, match="s3:BUCKET/PREFIX"):
            source.open("mine", AdapterOrigin(place))
    assert source.list() == []
    assert not list(temporary.iterdir())


def test_pickles_and_parts_of_adapters(server: S3Server, temporary: Path) -> None:
    source = source_of(server.endpoint, temporary)
    server.put("models/pickled/adapter_model.bin", b"x")
    server.put(f"models/pickled/{CONFIG}", b"{}")
    with pytest.raises(UnsafeFormat, match="loraplex adapters convert"):
        source.open("mine", AdapterOrigin("s3:models/pickled"))
    server.put(f"models/part/{WEIGHTS}", b"x")
    with pytest.raises(AdapterInvalid, match=CONFIG):
        source.open("mine", AdapterOrigin("s3:models/part"))
    server.put("models/whole/config.json", json.dumps({"model_type": "llama"}).encode())
    server.put("models/whole/model.safetensors", b"x" * 1000)
    with pytest.raises(AdapterInvalid, match="whole model in the bucket"):
        source.open("mine", AdapterOrigin("s3:models/whole"))


def test_heads_in_shards(server: S3Server, temporary: Path, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    folder.mkdir()
    write_shards(folder, [vllm_tensors()], vllm_config())
    server.put_folder("models/heads", folder)
    with source_of(server.endpoint, temporary).open("mine", AdapterOrigin("s3:models/heads")) as files:
        assert files.names == {file.name for file in folder.iterdir()}
    index = folder / "model.safetensors.index.json"
    server.put(f"models/heads/{index.name}", json.dumps({"weight_map": {"a": "../sql/x"}}).encode())
    with pytest.raises(AdapterInvalid, match="not a model's weights"):
        source_of(server.endpoint, temporary).open("mine", AdapterOrigin("s3:models/heads"))


def test_sizes_are_checked_before_the_download(server: S3Server, sql: Path, temporary: Path) -> None:
    with pytest.raises(AdapterInvalid, match="in the bucket; at most 1000 are fetched"):
        source_of(server.endpoint, temporary, max_bytes=1000).open("mine", SQL)
    assert not list(temporary.iterdir())


def test_digests_in_metadata(server: S3Server, sql: Path, temporary: Path) -> None:
    source, data = source_of(server.endpoint, temporary), (sql / WEIGHTS).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    server.put(f"models/team/sql/{WEIGHTS}", data, {"x-amz-meta-sha256": digest})
    source.open("mine", SQL).close()
    server.put(f"models/team/sql/{WEIGHTS}", data, {"x-amz-meta-sha256": digest[::-1]})
    with pytest.raises(SourceUnavailable, match="does not have the digest"):
        source.open("mine", SQL)


def test_a_load_from_a_bucket(server: S3Server, sql: Path, temporary: Path) -> None:
    remote = RoutedSource({S3_SOURCE: source_of(server.endpoint, temporary)}, ChainSource([]))
    engine = Engine(ChainSource([]), remote=remote)
    try:

        def load(**options: Any) -> Any:
            chosen = LoadOptions(SQL, **options)
            return engine.until(lambda: engine.cache.load(AdapterId("mine"), False, engine.now, options=chosen))

        row = load()
        assert (row.adapter_id, row.source) == ("mine", SQL.source)
        write_adapter(sql, seed=1)
        server.put_folder("models/team/sql", sql)
        with pytest.raises(DigestMismatch):
            load(expected_digest=row.digest)
        assert engine.cache.get("mine").digest == row.digest
        assert load().digest != row.digest
        with pytest.raises(AdapterNotFound):
            engine.load("other")
    finally:
        engine.cache.close()


def test_without_the_extra(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(Unimplemented, match=r"loraplex\[s3\]"):
        source_of("http://127.0.0.1:9", temporary).open("mine", SQL)


# --- servers that misbehave -------------------------------------------------------------------------------------------

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """A server whose every answer is written by `answer`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):
                answer(self)

        def do_HEAD(self) -> None:
            self.do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in ({"content_length": str(len(body))} | headers).items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(body)


def failure(endpoint: str, temporary: Path) -> LoraplexError:
    with pytest.raises(LoraplexError) as raised:
        source_of(endpoint, temporary).open("mine", SQL)
    assert not list(temporary.iterdir())
    return raised.value


def test_redirects_are_not_followed(temporary: Path) -> None:
    asked: list[str] = []
    with (
        answering(lambda handler: (asked.append(handler.path), send(handler, 200, b"{}"))[1]) as elsewhere,
        answering(lambda handler: send(handler, 307, location=elsewhere.replace("127.0.0.1", "localhost"))) as server,
    ):
        error = failure(server, temporary)
    assert isinstance(error, SourceUnavailable)
    assert "redirected to 'localhost'" in error.message
    assert not asked


def test_refusals(temporary: Path) -> None:
    body = b"<Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>AKIATEST</AWSAccessKeyId></Error>"
    for status, kind in ((403, PermissionDenied), (401, PermissionDenied), (500, SourceUnavailable)):
        with answering(lambda handler, status=status: send(handler, status, body)) as server:
            assert type(failure(server, temporary)) is kind
    with answering(lambda handler: send(handler, 400, body, x_amz_bucket_region="eu-west-1")) as server:
        assert "in region eu-west-1" in failure(server, temporary).message
    with answering(lambda handler: send(handler, 404, body.replace(b"InvalidAccessKeyId", b"NoSuchBucket"))) as server:
        assert "no bucket 'models'" in failure(server, temporary).message


def test_a_server_that_dies(server: S3Server, sql: Path, temporary: Path) -> None:
    data = (sql / WEIGHTS).read_bytes()
    asked: list[str] = []

    def half(handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.partition("?")[0].rpartition("/")[2]
        if name not in (CONFIG, WEIGHTS):
            send(handler, 404)
        elif handler.command == "HEAD" or name == CONFIG or len(asked) == num_cut:
            send(handler, 200, (sql / name).read_bytes(), etag='"1"')
        else:
            asked.append(name)
            handler.send_response(200)
            handler.send_header("content-length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True

    with answering(half) as endpoint:
        num_cut = 1
        with source_of(endpoint, temporary).open("mine", SQL) as files:
            assert read_all(files.open(WEIGHTS), 1 << 20) == data
        num_cut = 3
        error = failure(endpoint, temporary)
    assert isinstance(error, SourceUnavailable)
    assert f"{WEIGHTS} of 's3:models/team/sql' in the bucket was cut off" in error.message
    assert len(asked) == 3
    assert isinstance(failure(endpoint, temporary), SourceUnavailable)  # nothing listens there any more
    with s3_server() as mortal:
        mortal.put("models")
        mortal.put_folder("models/team/sql", sql)
        source_of(mortal.endpoint, temporary).open("mine", SQL).close()
        mortal.process.kill()
        mortal.process.wait()
        assert isinstance(failure(mortal.endpoint, temporary), SourceUnavailable)


@pytest.mark.parametrize("extra", [-10, 10])
def test_lies_about_sizes(sql: Path, temporary: Path, extra: int) -> None:
    def lying(handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.partition("?")[0].rpartition("/")[2]
        data = (sql / name).read_bytes() if name in (CONFIG, WEIGHTS) else b""
        size = str(len(data) + (extra if data and handler.command == "HEAD" else 0))
        send(handler, 200 if data else 404, data, content_length=size, etag='"1"')

    with answering(lying) as server:
        error = failure(server, temporary)
    assert isinstance(error, SourceUnavailable)
    assert "bytes" in error.message


def test_objects_that_change_meanwhile(sql: Path, temporary: Path) -> None:
    versions = iter(range(1000))

    def changing(handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.partition("?")[0].rpartition("/")[2]
        data = (sql / name).read_bytes() if name in (CONFIG, WEIGHTS) else b""
        send(handler, 200 if data else 404, data, etag=f'"{next(versions)}"')

    with answering(changing) as server:
        assert "was changed while it was fetched" in failure(server, temporary).message


def test_an_endless_refusal_and_a_server_that_hangs(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(403)
        handler.send_header("content-length", str(1 << 40))
        handler.end_headers()
        while handler.command == "GET":
            handler.wfile.write(b"<Code>" * 1000)

    with answering(endless) as server:
        assert isinstance(failure(server, temporary), PermissionDenied)
    monkeypatch.setattr("loraplex_adapters.sources.remote.TIMEOUT_S", 0.1)
    done = threading.Event()
    with answering(lambda handler: (done.wait(10), None)[1]) as server:
        assert isinstance(failure(server, temporary), SourceUnavailable)
        done.set()


def test_drips(sql: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def dripping(handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.partition("?")[0].rpartition("/")[2]
        if handler.command == "HEAD" or (status == 200 and name != WEIGHTS):
            data = (sql / name).read_bytes() if name in (CONFIG, WEIGHTS) else b""
            send(handler, 200 if data else 404, data, etag='"1"')
            return
        handler.send_response(status)
        handler.send_header("content-length", "1000000")
        handler.end_headers()
        while not over.wait(0.02):
            handler.wfile.write(b"x")

    monkeypatch.setattr("loraplex_adapters.sources.remote.START_S", 0.3)
    monkeypatch.setattr("loraplex_adapters.sources.s3.REFUSAL_S", 0.1)
    with answering(dripping) as server:
        status = 200
        assert "'s3:models/team/sql' came too slowly from the bucket" in failure(server, temporary).message
        status = 403
        assert isinstance(failure(server, temporary), PermissionDenied)
        over.set()


def test_credentials_are_in_no_log_and_no_error(
    server: S3Server, sql: Path, temporary: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    source_of(server.endpoint, temporary).open("mine", SQL).close()
    said = [failure("http://127.0.0.1:9", temporary).message]
    with answering(lambda handler: send(handler, 307, location=f"http://localhost{handler.path}")) as redirecting:
        said.append(failure(redirecting, temporary).message)
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    error = failure(server.endpoint, temporary)
    assert "no credentials for bucket 'models'" in error.message
    said += [error.message, caplog.text]
    for secret in ("AKIATEST", "secretsecret", "tokentoken", "X-Amz-"):
        assert all(secret not in text for text in said), secret


def test_public_buckets(server: S3Server, sql: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    asked: list[str] = []

    def open_unsigned(endpoint: str) -> None:
        source_of(endpoint, temporary, unsigned=True).open("mine", SQL).close()

    with pytest.raises(PermissionDenied):
        open_unsigned(server.endpoint)
    for bucket in ("models", "models/team/sql/medusa_lm_head.safetensors", "models/team/sql/config.json"):
        server.put(bucket, headers={"x-amz-acl": "public-read"})
    server.put_folder("models/team/sql", sql, {"x-amz-acl": "public-read"})
    open_unsigned(server.endpoint)
    with (
        answering(lambda handler: (asked.append(handler.path), send(handler, 404))[1]) as empty,
        pytest.raises(AdapterNotFound),
    ):
        open_unsigned(empty)
    assert asked
    assert not [path for path in asked if "?" in path]
