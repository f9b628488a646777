"""Blocking client with one channel. Several threads may use it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar, Unpack
from weakref import WeakSet

import grpc

from loraplex._calls import DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_TIMEOUT_S, Call, Calls, Settings
from loraplex.chat import Chat
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
    def __call__(self, call: Call[_Answer]) -> _Answer: ...


class Client:
    """Talks to a Loraplex router or worker; the two cannot be told apart.

        with Client("localhost:50051") as client:
            print(client.generate("SELECT", adapter_id="sql", max_tokens=64).text)

    `target` and `token` are those of LORAPLEX_SERVER and LORAPLEX_TOKEN where they are left out. The token goes with
    every call, as `authorization: Bearer`; an empty one sends none. `timeout_s` is the deadline of calls that give none
    of their own, tries and waits included; None means none. `connect_timeout_s` bounds each attempt to connect. A call
    that fails for want of a server or of room is sent again up to `retries` times (default: LORAPLEX_RETRIES or 3), not
    before the server's RetryInfo says and never after its first answer. `tls` is True for the usual authorities, or a
    `Tls` with certificates. `headers` gives further headers for each try, such as those of OpenTelemetry's `inject`.
    `on_call` is told of each try that has ended; the logger `loraplex` is too. Every failure is a class of
    `loraplex.LoraplexError`.
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
        self.adapters = Adapters(self._calls, self._unary)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Waits for the whole answer. The prompt is text, or one of the options `token_ids` and `messages`."""
        return self._unary(self._calls.generate(prompt, options))

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Tokens as they are made. Takes what `generate` takes; closing the iterator ends the work on the server."""
        return Stream(self._connection, self._calls.stream(prompt, options))

    def generate_many(
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
        have ended. Ctrl-C, or an error of that function, cancels the requests that are under way. Raises
        InvalidArgument, TypeError for an unknown option."""
        items = items_of(prompts, options, max_concurrency)
        found: dict[int, Generation | LoraplexError] = {}
        batch = _Batch(self._connection.ending)
        executor = ThreadPoolExecutor(max_concurrency, "loraplex")
        try:
            with progress_of(progress, len(items)) as report:
                numbers = {executor.submit(self._one, batch, *item): number for number, item in enumerate(items)}
                for future in as_completed(numbers):
                    found[numbers[future]] = future.result()
                    report(len(found))
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            batch.end()
        return tuple(found[number] for number in range(len(items)))

    def _one(self, batch: _Batch, prompt: str | None, options: GenerateOptions) -> Generation | LoraplexError:
        try:
            return self._unary(self._calls.generate(prompt, options), batch)
        except LoraplexError as error:
            return error

    def chat(self, system: str | None = None, **options: Unpack[GenerateOptions]) -> Chat:
        """A conversation that keeps its history, begun with a system message and the option `messages`. The other
        options of `generate` are for every turn."""
        return Chat(self.generate, self.stream, system, options)

    def embed(
        self,
        inputs: PoolingInputs,
        *,
        pooling: PoolingKind | None = None,
        dimensions: int = 0,
        normalize: bool = True,
        **options: Unpack[PoolingOptions],
    ) -> Embeddings:
        """A vector for each input. `dimensions`: the first so many values, 0 for all."""
        return self._unary(self._calls.embed(inputs, pooling, dimensions, normalize, options))

    def classify(
        self, inputs: PoolingInputs, *, logits: bool = False, **options: Unpack[PoolingOptions]
    ) -> Classifications:
        """The probability of each label of the adapter's classifier, or its logits."""
        return self._unary(self._calls.classify(inputs, logits, options))

    def score(
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
        return self._unary(self._calls.score(query, documents, method, pooling, how, options))

    def tokenize(
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
        return self._unary(call)

    def detokenize(
        self, token_ids: Sequence[int], *, omit_special_tokens: bool = False, **options: Unpack[CallOptions]
    ) -> str:
        """The text of these tokens."""
        return self._unary(self._calls.detokenize(token_ids, omit_special_tokens, options))

    def tokenizer_info(self, **options: Unpack[CallOptions]) -> TokenizerInfo:
        """Special tokens and chat template of the base model."""
        return self._unary(self._calls.tokenizer_info(options))

    def info(self, **options: Unpack[CallOptions]) -> ServerInfo:
        """Base model, limits and version of the server at this address."""
        return self._unary(self._calls.info(options))

    def status(
        self, *, adapter_prefix: str = "", max_adapters: int = 0, **options: Unpack[CallOptions]
    ) -> RouterStatus:
        """Workers, places of adapters, the last minute and the last errors of a router; needs the role admin. Of the
        adapters whose names begin with `adapter_prefix` the busiest `max_adapters`, 100 with 0. Raises Unimplemented
        where the server is a worker."""
        return self._unary(self._calls.status(adapter_prefix, max_adapters, options))

    def __repr__(self) -> str:
        return f"Client({self._calls!r})"

    def close(self) -> None:
        """Ends whatever is still running. Closing twice is fine."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, call: Call[_Answer], batch: _Batch | None = None) -> _Answer:
        methods = (lambda channel: channel.unary_unary) if batch is None else batch.methods
        while True:
            try:
                raw: bytes = self._connection.start(call, methods)
            except grpc.RpcError as error:
                wait_s, call = call.after(error)
            else:
                return call.ended_with(raw)
            self._connection.wait(call, wait_s, lambda: batch is not None and batch.is_over)


class _Connection:
    """Owns the channel: tries of calls start on it, and wait for the next one until it is closed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channel: grpc.Channel | None = settings.channel(grpc, *_CHANNEL_OPTIONS)
        self._is_closed = False
        self.ending = threading.Condition()  # notified where the connection ends, or a batch or stream on it
        _CONNECTIONS.add(self)

    def start(self, call: Call[Any], methods: Callable[[grpc.Channel], Callable[[str], Any]]) -> Any:
        """Starts a try of a call by the channel's method for it. Raises FailedPrecondition where the client is closed,
        and Cancelled where another thread closes it meanwhile."""
        with self.ending:
            if self._is_closed:
                raise FailedPrecondition("this client is closed; make a new one")
            channel: grpc.Channel = self._channel or self._settings.channel(grpc, *_CHANNEL_OPTIONS)
            self._channel = channel
        try:
            return call.start(methods(channel))
        except ValueError as error:  # what gRPC raises for a closed channel
            if not self._is_closed:
                raise
            raise call.closed() from error

    def wait(self, call: Call[Any], wait_s: float, is_over: Callable[[], bool]) -> None:
        """Waits before the next try of a call, until `is_over` at most. Raises Cancelled where the client is closed."""
        with self.ending:
            self.ending.wait_for(lambda: self._is_closed or is_over(), wait_s)
            if self._is_closed and not is_over():
                raise call.closed()

    def close(self) -> None:
        with self.ending:
            self._is_closed = True
            channel, self._channel = self._channel, None
            self.ending.notify_all()
        if channel is not None:
            channel.close()

    def begin_anew(self) -> None:
        """In the child of a fork: gives the parent its channel back, whose threads are not here. The next call makes
        one."""
        self.ending = threading.Condition()
        if self._channel is not None:
            _CHANNELS_OF_PARENTS.append(self._channel)
            self._channel = None


_CONNECTIONS: Final[WeakSet[_Connection]] = WeakSet()
_CHANNELS_OF_PARENTS: Final[list[grpc.Channel]] = []  # kept, because a channel's end waits for its threads
_CHANNEL_OPTIONS: Final[set[tuple[str, int]]] = set()  # of this process, beside those of all


def _begin_anew() -> None:
    _CHANNEL_OPTIONS.add(("grpc.use_local_subchannel_pool", 1))  # gRPC's own has the parent's connections
    for connection in tuple(_CONNECTIONS):
        connection.begin_anew()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_begin_anew)


class _Batch:
    """The calls under way of one `generate_many`, which can be ended together."""

    def __init__(self, ending: threading.Condition) -> None:
        self.is_over = False
        self._ending = ending  # guards both; notified at the end
        self._under_way: set[Any] = set()  # gRPC's futures

    def methods(self, channel: grpc.Channel) -> Callable[[str], Callable[..., bytes]]:
        """Methods like `channel.unary_unary`, whose calls `end` cancels: they raise grpc.FutureCancelledError."""
        return lambda path: partial(self._send, channel.unary_unary(path))

    def _send(self, method: Any, request: bytes, **options: Any) -> bytes:
        with self._ending:
            if self.is_over:
                raise grpc.FutureCancelledError
            rpc = method.future(request, **options)
            self._under_way.add(rpc)
        try:
            return rpc.result()
        finally:
            with self._ending:
                self._under_way.discard(rpc)

    def end(self) -> None:
        """Cancels what is under way, and ends the waits for another try."""
        with self._ending:
            self.is_over = True
            self._ending.notify_all()
            under_way = tuple(self._under_way)
        for rpc in under_way:
            rpc.cancel()


class Adapters:
    """`client.adapters`. Through a router each answer has a row per worker."""

    def __init__(self, calls: Calls, send: _Send) -> None:
        self._calls = calls
        self._send = send

    def load(
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
        return self._send(self._calls.load(adapter_id, how, options))

    def unload(
        self, adapter_id: str, *, if_unused: bool = False, **options: Unpack[CallOptions]
    ) -> tuple[Adapter, ...]:
        """Forgets the name; requests that are running end as they began. With `if_unused` raises AdapterInUse where
        there are any."""
        return self._send(self._calls.unload(adapter_id, if_unused, options))

    def get(self, adapter_id: str, **options: Unpack[CallOptions]) -> tuple[Adapter, ...]:
        """State and place of one adapter on each worker. Raises AdapterNotFound."""
        return self._send(self._calls.get(adapter_id, options))

    def list(
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
            rows += self._send(call)
        return tuple(rows)

    def iterate(
        self,
        *,
        include_unloaded: bool = False,
        prefix: str = "",
        state: AdapterState | None = None,
        page_size: int = MAX_PAGE_SIZE,
        **options: Unpack[CallOptions],
    ) -> Iterator[Adapter]:
        """The adapters that `list` gives, one by one. Each page is asked for when needed, within `timeout_s`."""
        pages = self._calls.list(include_unloaded, prefix, state, options, page_size=page_size)
        while (call := pages.next_call()) is not None:
            yield from self._send(call)


class Stream(Iterator[Chunk]):
    """Chunks of one request. Close it, or leave its `with` block, to end the request early. Several threads may read
    it: each chunk goes to one of them."""

    def __init__(self, connection: _Connection, call: Call[Chunk]) -> None:
        self._connection = connection
        self._reading = threading.Lock()
        self._ending = connection.ending  # guards the fields below; notified at the end
        self._call = call
        self._rpc: Any = self._start(call)  # gRPC's iterator, which also cancels; None between tries
        self._has_begun = False
        self._is_over = False

    @property
    def request_id(self) -> str:
        return self._call.request_id or ""

    def __repr__(self) -> str:
        return f"Stream(request_id={self.request_id!r})"

    def __next__(self) -> Chunk:
        if self._ending is not self._connection.ending:
            raise FailedPrecondition("this stream was begun before a fork; read it in the process that began it")
        try:
            with self._reading:
                return self._next()
        except LoraplexError as error:
            self._end(error)
            raise
        except BaseException:  # Ctrl-C too: a traceback that is kept keeps the stream
            self._end()
            raise

    def _next(self) -> Chunk:
        while not self._is_over:
            try:
                raw: bytes = next(self._rpc)
            except grpc.RpcError as error:
                self._go_on_after(error)
            else:
                self._has_begun = True
                return self._call.answer(raw)
        raise StopIteration

    def _go_on_after(self, error: grpc.RpcError) -> None:
        """Starts the next try, where there is one and the stream was not closed meanwhile by another thread."""
        with self._ending:
            if self._is_over:
                return
            self._rpc = None
        try:
            wait_s, call = self._call.after(error, may_retry=not self._has_begun)
            self._connection.wait(call, wait_s, lambda: self._is_over)
            if self._is_over:
                return
            rpc = self._start(call)
        except BaseException:
            self._is_over = True
            raise
        with self._ending:
            self._call, self._rpc = call, rpc
            is_over = self._is_over
        if is_over:  # it was closed while the try began
            call.ended()
            rpc.cancel()

    def _start(self, call: Call[Chunk]) -> Any:
        return self._connection.start(call, lambda channel: channel.unary_stream)

    def close(self) -> None:
        """Cancels the request where it is not done. Closing twice is fine."""
        if self._ending is self._connection.ending:  # else it is the parent's
            self._end()

    def _end(self, error: LoraplexError | None = None) -> None:
        with self._ending:
            was_over, self._is_over = self._is_over, True
            rpc = self._rpc
            self._ending.notify_all()
        if rpc is not None and not was_over:
            self._call.ended(error)
            rpc.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
