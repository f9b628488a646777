"""Types of tools' parameters."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex_server.text.tool_schemas import resolved_parameters

DEFS: Any = {
    "Level": {"type": "integer", "minimum": 1},
    "Alias": {"$ref": "#/$defs/Level", "title": "alias"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Choice": {"enum": ["a", None, 2]},
}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "enum": ["a"]}, {"type": "string", "enum": ["a"]}),
        ({"$ref": "#/$defs/Level"}, DEFS["Level"]),
        ({"$ref": "#/$defs/Alias", "description": "x"}, {**DEFS["Level"], "title": "alias", "description": "x"}),
        ({"allOf": [{"$ref": "#/$defs/Level"}], "default": 1}, {**DEFS["Level"], "default": 1}),
        ({"$ref": "#/$defs/Choice"}, {**DEFS["Choice"], "type": ["null", "integer", "string"]}),
        ({"const": True}, {"const": True, "type": ["boolean"]}),
        ({"enum": [[1]]}, {"enum": [[1]]}),
        ({"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}),
        ({"$ref": "#/$defs/None"}, {"$ref": "#/$defs/None"}),
        ({"$ref": 5, "allOf": [{}, {}]}, {"$ref": 5, "allOf": [{}, {}]}),
        (True, True),
    ],
)
def test_types_of_parameters(schema: Any, expected: Any) -> None:
    assert resolved_parameters({"properties": {"x": schema}, "$defs": DEFS})["properties"] == {"x": expected}


def test_other_schemas_stay() -> None:
    for schema in ({}, {"properties": 5}, {"type": "object"}):
        assert resolved_parameters(schema) == schema
    assert resolved_parameters({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": 1}})["properties"] == {
        "x": {"$ref": "#/$defs/a"}
    }
    assert resolved_parameters({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": 5})
