"""Real threads around the scheduler, with work that the test holds open."""

import itertools
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.patience import brief, patient, wait_until

from penstock.errors import ClosedError, DataError, StagingError, WaitTimeout
from penstock.flow import waits
from penstock.flow.batches import Departure
from penstock.flow.engine import DECISIONS, Engine, EngineSettings, compiled_decisions
from penstock.flow.pieces import Pieces
from penstock.flow.recorder import Recorder
from penstock.flow.staging import Field, StagingBuffer, slot_bytes
from penstock.flow.work import Brought, Failed, InParts, Request
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.machine_code import Loop
from penstock.plan import AccessPlan, FullShuffle, Sequential
from penstock.policy import Load, Scheduler, StagingLimits, place_by_frequency
from penstock.policy.placement import Kept, Shared
from penstock.queues import get_within

FIELD = Field("ids", (), np.dtype(np.int64))


class NumberWork:
    """Each sample's content is its own id. Reading one that is in `shut` waits until the test opens the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.shut: set[int] = set()
        self.broken: set[int] = set()
        self.is_closed = False

    def fetch(self, request: Request) -> list[Any]:
        data: list[Any] = []
        for sample in request.samples:
            request.at(sample)
            if sample in self.shut:
                self.gate.wait(patient(20))
            is_broken = sample in self.broken
            data.append(Failed(DataError(f"{self.describe(sample)} is broken")) if is_broken else sample)
        return data

    def place_of(self, rows: range, arrays: tuple[np.ndarray, ...]) -> None:
        """Numbers come one by one."""

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[np.ndarray, ...], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        (ids,) = arrays
        ids[brought.rows] = brought.data
        return []

    @property
    def fields(self) -> tuple[Field, ...]:
        return (FIELD,)

    def finish(self, slot: int, arrays: tuple[np.ndarray, ...], kept: Sequence[int]) -> Any:
        return arrays

    @property
    def place(self) -> str:
        return "a store of numbers"

    def describe(self, sample: int) -> str:
        return f"/data/{sample}.jpg"

    def take_lost(self) -> Sequence[tuple[float, float]]:
        return ()

    def ended_tiers(self) -> Sequence[int]:
        return ()

    def evict(self, ids: Any) -> None:
        pass

    def end_waits(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Run:
    """An engine over `NumberWork`, with what a loader would add."""

    def __init__(
        self, plan: AccessPlan, work: NumberWork, *, slots: int = 3, limit_slots: int = 3, **options: Any
    ):
        sizes = np.full(plan.samples, 10, np.int64)
        memory = Curve(((1, 1e10),))
        store = SharedStore(None, Curve(((1, 1e6),)), latency_seconds=0.01)
        machine = Machine(
            store, tuple(StorageClass(each, 10**6, 1, memory) for each in ("staging", "memory"))
        )
        limits = options.pop("limits", StagingLimits(slots, 4, 2, 10**6))
        placement, shared = place_by_frequency(plan, 0, sizes, []), options.pop("shared", None)
        scheduler = Scheduler(plan, 0, sizes, placement, machine, limits, shared=shared)
        limit_bytes = limit_slots * slot_bytes([FIELD], plan.batch_size)
        self.staging = StagingBuffer([FIELD], plan.batch_size, limit_bytes)
        for _ in range(slots):
            self.staging.grow()
        self.said: list[str] = []
        is_starting = options.pop("is_starting", lambda said: False)
        peers = options.pop("peers", None)
        settings: dict[str, Any] = {"patience_seconds": 60.0, "timeout_seconds": None, **options}
        compiled = settings.pop("compiled", lambda *_: None)
        self.recorder = Recorder(1024, clock=settings.pop("clock", time.perf_counter))
        self.engine = Engine(
            scheduler,
            work,
            work,
            self.staging,
            self.recorder,
            EngineSettings(readers=limits.readers, **settings),
            begin=lambda: None,
            report=self.said.append,
            collect=lambda: None,
            finish=lambda: None,
            samples_of=lambda epoch, step: plan.local_batch(0, epoch, step),
            compiled=compiled,
            peers=peers,
            is_starting=lambda: is_starting(self.said),
        )
        self.engine.start()

    def take(self, epoch: int, step: int) -> np.ndarray:
        (ids,) = self.engine.take(epoch, step).arrays
        self.engine.let_go(epoch, step)
        return ids


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    runs: list[tuple[Run, NumberWork]] = []

    def make(plan: AccessPlan, work: NumberWork | None = None, **options: Any) -> Run:
        work = work or NumberWork()
        runs.append((Run(plan, work, **options), work))
        return runs[-1][0]

    yield make
    for each, work in runs:
        work.gate.set()
        each.engine.close()
        assert work.is_closed


class News:
    """Rank 1 keeps a sample from now on, once the test says so."""

    has_news = False

    def take_news(self) -> list[tuple[int, np.ndarray]]:
        self.has_news = False
        return [(1, np.array([4]))]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Queues that a thread waited at for a while only, and which thread did."""
    found: list[tuple[Any, int]] = []

    def look(queue: Any, seconds: float | None) -> Any:
        found.append((queue, threading.get_ident()))
        return get_within(queue, seconds)

    monkeypatch.setattr("penstock.flow.engine.get_within", look)
    return found


