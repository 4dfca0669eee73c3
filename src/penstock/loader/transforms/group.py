"""A group of JPEG files decoded into rows of a slot by one compiled call, which holds no interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.loader.transforms.draws import Draws
from penstock.loader.transforms.geometry import StepNumbers
from penstock.loader.transforms.jpeg import Encoded
from penstock.loader.transforms.sink import Sink
from penstock.loader.transforms.stages import Scratch
from penstock.loader.transforms.turbojpeg import BY_ADDRESS


class GroupPass:
    """All steps of a pipeline of built-ins, in numbers, and how their result is written."""

    def __init__(self, steps: Sequence[StepNumbers], sink: Sink) -> None:
        self._steps = np.array(steps, np.float64).reshape(len(steps), len(StepNumbers._fields))
        self._sink = sink

    def prepare(self) -> None:
        """Have the loop loaded, or begin to compile it."""
        self._sink.group_loop()

    def run(
        self, data: Sequence[Encoded], out: NDArray[Any], draws: Draws, rows: Sequence[int], scratch: Scratch
    ) -> list[int]:
        """Decode what is plain, and return the indices of the rest, of which nothing is known.

        The rest are whatever is no JPEG, or of another kind than the usual; damaged; larger than the thread's buffers,
        which the one-picture form enlarges; in need of two passes; and all until the loop is compiled.

        data: of each sample, as stored. rows: of each, its place in `out` and in the draws.
        out: [batch, *shape of a sample], C-contiguous.
        """
        everything = list(range(len(data)))
        turbo, loop = scratch.decoders.turbo, self._sink.group_loop()
        if turbo is None or loop is None or not BY_ADDRESS:
            return everything
        if not scratch.reserve_kept(max(map(len, data))):
            return everything
        try:
            encoded = np.array([_place_of(each) for each in data])
            left = np.empty(len(data), np.int64)
            count = loop(
                turbo.addresses,
                scratch.decoders.handle,
                encoded,
                np.array(rows),
                self._steps,
                draws.numbers,
                scratch.decoders.buffer.storage,
                scratch.blended.storage,
                *self._sink.of_group(out),
                left,
            )
        finally:
            scratch.end_picture()
        found: list[int] = left[:count].tolist()
        return found


def _place_of(data: Encoded) -> tuple[int, int]:
    """Return address and length of bytes, which must outlive their use."""
    return (np.frombuffer(data, np.uint8).ctypes.data, len(data)) if len(data) else (0, 0)
