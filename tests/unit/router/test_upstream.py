"""Failures of workers, and the metadata that travels on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status
from support.certificates import new_pair

from loraplex_contracts.errors import (
    AdapterLoadsBusy,
    AdapterMemoryFull,
    AdapterNotFound,
    DeadlineExceeded,
    DiskFull,
    Draining,
    EngineLost,
    Internal,
    InvalidArgument,
    LoraplexError,
    MessageTooLarge,
    NoWorker,
    Overloaded,
    QueueFull,
    ResourceExhausted,
    SourceUnavailable,
    Unimplemented,
    WorkerLost,
)
from loraplex_proto.status import DETAILS_KEY, to_status
from loraplex_router.config import ServerOptions
from loraplex_router.membership import Member
from loraplex_router.upstream import (
    LOOKAHEAD_BYTES,
    FailureKind,
    Upstream,
    UpstreamFailure,
    WorkerCredentials,
    follow_worker_credentials,
    passed_on,
)
from loraplex_runtime.auth import Identity, TenantLimits
from loraplex_runtime.reload import Reloader

ANSWERED, DECLINED, UNREACHED, LOST = FailureKind
OVER_LIMIT = "Received message larger than max (9 vs. 5)"


def from_worker(error: LoraplexError) -> UpstreamFailure:
    status = rpc_status.to_status(to_status(error))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return UpstreamFailure("w:1", grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details))


def from_transport(code: grpc.StatusCode, details: str) -> UpstreamFailure:
    return UpstreamFailure("w:1", grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AdapterNotFound("no"), ANSWERED),
        (QueueFull("full"), DECLINED),
        (Overloaded("busy"), DECLINED),
        (AdapterLoadsBusy("full"), DECLINED),
        (AdapterMemoryFull("pinned"), DECLINED),
        (DiskFull("larger than this disk", metadata={"can_ever_fit": "false"}), DECLINED),
        (DeadlineExceeded("late"), ANSWERED),
        (Internal("bug"), ANSWERED),
        (Draining("going"), DECLINED),
        (SourceUnavailable("hub"), DECLINED),
        (Unimplemented("newer"), DECLINED),
        (EngineLost("gone"), LOST),
    ],
)
def test_what_a_worker_said_is_passed_on(error: LoraplexError, kind: FailureKind) -> None:
    failure = from_worker(error)
    assert failure.kind is kind
    assert failure.may_retry is (kind is not ANSWERED)
    assert type(failure.typed) is type(error)
    assert failure.for_client() is None
    assert [key for key, _ in failure.trailing_metadata] == [DETAILS_KEY]


@pytest.mark.parametrize(
    ("code", "details", "kind", "shown"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: ...", UNREACHED, NoWorker),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", LOST, WorkerLost),
        (grpc.StatusCode.CANCELLED, "", LOST, WorkerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ANSWERED, DeadlineExceeded),
        (grpc.StatusCode.UNKNOWN, "Unexpected <class 'KeyError'>: '/home/me'", ANSWERED, Internal),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", LOST, WorkerLost),
        (grpc.StatusCode.UNKNOWN, "Stream removed (Secure read failed (Corruption detected.))", LOST, WorkerLost),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, f"Stream removed (CLIENT: {OVER_LIMIT})", ANSWERED, MessageTooLarge),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, f"SERVER: {OVER_LIMIT}", ANSWERED, MessageTooLarge),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "what a proxy says", ANSWERED, ResourceExhausted),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", DECLINED, Unimplemented),
    ],
)
def test_what_the_transport_said_is_put_into_our_words(
    code: grpc.StatusCode, details: str, kind: FailureKind, shown: type[LoraplexError]
) -> None:
    failure = from_transport(code, details)
    assert failure.kind is kind
    error = failure.for_client(5, 6)
    assert type(error) is shown
    assert "/home" not in error.message
    assert not any(key.startswith("grpc_") for key in error.metadata), "a client would take it for its own connection's"
    if shown is MessageTooLarge:
        assert error.metadata == {"bytes": "9", "limit_bytes": "5"}
        assert error.retry_after_s is None
    if shown is WorkerLost:
        assert error.metadata == {"tokens_sent": "5", "messages_sent": "6"}


@pytest.mark.parametrize(
    ("code", "details"),
    [(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), (grpc.StatusCode.UNAVAILABLE, "Socket closed")],
)
def test_tokens_are_told_where_there_are_some(code: grpc.StatusCode, details: str) -> None:
    """A load of an adapter has none."""
    failure = from_transport(code, details)
    before, after = failure.for_client(), failure.for_client(5, 6)
    assert before is not None
    assert after is not None
    assert "before the answer" in before.message
    assert "after 5 tokens of the answer" in after.message


def test_whose_limit_it_was_is_said() -> None:
    """The router's own limits are not at fault."""
    error = from_transport(grpc.StatusCode.RESOURCE_EXHAUSTED, f"SERVER: {OVER_LIMIT}").for_client()
    assert error is not None
    assert "the worker takes 5; send less, or start the worker with a larger --max-message" in error.message


def test_tokens_that_cannot_be_counted_are_not_claimed() -> None:
    error = from_transport(grpc.StatusCode.UNAVAILABLE, "Socket closed").for_client(None, 6)
    assert isinstance(error, WorkerLost)
    assert error.metadata == {"messages_sent": "6"}
    assert "6 messages" in error.message


