"""A run in virtual time: evident by hand where it is small, within its bounds where it is not."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle, Sequential
from penstock.policy import Extents, StagingLimits, decisions
from penstock.policy.forms import CROP_SHARE, READ_PIXELS_SHARE, WHOLE_SHARE, CropForm
from penstock.policy.loading import Job
from penstock.simulate import loading, predict
from penstock.trace import SOURCE, Cause, EpochMetrics, Kind, Spans, Trace

MEMORY = Curve(((1, 1e12),))
BIG = 10**12


def machine(
    *,
    read: Curve,
    latency: float = 0.0,
    preprocess: float = float("inf"),
    tier_bytes: int = 0,
    compute: Rate | None = None,
) -> Machine:
    storage = [StorageClass("staging", BIG, 1, MEMORY)]
    if tier_bytes:
        storage.append(StorageClass("memory", tier_bytes, 1, MEMORY))
    return Machine(
        SharedStore(None, read, latency),
        tuple(storage),
        preprocess_bytes_per_second=preprocess,
        compute=compute,
    )


def run(
    plan: AccessPlan, on: Machine, sizes: np.ndarray, limits: StagingLimits, step_seconds: float = 0.0
) -> Trace:
    return predict(Job(plan, sizes, on), limits=limits, step_seconds=step_seconds)


def costing(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Have Loads, batches and what is written or kept take so much of a processor that is shared, or nothing."""
    for module, name in (
        (decisions, "LOAD_COST_SECONDS"),
        (decisions, "BATCH_COST_SECONDS"),
        (loading, "_READ_BYTE_SECONDS"),
        (loading, "_WRITE_SECONDS"),
        (loading, "_WRITE_BYTE_SECONDS"),
        (loading, "_KEEP_SECONDS"),
        (loading, "_KEEP_BYTE_SECONDS"),
    ):
        monkeypatch.setattr(module, name, seconds.pop(name.strip("_").lower(), 0.0))
    assert not seconds, "none has that name"


def test_one_reader_reads_one_sample_after_the_other() -> None:
    """Four samples of 100 bytes at 100 bytes/s: batches of two are whole at 2 s and 4 s; a step takes 0.5 s."""
    plan = AccessPlan(Sequential(4), 2, 1)
    limits = StagingLimits(slots=4, readers=1, decoders=1, undecoded_bytes=BIG)

    trace = run(plan, machine(read=Curve(((1, 100.0),))), np.full(4, 100), limits, 0.5)

    waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
    steps = trace.spans[trace.spans["kind"] == Kind.STEP]
    assert waits["start"] == pytest.approx([0.0, 2.5])
    assert waits["end"] == pytest.approx([2.0, 4.0])
    assert steps["end"] == pytest.approx([2.5, 4.5])


def test_latencies_of_reads_in_flight_overlap_and_their_bytes_share_the_wire() -> None:
    """Eight reads at once: 1 s of latency for all of them, then 8 x 100 bytes over 200 bytes/s."""
    plan = AccessPlan(Sequential(8), 8, 1)
    limits = StagingLimits(slots=1, readers=8, decoders=1, undecoded_bytes=BIG)

    trace = run(plan, machine(read=Curve(((1, 200.0),)), latency=1.0), np.full(8, 100), limits)

    reads = trace.spans[trace.spans["kind"] == Kind.READ]
    # The first sample is the probe of a decode worker; it and the others overlap all the same.
    assert sorted(reads["end"]) == pytest.approx([1.0 + 0.5 * k for k in range(1, 9)])


def test_more_reads_in_flight_get_what_the_curve_says() -> None:
    """Two readers together get 300 bytes/s where one gets 100: six samples of 100 bytes."""
    plan = AccessPlan(Sequential(6), 6, 1)
    limits = StagingLimits(slots=1, readers=2, decoders=1, undecoded_bytes=BIG)

    trace = run(plan, machine(read=Curve(((1, 100.0), (3, 300.0)))), np.full(6, 100), limits)

    # Two readers and the worker's probe: three in flight get 300 bytes/s until the probe is through, at 1 s;
    # then two readers share 200, and the last read is alone.
    reads = np.sort(trace.spans["end"][trace.spans["kind"] == Kind.READ])
    assert reads == pytest.approx([1 / 3, 2 / 3, 1.0, 1.5, 2.0, 3.0])


