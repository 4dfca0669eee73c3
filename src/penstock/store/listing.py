"""Listing a data set of plain files: which files there are, in which order, with which labels and sizes.

Folders are read and sizes asked for by several threads where that is faster. Of a folder that did not change since an
earlier listing, what that one found is taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import stat
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.compiling import Lease, Part
from penstock.errors import ConfigError, DataError
from penstock.machine_code import Signature
from penstock.store.calls import Calls
from penstock.store.catalog import Catalog, CatalogKey, Ints
from penstock.store.catalogs import keep_catalog, place_of, read_catalog
from penstock.store.labels import Labels
from penstock.store.listing_progress import PATIENCE_SECONDS, ListingProgress
from penstock.store.object_store import Facts, is_address, joined, without_secrets
from penstock.store.patterns import brief
from penstock.store.remote import Objects
from penstock.store.remote_clients import root_of
from penstock.store.text_rows import Rows, read_rows
from penstock.units import format_count

# torchvision's list, so that both number the same files alike.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

NO_LABEL = -1

#: The sources whose catalogs are of lists of files: names are relative to the list's folder.
LISTS = ("FileList", "Manifest", "CocoImages", "ImageNetVal")

Refresh = Literal["auto", "full", "never"]

T = TypeVar("T")

#: Between an address and the endpoint that is asked for it, where that is not the usual one.
_AT = " at "
#: A change so shortly before a folder is read may have another after it at the same time of the file system's clock.
_RACY_NS = 2 * 10**9
#: The stamp of what cannot be asked for.
_NO_STAMP = 0

STAT_SIGNATURE = Signature(("int64", "int64", "uint8[:]", "int64[:]", "int64[:]", "int64[:]"))
STAT_FILES = Part(
    "penstock.store._listing_kernels",
    "stat_files",
    STAT_SIGNATURE,
    "how files are listed",
    "Python lists them, more slowly,",
)
#: As many files are asked for in a row; in the compiled loop, which more files than a few are worth.
_FILES_AT_ONCE, _COMPILED_AT_ONCE, _LEAST_COMPILED = 64, 256, 50_000
_FOLDERS_AT_ONCE = 16
_MOST_PROCESSORS = 8


@dataclass(frozen=True)
class Asking:
    """Which data set is listed, and how its files are asked for: the calls that do, and what shows how far they are.

    old: its catalog as it was kept. objects: what reads addresses, where it has one.
    """

    key: CatalogKey
    old: Catalog | None
    calls: Calls
    progress: ListingProgress
    objects: Objects | None = None

    def found(self, place: str, count: int) -> None:
        """Count what was found in a place that takes long by itself. Whoever waits sees that it answers."""
        self.calls.at(place)
        self.progress.found.append(count)


#: Lists a data set; returns the old catalog if nothing changed.
Lister = Callable[[Asking], Catalog]


class ListingArguments(TypedDict, total=False):
    """How a source lists its data set, see `penstock.open_source`."""

    refresh: Refresh
    calls: Calls | None
    catalog: Catalog | None
    storage_options: Mapping[str, Any] | None


def catalog_of(
    opener: str,
    place: str,
    extensions: Collection[str] | None,
    lister: Lister,
    objects: Objects | None,
    listing: ListingArguments,
    kinds: Collection[str] = (),
) -> Catalog:
    """Return the catalog of a data set: one that is given, or kept and as far as it is still right, else a new one.

    opener, extensions: see `CatalogKey`. objects: what reads addresses. kinds: of catalogs that may be given, besides.
    Raises: TypeError for another argument of a listing, ConfigError for another word as refresh, or what is no catalog
        of such a source; what `lister` raises.
    """
    if unknown := listing.keys() - ListingArguments.__annotations__:
        raise TypeError(f"{opener.partition('(')[0]} takes no argument {min(unknown)!r}")
    if (given := listing.get("catalog")) is not None:
        _check_given(given, opener, kinds)
        return given
    refresh, calls = listing.get("refresh", "auto"), listing.get("calls") or Calls()
    check_refresh(refresh)
    if objects is not None:
        calls.failing = objects.failing
    key = calls.one(place, lambda: _key(opener, place, extensions, objects))
    old = None if refresh == "full" else read_catalog(key, calls)
    if old is not None and refresh == "never":
        return old
    progress = ListingProgress(brief(place), calls.report)
    try:
        catalog = lister(Asking(key, old, calls, progress, objects))
    finally:
        progress.close()
    if catalog is old:
        return catalog
    problem = keep_catalog(catalog, calls)
    if progress.seconds > PATIENCE_SECONDS:
        kept = f"no catalog of it is kept: {problem}" if problem else "the next start looks for changes only"
        found = format_count(len(catalog), "sample")
        calls.report(f"listed {found} of {brief(place)} in {progress.seconds:.1f} s; {kept}")
    return catalog


def _check_given(catalog: object, opener: str, kinds: Collection[str]) -> None:
    """Raise ConfigError unless it is a catalog that this opener can take."""
    if not isinstance(catalog, Catalog):
        raise ConfigError(
            f"catalog is {catalog!r:.200}; it is a Catalog, such as another source's `source.catalog`: leave it out to "
            'have the data set listed, with refresh="full" to list it anew'
        )
    kind = opener.partition("(")[0]
    if kind not in ("open_source", catalog.kind) and catalog.kind not in kinds:
        raise ConfigError(
            f"catalog is of {catalog.kind}, and {kind} cannot take it: give one of {kind}, or none"
        )


def check_refresh(refresh: object) -> None:
    """Raise ConfigError unless it is a word for how a data set is listed again."""
    if refresh not in ("auto", "full", "never"):
        raise ConfigError(
            f'refresh is {refresh!r}; it is "auto" (list what changed), "full" (list everything anew) or "never" (take '
            "the last listing as it is)"
        )


def _key(
    opener: str, place: str, extensions: Collection[str] | None, objects: Objects | None = None
) -> CatalogKey:
    endings = None if extensions is None else tuple(sorted({extension.lower() for extension in extensions}))
    endpoint = "" if objects is None else objects.endpoint(place)
    return CatalogKey(opener, place_of(place) + (f"{_AT}{endpoint}" if endpoint else ""), endings)


def stamp_of(found: os.stat_result, now_ns: int) -> int:
    """Return a number that changes with the content of a folder, or of a file that is replaced.

    It is of the times of the last changes and the inode: a folder whose times were set back is another, too.
    now_ns: a time before it was asked for. A folder that changed just then may change again unseen: its number is
        negative, and shows only which folder it is, not that a later listing finds the same.
    """
    times_and_inode = struct.pack("<qqQ", found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
    stamp = xxhash.xxh3_64_intdigest(times_and_inode) >> 1 | 1
    return -stamp if found.st_ctime_ns > now_ns - _RACY_NS else stamp


def _is_unchanged(place: str, old: Catalog, asking: Asking) -> bool:
    """Return whether every folder of a catalog is as it was. Of shards, what lists them sees it."""
    if old.packed is not None or old.object_stamps is not None:
        return False
    root = os.path.dirname(place) if old.kind in LISTS else place

    def look(first: int) -> bool:
        return all(
            stamp_at(os.path.join(root, old.folders[index]), asking.calls) == old.stamps[index]
            for index in range(first, min(first + _FOLDERS_AT_ONCE, len(old.folders)))
        )

    starts = range(0, len(old.folders), _FOLDERS_AT_ONCE)
    return bool((old.stamps > 0).all()) and all(asking.calls.each(look, starts, look=asking.progress.look))


def read_same(
    path: str | os.PathLike[str], digest: bytes, calls: Calls, objects: Objects | None = None
) -> Catalog | None:
    """Return the catalog that `open_source` kept of what is at a path, if it is another rank's to the bit."""
    key = calls.one(os.fspath(path), lambda: _key("open_source", os.fspath(path), IMAGE_EXTENSIONS, objects))
    found = read_catalog(key, calls)
    return found if found is not None and found.digest() == digest else None


