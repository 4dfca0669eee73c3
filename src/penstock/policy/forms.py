"""In which form memory and disks keep samples: as stored, or as what decoding makes of them.

A seed fixes every crop of every epoch, so that a picture which is decoded once can serve several epochs: the crops of
the next ones are made along with its own, and kept as bytes in place of the file. Where nothing is drawn, one crop
serves all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, StorageClass
from penstock.policy.decisions import epochs_left
from penstock.policy.placement import LEAST_SHARE, share_of_store_rate

#: How far the number of crops strays from its mean, in square roots of the number of samples: as each epoch uses them
#: in another order. Of K = 3 a standard deviation is 0.7.
_STRAYS = 3.0
#: For how many epochs crops are made at most where the number is chosen: each more saves less, and takes as much space.
MOST_EPOCHS = 8
#: What each crop beside the first adds to a decoding, as a share of it: a larger region, and resampling. Measured:
#: processor time of epochs in which three crops are kept, of 2,000 photographs of 104 and of 211 KB to 224 x 224: 0.19
#: and 0.21; of the stages alone, 200 of these: 0.16.
CROP_SHARE = 0.2
#: What making a crop of decoded pixels takes, as a share of decoding and making it. Measured: processor time of epochs
#: of 2,000 such photographs, the pixels in memory, with three threads: 0.2.
PIXELS_SHARE = 0.2
#: What decoding a picture as a whole, and keeping its pixels, adds to decoding a crop. Measured: processor time of
#: a first epoch of such photographs, less that of one without `keep=`: 0.51 of an epoch's.
WHOLE_SHARE = 0.5
#: The same of pixels that were just read from a disk, and so are in the processor's caches; reading comes besides.
#: Measured: the same, from a disk whose pages the cache has: 0.14.
READ_PIXELS_SHARE = 0.14
#: What a thread decodes of photographs where nobody measured it. Measured: docs/benchmarks.md.
_PHOTOGRAPH_BYTES_PER_SECOND = 150e6
#: A disk has some samples in a form and the others as stored where that saves this share of an epoch's waits, or more.
_LEAST_SAVED_SHARE = 0.1
#: Of decoded pictures, and of a data set's samples, the first say how large they are: disks have so many times that.
STRAY = 2.0
#: How many shares of the samples are tried.
_SHARES_TRIED = 256


@dataclass(frozen=True, slots=True)
class CropForm:
    """Memory keeps samples as crops, or as whole decoded pictures, in place of their bytes.

    Whoever decodes a sample makes them, so that nothing is brought in before a batch wants it.

    crop_bytes: of one crop; of a picture, about, for decoded ones.
    epochs: K: a sample is decoded every K epochs, for that epoch and those up to the next time; each crop is gone once
        it is used. 0: one crop serves all epochs.
    is_decoded: whether pictures are kept, of which any epoch's crop is made; for all epochs.
    disks: how many of the tiers behind memory, the first ones, have this form, too.
    Raises: ConfigError for an epoch count that saves nothing, or no bytes.
    """

    crop_bytes: int
    epochs: int = 0
    is_decoded: bool = False
    disks: int = 0

    #: The tier that has this form in any case: memory.
    TIER = 1
    #: What stands in front of a decoded picture, or of one that is kept as stored where pictures are shared.
    HEAD_BYTES = 8

    def __post_init__(self) -> None:
        is_none = self.is_decoded and self.epochs
        if self.epochs < 0 or self.epochs == 1 or self.crop_bytes < 1 or is_none:
            raise ConfigError(
                f"crops of {self.crop_bytes} bytes are kept for {self.epochs} epochs; give at least a byte, and 2 "
                "epochs or more, or 0 for all"
            )

    @property
    def name(self) -> str:
        """What lines and traces call it."""
        if self.is_decoded:
            return "decoded"
        return f"{self.epochs} crops" if self.epochs else "crops"

    def is_in(self, tier: int) -> bool:
        """Return whether a tier has this form."""
        return self.TIER <= tier <= self.TIER + self.disks

    @property
    def left_share(self) -> float:
        """What using a kept sample takes, as a share of decoding it, beside writing a crop's bytes to the batch."""
        return PIXELS_SHARE if self.is_decoded else 0.0

    @property
    def left_of_disk(self) -> float:
        """The same of a sample that is read from a disk, beside reading it."""
        return READ_PIXELS_SHARE if self.is_decoded else 0.0

    @property
    def more_share(self) -> float:
        """What is made beside the crop of one epoch takes, as a share of decoding: each further crop, or the pixels."""
        if self.is_decoded:
            return WHOLE_SHARE
        return CROP_SHARE if self.epochs else 0.0

    @property
    def space_share(self) -> float:
        """What disks reserve for what they keep, over its bytes: pictures may turn out to be larger."""
        return STRAY if self.is_decoded else 1.0

    def later_epochs(self, epoch: int, sample: int, epochs: int) -> int:
        """Return for how many epochs after this one a sample that is decoded now gets crops; K > 0.

        Another K-th of the samples is decoded in each epoch, so that all epochs cost the same. epochs: of the run.
        """
        return min(epochs_left(self.epochs, epoch, sample), epochs - 1 - epoch)

    def share_beside(self, epoch: int, sample: int, epochs: int) -> float:
        """Return what is made of a sample beside its crop of an epoch, as a share of decoding. epochs: of the run."""
        return self.more_share * (self.later_epochs(epoch, sample, epochs) if self.epochs else 1)

    def bytes_for(self, samples: int) -> int:
        """Return what the crops of so many samples take at most: on average (K - 1) / 2 each."""
        if not self.epochs:
            return samples * self.crop_bytes
        crops = samples * (self.epochs - 1) / 2
        return math.ceil(min(crops + _STRAYS * math.sqrt(samples), 2 * crops)) * self.crop_bytes

    def samples_in(self, capacity_bytes: int, samples: int) -> int:
        """Return of how many of so many samples a capacity holds the crops."""
        least, most = 0, samples
        while least < most:
            middle = (least + most + 1) // 2
            if self.bytes_for(middle) <= capacity_bytes:
                least = middle
            else:
                most = middle - 1
        return least

    def sample_bytes(self, capacity_bytes: int, samples: int) -> int:
        """Return what each sample counts for where a capacity is shared out among so many.

        That depends on the capacity only where crops are made for some epochs at a time.
        """
        if not self.epochs:
            return self.crop_bytes
        kept = self.samples_in(capacity_bytes, samples)
        return capacity_bytes // kept if kept else capacity_bytes + 1


