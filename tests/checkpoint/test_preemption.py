"""Real signals, to this process and to the ranks of real jobs."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import IO, Any

import pytest
from tests.for_each import for_each
from tests.forking import Forks
from tests.ranks.jobs import end, mpi_command, start_process

from penstock.checkpoint import preemption
from penstock.checkpoint.preemption import StopOnSignal
from penstock.errors import ConfigError
from penstock.ranks.transport import NoTransport


def stop_on(**options: Any) -> StopOnSignal:
    defaults: dict[str, Any] = {"grace_seconds": 30, "transport": NoTransport(), "report": lambda line: None}
    return StopOnSignal(**defaults | options)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_are_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) is handler
        signal.signal(number, handler)


# One rank


def test_a_loop_stops_after_the_step_in_which_the_signal_came() -> None:
    steps = []
    with stop_on() as stop:
        for step in range(100, 110):
            if step == 103:
                send(signal.SIGTERM)
            steps.append(step)
            if stop.agreed(step):
                break

    assert steps == [100, 101, 102, 103]
    assert stop.requested
    assert stop.exit_code == 143


def test_a_loop_that_got_no_signal_ends_by_itself() -> None:
    with stop_on() as stop:
        assert not any(stop.agreed(step) for step in range(5))

    assert not stop.requested
    assert stop.exit_code == 0


def test_a_signal_after_the_last_step_stops_nothing_but_is_remembered() -> None:
    with stop_on() as stop:
        stop.agreed(0)
        send(signal.SIGTERM)

    assert stop.requested
    assert stop.exit_code == 0


def test_other_signals_can_be_chosen() -> None:
    """Slurm's --signal=USR1@120."""
    with stop_on(signals=[signal.SIGUSR1]) as stop:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        send(signal.SIGUSR1)
        assert stop.agreed(1)

    assert stop.exit_code == 128 + signal.SIGUSR1


def test_the_previous_handler_comes_back_and_gets_the_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def previous(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGTERM, previous)
    try:
        with stop_on() as stop:
            send(signal.SIGTERM)
            send(signal.SIGTERM)  # the same request again, by another way
            assert seen == []
            monkeypatch.setattr(preemption, "REPEAT_SECONDS", 0.0)
            send(signal.SIGTERM)
            assert seen == [signal.SIGTERM]
            assert stop.agreed(7)
        assert signal.getsignal(signal.SIGTERM) is previous
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_was_set_since_stays() -> None:
    """As a trainer does that is given the loop: it puts back what it found, or its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with stop_on():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_is_agreed_and_what_took_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with stop_on(report=lines.append) as stop:
        send(signal.SIGTERM)
        now[0] += 2.5
        assert stop.agreed(41)
        now[0] += 31

    assert lines[0] == "SIGTERM: training stops after step 41, with 27.5 s of 30 s left for a snapshot"
    assert lines[1].startswith(
        "the last step and its snapshot took 33.5 s from SIGTERM on, but grace_seconds is 30"
    )
    assert len(lines) == 2


def test_a_stop_within_the_grace_needs_no_second_line() -> None:
    lines: list[str] = []
    with stop_on(report=lines.append) as stop:
        send(signal.SIGTERM)
        assert stop.agreed(41)
        assert stop.agreed(42)  # whoever asks again is told the same

    assert len(lines) == 1


def test_an_exception_in_the_loop_passes_and_the_handler_comes_back() -> None:
    with pytest.raises(ZeroDivisionError), stop_on():
        raise ZeroDivisionError


def test_a_process_forked_from_the_training_ends_by_the_signal_as_it_would_have() -> None:
    """A scheduler's SIGTERM, or terminate(), to a worker of a DataLoader, which must not live on."""
    with stop_on() as stop:
        child = os.fork()
        if child == 0:
            send(signal.SIGTERM)
            os._exit(0)  # only if the signal was ignored
        _, status = os.waitpid(child, 0)

    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not stop.requested


