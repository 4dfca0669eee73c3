"""Small samples that share files: records, windows of tokens and tar shards, beside a bare gather; and indexing a tar.

    python benchmarks/loader/records.py [--rounds N] [--samples N] [--members N] [--place DIR] [--quick]

Microseconds per sample, on the wall and of processors, medians over rounds that take turns with the least and the most;
the page cache is warm, nothing is kept in memory, every epoch is shuffled fully, batches of 256:

    records         of 4 KB, uint8
    tokens          windows of 1,024 + 1 of uint16, as stored, and as int64
    shards          members of 4 KB in ten tar files, uint8
    files           the members as files of their own
    HDF5            rows of 4 KB of an array in chunks of 16 rows; single gets: h5py asked for one row after the other,
                    in the order of an epoch, by one thread: no loader
    FFCV            the records in its own format, where set_up_peers.sh has made its environment; see peer_ffcv_rows.py
    gather          numpy.take of 4 KB rows from a memory map into one buffer (mode="clip": each copied once), in the
                    order of an epoch, by one thread: no loader; and of rows of 2 KB, as large as windows of tokens

Then the time to index a tar, per member: as TarShards does (labels read, too), by Python's tarfile, and by reading each
header and no more; for plain headers, and with the PAX header before each that WebDataset's writer makes.

Targets: a rate of 0.9 of the gather's and of 2 of FFCV's for records and tokens as stored, of 5 of the single gets' for
HDF5. Nothing else should run.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
from images import FFCV, Contender

from penstock.compiling import without_plain_forms
from penstock.flow.engine import DECISIONS
from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.store import FlatFolder, Hdf5, Records, TarShards, Tokens
from penstock.store.calls import Calls

SAMPLE_BYTES, BATCH, WINDOW, SHARDS = 4096, 256, 1024, 10
MOST_GETS = 5_000
# Of a loader's epochs: one of windows takes 10 ms, of which a single wait of a thread for the interpreter's lock may be
# half.
EPOCHS_SECONDS = 0.2
RAW: dict[str, Any] = {"transforms": [DecodeRaw("uint8", (SAMPLE_BYTES,))], "dtype": "uint8"}
#: Seconds on the wall, and of processors.
Seconds = tuple[float, float]


def write_data(place: Path, samples: int) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (samples, SAMPLE_BYTES), np.uint8)
    rows.tofile(place / "records.bin")
    rows.view("<u2").reshape(-1)[: samples * WINDOW + 1].tofile(place / "tokens.bin")
    with h5py.File(place / "rows.h5", "w") as file:
        file.create_dataset("data", data=rows, chunks=(16, SAMPLE_BYTES))
    (place / "files").mkdir()
    for number, row in enumerate(rows):
        (place / "files" / f"{number:07}.bin").write_bytes(row.tobytes())
    for shard in range(SHARDS):
        with tarfile.open(place / f"{shard}.tar", "w") as tar:
            for number in range(shard, samples, SHARDS):
                member = tarfile.TarInfo(f"{number:07}.bin")
                member.size = SAMPLE_BYTES
                tar.addfile(member, BytesIO(rows[number].tobytes()))


def write_members(file: Path, members: int, form: int) -> None:
    """Write a tar of pictures of 100 bytes and their labels."""
    with tarfile.open(file, "w", format=form) as tar:
        for number in range(members // 2):
            for name, content in (
                (f"{number:07}.jpg", bytes(100)),
                (f"{number:07}.cls", b"%d" % (number % 1000)),
            ):
                member = tarfile.TarInfo(name)
                member.size, member.mtime = len(content), 0.5 if form == tarfile.PAX_FORMAT else 0
                tar.addfile(member, BytesIO(content))


def timed(action: Callable[[], int], least_seconds: float = 0.0) -> Seconds:
    """Repeat an action for so long, or once; return the seconds for each of the samples that it says it made."""
    begin, worked, samples = time.perf_counter(), time.process_time(), action()
    while time.perf_counter() - begin < least_seconds:
        samples += action()
    return (time.perf_counter() - begin) / samples, (time.process_time() - worked) / samples


def epochs_of(
    make: Callable[[], Any], seconds: float = EPOCHS_SECONDS, **settings: Any
) -> Callable[[], Seconds]:
    """Return what times a new loader's epochs after its first for so long: it is as far ahead at the end as before."""

    def epoch(loader: Loader) -> int:
        return sum(len(batch[0] if isinstance(batch, tuple) else batch) for batch in loader)

    def run() -> Seconds:
        options: dict[str, Any] = {"batch_size": BATCH, "policy": "staging", "memory": "400 MB"}
        with Loader(make(), report=None, epochs=None, **options, **settings) as loader:
            epoch(loader)
            return timed(partial(epoch, loader), seconds)

    return run


