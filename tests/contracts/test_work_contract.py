"""What every fetcher and decoder must do; a new one is added to `PARTS` and has all of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.flow.work import Brought, Decoder, Failed, Fetcher, Request
from penstock.loader.dataset import DatasetFetcher, SampleDecoder
from penstock.loader.fetching import SourceFetcher
from penstock.loader.images import ImageDecoder
from penstock.loader.transforms import DecodeRaw, Resize, ToTensor
from penstock.loader.transforms.memory import DecodeMemory
from penstock.loader.transforms.pipeline import compile_pipeline
from penstock.policy import Load
from penstock.store import FlatFolder, MemoryTier
from penstock.trace.schema import SOURCE, STAGING

SAMPLES, BROKEN = 7, 3


@dataclass
class Made:
    """A fetcher and a decoder of seven samples, the fourth of which cannot be had.

    damaged: what the decoder does not take. tier: that keeps samples, or STAGING.
    value: of every element of a sample's row in the first array.
    """

    fetcher: Fetcher
    decoder: Decoder
    damaged: Any
    tier: int
    value: Callable[[int], float]

    def arrays(self) -> tuple[NDArray[Any], ...]:
        shapes = ((9, *field.shape) for field in self.decoder.fields)
        return tuple(
            np.full(shape, 77, field.dtype) for shape, field in zip(shapes, self.decoder.fields, strict=True)
        )

    def fetch(
        self,
        samples: list[int],
        origin: int = SOURCE,
        rests: list[int] | None = None,
        into: NDArray[np.uint8] | None = None,
    ) -> list[Any]:
        request = Request(
            np.array(samples), lambda sample: None, origin, rests or (), lasting=True, into=into
        )
        return list(self.fetcher.fetch(request))

    def decode(
        self, rows: Sequence[int], samples: list[int], data: Sequence[Any], arrays: tuple[NDArray[Any], ...]
    ) -> list[int]:
        """Return the indices of those that failed."""
        load = Load(0, 0, 0, np.arange(9), 0, rows, [STAGING] * len(rows), [STAGING] * len(rows), list(rows))
        failed = self.decoder.decode(
            load, Brought(rows, np.array(samples), data), arrays, lambda sample: None
        )
        assert all(isinstance(error, Exception) for _, error in failed)
        return [index for index, _ in failed]


def pictures(folder: Path, tiers: dict[int, MemoryTier], tier: int) -> Made:
    for number in range(SAMPLES):
        cv2.imwrite(str(folder / f"{number}.png"), np.full((8, 8, 3), 10 * number, np.uint8))
    source = FlatFolder(folder)
    (folder / f"{BROKEN}.png").unlink()
    pipeline = compile_pipeline((Resize((8, 8)), ToTensor()), seed=0)
    decoder = ImageDecoder(pipeline, source.labels, source.describe, DecodeMemory(1 << 24))
    damaged = np.frombuffer(b"no picture", np.uint8)
    return Made(SourceFetcher(source, tiers), decoder, damaged, tier, lambda sample: 10 * sample / 255)


def plain_numbers(folder: Path, tiers: dict[int, MemoryTier], tier: int) -> Made:
    """Files whose bytes are rows as they are."""
    for number in range(SAMPLES):
        np.full((2, 3), number, np.float32).tofile(folder / f"{number}.bin")
    source = FlatFolder(folder, extensions=None)
    (folder / f"{BROKEN}.bin").unlink()
    pipeline = compile_pipeline((DecodeRaw("float32", (2, 3)),), seed=0)
    decoder = ImageDecoder(pipeline, source.labels, source.describe, DecodeMemory(1 << 24))
    return Made(SourceFetcher(source, tiers), decoder, np.zeros(5, np.uint8), tier, float)


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

    fetcher = DatasetFetcher(of)
    decoder = SampleDecoder((0, of[0]), fetcher.describe, as_array)
    return Made(fetcher, decoder, (np.zeros((5, 5)), 1), STAGING, float)


PARTS: dict[str, Callable[[Path], Made]] = {
    "pictures": lambda folder: pictures(folder, {}, STAGING),
    "pictures, kept": lambda folder: pictures(folder, {1: MemoryTier(1 << 20)}, 1),
    "plain numbers": lambda folder: plain_numbers(folder, {}, STAGING),
    "plain numbers, kept": lambda folder: plain_numbers(folder, {1: MemoryTier(1 << 20)}, 1),
    "data set": lambda folder: data_set(Numbers()),
    "data set, by the list": lambda folder: data_set(NumbersByList()),
}


@pytest.fixture(params=PARTS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    made = PARTS[request.param](tmp_path)
    yield made
    made.fetcher.close()


class TestFetcherContract:
    def test_it_says_where_it_reads_and_names_each_sample(self, made: Made) -> None:
        assert made.fetcher.place
        assert len({made.fetcher.describe(sample) for sample in range(SAMPLES)}) == SAMPLES

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
        assert made.fetcher.describe(BROKEN) in "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert isinstance(made.fetch([BROKEN])[0], Failed)

    @pytest.mark.parametrize("samples", [[5, 1], [5, 4, 1], [5, BROKEN, 1]])
    def test_what_a_tier_is_to_keep_is_there_afterwards_and_nothing_else(
        self, made: Made, samples: list[int]
    ) -> None:
        if made.tier == STAGING:
            return
        rests = [made.tier if sample in (5, 1) else STAGING for sample in samples]
        brought = made.fetch(samples, rests=rests)

        found = made.fetch([1, 4, BROKEN, 5], origin=made.tier)

        assert [isinstance(each, Failed) for each in found] == [False, True, True, False]
        assert [bytes(found[3]), bytes(found[0])] == [bytes(brought[0]), bytes(brought[-1])]


class TestDecoderContract:
    def test_it_writes_the_rows_that_it_is_told_and_no_others(self, made: Made) -> None:
        arrays, samples = made.arrays(), [1, 6, 2]

        assert made.decode([4, 0, 7], samples, made.fetch(samples), arrays) == []

        for row, sample in ((4, 1), (0, 6), (7, 2)):
            assert arrays[0][row] == pytest.approx(made.value(sample))
        for array in arrays:
            assert (array[[1, 2, 3, 5, 6, 8]] == 77).all()

    @pytest.mark.parametrize("samples", [[5, 1, 6], [5, BROKEN, 1], [4, 4, 4]])
    @pytest.mark.parametrize("kept", [(), (5,), (1, 4, 5, 6)])
    def test_bytes_may_be_read_where_they_belong_in_the_slot(
        self, made: Made, samples: list[int], kept: tuple[int, ...]
    ) -> None:
        arrays, rows = made.arrays(), range(2, 5)
        rests = [made.tier if sample in kept else STAGING for sample in samples]

        data = made.fetch(samples, rests=rests, into=made.decoder.place_of(rows, arrays))
        had = [index for index, each in enumerate(data) if not isinstance(each, Failed)]
        places = rows if len(had) == len(rows) else [rows[index] for index in had]

        assert [samples[index] for index in had] == [sample for sample in samples if sample != BROKEN]
        assert made.decode(places, [samples[k] for k in had], [data[k] for k in had], arrays) == []
        for index in had:
            assert arrays[0][rows[index]] == pytest.approx(made.value(samples[index]))
        for array in arrays:
            assert (array[[0, 1, 5, 6, 7, 8]] == 77).all()

    def test_what_cannot_be_decoded_fails_alone_by_its_index(self, made: Made) -> None:
        arrays, samples = made.arrays(), [1, 6, 2]
        data = made.fetch(samples)
        data[1] = made.damaged

        assert made.decode([4, 0, 7], samples, data, arrays) == [1]

        for row, sample in ((4, 1), (7, 2)):
            assert arrays[0][row] == pytest.approx(made.value(sample))


def test_files_of_plain_numbers_are_read_into_the_slot_itself(tmp_path: Path) -> None:
    made = plain_numbers(tmp_path, {}, STAGING)
    arrays = made.arrays()

    data = made.fetch([5, 1, 6], into=made.decoder.place_of(range(2, 5), arrays))

    assert all(np.may_share_memory(each, arrays[0][row]) for row, each in zip(range(2, 5), data, strict=True))
