"""`penstock simulate loading`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.simulate import scheduled
from penstock.simulate.policies import POLICY_NAMES
from penstock.simulate.scenario import scenario_named
from penstock.simulate.scheduled import ORIGINS

_SMALL = ("simulate", "loading", "scenario1", "--samples", "1000", "--epochs", "3")


pytestmark = pytest.mark.usefixtures("fonts")


def _json(capsys: pytest.CaptureFixture[str], *arguments: str, scenario: str = "scenario1") -> dict[str, Any]:
    assert main([*_SMALL[:2], scenario, *_SMALL[3:], "--json", *arguments]) == 0
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    return data


def test_every_policy_is_a_row_of_a_table_that_a_terminal_can_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*_SMALL]) == 0

    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert set(POLICY_NAMES) <= set(rows)
    assert rows["lower-bound"][2] == "1.000"
    assert rows["naive"][-1] == "3.00"  # times the data set
    assert rows["naive"][-4:-1] == ["100.0", "0.0", "0.0"]
    table = [line.rstrip() for line in shown.splitlines() if line.startswith(" ")]
    assert max(map(len, table)) <= 98  # with what pads its ends, 100
    assert "BatchNorm" in shown


def test_na_is_said_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "simulate", "loading", "scenario3", "--epochs", "1", "--policies", "lbann-dynamic,lower-bound",
    ]  # fmt: skip
    assert main(arguments) == 0

    shown = capsys.readouterr().out
    assert any(line.split() == ["lbann-dynamic", "N/A"] for line in shown.splitlines())
    assert "N/A: lbann-dynamic keeps the whole data set (600," in shown


def test_json_has_the_keys_that_its_help_documents(capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(capsys, "--policies", "naive,cover+local", "--repeats", "2")

    assert set(data) == {"scenario", "repeats", "results"}
    assert data["repeats"] == 2
    for run in data["results"]:
        assert set(run) == {
            "policy", "ranks", "is_runnable", "not_runnable_reason", "run_seconds", "run_seconds_by_repeat",
            "spread_seconds", "reason",
            "initial_stall_seconds", "stall_seconds_of_ranks", "store_read_bytes", "data_set_bytes", "shares",
        }  # fmt: skip
        assert len(run["run_seconds_by_repeat"]) == 2
        assert run["run_seconds"] == pytest.approx(sum(run["run_seconds_by_repeat"]) / 2)
        assert set(run["shares"]) == set(ORIGINS)
        assert len(run["stall_seconds_of_ranks"]) == run["ranks"] == 4


def test_scaling_is_a_table_per_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    runs = _json(capsys, "--policies", "lower-bound", "--scaling", "1,2,4")["results"]

    assert [run["ranks"] for run in runs] == [1, 2, 4]
    # A batch of unequal samples ends with its slowest rank: not quite four times as fast.
    assert 3.0 < runs[0]["run_seconds"] / runs[2]["run_seconds"] < 4.0
    assert main([*_SMALL, "--policies", "lower-bound", "--scaling", "1,2"]) == 0
    shown = capsys.readouterr().out
    assert "scenario1: 1 rank, " in shown
    assert "scenario1: 2 ranks" in shown


def test_a_policy_of_ones_own_runs_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_own_loading.py").write_text(
        "from penstock.policy.loading import Loading\n\n\n"
        "class Lazy:\n    name = 'lazy'\n\n    def prepare(self, job):\n        return Loading(stages=False)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    own, naive = _json(capsys, "--policies", "my_own_loading:Lazy, naive")["results"]

    assert own["policy"] == "lazy"
    assert own["run_seconds"] == naive["run_seconds"]


def test_pictures_are_drawn_of_policies_and_of_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("a.png", ()), ("b.png", ("--scaling", "1,2"))):
        assert main([*_SMALL, "--policies", "naive,cover", "--plot", str(tmp_path / name), *more]) == 0
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "cover" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policies", "frequence"), "'frequency' is meant, perhaps. Known are lower-bound"),
        (("--policies", "naive,,cover"), "policy '' is not known"),
        (("--policies", ""), "--policies is '': give at least one name"),
        (("--samples", "3999999999", "--epochs", "1000"), "of memory; this machine has"),
        (("--samples", "1000000000000"), "samples is 1,000,000,000,000; at most 4,000,000,000"),
        (("--plot", "policies"), "no ending"),
        (("--repeats", "0"), "--repeats is 0"),
        (("--scaling", "1,x"), "--scaling is '1,x'"),
        (("--scaling", "0"), "--scaling is '0'"),
        (("--plot", "policies.txt"), "no picture"),
        (("--plot", "no/such/folder.png"), "there is no folder"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_computed(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compute(*_: object, **__: object) -> None:
        raise AssertionError("it was computed")

    monkeypatch.setattr(scheduled, "run_job", compute)

    assert main([*_SMALL, *arguments]) == 1
    assert said in capsys.readouterr().err


def test_the_fastest_policy_that_the_loader_runs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = scenario_named("scenario1")
    memory_alone = replace(scenario.machine, ranks=1, storage=scenario.machine.storage[:2])
    file = tmp_path / "one.toml"
    file.write_text(replace(scenario, machine=memory_alone).to_toml())
    (tmp_path / "own_of_the_table.py").write_text(
        "import numpy as np\nfrom penstock.policy.loading import Fill, Loading\n\n\n"
        "class Few:\n    name = 'few'\n\n"
        "    def prepare(self, job):\n        return Loading([Fill(r, 1, np.arange(9)) for r in job.asking])\n"
    )
    monkeypatch.chdir(tmp_path)

    own, cover = _json(capsys, "--policies", "own_of_the_table:Few,cover", scenario=str(file))["results"]
    assert (own["is_runnable"], own["not_runnable_reason"]) == (True, None)
    assert "policy 'cover' yet, which hands samples from rank to rank" in cover["not_runnable_reason"]

    assert main(["simulate", "loading", str(file), *_SMALL[3:], "--scaling", "1,2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"1 rank: the fastest is .* of these the loader of this version runs frequency", out)
    assert re.search(r"2 ranks: the fastest is .* the loader of this version runs frequency-alone", out)


def test_a_staging_buffer_without_space_for_batches_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = scenario_named("scenario1")
    staging = replace(scenario.machine.storage[0], capacity_bytes=1000)
    file = tmp_path / "small.toml"
    file.write_text(replace(scenario, machine=replace(scenario.machine, storage=(staging,))).to_toml())

    assert main(["simulate", "loading", str(file), *_SMALL[3:], "--policies", "staging,frequency"]) == 0
    assert "runs none of these: storage 'staging' is 1 kB; 3 batch slots of" in capsys.readouterr().out


def test_ctrl_c_ends_with_its_own_status_and_no_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The fixture that watches every test sees threads that are left.
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduled, "run_job", interrupt)

    assert main([*_SMALL]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_policy_that_is_named_twice_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--policies", "cover,cover", "--json"]) == 0

    assert [run["policy"] for run in json.loads(capsys.readouterr().out)["results"]] == ["cover"]


def test_several_numbers_of_ranks_are_shown_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*_SMALL, "--ranks", "2,4"])

    assert "simulate loading --scaling" in capsys.readouterr().err
