"""Many cases in one test."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.for_each import for_each


def test_every_case_is_run_with_a_folder_of_its_own_and_the_one_that_fails_is_named(tmp_path: Path) -> None:
    ran = []

    @for_each("text", ["a", "b"])
    @for_each(("number", "half"), [(2, 1), pytest.param(4, 2, id="four"), (6, 0), (8, 4)], ids=list("wxyz"))
    def test(text: str, number: int, half: int, tmp_path: Path) -> None:
        assert not list(tmp_path.iterdir())
        (tmp_path / "file").touch()
        ran.append((text, number))
        assert number == 2 * half

    with pytest.raises(AssertionError) as caught:
        test(tmp_path=tmp_path)

    assert ran == [("a", 2), ("a", 4), ("a", 6)]
    assert caught.value.__notes__ == ["case 2: y", "case 0: {'text': 'a'}"]
    with pytest.raises(AssertionError, match="no cases"):
        for_each("text", [])
    with pytest.raises(AssertionError, match="no marks of its own"):
        for_each("text", [pytest.param("a", marks=pytest.mark.slow)])

    @for_each("text", ["a", "b"])
    def skipped(text: str) -> None:
        pytest.skip(text)

    with pytest.raises(AssertionError, match="would skip all cases"):
        skipped()
