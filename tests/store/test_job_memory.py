"""Memory that jobs of a host share: each sample is read once, and no job takes wrong bytes, whatever another does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.arena import Arena
from penstock.errors import ConfigError
from penstock.store import job_memory
from penstock.store.group import Bytes, Failed, Ids
from penstock.store.job_memory import JobMemory, new_arenas

SIZES = np.array([300, 0, 17, 1_000, 40, 999, 64, 2_000], np.int64)
ALL, TOTAL = np.arange(SIZES.size), int(SIZES.sum())


def content(sample: int) -> bytes:
    return np.random.default_rng(sample).bytes(int(SIZES[sample]))


class Source:
    """Counts what is read. before: called with each sample."""

    def __init__(self, before: Callable[[int], None] = lambda sample: None) -> None:
        self.reads: list[int] = []
        self._before = before

    def __call__(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        failed = Failed()
        for index, sample in enumerate(ids.tolist()):
            self.reads.append(sample)
            try:
                self._before(sample)
            except OSError as error:
                failed.append((index, error))
                continue
            into[begins[index] : begins[index] + SIZES[sample]] = np.frombuffer(content(sample), np.uint8)
        return failed


New = Callable[[], JobMemory]


@pytest.fixture(params=[TOTAL])
def jobs(request: pytest.FixtureRequest) -> Iterator[New]:
    """Makes the part of one job after the other in a memory. param: its bytes."""
    table, memory = new_arenas(request.param, SIZES)
    made: list[JobMemory] = []

    def new() -> JobMemory:
        arenas = [
            Arena.attach(os.open(f"/proc/self/fd/{each.descriptor}", os.O_RDWR)) for each in (table, memory)
        ]
        made.append(JobMemory(arenas[0], arenas[1], SIZES))
        return made[-1]

    yield new
    for job in made:
        job.close()
    table.close()
    memory.close()


def read(job: JobMemory, source: Source, ids: Ids = ALL) -> Failed:
    """Read samples, and compare those that did not fail."""
    begins = np.concatenate(([0], np.cumsum(SIZES[ids] + 3)))
    into = np.zeros(int(begins[-1]), np.uint8)
    failed = job.read_group(ids, into, begins, source)
    for index in sorted(set(range(ids.size)) - {index for index, _ in failed}):
        sample = int(ids[index])
        assert into[begins[index] : begins[index] + SIZES[sample]].tobytes() == content(sample)
    return failed


def test_a_sample_is_read_by_one_job_and_taken_by_the_others_also_when_the_first_has_left(jobs: New) -> None:
    first, second, source = jobs(), jobs(), Source()
    assert read(first, source, ALL[:5]) == []
    assert read(second, source) == []
    first.close()
    second.close()

    assert read(jobs(), source, ALL[::-1]) == []
    assert sorted(source.reads) == ALL.tolist()


def test_a_sample_that_another_job_reads_is_waited_for_and_read_here_if_that_one_fails(jobs: New) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def hold(sample: int) -> None:
        begun.set()
        assert goes_on.wait(30)
        if sample == 3:
            raise OSError("lost")

    slow, fast = Source(hold), Source(lambda sample: goes_on.set())
    with ThreadPoolExecutor() as pool:
        first = pool.submit(read, jobs(), slow, np.array([5, 3, 0]))
        assert begun.wait(30)
        # 7 is read at once, which lets the other go on; 5 and 0 come from there, and 3 does not.
        assert read(jobs(), fast, np.array([0, 7, 5, 3])) == []
        assert [index for index, _ in first.result()] == [1]

    assert slow.reads == [5, 3, 0]
    assert fast.reads == [7, 3]


def test_a_job_that_reads_for_too_long_is_not_waited_for(jobs: New, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_memory, "_PATIENCE_SECONDS", 0.01)
    begun, goes_on, other = threading.Event(), threading.Event(), Source()

    def hang(_: int) -> None:
        begun.set()
        assert goes_on.wait(30)

    with ThreadPoolExecutor() as pool:
        hanging = pool.submit(read, jobs(), Source(hang), np.array([4]))
        assert begun.wait(30)
        assert read(jobs(), other, np.array([4])) == []
        goes_on.set()
        assert hanging.result() == []

    assert other.reads == [4]


def test_damage_of_memory_or_table_is_found_and_costs_a_read(jobs: New) -> None:
    job, source = jobs(), Source()
    read(job, source)
    source.reads.clear()
    memory = job._memory
    memory[0] ^= 1  # sample 0 was read first
    job._rows[3, job_memory._BEGIN] += np.uint64(1)
    job._rows[5] = 0, 0, 2**63
    job._rows[6] = 2**63, 2**63, 2**63

    assert read(jobs(), source) == []
    assert source.reads == [0, 3, 5, 6]
    with pytest.raises(ConfigError, match="by another version of Penstock, or of other data"):
        JobMemory(*job._arenas, SIZES[:-1])


@pytest.mark.parametrize("jobs", [1_500, 3_500], indirect=True)
def test_samples_that_find_no_space_pass_and_jobs_at_any_pace_never_take_others_bytes(jobs: New) -> None:
    """What is passing is written over by others while it is read."""
    sources = [Source() for _ in range(4)]

    def train(number: int) -> None:
        job, order = jobs(), np.random.default_rng(number)
        for _ in range(60):
            assert read(job, sources[number], order.permutation(ALL)[: order.integers(1, 6)]) == []

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, range(4)))

    # What found its place first is kept: read once, but for a job that waited too long.
    counts = np.bincount(np.concatenate([source.reads for source in sources]), minlength=SIZES.size)
    assert (counts == 1).any()
    assert counts.max() > 10
