"""What threads do about a group of samples: fetch it, decode it, record it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.flow.lock_use import RunDelay
from penstock.flow.pieces import Pieces
from penstock.flow.recorder import Recorder, Ring
from penstock.flow.work import Brought, Decoder, Failed, Fetcher, Request
from penstock.policy import Load, Move, OwnRead
from penstock.policy.decisions import UNDECODED, UNREAD
from penstock.trace.schema import AS_PLANNED, JOBS_MEMORY, NO_FLOW, NO_PEER, NO_PLACE, SOURCE, STAGING, Kind

#: A Load of so many takes 50 ms or less as a rule, so that each takes 3 ms at most.
QUICK_SAMPLES = 16
_RECENT_READS = 256
_NBYTES = attrgetter("nbytes")


class GroupWork:
    """Fetches, decodes and records groups of samples. Any thread may call it at any time.

    where: returns the place and the rank of an origin, as the trace has them.
    is_plan_told: see `EngineSettings`.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        decoder: Decoder,
        recorder: Recorder,
        where: Callable[[int], tuple[int, int]],
        *,
        is_plan_told: bool,
    ) -> None:
        self._fetcher, self._decoder, self._recorder = fetcher, decoder, recorder
        self._clock, self._where, self._is_plan_told = recorder.clock, where, is_plan_told
        #: Bytes that wait for a decode worker, and their flow, by the scheduler's entry.
        self.waiting: dict[int, tuple[Any, int]] = {}
        #: How long the last reads from the source took, in seconds a sample.
        self.recent_read_seconds: deque[float] = deque(maxlen=_RECENT_READS)

    def fetch_and_decode(
        self,
        load: Load,
        arrays: tuple[NDArray[Any], ...],
        at: Callable[[Any], None],
        ring: Ring,
        delay: RunDelay,
    ) -> tuple[dict[int, tuple[int, Exception]], list[OwnRead]]:
        """Return what failed, by index in the Load, and how long own reads waited."""
        rows, ids, origins = load.rows, load.ids, load.origins
        own_reads: list[OwnRead] = []
        data: list[Any] | Pieces
        if origins.count(origins[0]) == len(origins):
            into = self._decoder.place_of(rows, arrays) if isinstance(rows, range) else None
            data, flow = self._brought(
                load, origins[0], ids, load.rests, load.entries, at, ring, delay, own_reads, into
            )
        else:
            parts, flow = [None] * len(rows), NO_FLOW
            for origin in set(origins):
                which = [index for index, each in enumerate(origins) if each == origin]
                rests, entries = ([items[index] for index in which] for items in (load.rests, load.entries))
                found, _ = self._brought(load, origin, ids[which], rests, entries, at, ring, delay, own_reads)
                for index, each in zip(which, found, strict=True):
                    parts[index] = each
                found.clear()  # as in `Engine._loaded`
            data = parts
        # A read is noted where nothing of its group failed: looking through all of them is then spared.
        has_failed = sum(read.reads for read in own_reads) < len(rows) and _has_failed(data)
        begin, shared = self._clock(), list[int]()
        failed = self.decode_fetched(
            self._decoder, load, data, arrays, at, has_failed=has_failed, shared=shared
        )
        missed = [index for index, (why, _) in failed.items() if why == UNREAD]
        self.record_decoded(ring, begin, load, missed, flow, shared)
        return failed, own_reads

    def decode_fetched(
        self,
        decoder: Decoder,
        load: Load,
        data: list[Any] | Pieces,
        arrays: tuple[NDArray[Any], ...],
        at: Callable[[Any], None],
        *,
        has_failed: bool,
        shared: list[int] | None = None,
    ) -> dict[int, tuple[int, Exception]]:
        """Decode what there is of the samples of a Load; return what failed, by index in it.

        has_failed: whether some are `Failed`. shared: as of `Brought`.
        """
        rows, ids = load.rows, load.ids
        failed: dict[int, tuple[int, Exception]] = {}
        had: Sequence[int] = range(len(rows))
        if has_failed:
            failed = {
                index: (UNREAD, each.error) for index, each in enumerate(data) if isinstance(each, Failed)
            }
            had = [index for index in had if index not in failed]
            rows, ids = [rows[index] for index in had], ids[had]
            brought, data = data, [data[index] for index in had]
            brought.clear()  # as in `Engine._loaded`
        if rows:
            wrong = decoder.decode(load, Brought(rows, ids, data, shared), arrays, at)
            failed |= {had[index]: (UNDECODED, error) for index, error in wrong}
            wrong.clear()
        return failed

    def record_decoded(
        self, ring: Ring, begin: float, load: Load, missed: list[int], flow: int, shared: Sequence[int] = ()
    ) -> None:
        """Record that a Load was decoded, but for samples that were missed, by index in it.

        flow: that all of them came by, or NO_FLOW. shared: samples that the host's jobs had decoded: a group of their
            own.
        """
        ids, end = np.delete(load.ids, missed) if missed else load.ids, self._clock()
        is_shared = np.isin(ids, shared) if shared else np.zeros(ids.size, bool)
        for some, began, place in (
            (ids[is_shared], begin if is_shared.all() else end, JOBS_MEMORY),
            (ids[~is_shared], begin, NO_PLACE),
        ):
            if not some.size:
                continue
            its_flow = flow if some.size == ids.size else NO_FLOW
            if some.size > 1 and its_flow == NO_FLOW:  # not one group that was fetched together
                its_flow = self._flow_of(ring, some, load)
            about = int(some[0]), load.steps - 1, load.epoch, load.step, place
            ring.record(Kind.DECODE, began, end, *about, samples=some.size, flow=its_flow)

    def _brought(
        self,
        load: Load,
        origin: int,
        ids: NDArray[np.int64],
        rests: list[int],
        entries: list[int],
        at: Callable[[Any], None],
        ring: Ring,
        delay: RunDelay,
        own_reads: list[OwnRead],
        into: NDArray[np.uint8] | None = None,
    ) -> tuple[list[Any] | Pieces, int]:
        """Return what there is of some samples of a Load, all from one origin, and the flow that they came by.

        into: where their bytes may be put, as for `Request`.
        """
        if origin == STAGING:
            pairs = [self.waiting[entry] for entry in entries]
            return [each for each, _ in pairs], pairs[0][1] if len(pairs) == 1 else NO_FLOW
        if origin == SOURCE:  # an earlier wait for a processor is not to be taken off its time
            delay.begin()
        begin, computed = self._clock(), time.thread_time()
        follows = len(load.rows) >= QUICK_SAMPLES  # as `at` of `Engine._done`
        request = Request(ids, at, origin, rests, into=into, epoch=load.epoch, follows=follows, shared=[])
        data = self._fetcher.fetch(request)
        end, computed = self._clock(), time.thread_time() - computed
        flow, has_failed = self.record_fetched(ring, (begin, end), request, data, load)
        if not has_failed:
            # What was in memory was waited for nowhere: whatever else it took, the interpreter's lock or another guest
            # of this host did, and not the store.
            is_there = isinstance(data, Pieces) and data.was_resident
            waited = 0.0 if is_there else delay.left_of(end - begin, computed) - computed
            own_reads.append(OwnRead(origin, len(data), max(0.0, waited)))
            if origin == SOURCE:
                self.recent_read_seconds.append((end - begin) / len(data))
        return data, flow

    def record_fetched(
        self,
        ring: Ring,
        seconds: tuple[float, float],
        request: Request,
        data: list[Any] | Pieces,
        work: Move | Load,
    ) -> tuple[int, bool]:
        """Record what a group of samples came from, but for those that failed; return its flow, and if any failed.

        What jobs of the host had in memory of it is a group of its own, and there is no flow for both.
        """
        ids, origin = request.ids, request.origin
        missed, nbytes = failed_and_bytes(data)
        if not request.shared:
            return self.record_group(ring, seconds, ids, missed, nbytes, origin, work), bool(missed)
        is_shared = np.isin(ids, request.shared)
        if is_shared.all():
            return self.record_group(ring, seconds, ids, [], nbytes, JOBS_MEMORY, work), False
        shared_bytes = sum(data[index].nbytes for index in np.flatnonzero(is_shared).tolist())
        # The call took as long as its reads: what was there was waited for nowhere.
        at_end = seconds[1], seconds[1]
        self.record_group(ring, at_end, ids[is_shared], [], shared_bytes, JOBS_MEMORY, work)
        own_missed = np.flatnonzero(np.isin(np.flatnonzero(~is_shared), missed)).tolist()
        self.record_group(ring, seconds, ids[~is_shared], own_missed, nbytes - shared_bytes, origin, work)
        return NO_FLOW, bool(missed)

    def record_group(
        self,
        ring: Ring,
        seconds: tuple[float, float],
        ids: NDArray[np.int64],
        missed: list[int],
        nbytes: int,
        origin: int,
        work: Move | Load,
    ) -> int:
        """Do so for samples of which some were missed, by index, and the others take so many bytes."""
        epoch, step = work.epoch, work.step
        for began, ended in self._fetcher.take_lost():
            ring.record(Kind.RETRY, began, ended, epoch=epoch, step=step, place=SOURCE, samples=0)
        place, peer = (JOBS_MEMORY, NO_PEER) if origin == JOBS_MEMORY else self._where(origin)
        if missed:
            if place > STAGING:  # a tier, this rank's or another's
                ring.record(
                    Kind.RETRY, *seconds, epoch=epoch, step=step, place=place, samples=len(missed), peer=peer
                )
            ids = np.delete(ids, missed)
            if not ids.size:
                return NO_FLOW
        flow = self._flow_of(ring, ids, work)
        kind = Kind.READ if origin == SOURCE else Kind.HIT
        ring.record(
            kind, *seconds, int(ids[0]), nbytes, epoch, step, place, samples=ids.size, peer=peer, flow=flow
        )
        return flow

    def _flow_of(self, ring: Ring, ids: NDArray[np.int64], work: Move | Load) -> int:
        """Return the flow of a group, and record which samples it is unless the plan says that."""
        flow = self._recorder.next_flow()
        if ids.size > 1:
            if self._is_plan_told and isinstance(work, Load) and is_planned(ids, work):
                return flow | AS_PLANNED
            ring.record_ids(flow, ids)
        return flow


def is_planned(ids: NDArray[np.int64], load: Load) -> bool:
    """Whether samples of a Load are all of it, follow each other, and begin where the first of them first comes."""
    rows = load.rows
    if not isinstance(rows, range) or ids.size != len(rows):
        return False
    return not rows.start or ids[0] not in load.samples[: rows.start]


def failed_and_bytes(data: list[Any] | Pieces) -> tuple[list[int], int]:
    """Return which samples failed, by index, and what the others take; 0 where that is not known."""
    if isinstance(data, Pieces):
        return [], data.joined.nbytes
    kinds = set(map(type, data))
    missed: list[int] = []
    if Failed in kinds:
        missed = [index for index, each in enumerate(data) if isinstance(each, Failed)]
    if kinds - {Failed} != {np.ndarray}:
        return missed, 0
    return missed, sum(
        map(_NBYTES, data if not missed else [each for each in data if not isinstance(each, Failed)])
    )


def _has_failed(data: list[Any] | Pieces) -> bool:
    return not isinstance(data, Pieces) and Failed in set(map(type, data))
