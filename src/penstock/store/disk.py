"""Samples kept on a local disk, for this run and for later ones over the same data.

A tier is two files. `NAME.samples` has the samples, each in one piece. `NAME.index` has what they are:

    header, 4,096 bytes:  "PENSTOCK", version (uint32), bytes of JSON (uint32), its checksum (uint64), JSON | zeros
    entries, 40 bytes:    sample, begin, bytes (int64 each), checksum of the content (uint64), of the entry (uint64)

Entries are appended once the sample is written; the last one of a sample counts, and -1 as its begin says that it is
gone. Nothing is flushed: whatever a crash leaves of either file, an entry that does not fit its checksum is none, and a
sample of an earlier run is compared with its checksum when it is first read.

A process that uses a tier holds a lock on its index. Another one that wants a tier of the same data has one of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import ClosedError, DataError
from penstock.store.direct import READ_SAMPLES, DirectFile
from penstock.store.group import Bytes, Failed, Ids
from penstock.store.host_memory import KeptLog
from penstock.store.memory import check_capacity
from penstock.store.places import SamplePlaces
from penstock.units import format_bytes

_MAGIC, _VERSION = b"PENSTOCK", 1
_HEAD = struct.Struct("<8sIIQ")
_HEADER_BYTES = 4096
_ENTRY = np.dtype(
    [(name, "<i8") for name in ("sample", "begin", "nbytes")] + [("checksum", "<u8"), ("check", "<u8")]
)
_NAME = re.compile(r"penstock-([0-9a-f]{32})-(\d+)\.index")
#: Of a disk's free space, what is left to others.
_SPARED_SHARE = 0.02
#: Of the same data, which are used at the same time.
_MOST_TIERS = 1024
_NO_BUFFER = np.empty(0, np.uint8)
#: Odd numbers that the fields of an entry are multiplied by, so that two that change places change the checksum.
_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)


class DiskTier:
    """Samples in a file on a local disk, which later runs over the same data find again. Any thread may call anything.

    A disk that is full or fails makes the tier smaller, and is reported once; what it kept is read as long as it can.
    So are files that somebody removes meanwhile. One on a read-only disk is read, by any number of processes.

    folder: made where it is missing; several jobs may share it.
    capacity_bytes: that samples may take, reserved at once; fewer where the disk has not so much free.
    fingerprint: of the data, 16 bytes: what another one wrote is not found.
    sizes_bytes: int64[samples], of each sample; -1 for one that may have any.
    about: says what the data are, to whoever lists tiers.
    number: which one is taken first of several tiers of the same data, such as this process's rank.
    report: gets a line where something is wrong with the disk.
    is_direct: read samples past the page cache, where the file system and the disk do so.
    is_own: refuse files that another user could write to: whoever reads the samples trusts them.
    padding_bytes: reserved besides, if free: as long as they last, each sample begins at a block of the disk.
    Raises: ConfigError for a capacity below 1; DataError if no tier can be made in the folder, or is to be trusted.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int,
        fingerprint: bytes,
        sizes_bytes: NDArray[np.int64],
        *,
        about: str = "",
        number: int = 0,
        report: Callable[[str], None] = lambda line: None,
        is_direct: bool = False,
        is_own: bool = False,
        padding_bytes: int = 0,
    ) -> None:
        check_capacity(capacity_bytes)
        self._sizes_bytes, self._report = sizes_bytes, report
        self._salt = np.frombuffer(fingerprint, np.uint64)[0]
        #: Guards appending to the index, what is said once, and closing.
        self._lock = threading.Lock()
        self._file = self._index = -1
        #: For the ranks that read this tier, too.
        self._log: KeptLog | None = None
        #: Whether anything can still be written; how many samples were not found as they were written.
        self._is_written, self.mismatches = True, 0
        self._is_removed = False
        self._direct: DirectFile | None = None
        try:
            os.makedirs(folder, exist_ok=True)
            self._index, self.path = _open_index(Path(folder), fingerprint, about, number, report)
            self._is_written = _is_writable(self._index)
            how = os.O_RDWR | os.O_CREAT if self._is_written else os.O_RDONLY
            self._file = os.open(self.samples_path, how | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if is_own:
                _check_owner(self._index, self._file)
            # What lies behind a sample is not read soon: cold ones of 100 KB get 1.2 times the rate, four at once 1.06.
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
            if is_direct:
                with contextlib.suppress(OSError):  # a file system that has no direct reads
                    self._direct = DirectFile(self.samples_path)
                if is_own and self._direct is not None:  # it was opened by its name again
                    _check_owner(self._direct.file)
            self._file_bytes = self._reserve(capacity_bytes + padding_bytes)
            self._capacity_bytes = min(capacity_bytes, self._file_bytes)
            if self._capacity_bytes < capacity_bytes and self._is_written:
                report(
                    f"{self.path.parent} has {format_bytes(self._capacity_bytes)} free of the "
                    f"{format_bytes(capacity_bytes)} that samples were to have: fewer are kept there"
                )
            self._places = SamplePlaces(self._file_bytes, self._file_bytes - self._capacity_bytes)
            #: uint64[samples], bool[samples]: of what earlier runs wrote, the checksum, and if it was not compared yet;
            #: how many are left of these, which the lock guards.
            self._checksums = np.zeros(0, np.uint64)
            self._is_unread = np.zeros(0, bool)
            self._unread_count = 0
            self._restore()
            if not self._is_written:
                report(
                    f"{self.path.parent} is read-only: it has {len(self):,} of the samples and gets no others"
                )
        except OSError as error:
            self.close()
            raise DataError(
                f"{os.fspath(folder)} can keep no samples: {error.strerror or error}; name a folder on a local disk "
                "that you may write"
            ) from error
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self.path)!r})"

    @property
    def samples_path(self) -> Path:
        return self.path.with_suffix(".samples")

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._places.used_bytes

    def __len__(self) -> int:
        """Return the number of samples kept."""
        return len(self._places)

    @property
    def is_written(self) -> bool:
        """See `SlowTier.is_written`."""
        return self._is_written

    def held(self) -> Ids:
        """Return the samples that are kept, ascending."""
        return self._places.kept()

    def contains(self, sample: int) -> bool:
        return self._places.contains(sample)

    def sizes_of(self, ids: Ids) -> Ids:
        """See `SlowTier.sizes_of`."""
        places = self._places.of(ids)
        return np.where(places[:, 0] < 0, -1, places[:, 1] - places[:, 0])

    def put(self, sample: int, data: bytes | bytearray | memoryview) -> bool:
        """Write a sample; return whether it is kept, or about to be by another thread.

        False: the space left is too small, or the disk has failed.
        Raises: ClosedError; DataError for bytes that are not as many as the sample has.
        """
        content = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        if content.size != self._sizes_bytes[sample] >= 0:
            raise DataError(f"sample {sample} has {self._sizes_bytes[sample]:,} bytes, not {content.size:,}")
        file, ids = self._open_file(), np.array([sample])
        if not self._is_written:
            return self._places.is_known(sample)
        begins = self._places.take(ids, np.array([content.size]))
        if begins is None:
            return self._places.is_known(sample)
        begin = int(begins[0])
        try:
            # A write behind its end would put zeros in place of what was cut off.
            if not self._is_whole(file):
                raise OSError(errno.EIO, "it was cut off")
            _write_all(file, content.data, begin)
            checksum = xxhash.xxh3_64_intdigest(content.data)
            self._append(_entries(ids, begin, content.size, checksum))
        except OSError as error:
            self._places.drop(ids)
            self._stop_writing(error)
            return False
        self._places.keep(ids)
        if self._log is not None:
            self._log.add(ids, self._places.of(ids), checksum)
        self._check_there(file)
        return True

    @property
    def is_direct(self) -> bool:
        """Whether samples are read past the page cache."""
        return self._direct is not None

    def read_group(self, ids: Ids, into: Bytes, begins: Ids, *, is_loose: bool = False) -> Failed:
        """Read samples that are kept; return those that failed: index and error. See `penstock.store.read_group`.

        One that differs from what was written is kept no longer.
        is_loose: begins are as `penstock.store.direct.lay_out` returns them, and written: where each sample begins.
        """
        file, failed = self._open_file(), Failed()
        # Asked before the bytes are read: another thread that finds a sample damaged meanwhile takes its mark away.
        was_unread = self._is_unread[ids] if self._unread_count else None
        wrong = self._read(file, ids, into, begins, is_loose)
        if not self._is_whole(file):
            wrong = list(range(ids.size))
        # Mostly all are there and were compared before.
        if not wrong and was_unread is None:
            return failed
        places = self._places.of(ids)
        for index in wrong:
            sample = int(ids[index])
            if places[index, 0] < 0:
                failed.append((index, DataError(f"sample {sample} is not in {self!r}")))
                continue
            # A disk that gives back one sample no more may lose others: it gets no new ones.
            self._end_writing()
            self._lose(sample, failed, index, "cannot be read, so that no more are kept on this disk")
        lost = {index for index, _ in failed}
        for index in () if was_unread is None else np.flatnonzero(was_unread).tolist():
            sample = int(ids[index])
            content = into[begins[index] : begins[index] + places[index, 1] - places[index, 0]]
            if index not in lost and xxhash.xxh3_64_intdigest(content.data) != self._checksums[sample]:
                self._lose(sample, failed, index, "is not what was written")
            self._note_read(ids[index : index + 1])
        return sorted(failed, key=lambda each: each[0])

    def evict(self, ids: Ids) -> None:
        """Keep samples no longer."""
        _ = self._open_file()
        gone = self._places.evict(ids)
        self._note_read(gone)  # what comes in its place is this run's own
        self._note_gone(gone)

    def tell(self, log: KeptLog) -> None:
        """Have a log say what is kept, from now on and already. It is closed with this. Before the first `put`."""
        self._log, held = log, self.held()
        if held.size:
            log.add(held, self._places.of(held), self._checksums[held])
        if not self._is_written:
            log.end()

    def close(self) -> None:
        """Let other processes have the files, which stay. Twice is harmless."""
        if self._log is not None:
            self._log.close()
        with self._lock:
            mismatches = self.mismatches if self._file >= 0 else 0
            file, index, self._file, self._index = self._file, self._index, -1, -1
        try:
            if file >= 0:
                self._check_there(file)
        finally:
            for descriptor in (file, index):
                if descriptor >= 0:
                    os.close(descriptor)
            if self._direct is not None:
                self._direct.close()
        if mismatches > 1:  # one was reported when it was found
            self._report(
                f"{mismatches:,} samples in {self.samples_path} were damaged or lost, and were read anew"
            )

    def _read(self, file: int, ids: Ids, into: Bytes, begins: Ids, is_loose: bool) -> list[int]:
        """Read samples, past the page cache or through it; return the indices of those not read."""
        loop, (rows, places) = READ_SAMPLES.ask(), self._places.table()
        if loop is None:
            return self._read_plainly(file, self._places.of(ids).tolist(), into, begins.tolist())
        failed = np.empty(ids.size, np.int64)
        direct = self._direct
        if direct is not None and not loop(
            direct.file, ids, rows, places, into, begins, int(is_loose), direct.buffer(), failed
        ):
            return []
        # Where direct reads are refused, or failed, reads through the page cache say which did.
        count = loop(file, ids, rows, places, into, begins, 0, _NO_BUFFER, failed)
        return sorted(failed[:count].tolist())

    def _read_plainly(self, file: int, places: list[list[int]], into: Bytes, begins: list[int]) -> list[int]:
        if self._direct is not None:
            with contextlib.suppress(OSError):
                return self._direct.read_pieces(places, into, begins)
        pieces = enumerate(zip(places, begins[:-1], strict=True))
        return [
            index
            for index, ((begin, end), at) in pieces
            if not _read_all(file, into[at : at + end - begin].data, begin)
        ]

    def _is_whole(self, file: int) -> bool:
        """Return whether nobody cut the file off."""
        # What `fstat` returns takes ten times as long behind a wait for the disk. No read begins where the file stands.
        return os.lseek(file, 0, os.SEEK_END) >= self._file_bytes

    def _note_read(self, ids: Ids) -> None:
        """Compare samples of an earlier run with their checksums no more."""
        with self._lock:
            if self._unread_count:
                self._unread_count -= int(np.count_nonzero(self._is_unread[ids]))
                self._is_unread[ids] = False

    def _open_file(self) -> int:
        if self._file < 0:
            raise ClosedError("this disk tier is closed; make a new one")
        return self._file

    def _lose(self, sample: int, failed: Failed, index: int, why: str) -> None:
        with self._lock:
            is_new = self._places.contains(sample)  # unless another thread found out meanwhile
            self.mismatches += is_new
            is_first = is_new and self.mismatches == 1
        if is_first:
            self._report(
                f"sample {sample} in {self.samples_path} {why}: it is read anew, as are others like it"
            )
        self.evict(np.array([sample]))
        failed.append((index, DataError(f"sample {sample} in {self.samples_path} {why}")))

    def _check_there(self, file: int) -> None:
        """Report once if the file of samples was removed."""
        if self._is_removed or os.fstat(file).st_nlink:
            return
        with self._lock:
            was_removed, self._is_removed = self._is_removed, True
        if not was_removed:
            self._report(
                f"{self.samples_path} was removed: this run still reads from it; no later run will find it"
            )

    def _stop_writing(self, error: OSError) -> None:
        if self._end_writing():
            self._report(
                f"{self.samples_path} cannot be written any more ({error.strerror}): the {len(self):,} samples there "
                "are read, and no more are kept on this disk"
            )

    def _end_writing(self) -> bool:
        """Keep no more samples, for which other ranks need not wait; return whether that is news."""
        with self._lock:
            was_written, self._is_written = self._is_written, False
        if was_written and self._log is not None:
            self._log.end()
        return was_written

    # The files

    def _reserve(self, wanted_bytes: int) -> int:
        """Have so many bytes of the disk, or as many as are free; return how many."""
        has_bytes = os.fstat(self._file).st_size
        if not self._is_written:
            return max(1, has_bytes)
        if has_bytes > wanted_bytes:
            os.ftruncate(self._file, wanted_bytes)
        most_bytes = os.fstat(self._file).st_blocks * 512 + free_bytes(self.path.parent)
        capacity_bytes = max(1, min(wanted_bytes, most_bytes))
        # Not posix_fallocate, which writes all of it where the file system reserves nothing.
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        if fallocate(self._file, 0, ctypes.c_int64(0), ctypes.c_int64(capacity_bytes)):
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(number, os.strerror(number))
            os.ftruncate(self._file, capacity_bytes)
        return capacity_bytes

    def _note_gone(self, ids: Ids) -> None:
        """Have later runs not look for samples."""
        if ids.size:
            with contextlib.suppress(OSError):  # then its place will be another's, and its checksum wrong
                self._append(_entries(ids, -1, 0, 0))

    def _append(self, entries: NDArray[Any]) -> None:
        """Write entries, without their `check` so far, in one piece: all of them or none."""
        entries["check"] = _checks_of(entries, self._salt)
        content = entries.tobytes()
        with self._lock:
            if self._index < 0:
                raise ClosedError("this disk tier is closed; make a new one")
            if (written := os.write(self._index, content)) != len(
                content
            ):  # the disk is full: half an entry is none
                size = os.fstat(self._index).st_size
                os.ftruncate(self._index, size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _restore(self) -> None:
        """Find again what earlier runs wrote."""
        size = os.fstat(self._index).st_size
        count = (size - _HEADER_BYTES) // _ENTRY.itemsize
        if self._is_written:
            os.ftruncate(self._index, _HEADER_BYTES + count * _ENTRY.itemsize)  # half an entry
        content = bytearray(count * _ENTRY.itemsize)
        if not count or not _read_all(self._index, memoryview(content), _HEADER_BYTES):
            return
        entries = np.frombuffer(content, _ENTRY)
        samples = entries["sample"]
        entries = entries[
            (entries["check"] == _checks_of(entries, self._salt))
            & (samples >= 0)
            & (samples < self._sizes_bytes.size)
        ]
        # The last entry of each sample.
        _, last = np.unique(entries["sample"][::-1], return_index=True)
        entries = entries[np.sort(entries.size - 1 - last)]
        begin, nbytes, wanted = entries["begin"], entries["nbytes"], self._sizes_bytes[entries["sample"]]
        file_bytes = os.fstat(self._file).st_size
        is_one = (begin >= 0) & ((nbytes == wanted) | ((wanted < 0) & (nbytes >= 0)))
        is_there = begin + nbytes <= min(self._file_bytes, file_bytes)
        if (cut_off := entries["sample"][is_one & ~is_there]).size:
            self._note_gone(cut_off)
        entries = _apart(entries[is_one & is_there])
        self._places.restore(entries["sample"], entries["begin"], entries["begin"] + entries["nbytes"])
        self._checksums = np.zeros(self._sizes_bytes.size, np.uint64)
        self._is_unread = np.zeros(self._sizes_bytes.size, bool)
        self._checksums[entries["sample"]] = entries["checksum"]
        self._is_unread[entries["sample"]] = True
        self._unread_count = len(entries)


#: What a disk answers that is full, broken or locked up: no fault of who named the folder.
_DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS}


