"""A group of JPEG files decoded into rows of a slot, or into crops, by one compiled call without interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.loader.transforms.compiled import CROP_KERNELS
from penstock.loader.transforms.draws import Draws
from penstock.loader.transforms.geometry import StepNumbers, numbers_of
from penstock.loader.transforms.sink import Sink
from penstock.loader.transforms.stages import Scratch
from penstock.loader.transforms.turbojpeg import BY_ADDRESS
from penstock.machine_code import Loop


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
        draws: Draws,
        rows: Sequence[int],
        scratch: Scratch,
    ) -> list[int]:
        """Decode what is plain, and return the indices of the rest, of which nothing is known.

        The rest are whatever is no JPEG, or of another kind than the usual; damaged; larger than the thread's buffers,
        which the one-picture form enlarges; in need of two passes; and all until the loop is compiled.

        data: of each sample, as stored: uint8[bytes], contiguous. rows: of each, its place in `out` and in the draws.
        out: [batch, *shape of a sample], C-contiguous.
        Raises: TypeError for data that are no arrays.
        """
        seen = out if self._sink.view is None else out.view(self._sink.view)
        of_batch = draws.samples, draws.epoch, seen
        return self._run(self._sink.group_loop(), self._sink.of_group, data, (rows,), of_batch, scratch)

    def make_crops(
        self,
        data: Sequence[NDArray[np.uint8]],
        samples: Sequence[int],
        epoch: int,
        crops: Sequence[Sequence[NDArray[np.uint8]]],
        scratch: Scratch,
    ) -> list[int]:
        """Decode each of some samples once, and make its crops; return the indices of the rest, as `run`.

        samples: of each, its id. crops: of each, where those of `epoch` and the next ones go, uint8[height, width, 3]
        of one size, C-contiguous; at least one. Of those that are left, some may be written.
        """
        height, width, _ = crops[0][0].shape
        targets = np.zeros((len(crops), max(map(len, crops))), np.int64)
        for row, each in enumerate(crops):
            targets[row, : len(each)] = list(map(id, each))
        about = samples, list(map(len, crops))
        loop = CROP_KERNELS["make_crops"].ask()
        return self._run(loop, (height, width), data, about, (epoch, targets), scratch)

    def _run(
        self,
        loop: Loop | None,
        bound: tuple[Any, ...],
        data: Sequence[NDArray[np.uint8]],
        about: Sequence[Sequence[int]],
        of_group: tuple[Any, ...],
        scratch: Scratch,
    ) -> list[int]:
        """Call a loop. bound, of_group: its arguments before and behind `files`. about: all lines of these but one."""
        data = list(data)  # of `Pieces`, arrays that stay until the loop is through
        if set(map(type, data)) != {np.ndarray}:
            raise TypeError("data must be arrays: their addresses are taken from them")
        if (
            loop is None
            or scratch.decoders.turbo is None
            or not BY_ADDRESS
            or not scratch.reserve_kept(max(map(len, data)))
        ):
            return list(range(len(data)))
        # Whoever calls keeps the arrays; what an array's object tells, the loop reads by itself.
        files = np.array((list(map(id, data)), *about))
        try:
            count = self._call(loop, bound, scratch)(files, *of_group)
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
