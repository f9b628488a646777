"""Tokenizers of every kind as the library of grammars reads them."""

from __future__ import annotations

import json
import random
from copy import deepcopy

import numpy as np
import pytest
from support.masks import allowed
from support.tiny_tokenizers import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.grammars import source
from loraplex_server.grammars.matcher import Compiler, allowed_tokens
from loraplex_server.grammars.tokenizer import LibraryTokenizer
from loraplex_server.text.detokenizer import new_detokenizer
from loraplex_server.text.vocabulary import Vocabulary


@pytest.mark.parametrize("kind", ["byte_level", "llama_bpe", "gemma_bpe"])
def test_added_tokens_in_angle_brackets_are_text_unless_they_are_special(kind: str) -> None:
    made = deepcopy(tiny_tokenizer(kind))
    plain, special = ("<think>", "</think>"), "<|end|>"
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in plain])
    made.add_special_tokens({"additional_special_tokens": [special]})
    mark, of_end, ended = made.convert_tokens_to_ids([*plain, special])
    grammars = Compiler(LibraryTokenizer.of(made.backend_tokenizer.to_str(), len(made), [made.eos_token_id]))
    for grammar in (source.regex("[a-z<>/|]*"), source.lark('start: ANY "</think>" "x"\nANY: /(.|\\n)*/')):
        matcher = grammars.compile(grammar)
        for token_id in (mark, of_end):
            mask = np.unpackbits(allowed_tokens([(matcher, 0, ())], 1).view(np.uint8), bitorder="little")
            assert mask[token_id]
            assert not mask[ended]
            matcher.advance(token_id)
            assert not matcher.error
    matcher = grammars.compile(source.regex("<think>[a-z]+"))
    assert made.decode(matcher.forced()) == "<think>"
    assert made.decode(grammars.compile(source.regex(r"\[tool\][a-z]+")).forced()) == "[tool]"


@pytest.mark.parametrize("kind", ["byte_level", "llama_bpe", "gemma_bpe"])
@pytest.mark.parametrize("text", ["</s>", "<s>", "<|turn|>"])
def test_texts_of_special_tokens_are_texts(kind: str, text: str) -> None:
    """Forced or drawn, the grammar's text is written, and no special token."""
    made = tiny_tokenizer(kind)
    grammars = Compiler(LibraryTokenizer.of(made.backend_tokenizer.to_str(), len(made), [made.eos_token_id]))
    schema: dict[str, object] = {"type": "object", "properties": {text: {"enum": [text, f"x{text}"]}}}
    for grammar in (
        source.json_schema(json.dumps({**schema, "required": [text]}), compact=True),
        source.choice([f"a{text}", f"b{text}"]),
        source.lark(f'start: /[ab]/ "{text}" /[0-9]/'),
    ):
        matcher, drawn, is_over = grammars.compile(grammar).copy(), list[int](), False
        while not is_over:
            drawn.append(random.Random(0).choice(allowed(matcher)[0]))
            is_over = matcher.advance(drawn[-1])
        assert not matcher.error
        assert text in made.decode(drawn, skip_special_tokens=True)


def test_texts_of_special_tokens_are_texts_of_a_unigram() -> None:
    made = Tokenizer(models.Unigram([(one, -1.0) for one in ("<unk>", "<s>", "<", "s", ">", "</s>", "a")], unk_id=0))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    matcher = Compiler(LibraryTokenizer.of(made.to_str(), 7, [5])).compile(source.choice(["a<s>", "s<s>"])).copy()
    for token_id in (6, 2, 3):
        assert token_id in allowed(matcher)[0]
        assert not matcher.advance(token_id)
    assert matcher.advance(4)


@pytest.mark.parametrize("content", ["th", "the"])
def test_special_tokens_of_merges_stay_as_they_are(content: str) -> None:
    made = Tokenizer(models.BPE({"t": 0, "h": 1, "e": 2, "th": 3, "the": 4, "</s>": 5}, [("t", "h"), ("th", "e")]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([content, "</s>"])
    matcher = Compiler(LibraryTokenizer.of(made.to_str(), 6, [5])).compile(source.lark('start: "e" </s>'))
    assert not matcher.advance(2)
    assert allowed(matcher)[0] == [5]


def test_grammars_name_special_tokens_by_their_texts() -> None:
    made = tiny_tokenizer("byte_level")
    turn = made.convert_tokens_to_ids("<|turn|>")
    grammars = Compiler(LibraryTokenizer.of(made.backend_tokenizer.to_str(), len(made), [made.eos_token_id]))
    lark = 'start: "<|turn|>" <|turn|> /<\\|turn\\|>/ %json {"const": "<|turn|>"} // <|turn|>'
    matcher = grammars.compile(source.lark(lark)).copy()
    text = [made.convert_tokens_to_ids(one) for one in "<|turn|>"]
    quote = made.convert_tokens_to_ids('"')
    for token_id in (*text, turn, *text, quote, *text):
        assert token_id in allowed(matcher)[0]
        assert not matcher.advance(token_id)
    assert matcher.advance(quote)
    with pytest.raises(InvalidArgument, match=r'unknown special token: "<none>".* available: .*<pad>'):
        grammars.compile(source.lark('start: "a" <none>'))


TEXTS = ["a b", 'né "x"', " a", "b ", '{"a": 1}']


@pytest.mark.parametrize("kind", ["byte_level", "llama_bpe", "gemma_bpe", "metaspace"])
@pytest.mark.parametrize("prompt", [":", "a b", "x "])
def test_tokenizers_of_every_kind(kind: str, prompt: str) -> None:
    """Texts are those that the tokenizer decodes behind a prompt, spaces at their begin included."""
    made = tiny_tokenizer(kind)
    backend = made.backend_tokenizer
    grammars = Compiler(LibraryTokenizer.of(backend.to_str(), len(made) + 3, [made.eos_token_id]))
    compiled = grammars.compile(source.choice(TEXTS))
    before = backend.encode(prompt, add_special_tokens=False).ids
    seen: set[str] = set()
    for seed in range(20):
        matcher, dice, drawn = compiled.copy(), random.Random(seed), list[int]()
        while True:
            bits = allowed_tokens([(matcher, 0, ())], 1)
            unpacked = np.unpackbits(bits.view(np.uint8), count=len(made) + 3, bitorder="little")
            token_id = dice.choice(np.flatnonzero(unpacked).tolist())
            drawn.append(token_id)
            if matcher.advance(token_id):
                break
        assert backend.decode([*before, *drawn]).removeprefix(backend.decode(before)) in TEXTS
        detokenizer = new_detokenizer(Vocabulary(backend), before)
        seen.add(detokenizer.push(drawn) + detokenizer.finish())
    assert seen <= set(TEXTS)
    assert " a" in seen


@pytest.mark.parametrize("kind", ["wordpiece", "suffix_bpe"])
def test_tokenizers_that_join_tokens_with_spaces_have_no_grammars(kind: str) -> None:
    with pytest.raises(ValueError):
        Compiler(LibraryTokenizer.of(tiny_tokenizer(kind).backend_tokenizer.to_str(), 500, [2]))


def test_tokens_of_bytes_that_are_decoded_as_their_names() -> None:
    model = models.Unigram([("<unk>", 0.0), ("\u2581", -1.0), ("<0x0A>", -2.0)], unk_id=0)
    made = Tokenizer(model)
    made.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="single bytes"):
        Compiler(LibraryTokenizer.of(made.to_str(), 3, []))
