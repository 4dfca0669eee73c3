"""Compiled pipelines: what comes out of a list of transforms."""

from __future__ import annotations

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tests.for_each import for_each

from penstock.errors import ConfigError, DataError
from penstock.loader.transforms import (
    CenterCrop,
    DecodeRaw,
    Normalize,
    Pipeline,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Scratch,
    ToTensor,
    compile_pipeline,
    sink,
)
from penstock.loader.transforms.compiled import CROP_KERNELS
from penstock.loader.transforms.decoders import JPEG_DECODERS
from penstock.loader.transforms.foreign import takes_pil
from penstock.loader.transforms.pipeline import LAYOUTS
from penstock.loader.transforms.sink import IMAGE_DTYPES

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BILINEAR = Image.Resampling.BILINEAR


def scene(height: int, width: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / a + y / b) for a, b in rng.uniform(5, 40, (3, 2))]
    noise = rng.normal(0, 10, (height, width, 3))
    return Image.fromarray(np.clip(128 + 90 * np.stack(waves, axis=2) + noise, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90, **options)
    return stream.getvalue()


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def run(pipeline: Pipeline, data: bytes, sample: int = 0, epoch: int = 0, **scratch: Any) -> NDArray[Any]:
    draws = pipeline.draw(epoch, np.array([sample]))
    out: NDArray[Any] = np.full(pipeline.output_shape, 9, pipeline.storage_dtype)
    pipeline.run(data, out, draws, 0, Scratch(**scratch))
    return out


def columns_then_rows(
    image: Image.Image, height: int, width: int, how: Image.Resampling = BILINEAR
) -> Image.Image:
    """Pillow's resize in the order that the kernels have (Pillow 13 chooses its own)."""
    return image.resize((width, image.height), how).resize((width, height), how)


@pytest.mark.parametrize("how", [BILINEAR, Image.Resampling.BICUBIC])
def test_validation_is_what_torchvision_does_to_a_pil_image(how: Image.Resampling) -> None:
    """Resize(256), CenterCrop(224), ToTensor, Normalize, worked out with Pillow and torch."""
    for height, width in [(375, 500), (500, 375), (300, 300), (640, 260)]:
        data = jpeg(scene(height, width))
        image = Image.open(io.BytesIO(data)).convert("RGB")
        short = min(height, width)
        image = columns_then_rows(image, int(256 * height / short), int(256 * width / short), how)
        top, left = round((image.height - 224) / 2), round((image.width - 224) / 2)
        image = image.crop((left, top, left + 224, top + 224))
        tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
        expected = (tensor - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]

        resize = Resize(256, how.name.lower())
        got = run(compile_pipeline([resize, CenterCrop(224), ToTensor(), Normalize(MEAN, STD)], 0), data)

        np.testing.assert_allclose(got, expected.numpy(), atol=1e-6, rtol=0)


def test_training_crops_resizes_and_flips_as_drawn() -> None:
    """The crop is recovered from a picture whose pixels tell their place."""
    y, x = np.mgrid[0:200, 0:250].astype(np.uint8)
    data = png(Image.fromarray(np.stack([y, x, y], axis=2)))
    pipeline = compile_pipeline(
        [RandomResizedCrop(40, scale=(0.3, 0.8)), RandomHorizontalFlip(), RandomVerticalFlip()],
        seed=4,
        dtype="uint8",
        layout="NHWC",
    )
    seen = set()
    for sample in range(60):
        out = run(pipeline, data, sample).astype(float)
        down, across = np.diff(out[:, 20, 0]), np.diff(out[20, :, 1])
        seen.add((bool(down.mean() > 0), bool(across.mean() > 0)))
        area = abs(down.mean()) * abs(across.mean()) * 40 * 40 / (200 * 250)
        assert 0.28 < area < 0.82
        assert 0.73 < abs(across.mean()) / abs(down.mean()) < 1.36
    assert seen == {(a, b) for a in (True, False) for b in (True, False)}


def test_one_pass_equals_the_transforms_done_one_by_one() -> None:
    """A callable between the steps forces each to be carried out; it changes nothing itself."""
    data = jpeg(scene(333, 421))
    steps = [
        CenterCrop(300),
        RandomHorizontalFlip(1.0),
        RandomVerticalFlip(1.0),
        Resize((120, 130)),
        CenterCrop((101, 100)),
        RandomHorizontalFlip(1.0),
        CenterCrop((90, 88)),
    ]
    interrupted: list[Any] = []
    for step in steps:
        interrupted += [step, lambda value: value]

    fused = run(compile_pipeline(steps, 0, dtype="uint8", layout="NHWC"), data)
    apart = compile_pipeline(interrupted, 0, dtype="uint8", layout="NHWC")
    apart.probe(data)
    difference = np.abs(fused.astype(int) - run(apart, data))

    # mirrored before or after resampling: a tie may round the other way
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01


def test_a_second_resize_resamples_the_result_of_the_first() -> None:
    image = scene(100, 140)
    expected = columns_then_rows(columns_then_rows(image, 50, 60), 70, 30)
    pipeline = compile_pipeline([Resize((50, 60)), Resize((70, 30))], 0, dtype="uint8", layout="NHWC")
    assert np.array_equal(run(pipeline, png(image)), np.asarray(expected))


def test_a_central_crop_larger_than_the_picture_is_padded_with_zeros() -> None:
    image = scene(5, 30)
    out = run(compile_pipeline([CenterCrop((8, 20))], 0, dtype="uint8", layout="NHWC"), png(image))
    # torchvision pads (8 - 5) // 2 above and the rest below
    assert not out[:1].any()
    assert not out[6:].any()
    assert np.array_equal(out[1:6], np.asarray(image)[:, 5:25])


@pytest.mark.parametrize("antialias", [True, False])
def test_a_large_photograph_shrunk_by_the_decoder_stays_close_to_fair_resampling(antialias: bool) -> None:
    """Decoding at half size and resampling the rest by 2 or more: the documented bound is 8 levels at most,
    1 on average. Without antialiasing, single pixels are sampled, so the decoder must not shrink."""
    image = scene(1200, 900)
    data = jpeg(image, subsampling=0)
    full = Image.open(io.BytesIO(data)).convert("RGB")
    pipeline = compile_pipeline([Resize((224, 224), antialias=antialias)], 0, dtype="uint8", layout="NHWC")
    got = run(pipeline, data).astype(int)
    if antialias:
        difference = np.abs(got - np.asarray(columns_then_rows(full, 224, 224)))
        assert difference.max() <= 8
        assert difference.mean() <= 1
    else:
        source = torch.from_numpy(np.asarray(full).copy()).permute(2, 0, 1)[None].float()
        expected = torch.nn.functional.interpolate(source, (224, 224), mode="bilinear")
        assert np.abs(got - expected[0].permute(1, 2, 0).numpy()).max() <= 1.01


@pytest.mark.parametrize("decoder", JPEG_DECODERS[1:])
def test_the_result_does_not_depend_on_which_decoder_is_installed(decoder: str) -> None:
    steps = [RandomResizedCrop(64), RandomHorizontalFlip(), ToTensor()]
    pipeline = compile_pipeline(steps, 1)
    for seed, size in enumerate([(120, 170), (900, 700), (65, 64)]):
        data = jpeg(scene(*size, seed))
        for sample in range(5):
            expected = run(pipeline, data, sample, decoder="turbojpeg")
            assert np.array_equal(run(pipeline, data, sample, decoder=decoder), expected)


def test_bits_depend_on_neither_threads_nor_the_batch_nor_the_scratch_that_was_used_before() -> None:
    """Eight threads, each with one scratch for pictures of many sizes and formats, against one at a time."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 400, (24, 2)).tolist()
    images = [scene(height, width, seed) for seed, (height, width) in enumerate(sizes)]
    data = [png(image) if index % 5 == 0 else jpeg(image) for index, image in enumerate(images)]
    pipeline = compile_pipeline([RandomResizedCrop(50), RandomHorizontalFlip(), ToTensor()], 8)
    samples = np.arange(24)
    alone = np.stack([run(pipeline, data[sample], sample, epoch=2) for sample in range(24)])

    def work(order: NDArray[np.int64]) -> NDArray[Any]:
        scratch, draws = Scratch(), pipeline.draw(2, samples[order])
        out = np.empty((24, *pipeline.output_shape), np.float32)
        for index, sample in enumerate(order):
            pipeline.run(data[sample], out[sample], draws, index, scratch)
        return out

    with ThreadPoolExecutor(8) as pool:
        for out in pool.map(work, [rng.permutation(24) for _ in range(8)]):
            assert np.array_equal(out, alone)


@for_each("dtype, layout", [(dtype, layout) for dtype in IMAGE_DTYPES for layout in LAYOUTS])
def test_a_callables_picture_has_the_same_bits_before_what_writes_it_at_once_is_compiled(
    monkeypatch: pytest.MonkeyPatch, dtype: str, layout: str
) -> None:
    tail = [] if dtype == "uint8" else [ToTensor(), Normalize(MEAN, STD)]
    for change in (np.negative, np.fliplr):  # the second returns a view
        pipeline, data = (
            compile_pipeline([CenterCrop(40), change, *tail], 0, dtype, layout),
            jpeg(scene(60, 50)),
        )
        pipeline.probe(data)

        found = run(pipeline, data)

        with monkeypatch.context() as without:
            without.setattr(sink, "CROP_KERNELS", {name: NeverCompiled() for name in CROP_KERNELS})
            assert np.array_equal(run(pipeline, data), found)
        assert len(np.unique(found)) > 50


class NeverCompiled:
    def ask(self) -> None:
        return None


class TestCallables:
    """Any Python callable takes its place in the chain."""

    def test_before_to_tensor_it_gets_the_picture_and_after_it_the_tensor(self) -> None:
        seen: list[tuple[Any, ...]] = []

        def look(value: NDArray[Any]) -> NDArray[Any]:
            seen.append((value.shape, value.dtype, float(value.max()) > 1))
            return value

        pipeline = compile_pipeline([Resize((20, 30)), look, ToTensor(), look], 0)
        pipeline.probe(jpeg(scene(40, 60)))
        assert seen == [((20, 30, 3), np.uint8, True), ((3, 20, 30), np.float32, False)]

    def test_its_rng_is_keyed_by_epoch_sample_and_place(self) -> None:
        def noise(value: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
            return rng.integers(0, 1 << 60, 2)

        def join(value: NDArray[Any], *, rng: np.random.Generator) -> NDArray[Any]:
            return np.concatenate([value, rng.integers(0, 1 << 60, 2)])

        pipeline = compile_pipeline([noise, join], 0, dtype="int64")
        assert pipeline.probe(b"x") == (4,)
        first = run(pipeline, b"x", sample=1)
        assert np.array_equal(first, run(pipeline, b"x", sample=1))
        assert len({tuple(run(pipeline, b"x", s, e)) for s in (1, 2) for e in (0, 1)}) == 4
        assert not np.array_equal(first[:2], first[2:])

    def test_without_any_image_transform_it_gets_the_stored_bytes(self) -> None:
        pipeline = compile_pipeline([lambda data: np.frombuffer(data, ">f4")], 0)
        assert pipeline.needs_probe
        assert pipeline.probe(np.arange(6, dtype=">f4").tobytes()) == (6,)
        out = run(pipeline, memoryview(np.array([1, 2, 3, 4, 5, 7], ">f4").tobytes()))  # type: ignore[arg-type]
        assert out.tolist() == [1, 2, 3, 4, 5, 7]

    def test_a_picture_it_returns_goes_on_through_the_fused_steps(self) -> None:
        image = scene(60, 80)
        pipeline = compile_pipeline(
            [lambda value: 255 - value, Resize((30, 40)), ToTensor(), Normalize(MEAN, STD)], 0
        )
        assert not pipeline.needs_probe
        inverted = columns_then_rows(Image.fromarray(255 - np.asarray(image)), 30, 40)
        expected = (np.asarray(inverted) / np.float32(255) - np.array(MEAN, np.float32)) / np.array(
            STD, np.float32
        )
        np.testing.assert_allclose(run(pipeline, png(image)), expected.transpose(2, 0, 1), atol=1e-6, rtol=0)

    @for_each("layout", ["NCHW", "NHWC"])
    @for_each("dtype", ["float32", "bfloat16"])
    def test_a_tensor_it_returns_is_laid_out_and_converted(self, layout: str, dtype: str) -> None:
        image = scene(20, 30)
        steps = [ToTensor(), lambda value: value * 2, Normalize(MEAN, STD)]
        pipeline = compile_pipeline(steps, 0, dtype, layout)
        pipeline.probe(png(image))
        out = run(pipeline, png(image))
        expected = (np.asarray(image) / np.float32(255) * 2 - np.array(MEAN, np.float32)) / np.array(
            STD, np.float32
        )
        if layout == "NCHW":
            expected = expected.transpose(2, 0, 1)
        got = torch.from_numpy(out).view(torch.bfloat16).float().numpy() if dtype == "bfloat16" else out
        np.testing.assert_allclose(got, expected, rtol=2**-8 if dtype == "bfloat16" else 1e-6, atol=1e-6)

    def test_a_grey_picture_it_returns_becomes_one_channel(self) -> None:
        image = scene(20, 30)
        pipeline = compile_pipeline([Resize((20, 30)), lambda value: value[:, :, 1], ToTensor()], 0)
        assert pipeline.probe(png(image)) == (1, 20, 30)
        np.testing.assert_allclose(run(pipeline, png(image))[0], np.asarray(image)[:, :, 1] / 255, atol=1e-6)

    def test_a_varying_shape_names_the_transform(self) -> None:
        def ragged(data: bytes) -> NDArray[Any]:
            return np.zeros(len(data))

        pipeline = compile_pipeline([ragged], 0)
        pipeline.probe(b"abc")
        with pytest.raises(
            ConfigError, match=r"the sample has shape \(4,\) after .*ragged.*space for \(3,\)"
        ):
            run(pipeline, b"abcd", sample=41)

    def test_its_own_error_carries_its_place(self) -> None:
        def broken(value: Any) -> Any:
            raise KeyError("nope")

        pipeline = compile_pipeline([broken], 0)
        with pytest.raises(KeyError) as caught:
            pipeline.probe(b"abc")
        assert "transform 0 (" in caught.value.__notes__[0]
        assert "broken" in caught.value.__notes__[0]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
    def test_a_torch_tensor_keeps_its_own_axes(self, dtype: str) -> None:
        """torchvision's habit: the callable itself goes over to [channels, height, width]."""
        image = scene(64, 64)
        steps = [Resize((64, 64)), lambda a: torch.from_numpy(a.copy()).permute(2, 0, 1).float() / 255]
        expected = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255

        pipeline = compile_pipeline(steps, 0, dtype)

        assert pipeline.probe(png(image)) == (3, 64, 64)
        got = torch.from_numpy(run(pipeline, png(image)))
        assert torch.equal(
            got.view(torch.bfloat16) if dtype == "bfloat16" else got.float(),
            expected.bfloat16() if dtype == "bfloat16" else expected,
        )

    @for_each("before", [[Resize((20, 30))], [Resize((20, 30)), ToTensor()]])
    @for_each("shape", [(30, 20, 3), (3, 20, 30), (7, 2, 5), (600,), (2, 1, 300)])
    def test_a_torch_tensor_of_any_shape_is_taken_as_it_is(self, before, shape) -> None:  # type: ignore[no-untyped-def]
        made = torch.arange(float(np.prod(shape))).reshape(shape).requires_grad_()
        pipeline = compile_pipeline([*before, lambda value: made], 0)

        assert pipeline.probe(png(scene(20, 30))) == shape
        assert np.array_equal(run(pipeline, png(scene(20, 30))), made.detach().numpy())

    def test_a_tensor_of_a_type_that_numpy_lacks_is_taken_too(self) -> None:
        pipeline = compile_pipeline([ToTensor(), lambda value: torch.from_numpy(value).bfloat16()], 0)
        image = scene(20, 30)
        pipeline.probe(png(image))
        expected = (torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255).bfloat16().float()
        assert np.array_equal(run(pipeline, png(image)), expected.numpy())

    def test_a_float_array_whose_last_axis_is_no_channels_keeps_its_axes(self) -> None:
        image = scene(20, 30)
        steps = [Resize((20, 30)), lambda value: value.transpose(2, 0, 1) / np.float32(255)]
        pipeline = compile_pipeline(steps, 0)

        assert pipeline.probe(png(image)) == (3, 20, 30)
        assert np.array_equal(
            run(pipeline, png(image)), np.asarray(image).transpose(2, 0, 1) / np.float32(255)
        )

    @pytest.mark.parametrize(("layout", "shape"), [("NCHW", (1, 20, 30)), ("NHWC", (20, 30, 1))])
    def test_a_float_array_with_channels_last_gets_the_layout(self, layout, shape) -> None:  # type: ignore[no-untyped-def]
        pipeline = compile_pipeline([Resize((20, 30)), lambda value: value[:, :, :1] * 2.0], 0, layout=layout)
        image = scene(20, 30)

        assert pipeline.probe(png(image)) == shape
        assert np.array_equal(run(pipeline, png(image)).ravel(), np.asarray(image)[:, :, 0].ravel() * 2.0)

    @for_each(
        ("steps", "layout", "text"),
        [
            (
                [Resize((3, 64)), lambda value: value * 1.0],
                "NCHW",
                r"<lambda> returned float64\[3, 64, 3\], of which the first and the last axis could be the channels",
            ),
            (
                [Resize((8, 9)), lambda value: torch.zeros(3, 8, 9)],
                "NHWC",
                r"layout is 'NHWC', and .*<lambda> returned a tensor float32\[3, 8, 9\].*return \[height, width, ch",
            ),
            (
                [Resize((8, 9)), lambda value: torch.zeros(3, 8, 9), ToTensor()],
                "NCHW",
                r"ToTensor was given a tensor float32\[3, 8, 9\].*drop ToTensor",
            ),
            (
                [Resize((8, 9)), lambda value: value.transpose(2, 0, 1), ToTensor()],
                "NCHW",
                r"ToTensor was given uint8\[3, 8, 9\]",
            ),
            (
                [lambda value: torch.zeros(3, 8, 9), Resize((8, 9))],
                "NCHW",
                r"given a tensor float32\[3, 8, 9\] .* works on pictures",
            ),
            (
                [Resize((8, 9)), lambda value: (value, 7)],
                "NCHW",
                "a value of type tuple; a batch needs numbers",
            ),
        ],
    )
    def test_what_could_be_meant_in_two_ways_or_none_is_refused(self, steps, layout, text) -> None:  # type: ignore[no-untyped-def]
        pipeline = compile_pipeline(steps, 0, layout=layout)
        with pytest.raises(ConfigError, match=text):
            pipeline.probe(png(scene(8, 9))) if pipeline.needs_probe else run(pipeline, png(scene(8, 9)))

    @for_each(
        "steps, given",
        [
            ([Resize((8, 9))], "uint8[8, 9, 3]: a NumPy array [height, width, 3], no PIL image"),
            ([], "the stored bytes, as no step of penstock.loader.transforms"),
        ],
    )
    def test_one_that_wants_a_pil_image_is_told_what_it_was_given_and_what_to_write(
        self, steps: list[Any], given: str
    ) -> None:
        pipeline = compile_pipeline([*steps, lambda picture: picture.convert("L")], 0)
        with pytest.raises(AttributeError) as caught:
            pipeline.probe(png(scene(8, 9)))
        (note,) = caught.value.__notes__
        assert f"called with {given}" in note
        assert "annotate its first parameter as PIL.Image.Image" in note

    def test_one_that_says_so_gets_pil_images_and_its_own_draws(self) -> None:
        def turned(image: Image.Image, rng: np.random.Generator) -> Image.Image:
            return image.rotate(float(rng.integers(360)))

        def of_array(array: NDArray[np.uint8], rng: np.random.Generator) -> Image.Image:
            return turned(Image.fromarray(array), rng)

        of_array.__qualname__ = turned.__qualname__  # by which draws are known
        data, fitted = png(scene(8, 9)), np.asarray(ImageOps.fit(scene(8, 9), (6, 6)))
        for steps, same in (
            ([ImageOps.mirror, ToTensor()], [RandomHorizontalFlip(1.0), ToTensor()]),
            (
                [partial(ImageOps.fit, size=(6, 6)), ToTensor()],
                [Resize((6, 6)), lambda _: fitted, ToTensor()],
            ),
            ([Resize((8, 9)), turned, ToTensor()], [Resize((8, 9)), of_array, ToTensor()]),
        ):
            found, expected = compile_pipeline(steps, 0), compile_pipeline(same, 0)
            for pipeline in (found, expected):
                pipeline.probe(data)
            np.testing.assert_array_equal(run(found, data, 3), run(expected, data, 3))
            assert found.is_random == (turned in steps)

    @for_each(
        "other",
        ["missing.Thing", "__import__('missing')", "int('3 h w')", "1 / 0", "{}['a']", "no expression"],
    )
    def test_one_says_so_though_another_annotation_raises_whatever_it_is(self, other: str) -> None:
        def step(image, size=None):  # type: ignore[no-untyped-def]
            return image

        step.__annotations__ = {"image": "Image.Image", "size": other}
        assert takes_pil(step)
        step.__annotations__ = {"image": "np.ndarray", "size": other}
        assert not takes_pil(step)

    def test_one_that_says_so_behind_the_numbers_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match=r"transform 1 .* takes a PIL image, and stands behind ToTensor"
        ):
            compile_pipeline([ToTensor(), ImageOps.mirror], 0)

    def test_a_compose_is_the_list_that_it_holds(self) -> None:
        compose = type("Compose", (), {"__init__": lambda self, steps: setattr(self, "transforms", steps)})
        nested = compose([Resize((8, 8)), compose([ToTensor()])])

        assert compile_pipeline(nested, 0).transforms == (Resize((8, 8)), ToTensor())
        assert compile_pipeline([nested], 0).transforms == (Resize((8, 8)), ToTensor())

    def test_what_is_no_number_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="a batch needs numbers"):
            compile_pipeline([lambda data: "text"], 0).probe(b"abc")


