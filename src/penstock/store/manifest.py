"""Tables that name the file of each sample, and say more of it: CSV, files with tabs, JSON lines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.files import FileSource
from penstock.store.labels import Labels, check_classes
from penstock.store.listing import (
    IMAGE_EXTENSIONS,
    MOST_CLASSES,
    NO_LABEL,
    ListedFiles,
    ListingArguments,
    catalog_of,
    check_stores,
    list_files,
    number_labels,
)
from penstock.store.object_store import is_address
from penstock.store.patterns import place_of_paths
from penstock.store.remote import Objects
from penstock.store.text_rows import JSON_ADVICE, JSON_LINES, Records, read_records, read_rows
from penstock.units import is_integer

#: What columns of files and of labels are called, the usual first.
FILE_COLUMNS = (
    "file_name", "filename", "file", "path", "filepath", "file_path", "image", "image_path", "image_file",
    "img", "image_id", "id",
)  # fmt: skip
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "category", "target")
#: Columns that are labels: one, several by their names, or by names of yours, of which one may join several columns.
Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
#: The classes in their order: of the label, or of labels by name.
Classes = Sequence[str] | Mapping[str, Sequence[str]] | None

_MOST_TAGS_BYTES = 1 << 30
_EXACT_IN_FLOAT32 = 1 << 24
#: What to do with lines that name no files.
_LINES_ADVICE = "open lines of JSON that are samples themselves by penstock.store.JsonLines(path)"


class Manifest(FileSource):
    """The files that a table lists, in its order, and their labels: a CSV file with a heading, one with tabs, or JSON
    lines (.jsonl, .ndjson).

        file_name,label         {"file_name": "0.jpg", "age": 31.5, "tags": ["cat", "dog"]}
        0.jpg,cat               {"file_name": "1.jpg", "age": 20.0, "tags": []}

    manifest: the table, in UTF-8, or its address. Paths in it are relative to its own folder, absolute, or addresses.
    file: the column of the paths; one of the usual names (`file_name`, `path`, `image` ...) unless given.
    labels: "auto" takes a column that is called `label`, `class`, `category` or `target`, if there is one; a name takes
        that column, a list several, by name; a mapping gives them names, and joins a list of columns of numbers to one
        array, {"target": ["x", "y"]}; None takes none. `a.b` is field b within field a, in JSON.
    classes: of a label that is text, in the order of their numbers, such as those of the training's source; of several,
        by name. Sorted by name unless given.
    folder: where the files are, if not in the table's folder. ending: put behind each path, such as ".jpg".
    refresh, calls, catalog, storage_options: as in `penstock.open_source`.

    Integers become int64, other numbers float32, or float64 where an integer among them would change; text is numbered
    (see `classes`, and `label_classes` of several); lists of numbers become arrays, all of one shape, and
    lists of texts become uint8[classes], 1 for each that is there. Without labels all are -1.

    Raises: DataError naming table and line for what cannot be read, a missing file, a file that is there twice, an
        empty, unlike or unknown label; ConfigError for a column that there is not.
    """

    def __init__(
        self,
        manifest: str | os.PathLike[str],
        *,
        file: str | None = None,
        labels: Columns = "auto",
        classes: Classes = None,
        folder: str | os.PathLike[str] | None = None,
        ending: str = "",
        **listing: Unpack[ListingArguments],
    ) -> None:
        self.list_file = place = place_of_paths(manifest)
        # A table on this host may name addresses.
        objects = Objects(listing.get("storage_options"))
        where = folder_of_list(place, folder)
        read = partial(_read, file, labels, classes, where, ending, objects=objects)
        opener = f"Manifest({file!r}, {labels!r}, {classes!r}, {where!r}, {ending!r})"
        list_anew = partial(list_files, "Manifest", read, place)
        catalog = catalog_of(opener, place, None, list_anew, objects, listing)
        #: Where labels have names, by name what the numbers of texts stand for.
        self.label_classes = catalog.label_classes
        super().__init__(os.path.dirname(place), catalog, objects)


def file_named_by(entry: Mapping[str, Any], place: str, objects: Objects | None) -> str:
    """Return the picture, or the path of a file that there is, which an entry of JSON lines names; "" without any.

    place: of the table. objects: what reads an address.
    """
    column = _usual_column(list(entry))
    name = None if column is None else entry[column]
    name = str(name) if is_integer(name) else name
    if not isinstance(name, str) or not name:
        return ""
    if name.lower().endswith(IMAGE_EXTENSIONS):
        return name
    path = os.path.join(os.path.dirname(place), name)
    if is_address(name):  # it may be of a page, and other hosts are not asked
        is_there = False
    elif objects is None:
        is_there = os.path.isfile(path)
    else:  # what has no ending is an id
        is_there = bool(os.path.splitext(name)[1]) and objects.find(path) is not None
    return name if is_there else ""


def is_manifest(place: str, objects: Objects | None) -> bool:
    """Return whether a file is a table with a heading that names a column of files, and not a list of files alone.

    JSON lines are one, unless they are samples themselves; see `file_named_by`. objects: what reads an address.
    """
    if place.lower().endswith(JSON_LINES):
        return True
    if not place.lower().endswith((".csv", ".tsv")):
        return False
    try:
        rows = read_rows(place, objects)
    except DataError:  # reading it as a list says what is wrong
        return False
    heading = [name.lower() for name in rows[0][1]] if rows else []
    return bool({*heading} & {*FILE_COLUMNS}) and heading not in (["path"], ["path", "label"])


def read_manifest(place: str, objects: Objects | None = None) -> ListedFiles:
    """Return what a table has, as `open_source` takes it. objects: what reads an address. Raises: DataError."""
    return _read(None, "auto", None, "", "", place, objects)


def folder_of_list(place: str, folder: str | os.PathLike[str] | None) -> str:
    """Return the folder that a list's paths are in, relative to the list's own, "" for that one."""
    if folder is None:
        return ""
    found = place_of_paths(folder)
    return found if is_address(found) else os.path.relpath(found, os.path.dirname(place))


def check_once(names: Sequence[str], where: Callable[[int], str]) -> None:
    """Raise DataError where a file is listed twice."""
    seen: dict[str, int] = {}
    for position, name in enumerate(names):
        first = seen.setdefault(name, position)
        if first != position:
            raise DataError(
                f"{where(position)}{name} is there already ({where(first).rstrip(': ')}): a file is one sample, whose "
                "label has one shape; a FileList takes a file twice"
            )


def check_inside(names: Sequence[str], where: Callable[[int], str]) -> None:
    """Raise DataError where a name, relative to the folder of the images, leads out of it."""
    for position, name in enumerate(names):
        if os.path.isabs(name) or is_address(name) or ".." in name.split("/"):
            raise DataError(
                f"{where(position)}{name!r:.80} may lead out of the folder of the images: give it relative to that, "
                "without ..; paths of a Manifest may lead anywhere"
            )


def _read(
    file: str | None,
    labels: Columns,
    classes: Classes,
    folder: str,
    ending: str,
    place: str,
    objects: Objects | None = None,
) -> ListedFiles:
    """Return what a table has. Arguments: those of `Manifest`; folder: relative to the table's."""
    records = _records_of(place, objects)

    def where(position: int) -> str:
        return f"{place}, line {records[position][0]}: "

    known = list(records[0][1])
    file = _named(place, "file", file, known)
    names = []
    for position, (_, record) in enumerate(records):
        name = record.get(file)
        if is_integer(name):
            name = str(name)
        if not isinstance(name, str) or not name:
            advice = f": correct the line, or {_LINES_ADVICE}" if place.lower().endswith(JSON_LINES) else ""
            raise DataError(
                f"{where(position)}{file} is {name!r:.80}; it is the path of the sample's file{advice}"
            )
        names.append(name)
    check_stores(place, names, where)
    names = [os.path.join(folder, name + ending) for name in names]
    check_once(names, where)
    if labels == "auto":
        labels = next((name for wanted in LABEL_COLUMNS for name in known if name.lower() == wanted), None)
    if labels is None:
        return ListedFiles(names, np.full(len(names), NO_LABEL, np.int64), (), where)
    found: dict[str, NDArray[Any]] = {}
    label_classes: dict[str, tuple[str, ...]] = {}
    for name, columns in _columns_of(labels).items():
        wanted = classes.get(name) if isinstance(classes, Mapping) else classes
        found[name], label_classes[name] = _label(records, columns, wanted, where)
    if isinstance(labels, str):
        return ListedFiles(names, found[labels], label_classes[labels], where)
    kept = {name: each for name, each in label_classes.items() if each}
    result: Labels = found
    return ListedFiles(names, result, (), where, kept)


