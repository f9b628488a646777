"""langchain-openai: chat models and completions over OpenAI's client."""

from __future__ import annotations

import openai
from calls import call, equal, facts, raises, run
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

BASE, ADAPTER = facts.base, facts.adapters[0]
SERVER = {"base_url": facts.url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
SHORT = {"max_tokens": facts.max_tokens, "temperature": 0}


class Pair(BaseModel):
    """A pair."""

    first: bool
    second: bool


def chat(model: str, **more: object) -> ChatOpenAI:
    return ChatOpenAI(model=model, **{**SERVER, **SHORT, **more})


@call("ChatOpenAI.invoke")
def _() -> None:
    for name, text in vars(facts.chats).items():
        answer = chat(name).invoke(facts.prompt)
        equal(answer.content, text)
        equal(answer.usage_metadata["output_tokens"], facts.max_tokens)
        equal(answer.response_metadata["finish_reason"], "length")


@call("ChatOpenAI.invoke, messages")
def _() -> None:
    messages = [SystemMessage("Be short."), HumanMessage("hi"), AIMessage("ho"), HumanMessage("hi")]
    assert chat(BASE).invoke(messages, logprobs=True, stop=["zzz"], seed=1).response_metadata["logprobs"]


@call("ChatOpenAI.stream")
def _() -> None:
    chunks = list(chat(ADAPTER, stream_usage=True).stream(facts.prompt))
    equal("".join(chunk.content for chunk in chunks), getattr(facts.chats, ADAPTER))
    equal(sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks), facts.max_tokens)


@call("ChatOpenAI.ainvoke, astream, batch")
async def _() -> None:
    model = chat(ADAPTER)
    equal((await model.ainvoke(facts.prompt)).content, getattr(facts.chats, ADAPTER))
    equal("".join([one.content async for one in model.astream(facts.prompt)]), getattr(facts.chats, ADAPTER))
    answers = await model.abatch([facts.prompt] * 4)
    equal([answer.content for answer in answers], [getattr(facts.chats, ADAPTER)] * 4)


@call("ChatOpenAI.with_structured_output, json_schema")
def _() -> None:
    model = chat(BASE, max_tokens=200).with_structured_output(Pair, method="json_schema")
    assert isinstance(model.invoke(facts.prompt), Pair)


@call("ChatOpenAI.with_structured_output, function_calling")
def _() -> None:
    model = chat(BASE, max_tokens=200).with_structured_output(Pair, method="function_calling")
    assert isinstance(model.invoke(facts.prompt), Pair)


@call("ChatOpenAI.bind_tools")
def _() -> None:
    model = chat(BASE, max_tokens=200).bind_tools([Pair], tool_choice="Pair")
    answer = model.invoke(facts.prompt)
    equal(answer.tool_calls[0]["name"], "Pair")
    messages = [HumanMessage("hi"), answer, ToolMessage("done", tool_call_id=answer.tool_calls[0]["id"])]
    assert chat(BASE).invoke(messages)


@call("OpenAI.invoke, stream")
def _() -> None:
    model = OpenAI(model=ADAPTER, **SERVER, **SHORT)
    equal(model.invoke(facts.prompt), getattr(facts.texts, ADAPTER))
    equal("".join(model.stream(facts.prompt)), getattr(facts.texts, ADAPTER))


@call("OpenAIEmbeddings.embed_documents")
def _() -> None:
    model = OpenAIEmbeddings(model=BASE, base_url=facts.url + "/v1", api_key="none", check_embedding_ctx_length=False)
    equal(len(model.embed_documents(["hi", "ho"])), 2)


@call("errors")
def _() -> None:
    raises(openai.NotFoundError, chat("nobody").invoke, facts.prompt)
    raises(openai.NotFoundError, lambda: list(chat("nobody").stream(facts.prompt)))
    raises(openai.BadRequestError, chat(BASE).invoke, "x" * 9000)


if __name__ == "__main__":
    run()
