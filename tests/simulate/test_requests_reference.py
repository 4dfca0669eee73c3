"""Simulated jobs: random ones keep their promises; those as published equal a slow model, written from the thesis."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from math import inf
from random import Random
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.given import Given

from penstock.errors import ConfigError
from penstock.kernel_cache import kept_loop
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import Fill, Job, Loading
from penstock.policy.push import decide_push
from penstock.simulate import loading as virtual_time
from penstock.simulate.assumptions import PHYSICAL, THESIS, Assumptions
from penstock.simulate.policies import POLICY_NAMES, policy_named
from penstock.simulate.requests import ORIGINS, LoadingResult, simulate_job
from penstock.trace.schema import SOURCE

# -- The slow model: prices, strings, loading before training; then steps, rank by rank


@dataclass
class _Copy:
    rank: int
    tier: int
    ready: float
    is_handed: bool


class _Model:
    def __init__(self, job: Job, loading: Loading, assumed: Assumptions) -> None:
        self.plan, self.machine, self.loading, self.assumed = job.plan, job.machine, loading, assumed
        self.sizes = [int(size) for size in job.sizes_bytes]
        self.ranks = range(job.ranks)
        self.storage = job.machine.storage
        self.staging_bytes = self.storage[0].capacity_bytes
        strings = loading.strings or [job.plan.string(rank) for rank in self.ranks]
        self.strings = [[int(sample) for sample in string] for string in strings]
        #: Of each rank, the half-open range of each step in its string.
        self.steps = [list(itertools.pairwise(self._bounds(rank))) for rank in self.ranks]
        self.copies: dict[int, list[_Copy]] = defaultdict(list)
        self.reads = [Counter[str]() for _ in self.ranks]
        self.store_bytes = [0 for _ in self.ranks]
        self.fill_reads = [0 for _ in self.ranks]
        self.step_end: list[float] = []
        self.last_load_ends: list[list[float]] = [[] for _ in self.ranks]
        self.start = self._load_before()
        self.stagers_start = 0.0 if assumed.staging_begins == "at-zero" else self.start
        for rank in self.ranks:
            for fill in loading.fills:
                if fill.rank == rank:
                    ready = self.stagers_start if fill.before_training else inf
                    for sample in fill.samples.tolist():
                        self.copies[sample].append(_Copy(rank, fill.tier, ready, fill.origin == "hand-over"))
            for sample in loading.spares[rank].tolist() if loading.spares is not None else ():
                self.copies[sample].append(_Copy(rank, 0, inf, False))

        self._follow_samples()

    def _follow_samples(self) -> None:
        """Find who reads each sample next, and when it arrives there: not known before its previous user has it."""
        by_sample: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for rank in self.ranks:
            for step, (begin, end) in enumerate(self.steps[rank]):
                for access in range(begin, end):
                    by_sample[self.strings[rank][access]].append((step, rank, access))
        self.next_read: dict[tuple[int, int], tuple[int, int]] = {}
        self.arrival: dict[tuple[int, int], float] = {}
        for reads in by_sample.values():
            places = [(rank, access) for _, rank, access in sorted(reads)]
            self.arrival |= dict.fromkeys(places, inf) | {places[0]: self.start}
            self.next_read |= dict(itertools.pairwise(places))
        self.link_free = [0.0 for _ in self.ranks]

    def hand_on(self, rank: int, access: int, now: float) -> tuple[int, int] | None:
        """Send a sample that was used to its next user, if that counts on it; over the link to another rank."""
        place = self.next_read.get((rank, access))
        if place is None or self.hit(*place) <= 0:
            return None
        if place[0] != rank:
            network = self.machine.network_bytes_per_second
            sent = self.sizes[self.strings[rank][access]] / network
            now = self.link_free[rank] = max(self.link_free[rank], now) + sent
        self.arrival[place] = now
        return place

    def last_read(self, rank: int, sample: int) -> int:
        return max((place for place, read in enumerate(self.strings[rank]) if read == sample), default=-1)

    def _bounds(self, rank: int) -> list[int]:
        counts = [
            self.plan.local_batch(rank, epoch, step).size
            for epoch in range(self.plan.epochs)
            for step in range(self.plan.steps(epoch))
        ]
        return [0, *itertools.accumulate(counts)]

    # Prices, of thesis 3.1 and what `Assumptions` says of sharing

    def store_rate(self, clients: int, reads: int) -> float:
        source = self.machine.source
        share = inf if source.clients is None else source.clients.at(clients) / clients
        readers = 1 if self.assumed.bandwidth == "per-thread" else reads
        own = inf if source.read is None else source.read.at(readers)
        return min(self.machine.source_network_bytes_per_second, share, own) / readers

    def tier_rate(self, tier: int, reads: int, *, is_remote: bool) -> float:
        curve, threads = self.storage[tier].read, self.storage[tier].threads
        network = self.machine.network_bytes_per_second if is_remote else inf
        if self.assumed.bandwidth == "per-thread":
            # (x / p) * p, as a rate of each and then of all: the last bit counts where two ways cost the same.
            return min(network, curve.at(threads) / threads * threads)
        return min(network, curve.at(reads)) / reads

    @property
    def stage_byte_write(self) -> float:
        threads = self.machine.decode_threads
        curve = self.storage[0].write or self.storage[0].read
        return 1 / min(self.machine.preprocess_bytes_per_second, curve.at(threads) / threads)

    def stage_write(self, sample: int) -> float:
        return self.sizes[sample] * self.stage_byte_write

    def fill_byte_write(self, tier: int) -> float:
        if self.assumed.filling == "preprocessed":
            return self.stage_byte_write
        curve, threads = self.storage[tier].write or self.storage[tier].read, self.storage[tier].threads
        return 1 / (curve.at(threads) / threads)

    def busy(self, sample: int) -> float:
        rate = self.machine.compute
        assert rate is not None
        return self.sizes[sample] / rate.per_second if rate.of == "bytes" else 1 / rate.per_second

    def latency(self, tier: int) -> float:
        return self.storage[tier].latency_seconds if tier else self.machine.source.latency_seconds

    # Loading before training

    def _load_before(self) -> float:
        before = [fill for fill in self.loading.fills if fill.before_training]
        byte_seconds = self._shares_of_the_store(before)
        ends = [0.0 for _ in self.ranks]
        for fill in before:
            threads = self.storage[fill.tier].threads
            if fill.origin == "store":
                if self.assumed.bandwidth == "per-thread":
                    byte = 1 / self.store_rate(len(self.ranks), 1)
                else:
                    byte = byte_seconds.get(fill.rank, 0.0) * threads
                latency = self.machine.source.latency_seconds
                self.store_bytes[fill.rank] += sum(self.sizes[sample] for sample in fill.samples)
                self.fill_reads[fill.rank] += fill.samples.size
            else:
                byte = 1 / self.tier_rate(fill.tier, threads, is_remote=True)
                if self.assumed.bandwidth == "per-thread":
                    network = self.machine.network_bytes_per_second
                    byte = 1 / min(network, self.storage[fill.tier].read.at(threads))
                latency = self.storage[fill.tier].latency_seconds
            free = [ends[fill.rank]] * threads
            for place, sample in enumerate(fill.samples.tolist()):
                thread = place % threads
                free[thread] += latency + self.sizes[sample] * (byte + self.fill_byte_write(fill.tier))
                if fill.origin == "store":
                    self.last_load_ends[fill.rank].append(free[thread])
            ends[fill.rank] = max(free)
        if self.assumed.initial_stall == "longest":
            return max(ends)
        loading = [end for end in ends if end > 0]
        return loading[-1] if loading else 0.0

    def _shares_of_the_store(self, fills: list[Fill]) -> dict[int, float]:
        """Seconds per byte of each rank: it has its share of the store until it is done, which others then get."""
        total = {
            rank: sum(
                self.sizes[sample]
                for fill in fills
                if fill.rank == rank and fill.origin == "store"
                for sample in fill.samples
            )
            for rank in self.ranks
        }
        threads = {
            rank: max(
                [
                    self.storage[fill.tier].threads
                    for fill in fills
                    if fill.rank == rank and fill.origin == "store"
                ],
                default=1,
            )
            for rank in self.ranks
        }
        left = {rank: float(count) for rank, count in total.items() if count}
        shares, now = {}, 0.0
        while left:
            rate = {rank: self.machine.source_rate(len(left), threads[rank]) * threads[rank] for rank in left}
            first = min(left, key=lambda rank: left[rank] / rate[rank])
            passed = left[first] / rate[first]
            now += passed
            for rank in list(left):
                left[rank] -= passed * rate[rank]
                if left[rank] < 0.5:
                    shares[rank] = now / total[rank]
                    del left[rank]
        return shares

    def own(self, rank: int, sample: int) -> _Copy | None:
        return next((copy for copy in self.copies[sample] if copy.rank == rank), None)

    def is_last_read(self, rank: int, access: int) -> bool:
        return self.strings[rank][access] not in self.strings[rank][access + 1 :]

    def hit(self, rank: int, access: int) -> int:
        return int(self.loading.hits[rank][access]) if self.loading.hits is not None else -1

    def fill_list(self, rank: int) -> list[tuple[int, int]]:
        """What a rank's tiers are filled with during training: (tier, sample), tier 0 for whichever has room."""
        planned = [
            (fill.tier, sample)
            for fill in sorted(self.loading.fills, key=lambda fill: fill.tier)
            if fill.rank == rank and not fill.before_training and fill.origin == "store"
            for sample in fill.samples.tolist()
        ]
        spares = self.loading.spares[rank].tolist() if self.loading.spares is not None else []
        return planned + [(0, sample) for sample in spares]


