"""Listing samples that share files: each file is indexed by itself, once, and all of them become one catalog."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.store.catalog import Catalog, CatalogKey, Ints, Packed
from penstock.store.files import unreadable
from penstock.store.labels import Labels, in_classes
from penstock.store.listing import (
    IMAGE_EXTENSIONS,
    MOST_CLASSES,
    NO_LABEL,
    SHARD_NUMBERS,
    Asking,
    Lister,
    ListingArguments,
    catalog_of,
    number_labels,
    stamp_at,
    stamp_of,
)
from penstock.store.manifest import label_array
from penstock.store.object_store import Facts
from penstock.store.packed import Layout, PackedFiles
from penstock.store.patterns import brief, files_of, is_of_several
from penstock.store.remote import Objects, RemoteFile, objects_of
from penstock.units import format_count

#: As TensorFlow, datasets and others name the shards of a set.
_ONE_OF_SEVERAL = re.compile(r"(.*)-(\d+)-of-(\d{1,9})(\D*)", re.DOTALL)

#: More digits are no number of a class, and `int` would be slow.
_LABEL_DIGITS = 18
#: Objects that are indexed at a time.
_OBJECTS_AT_ONCE = 16


class CataloguedFiles(PackedFiles):
    """Samples that a catalog lists in files; made to be used by what indexes a format, such as `TarShards`.

    place: as `place_of_paths` returns it. list_anew: lists them. listing: as in `open_source`.
    endings: of the members that are samples. classes: the names that labels are numbered by, or None.
    options: as the user gave them; other options list other samples.
    """

    def __init__(
        self,
        place: str,
        list_anew: Lister,
        listing: ListingArguments,
        *,
        endings: Collection[str] = (),
        classes: Sequence[str] | None = None,
        **options: object,
    ) -> None:
        objects = objects_of(place, listing.get("storage_options"))
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        opener = f"{type(self).__name__}({given})"
        names = [kind.__name__ for kind in type(self).__mro__]
        catalog = catalog_of(opener, place, endings, list_anew, objects, listing, kinds=names)
        assert catalog.packed is not None, "it is listed where samples lie"
        self.catalog, self.names = catalog, catalog.names
        self._starts = catalog.starts()
        self._offsets = catalog.packed.offsets
        self._ends = np.cumsum(catalog.counts)
        self._layout = Layout(self._ends, catalog.sizes_bytes, self._offsets)
        super().__init__(
            catalog.folders,
            catalog.packed.file_bytes,
            catalog.packed.file_times,
            place=brief(place),
            sizes_bytes=catalog.sizes_bytes,
            labels=catalog.labels,
            classes=catalog.classes,
            objects=objects,
        )
        self.labels, self.classes = in_classes(classes, self.labels, self.classes, self.describe)
        #: Where labels have names, by name what the numbers of texts stand for.
        self.label_classes = catalog.label_classes

    def __repr__(self) -> str:
        classes = "1 class" if len(self.classes) == 1 else f"{len(self.classes)} classes"
        counts = f"{format_count(len(self), 'sample')}, {format_count(len(self.files), 'shard')}, {classes}"
        return f"{type(self).__name__}({self.place!r}): {counts}"

    def describe(self, sample: int) -> str:
        self._size_of(sample)
        begin, end = self._starts[sample : sample + 2].tolist()
        unit = int(np.searchsorted(self._ends, sample, side="right"))
        return f"{self.files[unit]}: {os.fsdecode(self.names[begin : end - 1].tobytes())}"


class Opened(NamedTuple):
    """A file that is indexed: its descriptor, size and time of the last change (ns), and what `stamp_of` says of it.

    remote: what reads it where it is an object, whose descriptor is -1 and whose time is its stamp.
    content: what is read in its place, where it is compressed: all of it unpacked.
    """

    path: str
    descriptor: int
    file_bytes: int
    file_time: int
    stamp: int
    remote: RemoteFile | None = None
    content: bytes | None = None

    @property
    def nbytes(self) -> int:
        """How much can be read."""
        return self.file_bytes if self.content is None else len(self.content)

    def pread(self, size: int, offset: int) -> bytes:
        """Return what `os.pread` does. Raises: OSError; DataError for an object."""
        if self.content is not None:
            return self.content[offset : offset + size]
        if self.remote is not None:
            return self.remote.pread(size, offset)
        return os.pread(self.descriptor, size, offset)

    def whole(self) -> bytes:
        """Return all of it as stored, at most as much as it had when it was opened. Raises: as `pread`."""
        parts, at = list[bytes](), 0
        while at < self.file_bytes and (part := self.pread(self.file_bytes - at, at)):
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


#: Labels of the samples of a file; see `Indexed`.
FoundLabels = Sequence[Any] | Mapping[str, Sequence[Any] | NDArray[Any]] | None


class Indexed(NamedTuple):
    """What a file has.

    names, offsets, sizes: of its samples, in their order.
    labels: a list with one of each, the number of a class, a name, or what JSON has in its place; of several by name
        such lists, or arrays of numbers, where "" is the name of one that is no class; None where they have none.
    """

    file: Opened
    names: list[bytes]
    offsets: Ints
    sizes: Ints
    labels: FoundLabels


@contextlib.contextmanager
def opened(path: str, objects: Objects | None = None) -> Iterator[Opened]:
    """Open a file to index it: only here and there. Raises: DataError naming it if it is missing or no regular file.

    objects: what reads addresses.
    """
    if objects is not None:
        yield opened_object(objects, objects.facts([path])[0])
        return
    now_ns = time.time_ns()
    try:
        # A pipe without a writer is not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise unreadable(path, error) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened: {error.strerror}; check the path, or take it out"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file: give files")
        with contextlib.suppress(OSError):  # what lies between is not read ahead
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        yield Opened(path, descriptor, status.st_size, status.st_mtime_ns, stamp_of(status, now_ns))
    finally:
        os.close(descriptor)


#: Lists a folder, as `files_alone` does.
Look = Callable[[str], Sequence[str]]


def files_alone(folder: str, objects: Objects | None = None) -> Sequence[str]:
    """Return the files directly in a folder, sorted, but hidden ones; none where pictures or folders are next to them.

    A folder that cannot be listed has none: whoever opens it says what is wrong. objects: what reads addresses.
    """
    found = []
    with contextlib.suppress(OSError, DataError):
        if objects is not None:
            files, folders = objects.level(folder)
            names = [each.address for each in files if not _is_hidden(each.address)]
            has_more = any(not _is_hidden(each) for each in folders)
            return [] if has_more or any(map(_is_picture, names)) else sorted(names)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is_picture(entry.name) or entry.is_dir():  # a folder of a million is left at the first
                    return []
                found.append(entry.path)
    return sorted(found)


def files_alone_in(folder: str, endings: tuple[str, ...], look: Look = files_alone) -> list[str]:
    """Return the files directly in a folder that end so, sorted; none where pictures or folders are next to them.

    look: what lists it.
    """
    return [path for path in look(folder) if ends_in(path, endings)]


def ends_in(path: str, endings: tuple[str, ...]) -> bool:
    """Return whether a name ends so, also before the number of a shard, as in a.tfrecord-00000-of-00002."""
    return SHARD_NUMBERS.sub("", path.lower()).endswith(endings)


def are_of_kind(place: str, kinds: Sequence[tuple[str, ...]], objects: Objects | None, look: Look) -> bool:
    """Return whether a place, of `place_of_paths`, is of such files by its name, or a folder with nothing but them.

    It asks the file system, or the store. kinds: endings of their names; a folder has files of one kind.
    objects: what reads addresses. look: what lists a folder.
    """
    endings = tuple(chain(*kinds))
    if is_of_several(place):
        return ends_in(files_of(place, objects)[0], endings)
    is_file = ends_in(place, endings) and not os.path.isdir(place)
    return is_file or any(files_alone_in(place, each, look) for each in kinds)


def files_below(
    path: str, endings: Sequence[tuple[str, ...]], what: str, objects: Objects | None = None
) -> list[str]:
    """Return the file that a path is, or those in the folder that it is, which has nothing but them.

    endings: of their names; of several kinds, the first that there is. what: they are, for errors.
    objects: what reads addresses, where only the name tells a file from a folder.
    Raises: DataError where a folder has none.
    """
    known = tuple(ending for each in endings for ending in each)
    is_file = not os.path.isdir(path) if objects is None else ends_in(path, known)
    if is_file:
        return [path]
    look = cache(partial(files_alone, objects=objects))
    for each in endings:
        if found := files_alone_in(path, each, look):
            return found
    raise DataError(
        f"{path} is a folder without {what}, or with pictures or folders next to them: give one with only them, or "
        "their paths"
    )


def all_files_below(
    place: str,
    endings: Sequence[tuple[str, ...]],
    what: str,
    objects: Objects | None,
    *,
    are_any_named: bool = False,
) -> tuple[str, ...]:
    """Return the files that a place, of `place_of_paths`, is, with those of `files_below` for each folder among them.

    are_any_named: whether files at the addresses of a list or a pattern may end in anything.
    """
    found = files_of(place, objects)
    if are_any_named and objects is not None and is_of_several(place):
        return found
    return tuple(chain(*(files_below(path, endings, what, objects) for path in found)))


def _is_picture(name: str) -> bool:
    return name.lower().endswith(IMAGE_EXTENSIONS)


def _is_hidden(address: str) -> bool:
    return address.rstrip("/").rpartition("/")[2].startswith(".")


def opened_object(objects: Objects, facts: Facts) -> Opened:
    return Opened(facts.address, -1, facts.nbytes, facts.stamp, facts.stamp, RemoteFile(objects, facts))


def index_files(
    asking: Asking,
    files: tuple[str, ...],
    index: Callable[[Opened], Indexed],
    *,
    kind: str,
    label: str | None,
    classes: tuple[str, ...] | None = None,
    has_json: bool = False,
) -> Catalog:
    """Index files in parallel; return the old catalog where it is of the same files and none of them has changed.

    index: returns what an open file has. What the old catalog says of files that did not change is taken.
    kind: name of the source's class. label: as the user gave it, for errors.
    classes: names of the labels 0, 1 ..., which the files have as numbers; () where these have no names. None: labels
        are names, or whatever is found.
    has_json: labels may be what JSON has: what type holds them follows from those of all files, and where one changed
        all are indexed anew.
    Raises: DataError where some files have labels and others none, some integers and others names, or some arrays;
        what `index` and `number_labels` raise.
    """
    old, calls, progress, objects = asking.old, asking.calls, asking.progress, asking.objects
    if missing := _missing(files):
        calls.report(missing)
    known: dict[str, int] = {}
    # Of what had other names, it is not known whether these were names of numbers.
    if classes is not None and old is not None and old.classes not in (classes, _digits_of(old.classes)):
        old = None
    now: dict[str, Facts] = {}
    if objects is not None:
        all_facts = calls.one(files[0], lambda: objects.facts(files, calls.at))
        now = {each.address: each for each in all_facts}
    if old is not None and old.packed is not None:
        if objects is None:
            stamps = calls.each(lambda path: stamp_at(path, calls), old.folders, look=progress.look)
        else:
            stamps = [now[path].stamp if path in now else 0 for path in old.folders]
        known = {
            path: number
            for number, (path, stamp) in enumerate(zip(old.folders, stamps, strict=True))
            if stamp == old.stamps[number] > 0
        }
        if files == old.folders and len(known) == len(set(files)):
            return old
        if has_json and not _are_classes(old.labels):
            known = {}
        starts, ends = old.starts(), np.cumsum(old.counts)
    progress.begin_shards(len(files))

    def one(path: str) -> Indexed:
        calls.at(path)
        if path in known:
            assert old is not None, "what is known is from an old catalog"
            found = _known(old, known[path], starts, ends, has_numbers=classes is not None)
            progress.found.append(len(found.names))
        elif objects is not None:
            found = index(opened_object(objects, now[path]))
        else:
            with opened(path) as file:
                found = index(file)
        progress.sized.append(1)
        return found

    # An object's headers are requests, which the limit of all of them holds together.
    at_once = 1 if objects is None else _OBJECTS_AT_ONCE
    found = calls.each(one, files, look=progress.look, threads_at_once=at_once)
    if mixed := _integers_beside_names(found):
        if known:  # of digits in a catalog it is not known whether they were names
            asking = replace(asking, old=None)
            return index_files(
                asking, files, index, kind=kind, label=label, classes=classes, has_json=has_json
            )
        raise mixed
    return _joined(asking.key, kind, found, label, classes, has_json)


def _missing(files: Sequence[str]) -> str:
    """Return a line about shards that others say there are, as train-00000-of-00128 does of 128; "" without such."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for path in files:
        if named := _ONE_OF_SEVERAL.fullmatch(path):
            before, number, total, behind = named.groups()
            sets.setdefault((before, total, behind), set()).add(int(number))
    for (before, total, behind), found in sets.items():
        if len(found) < int(total):
            first = next(number for number in range(int(total)) if number not in found)
            return (
                f"{format_count(int(total) - len(found), 'shard')} of {int(total):,} left out or missing, the first "
                f"{before}-{first:0{len(total)}}-of-{total}{behind}"
            )
    return ""


