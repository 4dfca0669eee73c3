"""`penstock plan` as a user types it: with a real scenario, small enough for a test, and real predictions."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from penstock.cli.plan import add_plan
from penstock.errors import ConfigError
from penstock.measure.sweep import Finished, Outcome, Runner, Task
from penstock.measure.sweep_processes import in_processes
from penstock.measure.sweep_store import KeptPoints
from penstock.simulate.scenario import scenario_named
from penstock.simulate.sizes import SizeDistribution

pytestmark = pytest.mark.usefixtures("fonts")

GB = 10**9


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict in turn: a process of its own for each command takes longer to begin than these small sweeps."""

    def in_turn(tasks: Sequence[Task], work: Callable[[Task], Outcome]) -> Finished:
        yield from ((task, work(task)) for task in tasks)

    def checked(jobs: int) -> Runner:
        in_processes(jobs)
        return in_turn

    monkeypatch.setattr("penstock.measure.sweep_processes.in_processes", checked)


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """300 samples of 1 MB for 3 epochs on the hosts of the thesis."""
    small = replace(
        scenario_named("scenario1"),
        name="small",
        data=SizeDistribution("normal", 300, {"loc": 1e6, "scale": 1e5}),
        batch_size=20,
        epochs=3,
    )
    (tmp_path / "small.toml").write_text(small.to_toml())
    monkeypatch.chdir(tmp_path)
    return tmp_path / "small.toml"


def plan(*arguments: str | Path) -> None:
    parser = argparse.ArgumentParser()
    add_plan(parser.add_subparsers())
    options = parser.parse_args(["plan", *map(str, arguments)])
    options.run(options)


#: The command as a process of its own.
COMMAND = [
    sys.executable,
    "-c",
    """
import argparse
from penstock.cli.plan import add_plan

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_plan(parser.add_subparsers())
    options = parser.parse_args()
    options.run(options)
""",
    "plan",
]


