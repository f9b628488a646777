"""Grammars of tool calls, in the forms in which models write them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.request import Grammar
from loraplex_proto.validate import MAX_GRAMMAR_BYTES
from loraplex_server.text.call_forms import NUMBER, CallForm
from loraplex_server.text.responses import ResponseParsing
from loraplex_server.text.tool_schemas import resolved_parameters

_TOOLS: Final = "chat.tools_json"


@dataclass(frozen=True, slots=True)
class MarkTokens:
    """Tokens of a vocabulary that marks are written with, ids by text. Free text has no special ones; `plain` ones are
    text as others are."""

    special: Mapping[str, int] = field(default_factory=dict[str, int])
    plain: Mapping[str, int] = field(default_factory=dict[str, int])

    def terms(self, text: str) -> str:
        """A text in llguidance's form of Lark, with tokens by id: the library would spell plain ones in pieces."""
        ids = {**self.special, **self.plain}
        return " /[0-9]{1,4}/ ".join(_terms(part, ids) for part in text.split(NUMBER))

    def ending(self, rule: str, text: str) -> str:
        """A rule for any text up to `text`, which may come in any spelling."""
        return f"{rule}{'' if text in self.special else '[lazy]'}: ANY {_terms(text, self.special)}"


def tool_calls(form: CallForm, parsing: ResponseParsing, tokens: MarkTokens, name: str) -> Grammar:
    """A grammar for calls of any of the request's tools, one at least, or one call of `name`. Where the prompt has
    begun to reason, that goes on first. Raises InvalidArgument with the field."""
    asked = "chat.tool_choice.name" if name else "chat.tool_choice.required"
    functions: list[Any] = [tool.get("function", tool) for tool in parsing.tools]
    wanted = [one for one in functions if not name or (isinstance(one, dict) and one.get("name") == name)]
    if not wanted:
        raise InvalidArgument(f"`{asked}` names a tool that is not in `chat.tools_json`", field=asked)
    rules = _call_rules(form, wanted, tokens)
    is_one = bool(name) or form.between is None or parsing.max_calls == 1
    more = "" if is_one else f"({tokens.terms(form.between or '')} call)*"
    calls = f"{tokens.terms(form.head)} call {more} {tokens.terms(form.tail)}"
    lines = ["%llguidance {}", f"start: {calls}"]
    if parsing.closing:
        lines = ["%llguidance {}", f"start: thoughts {calls}", ANY, tokens.ending("thoughts", parsing.closing)]
    return _grammar(asked, (*lines, *rules))


def answer_or_calls(form: CallForm, parsing: ResponseParsing, tokens: MarkTokens, answer: Grammar) -> Grammar | None:
    """A grammar for either an answer of `answer`, which is made of a JSON schema, or calls of the request's tools, with
    arguments as `strict_calls` says; None where the form of calls cannot be told from JSON. Where the prompt has begun
    to reason, that goes on first. Raises InvalidArgument with the field."""
    from loraplex_server.grammars.source import schema_of

    beginning = form.head + form.begin
    if _OF_JSON.match(beginning) and not (_JSON_CALL.fullmatch(form.begin) and form.end == "}"):
        return None
    functions: list[Any] = [tool.get("function", tool) for tool in parsing.tools]
    is_one = form.between is None or parsing.max_calls == 1
    more = "" if is_one else f"({tokens.terms(form.between or '')} call)*"
    lines = ["%llguidance {}", ANY, "start: answer", f"value: %json {schema_of(answer)}"]
    lines.append(f"answer: value | {tokens.terms(form.head)} call {more} {tokens.terms(form.tail)}")
    if parsing.closing:
        lines[2] = "start: thoughts answer"
        lines.append(tokens.ending("thoughts", parsing.closing))
    field = _TOOLS if has_strict(parsing.tools) else answer.field
    return _grammar(field, (*lines, *_call_rules(form, functions, tokens, only_strict=True, is_beside_json=True)))


