"""Proposers that a request may use."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import FailedPrecondition, InvalidArgument
from loraplex_contracts.request import Request, SpeculationKind, SpeculationParams, StoppingParams
from loraplex_server.config import SpeculationConfig
from loraplex_server.speculation.proposer import (
    DEFAULT_NUM_TOKENS,
    MEDUSA,
    PROMPT_LOOKUP,
    Choice,
    brings_heads,
    choose,
    draft_key,
)

HEADS = AdapterKey("medusa", "a" * 64)
LORA = AdapterKey("lora", "b" * 64)
BOTH = AdapterKey("combined", "c" * 64)
KINDS: tuple[SpeculationKind | None, ...] = (None, *get_args(SpeculationKind))


def asking(kind: SpeculationKind | None, **fields: object) -> Request:
    params = SpeculationParams(kind, **fields)  # type: ignore[arg-type]
    return Request("r", (1, 2), StoppingParams(5), speculation=params)


def chosen(
    kind: SpeculationKind | None,
    heads: AdapterKey | None = None,
    num_tokens: int = 0,
    drafts: tuple[str, ...] = (),
    **fields: object,
) -> Choice:
    return choose(asking(kind, **fields), heads, SpeculationConfig(num_tokens), drafts)


def wanted(
    kind: SpeculationKind | None, heads: AdapterKey | None, num_tokens: int, drafts: tuple[str, ...]
) -> tuple[str, ...] | None:
    """The proposers in words of their own; None where there is nothing that was asked for."""
    all_drafts = tuple(draft_key(name) for name in drafts)
    everything = ((MEDUSA,) if heads else ()) + (PROMPT_LOOKUP, *all_drafts)
    table: dict[SpeculationKind | None, tuple[str, ...] | None] = {
        None: everything if heads or num_tokens else (),
        "off": (),
        "auto": everything,
        "medusa": (MEDUSA,) if heads else None,
        "prompt_lookup": (PROMPT_LOOKUP,),
        "draft_model": all_drafts if len(drafts) == 1 else None,  # it does not say which of two
    }
    return table[kind]


@pytest.mark.parametrize(
    ("kind", "heads", "num_tokens", "drafts"),
    list(itertools.product(KINDS, (None, HEADS, BOTH), (0, 5), ((), ("small",), ("small", "tiny")))),
)
def test_every_kind_times_what_is_there(
    kind: SpeculationKind | None, heads: AdapterKey | None, num_tokens: int, drafts: tuple[str, ...]
) -> None:
    expected = wanted(kind, heads, num_tokens, drafts)
    if expected is None:
        with pytest.raises((FailedPrecondition, InvalidArgument)):
            chosen(kind, heads, num_tokens, drafts)
        return
    choice = chosen(kind, heads, num_tokens, drafts)
    assert choice.proposers == expected
    assert choice.uses_heads == (MEDUSA in expected)
    assert choice.medusa_key == (heads if MEDUSA in expected else None)


@pytest.mark.parametrize("name", ["small", "tiny"])
def test_one_of_several_draft_models(name: str) -> None:
    assert chosen("draft_model", drafts=("small", "tiny"), draft_name=name).proposers == (draft_key(name),)


def test_a_single_draft_model_needs_no_name() -> None:
    for name in ("", "small"):
        assert chosen("draft_model", drafts=("small",), draft_name=name).proposers == (draft_key("small"),)


@pytest.mark.parametrize(
    ("drafts", "name", "error", "field", "words"),
    [
        ((), "", FailedPrecondition, "", ("--draft-model", "leave `speculation.draft_model` out")),
        ((), "small", FailedPrecondition, "", ("--draft-model",)),
        (("tiny", "small"), "", InvalidArgument, "speculation.draft_model.name", ("one of small, tiny", "''")),
        (("small",), "larger", InvalidArgument, "speculation.draft_model.name", ("one of small", "'larger'")),
        (("small",), "naïve", InvalidArgument, "speculation.draft_model.name", ("na\\xefve",)),
    ],
)
def test_draft_models_that_are_not_there(
    drafts: tuple[str, ...],
    name: str,
    error: type[FailedPrecondition | InvalidArgument],
    field: str,
    words: tuple[str, ...],
) -> None:
    with pytest.raises(error) as raised:
        chosen("draft_model", drafts=drafts, draft_name=name)
    assert all(word in raised.value.message for word in words), raised.value.message
    assert (raised.value.field or "") == field


def test_heads_that_are_not_there() -> None:
    """With what there is to do about it, also where another way to draft would be there."""
    with pytest.raises(FailedPrecondition) as raised:
        chosen("medusa", drafts=("small",), num_tokens=4)
    assert "--default-medusa" in raised.value.message
    assert "speculation.medusa.adapter_id" in raised.value.message
    assert raised.value.resource == "speculation.medusa"


def test_a_name_is_of_no_matter_to_other_kinds() -> None:
    for kind in ("off", "auto", "prompt_lookup"):
        chosen(kind, draft_name="gone")


@pytest.mark.parametrize(
    ("asked", "served", "most", "found"),
    [
        (0, 0, 16, DEFAULT_NUM_TOKENS),
        (0, 5, 16, 5),
        (3, 5, 16, 3),
        (12, 5, 16, 12),
        (100, 5, 16, 16),
        (0, 0, 4, 4),
        (0, 6, 4, 4),
    ],
)
def test_how_many_tokens(asked: int, served: int, most: int, found: int) -> None:
    config = SpeculationConfig(served, most)
    assert choose(asking("auto", max_draft_tokens=asked), None, config, ()).params.max_draft_tokens == found


@pytest.mark.parametrize(
    ("adaptive", "asked", "found"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_fixed_lengths(adaptive: bool, asked: bool, found: bool) -> None:
    config = SpeculationConfig(adaptive=adaptive)
    assert choose(asking("prompt_lookup", fixed_length=asked), None, config, ()).params.fixed_length is found


def test_bounds_of_ngrams_are_lookups_own_matter() -> None:
    params = chosen("prompt_lookup", min_ngram=2).params
    assert (params.min_ngram, params.max_ngram) == (2, 0)


def test_whose_adapter_brings_heads() -> None:
    assert [brings_heads(key) for key in (None, LORA, HEADS, BOTH)] == [False, False, True, True]
