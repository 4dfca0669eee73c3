"""Reading a group of samples in one call, by the compiled loop, by Python, and from a source that knows no groups."""

from __future__ import annotations

import os
import socket
import tarfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.privileges import without_permission

from penstock.errors import ConfigError, DataError
from penstock.store import FileList, FlatFolder, ImageFolder, Source, TarShards, read_group
from penstock.store.files import READ_FILES

Ids = NDArray[np.int64]


@pytest.fixture(params=["compiled", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by the compiled loop, or by Python, as while that is compiled."""
    if request.param == "plain":
        monkeypatch.setattr(type(READ_FILES), "ask", lambda part: None)


def ids_of(*samples: int) -> Ids:
    return np.array(samples, np.int64)


def read(source: Any, ids: Ids, space: int = 0) -> tuple[list[bytes], dict[int, Exception]]:
    """Return each sample's place, and the errors. space: bytes of each place beyond the sample."""
    sizes = source.sizes_bytes[ids] + space
    begins = np.concatenate(([3], 3 + np.cumsum(sizes)))
    into = np.full(begins[-1] + 2, 0xAA, np.uint8)
    errors = dict(read_group(source, ids, into, begins))
    assert into[:3].tolist() == [0xAA] * 3
    assert into[-2:].tolist() == [0xAA] * 2
    return [into[a:b].tobytes() for a, b in pairwise(begins)], errors


def read_alone(source: FlatFolder, sample: int) -> bytes | DataError:
    try:
        return source.read(sample)
    except DataError as error:
        return error


# What may become of a file after it was listed.


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _serve(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


FATES: dict[str, Callable[[Path], Any]] = {
    "stays": lambda path: None,
    "vanishes": Path.unlink,
    "grows": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "shrinks": lambda path: os.truncate(path, path.stat().st_size // 2),
    "becomes empty": lambda path: os.truncate(path, 0),
    "becomes a folder": lambda path: _replace(path, Path.mkdir),
    "becomes a socket": lambda path: _replace(path, _serve),
    "becomes a link to itself": lambda path: _replace(path, lambda file: file.symlink_to(file)),
    "becomes a device": lambda path: _replace(path, lambda file: file.symlink_to("/dev/zero")),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_a_group_is_what_its_samples_are_one_by_one(
    form: None, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Files change while a training runs: each sample, and each error, is the one of `read`."""
    folder = tmp_path_factory.mktemp("files")
    size = st.one_of(st.integers(0, 5), st.sampled_from([4095, 4096, 4097, 70_000]))
    files = data.draw(st.lists(st.tuples(size, st.sampled_from(sorted(FATES))), min_size=1, max_size=12))
    random = np.random.default_rng(len(files))
    for number, (nbytes, _) in enumerate(files):
        (folder / f"{number:02}ü").write_bytes(random.bytes(nbytes))
    source = FlatFolder(folder, extensions=None)
    for number, (_, fate) in enumerate(files):
        FATES[fate](folder / f"{number:02}ü")
    ids = np.array(data.draw(st.lists(st.integers(0, len(files) - 1), max_size=30)), np.int64)

    contents, errors = read(source, ids, data.draw(st.integers(0, 3)))

    assert list(errors) == sorted(errors)
    for index, sample in enumerate(ids.tolist()):
        expected = read_alone(source, sample)
        if isinstance(expected, DataError):
            assert repr(errors[index]) == repr(expected)
        else:
            assert index not in errors
            assert contents[index][: len(expected)] == expected
            assert set(contents[index][len(expected) :]) <= {0xAA}


def test_a_file_that_may_not_be_read_is_named(form: None, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode())
    source = FlatFolder(tmp_path, extensions=None)

    with without_permission(tmp_path / "b"):
        contents, errors = read(source, ids_of(0, 1, 2))

    assert contents[::2] == [b"a", b"c"]
    assert list(errors) == [1]
    assert isinstance(errors[1], DataError)
    assert str(errors[1]).startswith(f"{tmp_path / 'b'} may not be read by user")


def test_the_loop_waits_for_no_file(tmp_path: Path) -> None:
    """One became a pipe: a thread that waits in Python can be named, and left; tests/stories has such stores."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"content")
    source = FlatFolder(tmp_path, extensions=None)
    _replace(tmp_path / "a", os.mkfifo)
    files = source._prefix_bytes, source.names, source._starts, source.sizes_bytes
    into, failed = np.zeros(14, np.uint8), np.full(2, -1)

    count = READ_FILES.wait()(*files, ids_of(0, 1), into, ids_of(0, 7, 14), failed)

    assert (count, failed[0]) == (1, 0)
    assert into[7:].tobytes() == b"content"


def test_names_may_be_absolute_long_and_any_bytes(form: None, tmp_path: Path) -> None:
    root = tmp_path / "root"
    inner = root / ("d" * 200) / ("e" * 200)
    inner.mkdir(parents=True)
    raw = os.fsencode(inner) + b"/\xff\xfe.jpg"
    Path(os.fsdecode(raw)).write_bytes(b"raw")
    outside = tmp_path / "outside"
    outside.write_bytes(b"outside")
    (root / "list").write_text(f"{outside}\n../outside\n")

    assert read(ImageFolder(root), ids_of(0, 0)) == ([b"raw", b"raw"], {})
    assert read(FileList(root / "list"), ids_of(1, 0)) == ([b"outside", b"outside"], {})


def test_a_path_that_is_too_long_by_now_is_an_error(form: None, tmp_path: Path) -> None:
    """The folder was moved down a deep tree, and the process with it, which a relative path survives."""
    (tmp_path / "a").write_bytes(b"content")
    source = FlatFolder(tmp_path, extensions=None)
    for length in (4095 - 2, 4096, 5000):
        prefix = f"{tmp_path}{'/' * (length - len(str(tmp_path)))}"
        source._prefix, source._prefix_bytes = prefix, np.frombuffer(prefix.encode(), np.uint8)

        contents, errors = read(source, ids_of(0))

        if length == 4095 - 2:
            assert (contents, errors) == ([b"content"], {})
        else:
            assert "File name too long" in str(errors[0])


class TestBadGroup:
    @pytest.fixture(params=["files", "a shard"])
    def source(self, form: None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
        for name, size in (("a.bin", 3), ("b.bin", 5)):
            (tmp_path / name).write_bytes(name[:1].encode() * size)
        if request.param == "files":
            yield FlatFolder(tmp_path, extensions=None)
            return
        with tarfile.open(tmp_path / "0.tar", "w") as tar:
            for name in ("a.bin", "b.bin"):
                tar.add(tmp_path / name, name)
        shards = TarShards(tmp_path / "0.tar", member="bin")
        yield shards
        shards.close()

    @for_each("sample", [-1, 2, 2**62])
    def test_a_sample_that_does_not_exist_is_an_index_error(self, source: Source, sample: int) -> None:
        into = np.zeros(10, np.uint8)

        with pytest.raises(IndexError, match=f"no sample {sample}"):
            read_group(source, ids_of(0, sample), into, ids_of(0, 3, 10))

        assert not into.any()

    @for_each(
        "begins",
        [
            (0, 3, 7),
            (0, 2, 10),
            (-1, 3, 10),
            (6, 10, 15),
            (0, 2**63 - 1, -(2**63) + 20),
            (2**63 - 1, -(2**63) + 20, 10),
            (5, 3, 8),
        ],
    )
    def test_a_place_that_is_too_small_or_outside_is_refused(
        self, source: Source, begins: tuple[int, ...]
    ) -> None:
        memory = np.zeros(30, np.uint8)

        with pytest.raises(ConfigError, match="cannot hold"):
            read_group(source, ids_of(0, 1), memory[10:20], ids_of(*begins))

        assert not memory.any()

    def test_other_arrays_are_refused(self, source: Source) -> None:
        good: dict[str, Any] = {"ids": ids_of(0), "into": np.zeros(3, np.uint8), "begins": ids_of(0, 3)}
        locked = np.zeros(3, np.uint8)
        locked.flags.writeable = False
        for name, bad in (
            ("ids", np.zeros(1, np.int32)),
            ("into", np.zeros(6, np.uint8)[::2]),
            ("into", np.zeros((3, 1), np.uint8)),
            ("into", locked),
            ("into", b"123"),
            ("begins", ids_of(0)),
        ):
            with pytest.raises(TypeError):
                read_group(source, **(good | {name: bad}))
        assert read_group(source, **good) == []

    def test_any_contiguous_memory_of_bytes_is_written(self, source: Source) -> None:
        memory = bytearray(8)

        assert read_group(source, ids_of(1, 0), memoryview(memory), ids_of(0, 5, 8)) == []

        assert memory == b"bbbbbaaa"


class Rows:
    """A simple source: it has nothing but `read`."""

    sizes_bytes, labels, classes = np.array([3, 4, 5]), np.full(3, -1), ()

    def __len__(self) -> int:
        return 3

    def read(self, sample: int) -> bytes:
        if sample == 1:
            raise KeyError("no row 1")
        return b"abc" if sample == 0 else b"four"

    def describe(self, sample: int) -> str:
        return f"row {sample}"


def test_a_simple_source_needs_only_read() -> None:
    contents, errors = read(Rows(), ids_of(0, 1, 2, 0))

    assert contents[0] == contents[3] == b"abc"
    assert [repr(error) for error in errors.values()] == [
        "KeyError('no row 1')",
        'DataError("row 2: has 4 bytes where the source\'s sizes_bytes says 5: correct the source")',
    ]
    assert list(errors) == [1, 2]
