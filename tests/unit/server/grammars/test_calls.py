"""Grammars of tool calls: what they accept, a response template reads."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer
from support.tiny_tokenizers import tiny_tokenizer
from tokenizers import AddedToken

from loraplex_contracts.errors import InvalidArgument
from loraplex_proto.validate import MAX_GRAMMAR_BYTES
from loraplex_server.grammars import source
from loraplex_server.grammars.calls import MarkTokens, answer_or_calls, strict_calls, tool_calls
from loraplex_server.grammars.matcher import Compiler
from loraplex_server.grammars.source import refusal
from loraplex_server.grammars.tokenizer import LibraryTokenizer
from loraplex_server.text.call_forms import FORMS, CallForm
from loraplex_server.text.response_template import ResponseFormat
from loraplex_server.text.responses import ParsedMessage, ResponseParsing
from loraplex_server.text.vocabulary import Vocabulary

TOKENIZER = tiny_tokenizer("byte_level")
LIBRARY = LLTokenizer(TOKENIZER.backend_tokenizer.to_str(), n_vocab=len(TOKENIZER), eos_token=[2])
TURN = TOKENIZER.backend_tokenizer.token_to_id("<|turn|>")
SPECIAL = MarkTokens({"<|turn|>": TURN})
TOOLS: list[Any] = [
    {"function": {"name": "f", "parameters": {"properties": {"x": {"enum": [1, 22]}}, "required": ["x"],
                                              "additionalProperties": False}}},
    {"name": "g", "parameters": {"maxProperties": 0}},
]  # fmt: skip


def parsing_of(name: str, prefix: str = "", **how: Any) -> ResponseParsing:
    return ResponseParsing(ResponseFormat.named(name), prefix, TOOLS, with_calls=True, **how)


def read(parsing: ResponseParsing, text: str) -> ParsedMessage:
    reader = parsing.reader()
    reader.push(text)
    reader.finish()
    return reader.message()


def is_legal(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LIBRARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
    if matcher.validate_tokens(ids) < len(ids):
        return False
    matcher.consume_tokens(ids)
    return matcher.is_accepting()


@pytest.mark.parametrize("name", FORMS)
def test_random_texts_are_calls(name: str) -> None:
    parsing, draw = parsing_of(name), random.Random(0)
    for called in ("", "g", "") * 3:
        grammar = tool_calls(FORMS[name], parsing, SPECIAL, called)
        matcher = LLMatcher(LIBRARY, grammar.text, log_level=0)
        ids: list[int] = []
        while len(ids) < 300 and not matcher.is_stopped():
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            ids.append(draw.choice([one for one in range(len(TOKENIZER)) if mask >> one & 1]))
            if ids[-1] == 2:
                break
            matcher.consume_token(ids[-1])
        if len(ids) == 300:
            continue  # of calls without end
        text = TOKENIZER.backend_tokenizer.decode(ids)
        message = read(parsing, text)
        assert message.calls, text
        assert not message.content
        assert {call.name for call in message.calls} <= ({called} if called else {"f", "g"})


END: list[int] = TOKENIZER.backend_tokenizer.encode("\n</parameter>\n", add_special_tokens=False).ids
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "free"},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "kind": {"enum": ["a", "b<c", ""]},
        "count": {"enum": [1, 22, None, True]},
        "number": {"type": "integer", "minimum": 0, "maximum": 30},
        "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
        "level": {"$ref": "#/$defs/Level"},
        "point": {"allOf": [{"$ref": "#/$defs/Point"}], "description": "where"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/Level"}, "maxItems": 2},
        "any": {},
        "nullable": {"type": ["string", "null"]},
    },
    "required": ["text", "kind", "number", "point"],
    "$defs": {
        "Level": {"type": "integer", "enum": [1, 2]},
        "Point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
    },
}


def test_random_arguments_with_marks_of_their_own_are_valid() -> None:
    tools: list[Any] = [{"function": {"name": "f", "parameters": SCHEMA}}]
    parsing, draw = ResponseParsing(ResponseFormat.named("qwen3_xml"), "", tools, with_calls=True), random.Random(0)
    grammar = tool_calls(FORMS["qwen3_xml"], parsing, MarkTokens(), "f").text
    seen = set[str]()
    for _ in range(25):
        matcher = LLMatcher(LIBRARY, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids: list[int] = []
        while not matcher.is_stopped():
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            legal = [one for one in range(len(TOKENIZER)) if mask >> one & 1]
            wanted = [draw.choice(legal)]
            if draw.random() < 0.2 and matcher.validate_tokens(END) == len(END):
                wanted = END  # texts without a bound would go on for ever
            ids += wanted
            if wanted == [2]:
                break
            matcher.consume_tokens(wanted)
        text = TOKENIZER.backend_tokenizer.decode(ids)
        message = read(parsing, text)
        (call,) = message.calls
        given = json.loads(call.arguments)
        validate(given, SCHEMA)
        seen |= given.keys()
        assert not message.content
    assert seen == SCHEMA["properties"].keys()


def written(**values: str) -> str:
    arguments = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>"


def test_arguments_with_marks_of_their_own() -> None:
    needed = {"text": "a", "kind": "a", "number": "3", "point": '{"x": true}'}
    tools: list[Any] = [{"function": {"name": "f", "parameters": SCHEMA}}]
    parsing = ResponseParsing(ResponseFormat.named("qwen3_xml"), "", tools, with_calls=True)
    grammar = tool_calls(FORMS["qwen3_xml"], parsing, MarkTokens(), "f").text
    for value in ("", "a\n\nb", '"x" < <b> </param', "\n", "é\n"):
        text = written(**{**needed, "text": value})
        assert is_legal(grammar, text), value
        assert json.loads(read(parsing, text).calls[0].arguments)["text"] == value
    for name, value, is_ok in (
        ("number", "31", False),
        ("number", '"3"', False),
        ("kind", "b<c", True),
        ("kind", "", True),
        ("kind", "c", False),
        ("text", "a</parameter>", False),
        ("text", "<parameter=b>", False),
        ("text", "</function>", False),
        ("point", "{}", False),
    ):
        assert is_legal(grammar, written(**{**needed, name: value})) == is_ok, (name, value)
    assert not is_legal(grammar, written(**{name: one for name, one in needed.items() if name != "number"}))
    assert not is_legal(grammar, written(number="3", text="a", kind="a", point='{"x": true}')), "in order"
    short = {"text": "a", "short": "abcd"} | needed
    assert not is_legal(grammar, written(**short))
    assert is_legal(grammar, written(**{**short, "short": "abc"}))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"x": {"type": "string", "pattern": "a"}}}, "pattern"),
        ({"properties": {"x": {"type": "string", "format": "date"}}}, "format"),
        ({"properties": {"x": {"type": "string", "enum": [1, "a"]}}}, "enum"),
        ({"properties": {"x": {"enum": ["</parameter>"]}}}, "enum"),
        ({"properties": {"x": {"const": {}}}}, "enum"),
        ({"properties": {"x": {"$ref": "#/properties/y"}}}, "$ref"),
        ({"properties": {"x": False}}, "false"),
        ({"properties": {"x": {"type": "integer", "divisibleBy": 2}}}, "divisibleBy"),
        ({"anyOf": [{"required": ["x"]}]}, "anyOf"),
        ({"minProperties": 1}, "minProperties"),
        ({"properties": {"x": {}}, "maxProperties": 0}, "maxProperties"),
        ({"properties": {"a>": {}}}, "name"),
        ({"properties": 5}, "properties"),
    ],
)
def test_keywords_that_marks_cannot_hold_are_named(schema: dict[str, Any], keyword: str) -> None:
    tools: list[Any] = [{"function": {"name": "f", "parameters": schema}}]
    parsing = ResponseParsing(ResponseFormat.named("qwen3_xml"), "", tools, with_calls=True)
    with pytest.raises(InvalidArgument) as caught:
        tool_calls(FORMS["qwen3_xml"], parsing, MarkTokens(), "f")
    assert caught.value.field == "chat.tools_json"
    assert keyword in caught.value.message


def test_one_call_or_several() -> None:
    pairs = (("f", '{"x": 1}'), ("g", "{}"))
    one, two = (f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in pairs)
    required = tool_calls(FORMS["hermes"], parsing_of("hermes"), MarkTokens(), "").text
    single = tool_calls(FORMS["hermes"], parsing_of("hermes", max_calls=1), MarkTokens(), "").text
    named = tool_calls(FORMS["hermes"], parsing_of("hermes"), MarkTokens(), "g").text
    assert [is_legal(required, text) for text in (one, two, f"{one}\n{two}", "", "hi")] == [True] * 3 + [False] * 2
    assert [is_legal(single, text) for text in (one, f"{one}\n{two}")] == [True, False]
    assert [is_legal(named, text) for text in (one, two)] == [False, True]


def test_properties_that_a_schema_does_not_name_are_left_out() -> None:
    x = {"type": "object", "properties": {"y": {"type": "array", "items": {"properties": {"z": {"type": "null"}}}}}}
    tools = [{"name": "f", "parameters": {"properties": {"x": x}}}, {"name": "g", "parameters": {"type": "object"}}]
    parsing = ResponseParsing(ResponseFormat.named("llama3_json"), "", tools, with_calls=True)
    grammar = tool_calls(FORMS["llama3_json"], parsing, MarkTokens(), "").text
    for name, given, is_ok in (
        ("f", '{"x": {"y": [{"z": null}]}}', True),
        ("f", '{"x": {"y": [{"a": 1}]}}', False),
        ("f", '{"x": {"a": 1}}', False),
        ("f", '{"a": 1}', False),
        ("g", '{"a": 1}', True),
    ):
        assert is_legal(grammar, f'{{"name": "{name}", "parameters": {given}}}') == is_ok, given


def test_reasoning_that_the_prompt_began_goes_on_first() -> None:
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    parsing = parsing_of("hermes", "<think>\n")
    grammar = tool_calls(FORMS["hermes"], parsing, MarkTokens(), "").text
    assert is_legal(grammar, f"so < it\nis</think>{call}")
    assert not is_legal(grammar, f"so</think>hi{call}")
    assert not is_legal(grammar, call)
    assert read(parsing, f"so</think>{call}").reasoning == "so"


def test_special_tokens_are_written_as_such() -> None:
    form = FORMS["hermes"]
    grammar = tool_calls(form, parsing_of("hermes"), MarkTokens({"<tool_call>": TURN, "</tool_call>": 0}), "g").text
    matcher = LLMatcher(LIBRARY, grammar, log_level=0)
    assert int.from_bytes(matcher.compute_bitmask(), "little") == 1 << TURN


def test_marks_that_are_tokens_without_being_special_are_written_with_these_tokens() -> None:
    """As those of Qwen's models are."""
    made = deepcopy(tiny_tokenizer("byte_level"))
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<tool_call>", "</tool_call>")])
    backend = made.backend_tokenizer
    compiler = Compiler(LibraryTokenizer.of(backend.to_str(), len(made), [2]))
    tokens = MarkTokens(Vocabulary(backend).special_ids, Vocabulary(backend).plain_mark_ids)
    assert set(tokens.plain) == {"<tool_call>", "</tool_call>"}
    parsing = replace(parsing_of("hermes"), tools=STRICT[:1])
    text = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
    for grammar, before, is_free in (
        (tool_calls(FORMS["hermes"], parsing, tokens, ""), "", False),
        (strict_calls(FORMS["hermes"], parsing, tokens), "so ", True),
    ):
        for number, is_ok in ((22, True), (3, False)):
            ids = backend.encode(before + text % number, add_special_tokens=False).ids
            assert set(tokens.plain.values()) < set(ids)
            inner = compiler.compile(grammar).inner
            assert (inner.validate_tokens(ids) == len(ids)) == is_ok, number
        # In pieces it is none that the model would write, or holds as well.
        pieces = [one for char in text % 3 for one in backend.encode(char, add_special_tokens=False).ids]
        assert compiler.compile(grammar).inner.validate_tokens(pieces) < len(pieces)
        forced = compiler.compile(grammar).forced()
        assert list(forced)[:1] == ([] if is_free else [tokens.plain["<tool_call>"]])


