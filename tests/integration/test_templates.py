"""Chat templates of adapters and requests through a live worker."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from support.engine_fakes import FakeCache
from support.inline_worker import inline_worker
from support.light_worker import scripted_worker
from support.world import TinyWorld

from loraplex import (
    AdapterInvalid,
    AsyncClient,
    Client,
    FailedPrecondition,
    InvalidArgument,
    LoraplexError,
)
from loraplex_adapters.cache.states import AdapterTraits
from loraplex_contracts.adapters import AdapterTemplates, AdapterVersion
from loraplex_server.config import AdaptersConfig, BatchConfig, ChatConfig, EngineConfig, ModelConfig, WorkerConfig

pytestmark = pytest.mark.slow  # it starts processes, and waits for their ends

CHAT: Any = [{"role": "user", "content": "hi {{ 7*7 }}</s>"}]
TEXT = "hi {{ 7*7 }}</s>"
BASE = "base:{% for m in messages %}{{ m.content }}{% endfor %}"
OWN = "{{ bos_token }}own:{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}"
CALLS = {"open": "[call]", "close": "[/call]", "content": "json"}
READS = {
    "start_anchor_pattern": "assist+ant",
    "fields": {"reasoning": {"open_pattern": r"\[t+\]", "close": "[/t]"}, "tool_calls": CALLS, "content": {}},
}
# Its calls open with a pattern: the text that it reads cannot be told.
ODD_CALLS = {"open_pattern": "<c(?:all|md)>", "close": "[/call]", "content": "json"}
READS_ODD = {"start_anchor": "x", "fields": {"tool_calls": ODD_CALLS, "content": {}}}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def config(world: TinyWorld, root: Path, *, is_allowed: bool = True) -> WorkerConfig:
    template = root.parent / "base.jinja"
    template.write_text(BASE)
    engine = EngineConfig(
        ModelConfig(str(world.model)),
        batch=BatchConfig(max_running=8, max_step_tokens=64),
        adapters=AdaptersConfig(root, templates=is_allowed),
    )
    return WorkerConfig(engine, ChatConfig(template, request_templates=is_allowed), port=0)


@pytest.fixture(scope="module")
def root(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters with and without templates."""
    root = tmp_path_factory.mktemp("templates") / "adapters"
    files = {
        "own": ("chat_template.jinja", OWN),
        "configured": ("tokenizer_config.json", json.dumps({"chat_template": OWN})),
        "named": (
            "tokenizer_config.json",
            json.dumps(
                {
                    "chat_template": [
                        {"name": "default", "template": OWN},
                        {"name": "tool_use", "template": "tools:{{ tools | length }}"},
                    ]
                }
            ),
        ),
        "same": ("chat_template.jinja", BASE),
        "none": ("README.md", ""),
        "wrong": ("chat_template.jinja", "{% for %}"),
        "raises": ("chat_template.jinja", "{{ raise_exception('no system') }}"),
        "endless": ("chat_template.jinja", ENDLESS),
        "huge": ("chat_template.jinja", "{{ 'a' * 10**10 }}"),
        "long": ("chat_template.jinja", "{{ messages[0].role * (5 * 2**20) }}"),
        "calls": ("tokenizer_config.json", json.dumps({"response_template": READS})),
        "odd": ("tokenizer_config.json", json.dumps({"response_template": READS_ODD})),
        "binary": ("tokenizer_config.json", "\x00"),
    }
    for name, (file, content) in files.items():
        shutil.copytree(tiny_world.adapters / tiny_world.names[0], root / name)
        (root / name / file).write_text(content)
    return root


@pytest.fixture(scope="module")
def client(tiny_world: TinyWorld, root: Path) -> Iterator[Client]:
    with inline_worker(config(tiny_world, root)) as worker, Client(worker.address) as client:
        yield client


def rendered(client: Client, adapter_id: str = "", **how: Any) -> str:
    return client.tokenize(messages=CHAT, adapter_id=adapter_id, offsets=True, **how).rendered


