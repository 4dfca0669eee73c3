"""The transforms as values, and the geometry they add up to."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.loader.transforms import (
    CenterCrop,
    DecodeRaw,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToTensor,
)
from penstock.loader.transforms.geometry import Box, center_box, cropped, flipped, whole


class Mode(enum.Enum):
    """As torchvision names interpolations."""

    BILINEAR = "bilinear"


def test_a_transform_is_a_value_that_prints_and_compares() -> None:
    crop = RandomResizedCrop(224, scale=(0.2, 1.0))
    assert crop == RandomResizedCrop(224, (0.2, 1.0))
    assert crop != RandomResizedCrop(224)
    assert "RandomResizedCrop(size=224, scale=(0.2, 1.0)" in repr(crop)
    assert len({ToTensor(), ToTensor(), crop}) == 2
    of_numpy: Any = np.int64(20)
    assert repr(Resize((of_numpy, of_numpy))) == repr(Resize((20, 20)))
    assert repr(CenterCrop(of_numpy)) == repr(CenterCrop(20))
    assert Resize(8, Image.Resampling.BICUBIC) == Resize(8, "bicubic")  # type: ignore[arg-type]
    assert RandomResizedCrop(8, interpolation=Mode.BILINEAR) == RandomResizedCrop(8)  # type: ignore[arg-type]


@for_each(
    ("make", "text"),
    [
        (lambda: DecodeRaw("object"), r"DecodeRaw\(dtype='object'\): dtype is a type of real numbers"),
        (lambda: DecodeRaw("uint7"), r"DecodeRaw\(dtype='uint7'\)"),
        (
            lambda: DecodeRaw("uint8", (3, 0)),
            r"DecodeRaw\(shape=\(3, 0\)\): shape is a tuple of positive sizes",
        ),
        (lambda: Resize(0), r"Resize\(size=0\)"),
        (lambda: Resize((10, -1)), r"size=\(10, -1\)"),
        (lambda: Resize(True), "size=True"),
        (lambda: CenterCrop((1, 2, 3)), r"CenterCrop\(size=\(1, 2, 3\)\)"),  # type: ignore[arg-type]
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), r"scale is \(low, high\)"),
        (lambda: RandomResizedCrop(8, scale=(0.0, 1.0)), r"0 < low <= high"),
        (lambda: RandomResizedCrop(8, ratio=(0.5, float("inf"))), "ratio"),
        (lambda: RandomResizedCrop(8, interpolation="area"), 'interpolation is "bilinear" or "bicubic"'),
        (lambda: Resize(8, interpolation=Image.Resampling.NEAREST), 'interpolation is "bilinear" or'),  # type: ignore[arg-type]
        (lambda: RandomHorizontalFlip(1.1), "p is a probability"),
        (lambda: RandomVerticalFlip(float("nan")), "p is a probability"),
        (lambda: RandomHorizontalFlip("0.5"), r"RandomHorizontalFlip\(p='0.5'\): p is a probability"),  # type: ignore[arg-type]
        (lambda: RandomVerticalFlip(None), "p is a probability"),  # type: ignore[arg-type]
        (lambda: RandomResizedCrop(8, scale=0.5), r"scale=0.5\): scale is \(low, high\)"),  # type: ignore[arg-type]
        (lambda: RandomResizedCrop(8, ratio="12"), r"ratio is \(low, high\)"),  # type: ignore[arg-type]
        (lambda: Normalize((0.5,), (0.5,)), "three finite numbers"),  # type: ignore[arg-type]
        (lambda: Normalize(0.5, 0.5), r"Normalize\(mean=0.5\): mean is three finite numbers"),  # type: ignore[arg-type]
        (lambda: Normalize((0.5, 0.5, "x"), (1, 1, 1)), "mean is three finite numbers"),  # type: ignore[arg-type]
        (lambda: Normalize((0.5, 0.5, 0.5), (0.5, 0.0, 0.5)), "divide by zero"),
    ],
)
def test_a_bad_argument_is_named_with_its_rule(make, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=text):
        make()


@for_each(
    ("size", "stored", "expected"),
    [
        # torchvision: long = int(size * long / short), worked out by hand
        (256, (375, 500), (256, 341)),
        (256, (500, 375), (341, 256)),
        (100, (33, 33), (100, 100)),
        (7, (3, 100), (7, 233)),
        ((20, 30), (375, 500), (20, 30)),
    ],
)
def test_resize_keeps_the_aspect_ratio_rounded_down(size, stored, expected) -> None:  # type: ignore[no-untyped-def]
    assert Resize(size).target(*stored) == expected


def test_a_central_crop_rounds_half_a_pixel_to_even_as_torchvision_does() -> None:
    # torchvision: int(round((height - crop) / 2.0))
    assert center_box(11, 14, 8, 9) == Box(2, 2, 8, 9)
    assert center_box(13, 15, 8, 8) == Box(2, 4, 8, 8)


@given(st.data())
def test_crops_and_flips_composed_are_crops_and_flips_done_one_after_the_other(data: st.DataObject) -> None:
    """Without a resize, a geometry names exactly the pixels that slicing step by step leaves."""
    height, width = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    geometry = whole(height, width)
    expected = np.arange(height * width).reshape(height, width)
    for _ in range(data.draw(st.integers(0, 5))):
        action = data.draw(st.sampled_from(["crop", "mirror", "upside down"]))
        if action == "mirror":
            geometry, expected = flipped(geometry, True, False), expected[:, ::-1]
        elif action == "upside down":
            geometry, expected = flipped(geometry, False, True), expected[::-1]
        else:
            rows, columns = expected.shape
            top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
            crop = Box(
                top, left, data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left))
            )
            geometry = cropped(geometry, crop)
            expected = expected[top : top + crop.height, left : left + crop.width]

    box = geometry.box
    got = np.arange(height * width).reshape(height, width)
    got = got[box.top : box.top + box.height, box.left : box.left + box.width]
    got = got[:, ::-1] if geometry.is_mirrored else got
    got = got[::-1] if geometry.is_upside_down else got
    assert geometry.size == expected.shape
    assert np.array_equal(got, expected)
