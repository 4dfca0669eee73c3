"""What decoding takes stays within the memory that the user gave."""

from __future__ import annotations

import io
import itertools
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from tests.for_each import for_each
from tests.patience import patient

from penstock.errors import ConfigError, DataError
from penstock.loader import Loader, LoaderConfig
from penstock.loader.transforms import DecodeRaw, RandomHorizontalFlip, Resize, ToTensor
from penstock.loader.transforms.decoders import Decoders, Picture
from penstock.loader.transforms.jpeg import JpegHeader
from penstock.loader.transforms.memory import DecodeMemory, Need
from penstock.loader.transforms.sizes import read_size
from penstock.store import FlatFolder


class Buffers:
    """Of one thread: as large as the largest picture so far, until dropped."""

    def __init__(self) -> None:
        self.kept = Need(0, 0, 0)

    def drop(self) -> None:
        self.kept = Need(0, 0, 0)


def picture(nbytes: int) -> Need:
    return Need(nbytes, 0, 0)


def take(memory: DecodeMemory, buffers: Buffers, nbytes: int | None) -> threading.Event:
    """Take in a thread of its own, and return once it has or waits; the event says that it has."""
    has, has_or_waits = threading.Event(), threading.Event()
    wait = memory._changed.wait

    def note_and_wait() -> None:
        has_or_waits.set()
        wait()

    def run() -> None:
        memory.take(buffers, None if nbytes is None else picture(nbytes))
        has.set()
        has_or_waits.set()

    setattr(memory._changed, "wait", note_and_wait)  # noqa: B010 - mypy refuses the plain form
    threading.Thread(target=run).start()
    assert has_or_waits.wait(patient(20))
    return has


def test_a_picture_waits_until_there_is_memory_for_it() -> None:
    memory, first, second = DecodeMemory(100), Buffers(), Buffers()
    memory.take(first, picture(70))

    has = take(memory, second, 40)

    assert not has.is_set()
    memory.give_back(first)
    assert has.wait(patient(10))


def test_buffers_of_a_thread_that_decodes_nothing_are_dropped_for_one_that_waits() -> None:
    memory, idle, busy = DecodeMemory(100), Buffers(), Buffers()
    memory.take(idle, picture(70))
    idle.kept = picture(70)
    memory.give_back(idle)

    memory.take(busy, picture(40))

    assert idle.kept.total == 0


def test_a_large_picture_is_not_passed_by_small_ones_for_ever() -> None:
    memory, busy, large, small = DecodeMemory(100), Buffers(), Buffers(), Buffers()
    memory.take(busy, picture(30))
    has_large = take(memory, large, 80)

    has_small = take(memory, small, 10)

    assert not has_small.is_set(), "10 would fit, but 80 was there first"
    memory.give_back(busy)
    assert has_large.wait(patient(10))
    assert has_small.wait(patient(10))


def test_a_picture_of_unknown_size_is_decoded_alone() -> None:
    memory, busy, unknown = DecodeMemory(100), Buffers(), Buffers()
    memory.take(busy, picture(1))

    has = take(memory, unknown, None)

    assert not has.is_set()
    assert memory.alone == 1
    memory.give_back(busy)
    assert has.wait(patient(10))


def test_buffers_that_grew_after_a_picture_gave_its_memory_back_are_counted_at_its_end() -> None:
    """Behind a user's callable, which runs without a reservation, a picture may be resampled once more."""
    memory, first, second = DecodeMemory(100), Buffers(), Buffers()
    memory.take(first, picture(40))
    memory.give_back(first)
    first.kept = picture(70)
    memory.give_back(first)

    memory.take(second, picture(40))

    assert first.kept.total == 0, "its buffers were in the way"


def test_a_picture_that_can_never_fit_says_what_it_takes() -> None:
    with pytest.raises(DataError, match="takes 101 B, and memory= leaves 100 B for decoding: give more"):
        DecodeMemory(100).take(Buffers(), picture(101))


SCENE = np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8)


