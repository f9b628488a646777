"""Generation from submission to the terminal event."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.engine_fakes import FakeCache, build_fake, build_slow, make_engine
from support.tiny_tokenizers import KINDS, tiny_tokenizer
from transformers import StopStringCriteria

from loraplex_contracts.errors import AdapterNotFound, DeadlineExceeded, InvalidArgument
from loraplex_contracts.request import (
    CompletionEnd,
    Event,
    FinishReason,
    OutputParams,
    PositionLogprobs,
    Request,
    RequestFailed,
    StoppingParams,
    Tokens,
)
from loraplex_server.config import EngineConfig, ModelConfig
from loraplex_server.engine.client import EngineClient, RequestStream
from loraplex_server.engine.engine import Engine
from loraplex_server.frontend.generation import CompletionAssembler, Delta, Drafts, Progress, _coalesce, generate
from loraplex_server.text.detokenizer import StopMatcher
from loraplex_server.text.response_template import ResponseFormat
from loraplex_server.text.responses import ResponseParsing
from loraplex_server.text.tokenizer import TextTokenizer


class Letters:
    """A detokenizer: token 10 is 'a', 11 is 'b', ...; it holds the last letter back."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        text = self._held + "".join(chr(ord("a") + (i - 10) % 26) for i in token_ids)
        self._held = text[-1:]
        return text[:-1]

    def pending(self) -> str:
        return ""

    def take_unfinished(self) -> str:
        return ""

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

    def new_stop_matcher(
        self, stopping: StoppingParams, ending_ids: Collection[int] = frozenset()
    ) -> StopMatcher | None:
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


def assembled(
    kind: str,
    ids: Sequence[int],
    *stops: str,
    prompt: Sequence[int] = (),
    chunk: int = 1,
    keep_special: bool = False,
    **more: Any,
) -> tuple[str, int, str | None]:
    """Text, number of tokens, and stop string of a completion that brings `chunk` tokens at a time."""
    tokenizer = tiny_tokenizer(kind)
    prompt = tuple(prompt) or tuple(tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids)
    stopping = StoppingParams(max_tokens=len(ids), stop=stops, **more)
    request = Request("r", prompt, stopping, output=OutputParams(keep_special_tokens=keep_special))
    one = CompletionAssembler(request, 0, TextTokenizer(tokenizer), (tokenizer.eos_token_id,))
    text = "".join(one.push(tokens(*ids[at : at + chunk])).text for at in range(0, len(ids), chunk))
    last = one.end(END)
    assert last.end is not None
    return text + last.text, last.end.num_completion_tokens, last.end.stop_string


