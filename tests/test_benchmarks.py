"""The benchmarks go on running, check their answers and print what they are for; quick figures mean nothing."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

Run = Callable[..., list[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs a benchmark quickly and returns the lines that it prints."""

    def run(name: str, *words: str) -> list[str]:
        file = BENCHMARKS / f"{name}.py"
        monkeypatch.syspath_prepend(file.parent)  # as of a program, for what lies beside it
        if name == "graph/steps":  # whose torch.export makes a bar of progress, and that a thread for ever
            import tqdm  # type: ignore[import-untyped]

            monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
        runpy.run_path(str(file))["main"](["--quick", *words])
        return capsys.readouterr().out.splitlines()

    return run


#: Words that start one, and how many lines fit each sign.
CASES: list[tuple[str, dict[str, int]]] = [
    ("plan", {r"M positions/s": 24, r" ms  \(": 2}),
    ("budget", {r" s to look at, .* s to plan, .* % padding$": 2, r"^packed: .* % of them padding$": 1}),
    ("caches", {r"^lru ": 4, r"has none": 6}),
    ("requests", {r" s wall ": 1, r"^(naive|staging|frequency|cover|push)": 15}),
    ("policies", {r"^slow store.* s:  1\.000": 3, r"^The most that another": 1}),
    ("policies --tiers", {r"^1, .* / ": 3, r"^ranks, reads, batches": 1}),
    ("tracing", {r"us/span$": 5, r"us/sample$": 1, r"us/row$": 2}),
    ("watching", {r"^[12]0 rows a second: .* of a core \(": 2}),
    (
        "recording",
        {r": recorded over not, wall .* CPU ": 3, r" CPU us/sample$": 1, r" MB of memory at most$": 1},
    ),
    (
        "overhead --batch-sizes 64",
        {
            r"^(scheduler|4 KB|rows of|mixture|  Data).* \(.* \(": 12,
            r"of a DataLoader's": 2,
            r"^time of a mixture": 2,
        },
    ),
    ("wear", {r"M pages/s$": 2}),
    ("graph/steps", {r"us a step, eager .* us: .* x": 7}),
    ("graph/steps --estimates", {r"pairs of .* heavy nodes are in order; estimates of these are": 5}),
    ("graph/placement", {r"behind the best fixed placement": 4}),
    (
        "graph/placed_workers",
        {r" of the best fixed placement; one ": 3, r"^behind .* at most": 1, r"up to .* x$": 3},
    ),
    (
        "loader/records",
        {r"^(?!FFCV).* \(.* to .*\(.* to ": 15, r", of gather.*: ": 2, r"single gets: .*wanted 5": 1},
    ),
    ("loader/tables", {r" \(.* to .*\(.* to ": 13, r"single gets: .* \(": 7, r"^rate of .* of datasets": 5}),
    ("loader/ragged", {r"samples/s \(.* x the best DataLoader": 28, r": 256 samples": 4}),
    ("loader/pairs", {r" us of processor time a sample$": 3, r"^both / .* to .* wanted 1\.1": 1}),
    (
        "loader/forms",
        {
            r"images/s .* ms of CPU an image$": 12,
            r"^.* / stored: .* times less$": 3,
            r"^.* / stored, on a disk: .* predicted ": 4,
            r"the first epoch, which writes: .* s, predicted .* for the start$": 4,
        },
    ),
    (
        "loader/promise",
        {r"[0-9]+ workers .* \(.* to .*\(.* to ": 8, r"^least of the medians: .* \(promised 0\.9\)$": 1},
    ),
    ("loader/workers --data dicts", {r"^(DataLoader|Penstock|bare).* [0-9,]+$": 9, r" x \(.* to ": 5}),
    ("loader/device", {r"^step .* ms": 2, r"^loader over resident data: ": 1, r"^late device: .* PASS$": 1}),
    (
        "loader/tiers",
        {
            r" reads of the store, bound .* of the run beside all in memory$": 5,
            r"^cold reads .* to memory ": 8,
            r"^processor time of a warm read .*\(wanted 1\.2\)$": 1,
        },
    ),
    ("loader/day", {r"^(records|objects|[0-9,]+ records).* steps: MB( [0-9]+){12}$": 5}),
    ("loader/self_tuning", {r": .* reads/s, the most .*; readers [0-9]": 3}),
    ("loader/jobs", {r" of one job's \(wanted 1\.1\); .* s of processors$": 8}),
    ("loader/objects", {r"^the store .* MB/s$": 1, r"^penstock .* of the link": 1}),
    ("loader/objects --cache 0.67", {r"^penstock .* of the data in 3 epochs, bound 1\.66; waited": 1}),
    ("snapshots/host_copies", {r" copies: blocked .* ms \(": 4, r"^with / without, ": 2}),
    ("fio_rates", {r"^  1 threads: .* MB/s, fio |fio is not installed": 3}),
    ("loader/known_store", {r" readers: .* in closed form \(": 6, r"^training: .* in closed form \(": 1}),
    ("scale/peers", {r"(share=host|each alone).* reads a sample, .* simulated, .* at least; .* waiting": 4}),
    ("scale/peers --hosts", {r"share=hosts: .* reads a sample, .* simulated, .* at least; .* waiting": 2}),
    ("scale/peers --link", {r"MB/s, messages alone .*ratio .* CPU seconds a GB": 1}),
    ("scale/peers --mapped", {r"^found (the first time|later).*: .* MB/s \(ratio ": 3}),
    ("scale/peers --simulated", {r" ranks, .* reads a sample, .* by the formula: .* \(aim ": 8}),
    ("scale/strong_scaling", {r"x DataLoader, 4 workers; waits .* reads a sample, ": 16}),
    (
        "scale/training_stalls",
        {r"^\| 5\.12, SqueezeNet \| [12] \|": 8, r"^5\.12: DataLoader waits up to ": 1},
    ),
    ("scale/local_batches", {r"^seed \d: balanced .*, local ": 2, r"^over seeds: balanced .*, local ": 1}),
    ("scale/placement", {r"^first-reader .* s of a processor, .* MiB$": 2}),
    ("scale/decode_servers", {r" samples/s \(.* x alone; .* % served$": 3}),
    ("scale/decode_servers --share 0.4", {r"median of pairs; wanted 2\.4$|^no cgroup can be made here": 1}),
    ("scale/decode_servers --sweep", {r"^ .* [0-9.]+ +[0-9.]+$": 30, r"^over the best fixed cut: ": 1}),
    ("catalog", {r" s \(.* of find \(": 8, r"^state_dict .* us \(": 1, r"^600 files in 3 folders": 1}),
]
#: Those that take a second at most; the slow tests have the others.
QUICK = ("tracing", "loader/records")


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # of torch.export
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *(pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in CASES),
        pytest.param("blocks", {r" x  \(": 3}, marks=pytest.mark.system),
    ],
)
def test_a_benchmark_prints_a_line_for_each_of_its_cases(run: Run, name: str, counts: dict[str, int]) -> None:
    lines = run(*name.split())

    assert {sign: sum(bool(re.search(sign, line)) for line in lines) for sign in counts} == counts


