"""Inference service without a network."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from google.rpc import status_pb2
from support.engine_fakes import INFO, build_fake, build_slow
from support.tiny_tokenizers import KINDS, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from loraplex_contracts.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineLost,
    FailedPrecondition,
    InvalidAdapterId,
    InvalidArgument,
    LoraplexError,
)
from loraplex_contracts.load import Load
from loraplex_contracts.request import (
    Admitted,
    CompletionEnd,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    Request,
    Tokens,
)
from loraplex_proto.status import DETAILS_KEY, from_status
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.validate import ModelLimits
from loraplex_server.config import EngineConfig, ModelConfig
from loraplex_server.engine.client import EngineClient, EngineState, RequestStream
from loraplex_server.engine.pipe import ModelInfo
from loraplex_server.frontend.templates import Templates
from loraplex_server.frontend.tokenizing import NUM_THREADS, Tokenizing
from loraplex_server.grpc import inference_service, protobuf
from loraplex_server.grpc.inference_service import InferenceServicer
from loraplex_server.grpc.middleware import RequestGate
from loraplex_server.text.tokenizer import SHORT_CHARS, TextTokenizer, Truncation


def service(engine: Any, info: ModelInfo, tokenizer: TextTokenizer) -> InferenceServicer:
    limits = ModelLimits(info.vocab_size, info.max_context_tokens)
    tokenizing = Tokenizing(tokenizer, limits)
    return InferenceServicer(engine, info, tokenizing, RequestGate(), Templates(tokenizing))


def servicer(*speculation: str, draft_models: tuple[str, ...] = ()) -> InferenceServicer:
    info = ModelInfo("m", "llama", "float32", "cpu", 600, 64, 8, (2,), speculation, draft_models=draft_models)
    return service(None, info, TextTokenizer(None))


@pytest.mark.parametrize(
    ("speculation", "names", "kinds"),
    [
        ((), (), ["off"]),
        (("prompt_lookup", "medusa"), (), ["off", "auto", "prompt_lookup", "medusa"]),
        (
            ("prompt_lookup",),
            ("tiny", "small"),
            ["off", "auto", "prompt_lookup", "draft_model:tiny", "draft_model:small"],
        ),
    ],
)
async def test_info_says_how_requests_may_speculate(
    speculation: tuple[str, ...], names: tuple[str, ...], kinds: list[str]
) -> None:
    info = await servicer(*speculation, draft_models=names).GetInfo(inference_pb2.GetInfoRequest(), None)
    assert list(info.speculation) == kinds
    assert tuple(info.draft_models) == names
    assert (info.model_id, info.role) == ("m", "worker")


# --- where text is made -----------------------------------------------------------------------------------------------


class WatchedTokenizer(TextTokenizer):
    """Records the threads in which it was asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer)
        self.threads: set[int] = set()

    def encode(self, text: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens=add_special_tokens, truncation=truncation)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **beside: Any
    ) -> str:
        self.threads.add(threading.get_ident())
        return super().render_chat(messages, add_generation_prompt, **beside)


def chat_of(*contents: str) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=text) for text in contents])


LONG = "x" * SHORT_CHARS
LONG_INPUTS = [{"text": LONG}, {"chat": chat_of(LONG)}, {"chat": chat_of(*["xxx"] * 1000)}]
SHORT_INPUTS = [{"text": "x"}, {"chat": chat_of("x", "x")}]


