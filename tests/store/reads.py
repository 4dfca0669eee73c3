"""What tests read of a source."""

from __future__ import annotations

import numpy as np

from penstock.store import Source


def contents(source: Source) -> list[bytes]:
    return [bytes(source.read(sample)) for sample in range(len(source))]


def labels_of(source: Source) -> list[int]:
    """Return labels of one kind."""
    assert isinstance(source.labels, np.ndarray)
    return [int(label) for label in source.labels]
