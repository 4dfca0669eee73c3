"""Counters of a process and its descendants, summed; those that ended count to their end."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.measure.kernel_file import KernelFile

OF_PROCESSES = ("cpu_ticks", "asked_bytes", "read_bytes", "written_bytes", "resident_bytes", "processes")
#: Those of them that only grow come first.
_GROWING = 4
#: What of a process's io is counted.
_IO = b"rchar:", b"read_bytes:", b"write_bytes:"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


#: What looking for new processes takes of a core at most; and reading counters, with all else that the thread does, as
#: far as reading them less often keeps it there. Seconds after which either is done in any case.
_LOOKING_SHARE, _ALL_SHARE, _MOST_SECONDS = 5e-4, 4.5e-3, 2.0


class _Process:
    """One process, its files open.

    parent: the process that waits for it. counters: `OF_PROCESSES`, read last.
    """

    def __init__(self, folder: Path) -> None:
        self._io, self._stat = KernelFile(folder / "io"), KernelFile(folder / "stat")
        self.parent = 0
        self.counters = [0] * len(OF_PROCESSES)

    def update(self, looks: bool) -> bool:
        """Read the counters, of its stat only if it is looked at; return False where it is gone: it was waited for."""
        words = self._io.read().split()
        if looks or not words:
            # The name may have spaces and brackets: what follows the last one counts.
            fields = self._stat.read().rpartition(b")")[2].split(None, 22)
            if len(fields) < 22:
                return False
            self.parent = int(fields[1])
            self.counters[0] = sum(map(int, fields[11:15]))
            self.counters[_GROWING:] = int(fields[21]) * _PAGE_BYTES, int(fields[0] not in (b"Z", b"X"))
        io = dict(zip(words[::2], words[1::2], strict=False))
        self.counters[1:_GROWING] = [
            int(io.get(name, before)) for name, before in zip(_IO, self.counters[1:_GROWING], strict=True)
        ]
        return True

    def close(self) -> None:
        self._io.close()
        self._stat.close()


class Processes:
    """Sums the counters of a process and its descendants.

    The bytes that they moved are read each time, unless the thread took more than 0.45 % of a core then; but every two
    seconds at least. New processes are looked for, and processor time and memory are read, each second or two.
    The kernel adds a process's counters to its parent's when the parent waits for it, before the process is gone: those
    that went so are counted there. Parents are read before their children, so that none counts twice. Of one that
    nobody waits for, as its parent ended before it or ignores SIGCHLD, what was read last counts: up to two seconds of
    it are lost.
    Source: proc_pid_io(5); proc_pid_stat(5), cutime and cstime.
    """

    def __init__(
        self, pid: int, proc: Path, tree_of: Callable[[int], Iterable[int]], cost_clock: Callable[[], float]
    ) -> None:
        self._pid, self._proc, self._tree_of, self._cost_clock = pid, proc, tree_of, cost_clock
        self._look_due = self._read_due = -math.inf
        #: What else the thread takes of a core, and since when that is counted; reading since then.
        self._others_share = _ALL_SHARE - _LOOKING_SHARE
        self._since = math.inf, 0.0
        self._reading_seconds = 0.0
        #: By process id, each after its parent.
        self._processes: dict[int, _Process] = {}
        #: Sums over those that ended and that no process of the tree waited for; over all, as they were read last.
        self._ended = [0] * len(OF_PROCESSES)
        self._sums = self._ended

    @property
    def due(self) -> float:
        """When they are to be read again."""
        return min(self._look_due, self._read_due)

    def read(self, now: float, everything: bool) -> list[int]:
        """Return `OF_PROCESSES`. everything: as if all were due."""
        begin = looked = self._cost_clock()
        looks = everything or now >= self._look_due
        if looks:
            for pid in (self._pid, *self._tree_of(self._pid)):
                if pid not in self._processes:
                    self._processes[pid] = _Process(self._proc / str(pid))
            looked = self._cost_clock()
        self._update(looks)
        ended = self._cost_clock()
        self._reading_seconds += ended - looked
        if looks:
            self._look_due = now + min(max(1.0, (ended - begin) / _LOOKING_SHARE), _MOST_SECONDS)
            if (seconds := now - self._since[0]) > 0:
                self._others_share = (ended - self._since[1] - self._reading_seconds) / seconds
            self._since, self._reading_seconds = (now, ended), 0.0
        left = max(_ALL_SHARE - self._others_share, 1e-9)
        self._read_due = now + min((ended - looked) / left, _MOST_SECONDS)
        return self._sums

    def close(self) -> None:
        """Close the files. Twice is harmless."""
        for process in self._processes.values():
            process.close()

    def _update(self, looks: bool) -> None:
        before = {pid: process.counters.copy() for pid, process in self._processes.items()}
        gone: dict[int, _Process] = {}
        while new := {pid: process for pid, process in self._processes.items() if not process.update(looks)}:
            for pid, process in new.items():
                process.close()
                del self._processes[pid]
            gone |= new
            looks = True  # again: a parent may have waited after it was read
        self._count(gone, before)
        self._sums = _sum(self._ended, *(process.counters for process in self._processes.values()))

    def _count(self, gone: dict[int, _Process], before: dict[int, list[int]]) -> None:
        """Count those that are gone which nobody waited for. before: the counters of all as they were read before.

        Who waited for one has grown by what it did, at least.
        """
        owed: dict[int, list[int]] = {}
        for process in gone.values():
            pid = process.parent
            while pid in gone:
                pid = gone[pid].parent
            owed[pid] = _sum(owed.get(pid, [0] * len(OF_PROCESSES)), process.counters)
        for pid, counters in owed.items():
            if pid in self._processes:
                now = self._processes[pid].counters
                counters = [
                    max(0, own - (new - old))
                    for own, new, old in zip(counters, now, before[pid], strict=True)
                ]
            counters[_GROWING:] = 0, 0
            self._ended = _sum(self._ended, counters)


def _sum(*counters: list[int]) -> list[int]:
    return list(map(sum, zip(*counters, strict=True)))
