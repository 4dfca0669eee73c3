"""What a data set's home must offer: sizes and labels beforehand, and the bytes of one sample at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.store.labels import Labels


@runtime_checkable
class Source(Protocol):
    """A data set as stored; a sample is an integer in [0, len).

    Any thread may read at any time: reads wait outside the interpreter's lock and share nothing. A source can
    be pickled, so that worker processes read the same samples.
    """

    @property
    def sizes_bytes(self) -> NDArray[np.int64]:
        """int64[samples], size of each sample as stored, when the source was opened; read-only."""
        ...

    @property
    def labels(self) -> Labels:
        """int64[samples], an index into `classes`, or -1 for a sample without a label; read-only.

        Or several by name, as a mapping or as an array with named fields: numbers, [samples, *shape] each. Then a batch
        is a dict. An empty mapping says that there are none: then a batch is an array.
        """
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, empty where nothing is labelled."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, sample: int) -> bytes:
        """Return the whole sample, of exactly `sizes_bytes[sample]` bytes.

        Raises: DataError naming the file if it is missing, not allowed, empty, or no longer of that size.
            IndexError if there is no such sample.
        """
        ...

    def read_into(self, sample: int, buffer: memoryview) -> int:
        """Fill the front of a writable buffer with the whole sample; return its size.

        buffer: contiguous, at least `sizes_bytes[sample]` bytes; what lies behind them is not touched.
        Raises: as `read`; ConfigError if the buffer is too small. The buffer's content is then undefined.
        """
        ...

    def describe(self, sample: int) -> str:
        """Return where the sample is from, for messages: for a file its path."""
        ...


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the stored bytes of a sample are, so that a loader of them needs no transforms.

    dtype, shape: of a sample as stored, "<f4" and (16, 16). batch_dtype: of batches, unless the loader says another.
    """

    dtype: str
    shape: tuple[int, ...]
    batch_dtype: str


@runtime_checkable
class Numeric(Protocol):
    """A source whose samples are numbers of one shape."""

    @property
    def numbers(self) -> Numbers:
        """What the bytes of a sample are."""
        ...


@runtime_checkable
class FileBacked(Protocol):
    """A source whose every sample is the content of one file of this host's file systems."""

    def path_of(self, sample: int) -> str:
        """Return the absolute path of the sample's file."""
        ...