def test_the_shape_is_probed_where_the_transforms_leave_it_open() -> None:
    pipeline = compile_pipeline([ToTensor()], 0)
    with pytest.raises(ConfigError, match="call probe"):
        _ = pipeline.output_shape
    assert pipeline.probe(png(scene(8, 9))) == pipeline.output_shape == (3, 8, 9)
    assert run(pipeline, png(scene(8, 9))).shape == (3, 8, 9)
    with pytest.raises(ConfigError, match=r"the sample has shape \(3, 9, 8\).*CenterCrop"):
        run(pipeline, png(scene(9, 8)), sample=3)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_shape_is_known_beforehand_where_the_transforms_fix_it(layout: str) -> None:
    for steps in ([RandomResizedCrop((8, 6))], [Resize(99), CenterCrop((8, 6))], [Resize((8, 6))]):
        shape = compile_pipeline(steps, 0, layout=layout).output_shape
        assert shape == ((3, 8, 6) if layout == "NCHW" else (8, 6, 3))


@for_each(
    ("steps", "options", "text"),
    [
        ([], {}, "transforms is empty"),
        ([ToTensor(), Resize(8)], {}, r"Resize.*behind ToTensor: put it before"),
        ([Normalize(MEAN, STD)], {}, "put ToTensor before it"),
        ([ToTensor(), ToTensor()], {}, "behind another ToTensor"),
        ([Resize], {}, "make an instance"),
        (["Resize"], {}, "neither a transform of Penstock nor callable"),
        ([Resize((8, 8))], {"layout": "CHWN"}, "layout is 'CHWN'"),
        ([Resize((8, 8))], {"dtype": "float64"}, "for images it is one of float32, float16, bfloat16, uint8"),
        ([Resize((8, 8)), ToTensor()], {"dtype": "uint8"}, "uint8 cannot hold"),
        ([len], {"dtype": "object"}, "dtype is 'object'"),
        ([len], {"dtype": "quux"}, "dtype is 'quux'"),
        ([len, DecodeRaw("uint8")], {}, r"transform 1 \(DecodeRaw.*takes the stored bytes: put it first"),
        ([DecodeRaw("float32")], {"dtype": "uint8"}, "reads float32, which dtype='uint8' cannot hold"),
        ([DecodeRaw("int64")], {"dtype": "quux"}, "dtype is 'quux'; it is one of"),
        ([DecodeRaw("int64")], {"dtype": "int32"}, "reads int64, which dtype='int32' cannot hold"),
        ([DecodeRaw("uint8"), Resize(8)], {}, r"transform 0 \(DecodeRaw.*takes no pictures"),
    ],
)
def test_transforms_that_cannot_follow_each_other_are_refused(steps, options, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=text):
        compile_pipeline(steps, 0, **options)


