"""Errors over the wire: a real server aborts, a real client rebuilds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from loraplex_contracts import errors
from loraplex_contracts.errors import Code, LoraplexError, by_reason
from loraplex_proto.status import (
    DETAILS_KEY,
    abort,
    from_rpc_error,
    from_status,
    from_transport,
    to_status,
)

Call = Callable[[BaseException], Awaitable[grpc.aio.AioRpcError]]


@asynccontextmanager
async def serving(handler: Callable[..., Awaitable[bytes]]) -> AsyncIterator[Any]:
    """The client's side of the only method of a server, which has this handler."""
    server = grpc.aio.server()
    methods = {"Only": grpc.unary_unary_rpc_method_handler(handler)}  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_unary("/t.T/Only")
    await server.stop(None)


@pytest.fixture
async def call() -> AsyncIterator[Call]:
    """A server whose only method aborts with the error that the test hands over."""
    wanted: list[BaseException] = []

    async def fail(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await abort(context, wanted.pop())

    async with serving(fail) as method:

        async def one(error: BaseException) -> grpc.aio.AioRpcError:
            wanted.append(error)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(b"")
            return caught.value

        yield one


@pytest.mark.parametrize("cls", by_reason().values(), ids=lambda cls: cls.__name__)
async def test_every_class_comes_back_whole(call: Call, cls: type[LoraplexError]) -> None:
    sent = cls("do this", field="a.b", resource="thing", retry_after_s=1.25, metadata={"request_id": "q-1", "k": "v"})
    caught = await call(sent)
    assert caught.code().value[0] == int(cls.code)
    got = from_rpc_error(caught)
    assert type(got) is cls
    assert (got.message, got.field, got.resource, got.retry_after_s) == ("do this", "a.b", "thing", 1.25)
    assert got.metadata == {"request_id": "q-1", "k": "v"}
    assert got.request_id == "q-1"


async def test_a_bare_error_comes_back_bare(call: Call) -> None:
    got = from_rpc_error(await call(errors.NoWorker("no worker is healthy")))
    assert type(got) is errors.NoWorker
    assert (got.field, got.resource, got.retry_after_s, got.metadata) == (None, None, None, {})


async def test_long_and_odd_messages_arrive(call: Call) -> None:
    """Trailers beyond 8 KiB would be replaced by an error of the transport."""
    odd = "\N{SNOWMAN}\ud800\n\x00" * 5000
    sent = errors.AdapterInvalid(odd, field=odd, resource=odd, metadata={str(i) + odd: odd for i in range(100)})
    got = from_rpc_error(await call(sent))
    assert type(got) is errors.AdapterInvalid
    assert got.message.startswith("\N{SNOWMAN}?\n\x00")
    assert len(got.message.encode()) <= 1024


async def test_a_bug_shows_an_id_and_nothing_else(call: Call, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="loraplex_contracts.errors"):
        got = from_rpc_error(await call(KeyError("/secret/path")))
    assert type(got) is errors.Internal
    error_id = got.metadata["error_id"]
    assert error_id in got.message
    assert "secret" not in got.message
    assert "KeyError" not in got.message
    (record,) = caplog.records
    assert error_id in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


async def test_cancellation_is_not_an_error_of_ours() -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort(None, asyncio.CancelledError())  # type: ignore[arg-type]


async def test_an_aborted_call_is_not_aborted_twice(call: Call) -> None:
    """A handler that catches everything and aborts must not turn its own abort into INTERNAL."""
    server = grpc.aio.server()

    async def fail(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            await abort(context, errors.QueueFull("wait", retry_after_s=2))
        except BaseException as error:
            await abort(context, error)

    handler = grpc.unary_unary_rpc_method_handler(fail)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Fail": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Fail")(b"")
    await server.stop(None)
    assert type(from_rpc_error(caught.value)) is errors.QueueFull


async def test_a_status_that_comes_too_late_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC's own failure to send it would be logged as one of the handler."""
    raised: list[BaseException] = []

    class Ended:
        """A call whose deadline passes just before the status is sent."""

        async def abort(self, *status: object) -> None:
            raise grpc.aio.InternalError('Failed "execute_batch"')

    async def fail(_request: bytes, context: object) -> bytes:
        try:
            await abort(Ended(), errors.QueueFull("wait"))  # type: ignore[arg-type]
        except BaseException as error:
            raised.append(error)
            raise

    async with serving(fail) as method:
        with pytest.raises(grpc.aio.AioRpcError):
            await method(b"", timeout=1.0)
    assert [type(error) for error in raised] == [asyncio.CancelledError]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_call_that_ended_before_its_status_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    raised: asyncio.Queue[BaseException] = asyncio.Queue()

    async def late(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            try:
                await abort(context, errors.QueueFull("wait"))
            except BaseException as error:
                raised.put_nowait(error)
                raise
        return b""

    async with serving(late) as method:
        with pytest.raises(grpc.aio.AioRpcError):
            await method(b"", timeout=0.1)
        assert type(await asyncio.wait_for(raised.get(), 5)) is asyncio.CancelledError
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --- which details --------------------------------------------------------------------------------------------------


def detail_names(error: LoraplexError) -> set[str]:
    return {packed.TypeName().removeprefix("google.rpc.") for packed in to_status(error).details}


def test_the_standard_details_are_used() -> None:
    assert detail_names(errors.InvalidArgument("x", field="n")) == {"ErrorInfo", "BadRequest"}
    assert detail_names(errors.QueueFull("x", resource="queue", retry_after_s=1)) == {
        "ErrorInfo",
        "QuotaFailure",
        "RetryInfo",
    }
    assert detail_names(errors.AdapterNotFound("x", resource="sql")) == {"ErrorInfo", "ResourceInfo"}
    assert detail_names(errors.Draining("x", metadata={"request_id": "a"})) == {"ErrorInfo", "RequestInfo"}


def test_what_other_languages_read() -> None:
    status = to_status(errors.AdapterNotFound("no adapter 'sql'", resource="sql", metadata={"worker": "w1"}))
    info, resource = error_details_pb2.ErrorInfo(), error_details_pb2.ResourceInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(resource)
    assert (info.reason, info.domain, dict(info.metadata)) == ("ADAPTER_NOT_FOUND", "loraplex.dev", {"worker": "w1"})
    assert (resource.resource_type, resource.resource_name) == ("adapter", "sql")
    assert (status.code, status.message) == (5, "no adapter 'sql'")


# --- statuses that are not ours -------------------------------------------------------------------------------------


def rpc_error(code: grpc.StatusCode, details: str | None, raw: bytes | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if raw is None else grpc.aio.Metadata((DETAILS_KEY, raw))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)


NOT_A_PROXYS = (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # the transport's


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code not in NOT_A_PROXYS])
def test_a_plain_status_gets_the_nearest_class(code: grpc.StatusCode) -> None:
    got = from_rpc_error(rpc_error(code, "as the proxy said"))
    number: int = code.value[0]
    without_class = {Code.UNKNOWN, Code.ALREADY_EXISTS, Code.DATA_LOSS, Code.ABORTED, Code.OUT_OF_RANGE}
    assert got.code == number or number in without_class
    assert got.message == "as the proxy said"
    assert got.metadata == {"grpc_code": code.name}


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b""], ids=["garbage", "another code"])
def test_unusable_details_are_left_aside(raw: bytes) -> None:
    got = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "down", raw))
    assert type(got) is errors.ConnectionLost
    assert got.metadata == {"grpc_code": "UNAVAILABLE", "grpc_message": "down"}


