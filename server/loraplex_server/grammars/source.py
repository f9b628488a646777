"""Grammars as requests write them, to the text that llguidance compiles.

Runs in the front end. A JSON schema is checked for what llguidance would pass over in silence; what it refuses itself
is refused when it is compiled (matcher.py). Strings are written without escapes that have a shorter form, because
`"\\u0061"` would be another spelling of the property `"a"`, which a schema's other rules do not see.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeGuard, cast

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.request import Grammar
from loraplex_server.grammars.schemas import complete, endless_reference, schemas_in, target_of

MAX_REASON_CHARS: Final = 300
MAX_GBNF_CHARS: Final = 8192  # its parser takes 0.3 s for that, and four times as long for twice as much

# Options of llguidance's compiler. One space at most stands between parts, none where compact: whitespace would never
# end.
_OPTIONS: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}
_SPACED: Final = {"item_separator": ", ?", "key_separator": ": ?"}
_COMPACT: Final = {"item_separator": ",", "key_separator": ":"}
# A schema's own separators that hold instead: guidance writes them, and reads no other text.
_OWN: Final[Mapping[str, tuple[str, ...]]] = {"item_separator": (",", ", "), "key_separator": (":", ": ")}

# Length and keywords of schemas that take at most 0.5 s to compile, as measured with adversarial ones.
MAX_SIMPLE_CHARS: Final = 1 << 14
_SIMPLE_KEYWORDS: Final = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "items", "prefixItems", "anyOf", "enum", "const"),
        *("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "$defs", "definitions", "$ref", "title", "description", "default", "examples", "$schema"),
    )
)
# llguidance computes with 64 bits, and keeps integers in floats in places: larger ones come out as other numbers, and
# bounds near -2**63 end its process.
MAX_NUMBER: Final = 2**53 - 1
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# A bound that is excluded, the one that is included, those of the other end, and the direction between the ends.
_ENDS: Final = (
    ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
    ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
)
_NEXT: Final = 1e-9  # from a bound
_NEXT_SHARE: Final = 2.0**-50  # of a large one: llguidance may read a float as the one beside it
# Keywords by which two parts of a schema may bound the same number.
_JOINING: Final = frozenset(("allOf", "anyOf", "oneOf", "$ref", "patternProperties"))
# Keywords of JSON Schema before draft 4: llguidance takes them for comments.
_OLD_KEYWORDS: Final = ("disallow", "divisibleBy", "extends")
# Keywords by values with which they demand nothing: libraries write them, and llguidance refuses the keywords.
_IDLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),  # zod's, of a record
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
_WITHOUT_END: Final = (
    "no text fits `$ref` {}, because it would have to contain itself without end; make a property on the way back "
    "optional, or allow null or an empty array there"
)
# Characters of a text that a regular expression takes for more, or Lark for the end of one.
_SPECIAL: Final = re.compile(r"[^\w]", re.ASCII)
# Characters without a short escape: llguidance would drop them.
_NO_ESCAPE: Final = "\\x00-\\x07\\x0b\\x0e-\\x1f\\x7f"
_CONTROL: Final = re.compile(f"[{_NO_ESCAPE}]")
_TOKEN: Final = re.compile(r"<[^<>\s]+>")
# Parts of Lark: a string, a regular expression, a comment, what stands before a JSON schema, or a special token.
_LARK_PART: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|%json|' + _TOKEN.pattern)
_SPACE: Final = re.compile(r"\s*")
# Parts of a regular expression: an escape, a class of Unicode, the beginning of a class, or a single character.
_REGEX_PART: Final = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\.|\[\^?\]?|.", re.DOTALL)


def json_schema(text: str, *, compact: bool = False, field: str = "grammar.json_schema") -> Grammar:
    """A grammar for a value of a JSON Schema. Raises InvalidArgument, with the keyword that cannot be enforced."""
    checked, parts = _checked(_parsed(text, field), compact, field)
    is_simple = len(checked) <= MAX_SIMPLE_CHARS and all(part.keys() <= _SIMPLE_KEYWORDS for part in parts)
    return Grammar(field, LLMatcher.grammar_from_json_schema(checked), is_simple)


def schema_of(grammar: Grammar) -> str:
    """The checked schema of a grammar that `json_schema` or `json_object` has made."""
    return json.dumps(json.loads(grammar.text)["grammars"][0]["json_schema"])


def json_object(*, compact: bool = False) -> Grammar:
    """A grammar for any JSON object."""
    return json_schema('{"type": "object"}', compact=compact, field="grammar.json_object")


def regex(text: str) -> Grammar:
    """A grammar for a text that the whole regular expression matches."""
    return Grammar("grammar.regex", LLMatcher.grammar_from_regex(text))


def choice(texts: list[str]) -> Grammar:
    """A grammar for one of these texts."""
    options = "|".join(_SPECIAL.sub(lambda found: f"\\x{{{ord(found[0]):x}}}", text) for text in dict.fromkeys(texts))
    return Grammar("grammar.choice", LLMatcher.grammar_from_regex(f"(?:{options})"), len(options) <= MAX_SIMPLE_CHARS)


def lark(text: str) -> Grammar:
    """A grammar in llguidance's form of Lark; JSON schemas in it are checked as others are. Raises InvalidArgument."""
    field, found, end = "grammar.lark", list[str](), 0
    for part in _LARK_PART.finditer(text):
        if part[0] != "%json" or part.start() < end:
            continue
        begin = _SPACE.match(text, part.end())
        assert begin is not None, "it may be empty"
        try:
            schema, behind = json.JSONDecoder().raw_decode(text, begin.end())
        except (ValueError, RecursionError) as error:
            raise _refused(field, f"`%json` takes a JSON schema: {error}") from error
        if not isinstance(schema, dict):
            raise _refused(field, "`%json` takes a JSON schema that is an object")
        checked = checked_schema(cast("dict[str, Any]", schema), compact=False, field=field)
        found += text[end : begin.end()], checked
        end = behind
    return Grammar(field, LLMatcher.grammar_from_lark("".join((*found, text[end:]))))


