"""The compiled kernels against plain NumPy, Pillow and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from PIL import Image as PillowImage
from tests.for_each import for_each

from penstock.loader.transforms import plain
from penstock.loader.transforms import sink as sink_module
from penstock.loader.transforms.geometry import CUBIC, WIDENED, Box, Geometry, flipped, resized_to, whole
from penstock.loader.transforms.pixels import Buffer
from penstock.loader.transforms.sink import IMAGE_DTYPES, Blended, Sink, encode_bfloat16
from penstock.loader.transforms.steps import Normalize, ToTensor

NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

pictures = st.tuples(st.integers(1, 40), st.integers(1, 40)).flatmap(
    lambda size: arrays(np.uint8, (*size, 3), elements=st.integers(0, 255))
)


def write(
    picture: NDArray[np.uint8],
    geometry: Geometry,
    dtype: str = "uint8",
    layout: str = "NHWC",
    steps: tuple[ToTensor | Normalize, ...] = (),
    is_plain: bool = False,
) -> NDArray[Any]:
    sink = Sink(dtype, layout, steps)
    out = np.full(sink.shape(geometry.size), 77, IMAGE_DTYPES[dtype])
    with pytest.MonkeyPatch.context() as patch:
        if is_plain:
            patch.setattr(sink_module, "resampler", lambda name: getattr(plain, f"resample_to_{name}"))
        sink.write(Buffer().hold(picture), geometry, out, Blended())
    return out


def axis_matrix(length: int, resized: int, resampling: int) -> NDArray[np.float64]:
    """The filter as a matrix [resized, length], pixel centres at half integers, edges renormalised; those of a cubic
    filter that is not widened are repeated."""
    scale, border = length / resized, 2
    stretch = max(scale, 1.0) if resampling & WIDENED else 1.0
    centers = (np.arange(resized)[:, None] + 0.5) * scale
    away = np.abs(np.arange(-border, length + border)[None, :] + 0.5 - centers) / stretch
    if resampling & CUBIC:
        a = -0.5 if resampling & WIDENED else -0.75
        inner = (a + 2) * away**3 - (a + 3) * away**2 + 1
        outer = a * (away**3 - 5 * away**2 + 8 * away - 4)
        weights = np.where(away <= 1, inner, np.where(away < 2, outer, 0.0))
    else:
        weights = np.maximum(0.0, 1.0 - away)
    beyond = weights[:, :border].sum(axis=1), weights[:, length + border :].sum(axis=1)
    weights = weights[:, border : length + border]
    if resampling == CUBIC:
        weights[:, 0] += beyond[0]
        weights[:, -1] += beyond[1]
    normalised: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return normalised


def reference(picture: NDArray[np.uint8], geometry: Geometry) -> NDArray[np.uint8]:
    """What a geometry means, step by step; rounding to bytes after columns and after rows."""
    box, window = geometry.box, geometry.window
    cropped = picture[box.top : box.top + box.height, box.left : box.left + box.width].astype(np.float64)
    columns = axis_matrix(box.width, geometry.resized[1], geometry.resampling)
    rows = axis_matrix(box.height, geometry.resized[0], geometry.resampling)
    blended = np.clip(np.floor(np.einsum("ow,hwc->hoc", columns, cropped) + 0.5), 0, 255)
    summed = np.clip(np.floor(np.einsum("oh,hwc->owc", rows, blended) + 0.5), 0, 255)
    resized: NDArray[np.uint8] = summed.astype(np.uint8)
    kept = resized[window.top : window.top + window.height, window.left : window.left + window.width]
    kept = kept[:, ::-1] if geometry.is_mirrored else kept
    return kept[::-1] if geometry.is_upside_down else kept


@st.composite
def geometries(draw: st.DrawFn, height: int, width: int) -> Geometry:
    def part(length: int) -> tuple[int, int]:
        start = draw(st.integers(0, length - 1))
        return start, draw(st.integers(1, length - start))

    (top, rows), (left, columns) = part(height), part(width)
    resized = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    (window_top, window_rows), (window_left, window_columns) = part(resized[0]), part(resized[1])
    return Geometry(
        Box(top, left, rows, columns),
        resized,
        Box(window_top, window_left, window_rows, window_columns),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([0, WIDENED, CUBIC, CUBIC + WIDENED])),
    )


@settings(max_examples=160, deadline=None)
@given(st.data())
def test_resampling_cropping_and_mirroring_equal_the_plain_version(data: st.DataObject) -> None:
    """Within one level: a weight rounded to 22 bits may tip a sum that lies halfway between two bytes, of which a cubic
    weight, 1.14 at most, makes two."""
    picture = data.draw(pictures)
    geometry = data.draw(geometries(*picture.shape[:2]))

    got = write(picture, geometry)

    difference = np.abs(got.astype(int) - reference(picture, geometry))
    assert difference.max() <= (2 if geometry.resampling & CUBIC else 1)


@settings(max_examples=160, deadline=None)
@given(
    st.data(), st.sampled_from(["float32", "float16", "bfloat16", "uint8"]), st.sampled_from(["NCHW", "NHWC"])
)
def test_what_serves_until_kernels_are_compiled_writes_the_same_bits(
    data: st.DataObject, dtype: str, layout: str
) -> None:
    picture = data.draw(pictures)
    geometry = data.draw(geometries(*picture.shape[:2]))
    steps = () if dtype == "uint8" else (ToTensor(), NORMALIZE)

    compiled = write(picture, geometry, dtype, layout, steps)

    assert write(picture, geometry, dtype, layout, steps, is_plain=True).tobytes() == compiled.tobytes()


@for_each("dtype", ["float32", "float16", "bfloat16", "uint8"])
@for_each("layout", ["NCHW", "NHWC"])
@for_each("steps", [(), (ToTensor(),), (ToTensor(), NORMALIZE)])
def test_every_number_format_and_layout_shows_the_same_picture(dtype, layout, steps) -> None:  # type: ignore[no-untyped-def]
    if dtype == "uint8" and steps:
        steps = ()
    picture = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    geometry = flipped(resized_to(whole(37, 53), 20, 31, WIDENED), True, False)
    values: NDArray[Any] = write(picture, geometry).astype(np.float32)
    if steps:
        values /= np.float32(255)
    if len(steps) == 2:
        values = (values - np.array(NORMALIZE.mean, np.float32)) / np.array(NORMALIZE.std, np.float32)
    expected = values.transpose(2, 0, 1) if layout == "NCHW" else values

    got = write(picture, geometry, dtype, layout, steps)

    assert got.dtype == IMAGE_DTYPES[dtype]
    if dtype == "bfloat16":
        stored = torch.from_numpy(got).view(torch.bfloat16).float().numpy()
        np.testing.assert_allclose(stored, expected, rtol=2**-8, atol=1e-6)
    else:
        bound = 1e-6 if dtype == "float32" else 0.0
        np.testing.assert_allclose(
            got.astype(np.float32), expected, rtol=2**-11 if dtype == "float16" else 0, atol=max(bound, 1e-6)
        )


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, 20, elements=st.floats(width=32)))
@example(np.array([np.nan, np.inf, -np.inf, -0.0, 3.3895314e38, 1e-45] * 3 + [0, 1], np.float32))
@example(1 + 2**-8 * np.arange(1, 41, 2, dtype=np.float32))  # halfway between two neighbours
def test_bfloat16_bits_are_torchs(values: NDArray[np.float32]) -> None:
    expected = torch.from_numpy(values).to(torch.bfloat16)
    got = torch.from_numpy(encode_bfloat16(values)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~expected.isnan()])


def random_resizes(count: int) -> list[tuple[NDArray[np.uint8], int, int]]:
    """Pictures and the height and width that they shall get."""
    rng = np.random.default_rng(7)
    resizes = []
    for _ in range(count):
        rows, columns, height, width = map(int, rng.integers(1, (200, 200, 120, 120)))
        resizes.append((rng.integers(0, 256, (rows, columns, 3), dtype=np.uint8), height, width))
    return resizes


@pytest.mark.parametrize(
    ("resampling", "how"),
    [
        (WIDENED, PillowImage.Resampling.BILINEAR),
        (CUBIC + WIDENED, PillowImage.Resampling.BICUBIC),
    ],
)
def test_antialiased_resampling_is_pillows_bit_for_bit(resampling: int, how: PillowImage.Resampling) -> None:
    """Pillow is told the order (columns, then rows), which it chooses by cost since version 13."""
    for picture, height, width in random_resizes(150):
        rows, columns = picture.shape[:2]
        across = PillowImage.fromarray(picture).resize((width, rows), how)
        expected = across.resize((width, height), how)

        got = write(picture, resized_to(whole(rows, columns), height, width, resampling))

        assert np.array_equal(got, np.asarray(expected))


@for_each(
    ("resampling", "mode", "bound"),
    [
        (WIDENED, "bilinear", 1.01),
        (0, "bilinear", 1.01),
        (CUBIC + WIDENED, "bicubic", 1.2),
        (CUBIC, "bicubic", 1.2),
    ],
)
def test_resampling_is_torchs_interpolation_within_one_level(
    resampling: int, mode: str, bound: float
) -> None:
    for noise, height, width in random_resizes(40):
        picture = noise // 3 + 85  # a cubic filter overshoots, and is cut off after each pass
        source = torch.from_numpy(picture).permute(2, 0, 1)[None].float()
        expected = torch.nn.functional.interpolate(
            source, (height, width), mode=mode, align_corners=False, antialias=bool(resampling & WIDENED)
        )

        got = write(picture, resized_to(whole(*picture.shape[:2]), height, width, resampling))

        # each of two passes rounds by half a level, which the second one may enlarge
        assert np.abs(got - expected[0].permute(1, 2, 0).numpy()).max() <= bound


def test_a_flat_picture_stays_flat_at_every_size() -> None:
    """Weights that do not sum to one would show as a step."""
    for level in (0, 1, 127, 254, 255):
        picture = np.full((173, 91, 3), level, np.uint8)
        for size in ((1, 1), (5, 200), (172, 92), (173, 91)):
            for resampling in (0, WIDENED, CUBIC, CUBIC + WIDENED):
                got = write(picture, resized_to(whole(173, 91), *size, resampling))
                assert (got == level).all()
