"""Drafts of a model with another tokenizer."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any

import pytest
import torch
from support.dense import greedy, make_dense
from support.drafting import ask, speculate
from support.driver import Job, make_rig
from support.scheduler_harness import num_cached_blocks
from support.tiny_tokenizers import KINDS, TEXT, tiny_tokenizer
from support.zoo import ZOO
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex_contracts.request import SamplingParams, StoppingParams
from loraplex_server.model.loader import adopt_model
from loraplex_server.speculation import cross_tokenizer
from loraplex_server.speculation.cross_tokenizer import RecodedText, Recoder, UniversalProposer, prefix_of
from loraplex_server.speculation.draft_model import Drafter, DraftMemory
from loraplex_server.speculation.draft_rows import DraftRequest
from loraplex_server.text.tokenizer import TextTokenizer
from loraplex_server.text.vocabulary import Vocabulary

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
    """The drafts are what the draft model says behind the text's tokens, as a dense run has it, however the text grew
    and whatever was drafted before."""
    dice = random.Random(2)
    proposer = make(target, draft)
    oracle = make_dense(model("llama", draft, 1))
    drafts: list[tuple[list[int], list[int]]] = []
    inner = proposer.drafter.draft

    def watched(requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = inner(requests)
        drafts.extend((list(request.token_ids), draft) for request, draft in zip(requests, found, strict=True))
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


def oracle(proposer: UniversalProposer, text: str, draft: str) -> Callable[[Sequence[DraftRequest]], list[list[int]]]:
    """Drafts in place of the draft model, by knowing the text."""
    spans = tokenizer(draft).vocabulary.spans(text)  # type: ignore[union-attr]
    ids = [token_id for token_id, _, _ in spans]

    def draft_tokens(requests: Sequence[DraftRequest]) -> list[list[int]]:
        found: list[list[int]] = []
        for request in requests:
            known = list(request.token_ids)
            prefix = len(proposer._recoder.draft_prefix)
            start = len(known) - prefix
            found.append(ids[start : start + request.num_tokens] if ids[:start] == known[prefix:] else [])
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


def scripted(proposer: UniversalProposer, drafted: Sequence[int]) -> list[DraftRequest]:
    """Makes the draft model say just this. Returns what it was asked."""
    asked: list[DraftRequest] = []

    def draft(requests: Sequence[DraftRequest]) -> list[list[int]]:
        asked.extend(requests)
        return [list(drafted) for _ in requests]

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
    """A draft model with shorter tokens drafts more of them, up to a limit."""
    proposer = make("gemma_bpe", "metaspace")
    asked = scripted(proposer, [])
    tokens = tokenizer("gemma_bpe").encode(TEXT[0])
    proposer.propose([ask("a", tokens, 4)])
    ratio = len(asked[0].token_ids) / len(tokens)
    assert 4 * ratio <= asked[0].num_tokens < 4 * ratio + 1
    monkeypatch.setattr(cross_tokenizer, "_MAX_RATIO", 0.5)
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


LONG = " ".join(TEXT[:6] + [text.upper() for text in TEXT[:6]])
LOSSLESS = ("byte_level", "llama_bpe", "gemma_bpe")
PAIRS = [(target, draft) for target in KINDS for draft in KINDS]


def vocabulary(kind: str) -> Vocabulary:
    found = TextTokenizer(tiny_tokenizer(kind)).vocabulary
    assert found is not None
    return found


def encode(kind: str, text: str) -> list[int]:
    return TextTokenizer(tiny_tokenizer(kind)).encode(text)


def recoder(target: str, draft: str) -> Recoder:
    prefix = prefix_of(encode(draft, "a"), [token_id for token_id, _, _ in vocabulary(draft).spans("a")])
    return Recoder(vocabulary(target), vocabulary(draft), prefix)


def grow(text: RecodedText, tokens: Sequence[int], start: int, dice: random.Random) -> None:
    """Extends the text in pieces of one token and more."""
    end = start
    while end < len(tokens):
        end = min(len(tokens), end + dice.randint(1, 5))
        text.extend(tokens[:end])


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_growing_text_equals_one_at_once(target: str, draft: str) -> None:
    """The text in the draft model's tokens is the same, in nearly the same tokens, however it came."""
    pair = recoder(target, draft)
    dice = random.Random(1)
    for first in (1, 2, 5, 40, 100):
        tokens = encode(target, LONG)
        text = RecodedText(pair, tokens[:first])
        grow(text, tokens, first, dice)
        whole = RecodedText(pair, tokens)
        decode = pair.draft.decode
        squeezed = ["".join(decode(ids).split()) for ids in (text.ids, whole.ids)]
        assert squeezed[0] == squeezed[1]
        assert len(text.ids) == len(text._starts)
        assert SequenceMatcher(None, text.ids, whole.ids, autojunk=False).ratio() > 0.95


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_what_has_settled_stays(target: str, draft: str) -> None:
    """Tokens that are reported as settled, or as the same, are the same."""
    pair = recoder(target, draft)
    tokens = encode(target, LONG)
    text = RecodedText(pair, tokens[:3])
    settled: list[int] = []
    before: list[int] = []
    for end in range(4, len(tokens), 3):
        text.extend(tokens[:end])
        assert text.ids[: len(settled)] == settled
        settled = text.ids[: text.num_settled]
        if end % 2:  # not everything is asked for
            num_same = text.take_num_same()
            assert text.ids[:num_same] == before[:num_same]
            before = text.ids[:]
    assert len(settled) > 0.5 * len(text.ids)


