"""lorax-client 0.6.3."""

from __future__ import annotations

import json

from calls import call, equal, facts, raises, raises_async, run
from lorax import AsyncClient, Client
from lorax.errors import NotFoundError, ValidationError
from lorax.types import MergedAdapters

ADAPTER = facts.adapters[0]
TEXT, BASE_TEXT = getattr(facts.texts, ADAPTER), getattr(facts.texts, facts.base)
ASKED = {"max_new_tokens": facts.max_tokens}
DRAWN = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "typical_p": 0.9, "max_new_tokens": 12}
PAIR = {
    "type": "object",
    "properties": {"first": {"type": "boolean"}, "second": {"type": "boolean"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}
client = Client(facts.url, timeout=60)


@call("generate")
def _() -> None:
    equal(client.generate(facts.prompt, **ASKED).generated_text, BASE_TEXT)
    for name in facts.adapters:
        equal(client.generate(facts.prompt, adapter_id=name, **ASKED).generated_text, getattr(facts.texts, name))
    for name in ("", "__base_model__"):
        equal(client.generate(facts.prompt, adapter_id=name, **ASKED).generated_text, BASE_TEXT)


@call("generate, details")
def _() -> None:
    details = client.generate(facts.prompt, adapter_id=ADAPTER, decoder_input_details=True, **ASKED).details
    equal((details.finish_reason.value, details.generated_tokens), ("length", facts.max_tokens))
    equal(details.prompt_tokens, len(facts.prompt_ids))
    equal([row.id for row in details.prefill], facts.prompt_ids)
    equal(details.prefill[0].logprob, None)
    assert all(row.logprob <= 0 for row in details.prefill[1:])
    equal(len(details.tokens), facts.max_tokens)
    assert all(row.logprob <= 0 and not row.special for row in details.tokens)
    equal(details.seed, None)
    equal(client.generate(facts.prompt, details=False, **ASKED).details, None)


@call("generate, sampling")
def _() -> None:
    answers = [client.generate(facts.prompt, seed=seed, repetition_penalty=1.1, **DRAWN) for seed in (3, 3, 4)]
    texts = [answer.generated_text for answer in answers]
    assert texts[0] == texts[1] != texts[2], texts
    equal(answers[0].details.seed, 3)
    assert client.generate(facts.prompt, **DRAWN).details.seed is not None


@call("generate, best_of")
def _() -> None:
    details = client.generate(facts.prompt, best_of=3, **DRAWN).details
    equal(len(details.best_of_sequences), 2)


@call("generate, alternatives")
def _() -> None:
    details = client.generate(facts.prompt, return_k_alternatives=2, **ASKED).details
    assert all(len(row.alternative_tokens) == 2 for row in details.tokens)


@call("generate, stop, full text, truncate")
def _() -> None:
    stop = BASE_TEXT[4]
    answer = client.generate(facts.prompt, stop_sequences=[stop], **ASKED)
    equal(answer.details.finish_reason.value, "stop_sequence")
    equal(client.generate(facts.prompt, return_full_text=True, **ASKED).generated_text, facts.prompt + BASE_TEXT)
    equal(client.generate(facts.prompt, truncate=5, **ASKED).details.prompt_tokens, 5)
    equal(client.generate(facts.prompt, ignore_eos_token=True, **ASKED).details.generated_tokens, facts.max_tokens)


@call("generate_stream")
def _() -> None:
    for name, text in ((ADAPTER, TEXT), (None, BASE_TEXT)):
        rows = list(client.generate_stream(facts.prompt, adapter_id=name, **ASKED))
        equal(len(rows), facts.max_tokens)
        equal("".join(row.token.text for row in rows), text)
        equal([row.generated_text for row in rows], [None] * (len(rows) - 1) + [text])
        equal(rows[-1].details.generated_tokens, facts.max_tokens)
        equal(rows[-1].details.prompt_tokens, len(facts.prompt_ids))


@call("async generate, generate_stream")
async def _() -> None:
    other = AsyncClient(facts.url, timeout=60)
    equal((await other.generate(facts.prompt, adapter_id=ADAPTER, **ASKED)).generated_text, TEXT)
    rows = [row async for row in other.generate_stream(facts.prompt, adapter_id=ADAPTER, **ASKED)]
    equal(rows[-1].generated_text, TEXT)


@call("generate, response_format")
def _() -> None:
    wanted = {"type": "json_object", "schema": PAIR}
    answer = client.generate("?", response_format=wanted, max_new_tokens=200)
    equal(set(json.loads(answer.generated_text)), {"first", "second"})


@call("generate, merged_adapters")
def _() -> None:
    ids = [facts.adapters[0], facts.adapters[-1]]  # of equal rank, which `linear` needs
    merged = MergedAdapters(ids=ids, weights=[0.5, 0.5], merge_strategy="linear", density=1.0,
                            majority_sign_method="total")  # fmt: skip
    assert client.generate(facts.prompt, merged_adapters=merged, **ASKED).generated_text


@call("embed")
def _() -> None:
    assert len(client.embed("hi").embeddings) > 1


@call("classify")
def _() -> None:
    client.classify("hi")


@call("classify_batch")
def _() -> None:
    client.classify_batch(["hi", "ho"])


@call("NotFoundError: unknown adapter, streamed or not")
def _() -> None:
    error = raises(NotFoundError, client.generate, facts.prompt, adapter_id="nobody", **ASKED)
    assert "nobody" in str(error), error
    error = raises(NotFoundError, lambda: list(client.generate_stream(facts.prompt, adapter_id="nobody", **ASKED)))
    assert "nobody" in str(error), error


@call("async NotFoundError: unknown adapter, streamed or not")
async def _() -> None:
    other = AsyncClient(facts.url, timeout=60)
    error = await raises_async(NotFoundError, other.generate(facts.prompt, adapter_id="nobody", **ASKED))
    assert "nobody" in str(error), error

    async def stream() -> None:
        async for _ in other.generate_stream(facts.prompt, adapter_id="nobody", **ASKED):
            pass

    error = await raises_async(NotFoundError, stream())
    assert "nobody" in str(error), error


@call("ValidationError: names the field")
def _() -> None:
    error = raises(ValidationError, client.generate, facts.prompt, watermark=True, **ASKED)
    assert "watermark" in str(error), error
    error = raises(ValidationError, client.generate, facts.prompt, max_new_tokens=0)
    assert "max_new_tokens" in str(error), error
    raises(ValidationError, client.generate, "x" * 9000, **ASKED)


@call("credentials")
def _() -> None:
    mine, foreign = facts.adapters[:2]
    raises(Exception, Client(facts.guarded_url).generate, facts.prompt, **ASKED)
    other = Client(facts.guarded_url, headers={"Authorization": f"Bearer {facts.token}"}, timeout=60)
    equal(other.generate(facts.prompt, adapter_id=mine, **ASKED).generated_text, getattr(facts.texts, mine))
    raises(NotFoundError, other.generate, facts.prompt, adapter_id=foreign, **ASKED)


if __name__ == "__main__":
    run()