def test_numbers_before_a_callable_are_those_that_numpy_computes() -> None:
    """From the stored picture, from a callable's, and from one that is no picture; before `Normalize` and behind it."""
    picture = np.asarray(scene(8, 9))
    tensor = picture.transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (MEAN, STD))

    def same(value: NDArray[Any]) -> NDArray[Any]:
        return value

    def flipped(value: NDArray[Any]) -> NDArray[Any]:
        return value[::-1]

    for steps, expected in (
        ([ToTensor(), same], tensor),
        ([ToTensor(), Normalize(MEAN, STD), same], (tensor - mean) / std),
        ([flipped, ToTensor(), Normalize(MEAN, STD), same], (tensor[:, ::-1] - mean) / std),
        ([lambda value: value.astype(np.float32), ToTensor(), same], 255 * tensor),
    ):
        pipeline = compile_pipeline([CenterCrop((8, 9)), *steps], 0)
        pipeline.probe(png(scene(8, 9)))
        assert np.array_equal(run(pipeline, png(scene(8, 9))), expected)


def test_a_picture_step_behind_a_callable_that_returns_something_else_says_what_it_got() -> None:
    pipeline = compile_pipeline([lambda value: value.astype(np.float32), Resize((4, 4))], 0)
    with pytest.raises(ConfigError, match=r"was given float32\[8, 9, 3\]"):
        run(pipeline, png(scene(8, 9)))


