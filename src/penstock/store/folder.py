"""Data sets of plain files: which files there are, in which order, with which labels."""

from __future__ import annotations

import csv
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.calls import Calls
from penstock.store.files import FileSource
from penstock.store.source import Source

# torchvision's list, so that both number the same files alike.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

NO_LABEL = -1


class ImageFolder(FileSource):
    """A folder with one subfolder per label, each with files at any depth below it.

    Samples are numbered by label, then folder, then name, and labels by the names of their folders, as
    torchvision's ImageFolder does. Hidden files and folders (`.name`) are left out, which torchvision does
    not; so are files that lie beside the label folders, which it does too.

    root: the folder that holds the label folders.
    extensions: endings of the files that are samples, in any case; None takes every file.
    calls: as in `open_source`.
    Raises: DataError naming the folder if it is missing, no folder, not allowed, has no label folders, or one
        of them has no samples; naming the file if it is a link to nothing or no regular file.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        extensions: Collection[str] | None = IMAGE_EXTENSIONS,
        calls: Calls | None = None,
    ) -> None:
        folder = _absolute(root)
        calls = calls or Calls()
        classes = sorted(name for name, is_folder in _visible_soon(folder, calls) if is_folder)
        if not classes:
            raise DataError(
                f"{folder} has no label folders: put the files of each label into a folder of its name, "
                f"or open it with FlatFolder or FileList"
            )

        def list_label(label: str) -> list[str]:
            names = list(chain.from_iterable(names for _, names in sorted(_walk(folder, label, calls))))
            return _choose(os.path.join(folder, label), names, extensions)

        by_label = calls.each(list_label, classes)
        names = list(chain.from_iterable(by_label))
        labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(found) for found in by_label])
        super().__init__(folder, names, _sizes_of(folder, names, calls), labels, tuple(classes))


class FlatFolder(FileSource):
    """A folder of files without labels: every label is -1, and samples are numbered by name.

    Subfolders and hidden files (`.name`) are left out.

    root: the folder that holds the files.
    extensions: endings of the files that are samples, in any case; None takes every file.
    calls: as in `open_source`.
    Raises: DataError naming the folder if it is missing, no folder, not allowed or has no samples; naming the
        file if it is a link to nothing or no regular file.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        extensions: Collection[str] | None = IMAGE_EXTENSIONS,
        calls: Calls | None = None,
    ) -> None:
        folder = _absolute(root)
        calls = calls or Calls()
        names = sorted(name for name, is_folder in _visible_soon(folder, calls) if not is_folder)
        names = _choose(folder, names, extensions)
        labels = np.full(len(names), NO_LABEL, dtype=np.int64)
        super().__init__(folder, names, _sizes_of(folder, names, calls), labels, ())


class FileList(FileSource):
    """The files that a text or CSV file lists, in its order: one a line, `path` or `path,label`.

    Paths are relative to the list's own folder, or absolute; a path may occur more than once. A path with a
    comma is quoted as in CSV; where the first line has a tab, tabs separate and commas are ordinary. A first
    line `path` or `path,label` is a heading. Labels are integers, taken as they are (`classes` are then
    their digits), or names, numbered in sorted order. Either every line has a label or none.

    list_file: UTF-8 text. calls: as in `open_source`.
    Raises: DataError naming the list and the line if the list cannot be read, is empty, a file is missing or
        no regular file, or a label is missing or negative.
    """

    def __init__(self, list_file: str | os.PathLike[str], *, calls: Calls | None = None) -> None:
        self.list_file = _absolute(list_file)
        calls = calls or Calls()
        rows = calls.one(self.list_file, lambda: _read_rows(self.list_file))
        root = os.path.dirname(self.list_file)
        names = [fields[0] for _, fields in rows]

        def place_of_line(position: int) -> str:
            return f"{self.list_file}, line {rows[position][0]}: "

        labels, classes = _read_labels(self.list_file, rows)
        super().__init__(root, names, _sizes_of(root, names, calls, place_of_line), labels, classes)


def open_source(path: str | os.PathLike[str], *, calls: Calls | None = None) -> Source:
    """Open a data set of plain files by what is found at a path.

    A folder with subfolders becomes an `ImageFolder`, one without a `FlatFolder`, a file a `FileList`. A `~` at
    its beginning is the home folder. The file system is asked on threads, so that Ctrl-C ends the wait for one that
    does not answer.

    calls: whose threads ask the file system; a loader gives its own, which report long waits.
    Raises: DataError as those; ConfigError where images lie beside subfolders, so that it could be either, and
        for what is no path.
    """
    place = _absolute(path)
    calls = calls or Calls()
    if calls.one(place, lambda: os.path.isfile(place)):
        return FileList(place, calls=calls)
    found = _visible_soon(place, calls)
    if not any(is_folder for _, is_folder in found):
        return FlatFolder(place, calls=calls)
    images = [name for name, is_folder in found if not is_folder and name.lower().endswith(IMAGE_EXTENSIONS)]
    if images:
        raise ConfigError(
            f"{place} has both subfolders and images ({min(images)}): open it with ImageFolder, which leaves "
            f"out the images beside the label folders, or with FlatFolder, which leaves out the subfolders"
        )
    return ImageFolder(place, calls=calls)


def _absolute(path: str | os.PathLike[str]) -> str:
    try:
        text = os.path.expanduser(path)
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{path!r} is not the path of a folder or of a list of files: give one")
    if "://" in text:
        raise ConfigError(
            f"{path!r} is an address, and what is read here is a folder or a list of files: mount it and give the "
            "path, or give a Source of your own"
        )
    return os.path.abspath(text)


