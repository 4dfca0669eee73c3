"""Ranks that agree on what they read, as processes of torch.distributed and of MPI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forks
from tests.patience import brief
from tests.ranks.jobs import reports_in, start_mpi_jobs, torch_job, wait_for

# By default, threads for ranks agree in test_agreeing.py, and real ones in the contract of ranks.
pytestmark = pytest.mark.slow
COUNT = 16
SIZES = {"torch": 4, "mpi": 2}
Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def all_reports(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Reports]:
    script = Path(__file__).with_name("agreeing_rank.py")
    places = {kind: tmp_path_factory.mktemp(kind) for kind in SIZES}
    for place in places.values():
        (place / "data").mkdir()
        for number in range(COUNT):
            (place / "data" / f"{number:02d}.png").write_bytes(bytes([number] * 4))
    arguments = {kind: [str(place / "data"), str(place)] for kind, place in places.items()}
    address = f"file://{places['torch']}/store"
    wait_for(
        forks.start(script, [[torch_job(*arguments["torch"], size=SIZES["torch"], address=address)]]),
        start_mpi_jobs(script, [(SIZES["mpi"], arguments["mpi"])]),
    )
    return {kind: reports_in(places[kind], kind, size) for kind, size in SIZES.items()}


@pytest.fixture(params=["torch", "mpi"])
def reports(request: pytest.FixtureRequest, all_reports: dict[str, Reports]) -> Reports:
    return all_reports[request.param]


def test_all_ranks_use_the_seed_that_rank_0_drew(reports: Reports) -> None:
    assert len({report["drawn"][0] for report in reports}) == 1
    assert sorted(number for report in reports for number in report["drawn"][1]) == list(range(COUNT))


def test_ranks_on_hosts_of_their_own_connect_to_each_other_and_read_all_samples(reports: Reports) -> None:
    carrier = {SIZES["torch"]: "ZmqCarrier", SIZES["mpi"]: "MpiCarrier"}[len(reports)]
    assert [report["shared"][1:] for report in reports] == [[len(reports) - 1, carrier]] * len(reports)
    for epoch in range(2):
        assert sorted(number for report in reports for number in report["shared"][0][epoch]) == list(
            range(COUNT)
        )


def test_a_seed_that_differs_is_named_on_all_ranks(reports: Reports) -> None:
    names = {2: ("rank 0", "rank 1"), 4: ("ranks 0, 2", "ranks 1, 3")}[len(reports)]
    expected = f"the ranks of this job would not read one run: seed is 0 on {names[0]} and 1 on {names[1]}; "
    for report in reports:
        kind, message = report["seeds"]
        assert (kind, message[: len(expected)]) == ("ConfigError", expected)


@pytest.mark.parametrize(
    ("what", "at", "text"),
    [("a wrong argument", 1, "decoders is 'two'; "), ("too little memory", 0, "memory is 9 B")],
)
def test_what_is_wrong_on_one_rank_is_an_error_of_all(
    reports: Reports, what: str, at: int, text: str
) -> None:
    for rank, report in enumerate(reports):
        before = "" if rank == at else f"rank {at} of {len(reports)}, the start of a loader: "
        kind, message = report[what]
        assert kind == "ConfigError"
        assert message.startswith(before + text)


def test_a_file_that_appears_between_two_listings_is_named_on_all_ranks(reports: Reports) -> None:
    for report in reports:
        kind, message = report["a file appeared"]
        assert kind == "ConfigError"
        assert f"plan.samples is {COUNT} on rank" in message
        assert f"and {COUNT + 1} on rank {len(reports) - 1};" in message


def test_a_rank_that_makes_no_loader_is_named_on_the_others_which_go_on_afterwards(reports: Reports) -> None:
    last = len(reports) - 1
    for report in reports[:last]:
        kind, message = report["missing"]
        assert kind == "WaitTimeout"
        assert message.startswith(
            f"rank {last} of {last + 1} did not arrive at the start of a loader within {brief(2):g} s"
        )
    assert sorted(number for report in reports for number in report["afterwards"][1]) == list(
        range(COUNT + 1)
    )


def test_a_rank_that_nothing_places_is_refused_and_one_may_read_everything(reports: Reports) -> None:
    for report in reports:
        kind, message = report["nobody says"]
        assert kind == "ConfigError"
        assert f"has {len(reports)} ranks, so this process is one of several, and nothing says" in message
    assert sorted(reports[1]["by itself"][1]) == list(range(COUNT))


def test_ranks_of_a_mesh_read_by_its_data_parallel_part(all_reports: dict[str, Reports]) -> None:
    reports = all_reports["torch"]
    (seed,), read = {report["mesh"][0] for report in reports}, [report["mesh"][1] for report in reports]

    assert isinstance(seed, int)
    assert read[0] == read[1]
    assert read[2] == read[3]
    assert sorted(read[0] + read[2]) == list(range(COUNT))
    for report in reports:
        assert report["part of a mesh"][0] == "ConfigError"
        assert "'tp' alone" in report["part of a mesh"][1]
        assert report["both"][1].startswith("mesh is given beside rank or world_size")
