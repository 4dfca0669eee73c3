"""What a place that keeps samples near the training must offer."""

from __future__ import annotations

from typing import Protocol


class SizedTier(Protocol):
    """A bounded place for whole samples, whose content a placement decided beforehand: it never evicts.

    Any thread may call any method at any time. A sample is seen by `contains` and `view` only when it is
    whole.
    """

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that it holds."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the samples that it holds or is being given."""
        ...

    def put(self, sample: int, data: bytes | bytearray | memoryview) -> bool:
        """Keep a copy of a sample; return whether it is held, or about to be by another thread.

        False means that the room left is too small. A sample that is held already is not copied again.
        Raises: LoaderClosed after `close`.
        """
        ...

    def contains(self, sample: int) -> bool:
        """Return whether the whole sample is here."""
        ...

    def view(self, sample: int) -> memoryview:
        """Return the sample's bytes, read-only and without a copy where the tier allows; valid after `close`.

        Raises: KeyError if it is not here; LoaderClosed after `close`.
        """
        ...

    def close(self) -> None:
        """Forget everything; memory goes when the last view does. Twice is harmless."""
        ...
