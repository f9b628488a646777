"""Rotations that depend on a text's length: which tokens share keys."""

from __future__ import annotations

import pytest

from loraplex_server.kv.rope import RopeScaling

DYNAMIC = RopeScaling(10, has_one_set=False)
LONG = RopeScaling(10, has_one_set=True)
ANEW = RopeScaling(10, has_one_set=True, restarts=True)


def test_frequencies_are_those_of_training_up_to_the_limit() -> None:
    assert [DYNAMIC.set_of(length) for length in (1, 10, 11, 12)] == [0, 0, 11, 12]
    assert [LONG.set_of(length) for length in (1, 10, 11, 12)] == [0, 0, 1, 1]


def test_keys_tell_texts_apart_whose_blocks_differ() -> None:
    assert [DYNAMIC.key(num, num) for num in (1, 10, 11, 12)] == [0, 0, 11, 12]
    assert DYNAMIC.key(9, 20) == 0, "of one that grew, the blocks are those of any other that grew"
    assert [LONG.key(num, num) for num in (10, 11, 12)] == [0, 1, 1]
    assert LONG.key(9, 20) == 0
    assert [ANEW.key(9, num) for num in (9, 10, 11, 20)] == [0, 0, 1, 1]


def test_a_text_is_computed_anew_once() -> None:
    assert [before for before in range(14) if ANEW.outgrown(before, before + 1)] == [10]
    assert not any(one.outgrown(before, before + 1) for one in (DYNAMIC, LONG) for before in range(14))
    assert [ANEW.num_room(num) for num in (3, 10, 11)] == [7, 0, None]
    assert DYNAMIC.num_room(3) is None
    assert (ANEW.num_first(9, 12), LONG.num_first(9, 12)) == (12, 9)


def test_only_one_set_can_be_computed_anew() -> None:
    with pytest.raises(ValueError, match="one set"):
        RopeScaling(10, has_one_set=False, restarts=True)
