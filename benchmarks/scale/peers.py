"""Ranks that share a cache: reads of the store, the time that a slow store costs them, and what a link delivers.

    python benchmarks/scale/peers.py            jobs of 1 to 8 processes, three times each, with share= and without
    python benchmarks/scale/peers.py --half     the same with memory for half of the data set, on all ranks together
    python benchmarks/scale/peers.py --half --ranks 8    jobs of so many processes alone, which take three minutes
    python benchmarks/scale/peers.py --simulated    simulated jobs of 1 to 4,096 ranks, against the fewest reads
    python benchmarks/scale/peers.py --hosts    each rank as if on a host of its own: samples by message, over loopback
    python benchmarks/scale/peers.py --link     fetching samples of 100 kB from a peer, against ZeroMQ's own ping-pong
    mpiexec -n 2 python benchmarks/scale/peers.py --link     the same over MPI, and what a rank uses that waits
    python benchmarks/scale/peers.py --mapped   samples of 100 kB in memory of another rank of the host, against copies

The store is slowed, for all processes together, to one wire of 50 MB/s behind 5 ms. A rank's step takes as long as
--step-seconds says; ranks end each step together. All ranks together have memory for 1.2 times the data set, or half
of it, slots aside. Printed: reads of the store over the samples, in the run and in a simulation of its plan, and the
fewest; seconds of an epoch after the first, in the run and as rank 0 predicts them (`Loader.predict`); and for how much
of it the slowest rank waits. Counts hold on a busy machine, seconds do not. --link sends the same messages,
encrypted alike, with and without all that makes samples of them (records, checksums on both sides, threads), three
times in turn; printed are medians, and the CPU time of both processes. --mapped has one thread find samples where they
lie, in turn: for the first time, when they are verified; later; and later with a copy to memory of its own; beside
copies of the same bytes: MB a second of its processor. Jobs that share, and those of --simulated, end with an error
where their reads are more than they may be: 1.02 a sample, or 1 % over F + (E - 1)(F - N C) for F samples in E epochs
on N ranks that keep C each.

Ranks ask by MPI between hosts alone, as those of one host map memory. So have MPI send by TCP here: for MPICH set
UCX_TLS=tcp,self and MPIR_CVAR_NOLOCAL=1, for Open MPI give --bind-to none --mca pml ob1 --mca btl tcp,self. Else it
copies from one process to the other, several times as fast as most networks. A request is for 16 samples, or as many as
TOGETHER=32 in the environment says: a loader asks for as many as come in about a millisecond.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.loader import Loader
from penstock.loader.local_disk import disk_classes
from penstock.loader.transforms import DecodeRaw
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.measure.slow_source import SlowSource
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import Job
from penstock.ranks import Ranks, alone, descriptors
from penstock.ranks.carrier_zmq import ZmqCarrier
from penstock.ranks.remote_peers import FarRank, RemotePeers
from penstock.simulate.policies import policy_named
from penstock.simulate.scheduled import simulate_job
from penstock.store import MemoryTier
from penstock.store.host_memory import HostMemory, KeptLog, PeerMemory, checksum_of

RATE, LATENCY_SECONDS, EPOCHS = 50e6, 5e-3, 4
#: Of a rank's memory that is no tier: slots and bytes in passing; more than these need, so that the tier has what the
#: machine says.
OTHER_BYTES = 64 << 20


class Made:
    """Samples that are made when they are read; counts the reads of this process."""

    classes = ()
    fingerprint = "made"

    def __init__(self, samples: int, sample_bytes: int) -> None:
        self.sizes_bytes = np.full(samples, sample_bytes)
        self.labels = np.arange(samples)
        self.reads = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.labels.size)

    def read(self, sample: int) -> bytes:
        self.reads += (
            1  # a rank has many readers: a count that is lost is one too few, and there is none in the sums
        )
        return bytes([sample % 251]) * int(self.sizes_bytes[sample])

    def read_into(self, sample: int, buffer: memoryview) -> int:
        buffer[:] = self.read(sample)
        return len(buffer)

    def describe(self, sample: int) -> str:
        return f"sample {sample}"


class Pipes:
    """Messages of forked ranks, over a pair of sockets for each two of them."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self._ends = {
            (one, other): socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for one in range(size)
            for other in range(one)
        }

    def _end(self, other: int) -> socket.socket:
        return self._ends[max(self.rank, other), min(self.rank, other)][int(self.rank < other)]

    def send(self, to: int, message: bytes) -> None:
        self._end(to).send(message)

    def receive(self, sender: int) -> bytes | None:
        try:
            return self._end(sender).recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None