# -- Rank by rank


@dataclass
class _Node:
    """One rank's clocks; times of its reads of the store as the thesis' simulator lists them."""

    threads: list[float]
    fill_threads: dict[int, list[float]]
    room: dict[int, float]
    to_fill: list[tuple[int, int]]
    staged: dict[int, tuple[float, str]] = field(default_factory=dict)
    counted_bytes: int = 0
    counted_ids: set[int] = field(default_factory=set)
    ahead: int = 0
    freed: int = 0
    turn: int = 0
    asked: list[float] = field(default_factory=list)
    fetched: list[float] = field(default_factory=list)


class _OneAfterTheOther(_Model):
    def run(self) -> None:
        self.nodes = [
            _Node(
                [self.stagers_start] * self.storage[0].threads,
                {tier: [self.start] * self.storage[tier].threads for tier in range(1, len(self.storage))},
                {tier: self.storage[tier].capacity_bytes for tier in range(1, len(self.storage))},
                self.fill_list(rank),
                fetched=list(self.last_load_ends[rank]),
            )
            for rank in self.ranks
        ]
        for rank in self.ranks:
            self._fill(rank, 0.0)
        for rank in self.ranks:
            self._stage(rank, self.stagers_start)
        now = self.start
        for step in range(len(self.steps[0])):
            ends = [now]
            for rank in self.ranks:
                clock = now
                begin, end = self.steps[rank][step]
                for access in range(begin, end):
                    clock = self._use(rank, access, begin, clock)
                ends.append(clock)
            now = max(ends)
            self.step_end.append(now)

    def _use(self, rank: int, access: int, step_begin: int, clock: float) -> float:
        node, sample = self.nodes[rank], self.strings[rank][access]
        answered, origin = self._answer(rank, access, clock)
        if origin == "store":
            node.asked.append(clock)
        if origin == "staged from the store":
            node.asked.append(answered)
        self.reads[rank][origin] += 1
        self.hand_on(rank, access, answered)
        for past in range(node.freed, access + 1 if self.assumed.freed == "on-use" else step_begin):
            node.freed = past + 1
            used = self.strings[rank][past]
            if past in node.staged:
                node.counted_bytes -= self.sizes[used]
            own = self.own(rank, used)
            if self.loading.drops and self.is_last_read(rank, past) and own and own.ready < inf:
                own.ready = inf
                node.room[own.tier] += self.sizes[used]
        node.ahead = max(node.ahead, access + 1)
        if self.loading.drops:
            self._fill(rank, answered)
        self._stage(rank, answered)
        return answered + self.busy(sample)

    def _answer(self, rank: int, access: int, clock: float) -> tuple[float, str]:
        sample = self.strings[rank][access]
        at, staged_origin = self.nodes[rank].staged.get(access, (inf, ""))
        if self.loading.is_ready:
            return clock, "staged from a tier"
        if at <= clock:
            return clock, staged_origin
        # (rate, where, its latency); the store first: an equal rate elsewhere does not replace it.
        rate, origin, latency = self.store_share(self.clients(rank, clock)), "store", self.latency(0)
        own, peer = self.own(rank, sample), self.peer(rank, sample, clock)
        options = []
        if own and own.ready <= clock:
            options.append((self.local_share(own.tier), "tier", self.latency(own.tier)))
        if (tier := self.hit(rank, access)) > 0 and self.arrival[rank, access] <= clock:
            options.append((self.local_share(tier), "tier", self.latency(tier)))
        if peer:
            options.append((self.remote_share(peer.tier), "peer", self.latency(peer.tier)))
        for option in options:
            if option[0] > rate:
                rate, origin, latency = option
        direct = clock + latency + self.sizes[sample] / rate + self.stage_write(sample)
        if at <= direct:
            return at, staged_origin
        if origin == "store":
            self.store_bytes[rank] += self.sizes[sample]
            self.hand_over(sample, direct)
        return direct, origin

    def _fill(self, rank: int, now: float) -> None:
        node = self.nodes[rank]
        for tier, threads in node.fill_threads.items():
            turn = 0
            while node.to_fill:
                wanted, sample = node.to_fill[0]
                if self.loading.drops and self.last_read(rank, sample) < node.ahead:
                    node.to_fill.pop(0)
                    continue
                if wanted not in (0, tier) or self.sizes[sample] > node.room[tier]:
                    break
                node.to_fill.pop(0)
                node.room[tier] -= self.sizes[sample]
                begun = max(now, threads[turn])
                node.fetched.append(begun)
                done = (
                    begun
                    + self.latency(0)
                    + self.sizes[sample] / self.store_share(len(self.ranks))
                    + self.sizes[sample] * self.fill_byte_write(tier)
                )
                threads[turn] = done
                turn = (turn + 1) % len(threads)
                copy = self.own(rank, sample)
                assert copy is not None
                copy.tier, copy.ready = tier, done
                self.store_bytes[rank] += self.sizes[sample]
                self.fill_reads[rank] += 1

    def _stage(self, rank: int, now: float) -> None:
        node, string = self.nodes[rank], self.strings[rank]
        if not self.loading.stages:
            return
        node.threads = [max(idle, now) for idle in node.threads]
        while node.ahead < len(string):
            access, sample = node.ahead, string[node.ahead]
            if node.counted_bytes + self.sizes[sample] > self.staging_bytes:
                return
            begun = node.threads[node.turn]
            rate, due, origin, latency = 0.0, inf, "", 0.0
            own = self.own(rank, sample)
            if own and own.ready < inf:
                rate, due = self.local_share(own.tier), own.ready
                origin, latency = "staged from a tier", self.latency(own.tier)
            elif (tier := self.hit(rank, access)) > 0:
                if self.arrival[rank, access] == inf:
                    return
                rate, due = self.local_share(tier), self.arrival[rank, access]
                origin, latency = "staged from a tier", self.latency(tier)
            peer = self.peer(rank, sample, 1e300) if self.loading.stages_from_peers else None
            if peer and self.remote_share(peer.tier) > rate:
                if self.loading.stages_from_store and peer.ready > begun:
                    return
                rate, due = self.remote_share(peer.tier), peer.ready
                origin, latency = "staged from a peer", self.latency(peer.tier)
            if self.loading.stages_from_store:
                store = self.store_share(self.clients(rank, begun))
                # A source is judged only if it could win: the store with all to oneself.
                if due > begun or (self.store_share(1) > rate and store > rate):
                    rate, due, origin, latency = store, begun, "staged from the store", self.latency(0)
            if due < inf:
                read = max(due, begun) + latency + self.sizes[sample] / rate
                done = read + self.stage_write(sample)
                node.threads[node.turn] = done
                node.staged[access] = (done, origin)
                if origin == "staged from the store":
                    self.store_bytes[rank] += self.sizes[sample]
                    self.hand_over(sample, done)
                    node.fetched.append(begun)
                if self.assumed.counted == "always" or sample not in node.counted_ids:
                    node.counted_bytes += self.sizes[sample]
                node.counted_ids.add(sample)
            node.ahead += 1
            node.turn = (node.turn + 1) % len(node.threads)

    def clients(self, rank: int, now: float) -> int:
        if self.assumed.clients == "all":
            return len(self.ranks)
        return 1 + sum(
            (bool(node.asked) and node.asked[-1] >= now) or self._is_listed_ahead(node.fetched, now)
            for other, node in enumerate(self.nodes)
            if other != rank
        )

    @staticmethod
    def _is_listed_ahead(times: list[float], now: float) -> bool:
        # The published numbers look at the end of a list, then bisect it although it is not quite sorted.
        return bool(times) and times[-1] > now - 0.1 and bisect_left(times, now) < len(times)

    def peer(self, rank: int, sample: int, by: float) -> _Copy | None:
        there = [copy for copy in self.copies[sample] if copy.rank != rank and copy.ready <= by]
        if self.assumed.remote == "last":
            return there[-1] if there else None
        return max(there, key=lambda copy: self.remote_share(copy.tier), default=None)

    def hand_over(self, sample: int, done: float) -> None:
        for copy in self.copies[sample]:
            if copy.is_handed:
                copy.ready = min(copy.ready, done)

    def store_share(self, clients: int) -> float:
        return self.store_rate(clients, self.storage[0].threads)

    def local_share(self, tier: int) -> float:
        return self.tier_rate(tier, self.storage[tier].threads, is_remote=False)

    def remote_share(self, tier: int) -> float:
        return self.tier_rate(tier, self.storage[tier].threads, is_remote=True)


