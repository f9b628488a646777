"""Calls that no handler sees: statuses, counts and lines."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from loraplex_contracts.errors import LoraplexError, PermissionDenied, Unauthenticated, Unimplemented
from loraplex_proto.status import from_rpc_error
from loraplex_runtime.auth import USER, Credentials, Identity, ServerInterceptor, token_digest
from loraplex_runtime.metrics import new_registry
from loraplex_runtime.refusals import EVERY_S, MAX_LINES, Refusals
from loraplex_runtime.request_record import RequestRecord

LOAD = "/loraplex.v1.AdapterService/LoadAdapter"
CREDENTIALS = Credentials({token_digest("a"): Identity("acme", frozenset({USER}), ("*",))})


class Unknown(grpc.GenericRpcHandler):
    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._refusals.unknown_method(handler_call_details.method)


@asynccontextmanager
async def server(refusals: Refusals, *interceptors: grpc.aio.ServerInterceptor) -> AsyncGenerator[grpc.aio.Channel]:
    running = grpc.aio.server(interceptors=interceptors)
    running.add_generic_rpc_handlers((Unknown(refusals),))
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await running.stop(None)


async def error_of(channel: grpc.aio.Channel, method: str, kind: str = "unary_unary", token: str = "") -> LoraplexError:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    call = getattr(channel, kind)(method)([b""] if kind.startswith("stream") else b"", metadata=metadata, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if kind.endswith("unary"):
            await call
        else:
            async for _ in call:
                pass
    return from_rpc_error(caught.value)


def counts(refusals: Refusals) -> dict[tuple[str, str], float]:
    samples = [sample for family in refusals.collect() for sample in family.samples]
    return {(one.labels["code"], one.labels["reason"]): one.value for one in samples if one.value}


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_server_names_the_method_that_it_does_not_have(kind: str) -> None:
    async with server(Refusals()) as channel:
        error = await error_of(channel, "/t.Other/Thing", kind)
    assert (type(error), error.field) == (Unimplemented, "method")
    assert "'/t.Other/Thing'" in error.message
    assert "grpc_code" not in error.metadata, "the server said it"


async def test_refusals_are_counted_and_logged_with_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    refusals, registry = Refusals(), new_registry()
    refusals.show_in(registry, "router")
    caplog.set_level(logging.INFO, "loraplex.requests")
    async with server(refusals, ServerInterceptor(lambda: CREDENTIALS, refusals.handler)) as channel:
        errors = [await error_of(channel, LOAD, token=token) for token in ("", "guess", "a")]
    assert [type(error) for error in errors] == [Unauthenticated, Unauthenticated, PermissionDenied]
    name = "loraplex:router_requests_refused_total"
    for reason, count in (("UNAUTHENTICATED", 2), ("PERMISSION_DENIED", 1), ("UNIMPLEMENTED", 0)):
        assert registry.get_sample_value(name, {"code": reason, "reason": reason}) == count
    fields = ("method", "code", "tenant", "request_id")
    lines = [tuple(getattr(record, field, None) for field in fields) for record in caplog.records]
    assert lines == [
        ("LoadAdapter", "UNAUTHENTICATED", None, errors[0].request_id),
        ("LoadAdapter", "UNAUTHENTICATED", None, errors[1].request_id),
        ("LoadAdapter", "PERMISSION_DENIED", "acme", errors[2].request_id),
    ]
    assert all("peer=ipv4:127.0.0.1:" in record.getMessage() for record in caplog.records)


def test_who_guesses_tokens_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    refusals = Refusals(lambda: now_s)
    refusals.show_in(new_registry(), "worker")
    caplog.set_level(logging.INFO, "loraplex.requests")

    def refuse(tenant: str = "") -> None:
        refusals.note(RequestRecord("Generate", tenant), Unauthenticated("no") if not tenant else Unimplemented("no"))

    for _ in range(MAX_LINES + 1000):
        refuse()
    assert len(caplog.records) == MAX_LINES
    refuse("acme")
    assert len(caplog.records) == MAX_LINES + 1, "one whose credential is known has its line"
    now_s = EVERY_S
    refuse()
    assert [record.getMessage()[:40] for record in caplog.records[-2:]] == [
        "1000 refused calls without a known crede",
        "Generate failed: UNAUTHENTICATED: no (pr",
    ]
    assert counts(refusals)["UNAUTHENTICATED", "UNAUTHENTICATED"] == MAX_LINES + 1001
