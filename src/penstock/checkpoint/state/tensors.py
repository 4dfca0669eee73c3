"""A tensor as a snapshot sees it: a name, a type, a shape, and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.state.dtypes import DType

#: One-dimensional bytes.
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Box:
    """Which part of a larger tensor, spread over ranks, a tensor is.

    whole: shape of the larger one. offsets: of this part's first number in it, per dimension; the part's own shape
        is the tensor's.
    """

    whole: tuple[int, ...]
    offsets: tuple[int, ...]


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
