"""What devices, network and this process moved while something ran, sampled by a thread of this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from penstock.measure.sampling import Sampler
from penstock.recordings.devices import DeviceRecord

_PERIOD_SECONDS = 0.1
#: Of a direction: its counters of the network and of this process and its children, in which the page cache counts too.
_COLUMNS = {
    "read": ("read_bytes", "net:received_bytes", "tree:asked_bytes"),
    "written": ("written_bytes", "net:sent_bytes", "tree:written_bytes"),
}
#: Less than this share of what the process itself asked for is not its traffic, but somebody else's.
_LEAST_SHARE = 0.5


class Traffic:
    """Samples this host's counters while a context lasts; `record` is there afterwards.

    The thread samples and nothing else; whoever made it reads the record after the context.
    """

    def __init__(self, period_seconds: float = _PERIOD_SECONDS) -> None:
        self._period_seconds = period_seconds
        self._ended = threading.Event()
        # The processes in every row: here nothing is promised of what that takes.
        self._sampler = Sampler(os.getpid(), cost_clock=lambda: 0.0)
        self._thread = threading.Thread(target=self._sample, name="penstock-traffic", daemon=True)

    def _sample(self) -> None:
        while not self._ended.wait(self._period_seconds):
            self._sampler.sample()

    def __enter__(self) -> Self:
        self._sampler.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sampler.sample(everything=True)
        #: What was sampled, a row at the beginning and at the end of the context at least.
        self.record = DeviceRecord(self._sampler.columns, self._sampler.rows(), {}, None)
        self._sampler.close()


class Flow(NamedTuple):
    """Bytes over time. place: what moved them. seconds: float64[n], the end of each period. rates: bytes/s in it."""

    place: str
    seconds: NDArray[np.float64]
    rates: NDArray[np.float64]

    @property
    def total_bytes(self) -> float:
        return self.before(np.inf)

    def before(self, moment: float) -> float:
        """Return the bytes up to a moment, in seconds."""
        ends = np.minimum(self.seconds, moment)
        return float((self.rates * np.diff(ends, prepend=0.0)).sum())


def disk_of(device: int, sys: Path = Path("/sys")) -> str:
    """Return the name of the disk that a device number (`os.stat`'s st_dev) is a part of, or lies on.

    sys: where the kernel's folder is. Empty where there is none, as of a network file system, or several.
    """
    place = (sys / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}").resolve()
    while place.is_dir():
        if (place / "partition").exists():
            place = place.parent
        below = sorted((place / "slaves").glob("*"))
        if not below:
            return place.name
        if len(below) > 1:
            break
        place = below[0].resolve()
    return ""


def flow_of(record: DeviceRecord, direction: Literal["read", "written"], disk: str = "") -> Flow:
    """Return what moved in a direction: over the block devices, or else the network, or else as this process asked.

    disk: name of the one that counts, whatever else moves; "" or one that was not sampled counts all.
    The devices of a host serve others, too, and serve nothing for a data set on a network file system: the first of
    these that moved at least half of what this process and its children asked for is taken.
    """
    of_disks, of_network, of_process = _COLUMNS[direction]
    disks = [name for name in record.columns if name.startswith("disk:") and name.endswith(f":{of_disks}")]
    if (column := f"disk:{disk}:{of_disks}") in disks:
        return _flow(record, disk, _grown(record, [column]))
    asked = _grown(record, [of_process])
    for place, columns in (("block devices", disks), ("network", [of_network])):
        grown = _grown(record, columns)
        if grown.sum() and grown.sum() >= _LEAST_SHARE * asked.sum():
            return _flow(record, place, grown)
    return _flow(record, "this process", asked)


def _grown(record: DeviceRecord, columns: list[str]) -> NDArray[np.int64]:
    nothing = np.zeros(max(0, len(record.rows) - 1), np.int64)
    return sum((record.growth(column) for column in columns), nothing)


def _flow(record: DeviceRecord, place: str, grown: NDArray[np.int64]) -> Flow:
    seconds = record.seconds
    return Flow(place, seconds[1:] - seconds[0], grown / np.maximum(np.diff(seconds), 1e-9))
