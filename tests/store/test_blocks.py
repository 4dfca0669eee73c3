"""Blocks of one size in memory: found once they are kept, and never written while somebody reads them."""

import gc

import numpy as np
import pytest

from penstock.errors import ClosedError, ConfigError
from penstock.store.blocks import BlockTier

SHAPE = (2, 3)


def put(tier: BlockTier, sample: int, epoch: int | None = None) -> bool:
    """Keep a block that has the sample's number everywhere; return whether there was one."""
    for block in (blocks := tier.take(1)):
        tier.array[block] = sample
        tier.keep(block, sample, epoch)
    return bool(blocks)


def test_a_block_of_an_epoch_is_found_once_and_is_free_only_when_nobody_reads_it() -> None:
    tier = BlockTier(13, SHAPE)
    assert put(tier, 7, 4)
    assert put(tier, 8, 4)
    assert not put(tier, 9, 4)

    assert tier.find(7, 5) is None
    found = tier.find(7, 4)
    assert found is not None
    assert tier.find(7, 4) is None
    assert not put(tier, 9, 4), "somebody reads the only block that is not kept"
    assert (found == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0

    del found
    gc.collect()
    assert put(tier, 9, 4)
    assert not put(tier, 10, 4)
    tier.forget([9], range(5))
    assert put(tier, 10, 4)
    assert len(tier) == 2


def test_a_block_for_all_epochs_stays_and_a_second_one_of_the_same_sample_is_free_at_once() -> None:
    tier = BlockTier(12, SHAPE)
    assert put(tier, 3)
    first = tier.find(3)
    assert put(tier, 3)
    assert put(tier, 4)

    assert first is not None
    assert (first == 3).all()
    again = tier.find(3)
    assert again is not None
    assert np.shares_memory(first, again)
    tier.close()
    tier.close()
    with pytest.raises(ClosedError, match="tier is closed"):
        tier.find(3)


def test_a_tier_without_any_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_bytes is 0"):
        BlockTier(0, SHAPE)


def test_what_was_freed_last_is_taken_first_as_its_memory_is_there_already() -> None:
    tier = BlockTier(18, SHAPE)
    taken = tier.take(1)
    tier.give_back(taken)

    assert tier.take(1) == taken
