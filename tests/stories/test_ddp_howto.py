"""The script of the page on DDP runs as it is printed, under torchrun, and does what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from tests.forking import Forks
from tests.patience import patient
from tests.ranks.jobs import torchrun_job

from penstock import SnapshotStore

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "ddp-under-torchrun.md"
COUNT = 70


@pytest.mark.slow
def test_the_script_of_the_page_trains_on_two_ranks_and_resumes(tmp_path: Path, forks: Forks) -> None:
    """By default, the scripts of the page on killed trainings run, and what this one names is looked for."""
    for number in range(COUNT):
        place = tmp_path / "photos" / "train" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place / f"{number}.jpg"), np.full((70, 80, 3), number, np.uint8))
    text = PAGE.read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"```console\ntorchrun (.*?)\n```", text)
    (tmp_path / "train.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{script}")

    def run() -> str:
        with forks.start(tmp_path / "train.py", [[torchrun_job(size=2)]]) as forked:
            told, statuses = forked.wait()
        assert set(statuses.values()) == {0}, told
        return told

    def run_under_torchrun() -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *command.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=patient(120),
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    def saved() -> list[int]:
        return [listed.step for listed in SnapshotStore(tmp_path / "runs" / "ddp", report=None).list()]

    told = run_under_torchrun()

    lines = [line for line in told.splitlines() if line.startswith("penstock: train")]
    starts = [line for line in lines if "reads 70 samples" in line]
    assert len(starts) == 1, "one rank reports for the job"
    assert "rank 0" in starts[0]
    assert (
        "3 epochs of 2 steps, 64 samples a step, 32 on each of 2 ranks, 6 in the last of an epoch"
        in starts[0]
    )
    for rank in (0, 1):
        for epoch in range(3):
            assert sum(f"rank {rank}: epoch {epoch}:" in line for line in lines) == 1
    # A snapshot of the job, not of each rank.
    assert saved() == [1, 2, 3]

    # As if it had been killed in its last epoch.
    with SnapshotStore(tmp_path / "runs" / "ddp", report=None) as store:
        before = store.restore(2)["model"]
        after = store.restore(3)["model"]
        store.delete(3)
    run()

    assert saved() == [1, 2, 3]
    again = SnapshotStore(tmp_path / "runs" / "ddp", report=None).restore(3)["model"]
    assert all(torch.equal(again[name], after[name]) for name in after)
    assert not all(torch.equal(before[name], after[name]) for name in after)
