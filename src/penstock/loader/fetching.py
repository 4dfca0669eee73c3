"""Bytes of stored samples: read from their source, or taken from the tier that keeps them."""

from __future__ import annotations

import math
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError, printable
from penstock.flow.pieces import Pieces
from penstock.flow.work import Failed, Request
from penstock.loader.jobs import JobsOfHost
from penstock.loader.ranks_memory import RanksMemory
from penstock.loader.reused import Reused
from penstock.policy import AllExtents, merge_reads
from penstock.policy.decisions import GROUP_SECONDS, peer_of
from penstock.policy.merge import MergedReads, Price, no_dearer
from penstock.policy.tried_again import is_due
from penstock.store import MemoryTier, PackedFiles, Source, prepare_group, read_all_merged, read_group
from penstock.store.blocks import BlockTier
from penstock.store.direct import LEAST_MAPPED_BYTES, new_buffer
from penstock.store.group import Bytes, Ids, was_mapped
from penstock.store.mixing import sources_in
from penstock.store.ranged import is_decoded
from penstock.store.remote import objects_in
from penstock.store.write_behind import WriteBehind
from penstock.trace.schema import SOURCE, STAGING

#: No disk answers so fast. A read from memory takes this long where others want the processors, and there finding out
#: which samples are read together takes longer than reading them.
_CHEAP_SECONDS = 20e-6
#: By so much each group of reads lets the least time that one took grow.
_FORGETTING = 1.1
_BYTE = np.dtype(np.uint8)


@dataclass
class Near:
    """What tells which samples are read together.

    extents: where all of them lie. price: of reads, as the machine has it. bytes_per_second: of a read, for its bytes.
    request_seconds: that the read of a sample took at least, of late; it corrects what the machine says.
    groups: how many had merged reads. Any thread may set these two.
    """

    extents: AllExtents
    price: Price
    bytes_per_second: float
    request_seconds: float = math.inf
    groups: int = 0

    def __post_init__(self) -> None:
        self._is_wrong = bool((self.extents.units < 0).any())

    def merged(self, ids: Ids) -> MergedReads | None:
        """Return the reads of some samples; None where each is one, as one alone is, or requests take next to nothing.

        Samples that the source places wrongly are in none of the reads, so that they are not read unnoticed.
        """
        if (ids.size == 1 or self.request_seconds < _CHEAP_SECONDS) and not self._is_wrong:
            return None
        price = no_dearer(self.price, self.request_seconds, self.bytes_per_second)
        reads = merge_reads(self.extents.of(ids), price)
        return None if len(reads) == ids.size else reads

    def count_to_try(self) -> int:
        """Return how many samples of the next group of merged reads to read one by one, too: a millisecond's.

        What a merged read takes says little of a request, and a store may have become so fast that none pays.
        """
        number, self.groups = self.groups, self.groups + 1
        if number == 0 or not is_due(number):
            return 0
        return max(1, int(GROUP_SECONDS / self.request_seconds))

    def observe(self, reads: int, seconds: float) -> None:
        """Take note of what reads of one sample each took. A store that gets slower is found out after some."""
        self.request_seconds = min(_FORGETTING * self.request_seconds, seconds / reads)