def with_ids(grammar: Grammar, special_ids: Mapping[str, int]) -> str:
    """The text of a grammar that names special tokens by their ids (by text) instead, such as `<[2]>`."""
    if grammar.field != "grammar.lark":  # the others name none
        return grammar.text
    spellings = {text: f"<[{token_id}]>" for text, token_id in special_ids.items() if _TOKEN.fullmatch(text)}
    return _LARK_PART.sub(lambda part: spellings.get(part[0], part[0]), grammar.text)


def gbnf(text: str) -> Grammar:
    """A grammar in llama.cpp's form of BNF. Raises InvalidArgument."""
    if len(text) > MAX_GBNF_CHARS:
        raise _refused("grammar.gbnf", f"it has more than {MAX_GBNF_CHARS} characters; write it in Lark")
    try:
        return Grammar("grammar.gbnf", LLMatcher.grammar_from_lark(gbnf_to_lark(text)))
    except Exception as error:  # a parser in Python, which raises anything
        raise _refused("grammar.gbnf", str(error) or type(error).__name__) from error


def structural_tag(text: str, *, compact: bool) -> Grammar:
    """A grammar for free text, in which each trigger begins one of the structures `{"begin", "schema", "end"}`. Raises
    InvalidArgument."""
    field = "grammar.structural_tag_json"
    given = _parsed(text, field)
    if unknown := sorted(given.keys() - {"type", "structures", "triggers"}):
        raise _refused(field, f"`{unknown[0]}` is not known; it has `structures` and `triggers`")
    structures: list[Any] = _list_of(given.get("structures"), dict)
    triggers: list[str] = _list_of(given.get("triggers"), str)
    if not structures or not all(triggers):
        raise _refused(field, "it needs `structures`, a list of objects, and `triggers`, a list of texts")
    tags = [_tag(structure, triggers, compact, field) for structure in structures]
    return Grammar(field, LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False)))


