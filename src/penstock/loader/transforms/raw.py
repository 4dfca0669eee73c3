"""Stored bytes that are numbers already: nothing is decoded, a group is copied by one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.loader.transforms.draws import Draws
from penstock.loader.transforms.stages import Scratch, Stage, Value
from penstock.loader.transforms.steps import DecodeRaw


def raw_stage(step: DecodeRaw) -> Stage:
    """Return the stage of a `DecodeRaw`: from a bytearray to an array over it."""
    dtype = np.dtype(step.dtype)
    wanted = None if step.shape is None else math.prod(step.shape) * dtype.itemsize

    def run(value: Value, draws: Draws, index: int, scratch: Scratch) -> Value:
        if wanted is None and len(value) % dtype.itemsize:
            raise DataError(
                f"{len(value):,} bytes are not whole numbers of {step.dtype}: check dtype in {step}"
            )
        if wanted is not None and len(value) != wanted:
            raise DataError(
                f"{len(value):,} bytes, and {step} takes {wanted:,}: name the files of another size in a source of "
                "their own, or correct dtype or shape"
            )
        array = np.frombuffer(value, dtype)
        return array if step.shape is None else array.reshape(step.shape)

    return run


def place_of(rows: range, out: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of some rows of a slot, one row behind the other. out: [batch, *shape of a sample]."""
    return out[rows.start : rows.stop].reshape(-1).view(np.uint8)


def write_group(
    data: Sequence[NDArray[np.uint8]], stored: np.dtype[Any], out: NDArray[Any], rows: Sequence[int]
) -> list[int]:
    """Write stored numbers into their rows of a slot; return the indices of those of another size.

    data: of each sample, as stored: uint8[bytes]. stored: the type of the numbers there.
    rows: of each sample, its place in `out`, [batch, *shape of a sample]. What lies in its place already (see
        `place_of`) stays there.
    """
    places = out.reshape(len(out), -1)
    nbytes = places.shape[1] * stored.itemsize
    if isinstance(rows, range) and set(map(len, data)) == {nbytes}:
        place = places[rows.start : rows.stop].reshape(-1)
        if stored == out.dtype:
            place = place.view(np.uint8)
            if not np.may_share_memory(data[0], place):
                np.concatenate(data, out=place)
        else:
            np.concatenate([each.view(stored) for each in data], out=place, casting="unsafe")
        return []
    fitting = [index for index, each in enumerate(data) if len(each) == nbytes]
    for index in fitting:
        places[rows[index]] = data[index].view(stored)
    return sorted(set(range(len(rows))) - set(fitting))
