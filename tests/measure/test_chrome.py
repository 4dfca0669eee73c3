"""A trace in the Trace Event Format: every span once, lanes without overlaps, arrows that point ahead."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spans import spans_of

from penstock.errors import ConfigError
from penstock.measure.chrome import write_chrome
from penstock.trace import NO_PLACE, SOURCE, Kind, Trace

#: A group of 64 that was read by one call and loaded by two, and a sample taken from a tier of rank 3.
ROWS = [
    (0.0, 0.5, 10, 6400, 0, 0, Kind.READ, SOURCE, 2, 0, 64, -1, 1),
    (0.5, 1.0, 10, 0, 0, 0, Kind.DECODE, NO_PLACE, 4, 0, 32, -1, 1),
    (0.5, 1.2, 42, 0, 0, 0, Kind.DECODE, NO_PLACE, 5, 0, 32, -1, 1),
    (0.0, 0.1, -1, 0, 0, 0, Kind.SLOT, NO_PLACE, 1, 0),
    (0.05, 0.3, -1, 0, 0, 1, Kind.SLOT, NO_PLACE, 1, 0),
    (0.0, 1.25, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0, 64),
    (1.25, 3.0, -1, 0, 0, 0, Kind.STEP, NO_PLACE, 0, 0, 64),
    (1.0, 1.1, 7, 50, 0, 1, Kind.HIT, 1, 4, 0, 1, 3),
    (1.1, 1.2, 7, 0, 0, 1, Kind.DECODE, NO_PLACE, 4, 0, 1),
    (2.0, 2.5, -1, 10**9, -1, 100, Kind.SAVE, NO_PLACE, 65_535, 0),
]


def events_of(trace: Trace, folder: Path) -> list[dict[str, Any]]:
    write_chrome(trace, folder / "trace.json")
    assert [file.name for file in folder.iterdir()] == ["trace.json"]
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return events


def test_spans_are_slices_of_named_threads_of_named_ranks(tmp_path: Path) -> None:
    trace = Trace(spans_of(ROWS), {"source": "photos"}, names={10: "cat/\udcff.jpg"}, hosts={0: "node0"})
    events = events_of(trace, tmp_path)

    slices = [event for event in events if event["ph"] == "X"]
    assert sorted((each["ts"], each["dur"]) for each in slices) == sorted(
        (round(1e6 * start), round(1e6 * (end - start))) for start, end, *_ in ROWS
    )
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert sorted({(names[each["tid"]], each["name"]) for each in slices}) == [
        ("batches waiting for a slot", "slot"),
        ("decode worker 4", "decode"),
        ("decode worker 4", "hit from memory of rank 3"),
        ("decode worker 5", "decode"),
        ("read worker 2", "read from the source"),
        ("save of snapshots", "save"),
        ("training", "step"),
        ("training", "wait"),
    ]
    assert [each["args"]["name"] for each in events if each["name"] == "process_name"] == ["rank 0 on node0"]
    (read,) = [each for each in slices if each["name"] == "read from the source"]
    assert read["args"] == {
        "epoch": 0,
        "step": 0,
        "samples": 64,
        "bytes": 6400,
        "flow": 1,
        "sample": 10,
        "name": "cat/\udcff.jpg",
    }
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"source": "photos"}


def at(events: list[dict[str, Any]], arrow: dict[str, Any]) -> tuple[str, int | None]:
    """The slice that an end of an arrow is on: its name and sample."""
    (found,) = [
        each
        for each in events
        if each["ph"] == "X"
        and each["tid"] == arrow["tid"]
        and each["ts"] < arrow["ts"] < each["ts"] + each["dur"]
    ]
    return found["name"], found["args"].get("sample")


def test_arrows_go_from_reads_over_decodes_to_steps(tmp_path: Path) -> None:
    events = events_of(Trace(spans_of(ROWS)), tmp_path)

    tails = {each["id"]: each for each in events if each["ph"] == "s"}
    heads = {each["id"]: each for each in events if each["ph"] == "f"}
    assert tails.keys() == heads.keys()
    assert sorted((at(events, tails[number]), at(events, heads[number])) for number in tails) == [
        (("decode", 42), ("step", None)),
        (("hit from memory of rank 3", 7), ("decode", 7)),
        (("read from the source", 10), ("decode", 10)),
        (("read from the source", 10), ("decode", 42)),
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(0, 2), st.integers(0, 1)), min_size=1
    )
)
def test_no_two_slices_of_a_lane_overlap(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, ...]]
) -> None:
    """Batches wait for slots at the same time; reads of a prediction have one worker."""
    spans = spans_of(
        (start, start + length, 1, 0, 0, 0, Kind.READ, SOURCE, worker, rank)
        for start, length, worker, rank in calls
    )
    events = events_of(Trace(spans), tmp_path_factory.mktemp("lanes"))

    slices = sorted(
        (each["pid"], each["tid"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"
    )
    assert len(slices) == len(calls)
    for (*lane, begin, length), (*next_lane, then, _) in pairwise(slices):
        assert lane != next_lane or begin + length <= then


def test_a_trace_of_nothing_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no span"):
        write_chrome(Trace(spans_of([])), tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
