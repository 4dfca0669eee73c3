"""What ranks must do over every transport, between real processes; a new one is added to `JOBS`.

Starting processes takes longer than what they do, so a job is started once and does all of it, and reports.
"""

from __future__ import annotations

import json
import math
import socket
from typing import Any

import pytest
from tests.forking import Forks
from tests.patience import patient
from tests.ranks.jobs import (
    MPI_LIBRARIES,
    mpi_command,
    outputs_of,
    start_mpi_jobs,
    start_process,
    torch_job,
    wait_for,
)

#: How long some exchanges wait, in seconds: what comes late takes as long, what comes in time must be quicker.
HASTY_SECONDS = math.ceil(patient(1))

# What every rank runs. It gets the kind of job, and for torch its rank, the number of ranks and the address.
RANK = """
import json, os, sys, threading
from penstock.ranks import ranks_of_this_job
from penstock.ranks.transport_of_job import rank_of_this_process
from penstock.errors import PenstockError

def outcome(function, *arguments):
    try:
        return function(*arguments)
    except (PenstockError, OSError) as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__]

report = {}
if sys.argv[2] == "mpi":
    report["too early"] = outcome(ranks_of_this_job)
    from mpi4py import MPI
    training_sum = lambda value: MPI.COMM_WORLD.allreduce(value)
else:
    import torch.distributed as distributed
    rank, size = int(sys.argv[4]), int(sys.argv[5])
    os.environ["WORLD_SIZE"] = str(size)
    report["too early"] = outcome(ranks_of_this_job)
    distributed.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=size)
    import torch
    def training_sum(value):
        tensor = torch.tensor(value)
        distributed.all_reduce(tensor)
        return tensor.item()

ranks = ranks_of_this_job()
hasty = ranks_of_this_job(timeout_seconds=HASTY_SECONDS)
mine, last = ranks.rank, ranks.size - 1
report["rank"], report["size"] = ranks.rank, ranks.size
assert rank_of_this_process() == mine  # which no variable says

report["gathered"] = ranks.all_gather("names", {"rank": mine, "text": "\\u00e9\\n"})
report["decided"] = ranks.gather_then_decide("a sum", lambda: mine, sum)
report["asked"] = ranks.on_rank_zero("the folder", lambda: f"seen by {mine}")

long = "x" * 9_500_000
values = ranks.all_gather("long values", long + str(mine) if mine in (0, last) else "short")
report["long"] = [len(value) for value in values]
report["long intact"] = values[0] == long + "0" and values[last] == long + str(last)

data = ranks.on_rank_zero("bytes", lambda: bytes(range(250)) * 40_000)
report["bytes"] = data == bytes(range(250)) * 40_000

def write():
    if mine == last:
        raise OSError(28, "No space left on device")
report["failed"] = outcome(ranks.gather_then_decide, "writing", write)
def commit(values):
    raise OSError(5, "Input/output error")
report["not committed"] = outcome(ranks.gather_then_decide, "the commit", lambda: None, commit)
report["after failures"] = ranks.all_gather("again", mine)

# From a thread of its own, while the training goes on with collectives of its own.
exchanged = []
def exchange():
    exchanged.extend(sum(ranks.all_gather(f"exchange {number}", number)) for number in range(30))
thread = threading.Thread(target=exchange)
thread.start()
report["trained"] = sum(training_sum(mine) for _ in range(30))
thread.join()
report["exchanged"] = exchanged

# The last rank comes only once all others have given up.
if mine == last:
    ranks.all_gather("the others gave up", None)
report["late"] = outcome(hasty.all_gather, "the commit of step 300", mine)
if mine != last:
    ranks.all_gather("the others gave up", None)
report["after being late"] = hasty.all_gather("again", mine)

# Rank 0 does so.
if mine == 0:
    ranks.all_gather("the others gave up", None)
report["late rank 0"] = outcome(hasty.all_gather, "the commit of step 301", mine)
if mine != 0:
    ranks.all_gather("the others gave up", None)
report["after a late rank 0"] = hasty.all_gather("again", mine)

if sys.argv[2] == "mpi":
    report["ended"] = None
elif mine != last:  # the last has ended, without a word
    report["ended"] = outcome(hasty.all_gather, "the commit of step 302", mine)
with open(f"{sys.argv[1]}/{mine}.json", "w") as file:
    json.dump(report, file)
if sys.argv[2] == "torch":
    distributed.destroy_process_group()
""".replace("HASTY_SECONDS", str(HASTY_SECONDS))

JOBS = {"torch-tcp-4": 4, "torch-file-2": 2, "mpich-4": 4, "mpich-2": 2, "openmpi-3": 3}
#: Ranks of MPI take processors while they wait, and interpreters of their own.
SLOW_JOBS = ["mpich-4", "openmpi-3", "torch-file-2"]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def all_reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> dict[str, Reports]:
    """Run all jobs of the tests that run at once, for they mostly wait: for time-outs, and for late ranks."""
    tests = [test for test in request.session.items if isinstance(test, pytest.Function)]
    asked = {test.callspec.params.get("reports") for test in tests if hasattr(test, "callspec")}
    jobs = {kind: size for kind, size in JOBS.items() if kind in asked}
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in jobs}
    script = tmp_path_factory.mktemp("script") / "rank.py"
    script.write_text(RANK)
    torch_rows, mpi_jobs = [], []
    for kind, size in jobs.items():
        launcher, _, _ = kind.partition("-")
        if launcher != "torch":
            mpi_jobs.append(start_mpi_jobs(script, [(size, [str(folders[kind])])], launcher))
        else:
            address = f"tcp://127.0.0.1:{_free_port()}" if "tcp" in kind else f"file://{folders[kind]}/store"
            torch_rows.append([torch_job(str(folders[kind]), size=size, address=address)])
    wait_for(forks.start(script, torch_rows), *mpi_jobs)
    return {
        kind: [json.loads((folders[kind] / f"{rank}.json").read_text()) for rank in range(size)]
        for kind, size in jobs.items()
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW_JOBS else kind for kind in JOBS]
)
def reports(request: pytest.FixtureRequest, all_reports: dict[str, Reports]) -> Reports:
    return all_reports[request.param]


