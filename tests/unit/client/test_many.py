"""Many prompts, chats, and what answers look like."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

import loraplex
from loraplex import AsyncClient, Client
from loraplex_proto.status import abort
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.v1.inference_pb2 import GenerateStreamResponse


def echo(fake: Any) -> None:
    """The server answers with the prompt."""

    def answer(request: Any) -> inference_pb2.GenerateResponse:
        text = request.text or f"{len(request.chat.messages)} messages"
        usage = inference_pb2.Usage(completion_tokens=1)
        return inference_pb2.GenerateResponse(
            completions=[inference_pb2.Completion(text=text, usage=usage)], usage=usage, request_id=request.request_id
        )

    fake.generate_response = answer


def many(kind: str, fake: Any, *args: Any, **more: Any) -> Any:
    if kind == "sync":
        with Client(fake.address) as client:
            return client.generate_many(*args, **more)

    async def run() -> Any:
        async with AsyncClient(fake.address) as client:
            return await client.generate_many(*args, **more)

    return asyncio.run(run())


BOTH = pytest.mark.parametrize("kind", ["sync", "async"])


@BOTH
def test_answers_in_order_with_errors_in_their_places(kind: str, fake: Any) -> None:
    echo(fake)
    told: list[tuple[int, int]] = []
    prompts = ["a", {"prompt": "b", "adapter_id": "../etc"}, {"prompt": "c", "max_tokens": 3}]
    found = many(
        kind, fake, prompts, max_concurrency=2, max_tokens=9, progress=lambda done, total: told.append((done, total))
    )
    assert [one.text for one in (found[0], found[2])] == ["a", "c"]
    assert isinstance(found[1], loraplex.InvalidAdapterId)
    assert {seen.request.text: seen.request.stopping.max_tokens for seen in fake.seen} == {"a": 9, "c": 3}
    assert told == [(1, 3), (2, 3), (3, 3)]


@BOTH
def test_no_more_than_so_many_at_once(kind: str, fake: Any) -> None:
    running, most = 0, 0
    arrived = fake.received

    async def counted(*args: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        await arrived(*args)
        running -= 1

    fake.received = counted
    assert len(many(kind, fake, ["x"] * 9, max_concurrency=3)) == 9
    assert 1 < most <= 3


@BOTH
def test_what_is_no_list_of_prompts(kind: str, fake: Any) -> None:
    assert many(kind, fake, []) == ()
    with pytest.raises(loraplex.InvalidArgument, match="generate_many takes a list"):
        many(kind, fake, "abc")
    with pytest.raises(loraplex.InvalidArgument, match="max_concurrency"):
        many(kind, fake, ["a"], max_concurrency=0)
    with pytest.raises(TypeError, match="did you mean max_tokens"):
        many(kind, fake, ["a"], max_new_tokens=5)
    assert fake.seen == []


@pytest.mark.parametrize("error", [None, loraplex.QueueFull("no room", retry_after_s=60)])
def test_an_interrupt_ends_what_is_under_way(fake: Any, error: loraplex.LoraplexError | None) -> None:
    """Covers calls that wait for an answer, and those that wait for their next try."""
    echo(fake)
    arrived = fake.received
    two_wait = threading.Semaphore(0)

    async def only_some_are_answered(method: str, request: Any, context: Any) -> None:
        if request.text.startswith("answer"):
            return await arrived(method, request, context)
        two_wait.release()
        if error is not None:
            await abort(context, error)
        try:
            await asyncio.sleep(60)
        finally:
            fake.cancelled.set()

    fake.received = only_some_are_answered

    def interrupt(done: int, total: int) -> None:
        assert all(two_wait.acquire(timeout=10) for _ in range(2))
        raise KeyboardInterrupt

    with Client(fake.address) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate_many(["answer", "a", "b", "c"], max_concurrency=3, timeout_s=100, progress=interrupt)
        for thread in threading.enumerate():
            if thread.name.startswith("loraplex_"):
                thread.join(10)
                assert not thread.is_alive(), "the interpreter would wait for it at its exit"
        assert error is not None or fake.cancelled.wait(10)
        assert client.generate("answer").text == "answer", "the client is still of use"


def test_a_bar(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    many("sync", fake, ["a", "b"], progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err
    assert many("sync", fake, [], progress=True) == ()
    assert capsys.readouterr().err == ""


# --- chats ----------------------------------------------------------------------------------------------------------


def test_a_chat_keeps_its_history(fake: Any) -> None:
    echo(fake)
    with Client(fake.address) as client:
        chat = client.chat("be brief", adapter_id="sql", max_tokens=4)
        assert chat.send("hi").text == "2 messages"
        chat.options["adapter_id"] = "json"
        assert chat.send("more", max_tokens=7).text == "4 messages"
        chat.reset()
        assert chat.send("again").text == "2 messages"
        assert repr(chat).startswith("Chat(1 turns, 3 messages")
    second = fake.seen[1].request
    assert [(one.role, one.content) for one in second.chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "2 messages"),
        ("user", "more"),
    ]
    assert (second.adapter_id, second.stopping.max_tokens) == ("json", 7)
    assert [seen.request.adapter_id for seen in fake.seen] == ["sql", "json", "json"]


def test_a_turn_that_fails_is_not_part_of_it(fake: Any) -> None:
    with Client(fake.address) as client:
        chat = client.chat(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        fake.error = loraplex.Internal("no")
        with pytest.raises(loraplex.Internal):
            chat.send("hi")
        assert [one.get("content") for one in chat.messages] == ["a", "b"]


def streamed() -> list[GenerateStreamResponse]:
    return [
        GenerateStreamResponse(text_delta="ab"),
        GenerateStreamResponse(text_delta="c", finish_reason=inference_pb2.FINISH_REASON_EOS),
    ]


def test_messages_of_a_turn_are_not_passed_over(fake: Any) -> None:
    with Client(fake.address) as client:
        chat = client.chat()
        with pytest.raises(loraplex.InvalidArgument, match=r"change `chat\.messages`"):
            chat.send("hi", messages=[{"role": "user", "content": "before"}])
    assert fake.seen == []
    assert chat.messages == []


def test_a_streamed_turn(fake: Any) -> None:
    fake.chunks = streamed()
    with Client(fake.address) as client:
        chat = client.chat()
        left = chat.stream("x")
        next(left)
        left.close()  # type: ignore[attr-defined]
        assert chat.messages == []
        assert "".join(chunk.text for chunk in chat.stream("hi")) == "abc"
    assert chat.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "abc"}]


def test_a_streamed_turn_of_two_completions_keeps_the_first(fake: Any) -> None:
    end = inference_pb2.FINISH_REASON_EOS
    fake.chunks = [
        GenerateStreamResponse(text_delta="a"),
        GenerateStreamResponse(index=1, text_delta="B", finish_reason=end),
        GenerateStreamResponse(text_delta="c", finish_reason=end),
    ]
    with Client(fake.address) as client:
        chat = client.chat(n=2)
        assert len(list(chat.stream("hi"))) == 3
    assert chat.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ac"}]


async def test_a_chat_for_asyncio(fake: Any) -> None:
    echo(fake)
    fake.chunks = streamed()
    async with AsyncClient(fake.address) as client:
        chat = client.chat("s")
        assert (await chat.send("hi")).text == "2 messages"
        assert [chunk.text async for chunk in chat.stream("more")] == ["ab", "c"]
    assert [one["role"] for one in chat.messages] == ["system", "user", "assistant", "user", "assistant"]


# --- answers and options --------------------------------------------------------------------------------------------


def test_answers_are_short_in_a_repr_and_whole_as_a_dict(fake: Any) -> None:
    with Client(fake.address) as client:
        answer = client.generate("a", adapter_id="sql", request_id="r")
        info = client.info()
    document = json.loads(json.dumps(answer.to_dict()))
    assert document["completions"][0]["finish_reason"] == "eos"
    assert document["completions"][0]["token_ids"] == [7, 8]
    assert document["usage"]["prompt_tokens"] == 3
    shown = repr(answer)
    assert "text='text 0'" in shown
    assert "request_id='r'" in shown
    assert "logprobs" not in shown, "nothing there, nothing said"
    assert json.dumps(info.to_dict())
    long = loraplex.Embeddings(((0.5,) * 4096,) * 3, answer.usage, answer.timings, "", "")
    assert len(repr(long)) < 1000


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    known = loraplex.options_help()
    assert {one.name for one in known} == set(loraplex.GenerateOptions.__annotations__) | set(
        loraplex.ChatOptions.__annotations__
    ) | set(loraplex.CallOptions.__annotations__)
    assert [one.name for one in known if not one.meaning] == []
    loraplex.help()
    everything = capsys.readouterr().out
    assert all(one.name in everything for one in known)
    loraplex.help("top_p")
    assert "Range: above 0 and at most 1." in capsys.readouterr().out
    with pytest.raises(loraplex.InvalidArgument, match="did you mean max_tokens"):
        loraplex.help("max_new_tokens")


@pytest.mark.parametrize("name", ["topp", "max_token", "temprature"])
def test_only_the_nearest_option_is_named(name: str) -> None:
    with pytest.raises(loraplex.InvalidArgument, match=r"did you mean (top_p|max_tokens|temperature)\?$"):
        loraplex.help(name)


def test_help_takes_any_word() -> None:
    with pytest.raises(loraplex.InvalidArgument, match="there is no option 3"):
        loraplex.help(3)  # type: ignore[arg-type]


def test_a_stream_is_a_method(fake: Any) -> None:
    with Client(fake.address) as client, pytest.raises(TypeError, match="the method `stream`"):
        client.generate("a", stream=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("stop_sequence", "stop"),
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("model", "adapter_id"),
        ("top_K", "top_k"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_right_one(fake: Any, given: str, meant: str) -> None:
    with Client(fake.address) as client, pytest.raises(TypeError, match=f"there is no option '{given}'.*{meant}"):
        client.generate("a", **{given: 1})  # type: ignore[arg-type]
