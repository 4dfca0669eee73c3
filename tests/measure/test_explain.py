"""Planted faults are the first reasons named, and the reasons add up to what was lost."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.for_each import for_each
from tests.spans import spans_of

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Machine
from penstock.measure.calibrate import calibrate
from penstock.measure.charts import Section
from penstock.measure.explain import Reason, explain
from penstock.measure.from_trace import learn
from penstock.measure.outlook import look_ahead
from penstock.measure.recorded import Part, Run, open_run, read_run
from penstock.measure.replay import NO_CHANGE, Change, replay_of
from penstock.measure.report import report_of
from penstock.measure.slow_source import SlowSource
from penstock.store import ImageFolder
from penstock.trace import (
    JSON,
    NO_PLACE,
    NO_STEP,
    SOURCE,
    SPAN,
    Kind,
    Trace,
    TraceWriter,
    epoch_metrics,
    read_trace,
)
from penstock.trace.schema import JOBS_MEMORY

Row = tuple[Any, ...]


def steps_of(
    stalls: list[float],
    kind: Kind = Kind.READ,
    place: int = SOURCE,
    rank: int = 0,
    peer: int = -1,
    epoch: int = 0,
) -> list[Row]:
    """Steps of a second; before each the rank waits for one read of sample = step, then decodes in no time."""
    rows: list[Row] = []
    now = 0.0
    for step, stall in enumerate(stalls):
        ready = now + stall
        rows += [
            (now, ready, step, 10, epoch, step, kind, place, 1, rank, 1, peer, 1 + step),
            (ready, ready, step, 0, epoch, step, Kind.DECODE, NO_PLACE, 2, rank, 1, -1, 1 + step),
            (now, ready, -1, 0, epoch, step, Kind.WAIT, NO_PLACE, 0, rank),
            (ready, ready + 1, -1, 0, epoch, step, Kind.STEP, NO_PLACE, 0, rank),
        ]
        now = ready + 1
    return rows


def beside(kind: Kind, begin: float, end: float, place: int = 0) -> Row:
    return (begin, end, -1, 10, -1, 7, kind, place, 9, 0, 0)


def held_up_by_lock() -> list[Row]:
    asks = [(0.1 * n, 0.1 * n + 0.01, -1, 0, 0, 0, Kind.LOCK, NO_PLACE, 2, 0, 0) for n in range(40)]
    return [
        *asks,
        (0.0, 0.0, 0, 10, 0, 0, Kind.HIT, 1, 2, 0),
        (0.0, 4.0, 0, 0, 0, 0, Kind.DECODE, NO_PLACE, 2, 0),
        (0.0, 4.0, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0),
    ]


FAULTS: dict[str, tuple[Reason, list[Row]]] = {
    "three of sixty reads take two seconds": (
        Reason.SLOW_READS,
        steps_of([2.0 if step in (10, 30, 50) else 0.05 for step in range(60)]),
    ),
    "a reader is at a slow sample of the batch, and the last one is queued behind it": (
        Reason.SLOW_READS,
        [
            *steps_of([0.01] * 60),
            *((100.0 + 2.0 * n, 102.0 + 0.01 * n, 90 + n, 9, 0, 70, Kind.READ, SOURCE, 1, 0) for n in (0, 1)),
            (102.0, 102.01, 91, 0, 0, 70, Kind.DECODE, NO_PLACE, 2, 0),
            (100.0, 102.01, -1, 0, 0, 70, Kind.WAIT, NO_PLACE, 0, 0),
        ],
    ),
    "all reads are alike": (Reason.SOURCE_READ, steps_of([0.5] * 20)),
    "the next epoch has the samples in its tier": (
        Reason.COLD_TIER,
        [*steps_of([0.5] * 9), *((100.0, 100.0, n, 9, 1, 0, Kind.HIT, 1, 2, 0) for n in range(9))],
    ),
    "a local disk answers slowly": (Reason.TIER_READ, steps_of([0.5] * 9, Kind.HIT, place=2)),
    "another rank answers slowly": (Reason.PEER_READ, steps_of([0.5] * 9, Kind.HIT, place=1, peer=3)),
    "another job reads the same samples": (
        Reason.JOBS_READ,
        steps_of([0.5] * 9, Kind.HIT, place=JOBS_MEMORY),
    ),
    "workers are kept from the interpreter's lock": (Reason.LOCK, held_up_by_lock()),
    "a call of another thread holds the interpreter's lock, first before a worker begins, then in the wait": (
        Reason.LOCK,
        [
            (0.0, 1.0, -1, 0, 0, 0, Kind.LOCK, NO_PLACE, 2, 0, 0),
            (1.2, 1.9, 0, 0, 0, 0, Kind.DECODE, NO_PLACE, 2, 0),
            (1.1, 1.9, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0),
            (3.0, 6.9, -1, 0, 0, 1, Kind.LOCK, NO_PLACE, 0, 0, 0),
            (2.9, 7.0, 1, 10, 0, 1, Kind.READ, SOURCE, 1, 0),
            (7.0, 7.0, 1, 0, 0, 1, Kind.DECODE, NO_PLACE, 2, 0),
            (2.9, 7.0, -1, 0, 0, 1, Kind.WAIT, NO_PLACE, 0, 0),
        ],
    ),
    "the first batch has to be asked for before anything works": (
        Reason.START,
        [
            (4.0, 4.0, -1, 0, 0, 0, Kind.SLOT, NO_PLACE, 1, 0, 0),
            (4.0, 4.1, 0, 10, 0, 0, Kind.READ, SOURCE, 1, 0),
            (4.1, 4.2, 0, 0, 0, 0, Kind.DECODE, NO_PLACE, 2, 0),
            (0.0, 4.2, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0),
            (5.0, 5.5, -1, 0, 0, 1, Kind.DECODE, NO_PLACE, 2, 0),
            (5.0, 6.0, -1, 0, 0, 1, Kind.WAIT, NO_PLACE, 0, 0),
        ],
    ),
    "slots are granted late": (
        Reason.NO_FREE_SLOT,
        [
            (0.0, 3.0, -1, 0, 0, 0, Kind.SLOT, NO_PLACE, 1, 0, 0),
            (3.0, 3.1, 0, 10, 0, 0, Kind.READ, SOURCE, 1, 0),
            (3.1, 3.2, 0, 0, 0, 0, Kind.DECODE, NO_PLACE, 2, 0),
            (0.0, 3.2, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0),
        ],
    ),
    "reads are four times as slow while a snapshot is drained": (
        Reason.SNAPSHOT,
        [*steps_of([0.1] * 9 + [0.4] * 9), beside(Kind.DRAIN, 9.9, 40.0)],
    ),
    "a drain is capped, so that a snapshot goes straight to the slow tier and the next save waits for it": (
        Reason.FULL_BUFFER,
        [
            *steps_of([0.01] * 40),
            beside(Kind.SAVE, 1.0, 1.1),
            beside(Kind.DRAIN, 1.1, 30.0),
            beside(Kind.WRITE, 10.0, 30.0, place=1),
            beside(Kind.SAVE, 11.0, 30.1),
        ],
    ),
    "one rank of four is slow": (
        Reason.SLOW_RANK,
        [row for rank in range(4) for row in steps_of([0.5 if rank == 2 else 0.02] * 9, rank=rank)],
    ),
}


@for_each("fault", FAULTS)
def test_a_planted_fault_is_the_first_reason_named(fault: str) -> None:
    reason, rows = FAULTS[fault]
    trace = Trace(spans_of(rows))

    found = explain(trace)

    assert found.first == reason
    assert found.moments[0].reason == reason
    assert sum(found.by_reason.values()) == pytest.approx(found.lost_seconds)
    if reason != Reason.SLOW_RANK:
        assert found.stall_seconds == pytest.approx(
            sum(each.stall_seconds for each in epoch_metrics(trace.spans))
        )
    else:
        assert found.slow_rank == 2
        assert found.stall_seconds == pytest.approx(9 * 0.5)


@for_each("fault", FAULTS)
def test_a_file_that_is_read_piece_by_piece_is_explained_as_the_trace_in_memory(
    fault: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Threads write in turns: some spans come several pieces after others that ended later."""
    spans = spans_of(FAULTS[fault][1])
    spans = spans[np.argsort(spans["end"], kind="stable")]
    places = np.arange(spans.size) + np.random.default_rng(0).integers(0, 9, spans.size)
    spans = spans[np.argsort(places, kind="stable")]
    ids = {(0, flow): np.array([flow - 1]) for flow in spans["flow"].tolist() if flow}
    path = tmp_path_factory.mktemp("run") / "run.trace"
    with TraceWriter(path, {"limits": {"readers": 1}}) as writer:
        for first in range(0, spans.size, 3):
            writer.append(spans[first : first + 3], ids=ids if not first else {})

    whole, by_piece = explain(read_trace(path)), explain(open_run(path))

    assert by_piece.by_reason == pytest.approx(whole.by_reason)
    assert (by_piece.batches, by_piece.slow_rank) == (whole.batches, whole.slow_rank)
    assert by_piece.run_seconds == pytest.approx(whole.run_seconds)
    of = [(each.when, each.rank, each.reason, each.samples) for each in by_piece.moments]
    assert of == [(each.when, each.rank, each.reason, each.samples) for each in whole.moments]