@pytest.mark.parametrize(("given", "is_long"), [(given, given in LONG_INPUTS) for given in LONG_INPUTS + SHORT_INPUTS])
async def test_long_texts_and_chats_leave_the_event_loop_alone(given: dict[str, Any], is_long: bool) -> None:
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    tokenizer = WatchedTokenizer(tiny)
    one = service(None, replace(INFO, max_context_tokens=1 << 20), tokenizer)
    raw = await one.Tokenize(inference_pb2.TokenizeRequest(**given), FakeContext())
    response = inference_pb2.TokenizeResponse.FromString(raw)
    assert len(response.tokens) == len(response.token_ids)
    assert (threading.get_ident() not in tokenizer.threads) == is_long
    tokenizer.threads.clear()
    assert await one._prompts.ids(inference_pb2.GenerateRequest(**given), None) == tuple(response.token_ids)
    assert (threading.get_ident() not in tokenizer.threads) == is_long
    await one._tokenizing.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_offsets_and_texts_are_those_of_transformers(kind: str) -> None:
    tiny = copy.copy(tiny_tokenizer(kind))
    tiny.chat_template = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    one = service(None, replace(INFO, vocab_size=len(tiny)), TextTokenizer(tiny))
    text = "naïve café 你好 😀 [tool]"

    async def tokenize(**fields: Any) -> inference_pb2.TokenizeResponse:
        raw = await one.Tokenize(inference_pb2.TokenizeRequest(offsets=True, **fields), FakeContext())
        return inference_pb2.TokenizeResponse.FromString(raw)

    expected = tiny(text, return_offsets_mapping=True)
    found = await tokenize(text=text)
    assert list(found.token_ids) == expected["input_ids"]
    assert list(zip(found.starts, found.ends, strict=True)) == expected["offset_mapping"]
    assert not found.rendered, "the client has it"

    chat = await tokenize(chat=chat_of(text, "x"))
    messages = [{"role": "user", "content": said} for said in (text, "x")]
    assert chat.rendered == tiny.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.rendered[chat.starts[0] : chat.ends[0]] == "<|turn|>"

    for ids in (list(found.token_ids), []):
        for omit in (False, True):
            request = inference_pb2.DetokenizeRequest(token_ids=ids, omit_special_tokens=omit)
            decoded = tiny.decode(ids, skip_special_tokens=omit, clean_up_tokenization_spaces=False)
            assert (await one.Detokenize(request, FakeContext())).text == decoded
    with pytest.raises(InvalidArgument) as caught:
        await one.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[len(tiny)]), FakeContext())
    assert caught.value.field == "token_ids"


AGENT = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{{ documents | tojson }}{{ thinking }}"
    "{% for m in messages %}<|turn|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.id }}={{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}</s>{% endfor %}{% if add_generation_prompt %}<|turn|>{% endif %}"
)


def agent_service() -> InferenceServicer:
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = AGENT
    return service(None, INFO, TextTokenizer(tiny))


async def rendered(chat: inference_pb2.Chat) -> str:
    raw = await agent_service().Tokenize(inference_pb2.TokenizeRequest(chat=chat, offsets=True), FakeContext())
    return inference_pb2.TokenizeResponse.FromString(raw).rendered


def test_reasoning_of_earlier_messages_has_the_names_that_templates_know() -> None:
    """gpt-oss's template refuses `thinking` beside calls and content."""
    calls = [inference_pb2.ToolCall(name="f")]
    turns = [
        inference_pb2.ChatMessage(role="assistant", content=content, reasoning="hm", tool_calls=made)
        for content, made in (("a", []), ("", calls), ("a", calls))
    ]
    told = protobuf.template_input(inference_pb2.Chat(messages=turns))["messages"]
    assert [(one["reasoning"], one["reasoning_content"]) for one in told] == [("hm", "hm")] * 3
    assert [one.get("thinking") for one in told] == ["hm", "hm", None]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_tools_and_calls_are_rendered_as_transformers_does(goes_on: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}}
    bare = {"type": "function", "function": {"name": "g", "arguments": {}}}
    messages = [
        {"role": "user", "content": "hi", "name": "zoe"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call, bare]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is"},
    ]
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = AGENT
    expected = tiny.apply_chat_template(
        messages,
        tools=tools,
        documents=[{"title": "t"}],
        thinking=False,
        tokenize=False,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )
    calls = [
        inference_pb2.ToolCall(id="c1", name="f", arguments_json='{"x": [1, null]}'),
        inference_pb2.ToolCall(name="g"),
    ]
    turns = [
        inference_pb2.ChatMessage(role="user", content="hi", name="zoe"),
        inference_pb2.ChatMessage(role="assistant", reasoning="hm", tool_calls=calls),
        inference_pb2.ChatMessage(role="tool", content="5", tool_call_id="c1"),
        inference_pb2.ChatMessage(role="assistant", content="It is"),
    ]
    chat = inference_pb2.Chat(
        messages=turns,
        tools_json=json.dumps(tools),
        documents_json='[{"title": "t"}]',
        template_kwargs_json='{"thinking": false}',
        continue_final_message=goes_on,
    )
    assert await rendered(chat) == expected
    assert expected.endswith("It is") == goes_on


