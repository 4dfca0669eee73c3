"""From file bytes to pixels: regions, fallbacks, odd formats, damaged files."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image
from tests.for_each import for_each

from penstock.errors import ConfigError, DataError
from penstock.loader.transforms.decoders import JPEG_DECODERS, Decoders, Picture, choose_decoder
from penstock.loader.transforms.geometry import Box
from penstock.loader.transforms.jpeg import read_header


def scene(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """A picture with edges, gradients and noise in all colours, so that chroma matters everywhere."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / a + y / b) for a, b in rng.uniform(2, 30, (3, 2))]
    noise = rng.normal(0, 25, (height, width, 3))
    return np.clip(128 + 80 * np.stack(waves, axis=2) + noise, 0, 255).astype(np.uint8)


def encode(picture: NDArray[np.uint8], kind: str = "JPEG", **options: Any) -> bytes:
    image, stream = Image.fromarray(picture), io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def whole(
    data: bytes, decoder: str | None = None, shrink: int = 1, has_opencv: bool = True
) -> NDArray[np.uint8]:
    decoders = Decoders(decoder)
    decoders._has_opencv = has_opencv
    picture = Picture(data, decoders)
    pixels = picture.decode(Box(0, 0, picture.height, picture.width), shrink)
    assert (pixels.top, pixels.left) == (0, 0)
    return pixels.array.copy()


def pillow(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@for_each("shrink", [1, 2, 4, 8])
@for_each("subsampling", ["444", "422", "420", "440", "411", "Gray", "progressive"])
def test_a_region_has_the_pixels_of_the_whole_picture(subsampling: str, shrink: int) -> None:
    """Smooth upsampling looks beyond a region's edge; the region must not show it."""
    rng = np.random.default_rng(3)
    for height, width in [(97, 131), (203, 177), (64, 64), (17, 300)]:
        picture = scene(height, width)
        if subsampling == "progressive":
            data = encode(picture, progressive=True, quality=85)
        elif subsampling == "Gray":
            data = simplejpeg.encode_jpeg(picture[:, :, :1].copy(), 85, "GRAY", "Gray")
        else:
            data = simplejpeg.encode_jpeg(picture, 85, "RGB", subsampling)
        full = whole(data, "simplejpeg", shrink)
        jpeg = Picture(data, Decoders("turbojpeg"))
        for _ in range(8):
            top, left = rng.integers(0, height), rng.integers(0, width)
            box = Box(
                int(top),
                int(left),
                int(rng.integers(1, height - top + 1)),
                int(rng.integers(1, width - left + 1)),
            )

            pixels = jpeg.decode(box, shrink)

            first_row, first_column = box.top // shrink, box.left // shrink
            end_row = -(-(box.top + box.height) // shrink)
            end_column = -(-(box.left + box.width) // shrink)
            assert pixels.top <= first_row
            assert pixels.left <= first_column
            got = pixels.array[first_row - pixels.top :, first_column - pixels.left :]
            expected = full[first_row:end_row, first_column:end_column]
            assert np.array_equal(got[: expected.shape[0], : expected.shape[1]], expected)


@for_each("shrink", [1, 2, 4, 8])
@for_each("decoder", JPEG_DECODERS[1:])
def test_the_fallback_decoders_give_equal_pixels(decoder: str, shrink: int) -> None:
    for subsampling in ("444", "422", "420", "440"):
        data = simplejpeg.encode_jpeg(scene(97, 131), 90, "RGB", subsampling)
        assert np.array_equal(whole(data, decoder, shrink), whole(data, "turbojpeg", shrink))


def test_the_first_installed_decoder_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: set[str] = set()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name)
    )
    for decoder, module in zip(JPEG_DECODERS, ("turbojpeg", "simplejpeg", "cv2", "PIL"), strict=True):
        assert choose_decoder() == decoder
        missing.add(module)
    with pytest.raises(ConfigError, match="pip install 'penstock\\[images\\]'"):
        choose_decoder()


@for_each("decoder", JPEG_DECODERS)
def test_exif_orientation_is_ignored_as_pillow_does(decoder: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter
    data = encode(scene(40, 60), exif=exif)
    assert np.array_equal(whole(data, decoder), pillow(data))


@for_each("decoder", JPEG_DECODERS)
def test_a_grey_jpeg_becomes_three_equal_channels(decoder: str) -> None:
    data = encode(scene(40, 60)[:, :, 0])
    pixels = whole(data, decoder)
    assert np.array_equal(pixels, pillow(data))
    assert np.array_equal(pixels[:, :, 0], pixels[:, :, 2])


@for_each("decoder", JPEG_DECODERS)
def test_a_cmyk_jpeg_is_converted_as_pillow_does(decoder: str) -> None:
    stream = io.BytesIO()
    Image.fromarray(scene(40, 60)).convert("CMYK").save(stream, "JPEG", quality=90)
    data = stream.getvalue()
    assert read_header(data).components == 4
    assert np.array_equal(whole(data, decoder), pillow(data))


def with_alpha() -> Image.Image:
    alpha = np.random.default_rng(1).integers(0, 256, (40, 60, 1), dtype=np.uint8)
    return Image.fromarray(np.concatenate([scene(40, 60), alpha], axis=2))


@for_each("has_opencv", [True, False])
@for_each(
    ("image", "kind"),
    [
        (Image.fromarray(scene(40, 60)), "PNG"),
        (Image.fromarray(scene(40, 60)[:, :, 0]), "PNG"),
        (with_alpha(), "PNG"),
        (with_alpha().convert("LA"), "PNG"),
        (Image.fromarray(scene(40, 60)).quantize(50), "PNG"),
        (Image.fromarray(scene(40, 60)).convert("1"), "PNG"),
        (Image.fromarray(scene(40, 60)), "BMP"),
        (Image.fromarray(scene(40, 60)), "WEBP"),
        (Image.fromarray(scene(40, 60)), "TIFF"),
        (Image.fromarray(scene(40, 60)), "PPM"),
    ],
    ids=["rgb", "grey", "alpha", "grey-alpha", "palette", "bilevel", "bmp", "webp", "tiff", "ppm"],
)
def test_other_formats_become_rgb_as_pillow_converts_them(image: Any, kind: str, has_opencv: bool) -> None:
    stream = io.BytesIO()
    image.save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}))
    expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(whole(stream.getvalue(), has_opencv=has_opencv), expected)


