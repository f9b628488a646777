"""Parts of JSON schemas, and what schemas leave unsaid of objects.

`complete` only narrows a schema: what fits it then also fits the schema as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, cast
from urllib.parse import unquote

# Keywords whose values are schemas, by the form of the value.
_SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS: Final = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_WITH_SCHEMAS: Final = frozenset((*_SCHEMA_MAPS, *_SCHEMA_LISTS, *_SCHEMAS))
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
# Keywords by which other references could lead to a part, or mean another one.
_ANCHORS: Final = frozenset({"$id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef"})
# Keywords that say of an object what its properties are.
_OF_OBJECTS: Final = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
# Keywords that may restrict the same values, or the values within them, as those beside them do.
_MIXING: Final = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "enum", "const", "patternProperties"),
        *("propertyNames", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties"),
        *("unevaluatedItems", "contains"),
    )
)
# Beside one of them alone: no other keyword of objects or arrays.
_OF_PARTS: Final = frozenset({*_MIXING, *_OF_OBJECTS, "items", "prefixItems", "additionalItems"})

# Keywords that say whether there are other properties than those named, or may demand some.
_DEMANDING: Final = frozenset({"additionalProperties", "minProperties", "maxProperties", *_MIXING})
# What is looked at to tell the schemas of `oneOf` apart: properties, and of each its texts and the required names.
_MAX_TAGS: Final = 16
_MAX_TOLD: Final = 64


def schemas_in(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """A schema and all those in it."""
    parts = [schema]
    for part in parts:  # grows meanwhile
        parts += (one for name in part for one in _under(part, name))
    return parts


def target_of(root: dict[str, Any], reference: str) -> Any:
    """The part that a reference `#` or `#/...` leads to; None where there is none."""
    found: Any = root
    for key in unquote(reference).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = dict(enumerate(cast("list[Any]", found))).get(int(key)) if key.isdecimal() else None
        else:
            found = cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None
    return found


def complete(schema: dict[str, Any]) -> None:
    """Gives parts that tell of properties, and of no type, the type `object`, and no properties but those that they
    name where they leave that open: a model could go on writing others. Changes the schema."""
    for part in _parts_alone(schema):
        if part.keys() & _OF_OBJECTS and not part.keys() & {"type", *_MIXING - {"patternProperties"}}:
            part["type"] = "object"
        if _is_open(part):
            part["additionalProperties"] = False


def endless_reference(root: dict[str, Any]) -> str | None:
    """The first reference in a schema to a part that needs itself, so that its texts would never end; None for none.
    What cannot be judged counts as a part whose texts end."""
    parts = _reached(root)
    if any(part.keys() & _ANCHORS for part in parts[1:]):
        return None
    num_open = {id(part): 0 for part in parts}  # needs that are not met yet
    is_open: set[tuple[int, int]] = set()  # the same needs, by their part and number
    uses: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by a part: the needs that it would meet
    for part in parts:
        for number, choices in enumerate(_needs(part, root)):
            num_open[id(part)] += 1
            is_open.add((id(part), number))
            for choice in choices:
                uses[id(choice)].append((id(part), number))
    with_an_end = [key for key, num in num_open.items() if num == 0]
    for key in with_an_end:  # grows meanwhile
        for need in is_open.intersection(uses[key]):
            is_open.remove(need)
            num_open[need[0]] -= 1
            if num_open[need[0]] == 0:
                with_an_end.append(need[0])
    return next((part["$ref"] for part in parts if num_open[id(part)] and "$ref" in part), None)


def _reached(root: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts that say something of a value: all but the definitions that nothing refers to."""
    found = {id(root): root}
    waiting = [root]
    for part in waiting:  # grows meanwhile
        inner = [one for name in part if name not in _DEFINITIONS for one in _under(part, name)]
        for one in (*inner, _target(part, root)):
            if isinstance(one, dict) and id(one) not in found:
                found[id(one)] = one
                waiting.append(one)
    return waiting


def _target(part: dict[str, Any], root: dict[str, Any]) -> Any:
    """The part that a part's reference leads to; None where it is not known."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    return target_of(root, reference)


def _needs(part: dict[str, Any], root: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Lists of parts, of one of which each text of a part has a text in it, or is one itself."""
    for choices in _choices(part, root):
        found = [one for one in choices if isinstance(one, dict)]
        if found and all(isinstance(one, dict) or one is False for one in choices):
            yield found


