"""Generation from submission to the terminal event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest
from support.engine_fakes import FakeCache, build_fake, build_slow, make_engine

from loraplex_contracts.errors import AdapterNotFound, DeadlineExceeded
from loraplex_contracts.request import CompletionEnd, FinishReason, PositionLogprobs, Request, StoppingParams, Tokens
from loraplex_server.config import EngineConfig, ModelConfig
from loraplex_server.engine.client import EngineClient
from loraplex_server.engine.engine import Engine
from loraplex_server.frontend.generation import CompletionAssembler, Delta, Drafts, Progress, _coalesce, generate
from loraplex_server.text.detokenizer import StopMatcher
from loraplex_server.text.tokenizer import TextTokenizer


class Letters:
    """A detokenizer: token 10 is 'a', 11 is 'b', ...; it holds the last letter back."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        text = self._held + "".join(chr(ord("a") + (i - 10) % 26) for i in token_ids)
        self._held = text[-1:]
        return text[:-1]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class LetterTokenizer(TextTokenizer):
    def __init__(self) -> None:
        super().__init__(None)

    def new_detokenizer(
        self, prompt_ids: Sequence[int], dropped_ids: frozenset[int] = frozenset(), *, keep_special: bool = False
    ) -> Letters:
        return Letters()

    def new_stop_matcher(self, stopping: StoppingParams) -> StopMatcher | None:
        return StopMatcher(stopping.stop) if stopping.stop else None

    def token_text(self, token_id: int) -> str:
        return str(token_id)


TOKENIZER = LetterTokenizer()


def tokens(*ids: int, drafted: int = 0, accepted: int = 0, proposer: str = "medusa") -> Tokens:
    logprobs = tuple(PositionLogprobs(i, -0.5, ((i, -0.5),)) for i in ids)
    return Tokens("r", 0, ids, logprobs, drafted, accepted, proposer)


END = CompletionEnd("r", 0, FinishReason.LENGTH, None, 3, 2)


def made(stop: tuple[str, ...] = ()) -> CompletionAssembler:
    request = Request("r", (1,), StoppingParams(max_tokens=9, stop=stop))
    return CompletionAssembler(request, 0, TOKENIZER, ())


def test_tokens_of_several_steps_count_as_such() -> None:
    completion = made()
    completion.push(tokens(10))
    completion.push(Tokens("r", 0, (11, 12, 13), num_steps=2))
    end = completion.end(END).end
    assert end is not None
    assert (end.num_completion_tokens, end.num_steps) == (4, 3)


def test_what_is_held_back_comes_at_the_end() -> None:
    one = made()
    assert one.push(tokens(10, 11)).text == "a"
    last = one.end(END)
    assert last.text == "b"
    assert last.end is not None
    assert (last.end.num_completion_tokens, last.end.num_prompt_tokens, last.end.num_cached_tokens) == (2, 3, 2)
    assert last.end.reason is FinishReason.LENGTH


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    one = made(stop=("bc",))
    delta = one.push(tokens(10, 11, 12, 13, 14, 15, drafted=5, accepted=5))
    assert one.is_stopped
    assert delta.text == "a"
    assert len(delta.token_ids) == len(delta.logprobs) == 4  # the letter held back came with the fourth
    assert one.push(tokens(16)) == Delta(0)
    end = one.end(END).end
    assert end is not None
    assert (end.reason, end.stop_string, end.num_completion_tokens) == (FinishReason.STOP, "bc", 4)
    assert end.drafts == (Drafts("medusa", 5, 4),), "what is dropped does not count as accepted"
    assert end.num_steps == 1


def test_a_stop_string_completed_by_what_was_held_back() -> None:
    one = made(stop=("b",))
    assert one.push(tokens(10, 11)).text == "a"
    assert not one.is_stopped
    end = one.end(END).end
    assert end is not None
    assert (end.reason, end.stop_string) == (FinishReason.STOP, "b")