def doubled(numbers: NDArray[Any]) -> NDArray[Any]:
    numbers *= 2
    return numbers


@for_each(
    ("steps", "dtype", "expected"),
    [
        ([DecodeRaw("<i2")], "int16", [[258, -1, 0], [5, 6, 7], [3, 4, 8]]),
        ([DecodeRaw(">i2")], "int64", [[513, -1, 0], [1280, 1536, 1792], [768, 1024, 2048]]),
        ([DecodeRaw("<i2", (3, 1))], "int16", [[[258], [-1], [0]], [[5], [6], [7]], [[3], [4], [8]]]),
        ([DecodeRaw("<i2"), doubled], "float32", [[516, -2, 0], [10, 12, 14], [6, 8, 16]]),
    ],
)
def test_stored_numbers_are_taken_as_they_are(steps: list[Any], dtype: str, expected: Any) -> None:
    files = [bytes((2, 1, 255, 255, 0, 0)), bytes((5, 0, 6, 0, 7, 0)), bytes((3, 0, 4, 0, 8, 0))]
    pipeline = compile_pipeline(steps, 0, dtype=dtype)
    pipeline.probe(files[0])
    for rows in ([0, 1, 2], [2, 0, 1]):
        out = np.zeros((3, *pipeline.output_shape), dtype)
        draws, scratch = pipeline.draw(0, np.arange(3)), Scratch()
        data = [np.frombuffer(files[row], np.uint8) for row in rows]

        for index in pipeline.run_group(data, out, draws, rows, scratch):
            pipeline.run(data[index].data, out[rows[index]], draws, rows[index], scratch)

        assert out.tolist() == expected