def test_a_long_run_is_explained_in_twice_the_memory_of_the_largest_chunk(tmp_path: Path) -> None:
    path, chunk_bytes = tmp_path / "run.trace", 65_536 * SPAN.itemsize
    rows = spans_of(steps_of([0.5] * 1024))
    with TraceWriter(path, {}) as writer:
        for number in range(100):
            rows["epoch"] = number
            writer.append(rows)
            rows["start"] += 2000.0
            rows["end"] += 2000.0
    assert path.stat().st_size > 6 * chunk_bytes
    tracemalloc.start()
    try:
        found = explain(open_run(path))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found.by_reason[Reason.SOURCE_READ] == pytest.approx(100 * 1024 * 0.5)
    assert most < 2 * chunk_bytes


@for_each(("readers", "late_seconds"), [(10, 1.7), (2, 0.5), (1, 0.0), (0, 0.0), (None, 0.0)])
def test_reads_that_began_late_for_want_of_a_slot_count_as_that_as_far_as_readers_were_idle(
    readers: int | None, late_seconds: float
) -> None:
    """Step 1 wants a slot for 2 s. Meanwhile one reader works for 2 s, another for 1 s; then its own read takes 4 s."""
    rows = [
        (0.0, 2.0, 0, 10, 0, 0, Kind.READ, SOURCE, 1, 0),
        (1.0, 5.0, 7, 10, 0, 9, Kind.READ, SOURCE, 2, 0),
        (0.0, 2.0, -1, 0, 0, 1, Kind.SLOT, NO_PLACE, 1, 0, 0),
        (2.0, 6.0, 1, 10, 0, 1, Kind.READ, SOURCE, 1, 0),
        (6.0, 6.0, 1, 0, 0, 1, Kind.DECODE, NO_PLACE, 3, 0),
        (2.0, 6.0, -1, 0, 0, 1, Kind.WAIT, NO_PLACE, 0, 0),
    ]

    found = explain(Trace(spans_of(rows), {} if readers is None else {"limits": {"readers": readers}}))

    assert found.by_reason[Reason.NO_FREE_SLOT] == pytest.approx(late_seconds)
    assert found.by_reason[Reason.SOURCE_READ] == pytest.approx(4.0 - late_seconds)


