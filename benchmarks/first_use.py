"""How long the first batch and the first durable save take: in a cold home, and in one where kernels are compiled.

    python benchmarks/first_use.py [--rounds N] [--cache DIR] [--quick]

Each round starts new processes, in turn: a loader of JPEGs (RandomResizedCrop, RandomHorizontalFlip, ToTensor,
Normalize; batches of 32) for NumPy and for PyTorch until its first batch, and a `SnapshotStore` with the default codec
until its first save of 1 MB is durable. Wall time counts from before the process is started, interpreter and imports
included; "without torch" leaves out `import torch`, which is imported first. CPU is that of the process and of those
that it started, until it has closed what it opened and ended.

Cold: empty folders for all caches of machine code; bytecode and the page cache are warm. Warm: the cache in --cache,
which is filled first and not timed, though it says how long that takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np

LOADER = """
from penstock.loader.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor
transforms = [RandomResizedCrop(224), RandomHorizontalFlip(), ToTensor(), Normalize((.5,) * 3, (.2,) * 3)]
with {front}.Loader({images!r}, batch_size=32, epochs=1, transforms=transforms, report=None) as loader:
    next(iter(loader))
    done()
"""
PROGRAMS = {
    "penstock.Loader, first batch": "import penstock\n" + LOADER.replace("{front}", "penstock"),
    "penstock.torch.Loader, first batch": "import penstock.torch\n"
    + LOADER.replace("{front}", "penstock.torch"),
    "SnapshotStore, first save of 1 MB": """
import numpy as np
from penstock import SnapshotStore
state = {{"weight": np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)}}
with SnapshotStore({snapshots!r}, report=None) as store:
    store.save(1, state).wait()
    done()
""",
}
FRAME = """
import json, sys, time
begin = time.monotonic()
if {has_torch}:
    import torch
torch_seconds = time.monotonic() - begin
def done():
    print(json.dumps([time.monotonic(), torch_seconds]), flush=True)
"""
FILL = """
import os
from penstock.checkpoint.codecs import ours
from penstock.compiling import PARTS
from penstock.loader.transforms import compiled
for part in PARTS:
    before = sum(os.times()[:4])  # with those of the children that compile
    part.wait()
    print(f"  {part.what}: {sum(os.times()[:4]) - before:.1f} s of CPU", flush=True)
"""


def main(arguments: list[str] | None = None) -> None:
    """Time what is first, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="new processes of each kind (%(default)s)")
    parser.add_argument(
        "--cache", type=Path, help="where the warm ones find kernels (default: a temporary folder)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one cold round: shows that it runs, not how fast"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        write_images(home / "images", 64)
        temperatures = {"cold": None, "warm": options.cache or home / "cache"}
        if options.quick:
            del temperatures["warm"]
        else:
            print("compiling everything:")
            subprocess.run([sys.executable, "-c", FILL], env=environment(temperatures["warm"]), check=True)
        seen: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for number in range(1 if options.quick else options.rounds):
            for name, program in PROGRAMS.items():
                for temperature, cache in temperatures.items():
                    folder = home / f"{number}-{temperature}-{len(seen)}"
                    timed = time_one(name, program, home / "images", folder, cache or folder / "cache")
                    seen.setdefault((name, temperature), []).append(timed)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {date.today()}; medians (least to most)"
    )
    for (name, temperature), rows in seen.items():
        wall, without_torch, cpu = (
            f"{statistics.median(column):.2f} ({min(column):.2f} to {max(column):.2f})"
            for column in zip(*rows, strict=True)
        )
        print(
            f"{name}, {temperature}: {wall} s wall, {without_torch} without torch, {cpu} s CPU, {len(rows)} rounds"
        )


def write_images(folder: Path, count: int) -> None:
    """Write JPEGs of 500 x 375 pixels that follow from their number."""
    from PIL import Image

    for number in range(count):
        small = np.random.default_rng(number).integers(0, 256, (15, 20, 3), dtype=np.uint8)
        file = folder / str(number % 4) / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC).save(file)


def environment(cache: Path | None) -> dict[str, str]:
    """Return this process's, with both caches of machine code elsewhere."""
    return os.environ | {"PENSTOCK_CACHE": str(cache), "NUMBA_CACHE_DIR": f"{cache}/numba"}


def time_one(name: str, program: str, images: Path, folder: Path, cache: Path) -> tuple[float, float, float]:
    """Return the seconds of wall until it is done, the same without `import torch`, and of CPU until it has ended."""
    text = FRAME.format(has_torch="torch" in name) + program.format(
        images=str(images), snapshots=str(folder / "snapshots")
    )
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", text], env=environment(cache), stdout=subprocess.PIPE)
    assert process.stdout is not None
    done, torch_seconds = json.loads(process.stdout.readline())
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{name} failed"
    return done - begin, done - begin - torch_seconds, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