class SourceFetcher:
    """A `Fetcher` of bytes. Tiers are written by whoever reads a sample that they keep.

    tiers: by number. near: samples that lie near each other are read together, where it is known where they lie.
    peers: what other ranks keep for this one, whose own tiers are so many.
    jobs: what other jobs of the host have read, and get of this one.
    copied: by the number of a tier that is no memory, bool[samples]: what goes there, too, when it is read.
    """

    def __init__(
        self,
        source: Source,
        tiers: Mapping[int, MemoryTier | BlockTier | WriteBehind],
        near: Near | None = None,
        copied: Mapping[int, NDArray[np.bool_]] | None = None,
        peers: RanksMemory | None = None,
        jobs: JobsOfHost | None = None,
    ) -> None:
        self._source = source
        found = map(objects_in, sources_in(source))
        self._objects = [objects for objects in found if objects is not None]
        self._tiers = {number: tier for number, tier in tiers.items() if isinstance(tier, MemoryTier)}
        self._slow = {number: tier for number, tier in tiers.items() if isinstance(tier, WriteBehind)}
        self._copied_to = copied or {}
        self._peers, self._tier_count = peers, len(tiers)
        # What is decoded as a whole is brought once for a group, by the source itself.
        self._near, self._jobs = None if is_decoded(source) else near, jobs
        #: Whether samples were evicted, so that what memory has free may be in pieces.
        self._evicts = False
        self._sizes_bytes = sizes = source.sizes_bytes
        #: Of each sample, where all have one size; and where such samples begin that follow each other, of as many as
        #: were asked for.
        self._each_bytes = int(sizes[0]) if sizes.size and sizes.min() == sizes.max() else None
        self._even_begins = np.zeros(1, np.int64)
        self._threads, self._reused = threading.local(), Reused(large_pages=True)

    @property
    def place(self) -> str:
        waits = next(filter(None, (objects.waits() for objects in self._objects)), "")
        return f"{self._source!r}, which {waits}" if waits else repr(self._source)

    @property
    def requests(self) -> Callable[[], int] | None:
        """What returns how many requests may be under way now at the stores of the source; None without any."""
        return self._requests if self._objects else None

    def _requests(self) -> int:
        return sum(objects.limit for objects in self._objects)

    def take_lost(self) -> Sequence[tuple[float, float]]:
        return [lost for objects in self._objects for lost in objects.take_lost()]

    def ended_tiers(self) -> Sequence[int]:
        return [number for number, behind in self._slow.items() if not behind.tier.is_written]

    def describe(self, sample: int) -> str:
        return self._source.describe(sample)

    def prepare(self) -> None:
        """Load the code that reads, in a thread that is going to."""
        prepare_group(self._source)

    def fetch(self, request: Request) -> list[Any] | Pieces:
        """Bring uint8[...] of each sample, all from one piece of memory where nothing failed; see `Fetcher`."""
        ids, rests, at = request.ids, request.rests, request.at
        at(int(ids[0]))
        if request.origin in self._slow:
            data = self._from_slow(ids, request)
            self._keep(request, data)
            return data
        if request.origin > self._tier_count and self._peers is not None:
            data = self._from_peer(ids, self._peers, peer_of(self._tier_count, request.origin))
            self._keep(request, data)
            return data
        if request.origin != SOURCE:
            return self._from_tier(ids, self._tiers[request.origin])
        reads = order = None
        if self._near is not None:
            reads = self._near.merged(ids)
            if reads is not None:
                # In memory samples follow each other as in the source, so that a read needs no other.
                order = np.concatenate((reads.which, np.setdiff1d(np.arange(ids.size), reads.which)))
                if (order == np.arange(ids.size)).all():
                    order = None
                else:
                    ids = ids[order]
        # One read may bring samples for a tier and others: they are read together, and those copied that are kept.
        tier = self._tiers.get(rests[0]) if rests and rests.count(rests[0]) == len(rests) else None
        begins = None if tier is None else tier.take_space(ids, self._sizes_bytes[ids])
        if tier is None or begins is None:
            tier = None
            into, begins = self._space_for(ids, request, may_be_there=order is None)
        else:
            into = tier.array
        if self._near is None or reads is None:
            failed = self._read_each(ids, into, begins, request)
        else:
            # Not those that are in none of the reads: the source places them wrongly.
            if count := min(reads.which.size, self._near.count_to_try()):
                failed = self._read_each(ids[:count], into, begins[: count + 1], request)
            if count < ids.size:
                failed = read_all_merged(self._source, reads, ids, into, begins, at)
        if not failed and order is None and tier is None and not self._copied_to and not request.is_kept:
            is_there = reads is None and self._threads.was_resident
            return Pieces(into, begins, each_bytes=self._each_bytes, was_resident=is_there)
        found = self._pieces(ids, into, begins.tolist(), failed)
        if tier is not None:
            wrong = np.array([index for index, _ in failed], np.int64)
            tier.drop(ids[wrong])
            tier.keep(np.delete(ids, wrong))
        data = found
        if order is not None:
            data = found.copy()
            for index, each in zip(order.tolist(), found, strict=True):
                data[index] = each
        if tier is None:
            self._keep(request, data)
        for number, is_copied in self._copied_to.items():
            for sample, each, rest in zip(request.samples, data, rests, strict=False):
                if rest in self._tiers and is_copied[sample] and not isinstance(each, Failed):
                    self._slow[number].put(sample, each, stays=True)
        return data

    def _read_each(
        self, ids: Ids, into: Bytes, begins: Ids, request: Request
    ) -> Sequence[tuple[int, Exception]]:
        """Read samples that are not merged; return those that failed."""
        self._threads.was_resident = False
        if self._jobs is not None:
            return self._read_with_jobs(self._jobs, ids, into, begins, request)
        began, faults = time.perf_counter(), _major_faults()
        failed = read_group(self._source, ids, into, begins, request.at)
        self._threads.was_resident = was_mapped() and _major_faults() == faults
        if self._near is not None and not failed:
            self._near.observe(ids.size, time.perf_counter() - began)
        return failed

    def _read_with_jobs(
        self, jobs: JobsOfHost, ids: Ids, into: Bytes, begins: Ids, request: Request
    ) -> Sequence[tuple[int, Exception]]:
        """Read the samples that no job has in memory; let the request know which of them one had."""

        def read(some: Ids, into: Bytes, begins: Ids) -> Sequence[tuple[int, Exception]]:
            return read_group(self._source, some, into, begins, request.at)

        return jobs.memory.read_group(ids, into, begins, read, shared=request.shared)

    def _keep(self, request: Request, data: list[Any]) -> None:
        """Have each sample kept where it shall rest."""
        if not request.is_kept:
            return
        for index, (sample, rest) in enumerate(zip(request.samples, request.rests, strict=False)):
            if rest == STAGING or isinstance(data[index], Failed):
                continue
            if rest in self._slow:
                self._slow[rest].put(sample, data[index])
            else:
                data[index] = self._copied(sample, data[index], self._tiers[rest])

    def read(self, samples: list[int]) -> Sequence[Any]:
        """Return uint8[...] of each sample as the source has it, or `Failed`; until this thread's next call."""
        return self.fetch(Request(np.array(samples), _pass_by))

    def close(self) -> None:
        for disk in self._slow.values():  # they may still write what memory keeps
            disk.close()
        for tier in self._tiers.values():
            tier.close()
        if self._peers is not None:
            self._peers.close()
        if self._jobs is not None:
            self._jobs.close()
        for source in sources_in(self._source):
            if isinstance(source, PackedFiles):
                source.close()
            elif (objects := objects_in(source)) is not None:
                objects.close()
        self._reused.close()

    def evict(self, ids: Ids) -> None:
        self._evicts = True
        for memory in self._tiers.values():
            memory.evict(ids)
        for disk in self._slow.values():
            disk.evict(ids)

    def end_waits(self) -> None:
        if self._peers is not None:
            self._peers.end_waits()
        for objects in self._objects:
            objects.end_waits()

    def _from_slow(self, ids: Ids, request: Request) -> list[Any]:
        tier = self._slow[request.origin]
        if request.into is not None:
            into, places = self._space_for(ids, request)
            return self._pieces(ids, into, places.tolist(), tier.read_group(ids, into, places))
        memory_for = partial(self._memory_for, request=request, is_alone=ids.size == 1)
        return self._pieces(ids, *tier.read(ids, self._sizes_bytes[ids], memory_for))

    def _pieces(
        self, ids: Ids, into: Bytes, begins: Sequence[int], failed: Sequence[tuple[int, Exception]]
    ) -> list[Any]:
        """Return the bytes of each sample that was read, or `Failed`."""
        sizes = self._sizes_bytes[ids].tolist()
        found: list[Any] = [into[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
        for index, error in failed:
            found[index] = Failed(located(error, int(ids[index]), self.describe))
        return found

    def _from_tier(self, ids: Ids, tier: MemoryTier) -> list[Any]:
        memory = tier.array
        places = zip(ids.tolist(), tier.places_of(ids).tolist(), strict=True)
        return [
            memory[begin:end]
            if begin >= 0
            else Failed(DataError(f"{self.describe(sample)} is not in memory"))
            for sample, (begin, end) in places
        ]

    def _from_peer(self, ids: Ids, peers: RanksMemory, rank: int) -> list[Any]:
        return [
            Failed(located(each, sample, self.describe)) if isinstance(each, DataError) else each
            for sample, each in zip(ids.tolist(), peers.read(rank, ids), strict=True)
        ]

    def _copied(self, sample: int, data: Bytes, tier: MemoryTier) -> Any:
        """Have a tier keep a sample; return the bytes there."""
        if tier.put(sample, data.data):
            # Of one that another thread brings, or an interrupt has kept from arriving, there is no view yet.
            return np.frombuffer(tier.view(sample), np.uint8) if tier.contains(sample) else data
        if self._evicts:
            return data
        error = DataError("the memory that was planned for the samples is full: correct the source's sizes")
        return Failed(located(error, sample, self.describe))

    def _space_for(self, ids: Ids, request: Request, *, may_be_there: bool = True) -> tuple[Bytes, Ids]:
        """Return where samples go: memory, and where in it each begins and the last one ends.

        may_be_there: whether that may be where the request would have them.
        """
        begins = self._begins_of(ids)
        into = request.into if may_be_there else None
        fills = into is not None and begins[-1] == into.size
        if into is None or not fills or (self._each_bytes is None and np.ptp(np.diff(begins)) > 0):
            into = self._memory_for(int(begins[-1]), request, is_alone=ids.size == 1)
        return into, begins

    def _begins_of(self, ids: Ids) -> Ids:
        """Return where samples begin that follow each other, and where the last one ends; not to be written to."""
        if self._each_bytes is None:
            begins = np.zeros(ids.size + 1, np.int64)
            np.cumsum(self._sizes_bytes[ids], out=begins[1:])
            return begins
        known = self._even_begins
        if known.size <= ids.size:
            self._even_begins = known = np.arange(2 * ids.size + 1) * self._each_bytes
        return known[: ids.size + 1]

    def _memory_for(self, nbytes: int, request: Request, *, is_alone: bool) -> Bytes:
        if request.lasting or (is_alone and nbytes >= LEAST_MAPPED_BYTES):
            # A direct read to pages that the kernel has yet to supply takes three times the processor time.
            return self._reused.empty((nbytes,), _BYTE)
        return self._buffer(nbytes, request.origin)

    def _buffer(self, nbytes: int, origin: int) -> Bytes:
        """Return memory of this thread's own, until its next call for the same origin: one Load may have several."""
        # A forked process, whose thread has the same locals, may share this memory.
        buffers: dict[int, Bytes] = self._threads.__dict__.setdefault(f"buffers of {os.getpid()}", {})
        if origin not in buffers or buffers[origin].size < nbytes:
            buffers[origin] = new_buffer(2 * nbytes)
        return buffers[origin]


def _major_faults() -> int:
    """Return for how many pages of mapped files this thread has waited so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _pass_by(sample: int) -> None:
    """Take note of nothing."""


def located(error: Exception, sample: int, describe: Callable[[int], str]) -> Exception:
    """Give an error its place. What the source raised names the file already."""
    path = printable(describe(sample))
    if isinstance(error, DataError) and path not in str(error):
        placed = DataError(f"{path}: {error}")
        placed.__cause__ = error
        return placed
    error.add_note(f"while loading sample {sample} ({path})")
    return error