# -- All at once


# -- Random jobs: drawn from a seed, because hypothesis takes longer to draw one value by value than both models to run


def _rate(random: Random) -> float:
    # Sevenths: no two ways cost the same by accident, which would leave the choice to the last bit.
    return random.randint(7, 400) / 7


def _curve(random: Random, *more: int) -> Curve:
    users = {*random.sample(range(1, 7), random.randint(1, 3)), *more}
    return Curve(tuple((float(count), _rate(random)) for count in sorted(users)))


def _machine(random: Random, ranks: int, *, is_exact: bool) -> Machine:
    storage = []
    for number in range(random.randint(1, 3)):
        threads = random.randint(1, 3)
        storage.append(
            StorageClass(
                f"class {number}",
                random.randint(1, 150),
                threads,
                _curve(random, *[threads] * is_exact),
                random.choice([None, _curve(random)]),
                random.choice([0.0, 0.0, 1 / 3]) if number else 0.0,
            )
        )
    clients = random.choice([None, _curve(random), _curve(random)])
    own = random.choice([None, _curve(random)]) if clients else _curve(random)
    return Machine(
        SharedStore(clients, own, random.choice([0.0, 0.0, 0.7]), random.randint(1, 4)),
        tuple(storage),
        ranks,
        random.choice([inf, _rate(random)]),
        random.choice([inf, _rate(random)]),
        random.choice([inf, _rate(random)]),
        Rate(_rate(random), random.choice(["bytes", "samples"])),
        random.randint(1, 3),
    )