class LongWork(Departure):
    """Takes a decode worker as long as the test lets it."""

    def __init__(self, watched: object) -> None:
        super().__init__(watched)  # type: ignore[call-arg]
        self.thread, self.is_begun, self.may_end = 0, threading.Event(), threading.Event()

    @property
    def seconds(self) -> float | None:
        return None

    @seconds.setter
    def seconds(self, now: float | None) -> None:
        self.thread = threading.get_ident()
        self.is_begun.set()
        self.may_end.wait()


@pytest.mark.parametrize("heard_by_another", [False, True])
def test_what_another_rank_has_by_now_is_loaded_before_the_training_asks_for_it(
    run: Callable[..., Run], heard_by_another: bool, looks: list[tuple[Any, int]]
) -> None:
    """Rank 0 of 2 needs samples 4 and 5 in its second step; rank 1 has promised the first of them.

    heard_by_another: both workers get work, and the one that has looked for news has it for longer.
    """
    kept = [Kept(np.array(ids, np.int64), np.ones(len(ids), np.int8)) for ids in ([], [4])]
    news = News()
    running = run(
        AccessPlan(Sequential(8), 4, 1, 2),
        shared=Shared((*kept,), np.array([4]), (0, 0)),
        peers=news,
        limits=StagingLimits(2, 4, 2, 10**6),
    )
    engine, scheduler = running.engine, running.engine._scheduler
    wait_until(lambda: scheduler.expects_others and (0, 0) in engine._arrived)
    wait_until(lambda: not (scheduler.moves_running or scheduler.loads_running or engine._inbox))
    assert (0, 1) not in engine._arrived
    works = [LongWork(running), LongWork(running)]
    try:
        if heard_by_another:
            wait_until(lambda: looks, 5)
            for work in works:
                engine._loads.put(work)
                assert work.is_begun.wait(patient(5))
            (other,) = (work for work in works if work.thread != looks[-1][1])
            other.may_end.set()
        looks.clear()
        wait_until(lambda: len(looks) > 20, 5)
        assert len(set(looks)) == 1, "one worker looks for news, the other sleeps, or works"

        news.has_news = True

        wait_until(lambda: (0, 1) in engine._arrived, 5)
    finally:
        for work in works:
            work.may_end.set()


def test_workers_that_expect_nothing_of_other_ranks_sleep_until_they_have_work(
    run: Callable[..., Run], looks: list[tuple[Any, int]]
) -> None:
    none = Kept(np.empty(0, np.int64), np.empty(0, np.int8))
    shared = Shared((none, none), np.empty(0, np.int64), (0, 0))
    running = run(AccessPlan(Sequential(8), 4, 1, 2), shared=shared, peers=News())

    for step in range(2):
        running.take(0, step)

    assert running.engine._loads not in [queue for queue, _ in looks]


