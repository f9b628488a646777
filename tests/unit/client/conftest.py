"""A scripted server on its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from loraplex_proto.status import abort
from loraplex_proto.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    pooling_pb2,
    pooling_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)

Context = Any


@dataclass
class Seen:
    """A call as the server saw it."""

    method: str
    request: Any
    metadata: dict[str, str]
    time_remaining_s: float | None


@dataclass
class Fake(
    inference_pb2_grpc.InferenceServiceServicer,
    adapter_pb2_grpc.AdapterServiceServicer,
    pooling_pb2_grpc.PoolingServiceServicer,
    status_pb2_grpc.StatusServiceServicer,
):
    """A server that answers as the tests set it; the calls that it got are in `seen`."""

    seen: list[Seen] = field(default_factory=list)
    error: BaseException | None = None  # instead of an answer, or after the chunks
    stream_error: BaseException | None = None  # after the chunks only
    bare_code: grpc.StatusCode | None = None  # instead of an answer, without words or details
    delay_s: float = 0.0
    is_endless: bool = False
    generate_response: Callable[[Any], inference_pb2.GenerateResponse] | None = None
    chunks: list[inference_pb2.GenerateStreamResponse] = field(default_factory=list)
    adapters: list[adapter_pb2.Adapter] = field(default_factory=list)
    status: status_pb2.GetStatusResponse = field(default_factory=status_pb2.GetStatusResponse)
    max_page_size: int = 1000
    num_sent: int = 0
    arrived: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    address: str = ""
    hang_up: Callable[[], None] = lambda: None  # ends the server, whatever is under way

    async def received(self, method: str, request: Any, context: Context) -> None:
        metadata = dict(context.invocation_metadata())
        self.seen.append(Seen(method, request, metadata, context.time_remaining()))
        self.arrived.set()
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.bare_code is not None:
            await context.abort(self.bare_code)
        if self.error is not None and method != "GenerateStream":
            await abort(context, self.error)

    async def Generate(self, request: Any, context: Context) -> inference_pb2.GenerateResponse:
        await self.received("Generate", request, context)
        if self.generate_response is not None:
            return self.generate_response(request)
        usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=2)
        completions = [
            inference_pb2.Completion(
                index=i,
                text=f"text {i}",
                token_ids=[7, 8],
                finish_reason=inference_pb2.FINISH_REASON_EOS,
                usage=usage,
            )
            for i in range(request.n or 1)
        ]
        return inference_pb2.GenerateResponse(
            request_id=request.request_id,
            completions=completions,
            usage=usage,
            timings=inference_pb2.Timings(queue_s=0.1, time_to_first_token_s=0.2, total_s=0.5),
            adapter_digest="d1" if request.adapter_id else "",
        )

    async def GenerateStream(
        self, request: Any, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        await self.received("GenerateStream", request, context)
        try:
            for index, chunk in enumerate(self.chunks):
                if index == 0 and not chunk.request_id:
                    chunk.request_id = request.request_id
                yield chunk
            while self.is_endless:
                self.num_sent += 1
                yield inference_pb2.GenerateStreamResponse(text_delta="x", token_ids=[1])
                await asyncio.sleep(0.005)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise
        if (error := self.error or self.stream_error) is not None:
            await abort(context, error)

    async def Tokenize(self, request: Any, context: Context) -> inference_pb2.TokenizeResponse:
        await self.received("Tokenize", request, context)
        offsets = {"starts": [0, 1], "ends": [1, 2], "rendered": "ab"} if request.offsets else {}
        return inference_pb2.TokenizeResponse(token_ids=[1, 2], tokens=["a", "b"], **offsets)

    async def Detokenize(self, request: Any, context: Context) -> inference_pb2.DetokenizeResponse:
        await self.received("Detokenize", request, context)
        return inference_pb2.DetokenizeResponse(text="ab")

    async def GetTokenizerInfo(self, request: Any, context: Context) -> inference_pb2.GetTokenizerInfoResponse:
        await self.received("GetTokenizerInfo", request, context)
        eos = inference_pb2.SpecialToken(token_id=2, text="</s>")
        return inference_pb2.GetTokenizerInfoResponse(eos=eos, special_tokens=[eos], chat_template="{{ x }}")

    async def GetInfo(self, request: Any, context: Context) -> inference_pb2.GetInfoResponse:
        await self.received("GetInfo", request, context)
        return inference_pb2.GetInfoResponse(
            model_id="m", model_type="llama", version="0", role="worker", max_context_tokens=64, vocab_size=100,
            dtype="float32", device="cpu", max_lora_rank=8, eos_token_ids=[2], has_chat_template=True,
            speculation=["off", "auto", "draft_model:tiny"], draft_models=["tiny"],
            served_names=["org/m", "m"], generation_defaults=inference_pb2.Sampling(temperature=0.5, top_k=20),
            tasks=["generate"], kv_block_tokens=16, max_device_adapters=8,
        )  # fmt: skip

    async def Embed(self, request: Any, context: Context) -> pooling_pb2.EmbedResponse:
        await self.received("Embed", request, context)
        return pooling_pb2.EmbedResponse(
            request_id=request.request_id,
            embeddings=[pooling_pb2.Embedding(values=[0.5, number]) for number in range(len(request.inputs))],
            usage=inference_pb2.Usage(prompt_tokens=4),
            adapter_digest="d",
        )

    async def Classify(self, request: Any, context: Context) -> pooling_pb2.ClassifyResponse:
        await self.received("Classify", request, context)
        row = pooling_pb2.LabelProbabilities(probabilities=[0.25, 0.75])
        found = [pooling_pb2.Classification(rows=[row], starts=[0], ends=[1]) for _ in request.inputs]
        return pooling_pb2.ClassifyResponse(labels=["no", "yes"], classifications=found, per_token=True)

    async def Score(self, request: Any, context: Context) -> pooling_pb2.ScoreResponse:
        await self.received("Score", request, context)
        return pooling_pb2.ScoreResponse(scores=range(len(request.inputs)))

    async def LoadAdapter(self, request: Any, context: Context) -> adapter_pb2.LoadAdapterResponse:
        await self.received("LoadAdapter", request, context)
        return adapter_pb2.LoadAdapterResponse(adapters=self.adapters)

    async def UnloadAdapter(self, request: Any, context: Context) -> adapter_pb2.UnloadAdapterResponse:
        await self.received("UnloadAdapter", request, context)
        return adapter_pb2.UnloadAdapterResponse(adapters=self.adapters)

    async def GetAdapter(self, request: Any, context: Context) -> adapter_pb2.GetAdapterResponse:
        await self.received("GetAdapter", request, context)
        return adapter_pb2.GetAdapterResponse(adapters=self.adapters)

    async def ListAdapters(self, request: Any, context: Context) -> adapter_pb2.ListAdaptersResponse:
        await self.received("ListAdapters", request, context)
        rows = [row for row in self.adapters if row.adapter_id.startswith(request.prefix)]
        rows = [row for row in rows if request.state in (0, row.state)]
        begin = int(request.page_token or 0)
        end = begin + min(request.page_size or len(rows), self.max_page_size)
        token = str(end) if end < len(rows) else ""
        return adapter_pb2.ListAdaptersResponse(adapters=rows[begin:end], next_page_token=token)

    async def GetStatus(self, request: Any, context: Context) -> status_pb2.GetStatusResponse:
        await self.received("GetStatus", request, context)
        return self.status


@pytest.fixture
def fake() -> Iterator[Fake]:
    servicer = Fake()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> grpc.aio.Server:
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        adapter_pb2_grpc.add_AdapterServiceServicer_to_server(servicer, server)
        pooling_pb2_grpc.add_PoolingServiceServicer_to_server(servicer, server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(servicer, server)
        servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    servicer.hang_up = lambda: asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
    yield servicer
    servicer.hang_up()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def an_adapter(adapter_id: str = "sql", **more: Any) -> adapter_pb2.Adapter:
    values: dict[str, Any] = {
        "kind": "lora",
        "digest": "ab" * 32,
        "state": adapter_pb2.ADAPTER_STATE_ON_DEVICE,
        "tier": adapter_pb2.ADAPTER_TIER_DEVICE,
        "bytes": 1 << 20,
        "rank": 8,
        "worker": "w1",
    }
    return adapter_pb2.Adapter(adapter_id=adapter_id, **(values | more))


@pytest.fixture
def make_adapter() -> Callable[..., adapter_pb2.Adapter]:
    return an_adapter