def gather(file: Path, row_bytes: int, seconds: float) -> Seconds:
    """Time passes after the first, which the kernel has mapped the file for: as of a loader, and for as long."""
    content = np.memmap(file, np.uint8, "r")
    rows = content[: content.size // row_bytes * row_bytes].reshape(-1, row_bytes)
    order, out = np.random.default_rng(1).permutation(len(rows)), np.empty((BATCH, row_bytes), np.uint8)

    def run() -> int:
        for begin in range(0, len(rows), BATCH):
            ids = order[begin : begin + BATCH]
            # In its other modes it checks ids as it goes and copies to a buffer first: each row twice.
            np.take(rows, ids, axis=0, out=out[: ids.size], mode="clip")
        return len(rows)

    run()
    return timed(run, seconds)


def single_gets(file: Path) -> Seconds:
    """Time a pass after the first, as of a loader."""
    with h5py.File(file) as opened:
        rows = opened["data"]
        order = np.random.default_rng(1).permutation(len(rows))[:MOST_GETS].tolist()
        batch = np.empty((BATCH, SAMPLE_BYTES), np.uint8)

        def run() -> int:
            for number, index in enumerate(order):
                batch[number % BATCH] = rows[index]
            return len(order)

        run()
        return timed(run)


def walk(file: Path) -> int:
    """Read the headers of a tar and nothing of what they say but the sizes; return how many there are."""
    count, at, size = 0, 0, file.stat().st_size
    descriptor = os.open(file, os.O_RDONLY)
    while at < size and (header := os.pread(descriptor, 512, at))[0]:
        at += 512 + -(-int(header[124:135], 8) // 512) * 512
        count += 1
    os.close(descriptor)
    return count


def by_tarfile(file: Path) -> int:
    with tarfile.open(file) as tar:
        return sum(1 for _ in tar)


def indexed(file: Path) -> int:
    return 2 * len(TarShards(file, refresh="full", calls=Calls(report=lambda line: None)))


def with_spread(seconds: list[float]) -> str:
    middle, least, most = (1e6 * each for each in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


def start_ffcv(place: Path) -> Contender | None:
    """Start FFCV, and have it write its file of the records; None where it is not set up."""
    if not FFCV.exists():
        return None
    threads = str(len(os.sched_getaffinity(0)))
    options = ["--nbytes", str(SAMPLE_BYTES), "--batch", str(BATCH), "--threads", threads]
    contender = Contender(
        "FFCV", [str(FFCV), "peer_ffcv_rows.py", "--rows", str(place / "records.bin"), *options]
    )
    contender.start(place / "ffcv.log")
    return contender


def epoch_of(contender: Contender) -> Seconds:
    contender.run()
    return 1 / contender.rates[-1], contender.processor_milliseconds[-1] / 1000


def print_cases(
    cases: dict[str, Callable[[], Seconds]],
    rounds: int,
    unit: str,
    unit_bytes: int = 0,
    others: Mapping[str, int] | None = None,
) -> dict[str, list[Seconds]]:
    """Run cases in turn; print what each takes, and its rate where a unit has bytes: so many, or by `others`."""
    found: dict[str, list[Seconds]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(case())
    rates = f"{unit + 's/s':>14}{'MiB/s':>10}" if unit_bytes else ""
    print(f"\n{'us per ' + unit:<28}{'wall':>26}{'CPU':>26}{rates}")
    for name, each in found.items():
        wall, cpu = (with_spread([pair[which] for pair in each]) for which in range(2))
        rate = 1 / statistics.median(pair[0] for pair in each)
        nbytes = (others or {}).get(name, unit_bytes)
        rates = f"{rate:>14,.0f}{rate * nbytes / 2**20:>10,.0f}" if unit_bytes else ""
        print(f"{name:<28}{wall:>26}{cpu:>26}{rates}")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--members", type=int, default=200_000, help="of the tars that are indexed")
    parser.add_argument(
        "--place", type=Path, help="an existing folder for the files (of the system's temporary)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few samples, one round, without FFCV: shows that it runs"
    )
    options = parser.parse_args(arguments)
    rounds, samples, members = (
        (1, 1024, 400) if options.quick else (options.rounds, options.samples, options.members)
    )
    seconds = 0.0 if options.quick else EPOCHS_SECONDS
    print(
        f"{date.today()}  {platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, NumPy {np.__version__}; {samples:,} samples, {members:,} members"
    )
    with (
        tempfile.TemporaryDirectory(prefix="penstock-records-", dir=options.place) as folder,
        without_plain_forms(),
    ):
        place = Path(folder)
        write_data(place, samples)
        DECISIONS.ask()  # else a worker of the first loader waits for the compiler, perhaps in an epoch that is timed
        tokens = partial(Tokens, place / "tokens.bin", length=WINDOW, dtype="<u2")
        cases: dict[str, Callable[[], Seconds]] = {
            "records": epochs_of(partial(Records, place / "records.bin", "u1", SAMPLE_BYTES), seconds),
            "tokens, as stored": epochs_of(tokens, seconds, dtype="uint16"),
            "tokens, int64": epochs_of(tokens, seconds),
            "shards": epochs_of(partial(TarShards, place / "*.tar", member="bin"), seconds, **RAW),
            "files": epochs_of(partial(FlatFolder, place / "files", extensions=None), seconds, **RAW),
            "HDF5": epochs_of(partial(Hdf5, place / "rows.h5"), seconds),
            "HDF5, single gets": lambda: single_gets(place / "rows.h5"),
            "gather": lambda: gather(place / "records.bin", SAMPLE_BYTES, seconds),
            "gather of 2 KB": lambda: gather(place / "tokens.bin", 2 * WINDOW, seconds),
        }
        if ffcv := None if options.quick else start_ffcv(place):
            cases["FFCV"] = partial(epoch_of, ffcv)
        try:
            windows = dict.fromkeys(("tokens, as stored", "tokens, int64"), 2 * (WINDOW + 1))
            found = print_cases(
                cases, rounds, "sample", SAMPLE_BYTES, windows | {"gather of 2 KB": 2 * WINDOW}
            )
        finally:
            if ffcv:
                ffcv.stop()
        for ours, other, wanted in (
            ("records", "gather", 0.9),
            ("tokens, as stored", "gather of 2 KB", 0.9),
            ("records", "FFCV", 2),
            ("tokens, as stored", "FFCV", 2),
            ("HDF5", "HDF5, single gets", 5),
        ):
            if other in found:
                pairs = zip(found[ours], found[other], strict=True)
                ratios = [theirs[0] / mine[0] for mine, theirs in pairs]
                print(
                    f"rate of {ours}, of {other}: {statistics.median(ratios):.2f} "
                    f"({min(ratios):.2f} to {max(ratios):.2f}), wanted {wanted}"
                )
        for what, form in (("plain", tarfile.USTAR_FORMAT), ("with PAX headers", tarfile.PAX_FORMAT)):
            file = place / "index" / f"{form}.tar"
            file.parent.mkdir(exist_ok=True)
            write_members(file, members, form)
            ways = {"indexed": indexed, "tarfile": by_tarfile, "headers alone": walk}
            print_cases(
                {f"{name}, {what}": partial(timed, partial(way, file)) for name, way in ways.items()},
                rounds,
                "member",
            )


if __name__ == "__main__":
    main()