def run_rank(job: dict[str, Any], source: SlowSource, made: Made, pipes: Pipes) -> dict[str, Any]:
    """Return what one rank's epochs took, and making its loader, and how many samples this process read."""
    own = Ranks(pipes)
    seconds, waits = [], []
    own.all_gather("the begin", None)
    asked = time.perf_counter()
    with batches_of(job, source, made, own) as loader:
        making = time.perf_counter() - asked
        own.all_gather("the loader", None)
        began = time.perf_counter()
        for _ in range(EPOCHS):
            waited, asked, batches = 0.0, began, iter(loader)
            while True:
                batch = next(batches, None)
                waited += time.perf_counter() - asked
                if batch is None:
                    break
                assert (batch[0][:, -1] == batch[1] % 251).all(), "wrong bytes"
                del batch
                time.sleep(job["step_seconds"])
                own.all_gather("a step", None)
                asked = time.perf_counter()
            seconds.append(time.perf_counter() - began)
            waits.append(waited)
            began += seconds[-1]
        predicted = predicted_epochs(loader, job) if own.rank == 0 else []
    return {
        "reads": made.reads,
        "making": making,
        "seconds": seconds,
        "waits": waits,
        "predicted": predicted,
    }


def predicted_epochs(loader: Any, job: dict[str, Any]) -> list[tuple[float, float]]:
    """Return what each epoch of a run takes as its loader predicts, and its rank waits; seconds; [] of a DataLoader.

    As ranks end each step together, an epoch takes longer than a rank computes and waits for its own batches.
    """
    if not isinstance(loader, Loader):
        return []
    epochs = loader.predict(step_seconds=job["step_seconds"]).epochs()
    return [(each.seconds, each.stall_seconds) for each in epochs]


@contextmanager
def batches_of(job: dict[str, Any], source: SlowSource, made: Made, own: Ranks) -> Iterator[Any]:
    """Yield what gives an epoch's batches each time that it is iterated over: a rank's loader, or a DataLoader.

    Both give the same rows and labels; job has the number of a DataLoader's worker processes as `workers`.
    """
    if "workers" not in job:
        with new_loader(job, source, made, own) as loader:
            yield loader
        return
    from torch.utils.data import DataLoader

    warnings.filterwarnings(
        "ignore", "This DataLoader will create"
    )  # more workers than processors: they wait
    workers = job["workers"]
    yield DataLoader(
        Samples(source, made.labels),  # type: ignore[arg-type]
        batch_sampler=Planned(job, own.rank),
        num_workers=workers,
        persistent_workers=workers > 0,
    )


class Samples:
    """A map-style data set over a source."""

    def __init__(self, source: SlowSource, labels: NDArray[np.int64]) -> None:
        self._source, self._labels = source, labels

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, sample: int) -> Any:
        import torch

        return torch.frombuffer(bytearray(self._source.read(sample)), dtype=torch.uint8), self._labels[sample]