def is_fault_of_disk(error: DataError) -> bool:
    """Return whether a tier could not be made as its disk is full or fails, and not as its folder is none."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _DISK_FAULTS


def _check_owner(*files: int) -> None:
    """Raise PermissionError for a file that another user owns or may write to."""
    for found in map(os.fstat, files):
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "another user may write to what is there already")


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return how many bytes a tier may take of the disk of a folder, which need not be there yet. Raises: OSError."""
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    free = os.statvfs(place)
    return int(free.f_bavail * free.f_frsize * (1 - _SPARED_SHARE))


def has_tier(folder: str | os.PathLike[str], fingerprint: bytes) -> bool:
    """Return whether a tier of some data is in a folder."""
    return any(Path(folder).glob(f"penstock-{fingerprint.hex()}-*.index"))


def reserved_bytes(folder: str | os.PathLike[str], fingerprint: bytes, number: int) -> int:
    """Return what a tier of some data takes of the disk of its folder; 0 where there is none of that number."""
    try:
        return os.stat(Path(folder) / f"{_name_of(fingerprint, number)}.samples").st_blocks * 512
    except OSError:  # whoever opens the tier reports what is wrong with the folder
        return 0


class TierFacts(NamedTuple):
    """A disk tier as it lies in a folder.

    path: of its index. about: what data it is of, "" if its header is damaged. used_seconds: when it was used last, in
    seconds since 1970. nbytes: that it takes of the disk. is_used: by a process, now.
    """

    path: Path
    about: str
    used_seconds: float
    nbytes: int
    is_used: bool