def refusal(grammar: Grammar, reason: str) -> InvalidArgument:
    """The error for what llguidance says of a grammar, with the keyword of JSON Schema that is at fault."""
    reason = reason.replace("<non-verbose/>", "")
    if found := _OF_SCHEMA.match(reason):
        reason = found[1]
    if reason.startswith("NoExtension"):
        reason = "no text fits it"
    if reason.startswith("oneOf constraints"):  # it goes on with an option of the library's
        reason = (
            "`oneOf` cannot be enforced where a value may fit several of its schemas; write `anyOf`, or tell them "
            "apart by `type`, `const`, `enum`, or a required property with a `const`"
        )
    for pattern, keyword in _KEYWORDS:
        if re.match(pattern, reason):
            reason = f"`{keyword}` cannot be enforced: {reason}"
            break
    return _refused(grammar.field, reason)


# llguidance's words about a schema within a grammar, before the lines around it.
_OF_SCHEMA: Final = re.compile(r"(?:at )?\d+\(\d+\): failed to compile JSON schema: (.*?)(?=\s+\d+ \||\Z)", re.DOTALL)
# The beginning of what it says, and the keyword.
_KEYWORDS: Final = (
    ("regex parse error", "pattern"),
    ("(?i)(unknown|unsupported) format", "format"),
    ("Pointer |Resource |.*\\$ref", "$ref"),
    ("Invalid type", "type"),
)


def _refused(field: str, reason: str) -> InvalidArgument:
    reason = " ".join(reason.split())[:MAX_REASON_CHARS]
    return InvalidArgument(f"`{field}` is refused: {reason}", field=field)


