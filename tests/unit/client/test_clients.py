"""Clients, blocking and for asyncio, against a scripted server."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

import loraplex
from loraplex import AsyncClient, Client, FinishReason
from loraplex_contracts import errors
from loraplex_proto.v1 import adapter_pb2, inference_pb2
from loraplex_proto.v1.inference_pb2 import GenerateStreamResponse

Connect = Callable[..., Any]


class Blocking:
    """AsyncClient with the face of Client, so that one test says what both must do."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._loop = inner, loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name == "adapters":
            return Blocking(value, self._loop)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            async def run() -> Any:
                result = value(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result

            result = self._loop.run_until_complete(run())
            return Blocking(result, self._loop) if isinstance(result, loraplex.AsyncStream) else result

        return call

    def __iter__(self) -> Blocking:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run_until_complete(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        is_stream = isinstance(self._inner, loraplex.AsyncStream)
        self._loop.run_until_complete(self._inner.aclose() if is_stream else self._inner.close())

    def __enter__(self) -> Blocking:
        self._loop.run_until_complete(self._inner.__aenter__())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._loop.run_until_complete(self._inner.__aexit__(*exc))


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    if request.param == "sync":
        yield Client
        return
    loop = asyncio.new_event_loop()

    def make(*args: Any, **kwargs: Any) -> Blocking:
        return Blocking(AsyncClient(*args, **kwargs), loop)

    yield make
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < limit_s


# --- answers --------------------------------------------------------------------------------------------------------


def test_generate(connect: Connect, fake: Any) -> None:
    with connect(fake.address) as client:
        answer = client.generate("hello", adapter_id="sql", max_tokens=4, n=2, request_id="r-1")
    assert isinstance(answer, loraplex.Generation)
    assert answer.text == "text 0"
    assert [c.text for c in answer.completions] == ["text 0", "text 1"]
    assert answer.finish_reason is FinishReason.EOS
    assert answer.completions[1].token_ids == (7, 8)
    assert answer.usage == loraplex.Usage(prompt_tokens=3, completion_tokens=2)
    assert answer.timings == loraplex.Timings(0.1, 0.2, 0.5)
    assert answer.adapter_digest == "d1"
    assert answer.request_id == "r-1"
    (seen,) = fake.seen
    assert seen.request.text == "hello"
    assert seen.request.stopping.max_tokens == 4


def test_every_field_of_an_answer_is_read(connect: Connect, fake: Any) -> None:
    top = [inference_pb2.TopLogprob(token_id=1, text="a", logprob=-0.5)]
    logprobs = [inference_pb2.TokenLogprob(token_id=1, text="a", logprob=-0.5, top=top)]
    fake.generate_response = lambda request: inference_pb2.GenerateResponse(
        completions=[
            inference_pb2.Completion(
                index=0,
                text="t",
                logprobs=logprobs,
                finish_reason=inference_pb2.FINISH_REASON_STOP,
                stop_string="\n",
                stop_token_id=0,
                usage=inference_pb2.Usage(
                    completion_tokens=9,
                    cached_tokens=1,
                    drafted_tokens=4,
                    accepted_tokens=3,
                    steps=6,
                    reasoning_tokens=2,
                    proposers=[inference_pb2.ProposerUsage(name="medusa", drafted_tokens=4, accepted_tokens=3)],
                ),
            )
        ],
        prompt_logprobs=logprobs,
        seed=0,
    )
    with connect(fake.address) as client:
        answer = client.generate("x")
    expected = (loraplex.TokenLogprob(1, "a", -0.5, (loraplex.TopLogprob(1, "a", -0.5),)),)
    (completion,) = answer.completions
    assert completion.logprobs == answer.prompt_logprobs == expected
    assert (completion.stop_string, completion.stop_token_id) == ("\n", 0), "token 0 is a token"
    assert completion.finish_reason is FinishReason.STOP
    medusa = loraplex.ProposerUsage("medusa", 4, 3)
    assert completion.usage == loraplex.Usage(0, 9, 1, 4, 3, (medusa,), 6, 2)
    assert completion.usage.acceptance == medusa.acceptance == 0.75
    assert completion.usage.tokens_per_step == 1.5
    assert answer.seed == 0, "seed 0 is a seed"
    assert answer.usage.acceptance is answer.usage.tokens_per_step is None, "not known is not 0"


def test_logprobs_of_prompt_tokens_are_prompt_logprobs_too(connect: Connect, fake: Any) -> None:
    top = [inference_pb2.TopLogprob(token_id=5, text="\ufffd", logprob=-0.5, bytes=b"\xc3")]
    tokens = [
        inference_pb2.PromptToken(token_id=1, text="<s>", bytes=b"<s>", is_special=True),
        inference_pb2.PromptToken(token_id=5, text="\ufffd", logprob=0.0, bytes=b"\xc3", top=top),
    ]
    fake.generate_response = lambda request: inference_pb2.GenerateResponse(prompt_tokens=tokens)
    fake.chunks = [GenerateStreamResponse(prompt_tokens=tokens, seed=7), GenerateStreamResponse(text_delta="a")]
    with connect(fake.address) as client:
        answer = client.generate("x")
        first, second = client.stream("x")
    known = (loraplex.TopLogprob(5, "\ufffd", -0.5, b"\xc3"),)
    assert answer.prompt_tokens == first.prompt_tokens
    assert answer.prompt_tokens == (
        loraplex.PromptToken(1, "<s>", None, (), b"<s>", True),
        loraplex.PromptToken(5, "\ufffd", 0.0, known, b"\xc3"),
    )
    assert answer.prompt_logprobs == (loraplex.TokenLogprob(5, "\ufffd", 0.0, known, b"\xc3"),)
    assert second.prompt_tokens == second.prompt_logprobs == ()
    assert (answer.seed, first.seed, second.seed) == (None, 7, 7), "on every chunk"


def test_stream(connect: Connect, fake: Any) -> None:
    fake.chunks = [
        GenerateStreamResponse(
            adapter_digest="d1", text_delta="ab", token_ids=[1, 2], drafted_tokens=3, proposer="medusa"
        ),
        GenerateStreamResponse(index=1, text_delta="x"),
        GenerateStreamResponse(
            text_delta="c",
            finish_reason=inference_pb2.FINISH_REASON_LENGTH,
            usage=inference_pb2.Usage(completion_tokens=3),
            timings=inference_pb2.Timings(total_s=1.0),
        ),
        GenerateStreamResponse(index=1, finish_reason=inference_pb2.FINISH_REASON_EOS),
    ]
    with connect(fake.address) as client:
        chunks = list(client.stream("hello", adapter_id="sql", request_id="r-2"))
    assert [(c.index, c.text) for c in chunks] == [(0, "ab"), (1, "x"), (0, "c"), (1, "")]
    assert chunks[0].token_ids == (1, 2)
    assert (chunks[0].drafted_tokens, chunks[0].proposer, chunks[1].proposer) == (3, "medusa", "")
    assert {(c.request_id, c.adapter_digest) for c in chunks} == {("r-2", "d1")}, "on every chunk, not on the first"
    assert [c.finish_reason for c in chunks] == [None, None, FinishReason.LENGTH, FinishReason.EOS]
    assert chunks[2].usage == loraplex.Usage(completion_tokens=3)
    assert chunks[2].timings == loraplex.Timings(total_s=1.0)
    assert chunks[0].usage is None


def test_tokenize_and_info(connect: Connect, fake: Any) -> None:
    with connect(fake.address) as client:
        assert client.tokenize("ab", omit_special_tokens=True) == loraplex.Tokenization((1, 2), ("a", "b"))
        client.tokenize(messages=[{"role": "user", "content": "hi"}])
        info = client.info()
    assert (info.model_id, info.role, info.max_context_tokens, info.eos_token_ids) == ("m", "worker", 64, (2,))
    assert info.speculation == ("off", "auto", "draft_model:tiny")
    assert info.draft_models == ("tiny",)
    assert (info.served_names, info.tasks) == (("org/m", "m"), ("generate",))
    assert info.generation_defaults == {"temperature": 0.5, "top_k": 20}, "and nothing that is not set"
    assert (info.kv_block_tokens, info.max_device_adapters) == (16, 8)
    assert fake.seen[0].request.omit_special_tokens
    assert fake.seen[1].request.chat.messages[0].content == "hi"


def test_offsets_detokenize_and_tokenizer_info(connect: Connect, fake: Any) -> None:
    eos = loraplex.SpecialToken(2, "</s>")
    with connect(fake.address) as client:
        found = client.tokenize("ab", offsets=True)
        assert client.detokenize([1, 2], omit_special_tokens=True) == "ab"
        assert client.tokenizer_info() == loraplex.TokenizerInfo(None, eos, None, None, (eos,), "{{ x }}")
        with pytest.raises(errors.InvalidArgument):
            client.detokenize("ab")  # type: ignore[arg-type]
    assert found == loraplex.Tokenization((1, 2), ("a", "b"), (0, 1), (1, 2), "ab")
    assert fake.seen[0].request.offsets
    assert list(fake.seen[1].request.token_ids) == [1, 2]
    assert fake.seen[1].request.omit_special_tokens


def test_embed_classify_score(connect: Connect, fake: Any) -> None:
    with connect(fake.address) as client:
        embedded = client.embed(["a", "b"], adapter_id="sql", pooling="mean", dimensions=2, normalize=False)
        assert embedded.vectors == ((0.5, 0.0), (0.5, 1.0))
        assert (embedded.vector, embedded.usage.prompt_tokens, embedded.adapter_digest) == ((0.5, 0.0), 4, "d")
        for one in ("a", [5, 6], ["a"], [[5, 6]]):
            assert len(client.embed(one).vectors) == 1
        found = client.classify("ab", adapter_id="ner", logits=True, truncate_prompt=7)
        assert (found.labels, found.best, found.per_token) == (("no", "yes"), ("yes",), True)
        assert found.inputs == (loraplex.Classification(((0.25, 0.75),), (0,), (1,)),)
        scored = client.score("q", ["a", "b"], method="next_token", template="{query}{document}", true_token="ja")
        assert scored.scores == (0.0, 1.0)
        for options in ({"pooling": "max"}, {"dimensions": -1}):
            with pytest.raises(errors.InvalidArgument):
                client.embed("a", **options)
        with pytest.raises(errors.InvalidArgument):
            client.score("q", ["a"], method="guess")
        with pytest.raises(errors.InvalidArgument):
            client.embed(5)
        with pytest.raises(TypeError):
            client.embed("a", max_tokens=1)
    embed, classify, score = fake.seen[0].request, fake.seen[5].request, fake.seen[6].request
    assert [one.text for one in embed.inputs] == ["a", "b"]
    assert (embed.adapter_id, embed.pooling, embed.dimensions, embed.omit_normalization) == ("sql", 2, 2, True)
    assert embed.request_id == embedded.request_id != ""
    assert fake.seen[0].metadata["x-adapter-id"] == "sql"
    assert (classify.logits, classify.truncate_prompt.max_tokens) == (True, 7)
    assert (score.query.text, score.method, score.template, score.true_token) == ("q", 3, "{query}{document}", "ja")


def test_adapters(connect: Connect, fake: Any, make_adapter: Callable[..., Any]) -> None:
    failed = adapter_pb2.ADAPTER_STATE_FAILED
    fake.adapters = [make_adapter(), make_adapter("bad", state=failed, tier=0, error="no", error_reason="NON_FINITE")]
    with connect(fake.address) as client:
        rows = client.adapters.list(include_unloaded=True)
        client.adapters.load("sql", pin=True)
        client.adapters.unload("sql")
        client.adapters.get("org/sql")
    assert [row.adapter_id for row in rows] == ["sql", "bad"]
    assert (rows[0].state, rows[0].tier, rows[0].num_bytes, rows[0].rank) == ("on_device", "device", 1 << 20, 8)
    assert (rows[1].state, rows[1].tier, rows[1].error_reason) == ("failed", "unknown", "NON_FINITE")
    assert [s.method for s in fake.seen] == ["ListAdapters", "LoadAdapter", "UnloadAdapter", "GetAdapter"]
    assert fake.seen[0].request.include_unloaded
    assert fake.seen[1].request.pin
    assert [s.metadata.get("x-adapter-id") for s in fake.seen] == [None, "sql", "sql", "org/sql"]


def test_listings_follow_pages(connect: Connect, fake: Any, make_adapter: Callable[..., Any]) -> None:
    fake.max_page_size, fake.delay_s = 2, 0.1
    fake.adapters = [make_adapter(f"a{number}") for number in range(5)] + [make_adapter("b")]
    with connect(fake.address) as client:
        rows = client.adapters.list(prefix="a", state="on_device", timeout_s=5)
        assert [row.adapter_id for row in rows] == [f"a{number}" for number in range(5)]
        assert [(s.request.page_size, s.request.prefix, s.request.state) for s in fake.seen] == [(1000, "a", 4)] * 3
        assert fake.seen[-1].time_remaining_s < fake.seen[0].time_remaining_s - 0.1, "the time is for all pages"
        for wrong in ({"state": "asleep"}, {"prefix": 5}):
            with pytest.raises(errors.InvalidArgument):
                client.adapters.list(**wrong)  # type: ignore[arg-type]


def test_an_iterator_asks_for_pages_when_they_are_needed(fake: Any, make_adapter: Callable[..., Any]) -> None:
    fake.adapters = [make_adapter(f"a{number}") for number in range(5)]

    async def asynchronously() -> list[str]:
        async with loraplex.AsyncClient(fake.address) as client:
            return [row.adapter_id async for row in client.adapters.iterate(page_size=2)]

    with loraplex.Client(fake.address) as client:
        rows = client.adapters.iterate(page_size=2)
        assert [next(rows).adapter_id for _ in range(2)] == ["a0", "a1"]
        assert len(fake.seen) == 1
        assert [row.adapter_id for row in rows] == ["a2", "a3", "a4"]
        assert len(fake.seen) == 3
        with pytest.raises(errors.InvalidArgument):
            next(client.adapters.iterate(page_size=0))
    assert asyncio.run(asynchronously()) == [f"a{number}" for number in range(5)]


# --- metadata and deadlines -----------------------------------------------------------------------------------------


def test_metadata(connect: Connect, fake: Any) -> None:
    with connect(fake.address, token="t0k") as client:
        client.generate("a", adapter_id="sql")
        list(client.stream("a", adapter_id="yaml"))
        client.info()
    assert [s.metadata.get("x-adapter-id") for s in fake.seen] == ["sql", "yaml", None]
    assert {s.metadata["authorization"] for s in fake.seen} == {"Bearer t0k"}
    assert fake.seen[0].metadata["user-agent"].startswith("loraplex/")


def test_a_server_on_this_machine_is_called_without_a_proxy(
    connect: Connect, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with connect(fake.address, retries=0) as client:
        assert client.generate("x").text == "text 0"


def test_no_token_no_header(connect: Connect, fake: Any) -> None:
    with connect(fake.address) as client:
        client.info()
    assert "authorization" not in fake.seen[0].metadata


def test_deadlines_travel(connect: Connect, fake: Any) -> None:
    with connect(fake.address, timeout_s=50) as client:
        client.generate("a")
        client.generate("a", timeout_s=20)
        client.generate("a", timeout_s=None)
    first, second, third = (s.time_remaining_s for s in fake.seen)
    assert 45 < first < 51
    assert 15 < second < 21
    assert third is None or third > 1e6


def test_there_is_a_deadline_by_default(connect: Connect, fake: Any) -> None:
    with connect(fake.address) as client:
        client.info()
    assert 100 < fake.seen[0].time_remaining_s < 121


def test_a_passed_deadline_is_typed(connect: Connect, fake: Any) -> None:
    fake.delay_s = 5.0
    with connect(fake.address) as client, within(3.0):
        with pytest.raises(loraplex.DeadlineExceeded, match=r"0\.2 s") as caught:
            client.generate("a", timeout_s=0.2, request_id="r-9")
        with pytest.raises(loraplex.DeadlineExceeded):
            list(client.stream("a", timeout_s=0.2))
    assert caught.value.request_id == "r-9"
    assert caught.value.code is loraplex.Code.DEADLINE_EXCEEDED
    assert fake.cancelled.wait(3), "the server hears of it"


def test_a_listing_that_takes_too_long_names_what_was_allowed(
    connect: Connect, fake: Any, make_adapter: Callable[..., Any]
) -> None:
    fake.adapters = [make_adapter(name) for name in "abcdef"]
    fake.delay_s, fake.max_page_size = 0.2, 1
    with (
        connect(fake.address) as client,
        pytest.raises(loraplex.DeadlineExceeded, match=r"no complete answer within 0\.5 s"),
    ):
        client.adapters.list(timeout_s=0.5)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", errors.by_reason().values(), ids=lambda cls: cls.__name__)
def test_errors_are_the_servers_own(connect: Connect, fake: Any, cls: type[errors.LoraplexError]) -> None:
    fake.error = cls("do this", field="f", retry_after_s=2.5)
    with connect(fake.address) as client, pytest.raises(cls) as caught:
        client.generate("a", request_id="r-3")
    error = caught.value
    assert type(error) is cls
    assert getattr(loraplex, cls.__name__) is cls, "importable from the package"
    assert (error.code, error.reason, error.message, str(error)) == (cls.code, cls.reason, "do this", "do this")
    assert (error.retry_after_s, error.retry_after, error.request_id) == (2.5, 2.5, "r-3")


def test_an_error_after_some_tokens(connect: Connect, fake: Any) -> None:
    fake.chunks = [GenerateStreamResponse(text_delta="a")]
    fake.error = errors.WorkerLost("gone", metadata={"tokens_sent": "1"})
    with connect(fake.address) as client:
        stream = client.stream("a")
        assert next(stream).text == "a"
        with pytest.raises(loraplex.WorkerLost) as caught:
            next(stream)
        assert caught.value.metadata["tokens_sent"] == "1"
        assert caught.value.request_id == stream.request_id
        assert list(stream) == [], "ended, not failing for ever"


def test_no_server(connect: Connect) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with connect(address) as client, pytest.raises(loraplex.Unavailable, match="cannot be reached") as caught:
        client.generate("a", timeout_s=5)
    assert address in str(caught.value)
    assert caught.value.request_id


def test_bad_arguments_fail_before_anything_is_sent(connect: Connect, fake: Any) -> None:
    with connect(fake.address) as client:
        for call in (client.generate, client.stream):
            with pytest.raises(loraplex.InvalidArgument):
                call("a", max_tokens=-1)
            with pytest.raises(loraplex.InvalidAdapterId):
                call("a", adapter_id="../etc")
            with pytest.raises(TypeError, match="max_token"):
                call("a", max_token=5)
        with pytest.raises(loraplex.InvalidAdapterId):
            client.adapters.load("a b")
        with pytest.raises(TypeError, match="colour"):
            client.info(colour=1)
    assert fake.seen == []


def test_a_closed_client_says_so(connect: Connect, fake: Any) -> None:
    client = connect(fake.address)
    client.info()
    client.close()
    client.close()
    for call in (client.info, lambda: client.stream("a")):
        with pytest.raises(loraplex.FailedPrecondition, match="closed"):
            call()


def test_a_client_that_is_closed_meanwhile_says_so(connect: Connect, fake: Any) -> None:
    fake.is_endless = True
    client = connect(fake.address)
    stream = client.stream("a")
    next(stream)
    client.close()
    with pytest.raises(loraplex.Cancelled, match="the client was closed before the answer was complete"):
        list(stream)


def test_a_request_that_is_too_large_says_how_large_it_may_be(connect: Connect, fake: Any) -> None:
    says = pytest.raises(loraplex.MessageTooLarge, match="the server takes 4194304; send less")
    with connect(fake.address) as client, says as caught:
        client.generate("a" * (5 << 20))
    assert "--max-message" in caught.value.message
    assert caught.value.retry_after is None, "no waiting makes it smaller"
    assert caught.value.request_id


def test_metadata_that_is_too_large(connect: Connect, fake: Any) -> None:
    with connect(fake.address, token="t" * 40_000) as client, pytest.raises(loraplex.MessageTooLarge) as caught:
        client.info()
    assert caught.value.field == "metadata"


def test_a_connection_that_is_lost_says_when_to_try_again(connect: Connect, fake: Any) -> None:
    fake.is_endless = True
    with connect(fake.address) as client:
        stream = client.stream("a")
        next(stream)
        fake.hang_up()
        with pytest.raises(loraplex.ConnectionLost, match=f"the server at {fake.address} was lost") as caught:
            list(stream)
        assert caught.value.retry_after == 1.0
        assert caught.value.request_id == stream.request_id
        with pytest.raises(loraplex.ServerUnreachable, match="Connection refused") as caught_later:
            client.info(timeout_s=5)
        assert caught_later.value.retry_after == 1.0


def test_nobody_is_told_of_a_cancellation_that_is_not_theirs(connect: Connect, fake: Any) -> None:
    fake.bare_code = grpc.StatusCode.CANCELLED
    with connect(fake.address) as client:
        with pytest.raises(loraplex.ConnectionLost, match="send the request again"):
            client.generate("a")
        with pytest.raises(loraplex.ConnectionLost):
            list(client.stream("a"))
        fake.delay_s = 0.1
        with pytest.raises(loraplex.DeadlineExceeded, match=r"no complete answer within 0\.13 s"):
            client.generate("a", timeout_s=0.13)


# --- ending a stream early ------------------------------------------------------------------------------------------


def test_closing_a_stream_cancels(connect: Connect, fake: Any) -> None:
    fake.is_endless = True
    with connect(fake.address) as client:
        stream = client.stream("a")
        assert next(stream).text == "x"
        stream.close()
        assert fake.cancelled.wait(3)
        stream.close()
        assert list(stream) == []
        assert client.info().model_id == "m", "the client goes on"
    num_sent = fake.num_sent
    time.sleep(0.05)
    assert fake.num_sent == num_sent


def test_leaving_the_block_cancels(connect: Connect, fake: Any) -> None:
    fake.is_endless = True
    with connect(fake.address) as client:
        with client.stream("a") as stream:
            next(stream)
        assert fake.cancelled.wait(3)


def test_closing_the_client_ends_its_streams(connect: Connect, fake: Any) -> None:
    fake.is_endless = True
    client = connect(fake.address)
    stream = client.stream("a")
    next(stream)
    client.close()
    assert fake.cancelled.wait(3)
    with pytest.raises(loraplex.Cancelled) as caught:
        for _ in stream:  # what had arrived may still be read
            pass
    assert caught.value.request_id == stream.request_id
    assert list(stream) == []


async def test_closing_the_client_is_no_cancellation_of_who_waits(fake: Any) -> None:
    fake.delay_s = 30.0
    records: list[loraplex.CallRecord] = []
    client = AsyncClient(fake.address, on_call=records.append)
    stream = client.stream("a", request_id="s")
    waiting = [asyncio.ensure_future(one) for one in (client.generate("a", request_id="g"), anext(stream))]
    await asyncio.to_thread(fake.arrived.wait, 5)
    await asyncio.sleep(0.05)
    await client.close()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [(type(end), end.request_id) for end in ends] == [(loraplex.Cancelled, "g"), (loraplex.Cancelled, "s")]
    assert {record.request_id: record.error for record in records} == dict(zip("gs", ends, strict=True))


def test_a_client_is_of_one_event_loop(fake: Any) -> None:
    client = loraplex.AsyncClient(fake.address)

    async def infos() -> Any:
        return await client.info()

    async def streamed() -> Any:
        return [chunk async for chunk in client.stream("a")]

    assert asyncio.run(infos()).model_id
    for again in (infos, streamed):
        with pytest.raises(errors.FailedPrecondition, match="make a client in each"):
            asyncio.run(again())
    with pytest.raises(errors.FailedPrecondition, match="no event loop is running"):
        client.stream("a")
    asyncio.run(client.close())


async def test_who_is_cancelled_stays_so(fake: Any) -> None:
    fake.delay_s = 30.0
    records: list[loraplex.CallRecord] = []
    async with AsyncClient(fake.address, on_call=records.append) as client:
        stream = client.stream("a")
        for call in (client.generate("a"), anext(stream)):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await call
            assert "its task was cancelled" in str(records[-1].error)
        await stream.aclose()
    assert [type(record.error) for record in records] == [loraplex.Cancelled] * 2


async def test_a_task_that_is_cancelled_behind_the_end_of_its_stream_records_nothing(fake: Any) -> None:
    fake.delay_s = 30.0
    records: list[loraplex.CallRecord] = []
    async with AsyncClient(fake.address, on_call=records.append) as client:
        stream = client.stream("a")
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(fake.arrived.wait, 5)
        await stream.aclose()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert [record.error for record in records] == [None]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "headers must give names and values, not None"),
        ({"X y": "z"}, "headers gave the name 'X y'"),
        ({3: "z"}, "headers gave the name 3"),
        ({"X-Bin": "z"}, "headers gave the name 'X-Bin'"),
        ({"grpc-status": "5"}, "headers gave the name 'grpc-status'"),
        ({"x": "\n"}, "the value of the header 'x' must be printable ASCII"),
        ({"x": 3}, "the value of the header 'x' must be printable ASCII"),
    ],
)
def test_headers_that_cannot_be_sent_are_refused(fake: Any, given: Any, says: str) -> None:
    with Client(fake.address, headers=lambda: given) as client, pytest.raises(loraplex.InvalidArgument, match=says):
        client.generate("a")


