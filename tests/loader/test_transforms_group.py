"""Groups of JPEG files decoded by one compiled call: the same bits as one by one, and what is left to that."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.for_each import for_each

from penstock.compiling import Part
from penstock.errors import DataError
from penstock.loader.transforms import (
    CenterCrop,
    Normalize,
    Pipeline,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Scratch,
    ToTensor,
    compile_pipeline,
)
from penstock.loader.transforms.compiled import GROUP_KERNELS, KERNELS
from penstock.loader.transforms.crops import CropPass
from penstock.loader.transforms.group import Later
from penstock.loader.transforms.memory import DecodeMemory

NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PIPELINES: dict[str, list[Any]] = {
    "training": [RandomResizedCrop(20), RandomHorizontalFlip()],
    "training, bilinear": [RandomResizedCrop((9, 30), antialias=False), RandomVerticalFlip(0.3)],
    "training, bicubic": [RandomResizedCrop((30, 9), interpolation="bicubic"), RandomHorizontalFlip()],
    "cubic, not widened": [Resize((11, 21), "bicubic", antialias=False)],
    "validation": [Resize(18), CenterCrop(16)],
    "odd order": [
        RandomVerticalFlip(),
        CenterCrop(24),
        RandomHorizontalFlip(),
        Resize((13, 17)),
        CenterCrop(12),
    ],
    "two passes": [Resize(30), RandomResizedCrop(16, scale=(0.5, 1.0))],
    "as stored": [CenterCrop(16)],
    "small": [Resize((2, 3))],
}


def picture(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)).resize((width, height))
    noise = rng.integers(-9, 10, (height, width, 3))
    return np.clip(np.asarray(coarse).astype(int) + noise, 0, 255).astype(np.uint8)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """JPEG files of all kinds that a camera, a web site or an accident makes, and now and then a PNG file."""
    height, width = draw(st.integers(1, 120)), draw(st.integers(1, 120))
    image = Image.fromarray(picture(height, width, draw(st.integers(0, 3))))
    if draw(st.integers(0, 5)) == 0:
        image = image.convert("L")
    elif draw(st.integers(0, 9)) == 0:
        image = image.convert("CMYK")
    options: dict[str, Any] = {"quality": draw(st.integers(20, 100)), "subsampling": draw(st.integers(0, 2))}
    if draw(st.integers(0, 4)) == 0:
        options["progressive"] = True
    if draw(st.integers(0, 4)) == 0:
        exif = Image.Exif()
        exif[0x0112] = draw(st.integers(1, 8))
        options["exif"] = exif
    stream = io.BytesIO()
    if draw(st.integers(0, 19)) == 0:
        image.convert("RGB").save(stream, "PNG")
        return stream.getvalue()
    image.save(stream, "JPEG", **options)
    data = bytearray(stream.getvalue())
    accident = draw(st.sampled_from(["none"] * 6 + ["cut", "cut", "flipped", "rubbish behind", "empty"]))
    if accident == "cut":
        del data[draw(st.integers(0, len(data) - 1)) :]
    elif accident == "flipped":
        scan = data.index(b"\xff\xda") + 10
        for _ in range(draw(st.integers(1, 4))):
            data[draw(st.integers(scan, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    elif accident == "rubbish behind":
        data += b"rubbish"
    elif accident == "empty":
        data.clear()
    return bytes(data)


def one_by_one(
    pipeline: Pipeline, data: list[Any], samples: NDArray[np.int64], which: list[int], out: NDArray[Any]
) -> list[tuple[int, str]]:
    """Write some samples as `Pipeline.run` does; return the message of each that it raised, by index."""
    draws, scratch, errors = pipeline.draw(3, samples), Scratch(), []
    for index in which:
        try:
            pipeline.run(data[index], out[index], draws, index, scratch)
        except DataError as error:
            errors.append((index, str(error)))
    return errors


def by_group(
    pipeline: Pipeline, data: list[Any], samples: NDArray[np.int64], scratch: Scratch
) -> tuple[NDArray[Any], list[int]]:
    """Return what `Pipeline.run_group` wrote, and what it left."""
    out = np.zeros((len(data), *pipeline.output_shape), pipeline.storage_dtype)
    rows = list(range(len(data)))
    return out, pipeline.run_group(arrays(data), out, pipeline.draw(3, samples), rows, scratch)


def arrays(data: list[bytes]) -> list[NDArray[np.uint8]]:
    return [np.frombuffer(each, np.uint8) for each in data]


def with_buffers(nbytes: int = 1 << 16, **options: Any) -> Scratch:
    """A thread's buffers after a few pictures."""
    scratch = Scratch(**options)
    scratch.decoders.buffer._storage = np.zeros(nbytes, np.uint8)
    scratch.blended._bytes = np.zeros(4 * nbytes, np.uint8)
    return scratch


