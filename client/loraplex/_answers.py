"""Answers of the SDK: protobuf messages as records of the library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final, TypeVar, cast

from loraplex.types import (
    Activity,
    Adapter,
    AdapterPlaces,
    AdapterState,
    AdapterTier,
    ChatDelta,
    Chunk,
    Classification,
    Classifications,
    Completion,
    Embeddings,
    FailedCall,
    Generation,
    Message,
    PromptToken,
    ProposerUsage,
    RouterStatus,
    Scores,
    ServerInfo,
    SpecialToken,
    Timings,
    Tokenization,
    TokenizerInfo,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
    WorkerStatus,
)
from loraplex_proto.enums import ADAPTER_STATES, ADAPTER_TIERS, FINISH_REASONS
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2, status_pb2

_Answer = TypeVar("_Answer")

_FINISH_REASONS: Final = {number: reason for reason, number in FINISH_REASONS.items()}
_STATES: Final[dict[int, AdapterState]] = {number: state for state, number in ADAPTER_STATES.items()}
_TIERS: Final[dict[int, AdapterTier]] = {number: tier for tier, number in ADAPTER_TIERS.items()}


def generation(raw: bytes) -> Generation:
    message = inference_pb2.GenerateResponse.FromString(raw)
    return Generation(
        completions=tuple(_completion(one) for one in message.completions),
        usage=_usage(message.usage),
        timings=_record(Timings, message.timings),
        adapter_digest=message.adapter_digest,
        request_id=message.request_id,
        prompt_logprobs=_prompt_logprobs(message),
        prompt_tokens=_prompt_tokens(message),
        seed=message.seed if message.HasField("seed") else None,
    )


class ChunkReader:
    """Turns the messages of one stream into chunks. Keeps the fields that only the first message carries."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.adapter_digest = ""
        self.seed: int | None = None

    def read(self, raw: bytes) -> Chunk:
        message = inference_pb2.GenerateStreamResponse.FromString(raw)
        self.request_id = message.request_id or self.request_id
        self.adapter_digest = message.adapter_digest or self.adapter_digest
        self.seed = message.seed if message.HasField("seed") else self.seed
        return Chunk(
            index=message.index,
            text=message.text_delta,
            token_ids=tuple(message.token_ids),
            request_id=self.request_id,
            adapter_digest=self.adapter_digest,
            logprobs=_logprobs(message.logprobs),
            prompt_logprobs=_prompt_logprobs(message),
            prompt_tokens=_prompt_tokens(message),
            drafted_tokens=message.drafted_tokens,
            accepted_tokens=message.accepted_tokens,
            proposer=message.proposer,
            finish_reason=_FINISH_REASONS.get(message.finish_reason),
            stop_string=message.stop_string if message.HasField("stop_string") else None,
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
            usage=_usage(message.usage) if message.HasField("usage") else None,
            timings=_record(Timings, message.timings) if message.HasField("timings") else None,
            seed=self.seed,
            deltas=tuple(map(_chat_delta, message.deltas)),
            message=_message(message),
        )


def embeddings(raw: bytes) -> Embeddings:
    message = pooling_pb2.EmbedResponse.FromString(raw)
    return Embeddings(tuple(tuple(one.values) for one in message.embeddings), **_pooled(message))


def classifications(raw: bytes) -> Classifications:
    message = pooling_pb2.ClassifyResponse.FromString(raw)
    inputs = tuple(
        Classification(tuple(tuple(row.probabilities) for row in one.rows), tuple(one.starts), tuple(one.ends))
        for one in message.classifications
    )
    return Classifications(tuple(message.labels), inputs, message.per_token, **_pooled(message))


def scores(raw: bytes) -> Scores:
    message = pooling_pb2.ScoreResponse.FromString(raw)
    return Scores(tuple(message.scores), **_pooled(message))


def _pooled(
    message: pooling_pb2.EmbedResponse | pooling_pb2.ClassifyResponse | pooling_pb2.ScoreResponse,
) -> dict[str, Any]:
    """Fields of every answer of PoolingService."""
    return {
        "usage": _usage(message.usage),
        "timings": _record(Timings, message.timings),
        "adapter_digest": message.adapter_digest,
        "request_id": message.request_id,
    }


def tokenization(raw: bytes) -> Tokenization:
    return _record(Tokenization, inference_pb2.TokenizeResponse.FromString(raw))


def detokenized(raw: bytes) -> str:
    return inference_pb2.DetokenizeResponse.FromString(raw).text


