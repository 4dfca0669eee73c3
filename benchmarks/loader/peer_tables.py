"""Rows of bytes by Hugging Face's datasets, MosaicML's Streaming, the package tfrecord or LitData, by a DataLoader.

--place: a folder with rows.npy and rows.parquet. What Streaming, tfrecord and LitData read, they write there first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer_protocol import arguments, serve
from torch.utils.data import DataLoader


def collate(samples: list[dict[str, Any]]) -> torch.Tensor:
    """Copy the samples of a batch once, into a tensor."""
    content = b"".join(sample["image"] for sample in samples)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(len(samples), -1)


def of_datasets(place: Path) -> Any:
    import datasets

    return datasets.Dataset.from_parquet(str(place / "rows.parquet"), cache_dir=str(place / "cache"))


def of_streaming(place: Path, batch: int) -> Any:
    import streaming  # type: ignore[import-not-found]

    folder = str(place / "mds")
    if not Path(folder).exists():
        with streaming.MDSWriter(out=folder, columns={"image": "bytes"}) as out:
            for row in np.load(place / "rows.npy", mmap_mode="r"):
                out.write({"image": row.tobytes()})
    streaming.base.util.clean_stale_shared_memory()
    return streaming.StreamingDataset(local=folder, shuffle=True, batch_size=batch)


def of_tfrecord(place: Path) -> Any:
    from tfrecord.torch.dataset import TFRecordDataset  # type: ignore[import-not-found]
    from tfrecord.writer import TFRecordWriter  # type: ignore[import-not-found]

    file = place / "rows.tfrecord"
    if not file.exists():
        writer = TFRecordWriter(str(file))
        for row in np.load(place / "rows.npy", mmap_mode="r"):
            writer.write({"image": (row.tobytes(), "byte")})
        writer.close()
    return TFRecordDataset(str(file), None, {"image": "byte"}, shuffle_queue_size=1000)


def of_litdata(place: Path) -> Any:
    from litdata import StreamingDataset  # type: ignore[import-not-found]
    from litdata.streaming.writer import BinaryWriter  # type: ignore[import-not-found]

    folder = place / "litdata"
    if not folder.exists():
        folder.mkdir()
        writer = BinaryWriter(str(folder), chunk_bytes=64 << 20)
        for number, row in enumerate(np.load(place / "rows.npy", mmap_mode="r")):
            writer[number] = {"image": row.tobytes()}
        writer.done()
        writer.merge()
    return StreamingDataset(str(folder), shuffle=True)


def main() -> None:
    options = arguments(via=str, place=Path, workers=int, batch=int)
    how: dict[str, Any] = {"batch_size": options.batch, "num_workers": options.workers, "collate_fn": collate}
    if options.workers:
        how["persistent_workers"] = True
    if options.via == "datasets":
        loader = DataLoader(of_datasets(options.place), shuffle=True, **how)
    elif options.via == "streaming":
        loader = DataLoader(of_streaming(options.place, options.batch), **how)
    elif options.via == "litdata":
        from litdata import StreamingDataLoader

        loader = StreamingDataLoader(of_litdata(options.place), **how)
    else:
        how.pop("persistent_workers", None)
        loader = DataLoader(of_tfrecord(options.place), **how | {"num_workers": 0})

    def epoch() -> int:
        return sum(len(batch) for batch in loader)

    serve(epoch)


if __name__ == "__main__":
    main()
