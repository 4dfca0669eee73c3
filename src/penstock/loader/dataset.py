"""The threads' work on somebody's map-style data set: call it, and copy what it returns into the slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.flow.engine import LoadResult
from penstock.flow.recorder import Ring
from penstock.flow.staging import Field, StagingBuffer
from penstock.loader.probing import from_first
from penstock.loader.structure import Leaf, learn_structure
from penstock.policy import Load, Read
from penstock.policy.scheduler import Item
from penstock.store.calls import Calls
from penstock.trace.schema import SOURCE, Kind


class MapDataset(Protocol):
    """What PyTorch calls a map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class _Fetched(NamedTuple):
    """What the data set returned for an item, and when it was asked and was done."""

    item: Item
    value: Any
    begin: float
    end: float


class DatasetWork:
    """Samples that a data set's own code makes, on the decode threads.

    The first of `samples` that can be had, fetched once more beforehand, shows the structure: a tuple, list or
    mapping of arrays and numbers, nested at will. Arrays and numbers get a place in the slot; anything else (a path,
    a string) is handed over in a list. Batches have the structure that PyTorch's default_collate gives them.

    as_array: turns a leaf into an array without a copy where it can. calls: what the first sample is fetched with.
    copy_leaves: copies leaves into an array that has a row for each, if it can at once and they are as this wants
        them; returns whether it did.
    """

    def __init__(
        self,
        dataset: MapDataset,
        samples: Iterable[int],
        as_array: Callable[[Any], NDArray[Any] | None],
        on_error_raise: bool,
        calls: Calls,
        copy_leaves: Callable[[Sequence[Any], NDArray[Any]], bool] = lambda leaves, place: False,
    ) -> None:
        self._dataset = dataset
        #: PyTorch's protocol: a list of numbers to a list of samples.
        self._get_list: Callable[[list[int]], Iterable[Any]] | None = getattr(dataset, "__getitems__", None)
        self._copy_leaves = copy_leaves
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
        fetched = self._fetch(load.items, at, failed)
        begin = time.perf_counter()
        if not self._store_columns(fetched, arrays, others):
            stored = []
            for each in fetched:
                try:
                    others[each.item.index] = self._store(each.value, arrays, each.item)
                    stored.append(each)
                except Exception as error:
                    failed.append((each.item, self._explained(error, each.item.sample)))
            fetched = stored
        if fetched:
            # Copied together: each counts for its part, one after the other, so that the last ends last.
            marks = np.linspace(begin, time.perf_counter(), len(fetched) + 1)
            samples = [each.item.sample for each in fetched]
            begins, ends = [each.begin for each in fetched], [each.end for each in fetched]
            ring.record_samples(Kind.READ, begins, ends, samples, 0, load.epoch, load.step, SOURCE)
            ring.record_samples(Kind.DECODE, marks[:-1], marks[1:], samples, epoch=load.epoch, step=load.step)
        return LoadResult(failed, [each.end - each.begin for each in fetched])

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

    def _fetch(
        self, items: list[Item], at: Callable[[int], None], failed: list[tuple[Item, Exception]]
    ) -> list[_Fetched]:
        """Have the data set make the samples of a Load, all by one call where it has `__getitems__`."""
        clock = time.perf_counter
        if self._get_list is not None and len(items) > 1:
            at(items[0].sample)
            begin = clock()
            try:
                values = list(self._get_list([item.sample for item in items]))
            except Exception:
                values = []  # one by one: whose error it is shows then
            if len(values) == len(items):
                marks = np.linspace(begin, clock(), len(items) + 1).tolist()
                return list(map(_Fetched, items, values, marks[:-1], marks[1:]))
        already_failed = len(failed)
        fetched: list[_Fetched] = []
        for item in items:
            at(item.sample)
            begin = clock()
            try:
                fetched.append(_Fetched(item, self._dataset[item.sample], begin, clock()))
            except Exception as error:
                failed.append((item, self._explained(error, item.sample)))
        if len(items) > 1 and len(failed) == already_failed:
            self._get_list = None  # it fails where no sample does: each would be made twice, in every Load
        return fetched

    def _explained(self, error: Exception, sample: int) -> Exception:
        error.add_note(f"while loading {self.describe(sample)}")
        return error

    def _store_columns(
        self, fetched: list[_Fetched], arrays: tuple[NDArray[Any], ...], others: dict[int, list[Any]]
    ) -> bool:
        """Copy samples leaf by leaf, each for all of them at once; return False where they are not all alike.

        Then their rows may hold anything, and `_store` says which sample is not.
        """
        if not fetched:
            return True
        columns = self._columns([each.value for each in fetched])
        first, count = fetched[0].item.index, len(fetched)
        if columns is None or any(each.item.index != first + k for k, each in enumerate(fetched)):
            return False
        places = iter(arrays)
        lists: list[Sequence[Any]] = []
        for column, is_array in zip(columns, self._is_array, strict=True):
            if not is_array:
                if any(isinstance(leaf, (Mapping, tuple, list)) for leaf in column):
                    return False
                lists.append(column)
            elif not self._copy(column, next(places)[first : first + count]):
                return False
        for row in range(count):
            others[first + row] = [column[row] for column in lists]
        return True

    def _columns(self, values: list[Any]) -> list[Sequence[Any]] | None:
        """Return each leaf of all samples, in the structure's order; None for nested or unlike ones."""
        structure = self._structure
        if isinstance(structure, Leaf):
            return [values]
        count = len(structure.parts)
        if not all(isinstance(part, Leaf) for part in structure.parts):
            return None
        if structure.keys is not None:
            keys = structure.keys
            if not all(type(value) is dict and value.keys() == set(keys) for value in values):
                return None
            return [[value[key] for value in values] for key in keys]
        if not all(isinstance(value, (tuple, list)) and len(value) == count for value in values):
            return None
        return list(zip(*values, strict=True))

    def _copy(self, column: Sequence[Any], place: NDArray[Any]) -> bool:
        kinds = set(map(type, column))
        if kinds <= {int} or kinds <= {float} or kinds <= {bool}:
            array = np.array(column)
            if array.dtype != place.dtype or array.shape != place.shape:
                return False
            place[:] = array
            return True
        if kinds == {np.ndarray}:
            if any(leaf.dtype != place.dtype or leaf.shape != place.shape[1:] for leaf in column):
                return False
            np.stack(column, out=place)
            return True
        return self._copy_leaves(column, place)

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