def encoded(kind: str, scene: np.ndarray = SCENE, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(scene).save(stream, kind, **options)
    return stream.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@for_each(
    "data",
    [
        pytest.param(encoded("PNG"), id="PNG"),
        pytest.param(encoded("BMP"), id="BMP"),
        pytest.param(encoded("WEBP"), id="WebP"),
        pytest.param(encoded("WEBP", lossless=True), id="lossless WebP"),
        pytest.param(encoded("GIF"), id="GIF"),
        pytest.param(encoded("PPM"), id="PPM"),
        pytest.param(encoded("PPM", SCENE[:, :, 0]), id="PGM"),
        pytest.param(
            encoded("PPM").replace(b"\n53 37\n", b"\n# 1 2\n53 # 3 4\n37\n"), id="PPM with comments"
        ),
        pytest.param(encoded("TIFF"), id="TIFF"),
        pytest.param(encoded("TIFF", compression="tiff_lzw"), id="compressed TIFF"),
        pytest.param(encoded("TIFF", big_endian=True), id="TIFF of another byte order"),
        pytest.param(encoded("TIFF", exif=turned(3)), id="TIFF upside down"),
        pytest.param(encoded("TIFF", exif=turned(6)), id="TIFF on its side"),
        pytest.param(encoded("TIFF", exif=turned(9)), id="TIFF of an orientation that there is not"),
        pytest.param(encoded("GIF", comment=600 * b"x"), id="GIF with a comment"),
        pytest.param(encoded("WEBP", np.dstack([SCENE, SCENE[:, :, :1]])), id="WebP with alpha"),
    ],
)
def test_the_size_of_other_formats_is_read_from_the_header_as_libraries_decode_it(data: bytes) -> None:
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    assert pixels is not None
    size = pixels.shape[:2]

    assert read_size(data) == size
    assert read_size(memoryview(data)) == size
    with Image.open(io.BytesIO(data)) as image:
        assert (image.height, image.width) == size
    assert all(read_size(data[:cut]) is None for cut in range(8))


def test_a_gif_file_whose_first_picture_exceeds_its_screen_is_decoded_by_pillow(tmp_path: Path) -> None:
    """Pillow enlarges the screen; the loader refused the file, as its header said another size."""
    data = bytearray(encoded("GIF", comment=600 * b"x"))
    data[6:10] = struct.pack("<HH", 10, 10)
    decoders = Decoders("pillow")
    decoders._has_opencv = False
    asked: list[Need | None] = []

    picture = Picture(bytes(data), decoders, asked.append)

    assert (picture.height, picture.width) == (37, 53)
    assert asked == [None], "its size is not known beforehand"


def test_a_header_that_makes_no_sense_tells_no_size() -> None:
    assert read_size(b"II*\0" + b"\xff" * 60) is None
    assert read_size(b"MM\0*" + bytes(60)) is None
    assert read_size(b"GIF89a" + bytes(20)) is None
    assert read_size(encoded("GIF")[:13]) == (37, 53), "decoding says that it is cut off"
    assert read_size(b"P6 0 0 255 ") is None
    assert read_size(b"P6 " + b"#" * 10_000) is None


def animated_webp() -> bytes:
    frames = [Image.fromarray(each) for each in (SCENE, 255 - SCENE)]
    stream = io.BytesIO()
    frames[0].save(stream, "WEBP", save_all=True, append_images=frames[1:])
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["TIFF", "JPEG2000", "animated WebP"])
def test_pictures_whose_size_nothing_says_are_decoded_alone_and_reported_once(
    tmp_path: Path, kind: str
) -> None:
    for number in range(4):
        data = animated_webp() if kind == "animated WebP" else encoded(kind)
        (tmp_path / f"{number}.png").write_bytes(data)
    lines: list[str] = []
    options: dict[str, Any] = {"batch_size": 2, "epochs": 2, "memory": "40 MB", "report": lines.append}

    with Loader(tmp_path, transforms=[Resize((8, 8)), ToTensor()], **options) as loader:
        for _ in range(2):
            assert sum(len(labels) for _, labels in loader) == 4

    clauses = ["one at a time, as nothing says beforehand how large they are" in line for line in lines[-2:]]
    assert clauses == [kind != "TIFF", False]