def test_decoding_limits_where_it_is_slowest() -> None:
    plan = AccessPlan(Sequential(6), 3, 1)
    limits = StagingLimits(slots=4, readers=2, decoders=1, undecoded_bytes=BIG)

    trace = run(plan, machine(read=Curve(((1, 1e9),)), preprocess=100.0), np.full(6, 100), limits)

    (metrics,) = trace.epochs()
    assert metrics.stall_seconds == pytest.approx(6.0, rel=1e-6)
    assert metrics.stall_by_cause[Cause.DECODE] == pytest.approx(6.0, rel=1e-6)


@pytest.mark.parametrize(
    ("decoders", "processors", "seconds"),
    [(1, 2, 6.0), (2, 2, 4.0), (3, 2, 3.5), (3, np.inf, 3.0), (3, 1, 6.0)],
)
def test_threads_that_decode_share_the_processors_and_use_one_each_at_most(
    decoders: int, processors: float, seconds: float
) -> None:
    """Six samples that take a second of a processor, a batch each; the first is alone: reads are tried."""
    plan = AccessPlan(Sequential(6), 1, 1)
    limits = StagingLimits(slots=6, readers=2, decoders=decoders, undecoded_bytes=BIG)
    on = replace(machine(read=Curve(((1, 1e9),)), preprocess=100.0), processors=processors)

    trace = run(plan, on, np.full(6, 100), limits)

    decodes = trace.spans[trace.spans["kind"] == Kind.DECODE]
    assert decodes["end"].max() - decodes["start"].min() == pytest.approx(seconds, rel=2e-3)


