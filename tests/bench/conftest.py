"""A folder of pictures for the benchmarks of `penstock bench`."""

from pathlib import Path

import cv2
import numpy as np
import pytest


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve pictures, one of which, 07, is cut off."""
    folder = tmp_path / "photos"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(12):
        picture = draw.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        assert cv2.imwrite(str(folder / f"{number:02}.jpg"), picture)
    (folder / "07.jpg").write_bytes((folder / "07.jpg").read_bytes()[:100])
    return folder
