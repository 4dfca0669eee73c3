"""The random numbers of the transforms: their distributions, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.loader.transforms import (
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    ToTensor,
    compile_pipeline,
)
from penstock.loader.transforms.draws import draw_crops
from penstock.loader.transforms.geometry import Box, place_crop

SAMPLES = np.arange(4000)


def crops(height: int, width: int, crop: RandomResizedCrop, samples: np.ndarray = SAMPLES) -> np.ndarray:
    numbers = draw_crops(crop, key=12345, epoch=0, samples=samples)
    return np.array([place_crop(height, width, row.tolist(), 0, *crop.ratio) for row in numbers])


def reference_crop(height: int, width: int, crop: RandomResizedCrop, rng: np.random.Generator) -> Box:
    """The algorithm of torchvision's RandomResizedCrop.get_params, with NumPy's generator."""
    area = height * width
    for _ in range(10):
        target_area = area * rng.uniform(*crop.scale)
        aspect = np.exp(rng.uniform(*np.log(crop.ratio)))
        w, h = round(np.sqrt(target_area * aspect)), round(np.sqrt(target_area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Box(rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w)
    if width / height < crop.ratio[0]:
        w, h = width, round(width / crop.ratio[0])
    elif width / height > crop.ratio[1]:
        h, w = height, round(height * crop.ratio[1])
    else:
        w, h = width, height
    return Box((height - h) // 2, (width - w) // 2, h, w)


@pytest.mark.parametrize(
    ("height", "width"),
    [*(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((375, 500), (500, 300))), (100, 1000)],
)
def test_crops_are_distributed_as_torchvisions(height: int, width: int) -> None:
    """Two-sample Kolmogorov-Smirnov over rows, columns, height, width, area and aspect ratio."""
    crop = RandomResizedCrop(224)
    from scipy import stats

    rng = np.random.default_rng(1)
    expected = np.array([reference_crop(height, width, crop, rng) for _ in range(4000)])
    got = crops(height, width, crop)

    def aspects(boxes: np.ndarray) -> list[np.ndarray]:
        return [*boxes.T, boxes[:, 2] * boxes[:, 3], boxes[:, 3] / boxes[:, 2]]

    for ours, theirs in zip(aspects(got), aspects(expected), strict=True):
        assert stats.ks_2samp(ours, theirs).pvalue > 1e-3


def test_area_is_uniform_and_the_aspect_ratio_log_uniform_where_every_draw_fits() -> None:
    from scipy import stats

    crop = RandomResizedCrop(8, scale=(0.05, 0.3))
    boxes = crops(20_000, 20_000, crop)
    area = boxes[:, 2] * boxes[:, 3] / 20_000**2
    ratio = np.log(boxes[:, 3] / boxes[:, 2])
    assert stats.kstest(area, stats.uniform(0.05, 0.25).cdf).pvalue > 1e-3
    low, high = np.log(crop.ratio)
    assert stats.kstest(ratio, stats.uniform(low, high - low).cdf).pvalue > 1e-3


def test_every_place_of_a_small_crop_is_as_likely_as_any_other() -> None:
    from scipy import stats

    boxes = crops(6, 6, RandomResizedCrop(4, scale=(0.25, 0.25), ratio=(1.0, 1.0)), np.arange(16_000))
    assert set(map(tuple, boxes[:, 2:])) == {(3, 3)}
    counts = np.bincount(boxes[:, 0] * 4 + boxes[:, 1], minlength=16)
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        # No draw fits: the largest central crop of the nearest allowed ratio.
        (10, 1000, Box(0, 493, 10, 13)),
        (1000, 10, Box(493, 0, 13, 10)),
    ],
)
def test_ten_misfits_give_the_central_crop(height: int, width: int, expected: Box) -> None:
    crop = RandomResizedCrop(8, scale=(0.9, 1.0))
    assert {Box(*box) for box in crops(height, width, crop, np.arange(20))} == {expected}


def test_a_crop_never_leaves_the_picture_however_small() -> None:
    for height, width in [(1, 1), (1, 7), (5, 2), (3, 3)]:
        boxes = crops(height, width, RandomResizedCrop(8), np.arange(300))
        assert (boxes >= [0, 0, 1, 1]).all()
        assert (boxes[:, 0] + boxes[:, 2] <= height).all()
        assert (boxes[:, 1] + boxes[:, 3] <= width).all()


@for_each("p", [0.0, 0.3, 0.5, 1.0])
@for_each("flip", [RandomHorizontalFlip, RandomVerticalFlip])
def test_flips_happen_with_their_probability(flip: type, p: float) -> None:
    from scipy import stats

    pipeline = compile_pipeline([RandomResizedCrop(4), flip(p), ToTensor()], seed=3)
    row = pipeline.draw(0, SAMPLES).numbers[:, -1]
    assert stats.binomtest(int((row < p).sum()), SAMPLES.size, p).pvalue > 1e-3


def test_a_samples_draws_depend_on_seed_epoch_transform_and_sample_but_not_on_its_batch() -> None:
    steps = [RandomResizedCrop(4), RandomHorizontalFlip(), RandomHorizontalFlip(), ToTensor()]
    pipeline = compile_pipeline(steps, seed=3)
    alone, together = pipeline.draw(5, np.array([17])), pipeline.draw(5, np.array([3, 17, 9]))

    for column in (slice(0, 22), slice(22, 23), slice(23, 24)):
        numbers = together.numbers[:, column]
        assert np.array_equal(alone.numbers[0, column], numbers[1])
        assert not np.array_equal(numbers[0], numbers[1])
        assert not np.array_equal(
            alone.numbers[0, column], pipeline.draw(6, np.array([17])).numbers[0, column]
        )
        other = compile_pipeline(steps, seed=4).draw(5, np.array([17]))
        assert not np.array_equal(alone.numbers[0, column], other.numbers[0, column])
    assert alone.numbers[0, 22] != alone.numbers[0, 23]
