"""Keys of KV blocks: equal exactly for equal content."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_contracts.adapters import AdapterKey
from loraplex_server.kv.keys import KeyChain, Namespace

A, B = AdapterKey("lora", "a" * 64), AdapterKey("lora", "b" * 64)

NAMESPACES = [
    Namespace("m"),
    Namespace("n"),
    Namespace("m", tenant="t"),
    Namespace("m", cache_salt="t"),
    Namespace("m", tenant="t", cache_salt="t"),
    Namespace("m", tenant="tt"),
    Namespace("mt"),
    Namespace("m", ((A, 1.0),)),
    Namespace("m", ((B, 1.0),)),
    Namespace("m", ((A, 0.5),)),
    Namespace("m", ((A, 1.0), (B, 1.0))),
    Namespace("m", ((B, 1.0), (A, 1.0))),
    Namespace("m", ((AdapterKey("combined", "a" * 64), 1.0),)),
    # Fields that would run into each other without their lengths.
    Namespace("m", tenant="a\0b", cache_salt="c"),
    Namespace("m", tenant="a", cache_salt="\0bc"),
    Namespace("m", ((AdapterKey("lora", "ab"), 1.0),), "c"),
    Namespace("m", ((AdapterKey("lora", "a"), 1.0),), "bc"),
    Namespace("m", tenant="lora" + "a" * 64),
]


def test_no_two_namespaces_share_a_digest() -> None:
    digests = [namespace.digest() for namespace in NAMESPACES]
    assert len(set(digests)) == len(NAMESPACES)
    assert all(len(digest) == 32 for digest in digests)
    assert Namespace("m", ((A, 1.0),), "t", "s").digest() == Namespace("m", ((A, 1.0),), "t", "s").digest()


@given(st.lists(st.text(max_size=4), min_size=4, max_size=4), st.lists(st.text(max_size=4), min_size=4, max_size=4))
def test_strings_are_never_confused(left: list[str], right: list[str]) -> None:
    def digest(parts: list[str]) -> bytes:
        return Namespace(parts[0], ((AdapterKey("lora", parts[1]), 1.0),), parts[2], parts[3]).digest()

    assert (digest(left) == digest(right)) == (left == right)


def test_odd_strings_do_not_raise() -> None:
    assert Namespace("m", cache_salt="\ud800").digest() != Namespace("m", cache_salt="?").digest()


def chain_keys(token_ids: list[int], block_size: int = 2, namespace: Namespace = NAMESPACES[0]) -> list[bytes]:
    chain = KeyChain(namespace.digest(), block_size)
    return [chain.key(block_idx, token_ids) for block_idx in range(len(token_ids) // block_size)]


def test_a_key_depends_on_all_tokens_up_to_its_end_and_on_no_other() -> None:
    keys = chain_keys([1, 2, 3, 4, 5, 6])
    assert chain_keys([1, 2, 3, 4, 5, 6, 7, 8])[:3] == keys
    assert chain_keys([1, 2, 3, 4, 6, 6])[:2] == keys[:2]
    # A change in the first block changes all of them; equal tokens elsewhere do not help.
    assert set(chain_keys([9, 2, 3, 4, 5, 6])).isdisjoint(keys)
    assert len(set(chain_keys([1, 2, 1, 2, 1, 2]))) == 3


def test_keys_differ_between_namespaces_and_block_sizes() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    everything = [chain_keys(tokens, namespace=namespace) for namespace in NAMESPACES]
    everything += [chain_keys(tokens, block_size=1), chain_keys(tokens, block_size=4)]
    flat = list(itertools.chain.from_iterable(everything))
    assert len(set(flat)) == len(flat)


def test_large_token_ids_are_not_cut_short() -> None:
    assert chain_keys([1, 2]) != chain_keys([1, 2 + 2**16])
    assert chain_keys([2**32 - 1, 0])[0] != chain_keys([0, 2**32 - 1])[0]


def test_a_chain_is_made_on_demand_and_forks() -> None:
    tokens = list(range(1, 13))
    chain = KeyChain(NAMESPACES[0].digest(), 3)
    third = chain.key(2, tokens)
    assert chain.keys[2] == third == chain_keys(tokens, 3)[2]
    fork = chain.fork(2)
    assert fork.key(2, [*tokens[:6], 99, 99, 99]) != third
    assert chain.key(2, tokens) == third
    assert fork.keys[:2] == chain.keys[:2]


def test_a_block_that_is_not_full_has_no_key() -> None:
    with pytest.raises(Exception, match="expected 4 items"):
        KeyChain(NAMESPACES[0].digest(), 4).key(0, [1, 2, 3])
