"""Faults that pydantic finds in bodies, as typed errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from loraplex_contracts.errors import InvalidArgument

MAX_NAME_CHARS: Final = 60  # of a key
_NO_NAME: Final = "the body has a name that is no text: half of a surrogate pair"
_NO_OBJECT: Final = "the body must be a JSON object, sent as application/json"
# Errors of what Python calls a dictionary.
_OF_OBJECTS: Final = ("model_type", "model_attributes_type", "dict_type")


def fault_of(errors: Sequence[Mapping[str, Any]], body: Any) -> InvalidArgument:
    """The error for the first fault of a body. `errors`: pydantic's, of which a field that takes several types has one
    for each: the one that goes deepest is of the type that the value has."""
    found = [(_place(one, body), one) for one in errors]
    of_field = [place for place, _ in found if place[:1] == found[0][0][:1]]
    where = max(of_field, key=len)
    if not where:
        is_name = errors[0]["type"] == "string_unicode"
        return InvalidArgument(_NO_NAME if is_name else _NO_OBJECT, field="body")
    faults = [one for place, one in found if place == where]
    first = next((one for one in faults if not one["type"].endswith("_type")), None)
    if where[0] in ("parameters", "sampling_params") and len(where) > 1:
        where = where[1:]  # an option's own name
    name = _joined(where)
    if first is not None and first["type"] == "missing":
        return InvalidArgument(f"`{name}` is missing", field=name)
    if first is not None and first["type"] == "string_unicode":
        return InvalidArgument(f"`{name}` is not valid Unicode text", field=name)
    said = dict.fromkeys(map(_said, faults if first is None else [first]))
    whole = " or ".join([*said][:1] + [one.removeprefix("should be ") for one in [*said][1:]])
    return InvalidArgument(f"`{name}` is not valid: {whole}", field=name)


def _place(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """The keys and indices that lead to the value at fault, without pydantic's tags of types."""
    where: list[str | int] = []
    value = body
    for part in cast("tuple[str | int, ...]", error["loc"]):
        if _has(value, part):
            value = value[part]
            where.append(part)
    return [*where, *error["loc"][-1:]] if error["type"] == "missing" else where


def _has(value: Any, part: str | int) -> bool:
    """True for a key of an object, or an index of a list."""
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(cast("list[Any]", value))


def _joined(where: Iterable[str | int]) -> str:
    parts = (f"[{one}]" if isinstance(one, int) else f".{ascii(one[:MAX_NAME_CHARS])[1:-1]}" for one in where)
    return "".join(parts).removeprefix(".")


def _said(error: Mapping[str, Any]) -> str:
    if error["type"] in _OF_OBJECTS:
        return "should be an object"
    said = str(error["msg"]).removeprefix("Input ")
    return said[:1].lower() + said[1:]
