"""A source that counts how often it is read, and what one rank of a job of two processes does with it."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.policy import Scheduler
from penstock.ranks import Ranks
from penstock.ranks.transport_store import StoreTransport

SAMPLE_BYTES = 64


class Counted:
    """Samples whose bytes follow from their ids."""

    classes = ()
    fingerprint = "counted"

    def __init__(self, samples: int) -> None:
        self.sizes_bytes = np.full(samples, SAMPLE_BYTES)
        self.labels = np.arange(samples)
        #: How often each was read.
        self.reads = np.zeros(samples, np.int64)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.labels.size

    def read(self, sample: int) -> bytes:
        with self._lock:
            self.reads[sample] += 1
        return bytes(expected(np.array([sample]))[0])

    def read_into(self, sample: int, buffer: memoryview) -> int:
        buffer[:] = self.read(sample)
        return SAMPLE_BYTES

    def describe(self, sample: int) -> str:
        return f"sample {sample}"


def expected(ids: Any) -> Any:
    """Return the bytes of samples: uint8[n, SAMPLE_BYTES]."""
    return ((ids[:, None] * 7 + np.arange(SAMPLE_BYTES)) % 251).astype(np.uint8)


def write_files(folder: Path, value: int, files: int = 12) -> Path:
    """Make a folder of files with the same names and sizes as in others, whose bytes are a number."""
    folder.mkdir()
    for number in range(files):
        (folder / f"{number:02}.bin").write_bytes(bytes([value] * SAMPLE_BYTES))
    return folder


def loader(source: Any, ranks: Ranks, **options: Any) -> Loader:
    arguments: dict[str, Any] = {
        "batch_size": 32,
        "epochs": 3,
        "transforms": [DecodeRaw("uint8", (SAMPLE_BYTES,))],
        "dtype": "uint8",
        "memory": "4 MB",
        "rank": ranks.rank,
        "world_size": ranks.size,
        "share": "host",
        "report": None,
        "ranks": lambda: ranks,
        **options,
    }
    return Loader(source, **arguments)


class FolderStore:
    """A store of keys and values for `StoreTransport`, as files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")

    def set(self, key: str, value: bytes) -> None:
        begun = self._folder / f"{os.getpid()}-{threading.get_ident()}"
        begun.write_bytes(value)
        begun.rename(self._path(key))

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def delete_key(self, key: str) -> None:
        self._path(key).unlink()


def ranks_in(folder: Path, rank: int, size: int) -> Ranks:
    return Ranks(StoreTransport(FolderStore(folder), rank, size))


def main() -> None:
    """Be rank 1 of 2: give a batch for each line that comes in, as JSON: its ids, and whether its bytes are right.

    Nobody is late, as in the tests' own process. With arguments of the loader, as JSON, it is of another host.
    """
    source = Counted(int(sys.argv[2]))
    say = partial(print, flush=True)
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    of_another_host = patch("penstock.ranks.descriptors.host_id", lambda: "another host")
    with (
        patch.object(Scheduler, "waited", lambda *_: []),
        of_another_host if options else nullcontext(),
        loader(source, ranks_in(Path(sys.argv[1]), 1, 2), **options) as load,
    ):
        for _ in range(load.plan.epochs):
            for rows, ids in load:
                sys.stdin.readline()
                say(json.dumps([ids.tolist(), bool((rows == expected(ids)).all()), int(source.reads.sum())]))
