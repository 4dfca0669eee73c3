"""A watch tells the truth about loaders whose waiting is known, and changes nothing about them."""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.measure.watch import _EPOCHS, Verdict, Watch, watch
from penstock.trace import NO_STEP, Cause, Kind


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class KnownLoader:
    """A loader of which every delay is known: to start, for each batch, to stop."""

    batch_size = 64

    def __init__(
        self, clock: Clock, waits: list[float], start: float = 0.0, stop: float = 0.0, fails: bool = False
    ) -> None:
        self.clock = clock
        self.waits = waits
        self.start = start
        self.stop = stop
        self.fails = fails

    def __len__(self) -> int:
        return len(self.waits)

    def __iter__(self) -> Iterator[int]:
        self.clock.advance(self.start)
        return self._batches()

    def _batches(self) -> Iterator[int]:
        try:
            for number, seconds in enumerate(self.waits):
                self.clock.advance(seconds)
                yield number
            if self.fails:
                self.clock.advance(0.5)
                raise OSError("the store is gone")
        finally:
            self.clock.advance(self.stop)


def a_watch(loader: KnownLoader, lines: list[str] | None = None) -> Watch[int]:
    report: Callable[[str], object] = (lambda line: None) if lines is None else lines.append
    return watch(loader, clock=loader.clock, report=report)


def test_known_waits_and_steps_are_measured_exactly() -> None:
    clock, lines = Clock(), list[str]()
    watched = a_watch(KnownLoader(clock, [3.0, 1.0, 2.0], start=4.0, stop=0.5), lines)

    for _ in watched:
        clock.advance(5.0)

    verdict = watched.verdict()
    assert (verdict.steps, verdict.stall_seconds, verdict.own_seconds) == (3, 10.5, 15.0)
    assert verdict.ceiling == 25.5 / 15.0
    assert watched.numbers() == {
        "steps": 3,
        "stall_seconds": 10.5,
        "own_seconds": 15.0,
        "stall_share": 10.5 / 25.5,
        "steps_per_second": 3 / 25.5,
    }
    assert lines == ["penstock.watch: epoch 0: waited 41 % of 25.5 s; ceiling 1.70 x"]


def test_a_loader_that_keeps_up_leaves_nothing_to_gain() -> None:
    clock = Clock()
    watched = a_watch(KnownLoader(clock, [0.125, 0.125]))

    for _ in watched:
        clock.advance(100.0)

    assert str(watched.verdict()) == "waited 0.1 % of 200 s; nothing to gain here"


def test_a_verdict_reads_as_one_line() -> None:
    assert str(Verdict(100, 80.6, 131.4, 0.0)) == "waited 38 % of 212 s; ceiling 1.61 x"


def test_a_loop_without_training_and_an_epoch_of_milliseconds_are_told_so() -> None:
    assert str(Verdict(100, 1.0, 0.001, 0.0)) == "waited 100 % of 1 s; no training between batches"
    assert str(Verdict(100, 1.0, 0.0, 0.0)) == "waited 100 % of 1 s; no training between batches"
    assert (
        str(Verdict(100, 1.0, 0.03, 0.0))
        == "waited 97 % of 1.03 s; hardly any time between batches (300 us a step)"
    )
    assert str(Verdict(10, 0.05, 0.02, 0.0)) == "waited 71 % of 70 ms; too short to judge"


def test_a_ceiling_beyond_a_hundred_is_told_as_what_a_step_takes() -> None:
    assert str(Verdict(4, 20.0, 0.02, 0.0)) == "waited 100 % of 20 s; a step itself takes 5 ms"
    assert str(Verdict(4, 20.0, 1.0, 0.0, replay_seconds=0.01)).endswith("; a step itself takes 10 ms")


