"""The block pool shares known prefixes, and never hands out a block that somebody holds."""

import random

import pytest
from syncfree.backends.engine.blocks import BlockPool, hash_block
from syncfree.planner.errors import BadInput


def names_of(tokens, size):
    names = []
    for start in range(0, len(tokens) - size + 1, size):
        names.append(hash_block(names[-1] if names else b"", tokens[start : start + size]))
    return names


def test_a_block_is_named_by_its_content_and_all_before_it():
    assert names_of([1, 2, 3, 4], 2) == names_of([1, 2, 3, 4], 2)
    assert names_of([1, 2, 3, 4], 2)[1] != names_of([9, 2, 3, 4], 2)[1]
    assert hash_block(b"", [1, 23]) != hash_block(b"", [12, 3])


def test_too_few_blocks_takes_none():
    pool = BlockPool(3, 4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_a_freed_block_is_found_until_it_is_handed_out_again():
    pool = BlockPool(2, 2)
    name = names_of([1, 2], 2)[0]
    block = pool.allocate(1)[0]
    pool.name(block, name)
    pool.release([block])
    assert pool.share([name]) == [block]
    pool.release([block])
    pool.allocate(2)
    assert pool.share([name]) == []


def test_sharing_stops_at_the_first_unknown_block():
    pool = BlockPool(4, 1)
    names = names_of([1, 2, 3], 1)
    blocks = pool.allocate(3)
    pool.name(blocks[0], names[0])
    pool.name(blocks[2], names[2])
    assert pool.share(names) == blocks[:1]


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    pool = BlockPool(3, 1)
    names = names_of([1, 2, 3], 1)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, names, strict=True):
        pool.name(block, name)
    pool.release(blocks)
    assert pool.allocate(1) == blocks[2:]
    assert pool.share(names) == blocks[:2]


def test_random_use_never_hands_out_a_held_block_and_loses_none():
    rng = random.Random(3)
    pool, held = BlockPool(12, 2), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
            continue
        names = names_of([rng.randrange(2) for _ in range(rng.randrange(1, 9))], 2)
        shared = pool.share(names)
        fresh = pool.allocate(len(names) - len(shared))
        if fresh is None:
            pool.release(shared)
            continue
        assert not set(fresh) & {block for blocks in held for block in blocks}
        for block, name in zip(fresh, names[len(shared) :], strict=True):
            pool.name(block, name)
        held.append(shared + fresh)
        assert pool.num_free == 12 - len({block for blocks in held for block in blocks})


def test_sizes_below_one_are_refused():
    with pytest.raises(BadInput, match="expected >= 1, got 0, 4"):
        BlockPool(0, 4)