@pytest.mark.parametrize("arguments", ['{"x": ', '{"x": NaN}', "[" * 100_000])
async def test_arguments_that_are_not_json_stay_a_text(arguments: str) -> None:
    call = inference_pb2.ToolCall(name="f", arguments_json=arguments)
    turns = [inference_pb2.ChatMessage(role="assistant", tool_calls=[call])]
    assert json.dumps(arguments) in await rendered(inference_pb2.Chat(messages=turns))


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("tools_json", {"tools_json": "[1]"}),
        ("tools_json", {"tools_json": "{}"}),
        ("tools_json", {"tools_json": "[{]"}),
        ("tools_json", {"tools_json": '[{"x": NaN}]'}),
        ("tools_json", {"tools_json": "[" * 100_000}),
        ("documents_json", {"documents_json": '["x"]'}),
        ("template_kwargs_json", {"template_kwargs_json": "[]"}),
        ("template_kwargs_json", {"template_kwargs_json": '{"chat_template": "{{ 1 }}"}'}),
        ("template_kwargs_json", {"template_kwargs_json": '{"tokenize": true}'}),
        ("template_kwargs_json", {"template_kwargs_json": '{"messages": []}'}),
    ],
)
async def test_json_that_a_template_cannot_have(field: str, given: dict[str, Any]) -> None:
    turns = [inference_pb2.ChatMessage(role="user", content="x")]
    with pytest.raises(InvalidArgument) as caught:
        await rendered(inference_pb2.Chat(**({"messages": turns} | given)))
    assert caught.value.field == f"chat.{field}"
    assert len(caught.value.message) < 500


async def test_a_last_message_that_the_template_changes_cannot_be_continued() -> None:
    long = "x" * 10_000
    with pytest.raises(InvalidArgument, match="chat template refuses") as caught:
        tiny = copy.copy(tiny_tokenizer("byte_level"))
        tiny.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
        TextTokenizer(tiny).render_chat([{"role": "user", "content": long}], continue_final_message=True)
    assert len(caught.value.message) < 500


async def test_facts_of_the_tokenizer() -> None:
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = "{{ messages }}"
    one = service(None, INFO, TextTokenizer(tiny))
    info = await one.GetTokenizerInfo(inference_pb2.GetTokenizerInfoRequest(), FakeContext())
    for role in ("bos", "eos", "pad", "unk"):
        token = getattr(info, role)
        assert (token.token_id, token.text) == (getattr(tiny, f"{role}_token_id"), getattr(tiny, f"{role}_token"))
    assert [token.text for token in info.special_tokens] == ["<pad>", "<s>", "</s>", "<unk>", "<|turn|>"]
    assert info.chat_template == "{{ messages }}"
    for ask_for in ("GetTokenizerInfo", "Detokenize"):
        with pytest.raises(FailedPrecondition):
            request = getattr(inference_pb2, f"{ask_for}Request")()
            await getattr(service(None, INFO, TextTokenizer(None)), ask_for)(request, FakeContext())


async def test_info_says_what_the_model_recommends() -> None:
    info = replace(
        INFO,
        model_id="org/m",
        generation_defaults={"temperature": 0.5, "top_k": 20.0},
        kv_block_tokens=16,
        max_device_adapters=8,
    )
    answer = await service(None, info, TextTokenizer(None)).GetInfo(inference_pb2.GetInfoRequest(), None)
    assert answer.generation_defaults == inference_pb2.Sampling(temperature=0.5, top_k=20)
    assert (list(answer.served_names), list(answer.tasks)) == (["org/m"], ["generate", "embed", "classify", "score"])
    assert (answer.kv_block_tokens, answer.max_device_adapters) == (16, 8)
    plain = await service(None, INFO, TextTokenizer(None)).GetInfo(inference_pb2.GetInfoRequest(), None)
    assert list(plain.served_names) == ["fake"]
    assert not plain.generation_defaults.ListFields()


# --- echo -------------------------------------------------------------------------------------------------------------


