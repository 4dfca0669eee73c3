"""The timeline of a graph on workers: each records its part of a step, and the client writes one trace of them all.

A worker is a rank of the trace, and a step that is under way has a lane on each; a Send and the Recv that it feeds have
one flow. A Recv's span is the time for which its worker had nothing to do but wait for it.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any

import numpy as np

from penstock.flow.recorder import Recorder, Ring
from penstock.graph.run.plan import Unit
from penstock.graph.run.timeline import Lane, SpanNames, names_of
from penstock.trace import NO_FLOW, NO_PEER, SPAN, TraceWriter

#: Of one step on one worker; of more, the last are kept, and the trace is not complete.
_MOST_SPANS = 1 << 12


class StepRecorder:
    """What a worker records of one step."""

    def __init__(self, task: str, step: int) -> None:
        self._task, self._names = task, dict[tuple[str, ...], int]()
        self._ring = Recorder(_MOST_SPANS).ring(0)
        self.lane = Lane(self, self._ring, 0, step)

    def number(self, unit: Unit) -> int:
        """Return the number by which spans name a unit."""
        return self._names.setdefault(names_of(unit), len(self._names))

    def flow(self, unit: Unit, step: int) -> int:
        """Return what links a Send and its Recv: made of the step, the node and who receives."""
        node = unit.flat.node
        if node is None or node.op not in ("Send", "Recv"):
            return NO_FLOW
        sent = (node.attr["node"], node.attr["to"]) if node.op == "Send" else (node.name, self._task)
        named = blake2b(repr((step, *sent)).encode("utf-8"), digest_size=8)
        return int.from_bytes(named.digest(), "little") or 1

    def collect(self, ring: Ring) -> None:
        """Do nothing: what is recorded is sent with the answer."""

    def found(self) -> dict[str, Any]:
        """Return what was recorded, for the answer."""
        spans = np.frombuffer(self._ring.drain().tobytes(), np.uint8)
        return {"spans": spans, "lost": self._ring.lost, "names": [list(names) for names in self._names]}


class StepWriter:
    """The client's trace of all workers. Any thread writes.

    tasks: ranks of the trace, in order.
    """

    def __init__(self, path: str | os.PathLike[str], tasks: Sequence[str]) -> None:
        self._tasks = list(tasks)
        self._origin = time.perf_counter()
        started = datetime.now().astimezone().isoformat()
        self._writer = TraceWriter(path, {"graph": True, "started": started, "ranks": len(self._tasks)})
        self._writer.name(hosts=dict(enumerate(self._tasks)))
        self._lock = threading.Lock()
        self._free, self._lanes = list[int](), 0
        self._steps = self._lost = 0
        self._names = SpanNames()
        self._is_closed = False

    def begin(self) -> tuple[int, int]:
        """Return the lane and the number of a step that begins."""
        with self._lock:
            if not self._free:
                heapq.heappush(self._free, self._lanes)
                self._lanes += 1
            self._steps += 1
            return heapq.heappop(self._free), self._steps - 1

    def end(
        self,
        lane: int,
        step: int,
        answers: Mapping[str, Any],
        missing: int,
        offset: Mapping[str, float],
        home: Callable[[str], str],
    ) -> None:
        """Write what workers recorded of a step.

        missing: how many workers ran a part of it and were not heard of again; then the trace is not complete.
        offset: seconds by which their clocks are behind, by task. home: returns the task of a node, by name; "" for a
        name that no node of the graph has, as those of Sends. A Recv has the name of the node whose output it receives,
        and that node's task is its peer.
        """
        with self._lock:
            heapq.heappush(self._free, lane)
            if self._is_closed:
                return
            if missing:
                self._lost += missing
                self._writer.append(np.zeros(0, SPAN), self._lost)
            for sender, answer in answers.items():
                spans = np.frombuffer(bytes(answer["spans"]), SPAN).copy()
                names = [tuple(map(str, each)) for each in answer["names"]]
                numbers = []
                for each in names:
                    number, new = self._names.number(each)
                    self._writer.name(new)
                    numbers.append(number)
                for field in ("start", "end"):
                    spans[field] += offset[sender] - self._origin
                spans["rank"], spans["worker"] = self._tasks.index(sender), lane
                spans["step"][spans["step"] >= 0] = step
                for span in spans:
                    if span["sample"] >= 0:
                        place = span["sample"]
                        span["sample"] = numbers[place]
                        if span["flow"] != NO_FLOW:
                            task = home(names[place][0])
                            span["peer"] = self._tasks.index(task) if task else NO_PEER
                self._lost += int(answer["lost"])
                self._writer.append(spans, self._lost)

    def close(self) -> None:
        """End the file. Twice is harmless."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._writer.close()
