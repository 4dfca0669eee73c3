"""A recorded run beside its prediction: a real one over a slow store, and records that cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.spans import spans_of

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.compare import compare, lay_over
from penstock.measure.from_trace import learn_machine
from penstock.measure.replay import AS_DECODED
from penstock.measure.slow_source import SlowSource
from penstock.plan import Explicit, Order
from penstock.store import ImageFolder
from penstock.trace import (
    NO_EPOCH,
    NO_PLACE,
    NO_STEP,
    SOURCE,
    Cause,
    Kind,
    Spans,
    Summary,
    Trace,
    TraceWriter,
    read_trace,
)

IMAGES = 24
OPEN_SECONDS = 2e-3
WIRE = 400e3  # 24 images of about 1.5 kB take about 0.1 s to cross it


def slow_machine() -> Machine:
    memory = Curve.flat(5e9)
    store = SharedStore(None, Curve.flat(WIRE), 2 * OPEN_SECONDS, threads=4)
    return Machine(
        store, (StorageClass("staging", 10**9, 2, memory), StorageClass("memory", 10**9, 2, memory))
    )


@pytest.fixture
def record(image_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    folder = image_folder(images=IMAGES)

    def run(
        epochs: int = 2,
        leave_after: int | None = None,
        shuffle: bool | Order = True,
        known: bool = True,
        first: tuple[int, int] = (0, 0),
        policy: str = "frequency",
    ) -> Path:
        with (
            SlowSource(ImageFolder(folder), OPEN_SECONDS, OPEN_SECONDS, WIRE) as source,
            Loader(
                source,
                batch_size=np.int64(5),  # type: ignore[arg-type]
                epochs=epochs,
                seed=3,
                shuffle=shuffle,
                transforms=(Resize(16), ToTensor()),
                memory="64 MiB",
                machine=slow_machine() if known else None,
                readers=4,
                decoders=2,
                policy=policy,
                trace=tmp_path / "run.trace",
                report=None,
            ) as loader,
        ):
            loader.start(*first)
            for _ in range(first[0], epochs):
                for count, _batch in enumerate(loader, 1):
                    if count == leave_after:
                        break
        return tmp_path / "run.trace"

    return run


def test_a_real_run_is_predicted_from_its_file_alone(record: Callable[..., Path]) -> None:
    comparison = compare(record())

    first, second = comparison.epochs
    sizes = comparison.measured.spans["bytes"][comparison.measured.spans["kind"] == Kind.READ]
    assert (first.measured.steps, first.predicted.steps) == (5, 5)
    assert first.predicted.reads_by_place == first.measured.reads_by_place == {SOURCE: IMAGES}
    assert second.predicted.reads_by_place == second.measured.reads_by_place == {}
    assert second.predicted.samples == second.measured.samples == IMAGES
    # The training's own time is taken from the record; the store can be no faster than its wire, on either side.
    for each in comparison.epochs:
        assert each.predicted.own_seconds == pytest.approx(each.measured.own_seconds)
    for trace in (comparison.predicted, comparison.measured):
        reads = trace.spans[trace.spans["kind"] == Kind.READ]
        assert reads["end"].max() - reads["start"].min() >= sizes.sum() / WIRE
    assert sum(predicted for predicted, _ in comparison.causes.values()) == pytest.approx(
        comparison.stall_seconds[0]
    )
    assert comparison.notes == ()


@pytest.mark.slow
def test_a_real_run_that_waits_for_its_wire_is_predicted_within_a_tenth(record: Callable[..., Path]) -> None:
    comparison = compare(record(epochs=6))

    predicted, measured = comparison.stall_seconds
    assert predicted == pytest.approx(measured, rel=0.1)


def test_an_epoch_that_was_left_early_counts_on_both_sides_as_far_as_it_went(
    record: Callable[..., Path],
) -> None:
    comparison = compare(record(leave_after=2))

    assert [each.measured.steps for each in comparison.epochs] == [2, 2]
    assert [each.predicted.steps for each in comparison.epochs] == [2, 2]
    assert any("4 of the 10 planned steps" in note for note in comparison.notes)


@pytest.mark.parametrize(("policy", "epoch", "expected"), [("frequency", 1, 24), ("staging", 2, 14)])
def test_a_run_that_began_in_the_middle_is_compared_from_there_on(
    record: Callable[..., Path], policy: str, epoch: int, expected: int
) -> None:
    """Step 2 of an epoch, which has 5: 14 samples, and all 24 in the next, if any, each read from the store once."""
    path = record(epochs=3, first=(epoch, 2), policy=policy)

    comparison = compare(path)

    assert read_trace(path).meta["first_step"] == [epoch, 2]
    # Without a tier to fill, ten samples were never read.
    assert [note[:23] for note in comparison.notes] == ["The sizes of 10 of 24 s"] * (policy == "staging")
    for trace in (comparison.predicted, comparison.measured):
        waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
        assert sorted(zip(waits["epoch"].tolist(), waits["step"].tolist(), strict=True)) == [
            *((epoch, step) for step in range(2, 5)),
            *((later, step) for later in range(epoch + 1, 3) for step in range(5)),
        ]
        reads = trace.spans["samples"][trace.spans["kind"] == Kind.READ].sum()
        assert reads == expected
    for each in comparison.epochs:
        assert each.predicted.own_seconds == pytest.approx(each.measured.own_seconds)


def test_a_run_from_the_middle_over_an_order_of_listed_ids_cannot_be_compared(
    record: Callable[..., Path],
) -> None:
    ids = np.random.default_rng(0).integers(0, IMAGES, (2, 20))

    with pytest.raises(ConfigError, match=r"can only be had from its spans, .* began in the middle"):
        compare(record(shuffle=Explicit(ids, IMAGES), first=(1, 0)))


def test_an_order_of_listed_ids_is_replayed_from_the_record(record: Callable[..., Path]) -> None:
    ids = np.random.default_rng(0).integers(0, IMAGES, (2, 20))

    comparison = compare(record(shuffle=Explicit(ids, IMAGES)))

    for each in comparison.epochs:
        assert (each.predicted.steps, each.predicted.samples) == (4, 20)
    reads = comparison.predicted.spans[comparison.predicted.spans["kind"] == Kind.READ]
    assert set(reads["sample"].tolist()) == set(ids.ravel().tolist())


def test_a_step_time_that_was_assumed_beforehand_replaces_the_recorded_one(
    record: Callable[..., Path],
) -> None:
    comparison = compare(record(), step_seconds=0.25)

    assert comparison.epochs[0].predicted.own_seconds == pytest.approx(5 * 0.25)


def test_of_a_run_without_a_machine_costs_are_learned_or_taken_from_one_that_is_given(
    record: Callable[..., Path], tmp_path: Path
) -> None:
    run = record(known=False)
    assert "The costs were learned from this run." in compare(run).notes
    (tmp_path / "machine.toml").write_text(slow_machine().to_toml())

    comparison = compare(run, machine=tmp_path / "machine.toml")

    assert comparison.epochs[0].predicted.reads_by_place == {SOURCE: IMAGES}
    assert comparison.epochs[1].predicted.reads_by_place == {}


def test_a_machine_that_does_not_say_how_fast_samples_are_decoded_decodes_as_the_run_did(
    record: Callable[..., Path],
) -> None:
    run = record()
    learned = learn_machine(run).machine
    assert learned.preprocess_bytes_per_second < np.inf
    silent = replace(learned, preprocess_bytes_per_second=np.inf)

    known, unknown = compare(run, machine=learned), compare(run, machine=silent)

    assert unknown.stall_seconds[0] == known.stall_seconds[0] > 0
    assert set(unknown.notes) - set(known.notes) == {f"{AS_DECODED.capitalize()}."}


def test_another_machine_predicts_another_run(record: Callable[..., Path]) -> None:
    run = record()
    faster = Machine(SharedStore(None, Curve.flat(10 * WIRE)), slow_machine().storage)

    def reading_seconds(machine: Machine | None) -> float:
        spans = compare(run, machine=machine).predicted.spans
        reads = spans[spans["kind"] == Kind.READ]
        return float(reads["end"].max() - reads["start"].min())

    # All batches fit, so that reading waits for no step, however slow those of the record were.
    assert reading_seconds(faster) < 0.5 * reading_seconds(None)


def test_a_run_over_a_data_set_of_ones_own_cannot_be_predicted(tmp_path: Path) -> None:
    class Numbers:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    with Loader(Numbers(), batch_size=2, epochs=1, trace=tmp_path / "own.trace", report=None) as loader:
        for _ in loader:
            pass

    with pytest.raises(ConfigError, match="its own code alone"):
        compare(tmp_path / "own.trace")


WAIT = (0.0, 1.0, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0)


@for_each(
    ("spans", "meta", "said"),
    [
        ([], {}, "no batch was consumed"),
        ([(0.0, 1.0, -1, 0, 0, NO_STEP, Kind.WAIT, NO_PLACE, 0, 0)], {}, "no batch was consumed"),
        ([WAIT], {}, "does not say what was run"),
        ([WAIT], {"plan": {}, "rank": None}, "rank = None"),
    ],
)
def test_a_record_that_does_not_say_enough_is_told_so(
    tmp_path: Path, spans: list[tuple[float, ...]], meta: dict[str, None], said: str
) -> None:
    with TraceWriter(tmp_path / "poor.trace", meta) as writer:
        writer.append(spans_of(spans))

    with pytest.raises(ConfigError, match=rf"poor\.trace: .*{said}"):
        compare(tmp_path / "poor.trace")


def test_a_header_that_was_tampered_with_is_an_error_of_ours(record: Callable[..., Path]) -> None:
    trace = read_trace(record(epochs=1))
    limits: Any = trace.meta["limits"]
    plan: Any = trace.meta["plan"]

    for field, value, said in (
        ("limits", {"slots": 3, "wheels": 4}, "limits = "),
        ("limits", {**limits, "decoders": None}, "limits = "),
        ("limits", {**limits, "decoders": 0}, "limits.decoders is 0"),
        ("limits", {**limits, "slots": 0}, "limits.slots is 0"),
        ("limits", {**limits, "slots": 10**12}, "limits.slots is 1000000000000; .* at most"),
        ("plan", {**plan, "epochs": 1_300_000}, "its plan has 31,200,000 reads, and at most 30,000,000 are"),
        ("plan", {"order": None}, "not one that this Penstock wrote"),
        ("rank", 7, "rank is 7"),
        ("machine", "ranks = 'one'", "source is missing"),
    ):
        with pytest.raises(ConfigError, match=said):
            lay_over(Trace(trace.spans, {**trace.meta, field: value}))  # type: ignore[dict-item]


def test_a_batch_that_the_plan_does_not_know_is_told(record: Callable[..., Path]) -> None:
    trace = read_trace(record(epochs=1))
    spans: Spans = trace.spans.copy()
    spans["step"][spans["kind"] == Kind.WAIT] = 77

    with pytest.raises(ConfigError, match=r"\(0, 77\).*header is of another run"):
        lay_over(Trace(spans, trace.meta))


def test_sizes_that_a_cut_off_record_does_not_tell_are_guessed_and_said(record: Callable[..., Path]) -> None:
    trace = read_trace(record(epochs=1))
    # By step, not by time: how far ahead a loader has read depends on the machine.
    early = trace.spans[trace.spans["step"] < 3]

    comparison = lay_over(Trace(early, trace.meta, is_complete=False))

    assert "not complete" in comparison.notes[0]
    assert any("sizes of" in note and "of 24 samples" in note for note in comparison.notes)
    assert comparison.causes[Cause.SOURCE_READ][0] > 0


def in_groups(trace: Trace, *, with_ids: bool) -> Trace:
    """The run as it would be recorded had each batch been read and loaded by one call."""
    spans = trace.spans
    rows = [spans[~np.isin(spans["kind"], (Kind.READ, Kind.HIT, Kind.DECODE))]]
    ids: dict[tuple[int, int], NDArray[np.int64]] = {}
    for step in range(5):
        flow = 1 + step
        for kind in (Kind.READ, Kind.DECODE):
            of_batch = spans[(spans["kind"] == kind) & (spans["step"] == step)]
            group = of_batch[:1].copy()
            group["start"], group["end"] = of_batch["start"].min(), of_batch["end"].max()
            ids[0, flow] = np.concatenate(
                [trace.ids.get((0, int(span["flow"])), span["sample"][None]) for span in of_batch]
            )
            group["bytes"], group["samples"], group["flow"] = of_batch["bytes"].sum(), ids[0, flow].size, flow
            rows.append(group)
    return replace(trace, spans=np.concatenate(rows), ids=ids if with_ids else {})


@pytest.mark.parametrize("shuffle", [True, Explicit(np.arange(IMAGES)[::-1], IMAGES)])
def test_a_run_of_groups_is_predicted_from_what_each_group_took(
    record: Callable[..., Path], shuffle: bool | Order
) -> None:
    trace = read_trace(record(epochs=1, shuffle=shuffle))
    alone, together = lay_over(trace), lay_over(in_groups(trace, with_ids=True))

    for comparison in (alone, together):
        assert [each.predicted.samples for each in comparison.epochs] == [IMAGES]
    read = [each.predicted.bytes_by_place[SOURCE] for each in alone.epochs + together.epochs]
    assert read[0] - IMAGES < read[1] <= read[0]  # a byte of each is lost in the mean
    assert together.notes == ("The sizes of 24 of 24 samples are means over those that were read with them.",)
    assert together.run_seconds[0] == pytest.approx(alone.run_seconds[0], rel=0.2)


def test_groups_of_which_nobody_knows_the_samples_have_the_mean_size_and_no_order_of_their_own(
    record: Callable[..., Path],
) -> None:
    trace = read_trace(record(epochs=1))
    mean = int(trace.spans["bytes"][trace.spans["kind"] == Kind.READ].mean())

    comparison = lay_over(in_groups(trace, with_ids=False))

    reads = comparison.predicted.spans[comparison.predicted.spans["kind"] == Kind.READ]
    assert set(reads["bytes"]) == {mean}
    assert any("sizes of 24 of 24 samples are not in the record" in note for note in comparison.notes)
    listed = read_trace(record(epochs=1, shuffle=Explicit(np.arange(IMAGES)[::-1], IMAGES)))
    with pytest.raises(ConfigError, match="loaded by one call, and the trace does not say which"):
        lay_over(in_groups(listed, with_ids=False))


def test_of_a_run_too_long_for_its_file_the_last_steps_are_compared(record: Callable[..., Path]) -> None:
    trace = read_trace(record())
    is_last = trace.spans["epoch"] == 1
    first, last = trace.epochs()
    long = replace(trace, spans=trace.spans[is_last], left_out=Summary(int((~is_last).sum()), (first,)))
    assert long.epochs() == [first, last]

    comparison = lay_over(long)

    (pair,) = comparison.epochs
    assert (pair.measured, pair.predicted.steps, pair.predicted.samples) == (last, 5, IMAGES)
    assert comparison.notes[0].startswith(
        "The run was too long to keep all of its spans: the last steps alone"
    )
    meta = {**trace.meta, "plan": {**trace.meta["plan"], "order": None}}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"first steps are not in it.*too long"):
        lay_over(replace(long, meta=meta))


def test_saves_and_a_restore_long_before_the_run_change_no_prediction(record: Callable[..., Path]) -> None:
    trace = read_trace(record(epochs=1))
    of_snapshots = spans_of(
        [
            (-50.0, -40.0, -1, 10**9, NO_EPOCH, 900, Kind.LOAD, 0, 9, 0),
            (0.0, 0.001, -1, 10**9, NO_EPOCH, 1000, Kind.SAVE, NO_PLACE, 9, 0),
            (0.001, 9.0, -1, 10**9, NO_EPOCH, 1000, Kind.DRAIN, 1, 9, 0),
        ]
    )

    plain = lay_over(trace)
    comparison = lay_over(Trace(np.concatenate([of_snapshots, trace.spans]), trace.meta))

    assert np.array_equal(comparison.predicted.spans, plain.predicted.spans)
    assert comparison.causes == plain.causes
