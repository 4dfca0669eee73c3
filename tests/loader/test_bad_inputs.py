"""What a user's data may be, against all advice, through the whole loader."""

from __future__ import annotations

import gc
import io
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.for_each import for_each
from tests.privileges import without_permission

from penstock.errors import ConfigError, DataError, PenstockError
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import BundleShuffle
from penstock.store import FlatFolder, ImageFolder, open_source
from penstock.trace import read_trace
from penstock.units import parse_bytes

HEIGHT, WIDTH = 10, 14
TO_ARRAY = [Resize((HEIGHT, WIDTH)), ToTensor()]


def make(source: Any, **options: Any) -> Loader:
    settings: dict[str, Any] = {
        "batch_size": 4,
        "epochs": 1,
        "transforms": TO_ARRAY,
        "shuffle": False,
        "memory": "32 MiB",
        "report": None,
        "timeout_seconds": 60,
        **options,
    }
    return Loader(source, **settings)


# Pictures that are not what a camera makes


def scene() -> np.ndarray:
    """A smooth picture, uint8[height, width, 3], whose channels differ."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    channels = [20 + 15 * rows, 30 + 12 * columns, 200 - 6 * rows - 5 * columns]
    return np.stack(channels, axis=2).astype(np.uint8)


def encoded(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(
        stream, kind, **({"quality": 100, "subsampling": 0} if kind == "JPEG" and image.mode != "L" else {})
    )
    return stream.getvalue()


def sixteen_bits() -> Image.Image:
    """Grey, where 257 v in 16 bits is v in 8."""
    return Image.fromarray(np.asarray(Image.fromarray(scene()).convert("L")).astype(np.uint16) * 257)


def see_through() -> Image.Image:
    alpha = np.linspace(0, 255, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH, 1).astype(np.uint8)
    return Image.fromarray(np.concatenate([scene(), alpha], axis=2))


def grey() -> np.ndarray:
    return np.asarray(Image.fromarray(scene()).convert("L").convert("RGB"))


def through_cmyk() -> np.ndarray:
    return np.asarray(Image.fromarray(scene()).convert("CMYK").convert("RGB"))


PICTURES: dict[str, tuple[Callable[[], Image.Image], str, Callable[[], np.ndarray]]] = {
    "colour.png": (lambda: Image.fromarray(scene()), "PNG", scene),
    "grey.jpg": (lambda: Image.fromarray(scene()).convert("L"), "JPEG", grey),
    "grey.png": (lambda: Image.fromarray(scene()).convert("L"), "PNG", grey),
    "cmyk.jpg": (lambda: Image.fromarray(scene()).convert("CMYK"), "JPEG", through_cmyk),
    "alpha.png": (see_through, "PNG", scene),
    "grey-alpha.png": (lambda: see_through().convert("LA"), "PNG", grey),
    "16-bit.png": (sixteen_bits, "PNG", grey),
    "16-bit.tif": (sixteen_bits, "TIFF", grey),
}


@pytest.fixture
def unusual(tmp_path: Path) -> Path:
    for name, (image, kind, _) in PICTURES.items():
        (tmp_path / "pictures" / "any").mkdir(parents=True, exist_ok=True)
        (tmp_path / "pictures" / "any" / name).write_bytes(encoded(image(), kind))
    return tmp_path / "pictures"


def test_grey_cmyk_alpha_and_16_bit_pictures_arrive_as_three_channels(unusual: Path) -> None:
    """As Pillow's convert("RGB") has them, but for rounding in JPEG and from 16 bits; alpha is left out."""
    source = ImageFolder(unusual)
    with make(source, batch_size=len(PICTURES)) as loader:
        ((images, _),) = list(loader)

    for sample, image in enumerate(images):
        name = Path(source.path_of(sample)).name
        expected = PICTURES[name][2]().transpose(2, 0, 1)
        error = np.abs(image * 255 - expected).max()
        assert error <= (3 if name.endswith(".jpg") else 1.01), name