def disk_tiers(folder: str | os.PathLike[str]) -> list[TierFacts]:
    """Return the disk tiers in a folder, by name, that this user may open. Raises: OSError."""
    found = []
    for path in sorted(Path(folder).iterdir()):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # it goes meanwhile, or is another user's
            samples = path.with_suffix(".samples")
            stats = [each.stat() for each in (path, samples) if each.exists()]
            with _locked(path) as index:
                facts = None if index is None else _read_header(index)
                if index is None:
                    with open(path, "rb") as file:
                        facts = _read_header(file.fileno())
            found.append(
                TierFacts(
                    path,
                    "" if facts is None else str(facts["about"]),
                    max(each.st_mtime for each in stats),
                    sum(each.st_blocks * 512 for each in stats),
                    index is None,
                )
            )
    return found


def remove_tier(path: Path) -> bool:
    """Remove a disk tier that no process uses; return whether it is gone. Raises: OSError."""
    with _locked(path) as index:
        if index is None:
            return False
        # Another may have removed it before the lock was had; a tier that is new there stays.
        if not _is_at(index, path):
            return not path.exists()
        path.with_suffix(".samples").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return True


def _name_of(fingerprint: bytes, number: int) -> str:
    return f"penstock-{fingerprint.hex()}-{number}"


