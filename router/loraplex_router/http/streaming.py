"""Calls of one HTTP request: relay context, fan-out, server-sent events.

The relay writes into a bounded queue that the response reads: a client that reads slowly blocks its own relay, whose
worker then waits by gRPC's flow control. A client that leaves cancels its calls.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from loraplex_contracts.errors import Cancelled, Internal, LoraplexError, MessageTooLarge, as_typed, unexpected
from loraplex_proto.status import from_rpc_error
from loraplex_router.calls import CallContext
from loraplex_router.http.errors import with_names_of
from loraplex_router.upstream import FORWARDED_KEYS, Metadata

T = TypeVar("T")

# Messages between a relay and a response that has not been sent.
MAX_QUEUED: Final = 16
# Bytes of the answers of one request together; as much as one of them may have (ServerOptions.max_answer_bytes).
MAX_ANSWER_BYTES: Final = 64 << 20
# Seconds of silence after which a stream gets a comment, so that proxies keep it open.
KEEP_ALIVE_S: Final = 15.0
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"

# Printable ASCII, and together less than the 8 KiB that gRPC takes.
_FORWARDABLE: Final = re.compile(r"[ -~]{1,2048}")

# Made once: `json.dumps` makes an encoder for each call with other options than its own.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Ends of lines for Python's `splitlines`, by which clients read a stream (httpx's `iter_lines`). JSON itself escapes
# the other ones.
_LINE_ENDS: Final = {end: f"\\u{ord(end):04x}" for end in ("\x85", "\u2028", "\u2029")}

Handle = Callable[[bytes, CallContext], Awaitable[Any]]
Message = tuple[int, bytes]  # index of the prompt, and the worker's bytes


class HttpContext:
    """A call's client over HTTP, with the methods that the relay uses of gRPC's context."""

    def __init__(self, metadata: Metadata, write: Callable[[bytes], Awaitable[None]], request_id: str) -> None:
        self._metadata = metadata
        self.write = write
        self.request_id = request_id

    def time_remaining(self) -> float | None:
        """None: HTTP requests have no deadline."""
        return None

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Drops the metadata: a worker's is gRPC's."""

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Drops the metadata, as `send_initial_metadata` does."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """Raises the error that the status stands for."""
        trailing = grpc.aio.Metadata(*trailing_metadata)
        raise from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))


def metadata_of(request: Request) -> Metadata:
    """The headers that a worker may see, except for values that gRPC cannot send: no context of a trace is one."""
    found = ((key, request.headers.get(key, "")) for key in sorted(FORWARDED_KEYS))
    return tuple((key, value) for key, value in found if _FORWARDABLE.fullmatch(value))


class FanOut:
    """The calls that answer one HTTP request, one for each prompt: all of them, or an error."""

    def __init__(self, handle: Handle, messages: Sequence[bytes], request: Request) -> None:
        """Starts the calls. `handle` is a method of the router (`Calls.handler`). Errors name fields as the request
        does."""
        self._scope, metadata = request.scope, metadata_of(request)
        self._queue: asyncio.Queue[tuple[int, bytes | LoraplexError | None]] = asyncio.Queue(MAX_QUEUED)
        self._tasks = [
            asyncio.create_task(self._call(handle, index, raw, metadata)) for index, raw in enumerate(messages)
        ]
        self._num_open = len(self._tasks)

    async def _call(self, handle: Handle, index: int, raw: bytes, metadata: Metadata) -> None:
        end: LoraplexError | None = None
        request_id = self._scope["state"]["request_id"]
        context = HttpContext(metadata, lambda message: self._queue.put((index, message)), request_id)
        try:
            answer = await handle(raw, context)
            if isinstance(answer, bytes):
                await self._queue.put((index, answer))
        except LoraplexError as error:
            error.metadata.setdefault("request_id", request_id)
            end = error
        except Exception as error:
            end = unexpected(error, "relaying an HTTP request")
        await self._queue.put((index, end))

    async def next(self) -> Message | None:
        """The next message of any call, None when all have ended. Raises the first error of one; ends the others."""
        while self._num_open:
            index, item = await self._queue.get()
            if isinstance(item, bytes):
                return index, item
            if item is not None:
                self.cancel()
                raise with_names_of(item, self._scope)
            self._num_open -= 1
        return None

    async def first(self, receive: Receive) -> Message | None:
        """The first message, None where there is none within KEEP_ALIVE_S: a stream can begin by a comment then. Raises
        what `next` raises, Cancelled when the client leaves, and Internal where all calls end without a message."""
        try:
            return _required(await self.while_connected(receive, self.next(), KEEP_ALIVE_S))
        except TimeoutError:
            return None

    async def answers(self) -> list[bytes]:
        """Answers of unary calls, in the order of their requests. Raises MessageTooLarge."""
        found: dict[int, bytes] = {}
        num_bytes = 0
        while (message := await self.next()) is not None:
            found[message[0]] = message[1]
            num_bytes += len(message[1])
            if num_bytes > MAX_ANSWER_BYTES:
                self.cancel()
                raise MessageTooLarge(
                    f"answers to one request have at most {MAX_ANSWER_BYTES} bytes; ask for fewer prompts or logprobs",
                    metadata=self._own_id(),
                )
        return [found[index] for index in range(len(self._tasks))]

    async def while_connected(
        self, receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float | None = None
    ) -> T:
        """The result of `work`, which waits for these calls and ends when the client leaves. Raises Cancelled then,
        TimeoutError after `timeout_s`, and what `work` raises."""
        working = asyncio.create_task(work)
        watching = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({working, watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if not watching.done():
                raise TimeoutError
            raise Cancelled("the client has left", metadata=self._own_id())
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    def _own_id(self) -> dict[str, str]:
        """Metadata of an error that comes after the calls' own ends, which have been counted."""
        return {"request_id": self._scope["state"]["request_id"]}

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


