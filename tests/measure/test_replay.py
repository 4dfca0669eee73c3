"""A recorded run with other memory or threads has the limits of a loader that is made with these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.measure.replay import Change, replay_of
from penstock.store import Records
from penstock.trace import read_trace

SAMPLES, SAMPLE_BYTES = 64, 4096


def as_numbers(content: Any) -> np.ndarray:
    return np.frombuffer(content, np.uint8).copy()


@pytest.mark.parametrize(
    ("changed", "change"),
    [
        ({"memory": "4 MiB"}, Change(memory_bytes=4 << 20)),
        ({"decoders": 4}, Change(decoders=4)),
        ({"memory": "4 MiB", "decoders": 4}, Change(memory_bytes=4 << 20, decoders=4)),
    ],
    ids=["memory", "decoders", "both"],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_what_threads_may_read_is_as_of_a_loader_that_has_the_change(
    tmp_path: Path, changed: dict[str, Any], change: Change, in_place: bool
) -> None:
    """What decode threads read by themselves takes memory, but where it is read to its place in the batch."""
    rows = np.random.default_rng(0).integers(0, 256, (SAMPLES, SAMPLE_BYTES), np.uint8)
    rows.tofile(tmp_path / "rows")
    transforms: Any = [DecodeRaw("uint8", (SAMPLE_BYTES,)) if in_place else as_numbers]
    given: dict[str, Any] = {
        "batch_size": 4,
        "epochs": 1,
        "transforms": transforms,
        "dtype": "uint8",
        "memory": "1 MiB",
        "readers": 1,
        "decoders": 1,
        "report": None,
    }
    source = Records(tmp_path / "rows", "u1", SAMPLE_BYTES)
    with Loader(source, **given, trace=tmp_path / "run.trace") as loader:
        for _ in loader:
            pass
    with Loader(source, **given | changed) as other:
        expected = other._parts.setup.limits

    budget, limits = replay_of(read_trace(tmp_path / "run.trace"))._changed(change)

    assert limits.own_bytes == expected.own_bytes
    assert (limits.own_bytes > 1 << 20) is in_place
    assert limits.undecoded_bytes == expected.undecoded_bytes
    assert budget.slots == limits.slots
