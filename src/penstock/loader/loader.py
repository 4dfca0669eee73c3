"""A plan of reads, run for a training loop.

    open_together (agreeing) ──> plan_of (opened) ──> plan_over (config): the AccessPlan ──> Scheduler ──> Engine
    set_up, or a Meeting of ranks that share ──> Setup: Fetcher, Decoder, memory, limits ─────────────────────┘

    make_parts: whatever a Setup is run by ──> EpochLoop ──> the training
    Engine's threads ── Fetcher, Decoder ──> slots ──> Engine.take ──┬──> EpochLoop
    OwnThread, in the training's thread ── the Setup's own ──────────┘

`Loader` is what users have of it. Each part owns a rule: `agreeing` and `sharing` what ranks do together, `parts` who
loads, `epoch_loop` which batch comes next, `failed_samples` what on_error= says, `step_clock` what is a wait and what
a step, `run_state` what resumes a run, `run_trace` how its trace begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, NoReturn, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.closing import Closeable
from penstock.compiling import Lease
from penstock.errors import ConfigError, printable
from penstock.flow.recorder import Recorder
from penstock.loader.agreeing import leave_start, open_together, placed
from penstock.loader.budget import MemoryBudget
from penstock.loader.config import LoaderArguments, LoaderConfig, config_of
from penstock.loader.dataset import MapDataset
from penstock.loader.epoch_loop import EpochLoop, Pass
from penstock.loader.failed_samples import SkippedSample
from penstock.loader.front_end import NUMPY, FrontEnd
from penstock.loader.opening import Opening
from penstock.loader.parts import keep_silent, make_parts
from penstock.loader.prediction import predict_run
from penstock.loader.run_state import RunState
from penstock.loader.setup import Setup
from penstock.loader.sharing import first_of, set_up_together
from penstock.loader.worker import check_not_importing
from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.ranks import Ranks
from penstock.report import checked_report, print_report
from penstock.store import Source
from penstock.store.calls import Calls
from penstock.trace import EpochMetrics, Trace
from penstock.trace.file import check_writable, path_in_run
from penstock.validate import check_count


class Loader(Closeable):
    """Batches of a training run, prefetched in the order that the seed fixes: as NumPy arrays, the large ones over the
    staging buffer without a copy.

    A folder gives tuples of images, [batch, channels, height, width] or channels last, of the chosen dtype
    (bfloat16 as its bits in uint16), and labels, int64[batch], -1 where there is none. A source whose labels have names
    gives dicts: "images", and an array [batch, *shape] for each name. A data set gives the structure of its samples
    with an array in the place of each array or number; with collate_fn=, what that makes.

    A slot is filled again when nothing refers to its arrays any more: copy the images that you keep. Arrays of less
    than a 64th of a sample, as labels are next to images, are copies already.

    Prefetching begins with `start`, or with the first batch that a loop asks for. Each `for batch in loader` runs one
    epoch, the next one; leaving a loop early ends its epoch. Close it, or use it as a context manager, to end its
    threads at once; they end with the last reference at the latest.

    It is used as it is: what differs between frameworks is a `FrontEnd`. `penstock.torch.Loader` adds to this class a
    constructor, and what trainers ask of PyTorch's DataLoader.
    """

    def __init__(
        self,
        source: LoaderConfig | str | os.PathLike[str] | Source | MapDataset,
        *,
        front_end: FrontEnd = NUMPY,
        mesh: Any = None,
        ranks: Callable[[], Ranks] | None = None,
        state: Mapping[str, Any] | None = None,
        trace: str | os.PathLike[str] | None = None,
        report: Callable[[str], None] | None = print_report,
        **arguments: Unpack[LoaderArguments],
    ) -> None:
        """Open the source and make ready to prefetch. The first sample is read where its shape has to be known.

        source, arguments: those of `LoaderConfig`; or such a configuration alone.
        front_end: what becomes of batches and of a data set's samples.
        mesh: a DeviceMesh in place of rank= and world_size=; see `penstock.ranks.place_in_mesh`.
        ranks: makes the ranks that are compared before the first read, all of which make this loader; those of this
            process's job unless given, `penstock.ranks.alone` for none. A loader of one rank compares none.
        state: of another loader's `state_dict`, to resume from; see `load_state_dict`.
        trace: a file to record every span in, made when prefetching begins. Under `penstock watch`, one in its run
            unless given.
        report: gets the lines about the start (on rank 0), epochs and long waits; None for silence.

        Raises: ConfigError naming the argument, or what differs between the ranks; DataError if the source cannot be
            opened, on any of them; WaitTimeout if it does not answer, or naming the ranks that do not make the loader.
        """
        try:
            self._config = config = placed(config_of(source, arguments), mesh)
            report = _checked_ends(report, front_end)
        except Exception as error:
            world_size = (
                source.world_size if isinstance(source, LoaderConfig) else arguments.get("world_size")
            )
            leave_start(error, world_size, is_of_mesh=mesh is not None, ranks=ranks)
            raise
        self._front_end, self._report = front_end, report
        self._trace = path_in_run() if trace is None else trace
        #: Kernels are compiled by another process while it is open.
        self._lease = Lease(report)
        self._is_made = False
        with closing(self._opening()) as opening:
            self._agreed = open_together(
                config,
                opening.calls,
                front_end.as_array,
                ranks=ranks,
                is_of_mesh=mesh is not None,
                state=state,
            )
            try:
                self._make_together(opening.calls, first_of(state), state)
            except BaseException:
                if self._is_made:  # nobody has it yet
                    self.close()
                raise

    def _opening(self) -> Opening:
        config, to_user = self._config, self._report or keep_silent
        return Opening(
            config.patience_seconds, config.timeout_seconds, to_user, in_own_thread=config.decoders == 0
        )

    def _make_together(
        self, calls: Calls, first: tuple[int, int], state: Mapping[str, Any] | None = None
    ) -> None:
        """Make what this rank reads with, once the ranks agree what it reads. Raises: as the constructor.

        first: (epoch, step) from which on ranks that share promise each other what they read first.
        """
        self._shares_from = first
        set_up_together(self._agreed, self._front_end, calls, first, partial(self._make, calls, state))

    def _make(self, calls: Calls, state: Mapping[str, Any] | None, make_setup: Callable[[], Setup]) -> None:
        check_not_importing()
        setup = make_setup()
        if self._trace is not None:
            calls.one(f"trace {str(self._trace)!r}", partial(check_writable, self._trace))
        self._parts = parts = make_parts(self._agreed, setup, self._front_end, self._trace, self._report)
        self._loop = EpochLoop(parts)
        self._state = RunState(self._agreed, setup, self._front_end, is_seed_drawn=self._config.seed is None)
        parts.engine.end_with(self)
        self._is_made = True
        if state is not None:
            self._loop.begin_at(self._state.place_of(state))

    # The loop

    def start(self, epoch: int | None = None, step: int = 0) -> None:
        """Begin to prefetch, before the first batch is asked for. The first loop runs the
        rest of `epoch` from `step` on.

        Its batches are those that a loader which began with epoch 0 gives there, bit for bit. A step after the last one
        of an epoch is the first of the next epoch; epoch = epochs, step 0 is the end. Without arguments it begins
        where a state is that was loaded. Twice the same is harmless until the first batch is asked for.

        Raises: ConfigError if the plan has no such step, if it was started elsewhere before (the first loop starts it,
            too), or while another thread is inside; ClosedError after `close`, or in a forked process; DataError if no
            thread can be started.
        """
        self._loop.start(epoch, step)

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop begin in this epoch, as `DistributedSampler.set_epoch` does.

        For trainers that count epochs themselves. Nothing changes if the loop would begin within that epoch anyway, as
        after `load_state_dict`, or beyond it: a loader goes forward only.
        Raises: ConfigError if the plan has no such epoch; ClosedError after `close`.
        """
        self._loop.check_open()
        place = self.plan.first_of_run(self._parts.setup.rank, epoch, 0)
        if epoch > self._loop.position[0]:
            self._loop.go_to(place)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch. Nothing is read before the first batch is asked for, unless `start` was called.

        Raises: ClosedError after the last epoch or after `close`; ConfigError while another thread is inside `iter` or
            `next`.
        """
        return self._loop.begin_epoch(partial(_Epoch, self))

    def __len__(self) -> int:
        """Return the number of batches of the epoch that is under way or comes next, wherever in it `start` began."""
        return self.plan.local_steps(self._parts.setup.rank, min(self.position[0], self.plan.epochs - 1))

    def empty_batch(self) -> Any:
        """Return a batch without samples, [0, ...] each: what batches are made of, before one is read."""
        setup, front_end = self._parts.setup, self._parts.front_end
        arrays = tuple(np.empty((0, *field.shape), field.dtype) for field in setup.decoder.fields)
        batch = front_end.present(setup.decoder.finish(-1, arrays, ()), setup.dtype_in_slot)
        return batch if front_end.device is None else front_end.device.move(batch)

    def close(self) -> None:
        """End all threads and give the memory back once no batch is referred to. Twice is harmless.

        A trace that the disk does not take is reported, and raises nothing.
        """
        # The lease last: its threads would compile for themselves without it.
        with closing(self._lease), closing(self._parts):
            self._loop.close()

    # What a user may ask

    @property
    def config(self) -> LoaderConfig:
        """What the loader was given, but for trace= and report=."""
        return self._config

    @property
    def dtype(self) -> str | None:
        """Number format of the images; None for a data set, whose samples say theirs."""
        pipeline = self._parts.setup.pipeline
        return None if pipeline is None else pipeline.dtype

    @property
    def plan(self) -> AccessPlan:
        """Who reads which sample when."""
        return self._parts.setup.plan

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, by label; empty where the source names none."""
        return self._parts.setup.data.classes

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step) of the batch that this loader gives next; `state_dict` has the first one that is not consumed.

        They differ after a loop that was left early, by a `break` or by an error: the next loop here begins the next
        epoch, a resumed run continues the epoch that was left.
        """
        return self._loop.next_place

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is: what `load_state_dict` of a loader in another process takes.

        Batches that a loop was given are consumed, the one at hand included; batches read ahead are not, nor one that
        cannot be loaded. After a loop that was left early, by a `break` or by an error, the next batch is still one of
        its epoch, until another loop begins.
        Returns: JSON of less than 2 KB, the same on all ranks after the same step.
        """
        return self._state.at(*self._loop.position)

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state of a run that has consumed all global batches before a step, whatever this loader did.

        epoch, step: as for `start`.
        Raises: ConfigError if the plan has no such step.
        """
        return self._state.at(*self.plan.first_of_run(self._parts.setup.rank, epoch, step))

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Resume from a state: the first loop runs the rest of its epoch, with the batches and bits of an unbroken run.

        Before `start` and the first batch. Threads, memory, policy, ranks and the split may be others than they were;
        epochs may be more. What fixes the batches must be the same.
        state: of `state_dict` or `state_at`. allow: what may differ all the same: "plan", "data", "transforms",
            "pixels", "samples", or one of their values, such as "plan.order".
        Where ranks were compared when the loader was made, all of them call this and resume from the same step.
        Raises: ConfigError naming what differs, both values and what to do, if it is no state, or if the loader has
            begun; ClosedError after `close`; WaitTimeout naming the ranks that do not call.
        """
        place = self._agreed.resume_together(partial(self._place_of, state, allow))
        if self._parts.setup.sharing is not None and place != self._shares_from:
            self._share_from(place)
        self._loop.begin_at(place)

    def _share_from(self, place: tuple[int, int]) -> None:
        """Meet the other ranks again, so that each keeps what it reads first from a place on. No batch was read."""
        begun = self._loop.current
        self._parts.close()
        with closing(self._opening()) as opening:
            self._make_together(opening.calls, place)
        self._loop.current = begun

    def _place_of(self, state: Mapping[str, Any], allow: Collection[str]) -> tuple[int, int]:
        """Return where this loader resumes from a state. Raises: as `load_state_dict`."""
        self._loop.check_open()
        if self._loop.started_at is not None:
            raise ConfigError(
                "load_state_dict() comes before the first batch and start(): make a new loader for it"
            )
        return self._state.place_of(state, allow)

    @property
    def memory(self) -> MemoryBudget:
        """How the memory is shared out, in bytes."""
        return self._parts.setup.budget

    @property
    def start_lines(self) -> list[str]:
        """What rank 0 reports at the start: data, order, steps, threads and memory of this rank."""
        return self._parts.start_lines()

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """The samples left out so far because they could not be had."""
        return tuple(self._parts.ended.skipped)

    @property
    def metrics(self) -> list[EpochMetrics]:
        """The sums of the trace by epoch, up to the last batch handed out."""
        return self._parts.collector.epochs()

    @property
    def recorder(self) -> Recorder:
        """What the trace is recorded with; a snapshot store that records with it, too, writes into the same trace.

        Only until the loader is closed.
        """
        return self._parts.recorder

    def preview(self, count: int) -> NDArray[np.int64]:
        """Return the ids of the next `count` samples that this rank will get, in order; fewer at the run's end.

        Raises: ConfigError if count is negative.
        """
        check_count("count", count, 0)
        epoch, step = self.position
        if epoch >= self.plan.epochs:
            return np.empty(0, np.int64)
        return self.plan.stream(self._parts.setup.rank, epoch, step, count)

    def predict(
        self,
        *,
        machine: Machine | str | os.PathLike[str] | None = None,
        step_seconds: float | None = None,
        epoch: int = 0,
        step: int = 0,
    ) -> Trace:
        """Return the trace that this run should leave; see `penstock.predict`.

        machine: with measured costs, or its file; this loader's memory is put in the place of its storage classes.
            The one that the loader was made with unless given.
        step_seconds: that the training takes for each batch; machine.compute says unless given.
        epoch, step: where the run begins, as for `start`.

        Raises: ConfigError if one of the first two is not known, if the plan has no such step, or for a data set that
            reads by itself, whose costs are its own code's.
        """
        report = self._report or keep_silent
        return predict_run(self._parts.setup, machine, step_seconds, (epoch, step), report)

    def __repr__(self) -> str:
        epoch, step = self.position
        of = "" if self.plan.is_endless else f" of {self.plan.epochs}"
        return f"{type(self).__name__}({self._parts.fetcher.place}; at epoch {epoch}{of}, step {step})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loader has threads and cannot be copied or pickled: make one in each process")


class _Epoch(Iterator[Any]):
    """One pass of a loader over one epoch; over when the loader begins another. The loader lives as long."""

    def __init__(self, loader: Loader, begun: Pass) -> None:
        self._loader, self._begun = loader, begun

    def __next__(self) -> Any:
        return self._loader._loop.next(self._begun)


def _checked_ends(report: Callable[[str], None] | None, front_end: object) -> Callable[[str], None] | None:
    """Return what any line can be given to. Raises: ConfigError unless reports and batches can go to these."""
    report = checked_report(report)
    if not isinstance(front_end, FrontEnd):
        raise ConfigError(
            f"front_end is {front_end!r}; it is a penstock.loader.FrontEnd. For PyTorch there is "
            "penstock.torch.Loader, which has its own"
        )
    if report is None or report is print_report:  # which escapes by itself
        return report
    return partial(_report_printable, report)


def _report_printable(report: Callable[[str], None], line: str) -> None:
    """Report a line that may name files, or quote an error of somebody's own code."""
    report(printable(line))
