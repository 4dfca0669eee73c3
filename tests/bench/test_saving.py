"""`penstock bench checkpoint`: ways of saving, what they cost, what is refused, and that nothing is left."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.ranks.in_memory import run

from penstock.bench import saving
from penstock.bench.checks import rounds
from penstock.bench.pictures import draw_saving
from penstock.bench.savers import OWN, saver_named
from penstock.bench.saving import (
    SavingResult,
    SavingResults,
    SavingRun,
    SyntheticTraining,
    Way,
    check_space,
    measure_saving,
    ways_of,
)
from penstock.bench.traffic import Flow
from penstock.checkpoint import SnapshotStore
from penstock.cli.main import main
from penstock.errors import ConfigError, DataError
from penstock.measure.spread import Spread
from penstock.ranks import Ranks, alone

FLOW = Flow("block devices", np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 5.0]))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A slow and a fast folder; codecs are used as they are, compiled or not."""
    monkeypatch.setattr(saving, "_compile_codecs", lambda: None)
    for name in ("slow", "fast"):
        (tmp_path / name).mkdir()
    return tmp_path / "slow", tmp_path / "fast"


def test_each_way_saves_and_leaves_nothing_behind(folders: tuple[Path, Path]) -> None:
    waited: list[float] = []
    workload = SyntheticTraining(100_000, 1.0, waited.append)
    done: list[None] = []

    found = measure_saving(
        *folders, workload, peers=["torch"], steps=4, every=2, repeats=2, done=lambda: done.append(None)
    )

    assert [each.way for each in found.results] == ways_of(["torch"])
    assert len(done) == 2 * len(found.results) == 12
    assert len(waited) == 12 * 4
    assert (found.saves, found.state_bytes, found.left_out) == (2, 100_000, ())
    assert [os.listdir(folder) for folder in folders] == [[], []]
    for each in found.results:
        assert (each.blocked_seconds > 0) == bool(each.way.saver)
        assert each.durable_seconds >= each.blocked_seconds or each.way.saver == OWN
        assert each.run_seconds.repeats == 1


