"""A training that saves every few steps: straight to slow or fast storage, through a burst buffer, or not at all.

Source: Chien et al. 2018, sections III.C, V.C; Figures 9 and 10, where a burst buffer makes saving 2.6 times as fast.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.bench.checks import MOST_STEPS, check_repeats, installed, rounds
from penstock.bench.savers import KEPT, OWN, Saver, State, own_bytes, saver_named
from penstock.bench.traffic import Flow, Traffic, disk_of, flow_of
from penstock.errors import ConfigError, DataError
from penstock.measure.spread import Spread
from penstock.ranks import Ranks, alone
from penstock.units import format_bytes, format_seconds

PUBLISHED_FACTOR = 2.6
#: Of an array of the synthetic state, and of the changes that are added to it.
_ARRAY_BYTES = 8 << 20
_CHANGE = 1e-4
#: Of what snapshots take, for the tables next to them.
_SPACE_FACTOR = 1.05
#: Of a run, unless its steps are given.
_FEWEST_SAVES = 2
#: Run times that differ by this factor differ for a reason.
_NOTABLE = 1.1


class Workload(Protocol):
    """A training as far as saves are concerned."""

    state_bytes: int

    def compute(self, *, is_saved: bool) -> None:
        """Do a step. is_saved: whether the state is saved after it."""
        ...

    def state(self) -> State:
        """Return what is saved."""
        ...


class SyntheticTraining:
    """float32 arrays like weights, which change a little before each save, and steps of a fixed time.

    state_bytes: of all arrays, at least one. step_seconds: of a step, in which the processors are free but for that.
    """

    def __init__(
        self, state_bytes: int, step_seconds: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        draw = np.random.default_rng(0)
        sizes = [_ARRAY_BYTES] * (state_bytes // _ARRAY_BYTES) + [state_bytes % _ARRAY_BYTES]
        self._arrays = {
            f"array {number}": 0.02 * draw.standard_normal(-(-size // 4), np.float32)
            for number, size in enumerate(sizes)
            if size
        }
        self._changes = _CHANGE * draw.standard_normal(_ARRAY_BYTES // 4, np.float32)
        self._step_seconds, self._sleep = step_seconds, sleep
        self.state_bytes = sum(array.nbytes for array in self._arrays.values())

    def compute(self, *, is_saved: bool) -> None:
        begin = time.perf_counter()
        if is_saved:
            for array in self._arrays.values():
                array += self._changes[: array.size]
        self._sleep(max(0.0, self._step_seconds - (time.perf_counter() - begin)))

    def state(self) -> State:
        return dict(self._arrays)


class ModelTraining:
    """A model of `penstock.bench.checks.MODELS`, trained on one random batch; its state has the optimiser's, too."""

    def __init__(self, name: str, batch_size: int) -> None:
        from penstock.bench.loaders import SIDE
        from penstock.bench.models import TrainingStep

        draw = np.random.default_rng(0)
        self._step = TrainingStep(name, 1000)
        self._images: NDArray[np.float32] = draw.random((batch_size, 3, SIDE, SIDE), np.float32)
        self._labels = draw.integers(0, 1000, batch_size)
        self.compute(is_saved=False)  # the optimiser makes its moments in the first step
        self.state_bytes = self._step.state_bytes

    def compute(self, *, is_saved: bool) -> None:
        self._step(self._images, self._labels)

    def state(self) -> State:
        return self._step.state()


class Way(NamedTuple):
    """How and where a training saves. saver: a name of `savers`, "" for no saves. place: "slow", "fast" or "burst"."""

    saver: str
    place: str


def ways_of(peers: Sequence[str]) -> list[Way]:
    """Return none, each saver to each place, and Penstock's burst buffer.

    >>> [f"{way.saver} {way.place}" for way in ways_of(["torch"])]
    [' ', 'torch slow', 'penstock slow', 'torch fast', 'penstock fast', 'penstock burst']
    """
    direct = [Way(saver, place) for place in ("slow", "fast") for saver in (*peers, OWN)]
    return [Way("", ""), *direct, Way(OWN, "burst")]


class SavingRun(NamedTuple):
    """One run. blocked_seconds, durable_seconds: of each save. settled_seconds: after the run until all was in place.

    flow: what was written to the slow storage's disk, during the run and until then.
    """

    run_seconds: float
    blocked_seconds: tuple[float, ...]
    durable_seconds: tuple[float, ...]
    settled_seconds: float
    flow: Flow


@dataclass(frozen=True, slots=True)
class SavingResult:
    """Medians of a way's runs; those of a save over all saves that count."""

    way: Way
    run_seconds: Spread
    blocked_seconds: float
    durable_seconds: float
    settled_seconds: float
    #: Of the last run.
    flow: Flow
    last_run_seconds: float


