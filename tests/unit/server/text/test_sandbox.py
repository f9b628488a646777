"""Templates of users: rendered as Transformers does, and read as in the front end."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from support.tiny_tokenizers import tiny_tokenizer

from loraplex_server.text.response_template import ResponseFormat
from loraplex_server.text.responses import ResponseParsing
from loraplex_server.text.sandbox import MAX_READERS, Readers, rendered, serving
from loraplex_server.text.tokenizer import TextTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}{{ x }}"
    "{{ tools | tojson }}{{ documents | tojson }}{% if add_generation_prompt %}>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "{{ 7*7 }}", "name": None}, {"role": "assistant", "content": "ok"}]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"add_generation_prompt": False, "tools": [{"a": 1}], "documents": [{"b": 2}], "arguments": {"x": 5}},
        {"continue_final_message": True},
    ],
)
def test_rendered_as_transformers_does(how: dict[str, Any]) -> None:
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = TEMPLATE
    tokenizer = TextTokenizer(tiny)
    given = {"messages": MESSAGES, **how}
    asked = {"do": "render", "template": TEMPLATE, "given": tokenizer.template_input(given)}
    text = tokenizer.render_chat(**given)
    assert serving(None)(json.loads(json.dumps(asked))) == {"text": text}
    own = how.get("arguments", {})
    beside = {"add_generation_prompt": True, **how, **own}
    if beside.get("continue_final_message"):
        beside["add_generation_prompt"] = False
    beside.pop("arguments", None)
    assert text == tiny.apply_chat_template(MESSAGES, tokenize=False, **beside)
    assert "{{ 7*7 }}" in rendered(asked)["text"]


@pytest.mark.parametrize(
    ("template", "kind", "words"),
    [
        ("{% for %}", "fault", "line 1: "),
        ("\n{{ 1 / 0 }}", "refusal", "division by zero"),
        ("{{ raise_exception('no ' ~ messages[0].role) }}", "refusal", "no user"),
        ("{{ ''.__class__.__mro__ }}", "refusal", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "refusal", "too big"),
        ("{{ messages[0].role * (5 * 2**20) }}", "fault", "more than 16777216 characters"),
    ],
)
def test_faults_and_refusals(template: str, kind: str, words: str) -> None:
    said = rendered({"template": template, "given": {"messages": MESSAGES, "arguments": {}}})
    assert words in said[kind]


def test_templates_cannot_change_the_next_ones() -> None:
    given = {"messages": MESSAGES, "arguments": {}}
    rendered({"template": "{% set ns = namespace(x=1) %}{% set messages = [] %}{{ messages }}", "given": given})
    assert rendered({"template": "{{ x }}{{ messages | length }}", "given": given}) == {"text": "2"}


# --- reading ---------------------------------------------------------------------------------------------------------

TEXT = '<think>\nhm</think>\nSure. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> ok '
HOW = {
    "template": ResponseFormat.source("hermes").read_text(encoding="utf-8"),
    "prompt_end": "<|im_start|>assistant\n",
    "tools": [{"function": {"name": "f"}}],
    "with_calls": True,
    "max_calls": None,
}


def test_read_in_any_pieces_and_by_another_process() -> None:
    reader = ResponseParsing(ResponseFormat.named("hermes"), "", with_calls=True).reader()
    whole = [*reader.push(TEXT), *reader.finish()]

    def joined(kind: str, parts: list[Any]) -> str:
        return "".join(part[1] for part in parts if part[0] == kind)

    for size in (1, 7, len(TEXT)):
        readers, parts = Readers(), []
        for start in range(0, len(TEXT), size):
            asked: dict[str, Any] = {"id": "a", "start": start, "text": TEXT[start : start + size], "is_end": False}
            if start == 0:
                asked["how"] = HOW
            if start // size % 5 == 4:
                readers = Readers()  # another process
            said = readers.read(asked)
            if said.get("is_unknown"):
                said = readers.read({**asked, "text": TEXT[: start + size], "how": HOW})
            parts += said["parts"]
        said = readers.read({"id": "a", "start": len(TEXT), "text": "", "is_end": True})
        parts += said["parts"]
        assert said["reasoned"] == list(reader.reasoned)
        for kind in ("content", "reasoning"):
            assert joined(kind, parts) == "".join(part.text for part in whole if part.kind == kind)
        assert [part[4] for part in parts if part[0] == "call"] == ["f"]
        assert json.loads(joined("arguments", parts)) == {"a": 1}
        assert readers.read({"id": "a", "start": 5, "text": "x", "is_end": False}) == {"is_unknown": True}


def test_the_number_of_readers_is_bounded() -> None:
    readers = Readers()
    asked = {"start": 0, "text": "x", "is_end": False}
    for number in range(MAX_READERS + 1):
        readers.read({**asked, "id": str(number), "how": HOW})
    assert readers.read({**asked, "id": "0", "start": 1}) == {"is_unknown": True}
    assert readers.read({**asked, "id": "1", "start": 1}) == {
        "parts": [["content", "x", 0, "", "", 1, 2, None]], "reasoned": [],
    }  # fmt: skip


@pytest.mark.parametrize("template", ["[", "[]", '{"fields": {"x": {"open_pattern": "("}}}', "[" * 100_000])
def test_response_templates_that_cannot_be_used(template: str) -> None:
    asked = {"id": "a", "start": 0, "text": "x", "is_end": False, "how": {**HOW, "template": template}}
    assert Readers().read(asked)["fault"]
