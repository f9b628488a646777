"""Every call of the SDK, ready to be sent: path, message, metadata, deadline, and how to read the answer and the error.

Both clients send what this module makes, so they cannot differ in anything but how they wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message as ProtobufMessage

from loraplex import _answers, _requests
from loraplex._settings import Settings, checked_timeout
from loraplex.types import Adapter, CallOptions, Chunk, GenerateOptions, Generation, Message, ServerInfo, Tokenization
from loraplex_proto.errors import Cancelled, DeadlineExceeded, LoraplexError, ResourceExhausted, Unavailable
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import adapter_pb2, inference_pb2

_Answer = TypeVar("_Answer")

_INFERENCE: Final = "/loraplex.v1.InferenceService/"
_ADAPTERS: Final = "/loraplex.v1.AdapterService/"

# What gRPC itself says.
_CLOSED_CHANNEL: Final = "Channel closed"
_TOO_LARGE: Final = re.compile(r"SERVER: Received message larger than max \((\d+) vs\. (\d+)\)")


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

    def error(self, error: grpc.RpcError) -> LoraplexError:
        """The typed error, with what the caller's side knows: the request, and whom it was sent to."""
        typed = from_rpc_error(error)
        is_local = "grpc_code" in typed.metadata  # no server of ours said it
        if is_local and type(typed) is Unavailable:
            why = typed.message.rpartition("Failed to connect to remote host: ")[2]
            typed.message = (
                f"the server at {self.target} cannot be reached: {why}; see that one runs there, and that both sides "
                "use TLS or neither does"
            )
        elif is_local and type(typed) is DeadlineExceeded and self.timeout_s is not None:
            typed.message = f"no complete answer within {self.timeout_s:g} s; allow more (timeout_s, --timeout)"
        elif is_local and type(typed) is Cancelled and _CLOSED_CHANNEL in typed.message:
            return self.closed()
        elif is_local and type(typed) is ResourceExhausted and (sizes := _TOO_LARGE.search(typed.message)):
            typed.message = (
                f"the request has {sizes[1]} bytes, and the server takes {sizes[2]}; send less, or start the server "
                "with a larger --max-message"
            )
        typed.args = (typed.message,)
        if self.request_id is not None:
            typed.metadata.setdefault("request_id", self.request_id)
        return typed

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

    def list(self, include_unloaded: bool, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = adapter_pb2.ListAdaptersRequest(include_unloaded=include_unloaded)
        return self._adapter_call("ListAdapters", request, _answers.listed_adapters, options, "")

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
