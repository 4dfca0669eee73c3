"""The example of the how-to page on sources runs as it is written, and reads what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.plan import Sequential

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "a-source-of-your-own.md"


def test_records_of_files_are_read_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.arange(2 * 1000 * 256, dtype="<f4").reshape(2000, 16, 16)
    files = [tmp_path / "0.bin", tmp_path / "1.bin"]
    for file, part in zip(files, np.split(values, 2), strict=True):
        part.tofile(file)
    given: dict[str, Any] = {"files": files}

    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(example, given)

    assert capsys.readouterr().out.splitlines()[-1].startswith("(64, 16, 16) float32 [")
    source = given["RecordsInFiles"](files)
    asked: list[int] = []
    read_ranges = source.read_ranges

    def noted(unit: int, ranges: Any, into: Any) -> None:
        asked.append(len(ranges))
        read_ranges(unit, ranges, into)

    source.read_ranges = noted
    with Loader(
        source,
        batch_size=50,
        epochs=1,
        shuffle=Sequential(2000),
        transforms=[DecodeRaw("<f4", (16, 16))],
        report=None,
    ) as loader:
        batches = [numbers.copy() for numbers, _ in loader]
    assert np.array_equal(np.concatenate(batches), values)
    assert sum(asked) < 200, "each read brings many of the 2,000 records"
