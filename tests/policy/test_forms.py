"""Crops kept in place of bytes: how many there are at a time, and when a sample is decoded anew."""

from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, BundleShuffle, FullShuffle, Order, Sequential
from penstock.policy import Load, Move, OwnRead, Placement, Ready, Scheduler, StagingLimits
from penstock.policy.decisions import UNREAD
from penstock.policy.forms import CROP_SHARE, CropForm, FormCosts, choose_form, disk_parts
from penstock.policy.loading import Frequency, Job, OneHome
from penstock.policy.runnable import placement_of, shared_by
from penstock.trace.schema import SOURCE, STAGING

CROP = 1000


@for_each("epochs", [2, 3, 5])
@for_each("order", [FullShuffle(700, 1), Sequential(700), BundleShuffle(700, 3, 0.1)])
def test_each_epoch_decodes_its_share_and_crops_stay_within_what_was_counted(
    epochs: int, order: Order
) -> None:
    form, plan = CropForm(CROP, epochs), AccessPlan(order, 10, 9)
    kept: set[tuple[int, int]] = set()
    most = 0
    for epoch in range(plan.epochs):
        decoded = 0
        for sample in plan.stream(0, epoch, 0, plan.samples).tolist():
            if (sample, epoch) in kept:
                kept.remove((sample, epoch))
            else:
                decoded += 1
                later = form.later_epochs(epoch, sample, plan.epochs)
                assert 0 <= later < epochs
                kept |= {(sample, epoch + after) for after in range(1, later + 1)}
            most = max(most, len(kept))
        assert epoch == 0 or abs(decoded - plan.samples / epochs) < 1
    assert most * CROP <= form.bytes_for(plan.samples)
    # No more than a tenth of it was for nothing.
    assert form.bytes_for(100_000) < 1.02 * 100_000 * CROP * (epochs - 1) / 2


@for_each("epochs", [0, 2, 3, 8])
def test_so_many_samples_are_kept_as_crops_fit_and_other_tiers_keep_samples_as_stored(epochs: int) -> None:
    form, plan = CropForm(CROP, epochs), AccessPlan(FullShuffle(600, 1), 10, 4)
    sizes = np.random.default_rng(0).integers(1, 300, 600)
    memory_bytes, disk_bytes = 200 * CROP, int(sizes.sum()) // 4
    curve = Curve(((1, 1e9),))
    machine = Machine(
        SharedStore(None, Curve(((1, 1e6),)), 1e-3),
        (
            StorageClass("staging", 10**6, 1, curve),
            StorageClass("memory", memory_bytes, 1, curve),
            StorageClass("disk", disk_bytes, 1, curve, backend="filesystem", path="/disk"),
        ),
    )
    placement = placement_of(Frequency(), Job(plan, sizes, machine, rank=0, form=form), 0)

    count = placement.samples_in(1).size
    assert form.bytes_for(count) <= memory_bytes < form.bytes_for(count + 1)
    on_disk = placement.samples_in(2)
    assert disk_bytes - sizes.max() < sizes[on_disk].sum() <= disk_bytes


