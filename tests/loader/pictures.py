"""Folders of pictures that are drawn, and a source that counts how often it is read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import cv2
import numpy as np

from penstock.store import ImageFolder
from penstock.store.group import Bytes, Failed, Ids


class CountedFolder(ImageFolder):
    """Counts how often each sample is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: Counter[int] = Counter()

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        self.reads.update(ids.tolist())
        return super().read_group(ids, into, begins)


def drawn(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    folder.mkdir()
    random = np.random.default_rng(4)
    for sample, (height, width) in enumerate(sizes):
        coarse = random.integers(0, 256, (height // 6 + 1, width // 6 + 1, 3), np.uint8)
        picture = cv2.resize(coarse, (int(width), int(height)), interpolation=cv2.INTER_CUBIC)
        assert cv2.imwrite(str(folder / f"{sample:02}.{'png' if sample % 9 == 4 else 'jpg'}"), picture)
    return folder.parent
