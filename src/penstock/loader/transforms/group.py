"""A group of JPEG files decoded into rows of a slot, or into crops, by one compiled call without interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.loader.transforms.geometry import StepNumbers, numbers_of
from penstock.loader.transforms.sink import Sink
from penstock.loader.transforms.stages import Scratch
from penstock.loader.transforms.turbojpeg import BY_ADDRESS
from penstock.machine_code import Loop


class Later(NamedTuple):
    """Where the crops go that a group gets for the epochs behind its own.

    rows: int64[samples, most], of each sample those of `crops`, one for each epoch in turn, below 0 behind the last.
    crops: uint8[*, height, width, 3], C-contiguous, of the size that the steps end in.
    """

    rows: NDArray[np.int64]
    crops: NDArray[np.uint8]


NOTHING_LATER = Later(np.empty((0, 0), np.int64), np.empty((0, 0, 0, 0), np.uint8))


class GroupPass:
    """All steps of a pipeline of built-ins, in numbers, and how their result is written."""

    def __init__(self, steps: Sequence[StepNumbers], keys: Sequence[int], sink: Sink) -> None:
        """keys: of each step, of its draws."""
        self._steps = np.array(steps, np.float64).reshape(len(steps), len(StepNumbers._fields))
        self._keys = np.array(keys, np.uint64)
        #: How many random numbers a sample takes.
        self._count = max((step.column + numbers_of(step.what) for step in steps), default=0)
        self._sink = sink

    def prepare(self) -> None:
        """Have the loop of `run` loaded, or begin to compile it."""
        self._sink.group_loop()

    def run(
        self,
        data: Sequence[NDArray[np.uint8]],
        out: NDArray[Any],
        samples: NDArray[np.int64],
        epoch: int,
        rows: Sequence[int],
        scratch: Scratch,
        later: Later = NOTHING_LATER,
    ) -> list[int]:
        """Decode what is plain, and return the indices of the rest, of which nothing is known.

        The rest are whatever is no JPEG, or of another kind than the usual; damaged; larger than the thread's buffers,
        which the one-picture form enlarges; in need of two passes; and all until the loop is compiled.

        data: of each sample, as stored: uint8[bytes], contiguous. samples: their ids.
        rows: of each sample, its place in `out`: [batch, *shape of a sample], C-contiguous.
        later: gets crops of the epochs after `epoch`; of samples that are left, some may be written.
        Raises: TypeError for data that are no arrays.
        """
        data = list(data)  # of `Pieces`, arrays that stay until the loop is through
        if set(map(type, data)) != {np.ndarray}:
            raise TypeError("data must be arrays: their addresses are taken from them")
        loop = self._sink.group_loop()
        if (
            loop is None
            or scratch.decoders.turbo is None
            or not BY_ADDRESS
            or not scratch.reserve_kept(max(map(len, data)))
        ):
            return list(range(len(data)))
        # Whoever calls keeps the arrays; what an array's object tells, the loop reads by itself.
        files = np.empty((3, len(data)), np.int64)
        files[0], files[1], files[2] = list(map(id, data)), rows, samples
        seen = out if self._sink.view is None else out.view(self._sink.view)
        try:
            count = self._call(loop, self._sink.of_group, scratch)(files, epoch, seen, *later)
        finally:
            scratch.end_picture()
        left: list[int] = files[0, :count].tolist()
        return left

    def _call(self, loop: Loop, bound: tuple[Any, ...], scratch: Scratch) -> Callable[..., int]:
        """Return the loop with all that is the same for each group of a thread, until its buffers are others."""
        pixels, blended = scratch.decoders.buffer.storage, scratch.blended.storage
        key, call = scratch.group_call
        if (
            call is None
            or key[0] is not self
            or key[1] is not pixels
            or key[2] is not blended
            or key[3] is not loop
        ):
            turbo = scratch.decoders.turbo
            assert turbo is not None, "the loop calls libjpeg-turbo"
            call = loop.bound(
                turbo.addresses,
                scratch.decoders.handle,
                self._steps,
                self._keys,
                np.empty(self._count),
                pixels,
                blended,
                *bound,
            )
            scratch.group_call = (self, pixels, blended, loop), call
        return call
