"""Reads past the page cache: the bytes are those of reads through it, and where there are none, these serve."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.store.direct import READ_SAMPLES, DirectFile, new_memory, pays
from penstock.store.disk import DiskTier
from penstock.store.write_behind import WriteBehind

CONTENT = np.random.default_rng(0).integers(256, size=3_000_000, dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DirectFile]:
    path = tmp_path / "file"
    path.write_bytes(CONTENT.tobytes())
    opened = DirectFile(path)
    yield opened
    opened.close()


def test_pieces_of_any_place_and_size_are_read_and_those_behind_the_end_are_named(file: DirectFile) -> None:
    offsets = np.array([4096, 4095, 999_999, 1, 2_999_999, 2_999_000, 5_000_000, 8192, 0])
    sizes = np.array([4096, 2, 1_500_000, 0, 1, 2_000, 1, 4095, 2_097_153])
    begins = np.cumsum(sizes) - sizes
    into = np.zeros(int(sizes.sum()), np.uint8)

    places = np.stack((offsets, offsets + sizes), axis=1).tolist()
    assert file.read_pieces(places, into, begins.tolist()) == [5, 6]

    for offset, size, begin in zip(offsets.tolist(), sizes.tolist(), begins.tolist(), strict=True):
        if offset + size <= CONTENT.size:
            assert (into[begin : begin + size] == CONTENT[offset : offset + size]).all()


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("is_direct", [True, False])
def test_samples_are_read_to_their_places_and_those_that_are_not_there_or_find_no_space_are_named(
    is_direct: bool, is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(type(READ_SAMPLES), "ask", lambda part: None)
    draw = np.random.default_rng(3)
    sizes = np.array([1, 4_096, 5_000, 0, 1_500_000, 77, 300_000, 12])
    tier = DiskTier(tmp_path, int(sizes.sum()), bytes(16), np.full(sizes.size, -1), is_direct=is_direct)
    content = {each: draw.bytes(int(sizes[each])) for each in draw.permutation(7).tolist()}
    for sample, data in content.items():
        tier.put(sample, data)
    tier.evict(np.array([5]))
    ids = np.append(draw.permutation(sizes.size), [-1, sizes.size, 2**40])
    begins = np.append(0, np.cumsum(np.append(sizes, [9, 9, 9])[np.append(ids[:-3], [8, 9, 10])]))
    into = np.zeros(int(begins[-1]), np.uint8)

    failed = [int(ids[index]) for index, _ in tier.read_group(ids, into, begins)]

    assert failed == [each for each in ids.tolist() if each not in content or each == 5]
    for index, sample in enumerate(ids.tolist()):
        if sample not in failed:
            assert into[begins[index] : begins[index + 1]].tobytes() == content[sample]
    if is_compiled:  # one that was replaced meanwhile by a larger one
        assert [index for index, _ in tier.read_group(np.array([2]), into[:4_000], np.array([0, 4_000]))] == [
            0
        ]
    tier.close()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_large_samples_stay_where_their_blocks_were_read_to(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    READ_SAMPLES.wait()
    if not is_compiled:
        monkeypatch.setattr(type(READ_SAMPLES), "ask", lambda part: None)
    sizes = np.array([5_000, 4_096, 200_000, 0, 300_001, 1_500_000])
    tier = DiskTier(tmp_path, int(sizes.sum()), bytes(16), sizes, is_direct=True)
    for sample, size in enumerate(sizes.tolist()):
        if sample != 1:
            tier.put(sample, CONTENT[sample : sample + size].tobytes())
    behind, ids = WriteBehind(tier, 0), np.array([5, 0, 1, 4, 3, 2])
    assert tier._direct is not None, "the file system of the temporary folder has direct reads"
    buffer = tier._direct.buffer()
    buffer[:] = 7

    memory, begins, failed = behind.read(ids, sizes[ids], new_memory)
    behind.close()

    assert [index for index, _ in failed] == [2]
    for begin, sample in zip(begins, ids.tolist(), strict=True):
        if sample != 1:
            content = CONTENT[sample : sample + sizes[sample]]
            assert (memory[begin : begin + sizes[sample]] == content).all()
    assert (buffer == 7).all() == is_compiled


@pytest.mark.parametrize("refused", ["open", "preadv", "the loop"])
def test_where_a_file_system_refuses_direct_reads_the_page_cache_serves(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, direct = {name: getattr(os, name) for name in ("open", "preadv")}, set[int]()

    def open_or_refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        found = int(real["open"](path, flags, mode))
        if flags & os.O_DIRECT:
            direct.add(found)
        return found

    def read_or_refuse(file: int, *arguments: object) -> int:
        if file in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return int(real["preadv"](file, *arguments))

    if refused != "the loop":
        monkeypatch.setattr(type(READ_SAMPLES), "ask", lambda part: None)
    monkeypatch.setattr(os, "open", open_or_refuse)
    monkeypatch.setattr(os, "preadv", read_or_refuse)
    tier = DiskTier(tmp_path / "tier", 10_000, bytes(16), np.array([5_000, 7]), is_direct=True)
    tier.put(0, CONTENT[:5_000].tobytes())
    if refused == "the loop":
        (descriptor,) = direct
        ends = os.pipe()
        os.dup2(ends[0], descriptor)
        for each in ends:
            os.close(each)
    into = np.zeros(5_000, np.uint8)

    failed = tier.read_group(np.array([0]), into, np.array([0, 5_000]))
    tier.close()

    assert failed == []
    assert (into == CONTENT[:5_000]).all()
    assert len(direct) == (refused != "open")


def test_a_file_is_read_past_a_cache_that_would_find_less_than_half_of_it() -> None:
    samples, draw = 400, np.random.default_rng(0)
    for cached in (200, 280, 360):
        kept, hits = OrderedDict[int, None](), 0
        for epoch in range(12):
            for sample in draw.permutation(samples).tolist():
                hits += epoch > 1 and sample in kept
                kept[sample] = None
                kept.move_to_end(sample)
                if len(kept) > cached:
                    kept.popitem(last=False)

        assert pays(samples, cached) == (hits < 10 * samples / 2)
