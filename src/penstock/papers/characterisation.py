"""Table I and Figures 4 to 10 of Chien et al. 2018, measured on this machine by what `penstock bench` runs.

Its disks are not here: files lie where temporary ones go (TMPDIR), and a store with a latency stands for Lustre.

Source: S. Chien et al., "Characterizing Deep-Learning I/O Workloads in TensorFlow", arXiv:1810.03035, "the paper".
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.input_rates import InputRates, InputSettings, measure_input
from penstock.bench.loaders import Work
from penstock.bench.pictures import draw_saving, draw_training
from penstock.bench.saving import PUBLISHED_FACTOR, SavingResults, SyntheticTraining, measure_saving
from penstock.bench.training import FixedStep, Setting, TrainingResults, measure_training
from penstock.errors import ConfigError
from penstock.measure.file_rates import measure_maximum
from penstock.measure.picture import Colour, Panel, Series, draw_panels
from penstock.measure.slow_source import SlowSource
from penstock.papers.catalog import Repeated, Result
from penstock.papers.image_files import image_files
from penstock.ranks import alone
from penstock.store import Source
from penstock.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Bytes/s of one stream that reads, and of one that writes.
TABLE_I: Mapping[str, tuple[float, float]] = {
    "HDD": (163.00e6, 133.14e6),
    "SSD": (280.55e6, 195.05e6),
    "Optane": (1603.06e6, 511.78e6),
    "Lustre": (1968.618e6, 991.914e6),
}
THREADS = (1, 2, 4, 8)
DISK, LATENT = "this disk", "store of 10 ms"
#: Images/s by threads as multiples of one thread's (section VII): of a hard disk, and of Lustre.
SPEEDUPS: Mapping[str, Mapping[int, float]] = {DISK: {2: 1.65, 4: 1.95, 8: 2.3}, LATENT: {8: 7.8}}
_LATENCY_SECONDS = 5e-3  # of an open, and of a read

#: What is measured takes about a minute for each figure: the paper has 16,384 images, 142 steps of one to two seconds,
#: and states of 600 MB.
_IMAGES, _SECONDS = 384, 20.0
_BATCH, _STEPS, _STEP_SECONDS = 16, 8, 0.25
_MODEL_IMAGES, _MODEL_BATCHES = 16, (4, 8)
_STATE_BYTES, _EVERY, _SAVING_SECONDS = 150_000_000, 4, 150.0  # five saves, or as many as there is time for
_REPEATS = 3
_MEMORY = Path("/dev/shm")


def table_i() -> Repeated:
    """Return what one stream reads and writes where temporary files go, above the paper's devices."""
    maximum, doubts = measure_maximum(tempfile.gettempdir(), 20.0, time.perf_counter)
    results = [
        Result("this disk, read", maximum.read.median, None, "bytes per second"),
        Result("this disk, write", maximum.write.median, None, "bytes per second"),
    ]
    for device, rates in TABLE_I.items():
        for way, rate in zip(("read", "write"), rates, strict=True):
            results.append(Result(f"{device}, {way}", None, rate, "bytes per second"))
    why = " ".join(
        [
            "The paper's devices are not here; this is the disk of temporary files (TMPDIR names another), over a "
            f"file of {maximum.file_bytes / 1e9:.2g} GB instead of 5 GB.",
            *doubts,
        ]
    )
    return Repeated(results, why, lambda: _draw_maxima(results))


def figure_4() -> Repeated:
    """Return images/s by threads, read, decoded and resized, and how many times as many as one thread's."""
    why = (
        "The disk here is no hard disk, and decoding is bounded by the processors of this machine, of which the "
        "paper's had 8 and 24; where neither binds, threads hide a store's latency as Lustre's."
    )
    return _by_threads(Work.DECODE, why, SPEEDUPS)


def figure_5() -> Repeated:
    """Return the same of reading alone."""
    why = (
        "The paper prints no numbers of this figure; a disk without seeks gains less from threads than a store with a "
        "latency, and its page cache was dropped before each run."
    )
    return _by_threads(Work.READ, why, {})


