"""Transforms that compute new pixels, against Pillow, which torchvision computes them with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from tests.for_each import for_each

from penstock import Loader
from penstock.errors import ConfigError
from penstock.loader.transforms import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Normalize,
    Pad,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomRotation,
    Resize,
    ToTensor,
    TrivialAugmentWide,
    augment,
)

Picture = NDArray[np.uint8]

#: Smooth colours, as photographs have.
ROWS, COLUMNS = np.mgrid[0:48, 0:64]
PHOTO: Picture = np.stack(
    [127 + 120 * np.sin(ROWS / 9 + COLUMNS / 17), 4.0 * COLUMNS, 250.0 - 5 * ROWS], axis=2
).astype(np.uint8)

pictures = hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3)))
factors = st.floats(0, 2.5)


class Given:
    """A generator whose draws are given, one after the other."""

    def __init__(self, *draws: Any) -> None:
        self.draws = list(draws)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **named: self.draws.pop(0)


def drawn(*draws: Any) -> Any:
    return Given(*draws)


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def far(one: Any, other: Any) -> int:
    """Return by how many levels two pictures differ at most."""
    return int(np.abs(np.asarray(one, np.int64) - np.asarray(other, np.int64)).max())


def mean_distance(one: Any, other: Any, where: Any = ...) -> float:
    return float(np.abs(np.asarray(one, np.int64) - np.asarray(other, np.int64))[where].mean())


def enhanced(kind: Any, picture: Any, factor: float) -> Image.Image:
    image: Image.Image = kind(Image.fromarray(np.asarray(picture))).enhance(factor)
    return image


@given(pictures, factors)
def test_brightness_contrast_and_saturation_are_pillows(picture: Picture, factor: float) -> None:
    for change, kind in (
        (augment._with_brightness, ImageEnhance.Brightness),
        (augment._with_contrast, ImageEnhance.Contrast),
        (augment._with_saturation, ImageEnhance.Color),
    ):
        # Grey may be a level off, of which a factor of 2.5 makes another.
        assert far(change(picture, factor), enhanced(kind, picture, factor)) <= 3


@given(pictures.filter(lambda picture: min(picture.shape[:2]) > 2), factors)
def test_sharpness_is_pillows(picture: Picture, factor: float) -> None:
    found = augment._with_sharpness(picture, factor)

    # The smooth picture may be rounded to the other side, and the factor makes the distance larger.
    assert far(found, enhanced(ImageEnhance.Sharpness, picture, factor)) <= 3


@given(pictures, st.integers(1, 8), st.integers(0, 256))
def test_tables_of_values_are_pillows(picture: Picture, bits: int, threshold: int) -> None:
    image = Image.fromarray(picture)

    assert far(augment._posterized(picture, bits), ImageOps.posterize(image, bits)) == 0
    assert far(augment._solarized(picture, threshold), ImageOps.solarize(image, threshold)) == 0
    assert far(augment._with_full_contrast(picture), ImageOps.autocontrast(image)) <= 1
    assert far(augment._equalized(picture), ImageOps.equalize(image)) == 0
    assert far(Grayscale()(picture)[:, :, 1], image.convert("L")) <= 1


@for_each("share", [-0.5, -0.2, 0.0, 0.1, 0.5])
def test_hue_is_pillows(share: float) -> None:
    hue, saturation, value = Image.fromarray(PHOTO).convert("HSV").split()
    turned = Image.fromarray(((np.asarray(hue, np.int64) + round(share * 255)) % 256).astype(np.uint8))
    expected = Image.merge("HSV", (turned, saturation, value)).convert("RGB")

    assert mean_distance(augment._with_hue(PHOTO, share), expected) < 2.5


@for_each("degrees", [-37.0, 0.0, 90.0, 180.0, 12.5])
def test_a_rotation_is_pillows(degrees: float) -> None:
    inner = (slice(14, -14), slice(14, -14))  # what comes in at the border is rounded to either side
    for interpolation, how in (
        ("nearest", Image.Resampling.NEAREST),
        ("bilinear", Image.Resampling.BILINEAR),
    ):
        rotation = RandomRotation(40, interpolation, fill=7)  # type: ignore[arg-type]
        found = rotation(PHOTO, drawn(degrees))
        expected = Image.fromarray(PHOTO).rotate(degrees, how, fillcolor=(7, 7, 7))
        assert mean_distance(found, expected, inner) < 3
        assert bool((found[0, 0] == 7).all()) == (degrees not in (0.0, 180.0))


def test_a_shear_and_a_translation_are_pillows() -> None:
    image = Image.fromarray(PHOTO)
    matrices: list[list[list[float]]] = [
        [[1, 0.3, 0], [0, 1, 0]],
        [[1, 0, 0], [-0.2, 1, 0]],
        [[1, 0, 9], [0, 1, 0]],
        [[1, 0, 0], [0, 1, -7]],
    ]
    for matrix in matrices:
        numbers = [number for row in matrix for number in row]
        expected = image.transform(image.size, Image.Transform.AFFINE, numbers, fillcolor=(5, 5, 5))
        # Pillow begins at the corner of a pixel, OpenCV in its midst: a part of a pixel, rounded.
        assert mean_distance(augment._moved(PHOTO, matrix, 5), expected) < 6


@pytest.mark.parametrize(
    ("padding", "sides"), [(2, (2, 2, 2, 2)), ((1, 3), (1, 3, 1, 3)), ((1, 2, 3, 4), (1, 2, 3, 4))]
)
def test_a_border_is_where_torchvision_puts_it(padding: Any, sides: tuple[int, ...]) -> None:
    left, above, right, below = sides
    found = Pad(padding, fill=(1, 2, 3))(PHOTO)

    assert found.shape == (48 + above + below, 64 + left + right, 3)
    assert np.array_equal(found[above : above + 48, left : left + 64], PHOTO)
    assert found[0, 0].tolist() == found[-1, -1].tolist() == [1, 2, 3]
    modes: tuple[augment.PaddingMode, ...] = ("edge", "reflect", "symmetric")
    for mode in modes:
        expected = np.pad(PHOTO, ((above, below), (left, right), (0, 0)), mode)
        assert np.array_equal(Pad(padding, padding_mode=mode)(PHOTO), expected)


def test_a_crop_may_be_anywhere() -> None:
    numbered = np.repeat(np.arange(30)[:, None], 3, axis=1).reshape(6, 5, 3).astype(np.uint8)
    found = [RandomCrop((4, 3))(numbered, seeded(seed)) for seed in range(200)]

    assert {each.shape for each in found} == {(4, 3, 3)}
    corners = {5 * row + column for row in range(3) for column in range(3)}
    assert {int(each[0, 0, 0]) for each in found} == corners
    padded = RandomCrop(8, padding=2, fill=255)(numbered, seeded(0))
    assert padded.shape == (8, 8, 3)
    assert (padded == 255).any()
    assert RandomCrop(9, pad_if_needed=True)(numbered, seeded(0)).shape == (9, 9, 3)
    with pytest.raises(ConfigError, match="was given a picture of 6 x 5, which is smaller"):
        RandomCrop(6)(numbered, seeded(0))


def test_colours_change_in_a_random_order_and_by_random_factors() -> None:
    jitter = ColorJitter(0.4, (0.5, 1.5), 0.4, 0.1)
    assert (jitter.brightness, jitter.contrast, jitter.hue) == ((0.6, 1.4), (0.5, 1.5), (-0.1, 0.1))

    brightness, contrast = ImageEnhance.Brightness, ImageEnhance.Contrast
    one = jitter(PHOTO, drawn(np.array([0, 1, 2, 3]), 1.3, 0.7, 1.0, 0.0))
    other = jitter(PHOTO, drawn(np.array([1, 0, 2, 3]), 0.7, 1.3, 1.0, 0.0))
    assert mean_distance(one, enhanced(contrast, enhanced(brightness, PHOTO, 1.3), 0.7)) < 2
    assert mean_distance(other, enhanced(brightness, enhanced(contrast, PHOTO, 0.7), 1.3)) < 2
    assert mean_distance(one, other) > 4
    assert ColorJitter()(PHOTO, seeded(0)) is PHOTO


def test_a_blur_is_opencvs() -> None:
    found = GaussianBlur(5, (0.5, 2))(PHOTO, drawn(1.1))

    assert np.array_equal(found, cv2.GaussianBlur(PHOTO, (5, 5), 1.1, borderType=cv2.BORDER_REFLECT_101))


def test_some_pictures_turn_grey() -> None:
    grey = [(RandomGrayscale(0.3)(PHOTO, seeded(k)).std(axis=2) == 0).all() for k in range(300)]

    assert 60 < sum(grey) < 120


def test_an_area_is_erased() -> None:
    shares = []
    for seed in range(200):
        found = RandomErasing(1.0, value=(9, 8, 7))(np.zeros_like(PHOTO), seeded(seed))
        rows, columns = np.nonzero(found[:, :, 0])
        tall, wide = rows.max() - rows.min() + 1, columns.max() - columns.min() + 1
        assert tall * wide == rows.size, "it is a rectangle"
        assert (found[rows, columns] == [9, 8, 7]).all()
        assert 0.25 < tall / wide < 4
        shares.append(rows.size / (48 * 64))
    assert 0.01 < min(shares) < 0.05
    assert 0.25 < max(shares) < 0.35
    numbers = np.zeros((3, 48, 64), np.float32)
    noise = RandomErasing(1.0, value="random")(numbers, seeded(1))
    assert not numbers.any()
    assert 0.8 < noise[noise != 0].std() < 1.2
    assert RandomErasing(0.0)(PHOTO, seeded(0)) is PHOTO
    with pytest.raises(ConfigError, match="stands before ToTensor"):
        RandomErasing(1.0, value="random")(PHOTO, seeded(1))


def test_policies_use_all_operations_at_the_strengths_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[str, set[float]] = {}

    def noted(name: str) -> Callable[..., Picture]:
        def note(picture: Picture, **strength: Any) -> Picture:
            values = [np.ravel(each) for key, each in strength.items() if key != "fill"]
            used.setdefault(name, set()).update(round(float(each), 6) for value in values for each in value)
            return picture

        return note

    names = ["_moved", "_turned", "_with_brightness", "_with_saturation", "_with_contrast", "_with_sharpness"]
    for name in [*names, "_posterized", "_solarized", "_with_full_contrast", "_equalized"]:
        monkeypatch.setattr(augment, name, noted(name))
    for seed in range(400):
        RandAugment(2, 9)(PHOTO, seeded(seed))

    assert len(used) == 10
    assert used["_turned"] == {-9.0, 9.0}
    assert used["_with_brightness"] == used["_with_sharpness"] == {0.73, 1.27}
    assert used["_posterized"] == {7.0}
    assert used["_solarized"] == {178.5}
    assert used["_moved"] == {0.0, 1.0, 0.09, -0.09, 8.0, -8.0, 6.0, -6.0}
    used.clear()
    for seed in range(4000):
        TrivialAugmentWide()(PHOTO, seeded(seed))
    assert (min(used["_turned"]), max(used["_turned"])) == (-135.0, 135.0)
    assert used["_posterized"] == {float(bits) for bits in range(2, 9)}
    assert {abs(each) for each in used["_moved"]} >= {0.99, 32.0, 16.0, 1.0, 0.0}


def test_pixels_do_not_depend_on_threads(image_folder: Callable[..., Path]) -> None:
    steps = [
        *(Resize((40, 40)), RandomCrop(32, padding=4), ColorJitter(0.4, 0.4, 0.4, 0.1), RandAugment()),
        *(RandomRotation(15), GaussianBlur(3), RandomGrayscale(0.2), CenterCrop(28), ToTensor()),
        *(RandomErasing(), Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))),
    ]
    folder = image_folder(24)
    seen = []
    for decoders in (0, 3):
        options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "decoders": decoders, "report": None}
        with Loader(folder, transforms=steps, **options) as loader:
            seen.append([batch[0].copy() for _ in range(2) for batch in loader])

    assert seen[0][0].shape == (8, 3, 28, 28)
    assert all(np.array_equal(one, other) for one, other in zip(*seen, strict=True))
    assert not np.array_equal(seen[0][0], seen[0][3])


@for_each(
    ("make", "message"),
    [
        (lambda: Pad(-1), r"Pad\(padding=-1\): padding is an integer from 0 up"),
        (lambda: Pad((1, 2, 3)), "two of them"),
        (lambda: Pad(1, fill=256), r"Pad\(fill=256\): fill is an integer from 0 to 255"),
        (lambda: Pad(1, padding_mode="wrap"), '"constant", "edge", "reflect" or "symmetric"'),  # type: ignore[arg-type]
        (lambda: RandomCrop(0), r"RandomCrop\(size=0\)"),
        (lambda: RandomGrayscale(1.5), r"RandomGrayscale\(p=1.5\)"),
        (lambda: ColorJitter(-0.1), r"ColorJitter\(brightness=-0.1\): .*\(low, high\)"),
        (lambda: ColorJitter(hue=0.6), r"ColorJitter\(hue=0.6\): .*from -0.5 to 0.5"),
        (lambda: ColorJitter(contrast=(2, 1)), r"ColorJitter\(contrast=\(2, 1\)\)"),
        (lambda: GaussianBlur(4), "kernel_size is odd"),
        (lambda: GaussianBlur(3, (0, 1)), "sigma is"),
        (lambda: RandomRotation("far"), r"RandomRotation\(degrees='far'\)"),  # type: ignore[arg-type]
        (lambda: RandomRotation(10, "cubic"), '"nearest" or "bilinear"'),  # type: ignore[arg-type]
        (lambda: RandomErasing(scale=(0, 2)), "shares between 0 and 1"),
        (lambda: RandomErasing(ratio=(0, 2)), "0 < low <= high"),
        (lambda: RandomErasing(value="noise"), 'a number, three, or "random"'),  # type: ignore[arg-type]
        (lambda: RandAugment(0), "num_ops is a positive integer"),
        (lambda: RandAugment(magnitude=31), "an integer from 0 to 30"),
        (lambda: TrivialAugmentWide(1), "two or more"),
    ],
)
def test_arguments_that_cannot_work_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
