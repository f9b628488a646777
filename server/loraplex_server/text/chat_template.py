"""Chat templates: the text that one makes of a chat's messages.

Templates differ in what they take for a call's arguments, for the content of a message that is calls alone, and for a
content at all: those of some multimodal models read parts and no text.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, cast

# DeepSeek V3's and R1's ask so for messages that are calls alone, and leave the calls of others out.
_ASKS_FOR_NONE: Final = re.compile(r"content\W{0,3}\s+is\s+none\b")
# A content of trials, and a name within their parts, which shows where a template writes a part out. No template has
# them in its own text, and no request knows them.
_TRIAL: Final = secrets.token_hex(8)
_MARK: Final = secrets.token_hex(8)
MAX_TRIED_ARGUMENT: Final = 256  # characters: longer ones of requests are not kept


def chosen(templates: Any, *, has_tools: bool) -> str:
    """A tokenizer's chat template; of several the one that Transformers takes. Empty where there is none."""
    if not isinstance(templates, Mapping):
        return templates or ""
    named = cast("Mapping[str, str]", templates)
    return named["tool_use"] if has_tools and "tool_use" in named else named.get("default", "")


def rendered(template: str, given: Mapping[str, Any]) -> str:
    """The text of `template` over `given`, the parameters of `TextTokenizer.render_chat`, with the tokenizer's special
    tokens among the arguments. The arguments of calls are values; texts where the template fails on values. Contents
    are texts; parts where the template reads parts alone. Raises what the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template  # late: not in the process for long texts

    goes_on = bool(given.get("continue_final_message"))
    render: Any = partial(
        render_jinja_template,
        tools=given.get("tools") or None,
        documents=given.get("documents") or None,
        chat_template=template,
        continue_final_message=goes_on,
        add_generation_prompt=given.get("add_generation_prompt", True) and not goes_on,
        **given["arguments"],
    )
    messages = [{name: value for name, value in one.items() if value is not None} for one in given["messages"]]
    if _ASKS_FOR_NONE.search(template):
        for message in messages[:-1] if goes_on else messages:
            if message.get("tool_calls") and not message.get("content"):
                message["content"] = None
    arguments = given["arguments"].items()
    texts = ((name, value) for name, value in arguments if isinstance(value, str) and len(value) <= MAX_TRIED_ARGUMENT)
    if not _reads_parts(template, frozenset(texts)):
        return _rendered(messages, render)
    with_texts = _roles_with_texts(messages, partial(render, continue_final_message=False))
    return _rendered([one if one.get("role") in with_texts else _in_parts(one) for one in messages], render)


def _roles_with_texts(messages: Sequence[Mapping[str, Any]], render: Any) -> set[Any]:
    """Roles whose contents are to be texts, of a template that reads those of users as parts alone: it writes their
    parts out, leaves them out, or fails on them. Told from the same chat with contents that nobody else knows."""
    roles = dict.fromkeys(one.get("role") for one in messages if isinstance(one.get("content"), str))
    texts = {role: f"{_TRIAL}{idx}." for idx, role in enumerate(roles)}
    if texts.keys() <= {"user"}:
        return set()

    def tried(*, in_parts: bool) -> str:
        chat: list[dict[str, Any]] = []
        for one in messages:
            role = one.get("role")
            other = {**one, "content": texts[role]} if isinstance(one.get("content"), str) else dict(one)
            chat.append(_in_parts(other, mark=texts.get(role, "")) if in_parts or role == "user" else other)
        try:
            return _rendered(chat, render).casefold()
        except Exception:  # the chat itself tells the reason
            return ""

    shown = tried(in_parts=True)
    with_texts = {role for role, text in texts.items() if _MARK + text in shown}
    lost = {role for role, text in texts.items() if role != "user" and text not in shown}
    if lost:
        shown = tried(in_parts=False)
        with_texts |= {role for role in lost if texts[role] in shown}
    return with_texts


def _rendered(messages: Sequence[dict[str, Any]], render: Any) -> str:
    """The text of these messages; with the arguments of calls as texts where the template fails on values."""
    from jinja2 import TemplateSyntaxError

    try:
        return render([messages])[0][0]
    except (MemoryError, ImportError, TemplateSyntaxError):  # of no message
        raise
    except Exception:
        with_texts = _with_argument_texts(messages)
        if with_texts != messages:
            with contextlib.suppress(Exception):
                return render([with_texts])[0][0]
        raise


@lru_cache(maxsize=64)
def _reads_parts(template: str, arguments: frozenset[tuple[str, str]]) -> bool:
    """True if a message's text is lost, or refused, where its content is a text, and is there where that is a part."""
    if "text" not in template:
        return False
    message: dict[str, Any] = {"role": "user", "content": _TRIAL}
    if _TRIAL in _tried(template, message, arguments):
        return False
    text = _tried(template, _in_parts(message, mark=_TRIAL), arguments)
    return _TRIAL in text and _MARK not in text


def _tried(template: str, message: dict[str, Any], arguments: frozenset[tuple[str, str]]) -> str:
    """The text of a chat of this message; empty where the template refuses it."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    named: dict[str, Any] = dict(arguments)
    try:
        return str(render_jinja_template([[message]], chat_template=template, **named)[0][0])
    except (MemoryError, ImportError, TemplateSyntaxError):
        raise
    except Exception:
        return ""


def _in_parts(message: Mapping[str, Any], *, mark: str = "") -> dict[str, Any]:
    """The message with its content, where that is a text, as a part. `mark`: of a trial, within the part."""
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    part = {"type": "text", "text": content}
    return {**message, "content": [{**part, _MARK + mark: ""} if mark else part]}


def syntax_fault(template: str) -> str:
    """Line and reason where Jinja cannot read the template; empty where it can."""
    from jinja2 import TemplateSyntaxError

    try:
        rendered(template, {"messages": [{"role": "user", "content": ""}], "arguments": {}})
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except Exception:  # of this message
        return ""
    return ""


def _with_argument_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of their calls as JSON."""

    def with_text(call: Mapping[str, Any]) -> dict[str, Any]:
        function: Any = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    found = [dict(message) for message in messages]
    for message in found:
        if calls := cast("list[dict[str, Any]]", message.get("tool_calls")):
            message["tool_calls"] = [with_text(call) for call in calls]
    return found