_VALUES_OF_ASSUMPTIONS = {name: get_args(hint) for name, hint in get_type_hints(Assumptions).items()}
#: What two ranks that run at once do, whatever is assumed.
_OF_LOADERS = [
    "clients",
    "bandwidth",
    "curves",
    "remote",
    "freed",
    "counted",
    "initial_stall",
    "staging_begins",
    "filling",
]


def _assumptions(random: Random, time: str) -> Assumptions:
    values = {name: random.choice(values) for name, values in _VALUES_OF_ASSUMPTIONS.items()}
    values["time"] = time
    if time == "together":  # the loaders leave no choice
        values |= {name: getattr(PHYSICAL, name) for name in _OF_LOADERS}
    elif values["clients"] == "reading-now":
        values["clients"] = random.choice(["ahead", "all"])
    return Assumptions(**values)


def _job(random: Random, assumed: Assumptions) -> Job:
    ranks = random.randint(1, 4)
    plan = AccessPlan(
        FullShuffle(random.randint(1, 12), random.randint(0, 99)),
        random.randint(1, 8),
        random.randint(1, 3),
        ranks,
        random.choice(["uniform", "strided", "imbalanced"]),
    )
    machine = _machine(random, ranks, is_exact=assumed.curves == "exact")
    sizes = np.array([random.randint(1, 40) for _ in range(plan.samples)], np.int64)
    return Job(plan, sizes, machine, random.randint(0, 9))


