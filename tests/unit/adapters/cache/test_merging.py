"""Merges of LoRAs: refusals."""

from __future__ import annotations

import numpy as np
import pytest

from loraplex_adapters.cache.merging import merge_loras
from loraplex_adapters.weights import AdapterLayout, FactorShape, place_adapter
from loraplex_contracts.adapters import AdapterId, AdapterKey
from loraplex_contracts.errors import AdapterNotMixed
from loraplex_contracts.mixtures import Member, Merge, Mixture, Recipe


def layout(rank: int) -> AdapterLayout:
    return place_adapter("float32", [FactorShape("q", rank, 4, 4, 1.0)])


def test_ranks_of_two_revisions_of_one_adapter_are_compared() -> None:
    merge = Merge("linear")
    mixture = Mixture((Member(AdapterId("org/x"), 1.0), Member(AdapterId("org/x"), 1.0)), merge)
    recipe = Recipe(mixture, (AdapterKey(AdapterId("org/x"), "a"), AdapterKey(AdapterId("org/x"), "b")), merge)
    members = [(one, np.zeros(one.num_bytes, dtype=np.uint8)) for one in (layout(8), layout(4))]
    with pytest.raises(AdapterNotMixed, match="q has rank 8 in 'org/x', 4 in 'org/x'"):
        merge_loras(recipe, members, ["q"], lambda *_: pytest.fail("is merged"))
