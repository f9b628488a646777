"""Training prompts and texts from .txt and .jsonl files.

Owns the file formats and the errors for files that do not fit them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.regular_files import read_regular

Messages = list[dict[str, str]]
Prompt = str | Messages  # messages go through the tokenizer's chat template

T = TypeVar("T")


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt per line: the line itself in a .txt, in a .jsonl a string or an object with `prompt` or `messages`.

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
    """`parse` of each line that is not blank. `parse` returns None for a line that does not fit."""
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl"):
        raise InvalidArgument(f"{path}: give a file that ends in .txt (one per line) or .jsonl", field=field)
    found: list[T] = []
    for number, line in enumerate(_lines(path, field), start=1):
        if not line.strip():
            continue
        value = _json(line, path, number, field) if suffix == ".jsonl" else line
        item = parse(value)
        if item is None:
            wanted = "`prompt` or `messages`" if field == "--prompts" else "`text`"
            raise InvalidArgument(
                f"{path}, line {number}: give a string that is not empty, or an object with {wanted}", field=field
            )
        if not _is_text(item):
            raise InvalidArgument(
                f"{path}, line {number} has half of a surrogate pair, which is no text; write UTF-8", field=field
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
    return _messages(value["messages"]) if "messages" in value else _string(value.get("prompt"))


def _text(value: Any) -> str | None:
    return _string(value.get("text") if isinstance(value, dict) else value)


def _string(value: Any) -> str | None:
    return value.rstrip("\r") if isinstance(value, str) and value.strip() else None


def _is_text(item: Any) -> bool:
    """True for a text, or messages of texts, that UTF-8 can write."""
    texts = [item] if isinstance(item, str) else [text for message in item for text in message.values()]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _messages(value: Any) -> Messages | None:
    if not isinstance(value, list) or not value:
        return None
    messages: Messages = []
    for each in value:
        role, content = (each.get("role"), each.get("content")) if isinstance(each, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        messages.append({"role": role, "content": content})
    return messages
