"""How long a training loop waits for its loader, whichever that is, and what a perfect one would bring.

The loop's own time is measured where it is spent, between receiving a batch and asking for the next, so the
ceiling needs no experiment: the same steps, each batch handed over from memory.

    ceiling = (waited + own) / (own + steps x hand-over from memory)

One doubt remains, and `Watch.replay` answers it: where a GPU works on while the host waits, waiting costs
less than it seems. A replay runs the caller's own steps over batches kept in memory, and its time per step is
what a perfect loader would reach.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

import numpy as np

from penstock.errors import ConfigError
from penstock.flow.recorder import Recorder
from penstock.flow.watched_run import WatchedRun
from penstock.measure.about_batches import about
from penstock.trace import NO_SAMPLE, NO_STEP, NOTHING_TO_GAIN, SPAN, Kind, Spans, Trace, stall_share
from penstock.trace.file import path_in_run
from penstock.trace.schema import CONSUMER
from penstock.trace.trace import JSON
from penstock.trace.verdict import TOO_SHORT_SECONDS, describe_gain, describe_idle, is_without_training
from penstock.units import format_ratio, format_seconds

if TYPE_CHECKING:
    from penstock.loader.config import LoaderArguments
    from penstock.measure.switch import Switch
    from penstock.store import Source

T = TypeVar("T")

_WAIT, _STEP = int(Kind.WAIT), int(Kind.STEP)
_PROBE_STEPS = 1_000
_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, np.generic)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def watch(
    loader: Iterable[T],
    *,
    report: Callable[[str], object] = _to_stderr,
    quiet: bool = False,
    keep_batches: int = 8,
    keep_bytes: int = 256 << 20,
    trace_spans: int = 1 << 17,
    clock: Callable[[], float] = time.perf_counter,
) -> Watch[T]:
    """Wrap a loader so that every wait for it is measured; batches come out as they are.

    report: is given one line at the end of each epoch, a `break` included.
    quiet: report nothing; `Watch.verdict` still answers.
    keep_batches, keep_bytes: how many of the first batches are kept, as copies, for `Watch.replay`, and how
        many bytes of them. They are kept as long as the watch. 0 keeps none.
    trace_spans: how many spans the trace holds, the newest; two per step, 64 bytes each.
    clock: seconds, monotonic.

    >>> watched = watch([1, 2, 3], quiet=True)
    >>> sum(watched), len(watched), watched.verdict().steps
    (6, 3, 3)
    """
    return Watch(loader, None if quiet else report, keep_batches, keep_bytes, trace_spans, clock)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What waiting cost, and what would be left without it. As text: one line."""

    #: Batches that were handed out.
    steps: int
    #: Time that the loop waited for the loader: to start, for each batch, to stop.
    stall_seconds: float
    #: Time that the loop spent on its batches.
    own_seconds: float
    #: What a batch costs when it is handed over from memory, the watch's own cost included.
    hand_over_seconds: float
    #: Seconds per step of the caller's loop over batches in memory; None when no replay was run.
    replay_seconds: float | None = None
    #: Whether a GPU may have worked while the loop waited.
    gpu_in_use: bool = False
    #: The part of `stall_seconds` that ended in an error or an interrupt of the loader, and got no batch.
    in_vain_seconds: float = 0.0

    @property
    def ceiling(self) -> float:
        """How many times as fast the loop would be, were every batch in memory when it is asked for."""
        seconds = self._judged_seconds
        if self.replay_seconds is not None:
            least = self.steps * self.replay_seconds
        else:
            least = self.own_seconds + self.steps * self.hand_over_seconds
        if not seconds:
            return 1.0
        return seconds / least if least else float("inf")

    @property
    def _judged_seconds(self) -> float:
        return self.stall_seconds - self.in_vain_seconds + self.own_seconds

    def __str__(self) -> str:
        line = ""
        if self.in_vain_seconds:
            line = f"waited {format_seconds(self.in_vain_seconds)} and got no batch"
            if not self.steps:
                return line
            line += "; otherwise "
        seconds = self._judged_seconds
        share = 100.0 * stall_share(self.stall_seconds - self.in_vain_seconds, self.own_seconds)
        line += f"waited {share:.{0 if share >= 9.5 else 1}f} % of {format_seconds(seconds)}; "
        if self.steps and seconds < TOO_SHORT_SECONDS:
            return line + "too short to judge"
        if self.ceiling < 1.0 + NOTHING_TO_GAIN:
            return line + "nothing to gain here"
        if self.replay_seconds is not None:
            return line + describe_gain(self.ceiling, "ceiling {}, by replay", self.replay_seconds)
        if self.gpu_in_use:
            doubt = "or less: a GPU may have worked meanwhile; loop once over replay() to know"
            return f"{line}ceiling {format_ratio(self.ceiling)} {doubt}"
        if is_without_training(self.stall_seconds - self.in_vain_seconds, self.own_seconds, self.steps):
            return line + describe_idle(self.own_seconds, self.steps)
        return line + describe_gain(self.ceiling, "ceiling {}", self.own_seconds / self.steps)


