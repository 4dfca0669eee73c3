"""What a store records into a trace, with a clock that the test moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.flow.recorder import Recorder
from penstock.flow.snapshot_spans import SnapshotSpans
from penstock.trace import read_trace
from penstock.trace.schema import NO_PLACE, Kind

FIELDS = ["kind", "start", "end", "bytes", "epoch", "step", "place"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_save_is_one_span_however_long_it_takes() -> None:
    clock = Clock()
    recorder = Recorder(8, rank=3, clock=clock)

    with SnapshotSpans(recorder).span(Kind.SAVE, step=1000) as add:
        for _ in range(3):
            clock.now += 5.0
            add(10)

    spans = recorder.drain()
    assert spans[FIELDS].tolist() == [(Kind.SAVE, 0.0, 15.0, 30, -1, 1000, NO_PLACE)]
    assert spans["rank"].tolist() == [3]


@pytest.mark.parametrize("kind", [Kind.WRITE, Kind.DRAIN])
def test_what_runs_beside_comes_in_pieces_of_a_second_that_follow_each_other(kind: Kind) -> None:
    """So that a loader that sums up as it goes has them in time."""
    clock = Clock()
    recorder = Recorder(8, clock=clock)

    with SnapshotSpans(recorder).span(kind, step=7, tier=1) as add:
        for seconds in (0.5, 0.5, 2.0, 0.25):
            clock.now += seconds
            add(100)
        assert len(recorder.drain()) == 2

    (rest,) = recorder.drain()[FIELDS].tolist()
    assert rest == (kind, 3.0, 3.25, 100, -1, 7, 1)


def test_a_relative_path_is_one_in_the_folder_where_the_store_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    spans = SnapshotSpans("saves.trace")
    monkeypatch.chdir(tmp_path / "other")

    with spans.span(Kind.SAVE, step=1):
        pass
    spans.close()

    assert len(read_trace(tmp_path / "saves.trace").spans) == 1


def test_what_fails_is_recorded_as_far_as_it_came() -> None:
    clock = Clock()
    recorder = Recorder(8, clock=clock)

    with pytest.raises(OSError, match="full"), SnapshotSpans(recorder).span(Kind.LOAD, step=1):  # noqa: PT012
        clock.now += 2.0
        raise OSError("full")

    assert recorder.drain()["end"].tolist() == [2.0]


def test_without_a_trace_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spans = SnapshotSpans(None)

    with spans.span(Kind.WRITE, step=1) as add:
        add(1)

    assert not spans.has_file
    assert not any(tmp_path.iterdir())
