"""The compiled request model against two slow ones, written from the thesis and from what the assumptions say.

`_OneAfterTheOther` goes through a step rank by rank. `_AllAtOnce` is a discrete-event simulation in which every
consumer, staging thread and fill thread is a generator that yields the time at which it wants to go on.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.given import Given

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import Fill, Job, Loading
from penstock.simulate.assumptions import PHYSICAL, THESIS, Assumptions
from penstock.simulate.policies import POLICY_NAMES, policy_named
from penstock.simulate.requests import ORIGINS, LoadingResult, simulate_job

# -- What both references share: prices, strings, loading before training


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


@dataclass
class _Host:
    """What the threads of one rank share."""

    stagers: list[int]
    fillers: list[int]
    lists: dict[int, list[int]]
    room: dict[int, int]
    staged: dict[int, str] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    parked: set[int] = field(default_factory=set)
    held_bytes: int = 0
    most_bytes: int = 0
    ahead: int = 0
    freed: int = 0
    decoding: int = 0
    droppable: list[int] = field(default_factory=list)
    waits_for: int | None = None


class _AllAtOnce(_Model):
    def run(self) -> None:
        self.heap: list[tuple[float, int]] = []
        self.actors: list[Iterator[float | None]] = []
        self.store_reads = Counter[int]()
        self.tier_reads = Counter[tuple[int, int]]()
        self.hosts: list[_Host] = []
        self.consumers: list[int] = []
        self.now = 0.0
        for rank in self.ranks:
            listed = self.fill_list(rank)
            lists: dict[int, list[int]] = defaultdict(list)
            for tier, sample in listed:
                lists[tier].append(sample)
            self.consumers.append(self._add(self._consume(rank)))
            readers = self.machine.source.threads if self.assumed.readers == "source" else 1
            count = max(self.storage[0].threads, readers) if self.loading.stages else 0
            stagers = [self._add(self._stage(rank, len(self.actors))) for _ in range(count)]
            fillers = [
                self._add(self._fill(rank, tier, len(self.actors)))
                for tier in range(1, len(self.storage))
                for _ in range(self.storage[tier].threads)
            ]
            room = {
                tier: self.storage[tier].capacity_bytes - sum(self.sizes[sample] for sample in lists[tier])
                for tier in range(1, len(self.storage))
            }
            self.hosts.append(_Host(stagers, fillers, lists, room))
            for stager in stagers:
                self._at(self.stagers_start, stager)
            for filler in fillers if listed else ():
                self._at(self.start, filler)
        self.steps_left = list(range(len(self.steps[0])))
        self.running = 0
        self.now = self.start
        self._begin_step()
        while self.running:
            self.now, actor = heapq.heappop(self.heap)
            if (then := next(self.actors[actor], None)) is not None:
                self._at(then, actor)
            if not self.running:
                self.step_end.append(self.now)
                self._begin_step()

    def _begin_step(self) -> None:
        if self.steps_left:
            step = self.steps_left.pop(0)
            readers = [rank for rank in self.ranks if self.steps[rank][step][0] < self.steps[rank][step][1]]
            self.running = len(readers)
            for rank in readers:
                self._at(self.now, self.consumers[rank])

    def _add(self, actor: Iterator[float | None]) -> int:
        self.actors.append(actor)
        return len(self.actors) - 1

    def _at(self, time: float, actor: int) -> None:
        heapq.heappush(self.heap, (time, actor))

    def _wake_consumer_of(self, rank: int, access: int) -> None:
        if self.hosts[rank].waits_for == access:
            self._at(self.now, self.consumers[rank])

    def _read(self, rank: int, place: tuple[int, int] | None, done: float) -> Iterator[float]:
        """Use the store (None) or a tier until `done`."""
        if place is None:
            self.store_reads[rank] += 1
        else:
            self.tier_reads[place] += 1
        yield done
        if place is None:
            self.store_reads[rank] -= 1
        else:
            self.tier_reads[place] -= 1

    def _store_seconds(self, rank: int, sample: int) -> float:
        reading = {other for other in self.ranks if self.store_reads[other]} | {rank}
        clients = len(self.ranks) if self.assumed.clients == "all" else len(reading)
        return self.sizes[sample] / self.store_rate(clients, self.store_reads[rank] + 1)

    def _choose(
        self, rank: int, access: int, *, peers: bool, store: bool
    ) -> tuple[float, tuple[int, int] | None] | None:
        """The earliest end of a fetch that begins now, and from where; of equal ones the rank's own, else the first."""
        sample = self.strings[rank][access]
        candidates: list[tuple[float, bool, tuple[int, int] | None]] = []
        others = [copy for copy in self.copies[sample] if copy.rank != rank and copy.ready <= self.now]
        if self.assumed.remote == "last":
            others = others[-1:]
        for copy in self.copies[sample]:
            is_own = copy.rank == rank
            if copy.ready == inf or not (is_own or (peers and any(copy is other for other in others))):
                continue
            rate = self.tier_rate(copy.tier, self.tier_reads[copy.rank, copy.tier] + 1, is_remote=not is_own)
            begun = max(self.now, copy.ready) + self.latency(copy.tier)
            candidates.append((begun + self.sizes[sample] / rate, not is_own, (copy.rank, copy.tier)))
        if (tier := self.hit(rank, access)) > 0:
            rate = self.tier_rate(tier, self.tier_reads[rank, tier] + 1, is_remote=False)
            begun = max(self.now, self.arrival[rank, access]) + self.latency(tier)
            candidates.append((begun + self.sizes[sample] / rate, True, (rank, tier)))
        if store:
            candidates.append((self.now + self.latency(0) + self._store_seconds(rank, sample), True, None))
        done, _, place = min(candidates, key=lambda candidate: candidate[:2], default=(inf, True, None))
        return (done, place) if done < inf else None

    def _fetch(self, rank: int, access: int, done: float, place: tuple[int, int] | None) -> Iterator[float]:
        sample = self.strings[rank][access]
        own = self.own(rank, sample)
        claimed = own if own and own.ready == inf and own.tier > 0 else None
        if claimed:
            claimed.ready = done
        if place is None:
            self.store_bytes[rank] += self.sizes[sample]
            # Bytes share the wire from when they flow.
            if self.latency(0):
                yield self.now + self.latency(0)
            done = self.now + self._store_seconds(rank, sample)
            if claimed:
                claimed.ready = done
            for copy in self.copies[sample]:
                if copy.ready == inf and copy.is_handed:
                    copy.ready = done + self.sizes[sample] / self.machine.network_bytes_per_second
        yield from self._read(rank, place, done)
        host = self.hosts[rank]
        host.decoding += 1
        yield done + self.stage_write(sample) * max(1.0, host.decoding / self.machine.decode_threads)
        host.decoding -= 1

    def _origin(self, rank: int, place: tuple[int, int] | None) -> str:
        return "the store" if place is None else "a tier" if place[0] == rank else "a peer"

    def _consume(self, rank: int) -> Iterator[float | None]:
        for begin, end in self.steps[rank]:
            if begin == end:
                continue
            host = self.hosts[rank]
            for access in range(begin, end):
                sample = self.strings[rank][access]
                host.waits_for = access
                if self.assumed.freed == "next-step" and access == begin:
                    self._release(rank, access)
                while True:
                    if self.loading.is_ready:
                        origin = "staged from a tier"
                        break
                    if access in host.staged:
                        origin = "staged from " + host.staged[access]
                        break
                    is_alone = host.parked >= set(host.stagers)
                    if access in host.left or (access not in host.begun and is_alone):
                        host.left.add(access)
                        host.ahead = max(host.ahead, access + 1)
                        chosen = self._choose(rank, access, peers=True, store=True)
                        assert chosen is not None
                        yield from self._fetch(rank, access, *chosen)
                        origin = self._origin(rank, chosen[1]).split()[-1]
                        break
                    yield None
                self.reads[rank][origin] += 1
                host.waits_for = None
                after = self.now + self.busy(sample)
                if (place := self.hand_on(rank, access, self.now)) and self.hosts[place[0]].ahead == place[1]:
                    self._wake(place[0], self.hosts[place[0]].stagers)
                if self.assumed.freed == "on-use":
                    self._release(rank, access + 1)
                yield after
            self.running -= 1
            yield None

    def _release(self, rank: int, until: int) -> None:
        host = self.hosts[rank]
        if until <= host.freed:
            return
        has_room = False
        for past in range(host.freed, until):
            sample = self.strings[rank][past]
            if past in host.staged:
                host.held_bytes -= self.sizes[sample]
            own = self.own(rank, sample)
            if self.loading.drops and self.is_last_read(rank, past) and own and own.ready < inf:
                host.droppable.append(sample)
                has_room = True
        host.freed = until
        self._wake(rank, host.stagers + (host.fillers if has_room else []))

    def _wake(self, rank: int, actors: list[int]) -> None:
        woken = self.hosts[rank].parked & set(actors)
        self.hosts[rank].parked -= woken
        for actor in woken:
            self._at(self.now, actor)

    def _stage(self, rank: int, me: int) -> Iterator[float | None]:
        host = self.hosts[rank]
        while host.ahead < len(self.strings[rank]):
            access = host.ahead
            sample = self.strings[rank][access]
            is_full = host.held_bytes and host.held_bytes + self.sizes[sample] > self.staging_bytes
            if is_full or (self.hit(rank, access) > 0 and self.arrival[rank, access] == inf):
                host.parked.add(me)
                self._wake_consumer_of(rank, access)
                yield None
                continue
            host.ahead += 1
            chosen = self._choose(
                rank, access, peers=self.loading.stages_from_peers, store=self.loading.stages_from_store
            )
            if chosen is None:
                host.left.add(access)
                self._wake_consumer_of(rank, access)
                continue
            host.begun.add(access)
            host.held_bytes += self.sizes[sample]
            host.most_bytes = max(host.most_bytes, host.held_bytes)
            yield from self._fetch(rank, access, *chosen)
            host.staged[access] = self._origin(rank, chosen[1])
            self._wake_consumer_of(rank, access)

    def _fill(self, rank: int, tier: int, me: int) -> Iterator[float | None]:
        host = self.hosts[rank]
        while True:
            sample = self._next_to_fill(host, rank, tier)
            if sample is None:
                host.parked.add(me)
                yield None
                continue
            done = self.now + self.latency(0) + self._store_seconds(rank, sample)
            own = self.own(rank, sample)
            assert own is not None
            work = self.sizes[sample] * self.fill_byte_write(tier)
            own.ready = done + work
            self.store_bytes[rank] += self.sizes[sample]
            self.fill_reads[rank] += 1
            if self.latency(0):
                yield self.now + self.latency(0)
            done = self.now + self._store_seconds(rank, sample)
            own.ready = done + work
            yield from self._read(rank, None, done)
            yield done + work

    def _next_to_fill(self, host: _Host, rank: int, tier: int) -> int | None:
        for column in (tier, 0):
            while host.lists[column]:
                sample = host.lists[column][0]
                own = self.own(rank, sample)
                assert own is not None
                first = next((place for place, read in enumerate(self.strings[rank]) if read == sample), -1)
                if column and host.ahead <= first < host.ahead + len(host.stagers):
                    host.lists[column].pop(0)  # staging will take it in a moment, and the tier with it
                    continue
                is_over = self.loading.drops and self.last_read(rank, sample) < host.ahead
                if own.ready < inf or is_over:
                    if own.ready == inf and column:
                        host.room[tier] += self.sizes[sample]
                    host.lists[column].pop(0)
                    continue
                if column == 0:
                    while self.sizes[sample] > host.room[tier] and host.droppable:
                        gone = self.own(rank, host.droppable.pop(0))
                        assert gone is not None
                        host.room[gone.tier] += self._size_of(gone)
                        gone.ready, gone.tier = inf, 0
                    if self.sizes[sample] > host.room[tier]:
                        return None
                    host.room[tier] -= self.sizes[sample]
                    own.tier = tier
                return host.lists[column].pop(0)
        return None

    def _size_of(self, wanted: _Copy) -> int:
        return next(
            self.sizes[sample]
            for sample, copies in self.copies.items()
            if any(copy is wanted for copy in copies)
        )


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