# Names that are any bytes but "/" and zero, as a file system has them


def test_names_that_are_not_text_load_and_reach_no_line_raw(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path) + b"/fotos \xfc\n"
    names = [b"0 \xff\x1b[2J.png", b"1 line\nend.png", "2 \u202eüber.png".encode(), b"3.png"]
    os.makedirs(root + b"/one\x07")
    for name in names:
        content = encoded(Image.fromarray(scene()), "PNG")
        Path(os.fsdecode(root + b"/one\x07/" + name)).write_bytes(b"" if name == names[0] else content)
    shown = rf"{tmp_path}/fotos \udcfc\n/one\x07/0 \udcff\x1b[2J.png"
    lines: list[str] = []
    trace = tmp_path / "trace"

    source = open_source(os.fsdecode(root))
    with make(source, on_error="skip", trace=trace, report=lines.append) as loader:
        ((images, labels),) = list(loader)
        (skipped,) = loader.skipped
    with make(source) as strict, pytest.raises(DataError) as caught:
        list(strict)

    assert (images.shape[0], labels.tolist(), loader.classes) == (3, [0, 0, 0], ("one\x07",))
    assert os.fsencode(skipped.name) == root + b"/one\x07/" + names[0]
    assert lines[-1].startswith(r"fotos \udcfc\n: epoch 0: ")
    for text in (lines[-1], skipped.error, str(caught.value)):
        assert shown in text
    assert all(
        text.isprintable() for text in (*lines, skipped.error, str(caught.value), *caught.value.__notes__)
    )
    assert read_trace(trace).meta["loader"] == "fotos \udcfc\n"


# Folders that are not what they should be


def test_a_label_folder_without_files_is_named(image_folder: Callable[..., Path]) -> None:
    root = image_folder()
    (root / "empty").mkdir()

    with pytest.raises(DataError, match=r"images/empty has no files: add some, or remove the folder"):
        make(root)


def test_a_label_folder_with_other_files_alone_is_named(image_folder: Callable[..., Path]) -> None:
    root = image_folder()
    (root / "notes").mkdir()
    (root / "notes" / "read.me").write_text("nothing to see")

    with pytest.raises(DataError, match=r"images/notes has 1 files but none that ends in .*'\.me'"):
        make(root)


def test_an_empty_folder_and_a_missing_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(DataError, match=r"empty has no files"):
        make(tmp_path / "empty")
    with pytest.raises(DataError, match=r"missing does not exist"):
        make(tmp_path / "missing")


def test_a_data_set_without_samples_is_refused() -> None:
    class Nothing:
        def __len__(self) -> int:
            return 0

        def __getitem__(self, index: int) -> Any:
            raise IndexError(index)

    with pytest.raises(ConfigError, match="source has no samples"):
        make(Nothing(), transforms=())


@for_each("ratio", [0, -0.5, 1.5, float("nan"), float("inf")])
def test_a_bundle_ratio_outside_its_range_is_named(ratio: Any) -> None:
    with pytest.raises(ConfigError, match="bundle_ratio"):
        BundleShuffle(100, 0, ratio)


# Memory