def test_the_benchmark_of_reading_prints_each_cost_beside_its_bound(run: Run) -> None:
    lines = run("reading")

    assert [line.split("  ")[0] for line in lines if line.startswith(("read", "keep"))] == [
        "read_into", "read", "keep in a fresh memory tier", "read_group, threads: 1", "read, threads: 1",
        "read_group, threads: 2", "read, threads: 2",
    ]  # fmt: skip
    assert sum("bound: " in line for line in lines) in (2, 4)  # without or with a C compiler


def test_the_benchmark_of_watching_prints_the_cost_beside_the_bare_loop(run: Run) -> None:
    steps = [line[:9].strip() for line in run("watch") if line.endswith("us/step")]
    assert steps == ["bare loop", "handed on", "watched"]


@pytest.mark.slow
def test_the_benchmark_of_what_is_first_times_a_cold_start_of_each(run: Run) -> None:
    assert [line.partition(", cold: ")[0] for line in run("first_use")[1:]] == [
        "penstock.Loader, first batch",
        "penstock.torch.Loader, first batch",
        "SnapshotStore, first save of 1 MB",
    ]


@pytest.mark.slow
def test_the_benchmark_of_images_prints_recipes_beside_their_bounds(
    run: Run, image_folder: Callable[..., Path]
) -> None:
    recipes = ("ColorJitter", "RandAugment")
    wanted = [f"{kind} {recipe}" for recipe in recipes for kind in ("penstock", "same calls,")]

    lines = run("loader/images", "--images", str(image_folder(64, width=300, height=260)), "--only", *wanted)

    for recipe in recipes:
        assert sum(line.startswith(f"penstock {recipe} / bound") for line in lines) == 1


