"""The mini-application: a training on a data set, with and without reading ahead; the difference is what I/O costs.

Every run takes the same batches in the same order, whose pages were dropped from the page cache before. Without
prefetch each batch is loaded when it is asked for, by the training's own thread. Source: Chien et al. 2018, III.B, V.B.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.bench.checks import MOST_STEPS, check_repeats, check_shared, rounds
from penstock.bench.loaders import TRANSFORMS, files_of
from penstock.bench.traffic import Flow, Traffic, flow_of
from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.measure.calibrate import CACHE_REMARKS, PageCache, page_cache_of
from penstock.measure.pagecache import drop_files
from penstock.measure.spread import Spread
from penstock.plan import Explicit, FullShuffle
from penstock.ranks import Ranks
from penstock.store import Numeric, Source
from penstock.trace import Kind
from penstock.units import format_count, format_seconds

_FEWEST_STEPS = 2
_SEED = 0


class Step(Protocol):
    """What a training does with a batch."""

    def begin(self) -> None:
        """Begin anew."""
        ...

    def __call__(self, images: NDArray[np.float32], labels: NDArray[np.int64], /) -> float:
        """Use a batch and return its loss."""
        ...


class FixedStep:
    """A step that computes elsewhere for a fixed time, as on a GPU: the processors are free meanwhile.

    Its loss is a sum over some of the pixels and all labels, so that other batches have other losses.
    """

    def __init__(self, step_seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._step_seconds, self._sleep = step_seconds, sleep

    def begin(self) -> None:
        pass

    def __call__(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        begin = time.perf_counter()
        loss = float(images[..., ::16, ::16].sum(dtype=np.float64)) + float(labels.sum())
        self._sleep(max(0.0, self._step_seconds - (time.perf_counter() - begin)))
        return loss


class Setting(NamedTuple):
    """How batches come. threads: that read, and as many that decode; 0: no prefetch, the training's own thread does it.

    batch_size: over all ranks. prefetch: batches that are read ahead; None: as far as memory allows.
    """

    threads: int
    batch_size: int
    prefetch: int | None = None

    @property
    def has_prefetch(self) -> bool:
        return self.threads > 0

    @property
    def ahead(self) -> str:
        """How far it reads ahead, as `penstock bench train --prefetch` has it."""
        return "auto" if self.has_prefetch and self.prefetch is None else str(self.prefetch or 0)


class Seconds(NamedTuple):
    """What a run took, what of that was spent waiting; what its reads and its decodes took, over all threads."""

    run: float
    stall: float
    reads: float
    decodes: float


class TrainingRun(NamedTuple):
    """One run of one rank. flow: what was read when."""

    seconds: Seconds
    losses: tuple[float, ...]
    flow: Flow


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a setting came to: medians over runs, each that of the slowest rank."""

    setting: Setting
    run_seconds: Spread
    stall_seconds: float
    read_seconds: float
    decode_seconds: float
    #: Of the last run.
    flow: Flow
    last_loss: float


@dataclass(frozen=True, slots=True)
class TrainingResults:
    """All results. has_equal_losses: whether those of one batch size are the same in all runs, bit by bit."""

    results: tuple[TrainingResult, ...]
    steps: int
    ranks: int
    page_cache: PageCache
    has_equal_losses: bool
    cautions: tuple[str, ...]

    def cost_of_io(self, batch_size: int) -> tuple[TrainingResult, TrainingResult] | None:
        """Return the result without prefetch and the fastest with it; None where either was not measured."""
        own = [each for each in self.results if each.setting.batch_size == batch_size]
        ahead = [each for each in own if each.setting.has_prefetch]
        without = [each for each in own if not each.setting.has_prefetch]
        if not ahead or not without:
            return None
        return without[0], min(ahead, key=lambda each: each.run_seconds.median)

    @property
    def meaning(self) -> str:
        """What the figures mean for a training, in a sentence for each batch size."""
        found = []
        for size in sorted({each.setting.batch_size for each in self.results}):
            if (pair := self.cost_of_io(size)) is None:
                continue
            without, best = pair
            excess = without.run_seconds.median - best.run_seconds.median
            longer = (
                f"{format_seconds(excess)} longer ({100 * excess / best.run_seconds.median:.0f} %), which is what "
                "reading and decoding cost"
                if excess > 0
                else "no longer: the processors, or the storage, cannot load and train at the same time"
            )
            threads = format_count(best.setting.threads, "thread")
            share = best.stall_seconds / best.run_seconds.median
            found.append(
                f"Batches of {size}: without prefetch the run takes {longer}; with prefetch and {threads} "
                f"{100 * share:.1f} % of the run are still spent waiting."
            )
        return (
            " ".join(found)
            or "With and without prefetch side by side (--prefetch 0,auto) shows what I/O costs."
        )


