"""Batches of so many tokens against batches cut in plain Python, and what is true of them whatever the lengths."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, BundleShuffle, DescribedOrder, Explicit, FullShuffle, TokenBudget


def cut_plainly(order: TokenBudget, epoch: int, begin: int, end: int) -> list[list[int]]:
    """Return the batches of a pool before they are shuffled, sample by sample."""
    lengths = np.asarray(order.lengths)
    ids = order.order.at(epoch, np.arange(begin, end)).tolist()
    if order.is_sorted:
        ids.sort(key=lambda sample: lengths[sample])
    batches: list[list[int]] = [[]]
    for sample in ids:
        together = [*batches[-1], sample]
        if batches[-1] and (
            (order.tokens is not None and needed(order, together) > order.tokens)
            or len(together) > (order.largest or 10**9)
        ):
            batches.append([sample])
        else:
            batches[-1] = together
    return batches


def needed(order: TokenBudget, batch: list[int]) -> int:
    of_each = [
        max(1, -(-int(np.asarray(order.lengths)[sample]) // order.multiple_of) * order.multiple_of)
        for sample in batch
    ]
    return len(batch) * max(of_each) if order.padded else sum(of_each)


def batches_of(order: TokenBudget, epoch: int, ranks: int = 1) -> list[list[int]]:
    bounds = order.bounds(epoch, ranks).tolist()
    ids = order.at(epoch, np.arange(order.length(epoch))).tolist()
    return [ids[begin:end] for begin, end in pairwise(bounds)]


@st.composite
def budgets(draw: st.DrawFn) -> TokenBudget:
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=60))
    shuffle: Any = draw(st.sampled_from([True, False, BundleShuffle(len(lengths), 3, 0.4)]))
    tokens = draw(st.none() | st.integers(24, 80))
    return TokenBudget(
        np.array(lengths, draw(st.sampled_from([np.int32, np.int64, np.uint16]))),
        tokens,
        largest=draw(st.sampled_from([1, 4] if tokens is None else [None, 1, 4])),
        padded=draw(st.booleans()),
        multiple_of=draw(st.sampled_from([1, 8])),
        shuffle=shuffle,
        seed=draw(st.integers(0, 9)),
        pool=draw(st.sampled_from([1, 7, 16, 1 << 16])),
    )


@settings(max_examples=200)
@given(budgets(), st.integers(0, 3), st.integers(1, 5))
def test_batches_are_those_that_are_cut_plainly(order: TokenBudget, epoch: int, ranks: int) -> None:
    batches, samples = batches_of(order, epoch), order.samples
    pool = order.pool if order.is_sorted else samples
    pools = [cut_plainly(order, epoch, at, min(at + pool, samples)) for at in range(0, samples, pool)]

    assert sorted(sample for batch in batches for sample in batch) == list(range(samples))
    begin = 0
    for expected in pools:
        found = batches[begin : begin + len(expected)]
        begin += len(expected)
        assert sorted(found) == sorted(expected)
        if order.shuffle is False or not order.is_sorted:
            assert found == expected
    assert begin == len(batches)
    assert max(map(len, batches)) <= order.most
    assert order.tokens is None or max(needed(order, batch) for batch in batches) <= order.tokens
    if order.tokens is None and order.is_sorted:
        assert sum(len(batch) != order.largest for batch in batches) <= 1
    padding = order.padding(epoch)
    assert padding.tokens == int(np.asarray(order.lengths).sum())
    assert padding.places == sum(
        len(batch) * max(needed(order, [sample]) for sample in batch) for batch in batches
    )

    positions = order.position_of(epoch, np.arange(samples))
    assert order.at(epoch, positions).tolist() == list(range(samples))
    shared = batches_of(order, epoch, ranks)
    if samples >= len(batches) + ranks:
        assert len(shared) % ranks == 0
    assert [sample for batch in shared for sample in batch] == [
        sample for batch in batches for sample in batch
    ]
    assert len(shared) < len(batches) + ranks


def test_every_rank_plans_the_same_and_has_as_many_steps() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 5_000)
    plans = [AccessPlan.of_batches(TokenBudget(lengths, 2_000, seed=3), epochs=2, ranks=3) for _ in range(2)]

    for plan in plans:
        plan.check_equal_steps()
    for rank in range(3):
        assert plans[0].string(rank).tolist() == plans[1].string(rank).tolist()
    uses = sum(plans[0].uses(rank)[0] for rank in range(3))
    assert uses.tolist() == [2] * 5_000  # type: ignore[union-attr]
    assert plans[0].string(0)[:100].tolist() != plans[0].stream(0, 1, 0, 100).tolist()


def test_samples_of_like_length_leave_little_padding_and_batches_are_no_longer_in_order_of_length() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 20_000)
    sorted_, alone = TokenBudget(lengths, 8_000), TokenBudget(lengths, 8_000, pool=1)

    assert sorted_.padding(0).share < 0.02
    assert alone.padding(0).share > 0.3
    means = np.array([lengths[batch].mean() for batch in batches_of(sorted_, 0)])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1


def test_the_batches_of_a_seed_stay_those_that_they_were() -> None:
    """Golden: a run that resumes under a later version must go on with the same batches."""
    order = TokenBudget(np.arange(100_000) % 997 + 1, 20_000, seed=5)
    digest = xxhash.xxh3_64()
    for epoch in range(2):
        digest.update(order.at(epoch, np.arange(100_000)).tobytes())
        digest.update(order.bounds(epoch, 4).tobytes())

    assert digest.hexdigest() == "4dfffb7dd542d85d"


def test_lengths_may_be_a_memory_map_and_are_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([3, 9, 4, 8, 2], np.int32))
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    order = TokenBudget(mapped, 18)

    assert order.lengths is mapped
    again = pickle.loads(pickle.dumps(TokenBudget(np.asarray(mapped), 18)))
    assert batches_of(order, 1) == batches_of(again, 1)


def test_a_state_has_a_digest_of_the_lengths() -> None:
    order = TokenBudget([3, 9, 4], 18)
    described = order.describe()

    assert isinstance(order, DescribedOrder)
    assert described != TokenBudget([3, 9, 5], 18).describe()
    assert described != TokenBudget([3, 9, 4], 19).describe()
    assert described == TokenBudget(np.array([3, 9, 4]), 18).describe()
    assert described["order"] == {"kind": "FullShuffle", "samples": 3, "seed": 0}


@for_each(
    ("lengths", "arguments", "message"),
    [
        ([3, 19, 4], {}, r"tokens is 18, and sample 1 has 19: give more tokens"),
        ([3, 17, 4], {"multiple_of": 8}, r"sample 1 has 17, which count as 24"),
        ([3, -1], {}, r"lengths has -1 for sample 1"),
        ([3.5], {}, r"lengths is float64 of shape \(1,\)"),
        ([], {}, r"lengths is float64 of shape \(0,\)"),
        ([[3]], {}, r"lengths is int64 of shape \(1, 1\)"),
        ([3], {"pool": 0}, r"pool is 0"),
        ([3], {"largest": 0}, r"largest is 0"),
        ([3], {"multiple_of": 2.0}, r"multiple_of is 2\.0"),
        ([3], {"seed": -1}, r"seed is -1"),
        ([3], {"shuffle": FullShuffle(2)}, r"of 1 sample and shuffle an order over 2"),
        ([3], {"shuffle": Explicit([0], 1)}, r"shuffle is Explicit.* at most once"),
        ([3], {"shuffle": "yes"}, r"shuffle is 'yes'"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    lengths: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenBudget(lengths, 18, **arguments)
    with pytest.raises(ConfigError, match="tokens is 0"):
        TokenBudget([1], 0)
    with pytest.raises(ConfigError, match="tokens and largest are left out"):
        TokenBudget([1])


def test_without_tokens_batches_have_so_many_samples_of_like_length() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 70_001)
    order = TokenBudget(lengths, largest=100)

    sizes = np.diff(order.bounds(0, 1))
    assert sorted(sizes.tolist()) == [1, *[100] * 700]
    assert order.padding(0).share < 0.01
    AccessPlan.of_batches(order, epochs=1, ranks=8).check_equal_steps()


def test_more_ranks_than_samples_are_refused() -> None:
    plan = AccessPlan.of_batches(TokenBudget([3, 9], 18, largest=1), epochs=1, ranks=3)
    with pytest.raises(ConfigError, match="epoch 0 has 2 batches for 3 ranks"):
        plan.check_equal_steps()
