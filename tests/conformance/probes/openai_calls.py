"""openai for Python, 1.x and 3.x."""

from __future__ import annotations

import base64
import json
import struct

import openai
from calls import call, equal, facts, raises, raises_async, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

BASE, ADAPTER = facts.base, facts.adapters[0]
ASKED = {"prompt": facts.prompt, "max_tokens": facts.max_tokens, "temperature": 0}
# The helper `.stream()` raises for a text that ends by its length.
ENDING = {"max_tokens": 40, "extra_body": {"min_tokens": 6, "stop_token_ids": list(range(0, 256, 2))}}
CHAT = {"messages": [{"role": "user", "content": facts.prompt}], "max_tokens": facts.max_tokens, "temperature": 0}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]
client = OpenAI(base_url=facts.url + "/v1", api_key="none", timeout=60)


def async_client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=facts.url + "/v1", api_key="none", timeout=60)


class Pair(BaseModel):
    first: bool
    second: bool


# --- models -----------------------------------------------------------------------------------------------------------


@call("models.list")
def _() -> None:
    cards = client.models.list().data
    equal(cards[0].id, BASE)
    equal([card.id for card in cards[1:]], facts.adapters)
    assert all(card.parent == BASE for card in cards[1:])


@call("models.retrieve")
def _() -> None:
    equal(client.models.retrieve(ADAPTER).id, ADAPTER)
    error = raises(openai.NotFoundError, client.models.retrieve, "nobody")
    equal((error.code, error.param), ("model_not_found", "model"))


# --- completions ------------------------------------------------------------------------------------------------------


@call("completions.create")
def _() -> None:
    for name, text in vars(facts.texts).items():
        answer = client.completions.create(model=name, **ASKED)
        equal(answer.choices[0].text, text)
        equal(answer.model, name)
        equal(answer.usage.completion_tokens, facts.max_tokens)
        equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
        equal(answer.loraplex["adapter_id"], None if name == BASE else name)
    assert len(set(vars(facts.texts).values())) == len(vars(facts.texts)), "each adapter has its own text"


@call("completions.create, base:adapter")
def _() -> None:
    answer = client.completions.create(model=f"{BASE}:{ADAPTER}", **ASKED)
    equal(answer.choices[0].text, getattr(facts.texts, ADAPTER))


@call("completions.create, 16 tokens by default")
def _() -> None:
    equal(
        client.completions.create(model=BASE, prompt="hi", extra_body={"ignore_eos": True}).usage.completion_tokens, 16
    )


@call("completions.create(stream=True)")
def _() -> None:
    for name, text in vars(facts.texts).items():
        chunks = list(
            client.completions.create(model=name, stream=True, stream_options={"include_usage": True}, **ASKED)
        )
        *chunks, last = chunks
        equal("".join(chunk.choices[0].text for chunk in chunks), text)
        equal(chunks[-1].choices[0].finish_reason, "length")
        equal((last.choices, last.usage.completion_tokens), ([], facts.max_tokens))
        assert last.usage.prompt_tokens_details.cached_tokens >= 0


@call("completions.create(stream=True), left early")
def _() -> None:
    with client.completions.create(model=BASE, stream=True, **{**ASKED, "max_tokens": 400}) as stream:
        next(iter(stream))
    equal(client.completions.create(model=BASE, **ASKED).choices[0].text, getattr(facts.texts, BASE))


@call("async completions.create")
async def _() -> None:
    async with async_client() as other:
        answer = await other.completions.create(model=ADAPTER, **ASKED)
        equal(answer.choices[0].text, getattr(facts.texts, ADAPTER))
        stream = await other.completions.create(model=ADAPTER, stream=True, **ASKED)
        equal("".join([chunk.choices[0].text async for chunk in stream]), answer.choices[0].text)


@call("completions.create, lists of prompts and ids")
def _() -> None:
    answer = client.completions.create(
        model=BASE, **{**ASKED, "prompt": ["hi", facts.prompt], "n": 2, "temperature": 1}
    )
    equal([choice.index for choice in answer.choices], [0, 1, 2, 3])
    answer = client.completions.create(model=BASE, **{**ASKED, "prompt": facts.prompt_ids})
    equal(answer.choices[0].text, getattr(facts.texts, BASE))
    answer = client.completions.create(model=BASE, **{**ASKED, "prompt": [facts.prompt_ids, facts.prompt_ids]})
    equal([choice.text for choice in answer.choices], [getattr(facts.texts, BASE)] * 2)


