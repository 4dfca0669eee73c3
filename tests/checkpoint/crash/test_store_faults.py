"""The snapshot store survives its own death, a full disk and a failing one, at any call of a save."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoint.crash.injection import Savers
from tests.checkpoint.crash.trials import cases, closes, sample, survive_faults

STORES = ["store/complete", "store/progressive", "store/chain", "store/progressive+fast"]
FAULTS = ["KILL", "ENOSPC", "EIO"]
SESSIONS = [[1, 2, 3], [4, 5]]
#: Of the faults, those that come about: what a drain finds to do depends on how fast it is.
MOST = 0.6


@pytest.mark.system
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("subject", STORES)
def test_committed_snapshots_survive_a_fault(savers: Savers, top: Path, subject: str, fault: str) -> None:
    """A save that meets a fault succeeds or raises an error that names a file; the next one succeeds."""
    tried = sample(cases(savers.sites(subject, top / "store", SESSIONS), [fault]), 20)

    assert survive_faults(savers, subject, top, SESSIONS, tried) >= MOST * len(tried)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("subject", STORES)
def test_committed_snapshots_survive_a_fault_at_every_call(
    savers: Savers, top: Path, subject: str, fault: str
) -> None:
    every = cases(savers.sites(subject, top / "store", SESSIONS), [fault])

    assert survive_faults(savers, subject, top, SESSIONS, every) >= MOST * len(every)


@pytest.mark.system
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
def test_committed_snapshots_survive_a_close_that_fails(savers: Savers, top: Path, fault: str) -> None:
    """As it can on network file systems, which write what is left only then."""
    subject, sessions = "store/progressive", [[1, 2, 3, 4, 5]]
    tried = closes(savers.sites(subject, top / "store", sessions), [fault])

    assert survive_faults(savers, subject, top, sessions, tried) >= len(tried) - 2 > 0