def _required(message: Message | None) -> Message:
    """The first message of calls. Raises Internal where they have ended without one."""
    if message is None:
        raise Internal("a worker has ended its answer without a message")
    return message


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of calls. The calls end with the response, in whatever way."""

    def __init__(self, calls: FanOut, events: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        # Proxies keep such an answer otherwise, until it is complete.
        headers = {**headers, "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events in this task. Starlette's own way, a task group, costs more CPU time (benchmarks/LOG.md)."""
        streaming = asyncio.current_task()
        assert streaming is not None
        is_over = False

        def on_left(watching: asyncio.Task[None]) -> None:
            if not (is_over or watching.cancelled()):
                streaming.cancel()

        watching = asyncio.create_task(_until_left(receive))
        watching.add_done_callback(on_left)
        try:
            await self.stream_response(send)
        except asyncio.CancelledError:
            if not watching.done() or streaming.uncancel():
                raise  # not because the client has left
        finally:
            is_over = True
            watching.cancel()
            self._calls.cancel()


def json_bytes(content: dict[str, Any]) -> bytes:
    return _encode(content).encode()


def json_in_parts(parts: Sequence[bytes], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A long answer that is encoded in parts: all at once would hold other streams up."""
    headers = {"content-length": str(sum(map(len, parts))), **(headers or {})}
    return StreamingResponse(_one_by_one(parts), status, headers, media_type="application/json")


async def _one_by_one(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    """The parts; other tasks run between two, also where the client takes all of them at once."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


def data_event(content: dict[str, Any], name: str = "") -> bytes:
    """The content as a server-sent event, whose data are one line for every client."""
    text = _encode(content)
    if not text.isascii():
        for end, escaped in _LINE_ENDS.items():
            text = text.replace(end, escaped)
    return f"event: {name}\ndata: {text}\n\n".encode() if name else b"data: " + text.encode() + b"\n\n"


async def events_of(
    calls: FanOut,
    first: Message | None,
    to_events: Callable[[int, bytes], Iterable[bytes]],
    at_end: Callable[[], Iterable[bytes]],
    of_error: Callable[[LoraplexError], bytes],
    done: bytes = DONE,
) -> AsyncIterator[bytes]:
    """The events of a stream. Without a `first` message, for which its client has waited KEEP_ALIVE_S, it begins with a
    comment. An error of a call is the last event before `done`."""
    clock = asyncio.get_running_loop().time
    quiet_until_s = clock() + (KEEP_ALIVE_S if first is not None else 0.0)
    message, has_begun = first, first is not None
    try:
        while True:
            if message is not None and (events := b"".join(to_events(*message))):
                yield events
                quiet_until_s = clock() + KEEP_ALIVE_S
            while True:
                try:
                    async with asyncio.timeout_at(quiet_until_s):
                        message = await calls.next()
                    break
                except TimeoutError:
                    yield KEEP_ALIVE
                    quiet_until_s = clock() + KEEP_ALIVE_S
            if message is None and has_begun:
                break
            message, has_begun = _required(message), True
        if last := b"".join(at_end()) + done:
            yield last
    except Exception as error:  # after the first byte there is no other way to say it
        typed = as_typed(error, "streaming an answer")
        yield of_error(typed) + done
