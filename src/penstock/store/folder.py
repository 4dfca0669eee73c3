"""Data sets of plain files: which files there are, in which order, with which labels."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import cache, partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.store.arrays import Arrays, are_arrays
from penstock.store.arrow import ARROW_ENDINGS, ArrowFiles, list_arrow
from penstock.store.calls import Calls
from penstock.store.catalog import Catalog
from penstock.store.files import FileSource
from penstock.store.hdf5 import HDF5_ENDINGS, Hdf5, are_hdf5
from penstock.store.imagenet import named_folders
from penstock.store.json_lines import JsonLines, files_of_lines, first_entry, list_lines
from penstock.store.listing import (
    COMPRESSED,
    IMAGE_EXTENSIONS,
    Asking,
    ListingArguments,
    Refresh,
    catalog_of,
    list_files,
    list_folder,
    read_list,
)
from penstock.store.litdata import LitDataChunks, is_litdata, list_litdata
from penstock.store.manifest import Manifest, file_named_by, is_manifest, read_manifest
from penstock.store.mosaic import MosaicShards, is_mosaic, list_mosaic
from penstock.store.object_store import is_address
from penstock.store.packed import PackedFiles
from penstock.store.packed_listing import are_of_kind, files_alone
from penstock.store.parquet import PARQUET_ENDINGS, ParquetFiles, list_parquet
from penstock.store.patterns import Paths, brief, files_of, is_of_several, place_of_paths
from penstock.store.remote import Objects, objects_of
from penstock.store.row_shards import front_of_index
from penstock.store.shards import TAR_KINDS, TarShards, list_shards
from penstock.store.text_rows import JSON_ADVICE, JSON_LINES
from penstock.store.tfrecords import TFRecords, are_records, list_records


class ImageFolder(FileSource):
    """A folder with one subfolder per label, each with files at any depth below it.

    Samples are numbered by label, then folder, then name, and labels by the names of their folders, as
    torchvision's ImageFolder does. Hidden files and folders (`.name`) are left out, which torchvision does
    not; so are files that lie next to the label folders, which it does too.

    root: the folder that holds the label folders.
    extensions: endings of the files that are samples, in any case; None takes every file.
    names: a file with a name for each label folder, such as ImageNet's `LOC_synset_mapping.txt`: then `classes` are
        these names. See `penstock.store.read_class_names`.
    classes: the names of labels in the order of their numbers, such as those of the training's source; an error for
        others. Sorted by name unless given.
    refresh, calls, catalog, storage_options: as in `open_source`.
    Raises: DataError naming the folder if it is missing, no folder, not allowed, has no label folders, or one
        of them has no samples; naming the file if it is a link to nothing or no regular file.
    """

    labels: NDArray[np.int64]

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        extensions: Collection[str] | None = IMAGE_EXTENSIONS,
        names: str | os.PathLike[str] | None = None,
        classes: Sequence[str] | None = None,
        **listing: Unpack[ListingArguments],
    ) -> None:
        place = place_of_paths(root)
        options = listing.get("storage_options")
        objects = objects_of(place, options)
        list_anew = partial(list_folder, "ImageFolder", place)
        listing["calls"] = calls = listing.get("calls") or Calls()
        catalog = catalog_of("ImageFolder", place, extensions, list_anew, objects, listing)
        super().__init__(place, catalog, objects)
        if names is not None:
            where = objects or Objects(options)
            self.classes = calls.one(os.fspath(names), lambda: named_folders(self.classes, names, where))
        self._take_classes(classes)


class FlatFolder(FileSource):
    """A folder of files without labels: every label is -1, and samples are numbered by name.

    Subfolders and hidden files (`.name`) are left out.

    root: the folder that holds the files.
    extensions: endings of the files that are samples, in any case; None takes every file.
    refresh, calls, catalog, storage_options: as in `open_source`.
    Raises: DataError naming the folder if it is missing, no folder, not allowed or has no samples; naming the
        file if it is a link to nothing or no regular file.
    """

    labels: NDArray[np.int64]

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        extensions: Collection[str] | None = IMAGE_EXTENSIONS,
        **listing: Unpack[ListingArguments],
    ) -> None:
        place = place_of_paths(root)
        objects = objects_of(place, listing.get("storage_options"))
        list_anew = partial(list_folder, "FlatFolder", place)
        catalog = catalog_of("FlatFolder", place, extensions, list_anew, objects, listing)
        super().__init__(place, catalog, objects)


class FileList(FileSource):
    """The files that a text or CSV file lists, in its order: one a line, `path` or `path,label`.

    Paths are relative to the list's own folder, or absolute; a path may occur more than once. A path with a
    comma is quoted as in CSV; where the first line has a tab, tabs separate and commas are ordinary. A first
    line `path` or `path,label` is a heading. Labels are integers, taken as they are (`classes` are then
    their digits), or names, numbered in sorted order. Either every line has a label or none.

    list_file: UTF-8 text.
    classes: the names of labels in the order of their numbers, such as those of the training's source; an error for
        others. Sorted by name unless given.
    refresh, calls, catalog, storage_options: as in `open_source`.
    Raises: DataError naming the list and the line if the list cannot be read, is empty, a file is missing or
        no regular file, or a label is missing or negative.
    """

    labels: NDArray[np.int64]

    def __init__(
        self,
        list_file: str | os.PathLike[str],
        *,
        classes: Sequence[str] | None = None,
        **listing: Unpack[ListingArguments],
    ) -> None:
        self.list_file = place = place_of_paths(list_file)
        # A list on this host may be of addresses.
        objects = Objects(listing.get("storage_options"))
        list_anew = partial(list_files, "FileList", partial(read_list, objects=objects), place)
        catalog = catalog_of("FileList", place, None, list_anew, objects, listing)
        super().__init__(os.path.dirname(place), catalog, objects)
        self._take_classes(classes)


#: What a catalog lists.
Kind = type[
    ImageFolder
    | FlatFolder
    | FileList
    | Manifest
    | TarShards
    | TFRecords
    | MosaicShards
    | ArrowFiles
    | ParquetFiles
    | LitDataChunks
    | JsonLines
]

_KINDS: tuple[Kind, ...] = (
    ImageFolder,
    FlatFolder,
    FileList,
    Manifest,
    TarShards,
    TFRecords,
    MosaicShards,
    ArrowFiles,
    ParquetFiles,
    LitDataChunks,
    JsonLines,
)

#: How the names of lists end that are on a remote store.
_LIST_ENDINGS = (".txt", ".csv", ".tsv", ".lst", ".list", *JSON_LINES)
_PICKLED = (
    "is not read, as what is pickled in it would be run: write numbers by numpy.save, and open the .npy files"
)
#: By the end of a file's name, why it is not opened.
_NOT_READ = {
    ".npz": "has compressed arrays, of which no row can be read by itself: write each by numpy.save, and open the .npy "
    "files",
    ".bin": "does not say what numbers are in it: open it with penstock.store.Records(path, dtype, shape), or "
    "Tokens(path, length=, dtype=) for a language model",
    ".json": f"is JSON: {JSON_ADVICE}",
    ".zip": "is an archive, which is not read: unpack it, or write what is in it as tar shards",
    ".safetensors": "has tensors, and is not read: write them by numpy.save, and open the .npy files",
    **dict.fromkeys((".pt", ".pth", ".pkl", ".pickle"), _PICKLED),
    **COMPRESSED,
}


def open_source(
    path: Paths,
    *,
    extensions: Collection[str] | None = IMAGE_EXTENSIONS,
    refresh: Refresh = "auto",
    calls: Calls | None = None,
    catalog: Catalog | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> FileSource | PackedFiles:
    """Open a data set by what is found at a path, by a pattern, or at each path of a list.

    A folder with subfolders becomes an `ImageFolder`, one without a `FlatFolder`, one with nothing but tars, a tar
    file, or a pattern for some, `TarShards`, likewise of Parquet files `ParquetFiles`, .tfrecord files `TFRecords`, a
    folder of MDS shards `MosaicShards`, of LitData's chunks `LitDataChunks`, .arrow files `ArrowFiles`, .h5 files
    `Hdf5`, .npy files `Arrays`, JSON lines `JsonLines`, but a file of them whose first names a picture, or the path of
    a file that there is, and a CSV file whose heading names a column of files a `Manifest`, any other file a
    `FileList`. Of JSON lines it reports which it took. A `~` at its beginning is the home folder. The file system is
    asked on threads, so that Ctrl-C ends the wait for one that does not answer.

    What was found is kept for the next time, as a catalog (docs/howto/list-once.md).
    extensions: of a folder of files, the endings of those that are samples, in any case; None takes every file.
    refresh: "auto" looks at every folder and shard, and lists those that changed. It does not see that a file was
        overwritten in place; if its size is another, reading it fails. "full" lists everything anew. "never" takes the
        catalog as it is, if there is one.
    calls: whose threads ask the file system; a loader gives its own, which report long waits.
    catalog: of the same data set, such as another rank's: nothing is listed then.
    storage_options: of an address, such as s3://bucket/train: as fsspec's driver for it takes them, and retry_seconds,
        for how long a request that fails is made again, 900 unless given (docs/howto/remote-stores.md).
    options: arguments of the class that shards, tables or arrays become, by name, such as {"member": "png", "label":
        "json:class"} of `TarShards` and {"sample": "jpg"} of `ParquetFiles`.
    Raises: DataError as those; ConfigError where images lie next to subfolders, so that it could be either, for what is
        no path, and for options that the class does not have.
    """
    place = place_of_paths(path)
    calls = calls or Calls()
    objects = objects_of(place, storage_options) if is_address(place) else None
    if storage_options and objects is None:
        # What a list on this host names may be addresses.
        objects_of(place, None if place.lower().endswith(_LIST_ENDINGS) else storage_options)
        objects = Objects(storage_options)
    kind: type[PackedFiles] | None = Arrays if are_arrays(place) else Hdf5 if are_hdf5(place) else None
    listing: ListingArguments = {"refresh": refresh, "calls": calls, "catalog": catalog}
    with closing(objects) if objects is not None else nullcontext():  # a source reads by objects of its own
        if options:
            kind = kind or _kind_at(place, calls, objects if is_address(place) else None)
            _check_options(place, kind, options)
        if kind is None:
            try:
                found = catalog_of(
                    "open_source", place, extensions, partial(_list_any, place), objects, listing
                )
            except _WithoutCatalog as error:
                kind = error.kind
    if kind is not None:
        is_listed = kind not in (Arrays, Hdf5)
        given: dict[str, Any] = {
            "storage_options": storage_options,
            **(listing if is_listed else {}),
            **(options or {}),
        }
        make: Any = partial(kind, path, **given)  # type: ignore[arg-type]  # whose first argument is paths
        opened: PackedFiles = make() if is_listed else calls.one(place, make)
        return opened
    listed = next((each for each in _KINDS if each.__name__ == found.kind), None)
    if listed is None:
        raise ConfigError(
            f"catalog is of {found.kind}, which open_source does not open: give it to {found.kind}"
        )
    return listed(place, calls=calls, catalog=found, storage_options=storage_options)


#: Lists what each class is of, as `open_source` has it.
_LISTERS: dict[type[PackedFiles], Callable[[str, Asking], Catalog]] = {
    TarShards: lambda place, asking: list_shards(place, IMAGE_EXTENSIONS, False, "cls", asking),
    ArrowFiles: lambda place, asking: list_arrow(place, None, "auto", asking),
    ParquetFiles: lambda place, asking: list_parquet(place, None, "auto", asking),
    MosaicShards: lambda place, asking: list_mosaic(place, None, "auto", asking),
    LitDataChunks: lambda place, asking: list_litdata(place, None, "auto", asking),
    TFRecords: lambda place, asking: list_records(place, None, "auto", asking),
    JsonLines: list_lines,
}


class _WithoutCatalog(Exception):
    """What is at a place is opened without listing it. kind: the class that opens it."""

    def __init__(self, kind: type[PackedFiles]) -> None:
        super().__init__(kind.__name__)
        self.kind = kind


def _check_options(place: str, kind: type[PackedFiles] | None, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that the class that opens a place does not have. kind: None for pictures."""
    if kind is None:
        raise ConfigError(
            f"options ({', '.join(options)}) are of shards, tables and arrays, and {brief(place)} is none: open it by "
            "its class, such as penstock.store.Manifest"
        )
    _, *known = (
        each.name for each in inspect.signature(kind).parameters.values() if each.kind != each.VAR_KEYWORD
    )
    known = [name for name in known if name not in ListingArguments.__annotations__]
    if wrong := next((name for name in options if name not in known), None):
        raise ConfigError(
            f"options has {wrong!r}, and {brief(place)} is opened by {kind.__name__}, which takes "
            f"{', '.join(known) or 'none'}"
        )


