"""Tokens of adapters that the base model's tokenizer lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_files import HIDDEN, PREFIX, VOCAB, base_targets, lora_tensors, write_adapter

from loraplex_adapters.cache.storage import check_adapter
from loraplex_adapters.formats import tokens
from loraplex_adapters.formats.tokens import all_tokens
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported

BASE = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}]}
ROWS = {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, HIDDEN)}


def check(root: Path, tokenizer: object, name: str = "tokenizer.json", *, with_rows: bool = True) -> None:
    rows: dict[str, Any] = {"trainable_token_indices": [3]} if with_rows else {}
    write_adapter(root / "a", tensors=lora_tensors() | (ROWS if with_rows else {}), **rows)
    (root / "a" / name).write_text(json.dumps(tokenizer))
    targets = replace(base_targets(), embedding="model.embed_tokens", head="lm_head", tokens=lambda: all_tokens(BASE))
    check_adapter("a", DirectorySource(root), targets)


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 2, "content": "<s>"}, {"id": 3, "content": "<call>"}]}),
        ("tokenizer.json", {"added_tokens": [{"id": 3, "content": "<s>"}]}),
        ("added_tokens.json", {"<call>": 3}),
        ("added_tokens.json", {"<call>": "three"}),
    ],
)
def test_trained_tokens_of_another_tokenizer_are_refused(name: str, tokenizer: object, tmp_path: Path) -> None:
    with pytest.raises(AdapterUnsupported, match=f"{name} beside the adapter has the token .* own tokenizer"):
        check(tmp_path, tokenizer, name)


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("tokenizer.json", BASE),
        ("tokenizer.json", {"added_tokens": [{"id": VOCAB, "content": "[PAD]"}]}),
        ("added_tokens.json", {"<s>": 2}),
    ],
)
def test_others_are_served(name: str, tokenizer: object, tmp_path: Path) -> None:
    check(tmp_path, tokenizer, name)


def test_a_vocabulary_behind_the_added_tokens_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one would hold up the other threads of the process for seconds."""
    monkeypatch.setattr(tokens, "parse_object", None)
    check(tmp_path, {"version": "1.0", "added_tokens": BASE["added_tokens"], "model": {"vocab": {"added_tokens": 3}}})
    with pytest.raises(AdapterUnsupported, match="has the token"):
        check(tmp_path, {"added_tokens": [{"id": 3, "content": "<call>"}], "model": BASE["model"]})


def test_added_tokens_are_found_behind_the_vocabulary_too(tmp_path: Path) -> None:
    check(tmp_path, {"model": {"vocab": {"added_tokens": 3}}, "added_tokens": BASE["added_tokens"]})
    check(tmp_path, {"model": {"vocab": {"added_tokens": 3}}})


def test_a_tokenizer_does_not_matter_without_rows(tmp_path: Path) -> None:
    check(tmp_path, {"added_tokens": [{"id": 3, "content": "<call>"}]}, with_rows=False)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalid, match="not a JSON object"):
        check(tmp_path, [1])


def test_vocabularies_of_both_kinds() -> None:
    assert all_tokens(BASE) == {"a": 0, "b": 1, "<s>": 2}
    assert all_tokens({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}) == {"a": 0, "b": 1}
    assert all_tokens({}) == {}
