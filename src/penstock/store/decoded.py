"""Samples in units that are decoded as a whole: row groups of Parquet files, compressed chunks of HDF5 files.

A unit is decoded once for all samples that are wanted of it together, and kept for later ones while memory allows.

Decided in docs/decisions/0023-samples-that-share-files.md.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.store.group import Bytes, Failed, Ids, check_group, front_of, note_mapped, observer
from penstock.store.packed import READ_PIECES, PackedFiles, copy_pieces
from penstock.units import format_bytes, parse_bytes

#: What units may take that are decoded, unless the user says another.
DECODED_MEMORY = "1 GiB"
#: Units that are brought and decoded at the same time where their files are objects: mostly they are waited for.
_OBJECTS_AT_ONCE = 16


class Turns:
    """Lets threads decode at the same time what fits into a number of bytes; what is larger, by itself."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes, self._used_bytes = capacity_bytes, 0
        #: Protects `_used_bytes`; notified when they become fewer.
        self._changed = threading.Condition()

    def fits(self, nbytes: int) -> bool:
        """Return whether so many more bytes may be decoded now."""
        return not self._used_bytes or self._used_bytes + nbytes <= self._capacity_bytes

    @contextlib.contextmanager
    def of(self, nbytes: int) -> Iterator[None]:
        """Wait until so many bytes fit, and keep them while the context is open."""
        with self._changed:
            self._changed.wait_for(lambda: self.fits(nbytes))
            self._used_bytes += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used_bytes -= nbytes
                self._changed.notify_all()


@dataclass
class _Unit:
    """A unit that is decoded. content: None until it is there. users: how many read from it."""

    nbytes: int
    users: int = 1
    content: Bytes | None = None


class DecodedUnits:
    """Units that are decoded when they are asked for, those used least recently forgotten where memory is short.

    Any thread may borrow any of them, one at a time: it waits while another decodes the same unit, and while those that
    are in use fill the memory.

    sizes_bytes: int64[units], of each once it is decoded. capacity_bytes: of all that are held, those in use included.
    at_once: how many are decoded at the same time, as each takes several times its size meanwhile; as many as there
        are cores unless given.
    """

    def __init__(self, sizes_bytes: Ids, capacity_bytes: int, at_once: int | None = None) -> None:
        self.sizes_bytes, self.capacity_bytes = sizes_bytes, capacity_bytes
        self._at_once = at_once or len(os.sched_getaffinity(0))
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        #: Protects all below; notified when a unit arrives, fails or is given back.
        self._changed = threading.Condition()
        #: By number, the one used last at the end.
        self._units: OrderedDict[int, _Unit] = OrderedDict()
        self._used_bytes = self._decoding = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodedUnits, (self.sizes_bytes, self.capacity_bytes)

    def __contains__(self, unit: int) -> bool:
        return unit in self._units

    @contextlib.contextmanager
    def lent(self, unit: int, decode: Callable[[int], Bytes]) -> Iterator[Bytes]:
        """Lend a unit while the context is open; `decode` is called where it is not here. Raises: what that raises."""
        if self._process != os.getpid():  # after a fork, another thread may have held the lock
            self._begin()
        entry, is_new = self._take(unit)
        try:
            content = self._arrived(entry, decode(unit)) if is_new else entry.content
            assert content is not None, "it is decoded, or being decoded by this thread"
            yield content
        finally:
            with self._changed:
                entry.users -= 1
                if is_new and entry.content is None:
                    self._decoding -= 1
                if entry.content is None and self._units.get(unit) is entry:  # it could not be decoded
                    self._forget(unit)
                self._changed.notify_all()

    @contextlib.contextmanager
    def present(self, units: Iterable[int]) -> Iterator[dict[int, Bytes]]:
        """Lend those of some units that are here while the context is open. Nothing is waited for in it."""
        if self._process != os.getpid():
            self._begin()
        found: dict[int, Bytes] = {}
        with self._changed:
            for unit in units:
                if unit not in found and (entry := self._units.get(unit)) and entry.content is not None:
                    entry.users += 1
                    self._units.move_to_end(unit)
                    found[unit] = entry.content
        try:
            yield found
        finally:
            with self._changed:
                for unit in found:
                    self._units[unit].users -= 1
                found.clear()  # what is forgotten from here on must not stay in memory
                self._changed.notify_all()

    def close(self) -> None:
        """Forget those that nobody reads."""
        with self._changed:
            self._make_space(self.capacity_bytes)

    def _take(self, unit: int) -> tuple[_Unit, bool]:
        """Borrow a unit; return it, and whether it is still to be decoded."""
        nbytes = int(self.sizes_bytes[unit])
        with self._changed:
            while True:
                entry = self._units.get(unit)
                if entry is not None and entry.content is not None:
                    entry.users += 1
                    self._units.move_to_end(unit)
                    return entry, False
                if entry is None and self._decoding < self._at_once and self._make_space(nbytes):
                    self._decoding += 1
                    entry = self._units[unit] = _Unit(nbytes)
                    self._used_bytes += nbytes
                    return entry, True
                self._changed.wait()

    def _arrived(self, entry: _Unit, content: Bytes) -> Bytes:
        with self._changed:
            entry.content = content
            self._decoding -= 1
            self._changed.notify_all()
        return content

    # Under the lock

    def _make_space(self, nbytes: int) -> bool:
        """Forget idle units until so many bytes are free, or nothing is held; return whether they are."""
        idle = (unit for unit, entry in list(self._units.items()) if not entry.users)
        while self._used_bytes + nbytes > self.capacity_bytes and (unit := next(idle, None)) is not None:
            self._forget(unit)
        return self._used_bytes + nbytes <= self.capacity_bytes or not self._units

    def _forget(self, unit: int) -> None:
        self._used_bytes -= self._units.pop(unit).nbytes