def _records_of(place: str, objects: Objects | None) -> Records:
    """Return the rows of a table by column. Raises: DataError."""
    if place.lower().endswith(JSON_LINES):
        records = read_records(place, objects)
    elif place.lower().endswith(".json"):
        raise ConfigError(f"{place} is JSON: {JSON_ADVICE}")
    else:
        rows = read_rows(place, objects)
        heading = rows[0][1] if rows else []
        if len(set(heading)) != len(heading):
            raise DataError(f"{place}, line 1: {heading!s:.200} names a column twice: correct the heading")
        for line, fields in rows[1:]:
            if len(fields) != len(heading):
                raise DataError(
                    f"{place}, line {line}: has {len(fields)} fields, and the heading {len(heading)}: correct the line"
                )
        records = [(line, dict(zip(heading, fields, strict=True))) for line, fields in rows[1:]]
    if not records:
        raise DataError(f"{place} lists no files: write a heading, and one file a line")
    return records


def _usual_column(known: list[str]) -> str | None:
    """Return the column of the paths by its name; None where none is called so."""
    return next((name for wanted in FILE_COLUMNS for name in known if name.lower() == wanted), None)


def _named(place: str, argument: str, column: str | None, known: list[str]) -> str:
    if column is None:
        column = _usual_column(known)
        if column is None:
            raise ConfigError(
                f"no column of {place} is called {', '.join(FILE_COLUMNS[:3])} or alike; there are "
                f"{', '.join(map(repr, known))}: give {argument}=, or {_LINES_ADVICE}"
            )
    if column not in known:
        raise ConfigError(
            f"{argument} is {column!r}, and {place} has {', '.join(map(repr, known))}: name one of them"
        )
    return column


