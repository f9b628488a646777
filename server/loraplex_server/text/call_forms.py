"""Forms of tool calls: the text around their arguments, as models write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

NUMBER: Final = "{NUMBER}"


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text around the arguments of calls; `NAME` is the tool's name, `{NUMBER}` any number. Arguments are JSON, or
    each of them has marks of its own, with `KEY` for its name."""

    begin: str
    end: str
    between: str | None = None  # two calls; None: there is one at most
    head: str = ""  # before the first call
    tail: str = ""  # behind the last one
    parameter: tuple[str, str] | None = None  # before and behind a value
    # Part of head and begin, with which a call opens in free text; as a pattern where a template reads other spellings.
    # Empty where calls have no mark that other text does not have.
    mark: str = ""
    mark_pattern: str = ""
    is_inline: bool = False  # text may stand behind a call

    def begin_of(self, name: str, number: int = 0) -> str:
        """The text before the arguments of a call."""
        return self.begin.replace("NAME", name).replace(NUMBER, str(number))

    @property
    def close(self) -> str:
        """The last mark of a call."""
        return self.end.rpartition("\n")[2]


def _deepseek(name: str) -> str:
    return f"<\uff5ctool {name}\uff5c>".replace(" ", "\u2581")


# By the names of response templates.
FORMS: Final[Mapping[str, CallForm]] = {
    "hermes": CallForm(
        '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", mark="<tool_call>", is_inline=True
    ),
    "qwen3_xml": CallForm(
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        "\n",
        parameter=("<parameter=KEY>\n", "\n</parameter>\n"),
        mark="<tool_call>",
        is_inline=True,
    ),
    "llama3_json": CallForm(
        '{"name": "NAME", "parameters": ',
        "}",
        mark='{"name":',
        mark_pattern=r'\{\s{0,8}(?:"type"\s{0,8}:\s{0,8}"function"\s{0,8},\s{0,8})?"name"\s{0,8}:',
    ),
    "mistral": CallForm("[TOOL_CALLS]NAME[ARGS]", "", "", mark="[TOOL_CALLS]"),
    "mistral_list": CallForm('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]", mark="[TOOL_CALLS]"),
    "deepseek": CallForm(
        _deepseek("call begin") + "function" + _deepseek("sep") + "NAME\n```json\n",
        "\n```" + _deepseek("call end"),
        "\n",
        _deepseek("calls begin"),
        _deepseek("calls end"),
        mark=_deepseek("call begin"),
    ),
    "harmony": CallForm("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""),
    "kimi": CallForm(
        f"<|tool_call_begin|>functions.NAME:{NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        mark="<|tool_call_begin|>",
    ),
    "json": CallForm(
        '{"name": "NAME", "arguments": ',
        "}",
        ", ",
        "[",
        "]",
        mark='[{"name":',
        mark_pattern=r'\[\s{0,8}\{\s{0,8}"name"\s{0,8}:',
    ),
}
# Calls that every model can be made to write, whatever its own form.
PLAIN: Final = "json"
