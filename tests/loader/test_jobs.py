"""Jobs of a host that share what they keep: together they read what one does, and none needs another to go on."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tests.interpreters import Interpreters
from tests.loader.sharing_data import SAMPLE_BYTES, Counted, expected, loader, write_files
from tests.patience import patient
from tests.ranks.in_memory import run

from penstock.errors import ConfigError
from penstock.flow.groups import GroupWork
from penstock.flow.recorder import Recorder
from penstock.flow.work import Request
from penstock.loader import Loader, LoaderConfig
from penstock.loader.fetching import SourceFetcher
from penstock.loader.jobs import JobsOfHost, content_of_host
from penstock.measure.explain import explain
from penstock.policy import Scheduler
from penstock.ranks import Ranks, alone
from penstock.store import FlatFolder
from penstock.trace import Kind, read_trace
from penstock.trace.schema import JOBS_MEMORY, NO_FLOW, NO_PEER, SOURCE

SAMPLES, EPOCHS, STEPS = 200, 3, 7
PROGRAM = """
    import json, sys
    from penstock.policy import Scheduler
    from penstock.ranks import alone
    from tests.loader.sharing_data import Counted, expected, loader
    Scheduler.waited = lambda *_: []  # a read that is late is made twice
    source = Counted(200)
    source.fingerprint = sys.argv[1]
    with loader(source, alone(), share="jobs", seed=5, readers=4) as load:
        for _ in range(3):
            for rows, ids in load:
                is_right = bool((rows == expected(ids)).all())
                print(json.dumps([ids.tolist(), is_right, int(source.reads.sum())]), flush=True)
                sys.stdin.readline()
