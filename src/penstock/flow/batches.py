"""Batches that are complete, as who asked for them gets them, and what notes that one was dropped."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from penstock.flow.copying import Copied
from penstock.policy import Ready

#: Of batches that are in no slot: of the first of several that are made together, the others have the next ones.
MADE = 1 << 30


class StagedBatch:
    """A step's batch with all its samples in its slot. Whoever refers to its arrays has the slot.

    samples: int64[local batch]. row: of the slot, where its samples begin.
    failed: places that have no sample. errors: why, by sample, and where in the worker that was.
    copied: where it is on a device, if it was copied there; then arrays is empty, or soon. fitted: see `copying.Batch`.
    """

    __slots__ = (
        "_packed",
        "arrays",
        "copied",
        "epoch",
        "errors",
        "failed",
        "fitted",
        "row",
        "samples",
        "slot",
        "step",
    )

    def __init__(
        self, ready: Ready, step: int, arrays: tuple[NDArray[Any], ...], known: dict[int, Exception]
    ) -> None:
        size = ready.samples.size // ready.steps
        rows = slice((step - ready.step) * size, (step - ready.step + 1) * size)
        self.epoch, self.step, self.slot, self.row = ready.epoch, step, ready.slot, rows.start
        self.samples = ready.samples[rows]
        self.arrays = arrays if ready.steps == 1 else tuple([array[rows] for array in arrays])
        self.failed: tuple[int, ...] = ()
        self.errors: dict[int, tuple[Exception, TracebackType | None]] = {}
        if ready.failed:
            self.failed = tuple(row - rows.start for row in ready.failed if rows.start <= row < rows.stop)
            for sample in self.samples[list(self.failed)].tolist():
                self.errors[sample] = known[sample], known[sample].__traceback__
        self._packed: list[NDArray[Any]] | None = None
        self.copied: Copied | None = None
        self.fitted = 0.0

    def rows(self, places: Sequence[int]) -> Sequence[int]:
        """Return where some places of the batch are in its slot."""
        if isinstance(places, range):
            return range(self.row + places.start, self.row + places.stop)
        return [self.row + place for place in places]

    def keep(self, places: Sequence[int]) -> tuple[NDArray[Any], ...]:
        """Move some places to the front, in their order, and return the arrays of these alone.

        Called again, as after a Ctrl-C in its midst, it must get the same places.
        """
        if len(places) == len(self.samples):
            return self.arrays
        if self._packed is None:
            self._packed = [array[places] for array in self.arrays]
        for array, packed in zip(self.arrays, self._packed, strict=True):
            array[: len(places)] = packed
        return tuple(array[: len(places)] for array in self.arrays)


class Departure(weakref.ref[Any]):
    """Tells when an object was dropped. seconds: a reading of the engine's clock soon after; None until then."""

    __slots__ = ("seconds",)

    seconds: float | None
