"""What recorded processes wrote, as a stream of page writes for `penstock.simulate.wear`.

A recording (`penstock trace blocks`) names files, or a whole device. Each file gets space of its own on the drive, as
large as its last written byte says, in the order of first writes; a file that took another one's path is written over
it. What a device was asked for stays at its offsets, modulo the drive. Nothing records deletes and TRIM in a
recording, so that what is written again overwrites, and everything else stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine.ssd import PageOp, Ssd
from penstock.recordings.blocks import Access, Recording, block_runs
from penstock.simulate.wear import FileSpace, PageRuns, Stream
from penstock.units import format_bytes

#: Formats whose writes are requests to a device, of which each one is carried out.
_OF_REQUESTS = ("blkparse", "fio")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedWrites:
    """A recording's writes on a drive.

    stream: page writes in the order in which they were recorded.
    files, devices: written ones; one of them is 0. writes, written_bytes: calls or requests, and what they say.
    pages_beyond: pages at offsets beyond the drive's end, which were taken modulo its size.
    notes: what the recording leaves open, for people.
    """

    stream: Stream
    files: int
    devices: int
    writes: int
    written_bytes: int
    pages_beyond: int
    notes: tuple[str, ...]


def recorded_writes(recording: Recording, ssd: Ssd, name: str) -> RecordedWrites:
    """Return the page writes of a recording on a drive.

    A page that a process keeps filling, call after call, is written once, as the page cache would write it; requests
    to a device (blkparse, fio) are all carried out. A page that is written in part is written.

    name: of the recording, for messages.
    Raises: ConfigError if nothing was written, files and devices were, or the files have no space on the drive.
    """
    rows = recording.rows[recording.rows["access"] == Access.WRITE]
    if not rows.size:
        raise ConfigError(f"{name} is a recording without a write: nothing would wear the drive")
    is_device = np.array([_is_device(path) for path in recording.files], np.bool_)[rows["file"]]
    if is_device.any() != is_device.all():
        raise ConfigError(
            f"{name} has writes of files and of devices, whose places on the drive would be the same: record one or "
            "the other"
        )
    by_requests = recording.meta.get("by") in _OF_REQUESTS
    firsts, counts = block_runs(rows, ssd.page_bytes, join=not by_requests)
    is_run = counts > 0
    firsts, counts, files = firsts[is_run], counts[is_run], rows["file"][is_run]
    beyond = 0
    if is_device.any():
        firsts, counts, beyond = _on_device(files, firsts, counts, ssd.exported_pages)
    else:
        firsts = firsts + _places_of_files(recording, files, firsts + counts, ssd)[files]
    runs = PageRuns(
        np.full(firsts.size, PageOp.WRITE, np.uint8), firsts, counts, np.zeros(firsts.size, np.int64)
    )
    written = np.unique(rows["file"]).size
    return RecordedWrites(
        stream=Stream(name, (runs,)),
        files=0 if is_device.any() else written,
        devices=written if is_device.any() else 0,
        writes=rows.size,
        written_bytes=int(rows["bytes"].sum()),
        pages_beyond=beyond,
        notes=tuple(
            _notes(recording, written, int(rows["bytes"].sum()), bool(is_device.any()), by_requests, beyond)
        ),
    )


def _is_device(path: str) -> bool:
    # blkparse's numbers become "device 259,0" (penstock.recordings.imports); fio names what it was given.
    return path.startswith(("device ", "/dev/")) and not path.startswith("/dev/shm/")


def _places_of_files(
    recording: Recording, files: NDArray[np.int32], ends: NDArray[np.int64], ssd: Ssd
) -> NDArray[np.int64]:
    """The drive's first page of each file, -1 of one that was not written: int64[files].

    Files that had one path after each other, as a checkpoint has that is replaced by a rename, have one place.
    """
    pages = np.zeros(len(recording.files), np.int64)
    np.maximum.at(pages, files, ends)
    written, first = np.unique(files, return_index=True)
    of_path: dict[str, list[int]] = {}
    for file in written[np.argsort(first)].tolist():
        of_path.setdefault(recording.files[file], []).append(file)
    places = np.full(pages.size, -1, np.int64)
    space = FileSpace(ssd)
    for path, same in of_path.items():
        # Nothing is given back, so that each file is in one piece.
        ((place, _pages),) = space.add(path, int(pages[same].max()) * ssd.page_bytes)
        places[same] = place
    return places


def _on_device(
    files: NDArray[np.int32], firsts: NDArray[np.int64], counts: NDArray[np.int64], pages: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Runs modulo the drive, cut where they pass its end, and how many of their pages lay beyond it.

    Of several devices each begins where the one before ends.
    """
    ends = np.zeros(int(files.max()) + 1, np.int64)
    np.maximum.at(ends, files, firsts + counts)
    firsts = firsts + (np.cumsum(ends) - ends)[files]
    beyond = int((counts - np.clip(pages - firsts, 0, counts)).sum())
    firsts = firsts % pages
    while (long := firsts + counts > pages).any():
        order = np.argsort(np.concatenate((np.arange(firsts.size), np.flatnonzero(long))), kind="stable")
        fits = np.where(long, pages - firsts, counts)
        counts = np.concatenate((fits, (counts - fits)[long]))[order]
        firsts = np.concatenate((firsts, np.zeros(int(long.sum()), np.int64)))[order]
    return firsts, counts, beyond


def _notes(
    recording: Recording, written: int, written_bytes: int, of_devices: bool, by_requests: bool, beyond: int
) -> list[str]:
    things = (
        ("device" if written == 1 else "devices") if of_devices else ("file" if written == 1 else "files")
    )
    notes = [
        f"A recording: {format_bytes(written_bytes)} written to {written:,} {things}. It contains no delete and no "
        "TRIM: what is written again is overwritten, all else stays on the drive."
    ]
    if not by_requests:
        notes.append(
            "Its writes are the processes' calls, not the disk's: a page that a process keeps filling counts once, "
            "and what else the page cache merges, or never writes out, is not known."
        )
    if beyond:
        notes.append(
            f"{beyond:,} pages written lie beyond the end of this drive: offsets count modulo its size."
        )
    if not recording.is_complete:
        notes.append("The recording is not complete: it was interrupted, or its log breaks off.")
    if recording.unresolved:
        notes.append(
            f"{recording.unresolved:,} reads and writes are left out: the log does not tell their files."
        )
    return notes
