"""What gRPC itself says, as it says it today: a new version with other words fails here first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from loraplex_contracts.errors import (
    Cancelled,
    Code,
    ConnectionLost,
    LoraplexError,
    MessageTooLarge,
    ServerUnreachable,
    Unimplemented,
)
from loraplex_proto.status import UnknownMethods, from_rpc_error
from loraplex_proto.transport import from_transport

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
    assert type(error) is MessageTooLarge
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert error.field == field
    assert says in error.message
    assert error.retry_after_s is None


async def test_a_method_that_is_not_there(server: tuple[grpc.aio.Server, str]) -> None:
    error = await error_of(server[1], method="Nothing")
    assert type(error) is Unimplemented
    assert "different versions" in error.message


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_server_names_the_method_that_it_does_not_have(kind: str) -> None:
    running = new_server()
    running.add_generic_rpc_handlers((UnknownMethods(),))
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/t.T/Answer")(b"") == b"small"
        call = getattr(channel, kind)("/t.Other/Thing")
        given = [b""] if kind.startswith("stream") else b""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if kind.endswith("unary"):
                await call(given, timeout=10)
            else:
                async for _ in call(given, timeout=10):
                    pass
    await running.stop(None)
    error = from_rpc_error(caught.value)
    assert (type(error), error.field) == (Unimplemented, "method")
    assert "'/t.Other/Thing'" in error.message
    assert "grpc_code" not in error.metadata, "the server said it"


async def test_a_server_that_goes_away_in_the_middle(server: tuple[grpc.aio.Server, str]) -> None:
    async with grpc.aio.insecure_channel(server[1]) as channel:
        call = channel.unary_stream("/t.T/Stream")(b"")
        await call.read()
        await server[0].stop(None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error = from_rpc_error(caught.value)
    assert type(error) is ConnectionLost
    assert error.retry_after_s is not None
    assert "send the request again" in error.message
    assert error.metadata["grpc_message"] == caught.value.details()


async def test_nobody_listens(server: tuple[grpc.aio.Server, str]) -> None:
    await server[0].stop(None)
    error = await error_of(server[1])
    assert type(error) is ServerUnreachable
    assert error.message == "the server cannot be reached: Connection refused"
    assert error.retry_after_s is not None


HTTP1 = (
    "failed to connect to all addresses; last error: INTERNAL: ipv4:127.0.0.1:9: Failed parsing HTTP/2 (Trying to "
    "connect an http1.x server (HTTP status 400))"
)


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        (Code.UNAVAILABLE, "Stream removed (Socket closed)", ConnectionLost),
        (Code.UNAVAILABLE, "DNS resolution failed for nowhere:1: C-ares status is not ARES_SUCCESS", ServerUnreachable),
        (Code.UNAVAILABLE, HTTP1, ServerUnreachable),
        (Code.CANCELLED, "", ConnectionLost),
        (Code.CANCELLED, "Locally cancelled by application!", Cancelled),
        (Code.CANCELLED, "Channel closed!", Cancelled),
        (Code.INTERNAL, "Received RST_STREAM with error code 2", ConnectionLost),
        (Code.INTERNAL, "a bug", None),
        (Code.RESOURCE_EXHAUSTED, "quota of a proxy", None),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", None),
    ],
)
def test_words(code: Code, words: str, expected: type[LoraplexError] | None) -> None:
    error = from_transport(code, words)
    assert type(error) is (expected or type(None))
    assert error is None or "last error" not in error.message
