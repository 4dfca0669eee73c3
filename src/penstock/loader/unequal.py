"""Fields whose arrays differ in length from sample to sample: end to end with offsets, or padded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.gather import Found, find
from penstock.loader.reused import Reused
from penstock.units import is_integer


@dataclass(frozen=True, slots=True)
class Ragged:
    """A batch of arrays of unequal length, end to end; a sequence of these arrays.

    values: [sum of lengths, ...]. offsets: int64[batch + 1], where each sample begins, and the end.

    >>> batch = Ragged(np.array([7, 8, 9]), np.array([0, 2, 2, 3]))
    >>> [sample.tolist() for sample in batch], batch.lengths.tolist(), batch.padded(-1).tolist()
    ([[7, 8], [], [9]], [2, 0, 1], [[7, 8], [-1, -1], [9, -1]])
    """

    values: Any
    offsets: Any

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Any:
        """Return a sample's part of the values, without a copy. Raises: IndexError beyond the last one."""
        at = range(len(self))[index]
        return self.values[int(self.offsets[at]) : int(self.offsets[at + 1])]

    @property
    def lengths(self) -> Any:
        """int64[batch]."""
        return self.offsets[1:] - self.offsets[:-1]

    def padded(self, value: float = 0) -> Any:
        """Return [batch, longest, ...], with a value behind shorter samples: a tensor of PyTorch's, or of NumPy."""
        shape = (len(self), int(max(self.lengths, default=0)), *self.values.shape[1:])
        new_full = getattr(self.values, "new_full", None)
        full = np.full(shape, value, self.values.dtype) if new_full is None else new_full(shape, value)
        for index in range(len(self)):
            sample = self[index]
            full[index, : len(sample)] = sample
        return full


@dataclass(frozen=True, slots=True)
class Padded:
    """A batch of padded arrays, with what is padding: of a field with `Padding(mask=True)`.

    values: [batch, longest, ...]. mask: bool of the same shape, True where samples have a value.
    """

    values: Any
    mask: Any


@dataclass(frozen=True, slots=True)
class Padding:
    """How samples of a field are padded: behind their end, to the largest of the batch in each dimension.

    value: that stands where a sample has none. multiple_of: lengths are rounded up to a multiple of it; an integer is
        for the first dimension, a tuple for each. mask: batches have a `Padded` in place of the array.
    Raises: ConfigError naming the argument.
    """

    value: float = 0
    multiple_of: int | tuple[int, ...] = 1
    mask: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.value, (int, float, np.number, np.bool_)):
            raise ConfigError(
                f"padding is {self.value!r:.80}; it is the number that stands behind shorter samples"
            )
        each = self.multiple_of if isinstance(self.multiple_of, tuple) else (self.multiple_of,)
        if not each or not all(is_integer(one) and one > 0 for one in each):
            raise ConfigError(
                f"multiple_of is {self.multiple_of!r}; it is an integer of 1 or more, or a tuple of them"
            )


#: Rows that are padded to at most so many numbers are written all at once, by a mask; longer ones one by one.
_FEW = 64

#: By the name of a field: how it is padded, None where its arrays follow each other.
Unequal = Mapping[str, Padding | None]


def unequal_fields(ragged: object, padded: object) -> dict[str, Padding | None]:
    """Return what a loader's `ragged=` and `padded=` say of fields, by name.

    Raises: ConfigError naming the argument.
    """
    if isinstance(ragged, (str, bytes)) or not isinstance(ragged, Sequence):
        raise ConfigError(f'ragged is {ragged!r:.80}; it is a list of names of fields, such as ["tokens"]')
    if not isinstance(padded, Mapping | None):
        raise ConfigError(
            f'padded is {padded!r:.80}; it maps names of fields to what they are padded with, as in {{"tokens": 0}}'
        )
    found: dict[str, Padding | None] = {str(name): None for name in ragged}
    for name, how in (padded or {}).items():
        if str(name) in found:
            raise ConfigError(f"{name!r} is in ragged and in padded, or twice in one: a field is one of both")
        found[str(name)] = how if isinstance(how, Padding) else Padding(how)
    return found


