"""Batches that are asked for one after the other: each is taken once, in that order, however large it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.feed import Feed
from penstock.loader.progress import progress_lines
from penstock.plan import AccessPlan, CutOrder
from penstock.plan.growing import Growing
from penstock.trace import NO_PLACE, Cause, Kind, Stage

COUNT = 50


class Numbers:
    """A data set whose samples are their numbers; notes what was asked for. Those in `broken` cannot be had."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken
        self.asked: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if index in self.broken:
            raise ValueError(f"sample {index} is broken")
        return index


def feed_of(dataset: Numbers, *, most: int | None = 8, ahead: int = 4, decoders: int = 2) -> Feed:
    def make(order: Growing) -> Loader:
        return Loader(
            dataset,
            batch_sampler=order,
            epochs=None,
            collate_fn=list,
            decoders=decoders,
            report=None,
            timeout_seconds=60,
        )

    return Feed(make, COUNT, most=most, ahead=ahead)


@pytest.fixture
def fed() -> Any:
    """Return what makes feeds that are closed at the end."""
    made: list[Feed] = []

    def make(*arguments: Any, **more: Any) -> Feed:
        made.append(feed_of(*arguments, **more))
        return made[-1]

    yield make
    for feed in made:
        feed.close()


def test_batches_come_in_the_order_in_which_they_were_asked_for_whenever_that_was(
    fed: Callable[..., Feed],
) -> None:
    """Some before the start, some while others are loaded, one after all were taken; samples repeat."""
    feed = fed(Numbers())
    wanted = [[step % COUNT, 3, 3] for step in range(60)]

    for step in range(20):
        feed.ask((1, step), wanted[step])
    found = []
    for step in range(59):
        found.append(feed.take((1, step))[0])
        if step + 20 < 59:
            feed.ask((1, step + 20), wanted[step + 20])
    feed.ask((1, 59), wanted[59])
    found.append(feed.take((1, 59))[0])

    assert found == wanted


def test_waits_and_steps_of_batches_that_are_asked_for_are_recorded(fed: Callable[..., Feed]) -> None:
    """Four batches of two epochs, the last not yet asked for when the training wants it."""
    feed = fed(Numbers())
    for place in ((1, 0), (1, 1), (2, 0)):
        feed.ask(place, [4, 5])
    for place in ((1, 0), (1, 1)):
        feed.take(place)
    feed.end_step()
    feed.take((2, 0))
    feed.ask((2, 1), [6])
    feed.take((2, 1))
    assert feed._loader is not None
    feed.end_step()

    found = {each.epoch: each for each in feed._loader.metrics}

    assert {epoch: (each.steps, each.samples) for epoch, each in found.items()} == {1: (2, 4), 2: (2, 3)}
    assert all(each.stages[Stage(Kind.STEP, NO_PLACE)].calls == 2 for each in found.values())
    assert sum(each.stall_by_cause[Cause.UNSEEN] for each in found.values()) == 0
    (line,) = progress_lines(feed._loader._parts.collector, feed._loader.plan)
    assert line.startswith("epoch 2, step 2: ")


def test_a_step_ends_where_its_pass_is_left_and_a_wait_where_it_is_interrupted(
    fed: Callable[..., Feed], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = fed(Numbers())
    for place in ((1, 0), (1, 1), (2, 0)):
        feed.ask(place, [4, 5])
    feed.take((1, 0))
    loader = feed._loader
    assert loader is not None

    def interrupt(*place: int) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loader._parts.engine, "take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            feed.take((1, 1))
    assert loader._parts.clock._asked is None
    feed.take((1, 1))
    feed.note_end()
    ends: list[float] = []
    monkeypatch.setattr(loader._parts.clock, "end_step", ends.append)
    left = feed._ended_at
    feed.forget_before((2, 0))
    assert ends == [left]


def test_a_batch_larger_than_any_that_was_foreseen_comes_in_its_turn(fed: Callable[..., Feed]) -> None:
    feed = fed(Numbers(), most=None)
    sizes = [1, 2, 3000, 1, 20_000, 5]
    wanted = [[step] * size for step, size in enumerate(sizes)]

    feed.ask((0, 0), wanted[0])
    feed.start()
    for step in range(1, len(wanted)):
        feed.ask((0, step), wanted[step])

    assert [feed.take((0, step))[0] for step in range(len(wanted))] == wanted


def test_what_is_given_up_is_loaded_no_more_and_a_later_epoch_follows(fed: Callable[..., Feed]) -> None:
    dataset = Numbers()
    feed = fed(dataset, ahead=1, decoders=1)
    for step in range(COUNT):
        feed.ask((0, step), [step])
    assert feed.take((0, 0)) == ([0], None)

    feed.forget_before((1, 0))
    feed.ask((1, 0), [7])
    feed.ask((1, 3), [8])

    assert feed.take((1, 0)) == ([7], None)
    assert feed.take((1, 3)) == ([8], None)
    assert len(dataset.asked) < 20, "threads were some steps ahead, no more"


def test_a_batch_that_cannot_be_had_is_followed_by_the_next(fed: Callable[..., Feed]) -> None:
    feed = fed(Numbers(5))
    for step in range(4):
        feed.ask((0, step), [2 * step, 2 * step + 1])

    outcomes = [feed.take((0, step)) for step in range(4)]

    assert [batch for batch, _ in outcomes] == [[0, 1], [2, 3], None, [6, 7]]
    assert "sample 5 is broken" in str(outcomes[2][1])


def test_a_growing_order_has_what_was_asked_for_and_goes_on_where_it_was_over() -> None:
    order = Growing(COUNT, 4, np.array([3, 1]))
    plan = AccessPlan.of_batches(order, epochs=9)
    batches = plan.batches(0, 0, 0)
    order.ask((2, 0), np.array([3, 1]))

    assert isinstance(order, CutOrder)
    assert [(epoch, step, ids.tolist()) for epoch, step, ids in batches] == [(2, 0, [[3, 1]])]
    order.ask((2, 1), np.array([4]))
    order.ask((3, 0), np.array([5]))
    assert [(epoch, step, ids.tolist()) for epoch, step, ids in batches] == [(2, 1, [[4]]), (3, 0, [[5]])]
    assert plan.local_batch(0, 2, 1).tolist() == [4]
    order.forget_before((3, 0))
    assert plan.local_batch(0, 2, 1).tolist() == []
    assert [place for *place, _ in plan.batches(0, 2, 0)] == [[3, 0]]
    with pytest.raises(ConfigError, match="positions"):
        order.at(0, [2])