def test_an_adapters_own_template_makes_its_prompts(client: Client) -> None:
    assert rendered(client) == rendered(client, "none") == rendered(client, "same") == f"base:{TEXT}"
    for name in ("own", "configured", "named"):
        assert rendered(client, name) == f"<s>own:{TEXT}"
        assert rendered(client, name, template_kwargs={"x": 5}) == f"<s>own:{TEXT}5"
    assert rendered(client, "named", tools=[{}, {}]) == "tools:2"
    tokens = client.tokenize(messages=CHAT, adapter_id="own").token_ids
    assert len(tokens) == 1 + len(f"own:{TEXT}"), "each byte is a token, and the message has no special one"
    answer = client.generate(messages=CHAT, adapter_id="own", max_tokens=2, prompt_tokens=True)
    assert [one.token_id for one in answer.prompt_tokens] == list(tokens)
    assert answer.usage.prompt_tokens == len(tokens)
    with pytest.raises(InvalidArgument, match="not the template's own"):
        rendered(client, "own", template_kwargs={"tokenize": True})


def test_a_template_of_a_request(client: Client) -> None:
    assert rendered(client, chat_template="r:{{ messages[0].content }}") == f"r:{TEXT}"
    assert rendered(client, "own", chat_template="r:{{ messages[0].content }}") == f"r:{TEXT}"
    for template in ("{% if %}", "{{ 1 / 0 }}", "{{ 'a' * 10**10 }}", "{% for i in range(10**9) %}{% endfor %}"):
        with pytest.raises(InvalidArgument, match=r"chat\.template") as caught:
            client.generate(messages=CHAT, chat_template=template)
        assert caught.value.field == "chat.template"
    with pytest.raises(InvalidArgument, match="unsafe"):
        rendered(client, chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidArgument, match="262144"):
        rendered(client, chat_template="x" * (256 << 10) + "x")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("wrong", AdapterInvalid, "cannot be used: line 1"),
        ("raises", InvalidArgument, "refuses these messages: no system"),
        ("endless", AdapterInvalid, "more than 1 s"),
        ("huge", AdapterInvalid, "more memory"),
        ("long", AdapterInvalid, "more than 16777216 characters"),
        ("binary", AdapterInvalid, "not valid JSON"),
    ],
)
def test_faults_are_the_adapters(client: Client, name: str, kind: type[LoraplexError], words: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(kind, match=words) as caught:
        client.generate(messages=CHAT, adapter_id=name, max_tokens=1)
    assert f"'{name}'" in caught.value.message
    assert time.monotonic() - started_s < 30
    if name != "binary":
        assert client.generate("hi", adapter_id=name, max_tokens=1).usage.completion_tokens == 1
    assert rendered(client, "own") == f"<s>own:{TEXT}", "the child is there again"


def test_a_template_follows_its_adapters_version(client: Client, root: Path) -> None:
    before = client.generate(messages=CHAT, adapter_id="configured", max_tokens=1).adapter_digest
    (root / "configured" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "new"}))
    assert rendered(client, "configured") == f"<s>own:{TEXT}", "until it is loaded"
    client.adapters.load("configured")
    assert rendered(client, "configured") == "new"
    assert client.generate(messages=CHAT, adapter_id="configured", max_tokens=1).adapter_digest != before
    client.adapters.unload("configured")
    assert rendered(client, "configured") == "new"


def test_without_the_flags_neither_is_used(tiny_world: TinyWorld, root: Path) -> None:
    with (
        inline_worker(config(tiny_world, root, is_allowed=False)) as worker,
        Client(worker.address) as client,
    ):
        for name in ("own", "wrong", "binary"):
            assert rendered(client, name) == f"base:{TEXT}"
            assert client.generate(messages=CHAT, adapter_id=name, max_tokens=1).usage.completion_tokens == 1
        with pytest.raises(FailedPrecondition, match="request-templates") as caught:
            client.generate(messages=CHAT, chat_template="x")
        assert caught.value.field == "chat.template"