def test_metadata_of_one_hop_stays_there() -> None:
    given = ((":status", "200"), ("grpc-encoding", "x"), (DETAILS_KEY, b"d"), ("x-mine", "1"))
    assert passed_on(given) == ((DETAILS_KEY, b"d"), ("x-mine", "1"))
    assert passed_on(None) == ()


def test_what_a_client_says_of_itself_stays_here() -> None:
    client = (
        ("authorization", "Bearer client"),
        ("x-loraplex-tenant", "victim"),
        ("x-adapter-id", "a"),
        ("user-agent", "x"),
        ("traceparent", "00-1"),
    )
    assert WorkerCredentials().metadata(Identity("acme"), client) == (("traceparent", "00-1"),)
    assert WorkerCredentials("secret").metadata(Identity("acme"), client) == (
        ("traceparent", "00-1"),
        ("authorization", "Bearer secret"),
        ("x-loraplex-tenant", "acme"),
    )


def test_a_worker_is_told_how_many_bytes_of_adapters_the_tenant_may_have() -> None:
    caller = Identity("acme", limits=TenantLimits(5, 6, 7))
    (_, _, said) = WorkerCredentials("secret").metadata(caller)
    assert said == ("x-loraplex-tenant-adapter-bytes", "7")


@pytest.mark.parametrize(
    ("token", "says"), [(b"", "is empty"), (b" \n", "is empty"), (b"a\nb", "one line"), ("ä".encode(), "plain ASCII")]
)
def test_tokens_that_cannot_be_sent(tmp_path: Path, token: bytes, says: str) -> None:
    (tmp_path / "token").write_bytes(token)
    with pytest.raises(InvalidArgument, match=says) as caught:
        follow_worker_credentials(Reloader(), tmp_path / "token", None)
    assert caught.value.field == "--worker-token-file"
    with pytest.raises(InvalidArgument, match=f"--server-token-file .* {says}"):
        follow_worker_credentials(Reloader(), tmp_path / "token", None, flags="--server")


def test_authorities_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("x")
    with pytest.raises(InvalidArgument, match="does not hold certificates"):
        follow_worker_credentials(Reloader(), None, tmp_path / "ca")


def test_a_certificate_is_shown_with_its_key(tmp_path: Path) -> None:
    pair, other = new_pair(tmp_path, "pair"), new_pair(tmp_path, "other", key="ed25519")
    shown = follow_worker_credentials(Reloader(), None, pair.cert, pair.cert, pair.key)()
    assert shown.pair == (pair.key.read_bytes(), pair.cert.read_bytes())
    assert "PRIVATE KEY" not in repr(shown)
    for cert, key, says in (
        (pair.cert, other.key, f"--worker-client-cert {pair.cert} and --worker-client-key {other.key} do not fit"),
        (other.cert, other.key, f"--worker-client-cert {other.cert} has a key of a kind that gRPC cannot use"),
        (pair.cert, tmp_path / "none", f"--worker-client-key {tmp_path / 'none'} cannot be read"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(says)):
            follow_worker_credentials(Reloader(), None, pair.cert, cert, key)


def test_files_are_named_by_the_flags_of_the_command(tmp_path: Path) -> None:
    pair, none = new_pair(tmp_path, "pair"), tmp_path / "none"
    for given, flag in (
        ((none, None), "--server-token-file"),
        ((None, none), "--server-ca"),
        ((None, pair.cert, none, pair.key), "--server-client-cert"),
        ((None, pair.cert, pair.cert, none), "--server-client-key"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            follow_worker_credentials(Reloader(), *given, flags="--server")
        assert caught.value.field == flag
        assert caught.value.message.startswith(f"{flag} {none} cannot be read")


def test_without_files_nothing_is_shown(tmp_path: Path) -> None:
    assert follow_worker_credentials(Reloader(), None, None)() == WorkerCredentials()
    (tmp_path / "token").write_text("secret\n")
    assert follow_worker_credentials(Reloader(), tmp_path / "token", None)() == WorkerCredentials("secret")


@asynccontextmanager
async def upstream_of(handler: Any) -> AsyncGenerator[Upstream]:
    """A worker of one method, /s.S/M, as a router calls it."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s.S", {"M": handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    upstream = Upstream(Member(address, address), ServerOptions(), WorkerCredentials)
    try:
        yield upstream
    finally:
        await upstream.close()
        await server.stop(0)


async def test_a_worker_sends_no_megabytes_ahead_of_a_reader_that_stops() -> None:
    num_sent, chunk = 0, b"x" * 10_000

    async def answer(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield chunk

    async with upstream_of(grpc.unary_stream_rpc_method_handler(answer)) as upstream:
        call = upstream.stream("/s.S/M", b"", None, ())
        num_read = 500  # long enough for gRPC to find the connection fast
        for _ in range(num_read):
            await call.read()
        num_before = -1
        while num_sent != num_before:
            num_before = num_sent
            await asyncio.sleep(0.3)
        assert (num_sent - num_read) * len(chunk) < 8 * LOOKAHEAD_BYTES
        call.cancel()


async def test_a_proxy_is_not_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)

    async def answer(request: bytes, _context: object) -> bytes:
        return request

    async with upstream_of(grpc.unary_unary_rpc_method_handler(answer)) as upstream:
        assert await upstream.channel.unary_unary("/s.S/M")(b"x", timeout=5) == b"x"