class PartsWork(NumberWork):
    """Brings one sample at a time."""

    def fetch(self, request: Request) -> list[Any]:
        return InParts() if request.lasting and request.ids.size > 1 else super().fetch(request)


def test_what_would_take_one_reader_long_is_read_in_parts_by_those_that_are_idle(
    run: Callable[..., Run],
) -> None:
    """Sixteen samples are asked for together."""
    plan = AccessPlan(FullShuffle(100, 3), 16, 2)
    limits = StagingLimits(3, readers=32, decoders=2, undecoded_bytes=10**6, read_together=16)
    running = run(plan, PartsWork(), limits=limits)

    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            assert running.take(epoch, step).tolist() == plan.local_batch(0, epoch, step).tolist()


class SlowReads(NumberWork):
    """Each read takes a second by its clock, whether what it brings was in memory or not."""

    def __init__(self, *, is_resident: bool) -> None:
        super().__init__()
        self.is_resident, self.seconds, self.moved = is_resident, itertools.count(), list[int]()
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def fetch(self, request: Request) -> Any:
        self.now = float(next(self.seconds))
        if request.lasting:
            self.moved += request.samples
        return Pieces(
            request.ids.view(np.uint8), np.arange(request.ids.size + 1) * 8, was_resident=self.is_resident
        )

    def decode(self, load: Load, brought: Brought, arrays: Any, at: Any) -> list[Any]:
        arrays[0][brought.rows] = [each.view(np.int64)[0] for each in brought.data]
        return []


@pytest.mark.parametrize("is_resident", [True, False])
def test_reads_of_what_is_in_memory_stay_with_the_workers_however_long_they_take(
    run: Callable[..., Run], is_resident: bool
) -> None:
    """A thread that waits for the interpreter's lock, or a guest whose host is busy, waits for no store."""
    plan = AccessPlan(Sequential(40), ranks=1, batch_size=4, epochs=1)
    work = SlowReads(is_resident=is_resident)
    running = run(plan, work, clock=work.clock)

    batches = [running.take(0, step).tolist() for step in range(10)]

    assert batches == np.arange(40).reshape(10, 4).tolist()
    # The three batches that are staged at once may be moved before anything was read.
    assert (max(work.moved, default=0) < 12) == is_resident


def test_batches_come_in_the_plans_order_whatever_the_threads_do(run: Callable[..., Run]) -> None:
    plan = AccessPlan(FullShuffle(101, 3), 8, 3)
    running = run(plan)

    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            assert running.take(epoch, step).tolist() == plan.local_batch(0, epoch, step).tolist()


def test_a_run_goes_on_by_compiled_decisions_once_there_are_any(run: Callable[..., Run]) -> None:
    loop = DECISIONS.wait()

    def compiled(samples: int, seconds: float) -> Loop | None:
        return loop if samples >= 20 else None

    plan = AccessPlan(FullShuffle(101, 3), 8, 3)
    running = run(plan, compiled=compiled)

    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            assert running.take(epoch, step).tolist() == plan.local_batch(0, epoch, step).tolist()
    assert running.engine._scheduler._bound is not None


@pytest.mark.parametrize(
    ("is_cached", "seconds", "least"),
    [(True, 0.0, 1_000), (True, 0.06, 2), (False, 0.9, 10_000), (False, 1.0, 2)],
)
def test_decisions_are_loaded_soon_if_compiled_before_and_compiled_after_many_samples_or_slow_ones(
    monkeypatch: pytest.MonkeyPatch, is_cached: bool, seconds: float, least: int
) -> None:
    answers = iter([is_cached])  # once alone
    monkeypatch.setattr(type(DECISIONS), "is_cached", property(lambda part: next(answers)))
    monkeypatch.setattr(DECISIONS, "ask", lambda: "compiled")
    ask = compiled_decisions()

    found: list[object] = [
        *(ask(samples, 0.0) for samples in (least - 2, least - 1)),
        *(ask(least, seconds) for _ in range(2)),
    ]
    assert found == [None, None, "compiled", "compiled"]


