"""A plan of reads, run for a training loop.

    open_together (agreeing) ──> plan_of (opened) ──> plan_over (config): the AccessPlan ──> Scheduler ──> Engine
    set_up, or a Meeting of ranks that share ──> Setup: Fetcher, Decoder, memory, limits ─────────────────────┘

    Engine's threads ── Fetcher, Decoder ──> slots ──> Engine.take ──┬──> _wait_for_batch ──> the training
    OwnThread, in the training's thread ── the Setup's own ──────────┘

Whose Fetcher and Decoder the engine calls (`_make_processes`):

    workers=N       Processes: each decode thread has a worker process decode; that also fetches the samples of a data
                    set, while bytes of a source are read here
    workers="auto"  Switching, for a data set that processes could load: threads, until processes prove faster
    else            the Setup's own, in threads; or, with decoders=0, in the training's thread, inside of the engine

Where there is a Switching, there may be an OwnThread (`_make_own_thread`), which passes `take` on to the engine or
makes the batches of some steps itself: `own or self._engine` is whichever of them is asked. All of them make the same
batches.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import socket
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from threading import current_thread, get_ident
from threading import enumerate as enumerate_threads
from typing import Any, NoReturn, Self, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from penstock.compiling import Lease
from penstock.errors import ClosedError, ConfigError, DataError, printable
from penstock.flow.batches import Departure, StagedBatch
from penstock.flow.collector import Collector
from penstock.flow.cpus import memory_limit_bytes
from penstock.flow.engine import Engine, EngineSettings, compiled_decisions
from penstock.flow.lock_use import ASK_EVERY_SECONDS, ASK_FOR_TRACE_SECONDS
from penstock.flow.recorder import Recorder
from penstock.flow.staging import StagingBuffer
from penstock.flow.work import Fetcher
from penstock.loader.agreeing import Agreed, leave_start, open_together, placed
from penstock.loader.budget import MemoryBudget
from penstock.loader.collating import CollatingDecoder
from penstock.loader.config import LoaderArguments, LoaderConfig, config_of
from penstock.loader.dataset import MapDataset
from penstock.loader.decode_servers import ServedFetcher
from penstock.loader.draws import draw_compiled
from penstock.loader.epoch_lines import EndedEpochs, EpochLines, SkippedSample, skip_clause
from penstock.loader.fetching import SourceFetcher
from penstock.loader.front_end import NUMPY, FrontEnd
from penstock.loader.on_device import copy_ahead, device_line, made
from penstock.loader.opening import Opening
from penstock.loader.own_thread import MOST_OWN_BYTES, OwnThread
from penstock.loader.prediction import predict_run
from penstock.loader.processes import Processes
from penstock.loader.progress import progress_lines
from penstock.loader.resume import describe_run, read_state, seed_of_state, write_state
from penstock.loader.samples import process_plan
from penstock.loader.setup import Setup, drafted, set_up
from penstock.loader.sharing import Meeting, check_sharing, first_of
from penstock.loader.start_lines import start_lines
from penstock.loader.starting import Starter
from penstock.loader.switching import Switching
from penstock.loader.transforms.decoders import decoder_versions
from penstock.loader.worker import MovableDecoder, check_not_importing
from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.plan.growing import Growing
from penstock.plan.orders import even_from
from penstock.plan.serialise import is_told, write_plan
from penstock.policy import Scheduler
from penstock.ranks import Ranks
from penstock.ranks.transport_of_job import rank_of_this_process
from penstock.report import checked_report, print_report
from penstock.store import Source
from penstock.store.calls import Calls
from penstock.trace import EpochMetrics, Trace, TraceWriter
from penstock.trace.file import check_writable, not_written, path_in_run
from penstock.trace.schema import NO_STEP, Kind
from penstock.validate import check_count

_CONSUMER = 0
_RING_SPANS = 4096
_DRAIN_SECONDS = 5.0
# Of epochs that take less, the training's thread reports several together, but not more than are summed up at once:
# that takes about as long as for one.
_LINES_SECONDS, _MOST_LINES = 0.5, 16
#: Of the memory, to copy a data set that nobody said to copy.
_COPY_SHARE = 8


class Loader:
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
        to_user = report if report is not None else _keep_silent
        #: Kernels are compiled by another process while it is open.
        self._lease = Lease(report)
        self._is_made = False
        self._front_end, self._report = front_end, report
        self._trace = path_in_run() if trace is None else trace
        with closing(self._opening(to_user)) as opening:
            self._agreed = agreed = open_together(
                config, opening.calls, ranks=ranks, is_of_mesh=mesh is not None, state=state
            )
            try:
                self._make_together(agreed, opening.calls, to_user, state, first_of(state))
            except BaseException:
                if self._is_made:  # nobody has it yet
                    self.close()
                raise

    def _opening(self, to_user: Callable[[str], None]) -> Opening:
        config = self._config
        return Opening(
            config.patience_seconds, config.timeout_seconds, to_user, in_own_thread=config.decoders == 0
        )

    def _make_together(
        self,
        agreed: Agreed,
        calls: Calls,
        to_user: Callable[[str], None],
        state: Mapping[str, Any] | None,
        first: tuple[int, int],
    ) -> None:
        """Make what this rank reads with, once the ranks agree what it reads. Raises: as the constructor.

        first: (epoch, step) from which on ranks that share promise each other what they read first.
        """
        self._shares_from = first
        config, opened = agreed.config, agreed.opened
        if not check_sharing(config, agreed.uncompared, is_in_job=agreed.job is not None):
            make = partial(set_up, config, self._front_end, calls, opened=opened)
            agreed.together(partial(self._make, make, calls, to_user, state))
            return
        assert agreed.job is not None, "checked above"
        with Meeting(partial(drafted, config, self._front_end, calls, opened=opened), agreed.job) as meeting:
            offers = agreed.together(meeting.offer)
            agreed.together(partial(meeting.place, offers, first))
            sent = agreed.together(partial(meeting.send, offers))
            agreed.together(partial(self._make, partial(meeting.receive, sent), calls, to_user, state))

    def _make(
        self,
        make_setup: Callable[[], Setup],
        calls: Calls,
        to_user: Callable[[str], None],
        state: Mapping[str, Any] | None,
    ) -> None:
        """Make what this rank reads with. Raises: as the constructor."""
        check_not_importing()
        agreed = self._agreed
        self._setup = setup = make_setup()
        if self._trace is not None:
            calls.one(f"trace {str(self._trace)!r}", partial(check_writable, self._trace))
        self._plan, self._rank = setup.plan, setup.rank
        self._fetcher, self._decoder = setup.fetcher, setup.decoder
        if agreed.config.collate_fn is not None:  # batches are what it makes
            present = self._front_end.present_made
            self._front_end = replace(self._front_end, present=lambda batch, dtype: present(batch))
        self._name = setup.data.name if self._plan.ranks == 1 else f"{setup.data.name}, rank {self._rank}"
        #: Number format of images, None for a data set.
        self._dtype = None if setup.pipeline is None else setup.pipeline.dtype

        # Who asks for one batch after the other has shared them out between ranks beforehand.
        is_asked = isinstance(self._plan.order, Growing)
        self._recorder = Recorder(_RING_SPANS, rank_of_this_process() if is_asked else self._rank)
        self._ring = self._recorder.ring(_CONSUMER)
        self._collector = Collector(
            self._recorder, None, to_user, self._fetcher.describe, {self._recorder.rank: socket.gethostname()}
        )
        self._skipped: list[SkippedSample] = []
        self._ended = EndedEpochs(self._collector, self._name, self._skipped, self._report)
        self._device = self._front_end.device
        self._ahead = copy_ahead(setup, self._front_end, self._recorder.clock, to_user)
        self._staging = self._make_staging()
        self._make_processes(partial(_report_choice, to_user, self._collector))
        self._engine = engine = self._make_engine(to_user)
        if self._switching is not None:
            self._switching.watch(engine)
        self._own_thread = self._make_own_thread(partial(_report_choice, to_user, self._collector))
        self._starter = Starter()
        if self._trace is not None:
            self._collector.hold()

        #: (epoch, step) of the next batch to hand out; the batch handed out last, and when.
        self._position = self._plan.first_read_from(self._rank, 0, 0)
        self._handed: tuple[int, int, float, int] | None = None
        #: Where prefetching began; None before.
        self._started_at: tuple[int, int] | None = None
        #: Since when the caller waits for a batch; None while it has one.
        self._asked: float | None = None
        self._drained = self._recorder.clock()
        #: When the latest epochs were reported.
        self._summed = -math.inf
        self._pass = _Pass()
        self._lines = self._ended.lines = EpochLines(setup, weakref.proxy(engine))  # which refers to it
        self._has_reported_start = False
        self._is_closed = False
        #: The thread that is inside `start`, `iter` or `next`, None while none is.
        self._thread_inside: int | None = None
        engine.end_with(self)
        self._is_made = True
        if state is not None:
            self._begin_at(read_state(state, self._described, self._plan, self._rank))

    def _make_processes(self, report: Callable[[str], None]) -> None:
        """Have worker processes fetch and decode, where they are to, or may later."""
        setup = self._setup
        decoder = cast(MovableDecoder, self._decoder)
        self._processes: Processes | None = None
        self._switching: Switching | None = None
        if setup.processes is not None:
            self._processes = Processes(setup.processes, self._fetcher, decoder, self._staging)
        elif self._staging.arena is not None:
            make = partial(_processes_of_data_set, setup, self._agreed.config, self._front_end, self._staging)
            self._switching = Switching(
                self._fetcher, decoder, make, report, cpus=setup.cpus, samples=_samples_of(self._plan)
            )
        self._fetcher = self._processes or self._switching or self._fetcher

    def _make_own_thread(self, report: Callable[[str], None]) -> OwnThread | None:
        """Return what has the training's thread make batches where that is faster; None where it never does."""
        config, front_end, plan, setup = self._agreed.config, self._front_end, self._plan, self._setup
        batch_bytes = setup.budget.slot_bytes // setup.limits.steps
        # Whoever says how long a wait may last, or how many batches are ahead, wants threads; and a device reads slots.
        if (
            self._switching is None
            or config.timeout_seconds is not None
            or config.prefetch is not None
            or front_end.device is not None
            or front_end.pinning is not None
            or plan.is_cut_by_order
            or even_from(plan.order) != 0
            or batch_bytes > MOST_OWN_BYTES
        ):
            return None
        return OwnThread(
            plan,
            self._rank,
            self._engine,
            setup.fetcher,
            setup.decoder,
            self._switching,
            report,
            front_end,
            setup.beside,
            batch_bytes=batch_bytes,
            collates=setup.collates,
            clock=self._recorder.clock,
        )

    def _make_staging(self) -> StagingBuffer:
        setup = self._setup
        rows = setup.limits.steps * setup.plan.max_local_batch(setup.rank)
        make = partial(
            StagingBuffer,
            setup.decoder.fields,
            rows,
            setup.budget.staging_bytes,
            self._front_end.device_event(),
            beside=setup.beside,
            pinning=self._front_end.pinning,
        )
        may_switch = self._agreed.config.workers == "auto" and setup.may_switch
        try:
            staging = make(is_shared=setup.processes is not None or may_switch)
        except ConfigError:  # as under `ulimit -v`, which slots that are made one by one may never reach
            if not may_switch:
                raise
            staging = make()
        for _ in range(setup.limits.slots):
            staging.grow()
        return staging

    def _make_engine(self, report: Callable[[str], None]) -> Engine:
        """Join what decides, what does the work and where it ends up."""
        setup, plan, rank = self._setup, self._plan, self._rank
        asks_for_trace = None if self._trace is None else ASK_FOR_TRACE_SECONDS
        return Engine(
            Scheduler(
                plan,
                rank,
                setup.sizes_bytes,
                setup.placement,
                setup.machine,
                setup.limits,
                setup.extents,
                setup.held,
                setup.form,
                None if setup.sharing is None else setup.sharing.shared,
                setup.fetcher.sends if isinstance(setup.fetcher, ServedFetcher) else None,
            ),
            self._fetcher,
            self._processes or self._switching or self._decoder,
            self._staging,
            self._recorder,
            EngineSettings(
                readers=setup.limits.readers,
                patience_seconds=self._config.patience_seconds,
                timeout_seconds=self._config.timeout_seconds,
                works_in_own_thread=setup.works_in_own_thread,
                ask_every_seconds=ASK_EVERY_SECONDS if setup.calls_python else asks_for_trace,
                is_plan_told=is_told(plan),
            ),
            begin=partial(
                _begin,
                _change_nothing if setup.works_in_own_thread else self._front_end.begin_thread,
                self._fetcher,
                setup.sizes_bytes.size,
            ),
            report=report,
            progress=partial(progress_lines, self._collector, self._plan),
            collect=self._collector.collect,
            finish=self._ended.finish,
            samples_of=partial(plan.local_batch, rank),
            compiled=compiled_decisions(),
            ahead=self._ahead,
            peers=None if setup.sharing is None else setup.sharing.peers,
            is_starting=_starting_of(self._processes),
            is_computing=self._front_end.is_computing,
        )

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
        me = get_ident()
        inside = self._thread_inside  # as in `__iter__`
        if inside is not None and inside != me:
            raise _used_by(inside)
        self._thread_inside = me
        try:
            self._check_open()
            if epoch is None:
                epoch, step = (0, step) if step else self._position
            first = self._plan.first_of_run(self._rank, epoch, step)
            if self._started_at is not None and not self._started_at == self._position == first:
                raise ConfigError(
                    f"this loader was started already and is at epoch {self._position[0]}, step {self._position[1]}: "
                    "start() comes before the first loop, which starts at epoch 0 without it"
                )
            self._begin_at(first)
            self._ensure_started()
        finally:
            self._thread_inside = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop begin in this epoch, as `DistributedSampler.set_epoch` does.

        For trainers that count epochs themselves. Nothing changes if the loop would begin within that epoch anyway, as
        after `load_state_dict`, or beyond it: a loader goes forward only.
        Raises: ConfigError if the plan has no such epoch; ClosedError after `close`.
        """
        self._check_open()
        place = self._plan.first_of_run(self._rank, epoch, 0)
        if epoch > self._position[0]:
            self._go_to(place)

    def _go_to(self, place: tuple[int, int]) -> None:
        """Let the next loop begin at a place, or where it would have if that is further."""
        if self._started_at is None:
            self._begin_at(max(self._position, place))
            return
        if self._pass.epoch is not None:
            self._leave_epoch()
        if self._position < place:
            self._engine.seek(*place)
            self._position = place

    def _begin_at(self, place: tuple[int, int]) -> None:
        """Have the first batch be that of a place, also for an iterator that there is; nothing was handed out."""
        self._position = place
        if self._pass.epoch is None:
            return
        if place[0] < self._plan.epochs:
            self._enter(*place)
        else:
            self._pass.epoch = None
            self._pass.number += 1

    def _enter(self, epoch: int, step: int) -> None:
        """Have the pass that there is begin at a place."""
        self._pass.epoch, self._pass.first_step = epoch, step
        self._pass.whole_steps = self._plan.steps_alike(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch. Nothing is read before the first batch is asked for, unless `start` was called.

        Raises: ClosedError after the last epoch or after `close`; ConfigError while another thread is inside `iter` or
            `next`.
        """
        me = get_ident()
        # No call from here to the `try`: neither Ctrl-C nor another thread can come between.
        inside = self._thread_inside
        if inside is not None and inside != me:
            raise _used_by(inside)
        self._thread_inside = me
        try:
            return self._begin_epoch()
        finally:
            self._thread_inside = None

    def _ensure_started(self) -> None:
        """Start the threads, and report it, unless that was done."""
        if not self._starter.is_started:
            if self._engine.is_forked:
                raise ClosedError(
                    "this loader was made in the process that this one was forked from: make a loader of its own here"
                )
            self._started_at = self._position
            if self._position != self._plan.first_read_from(self._rank, 0, 0):
                # Before there are threads, so that it is the first event they see.
                self._engine.seek(*self._position)
            if self._ahead is not None:
                self._ahead.go_to(self._position)
        self._starter.ensure_started(self._start)
        if not self._has_reported_start:
            self._has_reported_start = True
            if self._agreed.reports and self._report is not None:
                for line in self.start_lines:
                    self._report(line)

    def _start(self) -> None:
        """Begin the trace, which says where the run begins, and then the run."""
        if self._trace is not None:
            try:
                self._collector.write_to(TraceWriter(self._trace, self._about()))
            except (OSError, ValueError) as error:
                if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise not_written(self._trace, error) from error
                self._collector.break_off(error)
        self._engine.start()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this loader is closed: make a new one to read on")

    def _begin_epoch(self) -> Iterator[Any]:
        self._check_open()
        if self._pass.epoch is not None:
            self._leave_epoch()
        epoch = self._position[0]
        if epoch >= self._plan.epochs:
            raise ClosedError(
                f"all {self._plan.epochs} epochs of this loader were read: loop while loader.position[0] < "
                f"{self._plan.epochs}, or give a larger epochs= (or steps=) to plan for more"
            )
        self._pass.number += 1
        self._enter(*self._position)
        self._pass.delivered, self._pass.has_failed = 0, False
        begun = _Epoch(self, self._pass.number)
        self._pass.departure = self._engine.await_departure(begun)
        return begun

    def __len__(self) -> int:
        """Return the number of batches of the epoch that is under way or comes next, wherever in it `start` began."""
        return self._plan.local_steps(self._rank, min(self.position[0], self._plan.epochs - 1))

    def empty_batch(self) -> Any:
        """Return a batch without samples, [0, ...] each: what batches are made of, before one is read."""
        arrays = tuple(np.empty((0, *field.shape), field.dtype) for field in self._decoder.fields)
        batch = self._front_end.present(self._decoder.finish(-1, arrays, ()), self._setup.dtype_in_slot)
        return batch if self._device is None else self._device.move(batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and give the memory back once no batch is referred to. Twice is harmless.

        A trace that the disk does not take is reported, and raises nothing.
        """
        try:
            if not self._is_closed and not self._engine.is_forked:
                departure = self._pass.departure
                if self._own_thread is not None and departure is not None and departure() is None:
                    self._own_thread.forget_made()
                self._end_epoch()
        finally:
            self._is_closed = True
            try:
                self._engine.close()
                self._own_thread = None
                if isinstance(self._decoder, CollatingDecoder):
                    self._decoder.forget_all()
                self._lease.close()  # after its threads, which would compile for themselves without it
            finally:
                self._collector.close()

    # What a user may ask

    @property
    def config(self) -> LoaderConfig:
        """What the loader was given, but for trace= and report=."""
        return self._config

    @property
    def dtype(self) -> str | None:
        """Number format of the images; None for a data set, whose samples say theirs."""
        return self._dtype

    @property
    def plan(self) -> AccessPlan:
        """Who reads which sample when."""
        return self._plan

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, by label; empty where the source names none."""
        return self._setup.data.classes

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step) of the batch that this loader gives next; `state_dict` has the first one that is not consumed.

        They differ after a loop that was left early, by a `break` or by an error: the next loop here begins the next
        epoch, a resumed run continues the epoch that was left.
        """
        departure = self._pass.departure
        is_left = self._pass.has_failed or (departure is not None and departure() is None)
        if is_left and self._is_begun():
            return self._plan.first_read_from(self._rank, self._position[0] + 1, 0)
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is: what `load_state_dict` of a loader in another process takes.

        Batches that a loop was given are consumed, the one at hand included; batches read ahead are not, nor one that
        cannot be loaded. After a loop that was left early, by a `break` or by an error, the next batch is still one of
        its epoch, until another loop begins.
        Returns: JSON of less than 2 KB, the same on all ranks after the same step.
        """
        return self._state_at(*self._position)

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state of a run that has consumed all global batches before a step, whatever this loader did.

        epoch, step: as for `start`.
        Raises: ConfigError if the plan has no such step.
        """
        return self._state_at(*self._plan.first_of_run(self._rank, epoch, step))

    def _state_at(self, epoch: int, step: int) -> dict[str, Any]:
        plan = self._plan
        if epoch == plan.epochs and plan.last_steps is not None:  # a longer run continues that epoch
            epoch, step = epoch - 1, plan.last_steps
        return write_state(self._described, epoch, step)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Resume from a state: the first loop runs the rest of its epoch, with the batches and bits of an unbroken run.

        Before `start` and the first batch. Threads, memory, policy, ranks and the split may be others than they were;
        epochs may be more. What fixes the batches must be the same.
        state: of `state_dict` or `state_at`. allow: what may differ all the same: "plan", "data", "transforms",
            "pixels", or one of their values, such as "plan.order".
        Where ranks were compared when the loader was made, all of them call this and resume from the same step.
        Raises: ConfigError naming what differs, both values and what to do, if it is no state, or if the loader has
            begun; ClosedError after `close`; WaitTimeout naming the ranks that do not call.
        """
        place = self._agreed.resume_together(partial(self._place_of, state, allow))
        if self._setup.sharing is not None and place != self._shares_from:
            self._share_from(place)
        self._begin_at(place)

    def _share_from(self, place: tuple[int, int]) -> None:
        """Meet the other ranks again, so that each keeps what it reads first from a place on. No batch was read."""
        begun, to_user = self._pass, self._report or _keep_silent
        self._engine.close()
        self._collector.close()
        with closing(self._opening(to_user)) as opening:
            self._make_together(self._agreed, opening.calls, to_user, None, place)
        self._pass = begun

    def _place_of(self, state: Mapping[str, Any], allow: Collection[str]) -> tuple[int, int]:
        """Return where this loader resumes from a state. Raises: as `load_state_dict`."""
        self._check_open()
        if self._started_at is not None:
            raise ConfigError(
                "load_state_dict() comes before the first batch and start(): make a new loader for it"
            )
        drawn, seed = self._setup.seed, seed_of_state(state)
        if self._config.seed is None and seed not in (None, drawn):
            raise ConfigError(
                f"seed was left out, so that {drawn} was drawn, and the state is of seed {seed}: give the state when "
                "the loader is made, Loader(..., state=state), which takes its seed, or give seed="
            )
        return read_state(state, self._described, self._plan, self._rank, allow)

    @cached_property
    def _described(self) -> dict[str, Any]:
        setup = self._setup
        return describe_run(
            self._plan,
            setup.source,
            setup.pipeline,
            self._agreed.data,
            setup.draws_seed,
            self._config.mix_images,
        )

    @property
    def memory(self) -> MemoryBudget:
        """How the memory is shared out, in bytes."""
        return self._setup.budget

    @property
    def start_lines(self) -> list[str]:
        """What rank 0 reports at the start: data, order, steps, threads and memory of this rank."""
        lines = start_lines(self._setup, self._agreed.uncompared, self._agreed.others)
        if self._device is not None:
            lines.append(device_line(self._setup, self._device, self._ahead))
        return [f"{self._name}: {line}" for line in lines]

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """The samples left out so far because they could not be had."""
        return tuple(self._skipped)

    @property
    def metrics(self) -> list[EpochMetrics]:
        """The sums of the trace by epoch, up to the last batch handed out."""
        return self._collector.epochs()

    @property
    def recorder(self) -> Recorder:
        """What the trace is recorded with; a snapshot store that records with it, too, writes into the same trace.

        Only until the loader is closed.
        """
        return self._recorder

    def preview(self, count: int) -> NDArray[np.int64]:
        """Return the ids of the next `count` samples that this rank will get, in order; fewer at the run's end.

        Raises: ConfigError if count is negative.
        """
        check_count("count", count, 0)
        epoch, step = self.position
        if epoch >= self._plan.epochs:
            return np.empty(0, np.int64)
        return self._plan.stream(self._rank, epoch, step, count)

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

        Raises: ConfigError if one of the first two is not known, if the plan has no such step, or for a data set, whose
            costs are its own code's.
        """
        return predict_run(self._setup, machine, step_seconds, (epoch, step))

    # One batch

    def _next(self) -> Any:
        epoch = self._pass.epoch
        assert epoch is not None, "the latest pass is not over"
        if not self._has_reported_start:
            self._ensure_started()
        # What ending the step takes, a drain of the trace perhaps, is the loader's time, which the training waits for.
        self._begin_wait()
        if self._ahead is not None:
            self._ahead.passed(self._position)
        try:
            return self._wait_for_batch(epoch)
        except BaseException:
            self._end_wait_in_vain(epoch)
            if self._own_thread is not None:
                self._own_thread.begin_step(self._recorder.clock())
            raise

    def _wait_for_batch(self, epoch: int) -> Any:
        has_skipped_batch = False
        while self._position[0] == epoch:
            step, own, skipped, fitted = self._position[1], self._own_thread, list[SkippedSample](), 0.0
            if own is not None and (ready := own.ready(self._position)) is not None:
                batch, samples = ready
            else:
                staged = (own or self._engine).take(epoch, step)
                kept, skipped, error = self._judge(staged)
                if error is not None:
                    try:
                        raise error
                    finally:
                        # The traceback refers to this frame, and to the caller's, which has batches: no circle, please.
                        del error, staged
                batch = self._batch_of(staged, kept) if kept else None
                samples, fitted = len(kept), staged.fitted
            following = (epoch, step + 1)
            if step + 1 >= self._pass.whole_steps:  # before, every step is as large as this one
                following = self._plan.first_read_from(self._rank, *following)
            # Ctrl-C before this line, and the same batch comes again; after it, the next one.
            self._position = following
            (own or self._engine).let_go(epoch, step)
            self._skipped += skipped
            if batch is None:
                has_skipped_batch = True
                continue
            self._end_wait(epoch, step, samples, fitted)
            self._pass.delivered += 1
            return batch
        if self._pass.delivered == 0 and (skips := skip_clause(self._ended.skipped_of(epoch))):
            raise DataError(f"epoch {epoch} has no sample left{skips}")
        if has_skipped_batch:
            self._end_wait_in_vain(epoch)
        self._asked = None
        self._leave_epoch()
        raise StopIteration

    def _batch_of(self, staged: StagedBatch, kept: Sequence[int]) -> Any:
        """Return what the caller gets of a batch."""
        if self._device is not None and staged.copied is not None:
            return self._device.hand_over(staged.copied)
        batch = made(self._decoder, self._front_end, self._setup.dtype_in_slot, staged, kept)
        return batch if self._device is None else self._device.move(batch)

    def _begin_wait(self) -> None:
        self._asked = self._recorder.clock()
        if self._own_thread is not None:
            self._own_thread.end_step(self._asked)
        self._end_step(self._asked)
        if self._ended and self._asked - self._summed >= _LINES_SECONDS:
            self._report_ended(self._asked)

    def _end_wait(self, epoch: int, step: int, samples: int, fitted: float) -> None:
        """Record a wait that got a batch, whose step begins. fitted: see `StagedBatch`."""
        now = self._recorder.clock()
        assert self._asked is not None, "a wait that got no batch has not ended yet"
        # A device that is still at steps before is not waited for in vain.
        begin, self._asked = min(max(self._asked, fitted), now), None
        self._ring.record(Kind.WAIT, begin, now, epoch=epoch, step=step, samples=samples)
        self._collector.consumed = (epoch, step)
        self._handed = (epoch, step, now, samples)
        if self._own_thread is not None:
            self._own_thread.begin_step(now)

    def _end_wait_in_vain(self, epoch: int) -> None:
        """Record a wait that got no batch: it ended in an error or an interrupt, or all that was left is skipped."""
        if self._asked is None:
            return
        begin, self._asked = self._asked, None
        self._ring.record(Kind.WAIT, begin, self._recorder.clock(), epoch=epoch, step=NO_STEP, samples=0)
        self._collector.consumed = max(self._collector.consumed, (epoch, NO_STEP))

    def _end_step(self, now: float) -> None:
        """The caller asks for more: what it did since the last batch was its own step."""
        if self._handed is None:
            return
        epoch, step, since, samples = self._handed
        self._handed = None
        left = None if self._pass.departure is None else self._pass.departure.seconds
        end = now if left is None else left
        self._ring.record(Kind.STEP, since, end, epoch=epoch, step=step, samples=samples)
        # Workers collect when their own rings are half full; what a run that is killed has not written is seconds old.
        if self._ring.is_half_full or now - self._drained >= _DRAIN_SECONDS:
            self._drained = now
            self._collector.collect()

    def _leave_epoch(self) -> None:
        epoch = self._position[0]
        if self._is_begun():  # left early: what is staged of this epoch is not wanted
            if self._own_thread is not None:
                self._own_thread.forget_made()
            following = self._plan.first_read_from(self._rank, epoch + 1, 0)
            self._engine.seek(*following)
            self._position = following
            self._collector.consumed = (epoch, self._plan.steps(epoch))
        own = self._own_thread
        self._end_epoch(may_wait=own is not None and own.makes(self._position))

    def _is_begun(self) -> bool:
        """Whether the pass has handed out some, not all, of its epoch's batches."""
        epoch, step = self._position
        return epoch == self._pass.epoch and step != self._pass.first_step

    def _end_epoch(self, *, may_wait: bool = False) -> None:
        """Close the sums of the epoch that a pass was in, and report them. may_wait: until others have ended, too."""
        now = self._recorder.clock()
        self._end_step(now)
        self._pass.departure = None
        ended, self._pass.epoch = self._pass.epoch, None
        if ended is not None:
            self._ended.add(ended)
        if not may_wait or now - self._summed >= _LINES_SECONDS or len(self._ended) >= _MOST_LINES:
            self._report_ended(now)

    def _report_ended(self, now: float) -> None:
        self._summed = now
        self._ended.report()

    def _judge(self, staged: StagedBatch) -> tuple[Sequence[int], list[SkippedSample], Exception | None]:
        """Return the places of a batch that can be handed out, what is skipped, and what is to be raised instead."""
        on_error, places = self._config.on_error, range(len(staged.samples))
        if not staged.failed:
            return places, [], None
        skipped: list[SkippedSample] = []
        for sample in staged.samples[list(staged.failed)].tolist():
            error, traceback = staged.errors[sample]
            decision = on_error(error, sample) if callable(on_error) else on_error
            if decision == "raise":
                # Without the traceback of an earlier time that it was raised, which refers to the caller's batches.
                placed = _placed(error.with_traceback(traceback), staged.epoch, staged.step)
                return [], [], placed
            if decision != "skip":
                raise ConfigError(f'on_error returned {decision!r}; it must return "raise" or "skip"')
            name = self._fetcher.describe(sample)
            skipped.append(SkippedSample(staged.epoch, staged.step, sample, name, printable(str(error))))
            _forget_frames(error)
        return [place for place in places if place not in staged.failed], skipped, None

    # Bookkeeping

    def __repr__(self) -> str:
        epoch, step = self.position
        of = "" if self._plan.is_endless else f" of {self._plan.epochs}"
        return f"{type(self).__name__}({self._fetcher.place}; at epoch {epoch}{of}, step {step})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loader has threads and cannot be copied or pickled: make one in each process")

    def _about(self) -> dict[str, Any]:
        """Return what a trace must hold for the run to be predicted from it alone, by the same scheduler."""
        setup = self._setup
        return {
            "loader": self._name,
            "reads": "data set" if setup.pipeline is None else "source",
            "loads": "when asked" if setup.works_in_own_thread else "ahead",
            "source": self._fetcher.place,
            **self._recorder.about,
            "versions": {
                "penstock": version("penstock"),
                "python": platform.python_version(),
                "numpy": np.__version__,
                **({} if setup.pipeline is None else decoder_versions()),
            },
            "plan": write_plan(self._plan),
            "first_step": list(self._position),
            "machine": setup.machine.to_toml() if setup.is_measured else None,
            # As integers: NumPy's, which arguments may be, are no JSON.
            "memory": {name: int(size) for name, size in asdict(setup.budget).items()},
            "limits": {name: int(count) for name, count in asdict(setup.limits).items()},
            "cpus": int(setup.cpus),
            "policy": setup.policy.name,
            "keep": None if (form := setup.form or setup.jobs_form) is None else asdict(form),
            "sharing": None if setup.sharing is None else list(setup.sharing.ranks),
        }


