"""The number of threads against simulated code: what it waits for, what it computes, what it locks."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest

from penstock.policy import ThreadCount
from penstock.policy.thread_count import FollowingCount


@dataclass(frozen=True)
class Code:
    """What one sample costs.

    waits: seconds of waiting for a store, which any number of threads do at once.
    computes: processor seconds without the interpreter's lock, shared by `processors`.
    locked: processor seconds with it, of one thread at a time.
    crowding: by how much more every further thread makes the locked part cost.
    """

    waits: float = 0.0
    computes: float = 0.0
    locked: float = 0.0
    processors: int = 2
    crowding: float = 0.0

    def rate(self, threads: int) -> float:
        """Samples per second of so many threads: the least of the bounds, each a textbook's."""
        locked = self.locked * (1 + self.crowding * (threads - 1))
        alone = threads / (self.waits + self.computes + locked)
        bounds = [alone]
        if self.computes or locked:
            bounds.append(self.processors / (self.computes + locked))
        if locked:
            bounds.append(1 / locked)
        return min(bounds)

    def best(self, most: int) -> float:
        return max(self.rate(threads) for threads in range(1, most + 1))


class Run:
    """Threads that do nothing but this, one sample a Load, as fast as the code lets so many of them.

    noise: other programs on the same processors slow a Load, and all Loads of 150 ms, by up to this part of its time.
    """

    def __init__(self, count: ThreadCount, noise: float = 0.0, seed: int = 0) -> None:
        self.count = count
        self.chance = random.Random(seed)
        self.noise = noise
        self.now = 0.0
        self.burst, self.burst_ends = 1.0, 0.0
        self.running: list[tuple[float, float]] = []
        self.moves: list[tuple[float, int]] = []
        self.samples = 0

    def go_on(self, code: Code, seconds: float, are_busy: bool = True) -> float:
        """Run for this long; return the samples per second."""
        end, before, begun = self.now + seconds, self.samples, self.now
        while self.now < end:
            while len(self.running) < self.count.threads:
                each = len(self.running) + 1
                lasts = self.count.threads / code.rate(self.count.threads)
                if self.now >= self.burst_ends:
                    self.burst, self.burst_ends = 1 + self.noise * self.chance.random(), self.now + 0.15
                lasts *= self.burst * (1 + self.noise * self.chance.random())
                # Spread over the time of one, as threads that started at different times are.
                begin = self.now if self.samples else self.now + lasts * each / self.count.threads
                heapq.heappush(self.running, (begin + lasts, lasts))
            self.now, lasts = heapq.heappop(self.running)
            computed = code.computes + code.locked
            settled = self.count.facts.threads
            self.count.load_done(1, lasts, min(computed, lasts), self.now, are_busy)
            self.samples += 1
            if self.count.facts.threads != settled:
                self.moves.append((self.now, self.count.facts.threads))
        return (self.samples - before) / (self.now - begun)


CODES = {
    "a store that answers after 20 ms": Code(waits=0.02, locked=0.00005),
    "a store that answers after 1 s": Code(waits=1.0, locked=0.001),
    "computes without the lock": Code(computes=0.005),
    "holds the lock": Code(locked=0.0002),
    "holds the lock, and threads disturb each other": Code(locked=0.0002, crowding=0.2),
    "waits twice as long as it computes": Code(waits=0.01, computes=0.005),
    "waits and then holds the lock": Code(waits=0.004, locked=0.001),
    "decodes without the lock, around which it holds it": Code(computes=0.004, locked=0.001),
    "many processors": Code(waits=0.002, computes=0.005, processors=16),
}


#: Of so many samples that a run of half a minute takes seconds here.
LONG = {
    "a store that answers after 1 s",
    "a store that answers after 20 ms",
    "holds the lock",
    "holds the lock, and threads disturb each other",
    "many processors",
}


LONGEST = {"a store that answers after 20 ms", "holds the lock", "many processors"}


@pytest.mark.parametrize("noise", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONGEST else name for name in CODES]
)
def test_the_rate_comes_near_that_of_the_best_number_of_threads(name: str, noise: float) -> None:
    code = CODES[name]
    run = Run(ThreadCount(code.processors, 32), noise)
    settling = 400 * (code.waits + code.computes + code.locked) + 8

    run.go_on(code, settling)

    assert run.go_on(code, settling) >= 0.9 * code.best(32) / (1 + noise / 2) ** 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CODES]
)
def test_the_number_settles_whatever_the_noise(name: str) -> None:
    code = CODES[name]
    run = Run(ThreadCount(code.processors, 32), noise=0.3)
    settling = 3000.0 if code.waits == 1.0 else 35.0
    run.go_on(code, settling)
    run.moves.clear()

    run.go_on(code, settling)

    # Asked again once or twice in this time, as the pause doubles, with an answer of a few moves.
    assert len(run.moves) <= 6


