"""Lets the tests of this folder, and the processes that they start, import the folder's other modules by name."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[3])
if ROOT not in sys.path:  # where pytest was not started as `python -m pytest`
    sys.path.insert(0, ROOT)

from tests.checkpoint.crash.injection import Savers  # noqa: E402


@pytest.fixture(scope="module")
def savers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Savers]:
    """Yield what runs saves in processes of their own, under strace."""
    with Savers(tmp_path_factory.mktemp("savers")) as started:
        yield started


@pytest.fixture
def top() -> Iterator[Path]:
    """Yield an empty folder, in memory where there is such a place: a thousand stores are opened and saved to."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder).resolve()