@for_each("has_opencv", [True, False])
@for_each("channels", [1, 3])
def test_of_sixteen_bits_the_upper_eight_are_kept(channels: int, has_opencv: bool) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (30, 20, channels), dtype=np.uint16)
    _, encoded = cv2.imencode(".png", values)  # OpenCV writes blue, green, red
    expected = np.broadcast_to((values >> 8).astype(np.uint8)[:, :, ::-1], (30, 20, 3))
    assert np.array_equal(whole(encoded.tobytes(), has_opencv=has_opencv), expected)


JPEG = encode(scene(120, 160), quality=90)
PNG = encode(scene(120, 160), "PNG")


@for_each("has_opencv", [True, False])
@for_each(
    ("data", "text"),
    [
        (b"", r"the file is empty \(0 bytes\)"),
        (b"\x00" * 500, "not an image"),
        (b"hello, this is a text file\n" * 9, "not an image"),
        (b"<html><body>404 Not Found</body></html>", "not an image"),
        (b"\xff\xd8", "truncated JPEG: its 2 bytes end within the header"),
        (JPEG[:100], "truncated JPEG: its 100 bytes end within the header"),
        (b"\xff\xd8\x00\x00rubbish", "truncated JPEG"),
        (PNG[:20], "decode"),
    ],
    ids=["empty", "zeros", "text", "html", "start", "header", "rubbish", "png"],
)
def test_what_is_no_image_says_so(data: bytes, text: str, has_opencv: bool) -> None:
    with pytest.raises(DataError, match=text):
        whole(data, has_opencv=has_opencv)