def is_listed_here(path: str | os.PathLike[str], catalog: Catalog, refresh: Refresh, calls: Calls) -> bool:
    """Return whether another rank's catalog is of what is at a path: of this folder, not of one like it.

    refresh: "never" has it be so wherever the path is the same.
    """
    place = calls.one(os.fspath(path), lambda: place_of(path))
    if is_address(place):  # it is the same one everywhere
        return place == catalog.key.place.partition(_AT)[0]
    if place != catalog.key.place:
        return False
    root = os.path.dirname(place) if catalog.kind in LISTS else place
    first = os.path.join(root, catalog.folders[0])
    stamp = calls.one(first, lambda: stamp_at(first, calls))
    return refresh == "never" or abs(stamp) == abs(int(catalog.stamps[0])) != _NO_STAMP


def stamp_at(path: str, calls: Calls) -> int:
    """Return the stamp of a folder or file; 0 if it cannot be asked for."""
    calls.at(path)
    now_ns = time.time_ns()
    try:
        return stamp_of(os.stat(path), now_ns)
    except OSError:  # listing it says what is wrong
        return _NO_STAMP


# -- Folders -------------------------------------------------------------------------------------------


class _Folder(NamedTuple):
    """A folder as it is now.

    path: relative to the root. folders: those in it, relative to the root.
    files: the samples in it, sorted, relative to the root; None where it is as in the old catalog.
    """

    path: str
    stamp: int
    folders: list[str]
    files: list[str] | None


