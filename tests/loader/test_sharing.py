"""Ranks of a host that share what they keep: each sample is read once for all, and no batch is another for it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.faults import PIPES, FaultSchedule, Namespace, Process
from tests.forking import Forks
from tests.interpreters import Interpreters
from tests.loader.pictures import CountedFolder, drawn
from tests.loader.sharing_data import SAMPLE_BYTES, Counted, expected, loader, ranks_in, write_files
from tests.patience import patient, wait_until
from tests.policy.test_scheduler import machine
from tests.ranks.in_memory import run
from tests.ranks.jobs import reports_in, start_mpi_jobs, torch_job, wait_for

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.local_disk import KeptOnDisks
from penstock.loader.pictures import KeptPictures
from penstock.loader.pixels_on_disk import HEAD_BYTES
from penstock.loader.ranks_memory import Sharing
from penstock.loader.transforms import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize, ToTensor
from penstock.loader.transforms.geometry import pixel_bytes
from penstock.loader.transforms.pipeline import compile_pipeline
from penstock.measure.replay import replay_of
from penstock.measure.slow_source import SlowSource
from penstock.plan import AccessPlan, FullShuffle
from penstock.plan.serialise import read_plan
from penstock.policy import Placement
from penstock.policy.forms import CropForm
from penstock.policy.runnable import NO_QUEUE, WriteQueue, shared_loading
from penstock.ranks import Ranks, alone
from penstock.ranks.descriptors import DescriptorExchange
from penstock.store import FlatFolder, ImageFolder, MemoryTier, Source, disk
from penstock.trace import SOURCE, Kind, read_trace

SAMPLES, EPOCHS = 200, 3
#: In which ranks are killed; the last one is left.
ORDERS = list(itertools.permutations(range(3)))


def sharing_of(load: Loader) -> Sharing:
    sharing = load._parts.setup.sharing
    assert sharing is not None
    return sharing


def misses_of(sharing: Sharing) -> int:
    assert sharing.peers is not None
    return sharing.peers.misses


Batches = list[NDArray[np.int64]]


#: On which host the rank of a thread is.
here = threading.local()


@pytest.fixture
def separate_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, as threads, map the memory only of those of the host that `train` gives them; no answer is late."""
    monkeypatch.setattr("penstock.policy.peer_patience.LEAST_SECONDS", patient(30))
    monkeypatch.setattr("penstock.policy.peer_patience.MOST_SECONDS", patient(30))
    monkeypatch.setattr("penstock.ranks.descriptors.host_id", lambda: here.host)


def train(
    size: int,
    each_step: Callable[[Loader], None] = lambda load: None,
    traces: Path | None = None,
    hosts: int = 1,
    first: Callable[[Loader], None] | None = None,
    memories: Sequence[str] = (),
    slow: int | None = None,
    **options: Any,
) -> tuple[list[Batches], list[Counted], list[Sharing]]:
    """Return the ids of all ranks' batches, and their sources. Ranks end each step together, and check its bytes.

    slow: a rank whose half of the samples takes a second of its source, so that none waits for another.
    """
    options |= {"share": "hosts"} if hosts > 1 else {}
    sources, together = [Counted(SAMPLES) for _ in range(size)], threading.Barrier(size)
    found: list[Sharing] = [None] * size  # type: ignore[list-item]

    def source_of(rank: int) -> Source:
        if slow is not None:
            rate = SAMPLES * SAMPLE_BYTES / 2 if rank == slow else math.inf
            return SlowSource(sources[rank], 0.0, 0.0, rate)
        # Of a store that answers at once workers read by themselves, and homes read nothing for others. This one takes
        # long for each of a group that is read together, too: else a rank on a busy machine may take it for such a one.
        is_slow = options.get("policy") is not None
        return SlowSource(sources[rank], 0.0, 0.02, math.inf) if is_slow else sources[rank]

    def part(ranks: Ranks) -> Batches:
        here.host = f"host {ranks.rank % hosts}"
        batches = []
        traced: dict[str, Any] = {} if traces is None else {"trace": traces / f"{ranks.rank}.trace"}
        traced |= {"memory": memories[ranks.rank]} if memories else {}
        with (
            contextlib.ExitStack() as failing,
            loader(source_of(ranks.rank), ranks, **options, **traced) as load,
        ):
            failing.callback(together.abort)
            if first is not None:
                first(load)
            found[ranks.rank] = sharing_of(load)
            while load.position[0] < load.plan.epochs:
                for rows, ids in load:
                    assert (rows == expected(ids)).all()
                    batches.append(ids.copy())
                    each_step(load)
                    if slow is None:
                        together.wait(patient(30))
            failing.pop_all()
        return batches

    batches = run(size, part)
    assert not [each for each in batches if isinstance(each, BaseException)], batches
    return batches, sources, found


