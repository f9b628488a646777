"""Estimated tokens of requests whose prompts are not tokenized yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from loraplex_proto.v1 import inference_pb2, pooling_pb2

TOKEN_BYTES: Final = 4  # most tokenizers make about one token of four bytes


def estimated_tokens(prompt: inference_pb2.GenerateRequest | pooling_pb2.PoolingInput) -> int:
    """Tokens of a prompt, by its size alone: token ids are counted, of a chat everything but its template."""
    match prompt.WhichOneof("input"):
        case "token_ids":
            return len(prompt.token_ids.ids)
        case "chat":
            num_bytes = prompt.chat.ByteSize() - len(prompt.chat.template.encode())
        case _:
            num_bytes = len(prompt.text.encode())
    return num_bytes // TOKEN_BYTES + 1


def estimated_work(request: inference_pb2.GenerateRequest, max_context_tokens: int) -> tuple[int, int]:
    """Tokens of a request's prompt, cut as it asks, and those that each of its completions may have at most."""
    names_max_tokens, num_prompt = request.stopping.HasField("max_tokens"), estimated_tokens(request)
    if request.HasField("truncate_prompt"):
        fitting = max(1, max_context_tokens - (request.stopping.max_tokens if names_max_tokens else 1))
        num_prompt = min(num_prompt, request.truncate_prompt.max_tokens or fitting)
    room = max(1, max_context_tokens - num_prompt)
    return num_prompt, min(request.stopping.max_tokens, room) if names_max_tokens else room


def estimated_pooling_tokens(
    inputs: Sequence[pooling_pb2.PoolingInput], query: pooling_pb2.PoolingInput | None = None
) -> int:
    """Tokens of all inputs, each with the query in front."""
    num_query = 0 if query is None else estimated_tokens(query)
    return sum(map(estimated_tokens, inputs)) + len(inputs) * num_query