def figure_6() -> Repeated:
    """Return run times with and without prefetch by threads, as multiples of the time that the steps take."""
    found = {name: _train(source, THREADS) for name, source in _stores()}
    ideal = _STEPS * _STEP_SECONDS
    results = []
    for name, training in found.items():
        for each in training.results:
            ahead = each.setting.has_prefetch
            of = f"{name}, {f'prefetch, {each.setting.threads} threads' if ahead else 'no prefetch'}"
            factor = each.run_seconds.median / ideal
            results.append(Result(f"{of}, run over steps", factor, 1.0 if ahead else None, "factor"))
        without, best = _pair(training, _BATCH)
        results.append(Result(f"{name}, cost of I/O", without - best, None, "seconds"))
    why = (
        "The paper says that with prefetch the run takes the same whatever the threads and storage, and prints no "
        "numbers; a batch must load faster than a step computes for that, which few threads on a store with a latency "
        "do not reach; the first batch is never hidden."
    )
    return Repeated(results, why, lambda: draw_training(found[LATENT]))


def figure_7() -> Repeated:
    """Return the time that AlexNet takes for the same images in batches of several sizes."""
    from penstock.bench.models import TrainingStep

    results, last = [], None
    with image_files(_MODEL_IMAGES) as source:
        for size in _MODEL_BATCHES:
            steps = _MODEL_IMAGES // size
            last = measure_training(
                source,
                TrainingStep("alexnet", 102),
                [Setting(0, size), Setting(max(THREADS), size)],
                steps=steps,
                repeats=2,
                ranks=alone(),
            )
            for each in last.results:
                ahead = "prefetch" if each.setting.has_prefetch else "no prefetch"
                of = f"batches of {size}, {ahead}, {_MODEL_IMAGES} images"
                results.append(Result(of, each.run_seconds.median, None, "seconds"))
    why = (
        "The paper prints no numbers of this figure; larger batches take less time there as they use a GPU better, and "
        "here as Adam changes 61 million weights less often."
    )
    return Repeated(results, why, lambda: _draw_batches(results))


def figure_8() -> Repeated:
    """Return what was read, and how fast at most, with and without prefetch."""
    results, found = [], {}
    for name, source in _stores():
        found[name] = training = _train(source, (max(THREADS),))
        for each in training.results:
            of = f"{name}, {'prefetch' if each.setting.has_prefetch else 'no prefetch'}"
            results.append(
                Result(f"{of}, fastest 0.1 s", float(each.flow.rates.max()), None, "bytes per second")
            )
            mean = each.flow.total_bytes / each.run_seconds.median
            results.append(Result(f"{of}, mean", mean, None, "bytes per second"))
    why = (
        "The paper prints no numbers of this figure, and samples once a second; with prefetch reads come closer "
        "together and higher, as there."
    )
    return Repeated(results, why, lambda: draw_training(found[DISK]))


def figure_9() -> Repeated:
    """Return run times of a training that saves a few times, straight and through a burst buffer."""
    found = _save()
    without = found.results[0].run_seconds.median
    results = [Result("no saves, run", without, None, "seconds")]
    for each in found.results[1:]:
        of = f"{each.way.saver}, {each.way.place}"
        results.append(Result(f"{of}, run", each.run_seconds.median, None, "seconds"))
        results.append(Result(f"{of}, a save holds the training", each.blocked_seconds, None, "seconds"))
    direct, burst = (
        found.result("torch", "slow") or found.result("penstock", "slow"),
        found.result("penstock", "burst"),
    )
    assert direct is not None, "measured"
    assert burst is not None, "measured"
    held = direct.blocked_seconds / burst.blocked_seconds
    factor = direct.run_seconds.median / burst.run_seconds.median
    results.append(Result("run, straight to slow over burst buffer", factor, PUBLISHED_FACTOR, "factor"))
    results.append(Result("a save, straight to slow over burst buffer", held, None, "factor"))
    return Repeated(results, f"{_saving_why(found)} {found.meaning}", lambda: draw_saving(found))


def figure_10() -> Repeated:
    """Return what the slow storage's disk was given during the run and after it."""
    found = _save()
    results = []
    for each in found.results[1:]:
        during = each.flow.before(each.last_run_seconds)
        of = f"{each.way.saver}, {each.way.place}, written"
        run = max(each.last_run_seconds, 1e-9)
        results.append(Result(f"{of} during the run, mean", during / run, None, "bytes per second"))
        share = 1 - during / max(each.flow.total_bytes, 1.0)
        results.append(Result(f"{of} after the run", share, None, "share"))
        results.append(Result(f"{of}, until all is there", each.settled_seconds, None, "seconds"))
    why = f"{_saving_why(found)} The paper prints no numbers of this figure; there, too, copying continues after it."
    return Repeated(results, why, lambda: draw_saving(found))


