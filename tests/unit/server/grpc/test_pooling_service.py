"""Pooling service without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.engine_fakes import INFO
from support.tiny_tokenizers import tiny_tokenizer

from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.load import Load
from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_proto.validate import ModelLimits
from loraplex_server.engine.client import EngineState
from loraplex_server.frontend.templates import Templates
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.grpc import pooling_service
from loraplex_server.grpc.middleware import RequestGate
from loraplex_server.grpc.pooling_service import PoolingServicer
from loraplex_server.text.tokenizer import TextTokenizer


def ids(*token_ids: int) -> pooling_pb2.PoolingInput:
    return pooling_pb2.PoolingInput(token_ids=inference_pb2.TokenIds(ids=token_ids))


@pytest.mark.parametrize("num_documents", [3, 4])
async def test_a_query_in_front_of_too_many_documents_is_refused(
    monkeypatch: pytest.MonkeyPatch, num_documents: int
) -> None:
    """A request of a few hundred kilobytes would else take gigabytes: its query is in the prompt of each document."""
    monkeypatch.setattr(pooling_service, "MAX_PAIRED_TOKENS", 3 * (5 + 2))
    limits = ModelLimits(INFO.vocab_size, INFO.max_context_tokens)
    tokenizing = Tokenizing(TextTokenizer(tiny_tokenizer("byte_level")), limits)
    engine: Any = SimpleNamespace(state=EngineState(Load()), unique_id=lambda given: given)
    one = PoolingServicer(engine, INFO, tokenizing, RequestGate(), Templates(tokenizing))
    documents = [ids(8, number) for number in range(num_documents)]
    message = pooling_pb2.ScoreRequest(query=ids(1, 2, 3, 4, 5), inputs=documents)
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    accept = one._accept(message, "r", pooling_service.PoolingParams("classify"), documents, message.query, context)
    monkeypatch.setattr(one._gate, "take_pooling_quota", lambda *given: SimpleNamespace(set_prompt=lambda num: None))
    monkeypatch.setattr(pooling_service, "current_record", lambda: SimpleNamespace())
    if num_documents == 3:
        assert [len(request.prompt_token_ids) for request in await accept] == [7, 7, 7]
        return
    with pytest.raises(InvalidArgument, match="more than 21 tokens together") as caught:
        await accept
    assert caught.value.field == "inputs"
