"""Decoded pixels and the memory they live in."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.loader.transforms.geometry import pixel_bytes


class Pixels(NamedTuple):
    """A decoded part of a picture, red, green and blue bytes, row after row."""

    #: uint8[rows * columns * 3 and some to spare], which the kernels may read and ignore.
    storage: NDArray[np.uint8]
    rows: int
    columns: int
    #: Where the part lies in the shrunk picture.
    top: int = 0
    left: int = 0
    #: The picture is shown at 1/shrink of its stored size.
    shrink: int = 1

    @property
    def array(self) -> NDArray[np.uint8]:
        """uint8[rows, columns, 3], a view."""
        return self.storage[: self.rows * self.columns * 3].reshape(self.rows, self.columns, 3)


class Buffer:
    """Space for one decoded picture, reused from sample to sample and grown to the largest so far."""

    def __init__(self) -> None:
        self._storage = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    @property
    def storage(self) -> NDArray[np.uint8]:
        """uint8[nbytes], what there is."""
        return self._storage

    def drop(self) -> None:
        self._storage = np.empty(0, np.uint8)

    @staticmethod
    def bytes_for(rows: int, columns: int) -> int:
        """Return what `take` allocates at most."""
        size = pixel_bytes(rows, columns)
        return size + size // 4

    def take(self, rows: int, columns: int) -> Pixels:
        """Return space for rows x columns pixels, uninitialised; what was taken before is overwritten."""
        if pixel_bytes(rows, columns) > self._storage.size:
            self._storage = np.empty(self.bytes_for(rows, columns), np.uint8)
        return Pixels(self._storage, rows, columns)

    def hold(self, array: NDArray[np.uint8]) -> Pixels:
        """Return a copy of uint8[rows, columns, 3]."""
        pixels = self.take(*array.shape[:2])
        pixels.array[...] = array
        return pixels


def undecodable(what: str) -> DataError:
    """Return what to raise for a picture that cannot be decoded. what: is wrong with it."""
    return DataError(f"{what}; write it again, or take it out")