@settings(max_examples=150, deadline=None)
@given(
    st.lists(files(), min_size=1, max_size=6),
    st.sampled_from(sorted(PIPELINES)),
    st.sampled_from(["float32", "float16", "bfloat16", "uint8"]),
    st.sampled_from(["NCHW", "NHWC"]),
    st.integers(0, 2**34),
)
def test_a_group_has_the_bits_and_the_errors_of_its_pictures_one_by_one(
    data: list[bytes], name: str, dtype: str, layout: str, first: int
) -> None:
    steps = [*PIPELINES[name], *([] if dtype == "uint8" else [ToTensor(), NORMALIZE])]
    pipeline = compile_pipeline(steps, seed=5, dtype=dtype, layout=layout)
    samples = np.arange(first, first + len(data))
    expected = np.zeros((len(data), *pipeline.output_shape), pipeline.storage_dtype)
    errors = one_by_one(pipeline, data, samples, list(range(len(data))), expected)

    out, left = by_group(pipeline, data, samples, with_buffers())

    assert one_by_one(pipeline, data, samples, left, out) == errors
    for index in set(range(len(data))) - {index for index, _ in errors}:
        assert out[index].tobytes() == expected[index].tobytes()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(files(), min_size=1, max_size=4),
    st.sampled_from(sorted(set(PIPELINES) - {"as stored"})),
    st.sampled_from(["float32", "float16", "bfloat16", "uint8"]),
    st.sampled_from(["NCHW", "NHWC"]),
    st.integers(0, 2**34),
)
def test_crops_of_several_epochs_are_those_of_decoding_for_each_and_so_is_what_becomes_of_them(
    data: list[bytes], name: str, dtype: str, layout: str, first: int
) -> None:
    tail = [] if dtype == "uint8" else [ToTensor(), NORMALIZE]
    pipeline = compile_pipeline([*PIPELINES[name], *tail], seed=5, dtype=dtype, layout=layout)
    crops, samples, epochs = CropPass(pipeline), np.arange(first, first + len(data)), range(3, 6)
    made = np.zeros((len(data), len(epochs), *crops.shape), np.uint8)
    own, blocks = (
        np.zeros((len(data), *crops.shape), np.uint8),
        np.zeros((2 * len(data), *crops.shape), np.uint8),
    )
    later = Later(np.arange(len(blocks))[::-1].copy().reshape(-1, 2), blocks)

    left = crops.make_group(arrays(data), samples, epochs[0], own, with_buffers(), later)
    made[:, 0], made[:, 1:] = own, blocks[later.rows]

    # Those whose crops lie within damage that none of them shows may be left.
    assert set(left) >= set(by_group(pipeline, data, samples, with_buffers())[1])
    done = [index for index in range(len(data)) if index not in left]
    out = np.zeros((len(data), *pipeline.output_shape), pipeline.storage_dtype)
    for place, epoch in enumerate(epochs if done else ()):
        assert crops.finish_group([made[index, place] for index in done], out, done)
        draws, expected = pipeline.draw(epoch, samples), np.zeros_like(out)
        for index in done:
            pipeline.run(data[index], expected[index], draws, index, Scratch())
        assert out.tobytes() == expected.tobytes()
    # With the crops of this epoch written to the batch at once.
    direct, batch = Later(later.rows, np.zeros_like(blocks)), pipeline.draw(epochs[0], samples)
    rows, finished = range(len(data)), np.zeros((len(data), *pipeline.output_shape), pipeline.storage_dtype)
    assert pipeline.run_group(arrays(data), finished, batch, rows, with_buffers(), direct) == left
    assert not done or crops.finish_group([own[index] for index in done], out, done)
    for index in done:
        assert finished[index].tobytes() == out[index].tobytes()
        assert direct.crops[later.rows[index]].tobytes() == blocks[later.rows[index]].tobytes()


def jpeg(height: int = 40, width: int = 50, seed: int = 0, mode: str = "RGB", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture(height, width, seed)).convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


@for_each("name", sorted(set(PIPELINES) - {"two passes"}))
def test_usual_files_are_all_done_by_the_group(name: str) -> None:
    """Whatever the memory that holds them, their size, quality, colours, and what a camera notes in them."""
    exif = Image.Exif()
    exif[0x0112] = 6
    usual: list[Any] = [
        jpeg(subsampling=subsampling, quality=quality)
        for subsampling, quality in itertools.product((0, 1, 2), (30, 90))
    ]
    usual += [jpeg(mode="L"), jpeg(exif=exif), jpeg(30, 31), jpeg(100, 70), jpeg(restart_marker_blocks=1)]
    usual += [bytearray(usual[0]), memoryview(usual[0]), memoryview(b"xx" + usual[0])[2:].toreadonly()]
    pipeline = compile_pipeline([*PIPELINES[name], ToTensor()], seed=1)

    _, left = by_group(pipeline, usual, np.arange(len(usual)), with_buffers())

    assert left == []


def png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture(20, 20, 0)).save(stream, "PNG")
    return stream.getvalue()