class TestRanksContract:
    def test_every_rank_knows_its_place(self, reports: Reports) -> None:
        assert [report["rank"] for report in reports] == list(range(len(reports)))
        assert {report["size"] for report in reports} == {len(reports)}

    def test_a_rank_that_cannot_know_the_others_yet_is_told(self, reports: Reports) -> None:
        assert all(report["too early"][0] == "ConfigError" for report in reports)

    def test_what_one_rank_gives_all_get(self, reports: Reports) -> None:
        given = [{"rank": rank, "text": "é\n"} for rank in range(len(reports))]
        assert [report["gathered"] for report in reports] == [given] * len(reports)

    def test_rank_0_decides_for_all(self, reports: Reports) -> None:
        assert {report["decided"] for report in reports} == {sum(range(len(reports)))}
        assert {report["asked"] for report in reports} == {"seen by 0"}

    def test_long_values_arrive_whole(self, reports: Reports) -> None:
        lengths = [9_500_001, *[5] * (len(reports) - 2), 9_500_001]
        assert all(report["long"] == lengths and report["long intact"] for report in reports)

    def test_bytes_of_rank_0_arrive_on_all(self, reports: Reports) -> None:
        assert all(report["bytes"] for report in reports)

    def test_what_fails_on_one_rank_is_raised_on_all_and_names_it(self, reports: Reports) -> None:
        size = len(reports)
        message = f"rank {size - 1} of {size}, writing: OSError: [Errno 28] No space left on device"
        assert all(report["failed"][:2] == ["RankError", message] for report in reports)
        assert [report["failed"][2] for report in reports] == ["NoneType"] * (size - 1) + ["OSError"]

    def test_a_decision_that_fails_is_raised_on_all(self, reports: Reports) -> None:
        message = f"rank 0 of {len(reports)}, the commit: OSError: [Errno 5] Input/output error"
        assert all(report["not committed"][:2] == ["RankError", message] for report in reports)

    def test_a_thread_exchanges_while_the_training_uses_collectives_of_its_own(
        self, reports: Reports
    ) -> None:
        size = len(reports)
        assert all(report["trained"] == 30 * sum(range(size)) for report in reports)
        assert all(report["exchanged"] == [size * number for number in range(30)] for report in reports)

    def test_a_late_rank_is_named_on_all(self, reports: Reports) -> None:
        size = len(reports)
        expected = (
            f"rank {size - 1} of {size} did not arrive at the commit of step 300 within {HASTY_SECONDS} s"
        )
        assert all(report["late"][0] == "WaitTimeout" for report in reports)
        assert all(report["late"][1].startswith(expected) for report in reports)

    def test_a_late_rank_0_is_named_on_all(self, reports: Reports) -> None:
        expected = (
            f"rank 0 of {len(reports)} did not arrive at the commit of step 301 within {HASTY_SECONDS} s"
        )
        assert all(report["late rank 0"][0] == "WaitTimeout" for report in reports)
        assert all(report["late rank 0"][1].startswith(expected) for report in reports)

    def test_ranks_go_on_after_failures_and_time_outs(self, reports: Reports) -> None:
        for exchange in ("after failures", "after being late", "after a late rank 0"):
            assert all(report[exchange] == list(range(len(reports))) for report in reports)

    def test_a_rank_that_ended_is_named_on_all_that_are_left(self, reports: Reports) -> None:
        """Not over MPI, whose launcher ends the whole job then."""
        size = len(reports)
        for report in reports[:-1]:
            if report["ended"] is not None:
                assert report["ended"][1].startswith(
                    f"rank {size - 1} of {size} did not arrive at the commit of step 302 within {HASTY_SECONDS} s"
                )


@pytest.mark.parametrize("library", MPI_LIBRARIES)
def test_mpi_that_cannot_be_called_from_two_threads_is_refused(library: str) -> None:
    script = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
from penstock.ranks import ranks_of_this_job
from penstock.errors import ConfigError
try:
    ranks_of_this_job()
except ConfigError as error:
    assert 'mpi4py.rc.thread_level = "multiple"' in str(error)
else:
    raise AssertionError("MPI for fewer threads was taken")
"""
    outputs_of(start_process(*mpi_command(2, library), "-c", script))


@pytest.mark.slow
@pytest.mark.parametrize("library", MPI_LIBRARIES)
def test_a_late_rank_of_mpi_is_named_where_all_prepare_and_fails_when_it_comes(library: str) -> None:
    """All ranks duplicate a communicator first, for which MPI itself would wait for ever."""
    script = """
from mpi4py import MPI
from penstock.errors import WaitTimeout
from penstock.ranks import ranks_of_this_job
world = MPI.COMM_WORLD
late = world.Get_rank() == 1
if late:
    [world.recv(source=rank, tag=5) for rank in (0, 2)]
try:
    ranks_of_this_job(timeout_seconds=0.5)
except WaitTimeout as error:
    print(error, flush=True)
if not late:
    world.send("gave up", 1, tag=5)
world.Barrier()
"""
    told, _ = outputs_of(start_process(*mpi_command(3, library), "-c", script))
    assert told.count("rank 1 of 3 did not come within 0.5 s to where all ranks of MPI prepare") == 2, told
    assert told.count("not all ranks came within 0.5 s") == 1, told
