"""Bytes of samples that lie one behind the other: one object for a group, where a view of each would take longer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray


class Pieces(Sequence[NDArray[np.uint8]]):
    """Samples that all could be had; an element is the view of one.

    memory: uint8[...]. begins: int64[samples + 1], ascending: sample k is memory[begins[k]:begins[k + 1]].
    each_bytes: that each has, where that is known.
    was_resident: whether they were copied from memory: whoever brought them waited for no store.
    """

    __slots__ = ("begins", "each_bytes", "memory", "was_resident")

    def __init__(
        self,
        memory: NDArray[np.uint8],
        begins: NDArray[np.int64],
        *,
        each_bytes: int | None = None,
        was_resident: bool = False,
    ) -> None:
        self.memory, self.begins = memory, begins
        self.each_bytes, self.was_resident = each_bytes, was_resident

    def __len__(self) -> int:
        return self.begins.size - 1

    @overload
    def __getitem__(self, index: int) -> NDArray[np.uint8]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.uint8]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.uint8] | list[NDArray[np.uint8]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self.memory[self.begins[place] : self.begins[place + 1]]

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        memory = self.memory
        return (memory[begin:end] for begin, end in pairwise(self.begins.tolist()))

    @property
    def joined(self) -> NDArray[np.uint8]:
        """The bytes of all of them."""
        return self.memory[self.begins[0] : self.begins[-1]]

    def are_all(self, nbytes: int) -> bool:
        """Return whether each has so many bytes."""
        each_bytes = self.each_bytes
        return bool((np.diff(self.begins) == nbytes).all()) if each_bytes is None else each_bytes == nbytes

    def clear(self) -> None:
        """Refer to the memory no longer."""
        self.memory, self.begins = self.memory[:0], self.begins[:1]