def test_moments_lead_down_to_the_sample_that_came_last() -> None:
    _, rows = FAULTS["three of sixty reads take two seconds"]
    trace = Trace(spans_of(rows), names={10: "photos/\n\x1b[2Jten.jpg"})

    found = explain(trace, describe="the {}th".format, moments=3)

    assert [(each.step, each.samples, each.place) for each in found.moments] == [
        (step, (step,), "the source") for step in (10, 30, 50)
    ]
    assert [each.names for each in found.moments] == [
        ("photos/\n\x1b[2Jten.jpg",),
        ("the 30th",),
        ("the 50th",),
    ]
    assert found.moments[0].read_seconds == pytest.approx(2.0)
    assert found.batches[Reason.SLOW_READS] == 3


def test_of_a_data_set_reading_and_decoding_are_its_own_code() -> None:
    trace = Trace(spans_of(steps_of([0.5] * 9)), {"reads": "data set"})
    earlier = replace(trace.left_out, spans=9, epochs=tuple(epoch_metrics(trace.spans)))

    assert explain(trace).by_reason[Reason.DATA_SET] == pytest.approx(4.5)
    assert explain(replace(trace, left_out=earlier)).by_reason[Reason.DATA_SET] == pytest.approx(9.0)


def test_a_group_is_named_by_the_samples_in_it() -> None:
    rows = [(*row[:10], 9, -1, 77) if row[6] in (Kind.READ, Kind.DECODE) else row for row in steps_of([1.0])]

    (moment,) = explain(Trace(spans_of(rows), ids={(0, 77): np.arange(100, 109)})).moments

    assert (moment.samples, moment.group) == ((100, 101, 102, 103), 9)


