"""What a place that keeps samples near the training must offer."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class SizedTier(Protocol):
    """A bounded place for whole samples, whose content a placement decided beforehand: it evicts none by itself.

    A group is read into the tier's own memory: space is taken, samples arrive there, and are kept, or dropped if they
    could not be read:

        begins = tier.take_space(ids, sizes)
        failed = read_group(source, ids, tier.array, begins)

    `put` does this for a sample whose bytes are elsewhere. Any thread may call any method at any time. A sample is
    found only once it is kept.
    """

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that it holds."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the samples that it holds or is being given."""
        ...

    @property
    def array(self) -> NDArray[np.uint8]:
        """uint8[capacity_bytes], the tier's memory. Write only where space was taken. Raises: ClosedError."""
        ...

    def take_space(self, ids: Ids, sizes: Ids) -> Ids | None:
        """Take space for a whole group or for none; return int64[n + 1], where each sample begins, and the last ends.

        ids: int64[n]. sizes: int64[n], bytes of each.
        None: it does not fit, or one of them is here, is arriving, or is among the ids twice.
        Raises: ClosedError after `close`; IndexError for an id below 0.
        """
        ...

    def keep(self, ids: Ids) -> None:
        """Let samples be found, for which space was taken and which are there whole by now. ids: int64[n].

        Raises: KeyError naming one that no space was taken for, or that is kept; then none is. ClosedError.
        """
        ...

    def drop(self, ids: Ids) -> None:
        """Give space back that was taken for samples which do not arrive. ids, and what is raised: as `keep`."""
        ...

    def places_of(self, ids: Ids) -> Ids:
        """Return where samples lie in `array`: int64[n, 2], begin and end; -1, -1 for one that is not here.

        ids: int64[n], any numbers. After `close` nothing is here.
        """
        ...

    def put(self, sample: int, data: bytes | bytearray | memoryview) -> bool:
        """Keep a copy of a sample; return whether it is held, or about to be by another thread.

        False means that the space left is too small. A sample that is held already is not copied again.
        Raises: ClosedError after `close`.
        """
        ...

    def contains(self, sample: int) -> bool:
        """Return whether the whole sample is here."""
        ...

    def view(self, sample: int) -> memoryview:
        """Return the sample's bytes, read-only and without a copy where the tier allows; valid after `close`.

        Raises: KeyError if it is not here; ClosedError after `close`.
        """
        ...

    def close(self) -> None:
        """Forget everything; memory is freed with the last view. Twice is harmless."""
        ...


class SlowTier(Protocol):
    """A place for whole samples that is not this process's memory: they are read from it into memory, by the group.

    Any thread may call any method at any time.
    """

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that it holds."""
        ...

    @property
    def is_written(self) -> bool:
        """Whether it keeps more samples, where they fit; False once it has failed, and from then on."""
        ...

    def held(self) -> Ids:
        """Return the samples that it has, ascending; from the start those that an earlier run left there."""
        ...

    def contains(self, sample: int) -> bool:
        """Return whether it has a sample."""
        ...

    def sizes_of(self, ids: Ids) -> Ids:
        """Return the bytes of samples: int64[n], -1 for one that it has not."""
        ...

    def put(self, sample: int, data: memoryview) -> bool:
        """Keep a copy of a sample; return whether it is held. False where it does not fit, or the place has failed."""
        ...

    def read_group(self, ids: Ids, into: NDArray[np.uint8], begins: Ids) -> list[tuple[int, Exception]]:
        """Read samples; return those that could not be had: index in the group and error, ascending.

        ids: int64[n]. into: uint8[...]. begins: int64[n + 1]: sample k goes to the front of into[begins[k]:]. A
        sample that is not what was written is among those that failed, and held no longer.
        """
        ...

    def evict(self, ids: Ids) -> None:
        """Hold samples no longer."""
        ...

    def close(self) -> None:
        """End. Twice is harmless."""
        ...
