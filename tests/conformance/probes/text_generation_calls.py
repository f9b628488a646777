"""text-generation 0.7.0, the client of TGI."""

from __future__ import annotations

import json

from calls import call, equal, facts, raises, raises_async, run
from text_generation import AsyncClient, Client
from text_generation.errors import BadRequestError, NotFoundError, ValidationError
from text_generation.types import Grammar, GrammarType, Message

TEXT, CHAT_TEXT = getattr(facts.texts, facts.base), getattr(facts.chats, facts.base)
ASKED = {"max_new_tokens": facts.max_tokens}
DRAWN = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "typical_p": 0.9, "max_new_tokens": 12}
MESSAGES = [Message(role="user", content=facts.prompt)]
PAIR = {
    "type": "object",
    "properties": {"first": {"type": "boolean"}, "second": {"type": "boolean"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "pair", "description": "A pair.", "parameters": PAIR}}]
client = Client(facts.url, timeout=60)


@call("generate")
def _() -> None:
    answer = client.generate(facts.prompt, decoder_input_details=True, **ASKED)
    details = answer.details
    equal(answer.generated_text, TEXT)
    equal((details.finish_reason.value, details.generated_tokens, details.seed), ("length", facts.max_tokens, None))
    equal([row.id for row in details.prefill], facts.prompt_ids)
    equal("".join(row.text for row in details.prefill), facts.prompt)
    equal(len(details.tokens), facts.max_tokens)
    assert all(row.logprob <= 0 and not row.special for row in details.tokens)
    equal(client.generate(facts.prompt).details.generated_tokens, 20)


@call("generate, sampling")
def _() -> None:
    more = {**DRAWN, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
    answers = [client.generate(facts.prompt, seed=seed, **more) for seed in (3, 3, 4)]
    texts = [answer.generated_text for answer in answers]
    assert texts[0] == texts[1] != texts[2], texts
    equal(answers[0].details.seed, 3)
    assert client.generate(facts.prompt, **DRAWN).details.seed is not None


@call("generate, best_of")
def _() -> None:
    details = client.generate(facts.prompt, best_of=3, **DRAWN).details
    equal(len(details.best_of_sequences), 2)
    assert details.seed is not None


@call("generate, top_n_tokens")
def _() -> None:
    details = client.generate(facts.prompt, top_n_tokens=2, **ASKED).details
    assert [len(rows) for rows in details.top_tokens] == [2] * facts.max_tokens


@call("generate, stop, full text, truncate")
def _() -> None:
    answer = client.generate(facts.prompt, stop_sequences=[TEXT[4]], **ASKED)
    equal(answer.details.finish_reason.value, "stop_sequence")
    equal(client.generate(facts.prompt, return_full_text=True, **ASKED).generated_text, facts.prompt + TEXT)
    answer = client.generate(facts.prompt, truncate=5, decoder_input_details=True, **ASKED)
    equal([row.id for row in answer.details.prefill], facts.prompt_ids[-5:])


@call("generate_stream")
def _() -> None:
    rows = list(client.generate_stream(facts.prompt, top_n_tokens=2, **ASKED))
    equal("".join(row.token.text for row in rows), TEXT)
    equal([row.generated_text for row in rows], [None] * (len(rows) - 1) + [TEXT])
    equal(rows[-1].details.generated_tokens, facts.max_tokens)
    assert all(len(row.top_tokens) == 2 for row in rows)


@call("async generate, generate_stream")
async def _() -> None:
    other = AsyncClient(facts.url, timeout=60)
    equal((await other.generate(facts.prompt, **ASKED)).generated_text, TEXT)
    rows = [row async for row in other.generate_stream(facts.prompt, **ASKED)]
    equal(rows[-1].generated_text, TEXT)


@call("generate, grammar")
def _() -> None:
    grammar = Grammar(type=GrammarType.Json, value=PAIR)
    text = client.generate("?", grammar=grammar, max_new_tokens=200).generated_text
    equal(set(json.loads(text)), {"first", "second"})
    text = client.generate("?", grammar=Grammar(type=GrammarType.Regex, value="[ab]{3}"), **ASKED).generated_text
    assert set(text) <= {"a", "b"}, text
    equal(len(text), 3)


@call("chat")
def _() -> None:
    answer = client.chat(MESSAGES, max_tokens=facts.max_tokens, temperature=0.0, seed=1)
    equal(answer.choices[0].message.content, CHAT_TEXT)
    assert client.chat(MESSAGES, max_tokens=5, n=2, logprobs=True, top_logprobs=2, top_p=0.9).choices[1]


@call("chat, tools")
def _() -> None:
    answer = client.chat(MESSAGES, tools=TOOLS, tool_choice="pair", max_tokens=200, seed=1)
    assert answer.choices[0].message.tool_calls


@call("chat(stream=True)")
def _() -> None:
    for _ in client.chat(MESSAGES, max_tokens=facts.max_tokens, stream=True):
        pass


@call("async chat")
async def _() -> None:
    answer = await AsyncClient(facts.url, timeout=60).chat(MESSAGES, max_tokens=facts.max_tokens, temperature=0.0)
    equal(answer.choices[0].message.content, CHAT_TEXT)


@call("ValidationError: names the field")
def _() -> None:
    error = raises(ValidationError, client.generate, facts.prompt, watermark=True, **ASKED)
    assert "watermark" in str(error), error
    error = raises(ValidationError, client.generate, facts.prompt, max_new_tokens=0)
    assert "max_new_tokens" in str(error), error
    raises(ValidationError, client.generate, "x" * 9000, **ASKED)


@call("async ValidationError")
async def _() -> None:
    await raises_async(ValidationError, AsyncClient(facts.url, timeout=60).generate("x" * 9000, **ASKED))


@call("more tokens than the context, streamed or not")
async def _() -> None:
    other, more = AsyncClient(facts.url, timeout=60), {"max_new_tokens": 10_000}
    raises(ValidationError, client.generate, "test", **more)
    raises(ValidationError, lambda: list(client.generate_stream("test", **more)))
    await raises_async(ValidationError, other.generate("test", **more))
    await raises_async(ValidationError, anext(other.generate_stream("test", **more)))


@call("NotFoundError: a URL that is not the server's, streamed or not")
async def _() -> None:
    url = facts.url + "/models/fake/model"
    here, other = Client(url, timeout=60), AsyncClient(url, timeout=60)
    raises(NotFoundError, here.generate, "test")
    raises(NotFoundError, lambda: list(here.generate_stream("test")))
    await raises_async(NotFoundError, other.generate("test"))
    await raises_async(NotFoundError, anext(other.generate_stream("test")))


@call("chat, errors")
def _() -> None:
    raises(BadRequestError, client.chat, MESSAGES, temperature=-1.0)


if __name__ == "__main__":
    run()
