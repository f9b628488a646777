"""Choice of a chat's template, and of the format that reads its answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny_tokenizers import tiny_tokenizer

from loraplex_contracts.adapters import AdapterInfo, AdapterTemplates, AdapterVersion
from loraplex_contracts.errors import AdapterInvalid, FailedPrecondition, InvalidArgument
from loraplex_proto.validate import ModelLimits
from loraplex_server.frontend import templates as module
from loraplex_server.frontend.sandbox import Sandbox
from loraplex_server.frontend.templates import Templates, UserTemplate
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.text.control_tokens import SafeText
from loraplex_server.text.response_template import ResponseFormat
from loraplex_server.text.sandbox import serving
from loraplex_server.text.tokenizer import TextTokenizer

BASE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class InProcess(Sandbox):
    """Answers without a process."""

    async def ask(self, owner: str, question: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
        del num_bytes
        self._call = lambda *_: serving(None)(json.loads(json.dumps(question)))  # type: ignore[method-assign]
        return await super().ask(owner, question, 0)


class FakeEngine:
    """Has one adapter, "a", in the version that it is told."""

    def __init__(self) -> None:
        self.digest, self.num_asked = "1", 0
        self.rows: list[AdapterInfo] = []
        self.state = SimpleNamespace(listing=SimpleNamespace(rows_of=lambda name: self.rows))

    async def adapter_version(self, adapter_id: str) -> AdapterVersion:
        self.num_asked += 1
        row: Any = SimpleNamespace(digest=self.digest, state="on_host")
        self.rows = [row]
        return AdapterVersion(adapter_id, self.digest, AdapterTemplates(chat=f"{self.digest}{BASE}"))


def tokenizing() -> Tokenizing:
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = BASE
    return Tokenizing(TextTokenizer(tiny), ModelLimits(500, 500))


def made(**how: Any) -> Templates:
    how = {"engine": FakeEngine(), "of_requests": True, "of_adapters": True, **how}
    return Templates(tokenizing(), **how)


def version(**templates: str) -> AdapterVersion:
    return AdapterVersion("a", "1", AdapterTemplates(**templates))


async def test_the_requests_own_comes_first_then_the_adapters_then_the_base_models() -> None:
    templates, own = made(), version(chat="own", chat_with_tools="tools")
    assert templates.choose("r", own, has_tools=False) == UserTemplate("r")
    assert templates.choose("", own, has_tools=False) == UserTemplate("own", "a")
    assert templates.choose("", own, has_tools=True) == UserTemplate("tools", "a")
    for none in (None, version(chat=BASE), version(response="{}"), AdapterVersion("a", "1", None)):
        assert templates.choose("", none, has_tools=True) is None
    with pytest.raises(FailedPrecondition, match="request-templates"):
        made(of_requests=False).choose("r", own, has_tools=False)


async def test_the_version_is_asked_for_again_when_it_has_changed() -> None:
    engine = FakeEngine()
    templates = made(engine=engine)
    for _ in range(3):
        found = await templates.version("a")
        assert found is not None
        assert found.digest == "1"
    assert engine.num_asked == 1
    engine.digest = "2"
    engine.rows = [SimpleNamespace(digest="1", state="draining"), SimpleNamespace(digest="2", state="known")]  # type: ignore[list-item]
    assert getattr(await templates.version("a"), "digest", "") == "2"
    assert await templates.version("") is None
    assert await made(of_adapters=False).version("a") is None


async def test_control_tokens_of_messages_have_no_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Sandbox", InProcess)
    templates = made()
    given = {"messages": [{"role": "user", "content": "{{ 7*7 }}</s>"}]}
    text = await templates.render(UserTemplate("</s>own:" + BASE, "a"), lambda: given, 10)
    assert isinstance(text, SafeText)
    assert text.plain == "</s>own:{{ 7*7 }}</s>"
    assert (text.plain.count("</s>"), text.text.count("</s>")) == (2, 1), "the template's own is a token"
    for template, kind, words in (
        (UserTemplate("{% if %}", "a"), AdapterInvalid, "adapter 'a' cannot be used"),
        (UserTemplate("{{ 1 / 0 }}", "a"), InvalidArgument, "adapter 'a' refuses these messages: division"),
        (UserTemplate("{% if %}"), InvalidArgument, r"`chat\.template` cannot be used"),
        (UserTemplate("{{ 1 / 0 }}"), InvalidArgument, r"`chat\.template` refuses these messages"),
    ):
        with pytest.raises(kind, match=words):
            await templates.render(template, lambda: given, 10)
    await templates.close()


async def test_formats_of_answers() -> None:
    hermes, think = ResponseFormat.named("hermes"), ResponseFormat.named("think")
    templates = made(format_of=lambda text: hermes if text is None else think)
    assert templates.response_format(None) is hermes
    assert templates.response_format(version(chat=BASE)) is hermes
    assert templates.response_format(version(chat="<think>")) is think
    mistral = ResponseFormat.source("mistral").read_text(encoding="utf-8")
    found = templates.response_format(version(response=mistral))
    assert isinstance(found, ResponseFormat), "one of Loraplex's"
    assert found.template == json.loads(mistral)
    assert templates.response_format(version(response='{"fields": {}}')) == '{"fields": {}}'
