"""In which form memory and disks keep samples: as stored, or as what decoding makes of them.

A seed fixes every crop of every epoch, so that a picture which is decoded once can serve several epochs: the crops of
the next ones are made along with its own, and kept as bytes in place of the file. Where nothing is drawn, one crop
serves all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine, StorageClass
from penstock.policy.decisions import epochs_left

#: How far the number of crops strays from its mean, in square roots of the number of samples: as each epoch uses them
#: in another order. Of K = 3 a standard deviation is 0.7.
_STRAYS = 3.0
#: For how many epochs crops are made at most where the number is chosen: each more saves less, and takes as much space.
MOST_EPOCHS = 8
#: What each crop beside the first adds to a decoding, as a share of it: a larger region, and resampling. Measured:
#: photographs of 500 x 400 to 224 x 224, docs/benchmarks.md.
CROP_SHARE = 0.4
#: What making a crop of decoded pixels takes, as a share of decoding and making it. Measured: photographs of 500 x 400
#: to 224 x 224, docs/benchmarks.md.
PIXELS_SHARE = 0.35
#: What a thread decodes of photographs where nobody measured it. Measured: docs/benchmarks.md.
_PHOTOGRAPH_BYTES_PER_SECOND = 150e6


@dataclass(frozen=True, slots=True)
class CropForm:
    """Memory keeps samples as crops, or as whole decoded pictures, in place of their bytes.

    Whoever decodes a sample makes them, so that nothing is brought in before a batch wants it.

    crop_bytes: of one crop; of a picture, about, for decoded ones.
    epochs: K: a sample is decoded every K epochs, for that epoch and those up to the next time; each crop is gone once
        it is used. 0: one crop serves all epochs.
    is_decoded: whether pictures are kept, of which any epoch's crop is made; for all epochs.
    is_on_disks: whether the tiers behind memory have this form, too.
    Raises: ConfigError for an epoch count that saves nothing, or no bytes.
    """

    crop_bytes: int
    epochs: int = 0
    is_decoded: bool = False
    is_on_disks: bool = False

    #: The tier that has this form in any case: memory.
    TIER = 1

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
        return tier == self.TIER or (tier > self.TIER and self.is_on_disks)

    @property
    def left_share(self) -> float:
        """What using a kept sample takes, as a share of decoding it, beside writing a crop's bytes to the batch."""
        return PIXELS_SHARE if self.is_decoded else 0.0

    def later_epochs(self, epoch: int, sample: int) -> int:
        """Return for how many epochs after this one a sample that is decoded now gets crops; K > 0.

        Another K-th of the samples is decoded in each epoch, so that all epochs cost the same.
        """
        return epochs_left(self.epochs, epoch, sample)

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
        """Return what each sample counts for where a capacity is shared out among so many."""
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
        read, decoded, finished = 1 - min(1.0, capacity_bytes / max(total, 1)), 1.0, 0.0
        if form is not None:
            count = form.samples_in(capacity_bytes, samples)
            # Crops are kept of the samples that take longest.
            kept = count / max(samples, 1) if form.is_decoded else largest[count] / max(total, 1)
            finished = kept * (1 - 1 / form.epochs) if form.epochs else kept
            read = 1 - finished
            decoded = read + (kept - finished) * CROP_SHARE * max(0, form.epochs - 1) + kept * form.left_share
        written = 0 if form is None or form.is_decoded else finished * crop_bytes
        crops = written / machine.write_rate(0, machine.decode_threads)
        decoding = of_rank * (decoded * machine.write_seconds(1) * mean + crops)
        return FormCosts(
            form, price(of_rank * read, of_rank * read * mean), decoding / machine.decode_threads
        )

    forms: list[CropForm | None] = [None]
    if crop_bytes and is_random:
        forms += [CropForm(crop_bytes, count) for count in range(2, min(epochs, MOST_EPOCHS) + 1)]
    elif crop_bytes:
        forms.append(CropForm(crop_bytes))
    if picture_bytes:
        forms.append(CropForm(picture_bytes, is_decoded=True))
    return min(map(costs, forms), key=lambda each: each.seconds)


def with_disks(
    form: CropForm, disks: Sequence[StorageClass], sizes_bytes: NDArray[np.int64], machine: Machine
) -> CropForm:
    """Return the form for memory and disks, if it is for all epochs, fits there, and is sooner read than decoded.

    Samples as stored take less space: where not all fit in the form, the store would be read more often.

    disks: with the bytes that each may have. sizes_bytes: int64[samples], as stored.
    machine: what decoding costs, by so many threads; a photograph's is taken where that was not measured.
    """
    space_bytes = sum(each.capacity_bytes for each in disks)
    if form.epochs or not disks or space_bytes < form.bytes_for(sizes_bytes.size):
        return form
    mean = float(sizes_bytes.mean())
    rate = sum(each.read.at(each.threads) for each in disks)
    is_known = math.isfinite(machine.preprocess_bytes_per_second)
    each_byte = machine.write_seconds(1) if is_known else 1 / _PHOTOGRAPH_BYTES_PER_SECOND
    decoding = mean * each_byte / machine.decode_threads
    as_stored = max(mean / rate, decoding)
    in_form = max(form.crop_bytes / rate, decoding * form.left_share)
    return replace(form, is_on_disks=in_form < as_stored)