def test_a_wait_that_ended_in_an_error_is_told_and_leaves_the_ceiling_as_it_was() -> None:
    clock = Clock()
    lines: list[str] = []

    def broken() -> Iterator[int]:
        for wait in (3.0, 1.0):
            clock.advance(wait)
            yield 0
        clock.advance(100.0)
        raise OSError("the store is gone")

    def train() -> None:
        for _ in watched:
            clock.advance(4.0)

    watched = watch(broken(), clock=clock, report=lines.append)
    with pytest.raises(OSError, match="the store is gone"):
        train()

    verdict = watched.verdict()
    assert (verdict.stall_seconds, verdict.in_vain_seconds) == (104.0, 100.0)
    assert lines == [
        "penstock.watch: epoch 0: waited 100 s and got no batch; otherwise waited 33 % of 12 s; ceiling 1.50 x"
    ]
    assert str(Verdict(0, 2.0, 0.0, 0.0, in_vain_seconds=2.0)) == "waited 2 s and got no batch"


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=10), st.integers(1, 3)
)
def test_epochs_add_up_to_the_run_whatever_the_delays(steps: list[tuple[int, int]], epochs: int) -> None:
    clock = Clock()
    watched = a_watch(KnownLoader(clock, [float(wait) for wait, _ in steps]))

    for _ in range(epochs):
        for number in watched:
            clock.advance(steps[number][1])

    verdict = watched.verdict()
    assert verdict.steps == epochs * len(steps)
    assert verdict.stall_seconds == epochs * sum(wait for wait, _ in steps)
    assert verdict.own_seconds == epochs * sum(own for _, own in steps)
    assert verdict.stall_seconds + verdict.own_seconds == clock.now


def test_the_trace_holds_the_wait_and_the_step_of_every_batch() -> None:
    clock = Clock()
    clock.now = 1000.0
    watched = a_watch(KnownLoader(clock, [3.0, 1.0], stop=0.25))
    for _ in range(2):
        for _ in watched:
            clock.advance(5.0)

    trace = watched.trace()

    rows = trace.spans[["kind", "epoch", "step", "start", "end"]].tolist()
    assert rows[:5] == [
        (Kind.WAIT, 0, 0, 0.0, 3.0),
        (Kind.STEP, 0, 0, 3.0, 8.0),
        (Kind.WAIT, 0, 1, 8.0, 9.0),
        (Kind.STEP, 0, 1, 9.0, 14.0),
        (Kind.WAIT, 0, NO_STEP, 14.0, 14.25),
    ]
    assert trace.is_complete
    first, second = trace.epochs()
    assert (first.steps, first.stall_seconds, first.own_seconds) == (2, 4.25, 10.0)
    assert (second.epoch, second.stall_by_cause[Cause.UNSEEN]) == (1, 4.0)
    assert second.stall_by_cause[Cause.NO_BATCH] == 0.25
    assert watched.trace().spans.tolist() == trace.spans.tolist()


@pytest.mark.parametrize("looks", [(), (1, 3)])
def test_a_long_run_keeps_the_newest_spans_and_says_that_some_are_gone(looks: tuple[int, ...]) -> None:
    clock = Clock()
    watched = watch(KnownLoader(clock, [1.0] * 10), clock=clock, quiet=True, trace_spans=6)
    for number in watched:
        clock.advance(1.0)
        if number in looks:
            assert watched.trace().is_complete == (number == 1)

    trace = watched.trace()
    assert trace.spans["step"].tolist() == [7, 8, 8, 9, 9, NO_STEP]
    assert not trace.is_complete
    assert watched.verdict().steps == 10


def test_leaving_the_loop_ends_the_step_there_and_the_next_loop_is_a_new_epoch() -> None:
    clock, lines = Clock(), list[str]()
    watched = a_watch(KnownLoader(clock, [1.0, 1.0, 1.0], stop=0.5), lines)

    for number in watched:
        clock.advance(2.0)
        if number == 1:
            break
    clock.advance(100.0)  # validation, say: nobody waits for this loader
    for _ in watched:
        clock.advance(2.0)

    left, whole = watched.trace().epochs()
    assert (left.steps, left.stall_seconds, left.own_seconds) == (2, 2.5, 4.0)
    assert (whole.steps, whole.stall_seconds, whole.own_seconds) == (3, 3.5, 6.0)
    assert len(lines) == 2


