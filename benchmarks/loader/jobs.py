"""Jobs of a host that share what they read (share="jobs"), beside each for itself: reads of the store, time, processor.

    make bench NAME=loader/jobs                 # about a minute; ARGS="--rounds 5" for more

The store (`SlowSource`): 10 ms a read, which overlap. Samples of 100 KB of which nothing is computed, batches of 32,
3 epochs; a step is a sleep. Each job is a process; they start together, or one after the other by a third of a run. The
first of them runs alone, then four of them without and with share="jobs", in turn. Printed: reads of the store of all
jobs, beside those of one; how long the last took; processor seconds of all. Wanted: 1.1 times the reads of one job. The
ids and bytes of all batches are compared with those of the job alone, by their checksums.

Then the same with pictures (RandomResizedCrop 224, flip) and keep="decoded": how many are decoded, too.

--quick: few samples, one round; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from make_images import draw_images

from penstock.loader import Loader
from penstock.loader.pictures import WholePictures
from penstock.loader.transforms import DecodeRaw, RandomHorizontalFlip, RandomResizedCrop
from penstock.measure.slow_source import SlowSource
from penstock.store import FlatFolder

NBYTES, BATCH, EPOCHS, JOBS, WANTED = 98_304, 32, 3, 4, 1.1
LATENCY_SECONDS, WIRE_BYTES_PER_SECOND, STEP_SECONDS = 10e-3, 200e6, 0.05


class CountedStore(SlowSource):
    """A slow store that counts its reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FlatFolder(folder, extensions=None), 0.0, LATENCY_SECONDS, WIRE_BYTES_PER_SECOND)
        self.fingerprint = str(folder)
        self.reads = 0
        self._lock = threading.Lock()

    def read_into(self, sample: int, buffer: memoryview) -> int:
        with self._lock:
            self.reads += 1
        return super().read_into(sample, buffer)


#: Batches of a job that may be ahead of its training, about, hold so many pictures decoded to floats.
BATCH_BYTES = 3 * 224 * 224 * 4 * BATCH


def job(folder: Path, share: str | None, step_seconds: float, *, is_pictures: bool) -> None:
    """Train, and print what it took."""
    store, value, decoded = CountedStore(folder), 0, list[int]()
    decode: Any = WholePictures.decode

    def counted(pictures: WholePictures, *arguments: Any) -> bool:
        decoded.append(1)
        return bool(decode(pictures, *arguments))

    WholePictures.decode = counted  # type: ignore[assignment, method-assign]
    how: dict[str, Any]
    each_bytes, how = NBYTES, {"transforms": [DecodeRaw("uint8", (NBYTES,))]}
    if is_pictures:
        how = {"transforms": [RandomResizedCrop(224), RandomHorizontalFlip()], "keep": "decoded"}
        each_bytes = 12 * NBYTES
    begin = time.perf_counter()
    with Loader(
        store,
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=3,
        memory=len(store) * each_bytes + 16 * BATCH_BYTES + (256 << 20),
        dtype="uint8",
        share=share,
        report=None,
        **how,
    ) as loader:
        for _ in range(EPOCHS):
            for rows, labels in loader:
                flat = rows.reshape(len(rows), -1)[:, ::512]
                value = zlib.crc32(labels.tobytes(), zlib.crc32(flat.tobytes(), value))
                time.sleep(step_seconds)
    seconds, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    store.close()
    processor = used.ru_utime + used.ru_stime
    found = {"seconds": seconds, "processor": processor, "value": value, "decoded": len(decoded)}
    print(json.dumps({"reads": store.reads, **found}))


def run(
    folder: Path, count: int, share: str | None, step_seconds: float, apart_seconds: float, what: str
) -> list[dict[str, float]]:
    """Return what each of some jobs took."""
    started = []
    for number in range(count):
        if number:
            time.sleep(apart_seconds)
        words = [sys.executable, __file__, "--job", str(folder), share or "none", str(step_seconds), what]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
    answers = [process.communicate()[0] for process in started]
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def compare(folder: Path, rounds: int, step_seconds: float, what: str) -> None:
    """Have one job and four train in turn, and print what they took. what: "rows" or "pictures"."""
    results: dict[str, list[list[dict[str, float]]]] = {}
    for _ in range(rounds):
        alone = run(folder, 1, None, step_seconds, 0.0, what)
        apart = alone[0]["seconds"] / 3
        for name, found in (
            ("one job", alone),
            ("four jobs", run(folder, JOBS, None, step_seconds, 0.0, what)),
            ("four that share", run(folder, JOBS, "jobs", step_seconds, 0.0, what)),
            ("four that share, apart", run(folder, JOBS, "jobs", step_seconds, apart, what)),
        ):
            assert {each["value"] for each in found} == {alone[0]["value"]}, "other batches"
            results.setdefault(name, []).append(found)
    one = statistics.median(found[0]["reads"] for found in results["one job"])
    for name, rounds_of in results.items():
        reads = [sum(each["reads"] for each in found) for found in rounds_of]
        decoded = statistics.median(sum(each["decoded"] for each in found) for found in rounds_of)
        seconds = statistics.median(max(each["seconds"] for each in found) for found in rounds_of)
        processor = statistics.median(sum(each["processor"] for each in found) for found in rounds_of)
        also = f"{decoded:6.0f} pictures decoded; " if what == "pictures" else ""
        print(
            f"{name:24}{statistics.median(reads):7.0f} reads ({min(reads):.0f} to {max(reads):.0f}), "
            f"{statistics.median(reads) / one:5.2f} of one job's (wanted {WANTED}); {also}{seconds:6.2f} s, "
            f"{processor:6.2f} s of processors"
        )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.job:
        folder, share, step, what = options.job
        shared = None if share == "none" else share
        job(Path(folder), shared, float(step), is_pictures=what == "pictures")
        return
    samples, rounds, step_seconds = (
        (96, 1, 0.005) if options.quick else (options.samples, options.rounds, STEP_SECONDS)
    )
    with tempfile.TemporaryDirectory() as place:
        folder, draw = Path(place, "rows"), np.random.default_rng(0)
        folder.mkdir()
        for sample in range(samples):
            (folder / f"{sample:05}.bin").write_bytes(draw.bytes(NBYTES))
        compare(folder, rounds, step_seconds, "rows")
        draw_images(Path(place, "pictures"), samples, 400, 500, labels=1)
        print("pictures, decoded:")
        compare(Path(place, "pictures", "label0"), rounds, step_seconds, "pictures")


if __name__ == "__main__":
    main()
