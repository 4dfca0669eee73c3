"""PyTorch's DataLoader: crop, bilinear resize, flip and normalisation in worker processes.

--via opencv: a sample at a time, as most would write it with OpenCV. --via expert: a batch at a time
(__getitems__), decoded by libjpeg-turbo (simplejpeg), normalised into the batch by a compiled loop.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
from numba import njit
from numpy.typing import NDArray
from peer_protocol import BATCH, MEAN, SIZE, STD, arguments, serve

Sample = tuple[torch.Tensor, int]
Batch = tuple[torch.Tensor, torch.Tensor]


class Crops(torch.utils.data.Dataset[Sample]):
    def __init__(self, root: Path, size: int = SIZE) -> None:
        self.size = size
        self.paths = sorted(root.glob("*/*.jpg"))
        labels = sorted({path.parent.name for path in self.paths})
        self.labels = [labels.index(path.parent.name) for path in self.paths]
        self.mean = np.array(MEAN, np.float32) * np.float32(255)
        self.inverse = 1 / (np.array(STD, np.float32) * np.float32(255))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        picture = cv2.imread(str(self.paths[index]), cv2.IMREAD_COLOR_RGB)
        assert picture is not None
        values = (random_crop(picture, self.size) - self.mean) * self.inverse
        return torch.from_numpy(values.transpose(2, 0, 1).copy()), self.labels[index]


class BatchedCrops(Crops):
    def __getitems__(self, indices: list[int]) -> Batch:
        images = np.empty((len(indices), 3, self.size, self.size), np.float32)
        for image, index in zip(images, indices, strict=True):
            normalise(
                random_crop(simplejpeg.decode_jpeg(self.paths[index].read_bytes()), self.size),
                self.mean,
                self.inverse,
                image,
            )
        return torch.from_numpy(images), torch.tensor([self.labels[index] for index in indices])


@njit(nogil=True, cache=True)
def normalise(
    picture: NDArray[np.uint8], mean: NDArray[Any], inverse: NDArray[Any], out: NDArray[np.float32]
) -> None:
    """picture: [height, width, 3]. out: [3, height, width]."""
    for channel in range(3):
        for row in range(out.shape[1]):
            for column in range(out.shape[2]):
                out[channel, row, column] = (picture[row, column, channel] - mean[channel]) * inverse[channel]


def random_crop(picture: NDArray[Any], size: int) -> NDArray[Any]:
    """Return a part of random area and shape, resized, mirrored half of the times."""
    top, left, height, width = random_region(*picture.shape[:2])
    crop = picture[top : top + height, left : left + width]
    resized = cv2.resize(crop, (size, size), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(resized, 1) if random.random() < 0.5 else resized


def random_region(height: int, width: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top, left = random.randint(0, height - crop_height), random.randint(0, width - crop_width)
            return top, left, crop_height, crop_width
    return 0, 0, height, width


def as_it_is(batch: Any) -> Any:
    return batch


def start_worker(worker: int) -> None:
    cv2.setNumThreads(1)
    torch.set_num_threads(1)


def main() -> None:
    options = arguments(workers=int, via=str)
    is_expert = options.via == "expert"
    loader = torch.utils.data.DataLoader(
        (BatchedCrops if is_expert else Crops)(options.images),
        BATCH,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=True,
        worker_init_fn=start_worker,
        collate_fn=as_it_is if is_expert else None,
    )
    serve(lambda: sum(len(labels) for _, labels in loader))


if __name__ == "__main__":
    main()