def _digits_of(classes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(str, range(len(classes))))


def _known(old: Catalog, index: int, starts: Ints, ends: Ints, *, has_numbers: bool) -> Indexed:
    """Return a file as an old catalog has it. starts: of its names. ends: int64[files], of the samples of each.

    has_numbers: whether files have the labels as numbers, whatever these are called.
    """
    assert old.packed is not None
    has_numbers = has_numbers or old.classes == _digits_of(old.classes)
    first, last = int(ends[index] - old.counts[index]), int(ends[index])
    labels: FoundLabels = None
    if not _are_classes(old.labels):
        by_name = {"": old.labels} if isinstance(old.labels, np.ndarray) else old.labels
        labels = {name: each[first:last] for name, each in by_name.items()}
    elif old.classes:  # all files have labels, or none has: a file may have but samples without one
        numbers = np.asarray(old.labels)[first:last].tolist()
        labels = numbers if has_numbers else [old.classes[number] for number in numbers]
    file_bytes, file_time, stamp = (
        int(each[index]) for each in (old.packed.file_bytes, old.packed.file_times, old.stamps)
    )
    return Indexed(
        Opened(old.folders[index], -1, file_bytes, file_time, stamp),
        old.names[starts[first] : starts[last]].tobytes().split(b"\0")[:-1],
        old.packed.offsets[first:last],
        old.sizes_bytes[first:last],
        labels,
    )