def test_callables_that_wait_for_each_other_do_not_wait_for_memory_as_well(tmp_path: Path) -> None:
    """There is memory for one picture at a time; a callable ran while its picture still had it."""
    write(tmp_path / "large", 1500, 2000, [])
    both, calls = threading.Barrier(2), itertools.count()

    def meet(picture: np.ndarray) -> np.ndarray:
        if next(calls) < 2:
            both.wait(patient(20))
        return picture

    options: dict[str, Any] = {"batch_size": 2, "epochs": 1, "memory": "72 MB", "decoders": 2, "report": None}
    with Loader(
        tmp_path / "large", transforms=[RandomHorizontalFlip(), meet, Resize((8, 8))], **options
    ) as loader:
        pipeline = loader._parts.setup.pipeline
        assert pipeline is not None
        one = pipeline.decode_bytes(1500, 2000, JpegHeader(1500, 2000, 3, 8, False, 16, True))
        assert loader.memory.decoding_bytes < 2 * one
        assert sum(len(labels) for _, labels in loader) == 6


SCRIPT = """
import sys
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.loader.transforms.compiled import KERNELS

def peak_bytes():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))

def run(folder, memory, epochs):
    with Loader(folder, batch_size=2, epochs=epochs, decoders=2, memory=memory, report=None,
                transforms=[Resize((64, 64), antialias=False), ToTensor()]) as loader:
        for _ in range(epochs):
            for _ in loader:
                pass
        return getattr(loader.memory, "decoding_bytes", 0)

run(sys.argv[1], 4_000_000, 1)
KERNELS["float32"].wait()  # machine code is the interpreter's own growth
before = peak_bytes()
decoding_bytes = run(sys.argv[2], int(sys.argv[3]), 2)
print(peak_bytes() - before, decoding_bytes)
"""


