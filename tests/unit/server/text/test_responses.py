"""Answers of chats into reasoning, content and tool calls."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.config import TOOL_FORMATS
from loraplex_server.text.response_template import ResponseFormat
from loraplex_server.text.responses import MessagePart, ParsedCall, ParsedMessage, ResponseParsing, with_tokens
from loraplex_server.text.vocabulary import unread_ids

FORMATS = {name: ResponseFormat.named(name) for name in TOOL_FORMATS}
BAR, LOW = "\uff5c", "\u2581"


def mark(name: str) -> str:
    """A mark of DeepSeek's."""
    return f"<{BAR}{name.replace(' ', LOW)}{BAR}>"


THOUGHT, AGAIN = "<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant"
DEEPSEEK_CALL = f'{mark("tool call begin")}function{mark("tool sep")}f\n```json\n{{"a": 1}}\n```{mark("tool call end")}'
# Format, text, content, reasoning, calls.
CASES: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "hi", "hi", "", []),
    ("hermes", " x \n", " x \n", "", []),
    (
        "hermes",
        '<think>\nhm \n</think>\n\nSure. \n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g"}\n</tool_call>\n  ok \n',
        "Sure.\nok \n",
        "hm",
        [("f", {"a": "é"}), ("g", {})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("f", {"a": 1})]),
    (
        "qwen3_xml",
        "I\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\nz\n</parameter>\n"
        "</function>\n</tool_call>",
        "I",
        "",
        [("f", {"a": "1", "b": "x y\nz"})],
    ),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", "", [("f", {"a": 1})]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", "", [("f", {"a": 1})]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", "", [("f", {"a": 1})]),
    ("llama3_json", 'so {"x": 1}', 'so {"x": 1}', "", []),
    ("mistral", 'Hm [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "Hm", "", [("f", {"a": 1}), ("g", {})]),
    (
        "mistral_list",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    (
        "deepseek",
        f"<think>\na\n</think>\n\nok{mark('tool calls begin')}{DEEPSEEK_CALL}\n{DEEPSEEK_CALL}{mark('tool calls end')}",
        "ok",
        "a",
        [("f", {"a": 1}), ("f", {"a": 1})],
    ),
    (
        "deepseek",
        f'{mark("tool calls begin")}{mark("tool call begin")}f{mark("tool sep")}{{"a": 2}}{mark("tool call end")}',
        "",
        "",
        [("f", {"a": 2})],
    ),
    # Of harmony, the examples of its description and what gpt-oss writes besides.
    ("harmony", f"{THOUGHT}{AGAIN}<|channel|>final<|message|>2 + 2 = 4.<|return|>", "2 + 2 = 4.", "hm", []),
    ("harmony", f"{THOUGHT}{AGAIN}<|channel|>analysis<|message|>so<|end|>{AGAIN}<|channel|>final <|constrain|>json"
     '<|message|>{"a": 1}', '{"a": 1}', "hm\nso", []),
    ("harmony", f"{THOUGHT}{AGAIN}<|channel|>commentary<|message|>**Plan**:\n1. f<|end|>{AGAIN}<|channel|>commentary "
     'to=functions.f <|constrain|>json<|message|>{"a": 1}<|end|>'
     f"{AGAIN} to=functions.g<|channel|>commentary json<|message|>{{}}<|call|>",
     "**Plan**:\n1. f", "hm", [("f", {"a": 1}), ("g", {})]),
    ("harmony", ' to=functions.a-b.c<|channel|>commentary<|constrain|>json<|message|>{"a": 1}', "", "",
     [("a-b.c", {"a": 1})]),
    ("harmony", "<|channel|>commentary to=f<|message|>{}", "", "", [("f", {})]),
    ("harmony", "<|channel|>analysis to=functions.f code<|message|>{}", "", "", [("f", {})]),
    ("harmony", "<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "", "1 + 1", []),
    ("harmony", "<|channel|>commentary to=f<|message|>no JSON<|end|>",
     "<|channel|>commentary to=f<|message|>no JSON<|end|>", "", []),
    ("harmony", "<|channel|>final --commentary<|message|>hi<|return|>", "hi", "", []),
    ("harmony", " to be <|message|>", " to be", "", []),
    ("harmony", f"{THOUGHT}{AGAIN}<|channel|>commentary to=func", "", "hm", []),
    ("harmony", " to=func", "", "", []),
    ("harmony", "<|channel|>analysis<|message|>hm", "", "hm", []),
    ("harmony", '{"a": 1}', '{"a": 1}', "", []),
    ("kimi", "<think>hm</think>ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3"
     '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>\n'
     "<|tool_call_begin|> g:4 <|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>",
     "ok", "hm", [("f", {"a": 1}), ("g", {})]),
    ("kimi", "<think>hm<|tool_call_section_begin|><|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}",
     "", "hm", [("f", {})]),
    ("kimi", "<|tool_call_begin|>functions.a:b:0<|tool_call_argument_begin|>{}<|tool_calls_section_end|>ok",
     "ok", "", [("a:b", {})]),
    ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>", "", "", []),
    ("think", "x<think>y</think>z", "x\nz", "y", []),
]  # fmt: skip
# What cannot be read as a call is content, as it is.
UNREADABLE = [
    'a <tool_call>\n{"name": bad</tool_call> b',
    '<tool_call>{"name": "f", "arguments": ',
    '<tool_call>{"arguments": {"x": 1}, "name": "f"',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f g"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": NaN}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>',
    '<tool_call>["name"]</tool_call>',
    "<tool_call>5</tool_call>x",
    "<tool_call></tool_call>",
    f"<tool_call>{'[' * 100_000}</tool_call>",
    f'<tool_call>{{"name": "f", "arguments": {"9" * 5000}}}</tool_call>',
]


def read(name: str, *pieces: str, prefix: str = "", with_calls: bool = True, **how: Any) -> ParsedMessage:
    reader = ResponseParsing(FORMATS[name], prefix, with_calls=with_calls, **how).reader()
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    message = reader.message()
    assert message == put_together(parts)
    text = "".join(pieces)
    for part in parts:
        if part.kind in ("content", "reasoning"):
            assert text[part.begin : part.end].endswith(part.text.lstrip()), "the characters it is of"
            assert len(part.text) - (part.end - part.begin) in (0, 1), "it may begin a line"
    return message


def put_together(parts: list[MessagePart]) -> ParsedMessage:
    calls = [part for part in parts if part.kind == "call"]
    assert [part.index for part in calls] == list(range(len(calls)))
    texts = {
        kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning", "call")
    }
    assert not texts["call"]
    given = [
        "".join(part.text for part in parts if part.kind == "arguments" and part.index == one.index) for one in calls
    ]
    found = tuple(ParsedCall(one.id, one.name, text) for one, text in zip(calls, given, strict=True))
    return ParsedMessage(texts["content"], texts["reasoning"], found)


def without_ids(message: ParsedMessage) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), CASES)
def test_parts(name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, Any]]) -> None:
    message = read(name, text)
    assert (message.content, message.reasoning) == (content, reasoning)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    pattern = r"[A-Za-z0-9]{9}" if name.startswith("mistral") else r"call_[0-9a-f]{24}"
    if name == "kimi":  # whose template writes nothing of a call but its id
        pattern = r"functions\.f(:3)?|g:4|functions\.a:b:0"
    assert all(re.fullmatch(pattern, call.id) for call in message.calls)
    assert len({call.id for call in message.calls}) == len(calls)