class Planned:
    """The batches of a rank, for DataLoader: those of Penstock's loaders."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        order, epochs = FullShuffle(job["samples"], 0), job.get("epochs", EPOCHS)
        self._plan, self._rank = AccessPlan(order, job["batch"], epochs, ranks=job["ranks"]), rank
        self.epoch = -1

    def __len__(self) -> int:
        return self._plan.steps(0)

    def __iter__(self) -> Any:
        self.epoch += 1
        for step in range(len(self)):
            yield self._plan.local_batch(self._rank, self.epoch, step).tolist()


def new_loader(job: dict[str, Any], source: SlowSource, made: Made, own: Ranks) -> Loader:
    """Return a rank's loader, which gives rows of bytes."""
    ranks = job["ranks"]
    if job["shares"] == "hosts":
        descriptors.host_id = lambda: f"host {own.rank}"
    tier_bytes = math.ceil(job["share_of_data"] * int(made.sizes_bytes.sum()) / ranks)
    return Loader(
        source,
        batch_size=job["batch"],
        epochs=job.get("epochs", EPOCHS),
        transforms=[DecodeRaw("uint8", (job["sample_bytes"],))],
        dtype="uint8",
        memory=tier_bytes + OTHER_BYTES,
        prefetch=job.get("prefetch"),
        machine=machine_of(job, tier_bytes),
        rank=own.rank,
        world_size=ranks,
        share=job["shares"] if ranks > 1 else None,
        split=job.get("split", "balanced"),
        policy=job.get("policy") if ranks > 1 else None,
        local_disk=job.get("disk"),
        ranks=lambda: own,
        report=None,
    )


def run_job(
    job: dict[str, Any], run: Callable[..., dict[str, Any]] = run_rank, made: Made | None = None
) -> list[dict[str, Any]]:
    """Fork the ranks of a job; return what each says. run: a rank, as `run_rank`. What they import is here before."""
    import torch.utils.data  # noqa: F401

    import penstock.policy._homes_kernels
    import penstock.policy._space_kernels  # noqa: F401

    made = made or Made(job["samples"], job["sample_bytes"])
    source = SlowSource(made, 0.0, LATENCY_SECONDS, RATE)
    pipes, outputs = Pipes(job["ranks"]), []
    for rank in range(job["ranks"]):
        output, end = os.pipe()
        if os.fork() == 0:
            pipes.rank = rank
            os.write(end, json.dumps(run(job, source, made, pipes)).encode())
            os._exit(0)
        os.close(end)
        outputs.append(output)
    found = [json.loads(os.fdopen(output).read()) for output in outputs]
    for _ in outputs:
        os.wait()
    return found


def machine_of(job: dict[str, Any], tier_bytes: int) -> Machine:
    memory = Curve(((1, 10e9),))
    return Machine(
        SharedStore(Curve(((1, RATE),)), latency_seconds=LATENCY_SECONDS, threads=32),
        (StorageClass("staging", OTHER_BYTES, 2, memory), StorageClass("memory", tier_bytes, 2, memory)),
        job["ranks"],
        compute=Rate(1e9),
    )


def simulated_reads(job: dict[str, Any]) -> float:
    """Return how many samples a simulated run of the same plan, policy and tiers reads from the store, on all ranks."""
    sizes = np.full(job["samples"], job["sample_bytes"])
    tier_bytes = math.ceil(job["share_of_data"] * int(sizes.sum()) / job["ranks"])
    with Loader(
        Made(job["samples"], job["sample_bytes"]),
        batch_size=job["batch"],
        epochs=EPOCHS,
        transforms=[DecodeRaw("uint8", (job["sample_bytes"],))],
        rank=0,
        world_size=job["ranks"],
        split=job.get("split", "balanced"),
        report=None,
        ranks=alone,
    ) as loader:
        plan = loader.plan
    shares = job["shares"] is not None and job["ranks"] > 1
    policy = policy_named(job.get("policy", "first-reader") if shares else "frequency-alone")
    disks = disk_classes(job.get("disk"), None, int(sizes.sum()))
    machine = machine_of(job, tier_bytes)
    machine = replace(machine, storage=(*machine.storage, *disks))
    sharing = range(job["ranks"]) if shares else None
    result = simulate_job(Job(plan, sizes, machine, sharing=sharing), policy)
    store_bytes = float(result.store_bytes.sum())
    return store_bytes / float(job["sample_bytes"])