LIBRARIES = """
import io, sys
import numpy as np
from PIL import Image
from penstock.loader.transforms.decoders import Decoders

def peak_bytes(name):
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))

def encoded(scene, kind, **options):
    stream = io.BytesIO()
    Image.fromarray(scene).save(stream, kind, **options)
    return stream.getvalue()

decoders = Decoders("pillow")
decoders._has_opencv = sys.argv[1] == "opencv"
noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 4), np.uint8)
for kind, options in (
    ("WEBP", {"method": 0, "quality": 0}),
    ("WEBP", {"method": 0, "quality": 0, "lossless": True}),
    ("PNG", {"compress_level": 1}),
    ("BMP", {}),
    ("TIFF", {}),
):
    small, large = (encoded(each, kind, **options) for each in (noise[:8, :8], noise))
    decoders.decode_other(small)
    decoders._buffer.take(SIDE, SIDE).array[...] = 0
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = peak_bytes("VmRSS")
    decoders.decode_other(large)
    took, reserved = peak_bytes("VmHWM") - before, decoders.bytes_for_other(large, SIDE, SIDE)[1]
    print(kind, took / SIDE**2, reserved / SIDE**2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", ["opencv", "pillow"])
def test_no_library_takes_more_than_is_reserved(library: str) -> None:
    """For WebP, Pillow took 26 bytes a pixel, where 14 were reserved; OpenCV 8 instead of 5."""
    result = subprocess.run(
        [sys.executable, "-c", LIBRARIES.replace("SIDE", "1500"), library],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is given back
    )

    lines = result.stdout.splitlines()
    assert len(lines) == 5
    for line in lines:
        taken, reserved = map(float, line.split()[1:])
        assert 3 <= taken <= reserved, line


def write(folder: Path, height: int, width: int, parameters: list[int]) -> None:
    folder.mkdir()
    scene = cv2.resize(np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8), (width, height))
    for number in range(6):
        cv2.imwrite(str(folder / f"{number}.jpg"), np.roll(scene, number, axis=0), parameters)


@pytest.mark.parametrize(
    ("kind", "given_mb", "least_mb"),
    [
        # A picture of 4000 x 3000 pixels takes 36 MB, and a fourth of that to spare: there is no space for two.
        pytest.param("baseline", 100, 45, marks=pytest.mark.slow),
        # Its coefficients take as much again: 4000 x 3000 of brightness and half of that of colour, 2 bytes each.
        pytest.param("progressive", 190, 81, marks=pytest.mark.slow),
    ],
)
def test_pictures_of_twelve_megapixels_are_decoded_within_the_memory(
    tmp_path: Path, kind: str, given_mb: int, least_mb: int
) -> None:
    """Threads had buffers of their own, uncounted: with memory="30 MB" two of them took 122 MB more."""
    parameters = [cv2.IMWRITE_JPEG_PROGRESSIVE, int(kind == "progressive")]
    write(tmp_path / "small", 64, 64, parameters)
    write(tmp_path / "large", 3000, 4000, parameters)

    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "small", tmp_path / "large", str(given_mb * 10**6)],
        capture_output=True,
        text=True,
        check=True,
    )

    more_bytes, decoding_bytes = map(int, result.stdout.split())
    assert least_mb * 10**6 <= decoding_bytes <= given_mb * 10**6
    # Not for stacks of threads, and what the interpreter and the allocator keep.
    assert more_bytes < (given_mb + 14) * 10**6


def test_memory_for_less_than_one_picture_is_refused_with_what_it_takes(tmp_path: Path) -> None:
    write(tmp_path / "large", 1500, 2000, [])
    transforms = [Resize((64, 64), antialias=False), ToTensor()]

    with pytest.raises(
        ConfigError, match=r"a picture of 13.* MB while it is decoded need 15.* MB: give more"
    ):
        Loader(tmp_path / "large", batch_size=2, epochs=1, memory="4 MB", report=None, transforms=transforms)


def test_a_picture_much_larger_than_the_first_is_named(tmp_path: Path) -> None:
    write(tmp_path / "some", 64, 64, [])
    cv2.imwrite(str(tmp_path / "some" / "large.jpg"), np.zeros((1500, 2000, 3), np.uint8))
    transforms = [Resize((64, 64), antialias=False), ToTensor()]
    options: dict[str, Any] = {"batch_size": 2, "epochs": 1, "memory": "5 MB", "report": None}

    with (
        Loader(tmp_path / "some", shuffle=False, transforms=transforms, **options) as loader,
        pytest.raises(DataError, match=r"large.jpg: to decode the picture takes 11.* MB, and memory= leaves"),
    ):
        for _ in loader:
            pass


def test_no_memory_is_set_aside_for_pictures_where_samples_are_none(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.raw").write_bytes(bytes(48))
    source = FlatFolder(tmp_path, extensions=None)

    config = LoaderConfig(source, batch_size=2, epochs=1, transforms=[DecodeRaw("uint8")], dtype="uint8")
    with Loader(config, report=None) as loader:
        assert len(list(loader)) == 2
        assert loader.memory.decoding_bytes == 0
        assert not any("pictures" in line for line in loader.start_lines)


def test_a_blank_picture_says_little_of_how_large_the_others_are(tmp_path: Path) -> None:
    """It has hundreds of pixels to a byte: files a hundred times as large were taken for gigabytes of pixels."""
    folder = tmp_path / "some"
    folder.mkdir()
    cv2.imwrite(str(folder / "0.png"), np.full((1000, 1000, 3), 255, np.uint8))
    noise = np.random.default_rng(0).integers(0, 256, (500, 500, 3), np.uint8)
    for number in range(1, 4):
        cv2.imwrite(str(folder / f"{number}.png"), noise)
    options: dict[str, Any] = {
        "batch_size": 2,
        "epochs": 1,
        "memory": "40 MB",
        "report": None,
        "shuffle": False,
    }

    with Loader(folder, transforms=[Resize((64, 64)), ToTensor()], **options) as loader:
        assert sum(len(labels) for _, labels in loader) == 4
