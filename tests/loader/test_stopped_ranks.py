"""A rank that is stopped costs the others no batch once their loaders are made; before that they name it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.forking import Forks
from tests.loader.sharing_data import Counted, loader
from tests.ranks.jobs import torchrun_job, wait_for

from penstock.ranks import alone

RANKS = 3
MEETING = ["before the first exchange", "between exchanges"]
TRAINING = ["in the first epoch", "at the end of an epoch", "at close"]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("phase", "share"),
    [
        *((phase, "host") for phase in MEETING),
        *((phase, share) for phase in TRAINING for share in ("host", "hosts")),
    ],
)
@pytest.mark.slow
def test_a_rank_that_stops_is_named_while_ranks_meet_and_costs_no_batch_after_that(
    phase: str, share: str, victim: int, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When others end, it continues, and has the batches that it should have or names who has gone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    job = torchrun_job(str(tmp_path), share, phase, str(victim), size=RANKS)

    wait_for(forks.start(Path(__file__).with_name("stopped_rank.py"), [[job]]))

    reports = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(RANKS)]
    with loader(Counted(200), alone(), rank=0, world_size=RANKS, share=None) as one:
        plan = one.plan
    for rank, report in enumerate(reports):
        if phase in TRAINING:
            assert report["error"] is None
            steps = [(epoch, step) for epoch in range(plan.epochs) for step in range(plan.steps(epoch))]
            assert report["batches"] == [plan.local_batch(rank, *step).tolist() for step in steps]
        elif rank != victim:
            kind, text = report["error"]
            assert kind == "WaitTimeout"
            # Rank 0 keeps the store by which ranks agree here.
            assert text.startswith(
                "rank 0, or the launcher" if victim == 0 else "rank 1 of 3 did not arrive at"
            )
        else:
            assert report["error"] is not None