def test_details_that_do_not_parse_are_left_aside() -> None:
    status = to_status(errors.QueueFull("full", retry_after_s=3))
    status.details[0].value = b"\xff\xff"
    got = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", status.SerializeToString()))
    assert type(got) is errors.ResourceExhausted
    assert got.retry_after_s == 3


def status_with(reason: str, domain: str, code: int) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message="m")
    info = error_details_pb2.ErrorInfo(reason=reason, domain=domain)
    status.details.add().Pack(info)
    return status


def test_a_newer_servers_reason_is_kept() -> None:
    got = from_status(status_with("SOMETHING_NEW", "loraplex.dev", 9))
    assert type(got) is errors.FailedPrecondition
    assert got.metadata == {"grpc_code": "FAILED_PRECONDITION", "reason": "SOMETHING_NEW"}


def test_another_domains_reason_is_not_ours() -> None:
    got = from_status(status_with("QUEUE_FULL", "googleapis.com", 8))
    assert type(got) is errors.ResourceExhausted


def test_a_reason_under_the_wrong_code_is_not_believed() -> None:
    assert type(from_status(status_with("QUEUE_FULL", "loraplex.dev", 5))) is errors.AdapterNotFound


def test_an_unheard_of_code() -> None:
    assert type(from_status(status_pb2.Status(code=99, message="m"))) is errors.Internal


def test_a_status_without_words() -> None:
    assert "UNKNOWN" in from_rpc_error(rpc_error(grpc.StatusCode.UNKNOWN, None)).message


# --- what gRPC itself says, as it says it today: a new version with other words fails here first ----------------------

LIMIT = 1 << 16
LARGE = b"x" * (2 * LIMIT)


async def answer(request: bytes, context: Any) -> bytes:
    return LARGE if request == b"large" else b"small"


