"""What a disk may show after a power cut, given what was asked of it.

Promised is only what POSIX says, as ALICE's weakest model has it (Pillai et al., OSDI 2014, section 3.1; CrashMonkey,
OSDI 2018, finds that real file systems need no more to break applications): the bytes of a file are durable once a
sync of that file that began after the write has returned; a name (made, renamed, removed) is durable once its folder
was synced so; syncing a file does not make its name durable. What is not durable may be there or not, each operation
for itself, in any order:

- a name's change is atomic (all file systems with a journal have it so);
- of a write each sector of 512 bytes arrives or does not; a file's size may be that of bytes that did not arrive, with
  zeros or with what the disk had there before in their place.

A state is a function of (recording, seed, index), so that a message can say how to see it again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from tests.checkpoint.crash.recording import TOP, Names, Operation, Recording, Report, Resize, Sync, Write

SECTOR_BYTES = 512


class Style(Enum):
    """Which of the operations that are not durable survive."""

    NOTHING = "nothing"
    EVERYTHING = "everything"
    NAMES = "all names, no bytes"
    SIZES = "all names and sizes, no bytes"
    BYTES = "all bytes, no names"
    JOURNAL = "names up to a moment, any bytes"
    ONE_LOST = "all but one"
    ONE_KEPT = "only one"
    LATEST = "those since a moment"
    ANY = "any"


STYLES = tuple(Style)
#: The golden ratio's fraction: multiples of it spread evenly, wherever one stops.
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class CrashState:
    """The disk after a power cut behind the first `after` operations.

    names: entries of each folder. files: contents of each file.
    """

    seed: int
    index: int
    style: Style
    after: int
    names: dict[int, dict[str, int]]
    files: dict[int, bytes]
    #: Steps that had been reported saved.
    reported: tuple[int, ...]
    #: One line for each operation that was not durable: its number, whether it survived, what it was.
    story: tuple[str, ...]

    @property
    def fingerprint(self) -> int:
        """Return what is equal for states that look the same and follow the same reports."""
        return hash((self.reported, tuple(self.entries())))

    def write_to(self, folder: Path) -> None:
        """Make `folder` what the disk shows in place of the recorded one."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path, data in self.entries():
            if data is None:
                (folder / path).mkdir()
            else:
                (folder / path).write_bytes(data)

    def entries(self, folder: int = TOP, path: str = "") -> Iterator[tuple[str, bytes | None]]:
        """Yield the path and contents of each file, and the path of each folder, before what is in it."""
        for name, inode in sorted(self.names.get(folder, {}).items()):
            if inode in self.names:
                yield path + name, None
                yield from self.entries(inode, f"{path}{name}/")
            else:
                yield path + name, self.files.get(inode, b"")

    def __str__(self) -> str:
        lines = [
            f"power cut after operation {self.after}, style {self.style.value!r}"
            f" (seed {self.seed}, index {self.index})",
            f"reported as saved: {list(self.reported)}",
            "not durable then (+ survived, - lost):",
            *(f"  {line}" for line in self.story or ["nothing"]),
        ]
        return "\n".join(lines)


def states(recording: Recording, count: int, seed: int) -> Iterator[CrashState]:
    """Yield states of a disk, no two alike, at most `count`: fewer where the recording does not have so many."""
    seen: set[int] = set()
    for index in range(10 * count):
        state = state_at(recording, seed, index)
        if state.fingerprint not in seen:
            seen.add(state.fingerprint)
            yield state
            if len(seen) == count:
                return


def state_at(recording: Recording, seed: int, index: int) -> CrashState:
    """Return one state: the styles take turns, and the moments of each are spread over the whole recording."""
    generator = np.random.default_rng([seed, index])
    style = STYLES[index % len(STYLES)]
    turn = index // len(STYLES)
    share = (turn * _GOLDEN + (index % len(STYLES)) / len(STYLES) + seed * _GOLDEN**2) % 1.0
    after = 1 + int(share * len(recording.operations))
    return _state(recording, after, style, generator, seed, index)


def durable(operations: list[Operation]) -> list[bool]:
    """Return for each operation whether all of it would outlive a power cut after the last."""
    synced: dict[int, int] = {}
    everything = 0
    for operation in operations:
        if isinstance(operation, Sync):
            if operation.inode is None:
                everything = max(everything, operation.began)
            else:
                synced[operation.inode] = max(synced.get(operation.inode, 0), operation.began)
    return [
        not isinstance(operation, Names | Write | Resize)
        or all(place < max(everything, synced.get(inode, 0)) for inode in operation.inodes)
        for place, operation in enumerate(operations)
    ]


