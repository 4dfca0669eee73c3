"""Who makes batches, threads or the training's thread, in a virtual run of both."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.for_each import for_each

from penstock.policy.turns import Given, Turns


@dataclass
class Training:
    """A training that takes batches of ten samples, which its own thread or threads make.

    waits: for a batch, of threads and of its own thread, which makes it then. works: processor time of either.
    pause_seconds: that it takes after each 150th, as a training that validates.
    """

    waits: tuple[float, float] = (9e-3, 9e-3)
    works: tuple[float, float] = (9e-3, 9e-3)
    step_seconds: float = 1e-3
    pause_seconds: float = 0.0
    may_begin: bool = True

    def __post_init__(self) -> None:
        self.turns = Turns(lambda: self.may_begin)
        self.own = 0.0

    def run(self, batches: int) -> int:
        """Take so many; return how many of them its own thread made."""
        made = 0
        for number in range(batches):
            is_own = self.own > 0
            self.own -= 10 * is_own
            made += is_own
            step = self.step_seconds + (0 if number % 150 else self.pause_seconds)
            given = Given(10, 1, is_own, step, self.waits[is_own], self.works[is_own])
            self.own = self.turns.given(given) or self.own
        return made

    @property
    def chosen(self) -> bool | None:
        """Whether its own thread makes batches for good; None while that is open."""
        return None if self.turns.choice is None else self.turns.choice.is_own


@for_each(
    ("speed", "may_begin", "is_own"),
    [(1.5, True, True), (1.1, True, True), (0.9, True, False), (0.05, True, False), (9.0, False, None)],
)
def test_what_is_faster_goes_on_and_a_training_that_waits_no_longer_has_threads_again(
    speed: float, may_begin: bool, is_own: bool | None
) -> None:
    training = Training(waits=(9e-3, 9e-3 / speed), may_begin=may_begin, pause_seconds=60.0)

    tried = training.run(3000)

    assert training.chosen is is_own
    assert not training.turns.is_trying
    assert speed > 0.1 or tried <= 4  # batches of a store are no reason for the training to wait long
    settled = training.run(3000)
    assert settled >= 2999 if is_own else settled == 0  # threads have one before each look
    training.step_seconds, training.waits = 0.1, (1e-3, 1e-3)  # its own work takes longer now
    training.run(20_000)
    assert not training.run(500)


@for_each(
    ("speed", "work", "step_seconds", "is_own"),
    [
        (0.85, 0.5, 1e-3, True),
        (1.0, 0.8, 0.0, True),
        (0.9, 0.95, 1e-3, False),
        (0.7, 0.3, 1e-3, False),
        (1.3, 2.0, 1e-3, True),
        (0.9, 0.5, 4e-3, False),
        (1.1, 0.5, 4e-3, True),
    ],
)
def test_where_both_are_about_as_fast_the_one_that_takes_less_of_the_processors_goes_on(
    speed: float, work: float, step_seconds: float, is_own: bool
) -> None:
    """Unless the training has work of its own: threads load meanwhile, as soon as a processor is free."""
    training = Training(waits=(9e-3, (9e-3 + step_seconds) / speed - step_seconds), step_seconds=step_seconds)
    training.works = (9e-3, 9e-3 * work)

    training.run(5000)

    assert training.chosen is is_own
    assert training.turns.choice is not None
    assert training.turns.choice.speed == pytest.approx(speed, rel=0.01)
    assert training.turns.choice.work == pytest.approx(work)


def test_first_batches_that_come_late_do_not_leave_the_others_to_threads() -> None:
    turns, own, late = Turns(lambda: True), 0.0, [0.05] * 8

    while turns.choice is None:
        waited = late.pop() if own > 0 and late else 6e-4 if own > 0 else 9e-4
        is_own, own = own > 0, own - 10
        own = turns.given(Given(10, 1, is_own, 1e-4, waited, waited)) or own

    assert not late
    assert turns.choice.is_own


def test_a_training_that_does_not_wait_has_no_turns() -> None:
    training = Training(waits=(4e-3, 4e-3), step_seconds=6e-3)

    assert training.run(5000) == 0
    assert training.chosen is None


def test_quick_batches_have_turns_and_threads_load_beside_the_steps_that_show_without_them() -> None:
    """Where threads hold the interpreter's lock, steps look long: only turns show what the training waits for."""
    slow = Training(waits=(1e-3, 0.5e-3), step_seconds=6e-3)
    quick = Training(waits=(1e-3, 0.5e-3), step_seconds=2e-3)

    slow.run(5000)
    quick.run(5000)

    assert (slow.chosen, quick.chosen) == (None, True)
    quick.step_seconds, quick.waits = 4e-3, (0.1e-3, 0.9e-3)  # threads hide all of their work in it
    quick.run(20_000)
    assert quick.chosen is False
    assert not quick.run(500)


def test_threads_that_lost_clearly_each_time_are_tried_ever_more_rarely_until_steps_take_longer() -> None:
    training = Training(waits=(30e-3, 10e-3), step_seconds=20e-3)
    looks = [training.run(1000) for _ in range(60)]  # of 30 s each, as long as its own thread makes all

    # At each look threads make one batch, and 60 more in their turns.
    assert [look for look, made in enumerate(looks) if made < 990] == [0, 1, 3, 7, 15, 31, 48]


@for_each(
    ("waits", "step_seconds", "longer_seconds"),
    [((30e-3, 10e-3), 20e-3, 30e-3), ((0.12, 0.06), 0.09, 0.5), ((0.24, 0.12), 0.09, 0.5)],
)
def test_threads_that_lost_are_tried_as_soon_as_steps_take_longer(
    waits: tuple[float, float], step_seconds: float, longer_seconds: float
) -> None:
    """They hide loading in the steps then, and win."""
    training = Training(waits, step_seconds=step_seconds)
    training.run(40_000)
    assert training.chosen

    training.step_seconds, training.waits = longer_seconds, (1e-3, waits[1])
    training.run(1300)

    assert not training.run(500)
