"""How long a test waits for what should happen soon: the longer, the slower or busier the machine is.

Set PENSTOCK_TEST_SLOWNESS, as to 10, where the guess is too short. Processes that tests start inherit the number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SLOWNESS_VARIABLE = "PENSTOCK_TEST_SLOWNESS"
_LOOPS = 200_000
# What the loop takes on one core of the machine that the limits were chosen on (AMD EPYC, Zen 5, Python 3.11).
_LOOP_SECONDS = 10e-3


def patient(seconds: float) -> float:
    """Return a limit in seconds that suits a quiet machine, scaled to this one."""
    return seconds * float(os.environ[SLOWNESS_VARIABLE])


def brief(seconds: float) -> float:
    """Return a time-out that a test waits for in full: on a slow machine it is longer, but four times at most."""
    return min(patient(seconds), 4 * seconds)


def wait_until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Look again and again until something holds that nothing announces, and leave the processor to others meanwhile.

    Raises: AssertionError if it does not within so many `patient` seconds.
    """
    deadline = time.monotonic() + patient(seconds)
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.001)


def _measure_slowness() -> float:
    """Return how many times as long as on the reference machine work takes here, 1 at least."""
    fastest = min(_loop_seconds() for _ in range(5))
    queue = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return max(1.0, fastest / _LOOP_SECONDS) * max(1.0, queue)


def _loop_seconds() -> float:
    begin = time.perf_counter()
    total = 0
    for number in range(_LOOPS):
        total += number
    return time.perf_counter() - begin


if SLOWNESS_VARIABLE not in os.environ:
    os.environ[SLOWNESS_VARIABLE] = f"{_measure_slowness():.2f}"
