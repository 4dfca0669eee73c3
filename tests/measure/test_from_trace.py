"""A machine learned from the spans of a run: constructed runs whose rates are known."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.measure.from_trace import curve_of, learn
from penstock.policy.forms import CROP_SHARE, WHOLE_SHARE, CropForm
from penstock.trace import NO_PEER, NO_PLACE, SOURCE, SPAN, Kind, Spans, Trace, TraceWriter
from penstock.trace.schema import JOBS_MEMORY


def _spans(rows: list[dict[str, Any]]) -> Spans:
    spans = np.zeros(len(rows), SPAN)
    for span, row in zip(spans, rows, strict=True):
        for name, value in row.items():
            span[name] = value
    return spans


def _reads(
    readers: int, count: int, begin: float, seconds: float, size: int, **more: Any
) -> list[dict[str, Any]]:
    """So many readers, each `count` reads one behind the other, all at the same moments."""
    return [
        {"kind": Kind.READ, "place": SOURCE, "samples": 1, "bytes": size, "flow": 1000 * reader + number + 1}
        | {"start": begin + number * seconds, "end": begin + (number + 1) * seconds}
        | more
        for reader in range(readers)
        for number in range(count)
    ]


ALONE_THEN_FOUR = [*_reads(1, 10, 0.0, 0.01, 1_000_000), *_reads(4, 10, 1.0, 0.02, 1_000_000)]


def test_the_rate_of_each_number_of_reads_in_flight_is_found() -> None:
    """One reader gets 100 MB/s; four get 200 MB/s together; the pause between is no read's."""
    assert curve_of(_spans(ALONE_THEN_FOUR)) == Curve(((1, 100e6), (4, 200e6)))


def test_reads_of_other_ranks_are_not_in_flight_here() -> None:
    two = [*_reads(1, 10, 0.0, 0.01, 1_000_000), *_reads(1, 10, 0.0, 0.01, 1_000_000, rank=1)]

    assert curve_of(_spans(two)) == Curve(((1, 100e6),))


def test_tiers_decoding_and_steps_are_learned_and_the_rest_stays() -> None:
    """Eight reads of a disk at 50 MB/s, decoding at 25 MB/s, steps of 64 samples in 0.1 s."""
    known = Machine(
        SharedStore(Curve.flat(1e6), Curve.flat(1e6), latency_seconds=0.5, threads=7, write=Curve.flat(5e6)),
        (
            StorageClass("staging", 1000, 2, Curve.flat(1e9)),
            StorageClass("memory", 1000, 2, Curve.flat(2e9)),
            StorageClass(
                "disk", 1000, 2, Curve.flat(3e9), latency_seconds=1, backend="filesystem", path="/scratch"
            ),
        ),
        network_bytes_per_second=9e9,
    )
    disk = _reads(1, 8, 5.0, 0.02, 1_000_000, place=2)
    for number, read in enumerate(disk):
        read["flow"] = 9000 + number
    decodes = [
        {"kind": Kind.DECODE, "start": 6.0, "end": 6.04, "flow": 9000 + number, "samples": 1}
        for number in range(8)
    ]
    steps = [
        {"kind": Kind.STEP, "start": 7 + number, "end": 7.1 + number, "step": number, "samples": 64}
        for number in range(3)
    ]
    trace = Trace(_spans([*ALONE_THEN_FOUR, *disk, *decodes, *steps]), {"machine": known.to_toml()})

    learned = learn(trace)

    machine = learned.machine
    assert machine.source.read == Curve(((1, 100e6), (4, 200e6)))
    assert (machine.source.clients, machine.source.latency_seconds) == (None, 0.0)
    assert (machine.source.threads, machine.source.write) == (7, Curve.flat(5e6))
    assert machine.storage[2].read == Curve.flat(50e6)
    assert machine.storage[2].latency_seconds == 0.0
    assert machine.storage[:2] == known.storage[:2]
    assert machine.preprocess_bytes_per_second == 25e6
    assert machine.compute == Rate(640.0, of="samples")
    assert machine.network_bytes_per_second == 9e9
    assert any("not learned: memory" in line for line in learned.lines)
    assert Machine.from_toml(learned.to_toml()) == machine


STORED_BYTES, PIXELS_BYTES = 1_000_000, 6_000_000
#: Seconds in which a thread that decodes 50 MB/s makes a crop, and keeps the pixels of the picture as a whole.
WHOLE = 0.02 * (1 + WHOLE_SHARE)


def _brought_and_decoded(
    flow: int, sample: int, epoch: int, place: int, seconds: float, samples: int = 1, **more: Any
) -> list[dict[str, Any]]:
    """A group of samples: its bytes, pixels unless they are from the source, and what a thread did with them."""
    nbytes = samples * (STORED_BYTES if place in (SOURCE, JOBS_MEMORY) else PIXELS_BYTES)
    both = {"sample": sample, "epoch": epoch, "flow": flow, "samples": samples, "peer": NO_PEER}
    bring = {"kind": Kind.READ if place == SOURCE else Kind.HIT, "place": place, "bytes": nbytes, "end": 0.01}
    return [
        both | bring | more,
        both | {"kind": Kind.DECODE, "place": NO_PLACE, "start": 1, "end": 1 + seconds},
    ]