@dataclass(frozen=True, slots=True)
class FormCosts:
    """What an epoch of one rank takes with memory in one form, once it is filled.

    form: None for samples as stored. read_seconds: of the store's reads. decode_seconds: of all decode threads.
    """

    form: CropForm | None
    read_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """Reading and decoding overlap: the slower one counts."""
        return max(self.read_seconds, self.decode_seconds)


def choose_form(
    crop_bytes: int,
    sizes_bytes: NDArray[np.int64],
    capacity_bytes: int,
    machine: Machine,
    epochs: int,
    *,
    is_random: bool,
    picture_bytes: int = 0,
) -> FormCosts:
    """Return the form that takes least, and what; of equal ones that of samples as stored, then that of fewer epochs.

    crop_bytes: of one crop; 0 where there are none. sizes_bytes: int64[samples], as stored. capacity_bytes: of memory.
    machine: what the store and decoding cost, and how many ranks share both data set and store.
    epochs: of the run. is_random: whether a sample has another crop in each epoch.
    picture_bytes: of a decoded one, about; 0 where these cannot be kept.
    """
    samples, total = sizes_bytes.size, int(sizes_bytes.sum())
    largest = np.concatenate(([0], np.cumsum(np.sort(sizes_bytes)[::-1])))
    mean = total / max(samples, 1)
    of_rank = samples / machine.ranks
    price = machine.source_price(machine.ranks, max(mean, 1.0))

    def costs(form: CropForm | None) -> FormCosts:
        read, decoded, kept = 1 - min(1.0, capacity_bytes / max(total, 1)), 1.0, 0.0
        if form is not None:
            count = form.samples_in(capacity_bytes, samples)
            # Crops are kept of the samples that take longest.
            kept = count / max(samples, 1) if form.is_decoded else largest[count] / max(total, 1)
            finished = kept * (1 - 1 / form.epochs) if form.epochs else kept
            read = 1 - finished
            decoded = read + (kept - finished) * CROP_SHARE * max(0, form.epochs - 1) + kept * form.left_share
        # Also the crops that are used at once are finished.
        written = 0 if form is None or form.is_decoded else kept * crop_bytes
        crops = written / machine.staging_rate()
        decoding = of_rank * (decoded * machine.write_seconds(1) * mean + crops)
        return FormCosts(
            form, price(of_rank * read, of_rank * read * mean), decoding / machine.decoding_at_once
        )

    forms: list[CropForm | None] = [None]
    if crop_bytes and is_random:
        forms += [CropForm(crop_bytes, count) for count in range(2, min(epochs, MOST_EPOCHS) + 1)]
    elif crop_bytes:
        forms.append(CropForm(crop_bytes))
    if picture_bytes:
        forms.append(CropForm(picture_bytes, is_decoded=True))
    return min(map(costs, forms), key=lambda each: each.seconds)