def _loading(random: Random, job: Job) -> Loading:
    """What no policy of ours decides: any mixture of fills, hits and switches that the machine has room for."""
    storage, samples = job.machine.storage, job.plan.samples
    fills, spares = [], []
    for rank in range(job.ranks):
        order = random.sample(range(samples), samples)
        cuts = sorted(random.randint(0, samples) for _ in storage[1:])
        for tier, (begin, end) in enumerate(itertools.pairwise([0, *cuts]), start=1):
            kept = np.array(order[begin:end], np.int64)
            fits = np.cumsum(job.sizes_bytes[kept]) <= storage[tier].capacity_bytes
            is_before = random.random() < 0.5
            origin: Any = random.choice(["store", "peers"] if is_before else ["store", "hand-over"])
            fills.append(Fill(rank, tier, kept[fits], origin, is_before))
        spares.append(np.array(order[cuts[-1] if cuts else samples :], np.int64))
    # What goes from reader to reader has no home.
    hands_on = random.random() < 0.3
    if hands_on:
        fills, spares = [], [np.empty(0, np.int64)] * job.ranks
    hits = []
    for rank in range(job.ranks if hands_on else 0):
        found = decide_push(job.plan, rank, job.sizes_bytes, job.capacities_bytes()).tiers
        hits.append(np.where([random.random() < 0.8 for _ in found], found, np.int8(SOURCE)))
    drops = random.random() < 0.5 and not hands_on
    return Loading(
        fills,
        stages=random.random() < 0.8,
        stages_from_store=random.random() < 0.5,
        stages_from_peers=random.random() < 0.5,
        hits=hits if hands_on else None,
        drops=drops,
        spares=spares if drops and len(storage) > 1 else None,
    )


