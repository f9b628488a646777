"""Drafts of a model with another tokenizer."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from support.dense import greedy, make_dense
from support.drafting import ask, speculate
from support.driver import Job, make_rig
from support.scheduler_harness import num_cached_blocks
from support.tiny_tokenizers import TEXT, tiny_tokenizer
from support.zoo import ZOO
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex_contracts.request import SamplingParams, StoppingParams
from loraplex_server.model.loader import adopt_model
from loraplex_server.speculation.draft_model import proposers
from loraplex_server.speculation.draft_model.drafter import Drafter, DraftMemory
from loraplex_server.speculation.draft_model.proposers import UniversalProposer
from loraplex_server.speculation.draft_model.rows import Wanted
from loraplex_server.text.tokenizer import TextTokenizer

BLOCK = 4
NUM_TOKENS = 10
EOS = 2  # </s> of all these tokenizers


@cache
def tokenizer(kind: str) -> TextTokenizer:
    return TextTokenizer(tiny_tokenizer(kind))


def num_ids(kind: str) -> int:
    found = tokenizer(kind).vocabulary
    assert found is not None
    return max(found.pieces.values()) + 1


@cache
def model(family: str, kind: str, seed: int = 0) -> PreTrainedModel:
    """A random model with that tokenizer's vocabulary."""
    config = ZOO[family]()
    config.vocab_size = num_ids(kind)
    torch.manual_seed(seed)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    if family.startswith("gemma"):
        with torch.no_grad():
            made.get_input_embeddings().weight.mul_(0.1)  # see support.zoo
    return made.eval()


def make(target: str, draft: str, family: str = "llama", **options: Any) -> UniversalProposer:
    loaded = adopt_model(copy.deepcopy(model(family, draft, 1)), verify=False)
    return UniversalProposer(
        Drafter(loaded, DraftMemory(4, 1 << 21, BLOCK), model_digest="draft"),
        target_tokenizer=tokenizer(target),
        draft_tokenizer=tokenizer(draft),
        num_target_ids=options.get("num_target_ids", num_ids(target)),
        eos_token_ids=[EOS],
    )


# --- text stays what it is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target_family", "target", "draft_family", "draft"),
    [
        ("opt", "byte_level", "opt", "llama_bpe"),
        ("gemma2", "gemma_bpe", "llama", "byte_level"),
        ("llama", "metaspace", "llama", "wordpiece"),
        ("llama", "wordpiece", "llama", "metaspace"),
        ("llama", "llama_bpe", "llama", "suffix_bpe"),
    ],
)
def test_no_text_changes(target_family: str, target: str, draft_family: str, draft: str) -> None:
    """Random models say parts of characters, special tokens and nonsense."""
    rig = make_rig(adopt_model(copy.deepcopy(model(target_family, target)), verify=False))
    proposer = make(target, draft, draft_family)
    prompts = [tokenizer(target).encode(text) for text in (TEXT[0][:20], TEXT[3][:24], "")]
    samplings = [SamplingParams(), SamplingParams(temperature=0.9, seed=3), SamplingParams(repetition_penalty=1.3)]
    pairs = list(zip(prompts, samplings, strict=True))
    plain = [Job(prompt, NUM_TOKENS, sampling=sampling) for prompt, sampling in pairs]
    jobs = [speculate(Job(prompt, NUM_TOKENS, sampling=sampling), proposer, 3) for prompt, sampling in pairs]
    drafted: list[int] = []
    rig.on_plan = lambda plan: drafted.extend(len(span.draft) for span in plan.spans)
    rig.run(plain + jobs)
    assert [job.tokens for job in jobs] == [job.tokens for job in plain]
    assert any(drafted)
    proposer.drafter.rows.check_integrity()