WITH_ID = '{"name": "f", "arguments": {}, "id": "abcdefghi"}'
# Calls whose arguments have begun are calls, however they go on. Format, text, content, calls.
BEGUN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a', "", [("f", '{"x": "a')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "}\\"{", "y": [{}]}} x </tool_call>y', "x y",
     [("f", '{"x": "}\\"{", "y": [{}]}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {x: bad}, "id": 1}</tool_call> y', ', "id": 1} y',
     [("f", "{x: bad}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": { "x":1}, "id": 1}</tool_call> y', "y", [("f", '{ "x":1}')]),
    ("hermes", '<tool_call>{"arguments": { "x":1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": [1', "", [("f", '{"a": [1')]),
    ("llama3_json", 'so {"type" : "function","name": "f", "parameters": {"a": [1', "so", [("f", '{"a": [1')]),
    ("mistral", '[TOOL_CALLS]f[ARGS] {"a": 1} so [TOOL_CALLS]g[ARGS]{"b"', "so", [("f", '{"a": 1}'), ("g", '{"b"')]),
    ("mistral_list", '[TOOL_CALLS] [{"name": "f", "arguments": {"a":1}} , {"name": "g", "arguments": {"b"', "",
     [("f", '{"a":1}'), ("g", '{"b"')]),
    ("mistral_list", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"arguments": {}, "name": "g"}]', "",
     [("f", "{}"), ("g", "{}")]),
    ("mistral_list", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]', ', {"name": "g"}]', [("f", "{}")]),
    ("mistral_list", f"[TOOL_CALLS][{WITH_ID}, {WITH_ID}]", "", [("f", "{}"), ("f", "{}")]),
    ("mistral_list", f"[TOOL_CALLS][{WITH_ID}, {WITH_ID}]\n\nso", "so", [("f", "{}"), ("f", "{}")]),
    ("mistral_list", f"[TOOL_CALLS][{WITH_ID}, {WITH_ID[:-5]}", "", [("f", "{}"), ("f", "{}")]),
    ("mistral_list", f"[TOOL_CALLS][{WITH_ID}", "", [("f", "{}")]),
    ("mistral_list", f"[TOOL_CALLS][{WITH_ID[:-13]}", "", [("f", "{}")]),
    ("deepseek", f'{mark("tool call begin")}f{mark("tool sep")}{{"a":', "", [("f", '{"a":')]),
    ("harmony", '<|channel|>commentary to=functions.f<|constrain|>json<|message|> {"a":', "", [("f", '{"a":')]),
    ("kimi", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a":', "", [("f", '{"a":')]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), BEGUN)
def test_arguments_are_as_the_model_wrote_them(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        message = read(name, *pieces)
        assert (message.content, [(call.name, call.arguments) for call in message.calls]) == (content, calls)


def test_arguments_come_as_the_text_does() -> None:
    reader = ResponseParsing(FORMATS["hermes"], with_calls=True).reader()
    assert reader.push('<tool_call>{"name": "f", "argum') == []
    assert reader.push('ents": ') == []
    opened, first = reader.push('{"x"')
    assert (opened.kind, opened.index, opened.name, opened.text) == ("call", 0, "f", "")
    assert re.fullmatch(r"call_[0-9a-f]{24}", opened.id)
    assert first == MessagePart("arguments", '{"x"', 0)
    assert reader.push(": 1}}\n") == [MessagePart("arguments", ": 1}", 0)]
    assert reader.push("</tool_call>") == reader.finish() == []


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (
            {"transform": {"function": {"name": "{content.tool}", "arguments": "{content.input}"}}},
            '{"tool": "f", "input": %s}',
        ),
        ({}, '{"name": "f", "arguments": %s}'),
        ({"transform_each": True, "transform": {"name": "{n}", "arguments": "{a}"}}, '[{"n": "f", "a": %s}]'),
    ],
)
def test_arguments_in_other_templates(field: dict[str, Any], text: str) -> None:
    calls = {"open": "<c>", "close": "</c>", "repeats": True, "content": "json", **field}
    format = ResponseFormat({"start_anchor": "x", "fields": {"tool_calls": calls, "content": {}}})
    reader = ResponseParsing(format, with_calls=True).reader()
    before, _, behind = text.partition("%s")
    kinds = [part.kind for part in reader.push(f"<c>{before}{{")]
    assert kinds == ["call", "arguments"]
    reader.push(f"}}{behind}</c>")
    reader.finish()
    assert without_ids(reader.message()) == ("", "", [("f", "{}")])


