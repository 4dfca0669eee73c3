"""Data sets in TFRecord files of `tf.train.Example`, read at random."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.compiling import Part
from penstock.errors import ConfigError, DataError
from penstock.store import examples
from penstock.store.catalog import Catalog
from penstock.store.columns import AUTO_LABEL, ColumnLabel, check_label
from penstock.store.labels import check_names
from penstock.store.listing import SHARD_NUMBERS, Asking, ListingArguments
from penstock.store.packed_listing import (
    CataloguedFiles,
    FoundLabels,
    Indexed,
    Look,
    Opened,
    ends_in,
    files_alone,
    files_alone_in,
    index_files,
    opened,
)
from penstock.store.patterns import Paths, files_of, is_of_several, place_of_paths
from penstock.store.remote import Objects, RemoteFile
from penstock.store.windows import readable

INDEX_EXAMPLES = Part(
    "penstock.store._examples_kernels",
    "index_examples",
    examples.SIGNATURE,
    "how TFRecord files are indexed",
    "Python does it, more slowly,",
)

#: What features are usually called, the first that there is.
_USUAL_SAMPLES = ("image/encoded", "image", "image_raw", "jpg", "jpeg", "png")
_USUAL_LABELS = ("image/class/label", "label", "class", "cls")

#: How the names of TFRecord files end, where they tell.
RECORD_ENDINGS = (".tfrecord", ".tfrecords")

_WINDOW_BYTES = 4096
_AT_ONCE = 4096
_MOST_LABEL_BYTES = 1 << 16
#: Records of the first file that are looked at for a label.
_FIRST_RECORDS = 4


class TFRecords(CataloguedFiles):
    """TFRecord files, of which each record is a `tf.train.Example` with the sample as a feature of bytes.

    Samples are numbered as they lie in the files. TensorFlow is not needed.

    files: a path, a pattern such as "train-*-of-00128" or "train-{000..127}.tfrecord", a folder whose .tfrecord files
        are one set, or a list of these.
    sample: the feature that is the sample, such as "image/encoded". Unless given, the first that the first record has
        of image/encoded, image, image_raw, jpg, jpeg and png, or its only feature of bytes.
    label: the feature that is the label, an integer, a name, or numbers, as many in each record; "auto" is the first
        that one of the first four records has of image/class/label, label, class and cls, or no label; None takes none;
        a list of features gives several, by name. Names are numbered as they sort.
    classes: the names of labels in the order of their numbers, such as those of the training's source; an error for
        others. Sorted by name unless given.
    refresh, calls, catalog, storage_options: as in `open_source`. A file that did not change is not indexed again.

    Raises: DataError naming the file if it is missing, empty, compressed, damaged or cut off; naming the record that is
        no example, or has no such feature. ConfigError if the first record does not tell which feature is the sample.
    """

    def __init__(
        self,
        files: Paths,
        *,
        sample: str | None = None,
        label: ColumnLabel = AUTO_LABEL,
        classes: Sequence[str] | None = None,
        **listing: Unpack[ListingArguments],
    ) -> None:
        place = place_of_paths(files)
        check_names(sample=sample)
        check_label(label)
        list_anew = partial(list_records, place, sample, label)
        super().__init__(place, list_anew, listing, sample=sample, label=label, classes=classes)


def are_records(place: str, objects: Objects | None, look: Look) -> bool:
    """Return whether the first file of a place, of `place_of_paths`, is called or begins as a TFRecord file is.

    It may be a folder of some that are called so. objects: what reads addresses. look: what lists a folder.
    """
    if not is_of_several(place) and files_alone_in(place, RECORD_ENDINGS, look):
        return True
    try:
        path = files_of(place, objects)[0]
        if objects is not None:
            facts = objects.find(path)
            size = examples.FRAME_BYTES
            return facts is not None and _is_frame(RemoteFile(objects, facts).pread(size, 0))
        if path.lower().endswith(RECORD_ENDINGS) and os.path.isfile(path):
            return True
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, DataError):  # whoever opens it says what is wrong
        return False
    try:
        return _is_frame(os.pread(descriptor, examples.FRAME_BYTES, 0))
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _is_frame(front: bytes) -> bool:
    at = [0] * examples.NUMBERS
    at[examples.WINDOW_END] = len(front)
    is_whole = len(front) == examples.FRAME_BYTES
    return is_whole and examples.masked_crc32c(front, at, 0, 8) == examples.little(front, at, 8, 4)


def _files_of(place: str, objects: Objects | None) -> tuple[str, ...]:
    """Return the files at a place, of `place_of_paths`. Raises: ConfigError for a folder with several sets."""
    files = files_of(place, objects)
    # The name tells that an address is a file: a web server sends all of it as its list.
    is_object = objects is not None and (ends_in(place, RECORD_ENDINGS) or SHARD_NUMBERS.search(place))
    if is_of_several(place) or is_object:
        return files
    found = files_alone_in(place, RECORD_ENDINGS, partial(files_alone, objects=objects))
    if len(sets := sorted({SHARD_NUMBERS.sub("", path) for path in found if SHARD_NUMBERS.search(path)})) > 1:
        names = ", ".join(map(os.path.basename, sets))
        raise ConfigError(
            f"{place} has several sets of TFRecord files, such as training and test ({names}): give one, as in "
            f"penstock.store.TFRecords('{sets[-1]}-*')"
        )
    return tuple(found) or files


def list_records(place: str, sample: str | None, label: ColumnLabel, asking: Asking) -> Catalog:
    """Index TFRecord files; see `TFRecords`. Of those that did not change, what an old catalog says is taken."""
    files = asking.calls.one(place, lambda: _files_of(place, asking.objects))
    names = asking.calls.one(files[0], partial(_names, files[0], sample, label, asking.objects))
    index = partial(_index, names, asking)
    return index_files(asking, files, index, kind="TFRecords", label=", ".join(names.labels))


class _Names(NamedTuple):
    """What the features are called. has_one: whether there is one label, which needs no name."""

    sample: str
    labels: tuple[str, ...]
    has_one: bool


def _names(path: str, sample: str | None, label: ColumnLabel, objects: Objects | None) -> _Names:
    """Return which features are meant, by the first record of a file."""
    if sample is not None and label != AUTO_LABEL:
        return _named(sample, label)
    with opened(path, objects) as file:
        kinds, *others = (dict(features) for features in _features(file))
    if label == AUTO_LABEL:
        names = kinds.keys() | set().union(*others)  # a record may lack the label, which is an error
        label = next((name for name in _USUAL_LABELS if name in names and name != sample), None)
    if sample is None:
        labels = _named("", label).labels
        of_bytes = [name for name, kind in kinds.items() if kind == examples.BYTES and name not in labels]
        usual = [name for name in _USUAL_SAMPLES if name in of_bytes] or of_bytes
        if not usual or (len(usual) > 1 and usual[0] not in _USUAL_SAMPLES):
            has = ", ".join(sorted(kinds)) or "none"
            raise ConfigError(
                f"{path}: the first record does not tell which feature is the sample: it has {has}; give sample= to "
                "penstock.store.TFRecords, the name of one of bytes"
            )
        sample = usual[0]
    return _named(sample, label)


def _named(sample: str, label: ColumnLabel) -> _Names:
    has_one = isinstance(label, str)
    return _Names(sample, (label,) if isinstance(label, str) else tuple(label or ()), has_one)


class _Reader:
    """Reads records of an open file, a few thousand at a time. sample, label: features that are looked for, or ""."""

    def __init__(self, file: Opened, sample: str, label: str) -> None:
        self._file, self._names = file, [_bytes_of(sample), _bytes_of(label)]
        self._window = np.empty(_WINDOW_BYTES, np.uint8)
        self._numbers = np.zeros(examples.NUMBERS, np.int64)
        if file.file_bytes == 0:
            raise DataError(f"{file.path} is empty (0 bytes): remove it or write it again")

    @property
    def is_at_end(self) -> bool:
        return bool(self._numbers[examples.PLACE] >= self._file.file_bytes)

    def read(self, most: int) -> NDArray[np.int64]:
        """Return what `examples.index_examples` finds of the next records: int64[n, COLUMNS]."""
        rows = np.zeros((most, examples.COLUMNS), np.int64)
        arrays: list[Any] = [*self._names, self._window, rows, self._numbers]
        # Compiled code reads what has a descriptor.
        loop = None if self._file.remote is not None else INDEX_EXAMPLES.ask()
        if loop is None:
            views = [memoryview(array) for array in arrays]
            with readable(self._file.pread if self._file.remote is not None else None) as descriptor:
                number = self._file.descriptor if descriptor is None else descriptor
                count = examples.index_examples(number, self._file.file_bytes, *views)
        else:
            count = loop(self._file.descriptor, self._file.file_bytes, *arrays)
        if count < 0:
            raise self._wrong(count)
        return rows[:count]

    def _wrong(self, count: int) -> DataError:
        path, at = self._file.path, int(self._numbers[examples.PLACE])
        try:
            front = self._file.pread(2, at)
        except OSError as error:
            return DataError(f"{path} cannot be read: {error.strerror}")
        if at == 0 and front in (b"\x1f\x8b", b"x\x9c"):
            return DataError(
                f"{path} is compressed, so that no record can be read without all before it: write it with "
                'compression_type=""; pictures are compressed themselves'
            )
        why = {
            examples.CUT_OFF: f"is cut off: a record begins at byte {at:,} that does not end",
            examples.NO_FRAME: f"is damaged, or no TFRecord: at byte {at:,} begins no record",
            examples.NO_EXAMPLE: f"has a record at byte {at:,} that is no tf.train.Example",
        }[count]
        return DataError(f"{path} {why}: write it again, or take it out")


def _index(names: _Names, asking: Asking, file: Opened) -> Indexed:
    by_name = dict[str, Any]()
    for label in names.labels or ("",):  # one after the other, which reads little of the file each time
        reader, parts = _Reader(file, names.sample, label), list[NDArray[np.int64]]()
        while not reader.is_at_end:
            parts.append(reader.read(_AT_ONCE))
            if not by_name:
                asking.found(file.path, len(parts[-1]))
        rows = np.concatenate(parts)
        if label:
            by_name["" if names.has_one else label] = _labels(file, label, rows)
    if (wrong := np.flatnonzero(rows[:, examples.SIZE] < 0)).size:
        raise DataError(
            f"{file.path}: record {wrong[0]} has no feature {names.sample!r} with one string of bytes: give the "
            "right sample= to penstock.store.TFRecords, or take the record out"
        )
    return Indexed(
        file,
        [b"record %d" % number for number in range(len(rows))],
        rows[:, examples.BEGIN].copy(),
        rows[:, examples.SIZE].copy(),
        _classes_or_all(by_name),
    )


def _classes_or_all(by_name: dict[str, Any]) -> FoundLabels:
    """Return what `Indexed` has: a list where there is one label and each sample has a class."""
    return by_name[""] if isinstance(by_name.get(""), list) else by_name or None


def _labels(file: Opened, name: str, rows: NDArray[np.int64]) -> list[str | int] | NDArray[Any]:
    """Return a list of integers and names, or an array where each record has as many numbers.

    Raises: DataError naming the record that has none, or others than the first.
    """
    kinds, first = rows[:, examples.LABEL_KIND], int(rows[0, examples.LABEL_KIND])
    of_numbers = first in (examples.FLOATS, examples.SEVERAL)
    is_text = kinds == examples.BYTES
    wrong = kinds != first if of_numbers else (kinds != examples.INTEGERS) & ~is_text
    wrong |= (kinds != examples.INTEGERS) & (rows[:, examples.LABEL_SIZE] > _MOST_LABEL_BYTES)
    if wrong.any():
        record = int(wrong.argmax())
        what = (
            "several values as its" if kinds[record] in (examples.SEVERAL, examples.SEVERAL_TEXTS) else "no"
        )
        like = ", as the first record has" if of_numbers else ""
        raise DataError(
            f"{file.path}: record {record} has {what} label {name!r}, an integer, a name, or as many numbers in each "
            f"record{like}: give the right label= to penstock.store.TFRecords, None for no labels"
        )
    labels: list[Any] = rows[:, examples.LABEL].tolist()
    for number in np.flatnonzero(kinds != examples.INTEGERS).tolist():
        begin, size = rows[number, examples.LABEL : examples.LABEL_SIZE + 1].tolist()
        try:
            content = file.pread(size, begin)
            labels[number] = examples.numbers_of(content, first) if of_numbers else content.decode("utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            what = "of numbers" if of_numbers else "text in UTF-8"
            raise DataError(
                f"{file.path}: label {name!r} of record {number} is no {what} that can be read ({error})"
            ) from error
        if of_numbers and len(labels[number]) != len(labels[0]):
            raise DataError(
                f"{file.path}: record {number} has {len(labels[number]):,} numbers as its label {name!r}, and the "
                f"first {len(labels[0]):,}: write as many in each, or give another label="
            )
    if not of_numbers:
        return labels
    found = np.array(labels, np.float32 if first == examples.FLOATS else np.int64)
    return found[:, 0] if found.shape[1] == 1 else found


def _bytes_of(name: str) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray(name.encode()), np.uint8)


def _features(file: Opened) -> Iterator[list[tuple[str, int]]]:
    """Yield name and kind of each feature of a file's first records."""
    number = len(_Reader(file, "", "").read(_FIRST_RECORDS))  # raises what is wrong with one
    with readable(file.pread if file.remote is not None else None) as descriptor:
        window, at = memoryview(bytearray(_WINDOW_BYTES)), [0] * examples.NUMBERS
        at[examples.DESCRIPTOR], begin = file.descriptor if descriptor is None else descriptor, 0
        for _ in range(number):
            at[examples.PLACE] = begin + examples.FRAME_BYTES
            end = at[examples.PLACE] + examples.little(window, at, begin, 8)
            yield list(_features_of(window, at, end))
            begin = end + examples.CHECKSUM_BYTES


def _features_of(window: memoryview, at: list[int], end: int) -> Iterator[tuple[str, int]]:

    def fields(end: int) -> Iterator[tuple[int, int]]:
        """Yield number and end of each field from here on."""
        while at[examples.PLACE] < end and examples.next_field(window, at, end):
            field_end = at[examples.CONTENT_END]
            yield at[examples.FIELD], field_end
            at[examples.PLACE] = field_end

    for features, features_end in fields(end):
        for entry, entry_end in fields(features_end) if features == 1 else ():
            name, kind = b"", examples.NO_LABEL
            for number, field_end in fields(entry_end) if entry == 1 else ():
                if number == 1:
                    places = range(at[examples.PLACE], min(field_end, at[examples.PLACE] + _WINDOW_BYTES))
                    name = bytes(examples.byte_at(window, at, place) for place in places)
                elif number == 2:
                    kind = next((list_kind for list_kind, _ in fields(field_end)), kind)
            yield name.decode("utf-8", "replace"), kind