@dataclass(slots=True)
class _Pass:
    """The pass over an epoch that is under way, or the last one.

    number: counts `iter` calls; an iterator that is not of the latest is over.
    epoch: None once it has ended. whole_steps: of the epoch, how many have all their samples.
    first_step: at which it began. delivered: batches that it has handed out.
    has_failed: whether it ended with an error, or Ctrl-C, in place of a batch.
    departure: tells when it was dropped: a `for` loop that is left drops its iterator at once.
    """

    number: int = 0
    epoch: int | None = None
    whole_steps: int = 0
    first_step: int = 0
    delivered: int = 0
    has_failed: bool = False
    departure: Departure | None = None


class _Epoch(Iterator[Any]):
    """One pass of a loader over one epoch; over when the loader begins another."""

    def __init__(self, loader: Loader, number: int) -> None:
        self._loader = loader
        self._number = number
        #: What it ended with; None before its end.
        self._end: type[BaseException] | None = None

    def __next__(self) -> Any:
        if self._end is not None:
            if self._end is StopIteration:
                raise StopIteration
            # Not so after an error: the rest of the epoch would be missing, and nobody told.
            raise ClosedError(
                f"this pass over an epoch ended with {self._end.__name__}: begin another `for` loop, which runs the "
                'next epoch; or make the loader with on_error="skip", which leaves out samples that cannot be had'
            )
        loader = self._loader
        if self._number != loader._pass.number:
            raise ClosedError(
                "this pass over an epoch ended when another `for` loop over the same loader began (or `set_epoch` "
                "chose another): a loader runs one epoch at a time; make a second loader to read in two places at once"
            )
        me = get_ident()
        inside = loader._thread_inside  # as in `Loader.__iter__`
        if inside is not None and inside != me:
            raise _used_by(inside)
        loader._thread_inside = me
        try:
            return loader._next()
        except BaseException as error:
            self._end = type(error)
            loader._pass.has_failed = self._end is not StopIteration
            raise
        finally:
            loader._thread_inside = None


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


