"""What every fetcher and decoder must do; a new one is added to `WORKS` and has all of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.flow.engine import Failed
from penstock.loader.dataset import DatasetWork
from penstock.loader.images import ImageWork
from penstock.loader.transforms import Resize, ToTensor
from penstock.loader.transforms.pipeline import compile_pipeline
from penstock.policy import Load
from penstock.store import FlatFolder, MemoryTier
from penstock.store.calls import Calls
from penstock.trace.schema import SOURCE, STAGING

SAMPLES, BROKEN = 7, 3


@dataclass
class Made:
    """work: a fetcher and decoder of seven samples, the fourth of which cannot be had. damaged: what no decoder takes.

    value: of every element of a sample's row in the first array.
    """

    work: Any
    damaged: Any
    tier: int
    value: Callable[[int], float]

    def arrays(self) -> tuple[NDArray[Any], ...]:
        shapes = ((9, *field.shape) for field in self.work.fields)
        return tuple(
            np.full(shape, 77, field.dtype) for shape, field in zip(shapes, self.work.fields, strict=True)
        )

    def fetch(self, samples: list[int], origin: int = SOURCE, rest: int = STAGING) -> list[Any]:
        data: list[Any] = self.work.fetch(
            samples, origin, [rest] * len(samples), lambda sample: None, lasting=True
        )
        return data

    def decode(
        self, rows: list[int], samples: list[int], data: list[Any], arrays: tuple[NDArray[Any], ...]
    ) -> list[int]:
        """Return the indices of those that failed."""
        load = Load(
            0, 0, 0, np.arange(9), 0, rows, samples, [STAGING] * len(rows), [STAGING] * len(rows), rows
        )
        failed = self.work.decode(load, rows, samples, data, arrays, lambda sample: None)
        assert all(isinstance(error, Exception) for _, error in failed)
        return [index for index, _ in failed]


def pictures(folder: Path, tiers: dict[int, MemoryTier], tier: int) -> Made:
    for number in range(SAMPLES):
        cv2.imwrite(str(folder / f"{number}.png"), np.full((8, 8, 3), 10 * number, np.uint8))
    source = FlatFolder(folder)
    (folder / f"{BROKEN}.png").unlink()
    work = ImageWork(source, compile_pipeline((Resize((8, 8)), ToTensor()), seed=0), tiers)
    work.limit_decoding(1 << 24)
    return Made(work, b"no picture", tier, lambda sample: 10 * sample / 255)


class Numbers:
    """A map-style data set."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        if index == BROKEN:
            raise OSError("the disk is gone")
        return np.full((2, 3), index, np.float32), index


class NumbersByList(Numbers):
    def __getitems__(self, indices: list[int]) -> list[tuple[NDArray[np.float32], int]]:
        return [self[index] for index in indices]


def data_set(of: Numbers) -> Made:
    def as_array(leaf: Any) -> NDArray[Any] | None:
        return np.asarray(leaf) if isinstance(leaf, np.ndarray | int) else None

    return Made(DatasetWork(of, [0], as_array, True, Calls()), (np.zeros((5, 5)), 1), STAGING, float)


WORKS: dict[str, Callable[[Path], Made]] = {
    "pictures": lambda folder: pictures(folder, {}, STAGING),
    "pictures, kept": lambda folder: pictures(folder, {1: MemoryTier(1 << 20)}, 1),
    "data set": lambda folder: data_set(Numbers()),
    "data set, by the list": lambda folder: data_set(NumbersByList()),
}


@pytest.fixture(params=WORKS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    made = WORKS[request.param](tmp_path)
    yield made
    made.work.close()


class TestFetcherContract:
    def test_it_says_where_it_reads_and_names_each_sample(self, made: Made) -> None:
        assert made.work.place
        assert len({made.work.describe(sample) for sample in range(SAMPLES)}) == SAMPLES

    @pytest.mark.parametrize("samples", [[5], [6, 0, 2], [4, 1, 4]])
    def test_what_it_brings_is_in_the_order_of_the_question(self, made: Made, samples: list[int]) -> None:
        arrays = made.arrays()

        data = made.fetch(samples)

        assert len(data) == len(samples)
        assert made.decode(list(range(len(samples))), samples, data, arrays) == []
        for row, sample in enumerate(samples):
            assert arrays[0][row] == pytest.approx(made.value(sample))

    def test_a_sample_that_cannot_be_had_fails_alone(self, made: Made) -> None:
        samples = [2, BROKEN, 6]

        data = made.fetch(samples)

        assert [isinstance(each, Failed) for each in data] == [False, True, False]
        error = data[1].error
        assert made.work.describe(BROKEN) in "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert isinstance(made.fetch([BROKEN])[0], Failed)

    def test_what_a_tier_is_to_keep_is_there_afterwards_and_nothing_else(self, made: Made) -> None:
        if made.tier == STAGING:
            return
        brought = [bytes(each) for each in made.fetch([5, 1], rest=made.tier)]

        found = made.fetch([1, 4, 5], origin=made.tier)

        assert isinstance(found[1], Failed)
        assert [bytes(found[2]), bytes(found[0])] == brought


class TestDecoderContract:
    def test_it_writes_the_rows_that_it_is_told_and_no_others(self, made: Made) -> None:
        arrays, samples = made.arrays(), [1, 6, 2]

        assert made.decode([4, 0, 7], samples, made.fetch(samples), arrays) == []

        for row, sample in ((4, 1), (0, 6), (7, 2)):
            assert arrays[0][row] == pytest.approx(made.value(sample))
        for array in arrays:
            assert (array[[1, 2, 3, 5, 6, 8]] == 77).all()

    def test_what_cannot_be_decoded_fails_alone_by_its_index(self, made: Made) -> None:
        arrays, samples = made.arrays(), [1, 6, 2]
        data = made.fetch(samples)
        data[1] = made.damaged

        assert made.decode([4, 0, 7], samples, data, arrays) == [1]

        for row, sample in ((4, 1), (7, 2)):
            assert arrays[0][row] == pytest.approx(made.value(sample))
