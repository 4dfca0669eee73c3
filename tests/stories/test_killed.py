"""A job that is stopped again and again, and goes on with other ranks, reads what an unbroken run reads."""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.forking import Forks

import penstock.torch as pt
from penstock import SnapshotStore
from penstock.loader.transforms import RandomHorizontalFlip, RandomResizedCrop, ToTensor

SCRIPT = Path(__file__).with_name("killed_ranks.py")
EPOCHS, BATCH, COUNT = 2, 12, 120
STEPS = COUNT // BATCH
Lives = list[tuple[int, int]]
#: How many ranks each life has, and at which step it gets its signal, which stops it there or after the next: in all
#: but the last within the first epoch, from its first batch to its last.
LIVES: dict[str, Lives] = {
    "3, 2 and 3 ranks": [(3, 1), (2, 9), (3, 0)],
    "4, 2, 3, 4, 2 and 3 ranks": [(4, 1), (2, 3), (3, 5), (4, 7), (2, 9), (3, 0)],
}
#: Where the others get theirs, and after how many steps.
SCENARIOS = {"warm-up": 0, "evaluation": 4, "waiting": 2, "waiting in its own thread": 2}


@pytest.fixture(
    scope="module",
    params=["3, 2 and 3 ranks", pytest.param("4, 2, 3, 4, 2 and 3 ranks", marks=pytest.mark.slow)],
)
def lives(request: pytest.FixtureRequest) -> Lives:
    return LIVES[request.param]


@pytest.fixture(scope="module")
def folder(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    for number in range(COUNT):
        place = folder / "photos" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").resize((9, 8)).rotate(3 * number).convert("RGB").save(
            place / f"{number}.png"
        )
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path, lives: Lives, forks: Forks) -> dict[int, int]:
    """Run all lives one after the other, beside the other jobs; return how each process ended."""
    rows = [
        [[str(folder), str(life), str(rank), str(ranks), "training", str(at)] for rank in range(ranks)]
        for life, (ranks, at) in enumerate(lives)
    ]
    others = [
        [[[str(folder), "0", str(rank), "2", scenario, str(at)] for rank in range(2)]]
        for scenario, at in SCENARIOS.items()
    ]
    with forks.start(SCRIPT, [rows, *others]) as forked:
        told, statuses = forked.wait()
    assert set(statuses.values()) <= {0, 143}, told
    return statuses


def reports(folder: Path, scenario: str, life: Any) -> list[dict[str, Any]]:
    """Return what the ranks of a life report."""
    count = len(list(folder.glob(f"read-{scenario}-{life}-*.json")))
    return [json.loads((folder / f"read-{scenario}-{life}-{rank}.json").read_text()) for rank in range(count)]


def test_a_job_of_other_ranks_each_time_reads_what_an_unbroken_run_reads(
    folder: Path, lives: Lives, ended: dict[int, int]
) -> None:
    """The same global batches with the same random crops; evaluation between them changes nothing."""
    transforms = [RandomResizedCrop(6), RandomHorizontalFlip(), ToTensor()]
    straight = []
    with pt.Loader(
        str(folder / "photos"), batch_size=BATCH, epochs=EPOCHS, seed=5, transforms=transforms, report=None
    ) as loader:
        for _ in range(EPOCHS):
            for images, _labels in loader:
                straight.append(
                    [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in images]
                )

    found: list[list[str]] = []
    ends = []
    for life, (ranks, _) in enumerate(lives):
        of_ranks = reports(folder, "training", life)
        assert len(of_ranks) == ranks
        assert len({one["step"] for one in of_ranks}) == 1, "all ranks stop after the same step"
        assert all(one["state"] == of_ranks[0]["state"] for one in of_ranks)
        found += [[*chain(*shares)] for shares in zip(*(one["read"] for one in of_ranks), strict=True)]
        ends.append(of_ranks[0]["step"])

    assert found == straight
    assert sum(end <= STEPS for end in ends) == len(lives) - 1, "all stops are within the first epoch"
    assert len(set(map(tuple, straight))) == EPOCHS * STEPS


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_ranks_save_one_step_wherever_the_signal_comes(
    folder: Path, ended: dict[int, int], scenario: str
) -> None:
    """Before the first batch, in an evaluation, and while one rank waits for a batch that comes once they have decided.

    That rank waits in the loader, or reads in its own thread; the others wait for it to take part in their step.
    """
    of_ranks = reports(folder, scenario, 0)

    assert [one["exit"] for one in of_ranks] == [143] * 2
    assert len({one["step"] for one in of_ranks}) == 1
    assert SCENARIOS[scenario] <= of_ranks[0]["step"] + scenario.startswith("waiting")
    assert of_ranks[0]["step"] < STEPS, "not at the end"
    with SnapshotStore(folder / f"store-{scenario}", report=None) as store:
        restored = store.restore()
        assert (restored["loader"]["epoch"], restored["loader"]["step"]) == divmod(restored.step, STEPS)
