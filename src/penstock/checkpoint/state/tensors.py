"""A tensor as a snapshot sees it: a name, a type, a shape, and bytes, in blocks.

A tensor is cut into blocks of `BLOCK_VALUES` values, the last one shorter, wherever it is saved, so that block i of a
snapshot can be the difference to block i of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.state.dtypes import DType

#: One-dimensional bytes.
Bytes = NDArray[np.uint8]
#: Values per block, whatever their type.
BLOCK_VALUES = 1 << 17


@dataclass(frozen=True, slots=True)
class Box:
    """Which part of a larger tensor, spread over ranks, a tensor is.

    whole: shape of the larger one. offsets: of this part's first number in it, per dimension; the part's own shape
        is the tensor's.
    """

    whole: tuple[int, ...]
    offsets: tuple[int, ...]

    def holds(self, shape: Sequence[int]) -> bool:
        """Return whether a part of that shape lies within the larger tensor."""
        if not len(self.whole) == len(self.offsets) == len(shape):
            return False
        places = zip(self.offsets, shape, self.whole, strict=True)
        return all(0 <= offset <= offset + length <= size for offset, length, size in places)


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known of a tensor without its bytes. Two tensors of equal layout can be differences of each other.

    name: path in the state, such as "model/layer.weight"; with the box, unique in a snapshot.
    values: how many numbers there are; 1 for a scalar, 0 for an empty tensor. nbytes: their bytes.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box | None = None

    values: int = field(init=False, compare=False, repr=False)
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Count its numbers and bytes, which are asked for again and again."""
        values = math.prod(self.shape)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "nbytes", values * self.dtype.item_bytes)

    @property
    def whole(self) -> Layout:
        """Return the layout of the tensor that it is a part of, or its own."""
        return self if self.box is None else Layout(self.name, self.dtype, self.box.whole)


class Piece(NamedTuple):
    """Some of a tensor's blocks in a row: all of them, or what of it is in memory now.

    first: number of its first block in the tensor. data: the blocks' bytes.
    """

    layout: Layout
    first: int
    data: Bytes


def count_blocks(layout: Layout) -> int:
    """Return how many blocks a tensor is cut into; none if it is empty."""
    return -(-layout.values // BLOCK_VALUES)


def blocks_of(nbytes: int, dtype: DType) -> Iterable[slice]:
    """Return where a tensor's blocks are in its bytes, in their order."""
    step = BLOCK_VALUES * dtype.item_bytes
    return (slice(begin, min(begin + step, nbytes)) for begin in range(0, nbytes, step))
