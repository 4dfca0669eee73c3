"""Random direct reads of 4 KiB as penstock calibrate and bench measure them, beside fio's 95 % interval.

    make bench NAME=random_reads                      # about two minutes; ARGS="--folder FOLDER" names another disk
    make bench NAME=random_reads ARGS="--quick"

fio (the Debian package) and our loop take turns on one file, so that where it lies on the disk is the same for both,
`--repeats` times for each number of threads, each time at other places; the first turn of both is left out. The aim:
our median within the interval in which fio's true median lies with 95 %, by the ranks of the thesis' equation 5.1. Two
equal programs would be outside once in twelve, by chance (15 repeats: once in fifteen).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from penstock.measure.file_rates import Access, ScratchFile, run_access
from penstock.measure.spread import Spread
from penstock.store.packed import READ_PIECES

BLOCK_BYTES, FILE_BYTES = 4096, 256 << 20
ACCESS = Access(is_write=False, is_random=True, request_bytes=BLOCK_BYTES)


def fio_rate(file: str, nbytes: int, block_bytes: int, threads: int, seconds: float, options: str) -> float:
    """Return the bytes/s of fio's threads together, which read blocks of a file in a random order.

    nbytes: of the file that each of them reads. options: more of fio's.
    """
    options += f" --name=x --filename={file} --size={nbytes} --rw=randread --bs={block_bytes}"
    options += (
        f" --ioengine=psync --thread --numjobs={threads} --group_reporting"
        f" --runtime={round(1000 * seconds)}ms"  # of "0.1" it reads a 0, and then the whole file
        " --randrepeat=0"  # else each run reads the same blocks, which a cache behind the disk may have by then
        " --gtod_reduce=1"  # our loop looks at no clock for a block, either
    )
    done = subprocess.run(
        ["fio", *options.split(), "--output-format=json"], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if shutil.which("fio") is None:
        print("fio is not installed: apt-get install fio")
        return
    if options.quick:
        options.threads, options.repeats, options.seconds = "1", 3, 0.1
    READ_PIECES.wait()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-reads-", dir=options.folder) as name,
        ScratchFile(Path(name)) as scratch,
    ):
        file = f"/proc/{os.getpid()}/fd/{scratch.descriptor}"  # it has no other name
        block = np.frombuffer(mmap.mmap(-1, 8 << 20), np.uint8)  # aligned, as direct writes want it
        block[:] = np.random.default_rng(0).integers(0, 256, block.size, np.uint8)
        scratch.grow(FILE_BYTES, block)
        for threads in map(int, options.threads.split(",")):
            ours, theirs = [], []
            for number in range(options.repeats):
                for which in ("ours", "fio")[:: -1 if number % 2 else 1]:
                    if which == "fio":
                        theirs.append(
                            fio_rate(
                                file,
                                FILE_BYTES,
                                BLOCK_BYTES,
                                threads,
                                options.seconds,
                                "--direct=1 --time_based",
                            )
                        )
                    else:
                        until = time.perf_counter() + options.seconds
                        ours.append(run_access(scratch, ACCESS, threads, until, time.perf_counter))
            own, other = Spread.after_first(ours), Spread.after_first(theirs)
            verdict = "within" if other.low <= own.median <= other.high else "outside"
            print(
                f"{threads} threads: {own.median / 1e6:.1f} MB/s, fio {other.median / 1e6:.1f} "
                f"({other.low / 1e6:.1f} to {other.high / 1e6:.1f}): {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
