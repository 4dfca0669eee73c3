"""What one rank keeps for the others of its host: they find it without a message, and believe nothing of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.store import MemoryTier, host_memory
from penstock.store.host_memory import FileBytes, HostMemory, KeptLog, PeerMemory, checksum_of

SAMPLES, SIZE = 8, 100
SIZES = np.full(SAMPLES, SIZE)
KEPT = np.array([6, 1, 3, 5])


def content(sample: int) -> bytes:
    return bytes([sample]) * SIZE


class Pair:
    """Rank 3, which keeps some samples, and what another rank sees of it."""

    def __init__(self) -> None:
        self.log = KeptLog(KEPT.size)
        self.tier = MemoryTier(SAMPLES * SIZE, partial(Arena, is_shared=True), self.log)
        self.host = HostMemory({3: self.peer()}, SIZES)

    def peer(self, generation: int | None = None) -> PeerMemory:
        memory, log = (
            Arena.attach(
                os.open(f"/proc/self/fd/{each.descriptor}", os.O_RDONLY | os.O_CLOEXEC), is_read_only=True
            )
            for each in (self.tier.arena, self.log.arena)
        )
        return PeerMemory(memory, log, self.log.generation if generation is None else generation, KEPT)

    def told(self) -> list[int]:
        news = [ids for _, ids in self.host.take_news() if ids is not None]
        assert {ids.dtype for ids in news} <= {np.dtype(np.int64)}
        return [sample for ids in news for sample in ids.tolist()]

    def read(self, *samples: int) -> list[bytes | None]:
        found = self.host.read(3, np.array(samples))
        return [None if isinstance(each, Exception) else bytes(each) for each in found]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.tier.close()
    made.host.close()


def test_what_a_rank_keeps_is_read_where_it_lies_and_only_what_it_should_keep(pair: Pair) -> None:
    assert pair.told() == []
    assert not pair.host.has_news

    pair.tier.put(5, content(5))
    pair.tier.put(2, content(2))
    ids = np.array([1, 6])
    begins = pair.tier.take_space(ids, SIZES[ids])
    assert begins is not None
    assert pair.told() == [5]  # the others are not complete; 2 is no sample that it should keep
    for sample, begin in zip((1, 6), begins.tolist(), strict=False):
        pair.tier.array[begin : begin + SIZE] = sample
    pair.tier.keep(ids)

    assert pair.told() == [1, 6]
    assert pair.read(6, 5, 1) == [content(6), content(5), content(1)]
    (view,) = pair.host.read(3, np.array([5]))
    assert isinstance(view, np.ndarray)
    assert not view.flags.writeable
    assert not view.flags.owndata
    assert pair.read(3, 2, 7) == [None] * 3
    assert pair.host.misses == 3
    pair.tier.close()
    assert pair.read(5) == [content(5)], "it stays mapped"


def test_a_tier_that_gets_no_more_is_told_of_once_after_the_last_sample(pair: Pair) -> None:
    pair.tier.put(5, content(5))
    assert pair.told() == [5]
    pair.tier.put(1, content(1))
    pair.log.end()

    assert pair.told() == [1, -1]
    assert pair.told() == []
    pair.tier.put(6, content(6))  # it was being written when another could not be
    assert pair.told() == [6]


def _lie(tier: MemoryTier, numbers: NDArray[np.uint64]) -> None:
    tier.array[-1 - 7 * SIZE] ^= 1  # the last byte of the first sample


def _other_sample(tier: MemoryTier, numbers: NDArray[np.uint64]) -> None:
    numbers[8] = 1


def _four_gibibytes(tier: MemoryTier, numbers: NDArray[np.uint64]) -> None:
    numbers[10] = 1 << 32


def _far_out(tier: MemoryTier, numbers: NDArray[np.uint64]) -> None:
    numbers[9] = 1 << 63


def _of_another(tier: MemoryTier, numbers: NDArray[np.uint64]) -> None:
    """Of the right id and size, with bytes whose checksum is right, of another sample."""
    tier.put(1, content(1))
    numbers[[9, 11]] = numbers[[14, 16]]


def _zeros(tier: MemoryTier, numbers: NDArray[np.uint64]) -> None:
    numbers[8:13] = 0


@pytest.mark.parametrize("damage", [_lie, _other_sample, _four_gibibytes, _far_out, _of_another, _zeros])
@pytest.mark.parametrize("is_told", [False, True], ids=["before it is noticed", "afterwards"])
def test_a_peer_that_lies_costs_a_miss(
    pair: Pair, damage: Callable[[MemoryTier, NDArray[np.uint64]], None], is_told: bool
) -> None:
    pair.tier.put(5, content(5))
    if is_told:
        assert pair.told() == [5]
    damage(pair.tier, np.frombuffer(pair.log.arena.mapping, np.uint64))
    pair.told()

    assert not pair.host.has_news
    assert pair.read(5) == [None]
    assert pair.host.misses == 1


def test_a_record_whose_seal_is_seen_later_than_its_count_is_news_then_though_it_is_the_last(
    pair: Pair,
) -> None:
    pair.tier.put(5, content(5))
    seal = np.frombuffer(pair.log.arena.mapping, np.uint64)[12:13]
    written = seal.copy()
    seal[0] = 0
    assert pair.told() == []
    assert not pair.host.has_news

    seal[:] = written

    assert pair.told() == [5]
    assert not pair.host.has_news


def test_each_reader_sums_bytes_in_memory_up_once_and_those_of_a_file_each_time(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sample in (5, 1):
        pair.tier.put(sample, content(sample))
    summed: list[bytes] = []

    def counted(data: NDArray[np.uint8]) -> int:
        summed.append(bytes(data))
        return checksum_of(data)

    monkeypatch.setattr(host_memory, "checksum_of", counted)
    pair.told()
    for _ in range(3):
        assert pair.read(5, 1) == [content(5), content(1)]
    assert summed == [content(5), content(1)]
    other = HostMemory({3: pair.peer()}, SIZES)
    other.take_news()
    assert bytes(cast("NDArray[np.uint8]", other.read(3, np.array([5]))[0])) == content(5)
    assert summed.count(content(5)) == 2, "a reader believes no other one"
    other.close()
    pair.log.add(
        np.array([5]), np.array([[SIZE, 2 * SIZE]]), [checksum_of(np.frombuffer(content(5), np.uint8))]
    )
    assert pair.told() == [5]
    assert pair.read(5) == [None], "a later record is of other bytes, those of sample 1"

    file = tmp_path / "samples"
    file.write_bytes(content(5) + content(1))
    log = KeptLog(KEPT.size)
    log.add(np.array([5]), np.array([[0, SIZE]]), [checksum_of(np.frombuffer(content(5), np.uint8))])
    log_there = Arena.attach(os.dup(log.arena.descriptor), is_read_only=True)
    disk = PeerMemory(FileBytes(os.open(file, os.O_RDONLY)), log_there, log.generation, KEPT)
    disk.take_news()
    summed.clear()
    for _ in range(2):
        assert disk.look_up(np.array([5]), SIZES[:1]) != [None]
    file.write_bytes(content(1) + content(5))
    assert disk.look_up(np.array([5]), SIZES[:1]) == [None]
    assert len(summed) == 3
    log.add(np.array([3]), np.array([[1 << 63, (1 << 63) + SIZE]], np.uint64), [0])
    disk.take_news()
    assert disk.look_up(np.array([3]), SIZES[:1]) == [None], "no file is so large"
    disk.close()
    log.close()


def test_a_log_of_another_loader_or_version_has_nothing(pair: Pair) -> None:
    pair.tier.put(5, content(5))
    stranger = HostMemory({3: pair.peer(generation=pair.log.generation ^ 1)}, SIZES)

    assert [ids is not None and ids.size for _, ids in stranger.take_news()] == [0]
    assert not stranger.has_news
    assert isinstance(stranger.read(3, np.array([5]))[0], Exception)
    assert isinstance(stranger.read(4, np.array([5]))[0], Exception)
    stranger.close()
    np.frombuffer(pair.log.arena.mapping, np.uint64)[0] += np.uint64(1)  # as a newer version writes it
    other_version = HostMemory({3: pair.peer()}, SIZES)
    other_version.take_news()
    assert isinstance(other_version.read(3, np.array([5]))[0], Exception)
    other_version.close()


def test_a_count_beyond_the_log_is_not_followed(pair: Pair) -> None:
    pair.tier.put(5, content(5))
    np.frombuffer(pair.log.arena.mapping, np.uint64)[2] = 1 << 40

    assert pair.told() == [5]
    assert not pair.host.has_news
    assert pair.read(5) == [content(5)]