def test_a_call_that_the_prompt_began_comes_when_it_is_complete() -> None:
    message = read("hermes", " 1}}</tool_call>", prefix='<tool_call>{"name": "f", "arguments": {"x":')
    assert without_ids(message) == ("", "", [("f", '{"x": 1}')])


@pytest.mark.parametrize(
    ("prefix", "pieces", "expected"),
    [
        ("", ["<think>", "a", "", " b\n", "</think>", "c"], 3),
        ("", ["<th", "ink>a", "b.</", "think>c"], 1),
        ("", ["a", "<think>", "b", "</think>", "c", "<think>", "d"], 2),
        ("", ["a<think>b", "c", "</think>"], 1),
        ("<think>\n", ["a", "b", "</think>", "c"], 2),
        ("<think>a</think>", ["b", "c"], 0),
        ("", ["<think>", "</think>", "a"], 0),
        ("", ["<think>", "a", "</thin"], 2),
    ],
)
def test_tokens_of_the_reasoning(prefix: str, pieces: list[str], expected: int) -> None:
    """A token counts where its text begins."""
    starts = [len("".join(pieces[:index])) for index in range(len(pieces))]
    for texts in (pieces, list("".join(pieces)), ["".join(pieces)]):
        reader = ResponseParsing(FORMATS["hermes"], prefix).reader()
        for text in texts:
            reader.push(text)
        reader.finish()
        assert reader.num_reasoning_tokens(starts) == expected
    assert ResponseParsing().reader().num_reasoning_tokens(starts) == 0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_pieces_give_the_same_message(data: st.DataObject) -> None:
    name, text = data.draw(
        st.sampled_from(
            [(name, text) for name, text, *_ in CASES + BEGUN] + [("hermes", text) for text in UNREADABLE[:9]]
        )
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert without_ids(read(name, *pieces)) == without_ids(read(name, text)) == without_ids(read(name, *text))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(TOOL_FORMATS),
    st.lists(
        st.sampled_from(
            (
                *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "[TOOL_CALLS]"),
                *("f", "[ARGS]", "{", "}", '"name"', ":", '"', " ", "\n", mark("tool call begin"), mark("tool sep")),
                *("```", "1", '{"name": "f", "arguments": ', ", ", "[", "]"),
                *(
                    "<|start|>assistant",
                    " to=",
                    "functions.",
                    "<|channel|>",
                    "analysis",
                    "<|constrain|>",
                    "<|message|>",
                ),
                *("<|end|>", "<|call|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            )
        ),
        max_size=30,
    ),
)
def test_no_text_breaks_a_reader(name: str, pieces: list[str]) -> None:
    assert without_ids(read(name, *pieces)) == without_ids(read(name, "".join(pieces)))


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: text[:40])
def test_what_cannot_be_read_is_content(text: str) -> None:
    message = read("hermes", text)
    assert message == ParsedMessage(text)


