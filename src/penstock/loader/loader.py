"""The loader for users of NumPy: batches as arrays."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from penstock.loader.base import BaseLoader
from penstock.loader.dataset import numpy_leaf


class Loader(BaseLoader[Any]):
    """Batches as NumPy arrays, the large ones over the staging buffer without a copy.

    A folder gives tuples of images, [batch, channels, height, width] or channels last, of the chosen dtype
    (bfloat16 as its bits in uint16), and labels, int64[batch], -1 where there is none. A data set gives the
    structure of its samples with an array in the place of each array or number. See `BaseLoader` for the rest.

    A slot is filled again when nothing refers to its arrays any more: copy the images that you keep. Arrays of less
    than a 64th of a sample, as labels are next to images, are copies already.
    """

    def _present(self, batch: Any) -> Any:
        return batch

    @staticmethod
    def _as_array(leaf: Any) -> NDArray[Any] | None:
        return numpy_leaf(leaf)