@dataclass(slots=True)
class _Sums:
    """What a `Verdict` adds up: of an epoch, and of the whole run."""

    steps: int = 0
    stall_seconds: float = 0.0
    own_seconds: float = 0.0
    in_vain_seconds: float = 0.0


class Watch(Generic[T]):
    """A loader under observation. Made by `watch`; iterated by one thread at a time.

    What is not defined here (attributes, methods) is the loader's own, which is also there as `watched`.
    The last step of an iteration left early ends when the loop drops its iterator, as `for` does at once.

    It never holds on to a batch that it hands out: what it keeps for `replay` are copies, since a loader may
    reuse its buffers or count on them being freed. Copying is nobody's waiting and nobody's step: it is left
    out of both. A batch that holds something else than arrays, tensors, numbers, text and containers of
    these is not copied, and ends the keeping.
    """

    def __init__(
        self,
        loader: Iterable[T],
        report: Callable[[str], object] | None,
        keep_batches: int,
        keep_bytes: int,
        trace_spans: int,
        clock: Callable[[], float],
        joins_run: bool = True,
    ) -> None:
        """joins_run: record under `penstock watch`, too. The other arguments are those of `watch`."""
        self.watched = loader
        self._report = report
        self._clock = clock
        self._epochs = _epochs_of(loader, clock) if joins_run else _Epochs(None)
        self._about: dict[str, JSON] = {"watched": type(loader).__qualname__}
        self._recorder = Recorder(trace_spans, clock=clock)
        self._ring = self._recorder.ring(CONSUMER)
        self._run = _Sums()
        self._hand_over_seconds: float | None = None
        self._replay_seconds: float | None = None
        self._kept: list[T] = []
        self._batches_to_keep = keep_batches
        self._bytes_to_keep = keep_bytes
        #: The newest `trace_spans` spans of those drained so far, and whether any were dropped.
        self._drained: Spans = np.empty(0, SPAN)
        self._is_trace_complete = True

    def __iter__(self) -> Iterator[T]:
        epoch = self._epochs.begun
        self._epochs.begun += 1
        begin = self._clock()
        iterator = iter(self.watched)
        return self._steps(iterator, epoch, self._clock() - begin)

    def __len__(self) -> int:
        return len(self.watched)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.watched)

    def __getattr__(self, name: str) -> Any:
        if name == "watched":  # not set yet: while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.watched, name)

    def verdict(self) -> Verdict:
        """Return what the run amounts to so far."""
        return self._verdict_on(self._run)

    def numbers(self) -> dict[str, float]:
        """Return what the run amounts to so far as a flat dict, as any logger takes it.

        >>> watched = watch([1, 2, 3], quiet=True)
        >>> watched.numbers()["steps"]
        0
        """
        run = self._run
        seconds = run.stall_seconds + run.own_seconds
        return {
            "steps": run.steps,
            "stall_seconds": run.stall_seconds,
            "own_seconds": run.own_seconds,
            "stall_share": stall_share(run.stall_seconds, run.own_seconds),
            "steps_per_second": run.steps / seconds if seconds else 0.0,
        }

    def trace(self) -> Trace:
        """Return the waits and steps of the run: `trace_spans` of them at most, the newest.

        Its `is_complete` is False when there were more.
        """
        spans = np.concatenate([self._drained, self._recorder.drain()])
        kept = spans[-self._recorder.capacity_spans :]
        if self._recorder.dropped or kept.size < spans.size:
            self._is_trace_complete = False
        self._drained = kept.copy()
        return Trace(kept, self._about, self._is_trace_complete)

    def switch(self, source: str | os.PathLike[str] | Source, **arguments: Unpack[LoaderArguments]) -> Switch:
        """Return what Penstock's loader would make of the run so far: its steps replayed over its data on a machine.

        source: the data that the loader reads. arguments: of a `penstock.Loader`: `machine`, which says what reads cost
        there, or its file, as `penstock calibrate` writes it; `memory`, `transforms` and others that differ from the
        run's.
        Raises: ConfigError, as `penstock.measure.switch.predict_switch`.
        """
        from penstock.measure.switch import predict_switch

        return predict_switch(self.trace(), source, **arguments)

    def replay(self, steps: int, synchronize: Callable[[], object] | None = None) -> Iterator[T]:
        """Hand out kept batches, over and over: the caller's steps run as a perfect loader would let them.

        Once the loop is through, `verdict` judges by its time per step; one that is left early shows nothing.
        A step that changes its batch in place changes the kept copy.

        steps: how many batches to hand out; enough that the first ones do not matter.
        synchronize: waits until the device has done all it was given, as `torch.cuda.synchronize` does;
            called before the first batch and after the last, so that the device's time is measured.
        Raises: ConfigError when no batch was kept or `steps` is below one.
        """
        if steps < 1:
            raise ConfigError(f"steps is {steps}; a replay takes at least one: give some 100")
        if not self._kept:
            raise ConfigError(
                "no batch is kept to replay; the first ones are, when they consist of arrays and tensors and "
                "fit keep_bytes: iterate once, or raise keep_batches and keep_bytes"
            )
        return self._replayed(steps, synchronize or (lambda: None))

    def _replayed(self, steps: int, synchronize: Callable[[], object]) -> Iterator[T]:
        synchronize()
        begin = self._clock()
        yield from itertools.islice(itertools.cycle(self._kept), steps)
        synchronize()
        self._replay_seconds = (self._clock() - begin) / steps

    def _steps(self, iterator: Iterator[T], epoch: int, startup_seconds: float) -> Iterator[T]:
        clock, run, sums, to_run = self._clock, self._run, _Sums(), self._epochs.run
        handed: list[T] = []
        step = NO_STEP

        def record(kind: int, begin: float, end: float, step: int) -> None:
            for ring in (self._ring,) if to_run is None else (self._ring, to_run.ring):
                ring.record(kind, begin, end, NO_SAMPLE, 0, epoch, step, samples=0)

        # Starting the loader is waiting for its first batch, also when that is asked for later.
        asked = clock() - startup_seconds
        gets_batch = True
        try:
            for step in itertools.count():
                if to_run is not None:
                    to_run.renew(asked)
                try:
                    handed.append(next(iterator))
                except StopIteration:
                    break
                except BaseException:
                    gets_batch = False
                    raise
                begun = received = clock()
                if not run.steps:
                    self._about = about(self.watched, handed[0])
                if to_run is not None:
                    to_run.consume(self._about, epoch, step)
                record(_WAIT, asked, received, step)
                _add(sums, run, 1, received - asked, 0.0)
                keeps = self._batches_to_keep > 0
                if keeps:
                    self._keep(handed[0])
                if keeps or to_run is not None:
                    begun = clock()
                try:
                    # Popped, so that nothing here refers to the batch while the caller has it.
                    yield handed.pop()
                finally:
                    asked = clock()
                    record(_STEP, begun, asked, step)
                    _add(sums, run, 0, 0.0, asked - begun)
        finally:
            # Dropping the iterator stops the loader's workers, for which the caller waits.
            del iterator
            ended = clock()
            record(_WAIT, asked, ended, NO_STEP)
            if to_run is not None:
                to_run.collect(epoch, step)
            _add(sums, run, 0, ended - asked, 0.0, in_vain_seconds=0.0 if gets_batch else ended - asked)
            if self._report is not None and (sums.steps or sums.in_vain_seconds):
                self._report(f"penstock.watch: epoch {epoch}: {self._verdict_on(sums)}")

    def _verdict_on(self, sums: _Sums) -> Verdict:
        if self._hand_over_seconds is None:
            self._hand_over_seconds = self._measure_hand_over()
        return Verdict(
            sums.steps,
            sums.stall_seconds,
            sums.own_seconds,
            self._hand_over_seconds,
            self._replay_seconds,
            _is_a_gpu_in_use(),
            sums.in_vain_seconds,
        )

    def _measure_hand_over(self) -> float:
        batches: list[T | None] = [*self._kept] or [None]
        replayed = list(itertools.islice(itertools.cycle(batches), _PROBE_STEPS))
        probe = Watch(replayed, None, 0, 0, 1, self._clock, joins_run=False)
        begin = self._clock()
        for _ in probe:
            pass
        return (self._clock() - begin) / _PROBE_STEPS

    def _keep(self, batch: T) -> None:
        size_bytes = _size_bytes(batch)
        if size_bytes is None or size_bytes > self._bytes_to_keep:
            self._batches_to_keep = 0
            return
        self._kept.append(_copy(batch))
        self._batches_to_keep -= 1
        self._bytes_to_keep -= size_bytes


