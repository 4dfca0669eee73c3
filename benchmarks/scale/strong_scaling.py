"""Strong scaling, as tables 5.7 and 5.8 of the thesis: one data set on 1 to 8 ranks, by each loader, on one store.

    python benchmarks/scale/strong_scaling.py                    the table: five minutes
    python benchmarks/scale/strong_scaling.py --plot scale.png   and a picture of it
    python benchmarks/scale/strong_scaling.py --only cover --ranks 4    one row

The store is one wire of 50 MB/s behind 5 ms, for all ranks together. Each rank trains on 16 samples of 100 kB a step,
which takes --step-seconds; ranks end each step together, so that N ranks need a Nth of the steps. All ranks together
have memory for 1.2 times the data set; `hash-home, disk` has it on local disks instead, as a cache on the nodes' drives
does (HVAC, a cache group of JuiceFS). Where each is alone, a rank keeps what it reads most often; by the split "local",
too. Printed for each: seconds in which the slowest rank makes its loader, before any epoch; those of the first epoch,
and the median of later ones, and both as rank 0 predicts them (`Loader.predict`); how many times faster later ones are
than those of DataLoader with 4 workers on as many ranks; the share of them that the slowest rank waits; reads of the
store a sample over the run, and simulated ("-": reads of DataLoader's worker processes are not counted, no run of
DataLoader is predicted). Counts hold on a busy machine, seconds do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from peers import EPOCHS, run_job, simulated_reads

LOCAL_BATCH, SAMPLE_BYTES = 16, 100_000
#: By name: worker processes of PyTorch's DataLoader, or what differs from a loader of one rank with all in memory.
LOADERS: dict[str, int | dict[str, Any]] = {
    "DataLoader, 0 workers": 0,
    "DataLoader, 4 workers": 4,
    "each alone": {},
    "each alone, local": {"split": "local"},
    "first-reader": {"shares": "host"},
    "cover": {"shares": "host", "policy": "cover"},
    "hash-home": {"shares": "host", "policy": "hash-home"},
    "hash-home, disk": {"shares": "host", "policy": "hash-home", "share_of_data": 0.05},
}
BASELINE = "DataLoader, 4 workers"


def measured(name: str, ranks: int, samples: int, step_seconds: float) -> dict[str, float]:
    """Return the numbers of a row; each job in a process of its own."""
    how = LOADERS[name]
    job: dict[str, Any] = {
        "ranks": ranks,
        "samples": samples,
        "sample_bytes": SAMPLE_BYTES,
        "batch": LOCAL_BATCH * ranks,
        "share_of_data": 1.2,
        "step_seconds": step_seconds,
        "shares": None,
    }
    job |= {"workers": how} if isinstance(how, int) else how
    with tempfile.TemporaryDirectory() if job["share_of_data"] < 1 else nullcontext() as folder:
        job["disk"] = folder
        command = [sys.executable, __file__, "--job", json.dumps(job)]
        of_ranks = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    later = [(each["seconds"][k], each["waits"][k]) for each in of_ranks for k in range(1, EPOCHS)]
    found = {
        "making": max(each["making"] for each in of_ranks),
        "first": max(each["seconds"][0] for each in of_ranks),
        "later": median(seconds for seconds, _ in later),
        "stall": max(waited / seconds for seconds, waited in later),
    }
    if how == 0 or not isinstance(how, int):  # what DataLoader's processes read is not counted in the rank's
        found["reads"] = sum(each["reads"] for each in of_ranks) / samples
    if not isinstance(how, int):
        found["simulated"] = simulated_reads(job) / samples
        predicted = [seconds for seconds, _ in of_ranks[0]["predicted"]]
        found["predicted first"], found["predicted later"] = predicted[0], median(predicted[1:])
    return found


def plot(rows: dict[tuple[str, int], dict[str, float]], counts: Sequence[int], path: Path) -> None:
    """Draw seconds of a later epoch, and the share that is waited, over the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(LOADERS):
        # Loaders that are as fast lie over each other: the later ones are thinner.
        style = {"marker": "o", "linewidth": 4.0 - 0.4 * number, "markersize": 9 - 0.7 * number, "alpha": 0.9}
        left.plot(counts, [rows[name, ranks]["later"] for ranks in counts], label=name, **style)
        right.plot(counts, [100 * rows[name, ranks]["stall"] for ranks in counts], **style)
    alone = rows["each alone", counts[0]]["later"]
    left.plot(counts, [alone / ranks for ranks in counts], "k:", label="one rank's, divided by their number")
    left.set(ylabel="seconds of an epoch after the first", yscale="log")
    seconds = [each["later"] for each in rows.values()]
    ticks = [
        each
        for each in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
        if min(seconds) / 2 <= each <= 2 * max(seconds)
    ]
    left.set_yticks(ticks, [f"{each:g}" for each in ticks])
    right.set(ylabel="% of it that the slowest rank waits", ylim=(-2, 100))
    for axes in (left, right):
        axes.set(xlabel="ranks", xscale="log")
        axes.set_xticks(counts, list(map(str, counts)))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few samples, 1 and 2 ranks")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--step-seconds", type=float, default=0.03)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", choices=LOADERS, help="one row")
    parser.add_argument("--ranks", type=int, help="jobs of so many ranks alone")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.job is not None:
        print(json.dumps(run_job(json.loads(given.job))))
        return
    if given.plot is not None and (given.only is not None or given.ranks is not None):
        parser.error("a plot is of all rows and ranks")
    samples = 64 if given.quick else given.samples
    counts = [given.ranks] if given.ranks is not None else [1, 2] if given.quick else [1, 2, 4, 8]
    names = list(LOADERS) if given.only is None else [given.only]
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for ranks in counts:
        for name in names:
            rows[name, ranks] = measured(name, ranks, samples, 0.0 if given.quick else given.step_seconds)
        for name in names:
            row, baseline = rows[name, ranks], rows.get((BASELINE, ranks))
            times = f"{baseline['later'] / row['later']:5.2f} x {BASELINE}; " if baseline else ""
            reads = f"{row['reads']:.3f}" if "reads" in row else "-"
            simulated = f"{row['simulated']:.3f}" if "simulated" in row else "-"
            first, later = (
                f"{row[each]:6.2f} s"
                + (f" (predicted {row[f'predicted {each}']:.2f})" if "simulated" in row else "")
                for each in ("first", "later")
            )
            print(
                f"{ranks} ranks, {name:22}: made in {row['making']:.2f} s, first epoch {first}, later {later}, {times}"
                f"waits {100 * row['stall']:5.1f} %; {reads} reads a sample, {simulated} simulated",
                flush=True,
            )
    if given.plot is not None:
        plot(rows, counts, given.plot)


if __name__ == "__main__":
    main()
