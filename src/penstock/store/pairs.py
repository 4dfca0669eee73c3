"""Images and their masks, in two folders, as one source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.calls import Calls
from penstock.store.folder import open_source
from penstock.store.group import Bytes, Failed, Ids, check_group, observer, prepare_group, read_group
from penstock.store.listing import Refresh
from penstock.store.mixing import MixedSource
from penstock.store.remote import Objects, objects_in
from penstock.store.selection import Selectable, Selection, unselected
from penstock.store.source import FileBacked, Source

#: Of masks in a batch.
MaskType = Literal["uint8", "int16", "int32", "int64"]


class ImagesAndMasks(Selectable):
    """Images with a mask each: a file of class numbers, of the same name but for its ending.

    images, masks: folders, lists or addresses, as `open_source` takes them, or sources that have `path_of`. A mask has
        the path of its image, from the folder on: `images/a/1.jpg` and `masks/a/1.png`.
    image_suffix, mask_suffix: of names before the ending, where they have one: "_leftImg8bit" and "_gtFine_labelIds".
    unpaired: "raise", or "skip" to leave out images without a mask.
    mask_dtype: of masks in a batch. mask_fill: what stands in a mask where the image was not, such as 255 for "ignore".
    refresh, calls, storage_options: as in `open_source`.

    A batch is a dict of `images` and `masks`, [batch, height, width]. The loader's crops, resizes, flips, borders and
    rotations move both alike, and a mask's pixels keep their values; albumentations' transforms are called with both.
    Raises: DataError naming an image without a mask, or two masks of one name.
    """

    def __init__(
        self,
        images: str | os.PathLike[str] | Source,
        masks: str | os.PathLike[str] | Source,
        *,
        image_suffix: str = "",
        mask_suffix: str = "",
        unpaired: Literal["raise", "skip"] = "raise",
        mask_dtype: MaskType = "uint8",
        mask_fill: int = 0,
        refresh: Refresh = "auto",
        calls: Calls | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if mask_dtype not in ("uint8", "int16", "int32", "int64"):
            raise ConfigError(f'mask_dtype is {mask_dtype!r}; it is "uint8", "int16", "int32" or "int64"')
        if not np.iinfo(mask_dtype).min <= mask_fill <= np.iinfo(mask_dtype).max:
            raise ConfigError(
                f"mask_fill is {mask_fill}, which {mask_dtype} cannot hold: give a larger mask_dtype"
            )
        if unpaired not in ("raise", "skip"):
            raise ConfigError(f'unpaired is {unpaired!r}; it is "raise" or "skip"')

        def opened(given: str | os.PathLike[str] | Source) -> Source:
            if isinstance(given, Source):
                return given
            return open_source(given, refresh=refresh, calls=calls, storage_options=storage_options)

        self.images, self.masks = opened(images), opened(masks)
        names = _names("images", self.images, image_suffix)
        of_masks = _names("masks", self.masks, mask_suffix)
        places = {name: position for position, name in reversed(list(enumerate(of_masks)))}
        if len(places) < len(of_masks):
            twice = next(position for position, name in enumerate(of_masks) if places[name] != position)
            raise DataError(
                f"{self.masks.describe(twice)} and {self.masks.describe(places[of_masks[twice]])} are masks of one "
                "image: leave one of them out"
            )
        pairs = [(position, places[name]) for position, name in enumerate(names) if name in places]
        if not pairs or (len(pairs) < len(names) and unpaired == "raise"):
            alone = next(position for position, name in enumerate(names) if name not in places)
            raise DataError(
                f"{self.images.describe(alone)} has no mask {names[alone]!r} among {self.masks!r} ({len(pairs):,} of "
                f'{len(names):,} images have one): add it, give image_suffix= and mask_suffix=, or unpaired="skip"'
            )
        ids = np.array(pairs, np.int64)
        self._image_ids, self._mask_ids = ids[:, 0].copy(), ids[:, 1].copy()
        #: int64[samples], of the image, in front of its mask in what is read.
        self.image_bytes: NDArray[np.int64] = self.images.sizes_bytes[self._image_ids]
        self.sizes_bytes: NDArray[np.int64] = self.image_bytes + self.masks.sizes_bytes[self._mask_ids]
        self.mask_dtype, self.mask_fill = mask_dtype, mask_fill
        self.labels: dict[str, NDArray[Any]] = {}
        self.classes: tuple[str, ...] = ()
        for array in (self._image_ids, self._mask_ids, self.image_bytes, self.sizes_bytes):
            array.flags.writeable = False

    @property
    def place(self) -> str:
        """What was opened, for people."""
        return str(getattr(self.images, "root", self.images))

    @property
    def names(self) -> NDArray[np.uint8]:
        """uint8[...], by which a run that resumes knows them: the paths of all, and what a batch has of masks."""
        both = ((self.images, self._image_ids), (self.masks, self._mask_ids))
        paths = [_path_in(source, int(each)) for source, ids in both for each in ids]
        paths += [self.mask_dtype, str(self.mask_fill)]
        return np.frombuffer("\0".join(paths).encode("utf-8", "surrogateescape"), np.uint8)

    @property
    def objects(self) -> Objects | None:
        """What reads the images, where they are objects of a remote store."""
        return objects_in(self.images)

    def __repr__(self) -> str:
        return f"ImagesAndMasks({self.images!r}, {self.masks!r})"

    def __len__(self) -> int:
        return self._image_ids.size

    def describe(self, sample: int) -> str:
        return self.images.describe(self._id_of(self._image_ids, sample))

    def describe_mask(self, sample: int) -> str:
        """Return where the mask of a sample is from."""
        return self.masks.describe(self._id_of(self._mask_ids, sample))

    def read(self, sample: int) -> bytes:
        image = self.images.read(self._id_of(self._image_ids, sample))
        return image + self.masks.read(int(self._mask_ids[sample]))

    def read_into(self, sample: int, buffer: memoryview) -> int:
        size = self.images.read_into(self._id_of(self._image_ids, sample), buffer)
        return size + self.masks.read_into(int(self._mask_ids[sample]), buffer[size:])

    def prepare_group(self) -> None:
        prepare_group(self.images)
        prepare_group(self.masks)

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        """Read samples by a call for the images and one for the masks; see `penstock.store.read_group`."""
        check_group(self, ids, into, begins)
        at = observer()
        failed: dict[int, Exception] = {}
        behind = begins.copy()
        behind[:-1] += self.image_bytes[ids]
        for source, known, places in (
            (self.masks, self._mask_ids, behind),
            (self.images, self._image_ids, begins),
        ):
            of_source = known[ids]

            def at_sample(sample: int, of_source: Ids = of_source) -> None:
                if at is not None:
                    at(int(ids[np.argmax(of_source == sample)]))

            failed |= dict(read_group(source, of_source, into, places, at_sample))
        return sorted(failed.items(), key=lambda each: each[0])

    def close(self) -> None:
        """End what waits for a remote store."""
        for source in (self.images, self.masks):
            if (close := getattr(source, "close", None)) is not None:
                close()

    def _id_of(self, known: Ids, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"there is no sample {sample}: {self!r}")
        return int(known[sample])


def _names(argument: str, source: Source, suffix: str) -> list[str]:
    """Return by which names images and masks find each other. Raises: ConfigError."""
    if not isinstance(source, FileBacked):
        raise ConfigError(
            f"{argument} is a {type(source).__name__}, whose samples are no files with names: give a folder or a list"
        )
    stems = (os.path.splitext(_path_in(source, sample))[0] for sample in range(len(source)))
    return [stem.removesuffix(suffix) for stem in stems]


def _path_in(source: Source, sample: int) -> str:
    """Return the path of a sample's file, from the folder of the source on where it has one."""
    path = cast(FileBacked, source).path_of(sample)
    root = str(getattr(unselected(source), "root", ""))
    return path.removeprefix(root).lstrip("/") if root else os.path.basename(path)


