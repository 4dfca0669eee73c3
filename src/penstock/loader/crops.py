"""Samples kept in memory as crops: made by whoever decodes a sample, and used in its place in later epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.flow.pieces import Pieces
from penstock.flow.work import Failed, Request
from penstock.loader.fetching import SourceFetcher
from penstock.loader.images import FRONTS, ImageDecoder, ImageGroup
from penstock.loader.transforms.crops import Crop, CropPass
from penstock.policy import Placement
from penstock.policy.forms import CropForm
from penstock.store.blocks import BlockTier
from penstock.trace.schema import STAGING


class KeptCrops:
    """The crops in memory. Any thread may call anything.

    epochs: of the run. placement: says of which samples.
    """

    def __init__(
        self, form: CropForm, crops: CropPass, capacity_bytes: int, placement: Placement, epochs: int
    ) -> None:
        self.form, self._epochs = form, epochs
        self.tier = BlockTier(capacity_bytes, crops.shape)
        #: bool[samples]
        self.is_kept: NDArray[np.bool_] = placement.tier_of == form.TIER

    def find(self, sample: int, epoch: int) -> Crop | None:
        """Return the crop of a sample for an epoch, which is handed out once; None where it is not here."""
        return self.tier.find(sample, epoch if self.form.epochs else None)

    def epochs_from(self, sample: int, epoch: int) -> range:
        """Return the epochs after this one whose crops are made along with this one's."""
        later = self.form.later_epochs(epoch, sample)
        return range(epoch + 1, min(epoch + later, self._epochs - 1) + 1)


class CropFetcher(SourceFetcher):
    """A `Fetcher` that has crops where a tier keeps them, uint8[height, width, 3], and stored bytes elsewhere."""

    def __init__(self, kept: KeptCrops, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept = kept

    def fetch(self, request: Request) -> list[Any] | Pieces:
        tier, samples = self._kept.form.TIER, request.samples
        if request.origin == tier:
            request.at(samples[0])
            found = [self._kept.find(sample, request.epoch) for sample in samples]
            return [
                Failed(
                    DataError(f"no crop of {self.describe(sample)} for epoch {request.epoch} is in memory")
                )
                if crop is None
                else crop
                for sample, crop in zip(samples, found, strict=True)
            ]
        # Whoever decodes them makes what it keeps.
        rests = [STAGING if rest == tier else rest for rest in request.rests]
        return super().fetch(request._replace(rests=rests))

    def close(self) -> None:
        super().close()
        self._kept.tier.close()


class CropDecoder(ImageDecoder):
    """An `ImageDecoder` that makes the crops that are kept, and finishes those that it gets in place of bytes."""

    def __init__(self, crops: CropPass, kept: KeptCrops, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._crops, self._kept = crops, kept

    def _write_images(
        self, group: ImageGroup, which: Sequence[int], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `ImageDecoder`."""
        plain, to_make = list[int](), list[int]()
        failed: list[tuple[int, Exception]] = []
        for index in which:
            if group.data[index].ndim == 3:
                self._finish(group, index, group.data[index], failed)
            else:
                (to_make if self._kept.is_kept[group.samples[index]] else plain).append(index)
        for first in range(0, len(to_make), FRONTS):
            some = to_make[first : first + FRONTS]
            at(group.samples[some[0]])
            plain += (self._make_random if self._kept.form.epochs else self._make_lasting)(
                group, some, failed
            )
        return failed + super()._write_images(group, sorted(plain), at)

    def _finish(self, group: ImageGroup, index: int, crop: Crop, failed: list[tuple[int, Exception]]) -> None:
        row = group.rows[index]
        try:
            self._crops.finish(crop, group.images[row], group.draws, row, group.scratch)
        except Exception as error:
            failed.append((index, self._located(error, group.samples[index])))

    def _make_lasting(
        self, group: ImageGroup, which: list[int], failed: list[tuple[int, Exception]]
    ) -> list[int]:
        """Make the one crop of some samples, keep and use it; return those of which none is made."""
        tier = self._kept.tier
        blocks = tier.take(len(which))
        data = [group.data[index] for index in which[: len(blocks)]]
        left = self._crops.make_group(data, tier.array, blocks, group.scratch) if data else []
        wrong = {
            place for place in left if not self._is_made(group, which[place], [], [tier.array[blocks[place]]])
        }
        for place, block in enumerate(blocks):
            if place in wrong:
                tier.give_back([block])
                continue
            self._finish(group, which[place], tier.array[block], failed)
            tier.keep(block, group.samples[which[place]])
        return [index for place, index in enumerate(which) if place in wrong or place >= len(blocks)]

    def _make_random(
        self, group: ImageGroup, which: list[int], failed: list[tuple[int, Exception]]
    ) -> list[int]:
        """Make the crops of some samples for this epoch and the next ones, keep those and use this one.

        Returns: the samples of which none is made.
        """
        tier, epoch, left = self._kept.tier, group.load.epoch, list[int]()
        own = np.empty(tier.array.shape[1:], np.uint8)
        for index in which:
            sample = group.samples[index]
            tier.forget(sample, range(epoch - self._kept.form.epochs, epoch + 1))
            later = self._kept.epochs_from(sample, epoch)
            blocks = tier.take(len(later))
            later = later[: len(blocks)]
            out = [own, *(tier.array[block] for block in blocks)]
            if not blocks or not self._is_made(group, index, later, out):
                tier.give_back(blocks)
                left.append(index)
                continue
            for block, each in zip(blocks, later, strict=True):
                tier.keep(block, sample, each)
            self._finish(group, index, own, failed)
        return left

    def _is_made(self, group: ImageGroup, index: int, later: Sequence[int], out: Sequence[Crop]) -> bool:
        """Make a sample's crops of this and later epochs; return whether its bytes are whole."""
        draws = [group.draws, *(self._draws_of(group.load, epoch) for epoch in later)]
        try:
            self._crops.make(group.data[index].data, draws, group.rows[index], out, group.scratch)
        except DataError:  # whether this epoch's crop is among what is damaged, decoding that alone says
            return False
        return True
