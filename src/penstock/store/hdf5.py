"""Data sets in HDF5 files: rows of one of their arrays, read by their places in the file, without h5py's lock.

Where rows are compressed, or cut by chunks, h5py decodes the chunks, which its lock allows one thread at a time.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError, PenstockError
from penstock.store.decoded import DECODED_MEMORY, DecodedFiles
from penstock.store.files import named_as
from penstock.store.group import Bytes, Ids
from penstock.store.labels import Labels, check_names
from penstock.store.packed import stats_of
from penstock.store.packed_listing import all_files_below, opened_object
from penstock.store.patterns import Paths, files_of, place_of_paths
from penstock.store.remote import Objects, RemoteFile, Window, objects_of
from penstock.store.rows import RowFiles, check_alike, copied_labels
from penstock.store.source import Numbers

#: How the names of HDF5 files usually end.
HDF5_ENDINGS = (".h5", ".hdf5", ".he5")

#: What arrays are usually called, the first that there is.
_USUAL_DATA = ("data", "images", "image", "features", "x", "X")
_USUAL_LABELS = ("labels", "label", "targets", "target", "y", "Y")
_AUTO = "auto"
#: Files that h5py keeps open to decode chunks of them.
_MOST_OPEN = 16


class Hdf5(DecodedFiles, RowFiles):
    """The rows of an array in HDF5 files; several files follow each other. It takes h5py to open them.

    paths: a path, a pattern such as "part-*.h5", a folder of .h5 files, or a list of these; with arrays of one dtype
        and shape of a row.
    data: the array whose rows are samples, by its path in the file, such as "train/images". Unless given, the first
        that there is of data, images, image, features, x and X, or the only one.
    labels: the array that has a label for each row; "auto" is the first that there is of labels, label, targets,
        target, y and Y, or none; an array of yours, or a dict of such. Without any, a batch is the rows alone.

    memory: for chunks that are decoded, not the loader's: those of an array that is compressed, by any filter that
        h5py has, or cut across its rows. All chunks of the same rows are decoded together, once for the samples that
        are read together. Rows that lie in the file as numbers are read from there.

    Raises: DataError naming the file if it is missing, no HDF5 file, has no such array, or chunks of it were never
        written; ConfigError for arrays in other files, and for chunks that are larger than memory.
    """

    units_are = "chunks"

    def __init__(
        self,
        paths: Paths,
        *,
        data: str | None = None,
        labels: str | NDArray[Any] | dict[str, NDArray[Any]] | None = _AUTO,
        memory: str | int = DECODED_MEMORY,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_names(data=data)
        place = place_of_paths(paths)
        objects = objects_of(place, storage_options)
        files = _files_of(place, objects)
        stats_of(files, objects)  # says what is missing
        found = [_look(path, data, labels if isinstance(labels, str) else None, objects) for path in files]
        first = found[0]
        check_alike(files, found)
        self._rows_of_a_place = np.array([each.rows_of_a_place for each in found], np.int64)
        #: Of each file, its first place among those of all.
        self._first_places = np.cumsum([0, *(each.places.size for each in found[:-1])])
        self._all_places = np.concatenate([each.places for each in found])
        #: Of each file, where its chunks lie, at addresses; see `_Found`.
        self._chunks = [each.chunks for each in found]
        self._arrays = _OpenArrays([each.name for each in found])
        super().__init__(
            place,
            files,
            [each.number for each in found],
            Numbers(first.dtype.str, first.shape, first.dtype.name),
            _labels_of(files, found, labels),
            facts=f"{first.name} {xxhash.xxh3_128_hexdigest(self._all_places.tobytes())}",
            objects=objects,
        )
        if not all(each.is_plain for each in found):
            rows = [
                np.minimum(
                    each.rows_of_a_place, each.number - each.rows_of_a_place * np.arange(each.places.size)
                )
                for each in found
            ]
            places = [each.places.size for each in found]
            self._decode_in(
                memory, np.concatenate(rows) * self.sample_bytes, np.repeat(np.arange(len(files)), places)
            )

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids]:
        files = np.searchsorted(self._ends, ids, side="right").astype(np.int64, copy=False)
        places, within = np.divmod(ids - self._firsts[files], self._rows_of_a_place[files])
        places += self._first_places[files]
        offsets, sizes = within * self.sample_bytes, np.full(ids.size, self.sample_bytes, np.int64)
        if self.decoded_units is None:
            return files, self._all_places[places] + offsets, sizes
        return places, offsets, sizes

    def _unit_named(self, unit: int) -> str:
        file = self._unit_files[unit]
        first = int((unit - self._first_places[file]) * self._rows_of_a_place[file])
        return f"the chunk from row {first:,} on"

    def _decode(self, unit: int, descriptor: int) -> Bytes:
        file = self._unit_files[unit]
        rows = int(self._rows_of_a_place[file])
        place = unit - int(self._first_places[file])
        first, remote, windows = place * rows, None, list[Window]()
        if self.objects is not None:
            remote = RemoteFile(self.objects, self.facts_of(file))
            windows = remote.fetched(self._chunks[file][place].tolist())
        try:
            found = self._arrays.read(file, remote or descriptor, windows, first, first + rows)
        except PenstockError:
            raise
        except Exception as error:  # as in `named_as`
            raise DataError(
                f"{self.files[file]}: {self._unit_named(unit)} cannot be decoded ({error}): write it again"
            ) from error
        return np.ascontiguousarray(found, self.numbers.dtype).reshape(-1).view(np.uint8)

    def close(self) -> None:
        super().close()
        self._arrays.close()


class _OpenArray(NamedTuple):
    """A file that h5py has open, and its array. remote: what h5py reads, where it is an object."""

    file: Any
    array: Any
    remote: RemoteFile | None


class _OpenArrays:
    """Arrays that stay open in h5py, of a few files. names: of the array in each file. Any thread may read."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        #: Protects `_open`, by file. h5py lets one thread read at a time anyway.
        self._lock = threading.Lock()
        self._open: dict[int, _OpenArray] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _OpenArrays, (self._names,)

    def read(
        self, file: int, opened: int | RemoteFile, windows: Sequence[Window], first: int, end: int
    ) -> Any:
        """Return rows of the array in a file that is open already.

        opened: its descriptor, or what reads the object, of which `windows` are here. Raises: OSError; DataError.
        """
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            found = self._open.get(file)
            if found is None:
                if len(self._open) >= _MOST_OPEN:
                    self._close_all()
                h5py: Any = importlib.import_module("h5py")
                remote = opened if isinstance(opened, RemoteFile) else None
                handle = h5py.File(remote or f"/proc/self/fd/{opened}", "r")
                found = self._open[file] = _OpenArray(handle, handle[self._names[file]], remote)
            if found.remote is not None:
                found.remote.keep(windows)
            try:
                return found.array[first:end]
            finally:
                if found.remote is not None:
                    found.remote.keep(())

    def close(self) -> None:
        """Close all. They are opened again by the next read."""
        with self._lock:
            self._close_all()

    def _close_all(self) -> None:
        while self._open:
            self._open.popitem()[1].file.close()


