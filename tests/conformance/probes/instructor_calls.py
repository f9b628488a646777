"""instructor: pydantic models out of chats, by JSON schema and by tools."""

from __future__ import annotations

import instructor
from calls import call, facts, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": facts.prompt}]
SERVER = {"base_url": facts.url + "/v1", "api_key": "none", "timeout": 60}
ASKED = {"messages": MESSAGES, "max_tokens": 200, "temperature": 1, "seed": 1, "max_retries": 0}


class Pair(BaseModel):
    first: bool
    second: bool


@call("create, JSON_SCHEMA")
def _() -> None:
    client = instructor.from_openai(OpenAI(**SERVER), mode=instructor.Mode.JSON_SCHEMA)
    for name in (facts.base, facts.adapters[0]):
        assert isinstance(client.chat.completions.create(model=name, response_model=Pair, **ASKED), Pair)


@call("create, TOOLS")
def _() -> None:
    client = instructor.from_openai(OpenAI(**SERVER), mode=instructor.Mode.TOOLS)
    assert isinstance(client.chat.completions.create(model=facts.base, response_model=Pair, **ASKED), Pair)


@call("create_partial, JSON_SCHEMA")
def _() -> None:
    client = instructor.from_openai(OpenAI(**SERVER), mode=instructor.Mode.JSON_SCHEMA)
    parts = list(client.chat.completions.create_partial(model=facts.base, response_model=Pair, **ASKED))
    assert isinstance(parts[-1].first, bool)


@call("async create, JSON_SCHEMA")
async def _() -> None:
    client = instructor.from_openai(AsyncOpenAI(**SERVER), mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(await client.chat.completions.create(model=facts.base, response_model=Pair, **ASKED), Pair)


if __name__ == "__main__":
    run()