def test_a_moment_says_whether_it_was_a_step_a_save_or_a_wait_without_a_batch() -> None:
    in_vain = (9.0, 12.0, -1, 0, 0, NO_STEP, Kind.WAIT, NO_PLACE, 0, 0)
    rows = [*steps_of([1.0]), in_vain, beside(Kind.SAVE, 5.0, 7.0)]

    found = explain(Trace(spans_of(rows))).moments

    assert [each.when for each in found] == ["epoch 0, no batch", "save at step 7", "epoch 0, step 0"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_a_long_run_left_out_is_in_the_sums(ranks: int) -> None:
    """Ranks wait at once: the job lost what one of them did. A disk of each lost two samples in each epoch."""

    def steps(epoch: int, stall: float, rank: int) -> list[Row]:
        lost: Row = (0.0, 0.1, -1, 0, epoch, 0, Kind.RETRY, 2, 1, rank, 2)
        return [*steps_of([stall] * 4, epoch=epoch, rank=rank), lost]

    spans = spans_of(row for rank in range(ranks) for row in steps(0, 0.5, rank) + steps(1, 0.25, rank))
    later = spans["epoch"] == 1
    whole = Trace(spans)
    cut = Trace(
        spans[later], left_out=replace(whole.left_out, spans=16, epochs=tuple(epoch_metrics(spans[~later])))
    )

    found, expected = explain(cut), explain(whole)

    assert found.stall_seconds == pytest.approx(expected.stall_seconds) == pytest.approx(3.0)
    assert found.run_seconds == pytest.approx(expected.run_seconds)
    assert found.by_reason[Reason.SOURCE_READ] == pytest.approx(expected.by_reason[Reason.SOURCE_READ])
    assert found.notes[-1] == expected.notes[-1]
    assert found.notes[-1].startswith(f"{4 * ranks} samples could not be had from the tier")


def test_a_folder_is_the_traces_of_its_ranks_on_one_clock(tmp_path: Path) -> None:
    for rank in (0, 1):
        meta = {"rank": rank, "started": f"2026-01-01T00:00:0{rank}+00:00"}
        with TraceWriter(tmp_path / f"{rank}.trace", meta) as writer:
            writer.append(spans_of(steps_of([0.5], rank=rank)))

    trace = read_run(tmp_path)

    waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
    assert dict(zip(waits["rank"].tolist(), waits["start"].tolist(), strict=True)) == {0: 0.0, 1: 1.0}
    with TraceWriter(tmp_path / "validation.trace", {"rank": 1}) as writer:
        writer.append(spans_of(steps_of([0.5], rank=1))[:1])
    with TraceWriter(tmp_path / "session.trace", {"graph": True}) as writer:  # which waited for the loader
        writer.append(spans_of(steps_of([0.5] * 9)))
    assert read_run(tmp_path).spans.size == trace.spans.size


def test_all_loaders_of_a_rank_count_and_their_epochs_are_numbered_on(tmp_path: Path) -> None:
    """Training, with a validation of 3 s within its second step, and the training's loader made anew."""
    loaders = {"train": (0, [2.0, 1.0]), "valid": (3, [0.5, 0.5]), "again": (8, [1.0, 4.0])}
    for name, (begun, stalls) in loaders.items():
        source = "valid" if name == "valid" else "train"
        meta: dict[str, JSON] = {"rank": 0, "source": source, "started": f"2026-01-01T00:00:0{begun}+00:00"}
        spans = spans_of(steps_of(stalls))
        if name == "train":
            spans["end"][(spans["kind"] == Kind.STEP) & (spans["step"] == 1)] += 3.0
        with TraceWriter(tmp_path / f"{name}.trace", meta) as writer:
            writer.append(spans, ids={(0, 2): np.array([1, len(name)])})
            writer.name({1: f"{name} 1"})
    with TraceWriter(tmp_path / "unused.trace", {"rank": 0}) as writer:
        writer.append(spans_of(steps_of([9.0]))[:1])

    run = open_run(tmp_path)
    trace, found = run.trace(), explain(run, moments=6)

    assert [(each.epoch, each.steps, each.stall_seconds) for each in trace.epochs()] == [
        (0, 2, 3.0),
        (1, 2, 1.0),
        (2, 2, 5.0),
    ]
    assert np.unique(trace.spans["flow"]).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert {key: ids.tolist() for key, ids in trace.ids.items()} == {
        (0, 2): [1, 5],
        (0, 4): [1, 5],
        (0, 6): [1, 5],
    }
    assert (found.stall_seconds, found.run_seconds) == (9.0, 15.0)
    of_step = {each.epoch: each.names for each in found.moments if each.step == 1}
    assert of_step == {epoch: (f"{name} 1", "sample 5") for epoch, name in enumerate(loaders)}
    assert "0 of train.trace, 1 of valid.trace, 2 of again.trace" in found.notes[-1]
    assert trace.names == {}  # of which loader's sample 1 would it be
    assert [[part.name for part in loaders] for loaders in run.of_ranks()] == [
        [f"{name}.trace" for name in loaders]
    ]
    with pytest.raises(ConfigError, match=r"its header does not say what was run.*each of its 3 loaders"):
        look_ahead(run, [("memory", Change(memory_bytes=1 << 20))], found)


def test_processes_that_do_not_know_their_ranks_are_told_apart_where_they_ran_at_once(tmp_path: Path) -> None:
    """Two at once, one of them with a snapshot store; one after the first had ended; one that knows its rank."""

    def write(name: str, process: int, begun: int, rank: int = 0, **more: JSON) -> None:
        started = f"2026-01-01T00:00:0{begun}+00:00"
        meta: dict[str, JSON] = {"rank": rank, "started": started, "host": "a", "process": process, **more}
        with TraceWriter(tmp_path / f"{name}.trace", meta) as writer:
            writer.append(spans_of(steps_of([0.5], rank=rank)), ids={(rank, 1): np.array([process])})
            writer.name(hosts={rank: "a"}, choices={rank: name})

    write("early", 11, 0)
    write("beside", 12, 1)
    write("later", 13, 2)
    write("known", 14, 0, rank=1)
    write("store", 12, 1, snapshots=True)

    run = open_run(tmp_path)
    trace = run.trace()

    assert [(part.name, part.rank) for part in run.parts] == [
        ("early.trace", 0),
        ("later.trace", 0),
        ("known.trace", 1),
        ("beside.trace", 2),
        ("store.trace", 2),
    ]
    waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
    assert sorted(waits[["rank", "start"]].tolist()) == [(0, 0.0), (0, 2.0), (1, 0.0), (2, 1.0), (2, 1.0)]
    assert {key: ids.tolist() for key, ids in trace.ids.items()} == {
        (0, 1): [11],
        (0, 2): [13],
        (1, 1): [14],
        (2, 1): [12],
    }
    assert trace.choices == {0: "later", 1: "known", 2: "store"}
    assert "2 processes recorded at once as rank 0" in run.notes[0]
    assert "rank 0 process 11 of a, 2 process 12 of a. To have" in run.notes[0]
    # One of them, and one that began first, know theirs when they make another loader.
    write("first", 15, 0)
    write("first knows", 15, 9, rank=3)
    write("beside knows", 12, 9, rank=4)
    run = open_run(tmp_path)
    assert {part.name: part.rank for part in run.parts if part.rank != 1} == {
        "early.trace": 0,
        "later.trace": 0,
        "first.trace": 3,
        "first knows.trace": 3,
        "beside.trace": 4,
        "beside knows.trace": 4,
        "store.trace": 4,
    }
    assert run.notes[0].endswith("knew later: rank 4 process 12 of a, 3 process 15 of a")


def test_a_run_in_which_nobody_waited_is_refused() -> None:
    with pytest.raises(ConfigError, match="nobody asked for a batch"):
        explain(Trace(spans_of([(0.0, 1.0, 0, 10, 0, 0, Kind.READ, SOURCE, 1, 0)])))


class Delayed:
    """Passes a source on; three samples come late."""

    def __init__(self, source: Any, seconds: float) -> None:
        self._source, self._seconds = source, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def read_into(self, sample: int, buffer: memoryview) -> int:
        if sample in (3, 11, 23):
            time.sleep(self._seconds)
        return int(self._source.read_into(sample, buffer))


@pytest.mark.slow
def test_three_delayed_files_of_a_real_run_are_named_and_the_reasons_add_up(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = image_folder(images=100)
    outside = 0.0
    with (
        SlowSource(ImageFolder(folder), 1e-3, 1e-3, 10e6) as source,
        Loader(
            cast(Any, Delayed(source, 2.0)),
            batch_size=4,
            epochs=2,
            transforms=(Resize(16), ToTensor()),
            memory="64 MiB",
            readers=1,
            decoders=1,
            trace=tmp_path / "run.trace",
            report=None,
        ) as loader,
    ):
        loader.start()
        for _ in range(2):
            epoch = iter(loader)
            while True:
                begin = time.perf_counter()
                batch = next(epoch, None)
                outside += time.perf_counter() - begin
                if batch is None:
                    break

    found = explain(read_trace(tmp_path / "run.trace"))

    assert found.first == Reason.SLOW_READS
    assert {each.samples for each in found.moments[:3]} == {(3,), (11,), (23,)}
    assert {Path(each.names[0]).is_file() for each in found.moments[:3]} == {True}
    assert sum(found.by_reason.values()) == pytest.approx(outside, rel=0.05)


def test_loaders_of_a_rank_are_replayed_each_by_itself_and_their_stalls_added(
    image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training, made anew in its second epoch, a validation, and a data set, which nobody can price."""
    (tmp_path / "run").mkdir()
    folder, other = image_folder(images=32), image_folder(images=4, name="validation")
    sources: list[Any] = [folder, other, folder, [np.zeros(4)] * 8]
    for number, source in enumerate(sources):
        # Of few reads, costs can be learned where they are not spread over many readers.
        of_pictures: dict[str, Any] = {"transforms": (Resize(16), ToTensor()), "readers": 1}
        how = {} if isinstance(source, list) else of_pictures
        with Loader(
            source,
            batch_size=4,
            epochs=1,
            memory="16 MiB",
            trace=tmp_path / "run" / f"{number}.trace",
            report=None,
            **how,
        ) as loader:
            for _batch in loader:
                pass
    changes = [("readers", Change(readers=2)), ("memory", Change(memory_bytes=8 << 20))]

    def validation_waits_longest(part: Part) -> Part:
        """It is looked at first, when nothing is known of costs yet."""
        wait = spans_of([(0.0, 1e3, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0)])
        return replace(part, spans=lambda: [wait]) if part.name == "1.trace" else part

    run = open_run(tmp_path / "run")
    found = explain(run)
    traces = [read_trace(tmp_path / "run" / f"{number}.trace") for number in range(4)]

    outlook = look_ahead(replace(run, parts=tuple(map(validation_waits_longest, run.parts))), changes, found)

    alone = [look_ahead(traces[number], changes, found) for number in (0, 2)]
    with pytest.raises(ConfigError, match="too few reads of its source to learn from"):
        look_ahead(traces[1], changes, found)
    longest = max(traces[0], traces[2], key=lambda each: sum(epoch.stall_seconds for epoch in each.epochs()))
    short = replay_of(traces[1]).on(learn(longest).machine)
    rest = sum(each.stall_seconds for each in traces[3].epochs())
    for name, change in [*changes, ("", NO_CHANGE)]:
        stalls = [rest, sum(each.stall_seconds for each in short.predict(change).epochs())]
        for each in alone:
            of_changes = {own.what: own.stall_seconds for own in each.prospects}
            stalls.append(of_changes.get(name, each.replayed_seconds))
        of_changes = {each.what: each.stall_seconds for each in outlook.prospects}
        assert of_changes.get(name, outlook.replayed_seconds) == pytest.approx(sum(stalls))
    assert outlook.measured_seconds == pytest.approx(found.stall_seconds, abs=1e-3)
    said = " ".join(outlook.notes)
    assert "1.trace read too little to learn its costs from: those of another loader stand for them" in said
    assert "3.trace is not replayed and counts as it was: what a sample of a data set costs" in said
    assert "each of 4 loaders was replayed by itself and a change made to each" in said
    with pytest.raises(ConfigError, match=r"\.trace: .*or give penstock explain another"):
        look_ahead(run, [("none", Change(memory_bytes=1))], found)
    section = _prediction_of(run)
    assert [row[0] for row in section.rows] == ["epoch 0", "epoch 2"]
    assert "1.trace is not predicted: it has too few reads" in section.note
    assert "3.trace is not predicted" in section.note
    monkeypatch.setattr("penstock.measure.replay.MOST_READS_OF_RANK", 1)
    few = " ".join((*look_ahead(run, changes, found).notes, _prediction_of(run).note))
    assert few.count("reads of its rank's loaders are predicted and no more") == 2


#: A source that gives a megabyte in a second, so that its costs are known whatever was measured.
MACHINE = """
preprocess = "1 GB/s"
[source]
clients = "1 MB/s"
threads = 4
[[storage]]
name = "staging"
capacity = "1 GB"
threads = 1
read = "16 GB/s"
"""


def test_what_is_suggested_for_a_loader_takes_nothing_from_another(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Training with little memory, which is suggested to grow; a validation, whose batches need far more."""
    folder, run = image_folder(images=32), tmp_path / "run"
    run.mkdir()
    for name, memory, side, batch_size in (("train", "100 KiB", 16, 4), ("validation", "16 MiB", 64, 8)):
        with Loader(
            folder,
            batch_size=batch_size,
            epochs=2,
            memory=memory,
            transforms=(Resize(side), ToTensor()),
            machine=Machine.from_toml(MACHINE),
            trace=run / f"{name}.trace",
            report=None,
        ) as loader:
            for _ in range(2):
                for _batch in loader:
                    pass

    def training_waits_longest(part: Part) -> Part:
        wait = spans_of([(0.0, 1e3, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0)])
        return replace(part, spans=lambda: [wait]) if part.name == "train.trace" else part

    both = open_run(run)
    explained = explain(both)
    explained = replace(explained, by_reason={Reason.SOURCE_READ: explained.lost_seconds})

    outlook = look_ahead(replace(both, parts=tuple(map(training_waits_longest, both.parts))), None, explained)

    alone = look_ahead(read_trace(run / "train.trace"), None, explained)
    rest = look_ahead(read_trace(run / "validation.trace"), [], explained).replayed_seconds
    assert [each.what for each in outlook.prospects] == [each.what for each in alone.prospects]
    of_memory = [
        (each.stall_seconds, of_training.stall_seconds)
        for each, of_training in zip(outlook.prospects, alone.prospects, strict=True)
        if each.change.memory_bytes is not None
    ]
    assert len(of_memory) > 0
    assert [each for each, _ in of_memory] == pytest.approx([training + rest for _, training in of_memory])
    with pytest.raises(ConfigError, match=r"validation\.trace: "):
        look_ahead(both, [(each.what, each.change) for each in alone.prospects], explained)


def _prediction_of(run: Run) -> Section:
    """Return the part of a report that lays a run over its prediction."""
    (found,) = (each for each in report_of(run).sections if each.title.startswith("Stall so far"))
    return found


#: A wire of 300 kB/s limits the run, or the latency of a read.
WIRE, LATENCY, FAST = (1e-3, 300e3), (20e-3, 1e9), (1e-3, 1e9)
#: What is changed: how the loader is made before and after, the store before and after, and the change.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[float, float], tuple[float, float]]] = {
    "memory": ({"memory": "100 KiB"}, {"memory": "16 MiB"}, WIRE, WIRE),
    "readers": ({"readers": 1}, {"readers": 4}, LATENCY, LATENCY),
    "machine": ({}, {}, LATENCY, FAST),
    "readers of two loaders": ({"readers": 1}, {"readers": 4}, LATENCY, LATENCY),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", list(CHANGES))
def test_what_a_change_is_predicted_to_bring_it_brings(
    what: str, image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Memory for three batches, then for all samples; one reader, then four; a slow store, then a quick one.

    A loader is made once, or anew for each of two epochs.
    """
    folder = image_folder(images=120)
    *how, slow, other = CHANGES[what]
    explained, machines = [], []
    loaders, changed = (2, "readers") if what == "readers of two loaders" else (1, what)
    for number, (given, (latency, rate)) in enumerate(zip(how, (slow, other), strict=True)):
        run = tmp_path / str(number)
        run.mkdir()
        with SlowSource(ImageFolder(folder), 0.0, latency, rate) as source:
            machines.append(None if what == "memory" else calibrate(source, max_seconds=3.0))
            arguments = {"memory": "16 MiB", "readers": 4, "machine": machines[-1], **given}
            for each in range(loaders):
                with Loader(
                    source,
                    batch_size=4,
                    epochs=3 if what == "memory" else 1,
                    transforms=(Resize(16), ToTensor()),
                    decoders=1,
                    trace=run / f"{each}.trace",
                    report=None,
                    **arguments,
                ) as loader:
                    while loader.position[0] < (3 if what == "memory" else 1):
                        for _batch in loader:
                            time.sleep(1e-3)
        explained.append((open_run(run), explain(open_run(run))))
    (before, found), (_, after) = explained
    change = {
        "memory": Change(memory_bytes=16 << 20),
        "readers": Change(readers=4),
        "machine": Change(machine=machines[1]),
    }[changed]

    (prospect,) = look_ahead(before, [(what, change)], found).prospects

    assert after.stall_seconds < 0.6 * found.stall_seconds
    assert prospect.stall_seconds == pytest.approx(after.stall_seconds, rel=0.2, abs=0.5)