def _run(seed: int, time: str) -> tuple[Job, Loading, Assumptions]:
    random = Random(seed)
    assumed = _assumptions(random, time)
    job = _job(random, assumed)
    if random.random() < 0.3:
        return job, _loading(random, job), assumed
    try:
        return job, policy_named(random.choice(POLICY_NAMES), assumed).prepare(job), assumed
    except ConfigError:  # a tier is missing, or too small
        return job, Loading(), assumed


def _assert_equal(model: _OneAfterTheOther, result: LoadingResult) -> None:
    assert result.initial_stall_seconds == pytest.approx(model.start, rel=1e-9)
    assert [dict(zip(ORIGINS, row, strict=True)) for row in result.reads.tolist()] == [
        {origin: count[origin] for origin in ORIGINS} for count in model.reads
    ]
    assert result.step_end_seconds.tolist() == pytest.approx(model.step_end, rel=1e-9)
    assert result.store_bytes.tolist() == model.store_bytes
    assert result.fill_reads.tolist() == model.fill_reads


_SEEDS = st.integers(0, 2**64 - 1)


@settings(max_examples=300)
@given(_SEEDS)
def test_ranks_that_go_one_after_the_other_are_as_in_the_plain_model(seed: int) -> None:
    job, loading, assumed = _run(seed, "rank-by-rank")
    model = _OneAfterTheOther(job, loading, assumed)
    model.run()

    _assert_equal(model, simulate_job(job, Given(loading), assumed))


