"""Samples kept as crops: made by whoever decodes a sample, and used in its place in later epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.flow.pieces import Pieces
from penstock.flow.work import Failed, Request
from penstock.loader.fetching import SourceFetcher
from penstock.loader.images import FRONTS, ImageDecoder, ImageGroup
from penstock.loader.local_disk import KeptOnDisks
from penstock.loader.pictures import KeptPictures
from penstock.loader.pixels_on_disk import PixelsOnDisks, with_spare
from penstock.loader.ranks_memory import RanksMemory
from penstock.loader.transforms.crops import Crop, CropPass
from penstock.loader.transforms.group import NOTHING_LATER, Later
from penstock.policy import Placement
from penstock.policy.forms import CropForm
from penstock.store.blocks import BlockTier
from penstock.store.group import Ids
from penstock.trace.schema import STAGING


class KeptCrops:
    """The crops in memory, and those on disks. Any thread may call anything.

    epochs: of the run. placement: says of which samples. disks: what they keep.
    shared: memory that other ranks read, in place of the capacity, of crops that serve all epochs.
    """

    def __init__(
        self,
        form: CropForm,
        crops: CropPass,
        capacity_bytes: int,
        placement: Placement,
        epochs: int,
        disks: KeptOnDisks,
        shared: BlockTier | None = None,
    ) -> None:
        self.form, self._epochs, self._shape = form, epochs, crops.shape
        self.disks = PixelsOnDisks(disks, placement, crops.shape)
        self.tier = BlockTier(capacity_bytes, crops.shape) if shared is None else shared
        #: bool[samples]
        self.is_kept: NDArray[np.bool_] = placement.tier_of == form.TIER

    def find(self, sample: int, epoch: int) -> Crop | None:
        """Return the crop of a sample for an epoch, which is handed out once; None where it is not here."""
        return self.tier.find(sample, epoch if self.form.epochs else None)

    def keep(self, sample: int, crop: Crop) -> None:
        """Copy a crop that serves all epochs to memory, if there is space."""
        for block in self.tier.take(1):
            self.tier.array[block][...] = crop
            self.tier.keep(block, sample)

    def unpacked(self, content: Crop) -> Crop | None:
        """Return the crop that another rank has in memory; None for bytes that are none."""
        return with_spare(content.reshape(self._shape)) if content.size == np.prod(self._shape) else None

    def epochs_from(self, sample: int, epoch: int) -> range:
        """Return the epochs after this one whose crops are made along with this one's."""
        return range(epoch + 1, epoch + self.form.later_epochs(epoch, sample, self._epochs) + 1)


