"""What ranks agree on, over messages in memory: each rank is a thread."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.patience import brief, patient
from tests.ranks.in_memory import MemoryJob, MemoryTransport, run

from penstock.checkpoint.files.parts import TornError
from penstock.errors import ConfigError, DataError, FormatError, RankError, WaitTimeout
from penstock.ranks import exchange, transport_of_job
from penstock.ranks.exchange import SIGNS_PER_TIMEOUT, Ranks, alone, ranks_of_this_job, shared_ranks
from penstock.ranks.transport import NoTransport
from penstock.ranks.transport_of_job import Job, rank_of_this_process, transport_of_this_job

# -- Errors keep their kind, and their cause where they happened --


def test_an_error_of_ours_is_of_the_same_kind_on_every_rank() -> None:
    """A full disk on rank 1: handlers of DataError work whatever the number of ranks."""
    cause = DataError("/scratch is full")

    def part(ranks: Ranks) -> None:
        def write() -> None:
            if ranks.rank == 1:
                raise cause

        ranks.gather_then_decide("writing step 300", write)

    errors = run(3, part)

    assert [type(error) for error in errors] == [DataError] * 3
    assert {str(error) for error in errors} == {"rank 1 of 3, writing step 300: /scratch is full"}
    assert [error.__cause__ for error in errors] == [None, cause, None]


def test_an_error_of_a_kind_of_a_module_is_of_the_kind_it_is_of() -> None:
    """A part that is torn is damage on every rank: a fallback takes another snapshot."""

    def part(ranks: Ranks) -> None:
        ranks.on_rank_zero("reading step 300", lambda: (_ for _ in ()).throw(TornError("it is cut off")))

    assert [type(error) for error in run(2, part)] == [FormatError] * 2


def test_every_rank_that_failed_is_named_and_many_are_counted() -> None:
    def part(ranks: Ranks) -> None:
        def write() -> None:
            raise ValueError(f"wrong on {ranks.rank}")

        ranks.gather_then_decide("writing", write)

    errors = run(10, part)

    assert all(type(error) is RankError for error in errors)
    assert str(errors[9]).startswith("rank 0 of 10, writing: ValueError: wrong on 0; rank 1 of 10")
    assert str(errors[9]).endswith("rank 7 of 10, writing: ValueError: wrong on 7; and 2 more ranks")


def test_what_is_no_json_fails_on_every_rank_and_not_between() -> None:
    def part(ranks: Ranks) -> None:
        ranks.all_gather("layouts", object() if ranks.rank == 1 else 1)

    errors = run(2, part)

    assert all(isinstance(error, RankError) for error in errors)
    assert "rank 1 of 2, layouts: TypeError: Object of type object is not JSON serializable" in str(errors[0])


def test_a_failure_while_rank_0_decides_is_raised_everywhere() -> None:
    def part(ranks: Ranks) -> None:
        def commit(values: list[int]) -> None:
            raise DataError("the manifest cannot be written")

        ranks.gather_then_decide("the commit of step 7", lambda: 1, commit)

    errors = run(3, part)

    assert [type(error) for error in errors] == [DataError] * 3
    assert str(errors[2]) == "rank 0 of 3, the commit of step 7: the manifest cannot be written"


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_is_interrupted_says_so_and_is_not_kept(leaver: int) -> None:
    """Ctrl-C on one rank only: it must not wait for the others, nor they a minute for it."""

    def part(ranks: Ranks) -> None:
        def write() -> None:
            if ranks.rank == leaver:
                raise KeyboardInterrupt

        ranks.gather_then_decide("writing", write)

    errors = run(3, part)

    assert type(errors[leaver]) is KeyboardInterrupt
    for rank in {0, 1, 2} - {leaver}:
        assert type(errors[rank]) is RankError
        assert f"rank {leaver} of 3 left writing: KeyboardInterrupt" in str(errors[rank])


def test_ranks_at_different_places_are_told_instead_of_given_each_others_values() -> None:
    def part(ranks: Ranks) -> None:
        ranks.all_gather("the commit of step 300" if ranks.rank != 2 else "the listing", 1)

    errors = run(4, part)

    assert all(type(error) is RankError for error in errors)
    assert "rank 0 of 4 is at the commit of step 300, rank 2 at the listing" in str(errors[3])


def test_rank_0_hands_bytes_to_all_and_gets_bytes_of_all() -> None:
    """The listing of a data set, which only rank 0 makes."""
    listing = bytes(range(256)) * 3 + b"\n\n"
    calls = []

    def part(ranks: Ranks) -> Any:
        def make() -> bytes:
            calls.append(ranks.rank)
            return listing

        handed = ranks.on_rank_zero("the listing", make)
        lengths = ranks.gather_then_decide(
            "lengths", lambda: bytes(ranks.rank), lambda all_: [*map(len, all_)]
        )
        return handed, lengths, ranks.on_rank_zero("nothing", bytes)

    assert run(3, part) == [(listing, [0, 1, 2], b"")] * 3
    assert calls == [0]


# -- Who does not come --


def test_a_missing_rank_is_named_on_every_rank_that_came_and_on_it_when_it_comes() -> None:
    job = MemoryJob(4)
    late = threading.Event()
    came = []

    def part(ranks: Ranks) -> Any:
        if ranks.rank == 2:
            late.wait(patient(30))
        if ranks.rank == 0:
            job.wait_until_sent(1, by=[1, 3])
        try:
            ranks.all_gather("the commit of step 300", ranks.rank)
        except WaitTimeout as error:
            came.append(ranks.rank)
            if len(came) == 3:
                late.set()
            first = error
        if ranks.rank == 2:
            job.wait_until_read(2, 0)  # its late message comes to rank 0 in the middle of the next exchange
        return first, ranks.all_gather("the next exchange", ranks.rank)

    answers = run(4, part, timeout_seconds=brief(0.5), job=job)

    expected = f"rank 2 of 4 did not arrive at the commit of step 300 within {brief(0.5):g} s"
    assert all(str(error).startswith(expected) for error, _ in answers)
    assert [values for _, values in answers] == [[0, 1, 2, 3]] * 4


def test_a_missing_rank_0_is_named_by_the_others_and_fails_when_it_comes() -> None:
    """It must not decide for ranks that have gone: those gave up, and said so."""
    gone = threading.Semaphore(0)
    decided: list[list[int]] = []

    def part(ranks: Ranks) -> None:
        if ranks.rank == 0:
            gone.acquire(timeout=patient(30))
            gone.acquire(timeout=patient(30))
            ranks.gather_then_decide("the commit", lambda: 1, decided.append)
        try:
            ranks.all_gather("the commit", 1)
        finally:
            gone.release()

    errors = run(3, part, timeout_seconds=0.1)

    assert [type(error) for error in errors] == [WaitTimeout] * 3
    assert str(errors[1]).startswith("rank 0 of 3 did not arrive at the commit within 0.1 s")
    assert decided == []


def test_messages_of_ranks_that_went_on_are_kept_for_rank_0() -> None:
    """The others gave up waiting for it, and are at the next exchange when it comes to the first."""
    job = MemoryJob(3)

    def part(ranks: Ranks) -> Any:
        if ranks.rank == 0:
            job.wait_until_sent(3, by=[1, 2])  # a value, that they gave up, a value
        try:
            ranks.all_gather("the first", "wrong")
        except WaitTimeout:
            return ranks.all_gather("the second", ranks.rank)

    assert run(3, part, timeout_seconds=brief(0.5), job=job) == [[0, 1, 2]] * 3


def test_a_rank_that_works_for_longer_than_the_time_out_is_not_missing() -> None:
    """One rank writes a hundred gigabytes, and then rank 0 takes its time to commit."""
    job = MemoryJob(2)
    more_than_a_time_out = SIGNS_PER_TIMEOUT + 2

    def part(ranks: Ranks) -> Any:
        def write() -> int:
            if ranks.rank == 1:
                job.wait_until_sent(more_than_a_time_out, by=[1])
            return 1 + ranks.rank

        def commit(values: list[int]) -> int:
            job.wait_until_sent(job.sent[0] + more_than_a_time_out, by=[0])
            return sum(values)

        return ranks.gather_then_decide("the commit", write, commit)

    assert run(2, part, timeout_seconds=brief(0.5), job=job) == [3, 3]


def test_a_rank_that_dies_while_it_works_is_named() -> None:
    """Its signs of life end: the time-out counts from the last."""
    ended = threading.Event()

    class Dying(MemoryTransport):
        def send(self, to: int, message: bytes) -> None:
            if not ended.is_set():
                super().send(to, message)
            ended.set()  # after its first sign

    job = MemoryJob(2)

    def one(rank: int) -> Any:
        transport = Dying(job, 1) if rank == 1 else job.transport(0)
        try:
            return Ranks(transport, timeout_seconds=0.6).gather_then_decide(
                "writing", lambda: rank == 1 and ended.wait(patient(30))
            )
        except WaitTimeout as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(one, range(2)))
    assert answers[0].startswith("rank 1 of 2 did not arrive at writing within 0.6 s")


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_is_named_at_the_next_exchange_and_waits_for_nobody(leaver: int) -> None:
    left = threading.Event()

    def part(ranks: Ranks) -> Any:
        ranks.all_gather("step 1", 1)
        if ranks.rank == leaver:
            ranks.leave(ZeroDivisionError("no loss"))
            left.set()
            return "left"
        assert left.wait(patient(30))
        return ranks.all_gather("step 2", 2)

    answers = run(3, part)

    assert answers[leaver] == "left"
    for rank in {0, 1, 2} - {leaver}:
        assert type(answers[rank]) is RankError
        assert f"rank {leaver} of 3 left the others: ZeroDivisionError: no loss" in str(answers[rank])


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_a_known_exchange_has_the_others_raise_an_error_of_its_kind(leaver: int) -> None:
    def part(ranks: Ranks) -> Any:
        if ranks.rank == leaver:
            return ranks.leave(ConfigError("batch_size is 0"), "the start")
        return ranks.all_gather("the start", 1)

    answers = run(3, part)

    for rank in {0, 1, 2} - {leaver}:
        assert type(answers[rank]) is ConfigError
        assert str(answers[rank]) == f"rank {leaver} of 3, the start: batch_size is 0"


def test_ranks_that_all_left_can_meet_again() -> None:
    """Such as all ranks that an exception took out of one store, and that catch it, and go on."""

    def part(ranks: Ranks) -> Any:
        ranks.leave(KeyboardInterrupt())
        return ranks.all_gather("again", ranks.rank)

    assert run(3, part) == [[0, 1, 2]] * 3


def test_nobody_leaves_an_exchange_that_goes_on() -> None:
    job = MemoryJob(2)

    def part(ranks: Ranks) -> Any:
        return ranks.gather_then_decide("writing", lambda: ranks.leave(ZeroDivisionError()) or 5)  # type: ignore[func-returns-value]

    assert run(2, part, job=job) == [[5, 5]] * 2
    assert not any(job.boxes.values())


# -- Alone, and which job this is --


def test_a_rank_alone_gets_its_own_error_as_it_is() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        alone().gather_then_decide("writing", fail)


def test_values_do_not_travel_where_there_is_but_one_rank() -> None:
    value = object()
    assert alone().all_gather("layouts", value) == [value]
    assert alone().on_rank_zero("the folder", lambda: value) is value


def test_exchanges_do_not_nest() -> None:
    ranks = alone()

    with pytest.raises(AssertionError, match="do not nest"):
        ranks.gather_then_decide("outer", lambda: ranks.all_gather("inner", 1))
    assert ranks.all_gather("afterwards", 1) == [1]


def test_a_time_out_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout_seconds is 0"):
        Ranks(NoTransport(), timeout_seconds=0)


def test_a_process_that_no_launcher_started_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, variable, _ in transport_of_job.LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)

    assert ranks_of_this_job().size == 1


@pytest.mark.parametrize(
    ("variable", "remedy"),
    [
        ("WORLD_SIZE", "init_process_group"),
        ("PMI_SIZE", "mpi4py"),
        ("OMPI_COMM_WORLD_SIZE", "mpi4py"),
        ("SLURM_STEP_NUM_TASKS", "init_process_group"),
    ],
)
def test_one_of_several_processes_that_knows_no_other_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, remedy: str
) -> None:
    """Else each rank would take itself for the whole job, and all would write one store."""
    for _, name, _ in transport_of_job.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(os.environ, variable, "4")
    (number,) = [name for name, size, _ in transport_of_job.LAUNCHERS if size == variable]
    monkeypatch.delenv(number, raising=False)

    with pytest.raises(ConfigError, match=rf"{variable} is 4.*{remedy}"):
        transport_of_this_job()
    assert rank_of_this_process() == 0
    monkeypatch.setenv(number, "3")
    assert rank_of_this_process() == 3


#: What a task of `srun --mpi=pmi2 -n 4` has.
PMI2 = {"PMI_RANK": "2", "PMI_SIZE": "4", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("others", "remedies", "rank"),
    [
        ({}, ["init_process_group", "jax.distributed", "mpi4py"], 2),
        # Of `mpiexec -n 4` on two hosts, which it reaches by a step of its own with a task for each.
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, ["mpi4py"], 2),
        ({"RANK": "1", "WORLD_SIZE": "8"}, ["init_process_group"], 1),
    ],
)
def test_pmi_under_slurm_is_of_mpi_only_where_mpiexec_started_the_process(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, str], remedies: list[str], rank: int
) -> None:
    known = {"init_process_group", "jax.distributed", "mpi4py"}
    for number, size, _ in transport_of_job.LAUNCHERS:
        monkeypatch.delenv(number, raising=False)
        monkeypatch.delenv(size, raising=False)
    for name, value in (PMI2 | others).items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError) as refused:
        transport_of_this_job()

    assert {each for each in known if each in str(refused.value)} == set(remedies)
    assert rank_of_this_process() == rank


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1"},
        # What a script of `sbatch --ntasks=4` runs without srun; with `srun -n 1`; by torchrun in each of 4 tasks.
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NPROCS": "4"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "WORLD_SIZE": "1"},
        {**PMI2, "WORLD_SIZE": "1"},
    ],
)
def test_a_launcher_of_one_process_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for _, name, _ in transport_of_job.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert transport_of_this_job().size == 1


def test_ranks_that_are_shared_are_the_same_as_long_as_the_job_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader for each evaluation, thousands of times: none makes connections of its own."""
    first, second = object(), object()
    jobs = [Job("torch", "2 ranks", carrier=carrier) for carrier in (first, first, second, second)]
    monkeypatch.setattr(exchange, "job_of_this_process", lambda: jobs.pop(0))
    monkeypatch.setattr(exchange, "transport_of_this_job", lambda **_: NoTransport())
    monkeypatch.setattr(exchange, "_shared", None)
    pid = os.getpid()

    one, again, of_a_new_group = (shared_ranks() for _ in range(3))
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    of_a_fork = shared_ranks()

    assert one is again
    assert len({id(ranks) for ranks in (one, of_a_new_group, of_a_fork)}) == 3
