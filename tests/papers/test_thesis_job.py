"""The thesis's simulator: small runs by hand; random ones equal a slow model, written from the thesis."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulate.given import Given
from tests.simulate.random_jobs import random_fills, random_job

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.papers.thesis_job import simulate_rank_by_rank
from penstock.papers.thesis_policies import POLICIES
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import Fill, Job, Loading, LoadingPolicy, Naive, Staging
from penstock.simulate.scheduled import ORIGINS

# -- The slow model: prices, strings, loading before training; then steps, rank by rank


@dataclass
class _Copy:
    rank: int
    tier: int
    ready: float


@dataclass
class _Node:
    """One rank's clocks; times of its reads of the store as the thesis' simulator lists them."""

    threads: list[float]
    fetched: list[float]
    staged: dict[int, tuple[float, str]] = field(default_factory=dict)
    counted_bytes: int = 0
    counted_ids: set[int] = field(default_factory=set)
    ahead: int = 0
    turn: int = 0
    asked: list[float] = field(default_factory=list)


class _Model:
    def __init__(self, job: Job, loading: Loading) -> None:
        self.plan, self.machine, self.loading = job.plan, job.machine, loading
        self.sizes = [int(size) for size in job.sizes_bytes]
        self.ranks = range(job.ranks)
        self.storage = job.machine.storage
        strings = loading.strings or [job.plan.string(rank) for rank in self.ranks]
        self.strings = [[int(sample) for sample in string] for string in strings]
        #: Of each rank, the half-open range of each step in its string.
        self.steps = [list(itertools.pairwise(self._bounds(rank))) for rank in self.ranks]
        self.copies: dict[int, list[_Copy]] = defaultdict(list)
        self.reads = [Counter[str]() for _ in self.ranks]
        self.store_bytes = [0 for _ in self.ranks]
        self.fill_reads = [0 for _ in self.ranks]
        self.step_end: list[float] = []
        self.nodes = [_Node([0.0] * self.storage[0].threads, []) for _ in self.ranks]
        self.start = self._load_before()
        for rank in self.ranks:
            for fill in loading.fills:
                if fill.rank == rank:
                    ends = self._fill(fill)
                    self.copies_of(fill, ends)

    def copies_of(self, fill: Fill, ends: list[float]) -> None:
        for sample, end in zip(fill.samples.tolist(), ends, strict=True):
            self.copies[sample].append(_Copy(fill.rank, fill.tier, end))

    def _bounds(self, rank: int) -> list[int]:
        counts = [
            self.plan.local_batch(rank, epoch, step).size
            for epoch in range(self.plan.epochs)
            for step in range(self.plan.steps(epoch))
        ]
        return [0, *itertools.accumulate(counts)]

    # Prices, of thesis 3.1; nothing is shared among threads

    def store_rate(self, clients: int) -> float:
        source = self.machine.source
        share = inf if source.clients is None else source.clients.at(clients) / clients
        own = inf if source.read is None else source.read.at(1)
        return min(self.machine.source_network_bytes_per_second, share, own)

    def tier_rate(self, tier: int, *, is_remote: bool = False) -> float:
        curve, threads = self.storage[tier].read, self.storage[tier].threads
        network = self.machine.network_bytes_per_second if is_remote else inf
        # (x / p) * p: the last bit counts where two ways cost the same.
        return min(network, curve.at(threads) / threads * threads)

    @property
    def byte_write(self) -> float:
        threads = self.machine.decode_threads
        curve = self.storage[0].write or self.storage[0].read
        return 1 / min(self.machine.preprocess_bytes_per_second, curve.at(threads) / threads)

    def busy(self, sample: int) -> float:
        rate = self.machine.compute
        assert rate is not None
        return self.sizes[sample] / rate.per_second if rate.of == "bytes" else 1 / rate.per_second

    # Tiers

    def _load_before(self) -> float:
        ends = [0.0 for _ in self.ranks]
        for fill in self.loading.fills:
            if not fill.before_training:
                continue
            rate = self.store_rate(len(self.ranks))
            if fill.origin == "peers":
                rate = self.tier_rate(fill.tier, is_remote=True)
            free = [ends[fill.rank]] * self.storage[fill.tier].threads
            for place, sample in enumerate(fill.samples.tolist()):
                thread = place % len(free)
                free[thread] += self.sizes[sample] * (1 / rate + self.byte_write)
                if fill.origin == "store":
                    self.nodes[fill.rank].fetched.append(free[thread])
                    self._read_for_tier(fill.rank, sample)
            ends[fill.rank] = max(free)
        loading = [end for end in ends if end > 0]
        return loading[-1] if loading else 0.0

    def _fill(self, fill: Fill) -> list[float]:
        """Return when each sample is there, for staging."""
        if fill.before_training:
            return [0.0] * fill.samples.size
        free = [self.start] * self.storage[fill.tier].threads
        ends = []
        for place, sample in enumerate(fill.samples.tolist()):
            thread = place % len(free)
            self.nodes[fill.rank].fetched.append(free[thread])
            free[thread] += self.sizes[sample] * (1 / self.store_rate(len(self.ranks)) + self.byte_write)
            ends.append(free[thread])
            self._read_for_tier(fill.rank, sample)
        return ends

    def _read_for_tier(self, rank: int, sample: int) -> None:
        self.store_bytes[rank] += self.sizes[sample]
        self.fill_reads[rank] += 1

    def own(self, rank: int, sample: int) -> _Copy | None:
        return next((copy for copy in self.copies[sample] if copy.rank == rank), None)

    def peer(self, rank: int, sample: int, by: float) -> _Copy | None:
        there = [copy for copy in self.copies[sample] if copy.rank != rank and copy.ready <= by]
        return there[-1] if there else None

    # Steps

    def run(self) -> None:
        for rank in self.ranks:
            self._stage(rank, 0.0)
        now = self.start
        for step in range(len(self.steps[0])):
            ends = [now]
            for rank in self.ranks:
                clock = now
                begin, end = self.steps[rank][step]
                for past in range(*self.steps[rank][step - 1]) if step else ():
                    if past in self.nodes[rank].staged:
                        self.nodes[rank].counted_bytes -= self.sizes[self.strings[rank][past]]
                for access in range(begin, end):
                    clock = self._use(rank, access, clock)
                ends.append(clock)
            now = max(ends)
            self.step_end.append(now)

    def _use(self, rank: int, access: int, clock: float) -> float:
        node = self.nodes[rank]
        answered, origin = self._answer(rank, access, clock)
        if origin == "store":
            node.asked.append(clock)
        if origin == "staged from the store":
            node.asked.append(answered)
        self.reads[rank][origin] += 1
        node.ahead = max(node.ahead, access + 1)
        self._stage(rank, answered)
        return answered + self.busy(self.strings[rank][access])

    def _answer(self, rank: int, access: int, clock: float) -> tuple[float, str]:
        sample = self.strings[rank][access]
        at, staged_origin = self.nodes[rank].staged.get(access, (inf, ""))
        if at <= clock:
            return clock, staged_origin
        # The store first: an equal rate elsewhere does not replace it.
        rate, origin = self.store_rate(self.clients(rank, clock)), "store"
        own, peer = self.own(rank, sample), self.peer(rank, sample, clock)
        if own and own.ready <= clock and self.tier_rate(own.tier) > rate:
            rate, origin = self.tier_rate(own.tier), "tier"
        if peer and self.tier_rate(peer.tier, is_remote=True) > rate:
            rate, origin = self.tier_rate(peer.tier, is_remote=True), "peer"
        direct = clock + self.sizes[sample] / rate + self.sizes[sample] * self.byte_write
        if at <= direct:
            return at, staged_origin
        if origin == "store":
            self.store_bytes[rank] += self.sizes[sample]
        return direct, origin

    def _stage(self, rank: int, now: float) -> None:
        node, string = self.nodes[rank], self.strings[rank]
        if not self.loading.stages:
            return
        node.threads = [max(idle, now) for idle in node.threads]
        while node.ahead < len(string):
            access, sample = node.ahead, string[node.ahead]
            if node.counted_bytes + self.sizes[sample] > self.storage[0].capacity_bytes:
                return
            begun = node.threads[node.turn]
            rate, due, origin = 0.0, inf, ""
            own = self.own(rank, sample)
            if own:
                rate, due, origin = self.tier_rate(own.tier), own.ready, "staged from a tier"
            peer = self.peer(rank, sample, inf) if self.loading.stages_from_peers else None
            if peer and self.tier_rate(peer.tier, is_remote=True) > rate:
                if self.loading.stages_from_store and peer.ready > begun:
                    return
                rate, due = self.tier_rate(peer.tier, is_remote=True), peer.ready
                origin = "staged from a peer"
            if self.loading.stages_from_store:
                store = self.store_rate(self.clients(rank, begun))
                # A source is judged only if it could win: the store with all to oneself.
                if due > begun or (self.store_rate(1) > rate and store > rate):
                    rate, due, origin = store, begun, "staged from the store"
            if due < inf:
                read = max(due, begun) + self.sizes[sample] / rate
                done = read + self.sizes[sample] * self.byte_write
                node.threads[node.turn] = done
                node.staged[access] = (done, origin)
                if origin == "staged from the store":
                    self.store_bytes[rank] += self.sizes[sample]
                    node.fetched.append(begun)
                if sample not in node.counted_ids:
                    node.counted_bytes += self.sizes[sample]
                node.counted_ids.add(sample)
            node.ahead += 1
            node.turn = (node.turn + 1) % len(node.threads)

    def clients(self, rank: int, now: float) -> int:
        return 1 + sum(
            (bool(node.asked) and node.asked[-1] >= now) or self._is_listed_ahead(node.fetched, now)
            for other, node in enumerate(self.nodes)
            if other != rank
        )

    @staticmethod
    def _is_listed_ahead(times: list[float], now: float) -> bool:
        # The published numbers look at the end of a list, then bisect it although it is not quite sorted.
        return bool(times) and times[-1] > now - 0.1 and bisect_left(times, now) < len(times)


# -- Random jobs: drawn from a seed, because hypothesis takes longer to draw one value by value than both models to run


def _loading(random: Random, job: Job) -> Loading:
    """What no policy of the thesis decides: any mixture of fills and switches that the machine has space for."""
    return Loading(
        random_fills(random, job, ["store"])[0],
        stages=random.random() < 0.8,
        stages_from_store=random.random() < 0.5,
        stages_from_peers=random.random() < 0.5,
    )


def _run(seed: int) -> tuple[Job, Loading]:
    random = Random(seed)
    job = random_job(random, has_latency=False)
    if random.random() < 0.4:
        return job, _loading(random, job)
    try:
        return job, random.choice(POLICIES[1:]).prepare(job)
    except ConfigError:  # a tier is missing, or too small
        return job, Loading()


@given(st.integers(0, 2**64 - 1))
def test_ranks_that_go_one_after_the_other_are_as_in_the_plain_model(seed: int) -> None:
    job, loading = _run(seed)
    model = _Model(job, loading)
    model.run()

    result = simulate_rank_by_rank(job, Given(loading))

    assert result.initial_stall_seconds == pytest.approx(model.start, rel=1e-9)
    assert [dict(zip(ORIGINS, row, strict=True)) for row in result.reads.tolist()] == [
        {origin: count[origin] for origin in ORIGINS} for count in model.reads
    ]
    assert result.step_end_seconds.tolist() == pytest.approx(model.step_end, rel=1e-9)
    assert result.store_bytes.tolist() == model.store_bytes
    assert result.fill_reads.tolist() == model.fill_reads
    assert (
        result.step_stall_seconds + result.step_busy_seconds
        <= np.diff(result.step_end_seconds, prepend=result.initial_stall_seconds)[:, None] * (1 + 1e-5) + 1e-5
    ).all()


# -- By hand: every sample is 10 bytes, so that times are whole


@pytest.mark.parametrize(
    ("policy", "compute", "seconds"),
    [
        # 1 s to fetch, 1 s to decode: a slow thread sets the pace, and the last sample is computed after it.
        (Staging(), 20.0, 20 * 2 + 0.5),
        # A fast one is waited for once.
        (Staging(), 2.5, 2 + 20 * 4),
        # Without staging fetch, decode and compute add up.
        (Naive(), 10.0, 20 * 3),
    ],
)
def test_a_rank_alone_takes_what_its_thread_and_its_training_take(
    policy: LoadingPolicy, compute: float, seconds: float
) -> None:
    staging = StorageClass("staging", 10_000, 1, Curve.flat(1e12))
    machine = Machine(
        SharedStore(Curve.flat(10.0)), (staging,), 1, preprocess_bytes_per_second=10.0, compute=Rate(compute)
    )
    job = Job(AccessPlan(FullShuffle(20, 0), 5, 1, 1), np.full(20, 10), machine)

    assert simulate_rank_by_rank(job, policy).run_seconds == pytest.approx(seconds)