class FakeContext:
    """The context of a call. An abort raises its error again."""

    def __init__(self, remaining_s: float | None = None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s

    async def abort(self, code: Any, details: str, trailing_metadata: Any) -> NoReturn:
        raise from_status(status_pb2.Status.FromString(dict(trailing_metadata)[DETAILS_KEY]))


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_a_text_that_waits_for_its_turn_is_answered_just_before_the_deadline(method: str) -> None:
    """Ids to look at wait for a turn behind others' texts, and so does a text; gRPC itself would only say a code."""
    one = service(None, replace(INFO, max_context_tokens=1 << 20), TextTokenizer(tiny_tokenizer("byte_level")))
    for _ in range(NUM_THREADS):
        await one._tokenizing._threads.acquire(1)
    requests = {
        "Generate": inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[3] * SHORT_CHARS)),
        "Tokenize": inference_pb2.TokenizeRequest(text="x" * SHORT_CHARS),
    }
    async with asyncio.timeout(20):
        with pytest.raises(DeadlineExceeded):
            await getattr(one, method)(requests[method], FakeContext(1.0))
    await one._tokenizing.close()


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_a_chat_that_waits_for_its_adapter_says_so_at_the_deadline(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimpleNamespace(state=EngineState(Load()))
    one = service(engine, INFO, TextTokenizer(None))

    async def version(*given: object) -> None:
        await asyncio.sleep(20)

    monkeypatch.setattr(one._templates, "version", version)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    requests = {
        "Generate": inference_pb2.GenerateRequest(chat=chat, adapter_id="sql"),
        "Tokenize": inference_pb2.TokenizeRequest(chat=chat, adapter_id="sql"),
    }
    with pytest.raises(DeadlineExceeded, match="before the adapter was fetched"):
        await getattr(one, method)(requests[method], FakeContext(0.2))
    await one._tokenizing.close()


async def test_every_streamed_completion_begins_with_the_prompt() -> None:
    engine = EngineClient(EngineConfig(ModelConfig("fake")))
    await engine.start(inline=True, builder=build_fake)
    try:
        one = service(engine, INFO, TextTokenizer(tiny_tokenizer("byte_level")))
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[70, 71, 72]),
            n=3,
            stopping=inference_pb2.Stopping(max_tokens=5),
            output=inference_pb2.Output(echo=True),
        )
        texts: dict[int, str] = defaultdict(str)
        async for message in one.GenerateStream(request, FakeContext()):
            texts[message.index] += message.text_delta
        whole = await one.Generate(request, FakeContext())
    finally:
        await engine.stop()
    assert texts == {completion.index: completion.text for completion in whole.completions}
    assert len(texts) == 3
    assert len(set(texts.values())) == 1
    prompt = one._tokenizer.decode([70, 71, 72])
    assert texts[0].startswith(prompt)
    assert len(texts[0]) > len(prompt)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_an_echo_that_cannot_be_is_refused_before_anything_runs(method: str) -> None:
    idle = SimpleNamespace(state=EngineState(Load()))  # whatever else is asked of it fails
    one = service(idle, INFO, TextTokenizer(None))
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[70]), output=inference_pb2.Output(echo=True)
    )
    with pytest.raises(FailedPrecondition) as caught:
        if method == "Generate":
            await one.Generate(request, FakeContext())
        else:
            async for _ in one.GenerateStream(request, FakeContext()):
                pass
    assert caught.value.field == "output.echo"


# --- what answers say beside the text ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def fake_service(info: ModelInfo = INFO) -> AsyncGenerator[InferenceServicer]:
    engine = EngineClient(EngineConfig(ModelConfig("fake")))
    await engine.start(inline=True, builder=build_fake)
    try:
        yield service(engine, info, TextTokenizer(tiny_tokenizer("byte_level")))
    finally:
        await engine.stop()


def ask(text: str = "a b", **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, stopping=inference_pb2.Stopping(max_tokens=3), **fields)


async def test_the_seed_that_was_used_is_in_the_answer() -> None:
    async with fake_service() as one:
        given = ask(sampling=inference_pb2.Sampling(temperature=1, seed=5), n=2)
        assert (await one.Generate(given, FakeContext())).seed == 5
        messages = [message async for message in one.GenerateStream(given, FakeContext())]
        assert [message.seed for message in messages if message.HasField("seed")] == [5], "on the first message"
        chosen = ask(sampling=inference_pb2.Sampling(temperature=1))
        first, second = [(await one.Generate(chosen, FakeContext())).seed for _ in range(2)]
        assert first != second
        greedy = await one.Generate(ask(sampling=inference_pb2.Sampling(seed=5)), FakeContext())
        assert not greedy.HasField("seed")


