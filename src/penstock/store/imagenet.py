"""ImageNet (ILSVRC2012) as it is distributed: which class a validation image has, and what classes are called."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError, PenstockError
from penstock.store.calls import Calls
from penstock.store.files import FileSource
from penstock.store.listing import ListedFiles, ListingArguments, catalog_of, list_files
from penstock.store.manifest import check_inside, check_once, folder_of_list
from penstock.store.object_store import is_address, joined
from penstock.store.patterns import place_of_paths
from penstock.store.remote import Objects
from penstock.store.text_rows import read_rows, read_text

#: The columns of LOC_val_solution.csv.
_IMAGE, _ANSWER = "ImageId", "PredictionString"
_ENDING = ".JPEG"
_VALIDATION = "ILSVRC2012_val_{:08}" + _ENDING
_META = "meta.mat"


class ImageNetVal(FileSource):
    """The validation images of ImageNet, all in one folder, with the labels that `ImageFolder` gives those of `train`.

    A label is the number of the class's WordNet id (wnid) among all of them, sorted.

    folder: with the images.
    truth: `LOC_val_solution.csv`, as Kaggle has it; or `ILSVRC2012_validation_ground_truth.txt` of the development kit,
        whose numbers `meta.mat` next to it explains (pip install scipy).
    names: a file with the name of each wnid, see `read_class_names`; then `classes` are these, and without it
        the wnids.
    All three may be addresses.
    refresh, calls, catalog, storage_options: as in `penstock.open_source`.

    Raises: DataError naming file and line for what cannot be read, an image that is missing or there twice, or an id
        that the names do not have.
    """

    labels: NDArray[np.int64]

    def __init__(
        self,
        folder: str | os.PathLike[str],
        truth: str | os.PathLike[str],
        *,
        names: str | os.PathLike[str] | None = None,
        **listing: Unpack[ListingArguments],
    ) -> None:
        self.list_file, self.place = place_of_paths(truth), place_of_paths(folder)
        place, objects = self.list_file, Objects(listing.get("storage_options"))
        listing["calls"] = calls = listing.get("calls") or Calls()
        known = None if names is None else calls.one(os.fspath(names), lambda: _class_names(names, objects))
        where, wnids = folder_of_list(place, folder), None if known is None else sorted(known)
        read = partial(_read_truth, where, wnids, objects)
        list_anew = partial(list_files, "ImageNetVal", read, place)
        opener = f"ImageNetVal({where!r}, {wnids!r})"
        catalog = catalog_of(opener, place, None, list_anew, objects, listing)
        super().__init__(os.path.dirname(place), catalog, objects)
        #: WordNet ids by label.
        self.wnids = catalog.classes
        if known is not None:
            self.classes = tuple(known[wnid] for wnid in self.wnids)


def read_class_names(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return what classes are called, by the names of their folders.

    path: or address, of text such as `LOC_synset_mapping.txt` (`n01440764 tench, Tinca tinca`); of JSON,
        {"n01440764": "tench"} or {"0": ["n01440764", "tench"]}; or of the `meta.mat` of ImageNet's development kit
        (pip install scipy).
    storage_options: of an address, as in `penstock.open_source`.
    Raises: DataError naming the file, and the line.
    """
    return _class_names(path, Objects(storage_options))


def _class_names(path: str | os.PathLike[str], objects: Objects) -> dict[str, str]:
    place = place_of_paths(path)
    if place.endswith(".mat"):
        return dict(read_synsets(place, objects).values())
    if place.endswith(".json"):
        return _names_of_json(place, objects)
    names: dict[str, str] = {}
    for number, line in enumerate(read_text(place, objects).splitlines(), 1):
        folder, _, name = line.strip().replace("\t", " ").partition(" ")
        if not folder:
            continue
        if not name.strip() or folder in names:
            what = "is there already" if folder in names else "has no name"
            raise DataError(
                f"{place}, line {number}: {folder} {what}: write the folder, a space and the name"
            )
        names[folder] = name.strip()
    if not names:
        raise DataError(f"{place} names no class: write a folder, a space and a name in each line")
    return names


