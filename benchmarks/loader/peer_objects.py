"""One epoch of samples of 100 KB in a full shuffle from the store of object_store.py, by one loader; see objects.py.

    python peer_objects.py --via penstock --endpoint http://127.0.0.1:9123 --samples 10240

It prints seconds, samples and the sum of their numbers. `--write FOLDER` writes what LitData and Streaming read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

SAMPLE_BYTES = 100_000
BATCH = 64


def _numbers(batch: Any) -> np.ndarray:
    """Return the numbers of a batch's samples: [batch, SAMPLE_BYTES] bytes."""
    array = np.asarray(batch)
    assert array.shape[1] == SAMPLE_BYTES, array.shape
    return np.ascontiguousarray(array[:, :8]).view("<i8")[:, 0]


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


def bare(endpoint: str, samples: int, workers: int) -> Iterator[Any]:
    """Ask for all samples in order, by threads that do nothing else: a lower bound of what the store can do."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "bucket",
        config={"endpoint": endpoint, "skip_signature": True, "region": "us-east-1"},
        client_options={"allow_http": True},
    )
    names = sorted(meta["path"] for found in obstore.list(store, "samples") for meta in found)

    def read(name: str) -> np.ndarray:
        content: Any = obstore.get(store, name).bytes()
        found: np.ndarray = np.frombuffer(content, np.uint8)
        return found

    with ThreadPoolExecutor(16) as pool:
        for first in range(0, len(names), BATCH):
            yield np.stack(list(pool.map(read, names[first : first + BATCH])))


def penstock(endpoint: str, samples: int, workers: int) -> Iterator[Any]:
    from penstock import Loader
    from penstock.store import Records

    options = {"endpoint_url": endpoint, "anon": True}
    source = Records("s3://bucket/part-*.bin", "u1", SAMPLE_BYTES, storage_options=options)
    with Loader(source, batch_size=BATCH, epochs=1, policy="staging", memory="1 GiB", report=None) as loader:
        yield from loader


def litdata(endpoint: str, samples: int, workers: int) -> Iterator[Any]:
    import obstore.store
    from litdata import StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found, unused-ignore]

    # It has no option for a store without TLS, which it reads by obstore.
    s3_store: Any = obstore.store.S3Store
    plain = {"client_options": {"allow_http": True}}
    vars(obstore.store)["S3Store"] = lambda *given, **named: s3_store(*given, **{**named, **plain})
    options = {"endpoint_url": endpoint, "aws_access_key_id": "me", "aws_secret_access_key": "mine"}
    dataset = StreamingDataset(
        "s3://bucket/litdata",
        cache_dir=tempfile.mkdtemp(),
        shuffle=True,
        storage_options=options,
        max_cache_size="20GB",
    )
    yield from StreamingDataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=workers,
        collate_fn=lambda got: np.stack([_array(x) for x in got]),
    )


def streaming(endpoint: str, samples: int, workers: int) -> Iterator[Any]:
    from streaming import StreamingDataset  # type: ignore[import-not-found, unused-ignore]
    from torch.utils.data import DataLoader

    os.environ |= {"S3_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
    dataset = StreamingDataset(
        remote="s3://bucket/mds",
        local=tempfile.mkdtemp(),
        shuffle=True,
        batch_size=BATCH,
        predownload=4096,
    )
    yield from DataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=workers,
        collate_fn=lambda got: np.stack([_array(x["data"]) for x in got]),
    )


def s3torch(endpoint: str, samples: int, workers: int) -> Iterator[Any]:
    from s3torchconnector import S3ClientConfig, S3MapDataset  # type: ignore[import-not-found, unused-ignore]
    from torch.utils.data import DataLoader

    os.environ |= {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
    dataset = S3MapDataset.from_prefix(
        "s3://bucket/samples/",
        region="us-east-1",
        endpoint=endpoint,
        transform=lambda item: _array(item.read()),
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    yield from DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=4,
        collate_fn=np.stack,
    )


VIA: dict[str, Callable[[str, int, int], Iterator[Any]]] = {
    each.__name__: each for each in (bare, penstock, litdata, streaming, s3torch)
}
MODULES = {
    "bare": ["obstore.store"],
    "penstock": ["penstock", "penstock.store", "obstore.store", "botocore.session"],
    "litdata": ["litdata"],
    "streaming": ["streaming", "torch.utils.data"],
    "s3torch": ["s3torchconnector", "torch.utils.data"],
}


def write(folder: Path, objects: int, samples: int) -> None:
    """Write the samples as LitData and Streaming do, those that are installed."""
    import object_store

    parts = object_store.write_parts(objects, samples)
    contents = [bytes(data) for name, data in sorted(parts.items()) if name.startswith("samples/")]
    try:
        from litdata.streaming.writer import BinaryWriter  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        pass
    else:
        (folder / "litdata").mkdir(parents=True)
        writer = BinaryWriter(str(folder / "litdata"), chunk_bytes=16 << 20)
        for number, content in enumerate(contents):
            writer.add_item(number, content)
        writer.done()
        writer.merge()
    try:
        from streaming import MDSWriter
    except ImportError:
        return
    with MDSWriter(out=str(folder / "mds"), columns={"data": "bytes"}, size_limit=16 << 20) as out:
        for content in contents:
            out.write({"data": content})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--via", choices=list(VIA), default="penstock")
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--samples", type=int, default=160, help="in each object")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args(argv)
    if options.write is not None:
        write(options.write, options.objects, options.samples)
        return
    for module in MODULES[options.via]:
        importlib.import_module(module)
    count = total = 0
    began = time.perf_counter()
    for batch in VIA[options.via](options.endpoint, options.objects * options.samples, options.workers):
        numbers = _numbers(batch)
        count, total = count + numbers.size, total + int(numbers.sum())
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "samples": count, "sum": total}))


if __name__ == "__main__":
    main()
