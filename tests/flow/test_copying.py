"""What copies batches to a device ahead of the training, on a stand-in whose streams wait for the test."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.stand_in import PATIENCE_SECONDS, StandIn

from penstock.errors import StagingError
from penstock.flow.copying import Copied, CopyAhead

NBYTES = 800


class FakeBatch:
    """A complete batch: 100 times its step, in float64."""

    def __init__(self, step: int, failed: tuple[int, ...] = ()) -> None:
        self.arrays: tuple[NDArray[Any], ...] = (np.full(100, float(step)),)
        self.failed = failed
        self.copied: Copied | None = None
        self.fitted = 0.0


class Training:
    """A consumer of a `CopyAhead`, whose work on a batch is to note what it finds there."""

    def __init__(self, device: StandIn, limit_bytes: int, failed: dict[int, tuple[int, ...]]) -> None:
        self.device, self.found, self.lines = device, list[float](), list[str]()
        self.batches = {(0, step): FakeBatch(step, failed.get(step, ())) for step in range(20)}
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._ticks = itertools.count()
        self.error: BaseException | None = None
        self.ahead = CopyAhead(
            device,
            limit_bytes,
            make=lambda batch: torch.from_numpy(batch.arrays[0]),
            following=lambda epoch, step: (epoch, step + 1),
            clock=lambda: float(next(self._ticks)),
            report=self.lines.append,
        )

    def run(self) -> None:
        try:
            self.ahead.run(self.batches.get, lambda: self._woken.put(None))
        except StagingError as error:
            self.error = error
            self._woken.put(None)

    def step(self, step: int) -> None:
        """Take a batch, and enqueue work on it."""
        self.ahead.passed((0, step))
        batch = self.batches[0, step]
        while batch.copied is None and self.error is None:
            self._woken.get(timeout=PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        assert batch.copied is not None
        found = self.device.hand_over(batch.copied)
        self.device.main.enqueue(lambda: self.found.append(found.mean().item()))
        del self.batches[0, step]


@contextmanager
def training(
    device: StandIn, batches: float = 3, failed: dict[int, tuple[int, ...]] | None = None
) -> Iterator[Training]:
    """Begin to copy, with space for so many batches on the device."""
    made = Training(device, int(batches * NBYTES), failed or {})
    thread = threading.Thread(target=made.run)
    thread.start()
    made.ahead.go_to((0, 0))
    try:
        yield made
    finally:
        made.ahead.end()
        thread.join()


def settle(made: Training) -> None:
    """Wait until the copier has seen all of its messages."""
    seen = threading.Event()
    made.ahead._messages.put(seen.set)
    assert seen.wait(PATIENCE_SECONDS)


def test_batches_are_on_the_device_before_they_are_asked_for_as_many_as_fit() -> None:
    device = StandIn()
    with training(device, batches=2.5) as made:
        device.wait_until_copied(2)
        settle(made)

        assert device.copied == 2
        assert [made.batches[0, step].copied is not None for step in range(4)] == [True, True, False, False]


def test_three_are_enough_however_many_would_fit() -> None:
    device = StandIn()
    with training(device, batches=20) as made:
        device.wait_until_copied(3)
        settle(made)

        assert device.copied == 3


def test_the_arrays_of_a_batch_are_kept_until_its_copy_has_ended_and_no_longer() -> None:
    device = StandIn()
    with training(device) as made, ExitStack() as copying:
        copying.enter_context(device.copies.held())
        made.ahead.arrived()
        device.wait_until_copied(1)

        assert made.batches[0, 0].arrays

        copying.close()
        settle(made)
        settle(made)

        assert not made.batches[0, 0].arrays


def test_a_batch_is_taken_before_its_copy_has_ended_and_its_numbers_are_those_of_the_copy() -> None:
    """No wait in the training's thread: its stream waits."""
    device = StandIn()
    with training(device) as made:
        with device.copies.held():
            made.step(0)
            made.step(1)

            assert made.found == []
        assert made.found == [0.0, 1.0]


def test_no_more_batches_are_copied_than_fit_until_the_work_on_earlier_ones_has_passed() -> None:
    """The training's thread is steps ahead of its device."""
    device = StandIn()
    with training(device, batches=3) as made:
        with device.main.held():
            for step in range(3):
                made.step(step)
            made.ahead.passed((0, 3))
            device.wait_until_waited_for()

            assert (device.copied, made.batches[0, 3].copied) == (3, None)
        made.step(3)

        assert made.found == [0.0, 1.0, 2.0, 3.0]
        assert device.used_bytes <= 3 * NBYTES


def test_time_that_the_device_is_behind_is_no_stall() -> None:
    """A batch that had to wait for space says when it had it; one that did not says nothing."""
    device = StandIn()
    with training(device, batches=2) as made:
        batches = dict(made.batches)
        with device.main.held():
            made.step(0)
            made.step(1)
            made.ahead.passed((0, 2))
            device.wait_until_waited_for()
        made.step(2)

        assert batches[0, 0].fitted == 0
        assert batches[0, 2].fitted > 0


def test_a_batch_that_lacks_samples_waits_for_the_training_which_moves_it_itself() -> None:
    device = StandIn()
    with training(device, failed={1: (7,)}) as made:
        made.step(0)
        settle(made)
        assert device.copied == 1

        made.ahead.passed((0, 1))
        made.ahead.passed((0, 2))
        for step in range(2, 6):
            made.step(step)

        assert made.found == [0.0, 2.0, 3.0, 4.0, 5.0]


def test_what_is_given_up_is_not_copied() -> None:
    device = StandIn()
    with training(device, batches=2) as made:
        device.wait_until_copied(2)
        made.ahead.go_to((0, 9))
        for step in range(9):
            made.batches.pop((0, step), None)

        made.step(9)

        assert made.found == [9.0]
        assert device.copied <= 4


def test_a_device_without_memory_for_more_has_fewer_and_that_is_reported_once() -> None:
    device = StandIn(capacity_bytes=int(2.5 * NBYTES))
    with training(device, batches=3) as made:
        device.wait_until_copied(2)
        settle(made)
        for step in range(10):
            made.step(step)

        assert made.found == [float(step) for step in range(10)]
        assert [line[:48] for line in made.lines] == ["stand-in has no memory for one more batch of 800"]


def test_a_device_without_memory_for_one_batch_is_an_error() -> None:
    with (
        training(StandIn(capacity_bytes=100)) as made,
        pytest.raises(StagingError, match="no memory for 800 bytes"),
    ):
        made.step(0)


def test_a_batch_larger_than_batches_may_take_is_an_error_that_says_both() -> None:
    with (
        training(StandIn(), batches=0.5) as made,
        pytest.raises(
            StagingError, match=r"a batch takes 800 B on stand-in, .* 400 B there: give more device_memory"
        ),
    ):
        made.step(0)
