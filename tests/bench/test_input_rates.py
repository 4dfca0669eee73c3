"""`penstock bench input`: what is read, what counts, what is refused; what stores deliver is in benchmarks/bench.py."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.in_memory import run

from penstock.bench import loaders
from penstock.bench.input_rates import (
    InputRates,
    InputResult,
    InputSettings,
    doubts_about,
    is_cached,
    measure_input,
    samples_of_run,
)
from penstock.bench.loaders import OWN, Setting, Work, loader_named
from penstock.cli.main import main
from penstock.errors import ConfigError, DataError
from penstock.measure import file_rates
from penstock.measure.calibrate import PageCache
from penstock.measure.file_rates import SequentialMaximum
from penstock.measure.spread import Spread
from penstock.ranks import Ranks, alone
from penstock.store import FlatFolder, open_source


def test_a_run_that_something_disturbed_moves_no_result() -> None:
    """The first of six runs, which warms up, and one at which another user's burst came."""
    undisturbed = Spread.after_first([100.0, 100, 101, 99, 100, 100])

    assert Spread.after_first([1.0, 100, 101, 99, 100, 5000]).median == undisturbed.median == 100
    assert Spread.after_first([1.0, 100, 101, 99, 100, 0.01]).median == 100


def test_what_cannot_be_the_device_itself_is_doubted() -> None:
    result = InputResult(OWN, Work.READ, 8, 64, Spread(1000.0, 990, 1010, 5), 0)
    device = SequentialMaximum(1 << 30, Spread(60e6, 59e6, 61e6, 5), Spread(50e6, 49e6, 51e6, 5))

    assert doubts_about([result], PageCache.COLD, 50_000.0, device) == []
    (faster,) = doubts_about([result], PageCache.COLD, 100_000.0, device)
    assert "100 MB/s is more than one stream reads in sequence (60 MB/s)" in faster
    (warm,) = doubts_about([result], PageCache.WARM, 50_000.0, device)
    assert "stayed in the page cache (warm)" in warm
    (skipped,) = doubts_about([replace(result, skipped=3)], PageCache.COLD, 1.0, None)
    assert "3 samples could not be read or decoded" in skipped
    assert is_cached(first_seconds=3.0, again_seconds=1.0)
    assert not is_cached(first_seconds=1.2, again_seconds=1.0)


