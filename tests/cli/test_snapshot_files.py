"""`penstock snapshots import`, `export`, `seal` and `check` as a user types them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.cli.typed import run_command
from tests.for_each import for_each

from penstock import compiling
from penstock.checkpoint.codecs import ours
from penstock.checkpoint.interop.foreign import read_state
from penstock.checkpoint.store import SnapshotStore
from penstock.cli import snapshot_files
from penstock.cli.main import main
from penstock.errors import ConfigError, DataError
from penstock.machine_code import Loop

run = partial(run_command, snapshot_files)


def test_a_checkpoint_goes_in_and_out_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(30, 20)
    store, out = tmp_path / "store", tmp_path / "out"
    torch.save(model.state_dict(), tmp_path / "m.pt")
    for step in range(7):
        run("import", tmp_path / "m.pt", store, "--step", step, "--part", "model")
    run("export", store, tmp_path / "all.safetensors", "--step", "3")
    assert "step 6" in capsys.readouterr().out
    run("export", store, out, "--part", "model", "--shard", "1 kB", "--json")
    written = json.loads(capsys.readouterr().out)
    assert written["step"] == 6
    assert {row["file"]: row["bytes"] for row in written["results"]} == {
        str(path): path.stat().st_size for path in out.iterdir()
    }
    run("import", tmp_path / "m.pt", tmp_path / "other", "--step", 5, "--json")
    assert json.loads(capsys.readouterr().out)["results"][0]["step"] == 5

    assert torch.equal(read_state(tmp_path / "all.safetensors")["model"]["weight"], model.weight)
    assert sorted(path.name for path in out.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert torch.equal(read_state(out)["bias"], model.bias)
    with SnapshotStore(store, report=None) as opened:
        assert len(opened.list()) == 7


def test_an_import_waits_for_the_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training encodes its next snapshot anyway; an import is stored once, and stays as it is."""
    torch.save({"weight": torch.zeros(3)}, tmp_path / "m.pt")
    loop = ours.KERNELS["encode", "u4"].wait()
    waited: list[str] = []

    class Slow:
        def ask(self) -> Loop | None:
            if compiling._plain_forms_are_off:
                waited.append("for the compiler")
                return loop
            return None

    monkeypatch.setitem(ours.KERNELS, ("encode", "u4"), Slow())

    run("import", tmp_path / "m.pt", tmp_path / "store", "--step", 1)

    assert waited
    with SnapshotStore(tmp_path / "store", report=None) as store:
        store.save(2, {"weight": torch.ones(3)})
    assert len(waited) == 1, "that of a training does not"


def test_a_checkpoint_whose_name_is_no_text_goes_in_and_out_and_reaches_no_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints \udcff\x1b[2J"
    folder.mkdir()
    torch.save({"w": torch.arange(5.0)}, folder / "one\n\udcfe.pt")
    statuses = [
        main(["snapshots", *map(str, words)])
        for words in (
            ["import", folder / "one\n\udcfe.pt", folder / "store"],
            ["list", folder / "store"],
            ["export", folder / "store", folder / "two\n\udcfd.pt"],
            ["seal", folder / "one\n\udcfe.pt"],
        )
    ]
    assert torch.equal(read_state(folder / "two\n\udcfd.pt")["w"], torch.arange(5.0))
    (folder / "one\n\udcfe.pt").write_bytes(b"other")
    statuses.append(main(["snapshots", "check", str(folder / "one\n\udcfe.pt")]))

    captured = capsys.readouterr()
    lines = (captured.out + captured.err).splitlines()
    assert statuses == [0, 0, 0, 0, 1]
    assert all(line.isprintable() for line in lines)
    for name in (r"one\n\udcfe.pt", r"two\n\udcfd.pt"):
        assert rf"checkpoints \udcff\x1b[2J/{name}" in captured.out
    assert any(line.split()[:2] == [r"one\n\udcfe.pt", "resized"] for line in lines)


def test_what_cannot_be_moved_is_told(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "t.pt")
    with pytest.raises(ConfigError, match="a snapshot is a mapping: give --part"):
        run("import", tmp_path / "t.pt", tmp_path / "store")
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        run("export", tmp_path / "nowhere", tmp_path / "x.pt")
    assert not (tmp_path / "nowhere").exists()
    run("import", tmp_path / "t.pt", tmp_path / "store", "--part", "t")
    with pytest.raises(ConfigError, match="--shard"):
        run("export", tmp_path / "store", tmp_path / "x", "--shard", "0 B")
    with pytest.raises(ConfigError, match="no snapshot of step 5"):
        run("export", tmp_path / "store", tmp_path / "x", "--step", "5")


def test_a_sealed_file_that_changed_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.zeros(100)}, path)
    run("seal", path, "--json")
    sealed = json.loads(capsys.readouterr().out)
    assert sealed["results"] == [{"file": "m.pt", "bytes": path.stat().st_size}]
    run("check", path)
    assert "is as it was sealed: 1 file" in capsys.readouterr().out

    content = bytearray(path.read_bytes())
    content[600] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="not as it was sealed, in 1 file"):
        run("check", path, "--json")
    (fault,) = json.loads(capsys.readouterr().out)["results"]
    assert (fault["file"], fault["wrong"], fault["begin"], fault["end"]) == (
        "m.pt",
        "changed",
        0,
        len(content),
    )
    with pytest.raises(DataError):
        run("check", path)
    assert "are not as they were" in capsys.readouterr().out
    run("seal", path, "--overwrite")
    run("check", path)


@pytest.mark.parametrize(
    "words",
    [("seal", "nonexistent"), ("import", "nonexistent", "store"), ("import", "none.safetensors", "store")],
)
def test_what_is_not_there_is_told_in_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["snapshots", *words]) == 1

    assert capsys.readouterr().err == f"penstock: {words[1]} is not there\n"
    assert not list(tmp_path.iterdir())


def test_an_export_replaces_a_file_only_when_it_is_told_to(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out.pt"
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    run("import", tmp_path / "w.pt", store)
    out.write_bytes(b"precious")

    with pytest.raises(ConfigError, match=r"out\.pt is there already: .*--overwrite"):
        run("export", store, out)
    assert out.read_bytes() == b"precious"
    run("export", store, out, "--overwrite")
    assert torch.equal(read_state(out)["w"], torch.ones(2))


@for_each(
    ("name", "step"),
    [
        ("run2-step-900.pt", 900),
        ("epoch=3-step=1200.ckpt", 1200),
        ("global_step77.pt", 77),
        ("checkpoint-500", 500),
        ("ckpt_00012.safetensors", 12),
        ("epoch10.pt", 10),
        ("12000.npz", 12000),
        ("model-00001-of-00002.safetensors", 0),
        ("resnet50.pt", 0),
        ("llama-7b-v1.5.safetensors", 0),
        ("last.ckpt", 0),
    ],
)
def test_the_step_is_what_the_name_of_the_file_says(name: str, step: int) -> None:
    assert snapshot_files.step_in(name) == step


def test_files_of_a_training_go_in_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    for name in ("last.pt", "step-100.pt", "step-200.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
        run("import", tmp_path / name, store)
    with SnapshotStore(store, report=None) as opened:
        assert [one.step for one in opened.list()] == [0, 100, 200]
    torch.save({"w": torch.ones(2)}, tmp_path / "best.pt")
    with pytest.raises(
        ConfigError, match=r"of step 0 in .*store already: give .*best.pt another, as --step N"
    ):
        run("import", tmp_path / "best.pt", store)