@pytest.mark.parametrize("given", ["functions.f:0", "a b", "x" * 300])
def test_ids_of_a_model_are_kept_where_they_can_be_sent_again(given: str) -> None:
    field = {"function": {"name": "f", "arguments": "{content}"}, "id": "{id}"}
    calls = {
        "open_pattern": "<c (?P<id>[^>]*)>",
        "close": "</c>",
        "repeats": True,
        "content": "json",
        "transform": field,
    }
    format = ResponseFormat({"start_anchor": "x", "fields": {"tool_calls": calls, "content": {}}})
    reader = ResponseParsing(format, with_calls=True).reader()
    reader.push(f"<c {given}>{{}}</c>" * 2)
    reader.finish()
    first, second = (call.id for call in reader.message().calls)
    assert (first == given) == (given == "functions.f:0")
    assert re.fullmatch(r"call_[0-9a-f]{24}", second), "no two calls have one id"


def test_calls_behind_an_unreadable_one_are_read() -> None:
    bad, good = "<tool_call>{</tool_call>", '<tool_call>{"name": "f"}</tool_call>'
    message = read("hermes", f"{bad} {good}")
    assert message.content == bad
    assert [call.name for call in message.calls] == ["f"]


@pytest.mark.parametrize("piece", [1, 7, 600, 10_000])
def test_whitespace_without_end_before_a_mark(piece: int) -> None:
    """Templates of the Hub have patterns such as this one."""
    template = json.loads(json.dumps(FORMATS["hermes"].template))
    calls = template["fields"]["tool_calls"]
    calls["open_pattern"] = r"\s*" + calls.pop("open")
    parsing = ResponseParsing(ResponseFormat(template), with_calls=True)
    for end, content in (("x", f"a{' ' * 10_000}x"), ('<tool_call>{"name": "f"}</tool_call>', "a")):
        text, reader = f"a{' ' * 10_000}{end}", parsing.reader()
        for start in range(0, len(text), piece):
            reader.push(text[start : start + piece])
        reader.finish()
        assert reader.message().content == content
        assert len(reader.message().calls) == (end != "x")