@pytest.mark.parametrize(("target", "draft"), [(target, draft) for target in LOSSLESS for draft in LOSSLESS])
def test_a_true_draft_comes_out_as_the_targets_tokens(target: str, draft: str) -> None:
    """The draft model says what really comes; that is proposed as the target's tokenizer has it. Characters of which
    the target has said one half are in it."""
    pair = recoder(target, draft)
    tokens = encode(target, LONG)
    all_ids = RecodedText(pair, tokens).ids
    num_right = num_wanted = 0
    text = RecodedText(pair, tokens[:2])
    for end in range(2, len(tokens) - 4, 3):
        text.extend(tokens[:end])
        known = pair.draft.decode(text.ids)
        near = range(max(1, len(text.ids) - 4), min(len(text.ids) + 5, len(all_ids)))
        places = [place for place in near if pair.draft.decode(all_ids[:place]) == known]
        if not places:
            continue  # no token of the draft model's ends where the text does
        proposed = text.proposal(all_ids[places[-1] : places[-1] + 12])
        num_wanted += 3
        for got, want in zip(proposed[:3], tokens[end : end + 3], strict=False):
            if got != want:
                break
            num_right += 1
    assert num_wanted > 0.6 * len(tokens)
    assert num_right > 0.95 * num_wanted, f"{num_right} of {num_wanted}"


def test_the_targets_own_way_to_cut_a_word_is_kept() -> None:
    """The target said "he", "l": the rest of the word is proposed alone, though the tokenizer would have one token for
    it."""
    pair = recoder("byte_level", "gemma_bpe")
    tokens = [*encode("byte_level", "SELECT"), *pieces("byte_level", " n", "a")]
    text = RecodedText(pair, tokens)
    assert [pair.target.content(token_id) for token_id, _, _ in pair.target.spans("SELECT name")][-1] == "Ġname"
    drafted = [token_id for token_id, _, _ in pair.draft.spans("me, price")]
    assert pair.target.decode(text.proposal(drafted)) == "me, price"


def pieces(kind: str, *texts: str) -> list[int]:
    found = vocabulary(kind)
    return [token_id for text in texts for token_id, _, _ in found.spans(text)]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_characters_come_when_they_are_whole(kind: str) -> None:
    """Bytes that are not a character yet have no text, and hide none of those before them."""
    pair = recoder(kind, "byte_level")
    tokens = encode(kind, "x 🚀🛰 y")[1:]
    seen: set[str] = set()
    for first in range(1, len(tokens)):
        text = RecodedText(pair, tokens[:first])
        for end in range(first, len(tokens) + 1):
            text.extend(tokens[:end])
            seen.add(text._tail)
        assert text._tail.strip() == "x 🚀🛰 y", first
    assert {known.strip() for known in seen} >= {"x", "x 🚀", "x 🚀🛰"}
    assert all("�" not in known for known in seen)


