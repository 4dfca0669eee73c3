"""What the loader itself costs per sample, where reading and decoding cost next to nothing.

    python benchmarks/overhead.py [--rounds N] [--batch-sizes 64 1024] [--quick]    # under three minutes

Printed for each batch size, as medians over rounds that take turns, with the least and the most:

    scheduler       processor time of deciding alone: one thread gives its events and throws its instructions away
    4 KB, memory    samples of 4 KB that a tier in memory holds, copied into the batch
    4 KB, files     the same files from the page cache, nothing kept
    rows of 1 KB    a map-style data set in memory that returns lists of rows, beside a DataLoader without workers
    rows in eight   the same, which looks its rows up in eight lists, as whoever has eight data sets does
    mixture, ...    the files in memory and the rows in eight parts, from which a mixture draws by turns

each but the scheduler in two ways: with threads as the loader has them, and without any (decoders=0), so that the
training's own does all of the work. Wall time is per sample, too, and nothing is computed in between. Decisions are
compiled. Loaders stay open over the rounds, and are still while another is timed. Nothing else should run.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.compiling import without_plain_forms
from penstock.flow import engine
from penstock.loader import mix
from penstock.loader.transforms import DecodeRaw
from penstock.policy import Load, Ready, Scheduler
from penstock.policy.scheduler import OwnRead
from penstock.store import FlatFolder
from penstock.torch import Loader

SAMPLE_BYTES, ROW_NUMBERS = 4096, 256
#: Of a mixture.
PARTS = 8
Row = tuple[torch.Tensor, int]
#: Seconds per sample: on the wall, and of processors.
Seconds = tuple[float, float]


class Rows(torch.utils.data.Dataset[Row]):
    """Rows of 1 KB in memory, a list at a time."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(count * ROW_NUMBERS, dtype=torch.float32).reshape(count, ROW_NUMBERS)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index], index

    def __getitems__(self, indices: list[int]) -> list[Row]:
        return list(zip(self.rows[torch.tensor(indices)].unbind(), indices, strict=True))