def test_halves_of_surrogate_pairs_can_be_sent() -> None:
    (call,) = read("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>').calls
    assert call.arguments.encode() == b'{"a": "\\ud800"}'


def test_without_calls_they_are_content() -> None:
    text = '<think>a</think><tool_call>{"name": "f"}</tool_call>'
    assert read("hermes", text, with_calls=False) == ParsedMessage('<tool_call>{"name": "f"}</tool_call>', "a")


def test_at_most_so_many_calls() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>' * 3
    assert [call.name for call in read("hermes", text, max_calls=1).calls] == ["f"]


def test_without_a_format_all_is_content() -> None:
    reader = ResponseParsing(with_calls=True).reader()
    assert reader.push("<think>a") == [MessagePart("content", "<think>a", begin=0, end=8)]
    assert reader.push("") == []
    assert reader.push("b") == [MessagePart("content", "b", begin=8, end=9)]
    assert reader.finish() == []
    assert reader.message() == ParsedMessage("<think>ab")


def test_tokens_of_the_content() -> None:
    """All that have characters of it; those of one character begin alike."""
    parts = ResponseParsing(FORMATS["think"]).reader().push("<think>y</think> a\u4f60b")
    thought, content = with_tokens(parts, [0, 7, 8, 9, 16, 18, 18, 18, 19])
    assert (thought.text, thought.tokens) == ("y", None)
    assert (content.text, content.tokens) == ("a\u4f60b", (4, 9))
    assert with_tokens(parts, []) == parts


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|im_start|>assistant\n", "hi", ParsedMessage("hi")),
        ("<|im_start|>assistant\nI think", " so", ParsedMessage(" so")),
        ("<|im_start|>assistant\nI think ", "so", ParsedMessage("so")),
        ("<|im_start|>assistant\n<think>\n", "a\n</think>\n\nb", ParsedMessage("b", "a")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "\nb", ParsedMessage("b")),
        ("<|im_start|>user\n<think><|im_start|>assistant\n", "b", ParsedMessage("b")),
        ("<think> without an anchor", "b", ParsedMessage("b")),
    ],
)
def test_what_the_prompt_has_begun(prompt: str, text: str, expected: ParsedMessage) -> None:
    format = FORMATS["hermes"]
    assert read("hermes", text, prefix=format.prefix_of(prompt)) == expected


def test_arguments_are_cast_by_the_tools_schema() -> None:
    parameters = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<tool_call><function=f><parameter=a>\n1\n</parameter><parameter=b>\n2\n</parameter></function></tool_call>"
    (call,) = read("qwen3_xml", text, tools=tools).calls
    assert json.loads(call.arguments) == {"a": 1, "b": "2"}