# What JSON begins with as well, in more than one of its tokens; a call that is JSON; and references to a schema's root,
# or from there to what is no definition.
_OF_JSON: Final = re.compile(r'\[?\s*\{|\[\s*[\["]|"')
_JSON_CALL: Final = re.compile(r'\{"name": "NAME", "(\w+)": ')
_OF_ROOT: Final = re.compile(r"#(?!/(?:\$defs|definitions)/)")


def has_strict(tools: Sequence[Mapping[str, Any]]) -> bool:
    return any(_is_strict(tool.get("function", tool)) for tool in tools)


def strict_calls(form: CallForm, parsing: ResponseParsing, tokens: MarkTokens) -> Grammar:
    """A grammar for free text, and calls of the request's tools where the model writes them: from their mark on in the
    model's own form, with the parameters of tools that are `strict`, and any arguments of the others. Raises
    InvalidArgument with the field."""
    functions: list[Any] = [tool.get("function", tool) for tool in parsing.tools]
    mark_id, of_calls = tokens.special.get(form.mark), form.begin + form.end + form.tail + form.mark
    kept = sorted(one for text, one in tokens.special.items() if one not in parsing.unread_ids and text not in of_calls)
    specials = f"(ANY ({' | '.join(f'<[{one}]>' for one in kept)}))*" if kept else ""
    lines = ["%llguidance {}", ANY, f"free: {specials} ANY"]
    if mark_id is None:
        mark = f"/{form.mark_pattern}/" if form.mark_pattern else json.dumps(form.mark, ensure_ascii=False)
        lines += [f"marked[lazy]: ANY {mark}", f"lead: {specials} marked"]
    else:
        lines.append(f"lead: free <[{mark_id}]>")
    is_one = form.between is None or parsing.max_calls == 1
    more = "" if is_one or form.is_inline else f"({tokens.terms(form.between or '')} call)*"
    block = f"lead first {more} {tokens.terms(form.tail)}"
    lines.append(f"answer: ({block})* free" if form.is_inline else f"answer: free | {block}")
    if parsing.closing:
        lines += ["start: ANY | thoughts answer", tokens.ending("thoughts", parsing.closing)]
    else:
        lines.append("start: answer")
    return _grammar(_TOOLS, (*lines, *_call_rules(form, functions, tokens, only_strict=True)))


ANY: Final = r"ANY: /(.|\n)*/"


def _is_strict(function: Any) -> bool:
    return isinstance(function, dict) and cast("dict[str, Any]", function).get("strict") is True


def _call_rules(
    form: CallForm,
    functions: list[Any],
    tokens: MarkTokens,
    *,
    only_strict: bool = False,
    is_beside_json: bool = False,
) -> list[str]:
    """The rule `call`, a call of one of the functions, and `first`, a call without its mark. `only_strict`: others have
    any arguments. `is_beside_json`: JSON may come in a call's place, and calls that are JSON are written with the same
    terminals."""
    key = _JSON_CALL.fullmatch(form.begin) if is_beside_json and _OF_JSON.match(form.head + form.begin) else None
    rules: list[str] = []
    texts: dict[str, str] = {}
    for number, function in enumerate(functions):
        one = cast("dict[str, Any]", function if isinstance(function, dict) else {})
        called, given = one.get("name"), one.get("parameters") or {}
        if not isinstance(called, str) or not isinstance(given, dict):
            raise InvalidArgument(
                f"`{_TOOLS}` must have tools with a `name`, and `parameters` that are a schema", field=_TOOLS
            )
        kind: Any = cast("dict[str, Any]", given).get("type", "object")
        if isinstance(kind, str) and kind != "object":
            raise InvalidArgument(
                f"`{_TOOLS}` has `parameters` of type {kind[:40]!a}: arguments are an object", field=_TOOLS
            )
        name, behind = check_id(called, field=_TOOLS), f"behind_{number}"
        if key is not None:
            arguments = {} if only_strict and not _is_strict(function) else cast("dict[str, Any]", given)
            rules += [f"call_{number}: %json {_json_call(name, key[1], arguments)}", f"first_{number}: call_{number}"]
            continue
        begin = form.begin.replace("NAME", name)
        first = (form.head + form.begin).partition(form.mark)[2].replace("NAME", name) if form.mark else begin
        rules.append(f"call_{number}: {tokens.terms(begin)} {behind}")
        rules.append(f"first_{number}: {tokens.terms(first)} {behind}")
        is_free = only_strict and not _is_strict(function)
        if is_free and form.parameter is not None:
            rules.append(tokens.ending(behind, form.close))  # any arguments, up to the last mark
            continue
        try:
            arguments = _arguments(form, {} if is_free else given, number, tokens, rules, texts)
        except RecursionError as error:
            raise InvalidArgument(f"`{_TOOLS}` is nested too deeply", field=_TOOLS) from error
        rules.append(f"{behind}: {arguments} {tokens.terms(form.end)}")
    numbers = range(len(functions))
    rules += [f"{kind}: " + " | ".join(f"{kind}_{number}" for number in numbers) for kind in ("call", "first")]
    return [*rules, *texts.values()]