# --- catching up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [("byte_level", "llama_bpe"), ("gemma_bpe", "byte_level")])
def test_the_draft_model_has_read_what_is_known(target: str, draft: str) -> None:
    """However the text grew, and whatever was drafted before: what it drafts is what it says behind the text's tokens,
    as a dense run has it."""
    dice = random.Random(2)
    proposer = make(target, draft)
    oracle = make_dense(model("llama", draft, 1))
    drafts: list[tuple[list[int], list[int]]] = []
    inner = proposer.drafter.draft

    def watched(wants: Sequence[Wanted]) -> list[list[int]]:
        found = inner(wants)
        drafts.extend((list(want.token_ids), draft) for want, draft in zip(wants, found, strict=True))
        return found

    proposer.drafter.draft = watched  # type: ignore[method-assign]
    texts = [tokenizer(target).encode(text) for text in TEXT[:2]]
    ends = [2, 3]
    for _ in range(9):
        chosen = [i for i in range(2) if dice.random() < 0.8] or [0]
        proposer.propose([ask(f"s{i}", texts[i][: ends[i]], dice.randint(1, 3)) for i in chosen])
        proposer.drafter.rows.check_integrity()
        for i in range(2):
            ends[i] = min(len(texts[i]), ends[i] + dice.choice([0, 1, 2, 5]))
    for ids, drafted in drafts:
        assert drafted
        assert drafted == greedy(oracle, ids, len(drafted))


def test_what_is_known_is_read_once() -> None:
    """Each ask runs the few tokens that are new, not the text."""
    proposer = make("byte_level", "gemma_bpe")
    runner = proposer.drafter.runner
    execute, num_run, num_entered = runner.execute, [0], [0]

    def counted(plan: Any) -> Any:
        num_run[0] += plan.num_tokens
        num_entered[0] += len(plan.entered)
        return execute(plan)

    runner.execute = counted  # type: ignore[method-assign]
    tokens = tokenizer("byte_level").encode(" ".join(TEXT[:2] * 2))
    for end in range(40, len(tokens), 2):
        proposer.propose([ask("a", tokens[:end], 1)])
    num_asks = len(range(40, len(tokens), 2))
    assert num_run[0] < len(tokens) * 2 + num_asks * 8
    assert num_entered == [1]  # no block that others may find has to be written anew
    assert num_cached_blocks(proposer.drafter.rows.pool) > 5


# --- what a good draft gives ------------------------------------------------------------------------------------------


def oracle(proposer: UniversalProposer, text: str, draft: str) -> Callable[[Sequence[Wanted]], list[list[int]]]:
    """Instead of the draft model somebody who knows the text."""
    spans = tokenizer(draft).vocabulary.spans(text)  # type: ignore[union-attr]
    ids = [token_id for token_id, _, _ in spans]

    def draft_tokens(wants: Sequence[Wanted]) -> list[list[int]]:
        found: list[list[int]] = []
        for want in wants:
            known = list(want.token_ids)
            prefix = len(proposer._recoder.draft_prefix)
            start = len(known) - prefix
            found.append(ids[start : start + want.num_tokens] if ids[:start] == known[prefix:] else [])
        return found

    return draft_tokens


def test_a_draft_model_that_is_right_saves_steps() -> None:
    """Fewer than half as many as tokens, on text that both tokenizers know."""
    text = TEXT[0] + " " + TEXT[1]
    proposer = make("byte_level", "gemma_bpe")
    proposer.drafter.draft = oracle(proposer, text, "gemma_bpe")  # type: ignore[method-assign]
    tokens = tokenizer("byte_level").encode(text)
    end, num_steps = 5, 0
    while end < len(tokens):
        draft = proposer.propose([ask("a", tokens[:end], 4)])[0]
        assert len(draft) <= 4
        num_accepted = 0
        while num_accepted < len(draft) and tokens[end + num_accepted : end + num_accepted + 1] == [
            draft[num_accepted]
        ]:
            num_accepted += 1
        end += num_accepted + 1
        num_steps += 1
    assert num_steps < 0.45 * (len(tokens) - 5)


def scripted(proposer: UniversalProposer, drafted: Sequence[int]) -> list[Wanted]:
    """The draft model says just this. Returns what it was asked."""
    asked: list[Wanted] = []

    def draft(wants: Sequence[Wanted]) -> list[list[int]]:
        asked.extend(wants)
        return [list(drafted) for _ in wants]

    proposer.drafter.draft = draft  # type: ignore[method-assign]
    return asked


def drafted_text(kind: str, text: str) -> list[int]:
    found = tokenizer(kind).vocabulary
    assert found is not None
    return [token_id for token_id, _, _ in found.spans(text)]


