"""Which files a folder or list becomes, in which order, with which labels, and every way it can be wrong."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.for_each import for_each
from tests.privileges import without_permission

from penstock.errors import ConfigError, DataError
from penstock.store import FileList, FlatFolder, ImageFolder, listing, open_source


def write(root: Path, *names: str) -> Path:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
    return root


def paths(source: ImageFolder | FlatFolder | FileList) -> list[str]:
    return [os.path.relpath(source.path_of(sample), source.root) for sample in range(len(source))]


def list_as_torchvision(root: str, extensions: tuple[str, ...]) -> tuple[list[tuple[str, int]], list[str]]:
    """The published algorithm of torchvision.datasets.folder (find_classes, make_dataset), as it is there."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for index, label in enumerate(classes):
        for folder_path, _, names in sorted(os.walk(os.path.join(root, label), followlinks=True)):
            samples += [
                (os.path.join(folder_path, name), index)
                for name in sorted(names)
                if name.lower().endswith(extensions)
            ]
    return samples, classes


# -- Image folders -------------------------------------------------------------------------------------


def test_labels_are_the_sorted_folders_and_samples_the_sorted_files(tmp_path: Path) -> None:
    source = ImageFolder(
        write(tmp_path, "dog/2.jpg", "dog/10.jpg", "cat/b.png", "cat/a.JPEG", "Zebra/z.webp")
    )

    assert source.classes == ("Zebra", "cat", "dog")
    assert paths(source) == ["Zebra/z.webp", "cat/a.JPEG", "cat/b.png", "dog/10.jpg", "dog/2.jpg"]
    assert source.labels.tolist() == [0, 1, 1, 2, 2]


def test_nested_folders_are_numbered_by_folder_then_name(tmp_path: Path) -> None:
    # "a-b" sorts before "a/c" as text but "a" before "a-b" as a folder: the case where orders differ.
    source = ImageFolder(write(tmp_path, "x/a/c.jpg", "x/a-b/d.jpg", "x/z.jpg", "x/a/e/f.jpg", "x/a.jpg"))

    assert paths(source) == ["x/a.jpg", "x/z.jpg", "x/a/c.jpg", "x/a-b/d.jpg", "x/a/e/f.jpg"]


names = st.text(st.sampled_from("ab-.1é Z"), min_size=1, max_size=4).filter(
    lambda name: not name.startswith(".")
)
trees = st.lists(
    st.tuples(names, st.lists(names, max_size=2), names, st.sampled_from([".jpg", ".PNG", ".txt", ""])),
    min_size=1,
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(trees)
def test_the_same_files_get_the_same_numbers_as_in_torchvision(
    tmp_path_factory: pytest.TempPathFactory, tree: list[tuple[str, list[str], str, str]]
) -> None:
    root = tmp_path_factory.mktemp("tree")
    for label, folders, name, extension in tree:
        place = root.joinpath(label + "_", *[f + "_" for f in folders])
        place.mkdir(parents=True, exist_ok=True)
        (place / (name + extension)).write_bytes(b"x")
        (root / (label + "_") / "always.jpg").write_bytes(b"x")

    source = ImageFolder(root)

    expected, classes = list_as_torchvision(str(root), listing.IMAGE_EXTENSIONS)
    assert [(source.path_of(s), int(source.labels[s])) for s in range(len(source))] == expected
    assert list(source.classes) == classes


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    source = ImageFolder(write(tmp_path, "cat/a.jpg", "cat/._a.jpg", ".cache/b.jpg", "cat/.thumbs/a.jpg"))

    assert paths(source) == ["cat/a.jpg"]
    assert source.classes == ("cat",)


def test_files_beside_the_label_folders_are_left_out(tmp_path: Path) -> None:
    assert paths(ImageFolder(write(tmp_path, "cat/a.jpg", "cover.jpg"))) == ["cat/a.jpg"]


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    write(tmp_path, "data/cat/a.jpg", "elsewhere/b.jpg")
    (tmp_path / "data/cat/link.jpg").symlink_to(tmp_path / "elsewhere/b.jpg")
    (tmp_path / "data/dog").symlink_to(tmp_path / "elsewhere")

    source = ImageFolder(tmp_path / "data")

    assert paths(source) == ["cat/a.jpg", "cat/link.jpg", "dog/b.jpg"]
    assert source.read(1) == b"elsewhere/b.jpg"


def test_other_extensions_can_be_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "cat/a.jpg", "cat/b.npy", "cat/c")

    assert paths(ImageFolder(tmp_path, extensions=(".NPY",))) == ["cat/b.npy"]
    assert paths(ImageFolder(tmp_path, extensions=None)) == ["cat/a.jpg", "cat/b.npy", "cat/c"]