def _json_call(name: str, key: str, parameters: dict[str, Any]) -> str:
    """The schema of a call that is an object of its name and arguments."""
    from loraplex_server.grammars.schemas import schemas_in
    from loraplex_server.grammars.source import checked_schema

    parameters = copy.deepcopy(parameters)
    for part in schemas_in(parameters):
        reference = part.get("$ref")
        if isinstance(reference, str) and _OF_ROOT.match(reference):  # the root is the call here
            part["$ref"] = f"#/properties/{key}{reference[1:]}"
    shared = {one: parameters[one] for one in ("$defs", "definitions") if one in parameters}
    arguments = {"type": "object", **{one: value for one, value in parameters.items() if one not in shared}}
    properties = {"name": {"const": name}, key: arguments}
    schema = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
    return checked_schema({**schema, **shared}, compact=False, field=_TOOLS)


def _arguments(
    form: CallForm,
    given: Any,
    number: int,
    tokens: MarkTokens,
    rules: list[str],
    texts: dict[str, str],
) -> str:
    """The rule for the arguments of one function. `rules` and `texts` get what it is made of."""
    from loraplex_server.grammars.source import checked_schema

    if form.parameter is None:
        schema = {"type": "object", **cast("dict[str, Any]", given)}
        return f"%json {checked_schema(schema, compact=False, field=_TOOLS)}"
    parameters = _parameters(form.parameter, cast("dict[str, Any]", given), tokens, texts)
    rules += [f"call_{number}_{rule}" for rule in parameters.values()]
    return " ".join(f"call_{number}_{one}" for one in parameters)


def _grammar(field: str, lines: Sequence[str]) -> Grammar:
    """The grammar of these lines. Raises InvalidArgument for one that is too large."""
    from llguidance import LLMatcher  # late: most requests demand none

    text = "\n".join(lines)
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(f"`{_TOOLS}` is too large for a grammar: send fewer tools", field=_TOOLS)
    return Grammar(field, LLMatcher.grammar_from_lark(text))


# Keywords of parameters that are enforced, or no rules.
_PLAIN: Final = frozenset({"type", "properties", "required", "description", "title", "$defs", "definitions", "$schema"})


# --- arguments with marks of their own ------------------------------------------------------------------------------

# Texts in which a response template would see the end of a value, or another value.
_ENDS: Final = re.compile(r"</parameter>|<parameter=|</function>")
_ANY: Final = r"(.|\n)"
# Keywords of schemas of texts that are no rule, and those of lengths.
_TEXT_KEYWORDS: Final = frozenset(
    ("type", "title", "description", "default", "examples", "nullable", "minLength", "maxLength", "deprecated")
)