STRICT: list[Any] = [
    {"function": {"name": "f", "strict": True, "parameters": TOOLS[0]["function"]["parameters"]}},
    {"function": {"name": "g", "parameters": {"properties": {"y": {"divisibleBy": 2}}}}},
]
DEEPSEEK = FORMS["deepseek"]
# By form: a call, and what is written around one and around two.
WRITTEN = {
    "hermes": ('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "%s", "%s hm %s"),
    "qwen3_xml": ("<tool_call>\n<function=%s>\n%s</function>\n</tool_call>", "%s", "%s\n%s bye"),
    "llama3_json": ('{"name": "%s", "parameters": %s}', "%s", None),
    "mistral": ("[TOOL_CALLS]%s[ARGS]%s", "%s", "%s%s"),
    "mistral_list": ('{"name": "%s", "arguments": %s}', "[TOOL_CALLS] [%s]", "[TOOL_CALLS] [%s, %s]"),
    "deepseek": (
        f"{DEEPSEEK.begin.replace('NAME', '%s')}%s{DEEPSEEK.end}",
        f"{DEEPSEEK.head}%s{DEEPSEEK.tail}",
        f"{DEEPSEEK.head}%s\n%s{DEEPSEEK.tail}",
    ),
    "kimi": (
        "<|tool_call_begin|>functions.%s:12<|tool_call_argument_begin|>%s<|tool_call_end|>",
        "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>%s%s<|tool_calls_section_end|>",
    ),
    "json": ('{"name": "%s", "arguments": %s}', "[%s]", "[%s, %s]"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_strict_tools_hold_where_they_are_called(name: str) -> None:
    call, one, two = WRITTEN[name]
    parsing = ResponseParsing(ResponseFormat.named(name), "", STRICT, with_calls=True)
    found = strict_calls(FORMS[name], parsing, MarkTokens())
    assert found.field == "chat.tools_json"
    is_xml = name == "qwen3_xml"
    arguments = "<parameter=x>\n%d\n</parameter>\n" if is_xml else '{"x": %d}'
    good, bad = call % ("f", arguments % 22), call % ("f", arguments % 3)
    other, unknown = call % ("g", arguments % 3), call % ("h", arguments % 22)
    texts = {"": [], "hi <tool {": [], "so " + one % good: ["f"], one % other: ["g"]}
    if two is not None:
        texts[two % (good, other)] = ["f", "g"]
    for text, names in texts.items():
        assert is_legal(found.text, text), text
        assert [call.name for call in read(parsing, text).calls] == names, text
    for text in (one % bad, one % unknown, *(() if two is None else (two % (other, bad),))):
        assert not is_legal(found.text, text), text


def test_strict_tools_hold_in_calls_that_begin_with_their_type() -> None:
    parsing = ResponseParsing(ResponseFormat.named("llama3_json"), "", STRICT, with_calls=True)
    grammar = strict_calls(FORMS["llama3_json"], parsing, MarkTokens()).text
    for x, is_ok in ((22, True), (3, False)):
        text = f'so {{"type": "function", "name": "f", "parameters": {{"x": {x}}}}}'
        assert [call.name for call in read(parsing, text).calls] == ["f"]
        assert is_legal(grammar, text) == is_ok


@pytest.mark.parametrize("name", WRITTEN)
def test_random_texts_keep_to_strict_tools(name: str) -> None:
    """The model may write the mark of a call at any moment, in any spelling that is read."""
    draw, form, num_calls = random.Random(0), FORMS[name], 0
    parsing = ResponseParsing(ResponseFormat.named(name), "", STRICT, with_calls=True)
    grammar = strict_calls(form, parsing, MarkTokens())
    assert grammar is not None
    marks = [form.mark, form.head + form.begin.partition("NAME")[0], '{ "name" :' if form.mark_pattern else form.mark]
    for _ in range(30):
        matcher = LLMatcher(LIBRARY, grammar.text, log_level=0)
        ids: list[int] = []
        while len(ids) < 150 and not matcher.is_stopped():
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            legal = [one for one in range(len(TOKENIZER)) if mask >> one & 1]
            wanted = [2 if 2 in legal and draw.random() < 0.1 else draw.choice(legal)]
            written = TOKENIZER.backend_tokenizer.encode(draw.choice(marks), add_special_tokens=False).ids
            if draw.random() < 0.1 and matcher.validate_tokens(written) == len(written):
                wanted = written
            if wanted == [2]:
                break
            ids += wanted
            matcher.consume_tokens(wanted)
        if len(ids) >= 150:
            continue  # cut
        text = TOKENIZER.backend_tokenizer.decode(ids)
        for call in read(parsing, text).calls:
            num_calls += 1
            assert call.name in ("f", "g"), text
            assert call.name == "g" or json.loads(call.arguments) in ({"x": 1}, {"x": 22}), text
    assert num_calls


def test_strict_tools_behind_reasoning_and_with_special_tokens() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
    parsing = ResponseParsing(ResponseFormat.named("hermes"), "<think>\n", STRICT, with_calls=True)
    found = strict_calls(FORMS["hermes"], parsing, MarkTokens())
    assert found is not None
    for text, is_ok in (
        ("so", True),
        ("so</think>hi", True),
        (f"so</think>hi{call % 1}", True),
        (f"so</think>hi{call % 3}", False),
    ):
        assert is_legal(found.text, text) == is_ok, text
    special: Any = {"<|turn|>": TURN, "</s>": 2}
    form = replace(FORMS["hermes"], begin=FORMS["hermes"].begin.replace("<tool_call>", "<|turn|>"), mark="<|turn|>")
    parsing = ResponseParsing(ResponseFormat.named("hermes"), "", STRICT, with_calls=True, unread_ids=frozenset({2}))
    found = strict_calls(form, parsing, MarkTokens(special))
    assert found is not None
    matcher = LLMatcher(LIBRARY, found.text, log_level=0)
    assert TURN is not None
    matcher.consume_tokens([*TOKENIZER.backend_tokenizer.encode("hi", add_special_tokens=False).ids, TURN])
    assert matcher.compute_ff_bytes().startswith(b'\n{"name": "')


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"properties": {"x": {"type": "string", "format": "no"}}}, "`format` cannot be enforced: "),
    ],
)
def test_refusals_are_of_the_schema_alone(schema: dict[str, Any], said: str) -> None:
    tools = [{"function": {"name": "f", "strict": True, "parameters": schema}}]
    parsing = ResponseParsing(ResponseFormat.named("hermes"), "", tools, with_calls=True)
    for grammar in (
        strict_calls(FORMS["hermes"], parsing, MarkTokens()),
        tool_calls(FORMS["hermes"], parsing, MarkTokens(), "f"),
    ):
        assert grammar is not None
        error = refusal(grammar, LLMatcher(LIBRARY, grammar.text, log_level=0).get_error())
        assert said in error.message
        assert "call_0" not in error.message


