"""Schemas of objects, and what they leave unsaid."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from loraplex_server.grammars.schemas import complete

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


def test_a_schema_that_leads_to_itself() -> None:
    schema = {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/x"}}}}}
    found = completed(schema)
    assert json.dumps(found).count('"object"') == 1
    assert found["$defs"]["x"]["type"] == "object"
