"""The router in front of scripted workers: routing, relaying, retries, faults, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_workers import (
    FAST_WATCH,
    Chunk,
    FakeWorker,
    Generate,
    blocks,
    chunks,
    cluster,
    default_stream,
    error_of,
    fails,
    router_for,
    until,
)

from loraplex_contracts.errors import (
    AdapterInvalid,
    DeadlineExceeded,
    DiskFull,
    Draining,
    EngineLost,
    InvalidAdapterId,
    InvalidArgument,
    LoraplexError,
    MessageTooLarge,
    NoWorker,
    QueueFull,
    ResourceExhausted,
    Unimplemented,
    WorkerLost,
)
from loraplex_proto.status import DETAILS_KEY, abort
from loraplex_proto.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    pooling_pb2,
    pooling_pb2_grpc,
)
from loraplex_router.config import PolicyConfig, RouterConfig, ServerOptions, WatchConfig
from loraplex_router.policy import rendezvous_order
from loraplex_router.server import listen, start_router
from loraplex_router.watch import Watcher

GENERATE = "/loraplex.v1.InferenceService/Generate"
STREAM = "/loraplex.v1.InferenceService/GenerateStream"


def stub(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(channel)


async def read(call: Any) -> list[Any]:
    """The rest of a stream."""
    messages: list[Any] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"model_id": "big"}, "serves big in float32"),
        ({"dtype": "float32, linears in int8"}, "serves tiny in float32, linears in int8"),
    ],
)
async def test_workers_that_answer_differently_are_told(
    changes: dict[str, str], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [await FakeWorker(name).start() for name in ("one", "other")]
    workers[1].info |= changes
    async with router_for([worker.address for worker in workers]) as (router, _):
        await until(lambda: router.replicas.num_routable == 2)
    for worker in workers:
        await worker.stop()
    assert ("answers will depend on where a request lands" in caplog.text) == bool(says)
    assert says in caplog.text


# --- relaying -----------------------------------------------------------------------------------------------------


async def test_bytes_go_both_ways_unchanged() -> None:
    odd = [b"\x2a\x03abc\x32\x01\x05" + b"\xf8\x3f\x07", b"", *chunks(2)]  # an unknown field, an empty message

    async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
        for message in odd:
            yield message

    async def unary(request: Generate, context: Any) -> bytes:
        return b"\xf8\x3f\x07"

    async with cluster(1) as c:
        (worker,) = c.workers
        worker.stream, worker.unary = stream, unary
        # Fields out of order, which no serializer would write.
        raw = Generate(adapter_id="sql").SerializeToString() + Generate(text="hi", request_id="x").SerializeToString()
        assert await read(c.channel.unary_stream(STREAM)(raw)) == odd
        assert await c.channel.unary_unary(GENERATE)(raw) == b"\xf8\x3f\x07"
        assert worker.raw_requests == [raw, raw]


async def test_a_request_without_an_id_gets_one() -> None:
    async with cluster(1) as c:
        first, *_ = await read(stub(c.channel).GenerateStream(Generate(text="hi")))
        assert first.request_id == c.workers[0].requests[0].request_id != ""
        refused = await error_of(stub(c.channel).Generate(Generate(text="hi", request_id="mine", n=1000)))
        # Nothing of a request that is refused is believed, its id included.
        assert isinstance(refused, InvalidArgument)
        assert refused.field == "n"


async def test_metadata_of_workers_reaches_clients() -> None:
    async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata((("x-before", "1"),))
        for chunk in chunks():
            yield chunk
        context.set_trailing_metadata((("x-after", "2"),))

    async with cluster(1) as c:
        c.workers[0].stream = stream
        call = stub(c.channel).GenerateStream(Generate(text="hi"))
        await read(call)
        assert ("x-before", "1") in tuple(await call.initial_metadata())
        assert ("x-after", "2") in tuple(await call.trailing_metadata())


async def test_nothing_is_sent_before_the_workers_first_message() -> None:
    release = asyncio.Event()
    async with cluster(1) as c:
        c.workers[0].stream = blocks(0, release)
        call = stub(c.channel).GenerateStream(Generate(text="hi"))
        headers = asyncio.ensure_future(call.initial_metadata())
        await c.workers[0].started.wait()
        # A round trip on the same connection: anything sent before it would have arrived.
        await stub(c.channel).Tokenize(inference_pb2.TokenizeRequest(text="x"))
        assert not headers.done()
        release.set()
        await headers
        assert len(await read(call)) == 1


async def test_errors_of_workers_pass_as_they_are() -> None:
    error = AdapterInvalid("rank 0", resource="sql", metadata={"file": "adapter_config.json"})

    async def unary(request: Generate, context: Any) -> bytes:
        await abort(context, error)

    async with cluster(2) as c:
        for worker in c.workers:
            worker.stream, worker.unary = fails(error), unary
        direct = grpc.aio.insecure_channel(c.workers[0].address)
        seen = []
        for channel in (c.channel, direct):
            for call in (stub(channel).GenerateStream(Generate(text="x")), stub(channel).Generate(Generate(text="x"))):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (read(call) if hasattr(call, "read") else call)
                details = [value for key, value in caught.value.trailing_metadata() or () if key == DETAILS_KEY]
                seen.append((caught.value.code(), caught.value.details(), details))
        await direct.close()
        assert all(one == seen[0] for one in seen)
        assert len(seen[0][2]) == 1
        # Two through the router, two direct, and no second try anywhere.
        assert sum(c.num_requests) == 4


async def test_an_error_after_some_tokens_passes_too() -> None:
    async with cluster(2) as c:
        for worker in c.workers:
            worker.stream = fails(QueueFull("preempted", retry_after_s=2.0), after=2)
        call = stub(c.channel).GenerateStream(Generate(text="x"))
        assert [await call.read() for _ in range(2)]
        error = await error_of(call)
        assert isinstance(error, QueueFull)
        assert error.retry_after_s == 2.0
        assert sum(c.num_requests) == 1


async def test_a_bug_in_a_worker_shows_nothing_of_it() -> None:
    async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
        raise KeyError("/home/somebody/secret")
        yield b""

    async with cluster(1) as c:
        c.workers[0].stream = stream
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x", request_id="r")))
        assert error.reason == "INTERNAL"
        assert "secret" not in error.message
        assert error.request_id == "r"


async def test_malformed_and_oversized_requests() -> None:
    async with cluster(1, max_message_bytes=10_000) as c:
        error = await error_of(c.channel.unary_stream(STREAM)(b"\x0a\xff"))
        assert isinstance(error, InvalidArgument)
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x" * 20_000)))
        assert isinstance(error, ResourceExhausted)
        assert c.num_requests == [0]
        assert len(await read(stub(c.channel).GenerateStream(Generate(text="x" * 5_000)))) == 3


async def test_large_answers_pass() -> None:
    answer = b"\x0a" + b"\x80\x80\x80\x03" + b"x" * (6 << 20)

    async def unary(request: Generate, context: Any) -> bytes:
        return answer

    async with cluster(1) as c:
        c.workers[0].unary = unary
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(c.router.address, options=options) as channel:
            assert await channel.unary_unary(GENERATE)(Generate(text="x").SerializeToString()) == answer


async def test_small_questions() -> None:
    async with cluster(2) as c:
        assert list((await stub(c.channel).Tokenize(inference_pb2.TokenizeRequest(text="ab"))).token_ids) == [97, 98]
        assert (await stub(c.channel).Detokenize(inference_pb2.DetokenizeRequest(token_ids=[97, 98]))).text == "ab"
        tokenizer = await stub(c.channel).GetTokenizerInfo(inference_pb2.GetTokenizerInfoRequest())
        assert tokenizer.chat_template == "{{ x }}"
        info = await stub(c.channel).GetInfo(inference_pb2.GetInfoRequest())
        assert (info.role, info.model_id, info.max_context_tokens) == ("router", "tiny", 2048)
        assert isinstance(await error_of(stub(c.channel).Tokenize(inference_pb2.TokenizeRequest())), InvalidArgument)


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize", "GetTokenizerInfo", "GetInfo"])
async def test_fields_that_the_router_does_not_know_reach_no_worker(method: str) -> None:
    """A newer worker would act on them, and the router cannot see whether the caller may."""
    async with cluster(1) as c:
        await c.workers[0].stop()  # what is relayed ends as NoWorker
        call = c.channel.unary_unary(f"/loraplex.v1.InferenceService/{method}")
        error = await error_of(call(b"\xa2\x7d\x01x"))  # field 2004, a string
        assert isinstance(error, Unimplemented)
        assert error.field == "#2004"
        assert isinstance(await error_of(call(b"\x0a\xff")), InvalidArgument)


async def test_embeddings_are_relayed_to_the_home_of_their_adapter() -> None:
    async with cluster(3) as c:
        pooling = pooling_pb2_grpc.PoolingServiceStub(c.channel)
        inputs = [pooling_pb2.PoolingInput(text="abc"), pooling_pb2.PoolingInput(text="a")]
        for number in range(4):
            adapter_id = f"adapter-{number}"
            answer = await pooling.Embed(pooling_pb2.EmbedRequest(inputs=inputs, adapter_id=adapter_id))
            assert [list(one.values) for one in answer.embeddings] == [[3.0, 0.5], [1.0, 0.5]]
            home = rendezvous_order(adapter_id, [w.address for w in c.workers])[0]
            assert c.by_address(home).pooling[-1].request_id == answer.request_id != ""
        error = await error_of(pooling.Embed(pooling_pb2.EmbedRequest(inputs=inputs, adapter_id="../x")))
        assert isinstance(error, InvalidAdapterId)


# --- routing ------------------------------------------------------------------------------------------------------


async def test_an_adapter_keeps_to_its_home() -> None:
    async with cluster(3) as c:
        for number in range(6):
            adapter_id = f"adapter-{number}"
            for _ in range(3):
                await read(stub(c.channel).GenerateStream(Generate(text="x", adapter_id=adapter_id)))
        for worker in c.workers:
            for request in worker.requests:
                homes = rendezvous_order(request.adapter_id, [w.address for w in c.workers])
                assert worker.address == homes[0]


async def test_reports_move_requests() -> None:
    async with cluster(2) as c:
        first, second = (c.by_address(a) for a in rendezvous_order("sql", [w.address for w in c.workers]))
        request = Generate(text="x", adapter_id="sql")
        second.report(tiers={"sql": 4})
        await until(lambda: bool(c.router.replicas[second.address].tiers))
        await stub(c.channel).Generate(request)
        assert (len(first.requests), len(second.requests)) == (0, 1)
        second.report(pending_tokens=100_000, tiers={"sql": 4})
        await until(lambda: c.router.replicas[second.address].load.pending_tokens > 0)
        await stub(c.channel).Generate(request)
        assert (len(first.requests), len(second.requests)) == (1, 1)
        first.report(draining=True)
        await until(lambda: c.router.replicas.num_routable == 1)
        await stub(c.channel).Generate(request)
        assert (len(first.requests), len(second.requests)) == (1, 2)


async def test_what_is_in_flight_here_counts_before_any_report() -> None:
    """A burst on one adapter between two reports overflows instead of piling up."""
    async with cluster(2, policy=PolicyConfig(free_work_tokens=500)) as c:
        for worker in c.workers:
            worker.stream = blocks(1)
        request = Generate(text="x", adapter_id="sql", stopping={"max_tokens": 100})
        calls = [stub(c.channel).GenerateStream(request) for _ in range(20)]
        await asyncio.gather(*(call.read() for call in calls))
        assert sorted(c.num_requests)[0] >= 7
        for call in calls:
            call.cancel()


async def test_base_requests_are_spread() -> None:
    async with cluster(2) as c:
        for worker in c.workers:
            worker.stream = blocks(1)
        calls = [stub(c.channel).GenerateStream(Generate(text="x")) for _ in range(20)]
        await asyncio.gather(*(call.read() for call in calls))
        assert c.num_requests == [10, 10]
        for call in calls:
            call.cancel()


# --- retries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [Draining("going"), EngineLost("gone"), Unimplemented("newer", field="#8"), DiskFull("the store is full")]
)
async def test_another_worker_takes_what_one_cannot(error: LoraplexError) -> None:
    async with cluster(2) as c:
        first, second = (c.by_address(a) for a in rendezvous_order("sql", [w.address for w in c.workers]))
        first.stream = fails(error)

        async def unary(request: Generate, context: Any) -> bytes:
            await abort(context, error)

        first.unary = unary
        request = Generate(text="x", adapter_id="sql", request_id="r")
        assert len(await read(stub(c.channel).GenerateStream(request))) == 3
        assert (await stub(c.channel).Generate(request)).request_id == "r"
        assert (len(first.requests), len(second.requests)) == (2, 2)


@pytest.mark.parametrize("refusal", [Draining, DiskFull])
async def test_every_worker_is_tried_once_and_the_last_word_counts(refusal: type[LoraplexError]) -> None:
    async with cluster(4) as c:
        for worker in c.workers:
            worker.stream = fails(refusal("not now", retry_after_s=1.5))
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x")))
        assert isinstance(error, refusal)
        assert error.retry_after_s == 1.5
        assert c.num_requests == [1, 1, 1, 1]


@pytest.mark.parametrize("idx", range(3))
async def test_a_verdict_counts_more_than_a_worker_that_is_going(idx: int) -> None:
    async with cluster(3) as c:
        for place, address in enumerate(rendezvous_order("sql", [w.address for w in c.workers])):
            c.by_address(address).stream = fails(Draining("going") if place == idx else DiskFull("full"))
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x", adapter_id="sql")))
        assert isinstance(error, DiskFull)
        assert c.num_requests == [1, 1, 1]


async def test_what_no_worker_knows_is_said() -> None:
    async with cluster(3) as c:
        for worker in c.workers:
            worker.stream = fails(Unimplemented("`#8` is not known", field="#8"))
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x")))
        assert isinstance(error, Unimplemented)
        assert error.field == "#8"
        assert c.num_requests == [1, 1, 1]


@pytest.mark.parametrize(("versions", "num_asked"), [(["2"] * 4, 1), (["1", "1", "2", "2"], 2), ([""] * 4, 4)])
async def test_one_worker_of_each_version_is_asked_for_what_none_knows(
    versions: list[str], num_asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [await FakeWorker(f"w{number}").start() for number in range(4)]
    for worker, version in zip(workers, versions, strict=True):
        worker.info["version"] = version
        worker.stream = fails(Unimplemented("`#8` is not known", field="#8"))
    caplog.set_level("INFO", "loraplex_router.inference")
    async with router_for([worker.address for worker in workers], metrics_port=0) as (router, channel):
        await until(lambda: all(one.info is not None for one in router.replicas.all()))
        await until(lambda: router.replicas.num_routable == 4)
        error = await error_of(stub(channel).GenerateStream(Generate(text="x", adapter_id="sql")))
        assert (type(error), error.field) == (Unimplemented, "#8")
        assert sum(len(worker.requests) for worker in workers) == num_asked
    for worker in workers:
        await worker.stop()
    levels = [one.levelname for one in caplog.records if one.name == "loraplex_router.inference"]
    assert levels == ["INFO"] * num_asked


async def test_a_load_that_no_worker_knows_asks_no_more_workers_than_there_are_homes() -> None:
    workers = [await FakeWorker(f"w{number}").start() for number in range(4)]
    for worker in workers:
        worker.info["version"] = "2"
        worker.load_error = Unimplemented("`#8` is not known", field="#8")
    policy = PolicyConfig(num_homes=2)
    async with router_for([worker.address for worker in workers], policy=policy) as (router, channel):
        await until(lambda: router.replicas.num_routable == 4)
        load = adapter_pb2_grpc.AdapterServiceStub(channel).LoadAdapter
        error = await error_of(load(adapter_pb2.LoadAdapterRequest(adapter_id="sql")))
        assert isinstance(error, Unimplemented)
    assert sum(worker.calls.count("LoadAdapter") for worker in workers) == 2
    for worker in workers:
        await worker.stop()


@pytest.mark.parametrize("is_older_first", [False, True])
async def test_a_worker_of_a_newer_release_that_is_full_is_waited_for(is_older_first: bool) -> None:
    """That the older one does not know the request says nothing about the next try."""
    async with cluster(2) as c:
        older, newer = (c.by_address(a) for a in rendezvous_order("sql", [w.address for w in c.workers]))
        if not is_older_first:
            older, newer = newer, older
        older.stream = fails(Unimplemented("newer", field="#8"))
        newer.stream = fails(QueueFull("full", retry_after_s=1.0))
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x", adapter_id="sql")))
        assert isinstance(error, QueueFull)
        assert c.num_requests == [1, 1]


async def test_nothing_is_tried_again_after_the_first_token() -> None:
    async with cluster(3) as c:
        for worker in c.workers:
            worker.stream = fails(Draining("going"), after=1)
        assert isinstance(await error_of(stub(c.channel).GenerateStream(Generate(text="x"))), Draining)
        assert sum(c.num_requests) == 1


async def test_a_worker_that_dies_before_the_first_token_is_replaced() -> None:
    async with cluster(2) as c:
        first, second = (c.by_address(a) for a in rendezvous_order("sql", [w.address for w in c.workers]))
        first.stream = blocks(0)
        call = stub(c.channel).GenerateStream(Generate(text="x", adapter_id="sql"))
        reading = asyncio.ensure_future(read(call))
        await first.started.wait()
        await first.stop()
        assert len(await reading) == 3
        assert len(second.requests) == 1
        await until(lambda: c.router.replicas.num_routable == 1)


async def test_a_worker_that_dies_in_mid_stream_is_reported() -> None:
    async with cluster(2) as c:
        first, second = (c.by_address(a) for a in rendezvous_order("sql", [w.address for w in c.workers]))
        first.stream = blocks(5)
        call = stub(c.channel).GenerateStream(Generate(text="x", adapter_id="sql", request_id="r"))
        got = [await call.read() for _ in range(5)]
        await first.stop()
        error = await error_of(call)
        assert isinstance(error, WorkerLost)
        assert error.metadata["tokens_sent"] == "5"
        assert error.request_id == "r"
        assert [message.token_ids[0] for message in got] == [1, 2, 3, 4, 5]
        assert second.requests == []


# --- resumption ---------------------------------------------------------------------------------------------------


async def _ten(request: Generate, context: Any) -> AsyncIterator[bytes]:
    for message in chunks(10, request.request_id):
        yield message


async def test_a_stream_goes_on_at_another_worker() -> None:
    async with cluster(2, resume=True, metrics_port=0) as c:
        first, second = (c.by_address(a) for a in rendezvous_order("sql", [w.address for w in c.workers]))
        first.stream, second.stream = blocks(5), _ten
        call = stub(c.channel).GenerateStream(Generate(text="x", adapter_id="sql"))
        got = [await call.read() for _ in range(5)]
        await first.stop()
        got += await read(call)
        assert [list(message.token_ids) for message in got] == [[number] for number in range(1, 11)]
        assert "".join(message.text_delta for message in got) == "".join(f"t{number} " for number in range(10))
        assert got[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
        registry = c.router.listener.registry
        assert registry is not None
        assert registry.get_sample_value("loraplex:router_relayed_messages_total") == len(got)


async def test_an_answer_that_is_whole_ends_well_though_its_worker_is_lost() -> None:
    async def whole_and_lost(request: Generate, context: Any) -> AsyncIterator[bytes]:
        for message in chunks(3, request.request_id):
            yield message
        await abort(context, EngineLost("gone"))

    async with cluster(2, resume=True) as c:
        for worker in c.workers:
            worker.stream = whole_and_lost
        got = await read(stub(c.channel).GenerateStream(Generate(text="x")))
        assert [bool(message.finish_reason) for message in got] == [False, False, True]
        assert sum(c.num_requests) == 1


async def _differs(request: Generate, context: Any) -> AsyncIterator[bytes]:
    yield Chunk(token_ids=[1, 2, 99], request_id=request.request_id).SerializeToString()


@pytest.mark.parametrize("stream", [_differs, fails(AdapterInvalid("torn")), fails(QueueFull("full"))])
async def test_a_stream_that_cannot_go_on_ends_with_its_worker(stream: Any) -> None:
    async with cluster(2, resume=True) as c:
        first, second = (c.by_address(a) for a in rendezvous_order("sql", [w.address for w in c.workers]))
        first.stream, second.stream = blocks(5), stream
        call = stub(c.channel).GenerateStream(Generate(text="x", adapter_id="sql"))
        assert [(await call.read()).token_ids[0] for _ in range(5)] == [1, 2, 3, 4, 5]
        await first.stop()
        error = await error_of(call)
        assert isinstance(error, WorkerLost)
        assert error.metadata["tokens_sent"] == "5"
        assert len(second.requests) == 1


async def test_without_the_flag_nothing_goes_on() -> None:
    async with cluster(2) as c:
        for worker in c.workers:
            worker.stream = fails(EngineLost("gone"), after=2)
        assert isinstance(await error_of(stub(c.channel).GenerateStream(Generate(text="x"))), EngineLost)
        assert sum(c.num_requests) == 1


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_call_that_a_worker_cancels_is_a_worker_lost(num_tokens: int) -> None:
    async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
        for message in list(chunks(3))[:num_tokens]:
            yield message
        await context.abort(grpc.StatusCode.CANCELLED, "on the server side")

    async def unary(request: Generate, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.CANCELLED, "on the server side")

    async with cluster(2, max_lost_workers=1) as c:
        for worker in c.workers:
            worker.stream, worker.unary = stream, unary
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x")))
        assert isinstance(error, WorkerLost)
        assert error.metadata["tokens_sent"] == str(num_tokens)
        assert isinstance(await error_of(stub(c.channel).Generate(Generate(text="x"))), WorkerLost)


async def test_a_request_that_kills_workers_does_not_kill_them_all() -> None:
    async with cluster(4) as c:

        def deadly(worker: FakeWorker) -> Any:
            async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
                task = asyncio.ensure_future(worker.stop())
                await asyncio.Event().wait()
                await task
                yield b""

            return stream

        for worker in c.workers:
            worker.stream = deadly(worker)
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x")))
        assert isinstance(error, WorkerLost)
        assert error.metadata["tokens_sent"] == "0"
        assert sum(c.num_requests) == 2
        for worker in c.workers:
            worker.stream = default_stream
        assert len(await read(stub(c.channel).GenerateStream(Generate(text="x")))) == 3


# --- deadlines and cancellation -----------------------------------------------------------------------------------


async def test_the_remaining_deadline_travels() -> None:
    async with cluster(2) as c:
        first, second = (c.by_address(a) for a in rendezvous_order("sql", [w.address for w in c.workers]))

        async def late(request: Generate, context: Any) -> AsyncIterator[bytes]:
            await asyncio.sleep(0.3)  # time is what this is about
            await abort(context, Draining("going"))
            yield b""

        first.stream = late
        await read(stub(c.channel).GenerateStream(Generate(text="x", adapter_id="sql"), timeout=10))
        assert first.remaining_s[0] is not None
        assert second.remaining_s[0] is not None
        assert 9 < first.remaining_s[0] < 10.3  # gRPC rounds up to about a percent on each hop
        # The second try gets what is left, not what there was.
        assert second.remaining_s[0] < first.remaining_s[0] - 0.15
        await read(stub(c.channel).GenerateStream(Generate(text="x", adapter_id="sql")))
        assert first.remaining_s[1] is None


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_deadline_ends_the_request_on_both_hops(num_tokens: int) -> None:
    async with cluster(1) as c:
        (worker,) = c.workers
        worker.stream = blocks(num_tokens)
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x"), timeout=0.2))
        assert isinstance(error, DeadlineExceeded)
        await asyncio.wait_for(worker.ended.wait(), 5)
        await until(lambda: len(c.router.calls) == 0)
        assert c.router.replicas[worker.address].num_in_flight == 0


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_client_that_leaves_is_told_to_the_worker(num_tokens: int) -> None:
    async with cluster(1) as c:
        (worker,) = c.workers
        worker.stream = blocks(num_tokens)
        call = stub(c.channel).GenerateStream(Generate(text="x"))
        reading = asyncio.ensure_future(read(call))
        await worker.started.wait()
        call.cancel()
        await asyncio.wait([reading])
        await asyncio.wait_for(worker.ended.wait(), 5)
        await until(lambda: len(c.router.calls) == 0)
        assert c.router.replicas[worker.address].num_in_flight == 0


async def test_a_unary_client_that_leaves_too() -> None:
    async with cluster(1) as c:
        (worker,) = c.workers

        async def unary(request: Generate, context: Any) -> bytes:
            await asyncio.Event().wait()
            return b""

        worker.unary = unary
        call = stub(c.channel).Generate(Generate(text="x"))
        await worker.started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(worker.ended.wait(), 5)
        await until(lambda: len(c.router.calls) == 0)


async def test_a_slow_reader_holds_up_nobody() -> None:
    async def flood(request: Generate, context: Any) -> AsyncIterator[bytes]:
        message = Chunk(text_delta="x" * 10_000).SerializeToString()
        while True:
            yield message

    async with cluster(1) as c:
        (worker,) = c.workers
        worker.stream = flood
        slow = stub(c.channel).GenerateStream(Generate(text="x"))
        await slow.read()
        worker.stream = default_stream
        for _ in range(5):
            assert len(await read(stub(c.channel).GenerateStream(Generate(text="x")))) == 3
        slow.cancel()
        await until(lambda: worker.num_ended == 6)


# --- workers that come and go -------------------------------------------------------------------------------------


async def test_without_a_worker_there_is_a_clear_error_until_one_comes() -> None:
    worker = FakeWorker("late")
    await worker.start()
    port = int(worker.address.rpartition(":")[2])
    await worker.stop()
    async with router_for([worker.address]) as (_router, channel):
        health = health_pb2_grpc.HealthStub(channel)
        ready = health_pb2.HealthCheckRequest(service="loraplex.v1.InferenceService")
        assert (await health.Check(ready)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(ready)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await error_of(stub(channel).GenerateStream(Generate(text="x", request_id="r")))
        assert isinstance(error, NoWorker)
        assert error.retry_after_s
        assert error.request_id == "r"
        assert worker.address not in error.message
        await worker.start(port)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert len(await read(stub(channel).GenerateStream(Generate(text="x")))) == 3
        await worker.stop()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert isinstance(await error_of(stub(channel).Generate(Generate(text="x"))), NoWorker)
        watch.cancel()


async def test_until_workers_have_reported_a_router_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, settled = await FakeWorker("quick").start(), asyncio.Event()
    monkeypatch.setattr(Watcher, "settled", lambda _self, _timeout_s: settled.wait())  # as if another were slow
    config = RouterConfig(workers=(worker.address,), port=0)
    listener = await listen(config)
    starting = asyncio.create_task(start_router(config, listener))
    async with grpc.aio.insecure_channel(listener.address) as channel:
        await until(lambda: worker.num_watches == 1)
        error = await error_of(stub(channel).Generate(Generate(text="x")))
        assert error.reason == "UNAVAILABLE"
        assert "is starting" in error.message
        assert error.retry_after_s
        assert not listener.health.is_ready
        settled.set()
        router = await starting
        assert listener.health.is_ready
        assert await stub(channel).Generate(Generate(text="x"))
    await router.drain(0.0)
    await worker.stop()


async def test_a_report_stream_that_ends_is_opened_again_without_a_gap() -> None:
    watch = WatchConfig(min_interval_s=0.02, min_stream_s=0.0, min_backoff_s=5.0, max_backoff_s=5.0)
    async with cluster(1, watch=watch) as c:
        (worker,) = c.workers
        changes: list[int] = []
        c.router.replicas.on_change = lambda: changes.append(c.router.replicas.num_routable)
        worker.end_watches()
        await until(lambda: worker.num_watches == 2)
        worker.report(pending_tokens=7)
        await until(lambda: c.router.replicas[worker.address].load.pending_tokens == 7)
        assert changes == []


async def test_a_silent_worker_is_taken_for_dead() -> None:
    silent = WatchConfig(min_interval_s=0.02, stale_after_s=0.1, min_backoff_s=5.0, max_backoff_s=5.0)
    # The fake reports once and then once a second.
    async with cluster(1, watch=silent) as c:
        await until(lambda: c.router.replicas.num_routable == 0)
        assert "silent" in c.router.replicas[c.workers[0].address].last_error


async def test_a_worker_that_drains_is_let_go() -> None:
    """An open stream of reports would hold it for its whole grace period."""
    async with cluster(2, watch=FAST_WATCH) as c:
        worker = c.workers[0]
        worker.report(draining=True)
        await asyncio.wait_for(worker.stop(grace_s=30), 5)
        assert c.router.replicas.num_routable == 1


async def test_too_many_requests_are_refused() -> None:
    async with cluster(1, max_in_flight=2) as c:
        c.workers[0].stream = blocks(1)
        calls = [stub(c.channel).GenerateStream(Generate(text="x")) for _ in range(2)]
        await asyncio.gather(*(call.read() for call in calls))
        error = await error_of(stub(c.channel).GenerateStream(Generate(text="x")))
        assert isinstance(error, QueueFull)
        assert error.retry_after_s
        calls[0].cancel()
        await until(lambda: len(c.router.calls) == 1)
        c.workers[0].stream = default_stream
        assert len(await read(stub(c.channel).GenerateStream(Generate(text="x")))) == 3
        calls[1].cancel()


# --- the end ------------------------------------------------------------------------------------------------------


async def test_draining_lets_requests_end_and_takes_no_more() -> None:
    release = asyncio.Event()
    async with cluster(1) as c:
        c.workers[0].stream = blocks(1, release)
        running = stub(c.channel).GenerateStream(Generate(text="x"))
        await running.read()
        health = health_pb2_grpc.HealthStub(c.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="loraplex.v1.InferenceService"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        draining = asyncio.ensure_future(c.router.drain(30.0))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        late = await error_of(stub(c.channel).GenerateStream(Generate(text="x")))
        assert late.code.name == "UNAVAILABLE"
        # A watch that ended now would be opened again and again by clients that check health themselves.
        end = asyncio.ensure_future(watch.read())
        await asyncio.sleep(0.2)
        assert not draining.done()
        assert not end.done()
        release.set()
        assert len(await read(running)) == 1
        assert await asyncio.wait_for(end, 5) is grpc.aio.EOF
        await asyncio.wait_for(draining, 5)


async def test_draining_cuts_off_what_does_not_end() -> None:
    async with cluster(1) as c:
        c.workers[0].stream = blocks(1)
        running = stub(c.channel).GenerateStream(Generate(text="x", request_id="r"))
        await running.read()
        await asyncio.wait_for(c.router.drain(0.05), 5)
        error = await error_of(running)
        assert isinstance(error, Draining)
        assert error.metadata == {"request_id": "r", "tokens_sent": "1", "messages_sent": "1"}
        await asyncio.wait_for(c.workers[0].ended.wait(), 5)


async def test_draining_is_announced_first() -> None:
    async with cluster(1) as c:
        draining = asyncio.ensure_future(c.router.drain(5.0, announce_s=0.5))
        health = health_pb2_grpc.HealthStub(c.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        # The balancer has not looked yet; its requests are served.
        assert len(await read(stub(c.channel).GenerateStream(Generate(text="x")))) == 3
        await draining


# --- sizes and methods ------------------------------------------------------------------------------------------------


async def test_an_answer_beyond_the_limit_is_asked_for_once_and_named() -> None:
    """Too large an answer is no failure of the worker's, and another one would say as much again."""
    async with cluster(2, server=ServerOptions(max_answer_bytes=4096)) as c:

        async def large(request: Generate, context: Any) -> bytes:
            return b"x" * 8192

        async def large_stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
            yield next(chunks(1, request.request_id))
            yield b"x" * 8192

        for worker in c.workers:
            worker.unary, worker.stream = large, large_stream
        for call in (stub(c.channel).Generate(Generate(text="a")), stub(c.channel).GenerateStream(Generate(text="a"))):
            error = await error_of(call)
            assert isinstance(error, MessageTooLarge)
            assert "the answer has 8192 bytes, and 4096 are taken" in error.message
            assert (error.field, error.retry_after_s) == ("answer", None)
            assert "grpc_code" not in error.metadata
        assert sum(c.num_requests) == 2
        assert all(replica.is_routable for replica in c.router.replicas.all())


async def test_a_method_that_the_router_does_not_have() -> None:
    async with cluster(1) as c:
        error = await error_of(c.channel.unary_unary("/loraplex.v1.InferenceService/Embed")(b""))
    assert isinstance(error, Unimplemented)
    assert "/loraplex.v1.InferenceService/Embed" in error.message
