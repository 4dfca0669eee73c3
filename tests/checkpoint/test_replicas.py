"""Blocks that are equal are stored once, whatever tensors they are of, and every tensor comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import SnapshotStore

# Zeros of 4,000 bytes each: as a new model has them, beside its half-precision copy.
ZEROS: dict[str, Any] = {
    "half": np.zeros(2000, np.uint16),
    "single": np.zeros(1000, np.float32),
    "double": np.zeros(500, np.float64),
    "whole": np.zeros(1000, np.int32),
}


@pytest.mark.parametrize("codec", ["balance", "speed", "dynrle", "rle4", "gzip-delta"])
@pytest.mark.parametrize("scheme", ["progressive", "chain"])
def test_a_difference_to_a_block_that_repeats_one_of_another_type_is_decoded_as_its_own(
    tmp_path: Path, codec: str, scheme: Any
) -> None:
    rng = np.random.default_rng(1)
    with SnapshotStore(tmp_path, codec=codec, scheme=scheme, report=None, threads=1) as store:
        store.save(1, ZEROS)
        moved = {
            name: (array + rng.integers(0, 9, array.size)).astype(array.dtype)
            for name, array in ZEROS.items()
        }
        store.save(2, moved)
        again = {name: (array + 1).astype(array.dtype) for name, array in moved.items()}
        store.save(3, again).wait()

        for step, state in ((1, ZEROS), (2, moved), (3, again)):
            restored = store.restore(step)
            for name, array in state.items():
                assert np.array_equal(restored[name], array), (step, name)
        assert {listed.condition for listed in store.verify()} == {"whole"}
