"""A data set is listed once: what is kept of a listing, what is seen to have changed, and what is never trusted."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.cache_folders import Folders
from penstock.errors import ConfigError, DataError, FormatError, WaitTimeout
from penstock.report import print_report
from penstock.store import (
    FileList,
    FlatFolder,
    ImageFolder,
    TarShards,
    catalogs,
    listing,
    listing_progress,
    open_source,
)
from penstock.store.calls import Calls
from penstock.store.catalog import _FRONT, VERSION, Catalog, CatalogKey, NewerCatalog, Packed
from penstock.store.files import FileSource
from penstock.store.listing_progress import ListingProgress

GOLDEN = Path(__file__).parents[1] / "golden" / "catalog-v1.catalog"
GOLDEN_SHARDS = GOLDEN.with_name("catalog-v2.catalog")
GOLDEN_LABELS = GOLDEN.with_name("catalog-v4.catalog")

Opener = Callable[..., Any]


class Store:
    """Data sets below a folder, whose catalogs are in another; each change has a time of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.kept = folder / "data", folder / "kept"
        self.data.mkdir()
        self.kept.mkdir()
        #: Folders whose entries were asked for since it was last cleared, and the lines reported.
        self.listed: list[str] = []
        self.lines: list[str] = []
        visible = listing.visible

        def counted(path: str) -> tuple[list[str], list[str]]:
            self.listed.append(os.path.relpath(path, self.data))
            return visible(path)

        monkeypatch.setattr(listing, "visible", counted)
        monkeypatch.setattr(catalogs, "_folders", lambda: Folders((self.kept,), self.kept, ""))
        monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 1)
        # Every folder has been quiet for long when it is listed: `later` keeps changes apart.
        monkeypatch.setattr(listing, "_RACY_NS", -(10**18))

    def later(self) -> None:
        """Return once a change would have another time than those before."""
        probe = self.kept.parent / "probe"
        probe.touch()
        before = probe.stat().st_ctime_ns
        while probe.stat().st_ctime_ns == before:
            probe.chmod(0o600)

    def write(self, *names: str) -> Path:
        self.later()
        for name in names:
            file = self.data / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(name.encode())
        return self.data

    def open(self, opener: Opener = open_source, place: Path | None = None, **options: Any) -> FileSource:
        self.listed.clear()
        source = opener(place or self.data, calls=Calls(report=self.lines.append), **options)
        assert isinstance(source, FileSource)
        return source

    @property
    def file(self) -> Path:
        (file,) = self.kept.glob("*.catalog")
        return file


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(tmp_path, monkeypatch)


def content(source: FileSource) -> tuple[Any, ...]:
    paths = [os.path.relpath(source.path_of(sample), source.root) for sample in range(len(source))]
    return (
        type(source),
        paths,
        source.sizes_bytes.tolist(),
        np.asarray(source.labels).tolist(),
        source.classes,
    )


# -- As bytes ------------------------------------------------------------------------------------------

ints = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=8) | st.binary(max_size=4).map(os.fsdecode)
names = st.binary(min_size=1, max_size=9).filter(lambda name: b"\0" not in name)


@st.composite
def some_catalogs(draw: st.DrawFn) -> Catalog:
    found = draw(st.lists(names, max_size=5))
    folders = draw(st.lists(texts, max_size=4))
    sizes, labels = (draw(arrays.arrays(np.int64, len(found), elements=ints)) for _ in range(2))
    stamps, counts = (draw(arrays.arrays(np.int64, len(folders), elements=ints)) for _ in range(2))
    key = CatalogKey(draw(texts), draw(texts), draw(st.none() | st.lists(texts, max_size=3).map(tuple)))
    shapes = (len(found), len(folders), len(folders))
    packed = Packed(*(draw(arrays.arrays(np.int64, shape, elements=ints)) for shape in shapes))
    return Catalog(
        key,
        draw(texts),
        draw(st.floats(allow_nan=False, allow_infinity=False)),
        np.frombuffer(b"".join(name + b"\0" for name in found), np.uint8),
        sizes,
        labels,
        tuple(draw(st.lists(texts, max_size=3))),
        tuple(folders),
        stamps,
        counts,
        draw(st.sampled_from([None, packed])),
    )


