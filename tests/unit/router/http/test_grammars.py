"""Grammars of each HTTP dialect on the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loraplex_contracts.errors import LoraplexError, Unimplemented
from loraplex_router.http.grammars import GRAMMAR_FIELDS, grammar_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "it", "schema": SCHEMA, "strict": True}
TAG = {"structures": [], "triggers": []}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},  # OpenAI
        {"response_format": {"type": "json_object", "schema": SCHEMA}},  # LoRAX
        {"response_format": {"type": "json_object", "value": SCHEMA}},  # huggingface_hub
        {"response_format": {"type": "json", "value": SCHEMA}},
        {"grammar": {"type": "json", "value": SCHEMA}},  # TGI
        {"grammar": {"type": "json_schema", "value": NAMED}},
        {"grammar": {"type": "json_schema", "value": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA, "regex": None, "disable_fallback": False}},  # vLLM
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_regex": None},
        {"json_schema": json.dumps(SCHEMA)},  # SGLang
    ],
)
def test_schemas(fields: dict[str, Any]) -> None:
    found = grammar_of({"response_format": None, **fields})
    assert found is not None
    assert json.loads(found.json_schema) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"guided_json_object": True}, "json_object", True),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, "json_schema", "{}"),
        ({"response_format": {"type": "regex", "value": "a+"}}, "regex", "a+"),
        ({"grammar": {"type": "regex", "value": "a+"}}, "regex", "a+"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"ebnf": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag_json", json.dumps(TAG)),
    ],
)
def test_other_kinds(fields: dict[str, Any], kind: str, value: Any) -> None:
    found = grammar_of(fields)
    assert found is not None
    assert (found.WhichOneof("kind"), getattr(found, kind)) == (kind, value)


def test_choices_and_tags() -> None:
    found = grammar_of({"guided_choice": ["yes", "no"]})
    assert found is not None
    assert list(found.choice.texts) == ["yes", "no"]
    found = grammar_of({"response_format": {"type": "structural_tag", **TAG}})
    assert found is not None
    assert json.loads(found.structural_tag_json) == {"type": "structural_tag", **TAG}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"grammar": 'start: "a"'}, "guided_grammar": 'start: "a"'},
        {"structured_outputs": {"json": SCHEMA}, "guided_json": json.dumps(SCHEMA, indent=1)},
        {"response_format": {"type": "json_schema", "json_schema": NAMED}, "structured_outputs": {"json": SCHEMA}},
    ],
)
def test_one_grammar_may_be_said_twice(fields: dict[str, Any]) -> None:
    first, *_ = fields.items()
    assert grammar_of(fields) == grammar_of(dict([first]))


def test_options_of_structured_outputs() -> None:
    off = dict.fromkeys(("disable_any_whitespace", "disable_additional_properties", "disable_fallback"), False)
    plain = {"structured_outputs": {"json": SCHEMA, **off, "whitespace_pattern": None}}
    found = grammar_of(plain)
    assert found is not None
    assert not found.compact
    assert grammar_of({"structured_outputs": {"json": SCHEMA, "disable_fallback": True}}) == found
    found.compact = True
    assert grammar_of({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}) == found
    regex = grammar_of({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}})
    assert regex is not None
    assert not regex.compact


def test_of_several_unknown_options_the_first_is_named() -> None:
    names = [f"option_{idx}" for idx in range(20)]
    for given in (names, names[::-1]):
        with pytest.raises(Unimplemented) as caught:
            grammar_of({"structured_outputs": {"json": SCHEMA, **dict.fromkeys(given, 1)}})
        assert caught.value.field == f"structured_outputs.{given[0]}"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "json": None}},
        {"guided_json_object": False},
        dict.fromkeys(GRAMMAR_FIELDS),
    ],
)
def test_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(fields) is None


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "frog"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_json": {"enum": ["\ud800"]}}, "guided_json"),
        ({"response_format": {"type": "structural_tag", "triggers": ["\ud800"]}}, "response_format"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [5]}, "guided_choice"),
        ({"guided_json_object": "yes"}, "guided_json_object"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"structured_outputs": {"disable_fallback": 1}}, "structured_outputs.disable_fallback"),
        ({"structured_outputs": {"json": "{"}, "guided_json": "{ "}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_mistakes_have_the_fields_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(LoraplexError) as caught:
        grammar_of(fields)
    assert caught.value.field == name
    assert caught.value.code.name in ("INVALID_ARGUMENT", "UNIMPLEMENTED")