class GivenCount:
    """How many Loads may run at once, as the test says."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def load_done(self, *_: object) -> None:
        pass


def decoders_alive(engine: Engine) -> int:
    return sum(thread.is_alive() for thread in engine._threads if "decode" in thread.name)


def test_decode_workers_are_started_when_wanted_parked_when_not_and_ended_with_the_rest(
    run: Callable[..., Run],
) -> None:
    work = NumberWork()
    plan = AccessPlan(Sequential(400), 20, 1)
    work.shut = set(range(plan.samples))
    running = run(plan, work, limits=StagingLimits(3, 0, 2, 10**6))
    scheduler = running.engine._scheduler
    count = scheduler._threads = GivenCount(2)  # type: ignore[assignment]
    assert decoders_alive(running.engine) == 2

    count.threads = 5
    running.engine._post(lambda now: scheduler._event(now))
    # Two are held by the gate, and the message is taken by none: the gate lets one sample go.
    work.gate.set()
    for step in range(10):
        running.take(0, step)
    assert decoders_alive(running.engine) == 5
    count.threads = 1
    taken = [running.take(0, step).tolist() for step in range(10, 20)]

    assert taken == [plan.local_batch(0, 0, step).tolist() for step in range(10, 20)]
    assert running.engine._decoders_at_work == 1
    assert decoders_alive(running.engine) == 5
    running.engine.close()
    assert decoders_alive(running.engine) == 0


def test_where_no_more_threads_can_be_started_those_that_run_do_the_work_and_are_judged_alone(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, decoders = threading.Thread.start, itertools.count()

    def start_two(thread: threading.Thread) -> None:
        if thread.name == "penstock-waits" or ("decode" in thread.name and next(decoders) >= 2):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    plan = AccessPlan(Sequential(40), 5, 1)
    running = run(plan, limits=StagingLimits(3, 0, 4, 10**6, most_decoders=8))

    assert [running.take(0, step).tolist() for step in range(8)] == np.arange(40).reshape(8, 5).tolist()
    threads = running.engine.threads
    assert (threads.threads, threads.most) == (2, 2)


def test_where_no_thread_can_be_started_at_all_the_error_says_what_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    work = NumberWork()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DataError, match=r"can't start new thread: .* raise `ulimit -u`"):
            Run(AccessPlan(Sequential(20), 5, 1), work)
    assert work.is_closed


def test_a_caller_that_keeps_batches_gets_more_slots_up_to_the_limit_and_then_the_reason(
    run: Callable[..., Run],
) -> None:
    running = run(AccessPlan(Sequential(100), 5, 1), slots=3, limit_slots=6)

    kept = [running.take(0, step) for step in range(6)]
    with pytest.raises(StagingError, match="all 6 batch slots"):
        running.take(0, 6)

    assert [batch[0] for batch in kept] == [0, 5, 10, 15, 20, 25]


def test_the_run_goes_on_after_a_caller_let_go_of_what_it_kept(run: Callable[..., Run]) -> None:
    running = run(AccessPlan(Sequential(100), 5, 1), slots=3, limit_slots=3)
    kept = [running.take(0, step) for step in range(3)]
    with pytest.raises(StagingError):
        running.take(0, 3)

    kept.clear()

    assert running.take(0, 3).tolist() == [15, 16, 17, 18, 19]


def test_a_slot_that_comes_back_and_is_lent_again_while_the_slots_are_counted_is_not_missed(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller lets go of its batch and asks for the next, which arrives while it looks who has the only slot."""
    running = run(AccessPlan(Sequential(20), 5, 1), slots=1, limit_slots=1)
    engine, referred = running.engine, running.staging.is_referred_to
    gate = threading.Event()
    batch = running.take(0, 0)
    engine._post(lambda _: [] if gate.wait(patient(20)) else None)  # no worker hears of what is dropped
    wait_until(lambda: not engine._loads.qsize())

    def look_when_it_has_arrived(slot: int) -> bool:
        gate.set()
        wait_until(lambda: (0, 1) in engine._arrived)
        return referred(slot)

    monkeypatch.setattr(running.staging, "is_referred_to", look_when_it_has_arrived)
    del batch

    assert running.take(0, 1).tolist() == [5, 6, 7, 8, 9]


