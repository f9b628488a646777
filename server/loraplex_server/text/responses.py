"""Answers of chats: the text of a completion into reasoning, content and tool calls.

A response template says how a model marks them. The parts come as the text does, and so do the arguments of a call
where they stand in it as JSON; other calls come when they are complete. Put together the parts are the message, in
whatever pieces the text came. Model text is not trusted: what cannot be read as a call is content.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument

if TYPE_CHECKING:  # the process that tokenizes long texts loads no Transformers
    from loraplex_server.text.call_forms import CallForm
    from loraplex_server.text.response_template import CallText, Regions, ResponseFormat

_REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
_MAX_HEAD_CHARS: Final = 2048  # longer than what is before the arguments of a call
_BRACKETS: Final = re.compile(r'["{}\[\]]')
_STRING_MARKS: Final = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool. `arguments` is JSON; where they stand as such in the model's text, they are as it wrote them,
    and may be cut off with it."""

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
    """The next part of a message: text of its content or reasoning, the beginning of call number `index` (its id and
    name), or text of that call's arguments. Content and reasoning also say what of the answer they are: characters from
    `begin` to `end`."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""
    begin: int = 0
    end: int = 0
    tokens: tuple[int, int] | None = None  # the same in tokens, where logprobs were asked for


class AsyncReader(Protocol):
    """Reads an answer as a ResponseReader does, where another process reads."""

    async def push(self, text: str, *, is_end: bool = False) -> list[MessagePart]: ...

    def message(self) -> ParsedMessage: ...

    def num_reasoning_tokens(self, starts: Sequence[int]) -> int: ...

    async def call_form(self) -> tuple[CallForm | None, str]: ...


@dataclass(frozen=True, slots=True)
class ResponseParsing:
    """The parsing of one request's answers. Without a format all is content."""

    format: ResponseFormat | None = None
    prefix: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    with_calls: bool = False
    max_calls: int | None = None
    unread_ids: frozenset[int] = frozenset()  # special tokens that are not part of the text
    # Reader of a response template that is not trusted: it reads in another process, and there is no format.
    new_user_reader: Callable[[], AsyncReader] | None = None
    user_closing: str = ""  # `closing` of such a template

    @property
    def is_parsed(self) -> bool:
        return self.format is not None or self.new_user_reader is not None

    @property
    def closing(self) -> str:
        """The mark that ends the region in which the answer begins, such as reasoning that the prompt began; empty
        outside of any."""
        return self.user_closing if self.format is None else self.format.closing_of(self.prefix)

    def reader(self) -> ResponseReader:
        return ResponseReader(self)