class RowsInEight(Rows):
    """The same, looked up in eight lists: what a mixture cannot spare."""

    def __getitems__(self, indices: list[int]) -> list[Row]:
        step = -(-len(indices) // PARTS)
        lists = [indices[begin : begin + step] for begin in range(0, len(indices), step)]
        return [row for numbers in lists for row in super(RowsInEight, self).__getitems__(numbers)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--quick", action="store_true", help="few samples, one round: shows that it runs")
    options = parser.parse_args(arguments)
    rounds, files, rows = (1, 256, 1024) if options.quick else (options.rounds, 8192, 65536)
    seconds = 0.0 if options.quick else 1.0
    sizes = [min(size, files // 4) for size in options.batch_sizes]
    torch.set_num_threads(1)  # as a DataLoader's workers do
    engine._WORTH_COMPILING_SAMPLES = 0
    print(
        f"{date.today()}  {platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, PyTorch {torch.__version__}; us per sample"
    )
    with tempfile.TemporaryDirectory(prefix="penstock-overhead-") as folder, without_plain_forms():
        for number in range(files):
            content = np.random.default_rng(number).bytes(SAMPLE_BYTES)
            Path(folder, f"{number:06}.bin").write_bytes(content)
        for size in sizes:
            with ExitStack() as opened:
                cases = cases_of(folder, files, Rows(rows), size, seconds, opened)
                found: dict[str, list[Seconds]] = {name: [] for name in cases}
                for _ in range(rounds):
                    for name, case in cases.items():
                        gc.collect()
                        found[name].append(case(seconds))
            print(f"\nbatches of {size:<11}{'wall us':>26}{'CPU us':>26}")
            for name, each in found.items():
                wall, cpu = (with_spread([1e6 * pair[which] for pair in each]) for which in range(2))
                print(f"{name:<22}{wall:>26}{cpu:>26}")
            for name in ("rows of 1 KB", "rows of 1 KB, no threads"):
                ratios = [
                    their[0] / our[0] for our, their in zip(found[name], found["  DataLoader"], strict=True)
                ]
                print(f"rate of {name}, of a DataLoader's: {with_spread(ratios)}")
            for mixed, alone in (
                ("mixture, 4 KB, memory", "4 KB, memory"),
                ("mixture, rows of 1 KB", "rows in eight"),
            ):
                ratios = [one[1] / other[1] for one, other in zip(found[mixed], found[alone], strict=True)]
                print(f"processor time of {mixed}, of that of {alone}: {with_spread(ratios)}")


def cases_of(
    folder: str, files: int, rows: Rows, batch_size: int, seconds: float, opened: ExitStack
) -> dict[str, Callable[[float], Seconds]]:
    """Return what is timed, by name: each a function of the seconds that it may take.

    opened: closes the loaders, which have found their numbers of threads and filled their tiers.
    """
    raw: dict[str, Any] = {"transforms": [DecodeRaw("uint8")], "dtype": "uint8"}

    def loader(kept: int, is_mixed: bool = False, **settings: Any) -> Loader:
        slots = 64 * batch_size * SAMPLE_BYTES
        memory = 256 * 2**20 + slots + 2 * kept * SAMPLE_BYTES
        source: Any = FlatFolder(folder, extensions=None)
        if is_mixed:
            parts = [source.select(ids) for ids in np.split(np.arange(files), PARTS)]
            source = mix(parts, [1] * PARTS, at_end="drop")
        return Loader(
            source, batch_size=batch_size, epochs=10**6, memory=memory, report=None, **raw, **settings
        )

    eight: Any = mix([Rows(len(rows) // PARTS) for _ in range(PARTS)], [1] * PARTS, at_end="drop")

    def of_rows(data: Any = rows, **settings: Any) -> Loader:
        return Loader(data, batch_size=batch_size, epochs=10**6, report=None, **settings)

    peer = torch.utils.data.DataLoader(rows, batch_size, shuffle=True)
    sources: dict[str, Callable[..., Loader]] = {
        "4 KB, memory": partial(loader, files),
        "4 KB, files": partial(loader, 0, policy="staging"),
        "rows of 1 KB": of_rows,
        "rows in eight": partial(of_rows, RowsInEight(len(rows))),
        "mixture, 4 KB, memory": partial(loader, files, is_mixed=True),
        "mixture, rows of 1 KB": partial(of_rows, eight),
    }
    cases: dict[str, Callable[[float], Seconds]] = {
        "scheduler": lambda seconds: time_scheduler(loader(files, decoders=1), seconds)
    }
    for name, make in sources.items():
        with_threads = opened.enter_context(make())
        # In between it compares numbers of threads, the first times after 2 and 4 s.
        time_epochs(with_threads, 6 * seconds)
        cases[name] = partial(time_loader, with_threads)
        cases[f"{name}, no threads"] = partial(time_loader, opened.enter_context(make(decoders=0)))
    return cases | {"  DataLoader": partial(time_epochs, peer)}


def time_loader(loader: Loader, seconds: float) -> Seconds:
    """Time a loader that is as far ahead at its end as at its begin: it uses first what it read ahead while still."""
    time_epochs(loader, 0.3 * seconds)
    return time_epochs(loader, seconds)


def time_epochs(batches: Iterable[Any], seconds: float) -> Seconds:
    """Time whole epochs, one at least, until so many seconds have passed."""
    begin, worked, samples = time.perf_counter(), time.process_time(), 0
    while not samples or time.perf_counter() < begin + seconds:
        samples += sum(len(labels) for _, labels in batches)
    return (time.perf_counter() - begin) / samples, (time.process_time() - worked) / samples


def time_scheduler(loader: Loader, seconds: float) -> Seconds:
    """Time the scheduler of a loader that is never started."""
    scheduler = loader._parts.engine._scheduler
    while (loop := engine.DECISIONS.ask()) is None:
        time.sleep(0.05)
    scheduler.use(loop)
    with closing(loader):
        batches = decided(scheduler)
        for _ in zip(range(2 * len(loader)), batches, strict=False):
            pass  # the epoch that fills the tier, and one more
        begin, worked, samples = time.perf_counter(), time.process_time(), 0
        while not samples or time.perf_counter() < begin + seconds:
            samples += next(batches)
        return (time.perf_counter() - begin) / samples, (time.process_time() - worked) / samples


def decided(scheduler: Scheduler) -> Iterator[int]:
    """Run a scheduler by itself; yield the size of each batch that is complete."""
    queue = deque(scheduler.start(time.perf_counter()))
    while queue:
        now = time.perf_counter()
        match instruction := queue.popleft():
            case Load():
                own = [OwnRead(instruction.origins[0], len(instruction.rows), 0.0)]
                queue += scheduler.loaded(instruction, {}, own, now, 1e-4, 1e-4)
            case Ready():
                queue += scheduler.slot_freed(instruction.slot, now)
                yield instruction.samples.size


def with_spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