def _saving_why(found: SavingResults) -> str:
    return (
        "The slow storage is the disk of temporary files, the fast one memory (/dev/shm); the paper's were a hard disk "
        f"and an Optane card, its state 600 MB and its steps longer; here {found.saves} saves of "
        f"{format_bytes(found.state_bytes)} fall into {found.steps} steps."
    )


@contextmanager
def _latent(source: Source) -> Iterator[Source]:
    with SlowSource(source, _LATENCY_SECONDS, _LATENCY_SECONDS, TABLE_I["Lustre"][0]) as slow:
        yield slow


def _stores() -> Iterator[tuple[str, Source]]:
    """Yield the images on this disk, and the same behind a latency and Lustre's bandwidth."""
    with image_files(_IMAGES) as source, _latent(source) as slow:
        yield DISK, source
        yield LATENT, slow


def _by_threads(work: Work, why: str, published: Mapping[str, Mapping[int, float]]) -> Repeated:
    found: dict[str, InputRates] = {
        name: measure_input(
            source, InputSettings(THREADS, (64,), (work,)), max_seconds=_SECONDS, ranks=alone()
        )
        for name, source in _stores()
    }
    results = []
    for name, rates in found.items():
        one = rates.results[0].samples_per_second.median
        for each in rates.results:
            rate = each.samples_per_second.median
            results.append(Result(f"{name}, {each.threads} threads", rate, None, "samples per second"))
            if each.threads > 1:
                of = f"{name}, {each.threads} threads over one"
                said = published.get(name, {}).get(each.threads)
                results.append(Result(of, rate / one, said, "factor"))
    return Repeated(results, why, lambda: _draw_rates(found))


def _train(source: Source, threads: Sequence[int]) -> TrainingResults:
    settings = [Setting(count, _BATCH) for count in (0, *threads)]
    return measure_training(
        source, FixedStep(_STEP_SECONDS), settings, steps=_STEPS, repeats=_REPEATS, ranks=alone()
    )


def _pair(training: TrainingResults, size: int) -> tuple[float, float]:
    pair = training.cost_of_io(size)
    assert pair is not None, "both were measured"
    without, best = (each.run_seconds.median for each in pair)
    return without, best


def _save() -> SavingResults:
    if not os.access(_MEMORY, os.W_OK):
        raise ConfigError(f"{_MEMORY} cannot be written; it stands for the fast storage: mount a tmpfs there")
    return measure_saving(
        Path(tempfile.gettempdir()),
        _MEMORY,
        SyntheticTraining(_STATE_BYTES, 0.1),
        peers=["torch"],
        steps=None,
        every=_EVERY,
        repeats=_REPEATS,
        max_seconds=_SAVING_SECONDS,
    )


def _draw_maxima(results: Sequence[Result]) -> Figure:
    panels = []
    for way in ("read", "write"):
        own = [each for each in reversed(results) if each.of.endswith(way)]
        rates = [(each.computed or each.published or 0.0) / 1e6 for each in own]
        names = [each.of.partition(",")[0] for each in own]
        panels.append(Panel(way, [Series("", rates, names, Colour.BLUE, "", "o")]))
    return draw_panels(panels, x_label="MB/s", y_label="", is_shared=False)


def _draw_rates(found: Mapping[str, InputRates]) -> Figure:
    series = [
        Series(name, THREADS, [each.samples_per_second.median for each in rates.results], colour, marker="o")
        for (name, rates), colour in zip(found.items(), (Colour.BLUE, Colour.ORANGE), strict=True)
    ]
    return draw_panels([Panel("", series)], x_label="threads", y_label="images/s")


def _draw_batches(results: Sequence[Result]) -> Figure:
    series = [
        Series(name, _MODEL_BATCHES, [each.computed or 0.0 for each in results[begin::2]], colour, marker="o")
        for begin, (name, colour) in enumerate((("no prefetch", Colour.FAINT), ("prefetch", Colour.BLUE)))
    ]
    return draw_panels([Panel("AlexNet", series)], x_label="images of a batch", y_label="run (s)")