def _kind_at(place: str, calls: Calls, objects: Objects | None) -> type[PackedFiles] | None:
    """Return the class that opens the shards or tables at a place; None where there are others, or pictures."""
    look = cache(partial(files_alone, objects=objects))
    by_endings: tuple[tuple[type[PackedFiles], tuple[tuple[str, ...], ...]], ...] = (
        (TarShards, TAR_KINDS),
        (Hdf5, (HDF5_ENDINGS,)),
        (ArrowFiles, (ARROW_ENDINGS,)),
        (ParquetFiles, (PARQUET_ENDINGS,)),
    )
    for kind, endings in by_endings:
        if calls.one(place, partial(are_of_kind, place, endings, objects, look)):
            return kind
    front = calls.one(place, lambda: front_of_index(place, objects))
    if is_mosaic(front):
        return MosaicShards
    if is_litdata(front):
        return LitDataChunks
    if calls.one(place, lambda: are_records(place, objects, look)):
        return TFRecords
    are_lines = calls.one(place, partial(are_of_kind, place, (JSON_LINES,), objects, look))
    return JsonLines if are_lines and not calls.one(place, partial(_file_listed, place, objects)) else None


def _file_listed(place: str, objects: Objects | None) -> str:
    """Return the file that the first line of JSON lines at a place names; "" where these are samples themselves.

    Raises: ConfigError where a folder or a pattern is of lines that name files.
    """
    path = files_of_lines(place, objects)[0]
    name = file_named_by(first_entry(path, objects), path, objects)
    if name and path != place:
        raise ConfigError(
            f"{path} names a file, {name:.80}, in its first line: give that path for the samples that it lists, or "
            "open the lines themselves by penstock.store.JsonLines"
        )
    return name


