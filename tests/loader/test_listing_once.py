"""One rank of a job lists the data set, and the others take its catalog: each rank is a thread."""

from __future__ import annotations

import tarfile
import threading
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.patience import patient
from tests.ranks.in_memory import MemoryJob, run

from penstock.cache_folders import Folders
from penstock.errors import DataError
from penstock.loader import Loader, listing_once
from penstock.loader.transforms import DecodeRaw
from penstock.ranks import Ranks
from penstock.store import catalogs, listing, open_source
from penstock.store.tar import read_members

LABELS = ("ape", "bee", "cat", "dog")
COUNT = 64


class Folder:
    """A data set, its catalogs, and how often each of its folders was listed, by which ranks."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.kept = place / "data", place / "kept"
        self.kept.mkdir()
        for number, label in enumerate(LABELS):
            (self.data / label).mkdir(parents=True)
            for name in range(16):
                (self.data / label / f"{name}.png").write_bytes(bytes([16 * number + name] * 4))
        self.listed: Counter[str] = Counter()
        visible = listing.visible

        def counted(path: str) -> tuple[list[str], list[str]]:
            self.listed[path] += 1
            return visible(path)

        monkeypatch.setattr(listing, "visible", counted)
        monkeypatch.setattr(listing, "_RACY_NS", -(10**18))  # nothing has just changed
        monkeypatch.setattr(catalogs, "_folders", lambda: Folders((self.kept,), self.kept, ""))

    def read(self, own: Ranks, place: Path | None = None, **options: Any) -> list[int]:
        """Return what a rank reads in an epoch."""
        arguments: dict[str, Any] = {
            "batch_size": 8,
            "epochs": 1,
            "dtype": "uint8",
            "memory": "1 MB",
            **options,
        }
        with Loader(
            place or self.data,
            transforms=[DecodeRaw("uint8", (4,))],
            decoders=0,
            rank=own.rank,
            world_size=own.size,
            ranks=lambda: own,
            report=None,
            **arguments,
        ) as loader:
            return [int(row[0]) for batch in loader for row in batch[0]]

    @property
    def once(self) -> dict[str, int]:
        """Every folder, once."""
        return dict.fromkeys([str(self.data), *(str(self.data / label) for label in LABELS)], 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("ranks", "is_large", "is_kept", "is_new"),
    [
        (2, False, True, False),
        (2, True, False, False),
        (5, False, False, False),
        (5, False, False, True),
        (2, True, True, True),
        (16, True, True, False),
    ],
)
def test_a_job_makes_one_listing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, ranks: int, is_large: bool, is_kept: bool, is_new: bool
) -> None:
    """is_new: the folders were written a moment ago."""
    if is_new:
        monkeypatch.setattr(listing, "_RACY_NS", 10**18)
    monkeypatch.setattr(listing_once, "_SENT_AT_ONCE_BYTES", 0 if is_large else 1 << 20)
    monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 1 if is_kept else 1000)

    read = run(ranks, lambda own: folder.read(own, batch_size=COUNT))

    assert sorted(number for part in read for number in part) == list(range(COUNT))
    assert folder.listed == folder.once


@pytest.mark.parametrize(("is_large", "is_list"), [(False, True), (True, False)])
def test_a_job_indexes_each_shard_once(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool, is_list: bool
) -> None:
    monkeypatch.setattr(listing_once, "_SENT_AT_ONCE_BYTES", 0 if is_large else 1 << 20)
    monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 1)
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(16):
                member = tarfile.TarInfo(f"{number}.png")
                member.size = 4
                tar.addfile(member, BytesIO(bytes([16 * shard + number] * 4)))
    indexed: Counter[str] = Counter()

    def counted(path: str, *rest: Any) -> Any:
        indexed[path] += 1
        return read_members(path, *rest)

    monkeypatch.setattr("penstock.store.shards.read_members", counted)
    paths = [tmp_path / f"{shard}.tar" for shard in range(4)]
    source: Any = paths if is_list else tmp_path / "{0..3}.tar"

    read = run(3, lambda own: folder.read(own, source))

    assert sorted(number for part in read for number in part) == list(range(COUNT))
    assert indexed == {str(path): 1 for path in paths}


def test_ranks_open_arrays_by_themselves(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(COUNT))

    def part(own: Ranks) -> list[int]:
        options: dict[str, Any] = {"batch_size": 8, "epochs": 1, "memory": "1 MB", "report": None}
        with Loader(
            tmp_path / "a.npy", rank=own.rank, world_size=own.size, ranks=lambda: own, **options
        ) as loader:
            return [int(row) for batch in loader for row in batch]

    assert sorted(number for part in run(3, part) for number in part) == list(range(COUNT))


def test_a_large_catalog_that_all_ranks_find_in_a_file_is_not_sent(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing_once, "_SENT_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 1)
    job, sent = MemoryJob(3), list[bytes]()
    monkeypatch.setattr(Ranks, "_messages_from", _remembering(sent))

    run(3, folder.read, job=job)

    assert sent
    assert not any(b"cat/0.png" in message for message in sent)


def _remembering(sent: list[bytes]) -> Any:
    messages_from = Ranks._messages_from

    def remembering(self: Ranks, sender: int) -> Any:
        found = messages_from(self, sender)
        sent.extend(repr(message).encode() for message in found)
        return found

    return remembering


def test_a_file_that_appears_after_rank_0_listed_is_in_no_ranks_run(folder: Folder) -> None:
    """Each rank for itself would list other samples, and the start would fail."""
    has_appeared = threading.Event()
    listed = listing_once.list_once

    def part(own: Ranks) -> list[int]:
        return folder.read(own)

    def later(job: Ranks, *rest: Any) -> Any:
        found = listed(job, *rest)
        if job.rank == 0:
            (folder.data / "cat" / "99.png").write_bytes(bytes(4))
            has_appeared.set()
        assert has_appeared.wait(patient(30))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.loader.agreeing.list_once", later)
        read = run(3, part)

    assert sorted(number for part in read for number in part) == list(range(COUNT))
    assert folder.listed == folder.once


def test_a_host_with_a_copy_of_its_own_lists_it(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same path is another folder there: its inode tells."""
    stamp_of = listing.stamp_of
    here = threading.local()

    def by_host(*arguments: Any) -> int:
        return stamp_of(*arguments) ^ getattr(here, "host", 0)

    def part(own: Ranks) -> list[int]:
        here.host = 2 * own.rank
        return folder.read(own)

    monkeypatch.setattr(listing, "stamp_of", by_host)
    read = run(2, part)

    assert sorted(number for part in read for number in part) == list(range(COUNT))
    assert set(folder.listed.values()) == {2}


