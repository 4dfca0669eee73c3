"""Faults planted in real runs are the first reasons named, and the reasons add up to what a clock outside saw."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from penstock.checkpoint import SnapshotStore
from penstock.checkpoint.tiers.local import LocalWriter
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.measure.explain import Reason, explain
from penstock.measure.recorded import read_run
from penstock.measure.slow_source import SlowSource
from penstock.ranks import alone
from penstock.store import ImageFolder

pytestmark = pytest.mark.slow

Folder = Callable[..., Path]


def timed(loader: Loader) -> Iterator[tuple[Any, float]]:
    """Yield the batches of an epoch, and how long each was waited for. What starting takes is no wait for a batch."""
    if loader.position == (0, 0):
        loader.start()
    batches = iter(loader)
    while True:
        begin = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - begin


def loader_of(source: Any, trace: Path, **how: Any) -> Loader:
    given = {"batch_size": 4, "transforms": (Resize(16), ToTensor()), "memory": "64 MiB", "decoders": 1}
    return Loader(source, trace=trace, report=None, **{**given, **how})


def cold_tier(image_folder: Folder, out: Path) -> float:
    """Memory has all samples, but from the second epoch on."""
    with (
        SlowSource(ImageFolder(image_folder(images=80)), 0.0, 20e-3, 1e9) as source,
        loader_of(source, out / "0.trace", epochs=2, readers=1) as loader,
    ):
        return sum(seconds for _ in range(2) for _, seconds in timed(loader))


class Rows:
    """A data set whose samples take the interpreter's lock a hundred times each."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, sample: int) -> Any:
        for _ in range(100):
            np.zeros(200_000).sum()
        return np.full(8, sample)


def held_lock(_image_folder: Folder, out: Path) -> float:
    """A thread of the training's computes in Python."""
    ends = threading.Event()

    def compute() -> None:
        while not ends.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    with loader_of(Rows(), out / "0.trace", epochs=1, transforms=()) as loader:
        thread.start()
        try:
            return sum(seconds for _, seconds in timed(loader))
        finally:
            ends.set()
            thread.join()


def lock_held_by_calls(image_folder: Folder, out: Path) -> float:
    """A thread of the training's is in compiled code that never releases the lock, most of the time."""
    ends = threading.Event()

    def compute() -> None:
        while not ends.wait(0.02):
            ctypes.PyDLL(None).usleep(300_000)

    thread = threading.Thread(target=compute)
    with loader_of(image_folder(images=160), out / "0.trace", epochs=1) as loader:
        thread.start()
        try:
            return sum(seconds for _, seconds in timed(loader))
        finally:
            ends.set()
            thread.join()


def few_slots(image_folder: Folder, out: Path) -> float:
    """Enough readers for the latency of the store, and memory for three batches."""
    with (
        SlowSource(ImageFolder(image_folder(images=160)), 0.0, 50e-3, 1e9) as source,
        loader_of(source, out / "0.trace", epochs=1, memory="100 KiB", readers=32) as loader,
    ):
        return sum(seconds for _, seconds in timed(loader))


def full_buffer(image_folder: Folder, out: Path) -> float:
    """The fast tier has space for one snapshot, and its drain is capped; the others go to a slow disk."""
    random = np.random.default_rng(0)
    lost, write = 0.0, LocalWriter.write

    def write_slowly(file: LocalWriter, *pieces: Any) -> None:
        if out / "slow" in file._path.parents:
            time.sleep(sum(piece.nbytes for piece in pieces) / 20e6)
        write(file, *pieces)

    with (
        loader_of(image_folder(images=48), out / "0.trace", epochs=1) as loader,
        SnapshotStore(
            out / "slow",
            fast=out / "fast",
            fast_bytes="3 MB",
            drain_bytes_per_second="1 MB/s",
            trace=loader.recorder,
            report=None,
        ) as store,
        patch.object(LocalWriter, "write", write_slowly),
    ):
        for step, (_, seconds) in enumerate(timed(loader)):
            state = {"w": random.random(1 << 18)}
            begin = time.perf_counter()
            store.save(step, state)
            lost += seconds + time.perf_counter() - begin
    return lost


def slow_rank(image_folder: Folder, out: Path) -> float:
    """Of four ranks that wait for each other at each step, one reads from far away."""
    folder = image_folder(images=160)
    together = threading.Barrier(4, timeout=60)
    waited = []

    def train(rank: int) -> None:
        with (
            SlowSource(ImageFolder(folder), 0.0, 30e-3 if rank == 2 else 0.0, 1e9) as source,
            loader_of(
                source,
                out / f"{rank}.trace",
                epochs=1,
                readers=1,
                rank=rank,
                world_size=4,
                batch_size=8,
                ranks=alone,
            ) as loader,
        ):
            for _, seconds in timed(loader):
                if rank == 2:
                    waited.append(seconds)
                together.wait()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(waited)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (cold_tier, Reason.COLD_TIER),
        (held_lock, Reason.LOCK),
        (lock_held_by_calls, Reason.LOCK),
        (few_slots, Reason.NO_FREE_SLOT),
        (full_buffer, Reason.FULL_BUFFER),
        (slow_rank, Reason.SLOW_RANK),
    ],
)
def test_a_fault_planted_in_a_real_run_is_the_first_reason_and_the_reasons_add_up(
    plant: Callable[[Folder, Path], float], reason: Reason, image_folder: Folder, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()

    lost_seconds = plant(image_folder, out)
    found = explain(read_run(out))

    assert found.first == reason, found.by_reason
    assert sum(found.by_reason.values()) == pytest.approx(lost_seconds, rel=0.05)