@for_each("keep", [0.3, 0.9, 0.999])
@for_each("options", [{}, {"progressive": True}])
def test_a_truncated_jpeg_is_an_error_whatever_the_crop(options: dict[str, Any], keep: float) -> None:
    """Even where the crop lies in the part that is there: the same file fails in every epoch."""
    data = encode(scene(120, 160), quality=90, **options)
    picture = Picture(data[: int(keep * len(data))], Decoders("turbojpeg"))
    for box in (Box(0, 0, 120, 160), Box(0, 0, 8, 8), Box(100, 100, 20, 20)):
        with pytest.raises(DataError, match=r"cannot be decoded in full: .*; write it again, or take"):
            picture.decode(box, 1)


@pytest.mark.parametrize("behind", [2, 30, 49])
def test_a_picture_behind_a_damaged_one_is_decoded_as_if_that_had_not_been(behind: int) -> None:
    """Its thread's decoder is the same. Cut off within its tables, or within the header of its scan."""
    damaged = encode(scene(20, 20), progressive=True)
    damaged = damaged[: damaged.index(b"\xff\xc4") + behind]
    decoders = Decoders()
    with pytest.raises(DataError, match="cannot be decoded in full"):
        Picture(damaged, decoders).decode(Box(0, 0, 20, 20), 1)

    picture = Picture(JPEG, decoders)

    pixels = picture.decode(Box(0, 0, picture.height, picture.width), 1)
    assert np.array_equal(pixels.array, whole(JPEG))


def test_a_damaged_header_that_claims_a_huge_picture_is_not_believed() -> None:
    """Otherwise the decoder fills twelve gigabytes with grey."""
    frame = JPEG.index(b"\xff\xc0")
    data = JPEG[: frame + 5] + b"\xff\xff\xff\xff" + JPEG[frame + 9 :]
    with pytest.raises(DataError, match="cannot hold the 65535 x 65535 pixels it claims"):
        read_header(data)
    flat = encode(np.full((4000, 4000, 3), 90, np.uint8), quality=30, optimize=True)
    assert read_header(flat).height == 4000


def test_a_jpeg_with_rubbish_behind_its_end_is_decoded() -> None:
    assert np.array_equal(whole(JPEG + b"\x00" * 700, "turbojpeg"), whole(JPEG, "turbojpeg"))


def test_flipped_bytes_give_a_picture_or_a_clear_error_but_never_a_crash() -> None:
    rng = np.random.default_rng(5)
    decoders = Decoders("turbojpeg")
    outcomes = set()
    for _ in range(300):
        data = bytearray(JPEG)
        for place in rng.integers(0, len(data), 3):
            data[place] = int(rng.integers(0, 256))
        try:
            picture = Picture(bytes(data), decoders)
            if picture.height * picture.width < 1 << 22:
                picture.decode(Box(0, 0, picture.height, picture.width), 1)
            outcomes.add("picture")
        except DataError:
            outcomes.add("error")
    assert outcomes == {"picture", "error"}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_like_object_is_read(kind: type) -> None:
    assert np.array_equal(whole(kind(JPEG), "turbojpeg"), whole(JPEG, "turbojpeg"))
    assert np.array_equal(whole(kind(PNG)), whole(PNG))


def test_bytes_that_belong_to_no_segment_are_skipped_as_every_decoder_does() -> None:
    _, encoded = cv2.imencode(".jpg", np.full((40, 60, 3), 100, np.uint8))
    data = encoded.tobytes()
    end_of_first = 4 + (data[4] << 8 | data[5])
    littered = data[:end_of_first] + b"\x00\x01\x02" + data[end_of_first:]

    header = read_header(littered)

    assert (header.height, header.width) == (40, 60)
    assert cv2.imdecode(np.frombuffer(littered, np.uint8), cv2.IMREAD_COLOR) is not None