def test_ranks_with_paths_or_sources_of_their_own_open_them(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.data)
    source = open_source(folder.data)
    folder.listed.clear()
    places = [folder.data, tmp_path / "link", source]

    for turned in (places, places[::-1]):
        folder.listed.clear()
        read = run(3, lambda own, turned=turned: folder.read(own, turned[own.rank]))  # type: ignore[misc]

        assert sorted(number for part in read for number in part) == list(range(COUNT))


def test_a_loader_refreshes_as_it_is_asked_to(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 1)
    (own,) = run(1, lambda own: own)
    folder.read(own)
    folder.listed.clear()
    for refresh in ("auto", "never"):
        folder.read(own, refresh=refresh)
    assert not folder.listed

    (folder.data / "cat" / "3.png").write_bytes(bytes(5))
    with pytest.raises(DataError, match=r'cat/3\.png has grown from 4 to 5 bytes .*refresh="full"'):
        folder.read(own)
    (folder.data / "cat" / "3.png").write_bytes(bytes(3))
    with pytest.raises(DataError, match=r"cat/3\.png has shrunk from 4 to 3 bytes"):
        folder.read(own, refresh="never")
    (folder.data / "cat" / "3.png").write_bytes(bytes(4))
    folder.read(own, refresh="full")
    assert folder.listed == folder.once


def test_what_keeps_rank_0_from_listing_is_an_error_of_all(folder: Folder) -> None:
    (folder.data / "empty").mkdir()

    own, *others = run(3, folder.read)

    assert isinstance(own, DataError)
    assert str(own).startswith(f"{folder.data / 'empty'} has no files")
    for error in others:
        assert isinstance(error, DataError)
        assert str(error) == f"rank 0 of 3, the start of a loader: {own}"
