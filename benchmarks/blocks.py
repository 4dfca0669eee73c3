"""What it costs a program to have its block references recorded, and Figures 2 to 4 from a real training.

    python benchmarks/blocks.py [--quick]
    python benchmarks/blocks.py --figures DIR [--samples F]

The first prints, for each means, how many times as long 10,000 opens and reads of small cached files take, as the
program itself measures them: median, lowest and highest over rounds that take turns. Beside it, strace as it is used
without care: with `close` and every `mmap` stopping too, and without seccomp-bpf. The second records
benchmarks/_blocks_training.py with three samplers and draws what was recorded into DIR/references.png.
"""

from __future__ import annotations

import argparse
import platform
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np

from penstock.measure.blocks import record
from penstock.measure.plot_blocks import plot_blocks
from penstock.recordings.blocks import Phase, Recording

FILES, FILE_BYTES = 1_000, 10_000
READS = """
import sys, time
from pathlib import Path
files = sorted(Path(sys.argv[1]).iterdir())
for file in files:
    file.read_bytes()
begin = time.perf_counter()
for _ in range(int(sys.argv[2])):
    for file in files:
        with open(file, "rb") as opened:
            opened.read()
print(time.perf_counter() - begin)
"""
TRAINING = Path(__file__).with_name("_blocks_training.py")
SAMPLERS = {"torch": "PyTorch's RandomSampler", "bundle": "bundles", "alternate": "bundles, alternating"}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print, or draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that it runs, not how slow"
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw Figures 2 to 4 into this folder")
    parser.add_argument(
        "--samples", type=int, default=2_000, metavar="F", help="of the training (%(default)s)"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.figures is not None:
            draw_figures(options.figures, Path(folder), options.samples)
        else:
            print_costs(Path(folder), rounds=1 if options.quick else 5, repeats=1 if options.quick else 10)


def print_costs(folder: Path, rounds: int, repeats: int) -> None:
    """Time the same reads with nothing, then by each means, in turn; print the ratios."""
    data = folder / "data"
    data.mkdir()
    for number in range(FILES):
        (data / f"{number:04}").write_bytes(bytes(FILE_BYTES))
    command = [sys.executable, "-c", READS, str(data), str(repeats)]

    def alone() -> float:
        return float(subprocess.run(command, capture_output=True, check=True).stdout)

    def recorded_by(means: str) -> Callable[[], float]:
        def run() -> float:
            with (folder / "said").open("w+b") as said:
                made = record(command, folder / "out", by=means, data=[data], stdout=said.fileno())
                check(made.recording, repeats)
                said.seek(0)
                return float(said.read())

        return run

    def carelessly() -> float:
        strace = ["strace", "-f", "-y", "-e", "trace=%file,%desc,%memory", "-o", str(folder / "log")]
        return float(subprocess.run([*strace, *command], capture_output=True, check=True).stdout)

    contenders = {
        "opens: a hook in Python": recorded_by("opens"),
        "strace: seccomp-bpf, chosen calls": recorded_by("strace"),
        "  careless: strace -f, all file calls": carelessly,
    }
    bare: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        bare.append(alone())
        for name, run in contenders.items():
            seconds[name].append(run())
    kept = slice(None) if rounds == 1 else slice(1, None)  # the first round warms up
    base = np.array(bare[kept])
    print(f"{date.today()}, {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    per_read = 1e6 * np.median(base) / (FILES * repeats)
    print(
        f"{FILES * repeats:,} opens and reads of {FILE_BYTES:,} cached bytes: {per_read:.1f} us each, alone"
    )
    for name in contenders:
        ratios = np.array(seconds[name][kept]) / base
        print(f"{name:40}{np.median(ratios):7.1f} x  ({ratios.min():.1f} to {ratios.max():.1f})")


def check(recording: Recording, repeats: int) -> None:
    """Raise unless each file was read as often as it was."""
    string = recording.string(phases=[Phase.DATA])
    per_file = -(-FILE_BYTES // 4096)
    assert string.numbers.size == FILES * per_file * (repeats + 1), string.numbers.size
    assert string.blocks == FILES * per_file, string.blocks


def draw_figures(out: Path, folder: Path, samples: int) -> None:
    """Train three times, recorded by strace, and draw the references."""
    out.mkdir(parents=True, exist_ok=True)
    runpy.run_path(str(TRAINING))["make_data"](folder / "data", samples)
    named = []
    for sampler, title in SAMPLERS.items():
        saves = folder / f"saves-{sampler}"
        command = [sys.executable, str(TRAINING), str(folder / "data"), str(saves), "--sampler", sampler]
        with (folder / "said").open("wb") as said:
            made = record(
                command,
                folder / f"{sampler}.blocks",
                data=[folder / "data"],
                checkpoints=[saves],
                stdout=said.fileno(),
            )
        assert made.exit_status == 0, f"the training ended with {made.exit_status}"
        for part in made.recording.summary():
            name = part.phase.name.lower()
            print(f"{title:26}{name:12}{part.reads:9,} reads{part.writes:8,} writes{part.blocks:8,} blocks")
        named.append((title, made.recording))
    plot_blocks(named, out / "references.png")
    print(f"The picture is {out / 'references.png'}.")


if __name__ == "__main__":
    main()
