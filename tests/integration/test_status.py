"""A router's status over gRPC and HTTP: activity, rights, drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from support.credentials import credential, write_credentials
from support.fake_workers import Chunk, Generate, blocks, cluster, error_of, fails, until
from support.http import http_cluster

from loraplex_contracts.errors import Overloaded, PermissionDenied, Unauthenticated
from loraplex_proto.v1 import inference_pb2, inference_pb2_grpc, status_pb2, status_pb2_grpc


async def drafts(request: Generate, context: Any) -> AsyncIterator[bytes]:
    shown = [] if request.output.omit_token_ids else [1, 2, 3]
    yield Chunk(token_ids=shown, drafted_tokens=4, accepted_tokens=2, proposer="medusa").SerializeToString()
    end = Chunk(token_ids=shown, finish_reason=1)
    end.usage.completion_tokens = 6
    yield end.SerializeToString()


async def status_of(channel: grpc.aio.Channel, **fields: Any) -> status_pb2.GetStatusResponse:
    return await status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest(**fields))


async def read(channel: grpc.aio.Channel, **fields: Any) -> None:
    async for _ in inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(Generate(text="hi", **fields)):
        pass


@pytest.mark.parametrize("output", [{}, {"omit_token_ids": True}])
async def test_what_was_relayed_is_counted_at_its_worker(output: dict[str, bool]) -> None:
    async with cluster(1) as c:
        (worker,) = c.workers
        worker.stream = drafts
        await read(c.channel, output=output)
        worker.stream = fails(Overloaded("no"))
        with pytest.raises(grpc.aio.AioRpcError):
            await read(c.channel, request_id="mine")
        found = await status_of(c.channel)
        activity = found.workers[0].activity
        assert activity == found.activity
        assert (activity.tokens, activity.drafted_tokens, activity.accepted_tokens) == (6, 4, 2)
        assert (activity.requests, activity.failed_requests) == (2, 1)
        assert 0 < activity.time_to_first_p50_s < 5
        (error,) = found.errors
        assert (error.code, error.reason, error.method) == ("RESOURCE_EXHAUSTED", "OVERLOADED", "GenerateStream")
        assert (error.message, error.request_id, error.worker_id) == ("no", "mine", worker.address)


async def test_answers_in_one_piece_count_too() -> None:
    async def unary(request: Generate, context: Any) -> bytes:
        answer = inference_pb2.GenerateResponse()
        answer.usage.completion_tokens, answer.usage.drafted_tokens, answer.usage.accepted_tokens = 7, 5, 4
        return answer.SerializeToString()

    async with cluster(1) as c:
        c.workers[0].unary = unary
        await inference_pb2_grpc.InferenceServiceStub(c.channel).Generate(Generate(text="hi"))
        activity = (await status_of(c.channel)).activity
        assert (activity.tokens, activity.drafted_tokens, activity.accepted_tokens) == (7, 5, 4)


def auth_file(folder: Path) -> Path:
    rows = (credential("user", "a", "*"), credential("admin", "ops", "*", roles=("admin",)))
    return write_credentials(folder / "auth.json", *rows)


async def test_only_admins_see_it(tmp_path: Path) -> None:
    async with http_cluster(auth_file=auth_file(tmp_path), worker_token="w") as (c, http):
        stub = status_pb2_grpc.StatusServiceStub(c.channel)
        for token, kind in (("", Unauthenticated), ("user", PermissionDenied)):
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            assert isinstance(await error_of(stub.GetStatus(status_pb2.GetStatusRequest(), metadata=metadata)), kind)
        assert (await http.get("/v1/status")).status_code == 401
        assert (await http.get("/v1/status", headers={"authorization": "Bearer user"})).status_code == 403
        answer = await http.get("/v1/status?adapters=5", headers={"authorization": "Bearer admin"})
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
        assert "access-control-allow-origin" not in answer.headers
        found = answer.json()
        assert found["workers"][0]["state"] == "WORKER_STATE_SERVING"
        assert found["workers"][0]["activity"]["tokens"] == "0"  # 64 bits, as protobuf's JSON has them


async def test_a_router_that_drains_says_so() -> None:
    release = asyncio.Event()
    async with http_cluster() as (c, http):
        c.workers[0].stream = blocks(1, release)
        reading = asyncio.create_task(read(c.channel))
        await until(lambda: len(c.router.calls) == 1)
        draining = asyncio.create_task(c.router.drain(10.0))
        await until(lambda: c.router.listener.health.is_draining)
        await asyncio.sleep(0.01)
        found = await status_of(c.channel)
        assert (found.draining, found.requests_in_flight) == (True, 1)
        assert (await http.get("/v1/status")).json()["draining"] is True
        release.set()
        await reading
        await asyncio.wait_for(draining, 10)


async def test_prefixes_that_are_no_unicode_are_refused() -> None:
    async with http_cluster() as (_, http):
        assert (await http.get("/v1/status?adapters=100000&prefix=%ff")).status_code == 200
        assert (await http.get("/v1/status?adapters=x")).status_code == 400
