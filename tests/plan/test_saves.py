"""When saves are due, and that the intervals of the papers lose the least time, by trying out failures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan.saves import (
    Auto,
    EveryMinutes,
    EverySteps,
    SaveCost,
    SaveSchedule,
    daly_seconds,
    read_schedule,
    young_seconds,
)

DAY = 86_400.0


def test_every_so_many_steps_is_known_ahead_and_saves_nothing_before_the_first() -> None:
    schedule = EverySteps(1000)

    assert list(schedule.steps(3500)) == [1000, 2000, 3000]
    assert len(schedule.steps(999)) == 0
    assert schedule.is_known_ahead
    assert not schedule.is_due(0)


def test_a_run_that_goes_on_from_a_snapshot_saves_at_the_same_steps() -> None:
    schedule = EverySteps(300)

    assert [step for step in range(1001, 2001) if schedule.is_due(step, 1e9, None)] == [1200, 1500, 1800]


def test_minutes_are_those_that_the_training_went_on_for() -> None:
    schedule = EveryMinutes(30)

    assert not schedule.is_due(7, 1799.9)
    assert schedule.is_due(7, 1800.0, SaveCost(5.0))
    assert not schedule.is_due(0, 1e9)
    assert not schedule.is_known_ahead


def test_auto_saves_once_to_learn_what_that_costs_then_waits_until_it_is_durable() -> None:
    schedule = Auto(DAY, least_seconds=0.0)
    under_way, done = SaveCost(2.0), SaveCost(2.0, 100.0)
    best = daly_seconds(2.0, DAY)

    assert [schedule.is_due(step, 0.0, None) for step in (0, 1)] == [False, True]
    assert not schedule.is_due(2, 1e9, under_way)
    assert [schedule.is_due(2, seconds, done) for seconds in (0.999 * best, best)] == [False, True]


def test_auto_never_saves_more_often_than_a_save_takes_or_than_was_allowed() -> None:
    slow_drive = SaveCost(0.5, 3000.0)

    assert Auto(DAY).interval_seconds(slow_drive) == 2999.5
    assert Auto(DAY).interval_seconds(SaveCost(0.001, 0.002)) == 60.0
    assert Auto(DAY, least_seconds=0.0).interval_seconds(SaveCost(0.0, 0.0)) == 0.0


def test_a_small_save_may_be_durable_before_the_training_has_looked_at_its_clock() -> None:
    assert SaveCost(0.002, 0.001).after_seconds == 0.0


COSTS = st.builds(
    lambda blocked, after: SaveCost(blocked, blocked + after), st.floats(0, 100), st.floats(0, 1000)
)


@given(
    st.one_of(
        st.builds(EverySteps, st.integers(1, 50)),
        st.builds(EveryMinutes, st.floats(0.01, 20)),
        st.builds(Auto, st.floats(10, 1e6), st.floats(0, 100)),
    ),
    st.integers(0, 200),
    st.integers(1, 40).map(lambda tenths: tenths / 8),
    COSTS,
)
@example(EveryMinutes(1.0), 100, 7.5, SaveCost(0.0, 0.0))
def test_the_steps_told_ahead_are_those_at_which_a_run_would_save(
    schedule: SaveSchedule, until: int, step_seconds: float, cost: SaveCost
) -> None:
    saved, since, known = [], 0, None
    for step in range(1, until + 1):
        since += 1
        if schedule.is_due(step, since * step_seconds, known):
            saved.append(step)
            since, known = 0, cost

    assert list(schedule.steps(until, step_seconds=step_seconds, cost=cost)) == saved


# -- The best interval -------------------------------------------------------------------------------------


def useful_share(
    interval: float,
    cost: float,
    gaps: NDArray[np.float64],
    restart: float = 0.0,
    durable: float | None = None,
) -> float:
    """Run a training through failures: the part of all time that was training and not lost again.

    gaps: from one failure to the next, in which a restart comes first, then interval, save, interval, save, ...
    durable: from the beginning of a save until a failure does not lose it any more; with its end unless given.
    """
    late = 0.0 if durable is None else durable - cost
    saves = np.floor(np.maximum(gaps - restart - late, 0.0) / (interval + cost))
    return float(interval * saves.sum() / gaps.sum())


def gaps_of(mean_seconds: float) -> NDArray[np.float64]:
    return np.random.default_rng(4).exponential(mean_seconds, 400_000)


@pytest.mark.parametrize("cost", [0.1, 10.0, 600.0, 20_000.0])
@pytest.mark.parametrize(
    ("restart", "late"),
    [*(pytest.param(each, 0.0, marks=pytest.mark.slow) for each in (0.0, 900.0)), (60.0, 300.0)],
)
def test_dalys_interval_loses_hardly_more_than_the_best_that_can_be_found(
    cost: float, restart: float, late: float
) -> None:
    """The same failures for every interval; what is lost for lack of time to search finely is allowed for."""
    gaps, best = gaps_of(DAY), daly_seconds(cost, DAY)
    tried = best * 2.0 ** np.linspace(-3, 3, 49)

    lost = [1 - useful_share(each, cost, gaps, restart, cost + late) for each in tried]
    of_daly = 1 - useful_share(best, cost, gaps, restart, cost + late)

    assert of_daly <= 1.01 * min(lost)
    assert of_daly < 0.95 * lost[0]
    assert of_daly < 0.95 * lost[-1]


def test_dalys_interval_is_the_exact_one_as_far_as_its_series_goes() -> None:
    """Exact: the least of (e^((t + C) / M) - 1) / t, the mean time per useful second (Daly 2006, section 3)."""
    for cost, closeness in ((0.01, 1e-4), (60.0, 1e-4), (3600.0, 1e-3), (0.5 * DAY, 6e-3)):
        tried = daly_seconds(cost, DAY) * np.linspace(0.8, 1.2, 400_001)
        exact = tried[np.argmin(np.expm1((tried + cost) / DAY) / tried)]

        assert daly_seconds(cost, DAY) == pytest.approx(exact, rel=closeness)


def test_youngs_interval_is_dalys_while_saves_are_short() -> None:
    assert young_seconds(0.5, DAY) == pytest.approx(math.sqrt(DAY))
    assert daly_seconds(0.01, DAY) == pytest.approx(young_seconds(0.01, DAY), rel=0.001)
    assert daly_seconds(0.2 * DAY, DAY) < 0.9 * young_seconds(0.2 * DAY, DAY)


def test_a_save_longer_than_failures_are_apart_is_tried_once_in_that_time() -> None:
    assert daly_seconds(2.0 * DAY, DAY) == daly_seconds(9.0 * DAY, DAY) == DAY


# -- As people write them ----------------------------------------------------------------------------------


@for_each(
    ("text", "schedule"),
    [
        ("1000 steps", EverySteps(1000)),
        (" 10,000 steps ", EverySteps(10_000)),
        ("1 step", EverySteps(1)),
        ("30 min", EveryMinutes(30)),
        ("2 h", EveryMinutes(120)),
        ("auto, a failure every 24 h", Auto(DAY)),
    ],
)
def test_schedules_are_read_as_people_write_them(text: str, schedule: SaveSchedule) -> None:
    assert read_schedule(text) == schedule
    assert read_schedule(str(schedule)) == schedule


def test_how_often_a_job_fails_may_be_told_beside_the_word_auto() -> None:
    assert read_schedule("auto", mean_seconds_between_failures=60.0) == Auto(60.0)


@for_each(
    ("text", "told"),
    [
        ("auto", "does not say how often the job fails"),
        ("1000", "write for example '1000 steps', '30 min' or 'auto, a failure every 24 h'"),
        ("often", "'often' is no schedule of saves"),
        ("0 steps", "'0 steps': there is at least 1 step"),
        ("0 s", "'0 s': the time between saves"),
        ("inf min", "'inf min': the time between saves"),
        ("auto, a failure every day", "'day' does not begin with a number"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_schedule(text)


def test_a_plan_needs_the_times_that_decide_it() -> None:
    with pytest.raises(ConfigError, match="step_seconds is not given"):
        EveryMinutes(1).steps(10)
    with pytest.raises(ConfigError, match="step_seconds is 0"):
        EveryMinutes(1).steps(10, step_seconds=0)
    with pytest.raises(ConfigError, match="cost is not given"):
        Auto(DAY).steps(10, step_seconds=1.0)


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocked_seconds is -1"):
        SaveCost(-1.0)
    with pytest.raises(ConfigError, match="durable_seconds is -1"):
        SaveCost(2.0, -1.0)
    with pytest.raises(ConfigError, match="mean_seconds_between_failures is 0"):
        Auto(0.0)