def test_half_a_character_goes_on_as_it_began() -> None:
    """A draft with another character in its place is none."""
    pair = recoder("gemma_bpe", "byte_level")
    tokens = encode("gemma_bpe", "x \U0001f680")
    text = RecodedText(pair, tokens[:-2])
    rocket = [token_id for token_id, _, _ in pair.draft.spans("\U0001f680 y")]
    assert text.proposal(rocket)[:2] == tokens[-2:]
    assert text.proposal([token_id for token_id, _, _ in pair.draft.spans("name")]) == []


def test_a_long_run_of_bytes() -> None:
    """The run is longer than what is looked back at: that begins with a whole character, or all behind it would be
    lost."""
    pair = recoder("gemma_bpe", "byte_level")
    run = "x " + "🚀龘" * 25
    tokens = encode("gemma_bpe", run)[1:]
    assert len(tokens) > 160
    text = RecodedText(pair, tokens[:2])
    for end in range(2, len(tokens) + 1, 3):
        text.extend(tokens[:end])
    text.extend(tokens)
    assert pair.draft.decode(text.ids) == run


def test_special_tokens() -> None:
    """Special tokens of both vocabularies go over, others are left out; the beginning of a text is marked once."""
    tokens = encode("byte_level", "a b")
    assert tokens[0] == 1
    both = recoder("byte_level", "gemma_bpe")
    turn = both.target.special_ids["<|turn|>"]
    begin = both.draft.special_ids["<s>"]
    ids = RecodedText(both, [*tokens, turn, *tokens[1:]]).ids
    assert ids[0] == begin
    assert ids.count(begin) == 1
    assert ids.count(both.draft.special_ids["<|turn|>"]) == 1
    assert RecodedText(both, tokens[1:]).ids[0] == begin
    grown = RecodedText(both, tokens)
    grown.extend([*tokens, turn])
    grown.extend([*tokens, turn, *tokens[1:]])
    assert grown.ids == ids
    foreign = Recoder(both.target, plain_bytes(), ())
    assert foreign.draft.decode(RecodedText(foreign, [*tokens, turn, *tokens[1:]]).ids) == "a ba b"
    assert RecodedText(foreign, [tokens[0], turn]).ids == []


def plain_bytes() -> Vocabulary:
    """A byte-level vocabulary without any special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: idx for idx, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_any_tokens_at_all(target: str, draft: str) -> None:
    """Nonsense, parts of characters, special tokens and ids that nobody has: always a text, and ids that exist."""
    pair = recoder(target, draft)
    dice = random.Random(3)
    num_target, num_draft = len(pair.target.pieces), len(pair.draft.pieces)
    tokens = [dice.randrange(num_target + 3) for _ in range(150)]
    text = RecodedText(pair, tokens[:1])
    for end in range(1, len(tokens), 4):
        text.extend(tokens[:end])
        drafted = [dice.randrange(num_draft + 3) for _ in range(6)]
        proposed = text.proposal(drafted)
        assert all(0 <= token_id < num_target for token_id in proposed)
        assert all(0 <= token_id < num_draft for token_id in text.ids)
        assert 0 <= text.num_settled <= len(text.ids)


@pytest.mark.parametrize(
    ("encoded", "plain", "prefix"),
    [([1, 5, 6], [5, 6], (1,)), ([5, 6, 2], [5, 6], ()), ([1, 9, 5, 2], [5], (1, 9)), ([7, 8], [5, 6], ())],
)
def test_what_a_tokenizer_puts_in_front(encoded: list[int], plain: list[int], prefix: tuple[int, ...]) -> None:
    assert prefix_of(encoded, plain) == prefix
