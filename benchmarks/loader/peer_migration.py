"""One side of the migration benchmark: a data set behind PyTorch's DataLoader or behind Penstock.

Nothing of a side runs while another is timed: a DataLoader's persistent workers have no request between two epochs, and
a Penstock loader, which reads ahead, is made anew for each turn and closed before its time is told.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer_protocol import CACHE, MEAN, SIZE, STD, arguments, serve
from PIL import Image
from promise import settle
from torch.utils.data import DataLoader, Dataset

from penstock.loader.transforms import DecodeRaw, Normalize, ToTensor
from penstock.store import FlatFolder
from penstock.torch import Loader

BATCH = 64
SLEEP_SECONDS = 0.02
#: Of whole epochs, at least one, that are timed.
_TIMED_SECONDS = 1.0
ROW_NUMBERS = 256

Sample = tuple[torch.Tensor, int]


class Files(Dataset[Sample]):
    """Samples of the files of a folder, by a function of path and number."""

    def __init__(self, root: Path, sample: Callable[[str, int], torch.Tensor]) -> None:
        self.paths = [str(path) for path in sorted(root.rglob("*.*"))]
        self.sample = sample

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        return self.sample(self.paths[index], index), index


class Rows(Dataset[Sample]):
    """Rows of 1 KB in memory."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(count * ROW_NUMBERS, dtype=torch.float32).reshape(count, ROW_NUMBERS)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.rows[index], index


class RowLists(Rows):
    """The same, a list at a time."""

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return list(zip(self.rows[torch.tensor(indices)].unbind(), indices, strict=True))


class Sleeping(Dataset[Sample]):
    """Samples of a slow store."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> Sample:
        time.sleep(SLEEP_SECONDS)
        return torch.full((4,), index), index


def photograph(path: str, index: int) -> torch.Tensor:
    """What torchvision's ImageFolder, RandomResizedCrop, flip, ToTensor and Normalize do, drawn by the number."""
    with open(path, "rb") as file:
        picture = Image.open(file).convert("RGB")
    draw = random.Random(index)
    area = picture.width * picture.height * draw.uniform(0.08, 1.0)
    ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
    width = min(picture.width, round(math.sqrt(area * ratio)))
    height = min(picture.height, round(math.sqrt(area / ratio)))
    left, top = draw.randint(0, picture.width - width), draw.randint(0, picture.height - height)
    picture = picture.crop((left, top, left + width, top + height)).resize(
        (SIZE, SIZE), Image.Resampling.BILINEAR
    )
    if index % 2:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return normalised(picture)


def thumbnail(path: str, index: int) -> torch.Tensor:
    with open(path, "rb") as file:
        picture = Image.open(file).convert("RGB")
    return normalised(picture)


def normalised(picture: Image.Image) -> torch.Tensor:
    """What torchvision's ToTensor and Normalize do."""
    pixels = torch.from_numpy(np.array(picture, np.uint8, copy=True))
    values = pixels.permute(2, 0, 1).contiguous().to(torch.float32).div(255)
    return values.sub_(torch.tensor(MEAN).view(-1, 1, 1)).div_(torch.tensor(STD).view(-1, 1, 1))


def numbers(path: str, index: int) -> torch.Tensor:
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def small_folders() -> tuple[Path, Path]:
    """Return the folders of 64 x 64 pictures and of files of 4 KB, made once."""
    pictures, files = CACHE / "thumbnails", CACHE / "files4k"
    if not files.exists():
        photographs = sorted((CACHE / "images").rglob("*.jpg"))
        for number in range(6000):
            place = pictures / str(number % 10)
            place.mkdir(parents=True, exist_ok=True)
            with Image.open(photographs[number % len(photographs)]) as picture:
                picture.resize((64, 64)).save(place / f"{number:05}.jpg", quality=90)
        unfinished = CACHE / "files4k.part"
        unfinished.mkdir(exist_ok=True)
        for number in range(6000):
            (unfinished / f"{number:05}.bin").write_bytes(np.random.default_rng(number).bytes(4096))
        unfinished.rename(files)
    return pictures, files


def data_of(name: str, images: Path) -> tuple[Dataset[Sample], Any, dict[str, Any]]:
    """Return the data set, what Penstock is given in its place, and with which options."""
    pictures, files = small_folders()
    sets: dict[str, Callable[[], Dataset[Sample]]] = {
        "photographs": lambda: Files(images, photograph),
        "thumbnails": lambda: Files(pictures, thumbnail),
        "files": lambda: Files(files, numbers),
        "rows": lambda: Rows(50_000),
        "row lists": lambda: RowLists(50_000),
        "sleeping": Sleeping,
        "folder of thumbnails": lambda: Files(pictures, thumbnail),
        "folder of files": lambda: Files(files, numbers),
    }
    dataset = sets[name]()
    if name == "folder of thumbnails":
        return dataset, pictures, {"transforms": [ToTensor(), Normalize(MEAN, STD)]}
    if name == "folder of files":
        return (
            dataset,
            FlatFolder(files, extensions=None),
            {"transforms": [DecodeRaw("uint8")], "dtype": "uint8"},
        )
    return dataset, dataset, {}


def largest_difference(theirs: Any, ours: Any) -> float:
    """Return by how much any number of any sample differs; infinity for other shapes, types or lengths."""
    largest = 0.0
    for (their, _), (our, _) in zip(theirs, ours, strict=True):
        if their.shape != our.shape or their.dtype != our.dtype:
            return math.inf
        largest = max(largest, float((their.double() - our.double()).abs().max()))
    return largest


def main() -> None:
    options = arguments(data=str, side=str, workers=int)
    dataset, source, settings = data_of(options.data, options.images)

    if options.side == "check":
        ours = Loader(source, batch_size=BATCH, epochs=1, shuffle=False, report=None, **settings)
        with ours:
            print(largest_difference(DataLoader(dataset, BATCH), ours))
        return

    if options.side == "torch":
        loader = DataLoader(
            dataset,
            BATCH,
            shuffle=True,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            worker_init_fn=one_thread,
        )
        serve(lambda: run_for(_TIMED_SECONDS, loader))
        return

    fixed = {"decoders": options.workers} if options.workers else {}
    loaders: list[Loader] = []

    def prepare() -> None:
        loaders[:] = [Loader(source, batch_size=BATCH, epochs=None, report=None, **fixed, **settings)]
        settle(loaders[0], 5.0 if fixed else 10.0)

    serve(lambda: run_for(_TIMED_SECONDS, loaders[0]), prepare, lambda: loaders[0].close())


def run_for(seconds: float, loader: Iterable[tuple[Any, Any]]) -> int:
    """Run whole epochs until so many seconds have passed; return how many samples."""
    begin, samples = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        samples += sum(len(numbers) for _, numbers in loader)
    return samples


def one_thread(worker: int) -> None:
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