class _Found(NamedTuple):
    """An array in a file.

    name: of it. number: of rows. places: int64[...], where each piece of `rows_of_a_place` rows begins, in bytes.
    is_plain: whether rows lie there as numbers; else places are the least of their chunks, and only tell arrays apart.
    labels: of its rows; None where there are none. chunks: int64[places, chunks of each, 2], where chunks begin and
        end; of no places for an array that is not cut.
    """

    name: str
    number: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    places: Ids
    rows_of_a_place: int
    is_plain: bool
    chunks: Ids
    labels: NDArray[Any] | None


def are_hdf5(place: str) -> bool:
    """Return whether a place, of `place_of_paths`, is of HDF5 files by its name."""
    return place.lower().endswith(HDF5_ENDINGS)


def _files_of(place: str, objects: Objects | None) -> tuple[str, ...]:
    if objects is not None and "." in place.rpartition("/")[2]:
        return files_of(place, objects)  # also the name of one object may end in anything
    return all_files_below(place, [HDF5_ENDINGS], "HDF5 files", objects, are_any_named=True)


def _look(path: str, data: str | None, labels: str | None, objects: Objects | None) -> _Found:
    try:
        h5py: Any = importlib.import_module("h5py")
    except ImportError as error:
        raise ConfigError(
            f"{path} is an HDF5 file, which needs h5py: pip install 'penstock[hdf5]'"
        ) from error
    with named_as(path, "HDF5 file"):
        try:
            remote = None if objects is None else opened_object(objects, objects.facts([path])[0]).remote
            opened = h5py.File(remote or path, "r")
        except BlockingIOError as error:
            raise DataError(
                f"{path} is open for writing in another process: wait until it is closed there; where nobody "
                "writes, set HDF5_USE_FILE_LOCKING=FALSE in the environment"
            ) from error
        with opened as file:
            array = _array(path, file, h5py, data)
            places, rows, is_plain, chunks = _places_of(path, array)
            if is_plain:
                _compare(path, array, places, rows, remote)
            else:
                _try_to_decode(path, array)
            found = _labels_in(path, file, h5py, labels, len(array))
            return _Found(
                array.name, len(array), array.dtype, array.shape[1:], places, rows, is_plain, chunks, found
            )


