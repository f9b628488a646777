"""Validation of requests: refusals name their field, no field is silently ignored."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from support.wire import leaves, set_leaves

from loraplex_contracts.errors import ContextLengthExceeded, InvalidAdapterId, InvalidArgument, Unimplemented
from loraplex_proto import validate
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2, status_pb2, worker_pb2
from loraplex_proto.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    Output,
    Sampling,
    Speculation,
    Stopping,
    TokenIds,
    TokenizeRequest,
    Truncate,
)
from loraplex_proto.validate import ModelLimits

LIMITS = ModelLimits(vocab_size=100, max_context_tokens=32)
REQUESTS: dict[str, type[Message]] = {
    "GenerateRequest": GenerateRequest,
    "TokenizeRequest": TokenizeRequest,
    "DetokenizeRequest": inference_pb2.DetokenizeRequest,
    "GetTokenizerInfoRequest": inference_pb2.GetTokenizerInfoRequest,
    "EmbedRequest": pooling_pb2.EmbedRequest,
    "ClassifyRequest": pooling_pb2.ClassifyRequest,
    "ScoreRequest": pooling_pb2.ScoreRequest,
    "LoadAdapterRequest": adapter_pb2.LoadAdapterRequest,
    "UnloadAdapterRequest": adapter_pb2.UnloadAdapterRequest,
    "GetAdapterRequest": adapter_pb2.GetAdapterRequest,
    "ListAdaptersRequest": adapter_pb2.ListAdaptersRequest,
    "WatchLoadRequest": worker_pb2.WatchLoadRequest,
    "GetInfoRequest": inference_pb2.GetInfoRequest,
    "GetLoadRequest": worker_pb2.GetLoadRequest,
    "GetStatusRequest": status_pb2.GetStatusRequest,
}
CHECKS: dict[str, Any] = {
    "GenerateRequest": validate.check_generate,
    "TokenizeRequest": validate.check_tokenize,
    "DetokenizeRequest": validate.refuse_unhandled,
    "GetTokenizerInfoRequest": validate.refuse_unhandled,
    "EmbedRequest": validate.check_pooling,
    "ClassifyRequest": validate.check_pooling,
    "ScoreRequest": validate.check_score,
    "ListAdaptersRequest": validate.check_list_adapters,
    "WatchLoadRequest": validate.check_watch_load,
    "GetInfoRequest": validate.refuse_unhandled,
    "GetLoadRequest": validate.refuse_unhandled,
    "GetStatusRequest": validate.check_status,
}


def check(request: Message) -> None:
    CHECKS.get(request.DESCRIPTOR.name, validate.check_adapter_request)(request)


# --- nothing is silently ignored ------------------------------------------------------------------------------------


def test_every_request_of_the_services_is_tested() -> None:
    services = [
        *inference_pb2.DESCRIPTOR.services_by_name.values(),
        *pooling_pb2.DESCRIPTOR.services_by_name.values(),
        *adapter_pb2.DESCRIPTOR.services_by_name.values(),
        *worker_pb2.DESCRIPTOR.services_by_name.values(),
        *status_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    inputs = {method.input_type.name for service in services for method in service.methods}
    assert inputs == set(REQUESTS)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "inputs"),
        ({"inputs": [{}]}, "inputs"),
        ({"inputs": [{"token_ids": {}}]}, "inputs.token_ids.ids"),
        ({"inputs": [{"chat": {}}]}, "chat.messages"),
        ({"inputs": [{"text": "x"}] * (validate.MAX_POOLING_INPUTS + 1)}, "inputs"),
        ({"inputs": [{"text": "x"}], "adapter_id": "../x"}, "adapter_id"),
        ({"inputs": [{"text": "x"}], "request_id": "a b"}, "request_id"),
        ({"inputs": [{"text": "x"}], "cache_salt": "a b"}, "cache_salt"),
        ({"inputs": [{"text": "x"}], "priority": 101}, "priority"),
    ],
)
def test_inputs_that_cannot_be_pooled(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate.check_pooling(pooling_pb2.EmbedRequest(**fields))
    assert caught.value.field == field


TEXT = {"text": "x"}
CHAT = {"chat": {"messages": [{"role": "user", "content": "x"}]}}
COSINE = pooling_pb2.SCORE_METHOD_COSINE


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"inputs": [TEXT]}, "query"),
        ({"inputs": [TEXT], "query": {}}, "query"),
        ({"inputs": [TEXT], "query": {"token_ids": {"ids": [5]}}}, "inputs"),
        ({"inputs": [CHAT], "query": CHAT}, "inputs"),
        ({"inputs": [TEXT], "query": TEXT, "template": "{query}"}, "template"),
        ({"inputs": [TEXT], "query": TEXT, "template": "{query}{document}{query}"}, "template"),
        ({"inputs": [{"token_ids": {"ids": [5]}}], "query": {"token_ids": {"ids": [5]}}, "template": "x"}, "template"),
        ({"inputs": [TEXT], "query": TEXT, "template": "{query}{document}", "method": COSINE}, "template"),
        ({"inputs": [TEXT], "query": TEXT, "true_token": "ja"}, "true_token"),
        ({"inputs": [TEXT], "query": TEXT, "false_token": "no", "method": COSINE}, "false_token"),
        ({"inputs": [TEXT], "query": TEXT, "pooling": 2, "method": pooling_pb2.SCORE_METHOD_NEXT_TOKEN}, "pooling"),
    ],
)
def test_queries_that_cannot_be_scored(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate.check_score(pooling_pb2.ScoreRequest(**fields))
    assert caught.value.field == field
    validate.check_score(pooling_pb2.ScoreRequest(inputs=[CHAT, TEXT], query=CHAT, method=COSINE, pooling=2))
    validate.check_score(pooling_pb2.ScoreRequest(inputs=[TEXT], query=TEXT, template="{document}: {query}?"))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_field_of_a_newer_client_is_refused(name: str) -> None:
    raw = b"\xa2\x7d\x01x"  # field 2004, a string
    with pytest.raises(Unimplemented, match="#2004"):
        check(REQUESTS[name].FromString(raw))


def test_a_newer_field_deep_inside_is_refused() -> None:
    request = GenerateRequest(text="a", sampling=Sampling.FromString(b"\xa0\x7d\x01"))
    with pytest.raises(Unimplemented) as caught:
        validate.check_generate(request)
    assert caught.value.field == "sampling.#2004"


@pytest.mark.parametrize("number", [77, -1])
def test_a_value_of_a_newer_client_is_refused(number: int) -> None:
    with pytest.raises(Unimplemented, match=rf"`method` has the value {number}") as caught:
        validate.check_score(
            pooling_pb2.ScoreRequest.FromString(_with_varint(pooling_pb2.ScoreRequest, "method", number))
        )
    assert caught.value.field == "method"
    inner = pooling_pb2.EmbedRequest.FromString(_with_varint(pooling_pb2.EmbedRequest, "pooling", number))
    with pytest.raises(Unimplemented, match="pooling"):
        validate.check_pooling(inner)


def _with_varint(kind: Any, field: str, number: int) -> bytes:
    """A message whose enum has that number, as a newer client writes it."""
    tag, value, found = kind.DESCRIPTOR.fields_by_name[field].number << 3, number % (1 << 64), bytearray()
    for rest in (tag, value):
        while rest >= 0x80:
            found.append(rest & 0x7F | 0x80)
            rest >>= 7
        found.append(rest)
    return bytes(found)


@pytest.mark.parametrize("within", ["", "token_ids", "sampling"])
def test_many_unknown_fields_are_refused_without_a_look_at_each(within: str) -> None:
    request = GenerateRequest(token_ids=TokenIds(ids=[5]), sampling=Sampling(top_k=1))
    part = getattr(request, within) if within else request
    part.MergeFromString(b"\xf8\x3f\x01" * 30_000)  # field 1023, a number
    with pytest.raises(Unimplemented, match="bytes of the request"):
        check(request)
    known = GenerateRequest(token_ids=TokenIds(ids=[5] * 100_000))
    check(known)  # long, and nothing in it is unknown


def test_too_many_messages_are_refused_before_anything_looks_at_each() -> None:
    """An unknown field in one of them is not reached."""
    messages = [ChatMessage(role="user", content="x")] * 4097
    for request in (GenerateRequest(chat=Chat(messages=messages)), TokenizeRequest(chat=Chat(messages=messages))):
        request.chat.messages[0].MergeFromString(b"\xa2\x7d\x01x")
        with pytest.raises(InvalidArgument, match="4097"):
            check(request)


def forced(tools_json: str, **values: Any) -> GenerateRequest:
    choice = inference_pb2.ToolChoice(required=True)
    chat = Chat(messages=[ChatMessage(role="user")], tool_choice=choice, tools_json=tools_json)
    return GenerateRequest(chat=chat, **values)


# --- values ---------------------------------------------------------------------------------------------------------

GOOD = {
    "plain": GenerateRequest(text="hello"),
    "empty text": GenerateRequest(text=""),
    "tokens": GenerateRequest(token_ids=TokenIds(ids=[1, 2, 3])),
    "bucket": GenerateRequest(text="a", adapter_id="bucket/sql", in_bucket=True),
    "hub": GenerateRequest(text="a", adapter_id="org/sql", hub={"revision": "main", "token": "hf_x"}),
    "places of adapters": GenerateRequest(
        text="a",
        adapters=[
            {"id": "org/sql", "weight": 1, "hub": {"revision": "main", "token": "hf_x"}},
            {"id": "bucket/sql", "weight": 1, "in_bucket": True},
            {"id": "sql", "weight": 1},
        ],
    ),
    "chat": GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="hi")], omit_generation_prompt=True)),
    "tools": GenerateRequest(
        chat=Chat(
            messages=[
                ChatMessage(
                    role="assistant",
                    reasoning="hm",
                    tool_calls=[inference_pb2.ToolCall(id="call_1", name="a.b:c", arguments_json="{}")] * 128,
                ),
                ChatMessage(role="tool", name="a.b:c", tool_call_id="call_1", content="5"),
            ],
            tools_json="x" * (1 << 20),
            documents_json="[]",
            template_kwargs_json="{}",
            template="x",
            continue_final_message=True,
            tool_choice=inference_pb2.ToolChoice(auto=True),
            parallel_tool_calls=False,
        ),
        output=Output(parse_chat=True),
    ),
    "a call": forced("[{}]"),
    "a call of one tool": GenerateRequest(
        chat=Chat(
            messages=[ChatMessage(role="user")], tool_choice=inference_pb2.ToolChoice(name="f"), tools_json="[{}]"
        )
    ),
    "tools that are not called": GenerateRequest(
        chat=Chat(messages=[ChatMessage(role="user")], tool_choice=inference_pb2.ToolChoice(none=True))
    ),
    "adapter": GenerateRequest(text="a", adapter_id="org/sql-v2.1"),
    "everything": GenerateRequest(
        text="a",
        adapter_id="sql",
        sampling=Sampling(
            temperature=0.7,
            top_k=40,
            top_p=1.0,
            min_p=0.0,
            typical_p=1.0,
            bad_words=["damn", "é" * 64],
            allowed_token_ids=[5, 5, 99],
            repetition_penalty=1.1,
            frequency_penalty=-2,
            presence_penalty=2,
            seed=2**64 - 1,
            logit_bias={5: -100.0, 6: 100.0},
        ),
        stopping=Stopping(
            max_tokens=8, min_tokens=8, stop=["\n", "é" * 128], stop_token_ids=[1], ignore_eos=True, include_stop=True
        ),
        speculation=Speculation(off=True),
        output=Output(
            logprobs=True,
            top_logprobs=20,
            prompt_logprobs=True,
            echo=True,
            omit_token_ids=True,
            prompt_tokens=True,
            keep_special_tokens=True,
            token_bytes=True,
        ),
        truncate_prompt=Truncate(max_tokens=1 << 24, keep_start=True),
        omit_special_tokens=True,
        n=64,
        priority=-100,
        request_id="a-b.c:1",
        cache_salt="tenant_1",
    ),
    "more ids than the context has": GenerateRequest(token_ids=TokenIds(ids=[1] * 99), truncate_prompt=Truncate()),
    "a schema": GenerateRequest(text="a", grammar={"json_schema": "{}", "compact": True}),
    "an object": GenerateRequest(text="a", grammar={"json_object": True}),
    "an expression": GenerateRequest(text="a", grammar={"regex": "a" * (validate.MAX_GRAMMAR_BYTES - 9)}),
    "a choice": GenerateRequest(text="a", grammar={"choice": {"texts": ["a", ""]}}),
    "a grammar": GenerateRequest(text="a", grammar={"lark": "start: A"}),
    "a grammar in BNF": GenerateRequest(text="a", grammar={"gbnf": "root ::= a"}),
    "tags": GenerateRequest(text="a", grammar={"structural_tag_json": "{}"}),
    "zero is greedy": GenerateRequest(text="a", sampling=Sampling(temperature=0, top_k=0)),
    "so is next to nothing": GenerateRequest(text="a", sampling=Sampling(temperature=1e-300)),
    "off but nothing else": GenerateRequest(text="a", speculation=Speculation()),
    "off and a bound": GenerateRequest(text="a", speculation=Speculation(off=True, max_draft_tokens=64)),
    "auto": GenerateRequest(text="a", speculation=Speculation(auto=True, max_draft_tokens=8, fixed_length=True)),
    "fixed, of whatever kind": GenerateRequest(text="a", speculation=Speculation(fixed_length=True)),
    "own heads": GenerateRequest(text="a", speculation={"medusa": {}}),
    "heads by name": GenerateRequest(text="a", speculation={"medusa": {"adapter_id": "org/heads-v1"}}),
    "lookup": GenerateRequest(text="a", speculation={"prompt_lookup": {}}),
    "lookup with bounds": GenerateRequest(text="a", speculation={"prompt_lookup": {"min_ngram": 64, "max_ngram": 64}}),
    "lookup with the lower bound": GenerateRequest(text="a", speculation={"prompt_lookup": {"min_ngram": 5}}),
    "the only draft model": GenerateRequest(text="a", speculation={"draft_model": {}}),
    "a mixture": GenerateRequest(
        text="a", adapters=[{"id": f"a/{i % 7}", "weight": -1000.0 if i else 1e-300} for i in range(8)]
    ),
    "a merge": GenerateRequest(
        text="a",
        adapters=[{"id": "a", "weight": 1}],
        merge={"strategy": "dare_ties", "density": 1, "majority_sign": "frequency", "seed": 0},
    ),
    "a linear merge": GenerateRequest(text="a", adapters=[{"id": "a", "weight": 1}], merge={"strategy": "linear"}),
    "a draft model by name": GenerateRequest(text="a", speculation={"draft_model": {"name": "tiny-v1.0"}}),
}


@pytest.mark.parametrize("request_", GOOD.values(), ids=GOOD)
def test_good_requests_pass(request_: GenerateRequest) -> None:
    validate.check_generate(request_)
    validate.check_for_model(request_, LIMITS)


def test_the_good_requests_use_every_field() -> None:
    used = {path for request in GOOD.values() for path in set_leaves(request)}
    assert used == set(leaves(GenerateRequest.DESCRIPTOR)), "a new field needs a good request here, and bad values"


def sampling(**values: Any) -> GenerateRequest:
    return GenerateRequest(text="a", sampling=Sampling(**values))


def stopping(**values: Any) -> GenerateRequest:
    return GenerateRequest(text="a", stopping=Stopping(**values))


def speculation(**values: Any) -> GenerateRequest:
    return GenerateRequest(text="a", speculation=Speculation(**values))


def ngram(**values: int) -> GenerateRequest:
    return speculation(prompt_lookup=inference_pb2.PromptLookupSpeculation(**values))


def said(**values: Any) -> GenerateRequest:
    return GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", **values)]))


def calling(**values: str) -> GenerateRequest:
    return said(tool_calls=[inference_pb2.ToolCall(**({"name": "f"} | values))])


def choosing(**kind: Any) -> GenerateRequest:
    chosen = inference_pb2.ToolChoice(**kind)
    return GenerateRequest(chat=Chat(messages=[ChatMessage(role="user")], tool_choice=chosen, tools_json="[]"))


def beside(**values: str) -> GenerateRequest:
    return GenerateRequest(chat=Chat(messages=[ChatMessage(role="user")], **values))


BAD: list[tuple[str, GenerateRequest]] = [
    ("input", GenerateRequest()),
    ("in_bucket", GenerateRequest(text="a", adapter_id="sql", in_bucket=True)),
    ("in_bucket", GenerateRequest(text="a", adapter_id="bucket/sql@01234567", in_bucket=True)),
    ("in_bucket", GenerateRequest(text="a", adapter_id="bucket/sql", in_bucket=True, hub={})),
    ("hub", GenerateRequest(text="a", hub={})),
    ("hub", GenerateRequest(text="a", adapter_id="sql", hub={})),
    ("hub", GenerateRequest(text="a", adapter_id="org/sql@01234567", hub={})),
    ("hub", GenerateRequest(text="a", adapters=[{"id": "org/sql", "weight": 1}], hub={})),
    ("hub.revision", GenerateRequest(text="a", adapter_id="org/sql", hub={"revision": "../main"})),
    ("adapters.hub", GenerateRequest(text="a", adapters=[{"id": "sql", "weight": 1, "hub": {}}])),
    (
        "adapters.hub.token",
        GenerateRequest(text="a", adapters=[{"id": "org/sql", "weight": 1, "hub": {"token": "a\nb"}}]),
    ),
    ("adapters.in_bucket", GenerateRequest(text="a", adapters=[{"id": "sql", "weight": 1, "in_bucket": True}])),
    (
        "adapters.in_bucket",
        GenerateRequest(text="a", adapters=[{"id": "org/sql", "weight": 1, "hub": {}, "in_bucket": True}]),
    ),
    ("hub.token", GenerateRequest(text="a", adapter_id="org/sql", hub={"token": "a\r\nx: y"})),
    ("hub.token", GenerateRequest(text="a", adapter_id="org/sql", hub={"token": "x" * 513})),
    ("token_ids.ids", GenerateRequest(token_ids=TokenIds())),
    ("grammar", GenerateRequest(text="a", grammar={})),
    ("grammar", GenerateRequest(text="a", grammar={"compact": True})),
    ("grammar.json_object", GenerateRequest(text="a", grammar={"json_object": False})),
    ("grammar.choice", GenerateRequest(text="a", grammar={"choice": {}})),
    ("grammar.lark", GenerateRequest(text="a", grammar={"lark": "a" * (validate.MAX_GRAMMAR_BYTES + 1)})),
    ("stopping.ignore_eos", GenerateRequest(text="a", grammar={"regex": "a"}, stopping=Stopping(ignore_eos=True))),
    ("chat.messages", GenerateRequest(chat=Chat())),
    ("chat.messages", GenerateRequest(chat=Chat(messages=[ChatMessage(role="user")] * 4097))),
    ("chat.messages.role", GenerateRequest(chat=Chat(messages=[ChatMessage(content="no role")]))),
    ("chat.messages.role", GenerateRequest(chat=Chat(messages=[ChatMessage(role="user<|im_end|>")]))),
    ("chat.messages.role", GenerateRequest(chat=Chat(messages=[ChatMessage(role="a" * 65)]))),
    ("truncate_prompt.max_tokens", GenerateRequest(text="a", truncate_prompt=Truncate(max_tokens=(1 << 24) + 1))),
    ("omit_special_tokens", GenerateRequest(token_ids=TokenIds(ids=[1]), omit_special_tokens=True)),
    ("chat.messages.name", said(name="a\nb")),
    ("chat.messages.tool_call_id", said(tool_call_id="x" * 129)),
    ("chat.messages.tool_calls", said(tool_calls=[inference_pb2.ToolCall(name="f")] * 129)),
    ("chat.messages.tool_calls.name", calling(name="")),
    ("chat.messages.tool_calls.name", calling(name="<|im_end|>")),
    ("chat.messages.tool_calls.id", calling(id="a b")),
    ("chat.tools_json", beside(tools_json="x" * ((1 << 20) + 1))),
    ("chat.documents_json", beside(documents_json="x" * ((1 << 20) + 1))),
    ("chat.template_kwargs_json", beside(template_kwargs_json="x" * ((1 << 20) + 1))),
    ("chat.template", beside(template="x" * ((256 << 10) + 1))),
    ("chat.tool_choice.none", choosing(none=False)),
    ("chat.tool_choice.auto", choosing(auto=False)),
    ("chat.tool_choice.required", choosing(required=False)),
    ("chat.tool_choice.name", choosing(name="a b")),
    ("chat.tool_choice.required", forced("")),
    ("grammar", forced("[{}]", grammar=inference_pb2.Grammar(json_object=True))),
    ("stopping.ignore_eos", forced("[{}]", stopping=Stopping(ignore_eos=True))),
    ("output.parse_chat", GenerateRequest(text="a", output=Output(parse_chat=True))),
    ("n", GenerateRequest(text="a", n=65)),
    ("n", GenerateRequest(text="a", n=2**32 - 1)),
    ("priority", GenerateRequest(text="a", priority=101)),
    ("priority", GenerateRequest(text="a", priority=-(2**31))),
    ("request_id", GenerateRequest(text="a", request_id="a b")),
    ("request_id", GenerateRequest(text="a", request_id="a" * 129)),
    ("request_id", GenerateRequest(text="a", request_id="a\n")),
    ("cache_salt", GenerateRequest(text="a", cache_salt="../x")),
    ("cache_salt", GenerateRequest(text="a", cache_salt="http://169.254.169.254/")),
    ("cache_salt", GenerateRequest(text="a", cache_salt="\u0430")),
    ("sampling.temperature", sampling(temperature=-0.1)),
    ("sampling.temperature", sampling(temperature=100.1)),
    ("sampling.temperature", sampling(temperature=math.inf)),
    ("sampling.top_k", sampling(top_k=2**31)),
    ("sampling.top_p", sampling(top_p=0.0)),
    ("sampling.top_p", sampling(top_p=1.0001)),
    ("sampling.min_p", sampling(min_p=-0.1)),
    ("sampling.min_p", sampling(min_p=1.1)),
    ("sampling.allowed_token_ids", sampling(allowed_token_ids=[1] * 16385)),
    ("sampling.bad_words", sampling(bad_words=["x"] * 129)),
    ("sampling.bad_words", sampling(bad_words=["ok", ""])),
    ("sampling.bad_words", sampling(bad_words=["é" * 65])),
    ("sampling.typical_p", sampling(typical_p=0.0)),
    ("sampling.typical_p", sampling(typical_p=1.1)),
    ("sampling.repetition_penalty", sampling(repetition_penalty=0.0)),
    ("sampling.repetition_penalty", sampling(repetition_penalty=-1.0)),
    ("sampling.repetition_penalty", sampling(repetition_penalty=1e300)),
    ("sampling.frequency_penalty", sampling(frequency_penalty=2.1)),
    ("sampling.presence_penalty", sampling(presence_penalty=-2.1)),
    ("sampling.logit_bias", sampling(logit_bias={1: 100.5})),
    ("sampling.logit_bias", sampling(logit_bias={1: math.nan})),
    ("sampling.logit_bias", sampling(logit_bias=dict.fromkeys(range(1025), 1.0))),
    ("stopping.max_tokens", stopping(max_tokens=0)),
    ("stopping.max_tokens", stopping(max_tokens=2**32 - 1)),
    ("stopping.min_tokens", stopping(min_tokens=2**32 - 1)),
    ("stopping.min_tokens", stopping(max_tokens=3, min_tokens=4)),
    ("stopping.stop", stopping(stop=[str(i) for i in range(17)])),
    ("stopping.stop", stopping(stop=["ok", ""])),
    ("stopping.stop", stopping(stop=["é" * 129])),
    ("stopping.stop_token_ids", stopping(stop_token_ids=[1] * 129)),
    ("output.top_logprobs", GenerateRequest(text="a", output=Output(top_logprobs=21))),
    ("speculation.off", speculation(off=False)),
    ("speculation.auto", speculation(auto=False)),
    ("speculation.fixed_length", speculation(off=True, fixed_length=True)),
    ("speculation.max_draft_tokens", speculation(max_draft_tokens=65)),
    ("speculation.max_draft_tokens", speculation(auto=True, max_draft_tokens=2**32 - 1)),
    ("speculation.prompt_lookup.min_ngram", ngram(min_ngram=65)),
    ("speculation.prompt_lookup.max_ngram", ngram(max_ngram=2**32 - 1)),
    ("speculation.prompt_lookup.min_ngram", ngram(min_ngram=4, max_ngram=3)),
    ("speculation.draft_model.name", speculation(draft_model={"name": "../tiny"})),
    ("speculation.draft_model.name", speculation(draft_model={"name": "a\n"})),
    ("speculation.draft_model.name", speculation(draft_model={"name": "a" * 129})),
    (
        "adapters",
        GenerateRequest(text="a", adapter_id="x", adapters=[inference_pb2.AdapterWeight(id="y", weight=1)]),
    ),
    ("adapters", GenerateRequest(text="a", adapters=[{"id": "y", "weight": 1}] * 9)),
    *(
        (
            "adapters.weight",
            GenerateRequest(text="a", adapters=[{"id": "x", "weight": 1}, {"id": "y", "weight": weight}]),
        )
        for weight in (0.0, math.nan, math.inf, -math.inf, 1000.1)
    ),
    ("adapters.weight", GenerateRequest(text="a", adapters=[{"id": "y"}])),
    ("adapters.id", GenerateRequest(text="a", adapters=[{"weight": 1}])),
    ("merge", GenerateRequest(text="a", merge={"strategy": "linear"})),
    *(
        (f"merge.{name}", GenerateRequest(text="a", adapters=[{"id": "y", "weight": 1}], merge=merge))
        for name, merge in (
            ("strategy", {}),
            ("strategy", {"strategy": "cat"}),
            ("strategy", {"strategy": "svd"}),
            ("density", {"strategy": "ties"}),
            ("density", {"strategy": "ties", "density": 0}),
            ("density", {"strategy": "ties", "density": 1.5}),
            ("density", {"strategy": "ties", "density": math.nan}),
            ("density", {"strategy": "linear", "density": 0.5}),
            ("majority_sign", {"strategy": "ties", "density": 0.5, "majority_sign": "least"}),
            ("majority_sign", {"strategy": "linear", "majority_sign": "total"}),
            ("seed", {"strategy": "ties", "density": 0.5, "seed": 1}),
        )
    ),
    ("adapters.id", GenerateRequest(text="a", adapters=[{"id": "../y", "weight": 1}])),
]
NUMBERS = ["temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
BAD += [(f"sampling.{name}", sampling(**{name: math.nan})) for name in NUMBERS]


@pytest.mark.parametrize(("field", "request_"), BAD, ids=[f"{i}-{field}" for i, (field, _) in enumerate(BAD)])
def test_bad_values_name_their_field(field: str, request_: GenerateRequest) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate.check_generate(request_)
    assert caught.value.field == field
    assert len(caught.value.message) < 300
    assert caught.value.message.isprintable()
    assert caught.value.message.isascii()


BAD_IDS = [
    "..", "a/../b", "/etc/passwd", "a/b/c", "a\0b", "http://host/x", "file:x", "a\\b", "a b", " a", "a\n", ".hidden",
    "sq\u04cf", "\u202egpj", "a" * 129, "a/", "/a", "a//b", "~root", "a%2e%2e", "*", "a.", "a/.b", "C:x",
]  # fmt: skip


@pytest.mark.parametrize("adapter_id", BAD_IDS, ids=ascii)
def test_adapter_ids_are_never_paths(adapter_id: str) -> None:
    for request in (
        GenerateRequest(text="a", adapter_id=adapter_id),
        adapter_pb2.LoadAdapterRequest(adapter_id=adapter_id),
    ):
        with pytest.raises(InvalidAdapterId) as caught:
            check(request)
        assert caught.value.field == "adapter_id"
        assert caught.value.message.isascii()
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 400


@pytest.mark.parametrize("adapter_id", BAD_IDS, ids=ascii)
def test_the_heads_of_a_request_are_no_path_either(adapter_id: str) -> None:
    with pytest.raises(InvalidAdapterId) as caught:
        validate.check_generate(speculation(medusa={"adapter_id": adapter_id}))
    assert caught.value.field == "speculation.medusa.adapter_id"


@pytest.mark.parametrize("adapter_id", ["a", "A-1_b.c", "org/name", "x" * 128, "0/0", "a_", "a-"])
def test_ordinary_adapter_ids_pass(adapter_id: str) -> None:
    assert validate.check_adapter_id(adapter_id) == adapter_id


def test_every_adapter_in_a_request_is_found() -> None:
    request = GenerateRequest(
        adapter_id="a",
        adapters=[{"id": "b", "weight": 1}, {"id": "a", "weight": 1}],
        speculation={"medusa": {"adapter_id": "c"}},
    )
    assert validate.adapters_in(request) == ("a", "b", "c")
    assert validate.adapters_in(GenerateRequest(text="x")) == ()


def test_adapter_requests_need_a_name() -> None:
    for cls in (adapter_pb2.LoadAdapterRequest, adapter_pb2.UnloadAdapterRequest, adapter_pb2.GetAdapterRequest):
        with pytest.raises(InvalidAdapterId):
            validate.check_adapter_request(cls())
        validate.check_adapter_request(cls(adapter_id="sql"))


def test_tokenize() -> None:
    validate.check_tokenize(TokenizeRequest(text="", omit_special_tokens=True))
    validate.check_tokenize(TokenizeRequest(text="", adapter_id="org/sql", hub={"token": "hf_x"}))
    with pytest.raises(InvalidArgument, match="ORG/NAME"):
        validate.check_tokenize(TokenizeRequest(text="", adapter_id="sql", hub={}))
    validate.check_tokenize(TokenizeRequest(chat=Chat(messages=[ChatMessage(role="user", content="hi")])))
    with pytest.raises(InvalidArgument) as caught:
        validate.check_tokenize(TokenizeRequest())
    assert caught.value.field == "input"
    with pytest.raises(InvalidArgument, match="chat"):
        validate.check_tokenize(TokenizeRequest(chat=Chat()))


def test_special_tokens_of_a_chat_are_not_left_out() -> None:
    """The template writes them, so the field would do nothing."""
    chat = Chat(messages=[ChatMessage(role="user", content="hi")])
    with pytest.raises(InvalidArgument) as caught:
        validate.check_tokenize(TokenizeRequest(chat=chat, omit_special_tokens=True))
    assert caught.value.field == "omit_special_tokens"
    assert "`text`" in caught.value.message


@pytest.mark.parametrize("interval_s", [math.nan, -1.0, math.inf, 1e9])
def test_watch_interval(interval_s: float) -> None:
    with pytest.raises(InvalidArgument):
        validate.check_watch_load(worker_pb2.WatchLoadRequest(min_interval_s=interval_s))
    validate.check_watch_load(worker_pb2.WatchLoadRequest(min_interval_s=0.5))


# --- this model -----------------------------------------------------------------------------------------------------

TOO_MUCH_FOR_THE_MODEL: list[tuple[str, GenerateRequest]] = [
    ("token_ids.ids", GenerateRequest(token_ids=TokenIds(ids=[0, 100]))),
    ("token_ids.ids", GenerateRequest(token_ids=TokenIds(ids=[2**32 - 1]))),
    ("token_ids.ids", GenerateRequest(token_ids=TokenIds(ids=[1] * 32))),
    ("stopping.stop_token_ids", stopping(stop_token_ids=[100])),
    ("sampling.logit_bias", sampling(logit_bias={100: 1.0})),
    ("sampling.allowed_token_ids", sampling(allowed_token_ids=[1, 100])),
    ("stopping.max_tokens", stopping(max_tokens=33)),
    ("stopping.min_tokens", stopping(min_tokens=33)),
]


@pytest.mark.parametrize(("field", "request_"), TOO_MUCH_FOR_THE_MODEL, ids=[f for f, _ in TOO_MUCH_FOR_THE_MODEL])
def test_what_does_not_fit_the_model(field: str, request_: GenerateRequest) -> None:
    validate.check_generate(request_)
    with pytest.raises(InvalidArgument) as caught:
        validate.check_for_model(request_, LIMITS)
    assert caught.value.field == field


def test_more_alternatives_than_tokens() -> None:
    request = GenerateRequest(text="a", output=Output(top_logprobs=20))
    with pytest.raises(InvalidArgument, match="top_logprobs"):
        validate.check_for_model(request, ModelLimits(vocab_size=19, max_context_tokens=32))


def test_prompt_length() -> None:
    validate.check_prompt_length(31, LIMITS)
    with pytest.raises(ContextLengthExceeded, match="32"):
        validate.check_prompt_length(32, LIMITS)
    with pytest.raises(InvalidArgument, match="no tokens"):
        validate.check_prompt_length(0, LIMITS)


# --- anything at all ------------------------------------------------------------------------------------------------


@st.composite
def any_request(draw: DrawFn) -> GenerateRequest:
    """Requests of arbitrary values in every scalar field."""
    request = GenerateRequest()
    for path in draw(st.sets(st.sampled_from(sorted(leaves(GenerateRequest.DESCRIPTOR))), max_size=6)):
        *above, name = path.split(".")
        message: Any = request
        for part in above:
            message = getattr(message, part)
            if part in ("messages", "tool_calls", "adapters"):
                message = message.add()
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.message_type is not None:
            message.logit_bias[draw(st.integers(0, 2**32 - 1))] = draw(st.floats())
            continue
        values = {
            FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
            FieldDescriptor.CPPTYPE_STRING: st.text(st.characters(exclude_categories=["Cs"]), max_size=140),
            FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
            FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
            FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
            FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
        }[field.cpp_type]
        if isinstance(getattr(message, name), (bool, int, float, str)):
            setattr(message, name, draw(values))
        else:
            getattr(message, name).extend(draw(st.lists(values, max_size=20)))
    return request


@settings(max_examples=200, deadline=None)
@given(any_request())
def test_a_request_passes_or_gets_a_typed_error_with_a_field(request: GenerateRequest) -> None:
    refusal: InvalidArgument | None = None
    try:
        validate.check_generate(request)
        validate.check_for_model(request, LIMITS)
    except InvalidArgument as error:  # anything else fails the test
        refusal = error
    if refusal is not None:
        assert refusal.field
    else:
        numbers = [request.sampling.temperature, request.sampling.top_p, *request.sampling.logit_bias.values()]
        assert all(math.isfinite(number) for number in numbers)
        assert (request.n or 1) <= 64
        assert request.speculation.max_draft_tokens <= 64
        lookup = request.speculation.prompt_lookup
        assert lookup.min_ngram <= (lookup.max_ngram or 64) <= 64
        assert all(token < LIMITS.vocab_size for token in request.token_ids.ids)
