"""The router in front of workers that have more to do than they can."""

from __future__ import annotations

import grpc
import pytest
from support.fake_workers import FakeWorker, cluster, error_of, fails, until

from loraplex_contracts.errors import NoWorker, Overloaded, Unimplemented
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from loraplex_router.server import Router


def request(adapter_id: str = "sql") -> inference_pb2.GenerateRequest:
    stopping = inference_pb2.Stopping(max_tokens=100)
    return inference_pb2.GenerateRequest(text="hello", adapter_id=adapter_id, stopping=stopping)


async def overload(router: Router, worker: FakeWorker, wait_s: float) -> None:
    """Has the worker report that the next request for "sql" would wait for so long."""
    waits = [worker_pb2.FlowWait(tenant="default", adapter_id="sql", wait_s=wait_s)]
    forecast = worker_pb2.Forecast(waits=waits, max_queue_wait_s=60, token_interval_s=0.01, longest_tokens=100)
    worker.report(queued_requests=50, forecast=forecast)
    await until(lambda: router.replicas[worker.address].load.forecast is not None)


async def test_a_worker_that_can_do_it_in_time_gets_the_request() -> None:
    async with cluster(2) as c:
        await overload(c.router, c.workers[0], 30.0)
        stub = inference_pb2_grpc.InferenceServiceStub(c.channel)
        for _ in range(8):
            await stub.Generate(request(), timeout=10)
        assert c.num_requests == [0, 8]


async def test_where_nobody_can_the_router_refuses_by_itself() -> None:
    async with cluster(2) as c:
        await overload(c.router, c.workers[0], 30.0)
        await overload(c.router, c.workers[1], 20.0)
        stub = inference_pb2_grpc.InferenceServiceStub(c.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request(), timeout=10)
        error = from_rpc_error(caught.value)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == pytest.approx(20 - 0.8 * 9, abs=0.5)
        assert c.num_requests == [0, 0]
        # Others have nothing waiting there, and who has time waits.
        await stub.Generate(request(adapter_id=""), timeout=10)
        await stub.Generate(request())
        assert sum(c.num_requests) == 2


async def test_what_one_worker_refuses_another_may_take() -> None:
    async with cluster(2) as c:
        c.workers[0].stream = fails(Overloaded("busy", retry_after_s=1.0))
        stub = inference_pb2_grpc.InferenceServiceStub(c.channel)
        for _ in range(8):
            assert [message async for message in stub.GenerateStream(request(adapter_id=""), timeout=10)]
        assert c.num_requests[1] == 8


async def test_what_an_older_worker_lacks_is_no_answer_while_another_one_is_busy() -> None:
    async with cluster(2) as c:
        await overload(c.router, c.workers[0], 30.0)
        c.workers[1].stream = fails(Unimplemented("newer", field="#8"))
        call = inference_pb2_grpc.InferenceServiceStub(c.channel).GenerateStream(request(), timeout=10)
        assert isinstance(await error_of(call), Overloaded)
        assert c.num_requests == [0, 1]


async def test_a_worker_that_takes_nothing_is_not_called_overloaded() -> None:
    async with cluster(1) as c:
        await overload(c.router, c.workers[0], 30.0)
        c.workers[0].report(stalled=True, forecast=c.workers[0].load.forecast)
        await until(lambda: c.router.replicas[c.workers[0].address].is_stalled)
        stub = inference_pb2_grpc.InferenceServiceStub(c.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request(), timeout=10)
        assert isinstance(from_rpc_error(caught.value), NoWorker)


async def test_a_worker_that_lacks_the_adapters_source_is_not_called_overloaded() -> None:
    async with cluster(2) as c:
        holder, other = c.workers
        holder.report(tiers={"sql": 3}, sourced=["sql"])
        await until(lambda: c.router.replicas.keepers(["sql"]) is not None)
        holder.report(tiers={"sql": 3}, sourced=["sql"], stalled=True)
        await until(lambda: c.router.replicas[holder.address].is_stalled)
        await overload(c.router, other, 30.0)
        stub = inference_pb2_grpc.InferenceServiceStub(c.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request(), timeout=10)
        assert isinstance(from_rpc_error(caught.value), NoWorker)