def values(catalog: Catalog) -> dict[str, Any]:
    found = vars(catalog) | ({} if catalog.packed is None else catalog.packed._asdict())
    del found["packed"]
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


@given(some_catalogs())
def test_what_is_written_is_read_back_equal(catalog: Catalog) -> None:
    assert values(Catalog.from_bytes(catalog.to_bytes())) == values(catalog)


def an_example() -> Catalog:
    return Catalog(
        CatalogKey("ImageFolder", "/data/photos", (".jpeg", ".jpg")),
        "ImageFolder",
        1_800_000_000.5,
        np.frombuffer(
            "cat/a.jpg\0cat/é\udcff.jpg\0dog/b.jpeg\0".encode("utf-8", "surrogateescape"), np.uint8
        ),
        np.array([7, 2**40, 0]),
        np.array([0, 0, 1]),
        ("cat", "dog"),
        ("", "cat", "dog"),
        np.array([11, 12, 2**62]),
        np.array([0, 2, 1]),
    )


def test_the_golden_catalog_is_read_and_written_bit_for_bit() -> None:
    assert values(Catalog.from_bytes(GOLDEN.read_bytes())) == values(an_example())
    assert an_example().to_bytes() == GOLDEN.read_bytes()


def an_example_of_shards() -> Catalog:
    return Catalog(
        CatalogKey("open_source", "/data/{a,b}.tar", (".jpeg", ".jpg")),
        "TarShards",
        1_800_000_000.5,
        np.frombuffer("0.jpg\0é\udcff.jpg\00.jpg\0".encode("utf-8", "surrogateescape"), np.uint8),
        np.array([7, 2**40, 0]),
        np.array([0, 0, 1]),
        ("cat", "dog"),
        ("/data/a.tar", "/data/b.tar"),
        np.array([11, 2**62]),
        np.array([2, 1]),
        Packed(np.array([512, 2048, 512]), np.array([2**41, 10240]), np.array([10**18, 1])),
    )


def test_the_golden_catalog_of_shards_is_read_and_written_bit_for_bit() -> None:
    assert values(Catalog.from_bytes(GOLDEN_SHARDS.read_bytes())) == values(an_example_of_shards())
    assert an_example_of_shards().to_bytes() == GOLDEN_SHARDS.read_bytes()


def an_example_with_labels() -> Catalog:
    return Catalog(
        CatalogKey("Manifest(...)", "/data/train.csv"),
        "Manifest",
        1_800_000_000.5,
        np.frombuffer("0.jpg\0é\udcff.jpg\00.jpg\0".encode("utf-8", "surrogateescape"), np.uint8),
        np.array([7, 2**40, 0]),
        {"age": np.array([0.5, 1, 2], np.float32), "tags": np.array([[0, 1], [1, 1], [0, 0]], np.uint8)},
        (),
        ("train.csv", ""),
        np.array([11, 2**62]),
        np.array([0, 0]),
        label_classes={"tags": ("cat", "dog")},
    )


def test_the_golden_catalog_with_labels_is_read_and_written_bit_for_bit() -> None:
    found = Catalog.from_bytes(GOLDEN_LABELS.read_bytes())

    assert isinstance(found.labels, dict)
    assert found.labels["age"].tolist() == [0.5, 1, 2]
    assert (found.labels["tags"].dtype, found.labels["tags"].tolist()) == (np.uint8, [[0, 1], [1, 1], [0, 0]])
    assert (found.label_classes, found.folders) == ({"tags": ("cat", "dog")}, ("train.csv", ""))
    assert found.to_bytes() == an_example_with_labels().to_bytes() == GOLDEN_LABELS.read_bytes()


