"""Options as messages: every option in its field, wrong values by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from loraplex._requests import generate_request, load_request, naming, tokenize_request
from loraplex.types import (
    DraftModel,
    GenerateOptions,
    Grammar,
    Hub,
    Medusa,
    Member,
    Merge,
    PromptLookup,
    Speculation,
    Truncate,
)
from loraplex_contracts.errors import InvalidAdapterId, InvalidArgument
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_proto.v1 import adapter_pb2
from loraplex_proto.validate import check_generate

# --- options to the message of the wire, or an error with its field ---------------------------------------------------

EVERYTHING: dict[str, tuple[Any, str]] = {
    # option: (value, path in the message)
    "adapter_id": ("sql", "adapter_id"),
    "max_tokens": (5, "stopping.max_tokens"),
    "min_tokens": (1, "stopping.min_tokens"),
    "stop": (["a", "b"], "stopping.stop"),
    "stop_token_ids": ([4], "stopping.stop_token_ids"),
    "ignore_eos": (True, "stopping.ignore_eos"),
    "include_stop": (True, "stopping.include_stop"),
    "temperature": (0.5, "sampling.temperature"),
    "top_k": (3, "sampling.top_k"),
    "top_p": (0.5, "sampling.top_p"),
    "min_p": (0.25, "sampling.min_p"),
    "bad_words": (["a", "b c"], "sampling.bad_words"),
    "allowed_token_ids": ([5, 2], "sampling.allowed_token_ids"),
    "typical_p": (0.75, "sampling.typical_p"),
    "repetition_penalty": (1.5, "sampling.repetition_penalty"),
    "frequency_penalty": (-1.0, "sampling.frequency_penalty"),
    "presence_penalty": (1.0, "sampling.presence_penalty"),
    "seed": (2**64 - 1, "sampling.seed"),
    "logit_bias": ({3: -1.5}, "sampling.logit_bias"),
    "n": (2, "n"),
    "logprobs": (True, "output.logprobs"),
    "top_logprobs": (2, "output.top_logprobs"),
    "prompt_logprobs": (True, "output.prompt_logprobs"),
    "echo": (True, "output.echo"),
    "omit_token_ids": (True, "output.omit_token_ids"),
    "prompt_tokens": (True, "output.prompt_tokens"),
    "keep_special_tokens": (True, "output.keep_special_tokens"),
    "token_bytes": (True, "output.token_bytes"),
    "parse_chat": (True, "output.parse_chat"),
    "omit_special_tokens": (True, "omit_special_tokens"),
    "max_draft_tokens": (4, "speculation.max_draft_tokens"),
    "fixed_draft_length": (True, "speculation.fixed_length"),
    "priority": (-3, "priority"),
    "request_id": ("r1", "request_id"),
    "cache_salt": ("s1", "cache_salt"),
}
TESTED_BELOW = {
    *("grammar", "continue_final_message", "tools", "documents", "template_kwargs", "chat_template"),
    *("tool_choice", "parallel_tool_calls"),
    *("token_ids", "messages", "omit_generation_prompt", "adapters", "merge", "speculation", "timeout_s"),
    *("truncate_prompt", "hub", "in_bucket"),
}


def value_at(message: Any, path: str) -> Any:
    for part in path.split("."):
        message = getattr(message, part)
    return message


def test_every_option_is_tested() -> None:
    assert set(get_type_hints(GenerateOptions)) == EVERYTHING.keys() | TESTED_BELOW
    assert set(SAMPLING_OPTIONS) <= set(get_type_hints(GenerateOptions)), "each option of the table is one of the SDK's"


@pytest.mark.parametrize("option", EVERYTHING)
def test_options_reach_their_field(option: str) -> None:
    value, path = EVERYTHING[option]
    request = generate_request("hi", {option: value})  # type: ignore[typeddict-item]
    got = value_at(request, path)
    assert got == value
    assert request.text == "hi"
    others = {p for o, (_, p) in EVERYTHING.items() if o not in {option, "request_id"}}
    blank = generate_request("hi", {})
    assert all(value_at(request, p) == value_at(blank, p) for p in others), "and no other"


def test_zero_is_not_the_same_as_left_out() -> None:
    request = generate_request("hi", {"temperature": 0.0, "seed": 0, "top_p": None})
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_p")


def test_one_stop_string_needs_no_list() -> None:
    assert list(generate_request("hi", {"stop": "\n"}).stopping.stop) == ["\n"]


def test_a_plain_request_is_one_that_servers_take() -> None:
    request = generate_request("hi", {"messages": None})
    check_generate(request)
    assert len(request.request_id) == 32
    assert request.request_id != generate_request("hi", {}).request_id


def test_token_ids_and_chat() -> None:
    assert list(generate_request(None, {"token_ids": (1, 2)}).token_ids.ids) == [1, 2]
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    request = generate_request(None, {"messages": chat, "omit_generation_prompt": True})  # type: ignore[typeddict-item]
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert request.chat.omit_generation_prompt
    check_generate(request)


def test_tools_and_calls() -> None:
    calls: Any = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"function": {"name": "g", "arguments": {"y": [2]}}},
        {"function": {"name": "h"}},
    ]
    chat: Any = [
        {"role": "user", "content": "hi", "name": "zoe"},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    beside: Any = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "documents": [{"title": "é"}],
        "template_kwargs": {"enable_thinking": False},
        "continue_final_message": True,
        "chat_template": "{{ messages }}",
    }
    request = generate_request(None, {"messages": chat, **beside})
    check_generate(request)
    user, assistant, tool = request.chat.messages
    assert (user.name, assistant.content, assistant.reasoning, tool.tool_call_id) == ("zoe", "", "hm", "c1")
    assert [(one.id, one.name, one.arguments_json) for one in assistant.tool_calls] == [
        ("c1", "f", '{"x": 1}'),
        ("", "g", '{"y": [2]}'),
        ("", "h", ""),
    ]
    assert json.loads(request.chat.tools_json) == beside["tools"]
    assert json.loads(request.chat.documents_json) == beside["documents"]
    assert json.loads(request.chat.template_kwargs_json) == beside["template_kwargs"]
    assert request.chat.continue_final_message
    assert request.chat.template == beside["chat_template"]
    assert tokenize_request(None, chat, False, False, options={"adapter_id": "sql"}).adapter_id == "sql"
    assert tokenize_request(None, chat, False, False, options=beside).chat == request.chat


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("tools", [{"f": {1}}], "chat.tools_json"),
        ("template_kwargs", {"x": math.nan}, "chat.template_kwargs_json"),
        ("documents", object(), "chat.documents_json"),
        ("messages", [{"role": "a", "tool_calls": ["f"]}], "chat.messages.tool_calls"),
        ("messages", [{"role": "a", "tool_calls": [{"function": {}}]}], "chat.messages.tool_calls.name"),
        ("messages", [{"role": "a", "content": "", "name": 5}], "chat.messages.name"),
        ("messages", [{"role": "a", "content": None}], "chat.messages.content"),
    ],
)
def test_chats_that_the_wire_cannot_carry(option: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        generate_request(None, {"messages": [], option: value})  # type: ignore[typeddict-item]
    assert caught.value.field == field


def test_answers_of_openais_library_come_back_as_messages() -> None:
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    answer: Any = {"role": "assistant", "content": "hi", "reasoning_content": "hm", **empty}
    (message,) = generate_request(None, {"messages": [answer]}).chat.messages
    assert (message.content, message.reasoning) == ("hi", "hm")


@pytest.mark.parametrize("key", ["x", "contents", "prefix", 5])
def test_keys_that_a_message_does_not_have(key: Any) -> None:
    chat: Any = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", key: 1}]
    with pytest.raises(InvalidArgument, match=rf"`messages\[1\]` cannot have {key!r}: .* a message has role, content"):
        generate_request(None, {"messages": chat})
    with pytest.raises(InvalidArgument, match="cannot have"):
        tokenize_request(None, chat, False, False)


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_choices_of_tools(choice: Any) -> None:
    chat: Any = [{"role": "user", "content": "hi"}]
    request = generate_request(None, {"messages": chat, "tool_choice": choice, "parallel_tool_calls": False})
    assert request.chat.tool_choice.WhichOneof("kind") == choice
    assert getattr(request.chat.tool_choice, choice)
    assert request.chat.HasField("parallel_tool_calls")
    named = generate_request(None, {"messages": chat, "tool_choice": {"function": {"name": "f"}}})
    assert named.chat.tool_choice.name == "f"
    for bad in ("all", {"name": "f"}, {"function": {"name": 5}}, 5):
        with pytest.raises(InvalidArgument) as caught:
            generate_request(None, {"messages": chat, "tool_choice": bad})  # type: ignore[typeddict-item]
        assert str(caught.value.field).startswith("chat.tool_choice")
    with pytest.raises(InvalidArgument, match="goes with messages"):
        generate_request("a", {"tool_choice": "auto"})


@pytest.mark.parametrize("option", ["tools", "documents", "template_kwargs", "chat_template", "continue_final_message"])
def test_what_goes_with_messages_only(option: str) -> None:
    with pytest.raises(InvalidArgument, match="goes with messages"):
        generate_request("a", {option: [{"a": 1}]})  # type: ignore[typeddict-item]
    with pytest.raises(InvalidArgument, match="goes with messages"):
        tokenize_request("a", None, False, False, options={option: [{"a": 1}]})  # type: ignore[typeddict-item]


def test_empty_prompts_are_sent_as_they_are() -> None:
    """The server knows what is wrong with them."""
    assert generate_request("", {}).WhichOneof("input") == "text"
    assert generate_request(None, {"token_ids": []}).WhichOneof("input") == "token_ids"
    assert generate_request(None, {"messages": []}).WhichOneof("input") == "chat"


@pytest.mark.parametrize(
    ("prompt", "options"),
    [(None, {}), ("a", {"token_ids": [1]}), (None, {"token_ids": [1], "messages": []}), ("a", {"messages": []})],
)
def test_exactly_one_prompt(prompt: str | None, options: GenerateOptions) -> None:
    with pytest.raises(InvalidArgument, match="one of prompt, token_ids and messages") as caught:
        generate_request(prompt, options)
    assert caught.value.field == "input"


@pytest.mark.parametrize(
    ("speculation", "kind"),
    [
        ("off", "off"),
        ("auto", "auto"),
        ("medusa", "medusa"),
        (Medusa("heads"), "medusa"),
        ("prompt_lookup", "prompt_lookup"),
        (PromptLookup(2, 5), "prompt_lookup"),
        ("draft_model", "draft_model"),
        (DraftModel("small"), "draft_model"),
    ],
)
def test_speculation(speculation: Any, kind: str) -> None:
    message = generate_request("a", {"speculation": speculation}).speculation
    assert message.WhichOneof("kind") == kind
    assert message.medusa.adapter_id == getattr(speculation, "adapter_id", "")
    assert message.draft_model.name == getattr(speculation, "name", "")
    assert message.prompt_lookup.max_ngram == getattr(speculation, "max_ngram", 0)


@pytest.mark.parametrize(
    ("whole", "options"),
    [
        (Speculation(), {}),
        (Speculation("off"), {"speculation": "off"}),
        (Speculation("auto", max_draft_tokens=3), {"speculation": "auto", "max_draft_tokens": 3}),
        (
            Speculation(PromptLookup(2, 5), max_draft_tokens=6, fixed_length=True),
            {"speculation": PromptLookup(2, 5), "max_draft_tokens": 6, "fixed_draft_length": True},
        ),
        (Speculation(max_draft_tokens=2), {"max_draft_tokens": 2}),
    ],
)
def test_all_about_speculation_in_one_value(whole: Speculation, options: GenerateOptions) -> None:
    one = generate_request("a", {"speculation": whole}).speculation
    other = generate_request("a", options).speculation
    assert one == other
    mixed = generate_request("a", {"speculation": Speculation("medusa"), "max_draft_tokens": 4})
    assert (mixed.speculation.WhichOneof("kind"), mixed.speculation.max_draft_tokens) == ("medusa", 4)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_draft_tokens": 3}, "speculation.max_draft_tokens"),
        ({"fixed_draft_length": False}, "speculation.fixed_length"),
    ],
)
def test_nothing_about_speculation_is_said_twice(options: dict[str, Any], field: str) -> None:
    whole = Speculation("auto", max_draft_tokens=3, fixed_length=True)
    with pytest.raises(InvalidArgument, match="twice") as caught:
        generate_request("a", {"speculation": whole, **options})  # type: ignore[typeddict-item]
    assert caught.value.field == field


def test_omit_generation_prompt_is_for_messages() -> None:
    with pytest.raises(InvalidArgument, match="goes with messages"):
        generate_request("a", {"omit_generation_prompt": True})
    with pytest.raises(InvalidArgument, match="goes with messages"):
        tokenize_request("a", None, True, False)
    assert tokenize_request(None, [{"role": "user", "content": "a"}], True, False).chat.omit_generation_prompt


@pytest.mark.parametrize(
    ("given", "max_tokens", "keep_start"),
    [(7, 7, False), (0, 0, False), (Truncate(), 0, False), (Truncate(5, keep_start=True), 5, True)],
)
def test_truncation(given: int | Truncate, max_tokens: int, keep_start: bool) -> None:
    request = generate_request("a", {"truncate_prompt": given})
    assert request.HasField("truncate_prompt"), "0 is not the same as left out"
    assert (request.truncate_prompt.max_tokens, request.truncate_prompt.keep_start) == (max_tokens, keep_start)
    assert not generate_request("a", {}).HasField("truncate_prompt")


@pytest.mark.parametrize(
    ("grammar", "path", "value"),
    [
        (Grammar(json_schema='{"type": "null"}'), "json_schema", '{"type": "null"}'),
        (Grammar(json_schema={"type": "null"}), "json_schema", '{"type": "null"}'),
        (Grammar(json_object=True), "json_object", True),
        (Grammar(regex="a+"), "regex", "a+"),
        (Grammar(choice=["a", "b"]), "choice.texts", ["a", "b"]),
        (Grammar(lark="start: X"), "lark", "start: X"),
        (Grammar(gbnf="root ::= x"), "gbnf", "root ::= x"),
        (Grammar(structural_tag={"a": 1}, compact=True), "structural_tag_json", '{"a": 1}'),
    ],
)
def test_grammars(grammar: Grammar, path: str, value: Any) -> None:
    request = generate_request("a", {"grammar": grammar})
    assert value_at(request.grammar, path) == value
    assert request.grammar.compact == grammar.compact
    check_generate(request)


@pytest.mark.parametrize("grammar", [Grammar(), Grammar(regex="a", lark="b"), {"regex": "a"}, "a+"])
def test_a_grammar_is_of_one_kind(grammar: Any) -> None:
    with pytest.raises(InvalidArgument, match="of one kind") as caught:
        generate_request("a", {"grammar": grammar})
    assert caught.value.field == "grammar"


@pytest.mark.parametrize("schema", [True, False, 7, ["object"]])
def test_a_schema_is_a_mapping_or_json(schema: Any) -> None:
    with pytest.raises(InvalidArgument, match="it takes a schema, as a mapping or as JSON") as caught:
        generate_request("a", {"grammar": Grammar(json_schema=schema)})
    assert caught.value.field == "grammar.json_schema"
    with pytest.raises(InvalidArgument, match="it takes a mapping, or one as JSON"):
        generate_request("a", {"grammar": Grammar(structural_tag=schema)})


def test_mixtures() -> None:
    request = generate_request("a", {"adapters": {"x": 0.25, "y": -1}})
    assert [(a.id, a.weight) for a in request.adapters] == [("x", 0.25), ("y", -1.0)]
    assert not request.HasField("merge")
    request = generate_request("a", {"adapters": {"x": 1}, "merge": Merge("ties", 0.5, "frequency", 3)})
    merge = request.merge
    assert (merge.strategy, merge.density, merge.majority_sign, merge.seed) == ("ties", 0.5, "frequency", 3)
    for wrong in ({"adapters": {}}, {"adapters": {"x": 1}, "merge": "ties"}):
        with pytest.raises(InvalidArgument):
            generate_request("a", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("max_tokens", -1, "stopping.max_tokens"),
        ("max_tokens", 2.5, "stopping.max_tokens"),
        ("max_tokens", "many", "stopping.max_tokens"),
        ("n", 2**32, "n"),
        ("seed", -1, "sampling.seed"),
        ("temperature", "hot", "sampling.temperature"),
        ("stop", [1], "stopping.stop"),
        ("stop", b"x", "stopping.stop"),
        ("stop", ["\ud800"], "stopping.stop"),
        ("token_ids", "text", "token_ids.ids"),
        ("token_ids", [-1], "token_ids.ids"),
        ("token_ids", 5, "token_ids.ids"),
        ("logit_bias", {-1: 1.0}, "sampling.logit_bias"),
        ("logit_bias", [1], "sampling.logit_bias"),
        ("allowed_token_ids", [-1], "sampling.allowed_token_ids"),
        ("bad_words", [5], "sampling.bad_words"),
        ("allowed_token_ids", "5", "sampling.allowed_token_ids"),
        ("priority", 2**31, "priority"),
        ("truncate_prompt", -1, "truncate_prompt.max_tokens"),
        ("truncate_prompt", "end", "truncate_prompt.max_tokens"),
        ("request_id", 5, "request_id"),
        ("messages", [{"content": "no role"}], "chat.messages.role"),
        ("adapters", {"a": "b"}, "adapters.weight"),
        ("adapters", {1: 1.0}, "adapters.id"),
        ("speculation", "fast", "speculation"),
        ("speculation", True, "speculation"),
        ("speculation", Medusa(5), "speculation.medusa.adapter_id"),  # type: ignore[arg-type]
        ("speculation", PromptLookup(-1), "speculation.prompt_lookup.min_ngram"),
        ("speculation", DraftModel("\ud800"), "speculation.draft_model.name"),
        ("speculation", Speculation("fast"), "speculation"),  # type: ignore[arg-type]
        ("speculation", Speculation(max_draft_tokens=-1), "speculation.max_draft_tokens"),
        ("omit_generation_prompt", True, "chat.omit_generation_prompt"),
    ],
)
def test_values_that_the_wire_cannot_carry(option: str, value: Any, field: str) -> None:
    prompt = None if option in {"token_ids", "messages"} else "a"
    with pytest.raises(InvalidArgument) as caught:
        generate_request(prompt, {option: value})  # type: ignore[typeddict-item]
    assert caught.value.field == field
    assert len(caught.value.message) < 300


def test_text_that_is_no_text() -> None:
    for text in ("\ud800", 5, b"\xff", [1, 2]):
        why = "; it takes a string" if text != "\ud800" else ": it is not text in UTF-8"
        with pytest.raises(InvalidArgument) as caught:
            generate_request(text, {})  # type: ignore[arg-type]
        assert caught.value.message == f"`prompt` cannot be {text!a}{why}"


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(TypeError, match=r"max_token'.*max_tokens"):
        generate_request("a", {"max_token": 5})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("adapter_id", ["../x", "a\n", "sq\u04cf"])
def test_adapter_ids_are_checked_before_they_reach_a_header(adapter_id: str) -> None:
    with pytest.raises(InvalidAdapterId):
        generate_request("a", {"adapter_id": adapter_id})
    with pytest.raises(InvalidAdapterId):
        load_request(adapter_id, {})


@pytest.mark.parametrize("messages", ["hi", ["hi"], {"role": "user", "content": "hi"}, 5, [5]])
def test_messages_that_are_none_say_what_they_take(messages: Any) -> None:
    with pytest.raises(InvalidArgument, match="messages takes a list") as caught:
        generate_request(None, {"messages": messages})
    assert caught.value.field == "chat.messages"


def test_a_repository_on_the_hub() -> None:
    request = generate_request("x", {"adapter_id": "org/sql", "hub": Hub("main", "hf_secret")})
    assert (request.hub.revision, request.hub.token) == ("main", "hf_secret")
    assert generate_request("x", {"adapter_id": "org/sql", "hub": Hub()}).HasField("hub")
    assert not generate_request("x", {"adapter_id": "org/sql", "hub": None}).HasField("hub")
    assert generate_request("x", {"adapter_id": "bucket/sql", "in_bucket": True}).in_bucket
    mixture: Any = {"org/sql": Member(0.5, Hub("main", "hf_secret")), "bucket/x": Member(2, in_bucket=True), "y": 1.0}
    on_hub, in_bucket, own = generate_request("x", {"adapters": mixture}).adapters
    assert (on_hub.weight, on_hub.hub.revision, on_hub.hub.token) == (0.5, "main", "hf_secret")
    assert (in_bucket.weight, in_bucket.in_bucket, in_bucket.HasField("hub")) == (2, True, False)
    assert (own.in_bucket, own.HasField("hub")) == (False, False)
    asked = tokenize_request("x", None, False, False, options={"adapter_id": "org/sql", "hub": Hub(token="hf_secret")})
    assert (asked.adapter_id, asked.hub.token) == ("org/sql", "hf_secret")
    load = load_request("sql", {"source": "hub:org/sql", "revision": "v1", "hub_token": "hf_secret"})
    assert (load.revision, load.token) == ("v1", "hf_secret")
    given: Any = "hf_secret"
    with pytest.raises(InvalidArgument, match="hub takes a Hub") as caught:
        generate_request("x", {"hub": given})
    assert "hf_secret" not in str(caught.value)
    given = ["hf_secret"]
    with pytest.raises(InvalidArgument, match="takes a string") as caught:
        Hub(token=given)
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize("adapters", ["sql", ["sql"], 5])
def test_a_mixture_that_is_none_says_what_it_takes(adapters: Any) -> None:
    with pytest.raises(InvalidArgument, match="adapters takes") as caught:
        generate_request("x", {"adapters": adapters})
    assert caught.value.field == "adapters"


@pytest.mark.parametrize(
    "make",
    [
        lambda name: load_request(name, {}),
        lambda name: naming(adapter_pb2.UnloadAdapterRequest(), name),
        lambda name: naming(adapter_pb2.GetAdapterRequest(), name),
    ],
)
def test_names_of_another_type(make: Callable[[Any], object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make(5)
    assert caught.value.field == "adapter_id"


def test_pin_is_a_switch() -> None:
    pin: Any = "yes"
    with pytest.raises(InvalidArgument) as caught:
        load_request("sql", {"pin": pin})
    assert caught.value.field == "pin"


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("max_tokens", -3, "max_tokens takes int, 1 to "),
        ("max_tokens", "3", "max_tokens takes int, 1 to "),
        ("temperature", "hot", "temperature takes float, from 0 to 100; "),
        ("stop", 3, "stop takes "),
    ],
)
def test_a_value_that_does_not_fit_is_told_what_does(name: str, value: Any, takes: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        generate_request("a", {name: value})  # type: ignore[misc]
    assert f"cannot be {value!a}; {takes}" in caught.value.message
