"""libjpeg-turbo 3 through ctypes: the region of a JPEG that a crop needs, into a buffer of ours.

The shared library comes with the wheel `turbojpeg`, whose own Python functions are not used. ctypes lets go
of the GIL while the library decodes; short calls keep it (`PyDLL`), since taking it back costs more.

Source: https://github.com/libjpeg-turbo/libjpeg-turbo, src/turbojpeg.h (API of 3.0).
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import weakref
from pathlib import Path

import numpy as np

from penstock.loader.transforms.geometry import Box, region_of
from penstock.loader.transforms.jpeg import Encoded, JpegHeader
from penstock.loader.transforms.pixels import Buffer, Pixels, undecodable

_TJINIT_DECOMPRESS = 1
#: Red, green and blue, a byte each.
RGB = 0
_TJERR_WARNING = 0
#: Warnings after which all pixels are still there. After any other, some are not.
_HARMLESS_WARNINGS = ("extraneous bytes", "unknown JFIF revision", "Invalid SOS parameters", "unknown Adobe")


#: Processors whose calls pass a structure of two or four ints in one or two words, as a compiled loop passes it.
BY_ADDRESS = platform.machine() in ("x86_64", "aarch64")


class _Region(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class _Fraction(ctypes.Structure):
    _fields_ = (("num", ctypes.c_int), ("denom", ctypes.c_int))


def find_library() -> Path | None:
    """Return the path of libjpeg-turbo 3 in the installed wheel `turbojpeg`; None where there is none."""
    specification = importlib.util.find_spec("turbojpeg")
    if specification is None or specification.origin is None:
        return None
    libraries = Path(specification.origin).parent / "turbojpeg.libs"
    return next(iter(sorted(libraries.glob("libturbojpeg-*.so*"))), None)


class TurboJpeg:
    """The library, loaded. `decode` is called by one thread at a time for each handle."""

    def __init__(self, path: Path) -> None:
        slow, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._init = quick.tj3Init
        self._init.argtypes, self._init.restype = (integer,), pointer
        self._destroy = quick.tj3Destroy
        self._destroy.argtypes, self._destroy.restype = (pointer,), None
        self._read_header = quick.tj3DecompressHeader
        self._read_header.argtypes = (pointer, pointer, size)
        self._set_region = quick.tj3SetCroppingRegion
        self._set_region.argtypes = (pointer, _Region)
        self._set_scale = quick.tj3SetScalingFactor
        self._set_scale.argtypes = (pointer, _Fraction)
        self._decode = slow.tj3Decompress8
        self._decode.argtypes = (pointer, pointer, size, pointer, integer, integer)
        self._error_text = quick.tj3GetErrorStr
        self._error_text.argtypes, self._error_text.restype = (pointer,), ctypes.c_char_p
        self._error_code = quick.tj3GetErrorCode
        self._error_code.argtypes = (pointer,)
        #: int64[4], addresses of the functions that a compiled loop calls: header, scale, region, decoding.
        self.addresses = np.array(
            [
                ctypes.cast(function, pointer).value
                for function in (self._read_header, self._set_scale, self._set_region, self._decode)
            ],
            np.int64,
        )
        self._scales = {shrink: _Fraction(1, shrink) for shrink in (1, 2, 4, 8)}
        self._whole = _Region(0, 0, 0, 0)

    def new_handle(self, owner: object) -> int:
        """Return a handle, destroyed with its owner."""
        handle = self._init(_TJINIT_DECOMPRESS)
        if handle is None:
            raise MemoryError("libjpeg-turbo could not allocate a decompressor")
        weakref.finalize(owner, self._destroy, handle)
        return int(handle)

    def decode(
        self, handle: int, data: Encoded, header: JpegHeader, box: Box, shrink: int, buffer: Buffer
    ) -> Pixels:
        """Decode at least `box` (in pixels of the stored picture) at 1/shrink of the stored size.

        Returns: pixels in the buffer; within `box`, they are those of decoding the whole picture.
        Raises: DataError if the library finds the data damaged or cut off.
        """
        size = len(data)
        source = data if isinstance(data, bytes) else np.frombuffer(data, np.uint8).ctypes.data
        if self._read_header(handle, source, size) != 0:
            try:
                self._check(handle)
            finally:
                # An error leaves the handle in the middle of this file: it would read the next one from there on. This
                # call refuses its arguments, and begins anew.
                self._decode(handle, None, 0, None, 0, RGB)
        self._set_scale(handle, self._scales[shrink])
        rows, columns = -(-header.height // shrink), -(-header.width // shrink)
        top, left = 0, 0
        if header.has_end:
            region = region_of(box, shrink, rows, columns, header.unit_columns)
            if self._set_region(handle, _Region(region.left, region.top, region.width, region.height)) == 0:
                top, left, rows, columns = region
            else:  # a subsampling that the region interface has no name for
                self._set_region(handle, self._whole)
        else:
            self._set_region(handle, self._whole)
        pixels = buffer.take(rows, columns)
        if self._decode(handle, source, size, pixels.storage.ctypes.data, 0, RGB) != 0:
            self._check(handle)
        return pixels._replace(top=top, left=left, shrink=shrink)

    def _check(self, handle: int) -> None:
        text = self._error_text(handle).decode(errors="replace")
        if self._error_code(handle) == _TJERR_WARNING and any(part in text for part in _HARMLESS_WARNINGS):
            return
        raise undecodable(f"the JPEG cannot be decoded in full: {text}")
