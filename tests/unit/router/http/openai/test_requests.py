"""Translation of OpenAI requests."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from support.openai_jobs import CHAT, NAMES, chat, completion

from loraplex_contracts.errors import AdapterNotFound, InvalidArgument, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import check_generate
from loraplex_router.http.fields import MAX_IGNORED_CHARS, MAX_IGNORED_NAMES, Fields, adapter_of
from loraplex_router.http.openai import requests
from loraplex_router.http.openai.fields import (
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    ignored_fields,
)


def wire(**fields: Any) -> pb.GenerateRequest:
    (request,) = completion(**fields).requests
    check_generate(request)
    return request


@pytest.mark.parametrize(
    ("model", "adapter_id"),
    [
        (None, ""), ("", ""), ("org/base", ""), ("base", ""), ("sql", "sql"), ("acme/sql", "acme/sql"),
        ("base:sql", "sql"), ("org/base:acme/sql", "acme/sql"),
    ],
)  # fmt: skip
def test_the_model_names_the_adapter(model: str | None, adapter_id: str) -> None:
    assert adapter_of(model, NAMES) == adapter_id
    assert wire(model=model).adapter_id == adapter_id


@pytest.mark.parametrize("model", ["other:sql", "base:", ":", "sql:base"])
def test_a_name_after_an_unknown_base_is_unknown(model: str) -> None:
    with pytest.raises(AdapterNotFound):
        adapter_of(model, NAMES)


def test_defaults_are_openais() -> None:
    request = wire()
    assert request.text == "hi"
    assert request.request_id == "rid"
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 1.0
    assert request.stopping.max_tokens == 16
    assert request.n == 1
    assert not request.HasField("speculation")
    assert not chat().requests[0].stopping.HasField("max_tokens")


def test_null_counts_as_absent() -> None:
    names = set(CompletionRequest.model_fields) - {"prompt"} | set(REFUSED) | {"user", "unheard_of"}
    assert wire(**dict.fromkeys(names)) == wire()
    assert completion(**dict.fromkeys(names)).ignored == ()


@pytest.mark.parametrize(
    ("name", "neutral", "value"),
    [
        ("custom_logit_processor", "", "x"), ("session_params", {}, {"id": "s"}), ("token_ids_logprob", [], [5]),
        ("return_hidden_states", False, True), ("input_ids", [], [1, 2]), ("bootstrap_room", -1, 3),
    ],
)  # fmt: skip
def test_what_sglang_would_answer_otherwise_is_refused(name: str, neutral: Any, value: Any) -> None:
    for made in (chat, completion):
        assert made(**{name: neutral}) == made()
        with pytest.raises(Unimplemented) as caught:
            made(**{name: value})
        assert caught.value.field == name


def test_the_effort_of_a_chat_s_reasoning() -> None:
    effort = chat(reasoning_effort="low")
    assert json.loads(effort.requests[0].chat.template_kwargs_json) == {"reasoning_effort": "low"}
    for fields in ({"reasoning_effort": None}, {"reasoning_effort": "low"}):
        assert chat(reasoning={"effort": "low"}, **fields) == effort
    assert chat(reasoning={"effort": None, "summary": "auto", "exclude": None}).ignored == ("reasoning.summary",)
    for fields, name in (
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning": {"effort": "\ud800"}}, "reasoning.effort"),
        ({"reasoning_effort": "\ud800"}, "reasoning_effort"),
        ({"verbosity": "\ud800"}, "verbosity"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            chat(**fields)
        assert caught.value.field == name


def test_the_template_is_told_of_the_verbosity() -> None:
    for fields in ({}, {"chat_template_kwargs": {"verbosity": "low"}, "verbosity": "high"}):
        request = chat(**{"verbosity": "low", **fields}).requests[0]
        assert json.loads(request.chat.template_kwargs_json) == {"verbosity": "low"}
    assert wire(verbosity="medium") == wire()
    with pytest.raises(Unimplemented, match="`verbosity`"):
        wire(verbosity="low")


def test_a_seed_of_minus_one_is_a_random_one() -> None:
    assert wire(seed=-1) == wire()
    assert wire(seed=0) != wire()


def test_every_field_reaches_the_wire() -> None:
    request = wire(
        temperature=0, top_p=0.5, top_k=4, min_p=0.1, typical_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2,
        presence_penalty=0.3, seed=-2, logit_bias={"5": -100}, allowed_token_ids=[1, 5], bad_words=["no"], n=3,
        stop="END", stop_token_ids=[9], min_tokens=2, max_tokens=5, ignore_eos=True, include_stop_str_in_output=True,
        priority=-7, request_id="mine", cache_salt="salt", speculation="off", logprobs=2, echo=True,
    )  # fmt: skip
    expected = pb.GenerateRequest(
        text="hi", n=3, priority=7, request_id="mine", cache_salt="salt",
        sampling=pb.Sampling(
            temperature=0, top_p=0.5, top_k=4, min_p=0.1, typical_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2,
            presence_penalty=0.3, seed=(1 << 64) - 2, logit_bias={5: -100}, allowed_token_ids=[1, 5], bad_words=["no"],
        ),
        stopping=pb.Stopping(
            max_tokens=5, min_tokens=2, stop=["END"], stop_token_ids=[9], ignore_eos=True, include_stop=True
        ),
        speculation=pb.Speculation(off=True),
        output=pb.Output(
            logprobs=True, top_logprobs=2, prompt_logprobs=True, prompt_tokens=True, echo=True, token_bytes=True
        ),
    )  # fmt: skip
    assert request == expected
    assert wire(top_k=-1).sampling.top_k == 0


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a", ["a"]), ("", [""]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)  # fmt: skip
def test_prompts_fan_out(prompt: Any, inputs: list[Any]) -> None:
    requests = completion(prompt=prompt).requests
    assert [list(one.token_ids.ids) if one.HasField("token_ids") else one.text for one in requests] == inputs
    assert len({one.request_id for one in requests}) == len(requests) == len(inputs)


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {}, [], [[]], ["a", 1], [1, "a"], [[1], "a"], [True], [-1], [1 << 32], [1.5], ["a"] * 129, "\ud800"],
)
def test_prompts_of_a_wrong_form_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        completion(prompt=prompt)
    assert caught.value.field == "prompt"


def test_texts_of_one_request_are_bounded() -> None:
    with pytest.raises(InvalidArgument, match="at most 512"):
        completion(prompt=["a"] * 128, n=64)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - CompletionRequest.model_fields.keys()))
def test_fields_that_would_change_the_answer_are_refused_by_name(name: str) -> None:
    with pytest.raises(Unimplemented) as caught:
        completion(**{name: "something else"})
    assert caught.value.field == name
    assert f"`{name}`" in caught.value.message
    for neutral in REFUSED[name][0]:
        assert completion(**{name: neutral}).ignored == ()


def test_a_prediction_is_ignored_by_name() -> None:
    assert chat(prediction={"type": "content", "content": "hi"}).ignored == ("prediction",)


def test_unknown_fields_are_named_fit_for_a_header() -> None:
    assert completion(foo=1, user="me").ignored == ("foo",)
    (name,) = completion(**{"a\r\nset-cookie: x,y" + "z" * 99: 1}).ignored
    assert name.startswith("a??set-cookie??x?y")
    assert len(name) == MAX_IGNORED_CHARS
    assert len(completion(**{f"x{number}": 1 for number in range(99)}).ignored) == MAX_IGNORED_NAMES
    body = ChatCompletionRequest.model_validate(
        {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}}
    )
    assert ignored_fields(body) == ("stream_options.include_obfuscation",)


@pytest.mark.parametrize(
    ("format", "names"),
    [
        ({"type": "json_object", "shema": {}}, ("shema",)),
        ({"type": "json", "value": {}, "whitespace": 1}, ("whitespace",)),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}, ()),
        ({"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}, ("json_schema.shema",)),
        ({"type": "json_schema", "json_schema": {"type": "object", "title": "x"}}, ()),
        ({"type": "regex", "pattern": "a", "flags": "i"}, ("flags",)),
        ({"type": "text", "schema": {}}, ("schema",)),
    ],
)
def test_unknown_parts_of_formats_are_named(format: dict[str, Any], names: tuple[str, ...]) -> None:
    assert completion(response_format=format).ignored == tuple(f"response_format.{name}" for name in names)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": "x", "messages": CHAT}),
        (CompletionRequest, {"prompt": "x", "max_completion_tokens": 3}),
        (CompletionRequest, {"prompt": "x", "top_logprobs": 1}),
        (ChatCompletionRequest, {"messages": CHAT, "prompt": "x"}),
        (TokenizeRequest, {"prompt": "x", "truncate_prompt_tokens": 2}),
    ],
)
def test_fields_of_other_routes_are_refused_by_name(model: type[Fields], body: dict[str, Any]) -> None:
    (*_, name) = body
    with pytest.raises(InvalidArgument, match=f"`{name}` is not a field of this route") as caught:
        ignored_fields(model.model_validate(body))
    assert caught.value.field == name
    for empty in (None, "", 0, [], {}, False):
        assert ignored_fields(model.model_validate({**body, name: empty})) == ()


def test_a_bias_has_one_value() -> None:
    assert dict(completion(logit_bias={"07": 1.0, "8": 2.0}).requests[0].sampling.logit_bias) == {7: 1.0, 8: 2.0}
    with pytest.raises(InvalidArgument, match="`logit_bias` has token 7 twice"):
        completion(logit_bias={"7": 1.0, "07": 2.0})


def test_chats_have_no_best_of() -> None:
    assert ignored_fields(ChatCompletionRequest.model_validate({"messages": CHAT, "best_of": 1})) == ()
    with pytest.raises(Unimplemented, match="`best_of`"):
        ignored_fields(ChatCompletionRequest.model_validate({"messages": CHAT, "best_of": 2}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", pb.Speculation(auto=True)),
        ("medusa", pb.Speculation(medusa=pb.MedusaSpeculation())),
        ("draft_model:small", pb.Speculation(draft_model=pb.DraftModelSpeculation(name="small"))),
        (
            {"kind": "prompt_lookup", "max_ngram": 3, "max_draft_tokens": 4, "fixed_length": True},
            pb.Speculation(
                prompt_lookup=pb.PromptLookupSpeculation(max_ngram=3), max_draft_tokens=4, fixed_length=True
            ),
        ),
        ({"max_draft_tokens": 4}, pb.Speculation(max_draft_tokens=4)),
    ],
)
def test_speculation(value: Any, expected: pb.Speculation) -> None:
    assert wire(speculation=value).speculation == expected


@pytest.mark.parametrize(
    "value", [1, [], "fast", {"kind": ["off"]}, {"kind": "auto", "name": "x"}, {"max_draft_tokens": "4"},
              {"kind": "prompt_lookup", "max_ngram": -1}, {"kind": "medusa", "adapter_id": "\ud800"},
              "draft_model:\ud800", {"kind": "draft_model:a", "name": "b"}],
)  # fmt: skip
def test_speculation_of_a_wrong_form_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="speculation"):
        completion(speculation=value)


@pytest.mark.parametrize(
    ("value", "name"),
    [({"max_draft_tokens": -1}, "max_draft_tokens"), ({"kind": "medusa", "adapter_id": 3}, "adapter_id")],
)
def test_a_parameter_of_speculation_that_does_not_fit_is_named(value: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"`speculation.{name}` has a value of a wrong type or size") as caught:
        completion(speculation=value)
    assert caught.value.field == f"speculation.{name}"


def test_chat_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answered = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "annotations": []}
    (request,) = chat(messages=[{"role": "system", "content": parts, "name": None}, answered, *CHAT]).requests
    check_generate(request)
    assert [(one.role, one.content) for one in request.chat.messages] == [
        ("system", "ab"), ("assistant", ""), ("user", "hi"),
    ]  # fmt: skip
    assert chat(max_tokens=3, max_completion_tokens=4).requests[0].stopping.max_tokens == 4
    assert chat(add_generation_prompt=False).requests[0].chat.omit_generation_prompt


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": "hi", "name": "\ud800"}, "messages[0].name"),
        ({"role": "assistant", "content": "hi", "audio": {"id": "x"}}, "messages[0].audio"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
    ],
)
def test_messages_that_are_not_texts_are_refused(message: Any, field: str) -> None:
    with pytest.raises((InvalidArgument, Unimplemented)) as caught:
        chat(messages=[message])
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_parts_that_are_no_texts_are_refused_by_name(kind: str) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "x"}}]
    with pytest.raises(InvalidArgument, match=rf"messages\[1\]\.content` has a part of type '{kind}': images"):
        chat(messages=[{"role": "system", "content": "brief"}, {"role": "user", "content": parts}])


def test_unknown_fields_of_messages_are_named() -> None:
    answered = {"role": "assistant", "content": "so", "id": "x", "annotations": [], "refusal": None}
    beside = {"provider_specific_fields": {"reasoning": None}, "thinking_blocks": [{}], "function_call": None}
    messages = [{"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}, answered | beside, answered]
    job = chat(messages=messages)
    names = ("cache_control", "id", "provider_specific_fields", "thinking_blocks")
    assert job.ignored == tuple(f"messages.{name}" for name in names)
    assert [one.content for one in job.requests[0].chat.messages] == ["hi", "so", "so"]
    assert ignored_fields(TokenizeRequest.model_validate({"messages": messages})) == job.ignored


def test_what_an_assistant_has_said_may_have_other_parts() -> None:
    parts = [
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "reasoning", "reasoning": "so"},
        {"type": "text", "text": "No, "}, {"type": "refusal", "refusal": "never."},
    ]  # fmt: skip
    job = chat(messages=[*CHAT, {"role": "assistant", "content": parts}, {"role": "tool", "content": None}])
    assert [one.content for one in job.requests[0].chat.messages] == ["hi", "No, never.", ""]
    assert job.ignored == ("messages.content.thinking", "messages.content.reasoning")
    for part in parts[0], parts[3]:
        with pytest.raises(InvalidArgument, match="takes a text, or parts of type text only"):
            chat(messages=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("name", "value"), [("audio", {"id": "x"}), ("function_call", {"name": "f", "arguments": ""}), ("prefix", True)]
)
def test_fields_of_messages_that_would_be_lost_are_refused(name: str, value: Any) -> None:
    with pytest.raises(Unimplemented, match=rf"`messages\[0\]\.{name}` is not available") as caught:
        chat(messages=[{"role": "assistant", "content": "hi", name: value}])
    assert caught.value.field == f"messages[0].{name}"
    assert chat(messages=[{"role": "assistant", "content": "hi", name: False}]).ignored == ()


def test_chats_reach_the_wire_whole() -> None:
    call: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1+1?", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "2, I", "reasoning": "so"},
    ]
    (request,) = chat(
        messages=messages, continue_final_message=True, documents=[{"text": "x"}], reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False}, chat_template="{{ messages }}",
    ).requests  # fmt: skip
    check_generate(request)
    assert request.chat == pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="1+1?", name="Ada"),
            pb.ChatMessage(
                role="assistant", reasoning="hm",
                tool_calls=[pb.ToolCall(id="call_1", name="add", arguments_json='{"a": 1}')],
            ),
            pb.ChatMessage(role="tool", content="2", tool_call_id="call_1"),
            pb.ChatMessage(role="assistant", content="2, I", reasoning="so"),
        ],
        continue_final_message=True,
        documents_json='[{"text":"x"}]',
        template_kwargs_json='{"enable_thinking":false,"reasoning_effort":"low"}',
        template="{{ messages }}",
    )  # fmt: skip
    call["function"] = {"name": "add", "arguments": {"a": 1}}  # as some clients send it
    (request,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).requests
    assert request.chat.messages[0].tool_calls[0].arguments_json == '{"a":1}'
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        chat(continue_final_message=True, add_generation_prompt=True)
    deep: Any = []
    for _ in range(500_000):  # more than any version of Python writes
        deep = [deep]
    with pytest.raises(InvalidArgument, match="nested too deep"):
        chat(chat_template_kwargs={"x": deep})


def test_defaults_of_the_model_stand_for_what_is_left_out() -> None:
    defaults = pb.Sampling(temperature=0.6, top_p=0.9)
    body = CompletionRequest(prompt="hi", top_p=0.5)
    (request,) = requests.completion_job(body, NAMES, "rid", 7, defaults).requests
    assert request.sampling == pb.Sampling(temperature=0.6, top_p=0.5)
    assert defaults == pb.Sampling(temperature=0.6, top_p=0.9)


def test_the_prompt() -> None:
    assert wire(truncate_prompt_tokens=-1).truncate_prompt == pb.Truncate()
    assert wire(truncate_prompt_tokens=-1).HasField("truncate_prompt")
    assert wire(truncate_prompt_tokens=9).truncate_prompt == pb.Truncate(max_tokens=9)
    cut = wire(truncate_prompt_tokens=9, truncation_side="right")
    assert cut.truncate_prompt == pb.Truncate(max_tokens=9, keep_start=True)
    assert not wire(truncation_side="left").HasField("truncate_prompt")
    with pytest.raises(InvalidArgument, match="truncate_prompt_tokens"):
        wire(truncate_prompt_tokens=0)
    assert wire(skip_special_tokens=False).output.keep_special_tokens
    assert wire(add_special_tokens=False).omit_special_tokens
    assert not wire(add_special_tokens=False, prompt=[1]).omit_special_tokens
    assert wire(return_token_ids=True).output == pb.Output(prompt_tokens=True)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    assert wire(stream=True, stream_options=usage).output == pb.Output(prompt_tokens=True)


def test_logprobs_of_the_prompt() -> None:
    request = wire(prompt_logprobs=5, logprobs=2)
    assert request.output == pb.Output(
        logprobs=True, top_logprobs=5, prompt_tokens=True, prompt_logprobs=True, token_bytes=True
    )
    with pytest.raises(InvalidArgument, match="prompt_logprobs"):
        completion(prompt_logprobs=1, stream=True)


def test_no_new_token_is_one_that_has_no_text() -> None:
    job = completion(max_tokens=0, echo=True, logprobs=1, temperature=2, bad_words=["x"], stop="y", guided_regex="a")
    assert job.is_prompt_only
    (request,) = job.requests
    check_generate(request)
    assert request.sampling == pb.Sampling(temperature=0, allowed_token_ids=[0])
    assert request.stopping == pb.Stopping(max_tokens=1, stop_token_ids=[0])
    assert not request.HasField("grammar")
    for fields in ({}, {"logprobs": 1}):
        with pytest.raises(InvalidArgument, match="max_tokens"):
            completion(max_tokens=0, **fields)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        chat(max_tokens=0)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": -1}, "sampling.temperature"),
        ({"top_p": 2}, "sampling.top_p"),
        ({"min_tokens": 5}, "stopping.min_tokens"),
        ({"stop": "x" * 300}, "stopping.stop"),
        ({"guided_regex": "a", "ignore_eos": True}, "stopping.ignore_eos"),
    ],
)
def test_what_no_new_token_needs_is_checked_all_the_same(fields: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        completion(max_tokens=0, echo=True, **fields)
    assert (refused.value.field or "").startswith(name)


def test_best_of() -> None:
    assert completion(best_of=1, stream=True).requests[0].n == 1
    for fields in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        with pytest.raises(InvalidArgument, match="best_of"):
            completion(**fields)
    with pytest.raises(InvalidArgument, match="at most 512"):
        completion(prompt=["a"] * 128, best_of=64)


def test_options_that_need_others_are_refused_without_them() -> None:
    with pytest.raises(InvalidArgument, match="top_logprobs"):
        chat(top_logprobs=3)
    with pytest.raises(InvalidArgument, match="stream_options"):
        completion(stream_options={"include_usage": True})
    for nothing in ({}, {"include_usage": False, "continuous_usage_stats": None}):
        assert completion(stream_options=nothing) == completion()


def test_tokenize() -> None:
    text = requests.tokenize_request(TokenizeRequest(prompt="hi", add_special_tokens=False))
    assert text == pb.TokenizeRequest(text="hi", omit_special_tokens=True)
    asked = requests.tokenize_request(TokenizeRequest.model_validate({"messages": CHAT}))
    assert (asked.chat.messages[0].content, asked.adapter_id) == ("hi", "")
    own = requests.tokenize_request(TokenizeRequest.model_validate({"messages": CHAT, "chat_template": "x"}), "a")
    assert (own.chat.template, own.adapter_id) == ("x", "a")
    asked = requests.tokenize_request(
        TokenizeRequest.model_validate({"messages": CHAT, "tools": [{"a": 1}], "return_offsets": True})
    )
    assert (asked.chat.tools_json, asked.offsets) == ('[{"a":1}]', True)
    with pytest.raises(InvalidArgument, match="`prompt` or `messages`"):
        requests.tokenize_request(TokenizeRequest())
    for field in ({"tools": [{}]}, {"chat_template": "x"}, {"continue_final_message": True}):
        with pytest.raises(InvalidArgument, match="goes with a chat"):
            requests.tokenize_request(TokenizeRequest.model_validate({"prompt": "hi", **field}))


def test_of_several_fields_of_chats_the_first_is_named() -> None:
    given = {
        "continue_final_message": True,
        "chat_template": "x",
        "chat_template_kwargs": {"a": 1},
        "documents": [{"a": 1}],
        "reasoning_effort": "low",
        "tools": [{}],
    }
    for pair in itertools.combinations(given, 2):
        body = TokenizeRequest.model_validate({"prompt": "hi", **{name: given[name] for name in pair}})
        with pytest.raises(InvalidArgument) as caught:
            requests.tokenize_request(body)
        assert caught.value.field == pair[0]


def test_detokenize() -> None:
    body = DetokenizeRequest(tokens=[1, 2])
    assert not requests.detokenize_request(body, omits_special=False).omit_special_tokens
    assert requests.detokenize_request(body, omits_special=True).omit_special_tokens
    body = DetokenizeRequest(tokens=[1, 2], skip_special_tokens=False)
    assert requests.detokenize_request(body, omits_special=True) == pb.DetokenizeRequest(token_ids=[1, 2])