def test_no_changed_byte_and_no_missing_byte_goes_unseen() -> None:
    for example in (an_example(), an_example_of_shards(), an_example_with_labels()):
        data = example.to_bytes()
        for place in range(len(data)):
            damaged = bytearray(data)
            damaged[place] ^= 1 << place % 8
            with pytest.raises(FormatError, match=r"is damaged|is no catalog|is cut off") as caught:
                Catalog.from_bytes(bytes(damaged))
            assert not isinstance(caught.value, NewerCatalog)
            with pytest.raises(FormatError, match="is cut off"):
                Catalog.from_bytes(data[:place])
    with pytest.raises(FormatError, match="is cut off"):
        Catalog.from_bytes(data + b"\0")


def newer(data: bytes) -> bytes:
    """Return a catalog as a later Penstock may write it: nothing behind its front is known."""
    import xxhash

    magic, _, header, length = _FRONT.unpack_from(data)
    front = _FRONT.pack(magic, VERSION + 1, header, length)
    return front + xxhash.xxh3_64_digest(front) + b"something else"


# -- Opened again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", ["auto", "never"])
@pytest.mark.parametrize("opener", [open_source, ImageFolder])
def test_a_data_set_that_did_not_change_is_not_listed_again(
    store: Store, opener: Opener, refresh: str
) -> None:
    store.write("cat/a.jpg", "cat/deep/b.jpg", "dog/c.png", "dog/d.txt")
    first = content(store.open(opener))
    assert sorted(store.listed) == [".", "cat", "cat/deep", "dog"]

    assert content(store.open(opener, refresh=refresh)) == first
    assert store.listed == []
    assert store.lines == []


