"""Replays equal the rules said plainly, request by request, libCacheSim where it has the policy, and the textbooks."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import libcachesim
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.simulate import obvious_caches

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, BundleShuffle, FullShuffle
from penstock.recordings.references import next_uses
from penstock.simulate.caches import (
    EVICTIONS,
    LARGEST_CACHE,
    NEVER,
    WITH_DISTANCES,
    hit_shares,
    replay,
    share_of,
    stack_distances,
)

Ids = NDArray[np.int64]


@st.composite
def strings(draw: st.DrawFn, longest: int = 300) -> Ids:
    """Requests as they come: at random over few or many objects, in epochs, in loops; ids small, wide or negative."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    objects = draw(st.integers(1, 80))
    length = draw(st.integers(0, longest))
    kind = draw(st.sampled_from(("random", "skewed", "epochs", "loop")))
    if kind == "random":
        string = rng.integers(0, objects, length)
    elif kind == "skewed":
        string = rng.zipf(1.3, length) % objects
    elif kind == "epochs":
        string = np.concatenate([rng.permutation(objects) for _ in range(length // objects + 1)])[:length]
    else:
        string = np.arange(length) % objects
    if draw(st.booleans()):
        string = rng.integers(-(2**63), 2**63 - 1, objects)[string]
    return np.asarray(string, np.int64)


def by_policy(string: Ids, capacity: int, policy: str) -> list[bool]:
    return obvious_caches.hits(policy, string.tolist(), capacity)


@pytest.mark.parametrize("policy", EVICTIONS)
@settings(max_examples=80)
@given(string=strings(), capacity=st.integers(0, 90))
def test_a_replay_evicts_whom_the_rule_names(policy: str, string: Ids, capacity: int) -> None:
    assert replay(string, capacity, policy).tolist() == by_policy(string, capacity, policy)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@settings(max_examples=60)
@given(string=strings(), capacity=st.integers(0, 300), seed=st.integers(0, 2**32))
def test_a_replay_with_sizes_evicts_whom_the_rule_names(
    policy: str, string: Ids, capacity: int, seed: int
) -> None:
    different, place = np.unique(string, return_inverse=True)
    sizes = np.random.default_rng(seed).integers(1, 40, different.size)[place]
    expected = obvious_caches.hits(policy, string.tolist(), capacity, sizes.tolist())

    assert replay(string, capacity, policy, sizes_bytes=sizes).tolist() == expected


THEIRS = {
    "lru": libcachesim.LRU,
    "lfu": libcachesim.LFU,
    "clock": libcachesim.Clock,
    "fifo": libcachesim.FIFO,
    "min": libcachesim.Belady,
}


def by_libcachesim(string: Ids, capacity: int, policy: str, sizes: list[int]) -> list[bool]:
    cache = THEIRS[policy](capacity, hashpower=8)
    following = next_uses(string, never=2**63 - 1)
    found = []
    for time, (key, size) in enumerate(zip(string.tolist(), sizes, strict=True)):
        request = libcachesim.Request(
            obj_id=key % 2**64, obj_size=size, next_access_vtime=int(following[time]), clock_time=time
        )
        found.append(bool(cache.get(request)))
    return found


@pytest.mark.parametrize("policy", THEIRS)
@settings(max_examples=40)
@given(string=strings(), capacity=st.integers(1, 90))
def test_a_replay_equals_libcachesim_request_by_request(policy: str, string: Ids, capacity: int) -> None:
    expected = by_libcachesim(string, capacity, policy, [1] * string.size)

    assert replay(string, capacity, policy).tolist() == expected


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@settings(max_examples=30)
@given(string=strings(), capacity=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_a_replay_with_sizes_equals_libcachesim_request_by_request(
    policy: str, string: Ids, capacity: int, seed: int
) -> None:
    different, place = np.unique(string, return_inverse=True)
    sizes = np.random.default_rng(seed).integers(1, 40, different.size)[place]
    expected = by_libcachesim(string, capacity, policy, sizes.tolist())

    assert replay(string, capacity, policy, sizes_bytes=sizes).tolist() == expected


@pytest.mark.parametrize("policy", WITH_DISTANCES)
@settings(max_examples=60)
@given(string=strings())
def test_a_request_hits_in_all_caches_from_its_stack_distance_on(policy: str, string: Ids) -> None:
    distances = stack_distances(string, policy)

    for capacity in range(1, 82, 4):
        assert (distances <= capacity).tolist() == by_policy(string, capacity, policy)
    first_uses = np.unique(string, return_index=True)[1]
    assert sorted(np.flatnonzero(distances == NEVER)) == sorted(first_uses)


def test_lru_distances_count_the_different_objects_in_between() -> None:
    rng = np.random.default_rng(5)
    string = rng.integers(0, 3000, 20_000)  # marks are moved together several times
    distances = stack_distances(string)

    for request in rng.integers(0, string.size, 300).tolist():
        before = np.flatnonzero(string[:request] == string[request])
        expected = np.unique(string[before[-1] : request]).size if before.size else NEVER
        assert distances[request] == expected


@for_each("policy", EVICTIONS)
def test_hit_shares_are_those_of_one_replay_per_size_in_the_order_asked_for(policy: str) -> None:
    string = AccessPlan(BundleShuffle(200, seed=1), batch_size=200, epochs=4).string(0)
    sizes = [70, 0, 200, 1, 70, 500]

    ratios = hit_shares(string, sizes, policy)

    assert ratios.tolist() == [by_policy(string, size, policy).count(True) / string.size for size in sizes]
    assert ratios[2] == ratios[5] == 0.75


@settings(max_examples=40)
@given(string=strings().filter(len), capacity=st.integers(0, 60))
def test_no_policy_hits_more_often_than_min(string: Ids, capacity: int) -> None:
    best = replay(string, capacity, "min").sum()

    assert all(replay(string, capacity, policy).sum() <= best for policy in EVICTIONS)


def test_on_epochs_mru_is_as_good_as_min_and_perfect_lfu_the_same_as_lru() -> None:
    """MRU keeps what the last epoch left; uses counted over the run order an epoch's objects by last use."""
    string = AccessPlan(FullShuffle(500, seed=2), batch_size=500, epochs=5).string(0)

    for capacity in (5, 50, 250, 480):
        assert replay(string, capacity, "mru").sum() == pytest.approx(4 * capacity, abs=8)
        assert replay(string, capacity, "min").sum() == pytest.approx(4 * capacity, abs=8)
        assert (replay(string, capacity, "perfect-lfu") == replay(string, capacity, "lru")).all()


#: Silberschatz, Galvin & Gagne, "Operating System Concepts", section on page replacement: the string of all figures.
TEXTBOOK = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1]
#: Belady, Nelson & Shedler 1969: more frames, more faults.
ANOMALY = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]


@for_each(
    ("policy", "references", "frames", "faults"),
    [
        ("fifo", TEXTBOOK, 3, 15),
        ("lru", TEXTBOOK, 3, 12),
        ("min", TEXTBOOK, 3, 9),
        ("fifo", ANOMALY, 3, 9),
        ("fifo", ANOMALY, 4, 10),
    ],
)
def test_the_faults_of_textbook_strings_are_those_in_the_books(
    policy: str, references: list[int], frames: int, faults: int
) -> None:
    assert replay(references, frames, policy).tolist().count(False) == faults


@settings(max_examples=40)
@given(references=st.lists(st.integers(0, 4), max_size=12), capacity=st.integers(1, 3))
def test_no_choice_of_victims_hits_more_often_than_min(references: list[int], capacity: int) -> None:
    @cache
    def most_hits(start: int, residents: frozenset[int]) -> int:
        if start == len(references):
            return 0
        key = references[start]
        if key in residents:
            return 1 + most_hits(start + 1, residents)
        if len(residents) < capacity:
            return most_hits(start + 1, residents | {key})
        return max(most_hits(start + 1, residents - {victim} | {key}) for victim in residents)

    assert replay(references, capacity, "min").sum() == most_hits(0, frozenset())


def test_an_object_keeps_the_size_it_came_with_first() -> None:
    # Were the second size of 1 to count, both would fit.
    assert replay([1, 2, 1], 10, "lru", sizes_bytes=[6, 5, 1]).tolist() == [False, False, False]


@for_each(
    ("arguments", "message"),
    [
        (
            ([1, 2], 1, "arc"),
            "no eviction policy 'arc'; known are lru, lfu, mru, clock, fifo, perfect-lfu, min",
        ),
        (([1, 2], -1, "lru"), "cache size is -1"),
        (([1, 2], 1.5, "lru"), r"cache size is 1\.5"),
        (([1, 2], True, "lru"), "cache size is True"),
        (([0.5], 1, "lru"), r"references are float64\[1\]"),
        (([[1]], 1, "lru"), r"references are int64\[1, 1\]"),
    ],
)
def test_what_cannot_be_replayed_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(*arguments)


def test_wrong_sizes_of_objects_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="clock is replayed over equal objects only; lru and fifo take sizes"
    ):
        replay([1, 2], 1, "clock", sizes_bytes=[1, 1])
    with pytest.raises(ConfigError, match="sizes_bytes is 0 at request 1"):
        replay([1, 2], 1, "lru", sizes_bytes=[1, 0])
    with pytest.raises(ConfigError, match=r"sizes_bytes is int64\[1\]; 2 requests"):
        replay([1, 2], 1, "lru", sizes_bytes=[1])


@for_each("policy", EVICTIONS)
@for_each("capacity", [10**9, 2**63, 2**70])
def test_a_cache_of_any_size_hits_all_but_first_uses(policy: str, capacity: int) -> None:
    assert replay([1, 2, 1, 2, 3], capacity, policy).tolist() == [False, False, True, True, False]
    assert hit_shares([1, 2, 1, 2, 3], [capacity], policy).tolist() == [0.4]


def test_objects_may_have_any_size_that_can_be_counted() -> None:
    large = 2**61
    assert replay([1, 2, 1], large, "lru", sizes_bytes=[large, large, 1]).tolist() == [False, False, False]
    assert replay([1, 2, 1], 2 * large, "fifo", sizes_bytes=[large, large, 1]).tolist() == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("sizes", [[2**62, 2**62, 2**62], np.array([2**63 + 1, 1, 1], np.uint64)])
def test_sizes_that_overflow_are_refused(sizes: list[int]) -> None:
    for policy in ("lru", "fifo"):
        with pytest.raises(ConfigError, match=r"adds up to 9.22e\+18 bytes of all objects"):
            replay([1, 2, 1], 10, policy, sizes_bytes=sizes)


@pytest.mark.parametrize("share", [-0.1, float("nan")])
def test_a_share_of_nothing_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="a cache's relative size is"):
        share_of(10, share)


def test_a_share_beyond_all_numbers_is_the_largest_cache() -> None:
    assert share_of(10, 1e308) == share_of(10, float("inf")) == LARGEST_CACHE


def test_no_ratio_without_requests_and_no_distance_without_a_stack() -> None:
    with pytest.raises(ConfigError, match="references are empty"):
        hit_shares([], [1], "lru")
    with pytest.raises(ConfigError, match="fifo has no stack distances"):
        stack_distances([1], "fifo")
    with pytest.raises(ConfigError, match="no eviction policy 'arc'"):
        stack_distances([1], "arc")
    assert replay([], 3, "min").tolist() == []
    assert stack_distances([]).tolist() == []


def test_importing_the_simulation_loads_no_compiler() -> None:
    code = "import sys, penstock.simulate.caches, penstock.simulate.cache_study; sys.exit('numba' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