def test_a_run_has_complete_batches_and_two_where_there_are_as_many() -> None:
    for wanted in (0, 1, 63, 64, 129, 1000):
        for available in (64, 65, 128, 500, 10**6):
            samples = samples_of_run(wanted, 64, available)
            assert samples % 64 == 0
            assert min(128, available // 64 * 64) <= samples <= max(available, 128)


def test_every_setting_is_measured_on_fresh_samples_and_bad_ones_are_counted(photos: Path) -> None:
    moved: list[str] = []
    source = FlatFolder(photos)

    asked = InputSettings([1, 2], [4, 2], samples=12)
    found = measure_input(source, asked, repeats=2, done=moved.append, ranks=alone())

    settings = [(each.work, each.threads, each.batch_size) for each in found.results]
    decode = [(Work.DECODE, threads, size) for size in (4, 2) for threads in (1, 2)]
    assert settings == [(Work.READ, 1, 4), (Work.READ, 2, 4), *decode]
    assert len(moved) == 2 * asked.runs == 12
    # Each run reads all twelve: reading does not mind the one that is cut off, decoding does, in each of two runs.
    assert [each.skipped for each in found.results] == [0, 0, 2, 2, 2, 2]
    assert all(each.samples_per_second.median > 0 for each in found.results)
    assert found.samples == 12
    assert any("skipped" in line for line in found.cautions)
    assert any("12 samples; some were read more than once" in line for line in found.cautions)
    best = found.best(Work.DECODE)
    assert best is not None
    assert f"up to {best.samples_per_second.median:,.0f} samples/s" in found.meaning


def test_settings_have_fewer_runs_where_time_is_up_and_a_line_says_so(photos: Path) -> None:
    for seconds, counted in ((1e-9, 1), (1e9, 3)):
        asked = InputSettings([1, 2], [4], [Work.READ], samples=12)
        found = measure_input(FlatFolder(photos), asked, max_seconds=seconds, repeats=4, ranks=alone())

        assert [each.samples_per_second.repeats for each in found.results] == [counted] * 2
        assert any("Time was up" in line for line in found.cautions) == (counted < 3)


def test_ranks_read_at_the_same_time_and_none_reads_what_another_does(photos: Path) -> None:
    read: dict[int, list[int]] = {0: [], 1: []}

    class Noting(FlatFolder):
        rank = 0

        def path_of(self, sample: int) -> str:
            read[self.rank].append(sample)
            return super().path_of(sample)

    def part(ranks: Ranks) -> InputRates:
        source = Noting(photos)
        source.rank = ranks.rank
        asked = InputSettings([1], [4], [Work.READ], samples=4)
        return measure_input(source, asked, repeats=2, ranks=ranks)

    first, second = run(2, part)

    assert first.results == second.results
    assert (first.ranks, first.samples) == (2, 8)
    assert "on each of 2 ranks" in first.meaning
    # Two probes of a batch each; a rank looks a file up to drop its pages, and again to read it.
    assert len(set(read[0][:8])) == len(set(read[1][:8])) == 4
    assert not set(read[0][:8]) & set(read[1][:8])


def test_worker_processes_over_a_remote_store_are_not_forked(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that have read from it are not in them."""
    methods: list[str | None] = []

    class Noting:
        _iterator = None

        def __init__(self, *_: object, multiprocessing_context: str | None, **__: object) -> None:
            methods.append(multiprocessing_context)

    monkeypatch.setattr("penstock.bench.peer_torch.DataLoader", Noting)
    for objects in (None, "a client"):
        monkeypatch.setattr("penstock.bench.peer_torch.objects_in", lambda _, objects=objects: objects)
        with loader_named("torch")(Setting(FlatFolder(photos), Work.READ, 1, 4, "skip")):
            pass

    assert methods == [None, "forkserver"]


@pytest.mark.parametrize("name", [OWN, "torch"])
def test_a_loader_makes_passes_over_the_samples_that_it_is_given(photos: Path, name: str) -> None:
    source = FlatFolder(photos)
    for work, skipped in ((Work.READ, 0), (Work.DECODE, 1)):
        with loader_named(name)(Setting(source, work, 1, 4, "skip")) as passes:
            first, again = passes([7, 3, 5, 4, 1]), passes([2, 0])
        assert first.skipped == skipped
        assert again.skipped == 0
        assert first.seconds > 0
        if work is Work.DECODE:
            assert (first.samples, again.samples) == (4, 2)
    with loader_named(name)(Setting(source, Work.DECODE, 1, 4, "raise")) as passes, pytest.raises(DataError):
        passes([3, 7])


def test_loaders_that_are_not_installed_and_samples_that_are_no_pictures_are_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (tmp_path / f"{number}.jpg").write_bytes(b"no picture")
    monkeypatch.setitem(loaders.PEERS, "tensorflow", "tensorfloh.data")

    asked = InputSettings([1], [2], peers=["tensorflow"], samples=4)
    found = measure_input(FlatFolder(tmp_path), asked, repeats=2, ranks=alone())

    missing, undecoded = found.left_out
    assert missing == "tensorflow was left out: tensorfloh is not installed"
    assert undecoded.startswith("decoding was left out: ")
    assert {each.work for each in found.results} == {Work.READ}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "64"], "the source has 12 samples, fewer than a batch of 64"),
        (["--work", "write"], "--work is 'write'; it is read, decode or both"),
        (["--peers", "dali"], "there is no loader 'dali' to compare with: torch, tensorflow"),
        (["--threads", "0"], "--threads is '0'; it must be an integer of at least 1"),
        (["--repeats", "1", "--batch-size", "2"], "repeats is 1; the first is left out"),
        (["--shared", "/nowhere", "--batch-size", "2"], "/nowhere cannot be measured"),
        (["--on-error", "raise", "--batch-size", "12", "--work", "decode"], "07.jpg"),
        (["--seconds", "0"], "--seconds is 0.0; it must be finite and above zero"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    photos: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(file_rates, "_LEAST_BYTES", 1 << 60)  # its file would take seconds to write

    assert main(["bench", "input", str(photos), "--samples", "12", "--peers", "none", *arguments]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_space_for_the_file_is_named_or_left_out(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rates, "_LEAST_BYTES", 1 << 60)

    def measure(is_asked: bool) -> InputRates:
        return measure_input(
            open_source(photos),
            InputSettings([1], [2], [Work.READ], samples=4),
            repeats=2,
            beside=str(photos),
            is_beside_asked=is_asked,
            ranks=alone(),
        )

    with pytest.raises(
        DataError, match="free; measuring takes a quarter of it and at least 1153 PB: make some space"
    ):
        measure(True)
    found = measure(False)
    assert found.maximum is None
    assert any("maximum was left out" in line and "make some space" in line for line in found.left_out)


def test_a_rank_that_fails_ends_the_others_with_its_name(photos: Path) -> None:
    def part(ranks: Ranks) -> InputRates:
        asked = InputSettings([1], [12], [Work.DECODE], samples=12, on_error="raise")
        return measure_input(FlatFolder(photos), asked, ranks=ranks)

    for error in run(2, part):
        assert isinstance(error, DataError)
        assert re.search(r"rank [01] of 2, a run: .*07\.jpg", str(error))


def test_a_batch_that_ranks_cannot_share_equally_is_refused(photos: Path) -> None:
    def part(ranks: Ranks) -> InputRates:
        return measure_input(FlatFolder(photos), InputSettings([1], [3]), ranks=ranks)

    for error in run(2, part):
        assert isinstance(error, ConfigError)
        assert "a batch of 3 samples cannot be shared equally by 2 ranks" in str(error)


@pytest.mark.usefixtures("fonts")
def test_the_command_prints_json_and_draws(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(file_rates, "_LEAST_BYTES", 8 << 20)
    monkeypatch.setattr("penstock.bench.input_rates._MAXIMUM_SECONDS", 0.0)
    arguments = ["bench", "input", str(photos), "--threads", "1,2", "--batch-size", "4", "--samples", "8"]
    arguments += ["--repeats", "2", "--peers", "none", "--json", "--plot", str(photos.parent / "input.png")]

    assert main(arguments) == 0

    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert len(found["results"]) == 4
    assert found["sequential_read"] > 0
    one = found["results"][0]
    assert one["bytes_per_second"] == pytest.approx(one["samples_per_second"] * found["bytes_per_sample"])
    assert (photos.parent / "input.png").stat().st_size > 1000