class ResponseReader:
    """Reads one completion: text in, parts of its message out."""

    def __init__(self, parsing: ResponseParsing) -> None:
        self._format = parsing.format
        self._max_calls = parsing.max_calls
        self._made: list[MessagePart] = []
        self._num_calls = 0  # those left out as well
        self._call_ids: set[str] = set()
        self._content_end = 0  # of the content so far in the text, in characters, with what is held
        # Where reasoning begins and ends in the text, in characters.
        self._reasoned: list[tuple[int, int]] = []
        self._content = _PartText()
        self._reasoning = _PartText(is_beginning=True)
        self._open_calls: _OpenCalls | None = None
        self._parser: Regions | None = None
        if parsing.format is not None:
            self._parser = parsing.format.regions(parsing.prefix, parsing.tools, with_calls=parsing.with_calls)
            self._parts(self._parser.initial_events)
            self._content.forget()
            self._reasoning.forget()
            self._reasoned.clear()
            self._content_end = self._num_calls = 0
            self._open_calls = None  # a call that the prompt began comes when it is complete

    def push(self, text: str) -> list[MessagePart]:
        """The parts that this text made certain."""
        if not text:
            return []
        if self._parser is not None:
            return self._keep(self._parts(self._parser.feed(text)))
        begin, self._content_end = self._content_end, self._content_end + len(text)
        return self._keep([MessagePart("content", text, begin=begin, end=self._content_end)])

    def finish(self) -> list[MessagePart]:
        """The parts that were held back."""
        if self._parser is None:
            return []
        parts = self._parts(self._parser.end())
        if held := self._content.held:
            end = self._content_end
            parts.append(MessagePart("content", held, begin=end - len(held), end=end))
        return self._keep(parts)

    def message(self) -> ParsedMessage:
        """The message of all parts so far."""
        return message_of(self._made)

    def num_reasoning_tokens(self, starts: Sequence[int]) -> int:
        """Number of tokens of reasoning so far."""
        return num_reasoning_tokens(self._reasoned, starts)

    @property
    def reasoned(self) -> Sequence[tuple[int, int]]:
        """Begin and end of the reasoning in the text, in characters."""
        return self._reasoned

    def _note_reasoning(self, begin: int, end: int) -> None:
        if self._reasoned and self._reasoned[-1][1] == begin:
            begin, _ = self._reasoned.pop()
        self._reasoned.append((begin, end))

    def _keep(self, parts: list[MessagePart]) -> list[MessagePart]:
        self._made += parts
        return parts

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[MessagePart]:
        parts: list[MessagePart] = []
        for event in events:
            match event["type"], event["field"]:
                case "region_open", field if field != "content":
                    self._content.leave()
                    if field == "tool_calls" and self._format is not None and self._format.call_text is not None:
                        self._open_calls = _OpenCalls(self._format.call_text, event["captures"])
                case "region_chunk", "content":
                    end = event["start"] + len(event["text"])
                    self._add(parts, "content", event["text"], end, event["is_stripped"])
                case "region_chunk", field if field in _REASONING_FIELDS:
                    end = event["start"] + len(event["text"])
                    self._note_reasoning(event["start"], end)
                    self._add(parts, "reasoning", event["text"], end, event["is_stripped"])
                case "region_chunk", "tool_calls" if self._open_calls is not None:
                    self._open_calls.end = event["start"] + len(event["text"])
                    for name, arguments in self._open_calls.push(event["text"]):
                        self._add_call(parts, name, arguments, self._open_calls.id)
                case "region_close", "tool_calls":
                    self._close_calls(parts, event)
                case "region_close", field if field in _REASONING_FIELDS:
                    self._reasoning.leave()
                case _:
                    pass
        return parts

    def _add(
        self,
        parts: list[MessagePart],
        kind: Literal["content", "reasoning"],
        text: str,
        end: int,
        is_stripped: bool = True,
    ) -> None:
        """Adds text that ends there in the answer."""
        if kind == "content":
            self._content_end = end
        num_chars = len(text)
        if is_stripped:
            of_kind = self._content if kind == "content" else self._reasoning
            was_beginning = of_kind.is_beginning
            text = of_kind.push(text)
            end -= len(of_kind.held)
            num_chars = len(text.lstrip() if was_beginning else text)
        if text:
            parts.append(MessagePart(kind, text, begin=end - num_chars, end=end))

    def _close_calls(self, parts: list[MessagePart], event: Mapping[str, Any]) -> None:
        begun, self._open_calls = self._open_calls, None
        num_begun = 0 if begun is None else begun.num_calls
        try:
            calls = [_call_of(value) for value in _as_list(event["value"])][num_begun:]
        except Exception:  # JSON of any kind, from a model
            if begun is None or not num_begun:
                self._content.come_back()
                self._add(parts, "content", event["raw"], event["end"])
            else:
                self._add(parts, "content", begun.rest, begun.end)
            return
        for name, arguments, call_id in calls:
            self._add_call(parts, name, arguments, call_id)

    def _add_call(self, parts: list[MessagePart], name: str, arguments: str, call_id: str) -> None:
        """Adds a call with its name, and the id that the model gave it; without a name, the next part of the last
        call's arguments."""
        assert self._format is not None
        self._num_calls += bool(name)
        index = self._num_calls - 1
        if self._max_calls is not None and index >= self._max_calls:
            return
        if name:
            if call_id in self._call_ids or not _is_id(call_id):
                call_id = self._format.new_id()
            self._call_ids.add(call_id)
            parts.append(MessagePart("call", index=index, id=call_id, name=name))
        if arguments:
            parts.append(MessagePart("arguments", arguments, index))