class DiskPart(NamedTuple):
    """A disk that keeps samples, or a part of one that is a tier of its own.

    storage: with the bytes that samples may take which it is to keep. is_in_form: whether they are pixels.
    copies_bytes: beside these, for what memory keeps. space_share: over all of them, what to reserve: more than 1 where
        samples may turn out to be larger.
    padding_bytes: to reserve besides, so that samples begin at blocks of the disk.
    """

    storage: StorageClass
    is_in_form: bool = False
    copies_bytes: int = 0
    space_share: float = 1.0
    padding_bytes: int = 0

    @property
    def space_bytes(self) -> int:
        """What to reserve for samples."""
        return math.ceil(self.space_share * (self.storage.capacity_bytes + self.copies_bytes))


def disk_parts(
    form: CropForm,
    disks: Sequence[StorageClass],
    sizes_bytes: NDArray[np.int64],
    machine: Machine,
) -> list[DiskPart]:
    """Return which disks, or parts of them, have a form for all epochs, these first; none where all are best as stored.

    All samples are in the form where these fit and are read sooner than decoded. Else as many are that reading them and
    the others, and decoding these, takes least, if that saves a tenth of an epoch's waits: the largest, which take
    longest, unless pixels of whole pictures are kept. The store is not read more often for that: all have space.

    disks: with the bytes that each may have. sizes_bytes: int64[samples], as stored.
    machine: what memory keeps, and what decoding costs, by so many threads; a photograph's is taken where that was not
        measured.
    """
    if form.epochs or not disks or not sizes_bytes.size:
        return []
    samples, total = sizes_bytes.size, int(sizes_bytes.sum())
    space_bytes = sum(each.capacity_bytes for each in disks)
    rate = sum(each.read.at(each.threads) for each in disks)
    each_byte = machine.write_seconds(1) if machine.knows_decoding else 1 / _PHOTOGRAPH_BYTES_PER_SECOND
    each_byte /= machine.decoding_at_once
    all_in_form = max(samples * form.crop_bytes / rate, total * each_byte * form.left_share)
    # Pixels that take less than files leave fewer samples to the store, too.
    fit = space_bytes >= form.bytes_for(samples) or form.crop_bytes <= total / samples
    if fit and all_in_form < max(total / rate, total * each_byte):
        return [DiskPart(each, is_in_form=True) for each in disks]
    in_memory = sum(
        form.samples_in(each.capacity_bytes, samples) for each in machine.storage[1:2] if each.is_memory
    )
    counts = np.linspace(in_memory, samples, min(samples - in_memory, _SHARES_TRIED) + 1).astype(np.int64)
    in_form = total / samples * counts
    if not form.is_decoded:
        in_form = np.concatenate(([0], np.cumsum(np.sort(sizes_bytes)[::-1])))[counts]
    stored, pixels = total - in_form, counts * form.crop_bytes
    read = (counts - in_memory) * form.crop_bytes
    waits = np.maximum((read + stored) / rate, (stored + in_form * form.left_share) * each_byte)
    # At the edges of each part a sample may find no space.
    largest = int(sizes_bytes.max())
    edges = len(disks) * (form.space_share * form.crop_bytes + largest)
    waits[1:][(form.space_share * pixels + stored)[1:] + edges > space_bytes] = math.inf
    best = int(waits.argmin())
    # Where memory has them all, there is nothing to save.
    if waits[best] >= (1 - _LEAST_SAVED_SHARE) * waits[0]:
        return []
    if counts[best] == samples:
        return [DiskPart(each, is_in_form=True) for each in disks]
    read_share = float(read[best] / (read[best] + stored[best]))
    parts = []
    for disk in disks:
        of_disk = disk.capacity_bytes / space_bytes
        front = DiskPart(
            part_of(
                disk,
                f"{disk.name}, {form.name}",
                math.ceil(of_disk * read[best]) + form.crop_bytes,
                read_share,
            ),
            is_in_form=True,
            copies_bytes=math.ceil(of_disk * (pixels[best] - read[best])),
            space_share=form.space_share,
        )
        rest_bytes = min(disk.capacity_bytes - front.space_bytes, total)
        if rest_bytes < largest:
            return []
        parts += [front, DiskPart(part_of(disk, disk.name, rest_bytes, 1 - read_share))]
    parts.sort(key=lambda each: not each.is_in_form)
    on = replace(machine, storage=(machine.storage[0], *(each.storage for each in parts)))
    shares = [share_of_store_rate(on, number, total / samples) for number in range(1, len(parts) + 1)]
    # A policy would leave out so slow a tier.
    return parts if min(shares[len(disks) :]) >= LEAST_SHARE else []


def part_of(disk: StorageClass, name: str, capacity_bytes: int, read_share: float) -> StorageClass:
    """Return a part of a disk, of which so much of its reads are: all parts are read at once."""
    read, write = (
        curve and Curve(tuple((users, rate * read_share) for users, rate in curve.points))
        for curve in (disk.read, disk.write)
    )
    assert read is not None, "a disk has a read curve"
    return replace(disk, name=name, capacity_bytes=capacity_bytes, read=read, write=write)
