"""How long saves block training and until they are durable, what restores take, and what memory: ours and peers.

    python benchmarks/snapshots/sequences.py --only gpt-fp32      # once: what is saved
    sh benchmarks/snapshots/set_up_peers.sh                       # once: orbax
    python benchmarks/snapshots/compare_saves.py [--quick] [--folder FOLDER] [--megabytes 600] [--rounds N]
                                                 [--only NAME...] [--slow FOLDER]

The state is the transformer's weights and AdamW moments from eight pairs of neighbouring early snapshots, each tensor
eight times as large: saves see one side and the other of the pairs in turn, so that a difference is one between real
neighbours. Each way of saving is a process of its own with all processors; rounds go through all of them, in another
order each. Nothing else runs in the process: a training would share processors with what saves in the background.
What a save wrote leaves the page cache before the next one, off the clock, so that each is written into pages that were
used before, however many files a way of saving keeps.

Blocked: until training may change the state. Durable: until files and folders are synced, by the way itself or, where
it does none, by fsync of each file, each folder and the folder above; of ours until the commit, by its own clock, after
which it reads what it wrote again and removes what is old. First: a process's first save, which touches its
memory and, of ours, is a baseline; the second touches what else there is to touch (ours keeps the state before beside
the new one). The others are the median over later saves and rounds, with the 10th and 90th percentile.
Restores read from the device, the page cache dropped before (of a file that was just written: the fastest case of the
device), into memory that is there already (limits, DCP, orbax's shapes, ours) or not (torch.load, safetensors). "First"
restores a baseline, "second" a difference and its baseline. Memory is the most that the process had beyond what it
had before the first save, the state included.

Limits: one copy into touched memory; the same bytes written and synced from memory; all blocks encoded by all
processors; what was encoded written and synced.

With --slow, a folder on a slow device (`sh benchmarks/snapshots/capped_disk.sh FOLDER` makes one of 100 MiB/s), all
save half as much to it, too; "penstock, fast tier" commits to --folder and drains to the slow one, which the next save
waits for. Last, the steps of a small training (six layers of 768, batches of 128, one thread, then all) are timed while
a snapshot drains to the slow folder, at most 100 MiB/s by the store's own cap too, and while none does, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np
import sequences
from compare_codecs import PEERS
from peer_saves import SAVERS, THREADS, bytes_of

HERE = Path(__file__).resolve().parent
CODEC = "balance"
#: What has no place in the table of saves to one folder, and what in that of the slow tier.
TIERED = "penstock, fast tier"
NOT_SLOWED = ("limit: memory copy", "limit: encode", "penstock speed", "penstock balance, streamed")


@dataclass
class Figures:
    """What was measured of one way of saving. Seconds, bytes; lists by save and round."""

    name: str
    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    first_blocked: list[float] = field(default_factory=list)
    second_blocked: list[float] = field(default_factory=list)
    first_durable: list[float] = field(default_factory=list)
    first_bytes: int = 0
    bytes: int = 0
    drained: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    restored: dict[int, list[float]] = field(default_factory=dict)

    def add(self, answer: dict[str, float]) -> None:
        """Take one line of peer_saves.py."""
        if "step" in answer:
            self.bytes = int(answer["bytes"])
            if answer["step"] == 0:
                self.first_blocked.append(answer["blocked"])
                self.first_durable.append(answer["durable"])
                self.first_bytes = self.bytes
            elif answer["step"] == 1:
                self.second_blocked.append(answer["blocked"])
            else:
                self.blocked.append(answer["blocked"])
                self.durable.append(answer["durable"])
                self.drained.append(answer["drained"])
        elif "memory" in answer:
            self.memory.append(answer["memory"])
        else:
            self.restored.setdefault(int(answer["restored"]), []).append(answer["seconds"])

    def restore(self, step: int) -> float:
        """Return the median of the seconds of a restore."""
        return float(np.median(self.restored[step]))


def main(arguments: list[str] | None = None) -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny state, one round: shows that it runs")
    parser.add_argument("--sequences", type=Path, default=sequences.FOLDER, metavar="FOLDER")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="FOLDER", help="that of set_up_peers.sh")
    parser.add_argument("--megabytes", type=float, default=600.0, help="of state (default: %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--saves", type=int, default=5, metavar="N", help="in each round (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="+", choices=list(SAVERS), default=list(SAVERS), metavar="NAME")
    parser.add_argument("--slow", type=Path, metavar="FOLDER", help="on a slow device")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.saves, options.megabytes = 1, 3, 1.0
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder, sequence_folder = Path(scratch), options.sequences
        if options.quick:
            sequence_folder = folder / "sequences"
            sequences.main(["--quick", "--folder", str(sequence_folder), "--only", "gpt-fp32"])
        print(
            f"{date.today()}, {platform.processor() or platform.machine()}, Python {platform.python_version()}"
        )
        names = [name for name in options.only if name != TIERED]
        nbytes = write_states(sequence_folder, folder / "state", options.megabytes * 1e6)
        figures = run_all(names, folder / "state", folder / "saves", options)
        print_figures(figures, nbytes)
        print_targets(figures, nbytes)
        if options.slow is None:
            return
        with tempfile.TemporaryDirectory(dir=options.slow) as slow_scratch:
            slow, state = Path(slow_scratch), folder / "half"
            nbytes = write_states(sequence_folder, state, options.megabytes * 0.5e6)
            names = [name for name in options.only if name not in NOT_SLOWED]
            fast = ["--fast", str((folder / "fast").absolute()), "--no-restores"]
            figures = run_all(names, state, slow / "saves", options, *fast)
            limit = run_all(["limit: write + sync raw"], state, folder / "saves", options, "--no-restores")
            print_slow(figures, limit, nbytes)
            compare_steps(state, folder / "fast", slow / "steps", options.quick)


def run_all(
    names: list[str], state: Path, folder: Path, options: argparse.Namespace, *more: str
) -> dict[str, Figures]:
    """Run ways of saving in turn, in another order each round; return what is there of each, in their order."""
    figures = {name: Figures(name) for name in names}
    missing: dict[str, str] = {}
    shuffle = random.Random(0)
    for _ in range(options.rounds):
        for name in shuffle.sample(names, len(names)):
            arguments = [name, "--saves", str(options.saves), "--peers", str(options.peers.absolute())]
            for answer in run("peer_saves.py", state, folder, *arguments, *more):
                if "missing" in answer:
                    missing[name] = str(answer["missing"])
                else:
                    figures[name].add(answer)
    for name, package in missing.items():
        print(f"{name}: {package} is not installed, see set_up_peers.sh")
    return {name: each for name, each in figures.items() if name not in missing}


def write_states(folder: Path, to: Path, most_bytes: float) -> int:
    """Write both sides of the pairs as raw files, and the layout; return the bytes of a side.

    A side has as many snapshots as come nearest to `most_bytes`, at least one; the other side has the ones after. Each
    tensor of one side is that of all its snapshots, so that there are as many tensors as a model of that size has.
    """
    (sequence,) = sequences.read_sequences(folder, ["gpt-fp32"])
    snapshots = sequence.group("early")
    loaded = sequence.load(snapshots[0])
    tensors = {name: tensor for name, tensor in loaded.items() if tensor.ndim > 0}
    pairs = round(most_bytes / sum(tensor.nbytes for tensor in tensors.values()))
    pairs = min(max(pairs, 1), len(snapshots) - 1)
    to.mkdir()
    states = [loaded, *(sequence.load(snapshot) for snapshot in snapshots[1 : pairs + 1])]
    for side in range(2):
        with (to / f"{side}.bin").open("wb") as file:
            for name in tensors:
                for state in states[side : side + pairs]:
                    file.write(bytes_of(state[name]).data)
    layout = [
        (name, str(tensor.dtype).removeprefix("torch."), [pairs, *tensor.shape])
        for name, tensor in tensors.items()
    ]
    (to / "layout.json").write_text(json.dumps(layout))
    return (to / "0.bin").stat().st_size


def run(
    script: str, state: Path, folder: Path, *arguments: str, **environment: str
) -> list[dict[str, float]]:
    """Run one way of saving in a process; return its lines. environment: variables that it has besides."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, script, *arguments]
    command += ["--state", str(state.absolute()), "--folder", str(folder.absolute())]
    done = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def print_figures(figures: dict[str, Figures], nbytes: int) -> None:
    """Print the tables."""
    print(f"\n{nbytes / 1e6:.0f} MB of state; seconds")
    print(
        f"{'':30}{'blocked':>9}{'p10':>8}{'p90':>8}{'durable':>9}{'p10':>8}{'p90':>8}"
        f"{'first: blocked':>16}{'durable':>9}{'second: blocked':>17}{'MB written':>12}{'first':>8}"
    )
    for each in figures.values():
        blocked, durable = (np.percentile(values, [50, 10, 90]) for values in (each.blocked, each.durable))
        print(
            f"{each.name:30}{blocked[0]:9.4f}{blocked[1]:8.4f}{blocked[2]:8.4f}"
            f"{durable[0]:9.4f}{durable[1]:8.4f}{durable[2]:8.4f}"
            f"{np.median(each.first_blocked):16.4f}{np.median(each.first_durable):9.4f}"
            f"{np.median(each.second_blocked):17.4f}{each.bytes / 1e6:12.1f}{each.first_bytes / 1e6:8.1f}"
        )
    print(f"\n{'':30}{'restore first':>14}{'second':>9}{'memory beyond the state, MB':>29}")
    for each in figures.values():
        print(
            f"{each.name:30}{each.restore(0):14.4f}{each.restore(1):9.4f}{np.median(each.memory) / 1e6:29.1f}"
        )