@for_each("is_decoded", [False, True])
def test_ranks_that_share_what_they_decode_keep_as_much_as_each_has(is_decoded: bool) -> None:
    """A picture may be kept as its file: what is larger than pixels takes more."""
    plan, sizes = AccessPlan(FullShuffle(60, 1), 10, 4, ranks=3), np.full(60, 2 * CROP)
    curve, form = Curve(((1, 1e9),)), CropForm(CROP, is_decoded=is_decoded)
    storage = StorageClass("staging", 10**6, 1, curve), StorageClass("memory", 90 * CROP, 1, curve)
    machine = Machine(SharedStore(None, curve), storage, ranks=3)
    tiers_bytes = {0: [12 * CROP], 1: [CROP // 2], 2: [90 * CROP]}
    job = Job(plan, sizes, machine, form=form, sharing=range(3), tiers_bytes=tiers_bytes)

    kept = [each.samples.size for each in shared_by(OneHome("first-reader"), job).kept]

    assert kept == ([5, 0, 44] if is_decoded else [12, 0, 48])


def test_crops_are_kept_of_the_samples_that_take_longest_of_those_that_are_read_equally_often() -> None:
    plan, sizes = AccessPlan(FullShuffle(60, 1), 10, 4), np.random.default_rng(1).integers(1, 300, 60)
    curve = Curve(((1, 1e9),))
    machine = Machine(
        SharedStore(None, curve),
        (StorageClass("staging", 10**6, 1, curve), StorageClass("memory", 20 * CROP, 1, curve)),
    )

    def kept(form: CropForm | None, machine: Machine = machine, plan: AccessPlan = plan) -> set[int]:
        found = placement_of(Frequency(), Job(plan, sizes, machine, rank=0, form=form), 0).samples_in(1)
        return set(found.tolist())

    assert kept(CropForm(CROP)) == set(np.argsort(-sizes, kind="stable")[:20].tolist())
    # Decoded pictures take space as they take time; and who is read more often comes first.
    assert kept(CropForm(CROP, is_decoded=True)) == set(range(20))
    of_two = AccessPlan(FullShuffle(60, 1), 10, 4, ranks=2)
    found = kept(CropForm(CROP), replace(machine, ranks=2), of_two)
    counts = np.bincount(of_two.strings()[0], minlength=60)
    least = min(counts[list(found)])
    assert set(np.flatnonzero(counts > least).tolist()) <= found


def best_of(
    store: float, decoding: float, memory_bytes: int, epochs: int = 30, *, is_random: bool = True
) -> FormCosts:
    """300 samples of 100 kB, crops of 50 kB; rates in bytes/s."""
    curve = Curve(((1, 1e10),))
    machine = Machine(
        SharedStore(None, Curve(((1, store),))),
        (StorageClass("staging", 10**8, 1, curve),),
        preprocess_bytes_per_second=decoding,
    )
    return choose_form(50_000, np.full(300, 100_000), memory_bytes, machine, epochs, is_random=is_random)


def test_the_form_is_chosen_that_takes_least_of_what_an_epoch_waits_for() -> None:
    # The store takes 3 s for all samples, decoding 0.3 s; memory has space for all as stored: then nothing is read.
    slow_store = best_of(1e7, 1e8, 30_000_000)
    assert slow_store.form is None
    assert slow_store.read_seconds == 0.0
    assert slow_store.decode_seconds == pytest.approx(0.3)
    # Decoding takes 3 s. Of K = 3 crops a third is read and decoded each time, and decoded for three.
    stored, thrice = (best_of(1e9, 1e7, 30_000_000, epochs) for epochs in (1, 3))
    assert stored.form is None
    assert stored.seconds == pytest.approx(3.0)
    assert thrice.form == CropForm(50_000, 3)
    assert thrice.read_seconds == pytest.approx(0.03 / 3)
    assert thrice.decode_seconds == pytest.approx(1.0 * (1 + 2 * CROP_SHARE), rel=0.01)
    assert best_of(1e9, 1e7, 30_000_000).seconds <= thrice.seconds < stored.seconds
    # Where memory has space for a few crops only, making more of each picture leaves out other pictures.
    few, many = (best_of(1e9, 1e7, size).form for size in (3_000_000, 300_000_000))
    assert few is not None
    assert many is not None
    assert few.epochs < many.epochs
    # One crop for ever: nothing is left but to use it.
    fixed = best_of(1e9, 1e7, 30_000_000, is_random=False)
    assert fixed.form == CropForm(50_000)
    assert fixed.read_seconds == 0.0
    assert fixed.decode_seconds == pytest.approx(300 * 50_000 / 1e10)


def test_disks_have_the_form_where_all_fits_and_is_read_sooner_than_decoded_and_else_for_what_saves_most() -> (
    None
):
    sizes, curve = np.full(100, 100_000), Curve(((1, 1e9),))

    def in_form(
        form: CropForm, rate: float, capacity_bytes: int, decoding: float = 50e6, in_memory: int = 0
    ) -> int:
        """Return of how many samples pixels are kept; in_memory: of how many memory has them."""
        memory = StorageClass("memory", max(1, in_memory * form.crop_bytes), 1, curve)
        disk = StorageClass(
            "disk", capacity_bytes, 1, Curve(((1, rate),)), backend="filesystem", path="/disk"
        )
        on = Machine(
            SharedStore(None, Curve(((1, 1e6),))),
            (StorageClass("staging", 10**6, 1, curve), memory),
            preprocess_bytes_per_second=decoding,
        )
        parts = disk_parts(form, [disk], sizes, on)
        assert all(each.storage.read.at(1) > 0 for each in parts)
        return sum(
            min(100, each.storage.capacity_bytes // form.crop_bytes) for each in parts if each.is_in_form
        )

    # 2 ms to decode; 1.5 ms and 15 ms to read; 0.25 of the 2 ms are left for decoded ones.
    crop, picture = CropForm(150_000), CropForm(600_000, is_decoded=True)
    assert in_form(crop, 100e6, 15_000_000) == 100
    assert in_form(crop, 10e6, 15_000_000) == 0
    assert in_form(picture, 400e6, 60_000_000) == 100
    assert in_form(CropForm(150_000, 3), 100e6, 10**9) == 0
    # A sample takes 1 ms + 0.5 x to read, and 2 (1 - x) to decode: as long for x = 0.4. There is space for one more.
    assert in_form(crop, 100e6, 14_999_999) in (40, 41, 42)
    # 0.4 ms + 2 x, and 2 - 1.5 x.
    assert in_form(picture, 250e6, 70_000_000) in (45, 46, 47)
    # All have space as stored, and few as crops: not worth two forms. Then a fifth of them.
    assert in_form(crop, 100e6, 10_500_000) == 0
    assert in_form(crop, 100e6, 11_250_000) in (20, 21)
    # Nobody measured decoding: a photograph of 100 kB takes 0.7 ms.
    assert in_form(crop, 250e6, 10**9, float("inf")) == 100
    assert 0 < in_form(crop, 200e6, 10**9, float("inf")) < 100
    # Memory has all crops: a disk is as good for the files. Or all but some of the pictures, which a disk that is slow
    # reads sooner than it decodes the files.
    assert in_form(crop, 100e6, 5_000_000, in_memory=100) == 0
    assert in_form(crop, 100e6, 5_000_000, in_memory=200) == 0
    assert in_form(picture, 290e6, 150_000_000) < 100
    assert in_form(picture, 290e6, 150_000_000, in_memory=80) == 100
    # Crops that take less than the files, of which not all fit either way.
    assert in_form(CropForm(50_000), 100e6, 2_000_000) == 40


@pytest.mark.parametrize(("is_decoded", "share"), [(False, 0.6), (True, 2.5)])
def test_a_disk_that_has_samples_in_two_forms_has_all_of_them_and_pixels_of_the_largest(
    is_decoded: bool, share: float
) -> None:
    sizes = np.random.default_rng(2).integers(20_000, 200_000, 300)
    form = CropForm(600_000 if is_decoded else 150_000, is_decoded=is_decoded)
    read, total = Curve(((1, 300e6), (4, 600e6))), int(sizes.sum())
    disks = [
        StorageClass(name, int(part * total), 4, read, backend="filesystem", path=f"/{name}")
        for name, part in (("disk", share), ("other", share + 0.1))
    ]
    memory = StorageClass("memory", 20 * form.crop_bytes, 1, Curve(((1, 1e9),)))
    on = Machine(
        SharedStore(None, Curve(((1, 20e6),)), threads=4),
        (replace(memory, name="staging"), memory),
        preprocess_bytes_per_second=40e6,
    )

    parts = disk_parts(form, disks, sizes, on)

    assert [each.is_in_form for each in parts] == [True, True, False, False]
    for disk in disks:
        of_disk = [each for each in parts if each.storage.path == disk.path]
        assert sum(each.space_bytes for each in of_disk) <= disk.capacity_bytes
        for readers in (1, 4):
            assert sum(each.storage.read.at(readers) for each in of_disk) == pytest.approx(read.at(readers))
    storage = (*on.storage, *(each.storage for each in parts))
    job = Job(
        AccessPlan(FullShuffle(sizes.size, 1), 30, 3),
        sizes,
        replace(on, storage=storage),
        form=replace(form, disks=2),
    )
    tier_of = placement_of(Frequency(is_alone=True), job, 0).tier_of
    assert tier_of.min() == 1
    in_form = tier_of <= 3
    assert 20 < np.count_nonzero(in_form) < sizes.size
    assert sum(each.copies_bytes for each in parts) >= 20 * form.crop_bytes
    # Pictures may turn out to be larger.
    assert all(each.space_share == (2.0 if is_decoded else 1.0) for each in parts if each.is_in_form)
    if not is_decoded:
        assert sizes[in_form].min() >= sizes[~in_form].max()


def test_forms_that_save_nothing_are_refused() -> None:
    for epochs in (-1, 1):
        with pytest.raises(ConfigError, match=f"kept for {epochs} epochs"):
            CropForm(CROP, epochs)


@pytest.mark.parametrize("seconds", [1e-6, 0.5])
def test_workers_alone_read_crops_however_long_that_takes_and_bytes_every_so_many_epochs(
    seconds: float,
) -> None:
    form, plan = CropForm(CROP, 3), AccessPlan(FullShuffle(48, 1), 4, 6)
    curve = Curve(((1, 1e6),))
    machine = Machine(
        SharedStore(None, curve, 1e-3),
        (StorageClass("staging", 10**6, 1, curve), StorageClass("memory", 10**6, 1, curve)),
    )
    sizes, placement = np.full(48, 100), Placement(np.ones(48, np.int8), np.arange(48))
    limits = StagingLimits(3, 2, 1, 10**6)
    scheduler = Scheduler(plan, 0, sizes, placement, machine, limits, form=form)
    origins: dict[tuple[int, int], int] = {}
    to_do, brought, now = deque(scheduler.start(0.0)), dict[int, int](), 0.0
    while to_do:
        now += seconds
        match to_do.popleft():
            case Move() as move:
                brought |= dict.fromkeys(move.entries, move.origin)
                to_do += scheduler.moved(move, seconds, [], now)
            case Load() as load:
                for sample, origin, entry in zip(load.ids.tolist(), load.origins, load.entries, strict=True):
                    origins[load.epoch, sample] = brought[entry] if origin == STAGING else origin
                own = Counter(each for each in load.origins if each != STAGING)
                reads = [OwnRead(origin, count, count * seconds) for origin, count in own.items()]
                # Whoever waited for another epoch's worker is sent to the tier, which has no crop of this one.
                failed = {
                    index: UNREAD
                    for index, sample in enumerate(load.ids.tolist())
                    if load.origins[index] == form.TIER and (load.epoch + sample) % 3 == 0
                }
                to_do += scheduler.loaded(load, failed, [] if failed else reads, now, seconds, seconds)
            case Ready() as ready:
                to_do += scheduler.slot_freed(ready.slot, now)

    assert set(brought.values()) <= {SOURCE}
    is_due = {at: at[0] == 0 or sum(at) % 3 == 0 for at in origins}
    assert {origins[at] for at, due in is_due.items() if due} == {SOURCE}
    # But for those that follow so soon that the bytes are still there.
    from_bytes = sum(origins[at] != form.TIER for at, due in is_due.items() if not due)
    assert from_bytes <= 6 * limits.slots * 4 < 0.4 * len(origins)
