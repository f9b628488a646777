"""Recoding of texts between two vocabularies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from difflib import SequenceMatcher

import pytest
from support.tiny_tokenizers import KINDS, TEXT, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loraplex_server.speculation.draft_model.recoding import RecodedText, Recoder, prefix_of
from loraplex_server.text.tokenizer import TextTokenizer
from loraplex_server.text.vocabulary import Vocabulary

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
    """In pieces of one token and more."""
    end = start
    while end < len(tokens):
        end = min(len(tokens), end + dice.randint(1, 5))
        text.extend(tokens[:end])


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_growing_text_equals_one_at_once(target: str, draft: str) -> None:
    """In the draft model's tokens it is the same text, in nearly the same tokens, however it came."""
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
    """And what is called the same is the same."""
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
    """It said "he", "l": the rest of the word is proposed alone, though the tokenizer would have one token for it."""
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
    """Longer than what is looked back at: that begins with a whole character, or all behind it would be lost."""
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
    """Those of both vocabularies go over, others are left out; the beginning of a text is marked once."""
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
    """Without any special token."""
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