def print_targets(figures: dict[str, Figures], nbytes: int) -> None:
    """Print each target with what was measured, and whether it is met; those whose limits were measured."""
    needed = ("limit: memory copy", "limit: write + sync raw", "limit: encode", "limit: write + sync encoded")
    if not all(name in figures for name in needed):
        return
    copy, raw, encode, write = (figures[name] for name in needed)

    print("\nTargets")
    copied = float(np.median(copy.blocked))
    raw_seconds = float(np.median(raw.durable))
    encoded_seconds = max(float(np.median(encode.durable)), float(np.median(write.durable)))
    for each in figures.values():
        if not each.name.startswith("penstock"):
            continue
        told(f"{each.name}, blocked", float(np.median(each.blocked)), copied, 1.2, "one memory copy")
        told(
            f"{each.name}, durable",
            float(np.median(each.durable)),
            min(raw_seconds, encoded_seconds),
            1.3,
            f"the cheaper of write + sync raw ({raw_seconds:.3f} s) and max(encode, write + sync encoded) "
            f"({encoded_seconds:.3f} s)",
        )
        if each.name == "penstock stored":
            for step in (0, 1):
                told(
                    f"{each.name}, restore {step}",
                    each.restore(step),
                    raw.restore(step),
                    1.3,
                    "reading it raw",
                )
        else:
            read = [write.restore(0), write.restore(0) + write.restore(1)]
            decode = [encode.restore(0), encode.restore(0) + encode.restore(1)]
            for step, name in enumerate(("a baseline", "a difference and its baseline")):
                limit = max(read[step], decode[step])
                text = f"max(read {read[step]:.3f} s, decode {decode[step]:.3f} s)"
                told(f"{each.name}, restore of {name}", each.restore(step), limit, 1.3, text)
        copies = 1 if each.name in ("penstock stored", "penstock balance, streamed") else 2
        beyond = float(np.median(each.memory)) - copies * nbytes
        met = beyond <= 64 * 2**20
        print(
            f"  {'met    ' if met else 'NOT MET'}  {each.name}, memory: {beyond / 2**20:.0f} MiB beyond the state and "
            f"{copies} {'copy' if copies == 1 else 'copies'} of it, at most 64"
        )