def measure_training(
    source: Source,
    step: Step,
    settings: Sequence[Setting],
    *,
    steps: int | None,
    repeats: int,
    max_seconds: float = math.inf,
    ranks: Ranks,
    done: Callable[[], None] = lambda: None,
) -> TrainingResults:
    """Train by each setting, all in turn, `repeats` times, or as often as time allows, twice at least.

    The first round is left out. steps: of a run, within one epoch; unless given, as many as two rounds have time for,
        `MOST_STEPS` at most. ranks: of the job; all train at the same time, each on its own samples, without
        exchanging gradients.
    Raises: ConfigError for a data set without two batches, of other than pictures, or a batch that the ranks cannot
        share equally; DataError for a sample that cannot be read or decoded.
    """
    most_steps = _checked_steps(source, settings, steps or MOST_STEPS, repeats, ranks.size)
    order = FullShuffle(len(source), _SEED)
    classes = label_numbers(source)

    def run_once(setting: Setting, steps: int) -> TrainingRun:
        ids = order.at(0, np.arange(steps * setting.batch_size))[ranks.rank :: ranks.size]
        shares.extend(drop_files(files_of(source, ids)))
        step.begin()
        ranks.all_gather("beginning a run", None)
        own: list[TrainingRun] = []

        def train() -> Seconds:
            own.append(_train(source, step, setting, ids, setting.batch_size // ranks.size, classes))
            return own[0].seconds

        # A rank that trains is heard of, however long it takes, and one that fails is named on all of them.
        slowest = max(Seconds(*each) for each in ranks.gather_then_decide("a run", train))
        return own[0]._replace(seconds=slowest)

    runs: dict[Setting, list[TrainingRun]] = {setting: [] for setting in settings}
    losses: dict[int, set[tuple[float, ...]]] = {}
    shares: list[float | None] = []
    if steps is None:
        # No other takes longer by the step than the one with the fewest threads and the largest batch.
        slowest = min(settings, key=lambda each: (each.threads, -each.batch_size))
        a_step = run_once(slowest, _FEWEST_STEPS).seconds.run / _FEWEST_STEPS
        allowed = int(min(most_steps, max_seconds / (2 * len(settings) * a_step)))
        steps = max(_FEWEST_STEPS, allowed)
    else:
        steps = most_steps
    for _ in rounds(repeats, max_seconds, ranks):
        for setting, own in runs.items():
            own.append(run_once(setting, steps))
            losses.setdefault(setting.batch_size, set()).add(own[-1].losses)
            done()
    page_cache = page_cache_of(shares)
    has_equal_losses = all(
        ranks.all_gather("comparing losses", all(len(each) == 1 for each in losses.values()))
    )
    cautions = [] if page_cache is PageCache.COLD else [CACHE_REMARKS[page_cache]]
    if not has_equal_losses:
        cautions.append(
            "CAUTION: losses differ between runs of the same batches: the model does not compute alike each time."
        )
    return TrainingResults(
        tuple(_result(setting, own) for setting, own in runs.items()),
        steps,
        ranks.size,
        page_cache,
        has_equal_losses,
        tuple(cautions),
    )


def label_numbers(source: Source) -> NDArray[np.int64]:
    """Return a class for each sample, int64[samples]; zeros where labels are none, or of several kinds."""
    labels = source.labels
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        return np.zeros(len(source), np.int64)
    # Below zero stands for no label.
    return np.maximum(labels, 0).astype(np.int64)


def _checked_steps(source: Source, settings: Sequence[Setting], steps: int, repeats: int, ranks: int) -> int:
    largest = max(setting.batch_size for setting in settings)
    if isinstance(source, Numeric):
        raise ConfigError("the samples are numbers; the mini-application trains on pictures")
    if len(source) < _FEWEST_STEPS * largest:
        raise ConfigError(
            f"the source has {format_count(len(source), 'sample')}, fewer than two batches of {largest}: give a "
            "smaller batch size, or more samples"
        )
    check_repeats(repeats, "train")
    for setting in settings:
        check_shared(setting.batch_size, ranks)
    return min(steps, len(source) // largest)


def _train(
    source: Source,
    step: Step,
    setting: Setting,
    ids: NDArray[np.int64],
    local_batch: int,
    classes: NDArray[np.int64],
) -> TrainingRun:
    threads: dict[str, Any] = {"decoders": 0}
    if setting.has_prefetch:
        threads = {"readers": setting.threads, "decoders": setting.threads, "prefetch": setting.prefetch}
    loader = Loader(
        source,
        batch_size=local_batch,
        epochs=1,
        shuffle=Explicit(ids, len(source)),
        transforms=TRANSFORMS,
        policy="staging",
        rank=0,
        world_size=1,
        report=None,
        **threads,
    )
    losses = []
    numbers = iter(range(0, len(ids), local_batch))
    with Traffic() as traffic, loader:
        begin = time.perf_counter()
        for batch in loader:
            first = next(numbers)
            losses.append(step(batch[0], classes[ids[first : first + local_batch]]))
        seconds = time.perf_counter() - begin
        metrics = loader.metrics[0]
    loading = {Kind.READ: 0.0, Kind.DECODE: 0.0}
    for stage, durations in metrics.stages.items():
        if stage.kind in loading:
            loading[stage.kind] += durations.seconds
    flow = flow_of(traffic.record, "read")
    spent = Seconds(seconds, metrics.stall_seconds, loading[Kind.READ], loading[Kind.DECODE])
    return TrainingRun(spent, tuple(losses), flow)


def _result(setting: Setting, runs: Sequence[TrainingRun]) -> TrainingResult:
    counted = np.median([run.seconds for run in runs[1:]], axis=0)
    middle = Seconds(*map(float, counted))
    return TrainingResult(
        setting,
        Spread.after_first([run.seconds.run for run in runs]),
        middle.stall,
        middle.reads,
        middle.decodes,
        runs[-1].flow,
        runs[-1].losses[-1],
    )
