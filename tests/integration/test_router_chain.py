"""A router in front of a router."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from support.fake_workers import blocks, cluster, router_for, until

from loraplex_proto.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

DEVICE, DISK = 4, 2


async def test_requests_go_through_both() -> None:
    async with cluster(2) as inner, router_for([inner.router.address]) as (outer, channel):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await stub.Generate(inference_pb2.GenerateRequest(text="hello"))
        assert answer.completions[0].text == "t0 t1 t2 "
        texts = [chunk.text_delta async for chunk in stub.GenerateStream(inference_pb2.GenerateRequest(text="hello"))]
        assert "".join(texts) == "t0 t1 t2 "
        assert sum(inner.num_requests) == 2
        info = await stub.GetInfo(inference_pb2.GetInfoRequest())
        assert info.role == "router"
        assert outer.replicas.num_routable == 1


async def test_the_outer_router_sees_adapters_and_load() -> None:
    async with cluster(2) as inner, router_for([inner.router.address]) as (outer, _):
        inner.workers[0].report(running_requests=1, tiers={"a": DEVICE})
        inner.workers[1].report(running_requests=2, tiers={"a": DISK, "b": DISK})
        seen = outer.replicas[inner.router.address]
        await until(lambda: seen.tiers == {"a": DEVICE, "b": DISK} and seen.load.num_running == 3)
        stub = worker_pb2_grpc.WorkerServiceStub(grpc.aio.insecure_channel(inner.router.address))
        load = (await stub.GetLoad(worker_pb2.GetLoadRequest())).load
        assert load.running_requests == 3


async def test_an_inner_router_that_drains_gets_nothing_new() -> None:
    release = asyncio.Event()
    async with cluster(1) as inner, router_for([inner.router.address]) as (outer, channel):
        inner.workers[0].stream = blocks(1, release)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.GenerateStream(inference_pb2.GenerateRequest(text="hello"))
        messages = aiter(call)
        await anext(messages)
        draining = asyncio.create_task(inner.router.drain(10.0))
        await until(lambda: outer.replicas.num_routable == 0)
        release.set()
        assert [chunk.text_delta async for chunk in messages]
        await asyncio.wait_for(draining, 10)


async def test_an_inner_router_without_workers_counts_as_stalled() -> None:
    async with cluster(1) as inner, router_for([inner.router.address]) as (outer, _):
        await inner.workers[0].stop()
        await until(lambda: inner.router.replicas.num_routable == 0)
        await until(lambda: outer.replicas.num_routable == 0)


async def test_intervals_are_checked() -> None:
    async with cluster(1) as inner:
        stub = worker_pb2_grpc.WorkerServiceStub(grpc.aio.insecure_channel(inner.router.address))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchLoad(worker_pb2.WatchLoadRequest(min_interval_s=-1)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