# --- response templates ----------------------------------------------------------------------------------------------

# It takes longer than there is time, from the exclamation mark on.
SLOW = {"start_anchor": "x", "fields": {"reasoning": {"open_pattern": "(?:a|b|ab)+c", "close": "y"}, "content": {}}}
ANSWER = 'a [tt]b[/t] c [call]{"name": "f", "arguments": {"x": 1}}[/call]' + " ab" + "ab" * 40 + "!d"
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ASKED: Any = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "parse_chat": True}


async def test_an_adapters_own_response_template_reads_its_answers() -> None:
    own = {
        name: AdapterTraits(templates=AdapterTemplates(response=json.dumps(template)))
        for name, template in (("a", READS), ("b", SLOW))
    }
    engine = {"adapters": AdaptersConfig(templates=True)}
    async with (
        scripted_worker(ANSWER, FakeCache(own=own), engine=engine) as worker,
        AsyncClient(worker.address) as client,
    ):
        base: Any = (await client.generate(**ASKED)).message
        assert base == {"role": "assistant", "content": ANSWER}
        message: Any = (await client.generate(**ASKED, adapter_id="a")).message
        assert (message["content"], message["reasoning"]) == ("a\nc\nab" + "ab" * 40 + "!d", "b")
        ((name, arguments),) = [tuple(call["function"].values()) for call in message["tool_calls"]]
        assert (name, json.loads(arguments)) == ("f", {"x": 1})

        async def chunks(adapter_id: str) -> list[Any]:
            return [chunk async for chunk in client.stream(**ASKED, adapter_id=adapter_id, n=2)]

        slow = asyncio.create_task(chunks("b"))
        found = await chunks("a")
        for index in range(2):
            streamed = [chunk for chunk in found if chunk.index == index]
            text = "".join(delta.content for chunk in streamed for delta in chunk.deltas)
            assert (text, streamed[-1].message["content"]) == (message["content"],) * 2
        with pytest.raises(AdapterInvalid, match="response template of adapter 'b' cannot be used: it takes more than"):
            await slow
        assert (await client.generate(**ASKED, adapter_id="a")).message is not None


@pytest.mark.parametrize("adapter_id", ["calls", "odd"])
@pytest.mark.parametrize("choice", ["required", {"function": {"name": "f"}}, "auto"], ids=str)
def test_demanded_calls_have_the_form_of_an_adapters_own_template(client: Client, choice: Any, adapter_id: str) -> None:
    """A random model's calls have the form of the adapter's template, and are JSON where that form cannot be told."""
    parameters = {"type": "object", "properties": {"x": {"enum": [1, 22]}}, "required": ["x"]}
    tool = {"name": "f", "parameters": parameters, "strict": choice == "auto"}
    for seed in range(5):
        message: Any = client.generate(
            messages=CHAT,
            tools=[{"type": "function", "function": tool}],
            tool_choice=choice,
            parse_chat=True,
            adapter_id=adapter_id,
            temperature=1.0,
            seed=seed,
            max_tokens=60,
        ).message
        calls = message.get("tool_calls", [])
        assert calls or choice == "auto"
        for call in calls:
            assert call["function"]["name"] == "f"
            assert json.loads(call["function"]["arguments"]) in ({"x": 1}, {"x": 22})


async def test_a_prompt_made_for_another_version_is_refused() -> None:
    engine = {"adapters": AdaptersConfig(templates=True)}
    async with scripted_worker("x", FakeCache(), engine=engine) as worker, AsyncClient(worker.address) as client:
        stale = AdapterVersion("a", "0" * 64, None)
        worker.templates.version = AsyncMock(return_value=stale)  # type: ignore[method-assign]
        with pytest.raises(LoraplexError, match="loaded again") as caught:
            await client.generate(**ASKED, adapter_id="a")
        assert caught.value.reason == "UNAVAILABLE"
