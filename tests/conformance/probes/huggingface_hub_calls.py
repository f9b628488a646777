"""huggingface_hub's InferenceClient, 0.36 and 2.x, as endpoint and as OpenAI client."""

from __future__ import annotations

import asyncio
import json

from calls import call, equal, facts, raises, run
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, InferenceTimeoutError

BASE, ADAPTER = facts.base, facts.adapters[0]
MESSAGES = [{"role": "user", "content": facts.prompt}]
CHAT = {"max_tokens": facts.max_tokens, "temperature": 0}
PAIR = {
    "type": "object",
    "properties": {"first": {"type": "boolean"}, "second": {"type": "boolean"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "pair", "description": "A pair.", "parameters": PAIR}}]
endpoint = InferenceClient(facts.url, timeout=60)
client = InferenceClient(base_url=facts.url + "/v1", api_key="none", timeout=60)


def status_of(error: HfHubHTTPError) -> int:
    return error.response.status_code


@call("chat_completion, of an endpoint")
def _() -> None:
    equal(endpoint.chat_completion(MESSAGES, **CHAT).choices[0].message.content, getattr(facts.chats, BASE))


@call("chat_completion, adapters by model")
def _() -> None:
    for name, text in vars(facts.chats).items():
        answer = client.chat_completion(MESSAGES, model=name, **CHAT)
        equal(answer.choices[0].message.content, text)
        equal(answer.usage.completion_tokens, facts.max_tokens)


@call("chat_completion(stream=True)")
def _() -> None:
    for name, text in vars(facts.chats).items():
        more = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(model=name, messages=MESSAGES, **more, **CHAT))
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), text)
        equal(chunks[-1].usage.completion_tokens, facts.max_tokens)


@call("async chat_completion")
async def _() -> None:
    async with AsyncInferenceClient(base_url=facts.url + "/v1", api_key="none", timeout=60) as other:
        answer = await other.chat_completion(MESSAGES, model=ADAPTER, **CHAT)
        equal(answer.choices[0].message.content, getattr(facts.chats, ADAPTER))
        stream = await other.chat_completion(MESSAGES, model=ADAPTER, stream=True, **CHAT)
        equal("".join([chunk.choices[0].delta.content or "" async for chunk in stream]), getattr(facts.chats, ADAPTER))


@call("chat_completion, logprobs, n, seed, stop")
def _() -> None:
    more = {"logprobs": True, "top_logprobs": 2, "n": 2, "seed": 1, "stop": ["zzz"], "max_tokens": 8}
    answer = client.chat_completion(
        MESSAGES, model=BASE, presence_penalty=0.1, frequency_penalty=0.1, top_p=0.9, **more
    )
    equal([choice.index for choice in answer.choices], [0, 1])
    assert all(row.logprob <= 0 for row in answer.choices[0].logprobs.content)


@call("chat_completion, json_schema")
def _() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "pair", "schema": PAIR, "strict": True}}
    answer = client.chat_completion(MESSAGES, model=BASE, response_format=schema, max_tokens=200, seed=1)
    equal(set(json.loads(answer.choices[0].message.content)), {"first", "second"})


@call("chat_completion, tools required")
def _() -> None:
    answer = client.chat_completion(MESSAGES, model=BASE, tools=TOOLS, tool_choice="required", max_tokens=200, seed=1)
    (tool_call, *_) = answer.choices[0].message.tool_calls
    equal(set(json.loads(tool_call.function.arguments)), {"first", "second"})


@call("chat_completion, errors")
def _() -> None:
    for stream in (False, True):
        error = raises(HfHubHTTPError, client.chat_completion, MESSAGES, model="nobody", stream=stream, **CHAT)
        equal(status_of(error), 404)
        assert "nobody" in str(error)
    error = raises(HfHubHTTPError, client.chat_completion, MESSAGES, model=BASE, temperature=-1)
    equal(status_of(error), 400)
    guarded = InferenceClient(base_url=facts.guarded_url + "/v1", api_key="wrong", timeout=60)
    equal(status_of(raises(HfHubHTTPError, guarded.chat_completion, MESSAGES, model=BASE)), 401)