def test_what_strict_tools_cannot_hold_is_named() -> None:
    tools = [{"function": {"name": "f", "strict": True, "parameters": {"divisibleBy": 2}}}]
    parsing = ResponseParsing(ResponseFormat.named("hermes"), "", tools, with_calls=True)
    with pytest.raises(InvalidArgument, match="divisibleBy") as caught:
        strict_calls(FORMS["hermes"], parsing, MarkTokens())
    assert caught.value.field == "chat.tools_json"


@pytest.mark.parametrize(
    ("tools", "name", "field"),
    [
        (TOOLS, "h", "chat.tool_choice.name"),
        ([], "", "chat.tool_choice.required"),
        ([{"function": {"name": 5}}], "", "chat.tools_json"),
        ([{"function": "f"}], "", "chat.tools_json"),
        ([{"function": None}], "f", "chat.tool_choice.name"),
        ([{}], "", "chat.tools_json"),
        ([{"function": {"name": "a b"}}], "", "chat.tools_json"),
        ([{"function": {"name": "f", "parameters": [1]}}], "", "chat.tools_json"),
        ([{"function": {"name": "f", "parameters": {"type": "array"}}}], "", "chat.tools_json"),
        ([{"function": {"name": "f", "parameters": {"divisibleBy": 2}}}], "", "chat.tools_json"),
        ([{"function": {"name": "f", "parameters": {"x": "y" * MAX_GRAMMAR_BYTES}}}], "", "chat.tools_json"),
    ],
)
def test_what_cannot_be_demanded_is_named(tools: list[Any], name: str, field: str) -> None:
    parsing = ResponseParsing(ResponseFormat.named("hermes"), "", tools, with_calls=True)
    with pytest.raises(InvalidArgument) as caught:
        tool_calls(FORMS["hermes"], parsing, MarkTokens(), name)
    assert caught.value.field == field