def test_memory_for_not_even_three_batches_says_how_much_it_takes(image_folder: Callable[..., Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"memory is 1\.02 kB;.*need .*: give more, or make the batch smaller"
    ):
        make(image_folder(), memory="1 KiB")


def test_the_memory_that_the_message_asks_for_is_enough(image_folder: Callable[..., Path]) -> None:
    """Batch slots and passing samples only: no space for a tier, so every epoch reads the store."""
    root = image_folder()
    largest = int(ImageFolder(root).sizes_bytes.max())
    slot = 4 * 3 * HEIGHT * WIDTH * 4 + 64
    least_bytes = 3 * slot + 2 * largest

    with pytest.raises(ConfigError, match="memory is") as refused:
        make(root, memory=least_bytes, epochs=2)  # nothing is left for decoding
    (asked,) = re.findall(r"need ([\d.]+ kB): give more", str(refused.value))
    with make(root, memory=parse_bytes(asked) + 100, epochs=2) as loader:
        assert [sum(len(labels) for _, labels in loader) for _ in range(2)] == [12, 12]


def test_a_tier_that_holds_not_one_sample_is_refused_by_name(image_folder: Callable[..., Path]) -> None:
    root = image_folder()
    memory = Curve(((1, 1e9),))
    machine = Machine(
        SharedStore(None, Curve(((1, 1e8),)), 1e-3, 4),
        (StorageClass("staging", 10**6, 1, memory), StorageClass("nook", 10, 1, memory)),
    )

    with pytest.raises(ConfigError, match="nook") as caught:
        make(root, machine=machine)

    assert "sample" in str(caught.value)


# Files that may not be read


def test_a_file_that_may_not_be_read_is_named_with_the_user(image_folder: Callable[..., Path]) -> None:
    source = ImageFolder(image_folder(images=12))
    file = Path(source.path_of(5))
    message = f"{file} may not be read by user {os.geteuid()}: give read permission to it and its folders"

    with without_permission(file):
        with make(source) as loader, pytest.raises(DataError, match=re.escape(message)):
            list(loader)
        with make(source, on_error="skip") as loader:
            assert sum(len(labels) for _, labels in loader) == 11
            assert [skip.error for skip in loader.skipped] == [message]


# A user's code


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, RecursionError])
def test_whatever_a_transform_raises_reaches_the_training(
    image_folder: Callable[..., Path], kind: type[BaseException]
) -> None:
    def wicked(image: np.ndarray) -> np.ndarray:
        if threading.current_thread() is not threading.main_thread():
            raise kind("from a worker")
        return image

    with (
        make(image_folder(), transforms=[wicked, *TO_ARRAY]) as loader,
        pytest.raises(kind, match="from a worker"),
    ):
        for _ in loader:
            pass


def test_a_transform_that_changes_its_mind_about_the_shape_is_told_so(
    image_folder: Callable[..., Path],
) -> None:
    def moody(image: np.ndarray) -> np.ndarray:
        return image[:5] if threading.current_thread() is not threading.main_thread() else image

    with (
        make(image_folder(), transforms=[moody, ToTensor()]) as loader,
        pytest.raises((PenstockError, ValueError)) as caught,
    ):
        for _ in loader:
            pass

    assert "0000.jpg" in str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))


def test_an_on_error_that_raises_is_heard_and_costs_no_slot(image_folder: Callable[..., Path]) -> None:
    root = image_folder()
    source = FlatFolder(root / "cat")
    Path(source.path_of(3)).write_bytes(b"no picture, and of another size")

    def judge(error: Exception, sample: int) -> Any:
        raise ZeroDivisionError(f"asked about {sample}")

    with make(source, on_error=judge, epochs=20, batch_size=2, memory="40 KiB") as loader:
        for _ in range(20):
            with pytest.raises(ZeroDivisionError, match="asked about 3"):
                for _ in loader:
                    pass


def test_nothing_is_left_of_a_loader_that_could_not_be_made(image_folder: Callable[..., Path]) -> None:
    root = image_folder()
    for options in ({"memory": "1 KiB"}, {"batch_size": 0}, {"dtype": "int3"}, {"trace": root}):
        with pytest.raises((PenstockError, OSError)):
            make(root, **options)
    gc.collect()

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


def test_what_is_neither_folder_nor_data_set_is_refused() -> None:
    for source in (42, None, object()):
        with pytest.raises(ConfigError) as caught:
            make(source)
        assert f"source is {source!r}" in str(caught.value)


def test_a_file_that_lists_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("")

    with pytest.raises(DataError, match=r"list\.csv lists no files"):
        open_source(tmp_path / "list.csv")
