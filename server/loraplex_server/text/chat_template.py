"""Chat templates: the text that one makes of a chat's messages.

Templates differ in what they take for a call's arguments and for the content of a message that is calls alone.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

# DeepSeek V3's and R1's ask so for messages that are calls alone, and leave the calls of others out.
_ASKS_FOR_NONE: Final = re.compile(r"content\W{0,3}\s+is\s+none\b")


def rendered(template: str, given: Mapping[str, Any]) -> str:
    """The text of `template` over `given`, the parameters of `TextTokenizer.render_chat`, with the tokenizer's special
    tokens among the arguments. The arguments of calls are values; texts where the template fails on values. Raises what
    the template raises."""
    from jinja2 import TemplateSyntaxError  # late: the process for long texts has neither
    from transformers.utils.chat_template_utils import render_jinja_template

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
