"""Answers of chats: the text of a completion into reasoning, content and tool calls.

A response template says how a model marks them. The parts come as the text does, a tool call when it is complete; put
together they are the message, in whatever pieces the text came. Model text is not trusted: what cannot be read as a
call is content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from loraplex_contracts.adapters import check_id

if TYPE_CHECKING:  # the process that tokenizes long texts loads no Transformers
    from loraplex_server.text.response_template import Regions, ResponseFormat

_REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool. `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """An answer with its parts told apart."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()


@dataclass(frozen=True, slots=True)
class MessagePart:
    """The next part of a message: text of its content or reasoning, or call number `index` as a whole."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    index: int = 0
    call: ParsedCall | None = None


@dataclass(frozen=True, slots=True)
class ResponseParsing:
    """How the answers of one request are read. Without a format all is content."""

    format: ResponseFormat | None = None
    prefix: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    with_calls: bool = False
    max_calls: int | None = None
    unread_ids: frozenset[int] = frozenset()  # special tokens that are not part of the text

    def reader(self) -> ResponseReader:
        return ResponseReader(self)


class ResponseReader:
    """One completion: text in, parts of its message out."""

    def __init__(self, parsing: ResponseParsing) -> None:
        self._format = parsing.format
        self._max_calls = parsing.max_calls
        self._made: list[MessagePart] = []
        self._num_calls = 0
        self._content = _PartText()
        self._reasoning = _PartText(is_beginning=True)
        self._parser: Regions | None = None
        if parsing.format is not None:
            self._parser = parsing.format.regions(parsing.prefix, parsing.tools, with_calls=parsing.with_calls)
            self._parts(self._parser.initial_events)
            self._content.forget()
            self._reasoning.forget()
            self._num_calls = 0

    def push(self, text: str) -> list[MessagePart]:
        """The parts that this text made certain."""
        if not text:
            return []
        return self._keep(
            [MessagePart("content", text)] if self._parser is None else self._parts(self._parser.feed(text))
        )

    def finish(self) -> list[MessagePart]:
        """The parts that were held back."""
        if self._parser is None:
            return []
        parts = self._parts(self._parser.end())
        if held := self._content.held:
            parts.append(MessagePart("content", held))
        return self._keep(parts)

    def message(self) -> ParsedMessage:
        """All parts so far."""
        return ParsedMessage(
            "".join(part.text for part in self._made if part.kind == "content"),
            "".join(part.text for part in self._made if part.kind == "reasoning"),
            tuple(part.call for part in self._made if part.call is not None),
        )

    def _keep(self, parts: list[MessagePart]) -> list[MessagePart]:
        self._made += parts
        return parts

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[MessagePart]:
        parts: list[MessagePart] = []
        for event in events:
            match event["type"], event["field"]:
                case "region_open", field if field != "content":
                    self._content.leave()
                case "region_chunk", "content":
                    self._add(parts, "content", event)
                case "region_chunk", field if field in _REASONING_FIELDS:
                    self._add(parts, "reasoning", event)
                case "region_close", "tool_calls":
                    self._close_calls(parts, event)
                case "region_close", field if field in _REASONING_FIELDS:
                    self._reasoning.leave()
                case _:
                    pass
        return parts

    def _add(self, parts: list[MessagePart], kind: Literal["content", "reasoning"], event: Mapping[str, Any]) -> None:
        text: str = event["text"]
        if event["is_stripped"]:
            text = (self._content if kind == "content" else self._reasoning).push(text)
        if text:
            parts.append(MessagePart(kind, text))

    def _close_calls(self, parts: list[MessagePart], event: Mapping[str, Any]) -> None:
        assert self._format is not None
        try:
            calls = [(self._format.new_id(), *_call_of(value)) for value in _as_list(event["value"])]
        except Exception:  # JSON of any kind, from a model
            self._content.come_back()
            parts.append(MessagePart("content", self._content.push(event["raw"])))
            return
        for call in calls:
            if self._max_calls is None or self._num_calls < self._max_calls:
                parts.append(MessagePart("call", index=self._num_calls, call=ParsedCall(*call)))
                self._num_calls += 1


@dataclass(slots=True)
class _PartText:
    """Content or reasoning. Whitespace between it and another part is dropped; what comes behind such a part begins a
    line."""

    is_beginning: bool = False
    has_text: bool = False
    held: str = ""  # whitespace, dropped if another part is next
    before: tuple[str, bool] = ("", False)  # that part

    def push(self, text: str) -> str:
        """The text that is certain."""
        if self.is_beginning:
            text = text.lstrip()
            if not text:
                return ""
            self.is_beginning = False
            text = f"\n{text}" if self.has_text else text
        text = self.held + text
        certain = text.rstrip()
        self.held = text[len(certain) :]
        self.has_text = self.has_text or bool(certain)
        return certain

    def leave(self) -> None:
        """Another part begins."""
        self.before = self.held, self.is_beginning
        self.held, self.is_beginning = "", True

    def come_back(self) -> None:
        """There was no other part."""
        self.held, self.is_beginning = self.before

    def forget(self) -> None:
        """All text so far was the prompt's."""
        self.held, self.has_text = "", False


def _as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _call_of(value: Any) -> tuple[str, str]:
    """Name and arguments as JSON. Raises an error of any type for what is not a call."""
    function = value.get("function", value)
    name, arguments = check_id(function["name"], field="name"), function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        json.loads(arguments)
        return name, arguments
    text = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # halves of surrogate pairs, which ASCII can write
        text = json.dumps(arguments)
    return name, text
