"""Chat templates over earlier calls, and over contents as texts or parts."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from transformers.utils import chat_template_utils

from loraplex_server.text import chat_template
from loraplex_server.text.chat_template import rendered

VALUE: dict[str, Any] = {"city": "Gänt", "days": [1, 2.0]}
TEXT = '{"city": "Gänt", "days": [1, 2.0]}'
# As in DeepSeek V3's, and in V3.1's.
BY_CONTENT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for c in m['tool_calls'] %}<{{ c['function']['name'] }}{{ '|' + c['function']['arguments'] }}>{% endfor %}"
    "{% endif %}{% if m['content'] is not none %}[{{ m['content'] }}]{% endif %}{% endfor %}"
)
AS_TEXT = (
    "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ '|' + c['function']['arguments'] }}{% endfor %}{% endfor %}"
)


def assistant(arguments: Any, content: str = "") -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def text(template: str, *messages: dict[str, Any], **given: Any) -> str:
    return rendered(template, {"messages": [{"role": "user", "content": "a"}, *messages], "arguments": {}, **given})


@pytest.mark.parametrize("arguments", [VALUE, TEXT])
def test_arguments_are_texts_where_a_template_fails_on_values(arguments: Any) -> None:
    assert text(AS_TEXT, assistant(arguments)) == f"a|{TEXT}"
    assert text(AS_TEXT, assistant(arguments, "b")) == f"ab|{TEXT}"


def test_arguments_are_values_else() -> None:
    template = "{% for c in messages[1].tool_calls %}{{ c.function.arguments.city }}{% endfor %}"
    assert text(template, assistant(VALUE)) == "Gänt"


@pytest.mark.parametrize("arguments", [VALUE, TEXT])
def test_what_a_template_refuses_with_both_has_the_first_reason(arguments: Any) -> None:
    template = (
        "{{ raise_exception('no ' + ('text' if messages[1].tool_calls[0].function.arguments is string else '1')) }}"
    )
    with pytest.raises(Exception, match="no text" if arguments is TEXT else "no 1"):
        text(template, assistant(arguments))


def test_a_template_that_asks_for_no_content_gets_none_beside_calls() -> None:
    empty = {"role": "assistant", "content": ""}
    assert text(BY_CONTENT, assistant(VALUE), empty) == f"[a]<f|{TEXT}>[]"
    assert text(BY_CONTENT.replace("m['content']", "m.content"), assistant(VALUE)) == f"[a]<f|{TEXT}>"
    assert text(BY_CONTENT, assistant(VALUE), assistant(VALUE), continue_final_message=True) == f"[a]<f|{TEXT}>["


def test_other_templates_get_an_empty_content() -> None:
    assert text("{% for m in messages %}[{{ m.content }}]{% endfor %}", assistant(VALUE)) == "[a][]"


# As in LLaVA's, and in SmolVLM's.
BY_SELECTION = (
    "{{ bos_token + '' }}{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '[' + c['text'] + ']' }}{% endfor %}{% endfor %}"
)
BY_FIRST = (
    "{% for m in messages %}{% if m.content[0].type == 'image' %}<image>{% endif %}"
    "{% for c in m.content %}{% if c.type == 'text' %}[{{ c.text }}]{% endif %}{% endfor %}{% endfor %}"
)
BY_TEXT = "{% for m in messages %}{{ '[' + m.content[0].text + ']' }}{% endfor %}"


@pytest.mark.parametrize("template", [BY_SELECTION, BY_FIRST, BY_TEXT])
def test_a_template_that_reads_parts_alone_gets_parts(template: str) -> None:
    given = {"arguments": {"bos_token": "<s>"}}
    begin = "<s>" if template is BY_SELECTION else ""
    answer = {"role": "assistant", "content": "b"}
    assert text(template, answer, **given) == f"{begin}[a][b]"
    assert text(template, answer, continue_final_message=True, **given) == f"{begin}[a][b"


def test_a_template_that_reads_parts_alone_renders_a_chat_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text(BY_TEXT)  # the trial of the template is kept
    render = Mock(wraps=chat_template_utils.render_jinja_template)
    monkeypatch.setattr(chat_template_utils, "render_jinja_template", render)
    assert text(BY_TEXT) == "[a]"
    assert render.call_count == 1


def test_roles_whose_content_is_written_out_keep_texts() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% else %}"
        "{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert text(template, {"role": "system", "content": "s"}) == "[a]s"
    assert text(template, {"role": "system", "content": "s"}, continue_final_message=True) == "[a]s"
    asked = {"role": "user", "content": "say [{'type': 'text', 'text': 's'}]"}
    parts = "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endfor %}"
    said = f"<user>[a]<system>[s]<user>[{asked['content']}]"
    assert text(parts, {"role": "system", "content": "s"}, asked) == said, "nobody takes another role's text away"


# One role's content written out, the others' read as parts: {{ m.content }} in some way.
def writes_out(role: str, content: str) -> str:
    return (
        f"{{% for m in messages %}}{{% if m.role == '{role}' %}}{content}{{% else %}}"
        "{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endif %}{% endfor %}"
    )


@pytest.mark.parametrize("said", ["it's", 'say "it"', "two\nlines", "Gänt \U0001f600", "a\\b", "", "[{'type': 'text'"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_contents_that_are_written_out_are_so_whatever_they_say(said: str, goes_on: bool) -> None:
    template = writes_out("assistant", "({{ m.content }})")
    end = "" if goes_on else ")"
    assert text(template, {"role": "assistant", "content": said}, continue_final_message=goes_on) == f"[a]({said}{end}"


def test_a_content_that_begins_like_another_role_s_is_not_lost() -> None:
    system, tool = {"role": "system", "content": "The"}, {"role": "tool", "content": "The result"}
    assert text(writes_out("tool", "({{ m.content }})"), system, tool) == "[a][The](The result)"
    assert text(writes_out("system", "({{ m.content }})"), system, tool) == "[a](The)[The result]"


def test_contents_that_are_shown_as_texts_alone_are_texts() -> None:
    template = writes_out("system", "{% if m.content is string %}({{ m.content }}){% endif %}")
    assert text(template, {"role": "system", "content": "s"}) == "[a](s)"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{{ m.content | tojson }}", "\"The 'end'\""),
        ("{{ m.content | upper }}", "THE 'END'"),
        ("{{ m.content | trim }}", "The 'end'"),
        ("{{ '<<SYS>>' + m.content }}", "<<SYS>>The 'end'"),
        ("{{ m.content.split(' ')[0] }}", "The"),
    ],
)
def test_contents_that_are_changed_as_texts_are_texts(content: str, expected: str) -> None:
    call = assistant({}, "")
    tool = {"role": "tool", "content": "The 'end'"}
    assert text(writes_out("tool", content), call, tool) == f"[a][]{expected}"
    assert text(writes_out("system", content), {"role": "system", "content": "The 'end'"}) == f"[a]{expected}"


def test_long_arguments_are_not_kept() -> None:
    chat_template._reads_parts.cache_clear()
    for letter in "ab":
        text(BY_TEXT, arguments={"of_a_request": letter * (chat_template.MAX_TRIED_ARGUMENT + 1)})
    assert chat_template._reads_parts.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% if m.text %}!{% endif %}{% endfor %}", "a"),
        ("{% for m in messages if m.content is string %}{{ m.content }}{% else %}{{ m.text }}{% endfor %}", "a"),
        ("{% for m in messages if m.content is not string %}text {{ m.content }}{% endfor %}", ""),
        ("no text", "no text"),
    ],
)
def test_other_templates_get_texts(template: str, expected: str) -> None:
    assert text(template) == expected