def _decode_rate(rows: list[dict[str, Any]], form: CropForm, ids: Any = None) -> float:
    curve = Curve.flat(1e9)
    storage = [StorageClass(name, 10**9, 2, curve) for name in ("staging", "memory")]
    storage.append(StorageClass("disk", 10**9, 2, curve, backend="filesystem", path="/scratch"))
    machine = Machine(SharedStore(None, curve), tuple(storage)).to_toml()
    meta: Any = {"machine": machine, "keep": asdict(form), "plan": {"epochs": 3}}
    return learn(Trace(_spans(rows), meta, ids=ids or {})).machine.preprocess_bytes_per_second


@pytest.mark.parametrize(
    ("form", "tier", "seconds"),
    [
        # The pixels of a whole picture, and the crop.
        (CropForm(PIXELS_BYTES, is_decoded=True), 1, (WHOLE, WHOLE)),
        (CropForm(PIXELS_BYTES, is_decoded=True, disks=1), 2, (WHOLE, WHOLE)),
        # One crop for all epochs: no more is made.
        (CropForm(PIXELS_BYTES), 1, (0.02, 0.02)),
        # Sample 0 gets the crops of two later epochs, sample 1 is due again in epoch 2.
        (CropForm(PIXELS_BYTES, epochs=3), 1, (0.02 * (1 + 2 * CROP_SHARE), 0.02 * (1 + CROP_SHARE))),
    ],
    ids=["decoded", "decoded, on a disk", "crops", "3 crops"],
)
def test_of_what_is_kept_as_pixels_decoding_is_learned_by_its_bytes_as_stored(
    form: CropForm, tier: int, seconds: tuple[float, float]
) -> None:
    """A thread decodes 50 MB/s. Samples 0 and 1 are kept; 2 is not, and comes from another rank's memory at last."""
    rows = [
        *_brought_and_decoded(1, 0, 0, SOURCE, seconds[0]),
        *_brought_and_decoded(2, 1, 0, SOURCE, seconds[1]),
        *_brought_and_decoded(3, 2, 0, SOURCE, 0.02),
        *_brought_and_decoded(4, 0, 1, tier, 0.002),
        *_brought_and_decoded(5, 1, 1, tier, 0.002),
        *_brought_and_decoded(6, 2, 1, SOURCE, 0.02),
        *_brought_and_decoded(7, 0, 2, tier, 0.002),
        *_brought_and_decoded(8, 1, 2, SOURCE if form.epochs else tier, 0.02 if form.epochs else 0.002),
        *_brought_and_decoded(9, 2, 2, tier, 0.002, peer=1),
    ]

    assert _decode_rate(rows, form) == 50e6


def test_of_a_group_those_count_for_more_whose_pixels_were_kept_and_all_where_none_was_used_again() -> None:
    """Two of four samples, decoded together at 50 MB/s; a run of one epoch does not say which they are."""
    form = CropForm(PIXELS_BYTES, is_decoded=True)
    ids = {(0, 1): np.arange(4), (0, 2): np.array([1, 3])}
    again = _brought_and_decoded(2, 1, 1, 1, 0.002, samples=2)

    some = _brought_and_decoded(1, 0, 0, SOURCE, 2 * WHOLE + 2 * 0.02, samples=4)
    assert _decode_rate([*some, *again], form, ids) == 50e6
    assert _decode_rate(_brought_and_decoded(1, 0, 0, SOURCE, 4 * WHOLE, samples=4), form, ids) == 50e6


def test_pixels_that_jobs_of_the_host_had_were_not_decoded() -> None:
    had = _brought_and_decoded(2, 0, 1, JOBS_MEMORY, 0.002)
    had[1]["place"] = JOBS_MEMORY
    rows = [*_brought_and_decoded(1, 0, 0, SOURCE, WHOLE), *had]

    assert _decode_rate(rows, CropForm(PIXELS_BYTES, is_decoded=True)) == 50e6


def test_a_header_whose_form_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="its header says keep = "):
        learn(Trace(_spans(ALONE_THEN_FOUR), {"keep": {"crop_bytes": "many"}}))


def test_a_run_whose_disk_had_all_teaches_of_the_disk_and_leaves_the_source_as_it_was() -> None:
    curve = Curve.flat(1e6)
    storage = (StorageClass("staging", 1000, 2, curve), StorageClass("memory", 10**6, 2, curve))
    known = Machine(SharedStore(None, Curve.flat(3e6), 0.01), storage)

    found = learn(Trace(_spans(_reads(1, 20, 0.0, 0.01, 1000, place=1)), {"machine": known.to_toml()}))

    assert found.machine.source == known.source
    assert found.machine.storage[1].read == Curve.flat(1e5)
    assert "hardly read its source" in found.lines[0]


def test_a_run_that_hardly_read_teaches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TraceWriter(tmp_path / "run.trace", {}) as writer:
        writer.append(_spans(_reads(1, 7, 0.0, 0.01, 1000)))

    assert main(["calibrate", "--from", str(tmp_path / "run.trace"), "--out", str(tmp_path / "m.toml")]) == 1
    assert f"{tmp_path}/run.trace: it has too few reads" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="too few reads"):
        learn(Trace(np.empty(0, SPAN)))


def test_a_run_without_a_machine_gives_one_all_the_same(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run.trace", {}) as writer:
        writer.append(_spans(ALONE_THEN_FOUR))

    assert main(["calibrate", "--from", str(tmp_path / "run.trace"), "--out", str(tmp_path / "m.toml")]) == 0

    machine = Machine.from_toml((tmp_path / "m.toml").read_text())
    assert machine.source.read == Curve(((1, 100e6), (4, 200e6)))
    assert machine.source.threads == 4