@pytest.fixture
def nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine keeps promises later than a store would answer that takes microseconds."""
    monkeypatch.setattr("penstock.policy.scheduler.Scheduler.waited", lambda *_: [])


def check_batches(of_ranks: list[Batches], first: tuple[int, int] = (0, 0)) -> None:
    """Assert that the global batches are those of a loader that is alone."""
    with loader(Counted(SAMPLES), alone(), rank=None, world_size=None, share=None) as one:
        one.start(*first)
        whole = [ids.copy() for _ in range(first[0], EPOCHS) for _, ids in one]
    assert [np.concatenate(each).tolist() for each in zip(*of_ranks, strict=True)] == [
        each.tolist() for each in whole
    ]


def test_ranks_of_a_host_that_read_from_different_places_are_named_in_one_line_and_links_are_no_places(
    tmp_path: Path,
) -> None:
    """Names and sizes are the same. Copies are legitimate; other data under the same names would be mixed."""
    one, copy = write_files(tmp_path / "one", 1), write_files(tmp_path / "copy", 1)
    (tmp_path / "link").symlink_to(one)

    def lines_of(*folders: Path) -> list[str]:
        lines = list[str]()

        def part(ranks: Ranks) -> None:
            source = FlatFolder(folders[ranks.rank], extensions=None)
            loader(source, ranks, batch_size=6, report=lines.append).close()

        assert run(len(folders), part) == [None] * len(folders)
        return lines

    (line,) = lines_of(one, copy, one)
    assert line.startswith("ranks of this host read from different places")
    assert f"(ranks 0, 2: FlatFolder '{one}'; rank 1: FlatFolder '{copy}')" in line
    assert "contents are not" in line
    assert not lines_of(one, tmp_path / "link", one)


@pytest.mark.usefixtures("nobody_is_late", "separate_hosts")
@pytest.mark.parametrize(
    ("size", "hosts", "memory", "policy"),
    [
        pytest.param(2, 1, "4 MB", None, marks=pytest.mark.slow),
        (4, 1, "5 kB", None),
        pytest.param(2, 2, "4 MB", None, marks=pytest.mark.slow),
        pytest.param(4, 2, "4 MB", None, marks=pytest.mark.slow),
        pytest.param(4, 4, "5 kB", None, marks=pytest.mark.slow),
        (4, 2, "4 MB", "hash-home"),
        pytest.param(4, 1, "5 kB", "cover", marks=pytest.mark.slow),
    ],
)
def test_ranks_read_each_sample_once_as_far_as_their_memory_holds_it(
    size: int, hosts: int, memory: str, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[object] = []

    def noted(chosen: Any, job: Any) -> Any:
        placed.append(job)
        return shared_loading(chosen, job)

    monkeypatch.setattr("penstock.loader.sharing.shared_loading", noted)
    batches, sources, found = train(size, hosts=hosts, memory=memory, policy=policy)

    check_batches(batches)
    assert len(placed) == hosts, "one rank of a host works out what all keep"
    reads = sum(int(source.reads.sum()) for source in sources)
    kept = np.concatenate([each.samples for each in found[0].shared.kept])
    assert kept.size == np.unique(kept).size
    if memory == "4 MB":
        assert kept.size == SAMPLES
        assert reads == SAMPLES
    else:
        assert 0.2 * SAMPLES < kept.size < SAMPLES
        # A read that is under way across the end of an epoch may serve both.
        bound = SAMPLES + (EPOCHS - 1) * (SAMPLES - kept.size)
        assert 0.95 * bound < reads <= bound
    assert [misses_of(each) for each in found] == [0] * size


def test_a_rank_that_is_ahead_waits_for_what_one_that_is_behind_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not step together: it begins its second epoch long before the other has read its part of the first."""
    monkeypatch.setattr("penstock.policy.decisions.SILENT_SECONDS", patient(30))
    monkeypatch.setattr("penstock.policy.decisions.VAIN_SECONDS", patient(60))

    batches, sources, _ = train(2, slow=1)

    check_batches(batches)
    assert sum(int(source.reads.sum()) for source in sources) == SAMPLES


