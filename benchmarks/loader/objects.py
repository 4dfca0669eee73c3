"""An epoch of samples of 100 KB in a full shuffle from an object store on loopback: which share of its link is used.

    python benchmarks/loader/objects.py                      # every peer that is installed, in turn, three rounds
    python benchmarks/loader/objects.py --latency 0.05 --rate 250e6 --only penstock
    python benchmarks/loader/objects.py --cache 0.67 1 --latency 0.01 --rate 50e6 --objects 24 --samples 100 --workers 4

The store (object_store.py) answers after `--latency`, and all answers share a link of `--rate`. Its own limit, without
either, is measured first: it has to be well above the link, or it is the store that is measured.

penstock reads ranges of 64 objects of records. LitData and Streaming read shards of 16 MiB of the same samples, which
they load as a whole into an empty cache on disk, and shuffle within some of them; s3torchconnector reads an object for
each sample. Each is run with several numbers of workers.

With `--cache`, three epochs with steps of a sleep, and what is kept for later ones bounded to shares of the data: by
LitData in its cache on disk, by Penstock half in memory and half on a local disk. What comes from the
store is shown as a multiple of the data beside the fewest that is possible, E - (E - 1) C, and how long the training
waited. What is left out there says why (LEFT_OUT).

The peers' environment is PEERS, else the one that set_up_peers.sh makes for tables: it has litdata, mosaicml-streaming
and s3torchconnector.
What is imported is so before the clock starts.
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
import urllib.request
from collections.abc import Iterator
from pathlib import Path

#: As in peer_objects.py.
SAMPLE_BYTES, BATCH = 100_000, 64
VIA = ["penstock", "litdata", "streaming", "s3torch"]
#: Of `--cache`: a step of 64 samples takes as long as the link takes for 100.
EPOCHS, STEP_SECONDS = 3, 0.2
#: What has no figures with `--cache`, and why. Streaming 0.13 failed in one run of two, with a limit of its cache and
#: without one; the cause was not found. Its shards are right where it wrote them, and so are copies that boto3 makes of
#: them from this store.
LEFT_OUT = {
    "s3torch": "it keeps nothing for later epochs",
    "streaming": "version 0.13 gave other bytes than its shards have, or ended with an IndexError, in one run of two",
}

HERE = Path(__file__).parent
PEERS = Path(os.environ.get("PEERS", HERE.parent / ".cache" / "tables")) / "bin" / "python"


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


def run(via: str, endpoint: str, workers: int, options: argparse.Namespace, *more: str) -> dict[str, float]:
    """Return what `peer_objects` prints. more: of its options. Raises: RuntimeError if a peer fails, or delivers other
    samples.
    """
    python = sys.executable if via in ("penstock", "bare") else str(PEERS)
    sizes = ["--objects", str(options.objects), "--samples", str(options.samples)]
    command = [python, str(HERE / "peer_objects.py"), "--via", via, "--endpoint", endpoint]
    done = subprocess.run(
        [*command, "--workers", str(workers), *sizes, *more], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{via}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    count, epochs = options.objects * options.samples, EPOCHS if more else 1
    if (found["samples"], found["sum"]) != (epochs * count, epochs * count * (count - 1) // 2):
        raise RuntimeError(f"{via} delivered {found}, and there are {count} samples")
    return found


def rate_of(via: str, endpoint: str, workers: int, options: argparse.Namespace) -> float:
    """Return bytes a second of an epoch. Raises: as `run`."""
    nbytes = options.objects * options.samples * SAMPLE_BYTES
    return float(nbytes / run(via, endpoint, workers, options)["seconds"])


def caches(endpoint: str, options: argparse.Namespace) -> None:
    """Print what comes from the store, and what the training waits, by how much may be kept."""
    data_bytes = options.objects * options.samples * SAMPLE_BYTES
    for share in options.cache:
        more = ["--epochs", str(EPOCHS), "--cache-bytes", str(int(share * data_bytes))]
        for via in options.only:
            if via in LEFT_OUT:
                print(f"{via:<10} has no figures: {LEFT_OUT[via]}")
                continue
            found = list[tuple[float, float]]()
            for _ in range(options.rounds):
                served(endpoint)
                workers = options.workers[0]
                try:
                    ran = run(via, endpoint, workers, options, *more, "--step-seconds", str(STEP_SECONDS))
                except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                    print(f"{via:<10} could not be run: {str(error)[:200]}")
                    break
                found.append((served(endpoint) / data_bytes, ran["waited"]))
            if found:
                read, waited = (statistics.median(each) for each in zip(*found, strict=True))
                print(
                    f"{via:<10} keeps {share:.0%}: reads {read:.2f} of the data in {EPOCHS} epochs, bound "
                    f"{EPOCHS - (EPOCHS - 1) * min(share, 1):.2f}; waited {waited:.1f} s"
                )


def served(endpoint: str) -> int:
    """Return the bytes that the store has sent since this was asked last."""
    with urllib.request.urlopen(f"{endpoint}/statistics") as answer:
        return int(answer.read().split()[-1])


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
    parser.add_argument("--cache", type=float, nargs="+", help="shares of the data that may be kept")
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
            limit = max(rate_of("bare", endpoint, 0, options) for _ in range(1 if options.quick else 3))
        print(f"the store without latency and link, read by bare requests of obstore: {limit / 1e6:.0f} MB/s")
        found: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        with serving(options, folder, options.latency, options.rate) as endpoint:
            if options.cache:
                caches(endpoint, options)
                return
            for _ in range(options.rounds):
                for via in options.only:
                    for workers in [0] if via == "penstock" else options.workers:
                        label = via if via == "penstock" else f"{via}, {workers} workers"
                        try:
                            found.setdefault(label, []).append(rate_of(via, endpoint, workers, options))
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