def _columns_of(
    labels: str | Sequence[str] | Mapping[str, str | Sequence[str]],
) -> dict[str, str | list[str]]:
    """Return the columns of each label by its name."""
    if isinstance(labels, str):
        return {labels: labels}
    if not isinstance(labels, Sequence | Mapping):
        raise ConfigError(f"labels is {labels!r}; it names columns, or is None for none")
    if not isinstance(labels, Mapping):
        labels = {name: name for name in labels}
    if not labels or not all(isinstance(name, str) and name for name in labels):
        raise ConfigError(f"labels is {labels!r}; it names columns, or is None for none")
    return {name: each if isinstance(each, str) else list(each) for name, each in labels.items()}


def _label(
    records: Records, columns: str | list[str], classes: Sequence[str] | None, where: Callable[[int], str]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    if isinstance(columns, str):
        return label_array(_values(records, columns, where), columns, classes, where)
    parts = [label_array(_values(records, name, where), name, None, where)[0] for name in columns]
    if not parts or len({part.shape for part in parts}) > 1:
        raise ConfigError(f"labels joins {columns}, which have not one shape: name columns that are alike")
    joined = np.stack(parts, axis=1)
    if joined.dtype == np.float64:  # of integers and float32, unless one is that itself
        if any(part.dtype == np.int64 and (part.astype(np.float64) != part).any() for part in parts):
            raise ConfigError(f"labels joins {columns}: an integer has more than the 53 bits of a float64")
        narrow = joined.astype(np.float32)
        joined = narrow if np.array_equal(narrow[joined % 1 == 0], joined[joined % 1 == 0]) else joined
    return joined, ()


def _values(records: Records, column: str, where: Callable[[int], str]) -> list[Any]:
    values = []
    path = [column] if column in records[0][1] else column.split(".")
    for position, (_, record) in enumerate(records):
        value: Any = record
        for name in path:
            if not isinstance(value, dict) or name not in value:
                if position == 0:
                    raise ConfigError(
                        f"labels names {column!r}, and {where(0)}has {', '.join(map(repr, record))}: name one of them"
                    )
                raise DataError(
                    f"{where(position)}has no {column}, unlike the first: label every line or none"
                )
            value = value[name]
        if value is None or value == "":
            raise DataError(f"{where(position)}{column} is empty: label every line or none")
        values.append(value)
    return values


def label_array(
    values: list[Any], name: str, classes: Sequence[str] | None, where: Callable[[int], str]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the label of each sample as numbers, and what they stand for where they were text; see `Manifest`.

    values: what JSON has, or text. name: for errors. classes: in their order; None for those that there are, sorted.
    where: says where a sample's label is written. Raises: DataError for values that are unlike each other or unknown.
    """

    def wrong(position: int, what: str) -> DataError:
        return DataError(f"{where(position)}{name} is {values[position]!r:.80}{what}")

    kinds = [_kind_of(value) for value in values]
    if all(kind == "text" for kind in kinds):
        if classes is None and (numbers := _as_numbers(values)) is not None:
            return _numbers(numbers, wrong)
        return _numbered(values, classes, wrong)
    if all(kind in ("text", "tags", "numbers") for kind in kinds) and any(kind == "tags" for kind in kinds):
        for position, kind in enumerate(kinds):
            if kind == "text" or (kind == "numbers" and values[position] != []):
                raise wrong(position, ", and other samples have lists of texts: correct the line")
        return _tags(values, classes, name, wrong)
    first = kinds[0]
    for position, kind in enumerate(kinds):
        if kind is None:
            raise wrong(position, "; it is a number, a text, or a list of either: correct the line")
        if kind != first:
            raise wrong(position, f", unlike {values[0]!r:.80} at the first sample: correct the line")
    if classes is not None:
        raise ConfigError(f"classes are given for {name}, whose values are numbers: leave them out")
    if first == "number":
        return _numbers(values, wrong)
    shape = np.shape(values[0])
    for position, value in enumerate(values):
        if np.shape(value) != shape:
            raise wrong(
                position, f", of another length than the first, {values[0]!r:.80}: give lists of one length"
            )
    return _array_of(values, wrong), ()


def _kind_of(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if isinstance(value, (bool, int, float)):
        return "number"
    if isinstance(value, list):
        if value and all(isinstance(each, str) for each in value):
            return "tags"
        try:
            array = np.array(value)
        except (ValueError, OverflowError):  # lists of several lengths, and more than a float64 holds
            return None
        return "numbers" if array.dtype.kind in "biuf" else None
    return None


def _as_numbers(texts: list[str]) -> list[int | float] | None:
    """Return texts as numbers, if all are."""
    if any("_" in text for text in texts):  # which Python reads over
        return None
    try:
        numbers = [int(text) if text.lstrip("+-").isdecimal() else float(text) for text in texts]
    except ValueError:
        return None
    # Where no number is among them, "nan" and "inf" are names.
    return numbers if any(abs(number) < math.inf for number in numbers) else None


def _numbers(
    values: Sequence[bool | int | float], wrong: Callable[[int, str], DataError]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    array = _array_of(values, wrong)
    if array.dtype != np.int64 or array.min() < NO_LABEL or array.max() >= MOST_CLASSES:
        return array, ()
    return array, tuple(str(number) for number in range(int(array.max()) + 1))


def _array_of(values: Sequence[Any], wrong: Callable[[int, str], DataError]) -> NDArray[Any]:
    """Return numbers, or lists of them, as `Manifest` says. Raises: DataError for what no type holds."""
    is_float, is_wide = False, False
    unlike: int | None = None  # the first sample with an integer that a float64 does not hold
    for position, value in enumerate(values):
        for each in _flat(value):
            if isinstance(each, float):
                is_float = True
            elif not -(2**63) <= each < 2**63:
                raise wrong(position, ": an integer has at most 64 bits; what is a name has a letter")
            elif abs(each) > _EXACT_IN_FLOAT32 and float(np.float32(each)) != each:
                is_wide = True
                unlike = position if unlike is None and float(each) != each else unlike
    if not is_float:
        return np.array(values, np.int64)
    if unlike is not None:
        raise wrong(unlike, ", which no float64 holds, and other samples have fractions: correct one of them")
    return np.array(values, np.float64 if is_wide else np.float32)


def _flat(value: Any) -> Iterator[int | float]:
    if isinstance(value, list):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _numbered(
    texts: list[str], classes: Sequence[str] | None, wrong: Callable[[int, str], DataError]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    if classes is None:
        return number_labels(texts, lambda position: str(wrong(position, "")))
    numbers = {name: number for number, name in enumerate(check_classes(classes))}
    for position, text in enumerate(texts):
        if text not in numbers:
            raise wrong(
                position, f", which classes= does not have ({len(numbers):,} names): correct one of the two"
            )
    return np.array([numbers[text] for text in texts], np.int64), tuple(classes)


def _tags(
    values: list[list[str]], classes: Sequence[str] | None, name: str, wrong: Callable[[int, str], DataError]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return uint8[samples, classes], 1 for each tag that a sample has."""
    known = tuple(
        sorted({tag for tags in values for tag in tags}) if classes is None else check_classes(classes)
    )
    check_tags(len(values), len(known), name)
    numbers = {tag: number for number, tag in enumerate(known)}
    found = np.zeros((len(values), len(known)), np.uint8)
    for position, tags in enumerate(values):
        for tag in tags:
            if tag not in numbers:
                raise wrong(position, f": classes= does not have {tag!r}: correct one of the two")
            found[position, numbers[tag]] = 1
    return found, known


def check_tags(samples: int, classes: int, name: str) -> None:
    """Raise ConfigError where a byte for each sample and class is too much."""
    if samples * classes > _MOST_TAGS_BYTES:
        raise ConfigError(
            f"{name} has {classes:,} classes, of which each of {samples:,} samples may have several: a byte for each "
            f"is {samples * classes:,} bytes of memory; name fewer classes, or give another label"
        )
