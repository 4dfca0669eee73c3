"""When a training saves: every so many steps, every so many minutes, or as often as its failures make it worth.

A schedule is a value. It is asked after each step; `EverySteps` is known ahead, so every rank of a job and every
prediction finds the same saves by itself. The others depend on clocks and on measured costs, which differ from rank to
rank: there rank 0 asks, and sends the others what it decided.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import ConfigError
from penstock.units import parse_seconds
from penstock.validate import check_above_zero, check_seconds


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What the latest save cost, as far as it is known.

    blocked_seconds: that the training stood still for it.
    durable_seconds: from its beginning until its snapshot would outlive a crash; None while that is not yet so.

    Raises: ConfigError where a time is negative or not finite.
    """

    blocked_seconds: float
    durable_seconds: float | None = None

    def __post_init__(self) -> None:
        check_seconds("blocked_seconds", self.blocked_seconds)
        if self.durable_seconds is not None:
            check_seconds("durable_seconds", self.durable_seconds)

    @property
    def after_seconds(self) -> float:
        """Return how long a save continues after the training does.

        Two threads measure the times: a small snapshot may seem durable before its save returned.
        """
        return max(0.0, (self.durable_seconds or 0.0) - self.blocked_seconds)


class SaveSchedule(Protocol):
    """When to save."""

    @property
    def is_known_ahead(self) -> bool:
        """Whether the steps alone decide, so that all ranks come to the same answer without asking each other."""
        ...

    @property
    def least_seconds(self) -> float:
        """How long a training runs at least from one save to the next; 0 where the steps alone decide."""
        ...

    def is_due(self, step: int, seconds_since_last_save: float, cost: SaveCost | None) -> bool:
        """Return whether to save now.

        step: how many steps the training has done; nothing is due before the first.
        seconds_since_last_save: since the latest save of this run let the training continue or, before the first, since
            the run began.
        cost: of the latest save; None before the first.
        """
        ...

    def steps(self, until: int, *, step_seconds: float | None = None, cost: SaveCost | None = None) -> range:
        """Return the steps after which a run of `until` steps saves, each step taking so long, each save costing that.

        Raises: ConfigError where the schedule needs what is not given.
        """
        ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save every `unit` steps: after steps unit, 2 unit, 3 unit, also in a run that resumes from a snapshot.

    unit: the paper's name for it (delta-snapshot paper, Table 3: "the number of iterations between two continuous
        snapshot savings").
    """

    unit: int

    def __post_init__(self) -> None:
        if self.unit < 1:
            raise ConfigError(f"unit is {self.unit}; there is at least 1 step from one save to the next")

    @property
    def is_known_ahead(self) -> bool:
        """See `SaveSchedule`."""
        return True

    @property
    def least_seconds(self) -> float:
        """See `SaveSchedule`."""
        return 0.0

    def is_due(self, step: int, seconds_since_last_save: float = 0.0, cost: SaveCost | None = None) -> bool:
        """See `SaveSchedule.is_due`; only the step counts.

        >>> [step for step in range(10) if EverySteps(3).is_due(step)]
        [3, 6, 9]
        """
        return step > 0 and step % self.unit == 0

    def steps(self, until: int, *, step_seconds: float | None = None, cost: SaveCost | None = None) -> range:
        """See `SaveSchedule.steps`."""
        return range(self.unit, until + 1, self.unit)

    def __str__(self) -> str:
        return f"{self.unit} steps"


@dataclass(frozen=True, slots=True)
class EveryMinutes:
    """Save once the training has gone on for so many minutes since the last save; asked at the end of steps only."""

    minutes: float

    def __post_init__(self) -> None:
        check_above_zero("minutes", self.minutes)

    @property
    def is_known_ahead(self) -> bool:
        """See `SaveSchedule`."""
        return False

    @property
    def least_seconds(self) -> float:
        """See `SaveSchedule`."""
        return 60.0 * self.minutes

    def is_due(self, step: int, seconds_since_last_save: float, cost: SaveCost | None = None) -> bool:
        """See `SaveSchedule.is_due`; what a save costs does not count."""
        return step > 0 and seconds_since_last_save >= 60.0 * self.minutes

    def steps(self, until: int, *, step_seconds: float | None = None, cost: SaveCost | None = None) -> range:
        """See `SaveSchedule.steps`. Raises: ConfigError without `step_seconds`."""
        between = _steps_between(60.0 * self.minutes, step_seconds, f"every {self}")
        return range(between, until + 1, between)

    def __str__(self) -> str:
        return f"{self.minutes:.15g} min"


@dataclass(frozen=True, slots=True)
class Auto:
    """Save as often as loses the least time: to saving, and to what a failure makes it do again.

    mean_seconds_between_failures: of the whole job, M: of a job on n machines that each fail once in m it is m / n.
        Failures are assumed to come at random, independent of each other and of the age of the run.
    least_seconds: never more often than this. A save that hardly blocks would be worth repeating every few seconds,
        which gains seconds per failure and wears out the drive.

    The first save is due after the first step: from then on its cost is known. Afterwards the interval is
    `daly_seconds` of the time that the training stood still, and no save is due while the last is not yet durable.
    That a snapshot becomes durable only later makes every failure cost that much more, but changes little of how
    often to save (Vaidya, "Impact of checkpoint latency on overhead ratio of a checkpointing scheme", IEEE
    Transactions on Computers 46(8), 1997).
    """

    mean_seconds_between_failures: float
    least_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_above_zero("mean_seconds_between_failures", self.mean_seconds_between_failures)
        check_seconds("least_seconds", self.least_seconds)

    @property
    def is_known_ahead(self) -> bool:
        """See `SaveSchedule`."""
        return False

    def interval_seconds(self, cost: SaveCost) -> float:
        """Return how long the training runs between saves that cost that."""
        best = daly_seconds(cost.blocked_seconds, self.mean_seconds_between_failures)
        return max(best, cost.after_seconds, self.least_seconds)

    def is_due(self, step: int, seconds_since_last_save: float, cost: SaveCost | None) -> bool:
        """See `SaveSchedule.is_due`."""
        if step < 1 or cost is None:
            return step > 0
        return cost.durable_seconds is not None and seconds_since_last_save >= self.interval_seconds(cost)

    def steps(self, until: int, *, step_seconds: float | None = None, cost: SaveCost | None = None) -> range:
        """See `SaveSchedule.steps`. Raises: ConfigError without `step_seconds` or `cost`."""
        if cost is None:
            raise ConfigError(
                "cost is not given; when to save depends on what a save costs: measure one first"
            )
        return range(1, until + 1, _steps_between(self.interval_seconds(cost), step_seconds, f"{self}"))

    def __str__(self) -> str:
        return f"auto, a failure every {self.mean_seconds_between_failures / 3600.0:.15g} h"


def young_seconds(cost_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return the best time between saves to the first order: sqrt(2 C M).

    cost_seconds: C, that a save takes from the training. mean_seconds_between_failures: M.
    Source: Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
    1974. It is meant for C far below M.
    """
    return math.sqrt(2.0 * cost_seconds * mean_seconds_between_failures)


