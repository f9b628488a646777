"""Tokenizing in threads and processes equals tokenizing at once."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import KINDS, TEXT, tiny_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from loraplex_server.text.vocabulary import max_bytes_per_token

BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _changed(kind: str, **parts: object) -> Tokenizer:
    tokenizer = Tokenizer.from_str(tiny_tokenizer(kind).backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _with_model(kind: str, **settings_of_model: object) -> Tokenizer:
    state = json.loads(tiny_tokenizer(kind).backend_tokenizer.to_str())
    state["model"].update(settings_of_model)
    return Tokenizer.from_str(json.dumps(state))


def _with_added(kind: str, token: AddedToken) -> Tokenizer:
    tokenizer = _changed(kind)
    tokenizer.add_tokens([token])
    return tokenizer


def _unigram_bytes() -> Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        *((byte, -8.0) for byte in BYTES),
        ("▁", -2.0),
        ("▁the", -3.0),
        ("a", -4.0),
        ("▁▁▁▁", -3.0),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def _without_byte(missing: str) -> Tokenizer:
    """A tokenizer that drops the one byte that it does not know."""
    alphabet = [char for char in sorted(pre_tokenizers.ByteLevel.alphabet()) if char != missing]
    tokenizer = Tokenizer(models.BPE(vocab={char: idx for idx, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


WORDS = Regex(r"\p{L}+|\s+(?!\S)|\s+|[^\s\p{L}]+")
MAKERS = {
    **{kind: (lambda kind=kind: _changed(kind)) for kind in KINDS},
    "split, then bytes": lambda: _changed(
        "byte_level",
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
    ),
    "bytes as normalizer": lambda: _changed(
        "byte_level", normalizer=normalizers.ByteLevel(), pre_tokenizer=pre_tokenizers.Split(WORDS, "isolated")
    ),
    "composes characters": lambda: _changed("byte_level", normalizer=normalizers.NFKC()),
    "strips": lambda: _changed("byte_level", normalizer=normalizers.Strip()),
    "lowers": lambda: _changed("byte_level", normalizer=normalizers.Lowercase()),
    "deletes": lambda: _changed("byte_level", normalizer=normalizers.Replace("fox", "")),
    "shrinks runs": lambda: _changed("gemma_bpe", normalizer=normalizers.Replace(Regex(" +"), "▁")),
    "drops whitespace": lambda: _changed("llama_bpe", pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "removes at splits": lambda: _changed("gemma_bpe", pre_tokenizer=pre_tokenizers.Split("a", "removed")),
    "unknown fuses": lambda: _with_model("llama_bpe", byte_fallback=False),
    "unknown stays": lambda: _with_model("llama_bpe", byte_fallback=False, fuse_unk=False),
    "unknown is dropped": lambda: _with_model("llama_bpe", byte_fallback=False, unk_token=None),
    "a byte is dropped": lambda: _without_byte("a"),
    "unigram with bytes": _unigram_bytes,
    "takes in whitespace before": lambda: _with_added("byte_level", AddedToken("fox", lstrip=True)),
    "takes in whitespace behind": lambda: _with_added("llama_bpe", AddedToken("fox", rstrip=True)),
    "long added token": lambda: _with_added("byte_level", AddedToken("the lazy dog " * 9, normalized=True)),
    "long normalized token": lambda: _with_added("gemma_bpe", AddedToken(" " * 40, normalized=True)),
    "keeps nothing": lambda: _changed(
        "byte_level", post_processor=processors.TemplateProcessing(single="<s>", special_tokens=[("<s>", 1)])
    ),
}
BOUNDED = {
    "byte_level", "llama_bpe", "gemma_bpe", "split, then bytes", "bytes as normalizer", "unknown stays",
    "unigram with bytes", "long added token", "long normalized token",
}  # fmt: skip


@cache
def made(kind: str) -> tuple[Tokenizer, int | None]:
    tokenizer = MAKERS[kind]()
    return tokenizer, max_bytes_per_token(tokenizer.to_str())


PARTS = st.one_of(
    st.sampled_from(
        [*TEXT, "fox", "[tool]", "<|turn|>", "né", "<s>", "the lazy dog " * 9, "e\u0301", "\ufb01", "İ", "你"]
    ),
    st.builds(lambda char, times: char * times, st.sampled_from(" \n\t\u3000\u00a0▁aA😀\u0301你"), st.integers(1, 300)),
    st.text(max_size=20),
)
TEXTS = st.lists(PARTS, max_size=8).map("".join)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
@example(" " * 500 + "fox" + " " * 500)
@example("a" * 1000)
@example("😀" * 300)
@example(" " * 400)
@example("the lazy dog " * 90)
def test_a_text_has_no_more_bytes_than_its_tokens_can_stand_for(kind: str, text: str) -> None:
    tokenizer, bound = made(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids == ids
    if bound is not None:
        assert len(text.encode()) <= bound * len(ids)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_keeps_bytes_has_a_bound_and_nothing_else(kind: str) -> None:
    _, bound = made(kind)
    assert (bound is not None) == (kind in BOUNDED)
    assert bound is None or bound <= 240