def test_drafts_are_counted_by_proposer() -> None:
    one = made()
    deltas = [
        one.push(tokens(10)),
        one.push(tokens(11, 12, drafted=3, accepted=1, proposer="prompt_lookup")),
        one.push(tokens(13, drafted=2, accepted=0)),
        one.push(tokens(14, 15, 16, drafted=2, accepted=2)),
    ]
    assert [(d.proposer, d.num_drafted, d.num_accepted) for d in deltas] == [
        ("", 0, 0),
        ("prompt_lookup", 3, 1),
        ("medusa", 2, 0),
        ("medusa", 2, 2),
    ]
    end = one.end(END).end
    assert end is not None
    assert end.drafts == (Drafts("medusa", 4, 2), Drafts("prompt_lookup", 3, 1))
    assert (end.num_completion_tokens, end.num_steps) == (7, 4)


def test_without_drafts_there_are_no_proposers() -> None:
    one = made()
    one.push(tokens(10))
    end = one.end(END).end
    assert end is not None
    assert (end.drafts, end.num_steps) == ((), 1)


def test_what_piled_up_is_one_delta_per_proposer() -> None:
    def delta(index: int, token: int, proposer: str = "") -> Delta:
        num = 2 if proposer else 0
        return Delta(index, str(token), (token,), num_drafted=num, num_accepted=num // 2, proposer=proposer)

    merged = _coalesce(
        [
            delta(0, 1),
            delta(1, 2, "medusa"),
            delta(0, 3, "medusa"),
            delta(0, 4, "medusa"),
            delta(0, 5),
            delta(0, 6, "prompt_lookup"),
            delta(0, 7),
            delta(1, 8, "medusa"),
        ]
    )
    rows = {
        i: [(d.token_ids, d.proposer, d.num_drafted, d.num_accepted) for d in merged if d.index == i] for i in (0, 1)
    }
    assert rows == {
        0: [((1, 3, 4, 5), "medusa", 4, 2), ((6, 7), "prompt_lookup", 2, 1)],
        1: [((2, 8), "medusa", 4, 2)],
    }


async def test_a_slow_reader_still_gets_the_last_word() -> None:
    """The end may arrive while the reader is busy with what came before it."""
    client = EngineClient(EngineConfig(ModelConfig("fake")))
    await client.start(inline=True, builder=build_slow)
    try:
        request = Request("r", (20, 21, 22), StoppingParams(max_tokens=12), n=2)
        deltas: list[Delta] = []
        async with aclosing(generate(client, request, TOKENIZER, (), Progress())) as batches:
            async for batch in batches:
                deltas += batch
                await asyncio.sleep(0.05)  # several steps pass
        for index in (0, 1):
            mine = [delta for delta in deltas if delta.index == index]
            assert sum(len(delta.token_ids) for delta in mine) == 12
            assert mine[-1].end is not None
    finally:
        await client.stop()


async def test_leaving_early_cancels_and_failures_raise() -> None:
    client = EngineClient(EngineConfig(ModelConfig("fake")))
    await client.start(inline=True, builder=build_fake)
    try:
        request = Request("r", (20, 21, 22), StoppingParams(max_tokens=200))
        async with aclosing(generate(client, request, TOKENIZER, (), Progress())) as batches:
            await anext(batches)
        bad = Request("s", (20,), StoppingParams(max_tokens=4), adapter_id="zzz")
        with pytest.raises(AdapterNotFound):
            async for _ in generate(client, bad, TOKENIZER, (), Progress()):
                pass
    finally:
        await client.stop()
    assert client.integrity == ""


def build_without_adapters(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
    """An engine whose adapters never come."""
    return make_engine(cache=FakeCache(delay=1 << 40), clock=time.monotonic)


async def test_the_record_has_the_waits_of_a_request_that_never_began() -> None:
    client = EngineClient(EngineConfig(ModelConfig("fake")))
    await client.start(inline=True, builder=build_without_adapters)
    try:
        now, progress = time.monotonic(), Progress()
        request = Request("r", (20,), StoppingParams(max_tokens=4), adapter_id="a", arrival_s=now, deadline_s=now + 0.2)
        with pytest.raises(DeadlineExceeded):
            async for _ in generate(client, request, TOKENIZER, (), progress):
                pass
        assert progress.record.queue_s is None
        assert progress.record.waited_s is not None
        assert progress.record.waited_s >= 0.2
        assert progress.record.adapter_wait_s > 0.1
    finally:
        await client.stop()