def _array(path: str, file: Any, h5py: Any, data: str | None) -> Any:
    arrays: dict[str, Any] = {}
    file.visititems(lambda name, item: arrays.update({name: item} if isinstance(item, h5py.Dataset) else {}))
    has = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()) or "none"
    if data is None:
        alone = [name for name in arrays if name not in _USUAL_LABELS]
        usual = [name for name in _USUAL_DATA if name in arrays] or (alone if len(alone) == 1 else [])
        if not usual:
            _refuse_links(path, file, h5py, _USUAL_DATA)
            raise ConfigError(
                f"{path} does not tell which array has the samples: it has {has}; give data= to penstock.store.Hdf5"
            )
        data = usual[0]
    array = arrays.get(data.strip("/"))
    if array is None:
        _refuse_links(path, file, h5py, [data])
        raise DataError(f"{path} has no array {data!r}: it has {has}")
    if not array.shape or not len(array) or not array.size:
        raise DataError(f"{path}: {data} has the shape {list(array.shape)}; samples are rows, one at least")
    if array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{path}: {data} has {array.dtype}; rows are real numbers, all of one length: write others, such as JPEG "
            "files, as tar shards or Parquet, or give a data set that asks h5py for them"
        )
    return array


def _refuse_links(path: str, file: Any, h5py: Any, names: Sequence[str]) -> None:
    for name in names:
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise ConfigError(
                f"{path}: {name} lies in another file, {link.filename}: give that, or a copy with all in it"
            )


def _places_of(path: str, array: Any) -> tuple[Ids, int, bool, Ids]:
    """Return where the pieces of an array lie, how many rows each has, whether they are plain rows, and its chunks."""
    if array.is_virtual or array.external:
        raise ConfigError(f"{path}: {array.name} lies in other files: give those, or a copy with all in it")
    if array.chunks is None:
        offset = array.id.get_offset()
        if offset is None:  # compact, or never written
            raise ConfigError(
                f"{path}: {array.name} lies in no place of its own: h5repack -f NONE -l CONTI {path} OUT writes it so"
            )
        return np.array([offset], np.int64), len(array), True, np.empty((0, 0, 2), np.int64)
    rows, across = array.chunks[0], 1
    for size, chunk_size in zip(array.shape[1:], array.chunks[1:], strict=True):
        across *= -(-size // chunk_size)
    infos = map(array.id.get_chunk_info, range(array.id.get_num_chunks()))
    found = np.array(
        sorted((each.chunk_offset[0] // rows, each.byte_offset, each.size) for each in infos), np.int64
    ).reshape(-1, 3)
    # As many as there are, not as many as the file says.
    places, counts = np.unique(found[:, 0], return_counts=True)
    is_there = (places == np.arange(places.size)) & (counts == across)
    whole = int(is_there.argmin()) if not is_there.all() else places.size
    if whole < -(-len(array) // rows):
        raise DataError(
            f"{path}: {array.name} was never written from row {whole * rows:,} on: write it, or give a part of it"
        )
    chunks = np.stack((found[:, 1], found[:, 1] + found[:, 2]), axis=1).reshape(-1, across, 2)
    is_plain = across == 1 and not array.id.get_create_plist().get_nfilters()
    return chunks[:, :, 0].min(axis=1), int(rows), is_plain, chunks


def _compare(path: str, array: Any, places: Ids, rows: int, remote: RemoteFile | None) -> None:
    """Raise ConfigError unless the first and the last row lie where they should."""
    with open(path, "rb") if remote is None else contextlib.nullcontext(remote) as file:
        for row in (0, len(array) - 1):
            expected = np.ascontiguousarray(array[row]).tobytes()
            file.seek(int(places[row // rows]) + row % rows * len(expected))
            if file.read(len(expected)) != expected:
                raise ConfigError(
                    f"{path}: row {row:,} of {array.name} does not lie where h5py says: `h5repack {path} OUT` writes a "
                    "file that is read"
                )


def _try_to_decode(path: str, array: Any) -> None:
    try:
        array[0]
    except OSError as error:
        raise DataError(
            f"{path}: {array.name} cannot be decoded ({error}): `import hdf5plugin` brings more filters, and `h5repack "
            f"-f NONE {path} OUT` writes it without, where they are installed"
        ) from error


def _labels_in(path: str, file: Any, h5py: Any, labels: str | None, number: int) -> NDArray[Any] | None:
    if labels == _AUTO:
        labels = next((name for name in _USUAL_LABELS if isinstance(file.get(name), h5py.Dataset)), None)
    if labels is None:
        return None
    array = file.get(labels)
    if not isinstance(array, h5py.Dataset) or not array.shape or len(array) != number:
        is_there = isinstance(array, h5py.Dataset)
        what = f"{labels!r} of shape {list(array.shape)}" if is_there else f"no array {labels!r}"
        raise DataError(
            f"{path} has {what}; labels are an array with {number:,} rows, one for each sample: give labels= to "
            "penstock.store.Hdf5, None for no labels"
        )
    found: NDArray[Any] = array[()]
    return found


def _labels_of(files: Sequence[str], found: Sequence[_Found], labels: Any) -> Labels:
    if labels is not None and not isinstance(labels, str):
        return copied_labels(labels)
    parts = [each.labels for each in found if each.labels is not None]
    if not parts:
        return {}
    if len(parts) < len(found):
        path = next(path for path, each in zip(files, found, strict=True) if each.labels is None)
        raise DataError(
            f"{path} has no labels, unlike others: label all files, or give labels=None to penstock.store.Hdf5"
        )
    return np.concatenate(parts)