# --- an answer in JSON, or calls --------------------------------------------------------------------------------------

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
PEOPLE = {"type": "array", "items": PERSON}


def json_or_calls(name: str, schema: Any, **how: Any) -> str:
    grammar = answer_or_calls(
        FORMS[name], parsing_of(name, **how), MarkTokens(), source.json_schema(json.dumps(schema))
    )
    assert grammar is not None
    assert grammar.field == "grammar.json_schema"
    return grammar.text


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_in_json_or_calls(name: str) -> None:
    form = FORMS[name]
    begin, marks = form.head + form.begin_of("f"), form.parameter
    # Tools that are not strict have any arguments.
    call = begin + ('{"x": [1]}' if marks is None else f"{marks[0].replace('KEY', 'x')}1{marks[1]}") + form.end
    second = form.begin_of("g") + ("{}" if marks is None else "") + form.end
    several = call + (form.between or "") + second + form.tail
    one, people = '{"name": "f", "age": 3}', '[{"name": "f", "age":3}, {"name": "Bob"}]'
    for schema, legal in ((PERSON, [one]), (PEOPLE, [people]), ({"type": "object"}, [one]), ({}, [one, people, "1"])):
        grammar = json_or_calls(name, schema)
        for text in (one, people, "1"):
            assert is_legal(grammar, text) == (text in legal), (schema, text)
        assert is_legal(grammar, call + form.tail)
        assert is_legal(grammar, several) == (form.between is not None)
        for text in (f"so {call}{form.tail}", f"{call}{form.tail} so", begin, ""):
            assert not is_legal(grammar, text), text
    assert [one.name for one in read(parsing_of(name), call + form.tail).calls] == ["f"]
    if form.between is not None:
        assert not is_legal(json_or_calls(name, PERSON, max_calls=1), several)