def _choices(part: dict[str, Any], root: dict[str, Any]) -> Iterator[list[Any]]:
    """The same with schemas that are no parts: true, false, and what is none."""
    if "$ref" in part:  # what is beside it says nothing in drafts before 2019-09
        yield [_target(part, root)]
        return
    yield from (_listed(part.get(name)) for name in ("anyOf", "oneOf"))
    yield from ([one] for one in _listed(part.get("allOf")))
    kinds = _types(part)
    if part.keys() & {"enum", "const"} or len(kinds) != 1:
        return
    if "object" in kinds:
        named, patterns = (_mapped(part.get(name)) for name in ("properties", "patternProperties"))
        others = [*patterns.values(), part.get("additionalProperties", True)]
        required = [one for one in _listed(part.get("required")) if isinstance(one, str)]
        yield from ([named[one]] for one in required if one in named)
        if any(one not in named for one in required):
            yield others
        if _bound(part, "minProperties") >= 1:
            yield [*named.values(), *others]
    elif "array" in kinds:
        items = part.get("items", True)
        first, rest = (items, part.get("additionalItems", True)) if isinstance(items, list) else ([], items)
        first = _listed(part.get("prefixItems", first))
        yield from ([one] for number, one in enumerate(first) if number < _bound(part, "minItems"))
        if _bound(part, "minItems") > len(first):
            yield [rest]


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _mapped(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _bound(part: dict[str, Any], name: str) -> int | float:
    """A lower bound of a part, 0 where it has none."""
    value: Any = part.get(name)
    return value if isinstance(value, int | float) else 0


def _is_open(part: dict[str, Any]) -> bool:
    """True if a part names properties, leaves it open whether there are others, and nothing in it demands some."""
    properties: Any = part.get("properties")
    if not isinstance(properties, dict) or part.keys() & _DEMANDING:
        return False
    required: Any = part.get("required", [])
    return isinstance(required, list) and all(
        one in cast("dict[str, Any]", properties) for one in cast("list[Any]", required) if isinstance(one, str)
    )


def _under(part: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """The schemas in the value of one of the part's keywords."""
    if name not in _WITH_SCHEMAS:
        return
    value: Any = part[name]
    inner: Any = ()
    if name in _SCHEMA_MAPS:
        inner = cast("dict[str, Any]", value).values() if isinstance(value, dict) else ()
    elif isinstance(value, dict):
        inner = [value] if name in _SCHEMAS else ()
    elif isinstance(value, list) and name in _SCHEMA_LISTS:
        inner = cast("list[Any]", value)
    yield from (one for one in inner if isinstance(one, dict))


def _parts_alone(root: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts that apply to their values without any other part beside: each may be narrowed for itself."""
    alone: dict[int, dict[str, Any]] = {}
    mixed: dict[int, dict[str, Any]] = {}
    waiting = [(root, True)]
    while waiting:
        part, is_alone = waiting.pop()
        seen = alone if is_alone else mixed
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if part is not root and part.keys() & _ANCHORS:
            return []
        parts_alone = is_alone and _is_unmixed(part, root)
        waiting += ((one, parts_alone) for name in part if name not in _DEFINITIONS for one in _under(part, name))
        if (reference := part.get("$ref")) is not None:
            if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
                return []
            if isinstance(target := target_of(root, reference), dict):
                waiting.append((cast("dict[str, Any]", target), parts_alone))
    return [part for key, part in alone.items() if key not in mixed]


def _is_unmixed(part: dict[str, Any], root: dict[str, Any]) -> bool:
    """True if no two schemas in a part apply to the same value, so that one may be narrowed without a look at the
    others."""
    mixing = part.keys() & _MIXING
    if not mixing:
        return True
    if len(mixing) > 1:
        return False
    (name,) = mixing
    value: Any = part[name]
    if name == "patternProperties":
        return "properties" not in part and isinstance(value, dict) and len(cast("dict[str, Any]", value)) == 1
    if len(part.keys() & _OF_PARTS) > 1:
        return False
    if name in ("$ref", "anyOf"):
        return True
    choices = cast("list[Any]", value) if isinstance(value, list) else []
    return (name == "allOf" and len(choices) == 1) or (name == "oneOf" and _are_told_apart(choices, root))


def _are_told_apart(choices: list[Any], root: dict[str, Any]) -> bool:
    """True if no value fits two of the schemas, by their types or by the texts that a property has to be."""
    found = [_resolved(one, root) for one in choices]
    kinds = [_types(one) for one in found]
    others = [kind for kinds_of in kinds if kinds_of != {"object"} for kind in kinds_of]
    objects = [one for one, kinds_of in zip(found, kinds, strict=True) if kinds_of == {"object"}]
    if not all(kinds) or len(set(others)) < len(others) or (objects and "object" in others):
        return False
    if len(objects) < 2:
        return True
    properties: Any = objects[0].get("properties")
    names = list(islice(cast("dict[str, Any]", properties), _MAX_TAGS)) if isinstance(properties, dict) else []
    return any(_tells_apart(name, objects) for name in names)


def _tells_apart(name: str, objects: list[dict[str, Any]]) -> bool:
    """True if the property has other texts in each of the schemas, and only one of them at most does without it."""
    seen, num_optional = set[str](), 0
    for one in objects:
        texts, required = _texts_of(one, name), one.get("required")
        num_optional += not (isinstance(required, list) and name in cast("list[Any]", required)[:_MAX_TOLD])
        if not texts or num_optional > 1 or not seen.isdisjoint(texts):
            return False
        seen |= texts
    return True


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """The schema, or the one that its reference leads to."""
    found = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    if found.keys() & _OF_PARTS != {"$ref"}:
        return found
    target = target_of(root, str(found["$ref"]))
    return cast("dict[str, Any]", target) if isinstance(target, dict) else {}


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema names, integers as numbers; empty where it names none."""
    given: Any = schema.get("type")
    listed: list[Any] = cast("list[Any]", given) if isinstance(given, list) else [given]
    return {"number" if one == "integer" else one for one in listed if isinstance(one, str)}


def _texts_of(schema: dict[str, Any], name: str) -> set[str]:
    """The texts that a property has to be one of; empty where it may be anything else."""
    properties: Any = schema.get("properties")
    one: Any = cast("dict[str, Any]", properties).get(name) if isinstance(properties, dict) else None
    found = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
    values: Any = [found["const"]] if "const" in found else found.get("enum")
    texts: list[Any] = cast("list[Any]", values) if isinstance(values, list) else []
    return set(texts) if len(texts) <= _MAX_TOLD and all(isinstance(text, str) for text in texts) else set()