class _OpenCalls:
    """Calls in a region that is open. Arguments end with the bracket that closes them."""

    def __init__(self, form: CallText, captures: Mapping[str, str]) -> None:
        self.num_calls = 0
        self.end = 0  # of their text so far in the answer
        self._form = form
        self._captures = captures
        self._behind = ""  # text before or behind arguments
        self._depth = -1  # of brackets, in arguments
        self._in_string = False
        self._is_escaped = False

    @property
    def id(self) -> str:
        """The id that the model gave the call; empty where the template reads none."""
        return self._captures.get(self._form.id_capture, "")

    @property
    def rest(self) -> str:
        """The text behind the last arguments that is not part of a call."""
        found = self._form.tail.match(self._behind)
        return self._behind if found is None else self._behind[found.end() :]

    def push(self, text: str) -> list[tuple[str, str]]:
        """Calls and parts of their arguments that this text made certain: for each the name, or nothing for the call
        before, and the text."""
        found: list[tuple[str, str]] = []
        while text:
            if self._depth < 0:
                num_before = len(self._behind)
                self._behind += text
                head = self._form.next if self.num_calls else self._form.first
                if head is None or num_before >= _MAX_HEAD_CHARS:
                    break
                begin = head.match(self._behind[:_MAX_HEAD_CHARS])
                name = "" if begin is None else self._name(begin)
                if begin is None or not name:
                    break
                found.append((name, ""))
                self.num_calls += 1
                text, self._behind, self._depth = self._behind[begin.end() :], "", 0
            end = self._end_in(text)
            found.append(("", text[:end]))
            text = text[end:]
        return found

    def _name(self, begin: re.Match[str]) -> str:
        """The name of a call; empty where it is not a tool's."""
        try:
            given = self._captures.get(self._form.capture, "")
            return check_id(given if self._form.capture else json.loads(f'"{begin["name"]}"'), field="name")
        except (ValueError, InvalidArgument):
            return ""

    def _end_in(self, text: str) -> int:
        """The end of the arguments in a text, or its length."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_STRING_MARKS if self._in_string else _BRACKETS).search(text, at)
            if found is None:
                break
            at = found.end()
            match found[0]:
                case "\\":
                    self._is_escaped = True
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        self._depth = -1
                        return at
        return len(text)


def message_of(parts: Sequence[MessagePart]) -> ParsedMessage:
    """The message that these parts make."""
    arguments: dict[int, list[str]] = {}
    for part in parts:
        if part.kind == "arguments":
            arguments.setdefault(part.index, []).append(part.text)
    return ParsedMessage(
        "".join(part.text for part in parts if part.kind == "content"),
        "".join(part.text for part in parts if part.kind == "reasoning"),
        tuple(
            ParsedCall(part.id, part.name, "".join(arguments.get(part.index, ())))
            for part in parts
            if part.kind == "call"
        ),
    )


def with_tokens(parts: Sequence[MessagePart], starts: Sequence[int]) -> list[MessagePart]:
    """The parts, those of content with their tokens: all that have characters of them. `starts` as in
    `num_reasoning_tokens`."""
    found: list[MessagePart] = []
    for part in parts:
        if part.kind == "content" and starts:
            before = starts[max(0, bisect_right(starts, part.begin) - 1)]  # tokens of one character begin alike
            part = replace(part, tokens=(bisect_left(starts, before), bisect_left(starts, part.end)))
        found.append(part)
    return found


def num_reasoning_tokens(reasoned: Sequence[tuple[int, int]], starts: Sequence[int]) -> int:
    """Number of tokens whose text begins in reasoning. `reasoned`: where that begins and ends in the text. `starts`: of
    each token, characters of the text before its own."""
    return sum(bisect_left(starts, end) - bisect_left(starts, begin) for begin, end in reasoned)


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
        """Ends this text for now: another part begins."""
        self.before = self.held, self.is_beginning
        self.held, self.is_beginning = "", True

    def come_back(self) -> None:
        """Takes back what `leave` did: there was no other part."""
        self.held, self.is_beginning = self.before

    def forget(self) -> None:
        """Forgets all text so far: it was the prompt's."""
        self.held, self.has_text = "", False


def _is_id(value: str) -> bool:
    """True if a later request may name a call so."""
    try:
        return bool(check_id(value, field="id"))
    except InvalidArgument:
        return False


def _as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _call_of(value: Any) -> tuple[str, str, str]:
    """Name, arguments as JSON, and the id that the model gave. Raises an error of any type for what is not a call."""
    function, given_id = value.get("function", value), value.get("id")
    call_id = given_id if isinstance(given_id, str) else ""
    name, arguments = check_id(function["name"], field="name"), function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        json.loads(arguments)
        return name, arguments, call_id
    text = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # halves of surrogate pairs, which ASCII can write
        text = json.dumps(arguments)
    return name, text, call_id