class CropFetcher(SourceFetcher):
    """A `Fetcher` that has uint8[rows, columns, 3] where a tier keeps crops or pictures, and stored bytes elsewhere."""

    def __init__(self, kept: KeptCrops | KeptPictures, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._kept = kept

    def fetch(self, request: Request) -> list[Any] | Pieces:
        kept, disks, samples = self._kept, self._kept.disks, request.samples
        if request.origin == kept.form.TIER:
            request.at(samples[0])
            return [self._in_memory(sample, request.epoch) for sample in samples]
        if disks.has_tier(request.origin):
            request.at(samples[0])
            memory_for = partial(self._memory_for, request=request, is_alone=False)
            found = disks.read(request.origin, samples, memory_for)
            for sample, pixels in zip(samples, found, strict=True):
                if kept.is_kept[sample] and not isinstance(pixels, Failed):
                    kept.keep(sample, pixels)
            return found
        # Whoever decodes them makes what is kept.
        rests = [STAGING if kept.form.is_in(rest) else rest for rest in request.rests]
        return super().fetch(request._replace(rests=rests))

    def _from_peer(self, ids: Ids, peers: RanksMemory, rank: int) -> list[Any]:
        """Return what another rank has, as `_in_memory`: it keeps samples in the same form."""
        found = super()._from_peer(ids, peers, rank)
        for index, each in enumerate(found):
            if not isinstance(each, Failed):
                pixels = self._kept.unpacked(each)
                found[index] = self._not_here(int(ids[index]), f"rank {rank}") if pixels is None else pixels
        return found

    def _in_memory(self, sample: int, epoch: int) -> Crop | Failed:
        found = self._kept.find(sample, epoch)
        if found is None:
            found = self._kept.disks.find(sample)
        if found is None:
            return self._not_here(sample, f"memory for epoch {epoch}")
        return found

    def _not_here(self, sample: int, place: str) -> Failed:
        return Failed(DataError(f"no crop or picture of {self.describe(sample)} is in {place}"))

    def close(self) -> None:
        super().close()
        self._kept.tier.close()


class FinishingDecoder(ImageDecoder):
    """An `ImageDecoder` that can finish crops. crops: what makes, and finishes, those of its pipeline."""

    def __init__(self, crops: CropPass, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._crops = crops

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

    def _not_made(
        self, group: ImageGroup, which: Sequence[int], crops: Crop, later: Later = NOTHING_LATER
    ) -> list[int]:
        """Make the crops of samples; return the places in `which` of those of which some part is damaged.

        crops: uint8[samples, *shape], get those of this epoch. later: gets those of later ones.
        """
        if not which:
            return []
        some = list(which)
        data, ids, epoch = [group.data[index] for index in some], group.ids[some], group.load.epoch
        left = self._crops.make_group(data, ids, epoch, crops, group.scratch, later)
        return self._not_made_alone(group, some, left, crops, later)

    def _not_made_alone(
        self, group: ImageGroup, which: Sequence[int], places: Sequence[int], crops: Crop, later: Later
    ) -> list[int]:
        """Make the crops of some one by one, as `_not_made`. places: in `which`, `crops` and `later`."""
        wrong = list[int]()
        for place in places:
            index, epoch = which[place], group.load.epoch
            blocks = [block for block in later.rows[place].tolist() if block >= 0] if later.rows.size else []
            draws = [self._draws_of(group.load, epoch + ahead) for ahead in range(1 + len(blocks))]
            out = [crops[place], *(later.crops[block] for block in blocks)]
            try:
                self._crops.make(group.data[index].data, draws, group.rows[index], out, group.scratch)
            except DataError:  # whether this epoch's crop is among what is damaged, decoding that alone says
                wrong.append(place)
        return wrong


class CropDecoder(FinishingDecoder):
    """Makes the crops that are kept, and finishes those that it gets in place of bytes."""

    def __init__(self, kept: KeptCrops, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept = kept

    def _write_images(
        self, group: ImageGroup, which: Sequence[int], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """See `ImageDecoder`."""
        plain, to_make, kept = list[int](), list[int](), list[tuple[int, Crop]]()
        failed: list[tuple[int, Exception]] = []
        for index in which:
            sample = group.sample(index)
            if group.data[index].ndim == 3:
                kept.append((index, group.data[index]))
            elif self._kept.is_kept[sample] or self._kept.disks.is_wanted(sample):
                to_make.append(index)
            else:
                plain.append(index)
        self._finish(group, kept, failed)
        make = self._make if self._kept.form.epochs else self._make_lasting
        for first in range(0, len(to_make), FRONTS):
            some = to_make[first : first + FRONTS]
            at(group.sample(some[0]))
            plain += make(group, some, failed)
        return failed + super()._write_images(group, sorted(plain), at)

    def _make_lasting(
        self, group: ImageGroup, which: list[int], failed: list[tuple[int, Exception]]
    ) -> list[int]:
        """Make the crops of some samples, which serve all epochs, keep and use them; return those that are damaged."""
        kept, own = self._kept, np.empty((len(which), *self._crops.shape), np.uint8)
        wrong = set(self._not_made(group, which, own))
        done = [(index, own[place]) for place, index in enumerate(which) if place not in wrong]
        self._finish(group, done, failed)
        for index, crop in done:
            sample = group.sample(index)
            kept.disks.put(sample, crop)
            if kept.is_kept[sample]:
                kept.keep(sample, crop)
        return [which[place] for place in wrong]

    def _make(self, group: ImageGroup, which: list[int], failed: list[tuple[int, Exception]]) -> list[int]:
        """Make the crops of some samples, keep those of later epochs and use this one's.

        Returns: the samples of which none is made, as there is no space or they are damaged.
        """
        tier, form, epoch = self._kept.tier, self._kept.form, group.load.epoch
        samples: list[int] = group.ids[which].tolist()
        tier.forget(samples, range(epoch - form.epochs, epoch + 1))
        found = [
            (index, sample, tier.take(len(self._kept.epochs_from(sample, epoch))))
            for index, sample in zip(which, samples, strict=True)
        ]
        left = [index for index, _, blocks in found if not blocks]
        made = [each for each in found if each[2]]
        if not made:
            return left
        later = Later(np.full((len(made), form.epochs - 1), -1), tier.array)
        for place, (_, _, blocks) in enumerate(made):
            later.rows[place, : len(blocks)] = blocks
        wrong = self._made(group, [index for index, *_ in made], later, failed)
        for place, (index, sample, blocks) in enumerate(made):
            if place in wrong:
                tier.give_back(blocks)
                left.append(index)
                continue
            for ahead, block in enumerate(blocks, 1):
                tier.keep(block, sample, epoch + ahead)
        return left

    def _made(
        self, group: ImageGroup, which: list[int], later: Later, failed: list[tuple[int, Exception]]
    ) -> set[int]:
        """Make crops of later epochs, and use those of this one; return the places in `which` of what is damaged."""
        if self._pipeline.ends_in_group:  # those of this epoch go to the slot at once
            data, rows = [group.data[index] for index in which], [group.rows[index] for index in which]
            alone = self._pipeline.run_group(data, group.images, group.draws, rows, group.scratch, later)
            own = np.empty((len(which) if alone else 0, *self._crops.shape), np.uint8)
            wrong = set(self._not_made_alone(group, which, alone, own, later))
        else:
            alone = list(range(len(which)))
            own = np.empty((len(which), *self._crops.shape), np.uint8)
            wrong = set(self._not_made(group, which, own, later))
        self._finish(group, [(which[place], own[place]) for place in alone if place not in wrong], failed)
        return wrong
