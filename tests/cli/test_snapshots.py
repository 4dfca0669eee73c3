"""`penstock snapshots list`, `verify`, `delete` and `drain` as a user types them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint import Keep, SnapshotStore
from penstock.cli.main import main
from penstock.errors import ConfigError


def saved(folder: Path, steps: int = 3, **settings: Any) -> None:
    arguments: dict[str, Any] = {"keep": Keep(last=None), "codec": "balance", "threads": 1, "report": None}
    weights = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    with SnapshotStore(folder, **(arguments | settings)) as store:
        for step in range(1000, 1000 * (steps + 1), 1000):
            weights[::9] *= np.float32(1.001)
            store.save(step, {"weights": weights}).wait()


def flip(folder: Path, step: int) -> None:
    part = folder / f"step-{step:012d}" / "part-00000.pst"
    data = bytearray(part.read_bytes())
    data[1000] ^= 1
    part.write_bytes(data)


def run(*arguments: object) -> int:
    return main(["snapshots", *map(str, arguments)])


Captured = pytest.CaptureFixture[str]


def test_a_list_is_a_row_for_each_snapshot_and_whole_as_json(
    folder_of_snapshots: Path, capsys: Captured
) -> None:
    assert run("list", folder_of_snapshots) == 0

    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert header[:2] == ["step", "condition"]
    rows = [row for row in rows if row[0][0].isdigit()]
    assert [row[:2] for row in rows] == [["1,000", "intact"], ["2,000", "intact"], ["3,000", "intact"]]
    assert "80" in rows[0], "kB of state"
    # After the condition, the day and the time.
    assert [row[4] for row in rows] == ["-", "1,000", "2,000"], "what each is a difference to"

    assert run("list", folder_of_snapshots, "--json") == 0
    listed = json.loads(capsys.readouterr().out)["results"]
    with SnapshotStore(folder_of_snapshots, report=None) as store:
        expected = store.list()
    assert [row["step"] for row in listed] == [1000, 2000, 3000]
    assert [row["reference_step"] for row in listed] == [None, 1000, 2000]
    for row, one in zip(listed, expected, strict=True):
        assert row == {
            "step": one.step,
            "condition": "intact",
            "why": "",
            "created_seconds": one.created_seconds,
            "reference_step": one.reference_step,
            "raw_bytes": 80_000,
            "stored_bytes": one.stored_bytes,
            "codec": "balance",
            "kept_mantissa_bits": None,
            "tiers": [str(folder_of_snapshots)],
            "broken_tiers": [],
        }


@pytest.fixture
def folder_of_snapshots(tmp_path: Path) -> Path:
    saved(tmp_path / "runs")
    return tmp_path / "runs"


def test_a_lossy_snapshot_says_so(tmp_path: Path, capsys: Captured) -> None:
    saved(tmp_path, 1, kept_mantissa_bits=7)

    run("list", tmp_path)
    assert "lossy: 7 bits" in capsys.readouterr().out
    run("list", tmp_path, "--json")
    assert json.loads(capsys.readouterr().out)["results"][0]["kept_mantissa_bits"] == 7


def test_verify_ends_with_status_1_and_names_file_and_tensor_where_something_is_damaged(
    folder_of_snapshots: Path, capsys: Captured
) -> None:
    assert run("verify", folder_of_snapshots) == 0
    assert capsys.readouterr().out.endswith("\n3 snapshots read and decoded (240 kB): all intact\n")
    flip(folder_of_snapshots, 2000)

    assert run("list", folder_of_snapshots) == 0, "files are not read to their end"
    assert capsys.readouterr().out.count("intact") >= 3
    assert run("verify", folder_of_snapshots) == 1
    printed = capsys.readouterr()
    assert "all intact" not in printed.out
    assert "step 2,000:" in printed.out
    assert "step-000000002000/part-00000.pst is damaged" in printed.out
    assert "'weights'" in printed.out
    assert "2 of 3 snapshots cannot be restored" in printed.err
    assert run("verify", folder_of_snapshots, "--step", 1000) == 0
    assert run("verify", folder_of_snapshots, "--step", 3000, "--json") == 1


def test_verify_reads_every_copy_and_says_which_one_is_damaged(tmp_path: Path, capsys: Captured) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    saved(slow, 3, fast=fast, scheme="complete")
    assert run("verify", slow, "--fast", fast) == 0
    capsys.readouterr()
    kept = sorted(os.listdir(fast))[-1]  # the newest stays there
    assert kept == "step-000000003000"
    for damaged, other in ((fast, slow), (slow, fast)):
        flip(damaged, 3000)

        assert run("verify", slow, "--fast", fast) == 1

        printed = capsys.readouterr()
        assert f"\nstep 3,000: intact on {other}, damaged on {damaged}: " in printed.out
        assert f"{damaged} (damaged)" in printed.out
        assert "all intact" not in printed.out
        assert (
            "1 of 3 snapshots have a damaged copy, and can be restored from another: step 3,000"
            in printed.err
        )
        assert run("verify", slow, "--fast", fast, "--step", 2000) == 0
        assert run("verify", slow, "--fast", fast, "--json") == 1
        captured = capsys.readouterr().out
        row = json.loads(captured[captured.rindex("\n{\n") :])["results"][-1]
        assert (row["condition"], row["broken_tiers"]) == ("intact", [str(damaged)])
        flip(damaged, 3000)
    flip(fast, 3000)
    flip(slow, 3000)
    assert run("verify", slow, "--fast", fast) == 1
    assert "1 of 3 snapshots cannot be restored" in capsys.readouterr().err


def test_verify_prints_whole_json_also_where_something_is_damaged(
    folder_of_snapshots: Path, capsys: Captured
) -> None:
    flip(folder_of_snapshots, 2000)

    assert run("verify", folder_of_snapshots, "--json") == 1

    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["condition"] for row in rows] == ["intact", "damaged", "damaged"]
    assert [bool(row["why"]) for row in rows] == [False, True, True]


def test_what_is_torn_or_has_no_manifest_is_listed_as_such(
    folder_of_snapshots: Path, capsys: Captured
) -> None:
    part = folder_of_snapshots / "step-000000003000" / "part-00000.pst"
    part.write_bytes(part.read_bytes()[:-10])
    assert run("list", folder_of_snapshots, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["condition"] for row in rows] == ["intact", "intact", "torn"]
    (folder_of_snapshots / "step-000000001000" / "manifest.json").unlink()

    assert run("list", folder_of_snapshots, "--json") == 0

    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["condition"] for row in rows] == ["torn", "damaged", "damaged"]
    assert "no manifest" in rows[0]["why"]
    assert "difference to step 1000" in rows[1]["why"]
    assert run("list", folder_of_snapshots) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["1,000"])
    assert row.split()[:4] == ["1,000", "torn", "?", "?"], "nobody knows when it was saved, and to what it is"


def test_delete_removes_one_and_refuses_what_others_need(folder_of_snapshots: Path, capsys: Captured) -> None:
    assert run("delete", folder_of_snapshots, "--step", 2000) == 1
    assert "step 3000 is stored as differences to it" in capsys.readouterr().err
    assert run("delete", folder_of_snapshots, "--step", 7) == 1
    assert "no snapshot of step 7" in capsys.readouterr().err

    assert run("delete", folder_of_snapshots, "--step", 3000) == 0
    assert "step 3000 is deleted" in capsys.readouterr().out
    assert sorted(os.listdir(folder_of_snapshots))[-1] == "step-000000002000"


def test_drain_copies_what_a_training_left_on_its_fast_tier(tmp_path: Path, capsys: Captured) -> None:
    """The node's disk is all there is of the last hour: the job died before anything was drained."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    saved(fast, 2, codec="stored")
    slow.mkdir()

    assert run("list", slow, "--fast", fast, "--json") == 0
    assert [row["tiers"] for row in json.loads(capsys.readouterr().out)["results"]] == [[str(fast)]] * 2
    assert run("drain", slow, "--fast", fast, "--rate", "1 GB/s") == 0
    told = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("step ") and "drained after" in line for line in told) == 2
    assert run("drain", slow, "--fast", fast) == 0
    assert capsys.readouterr().out == "nothing to drain\n", "all is there"
    assert run("drain", slow, "--fast", fast, "--json") == 0
    assert all(str(slow) in row["tiers"] for row in json.loads(capsys.readouterr().out)["results"])

    assert run("list", slow, "--fast", fast, "--json") == 0
    assert [row["tiers"] for row in json.loads(capsys.readouterr().out)["results"]] == [
        [str(fast), str(slow)]
    ] * 2
    shutil.rmtree(fast)
    assert run("verify", slow) == 0


