"""Samples of 10 KiB in tables (HDF5, Parquet, Arrow), MDS shards and TFRecord files, beside what else reads them.

    sh benchmarks/loader/set_up_peers.sh         # once: streaming, tfrecord and litdata, in an environment of their own
    python benchmarks/loader/tables.py [--rounds N] [--samples N] [--place DIR] [--peers PYTHON] [--quick]

Microseconds per sample, on the wall and of processors, medians over rounds that take turns with the least and the most;
the page cache is warm, the loader keeps nothing in memory, batches of 256 without labels:

    HDF5            rows of an array in chunks of 16, and the same with gzip in chunks of 64
    Parquet         a column of bytes in row groups of 256
    Arrow, table    the same column as Hugging Face's datasets keeps it: its file, and the table that it maps
    all in memory   decoded chunks or row groups have space for all of them, so that an epoch decodes none
    a tenth         they have space for a tenth of them; shuffled fully, and in bundles of a twentieth
    single gets     h5py asked for a row, pyarrow for the row group of a row, one after the other in the order of an
                    epoch, by one thread: no loader
    datasets        a datasets.Dataset, which copies the Parquet file to an Arrow file first and maps that, shuffled
                    by PyTorch's DataLoader
    streaming, tfrecord, litdata   MosaicML's StreamingDataset, the package tfrecord and LitData's StreamingDataset,
                    over files that they wrote, with the DataLoader (LitData with its own); streaming shuffles fully,
                    tfrecord through a buffer of 1,000, LitData within chunks of 64 MB that it has at a time
    limit           what no loader of one thread can exceed: NumPy copies the rows of an array in the page cache to
                    batches, in the order of an epoch

Rates stand beside, in samples and MiB a second. Half of the bytes of a sample are random. Targets: a rate of 5 of the
single gets' for HDF5 and Parquet; above that of datasets, shuffled fully and in bundles; above those of streaming,
tfrecord and litdata. Nothing else should run.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
from images import Contender
from peer_protocol import CACHE
from pyarrow import parquet as pq
from records import BATCH, EPOCHS_SECONDS, Seconds, epoch_of, epochs_of, gather, print_cases, timed

from penstock.compiling import without_plain_forms
from penstock.flow.engine import DECISIONS
from penstock.loader.transforms import DecodeRaw
from penstock.plan import BundleShuffle
from penstock.store import ArrowFiles, ArrowTable, Hdf5, LitDataChunks, MosaicShards, ParquetFiles, TFRecords

SAMPLE_BYTES, GROUP = 10_240, 256
MOST_GETS = 1_000
RAW: dict[str, Any] = {"transforms": [DecodeRaw("uint8", (SAMPLE_BYTES,))], "dtype": "uint8"}
PEERS = CACHE / "tables" / "bin" / "python"


def write_data(place: Path, samples: int) -> None:
    rows = np.zeros((samples, SAMPLE_BYTES), np.uint8)
    rows[:, ::2] = np.random.default_rng(0).integers(0, 256, (samples, SAMPLE_BYTES // 2), np.uint8)
    np.save(place / "rows.npy", rows)
    for name, how in (
        ("plain", {"chunks": (16, SAMPLE_BYTES)}),
        ("gzip", {"chunks": (64, SAMPLE_BYTES), "compression": "gzip"}),
    ):
        with h5py.File(place / f"{name}.h5", "w") as file:
            file.create_dataset("data", data=rows, **how)
    table = pa.table({"image": pa.array([row.tobytes() for row in rows], pa.binary())})
    pq.write_table(table, place / "rows.parquet", row_group_size=GROUP, use_dictionary=False)
    with pa.OSFile(str(place / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table, max_chunksize=1000)


def single_gets(samples: int, opened: Callable[[], Any], get: Callable[[Any, int], Any]) -> Seconds:
    """Ask for one row after the other in the order of an epoch."""
    rows = opened()
    order = np.random.default_rng(1).permutation(samples)[:MOST_GETS].tolist()

    def run() -> int:
        for index in order:
            get(rows, index)
        return len(order)

    return timed(run)


def row_of_parquet(file: Any, index: int) -> bytes:
    group = file.read_row_group(index // GROUP, columns=["image"], use_threads=False)
    return bytes(group.column(0)[index % GROUP].as_py())


def table_of(file: Path) -> ArrowTable:
    """Return what a datasets.Dataset has: the table of a file that is mapped."""
    return ArrowTable(pa.ipc.open_stream(pa.memory_map(str(file))).read_all())


def cases_of(place: Path, samples: int) -> dict[str, Callable[[], Seconds]]:
    """Return Penstock's cases and the single gets."""
    tenth = f"{samples * SAMPLE_BYTES // 10} B"
    bundles = BundleShuffle(samples, seed=0, bundle_ratio=0.05)
    gzip, parquet = place / "gzip.h5", place / "rows.parquet"
    plain = partial(h5py.File, place / "plain.h5")
    return {
        "HDF5": epochs_of(partial(Hdf5, place / "plain.h5")),
        "HDF5, single gets": lambda: single_gets(samples, lambda: plain()["data"], lambda a, k: a[k]),
        "gzip, all in memory": epochs_of(partial(Hdf5, gzip)),
        "gzip, a tenth": epochs_of(partial(Hdf5, gzip, memory=tenth)),
        "gzip, a tenth, bundles": epochs_of(partial(Hdf5, gzip, memory=tenth), shuffle=bundles),
        "gzip, single gets": lambda: single_gets(samples, lambda: h5py.File(gzip)["data"], lambda a, k: a[k]),
        "Parquet, all in memory": epochs_of(partial(ParquetFiles, parquet), **RAW),
        "Parquet, a tenth": epochs_of(partial(ParquetFiles, parquet, memory=tenth), **RAW),
        "Parquet, a tenth, bundles": epochs_of(
            partial(ParquetFiles, parquet, memory=tenth), shuffle=bundles, **RAW
        ),
        "Parquet, single gets": lambda: single_gets(samples, lambda: pq.ParquetFile(parquet), row_of_parquet),
        "Arrow": epochs_of(partial(ArrowFiles, place / "rows.arrow"), **RAW),
        "table": epochs_of(partial(table_of, place / "rows.arrow"), **RAW),
        # What stands before its rows is as short as to move them by a few bytes.
        "limit": lambda: gather(place / "rows.npy", SAMPLE_BYTES, EPOCHS_SECONDS),
    }


