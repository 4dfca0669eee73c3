"""What a file system delivers by number of threads: read and written, scattered and in sequence, past the page cache.

The method of the thesis' Figure 5.2 (fio: 4 KiB at random, direct I/O, by number of threads) and of Table I of
"Characterizing Deep-Learning I/O Workloads in TensorFlow" (a file of 5 GB written and read in sequence six times, the
first left out).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.closing import Closeable
from penstock.errors import DataError
from penstock.machine import Curve
from penstock.measure.in_threads import Clock, repeat_until
from penstock.measure.pagecache import cached_share, drop_cached
from penstock.measure.spread import Spread
from penstock.store.mounts import is_network, mount_of, mounted
from penstock.store.packed import READ_PIECES
from penstock.units import format_bytes, format_rate

#: Direct I/O wants offsets, sizes and addresses in multiples of a logical block; no drive has larger ones.
BLOCK_BYTES = 4096
THREADS = (1, 2, 4, 8, 16)
REPEATS = 10
#: Of the file: as Table I has it, but no more than a part of what is free, nor than takes the time that is given.
_MOST_BYTES, _LEAST_BYTES, _FREE_SHARE = 5_000_000_000, 64 << 20, 0.25
_MAXIMUM_REPEATS = 6
#: Of the time that is given, what the sequential maximum gets.
_MAXIMUM_SHARE = 0.4
_STREAM_BYTES = 8 << 20
_SEQUENTIAL_BYTES = 1 << 20
#: Of one call to begin with; calls grow until they take so long, or this share of a run, so that the interpreter's lock
#: is asked for seldom: what Python does for a call takes 0.05 to 0.1 ms, in which fio would read twice.
_BYTES_A_CALL, _CALL_SECONDS, _CALL_SHARE = 32 << 10, 5e-3, 0.02
_MOST_REQUESTS_A_CALL = 1024
#: Above this share of a file in the page cache, what was measured is memory in part.
_MOST_CACHED = 0.05
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MORE_SPACE = "make some space there (df and quota say what is left), or name another folder"
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs"}


class Access(NamedTuple):
    """A way to use a place: requests of a size (0: of any), at random places or each behind the last."""

    is_write: bool
    is_random: bool
    request_bytes: int

    @property
    def label(self) -> str:
        order = "random" if self.is_random else "sequential"
        size = f" of {self.request_bytes / 1024:g} KiB" if self.request_bytes else ""
        return f"{order} {'writes' if self.is_write else 'reads'}{size}"


@dataclass(frozen=True, slots=True)
class MeasuredCurve:
    """Bytes/s of all threads together. points: (threads, spread), threads increasing."""

    access: Access
    points: tuple[tuple[int, Spread], ...]

    @property
    def best(self) -> float:
        return max(spread.median for _, spread in self.points)

    @property
    def curve(self) -> Curve:
        """The medians, of four digits."""
        return Curve(tuple((float(users), float(f"{spread.median:.4g}")) for users, spread in self.points))


@dataclass(frozen=True, slots=True)
class SequentialMaximum:
    """Bytes/s of one stream over a file of so many bytes; the first pass is left out."""

    file_bytes: int
    read: Spread
    write: Spread


@dataclass(frozen=True, slots=True)
class FileRates:
    """What was measured in a folder.

    file_system: its type, as the kernel calls it; "" if unknown. is_direct: whether requests went past the page cache
    by O_DIRECT. cached_share: of the file after the reads, None where the kernel does not say. free_bytes: of the file
    system. curves: by access. maximum: None where it was not asked for. remarks: what to distrust, a sentence each.
    """

    folder: str
    file_system: str
    is_direct: bool
    cached_share: float | None
    free_bytes: int
    curves: tuple[MeasuredCurve, ...]
    maximum: SequentialMaximum | None
    remarks: tuple[str, ...]

    def curve(self, *, is_write: bool, is_random: bool, largest: bool = True) -> MeasuredCurve:
        """Return that of the largest requests of such an access, or of the smallest."""
        those = [
            each
            for each in self.curves
            if (each.access.is_write, each.access.is_random) == (is_write, is_random)
        ]
        return sorted(those, key=lambda each: each.access.request_bytes)[-1 if largest else 0]


def accesses(sample_bytes: float) -> tuple[Access, ...]:
    """Return what is measured: 4 KiB at random as the thesis has it, requests of a sample's size, and in sequence."""
    request = min(_STREAM_BYTES, max(1, -(-int(sample_bytes) // BLOCK_BYTES)) * BLOCK_BYTES)
    found = [
        Access(False, True, BLOCK_BYTES),
        Access(False, True, request),
        Access(False, False, _SEQUENTIAL_BYTES),
        Access(True, True, BLOCK_BYTES),
        Access(True, False, _SEQUENTIAL_BYTES),
    ]
    return tuple(dict.fromkeys(found))


class ScratchFile(Closeable):
    """A file without a name in a folder, that nothing is left of however this process ends; or one that is there.

    name: of one that is there, to be read.
    Raises: DataError naming the folder where it cannot be made or opened.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str = "") -> None:
        self.folder = Path(folder)
        self.is_direct = True
        self.descriptor = -1
        try:
            self.descriptor = (
                os.open(self.folder / name, os.O_RDWR | os.O_CLOEXEC) if name else _nameless(self.folder)
            )
            path = f"/proc/self/fd/{self.descriptor}"
            try:
                opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT):
                    raise
                self.is_direct = False
            else:
                os.close(self.descriptor)
                self.descriptor = opened
        except OSError as error:
            self.close()
            raise DataError(
                f"{self.folder} cannot be measured: {error.strerror or error}; name a folder that exists and "
                "that you may write to"
            ) from error
        self.size_bytes = os.fstat(self.descriptor).st_size

    @property
    def free_bytes(self) -> int:
        free = os.fstatvfs(self.descriptor)
        return free.f_bavail * free.f_frsize

    def grow(self, size_bytes: int, block: NDArray[np.uint8]) -> None:
        """Write the file up to a size, so that no read finds a hole."""
        while self.size_bytes < size_bytes:
            self.write(block[: min(block.size, size_bytes - self.size_bytes)], self.size_bytes)
            self.size_bytes = min(size_bytes, self.size_bytes + block.size)

    def write(self, block: NDArray[np.uint8], offset: int) -> None:
        try:
            done = os.pwrite(self.descriptor, block.data, offset)
            if not self.is_direct:
                os.fdatasync(self.descriptor)
        except OSError as error:
            remedy = _MORE_SPACE if error.errno in _NO_SPACE else "is its device still there?"
            raise DataError(
                f"{self.folder} cannot be written: {error.strerror or error}; {remedy}"
            ) from error
        if done != block.size:
            raise DataError(
                f"{self.folder} took {done:,} of {block.size:,} bytes: its disk is full; {_MORE_SPACE}"
            )

    def read(self, offsets: NDArray[np.int64], request_bytes: int, into: NDArray[np.uint8]) -> None:
        """Read pieces, without the interpreter's lock where the kernel is compiled.

        into: is written over from its front where it has no more space.
        """
        count = offsets.size
        begins = np.arange(count) % (into.size // request_bytes) * request_bytes
        # One piece is one call that waits for the lock no longer than the loop would.
        if (loop := READ_PIECES.ask() if count > 1 else None) is not None:
            files, nothing = np.array([[self.descriptor, 0, 0]]), np.empty(0, np.int64)
            pieces = np.zeros(count, np.int64), offsets, np.full(count, request_bytes)
            failed = np.empty(count, np.int64)
            if not loop(files, nothing, nothing, nothing, 0, *pieces, into, begins, failed):
                return
        try:  # by Python, also to learn why the loop could not
            is_read = all(
                os.preadv(self.descriptor, [into[begin : begin + request_bytes].data], offset)
                == request_bytes
                for offset, begin in zip(offsets.tolist(), begins.tolist(), strict=True)
            )
        except OSError as error:
            raise DataError(
                f"{self.folder} cannot be read: {error.strerror or error}; is its device still there?"
            ) from error
        if not is_read:
            raise DataError(f"{self.folder} cannot be read: the file that was just written is cut off")

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    path = folder / f"penstock-calibrate-{os.getpid()}.unfinished"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor


def measure_files(
    folder: str | os.PathLike[str],
    sample_bytes: float,
    max_seconds: float,
    clock: Clock,
    report: Callable[[str], None],
    *,
    threads: Sequence[int] = THREADS,
    repeats: int = REPEATS,
) -> FileRates:
    """Measure a file system by a file of its own, which has no name and so leaves nothing behind.

    Rounds over all accesses and numbers of threads, `repeats` of them, so that what disturbs one moment disturbs all
    curves alike. report: is called once for the maximum and once for each round.
    Raises: DataError naming the folder where it is missing, read-only, or has too little space.
    """
    begin = clock()
    with _scratch_with_space(folder) as scratch:
        free_bytes = scratch.free_bytes
        maximum = _sequential_maximum(scratch, max_seconds * _MAXIMUM_SHARE, clock)
        report(f"{folder}: {format_rate(maximum.read.median)} in sequence")
        wanted = accesses(sample_bytes)
        runs: dict[tuple[Access, int], list[float]] = {
            (access, count): [] for access in wanted for count in threads
        }
        for number in range(repeats):
            for place, key in enumerate(runs):
                left = begin + max_seconds - clock()
                todo = (repeats - number) * len(runs) - place
                runs[key].append(run_access(scratch, *key, clock() + max(0.0, left / todo), clock))
            report(f"{folder}: round {number + 1} of {repeats}")
        share = None
        with contextlib.suppress(OSError):  # then nobody knows
            share = cached_share(scratch.descriptor)
        mount = mount_of(folder, mounted())
        kind = mount.kind if mount is not None else ""
        return FileRates(
            os.path.abspath(folder),
            kind,
            scratch.is_direct,
            share,
            free_bytes,
            tuple(
                MeasuredCurve(access, tuple((count, Spread.of(runs[access, count])) for count in threads))
                for access in wanted
            ),
            maximum,
            remarks(kind, scratch.is_direct, share),
        )


def measure_maximum(
    folder: str | os.PathLike[str], max_seconds: float, clock: Clock
) -> tuple[SequentialMaximum, tuple[str, ...]]:
    """Return what one stream reads and writes in a folder, and what makes that doubtful, a sentence each.

    Raises: as `measure_files`.
    """
    with _scratch_with_space(folder) as scratch:
        maximum = _sequential_maximum(scratch, max_seconds, clock)
        share = None
        with contextlib.suppress(OSError):  # then nobody knows
            share = cached_share(scratch.descriptor)
        mount = mount_of(folder, mounted())
        return maximum, remarks(mount.kind if mount is not None else "", scratch.is_direct, share)


@contextlib.contextmanager
def _scratch_with_space(folder: str | os.PathLike[str]) -> Iterator[ScratchFile]:
    READ_PIECES.wait()
    with ScratchFile(folder) as scratch:
        if scratch.free_bytes * _FREE_SHARE < _LEAST_BYTES:
            raise DataError(
                f"{folder} has {format_bytes(scratch.free_bytes)} free; measuring takes a quarter of it and at least "
                f"{format_bytes(_LEAST_BYTES)}: make some space"
            )
        yield scratch


def remarks(file_system: str, is_direct: bool, share: float | None) -> tuple[str, ...]:
    """Return what makes the rates of a folder doubtful, a sentence each."""
    found = []
    if file_system in _MEMORY_FILE_SYSTEMS:
        found.append(f"CAUTION: this is memory ({file_system}), not a disk.")
    elif is_network(file_system):
        found.append(
            f"CAUTION: this is a network file system ({file_system}), which other hosts share and whose server may "
            "cache: it is no local disk."
        )
    if not is_direct and (share is None or share > _MOST_CACHED):
        found.append(
            "CAUTION: the page cache could not be bypassed or emptied: part of this is memory's speed."
        )
    return tuple(found)


def run_access(scratch: ScratchFile, access: Access, threads: int, until: float, clock: Clock) -> float:
    """Return bytes/s of so many threads that use a file until a moment on the clock."""
    if not access.is_write and not scratch.is_direct:
        drop_cached(scratch.descriptor)
    call_seconds = max(_CALL_SECONDS, _CALL_SHARE * (until - clock()))
    works = [partial(_rounds, scratch, access, number, threads, call_seconds) for number in range(threads)]
    return repeat_until(until, clock, works)


def _rounds(
    scratch: ScratchFile, access: Access, number: int, threads: int, call_seconds: float = _CALL_SECONDS
) -> Iterator[int]:
    """Do rounds of requests, and yield the bytes of each. number: of this thread, which has a part for itself.

    call_seconds: of reads, rounds have more of them until one takes so long.
    """
    request = access.request_bytes
    count = max(1, _BYTES_A_CALL // request)
    slots = scratch.size_bytes // request
    draw = np.random.default_rng()
    first, own = slots * number // threads, max(1, slots // threads)
    # Reads go to the same memory, as fio's do.
    with Arena((count if access.is_write else 1) * request) as arena:
        buffer = arena.array
        if access.is_write:
            buffer[:] = draw.integers(0, 256, buffer.size, np.uint8)
        done, is_short = 0, False
        while True:
            if access.is_random:
                chosen = draw.integers(0, slots, count)
            else:
                chosen = (first + (done + np.arange(count)) % own) % slots
            if access.is_write:
                for index, slot in enumerate(chosen.tolist()):
                    scratch.write(buffer[index * request : (index + 1) * request], slot * request)
            else:
                begin = time.perf_counter()
                scratch.read(chosen * request, request, buffer)
                is_short = time.perf_counter() - begin < call_seconds
            done += chosen.size
            yield chosen.size * request
            if is_short:
                count = min(2 * count, _MOST_REQUESTS_A_CALL)


def _sequential_maximum(scratch: ScratchFile, max_seconds: float, clock: Clock) -> SequentialMaximum:
    """Write and read a file in sequence, six times, as large as the time allows, and leave the first out."""
    block = _noise(_STREAM_BYTES)
    begin = clock()
    scratch.grow(_LEAST_BYTES, block)
    rate = _LEAST_BYTES / max(clock() - begin, 1e-6)
    affordable = int(rate * max_seconds / (2 * _MAXIMUM_REPEATS))
    size = min(_MOST_BYTES, int(scratch.free_bytes * _FREE_SHARE), max(_LEAST_BYTES, affordable))
    scratch.grow(size // block.size * block.size, block)
    reads, writes = [], []
    with Arena(block.size) as arena:
        for _ in range(_MAXIMUM_REPEATS):
            offsets = range(0, scratch.size_bytes, block.size)
            begin = clock()
            for offset in offsets:
                scratch.write(block, offset)
            if not scratch.is_direct:
                drop_cached(scratch.descriptor)
            middle = clock()
            for offset in offsets:
                scratch.read(np.array([offset]), block.size, arena.array)
            writes.append(scratch.size_bytes / (middle - begin))
            reads.append(scratch.size_bytes / (clock() - middle))
    return SequentialMaximum(scratch.size_bytes, Spread.after_first(reads), Spread.after_first(writes))


def _noise(nbytes: int) -> NDArray[np.uint8]:
    """Return bytes that no file system can store in less, at an address that direct I/O takes."""
    array = Arena(nbytes).array
    array[:] = np.random.default_rng().integers(0, 256, nbytes, np.uint8)
    return array