def test_drain_removes_nothing_for_only_the_training_knows_what_it_keeps(
    tmp_path: Path, capsys: Captured
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    saved(fast, 4)
    with SnapshotStore(slow, keep=Keep(last=None), threads=1, report=None) as store:
        for step in range(1, 8):
            store.save(step, {"weights": np.zeros(step)}).wait()

    assert run("drain", slow, "--fast", fast) == 0
    assert sum("drained after" in line for line in capsys.readouterr().out.splitlines()) == 4
    assert len(list(slow.glob("step-*"))) == 7 + 4
    assert len(list(fast.glob("step-*"))) == 4
    assert run("verify", slow) == 0
    assert run("delete", slow, "--fast", fast, "--step", 7) == 0
    assert len(list(slow.glob("step-*"))) == 7 + 4 - 1


def left_undrained(top: Path) -> tuple[Path, Path]:
    """Return the slow and the fast folder of a training that was killed before it drained."""
    fast, slow = top / "fast", top / "slow"
    with SnapshotStore(slow, fast=fast, threads=1, report=None) as store:
        store._housekeeping.next_to_drain = lambda now: None  # type: ignore[method-assign, assignment]
        for step in (1, 2):
            store.save(step, {"weights": np.zeros(step)}).wait()
    return slow, fast


def test_a_mistyped_fast_folder_is_refused_and_the_real_one_stays_known(
    tmp_path: Path, capsys: Captured
) -> None:
    slow, fast = left_undrained(tmp_path)
    wrong = tmp_path / "fats"
    wrong.mkdir()

    assert run("drain", slow, "--fast", wrong) == 1
    told = f"{wrong} holds no snapshots: name the folder that the training gave as fast=, {fast}\n"
    assert told in capsys.readouterr().err
    assert os.listdir(wrong) == []

    # Of another training it may be.
    saved(wrong, 1)
    assert run("drain", slow, "--fast", wrong) == 0
    out = capsys.readouterr().out
    assert f"{fast}, the fast tier of {slow} before, holds what was not drained, of step 1, 2: " in out
    assert f"`penstock snapshots drain {slow} --fast {fast}` copies it\n" in out
    assert run("drain", slow, "--fast", fast) == 0
    assert "before" not in capsys.readouterr().out, "the other was drained"
    assert run("list", slow, "--json") == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["results"]] == [1, 2, 1000]