class _Tree:
    """The folders at and below a root, those that did not change taken from an old catalog.

    extensions: endings of samples, lower case; None for all files.
    """

    def __init__(
        self, root: str, extensions: tuple[str, ...] | None, old: Catalog | None, asking: Asking
    ) -> None:
        self._root, self._extensions, self.asking = root, extensions, asking
        self.old = old
        #: By path, the index in the old catalog; and the folders in it.
        self.known: dict[str, int] = {}
        self._folders_in: dict[str, list[str]] = {}
        if old is not None:
            for index, path in enumerate(old.folders):
                self.known[path] = index
                self._folders_in[path] = []
                if path:
                    self._folders_in[path.rpartition("/")[0]].append(path)

    def look(self, folder: str) -> _Folder:
        """Return a folder as it is. Raises: DataError."""
        path = os.path.join(self._root, folder) if folder else self._root
        self.asking.calls.at(path)
        now_ns = time.time_ns()
        stamp = stamp_of(_asked(path, os.stat), now_ns)
        index = self.known.get(folder)
        if self.old is not None and index is not None and stamp == self.old.stamps[index] > 0:
            self.asking.progress.found.append(int(self.old.counts[index]))
            return _Folder(folder, stamp, self._folders_in[folder], None)
        before = f"{folder}/" if folder else ""
        names, folders = visible(path)
        if self._extensions is not None:
            names = [name for name in names if name.lower().endswith(self._extensions)]
        files = [before + name for name in sorted(names)]
        self.asking.progress.found.append(len(files))
        return _Folder(folder, stamp, [before + name for name in folders], files)

    def walk(self, folder: str) -> Iterator[_Folder]:
        """Yield a folder and those below it."""
        found = self.look(folder)
        yield found
        for each in found.folders:
            yield from self.walk(each)

    def count(self, found: _Folder) -> int:
        """Return the number of samples in a folder."""
        if found.files is not None:
            return len(found.files)
        assert self.old is not None, "a folder without a listing is as it was"
        return int(self.old.counts[self.known[found.path]])


