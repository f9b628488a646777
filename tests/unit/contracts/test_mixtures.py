"""Mixtures: names, sums of weights, digests, recipes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex_contracts.adapters import AdapterId, AdapterKey, check_adapter_id
from loraplex_contracts.errors import InvalidAdapterId
from loraplex_contracts.mixtures import Member, Merge, Mixture, Recipe, mixture_digest, mixture_name, sum_weights

A, B, C = (AdapterKey("lora", digit * 64) for digit in "abc")
MEMBERS = (Member(AdapterId("x"), 0.5), Member(AdapterId("y"), -1.0))
MERGE = Merge("dare_ties", 0.5)


def recipe(
    merge: Merge = MERGE, members: tuple[Member, ...] = MEMBERS, keys: tuple[AdapterKey, ...] = (A, B)
) -> Recipe:
    return Recipe(Mixture(members, merge), keys, merge)


def test_equal_mixtures_are_one() -> None:
    assert sum_weights([B, A, B], [0.5, 1.0, 0.25]) == ((A, 1.0), (B, 0.75))
    assert sum_weights([A, B, B], [1.0, 0.25, 0.5]) == sum_weights([B, A, B], [0.5, 1.0, 0.25])
    assert mixture_name(["y", "x", "y"]) == "x+y"
    assert mixture_name([]) == ""


def test_digests_tell_contents_and_weights_apart() -> None:
    found = [
        mixture_digest(adapters)
        for adapters in (((A, 1.0),), ((A, 1.0), (B, 1.0)), ((A, 1.0), (C, 1.0)), ((A, 1.0), (B, 1.0 + 1e-15)))
    ]
    assert len(set(found)) == len(found)
    assert all(len(digest) == 64 for digest in found)


def test_all_of_a_recipe_is_in_its_digest() -> None:
    others = [
        recipe(replace(MERGE, strategy="ties")),
        recipe(replace(MERGE, density=0.25)),
        recipe(replace(MERGE, majority_sign="frequency")),
        recipe(replace(MERGE, seed=0)),
        recipe(replace(MERGE, seed=1)),
        recipe(keys=(B, A)),
        recipe(members=(MEMBERS[0], replace(MEMBERS[1], weight=1.0))),
    ]
    digests = {one.digest for one in (recipe(), *others)}
    assert len(digests) == len(others) + 1
    # Names decide nothing: only what they are bound to.
    assert recipe(members=tuple(replace(one, adapter_id=AdapterId("z")) for one in MEMBERS)).digest == recipe().digest


def test_seeds_follow_from_the_recipe_or_the_request() -> None:
    assert recipe(replace(MERGE, seed=7)).seed == 7
    assert recipe().seed == recipe().seed != recipe(keys=(B, A)).seed
    assert 0 <= recipe().seed < 1 << 64


def test_no_request_can_name_a_merged_adapter() -> None:
    with pytest.raises(InvalidAdapterId):
        check_adapter_id(recipe().name)
