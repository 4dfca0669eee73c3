"""Epochs of samples of 100 KB in a full shuffle from the store of object_store.py, by one loader; see objects.py.

    python peer_objects.py --via penstock --endpoint http://127.0.0.1:9123 --samples 10240

It prints seconds, samples, the sum of their numbers, and how long it waited for batches. `--write FOLDER` writes what
LitData and Streaming read.
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
from typing import Any, NamedTuple

import numpy as np

SAMPLE_BYTES = 100_000
BATCH = 64
#: Of a cache that is bounded, what Penstock has in memory: a third of the data, where it is two thirds of them.
MEMORY_SHARE = 1 / 2


class Job(NamedTuple):
    """workers: processes. epochs: of the run. cache_bytes: that may be kept for later epochs; 0: nothing is bounded."""

    endpoint: str
    workers: int
    epochs: int
    cache_bytes: int


def _numbers(batch: Any) -> np.ndarray:
    """Return the numbers of a batch's samples: [batch, SAMPLE_BYTES] bytes."""
    array = np.asarray(batch)
    assert array.shape[1] == SAMPLE_BYTES, array.shape
    return np.ascontiguousarray(array[:, :8]).view("<i8")[:, 0]


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


def bare(job: Job) -> Iterator[Any]:
    """Ask for all samples in order, by threads that do nothing else: a lower bound of what the store can do."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "bucket",
        config={"endpoint": job.endpoint, "skip_signature": True, "region": "us-east-1"},
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


def penstock(job: Job) -> Iterator[Any]:
    from penstock import Loader
    from penstock.machine import Curve, Machine, SharedStore, StorageClass
    from penstock.store import Records

    options = {"endpoint_url": job.endpoint, "anon": True}
    source = Records("s3://bucket/part-*.bin", "u1", SAMPLE_BYTES, storage_options=options)
    how: dict[str, Any] = {"policy": "staging", "memory": "1 GiB"}
    if job.cache_bytes:
        in_memory = int(MEMORY_SHARE * job.cache_bytes)
        # A machine bounds what is kept in memory apart from batches and what is on its way.
        fast, slow = Curve.flat(5e9), Curve.flat(50e6)
        tiers = StorageClass("staging", 1 << 30, 2, fast), StorageClass("memory", in_memory, 2, fast)
        how = {"machine": Machine(SharedStore(None, slow, 10e-3, threads=32), tiers)}
        how |= {
            "memory": in_memory + (256 << 20),
            "local_disk": {tempfile.mkdtemp(): job.cache_bytes - in_memory},
        }
    with Loader(source, batch_size=BATCH, epochs=job.epochs, report=None, **how) as loader:
        for _ in range(job.epochs):
            yield from loader


def litdata(job: Job) -> Iterator[Any]:
    import obstore.store
    from litdata import StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found, unused-ignore]

    # It has no option for a store without TLS, which it reads by obstore.
    s3_store: Any = obstore.store.S3Store
    plain = {"client_options": {"allow_http": True}}
    vars(obstore.store)["S3Store"] = lambda *given, **named: s3_store(*given, **{**named, **plain})
    options = {"endpoint_url": job.endpoint, "aws_access_key_id": "me", "aws_secret_access_key": "mine"}
    dataset = StreamingDataset(
        "s3://bucket/litdata",
        cache_dir=tempfile.mkdtemp(),
        shuffle=True,
        storage_options=options,
        max_cache_size=job.cache_bytes or "20GB",
    )
    loader = StreamingDataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=job.workers,
        collate_fn=lambda got: np.stack([_array(x) for x in got]),
    )
    for _ in range(job.epochs):
        yield from loader


def streaming(job: Job) -> Iterator[Any]:
    from streaming import StreamingDataset  # type: ignore[import-not-found, unused-ignore]
    from torch.utils.data import DataLoader

    os.environ |= {
        "S3_ENDPOINT_URL": job.endpoint,
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "mine",
    }
    dataset = StreamingDataset(
        remote="s3://bucket/mds",
        local=tempfile.mkdtemp(),
        shuffle=True,
        batch_size=BATCH,
        predownload=4096,
        cache_limit=job.cache_bytes or None,
    )
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=job.workers,
        collate_fn=lambda got: np.stack([_array(x["data"]) for x in got]),
        persistent_workers=job.epochs > 1,
    )
    for _ in range(job.epochs):
        yield from loader


def s3torch(job: Job) -> Iterator[Any]:
    from s3torchconnector import S3ClientConfig, S3MapDataset  # type: ignore[import-not-found, unused-ignore]
    from torch.utils.data import DataLoader

    os.environ |= {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
    dataset = S3MapDataset.from_prefix(
        "s3://bucket/samples/",
        region="us-east-1",
        endpoint=job.endpoint,
        transform=lambda item: _array(item.read()),
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    yield from DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=job.workers,
        prefetch_factor=4,
        collate_fn=np.stack,
    )


VIA: dict[str, Callable[[Job], Iterator[Any]]] = {
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
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--cache-bytes", type=int, default=0, help="kept for later epochs; 0: none is bounded"
    )
    parser.add_argument("--step-seconds", type=float, default=0.0, help="a sleep for each batch")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args(argv)
    if options.write is not None:
        write(options.write, options.objects, options.samples)
        return
    for module in MODULES[options.via]:
        importlib.import_module(module)
    count = total = 0
    waited = 0.0
    began = asked = time.perf_counter()
    for batch in VIA[options.via](
        Job(options.endpoint, options.workers, options.epochs, options.cache_bytes)
    ):
        waited += time.perf_counter() - asked
        numbers = _numbers(batch)
        count, total = count + numbers.size, total + int(numbers.sum())
        time.sleep(options.step_seconds)
        asked = time.perf_counter()
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "samples": count, "sum": total, "waited": waited}))


if __name__ == "__main__":
    main()
