"""Work that threads repeat for a while, timed; an interrupt or an error ends all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

Clock = Callable[[], float]

# How long threads are waited for after Ctrl-C: longer than most reads take.
_GRACE_SECONDS = 1.0


def run_together(work: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Run functions in threads until all return; raise the first error, which stops the others.

    An interrupt does so too, and leaves behind what does not stop within a moment, such as a read that hangs.
    """
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [
        threading.Thread(target=run, args=(function,), name="penstock-calibrate", daemon=True)
        for function in work
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        grace_ends = time.monotonic() + _GRACE_SECONDS
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, grace_ends - time.monotonic()))
        raise
    if errors:
        raise errors[0]


def repeat_until(until: float, clock: Clock, work: Sequence[Callable[[], Iterator[int]]]) -> float:
    """Return bytes/s of all threads together while all of them work, each from after its first round on.

    until: moment on the clock; each does two rounds at least. work: of each thread, what yields the bytes of a round.
    """
    stop = threading.Event()
    done: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []

    def repeat(function: Callable[[], Iterator[int]]) -> None:
        rounds = function()
        # A thread's buffers and caches, and what it touches first, are made here, before its time counts.
        next(rounds)
        moments, nbytes = [clock()], list[int]()
        while not nbytes or not (stop.is_set() or clock() >= until):
            nbytes.append(next(rounds))
            moments.append(clock())
        done.append((np.array(moments), np.array(nbytes, np.float64)))

    run_together([partial(repeat, each) for each in work], stop)
    return rate_of_all(done)


def rate_of_all(done: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> float:
    """Return bytes/s while all threads worked.

    done: of each thread, float64[rounds + 1], moments between its rounds, and float64[rounds], the bytes of each. Not
        the sum of the threads' own rates: who begins late or ends last has the device for itself meanwhile.
    """
    begin = max(moments[0] for moments, _ in done)
    end = min(moments[-1] for moments, _ in done)
    if end <= begin:  # no two worked at the same time
        begin, end = min(moments[0] for moments, _ in done), max(moments[-1] for moments, _ in done)
    total = 0.0
    for moments, nbytes in done:
        within = np.clip(moments, begin, end)
        seconds = np.maximum(np.diff(moments), 1e-9)
        total += float((nbytes * np.diff(within) / seconds).sum())
    return total / float(end - begin)
