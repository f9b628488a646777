"""Workers without a model: real gRPC servers on loopback whose answers are scripted.

`python -m support.fake_workers` runs one as a process of its own, for tests that kill it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from loraplex_contracts.errors import AdapterNotFound, LoraplexError
from loraplex_proto import validate
from loraplex_proto.paging import ListQuery, Page, list_query
from loraplex_proto.status import abort, from_rpc_error
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2, worker_pb2
from loraplex_router.config import RouterConfig, WatchConfig
from loraplex_router.server import Router, start_router
from loraplex_runtime.auth import ServerInterceptor, follow_credentials, recheck_identity
from loraplex_runtime.refusals import Refusals
from loraplex_runtime.reload import Reloader, server_credentials

Generate = inference_pb2.GenerateRequest
Chunk = inference_pb2.GenerateStreamResponse

# Reconnects within a test's patience.
FAST_WATCH = WatchConfig(min_interval_s=0.02, stale_after_s=5.0, min_backoff_s=0.01, max_backoff_s=0.05)

Stream = Callable[[Generate, Any], AsyncIterator[bytes]]
Unary = Callable[[Generate, Any], Awaitable[bytes]]


def chunks(num_tokens: int = 3, request_id: str = "") -> Iterator[bytes]:
    """A stream as a worker writes it: one token a message, the last with a finish reason."""
    for number in range(num_tokens):
        text = f"t{number} "
        chunk = Chunk(text_delta=text, token_ids=[number + 1], deltas=[inference_pb2.ChatDelta(content=text)])
        if number == 0:
            chunk.request_id = request_id
        if number == num_tokens - 1:
            chunk.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        yield chunk.SerializeToString()


async def default_stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
    for chunk in chunks(request_id=request.request_id):
        yield chunk


async def default_unary(request: Generate, context: Any) -> bytes:
    answer = inference_pb2.GenerateResponse(request_id=request.request_id)
    message = inference_pb2.ChatMessage(role="assistant", content="t0 t1 t2 ")
    answer.completions.add(text="t0 t1 t2 ", token_ids=[1, 2, 3], message=message)
    return answer.SerializeToString()


def fails(error: LoraplexError, after: int = 0) -> Stream:
    """A stream that ends with `error` after some messages."""

    async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
        for chunk in list(chunks(after + 1, request.request_id))[:after]:
            yield chunk
        await abort(context, error)

    return stream


def blocks(after: int = 0, until_set: asyncio.Event | None = None) -> Any:
    """A stream that stops in the middle, for ever or until the event."""

    async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
        messages = list(chunks(after + 1, request.request_id))
        for message in messages[:after]:
            yield message
        await (until_set or asyncio.Event()).wait()
        yield messages[-1]

    return stream


async def _checked(cls: Any, check: Callable[[Any], None], raw: bytes, context: Any) -> Any:
    """The request, validated as a worker validates it."""
    try:
        request = validate.parse(cls, raw)
        check(request)
    except LoraplexError as error:
        await abort(context, error)
    return request


class FakeWorker:
    """Owns a server and records what reaches it."""

    def __init__(
        self,
        name: str,
        auth_file: Path | None = None,
        tls: tuple[Path, Path] | None = None,
        client_ca: Path | None = None,
    ) -> None:
        """`tls` is key and certificate."""
        self.name = name
        self._tls = tls
        self._client_ca = client_ca
        self.stream: Stream = default_stream
        self.unary: Unary = default_unary
        self.load = worker_pb2.Load()
        self.info: dict[str, Any] = {"model_id": "tiny", "dtype": "float32", "max_context_tokens": 2048}
        self.adapters: dict[str, adapter_pb2.Adapter] = {}
        self.unknown: frozenset[str] = frozenset()  # adapters that no call finds
        self.adapter_error: LoraplexError | None = None  # of every call
        self.load_error: LoraplexError | None = None  # of LoadAdapter alone
        self.digest = ""  # of what it loads
        self.may_load: asyncio.Event | None = None  # LoadAdapter waits for it
        self.raw_requests: list[bytes] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.remaining_s: list[float | None] = []
        self.calls: list[str] = []
        self.loads: list[adapter_pb2.LoadAdapterRequest] = []
        self.queries: list[ListQuery] = []  # of ListAdapters
        self.pooling: list[Any] = []  # requests of PoolingService
        self.num_ended = 0  # streams that are over, whatever the way
        self.ended = asyncio.Event()
        self.started = asyncio.Event()
        self.address = ""
        self.num_watches = 0
        self._loads = asyncio.Event()
        self._ends = asyncio.Event()
        self._auth_file = auth_file
        self._files = Reloader()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> FakeWorker:
        self._files = Reloader()
        interceptor = ServerInterceptor(follow_credentials(self._files, self._auth_file), Refusals().handler)
        server = grpc.aio.server(interceptors=[interceptor], options=[("grpc.so_reuseport", 0)])
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        services: dict[str, dict[str, Any]] = {
            "InferenceService": {
                "Generate": unary(self._generate),
                "GenerateStream": stream(self._generate_stream),
                "Tokenize": unary(self._tokenize),
                "Detokenize": unary(self._detokenize),
                "GetTokenizerInfo": unary(self._get_tokenizer_info),
                "GetInfo": unary(self._get_info),
            },
            "AdapterService": {
                name: unary(self._adapters(name))
                for name in ("LoadAdapter", "UnloadAdapter", "GetAdapter", "ListAdapters")
            },
            "PoolingService": {
                "Embed": unary(self._embed),
                "Classify": unary(self._classify),
                "Score": unary(self._score),
            },
            "WorkerService": {"WatchLoad": stream(self._watch_load)},
        }
        for service, handlers in services.items():
            handler = grpc.method_handlers_generic_handler(f"loraplex.v1.{service}", handlers)
            server.add_generic_rpc_handlers((handler,))
        wanted = f"127.0.0.1:{port}"
        if self._tls is None:
            port = server.add_insecure_port(wanted)
        else:
            key, cert = self._tls
            port = server.add_secure_port(wanted, server_credentials(self._files, cert, key, self._client_ca))
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._files.start()
        self._server = server
        return self

    async def stop(self, grace_s: float | None = None) -> None:
        """Stops the server. Without a grace everything under way is cut off."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
            self._files.stop()

    def report(self, **fields: Any) -> None:
        """A new load for those who watch; `tiers` is adapter id -> tier, `sourced` has names that a load bound to a
        source of their own."""
        tiers: Mapping[str, int] = fields.pop("tiers", {})
        sourced: Collection[str] = fields.pop("sourced", ())
        self.load = worker_pb2.Load(**fields)
        for adapter_id, tier in tiers.items():
            self.load.adapters.add(adapter_id=adapter_id, tier=tier, has_source=adapter_id in sourced)
        self._loads.set()
        self._loads = asyncio.Event()

    def end_watches(self) -> None:
        """Ends all watches, as a connection does that has reached its maximum age."""
        self._ends.set()
        self._ends = asyncio.Event()
        self.report()

    @property
    def requests(self) -> list[Generate]:
        return [Generate.FromString(raw) for raw in self.raw_requests]

    async def _record(self, raw: bytes, context: Any) -> Generate:
        self.raw_requests.append(raw)
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_s.append(context.time_remaining())
        self.started.set()
        request = await _checked(Generate, validate.check_generate, raw, context)
        await self._find_adapter(request, context)
        return request

    async def _find_adapter(self, request: Any, context: Any) -> None:
        if request.adapter_id in self.unknown:
            await abort(context, AdapterNotFound("no such adapter", resource=request.adapter_id))

    async def _generate(self, raw: bytes, context: Any) -> bytes:
        request = await self._record(raw, context)
        try:
            return await self.unary(request, context)
        finally:
            self._end()

    async def _generate_stream(self, raw: bytes, context: Any) -> None:
        request = await self._record(raw, context)
        try:
            async with contextlib.aclosing(self.stream(request, context)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    await context.write(message)
        finally:
            self._end()

    def _end(self) -> None:
        self.num_ended += 1
        self.ended.set()

    async def _tokenize(self, raw: bytes, context: Any) -> bytes:
        self.calls.append("Tokenize")
        request = await _checked(inference_pb2.TokenizeRequest, validate.check_tokenize, raw, context)
        answer = inference_pb2.TokenizeResponse(token_ids=request.text.encode())
        if request.offsets:
            answer.starts.extend(range(len(answer.token_ids)))
            answer.ends.extend(range(1, 1 + len(answer.token_ids)))
        return answer.SerializeToString()

    async def _detokenize(self, raw: bytes, context: Any) -> bytes:
        request = await _checked(inference_pb2.DetokenizeRequest, validate.refuse_unhandled, raw, context)
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode()).SerializeToString()

    async def _embed(self, raw: bytes, context: Any) -> bytes:
        """Embeds each input as its length and one half."""
        request = await _checked(pooling_pb2.EmbedRequest, validate.check_pooling, raw, context)
        await self._find_adapter(request, context)
        self.pooling.append(request)
        lengths = [len(one.token_ids.ids) or len(one.text) for one in request.inputs]
        return pooling_pb2.EmbedResponse(
            request_id=request.request_id,
            embeddings=[pooling_pb2.Embedding(values=[num, 0.5], prompt_tokens=num) for num in lengths],
            usage=inference_pb2.Usage(prompt_tokens=sum(lengths)),
            adapter_digest="d" if request.adapter_id else "",
        ).SerializeToString()

    async def _classify(self, raw: bytes, context: Any) -> bytes:
        """Classifies texts by three labels, the second the likeliest; for the adapter `ner`, labels each character
        or token id."""
        request = await _checked(pooling_pb2.ClassifyRequest, validate.check_pooling, raw, context)
        await self._find_adapter(request, context)
        self.pooling.append(request)
        answer = pooling_pb2.ClassifyResponse(request_id=request.request_id, per_token=request.adapter_id == "ner")
        answer.labels.extend(["O", "B-PER", "I-PER"] if answer.per_token else ["a", "b", "c"])
        for one in request.inputs:
            found = answer.classifications.add()
            if not answer.per_token:
                found.rows.add(probabilities=[0.25, 0.5, 0.25])
                continue
            before = " "
            for _ in one.token_ids.ids:  # which have no places in a text
                found.rows.add(probabilities=[0.8, 0.1, 0.1])
            for idx, char in enumerate(one.text):
                label = 0 if char.islower() or char == " " else 2 if before.isupper() else 1
                found.rows.add(probabilities=[0.8 if label == other else 0.1 for other in range(3)])
                found.starts.append(idx)
                found.ends.append(idx + 1)
                before = char
        return answer.SerializeToString()

    async def _score(self, raw: bytes, context: Any) -> bytes:
        """Scores each document by its length, plus a thousand times the query's."""
        request = await _checked(pooling_pb2.ScoreRequest, validate.check_score, raw, context)
        await self._find_adapter(request, context)
        self.pooling.append(request)
        scores = [1000 * len(request.query.text) + len(one.text) for one in request.inputs]
        return pooling_pb2.ScoreResponse(
            request_id=request.request_id, scores=scores, usage=inference_pb2.Usage(prompt_tokens=len(scores))
        ).SerializeToString()

    async def _get_tokenizer_info(self, raw: bytes, context: Any) -> bytes:
        await _checked(inference_pb2.GetTokenizerInfoRequest, validate.refuse_unhandled, raw, context)
        return inference_pb2.GetTokenizerInfoResponse(chat_template="{{ x }}").SerializeToString()

    async def _get_info(self, raw: bytes, context: Any) -> bytes:
        await _checked(inference_pb2.GetInfoRequest, validate.refuse_unhandled, raw, context)
        answer = inference_pb2.GetInfoResponse(**self.info, role="worker", vocab_size=256)
        return answer.SerializeToString()

    async def _watch_load(self, raw: bytes, context: Any) -> None:
        self.num_watches += 1
        end = self._ends
        while not end.is_set():
            try:
                recheck_identity()
            except LoraplexError as error:
                await abort(context, error)
            news = self._loads
            await context.write(worker_pb2.WatchLoadResponse(load=self.load).SerializeToString())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), 1.0)

    def _page(self, request: adapter_pb2.ListAdaptersRequest, rows: list[adapter_pb2.Adapter]) -> bytes:
        query = list_query(request)
        self.queries.append(query)
        page = Page(query)
        for row in sorted(rows, key=lambda row: row.adapter_id):
            is_meant = row.adapter_id.startswith(query.prefix) and query.state in (0, row.state)
            if is_meant and row.adapter_id > query.after and not page.add(row.adapter_id, [row]):
                break
        return page.response.SerializeToString()

    def _adapters(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def handle(raw: bytes, context: Any) -> bytes:
            self.calls.append(method)
            error = self.adapter_error or (self.load_error if method == "LoadAdapter" else None)
            if error is not None:
                await abort(context, error)
            if method == "LoadAdapter" and self.may_load is not None:
                await self.may_load.wait()
            rows = list(self.adapters.values())
            if method == "ListAdapters":
                return self._page(adapter_pb2.ListAdaptersRequest.FromString(raw), rows)
            adapter_id = adapter_pb2.GetAdapterRequest.FromString(raw).adapter_id
            if method == "LoadAdapter":
                tier = adapter_pb2.ADAPTER_TIER_DEVICE
                self.loads.append(adapter_pb2.LoadAdapterRequest.FromString(raw))
                before = self.adapters.get(adapter_id)
                source = self.loads[-1].source or ("" if before is None else before.source)
                if before is None or not self.loads[-1].if_absent:
                    self.adapters[adapter_id] = adapter_pb2.Adapter(
                        adapter_id=adapter_id, tier=tier, source=source, digest=self.digest
                    )
            if adapter_id not in self.adapters:
                await abort(context, AdapterNotFound(f"no {adapter_id}", resource=adapter_id))
            rows = [self.adapters[adapter_id]]
            if method == "UnloadAdapter":
                del self.adapters[adapter_id]
            return adapter_pb2.ListAdaptersResponse(adapters=rows).SerializeToString()

        return handle


class Cluster:
    """Some fake workers, a router in front of them, and a client's stubs."""

    def __init__(self, workers: list[FakeWorker], router: Router, channel: grpc.aio.Channel) -> None:
        self.workers = workers
        self.router = router
        self.channel = channel

    def by_address(self, address: str) -> FakeWorker:
        return next(worker for worker in self.workers if worker.address == address)

    @property
    def num_requests(self) -> list[int]:
        return [len(worker.raw_requests) for worker in self.workers]


@contextlib.asynccontextmanager
async def cluster(num_workers: int = 2, **settings: Any) -> AsyncIterator[Cluster]:
    """Everything started and connected; ended at the end, without waiting for what runs."""
    worker_auth = settings.pop("worker_auth_file", None)
    workers = [await FakeWorker(f"w{number}", worker_auth).start() for number in range(num_workers)]
    async with router_for([worker.address for worker in workers], **settings) as (router, channel):
        try:
            yield Cluster(workers, router, channel)
        finally:
            for worker in workers:
                await worker.stop()


@contextlib.asynccontextmanager
async def router_for(addresses: list[str], **settings: Any) -> AsyncIterator[tuple[Router, grpc.aio.Channel]]:
    config = RouterConfig(**{"workers": tuple(addresses), "port": 0, "watch": FAST_WATCH, **settings})
    router = await start_router(config)
    channel = grpc.aio.insecure_channel(router.address, options=[("grpc.use_local_subchannel_pool", 1)])
    try:
        yield router, channel
    finally:
        await channel.close()
        await router.drain(0.0)


async def error_of(call: Any) -> LoraplexError:
    """The error that a call or stream ended with, as the SDK would raise it."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call ended without an error")


async def until(is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for what other tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # there is no event for what gRPC does inside
            await asyncio.sleep(0.002)


async def endless(request: Generate, context: Any) -> AsyncIterator[bytes]:
    """A stream that never ends, and brings nothing after two messages."""
    for chunk in chunks(2):
        yield chunk
    await asyncio.Event().wait()


async def _main() -> None:
    """One worker whose streams never end, its address on the first line of standard output."""
    worker = FakeWorker("process")
    worker.stream = endless
    await worker.start()
    print(worker.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
