"""A slow scheduler that can be checked by reading it: what `penstock.policy.Scheduler` must answer, rule by rule.

Written from the rules in the docstrings of `penstock.policy.scheduler` and `penstock.policy.decisions`. Lists and
dictionaries, every number computed anew whenever it is asked for; no entry and no slot has a number here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.policy import OwnRead, Placement, StagingLimits
from penstock.policy.decisions import (
    FIRST_PROBES,
    GROUP_SECONDS,
    HAND_OVER_SECONDS,
    LOAD_SECONDS,
    MEMORY,
    OWN_SLOWER,
    SLOWER,
    SURE_SHARE,
    TRIED_AGAIN_SECONDS,
    TRIED_LOADS,
    UNDECODED,
    UNREAD,
    WORTH_DOUBLING,
)
from penstock.trace.schema import SOURCE, STAGING


@dataclass(eq=False)
class Place:
    """One sample of a staged batch. origin, fetch: once a Load may take it; fetch: None where nobody else shares it."""

    batch: Batch
    row: int
    sample: int
    origin: int | None = None
    fetch: Fetch | None = None
    is_over: bool = False
    is_failed: bool = False


@dataclass(eq=False)
class Batch:
    """A batch that has a slot. work: places that a Load may take, in the order in which they could first be taken."""

    number: int
    epoch: int
    step: int
    samples: list[int]
    places: list[Place] = field(default_factory=list)
    work: list[Place] = field(default_factory=list)
    running: int = 0
    is_given_up: bool = False


@dataclass(eq=False)
class Fetch:
    """A sample on its way, or whose bytes wait for decode workers.

    rest: the tier that is to keep it, or STAGING. state: "queued", "moving", "with worker" or "here".
    waiting: places that get the bytes once they are here. holders: those that have yet to be decoded from them.
    is_fill: no batch wanted it when it began. entry: the number that the tested scheduler gave it.
    """

    sample: int
    origin: int
    rest: int
    state: str
    is_fill: bool = False
    waiting: list[Place] = field(default_factory=list)
    holders: list[Place] = field(default_factory=list)
    entry: int | None = None


@dataclass(eq=False)
class ExpectedMove:
    """epochs: one of these, where no batch asked for it."""

    fetches: list[Fetch]
    batch: int
    epochs: set[int]
    step: int


@dataclass(eq=False)
class ExpectedLoad:
    batch: Batch
    places: list[Place]


@dataclass(eq=False)
class Expected:
    """What must be answered to one event. over: fetches whose bytes nobody wants any more."""

    over: list[Fetch] = field(default_factory=list)
    ready: list[Batch] = field(default_factory=list)
    staged: list[tuple[int, int, float]] = field(default_factory=list)
    moves: list[ExpectedMove] = field(default_factory=list)
    loads: list[ExpectedLoad] = field(default_factory=list)


class ObviousScheduler:
    """Takes the events of a `Scheduler`, and answers with what that one must say."""

    def __init__(
        self,
        plan: AccessPlan,
        rank: int,
        sizes_bytes: NDArray[np.int64],
        placement: Placement,
        machine: Machine,
        limits: StagingLimits,
    ) -> None:
        self.plan, self.rank, self.machine, self.limits = plan, rank, machine, limits
        self.sizes: list[int] = sizes_bytes.tolist()
        self.mean_bytes = max(float(sizes_bytes.mean()), 1.0)
        self.largest_batch = plan.max_local_batch(rank)
        #: What each tier keeps, in the order in which it is to be filled, and of that: what it has.
        self.to_keep = {tier: placement.samples_in(tier).tolist() for tier in range(1, len(machine.storage))}
        self.tier_of = {sample: tier for tier, samples in self.to_keep.items() for sample in samples}
        self.present: set[int] = set()
        #: Of `to_keep`, how far background fills have looked.
        self.looked = dict.fromkeys(self.to_keep, 0)

        origins = [SOURCE, *self.to_keep]
        self.corrections: dict[int, float] = {}
        self.least_corrections: dict[int, float] = {}
        self.worker_seconds = {origin: self._first_worker_seconds(origin) for origin in origins}
        self.probes = set(origins)
        #: Workers' own reads of the source that readers wait for at most before they begin: where it may be quick.
        guess_seconds = machine.source.latency_seconds + self.mean_bytes / self._rate(SOURCE, 1)
        self.first_probes = FIRST_PROBES if guess_seconds < 2 * TRIED_AGAIN_SECONDS else 0

        self.slots, self.free_slots = limits.slots, limits.slots
        self.steps = [
            (epoch, step)
            for epoch in range(plan.epochs)
            for step in range(plan.steps(epoch))
            if plan.local_batch_size(rank, epoch, step)
        ]
        self.staged = 0
        self.staged_epoch = 0
        self.due_seconds = 0.0
        self.batches: list[Batch] = []
        self.fetches: list[Fetch] = []
        self.moves: list[ExpectedMove] = []
        self.loads: list[ExpectedLoad] = []
        #: Of a Load, for each of its samples: the fastest of late.
        self.load_seconds: float | None = None
        #: Loads of how many samples are tried, what each sample took in them, and in those of half the size.
        self.tried = 1
        self.trials: list[float] | None = []
        self.half_seconds = math.inf
        self.answer = Expected()

    # Events

    def start(self, now: float) -> Expected:
        self.due_seconds = now
        return self._go_on(now)

    def slot_freed(self, now: float) -> Expected:
        self.free_slots += 1
        return self._go_on(now)

    def slots_added(self, slots: int, now: float) -> Expected:
        self.free_slots += max(0, slots - self.slots)
        self.slots = max(self.slots, slots)
        return self._go_on(now)

    def moved(self, move: ExpectedMove, seconds: float, failed: list[int], now: float) -> Expected:
        if not failed:
            self._observe_move(move, seconds)
        self.moves.remove(move)
        for index, fetch in enumerate(move.fetches):
            if index in failed:
                self._fetch_failed(fetch)
                continue
            if fetch.rest != STAGING:
                self.present.add(fetch.sample)
            fetch.state = "here"
            places, fetch.waiting = fetch.waiting, []
            for place in places:
                fetch.holders.append(place)
                self._offer(place, STAGING, fetch)
            self._end_if_unwanted(fetch)
        return self._go_on(now)

    def loaded(
        self,
        load: ExpectedLoad,
        failed: dict[int, int],
        own_reads: list[OwnRead],
        now: float,
        wall_seconds: float,
    ) -> Expected:
        self.loads.remove(load)
        self._observe_load(len(load.places), wall_seconds)
        for read in own_reads:
            self._observe_worker(read)
        batch = load.batch
        batch.running -= len(load.places)
        for index, place in enumerate(load.places):
            mark, fetch, origin = failed.get(index), place.fetch, place.origin
            place.fetch = None
            if mark == UNREAD and origin == SOURCE:
                self.first_probes = 0
            if fetch is not None and origin == STAGING:
                fetch.holders.remove(place)
                self._end_if_unwanted(fetch)
            elif fetch is not None and mark == UNREAD:
                self._fetch_failed(fetch)
            elif fetch is not None:
                self._is_over(fetch)
                self.present.add(fetch.sample)
                for other in fetch.waiting:
                    self._offer(other, fetch.rest, None)
            if mark == UNREAD and origin not in (SOURCE, STAGING):
                self._lose(place.sample)
                if not batch.is_given_up:
                    self._route(place, is_second_choice=True)
                    continue
            self._place_over(place, is_failed=mark in (UNREAD, UNDECODED))
        self._end_if_complete(batch)
        return self._go_on(now)

    def seek(self, epoch: int, step: int, now: float) -> Expected:
        for batch in list(self.batches):
            if (batch.epoch, batch.step) < (epoch, step) and not batch.is_given_up:
                self._give_up(batch)
        if self.staged < len(self.steps) and self.steps[self.staged] < (epoch, step):
            self.due_seconds = now
            while self.staged < len(self.steps) and self.steps[self.staged] < (epoch, step):
                del self.steps[self.staged]
        return self._go_on(now)

    # What follows from each

    def _go_on(self, now: float) -> Expected:
        while self.free_slots and self.staged < len(self.steps):
            self._stage(now)
        while len(self.moves) < self.limits.readers and (fetches := self._next_fetches()):
            first = fetches[0]
            if first.is_fill:
                # Of the batch that was staged last, or of the next one; the last epoch after all of them.
                known = [*self.steps, (self.plan.epochs - 1, 0)]
                epochs = {epoch for epoch, _ in known[max(0, self.staged - 1) : self.staged + 1]}
                move = ExpectedMove(fetches, -1, epochs, -1)
            else:
                batch = first.waiting[0].batch
                move = ExpectedMove(fetches, batch.number, {batch.epoch}, batch.step)
            for fetch in fetches:
                fetch.state = "moving"
            self.moves.append(move)
            self.answer.moves.append(move)
        while len(self.loads) < self.limits.decoders and (load := self._next_load()):
            self.loads.append(load)
            self.answer.loads.append(load)
        answer, self.answer = self.answer, Expected()
        return answer

    def _stage(self, now: float) -> None:
        epoch, step = self.steps[self.staged]
        samples = self.plan.local_batch(self.rank, epoch, step).tolist()
        batch = Batch(self.staged, epoch, step, samples)
        self.answer.staged.append((epoch, step, self.due_seconds))
        self.due_seconds = now
        self.staged += 1
        self.free_slots -= 1
        self.batches.append(batch)
        if epoch != self.staged_epoch:
            self.staged_epoch = epoch
            self.probes = set(self.worker_seconds)
        batch.places = [Place(batch, row, sample) for row, sample in enumerate(samples)]
        for place in batch.places:
            self._route(place, is_second_choice=False)

    def _route(self, place: Place, *, is_second_choice: bool) -> None:
        sample = place.sample
        for fetch in self.fetches:
            if fetch.sample == sample:
                if fetch.state == "here":
                    fetch.holders.append(place)
                    self._offer(place, STAGING, fetch)
                else:
                    fetch.waiting.append(place)
                return
        origin, tier = SOURCE, self.tier_of.get(sample)
        is_present = tier is not None and sample in self.present
        if tier is not None and is_present:
            nbytes = self.sizes[sample]
            is_sooner = self._expected_seconds(tier, nbytes) <= self._expected_seconds(SOURCE, nbytes)
            is_faster = self._busy_seconds(tier, nbytes) <= self._busy_seconds(SOURCE, nbytes)
            if is_sooner or is_faster or self._is_read_by_workers(tier):
                origin = tier
        by_worker = is_second_choice or origin in self.probes or self._is_read_by_workers(origin)
        self.probes.discard(origin)
        fills_tier = tier is not None and not is_present
        if by_worker and not fills_tier:
            self._offer(place, origin, None)
            return
        rest = tier if tier is not None and fills_tier else STAGING
        fetch = Fetch(sample, origin, rest, "with worker" if by_worker else "queued")
        self.fetches.append(fetch)
        if by_worker:
            self._offer(place, origin, fetch)
        else:
            fetch.waiting.append(place)

    def _next_fetches(self) -> list[Fetch]:
        """The samples of the next move: what staged batches need, by due time; only then a fill.

        What is read together from the source is for one epoch.
        """
        if self.first_probes:
            return []
        queue = [fetch for fetch in self._queue() if self._in_flight(fetch.origin) < self._most(fetch.origin)]
        if not queue:
            return self._next_fill()
        origin = queue[0].origin
        idle, left = self.limits.readers - len(self.moves), len(self._queue())
        if self._most(origin) < math.inf:
            idle = min(idle, int(self._most(origin)) - self._in_flight(origin))
            left = sum(fetch.origin == origin for fetch in queue)
        most = min(self._group_size(origin, queue[0].sample), math.ceil(left / idle))
        chosen: list[Fetch] = []
        for fetch in queue[:most]:
            is_of_epoch = fetch.waiting[0].batch.epoch == queue[0].waiting[0].batch.epoch
            if fetch.origin != origin or not self._fits([*chosen, fetch]):
                break
            if origin == SOURCE and not is_of_epoch:
                break
            chosen.append(fetch)
        return chosen

    def _queue(self) -> list[Fetch]:
        """What staged batches need of readers, by due time."""
        return sorted(
            (fetch for fetch in self.fetches if fetch.state == "queued"),
            key=lambda fetch: (fetch.waiting[0].batch.number, fetch.waiting[0].row),
        )

    def _next_fill(self) -> list[Fetch]:
        limit = max(1, self.limits.readers // 2)
        fills = [move for move in self.moves if move.fetches[0].is_fill]
        if len(fills) >= limit or self._is_read_by_workers(SOURCE):
            return []
        of_tier = {tier: sum(move.fetches[0].rest == tier for move in fills) for tier in self.to_keep}
        unfinished = [
            tier
            for tier, samples in self.to_keep.items()
            if of_tier[tier] or self.looked[tier] < len(samples)
        ]
        for tier in unfinished:
            if of_tier[tier] >= max(1, limit // len(unfinished)):
                continue
            chosen: list[Fetch] = []
            while self.looked[tier] < len(self.to_keep[tier]):
                sample = self.to_keep[tier][self.looked[tier]]
                if chosen and len(chosen) >= self._group_size(SOURCE, chosen[0].sample):
                    break
                is_pending = any(fetch.sample == sample for fetch in self.fetches)
                if sample not in self.present and not is_pending:
                    fill = Fetch(sample, SOURCE, tier, "moving", is_fill=True)
                    if not self._fits([*chosen, fill]):
                        break
                    chosen.append(fill)
                self.looked[tier] += 1
            if chosen:
                self.fetches.extend(chosen)
                return chosen
        return []

    def _next_load(self) -> ExpectedLoad | None:
        batch = next((batch for batch in self.batches if batch.work), None)
        if batch is None:
            return None
        all_work = sum(len(batch.work) for batch in self.batches)
        worth = least = 1
        if self.load_seconds is not None:
            worth = max(self.tried, int(LOAD_SECONDS / self.load_seconds))
            if self.slots > self.limits.decoders:
                least = int(self.limits.least_load_seconds / self.load_seconds)
        most = min(worth, max(least, math.ceil(all_work / self.limits.decoders)))
        if len(batch.work) - most < most / 2:
            most = len(batch.work)
        taken: list[Place] = []
        for place in batch.work[:most]:
            own = [each for each in [*taken, place] if each.origin == SOURCE]
            own_bytes = sum(self.sizes[each.sample] for each in own)
            if taken and place.origin == SOURCE and own_bytes > self.limits.own_bytes:
                break
            taken.append(place)
        del batch.work[: len(taken)]
        batch.running += len(taken)
        return ExpectedLoad(batch, taken)

    def _give_up(self, batch: Batch) -> None:
        batch.is_given_up = True
        self.first_probes = 0
        batch.work.clear()
        loading = [place for load in self.loads for place in load.places]
        left = [place for place in batch.places if not place.is_over and place not in loading]
        for place in left:
            place.is_over = True
            for fetch in [fetch for fetch in self.fetches if place in fetch.waiting]:
                fetch.waiting.remove(place)
                if fetch.state == "queued" and not fetch.waiting:
                    self._is_over(fetch)
        for place in left:
            if place.fetch is None:
                continue
            if place.origin == STAGING:
                place.fetch.holders.remove(place)
                self._end_if_unwanted(place.fetch)
            elif place.fetch.waiting:
                # Another worker reads it.
                self._offer(place.fetch.waiting.pop(0), SOURCE, place.fetch)
            else:
                self._is_over(place.fetch)
        self._end_if_complete(batch)

    def _offer(self, place: Place, origin: int, fetch: Fetch | None) -> None:
        place.origin, place.fetch = origin, fetch
        place.batch.work.append(place)

    def _fetch_failed(self, fetch: Fetch) -> None:
        self._is_over(fetch)
        places, fetch.waiting = fetch.waiting, []
        if fetch.origin == SOURCE:
            for place in places:
                self._place_over(place, is_failed=True)
                self._end_if_complete(place.batch)
            return
        self._lose(fetch.sample)
        for place in places:
            self._route(place, is_second_choice=True)

    def _lose(self, sample: int) -> None:
        """Its tier could not give it: who reads it next gives it to the tier again."""
        self.present.discard(sample)

    def _end_if_unwanted(self, fetch: Fetch) -> None:
        if fetch.state == "here" and not fetch.holders:
            self._is_over(fetch)

    def _is_over(self, fetch: Fetch) -> None:
        self.fetches.remove(fetch)
        self.answer.over.append(fetch)

    def _place_over(self, place: Place, *, is_failed: bool) -> None:
        place.is_over, place.is_failed = True, is_failed

    def _end_if_complete(self, batch: Batch) -> None:
        if batch in self.batches and all(place.is_over for place in batch.places):
            self.batches.remove(batch)
            if batch.is_given_up:
                self.free_slots += 1
            else:
                self.answer.ready.append(batch)

    # What it costs

    def _is_read_by_workers(self, origin: int) -> bool:
        return not self.limits.readers or self.worker_seconds[origin] < HAND_OVER_SECONDS

    def _first_worker_seconds(self, origin: int) -> float:
        if origin == SOURCE:
            return math.inf
        tier = self.machine.storage[origin]
        wire = 0.0 if tier.backend == "memory" else self.mean_bytes / tier.read.at(1)
        return tier.latency_seconds + wire

    def _latency_seconds(self, origin: int) -> float:
        if origin == SOURCE:
            return self.machine.source.latency_seconds
        return self.machine.storage[origin].latency_seconds

    def _rate(self, origin: int, reads: int) -> float:
        """Bytes per second of so many reads from there together."""
        if origin != SOURCE:
            return self.machine.storage[origin].read.at(reads)
        bare = self.machine.source_rate(self.machine.ranks, reads) * reads
        busy = self.machine.ranks * self.machine.source.request_seconds
        return self.mean_bytes / (self.mean_bytes / bare + busy)

    def _in_flight(self, origin: int) -> int:
        return sum(move.fetches[0].origin == origin for move in self.moves)

    def _most(self, origin: int) -> float:
        """How many moves from there there may be at once, beside what all readers do."""
        tier = None if origin == SOURCE else self.machine.storage[origin]
        return math.inf if tier is None or tier.is_memory else tier.threads

    def _expected_seconds(self, origin: int, nbytes: int) -> float:
        if self._is_read_by_workers(origin):
            return self.worker_seconds[origin]
        before = sum(
            self.sizes[fetch.sample]
            for fetch in self.fetches
            if fetch.origin == origin and fetch.state in ("queued", "moving")
        )
        reads = int(min(self._in_flight(origin) + 1, self.limits.readers, self._most(origin)))
        wire = (before + nbytes) / self._rate(origin, reads)
        return (self._latency_seconds(origin) + wire) * self.corrections.get(origin, 1.0)

    def _busy_seconds(self, origin: int, nbytes: int) -> float:
        """Of one of many reads, by all readers that may, whatever is queued; of a tier by the fastest reads of late."""
        if self._is_read_by_workers(origin):
            return self.worker_seconds[origin]
        readers = int(min(self.limits.readers, self._most(origin)))
        each = self._latency_seconds(origin) / readers + nbytes / self._rate(origin, readers)
        return each * (self.corrections if origin == SOURCE else self.least_corrections).get(origin, 1.0)

    def _group_size(self, origin: int, sample: int) -> int:
        """As many as a reader reads in GROUP_SECONDS."""
        reads = max(1, self._in_flight(origin))
        wire = self.sizes[sample] * reads / self._rate(origin, reads)
        seconds = (self._latency_seconds(origin) + wire) * self.corrections.get(origin, 1.0)
        return (
            self.largest_batch
            if not seconds
            else max(1, min(self.largest_batch, int(GROUP_SECONDS / seconds)))
        )

    def _fits(self, chosen: list[Fetch]) -> bool:
        """Whether these may be read too, beside what readers read and what waits in no tier to be decoded."""
        nbytes = self.passing_bytes() + sum(self.sizes[fetch.sample] for fetch in chosen)
        is_only_one = len(chosen) == 1 and not self.passing_bytes()
        return is_only_one or nbytes <= self.limits.undecoded_bytes

    def passing_bytes(self) -> int:
        return sum(
            self.sizes[fetch.sample]
            for fetch in self.fetches
            if fetch.state == "moving" or (fetch.state == "here" and not self._is_in_memory(fetch.rest))
        )

    def _is_in_memory(self, rest: int) -> bool:
        """Whether what rests there needs no other memory until it is loaded."""
        return rest != STAGING and self.machine.storage[rest].is_memory

    def _observe_move(self, move: ExpectedMove, seconds: float) -> None:
        origin = move.fetches[0].origin
        reads = self._in_flight(origin)
        rate, latency = self._rate(origin, reads), self._latency_seconds(origin)
        modelled = sum(latency + self.sizes[fetch.sample] * reads / rate for fetch in move.fetches)
        if not modelled:
            return
        known = self.corrections.get(origin)
        ratio = seconds / modelled
        least = min(ratio, OWN_SLOWER * self.least_corrections.get(origin, 1.0))
        self.least_corrections[origin] = max(1.0, least)
        self.corrections[origin] = ratio if known is None else known + (ratio - known) / MEMORY

    def _observe_worker(self, read: OwnRead) -> None:
        """The shortest wait of late. What is queued goes to the workers when it turns out quick, and back."""
        origin, each = read.origin, read.seconds / read.reads
        was_quick = self._is_read_by_workers(origin)
        slower = OWN_SLOWER * self.worker_seconds[origin] + HAND_OVER_SECONDS / MEMORY
        self.worker_seconds[origin] = min(each, max(slower, SURE_SHARE * read.seconds))
        is_quick = self._is_read_by_workers(origin)
        if HAND_OVER_SECONDS <= each < TRIED_AGAIN_SECONDS:
            self.probes.add(origin)
        if is_quick and not was_quick:
            self._hand_to_workers([fetch for fetch in self._queue() if fetch.origin == origin])
        elif was_quick and not is_quick:
            self._hand_to_readers(origin)
        if origin == SOURCE and self.first_probes:
            self.first_probes -= 1
            next_one = [fetch for fetch in self._queue() if fetch.origin == SOURCE][:1]
            if is_quick or self.worker_seconds[SOURCE] >= TRIED_AGAIN_SECONDS or not next_one:
                self.first_probes = 0
            else:
                self._hand_to_workers(next_one)

    def _hand_to_workers(self, fetches: list[Fetch]) -> None:
        for fetch in fetches:
            if fetch.rest == STAGING:
                self._is_over(fetch)
                for place in fetch.waiting:
                    self._offer(place, fetch.origin, None)
            else:
                fetch.state = "with worker"
                self._offer(fetch.waiting.pop(0), fetch.origin, fetch)

    def _hand_to_readers(self, origin: int) -> None:
        """What no worker has begun to read by itself."""
        for batch in self.batches:
            work, batch.work = batch.work, []
            for place in work:
                if place.origin != origin:
                    batch.work.append(place)
                elif place.fetch is None:
                    self._route(place, is_second_choice=False)
                else:
                    fetch, place.fetch = place.fetch, None
                    fetch.state = "queued"
                    fetch.waiting.insert(0, place)

    def _observe_load(self, samples: int, seconds: float) -> None:
        each = seconds / samples
        usual = self.load_seconds
        self.load_seconds = each if usual is None else min(each, SLOWER * usual)
        if self.trials is None or samples != self.tried:
            return
        self.trials.append(each)
        if len(self.trials) < TRIED_LOADS:
            return
        median = sorted(self.trials)[TRIED_LOADS // 2]
        if median <= WORTH_DOUBLING * self.half_seconds:
            self.half_seconds, self.trials = median, []
            self.tried *= 2
        else:
            self.trials = None
            self.tried //= 2
