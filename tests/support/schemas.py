"""Random JSON schemas for tests of grammars."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = ("a", "b", "ab", "x y", "é", '"', "\\", "n\n", "")
# Keywords that cannot be enforced, with a value each.
REFUSED: dict[str, Any] = {
    "not": {"type": "string"},
    "if": {"type": "string"},
    "uniqueItems": True,
    "contains": {"type": "integer"},
    "propertyNames": {"pattern": "^a"},
    "dependentRequired": {"a": ["b"]},
    "unevaluatedProperties": False,
    "minProperties": 2,
    "minimum": -(2**63),
    "exclusiveMaximum": 1e300,
    "const": [2**53],
    "enum": [{"a": -(2**64)}],
    "divisibleBy": 3,
    "format": "no-such-format",
    "pattern": "(?=a)b",
    "$ref": "#/$defs/nowhere",
}


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """One that can be enforced, and whose values are short."""
    kinds: list[Callable[[random.Random], dict[str, Any]]] = [_string, _number, _integer, _constant, _enum, _pattern]
    if depth:
        kinds += [
            lambda dice: _object(dice, depth),
            lambda dice: _object(dice, depth),
            lambda dice: _array(dice, depth),
            lambda dice: {"anyOf": [random_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))]},
            lambda dice: {"type": [*dice.sample(["null", "boolean", "integer"], dice.randint(1, 3))]},
            lambda dice: {"allOf": [_integer(dice), {"type": "integer"}]},
            lambda dice: {"allOf": [_object(dice, depth)]},
            lambda dice: {"oneOf": [_tagged(dice, depth, "one"), {"type": "null"}, _tagged(dice, depth, "two")]},
        ]
    found = dice.choice(kinds)(dice)
    if dice.random() < 0.1:
        found["description"] = "not a rule"
    return found


def refused_schema(dice: random.Random) -> tuple[dict[str, Any], str]:
    """A schema with a keyword that cannot be enforced, somewhere in it."""
    keyword = dice.choice(sorted(REFUSED))
    kind = {"uniqueItems": "array", "contains": "array", "format": "string", "pattern": "string"}.get(keyword)
    schema: dict[str, Any] = {keyword: REFUSED[keyword]} | ({} if kind is None else {"type": kind})
    for _ in range(dice.randint(0, 2)):
        wrap = dice.choice(("properties", "items", "anyOf"))
        schema = {
            "properties": {"type": "object", "properties": {"a": schema}, "required": ["a"]},
            "items": {"type": "array", "items": schema, "minItems": 1},
            "anyOf": {"anyOf": [{"type": "null"}, schema]},
        }[wrap]
    return schema, keyword


def _string(dice: random.Random) -> dict[str, Any]:
    least = dice.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 4)}


def _pattern(dice: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": dice.choice(["^[a-c]{1,3}$", "^x(y|z)?$", "^\\d{2}-\\d$", '^[^"]{0,3}$'])}


def _integer(dice: random.Random) -> dict[str, Any]:
    least = dice.randint(-20, 20)
    found: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": least + dice.randint(0, 2000)}
    if dice.random() < 0.3:
        found["exclusiveMaximum"] = found.pop("maximum") + 1
    if dice.random() < 0.2:
        found = {"type": "integer", "multipleOf": dice.randint(1, 7), "minimum": 0, "maximum": 100}
    return found


def _number(dice: random.Random) -> dict[str, Any]:
    least = round(dice.uniform(-10, 10), 2)
    return {"type": "number", "minimum": least, "maximum": least + dice.randint(0, 9)}


def _constant(dice: random.Random) -> dict[str, Any]:
    return {"const": dice.choice([1, -2.5, "é\n", None, True, {"k": [1, "v"]}, ["a", {}]])}


def _enum(dice: random.Random) -> dict[str, Any]:
    return {"enum": dice.sample([0, 1, "one", "two", None, False, [1, 2], {"k": "v"}], dice.randint(1, 4))}


def _tagged(dice: random.Random, depth: int, tag: str) -> dict[str, Any]:
    found = {**_object(dice, depth - 1 if depth > 1 else 1), "type": "object"}
    properties = {**found["properties"], "tag": {"const": tag}}
    most = {"maxProperties": found["maxProperties"] + 1} if "maxProperties" in found else {}
    return {**found, **most, "properties": properties, "required": [*found["required"], "tag"]}


def _array(dice: random.Random, depth: int) -> dict[str, Any]:
    least = dice.randint(0, 1)
    found: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + dice.randint(0, 2)}
    if dice.random() < 0.3:
        found["prefixItems"] = [random_schema(dice, 0)]
    found["items"] = random_schema(dice, depth - 1)
    return found


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    names = dice.sample(NAMES, dice.randint(0, 3))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(dice, depth - 1) for name in names},
        "required": [name for name in names if dice.random() < 0.7],
        "additionalProperties": False,
    }
    if dice.random() < 0.2:
        found["additionalProperties"] = random_schema(dice, 0)
        found["required"] = names  # else there can be no bound on their number
        found["maxProperties"] = len(names) + 1
    elif dice.random() < 0.5:
        del found["additionalProperties"]
    if dice.random() < 0.2:
        del found["type"]
    return found