def list_folder(kind: str | None, place: str, asking: Asking) -> Catalog:
    """List an `ImageFolder` or a `FlatFolder`, by its name; or whichever of them it is."""
    old = asking.old
    if asking.objects is not None and is_address(place):
        return _list_objects(kind, place, asking, asking.objects)
    if old is not None and _is_unchanged(place, old, asking):
        return old
    # What was something else has other samples.
    is_alike = old is not None and old.kind in (kind or "ImageFolder", kind or "FlatFolder")
    tree = _Tree(place, asking.key.extensions, old if is_alike else None, asking)
    top = asking.calls.one(place, lambda: tree.look(""))
    if kind is None and tree.old is not None and top.files is None:
        kind = tree.old.kind
    elif kind is None and top.folders and top.files:
        raise _could_be_either(place, top.files[0])
    if kind == "ImageFolder" or (kind is None and top.folders):
        return _list_labels(place, tree, top)
    if not tree.count(top):
        raise _nothing_in(place, asking.calls.one(place, lambda: visible(place))[0], asking.key.extensions)
    labels = np.full(tree.count(top), NO_LABEL, np.int64)
    return _catalog(place, "FlatFolder", tree, [top], labels, ())


def _could_be_either(place: str, file: str) -> ConfigError:
    return ConfigError(
        f"{place} has both subfolders and images ({os.path.basename(file)}): open it with ImageFolder, "
        f"which leaves out the images next to the label folders, or with FlatFolder, which leaves out the subfolders"
    )


def _list_objects(kind: str | None, place: str, asking: Asking, objects: Objects) -> Catalog:
    """List the objects below an address as `list_folder` does files: in the same order, with the same labels."""
    if kind == "FlatFolder":
        found = asking.calls.one(place, lambda: objects.level_with_facts(place))
    else:
        found = asking.calls.one(place, lambda: objects.walk(place, partial(asking.found, place)))
    shown, root = without_secrets(place), joined(place, "")
    visible_ones: dict[str, Facts] = {}
    for each in found:
        name = each.address.removeprefix(root)
        if name and not any(part.startswith(".") for part in name.split("/")):
            visible_ones[name] = each
    if not visible_ones:
        raise DataError(
            f"{shown} has no objects, or is none, asked as {objects.identity(place)}: check the address, and that this "
            "identity may list it"
        )
    endings = asking.key.extensions
    names = [name for name in visible_ones if endings is None or name.lower().endswith(endings)]
    beside = [name for name in names if "/" not in name]
    inside = [name for name in names if "/" in name]
    if kind is None and beside and inside:
        raise _could_be_either(shown, beside[0])
    if kind == "FlatFolder" or (kind is None and not inside):
        names, classes = sorted(beside), tuple[str, ...]()
        labels = np.full(len(names), NO_LABEL, np.int64)
    else:
        # By label, then folder, then name.
        names = sorted(inside, key=lambda name: (name.partition("/")[0], *name.rpartition("/")[::2]))
        classes = tuple(sorted({name.partition("/")[0] for name in visible_ones if "/" in name}))
        if not classes:
            raise DataError(
                f"{shown} has no label folders: put the files of each label into a folder of its name, "
                f"or open it with FlatFolder or FileList"
            )
        numbers = {label: number for number, label in enumerate(classes)}
        labels = np.array([numbers[name.partition("/")[0]] for name in names], np.int64)
        for number in np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0).tolist():
            label = f"{classes[number]}/"
            those = [name for name in visible_ones if name.startswith(label)]
            raise _nothing_in(joined(shown, classes[number]), those, endings)
    if not names:
        raise _nothing_in(shown, list(visible_ones), endings)
    kind = "ImageFolder" if classes else "FlatFolder"
    return _catalog_of_objects(kind, asking, names, [visible_ones[name] for name in names], labels, classes)


