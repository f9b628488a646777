"""The block pool: references, the prefix cache, and what is evicted first."""

from __future__ import annotations

import pytest
from support.scheduler_harness import num_cached_blocks

from loraplex_server.kv.blocks import TRASH_BLOCK_ID, BlockPool


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
