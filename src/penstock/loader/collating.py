"""Batches that a function makes of all samples of a step, in the worker that has loaded them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.flow.staging import ROW
from penstock.flow.work import Brought
from penstock.policy import Load

#: What makes a batch of the samples of a step.
Collate = Callable[[list[Any]], Any]

_NAMED_SAMPLES = 8


class Made(NamedTuple):
    """The batches of a slot that are made and not finished.

    batch: its running number. size: rows of a step. steps: by the first row of each.
    """

    batch: int
    size: int
    steps: dict[int, Any]


class CollatingDecoder:
    """A `Decoder` that keeps what a function makes of a step's samples, for Loads that have all of their slot's.

    collate: gets a list of the samples in the order of the batch.
    leaves_out: whether samples that failed are left out of that list, where there are others. Otherwise the function
        is not called for a step that has such samples.
    """

    fields = (ROW,)

    def __init__(self, collate: Collate, *, leaves_out: bool) -> None:
        self._collate = collate
        self._leaves_out = leaves_out
        #: By slot; and the batch that was finished last.
        self._made: dict[int, Made] = {}
        self._latest: Any = None

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> None:
        """Samples are objects, whose bytes lie elsewhere."""

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[NDArray[Any], ...], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """Make the batches; see `Decoder`. All samples of a step fail if the function does for that step."""
        size = load.samples.size // load.steps
        made = self._made.get(load.slot)
        if made is None or made.batch != load.batch:
            made = self._made[load.slot] = Made(load.batch, size, {})
        failed: list[tuple[int, Exception]] = []
        in_order = sorted(range(len(brought.rows)), key=brought.rows.__getitem__)
        for first, indices in groupby(in_order, lambda index: brought.rows[index] // size * size):
            which = list(indices)
            if len(which) < size and not self._leaves_out:
                continue
            try:
                made.steps[first] = self._of([brought.data[index] for index in which])
            except Exception as error:
                ids = [int(brought.ids[index]) for index in which]
                named = ", ".join(map(str, ids[:_NAMED_SAMPLES]))
                more = f", ... {len(ids)} in all" if len(ids) > _NAMED_SAMPLES else ""
                error.add_note(
                    f"while collate_fn {_name_of(self._collate)} made a batch of samples {named}{more}"
                )
                failed += [(index, error) for index in which]
        return failed

    def _of(self, samples: list[Any]) -> Any:
        made = self._collate(samples)
        if made is None:
            raise DataError("it returned None: return the batch")
        return made

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        """Return the batch; the same again, if it is asked for again before another one, as after Ctrl-C."""
        if slot < 0:
            raise ConfigError(
                f"a batch without samples is asked for, and collate_fn {_name_of(self._collate)} makes batches of "
                "samples only: leave collate_fn out here"
            )
        made = self._made.get(slot)
        if made is None or not made.steps:
            return self._latest
        # Another thread may finish the next one meanwhile: for one that is asked once, what it finds is returned.
        first = rows[0] // made.size * made.size
        if first in made.steps:
            batch = self._latest = made.steps[first]
            del made.steps[first]
            return batch
        return self._latest

    def take(self, slot: int, rows: Sequence[int]) -> Any:
        """See `MovableDecoder`: the batches."""
        return self._made.pop(slot, None)

    def put(self, slot: int, rows: Sequence[int], what: Any) -> None:
        """See `MovableDecoder`."""
        if what is not None:
            self._made[slot] = what


def _name_of(collate: Collate) -> str:
    return getattr(collate, "__qualname__", type(collate).__qualname__)