@call("completions.create, logprobs and echo")
def _() -> None:
    choice = client.completions.create(model=ADAPTER, logprobs=2, echo=True, **ASKED).choices[0]
    equal(choice.text, facts.prompt + getattr(facts.texts, ADAPTER))
    logprobs = choice.logprobs
    equal(len(logprobs.tokens), len(facts.prompt_ids) + facts.max_tokens)
    equal(logprobs.token_logprobs[0], None)
    assert all(one <= 0 for one in logprobs.token_logprobs[1:])
    assert all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))


@call("completions.create, max_tokens=0 with echo")
def _() -> None:
    choice = client.completions.create(model=BASE, prompt=facts.prompt, max_tokens=0, echo=True, logprobs=0).choices[0]
    equal(choice.text, facts.prompt)
    equal(len(choice.logprobs.tokens), len(facts.prompt_ids))


@call("completions.create, seed and sampling")
def _() -> None:
    drawn = {
        "temperature": 1.0,
        "top_p": 0.9,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "logit_bias": {"5": -1},
    }
    texts = [
        client.completions.create(model=BASE, prompt="hi", seed=seed, max_tokens=16, **drawn).choices[0].text
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2], texts


@call("completions.create, stop")
def _() -> None:
    text = getattr(facts.texts, BASE)
    stop = text[4]
    answer = client.completions.create(model=BASE, stop=[stop], **ASKED).choices[0]
    equal((answer.text, answer.finish_reason), (text.partition(stop)[0], "stop"))


@call("completions.create, best_of")
def _() -> None:
    answer = client.completions.create(model=BASE, prompt="hi", max_tokens=4, best_of=3, n=1)
    equal(len(answer.choices), 1)


@call("completions.create, vLLM's fields")
def _() -> None:
    more = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "stop_token_ids": [5],
        "ignore_eos": True,
    }
    more |= {"priority": 1, "cache_salt": "a", "return_token_ids": True, "request_id": "mine"}
    answer = client.completions.create(model=BASE, prompt=facts.prompt, max_tokens=8, extra_body=more)
    equal(answer.id, "cmpl-mine")
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens


@call("completions.create, speculation")
def _() -> None:
    for speculation in ("off", "auto", "prompt_lookup", {"kind": "prompt_lookup", "max_draft_tokens": 4}):
        answer = client.completions.create(model=ADAPTER, extra_body={"speculation": speculation}, **ASKED)
        equal(answer.choices[0].text, getattr(facts.texts, ADAPTER))


@call("completions.create, truncate_prompt_tokens")
def _() -> None:
    answer = client.completions.create(model=BASE, extra_body={"truncate_prompt_tokens": 4}, **ASKED)
    equal(answer.usage.prompt_tokens, 4)


@call("completions.create, structured_outputs")
def _() -> None:
    more = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(model=BASE, prompt="?", max_tokens=8, extra_body=more)
    assert answer.choices[0].text in ("yes", "no"), answer.choices[0].text


# --- chats ------------------------------------------------------------------------------------------------------------


@call("chat.completions.create")
def _() -> None:
    for name, text in vars(facts.chats).items():
        answer = client.chat.completions.create(model=name, **CHAT)
        equal(answer.choices[0].message.content, text)
        equal(answer.choices[0].message.role, "assistant")
        assert answer.system_fingerprint


@call("chat.completions.create, roles and parts")
def _() -> None:
    parts = [{"type": "text", "text": facts.prompt[:3]}, {"type": "text", "text": facts.prompt[3:]}]
    answer = client.chat.completions.create(model=BASE, **{**CHAT, "messages": [{"role": "user", "content": parts}]})
    equal(answer.choices[0].message.content, getattr(facts.chats, BASE))
    messages = [{"role": role, "content": "hi"} for role in ("system", "user", "assistant", "user")]
    assert client.chat.completions.create(model=BASE, **{**CHAT, "messages": messages}).choices


@call("chat.completions.create, developer role")
def _() -> None:
    messages = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "hi"}]
    assert client.chat.completions.create(model=BASE, **{**CHAT, "messages": messages}).choices


@call("chat.completions.create, n=2 and logprobs")
def _() -> None:
    more = {**CHAT, "temperature": 1, "seed": 1}
    answer = client.chat.completions.create(model=ADAPTER, n=2, logprobs=True, top_logprobs=2, **more)
    equal([choice.index for choice in answer.choices], [0, 1])
    for choice in answer.choices:
        for row in choice.logprobs.content:
            assert row.logprob <= 0
            equal(len(row.top_logprobs), 2)
            assert isinstance(row.bytes, list), row


@call("chat.completions.create, max_completion_tokens")
def _() -> None:
    answer = client.chat.completions.create(model=BASE, messages=CHAT["messages"], max_completion_tokens=3)
    assert answer.usage.completion_tokens <= 3