@dataclass(frozen=True, slots=True)
class SavingResults:
    """All results. steps: of a run. saves: of a run. left_out: what was not measured and why. ranks: of the job."""

    results: tuple[SavingResult, ...]
    state_bytes: int
    steps: int
    saves: int
    left_out: tuple[str, ...]
    ranks: int = 1

    def result(self, saver: str, place: str) -> SavingResult | None:
        """Return that of a way; None where it was not measured."""
        return next((each for each in self.results if each.way == (saver, place)), None)

    @property
    def meaning(self) -> str:
        """What the figures mean for a training, in a few sentences."""
        burst = self.result(OWN, "burst")
        direct = self.result("torch", "slow") or self.result(OWN, "slow")
        if burst is None or direct is None:
            return "Nothing to compare was measured."
        name = "torch.save" if direct.way.saver == "torch" else "Penstock without a burst buffer"
        run_seconds = direct.run_seconds.median
        factor = run_seconds / burst.run_seconds.median
        # A run time has all that disturbs the machine in it; what a save blocks has not.
        share = min(0.99, self.saves * direct.blocked_seconds / run_seconds)
        held = [format_seconds(each.blocked_seconds) for each in (burst, direct)]
        text = (
            f"A save holds the training for {held[0]} through the burst buffer, for {held[1]} with {name} straight to "
            f"the slow storage; the run is {factor:.2f} times as fast (published: {PUBLISHED_FACTOR})."
        )
        if factor < PUBLISHED_FACTOR:
            text += (
                f" No way of saving makes it more than {1 / (1 - share):.2f} times as fast here, where "
                f"{100 * share:.0f} % of the run is spent on these saves: the factor grows with the size of the state, "
                "and with less computing between saves."
            )
        if not 1 / _NOTABLE < factor < _NOTABLE / (1 - share):
            text += (
                " CAUTION: run times differ by more than saves take: other work disturbed them, or what is saved in "
                "the background takes processors from the steps."
            )
        return (
            text + f" The slow storage has everything {format_seconds(burst.settled_seconds)} after the run."
        )


def measure_saving(
    slow: Path,
    fast: Path,
    workload: Workload,
    *,
    peers: Sequence[str] = (),
    steps: int | None,
    every: int,
    repeats: int,
    max_seconds: float = math.inf,
    ranks: Ranks | None = None,
    done: Callable[[], None] = lambda: None,
) -> SavingResults:
    """Run a training by each way of saving, all in turn, `repeats` times, or as often as time allows, twice at least.

    The first round is left out.

    slow, fast: folders on the two storages, which all ranks see; what is written there is removed. steps: of a run;
        unless given, see `fitting_steps`, and the first round has one save.
        every: steps between saves. ranks: of the job, alone unless given; all train and save one state together, and
        the slowest counts.
    Raises: ConfigError for a run without a save, or less than two repeats; DataError naming a folder that is missing,
        cannot be written or has too little space.
    """
    begin = time.perf_counter()
    if every < 1:
        raise ConfigError(f"every is {every}; save after one step or more")
    if steps is not None and every > steps:
        raise ConfigError(
            f"every is {every} and steps {steps}; at least one save falls into a run: 1 to {steps}"
        )
    check_repeats(repeats, "run")
    ranks = alone() if ranks is None else ranks
    found, left_out = installed(peers, saver_named)
    saved = _saved_steps(fitting_steps(every, 1.0, math.inf) if steps is None else steps, every)
    needed = max((KEPT + 1) * workload.state_bytes, own_bytes(workload.state_bytes, saved))
    for folder in (slow, fast):
        ranks.on_rank_zero(f"checking {folder}", partial(check_space, folder, int(_SPACE_FACTOR * needed)))
    places = {folder: place_of(folder) for folder in (slow, fast)}
    _compile_codecs()
    ways = ways_of(found)
    runs: dict[Way, list[SavingRun]] = {way: [] for way in ways}
    first = time.perf_counter()
    run_steps = every if steps is None else steps
    for number in rounds(repeats, max_seconds - (first - begin), ranks):
        if steps is None and number == 1:
            now = time.perf_counter()
            fitting = partial(fitting_steps, every, now - first, max_seconds - (now - begin))
            run_steps = ranks.on_rank_zero("choosing the number of steps", fitting)
        for way, own in runs.items():
            with _shared_folder(slow, ranks) as on_slow, _shared_folder(fast, ranks) as on_fast:
                own.append(_slowest(_run(way, on_slow, on_fast, workload, run_steps, every, ranks), ranks))
            for folder, place in places.items():
                ranks.on_rank_zero(f"looking at {folder}", partial(check_place, folder, place))
            done()
    results = tuple(_result(way, own) for way, own in runs.items())
    saves = run_steps // every
    return SavingResults(results, workload.state_bytes, run_steps, saves, tuple(left_out), ranks.size)