def _begin(begin_thread: Callable[[], None], fetcher: Fetcher, samples: int) -> None:
    """Do what a thread that decodes does first. samples: of the data."""
    begin_thread()
    draw_compiled(samples)
    if isinstance(fetcher, SourceFetcher):
        fetcher.prepare()
    elif isinstance(fetcher, Processes):
        fetcher.begin()


def _processes_of_data_set(
    setup: Setup, config: LoaderConfig, front_end: FrontEnd, staging: StagingBuffer, count: int
) -> Processes:
    """Make worker processes for a data set that threads have called. Raises: ConfigError where it cannot be copied."""
    most_bytes = memory_limit_bytes() / _COPY_SHARE
    plan = process_plan(cast(MapDataset, setup.source), config, front_end.reducers, count, most_bytes)
    processes = Processes(plan, setup.fetcher, cast(MovableDecoder, setup.decoder), staging)
    if reason := processes.repeats_script:
        raise ConfigError(
            f"{reason}: put what the script does under that line, or {setup.data.place} into a module"
        )
    return processes


def _samples_of(plan: AccessPlan) -> float:
    """Return about how many samples a rank has to load."""
    return math.inf if plan.is_endless else plan.epochs * plan.length(0) / plan.ranks


def _report_choice(report: Callable[[str], None], collector: Collector, line: str) -> None:
    """Report what was chosen while the training runs; the trace has it, too."""
    collector.note_choice(line)
    report(line)