@call("chat.completions.create(stream=True)")
def _() -> None:
    for name, text in vars(facts.chats).items():
        stream = client.chat.completions.create(model=name, stream=True, stream_options={"include_usage": True}, **CHAT)
        *chunks, last = stream
        equal(chunks[0].choices[0].delta.role, "assistant")
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), text)
        equal(last.usage.completion_tokens, facts.max_tokens)


@call("chat.completions.stream(), n=2")
def _() -> None:
    with client.chat.completions.stream(model=BASE, n=2, **{**CHAT, **ENDING, "temperature": 1, "seed": 2}) as stream:
        seen = ["", ""]
        for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    seen[choice.index] += choice.delta.content or ""
        final = stream.get_final_completion()
    equal([choice.message.content for choice in final.choices], seen)


@call("async chat.completions.stream(), n=2")
async def _() -> None:
    async with async_client() as other, other.chat.completions.stream(model=BASE, n=2, **{**CHAT, **ENDING}) as stream:
        final = await stream.get_final_completion()
    texts = [choice.message.content for choice in final.choices]
    equal(texts[0], texts[1])
    assert texts[0]


@call("chat.completions.create, json_object")
def _() -> None:
    answer = client.chat.completions.create(
        model=BASE, messages=CHAT["messages"], response_format={"type": "json_object"}, max_tokens=200, seed=1
    )
    choice = answer.choices[0]
    assert choice.message.content.startswith("{"), choice
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@call("chat.completions.parse")
def _() -> None:
    answer = client.chat.completions.parse(
        model=BASE, messages=CHAT["messages"], response_format=Pair, max_tokens=200, temperature=1, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Pair), answer


@call("chat.completions.create, tools required")
def _() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        answer = client.chat.completions.create(
            model=BASE, messages=CHAT["messages"], tools=TOOLS, tool_choice=choice, max_tokens=200, seed=1
        )
        (tool_call, *_) = answer.choices[0].message.tool_calls
        equal(tool_call.function.name, "add")
        equal(set(json.loads(tool_call.function.arguments)), {"a", "b"})
        equal(answer.choices[0].finish_reason, "tool_calls")


@call("chat.completions.stream(), tools required")
def _() -> None:
    more = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "seed": 1, "parallel_tool_calls": False}
    with client.chat.completions.stream(model=BASE, messages=CHAT["messages"], **more) as stream:
        final = stream.get_final_completion()
    (tool_call,) = final.choices[0].message.tool_calls
    equal(set(json.loads(tool_call.function.arguments)), {"a", "b"})


@call("chat.completions.create, tools auto")
def _() -> None:
    answer = client.chat.completions.create(model=BASE, tools=TOOLS, **CHAT)
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


