"""Admission of generate requests: their names checked, an id, an estimate of their work.

Reads what routing and admission need and leaves the rest to the worker, which validates the message in full. Pure.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from loraplex_proto.v1 import inference_pb2
from loraplex_proto.validate import MAX_CHAT_MESSAGES, MAX_COMPLETIONS, adapters_in, check_names, parse
from loraplex_runtime.auth import Identity

# Text is not tokenized here; most tokenizers make about one token of four bytes.
BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class Admitted:
    """A generate request that may go to a worker."""

    raw: bytes  # what the client sent; with a request id at its end where the client had none
    request_id: str
    adapter_ids: tuple[str, ...]
    num_prompt_tokens: int  # estimated
    num_output_tokens: int  # at most, of all completions together
    shows_tokens: bool
    adapter_id: str = ""
    priority: int = 0
    draft_model: str | None = None  # that it speculates with; empty where any will do

    @property
    def work_tokens(self) -> int:
        """In the unit that workers report: tokens to compute and tokens that may still be made."""
        return self.num_prompt_tokens + self.num_output_tokens


def admit_generate(raw: bytes, identity: Identity, max_context_tokens: int) -> Admitted:
    """Raises what `check_names` raises, and AdapterNotFound for adapters that are not this tenant's."""
    request = parse(inference_pb2.GenerateRequest, raw)
    check_names(request)
    adapter_ids = adapters_in(request)
    identity.check_adapters(adapter_ids)
    request_id = request.request_id
    if not request_id:
        # Two serialized messages in a row are their merge: nothing is encoded again.
        request_id = uuid.uuid4().hex
        raw += inference_pb2.GenerateRequest(request_id=request_id).SerializeToString()
    num_prompt_tokens = _num_prompt_tokens(request)
    room = max(1, max_context_tokens - num_prompt_tokens)
    wanted = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else room
    return Admitted(
        raw=raw,
        request_id=request_id,
        adapter_ids=adapter_ids,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=min(wanted, room) * min(max(1, request.n), MAX_COMPLETIONS),
        shows_tokens=not request.output.omit_token_ids,
        adapter_id=request.adapter_id,
        priority=request.priority,
        draft_model=_draft_model(request.speculation),
    )


def _draft_model(speculation: inference_pb2.Speculation) -> str | None:
    return speculation.draft_model.name if speculation.WhichOneof("kind") == "draft_model" else None


def _num_prompt_tokens(request: inference_pb2.GenerateRequest) -> int:
    match request.WhichOneof("input"):
        case "token_ids":
            return len(request.token_ids.ids)
        case "chat":
            num_chars = sum(len(message.content) for message in request.chat.messages[:MAX_CHAT_MESSAGES])
        case _:
            num_chars = len(request.text)
    return num_chars // BYTES_PER_TOKEN + 1