def _parsed(text: str, field: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _refused(field, f"not JSON: {reason}") from error
    if not isinstance(found, dict):
        raise _refused(field, "it must be an object")
    return cast("dict[str, Any]", found)


def checked_schema(schema: dict[str, Any], compact: bool, field: str) -> str:
    """The schema with our options, as JSON. Raises InvalidArgument."""
    try:
        copied = json.loads(json.dumps(schema))  # faster than copy.deepcopy
    except RecursionError as error:
        raise _refused(field, "nested too deeply") from error
    except ValueError as error:
        raise _refused(field, str(error)) from error
    return _checked(copied, compact, field)[0]


def _checked(schema: dict[str, Any], compact: bool, field: str) -> tuple[str, list[dict[str, Any]]]:
    """The schema with our options, as JSON, and all schemas in it. Changes it. Raises InvalidArgument."""
    try:
        parts = schemas_in(schema)
        for part in parts:
            _drop_idle(part)
        _check_references(schema, parts, field)
        for part in parts:
            if reason := _unenforced(part):
                raise _refused(field, reason)
        complete(schema)
        if reference := endless_reference(schema):
            raise _refused(field, _WITHOUT_END.format(f"{reference[:80]!a}"))
        _include_bounds(parts)
        for part in parts:
            if isinstance(part.get("pattern"), str):
                part["pattern"] = quotable(part["pattern"])
            if isinstance(part.get("patternProperties"), dict):
                part["patternProperties"] = {quotable(key): one for key, one in part["patternProperties"].items()}
        given = json.dumps({**schema, "x-guidance": _options(compact, schema.get("x-guidance"))})
        LLMatcher.grammar_from_json_schema(given)
    except RecursionError as error:
        raise _refused(field, "nested too deeply") from error
    except ValueError as error:
        raise _refused(field, str(error)) from error
    return given, parts


def _options(compact: bool, given: Any) -> dict[str, Any]:
    """Our options, with the separators of those that the schema gives itself."""
    if compact:
        return {**_OPTIONS, **_COMPACT}
    asked = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    own = {name: asked[name] for name, allowed in _OWN.items() if asked.get(name) in allowed}
    return {**_OPTIONS, **_SPACED, **own}


def _drop_idle(schema: dict[str, Any]) -> None:
    """Drops the keywords of a schema that demand nothing. `contains` alone demands one item, whatever it is."""
    for name, values in _IDLE.items():
        if name in schema and schema[name] in values:
            del schema[name]
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["minContains"]
        schema.pop("contains", None)


def _unenforced(schema: dict[str, Any]) -> str:
    """The reason not to take a schema, apart from those in it, though llguidance takes it; empty for none."""
    for name in _OLD_KEYWORDS:
        if name in schema:
            return f"`{name}` cannot be enforced"
    least = schema.get("minProperties", 0)
    if isinstance(least, int | float) and least > 1:
        return "`minProperties` above 1 cannot be enforced, because a property could be repeated"
    for name in (*_BOUNDS, "const", "enum"):
        if any(abs(number) > MAX_NUMBER for number in _numbers(schema.get(name))):
            return f"`{name}` cannot be enforced with numbers beyond {MAX_NUMBER}"
    for name in ("const", "enum", "required", "properties"):
        if name in schema and any(map(_CONTROL.search, _texts(schema[name], deep=name in ("const", "enum")))):
            return f"`{name}` cannot be enforced with control characters in it"
    return ""


def _check_references(root: dict[str, Any], parts: list[dict[str, Any]], field: str) -> None:
    """Raises InvalidArgument for a reference to what is not one of the schema's parts: it would go unchecked."""
    known = {id(part) for part in parts}
    for part in parts:
        reference = part.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            continue
        found = target_of(root, reference)
        if not isinstance(found, bool) and id(found) not in known:
            raise _refused(field, f"`$ref` cannot be enforced: {reference[:80]!a} is not a schema's place in it")


def _include_bounds(parts: list[dict[str, Any]]) -> None:
    """Replaces excluded bounds that are whole numbers by numbers next to them, where the other end, of the same part or
    of one that may be about the same number, is less than one away: llguidance 1.9.1 takes the whole number itself
    there. Elsewhere they stay: below a maximum of 8.999 it refuses 8.9 and 8.99. Changes the parts."""
    groups = [parts] if any(part.keys() & _JOINING for part in parts) else [[part] for part in parts]
    for group in groups:
        near = [_wholes_near(group, other_end, sign) for _, _, other_end, sign in _ENDS]
        for (excluded, included, _, sign), wholes in zip(_ENDS, near, strict=True):
            for part in group:
                bound, given = part.get(excluded), part.get(included)
                if _is_number(bound) and bound in wholes:
                    beside = sign * bound + max(_NEXT, abs(bound) * _NEXT_SHARE)
                    del part[excluded]
                    part[included] = sign * (max(beside, sign * given) if _is_number(given) else beside)


def _wholes_near(parts: list[dict[str, Any]], names: tuple[str, ...], sign: int) -> set[int]:
    """The whole numbers less than one below (`sign` -1: above) the bounds of these names."""
    bounds = [part[name] for part in parts for name in names if _is_number(part.get(name))]
    return {sign * math.floor(sign * bound) for bound in bounds if bound % 1}


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def quotable(pattern: str) -> str:
    """The regular expression, with classes that leave out characters without a short escape.

    Strings never have them. llguidance 1.9.1 reads a class that has them, such as `[^"]`, as if it had the quotation
    mark and the backslash too.
    """
    found, depth, begin = list[str](), 0, 0
    for part in _REGEX_PART.finditer(pattern):
        text = part[0]
        begin = begin if depth else len(found)
        found.append(text)
        depth += text[0] == "["
        is_end = text == "]" and depth > 0
        depth -= is_end
        if depth == 0 and (is_end or text[:2] in ("\\p", "\\P")):
            found[begin:] = [f"[{''.join(found[begin:])}&&[^{_NO_ESCAPE}]]"]
    return "".join(found)


def _texts(value: Any, *, deep: bool) -> Iterator[str]:
    """The texts in a JSON value, keys included; without `deep` not those in an object's values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values()) if deep else []
    if isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from _texts(one, deep=deep)


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a JSON value."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict | list):
        parts = cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        for one in parts:
            yield from _numbers(one)


def _tag(structure: dict[str, Any], triggers: list[str], compact: bool, field: str) -> StructTag:
    begin, end, schema = (structure.get(name) for name in ("begin", "end", "schema"))
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise _refused(field, "each structure needs the texts `begin` and `end`, and an object `schema`")
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise _refused(field, f"`begin` {begin[:40]!a} starts with none of the `triggers`")
    checked = checked_schema(cast("dict[str, Any]", schema), compact, field)
    return StructTag(trigger=trigger, begin=begin, grammar=checked, end=end)


def _list_of(value: Any, kind: type) -> list[Any]:
    """The value as a list; empty where it is none."""
    found = cast("list[Any]", value) if isinstance(value, list) else []
    return found if all(isinstance(one, kind) for one in found) else []