@pytest.mark.parametrize("hook", [{"headers": {"x": "y"}}, {"on_call": 3}])
def test_a_hook_is_a_function(hook: dict[str, Any]) -> None:
    with pytest.raises(loraplex.InvalidArgument, match="takes a function, not"):
        Client("a:1", **hook)


def test_retries_are_whole() -> None:
    with pytest.raises(loraplex.InvalidArgument, match=r"not 1\.5"):
        Client("a:1", retries=1.5)  # type: ignore[arg-type]


def test_ctrl_c_ends_a_stream_that_a_traceback_keeps(fake: Any) -> None:
    fake.delay_s = 30.0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's processes ignore it
    try:
        with Client(fake.address) as client:
            stream = client.stream("a")
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                next(stream)
            assert fake.cancelled.wait(5)
    finally:
        signal.signal(signal.SIGINT, before)


async def test_a_stream_that_nobody_reads_any_more_is_cancelled(fake: Any) -> None:
    fake.is_endless = True
    records: list[loraplex.CallRecord] = []
    async with AsyncClient(fake.address, on_call=records.append) as client:
        async for _ in client.stream("a"):
            break
        assert await asyncio.to_thread(fake.cancelled.wait, 5)
        assert len(records) == 1


def test_threads_share_a_stream(fake: Any) -> None:
    fake.chunks = [GenerateStreamResponse(text_delta=str(number)) for number in range(50)]
    with Client(fake.address) as client, client.stream("a") as stream, ThreadPoolExecutor(4) as pool:
        read = [pool.submit(lambda: [chunk.text for chunk in stream]) for _ in range(4)]
        texts = [text for one in read for text in one.result(10)]
    assert sorted(texts, key=int) == [str(number) for number in range(50)]


