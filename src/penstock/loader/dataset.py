"""Somebody's map-style data set: threads call it, and copy what it returns into the slot."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.flow.staging import ROW, Field
from penstock.flow.work import Brought, Failed, Request
from penstock.loader.asked import ListCode, SampleCode, list_code
from penstock.loader.beside import Beside, lists
from penstock.loader.gather import find
from penstock.loader.global_draws import keeping_global_states
from penstock.loader.optional import Defaults
from penstock.loader.probing import from_first
from penstock.loader.reused import Reused
from penstock.loader.source_samples import describe_sample, kind_of, made_by
from penstock.loader.structure import learn_structure, unequal_advice
from penstock.loader.unequal import Joined, Unequal
from penstock.policy import Load
from penstock.store.calls import Calls

T = TypeVar("T")


class MapDataset(Protocol):
    """What PyTorch calls a map-style data set.

    `__getitem__` takes a sample's number, and what else it asks for by name, see `penstock.loader.asked`.
    """

    def __len__(self) -> int: ...

    @property
    def __getitem__(self) -> Callable[..., Any]: ...


#: Of how many Loads the first sample is copied, to see whether it changes while the others are made.
_WATCHED = 4

#: What the generators of a data set are for; another text is other numbers.
DRAWS = "data set"


class DatasetFetcher:
    """A `Fetcher` of samples that a data set's own code makes.

    seed: of the generators that `__getitem__` and `__getitems__` ask for, see `penstock.loader.asked`.
    optional: what samples get that lack a field.
    Raises: ConfigError for a `__getitems__` that asks for what `__getitem__` does not.
    """

    def __init__(self, dataset: MapDataset, seed: int = 0, optional: Defaults | None = None) -> None:
        self.dataset, self._seed = dataset, seed
        self._optional = optional or None
        self._get = SampleCode(dataset.__getitem__, seed, DRAWS)
        #: Makes a sample of a number alone; None where there is more to do.
        self._plain = None if self._get.asks or self._optional else dataset.__getitem__
        #: Libraries from whose global generators the first samples drew.
        self.global_draws: set[str] = set()
        #: Whether no sample has been looked at.
        self._is_first = True
        #: Calls of which it is looked at if samples change after they were returned.
        self._watched = _WATCHED
        #: PyTorch's protocol: a list of numbers to a list of samples.
        self._get_list: ListCode | None = None
        if (get_list := getattr(dataset, "__getitems__", None)) is not None:
            self._get_list = list_code(get_list, self._get, seed, DRAWS, self.place)

    def __reduce__(self) -> Any:
        """Pickle what it was made of: a worker process has a copy."""
        return DatasetFetcher, (self.dataset, self._seed, self._optional)

    @property
    def draws(self) -> bool:
        """Whether the data set asks for generators."""
        return "rng" in self._get.asks

    @property
    def asks(self) -> frozenset[str]:
        """What `__getitem__` asks for beside the number of a sample."""
        return self._get.asks

    @property
    def place(self) -> str:
        return kind_of(self.dataset)

    def describe(self, sample: int) -> str:
        return describe_sample(self.dataset, sample)

    def made_by(self, sample: int) -> str:
        """See `penstock.loader.source_samples.made_by`."""
        return made_by(self.dataset, sample)

    def example(self, samples: Iterable[int], calls: Calls, *, on_error_raise: bool) -> tuple[int, Any]:
        """Return the first of some samples that can be had, with its number. calls: what it is fetched with.

        Before the training begins and threads are started: nobody else draws from global generators meanwhile.
        """

        def look(sample: int) -> tuple[int, Any]:
            made: list[Any] = []
            try:
                # In this thread: a call that hangs and ends later must not set them back then.
                self.global_draws |= keeping_global_states(
                    lambda: made.append(
                        calls.one(self.describe(sample), lambda: self._get(sample, 0, sample))
                    )
                )
                return sample, self._filled_first(sample, made[0], calls.report)
            except Exception as error:
                error.add_note(f"while asking for {self.describe(sample)}, to see its shape")
                raise

        return from_first(samples, look, on_error_raise=on_error_raise)

    def _filled_first(self, sample: int, value: Any, report: Callable[[str], None]) -> Any:
        """Return a sample with its defaults; report of the first that is looked at which fields it does not have."""
        if self._optional is None:
            return value
        if self._is_first and (added := self._optional.added_to(value)):
            has = f"; it has {', '.join(map(repr, value))}" if isinstance(value, Mapping) else ""
            report(
                f"the first sample, {self.describe(sample)}, does not have {', '.join(map(repr, added))}, which "
                f"optional= gives it{has}"
            )
        self._is_first = False
        return self._optional.fill(value)

    def fetch(self, request: Request) -> list[Any]:
        """Have the data set make samples, all by one call where it has `__getitems__`; see `Fetcher`."""
        samples, epoch = request.samples, request.epoch
        wrong = ""
        if self._get_list is not None and len(samples) > 1:
            request.at(samples[0])
            try:
                listed = list(self._get_list(samples, epoch))
                if self._optional is not None:
                    listed = list(map(self._optional.fill, listed))
                if len(listed) == len(samples):
                    return listed
                wrong = f"returns {len(listed)} samples"
            except Exception as error:  # one by one: whose error it is shows then
                wrong = f"raises {error!r:.200}"
        make = self._plain or partial(self._one, epoch=epoch)
        following = request.one_by_one(samples)
        values: list[Any] = []
        content: list[bytes] = []
        if self._watched > 0 and len(samples) > 1:
            self._watched -= 1
            self._add(values, islice(following, 1), samples, make)
            content = content_of(values[0])
        self._add(values, following, samples, make)
        if content and content != content_of(values[0]):
            raise DataError(
                f"{self.describe(samples[0])} changed after it was returned, while another sample was made: those of a "
                "batch are there at once, so return arrays that are not written again, such as buffer.copy()"
            )
        if wrong and Failed not in set(map(type, values)):
            # It fails where no sample does: each would be made twice, in every Load.
            self._get_list = None
            warnings.warn(
                f"{self.place}.__getitems__ {wrong} for {len(samples)} numbers, and __getitem__ works for each of "
                "them: samples are asked for one by one from here on",
                RuntimeWarning,
                stacklevel=2,
            )
        return values

    def _add(
        self, values: list[Any], following: Iterator[int], samples: list[int], make: Callable[[int], Any]
    ) -> None:
        """Add what is made of the samples that follow, or `Failed`, to the values of those before them."""
        while len(values) < len(samples):
            try:
                for sample in following:  # a call from here takes 0.1 us less than one by `map`
                    values.append(make(sample))
                return
            except Exception as error:
                values.append(Failed(_noted(error, self.describe(samples[len(values)]))))

    def _one(self, sample: int, epoch: int) -> Any:
        value = self._get(sample, epoch, sample)
        return value if self._optional is None else self._optional.fill(value)

    def take_lost(self) -> Sequence[tuple[float, float]]:
        """What is tried again is the data set's own matter."""
        return ()

    def ended_tiers(self) -> Sequence[int]:
        """There are none."""
        return ()

    def evict(self, ids: NDArray[np.int64]) -> None:
        """Nothing is kept."""

    def end_waits(self) -> None:
        """So is what it waits for."""

    def close(self) -> None:
        """Nothing is held."""


