"""Data sets in HDF5 files: rows of one of their arrays, read by their places in the file, without h5py's lock."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.group import Ids
from penstock.store.labels import Labels
from penstock.store.packed import stats_of
from penstock.store.patterns import Paths, files_of, place_of_paths
from penstock.store.rows import RowFiles, check_alike, copied_labels
from penstock.store.source import Numbers

#: How the names of HDF5 files usually end.
HDF5_ENDINGS = (".h5", ".hdf5", ".he5")

#: What arrays are usually called, the first that there is.
_USUAL_DATA = ("data", "images", "image", "features", "x", "X")
_USUAL_LABELS = ("labels", "label", "targets", "target", "y", "Y")
_AUTO = "auto"


class Hdf5(RowFiles):
    """The rows of an array in HDF5 files; several files follow each other. It takes h5py to open them.

    paths: a path, a pattern such as "part-*.h5", or a list of these; with arrays of one dtype and shape of a row.
    data: the array whose rows are samples, by its path in the file, such as "train/images". Unless given, the first
        that there is of data, images, image, features, x and X, or the only one.
    labels: the array that has a label for each row; "auto" is the first that there is of labels, label, targets,
        target, y and Y, or none; an array of yours, or a dict of such. Without any, a batch is the rows alone.

    Rows lie in the file as numbers: in one piece, or in chunks that hold whole rows.

    Raises: DataError naming the file if it is missing, no HDF5 file, has no such array, or chunks of it were never
        written; ConfigError for arrays that are compressed or cut across rows, with how to write them anew.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        data: str | None = None,
        labels: str | NDArray[Any] | dict[str, NDArray[Any]] | None = _AUTO,
    ) -> None:
        place = place_of_paths(paths)
        files = files_of(place)
        stats_of(files)  # says what is missing
        found = [_look(path, data, labels if isinstance(labels, str) else None) for path in files]
        first = found[0]
        check_alike(files, found)
        self._places = [each.places for each in found]
        self._rows_of_a_place = np.array([each.rows_of_a_place for each in found], np.int64)
        #: Of each file, its first place among those of all.
        self._first_places = np.cumsum([0, *(each.places.size for each in found[:-1])])
        self._all_places = np.concatenate(self._places)
        super().__init__(
            place,
            files,
            [each.number for each in found],
            Numbers(first.dtype.str, first.shape, first.dtype.name),
            _labels_of(files, found, labels),
            facts=f"{first.name} {xxhash.xxh3_128_hexdigest(self._all_places.tobytes())}",
        )

    def _offsets(self, units: Ids, rows: Ids) -> Ids:
        places, within = np.divmod(rows, self._rows_of_a_place[units])
        found: Ids = self._all_places[self._first_places[units] + places] + within * self.sample_bytes
        return found


class _Found(NamedTuple):
    """An array in a file.

    name: of it. number: of rows. places: int64[...], where each piece of `rows_of_a_place` rows begins, in bytes.
    labels: of its rows; None where there are none.
    """

    name: str
    number: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    places: Ids
    rows_of_a_place: int
    labels: NDArray[Any] | None


def are_hdf5(place: str) -> bool:
    """Return whether a place, of `place_of_paths`, is of HDF5 files by its name."""
    return place.lower().endswith(HDF5_ENDINGS)


def _look(path: str, data: str | None, labels: str | None) -> _Found:
    try:
        h5py: Any = importlib.import_module("h5py")
    except ImportError as error:
        raise ConfigError(
            f"{path} is an HDF5 file, which needs h5py: pip install 'penstock[hdf5]'"
        ) from error
    try:
        with h5py.File(path, "r") as file:
            array = _array(path, file, h5py, data)
            places, rows = _places_of(path, array)
            _compare(path, array, places, rows)
            found = _labels_in(path, file, h5py, labels, len(array))
            return _Found(array.name, len(array), array.dtype, array.shape[1:], places, rows, found)
    except DataError:  # an OSError itself, which says what is wrong
        raise
    except OSError as error:
        raise DataError(f"{path} is no complete HDF5 file: {error}; write it again") from error


