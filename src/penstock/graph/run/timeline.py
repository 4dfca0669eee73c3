"""The timeline of runs: Penstock's trace, with a span for each kernel.

Runs that overlap have a lane each. A run counts as a step of the trace: where it waits for a queue, a mutex or a
batch, it stalls; the rest is its own time.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from typing import Any

import torch

from penstock.flow.collector import Collector
from penstock.flow.recorder import Recorder, Ring
from penstock.graph.run.plan import Unit
from penstock.ranks.transport_of_job import rank_of_this_process
from penstock.report import print_report
from penstock.trace import JSON, NO_FLOW, NO_STEP, Kind, Trace, TraceWriter
from penstock.trace.file import path_in_run

_RING_SPANS = 1 << 13


class Timeline:
    """Records the runs of a session into a file. Any thread may ask for a lane."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._recorder = Recorder(_RING_SPANS, rank_of_this_process())
        meta: dict[str, JSON] = {"graph": True, "torch": torch.__version__, **self._recorder.about}
        self._collector = Collector(self._recorder, TraceWriter(path, meta), print_report)
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._lanes = 0
        self._runs = itertools.count()
        self._active: set[int] = set()
        self._names = SpanNames()

    def begin(self) -> Lane:
        """Return the lane of a run that begins now: the first that no other run has."""
        with self._lock:
            if not self._free:
                self._free.append(self._lanes)
                self._lanes += 1
            worker, run = heapq.heappop(self._free), next(self._runs)
            self._active.add(run)
        return Lane(self, self._recorder.ring(worker), worker, run)

    def end(self, lane: Lane) -> None:
        """Take a lane back."""
        with self._lock:
            self._active.discard(lane.run)
            heapq.heappush(self._free, lane.worker)
            self._collector.consumed = (0, min(self._active, default=lane.run + 1) - 1)
        self.collect(lane.ring)

    def collect(self, ring: Ring) -> None:
        """Write what there is if a ring is half full."""
        if ring.is_half_full:
            self._collector.collect()

    def number(self, unit: Unit) -> int:
        """Return the number by which spans name a unit."""
        with self._lock:
            number, new = self._names.number(names_of(unit))
        if new:
            self._collector.name(new)
        return number

    def flow(self, unit: Unit, run: int) -> int:
        """Return what links spans of a Send and its Recv; a session of its own has none."""
        return NO_FLOW

    def close(self) -> None:
        """End the file. Twice is harmless."""
        self._collector.close()


class SpanNames:
    """The numbers by which spans name units.

    A region's number is followed by those of its members, which begin with a colon, as no name of a node does.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}
        self._next = 0

    def number(self, names: tuple[str, ...]) -> tuple[int, dict[int, str]]:
        """Return the number of a unit, and what is new and has to be written. names: as `names_of` returns them."""
        number = self._numbers.get(names)
        if number is not None:
            return number, {}
        number = self._numbers[names] = self._next
        self._next += len(names)
        return number, dict(enumerate((names[0], *(f":{member}" for member in names[1:])), number))


def members_of(trace: Trace, number: int) -> list[str]:
    """Return the names of the nodes that ran in the spans of a number: of a region, its members."""
    found: list[str] = []
    while (name := trace.names.get(number + 1 + len(found), "")).startswith(":"):
        found.append(name[1:])
    return found or [trace.name_of(number)]


def timeline_of(trace: str | os.PathLike[str] | None) -> Timeline | None:
    """Return what records a session's runs: into a file, or the run of `penstock watch` that it is part of, or not."""
    if trace is not None:
        return Timeline(trace)
    path = path_in_run()
    try:
        return None if path is None else Timeline(path)
    except OSError as error:
        print_report(f"the graph is not recorded in the run of penstock watch: {error}")
        return None


class Lane:
    """What one run records."""

    __slots__ = ("_at", "_has_waited", "_numbers", "_timeline", "_waited_from", "ring", "run", "worker")

    def __init__(self, timeline: Any, ring: Ring, worker: int, run: int) -> None:
        self._timeline, self.ring, self.worker, self.run = timeline, ring, worker, run
        self._numbers: dict[Unit, int] = {}
        #: Up to when it is recorded what the run did, waiting or working.
        self._at = self._waited_from = time.perf_counter()
        self._has_waited = False

    def kernel(self, unit: Unit, begin: float, end: float) -> None:
        """Record a kernel."""
        number = self._numbers.get(unit)
        if number is None:
            number = self._numbers[unit] = self._timeline.number(unit)
        if unit.flat.op == "NextBatch":
            self.wait(begin, end)
        flow = self._timeline.flow(unit, self.run)
        # It is asked for as a step begins; what counts is that the run waited for it.
        if unit.flat.op == "Recv":
            begin = max(begin, self._waited_from)
        self.ring.record(Kind.NODE, begin, end, number, step=self.run, flow=flow)
        self._timeline.collect(self.ring)

    def wait(self, begin: float, end: float) -> None:
        """Record that the run had nothing to do but wait."""
        if begin > self._at:
            self.ring.record(Kind.STEP, self._at, begin, step=self.run, samples=0)
        step = NO_STEP if self._has_waited else self.run
        self.ring.record(Kind.WAIT, begin, end, step=step, samples=0)
        self._at, self._waited_from, self._has_waited = end, begin, True

    def finish(self, live_bytes: int) -> None:
        """Record the end of a run that did not fail. live_bytes: of tensors that it had at a time, the most."""
        if not self._has_waited:
            self.wait(self._at, self._at)
        self.ring.record(
            Kind.STEP, self._at, time.perf_counter(), nbytes=live_bytes, step=self.run, samples=0
        )


def names_of(unit: Unit) -> tuple[str, ...]:
    """Return the name of a unit's spans, and then, of a region of several nodes, those of the nodes."""
    if not unit.names:
        members = unit.region.members if unit.region is not None else []
        unit.names = (name_of(unit), *(each.name for each in members if len(members) > 1))
    return unit.names


def name_of(unit: Unit) -> str:
    """Return the name of a unit's spans: of a Send, "w to /job:a/task:0". No node is called so: names have no colon."""
    node = unit.flat.node
    if node is not None and node.op == "Send":
        return f"{node.attr['node']} to {node.attr['to']}"
    if unit.region is None or len(unit.region.members) == 1:
        return unit.flat.name
    members = unit.region.members
    return f"{members[0].name} to {members[-1].name} ({len(members)} nodes)"