@for_each(
    ("odd", "steps"),
    [
        pytest.param(png(), [Resize((9, 9))], id="no JPEG"),
        pytest.param(b"", [Resize((9, 9))], id="empty"),
        pytest.param(jpeg(mode="CMYK"), [Resize((9, 9))], id="CMYK"),
        pytest.param(jpeg(progressive=True), [Resize((9, 9))], id="progressive"),
        pytest.param(jpeg()[:-30], [Resize((9, 9))], id="cut off"),
        pytest.param(jpeg()[:300] + jpeg()[310:], [Resize((9, 9))], id="damaged"),
        pytest.param(jpeg(300, 300), [Resize((290, 290))], id="larger than the buffers"),
        pytest.param(jpeg(8, 50), [CenterCrop(9)], id="padded"),
        pytest.param(jpeg(40, 41), [Resize(30), Resize((9, 9))], id="two passes"),
        pytest.param(jpeg(40, 60), [Resize(30)], id="of another shape"),
    ],
)
def test_what_is_not_usual_is_left_and_its_neighbours_are_done(odd: bytes, steps: list[Any]) -> None:
    pipeline = compile_pipeline([*steps, ToTensor()], seed=1)
    square = jpeg(30, 30)
    pipeline.probe(square)
    data = [square, odd, square]

    out, left = by_group(pipeline, data, np.arange(3), with_buffers(1 << 15))

    assert left == [1]
    assert out[0].tobytes() == out[2].tobytes() != bytes(out[0].nbytes)


def test_rows_and_draws_are_those_of_the_places_in_the_batch() -> None:
    pipeline = compile_pipeline([RandomResizedCrop(8), RandomHorizontalFlip(), ToTensor()], seed=1)
    data = [jpeg(seed=seed) for seed in range(5)]
    whole, _ = by_group(pipeline, data, np.arange(5), with_buffers())
    out = np.zeros_like(whole)

    left = pipeline.run_group(
        arrays([data[3], data[1]]), out, pipeline.draw(3, np.arange(5)), [3, 1], with_buffers()
    )

    assert left == []
    assert out[[1, 3]].tobytes() == whole[[1, 3]].tobytes()
    assert not out[[0, 2, 4]].any()


def test_until_the_loop_is_compiled_and_without_the_library_everything_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline, data = compile_pipeline([Resize((8, 8)), ToTensor()], seed=1), [jpeg(), jpeg()]

    _, left_without_library = by_group(pipeline, data, np.arange(2), with_buffers(decoder="opencv"))
    monkeypatch.setattr(type(GROUP_KERNELS["group_float32"]), "ask", lambda part: None)
    _, left_without_loop = by_group(pipeline, data, np.arange(2), with_buffers())

    assert left_without_library == left_without_loop == [0, 1]


def test_what_resamples_one_picture_is_compiled_before_what_decodes_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Part] = []

    def ask(part: Part) -> None:
        asked.append(part)

    monkeypatch.setattr(Part, "ask", ask)

    pipeline = compile_pipeline([Resize((8, 8)), ToTensor()], seed=1)
    _, left = by_group(pipeline, [jpeg()], np.arange(1), with_buffers())

    assert left == [0]
    assert set(asked) == {KERNELS["float32"]}


def test_a_group_takes_no_more_memory_than_its_threads_buffers_and_gives_it_back() -> None:
    pipeline, data = compile_pipeline([Resize((8, 8)), ToTensor()], seed=1), [jpeg()] * 3
    memory = DecodeMemory(400_000)
    scratch, other = with_buffers(memory=memory), Scratch(memory=memory)
    kept = scratch.kept.total

    assert by_group(pipeline, data, np.arange(3), scratch)[1] == []
    assert memory._taken == {scratch: kept}
    # Another thread may have everything now: then the buffers are dropped, and a group finds none.
    other.reserve(None)
    other.end_picture()
    assert by_group(pipeline, data, np.arange(3), scratch)[1] == [0, 1, 2]


def test_a_group_whose_buffers_the_user_gave_no_memory_for_is_left() -> None:
    pipeline, data = compile_pipeline([Resize((8, 8)), ToTensor()], seed=1), [jpeg()] * 3
    scratch = with_buffers(memory=DecodeMemory(1000))

    assert by_group(pipeline, data, np.arange(3), scratch)[1] == [0, 1, 2]


def negative(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return 255 - picture


@for_each(
    "behind",
    [(negative, ToTensor()), (ToTensor(), Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)), RandomErasing(1.0))],
)
def test_steps_before_a_callable_are_done_by_the_group_with_the_bits_of_one_picture(behind: Any) -> None:
    pipeline = compile_pipeline([RandomResizedCrop((20, 30)), RandomHorizontalFlip(), *behind], 5)
    rows = [2, 0, 1]
    data = [jpeg(90 + 9 * number, 120) for number in range(3)]
    data[1] = b"damaged"
    pipeline.probe(data[0])
    draws, scratch = pipeline.draw(1, np.array([7, 8, 9])), with_buffers()

    fronts = pipeline.run_front(arrays(data), draws, rows, scratch)

    assert fronts[1] is None
    for index in (0, 2):
        one, other = (np.empty(pipeline.output_shape, np.float32) for _ in range(2))
        pipeline.run(data[index], one, draws, rows[index], scratch)
        pipeline.run(data[index], other, draws, rows[index], scratch, fronts[index])
        assert fronts[index] is not None
        assert np.array_equal(one, other)
