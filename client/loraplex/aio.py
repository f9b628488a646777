"""Client for asyncio, with one channel.

The event loop of the first call owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar, Unpack

import grpc
import grpc.aio

from loraplex._calls import DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_TIMEOUT_S, Call, Calls, Settings
from loraplex.chat import AsyncChat
from loraplex.many import DEFAULT_CONCURRENCY, Progress, Prompt, items_of, progress_of
from loraplex.types import (
    Adapter,
    AdapterState,
    CallOptions,
    CallRecord,
    ChatOptions,
    Chunk,
    Classifications,
    Embeddings,
    GenerateOptions,
    Generation,
    Message,
    PoolingInputs,
    PoolingKind,
    PoolingOptions,
    RouterStatus,
    ScoreMethod,
    Scores,
    ServerInfo,
    Tls,
    Tokenization,
    TokenizerInfo,
)
from loraplex_contracts.errors import FailedPrecondition, LoraplexError
from loraplex_proto.paging import MAX_PAGE_SIZE

_Answer = TypeVar("_Answer")


class _Send(Protocol):
    def __call__(self, call: Call[_Answer]) -> Awaitable[_Answer]: ...


class AsyncClient:
    """`loraplex.Client` for asyncio: the same arguments, calls and errors.

    async with AsyncClient("localhost:50051") as client:
        async for chunk in client.stream("SELECT", adapter_id="sql"):
            print(chunk.text, end="")
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        retries: int | None = None,
        tls: bool | Tls = False,
        headers: Callable[[], Mapping[str, str]] | None = None,
        on_call: Callable[[CallRecord], None] | None = None,
    ) -> None:
        self._calls = Calls(
            target,
            token,
            timeout_s,
            tls,
            retries=retries,
            connect_timeout_s=connect_timeout_s,
            headers=headers,
            on_call=on_call,
        )
        self._connection = _Connection(self._calls.settings)
        self.adapters = AsyncAdapters(self._calls, self._unary)

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Waits for the whole answer. The prompt is text, or one of the options `token_ids` and `messages`."""
        return await self._unary(self._calls.generate(prompt, options))

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Tokens as they are made. Takes what `generate` takes; closing the iterator ends the work on the server."""
        return AsyncStream(self._connection, self._calls.stream(prompt, options))

    async def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        max_concurrency: int = DEFAULT_CONCURRENCY,
        progress: Progress = False,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Generation | LoraplexError, ...]:
        """The answer to each prompt, in their order, and the error in its place where one failed. At most
        `max_concurrency` requests are under way. A prompt is text, or a dict of options of its own beside `options`,
        with its text as "prompt". `progress`: True for a bar on stderr, or a function that takes how many of how many
        have ended. Raises InvalidArgument, TypeError for an unknown option."""
        items = items_of(prompts, options, max_concurrency)
        found: dict[int, Generation | LoraplexError] = {}
        waiting = iter(enumerate(items))

        async def work() -> None:
            for number, (prompt, one) in waiting:
                try:
                    found[number] = await self.generate(prompt, **one)
                except LoraplexError as error:
                    found[number] = error
                report(len(found))

        with progress_of(progress, len(items)) as report:
            workers = [asyncio.create_task(work()) for _ in range(min(max_concurrency, len(items)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
        return tuple(found[number] for number in range(len(items)))

    def chat(self, system: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncChat:
        """A conversation that keeps its history, begun with a system message and the option `messages`. The other
        options of `generate` are for every turn."""
        return AsyncChat(self.generate, self.stream, system, options)

    async def embed(
        self,
        inputs: PoolingInputs,
        *,
        pooling: PoolingKind | None = None,
        dimensions: int = 0,
        normalize: bool = True,
        **options: Unpack[PoolingOptions],
    ) -> Embeddings:
        """A vector for each input. `dimensions`: the first so many values, 0 for all."""
        return await self._unary(self._calls.embed(inputs, pooling, dimensions, normalize, options))

    async def classify(
        self, inputs: PoolingInputs, *, logits: bool = False, **options: Unpack[PoolingOptions]
    ) -> Classifications:
        """The probability of each label of the adapter's classifier, or its logits."""
        return await self._unary(self._calls.classify(inputs, logits, options))

    async def score(
        self,
        query: str | Sequence[int],
        documents: PoolingInputs,
        *,
        method: ScoreMethod | None = None,
        template: str = "",
        true_token: str = "",
        false_token: str = "",
        logits: bool = False,
        pooling: PoolingKind | None = None,
        **options: Unpack[PoolingOptions],
    ) -> Scores:
        """Scores of documents for a query: by the adapter's classifier of one label, by the cosine of
        embeddings (the default without a classifier), or by how likely `true_token` is behind both, against
        `false_token`. `template` is the text of both together, with {query} and {document} in it."""
        how = {"template": template, "true_token": true_token, "false_token": false_token, "logits": logits}
        return await self._unary(self._calls.score(query, documents, method, pooling, how, options))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        omit_generation_prompt: bool = False,
        omit_special_tokens: bool = False,
        offsets: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Tokenization:
        """The tokens of a text, or of a chat as the base model's template lays it out. With `offsets` also where each
        token begins and ends, and the chat's text."""
        call = self._calls.tokenize(text, messages, omit_generation_prompt, omit_special_tokens, offsets, options)
        return await self._unary(call)

    async def detokenize(
        self, token_ids: Sequence[int], *, omit_special_tokens: bool = False, **options: Unpack[CallOptions]
    ) -> str:
        """The text of these tokens."""
        return await self._unary(self._calls.detokenize(token_ids, omit_special_tokens, options))

    async def tokenizer_info(self, **options: Unpack[CallOptions]) -> TokenizerInfo:
        """Special tokens and chat template of the base model."""
        return await self._unary(self._calls.tokenizer_info(options))

    async def info(self, **options: Unpack[CallOptions]) -> ServerInfo:
        """Base model, limits and version of the server at this address."""
        return await self._unary(self._calls.info(options))

    async def status(
        self, *, adapter_prefix: str = "", max_adapters: int = 0, **options: Unpack[CallOptions]
    ) -> RouterStatus:
        """Workers, places of adapters, the last minute and the last errors of a router; needs the role admin. Of the
        adapters whose names begin with `adapter_prefix` the busiest `max_adapters`, 100 with 0. Raises Unimplemented
        where the server is a worker."""
        return await self._unary(self._calls.status(adapter_prefix, max_adapters, options))

    def __repr__(self) -> str:
        return f"AsyncClient({self._calls!r})"

    async def close(self) -> None:
        """Ends whatever is still running. Closing twice is fine."""
        await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(self, call: Call[_Answer]) -> _Answer:
        while True:
            try:
                raw: bytes = await call.start(self._connection.channel().unary_unary)
            except grpc.RpcError as error:
                wait_s, call = call.after(error)
            except asyncio.CancelledError:
                _end_cancelled(call)
                raise
            else:
                return call.ended_with(raw)
            await self._connection.wait(call, wait_s)


class _Connection:
    """Owns the channel: tries of calls start on it, and wait for the next one until it is closed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the channel
        self._is_closed = False
        self._ending = asyncio.Condition()  # notified where the connection ends, or a stream on it

    def channel(self) -> grpc.aio.Channel:
        """The channel, created at the first call because it binds to the running loop. Raises FailedPrecondition."""
        if self._is_closed:
            raise FailedPrecondition("this client is closed; make a new one")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise FailedPrecondition("no event loop is running; call this in one, as asyncio.run starts it") from error
        channel = self._channel or self._settings.channel(grpc.aio)
        if self._channel is None:
            self._channel, self._loop = channel, loop
        elif self._loop is not loop:
            raise FailedPrecondition(
                "this client made its first call in another event loop; make a client in each, as asyncio.run starts a "
                "new one each time"
            )
        return channel

    async def wait(self, call: Call[Any], wait_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Waits before the next try of a call, until `is_over` at most. Raises Cancelled where the client is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._ending:
                await self._ending.wait_for(lambda: self._is_closed or is_over())
        if self._is_closed and not is_over():
            raise call.closed()

    async def end_waits(self) -> None:
        """Has those who wait look whether it is over."""
        async with self._ending:
            self._ending.notify_all()

    async def close(self) -> None:
        self._is_closed = True
        channel, self._channel = self._channel, None
        await self.end_waits()
        if channel is not None:
            await channel.close()


class AsyncAdapters:
    """`client.adapters`. Through a router each answer has a row per worker."""

    def __init__(self, calls: Calls, send: _Send) -> None:
        self._calls = calls
        self._send = send

    async def load(
        self,
        adapter_id: str,
        *,
        pin: bool = False,
        source: str = "",
        revision: str = "",
        hub_token: str = "",
        expected_digest: str = "",
        if_absent: bool = False,
        **options: Unpack[CallOptions],
    ) -> tuple[Adapter, ...]:
        """Brings an adapter into memory ahead of use, and binds its name to the files as they are now. `source`: the
        folder that they are in, where that is not the name, or hub:ORG/NAME or s3:BUCKET/PREFIX. `revision` of a
        repository on the Hub, which is asked with `hub_token` where it is given: who may use the name is served what it
        fetches. `if_absent`: a name that is bound stays as it is. Raises DigestMismatch where the files are not those
        of `expected_digest`."""
        how = {
            "pin": pin,
            "source": source,
            "revision": revision,
            "hub_token": hub_token,
            "expected_digest": expected_digest,
            "if_absent": if_absent,
        }
        return await self._send(self._calls.load(adapter_id, how, options))

    async def unload(
        self, adapter_id: str, *, if_unused: bool = False, **options: Unpack[CallOptions]
    ) -> tuple[Adapter, ...]:
        """Forgets the name; requests that are running end as they began. With `if_unused` raises AdapterInUse where
        there are any."""
        return await self._send(self._calls.unload(adapter_id, if_unused, options))

    async def get(self, adapter_id: str, **options: Unpack[CallOptions]) -> tuple[Adapter, ...]:
        """State and place of one adapter on each worker. Raises AdapterNotFound."""
        return await self._send(self._calls.get(adapter_id, options))

    async def list(
        self,
        *,
        include_unloaded: bool = False,
        prefix: str = "",
        state: AdapterState | None = None,
        **options: Unpack[CallOptions],
    ) -> tuple[Adapter, ...]:
        """The adapters that are loaded, with `include_unloaded` also those that could be: all of them, of those whose
        name begins with `prefix`, or that are in `state`. Asks for pages, all within `timeout_s`."""
        pages = self._calls.list(include_unloaded, prefix, state, options)
        rows: list[Adapter] = []
        while (call := pages.next_call()) is not None:
            rows += await self._send(call)
        return tuple(rows)

    async def iterate(
        self,
        *,
        include_unloaded: bool = False,
        prefix: str = "",
        state: AdapterState | None = None,
        page_size: int = MAX_PAGE_SIZE,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[Adapter]:
        """The adapters that `list` gives, one by one. Each page is asked for when needed, within `timeout_s`."""
        pages = self._calls.list(include_unloaded, prefix, state, options, page_size=page_size)
        while (call := pages.next_call()) is not None:
            for row in await self._send(call):
                yield row


def _cancel(call: Call[Chunk], rpc: Any) -> None:
    call.ended()
    rpc.cancel()


class AsyncStream(AsyncIterator[Chunk]):
    """Chunks of one request. Close it, or leave its `async with` block, to end the request early. Several tasks may
    read it: each chunk goes to one of them."""

    _rpc: Any = None  # gRPC's call; None between tries

    def __init__(self, connection: _Connection, call: Call[Chunk]) -> None:
        self._connection = connection
        self._reading = asyncio.Lock()
        self._call = call
        self._has_begun = False
        self._is_over = False
        self._rpc = self._start(call)
        self._loop = asyncio.get_running_loop()

    @property
    def request_id(self) -> str:
        return self._call.request_id or ""

    def __repr__(self) -> str:
        return f"AsyncStream(request_id={self.request_id!r})"

    async def __anext__(self) -> Chunk:
        async with self._reading:
            return await self._next()

    async def _next(self) -> Chunk:
        while not self._is_over:
            try:
                raw: Any = await self._rpc.read()
            except grpc.RpcError as error:
                await self._go_on_after(error)
                continue
            except asyncio.CancelledError:
                self._rpc.cancel()  # gRPC does not where the task is cancelled while the call is being sent
                was_over, self._is_over = self._is_over, True
                if not was_over:
                    _end_cancelled(self._call)
                elif not _is_cancelled():  # closed by another task, during the wait
                    raise StopAsyncIteration from None
                raise
            if isinstance(raw, bytes):
                self._has_begun = True
                return await self._answer(raw)
            await self.aclose()  # grpc.aio.EOF
        raise StopAsyncIteration

    async def _answer(self, raw: bytes) -> Chunk:
        try:
            return self._call.answer(raw)
        except LoraplexError as error:
            await self._end(error)
            raise

    async def _go_on_after(self, error: grpc.RpcError) -> None:
        """Starts the next try, where there is one and the stream was not closed meanwhile by another task."""
        if self._is_over:
            return
        self._rpc = None
        try:
            wait_s, call = self._call.after(error, may_retry=not self._has_begun)
            await self._connection.wait(call, wait_s, lambda: self._is_over)
            if not self._is_over:
                self._call, self._rpc = call, self._start(call)
        except BaseException:
            self._is_over = True
            raise

    def _start(self, call: Call[Chunk]) -> Any:
        return call.start(self._connection.channel().unary_stream)

    async def aclose(self) -> None:
        """Cancels the request where it is not done. Closing twice is fine."""
        await self._end()

    async def _end(self, error: LoraplexError | None = None) -> None:
        was_over, self._is_over = self._is_over, True
        if self._rpc is None:
            await self._connection.end_waits()
        elif not was_over:
            self._call.ended(error)
            self._rpc.cancel()

    def __del__(self) -> None:
        """Cancels the request of a stream that nobody reads any more: gRPC's own call lives until it is done."""
        if self._rpc is not None and not self._is_over:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_cancel, self._call, self._rpc)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _is_cancelled() -> bool:
    """True if this task is being cancelled. gRPC also raises CancelledError for calls that it ended itself."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _end_cancelled(call: Call[Any]) -> None:
    """Records the end of a call that was cancelled. Raises Cancelled where the task was not, which must not take it for
    its own end."""
    if _is_cancelled():
        call.ended(call.cancelled())
        return
    error = call.closed()
    call.ended(error)
    raise error from None
