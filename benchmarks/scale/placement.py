"""What it takes to work out who keeps which sample: time and memory of a process that does nothing else.

    python benchmarks/scale/placement.py         first-reader, which share= runs: F = 10^6 and 10^7, N = 256, E = 90;
                                                 frequency, which runs without it: for one rank of 4 alone
    python benchmarks/scale/placement.py --all   cover, too, which is simulated: minutes

All samples are of one size, and the ranks together have memory for 1.2 times the data set. Each row is a process of its
own: the most memory that it had, above what Python, NumPy and the compiled code take.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.homes import place_by_first_read, place_cover
from penstock.policy.placement import keep_by_frequency

SAMPLE_BYTES, BATCH_OF_A_RANK = 100_000, 32
PLACES: dict[str, Callable[..., object]] = {
    "first-reader": place_by_first_read,
    "cover": place_cover,
    "frequency": lambda plan, sizes, space: keep_by_frequency(plan, 0, sizes, space),
}


def place(policy: str, samples: int, ranks: int, epochs: int) -> object:
    """Return what a policy decides."""
    plan = AccessPlan(FullShuffle(samples, 0), batch_size=BATCH_OF_A_RANK * ranks, epochs=epochs, ranks=ranks)
    space = [int(1.2 * samples * SAMPLE_BYTES / ranks)]
    return PLACES[policy](plan, np.full(samples, SAMPLE_BYTES), space)


def most_mebibytes() -> int:
    """Return the most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument("--all", action="store_true", help="cover as well")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.row is not None:
        policy, samples, ranks, epochs = json.loads(given.row)
        place(policy, 1000, 4, 2)  # loads the compiled code
        before, began, used = most_mebibytes(), time.perf_counter(), time.process_time()
        place(policy, samples, ranks, epochs)
        print(
            f"{policy:13} F = {samples:>10,}, N = {ranks}, E = {epochs}: {time.perf_counter() - began:.1f} s, "
            f"{time.process_time() - used:.1f} s of a processor, {most_mebibytes() - before:,} MiB"
        )
        return
    sizes = (2000, 20_000) if given.quick else (1_000_000, 10_000_000)
    ranks = 16 if given.quick else 256
    rows = [("first-reader", samples, ranks) for samples in sizes] + [("frequency", sizes[-1], 4)]
    rows += [("cover", sizes[0], ranks)] if given.all else []
    for each in rows:
        row = json.dumps([*each, 4 if given.quick else 90])
        if given.quick:
            main(["--row", row])
            continue
        command = [sys.executable, __file__, "--row", row]
        print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="")


if __name__ == "__main__":
    main()
