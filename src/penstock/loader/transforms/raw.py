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
    """Return the stage of a `DecodeRaw`: from bytes to an array over a copy of them."""
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
        array = np.frombuffer(bytearray(value), dtype)
        return array if step.shape is None else array.reshape(step.shape)

    return run


class RawPass:
    """`DecodeRaw` and nothing else, into a slot of the same type."""

    def prepare(self) -> None:
        """Nothing is compiled."""

    def run(
        self,
        data: Sequence[NDArray[np.uint8]],
        out: NDArray[Any],
        draws: Draws,
        rows: Sequence[int],
        scratch: Scratch,
    ) -> list[int]:
        """Copy what has the size of a row; return the indices of the rest. See `GroupPass.run`."""
        begin, count = rows[0], len(rows)
        places = out.reshape(len(out), -1).view(np.uint8)
        nbytes = places.shape[1]
        if set(map(len, data)) == {nbytes} and list(rows) == list(range(begin, begin + count)):
            np.concatenate(data, out=places[begin : begin + count].reshape(-1))
            return []
        fitting = [index for index, each in enumerate(data) if len(each) == nbytes]
        for index in fitting:
            places[rows[index]] = data[index]
        return sorted(set(range(count)) - set(fitting))