def content_of(value: Any) -> list[bytes]:
    """Return the bytes of a sample's arrays; none where they cannot be had."""
    try:
        leaves = learn_structure(value).leaves_of(value, "")
        return [np.asarray(leaf).tobytes() for leaf in leaves if hasattr(leaf, "__array__")]
    except Exception:  # as of tensors on a device
        return []


def copies_nothing(leaves: Sequence[Any], place: NDArray[Any]) -> bool:
    """Leave all copying to the caller."""
    return False


def made_by_itself(sample: int) -> str:
    """Name no function that makes samples of a data set's."""
    return ""


class SampleDecoder:
    """A `Decoder` of samples that are made already: arrays and numbers in tuples, lists, mappings or dataclasses.

    An example shows the structure. Arrays and numbers get a place in the slot, but for those of unequal fields, which
    are joined in arrays of their own; anything else (a path, a string) is handed over in a list. Batches have the
    structure that PyTorch's default_collate gives them.

    example: a sample, and its number. describe: names one, in errors. made_by: names the function that made it; "" for
        none.
    as_array: turns a leaf into an array without a copy where it can.
    copy_leaves: copies leaves, all of one type, into an array that has a row for each, if it can at once and they are
        as this wants them; returns whether it did.
    unequal: fields whose arrays differ in length. more: samples that show how long they are.
    Raises: ConfigError for an example without any array, number or text, or that has no such field.
    """

    def __init__(
        self,
        example: tuple[int, Any],
        describe: Callable[[int], str],
        as_array: Callable[[Any], NDArray[Any] | None],
        copy_leaves: Callable[[Sequence[Any], NDArray[Any]], bool] = copies_nothing,
        unequal: Unequal = MappingProxyType({}),
        more: Sequence[Any] = (),
        made_by: Callable[[int], str] = made_by_itself,
    ) -> None:
        sample, value = example
        self._describe, self._made_by = describe, made_by
        self._copy_leaves = copy_leaves
        self._as_array = as_array
        self._first = describe(sample)
        self._structure = learn_structure(value, unequal)
        #: Of the leaves, in the structure's order: where they are, their names, and which are arrays in the slot.
        self._places, self._names = list(self._structure.places()), list(self._structure.names())
        examples = [list(self._structure.leaves_of(each, self._first)) for each in (value, *more)]
        memory = Reused()
        #: Those of unequal fields; None for others.
        self._joined = [
            Joined(leaves, name, unequal[name], as_array, memory) if name in unequal else None
            for name, leaves in zip(self._names, zip(*examples, strict=True), strict=True)
        ]
        _check_names(unequal, self._names)
        leaves = [
            None if joined else as_array(leaf) for leaf, joined in zip(examples[0], self._joined, strict=True)
        ]
        self._is_array = [leaf is not None for leaf in leaves]
        placed = (
            Field(f"leaf {number}", leaf.shape, leaf.dtype)
            for number, leaf in enumerate(leaves)
            if leaf is not None
        )
        is_text = any(isinstance(leaf, str | bytes) for leaf in examples[0])
        if not any(self._is_array) and not any(self._joined) and not is_text:
            by = f", which {name} made," if (name := made_by(sample)) else ""
            raise ConfigError(
                f"{describe(sample)}{by} is a {type(value).__name__} without any array, number or text: return at "
                "least one, for example the label"
            )
        self.fields = tuple(placed) or (ROW,)
        #: The leaves that are not in the slot.
        self.beside = Beside(
            [joined.join_steps if joined else lists for joined in self._beside(self._joined)], memory
        )

    def _beside(self, leaves: Iterable[T]) -> list[T]:
        """Return those of something for each leaf that are for leaves beside the slot."""
        return [leaf for leaf, is_array in zip(leaves, self._is_array, strict=True) if not is_array]

    @property
    def beside_bytes(self) -> int:
        """About what a sample takes beside the slot."""
        return sum(joined.sample_bytes for joined in self._joined if joined)

    def check(self, value: Any, name: str) -> None:
        """Raise DataError unless a value is like the example. name: of the value."""
        self._store(value, tuple(np.empty((1, *each.shape), each.dtype) for each in self.fields), 0, name)

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> None:
        """Samples are objects, whose bytes lie elsewhere."""

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[NDArray[Any], ...], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """Copy samples into their rows; see `Decoder`."""
        rows, ids, data, _ = brought
        failed: list[tuple[int, Exception]] = []
        if isinstance(rows, range) and self._store_columns(load, rows, data, arrays):
            return failed
        stored: dict[int, list[Any]] = {}
        for index, (row, sample) in enumerate(zip(rows, ids.tolist(), strict=True)):
            try:
                stored[row] = self._store(data[index], arrays, row, self._describe(sample))
            except Exception as error:
                if by := self._made_by(sample):
                    error.add_note(f"{by} made it")
                failed.append((index, _noted(error, self._describe(sample))))
        if not all(self._is_array):
            self.beside.put_rows(load, list(stored), list(stored.values()))
        return failed

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        """Return what a batch is made of, once its arrays hold these rows of the slot."""
        stacked = iter(arrays)
        if all(self._is_array):
            return self._structure.build(stacked)
        beside = iter(self.beside.of(slot, rows))
        return self._structure.build(
            next(stacked) if is_array else next(beside) for is_array in self._is_array
        )

    def apart(self) -> SampleDecoder:
        """See `MovableDecoder`."""
        other = copy.copy(self)
        other.beside = copy.copy(self.beside)  # which begins empty
        return other

    def take(self, slot: int, rows: Sequence[int]) -> Any:
        """See `MovableDecoder`: what samples have beside the slot."""
        return self.beside.take(slot)

    def put(self, slot: int, rows: Sequence[int], what: Any) -> None:
        """See `MovableDecoder`."""
        self.beside.put(slot, what)

    def _store_columns(
        self, load: Load, rows: range, data: Sequence[Any], arrays: tuple[NDArray[Any], ...]
    ) -> bool:
        """Copy samples leaf by leaf, each for all of them at once; return False where they are not all alike.

        Then their rows may hold anything, and `_store` says which sample is not.
        """
        columns = self._structure.columns(data)
        if columns is None:
            return False
        first, count = rows[0], len(rows)
        places = iter(arrays)
        beside: list[Any] = []
        for (column, kinds), is_array, joined in zip(columns, self._is_array, self._joined, strict=True):
            if is_array:
                if not self._copy(column, kinds, next(places)[first : first + count]):
                    return False
            elif joined:
                if (pieces := joined.pieces(column)) is None:
                    return False
                beside.append(pieces)
            elif kinds - _TEXTS and any(map(self._is_number, column)):
                return False
            else:
                beside.append(column)
        if beside:
            unequal = self._beside(self._joined)
            self.beside.put_columns(load, rows, beside, lambda sample: list(map(_kept, sample, unequal)))
        return True

    def _copy(self, column: Sequence[Any], kinds: set[type], place: NDArray[Any]) -> bool:
        """Copy a leaf of several samples; return False where it is not as the example's. kinds: its types."""
        kind = next(iter(kinds)) if len(kinds) == 1 else None
        if (dtype := _NUMBERS.get(kind)) is not None:
            if place.dtype != dtype or place.ndim > 1:
                return False
            try:
                place[:] = np.fromiter(column, dtype, len(column))
            except OverflowError:  # one by one: it may say what is wrong
                return False
            return True
        if kind is np.ndarray:
            if (found := find(column, place.dtype, place.shape[1:])) is not None:
                found.copy([slice(0, len(column))], [place])
                return True
            if any(leaf.dtype != place.dtype or leaf.shape != place.shape[1:] for leaf in column):
                return False
            np.stack(column, out=place)
            return True
        return kind is not None and self._copy_leaves(column, place)

    def _store(self, value: Any, arrays: tuple[NDArray[Any], ...], row: int, name: str) -> list[Any]:
        """Copy a sample's arrays into its row; return the leaves that belong beside it."""
        if value is None:
            raise DataError(
                f'{name} is None: return a sample, or raise an error and leave it out with on_error="skip"'
            )
        beside: list[Any] = []
        places = iter(arrays)
        leaves = self._structure.leaves_of(value, name)
        for number, (leaf, is_array, joined) in enumerate(
            zip(leaves, self._is_array, self._joined, strict=True)
        ):
            place = next(places) if is_array else None
            array = joined.piece(leaf) if joined else self._as_array(leaf)
            if joined and array is not None:
                beside.append(_kept(array, joined))
            elif not joined and place is None and array is None:
                beside.append(leaf)
            elif place is not None and array is not None and _are_alike(place, array):
                place[row] = array
            else:
                wanted = joined.wanted if joined else "no array" if place is None else _described(place[0])
                raise DataError(self._difference(leaf, number, wanted, name))
        return beside

    def _difference(self, leaf: Any, number: int, wanted: str, name: str) -> str:
        """Describe how a leaf is unlike that of the example. number: of the leaf. name: of its sample."""
        where, array = self._places[number], self._as_array(leaf)
        found = type(leaf).__name__ if array is None else _described(array)
        if leaf is None:
            advice = "a field that not all samples have needs a value in its place, as optional= gives it"
        elif (
            array is not None
            and wanted.partition("[")[0] == str(array.dtype)
            and array.ndim == wanted.count(",") + 1
        ):
            advice = unequal_advice(self._names[number])
        else:
            advice = "samples of a batch must be alike, so convert them in the data set"
        return f"{name}{where} is {found}, and {self._first}{where} is {wanted}: {advice}"

    def _is_number(self, leaf: Any) -> bool:
        return self._as_array(leaf) is not None


#: What arrays of Python's numbers are.
_NUMBERS: dict[type | None, np.dtype[Any]] = {
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    bool: np.dtype(np.bool_),
}
#: What is surely no array.
_TEXTS = {str, bytes, type(None)}


def _kept(leaf: Any, joined: Joined | None) -> Any:
    """Return what may be kept of a leaf that its data set may change: an array's copy."""
    return leaf if joined is None else leaf.copy()


def _are_alike(place: NDArray[Any], array: NDArray[Any]) -> bool:
    return place.shape[1:] == array.shape and place.dtype == array.dtype


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _check_names(unequal: Unequal, names: Sequence[str]) -> None:
    for name, how in unequal.items():
        if name not in names:
            given = "ragged" if how is None else "padded"
            known = ", ".join(map(repr, names)) if names != [""] else "no fields, which is called ''"
            raise ConfigError(f"{given} names {name!r}, and samples have {known}")


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
