"""Choice of a chat's template, and of the format that reads its answers."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny_tokenizers import tiny_tokenizer

from loraplex_contracts.adapters import AdapterInfo, AdapterTemplates, AdapterVersion
from loraplex_contracts.errors import AdapterInvalid, AdapterNotFound, FailedPrecondition, InvalidArgument
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.validate import ModelLimits
from loraplex_server.frontend import templates as module
from loraplex_server.frontend.sandbox import Owner, Sandbox, TemplateFault
from loraplex_server.frontend.templates import Templates, UserTemplate
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.grpc.prompts import Prompts
from loraplex_server.text.control_tokens import SafeText
from loraplex_server.text.response_template import ResponseFormat
from loraplex_server.text.sandbox import serving
from loraplex_server.text.tokenizer import TextTokenizer

BASE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class InProcess(Sandbox):
    """Answers questions without a process."""

    async def ask(self, owner: Owner, question: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
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
        if adapter_id != "a":
            raise AdapterNotFound("there is no such adapter")
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


async def test_an_adapter_is_looked_for_where_its_templates_are_not_used() -> None:
    engine = FakeEngine()
    templates = made(engine=engine, of_adapters=False)
    for _ in range(3):
        await templates.check_adapter("a")
    assert engine.num_asked == 1
    await templates.check_adapter("")
    with pytest.raises(AdapterNotFound):
        await templates.check_adapter("b")


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


async def test_long_chats_of_the_base_models_template_are_rendered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Sandbox", InProcess)
    templates = made()
    prompts = Prompts(tokenizing(), templates)

    def chat(content: str, num: int = 1) -> inference_pb2.GenerateRequest:
        messages = [inference_pb2.ChatMessage(role="user", content=content)] * num
        return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages))

    short, long, large = chat("a</s>"), chat("a</s>", module.MANY_MESSAGES + 1), chat("a" * (1 << 20))
    asked: list[Owner] = []

    async def render(self: Sandbox, owner: Owner, *rest: Any) -> str:
        asked.append(owner)
        return await original(self, owner, *rest)

    original = Sandbox.render
    monkeypatch.setattr(Sandbox, "render", render)
    assert isinstance((await prompts.text(short))[0], SafeText)
    assert not asked
    text, _ = await prompts.text(long)
    assert isinstance(text, SafeText)
    assert text.plain == "a</s>" * (module.MANY_MESSAGES + 1)
    assert len(asked) == 1
    assert await prompts.text(large) == ("a" * (1 << 20), False)
    assert len(asked) == 2

    async def hangs(self: Sandbox, *_: Any) -> str:
        raise TemplateFault("it takes more than 10 s")

    monkeypatch.setattr(Sandbox, "render", hangs)
    with pytest.raises(InvalidArgument, match="so long a chat: it takes more than 10 s; send fewer") as caught:
        await prompts.text(long)
    assert caught.value.field == "chat"
    await templates.close()


async def test_tenants_and_their_adapters_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Owner] = []

    def call(self: Sandbox, question: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
        time.sleep(0.01)
        order.append(question["owner"])
        return {}

    monkeypatch.setattr(Sandbox, "_call", call)
    sandbox = Sandbox()
    owners = [("busy", f"a{number % 3}") for number in range(12)] + [("other", "")]
    await asyncio.gather(*(sandbox.ask(owner, {"owner": owner}, 0) for owner in owners))
    assert order.index(("other", "")) <= 2, "it did not wait for all of the first tenant's"
    assert {adapter for _, adapter in order[:5]} >= {"a0", "a1", "a2"}
    await sandbox.close()


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
