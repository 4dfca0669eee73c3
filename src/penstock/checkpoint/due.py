"""Whether a save is due, on all ranks alike."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.errors import ConfigError
from penstock.plan.saves import SaveCost, SaveSchedule
from penstock.ranks import Ranks


class DueSaves:
    """Asks a schedule after each step. Used by the training's thread."""

    def __init__(self, schedule: SaveSchedule | None, make_ranks: Callable[[], Ranks]) -> None:
        """schedule: None: nothing can be asked. make_ranks: is called where the step alone does not decide."""
        self._schedule = schedule
        #: Of their own, for they decide while a save is under way.
        self.ranks: Ranks | None = None
        if schedule is not None and not schedule.is_known_ahead:
            self.ranks = make_ranks()
        #: Of the last save, as far as it is known.
        self._cost: SaveCost | None = None
        self._since_seconds = time.monotonic()

    @property
    def least_seconds(self) -> float:
        """Return the shortest time between two saves, in seconds; 0 where it is not known."""
        return self._schedule.least_seconds if self._schedule is not None else 0.0

    def go_on(self, blocked_seconds: float | None = None) -> None:
        """A save lets the training continue. blocked_seconds: that it stood still; None: nobody knows."""
        self._since_seconds = time.monotonic()
        if blocked_seconds is not None and self._schedule is not None:
            self._cost = SaveCost(blocked_seconds)

    def took(self, blocked_seconds: float, durable_seconds: float) -> None:
        """Take down what the last save cost, as `SaveCost` says it, for a schedule."""
        if self._schedule is not None:
            self._cost = SaveCost(blocked_seconds, durable_seconds)

    def ask(self, step: int, *, has_failed: bool = False) -> tuple[bool, bool]:
        """Return whether a save has failed on any rank, as far as ranks are asked, and whether to save now.

        step: how many steps the training has done. has_failed: whether one has on this rank.
        Raises: ConfigError if there is no schedule; WaitTimeout, RankError.
        """
        schedule = self._schedule
        if schedule is None:
            raise ConfigError('the store has no schedule: give one, such as schedule="1000 steps"')
        since_seconds, cost = time.monotonic() - self._since_seconds, self._cost
        if self.ranks is None:
            return False, schedule.is_due(step, since_seconds, cost)

        def decide(failed_on: list[bool]) -> list[bool]:
            return [any(failed_on), schedule.is_due(step, since_seconds, cost)]

        failed, is_due = self.ranks.gather_then_decide(
            f"whether to save after step {step}", lambda: has_failed, decide
        )
        return bool(failed), bool(is_due)
