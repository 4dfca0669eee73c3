"""Counters of the kernel, read many times a second from files that stay open: devices, network, a tree of processes."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from penstock.measure.running import descendants
from penstock.recordings.devices import GONE

_SECTOR_BYTES = 512
_FILE_BYTES = 1 << 16
#: Fields of a line of /proc/diskstats. Source: Linux, Documentation/admin-guide/iostats.rst.
_OF_DISK = {"reads": 3, "read_bytes": 5, "writes": 7, "written_bytes": 9, "busy_milliseconds": 12}
_OF_TREE = ("cpu_ticks", "asked_bytes", "read_bytes", "written_bytes", "resident_bytes", "processes")
#: What of a process's io is counted.
_IO = b"rchar:", b"read_bytes:", b"write_bytes:"
#: How often new processes are looked for; of large trees less often, as far as the second time, so that it takes this
#: share of a core.
_LOOK_SECONDS, _MOST_LOOK_SECONDS, _LOOK_SHARE = 1.0, 2.0, 1e-3
#: Processes whose counters are read for one sample, so that a sample takes as long however many there are.
_MOST_PROCESSES = 4
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Sampler:
    """Reads all counters of this host and of a process and its descendants.

    pid: of the command. proc, sys: where the kernel's files are. clock: seconds, monotonic. cost_clock: seconds of
        processor time of this thread.
    columns: names of what `sample` returns; "tree:asked_bytes" counts what was read from the page cache as well. Of
        more than four processes, four are read for each sample, in turn, and new ones; others count as they did last.
        New processes are looked for once a second, in large trees each two: what ends sooner may be missed.
    Used by one thread; close it.
    """

    def __init__(
        self,
        pid: int,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        tree_of: Callable[[int], Iterable[int]] = descendants,
        clock: Callable[[], float] = time.monotonic,
        cost_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._pid, self._proc, self._tree_of = pid, proc, tree_of
        self._clock, self._cost_clock = clock, cost_clock
        self._origin = clock()
        self._disks = _disks(sys)
        self._files = {name: _open(proc / name) for name in ("diskstats", "net/dev", "pressure/io")}
        self._look_next = -math.inf
        #: By process: its open files io, stat, the one first that was read longest ago; and the last counters of it.
        self._processes: dict[int, tuple[int, int]] = {}
        self._last: dict[int, list[int]] = {}
        self._ended = [0] * len(_OF_TREE)
        self.columns = (
            "nanoseconds",
            *(f"disk:{disk}:{name}" for disk in self._disks for name in _OF_DISK),
            "net:received_bytes",
            "net:sent_bytes",
            "pressure:io_microseconds",
            *(f"tree:{name}" for name in _OF_TREE),
        )

    def sample(self) -> list[int]:
        """Return the counters now, `GONE` where there is none."""
        now = self._clock()
        row = [int(1e9 * (now - self._origin))]
        text = self._read("diskstats")
        for disk in self._disks:
            fields = _line_of(disk, text)
            for name, place in _OF_DISK.items():
                value = GONE if fields is None else int(fields[place])
                row.append(value * _SECTOR_BYTES if name.endswith("bytes") and fields is not None else value)
        row += _of_network(self._read("net/dev"))
        row.append(_of_pressure(self._read("pressure/io")))
        return row + self._of_tree(now)

    def close(self) -> None:
        """Close the files. Twice is harmless."""
        for number in self._files.values():
            if number >= 0:
                os.close(number)
        for pid in list(self._processes):
            self._forget(pid)
        self._files = dict.fromkeys(self._files, -1)

    def _read(self, name: str) -> bytes:
        number = self._files[name]
        if number < 0:
            return b""
        try:
            return os.pread(number, _FILE_BYTES, 0)
        except OSError:
            # Pressure that is switched off, a file system that went: as if it had never been there.
            return b""

    def _of_tree(self, now: float) -> list[int]:
        new: set[int] = set()
        if now >= self._look_next:
            begin = self._cost_clock()
            tree = {self._pid, *self._tree_of(self._pid)}
            seconds = (self._cost_clock() - begin) / _LOOK_SHARE
            self._look_next = now + min(max(_LOOK_SECONDS, seconds), _MOST_LOOK_SECONDS)
            new = tree - self._processes.keys()
            for pid in new:
                self._processes[pid] = (
                    _open(self._proc / str(pid) / "io"),
                    _open(self._proc / str(pid) / "stat"),
                )
        for pid in {*new, *itertools.islice(self._processes, _MOST_PROCESSES)}:
            counters = _of_process(*self._processes[pid])
            if counters is None:
                counters = [*self._last.pop(pid, [0] * len(_OF_TREE))[:4], 0, 0]
                self._ended = [ended + more for ended, more in zip(self._ended, counters, strict=True)]
                self._forget(pid)
            else:
                self._last[pid] = counters
                self._processes[pid] = self._processes.pop(pid)
        return [sum(counters) for counters in zip(self._ended, *self._last.values(), strict=True)]

    def _forget(self, pid: int) -> None:
        for number in self._processes.pop(pid):
            if number >= 0:
                os.close(number)


def _disks(sys: Path) -> list[str]:
    """Return the names of devices that hold something and lie on no other: no loop devices, no memory."""
    names = []
    for folder in sorted((sys / "block").glob("*")) if (sys / "block").is_dir() else ():
        if folder.name.startswith(("loop", "ram", "zram")):
            continue
        with suppress(OSError, ValueError):
            # What device mapper and md make of other disks counts their bytes a second time.
            if int((folder / "size").read_text()) and not any((folder / "slaves").glob("*")):
                names.append(folder.name)
    return names


def _line_of(disk: str, text: bytes) -> list[bytes] | None:
    """Return the fields of a disk in /proc/diskstats; None where it has none. Other disks' lines are not split."""
    at = text.find(b" " + os.fsencode(disk) + b" ")
    if at < 0:
        return None
    begin = text.rfind(b"\n", 0, at) + 1
    fields = text[begin:].partition(b"\n")[0].split()
    return fields if len(fields) > 12 else None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # another user's process, a kernel without it
        return -1


def _of_network(text: bytes) -> list[int]:
    received = sent = 0
    for line in text.splitlines():
        name, _, rest = line.partition(b":")
        fields = rest.split()
        if len(fields) >= 9 and name.strip() != b"lo":
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return [received, sent]


def _of_pressure(text: bytes) -> int:
    for line in text.splitlines():
        if line.startswith(b"some"):
            return int(line.rpartition(b"total=")[2])
    return GONE


def _of_process(io: int, stat: int) -> list[int] | None:
    """Return `_OF_TREE` of a process; None where it has ended."""
    try:
        text = os.pread(stat, _FILE_BYTES, 0) if stat >= 0 else b""
        # The name may have spaces and brackets: what follows the last one counts.
        fields = text.rpartition(b")")[2].split()
        if len(fields) < 22 or fields[0] in (b"Z", b"X"):
            return None
        words = os.pread(io, _FILE_BYTES, 0).split() if io >= 0 else []
        counters = dict(zip(words[::2], words[1::2], strict=False))
    except OSError:
        return None
    asked, read, written = (int(counters.get(name, 0)) for name in _IO)
    return [int(fields[11]) + int(fields[12]), asked, read, written, int(fields[21]) * _PAGE_BYTES, 1]
