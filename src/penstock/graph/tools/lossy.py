"""The lossy 16-bit form in which float32 values may be sent: their upper half. What is lost is filled with zeros.

Source: Abadi et al. 2015, section 5.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.graph.errors import MismatchError


def to_upper_half(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper 16 bits of each value; a NaN stays a NaN. Raises: MismatchError if these are no float32."""
    array: Any = np.asarray(values)
    if array.dtype != np.float32:
        raise MismatchError(f"the values are {array.dtype}; only float32 is sent in half")
    upper = (array.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    # The bits that make it a NaN may be among those that go: then one of those that stay is set.
    halves: NDArray[np.uint16] = np.where(np.isnan(array), upper | np.uint16(0x40), upper).astype(np.uint16)
    return halves


def from_upper_half(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 values whose lower 16 bits are zero."""
    return (np.asarray(halves, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