def _starting_of(processes: Processes | None) -> Callable[[], bool]:
    """Return what says whether a wait is one for worker processes to start."""
    return lambda: processes is not None and processes.is_starting


def _change_nothing() -> None:
    """How the training's own thread is set up for loading."""


def _keep_silent(_: str) -> None:
    """Where a user wants no reports."""


def _used_by(inside: int) -> ConfigError:
    """Return what to raise in a thread that asks for a batch while another one does."""
    user = {thread.ident: thread.name for thread in enumerate_threads()}.get(inside, inside)
    return ConfigError(
        f"thread {user!r} is inside this loader while {current_thread().name!r} asks it for a batch: a loader serves "
        "one thread at a time, so let one thread read and pass batches on through a queue.Queue, or make a loader for "
        "each thread"
    )


def _placed(error: Exception, epoch: int, step: int) -> Exception:
    """Return what to raise out of `__next__` for a sample's error, with a note about its place."""
    if isinstance(error, StopIteration):  # it would end the loop as if all had been read
        stopped = RuntimeError(f"a sample's own code raised {error!r}")
        stopped.__cause__ = error
        error = stopped
    place = f"in the batch of epoch {epoch}, step {step}"
    if place not in getattr(error, "__notes__", ()):
        error.add_note(place)
    return error


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what a traceback holds: the local variables of a worker, a sample's bytes among them."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
