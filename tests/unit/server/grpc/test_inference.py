"""The inference service's answers that need no engine."""

from __future__ import annotations

from typing import Any, cast

import pytest

from loraplex_proto.v1 import inference_pb2
from loraplex_server.engine.messages import ModelInfo
from loraplex_server.grpc.edge import Edge
from loraplex_server.grpc.inference import InferenceServicer


class NoTokenizer:
    has_chat_template = False


def servicer(*speculation: str) -> InferenceServicer:
    info = ModelInfo("m", "llama", "float32", "cpu", 100, 64, 8, (2,), speculation)
    return InferenceServicer(cast(Any, None), info, cast(Any, NoTokenizer()), Edge())


@pytest.mark.parametrize(
    ("speculation", "kinds", "names"),
    [
        ((), ["off"], []),
        (("prompt_lookup", "medusa"), ["off", "auto", "prompt_lookup", "medusa"], []),
        (
            ("prompt_lookup", "draft_model:tiny", "draft_model:small"),
            ["off", "auto", "prompt_lookup", "draft_model:tiny", "draft_model:small"],
            ["tiny", "small"],
        ),
    ],
)
async def test_info_says_how_requests_may_speculate(
    speculation: tuple[str, ...], kinds: list[str], names: list[str]
) -> None:
    info = await servicer(*speculation).GetInfo(inference_pb2.GetInfoRequest(), None)
    assert list(info.speculation) == kinds
    assert list(info.draft_models) == names
    assert (info.model_id, info.role) == ("m", "worker")