@pytest.mark.usefixtures("nobody_is_late", "separate_hosts")
@pytest.mark.parametrize(
    ("hosts", "policy"),
    [
        (1, None),
        pytest.param(2, "hash-home", marks=pytest.mark.slow),
        pytest.param(2, "cover", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_unequal_memory_keep_as_much_as_each_has(hosts: int, policy: str | None) -> None:
    batches, sources, found = train(3, hosts=hosts, policy=policy, memories=["5 kB", "4 MB", "10 kB"])

    check_batches(batches)
    kept = [each.samples.size for each in found[0].shared.kept]
    assert sum(kept) == SAMPLES
    assert kept[1] > kept[2] > 0
    # By first-reader, what another keeps than reads it first is read until that one needs it; homes read for others.
    promised = found[0].shared.promised
    assert promised is not None
    reads = sum(int(source.reads.sum()) for source in sources)
    assert SAMPLES <= reads <= SAMPLES + (EPOCHS - 1) * (SAMPLES - promised.size)
    assert (promised.size < SAMPLES) == (policy is None)


def test_a_rank_without_memory_for_samples_is_named_where_ranks_share() -> None:
    def part(ranks: Ranks) -> None:
        loader(Counted(SAMPLES), ranks, memory="3600 B" if ranks.rank == 1 else "4 MB").close()

    for error in run(2, part):
        assert isinstance(error, ConfigError)
        assert "no memory is left on rank 1 of 2 for samples that others could read" in str(error)


def test_ranks_of_torch_distributed_mpich_and_open_mpi_read_each_sample_once_and_give_the_same_batches(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    script, sizes = Path(__file__).with_name("sharing_rank.py"), {"torch": 4, "mpich": 2, "openmpi": 3}
    folders = {launcher: tmp_path / launcher for launcher in sizes}
    for folder in folders.values():
        folder.mkdir()
    of_torch = torch_job(str(folders["torch"]), size=sizes["torch"], address=f"file://{tmp_path}/store")
    of_mpi = [
        start_mpi_jobs(script, [(sizes[library], [str(folders[library])])], library)
        for library in ("mpich", "openmpi")
    ]

    wait_for(forks.start(script, [[of_torch]]), *of_mpi)

    for launcher, size in sizes.items():
        kind = "torch" if launcher == "torch" else "mpi"
        reports = reports_in(folders[launcher], kind, size)
        check_batches([list(map(np.array, report["batches"])) for report in reports])
        assert sum(report["reads"] for report in reports) == SAMPLES


#: A rank under torchrun, which goes on where the last life of the job was; rank 1 is killed in the first.
RESTARTED = """
import json, os, signal, sys
from pathlib import Path

import torch.distributed as distributed
from tests.loader.sharing_data import Counted, expected, loader

from penstock.ranks import ranks_of_this_job

folder, rank, life = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
distributed.init_process_group("gloo")
saved, source = folder / "saved", Counted(200)
ranks, state = ranks_of_this_job(), json.loads(saved.read_text()) if life else None
with loader(source, ranks, state=state) as load, (folder / f"{life}-{rank}").open("w") as notes:
    while load.position[0] < load.plan.epochs:
        for rows, ids in load:
            assert (rows == expected(ids)).all()
            print(json.dumps(ids.tolist()), file=notes, flush=True)
            ranks.all_gather("a step", None)
            if rank == 0:
                (folder / "new").write_text(json.dumps(load.state_dict()))
                (folder / "new").rename(saved)
            ranks.all_gather("saved", None)
            if (life, rank) == (0, 1) and load.position >= (0, 5):
                os.kill(os.getpid(), signal.SIGKILL)
    ranks.all_gather("the end", None)
(folder / f"reads-{rank}").write_text(str(source.reads.sum()))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_job_that_torchrun_restarts_after_a_rank_was_killed_shares_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "rank.py").write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    ended = subprocess.run(
        [*torchrun, "--max-restarts", "1", str(tmp_path / "rank.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    lives = [[(tmp_path / f"{life}-{rank}").read_text() for rank in range(2)] for life in range(2)]
    batches = []
    for rank in range(2):
        before, after = ([np.array(json.loads(line)) for line in life[rank].splitlines()] for life in lives)
        # The rank that was not killed may have had one more, which is not saved.
        assert len(before) in (5, 6)
        batches.append([*before[:5], *after])
    check_batches(batches)
    assert sum(int((tmp_path / f"reads-{rank}").read_text()) for rank in range(2)) <= SAMPLES + 40


@pytest.mark.usefixtures("nobody_is_late", "separate_hosts")
@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_read_each_others_disks_which_a_job_of_more_ranks_finds_again(
    hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loader.setup._QUEUE", NO_QUEUE)  # nothing may wait to be written
    options: dict[str, Any] = {"memory": "9 kB", "local_disk": tmp_path}

    batches, sources, found = train(2, **options)

    check_batches(batches)
    kept = found[0].shared.kept
    assert [set(each.tiers.tolist()) for each in kept] == [{1, 2}] * 2
    check_reads(sources, found)
    assert (np.sum([source.reads for source in sources], axis=0) >= 1).all()

    predicted = dict[int, NDArray[Any]]()

    def predict(load: Loader) -> None:
        predicted[load._parts.setup.rank] = load.predict(machine=machine(), step_seconds=0.01).spans

    batches, sources, found = train(4, hosts=hosts, first=predict, **options)

    check_batches(batches)
    for rank, spans in predicted.items():
        read = spans["sample"][(spans["kind"] == Kind.READ) & (spans["place"] == SOURCE)]
        assert np.isin(read, found[0].shared.kept[rank].samples).all()
    assert [misses_of(each) for each in found] == [0] * 4
    now = [sorted(each.samples) for each in found[0].shared.kept]
    assert now == [*(sorted(each.samples) for each in kept), [], []]
    check_reads(sources, found)


def check_reads(sources: list[Counted], found: list[Sharing]) -> None:
    """Assert that ranks read from others what these have; its own disk or the store, whichever is faster."""
    for source, kept in zip(sources, found[0].shared.kept, strict=True):
        assert np.delete(source.reads, kept.samples).sum() == 0


@pytest.mark.usefixtures("separate_hosts")
@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_disk_that_loses_what_other_ranks_read_costs_reads_and_no_batch(
    hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loader.setup._QUEUE", WriteQueue(0.5, 1 << 30))  # nothing passes a disk by

    def lose(load: Loader) -> None:
        if load.position[0] == 1:
            for path in tmp_path.glob("*.samples"):
                os.truncate(path, 0)

    batches, _, found = train(
        2, lose, hosts=hosts, memory="18 kB", local_disk=tmp_path, report=lambda line: None
    )

    check_batches(batches)
    assert sum(map(misses_of, found)) > 0


@pytest.mark.usefixtures("nobody_is_late", "separate_hosts")
@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_nobody_waits_for_what_a_disk_was_to_keep_that_has_failed(
    hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loader.setup._QUEUE", NO_QUEUE)  # nothing may wait to be written
    written: list[int] = []

    def write(file: int, content: memoryview, begin: int) -> None:
        written.append(begin)
        if len(written) > 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write_all(file, content, begin)

    write_all = disk._write_all
    monkeypatch.setattr("penstock.store.disk._write_all", write)

    options: dict[str, Any] = {"memory": "9 kB", "local_disk": tmp_path, "timeout_seconds": patient(30)}

    batches, sources, _ = train(2, hosts=hosts, **options)

    check_batches(batches)
    assert len(written) > 20
    assert (np.sum([source.reads for source in sources], axis=0) >= 1).all()


def test_where_one_rank_has_no_disk_nobody_uses_one_and_who_gave_it_is_told(tmp_path: Path) -> None:
    def part(ranks: Ranks) -> list[str]:
        lines: list[str] = []
        disk = {"local_disk": tmp_path} if ranks.rank == 1 else {}
        with loader(Counted(SAMPLES), ranks, memory="9 kB", report=lines.append, **disk) as load:
            assert set(sharing_of(load).shared.kept[ranks.rank].tiers.tolist()) == {1}
        return [line for line in lines if "disk" in line]

    without, (line,) = run(2, part)

    assert without == []
    assert line == "no local disk keeps samples, as there is none, or one less, on rank 0"


def test_a_rank_without_a_socket_is_named_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(ranks: Ranks) -> None:
        if ranks.rank == 1:
            without_socket.add(threading.get_ident())
        loader(Counted(SAMPLES), ranks).close()

    def exchange() -> DescriptorExchange:
        if threading.get_ident() in without_socket:
            raise ConfigError("share= needs a local socket")
        return DescriptorExchange()

    without_socket = set[int]()
    monkeypatch.setattr("penstock.loader.sharing.DescriptorExchange", exchange)

    of_other, own = run(2, part)

    assert str(own) == "share= needs a local socket"
    assert isinstance(of_other, ConfigError)
    assert "rank 1" in str(of_other)


@pytest.mark.usefixtures("nobody_is_late")
@pytest.mark.parametrize("is_given", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_resumes_reads_what_is_left_of_it_once(is_given: bool, tmp_path: Path) -> None:
    with loader(Counted(SAMPLES), alone(), rank=None, world_size=None, share=None) as one:
        state = one.state_at(1, 4)
    load = None if is_given else (lambda made: made.load_state_dict(state))
    batches, sources, _ = train(2, first=load, traces=tmp_path, state=state if is_given else None)

    check_batches(batches, (1, 4))
    assert sum(int(source.reads.sum()) for source in sources) == SAMPLES
    assert read_trace(tmp_path / "0.trace").spans.size


@pytest.mark.usefixtures("nobody_is_late")
def test_the_split_local_gives_ranks_other_samples_of_the_same_global_batches(tmp_path: Path) -> None:
    """Shared or not, and when it is continued with a state of any split, a rank reads the same."""

    def read_alone(ranks: Ranks) -> Batches:
        with loader(Counted(SAMPLES), ranks, split="local", share=None) as load:
            return [ids.copy() for _ in range(EPOCHS) for _, ids in load]

    balanced, _, _ = train(2)
    with loader(Counted(SAMPLES), alone(), rank=None, world_size=None, share=None) as one:
        state = one.state_at(1, 4)

    local, sources, _ = train(2, split="local", traces=tmp_path)

    sets_before, sets_after = (
        [sorted(np.concatenate(step)) for step in zip(*each, strict=True)] for each in (balanced, local)
    )
    assert sets_after == sets_before
    steps = len(balanced[0]) // EPOCHS
    for before, after in zip(balanced, local, strict=True):
        assert list(map(len, before)) == list(map(len, after))
        is_same = [bool((each == other).all()) for each, other in zip(before, after, strict=True)]
        assert is_same[:steps] == [True] * steps
        assert not any(is_same[steps:-1])
        assert np.unique(np.concatenate(after)).size < 0.8 * np.unique(np.concatenate(before)).size
    assert sum(int(source.reads.sum()) for source in sources) == SAMPLES
    for rank in range(2):
        trace = read_trace(tmp_path / f"{rank}.trace")
        plan, number = read_plan(cast("dict[str, Any]", trace.meta["plan"]), rank, trace.spans)
        assert (plan.string(number) == np.concatenate(local[rank])).all()
    resumed: list[Batches] = train(2, split="local", state=state)[0]
    unshared: list[Batches] = run(2, read_alone)
    for rank, whole in enumerate(local):
        assert [ids.tolist() for ids in unshared[rank]] == [ids.tolist() for ids in whole]
        assert [ids.tolist() for ids in resumed[rank]] == [ids.tolist() for ids in whole[steps + 4 :]]


@pytest.mark.usefixtures("nobody_is_late", "separate_hosts")
@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_comes_from_another_rank_is_recorded_as_such(tmp_path: Path, hosts: int) -> None:
    predicted: list[NDArray[Any]] = [np.empty(0)] * 2

    def predict(load: Loader) -> None:
        if load.position == (0, 1):
            predicted[load._parts.setup.rank] = load.predict(machine=machine(), step_seconds=0.01).spans

    train(2, predict, traces=tmp_path, hosts=hosts)

    for rank in range(2):
        recorded = read_trace(tmp_path / f"{rank}.trace")
        replayed = replay_of(recorded).on(machine()).predict()
        for spans in (recorded.spans, predicted[rank], replayed.spans):
            from_peer = spans[(spans["kind"] == Kind.HIT) & (spans["peer"] == 1 - rank)]
            assert (from_peer["place"] == 1).all()
            usual = (EPOCHS - 1) * SAMPLES / 4
            assert 0.6 * usual < from_peer["samples"].sum() < 1.4 * usual
            assert spans[spans["kind"] == Kind.READ]["samples"].sum() == SAMPLES / 2


@pytest.mark.usefixtures("separate_hosts")
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_peer_whose_memory_is_damaged_costs_reads_and_no_batch(hosts: int, tmp_path: Path) -> None:
    done = threading.Event()
    lines: list[str] = []

    def damage(load: Loader) -> None:
        if load._parts.setup.rank == 1 and load.position == (1, 2) and not done.is_set():
            done.set()
            tier = sharing_of(load).tier
            assert tier is not None
            assert tier._log is not None
            np.frombuffer(tier._log.arena.mapping, np.uint64)[8:] ^= np.uint64(1)

    batches, sources, found = train(2, damage, tmp_path, hosts=hosts, memory="20 kB", report=lines.append)

    check_batches(batches)
    misses, none = map(misses_of, found)
    assert misses > 0
    assert none == 0
    assert sources[0].reads.sum() >= sources[1].reads.sum() + misses
    spans = read_trace(tmp_path / "0.trace").spans
    missed = spans[spans["kind"] == Kind.RETRY]
    assert missed["samples"].sum() == misses
    assert set(missed["peer"].tolist()) == {1}
    assert any("did not come from the rank that keeps them" in line for line in lines)


RANK_1 = "from tests.loader.sharing_data import main; main()"


@pytest.fixture(params=[Process, Namespace])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """Another host than this one."""
    if request.param is Namespace and not Namespace.is_possible():
        pytest.skip("network namespaces need root and iproute2")
    found: Process = request.param()
    try:
        if isinstance(found, Namespace):
            monkeypatch.setenv("PENSTOCK_INTERFACE", found.link)
        else:
            monkeypatch.setattr("penstock.ranks.descriptors.host_id", lambda: "this host")
        yield found
    finally:
        found.close()


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_is_late")
@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_schedule_of_faults_of_another_host_costs_reads_and_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Process, seed: int, interpreters: Interpreters
) -> None:
    """A rank whose host is stopped, cut off or slow is used again after it; one that is killed is not missed."""
    options: dict[str, Any] = {"share": "hosts", "memory": "200 kB", "epochs": 10_000}
    samples, source = 1600, Counted(1600)
    with loader(Counted(samples), alone(), rank=None, world_size=None, share=None, epochs=10_000) as one:
        whole = one.plan
    steps = whole.steps(0)
    # Each lasts so long that half of a rank's samples, which are the other's, come round.
    schedule = FaultSchedule.drawn(seed, host.kinds, least_steps=3 * steps // 2)
    print(schedule)
    child = host.start(interpreters, RANK_1, str(tmp_path), str(samples), json.dumps(options))
    monkeypatch.setattr("penstock.policy.peer_patience.LEAST_SECONDS", patient(0.1))

    def check(rank: int, step: int, ids: list[int], is_right: bool) -> None:
        """Assert that a batch has the rank's part of what a rank that is alone reads in that step, byte by byte."""
        of_all = whole.local_batch(0, *divmod(step, steps)).tolist()
        half = len(of_all) // 2
        assert ids == of_all[rank * half : (rank + 1) * half], schedule
        assert is_right, schedule

    def batches(load: Loader) -> Iterator[None]:
        """Check a batch of this rank at a time."""
        for step in itertools.count():
            if step % steps == 0:
                own = iter(load)
            rows, ids = next(own)
            check(0, step, ids.tolist(), bool((rows == expected(ids)).all()))
            yield
            if step % steps == steps - 1:
                assert next(own, None) is None

    with loader(source, ranks_in(tmp_path, 0, 2), **options) as load:
        peers = sharing_of(load).peers
        assert peers is not None
        far = peers.far
        assert far is not None
        given = of_child = 0
        own = batches(load)

        def run_to(end: int, *, without_child: bool = False) -> int:
            """Run steps on both ranks, the other's own ones that it missed, too; return the reads of this one."""
            nonlocal given, of_child
            before = source.reads.sum()
            while given < end:
                next(own)
                given += 1
                while of_child < given and not without_child:
                    print(file=child.stdin, flush=True)
                    assert child.stdout is not None
                    ids, is_right, _ = json.loads(child.stdout.readline())
                    check(1, of_child, ids, is_right)
                    of_child += 1
            return int(source.reads.sum() - before)

        assert run_to(steps) >= samples / 2
        for fault in schedule.faults:
            run_to(steps + fault.begins)
            host.begin(fault.kind)
            assert run_to(steps + fault.ends, without_child=fault.kind == "stopped") >= samples / 8, schedule
            host.end(fault.kind)
        wait_until(lambda: run_to(given + steps) == 0)
        assert far.late > 0
        assert not far.is_away(1)
        run_to(given + schedule.killed)
        child.kill()
        assert run_to(given + 2 * steps, without_child=True) >= samples / 8, schedule
        assert far.is_away(1)
        assert far.late == far.misses


@pytest.mark.usefixtures("nobody_is_late")
def test_two_processes_share_and_the_other_goes_on_when_one_is_killed(
    tmp_path: Path, interpreters: Interpreters
) -> None:
    child = interpreters.start(RANK_1, str(tmp_path), str(SAMPLES), **PIPES)
    source = Counted(SAMPLES)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        with loader(source, ranks_in(tmp_path, 0, 2)) as load:
            whole = []
            for epoch in range(EPOCHS):
                for step, (rows, ids) in enumerate(load):
                    assert (rows == expected(ids)).all()
                    if epoch < EPOCHS - 1:
                        print(file=child.stdin, flush=True)
                        theirs, is_right, their_reads = json.loads(child.stdout.readline())
                        assert is_right
                        whole.append(sorted([*ids.tolist(), *theirs]))
                    if (epoch, step) == (EPOCHS - 1, 0):
                        assert source.reads.sum() + their_reads == SAMPLES
                        child.kill()
                        assert child.wait(patient(30)) == -signal.SIGKILL
            plan = load.plan
            assert sharing_of(load).peers is not None
    finally:
        child.kill()
        child.communicate()
    steps = plan.steps(0)
    for number, batch in enumerate(whole):
        epoch, step = divmod(number, steps)
        of_ranks = [plan.local_batch(rank, epoch, step) for rank in range(2)]
        assert batch == sorted(np.concatenate(of_ranks).tolist())
    # What the killed rank kept stays where it is mapped.
    assert source.reads.sum() + their_reads == SAMPLES


#: One of three ranks: gives a batch for each line that comes in.
RANK_OF_3 = """
    import json, sys
    from pathlib import Path
    from tests.loader.sharing_data import Counted, expected, loader, ranks_in
    with loader(Counted(200), ranks_in(Path(sys.argv[1]), int(sys.argv[2]), 3)) as load:
        for _ in range(load.plan.epochs):
            for rows, ids in load:
                sys.stdin.readline()
                print(json.dumps([ids.tolist(), bool((rows == expected(ids)).all())]), flush=True)
"""


@pytest.mark.parametrize(
    "order",
    [order if order == (1, 0, 2) else pytest.param(order, marks=pytest.mark.slow) for order in ORDERS],
)
def test_ranks_that_are_killed_in_any_order_take_none_down(
    order: tuple[int, ...], tmp_path: Path, interpreters: Interpreters
) -> None:
    """In the first epoch, while those left count on what the killed ones have promised to read."""
    plan = AccessPlan(FullShuffle(SAMPLES, 0), 32, EPOCHS, 3)
    steps = list(itertools.product(range(EPOCHS), range(plan.steps(0))))
    children = [interpreters.start(RANK_OF_3, str(tmp_path), str(rank), **PIPES) for rank in range(3)]
    left = list(order)
    try:
        for epoch, step in steps:
            for rank in left:
                child = children[rank]
                assert child.stdin is not None
                assert child.stdout is not None
                print(file=child.stdin, flush=True)
                ids, is_right = json.loads(child.stdout.readline())
                assert is_right
                assert ids == plan.local_batch(rank, epoch, step).tolist()
            if step in (0, 2) and epoch == 0:
                children[left[0]].kill()
                assert children[left.pop(0)].wait(patient(30)) == -signal.SIGKILL
        assert children[left[0]].wait(patient(30)) == 0
    finally:
        for child in children:
            child.kill()
            child.communicate()


RANDOM, FIXED = (RandomResizedCrop(20), RandomHorizontalFlip()), (Resize(24), CenterCrop(20))


def test_of_ranks_that_share_pixels_each_keeps_as_many_as_it_has_memory_for(tmp_path: Path) -> None:
    photos = drawn(tmp_path / "a", [(30, 35)] * 48)
    how: dict[str, Any] = {"transforms": (*FIXED, ToTensor()), "dtype": "float32", "batch_size": 4}
    how |= {"prefetch": 3}

    def from_first(spans: NDArray[Any]) -> int:
        return int(spans[(spans["kind"] == Kind.HIT) & (spans["peer"] == 0)]["samples"].sum())

    def part(ranks: Ranks) -> tuple[list[int], int, int]:
        memory, trace = ["8 MB", "0.1 MB"][ranks.rank], tmp_path / f"{ranks.rank}.trace"
        with (
            contextlib.ExitStack() as failing,
            loader(ImageFolder(photos), ranks, keep="crops", memory=memory, trace=trace, **how) as load,
        ):
            failing.callback(together.abort)
            for _ in range(2):
                for _ in load:
                    together.wait(patient(30))
            sharing = sharing_of(load)
            predicted = from_first(load.predict(machine=machine(), step_seconds=0.01).spans)
            assert sharing.tier is not None
            together.wait(patient(30))
            failing.pop_all()
            return [each.samples.size for each in sharing.shared.kept], len(sharing.tier), predicted

    together = threading.Barrier(2)
    (kept, of_first, _), (same, of_second, predicted) = run(2, part)

    assert kept == same
    assert sum(kept) == 48
    assert 0 < kept[1] == of_second < 20
    assert 24 < of_first <= kept[0]  # which reads some of them after the other
    # It reads half of the samples in each epoch; all but the first find them. In the record are two.
    assert predicted > 24
    replay = replay_of(read_trace(tmp_path / "1.trace")).on(machine())
    assert from_first(replay.predict().spans) > 8


@pytest.mark.usefixtures("nobody_is_late", "separate_hosts")
@pytest.mark.parametrize(
    ("hosts", "keep", "transforms"),
    [
        (1, "crops", FIXED),
        pytest.param(1, "decoded", RANDOM, marks=pytest.mark.slow),
        pytest.param(2, "crops", FIXED, marks=pytest.mark.slow),
        (2, "decoded", RANDOM),
    ],
)
def test_ranks_decode_each_picture_once_and_give_each_other_its_pixels(
    hosts: int, keep: str, transforms: tuple[Any, ...], tmp_path: Path
) -> None:
    """No batch is another for it; nor where a rank's memory is damaged, which is a miss.

    Crops of the last picture are not all made of its pixels, so that it is kept as stored.
    """
    sizes = [*((60 + sample, 70) for sample in range(15)), (420, 420)]
    photos, whole = drawn(tmp_path / "a", sizes), threading.Barrier(2)
    sources = [CountedFolder(photos) for _ in range(2)]
    how: dict[str, Any] = {"epochs": 4, "batch_size": 4, "transforms": (*transforms, ToTensor())}
    how |= {"dtype": "float32", "memory": "64 MB", "seed": 5, "timeout_seconds": patient(60)}
    # Nothing is staged of a sample that the one worker has still to keep.
    how |= {"prefetch": 1, "decoders": 1}

    def part(ranks: Ranks) -> tuple[list[NDArray[Any]], int, int]:
        here.host = f"host {ranks.rank % hosts}"
        images, share = [], "host" if hosts == 1 else "hosts"
        with (
            contextlib.ExitStack() as failing,
            loader(sources[ranks.rank], ranks, keep=keep, share=share, **how) as load,
        ):
            failing.callback(whole.abort)
            tier, misses = sharing_of(load).tier, 0
            assert tier is not None
            for epoch in range(4):
                for rows, _ in load:
                    images.append(rows.copy())
                    whole.wait(patient(60))
                if epoch == 2:
                    misses = misses_of(sharing_of(load))
                    reads.append(sum(sources[ranks.rank].reads.values()))
                    whole.wait(patient(60))  # the other has counted, too
                    if ranks.rank == 1:
                        assert tier._log is not None
                        np.frombuffer(tier._log.arena.mapping, np.uint64)[8:] ^= np.uint64(1)
                    whole.wait(patient(60))
            failing.pop_all()
            return images, misses, misses_of(sharing_of(load))

    reads: list[int] = []
    (first, before, after), (second, *others) = run(2, part)

    with loader(CountedFolder(photos), alone(), rank=None, world_size=None, share=None, **how) as one:
        expected_images = [images.copy() for _ in range(4) for images, _ in one]
    for mine, theirs, both in zip(first, second, expected_images, strict=True):
        assert (np.concatenate((mine, theirs)) == both).all()
    assert sum(reads) == len(sizes)
    assert [before, *others] == [0, 0, 0]
    assert after > 0


def test_pictures_whose_files_are_larger_than_their_pixels_are_kept_as_far_as_files_would_be(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a" / "class"
    folder.mkdir(parents=True)
    noise = np.random.default_rng(1)
    for number in range(40):
        pixels = noise.integers(0, 1 << 16, (200, 200, 3), np.uint16)
        assert cv2.imwrite(str(folder / f"{number:02}.png"), pixels)
    whole = threading.Barrier(2)
    how: dict[str, Any] = {"epochs": 2, "batch_size": 4, "transforms": (*RANDOM, ToTensor())}
    how |= {"dtype": "float32", "memory": "5 MB", "seed": 5, "prefetch": 1, "decoders": 1}

    def part(ranks: Ranks) -> tuple[int, int]:
        with (
            contextlib.ExitStack() as failing,
            loader(ImageFolder(tmp_path / "a"), ranks, keep="decoded", share="host", **how) as load,
        ):
            failing.callback(whole.abort)
            for _ in range(2):
                for _ in load:
                    whole.wait(patient(60))
            failing.pop_all()
            shared, tier = sharing_of(load).shared, sharing_of(load).tier
            assert tier is not None
            return shared.kept[ranks.rank].samples.size, len(tier)

    for to_keep, kept in run(2, part):
        assert kept == to_keep
        assert 5 <= to_keep < 20


@pytest.mark.parametrize("is_shared", [True, False])
def test_pixels_leave_space_for_the_other_pictures_that_ranks_count_on(is_shared: bool) -> None:
    stored = np.frombuffer(bytes(range(200)), np.uint8)
    pixels = np.full((20, 30, 3), 7, np.uint8)
    space = HEAD_BYTES + pixel_bytes(20, 30) + HEAD_BYTES + stored.size
    placement = Placement(np.ones(2, np.int8), np.arange(2))

    def pictures(capacity_bytes: int) -> KeptPictures:
        shared = MemoryTier(capacity_bytes) if is_shared else None
        pipeline = compile_pipeline((*RANDOM, ToTensor()), seed=0, dtype="float32", layout="NCHW")
        form = CropForm(pixels.size, is_decoded=True)
        none = KeptOnDisks({}, {}, {})
        return KeptPictures(form, pipeline, capacity_bytes, placement, none, shared, np.full(2, stored.size))

    enough, less = pictures(space), pictures(space - 1)
    assert enough.keep(0, pixels) is not None
    assert (less.keep(0, pixels) is None) == is_shared
    for kept, sample in ((enough, 1), (less, 0), (less, 1)):
        kept.keep_stored(sample, stored)
        found = kept.find(sample)
        if is_shared:
            assert found is not None
            assert (found == stored).all()
    # The other one is there: what it had reserved is no longer due.
    assert len(enough.tier) == (2 if is_shared else 1)
    for kept in (enough, less):
        kept.tier.close()


def test_what_cannot_be_shared_says_so(tmp_path: Path) -> None:
    def said(**options: Any) -> str:
        with pytest.raises(ConfigError) as raised:
            loader(Counted(SAMPLES), alone(), rank=0, world_size=2, **options).close()
        return str(raised.value)

    assert "do not know each other" in said()
    assert '"host", "hosts", "jobs" or None' in said(share="job")
    assert "local_disk=" in said(share="jobs", local_disk=str(tmp_path))
    assert "decoders=0" in said(decoders=0)
    assert 'keep=\'auto\', in place of which keep="crops" or "decoded" is shared' in said(keep="auto")

    photos = ImageFolder(drawn(tmp_path / "a", [(40, 50)] * 8))
    pictures = {"transforms": (*RANDOM, ToTensor()), "keep": "decoded", "dtype": "float32", "batch_size": 4}
    keeps = ["decoded", "stored"]

    def part(options: dict[str, Any]) -> Callable[[Ranks], Any]:
        source: Any = photos if "transforms" in options else Counted(SAMPLES)
        return lambda ranks: loader(source, ranks, **options).close()

    for options, reason in (
        ({"policy": "push"}, "hands samples from rank to rank"),
        ({"policy": "frequency-alone"}, "each rank reads its own tiers alone"),
        (pictures | {"keep": "crops"}, 'give keep="decoded" or "stored"'),
        (pictures | {"policy": "cover"}, "ranks read samples for others ahead of need"),
        (pictures | {"local_disk": str(tmp_path / "disk")}, "in memory alone, and a disk is given"),
    ):
        for error in run(2, part(options)):
            assert isinstance(error, ConfigError)
            assert reason in str(error)
    for error in run(2, lambda ranks: part(pictures | {"keep": keeps[ranks.rank]})(ranks)):
        assert "keep is 'decoded' on rank 0 and 'stored' on rank 1" in str(error)
