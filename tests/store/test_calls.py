"""Calls to a store: their answers in order, and an end to the wait for one that gives none."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.patience import patient

from penstock.errors import DataError
from penstock.store import open_source
from penstock.store.calls import Calls


class GivenUp(Exception):
    """What a caller's patience ends with."""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def giving_up_once(is_stuck: threading.Event) -> Callable[[], float]:
    def watch() -> float:
        if is_stuck.is_set():
            raise GivenUp
        return 0.001

    return watch


@pytest.mark.parametrize("waits", [False, True])
def test_answers_come_in_the_order_of_the_items(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads ask once the first calls have shown that they wait; the last to begin may be the first to end."""
    turns = threading.Barrier(2)
    if waits:
        never_work(monkeypatch)

    def call(item: int) -> int:
        if waits and item >= 4:
            turns.wait(patient(20))  # needs two threads
        return item * item

    assert Calls().each(call, range(24)) == [item * item for item in range(24)]


def test_the_error_of_the_earliest_item_is_raised_and_no_call_is_begun_after_one() -> None:
    begun = []

    def call(item: int) -> int:
        begun.append(item)
        if item >= 2:
            raise ValueError(item)
        return item

    with pytest.raises(ValueError, match=r"^2$"):
        Calls().each(call, range(100))

    assert begun == [0, 1, 2]


def test_a_caller_that_gives_up_leaves_a_call_that_hangs_and_names_it(gate: threading.Event) -> None:
    is_stuck = threading.Event()

    def call(item: int) -> None:
        calls.at(f"/data/{item}")
        if item == 2:
            is_stuck.set()
            gate.wait(patient(20))
        begun.append(item)

    begun: list[int] = []
    calls = Calls(giving_up_once(is_stuck))
    with pytest.warns(RuntimeWarning, match=r"/data/2, asked for \d+\.\d s ago"), pytest.raises(GivenUp):
        calls.each(call, range(10))

    assert begun == [0, 1]


def test_a_caller_that_gives_up_leaves_no_thread_where_the_store_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The calls go on and on: a thread ends where it asks next."""
    is_busy = threading.Event()

    def call(_: None) -> None:
        while True:
            calls.at("/data")
            is_busy.set()

    monkeypatch.setattr("penstock.store.calls._LEAVE_SECONDS", patient(20))
    calls = Calls(giving_up_once(is_busy))
    with pytest.raises(GivenUp):
        calls.each(call, [None])

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


@pytest.mark.parametrize("threads", [1, 3])
def test_at_the_limit_of_threads_those_that_run_make_all_calls(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    limit_threads(monkeypatch, threads)
    never_work(monkeypatch)

    assert Calls().each(lambda item: item * item, range(24)) == [item * item for item in range(24)]


def test_where_no_thread_can_be_started_the_error_says_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(monkeypatch, 0)

    with pytest.raises(DataError, match=r"can't start new thread: .* raise `ulimit -u` or the container's"):
        Calls().one("/data", lambda: 0)


def never_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls wait more than they work, so that more threads would help."""
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)


def limit_threads(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    start, started = threading.Thread.start, itertools.count()

    def start_some(thread: threading.Thread) -> None:
        if next(started) >= most:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)


def test_a_line_names_the_oldest_call_and_how_many_there_are(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_work(monkeypatch)
    lines: list[str] = []

    def watch() -> float:
        if len(calls._at) == 2 and not gate.is_set():  # after that they end
            lines.append(calls.line())
            gate.set()
        return 0.001

    def call(item: int) -> None:
        if item < 4:
            return
        calls.at(f"/data/{item}")
        gate.wait(patient(20))

    calls = Calls(watch)
    calls.each(call, range(6))

    assert all(line.startswith("/data/") and line.endswith("; 2 calls under way") for line in lines)
    assert lines
    assert calls.line() == ""


@pytest.mark.parametrize("call", ["scandir", "stat"])
def test_a_folder_that_does_not_answer_does_not_hold_up_a_caller_that_gives_up(
    image_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, gate: threading.Event, call: str
) -> None:
    root = image_folder(images=12)
    stuck = str(root / "dog") if call == "scandir" else str(root / "dog" / "0003.jpg")
    is_stuck = threading.Event()
    answer = getattr(os, call)

    def hanging(path: str, **options: object) -> object:
        if path == stuck:
            is_stuck.set()
            gate.wait(patient(20))
        return answer(path, **options)

    monkeypatch.setattr(f"penstock.store.listing.os.{call}", hanging)
    with pytest.warns(RuntimeWarning, match=f"left while .* {stuck}, asked for"), pytest.raises(GivenUp):
        open_source(root, calls=Calls(giving_up_once(is_stuck)))