def test_as_transformers_reads_it() -> None:
    """The parsed message equals Transformers' but for the whitespace at the ends of an answer, which it drops."""
    template = json.loads((ResponseFormat.source("hermes")).read_text(encoding="utf-8"))
    text = '<think>\nhm\n</think>\n\nSure.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, null]}}\n</tool_call>'
    expected = parse_response(text, template, prefix="")
    message = read("hermes", text)
    assert (message.content, message.reasoning) == (expected["content"], expected["reasoning_content"])
    (call,) = message.calls
    assert {"name": call.name, "arguments": json.loads(call.arguments)} == expected["tool_calls"][0]["function"]


@pytest.mark.parametrize(
    ("chat_template", "name"),
    [
        ("{{ messages }}", None),
        ("..<tool_call>\n<function=..", "qwen3_xml"),
        ("..<tool_call>..", "hermes"),
        ("<think><tool_call>..<arg_key>..", "think"),
        ("<|python_tag|>", "llama3_json"),
        ("""{"name": function name, "parameters": dictionary of argument name and its value}""", "llama3_json"),
        ("[TOOL_CALLS]..[ARGS]", "mistral"),
        ("[TOOL_CALLS]", "mistral_list"),
        (mark("tool calls begin"), "deepseek"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<think>..<|tool_call_begin|>..<|tool_call_argument_begin|>", "kimi"),
        ("<think>", "think"),
    ],
)
def test_formats_are_told_by_the_chat_template(chat_template: str, name: str | None, tmp_path: Any) -> None:
    found = ResponseFormat.of(chat_template)
    assert (found and found.template) == (name and FORMATS[name].template)
    named = ResponseFormat.of(chat_template, None, "hermes")
    assert named is not None
    assert named.template == FORMATS["hermes"].template
    assert ResponseFormat.of(chat_template, FORMATS["hermes"].template, "none") is None
    own = {"start_anchor": "x", "fields": {"content": {}}}
    found = ResponseFormat.of(chat_template, own)
    assert found is not None
    assert found.template == own, "the tokenizer's own comes first"
    file = tmp_path / "template.json"
    file.write_text(json.dumps(FORMATS["think"].template))
    found = ResponseFormat.of(chat_template, own, "hermes", file)
    assert found is not None
    assert found.template == FORMATS["think"].template, "a file before that"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"fields": 5}', '{"fields": {"content": {"open_pattern": "("}}}'),
        '{"start_anchor": "x", "fields": {"content": {"content_args": []}}}',
    ],
)
def test_templates_that_cannot_be_used(text: str, tmp_path: Any) -> None:
    file = tmp_path / "template.json"
    file.write_text(text)
    with pytest.raises(InvalidArgument):
        ResponseFormat.of("", file=file)


def test_special_tokens_that_a_template_looks_for() -> None:
    ids = {"<think>": 1, "<|eom_id|>": 2, "<|python_tag|>": 3, "</s>": 4}
    assert FORMATS["llama3_json"].unread_ids(ids) == {1, 4}
    assert FORMATS["hermes"].unread_ids(ids) == {2, 3, 4}
    assert FORMATS["mistral_list"].unread_ids({"[/INST]": 1, "[TOOL_CALLS]": 2}) == {1}, "anchors are in prompts"
    assert FORMATS["hermes"].unread_ids({"<|im_start|>": 1}) == {1}
    harmony = ("start", "channel", "constrain", "message", "end", "call", "return", "endoftext")
    assert FORMATS["harmony"].unread_ids({f"<|{one}|>": idx for idx, one in enumerate(harmony)}) == {7}
    assert unread_ids('{"fields": {"content": {"open": "<\\uff5cx>"}}}', {"<\uff5cx>": 1, "y": 2}) == {2}
    for unusable in ("", "[]", "{}", "[" * 100_000):
        assert unread_ids(unusable, {"x": 1}) == {1}
