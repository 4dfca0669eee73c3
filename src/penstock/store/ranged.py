"""Reading several samples of one file, chunk or shard at once, from a source that says where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.policy.merge import Extents, MergedRead, MergedReads
from penstock.store.group import Bytes, Failed, Ids, check_group, read_group
from penstock.store.source import Source


class RangedSource(Source, Protocol):
    """A source whose samples lie in units (files, chunks, shards), and which reads ranges of them.

    A source that wraps another returns None from `extents` where that one does not know.
    """

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids] | None:
        """Return unit, offset and length of each sample: int64[n] each; always the same for a sample.

        The length is the sample's size: what lies there is the sample as `read` returns it.
        """
        ...

    def unit_bytes(self, units: Ids) -> Ids:
        """Return the size of each unit: int64[n]; -1 for one that there is not."""
        ...

    def read_ranges(self, unit: int, ranges: Ids, into: Sequence[memoryview]) -> None:
        """Read ranges of a unit, one request each.

        ranges: int64[r, 2], begin and end. into: r writable buffers of exactly their sizes.
        Raises: DataError naming the unit's file, or what it is, if not all of that is there.
        """
        ...


def extents_of(source: Source, ids: Ids) -> tuple[Extents, Failed] | None:
    """Return where samples lie; None if the source does not tell.

    ids: int64[n], samples that exist.
    Returns: the extents; and those that cannot be, ascending: index and a DataError that names sample, unit and offset.
        Their unit is -1.
    Raises: ConfigError if the source answers with other than three arrays int64[n], or lacks `unit_bytes` or
        `read_ranges`; what its own code raises, with a note.
    """
    ask: Any = getattr(source, "extents", None)
    answer = None if ask is None else _asked(source, "extents", ids)
    if answer is None:
        return None
    try:
        arrays = [np.array(array) for array in answer]
    except TypeError:  # a single number
        arrays = [np.array(answer)]
    if len(arrays) != 3 or any(array.dtype != np.int64 or array.shape != ids.shape for array in arrays):
        found = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        raise ConfigError(
            f"{source!r}: extents() of {ids.size} samples must be three arrays int64[{ids.size}], not {found}"
        )
    lacking = [name for name in ("unit_bytes", "read_ranges") if not callable(getattr(source, name, None))]
    if lacking:
        raise ConfigError(
            f"{source!r} says where samples are and has no {' and no '.join(lacking)}: give it those of "
            "penstock.store.RangedSource, or leave extents out"
        )
    units, offsets, lengths = arrays
    sizes = source.sizes_bytes[ids]
    is_negative = (units < 0) | (offsets < 0) | (lengths < 0)
    space = np.array(_asked(source, "unit_bytes", np.where(is_negative, 0, units)))
    if space.dtype != np.int64 or space.shape != ids.shape:
        raise ConfigError(
            f"{source!r}: unit_bytes() of {ids.size} units must be int64[{ids.size}], not "
            f"{space.dtype}{list(space.shape)}"
        )
    rules: list[tuple[NDArray[np.bool_], Callable[[int], str]]] = [
        (is_negative, lambda k: "unit, offset and length cannot be negative"),
        # Compared so that nothing overflows.
        (
            offsets > space - lengths,
            lambda k: "there is no such unit" if space[k] < 0 else f"the unit ends at {space[k]:,}",
        ),
        (lengths != sizes, lambda k: f"the sample has {sizes[k]:,} bytes by the source's sizes_bytes"),
    ]
    failed, extents = dict[int, Exception](), Extents(units, offsets, lengths)
    for is_wrong, rule in rules:
        for index in np.flatnonzero(is_wrong).tolist():
            failed.setdefault(index, _wrong(source, ids, extents, index, rule(index)))
    extents.units[list(failed)] = -1
    return extents, sorted(failed.items())


def _asked(source: Source, method: str, of: Ids) -> Any:
    try:
        return getattr(source, method)(of)
    except Exception as error:
        error.add_note(f"while asking {source!r} for {method} of {of.size} numbers")
        raise


def read_merged(source: Source, read: MergedRead, ids: Ids, into: Bytes, begins: Ids) -> Failed:
    """Perform one read of `merge_reads`; return those of its samples that failed, as `read_group` does.

    ids: int64[m], the samples of `read.which`. into, begins: as in `read_group`.

    It is one request, into the samples' places where these follow each other as the samples do, else through a buffer.
    If it fails, each sample is read by itself, so that none fails because of another.
    Raises: as `read_group`; ConfigError if the source does not tell any more where its samples lie.
    """
    check_group(source, ids, into, begins)
    return _read_merged(source, read, ids, into, begins, *_extents_now(source, ids))


def _extents_now(source: Source, ids: Ids) -> tuple[Extents, dict[int, Exception]]:
    found = extents_of(source, ids)
    if found is None:
        raise ConfigError(
            f"{source!r} does not tell any more where its samples lie: it did when reads were planned"
        )
    return found[0], dict(found[1])


def _read_merged(
    source: Source,
    read: MergedRead,
    ids: Ids,
    into: Bytes,
    begins: Ids,
    now: Extents,
    failed: dict[int, Exception],
    at: Callable[[int], None] | None = None,
) -> Failed:
    """See `read_merged`. now, failed: of `ids`, as `extents_of` answers at this time. at: as in `read_all_merged`."""
    planned, errors = read.extents, failed
    has_moved = (now.units != planned.units) | (now.offsets != planned.offsets)
    for index in np.flatnonzero(has_moved).tolist():
        before = f"before it said unit {planned.units[index]}, offset {planned.offsets[index]:,}"
        errors.setdefault(index, _wrong(source, ids, now, index, before))
    places = [
        into.data[begin : begin + length]
        for begin, length in zip(begins[:-1].tolist(), planned.lengths.tolist(), strict=True)
    ]
    if not errors:
        if at is not None:
            at(int(ids[0]))
        try:
            _read_at_once(source, read, into, begins, places)
        except Exception as error:
            if ids.size == 1:
                return [(0, error)]
        else:
            return []
    for index, offset in enumerate(planned.offsets.tolist()):
        if index not in errors:
            if at is not None:
                at(int(ids[index]))
            try:
                _read_range(source, read.unit, offset, places[index])
            except Exception as error:
                errors[index] = error
    return sorted(errors.items())


def is_decoded(source: object) -> bool:
    """Return whether samples are in units that a source, or the one that it is a selection of, decodes as a whole."""
    whole = getattr(source, "source", source)
    return getattr(whole, "decoded_units", None) is not None


def read_all_merged(
    source: Source,
    reads: MergedReads,
    ids: Ids,
    into: Bytes | memoryview,
    begins: Ids,
    at: Callable[[int], None] | None = None,
) -> Failed:
    """Read a group of samples by the reads that `merge_reads` made of it; return those that failed, as `read_group`.

    ids: int64[n], in the order of `reads.which`; behind them those that are in no read. into, begins: as in
        `read_group`. Samples that lie side by side in the source and here take no other memory.
    at: called before each read, with its first sample; see `read_group` for those of one sample.
    Raises: as `read_merged`.
    """
    array = np.asarray(into)
    is_alone = reads.lasts - reads.firsts == 1
    # Nothing is gained by a range there, and a source may read all of them in one call.
    alone = np.sort(reads.firsts[is_alone])
    failed = _read_some(source, alone, ids, array, begins, at)
    if not is_alone.all():
        # Asked once for all reads: each question takes as long as a read of some samples.
        check_group(source, ids, array, begins)
        now, wrong_now = _extents_now(source, ids[: reads.which.size])
    done = _read_together(source, reads, ~is_alone, ids, array, begins, at)
    for index in np.flatnonzero(~is_alone).tolist():
        if index in done:
            continue
        read, first = reads[index], int(reads.firsts[index])
        last = first + read.which.size
        known = {each - first: error for each, error in wrong_now.items() if first <= each < last}
        part = slice(first, last)
        errors = _read_merged(
            source, read, ids[part], array, begins[first : last + 1], now.of(part), known, at
        )
        failed += [(first + each, error) for each, error in errors]
    unknown = np.arange(reads.which.size, ids.size)
    if unknown.size:
        found = extents_of(source, ids[unknown])
        wrong = [] if found is None else [(reads.which.size + each, error) for each, error in found[1]]
        failed += wrong
        # The source may have answered wrongly about these when reads were planned, and rightly now.
        failed += _read_some(
            source, np.setdiff1d(unknown, [each for each, _ in wrong]), ids, array, begins, at
        )
    return sorted(failed, key=lambda each: each[0])


def _read_together(
    source: Source,
    reads: MergedReads,
    which: NDArray[np.bool_],
    ids: Ids,
    into: Bytes,
    begins: Ids,
    at: Callable[[int], None] | None,
) -> set[int]:
    """Perform some reads all at once, where the source is of a remote store; return those that succeeded.

    The others are left to whoever reads one after the other, and says what is wrong with which sample.
    """
    whole = getattr(source, "source", source)  # a selection's units are those of its source
    read_pieces: Any = getattr(whole, "read_pieces", None)
    if (
        read_pieces is None
        or getattr(whole, "objects", None) is None
        or is_decoded(source)
        or which.sum() < 2
    ):
        return set()
    numbers = np.flatnonzero(which)
    if at is not None:
        at(int(ids[reads.firsts[numbers[0]]]))
    buffers = [np.empty(reads[index].nbytes, np.uint8) for index in numbers.tolist()]
    failed = read_pieces(reads.units[numbers], reads.begins[numbers], [each.data for each in buffers])
    wrong = {index for index, _ in failed}
    done = set()
    for position, index in enumerate(numbers.tolist()):
        if position in wrong:
            continue
        first, read = int(reads.firsts[index]), reads[index]
        offsets, lengths = (read.extents.offsets - read.begin).tolist(), read.extents.lengths.tolist()
        for begin, offset, length in zip(begins[first:].tolist(), offsets, lengths, strict=False):
            into[begin : begin + length] = buffers[position][offset : offset + length]
        done.add(index)
    return done


def _read_some(
    source: Source, which: Ids, ids: Ids, into: Bytes, begins: Ids, at: Callable[[int], None] | None
) -> Failed:
    """Read some samples of a group by themselves. which: ascending."""
    if not which.size:
        return []
    if at is not None:
        at(int(ids[which[0]]))  # a source may read all of them in one call
    places = np.append(begins[which], begins[which[-1] + 1])
    return [(int(which[each]), error) for each, error in read_group(source, ids[which], into, places, at)]


def _read_at_once(
    source: Source, read: MergedRead, into: Bytes, begins: Ids, places: list[memoryview]
) -> None:
    offsets = read.extents.offsets - read.begin
    is_in_place = (begins[:-1] - begins[0] == offsets).all() and read.nbytes == int(
        read.extents.lengths.sum()
    )
    if is_in_place:
        begin = int(begins[0])
        _read_range(source, read.unit, read.begin, into.data[begin : begin + read.nbytes])
        return
    scratch = np.empty(read.nbytes, np.uint8).data
    _read_range(source, read.unit, read.begin, scratch)
    for offset, place in zip(offsets.tolist(), places, strict=True):
        place[:] = scratch[offset : offset + len(place)]


def _read_range(source: Any, unit: int, begin: int, into: memoryview) -> None:
    if len(into):
        source.read_ranges(unit, np.array([[begin, begin + len(into)]]), [into])


def _wrong(source: Source, ids: Ids, extents: Extents, index: int, rule: str) -> DataError:
    unit, offset = int(extents.units[index]), int(extents.offsets[index])
    return DataError(
        f"{source.describe(int(ids[index]))}: the source says unit {unit}, offset {offset:,}, "
        f"{extents.lengths[index]:,} bytes, but {rule}: correct the source, or open it again"
    )