@pytest.mark.parametrize("is_long", [True, False])
async def test_long_answers_leave_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch, is_long: bool) -> None:
    """Logprobs of a long prompt and of many tokens would hold it for seconds."""
    threads: list[int] = []
    put = protobuf.put_prompt

    def watched(*given: Any) -> None:
        threads.append(threading.get_ident())
        put(*given)

    monkeypatch.setattr(protobuf, "put_prompt", watched)
    monkeypatch.setattr(inference_service, "LONG_ANSWER", 3 if is_long else 100)
    rows = tuple(PositionLogprobs(token_id, -0.5) for token_id in (71, 72))
    events = [
        Admitted("r", "", 0.0),
        PromptLogprobs("r", rows[:1]),
        PromptLogprobs("r", rows[1:]),
        Tokens("r", 0, (73,), rows[:1]),
        CompletionEnd("r", 0, FinishReason.LENGTH, None, 3, 0),
    ]

    def submit(request: Request) -> RequestStream:
        stream = RequestStream(request, lambda stream, error: None, 99)
        for event in events:
            stream.push(event)
        return stream

    engine = SimpleNamespace(state=EngineState(Load()), unique_id=lambda given: f"{given}/1", submit=submit)
    one = service(engine, INFO, TextTokenizer(tiny_tokenizer("byte_level")))
    given = ask(output=inference_pb2.Output(prompt_logprobs=True, top_logprobs=1))
    whole = await one.Generate(given, FakeContext())
    messages = [message async for message in one.GenerateStream(given, FakeContext())]
    for answer in (whole, messages[0]):
        assert [row.token_id for row in answer.prompt_logprobs] == [71, 72]
    assert [thread == threading.get_ident() for thread in threads] == [not is_long] * 2


async def test_the_prompt_token_by_token() -> None:
    async with fake_service() as one:
        output = inference_pb2.Output(prompt_tokens=True, token_bytes=True)
        whole = await one.Generate(ask("a é", output=output), FakeContext())
        messages = [message async for message in one.GenerateStream(ask("a é", output=output), FakeContext())]
        ids = one._tokenizer.encode("a é")
    tokens = list(whole.prompt_tokens)
    assert [token.token_id for token in tokens] == ids
    assert (tokens[0].text, tokens[0].bytes, tokens[0].is_special) == ("<s>", b"<s>", True)
    assert b"".join(token.bytes for token in tokens[1:]) == "a é".encode()
    assert not any(token.is_special or token.HasField("logprob") for token in tokens[1:])
    assert list(messages[0].prompt_tokens) == tokens
    assert not any(message.prompt_tokens for message in messages[1:])


async def test_an_echo_ends_before_an_unfinished_character() -> None:
    tiny = tiny_tokenizer("byte_level")
    prompt = tiny.backend_tokenizer.encode("a💩", add_special_tokens=False).ids[:-1]
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        stopping=inference_pb2.Stopping(max_tokens=3),
        output=inference_pb2.Output(echo=True),
    )
    async with fake_service(replace(INFO, vocab_size=len(tiny))) as one:
        (whole,) = (await one.Generate(request, FakeContext())).completions
        messages = [message async for message in one.GenerateStream(request, FakeContext())]
    assert whole.text == tiny.backend_tokenizer.decode([*prompt, *whole.token_ids])
    assert "".join(message.text_delta for message in messages) == whole.text


@pytest.mark.parametrize(
    ("truncate", "kept"),
    [
        ({"max_tokens": 2}, [98, 99]),
        ({"max_tokens": 2, "keep_start": True}, [0, 1]),
        ({"max_tokens": 99}, [*range(1, 100)]),
        ({}, [*range(100)]),
    ],
)
async def test_a_prompt_is_cut_at_its_start(truncate: dict[str, Any], kept: list[int]) -> None:
    async with fake_service() as one:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=range(100)),
            truncate_prompt=truncate,
            stopping=inference_pb2.Stopping(max_tokens=2),
            output=inference_pb2.Output(prompt_tokens=True),
        )
        answer = await one.Generate(request, FakeContext())
        assert [token.token_id for token in answer.prompt_tokens] == kept
        assert answer.usage.prompt_tokens == len(kept)


async def test_a_cut_leaves_room_for_new_tokens() -> None:
    async with fake_service(replace(INFO, max_context_tokens=200)) as one:
        ids = inference_pb2.TokenIds(ids=[70] * 1000)
        for stopping, num_kept in (({}, 199), ({"max_tokens": 50}, 150), ({"max_tokens": 200}, 1)):
            request = inference_pb2.GenerateRequest(token_ids=ids, truncate_prompt={}, stopping=stopping)
            assert (await one.Generate(request, FakeContext())).usage.prompt_tokens == num_kept
        request = inference_pb2.GenerateRequest(token_ids=ids, truncate_prompt={"max_tokens": 200})
        with pytest.raises(ContextLengthExceeded):
            await one.Generate(request, FakeContext())


