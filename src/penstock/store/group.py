"""Reading a group of samples into one array, by a source that does so in one call or by any other.

Decided in docs/decisions/0018-bytes-by-the-group.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.source import Source
from penstock.units import is_integer

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Failed = list[tuple[int, Exception]]

#: Of each thread that reads a group: `at`, to be called with a sample before it is read by itself; and whether all of
#: the group was copied from memory or mapped files.
_thread = threading.local()


def front_of(buffer: memoryview, size: int, name: str) -> memoryview:
    """Return the first bytes of a buffer, where a sample goes. Raises: ConfigError if they are too few."""
    target = buffer.cast("B")
    if len(target) < size:
        raise ConfigError(
            f"a buffer of {len(target):,} bytes cannot hold {name} ({size:,} bytes): make it larger"
        )
    return target[:size]


def read_group(
    source: Source, ids: Ids, into: Bytes | memoryview, begins: Ids, at: Callable[[int], None] | None = None
) -> Failed:
    """Read samples into one array; return those that failed, ascending: index in the group and error of each.

    The others are complete. A source that has a method `read_group(ids, into, begins)` does it in one call, as sources
    of files do without the interpreter's lock; of any other each sample is read by `read_into`, or by `read` where it
    has nothing else.

    ids: int64[n]; a sample may be among them more than once.
    into: uint8[...], contiguous, writable. begins: int64[n + 1], ascending. Sample k goes to the front of
        into[begins[k]:begins[k + 1]]; of one that failed, what is there is undefined.
    at: called with each sample that is read by itself, and so may take long, before it is.
    Raises: TypeError for arrays of another dtype or shape; IndexError if there is no such sample; ConfigError if a
        sample does not fit its place. Then nothing was read.
    """
    array = np.asarray(into)
    if not array.flags.writeable:
        raise TypeError("into is read-only: samples are written there")
    one_call: Any = getattr(source, "read_group", None)
    _thread.at, _thread.was_mapped = at, False
    try:
        if one_call is None:
            return read_one_by_one(source, ids, array, begins)
        failed: Failed = one_call(ids, array, begins)
        return failed
    finally:
        _thread.at = None


def prepare_group(source: Source) -> None:
    """Load the code that `read_group` runs, if it is compiled. The first call takes 0.05 s, which no read should."""
    prepare: Any = getattr(source, "prepare_group", None)
    if prepare is not None:
        prepare()


def observer() -> Callable[[int], None] | None:
    """Return the `at` of the group that this thread reads, for a source that hands the group on to another one."""
    at: Callable[[int], None] | None = getattr(_thread, "at", None)
    return at


def note_mapped() -> None:
    """Take note, for a source, that it copied all of the group that this thread reads from memory or mapped files."""
    _thread.was_mapped = True


def was_mapped() -> bool:
    """Return whether the group that this thread read last was copied from memory or mapped files, all of it."""
    return bool(_thread.was_mapped)


def read_one_by_one(
    source: Source, ids: Ids, into: Bytes, begins: Ids, which: Iterable[int] | None = None
) -> Failed:
    """Read samples of a group one after the other; as `read_group`. which: indices in the group; None: all."""
    check_group(source, ids, into, begins)
    buffer, sizes, failed = into.data, source.sizes_bytes, Failed()
    at = observer()
    for index in range(ids.size) if which is None else which:
        sample = int(ids[index])
        begin, size = int(begins[index]), int(sizes[sample])
        if at is not None:
            at(sample)
        try:
            _read(source, sample, buffer[begin : begin + size])
        except Exception as error:
            failed.append((index, error))
    return failed


def _read(source: Source, sample: int, buffer: memoryview) -> None:
    if hasattr(source, "read_into"):
        found = source.read_into(sample, buffer)
    else:
        data = memoryview(source.read(sample)).cast("B")
        found = len(data)
        if found == len(buffer):
            buffer[:] = data
    if found != len(buffer):
        if not is_integer(found):
            raise DataError(
                f"{source.describe(sample)}: read_into returned {found!r}, no number of bytes: correct the source"
            )
        raise DataError(
            f"{source.describe(sample)}: has {found:,} bytes where the source's sizes_bytes says {len(buffer):,}: "
            f"correct the source"
        )


def check_kinds(ids: Ids, into: Bytes, begins: Ids) -> None:
    """Raise TypeError for arrays of another dtype or shape than `read_group` takes."""
    for name, array, dtype in (
        ("ids", ids, np.int64),
        ("into", into, np.uint8),
        ("begins", begins, np.int64),
    ):
        if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
            raise TypeError(f"expected {name} of dtype {np.dtype(dtype)}, contiguous, of one dimension")
    if begins.size != ids.size + 1:
        raise TypeError(f"begins has {begins.size} items; for {ids.size} samples it has one more than these")


def check_group(source: Source, ids: Ids, into: Bytes, begins: Ids) -> None:
    """Raise what `read_group` raises."""
    check_kinds(ids, into, begins)
    if ids.size == 0:
        return
    if ids.min() < 0 or ids.max() >= len(source):
        raise IndexError(f"there is no sample {ids[(ids < 0) | (ids >= len(source))][0]}: {source!r}")
    begin, end = begins[:-1], begins[1:]
    # No size is negative: where all are inside and each has space enough, they ascend.
    is_inside = begins.min() >= 0 and begins.max() <= into.size
    has_space = end - begin >= source.sizes_bytes[ids]
    if not is_inside or not has_space.all():
        index = int(((begin < 0) | (end < begin) | (end > into.size) | ~has_space).argmax())
        raise ConfigError(
            f"into[{begins[index]}:{begins[index + 1]}] of {into.size:,} bytes cannot hold "
            f"{source.describe(int(ids[index]))} ({source.sizes_bytes[ids[index]]:,} bytes): make it larger"
        )
