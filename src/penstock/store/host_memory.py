"""What ranks of one host keep in memory for each other: each writes its own, and maps that of the others read-only.

    rank p   MemoryTier: an arena of bytes      <── the source
             KeptLog: an arena of records       sample, begin, size, checksum; sealed, and only ever added to
    rank q   HostMemory ── PeerMemory of p: both arenas, read-only, and the place of each sample's record

No lock is shared and no message sent: a record is complete before it is counted, and never changed. Who reads a sample
believes nothing: neither a record whose seal is wrong, nor bytes outside of the arena, nor, when it first has them,
bytes with another checksum. All of these are misses. What a killed rank has written stays mapped where it is mapped,
and goes with the last process.

Bytes in memory are compared with their checksum when a reader first has them: a log's tier never writes them again, and
nobody else can, so that a read costs no pass over them. A file may change without its rank, and is compared each time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from penstock.arena import Arena
from penstock.errors import DataError

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Numbers = NDArray[np.uint64]

#: A log begins with these numbers of 64 bits, and has as many for each record.
_VERSION, _GENERATION, _COUNT, _ENDED = 0, 1, 2, 3
_HEAD = 8
_SAMPLE, _BEGIN, _SIZE, _CHECKSUM, _SEAL = range(5)
_COLUMNS = 5
_VERSION_HERE = 2
#: What lies farther on is in no memory and no file.
_MOST_BEGIN = 1 << 62
#: An odd number whose multiples spread over all bits; and one for each column that a seal is of.
_SPREADS = np.uint64(0x9E3779B97F4A7C15)
_OF_COLUMNS = np.array(
    [0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F], np.uint64
)


class KeptLog:
    """What a tier keeps, written down for the other ranks of its host.

    most: samples that the tier will ever keep. generation: tells this rank's logs from all others. Any thread may add.
    tells: an eventfd that is written to whenever there is news; a copy of it is.
    Raises: ConfigError as `Arena`.
    """

    def __init__(self, most: int, tells: int | None = None, generation: int | None = None) -> None:
        self.generation = secrets.randbits(63) if generation is None else generation
        self.arena = Arena(8 * (_HEAD + _COLUMNS * max(1, most)), is_shared=True)
        numbers = np.frombuffer(self.arena.mapping, np.uint64)
        numbers[[_VERSION, _GENERATION]] = _VERSION_HERE, self.generation
        self._numbers: Numbers | None = numbers
        self._most = most
        self._tells = -1 if tells is None else os.dup(tells)
        #: Guards the end of the log, and what tells of it.
        self._end_lock = threading.Lock()

    def end(self) -> None:
        """Say that the tier gets no more samples, as its disk has failed: nobody needs to wait for them."""
        with self._end_lock:
            if self._numbers is not None:
                self._numbers[_ENDED] = 1
                self._wake()

    def add(self, ids: Ids, places: Ids, checksums: ArrayLike) -> None:
        """Say that samples are there. ids: int64[n]. places: int64[n, 2], begin and end of each. checksums: of each."""
        records = np.empty((ids.size, _COLUMNS), np.uint64)
        records[:, _SAMPLE], records[:, _BEGIN] = ids, places[:, 0]
        records[:, _SIZE] = places[:, 1] - places[:, 0]
        records[:, _CHECKSUM] = checksums
        records[:, _SEAL] = _seals(records, self.generation)
        with self._end_lock:
            if self._numbers is None:  # closed
                return
            begin = int(self._numbers[_COUNT])
            end = min(begin + ids.size, self._most)
            self._numbers[_HEAD + _COLUMNS * begin : _HEAD + _COLUMNS * end] = records[: end - begin].ravel()
            self._numbers[_COUNT] = end
            self._wake()

    def _wake(self) -> None:
        if self._tells >= 0:
            with contextlib.suppress(BlockingIOError):  # it tells already
                os.eventfd_write(self._tells, 1)

    def close(self) -> None:
        """Add nothing more. What other processes have mapped stays. Twice is harmless."""
        with self._end_lock:
            self._numbers = None
            if self._tells >= 0:
                os.close(self._tells)
                self._tells = -1
        self.arena.close()


class FileBytes:
    """The bytes of a disk tier's file, read when they are asked for. descriptor: of the file; closed with this."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __getitem__(self, place: slice) -> Bytes:
        """Return the bytes of a place; fewer where the file ends, or cannot be read."""
        try:
            return np.frombuffer(os.pread(self._descriptor, place.stop - place.start, place.start), np.uint8)
        except OSError:  # a miss, which costs one read elsewhere
            return np.empty(0, np.uint8)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class PeerMemory:
    """What one other rank of the host keeps in a tier.

    memory: its arena, attached, or the file of a disk tier. log: its arena. Both closed with this.
    generation: of its log. kept: samples that it shall keep. number: of the tier.
    One thread at a time takes news; any thread may read.
    """

    def __init__(
        self, memory: Arena | FileBytes, log: Arena, generation: int, kept: Ids, number: int = 1
    ) -> None:
        self._arenas = memory, log
        self._number = number
        self._memory: Bytes | FileBytes = memory if isinstance(memory, FileBytes) else memory.array
        self._numbers = np.frombuffer(log.array, np.uint64)
        self.generation = generation
        self._most = (self._numbers.size - _HEAD) // _COLUMNS
        is_known = self._numbers[_VERSION] == _VERSION_HERE and self._numbers[_GENERATION] == generation
        self._ids = np.sort(kept) if is_known else np.empty(0, np.int64)
        #: int32[kept], where the record of each is; -1 for one that is not there yet.
        self._rows = np.full(self._ids.size, -1, np.int32)
        #: int32[kept], of which record the bytes were compared with their checksum, or -1. Any thread may set one.
        self._verified_rows = np.full(self._ids.size, -1, np.int32)
        #: Records that were taken note of, and how many there were then: more where one of them is damaged.
        self._seen = self._looked_at = 0
        #: Whether it was noticed that there will be no more.
        self._is_over = False

    @property
    def has_news(self) -> bool:
        """Whether records were added since the last time, or there will be no more."""
        return self._count() != self._looked_at or self._has_ended() or self._is_late()

    def take_news(self) -> Ids:
        """Return the samples that were added since the last time, of those that the rank shall keep.

        -number comes after the last one, once, where the tier gets no more.
        """
        if not self.has_news:  # as mostly where a thread looks often
            return np.empty(0, np.int64)
        has_ended = self._has_ended()
        self._looked_at = self._count()
        records = self._records()[self._seen : self._looked_at].copy()
        wrong = np.flatnonzero(_seals(records, self.generation) != records[:, _SEAL])
        records = records[: wrong[0]] if wrong.size else records  # written later than counted, or damaged
        ids = records[:, _SAMPLE].astype(np.int64)
        at, is_kept = self._found(ids)
        self._rows[at[is_kept]] = self._seen + np.flatnonzero(is_kept)
        self._seen += len(records)
        self._is_over |= has_ended
        ended = np.full(int(has_ended), -self._number, np.int64)
        return np.concatenate([ids[is_kept], ended])

    def look_up(self, ids: Ids, sizes: Ids) -> list[tuple[Bytes, int] | None]:
        """Return the bytes of samples where they lie, read-only, and their checksum; None for one that is not there.

        One whose bytes are not as they should be is not. sizes: int64[n], bytes of each; below 0: as its record says.
        """
        table = self._records()
        if not self._ids.size:
            return [None] * ids.size
        at = np.minimum(self._ids.searchsorted(ids), self._ids.size - 1)
        rows = self._rows.take(at)
        records = table.take(rows, 0, mode="wrap")  # of one that is not there: any, and not looked at
        is_sealed = _seals(records, self.generation) == records[:, _SEAL]
        memory, found, verified = self._memory, list[tuple[Bytes, int] | None](), list[int]()
        # Plain numbers from here on: NumPy takes longer for the few that are looked up together.
        lists = (rows, is_sealed, ids, sizes, self._verified_rows.take(at) == rows, records)
        for index, (row, is_good, wanted, wanted_bytes, is_verified, record) in enumerate(
            zip(*(each.tolist() for each in lists), strict=True)
        ):
            sample, begin, size, checksum, _ = record
            found.append(None)
            if row < 0 or not is_good or sample != wanted or 0 <= wanted_bytes != size:
                continue
            if begin > _MOST_BEGIN or size > _MOST_BEGIN:
                continue
            data = memory[begin : begin + size]
            if data.size != size:
                continue
            if not is_verified:
                if checksum_of(data) != checksum:
                    continue
                verified.append(index)
            found[index] = data, checksum
        if verified and not isinstance(memory, FileBytes):
            self._verified_rows[at[verified]] = rows[verified]
        return found

    def _count(self) -> int:
        """Return how many records there are; never more than the log has space for, whatever it says."""
        return min(int(self._numbers[_COUNT]), self._most)

    def _has_ended(self) -> bool:
        return not self._is_over and self._numbers[_ENDED] != 0

    def _is_late(self) -> bool:
        """Whether a record that was counted before its seal could be seen, as some processors have it, is there now."""
        if self._seen == self._looked_at:
            return False
        record = self._records()[self._seen : self._seen + 1].copy()
        return bool(_seals(record, self.generation)[0] == record[0, _SEAL])

    def _records(self) -> Numbers:
        return self._numbers[_HEAD : _HEAD + _COLUMNS * self._most].reshape(-1, _COLUMNS)

    def _found(self, ids: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """Return where samples are among those that the rank shall keep, and whether they are."""
        at = np.searchsorted(self._ids, ids)
        is_kept = at < self._ids.size
        is_kept[is_kept] = self._ids[at[is_kept]] == ids[is_kept]
        return at, is_kept

    def close(self) -> None:
        """Let the memory go, which does once nothing views it, and have nothing. Twice is harmless."""
        self._memory, self._numbers = np.empty(0, np.uint8), np.zeros(_HEAD + _COLUMNS, np.uint64)
        self._rows[:] = -1
        self._seen = self._looked_at = 0
        for arena in self._arenas:
            arena.close()


class PeerTiers:
    """What one other rank of the host keeps, in several tiers; used as `PeerMemory`. tiers: fastest first."""

    def __init__(self, tiers: Sequence[PeerMemory]) -> None:
        self._tiers = tiers
        self.generation = tiers[0].generation

    @property
    def has_news(self) -> bool:
        """Whether there are samples since the last time, or a tier gets no more."""
        return any(tier.has_news for tier in self._tiers)

    def take_news(self) -> Ids:
        """Return the samples that were added since the last time, and -number of each tier that gets no more."""
        return np.concatenate([tier.take_news() for tier in self._tiers])

    def look_up(self, ids: Ids, sizes: Ids) -> list[tuple[Bytes, int] | None]:
        """Return bytes and checksums, as `PeerMemory.look_up`, of the first tier that has each sample."""
        found = self._tiers[0].look_up(ids, sizes)
        for tier in self._tiers[1:]:
            if (missing := np.array([at for at, each in enumerate(found) if each is None], np.int64)).size:
                for at, each in zip(
                    missing.tolist(), tier.look_up(ids[missing], sizes[missing]), strict=True
                ):
                    found[at] = each
        return found

    def close(self) -> None:
        """Let all of it go. Twice is harmless."""
        for tier in self._tiers:
            tier.close()


class HostMemory:
    """What all other ranks of the host keep.

    peers: by rank. sizes_bytes: int64[samples], as `PeerMemory.look_up` takes them. One thread at a time takes news;
    any thread may read.
    """

    def __init__(self, peers: Mapping[int, PeerMemory | PeerTiers], sizes_bytes: Ids) -> None:
        self._peers = dict(peers)
        self._sizes_bytes = sizes_bytes
        #: Samples that a rank had announced and that were not there as they should be. Under the lock.
        self.misses = 0
        self._misses_lock = threading.Lock()

    @property
    def has_news(self) -> bool:
        """Whether ranks keep samples that they did not keep the last time."""
        return any(peer.has_news for peer in self._peers.values())

    def take_news(self) -> list[tuple[int, Ids | None]]:
        """Return, by rank, the samples that it keeps since the last time."""
        return [(rank, peer.take_news()) for rank, peer in self._peers.items() if peer.has_news]

    def read(self, rank: int, ids: Ids) -> Sequence[Bytes | DataError]:
        """Return the bytes of samples that a rank keeps, where they lie, read-only; an error in the place of others."""
        peer = self._peers.get(rank)
        found = [None] * ids.size if peer is None else peer.look_up(ids, self._sizes_bytes[ids])
        if not (missing := found.count(None)):
            return [each[0] for each in found if each is not None]
        with self._misses_lock:
            self.misses += missing
        return [
            DataError(f"rank {rank} does not have sample {sample} as it announced")
            if each is None
            else each[0]
            for sample, each in zip(ids.tolist(), found, strict=True)
        ]

    def close(self) -> None:
        """Let all memory go. Twice is harmless."""
        for peer in self._peers.values():
            peer.close()


def checksum_of(data: Bytes) -> int:
    """Return 64 bits that tell a sample's bytes from others, damaged ones among them; they keep out no forger."""
    return xxhash.xxh3_64_intdigest(data.data)


def _seals(records: Numbers, generation: int) -> Numbers:
    """Return a number for each record, by which one that is half written or of another log is found out."""
    mixed = (records[:, :_SEAL] ^ np.uint64(generation)) * _SPREADS
    mixed ^= mixed >> np.uint64(32)
    seals: Numbers = mixed @ _OF_COLUMNS
    return seals
