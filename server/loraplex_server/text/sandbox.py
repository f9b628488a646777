"""Chat templates and response templates of users, run in a child process.

Questions and answers are JSON. A template is a program and a response template has patterns: both may take any time and
memory, which the process bounds (`loraplex_runtime.limited_process`).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple
from typing import Any, Final

from jinja2 import TemplateSyntaxError

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.text import chat_template
from loraplex_server.text.call_reading import MAX_FORM_CHARS, form_of
from loraplex_server.text.response_template import ResponseFormat
from loraplex_server.text.responses import ResponseParsing, ResponseReader
from loraplex_server.text.tokenizer import MAX_REASON_CHARS, MAX_RENDERED_CHARS

MAX_READERS: Final = 1024  # completions that are read at the same time; the least recently used is forgotten


def serving(setup: Any) -> Callable[[Any], Any]:
    """Answers a question by its `do`: {"do": "render", ...}, {"do": "read", ...} and {"do": "form", ...}."""
    del setup
    readers = Readers()
    answers = {"render": rendered, "read": readers.read, "form": call_form}
    return lambda question: answers[question["do"]](question)


def rendered(question: Mapping[str, Any]) -> dict[str, str]:
    """The text of `template` over `given`, as `chat_template.rendered` takes them. Gives `text`; else `refusal`, where
    it raises, or `fault`, where it cannot be used."""
    try:
        text = chat_template.rendered(question["template"], question["given"])
    except (MemoryError, ImportError):  # no template's fault
        raise
    except TemplateSyntaxError as error:
        return {"fault": f"line {error.lineno}: {_reason(error)}"}
    except Exception as error:  # a template is a program, and may raise anything
        return {"refusal": _reason(error)}
    if len(text) > MAX_RENDERED_CHARS:
        return {"fault": f"it makes more than {MAX_RENDERED_CHARS} characters"}
    return {"text": text}


def call_form(question: Mapping[str, Any]) -> dict[str, Any]:
    """`form`, the fields of the CallForm that a template reads, or None; and `closing`, the mark that ends the region
    in which the answer begins. `fault`: the response template cannot be used."""
    how = question["how"]
    try:
        parsing = _parsing(how)
    except InvalidArgument as error:
        return {"fault": error.message[:MAX_REASON_CHARS]}
    form, closing = form_of(parsing.format, how["ends"]), parsing.closing
    if len(closing) > MAX_FORM_CHARS:
        form = None
    return {"form": None if form is None else asdict(form), "closing": closing[:MAX_FORM_CHARS]}


class Readers:
    """Readers of completions, by id."""

    def __init__(self) -> None:
        self._readers: OrderedDict[str, tuple[ResponseReader, int]] = OrderedDict()  # with the characters so far

    def read(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the `text` of completion `id` that comes behind its first `start` characters. Gives `parts`; or
        `is_unknown`, where it has not read those: then the same question with `how` reads all of it, and gives the
        parts behind `start`. `fault`: the response template cannot be used. `is_end`: the parts held back as well, and
        `reasoned`, where reasoning begins and ends."""
        name, start, text, is_end = question["id"], question["start"], question["text"], question["is_end"]
        reader, num_read = self._readers.pop(name, (None, 0))
        if (how := question.get("how")) is not None:
            try:
                reader = _parsing(how).reader()
            except InvalidArgument as error:
                return {"fault": error.message[:MAX_REASON_CHARS]}
            reader.push(text[:start])
            text, num_read = text[start:], start
        if reader is None or num_read != start:
            return {"is_unknown": True}
        parts = reader.push(text)
        if is_end:
            parts += reader.finish()
        else:
            self._readers[name] = reader, start + len(text)
            if len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
        return {"parts": [list(astuple(part)) for part in parts], "reasoned": list(reader.reasoned) if is_end else []}


def _parsing(how: Mapping[str, Any]) -> ResponseParsing:
    """The parsing that `how` describes. Raises InvalidArgument."""
    try:
        template = json.loads(how["template"])
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"it is not JSON: {error}") from error
    format = ResponseFormat(template)
    prefix = format.prefix_of(how["prompt_end"])
    return ResponseParsing(format, prefix, how["tools"], how["with_calls"], how["max_calls"])


def _reason(error: Exception) -> str:
    lines = str(error).strip().split("\n", 1)
    return lines[0][:MAX_REASON_CHARS] or type(error).__name__
