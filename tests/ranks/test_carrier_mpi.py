"""Messages about samples over MPI, between two processes of an MPI job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.ranks.jobs import MPI_LIBRARIES, mpi_command, outputs_of, start_process


@pytest.mark.slow
@pytest.mark.parametrize("called", ["compiled", "plain"])
@pytest.mark.parametrize("library", MPI_LIBRARIES)
def test_samples_are_read_over_mpi_and_a_stopped_rank_costs_time_alone(
    library: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    script = Path(__file__).with_name("mpi_carriers.py")

    outputs_of(start_process(*mpi_command(2, library), str(script), called))
