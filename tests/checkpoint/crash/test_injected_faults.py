"""Death, a full disk and a failing disk at the nth call of a save find the stores that are not ready for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoint.crash.aftermath import Lost
from tests.checkpoint.crash.broken_stores import Broken
from tests.checkpoint.crash.injection import Savers, Site
from tests.checkpoint.crash.trials import cases, sample, survive_faults

SESSIONS = [[1, 2, 3], [4]]
RIGHT = "stand-in/nothing"


@pytest.mark.system
def test_a_store_that_is_right_survives_faults_at_every_kind_of_call(savers: Savers, top: Path) -> None:
    sites = savers.sites(RIGHT, top / "store", SESSIONS)
    tried = sample(cases(sites, ["KILL", "ENOSPC", "EIO"]), 100)

    assert {site.call for site, _ in tried} >= {
        "openat", "write", "fsync", "rename", "unlink", "close", "mkdir",
    }  # fmt: skip
    assert survive_faults(savers, RIGHT, top, SESSIONS, tried) == len(tried)


@pytest.mark.slow
def test_a_store_that_is_right_survives_every_fault_at_every_call(savers: Savers, top: Path) -> None:
    every = cases(savers.sites(RIGHT, top / "store", SESSIONS), ["KILL", "ENOSPC", "EIO"])

    assert survive_faults(savers, RIGHT, top, SESSIONS, every) == len(every)


@pytest.mark.system
@pytest.mark.parametrize(
    ("broken", "fault", "says"),
    [
        (Broken.MANIFEST_FIRST, "KILL", "is listed and damaged"),
        (Broken.IN_PLACE, "KILL", "damaged|something else|did not come back"),
        (Broken.DELETE_IN_PLACE, "KILL", "is listed and damaged|did not come back"),
        (Broken.NEVER_SWEEPS, "KILL", "did not come back"),
        (Broken.RETENTION_FIRST, "KILL", "was reported saved and is gone"),
        (Broken.SWALLOWS, "ENOSPC", "is listed and damaged"),
        (Broken.SWALLOWS, "EIO", "is listed and damaged"),
        (Broken.NAMES_NOTHING, "EIO", "names no file"),
        (Broken.STAYS_FAILED, "ENOSPC", "although the fault was over"),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Broken) else value.split()[0],
)
def test_a_fault_breaks_a_store_that_is_not_ready_for_it(
    savers: Savers, top: Path, broken: Broken, fault: str, says: str
) -> None:
    subject = f"stand-in/{broken.value}"
    tried = sample(cases(savers.sites(subject, top / "store", SESSIONS), [fault]), 100)

    with pytest.raises(Lost, match=says) as lost:
        survive_faults(savers, subject, top, SESSIONS, tried)

    (note,) = lost.value.__notes__
    assert f"{fault} at call " in note


@pytest.mark.system
def test_a_process_that_is_killed_has_done_what_came_before_the_call_and_not_the_call(
    savers: Savers, top: Path
) -> None:
    trial, came_about = savers.inject(RIGHT, top / "store", SESSIONS, Site("rename", 2), "KILL")

    assert came_about
    assert trial.was_killed
    assert trial.saved == [1]
    assert sorted(path.name for path in (top / "store").iterdir()) == [".unfinished-2", "step-000000001"]


@pytest.mark.system
def test_after_a_save_has_failed_no_later_one_meets_a_fault(savers: Savers, top: Path) -> None:
    """The same call comes again in the next save of the same thread, and in other threads."""
    trial, came_about = savers.inject(RIGHT, top / "store", SESSIONS, Site("fsync", 3), "EIO")

    assert came_about
    assert [packet["failed"] for packet in trial.failed] == [1]
    assert trial.saved == [2, 3, 4]