class DecodedFiles(PackedFiles):
    """Samples in units that are decoded as a whole; made to be used together with what lists them.

    `extents` names units, and where in them samples lie once they are decoded. Where `_units` is None, samples lie in
    files as they are, and are read so.
    """

    _units: DecodedUnits | None = None
    #: What units are called, for people.
    units_are = "units"

    #: By unit, which file it is in.
    _unit_files: Sequence[int] = ()

    @abstractmethod
    def _decode(self, unit: int, descriptor: int) -> Bytes:
        """Decode a unit of an open file that has not changed: uint8[...], of its size. Raises: DataError.

        descriptor: -1 for an object.
        """

    @abstractmethod
    def _unit_named(self, unit: int) -> str:
        """Return what a unit is called, behind its file."""

    def _decode_in(self, memory: str | int, sizes_bytes: Ids, files: Ids) -> None:
        """Begin to decode units of these sizes, in these files.

        memory: as the user gave it. Raises: ConfigError if it is too small.
        """
        self._unit_files = files.tolist()
        self._units = units = DecodedUnits(
            sizes_bytes, parse_bytes(memory), None if self.objects is None else _OBJECTS_AT_ONCE
        )
        largest = int(sizes_bytes.argmax())
        if sizes_bytes[largest] > units.capacity_bytes:
            path, size = self.files[self._unit_files[largest]], format_bytes(int(sizes_bytes[largest]))
            raise ConfigError(
                f"memory is {format_bytes(units.capacity_bytes)}, and {self._unit_named(largest)} of {path} has {size} "
                f"once it is decoded: give {type(self).__name__} more memory=, or write the file with smaller ones"
            )

    @property
    def decoded_units(self) -> DecodedUnits | None:
        """What is decoded; None where samples lie in files as they are."""
        return self._units

    def decoded_bytes_of(self, samples: Sequence[Ids]) -> int:
        """Return how many bytes are decoded if groups of samples are read one after the other, in this order."""
        if self._units is None:
            return 0
        kept, kept_bytes, decoded_bytes = OrderedDict[int, int](), 0, 0
        for group in samples:
            for unit in np.unique(self.extents(group)[0]).tolist():
                if unit not in kept:
                    kept[unit] = nbytes = int(self._units.sizes_bytes[unit])
                    decoded_bytes += nbytes
                    kept_bytes += nbytes
                    while kept_bytes > self._units.capacity_bytes:
                        kept_bytes -= kept.popitem(last=False)[1]
                kept.move_to_end(unit)
        return decoded_bytes

    def prepare_group(self) -> None:
        if self._units is None:
            super().prepare_group()
        else:
            READ_PIECES.ask()

    def read_into(self, sample: int, buffer: memoryview) -> int:
        if self._units is None:
            return super().read_into(sample, buffer)
        size = self._size_of(sample)
        target = np.frombuffer(front_of(buffer, size, self.describe(sample)), np.uint8)
        for _, error in self.read_group(np.array([sample]), target, np.array([0, size])):
            raise error
        return size

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        """Decode each unit of a group once; see `penstock.store.read_group`."""
        if self._units is None:
            return super().read_group(ids, into, begins)
        check_group(self, ids, into, begins)
        units, offsets, sizes = self.extents(ids)
        failed: dict[int, Exception] = {
            index: DataError(f"{self.describe(int(ids[index]))} is empty (0 bytes): take it out")
            for index in np.flatnonzero(sizes == 0).tolist()
        }
        listed = np.unique(units).tolist()
        # What is there is read before others take its place.
        with self._units.present(listed) as contents:
            changed, here = self._changed(contents), set(contents)
            intact = {unit: each for unit, each in contents.items() if self._unit_files[unit] not in changed}
            copy_pieces(intact, units, offsets, sizes, into, begins[:-1])
            done = set(intact)
            del intact  # what is forgotten from here on must not stay in memory
        for unit in [each for each in listed if each not in done]:
            which = np.flatnonzero(units == unit)
            if unit in here:
                failed |= dict.fromkeys(which.tolist(), changed[self._unit_files[unit]])
                continue
            try:
                with self._lent(unit, int(ids[which[0]])) as content:
                    copy_pieces(
                        {unit: content}, units[which], offsets[which], sizes[which], into, begins[which]
                    )
                del content  # while another unit is waited for, this one may have to go
            except Exception as error:
                failed |= dict.fromkeys(which.tolist(), error)
        if len(done) == len(listed):
            note_mapped()
        return sorted(failed.items())

    def _changed(self, units: Iterable[int]) -> dict[int, Exception]:
        """Return what is wrong with the files of some units, by file, where one is not as it was."""
        found: dict[int, Exception] = {}
        if self.objects is not None:  # whose stamp each request compares
            return found
        for file in {self._unit_files[unit] for unit in units}:
            try:
                with self._open.lent(file):
                    pass
            except DataError as error:
                found[file] = error
        return found

    def unit_bytes(self, units: Ids) -> Ids:
        if self._units is None:
            return super().unit_bytes(units)
        known = self._units.sizes_bytes
        is_there = (units >= 0) & (units < known.size)
        return np.where(is_there, known[np.where(is_there, units, 0)], -1)

    def read_ranges(self, unit: int, ranges: Ids, into: Sequence[memoryview]) -> None:
        if self._units is None:
            super().read_ranges(unit, ranges, into)
            return
        with self._lent(unit, None) as content:
            for (begin, end), buffer in zip(ranges.tolist(), into, strict=True):
                np.frombuffer(buffer.cast("B"), np.uint8)[:] = content[begin:end]

    def close(self) -> None:
        super().close()
        if self._units is not None:
            self._units.close()

    @property
    def _decoded(self) -> DecodedUnits:
        assert self._units is not None, "samples lie in files as they are"
        return self._units

    @contextlib.contextmanager
    def _lent(self, unit: int, sample: int | None) -> Iterator[Bytes]:
        """Lend a decoded unit whose file is as it was. sample: one of it, which errors name."""
        file = self._unit_files[unit]
        if sample is not None and (at := observer()) is not None:
            at(sample)

        def decode(unit: int) -> Bytes:
            if self.objects is not None:
                content = self._decode(unit, -1)
            else:
                with self._open.lent(file) as descriptor:
                    content = self._decode(unit, descriptor)
            if content.size != self._decoded.sizes_bytes[unit]:
                raise DataError(
                    f"{self.files[file]}: {self._unit_named(unit)} has {content.size:,} bytes and had "
                    f"{self._decoded.sizes_bytes[unit]:,} when it was listed: open the data set again"
                )
            return content

        for error in self._changed([unit]).values():
            raise error
        with self._decoded.lent(unit, decode) as content:
            yield content