def _catalog_of_objects(
    kind: str,
    asking: Asking,
    names: Sequence[str],
    facts: Sequence[Facts],
    labels: Labels,
    classes: tuple[str, ...],
    label_classes: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Catalog:
    """Return the catalog of objects; the old one if nothing has changed."""
    old = asking.old
    new = Catalog(
        asking.key,
        kind,
        time.time(),
        np.frombuffer(_joined(names), np.uint8),
        np.array([each.nbytes for each in facts], np.int64),
        labels,
        classes,
        ("",),
        np.zeros(1, np.int64),
        np.array([len(names)], np.int64),
        label_classes=dict(label_classes),
        object_stamps=np.array([each.stamp for each in facts], np.int64),
    )
    # All but when it was listed.
    is_same = (
        old is not None and replace(old, listed_seconds=0).digest() == replace(new, listed_seconds=0).digest()
    )
    return old if old is not None and is_same else new


def _list_labels(place: str, tree: _Tree, top: _Folder) -> Catalog:
    if not top.folders:
        raise DataError(
            f"{place} has no label folders: put the files of each label into a folder of its name, "
            f"or open it with FlatFolder or FileList"
        )
    labels, asking = sorted(top.folders), tree.asking

    def list_label(label: str) -> list[_Folder]:
        found = sorted(tree.walk(label))
        if not any(map(tree.count, found)):
            everything = [each.files or [] for each in _Tree(place, None, None, asking).walk(label)]
            raise _nothing_in(
                os.path.join(place, label), list(chain.from_iterable(everything)), asking.key.extensions
            )
        return found

    by_label = asking.calls.each(list_label, labels, look=asking.progress.look)
    counts = [sum(map(tree.count, found)) for found in by_label]
    numbers = np.repeat(np.arange(len(labels), dtype=np.int64), counts)
    # The files next to the label folders are no samples.
    folders = [top._replace(files=[]), *chain.from_iterable(by_label)]
    return _catalog(place, "ImageFolder", tree, folders, numbers, tuple(labels))


def _catalog(
    place: str, kind: str, tree: _Tree, folders: Sequence[_Folder], labels: Ints, classes: tuple[str, ...]
) -> Catalog:
    """Join folders, in the order of their samples, and ask for the sizes that no old catalog has."""
    old, names, sizes = tree.old, [], []
    old_starts = np.zeros(1, np.int64) if old is None else old.starts()
    old_firsts = np.zeros(1, np.int64) if old is None else np.concatenate(([0], np.cumsum(old.counts)))
    for found in folders:
        if found.files is not None:
            names.append(_joined(found.files))
            sizes.append(np.full(len(found.files), _UNKNOWN, np.int64))
        else:
            assert old is not None, "a folder without a listing is as it was"
            first, last = old_firsts[tree.known[found.path] :][:2]
            names.append(old.names[old_starts[first] : old_starts[last]].tobytes())
            sizes.append(old.sizes_bytes[first:last])
    all_names, all_sizes = np.frombuffer(b"".join(names), np.uint8), np.concatenate(sizes)
    _ask_sizes(place, all_names, all_sizes, tree.asking)
    return Catalog(
        tree.asking.key,
        kind,
        time.time(),
        all_names,
        all_sizes,
        labels,
        classes,
        tuple(found.path for found in folders),
        np.array([found.stamp for found in folders], np.int64),
        np.array([tree.count(found) for found in folders], np.int64),
    )


def _joined(names: Sequence[str]) -> bytes:
    """Return names as bytes, each closed by a NUL."""
    return os.fsencode("\0".join(names)) + b"\0" if names else b""


def _nothing_in(folder: str, names: list[str], extensions: Collection[str] | None) -> DataError:
    """Return what to raise for a folder whose files, if any, are no samples."""
    if not names:
        return DataError(f"{folder} has no files: add some, or remove the folder")
    found = Counter(map(_ending_of, names))
    # Of shards, one is enough: notes and facts lie next to it, and arrays.
    commonest, count = max(
        found.items(), key=lambda each: (each[0] in _OTHER_FILES and each[0] not in _BESIDE, each[1])
    )
    advice = (
        f"pass extensions=({commonest!r},), or None for every file, to ImageFolder or FlatFolder, or "
        f"--extensions {commonest or 'any'} to penstock calibrate"
    )
    if commonest in _OTHER_FILES:
        advice = _OTHER_FILES[commonest].format(folder)
    return DataError(
        f"{folder} has {len(names)} files but none that ends in {', '.join(extensions or ())}; "
        f"{count} end in {commonest!r}: {advice}"
    )


def _ending_of(name: str) -> str:
    """Return how a name ends, as `_OTHER_FILES` has it."""
    stem = SHARD_NUMBERS.sub("", name)
    return os.path.splitext(stem)[1].lower() or ("" if stem == name else _OF_SEVERAL)


#: As the names of TFRecord files often end.
SHARD_NUMBERS = re.compile(r"-\d+-of-\d+$")
_OF_SEVERAL = "-of-"
#: By the end of a compressed file's name, why it is not read.
COMPRESSED = dict.fromkeys(
    (".gz", ".bz2", ".xz", ".zst"),
    "is compressed, so that no part of it can be read without all before it: unpack it once",
)
#: What opens files that are no samples by themselves, by their ending. {}: their folder.
_OTHER_FILES = {
    _OF_SEVERAL: "open them with penstock.store.TFRecords('{}/*-of-*') if they are TFRecords",
    ".mds": "MDS shards are read with index.json next to them, which is missing",
    ".parquet": "open them with penstock.store.ParquetFiles('{}/*.parquet')",
    ".arrow": "open them with penstock.store.ArrowFiles('{}/*.arrow')",
    ".tfrecord": "open them with penstock.store.TFRecords('{}/*.tfrecord*')",
    ".tfrecords": "open them with penstock.store.TFRecords('{}/*.tfrecords*')",
    ".tar": "open them with penstock.store.TarShards('{}/*.tar')",
    ".h5": "open them with penstock.store.Hdf5('{}/*.h5')",
    ".hdf5": "open them with penstock.store.Hdf5('{}/*.hdf5')",
    ".npy": "open them with penstock.store.Arrays('{}/*.npy'), which reads their rows as samples; where each file is a "
    "sample, pass extensions=('.npy',) to ImageFolder or FlatFolder",
    **{ending: f"each {why}" for ending, why in COMPRESSED.items()},
}
#: Those that may lie next to others.
_BESIDE = (".npy", *COMPRESSED)


def visible(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the files and folders in a folder that are not hidden, in no order. Raises: DataError."""

    def scan(path: str) -> tuple[list[str], list[str]]:
        files: list[str] = []
        folders: list[str] = []
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                if name[0] != ".":
                    (folders if entry.is_dir() else files).append(name)
        return files, folders

    return _asked(folder, scan)


def _asked(folder: str, ask: Callable[[str], T]) -> T:
    """Return what the file system answers about a folder. Raises: DataError naming the folder and what to do."""
    try:
        return ask(folder)
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
        entry = "" if error.filename in (None, folder) else f" ({os.path.basename(error.filename)} in it)"
        raise DataError(
            f"{folder}{entry} cannot be listed: {error.strerror}; check the store that holds it, or take that out"
        ) from error


# -- Sizes ---------------------------------------------------------------------------------------------

_UNKNOWN = -1


def _ask_sizes(
    root: str,
    names: NDArray[np.uint8],
    sizes: Ints,
    asking: Asking,
    describe_place: Callable[[int], str] = lambda position: "",
) -> None:
    """Write the size of each file that has none yet; `describe_place` begins the message about a bad one.

    Raises: DataError naming the first file that is missing or no regular file.
    """
    which = np.flatnonzero(sizes == _UNKNOWN)
    starts = np.concatenate(([0], np.flatnonzero(names == 0) + 1))
    calls, progress = asking.calls, asking.progress
    progress.total = which.size

    def ask(positions: Ints) -> None:
        for position in positions.tolist():
            path = os.path.join(
                root, os.fsdecode(names[starts[position] : starts[position + 1] - 1].tobytes())
            )
            calls.at(path)
            sizes[position] = _size_of(path, describe_place, position)

    def ask_plainly(first: int) -> None:
        ask(which[first : first + _FILES_AT_ONCE])
        progress.sized.append(min(_FILES_AT_ONCE, which.size - first))

    if which.size < _LEAST_COMPILED or (statx := _address_of_statx()) is None:
        calls.each(ask_plainly, range(0, which.size, _FILES_AT_ONCE), look=progress.look)
        return

    def ask_many(first: int) -> None:
        positions = which[first : first + _COMPILED_AT_ONCE]
        loop = STAT_FILES.ask()
        if loop is None:
            ask(positions)
        else:
            begin, end = starts[positions[0] : positions[0] + 2].tolist()
            calls.at(os.path.join(root, os.fsdecode(names[begin : end - 1].tobytes())))
            loop(statx, descriptor, names, starts, positions, sizes)
            # Asked for again by Python: errors are described in one place.
            ask(positions[sizes[positions] == _UNKNOWN])
        progress.sized.append(positions.size)

    processors = min(len(os.sched_getaffinity(0)), _MOST_PROCESSORS)
    items = range(0, which.size, _COMPILED_AT_ONCE)
    descriptor = calls.one(root, lambda: os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        # While it is open, a loop that was not compiled on this machine yet is not waited for.
        with contextlib.closing(Lease(None)):
            calls.each(ask_many, items, look=progress.look, threads_at_once=processors)
    finally:
        os.close(descriptor)


@functools.cache
def _address_of_statx() -> int | None:
    """Return the address of the C library's function; None where it has none, or Penstock does not know its answer."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.byteorder == "little":
            return ctypes.cast(ctypes.CDLL(None).statx, ctypes.c_void_p).value
    return None


def _size_of(path: str, describe_place: Callable[[int], str], position: int) -> int:
    try:
        found = os.stat(path)
    except OSError as error:
        what = "is a link to nothing" if os.path.islink(path) else f"cannot be found: {error.strerror}"
        raise DataError(f"{describe_place(position)}{path} {what}; restore it or take it out") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{describe_place(position)}{path} is not a regular file: take it out")
    return found.st_size


# -- Lists of files ------------------------------------------------------------------------------------


class ListedFiles(NamedTuple):
    """What a list of files has.

    names: relative to the list's folder, or absolute. labels, classes, label_classes: as in `Catalog`.
    where: says where in the list a sample is, for errors.
    """

    names: list[str]
    labels: Labels
    classes: tuple[str, ...]
    where: Callable[[int], str]
    label_classes: Mapping[str, tuple[str, ...]] = MappingProxyType({})


def list_files(kind: str, read: Callable[[str], ListedFiles], place: str, asking: Asking) -> Catalog:
    """Read a list of files and look for each. All of it anew, whatever changed.

    kind: name of the source's class, one of `LISTS`. read: returns what the list at a path has.
    """
    old, calls = asking.old, asking.calls
    if old is not None and _is_unchanged(place, old, asking):
        return old
    root, list_name = os.path.split(place)
    list_stamp = stamp_at(place, calls)
    listed = calls.one(place, lambda: read(place))
    for position, name in enumerate(listed.names):
        if "\0" in name:
            raise DataError(f"{listed.where(position)}{name!r} has a zero byte, which no path has")
    if is_address(place) or (listed.names and is_address(listed.names[0])):
        return _catalog_of_list(kind, place, listed, asking)
    folders = sorted(set(map(os.path.dirname, listed.names)))
    stamps = calls.each(lambda folder: stamp_at(os.path.join(root, folder), calls), folders)
    all_names = np.frombuffer(_joined(listed.names), np.uint8)
    sizes = np.full(len(listed.names), _UNKNOWN, np.int64)
    _ask_sizes(root, all_names, sizes, asking, listed.where)
    return Catalog(
        asking.key,
        kind,
        time.time(),
        all_names,
        sizes,
        listed.labels,
        listed.classes,
        (list_name, *folders),
        np.array([list_stamp, *stamps], np.int64),
        np.zeros(1 + len(folders), np.int64),
        label_classes=dict(listed.label_classes),
    )


def _catalog_of_list(kind: str, place: str, listed: ListedFiles, asking: Asking) -> Catalog:
    """Return the catalog of a list of objects, or of one that is an object itself."""
    root = os.path.dirname(place)
    addresses = [name if is_address(name) else joined(root, name.lstrip("/")) for name in listed.names]
    if paths := [name for name in addresses if not is_address(name)]:
        raise DataError(f"{place}: {paths[0]} is a path, and others are addresses: list one kind")
    own = contextlib.closing(Objects()) if asking.objects is None else contextlib.nullcontext(asking.objects)
    with own as objects:
        facts = asking.calls.one(place, lambda: objects.facts(addresses, asking.calls.at))
    return _catalog_of_objects(
        kind, asking, addresses, facts, listed.labels, listed.classes, listed.label_classes
    )


def check_stores(place: str, names: Sequence[str], where: Callable[[int], str]) -> None:
    """Raise DataError where a list at an address names another store, to which its credentials would be sent."""
    if not is_address(place):
        return
    store = root_of(place)
    for position, name in enumerate(names):
        try:
            is_elsewhere = is_address(name) and root_of(name) != store
        except ConfigError as error:
            raise DataError(f"{where(position)}{error}") from error
        if is_elsewhere:
            raise DataError(
                f"{where(position)}{without_secrets(name):.200} is in another store than the list: copy the list to "
                "this host, where its names may lead anywhere, and read it first"
            )


def read_list(place: str, objects: Objects | None = None) -> ListedFiles:
    """Return what a list of files has; see `FileList`. objects: what reads an address. Raises: DataError."""
    rows = read_rows(place, objects)
    if rows and [field.lower() for field in rows[0][1]] in (["path"], ["path", "label"]):
        del rows[0]
    if not rows:
        raise DataError(f"{place} lists no files: write one path a line, with or without ,label")
    for line, fields in rows:
        if len(fields) > 2 or not fields[0]:
            raise DataError(f"{place}, line {line}: {fields!s:.200} is neither a path nor a path and a label")
        if len(fields) != len(rows[0][1]):
            raise DataError(
                f"{place}, line {line}: {fields[0]} has {'a' if len(fields) == 2 else 'no'} label, "
                f"unlike line {rows[0][0]}: label every line or none"
            )
    labels, classes = _read_labels(place, rows)
    names = [fields[0] for _, fields in rows]

    def where(position: int) -> str:
        return f"{place}, line {rows[position][0]}: "

    check_stores(place, names, where)
    return ListedFiles(names, labels, classes, where)


def _read_labels(list_file: str, rows: Rows) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    if len(rows[0][1]) == 1:
        return np.full(len(rows), NO_LABEL, dtype=np.int64), ()

    def describe(position: int) -> str:
        line, fields = rows[position]
        return f"{list_file}, line {line}: {fields[0]}"

    return number_labels([fields[1] for _, fields in rows], describe)


def number_labels(
    written: Sequence[str], describe: Callable[[int], str]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the label of each sample as a number, and the names of all: see `FileList`.

    written: of each sample, as text. describe: names a sample, for errors.
    Raises: DataError naming a sample whose label is empty, or a number below -1, which stands for no label, or large.
    """
    if (position := next((index for index, label in enumerate(written) if not label), None)) is not None:
        raise DataError(f"{describe(position)} has an empty label")
    if not all(label.removeprefix("-").isdecimal() for label in written):
        classes = sorted(set(written))
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers[label] for label in written], dtype=np.int64), tuple(classes)
    for position, label in enumerate(written):
        if len(label) > _LABEL_DIGITS or not NO_LABEL <= int(label) < MOST_CLASSES:
            raise DataError(
                f"{describe(position)} has label {label:.40}; a number must be in [0, {MOST_CLASSES:,}), or -1 for no "
                "label; anything else is written as a name"
            )
    labels = np.array([int(label) for label in written], dtype=np.int64)
    return labels, tuple(str(number) for number in range(int(labels.max()) + 1))


# `classes` has a name for every number up to the largest, so a number is not a hash or an identifier.
MOST_CLASSES = 1_000_000
_LABEL_DIGITS = 18
