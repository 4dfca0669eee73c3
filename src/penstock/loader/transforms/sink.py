"""The last pass: pixels and a geometry become numbers in the form that the batch slot has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.loader.transforms.compiled import CROP_KERNELS, GROUP_KERNELS, KERNELS, resampler
from penstock.loader.transforms.geometry import Geometry, axes_of, most_taps, scratch_bytes
from penstock.loader.transforms.pixels import Pixels
from penstock.loader.transforms.steps import Normalize, ToTensor
from penstock.machine_code import Loop

#: How an image's number formats are stored in the slot; NumPy has no bfloat16, so its bits are.
IMAGE_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
}


def encode_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16 (ties to even) and return its bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def decode_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the numbers that bits of bfloat16 stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def combine(steps: Sequence[ToTensor | Normalize]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scale and bias, float64[3] each, that do the steps at once."""
    scale, bias = np.ones(3), np.zeros(3)
    for step in steps:
        if isinstance(step, ToTensor):
            scale = scale / 255
        else:
            mean, std = np.array(step.mean), np.array(step.std)
            scale, bias = scale / std, (bias - mean) / std
    return scale, bias


@dataclass(frozen=True, slots=True)
class ByteValues:
    """What each byte of a channel becomes by the last steps: the numbers that a `Sink` writes, bit for bit.

    numbers: [3, 256], float32, or uint16 of the bits of a 16-bit float. dtype: their name. channels_last: of a batch.
    """

    numbers: NDArray[Any]
    dtype: str
    channels_last: bool


class Sink:
    """Writes resampled pixels as one number format and layout.

    A float32 result is byte * scale + bias in single precision: within 1e-6 of dividing by 255, subtracting
    and dividing by std one after the other. 16-bit results are that value in double precision, rounded once.
    """

    def __init__(
        self,
        dtype: str,
        layout: str,
        steps: Sequence[ToTensor | Normalize] = (),
    ) -> None:
        self.dtype, self._channels_last = dtype, layout == "NHWC"
        scale, bias = combine(steps)
        #: What the slot is seen as, where its type is not that of the numbers.
        self.view: type[np.generic] | None = None
        self._parameters: tuple[NDArray[np.generic], ...]
        if dtype == "float32":
            self._item = "float32"
            self._parameters = (scale.astype(np.float32), bias.astype(np.float32))
        elif dtype == "uint8":
            self._item = "uint8"
            self._parameters = ()
        else:
            self._item = "table"
            values = np.arange(256) * scale[:, None] + bias[:, None]
            self.view = np.uint16
            if dtype == "float16":
                self._parameters = (values.astype(np.float16).view(np.uint16),)
            else:
                self._parameters = (encode_bfloat16(values.astype(np.float32)),)

    def group_loop(self) -> Loop | None:
        """Return the loop of `_group_kernels` that writes such numbers; None while it is being compiled.

        What resamples one picture is compiled first: without it a picture takes ten times as long.
        """
        return GROUP_KERNELS[f"group_{self._item}"].ask() if KERNELS[self._item].ask() is not None else None

    @property
    def of_group(self) -> tuple[Any, ...]:
        """The arguments of that loop that say what is written."""
        return self._parameters, self._channels_last

    def prepare_crops(self) -> None:
        """Have what `write_crops` runs loaded, or begin to compile it."""
        CROP_KERNELS[f"crops_to_{self._item}"].ask()

    def write_crops(self, crops: Sequence[NDArray[np.uint8]], out: NDArray[Any], rows: Sequence[int]) -> bool:
        """Write pictures as they are by one call; return whether that was done: not until it is compiled.

        crops: uint8[height, width, 3], C-contiguous, of the size of `out`: [batch, *shape of a sample], C-contiguous.
        rows: of each, its place there.
        """
        loop = CROP_KERNELS[f"crops_to_{self._item}"].ask()
        if loop is None:
            return False
        height, width, _ = crops[0].shape
        seen = out if self.view is None else out.view(self.view)
        left = loop(*self.of_group, height, width, np.array((list(map(id, crops)), rows)), seen)
        assert left == 0, f"{left} of the rows {rows} are not in a batch of {len(out)}"
        return True

    @property
    def byte_values(self) -> ByteValues | None:
        """What it makes of bytes; None where they stay bytes."""
        if not self._parameters:
            return None
        numbers: NDArray[Any] = self._parameters[0]
        if self.dtype == "float32":
            scale, bias = self._parameters
            numbers = np.multiply.outer(scale, np.arange(256, dtype=np.float32)) + bias[:, None]
        return ByteValues(numbers, self.dtype, self._channels_last)

    def prepare(self) -> None:
        """Have what writes loaded, or begin to compile it."""
        resampler(self._item)

    def shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        return (*size, 3) if self._channels_last else (3, *size)

    def write(self, pixels: Pixels, geometry: Geometry, out: NDArray[np.generic], blended: Blended) -> None:
        """Write the result into out, C-contiguous, of `shape(geometry.size)`."""
        box, shrink = geometry.box, pixels.shrink
        across, down = axes_of(geometry, shrink)
        stride = 3 * pixels.columns
        offset = (box.top // shrink - pixels.top) * stride + 3 * (box.left // shrink - pixels.left)
        taps = most_taps(across.extent / across.resized, down.extent / down.resized, geometry.resampling)
        resampler(self._item)(
            pixels.storage,
            offset,
            stride,
            across,
            down,
            geometry.resampling,
            taps,
            blended.take(scratch_bytes(across.window_length, down.window_length, down.length, taps)),
            self._parameters,
            out if self.view is None else out.view(self.view),
            self._channels_last,
        )


class Blended:
    """Scratch of the kernels: weights, and rows that are resampled in one direction."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    @property
    def storage(self) -> NDArray[np.uint8]:
        """uint8[nbytes], what there is."""
        return self._bytes

    def drop(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    @staticmethod
    def bytes_for(geometry: Geometry, shrink: int) -> int:
        """Return what `Sink.write` takes at most."""
        rows, columns = geometry.box.height // shrink + 2, geometry.box.width // shrink + 2
        taps = most_taps(columns / geometry.resized[1], rows / geometry.resized[0], geometry.resampling)
        size = scratch_bytes(geometry.window.width, geometry.window.height, rows, taps)
        return size + size // 4

    def take(self, size: int) -> NDArray[np.uint8]:
        found = self._bytes  # another thread may `drop` it at any time
        if size > found.size:
            found = self._bytes = np.zeros(size + size // 4, np.uint8)
        return found
