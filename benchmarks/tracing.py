"""What it costs to record, sum up and explain a trace, and to sample a host as `penstock watch` does.

    python benchmarks/tracing.py [--quick]

Prints the median cost with its 5th and 95th percentile over rounds that take turns, beside a bound: the bare
`struct.pack_into` for one span. Targets: 2 us a span, 0.2 us a sample in groups of 64; 10 s to explain the 900,000
spans that a file holds, 11 us each; 0.5 % of a core for sampling, that is 500 us a row at 10 rows a second and 250 us
at 20. Rows are timed by the processor time of their thread, each after a pause, as rows come, and with what making
sense of them takes; all else on the wall's clock, warm: the first round is not counted.
"""

from __future__ import annotations

import argparse
import platform
import struct
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np

from penstock.flow.recorder import Recorder, Ring
from penstock.measure.explain import explain
from penstock.measure.sampling import Sampler
from penstock.trace import SOURCE, SPAN, Cause, Kind, Spans, Trace, epoch_metrics

RING_SPANS = 65_536


def main(arguments: list[str] | None = None) -> None:
    """Check the answers, time them, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that it runs, not how fast"
    )
    quick = parser.parse_args(arguments).quick
    rounds, calls, rows = (1, 100, 2) if quick else (20, 5_000, 20)
    spans = a_run(epochs=2, steps=10 if quick else 1_250, batch=64)
    check_answers(spans)

    trace = Trace(spans)
    tree = [int(path.name) for path in Path("/proc").glob("[0-9]*")][:16]
    sampler = Sampler(tree[0], tree_of=lambda _: tree)
    ring, other = Recorder(RING_SPANS).ring(0), Recorder(RING_SPANS)
    contenders: dict[str, tuple[Callable[[], object], int, str]] = {
        "record, one span": (lambda: ring.record(Kind.READ, 1.0, 2.0, 5, 100, 1, 2, SOURCE), calls, "span"),
        "  bound: struct.pack_into alone": (bare_pack(), calls, "span"),
        "record + record_ids, groups of 64": (record_group(ring, 64), calls, "sample"),
        "drain of a full ring": (fill_and_drain(other), 1, "span"),
        f"epoch_metrics of {spans.size} spans": (lambda: epoch_metrics(spans), 1, "span"),
        f"explain of {spans.size} spans": (lambda: explain(trace), 1, "span"),
        **{
            f"{len(tree)} processes, {rate} rows a second": (in_turns(sampler, 1 / rate, rows), 1, "row")
            for rate in (10, 20)
        },
    }
    units = [1, 1, 64, RING_SPANS, spans.size, spans.size, rows, rows]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for (name, (call, count, per)), unit in zip(contenders.items(), units, strict=True):
            clock = time.thread_time if per == "row" else time.perf_counter
            begin = clock()
            for _ in range(count):
                call()
            seconds[name].append((clock() - begin) / count / unit)

    sampler.close()
    print(f"{date.today()}, {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{'':34}{'median':>9}{'p5':>9}{'p95':>9}")
    for name, (_, _, per) in contenders.items():
        median, low, high = np.percentile(seconds[name][1:], [50, 5, 95]) * 1e6
        print(f"{name:34}{median:9.4f}{low:9.4f}{high:9.4f}  us/{per}")
        if per == "row":
            rate = int(name.split()[2])
            print(f"  of a core: {median * rate / 1e6:.2%}")


def a_run(epochs: int, steps: int, batch: int) -> Spans:
    """Return the spans of a run that waits a quarter of each second-long step for its last sample's read."""
    rows = []
    for epoch in range(epochs):
        for step in range(steps):
            asked = float(epoch * steps + step)
            rows.append((asked, asked + 0.25, -1, 0, 0, epoch, step, batch, -1, Kind.WAIT, -128, 0, 0))
            rows.append((asked + 0.25, asked + 1.0, -1, 0, 0, epoch, step, batch, -1, Kind.STEP, -128, 0, 0))
            for place in range(batch):
                sample = step * batch + place
                ready = asked + 0.25 * (place + 1) / batch
                rows.append(
                    (ready - 0.1, ready, sample, 110_000, 0, epoch, step, 1, -1, Kind.READ, SOURCE, 1, 0)
                )
                rows.append((ready, ready, sample, 0, 0, epoch, step, 1, -1, Kind.DECODE, -128, 2, 0))
    return np.array(rows, SPAN)


def check_answers(spans: Spans) -> None:
    """Raise when the sums are not those that the run was made to have."""
    for epoch in epoch_metrics(spans):
        quarter = 0.25 * epoch.steps
        assert abs(epoch.stall_by_cause[Cause.SOURCE_READ] - quarter) < 1e-6, "all waiting is for the source"
        assert abs(epoch.stall_seconds - quarter) < 1e-6, "a quarter of every step is waited"


def record_group(ring: Ring, group: int) -> Callable[[], object]:
    """Return a call that records the read of one group and which samples it is."""
    ids = np.arange(group)

    def call() -> None:
        ring.record_ids(7, ids)
        ring.record(Kind.READ, 1.0, 2.0, 0, 100 * group, 1, 2, SOURCE, samples=group, flow=7)
        ring.drain_ids()

    return call


def bare_pack() -> Callable[[], object]:
    """Return a call that writes the bytes of one span and does nothing else."""
    pack, buffer = struct.Struct("<ddqqQiiIiBb").pack_into, bytearray(SPAN.itemsize)
    return lambda: pack(buffer, 0, 1.0, 2.0, 5, 100, 0, 1, 2, 1, -1, 2, -1)


def in_turns(sampler: Sampler, pause_seconds: float, rows: int) -> Callable[[], object]:
    """Return a call that takes rows, each when other programs have had the processor's caches for a while."""

    def call() -> None:
        for _ in range(rows):
            time.sleep(pause_seconds)
            sampler.sample()
        sampler.rows()

    return call


def fill_and_drain(recorder: Recorder) -> Callable[[], object]:
    """Return a call that drains a full ring, which it takes for written anew."""
    ring = recorder.ring(0)

    def call() -> None:
        ring._claimed += RING_SPANS
        ring._written += RING_SPANS
        recorder.drain()

    return call


if __name__ == "__main__":
    main()