class _Epochs:
    """How many epochs of a loader were begun, and where they are recorded under `penstock watch`."""

    __slots__ = ("begun", "run")

    def __init__(self, run: WatchedRun | None) -> None:
        self.begun = 0
        self.run = run


#: Of loaders that are watched, by identity: `watch` may be called anew for each epoch.
_EPOCHS: dict[int, tuple[weakref.ref[Any], _Epochs]] = {}


def _epochs_of(loader: object, clock: Callable[[], float]) -> _Epochs:
    """Return the count of a loader's epochs, those of an earlier watch of it included."""
    key = id(loader)
    if key in _EPOCHS and _EPOCHS[key][0]() is loader:
        return _EPOCHS[key][1]
    # A loader of ours records itself.
    records_itself = (
        isinstance(getattr(loader, "recorder", None), Recorder)
        or getattr(loader, "records_in_run", None) is True
    )
    path = None if records_itself else path_in_run()
    epochs = _Epochs(None if path is None else WatchedRun(path, clock))
    # No callback: what a signal handler raises in one that is written in Python is dropped.
    for other, (reference, _) in list(_EPOCHS.items()):
        if reference() is None:
            _EPOCHS.pop(other, None)
    with contextlib.suppress(TypeError):  # a list, which cannot be referred to weakly
        _EPOCHS[key] = weakref.ref(loader), epochs
    return epochs