def test_a_label_folder_without_files_is_named(tmp_path: Path) -> None:
    (write(tmp_path, "cat/a.jpg") / "dog").mkdir()

    with pytest.raises(DataError, match=f"{tmp_path}/dog has no files: add some, or remove the folder"):
        ImageFolder(tmp_path)


def test_a_label_folder_with_other_files_only_is_answered_with_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, "cat/a.npy", "cat/b.npy", "cat/c.txt")

    with pytest.raises(
        DataError,
        match=r"cat has 3 files but none that ends in .*; 2 end in '\.npy': open .*Arrays\('\S+/cat/\*\.npy'\).* pass",
    ):
        ImageFolder(tmp_path)


def test_a_root_without_label_folders_is_answered_with_what_else_could_open_it(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg")

    with pytest.raises(DataError, match="has no label folders: put the files of each label into a folder"):
        ImageFolder(tmp_path)


@for_each(
    ("link", "to", "problem"),
    [
        ("b.jpg", "nowhere.jpg", "{0}/cat/b.jpg is a link to nothing"),
        ("again", "../cat", "Too many levels of symbolic links"),  # a circle
        ("b.jpg", "b.jpg", r"{0}/cat \(b.jpg in it\) cannot be listed: Too many levels"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, link: str, to: str, problem: str) -> None:
    (write(tmp_path, "cat/a.jpg") / "cat" / link).symlink_to(to)

    with pytest.raises(DataError, match=problem.format(tmp_path)):
        ImageFolder(tmp_path)


def test_a_pipe_is_refused_before_anyone_waits_on_it(tmp_path: Path) -> None:
    os.mkfifo(write(tmp_path, "cat/a.jpg") / "cat/b.jpg")

    with pytest.raises(DataError, match=r"cat/b\.jpg is not a regular file"):
        ImageFolder(tmp_path)


# -- Flat folders --------------------------------------------------------------------------------------


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    source = FlatFolder(write(tmp_path, "b.jpg", "a.jpg", ".hidden.jpg", "notes.txt", "sub/c.jpg"))

    assert paths(source) == ["a.jpg", "b.jpg"]
    assert source.labels.tolist() == [-1, -1]
    assert source.classes == ()


@pytest.mark.parametrize("kind", [ImageFolder, FlatFolder, open_source])
def test_a_root_that_does_not_exist_is_named(tmp_path: Path, kind: type[FlatFolder]) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/nothing does not exist: check the path"):
        kind(tmp_path / "nothing")


@pytest.mark.parametrize("kind", [ImageFolder, FlatFolder])
def test_a_root_that_is_a_file_is_named(tmp_path: Path, kind: type[FlatFolder]) -> None:
    write(tmp_path, "a.jpg")

    with pytest.raises(DataError, match=r"a\.jpg is not a folder"):
        kind(tmp_path / "a.jpg")


@pytest.mark.parametrize("kind", [FlatFolder, open_source])
def test_an_empty_root_is_named(tmp_path: Path, kind: type[FlatFolder]) -> None:
    with pytest.raises(DataError, match=f"{tmp_path} has no files"):
        kind(tmp_path)


def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path) -> None:
    write(tmp_path, "cat/a.jpg", "dog/a.jpg")

    with (
        without_permission(tmp_path / "dog"),
        pytest.raises(DataError, match="dog may not be listed by user"),
    ):
        ImageFolder(tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    source = FlatFolder(write(tmp_path, "a.jpg"))

    with without_permission(tmp_path / "a.jpg"):
        with pytest.raises(DataError, match=r"a\.jpg may not be read by user"):
            source.read(0)
        with pytest.raises(DataError, match=r"a\.jpg may not be read by user"):
            source.read_into(0, memoryview(bytearray(100)))


def test_an_empty_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    (write(tmp_path, "a.jpg") / "b.jpg").touch()
    source = FlatFolder(tmp_path)

    assert source.read(0) == b"a.jpg"
    with pytest.raises(DataError, match=r"b\.jpg is empty \(0 bytes when the data set was listed\)"):
        source.read(1)
    with pytest.raises(DataError, match=r"b\.jpg is empty"):
        source.read_into(1, memoryview(bytearray(10)))


def test_too_many_open_files_are_answered_with_the_limit_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FlatFolder(write(tmp_path, "a.jpg"))

    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(DataError, match="ulimit -n"):
        source.read(0)


def test_a_read_that_returns_less_than_there_is_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems and signals cut reads short; here each returns three bytes at most."""
    source = FlatFolder(write(tmp_path, "a_name_of_some_length.jpg"))
    pread, preadv = os.pread, os.preadv

    def short_preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:3]] if len(buffers[0]) else buffers, offset)

    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 3), offset))
    monkeypatch.setattr(os, "preadv", short_preadv)
    buffer = bytearray(25)

    assert source.read(0) == b"a_name_of_some_length.jpg"
    assert source.read_into(0, memoryview(buffer)) == 25
    assert buffer == b"a_name_of_some_length.jpg"


def test_listing_with_threads_gives_the_same_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *[f"{label}/{name}.jpg" for label in range(12) for name in range(60)])
    alone = ImageFolder(tmp_path)

    # A processor that never works makes every call look like waiting.
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    threaded = ImageFolder(tmp_path)

    assert paths(threaded) == paths(alone)
    assert np.array_equal(threaded.sizes_bytes, alone.sizes_bytes)


# -- Lists of files ------------------------------------------------------------------------------------


def write_list(root: Path, text: str, name: str = "list.csv") -> Path:
    write(root, "a.jpg", "b.jpg", "sub/c.jpg", "with, comma.jpg")
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def test_a_list_keeps_its_order_and_its_repeats(tmp_path: Path) -> None:
    source = FileList(write_list(tmp_path, "sub/c.jpg\na.jpg\n\na.jpg\n"))

    assert paths(source) == ["sub/c.jpg", "a.jpg", "a.jpg"]
    assert source.labels.tolist() == [-1, -1, -1]
    assert source.classes == ()


def test_paths_are_relative_to_the_list_or_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = write_list(tmp_path, f"a.jpg\n{tmp_path}/b.jpg\n")
    monkeypatch.chdir(tmp_path.parent)
    source = FileList(listing.relative_to(tmp_path.parent))
    monkeypatch.chdir("/")

    assert source.read(0) == b"a.jpg"
    assert source.read(1) == b"b.jpg"


def test_labels_that_are_names_are_numbered_in_sorted_order(tmp_path: Path) -> None:
    source = FileList(write_list(tmp_path, "a.jpg,zebra\nb.jpg,ant\nsub/c.jpg,zebra\n"))

    assert source.labels.tolist() == [1, 0, 1]
    assert source.classes == ("ant", "zebra")


def test_labels_that_are_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    source = FileList(write_list(tmp_path, "a.jpg,2\nb.jpg,0\n"))

    assert source.labels.tolist() == [2, 0]
    assert source.classes == ("0", "1", "2")


@for_each(
    "text",
    [
        "path,label\na.jpg,1\n",
        "PATH, Label\r\na.jpg, 1\r\n",
        "\ufeffpath,label\na.jpg,1\n",
        "path\tlabel\na.jpg\t1\n",
        "a.jpg,1",
        '"a.jpg",1\n',
    ],
)
def test_headings_line_ends_and_quotes_are_understood(tmp_path: Path, text: str) -> None:
    source = FileList(write_list(tmp_path, text))

    assert paths(source) == ["a.jpg"]
    assert source.labels.tolist() == [1]


@pytest.mark.parametrize("text", ['"with, comma.jpg",4\n', "with, comma.jpg\t4\n"])
def test_a_path_with_a_comma_is_quoted_or_separated_by_tabs(tmp_path: Path, text: str) -> None:
    assert paths(FileList(write_list(tmp_path, text))) == ["with, comma.jpg"]


@for_each(
    ("text", "message"),
    [
        ("a.jpg\nnothing.jpg\n", "line 2: .*/nothing.jpg cannot be found: No such file"),
        ("path\n\na.jpg\nnothing.jpg\n", "line 4: .*/nothing.jpg cannot be found"),
        ("a.jpg\nsub\n", "line 2: .*/sub is not a regular file"),
        ("a.jpg,1\nb.jpg\n", "line 2: b.jpg has no label, unlike line 1"),
        ("a.jpg\nb.jpg,1\n", "line 2: b.jpg has a label, unlike line 1"),
        ("a.jpg,1\nb.jpg,\n", "line 2: b.jpg has an empty label"),
        ("a.jpg,1\nb.jpg,-3\n", r"line 2: b.jpg has label -3; a number must be in \[0, 1,000,000\)"),
        ("a.jpg,1,2\n", "line 1: .* is neither a path nor a path and a label"),
        (",1\n", "line 1: .* is neither a path nor"),
        ("", "lists no files"),
        ("path,label\n", "lists no files"),
        ('a.jpg\n"b.jpg', "line 2: unexpected end of data"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, text: str, message: str) -> None:
    listing = write_list(tmp_path, text)

    with pytest.raises(DataError, match=message) as caught:
        FileList(listing)
    assert str(caught.value).startswith(str(listing))


def test_a_list_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(DataError, match=r"list\.txt, line 1: is no text in UTF-8"):
        FileList(tmp_path / "list.txt")


def test_a_zero_byte_or_a_label_of_thousands_of_digits_is_an_error_that_names_the_line(
    tmp_path: Path,
) -> None:
    write(tmp_path, "a.jpg")
    (tmp_path / "zero.txt").write_bytes(b"a.jpg\na\0.jpg\n")
    (tmp_path / "digits.txt").write_text(f"a.jpg,{'9' * 5000}\n")

    with pytest.raises(DataError, match=r"zero\.txt, line 2: .* has a zero byte"):
        FileList(tmp_path / "zero.txt")
    with pytest.raises(DataError, match=r"digits\.txt, line 1: a\.jpg has label 9{40}; a number must be in"):
        FileList(tmp_path / "digits.txt")


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.txt cannot be read: No such file"):
        FileList(tmp_path / "nothing.txt")


# -- What a path is ------------------------------------------------------------------------------------


def test_a_path_is_opened_as_what_is_found_there(tmp_path: Path) -> None:
    write(tmp_path, "labels/cat/a.jpg", "labels/README.md", "flat/a.jpg", "flat/b.jpg")
    (tmp_path / "list.txt").write_text("flat/b.jpg\n")

    assert isinstance(open_source(tmp_path / "labels"), ImageFolder)
    assert isinstance(open_source(str(tmp_path / "flat")), FlatFolder)
    assert isinstance(open_source(tmp_path / "list.txt"), FileList)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "labels/cat/a.jpg", "flat/a.jpg")
    (tmp_path / "list.txt").write_text("flat/a.jpg\n")
    monkeypatch.setenv("HOME", str(tmp_path))

    for path, opened in (("~/labels", ImageFolder), ("~/flat", FlatFolder), ("~/list.txt", FileList)):
        assert isinstance(open_source(path), opened)
        assert len(opened(Path(path))) == 1


@for_each("path", ["", None, 5, b"photos", "pho\0tos"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    for opened in (open_source, ImageFolder, FlatFolder, FileList):
        with pytest.raises(
            ConfigError, match=re.escape(f"{path!r} is not the path of a folder or of a list of files")
        ):
            opened(path)


def test_a_folder_that_could_be_either_is_asked_about(tmp_path: Path) -> None:
    write(tmp_path, "cat/a.jpg", "z.jpg", "b.jpg")

    with pytest.raises(ConfigError, match=r"both subfolders and images \(b\.jpg\)"):
        open_source(tmp_path)


def test_a_source_shows_what_it_is(tmp_path: Path) -> None:
    assert (
        repr(ImageFolder(write(tmp_path, "cat/a.jpg")))
        == f"ImageFolder({str(tmp_path)!r}): 1 sample, 1 class"
    )
