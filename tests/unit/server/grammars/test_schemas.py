"""Schemas of objects, and what they leave unsaid."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from loraplex_server.grammars.schemas import complete, endless_reference

A: dict[str, Any] = {"type": "boolean"}


def completed(schema: dict[str, Any]) -> dict[str, Any]:
    found = deepcopy(schema)
    complete(found)
    return found


def of_type(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", **schema}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": A}, "required": ["a"], "additionalProperties": True},
        {"required": ["a"]},
        {"additionalProperties": A},
        {"patternProperties": {"^a": A}},
    ],
)
def test_what_tells_of_properties_is_an_object(schema: dict[str, Any]) -> None:
    typed = of_type(schema)
    assert completed(schema) == typed
    for around in (
        lambda one: {"type": "object", "additionalProperties": one},
        lambda one: {"type": "array", "items": one},
        lambda one: {"type": "array", "prefixItems": [one, A]},
        lambda one: {"type": "object", "patternProperties": {"^a": one}},
        lambda one: {"anyOf": [one, {"type": "null"}]},
        lambda one: {"allOf": [one], "description": "x"},
        lambda one: {"$ref": "#/$defs/x", "$defs": {"x": one}},
        lambda one: {"$ref": "#/$defs/x%20~1", "$defs": {"x /": one}},
    ):
        assert completed(around(schema)) == around(typed)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["object", "null"], "required": ["a"]},
        {"description": "not a rule"},
        {"allOf": [{"required": ["a"]}, {"type": ["array", "object"]}]},
        {"anyOf": [{"required": ["a"]}], "type": ["object", "null"], "required": ["b"]},
        {"oneOf": [{"required": ["a"]}, {"type": "null"}]},
        {"oneOf": [{"required": ["a"]}, {"type": "array"}]},
        {"enum": [1, {"a": True}], "required": ["a"]},
        {"not": {"required": ["a"]}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        # One of the two may say something else of the same value.
        {"type": "object", "properties": {"a": {"required": ["x"]}}, "patternProperties": {"^a": {}}},
        {"anyOf": [{"$ref": "#/$defs/x"}], "allOf": [A, A], "$defs": {"x": {"required": ["a"]}}},
        {"type": "array", "items": {"$id": "other", "required": ["a"]}},
        {"$ref": "other.json", "$defs": {"x": {"required": ["a"]}}},
        {"properties": 5, "type": "object", "items": 5, "anyOf": {}, "$ref": "#/nowhere"},
    ],
)
def test_what_may_have_another_type_is_left(schema: dict[str, Any]) -> None:
    assert completed(schema) == schema


OPEN: dict[str, Any] = {"type": "object", "properties": {"a": A}}
CLOSED: dict[str, Any] = {**OPEN, "additionalProperties": False}


def tagged(*tags: str, **others: Any) -> dict[str, Any]:
    tag = {"const": tags[0]} if len(tags) == 1 else {"enum": list(tags)}
    return {"type": "object", "properties": {"b": A, "tag": tag}, "required": ["tag"], **others}


CLOSE = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (OPEN, CLOSED),
        ({"type": ["object", "null"], "properties": {}}, {"type": ["object", "null"], "properties": {}, **CLOSE}),
        (
            {**OPEN, "title": "A", "x-other": 1, "required": ["a"]},
            {**CLOSED, "title": "A", "x-other": 1, "required": ["a"]},
        ),
        (
            {**OPEN, "properties": {"a": OPEN, "b": {"type": "array", "items": OPEN, "prefixItems": [OPEN]}}},
            {**CLOSED, "properties": {"a": CLOSED, "b": {"type": "array", "items": CLOSED, "prefixItems": [CLOSED]}}},
        ),
        # As pydantic writes them.
        (
            {
                **OPEN,
                "properties": {"a": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "default": None}},
                "$defs": {"x": OPEN},
            },
            {
                **CLOSED,
                "properties": {"a": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "default": None}},
                "$defs": {"x": CLOSED},
            },
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/x"}, tagged("b")], "discriminator": {}, "$defs": {"x": tagged("a", "c")}},
            {
                "oneOf": [{"$ref": "#/$defs/x"}, tagged("b", **CLOSE)],
                "discriminator": {},
                "$defs": {"x": tagged("a", "c", **CLOSE)},
            },
        ),
        (
            {"oneOf": [OPEN, {"type": "integer"}, {"type": ["null"]}]},
            {"oneOf": [CLOSED, {"type": "integer"}, {"type": ["null"]}]},
        ),
        # One of two may leave the tag out.
        (
            {"oneOf": [tagged("a", required=[]), tagged("b")]},
            {"oneOf": [tagged("a", required=[], **CLOSE), tagged("b", **CLOSE)]},
        ),
    ],
)
def test_objects_have_the_properties_that_their_schema_names(schema: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert completed(schema) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": {"type": "null"}},
        {**OPEN, "required": ["a", "b"]},
        {**OPEN, "minProperties": 1},
        {**OPEN, "patternProperties": {"^b": OPEN}},
        {**OPEN, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {**OPEN, "enum": [{"a": True}, {"b": 1}]},
        {"allOf": [OPEN, {"type": "object", "properties": {"b": OPEN}}]},
        {"$ref": "#/$defs/x", "$defs": {"x": OPEN}, "properties": {"b": A}, "type": "object"},
        # A definition that one place takes for the whole value, and the other for a part of it.
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"allOf": [{"$ref": "#/$defs/x"}, {"required": ["b"]}]}},
            "additionalProperties": True,
            "$defs": {"x": OPEN},
        },
        # What fits one alone now could fit both as they were.
        {"oneOf": [OPEN, {**OPEN, "required": ["a"]}]},
        {"oneOf": [tagged("a"), tagged("b", "a")]},
        {"oneOf": [tagged("a", required=[]), tagged("b", required=[])]},
        {"oneOf": [tagged("a"), {"type": ["object", "null"]}]},
        {"oneOf": [tagged("a"), {"$ref": "#/nowhere"}]},
        {"oneOf": [tagged("a"), True]},
        {"oneOf": [OPEN, {"type": "integer"}, {"type": "number"}]},
    ],
)
def test_objects_stay_open_where_something_else_counts(schema: dict[str, Any]) -> None:
    assert completed(schema) == schema


def test_a_schema_that_leads_to_itself() -> None:
    schema = {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/x"}}}}}
    found = completed(schema)
    assert json.dumps(found).count('"object"') == 1
    assert found["$defs"]["x"]["type"] == "object"


ITSELF: dict[str, Any] = {"$ref": "#"}
NULL: dict[str, Any] = {"type": "null"}
TO_X: dict[str, Any] = {"$ref": "#/$defs/x"}


@pytest.mark.parametrize(
    "schema",
    [
        ITSELF,
        {"anyOf": [ITSELF]},
        {"oneOf": [False, ITSELF]},
        {"allOf": [{}, ITSELF]},
        of_type({"properties": {"a": ITSELF}, "required": ["a"]}),
        of_type({"properties": {"a": A, "b": ITSELF}, "required": ["a", "b"]}),
        of_type({"additionalProperties": ITSELF, "required": ["a"]}),
        of_type({"patternProperties": {"^a": ITSELF}, "additionalProperties": False, "required": ["a"]}),
        of_type({"properties": {"a": ITSELF}, "additionalProperties": False, "minProperties": 1}),
        {"type": "array", "items": ITSELF, "minItems": 1},
        {"type": ["array"], "prefixItems": [A, ITSELF], "minItems": 2},
        {"type": "array", "prefixItems": [A], "items": ITSELF, "minItems": 2},
        {"type": "array", "items": [A, ITSELF], "minItems": 2.0},
        {"type": "array", "items": [A], "additionalItems": ITSELF, "minItems": 2},
    ],
)
def test_what_needs_itself_has_no_end(schema: dict[str, Any]) -> None:
    assert endless_reference(schema) == "#"
    moved = json.loads(json.dumps(schema).replace('"#"', '"#/$defs/x"'))
    definitions = {"$defs": {"x": moved, "y": of_type({"properties": {"z": TO_X}, "required": ["z"]})}}
    for around in ({"$ref": "#/$defs/y"}, {"anyOf": [NULL, {"$ref": "#/$defs/y"}]}, {"items": TO_X}):
        assert endless_reference({**around, **definitions}) is not None
    assert endless_reference({**NULL, **definitions}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [ITSELF, NULL]},
        of_type({"properties": {"a": ITSELF}}),
        of_type({"properties": {"a": {"anyOf": [ITSELF, NULL]}}, "required": ["a"]}),
        of_type({"properties": {"a": {"type": "array", "items": ITSELF}}, "required": ["a"]}),
        of_type({"properties": {"a": ITSELF, "b": A}, "required": ["b"], "minProperties": 1}),
        of_type({"additionalProperties": ITSELF, "properties": {"a": A}, "required": ["a"]}),
        {"type": ["object", "null"], "properties": {"a": ITSELF}, "required": ["a"]},
        {"properties": {"a": ITSELF}, "required": ["a"]},
        {"type": "array", "items": ITSELF},
        {"type": "array", "prefixItems": [A, ITSELF], "minItems": 1},
        {"type": "array", "prefixItems": [A], "items": ITSELF, "minItems": 1},
        # What is not judged.
        of_type({"properties": {"a": ITSELF}, "required": ["a"], "const": {"a": None}}),
        of_type({"properties": {"a": {"$ref": "other.json"}}, "required": ["a"]}),
        of_type({"properties": {"a": {"$id": "other", **ITSELF}}, "required": ["a"]}),
        of_type({"properties": {"a": 5}, "required": "a", "minProperties": "1"}),
        {"anyOf": ITSELF, "allOf": [], "$ref": 5},
        {"type": "array", "items": 5, "minItems": [1]},
    ],
)
def test_what_may_end_has_an_end(schema: dict[str, Any]) -> None:
    assert endless_reference(schema) is None


def test_definitions_that_lead_to_each_other() -> None:
    leaves: dict[str, Any] = {"d0": of_type({"properties": {"next": {"$ref": "#/$defs/d1"}}, "required": ["next"]})}
    for number in range(1, 3000):
        following = {"$ref": f"#/$defs/d{(number + 1) % 3000}"}
        leaves[f"d{number}"] = {"type": "array", "items": following, "minItems": 1}
    root: dict[str, Any] = {"$ref": "#/$defs/d0", "$defs": leaves}
    assert endless_reference(root) == "#/$defs/d0"
    leaves["d1500"]["minItems"] = 0
    assert endless_reference(root) is None