def test_a_wait_beyond_patience_says_who_waits_for_which_file_and_how_others_fare(
    run: Callable[..., Run],
) -> None:
    work = NumberWork()
    work.shut = {3}
    running = run(AccessPlan(Sequential(20), 5, 1), work, patience_seconds=0.05, timeout_seconds=brief(1))
    wait_until(lambda: "sample 3," in waits.all_waits() and running.engine._groups.recent_read_seconds)

    with pytest.raises(WaitTimeout) as caught:
        running.take(0, 0)

    for text in (str(caught.value), running.said[0]):
        assert "epoch 0, step 0" in text
        assert "sample 3, /data/3.jpg" in text
        assert "on a store of numbers" in text
        assert "ms (median)" in text


def test_a_wait_while_what_loads_still_starts_is_reported_and_does_not_time_out(
    run: Callable[..., Run],
) -> None:
    """A worker process that imports slowly does not hang."""
    work = NumberWork()
    work.shut = {0}
    running = run(
        AccessPlan(Sequential(20), 5, 1),
        work,
        patience_seconds=1e-3,
        timeout_seconds=1e-3,
        is_starting=lambda said: len(said) < 3,
    )

    with pytest.raises(WaitTimeout):
        running.take(0, 0)

    assert len(running.said) >= 3


def test_a_start_that_does_not_end_times_out(run: Callable[..., Run]) -> None:
    work, now = NumberWork(), itertools.count(0.0, 100.0)
    work.shut = {0}
    running = run(
        AccessPlan(Sequential(20), 5, 1),
        work,
        timeout_seconds=1e-3,
        is_starting=lambda said: True,
        clock=lambda: next(now),
    )

    with pytest.raises(WaitTimeout):
        running.take(0, 0)

    assert next(now) > 600


def test_all_waits_of_the_process_are_told_to_whoever_asks_by_its_id(run: Callable[..., Run]) -> None:
    work = NumberWork()
    work.shut = {0, 1}
    running = run(AccessPlan(Sequential(20), 5, 1), work)
    waiting = threading.Thread(target=running.take, args=(0, 0))
    waiting.start()
    wait_until(lambda: "the training waits" in (told := waits.all_waits()) and "sample 1" in told)

    answer = waits.ask_waits(os.getpid())
    work.gate.set()
    waiting.join()

    assert "the training waits for the batch of epoch 0, step 0" in answer
    assert re.search("(reads|loads) sample 1, /data/1.jpg", answer)  # whichever thread came first


class OddNames(NumberWork):
    """Its samples have names that POSIX allows and terminals obey; that of sample 0 cannot be had at all."""

    def describe(self, sample: int) -> str:
        if sample == 0:
            raise KeyError(sample)
        return "/data/\udcff\x1b[2J\nfoto-ü.jpg"


def test_a_name_that_no_terminal_should_see_reaches_no_line_raw(run: Callable[..., Run]) -> None:
    work = OddNames()
    work.shut = {1}
    running = run(AccessPlan(Sequential(20), 5, 1), work, timeout_seconds=0.05, patience_seconds=0.01)
    wait_until(lambda: "sample 1," in waits.all_waits())
    with pytest.raises(WaitTimeout) as caught:
        running.take(0, 0)
    answers = [waits.all_waits(), waits.ask_waits(os.getpid())]
    work.gate.set()

    escaped = r"/data/\udcff\x1b[2J\nfoto-ü.jpg"
    for text in (*answers, str(caught.value), *running.said):  # a slow machine may say nothing before
        assert escaped in text
        assert all(line.isprintable() for line in text.splitlines())
    assert answers[0].encode()


def test_what_cannot_be_described_does_not_end_the_answers(run: Callable[..., Run]) -> None:
    work = OddNames()
    work.shut = {0}
    run(AccessPlan(Sequential(20), 5, 1), work)
    line = "sample 0, which cannot be described (KeyError), since"
    wait_until(lambda: line in waits.all_waits())

    for _ in range(2):
        answer = waits.ask_waits(os.getpid())
        assert answer.startswith(f"penstock: process {os.getpid()}\n")
        assert line in answer
    work.gate.set()


