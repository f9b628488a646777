"""OpenAI's routes over a router that is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import chain
from typing import Any, cast
from unittest.mock import Mock

from starlette.requests import Request
from starlette.responses import StreamingResponse

from loraplex_proto.v1 import adapter_pb2
from loraplex_router.http.openai.routes import OpenAIRoutes
from loraplex_router.http.router_calls import RouterCalls


async def test_models_are_encoded_and_sent_page_by_page() -> None:
    """50,000 at once held every stream of the router up for 140 ms."""
    pages = [[f"a{number}{letter}" for letter in "xyz"] for number in range(4)]

    async def adapter_pages(*_: Any, **__: Any) -> AsyncIterator[list[adapter_pb2.Adapter]]:
        for page in pages:
            yield [adapter_pb2.Adapter(adapter_id=name, labels=["ä"]) for name in page]

    replicas = Mock(max_context_tokens=8)
    router = Mock(base_names=lambda: ("tiny",), adapter_pages=adapter_pages, replicas=replicas)
    answer = await OpenAIRoutes(cast(RouterCalls, router)).models(Request({"type": "http"}))
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    assert isinstance(answer, StreamingResponse)
    others = asyncio.create_task(take_turns())
    parts, turns = list[bytes](), list[int]()
    async for part in answer.body_iterator:
        parts.append(cast(bytes, part))
        turns.append(num_turns)
    others.cancel()
    cards = json.loads(b"".join(parts))["data"]
    assert [card["id"] for card in cards] == ["tiny", *chain(*pages)]
    assert cards[1]["loraplex"]["labels"] == ["ä"]
    assert [part.count(b'"id"') for part in parts] == [1, 3, 3, 3, 3, 0]
    assert len(set(turns)) == len(turns)
    assert int(answer.headers["content-length"]) == len(b"".join(parts))
    assert answer.headers["content-type"] == "application/json"
