"""FFCV from rows of bytes in a file of its own format, written once: NDArrayDecoder and nothing else, shuffled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ffcv.fields import NDArrayField
from ffcv.fields.decoders import NDArrayDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import ToTensor
from ffcv.writer import DatasetWriter
from peer_protocol import arguments, serve


class Rows:
    def __init__(self, path: Path, nbytes: int) -> None:
        self.rows = np.fromfile(path, np.uint8).reshape(-1, nbytes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (self.rows[index],)


def main() -> None:
    options = arguments(rows=Path, nbytes=int, batch=int, threads=int)
    path = options.rows.with_suffix(".beton")
    if not path.exists():
        field = NDArrayField(np.dtype("uint8"), (options.nbytes,))
        DatasetWriter(str(path), {"row": field}, num_workers=1).from_indexed_dataset(
            Rows(options.rows, options.nbytes)
        )
    loader = Loader(
        str(path),
        batch_size=options.batch,
        num_workers=options.threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"row": [NDArrayDecoder(), ToTensor()]},
    )
    serve(lambda: sum(len(batch[0]) for batch in loader))


if __name__ == "__main__":
    main()