@dataclass(frozen=True, slots=True)
class MasksOf:
    """What is known of the masks of a source.

    image_bytes: int64[samples], of the image, in front of its mask in what is read. describe: names the mask of a
        sample. dtype, fill: of `ImagesAndMasks`.
    """

    image_bytes: NDArray[np.int64]
    describe: Callable[[int], str]
    dtype: MaskType
    fill: int


def masks_of(source: object) -> MasksOf | None:
    """Return what is known of the masks of a source, a part or a mixture; None where there are none.

    Raises: ConfigError for a mixture of sources with and without, or with masks of several types.
    """
    if isinstance(source, ImagesAndMasks):
        return MasksOf(source.image_bytes, source.describe_mask, source.mask_dtype, source.mask_fill)
    if isinstance(source, Selection):
        found, ids = masks_of(source.source), source.ids
        if found is None:
            return None
        return replace(
            found,
            image_bytes=found.image_bytes[ids],
            describe=lambda sample: found.describe(int(ids[sample])),
        )
    if not isinstance(source, MixedSource):
        return None
    parts = [masks_of(each) for each in source.sources]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if len({(part.dtype, part.fill) for part in known}) > 1 or len(known) < len(parts):
        raise ConfigError(
            "some sources of the mixture have masks of another mask_dtype or mask_fill, or none: give all the same"
        )

    def describe(sample: int) -> str:
        number, own = source.place_of(sample)
        return known[number].describe(own)

    return replace(
        known[0], image_bytes=np.concatenate([part.image_bytes for part in known]), describe=describe
    )