class TestByteRuns:
    """Stop strings in runs of byte tokens: a newline is `<0x0A>` in Llama 2's vocabulary and in Mistral's."""

    backend = tiny_tokenizer("llama_bpe").backend_tokenizer

    def ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def run(self, data: bytes) -> list[int]:
        found = [self.backend.token_to_id(f"<0x{value:02X}>") for value in data]
        assert None not in found
        return found

    def found(self, ids: Sequence[int], *stops: str, **more: Any) -> tuple[str, int, str | None]:
        return assembled("llama_bpe", ids, *stops, **more)

    @pytest.mark.parametrize("chunk", [1, 3, 100])
    def test_the_text_ends_with_the_token_that_completes_one(self, chunk: int) -> None:
        fox = self.ids("fox")
        ids = [*fox, *self.run(b"\n\n"), *fox]
        assert self.found(ids, "\n", chunk=chunk) == (" fox", len(fox) + 1, "\n")
        assert self.found(ids, "x\n", chunk=chunk) == (" fo", len(fox) + 1, "x\n")
        assert self.found(ids, "\n\n", chunk=chunk) == (" fox", len(fox) + 2, "\n\n")
        assert self.found(ids, "\n", chunk=chunk, include_stop=True) == (" fox\n", len(fox) + 1, "\n")
        ids = self.run("漢字。後".encode())
        assert self.found(ids, "字。", chunk=chunk) == ("漢", 9, "字。")
        assert self.found([*ids, *fox], "後 fo", chunk=chunk)[0] == "漢字。"

    @pytest.mark.parametrize("min_tokens", range(6))
    def test_each_character_counts_for_the_token_that_brought_it(self, min_tokens: int) -> None:
        newline, turn = self.run(b"\n")[0], self.backend.token_to_id("<|turn|>")
        letter = self.ids("fox")[-1]
        ids = [letter, newline, turn, newline, letter]
        found = self.found(ids, "\n", min_tokens=min_tokens)
        if min_tokens < 4:
            num_tokens = 2 if min_tokens < 2 else 4
            assert found[1:] == (num_tokens, "\n")
            assert found[0].count("\n") == num_tokens // 2 - 1
        else:
            assert found[1:] == (5, None)

    def test_a_run_that_becomes_invalid_behind_it(self) -> None:
        assert self.found(self.run(b"A\n\xff"), "\n") == ("A", 2, "\n")
        # Before min_tokens it was no stop string, and the text has none later.
        assert self.found(self.run(b"A\n\xff"), "\n", min_tokens=2) == ("\ufffd" * 3, 3, None)

    @pytest.mark.parametrize("num_letters", [61, 62])
    def test_text_that_goes_out_within_a_character_is_not_looked_at_again(self, num_letters: int) -> None:
        text = "S" + "x" * num_letters + "漢"
        assert self.found(self.run(text.encode()), "S", min_tokens=1) == (text, num_letters + 4, None)

    def test_a_run_that_is_invalid_already(self) -> None:
        """The text has U+FFFD for each byte of such a run, but a newline ends it."""
        assert self.found(self.run(b"\xf0\x9fA\nB"), "\n") == ("\ufffd" * 3, 4, "\n")
        assert self.found(self.run(b"\xf0\n"), "\n") == ("\ufffd", 2, "\n")
        assert self.found(self.run(b"\xff\n\n"), "\n\n") == ("\ufffd", 3, "\n\n")

    def test_a_prompt_that_ends_in_a_run(self) -> None:
        prompt = self.run("\n漢".encode())
        assert self.found([*self.run(b"\n"), 5], "\n", prompt=prompt) == ("", 1, "\n")
        assert self.found(self.run("字".encode()), "漢", prompt=prompt) == ("字", 3, None)
        assert self.found([prompt[-1], 5], "漢", prompt=prompt[1:-1]) == ("", 1, "漢")

    def test_as_in_transformers(self) -> None:
        """Texts of words, newlines, other characters and broken ones end with the same token as those of `generate`."""
        rng, num_stopped = random.Random(5), 0
        parts = [self.ids("The quick"), self.run(b"\n"), self.run("é漢😀".encode()), self.ids("fox"), self.run(b"\xf0")]
        for stops in (["\n"], ["\n\n"], ["fox\n"], ["\nThe", "k\nf"]):
            criterion = StopStringCriteria(tiny_tokenizer("llama_bpe"), stops)
            for _ in range(60):
                ids = [token_id for _ in range(12) for token_id in rng.choice(parts)]
                ends = (count for count in range(1, len(ids) + 1) if criterion(torch.tensor([ids[:count]]), None))
                num_expected = next(ends, len(ids))
                found = self.found(ids, *stops)
                assert found[1] == num_expected, (stops, ids)
                num_stopped += found[2] is not None
        assert num_stopped > 80


@pytest.mark.parametrize("kind", KINDS)
def test_an_echo_and_its_completion_are_the_whole_text(kind: str) -> None:
    """Wherever the prompt ends, within a character too, and whether or not the completion goes on with that."""
    tokenizer = TextTokenizer(tiny_tokenizer(kind))
    backend = tiny_tokenizer(kind).backend_tokenizer
    ids = backend.encode("The a💩b né漢", add_special_tokens=False).ids
    (letter,) = backend.encode("a", add_special_tokens=False).ids[-1:]
    for cut in range(1, len(ids)):
        prompt = tuple(ids[:cut])
        for output in (ids[cut:], [letter], [backend.token_to_id("</s>")]):
            request = Request("r", prompt, StoppingParams(max_tokens=99), output=OutputParams(echo=True))
            one = CompletionAssembler(request, 0, tokenizer, (2,))
            text = one.push(tokens(*output)).text
            assert tokenizer.echo(prompt) + text + one.end(END).text == backend.decode([*prompt, *output]), (
                cut,
                output,
            )


