"""Recording what is done for snapshots into a trace: one span each, or pieces of a second of what runs beside."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from penstock.flow.recorder import OF_RUN, Recorder
from penstock.trace.schema import NO_EPOCH, NO_PLACE, NO_SAMPLE, Kind

#: What runs next to the training comes in pieces, see `penstock.trace.Kind`.
_PIECE_SECONDS = {Kind.WRITE: 1.0, Kind.DRAIN: 1.0}
#: A ring of its own for each kind, for a thread of its own does it: counted from the last number down, since the
#: workers of a loader that the recorder may belong to are counted from the first up.
_RINGS = {Kind.SAVE: 65_535, Kind.WRITE: 65_534, Kind.DRAIN: 65_533, Kind.LOAD: 65_532}
_RING_SPANS = 256
#: Several stores may record into the rings of one loader.
_recording = threading.Lock()

#: Takes numbers and does nothing with them, without a call of Python.
_uncounted: Callable[[int], None] = deque[int](maxlen=0).append


def snapshot_span(
    recorder: Recorder | None, kind: Kind, step: int, tier: int = NO_PLACE
) -> AbstractContextManager[Callable[[int], None]]:
    """Record the time that the block of a `with` takes, at its end; also where it raises.

    recorder: of the trace; None is that of a loader under `penstock watch`, and without one records nothing.
    kind: `SAVE`, `WRITE`, `DRAIN` or `LOAD`. step: of the snapshot.
    tier: number of the tier in the store, 0 is written first.
    Returns: a context; in the block, a function is called with the bytes that were done since the call before.

    >>> recorder = Recorder(16)
    >>> with snapshot_span(recorder, Kind.SAVE, step=1000) as add:
    ...     add(600_000_000)
    >>> recorder.drain()[["kind", "bytes", "step"]].tolist()
    [(6, 600000000, 1000)]
    """
    recorder = recorder or next(iter(OF_RUN.values()), None)
    return nullcontext(_uncounted) if recorder is None else _recorded(recorder, kind, step, tier)


@contextmanager
def _recorded(recorder: Recorder, kind: Kind, step: int, tier: int) -> Iterator[Callable[[int], None]]:
    ring = recorder.ring(_RINGS[kind], _RING_SPANS)
    piece_seconds = _PIECE_SECONDS.get(kind, math.inf)
    begin, nbytes = recorder.clock(), 0

    def record() -> None:
        nonlocal begin, nbytes
        end = recorder.clock()
        with _recording:
            ring.record(kind, begin, end, NO_SAMPLE, nbytes, NO_EPOCH, step, tier, samples=0)
        begin, nbytes = end, 0

    def add(more_bytes: int) -> None:
        nonlocal nbytes
        nbytes += more_bytes
        if recorder.clock() - begin >= piece_seconds:
            record()

    try:
        yield add
    finally:
        record()