def daly_seconds(cost_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return the best time between saves, the time of a save itself not included.

    With the symbols of `young_seconds`: sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C where C < 2 M, else M.
    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3), 2006, equation 37. How long a restart takes does not change it.

    >>> round(young_seconds(60.0, 86_400.0)), round(daly_seconds(60.0, 86_400.0))
    (3220, 3180)
    """
    if cost_seconds >= 2.0 * mean_seconds_between_failures:
        return mean_seconds_between_failures
    share = cost_seconds / (2.0 * mean_seconds_between_failures)
    first_order = young_seconds(cost_seconds, mean_seconds_between_failures)
    return first_order * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - cost_seconds


_STEPS = re.compile(r"\s*(\d[\d_,]*)\s*steps?\s*")
_AUTO = re.compile(r"\s*auto\s*(?:,\s*a failure every\s+(.+?)\s*)?")


def read_schedule(text: str, *, mean_seconds_between_failures: float | None = None) -> SaveSchedule:
    """Return the schedule that people write.

    text: "1000 steps"; "30 min", or another time; "auto, a failure every 24 h", or "auto" alone where the time between
        failures is given with it. What `str` of a schedule says is read back as the same.
    Raises: ConfigError saying what can be written.

    >>> read_schedule("1000 steps"), read_schedule("90 s")
    (EverySteps(unit=1000), EveryMinutes(minutes=1.5))
    """
    if steps := _STEPS.fullmatch(text):
        unit = int(steps[1].replace(",", "").replace("_", ""))
        if unit < 1:
            raise ConfigError(f"{text!r}: there is at least 1 step from one save to the next")
        return EverySteps(unit)
    if auto := _AUTO.fullmatch(text):
        seconds = mean_seconds_between_failures if auto[1] is None else parse_seconds(auto[1])
        if seconds is None:
            raise ConfigError(
                f"{text!r} does not say how often the job fails, on which the best interval depends: write for "
                "example 'auto, a failure every 24 h'"
            )
        if not 0.0 < seconds < math.inf:
            raise ConfigError(f"{text!r}: the time between failures must be above zero and finite")
        return Auto(seconds)
    try:
        seconds = parse_seconds(text)
    except ConfigError:
        raise ConfigError(
            f"{text!r} is no schedule of saves: write for example '1000 steps', '30 min' or "
            "'auto, a failure every 24 h'"
        ) from None
    if not 0.0 < seconds / 60.0 < math.inf:
        raise ConfigError(f"{text!r}: the time between saves must be above zero and finite")
    return EveryMinutes(seconds / 60.0)


def _steps_between(seconds: float, step_seconds: float | None, schedule: str) -> int:
    if step_seconds is None:
        raise ConfigError(
            f"step_seconds is not given; how many steps a save {schedule} comes to depends on it"
        )
    check_above_zero("step_seconds", step_seconds)
    return max(1, math.ceil(seconds / step_seconds))