@call("chat.completions.create, an answer with tool calls comes back")
def _() -> None:
    messages = [
        {"role": "user", "content": "1 + 3?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    ]
    assert client.chat.completions.create(model=BASE, **{**CHAT, "messages": messages}).choices


# --- other routes -----------------------------------------------------------------------------------------------------


@call("embeddings.create")
def _() -> None:
    answer = client.embeddings.create(model=BASE, input=["hi", facts.prompt])
    equal([row.index for row in answer.data], [0, 1])
    norm = sum(one * one for one in answer.data[0].embedding)
    assert abs(norm - 1) < 1e-3, norm


@call("embeddings.create, base64, floats and dimensions")
def _() -> None:
    raw = client.embeddings.create(model=BASE, input="hi", encoding_format="base64").data[0].embedding
    decoded = base64.b64decode(raw) if isinstance(raw, str) else struct.pack(f"<{len(raw)}f", *raw)
    floats = client.embeddings.create(model=BASE, input="hi", encoding_format="float").data[0].embedding
    equal(len(decoded), 4 * len(floats))
    assert all(abs(a - b) < 1e-5 for (a,), b in zip(struct.iter_unpack("<f", decoded), floats, strict=True))
    equal(len(client.embeddings.create(model=BASE, input="hi", dimensions=8).data[0].embedding), 8)


@call("responses.create")
def _() -> None:
    answer = client.responses.create(model=BASE, input="hi", max_output_tokens=16, store=False)
    assert answer.output_text is not None


@call("responses.stream")
def _() -> None:
    with client.responses.stream(model=BASE, input="hi", max_output_tokens=16, store=False) as stream:
        kinds = [event.type for event in stream]
    equal((kinds[0], kinds[-1] in ("response.completed", "response.incomplete")), ("response.created", True))


@call("answers and events have all that the client's own types demand")
def _() -> None:
    said = {"messages": CHAT["messages"], "model": BASE, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    asked = {"input": "hi", "model": BASE, "max_output_tokens": 400, "tool_choice": "required", "store": False}
    asked["tools"] = [{"type": "function", **TOOLS[0]["function"], "strict": True}]
    called = {**said, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400}
    prompt = {"model": BASE, "prompt": facts.prompt, "logprobs": 2}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    with_logprobs = {"input": "hi", "model": BASE, "max_output_tokens": 16, "include": ["message.output_text.logprobs"]}
    for resource, bodies in (
        (client.completions, [prompt]),
        (client.chat.completions, [said, called, {**said, **usage}, {**called, **usage}]),
        (client.responses, [asked, with_logprobs, {**asked, "stream": True}, {**with_logprobs, "stream": True}]),
        (client.embeddings, [{"model": BASE, "input": "hi", "encoding_format": "float"}]),
    ):
        for body in bodies:
            answer = resource.create(**body)
            for one in answer if body.get("stream") else [answer]:
                type(one).model_validate_json(one.to_json(exclude_unset=True), strict=True)


# --- errors -----------------------------------------------------------------------------------------------------------


@call("NotFoundError: unknown adapter, streamed or not")
def _() -> None:
    for name in ("nobody", f"{BASE}:nobody", "../etc", "other:x"):
        for stream in (False, True):
            error = raises(openai.NotFoundError, client.completions.create, model=name, stream=stream, **ASKED)
            equal((error.status_code, error.code, error.param), (404, "model_not_found", "model"))
            raises(openai.NotFoundError, client.chat.completions.create, model=name, stream=stream, **CHAT)


@call("async NotFoundError: unknown adapter, streamed or not")
async def _() -> None:
    async with async_client() as other:
        for stream in (False, True):
            await raises_async(openai.NotFoundError, other.completions.create(model="nobody", stream=stream, **ASKED))


@call("BadRequestError: names the field")
def _() -> None:
    for field, value in (("temperature", -1), ("top_p", 2), ("n", 0), ("max_tokens", -1), ("logprobs", 99)):
        error = raises(openai.BadRequestError, client.completions.create, model=BASE, **{**ASKED, field: value})
        equal((error.param, error.type), (field, "invalid_request_error"))
        assert field in error.message, error.message
    error = raises(openai.BadRequestError, client.chat.completions.create, model=BASE, **{**CHAT, "messages": []})
    equal(error.param, "messages")


@call("BadRequestError: a field that is not available")
def _() -> None:
    error = raises(openai.BadRequestError, client.completions.create, model=BASE, suffix="x", **ASKED)
    equal((error.param, error.code), ("suffix", "not_implemented"))


@call("BadRequestError: context_length_exceeded")
def _() -> None:
    long = {**ASKED, "prompt": "x" * 9000}
    for stream in (False, True):
        error = raises(openai.BadRequestError, client.completions.create, model=BASE, stream=stream, **long)
        equal((error.code, error.param), ("context_length_exceeded", "prompt"))
        assert "maximum context length" in error.message


@call("AuthenticationError, NotFoundError: credentials")
def _() -> None:
    other = OpenAI(base_url=facts.guarded_url + "/v1", api_key="wrong", timeout=60)
    for stream in (False, True):
        error = raises(openai.AuthenticationError, other.completions.create, model=BASE, stream=stream, **ASKED)
        equal(error.code, "invalid_api_key")
    raises(openai.AuthenticationError, other.models.list)
    other = other.with_options(api_key=facts.token)
    mine, foreign = facts.adapters[:2]
    equal(other.completions.create(model=mine, **ASKED).choices[0].text, getattr(facts.texts, mine))
    raises(openai.NotFoundError, other.completions.create, model=foreign, **ASKED)
    equal([card.id for card in other.models.list().data], [BASE, mine])
    admin = other.with_options(api_key=facts.admin_token)
    raises(openai.PermissionDeniedError, admin.completions.create, model=BASE, **ASKED)


@call("with_raw_response: headers")
def _() -> None:
    more = {"extra_headers": {"x-request-id": "abc"}, "extra_body": {"no_such_field": 1}}
    raw = client.completions.with_raw_response.create(model=BASE, **more, **ASKED)
    equal(raw.headers["x-request-id"], "abc")
    equal(raw.headers["x-loraplex-ignored"], "no_such_field")
    equal(raw.parse().choices[0].text, getattr(facts.texts, BASE))


@call("APITimeoutError")
def _() -> None:
    other = client.with_options(timeout=0.001, max_retries=0)
    raises(openai.APITimeoutError, other.completions.create, model=BASE, **ASKED)


if __name__ == "__main__":
    run()
