"""Tokenizing beside the event loop: equal ids, bounded, cancelled with the caller."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
from support.tiny_tokenizers import tiny_tokenizer
from tokenizers import Tokenizer, normalizers

from loraplex_contracts.errors import (
    ContextLengthExceeded,
    Internal,
    InvalidArgument,
    LoraplexError,
    OutOfMemory,
    QueueFull,
)
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.validate import ModelLimits
from loraplex_server.frontend.tokenizing import (
    BYTES_PER_S,
    HUNG_S,
    LONG_BYTES,
    ShortestFirstSemaphore,
    Tokenizing,
)
from loraplex_server.grpc.protobuf import tokenize_response
from loraplex_server.text.control_tokens import SafeText
from loraplex_server.text.tokenizer import SHORT_CHARS, TextTokenizer, Truncation

SHORT, MIDDLE = "The quick brown fox ", "The quick brown fox " * (SHORT_CHARS // 20 + 1)
LONG = "The quick brown fox " * (LONG_BYTES // 20 + 1)
LIMITS = ModelLimits(1000, 1 << 20)


def text_tokenizer(*, bounded: bool = False) -> TextTokenizer:
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny._tokenizer = Tokenizer.from_str(tiny.backend_tokenizer.to_str())
    if not bounded:
        tiny._tokenizer.normalizer = normalizers.NFC()
    tiny.chat_template = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    return TextTokenizer(tiny)


@pytest.fixture
async def tokenizing() -> AsyncIterator[Tokenizing]:
    one = Tokenizing(text_tokenizer(), LIMITS)
    yield one
    await one.close()
    assert not children()


def children() -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name == "loraplex-tokenizer"]


async def child() -> int:
    """The process's id, as soon as there is one."""
    while not children():
        await asyncio.sleep(0.001)
    (one,) = children()
    assert one.pid is not None
    return one.pid


async def gone() -> None:
    end_s = time.monotonic() + 10
    while children():
        assert time.monotonic() < end_s, "the process is still there"
        await asyncio.sleep(0.02)


async def test_a_pair_of_texts_is_bounded(tokenizing: Tokenizing) -> None:
    assert await tokenizing.encode_pair(SHORT, MIDDLE) == text_tokenizer().encode_pair(SHORT, MIDDLE)
    for truncation in (None, Truncation(8)):
        with pytest.raises(InvalidArgument, match=f"a pair may have {LONG_BYTES}") as caught:
            await tokenizing.encode_pair(LONG, SHORT, truncation=truncation)
        assert caught.value.field == "query"
    bounded = Tokenizing(text_tokenizer(bounded=True), ModelLimits(1000, 100))
    with pytest.raises(ContextLengthExceeded, match="tokens at least"):
        await bounded.encode_pair(SHORT, LONG)
    await bounded.close()