def test_epochs_are_counted_through_though_each_is_watched_anew() -> None:
    """As in `for epoch in range(3): for batch in watch(loader)`: every line said epoch 0."""
    clock = Clock()
    lines: list[str] = []
    loader = KnownLoader(clock, [1.0])

    for _ in range(3):
        for _ in watch(loader, report=lines.append, clock=clock):
            clock.advance(1.0)
    for _ in watch(KnownLoader(clock, [1.0]), report=lines.append, clock=clock):
        clock.advance(1.0)

    assert [line.split(": ")[1] for line in lines] == ["epoch 0", "epoch 1", "epoch 2", "epoch 0"]


def test_counting_the_epochs_of_a_loader_leaves_no_callback_on_it_and_nothing_behind() -> None:
    """What a signal handler raises in a callback written in Python is dropped: a Ctrl-C was lost there."""
    loader = KnownLoader(Clock(), [1.0])
    watch(loader, quiet=True)

    assert [reference.__callback__ for reference in weakref.getweakrefs(loader)] == [None]
    gone = id(loader)
    del loader
    kept = [KnownLoader(Clock(), [1.0])]
    watch(kept[0], quiet=True)
    assert gone not in _EPOCHS or gone == id(kept[0])


def test_an_exception_in_the_loop_passes_and_the_measurement_ends_with_it() -> None:
    clock = Clock()
    watched = a_watch(KnownLoader(clock, [1.0, 1.0, 1.0], stop=0.5))

    def train() -> None:
        for _ in watched:
            clock.advance(2.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()

    verdict = watched.verdict()
    assert (verdict.steps, verdict.stall_seconds, verdict.own_seconds) == (1, 1.5, 2.0)


def test_an_exception_in_the_loader_passes_as_it_is_and_its_delay_counts_as_waiting() -> None:
    clock = Clock()
    watched = a_watch(KnownLoader(clock, [1.0], stop=0.25, fails=True))

    def train() -> None:
        for _ in watched:
            clock.advance(2.0)

    with pytest.raises(OSError, match=r"^the store is gone$"):
        train()

    verdict = watched.verdict()
    assert (verdict.steps, verdict.stall_seconds, verdict.own_seconds) == (1, 1.75, 2.0)


def test_two_loaders_at_once_are_told_apart() -> None:
    """Validation in the middle of a training epoch is, to the training loader, the step's own time."""
    clock = Clock()
    training = a_watch(KnownLoader(clock, [1.0, 1.0]))
    validation = a_watch(KnownLoader(clock, [3.0]))

    for _ in training:
        clock.advance(2.0)
        for _ in validation:
            clock.advance(4.0)

    assert (training.verdict().stall_seconds, training.verdict().own_seconds) == (2.0, 18.0)
    assert (validation.verdict().stall_seconds, validation.verdict().own_seconds) == (6.0, 8.0)


def test_time_between_iter_and_the_first_batch_is_the_callers() -> None:
    clock = Clock()
    watched = a_watch(KnownLoader(clock, [1.0], start=2.0))

    iterator = iter(watched)
    assert clock.now == 2.0  # a loader that starts working at `iter` still does
    clock.advance(50.0)
    next(iterator)
    del iterator

    assert watched.verdict().stall_seconds == 3.0


def test_a_verdict_can_be_asked_for_in_the_middle() -> None:
    clock = Clock()
    watched = a_watch(KnownLoader(clock, [1.0] * 4))
    assert str(watched.verdict()) == "waited 0.0 % of 0 s; nothing to gain here"

    for number in watched:
        if number == 2:
            assert watched.verdict().stall_seconds == 3.0
            assert watched.verdict().own_seconds == 4.0
        clock.advance(2.0)


def test_the_hand_over_from_memory_is_measured_through_the_watch_itself() -> None:
    """Each reading of this clock takes a second; a step reads it when it asks and when it receives."""
    clock = Clock()

    def ticking() -> float:
        clock.advance(1.0)
        return clock.now

    watched = watch([1, 2, 3], quiet=True, clock=ticking)
    list(watched)

    assert watched.verdict().hand_over_seconds == pytest.approx(2.0, abs=0.01)


def test_the_ceiling_leaves_in_what_handing_over_costs() -> None:
    assert Verdict(10, 30.0, 10.0, hand_over_seconds=1.0).ceiling == 2.0


def test_lines_go_to_standard_error_unless_the_watch_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    list(watch([1]))
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)

    list(watch([1], quiet=True))
    list(watch([]))
    assert capsys.readouterr() == ("", "")