def test_a_waiter_that_cannot_say_what_it_waits_for_does_not_silence_the_others(
    run: Callable[..., Run],
) -> None:
    class Mute:
        def waits(self) -> list[str]:
            raise ZeroDivisionError

    work = NumberWork()
    work.shut = {1}
    mute = Mute()
    waits.register(mute)
    try:
        run(AccessPlan(Sequential(20), 5, 1), work)
        wait_until(lambda: "sample 1, /data/1.jpg" in waits.ask_waits(os.getpid()))
        assert "what waits here cannot be described: ZeroDivisionError\n" in waits.ask_waits(os.getpid())
    finally:
        work.gate.set()
        waits.unregister(mute)


def test_nobody_answers_for_a_process_without_a_loader() -> None:
    with pytest.raises(ValueError, match="no loader runs in process"):
        waits.ask_waits(os.getpid())


def test_a_failed_sample_is_named_in_its_batch_with_the_reason(run: Callable[..., Run]) -> None:
    work = NumberWork()
    work.broken = {7}
    running = run(AccessPlan(Sequential(20), 5, 1), work)

    running.take(0, 0)
    whole = running.engine.take(0, 1)

    assert whole.failed == (2,)
    assert "/data/7.jpg is broken" in str(whole.errors[7][0])
    assert whole.keep([0, 1, 3, 4])[0].tolist() == whole.keep([0, 1, 3, 4])[0].tolist() == [5, 6, 8, 9]


def test_a_seek_leaves_out_what_was_staged_and_goes_on_from_there(run: Callable[..., Run]) -> None:
    plan = AccessPlan(FullShuffle(60, 1), 5, 3)
    running = run(plan)
    running.take(0, 0)

    running.engine.seek(1, 0)

    for epoch in (1, 2):
        for step in range(plan.steps(epoch)):
            assert running.take(epoch, step).tolist() == plan.local_batch(0, epoch, step).tolist()


def test_an_error_of_the_work_itself_reaches_the_consumer_and_never_hangs_it(run: Callable[..., Run]) -> None:
    class Faulty(NumberWork):
        def decode(self, *_: object) -> list[tuple[int, Exception]]:
            raise AssertionError("a fault of ours")

    running = run(AccessPlan(Sequential(20), 5, 1), Faulty())

    with pytest.raises(AssertionError, match="a fault of ours"):
        running.take(0, 0)


def test_closing_twice_is_harmless_and_a_closed_engine_says_so(run: Callable[..., Run]) -> None:
    running = run(AccessPlan(Sequential(20), 5, 1))

    running.engine.close()
    running.engine.close()

    with pytest.raises(ClosedError, match="closed"):
        running.take(0, 0)


def test_closing_while_a_read_hangs_warns_and_names_it(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so after a second already: who pressed Ctrl-C waits at the prompt."""
    monkeypatch.setattr("penstock.flow.engine._JOIN_SILENT_SECONDS", 0.05)
    monkeypatch.setattr("penstock.flow.engine._JOIN_SECONDS", 0.1)
    work = NumberWork()
    work.shut = {0}
    running = run(AccessPlan(Sequential(20), 5, 1), work)
    wait_until(lambda: running.engine._at)

    with pytest.warns(RuntimeWarning, match=r"/data/0\.jpg"):
        running.engine.close()
    (said,) = running.said
    assert re.fullmatch(
        r"closing waits for 0\.1 s at most: thread \d+ (reads|loads) sample 0, /data/0\.jpg, since .* s", said
    )
    work.gate.set()
    for thread in running.engine._threads:
        thread.join()
    work.close()


def test_a_forked_child_is_told_that_it_needs_a_loader_of_its_own(run: Callable[..., Run]) -> None:
    running = run(AccessPlan(Sequential(20), 5, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        child = os.fork()
    if child == 0:
        try:
            running.take(0, 0)
        except ClosedError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
