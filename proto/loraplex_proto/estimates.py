"""Estimated tokens of prompts that are not tokenized yet."""

from __future__ import annotations

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
