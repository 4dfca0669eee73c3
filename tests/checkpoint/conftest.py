"""Lets the tests of this folder, and the processes that they start, import the folder's other modules by name."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
for place in (
    ROOT,
    f"{ROOT}/benchmarks/snapshots",
):  # where pytest was not started as `python -m pytest`, too
    if place not in sys.path:
        sys.path.insert(0, place)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a path for a store, in memory where there is such a place: thousands of files are written and read."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as top:
        yield Path(top).resolve() / "store"