def fewest_reads(job: dict[str, Any]) -> int:
    """Return how many samples ranks read at least that keep as many together as they have memory for.

    Where each is alone, each sample is read once at least.
    """
    samples, ranks = job["samples"], job["ranks"]
    tier_bytes = math.ceil(job["share_of_data"] * samples * job["sample_bytes"] / ranks)
    if job["shares"] is None and ranks > 1:
        return int(samples)
    return int(samples + (EPOCHS - 1) * max(0, samples - ranks * (tier_bytes // job["sample_bytes"])))


#: Of --simulated: samples, of a job and of a rank's steps, and how many more reads than by the formula there may be.
SIMULATED_SAMPLES, OF_A_STEP, MOST_OVER = 1 << 16, 2, {1.2: 0.02, 0.5: 0.01}


def compare_simulated(samples: int, most_ranks: int) -> None:
    """Print what simulated jobs of 1, 2, 4, ... ranks read, beside the formula. Raises: SystemExit for more."""
    missed = []
    for ranks in (1 << power for power in range(most_ranks.bit_length())):
        for share, most_over in MOST_OVER.items():
            began, size = time.perf_counter(), 1000
            plan = AccessPlan(FullShuffle(samples, 0), max(64, OF_A_STEP * ranks), EPOCHS, ranks=ranks)
            of_a_rank = math.ceil(share * samples / ranks)
            job = {"ranks": ranks}
            policy = policy_named("first-reader" if ranks > 1 else "frequency-alone")
            result = simulate_job(
                Job(plan, np.full(samples, size), machine_of(job, of_a_rank * size)), policy
            )
            reads = float(result.store_bytes.sum()) / size
            formula = samples + (EPOCHS - 1) * max(0, samples - ranks * of_a_rank)
            if reads > (1 + most_over) * formula:
                missed.append(f"{ranks} ranks, memory for {share} of the data")
            print(
                f"{ranks:5,} ranks, memory for {share} of the data: {reads / samples:.4f} reads a sample, "
                f"{formula / samples:.4f} by the formula: {100 * (reads / formula - 1):+.2f} % (aim "
                f"{100 * most_over:.0f} %); {time.perf_counter() - began:.1f} s",
                flush=True,
            )
    if missed:
        raise SystemExit(f"over the aim: {'; '.join(missed)}")


#: Of --link: samples of a request, requests on their way at once, and samples that the peer keeps.
GROUP, IN_FLIGHT, KEPT, SAMPLE_BYTES = int(os.environ.get("TOGETHER", "16")), 3, 512, 100_000


class Nothing:
    """What a rank keeps that only reads."""

    generation = 1

    def take_news(self) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    def look_up(self, ids: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[None]:
        return [None] * ids.size

    def close(self) -> None:
        pass


def kept_samples() -> PeerMemory:
    """Return samples in memory, as another rank of the host has them."""
    return memory_of(*rank_with_samples())


def rank_with_samples() -> tuple[MemoryTier, KeptLog]:
    """Return a rank's tier, which has samples, and its log."""
    log = KeptLog(KEPT)
    tier = MemoryTier(KEPT * SAMPLE_BYTES, partial(Arena, is_shared=True), log)
    data = np.random.default_rng(0).integers(0, 256, SAMPLE_BYTES, np.uint8)
    for sample in range(KEPT):
        tier.put(sample, data.data)
    return tier, log


def memory_of(tier: MemoryTier, log: KeptLog) -> PeerMemory:
    """Return what another rank of the host, which has read nothing yet, has of these."""
    kept = PeerMemory(tier.arena, log.arena, log.generation, np.arange(KEPT))
    kept.take_news()  # as the first look at the log does; nothing tells of these
    return kept


def ask_for_samples(seconds: float, pipe: Any, shelf: Any, carrier: Any, is_reader: bool) -> int:
    """Be one of two ranks: read for so long and return the samples; or serve until the other has ended."""
    offer, generation = exchanged(pipe, (carrier.offer, shelf.generation))
    sizes = np.full(KEPT, SAMPLE_BYTES)
    carrier.connect({1: offer})
    peers = RemotePeers(carrier, shelf, {1: FarRank(generation, 0)}, sizes, checksum_of, math.inf)
    counts = [0] * IN_FLIGHT

    def read(thread: int, until: float) -> None:
        first, is_over = thread, False
        while not is_over:  # one at least: of none there is no rate
            found = peers.read(1, (np.arange(GROUP) + GROUP * first) % KEPT)
            assert all(isinstance(each, np.ndarray) for each in found), found
            counts[thread] += GROUP
            first += IN_FLIGHT
            is_over = time.perf_counter() >= until

    if is_reader:
        read(0, time.perf_counter() + 0.05)
        counts[0], until = 0, time.perf_counter() + seconds
        threads = [threading.Thread(target=read, args=(number, until)) for number in range(IN_FLIGHT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    exchanged(pipe, None)
    peers.close()
    return sum(counts)


def play_ping_pong(seconds: float, pipe: Any, shelf: Any, carrier: ZmqCarrier, is_reader: bool) -> int:
    """The same messages without what they mean: the same parts of bytes for each request."""
    offer, _ = exchanged(pipe, (carrier.offer, 0))
    carrier.connect({1: offer})
    request, count = bytes(8 * GROUP), 0
    answer = [bytes(24 * GROUP), *[bytes(SAMPLE_BYTES)] * GROUP]
    until = time.perf_counter() + seconds
    if is_reader:
        for _ in range(IN_FLIGHT):
            carrier.ask(1, [request])
        while not count or time.perf_counter() < until:
            for _, _, parts in carrier.receive(None):
                count += len(parts) - 1
                carrier.ask(1, [request])
        pipe.send(None)
    else:
        while not pipe.poll():
            for _, who, _ in carrier.receive(0.1):
                carrier.answer(who, answer)
        pipe.recv()
    carrier.close()
    return count


def exchanged(pipe: Any, value: Any) -> Any:
    pipe.send(value)
    return pipe.recv()


def run_link(play: Any, seconds: float) -> tuple[float, float]:
    """Return MB/s and CPU seconds for each 1,000 MB, of both processes together."""
    here, there = multiprocessing.Pipe()
    before = os.times()
    if (child := os.fork()) == 0:
        try:
            play(seconds, there, kept_samples(), ZmqCarrier("127.0.0.1", SAMPLE_BYTES), False)
        finally:
            os._exit(0)
    count = play(seconds, here, Nothing(), ZmqCarrier("127.0.0.1", SAMPLE_BYTES), True)
    os.waitpid(child, 0)
    used = sum(os.times()[:4]) - sum(before[:4])
    megabytes = count * SAMPLE_BYTES / 1e6
    return megabytes / seconds, 1e3 * used / megabytes


def compare_link(seconds: float, repeats: int) -> None:
    """Print what samples are fetched at, and ZeroMQ's own messages."""
    runs = [(run_link(ask_for_samples, seconds), run_link(play_ping_pong, seconds)) for _ in range(repeats)]
    fetched, sent = (median(run[which][0] for run in runs) for which in (0, 1))
    costs = [median(run[which][1] for run in runs) for which in (0, 1)]
    print(
        f"{GROUP} samples of 100 kB a request, {IN_FLIGHT} requests on their way: {fetched:,.0f} MB/s, messages alone "
        f"{sent:,.0f} MB/s (ratio {fetched / sent:.2f}); {costs[0]:.2f} and {costs[1]:.2f} CPU seconds a GB"
    )


def compare_mapped(seconds: float, repeats: int) -> None:
    """Print at which rate samples of the same host are had, and copied."""
    tier, log = rank_with_samples()
    own, sizes, groups = np.empty((GROUP, SAMPLE_BYTES), np.uint8), np.full(KEPT, SAMPLE_BYTES), KEPT // GROUP
    memory = tier.array.reshape(-1, SAMPLE_BYTES)

    def found(host: HostMemory, group: int) -> Sequence[Any]:
        read = host.read(1, np.arange(GROUP) + GROUP * group)
        assert all(isinstance(each, np.ndarray) for each in read), read
        return read

    def found_and_copied(host: HostMemory, group: int) -> None:
        for row, each in zip(own, found(host, group), strict=True):
            row[:] = each

    def copied(_: HostMemory, group: int) -> None:
        for row, each in zip(own, memory[GROUP * group :][:GROUP], strict=True):
            row[:] = each

    def rate(work: Callable[[HostMemory, int], object], *, is_first: bool = False) -> float:
        """Return MB a second of one thread; is_first: of a reader that has read nothing yet, all of it once."""
        used, count, host = 0.0, 0, HostMemory({1: memory_of(tier, log)}, sizes)
        for group in range(0 if is_first else groups):
            found(host, group)
        while used < seconds:
            if is_first:
                host = HostMemory({1: memory_of(tier, log)}, sizes)
            began = time.thread_time()
            for group in range(groups):
                work(host, group)
            used += time.thread_time() - began
            count += groups
        return count * own.nbytes / 1e6 / used

    ways = {
        "the first time, verified": partial(rate, found, is_first=True),
        "later": partial(rate, found),
        "later, and copied": partial(rate, found_and_copied),
    }
    runs = [({way: measured() for way, measured in ways.items()}, rate(copied)) for _ in range(repeats)]
    print(
        f"{GROUP} samples of 100 kB in memory of the same host; copies of them alone "
        f"{median(copies for _, copies in runs):,.0f} MB/s"
    )
    for way in ways:
        ratios = [had[way] / copies for had, copies in runs]
        print(
            f"found {way}: {median(had[way] for had, _ in runs):,.0f} MB/s (ratio {median(ratios):.2f}, "
            f"{min(ratios):.2f} to {max(ratios):.2f})"
        )
    tier.close()


class Communicator:
    """The end of a pipe between the two ranks of an MPI job."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.own = MPI, MPI.COMM_WORLD.Dup()
        self.rank = self.own.Get_rank()
        self.tag = 10
        #: Of the rank that answers; drawn before anything is timed.
        self.samples = np.random.default_rng(0).integers(
            0, 256, (KEPT if self.rank else 0, SAMPLE_BYTES), np.uint8
        )

    def send(self, value: Any) -> None:
        self.own.send(value, 1 - self.rank, 1)

    def recv(self) -> Any:
        while not self.own.Iprobe(1 - self.rank, 1):
            time.sleep(0.002)  # MPI itself would spin, which takes a core from what is measured
        return self.own.recv(None, 1 - self.rank, 1)

    def new_carrier(self) -> Any:
        from penstock.ranks.carrier_mpi import MpiCarrier
        from penstock.ranks.mpi_calls import CALL_MPI

        CALL_MPI.wait()
        self.tag += 1
        return MpiCarrier(self.own, self.tag, SAMPLE_BYTES)

    def play(self, in_flight: int, seconds: float, *, makes_samples: bool = False) -> int:
        """MPI's own messages, of as many bytes as a request and an answer with samples have; waits are MPI's.

        makes_samples: join an answer of samples that lie in 51 MB of memory, and verify their checksums.
        """
        answer = np.zeros((24 + SAMPLE_BYTES) * GROUP, np.uint8)
        if not self.rank:
            return self.ask(answer, in_flight, seconds, makes_samples)
        return self.answer(answer, in_flight, self.samples if makes_samples else self.samples[:0])

    def ask(self, answer: NDArray[np.uint8], in_flight: int, seconds: float, verifies: bool) -> int:
        """Return how many samples came; so many requests are on their way, and as many receives have begun."""
        places = [answer, *(answer.copy() for _ in range(in_flight - 1))]
        coming, request = [], bytearray(8 * GROUP)
        count, until = 0, time.perf_counter() + seconds

        def begin(place: NDArray[np.uint8]) -> None:
            coming.append((self.own.Irecv([place, place.size, self.mpi.BYTE], 1, 2), place))
            self.own.Send([request, len(request), self.mpi.BYTE], 1, 2)

        for place in places:
            begin(place)
        while coming:
            came, place = coming.pop(0)
            came.Wait()
            for sample in place[24 * GROUP :].reshape(GROUP, SAMPLE_BYTES)[: GROUP * verifies]:
                checksum_of(sample)
            if not count or time.perf_counter() < until:
                count += GROUP
                begin(place)
        self.own.Send([request, 0, self.mpi.BYTE], 1, 2)
        return count

    def answer(self, answer: NDArray[np.uint8], in_flight: int, kept: NDArray[np.uint8]) -> int:
        """Answer until an empty request comes; that many answers may be on their way. kept: samples, or none."""
        status, request, going, first = self.mpi.Status(), bytearray(8 * GROUP), [], 0
        places = [answer, *(answer.copy() for _ in range(in_flight))]
        while True:
            self.own.Recv([request, len(request), self.mpi.BYTE], 0, 2, status)
            if not status.Get_count(self.mpi.BYTE):
                break
            if kept.size:
                places = [*places[1:], places[0]]
                np.concatenate(kept[first : first + GROUP], out=places[0][24 * GROUP :])
                first = (first + GROUP) % KEPT
            going.append(self.own.Isend([places[0], answer.size, self.mpi.BYTE], 0, 2))
            if len(going) == in_flight:
                going.pop(0).Wait()
        self.mpi.Request.Waitall(going)
        return 0


def compare_mpi(seconds: float, repeats: int) -> None:
    """Print on rank 0 what samples are fetched at, MPI's own messages, and what it takes to wait for some."""
    pipe = Communicator()
    ways: dict[str, Callable[[], int]] = {
        "alone": partial(pipe.play, 1, seconds),
        "together": partial(pipe.play, IN_FLIGHT, seconds),
        "bare": partial(pipe.play, IN_FLIGHT, seconds, makes_samples=True),
    }
    rates: dict[str, list[float]] = {way: [] for way in ("fetched", *ways)}
    costs: dict[str, list[float]] = {way: [] for way in rates}
    for _ in range(repeats):
        shelf, carrier = kept_samples() if pipe.rank else Nothing(), pipe.new_carrier()
        fetch = partial(ask_for_samples, seconds, pipe, shelf, carrier, not pipe.rank)
        for way in rates:
            exchanged(pipe, None)
            before = time.process_time()
            count = ways.get(way, fetch)()
            used = time.process_time() - before
            both = used + exchanged(pipe, used)
            rates[way].append(count * SAMPLE_BYTES / 1e6 / seconds)
            costs[way].append(1e3 * both / (rates[way][-1] * seconds) if count else math.inf)
    if pipe.rank:
        return
    waiting = pipe.new_carrier()
    waiting.receive(seconds / 4)
    before = time.thread_time()
    waiting.receive(seconds)
    idle = (time.thread_time() - before) / seconds
    fetched, alone, together, bare = map(median, rates.values())
    print(
        f"{pipe.mpi.Get_library_version().split(chr(10))[0][:40]!r}: {GROUP} samples of 100 kB a request, {IN_FLIGHT} "
        f"requests on their way: {fetched:,.0f} MB/s; MPI alone {together:,.0f} MB/s, {alone:,.0f} with one on its way "
        f"(ratios {fetched / together:.2f} and {fetched / alone:.2f}); MPI, and samples that are joined and verified, "
        f"{bare:,.0f} (ratio {fetched / bare:.2f}); CPU seconds a GB: fetched, one, {IN_FLIGHT}, joined and verified: "
        f"{', '.join(f'{median(each):.2f}' for each in costs.values())}; {100 * idle:.2f} % of a core while waiting"
    )


def compare_jobs(given: argparse.Namespace) -> None:
    """Print what jobs of some processes read, and how long they take. Raises: SystemExit for more reads than may be."""
    share, of_data = "hosts" if given.hosts else "host", 0.5 if given.half else 1.2
    counts, repeats = ((1, 2), 1) if given.quick else (given.ranks, 3)
    samples, sample_bytes = (200, 1000) if given.quick else (given.samples, given.sample_bytes)
    missed = []
    for ranks, shares in itertools.product(counts, (share, None)):
        job: dict[str, Any] = {
            "ranks": ranks,
            "shares": shares,
            "samples": samples,
            "sample_bytes": sample_bytes,
            "batch": 64,
            "share_of_data": of_data,
            "step_seconds": 0.0 if given.quick else given.step_seconds,
            # What two epochs read at the same time is read once: of eight batches, an eighth of the samples.
            "prefetch": 2,
        }
        command = [sys.executable, __file__, "--job", json.dumps(job)]
        runs = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(repeats)
        ]
        reads = median(sum(rank["reads"] for rank in run) for run in runs)
        later = [
            (rank["seconds"][k], rank["waits"][k]) for run in runs for rank in run for k in range(1, EPOCHS)
        ]
        waiting = max(waited / seconds for seconds, waited in later)
        predicted = median(seconds for run in runs for seconds, _ in run[0]["predicted"][1:])
        least = fewest_reads(job)
        print(
            f"{ranks} ranks, {f'share={shares}' if shares else 'each alone':11}: {reads / samples:.3f} reads a "
            f"sample, {simulated_reads(job) / samples:.3f} simulated, {least / samples:.3f} at least; "
            f"an epoch after the first {median(each for each, _ in later):.2f} s, predicted {predicted:.2f}, "
            f"{100 * waiting:.1f} % of it waiting at most",
            flush=True,
        )
        if shares and not given.quick and reads > (1 + MOST_OVER[of_data]) * least:
            missed.append(f"{ranks} ranks read {reads / least:.3f} times as often as they need to")
    if missed:
        raise SystemExit(f"over the aim: {'; '.join(missed)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small job, once")
    parser.add_argument("--half", action="store_true", help="memory for half of the data set")
    parser.add_argument("--simulated", action="store_true", help="up to 4,096 ranks, in virtual time")
    parser.add_argument("--hosts", action="store_true", help="each rank as if on a host of its own")
    parser.add_argument("--link", action="store_true", help="what a link delivers")
    parser.add_argument("--mapped", action="store_true", help="memory of the same host")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="processes of a job")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--sample-bytes", type=int, default=100_000)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.job is not None:
        print(json.dumps(run_job(json.loads(given.job))))
        return
    if given.link and (os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE")) == "2":
        compare_mpi(0.05 if given.quick else 3.0, 1 if given.quick else 3)
        return
    if given.link:
        compare_link(0.05 if given.quick else 3.0, 1 if given.quick else 3)
        return
    if given.mapped:
        compare_mapped(0.02 if given.quick else 0.3, 1 if given.quick else 7)
        return
    if given.simulated:
        compare_simulated(*((512, 8) if given.quick else (SIMULATED_SAMPLES, 4096)))
        return
    compare_jobs(given)


if __name__ == "__main__":
    main()
