"""What a path, a pattern or a list of them means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError, DataError
from penstock.store.patterns import brief, files_of, is_of_several, place_of_paths


@for_each(
    ("pattern", "meant"),
    [
        ("a{000..002}.tar", ["a000.tar", "a001.tar", "a002.tar"]),
        ("a{8..11}", ["a8", "a9", "a10", "a11"]),
        ("a{08..11}", ["a08", "a09", "a10", "a11"]),
        ("a{10..12}", ["a10", "a11", "a12"]),
        ("a{2..0}", ["a2", "a1", "a0"]),
        ("{x,y}{0..1}.tar", ["x0.tar", "x1.tar", "y0.tar", "y1.tar"]),
        ("{x,y}/{a}", ["x/a", "y/a"]),
        ("plain.tar", ["plain.tar"]),
    ],
)
def test_braces_mean_numbers_and_words(pattern: str, meant: list[str]) -> None:
    assert [os.path.relpath(path, "/d") for path in files_of(place_of_paths(f"/d/{pattern}"))] == meant


def test_stars_mean_the_files_that_are_there_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b1.tar", "a2.tar", "a10.tar", "a1.txt", "deep/a3.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def found(pattern: str) -> list[str]:
        return [os.path.relpath(path, tmp_path) for path in files_of(place_of_paths(tmp_path / pattern))]

    assert found("*.tar") == ["a10.tar", "a2.tar", "b1.tar"]
    assert found("{b,a}?.tar") == ["b1.tar", "a2.tar"]
    assert found("**/a3.tar") == ["deep/a3.tar"]
    with pytest.raises(DataError, match=r"no file fits .*/c\*\.tar: check the pattern"):
        found("c*.tar")


def test_a_list_keeps_its_order(tmp_path: Path) -> None:
    place = place_of_paths([tmp_path / "b.tar", str(tmp_path / "a{1..2}.tar")])

    assert files_of(place) == tuple(f"{tmp_path}/{name}.tar" for name in ("b", "a1", "a2"))
    assert place_of_paths(place) == place
    assert brief(place) == f"{tmp_path}/b.tar and 1 more"


def test_what_exists_is_no_pattern(tmp_path: Path) -> None:
    for name in ("a{1..2}.tar", "b[0].tar", "c\nd.tar"):
        (tmp_path / name).touch()
        place = place_of_paths(tmp_path / name)

        assert not is_of_several(place)
        assert files_of(place) == (str(tmp_path / name),)
        assert brief(place) == place


@for_each(
    ("paths", "message"),
    [
        ([], "the list of paths is empty"),
        (["a", 3], "3 is not the path of"),
        (["a", "b\nc"], "has a line end in its name"),
        (["a.tar", "s3://bucket/a.tar"], "the list has paths and addresses"),
        ("https://me:secret@host/a.tar", r"https://me:\*\*\*@host/a.tar has a password in it"),
        ("a{0..9999}.tar", "means more than 1,000 files"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    paths: list[str] | str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.patterns._MOST_FILES", 1000)
    with pytest.raises(ConfigError, match=message):
        files_of(place_of_paths(paths))
