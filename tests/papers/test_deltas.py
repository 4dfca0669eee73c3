"""The delta-snapshot paper: its drive's times and erases, and the pictures over which its numbers are marked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.machine.ssd import Drive, Ssd
from penstock.papers import deltas
from penstock.papers.deltas import (
    PAPER_ERASES,
    TABLE_9,
    TimedSnapshot,
    caffenet_sizes,
    draw_table_9,
    run_table_9,
)
from penstock.policy.delta_schemes import Scheme
from penstock.simulate.snapshots import METHODS, compare_methods
from penstock.simulate.wear import warm_drive

#: Table 9 by how the drive's channels transfer, and whether each save begins on the drive as warmed up.
Runs = dict[tuple[str, bool], list[TimedSnapshot]]


@pytest.fixture(scope="module")
def papers_drive() -> Drive:
    return warm_drive(Ssd.paper())


@pytest.fixture(scope="module")
def runs(papers_drive: Drive) -> Runs:
    shared = warm_drive(replace(Ssd.paper(), host_link="shared"))
    return {
        ("per channel", True): run_table_9(papers_drive),
        ("per channel", False): run_table_9(papers_drive, phases_from_start=False),
        ("shared", True): run_table_9(shared),
    }


def closed_form(reads: list[int], written: int | None, open_pages: int) -> float:
    """Seconds of Table 9 without a drive: pages striped over 8 chips, 63 of 64 pages of a block for data."""
    t_read, t_write, t_erase = 130.6e-6, 305.6e-6, 1.5e-3
    seconds = sum(math.ceil(pages / 8) * t_read for pages in reads)
    if written is not None:
        of_chip = math.ceil(written / 8)
        seconds += of_chip * t_write + (of_chip + open_pages) // 63 * (t_erase + t_write)
    return seconds


def files_of(scheme: Scheme) -> list[int]:
    """Pages of each snapshot's file, from the useful pages of Table 9, as a reader with a pencil has them."""
    useful = [row.useful_pages for row in TABLE_9[scheme]]
    pages = []
    for index, whole in enumerate(useful):
        base = 5 * (index // 5)
        others = 0 if index == base else useful[index - 1] if scheme == "progressive" else useful[base]
        pages.append(whole - others)
    return pages


def test_all_forty_times_of_table_9_come_out_of_the_drive(runs: Runs) -> None:
    """The published times are cut to milliseconds, and the drive's agree in every digit that is printed."""
    rows = runs["per channel", True]

    assert len(rows) == 20
    assert max(row.worst_error for row in rows) < 0.001
    for row in rows:
        assert math.floor(row.save_seconds * 1e3) / 1e3 == row.published.save_seconds
        assert math.floor(row.restore_seconds * 1e3) / 1e3 == row.published.restore_seconds
        assert row.useful_pages == row.published.useful_pages


@pytest.mark.parametrize("open_pages", [pytest.param(0, marks=pytest.mark.slow), 40])
def test_times_are_those_of_the_closed_form(open_pages: int) -> None:
    rows = run_table_9(warm_drive(replace(Ssd.paper(), open_pages=open_pages)))

    for row in rows:
        pages = files_of(row.scheme)
        base, own = 5 * (row.snapshot // 5), row.snapshot
        before = list(range(base, own)) if row.scheme == "progressive" else [base] if own > base else []
        restored = [*before, own]
        saved = closed_form([pages[file] for file in before], pages[own], open_pages)
        assert row.save_seconds == pytest.approx(saved, rel=1e-12)
        assert row.restore_seconds == pytest.approx(
            closed_form([pages[f] for f in restored], None, 0), rel=1e-12
        )


def test_a_drive_that_goes_on_from_save_to_save_is_a_little_off(runs: Runs) -> None:
    """The open block is then filled differently by the time of each save: one erase more or less."""
    rows = runs["per channel", False]

    assert 0.001 < max(row.worst_error for row in rows) < 0.0015


def test_with_one_transfer_at_a_time_the_times_would_be_several_times_longer(runs: Runs) -> None:
    """What 5.1 of the paper reads like: 46,581 pages over one bus, 105.6 us each."""
    first = runs["shared", True][0]

    assert first.restore_seconds == pytest.approx(46_581 * 105.6e-6)
    assert first.restore_seconds > 6 * first.published.restore_seconds
    assert first.save_seconds > 2.5 * first.published.save_seconds


def test_erases_of_caffenet_are_those_of_the_text(papers_drive: Drive) -> None:
    """8,880 for complete snapshots; the paper says about 27 % fewer at snap_dis 10, Table 9 gives snap_dis 5."""
    runs = {run.method.name: run for run in compare_methods(papers_drive, [caffenet_sizes()], METHODS, [5])}
    erases = {name: run.result.work.erases for name, run in runs.items() if run.result is not None}

    assert set(erases) == {"complete", "dynrle-progressive", "dynrle-chain"}
    assert erases["complete"] == 8_880
    assert PAPER_ERASES / erases["complete"] == pytest.approx(0.73, abs=0.005)
    assert erases["dynrle-progressive"] / erases["complete"] == pytest.approx(414_307 / 559_440, rel=1e-3)
    assert erases["dynrle-chain"] / erases["complete"] == pytest.approx(443_130 / 559_440, rel=1e-3)


@pytest.mark.usefixtures("fonts")
def test_times_of_table_9_are_drawn_over_the_published_ones() -> None:
    schemes: tuple[Scheme, ...] = ("progressive", "chain")
    rows = [
        TimedSnapshot(scheme, index, row, row.useful_pages, row.save_seconds + 0.1, row.restore_seconds + 0.2)
        for scheme in schemes
        for index, row in enumerate(TABLE_9[scheme])
    ]

    save, restore = draw_table_9(rows, rows).axes

    lines = {str(line.get_label()): list(np.asarray(line.get_ydata())) for line in save.lines}
    assert lines["chain, Table 9"] == [row.save_seconds for row in TABLE_9["chain"]]
    assert lines["chain, the model"] == pytest.approx([row.save_seconds + 0.1 for row in TABLE_9["chain"]])
    assert len(restore.lines) == 6


def test_the_tables_agree_with_what_is_published(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = deltas.table_8()

    def run_before(ssd: Ssd, *, phases_from_start: bool = True) -> list[TimedSnapshot]:
        return runs[ssd.host_link, phases_from_start]

    monkeypatch.setattr(deltas, "warm_drive", lambda ssd: ssd)
    monkeypatch.setattr(deltas, "run_table_9", run_before)

    times = deltas.table_9()

    assert [(row.computed, row.published) for row in blocks.results] == [
        (111_432, 111_432),
        (13_048, 13_048),
        (6_592, 6_592),
    ]
    assert len(times.results) == 40
    assert all(abs(row.difference or 0.0) < 0.001 for row in times.results)
    assert "0.14 % off" in times.why


@pytest.mark.usefixtures("fonts")
def test_the_published_erases_are_marked_over_the_counted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CaffeNet alone: the other two models take seconds."""
    monkeypatch.setattr(deltas, "recorded_sizes", list)

    repeated = deltas.figure_10()

    complete, delta, fewer = repeated.results
    assert (complete.computed, complete.published) == (8_880, None)
    assert (delta.computed, delta.published) == (6_576, PAPER_ERASES)
    assert fewer.computed == pytest.approx(0.2595, abs=1e-4)
    assert [text.get_text() for text in repeated.draw().axes[-1].texts][-1] == "the paper: 6,448"