@pytest.mark.parametrize(("processors", "seconds"), [(1, 1.8e-3), (2, 1.8e-3), (np.inf, 0.0)])
def test_a_load_takes_a_processor_beside_its_samples_where_that_is_shared(
    processors: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six batches of a sample that takes no decoding, one thread."""
    costing(monkeypatch, load_cost_seconds=0.3e-3)
    limits = StagingLimits(slots=6, readers=2, decoders=1, undecoded_bytes=BIG)
    on = replace(machine(read=Curve(((1, 1e9),))), processors=processors)

    trace = run(AccessPlan(Sequential(6), 1, 1), on, np.full(6, 100), limits)

    decodes = trace.spans[trace.spans["kind"] == Kind.DECODE]
    assert (decodes["end"] - decodes["start"]).sum() == pytest.approx(seconds, rel=1e-3, abs=1e-6)


def test_a_thread_that_begins_to_decode_slows_those_that_do() -> None:
    """One processor; a sample of 4 s of work at 2 s, and half a second later one of 1 s, which has half of it."""
    plan = AccessPlan(Sequential(2), 1, 1)
    limits = StagingLimits(slots=2, readers=1, decoders=2, undecoded_bytes=BIG, own_bytes=1)
    # Read one after the other, at 2,000 bytes/s.
    on = replace(machine(read=Curve(((1, 2000.0),)), preprocess=1000.0), processors=1)

    trace = run(plan, on, np.array([1000, 4000]), limits)

    decodes = np.sort(trace.spans[trace.spans["kind"] == Kind.DECODE], order="sample")
    assert decodes["start"] == pytest.approx([2.5, 2.0], abs=2e-3)
    assert decodes["end"] == pytest.approx([4.5, 7.0], abs=2e-3)


def test_the_trainings_own_speed_is_the_machines_unless_given() -> None:
    plan = AccessPlan(Sequential(10), 4, 1)
    limits = StagingLimits(slots=4, readers=2, decoders=1, undecoded_bytes=BIG)
    on = machine(read=Curve(((1, 1e9),)), compute=Rate(8.0, "samples"))

    (metrics,) = predict(Job(plan, np.full(10, 100), on), limits=limits).epochs()

    assert metrics.own_seconds == pytest.approx(10 / 8)


def test_an_unknown_speed_of_the_training_is_asked_for() -> None:
    plan = AccessPlan(Sequential(10), 4, 1)
    limits = StagingLimits(slots=4, readers=2, decoders=1, undecoded_bytes=BIG)

    with pytest.raises(ConfigError, match="step_seconds"):
        predict(Job(plan, np.full(10, 100), machine(read=Curve(((1, 1e9),)))), limits=limits)


def test_one_slot_for_several_batches_is_refused() -> None:
    limits = StagingLimits(slots=1, readers=2, decoders=1, undecoded_bytes=BIG)

    with pytest.raises(ConfigError, match=r"limits\.slots is 1"):
        run(AccessPlan(Sequential(10), 4, 1), machine(read=Curve(((1, 1e9),))), np.full(10, 100), limits)


runs = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 60),
        "batch": st.integers(1, 16),
        "epochs": st.integers(1, 4),
        "slots": st.integers(2, 6),
        "readers": st.integers(1, 8),
        "decoders": st.integers(1, 3),
        "tier": st.integers(0, 6000),
        "latency": st.sampled_from([0.0, 0.01]),
        "step": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(0, 1000),
    }
)


def simulated(case: dict[str, float]) -> tuple[AccessPlan, np.ndarray, Trace]:
    plan = AccessPlan(
        FullShuffle(int(case["samples"]), int(case["seed"])), int(case["batch"]), int(case["epochs"])
    )
    sizes = np.random.default_rng(int(case["seed"])).integers(50, 200, plan.samples)
    on = machine(
        read=Curve(((1, 10_000.0),)),
        latency=case["latency"],
        preprocess=50_000.0,
        tier_bytes=int(case["tier"]),
    )
    limits = StagingLimits(int(case["slots"]), int(case["readers"]), int(case["decoders"]), BIG)
    return plan, sizes, run(plan, on, sizes, limits, case["step"])


@settings(max_examples=150)
@given(runs)
def test_a_run_is_never_faster_than_its_wire_its_decoders_or_its_steps(case: dict[str, float]) -> None:
    plan, sizes, trace = simulated(case)
    kind = trace.spans["kind"]
    end = trace.spans["end"].max()

    read_bytes = trace.spans["bytes"][kind == Kind.READ].sum()
    steps = sum(plan.steps(epoch) for epoch in range(plan.epochs))
    assert end >= read_bytes / 10_000.0 * (1 - 1e-9)
    assert end >= sizes.sum() * plan.epochs / 50_000.0 / case["decoders"] * (1 - 1e-9)
    assert end >= steps * case["step"] * (1 - 1e-9)


@settings(max_examples=150)
@given(runs)
def test_every_sample_is_decoded_once_an_epoch_and_taken_from_one_place(case: dict[str, float]) -> None:
    plan, _, trace = simulated(case)

    for epoch in trace.epochs():
        assert epoch.samples == plan.samples
        assert epoch.steps == plan.steps(epoch.epoch)
        assert sum(epoch.stall_by_cause.values()) == pytest.approx(epoch.stall_seconds)
    reads = sum(epoch.reads_by_place.get(SOURCE, 0) for epoch in trace.epochs())
    assert plan.samples <= reads <= plan.samples * plan.epochs


@settings(max_examples=100)
@given(runs)
def test_the_same_case_gives_the_same_trace(case: dict[str, float]) -> None:
    assert np.array_equal(simulated(case)[2].spans, simulated(case)[2].spans)


@settings(max_examples=60)
@given(runs)
def test_a_longer_plan_never_costs_less(case: dict[str, float]) -> None:
    _, _, short = simulated(case)
    _, _, longer = simulated({**case, "epochs": case["epochs"] + 1})

    assert longer.spans["end"].max() >= short.spans["end"].max() * (1 - 1e-9)


def test_steps_may_each_take_their_own_time() -> None:
    """Batches of two samples are whole at 2, 4 and 6 s; their steps take 0.5, 3 and 0.25 s."""
    plan = AccessPlan(Sequential(6), 2, 1)
    limits = StagingLimits(slots=4, readers=1, decoders=1, undecoded_bytes=BIG)
    on = machine(read=Curve(((1, 100.0),)))

    trace = predict(Job(plan, np.full(6, 100), on), limits=limits, step_seconds=[0.5, 3.0, 0.25])

    steps = trace.spans[trace.spans["kind"] == Kind.STEP]
    assert steps["start"] == pytest.approx([2.0, 4.0, 7.0])
    assert steps["end"] == pytest.approx([2.5, 7.0, 7.25])
    two: Any
    for two in ([0.5, 3.0], np.array([0.5, 3.0])):
        with pytest.raises(ConfigError, match="lists 2 steps and rank 0 runs 3"):
            predict(Job(plan, np.full(6, 100), on), limits=limits, step_seconds=two)
    for wrong in ("100 ms", -1.0, np.nan, np.inf, [0.5, -1.0, 0.0], [[0.5]], True):
        with pytest.raises(ConfigError, match=r"step_seconds is .*; give seconds of zero or more"):
            predict(Job(plan, np.full(6, 100), on), limits=limits, step_seconds=wrong)  # type: ignore[arg-type]


def test_a_run_may_begin_in_the_middle() -> None:
    """Of three batches of two samples an epoch, the last two of the second: at 2 and 4 s, as when they are all."""
    plan = AccessPlan(Sequential(6), 2, 2)
    limits = StagingLimits(slots=4, readers=1, decoders=1, undecoded_bytes=BIG)
    on = machine(read=Curve(((1, 100.0),)))

    def begun_at(epoch: int, step: int, steps: int) -> Spans:
        seconds = [0.5, 0.25, 0.0, 0.0][:steps]
        first = (epoch, step)
        return predict(Job(plan, np.full(6, 100), on, first=first), limits=limits, step_seconds=seconds).spans

    spans = begun_at(1, 1, 2)
    waits, steps = spans[spans["kind"] == Kind.WAIT], spans[spans["kind"] == Kind.STEP]
    assert list(zip(waits["epoch"], waits["step"], strict=True)) == [(1, 1), (1, 2)]
    assert waits["end"] == pytest.approx([2.0, 4.0])
    assert steps["end"] == pytest.approx([2.5, 4.25])
    # The step after the last of an epoch is the first of the next; that of the last epoch ends the run.
    assert np.array_equal(begun_at(0, 3, 3), begun_at(1, 0, 3))
    assert begun_at(2, 0, 0).size == 0
    at_the_end = predict(Job(plan, np.full(6, 100), on, first=(1, 3)), limits=limits, step_seconds=0.5)
    assert (at_the_end.spans.size, at_the_end.epochs()) == (0, [])
    with pytest.raises(ConfigError, match="step is 4; epoch 1 has 3 steps"):
        begun_at(1, 4, 0)


def test_a_training_that_asks_late_waits_less() -> None:
    """Prefetching begins at 0; the first batch is whole at 2 s, and asked for after 1.5 s."""
    plan = AccessPlan(Sequential(2), 2, 1)
    limits = StagingLimits(slots=4, readers=1, decoders=1, undecoded_bytes=BIG)
    on = machine(read=Curve(((1, 100.0),)))

    trace = predict(Job(plan, np.full(2, 100), on), limits=limits, step_seconds=0.0, first_ask_seconds=1.5)

    (wait,) = trace.spans[trace.spans["kind"] == Kind.WAIT]
    assert (wait["start"], wait["end"]) == pytest.approx((1.5, 2.0))


def test_the_training_keeps_a_batch_until_it_has_the_next_one() -> None:
    """Two slots; batches of 1 s each are there at 1 and 2 s, steps take 0.5 s: the third begins at 2 s, not at 1.5."""
    plan = AccessPlan(Sequential(6), 2, 1)
    limits = StagingLimits(slots=2, readers=1, decoders=1, undecoded_bytes=BIG)

    trace = run(plan, machine(read=Curve(((1, 200.0),))), np.full(6, 100), limits, 0.5)

    granted = trace.spans["end"][trace.spans["kind"] == Kind.SLOT]
    assert granted == pytest.approx([0.0, 0.0, 2.0])


def test_a_tier_costs_what_the_machine_says_of_it() -> None:
    """Two epochs of four samples: from the store 1 s each, then from a tier whose reads take 0.25 s, one at a time."""
    plan = AccessPlan(Sequential(4), 4, 2)
    limits = StagingLimits(slots=1, readers=1, decoders=1, undecoded_bytes=BIG)
    on = machine(read=Curve(((1, 100.0),)), tier_bytes=BIG)
    on = replace(on, storage=(on.storage[0], replace(on.storage[1], latency_seconds=0.25)))

    trace = run(plan, on, np.full(4, 100), replace(limits, slots=2))

    hits = trace.spans[trace.spans["kind"] == Kind.HIT]
    assert (hits["end"] - hits["start"]).min() == pytest.approx(0.25)


def test_each_further_crop_costs_its_share_of_a_decoding_and_each_that_is_used_is_finished() -> None:
    """Eight samples of 100 bytes, a batch each, in the same order in five epochs: crops of three epochs at a time.

    Nothing takes time but decoding, 100 bytes/s, and finishing, 1,000 bytes/s of crops of 100 bytes: the run lasts as
    long as both.
    """
    samples, epochs, together = 8, 5, 3
    plan = AccessPlan(Sequential(samples), 1, epochs)
    limits = StagingLimits(slots=2, readers=1, decoders=1, undecoded_bytes=BIG)
    on = machine(read=MEMORY, preprocess=100.0, tier_bytes=10**6)
    on = replace(on, storage=(replace(on.storage[0], write=Curve.flat(1_000.0)), *on.storage[1:]))

    trace = predict(
        Job(plan, np.full(samples, 100), on, form=CropForm(100, together)), limits=limits, step_seconds=0.0
    )

    expected = samples * epochs * 0.1
    for sample in range(samples):
        until = -1  # the last epoch that has a crop
        for epoch in range(epochs):
            if epoch > until:
                # Sample k is decoded anew in the epochs e for which e + k is a multiple of K, and in the first.
                until = next(e for e in range(epoch, epochs + together) if (e + 1 + sample) % together == 0)
                more = min(until, epochs - 1) - epoch
                expected += 1.0 + CROP_SHARE * more
                expected -= 0.1 * (more == 0)  # a single crop is decoded to its place in the batch
    decoding = trace.spans[trace.spans["kind"] == Kind.DECODE]
    assert decoding["end"].max() == pytest.approx(expected, rel=1e-6)


@for_each(
    ("processors", "copying_seconds", "each"),
    [(math.inf, 0.1, 0.5), (1, 0.1, 0.5), (1, 0.5, 0.5), (1, 0.7, 0.7)],
    ids=["unknown", "one", "one that does all", "one that is slower than it was"],
)
def test_crops_on_a_disk_cost_their_read_in_place_of_decoding(
    processors: float, copying_seconds: float, each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight samples of 100 bytes, a batch each. Memory has crops of four, a disk of 200 bytes/s those of the others.

    Decoding takes a second each, once: 8 s; then a worker reads crops of 100 bytes from the disk, 0.5 s each. Where
    processors are known, a part of that is copying: it takes a processor, and the rest does not.
    """
    costing(monkeypatch, read_byte_seconds=copying_seconds / 100)
    samples, epochs = 8, 3
    plan = AccessPlan(Sequential(samples), 1, epochs)
    limits = StagingLimits(slots=2, readers=1, decoders=1, undecoded_bytes=BIG)
    on = machine(read=MEMORY, preprocess=100.0, tier_bytes=400)
    disk = StorageClass("disk", 400, 1, Curve.flat(200.0), MEMORY, backend="filesystem", path="/disk")
    on = replace(on, storage=(*on.storage, disk), processors=processors)

    trace = predict(
        Job(plan, np.full(samples, 100), on, form=CropForm(100, disks=1)),
        limits=limits,
        step_seconds=0.0,
    )

    decoding = trace.spans[trace.spans["kind"] == Kind.DECODE]
    assert decoding["end"].max() == pytest.approx(8.0 + each * 4 * (epochs - 1), rel=1e-6)


def written_to_a_disk(
    epochs: int,
    limits: StagingLimits,
    preprocess: float = math.inf,
    processors: float = math.inf,
    write: float = 25.0,
) -> Trace:
    """Return a run of four samples of 100 bytes, a batch each, from a store of 100 bytes/s; a disk of 200 keeps all."""
    disk = StorageClass(
        "disk", 400, 1, Curve.flat(200.0), Curve.flat(write), backend="filesystem", path="/disk"
    )
    on = machine(read=Curve.flat(100.0), preprocess=preprocess)
    on = replace(on, storage=(on.storage[0], disk), processors=processors)
    return run(AccessPlan(Sequential(4), 1, epochs), on, np.full(4, 100), limits)


def test_a_disk_is_written_behind_those_who_bring_samples_at_the_rate_it_has() -> None:
    """A sample comes each second, and takes four to be written: of two at a time, others find no space to wait."""
    limits = StagingLimits(slots=4, readers=1, decoders=2, undecoded_bytes=BIG)

    some = written_to_a_disk(2, replace(limits, unwritten_bytes=200))
    every = written_to_a_disk(2, limits)

    first, second = some.epochs()
    assert first.stall_seconds == pytest.approx(4.0)  # nobody waits for a write
    assert (first.reads_by_place, second.reads_by_place) == ({SOURCE: 4}, {SOURCE: 2})
    assert [each.reads_by_place for each in every.epochs()] == [{SOURCE: 4}, {}]
    assert second.hits_by_place == {1: 2}
    # The disk is written from 1 to 5 s, and then read before it is written again.
    hits = np.sort(every.spans[every.spans["kind"] == Kind.HIT]["end"])
    assert hits[0] == pytest.approx(5.5)


@for_each(("processors", "seconds"), [(math.inf, 4.0), (2, 4.0), (1, 7.0)], ids=["unknown", "two", "one"])
def test_writing_to_a_disk_takes_a_processor_where_that_is_shared(
    processors: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding a sample takes a second, and so does writing one: three are decoded while others are written."""
    costing(monkeypatch, write_seconds=0.4, write_byte_seconds=0.6e-2)
    limits = StagingLimits(slots=4, readers=1, decoders=1, undecoded_bytes=BIG)

    trace = written_to_a_disk(1, limits, preprocess=100.0, processors=processors, write=1e12)

    decodes = trace.spans[trace.spans["kind"] == Kind.DECODE]
    assert decodes["end"].max() - decodes["start"].min() == pytest.approx(seconds, rel=1e-3)


def test_whole_pictures_are_made_and_written_when_they_are_first_decoded() -> None:
    """Four pictures of 1,000 bytes of pixels, 100 as stored, each a second to decode, and half of one more to keep."""
    on = machine(read=MEMORY, preprocess=100.0, tier_bytes=1)
    limits = StagingLimits(slots=4, readers=1, decoders=1, undecoded_bytes=BIG, unwritten_bytes=1000)
    form = CropForm(1000, is_decoded=True, disks=1)

    def epochs(write: float) -> list[EpochMetrics]:
        disk = StorageClass("disk", BIG, 1, MEMORY, Curve.flat(write), backend="filesystem", path="/disk")
        job = Job(
            AccessPlan(Sequential(4), 1, 2),
            np.full(4, 100),
            replace(on, storage=(*on.storage, disk)),
            form=form,
        )
        return predict(job, limits=limits, step_seconds=0.0).epochs()

    # The first is written from 1 + WHOLE_SHARE on for ten seconds; or all are before the next is there.
    first, second = epochs(write=100.0)
    assert first.stall_seconds == pytest.approx(4 * (1 + WHOLE_SHARE), rel=1e-6)
    assert (second.reads_by_place, second.hits_by_place) == ({SOURCE: 3}, {2: 1})
    _, quick = epochs(write=1e12)
    assert quick.stall_seconds == pytest.approx(4 * READ_PIXELS_SHARE, rel=1e-6)


@for_each(("load_cost",), [(0.0,), (0.05,), (1.0,)])
def test_what_a_load_costs_leaves_the_memory_to_others_meanwhile(
    load_cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crops of 100 bytes, one a batch: 1,000 bytes/s are written to batches, by one thread or by two at once."""
    costing(monkeypatch, load_cost_seconds=load_cost)
    limits = StagingLimits(slots=4, readers=1, decoders=2, undecoded_bytes=BIG)
    on = replace(machine(read=MEMORY, preprocess=1e9, tier_bytes=BIG), processors=2, decode_threads=2)
    on = replace(on, storage=(replace(on.storage[0], write=Curve.flat(1000.0)), on.storage[1]))

    job = Job(AccessPlan(Sequential(4), 1, 2), np.full(4, 100), on, form=CropForm(100))
    spans = predict(job, limits=limits, step_seconds=0.0).spans

    # They are used in the epoch in which they are made, too, where decoding takes as long as writing: 0.2 s. Another
    # 0.1 s passes while the other thread writes as well, for as much of its own time.
    used = np.sort(spans[spans["kind"] == Kind.DECODE], order="epoch")
    seconds, others = used["end"] - used["start"], load_cost + np.repeat([0.2, 0.0], 4)
    assert seconds == pytest.approx(others + 0.1 + 0.1 * (seconds - others) / seconds, rel=1e-6)


@for_each(
    ("costs", "processors", "expected"),
    [
        ({"batch_cost_seconds": 0.5}, 1, [6.5, 5.5]),
        ({"batch_cost_seconds": 0.5}, 2, [4.5, 4.0]),
        ({"keep_seconds": 0.2, "keep_byte_seconds": 1e-3}, 2, [5.2, 4.0]),
        ({"batch_cost_seconds": 0.5, "keep_seconds": 0.5}, math.inf, [4.0, 4.0]),
    ],
    ids=["batches on the only processor", "batches beside decoding", "kept once", "unknown processors"],
)
def test_batches_and_samples_that_memory_keeps_take_a_processor_where_that_is_shared(
    costs: dict[str, float], processors: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four samples of 100 bytes, a batch each, a second to decode; memory keeps all from the first epoch on."""
    costing(monkeypatch, **costs)
    limits = StagingLimits(slots=4, readers=1, decoders=1, undecoded_bytes=BIG)
    on = replace(machine(read=MEMORY, preprocess=100.0, tier_bytes=BIG), processors=processors)

    first, second = run(AccessPlan(Sequential(4), 1, 2), on, np.full(4, 100), limits).epochs()

    assert [first.stall_seconds, second.stall_seconds] == pytest.approx(expected, rel=1e-3)


def test_a_disk_gets_a_copy_of_what_memory_keeps_and_is_read_in_turns_with_writing_it() -> None:
    """Memory has two of four samples of 100 bytes, a disk the others. One comes each second, and takes 4 s to write.

    A step takes 4 s; sample 2 is read from the disk as soon as there is a slot for it, after 14 s. Without copies the
    disk is written until 11 s, with them until 17 s.
    """
    disk = StorageClass(
        "disk", 200, 1, Curve.flat(200.0), Curve.flat(25.0), backend="filesystem", path="/disk"
    )
    on = machine(read=Curve.flat(100.0), tier_bytes=200)
    job = Job(AccessPlan(Sequential(4), 1, 2), np.full(4, 100), replace(on, storage=(*on.storage, disk)))
    limits = StagingLimits(slots=4, readers=1, decoders=2, undecoded_bytes=BIG)

    def read_at(copied: dict[int, np.ndarray]) -> list[float]:
        spans = predict(job, limits=limits, step_seconds=4.0, copied=copied).spans
        found: list[float] = spans["end"][(spans["kind"] == Kind.HIT) & (spans["place"] == 2)].tolist()
        return found

    assert read_at({})[0] == pytest.approx(14.5)
    assert read_at({2: np.array([True, True, False, False])})[0] == pytest.approx(17.5)


def test_a_store_answers_no_more_requests_than_it_can() -> None:
    """Eight reads at once, 1 ms of bytes each and 0.5 s for each request, which no other request overlaps."""
    plan = AccessPlan(Sequential(8), 8, 1)
    limits = StagingLimits(slots=1, readers=8, decoders=1, undecoded_bytes=BIG)
    on = machine(read=Curve(((1, 100_000.0),)))
    on = replace(on, source=replace(on.source, request_seconds=0.5))

    trace = run(plan, on, np.full(8, 100), limits)

    assert trace.spans["end"][trace.spans["kind"] == Kind.READ].max() == pytest.approx(8 * 0.501)


def test_samples_that_lie_near_each_other_are_one_read() -> None:
    """Latency 1 s, 100 bytes/s. The decoder reads sample 0; the reader samples 1 and 3 by one read of 250 bytes, until
    3.5 s, then sample 2 of another file, until 5.5 s. One by one it would read until 6 s."""
    limits = StagingLimits(slots=1, readers=1, decoders=1, undecoded_bytes=BIG)
    lying = Extents(np.array([0, 0, 1, 0]), np.array([0, 100, 0, 250]), np.full(4, 100))
    on = machine(read=Curve(((1, 100.0),)), latency=1.0)

    def waited(extents: Extents | None) -> float:
        plan = AccessPlan(Sequential(4), 4, 1)
        trace = predict(Job(plan, np.full(4, 100), on), limits=limits, extents=extents, step_seconds=0.0)
        return float(trace.spans[trace.spans["kind"] == Kind.WAIT]["end"][0])

    assert waited(lying) == pytest.approx(5.5)
    assert waited(None) == pytest.approx(6.0)


def test_a_tier_behind_a_latency_is_read_where_more_reads_a_second_come_from_it() -> None:
    """A read takes 1 ms of the store's wire, one after the other, and 5 ms from the tier, 32 of them at once."""
    plan = AccessPlan(Sequential(32), 32, 3)
    limits = StagingLimits(slots=2, readers=32, decoders=1, undecoded_bytes=BIG)
    on = machine(read=Curve(((1, 1e8),)), tier_bytes=BIG)
    tier = replace(on.storage[1], latency_seconds=0.005, read=Curve(((1, 5e9),)))

    on = replace(on, source=replace(on.source, threads=32), storage=(on.storage[0], tier))

    trace = run(plan, on, np.full(32, 100_000), limits)

    last = trace.spans[trace.spans["epoch"] == 2]
    assert (last["kind"] == Kind.HIT).sum() == 32
    assert not (last["kind"] == Kind.READ).any()


@pytest.mark.parametrize("latency", [0.0, 0.05])
def test_ranks_that_share_read_each_sample_once_and_then_each_others_memory(latency: float) -> None:
    """Two of four ranks, from a store that answers at once, which a worker would ask by itself, or in 50 ms.

    Batches are staged so far ahead that one rank wants what the other has yet to read; a step takes longer than any
    read, so that nobody is late.
    """
    plan, sharing = AccessPlan(FullShuffle(120, 1), 12, 3, 4), (2, 3)
    limits = StagingLimits(slots=16, readers=2, decoders=1, undecoded_bytes=BIG)
    on = replace(machine(read=Curve(((1, 1e12),)), latency=latency, tier_bytes=BIG), ranks=4)
    on = replace(on, network_bytes_per_second=1.0)
    read = [set(plan.string(rank).tolist()) for rank in sharing]

    spans = np.concatenate(
        [
            predict(
                Job(plan, np.full(120, 100), on, rank=rank, sharing=sharing),
                limits=limits,
                policy="first-reader",
                step_seconds=10.0,
            ).spans
            for rank in sharing
        ]
    )

    assert spans[spans["kind"] == Kind.READ]["samples"].sum() == len(read[0] | read[1])
    assert set(spans[spans["kind"] == Kind.HIT]["peer"].tolist()) == {-1, 2, 3}
    waits = spans[(spans["kind"] == Kind.WAIT) & ((spans["epoch"] > 0) | (spans["step"] > 0))]
    assert waits.size == 2 * (3 * 10 - 1)
    assert (waits["start"] == waits["end"]).all()


@pytest.mark.parametrize("policy", ["first-reader", "cover", "hash-home"])
@pytest.mark.parametrize("latency", [0.0, 0.001, 0.005])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_share_read_the_store_once_a_sample_however_quick_it_is(
    policy: str, latency: float, ranks: int
) -> None:
    """A step takes no longer than a read of the slower stores: all wait for these, and for homes, which fill by half of
    their readers. Batches that are complete before the one that is waited for end no wait.
    """
    samples = 800
    plan = AccessPlan(FullShuffle(samples, 1), 8 * ranks, 2, ranks)
    limits = StagingLimits(slots=4, readers=4, decoders=1, undecoded_bytes=BIG)
    on = replace(machine(read=Curve(((1, 1e10),)), latency=latency, tier_bytes=BIG), ranks=ranks)

    reads = [
        predict(
            Job(plan, np.full(samples, 100), on, rank=rank, sharing=range(ranks)),
            limits=limits,
            policy=policy,
            step_seconds=1e-3,
        ).spans
        for rank in range(ranks)
    ]

    of_store = sum(int(each[each["kind"] == Kind.READ]["samples"].sum()) for each in reads)
    assert of_store == samples
