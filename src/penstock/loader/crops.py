"""Samples kept in memory as crops: made by whoever decodes a sample, and used in its place in later epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.flow.pieces import Pieces
from penstock.flow.work import Failed, Request
from penstock.loader.fetching import SourceFetcher
from penstock.loader.images import FRONTS, ImageDecoder, ImageGroup
from penstock.loader.pictures import KeptPictures
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
    """A `Fetcher` that has uint8[rows, columns, 3] where a tier keeps crops or pictures, and stored bytes elsewhere."""

    def __init__(self, kept: KeptCrops | KeptPictures, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept = kept

    def fetch(self, request: Request) -> list[Any] | Pieces:
        tier = self._kept.form.TIER
        if request.origin == tier:
            samples = request.samples
            request.at(samples[0])
            found = [self._kept.find(sample, request.epoch) for sample in samples]
            return [
                Failed(
                    DataError(f"nothing of {self.describe(sample)} for epoch {request.epoch} is in memory")
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


class _Making(NamedTuple):
    """A sample whose crops are made.

    member: its index in the group. later: the epochs after this one that get a crop; none where one serves all.
    blocks: that are kept.
    crops: where they go: of this epoch, then of the later ones.
    """

    member: int
    later: range
    blocks: list[int]
    crops: list[Crop]


class CropDecoder(ImageDecoder):
    """An `ImageDecoder` that makes the crops that are kept, and finishes those that it gets in place of bytes."""

    def __init__(self, crops: CropPass, kept: KeptCrops, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._crops, self._kept = crops, kept

    def _write_images(
        self, group: ImageGroup, which: Sequence[int], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `ImageDecoder`."""
        plain, to_make, kept = list[int](), list[int](), list[tuple[int, Crop]]()
        failed: list[tuple[int, Exception]] = []
        for index in which:
            if group.data[index].ndim == 3:
                kept.append((index, group.data[index]))
            else:
                (to_make if self._kept.is_kept[group.ids[index]] else plain).append(index)
        self._finish(group, kept, failed)
        for first in range(0, len(to_make), FRONTS):
            some = to_make[first : first + FRONTS]
            at(group.sample(some[0]))
            plain += self._make(group, some, failed)
        return failed + super()._write_images(group, sorted(plain), at)

    def _finish(
        self, group: ImageGroup, crops: Sequence[tuple[int, Crop]], failed: list[tuple[int, Exception]]
    ) -> None:
        """Write crops to the slot. crops: of each, its index in the group."""
        rows = [group.rows[index] for index, _ in crops]
        if not crops or self._crops.finish_group([crop for _, crop in crops], group.images, rows):
            return
        for (index, crop), row in zip(crops, rows, strict=True):
            try:
                self._crops.finish(crop, group.images[row], group.draws, row, group.scratch)
            except Exception as error:
                failed.append((index, self._located(error, group.sample(index))))

    def _make(self, group: ImageGroup, which: list[int], failed: list[tuple[int, Exception]]) -> list[int]:
        """Make the crops of some samples, keep those of later epochs and use this one's.

        Returns: the samples of which none is made, as there is no space or they are damaged.
        """
        tier, epoch, is_lasting = self._kept.tier, group.load.epoch, not self._kept.form.epochs
        own = np.empty((len(which), *self._crops.shape), np.uint8)
        made, left = list[_Making](), list[int]()
        for place, index in enumerate(which):
            sample, later = group.sample(index), range(0)
            if not is_lasting:
                tier.forget(sample, range(epoch - self._kept.form.epochs, epoch + 1))
                later = self._kept.epochs_from(sample, epoch)
            blocks = tier.take(1 if is_lasting else len(later))
            if not blocks:
                left.append(index)
                continue
            kept = [tier.array[block] for block in blocks]
            made.append(
                _Making(index, later[: len(blocks)], blocks, kept if is_lasting else [own[place], *kept])
            )
        done = list[_Making]()
        wrong = self._left_by_group(group, made)
        for place, making in enumerate(made):
            if place in wrong and not self._is_made(group, making.member, making.later, making.crops):
                tier.give_back(making.blocks)
                left.append(making.member)
            else:
                done.append(making)
        self._finish(group, [(making.member, making.crops[0]) for making in done], failed)
        for index, later, blocks, _ in done:
            for block, each in zip(blocks, later or (None,), strict=True):
                tier.keep(block, group.sample(index), each)
        return left

    def _left_by_group(self, group: ImageGroup, made: Sequence[_Making]) -> set[int]:
        """Make crops by one call; return the places of those that it leaves."""
        if not made:
            return set()
        data = [group.data[each.member] for each in made]
        samples = [group.sample(each.member) for each in made]
        crops = [each.crops for each in made]
        return set(self._crops.make_group(data, samples, group.load.epoch, crops, group.scratch))

    def _is_made(self, group: ImageGroup, index: int, later: Sequence[int], out: Sequence[Crop]) -> bool:
        """Make a sample's crops of this and later epochs; return whether its bytes are intact."""
        draws = [group.draws, *(self._draws_of(group.load, epoch) for epoch in later)]
        try:
            self._crops.make(group.data[index].data, draws, group.rows[index], out, group.scratch)
        except DataError:  # whether this epoch's crop is among what is damaged, decoding that alone says
            return False
        return True
