"""What a loader in `penstock.watch` leaves in the run of a `penstock watch`: a trace of its waits and steps."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.flow.collector import Collector
from penstock.flow.recorder import Recorder
from penstock.ranks.transport_of_job import rank_by_launcher
from penstock.report import print_report
from penstock.trace import TraceWriter
from penstock.trace.schema import CONSUMER
from penstock.trace.trace import JSON

#: What is recorded reaches the file after so many seconds.
_COLLECT_SECONDS = 5.0
_RING_SPANS = 1 << 13


class WatchedRun:
    """The file of one loader. Used by the thread that iterates; the file ends with its owner, or with the process."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path: Path | None = path
        self._recorder = Recorder(_RING_SPANS, clock=clock)
        #: Waits and steps.
        self.ring = self._recorder.ring(CONSUMER)
        self._collector = Collector(self._recorder, None, print_report)
        self._collector.hold()
        self._collected = clock()
        weakref.finalize(self, self._collector.close)

    def consume(self, meta: dict[str, JSON], epoch: int, step: int) -> None:
        """Note that a batch came, whose wait and step are not recorded yet; write what there is after some seconds.

        meta: of the file, as `about` says it.
        """
        if self._path is not None:
            path, self._path = self._path, None
            meta = {
                **meta,
                "started": self._recorder.started.isoformat(),
                "host": os.uname().nodename,
            }
            try:
                self._collector.write_to(TraceWriter(path, meta))
            except OSError as error:
                print_report(f"what a watched loader waits for is not recorded in the run: {error}")
        if self._recorder.clock() - self._collected >= _COLLECT_SECONDS or self.ring.is_half_full:
            self.collect(epoch, step - 1)

    def collect(self, epoch: int, step: int) -> None:
        """Write what there is. epoch, step: of the last batch whose step is recorded."""
        self._collected = self._recorder.clock()
        self._collector.consumed = (epoch, step)
        self._collector.collect()


def about(loader: object, batch: object) -> dict[str, JSON]:
    """Return what a trace of a watched loader says of its batches, as far as it can be seen from outside."""
    found: dict[str, JSON] = {"watched": type(loader).__qualname__, "rank": 0}
    first = next(_arrays(batch), None)
    size = getattr(loader, "batch_size", None)
    if first is not None:
        shape = [int(length) for length in first.shape]
        found |= {"shape": list(shape), "dtype": str(first.dtype).removeprefix("torch.")}
        size = size if isinstance(size, int) or not shape else shape[0]
    found["batch_size"] = size if isinstance(size, int) else None
    found["drop_last"] = getattr(loader, "drop_last", False) is True
    # A sampler that shares an epoch between ranks, as DistributedSampler does.
    sampler = getattr(loader, "sampler", None)
    rank, ranks = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    if isinstance(rank, int) and isinstance(ranks, int):
        found |= {"rank": rank, "ranks": ranks}
    else:
        found["rank"] = rank_by_launcher()
    return found


def _arrays(batch: object) -> Iterator[Any]:
    if isinstance(getattr(batch, "shape", None), tuple) and hasattr(batch, "dtype"):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _arrays(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _arrays(part)