def test_who_does_not_name_the_fast_folder_is_told_what_lies_there(tmp_path: Path, capsys: Captured) -> None:
    slow, fast = left_undrained(tmp_path)
    hint = f"newer snapshots than in {slow} lie undrained in {fast}: name it as fast=\n"

    for command, status in (
        (["list", slow], 0),
        (["verify", slow], 1),
        (["verify", slow, "--step", 1], 1),
        (["export", slow, tmp_path / "out.npz"], 1),
    ):
        assert run(*command) == status
        assert capsys.readouterr().err.count(hint) == 1
    with SnapshotStore(slow, report=None) as store, pytest.raises(ConfigError, match=hint.strip()):
        store.restore()
    assert run("list", slow, "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"] == []


def test_a_snapshot_is_no_store_and_its_store_is_named(
    folder_of_snapshots: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = "step-000000002000"
    for words in (["list"], ["verify"], ["export", "out.pt"]):
        name, *files = words
        assert run(name, folder_of_snapshots / snapshot, *files) == 1
        told = capsys.readouterr().err
        assert f"{snapshot} is one snapshot of the store at {folder_of_snapshots}: open that folder" in told
    monkeypatch.chdir(folder_of_snapshots / snapshot)
    assert run("list", ".") == 1
    assert ". is one snapshot of the store" in capsys.readouterr().err
    assert run("list", folder_of_snapshots.parent) == 1
    assert f"is no store, but contains stores: {folder_of_snapshots.name}" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_not_made_and_in_an_empty_one_nothing_is_verified(
    tmp_path: Path, capsys: Captured
) -> None:
    for command in (["list"], ["verify"], ["delete", "--step", "1"], ["drain", "--fast", str(tmp_path)]):
        name, *options = command
        assert run(name, tmp_path / "nowhere", *options) == 1
        assert "nowhere is no folder: name the one that a training saves" in capsys.readouterr().err
    assert run("drain", tmp_path, "--fast", tmp_path / "no-fast") == 1
    assert "no-fast is no folder" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == []

    for name, status in (("list", 0), ("verify", 1)):
        assert run(name, tmp_path) == status
        assert "no snapshot is there" in "".join(capsys.readouterr())
        assert run(name, tmp_path, "--json") == status
        assert json.loads(capsys.readouterr().out)["results"] == []
    assert run("verify", tmp_path, "--step", 1) == 1


def test_a_store_that_a_training_writes_to_can_be_listed_and_verified_and_not_changed(
    folder_of_snapshots: Path, capsys: Captured
) -> None:
    with SnapshotStore(folder_of_snapshots, keep=Keep(last=None), threads=1, report=None) as store:
        store.save(4000, {"weights": np.zeros(3)}).wait()

        assert run("list", folder_of_snapshots) == 0
        assert run("verify", folder_of_snapshots) == 0
        assert run("delete", folder_of_snapshots, "--step", 4000) == 1
        assert "one writer at a time" in capsys.readouterr().err
