"""Pictures that can be kept between decoding and the last pass: cropped, resized, mirrored, and still bytes.

What follows a crop (a user's callables, `ToTensor`, `Normalize`) is done for every epoch, so that a kept crop gives the
bits that decoding gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.transforms.decoders import Picture
from penstock.loader.transforms.draws import Draws
from penstock.loader.transforms.geometry import Box, choose_shrink
from penstock.loader.transforms.group import NOTHING_LATER, GroupPass, Later
from penstock.loader.transforms.jpeg import Encoded
from penstock.loader.transforms.memory import Need
from penstock.loader.transforms.pipeline import Pipeline
from penstock.loader.transforms.pixels import Pixels
from penstock.loader.transforms.sink import Sink
from penstock.loader.transforms.stages import Image, Scratch

Crop = NDArray[np.uint8]


class CropPass:
    """The built-in steps that a pipeline begins with, which make crops, and what is done to a crop.

    steps: that have made the crops which are finished, where others do more of them than make crops here.
    Raises: ConfigError if the pipeline begins with something else, or they do not fix the size of a crop.
    """

    def __init__(self, pipeline: Pipeline, steps: int | None = None) -> None:
        front = pipeline.front
        if front is None:
            raise ConfigError(
                "keep says that crops are kept, and the transforms do not begin with steps of Penstock that fix the "
                'size of a picture, such as RandomResizedCrop(224): put these first, or leave keep at "stored"'
            )
        self._pipeline, self._stages = pipeline, front.stages
        self._first = len(front.stages) if steps is None else steps
        #: (height, width, 3) of a crop.
        self.shape = front.shape
        #: Whether a sample has another crop in each epoch.
        self.is_random = front.is_random
        self._sink = Sink("uint8", "NHWC")
        self._group = GroupPass(front.numbers, front.keys, self._sink)

    def prepare(self, *, makes: bool = True) -> None:
        """Bring in what making crops needs, and finishing them. makes: False where others make them."""
        self._pipeline.prepare_crops(self._first)
        if makes:
            self._sink.prepare()
            self._group.prepare()

    def make_group(
        self,
        data: Sequence[Crop],
        samples: NDArray[np.int64],
        epoch: int,
        out: Crop,
        scratch: Scratch,
        later: Later = NOTHING_LATER,
    ) -> list[int]:
        """Make the crops of some samples by one call; return the indices of those left to `make`.

        data: of each sample, as stored. samples: their ids. out: uint8[samples, *shape], those of `epoch`.
        later: gets those of the epochs that follow.
        """
        return self._group.run(data, out, samples, epoch, range(len(data)), scratch, later)

    def finish_group(self, crops: Sequence[Crop], out: NDArray[Any], rows: Sequence[int]) -> bool:
        """Do what follows to crops by one call; return whether that was done, and nothing is left to `finish`."""
        return self._pipeline.write_crops(crops, out, rows, self._first)

    def make(
        self, data: Encoded, draws: Sequence[Draws], index: int, out: Sequence[Crop], scratch: Scratch
    ) -> None:
        """Decode a sample once and make its crops.

        draws: of the batch, for one epoch each. index: of the sample in them. out: uint8[*shape], for each of them.
        Raises: DataError, as `Pipeline.run`, and where a part is damaged that no crop shows.
        """
        try:
            picture = _DecodedOnce(Picture(data, scratch.decoders, scratch.reserve))
            images = []
            for of_epoch in draws:
                image = Image(picture)
                for stage in self._stages:
                    image = stage(image, of_epoch, index, scratch)
                images.append(image)
            # Those of one scale, one after the other: it is decoded for each.
            for place in sorted(range(len(out)), key=lambda place: choose_shrink(images[place].geometry)):
                images[place].write(self._sink, out[place], scratch)
        finally:
            scratch.end_picture()

    def finish(
        self, crop: Crop, out: NDArray[np.generic], draws: Draws, index: int, scratch: Scratch
    ) -> None:
        """Do what follows to a crop; arguments and errors as `Pipeline.run`.

        crop: uint8[*shape], unchanged.
        """
        self._pipeline.run_crop(crop, out, draws, index, scratch, self._first)


class _DecodedOnce:
    """A picture that is decoded as a whole, once for each scale that is asked for in turn."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self.height, self.width = picture.height, picture.width
        self._whole = Box(0, 0, picture.height, picture.width)
        self._pixels: Pixels | None = None
        self._shrink = 0

    def need(self, box: Box, shrink: int) -> Need | None:
        """See `Picture.need`."""
        return None if shrink == self._shrink else self._picture.need(self._whole, shrink)

    def decode(self, box: Box, shrink: int) -> Pixels:
        """See `Picture.decode`."""
        if self._pixels is None or shrink != self._shrink:
            self._pixels, self._shrink = self._picture.decode(self._whole, shrink), shrink
        return self._pixels
