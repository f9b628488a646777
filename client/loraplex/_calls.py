"""Calls of the SDK: path, message, metadata, deadline, answer and error.

Both clients send what this module makes, so they cannot differ in anything but how they wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message as ProtobufMessage

from loraplex import _answers, _requests
from loraplex._answers import AdapterPage
from loraplex._settings import Settings, checked_timeout
from loraplex.types import Adapter, CallOptions, Chunk, GenerateOptions, Generation, Message, ServerInfo, Tokenization
from loraplex_contracts.errors import Cancelled, ConnectionLost, DeadlineExceeded, LoraplexError, ServerUnreachable
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.v1.adapter_pb2 import ListAdaptersRequest

_Answer = TypeVar("_Answer")

MAX_PAGE_SIZE: Final = 1000  # the largest that servers give
MIN_TIMEOUT_S: Final = 0.001  # a call whose time is up ends so, with the words for it

_INFERENCE: Final = "/loraplex.v1.InferenceService/"
_ADAPTERS: Final = "/loraplex.v1.AdapterService/"

# Both sides end a call at its deadline, each by its own timer.
CLOCK_SLACK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Call(Generic[_Answer]):
    """One call. For a stream, `read` is called for each message."""

    path: str
    request: bytes
    read: Callable[[bytes], _Answer]
    metadata: tuple[tuple[str, str], ...]
    timeout_s: float | None
    target: str
    request_id: str | None = None
    allowed_s: float | None = None  # by the caller, for all calls of which this is one
    started_s: float = field(default_factory=time.monotonic)

    def error(self, error: grpc.RpcError) -> LoraplexError:
        """The typed error, with what the caller's side knows: the request, and whom it was sent to."""
        typed = from_rpc_error(error)
        if "grpc_code" in typed.metadata:  # no server of ours said it
            typed = self._seen_from_here(typed)
        if self.request_id is not None:
            typed.metadata.setdefault("request_id", self.request_id)
        return typed

    def _seen_from_here(self, error: LoraplexError) -> LoraplexError:
        message, metadata = error.message, error.metadata
        match error:
            case Cancelled():
                return self.closed()
            case ServerUnreachable():
                message = (
                    f"{message.replace('the server', f'the server at {self.target}', 1)}; see that one runs there, and "
                    "that both sides use TLS or neither does"
                )
            case ConnectionLost() if self._is_overdue():
                # The server looked at its clock first.
                return DeadlineExceeded(self._too_late(), metadata=metadata)
            case ConnectionLost():
                message = message.replace("the server", f"the server at {self.target}", 1)
            case DeadlineExceeded() if self.timeout_s is not None:
                message = self._too_late()
            case _:
                return error
        return type(error)(message, retry_after_s=error.retry_after_s, metadata=metadata)

    def _is_overdue(self) -> bool:
        return self.timeout_s is not None and time.monotonic() - self.started_s >= self.timeout_s - CLOCK_SLACK_S

    def _too_late(self) -> str:
        return f"no complete answer within {self.allowed_s or self.timeout_s:g} s; allow more (timeout_s, --timeout)"

    def closed(self) -> Cancelled:
        """What a call ends with whose client is closed meanwhile."""
        metadata = {"request_id": self.request_id} if self.request_id is not None else {}
        return Cancelled("the client was closed before the answer was complete", metadata=metadata)


