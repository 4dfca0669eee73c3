"""Stored bytes that are numbers already: nothing is decoded, a group is copied by one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.flow.pieces import Pieces
from penstock.loader.transforms.draws import Draws
from penstock.loader.transforms.stages import Scratch, Stage, Value
from penstock.loader.transforms.steps import DecodeRaw

#: Numbers that are turned into another type by one call: NumPy would copy all of a group where it overlaps its place.
_WIDENED_AT_ONCE = 1 << 16


def raw_stage(step: DecodeRaw) -> Stage:
    """Return the stage of a `DecodeRaw`: from a bytearray to an array over it."""
    dtype = np.dtype(step.dtype)
    wanted = None if step.shape is None else math.prod(step.shape) * dtype.itemsize

    def run(value: Value, draws: Draws, index: int, scratch: Scratch) -> Value:
        if wanted is None and len(value) % dtype.itemsize:
            raise DataError(
                f"{len(value):,} bytes are no multiple of the size of {step.dtype}: check dtype in {step}"
            )
        if wanted is not None and len(value) != wanted:
            raise DataError(
                f"{len(value):,} bytes, and {step} takes {wanted:,}: name the files of another size in a source of "
                "their own, or correct dtype or shape"
            )
        array = np.frombuffer(value, dtype)
        return array if step.shape is None else array.reshape(step.shape)

    return run


def place_of(stored: np.dtype[Any], out: NDArray[Any], rows: range) -> NDArray[np.uint8]:
    """Return where in a slot the stored numbers of some rows can be read to: the last bytes of these rows.

    stored: their type, of no more bytes than that of `out`, [batch, *shape of a sample].
    """
    place = out[rows.start : rows.stop].reshape(-1)
    return place.view(np.uint8)[place.size * (place.itemsize - stored.itemsize) :]


def write_group(
    data: Sequence[NDArray[np.uint8]] | Pieces, stored: np.dtype[Any], out: NDArray[Any], rows: Sequence[int]
) -> list[int]:
    """Write stored numbers into their rows of a slot; return the indices of those of another size.

    data: of each sample, as stored: uint8[bytes]; where the first lies in the slot, all are where `place_of` has them.
    stored: the type of the numbers there.
    rows: of each sample, its place in `out`, [batch, *shape of a sample].
    """
    places = out.reshape(len(out), -1)
    nbytes = places.shape[1] * stored.itemsize
    if isinstance(rows, range) and isinstance(data, Pieces) and data.are_all(nbytes):
        place, found = places[rows.start : rows.stop].reshape(-1), data.joined.view(stored)
        if stored != out.dtype or not np.may_share_memory(found, place):
            # A part is never written over those behind it (`place_of`); NumPy copies one first that overlaps itself.
            for begin in range(0, place.size, _WIDENED_AT_ONCE):
                place[begin : begin + _WIDENED_AT_ONCE] = found[begin : begin + _WIDENED_AT_ONCE]
        return []
    if isinstance(rows, range) and set(map(len, data)) == {nbytes}:
        place = places[rows.start : rows.stop].reshape(-1)
        is_there = np.may_share_memory(data[0], place)
        if stored != out.dtype and is_there:
            place[:] = place_of(stored, out, rows).view(stored)  # NumPy sees that they overlap
        elif stored != out.dtype:
            np.concatenate([each.view(stored) for each in data], out=place, casting="unsafe")
        elif not is_there:
            np.concatenate(data, out=place.view(np.uint8))
        return []
    # Those in the slot may lie where others are written to.
    fitting = {index: each.copy() for index, each in enumerate(data) if len(each) == nbytes}
    for index, each in fitting.items():
        places[rows[index]] = each.view(stored)
    return sorted(set(range(len(rows))) - set(fitting))
