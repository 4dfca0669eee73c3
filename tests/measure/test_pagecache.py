"""The kernel's own answers about files that were just written."""

import os
from pathlib import Path

import psutil
import pytest

from penstock.measure.pagecache import cached_share, drop_cached


def stays_in_memory(path: Path) -> bool:
    """Tell whether a path lies on a file system that has no other place than memory."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")


def test_a_file_just_written_is_cached_until_it_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    with file.open("wb") as out:
        out.write(os.urandom(100_000))
        os.fsync(out.fileno())

    assert cached_share(str(file)) == 1.0

    drop_cached(str(file))

    assert cached_share(str(file)) == (1.0 if stays_in_memory(tmp_path) else 0.0)


def test_asking_does_not_read_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    with file.open("wb") as out:
        out.write(os.urandom(100_000))
        os.fsync(out.fileno())
    drop_cached(str(file))

    first = cached_share(str(file))

    assert cached_share(str(file)) == first


def test_an_empty_file_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    assert cached_share(str(tmp_path / "empty")) == 0.0


@pytest.mark.parametrize("ask", [cached_share, drop_cached])
def test_a_missing_file_is_an_error(tmp_path: Path, ask: "type[object]") -> None:
    with pytest.raises(FileNotFoundError):
        ask(str(tmp_path / "nothing"))  # type: ignore[call-arg]
