"""Samples that are rows of numbers in files, all of one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.store.labels import Labels, labels_of
from penstock.store.packed import PackedFiles, stats_of
from penstock.store.patterns import brief
from penstock.store.remote import Objects
from penstock.store.source import Numbers
from penstock.units import format_count

#: Labels that are integers have names, their digits, up to so many.
_MOST_CLASSES = 1_000_000


class _Alike(Protocol):
    """The rows of a file, as far as those of all files are alike. dtype: of an element. shape: of a row."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class RowFiles(PackedFiles):
    """Rows of numbers in files; made to be used by what knows where they lie, such as `Arrays`.

    counts: of each file, how many rows it has. numbers: of a row. labels: as in `Source`.
    facts: of `PackedFiles`. objects: what reads addresses.
    """

    def __init__(
        self,
        place: str,
        files: tuple[str, ...],
        counts: Sequence[int],
        numbers: Numbers,
        labels: Labels,
        *,
        facts: str,
        objects: Objects | None = None,
    ) -> None:
        file_bytes, file_times = stats_of(files, objects)
        self.numbers = numbers
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._firsts = self._ends - np.array(counts, np.int64)
        self.sample_bytes = math.prod(numbers.shape) * np.dtype(numbers.dtype).itemsize
        sizes_bytes = np.full(int(self._ends[-1]), self.sample_bytes, np.int64)
        sizes_bytes.flags.writeable = False
        self.facts = facts
        labels = labels_of(labels, sizes_bytes.size)
        for array in labels.values() if isinstance(labels, dict) else [labels]:
            array.flags.writeable = False
        super().__init__(
            files,
            file_bytes,
            file_times,
            place=brief(place),
            sizes_bytes=sizes_bytes,
            labels=labels,
            classes=() if isinstance(labels, dict) else _classes_of(labels),
            objects=objects,
        )

    def __repr__(self) -> str:
        shape = "".join(f"{size}, " for size in self.numbers.shape).rstrip(", ")
        what = f"{np.dtype(self.numbers.dtype).name}[{shape}]"
        return f"{type(self).__name__}({self.place!r}): {format_count(len(self), 'sample')} of {what}"

    def describe(self, sample: int) -> str:
        self._size_of(sample)
        unit = int(np.searchsorted(self._ends, sample, side="right"))
        return f"{self.files[unit]}: {self._named(sample - int(self._firsts[unit]))}"

    def _named(self, index: int) -> str:
        return f"row {index:,}"


def check_alike(files: Sequence[str], rows: Sequence[_Alike]) -> None:
    """Raise DataError naming the first file whose rows are of another dtype or shape than those of the first."""
    first = rows[0]
    for path, each in zip(files, rows, strict=True):
        if (each.dtype, each.shape) != (first.dtype, first.shape):
            raise DataError(
                f"{path} has rows of {each.dtype}{list(each.shape)}, unlike {files[0]}, {first.dtype}"
                f"{list(first.shape)}: give files of one kind"
            )


def copied_labels(labels: NDArray[Any] | dict[str, NDArray[Any]]) -> Labels:
    """Return labels that the user gave as arrays, as they are now."""
    if isinstance(labels, dict):
        return {name: np.array(each) for name, each in labels.items()}
    return np.array(labels)


def _classes_of(labels: NDArray[Any]) -> tuple[str, ...]:
    """Return the names of labels, which are their digits; none where they are no numbers of classes."""
    if (
        labels.ndim != 1
        or labels.dtype.kind not in "iu"
        or labels.min() < -1
        or labels.max() >= _MOST_CLASSES
    ):
        return ()
    return tuple(str(number) for number in range(int(labels.max()) + 1))