def _open_index(
    folder: Path, fingerprint: bytes, about: str, first: int, report: Callable[[str], None]
) -> tuple[int, Path]:
    """Return the index of a tier that no other process uses, locked, and its path: one that is there, or a new one.

    On a disk that is read-only: one that is there and that others only read, open for reading.
    """
    for number in range(first, first + _MOST_TIERS):
        path = folder / f"{_name_of(fingerprint, number)}.index"
        try:
            index = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            found = _open_to_read(folder, fingerprint, first) if error.errno == errno.EROFS else None
            if found is None:
                raise
            return found
        try:
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(index, path):  # it was removed before the lock was had
                raise BlockingIOError
        except BlockingIOError:
            os.close(index)
            continue
        facts = _read_header(index)
        if facts is None or facts.get("fingerprint") != fingerprint.hex():
            # Not even the header was written, or something else damaged it: what is there is not known to be ours.
            if os.fstat(index).st_size >= _HEADER_BYTES:
                report(
                    f"{path} is damaged, or another version of Penstock wrote it: its samples are read anew"
                )
            os.ftruncate(index, 0)
            os.write(index, _header({"fingerprint": fingerprint.hex(), "about": about, "made": time.time()}))
        return index, path
    raise OSError(errno.EMFILE, "too many processes use it")


