"""Somebody's map-style data set: threads call it, and copy what it returns into the slot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.flow.engine import Failed
from penstock.flow.staging import Field
from penstock.loader.asked import ListCode, SampleCode, list_code
from penstock.loader.optional import Defaults
from penstock.loader.probing import from_first
from penstock.loader.structure import learn_structure
from penstock.policy import Load
from penstock.store.calls import Calls


class MapDataset(Protocol):
    """What PyTorch calls a map-style data set.

    `__getitem__` takes a sample's number, and what else it asks for by name, see `penstock.loader.asked`.
    """

    def __len__(self) -> int: ...

    @property
    def __getitem__(self) -> Callable[..., Any]: ...


#: What the generators of a data set are for; another text is other numbers.
DRAWS = "data set"


class DatasetFetcher:
    """A `Fetcher` of samples that a data set's own code makes.

    seed: of the generators that `__getitem__` and `__getitems__` ask for, see `penstock.loader.asked`.
    optional: what samples get that lack a field.
    Raises: ConfigError for a `__getitems__` that asks for what `__getitem__` does not.
    """

    def __init__(self, dataset: MapDataset, seed: int = 0, optional: Defaults | None = None) -> None:
        self._dataset, self._seed = dataset, seed
        self._optional = optional or None
        self._get = SampleCode(dataset.__getitem__, seed, DRAWS)
        #: PyTorch's protocol: a list of numbers to a list of samples.
        self._get_list: ListCode | None = None
        if (get_list := getattr(dataset, "__getitems__", None)) is not None:
            self._get_list = list_code(get_list, self._get, seed, DRAWS, self.place)

    def __reduce__(self) -> Any:
        """Pickle what it was made of: a worker process has a copy."""
        return DatasetFetcher, (self._dataset, self._seed, self._optional)

    @property
    def draws(self) -> bool:
        """Whether the data set asks for generators."""
        return "rng" in self._get.asks

    @property
    def place(self) -> str:
        return type(self._dataset).__name__

    def describe(self, sample: int) -> str:
        return f"{self.place}[{sample}]"

    def example(self, samples: Iterable[int], calls: Calls, *, on_error_raise: bool) -> tuple[int, Any]:
        """Return the first of some samples that can be had, with its number. calls: what it is fetched with."""

        def look(sample: int) -> tuple[int, Any]:
            try:
                return sample, calls.one(self.describe(sample), lambda: self._one(sample, 0))
            except Exception as error:
                error.add_note(f"while asking {self.place} for sample {sample}, to see its shape")
                raise

        return from_first(samples, look, on_error_raise=on_error_raise)

    def fetch(
        self,
        samples: list[int],
        origin: int,
        rests: list[int],
        at: Callable[[int], None],
        *,
        lasting: bool,
        into: NDArray[np.uint8] | None = None,
        epoch: int = 0,
    ) -> list[Any]:
        """Have the data set make samples, all by one call where it has `__getitems__`; see `Fetcher`."""
        wrong = ""
        if self._get_list is not None and len(samples) > 1:
            at(samples[0])
            try:
                values = list(self._get_list(samples, epoch))
                if self._optional is not None:
                    values = list(map(self._optional.fill, values))
                if len(values) == len(samples):
                    return values
                wrong = f"returns {len(values)} samples"
            except Exception as error:  # one by one: whose error it is shows then
                wrong = f"raises {error!r:.200}"
        values = []
        has_failed = False
        for sample in samples:
            at(sample)
            try:
                values.append(self._one(sample, epoch))
            except Exception as error:
                values.append(Failed(_noted(error, self.describe(sample))))
                has_failed = True
        if wrong and not has_failed:
            # It fails where no sample does: each would be made twice, in every Load.
            self._get_list = None
            warnings.warn(
                f"{self.place}.__getitems__ {wrong} for {len(samples)} numbers, and __getitem__ works for each of "
                "them: samples are asked for one by one from here on",
                RuntimeWarning,
                stacklevel=2,
            )
        return values

    def _one(self, sample: int, epoch: int) -> Any:
        value = self._get(sample, epoch, sample)
        return value if self._optional is None else self._optional.fill(value)

    def take_lost(self) -> Sequence[tuple[float, float]]:
        """What is tried again is the data set's own matter."""
        return ()

    def end_waits(self) -> None:
        """So is what it waits for."""

    def close(self) -> None:
        """Nothing is held."""


