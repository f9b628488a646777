"""Token ids as the wire has them: the answer of Tokenize.

Imports little, because the process that tokenizes long texts makes their answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from loraplex_proto.v1 import inference_pb2
from loraplex_server.text.vocabulary import Vocabulary

# The interpreter's lock is held for so many tokens.
_TOKENS_AT_ONCE: Final = 1 << 14


def tokenize_response(vocabulary: Vocabulary, token_ids: Sequence[int]) -> bytes:
    """Serialized in steps: messages behind each other are read as one."""
    steps = range(0, len(token_ids), _TOKENS_AT_ONCE)
    return b"".join(_part(vocabulary, token_ids[start : start + _TOKENS_AT_ONCE]) for start in steps)


def _part(vocabulary: Vocabulary, token_ids: Sequence[int]) -> bytes:
    texts = map(vocabulary.text, token_ids)
    return inference_pb2.TokenizeResponse(token_ids=token_ids, tokens=texts).SerializeToString()
