"""Training prompts and texts from .txt and .jsonl files.

Owns the file formats and the errors for files that do not fit them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.regular_files import read_regular


class Chat(TypedDict):
    """Messages and tools that the chat template makes a prompt of."""

    messages: list[dict[str, Any]]  # in the form that a server gives them to templates
    tools: list[Any]


Prompt = str | Chat

T = TypeVar("T")


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt per line: the line itself in a .txt, in a .jsonl a string or an object with `prompt`, or with
    `messages` and perhaps `tools`, as OpenAI's clients write them.

    Raises InvalidArgument, as does `read_texts`.
    """
    return _read(path, "--prompts", _prompt)


def read_texts(path: Path) -> list[str]:
    """One text per line: the line itself in a .txt, in a .jsonl a string or an object with `text`."""
    return _read(path, "--texts", _text)


def without_duplicates(given: Sequence[T]) -> list[T]:
    """Each prompt or text once: one that is learned and held out as well would measure nothing."""
    return list({json.dumps(each, sort_keys=True): each for each in given}.values())


def _read(path: Path, field: str, parse: Callable[[Any], T | None]) -> list[T]:
    """`parse` of each line that is not blank. `parse` returns None for a line that does not fit, or raises ValueError
    with the reason."""
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl"):
        raise InvalidArgument(f"{path}: give a file that ends in .txt (one per line) or .jsonl", field=field)
    found: list[T] = []
    for number, line in enumerate(_lines(path, field), start=1):
        if not line.strip():
            continue
        value = _json(line, path, number, field) if suffix == ".jsonl" else line
        try:
            item = parse(value)
            _check_text(item)
        except ValueError as error:
            raise InvalidArgument(f"{path}, line {number}: {error}", field=field) from error
        if item is None:
            wanted = "`prompt` or `messages`" if field == "--prompts" else "`text`"
            raise InvalidArgument(
                f"{path}, line {number}: give a string that is not empty, or an object with {wanted}", field=field
            )
        found.append(item)
    if not found:
        raise InvalidArgument(f"{path} is empty: there is nothing to train on", field=field)
    return found


def _lines(path: Path, field: str) -> list[str]:
    try:
        text = read_regular(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}", field=field) from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8 text (byte {error.start})", field=field) from error
    return text.split("\n")  # not splitlines(): a text may contain other line ends


def _json(line: str, path: Path, number: int, field: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path}, line {number} is not JSON: {error}", field=field) from error


def _prompt(value: Any) -> Prompt | None:
    if not isinstance(value, dict):
        return _string(value)
    return _chat(cast("dict[str, Any]", value)) if "messages" in value else _string(value.get("prompt"))


def _text(value: Any) -> str | None:
    return _string(value.get("text") if isinstance(value, dict) else value)


def _string(value: Any) -> str | None:
    return value.rstrip("\r") if isinstance(value, str) and value.strip() else None


def _check_text(item: Any) -> None:
    """Raises ValueError for what UTF-8 cannot write."""
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which is no text; write UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _chat(given: dict[str, Any]) -> Chat:
    messages, tools = given["messages"], given.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise ValueError("`messages` must be a list with at least one message")
    if not _are_objects(tools):
        raise ValueError("`tools` must be a list of objects")
    every = cast("list[Any]", messages)
    return {"messages": [_message(each, f"messages[{idx}]") for idx, each in enumerate(every)], "tools": tools}


def _message(given: Any, where: str) -> dict[str, Any]:
    """The message as a server gives it to a template: its parts are one text, arguments of its calls are values."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ValueError(f"`{where}` must be an object with a `role`, which is a text")
    message = cast("dict[str, Any]", given)
    found = {name: value for name, value in message.items() if value not in (None, "", [])}
    found["content"] = _content(message, f"{where}.content")
    if "tool_calls" in found:
        found["tool_calls"] = _tool_calls(found["tool_calls"], f"{where}.tool_calls")
    if reasoning := found.get("reasoning") or found.get("reasoning_content"):
        found |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return found


def _content(message: Mapping[str, Any], where: str) -> str:
    content: Any = message.get("content")
    if content is None and message["role"] in ("assistant", "tool"):
        return ""
    parts = cast("list[Any]", content if isinstance(content, list) else [{"type": "text", "text": content}])
    texts = [each.get("text") for each in parts if isinstance(each, dict) and each.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"`{where}` takes a text, or a list of parts of type text")
    return "".join(cast("list[str]", texts))


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not _are_objects(calls) or not all(isinstance(call.get("function"), dict) for call in calls):
        raise ValueError(f"`{where}` must be a list of objects with a `function`")
    return [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
        for call in calls
    ]


def _arguments(given: Any) -> Any:
    """The value of a call's arguments. What a model has written need not be JSON: then it is the text itself."""
    try:
        return json.loads(given or "{}") if isinstance(given, str | None) else given
    except (ValueError, RecursionError):
        return given


def _are_objects(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(each, dict) for each in cast("list[Any]", given))
