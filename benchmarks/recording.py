"""What a trace costs a training, how large it gets, and what explaining a day of it takes.

    python benchmarks/recording.py [--rounds N] [--seconds S] [--samples N] [--quick]

Epochs of two loaders in one process take turns, one with `trace=` and one without, after some that fill the memory
tier: samples of 4 KB from memory and from files of the page cache, and JPEG images of 256 x 192 that are decoded. Each
reports a line at the end of an epoch, as a loader does unless told otherwise.
Printed is the ratio of the processor time of a sample, as the median of all pairs with its 95 % interval. It varies by
more than what recording costs. So each part is also timed by itself, by the processor time of its thread, which other
programs disturb little: recording spans, which samples they are with their flow, and what `trace=` adds, that is
writing and asking for the interpreter's lock. Aim: 1 % together. Beside it, what summing up for the line at the end of
an epoch takes, with `trace=` or without; of 65,536 samples from memory an epoch takes 0.3 s.

Then a day's run is recorded as fast as it goes: --samples in batches of 256, each read and decoded in groups of 64,
over 86,400 seconds. Printed are the size of its file, aim 64 MB at most, and the time and memory of
`penstock explain`, aim 10 s. Memory is counted with tracemalloc, in a second pass.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

from penstock.compiling import without_plain_forms
from penstock.flow import engine
from penstock.flow.collector import Collector
from penstock.flow.recorder import Recorder
from penstock.flow.sums import SUMS
from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw, Resize, ToTensor
from penstock.measure.explain import Reason, explain
from penstock.measure.recorded import open_run
from penstock.measure.spread import Spread
from penstock.store import FlatFolder
from penstock.trace import SOURCE, SPAN, Kind, TraceWriter
from penstock.trace.file import ids_in, spans_in

SAMPLE_BYTES, BATCH, GROUP, DAY_SECONDS = 4096, 256, 64, 86_400.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="that epochs of one loader are timed, about"
    )
    parser.add_argument("--samples", type=int, default=10**8, help="of the day's run")
    parser.add_argument("--quick", action="store_true", help="few samples, one round: shows that it runs")
    options = parser.parse_args(arguments)
    rounds, seconds = (1, 0.0) if options.quick else (options.rounds, options.seconds)
    files, images = (1024, 256) if options.quick else (65_536, 1024)
    engine._WORTH_COMPILING_SAMPLES = 0
    SUMS.wait()
    print(
        f"{date.today()}  {platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory(prefix="penstock-recording-") as name, without_plain_forms():
        folder = Path(name)
        for case, make in cases_of(folder, files, images).items():
            compare(case, make, folder / "run.trace", rounds, seconds)
        record_a_day(folder / "day.trace", 10**6 if options.quick else options.samples)


def cases_of(folder: Path, files: int, images: int) -> dict[str, Callable[[Path | None], Loader]]:
    """Return what makes a loader, by name: each a function of where the trace goes."""
    (folder / "raw").mkdir()
    (folder / "jpeg").mkdir()
    random = np.random.default_rng(0)
    for number in range(files):
        (folder / "raw" / f"{number:06}.bin").write_bytes(random.bytes(SAMPLE_BYTES))
    for number in range(images):
        pixels = random.integers(0, 255, (12, 16, 3), np.uint8)
        Image.fromarray(pixels).resize((256, 192)).save(folder / "jpeg" / f"{number:06}.jpg")
    raw: dict[str, Any] = {"transforms": [DecodeRaw("uint8")], "dtype": "uint8", "batch_size": BATCH}

    lines: deque[str] = deque(maxlen=1)  # each epoch ends with one, which its sums are made for

    def loader(kind: str, **settings: Any) -> Callable[[Path | None], Loader]:
        source = FlatFolder(folder / kind, extensions=None)
        return lambda trace: Loader(
            source,
            epochs=10**6,
            memory="1 GiB",
            report=lines.append,
            decoders=1,
            readers=4,
            trace=trace,
            **settings,
        )

    return {
        "4 KB, memory": loader("raw", **raw),
        "4 KB, files": loader("raw", policy="staging", **raw),
        "images": loader("jpeg", transforms=[Resize((224, 224)), ToTensor()], batch_size=64),
    }


def compare(
    case: str, make: Callable[[Path | None], Loader], trace: Path, rounds: int, seconds: float
) -> None:
    """Take epochs with a trace and without in turn, of two loaders side by side; print what recording costs."""
    ratios, spans = [], 0
    parts: dict[str, deque[float]] = {
        name: deque() for name in ("_collect", "_summed", "_write", "_ask_for_lock", "_flow_of")
    }
    total = samples = 0.0
    with make(trace) as recording, make(None) as bare:
        for loader in (recording, bare):
            spend(loader, seconds)
        gc.collect()
        gc.disable()
        for number in range(rounds):
            spent = {}
            for loader in (recording, bare) if number % 2 else (bare, recording):
                if loader is recording:
                    with timing(parts, loader) as drained:
                        spent[loader] = spend(loader, seconds)
                    spans += sum(drained)
                    total, samples = total + spent[loader][0], samples + spent[loader][1]
                else:
                    spent[loader] = spend(loader, seconds)
            ours, theirs = (worked / count for worked, count in (spent[recording], spent[bare]))
            ratios.append(ours / theirs)
        gc.enable()
    of_all = Spread.of(ratios)
    recorded = spans * seconds_of_a_span() / total
    collecting, summed, writing, asking, naming = (sum(parts[name]) / total for name in parts)
    collecting += summed
    # Reading the clock of a thread takes as long as what it times.
    naming -= len(parts["_flow_of"]) * seconds_of_timing() / total
    # Each Load looks whether it is to ask, and has a flow or two.
    asking += len(parts["_flow_of"]) * seconds_of_a_look() / total
    print(
        f"{case}: {1e6 * total / samples:.2f} CPU us a sample; with trace= {of_all.median:.3f} of that without "
        f"({of_all.low:.3f} to {of_all.high:.3f}); recording {recorded + naming + writing + asking:.2%}: "
        f"{spans / samples:.3f} spans a sample {recorded:.2%}, which samples they are {naming:.2%}, writing "
        f"{writing:.2%}, asking for the lock {asking:.2%}; sums for a line an epoch {collecting - writing:.2%}",
        flush=True,
    )


@contextmanager
def timing(parts: dict[str, deque[float]], loader: Loader) -> Iterator[deque[int]]:
    """Add the processor seconds of each call of some methods to the lists of their names; yield how many spans came."""
    drained: deque[int] = deque()

    def timed(owner: type, name: str) -> Any:
        original = getattr(owner, name)

        def call(*arguments: Any, **how: Any) -> Any:
            begin = time.thread_time()
            try:
                return original(*arguments, **how)
            finally:
                parts[name].append(time.thread_time() - begin)

        return patch.object(owner, name, call)

    def drain() -> Any:
        found = Recorder.drain(loader.recorder)
        drained.append(found.size)
        return found

    with (
        timed(Collector, "_collect"),
        timed(Collector, "_summed"),
        timed(Collector, "_write"),
        timed(engine.Engine, "_ask_for_lock"),
        timed(engine.Engine, "_flow_of"),
        patch.object(loader.recorder, "drain", drain),
    ):
        yield drained


def seconds_of_timing() -> float:
    """Return the processor seconds that `timing` finds in a call that does nothing, at the least."""
    return min(time.thread_time() - begin for begin in (time.thread_time() for _ in range(1000)))


def seconds_of_a_look() -> float:
    """Return the processor seconds in which a Load finds that asking for the lock is not due."""
    clock, due, count = Recorder(1).clock, {0: math.inf}, 20_000
    begin = time.thread_time()
    for _ in range(count):
        _ = clock() >= due.get(0, 0.0)
    return (time.thread_time() - begin) / count


def seconds_of_a_span() -> float:
    """Return the processor seconds that recording a span takes, its clock readings included, its flow not."""
    recorder, count = Recorder(1 << 13), 20_000
    ring, clock = recorder.ring(0), recorder.clock
    begin = time.thread_time()
    for _ in range(count):
        start = clock()
        ring.record(Kind.READ, start, clock(), 7, 4096, 3, 5, SOURCE, samples=16, flow=1)
    return (time.thread_time() - begin) / count


def spend(loader: Loader, seconds: float) -> tuple[float, int]:
    """Return processor seconds and samples of whole epochs, from all slots full to all slots full again."""
    settle()
    begin, worked, samples = time.perf_counter(), time.process_time(), 0
    while not samples or time.perf_counter() < begin + seconds:
        samples += sum(len(batch[0]) for batch in loader)
    settle()
    return time.process_time() - worked, samples


def settle() -> None:
    """Wait until no thread of this process computes any more: the next batches are staged."""
    before = -1.0
    while time.process_time() - before > 1e-3:
        before = time.process_time()
        time.sleep(0.01)


def record_a_day(path: Path, samples: int) -> None:
    """Record a run of a day, whose every step waits half of its time for its last read, and explain it."""
    now = 0.0
    recorder = Recorder(1 << 13, clock=lambda: now)
    ring, collector = recorder.ring(0), Collector(recorder, TraceWriter(path, {}), print)
    steps, per_epoch = samples // BATCH, 5_000
    step_seconds = DAY_SECONDS / steps
    largest = 0
    begin = time.process_time()
    for step in range(steps):
        now = step * step_seconds
        epoch, number = divmod(step, per_epoch)
        for group in range(BATCH // GROUP):
            flow, first = recorder.next_flow(), number * BATCH + group * GROUP
            ring.record_ids(flow, np.arange(first, first + GROUP))
            what = (first, GROUP * SAMPLE_BYTES, epoch, number)
            ring.record(Kind.READ, now, now + step_seconds / 2, *what, SOURCE, samples=GROUP, flow=flow)
            ring.record(
                Kind.DECODE, *2 * (now + step_seconds / 2,), first, 0, epoch, number, samples=GROUP, flow=flow
            )
        ring.record(Kind.WAIT, now, now + step_seconds / 2, -1, 0, epoch, number, samples=BATCH)
        ring.record(Kind.STEP, now + step_seconds / 2, now + step_seconds, -1, 0, epoch, number)
        collector.consumed = (epoch, number)
        if ring.is_half_full:
            collector.collect()
            largest = max(largest, path.stat().st_size)
    collector.close()
    spent, size = time.process_time() - begin, path.stat().st_size
    assert max(size, largest) <= 64e6, "a trace is bounded"
    print(
        f"{samples:,} samples over a day: file {size / 1e6:.1f} MB at the end, {max(size, largest) / 1e6:.1f} MB at "
        f"most, {spent / samples * 1e6:.3f} CPU us/sample"
    )
    begin = time.process_time()
    found = explain(open_run(path))
    spent = time.process_time() - begin
    assert abs(found.by_reason[Reason.SOURCE_READ] - DAY_SECONDS / 2) < 0.01 * DAY_SECONDS, "half is waited"
    spans = sum(part.size for part in spans_in(path))
    largest_chunk = max(sum(16 + ids.nbytes for ids in part.values()) for part in ids_in(path))
    largest_chunk = max(largest_chunk, *(part.nbytes for part in spans_in(path)))
    tracemalloc.start()
    explain(open_run(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(
        f"explain of its {spans:,} spans, in chunks of {largest_chunk / 1e6:.1f} MB at most, where "
        f"{65_536 * SPAN.itemsize / 1e6:.1f} MB are allowed: {spent:.2f} CPU s, {peak / 1e6:.1f} MB of memory at most"
    )


if __name__ == "__main__":
    main()
