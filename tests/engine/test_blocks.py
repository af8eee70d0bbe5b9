"""Tests the ownership of page groups and cached blocks."""

import numpy as np
import pytest

from jsparse.engine.blocks import BlockPool, CacheBlock, block_keys

pytestmark = pytest.mark.pure


def test_groups_are_allocated_once_and_freed():
    pool = BlockPool(6)
    taken = pool.allocate(3)
    assert {*taken, *pool.allocate(2)} == {0, 1, 2, 3, 4}  # 5 is the scratch group
    assert pool.available == 0
    pool.free(taken)
    assert pool.available == 3
    assert sorted(pool.allocate(3)) == sorted(taken)


def test_allocating_more_than_is_free_is_an_error():
    pool = BlockPool(6)
    with pytest.raises(ValueError, match=r"count=6: must be at most 5, the available groups"):
        pool.allocate(6)
    assert pool.available == 5


def test_blocks_are_evicted_on_demand_from_the_end_of_a_chain():
    pool = BlockPool(7)
    keys = [b"a", b"b", b"c"]
    groups = [pool.allocate(2) for _ in keys]
    blocks = [pool.share(key, own) for key, own in zip(keys, groups, strict=True)]
    pool.release(blocks)
    assert pool.available == pool.idle_groups == 6
    assert pool.num_cached(keys) == 3
    assert sorted(pool.allocate(1)) == sorted(groups[2])[:1] or pool.num_cached(keys) == 2
    assert pool.num_cached(keys) == 2
    pool.allocate(3)
    assert pool.num_cached(keys) == 1


def test_blocks_in_use_are_not_evicted():
    pool = BlockPool(5)
    block = pool.share(b"a", pool.allocate(2))
    assert pool.find([b"a"]) == [block]
    pool.acquire([block])
    pool.release([block])
    assert pool.available == 2
    pool.release([block])
    assert pool.available == 4


def test_two_blocks_with_one_key_are_an_error():
    pool = BlockPool(5)
    pool.share(b"a", pool.allocate(2))
    with pytest.raises(ValueError, match=r"key=b'a': must not be the key of a block in the pool"):
        pool.share(b"a", pool.allocate(2))


def test_key_depends_on_the_whole_prefix_and_on_the_root():
    ids = np.arange(24, dtype=np.int32)
    keys = block_keys(ids, 8, "root")
    assert len(keys) == len(set(keys)) == 3
    assert block_keys(ids[:23], 8, "root") == keys[:2]
    assert block_keys(np.array([1, *ids[1:]], np.int32), 8, "root")[2] != keys[2]
    assert block_keys(ids, 8, "other") != keys
    assert block_keys(ids[:7], 8, "root") == []


def filled(places, *keys, groups=6):
    """A pool of blocks of two groups, all idle, and the blocks."""
    pool = BlockPool(groups + 1, places)
    blocks = []
    for key in keys:
        blocks.append(pool.share(key, pool.allocate(2)))
        pool.release(blocks[-1:])
    return pool, blocks


def test_idle_block_leaves_for_host_memory_and_comes_back():
    pool, (first, *_) = filled(3, b"a", b"b", b"c")
    old = first.groups
    pool.free(pool.allocate(2))
    assert (first.groups, pool.used_places) == ((), 1)
    assert pool.num_cached([b"a", b"b"]) == 2
    assert pool.num_cached([b"a", b"b"], on_device=True) == 0
    assert pool.cost([first]) == 2
    pool.acquire([first])
    assert pool.available == 4
    assert pool.take_copies() == [(old, first.place, True), (first.groups, first.place, False)]
    assert pool.take_copies() == []


def test_group_leaves_before_another_block_comes_into_it():
    pool, (first, second, _) = filled(3, b"a", b"b", b"c")
    pool.allocate(2)
    old = second.groups
    pool.acquire([first])
    assert first.groups == old
    assert [(copy.groups, copy.out) for copy in pool.take_copies()][1:] == [
        (old, True),
        (old, False),
    ]


def test_block_leaves_again_without_a_copy():
    pool, (first, *_) = filled(3, b"a", b"b", b"c")
    pool.free(pool.allocate(2))
    pool.acquire([first])
    pool.release([first])
    pool.take_copies()
    pool.allocate(6)
    assert first.groups == ()
    assert [copy.out for copy in pool.take_copies()] == [True, True]


def test_host_memory_drops_copies_first_and_then_the_least_recently_used():
    pool, (first, second, third) = filled(2, b"a", b"b", b"c")
    pool.free(pool.allocate(4))
    pool.acquire([second])  # it is on the device and in host memory
    pool.allocate(4)  # the third leaves
    assert (first.place, second.place, third.place) == (0, None, 1)
    assert pool.num_cached([b"a"]) == pool.num_cached([b"b"]) == pool.num_cached([b"c"]) == 1
    pool.release([second])
    pool.allocate(2)  # the second leaves, for which the first is dropped
    assert pool.num_cached([b"a"]) == 0
    assert {second.place, third.place} == {0, 1}


def test_pinned_blocks_are_never_dropped():
    pool, (first, second, third) = filled(1, b"a", b"b", b"c")
    pool.pin([first])
    pool.allocate(6)
    assert [block.place for block in (first, second, third)] == [0, None, None]
    assert pool.num_cached([b"b"]) == pool.num_cached([b"c"]) == 0
    pool.uncache([first])
    assert (pool.pinned, pool.used_places) == (1, 1)
    pool.unpin([first])
    assert (pool.pinned, pool.used_places) == (0, 0)


def test_block_that_comes_back_is_not_dropped_for_another_that_leaves():
    pool, (first, second, _) = filled(1, b"a", b"b", b"c")
    pool.allocate(2)
    pool.acquire([first])
    assert pool.take_copies()[-1] == (first.groups, 0, False)
    assert second.groups == ()
    assert pool.num_cached([b"b"]) == 0


def test_block_of_one_request_is_found_by_no_other_and_loses_its_copy():
    pool = BlockPool(5, 2)
    own = CacheBlock(b"", tuple(pool.allocate(2)), references=1)
    pool.pin([own])
    pool.release([own])
    assert pool.num_cached([b""]) == 0
    pool.free(pool.allocate(4))
    pool.acquire([own])
    pool.unpin([own])
    assert pool.used_places == 1
    assert pool.dissolve([own]) == list(own.groups)
    assert (pool.used_places, pool.available) == (0, 2)


def test_clearing_frees_host_memory():
    pool, blocks = filled(3, b"a", b"b", b"c")
    pool.allocate(2)
    pool.acquire(blocks[1:2])
    pool.clear()
    assert (pool.used_places, pool.available) == (0, 2)
    pool.release(blocks[1:2])
    assert pool.available == 4