@call("timeout")
def _() -> None:
    hurried = InferenceClient(base_url=facts.url + "/v1", api_key="none", timeout=0.001)
    raises((InferenceTimeoutError, OSError), hurried.chat_completion, MESSAGES, model=BASE)


@call("text_generation")
def _() -> None:
    equal(endpoint.text_generation(facts.prompt, max_new_tokens=facts.max_tokens), getattr(facts.texts, BASE))
    for name in facts.adapters:
        text = endpoint.text_generation(facts.prompt, max_new_tokens=facts.max_tokens, adapter_id=name)
        equal(text, getattr(facts.texts, name))


@call("text_generation, details")
def _() -> None:
    answer = endpoint.text_generation(
        facts.prompt, max_new_tokens=facts.max_tokens, details=True, decoder_input_details=True, top_n_tokens=2
    )
    details = answer.details
    equal(answer.generated_text, getattr(facts.texts, BASE))
    equal((details.finish_reason, details.generated_tokens), ("length", facts.max_tokens))
    equal(len(details.tokens), facts.max_tokens)
    equal([row.id for row in details.prefill], facts.prompt_ids)
    equal(len(details.top_tokens), facts.max_tokens)


@call("text_generation(stream=True)")
def _() -> None:
    more = {"max_new_tokens": facts.max_tokens, "adapter_id": ADAPTER}
    equal("".join(endpoint.text_generation(facts.prompt, stream=True, **more)), getattr(facts.texts, ADAPTER))
    rows = list(endpoint.text_generation(facts.prompt, stream=True, details=True, **more))
    equal("".join(row.token.text for row in rows), getattr(facts.texts, ADAPTER))
    equal(rows[-1].generated_text, getattr(facts.texts, ADAPTER))
    equal(rows[-1].details.generated_tokens, facts.max_tokens)


@call("async text_generation")
async def _() -> None:
    async with AsyncInferenceClient(facts.url, timeout=60) as other:
        more = {"max_new_tokens": facts.max_tokens, "adapter_id": ADAPTER}
        texts = await asyncio.gather(*(other.text_generation(facts.prompt, **more) for _ in range(4)))
        equal(texts, [getattr(facts.texts, ADAPTER)] * 4)
        stream = await other.text_generation(facts.prompt, stream=True, **more)
        equal("".join([text async for text in stream]), getattr(facts.texts, ADAPTER))


@call("text_generation, sampling")
def _() -> None:
    more = {"do_sample": True, "temperature": 0.9, "top_k": 9, "top_p": 0.9, "typical_p": 0.9, "seed": 3}
    more |= {"max_new_tokens": 12, "repetition_penalty": 1.1, "stop": ["zzz"], "truncate": 8}
    texts = [endpoint.text_generation(facts.prompt, **more) for _ in range(2)]
    equal(texts[0], texts[1])
    full = endpoint.text_generation(facts.prompt, max_new_tokens=4, return_full_text=True)
    assert full.startswith(facts.prompt)
    answer = endpoint.text_generation(facts.prompt, best_of=2, details=True, do_sample=True)
    equal(len(answer.details.best_of_sequences), 1)


@call("text_generation, grammar")
def _() -> None:
    text = endpoint.text_generation("?", grammar={"type": "json", "value": PAIR}, max_new_tokens=200)
    equal(set(json.loads(text)), {"first", "second"})


@call("text_generation, errors")
def _() -> None:
    error = raises(Exception, endpoint.text_generation, facts.prompt, adapter_id="nobody")
    assert "404" in str(error) or "nobody" in str(error), repr(error)
    error = raises(Exception, endpoint.text_generation, facts.prompt, temperature=-1.0)
    assert "422" in str(error) or "temperature" in str(error), repr(error)


if __name__ == "__main__":
    run()
