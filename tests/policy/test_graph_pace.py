"""Which workers of a graph have become slower."""

from __future__ import annotations

from penstock.policy.graph_pace import Pace, PaceChange


def counted(pace: Pace, steps: int, **busy: float) -> list[dict[str, PaceChange]]:
    """Return what is found in some steps that take a second each."""
    found = [pace.count(busy, 1.0) for _ in range(steps)]
    return [each for each in found if each]


def test_a_worker_that_takes_five_times_as_long_as_it_did_is_found_once_and_when_it_is_as_fast_again() -> (
    None
):
    pace = Pace({})
    assert not counted(pace, 1, a=9.0, b=9.0)  # in which workers compile
    assert not counted(pace, 40, a=0.1, b=0.1)
    for _ in range(2):
        assert not counted(pace, 15, a=0.1, b=0.5)
        assert counted(pace, 80, a=0.1, b=0.5) == [{"b": PaceChange(5.0, 0.5, 0.1)}]
        assert not counted(pace, 9, a=0.1, b=0.1)
        assert not counted(pace, 8, a=0.1, b=0.2)  # twice as slow is not as fast
        assert not counted(pace, 15, a=0.1, b=0.1)
        assert counted(pace, 24, a=0.1, b=0.1) == [{"b": PaceChange(1.0, 0.1, 0.1)}]


def test_slowness_is_over_what_a_worker_took_before_all_of_it_also_where_that_was_in_other_parts() -> None:
    pace = Pace({"b": 5.0})
    assert not counted(pace, 17, a=0.1, b=0.5)
    assert counted(pace, 16, a=0.1, b=1.5) == [{"b": PaceChange(15.0, 1.5, 0.1)}]
    # Next to a worker that is known to be slow, another one becomes so, too.
    assert counted(pace, 16, a=0.5, b=1.5) == [{"a": PaceChange(5.0, 0.5, 0.1)}]
    assert counted(pace, 16, a=0.5, b=0.1) == [{"b": PaceChange(1.0, 0.1, 0.1)}]


def test_a_worker_is_not_slower_where_all_are_or_for_a_few_steps_or_where_nobody_feels_it() -> None:
    pace = Pace({})
    assert not counted(pace, 17, a=0.1, b=0.2, c=0.0001)
    assert not counted(pace, 16, a=0.5, b=1.0, c=0.0005)  # all share a machine
    assert not counted(pace, 8, a=0.1, b=9.0, c=0.0001)
    assert not counted(pace, 8, a=0.1, b=0.2, c=0.0001)
    assert not counted(pace, 16, a=0.1, b=0.2, c=0.001)
    assert not counted(pace, 16, a=0.1, b=0.5, c=0.0001)  # another program takes half of it


def test_short_steps_count_once_they_have_lasted_a_second() -> None:
    pace, step = Pace({}), 1 / 32
    slow = [False] * 33 + [True] * 64
    found = [len(pace.count({"a": 0.03 if each else 0.005}, step)) for each in slow]
    assert found == [0] * 96 + [1]


def test_a_worker_alone_is_compared_with_itself_and_with_what_others_take_now() -> None:
    alone, pace = Pace({}), Pace({})
    counted(alone, 9, a=0.1)
    assert counted(alone, 16, a=0.4) == [{"a": PaceChange(4.0, 0.4, 0.1)}]
    counted(pace, 9, a=0.1, b=0.1)
    assert counted(pace, 16, a=0.2, b=1.0) == [{"b": PaceChange(5.0, 1.0, 0.1)}]