class SampleDecoder:
    """A `Decoder` of samples that are made already: arrays and numbers in tuples, lists, mappings or dataclasses.

    An example shows the structure. Arrays and numbers get a place in the slot; anything else (a path, a string) is
    handed over in a list. Batches have the structure that PyTorch's default_collate gives them.

    example: a sample, and its number. describe: names one, in errors.
    as_array: turns a leaf into an array without a copy where it can.
    copy_leaves: copies leaves, all of one type, into an array that has a row for each, if it can at once and they are
        as this wants them; returns whether it did.
    Raises: ConfigError for an example without any array or number.
    """

    def __init__(
        self,
        example: tuple[int, Any],
        describe: Callable[[int], str],
        as_array: Callable[[Any], NDArray[Any] | None],
        copy_leaves: Callable[[Sequence[Any], NDArray[Any]], bool] = lambda leaves, place: False,
    ) -> None:
        sample, value = example
        self._describe = describe
        self._copy_leaves = copy_leaves
        self._as_array = as_array
        self._first = describe(sample)
        self._structure = learn_structure(value)
        leaves = [as_array(leaf) for leaf in self._structure.leaves_of(value, self._first)]
        #: Of the leaves, in the structure's order: where they are, and which are arrays.
        self._places = list(self._structure.places())
        self._is_array = [leaf is not None for leaf in leaves]
        self.fields = tuple(
            Field(f"leaf {number}", leaf.shape, leaf.dtype)
            for number, leaf in enumerate(leaves)
            if leaf is not None
        )
        if not self.fields:
            raise ConfigError(
                f"{describe(sample)} is a {type(value).__name__} without any array or number: return at least one, for "
                "example the label"
            )
        #: Leaves without an array, by slot, row and order of appearance.
        self._other_leaves: dict[int, dict[int, list[Any]]] = {}

    def check(self, value: Any, name: str) -> None:
        """Raise DataError unless a value is like the example. name: of the value."""
        self._store(value, tuple(np.empty((1, *each.shape), each.dtype) for each in self.fields), 0, name)

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> None:
        """Samples are objects, whose bytes lie elsewhere."""

    def decode(
        self,
        load: Load,
        rows: Sequence[int],
        samples: list[int],
        data: list[Any],
        arrays: tuple[NDArray[Any], ...],
        at: Callable[[int], None],
    ) -> list[tuple[int, Exception]]:
        """Copy samples into their rows; see `Decoder`."""
        others = self._other_leaves.setdefault(load.slot, {})
        failed: list[tuple[int, Exception]] = []
        if not self._store_columns(rows, data, arrays, others):
            for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
                try:
                    others[row] = self._store(data[index], arrays, row, self._describe(sample))
                except Exception as error:
                    failed.append((index, _noted(error, self._describe(sample))))
        return failed

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        """Return what a batch is made of, once its arrays hold these rows of the slot."""
        others = self._other_leaves.get(slot, {})
        stacked = iter(arrays)
        listed = ([others[row][which] for row in rows] for which in range(self._is_array.count(False)))
        return self._structure.build(
            next(stacked) if is_array else next(listed) for is_array in self._is_array
        )

    def take(self, slot: int, rows: Sequence[int]) -> Any:
        """See `MovableDecoder`: the leaves that are no arrays, by row."""
        if all(self._is_array):
            return None
        others = self._other_leaves.get(slot, {})
        return [others.pop(row, None) for row in rows]

    def put(self, slot: int, rows: Sequence[int], what: Any) -> None:
        """See `MovableDecoder`."""
        if what is not None:
            others = self._other_leaves.setdefault(slot, {})
            others.update((row, each) for row, each in zip(rows, what, strict=True) if each is not None)

    def _store_columns(
        self,
        rows: Sequence[int],
        data: list[Any],
        arrays: tuple[NDArray[Any], ...],
        others: dict[int, list[Any]],
    ) -> bool:
        """Copy samples leaf by leaf, each for all of them at once; return False where they are not all alike.

        Then their rows may hold anything, and `_store` says which sample is not.
        """
        columns = self._structure.columns(data) if isinstance(rows, range) else None
        if columns is None:
            return False
        first, count = rows[0], len(rows)
        places = iter(arrays)
        lists: list[Sequence[Any]] = []
        for column, is_array in zip(columns, self._is_array, strict=True):
            if not is_array:
                if set(map(type, column)) - _TEXTS and any(map(self._is_number, column)):
                    return False
                lists.append(column)
            elif not self._copy(column, next(places)[first : first + count]):
                return False
        if lists:
            for row in range(count):
                others[first + row] = [column[row] for column in lists]
        return True

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
        return len(kinds) == 1 and self._copy_leaves(column, place)

    def _store(self, value: Any, arrays: tuple[NDArray[Any], ...], row: int, name: str) -> list[Any]:
        """Copy a sample's arrays into its row; return the leaves that are none."""
        others: list[Any] = []
        places = iter(arrays)
        leaves = self._structure.leaves_of(value, name)
        for leaf, is_array, where in zip(leaves, self._is_array, self._places, strict=True):
            array = self._as_array(leaf)
            place = next(places) if is_array else None
            if place is None and array is None:
                others.append(leaf)
            elif (
                place is None or array is None or place.shape[1:] != array.shape or place.dtype != array.dtype
            ):
                found = type(leaf).__name__ if array is None else f"{array.dtype}{list(array.shape)}"
                wanted = "no array" if place is None else f"{place.dtype}{list(place.shape[1:])}"
                raise DataError(
                    f"{name}{where} is {found}, and {self._first}{where} is {wanted}: {_alike(leaf)}"
                )
            else:
                place[row] = array
        return others

    def _is_number(self, leaf: Any) -> bool:
        return self._as_array(leaf) is not None


#: What is surely no array.
_TEXTS = {str, bytes, type(None)}


def _alike(leaf: Any) -> str:
    if leaf is None:
        return "a field that not all samples have needs a value in its place, as optional= gives it"
    return "samples of a batch must be alike, so crop, pad or convert them in the data set"


def _noted(error: Exception, name: str) -> Exception:
    error.add_note(f"while loading {name}")
    return error


def numpy_leaf(value: Any) -> NDArray[Any] | None:
    """Return a number or NumPy array as an array; None for anything else."""
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "biufc" else None
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return np.asarray(value)
    return None