def test_what_the_loader_runs_is_named_beside_the_best_and_the_slow_beside_the_fast(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank with memory and a disk runs today, and the memory of the other of two ranks does not."""
    common = (
        scenario, "--price", "memory=3/GB", "--price", "local-disk=0.01/GB", "--within", "200%", "--jobs",
        "1",
    )  # fmt: skip
    plan(*common, "--ranks", "1,2", "--memory", "0,400MB", "--local-disk", "400MB")

    out = capsys.readouterr().out
    assert "It runs what is named above." in out
    assert re.search(
        r"With 1 rank the run takes [12]\.\d\d times as long as the fastest, .* with 2 ranks", out
    )

    plan(
        *common, "--ranks", "1,2", "--memory", "100MB,400MB", "--local-disk", "0", "--price", "rank=1",
        "--deadline", "1h",
    )  # fmt: skip

    out = capsys.readouterr().out
    assert "reads other ranks' memory where share=" in out
    assert "The cheapest within 200 % of the lower bound and 3,600 s: 1 rank" in out
    assert "It runs what is named above." in out
    assert "times as long" not in out
    values = json.loads(Path("plan-out/plan.json").read_text())
    assert {(row["ranks"], row["is_runnable"]) for row in values["results"]} == {(1, True), (2, False)}


@pytest.mark.slow
def test_the_readmes_question_has_the_answer_that_the_readme_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (command,) = re.findall(r"^penstock plan (.*)$", text, re.MULTILINE)
    (quoted,) = re.findall(r"^```text\n(Lower bound.*?)^```", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)

    plan(*shlex.split(command), "--jobs", "1")

    assert quoted in capsys.readouterr().out


def test_the_cheapest_machine_is_named_and_all_are_kept(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(
        *(
            scenario, "--memory", "0,100MB", "--local-disk", "0,200MB", "--policies",
            "frequency,naive,lbann-preloading",
        ),
        *("--staging", "40MB", "--price", "memory=3/GB", "--price", "local-disk=0.1/GB", "--within", "100%"),
        *("--jobs", "1", "--plot", "plan.png"),
    )  # fmt: skip

    out = capsys.readouterr().out
    assert "Price against time" in out
    assert re.search(
        r"The cheapest within 100 % of the lower bound: 4 ranks, staging 40 MB, .*frequency", out
    )
    assert "N/A" in out
    assert "without a result, lbann-preloading: " in out
    assert (tmp_path / "plan.png").stat().st_size > 5_000
    rows = parquet.read_table(tmp_path / "plan-out" / "points.parquet").to_pylist()
    assert len(rows) == 4 * 3
    assert json.loads((tmp_path / "plan-out" / "plan.json").read_text())["scenario"] == "small"
    by_place = {(row["memory_bytes"], row["local_disk_bytes"], row["policy"]): row for row in rows}
    assert by_place[0, 0, "lbann-preloading"]["status"] == "not supported"
    # Nothing kept: the store is read for all 900 uses; naive waits for each of them.
    assert by_place[0, 0, "frequency"]["store_reads_share"] == 1.0
    assert by_place[0, 0, "naive"]["run_seconds"] > by_place[0, 0, "frequency"]["run_seconds"]
    assert by_place[100 * 10**6, 0, "frequency"]["store_reads_share"] < 0.7
    assert all(row["run_seconds"] is None or row["slowdown"] >= 0 for row in rows)


def test_what_was_computed_before_is_not_computed_again(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.plan._LONG_SECONDS", 0.0)
    arguments = (scenario, "--ranks", "1", "--memory", "100MB", "--local-disk", "0", "--jobs", "1", "--json")
    plan(*arguments)
    told = capsys.readouterr()
    first = json.loads(told.out)
    lines = (tmp_path / "plan-out" / "points.jsonl").read_bytes()
    assert "2 rows are predicted read by read: about 0 s of one core" in told.err

    plan(*arguments)

    told = capsys.readouterr()
    assert json.loads(told.out) == first
    assert told.err == ""
    assert (tmp_path / "plan-out" / "points.jsonl").read_bytes() == lines


def test_without_prices_what_nothing_can_be_taken_away_from_is_listed(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(scenario, "--memory", "100MB,300MB", "--local-disk", "0", "--within", "500%", "--jobs", "1")

    out = capsys.readouterr().out
    assert "No price is given" in out
    assert "memory 100 MB, local disk none, frequency: " in out
    assert "price" not in out.splitlines()[2]


def test_where_none_suffices_the_closest_is_said(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(scenario, "--memory", "0", "--local-disk", "0", "--within", "0%", "--jobs", "1")

    assert "None is within 0 % of the lower bound. The closest: 4 ranks" in capsys.readouterr().out


def test_without_any_result_the_reasons_are_told_and_the_command_fails(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="no point has a result"):
        plan(scenario, "--memory", "0", "--local-disk", "0", "--policies", "lbann-preloading", "--jobs", "1")

    assert "1 without a result, lbann-preloading: " in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "plan-out" / "plan.json").read_text())["results"][0]["status"]
        == "not supported"
    )


def test_a_long_table_is_printed_only_when_asked_for(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (scenario, "--samples", "40", "--memory", "1MB..31MB+1MB", "--local-disk", "0", "--jobs", "1")
    plan(*arguments)
    short = capsys.readouterr().out
    plan(*arguments, "--all")
    whole = capsys.readouterr().out

    assert "The table of all 31 rows is left out: --all prints it." in short
    assert "over bound" not in short
    assert "Lower bound, 4 ranks" in short
    assert "over bound" in whole
    assert "is left out" not in whole


def test_a_free_network_and_ranks_without_samples_are_said(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.write_text(re.sub(r"^network = .*$", "", scenario.read_text(), flags=re.MULTILINE))
    plan(scenario, "--ranks", "1,8", "--batch-size", "4", "--epochs", "1", "--samples", "40", "--jobs", "1")
    many = capsys.readouterr().out
    plan(scenario, "--ranks", "1", "--epochs", "1", "--samples", "40", "--jobs", "1")
    one = capsys.readouterr().out

    assert "machine.network is not given" in many
    assert "A global batch has 4 samples, fewer than 8 ranks" in many
    assert "machine.network" not in one
    assert "A global batch" not in one


WRONG = [
    (
        ["--memory", "0,99999999999999TB"],
        "--memory '0,99999999999999TB': '99999999999999TB' is more than any machine has",
    ),
    (["--policies", "lower-bound"], "--policies names only lower-bound"),
    (["--memory", "10"], "--memory '10': '10' has no unit"),
    (["--staging", "0"], "--staging '0': '0' is no space at all"),
    (["--ranks", "0"], "--ranks '0': '0' is not an integer of at least 1"),
    (["--local-disk", "10GB..5GB*2"], "is no range"),
    (["--local-disk-read", "0MB/s"], "--local-disk-read: "),
    (["--policies", "frequency,best"], "policy 'best' is not known.*lower-bound, naive"),
    (["--price", "memory"], "--price 'memory'"),
    (["--within", "5"], "--within: '5' is more than all of it"),
    (["--deadline", "soon"], "--deadline: "),
    (["--deadline", "0s"], "--deadline is '0s'"),
    (["--jobs", "0"], "--jobs is 0"),
    (["--ray", ""], "--ray is empty"),
    (["--plot", "plan.txt"], "no picture"),
    (["--keep", "1 crops"], "--keep: keep is '1 crops'"),
    (["--keep", "auto"], '--keep is "auto"'),
    (["--kept-size", "1 MB"], "--kept-size is given, and samples are kept as stored"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_what_cannot_be_is_said_before_anything_is_computed(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said) if said.startswith("--") else said):
        plan(scenario, *arguments)

    assert not (tmp_path / "plan-out").exists()


def test_a_scenario_that_is_none_is_told_by_name_or_by_file_and_field(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="scenario1, scenario2, scenario3, scenario4"):
        plan("scenario9")

    scenario.write_text(scenario.read_text().replace("batch_size = 20", "batch_size = -20"))
    with pytest.raises(ConfigError, match=r"small\.toml: training\.batch_size.*-20"):
        plan(scenario)


def test_a_machine_whose_training_has_no_speed_is_refused(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.write_text(re.sub(r"^compute = .*$", "", scenario.read_text(), flags=re.MULTILINE))

    with pytest.raises(ConfigError, match=r"small\.toml: machine\.compute is missing"):
        plan(scenario)


def test_a_folder_in_use_is_left_alone(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        KeptPoints(tmp_path / "plan-out"),
        pytest.raises(ConfigError, match="in use by another penstock plan"),
    ):
        plan(scenario)


def test_what_is_no_folder_is_refused_by_the_option(scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "plan-out").touch()
    with pytest.raises(
        ConfigError, match=r"plan-out cannot be a folder \(File exists\): give another .* --out"
    ):
        plan(scenario)


OWN_POLICY = """
import os, threading
from penstock.policy.loading import Loading

class Hangs:
    name = "hangs"

    def prepare(self, job):
        if job.ranks == 2:
            with open("hangs", "w") as pipe:
                pipe.write(str(os.getpid()))
            threading.Event().wait()
        return Loading()
"""


def told_through(pipe: Path, process: subprocess.Popen[str]) -> int:
    """Wait until the task that hangs is at work and tells its process, or the command has ended too early."""
    told, ended = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([told, ended], [], [], 60)
        assert told in ready, process.communicate()
        return int(os.read(told, 20))
    finally:
        os.close(told)
        os.close(ended)


@pytest.mark.slow
def test_ctrl_c_says_what_is_kept_and_a_policy_of_ones_own_is_run(scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_POLICY)
    os.mkfifo(tmp_path / "hangs")
    arguments = [scenario.name, "--ranks", "1,2", "--policies", "own:Hangs", "--jobs", "1"]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = told_through(tmp_path / "hangs", process)

    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate()

    assert out == ""
    told, *traceback = errors.splitlines()
    assert (
        told
        == "penstock: 3 of 4 predictions are done and kept in plan-out; the same command continues from there"
    )
    assert traceback[-1] == "KeyboardInterrupt"  # of which `main` makes one line and the status 130
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    with KeptPoints(tmp_path / "plan-out") as points:
        assert len(points.kept()) == 3


@pytest.mark.slow
def test_the_same_command_runs_on_ray_and_prints_the_same_json(scenario: Path, tmp_path: Path) -> None:
    def json_of(*arguments: str) -> dict[str, Any]:
        result = subprocess.run(
            [*COMMAND, scenario.name, "--memory", "0,100MB", "--json", "--jobs", "1", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        values: dict[str, Any] = json.loads(result.stdout)
        for row in (*values["results"], *values["least"], values["closest"] or {}):
            row.pop("took_seconds", None)
        return values

    assert json_of("--ray", "local", "--out", "on-ray") == json_of("--out", "here")


def test_the_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        plan("--help")

    out = capsys.readouterr().out
    for option in (
        "--memory",
        "--local-disk",
        "--staging",
        "--price",
        "--within",
        "--ray",
        "--json",
        "--plot",
    ):
        assert option in out
