"""What a loader reports when it starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from tests.for_each import for_each

from penstock.loader import Loader, MemoryBudget
from penstock.loader.dataset import DatasetFetcher, SampleDecoder, numpy_leaf
from penstock.loader.fetching import SourceFetcher
from penstock.loader.images import ImageDecoder
from penstock.loader.opened import data_of
from penstock.loader.setup import Setup, with_memory
from penstock.loader.start_lines import start_lines
from penstock.loader.transforms import RandomHorizontalFlip, Resize, ToTensor, compile_pipeline
from penstock.loader.transforms.memory import DecodeMemory
from penstock.plan import AccessPlan, BundleShuffle, FullShuffle, Sequential
from penstock.plan.splits import Local
from penstock.policy import StagingLimits, place_by_frequency
from penstock.policy.loading import Frequency, LoadingPolicy, Staging

COUNT = 1000
TO_ARRAY = (Resize((8, 8)), ToTensor())


class Photos:
    """A source of a thousand files of 100 kB that is never read."""

    root = "/data/photos"
    classes = ("cat", "dog")
    labels = np.zeros(COUNT, np.int64)
    sizes_bytes = np.full(COUNT, 100_000)

    def __len__(self) -> int:
        return COUNT

    def describe(self, sample: int) -> str:
        return f"{sample}.jpg"

    def read(self, sample: int) -> bytes:
        raise AssertionError("nothing is read before the first line")

    def read_into(self, sample: int, buffer: memoryview) -> int:
        raise AssertionError("nothing is read before the first line")


def setup_of(plan: AccessPlan, transforms: Any = TO_ARRAY, **fields: Any) -> Setup:
    budget = MemoryBudget(100_000_000, 5_000_000, 4, 5_000_000, 25_000_000, 9_000_000)
    photos, pipeline = Photos(), compile_pipeline(transforms, seed=0)
    placement = place_by_frequency(plan, 0, Photos.sizes_bytes, [25_000_000])
    limits, machine = StagingLimits(4, 32, 2, 5_000_000), with_memory(None, budget, 2, plan.ranks)
    setup = Setup(
        plan,
        0,
        Photos.sizes_bytes,
        data_of(photos),
        SourceFetcher(photos, {}),
        ImageDecoder(
            compile_pipeline(TO_ARRAY, seed=0), photos.labels, photos.describe, DecodeMemory(9_000_000)
        ),
        pipeline,
        budget,
        machine,
        False,
        Frequency(),
        placement,
        limits,
        2,
        "one per core (cgroup limit)",
        photos,
        "as readers= says",
    )
    return replace(setup, **fields)


def test_two_lines_say_what_is_read_in_which_order_by_what_and_in_how_much_memory() -> None:
    assert start_lines(setup_of(AccessPlan(FullShuffle(COUNT, 7), 64, 90))) == [
        "reads 1,000 samples (100 MB) of Photos '/data/photos' in the order FullShuffle(seed=7): 90 epochs of 16 "
        "steps, 64 samples a step, 40 in the last of an epoch",
        "starts with 2 decode threads, one per core (cgroup limit), and 32 reading threads, as readers= says; takes "
        # 4 x 5 + 5 + 9 + 25
        "at most 59 MB of memory (100 MB while batches are kept): 4 batch slots of 5 MB, 5 MB for files being read, "
        "9 MB for pictures being decoded, 25 MB to keep 25 % of the samples, those used most, for later epochs (policy "
        "frequency)",
    ]


@for_each(
    ("plan", "text"),
    [
        (
            AccessPlan(Sequential(COUNT), 50, 1),
            "in the order Sequential: 1 epoch of 20 steps, 50 samples a step",
        ),
        (
            AccessPlan(BundleShuffle(COUNT, 3), 64, 2, drop_last=True),
            "BundleShuffle(seed=3): 2 epochs of 15 steps, 64 samples a step, the last 40 of an epoch dropped",
        ),
        (
            AccessPlan(Sequential(COUNT), 64, 1, 2),
            "64 samples a step, 32 on each of 2 ranks, 40 in the last of an",
        ),
        (
            AccessPlan(Sequential(COUNT), 64, 1, 3),
            "64 samples a step, 21 to 22 on each of 3 ranks, 40 in the last",
        ),
        (
            AccessPlan(FullShuffle(COUNT, 3), 64, 1, 2, "local"),
            "FullShuffle(seed=3): 1 epoch of 16 steps, 64 samples",
        ),
        (AccessPlan(Sequential(COUNT), 2000, 1), "1 epoch of 1 step, 1,000 samples a step"),
    ],
)
def test_the_steps_are_told_with_their_ends_and_the_share_of_a_rank(plan: AccessPlan, text: str) -> None:
    first, _, *more = start_lines(setup_of(plan))

    assert text in first
    assert ["BatchNorm" in line for line in more] == [True] * (plan.split == Local())
    assert not first.endswith(",")


@for_each(
    ("tier_bytes", "kept_bytes", "policy", "text"),
    [
        (
            100_000_000,
            100_000_000,
            Frequency(),
            ", 100 MB to keep all samples for later epochs (policy frequency)",
        ),
        (0, 0, Frequency(), ", none to keep samples for later epochs (policy frequency)"),
        # A policy may keep less than there is space for.
        (
            25_000_000,
            10_000_000,
            Staging("mine"),
            ", 10 MB to keep 10 % of the samples for later epochs (policy mine)",
        ),
        (25_000_000, 0, Staging("mine"), "; policy mine"),
        (0, 0, Staging(), "; policy staging"),
    ],
)
def test_what_is_kept_is_named_with_its_policy_where_anything_is(
    tier_bytes: int, kept_bytes: int, policy: LoadingPolicy, text: str
) -> None:
    plan = AccessPlan(Sequential(COUNT), 64, 1)
    budget = replace(setup_of(plan).budget, tier_bytes=tier_bytes)
    placement = place_by_frequency(plan, 0, Photos.sizes_bytes, [kept_bytes])

    _, line = start_lines(setup_of(plan, budget=budget, placement=placement, policy=policy))

    assert line.endswith(f"9 MB for pictures being decoded{text}")
    assert f"at most {34 + kept_bytes // 10**6} MB of memory" in line


def test_the_machine_file_and_the_seed_of_random_transforms_are_named() -> None:
    plan = AccessPlan(Sequential(COUNT), 64, 1)
    flips = compile_pipeline([RandomHorizontalFlip(), *TO_ARRAY], seed=7)

    first, second = start_lines(setup_of(plan, pipeline=flips, draws_seed=7, machine_file="cluster.toml"))[:2]
    assert "in the order Sequential, transforms drawn with seed=7: 1 epoch" in first
    assert "as readers= says; machine 'cluster.toml'; takes" in second
    shuffled = AccessPlan(FullShuffle(COUNT, 7), 64, 1)
    assert "in the order FullShuffle(seed=7): " in start_lines(setup_of(shuffled, pipeline=flips))[0]


def test_numbers_from_0_to_255_in_a_float_type_get_a_line_of_their_own() -> None:
    plan = AccessPlan(Sequential(COUNT), 64, 1)

    _, _, third = start_lines(setup_of(plan, transforms=[Resize((8, 8))]))

    assert third.startswith("images are float32 from 0 to 255, because ToTensor is not among the transforms")
    for transforms in ([Resize((8, 8)), ToTensor()], [Resize((8, 8)), lambda picture: picture]):
        assert len(start_lines(setup_of(plan, transforms=transforms))) == 2
    as_bytes = compile_pipeline([Resize((8, 8))], seed=0, dtype="uint8")
    assert len(start_lines(setup_of(plan, pipeline=as_bytes))) == 2


class Numbers:
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return np.zeros(4), index


def test_a_data_set_is_named_by_its_type_and_promises_nothing_about_what_is_kept() -> None:
    plan = AccessPlan(Sequential(COUNT), 64, 1)
    numbers = DatasetFetcher(Numbers())
    setup = setup_of(
        plan,
        data=data_of(Numbers()),
        fetcher=numbers,
        decoder=SampleDecoder((0, Numbers()[0]), numbers.describe, numpy_leaf),
        pipeline=None,
        sizes_bytes=np.zeros(COUNT, np.int64),
        limits=StagingLimits(4, 0, 16, 5_000_000),
        decoders_because="as decoders= says",
    )

    assert start_lines(setup) == [
        "reads 1,000 samples of Numbers in the order Sequential: 1 epoch of 16 steps, 64 samples a step, 40 in the "
        "last of an epoch",
        "starts with 16 threads to call Numbers, as decoders= says; takes at most 20 MB of memory (100 MB while "
        "batches are kept): 4 batch slots of 5 MB",
    ]


def test_the_first_rank_reports_at_the_start_and_each_can_be_asked() -> None:
    lines: dict[int, list[str]] = {0: [], 1: []}
    asked = {}
    for rank in (0, 1):
        with Loader(
            Numbers(),
            batch_size=10,
            epochs=1,
            rank=rank,
            world_size=2,
            memory="1 MB",
            report=lines[rank].append,
        ) as loader:
            asked[rank] = loader.start_lines
            assert not lines[rank]
            loader.start()

    assert lines == {0: asked[0], 1: []}
    assert asked[0][0].startswith("Numbers, rank 0: reads 1,000 samples of Numbers")
    assert "10 samples a step, 5 on each of 2 ranks" in asked[1][0]
