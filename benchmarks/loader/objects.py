"""An epoch of samples of 100 KB in a full shuffle from an object store on loopback: which share of its link is used.

    python benchmarks/loader/objects.py                      # every peer that is installed, in turn, three rounds
    python benchmarks/loader/objects.py --latency 0.05 --rate 250e6 --only penstock

The store (object_store.py) answers after `--latency`, and all answers share a link of `--rate`. Its own limit, without
either, is measured first: it has to be well above the link, or it is the store that is measured.

penstock reads ranges of 64 objects of records. LitData and Streaming read shards of 16 MiB of the same samples, which
they load as a whole into an empty cache on disk, and shuffle within some of them; s3torchconnector reads an object for
each sample. Each is run with several numbers of workers. Their environment is PEERS: a venv with litdata,
mosaicml-streaming and s3torchconnector, those that can be had. What is imported is so before the clock starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: As in peer_objects.py.
SAMPLE_BYTES, BATCH = 100_000, 64
VIA = ["penstock", "litdata", "streaming", "s3torch"]

HERE = Path(__file__).parent
PEERS = Path(os.environ.get("PEERS", HERE.parent / ".cache" / "objects")) / "bin" / "python"


@contextlib.contextmanager
def serving(options: argparse.Namespace, folder: Path, latency: float, rate: float) -> Iterator[str]:
    """Serve the objects in a process while the context is open; yield where."""
    sizes = ["--objects", str(options.objects), "--samples", str(options.samples)]
    command = [sys.executable, str(HERE / "object_store.py"), "--latency", str(latency), "--rate", str(rate)]
    with subprocess.Popen(
        [*command, *sizes, "--folder", str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().split()[-1]}"
        finally:
            process.terminate()


def run(via: str, endpoint: str, workers: int, options: argparse.Namespace) -> float:
    """Return bytes a second of an epoch. Raises: RuntimeError if a peer fails, or delivers other samples."""
    python = sys.executable if via in ("penstock", "bare") else str(PEERS)
    sizes = ["--objects", str(options.objects), "--samples", str(options.samples)]
    command = [python, str(HERE / "peer_objects.py"), "--via", via, "--endpoint", endpoint]
    done = subprocess.run(
        [*command, "--workers", str(workers), *sizes], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{via}: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    count = options.objects * options.samples
    if (found["samples"], found["sum"]) != (count, count * (count - 1) // 2):
        raise RuntimeError(f"{via} delivered {found}, and there are {count} samples")
    return float(count * SAMPLE_BYTES / found["seconds"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--rate", type=float, default=125e6)
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--samples", type=int, default=160, help="in each object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--only", nargs="+", default=VIA)
    parser.add_argument(
        "--quick", action="store_true", help="a few samples: shows that it runs, not how fast"
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.objects, options.samples, options.rounds, options.only = 2, 64, 1, ["penstock"]
    count = options.objects * options.samples
    print(
        f"{count:,} samples of 100 KB, batches of {BATCH}, one epoch from the first request to the last "
        f"batch; {options.latency * 1e3:g} ms a request, a link of {options.rate / 1e6:g} MB/s; "
        f"{os.cpu_count()} processors"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if PEERS.exists() and not options.quick:
            sizes = ["--objects", str(options.objects), "--samples", str(options.samples)]
            subprocess.run([str(PEERS), str(HERE / "peer_objects.py"), "--write", name, *sizes], check=True)
        with serving(options, folder, 0.0, 1e12) as endpoint:
            limit = max(run("bare", endpoint, 0, options) for _ in range(1 if options.quick else 3))
        print(f"the store without latency and link, read by bare requests of obstore: {limit / 1e6:.0f} MB/s")
        found: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        with serving(options, folder, options.latency, options.rate) as endpoint:
            for _ in range(options.rounds):
                for via in options.only:
                    for workers in [0] if via == "penstock" else options.workers:
                        label = via if via == "penstock" else f"{via}, {workers} workers"
                        try:
                            found.setdefault(label, []).append(run(via, endpoint, workers, options))
                        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                            failed[label] = str(error)[:200]
    for label, rates in found.items():
        if rates:
            shares = [100 * rate / options.rate for rate in rates]
            spread = f"{min(shares):.0f} to {max(shares):.0f}"
            median = f"{statistics.median(rates) / 1e6:6.1f} MB/s  {statistics.median(shares):.0f} %"
            print(f"{label:<28} {median} of the link ({spread})")
    for label, why in failed.items():
        print(f"{label:<28} could not be run: {why}")


if __name__ == "__main__":
    main()
