"""Work on many things at once: the order stays, failures arrive in their place, and no thread is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interrupting import interrupt_main_in
from tests.patience import patient

from penstock.flow.ordered import Workers, in_groups


@settings(deadline=None, max_examples=30)
@given(threads=st.integers(0, 5), things=st.lists(st.integers(), max_size=40))
def test_results_come_in_the_order_of_the_things(threads: int, things: list[int]) -> None:
    with Workers(threads, "test") as workers:
        assert list(workers.map(lambda thing: thing * 2, things)) == [thing * 2 for thing in things]


@given(
    sizes=st.lists(st.integers(0, 10), max_size=40),
    most_size=st.integers(1, 30),
    most_things=st.integers(1, 8),
)
def test_groups_are_the_things_in_order_and_end_as_soon_as_they_are_large_or_many(
    sizes: list[int], most_size: int, most_things: int
) -> None:
    groups = list(in_groups(sizes, lambda size: size, most_size, most_things))

    assert [size for group in groups for size in group] == sizes
    for number, group in enumerate(groups):
        assert sum(group[:-1]) < most_size
        assert 1 <= len(group) <= most_things
        assert number == len(groups) - 1 or sum(group) >= most_size or len(group) == most_things


def test_a_later_thing_that_is_done_first_waits_for_its_turn() -> None:
    second_is_done = threading.Event()

    def work(thing: int) -> int:
        if thing == 0:
            assert second_is_done.wait(patient(30))
        else:
            second_is_done.set()
        return thing

    with Workers(2, "test") as workers:
        assert list(workers.map(work, [0, 1])) == [0, 1]


def test_things_are_taken_no_more_than_twice_as_many_ahead_as_there_are_threads() -> None:
    taken: list[int] = []

    def things() -> Iterator[int]:
        for thing in range(20):
            taken.append(thing)
            yield thing

    with Workers(3, "test") as workers:
        for result in workers.map(abs, things()):
            assert len(taken) <= min(20, result + 1 + 6)
    assert len(taken) == 20


def test_a_failure_comes_in_its_turn_and_nothing_more_is_begun() -> None:
    begun: list[int] = []

    def work(thing: int) -> int:
        begun.append(thing)
        if thing == 2:
            raise ValueError("the third is broken")
        return thing

    with Workers(1, "test") as workers:
        results = workers.map(work, range(1000))
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(ValueError, match="the third is broken"):
            next(results)
        assert max(begun) <= 4

        assert list(workers.map(abs, [-1, -2])) == [1, 2]


def test_an_iterable_that_fails_is_told_after_what_was_begun_has_ended() -> None:
    ended: list[int] = []

    def things() -> Iterator[int]:
        yield 1
        raise KeyError("no second thing")

    with Workers(2, "test") as workers, pytest.raises(KeyError, match="no second thing"):
        list(workers.map(ended.append, things()))

    assert ended in ([1], [])


def test_who_stops_asking_leaves_nothing_running() -> None:
    running: set[int] = set()
    peak: list[int] = []

    def work(thing: int) -> int:
        running.add(thing)
        peak.append(len(running))
        running.remove(thing)
        return thing

    with Workers(2, "test") as workers:
        results = workers.map(work, iter(range(10**9)))
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
        assert not running
        done = len(peak)
        assert list(workers.map(work, [7])) == [7]
        assert len(peak) == done + 1


def test_what_is_waited_for_when_an_interrupt_comes_is_finished_too() -> None:
    """It may read memory that is given back as soon as the caller goes on."""
    interrupted, finished = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    interrupter = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def work(_: int) -> None:
        interrupter.start()
        assert interrupted.wait(patient(30))
        threading.Event().wait(0.1)  # while the caller would go on
        finished.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with Workers(1, "test") as workers:
            with pytest.raises(KeyboardInterrupt):
                list(workers.map(work, [0]))
            assert finished.is_set()
    finally:
        signal.signal(signal.SIGINT, before)
    interrupter.join()


def test_closing_twice_is_harmless_and_ends_the_threads() -> None:
    workers = Workers(3, "test-closing")
    assert sum(thread.name.startswith("test-closing") for thread in threading.enumerate()) == 3

    workers.close()
    workers.close()

    assert not any(thread.name.startswith("test-closing") for thread in threading.enumerate())


def test_a_thread_that_cannot_be_started_leaves_no_others_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would wait for work for ever, and keep the interpreter from ending."""
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if thread.name == "test-limit-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Workers(4, "test-limit")

    assert not any(thread.name.startswith("test-limit") for thread in threading.enumerate())


def test_an_interrupted_close_does_not_take_living_threads_for_ended() -> None:
    """A join that Ctrl-C interrupts would: then the interpreter may end under them."""
    works, goes_on = threading.Event(), threading.Event()

    def work(_: int) -> None:
        works.set()
        assert goes_on.wait(patient(30))

    workers = Workers(1, "test-interrupted")

    def consume() -> None:
        list(workers.map(work, [0]))

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert works.wait(patient(30))
    interrupter = interrupt_main_in(Workers.close)
    with pytest.raises(KeyboardInterrupt):
        workers.close()

    assert any(thread.name == "test-interrupted-0" for thread in threading.enumerate())
    goes_on.set()
    workers.close()
    for thread in (consumer, interrupter):
        thread.join()
    assert not any(thread.name == "test-interrupted-0" for thread in threading.enumerate())