@pytest.mark.slow
def test_the_benchmark_of_workers_for_a_folder_prints_what_was_chosen_beside_both(
    run: Run, image_folder: Callable[..., Path]
) -> None:
    lines = run("loader/folder_workers", "--images", str(image_folder(64, width=300, height=260)))

    assert "threads, without a trial" in lines
    assert sum(bool(re.search(r"^(workers|threads).* [0-9,]+ +[0-9,]+$", line)) for line in lines) == 3
    assert lines[-1].startswith("auto / the faster: ")


@pytest.mark.slow
def test_the_benchmark_of_bundles_trains_compares_and_counts(run: Run, tmp_path: Path) -> None:
    lines = run("bundles", "--out", str(tmp_path / "study.json"))

    assert lines[0].startswith("16 trainings of 3 epochs")
    assert sum("less full shuffle" in line for line in lines) == 8
    assert "Table 1" in lines[-1]
    assert len(json.loads((tmp_path / "study.json").read_text())["runs"]) == 16


def test_unequal_files_lose_hits_of_bundles_and_none_of_a_full_shuffle(run: Run) -> None:
    rows = [line.split() for line in run("bundles", "--file-sizes")]
    original, proposed = (
        [float(row[row.index(name) + 1]) for row in rows] for name in ("original", "proposed")
    )

    assert all(abs(hits - 12.27) < 0.3 for hits in original)
    assert proposed[0] > 39.9
    assert proposed == sorted(proposed, reverse=True)


@pytest.fixture
def cpu_groups(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of benchmarks/scale that limits processes by cgroups."""
    monkeypatch.syspath_prepend(BENCHMARKS / "scale")
    return importlib.import_module("_cpu_groups")


def test_a_group_that_cannot_be_removed_leaves_none_of_the_others(
    cpu_groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    def remove(group: Path) -> None:
        removed.append(group.name.rpartition("-")[2])
        if removed[-1] == "two":
            raise OSError("busy")

    monkeypatch.setattr(cpu_groups, "_base", lambda: (tmp_path, True))
    monkeypatch.setattr(cpu_groups, "_remove", remove)

    with pytest.raises(OSError, match="busy"), cpu_groups.cpu_groups(["one", "two", "three"], 0.5, 0.1):
        pass

    assert set(removed) == {"one", "two", "three"}


def test_a_group_is_counted_where_one_of_its_processes_has_just_ended(
    cpu_groups: Any, tmp_path: Path
) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    (tmp_path / "cpu.stat").write_text("nr_periods 3\nnr_throttled 1\n")
    (tmp_path / "cgroup.procs").write_text(f"{ended.pid}\n{os.getpid()}\n")

    assert cpu_groups.counts_of(tmp_path)[1:] == (3, 1)
