"""Tool calls and reasoning through a live worker: unary and streamed, gRPC and HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from jsonschema import validate
from support.inline_worker import inline_worker
from support.light_worker import CHAT_TEMPLATE, scripted_worker
from support.tiny_tokenizers import tiny_tokenizer
from support.world import TinyWorld, byte_tokenizer, make_world
from tokenizers import AddedToken
from transformers import AutoTokenizer

from loraplex import AsyncClient, ChatDelta, Client, Grammar, InvalidArgument
from loraplex_router.config import RouterConfig
from loraplex_router.server import start_router
from loraplex_server.config import BatchConfig, ChatConfig, EngineConfig, ModelConfig, WorkerConfig

ANSWER = (
    "<think>\nhm </think>\n\nOne moment. <tool_call>\n"
    '{"name": "f", "arguments": {"x": "é","y":[1]}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
)
CHAT: Any = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS = [("f", '{"x": "é","y":[1]}'), ("g", "{}")]  # arguments as they were written


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def together(deltas: list[ChatDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if (call := delta.tool_call) is not None:
            name, arguments = calls.setdefault(call.index, ["", ""])
            assert bool(call.id) == bool(call.name) == (not name), "a call's first delta has both, the others none"
            calls[call.index] = [name + call.name, arguments + call.arguments]
    text = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
    return *text, [(name, arguments) for name, arguments in calls.values()]


async def test_streamed_and_unary_answers_give_the_same_calls() -> None:
    async with scripted_worker(ANSWER) as worker, AsyncClient(worker.address) as client:
        asked: Any = {"messages": CHAT, "tools": TOOLS, "parse_chat": True, "n": 2}
        answer = await client.generate(**asked)
        message: Any = answer.message
        assert answer.text == ANSWER
        assert (message["role"], message["content"], message["reasoning"]) == ("assistant", "One moment.", "hm")
        assert calls_of(message) == CALLS

        # Of each completion, the tokens that begin behind <think> and before </think>.
        encoded = tiny_tokenizer("byte_level").backend_tokenizer.encode(ANSWER, add_special_tokens=False)
        begin, end = len("<think>"), ANSWER.index("</think>")
        num_reasoning = sum(begin <= offset < end for offset, _ in encoded.offsets)
        assert num_reasoning > 1
        assert answer.usage.reasoning_tokens == 2 * num_reasoning
        assert (await client.generate(messages=CHAT, max_tokens=5)).usage.reasoning_tokens == 0

        chunks = [chunk async for chunk in client.stream(**asked)]
        for index in range(2):
            own = [chunk for chunk in chunks if chunk.index == index]
            assert "".join(chunk.text for chunk in own) == ANSWER
            deltas = [delta for chunk in own for delta in chunk.deltas]
            assert together(deltas) == ("One moment.", "hm", CALLS)
            assert own[-1].usage is not None
            assert own[-1].usage.reasoning_tokens == num_reasoning
            assert [chunk.message is None for chunk in own] == [True] * (len(own) - 1) + [False]
            assert calls_of(own[-1].message) == CALLS

        # The message goes on as it is.
        told = [*CHAT, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}]
        assert (await client.generate(messages=told, max_tokens=1)).message is None


@pytest.mark.parametrize(
    ("options", "calls", "content"),
    [
        ({"tool_choice": "none"}, [], "One moment. <tool_call>"),
        ({"tools": None}, [], "One moment. <tool_call>"),
        ({"parallel_tool_calls": False}, CALLS[:1], "One moment."),
        ({"tool_choice": "auto"}, CALLS, "One moment."),
        ({"stop": "moment"}, [], "One "),
    ],
)
async def test_choices(options: dict[str, Any], calls: list[tuple[str, str]], content: str) -> None:
    async with scripted_worker(ANSWER) as worker, AsyncClient(worker.address) as client:
        asked: Any = {"messages": CHAT, "tools": TOOLS, "parse_chat": True} | options
        message: Any = (await client.generate(**asked)).message
        assert calls_of(message) == calls
        seen: str = message["content"]
        assert seen.startswith(content) if content.endswith(">") else seen == content


async def test_without_a_format_all_is_content() -> None:
    chat = ChatConfig(tool_format="none")
    async with scripted_worker(ANSWER, chat=chat) as worker, AsyncClient(worker.address) as client:
        message: Any = (await client.generate(messages=CHAT, tools=TOOLS, parse_chat=True)).message
        assert message == {"role": "assistant", "content": ANSWER}


async def test_harmony_holds_no_strict_tools() -> None:
    """Its calls begin as other messages do."""
    call = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
    text = f"<|channel|>analysis<|message|>hm<|end|>{call}"
    strict: Any = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}]
    asked: Any = {"messages": CHAT, "tools": strict, "parse_chat": True, "ignore_eos": True, "max_tokens": len(text)}
    async with (
        scripted_worker(text, chat=ChatConfig(tool_format="harmony")) as worker,
        AsyncClient(worker.address) as client,
    ):
        message: Any = (await client.generate(**asked)).message
        assert (message["reasoning"], calls_of(message)) == ("hm", [("f", '{"x": 1}')])


async def test_special_tokens_are_in_the_text_only_where_the_template_looks_for_them() -> None:
    text = "a<pad>b<|turn|>c"
    chat: Any = {"messages": CHAT, "parse_chat": True}
    async with scripted_worker(text) as worker, AsyncClient(worker.address) as client:
        answer = await client.generate(**chat)
        assert (answer.text, answer.message) == ("abc", {"role": "assistant", "content": "abc"})
        kept = await client.generate(**chat, keep_special_tokens=True)
        assert (kept.text, kept.message) == (text, {"role": "assistant", "content": text})


async def test_files_of_templates(tmp_path: Any) -> None:
    template = tmp_path / "response.json"
    template.write_text(
        '{"start_anchor": "x", "fields": {"reasoning": {"open": "<|turn|>", "close": "<pad>"}, "content": {}}}'
    )
    chat = ChatConfig(response_template=template)
    async with scripted_worker("a<|turn|>b<pad>c", chat=chat) as worker, AsyncClient(worker.address) as client:
        answer = await client.generate(messages=CHAT, parse_chat=True)
        assert answer.text == "a<|turn|>b<pad>c"
        assert answer.message == {"role": "assistant", "content": "a\nc", "reasoning": "b"}


async def test_over_http() -> None:
    async with scripted_worker(ANSWER) as worker:
        router = await start_router(RouterConfig(workers=(worker.address,), port=0, http_port=0))
        assert router.http is not None
        async with httpx2.AsyncClient(base_url=f"http://{router.http.address}", timeout=20, trust_env=False) as http:
            body = {"messages": CHAT, "tools": TOOLS, "n": 2}
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            num_reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert 0 < num_reasoning < answer["usage"]["completion_tokens"]
            response = (await http.post("/v1/responses", json={"input": "hi"})).json()
            assert 2 * response["usage"]["output_tokens_details"]["reasoning_tokens"] == num_reasoning
            for choice in answer["choices"]:
                message = choice["message"]
                assert choice["finish_reason"] == "tool_calls"
                assert (message["content"], message["reasoning"]) == ("One moment.", "hm")
                assert calls_of(message) == CALLS
            streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
            events = [part.removeprefix("data: ") for part in streamed.text.split("\n\n") if part]
            assert events.pop() == "[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events]
            for index in range(2):
                deltas = [choice["delta"] for choice in choices if choice["index"] == index]
                assert deltas[0] == {"role": "assistant", "content": ""}
                assert all("role" not in delta for delta in deltas[1:])
                assert "".join(delta.get("content", "") for delta in deltas) == "One moment."
                assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
                calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
                told: dict[int, list[str]] = {}
                for call in calls:
                    assert ("name" in call["function"]) == ("id" in call) == (call["index"] not in told)
                    name, arguments = told.setdefault(call["index"], [call["function"].get("name", ""), ""])
                    told[call["index"]] = [name, arguments + call["function"]["arguments"]]
                assert [tuple(one) for one in told.values()] == CALLS
            assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"] * 2

            after = [*CHAT, answer["choices"][0]["message"], {"role": "tool", "tool_call_id": "x", "content": "5"}]
            assert (await http.post("/v1/chat/completions", json={"messages": after})).status_code == 200
            unknown = {**body, "tool_choice": {"type": "function", "function": {"name": "g"}}}
            refused = await http.post("/v1/chat/completions", json=unknown)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
        await router.drain(0.0)


# --- calls that are demanded, from a model that writes at random -----------------------------------------------------

SCHEMAS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"type": "string", "maxLength": 4}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    "g": {"properties": {"kind": {"enum": ["a", "bc"]}}, "required": ["kind"], "additionalProperties": False},
}
TWO_TOOLS = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("chat") / "template.jinja"
    file.write_text(CHAT_TEMPLATE)
    return file


@pytest.fixture(
    scope="module", params=["hermes", "llama3_json", "mistral", "qwen3_xml", "harmony", "kimi", "think", "none"]
)
def random_client(request: Any, tiny_world: TinyWorld, template: Any) -> Iterator[Client]:
    engine = EngineConfig(ModelConfig(str(tiny_world.model)), batch=BatchConfig(max_running=8, max_step_tokens=64))
    chat = ChatConfig(template=template, tool_format=request.param)
    with inline_worker(WorkerConfig(engine, chat, port=0)) as worker, Client(worker.address) as client:
        yield client


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.slow)], ids=["some", "more"])
def test_demanded_calls_are_valid(random_client: Client, seeds: range) -> None:
    asked: Any = {"messages": CHAT, "tools": TWO_TOOLS, "parse_chat": True, "temperature": 1.0, "max_tokens": 300}
    for seed in seeds:
        named: Any = random_client.generate(**asked, seed=seed, tool_choice={"function": {"name": "g"}}).message
        ((name, arguments),) = calls_of(named)
        assert name == "g"
        validate(json.loads(arguments), SCHEMAS["g"])
        assert not named["content"]

        options: Any = {"seed": seed, "tool_choice": "required", "parallel_tool_calls": False}
        answer = random_client.generate(**asked, **options)
        ((name, arguments),) = calls_of(answer.message)
        validate(json.loads(arguments), SCHEMAS[name])
        assert answer.finish_reason == "eos"
        looked_up = random_client.generate(**asked, **options, speculation="prompt_lookup")
        assert looked_up.text == answer.text

    with pytest.raises(InvalidArgument) as caught:
        random_client.generate(**asked, tool_choice={"function": {"name": "h"}})
    assert caught.value.field == "chat.tool_choice.name"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_special", [True, False])
def test_arguments_of_strict_tools_are_valid_where_the_model_chooses_to_call(
    template: Any, tmp_path: Path, is_special: bool
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(one, special=is_special) for one in ("<tool_call>", "</tool_call>")])
    world = make_world(tmp_path, 0, tokenizer=tokenizer)
    mark = AutoTokenizer.from_pretrained(world.model).convert_tokens_to_ids("<tool_call>")
    tools: list[Any] = [
        {"function": {"name": name, "parameters": one, "strict": name == "f"}} for name, one in SCHEMAS.items()
    ]
    asked: Any = {"messages": CHAT, "tools": tools, "parse_chat": True, "temperature": 1.0, "max_tokens": 200}
    engine = EngineConfig(ModelConfig(str(world.model)), batch=BatchConfig(max_running=8, max_step_tokens=64))
    chat = ChatConfig(template=template, tool_format="hermes")
    found: list[tuple[str, str]] = []
    with inline_worker(WorkerConfig(engine, chat, port=0)) as worker, Client(worker.address) as client:
        for seed in range(4):
            options: Any = {"seed": seed, "logit_bias": {mark: 6.0}}
            answer = client.generate(**asked, **options)
            calls = calls_of(answer.message)
            found += calls if answer.finish_reason == "eos" else calls[:-1]  # the last one may be cut
            chunks = list(client.stream(**asked, **options, tool_choice="auto"))
            assert together([delta for chunk in chunks for delta in chunk.deltas])[2] == calls
        demanded: Any = client.generate(**asked, tool_choice={"function": {"name": "f"}}).message
        ((name, arguments),) = calls_of(demanded)
        found.append((name, arguments))
        with pytest.raises(InvalidArgument) as caught:
            client.generate(**asked, ignore_eos=True)
        assert caught.value.field == "stopping.ignore_eos"
    of_f = [arguments for name, arguments in found if name == "f"]
    assert of_f
    for arguments in of_f:
        validate(json.loads(arguments), SCHEMAS["f"])
    assert {name for name, _ in found} <= {"f", "g"}


@pytest.mark.timeout(120)
def test_an_answer_with_a_schema_or_calls_where_the_model_may_choose(template: Any, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(one, special=False) for one in ("<tool_call>", "</tool_call>")])
    world = make_world(tmp_path, 0, tokenizer=tokenizer)
    mark = AutoTokenizer.from_pretrained(world.model).convert_tokens_to_ids("<tool_call>")
    tools: list[Any] = [
        {"function": {"name": name, "parameters": one, "strict": True}} for name, one in SCHEMAS.items()
    ]
    schema = {"properties": {"kind": {"enum": ["a", "bc"]}}, "required": ["kind"]}
    asked: Any = {"messages": CHAT, "tools": tools, "parse_chat": True, "temperature": 1.0, "max_tokens": 200}
    engine = EngineConfig(ModelConfig(str(world.model)), batch=BatchConfig(max_running=8, max_step_tokens=64))
    chat = ChatConfig(template=template, tool_format="hermes")
    with inline_worker(WorkerConfig(engine, chat, port=0)) as worker, Client(worker.address) as client:
        for grammar, options, calls in (
            (Grammar(json_schema=schema), {}, True),
            (Grammar(json_schema=schema), {"tool_choice": "auto", "parallel_tool_calls": False}, True),
            (Grammar(json_schema=schema), {"tool_choice": "none"}, False),
            (Grammar(json_schema=schema, compact=True), {"parse_chat": False}, False),
            (Grammar(regex='\\{"kind": "a"\\}'), {}, False),
        ):
            for bias in (100.0, -100.0):
                more: Any = {**asked, **options, "grammar": grammar, "logit_bias": {mark: bias}, "seed": 3}
                answer = client.generate(**more)
                message: Any = answer.message or {"content": answer.text}
                if calls and bias > 0:
                    for name, arguments in calls_of(message)[: None if answer.finish_reason == "eos" else -1]:
                        validate(json.loads(arguments), SCHEMAS[name])
                    assert calls_of(message)
                    assert not message["content"]
                else:
                    validate(json.loads(message["content"]), {"type": "object", **schema})
                    assert not calls_of(message)
