"""Samples kept as crops: made by whoever decodes a sample, and used in its place in later epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
        later = self.form.later_epochs(epoch, sample)
        return range(epoch + 1, min(epoch + later, self._epochs - 1) + 1)


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
        self,
        group: ImageGroup,
        which: Sequence[int],
        crops: Sequence[Sequence[Crop]],
        later: Sequence[Sequence[int]] = (),
    ) -> list[int]:
        """Make the crops of samples; return the places in `which` of those of which some part is damaged.

        crops: of each, where those of this epoch and of later ones go. later: these; none where one serves all.
        """
        if not which:
            return []
        data, samples = [group.data[index] for index in which], [group.sample(index) for index in which]
        left = self._crops.make_group(data, samples, group.load.epoch, crops, group.scratch)
        wrong = list[int]()
        for place in left:
            epochs = later[place] if later else ()
            draws = [group.draws, *(self._draws_of(group.load, epoch) for epoch in epochs)]
            row = group.rows[which[place]]
            try:
                self._crops.make(data[place].data, draws, row, crops[place], group.scratch)
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
        for first in range(0, len(to_make), FRONTS):
            some = to_make[first : first + FRONTS]
            at(group.sample(some[0]))
            plain += self._make(group, some, failed)
        return failed + super()._write_images(group, sorted(plain), at)

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
            is_for_disk = self._kept.disks.is_wanted(sample)
            blocks = tier.take(0 if is_for_disk else 1 if is_lasting else len(later))
            if not blocks and not is_for_disk:
                left.append(index)
                continue
            kept = [tier.array[block] for block in blocks]
            crops = kept if is_lasting and not is_for_disk else [own[place], *kept]
            made.append(_Making(index, later[: len(blocks)], blocks, crops))
        done = list[_Making]()
        members, later_of, crops_of = (
            [each.member for each in made],
            [each.later for each in made],
            [each.crops for each in made],
        )
        wrong = set(self._not_made(group, members, crops_of, later_of))
        for place, making in enumerate(made):
            if place in wrong:
                tier.give_back(making.blocks)
                left.append(making.member)
            else:
                done.append(making)
        self._finish(group, [(making.member, making.crops[0]) for making in done], failed)
        for index, later, blocks, crops in done:
            if is_lasting:
                self._kept.disks.put(group.sample(index), crops[0])
            for block, each in zip(blocks, later or (None,), strict=bool(blocks)):
                tier.keep(block, group.sample(index), each)
        return left
