"""Images per second from JPEG files to normalised float32 batches: Penstock, its peers, and the bound.

    python benchmarks/loader/make_images.py      # once: 2,000 photographs, about 105 KB each
    sh benchmarks/loader/set_up_peers.sh         # once: FFCV and DALI in environments of their own
    python benchmarks/loader/images.py [--quick] [--rounds N] [--only NAME...]

RandomResizedCrop 224, flip, normalise, float32 NCHW, batches of 64, the page cache warm. Every contender is a
process that has warmed up (one epoch, FFCV's compilation included) and then waits; epochs are run in turns,
in another order each round, nothing else running, so that a machine's moods meet all alike. Printed: images
per second (median over rounds), processor milliseconds per image, and the ratio of Penstock's rate to each
contender's in the same round as min / median / max. A contender that has answered is still: none of its threads
works while another is timed.

Like is compared with like: Penstock antialiased against FFCV (area) and DALI (antialiased triangle), bilinear
against DataLoader, as most would write it and as an expert would (see peer_torch.py). Targets: 1.15 x FFCV,
1.5 x DALI, 2.7 x DataLoader with OpenCV, 0.9 of the bound (a bare loop of the same library calls, see peer_limit.py).
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peer_protocol import CACHE, IMAGES

HERE = Path(__file__).resolve().parent
FFCV = CACHE / "ffcv" / "bin" / "python"
DALI = CACHE / "dali" / "bin" / "python"


@dataclass
class Contender:
    """One peer at one setting, as a process that runs an epoch when told."""

    name: str
    command: list[str]
    #: Images per second and processor milliseconds per image, by round.
    rates: list[float] = field(default_factory=list)
    processor_milliseconds: list[float] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None

    def start(self, log: Path) -> None:
        """Start and wait until it has warmed up."""
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=HERE,
                env={**os.environ, "PYTHONPATH": str(HERE.parent.parent / "src")},
            )
        if self._answer() != "ready":
            raise SystemExit(f"{self.name} did not start: see {log}")

    def run(self) -> None:
        """Run one epoch and keep its figures."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write("epoch\n")
        self.process.stdin.flush()
        images, seconds, processor_seconds = map(float, self._answer().split())
        self.rates.append(images / seconds)
        self.processor_milliseconds.append(1000 * processor_seconds / images)

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(30)
            assert self.process.stdout is not None
            self.process.stdout.close()

    def _answer(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def contenders(images: Path, threads: int, worker_counts: Sequence[int], cores: int) -> list[Contender]:
    """Return all contenders whose environment is there."""
    here, common = sys.executable, ["--images", str(images)]
    several = ["--threads", str(threads)]

    def penstock(via: str, resampling: str, recipe: str = "plain") -> list[str]:
        how = ["--resampling", resampling, "--recipe", recipe, "--via", via]
        return [here, "peer_penstock.py", *common, *several, *how]

    def limit(resampling: str, recipe: str = "plain") -> list[str]:
        return [here, "peer_limit.py", *common, *several, "--resampling", resampling, "--recipe", recipe]

    found = [
        Contender("penstock antialiased", penstock("loader", "antialias")),
        Contender("penstock bilinear", penstock("loader", "bilinear")),
        Contender("penstock bicubic", penstock("loader", "bicubic")),
        Contender("penstock ColorJitter", penstock("loader", "antialias", "jitter")),
        Contender("penstock RandAugment", penstock("loader", "antialias", "randaugment")),
        Contender("pipeline in threads, antialiased", penstock("threads", "antialias")),
        Contender("pipeline in threads, bilinear", penstock("threads", "bilinear")),
        Contender("bound: same calls, antialiased", limit("antialias")),
        Contender("bound: same calls, bilinear", limit("bilinear")),
        Contender("bound: same calls, bicubic", limit("bicubic")),
        Contender("bound: same calls, ColorJitter", limit("antialias", "jitter")),
        Contender("bound: same calls, RandAugment", limit("antialias", "randaugment")),
        Contender("bound: cv2.resize, bilinear", limit("opencv")),
    ]
    for workers in worker_counts:
        for via in ("opencv", "expert"):
            command = [here, "peer_torch.py", *common, "--workers", str(workers), "--via", via]
            found.append(Contender(f"DataLoader {via}, {workers} workers", command))
    if FFCV.exists():
        for mode in ("jpg", "raw"):
            # Numba's threads, of which FFCV has its own, are at most one per core.
            command = [
                str(FFCV),
                "peer_ffcv.py",
                *common,
                "--threads",
                str(min(threads, cores)),
                "--mode",
                mode,
            ]
            found.append(Contender(f"FFCV {mode}, area", command))
    if DALI.exists():
        for resampling in ("antialias", "bilinear"):
            command = [str(DALI), "peer_dali.py", *common, *several, "--resampling", resampling]
            found.append(Contender(f"DALI {resampling}", command))
    return found


#: Whose rate is divided by whose, and what the quotient must reach.
COMPARISONS = (
    ("penstock antialiased", "FFCV jpg, area", 1.15),
    ("penstock antialiased", "DALI antialias", 1.5),
    ("penstock bilinear", "DataLoader opencv", 2.7),
    ("penstock bilinear", "DataLoader expert", None),
    ("penstock antialiased", "bound: same calls, antialiased", 0.9),
    ("penstock bilinear", "bound: same calls, bilinear", 0.9),
    ("penstock bicubic", "bound: same calls, bicubic", 0.9),
    ("penstock ColorJitter", "bound: same calls, ColorJitter", 0.9),
    ("penstock RandAugment", "bound: same calls, RandAugment", 0.9),
    ("pipeline in threads, antialiased", "bound: same calls, antialiased", 0.9),
    ("penstock antialiased", "FFCV raw, area", None),
    ("penstock bilinear", "DALI bilinear", None),
    ("penstock bilinear", "bound: cv2.resize, bilinear", None),
)


def run_rounds(chosen: list[Contender], rounds: int) -> None:
    """Start all, run them in turns, in another order each round, and stop them."""
    CACHE.mkdir(exist_ok=True)
    log = CACHE / "images.log"
    order = random.Random(0)
    try:
        for contender in chosen:
            contender.start(log)
        for _ in range(rounds):
            for contender in order.sample(chosen, len(chosen)):
                contender.run()
    finally:
        for contender in chosen:
            contender.stop()


def print_heading(folder: Path, threads: int) -> None:
    """Print what is measured, on which machine."""
    sizes = [path.stat().st_size for path in folder.glob("*/*.jpg")]
    print(
        f"{datetime.date.today()}  {platform.processor() or platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {len(sizes)} files of "
        f"{statistics.mean(sizes):,.0f} bytes, {threads} threads, page cache warm"
    )


def report(
    all_contenders: list[Contender],
    comparisons: Sequence[tuple[str, str, float | None]] = COMPARISONS,
    with_workers: Sequence[str] = ("DataLoader",),
) -> None:
    """Print rates, then ratios with their spread and the target beside them.

    with_workers: what each of these has at the number of workers that is best for it.
    """
    by_name = {contender.name: contender for contender in all_contenders}
    for name in (f"{kind} {via}" for kind in with_workers for via in ("opencv", "expert")):
        loaders = [each for each in all_contenders if each.name.startswith(name)]
        if loaders:
            by_name[name] = max(loaders, key=lambda each: statistics.median(each.rates))
    print(f"\n{'':34} {'images/s':>9} {'min':>7} {'max':>7} {'CPU ms/image':>13}")
    for contender in all_contenders:
        rates = contender.rates
        print(
            f"{contender.name:34} {statistics.median(rates):9,.0f} {min(rates):7,.0f} {max(rates):7,.0f} "
            f"{statistics.median(contender.processor_milliseconds):13.3f}"
        )
    print(f"\n{'ratio of rates, round by round':66} {'min':>6} {'median':>7} {'max':>6}  target")
    for ours, theirs, target in comparisons:
        if ours in by_name and theirs in by_name:
            pairs = zip(by_name[ours].rates, by_name[theirs].rates, strict=True)
            ratios = sorted(mine / other for mine, other in pairs)
            middle = statistics.median(ratios)
            wanted = "" if target is None else f"{target} {'reached' if middle >= target else 'MISSED'}"
            print(f"{ours + ' / ' + theirs:66} {ratios[0]:6.2f} {middle:7.2f} {ratios[-1]:6.2f}  {wanted}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--rounds", type=int, default=9)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores + 1, help="decoding threads of every contender")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[cores, 2 * cores],
        help="numbers of worker processes of the DataLoader, the best of which counts",
    )
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="one round: shows that it runs, not how fast")
    options = parser.parse_args(argv)
    if not options.images.exists():
        raise SystemExit("no images: run benchmarks/loader/make_images.py first")
    chosen = [
        contender
        for contender in contenders(options.images, options.threads, options.workers, cores)
        if not options.only or any(part in contender.name for part in options.only)
    ]
    print_heading(options.images, options.threads)
    run_rounds(chosen, 1 if options.quick else options.rounds)
    report(chosen)


if __name__ == "__main__":
    main()