def _joined(
    key: CatalogKey,
    kind: str,
    found: Sequence[Indexed],
    label: str | None,
    names: tuple[str, ...] | None,
    has_json: bool,
) -> Catalog:
    counts = np.array([len(each.names) for each in found], np.int64)
    ends = np.cumsum(counts)
    starts = ends - counts

    def describe(position: int) -> str:
        index = int(np.searchsorted(ends, position, side="right"))
        name = found[index].names[position - int(ends[index])]
        return f"{found[index].file.path}: {os.fsdecode(name)}"

    labels: Labels = np.full(int(ends[-1]), NO_LABEL, np.int64)
    classes: tuple[str, ...] = ()
    label_classes: dict[str, tuple[str, ...]] = {}
    are_arrays = [isinstance(each.labels, Mapping) for each in found]
    if any(are_arrays) and not all(are_arrays):
        array, other = (describe(int(starts[are_arrays.index(is_array)])) for is_array in (True, False))
        raise DataError(
            f"{array} has an array of numbers as its label, and {other} has none: write one kind in all files"
        )
    if are_arrays[0]:
        by_name = _joined_by_name(found, describe)
        label_classes = {name: each for name, (_, each) in by_name.items() if name and each}
        labels, classes = by_name.get("", ({name: each for name, (each, _) in by_name.items()}, ()))
    elif texts := _joined_texts(kind, found, label):
        if not has_json or all(map(_is_class, texts)):
            labels, classes = number_labels(list(map(str, texts)), describe)
        else:
            labels, classes = label_array(texts, label or "", None, lambda place: f"{describe(place)}: ")
        if names and len(names) >= len(classes) and classes == _digits_of(classes):
            classes = names
    return Catalog(
        key,
        kind,
        time.time(),
        np.frombuffer(b"".join(b"\0".join(each.names) + b"\0" for each in found), np.uint8),
        np.concatenate([each.sizes for each in found]),
        labels,
        classes,
        tuple(each.file.path for each in found),
        np.array([each.file.stamp for each in found], np.int64),
        counts,
        Packed(
            np.concatenate([each.offsets for each in found]),
            np.array([each.file.file_bytes for each in found], np.int64),
            np.array([each.file.file_time for each in found], np.int64),
        ),
        label_classes,
    )