@pytest.mark.parametrize("name", ["torch", pytest.param("dcp", marks=pytest.mark.slow), OWN])
def test_what_a_saver_saved_is_there_when_it_has_settled(folders: tuple[Path, Path], name: str) -> None:
    slow, fast = folders
    workload = SyntheticTraining(50_000, 1.0, lambda _: None)
    through = fast / "buffer" if name == OWN else None
    with saver_named(name)(workload.state(), (1, 2, 3), slow / "saves", through, alone()) as saver:
        for step in (1, 2, 3):
            workload.compute(is_saved=True)
            saver.save(step, workload.state())
        saver.settle()
        wanted = workload.state()["array 0"]

        if name == OWN:
            with SnapshotStore(slow / "saves", report=None) as store:
                assert np.array_equal(store.restore(3)["array 0"], wanted)
        else:
            assert sorted(os.listdir(slow / "saves")) == ["step-2", "step-3"]
        if name == "torch":
            import torch

            assert np.array_equal(torch.load(slow / "saves" / "step-3")["array 0"].numpy(), wanted)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_interrupts_pytorchs_dcp_ends_the_benchmark(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def interrupted(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(FileSystemWriter, "write_data", interrupted)
    slow, _ = folders
    workload = SyntheticTraining(1000, 1.0, lambda _: None)
    with (
        saver_named("dcp")(workload.state(), (1,), slow / "saves", None, alone()) as saver,
        pytest.raises(error),
    ):
        saver.save(1, workload.state())


@pytest.mark.parametrize("name", ["torch", pytest.param("dcp", marks=pytest.mark.slow), OWN])
def test_a_folder_that_can_no_longer_be_written_is_named(folders: tuple[Path, Path], name: str) -> None:
    """In its place is a file, as where the device of a mount has vanished."""
    slow, _ = folders
    workload = SyntheticTraining(50_000, 1.0, lambda _: None)

    def save_there() -> None:
        with saver_named(name)(workload.state(), (1,), slow / "saves", None, alone()) as saver:
            (slow / "saves").rename(slow / "gone")
            (slow / "saves").touch()
            saver.save(1, workload.state())
            saver.settle()

    with pytest.raises(DataError, match=re.escape(f"could not save to {slow / 'saves'}: ")) as error:
        save_there()
    assert "is there space" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_becomes_another_one_is_not_measured_on(folders: tuple[Path, Path]) -> None:
    """Below a mount whose device vanishes there is a folder of the same name, on another disk."""
    slow, _ = folders

    def vanish(_: float) -> None:
        if not slow.with_name("gone").exists():
            slow.rename(slow.with_name("gone"))
            slow.mkdir()

    workload = SyntheticTraining(1000, 1.0, vanish)
    with pytest.raises(DataError, match=f"{slow} was moved, removed or unmounted"):
        measure_saving(*folders, workload, steps=2, every=1, repeats=2)


def test_the_state_changes_before_a_save_and_only_then() -> None:
    """Nobody's snapshots would differ otherwise, and a delta would be empty."""
    workload = SyntheticTraining((8 << 20) + 10, 1.0, lambda _: None)
    first, last = ({name: array.copy() for name, array in workload.state().items()} for _ in range(2))

    workload.compute(is_saved=False)
    assert all(np.array_equal(workload.state()[name], first[name]) for name in first)
    workload.compute(is_saved=True)
    assert all((workload.state()[name] != last[name]).mean() > 0.9 for name in last)
    assert len(first) == 2
    assert workload.state_bytes == (8 << 20) + 12


def test_a_run_has_as_many_steps_as_there_is_time_for_and_two_saves_at_least(
    folders: tuple[Path, Path],
) -> None:
    for seconds, steps in ((0.0, 10), (math.inf, 20)):
        waited: list[float] = []
        workload = SyntheticTraining(1000, 1.0, waited.append)

        found = measure_saving(
            *folders, workload, steps=None, every=5, repeats=2, max_seconds=seconds, ranks=alone()
        )

        assert (found.steps, found.saves) == (steps, steps // 5)
        assert len(waited) == len(found.results) * (5 + steps)


def test_one_slow_save_moves_no_median() -> None:
    def run(*blocked: float) -> SavingRun:
        return SavingRun(10.0, blocked, blocked, 0.0, FLOW)

    found = saving._result(Way("torch", "slow"), [run(50.0, 50.0), run(1.0, 1.1), run(1.0, 90.0)])

    assert found.blocked_seconds == pytest.approx(1.05)


def test_rounds_are_two_at_least_and_more_while_one_more_ends_in_time() -> None:
    """Each takes ten seconds."""
    for seconds, count in ((1.0, 2), (29.0, 2), (30.0, 3), (1e9, 4)):
        moments = iter([0, *range(0, 100, 10)])  # at the beginning, and before each round
        assert list(rounds(4, seconds, alone(), moments.__next__)) == list(range(count))


def test_the_factor_is_explained_by_what_saves_cost() -> None:
    def result(saver: str, place: str, seconds: float, blocked: float) -> SavingResult:
        return SavingResult(
            Way(saver, place), Spread(seconds, seconds, seconds, 2), blocked, 0.2, 7.0, FLOW, seconds
        )

    def meaning(direct_seconds: float, burst_seconds: float) -> str:
        direct = result("torch", "slow", direct_seconds, (direct_seconds - 10) / 5)
        burst = result(OWN, "burst", burst_seconds, 0.1)
        return SavingResults((result("", "", 10.0, 0.0), direct, burst), 10**9, 100, 5, ()).meaning

    found = meaning(15.0, 10.5)
    assert (
        "for 100 ms through the burst buffer, for 1 s with torch.save straight to the slow storage" in found
    )
    assert "the run is 1.43 times as fast (published: 2.6)" in found
    assert "No way of saving makes it more than 1.50 times as fast here, where 33 % of the run" in found
    assert "everything 7 s after the run" in found
    assert "CAUTION" not in found
    assert "CAUTION" in meaning(15.0, 20.0)  # slower than straight to the slow storage
    assert "CAUTION" in meaning(10.1, 5.0)  # faster than without any save
    reached = meaning(30.0, 10.5)
    assert "2.86 times as fast" in reached
    assert "No way of saving" not in reached


def test_a_flow_is_divided_at_the_end_of_the_run() -> None:
    assert FLOW.total_bytes == 10 + 20 + 2 * 5
    assert [FLOW.before(moment) for moment in (0.0, 1.5, 3.0, 9.0)] == [0, 20, 35, 40]


def test_pytorch_that_is_not_installed_is_left_out_and_said(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        if name != OWN:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return saver_named(name)

    monkeypatch.setattr(saving, "saver_named", missing)

    found = measure_saving(
        *folders, SyntheticTraining(1000, 1.0, lambda _: None), peers=["dcp"], steps=1, every=1, repeats=2
    )

    assert found.left_out == ("dcp was left out: torch is not installed",)
    assert {each.way.saver for each in found.results} == {"", OWN}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--every", "9", "--steps", "4"], "every is 9 and steps 4; at least one save falls into a run"),
        (["--repeats", "1"], "repeats is 1; the first is left out"),
        (["--peers", "orbax"], "there is no way of saving 'orbax' to compare with: torch, dcp"),
        (["--model", "vgg"], "--model is 'vgg'"),
        (["--model", "alexnet", "--state-size", "1GB"], "--model and --state-size do not go together"),
        (["--to", "/nowhere"], "--to /nowhere: there is no such folder"),
        (["--fast", "/proc/self"], "/proc/self cannot be written"),
    ],
)
def test_what_cannot_be_saved_is_one_line(
    folders: tuple[Path, Path], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--to", str(folders[0]), "--fast", str(folders[1])]
    given += [] if "--model" in arguments else ["--state-size", "1kB"]

    assert main(["bench", "checkpoint", *given, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_without_space_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="free; the snapshots of a run take up to 1000 PB: make some space"):
        check_space(tmp_path, 10**18)
    with pytest.raises(ConfigError, match="every is 0"):
        measure_saving(tmp_path, tmp_path, SyntheticTraining(10, 1.0), steps=1, every=0, repeats=2)


@pytest.mark.usefixtures("fonts")
def test_all_of_what_was_written_is_within_the_picture() -> None:
    def result(way: Way, scale: float) -> SavingResult:
        flow = Flow("block devices", scale * FLOW.seconds, scale * FLOW.rates)
        return SavingResult(way, Spread(1.0, 1.0, 1.0, 2), 0.1, 0.1, 0.1, flow, 1.0)

    results = tuple(result(way, 1.0 + number) for number, way in enumerate(ways_of([])))
    axes = draw_saving(SavingResults(results, 1, 4, 2, ())).axes[1]

    flows = [line for line in axes.get_lines() if len(line.get_xdata()) > 2]  # type: ignore[arg-type]
    assert len(flows) == 3
    for of_line, (least, most) in (("get_xdata", axes.get_xlim()), ("get_ydata", axes.get_ylim())):
        values = np.concatenate([getattr(line, of_line)() for line in flows])
        assert least == 0.0
        assert values.max() <= most


@pytest.mark.usefixtures("fonts")
def test_the_command_prints_json_and_draws_and_waits_for_ranks_as_long_as_it_may_take(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def ranks(timeout_seconds: float) -> Ranks:
        limits.append(timeout_seconds)
        return alone()

    monkeypatch.setattr("penstock.ranks.ranks_of_this_job", ranks)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", ModuleType("mpi4py.MPI"))
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    slow, fast = folders
    picture = slow.parent / "saves.png"
    arguments = [
        "bench", "checkpoint", "--to", str(slow), "--fast", str(fast), "--peers", "none", "--steps", "2",
    ]  # fmt: skip
    arguments += ["--every", "1", "--repeats", "2", "--state-size", "10kB", "--step-seconds", "1ms", "--json"]

    assert main([*arguments, "--seconds", "300", "--plot", str(picture)]) == 0

    assert limits == [300]

    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    shown = [(each["saver"], each["place"]) for each in found["results"]]
    assert shown == [(None, None), (OWN, "slow"), (OWN, "fast"), (OWN, "burst")]
    assert picture.stat().st_size > 1000


def test_ranks_save_one_state_together_and_the_slowest_counts(folders: tuple[Path, Path]) -> None:
    def part(ranks: Ranks) -> SavingResults:
        workload = SyntheticTraining(100_000, 1.0, lambda _: None)
        return measure_saving(*folders, workload, peers=["torch"], steps=2, every=1, repeats=2, ranks=ranks)

    first, second = run(2, part)

    assert first.ranks == second.ranks == 2
    for one, other in zip(first.results, second.results, strict=True):
        assert (one.way, one.run_seconds, one.blocked_seconds) == (
            other.way,
            other.run_seconds,
            other.blocked_seconds,
        )
    assert [os.listdir(folder) for folder in folders] == [[], []]