def fitting_steps(every: int, one_save_seconds: float, left_seconds: float) -> int:
    """Return the steps of runs that a round has time for, up to `MOST_STEPS`; two saves at least, whatever they take.

    What a save does in the background would cost no step if it were the only one, at the end.
    one_save_seconds: of a round whose runs have one save each.

    >>> fitting_steps(5, 10.0, 35.0), fitting_steps(5, 10.0, 1000.0), fitting_steps(5, 10.0, -3.0)
    (15, 20, 10)
    """
    return every * max(_FEWEST_SAVES, int(min(MOST_STEPS // every, left_seconds / one_save_seconds)))


def check_space(folder: Path, needed: int) -> None:
    """Refuse a folder that cannot hold so many bytes, which a run saves. Raises: DataError naming it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            found = os.fstatvfs(file.fileno())
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}; name a folder that exists and that you may write "
            "to"
        ) from error
    free = found.f_bavail * found.f_frsize
    if free < needed:
        raise DataError(
            f"{folder} has {format_bytes(free)} free; the snapshots of a run take up to {format_bytes(needed)}: make "
            "some space, save a smaller state, or less often"
        )


def place_of(folder: Path) -> tuple[int, int]:
    """Return a folder's device and its number there. Raises: OSError if it is gone."""
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def check_place(folder: Path, place: tuple[int, int]) -> None:
    """Refuse a folder that is gone or another one by now, such as that below a mount. Raises: DataError naming it."""
    with contextlib.suppress(OSError):
        if place_of(folder) == place:
            return
    raise DataError(
        f"{folder} was moved, removed or unmounted while it was measured: what was saved may be on another device; "
        "mount it again, and begin anew"
    )


def _saved_steps(steps: int, every: int) -> range:
    return range(every, steps + 1, every)


def _compile_codecs() -> None:
    """Wait for what stores would otherwise compile during the first saves."""
    from penstock.checkpoint.codecs import ours

    for part in ours.KERNELS.values():
        part.wait()


@contextmanager
def _shared_folder(above: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield a new folder that rank 0 makes, and removes when all have left."""
    made = (
        # What cannot be removed, since the folder above is gone, is no reason: `check_place` names it.
        tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=above, ignore_cleanup_errors=True)
        if ranks.rank == 0
        else nullcontext("")
    )
    with made as name:
        yield Path(str(ranks.all_gather("making a folder", name)[0]))
        ranks.all_gather("leaving a folder", None)


def _slowest(run: SavingRun, ranks: Ranks) -> SavingRun:
    """Return a run as the slowest rank had it, save by save; what was written is this host's."""
    own = [[run.run_seconds], list(run.blocked_seconds), list(run.durable_seconds), [run.settled_seconds]]
    every = ranks.all_gather("ending a run", own)
    seconds, blocked, durable, settled = (
        tuple(map(max, zip(*of_ranks, strict=True))) for of_ranks in zip(*every, strict=True)
    )
    return SavingRun(seconds[0], blocked, durable, settled[0], run.flow)


def _run(
    way: Way, slow: Path, fast: Path, workload: Workload, steps: int, every: int, ranks: Ranks
) -> SavingRun:
    folder, disk = fast if way.place == "fast" else slow, disk_of(os.stat(slow).st_dev)
    through = fast / "buffer" if way.place == "burst" else None
    opened: Any = (
        saver_named(way.saver)(workload.state(), _saved_steps(steps, every), folder / "saves", through, ranks)
        if way.saver
        else nullcontext()
    )
    with opened as saver, Traffic() as traffic:
        ranks.all_gather("beginning a run", None)
        begin = time.perf_counter()
        blocked = _train(saver, workload, steps, every)
        run_seconds = time.perf_counter() - begin
        durable = [] if saver is None else saver.settle()
        settled = time.perf_counter() - begin - run_seconds
    flow = flow_of(traffic.record, "written", disk)
    return SavingRun(run_seconds, tuple(blocked), tuple(durable or blocked), settled, flow)


def _train(saver: Saver | None, workload: Workload, steps: int, every: int) -> list[float]:
    """Return how long each save held the training."""
    blocked = []
    for step in range(1, steps + 1):
        is_saved = step % every == 0
        workload.compute(is_saved=is_saved)
        if is_saved and saver is not None:
            begin = time.perf_counter()
            saver.save(step, workload.state())
            blocked.append(time.perf_counter() - begin)
    return blocked


def _result(way: Way, runs: Sequence[SavingRun]) -> SavingResult:
    counted = runs[1:]

    def median(of: Callable[[SavingRun], tuple[float, ...]]) -> float:
        values = [value for run in counted for value in of(run)]
        return float(np.median(values)) if values else 0.0

    return SavingResult(
        way,
        Spread.after_first([run.run_seconds for run in runs]),
        median(lambda run: run.blocked_seconds),
        median(lambda run: run.durable_seconds),
        median(lambda run: (run.settled_seconds,)),
        runs[-1].flow,
        runs[-1].run_seconds,
    )
