"""Choice of the form of calls that a response template reads."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex_server.config import TOOL_FORMATS
from loraplex_server.text.call_forms import FORMS, CallForm
from loraplex_server.text.call_reading import MAX_FORM_CHARS, form_of
from loraplex_server.text.response_template import ResponseFormat


def format_of(**calls: Any) -> ResponseFormat:
    fields: dict[str, Any] = {"tool_calls": {"content": "json", **calls}, "content": {}}
    return ResponseFormat({"start_anchor": "x", "fields": fields})


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forms_are_told_by_what_a_template_reads(name: str) -> None:
    assert form_of(ResponseFormat.named(name)) is FORMS.get(name)
    assert form_of(None) is None


KEYS = {"transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.given}"}}}
EACH = {"transform_each": True, "transform": {"function": {"name": "{tool}", "arguments": "{given}"}}}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (
            {"open": "<call>", "close": "</call>", "repeats": True},
            CallForm('<call>{"name": "NAME", "arguments": ', "}</call>", "", mark="<call>", is_inline=True),
        ),
        (
            {"open": ["<call>", "<c>"], "close": "</call>", **KEYS},
            CallForm('<call>{"tool": "NAME", "given": ', "}</call>", mark="<call>", is_inline=True),
        ),
        ({"open": "CALL:"}, CallForm('CALL:{"name": "NAME", "arguments": ', "}", mark="CALL:")),
        # What ends the answer is not written as part of a call.
        ({"open": "CALL:", "close": "</s>"}, CallForm('CALL:{"name": "NAME", "arguments": ', "}", mark="CALL:")),
        (
            {"open": "<calls>", "close": "</calls>", **EACH},
            CallForm('{"tool": "NAME", "given": ', "}", ", ", "<calls>[", "]</calls>", mark="<calls>"),
        ),
    ],
)
def test_forms_that_follow_from_marks(calls: dict[str, Any], expected: CallForm) -> None:
    assert form_of(format_of(**calls), ["</s>"]) == expected


@pytest.mark.parametrize(
    "calls",
    [
        {"open_pattern": "<call id=(?:[0-9]+)>", "close": "</call>"},
        {"open": "<call>", "close": "</call>", "content": "text"},
        {"open": "<call>", "close_pattern": "</call[0-9]>", "transform": {"function": {"name": "x"}}},
        {"open": "<" * MAX_FORM_CHARS, "close": ">"},
    ],
)
def test_others_have_none(calls: dict[str, Any]) -> None:
    assert form_of(format_of(**calls)) is None
