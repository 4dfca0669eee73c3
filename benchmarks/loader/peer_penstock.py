"""Penstock: the whole loader (--via loader), or threads that do nothing but run the pipeline (--via threads).

Each timed epoch is the second of a new loader's three: the loader is as far ahead when it ends as when it
begins, so that nothing is decoded off the clock. Then it is closed: it would read on while another peer is timed.
"""

from __future__ import annotations

import math
import os
import threading
from itertools import count
from pathlib import Path

import numpy as np
from peer_protocol import BATCH, JITTER, MEAN, SIZE, STD, arguments, serve

from penstock.loader.transforms import (
    ColorJitter,
    Normalize,
    RandAugment,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Scratch,
    ToTensor,
    compile_pipeline,
)


def main() -> None:
    options = arguments(threads=int, resampling=str, recipe=str, via=str)
    augments = {"plain": (), "jitter": (ColorJitter(*JITTER),), "randaugment": (RandAugment(),)}
    transforms = (
        RandomResizedCrop(
            SIZE,
            interpolation="bicubic" if options.resampling == "bicubic" else "bilinear",
            antialias=options.resampling != "bilinear",
        ),
        RandomHorizontalFlip(),
        *augments[options.recipe],
        ToTensor(),
        Normalize(MEAN, STD),
    )
    if options.via == "loader":
        serve_loader(options.images, transforms, options.threads)
    else:
        serve_threads(options.images, transforms, options.threads)


def serve_loader(images: Path, transforms: tuple[object, ...], threads: int) -> None:
    from penstock.torch import Loader

    loaders: list[Loader] = []

    def prepare() -> None:
        loader = Loader(
            images, batch_size=BATCH, epochs=3, transforms=transforms, decoders=threads, report=None
        )
        loaders.append(loader)
        run_epoch()

    def run_epoch() -> int:
        return sum(len(labels) for _, labels in loaders[0])

    serve(run_epoch, prepare, rest=lambda: loaders.pop().close())


def serve_threads(images: Path, transforms: tuple[object, ...], threads: int) -> None:
    paths = [str(path) for path in sorted(images.glob("*/*.jpg"))]
    pipeline = compile_pipeline(transforms, seed=0)
    order = np.random.default_rng(0).permutation(len(paths))
    scratches = [Scratch() for _ in range(threads)]
    slots = [np.empty((BATCH, *pipeline.output_shape), pipeline.storage_dtype) for _ in range(threads)]
    epochs = count()

    def run_epoch() -> int:
        epoch, batches = next(epochs), count()

        def work(scratch: Scratch, slot: np.ndarray) -> None:
            buffer = memoryview(bytearray(1 << 20))
            while (batch := next(batches)) < math.ceil(len(paths) / BATCH):
                samples = order[batch * BATCH : (batch + 1) * BATCH]
                draws = pipeline.draw(epoch, samples)
                for index, sample in enumerate(samples):
                    pipeline.run(read(paths[sample], buffer), slot[index], draws, index, scratch)

        workers = [threading.Thread(target=work, args=pair) for pair in zip(scratches, slots, strict=True)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return len(paths)

    serve(run_epoch)


def read(path: str, buffer: memoryview) -> memoryview:
    file = os.open(path, os.O_RDONLY)
    try:
        return buffer[: os.readv(file, [buffer])]
    finally:
        os.close(file)


if __name__ == "__main__":
    main()