def told(name: str, value: float, limit: float, most: float, of: str) -> None:
    """Print a target."""
    ratio = value / limit
    print(f"  {'met    ' if ratio <= most else 'NOT MET'}  {name}: {ratio:.2f} x {of}, at most {most}")


def print_slow(figures: dict[str, Figures], limit: dict[str, Figures], nbytes: int) -> None:
    """Print the table of the slow folder, and whether the fast tier keeps its promise."""
    print(f"\n{nbytes / 1e6:.0f} MB of state to the slow folder; seconds, medians")
    print(f"{'':30}{'blocked':>9}{'durable':>9}{'on the slow folder':>20}{'MB written':>12}")
    for each in figures.values():
        print(
            f"{each.name:30}{np.median(each.blocked):9.4f}{np.median(each.durable):9.4f}"
            f"{np.median(each.drained):20.4f}{each.bytes / 1e6:12.1f}"
        )
    if TIERED in figures:
        durable, raw = (float(np.median(each.durable)) for each in (figures[TIERED], *limit.values()))
        told(f"{TIERED}, durable", durable, raw, 1.3, f"write + sync raw on the fast tier ({raw:.3f} s)")


def compare_steps(state: Path, fast: Path, slow: Path, quick: bool) -> None:
    """Time steps of a training with and without a drain; print the ratio."""
    for threads in sorted({1, THREADS}):
        # Where steps take every processor, a drain takes a minute.
        count = 1 if quick else 8 if threads < THREADS else 2
        arguments = ["--fast", str(fast.absolute()), "--threads", str(threads), "--rounds", str(count)]
        # Else glibc asks the kernel for memory in each step, until somebody frees a large piece of it: the steps of a
        # process in which snapshots are drained would be the quicker ones.
        kept = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
        rounds = run("steps_beside_drain.py", state, slow, *arguments, **kept)
        ratios = [each["draining"] / each["quiet"] for each in rounds]
        low, median, high = np.percentile(ratios, [10, 50, 90])
        quiet = np.median([each["quiet"] for each in rounds])
        seconds = np.median([each["seconds"] for each in rounds])
        print(
            f"  {'met    ' if median <= 1.02 else 'NOT MET'}  steps on {threads} of {THREADS} processors, "
            f"{1000 * quiet:.1f} ms each: {median:.3f} x while a snapshot drains (p10 {low:.3f}, p90 {high:.3f}, "
            f"{len(rounds)} drains of {seconds:.1f} s), at most 1.02"
        )


if __name__ == "__main__":
    main()
