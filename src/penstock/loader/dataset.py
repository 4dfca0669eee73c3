"""The threads' work on somebody's map-style data set: call it, and copy what it returns into the slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.flow.engine import LoadResult
from penstock.flow.recorder import Ring
from penstock.flow.staging import Field, StagingBuffer
from penstock.loader.probing import from_first
from penstock.loader.structure import learn_structure
from penstock.policy import Load, Read
from penstock.policy.scheduler import Item
from penstock.store.calls import Calls
from penstock.trace.schema import SOURCE, Kind


class MapDataset(Protocol):
    """What PyTorch calls a map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetWork:
    """Samples that a data set's own code makes, on the decode threads.

    The first of `samples` that can be had, fetched once more beforehand, shows the structure: a tuple, list or
    mapping of arrays and numbers, nested at will. Arrays and numbers get a place in the slot; anything else (a path,
    a string) is handed over in a list. Batches have the structure that PyTorch's default_collate gives them.

    as_array: turns a leaf into an array without a copy where it can. calls: what the first sample is fetched with.
    """

    def __init__(
        self,
        dataset: MapDataset,
        samples: Iterable[int],
        as_array: Callable[[Any], NDArray[Any] | None],
        on_error_raise: bool,
        calls: Calls,
    ) -> None:
        self._dataset = dataset
        self._as_array = as_array
        sample, example = from_first(samples, partial(self._example, calls), on_error_raise=on_error_raise)
        self._structure = learn_structure(example)
        leaves = [as_array(leaf) for leaf in self._structure.leaves_of(example, self.describe(sample))]
        #: Which leaves are arrays, in the structure's order.
        self._is_array = [leaf is not None for leaf in leaves]
        self.fields = tuple(
            Field(f"leaf {number}", leaf.shape, leaf.dtype)
            for number, leaf in enumerate(leaves)
            if leaf is not None
        )
        if not self.fields:
            raise ConfigError(
                f"sample {sample} of {type(dataset).__name__} is a {type(example).__name__} without any array "
                "or number: return at least one, for example the label"
            )
        self._staging: StagingBuffer | None = None
        #: Leaves without an array, by slot, row and order of appearance.
        self._other_leaves: dict[int, dict[int, list[Any]]] = {}

    def attach(self, staging: StagingBuffer) -> None:
        """Say where samples go, before the first Load."""
        self._staging = staging

    @property
    def classes(self) -> tuple[str, ...]:
        """What torchvision's data sets call their labels' names; empty where the data set tells none."""
        return tuple(getattr(self._dataset, "classes", ()))

    @property
    def name(self) -> str:
        """The data set in a word, for lines about an epoch."""
        return type(self._dataset).__name__

    @property
    def read_from(self) -> str:
        """What reads that take long are blamed on: whether the data set's code reads or computes is not seen here."""
        return "the data set"

    @property
    def place(self) -> str:
        return type(self._dataset).__name__

    def describe(self, sample: int) -> str:
        return f"{type(self._dataset).__name__}[{sample}]"

    def read(self, read: Read) -> Any:
        raise AssertionError("a data set is read by decode workers alone")

    def load(self, load: Load, ring: Ring, at: Callable[[int], None]) -> LoadResult:
        assert self._staging is not None, "attach comes before the first Load"
        arrays = self._staging.arrays(load.slot)
        others = self._other_leaves.setdefault(load.slot, {})
        failed: list[tuple[Item, Exception]] = []
        read_seconds: list[float] = []
        clock = time.perf_counter
        for item in load.items:
            at(item.sample)
            begin = clock()
            try:
                value = self._dataset[item.sample]
                fetched = clock()
                others[item.index] = self._store(value, arrays, item)
            except Exception as error:
                error.add_note(f"while loading {self.describe(item.sample)}")
                failed.append((item, error))
                continue
            read_seconds.append(fetched - begin)
            ring.record(Kind.READ, begin, fetched, item.sample, 0, load.epoch, load.step, SOURCE)
            ring.record(Kind.DECODE, fetched, clock(), item.sample, epoch=load.epoch, step=load.step)
        return LoadResult(failed, read_seconds)

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], kept: Sequence[int]) -> Any:
        """Return what a batch is made of, once its arrays hold the `kept` places of the slot."""
        rows = self._other_leaves.get(slot, {})
        stacked = iter(arrays)
        listed = ([rows[row][which] for row in kept] for which in range(self._is_array.count(False)))
        return self._structure.build(
            next(stacked) if is_array else next(listed) for is_array in self._is_array
        )

    def close(self) -> None:
        self._other_leaves.clear()

    def _example(self, calls: Calls, sample: int) -> tuple[int, Any]:
        try:
            return sample, calls.one(self.describe(sample), lambda: self._dataset[sample])
        except Exception as error:
            error.add_note(f"while asking {self.place} for sample {sample}, to see its shape")
            raise

    def _store(self, value: Any, arrays: tuple[NDArray[Any], ...], item: Item) -> list[Any]:
        """Copy a sample's arrays into its row; return the leaves that are none."""
        others: list[Any] = []
        places = iter(arrays)
        name = self.describe(item.sample)
        leaves = self._structure.leaves_of(value, name)
        for number, (leaf, is_array) in enumerate(zip(leaves, self._is_array, strict=True)):
            array = self._as_array(leaf)
            if not is_array:
                others.append(leaf)
                continue
            place = next(places)
            if array is None or place.shape[1:] != array.shape or place.dtype != array.dtype:
                found = type(leaf).__name__ if array is None else f"{array.dtype}{list(array.shape)}"
                raise DataError(
                    f"{name}: part {number} is {found}, the first sample's was {place.dtype}{list(place.shape[1:])}: "
                    "samples of a batch must be alike, so crop, pad or convert them in the data set"
                )
            place[item.index] = array
        return others


def numpy_leaf(value: Any) -> NDArray[Any] | None:
    """Return a number or NumPy array as an array; None for anything else."""
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "biufc" else None
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return np.asarray(value)
    return None