class Calls:
    """Makes calls for one server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def generate(self, prompt: str | None, options: GenerateOptions) -> Call[Generation]:
        request = _requests.generate_request(prompt, options)
        return self._call(
            _INFERENCE + "Generate",
            request,
            _answers.generation,
            options,
            adapter_id=request.adapter_id,
            request_id=request.request_id,
        )

    def stream(self, prompt: str | None, options: GenerateOptions) -> Call[Chunk]:
        request = _requests.generate_request(prompt, options)
        return self._call(
            _INFERENCE + "GenerateStream",
            request,
            _answers.ChunkReader(request.request_id).read,
            options,
            adapter_id=request.adapter_id,
            request_id=request.request_id,
        )

    def tokenize(
        self,
        text: str | None,
        messages: Sequence[Message] | None,
        omit_generation_prompt: bool,
        omit_special_tokens: bool,
        options: CallOptions,
    ) -> Call[Tokenization]:
        request = _requests.tokenize_request(text, messages, omit_generation_prompt, omit_special_tokens)
        return self._call(_INFERENCE + "Tokenize", request, _answers.tokenization, _requests.call_options(options))

    def info(self, options: CallOptions) -> Call[ServerInfo]:
        request = inference_pb2.GetInfoRequest()
        return self._call(_INFERENCE + "GetInfo", request, _answers.server_info, _requests.call_options(options))

    def load(self, adapter_id: str, pin: bool, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = _requests.load_request(adapter_id, pin)
        return self._adapter_call("LoadAdapter", request, _answers.loaded_adapters, options, adapter_id)

    def unload(self, adapter_id: str, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = _requests.unload_request(adapter_id)
        return self._adapter_call("UnloadAdapter", request, _answers.unloaded_adapters, options, adapter_id)

    def get(self, adapter_id: str, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = _requests.get_request(adapter_id)
        return self._adapter_call("GetAdapter", request, _answers.adapters_of_one_name, options, adapter_id)

    def list(self, request: ListAdaptersRequest, timeout_s: float | None) -> Call[AdapterPage]:
        """One page."""
        return self._call(_ADAPTERS + "ListAdapters", request, _answers.adapter_page, CallOptions(timeout_s=timeout_s))

    def pages(self, request: ListAdaptersRequest, options: CallOptions, *, is_whole: bool) -> Pages:
        """The calls of a listing. `is_whole`: the time that the caller allows is for all of them, not for each."""
        timeout_s = _requests.call_options(options).get("timeout_s", self._settings.timeout_s)
        return Pages(self, request, checked_timeout(timeout_s), is_whole)

    def _adapter_call(
        self,
        method: str,
        request: ProtobufMessage,
        read: Callable[[bytes], tuple[Adapter, ...]],
        options: CallOptions,
        adapter_id: str,
    ) -> Call[tuple[Adapter, ...]]:
        return self._call(_ADAPTERS + method, request, read, _requests.call_options(options), adapter_id=adapter_id)

    def _call(
        self,
        path: str,
        request: ProtobufMessage,
        read: Callable[[bytes], _Answer],
        options: CallOptions | GenerateOptions,
        *,
        adapter_id: str = "",
        request_id: str | None = None,
    ) -> Call[_Answer]:
        timeout_s = checked_timeout(options.get("timeout_s", self._settings.timeout_s))
        return Call(
            path=path,
            request=request.SerializeToString(),
            read=read,
            metadata=self._settings.metadata(adapter_id),
            timeout_s=timeout_s,
            target=self._settings.target,
            request_id=request_id,
        )


class Pages:
    """The calls of one listing, each made with what the one before has answered. As long as there is a `next_call`,
    send it and `take` the answer."""

    def __init__(self, calls: Calls, request: ListAdaptersRequest, timeout_s: float | None, is_whole: bool) -> None:
        self._calls = calls
        self._request = request
        self._timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s if is_whole and timeout_s is not None else None
        self._has_more = True

    def next_call(self) -> Call[AdapterPage] | None:
        if not self._has_more:
            return None
        timeout_s = self._timeout_s
        if self._until_s is not None:
            timeout_s = max(self._until_s - time.monotonic(), MIN_TIMEOUT_S)
        return replace(self._calls.list(self._request, timeout_s), allowed_s=self._timeout_s)

    def take(self, page: AdapterPage) -> tuple[Adapter, ...]:
        self._request.page_token = page.next_page_token
        self._has_more = bool(page.next_page_token)
        return page.adapters