def test_a_flat_folder_and_a_list_are_not_listed_again_either(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("photos/a.jpg", "photos/b.jpg", "lists/unused.jpg")
    (store.data / "lists" / "some.txt").write_text(f"../photos/b.jpg\n{store.data}/photos/a.jpg\n")
    flat, some = store.data / "photos", store.data / "lists" / "some.txt"
    before = [content(store.open(place=place)) for place in (flat, some)]

    def refuse(*_: object) -> None:
        raise AssertionError("it is listed again")

    monkeypatch.setattr(listing, "visible", refuse)
    monkeypatch.setattr(listing, "_size_of", refuse)
    assert [content(store.open(place=place)) for place in (flat, some)] == before


@pytest.mark.parametrize("opener", [ImageFolder, FlatFolder])
def test_other_endings_and_other_classes_have_catalogs_of_their_own(store: Store, opener: Opener) -> None:
    store.write("a.jpg", "b.png", "cat/a.jpg", "cat/b.png")
    every = content(store.open(opener))
    jpegs = content(store.open(opener, extensions=[".JPG"]))
    all_files = content(store.open(opener, extensions=None))

    assert len(every[1]) == len(all_files[1]) == 2 * len(jpegs[1]) == 2
    assert content(store.open(opener, extensions=(".jpg",))) == jpegs
    assert content(store.open(opener)) == every
    assert store.listed == []
    assert len(list(store.kept.iterdir())) == 3
    with pytest.raises(ConfigError, match="both subfolders and images"):
        store.open()


def test_a_link_to_a_data_set_has_its_catalog_and_its_own_root(store: Store) -> None:
    store.write("photos/cat/a.jpg")
    (store.data / "link").symlink_to("photos")
    store.open(place=store.data / "photos")

    linked = store.open(place=store.data / "link")

    assert store.listed == []
    assert linked.path_of(0) == str(store.data / "link/cat/a.jpg")


# -- What changed --------------------------------------------------------------------------------------

BEFORE = ("cat/a.jpg", "cat/deep/b.jpg", "cat/deep/deeper/c.jpg", "dog/d.jpg", "dog-2/e.jpg")
#: Changes, step by step, and the folders that are listed for each.
CHANGES: dict[str, tuple[list[str], set[str]]] = {
    "a file is added": (["write cat/z.jpg"], {"cat"}),
    "a file is removed": (["remove cat/deep/b.jpg"], {"cat/deep"}),
    "a file is renamed": (["move dog/d.jpg dog/0.jpg"], {"dog"}),
    "a file moves": (["move cat/a.jpg dog/a.jpg"], {"cat", "dog"}),
    "a file replaces another": (["write dog/longer.txt", "move dog/longer.txt dog/d.jpg"], {"dog"}),
    "a file is added far below": (["write cat/deep/deeper/0.jpg"], {"cat/deep/deeper"}),
    "a nested folder is added": (["write dog/new/n.jpg"], {"dog", "dog/new"}),
    "a nested folder is removed": (["remove cat/deep/deeper"], {"cat/deep"}),
    # What is below a folder that was renamed is listed, too: its path is another.
    "a nested folder is renamed": (["move cat/deep cat/abyss"], {"cat", "cat/abyss", "cat/abyss/deeper"}),
    "a label is added": (["write bee/b.jpg"], {".", "bee"}),
    "a label is removed": (["remove dog"], {"."}),
    "a label is renamed": (["move dog ape"], {".", "ape"}),
    "two labels change places": (["move dog .x", "move dog-2 dog", "move .x dog-2"], {".", "dog", "dog-2"}),
    "a folder behind a link changes": (["write ../elsewhere/y.jpg"], {"linked"}),
    "a link leads elsewhere": (["remove linked", "link linked ../elsewhere-too"], {".", "linked"}),
    "times are set back": (["write cat/z.jpg", "age cat"], {"cat"}),
}


def apply(data: Path, step: str) -> None:
    """Take a step of a change."""
    what, name, *more = step.split()
    path = data / name
    if what == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    elif what == "move":
        path.rename(data / more[0])
    elif what == "link":
        path.symlink_to(more[0])
    elif what == "age":
        os.utime(path, ns=(0, 0))
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen_and_no_folder_is_listed_but_those_that_changed(
    store: Store, change: str
) -> None:
    store.write(*BEFORE, "../elsewhere/x.jpg", "../elsewhere-too/other.jpg")
    (store.data / "linked").symlink_to("../elsewhere")
    os.utime(store.data / "cat", ns=(0, 0))
    store.open()
    store.later()
    steps, listed = CHANGES[change]

    for step in steps:
        apply(store.data, step)
    found = content(store.open())

    assert sorted(store.listed) == sorted(listed)
    assert found == content(store.open(refresh="full"))
    assert found == content(store.open())
    assert store.listed == []


folders = st.lists(st.sampled_from("ab"), max_size=3)
files = st.sampled_from(["x.jpg", "y.jpg", "z.txt", ".jpg"])
paths = st.tuples(folders, files).map(lambda path: "/".join([*path[0], path[1]])) | folders.filter(bool).map(
    "/".join
)
steps = st.tuples(st.sampled_from(["write", "remove", "move"]), paths, paths)


def step_at_random(root: Path, step: tuple[str, str, str]) -> None:
    """Take a step if it can be taken."""
    what, one, two = step
    with suppress(OSError):
        if what == "write":
            (root / one).parent.mkdir(parents=True, exist_ok=True)
            (root / one).unlink(missing_ok=True)  # bytes that change in place are not seen
            (root / one).write_bytes(one.encode())
        elif what == "move":
            (root / one).rename(root / two)
        elif (root / one).is_dir():
            shutil.rmtree(root / one)
        else:
            (root / one).unlink()


def outcome(store: Store, **options: Any) -> object:
    """Return what a data set is, or why it is none."""
    try:
        return content(store.open(ImageFolder, **options))
    except DataError as error:
        return str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(steps, max_size=4), min_size=1, max_size=5), st.sampled_from([None, (".jpg",)]))