async def test_special_tokens_of_a_text_can_be_left_out() -> None:
    async with fake_service() as one:
        output = inference_pb2.Output(prompt_tokens=True, echo=True, keep_special_tokens=True)
        plain = await one.Generate(ask(output=output), FakeContext())
        bare = await one.Generate(ask(output=output, omit_special_tokens=True), FakeContext())
    assert list(bare.prompt_tokens) == list(plain.prompt_tokens)[1:]
    assert plain.completions[0].text.startswith("<s>a b"), "kept, in the echo too"
    assert bare.completions[0].text.startswith("a b")


# --- errors in the middle ---------------------------------------------------------------------------------------------


def long_request(request_id: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=[70, 71]),
        stopping=inference_pb2.Stopping(max_tokens=200),
        output=inference_pb2.Output(omit_token_ids=True),
    )


async def test_a_lost_engine_is_told_with_what_was_sent_and_to_each_its_own() -> None:
    engine = EngineClient(EngineConfig(ModelConfig("fake")))
    await engine.start(inline=True, builder=build_slow)
    one = service(engine, INFO, TextTokenizer(tiny_tokenizer("byte_level")))
    num_read = defaultdict[str, int](int)

    async def stream(request_id: str) -> LoraplexError:
        with pytest.raises(LoraplexError) as caught:
            async for _ in one.GenerateStream(long_request(request_id), FakeContext()):
                num_read[request_id] += 1
        return caught.value

    async def unary() -> LoraplexError:
        with pytest.raises(LoraplexError) as caught:
            await one.Generate(long_request("whole"), FakeContext())
        return caught.value

    tasks = [asyncio.ensure_future(call) for call in (stream("one"), stream("two"), unary())]
    while len(num_read) < 2:
        await asyncio.sleep(0.01)
    engine._on_lost()  # what the end of the pipe does
    errors = await asyncio.gather(*tasks)
    await engine.stop()
    assert [error.request_id for error in errors] == ["one", "two", "whole"]
    for error in errors:
        assert isinstance(error, EngineLost)
        assert error.retry_after_s == 1.0
        assert int(error.metadata["messages_sent"]) == num_read[error.request_id or ""]
    assert [int(error.metadata["tokens_sent"]) > 0 for error in errors] == [True, True, False]


async def test_chunks_without_token_ids_say_how_many_there_are() -> None:
    async with fake_service() as one:
        request = ask(output=inference_pb2.Output(omit_token_ids=True))
        hidden = [chunk async for chunk in one.GenerateStream(request, FakeContext())]
        shown = [chunk async for chunk in one.GenerateStream(ask(), FakeContext())]
    assert sum(chunk.new_tokens for chunk in hidden) == hidden[-1].usage.completion_tokens == 3
    assert not any(chunk.token_ids for chunk in hidden)
    assert not any(chunk.new_tokens for chunk in shown)


# --- what is counted --------------------------------------------------------------------------------------------------


def prompt_tokens(one: InferenceServicer) -> dict[str, int]:
    return {name: usage.prompt_tokens for name, usage in one._gate.metrics.usage.adapters.items()}


async def test_the_prompt_of_a_stream_that_is_cancelled_counts() -> None:
    engine = EngineClient(EngineConfig(ModelConfig("fake")))
    await engine.start(inline=True, builder=build_slow)
    one = service(engine, INFO, TextTokenizer(tiny_tokenizer("byte_level")))
    stream = one.GenerateStream(long_request("gone"), FakeContext())
    await anext(aiter(stream))
    await stream.aclose()  # type: ignore[attr-defined]
    await engine.stop()
    assert prompt_tokens(one) == {"(base)": 2}


@pytest.mark.parametrize(
    "names",
    [
        {"adapter_id": "../etc"},
        {"adapters": [inference_pb2.AdapterWeight(id=name, weight=1) for name in ("../etc", "sql")]},
    ],
)
async def test_a_malformed_name_is_not_counted_as_the_base_model(names: dict[str, Any]) -> None:
    one = servicer()
    with pytest.raises(InvalidAdapterId):
        await one.Generate(inference_pb2.GenerateRequest(text="x", **names), FakeContext())
    assert prompt_tokens(one) == {"(other)": 0}