"""


def ids_of(share: str | None, source: Counted, together: threading.Barrier | None = None) -> list[list[int]]:
    """Return the samples of all batches, whose bytes are right. together: where jobs end each step together."""
    found = []
    with loader(source, alone(), share=share, seed=5, readers=4) as load:
        for _ in range(EPOCHS):
            for rows, ids in load:
                assert (rows == expected(ids)).all()
                found.append(ids.tolist())
                if together is not None:
                    together.wait(patient(60))
    return found


@pytest.mark.parametrize("is_together", [True, False])
def test_four_jobs_read_the_store_as_often_as_one_and_have_the_batches_of_one(is_together: bool) -> None:
    jobs, name = 4, secrets.token_hex(8)
    sources = [Counted(SAMPLES) for _ in range(jobs)]
    for source in sources:
        source.fingerprint = name
    together = threading.Barrier(jobs) if is_together else None
    # A read that is late is made twice, by any job.
    with patch.object(Scheduler, "waited", lambda *_: []), ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda source: ids_of("jobs", source, together), sources))

    assert found == [ids_of(None, Counted(SAMPLES))] * jobs
    assert sum(source.reads.sum() for source in sources) == SAMPLES


def test_ranks_that_work_on_the_same_samples_read_each_once_for_all_of_their_host() -> None:
    """As under tensor parallelism: processes 0 and 1 are data-parallel rank 0, processes 2 and 3 rank 1."""
    processes, name = 4, secrets.token_hex(8)
    sources = [Counted(SAMPLES) for _ in range(processes)]
    for source in sources:
        source.fingerprint = name

    def part(ranks: Ranks, share: str = "jobs") -> list[list[int]]:
        place = {"rank": ranks.rank // 2, "world_size": 2}
        with loader(sources[ranks.rank], ranks, **place, share=share, seed=5, readers=2) as load:
            return [
                ids.tolist() for _ in range(EPOCHS) for rows, ids in load if (rows == expected(ids)).all()
            ]

    with patch.object(Scheduler, "waited", lambda *_: []):
        found = run(processes, part)

    assert found[0] == found[1]
    assert found[2] == found[3]
    whole = [[*one, *other] for one, other in zip(found[0], found[2], strict=True)]
    assert [sorted(batch) for batch in whole] == list(map(sorted, ids_of(None, Counted(SAMPLES))))
    assert sum(source.reads.sum() for source in sources) == SAMPLES
    for refused in run(processes, partial(part, share="host")):
        assert 'share by share="jobs"' in str(refused)


def test_jobs_that_are_killed_in_any_order_take_nothing_down_and_leave_nothing(
    interpreters: Interpreters,
) -> None:
    name, alone_ids = secrets.token_hex(8), ids_of(None, Counted(SAMPLES))
    running: list[tuple[subprocess.Popen[Any], int]] = []

    def start() -> None:
        process = interpreters.start(PROGRAM, name, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append((process, 0))

    def step(which: int, steps: int) -> int:
        """Let a job train; return how many samples it has read."""
        process, done = running[which]
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(done, done + steps):
            ids, is_right, reads = json.loads(process.stdout.readline())
            assert is_right
            assert ids == alone_ids[number]
            print(file=process.stdin, flush=True)
        running[which] = process, done + steps
        return int(reads)

    def end(which: int) -> None:
        process, _ = running.pop(which)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    start()
    # Its staging may be ahead.
    assert step(0, STEPS) >= SAMPLES
    start()
    step(1, 2)
    end(0)
    start()
    assert step(0, STEPS) == 0
    assert step(1, STEPS) == 0
    end(0)
    assert step(0, EPOCHS * STEPS - STEPS) == 0
    process, _ = running.pop()
    process.communicate()
    assert process.returncode == 0

    source = Counted(SAMPLES)
    source.fingerprint = name
    after = JobsOfHost(content_of_host(source), 1)
    assert after.is_first
    after.close()


def test_a_link_that_leads_elsewhere_by_now_is_other_data(tmp_path: Path) -> None:
    """Names and sizes are the same, and so is the path: "current" of a data set that is written anew."""
    for number in range(2):
        write_files(tmp_path / f"version {number}", number)
    current = tmp_path / "current"

    def first_rows() -> Any:
        return loader(FlatFolder(current, extensions=None), alone(), share="jobs", batch_size=4, epochs=1)

    current.symlink_to(tmp_path / "version 0")
    with first_rows() as before:
        assert all((rows == 0).all() for rows, _ in before)
        current.unlink()
        current.symlink_to(tmp_path / "version 1")
        with first_rows() as after:
            assert all((rows == 1).all() for rows, _ in after)


def test_what_another_job_has_read_is_counted_as_memory_that_jobs_share(tmp_path: Path) -> None:
    source, path = Counted(SAMPLES), tmp_path / "run.trace"
    source.fingerprint = secrets.token_hex(8)

    def taken(load: Loader) -> tuple[Counter[int], Counter[int]]:
        for _ in range(2):
            list(load)
        samples, nbytes = Counter[int](), Counter[int]()
        for each in load.metrics:
            samples.update(each.reads_by_place | each.hits_by_place)
            nbytes.update(each.bytes_by_place)
        return samples, nbytes

    def job(**options: Any) -> Loader:
        return loader(source, alone(), share="jobs", epochs=2, **options)

    with patch.object(Scheduler, "waited", lambda *_: []), job() as first, job(trace=path) as second:
        samples, nbytes = taken(first)
        assert samples == {SOURCE: SAMPLES, JOBS_MEMORY: SAMPLES}
        assert nbytes == {place: SAMPLE_BYTES * count for place, count in samples.items()}
        assert taken(second) == ({JOBS_MEMORY: 2 * SAMPLES}, {JOBS_MEMORY: 2 * SAMPLES * SAMPLE_BYTES})
    assert {each.place for each in explain(read_trace(path)).moments} <= {"memory shared with other jobs", ""}


def test_a_group_of_which_another_job_has_read_a_part_is_recorded_as_two() -> None:
    source = Counted(SAMPLES)
    source.fingerprint = secrets.token_hex(8)
    jobs = JobsOfHost(content_of_host(source), SAMPLES * SAMPLE_BYTES)
    recorder, fetcher = Recorder(100, 0), SourceFetcher(source, {}, jobs=jobs)
    work: Any = SimpleNamespace(epoch=1, step=2)
    groups = GroupWork(fetcher, work, recorder, lambda origin: (origin, NO_PEER), is_plan_told=False)
    with closing(fetcher):
        fetcher.fetch(Request(np.arange(8), lambda _: None))
        request = Request(np.arange(5, 15), lambda _: None, shared=[])
        found = groups.record_fetched(recorder.ring(1), (1.0, 2.0), request, fetcher.fetch(request), work)

    spans = recorder.drain()
    assert found == (NO_FLOW, False)
    fields = ["kind", "place", "sample", "samples", "bytes"]
    assert spans[fields].tolist() == [
        (Kind.HIT, JOBS_MEMORY, 5, 3, 3 * SAMPLE_BYTES),
        (Kind.READ, SOURCE, 8, 7, 7 * SAMPLE_BYTES),
    ]
    assert (spans["end"] - spans["start"]).tolist() == pytest.approx([0.0, 1.0])
    assert sorted(map(list, recorder.drain_ids().values())) == [[5, 6, 7], list(range(8, 15))]


def test_what_jobs_cannot_share_and_cannot_predict_is_refused() -> None:
    source = Counted(SAMPLES)
    for given in (
        {"keep": "3 crops"},
        {"keep": "auto"},
        {"local_disk": "/tmp/x"},
        {"policy": "staging"},
        {"decoders": 0},
    ):
        with pytest.raises(ConfigError, match='share is "jobs", which does not go with'):
            LoaderConfig(source, batch_size=2, epochs=1, share="jobs", **given)
    source.fingerprint = secrets.token_hex(8)
    with (
        Loader(source, batch_size=2, epochs=1, share="jobs", transforms=[lambda data: len(data)]) as load,
        pytest.raises(ConfigError, match='share is "jobs", and how far other jobs are is not known'),
    ):
        load.predict(step_seconds=1.0)