def _is_class(value: object) -> bool:
    """Return whether what JSON has is the name or the number of a class, -1 for none."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str) or (is_number and NO_LABEL <= value < MOST_CLASSES)  # type: ignore[operator]


def _are_classes(labels: Labels) -> bool:
    """Return whether each sample has the number of a class, or none."""
    return isinstance(labels, np.ndarray) and labels.dtype == np.int64 and labels.ndim == 1


def number_or_name(text: str) -> int | str:
    """Return a label that a file has as text, which is the number of a class where it is one."""
    return int(text) if _is_number(text) and len(text) <= _LABEL_DIGITS else text


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _integers_beside_names(found: Sequence[Indexed]) -> DataError | None:
    """Return what to raise where some labels are integers and others names: those would be numbered anew."""

    def first(is_wanted: Callable[[str | int], bool]) -> str:
        each = (
            f"{file.file.path}: {os.fsdecode(name)} has {label!r:.80}"
            for file in found
            if isinstance(file.labels, list)
            for name, label in zip(file.names, file.labels, strict=True)
            if is_wanted(label)
        )
        return next(each, "")

    integer = first(lambda label: isinstance(label, int))
    name = (
        first(lambda label: isinstance(label, str) and label != "" and not _is_number(label))
        if integer
        else ""
    )
    if not name:
        return None
    return DataError(
        f"some labels are integers and others names: {integer}, and {name}: write one kind in all files"
    )


def _joined_texts(kind: str, found: Sequence[Indexed], label: str | None) -> list[Any]:
    """Return the labels of all samples; nothing where none has one."""
    texts = [each.labels if isinstance(each.labels, list) else [] for each in found]
    if all(label in (NO_LABEL, str(NO_LABEL)) for each in texts for label in each):
        return []
    without = next((each.file.path for each in found if each.labels is None), None)
    if without is not None:
        labelled = next(each.file.path for each in found if each.labels is not None)
        raise DataError(
            f"{without} has no labels ({label}), unlike {labelled}: label all of them, or give label=None to {kind}"
        )
    return list(chain.from_iterable(texts))


def _joined_by_name(
    found: Sequence[Indexed], describe: Callable[[int], str]
) -> dict[str, tuple[NDArray[Any], tuple[str, ...]]]:
    """Return several labels as numbers, and what these stand for, by name.

    Raises: DataError naming the file where one is of another kind, the sample where it is.
    """
    by_file = [each.labels if isinstance(each.labels, Mapping) else {} for each in found]
    joined = {}
    for name, first in by_file[0].items():
        if not isinstance(first, np.ndarray):
            values = list(chain.from_iterable(labels[name] for labels in by_file))
            joined[name] = label_array(values, name, None, lambda place: f"{describe(place)}: ")
            continue
        arrays = [np.asarray(labels[name]) for labels in by_file]
        for each, one in zip(found, arrays, strict=True):
            if (one.dtype, one.shape[1:]) != (first.dtype, first.shape[1:]):
                what = name or "labels"
                raise DataError(
                    f"{each.file.path} has {what} of {one.dtype}{list(one.shape[1:])}, unlike {found[0].file.path}, "
                    f"{first.dtype}{list(first.shape[1:])}: give files of one kind"
                )
        joined[name] = np.concatenate(arrays), ()
    return joined