def test_an_answer_in_json_or_calls_of_strict_tools() -> None:
    level = {"$defs": {"x": {"enum": [1, 2]}}, "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}
    tools: list[Any] = [{"name": "f", "strict": True, "parameters": level}, {"name": "g"}]
    for name in ("llama3_json", "hermes"):
        form, parsing = FORMS[name], replace(parsing_of(name), tools=tools)
        grammar = answer_or_calls(form, parsing, MarkTokens(), source.json_schema(json.dumps(PERSON)))
        assert grammar is not None
        for called, given, is_ok in (("f", 1, True), ("f", 3, False), ("g", 3, True), ("h", 1, False)):
            text = form.begin.replace("NAME", called) + f'{{"x": {given}}}' + form.end
            assert is_legal(grammar.text, text) == is_ok, text
        assert is_legal(grammar.text, '{"name": "f"}')


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.parameter is None])
def test_references_within_parameters_beside_an_answer_in_json(name: str) -> None:
    """To the parameters themselves, or from there to one of them: where a call is JSON, its root is another."""
    form = FORMS[name]
    nested = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}, "c": {"$ref": "#"}},
    }
    parsing = replace(parsing_of(name), tools=[{"function": {"name": "f", "strict": True, "parameters": nested}}])
    grammar = answer_or_calls(form, parsing, MarkTokens(), source.json_schema(json.dumps(PERSON)))
    assert grammar is not None
    for given, is_ok in (({"b": 2, "c": {"b": 1}}, True), ({"b": 3}, False), ({"c": {"name": "f"}}, False)):
        text = form.head + form.begin_of("f") + json.dumps(given) + form.end + form.tail
        assert is_legal(grammar.text, text) == is_ok, text


def test_reasoning_that_the_prompt_began_goes_before_an_answer_in_json_too() -> None:
    grammar = json_or_calls("hermes", PERSON, prefix="<think>\n")
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    for text, is_ok in ((call, True), ('{"name": "a"}', True), ("hi", False), ("", False)):
        assert is_legal(grammar, f"so < it\nis</think>{text}") == is_ok, text
        assert not is_legal(grammar, text)


def test_a_form_of_calls_that_cannot_be_told_from_json() -> None:
    answer = source.json_object()
    for begin in ('{"tool": "NAME", "arguments": ', '["NAME", ', '"NAME": '):
        assert answer_or_calls(CallForm(begin, "}"), parsing_of("hermes"), MarkTokens(), answer) is None