def _visible_soon(folder: str, calls: Calls) -> list[tuple[str, bool]]:
    return calls.one(folder, lambda: _visible(folder))


def _visible(folder: str) -> list[tuple[str, bool]]:
    """Return (name, whether it is a folder) of what is in a folder and not hidden, in no order."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} does not exist: check the path, and that its file system is mounted"
        ) from error
    except NotADirectoryError as error:
        raise DataError(f"{folder} is not a folder; a list of files is opened with FileList") from error
    except PermissionError as error:
        raise DataError(
            f"{folder} may not be listed by user {os.geteuid()}: give read permission to it"
        ) from error
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}") from error


def _walk(root: str, folder: str, calls: Calls) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder at and below one, with its files sorted, all relative to the root."""
    files: list[str] = []
    path = os.path.join(root, folder)
    calls.at(path)
    for name, is_folder in _visible(path):
        if is_folder:
            yield from _walk(root, f"{folder}/{name}", calls)
        else:
            files.append(f"{folder}/{name}")
    yield folder, sorted(files)


def _choose(folder: str, names: list[str], extensions: Collection[str] | None) -> list[str]:
    if extensions is None:
        chosen = names
    else:
        endings = tuple(extension.lower() for extension in extensions)
        chosen = [name for name in names if name.lower().endswith(endings)]
    if chosen:
        return chosen
    if not names:
        raise DataError(f"{folder} has no files: add some, or remove the folder")
    found = Counter(os.path.splitext(name)[1].lower() for name in names)
    (commonest, count), *_ = found.most_common(1)
    raise DataError(
        f"{folder} has {len(names)} files but none that ends in {', '.join(extensions or ())}; "
        f"{count} end in {commonest!r}: pass extensions=({commonest!r},), or None for every file"
    )


def _sizes_of(
    root: str, names: Sequence[str], calls: Calls, describe_place: Callable[[int], str] = lambda position: ""
) -> NDArray[np.int64]:
    """Return int64[len(names)], the size of each file; `describe_place` begins the message about a bad one."""

    def sizes_from(start: int) -> list[int]:
        return [
            _size_of(os.path.join(root, names[position]), calls, describe_place, position)
            for position in range(start, min(start + _FILES_AT_ONCE, len(names)))
        ]

    sizes = calls.each(sizes_from, range(0, len(names), _FILES_AT_ONCE))
    return np.fromiter(chain.from_iterable(sizes), np.int64, len(names))


def _size_of(path: str, calls: Calls, describe_place: Callable[[int], str], position: int) -> int:
    calls.at(path)
    try:
        found = os.stat(path)
    except OSError as error:
        what = "is a link to nothing" if os.path.islink(path) else f"cannot be found: {error.strerror}"
        raise DataError(f"{describe_place(position)}{path} {what}; restore it or take it out") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{describe_place(position)}{path} is not a regular file: take it out")
    return found.st_size


_FILES_AT_ONCE = 64


_Rows = list[tuple[int, list[str]]]


def _read_rows(list_file: str) -> _Rows:
    """Return (line number, fields) of each line that is neither empty nor a heading."""
    try:
        with open(list_file, encoding="utf-8-sig", newline="") as text:
            first = text.readline()
            text.seek(0)
            reader = csv.reader(text, delimiter="\t" if "\t" in first else ",", strict=True)
            rows = [
                (reader.line_num, [field.strip() for field in fields]) for fields in reader if any(fields)
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{list_file} is not a list of files in UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"{list_file} cannot be read: {error.strerror}") from error
    if rows and [field.lower() for field in rows[0][1]] in (["path"], ["path", "label"]):
        del rows[0]
    if not rows:
        raise DataError(f"{list_file} lists no files: write one path a line, with or without ,label")
    for line, fields in rows:
        if len(fields) > 2 or not fields[0]:
            raise DataError(f"{list_file}, line {line}: {fields!r} is neither a path nor a path and a label")
        if "\0" in fields[0]:
            raise DataError(f"{list_file}, line {line}: {fields[0]!r} has a zero byte, which no path has")
        if len(fields) != len(rows[0][1]):
            raise DataError(
                f"{list_file}, line {line}: {fields[0]} has {'a' if len(fields) == 2 else 'no'} label, "
                f"unlike line {rows[0][0]}: label every line or none"
            )
    return rows


def _read_labels(list_file: str, rows: _Rows) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    if len(rows[0][1]) == 1:
        return np.full(len(rows), NO_LABEL, dtype=np.int64), ()
    written = [fields[1] for _, fields in rows]
    for (line, fields), label in zip(rows, written, strict=True):
        if not label:
            raise DataError(f"{list_file}, line {line}: {fields[0]} has an empty label")
    if not all(label.removeprefix("-").isdecimal() for label in written):
        classes = sorted(set(written))
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers[label] for label in written], dtype=np.int64), tuple(classes)
    for (line, fields), label in zip(rows, written, strict=True):
        if len(label) > _LABEL_DIGITS or not 0 <= int(label) < _MOST_CLASSES:
            raise DataError(
                f"{list_file}, line {line}: {fields[0]} has label {label:.{_LABEL_DIGITS}}; a number must be in "
                f"[0, {_MOST_CLASSES:,}), anything else is written as a name"
            )
    labels = np.array([int(label) for label in written], dtype=np.int64)
    return labels, tuple(str(number) for number in range(int(labels.max()) + 1))


# `classes` has a name for every number up to the largest, so a number is not a hash or an identifier.
_MOST_CLASSES = 1_000_000
_LABEL_DIGITS = 18
