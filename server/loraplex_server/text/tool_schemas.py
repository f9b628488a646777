"""Schemas of tools, with the types of parameters where readers look for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

_REFERENCE: Final = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_TYPES: Final[Mapping[type, str]] = {
    type(None): "null", int: "integer", float: "number", bool: "boolean", str: "string",
}  # fmt: skip
_MAX_REFERENCES: Final = 8


def resolved_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema: its properties have a type where their values tell it, and are without references of their own.
    References in them stay."""
    properties: Any = parameters.get("properties")
    if not isinstance(properties, dict):
        return dict(parameters)
    named = cast("dict[str, Any]", properties)
    return {**parameters, "properties": {name: _resolved(one, parameters) for name, one in named.items()}}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            break
        found = cast("dict[str, Any]", schema)
        (only,) = found["allOf"] if isinstance(found.get("allOf"), list) and len(found["allOf"]) == 1 else (None,)
        place = _REFERENCE.fullmatch(str(found.get("$ref")))
        if place is not None:
            shared: Any = root.get(place[1])
            only = cast("dict[str, Any]", shared).get(place[2]) if isinstance(shared, dict) else None
        if not isinstance(only, dict):
            break
        schema = {**only, **{name: one for name, one in found.items() if name not in ("$ref", "allOf")}}
    if isinstance(schema, dict) and "type" not in schema:
        found = cast("dict[str, Any]", schema)
        values: Any = [found["const"]] if "const" in found else found.get("enum")
        kinds = {type(one) for one in cast("list[Any]", values)} if isinstance(values, list) else set[type]()
        if kinds and kinds <= _TYPES.keys():
            return {**found, "type": [name for kind, name in _TYPES.items() if kind in kinds]}
    return schema
