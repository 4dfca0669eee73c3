"""Recording what is done for snapshots into a trace: one span each, or pieces of a second of what runs beside."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self

from penstock.flow.recorder import Recorder
from penstock.trace.schema import NO_EPOCH, NO_PLACE, NO_SAMPLE, Kind

#: What runs next to the training comes in pieces, see `penstock.trace.Kind`.
_PIECE_SECONDS = {Kind.WRITE: 1.0, Kind.DRAIN: 1.0}
#: A ring of its own for each kind, for a thread of its own does it: counted from the last number down, since the
#: workers of a loader that the recorder may belong to are counted from the first up.
_RINGS = {Kind.SAVE: 65_535, Kind.WRITE: 65_534, Kind.DRAIN: 65_533, Kind.LOAD: 65_532}
_RING_SPANS = 256


class SnapshotSpan:
    """The time that the block of a `with` takes, recorded at its end; also where it raises.

    Used by one thread at a time for each kind.

    >>> recorder = Recorder(16)
    >>> with SnapshotSpan(recorder, Kind.SAVE, step=1000) as span:
    ...     span.add(600_000_000)
    >>> recorder.drain()[["kind", "bytes", "step"]].tolist()
    [(6, 600000000, 1000)]
    """

    def __init__(self, recorder: Recorder | None, kind: Kind, step: int, tier: int = NO_PLACE) -> None:
        """recorder: of the trace; None records nothing. kind: `SAVE`, `WRITE`, `DRAIN` or `LOAD`.

        step: of the snapshot. tier: of the store, 0 the one that is written first.
        """
        self._recorder = recorder
        self._ring = None if recorder is None else recorder.ring(_RINGS[kind], _RING_SPANS)
        self._kind, self._step, self._tier = kind, step, tier
        self._piece_seconds = _PIECE_SECONDS.get(kind, math.inf)
        self._begin = math.nan
        self._bytes = 0

    def add(self, nbytes: int) -> None:
        """Tell of bytes that are done; a piece that has taken a second ends here."""
        self._bytes += nbytes
        if self._recorder is not None and self._recorder.clock() - self._begin >= self._piece_seconds:
            self._record()

    def __enter__(self) -> Self:
        if self._recorder is not None:
            self._begin = self._recorder.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._record()

    def _record(self) -> None:
        assert self._recorder is not None and self._ring is not None, "there is a trace"  # noqa: PT018
        begin, self._begin = self._begin, self._recorder.clock()
        nbytes, self._bytes = self._bytes, 0
        self._ring.record(
            self._kind, begin, self._begin, NO_SAMPLE, nbytes, NO_EPOCH, self._step, self._tier, samples=0
        )