class Joined:
    """The arrays of one field, which differ in length, and what becomes of those of a batch.

    examples: of one or more samples. name: of the field, for messages. how: None for `Ragged`.
    as_array: turns what a sample has into an array; None for what is neither array nor number.
    memory: makes the padded arrays of batches, which are about as large as each other.
    Raises: ConfigError if the first example is no array, has no dimension, or cannot be padded with the value.
    """

    def __init__(
        self,
        examples: Sequence[Any],
        name: str,
        how: Padding | None,
        as_array: Callable[[Any], NDArray[Any] | None],
        memory: Reused | None = None,
    ) -> None:
        self._as_array = as_array
        self._memory = memory or Reused()
        self._how = how
        # Of an empty list nobody knows the type.
        first = next((each for each in examples if not isinstance(each, list) or each), examples[0])
        array = self._array_of(first)
        given = f"{name!r} is in {'ragged' if how is None else 'padded'}"
        if array is None or not array.ndim:
            raise ConfigError(
                f"{given}, and a sample has a {type(first).__name__} there; it is an array or a list of numbers"
            )
        self._dtype, self._ndim, self._rest = array.dtype, array.ndim, array.shape[1:]
        if how is not None:
            self._value = self._value_of(how.value, given)
            multiples = how.multiple_of if isinstance(how.multiple_of, tuple) else (how.multiple_of,)
            if len(multiples) > self._ndim:
                raise ConfigError(
                    f"{given} with multiple_of={how.multiple_of}, and its arrays have {self._ndim} dimensions: give as "
                    "many numbers at most"
                )
            self._multiples = np.array([*multiples, *(1 for _ in range(self._ndim - len(multiples)))])
        #: About what a sample takes in a batch.
        self.sample_bytes = self._expected_bytes(
            [each for each in map(self.piece, examples) if each is not None]
        )

    @property
    def wanted(self) -> str:
        """Describe what a sample should have."""
        sizes = ["any length"] * self._ndim if self._how else ["any length", *map(str, self._rest)]
        return f"{self._dtype}[{', '.join(sizes)}]"

    def piece(self, leaf: Any) -> NDArray[Any] | None:
        """Return what a sample has as an array, over its memory where it can be; None if it is unlike the example."""
        array = leaf if type(leaf) is np.ndarray else self._array_of(leaf)
        if array is None:
            return None
        if not array.size and isinstance(leaf, (list, tuple)):
            array = np.empty((0,) * self._ndim if self._how else (0, *self._rest), self._dtype)
        is_like = array.dtype == self._dtype and array.ndim == self._ndim
        return array if is_like and (self._how or array.shape[1:] == self._rest) else None

    def pieces(self, leaves: Sequence[Any]) -> Found | list[NDArray[Any]] | None:
        """Return what several samples have; None if one is unlike the example."""
        if self._how is None or self._ndim == 1:
            found = find(leaves, self._dtype, (0, *self._rest), is_free=True)
            if found is not None:
                return found
        pieces = [self.piece(leaf) for leaf in leaves]
        return None if any(each is None for each in pieces) else pieces  # type: ignore[return-value]

    def join_steps(self, pieces: Found | Sequence[NDArray[Any]], steps: Sequence[slice]) -> list[Any]:
        """Return what batches have of their samples, see `join`. steps: where in pieces those of each batch are."""
        if not isinstance(pieces, Found):
            return [self.join(pieces[step]) for step in steps]
        if self._how is None:
            ends = _offsets(pieces.lengths)
            made = [self._ragged(ends[step.start : step.stop + 1] - ends[step.start]) for step in steps]
            pieces.copy(steps, [each.values for each in made])
            return made
        counts = [pieces.lengths[step] for step in steps]
        rows = [
            self._memory.empty((each.size, *self._largest(each[:, None])), self._dtype) for each in counts
        ]
        pieces.copy(steps, rows, self._value[None])
        if not self._how.mask:
            return rows
        return [
            Padded(values, np.arange(values.shape[1]) < each[:, None])
            for values, each in zip(rows, counts, strict=True)
        ]

    def join(self, pieces: Sequence[NDArray[Any]]) -> Any:
        """Return what a batch has of its samples: `Ragged`, a padded array or `Padded`. The arrays are new ones."""
        if self._how is None:
            made = self._ragged(_offsets(np.fromiter(map(len, pieces), np.int64, len(pieces))))
            if pieces:
                np.concatenate(pieces, out=made.values)
            return made
        if self._ndim == 1:
            return self._padded_rows(pieces)
        shapes = np.array([piece.shape for piece in pieces], np.int64).reshape(len(pieces), self._ndim)
        values = np.full((len(pieces), *self._largest(shapes)), self._value, self._dtype)
        mask = np.zeros(values.shape, np.bool_) if self._how.mask else None
        for index, piece in enumerate(pieces):
            there: Any = index, *map(slice, piece.shape)
            values[there] = piece
            if mask is not None:
                mask[there] = True
        return values if mask is None else Padded(values, mask)

    def _ragged(self, offsets: NDArray[np.int64]) -> Ragged:
        """Return a batch of samples that begin and end there, whose values nobody has written."""
        return Ragged(np.empty((int(offsets[-1]), *self._rest), self._dtype), offsets)

    def _padded_rows(self, pieces: Sequence[NDArray[Any]]) -> Any:
        """The same for arrays of one dimension."""
        assert self._how is not None, "those that are padded"
        counts = list(map(len, pieces))
        (longest,) = self._largest(np.array(counts, np.int64)[:, None])
        values = np.full((len(pieces), longest), self._value, self._dtype)
        if not self._how.mask and longest > _FEW:
            for row, piece, count in zip(values, pieces, counts, strict=True):
                row[:count] = piece
            return values
        mask = np.arange(longest) < np.array(counts, np.int64)[:, None]
        if pieces:
            values[mask] = np.concatenate(pieces)
        return Padded(values, mask) if self._how.mask else values

    def _largest(self, shapes: NDArray[np.int64]) -> tuple[int, ...]:
        """Return the dimensions that samples are padded to. shapes: int64[samples, dimensions]."""
        largest = shapes.max(axis=0, initial=0)
        return tuple((-(-largest // self._multiples) * self._multiples).tolist())

    def _array_of(self, leaf: Any) -> NDArray[Any] | None:
        if isinstance(leaf, (list, tuple)):
            try:
                array = np.asarray(leaf)
            except ValueError:  # lists of unequal length
                return None
            return array if array.dtype.kind in "biufc" else None
        return self._as_array(leaf)

    def _value_of(self, value: float, given: str) -> Any:
        """Return what padding is as the arrays have it."""
        if (
            self._dtype.names is not None
        ):  # bits of numbers that NumPy does not know: only those of 0 are known here
            found, is_same = np.zeros((), self._dtype), value == 0
        else:
            with np.errstate(all="ignore"):
                found = np.asarray(value).astype(self._dtype)
            is_same = self._dtype.kind in "fc" or bool(found == value)
        if not is_same:
            raise ConfigError(
                f"{given} with {value!r}, and its arrays are {self._dtype}: give a number of that type"
            )
        return found

    def _expected_bytes(self, pieces: Sequence[NDArray[Any]]) -> int:
        if not pieces:
            return 0
        if self._how is None:
            return sum(piece.nbytes for piece in pieces) // len(pieces) + 8
        item_bytes = self._dtype.itemsize + self._how.mask
        return math.prod(self._largest(np.array([piece.shape for piece in pieces]))) * item_bytes


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where arrays so long begin that follow each other, and the end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=offsets[1:])
    return offsets
