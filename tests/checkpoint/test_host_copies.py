"""The newest snapshot in memory of the hosts: what is lost with a host is restored from the next one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.forking import Forks, Job
from tests.ranks.jobs import torch_job, wait_for

from penstock.checkpoint import SnapshotStore
from penstock.checkpoint.files.catalog import Catalog
from penstock.checkpoint.host_copies import HostCopies
from penstock.errors import ConfigError, DataError

SCRIPT = Path(__file__).with_name("host_ranks.py")


def job(folder: Path, duty: str, hosts: str) -> Job:
    """Return a job of a rank on each of some hosts, named by letters."""
    return torch_job(str(folder), duty, hosts, size=len(hosts), address=f"file://{folder / duty}-ranks")


def test_a_job_that_was_killed_and_lost_a_host_restores_without_the_store(
    tmp_path: Path, forks: Forks
) -> None:
    """Three ranks on three hosts save; all are killed, and b is lost with its memory.

    Two ranks of a, one of c and one of a new host d go on; the store can be read by none.
    """
    wait_for(forks.start(SCRIPT, [[job(tmp_path, "save", "abc")]]), killed=3)
    shutil.rmtree(tmp_path / "memory of b")
    parts = [len(list((tmp_path / f"memory of {host}").glob("step-*/part-*"))) for host in "ac"]
    assert parts == [4, 4], "of a baseline and a delta, two of three parts"
    (tmp_path / "store").chmod(0)
    try:
        wait_for(forks.start(SCRIPT, [[job(tmp_path, "restore", "aacd")]]))
    finally:
        (tmp_path / "store").chmod(0o755)

    reports = [json.loads((tmp_path / f"report-restore-{rank}.json").read_text()) for rank in range(4)]

    assert [[each["step"], each["whole"]] for each in reports] == [[2, True]] * 4
    assert "cannot be listed" in " ".join(reports[0]["lines"])
    counts = [len(list((tmp_path / f"memory of {host}").glob("step-*/part-*"))) for host in "acd"]
    assert counts == [6, 6, 6], "each host has all while the job restores"


# -- One process ------------------------------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(5000.0) + step}


def slowly_changing(step: int) -> dict[str, Any]:
    """Return a state of which a difference is much smaller than the whole."""
    array = np.random.default_rng(0).random(300_000, dtype=np.float32)
    array[: 10 * step] = step
    return {"w": array}


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, lines: list[str]) -> SnapshotStore:
    return SnapshotStore(
        tmp_path / "a", host_copies=tmp_path / "memory", codec="stored", keep=2, report=lines.append
    )


def spoil(folder: Path) -> None:
    for part in folder.glob("step-*/part-*"):
        part.write_bytes(bytes(part.stat().st_size))


def test_the_newest_is_read_from_memory_and_what_is_not_there_or_damaged_from_the_store(
    tmp_path: Path, store: SnapshotStore, lines: list[str]
) -> None:
    for step in (1, 2):
        store.save(step, state(step)).wait()
    spoil(tmp_path / "a")

    assert store.restore()["w"][0] == 2, "the store's own files are spoilt"
    assert [path.name for path in (tmp_path / "memory").glob("step-*")] == ["step-000000000002"]

    # A training without host_copies= has saved a newer one since.
    with SnapshotStore(tmp_path / "other", codec="stored", report=None) as other:
        other.save(3, state(3)).wait()
    shutil.copytree(tmp_path / "other" / "step-000000000003", tmp_path / "a" / "step-000000000003")
    assert store.restore()["w"][0] == 3

    store.save(4, state(4)).wait()
    spoil(tmp_path / "memory")
    assert store.restore()["w"][0] == 4
    assert any("not restored from the hosts' memory" in line for line in lines)
    store.close()
    assert not (tmp_path / "memory").exists(), "an orderly end leaves nothing"
    assert store.restore()["w"][0] == 4


def test_a_folder_that_holds_something_else_is_never_emptied(
    tmp_path: Path, store: SnapshotStore, lines: list[str]
) -> None:
    with SnapshotStore(tmp_path / "memory", codec="stored", report=None) as other:
        other.save(1, state(1))

    store.save(1, state(1)).wait()

    assert any("holds something else" in line for line in lines)
    assert (tmp_path / "memory" / "step-000000000001").is_dir()
    store.close()
    assert SnapshotStore(tmp_path / "memory", report=None).restore()["w"][0] == 1
    with pytest.raises(ConfigError, match=r"^host_copies is .*a folder of its own"):
        SnapshotStore(tmp_path / "a", host_copies=tmp_path / "a")


def test_copies_of_another_store_are_never_restored_nor_removed(
    tmp_path: Path, store: SnapshotStore, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a job of another store crashed, and its copies are left."""
    store.save(1, state(1)).wait()
    (foreign := tmp_path / "memory" / "of somebody").mkdir()
    store.save(2, state(2)).wait()
    with SnapshotStore(
        tmp_path / "b", host_copies=tmp_path / "memory", codec="stored", report=lines.append
    ) as other:
        other.save(7, state(7)).wait()
        assert any(f"holds copies of {tmp_path / 'a'}, and this is" in line for line in lines)

        def fail(_: object) -> None:
            raise DataError("the file system is gone")

        monkeypatch.setattr(Catalog, "look", fail)
        with pytest.raises(DataError, match="is gone"):
            other.restore()
    monkeypatch.undo()

    assert [path.name for path in (tmp_path / "memory").glob("step-*")] == ["step-000000000002"]
    spoil(tmp_path / "a")
    assert store.restore()["w"][0] == 2
    store.close()
    assert list((tmp_path / "memory").iterdir()) == [foreign]


