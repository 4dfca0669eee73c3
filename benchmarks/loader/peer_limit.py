"""The bound: threads that call the same libraries with what decoding and cropping take known beforehand.

Per image: open, read, close; header, region and decode of libjpeg-turbo; one call of the resampling kernel.
With --resampling opencv, instead of the kernel: cv2.resize (bilinear), cv2.flip and a compiled loop that
normalises and transposes. With --recipe jitter or randaugment, the kernel writes bytes, operations follow (OpenCV's
calls) that a NumPy generator of the thread draws for each picture, as whoever writes such a loop would draw them, and a
loop as that one ends it.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import cv2
import numpy as np
from numba import njit
from numpy.typing import NDArray
from peer_protocol import BATCH, JITTER, MEAN, SIZE, STD, arguments, serve

from penstock.loader.transforms import ColorJitter, RandAugment, RandomResizedCrop
from penstock.loader.transforms.compiled import resampler
from penstock.loader.transforms.draws import draw_crops
from penstock.loader.transforms.geometry import CUBIC, WIDENED, most_taps, place_crop
from penstock.loader.transforms.jpeg import read_header
from penstock.loader.transforms.turbojpeg import find_library

EDGE = 2


class Region(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


@njit(nogil=True, cache=True)
def normalise(picture: Any, scale: Any, bias: Any, out: Any) -> None:
    """Write uint8[rows, columns, 3] * scale + bias into float32[3, rows, columns]."""
    for row in range(picture.shape[0]):
        for column in range(picture.shape[1]):
            out[0, row, column] = picture[row, column, 0] * scale[0] + bias[0]
            out[1, row, column] = picture[row, column, 1] * scale[1] + bias[1]
            out[2, row, column] = picture[row, column, 2] * scale[2] + bias[2]


def drawn(recipe: str, rng: np.random.Generator) -> list[Callable[[Any], Any]]:
    """Return what a recipe does to a picture."""
    if recipe == "randaugment":
        return RandAugment().draw(rng, SIZE, SIZE)
    if recipe == "plain":
        return []
    return [partial(_applied, change, factor) for change, factor in ColorJitter(*JITTER).draw(rng)]


def _applied(change: Callable[[Any, float], Any], factor: float, picture: Any) -> Any:
    return change(picture, factor)


def main() -> None:
    options = arguments(threads=int, resampling=str, recipe=str)
    paths = [str(path) for path in sorted(options.images.glob("*/*.jpg"))]
    numbers = draw_crops(RandomResizedCrop(SIZE), 1, 0, np.arange(len(paths)))
    jobs = []
    for path, row in zip(paths, numbers, strict=True):
        with open(path, "rb") as stored:
            data = stored.read()
        header = read_header(data)
        box = place_crop(header.height, header.width, row.tolist(), 0, 3 / 4, 4 / 3)
        unit = header.unit_columns
        left = max(0, (box.left - EDGE) // unit * unit)
        right = min(header.width, box.left + box.width + EDGE)
        region = Region(left, box.top, right - left, box.height)
        jobs.append((path, len(data), region, box.left - left, box.width))
    order = np.random.default_rng(0).permutation(len(jobs))
    scale = (1 / (255 * np.array(STD))).astype(np.float32)
    bias = (-np.array(MEAN) / np.array(STD)).astype(np.float32)
    library = find_library()
    assert library is not None, "the bound needs the wheel turbojpeg"
    slow, quick = ctypes.CDLL(str(library)), ctypes.PyDLL(str(library))
    slow.tj3Init.restype = ctypes.c_void_p
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    quick.tj3DecompressHeader.argtypes = (pointer, pointer, size)
    quick.tj3SetCroppingRegion.argtypes = (pointer, Region)
    slow.tj3Decompress8.argtypes = (pointer, pointer, size, pointer, ctypes.c_int, ctypes.c_int)
    kernel = resampler("float32" if options.recipe == "plain" else "uint8")
    resampling = {"antialias": WIDENED, "bicubic": WIDENED + CUBIC}.get(options.resampling, 0)
    cv2.setNumThreads(1)

    def worker(number: int) -> Callable[[int, NDArray[np.float32]], None]:
        handle, rng = slow.tj3Init(1), np.random.default_rng(number)
        storage, scratch = np.empty(4 << 20, np.uint8), np.zeros(4 << 20, np.uint8)
        address = storage.ctypes.data
        encoded = np.empty(1 << 20, np.uint8)
        source, views = encoded.ctypes.data, [encoded.data]
        if options.resampling == "opencv":

            def finish(offset: int, region: Region, width: int, place: int, out: NDArray[np.float32]) -> None:
                flip = bool(place & 1)
                picture = storage[: region.h * region.w * 3].reshape(region.h, region.w, 3)
                crop = picture[:, offset : offset + width]
                resized = cv2.resize(crop, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
                normalise(cv2.flip(resized, 1) if flip else resized, scale, bias, out)

        else:
            bytes_out = np.empty((SIZE, SIZE, 3), np.uint8)

            def finish(offset: int, region: Region, width: int, place: int, out: NDArray[np.float32]) -> None:
                flip = bool(place & 1)
                across = (0.0, float(width), width, SIZE, 0, SIZE, flip)
                down = (0.0, float(region.h), region.h, SIZE, 0, SIZE, False)
                taps = most_taps(width / SIZE, region.h / SIZE, resampling)
                of_crop = (storage, 3 * offset, 3 * region.w, across, down, resampling, taps, scratch)
                if options.recipe == "plain":
                    kernel(*of_crop, scale, bias, out, False)
                    return
                kernel(*of_crop, bytes_out, True)
                picture = bytes_out
                for operation in drawn(options.recipe, rng):
                    picture = operation(picture)
                normalise(picture, scale, bias, out)

        def one(place: int, out: NDArray[np.float32]) -> None:
            path, nbytes, region, offset, width = jobs[order[place]]
            file = os.open(path, os.O_RDONLY)
            os.readv(file, views)
            os.close(file)
            quick.tj3DecompressHeader(handle, source, nbytes)
            quick.tj3SetCroppingRegion(handle, region)
            slow.tj3Decompress8(handle, source, nbytes, address, 0, 0)
            finish(offset, region, width, place, out)

        return one

    workers = [worker(number) for number in range(options.threads)]
    slots = [np.empty((BATCH, 3, SIZE, SIZE), np.float32) for _ in workers]

    def run_epoch() -> int:
        batches = count()

        def work(one: Callable[[int, NDArray[np.float32]], None], slot: NDArray[np.float32]) -> None:
            while (batch := next(batches)) < math.ceil(len(jobs) / BATCH):
                for place in range(batch * BATCH, min(len(jobs), (batch + 1) * BATCH)):
                    one(place, slot[place % BATCH])

        threads = [threading.Thread(target=work, args=pair) for pair in zip(workers, slots, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(jobs)

    serve(run_epoch)


if __name__ == "__main__":
    main()