def test_threads_are_added_within_two_seconds_where_samples_wait() -> None:
    run = Run(ThreadCount(2, 32))

    run.go_on(CODES["a store that answers after 20 ms"], 2.0)

    assert run.count.threads >= 16


def test_one_thread_is_kept_where_code_holds_the_lock_and_the_facts_say_why() -> None:
    run = Run(ThreadCount(2, 32))

    run.go_on(CODES["holds the lock"], 5.0)

    facts = run.count.facts
    assert facts.threads == 1
    assert facts.more is not None
    assert facts.more[0] == 2
    assert facts.more[1] == pytest.approx(1.0, abs=0.05)


def test_a_rate_that_rises_by_itself_at_the_beginning_is_no_reason_for_more_threads() -> None:
    run = Run(ThreadCount(2, 32))

    for slower in (64, 16, 4, 1):
        run.go_on(Code(locked=0.0001 * slower, crowding=2.0), 0.15)
        assert run.count.facts.threads <= 2
    run.go_on(Code(locked=0.0001, crowding=2.0), 5.0)

    assert run.count.threads == 1


def test_code_that_computes_in_parallel_is_never_asked_about() -> None:
    run = Run(ThreadCount(4, 32))
    tried = set()

    for _ in range(1000):
        run.go_on(Code(computes=0.003, processors=4), 0.01)
        tried.add(run.count.threads)

    assert tried == {4}


def test_the_number_follows_when_the_work_becomes_another() -> None:
    """The first epoch comes from a store, the second from memory, the third from the store again."""
    slow, fast = Code(waits=0.02, computes=0.002), Code(computes=0.002)
    run = Run(ThreadCount(2, 32))

    for code in (slow, fast, slow):
        run.go_on(code, 20.0)
        assert run.go_on(code, 5.0) >= 0.9 * code.best(32)


def test_what_the_training_or_the_store_limits_says_nothing_about_threads() -> None:
    run = Run(ThreadCount(2, 32))

    run.go_on(CODES["a store that answers after 20 ms"], 30.0, are_busy=False)

    assert run.count.threads == 2


def test_a_number_that_was_given_stays() -> None:
    run = Run(ThreadCount(3, 3, 3))

    for name in ("holds the lock", "a store that answers after 20 ms"):
        run.go_on(CODES[name], 4.0)

    assert run.moves == []
    assert run.count.threads == 3


def test_numbers_that_cannot_be_started_are_not_judged() -> None:
    run = Run(ThreadCount(4, 32))
    run.go_on(CODES["a store that answers after 20 ms"], 0.3)
    assert run.count.threads > 4 or run.count.facts.more is not None

    run.count.limit(3)
    run.go_on(CODES["a store that answers after 20 ms"], 3.0)

    assert run.count.threads <= 3
    assert run.count.facts.most == 3
    assert run.count.facts.threads == 3


def test_a_number_that_was_given_and_cannot_be_started_is_less() -> None:
    count = ThreadCount(8, 8, 8)

    count.limit(5)

    assert count.threads == count.facts.least == count.facts.most == 5


def test_of_samples_that_take_microseconds_fewer_threads_are_tried_before_more() -> None:
    """Files of 4 KB in the page cache: threads wait for each other's Python code alone."""
    run = Run(ThreadCount(4, 32))

    tried = set()
    for _ in range(100):
        run.go_on(Code(locked=30e-6, crowding=0.2), 0.01)
        tried.add(run.count.threads)

    assert run.count.facts.threads < 4
    assert max(tried) == 4


def test_readers_follow_what_a_store_rewards_between_their_ends() -> None:
    wanted = [8]
    count = FollowingCount(128, 1024, lambda: wanted[0])
    found = []
    for wanted[0] in (8, 128, 256, 512, 64, 4096):
        count.load_done(1, 0.2, 0.0, 0.0, True)
        found.append(count.threads)

    assert found == [128, 144, 288, 576, 128, 1024]
    assert (count.settled, count.facts.threads, count.facts.most) == (1024, 1024, 1024)
    count.limit(100)  # there can be no more threads
    assert (count.threads, count.facts.least) == (100, 100)
