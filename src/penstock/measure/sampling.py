"""Counters of the kernel, read many times a second: devices, network, a tree of processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.measure.kernel_file import KernelFile
from penstock.measure.processes import OF_PROCESSES, Processes
from penstock.measure.running import descendants
from penstock.recordings.devices import GONE

_SECTOR_BYTES = 512
#: Fields of /sys/block/DISK/stat. Source: Linux, Documentation/block/stat.rst.
_OF_DISK = {"reads": 0, "read_bytes": 2, "writes": 4, "written_bytes": 6, "busy_milliseconds": 9}
#: How often the network is read at most; and the pressure, of which only the growth over a run is shown. Lost disks are
#: looked for with it.
_NETWORK_SECONDS, _PRESSURE_SECONDS = 0.09, 0.5
#: When, and texts of the disks; when, and text of the network; text of the pressure; when, and counters of processes.
_Sample = tuple[float, list[bytes], tuple[float, bytes], bytes, tuple[float, list[int]]]


class Sampler:
    """Reads all counters of this host and of a process and its descendants.

    pid: of the command. proc, sys: where the kernel's files are. clock: seconds, monotonic. cost_clock: seconds of
        processor time of this thread.
    columns: names of what `rows` returns; "tree:asked_bytes" counts what was read from the page cache as well.
    Every sample reads the disks. The network is read eleven times a second at most, the pressure twice. What the
    processes read and wrote is read for every sample, too, unless this thread took more than 0.45 % of a core then; but
    every two seconds at least. New ones are looked for, and processor time and memory are read, each second or two. A
    row has what was read last:
    "net:nanoseconds" and "tree:nanoseconds" say when. What a process did before it was found counts, and so does what
    one did that was not found, once its parent has waited for it; what one that nobody waits for did since it was read
    last is lost.
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
        self._clock = clock
        self._origin = clock()
        disks = _disks(sys)
        self._disks = [KernelFile(sys / "block" / disk / "stat") for disk in disks]
        self._network = KernelFile(proc / "net" / "dev")
        self._pressure = KernelFile(proc / "pressure" / "io")
        self._processes = Processes(pid, proc, tree_of, cost_clock)
        self._network_due = self._pressure_due = self._due = -math.inf
        #: When and what was read last of network and processes, and the pressure.
        self._network_read: tuple[float, bytes] = self._origin, b""
        self._processes_read: tuple[float, list[int]] = self._origin, [GONE] * len(OF_PROCESSES)
        self._pressure_read = b""
        #: Samples as they were read: making sense of many at once takes a third of the time.
        self._samples: list[_Sample] = []
        self.columns = (
            "nanoseconds",
            *(f"disk:{disk}:{name}" for disk in disks for name in _OF_DISK),
            "net:nanoseconds",
            "net:received_bytes",
            "net:sent_bytes",
            "pressure:io_microseconds",
            "tree:nanoseconds",
            *(f"tree:{name}" for name in OF_PROCESSES),
        )

    def sample(self, *, everything: bool = False) -> int:
        """Read the counters now; return how many samples `rows` would return.

        everything: read what is read less often, too: of a run's last sample.
        """
        now = self._clock()
        disks = list(map(KernelFile.read, self._disks))
        if everything or now >= self._due:
            self._read_others(now, disks, everything)
        self._samples.append((now, disks, self._network_read, self._pressure_read, self._processes_read))
        return len(self._samples)

    def _read_others(self, now: float, disks: list[bytes], everything: bool) -> None:
        """Read what is not read for every sample, as far as it is due."""
        if everything or now >= self._network_due:
            self._network_due = now + _NETWORK_SECONDS
            self._network_read = now, self._network.read()
        if everything or now >= self._pressure_due:
            self._pressure_due = now + _PRESSURE_SECONDS
            self._pressure_read = self._pressure.read()
            for file, text in zip(self._disks, disks, strict=True):
                if not text:
                    file.reopen()
        if everything or now >= self._processes.due:
            self._processes_read = now, self._processes.read(now, everything)
        self._due = min(self._network_due, self._pressure_due, self._processes.due)

    def rows(self) -> NDArray[np.int64]:
        """Return the samples since the last call, int64[n, columns], oldest first; `GONE` where there was nothing."""
        rows = [
            [
                self._nanoseconds(now),
                *_of_disks(disks),
                self._nanoseconds(network[0]),
                *_of_network(network[1]),
                _of_pressure(pressure),
                self._nanoseconds(processes[0]),
                *processes[1],
            ]
            for now, disks, network, pressure, processes in self._samples
        ]
        self._samples.clear()
        return np.array(rows, np.int64).reshape(-1, len(self.columns))

    def _nanoseconds(self, moment: float) -> int:
        return int(1e9 * (moment - self._origin))

    def close(self) -> None:
        """Close the files. Twice is harmless."""
        for file in (*self._disks, self._network, self._pressure):
            file.close()
        self._processes.close()


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


def _of_disks(texts: list[bytes]) -> list[int]:
    row = []
    for text in texts:
        fields = text.split()
        for name, place in _OF_DISK.items():
            if place >= len(fields):
                row.append(GONE)
            else:
                row.append(int(fields[place]) * (_SECTOR_BYTES if name.endswith("bytes") else 1))
    return row


@lru_cache(maxsize=1)
def _of_network(text: bytes) -> tuple[int, int]:
    received = sent = 0
    for line in text.splitlines():
        name, _, rest = line.partition(b":")
        fields = rest.split()
        if len(fields) >= 9 and name.strip() != b"lo":
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


@lru_cache(maxsize=1)
def _of_pressure(text: bytes) -> int:
    for line in text.splitlines():
        if line.startswith(b"some"):
            return int(line.rpartition(b"total=")[2])
    return GONE