async def test_tasks_share_a_stream(fake: Any) -> None:
    fake.is_endless = True
    async with AsyncClient(fake.address, timeout_s=3) as client, client.stream("a") as stream:
        chunks = await asyncio.gather(*(anext(stream) for _ in range(4)))
    assert [chunk.text for chunk in chunks] == ["x"] * 4


class Nonsense(grpc.GenericRpcHandler):
    """Answers every call with bytes that are no message."""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        if handler_call_details.method.endswith("Stream"):
            return grpc.unary_stream_rpc_method_handler(lambda request, context: iter([b"\xff"]))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"\xff")


def test_an_answer_that_cannot_be_read_is_typed(connect: Connect) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Nonsense(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    records: list[loraplex.CallRecord] = []
    with connect(address, on_call=records.append) as client:
        with pytest.raises(errors.Internal, match=f"the answer of the server at {address} cannot be read") as caught:
            client.generate("a", request_id="r")
        assert caught.value.request_id == "r"
        assert [record.error for record in records] == [caught.value]
        records.clear()
        with pytest.raises(errors.Internal, match="cannot be read") as caught:
            next(client.stream("a"))
        assert [record.error for record in records] == [caught.value]
    server.stop(None)


def test_the_time_that_headers_take_is_the_calls(connect: Connect, fake: Any) -> None:
    def headers() -> dict[str, str]:
        time.sleep(0.3)
        return {}

    with connect(fake.address, headers=headers) as client:
        client.generate("a", timeout_s=30)
        assert fake.seen[0].time_remaining_s < 29.8
        with pytest.raises(errors.DeadlineExceeded, match=r"no complete answer within 0\.2 s"):
            client.generate("a", timeout_s=0.2)
    assert len(fake.seen) == 1


FORKING = """
import os, sys, loraplex

def exit_code_of_child(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def ask():
    os._exit(7 if client.info().model_id == "m" else 1)

def leave():
    try:
        next(stream)
    except loraplex.FailedPrecondition:
        client.close()
        os._exit(8)

client = loraplex.Client(sys.argv[1], timeout_s=20)
client.info()
print(exit_code_of_child(ask), client.info().model_id)
stream = client.stream("a")
next(stream)
print(exit_code_of_child(leave), next(stream).text, client.info().model_id)
os._exit(0 if sys.stdout.flush() is None else 1)
"""


def test_a_child_of_a_fork_leaves_the_parents_calls_alone(fake: Any) -> None:
    fake.is_endless = True
    ran = subprocess.run(
        [sys.executable, "-c", FORKING, fake.address], capture_output=True, text=True, timeout=30, check=False
    )
    assert ran.stdout.splitlines() == ["7 m", "8 x m"], ran.stderr