def start_peers(place: Path, peers: Path, workers: list[int]) -> dict[str, Contender]:
    """Start what else reads such data, and have it write the files of its own."""
    found = {}
    pythons = {"datasets": Path(sys.executable), **dict.fromkeys(("streaming", "tfrecord", "litdata"), peers)}
    for via, python in pythons.items():
        for count in workers if python.exists() else []:
            name = f"{via}, {count} workers"
            options = ["--via", via, "--place", str(place), "--workers", str(count), "--batch", str(BATCH)]
            contender = Contender(name, [str(python), "peer_tables.py", *options])
            log = place / f"{name}.log"
            try:
                contender.start(log)
            except SystemExit:
                contender.stop()
                print(
                    f"{name} left out, as it did not start: {log.read_text().strip().rpartition(chr(10))[2]}"
                )
            else:
                found[name] = contender
    return found


def print_ratios(found: dict[str, list[Seconds]], peers: dict[str, Contender]) -> None:
    comparisons = [
        ("HDF5", "HDF5, single gets", 5),
        ("gzip, all in memory", "gzip, single gets", 5),
        ("gzip, a tenth", "gzip, single gets", None),
        ("gzip, a tenth, bundles", "gzip, single gets", 5),
        ("Parquet, all in memory", "Parquet, single gets", 5),
        ("Parquet, a tenth", "Parquet, single gets", None),
        ("Parquet, a tenth, bundles", "Parquet, single gets", 5),
    ]
    for peer in peers:
        via = peer.partition(",")[0]
        ours = {"streaming": ["MDS"], "tfrecord": ["TFRecord"], "litdata": ["LitData"]}.get(
            via, ["Parquet, all in memory", "Parquet, a tenth", "Parquet, a tenth, bundles", "Arrow", "table"]
        )
        comparisons += [(each, peer, 1) for each in ours]
    for mine, other, wanted in comparisons:
        ratios = [theirs[0] / own[0] for own, theirs in zip(found[mine], found[other], strict=True)]
        aim = "" if wanted is None else f", wanted {wanted}"
        print(
            f"rate of {mine}, of {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}){aim}"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=20_480)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, len(os.sched_getaffinity(0))])
    parser.add_argument("--place", type=Path, help="an existing folder for the files")
    parser.add_argument(
        "--peers", type=Path, default=PEERS, help="Python that has streaming, tfrecord and litdata"
    )
    parser.add_argument("--quick", action="store_true", help="few samples, one round: shows that it runs")
    options = parser.parse_args(arguments)
    rounds, samples = (1, 2560) if options.quick else (options.rounds, options.samples)
    workers = [0] if options.quick else options.workers
    print(
        f"{date.today()}  {platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, pyarrow {pa.__version__}, h5py {h5py.__version__}; {samples:,} samples"
    )
    with (
        tempfile.TemporaryDirectory(prefix="penstock-tables-", dir=options.place) as folder,
        without_plain_forms(),
    ):
        place = Path(folder)
        write_data(place, samples)
        DECISIONS.ask()  # else a worker of the first loader waits for the compiler, in an epoch that is timed
        cases, peers = cases_of(place, samples), start_peers(place, options.peers, workers)
        written: tuple[tuple[str, Any, str], ...] = (
            ("MDS", MosaicShards, "mds"),
            ("TFRecord", TFRecords, "rows.tfrecord"),
            ("LitData", LitDataChunks, "litdata"),
        )
        for name, opener, file in written:
            if (place / file).exists():
                cases[name] = epochs_of(partial(opener, place / file), **RAW)
        try:
            cases |= {name: partial(epoch_of, peer) for name, peer in peers.items()}
            print_ratios(print_cases(cases, rounds, "sample", SAMPLE_BYTES), peers)
        finally:
            for peer in peers.values():
                peer.stop()


if __name__ == "__main__":
    main()