@for_each(
    ("options", "message"),
    [
        ({"grace_seconds": 0}, "grace_seconds is 0"),
        ({"grace_seconds": "60 s"}, "grace_seconds is '60 s'"),
        ({"transport": 3}, "transport is 3; give an object with rank, size, send and receive"),
        ({"signals": []}, r"signals is \[\]; name at least one"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stop_on(**options)


def test_a_thread_cannot_take_the_signals_of_its_process() -> None:
    errors: list[Exception] = []

    def enter() -> None:
        try:
            stop_on().__enter__()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert "only a process's main thread may handle signals" in str(errors[0])


# Many ranks

# What every rank runs: training that never ends by itself. It gets the name of the job, a folder for its report,
# and for torch the address, its rank and how many there are.
RANK = """
import json, os, sys, time
from penstock.checkpoint.preemption import StopOnSignal

def say(*words):  # one write, which does not mix with that of another process
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

job, folder = sys.argv[1:3]
if job == "mpi":
    from mpi4py import MPI
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    all_reduce = lambda: MPI.COMM_WORLD.allreduce(1)
else:
    import torch
    import torch.distributed as distributed
    rank, size = int(sys.argv[4]), int(sys.argv[5])
    distributed.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=size)
    ones = torch.ones(1)
    all_reduce = lambda: distributed.all_reduce(ones)

lines, stopped, failed = [], None, None
try:
    with StopOnSignal(grace_seconds=2 if job == "frozen" else 60, report=lines.append) as stop:
        for step in range(10**9):
            if job in ("one", "all", "mpi"):
                all_reduce()
            time.sleep(0.002)  # the rest of the step, which leaves the processor to others
            if step == 0:  # before anything can be agreed on
                say("trains", job, rank, os.getpid())
            if step == 3 and job == "fails" and rank == 1:
                raise ValueError("loss is NaN")
            if stop.agreed(step):
                stopped = step
                break
except Exception as error:
    failed = f"{type(error).__name__}: {error}"
with open(f"{folder}/{job}-{rank}.json", "w") as file:
    json.dump({"stopped": stopped, "failed": failed, "lines": lines, "requested": stop.requested}, file)
say("ends", job, rank, os.getpid())
sys.exit(stop.exit_code)
"""

#: Job: how many ranks, and which get a SIGTERM in the middle of their training.
TORCH_JOBS = {"one": (4, [2]), "all": (2, [0, 1]), "fails": (2, []), "frozen": (2, [0])}
MPI_RANKS = 2


class Told:
    """Where the ranks of all jobs are, of which they tell a line each time."""

    def __init__(self, lines: IO[str]) -> None:
        self.lines = lines
        self.pids: dict[tuple[str, int], int] = {}
        self.ended: set[tuple[str, int]] = set()

    def hear(self) -> None:
        line = self.lines.readline()
        match line.split():
            case ["trains", job, rank, pid]:
                self.pids[job, int(rank)] = int(pid)
            case ["ends", job, rank, pid]:
                self.ended.add((job, int(rank)))
            case _:
                raise AssertionError(line + self.lines.read())

    def send(self, job: str, rank: int, number: int) -> None:
        os.kill(self.pids[job, rank], number)


Reports = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Reports:
    """Run all jobs at once, send their signals, and return what each rank reports."""
    folder = tmp_path_factory.mktemp("jobs")
    script = folder / "rank.py"
    script.write_text(RANK)
    rows = []
    for job, (size, _) in TORCH_JOBS.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        rows.append([[[job, str(folder), address, str(rank), str(size)] for rank in range(size)]])
    sizes = {job: size for job, (size, _) in TORCH_JOBS.items()}
    with forks.start(script, rows) as torch_jobs:
        told = Told(torch_jobs.out)
        while len(told.pids) < sum(sizes.values()):
            told.hear()
        told.send("frozen", 1, signal.SIGSTOP)
        for job, (_, to) in TORCH_JOBS.items():
            for rank in to:
                told.send(job, rank, signal.SIGTERM)
        while ("frozen", 0) not in told.ended:
            told.hear()
        told.send("frozen", 1, signal.SIGCONT)
        last_words, codes = torch_jobs.wait()
    assert set(codes.values()) <= {0, 143}, last_words
    pids = told.pids
    mpi_job = start_process(*mpi_command(MPI_RANKS), str(script), "mpi", str(folder))
    assert mpi_job.stdout is not None
    try:
        told = Told(mpi_job.stdout)
        while len(told.pids) < MPI_RANKS:
            told.hear()
        told.send("mpi", 1, signal.SIGTERM)
        mpi_job.communicate()
    finally:
        end(mpi_job)

    read: Reports = {
        job: [json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in range(size)]
        for job, size in [*sizes.items(), ("mpi", MPI_RANKS)]
    }
    for (job, rank), pid in pids.items():
        read[job][rank]["exit"] = codes[pid]
    return read


@pytest.mark.parametrize("job", ["one", "all", "mpi"])
def test_all_ranks_stop_after_the_same_step(reports: Reports, job: str) -> None:
    ranks = reports[job]

    assert len({rank["stopped"] for rank in ranks}) == 1
    assert ranks[0]["stopped"] is not None
    assert [rank["failed"] for rank in ranks] == [None] * len(ranks)


def test_a_signal_to_one_rank_stops_all_and_ends_all_alike(reports: Reports) -> None:
    ranks = reports["one"]

    assert [rank["requested"] for rank in ranks] == [False, False, True, False]
    assert [rank["exit"] for rank in ranks] == [143] * 4
    assert ranks[0]["lines"] == [f"SIGTERM: all 4 ranks stop after step {ranks[0]['stopped']}"]
    assert [rank["lines"] for rank in ranks[1:]] == [[]] * 3


def test_a_signal_to_every_rank_is_one_request(reports: Reports) -> None:
    ranks = reports["all"]

    assert [rank["exit"] for rank in ranks] == [143] * 2
    assert len(ranks[0]["lines"]) == 1
    assert "of 60 s left for a snapshot" in ranks[0]["lines"][0]


def test_an_exception_on_one_rank_is_raised_on_all(reports: Reports) -> None:
    """Else they would train on, or wait in a collective for a rank that left."""
    first, second = reports["fails"]

    assert first["failed"] == "RankError: rank 1 of 2 left the loop: ValueError: loss is NaN"
    assert second["failed"] == "ValueError: loss is NaN"


def test_a_rank_that_hangs_is_named_on_all_and_on_it_when_it_goes_on(reports: Reports) -> None:
    """Within half the grace, so that there is time to do something else."""
    expected = "RankError: rank 1 of 2 did not answer within 1 s when the ranks were to agree after which step to stop"

    assert all(rank["failed"].startswith(expected) for rank in reports["frozen"])