def test_never_more_than_asked_for_or_than_there_are() -> None:
    proposer = make("byte_level", "gemma_bpe", num_target_ids=290)
    scripted(proposer, drafted_text("gemma_bpe", " x x x x x x x x"))
    tokens = tokenizer("byte_level").encode("SELECT")
    assert len(proposer.propose([ask("a", tokens, 3)])[0]) == 3
    assert len(proposer.propose([ask("a", tokens, 9, num_room=2)])[0]) == 2
    assert proposer.propose([ask("a", tokens, 9, num_room=0)]) == [()]
    scripted(proposer, drafted_text("gemma_bpe", " x name"))
    assert max(tokenizer("byte_level").encode(" x name")) >= 290
    found = proposer.propose([ask("a", tokens, 9)])[0]
    assert found
    assert max(found) < 290


def test_the_end_of_a_text_goes_over() -> None:
    proposer = make("byte_level", "gemma_bpe")
    tokens = tokenizer("byte_level").encode("SELECT")
    name = tuple(drafted_text("byte_level", " name"))
    asked = scripted(proposer, [*drafted_text("gemma_bpe", " name"), EOS])
    assert proposer.propose([ask("a", tokens, 9)]) == [(*name, EOS)]
    assert asked[0].stop_ids >= {EOS}
    assert asked[0].sampling.is_greedy
    endless = StoppingParams(100, ignore_eos=True)
    assert proposer.propose([ask("a", tokens, 9, stopping=endless)]) == [name]
    turn = tokenizer("gemma_bpe").encode("<|turn|>")[-1]
    scripted(proposer, [*drafted_text("gemma_bpe", " name"), turn])
    assert proposer.propose([ask("a", tokens, 9)]) == [name]


def test_as_many_tokens_as_the_other_tokenizer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a draft model with shorter tokens more are drafted, but not without limit."""
    proposer = make("gemma_bpe", "metaspace")
    asked = scripted(proposer, [])
    tokens = tokenizer("gemma_bpe").encode(TEXT[0])
    proposer.propose([ask("a", tokens, 4)])
    ratio = len(asked[0].token_ids) / len(tokens)
    assert 4 * ratio <= asked[0].num_tokens < 4 * ratio + 1
    monkeypatch.setattr(proposers, "_MAX_RATIO", 0.5)
    proposer.propose([ask("a", tokens, 4)])
    assert asked[1].num_tokens == 2


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_text_that_cannot_be_put_into_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence's trouble is its own, and is not tried again."""
    proposer = make("byte_level", "gemma_bpe")
    tokens = tokenizer("byte_level").encode(TEXT[0])
    recoder = proposer._recoder
    inner, calls = recoder.draft_tokens, [0]

    def failing(text: str) -> tuple[list[int], list[int]]:
        if "brown" in text:
            calls[0] += 1
            raise RuntimeError("no")
        return inner(text)

    monkeypatch.setattr(recoder, "draft_tokens", failing)
    for _ in range(2):
        first, second = proposer.propose([ask("a", tokens, 3), ask("b", tokens[:3], 3)])
        assert first == ()
        assert second
    assert calls == [1]
    monkeypatch.setattr(recoder, "target_tokens", lambda *_: 1 / 0)
    assert proposer.propose([ask("b", tokens[:4], 3)]) == [()]
    proposer.end("b")
    assert "b" not in proposer._texts


def test_nothing_to_go_on_from() -> None:
    """Special tokens alone, to a model whose texts begin with nothing."""
    proposer = make("byte_level", "gemma_bpe")
    proposer._recoder.draft_prefix = ()
    proposer._recoder.text_of_special = dict.fromkeys(proposer._recoder.text_of_special, "")
    tokens = tokenizer("byte_level").encode("")
    assert proposer.propose([ask("a", tokens, 3)]) == [()]
    assert proposer.propose([ask("a", [*tokens, *drafted_text("byte_level", "SELECT")], 3)])[0]


def test_forgetting() -> None:
    proposer = make("byte_level", "gemma_bpe")
    tokens = tokenizer("byte_level").encode(TEXT[0])
    proposer.propose([ask("a", tokens, 3), ask("b", tokens, 3)])
    proposer.end("a")
    proposer.end("a")
    assert set(proposer._texts) == {"b"}
    assert proposer.drafter.rows.num_sequences == 1
    proposer.close()
    assert proposer.drafter.rows.num_sequences == 0
    proposer.drafter.rows.check_integrity()
