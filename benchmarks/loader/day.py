"""Whether memory grows in a day of training, and with the number of samples.

    make bench NAME=loader/day                  # about five minutes

A day, without its waiting: as many steps as a training takes in 24 hours, handed out as fast as they come. From a file
of records of 1 KB, ten steps a second of 16 samples, so 864,000; from objects of the benchmarks' object store on
loopback (object_store.py: 2 ms, no limit of its link), a step a second of two samples of 100 KB, so 86,400. Then 2,000
steps of 16 from files of 10^5, 10^6 and 10^7 records of 8 bytes.

Printed is what a process has in memory that no file gives back (RssAnon and RssShmem of /proc/self/status), after each
twelfth of the steps; each in a process of its own. A full shuffle, `policy="staging"`: no sample is kept for later.
Nothing is timed, so that other programs may run.

--quick: a thousandth of the steps of the day, and of the records.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
HOURS, TIMES = 24, 12
#: Steps a second, and samples a step.
LOCAL, REMOTE = (10, 16), (1, 2)
RECORD_BYTES, RECORDS = 1024, 65_536
#: Of the object store: objects, and samples of 100 KB in each.
OBJECTS, SAMPLES = 8, 160


def memory_bytes() -> int:
    """Return what this process has in memory that no file gives back."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def run(kind: str, where: str, steps: int, batch: int) -> None:
    """Hand out the batches, and print what memory was in use after each part."""
    from penstock.loader import Loader
    from penstock.store import Records

    if kind == "objects":
        options = {"endpoint_url": where, "anon": True}
        source = Records("s3://bucket/part-*.bin", "u1", 100_000, storage_options=options)
    else:
        source = Records(where, "u1", 8 if kind == "many" else RECORD_BYTES)
    per_epoch = -(-len(source) // batch)
    found, done, due = list[int](), 0, max(1, steps // TIMES)
    with Loader(
        source,
        batch_size=batch,
        epochs=-(-steps // per_epoch),
        policy="staging",
        memory="256 MB",
        report=None,
    ) as loader:
        while done < steps:
            for _ in loader:
                done += 1
                if not done % due:
                    found.append(memory_bytes())
                if done == steps:
                    break
    print(*found)


def measured(kind: str, where: str, steps: int, batch: int) -> list[int]:
    """Return bytes in memory after each twelfth of the steps, in a process of its own."""
    command = [sys.executable, __file__, "--run", kind, where, str(steps), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)  # the longest takes minutes
    if done.returncode:
        raise RuntimeError(f"{kind}: {done.stderr.strip().splitlines()[-1:]}")
    return [int(each) for each in done.stdout.split()]


def show(what: str, steps: int, found: Sequence[int]) -> None:
    print(f"{what}, {steps:,} steps: MB {' '.join(f'{each / 1e6:.0f}' for each in found)}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a thousandth of the day's steps, and of the records"
    )
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run:
        kind, where, steps, batch = options.run
        run(kind, where, int(steps), int(batch))
        return
    shorter = 1000 if options.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.bin"
        np.random.default_rng(0).integers(0, 256, RECORDS * RECORD_BYTES, np.uint8).tofile(file)
        a_second, batch = LOCAL
        steps = HOURS * 3600 * a_second // shorter
        show("records of a local file", steps, measured("records", str(file), steps, batch))

        a_second, batch = REMOTE
        steps = HOURS * 3600 * a_second // shorter
        sizes = ["--objects", str(OBJECTS), "--samples", str(SAMPLES), "--latency", "0.002", "--rate", "1e12"]
        command = [sys.executable, str(HERE / "object_store.py"), *sizes]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                endpoint = f"http://127.0.0.1:{process.stdout.readline().split()[-1]}"
                show("objects", steps, measured("objects", endpoint, steps, batch))
            finally:
                process.terminate()

        for count in (10**5 // shorter, 10**6 // shorter, 10**7 // shorter):
            many = Path(folder) / f"{count}.bin"
            np.arange(count).tofile(many)
            show(f"{count:,} records", 2_000, measured("many", str(many), 2_000, LOCAL[1]))
            many.unlink()


if __name__ == "__main__":
    main()