@pytest.mark.parametrize("kind", KINDS)
class TestSpecialTokens:
    """A stop string that is a special token's text ends a completion where that token has no text."""

    def ids(self, kind: str) -> list[int]:
        backend = tiny_tokenizer(kind).backend_tokenizer
        turn, end = (backend.token_to_id(text) for text in ("<|turn|>", "</s>"))
        before, behind = (backend.encode(text, add_special_tokens=False).ids for text in ("The quick", "fox"))
        return [*before, turn, *behind, end, turn, *behind]

    def test_the_text_ends_before_it(self, kind: str) -> None:
        ids = self.ids(kind)
        num_tokens = ids.index(tiny_tokenizer(kind).convert_tokens_to_ids("<|turn|>")) + 1
        text, _, _ = assembled(kind, ids[: num_tokens - 1])
        for more in ((), ("quick brown", text[-2:] + "fox")):  # what could begin others is text
            assert assembled(kind, ids, "<|turn|>", *more) == (text, num_tokens, "<|turn|>")
        assert assembled(kind, ids, "<|turn|>", include_stop=True) == (text, num_tokens, "<|turn|>")
        assert assembled(kind, ids, "<|turn|>", min_tokens=num_tokens - 1)[1] == num_tokens
        assert assembled(kind, ids, "<|turn|>", min_tokens=num_tokens)[1] == len(ids) - ids[::-1].index(
            ids[num_tokens - 1]
        )
        kept = assembled(kind, ids, "<|turn|>", include_stop=True, keep_special=True)
        assert kept[0].endswith("<|turn|>")
        assert kept[1:] == (num_tokens, "<|turn|>")

    def test_the_engine_ends_it_by_its_own_tokens(self, kind: str) -> None:
        """The end of a sequence is reported as such, unless it is ignored."""
        ids = self.ids(kind)
        end = ids.index(tiny_tokenizer(kind).eos_token_id) + 1
        assert assembled(kind, ids[:end], "</s>")[1:] == (end, None)
        assert assembled(kind, ids, "</s>", ignore_eos=True)[1:] == (end, "</s>")


@pytest.mark.parametrize("logprobs", [True, False])
def test_content_has_its_tokens_where_logprobs_are_asked_for(logprobs: bool) -> None:
    tokenizer = tiny_tokenizer("byte_level")
    ids = tokenizer.backend_tokenizer.encode("<think>hm</think> a\u4f60b", add_special_tokens=False).ids
    request = Request("r", (1,), StoppingParams(max_tokens=99), output=OutputParams(logprobs=logprobs))
    parsing = ResponseParsing(ResponseFormat.named("think"))
    one = CompletionAssembler(request, 0, TextTokenizer(tokenizer), (), parsing)
    parts = [part for token_id in ids for part in one.push(tokens(token_id)).parts] + list(one.end(END).parts)
    content = [part for part in parts if part.kind == "content"]
    assert "".join(part.text for part in content) == "a\u4f60b"
    if not logprobs:
        assert not any(part.tokens for part in parts)
        return
    spans = [part.tokens for part in content if part.tokens is not None]
    assert len(spans) == len(content)
    assert all(end == begin for (_, end), (begin, _) in pairwise(spans)), "each token once"
    text = tokenizer.backend_tokenizer.decode(ids[spans[0][0] : spans[-1][1]])
    assert (text.strip(), spans[-1][1]) == ("a\u4f60b", len(ids))


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


class FailingEngine:
    """An engine whose request fails as soon as its stop strings were met, or when nothing is left of `events`."""

    def __init__(self, *events: Event) -> None:
        self._events = events

    def submit(self, request: Request) -> RequestStream:
        self.stream = RequestStream(request, lambda stream, error: None, 99)
        for event in self._events:
            self.stream.push(event)
        self.num_open = request.n
        if not request.stopping.stop:
            self._fail()
        return self.stream

    def stop_completion(self, stream: RequestStream, index: int) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self._fail()

    def _fail(self) -> None:
        self.stream.push(RequestFailed("r", InvalidArgument("leave no token", field="bad_words")))


@pytest.mark.parametrize("num_ended", [0, 1])
async def test_a_step_that_fails_behind_the_stop_strings_takes_no_answer_away(num_ended: int) -> None:
    events: list[Event] = [tokens(10, 11, 12), replace(tokens(10, 11, 12), index=1)]
    if num_ended:
        events.insert(1, END)
    request = Request("r", (1, 2, 3), StoppingParams(max_tokens=9, stop=("b",)), n=2)
    deltas: list[Delta] = []
    engine: Any = FailingEngine(*events)
    progress = Progress()
    async for batch in generate(engine, request, TOKENIZER, (), progress):
        deltas += batch
    ends = [delta.end for delta in deltas if delta.end is not None]
    assert [(end.index, end.reason, end.stop_string) for end in ends] == [
        (index, FinishReason.STOP, "b") for index in (0, 1)
    ]
    assert [end.num_completion_tokens for end in ends] == [3, 3]
    assert progress.record.num_prompt_tokens == 3


async def test_a_failure_before_all_have_ended_is_raised() -> None:
    request = Request("r", (1, 2, 3), StoppingParams(max_tokens=9), n=2)
    engine: Any = FailingEngine(tokens(10, 11, 12), END)
    with pytest.raises(InvalidArgument):
        async for _ in generate(engine, request, TOKENIZER, (), Progress()):
            pass


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
