"""Tests the ownership of page groups and cached blocks."""

import numpy as np
import pytest

from jsparse.engine.blocks import BlockPool, block_keys

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
    (again,) = pool.acquire([b"a"])
    assert again is block
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