def test_a_torch_loader_is_unchanged_under_watch() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10) * 2)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    watched = watch(loader, quiet=True)

    for _ in range(2):
        pairs = list(zip(watched, loader, strict=True))
        assert len(pairs) == 3
        for (ids, twice), (expected_ids, expected_twice) in pairs:
            assert torch.equal(ids, expected_ids)
            assert torch.equal(twice, expected_twice)
    assert len(watched) == 3
    assert watched.batch_size == 4
    assert watched.dataset is data
    assert watched.watched is loader
    assert watched.verdict().steps == 6


def test_leaving_a_torch_loader_with_workers_early_ends_them() -> None:
    """As it does without the watch; that no process is left is checked after every test."""
    data = torch.utils.data.TensorDataset(torch.arange(100))
    watched = watch(torch.utils.data.DataLoader(data, batch_size=4, num_workers=1), quiet=True)

    for (ids,) in watched:
        assert ids.tolist() == [0, 1, 2, 3]
        break

    *_, ended = watched.trace().spans
    assert (ended["kind"], ended["step"]) == (Kind.WAIT, NO_STEP)
    assert watched.verdict().steps == 1


def test_any_iterable_can_be_watched_and_its_batches_come_out_as_the_same_objects() -> None:
    batches = [object(), object()]

    assert all(one is other for one, other in zip(watch(batches, quiet=True), batches, strict=True))
    assert list(watch((n * n for n in range(4)), quiet=True)) == [0, 1, 4, 9]


def test_what_a_loader_does_not_have_its_watch_does_not_have() -> None:
    watched = watch((n for n in range(3)), quiet=True)

    assert watched
    assert not watch([], quiet=True)
    with pytest.raises(TypeError, match="has no len"):
        len(watched)
    with pytest.raises(AttributeError, match="sampler"):
        _ = watched.sampler
    assert copy.copy(watched).watched is watched.watched


def test_a_batch_that_the_caller_lets_go_is_gone_at_once() -> None:
    """A loader that reuses slots, as ours does, waits for exactly this."""

    class Batches:
        def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
            return (np.arange(n) for n in range(1, 6))

    seen = 0
    for batch in watch(Batches(), quiet=True):
        alive = weakref.ref(batch)
        del batch
        assert alive() is None
        seen += 1
    assert seen == 5