def test_a_folder_to_which_others_may_write_is_refused(
    tmp_path: Path, store: SnapshotStore, lines: list[str]
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory").chmod(0o777)

    store.save(1, state(1)).wait()

    assert any("others may write to it" in line for line in lines)
    assert not list((tmp_path / "memory").iterdir())
    store.close()


def test_copies_that_are_damaged_or_were_left_half_written_are_made_anew(
    tmp_path: Path, lines: list[str]
) -> None:
    """A difference and its baseline are damaged: the save after the restore mends them."""
    with SnapshotStore(tmp_path / "a", host_copies=tmp_path / "memory", report=lines.append) as store:
        for step in (1, 2):
            store.save(step, slowly_changing(step)).wait()
        assert len(list((tmp_path / "memory").glob("step-*"))) == 2, "step 2 is a difference to step 1"
        (part,) = (tmp_path / "memory" / "step-000000000001").glob("part-*")
        whole = part.read_bytes()
        spoil(tmp_path / "memory")
        (left := part.with_name(f".{part.name}-0123")).touch()
        assert store.restore()["w"][0] == 2

        store.save(3, slowly_changing(3)).wait()

        assert part.read_bytes() == whole
        assert not left.exists()
        lines.clear()
        assert store.restore()["w"][0] == 3
        assert not any("not restored" in line for line in lines)


def test_what_a_copy_that_failed_left_goes_before_the_next_is_made(
    tmp_path: Path, store: SnapshotStore, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it fills the memory. The last snapshot that is there in full stays until there is another one."""
    store.save(1, state(1)).wait()
    store.save(2, state(2)).wait()
    (part,) = (tmp_path / "memory" / "step-000000000002").glob("part-*")
    shutil.copytree(tmp_path / "a" / "step-000000000001", tmp_path / "memory" / "step-000000000001")
    part.unlink()
    seen = []

    def full(*arguments: Any) -> None:
        seen.append(sorted(path.name for path in (tmp_path / "memory").glob("step-*")))
        raise DataError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(HostCopies, "_move", full)
        store.save(3, state(3)).wait()

    assert seen == [["step-000000000001"]]
    assert any("no space" in line for line in lines)
    store.save(4, state(4)).wait()
    assert [path.name for path in (tmp_path / "memory").glob("step-*")] == ["step-000000000004"]
    store.close()
