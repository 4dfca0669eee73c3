"""What moves pixels: compiled kernels, or the same in NumPy until they are compiled."""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.compiling import Part
from penstock.loader.transforms import plain
from penstock.machine_code import Signature

_AXIS = ("float64", "float64", "int64", "int64", "int64", "int64", "boolean")


def _signature(out: str, *parameters: str) -> Signature:
    before = ("uint8[:]", "int64", "int64", _AXIS, _AXIS, "boolean", "int64", "uint8[:]")
    return Signature((*before, *parameters, f"{out}[:, :, :]", "boolean"))


#: By what they write: float32, the uint16 that a table holds for each byte, or the bytes.
SIGNATURES = {
    "float32": _signature("float32", "float32[:]", "float32[:]"),
    "table": _signature("uint16", "uint16[:, :]"),
    "uint8": _signature("uint8"),
}
KERNELS = {
    name: Part(
        "penstock.loader.transforms.kernels",
        name,
        signature,
        f"how pictures are resampled ({name})",
        "NumPy does it, more slowly,",
    )
    for name, signature in SIGNATURES.items()
}


def resampler(name: str) -> Callable[..., None]:
    """Return the function that writes resampled pixels; see `kernels.resample_to_float32` and its sisters.

    name: one of KERNELS.
    """
    return KERNELS[name].ask() or getattr(plain, f"resample_to_{name}")


#: Each of the eight parts of the scratch begins at a cache line.
SPARE_BYTES = 8 * 64


def most_taps(across: float, down: float) -> int:
    """Return how many pixels of one axis make up a pixel of the result at most, where it is so much smaller."""
    return max(math.ceil(max(across, down)) * 2 + 1, 4)


def scratch_bytes(columns: int, rows: int, source_rows: int, taps: int) -> int:
    """Return the scratch of the kernels, for a result of so many columns and rows from so many rows of the source."""
    weights = 8 * taps + 4 * (columns + rows) * (1 + taps)
    return weights + 20 * columns + 4 * columns * (source_rows + taps) + SPARE_BYTES
