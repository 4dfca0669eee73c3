"""The kernel's own answers about files that were just written."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.privileges import without_permission

from penstock.measure.pagecache import cached_share, drop_cached


def stays_in_memory(path: Path) -> bool:
    """Tell whether a path lies on a file system that has no other place than memory."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[int]:
    """Return a descriptor to read a file by that was just written, and is not on the disk yet."""
    file = tmp_path / "a.bin"
    file.write_bytes(os.urandom(100_000))
    with file.open("rb") as read:
        yield read.fileno()


def test_a_file_just_written_is_cached_until_it_is_dropped(opened: int, tmp_path: Path) -> None:
    assert cached_share(opened) == 1.0

    drop_cached(opened)

    assert cached_share(opened) == (1.0 if stays_in_memory(tmp_path) else 0.0)


def test_asking_does_not_read_the_file(opened: int) -> None:
    drop_cached(opened)

    first = cached_share(opened)

    assert cached_share(opened) == first


def test_of_anothers_file_that_may_not_be_written_it_is_not_known(
    opened: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of such a file the kernel says that it is cached, whether it is or not."""
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert cached_share(opened) == 1.0

    with without_permission(tmp_path / "a.bin"):
        assert cached_share(opened) is None


def test_an_empty_file_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    with (tmp_path / "empty").open("rb") as empty:
        assert cached_share(empty.fileno()) == 0.0


def test_what_has_no_pages_cannot_drop_them() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w"), pytest.raises(OSError):
        drop_cached(reading)
