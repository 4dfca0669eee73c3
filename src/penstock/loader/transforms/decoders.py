"""From the bytes of an image file to RGB pixels: which library decodes what.

JPEG: libjpeg-turbo 3 by region, else simplejpeg, else OpenCV, else Pillow; all contain the same decoder
core and give the same pixels. JPEG in CMYK: Pillow. Other formats: OpenCV, else Pillow. The orientation in
the Exif part is ignored, as Pillow and torchvision do by default. Alpha is dropped, of 16 bits
the upper eight are kept. Reasons and measurements: docs/decisions/0004-image-decoder.md.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.loader.transforms.geometry import EDGE_COLUMNS, Box
from penstock.loader.transforms.jpeg import Encoded, JpegHeader, is_for_turbojpeg, is_jpeg, read_header
from penstock.loader.transforms.memory import Need
from penstock.loader.transforms.pixels import Buffer, Pixels, undecodable
from penstock.loader.transforms.sizes import is_tiff, is_webp, read_size
from penstock.loader.transforms.turbojpeg import TurboJpeg, find_library

#: In the order of preference.
JPEG_DECODERS = ("turbojpeg", "simplejpeg", "opencv", "pillow")
_DISTRIBUTIONS = ("turbojpeg", "simplejpeg", "opencv-python-headless", "opencv-python", "pillow")

#: Bytes that a library takes for a pixel of a whole picture, besides our buffer: its picture of three or four channels,
#: and copies of it; of a TIFF file, as much again as it stores, up to 8 bytes, if that is not compressed. Measured:
#: tests/loader/test_decode_memory.py, and 6.4 for a TIFF file of 8 bits, 4.7 for a GIF file, 3.5 and less for others.
#: WebP files take more: OpenCV 8, Pillow 22 and a copy of the file, which has up to 4 where it is lossless.
_OPENCV, _OPENCV_TIFF, _OPENCV_WEBP, _PILLOW, _PILLOW_WEBP = 7, 15, 9, 15, 27


class Picture:
    """An image file whose size is known and whose pixels are decoded when asked for."""

    __slots__ = ("_decoders", "_header", "_is_unseen", "_pixels", "_source", "height", "width")

    def __init__(
        self, data: Encoded, decoders: Decoders, reserve: Callable[[None], None] = lambda need: None
    ) -> None:
        """reserve: called before anything is decoded whose size no header says.

        Raises: DataError if data is empty or no image.
        """
        self._decoders = decoders
        self._source = data
        self._header: JpegHeader | None = None
        self._pixels: Pixels | None = None
        #: Whether the size is the header's word and no pixel has been decoded.
        self._is_unseen = False
        if len(data) == 0:
            raise DataError("the file is empty (0 bytes)")
        if is_jpeg(data):
            self._header = read_header(data)
            self.height, self.width = self._header.height, self._header.width
        elif (size := read_size(data)) is not None:
            self._is_unseen = True
            self.height, self.width = size
        else:
            reserve(None)
            self._pixels = decoders.decode_other(data)
            self.height, self.width = self._pixels.rows, self._pixels.columns

    def decode(self, box: Box, shrink: int) -> Pixels:
        """Return the pixels of at least `box`, at 1/shrink of the stored size where the format offers that.

        They are valid until the next picture of the thread is decoded.
        Raises: DataError if the file is damaged.
        """
        if self._is_unseen:
            self._pixels = pixels = self._decoders.decode_other(self._source)
            self._is_unseen = False
            if (pixels.rows, pixels.columns) != (self.height, self.width):
                raise DataError(
                    f"the picture was decoded to {pixels.columns} x {pixels.rows} pixels, and its header says "
                    f"{self.width} x {self.height}"
                )
        if self._header is None:
            assert self._pixels is not None, "a picture without a header was decoded when it was opened"
            return self._pixels
        return self._decoders.decode_jpeg(self._source, self._header, box, shrink)

    @classmethod
    def imagined(cls, height: int, width: int, like: JpegHeader | bytes, decoders: Decoders) -> Picture:
        """Return a picture without data, to ask what it would need: a JPEG like another one, or what a file of another
        format begins with."""
        picture = cls.__new__(cls)
        picture._decoders, picture._source, picture._pixels = decoders, b"", None
        picture._header, picture._is_unseen = None, False
        if isinstance(like, bytes):
            picture._source, picture._is_unseen = like, True
        else:
            scale = height * width / (like.height * like.width)
            picture._header = like._replace(
                height=height, width=width, coefficient_bytes=int(scale * like.coefficient_bytes)
            )
        picture.height, picture.width = height, width
        return picture

    def need(self, box: Box, shrink: int) -> Need | None:
        """Return what `decode` of the same takes; None if it has been decoded."""
        if self._header is not None:
            pixels, passing = self._decoders.bytes_for_jpeg(self._header, box, shrink)
        elif self._is_unseen:
            pixels, passing = self._decoders.bytes_for_other(self._source, self.height, self.width)
        else:
            return None
        return Need(pixels, 0, passing + len(self._source))  # the thread may have read it itself


class Decoders:
    """The decoding libraries of one thread, with its buffers."""

    def __init__(self, jpeg: str | None = None) -> None:
        """jpeg: one of JPEG_DECODERS, the first that is installed when None."""
        self.jpeg = choose_decoder() if jpeg is None else jpeg
        self.buffer = self._buffer = Buffer()
        self._has_opencv = importlib.util.find_spec("cv2") is not None
        #: libjpeg-turbo, if that is the decoder, and the handle to call it with.
        self.turbo: TurboJpeg | None = None
        self.handle = 0
        if self.jpeg == "turbojpeg":
            path = find_library()
            if path is None:
                raise ConfigError("the JPEG decoder turbojpeg is not installed: pip install turbojpeg")
            self.turbo = TurboJpeg(path)
            self.handle = self.turbo.new_handle(self)

    def decode_jpeg(self, data: Encoded, header: JpegHeader, box: Box, shrink: int) -> Pixels:
        if not is_for_turbojpeg(header):
            return self._buffer.hold(_decode_pillow(data, 1))
        if self.turbo is not None:
            return self.turbo.decode(self.handle, data, header, box, shrink, self._buffer)
        pixels = _WHOLE_DECODERS[self.jpeg](data, shrink)
        expected = (-(-header.height // shrink), -(-header.width // shrink), 3)
        if pixels.shape != expected:
            raise DataError(f"the JPEG was decoded to {pixels.shape}, and its header says {expected}")
        return self._buffer.hold(pixels)._replace(shrink=shrink)

    def bytes_for_jpeg(self, header: JpegHeader, box: Box, shrink: int) -> tuple[int, int]:
        """Return what `decode_jpeg` takes at most: in the buffer, and in passing."""
        rows, columns = -(-header.height // shrink), -(-header.width // shrink)
        if not is_for_turbojpeg(header):
            return Buffer.bytes_for(header.height, header.width), _PILLOW * header.height * header.width
        passing = header.coefficient_bytes
        if self.turbo is None:
            passing += (3 if self.jpeg != "pillow" else _PILLOW) * rows * columns
        elif header.has_end:
            rows = min(rows, box.height // shrink + 2)
            columns = min(columns, box.width // shrink + 2 + header.unit_columns + 2 * EDGE_COLUMNS)
        return Buffer.bytes_for(rows, columns), passing

    def bytes_for_other(self, data: Encoded, height: int, width: int) -> tuple[int, int]:
        """Return what `decode_other` takes at most: in the buffer, and in passing."""
        if is_webp(data):
            per_pixel = _OPENCV_WEBP if self._has_opencv else _PILLOW_WEBP
        elif self._has_opencv:
            per_pixel = _OPENCV_TIFF if is_tiff(data) else _OPENCV
        else:
            per_pixel = _PILLOW
        return Buffer.bytes_for(height, width), per_pixel * height * width

    def decode_other(self, data: Encoded) -> Pixels:
        """Decode anything but JPEG, whole."""
        return self._buffer.hold(_decode_opencv(data, 1) if self._has_opencv else _decode_pillow(data, 1))


def decoder_versions() -> dict[str, str]:
    """Return the version of each decoding library that is installed, by the name that pip has for it."""
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def choose_decoder() -> str:
    """Return the best JPEG decoder that is installed.

    Raises: ConfigError if there is none.
    """
    if find_library() is not None:
        return "turbojpeg"
    for name, module in (("simplejpeg", "simplejpeg"), ("opencv", "cv2"), ("pillow", "PIL")):
        if importlib.util.find_spec(module) is not None:
            return name
    raise ConfigError("no image decoder is installed: pip install 'penstock[images]'")


def _decode_simplejpeg(data: Encoded, shrink: int) -> NDArray[np.uint8]:
    simplejpeg = importlib.import_module("simplejpeg")
    header = read_header(data)
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data,
            "RGB",
            fastdct=False,
            fastupsample=False,
            min_height=-(-header.height // shrink),
            min_width=-(-header.width // shrink),
        )
    except ValueError as error:
        raise undecodable(f"the JPEG cannot be decoded in full: {error}") from error
    return pixels


def _decode_opencv(data: Encoded, shrink: int) -> NDArray[np.uint8]:
    cv2: Any = importlib.import_module("cv2")
    reduced = {
        1: cv2.IMREAD_COLOR_RGB,
        2: cv2.IMREAD_REDUCED_COLOR_2,
        4: cv2.IMREAD_REDUCED_COLOR_4,
        8: cv2.IMREAD_REDUCED_COLOR_8,
    }
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), reduced[shrink] | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise undecodable(f"OpenCV cannot decode the image: {error.err}") from error
    if pixels is None:
        start = bytes(data[:8])
        raise undecodable(
            f"not an image that OpenCV can decode: {len(data):,} bytes beginning with {start!r}"
        )
    result: NDArray[np.uint8] = pixels if shrink == 1 else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    return result


def _decode_pillow(data: Encoded, shrink: int) -> NDArray[np.uint8]:
    if importlib.util.find_spec("PIL") is None:
        raise DataError("this kind of image (CMYK or not JPEG) is decoded by Pillow: pip install pillow")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            if shrink > 1:
                image.draft("RGB", (image.width // shrink, image.height // shrink))
            if image.mode.startswith("I;16") or image.mode == "I":
                upper = np.asarray(image).astype(np.uint32) >> 8
                return np.repeat(upper.astype(np.uint8)[:, :, None], 3, axis=2)
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError as error:
        start = bytes(data[:8])
        raise undecodable(
            f"not an image that Pillow can decode: {len(data):,} bytes beginning with {start!r}"
        ) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise undecodable(f"Pillow cannot decode the image: {error}") from error


_WHOLE_DECODERS: dict[str, Callable[[Encoded, int], NDArray[np.uint8]]] = {
    "simplejpeg": _decode_simplejpeg,
    "opencv": _decode_opencv,
    "pillow": _decode_pillow,
}
