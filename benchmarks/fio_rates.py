"""Direct reads and writes as penstock calibrate measures them, beside fio's 95 % interval.

    make bench NAME=fio_rates                      # about five minutes; ARGS="--folder FOLDER" names another disk
    make bench NAME=fio_rates ARGS="--quick"

Random reads of 4 KiB, as bench measures them, too; and reads and writes of 1 MiB, each thread's behind each other in a
part of the file that is its own.

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

FILE_BYTES = 256 << 20
RANDOM_READS = Access(is_write=False, is_random=True, request_bytes=4096)
ACCESSES = (RANDOM_READS, Access(False, False, 1 << 20), Access(True, False, 1 << 20))


def fio_rate(
    file: str,
    nbytes: int,
    block_bytes: int,
    threads: int,
    seconds: float,
    options: str,
    access: Access = RANDOM_READS,
) -> float:
    """Return the bytes/s of fio's threads together.

    nbytes: of the file that each of them uses. block_bytes: in place of those of the access. options: more of fio's.
    """
    verb = "write" if access.is_write else "read"
    order = "rand" if access.is_random else ""
    options += f" --name=x --filename={file} --size={nbytes} --rw={order}{verb} --bs={block_bytes}"
    if not access.is_random:
        options += f" --offset_increment={nbytes}"
    options += (
        f" --ioengine=psync --thread --numjobs={threads} --group_reporting"
        f" --runtime={round(1000 * seconds)}ms"  # of "0.1" it reads a 0, and then the whole file
        " --randrepeat=0"  # else each run reads the same blocks, which a cache behind the disk may have by then
        " --gtod_reduce=1"  # our loop looks at no clock for a block, either
    )
    done = subprocess.run(
        ["fio", *options.split(), "--output-format=json"], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"])


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
        for access in ACCESSES:
            print(f"{access.label}: fio is not installed: apt-get install fio")
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
        for access in ACCESSES:
            print(f"{access.label}:")
            for threads in map(int, options.threads.split(",")):
                print(
                    f"  {compared(scratch, file, access, threads, options.repeats, options.seconds)}",
                    flush=True,
                )


def compared(
    scratch: ScratchFile, file: str, access: Access, threads: int, repeats: int, seconds: float
) -> str:
    """Return a line about both, which take turns."""
    ours, theirs = [], []
    nbytes = FILE_BYTES if access.is_random else FILE_BYTES // threads
    for number in range(repeats):
        for which in ("ours", "fio")[:: -1 if number % 2 else 1]:
            if which == "fio":
                how = "--direct=1 --time_based --fallocate=none"
                theirs.append(fio_rate(file, nbytes, access.request_bytes, threads, seconds, how, access))
            else:
                until = time.perf_counter() + seconds
                ours.append(run_access(scratch, access, threads, until, time.perf_counter))
    own, other = Spread.after_first(ours), Spread.after_first(theirs)
    verdict = "within" if other.low <= own.median <= other.high else "outside"
    return (
        f"{threads} threads: {own.median / 1e6:.1f} MB/s, fio {other.median / 1e6:.1f} "
        f"({other.low / 1e6:.1f} to {other.high / 1e6:.1f}): {verdict}"
    )


if __name__ == "__main__":
    main()
