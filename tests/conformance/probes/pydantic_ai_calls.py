"""pydantic-ai: agents with outputs of a schema and tools, over chats and over Responses."""

from __future__ import annotations

from calls import call, equal, facts, raises, run
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=facts.url + "/v1", api_key="none")
MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
ADAPTER = facts.adapters[0]
SHORT = {"max_tokens": facts.max_tokens, "temperature": 0}
LONG = {"max_tokens": 400, "temperature": 1, "extra_body": {"seed": 1}}


class Pair(BaseModel):
    first: bool
    second: bool


def register(kind: str) -> None:
    def agent(name: str = ADAPTER, **options: object) -> Agent:
        return Agent(MODELS[kind](name, provider=PROVIDER), **options)

    @call(f"run_sync, {kind}")
    def _() -> None:
        answer = agent().run_sync(facts.prompt, model_settings=SHORT)
        equal(answer.output, getattr(facts.chats, ADAPTER))
        equal(answer.usage.output_tokens, facts.max_tokens)

    @call(f"run_stream, {kind}")
    async def _() -> None:
        async with agent().run_stream(facts.prompt, model_settings=SHORT) as stream:
            texts = [text async for text in stream.stream_text(delta=True)]
        equal("".join(texts), getattr(facts.chats, ADAPTER))

    @call(f"NativeOutput, {kind}")
    def _() -> None:
        answer = agent(output_type=NativeOutput(Pair)).run_sync(facts.prompt, model_settings=LONG)
        assert isinstance(answer.output, Pair)

    @call(f"ToolOutput beside a tool, {kind}")
    def _() -> None:
        helped = agent(output_type=ToolOutput(Pair))
        helped.tool_plain(add)
        answer = helped.run_sync(facts.prompt, model_settings={**LONG, "parallel_tool_calls": False})
        assert isinstance(answer.output, Pair)

    @call(f"errors, {kind}")
    def _() -> None:
        equal(raises(ModelHTTPError, agent("nobody").run_sync, facts.prompt).status_code, 404)
        raises(ModelContextWindowExceededError, agent().run_sync, "x" * 9000)


def add(first: bool, second: bool) -> str:
    """Adds."""
    return str(first + second)


for one in MODELS:
    register(one)


if __name__ == "__main__":
    run()
