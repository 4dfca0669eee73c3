"""The state that the ranks of the tests' jobs save, as one process sees it whole, and each rank's part of it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from penstock.checkpoint.state.flatten import Shard

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
#: Layers of different size, none of which dominates.
LAYERS = {"a": 40_000, "b": 30_000, "c": 30_000, "d": 20_000, "e": 20_000, "f": 10_000, "g": 10_000, "h": 1}
ROWS, COLUMNS = 1003, 140  # more than one block of 128 Ki values


@functools.cache
def arrays_of(step: int) -> Arrays:
    """Return the arrays after a step: a little changed by each, as a training does. They are not to be written."""
    random = np.random.default_rng([7, step])
    if step == 0:
        shapes: dict[str, tuple[int, ...]] = {name: (length,) for name, length in LAYERS.items()}
        shapes |= {"rows": (ROWS, COLUMNS), "columns": (COLUMNS, ROWS)}
        arrays = {name: 0.05 * random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    else:
        arrays = {
            name: array + 1e-5 * random.standard_normal(array.shape, np.float32)
            for name, array in arrays_of(step - 1).items()
        }
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return where a rank's part of a dimension begins and ends; parts differ, and the last may be empty."""
    step = -(-length // size) + 1
    return min(length, rank * step), min(length, (rank + 1) * step)


def part_of(array: Any, rank: int, size: int, dimension: int) -> Any:
    """Return a rank's part of an array, as a view."""
    begin, end = bounds(array.shape[dimension], rank, size)
    return array[(slice(None),) * dimension + (slice(begin, end),)]


def shard_of(array: Any, rank: int, size: int, dimension: int) -> Shard:
    """Return a rank's part of an array, cut along a dimension."""
    offsets = [0] * array.ndim
    offsets[dimension] = bounds(array.shape[dimension], rank, size)[0]
    return Shard(part_of(array, rank, size, dimension), array.shape, tuple(offsets))


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    """Return what a rank holds: layers as all do, rows and columns in parts."""
    arrays = arrays_of(step)
    model: dict[str, Any] = {name: arrays[name] for name in LAYERS}
    model["rows"] = shard_of(arrays["rows"], rank, size, 0)
    model["columns"] = shard_of(arrays["columns"], rank, size, 1)
    return {"model": model, "step": step, "rates": [0.1, 0.2]}


def own_of(step: int, rank: int) -> dict[str, Any]:
    """Return what a rank has for itself."""
    return {"rank": rank, "noise": np.random.default_rng([step, rank]).bytes(2000)}