@settings(max_examples=150)
@given(_SEEDS, st.sampled_from(["together", "rank-by-rank"]))
def test_every_read_is_consumed_once_in_order_and_no_run_is_shorter_than_its_bound(
    seed: int, time: str
) -> None:
    job, loading, assumed = _run(seed, time)
    strings = loading.strings or job.strings

    result = simulate_job(job, Given(loading), assumed, per_sample=time == "rank-by-rank")

    assert result.reads.sum(axis=1).tolist() == [string.size for string in strings]
    assert (np.diff(result.step_end_seconds) >= 0).all()
    assert result.run_seconds == result.step_end_seconds[-1] >= result.initial_stall_seconds
    if time == "rank-by-rank":
        assert result.sample_end_seconds is not None
        assert result.sample_stall_seconds is not None
        for rank, ends in enumerate(result.sample_end_seconds):
            assert (np.diff(ends) > 0).all()
            assert (result.sample_stall_seconds[rank] >= 0).all()
            waited = result.sample_stall_seconds[rank].sum(dtype=float) + result.initial_stall_seconds
            assert waited == pytest.approx(result.stall_seconds[rank], rel=1e-5, abs=1e-5)
    assert (
        result.step_stall_seconds + result.step_busy_seconds
        <= np.diff(result.step_end_seconds, prepend=result.initial_stall_seconds)[:, None] * (1 + 1e-5) + 1e-5
    ).all()
    bound = simulate_job(job, Given(Loading(strings=list(strings), is_ready=True)), assumed)
    assert result.run_seconds >= result.initial_stall_seconds + bound.run_seconds - 1e-9 * result.run_seconds


@settings(max_examples=100)
@given(_SEEDS)
def test_what_two_batches_want_at_once_is_read_once(seed: int) -> None:
    """The store gives each consumed sample and each fill at most once."""
    job, loading, assumed = _run(seed, "together")
    alike = Job(job.plan, np.full(job.plan.samples, int(job.sizes_bytes.min())), job.machine)

    result = simulate_job(alike, Given(loading), assumed)

    counts = dict(zip(ORIGINS, result.reads.T, strict=True))
    reads = counts["staged from the store"] + counts["store"] + result.fill_reads
    assert (result.store_bytes <= reads * alike.sizes_bytes[0]).all()


@settings(max_examples=100)
@given(_SEEDS)
def test_compiled_ranks_that_run_together_do_what_they_do_in_plain_python(seed: int) -> None:
    job, loading, assumed = _run(seed, "together")
    compiled = kept_loop(virtual_time.KERNELS, "run", virtual_time.RUN, compiles=True)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        for loop in (None, compiled):
            patch.setattr(virtual_time, "_compiled", lambda _reads, loop=loop: loop)
            found.append(simulate_job(job, Given(loading), assumed))

    for each in fields(LoadingResult):
        assert np.array_equal(*(getattr(result, each.name) for result in found)), each.name


@pytest.mark.parametrize("assumed", [PHYSICAL, THESIS], ids=["physical", "thesis"])
def test_the_same_run_twice_is_the_same(assumed: Assumptions) -> None:
    job, _, _ = _run(3, assumed.time)
    job = Job(job.plan, job.sizes_bytes, _machine(Random(5), job.ranks, is_exact=True), 1)

    first, second = (simulate_job(job, policy_named("frequency", assumed), assumed) for _ in range(2))

    assert first.step_end_seconds.tolist() == second.step_end_seconds.tolist()
    assert first.reads.tolist() == second.reads.tolist()
