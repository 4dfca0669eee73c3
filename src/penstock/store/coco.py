"""Images that a COCO file lists, with what can be said of each as numbers of one shape."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.files import FileSource
from penstock.store.listing import ListedFiles, ListingArguments, catalog_of, list_files
from penstock.store.manifest import check_inside, check_once, check_tags, folder_of_list
from penstock.store.patterns import place_of_paths
from penstock.store.remote import Objects
from penstock.store.text_rows import read_text
from penstock.units import is_integer

CocoLabels = Literal["categories", "category"]


class CocoImages(FileSource):
    """The images of a COCO file, in its order: `instances_train2017.json` and its like.

    annotations: the file, or its address. folder: with the images that it names, or its address.
    labels: "categories" gives dicts: `categories`, uint8[classes], 1 for each that an annotation of the image has, and
        `image_id`, int64, by which boxes and masks are found in a COCO file. "category" is for classification:
        one label, int64, where each image has one category.
    refresh, calls, catalog, storage_options: as in `penstock.open_source`.

    `classes` are the names of the categories, in the order of their ids. Boxes, masks and keypoints are as many as an
    image has: docs/howto/transforms.md has a data set that gives boxes.

    Raises: DataError naming the file and the image or annotation for what is missing, there twice, or of an unknown
        image or category.
    """

    def __init__(
        self,
        annotations: str | os.PathLike[str],
        folder: str | os.PathLike[str],
        *,
        labels: CocoLabels = "categories",
        **listing: Unpack[ListingArguments],
    ) -> None:
        if labels not in ("categories", "category"):
            raise ConfigError(
                f'labels is {labels!r}; it is "categories" (of each image, several) or "category" (one)'
            )
        self.list_file = place = place_of_paths(annotations)
        self.place = place_of_paths(folder)
        # A file on this host may be of images at addresses.
        objects = Objects(listing.get("storage_options"))
        where = folder_of_list(place, folder)
        list_anew = partial(list_files, "CocoImages", partial(_read, where, labels, objects), place)
        opener = f"CocoImages({where!r}, {labels!r})"
        catalog = catalog_of(opener, place, None, list_anew, objects, listing)
        super().__init__(os.path.dirname(place), catalog, objects)


def _read(folder: str, labels: CocoLabels, objects: Objects, place: str) -> ListedFiles:
    try:
        found: Any = json.loads(read_text(place, objects))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is no JSON ({error}): copy or write it again") from error
    images, annotations, categories = (
        _list_of(place, found, name) for name in ("images", "annotations", "categories")
    )
    if not images:
        raise DataError(f"{place} lists no images: give a file that has some")

    def where(position: int) -> str:
        return f"{place}, image {images[position]['id']}: "

    names, positions = [], _by_id(place, "image", images)
    for position, image in enumerate(images):
        name = image.get("file_name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{where(position)}file_name is {name!r:.80}; it is a path")
        names.append(name)
    check_inside(names, where)
    paths = [os.path.join(folder, name) for name in names]
    check_once(paths, where)
    in_order = sorted((number, at) for number, at in _by_id(place, "category", categories).items())
    numbers = {number: label for label, (number, _) in enumerate(in_order)}
    classes = tuple(str(categories[at].get("name", number)) for number, at in in_order)
    pairs = np.array(
        [_pair_of(place, number, each, positions, numbers) for number, each in enumerate(annotations)],
        np.int64,
    ).reshape(-1, 2)
    if labels == "category":
        return ListedFiles(paths, _one_each(pairs, len(images), where), classes, where)
    check_tags(len(images), len(classes), "categories")
    tags = np.zeros((len(images), len(classes)), np.uint8)
    tags[pairs[:, 0], pairs[:, 1]] = 1
    ids = np.array([image["id"] for image in images], np.int64)
    return ListedFiles(paths, {"categories": tags, "image_id": ids}, classes, where, {"categories": classes})


def _list_of(place: str, found: Any, name: str) -> list[dict[str, Any]]:
    values = found.get(name) if isinstance(found, dict) else None
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise DataError(f"{place} has no list of {name}: it is no COCO file of images and categories")
    return values


def _by_id(place: str, what: str, found: list[dict[str, Any]]) -> dict[int, int]:
    """Return the position of each by its id."""
    positions: dict[int, int] = {}
    for position, each in enumerate(found):
        number = each.get("id")
        if not is_integer(number) or abs(number) >= 2**63:
            raise DataError(
                f"{place}, {what} {position:,} of the list: id is {number!r:.40}; it is an integer"
            )
        if number in positions:
            raise DataError(f"{place}, {what} {number}: is there twice; correct the file")
        positions[number] = position
    return positions


def _pair_of(
    place: str, number: int, annotation: dict[str, Any], images: dict[int, int], categories: dict[int, int]
) -> tuple[int, int]:
    """Return the positions of an annotation's image and category."""
    found = []
    for name, known in (("image_id", images), ("category_id", categories)):
        value = annotation.get(name)
        if not is_integer(value) or value not in known:
            raise DataError(
                f"{place}, annotation {annotation.get('id', number)}: {name} is {value!r:.40}, and the "
                "file has no such one: correct it"
            )
        found.append(known[value])
    return found[0], found[1]


def _one_each(pairs: NDArray[np.int64], images: int, where: Callable[[int], str]) -> NDArray[np.int64]:
    """Return the only category of each image. Raises: DataError for an image with none or several."""
    pairs = np.unique(pairs, axis=0)
    counts = np.bincount(pairs[:, 0], minlength=images)
    if (wrong := np.flatnonzero(counts != 1)).size:
        raise DataError(
            f'{where(int(wrong[0]))}has {counts[wrong[0]]} categories, and labels="category" takes one: leave it out'
        )
    labels: NDArray[np.int64] = pairs[:, 1].copy()
    return labels
