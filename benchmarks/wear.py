"""How many pages a second the model of an SSD programs, with garbage collection at work.

    python benchmarks/wear.py [--quick]

On the paper's drive, warm: files written in a row over each other and trimmed, and single pages overwritten at
random until the write amplification has settled. The erases of complete snapshots are checked first. Prints the
median rate of all pages written to flash (the host's, those moved, summaries) by seconds of CPU time, with its 10th
and 90th percentile over rounds that take turns, and both write amplifications. Target: 5 million pages a second on
one core. Warm: compiled, and one round of each not counted.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date

import numpy as np

from penstock.machine.ssd import Drive, PageOp, Ssd, Work

SNAPSHOT_PAGES = 55_944  # CaffeNet, complete


def main(arguments: list[str] | None = None) -> None:
    """Check the answers, time them, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small drive and one round: shows that it runs, not how fast"
    )
    quick = parser.parse_args(arguments).quick
    ssd = replace(Ssd.paper(), blocks_per_chip=256) if quick else Ssd.paper()
    snapshot, rounds, pages = (1_000, 1, 20_000) if quick else (SNAPSHOT_PAGES, 9, 4_000_000)
    sequential = Drive(ssd)
    sequential.warm_up()
    check_answers(sequential.copy(), snapshot)

    random = sequential.copy()
    draw = np.random.default_rng(0)
    overwrite(random, draw, 2 * ssd.exported_pages)  # until what is moved has settled
    contenders: dict[str, Callable[[], Work]] = {
        "files in a row, each trimmed": lambda: write_files(sequential, snapshot, pages // snapshot),
        "single pages at random": lambda: overwrite(random, draw, pages),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    amplified: dict[str, float] = {}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            begin = time.process_time()
            work = run()
            rates[name].append(work.programmed_pages / (time.process_time() - begin) / 1e6)
            amplified[name] = work.write_amplification or 0.0

    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, Python {platform.python_version()}, one core"
    )
    print(
        f"{ssd.exported_pages:,} pages in {ssd.blocks:,} blocks; millions of pages written to flash a second"
    )
    print(f"{'':32}{'median':>9}{'p10':>9}{'p90':>9}{'write amplification':>22}")
    for name, of_rounds in rates.items():
        median, low, high = np.percentile(of_rounds[1:], [50, 10, 90])
        print(f"{name:32}{median:9.1f}{low:9.1f}{high:9.1f}{amplified[name]:22.3f}  M pages/s")


def write_files(drive: Drive, pages: int, files: int) -> Work:
    """Write files one after the other, each where the one before the last was, which is trimmed."""
    places = [(index % 2) * -(-pages // drive.ssd.chips) * drive.ssd.chips for index in range(files)]
    ops = [op for _ in places for op in (PageOp.TRIM, PageOp.WRITE)]
    return drive.run(ops, np.repeat(places, 2), np.full(2 * files, pages))


def overwrite(drive: Drive, draw: np.random.Generator, count: int) -> Work:
    """Write single pages, drawn uniformly."""
    pages = draw.integers(0, drive.ssd.exported_pages, count)
    return drive.run(np.full(count, PageOp.WRITE), pages, np.ones(count, np.int64))


def check_answers(drive: Drive, snapshot: int) -> None:
    """Raise when sequential files take other than one erase for each block they fill, and move anything."""
    work = drive.write(0, 10 * snapshot)
    of_chip = -(-10 * snapshot // drive.ssd.chips)
    blocks = (of_chip + drive.ssd.open_pages) // drive.ssd.data_pages_per_block
    assert work.erases == drive.ssd.chips * blocks, "one erase for each block that was filled"
    assert work.moved_pages == 0, "files in a row leave nothing to move"
    assert snapshot != SNAPSHOT_PAGES or work.erases == 8_880, "the paper's 6,448 erases are 27 % fewer"


if __name__ == "__main__":
    main()
