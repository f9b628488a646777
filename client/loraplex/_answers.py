"""Conversion of the wire's messages to the SDK's types.

Pure, but for what a stream's first message said about all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from loraplex.types import (
    Adapter,
    AdapterState,
    AdapterTier,
    Chunk,
    Completion,
    Generation,
    ProposerUsage,
    ServerInfo,
    Timings,
    Tokenization,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from loraplex_proto.enums import ADAPTER_STATES, ADAPTER_TIERS, FINISH_REASONS
from loraplex_proto.v1 import adapter_pb2, inference_pb2

_FINISH_REASONS: Final = {number: reason for reason, number in FINISH_REASONS.items()}
_STATES: Final[dict[int, AdapterState]] = {number: state for state, number in ADAPTER_STATES.items()}
_TIERS: Final[dict[int, AdapterTier]] = {number: tier for tier, number in ADAPTER_TIERS.items()}


def generation(raw: bytes) -> Generation:
    message = inference_pb2.GenerateResponse.FromString(raw)
    return Generation(
        completions=tuple(_completion(one) for one in message.completions),
        usage=_usage(message.usage),
        timings=_timings(message.timings),
        adapter_digest=message.adapter_digest,
        request_id=message.request_id,
        prompt_logprobs=_logprobs(message.prompt_logprobs),
    )


class ChunkReader:
    """Turns the messages of one stream into chunks. Owns what only the first message carries."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.adapter_digest = ""

    def read(self, raw: bytes) -> Chunk:
        message = inference_pb2.GenerateStreamResponse.FromString(raw)
        self.request_id = message.request_id or self.request_id
        self.adapter_digest = message.adapter_digest or self.adapter_digest
        return Chunk(
            index=message.index,
            text=message.text_delta,
            token_ids=tuple(message.token_ids),
            request_id=self.request_id,
            adapter_digest=self.adapter_digest,
            logprobs=_logprobs(message.logprobs),
            prompt_logprobs=_logprobs(message.prompt_logprobs),
            drafted_tokens=message.drafted_tokens,
            accepted_tokens=message.accepted_tokens,
            proposer=message.proposer,
            finish_reason=_FINISH_REASONS.get(message.finish_reason),
            stop_string=message.stop_string if message.HasField("stop_string") else None,
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
            usage=_usage(message.usage) if message.HasField("usage") else None,
            timings=_timings(message.timings) if message.HasField("timings") else None,
        )


def tokenization(raw: bytes) -> Tokenization:
    message = inference_pb2.TokenizeResponse.FromString(raw)
    return Tokenization(tuple(message.token_ids), tuple(message.tokens))


def server_info(raw: bytes) -> ServerInfo:
    message = inference_pb2.GetInfoResponse.FromString(raw)
    return ServerInfo(
        model_id=message.model_id,
        model_type=message.model_type,
        version=message.version,
        role=message.role,
        max_context_tokens=message.max_context_tokens,
        vocab_size=message.vocab_size,
        dtype=message.dtype,
        device=message.device,
        max_lora_rank=message.max_lora_rank,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
        speculation=tuple(message.speculation),
        draft_models=tuple(message.draft_models),
    )


def loaded_adapters(raw: bytes) -> tuple[Adapter, ...]:
    return _adapters(adapter_pb2.LoadAdapterResponse.FromString(raw).adapters)


def unloaded_adapters(raw: bytes) -> tuple[Adapter, ...]:
    return _adapters(adapter_pb2.UnloadAdapterResponse.FromString(raw).adapters)


def adapters_of_one_name(raw: bytes) -> tuple[Adapter, ...]:
    return _adapters(adapter_pb2.GetAdapterResponse.FromString(raw).adapters)


@dataclass(frozen=True, slots=True)
class AdapterPage:
    """Of a listing; without a token it is the last one."""

    adapters: tuple[Adapter, ...]
    next_page_token: str


def adapter_page(raw: bytes) -> AdapterPage:
    message = adapter_pb2.ListAdaptersResponse.FromString(raw)
    return AdapterPage(_adapters(message.adapters), message.next_page_token)


def _adapters(rows: Iterable[adapter_pb2.Adapter]) -> tuple[Adapter, ...]:
    return tuple(
        Adapter(
            adapter_id=row.adapter_id,
            kind=row.kind,
            digest=row.digest,
            state=_STATES.get(row.state, "unknown"),
            tier=_TIERS.get(row.tier, "unknown"),
            num_bytes=row.bytes,
            rank=row.rank,
            running_requests=row.running_requests,
            pinned=row.pinned,
            error=row.error,
            error_reason=row.error_reason,
            worker=row.worker,
        )
        for row in rows
    )


def _completion(message: inference_pb2.Completion) -> Completion:
    return Completion(
        index=message.index,
        text=message.text,
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=_usage(message.usage),
    )


def _usage(message: inference_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
        proposers=tuple(ProposerUsage(one.name, one.drafted_tokens, one.accepted_tokens) for one in message.proposers),
        steps=message.steps,
    )


def _timings(message: inference_pb2.Timings) -> Timings:
    return Timings(message.queue_s, message.time_to_first_token_s, message.total_s)


def _logprobs(messages: Iterable[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=one.token_id,
            text=one.text,
            logprob=one.logprob,
            top=tuple(TopLogprob(top.token_id, top.text, top.logprob) for top in one.top),
        )
        for one in messages
    )