def tokenizer_info(raw: bytes) -> TokenizerInfo:
    message = inference_pb2.GetTokenizerInfoResponse.FromString(raw)
    named = {
        name: _record(SpecialToken, getattr(message, name)) if message.HasField(name) else None
        for name in ("bos", "eos", "pad", "unk")
    }
    special = tuple(_record(SpecialToken, one) for one in message.special_tokens)
    return _record(TokenizerInfo, message, special_tokens=special, **named)


def server_info(raw: bytes) -> ServerInfo:
    message = inference_pb2.GetInfoResponse.FromString(raw)
    defaults = {field.name: value for field, value in message.generation_defaults.ListFields()}
    return _record(ServerInfo, message, generation_defaults=defaults)


def router_status(raw: bytes) -> RouterStatus:
    message = status_pb2.GetStatusResponse.FromString(raw)
    return _record(
        RouterStatus,
        message,
        workers=tuple(_worker_status(worker) for worker in message.workers),
        adapters=tuple(
            _record(AdapterPlaces, adapter, tiers=tuple(map(int, adapter.tiers))) for adapter in message.adapters
        ),
        activity=_record(Activity, message.activity),
        errors=tuple(_record(FailedCall, error) for error in message.errors),
    )


def _worker_status(message: status_pb2.WorkerStatus) -> WorkerStatus:
    prefix = "WORKER_STATE_"
    known = message.state in status_pb2.WorkerState.values()
    state = status_pb2.WorkerState.Name(message.state).removeprefix(prefix).lower() if known else "unknown"
    return _record(WorkerStatus, message, state=state, activity=_record(Activity, message.activity))


def adapter_rows(raw: bytes) -> tuple[Adapter, ...]:
    """Adapters of an answer of AdapterService, each of which has its rows in the same field."""
    return adapters(adapter_pb2.ListAdaptersResponse.FromString(raw).adapters)


def adapters(rows: Iterable[adapter_pb2.Adapter]) -> tuple[Adapter, ...]:
    return tuple(
        _record(
            Adapter,
            row,
            state=_STATES.get(row.state, "unknown"),
            tier=_TIERS.get(row.tier, "unknown"),
            num_bytes=row.bytes,
        )
        for row in rows
    )


def _record(cls: type[_Answer], message: Any, **others: Any) -> _Answer:
    """A dataclass with the values of a message's fields of the same names, lists as tuples, and with `others`."""
    for one in fields(cast("Any", cls)):
        if one.name not in others:
            value = getattr(message, one.name)
            others[one.name] = value if isinstance(value, (str, int, float)) else tuple(value)
    return cls(**others)


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
        message=_message(message),
    )


def _message(answer: inference_pb2.Completion | inference_pb2.GenerateStreamResponse) -> Message | None:
    if not answer.HasField("message"):
        return None
    message = answer.message
    found: Message = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    return found


def _chat_delta(delta: inference_pb2.ChatDelta) -> ChatDelta:
    call = delta.tool_call
    called = ToolCallDelta(call.index, call.arguments_json, call.id, call.name) if delta.HasField("tool_call") else None
    return ChatDelta(delta.content, delta.reasoning, called)


def _usage(message: inference_pb2.Usage) -> Usage:
    proposers = tuple(_record(ProposerUsage, one) for one in message.proposers)
    return _record(Usage, message, proposers=proposers)


def _logprobs(messages: Iterable[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=one.token_id,
            text=one.text,
            logprob=one.logprob,
            top=_top(one),
            token_bytes=one.bytes,
            is_special=one.is_special,
        )
        for one in messages
    )


def _top(message: inference_pb2.TokenLogprob | inference_pb2.PromptToken) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(one.token_id, one.text, one.logprob, one.bytes) for one in message.top)


def _prompt_tokens(
    message: inference_pb2.GenerateResponse | inference_pb2.GenerateStreamResponse,
) -> tuple[PromptToken, ...]:
    return tuple(
        PromptToken(
            token_id=one.token_id,
            text=one.text,
            logprob=one.logprob if one.HasField("logprob") else None,
            top=_top(one),
            token_bytes=one.bytes,
            is_special=one.is_special,
        )
        for one in message.prompt_tokens
    )


def _prompt_logprobs(
    message: inference_pb2.GenerateResponse | inference_pb2.GenerateStreamResponse,
) -> tuple[TokenLogprob, ...]:
    """Logprobs of the prompt. The server sends them once: in the prompt's tokens, where those are sent."""
    if not message.prompt_tokens:
        return _logprobs(message.prompt_logprobs)
    return tuple(
        TokenLogprob(one.token_id, one.text, one.logprob, _top(one), one.bytes, one.is_special)
        for one in message.prompt_tokens
        if one.HasField("logprob")
    )
