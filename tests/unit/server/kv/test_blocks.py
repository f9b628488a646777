"""The block pool: references, prefix cache, eviction, and keys of blocks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler_harness import num_cached_blocks

from loraplex_contracts.adapters import AdapterKey
from loraplex_server.kv.blocks import TRASH_BLOCK_ID, BlockPool, KeyChain, Namespace


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_all_blocks_but_the_padding_block_can_be_had() -> None:
    pool = BlockPool(5, 16)
    assert (pool.num_blocks, pool.num_free) == (4, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert TRASH_BLOCK_ID == 0
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (0, 16), (4, 0)])
def test_a_pool_of_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"block"):
        BlockPool(num_blocks, block_size)


def test_blocks_for_tokens() -> None:
    pool = BlockPool(5, 16)
    assert [pool.num_blocks_for(num_tokens) for num_tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_shared_block_is_free_when_the_last_holder_is_gone() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 1
    pool.check_integrity({blocks[0]: 1})
    pool.release(blocks[:1])
    assert pool.num_free == 2
    pool.check_integrity()


def test_giving_back_too_often_is_noticed() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release(blocks)


def test_published_blocks_are_found_held_or_idle_until_they_are_needed() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2)
    pool.publish(first, key(1))
    assert pool.find(key(1)) == first
    assert pool.find(key(2)) is None
    pool.release([first, second])
    assert pool.find(key(1)) == first
    assert pool.num_free == 3
    assert pool.num_unheld([first]) == 1
    pool.share([first])
    assert pool.num_free == 2
    assert pool.num_unheld([first]) == 0
    pool.release([first])
    # The other two have nothing to lose and go first.
    assert first not in pool.allocate(2)
    assert pool.find(key(1)) == first
    assert pool.allocate(1) == [first]
    assert pool.find(key(1)) is None
    assert pool.num_evictions == 1


def test_eviction_takes_the_least_recently_used_and_of_one_sequence_the_deepest() -> None:
    pool = BlockPool(7, 16)
    old, new = pool.allocate(3), pool.allocate(3)
    for number, block_id in enumerate(old + new):
        pool.publish(block_id, key(number))
    pool.release(old)
    pool.release(new)
    assert [pool.allocate(1)[0] for _ in range(6)] == [*reversed(old), *reversed(new)]


def test_a_hit_makes_recently_used() -> None:
    pool = BlockPool(3, 16)
    first, second = pool.allocate(2)
    pool.publish(first, key(1))
    pool.publish(second, key(2))
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.allocate(2) == [second, first]


def test_the_first_of_two_equal_blocks_stays() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2)
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    assert pool.find(key(1)) == first
    pool.release([second])
    pool.release([first])
    assert num_cached_blocks(pool) == 1
    pool.check_integrity()


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(3, 16, prefix_caching=False)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], key(1))
    assert pool.find(key(1)) is None
    pool.release(blocks)
    pool.check_integrity()


def test_only_held_blocks_are_published() -> None:
    pool = BlockPool(3, 16)
    with pytest.raises(AssertionError, match="published by nobody"):
        pool.publish(1, key(1))


def test_integrity_names_a_leak() -> None:
    pool = BlockPool(3, 16)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 known"):
        pool.check_integrity()


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
    Namespace("m", ((A, 1.0),), adapted_from=4),
    Namespace("m", ((A, 1.0),), adapted_from=5),
    Namespace("m", rope=1),
    Namespace("m", rope=40),
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


def test_blocks_before_an_activated_adapter_have_the_bases_keys() -> None:
    tokens = list(range(1, 13))
    base, own = NAMESPACES[0], Namespace("m", ((A, 1.0),), adapted_from=7)
    chain = KeyChain(own.digest(), 3, base.digest(), 2)
    chain.key(3, tokens)
    assert chain.keys[:2] == chain_keys(tokens, 3)[:2]
    assert set(chain.keys[2:]).isdisjoint(chain_keys(tokens, 3))
    assert chain.fork(1).key(3, tokens) == chain.keys[3]


def test_a_block_that_is_not_full_has_no_key() -> None:
    with pytest.raises(Exception, match="expected 4 items"):
        KeyChain(NAMESPACES[0].digest(), 4).key(0, [1, 2, 3])