def _state(
    recording: Recording, after: int, style: Style, generator: np.random.Generator, seed: int, index: int
) -> CrashState:
    done = recording.operations[:after]
    safe = durable(done)
    pending = [place for place, is_safe in enumerate(safe) if not is_safe]
    kept = _choice(style, pending, done, generator)
    tears = style in (Style.JOURNAL, Style.ANY)
    extends = style is Style.SIZES or (tears and bool(generator.integers(2)))
    names: dict[int, dict[str, int]] = {folder: {} for folder in recording.folders}
    files: dict[int, bytearray] = {}
    story = []
    for place, operation in enumerate(done):
        survives = safe[place] or place in kept
        sectors = None
        if isinstance(operation, Names):
            if survives:
                _rename(names, operation)
        elif isinstance(operation, Resize):
            if survives:
                _resize(files.setdefault(operation.inode, bytearray()), operation)
        elif isinstance(operation, Write):
            file = files.setdefault(operation.inode, bytearray())
            if tears and not safe[place] and generator.integers(2):
                sectors = generator.integers(0, 2, _sectors(operation)).astype(bool)
            if survives or extends:
                stale = generator.bytes(len(operation.data)) if tears and generator.integers(2) else None
                _write(file, operation, sectors, survives, stale)
        if not safe[place]:
            sign = "+" if survives else "-"
            torn = (
                f" ({int(sectors.sum())} of {sectors.size} sectors)"
                if survives and sectors is not None
                else ""
            )
            story.append(f"{sign} {place + 1:4d} {operation.says}{torn}")
    reported = tuple(
        operation.saved for operation in done if isinstance(operation, Report) and operation.saved is not None
    )
    contents = {inode: bytes(data) for inode, data in files.items()}
    return CrashState(seed, index, style, after, names, contents, reported, tuple(story))


def _choice(
    style: Style, pending: list[int], done: list[Operation], generator: np.random.Generator
) -> frozenset[int]:
    """Return which of the pending operations survive."""
    of_names = [place for place in pending if isinstance(done[place], Names)]
    moment = pending[int(generator.integers(len(pending)))] if pending else 0
    match style:
        case Style.NOTHING:
            kept = []
        case Style.EVERYTHING:
            kept = pending
        case Style.NAMES | Style.SIZES:
            kept = of_names
        case Style.BYTES:
            kept = [place for place in pending if place not in of_names]
        case Style.JOURNAL:
            drawn = [place for place in pending if place not in of_names and generator.integers(2)]
            kept = [place for place in of_names if place <= moment] + drawn
        case Style.ONE_LOST:
            kept = [place for place in pending if place != moment]
        case Style.ONE_KEPT:
            kept = [moment] if pending else []
        case Style.LATEST:
            kept = [place for place in pending if place >= moment]
        case Style.ANY:
            kept = [place for place in pending if generator.integers(2)]
    return frozenset(kept)


def _rename(names: dict[int, dict[str, int]], operation: Names) -> None:
    for folder, name, inode in operation.entries:
        if inode is None:
            names[folder].pop(name, None)
        else:
            names[folder][name] = inode


def _resize(file: bytearray, operation: Resize) -> None:
    if len(file) < operation.size:
        file.extend(bytes(operation.size - len(file)))
    elif not operation.grows:
        del file[operation.size :]


def _sectors(operation: Write) -> int:
    first = operation.offset // SECTOR_BYTES
    return -(-(operation.offset + len(operation.data)) // SECTOR_BYTES) - first


def _write(
    file: bytearray,
    operation: Write,
    sectors: np.ndarray[tuple[int], np.dtype[np.bool_]] | None,
    survives: bool,
    stale: bytes | None,
) -> None:
    """Write what arrived: all, nothing, or the sectors drawn; the size is that of the whole write."""
    start, data = operation.offset, operation.data
    end = start + len(data)
    if len(file) < end:
        beyond = len(file)
        file.extend(bytes(end - beyond))
        if stale is not None:
            inside = max(beyond, start)
            file[inside:end] = stale[inside - start :]
    if not survives:
        return
    if sectors is None:
        file[start:end] = data
        return
    sector_start = start - start % SECTOR_BYTES
    for number in np.flatnonzero(sectors):
        low = max(start, sector_start + int(number) * SECTOR_BYTES)
        high = min(end, sector_start + (int(number) + 1) * SECTOR_BYTES)
        file[low:high] = data[low - start : high - start]
