"""Grammars of HTTP requests, in each dialect's form, as messages of the wire. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar, cast

from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.fields import json_text, unicode_text

T = TypeVar("T")


def grammar_of(fields: Mapping[str, Any]) -> pb.Grammar | None:
    """The grammar that the fields `GRAMMAR_FIELDS` ask for; None where none does. Fields that are null count as absent;
    several must ask for the same, as clients for old and new servers do. Raises InvalidArgument, or Unimplemented, with
    the field's name."""
    found: pb.Grammar | None = None
    field = ""
    for name, make in _FIELDS.items():
        if (value := fields.get(name)) is None or (grammar := make(value, name)) is None:
            continue
        if found is not None:
            if not _are_same(found, grammar):
                raise InvalidArgument(f"`{field}` and `{name}` ask for two grammars: leave one of them out", field=name)
            continue
        found, field = grammar, name
    return found


def _are_same(one: pb.Grammar, other: pb.Grammar) -> bool:
    """True for equal grammars; schemas may be written in two ways."""
    if one == other:
        return True
    if not (one.json_schema and other.json_schema and one.compact == other.compact):
        return False
    try:
        return json.loads(one.json_schema) == json.loads(other.json_schema)
    except (ValueError, RecursionError):  # what is wrong with it a worker says
        return False


def unknown_parts(fields: Mapping[str, Any]) -> Iterator[str]:
    """Names of unknown keys in the objects with `type`. `grammar_of` tells of other objects, and of wrong ones."""
    for name in ("response_format", "grammar"):
        found = fields.get(name)
        given = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in _TYPED_PARTS:  # of a structural tag a worker reads all
            continue
        yield from (f"{name}.{key}" for key in given if key not in ("type", *_TYPED_PARTS[kind]))
        named = _either(given, _TYPED_PARTS[kind])
        if kind == "json_schema" and isinstance(named, dict) and ("schema" in named or "name" in named):
            keys = cast("dict[str, Any]", named)
            yield from (f"{name}.json_schema.{key}" for key in keys if key not in _NAMED_PARTS)


_TYPED_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "text": (),
    **dict.fromkeys(("json", "json_object"), ("schema", "value")),
    "json_schema": ("json_schema", "value"),
    "regex": ("value", "pattern"),
}
_NAMED_PARTS: Final = ("name", "description", "schema", "strict")


def _typed(value: Any, name: str) -> pb.Grammar | None:
    """An object with `type`: OpenAI's and LoRAX's response_format, TGI's grammar, and what huggingface_hub makes of
    them."""
    found = _expect(value, dict, name, "an object with `type`")
    match found.get("type"):
        case "text":
            return None
        case "json" | "json_object":
            schema = _either(found, _TYPED_PARTS["json"])
            return pb.Grammar(json_object=True) if schema is None else _json(schema, name)
        case "json_schema":
            named = _expect(_either(found, _TYPED_PARTS["json_schema"]), dict, f"{name}.json_schema", "an object")
            schema = _either(named, ("schema",))
            # OpenAI's schema is in an object with its name; TGI takes the schema alone as well.
            return _json(schema if schema is not None or "name" in named else named, name)
        case "regex":
            return _regex(_either(found, _TYPED_PARTS["regex"]), name)
        case "structural_tag":
            return _structural_tag(found, name)
        case kind:
            raise InvalidArgument(f"`{name}.type` is not known: {ascii(kind)[:40]}", field=f"{name}.type")


def _lark_or_typed(value: Any, name: str) -> pb.Grammar | None:
    return _grammar(value, name) if isinstance(value, str) else _typed(value, name)


def _structured(value: Any, name: str) -> pb.Grammar | None:
    """vLLM's structured_outputs."""
    found = {key: one for key, one in _expect(value, dict, name, "an object").items() if one is not None}
    is_compact = found.get("disable_any_whitespace") is True
    for key, one in found.items():
        # Backends and what they may do. There is none to fall back to.
        if key not in _STRUCTURED and one is not False and (one is not True or key not in _WHEN_TRUE):
            shown = ascii(key[:40])[1:-1]
            raise Unimplemented(f"`{name}.{shown}` is not available: leave it out", field=f"{name}.{shown}")
    made = [(key, _STRUCTURED[key](one, f"{name}.{key}")) for key, one in found.items() if key in _STRUCTURED]
    grammars = [(key, grammar) for key, grammar in made if grammar is not None]
    if len(grammars) > 1:
        raise InvalidArgument(f"`{name}` takes one form; there are {len(grammars)}", field=name)
    if not grammars:
        return None
    grammar = grammars[0][1]
    if is_compact and grammar.WhichOneof("kind") in ("json_schema", "json_object", "structural_tag_json"):
        grammar.compact = True
    return grammar


def _json(value: Any, name: str) -> pb.Grammar:
    """A schema, as an object or as text."""
    if value is True or value is None:
        value = {}
    if not isinstance(value, str):
        value = json_text(_expect(value, dict, name, "a JSON schema"), name)
    return pb.Grammar(json_schema=_text(value, name))


def _json_object(value: Any, name: str) -> pb.Grammar | None:
    return pb.Grammar(json_object=True) if _expect(value, bool, name, "true or false") else None


def _regex(value: Any, name: str) -> pb.Grammar:
    return pb.Grammar(regex=_text(value, name))


def _choice(value: Any, name: str) -> pb.Grammar:
    texts = [_text(one, name) for one in _expect(value, list, name, "a list of texts")]
    return pb.Grammar(choice=pb.Choices(texts=texts))


def _grammar(value: Any, name: str) -> pb.Grammar:
    """A grammar in Lark, or in BNF as llama.cpp and xgrammar write it."""
    text = _text(value, name)
    return pb.Grammar(gbnf=text) if "::=" in text else pb.Grammar(lark=text)


def _structural_tag(value: Any, name: str) -> pb.Grammar:
    return pb.Grammar(structural_tag_json=_text(value if isinstance(value, str) else json_text(value, name), name))


def _refused(value: Any, name: str) -> pb.Grammar | None:
    raise Unimplemented(f"`{name}` is not available: JSON has one space at most between its parts", field=name)


def _either(found: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)


def _expect(value: Any, kind: type[T], name: str, what: str) -> T:
    if not isinstance(value, kind):
        raise InvalidArgument(f"`{name}` must be {what}", field=name)
    return value


def _text(value: Any, name: str) -> str:
    return unicode_text(_expect(value, str, name, "a text"), name)


_Make = Callable[[Any, str], pb.Grammar | None]

_STRUCTURED: Final[Mapping[str, _Make]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
_WHEN_TRUE: Final = ("disable_any_whitespace", "disable_fallback")  # other options of `structured_outputs`
_FIELDS: Final[Mapping[str, _Make]] = {
    "response_format": _typed,
    "structured_outputs": _structured,
    "grammar": _lark_or_typed,
    # vLLM's older ones, and SGLang's.
    **{f"guided_{name}": make for name, make in _STRUCTURED.items() if name != "structural_tag"},
    "guided_whitespace_pattern": _refused,
    "structural_tag": _structural_tag,
    "json_schema": _json,
    "regex": _regex,
    "ebnf": _grammar,
}
GRAMMAR_FIELDS: Final = frozenset(_FIELDS)