def _open_to_read(folder: Path, fingerprint: bytes, first: int) -> tuple[int, Path] | None:
    """Return the index of a tier that no process writes, if there is one, and its path. first: is preferred."""
    tiers = folder.glob(f"penstock-{fingerprint.hex()}-*.index")
    for path in sorted(tiers, key=lambda each: (each.stem != _name_of(fingerprint, first), each)):
        try:
            index = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except PermissionError:  # another user's
            continue
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(index, fcntl.LOCK_SH | fcntl.LOCK_NB)
            facts, samples = _read_header(index), path.with_suffix(".samples")
            if facts is not None and facts.get("fingerprint") == fingerprint.hex() and samples.exists():
                return index, path
        os.close(index)
    return None


def _is_writable(file: int) -> bool:
    return fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


def _is_at(index: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(index), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Hold the lock of an index while the context is open; None where another process does. Raises: OSError."""
    try:  # for writing, which a lock needs on NFS
        index = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        index = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield index
    except BlockingIOError:
        yield None
    finally:
        os.close(index)


def _header(facts: dict[str, Any]) -> bytes:
    content = json.dumps(facts).encode()
    if _HEAD.size + len(content) > _HEADER_BYTES:
        content = json.dumps(facts | {"about": ""}).encode()
    head = _HEAD.pack(_MAGIC, _VERSION, len(content), xxhash.xxh3_64_intdigest(content))
    return (head + content).ljust(_HEADER_BYTES, b"\0")


def _read_header(index: int) -> dict[str, Any] | None:
    """Return what the header of an index says; None where it is none of this version."""
    found = os.pread(index, _HEADER_BYTES, 0)
    if len(found) < _HEADER_BYTES:
        return None
    magic, version, nbytes, checksum = _HEAD.unpack_from(found)
    content = found[_HEAD.size : _HEAD.size + nbytes]
    if (magic, version) != (_MAGIC, _VERSION) or xxhash.xxh3_64_intdigest(content) != checksum:
        return None
    facts: dict[str, Any] = json.loads(content)
    return facts


def _entries(ids: Ids, begin: int, nbytes: int, checksum: int) -> NDArray[Any]:
    """Return entries that say the same of samples, whose `check` is left to be filled in."""
    entries = np.zeros(ids.size, _ENTRY)
    entries["sample"], entries["begin"], entries["nbytes"], entries["checksum"] = ids, begin, nbytes, checksum
    return entries


def _checks_of(entries: NDArray[Any], salt: np.uint64) -> NDArray[np.uint64]:
    """Return the checksum of each entry: a sum of its fields, each mixed with where it stands."""
    mixed = np.full(entries.size, salt, np.uint64)
    for name, factor in zip(("sample", "begin", "nbytes", "checksum"), _FACTORS, strict=True):
        mixed = (mixed ^ entries[name].astype(np.uint64)) * factor
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _apart(entries: NDArray[Any]) -> NDArray[Any]:
    """Return entries without those that lie where a later one does. entries: the latest last."""
    order = np.argsort(entries["begin"], kind="stable")
    kept: list[int] = []
    for index in order.tolist():
        is_there = entries["nbytes"][index] > 0
        while is_there and kept and _end_of(entries, kept[-1]) > entries["begin"][index]:
            if kept[-1] > index:
                break
            kept.pop()
        else:
            kept.append(index)
    return entries[kept]


def _end_of(entries: NDArray[Any], index: int) -> int:
    return int(entries["begin"][index] + entries["nbytes"][index])


def _write_all(file: int, content: memoryview, begin: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], begin + done)


def _read_all(file: int, into: memoryview, begin: int) -> bool:
    """Read so many bytes of a file; return whether they were there."""
    if begin < 0:
        return False
    done = 0
    try:
        while done < len(into):
            found = os.preadv(file, [into[done:]], begin + done)
            if not found:
                return False
            done += found
    except OSError:
        return False
    return True
