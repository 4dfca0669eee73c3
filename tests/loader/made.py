"""A data set of samples that a function makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Made:
    """What a function makes of each number."""

    def __init__(self, make: Callable[[int], Any], count: int = 60) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)
