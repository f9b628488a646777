"""Response templates: how a model marks reasoning and tool calls in its text.

In the form of `transformers.utils.chat_parsing`: the tokenizer's own, a file, or one of `response_templates/`.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, cast

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.config import TOOL_FORMATS
from loraplex_server.text.tool_schemas import resolved_parameters
from loraplex_server.text.vocabulary import unread_ids

_logger = logging.getLogger(__name__)

# Texts of chat templates that tell the format, the first that is found.
_TRACES: Final = (
    ("[ARGS]", "mistral"),
    ("[TOOL_CALLS]", "mistral_list"),
    ("\uff5ctool\u2581calls\u2581begin\uff5c", "deepseek"),
    ("<function=", "qwen3_xml"),
    ("<arg_key>", "think"),  # GLM's calls are in `<tool_call>` too, and are not read
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("<|channel|>analysis<|message|>", "harmony"),
    ("<|tool_call_argument_begin|>", "kimi"),
    ('"parameters": dictionary of argument', "llama3_json"),  # Llama 3.2's
    ("<think>", "think"),
)
MAX_HELD_CHARS: Final = 512  # longer than any mark
_SHORT_ID_CHARS: Final = string.ascii_letters + string.digits  # Mistral's templates demand nine of these


@dataclass(frozen=True, slots=True)
class CallText:
    """Calls whose arguments stand in the text as JSON objects, behind `first`, or behind `next` after another call.
    Their names are the group `name`, or what the opening mark has captured under `capture`."""

    first: re.Pattern[str]
    next: re.Pattern[str] | None
    tail: re.Pattern[str]  # behind the arguments of the last call
    capture: str = ""
    id_capture: str = ""  # the same of the call's id
    keys: tuple[str, str] = ("name", "arguments")  # of the objects


class ResponseFormat:
    """A response template, checked. Raises InvalidArgument for one that cannot be used."""

    def __init__(self, template: Mapping[str, Any], *, short_ids: bool = False) -> None:
        try:
            fields = cast("dict[str, Any]", template["fields"])
            others = {name: field for name, field in fields.items() if name != "tool_calls"}
            self._whole = load_response_template(dict(template))
            self._without_calls = load_response_template({**template, "fields": others})
            for name, field in self._whole.fields.items():
                if not isinstance(cast("Any", field.content_args), dict):  # the library takes it as it is
                    raise TypeError(f"`content_args` of {name!a} is not an object")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(
                f"the response template cannot be used: {error}", field="response_template"
            ) from error
        self.template = template
        self.call_text = _call_text(fields.get("tool_calls"))
        self._short_ids = short_ids
        self._source = json.dumps(template, ensure_ascii=False)

    @classmethod
    def named(cls, name: str) -> ResponseFormat:
        """The format called `name`, one of `loraplex_server.config.TOOL_FORMATS`."""
        template = json.loads(cls.source(name).read_text(encoding="utf-8"))
        return cls(template, short_ids=name.startswith("mistral"))

    @staticmethod
    @cache
    def all_named() -> tuple[ResponseFormat, ...]:
        return tuple(map(ResponseFormat.named, TOOL_FORMATS))

    @staticmethod
    def source(name: str) -> Traversable:
        return files("loraplex_server.text").joinpath("response_templates", f"{name}.json")

    @classmethod
    def of(
        cls, chat_template: str, own: Mapping[str, Any] | None = None, name: str = "auto", file: Path | None = None
    ) -> ResponseFormat | None:
        """The format that `--tool-format NAME` or `--response-template FILE` names for a tokenizer with this chat
        template and response template of its own. None: answers are not parsed."""
        if file is not None:
            try:
                return cls(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise InvalidArgument(
                    f"{file} is not a response template: {error}", field="response_template"
                ) from error
        if name == "none":
            return None
        if name != "auto":
            return cls.named(name)
        if own is not None:
            try:
                return cls(own)
            except InvalidArgument as error:
                _logger.warning("the tokenizer's response template is not used: %s", error)
        found = next((format for trace, format in _TRACES if trace in chat_template), None)
        return None if found is None else cls.named(found)

    @property
    def call_keys(self) -> tuple[str, str]:
        """The keys of name and arguments in calls that are JSON objects."""
        return ("name", "arguments") if self.call_text is None else self.call_text.keys

    def unread_ids(self, special_ids: Mapping[str, int]) -> frozenset[int]:
        """Special tokens (ids by text) that the template does not look for."""
        return unread_ids(self._source, special_ids)

    def prefix_of(self, prompt: str) -> str:
        """The part of the answer that a prompt has written already, such as an opening mark."""
        end = -1
        for match in self._whole.start_anchor_re.finditer(prompt):
            end = match.end()
        return "" if end < 0 else prompt[end:]

    def closing_of(self, prefix: str) -> str:
        """The mark that ends the region in which an answer begins; empty outside of any, and where it is a pattern."""
        return Regions(self._whole, prefix, []).closing

    def regions(self, prefix: str, tools: Sequence[Mapping[str, Any]], *, with_calls: bool) -> Regions:
        """The parser of one completion. Without calls, what looks like one is content."""
        template = self._whole if with_calls else self._without_calls
        return Regions(template, prefix, [_with_types(tool) for tool in tools])

    def new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_SHORT_ID_CHARS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class Regions(ResponseParser):
    """The library's parser. Its events also say what an opening mark has captured, the raw text of a region that
    closes and where that ends, whether text is stripped, and where it begins in the answer. A region that cannot be
    read is closed without a value, and the text behind it read as usual."""

    _start = 0
    _end_of_prefix = 0

    def __init__(self, template: Any, prefix: str, tools: list[Any]) -> None:
        super().__init__(template, prefix=prefix, tools=tools)
        self._end_of_prefix = len(self._buffer)

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The events of new text. Patterns are searched in as much as is held back, which is bounded: whitespace before
        a mark has no end."""
        events: list[dict[str, Any]] = []
        for start in range(0, len(text), MAX_HELD_CHARS):
            events += super().feed(text[start : start + MAX_HELD_CHARS])
            end = len(self._buffer) - MAX_HELD_CHARS
            if end > self._pos:
                self._accumulate(events, self._buffer[self._pos : end])
                self._pos = end
        return events

    @property
    def closing(self) -> str:
        """The mark that ends the region that is open."""
        if self._current is None or self._current == self._implicit_name:
            return ""
        return next(iter(self._spec.fields[self._current].close_literals or ()), "")

    def end(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        self._start = m.start()
        super()._open_explicit(events, field, m)
        events[-1]["captures"] = self._captures

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        num_before = len(events)
        super()._accumulate(events, text)
        for event in events[num_before:]:
            event["start"] = self._pos - self._end_of_prefix
            event["is_stripped"] = self._spec.fields[event["field"]].content_args.get("strip", True)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, raw = self._current, self._buffer[max(self._start, self._end_of_prefix) : self._pos]
        num_before = len(events)
        try:
            super()._close_current(events)
        except Exception:  # of a content parser or a transform, over text of a model
            self._reset_to_implicit()
            events.append({"type": "region_close", "field": field, "value": None})
        for event in events[num_before:]:
            event["raw"], event["end"] = raw, self._pos - self._end_of_prefix


def _with_types(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with the types of its parameters where the library looks for them."""
    function: Any = tool.get("function", tool)
    parameters: Any = function.get("parameters") if isinstance(function, dict) else None
    if not isinstance(parameters, dict):
        return dict(tool)
    return {"function": {**function, "parameters": resolved_parameters(cast("dict[str, Any]", parameters))}}


_SPACE: Final = r"\s{0,64}"
_PLACEHOLDER: Final = re.compile(r"\{(?:(content)\.)?(\w+)\}")


def _call_text(field: Any) -> CallText | None:
    """The form of calls that a response template's field describes; None where the arguments are read out of something
    else."""
    if not isinstance(field, dict):
        return None
    found = cast("dict[str, Any]", field)
    if found.get("content") != "json" or found.get("content_args"):
        return None
    transform: Any = found.get("transform", "{content}")
    function: Any = transform.get("function", transform) if isinstance(transform, dict) else transform
    is_list = bool(found.get("transform_each"))
    if function == "{content}" and not is_list:
        return _in_objects("name", "arguments|parameters", is_list=False)
    if not isinstance(function, dict):
        return None
    named = cast("dict[str, Any]", function)
    name, arguments = (_PLACEHOLDER.fullmatch(str(named.get(key))) for key in ("name", "arguments"))
    if name is None or arguments is None:
        return None
    if not is_list and arguments[0] == "{content}" and name[1] is None and name[2] != "content":
        call_id = _PLACEHOLDER.fullmatch(str(transform.get("id"))) if isinstance(transform, dict) else None
        id_capture = "" if call_id is None or call_id[1] is not None else call_id[2]
        return CallText(re.compile(rf"{_SPACE}(?=\{{)"), None, re.compile(r"\s*"), name[2], id_capture)
    if (name[1] is None) == (arguments[1] is None) == is_list:
        return replace(_in_objects(name[2], arguments[2], is_list=is_list), keys=(name[2], arguments[2]))
    return None


def _in_objects(name: str, arguments: str, *, is_list: bool) -> CallText:
    """The form of calls that are objects in which the name comes first and the arguments next."""
    value = r'"(?P<name>(?:[^"\\]|\\.){1,256})"'
    kind = rf'(?:"type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?'  # Llama 3 often writes it
    named = rf'{kind}"{name}"{_SPACE}:{_SPACE}{value}'
    head = rf'\{{{_SPACE}{named}{_SPACE},{_SPACE}"(?:{arguments})"{_SPACE}:{_SPACE}(?=\{{)'
    # Mistral's calls have an id behind the arguments, which may be cut off.
    own_id = r',\s{0,64}"id"\s{0,64}:\s{0,64}"(?:[^"\\]|\\.){0,256}"\s{0,64}'
    cut_id = r',\s{0,64}(?:"id"\s{0,64}(?::\s{0,64}(?:"(?:[^"\\]|\\.){0,256})?)?)?\Z'
    tail = rf"\s*(?:{own_id}|{cut_id})?\}}?\s*"
    if not is_list:
        return CallText(re.compile(_SPACE + head), None, re.compile(tail))
    first, following = (re.compile(f"{_SPACE}{mark}{_SPACE}{head}") for mark in (r"\[", rf"(?:{own_id})?\}}{_SPACE},"))
    return CallText(first, following, re.compile(rf"{tail}\]?\s*"))