def named_folders(folders: Sequence[str], path: str | os.PathLike[str], objects: Objects) -> tuple[str, ...]:
    """Return the names of classes by those of their folders. Raises: DataError for a folder without a name."""
    names = _class_names(path, objects)
    if lacking := [folder for folder in folders if folder not in names]:
        raise DataError(f"{os.fspath(path)} has no name for {lacking[0]}, a folder that is there: add it")
    return tuple(names[folder] for folder in folders)


def _names_of_json(place: str, objects: Objects) -> dict[str, str]:
    try:
        found: Any = json.loads(read_text(place, objects))
        pairs: list[Any] = [each if isinstance(each, list) else (key, each) for key, each in found.items()]
        names: dict[Any, Any] = dict(pairs)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{place} is no JSON of names by folders ({error!r:.100}): write it again") from error
    if not names or not all(isinstance(each, str) for pair in names.items() for each in pair):
        raise DataError(f"{place} names no class, or has values that are no text: write it again")
    return names


def read_synsets(place: str, objects: Objects) -> dict[int, tuple[str, str]]:
    """Return wnid and name of each class by its number in the development kit (ILSVRC2012_ID).

    Raises: ConfigError without scipy; DataError if the file is no such one.
    """
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise ConfigError(f"{place} is read by scipy, which is not installed: pip install scipy") from error
    try:
        file = io.BytesIO(objects.content(objects.facts([place])[0])) if is_address(place) else place
        rows = np.atleast_1d(loadmat(file, squeeze_me=True)["synsets"])
        leaves = [row for row in rows if not row["num_children"]]
        found = {int(row["ILSVRC2012_ID"]): (str(row["WNID"]), str(row["words"])) for row in leaves}
    except OSError as error:
        raise DataError(f"{place} cannot be read: {error.strerror or error}") from error
    except PenstockError:
        raise
    except Exception as error:  # whatever scipy makes of garbage
        raise DataError(
            f"{place} has no synsets as ImageNet's development kit has them ({error!r:.100})"
        ) from error
    if not found:
        raise DataError(f"{place} has no classes: take the meta.mat of ILSVRC2012_devkit_t12")
    return found


def _read_truth(folder: str, wnids: list[str] | None, objects: Objects, place: str) -> ListedFiles:
    """Return what a file of labels has. folder: of the images, relative to it. wnids: all that there are, sorted."""
    rows = read_rows(place, objects)

    def where(position: int) -> str:
        return f"{place}, line {lines[position]}: "

    if rows and rows[0][1][:2] == [_IMAGE, _ANSWER]:
        lines = [line for line, _ in rows[1:]]
        names, found = [], []
        for position, (_, fields) in enumerate(rows[1:]):
            answer = fields[1].split() if len(fields) == 2 else []
            if not answer or not fields[0]:
                raise DataError(f"{where(position)}{fields} is no image and its classes: correct the line")
            names.append(fields[0] + _ENDING)
            found.append(answer[0])
    else:
        lines = [line for line, _ in rows]
        synsets = read_synsets(joined(os.path.dirname(place), _META), objects)
        names = [_VALIDATION.format(number) for number in range(1, len(rows) + 1)]
        found = []
        for position, (_, fields) in enumerate(rows):
            text = fields[0]
            if len(fields) != 1 or not text.isdecimal() or len(text) > 9 or int(text) not in synsets:
                raise DataError(f"{where(position)}{text!r:.40} is no number of a class: correct the line")
            found.append(synsets[int(text)][0])
        wnids = wnids or sorted(wnid for wnid, _ in synsets.values())
    if not names:
        raise DataError(f"{place} names no image: take LOC_val_solution.csv or the development kit's file")
    check_inside(names, where)
    check_once(names, where)
    classes = sorted(set(found)) if wnids is None else wnids
    numbers = {wnid: number for number, wnid in enumerate(classes)}
    for position, wnid in enumerate(found):
        if wnid not in numbers:
            raise DataError(
                f"{where(position)}{wnid} is a class that names= does not have: correct one of the two"
            )
    labels = np.array([numbers[wnid] for wnid in found], np.int64)
    return ListedFiles([os.path.join(folder, name) for name in names], labels, tuple(classes), where)
