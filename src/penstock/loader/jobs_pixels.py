"""Crops and decoded pictures that the jobs of a host keep together: whoever decodes one first has it there for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.loader.crops import FinishingDecoder
from penstock.loader.images import FRONTS, ImageDecoder, ImageGroup, size_of
from penstock.loader.jobs import JobsOfHost
from penstock.loader.pictures import WholePictures
from penstock.loader.transforms.crops import CropPass
from penstock.loader.transforms.geometry import pixel_bytes
from penstock.store.group import Bytes, Failed, Ids

_NOT_MADE = DataError("it is damaged, or is none of whose pixels all crops are made")


class JobsCropDecoder(FinishingDecoder):
    """Takes the crops that serve all epochs from where jobs keep them, and makes those that are not there."""

    def __init__(self, jobs: JobsOfHost, crops: CropPass, *arguments: Any) -> None:
        super().__init__(crops, *arguments)
        self._jobs = jobs

    def _write_images(
        self, group: ImageGroup, which: Sequence[int], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `ImageDecoder`."""
        failed, left = list[tuple[int, Exception]](), list[int]()
        for some in (which[first : first + FRONTS] for first in range(0, len(which), FRONTS)):
            at(group.sample(some[0]))
            out = np.empty((len(some), *self._crops.shape), np.uint8)
            begins = out[0].size * np.arange(len(some) + 1)
            make = partial(self._make, group, some)
            ids = group.ids[list(some)]
            read = self._jobs.memory.read_group(ids, out.reshape(-1), begins, make, shared=group.shared)
            wrong = {place for place, _ in read}
            done = [(index, out[place]) for place, index in enumerate(some) if place not in wrong]
            left += [some[place] for place in wrong]
            self._finish(group, done, failed)
        return failed + super()._write_images(group, sorted(left), at)

    def _make(self, group: ImageGroup, which: Sequence[int], ids: Ids, into: Bytes, begins: Ids) -> Failed:
        """Make the crops of samples; return those that are damaged."""
        members = {group.sample(index): index for index in which}
        some = [members[sample] for sample in ids.tolist()]
        crops = np.empty((len(some), *self._crops.shape), np.uint8)
        wrong = self._not_made(group, some, crops)
        for begin, crop in zip(begins.tolist(), crops, strict=False):
            into[begin : begin + crop.size] = crop.reshape(-1)
        return Failed((place, _NOT_MADE) for place in wrong)


class JobsPictureDecoder(ImageDecoder):
    """Takes decoded pictures from where jobs keep them, and decodes those that are not there."""

    def __init__(self, jobs: JobsOfHost, pictures: WholePictures, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._jobs, self._pictures = jobs, pictures

    def _write_images(
        self, group: ImageGroup, which: Sequence[int], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `ImageDecoder`."""
        data = list(group.data)
        for some in (which[first : first + FRONTS] for first in range(0, len(which), FRONTS)):
            at(group.sample(some[0]))
            shapes = {index: size_of(data[index]) for index in some}
            known = {
                index: shape
                for index, shape in shapes.items()
                if shape is not None and self._pictures.serves(data[index].data, *shape)
            }
            if not known:
                continue
            begins = np.cumsum([0, *(pixel_bytes(*shape) for shape in known.values())])
            sizes = np.array([3 * rows * columns for rows, columns in known.values()])
            into, ids = np.empty(int(begins[-1]), np.uint8), group.ids[list(known)]
            decode = partial(self._decode, group, known)
            read = self._jobs.memory.read_group(ids, into, begins, decode, sizes, group.shared)
            wrong = {place for place, _ in read}
            for place, (index, shape) in enumerate(known.items()):
                if place not in wrong:
                    data[index] = into[begins[place] : begins[place] + sizes[place]].reshape(*shape, 3)
        return super()._write_images(group._replace(data=data), which, at)

    def _decode(
        self, group: ImageGroup, known: dict[int, tuple[int, int]], ids: Ids, into: Bytes, begins: Ids
    ) -> Failed:
        """Decode pictures as a whole; return those that are damaged."""
        members, failed = {group.sample(index): index for index in known}, Failed()
        for place, (sample, at) in enumerate(zip(ids.tolist(), begins[:-1].tolist(), strict=True)):
            index = members[sample]
            rows, columns = known[index]
            out = into[at : at + 3 * rows * columns].reshape(rows, columns, 3)
            if not self._pictures.decode(group.data[index].data, group.scratch, partial(np.copyto, out)):
                failed.append((place, _NOT_MADE))
        return failed