def _assumptions(random: Random, time: str) -> Assumptions:
    hints = get_type_hints(Assumptions)
    while True:
        values = {name: random.choice(get_args(hint)) for name, hint in hints.items()}
        try:
            return Assumptions(**{**values, "time": time})
        except ConfigError:  # values that do not go together
            continue


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
    tiers = [-1, *range(1, len(storage))]
    hits = [np.array([random.choice(tiers) for _ in string], np.int8) for string in job.strings]
    drops = random.random() < 0.5
    return Loading(
        fills,
        stages=random.random() < 0.8,
        stages_from_store=random.random() < 0.5,
        stages_from_peers=random.random() < 0.5,
        hits=random.choice([None, hits]),
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


def _assert_equal(model: _OneAfterTheOther | _AllAtOnce, result: LoadingResult) -> None:
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


@settings(max_examples=300)
@given(_SEEDS)
def test_ranks_that_share_one_time_are_as_in_the_plain_event_simulation(seed: int) -> None:
    job, loading, assumed = _run(seed, "together")
    model = _AllAtOnce(job, loading, assumed)
    model.run()

    _assert_equal(model, simulate_job(job, Given(loading), assumed))
    for host in model.hosts:
        assert host.most_bytes <= max(job.machine.storage[0].capacity_bytes, int(job.sizes_bytes.max()))


@settings(max_examples=150)
@given(_SEEDS, st.sampled_from(["together", "rank-by-rank"]))
def test_every_read_is_consumed_once_in_order_and_no_run_is_shorter_than_its_bound(
    seed: int, time: str
) -> None:
    job, loading, assumed = _run(seed, time)
    strings = loading.strings or job.strings

    result = simulate_job(job, Given(loading), assumed, per_sample=True)

    assert result.reads.sum(axis=1).tolist() == [string.size for string in strings]
    assert (np.diff(result.step_end_seconds) >= 0).all()
    assert result.run_seconds == result.step_end_seconds[-1] >= result.initial_stall_seconds
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
def test_bytes_of_the_store_are_those_of_its_reads_and_fills(seed: int) -> None:
    job, loading, assumed = _run(seed, "together")
    alike = Job(job.plan, np.full(job.plan.samples, int(job.sizes_bytes.min())), job.machine)

    result = simulate_job(alike, Given(loading), assumed)

    counts = dict(zip(ORIGINS, result.reads.T, strict=True))
    reads = counts["staged from the store"] + counts["store"] + result.fill_reads
    assert result.store_bytes.tolist() == (reads * alike.sizes_bytes[0]).tolist()


@pytest.mark.parametrize("assumed", [PHYSICAL, THESIS], ids=["physical", "thesis"])
def test_the_same_run_twice_is_the_same(assumed: Assumptions) -> None:
    job, _, _ = _run(3, assumed.time)
    job = Job(job.plan, job.sizes_bytes, _machine(Random(5), job.ranks, is_exact=True), 1)

    first, second = (simulate_job(job, policy_named("frequency", assumed), assumed) for _ in range(2))

    assert first.step_end_seconds.tolist() == second.step_end_seconds.tolist()
    assert first.reads.tolist() == second.reads.tolist()