def test_after_any_changes_a_data_set_is_what_a_full_listing_finds(
    store: Store, all_changes: list[list[tuple[str, str, str]]], extensions: tuple[str, ...] | None
) -> None:
    shutil.rmtree(store.data)
    for file in store.kept.iterdir():
        file.unlink()
    store.write(*(f"{folder}/x.jpg" for folder in ("a", "a/a", "a/a/b", "a/b", "b", "b/a", "b/a/a")))
    for changes in [[], *all_changes]:
        store.later()
        for step in changes:
            step_at_random(store.data, step)

        found = outcome(store, extensions=extensions)

        kept = {file: file.read_bytes() for file in store.kept.iterdir()}
        assert found == outcome(store, extensions=extensions, refresh="full")
        for file, data in kept.items():
            file.write_bytes(data)


def test_a_folder_that_changed_a_moment_ago_is_listed_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a file system ticks some hundred times a second: a second change may leave the time as it is."""
    store.write("cat/a.jpg", "dog/b.jpg")
    newest = max((store.data / name).stat().st_ctime_ns for name in ("", "cat", "dog"))
    monkeypatch.setattr(listing, "_RACY_NS", 2 * 10**9)
    for now_seconds, count in ((1, 3), (1.9, 3), (3, 3), (4, 0)):
        monkeypatch.setattr(time, "time_ns", lambda now=newest + int(now_seconds * 1e9): now)
        store.open()

        assert len(store.listed) == count, now_seconds


def test_a_list_that_changed_or_whose_files_did_is_read_anew(store: Store) -> None:
    store.write("photos/a.jpg", "photos/b.jpg")
    some = store.data / "some.txt"
    some.write_text("photos/a.jpg\n")
    store.open(FileList, some)
    store.later()
    some.write_text("photos/b.jpg\n")

    assert content(store.open(FileList, some))[1] == ["photos/b.jpg"]
    store.later()
    (store.data / "photos/b.jpg").unlink()
    with pytest.raises(DataError, match=r"some\.txt, line 1: .*b\.jpg cannot be found"):
        store.open(FileList, some)


@pytest.mark.parametrize("what", ["flat", "list", "labels"])
def test_a_path_where_something_else_is_by_now_is_listed_as_that(store: Store, what: str) -> None:
    def make(what: str) -> Path:
        store.later()
        place = store.data / "set"
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        if what == "list":
            store.write("a.jpg")
            place.write_text("a.jpg\n")
        else:
            store.write("set/a.jpg" if what == "flat" else "set/cat/a.jpg")
        return place

    for before in ("flat", "list", "labels"):
        store.open(place=make(before))
        found = content(store.open(place=make(what)))

        assert found == content(store.open(place=store.data / "set", refresh="full"))


def test_a_label_that_lost_its_last_file_is_named(store: Store) -> None:
    store.write("cat/a.jpg", "dog/b.jpg", "dog/deep/notes.txt")
    store.open()
    store.later()
    (store.data / "dog/b.jpg").unlink()

    with pytest.raises(DataError, match=r"dog has 1 files but none that ends in .*; 1 end in '\.txt'"):
        store.open()


# -- What is trusted -----------------------------------------------------------------------------------


def test_a_file_overwritten_in_place_is_named_when_it_is_read_and_found_by_a_full_refresh(
    store: Store,
) -> None:
    store.write("cat/a.jpg", "cat/b.jpg", "cat/c.jpg")
    (store.data / "cat/c.jpg").write_bytes(b"")
    store.open()
    (store.data / "cat/a.jpg").write_bytes(b"longer than it was")
    (store.data / "cat/b.jpg").write_bytes(b"short")
    (store.data / "cat/c.jpg").write_bytes(b"there")

    source = store.open()
    for sample, sizes in enumerate(["grown from 9 to 18", "shrunk from 9 to 5", "grown from 0 to 5"]):
        with pytest.raises(DataError, match=rf'has {sizes} bytes since .* with refresh="full"'):
            source.read(sample)
        with pytest.raises(DataError, match=f"has {sizes} bytes"):
            source.read_into(sample, memoryview(bytearray(99)))
    assert store.open(refresh="full").read(0) == b"longer than it was"
    assert store.open().sizes_bytes.tolist() == [18, 5, 5]


def test_never_asks_nothing_of_the_data_set(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("cat/a.jpg", "cat/b.jpg")
    store.open()
    store.later()
    (store.data / "cat/b.jpg").unlink()

    source = store.open(refresh="never")

    assert len(source) == 2
    assert store.listed == []
    with pytest.raises(DataError, match=r'b\.jpg has vanished .* with refresh="auto" or "full"'):
        source.read(1)
    assert len(store.open()) == 1


def test_never_lists_where_nothing_is_kept(store: Store) -> None:
    store.write("cat/a.jpg")

    assert len(store.open(refresh="never")) == 1
    assert store.listed == [".", "cat"]


@pytest.mark.parametrize("opener", [open_source, ImageFolder, FlatFolder, FileList])
def test_another_word_for_refresh_is_refused(store: Store, opener: Opener) -> None:
    with pytest.raises(ConfigError, match='refresh is True; it is "auto"'):
        store.open(opener, refresh=True)


def test_another_argument_of_a_source_is_refused(store: Store) -> None:
    with pytest.raises(TypeError, match="FlatFolder takes no argument 'refrsh'"):
        store.open(FlatFolder, refrsh="never")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-3], r"is cut off: \d+ of \d+ bytes are there"),
        (lambda data: data[:20], "is cut off: 20 bytes are there"),
        (lambda data: b"", "is cut off: 0 bytes"),
        (lambda data: data[:-1] + b"x", "is damaged: its checksum"),
        (lambda data: b"x" + data[1:], "is no catalog"),
    ],
)
def test_a_damaged_catalog_is_reported_and_replaced(
    store: Store, damage: Callable[[bytes], bytes], said: str
) -> None:
    store.write("cat/a.jpg")
    first = content(store.open())
    store.file.write_bytes(damage(store.file.read_bytes()))

    assert content(store.open()) == first
    (line,) = store.lines
    assert re.search(
        f"the catalog of {store.data} in {store.file} {said}.*: the data set is listed anew", line
    )
    store.open()
    assert store.listed == []
    assert len(store.lines) == 1


def test_a_catalog_of_a_later_penstock_is_reported_and_left_alone(store: Store) -> None:
    store.write("cat/a.jpg")
    first = content(store.open())
    later = newer(store.file.read_bytes())
    store.file.write_bytes(later)

    for refresh in ("auto", "never", "full"):
        assert content(store.open(refresh=refresh)) == first
    assert store.file.read_bytes() == later
    assert len(store.lines) == 2  # "full" reads none
    assert all(
        f"was written by a later Penstock (version {VERSION + 1}; this one reads {VERSION})" in line
        for line in store.lines
    )


def test_a_catalog_of_another_data_set_is_not_taken_for_this_one(store: Store) -> None:
    store.write("one/cat/a.jpg", "two/cat/b.jpg")
    store.open(place=store.data / "one")
    one = store.file.read_bytes()
    store.file.unlink()
    store.open(place=store.data / "two")
    store.file.write_bytes(one)

    assert content(store.open(place=store.data / "two"))[1] == ["cat/b.jpg"]
    assert re.search(rf"the catalog of {store.data}/two in .* is of {store.data}/one", store.lines[0])


def test_a_catalog_that_cannot_be_kept_keeps_nobody_from_reading(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("cat/a.jpg")
    monkeypatch.setattr(listing, "PATIENCE_SECONDS", 0)
    store.kept.rmdir()

    assert len(store.open()) == 1
    assert re.search(
        r"listed 1 sample of .*; no catalog of it is kept: .* cannot be written: No such", store.lines[0]
    )
    monkeypatch.setattr(catalogs, "_folders", lambda: Folders((), None, ""))
    assert len(store.open()) == 1
    assert store.lines[1].endswith("no folder for it can be written: give one that can be, as PENSTOCK_CACHE")
    monkeypatch.setattr(
        catalogs, "_folders", lambda: Folders((), store.data, "PENSTOCK_CACHE is 'x', which is full")
    )
    assert len(store.open()) == 1
    assert store.lines[2].startswith("PENSTOCK_CACHE is 'x', which is full: the catalog of ")


def test_a_folder_of_catalogs_that_does_not_answer_in_time_is_no_missing_catalog(store: Store) -> None:
    class Refusing(Calls):
        def one(self, place: str, call: Callable[[], Any]) -> Any:
            if place.endswith(".catalog"):
                raise WaitTimeout(f"{place} does not answer")
            return super().one(place, call)

    store.write("cat/a.jpg")
    for refresh in ("auto", "never", "full"):  # read, and written
        with pytest.raises(WaitTimeout, match="does not answer"):
            open_source(store.data, refresh=refresh, calls=Refusing())


def test_catalogs_are_kept_next_to_the_kernels(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(catalogs.LEAST_SAMPLES):
        (data / f"{number}.jpg").touch()
    script = f"from penstock import open_source; open_source({str(data)!r})"
    environment = os.environ | {"PENSTOCK_CACHE": str(tmp_path / "cache")}

    subprocess.run([sys.executable, "-c", script], env=environment, check=True)

    (file,) = (tmp_path / "cache").glob("*/*")
    assert file.parent.name == "catalogs"
    assert len(Catalog.from_bytes(file.read_bytes())) == catalogs.LEAST_SAMPLES


def test_a_small_data_set_leaves_no_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 2)
    store.write("cat/a.jpg")

    store.open()

    assert not list(store.kept.iterdir())


def test_catalogs_that_nobody_used_for_long_are_removed_when_another_is_written(store: Store) -> None:
    store.write("one/cat/a.jpg", "two/cat/b.jpg", "three/cat/c.jpg")
    for name in ("one", "two"):
        store.open(place=store.data / name)
    for file in store.kept.iterdir():
        os.utime(file, (0, 0))
    store.open(place=store.data / "one")  # used

    store.open(place=store.data / "three")

    assert {kept.catalog.key.place for kept in catalogs.kept_catalogs() if kept.catalog} == {
        str(store.data / "one"),
        str(store.data / "three"),
    }


def test_of_the_catalogs_of_other_places_the_headers_alone_are_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("one/cat/a.jpg", "two/cat/b.jpg")
    for name in ("one", "two"):
        store.open(place=store.data / name)
    for name, data in (("no", b"nothing"), ("half", next(store.kept.iterdir()).read_bytes()[:60])):
        (store.kept / f"{name}.catalog").write_bytes(data)
    (store.kept / "folder.catalog").mkdir()
    parsed = []
    whole = Catalog.from_bytes

    def counted(data: bytes) -> Catalog:
        parsed.append(whole(data))
        return parsed[-1]

    monkeypatch.setattr(Catalog, "from_bytes", counted)
    found = [one.catalog for one in catalogs.kept_catalogs(str(store.data / "one"))]

    assert found == parsed
    assert [each.key.place for each in parsed] == [str(store.data / "one")]


def test_another_ranks_catalog_serves_without_a_listing(store: Store) -> None:
    store.write("cat/a.jpg", "dog/b.jpg")
    sent = store.open().catalog.to_bytes()

    received = store.open(catalog=Catalog.from_bytes(sent))

    assert store.listed == []
    assert content(received) == content(store.open())
    assert received.read(1) == b"dog/b.jpg"


def test_what_is_no_catalog_or_one_of_another_source_is_refused_with_what_to_do(store: Store) -> None:
    store.write("cat/a.jpg")
    of_folders = store.open().catalog

    wrong: Any
    for wrong in (False, True, "train.catalog", {}):
        with pytest.raises(ConfigError, match=r"catalog is .* leave it out .* refresh=\"full\""):
            store.open(catalog=wrong)
    for opener in (FlatFolder, TarShards):
        with pytest.raises(ConfigError, match=f"catalog is of ImageFolder, and {opener.__name__} cannot"):
            store.open(opener, catalog=of_folders)
    with pytest.raises(ConfigError, match=r"catalog is of CocoImages, .* give it to CocoImages"):
        store.open(catalog=replace(of_folders, kind="CocoImages"))


# -- The compiled loop ---------------------------------------------------------------------------------


def test_the_compiled_loop_finds_the_same_sizes_and_the_same_faults(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(*[f"cat/{name}.jpg" for name in range(600)], "dog/a.jpg", "../elsewhere/x.jpg")
    (store.data / "dog/link.jpg").symlink_to(store.data.parent / "elsewhere/x.jpg")
    (store.data / "list.txt").write_text(f"cat/7.jpg\n{store.data}/dog/a.jpg\n")
    places = store.data, store.data / "list.txt"
    plain = [content(store.open(place=place, refresh="full")) for place in places]
    monkeypatch.setattr(listing, "_LEAST_COMPILED", 1)
    size_of, asked = listing._size_of, list[str]()

    def asking(path: str, *rest: Any) -> int:
        asked.append(path)
        return size_of(path, *rest)

    monkeypatch.setattr(listing, "_size_of", asking)

    assert [content(store.open(place=place, refresh="full")) for place in places] == plain
    assert asked == []
    (store.data / "dog/z.jpg").symlink_to("nothing")
    with pytest.raises(DataError, match=r"dog/z\.jpg is a link to nothing"):
        store.open(refresh="full")
    (store.data / "dog/z.jpg").unlink()
    os.mkfifo(store.data / "dog/z.jpg")
    with pytest.raises(DataError, match=r"dog/z\.jpg is not a regular file"):
        store.open(refresh="full")


def test_without_statx_python_asks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("cat/a.jpg")
    monkeypatch.setattr(listing, "_LEAST_COMPILED", 1)
    monkeypatch.setattr(listing, "_address_of_statx", lambda: None)

    assert store.open().sizes_bytes.tolist() == [9]


# -- Progress ------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)


def test_a_long_listing_reports_less_and_less_often_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(monkeypatch), list[str]()
    progress = ListingProgress("/data", lines.append)
    for second in range(45):
        clock.seconds = 100.0 + second
        assert progress.look() > 0
        progress.found.append(1000)
        if second >= 20:
            progress.total = 50_000
            progress.sized.append(2000)
    progress.close()

    assert lines == [
        "listing /data for 5 s: 5,000 files found",
        "listing /data for 10 s: 10,000 files found",
        "listing /data for 20 s: 20,000 files found",
        "listing /data for 40 s: sizes of 40,000 of 50,000 files",
    ]


def test_on_a_terminal_a_bar_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    clock, screen = Clock(monkeypatch), Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    progress = ListingProgress("/data/[x]", print_report)
    progress.found.append(3)
    assert progress.look() == 3.0
    assert screen.getvalue() == ""
    clock.seconds += 4
    progress.look()
    progress.total = 3
    progress.sized.append(2)
    progress.look()
    progress.close()

    assert "listing /data/[x]: 3 files found" in screen.getvalue()
    assert "listing /data/[x]: sizes of 2 of 3 files" in screen.getvalue()


@pytest.mark.parametrize("in_own_thread", [False, True])
def test_whoever_waits_for_a_listing_sees_its_progress(
    store: Store, monkeypatch: pytest.MonkeyPatch, in_own_thread: bool
) -> None:
    store.write("cat/a.jpg", "dog/b.jpg")
    monkeypatch.setattr(listing_progress, "_FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(listing, "PATIENCE_SECONDS", 0.0)

    open_source(store.data, calls=Calls(report=store.lines.append, in_own_thread=in_own_thread))

    assert store.lines[0].startswith(f"listing {store.data} for 0 s: ")
    assert re.fullmatch(
        rf"listed 2 samples of {store.data} in 0\.\d s; the next start looks for changes only",
        store.lines[-1],
    )