def _parameters(
    marks: tuple[str, str], schema: dict[str, Any], tokens: MarkTokens, texts: dict[str, str]
) -> dict[str, str]:
    """Rules of the arguments, in the order of the properties, by their use (`NAME` or `NAME?`). Raises InvalidArgument
    with the keyword that cannot be enforced."""
    schema = resolved_parameters(schema)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _not_enforced("properties")
    named = dict(cast("dict[str, Any]", properties))
    needed = {one for one in cast("list[Any]", required) if isinstance(one, str)}
    named |= {one: {} for one in sorted(needed - named.keys())}
    most = schema.get("maxProperties", len(named))
    for keyword in sorted(schema.keys() - _PLAIN - {"additionalProperties", "strict", "default", "examples"}):
        if keyword != "maxProperties" or not isinstance(most, int) or most < len(named):
            raise _not_enforced(keyword)
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    rules: dict[str, str] = {}
    for number, (name, one) in enumerate(named.items()):
        if not re.fullmatch(r"[^>\n]{1,128}", name):
            raise InvalidArgument(f"`{_TOOLS}` has a parameter whose name this model cannot write", field=_TOOLS)
        begin = tokens.terms(marks[0].replace("KEY", name))
        rule = f"{number}: {begin} ({_value(one, marks[1], shared, texts)})"
        rules[f"{number}" if name in needed else f"{number}?"] = rule
    return rules


def _value(schema: Any, end: str, shared: dict[str, Any], texts: dict[str, str]) -> str:
    """The rule for a value and its end: texts as they are, others as JSON. `texts` gets the rules of texts, by name."""
    from loraplex_server.grammars.source import checked_schema

    found = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    if isinstance(schema, bool) and not schema:
        raise _not_enforced("false")
    for several in ("anyOf", "oneOf"):
        choices = found.get(several)
        if isinstance(choices, list) and choices and found.keys() <= _TEXT_KEYWORDS | {several}:
            return " | ".join(f"({_value(one, end, shared, texts)})" for one in cast("list[Any]", choices))
    given: Any = found.get("type", "string")
    types: list[Any] = cast("list[Any]", given) if isinstance(given, list) else [given]
    options: Any = [found["const"]] if "const" in found else found.get("enum")
    if isinstance(options, list):
        return f"({_options(cast('list[Any]', options), types)}) {json.dumps(end)}"
    if "string" not in types:
        checked = checked_schema({**found, **shared}, compact=False, field=_TOOLS)
        return f"%json {checked} {json.dumps(end)}"
    for keyword in sorted(found.keys() - _TEXT_KEYWORDS):
        raise _not_enforced(keyword)
    least, most = found.get("minLength", 0), found.get("maxLength", "")
    if type(least) is not int or (most != "" and type(most) is not int):
        raise _not_enforced("minLength")
    name = f"TEXT_{least}_{most}"
    # One terminal with its end: a text would go on into that otherwise.
    marks = _ENDS.pattern.replace("/", r"\/")
    texts[name] = f"{name}: (/{_ANY}{{{least},{most}}}/ & ~/{_ANY}*({marks}){_ANY}*/) {json.dumps(end)}"
    return name


def _options(options: list[Any], types: list[Any]) -> str:
    found: list[str] = []
    for one in options:
        is_text = isinstance(one, str)
        text = one if is_text else json.dumps(one)
        if isinstance(one, list | dict) or (not is_text and types == ["string"]) or _ENDS.search(text):
            raise _not_enforced("enum")
        found.append(json.dumps(text, ensure_ascii=False))
    return " | ".join(found)


def _not_enforced(keyword: str) -> InvalidArgument:
    return InvalidArgument(
        f"`{_TOOLS}` is refused: `{keyword}` cannot be enforced in this model's form of calls", field=_TOOLS
    )


def _terms(text: str, ids: Mapping[str, int]) -> str:
    """A text in llguidance's form of Lark, these tokens by id."""
    if not ids:
        return json.dumps(text, ensure_ascii=False) if text else ""
    either = "|".join(re.escape(one) for one in sorted(ids, key=len, reverse=True))
    parts = [part for part in re.split(f"({either})", text) if part]
    return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in parts)