def _list_any(place: str, asking: Asking) -> Catalog:
    """List what is found at a place."""
    objects = asking.objects if is_address(place) else None
    if (kind := _kind_at(place, asking.calls, objects)) is not None:
        if kind not in _LISTERS:
            raise _WithoutCatalog(kind)
        if kind is JsonLines and asking.old is None:
            asking.calls.report(
                f"{brief(place)}: each line is a sample (JsonLines), as the first names no picture, and no path of a "
                "file that there is; for a table of files give penstock.store.Manifest(path, file=COLUMN)"
            )
        return _LISTERS[kind](place, asking)
    ending = os.path.splitext(place)[1].lower()
    if ending in _NOT_READ and not os.path.isdir(place):
        raise ConfigError(f"{brief(place)} {_NOT_READ[ending]}")
    if ending in IMAGE_EXTENSIONS and objects is None and os.path.isfile(place):
        raise ConfigError(f"{place} is one picture: give its folder, or a list file with one path a line")
    if is_of_several(place):
        first = files_of(place, objects)[0]
        raise ConfigError(
            f"{brief(place)} is several files, and {first} is no tar or TFRecord: give a folder, or a list file with "
            "one path a line, for pictures, or a source of penstock.store for numbers"
        )
    if asking.calls.one(place, lambda: _is_file(place, objects)):
        if asking.calls.one(place, lambda: is_manifest(place, objects)):
            if place.lower().endswith(JSON_LINES) and asking.old is None:
                asking.calls.report(
                    f"{place}: a sample is the file that a line names (Manifest); for the lines themselves give "
                    "penstock.store.JsonLines(path)"
                )
            return list_files("Manifest", partial(read_manifest, objects=objects), place, asking)
        read = partial(read_list, objects=objects)
        return list_files("FileList", read, place, asking)
    return list_folder(None, place, asking)


def _is_file(place: str, objects: Objects | None) -> bool:
    if objects is None:
        return os.path.isfile(place)
    # A web server answers for a folder, too.
    return place.lower().endswith(_LIST_ENDINGS) and objects.find(place) is not None
