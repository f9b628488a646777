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

import pytest
from support.tiny_tokenizers import tiny_tokenizer
from tokenizers import Tokenizer, normalizers

from loraplex_contracts.errors import ContextLengthExceeded, Internal, InvalidArgument, LoraplexError, OutOfMemory
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.validate import ModelLimits
from loraplex_runtime.shutdown import SIGNALS
from loraplex_server.frontend.tokenizing import HUNG_S, LONG_BYTES, Tokenizing
from loraplex_server.grpc.protobuf import tokenize_response
from loraplex_server.text.tokenizer import SHORT_CHARS, TextTokenizer

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


def children() -> list[str]:
    return [child.name for child in multiprocessing.active_children() if child.name == "loraplex-tokenizer"]


async def gone() -> None:
    end_s = time.monotonic() + 10
    while children():
        assert time.monotonic() < end_s, "the process is still there"
        await asyncio.sleep(0.02)


async def test_the_same_ids_wherever_they_are_made(tokenizing: Tokenizing) -> None:
    plain = text_tokenizer()
    for text in (SHORT, MIDDLE, LONG, LONG + "naïve 你好 [tool] <|turn|>"):
        ids = plain.encode(text)
        assert list(await tokenizing.encode(text)) == ids
        assert list(await tokenizing.encode(text, special=False)) == ids[1:]
        answer = inference_pb2.TokenizeResponse.FromString(await tokenizing.tokenize(text, tokenize_response))
        assert list(answer.token_ids) == ids
        assert list(answer.tokens) == list(map(plain.token_text, ids))
        messages = [{"role": "user", "content": text}]
        assert list(await tokenizing.encode_chat(messages)) == plain.encode_chat(messages)
        chat = inference_pb2.TokenizeResponse.FromString(await tokenizing.tokenize_chat(messages, tokenize_response))
        assert list(chat.token_ids) == plain.encode_chat(messages)
        assert await tokenizing.decode(ids) == plain.decode(ids)
    assert len(children()) == 1


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


async def test_whoever_leaves_ends_the_process_and_the_next_one_is_served(
    tokenizing: Tokenizing, caplog: pytest.LogCaptureFixture
) -> None:
    text = LONG * 30
    tasks = [asyncio.ensure_future(tokenizing.encode(text)) for _ in range(4)]
    while not children():
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
    await gone()
    assert list(await tokenizing.encode(LONG)) == text_tokenizer().encode(LONG)
    del tasks, task
    gc.collect()
    assert not caplog.records


async def test_a_process_that_dies_fails_its_text_and_no_other(tokenizing: Tokenizing) -> None:
    first, second = (asyncio.ensure_future(tokenizing.encode(LONG + suffix)) for suffix in "ab")
    while tokenizing._process is None or tokenizing._process._process is None:
        await asyncio.sleep(0.001)
    tokenizing._process._process.kill()
    with pytest.raises(OutOfMemory):
        await first
    assert list(await second) == text_tokenizer().encode(LONG + "b")


async def running(tokenizing: Tokenizing) -> int:
    """The process's id, as soon as it has its text."""
    while tokenizing._process is None or tokenizing._process._conn is None:
        await asyncio.sleep(0.001)
    return tokenizing._process._process.pid


async def test_a_process_that_is_frozen_fails_its_text_and_no_other() -> None:
    one = Tokenizing(text_tokenizer(), LIMITS, hung_s=0.5)
    first, second = (asyncio.ensure_future(one.encode(LONG + suffix)) for suffix in "ab")
    os.kill(await running(one), signal.SIGSTOP)
    with pytest.raises(Internal):
        await first
    one._hung_s = HUNG_S
    assert list(await second) == text_tokenizer().encode(LONG + "b")
    await one.close()


async def test_signals_to_the_whole_group_are_for_the_front_end_alone(tokenizing: Tokenizing) -> None:
    encoding = asyncio.ensure_future(tokenizing.encode(LONG))
    pid = await running(tokenizing)
    for number in SIGNALS:
        os.kill(pid, number)
    assert list(await encoding) == text_tokenizer().encode(LONG)


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