def _add(
    sums: _Sums,
    run: _Sums,
    steps: int,
    stall_seconds: float,
    own_seconds: float,
    in_vain_seconds: float = 0.0,
) -> None:
    for each in (sums, run):
        each.steps += steps
        each.stall_seconds += stall_seconds
        each.own_seconds += own_seconds
        each.in_vain_seconds += in_vain_seconds


def _is_tensor(value: object) -> bool:
    """Tell a torch tensor by its methods: importing torch to ask would be a cost to those without it."""
    return all(hasattr(value, name) for name in ("detach", "clone", "is_pinned", "nbytes"))


def _size_bytes(batch: object) -> int | None:
    """Return the bytes of all arrays in a batch; None when it holds something that `_copy` does not copy."""
    if isinstance(batch, np.ndarray):
        return None if batch.dtype.hasobject else batch.nbytes
    if _is_tensor(batch):
        return int(batch.nbytes)  # type: ignore[attr-defined]
    if isinstance(batch, str | bytes):
        return len(batch)
    if isinstance(batch, _UNCHANGING):
        return 0
    if type(batch) in (list, tuple) or _is_namedtuple(batch):
        parts = list(batch)  # type: ignore[call-overload]
    elif type(batch) is dict:
        parts = list(batch.values())
    else:
        return None
    sizes = [_size_bytes(part) for part in parts]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _copy(batch: Any) -> Any:
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if _is_tensor(batch):
        copied = batch.detach().clone()
        # A copy that is not pinned would go to the device more slowly than the batch did.
        return copied.pin_memory() if batch.is_pinned() else copied
    if isinstance(batch, _UNCHANGING):
        return batch
    if isinstance(batch, Mapping):
        return {key: _copy(part) for key, part in batch.items()}
    parts = [_copy(part) for part in batch]
    return type(batch)(*parts) if _is_namedtuple(batch) else type(batch)(parts)


def _is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_a_gpu_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