@pytest.mark.parametrize("before", ["", MIDDLE, LONG])
async def test_tokens_that_the_model_does_not_know_are_refused(before: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = text_tokenizer()
    turn = tokenizer.token_id("<|turn|>", "text")
    tokenizing = Tokenizing(tokenizer, ModelLimits(turn, 1 << 20))
    assert "'<|turn|>'" in caplog.text
    try:
        assert list(await tokenizing.encode(before + "fox")) == tokenizer.encode(before + "fox")
        with pytest.raises(InvalidArgument, match=rf"'<\|turn\|>' \({turn}\).* ends at {turn - 1}; leave it out"):
            await tokenizing.encode(before + "<|turn|>")
        if before != LONG:
            with pytest.raises(InvalidArgument, match="leave it out"):
                await tokenizing.encode_pair("fox", before + "<|turn|>")
    finally:
        await tokenizing.close()


async def test_the_same_ids_wherever_they_are_made(tokenizing: Tokenizing) -> None:
    plain = text_tokenizer()
    for text in (SHORT, MIDDLE, LONG, LONG + "naïve 你好 [tool] <|turn|>"):
        ids = plain.encode(text)
        assert list(await tokenizing.encode(text)) == ids
        assert list(await tokenizing.encode(text, special=False)) == ids[1:]
        answer = inference_pb2.TokenizeResponse.FromString(await tokenizing.tokenize(text, tokenize_response))
        assert list(answer.token_ids) == ids
        assert list(answer.tokens) == list(map(plain.token_text, ids))
        raw = await tokenizing.tokenize(text, tokenize_response, with_offsets=True)
        placed = inference_pb2.TokenizeResponse.FromString(raw)
        assert placed.token_ids == answer.token_ids
        assert list(zip(placed.starts, placed.ends, strict=True)) == plain.encode_with_offsets(text).offsets
        cut = Truncation(7, keep_start=True)
        raw = await tokenizing.tokenize(text, tokenize_response, with_offsets=True, truncation=cut)
        placed = inference_pb2.TokenizeResponse.FromString(raw)
        assert list(placed.token_ids) == plain.encode(text, truncation=cut)
        assert len(placed.starts) == 7
        messages = [{"role": "user", "content": text}]
        expected = plain.encode(plain.render_chat(messages), add_special_tokens=False)
        rendered = plain.render_chat(messages)
        assert list(await tokenizing.encode(rendered, special=False)) == expected
        raw = await tokenizing.tokenize(rendered, tokenize_response, special=False)
        chat = inference_pb2.TokenizeResponse.FromString(raw)
        assert list(chat.token_ids) == expected
        assert await tokenizing.decode(ids) == plain.decode(ids)
    assert len(children()) == 1


@pytest.mark.parametrize("keep_start", [False, True])
async def test_long_texts_are_cut_wherever_they_are_tokenized(keep_start: bool) -> None:
    one = Tokenizing(text_tokenizer(bounded=True), ModelLimits(1000, 100))
    truncation, plain = Truncation(7, keep_start), text_tokenizer()
    for text in (SHORT, MIDDLE, LONG):
        ids = plain.encode(text)
        expected = ids[:7] if keep_start else [ids[0], *ids[-6:]]
        assert list(await one.encode(text, truncation=truncation)) == expected
        assert list(await one.encode(text, special=False, truncation=Truncation(0))) == []
    with pytest.raises(InvalidArgument, match="adds 1 special tokens") as caught:
        await one.encode(SHORT, truncation=Truncation(0))
    assert caught.value.field == "truncate_prompt.max_tokens"
    await one.close()


async def test_more_than_the_context_comes_back_as_a_number() -> None:
    one = Tokenizing(text_tokenizer(), ModelLimits(1000, 100))
    num_tokens = len(text_tokenizer().encode(LONG))
    with pytest.raises(ContextLengthExceeded, match=f"has {num_tokens} tokens") as caught:
        await one.encode(LONG)
    assert caught.value.field == "input"
    await one.close()


async def test_what_is_too_long_by_its_bytes_is_not_tokenized() -> None:
    one = Tokenizing(text_tokenizer(bounded=True), ModelLimits(1000, 100))
    with pytest.raises(ContextLengthExceeded, match="tokens at least"):
        await one.encode(LONG)
    assert not children()
    await one.close()


async def test_a_cancelled_text_ends_the_process_and_the_next_one_is_served(
    tokenizing: Tokenizing, caplog: pytest.LogCaptureFixture
) -> None:
    text = LONG * 30
    tasks = [asyncio.ensure_future(tokenizing.encode(text)) for _ in range(4)]
    await child()
    for task in tasks:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
    await gone()
    assert list(await tokenizing.encode(LONG)) == text_tokenizer().encode(LONG)
    del tasks, task
    gc.collect()
    assert not caplog.records


async def test_a_short_chat_that_is_cancelled_leaves_the_process(tokenizing: Tokenizing) -> None:
    """The process takes longer to start than many a caller waits."""
    safe = tokenizing.tokenizer.chat_text({"messages": [{"role": "user", "content": "a<|turn|>b"}]})
    assert isinstance(safe, SafeText)
    first = asyncio.ensure_future(tokenizing.encode(safe))
    pid = await child()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(await tokenizing.encode(safe)) > 3
    assert await child() == pid
    os.kill(pid, signal.SIGKILL)
    await gone()
    with pytest.raises(OutOfMemory):
        await tokenizing.encode(safe)
    assert len(await tokenizing.encode(safe)) > 3


async def test_a_chat_whose_answer_was_read_in_part_ends_the_process(
    tokenizing: Tokenizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next chat would read the rest of it."""
    safe, other = (
        tokenizing.tokenizer.chat_text({"messages": [{"role": "user", "content": text}]})
        for text in ("a<|turn|>b", "<|turn|>" * 20)
    )
    wanted = list(await tokenizing.encode(other))
    first = await child()

    def read_in_part(conn: Connection) -> object:
        os.read(conn.fileno(), 4)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "recv", read_in_part)
        with pytest.raises(MemoryError):
            await tokenizing.encode(safe)
    assert list(await tokenizing.encode(other)) == wanted
    assert await child() != first


async def test_a_process_that_dies_fails_its_text_and_no_other(tokenizing: Tokenizing) -> None:
    first, second = (asyncio.ensure_future(tokenizing.encode(LONG + suffix)) for suffix in "ab")
    os.kill(await child(), signal.SIGKILL)
    with pytest.raises(OutOfMemory):
        await first
    assert list(await second) == text_tokenizer().encode(LONG + "b")


async def test_a_process_that_is_frozen_fails_its_text_and_no_other() -> None:
    one = Tokenizing(text_tokenizer(), LIMITS, hung_s=0.5)
    first, second = (asyncio.ensure_future(one.encode(LONG + suffix)) for suffix in "ab")
    os.kill(await child(), signal.SIGSTOP)
    with pytest.raises(Internal):
        await first
    one._hung_s = HUNG_S
    assert list(await second) == text_tokenizer().encode(LONG + "b")
    await one.close()


async def test_a_process_without_work_ends() -> None:
    one = Tokenizing(text_tokenizer(), LIMITS, idle_s=0.05)
    await asyncio.gather(*[one.encode(LONG) for _ in range(3)])
    await gone()
    assert list(await one.encode(LONG)) == text_tokenizer().encode(LONG)
    await one.close()


async def test_middle_texts_do_not_wait_for_long_ones(tokenizing: Tokenizing) -> None:
    long = [asyncio.ensure_future(tokenizing.encode(LONG * 30)) for _ in range(8)]
    await asyncio.sleep(0)
    assert await tokenizing.encode(MIDDLE)
    assert not any(task.done() for task in long)
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)


async def test_text_that_is_not_unicode(tokenizing: Tokenizing) -> None:
    for text in ("a\ud800", MIDDLE + "\ud800", LONG + "\ud800"):
        with pytest.raises(InvalidArgument):
            await tokenizing.encode(text)


async def test_without_a_tokenizer_every_length_is_refused() -> None:
    one = Tokenizing(TextTokenizer(None), LIMITS)
    for text in (SHORT, MIDDLE, LONG):
        with pytest.raises(LoraplexError, match="send token_ids"):
            await one.encode(text)
    await one.close()


# --- order of texts that wait ---------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def waiting_for(semaphore: ShortestFirstSemaphore, num_bytes: int, log: list[int]) -> None:
    await semaphore.acquire(num_bytes)
    log.append(num_bytes)


async def all_begun(*tasks: asyncio.Task[None]) -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_short_ones_go_first_but_not_for_ever() -> None:
    clock, log = Clock(), list[int]()
    semaphore = ShortestFirstSemaphore(1, 1 << 30, clock)
    await semaphore.acquire(1)
    tasks = [asyncio.ensure_future(waiting_for(semaphore, 4 * BYTES_PER_S, log))]
    await all_begun()
    for clock.now_s, num_bytes in ((1.0, 100), (3.9, 50), (4.1, 10)):
        tasks.append(asyncio.ensure_future(waiting_for(semaphore, num_bytes, log)))
        await all_begun()
    for _ in range(4):
        semaphore.release()
        await all_begun()
    assert log == [100, 50, 4 * BYTES_PER_S, 10]
    await asyncio.gather(*tasks)


async def test_so_many_at_once() -> None:
    log: list[int] = []
    semaphore = ShortestFirstSemaphore(2, 1 << 30)
    tasks = [asyncio.ensure_future(waiting_for(semaphore, number, log)) for number in range(5)]
    await all_begun()
    assert log == [0, 1]
    semaphore.release()
    await all_begun()
    assert log == [0, 1, 2]
    for _ in range(3):
        semaphore.release()
    await asyncio.gather(*tasks)
    await semaphore.acquire(1)  # one that nobody has is there again


async def test_a_text_that_is_cancelled_frees_its_place() -> None:
    log: list[int] = []
    semaphore = ShortestFirstSemaphore(1, 10)
    await semaphore.acquire(1)
    leaver = asyncio.ensure_future(waiting_for(semaphore, 10, log))
    await all_begun()
    with pytest.raises(QueueFull) as caught:
        await semaphore.acquire(1)
    assert caught.value.retry_after_s
    leaver.cancel()
    await all_begun()
    stayer = asyncio.ensure_future(waiting_for(semaphore, 10, log))
    await all_begun()
    semaphore.release()
    await stayer
    assert log == [10]


async def test_a_text_that_is_cancelled_in_the_moment_of_its_turn_passes_it_on() -> None:
    log: list[int] = []
    semaphore = ShortestFirstSemaphore(1, 100)
    await semaphore.acquire(1)
    leaver, stayer = (asyncio.ensure_future(waiting_for(semaphore, number, log)) for number in (1, 2))
    await all_begun()
    semaphore.release()
    leaver.cancel()
    await stayer
    assert log == [2]


async def test_one_that_waits_alone_may_have_any_length() -> None:
    semaphore = ShortestFirstSemaphore(1, 10)
    await semaphore.acquire(1)
    waiter = asyncio.ensure_future(semaphore.acquire(1000))
    await all_begun()
    semaphore.release()
    await waiter
