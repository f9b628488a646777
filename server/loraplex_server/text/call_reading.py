"""Choice of the form of tool calls that a response template reads.

To demand a call, the text that the template reads has to be known. It is that of one of Loraplex's own templates, or
follows from the template's marks, and counts only if the template reads it as meant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from loraplex_server.text.call_forms import FORMS, CallForm
from loraplex_server.text.responses import ResponseParsing

if TYPE_CHECKING:  # imports Transformers
    from loraplex_server.text.response_template import ResponseFormat

MAX_FORM_CHARS: Final = 256  # of a form that follows from marks; models' own have a few words


def form_of(format: ResponseFormat | None, ends: Collection[str] = ()) -> CallForm | None:
    """The form of the calls that a response template reads. `ends`: texts of tokens that end an answer, which are not
    written for their own sake."""
    if format is None:
        return None
    for form in FORMS.values():
        if _reads(format, form, 1):
            return form
    for form in _forms_by_marks(format, ends):
        if _reads(format, form, 1) and (form.between is None or _reads(format, form, 2)):
            return form
    return None


def _reads(format: ResponseFormat, form: CallForm, num_calls: int) -> bool:
    """True if the template reads so many calls in this form, and nothing else."""
    reader = ResponseParsing(format, with_calls=True).reader()
    given = '{"a": "b"}' if form.parameter is None else "b".join(form.parameter).replace("KEY", "a")
    calls = [f"{form.begin_of(f'f{number}', number)}{given}{form.end}" for number in range(num_calls)]
    reader.push("".join((form.head, (form.between or "").join(calls), form.tail)))
    reader.finish()
    message = reader.message()
    wanted = [(f"f{number}", '{"a": "b"}') for number in range(num_calls)]
    return [(call.name, call.arguments) for call in message.calls] == wanted and not message.content


def _forms_by_marks(format: ResponseFormat, ends: Collection[str]) -> Iterator[CallForm]:
    """Calls as a template reads them whose calls are JSON between two marks."""
    fields = cast("Mapping[str, Any]", format.template["fields"])
    field = cast("Mapping[str, Any]", fields.get("tool_calls", {}))
    opening, closing = _first(field.get("open")), _first(field.get("close"))
    if not opening or field.get("content") != "json" or field.get("content_args"):
        return
    if closing in ends:  # the answer ends there anyway
        closing = ""
    name, arguments = format.call_keys
    repeats = bool(field.get("repeats")) and bool(closing)
    item = f'{{"{name}": "NAME", "{arguments}": '
    single = CallForm(opening + item, "}" + closing, "" if repeats else None, mark=opening, is_inline=bool(closing))
    several = CallForm(item, "}", ", ", f"{opening}[", f"]{closing}", mark=opening)
    for form in (single, several):
        if len(form.head + form.begin + form.end + form.tail) <= MAX_FORM_CHARS:
            yield form


def _first(mark: Any) -> str:
    """A literal, the first of several; empty where there is none."""
    one: Any = cast("list[Any]", mark)[0] if isinstance(mark, list) and mark else mark
    return one if isinstance(one, str) else ""