class OneBuffer:
    """A loader that fills the same array again for every batch."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.buffer = np.zeros(4)

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        for number in range(self.batches):
            self.buffer[:] = number
            yield self.buffer


def test_a_replay_hands_out_what_the_first_batches_held_though_the_loader_reused_its_buffer() -> None:
    watched = watch(OneBuffer(5), quiet=True, keep_batches=3)
    for _ in range(2):
        for _ in watched:
            pass

    replayed = [float(batch[0]) for batch in watched.replay(7)]

    assert replayed == [0, 1, 2, 0, 1, 2, 0]


def test_batches_are_kept_up_to_the_bytes_allowed() -> None:
    watched = watch(OneBuffer(9), quiet=True, keep_batches=8, keep_bytes=2 * 32 + 31)
    for _ in watched:
        pass

    assert [float(batch[0]) for batch in watched.replay(4)] == [0, 1, 0, 1]


Pair = namedtuple("Pair", ["x", "y"])


def test_kept_batches_are_copies_through_every_container() -> None:
    x, y = torch.arange(4.0), np.arange(4)
    batch = {"pair": Pair(x, y), "list": [x, (y, "text", 3, None)], "bytes": b"raw"}
    watched = watch([batch], quiet=True)
    for _ in watched:
        pass
    x += 100
    y += 100

    (kept,) = watched.replay(1)

    assert isinstance(kept, dict)
    assert type(kept["pair"]) is Pair
    assert kept["pair"].x.tolist() == [0, 1, 2, 3]
    assert kept["pair"].y.tolist() == [0, 1, 2, 3]
    assert kept["list"][0].tolist() == [0, 1, 2, 3]
    assert kept["list"][1][0].tolist() == [0, 1, 2, 3]
    assert kept["list"][1][1:] == ("text", 3, None)
    assert kept["bytes"] == b"raw"


@for_each("unknown", [object(), {1, 2}, np.array([object()]), [np.zeros(2), object()]])
def test_a_batch_that_nobody_knows_how_to_copy_is_not_kept(unknown: object) -> None:
    watched = watch([unknown], quiet=True)
    for _ in watched:
        pass

    with pytest.raises(ConfigError, match="no batch is kept to replay"):
        watched.replay(1)


def test_copying_a_batch_is_neither_waiting_nor_the_callers_step() -> None:
    clock = Clock()

    class SlowToCopy(np.ndarray[Any, Any]):
        def copy(self, order: Any = "C") -> Any:
            clock.advance(10.0)
            return np.asarray(self).copy()

    batches = [np.zeros(2).view(SlowToCopy)] * 3
    watched = watch(batches, quiet=True, clock=clock, keep_batches=2)
    for _ in watched:
        clock.advance(1.0)

    verdict = watched.verdict()
    assert (verdict.stall_seconds, verdict.own_seconds, clock.now) == (0.0, 3.0, 23.0)


def test_a_replay_of_the_callers_own_steps_decides_the_ceiling() -> None:
    """A GPU hides waiting: the host waits 6 of 8 s a step, but from memory a step takes 5 s all the same."""
    clock = Clock()
    watched = a_watch(KnownLoader(clock, [6.0] * 4))
    for _ in watched:
        clock.advance(2.0)
    assert watched.verdict().ceiling == 4.0
    calls = []

    def synchronize() -> None:
        calls.append(clock.now)
        clock.advance(9.0 if len(calls) == 2 else 0.0)

    for _ in watched.replay(3, synchronize):
        clock.advance(2.0)

    assert calls == [32.0, 38.0]
    assert watched.verdict().replay_seconds == 5.0
    assert watched.verdict().ceiling == 8.0 / 5.0
    assert str(watched.verdict()) == "waited 75 % of 32 s; ceiling 1.60 x, by replay"


def test_a_replay_left_early_tells_nothing() -> None:
    clock = Clock()
    watched = a_watch(KnownLoader(clock, [6.0]))
    for _ in watched:
        clock.advance(2.0)

    for _ in watched.replay(10):
        break

    assert watched.verdict().replay_seconds is None
    with pytest.raises(ConfigError, match="steps is 0"):
        watched.replay(0)


def test_with_a_gpu_in_use_the_verdict_says_what_it_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    clock = Clock()
    watched = a_watch(KnownLoader(clock, [1.0]))
    for _ in watched:
        clock.advance(1.0)

    assert str(watched.verdict()) == (
        "waited 50 % of 2 s; ceiling 2.00 x or less: a GPU may have worked meanwhile; "
        "loop once over replay() to know"
    )
