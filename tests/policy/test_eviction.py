"""Which object a full cache forgets: against textbook strings, the rules said plainly, and the best there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.eviction import EVICTIONS, Clock, Lfu, Lru, Min, Residents, eviction_of

#: Silberschatz, Galvin & Gagne, "Operating System Concepts", section on page replacement: the string of all figures.
TEXTBOOK = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1]
#: Belady, Nelson & Shedler 1969: more frames, more faults.
ANOMALY = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]

short_strings = st.lists(st.integers(0, 7), max_size=60)


def hits(policy: str, references: Sequence[Hashable], capacity: int) -> list[bool]:
    residents = Residents(eviction_of(policy, references), capacity)
    return [residents.access(key).is_hit for key in references]


@pytest.mark.parametrize(
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
    assert hits(policy, references, frames).count(False) == faults


# The rules said plainly: of every resident when it was admitted, last used and how often, and who goes.
History = dict[Hashable, tuple[int, int, int]]
PLAIN_RULES: dict[str, Callable[[History], Hashable]] = {
    "lru": lambda residents: min(residents, key=lambda key: residents[key][1]),
    "mru": lambda residents: max(residents, key=lambda key: residents[key][1]),
    "fifo": lambda residents: min(residents, key=lambda key: residents[key][0]),
    "lfu": lambda residents: min(residents, key=lambda key: (residents[key][2], residents[key][1])),
}


@pytest.mark.parametrize("policy", PLAIN_RULES)
@settings(max_examples=60)
@given(references=short_strings, capacity=st.integers(1, 9))
def test_a_policy_evicts_whom_its_rule_names(policy: str, references: list[int], capacity: int) -> None:
    residents = Residents(eviction_of(policy), capacity)
    history: History = {}

    for time, key in enumerate(references):
        access = residents.access(key)

        assert access.is_hit == (key in history)
        if access.is_hit:
            admitted, _, uses = history[key]
            history[key] = (admitted, time, uses + 1)
            continue
        expected = [PLAIN_RULES[policy](history)] if len(history) == capacity else []
        assert access.evicted == expected
        for victim in expected:
            del history[victim]
        history[key] = (time, time, 1)


def test_perfect_lfu_remembers_the_uses_of_what_it_evicted() -> None:
    perfect, in_cache = Residents(Lfu(is_perfect=True), 2), Residents(Lfu(), 2)
    for residents in (perfect, in_cache):
        for key in "xxxyya":
            residents.access(key)
        assert residents.access("y").evicted == ["a"]  # y had gone for a, with two uses, and is back

    # Three uses of y in all are as many as x has, and x was used longer ago; in the cache y was used once.
    assert perfect.access("b").evicted == ["x"]
    assert in_cache.access("b").evicted == ["y"]


@settings(max_examples=60)
@given(references=short_strings, frames=st.integers(1, 6))
def test_clock_is_a_hand_over_a_ring_of_frames(references: list[int], frames: int) -> None:
    ring: list[list[int]] = []  # object, bit
    hand = 0
    expected = []
    for key in references:
        frame = next((frame for frame in ring if frame[0] == key), None)
        expected.append(frame is not None)
        if frame is not None:
            frame[1] = 1
        elif len(ring) < frames:
            ring.append([key, 0])
        else:
            while ring[hand][1]:
                ring[hand][1] = 0
                hand = (hand + 1) % frames
            ring[hand] = [key, 0]
            hand = (hand + 1) % frames

    assert hits("clock", references, frames) == expected


@settings(max_examples=40)
@given(references=st.lists(st.integers(0, 4), max_size=12), capacity=st.integers(1, 3))
def test_no_choice_of_victims_hits_more_often_than_min(references: list[int], capacity: int) -> None:
    string = tuple(references)

    @cache
    def most_hits(start: int, residents: frozenset[int]) -> int:
        if start == len(string):
            return 0
        key = string[start]
        if key in residents:
            return 1 + most_hits(start + 1, residents)
        if len(residents) < capacity:
            return most_hits(start + 1, residents | {key})
        return max(most_hits(start + 1, residents - {victim} | {key}) for victim in residents)

    assert sum(hits("min", string, capacity)) == most_hits(0, frozenset())


def test_min_can_be_told_of_the_future_by_a_plan() -> None:
    """A loader asks the plan for the next use instead of keeping the string."""
    plan = AccessPlan(FullShuffle(40, seed=3), batch_size=40, epochs=4)
    string = plan.string(0).tolist()
    now = -1

    def next_use(sample: Hashable) -> float:
        assert isinstance(sample, int)
        epoch, position = divmod(now, 40)
        later, at = plan.next_use([sample], epoch, position)
        return math.inf if later[0] < 0 else float(later[0] * 40 + at[0])

    residents = Residents(Min(next_use), 13)
    found = []
    for now, sample in enumerate(string):  # noqa: B007 - next_use reads it
        found.append(residents.access(sample).is_hit)

    assert found == hits("min", string, 13)
    # (E - 1) C hits are the most there are; one frame always goes to the sample read last.
    assert 3 * 12 <= sum(found) <= 3 * 13


def test_min_keeps_no_more_than_its_residents_in_mind() -> None:
    policy = Min.for_string([0, 1] * 5000)
    residents = Residents(policy, 2)

    for key in [0, 1] * 5000:
        residents.access(key)

    assert len(policy._farthest) <= 2 * 2 + 64


@pytest.mark.parametrize("policy", EVICTIONS)
@settings(max_examples=30)
@given(
    references=short_strings,
    capacity=st.integers(0, 20),
    sizes=st.lists(st.integers(1, 9), min_size=8, max_size=8),
)
def test_a_cache_never_holds_more_than_its_capacity(
    policy: str, references: list[int], capacity: int, sizes: list[int]
) -> None:
    residents = Residents(
        eviction_of(policy, [key for key in references if sizes[key] <= capacity]), capacity
    )
    held: set[Hashable] = set()

    for key in references:
        was_resident = key in held
        access = residents.access(key, sizes[key])

        held = held - set(access.evicted) | ({key} if sizes[key] <= capacity else set())
        assert access.is_hit == was_resident
        assert residents.used == sum(sizes[each] for each in held if isinstance(each, int)) <= capacity
        assert len(residents) == len(held)
        assert (key in residents) == (sizes[key] <= capacity)


def test_an_object_larger_than_the_cache_pushes_nothing_out() -> None:
    residents = Residents(Lru(), 10)
    residents.access("small", 4)

    assert residents.access("large", 11) == (False, ())
    assert "small" in residents
    assert "large" not in residents


def test_clock_ends_its_turn_when_every_object_was_used() -> None:
    residents = Residents(Clock(), 3)
    for key in "abcabc":
        residents.access(key)

    assert residents.access("d").evicted == ["a"]


def test_an_unknown_policy_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no eviction policy 'arc'; known are lru, lfu, mru, clock, fifo"):
        eviction_of("arc")
    with pytest.raises(ConfigError, match="capacity is -1"):
        Residents(Lru(), -1)


@pytest.mark.parametrize("wrong", [float("nan"), -1])
def test_capacities_and_sizes_that_are_no_numbers_are_refused(wrong: int) -> None:
    with pytest.raises(ConfigError, match="capacity is"):
        Residents(Lru(), wrong)
    residents = Residents(Lru(), 10)
    with pytest.raises(ConfigError, match=r"size is .* of object 'a'"):
        residents.access("a", wrong)
    assert (residents.used, len(residents)) == (0, 0)
