"""What moves pixels: compiled kernels, or the same in NumPy until they are compiled."""

from __future__ import annotations

from collections.abc import Callable

from penstock.compiling import Part
from penstock.loader.transforms import plain

#: By what they write: float32, the uint16 that a table holds for each byte, or the bytes.
KERNELS = {
    name: Part(
        "penstock.loader.transforms.kernels",
        name,
        f"how pictures are resampled ({name})",
        "NumPy does it, more slowly,",
        loads_aside=True,
    )
    for name in ("float32", "table", "uint8")
}


def resampler(name: str) -> Callable[..., None]:
    """Return the function that writes resampled pixels; see `kernels.resample_to_float32` and its sisters.

    name: one of KERNELS.
    """
    resample: Callable[..., None] = getattr(KERNELS[name].ask() or plain, f"resample_to_{name}")
    return resample
