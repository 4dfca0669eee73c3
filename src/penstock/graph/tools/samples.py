"""Samples of a data set for a graph: a function for Call nodes, which reads them by their numbers."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.graph.errors import KernelError, MismatchError
from penstock.loader.decode_work import StoredSamples
from penstock.loader.opened import reader_of
from penstock.store import Source, open_source


class SampleReader:
    """Reads samples as they are stored, for a Call node whose input is their numbers and whose output is bytes.

        functions = {"samples": SampleReader("photos/train")}
        files = graph.add("Call", numbers, function="samples", outputs=[["bytes", [32]]])

    source: a data set as a loader takes it, or one that is open. memory_bytes: for samples that it keeps, those read
    first. Any thread may call it.
    """

    def __init__(
        self, source: str | os.PathLike[str] | Source | StoredSamples, *, memory_bytes: int = 0
    ) -> None:
        if isinstance(source, str | os.PathLike):
            source = open_source(source)
        if not isinstance(source, StoredSamples):
            source = StoredSamples(source, reader_of(source), memory_bytes)
        self._stored = source

    def __call__(self, numbers: Any) -> NDArray[np.object_]:
        """Return the bytes of each sample. numbers: integers of any shape.

        Raises: MismatchError for a number that no sample has; KernelError for a sample that cannot be read.
        """
        asked = np.asarray(numbers, np.int64)
        wrong = asked[(asked < 0) | (asked >= self._stored.samples)]
        if wrong.size:
            raise MismatchError(
                f"sample {wrong[0]:,} is asked for, and {self._stored.source!r} has {self._stored.samples:,}"
            )
        found = np.empty(asked.size, object)
        for place, data in enumerate(self._stored.read(asked.reshape(-1).tolist())):
            if data is None:
                raise KernelError(f"sample {asked.flat[place]:,} of {self._stored.source!r} cannot be read")
            found[place] = data.tobytes()
        return found.reshape(asked.shape)

    def close(self) -> None:
        """Close the data set's files."""
        self._stored.close()