@pytest.mark.parametrize(
    ("step", "data", "text"),
    [
        (
            DecodeRaw("int16"),
            b"12345",
            r"5 bytes are no multiple of the size of int16: check dtype in DecodeRaw",
        ),
        (DecodeRaw("int16", (3,)), b"1234", r"4 bytes, and DecodeRaw.* takes 6"),
    ],
)
def test_stored_numbers_of_another_size_say_which_was_expected(
    step: DecodeRaw, data: bytes, text: str
) -> None:
    pipeline = compile_pipeline([step], 0, dtype="int16")
    pipeline.probe(b"123456")
    out = np.zeros((2, 3), np.int16)
    draws, scratch = pipeline.draw(0, np.arange(2)), Scratch()

    left = pipeline.run_group(
        [np.frombuffer(each, np.uint8) for each in (data, b"123456")], out, draws, [0, 1], scratch
    )

    assert left == [0]
    assert out[1].tobytes() == b"123456"
    with pytest.raises(DataError, match=text):
        pipeline.run(data, out[0], draws, 0, scratch)


def test_data_that_are_no_image_raise_what_is_wrong() -> None:
    pipeline = compile_pipeline([RandomResizedCrop(8), ToTensor()], 0)
    with pytest.raises(DataError, match="the file is empty"):
        run(pipeline, b"")


def test_a_pipeline_prints_what_it_does() -> None:
    text = repr(compile_pipeline([CenterCrop(8), ToTensor()], 5, "float16"))
    assert text == "Pipeline([CenterCrop(size=8), ToTensor()], seed=5, dtype='float16', layout='NCHW')"


def test_naming_transforms_imports_neither_numba_nor_opencv() -> None:
    code = (
        "import sys; import penstock.loader.transforms as t; t.Resize(8); "
        "print([m for m in ('numba', 'cv2', 'PIL', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
