"""PyTorch's DataLoader with OpenCV: crop, bilinear resize, flip and normalisation in worker processes."""

from __future__ import annotations

import math
import random
from pathlib import Path

import cv2
import numpy as np
import torch
from peer_protocol import BATCH, MEAN, SIZE, STD, arguments, serve


class Crops(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, root: Path) -> None:
        self.paths = sorted(root.glob("*/*.jpg"))
        labels = sorted({path.parent.name for path in self.paths})
        self.labels = [labels.index(path.parent.name) for path in self.paths]
        self.mean = np.array(MEAN, np.float32) * 255
        self.inverse = 1 / (np.array(STD, np.float32) * 255)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = cv2.imread(str(self.paths[index]), cv2.IMREAD_COLOR_RGB)
        assert picture is not None
        top, left, height, width = random_crop(*picture.shape[:2])
        crop = picture[top : top + height, left : left + width]
        resized = cv2.resize(crop, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
        if random.random() < 0.5:
            resized = cv2.flip(resized, 1)
        values = (resized - self.mean) * self.inverse
        return torch.from_numpy(values.transpose(2, 0, 1).copy()), self.labels[index]


def random_crop(height: int, width: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top, left = random.randint(0, height - crop_height), random.randint(0, width - crop_width)
            return top, left, crop_height, crop_width
    return 0, 0, height, width


def start_worker(worker: int) -> None:
    cv2.setNumThreads(1)
    torch.set_num_threads(1)


def main() -> None:
    options = arguments(workers=int)
    loader = torch.utils.data.DataLoader(
        Crops(options.images),
        BATCH,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=True,
        worker_init_fn=start_worker,
    )
    serve(lambda: sum(len(labels) for _, labels in loader))


if __name__ == "__main__":
    main()