def _array(path: str, file: Any, h5py: Any, data: str | None) -> Any:
    arrays: dict[str, Any] = {}
    file.visititems(lambda name, item: arrays.update({name: item} if isinstance(item, h5py.Dataset) else {}))
    has = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()) or "none"
    if data is None:
        alone = [name for name in arrays if name not in _USUAL_LABELS]
        usual = [name for name in _USUAL_DATA if name in arrays] or (alone if len(alone) == 1 else [])
        if not usual:
            raise ConfigError(
                f"{path} does not tell which array has the samples: it has {has}; give data= to penstock.store.Hdf5"
            )
        data = usual[0]
    array = arrays.get(data.strip("/"))
    if array is None:
        raise DataError(f"{path} has no array {data!r}: it has {has}")
    if not array.shape or not len(array) or not array.size:
        raise DataError(f"{path}: {data} has the shape {list(array.shape)}; samples are rows, one at least")
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{path}: {data} has {array.dtype}; rows are real numbers")
    return array


def _places_of(path: str, array: Any) -> tuple[Ids, int]:
    """Return where the pieces of an array lie, and how many rows each has."""
    file_of = f"h5repack -f NONE {path} OUT"
    if array.is_virtual or array.external:
        raise ConfigError(f"{path}: {array.name} lies in other files: give those, or a copy with all in it")
    if array.chunks is None:
        offset = array.id.get_offset()
        if offset is None:  # compact, or never written
            raise ConfigError(
                f"{path}: {array.name} lies in no place of its own: {file_of} -l CONTI writes it so"
            )
        return np.array([offset], np.int64), len(array)
    if array.id.get_create_plist().get_nfilters():
        raise ConfigError(
            f"{path}: {array.name} is compressed ({array.compression or 'a filter'}), so that no row can be read "
            f"without those round it: `{file_of}` writes it as it is; pictures are compressed themselves"
        )
    rows = array.chunks[0]
    if array.chunks[1:] != array.shape[1:]:
        raise ConfigError(
            f"{path}: {array.name} is in chunks of {list(array.chunks)}, which cut rows of {list(array.shape[1:])}: "
            f"`{file_of} -l CONTI` writes them in one piece"
        )
    places = np.full(-(-len(array) // rows), -1, np.int64)
    for index in range(array.id.get_num_chunks()):
        chunk = array.id.get_chunk_info(index)
        places[chunk.chunk_offset[0] // rows] = chunk.byte_offset
    if (places < 0).any():
        row = int((places < 0).argmax()) * rows
        raise DataError(
            f"{path}: {array.name} was never written from row {row:,} on: write it, or give a part of it"
        )
    return places, int(rows)


def _compare(path: str, array: Any, places: Ids, rows: int) -> None:
    """Raise ConfigError unless the first and the last row lie where they should."""
    with open(path, "rb") as file:
        for row in (0, len(array) - 1):
            expected = np.ascontiguousarray(array[row]).tobytes()
            file.seek(int(places[row // rows]) + row % rows * len(expected))
            if file.read(len(expected)) != expected:
                raise ConfigError(
                    f"{path}: row {row:,} of {array.name} does not lie where h5py says: `h5repack {path} OUT` writes a "
                    "file that is read"
                )


def _labels_in(path: str, file: Any, h5py: Any, labels: str | None, number: int) -> NDArray[Any] | None:
    if labels == _AUTO:
        labels = next((name for name in _USUAL_LABELS if isinstance(file.get(name), h5py.Dataset)), None)
    if labels is None:
        return None
    array = file.get(labels)
    if not isinstance(array, h5py.Dataset) or not array.shape or len(array) != number:
        raise DataError(f"{path} has no array {labels!r} with {number:,} rows, a label for each sample")
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
