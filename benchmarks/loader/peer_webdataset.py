"""WebDataset over tar shards: a shuffle buffer of 1,000 samples, then crop, bilinear resize, flip and normalisation.

--via opencv: a sample at a time, collated by PyTorch. --via expert: decoded by libjpeg-turbo (simplejpeg), a batch at a
time, normalised into it by a compiled loop. The same functions as of peer_torch.py. --images: a pattern of shards.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
import webdataset
from peer_protocol import BATCH, MEAN, SIZE, STD, arguments, serve
from peer_torch import as_it_is, normalise, random_crop, start_worker

_MEAN = np.array(MEAN, np.float32) * np.float32(255)
_INVERSE = 1 / (np.array(STD, np.float32) * np.float32(255))
#: Samples of WebDataset's shuffle buffer, as its documentation has it.
_BUFFER = 1000


def cropped(sample: tuple[bytes, bytes]) -> tuple[torch.Tensor, int]:
    encoded, label = sample
    picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
    assert picture is not None
    values = (random_crop(picture, SIZE) - _MEAN) * _INVERSE
    return torch.from_numpy(values.transpose(2, 0, 1).copy()), int(label)


def cropped_batch(samples: list[tuple[bytes, bytes]]) -> tuple[torch.Tensor, torch.Tensor]:
    images = np.empty((len(samples), 3, SIZE, SIZE), np.float32)
    for image, (encoded, _) in zip(images, samples, strict=True):
        normalise(random_crop(simplejpeg.decode_jpeg(encoded), SIZE), _MEAN, _INVERSE, image)
    return torch.from_numpy(images), torch.tensor([int(label) for _, label in samples])


def main() -> None:
    options = arguments(workers=int, via=str)
    data: Any = webdataset.WebDataset(str(options.images), shardshuffle=100, empty_check=False)
    data = data.shuffle(_BUFFER).to_tuple("jpg", "cls")
    if options.via == "expert":
        data = data.batched(BATCH, collation_fn=cropped_batch)
    else:
        data = data.map(cropped).batched(BATCH, collation_fn=torch.utils.data.default_collate)
    loader: Any = webdataset.WebLoader(
        data,
        batch_size=None,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        worker_init_fn=start_worker,
        collate_fn=as_it_is,
    )
    serve(lambda: sum(len(labels) for _, labels in loader))


if __name__ == "__main__":
    main()
