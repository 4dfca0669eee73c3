"""What `penstock watch` takes of a core beside a program that uses all processors and their caches.

    python benchmarks/watching.py [--quick] [--processes 8] [--rounds 3] [--seconds 14]

The program is of so many processes that go through 32 MB each, with a pause of 20 ms after each time. The watching
process is looked at in /proc/PID/task/*/schedstat, all of its threads, from three seconds after the program has begun;
what it does before and after, imports and sums, is not in it. Target: 0.5 % of a core at 10 rows a second and at 20.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

PROGRAM = """
import os, sys, time
import numpy as np
processes, seconds = int(sys.argv[1]), float(sys.argv[2])
children = []
for _ in range(processes - 1):
    if not (pid := os.fork()):
        children = []
        break
    children.append(pid)
data, end = np.ones(4 << 20), time.monotonic() + seconds
print("begun", flush=True)
while time.monotonic() < end:
    data *= 1.0001
    time.sleep(0.02)
for pid in children:
    os.waitpid(pid, 0)
"""
BEGIN_SECONDS = 3.0


def main(arguments: list[str] | None = None) -> None:
    """Measure the periods in turns, print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs")
    parser.add_argument("--processes", type=int, default=8, help="of the program (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="for each period (%(default)s)")
    parser.add_argument("--seconds", type=float, default=14.0, help="measured in each (%(default)s)")
    options = parser.parse_args(arguments)
    rounds, begin, seconds = (
        (1, 0.0, 0.5) if options.quick else (options.rounds, BEGIN_SECONDS, options.seconds)
    )
    shares: dict[int, list[float]] = {10: [], 20: []}
    for _ in range(rounds):
        for rate, found in shares.items():
            found.append(share_of_a_core(rate, options.processes, begin, seconds))
    print(f"{date.today()}, {platform.machine()}, Python {platform.python_version()}")
    for rate, found in shares.items():
        print(
            f"{rate} rows a second: {statistics.median(found):.2%} of a core"
            f" ({min(found):.2%} to {max(found):.2%}; wanted 0.5%)"
        )


def share_of_a_core(rate: int, processes: int, begin_seconds: float, seconds: float) -> float:
    """Return the processor time of `penstock watch` in a second, beside the program, once that runs so long."""
    program = [sys.executable, "-c", PROGRAM, str(processes), str(begin_seconds + seconds + 1.0)]
    with tempfile.TemporaryDirectory() as folder:
        watch = [sys.executable, "-m", "penstock", "watch", "--period", f"{1000 // rate}ms", "--out"]
        with subprocess.Popen([*watch, f"{folder}/run", "--", *program], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(begin_seconds)
            used, begin = cpu_seconds(process.pid), time.monotonic()
            time.sleep(seconds)
            share = (cpu_seconds(process.pid) - used) / (time.monotonic() - begin)
            process.communicate()
    assert process.returncode == 0
    return share


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process's threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


if __name__ == "__main__":
    main()