async def trail(request: bytes, context: Any) -> bytes:
    context.set_trailing_metadata((("x-large", "y" * 40_000),))
    return b""


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b""
    await asyncio.sleep(60)


def new_server() -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", LIMIT)])
    handlers = {
        "Answer": grpc.unary_unary_rpc_method_handler(answer),
        "Trail": grpc.unary_unary_rpc_method_handler(trail),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    return server


@pytest.fixture
async def server() -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    running = new_server()
    address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    await running.start()
    yield running, address
    await running.stop(None)


async def error_of(address: str, request: bytes = b"", method: str = "Answer", **options: Any) -> LoraplexError:
    async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", LIMIT)]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/t.T/{method}")(request, timeout=20, **options)
    return from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("call", "field", "says"),
    [
        ({"request": LARGE}, "request", f"the request has {len(LARGE)} bytes, and the server takes {LIMIT}; send less"),
        ({"request": LARGE, "compression": grpc.Compression.Gzip}, "request", "once it is unpacked"),
        ({"request": b"large"}, "answer", f"the answer has {len(LARGE)} bytes, and {LIMIT} are taken; ask for less"),
        ({"metadata": (("x-large", "y" * 40_000),)}, "metadata", "send less of it"),
        ({"method": "Trail"}, "metadata", "send less of it"),
    ],
    ids=["request", "packed request", "answer", "metadata", "metadata of the answer"],
)
async def test_what_is_too_large_is_never_to_be_retried(
    server: tuple[grpc.aio.Server, str], call: dict[str, Any], field: str, says: str
) -> None:
    error = await error_of(server[1], **call)
    assert type(error) is errors.MessageTooLarge
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert error.field == field
    assert says in error.message
    assert error.retry_after_s is None


async def test_a_method_that_is_not_there(server: tuple[grpc.aio.Server, str]) -> None:
    error = await error_of(server[1], method="Nothing")
    assert type(error) is errors.Unimplemented
    assert "different versions" in error.message


async def test_a_server_that_goes_away_in_the_middle(server: tuple[grpc.aio.Server, str]) -> None:
    async with grpc.aio.insecure_channel(server[1]) as channel:
        call = channel.unary_stream("/t.T/Stream")(b"")
        await call.read()
        await server[0].stop(None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error = from_rpc_error(caught.value)
    assert type(error) is errors.ConnectionLost
    assert error.retry_after_s is not None
    assert "send the request again" in error.message
    assert error.metadata["grpc_message"] == caught.value.details()


async def test_nobody_listens(server: tuple[grpc.aio.Server, str]) -> None:
    await server[0].stop(None)
    error = await error_of(server[1])
    assert type(error) is errors.ServerUnreachable
    assert error.message == "the server cannot be reached: Connection refused"
    assert error.retry_after_s is not None


HTTP1 = (
    "failed to connect to all addresses; last error: INTERNAL: ipv4:127.0.0.1:9: Failed parsing HTTP/2 (Trying to "
    "connect an http1.x server (HTTP status 400))"
)


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        (Code.UNAVAILABLE, "Stream removed (Socket closed)", errors.ConnectionLost),
        (
            Code.UNAVAILABLE,
            "DNS resolution failed for nowhere:1: C-ares status is not ARES_SUCCESS",
            errors.ServerUnreachable,
        ),
        (
            Code.UNAVAILABLE,
            "errors resolving nowhere:1: [field:hostname lookup error:address lookup failed for nowhere:1: "
            "Domain name not found]",
            errors.ServerUnreachable,
        ),
        (Code.UNAVAILABLE, HTTP1, errors.ServerUnreachable),
        (Code.CANCELLED, "", errors.ConnectionLost),
        (Code.CANCELLED, "Locally cancelled by application!", errors.Cancelled),
        (Code.CANCELLED, "Channel closed!", errors.Cancelled),
        (Code.INTERNAL, "Received RST_STREAM with error code 2", errors.ConnectionLost),
        (Code.UNKNOWN, "Stream removed (Secure read failed (Corruption detected.))", errors.ConnectionLost),
        (Code.INTERNAL, "Stream removed (Failed parsing HTTP/2 (Unknown frame type))", errors.ConnectionLost),
        (Code.INTERNAL, "a bug", None),
        (Code.UNKNOWN, "the handler says: Stream removed", None),
        (Code.RESOURCE_EXHAUSTED, "quota of a proxy", None),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", None),
    ],
)
def test_words(code: Code, words: str, expected: type[LoraplexError] | None) -> None:
    error = from_transport(code, words)
    assert type(error) is (expected or type(None))
    assert error is None or "last error" not in error.message
