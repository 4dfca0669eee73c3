"""How long it takes to list a data set of many files, to open it again, and until a loader has its first batch.

    python benchmarks/catalog.py [--files N] [--folders N] [--rounds N] [--place DIR] [--quick]

Makes N files of 1 byte in so many folders, then, in turn: `find -printf '%s'` over them; the first listing (every
folder and size asked for, the catalog written), by the compiled loop and by Python alone; opening with the catalog
(refresh="auto" asks for each folder's times, "never" for nothing); and new processes that make a loader with the
catalog kept and take its first batch, with the time that imports took: of the run, and of one that resumes at the last
step of epoch 89. Prints the median with the least and the most, and ratios to find of the same round; and what a call
of the loader's `state_dict` takes.

The kernel knows all names and sizes: a first `find` is not counted. The files are removed at the end.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

from penstock.cache_folders import Folders
from penstock.store import Source, catalogs, listing, open_source
from penstock.store.calls import Calls

#: Prints the seconds of imports, those of a loader until its first batch of an epoch, and those of a `state_dict`.
FIRST_BATCH = """
import sys, time, timeit
begin = time.perf_counter()
from pathlib import Path
from penstock.cache_folders import Folders
from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.store import catalogs
kept = Path(sys.argv[2])
catalogs._folders = lambda: Folders((kept,), kept, "")
catalogs.LEAST_SAMPLES = 1
made = time.perf_counter()
settings = {"transforms": [DecodeRaw("uint8", (1,))], "dtype": "uint8", "report": None}
with Loader(sys.argv[1], batch_size=64, epochs=100, seed=0, **settings) as loader:
    if epoch := int(sys.argv[3]):
        loader.load_state_dict(loader.state_at(epoch, len(loader) - 1))
    batches, where = iter(loader), loader.position
    next(batches)
    first = time.perf_counter() - made
    assert where == (epoch, len(loader) - 1 if epoch else 0)
    print(made - begin, first, timeit.timeit(loader.state_dict, number=1000) / 1000)
"""


def make_files(root: Path, files: int, folders: int) -> None:
    for folder in range(folders):
        place = root / f"n{folder:08d}"
        place.mkdir()
        descriptor = os.open(place, os.O_RDONLY)
        for number in range(folder, files, folders):
            flags = os.O_CREAT | os.O_WRONLY
            file = os.open(f"{place.name}_{number:07d}.JPEG", flags, 0o644, dir_fd=descriptor)
            os.write(file, b"x")
            os.close(file)
        os.close(descriptor)


def find(root: Path) -> int:
    found = subprocess.run(
        ["find", str(root), "-type", "f", "-printf", "%s\n"], stdout=subprocess.PIPE, check=True
    )
    return sum(map(int, found.stdout.split()))


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def opened(root: Path, refresh: listing.Refresh) -> Source:
    return open_source(root, refresh=refresh, calls=Calls(report=lambda line: None))


def plainly(root: Path) -> Source:
    before, listing._LEAST_COMPILED = listing._LEAST_COMPILED, sys.maxsize
    try:
        return opened(root, "full")
    finally:
        listing._LEAST_COMPILED = before


def first_batch(root: Path, kept: Path, epoch: int) -> tuple[float, float, float]:
    printed = subprocess.run(
        [sys.executable, "-c", FIRST_BATCH, str(root), str(kept), str(epoch)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    imports, batch, state = map(float, printed.stdout.split())
    return imports, batch, state


def measure(root: Path, kept: Path, files: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by what took them."""
    cases: dict[str, Callable[[], object]] = {
        "find": lambda: find(root),
        "first listing": lambda: opened(root, "full"),
        "first listing, Python alone": lambda: plainly(root),
        'opened again, "auto"': lambda: opened(root, "auto"),
        'opened again, "never"': lambda: opened(root, "never"),
    }
    assert find(root) == files == int(plainly(root).sizes_bytes.sum()), "the files are there"
    listing.STAT_FILES.wait()
    listing._LEAST_COMPILED = 0
    assert opened(root, "full").sizes_bytes.tolist() == [1] * files, "the loop finds all sizes"
    first_batch(root, kept, 0)  # what is compiled once on a machine
    found: dict[str, list[float]] = {name: [] for name in cases}
    found |= {"imports": [], "first batch": [], "first batch, at epoch 89": [], "state_dict": []}
    for _ in range(rounds):
        for name, action in cases.items():
            found[name].append(timed(action))
        imports, batch, state = first_batch(root, kept, 0)
        resumed = first_batch(root, kept, 89)[1]
        for name, seconds in zip(list(found)[-4:], (imports, batch, resumed, state), strict=True):
            found[name].append(seconds)
    return found


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1_300_000)
    parser.add_argument("--folders", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--place", type=Path, help="where the files are made (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="few files, one round")
    options = parser.parse_args(words)
    files, folders, rounds = (
        (600, 3, 1) if options.quick else (options.files, options.folders, options.rounds)
    )
    place = Path(tempfile.mkdtemp(prefix="penstock-catalog-", dir=options.place))
    before = catalogs._folders, catalogs.LEAST_SAMPLES, listing._LEAST_COMPILED
    try:
        root, kept = place / "data", place / "kept"
        root.mkdir()
        kept.mkdir()
        catalogs._folders, catalogs.LEAST_SAMPLES = (lambda: Folders((kept,), kept, "")), 1
        make_files(root, files, folders)
        found = measure(root, kept, files, rounds)
        nbytes = sum(file.stat().st_size for file in kept.iterdir())
    finally:
        catalogs._folders, catalogs.LEAST_SAMPLES, listing._LEAST_COMPILED = before
        shutil.rmtree(place)
    print(
        f"{files:,} files in {folders:,} folders, catalog {nbytes:,} bytes; {os.cpu_count()} processors, "
        f"{platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}, {date.today()}"
    )
    microseconds = [1e6 * seconds for seconds in found.pop("state_dict")]
    for name, seconds in found.items():
        ratios = [one / other for one, other in zip(seconds, found["find"], strict=True)]
        print(
            f"{name:28} {statistics.median(seconds):8.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
            f"{statistics.median(ratios):5.2f} of find ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(
        f"{'state_dict':28} {statistics.median(microseconds):8.1f} us "
        f"({min(microseconds):.1f} to {max(microseconds):.1f})"
    )


if __name__ == "__main__":
    main()
