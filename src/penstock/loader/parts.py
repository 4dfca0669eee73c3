"""What a loader runs on, made of its set-up as one value: who loads, where batches lie, and what records it all.

Whose Fetcher and Decoder the engine calls:

    workers=N       Processes: each decode thread has a worker process decode; that also fetches the samples of a data
                    set, while bytes of a source are read here
    workers="auto"  Switching, for a data set that processes could load: threads, until processes prove faster
    else            the Setup's own, in threads; or, with decoders=0, in the training's thread, inside of the engine
"""

from __future__ import annotations

import math
import os
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from penstock.errors import ConfigError
from penstock.flow.collector import Collector
from penstock.flow.copying import CopyAhead
from penstock.flow.cpus import memory_limit_bytes
from penstock.flow.engine import Engine, EngineSettings, compiled_decisions
from penstock.flow.lock_use import ASK_EVERY_SECONDS, ASK_FOR_TRACE_SECONDS
from penstock.flow.recorder import Recorder
from penstock.flow.staging import StagingBuffer
from penstock.flow.work import Fetcher
from penstock.loader.agreeing import Agreed
from penstock.loader.collating import CollatingDecoder
from penstock.loader.config import LoaderConfig
from penstock.loader.dataset import MapDataset
from penstock.loader.decode_servers import ServedFetcher
from penstock.loader.draws import draw_compiled
from penstock.loader.epoch_lines import EndedEpochs, EpochLines
from penstock.loader.fetching import SourceFetcher
from penstock.loader.front_end import FrontEnd
from penstock.loader.on_device import copy_ahead, device_line
from penstock.loader.own_thread import OwnThread, may_be_own
from penstock.loader.processes import Processes
from penstock.loader.progress import progress_lines
from penstock.loader.samples import decoding_processes, process_plan
from penstock.loader.setup import Setup
from penstock.loader.source_samples import kind_of
from penstock.loader.start_lines import start_lines
from penstock.loader.step_clock import StepClock
from penstock.loader.switching import Switching
from penstock.loader.worker import MovableDecoder
from penstock.plan.growing import Growing
from penstock.plan.serialise import is_told
from penstock.policy import Scheduler
from penstock.ranks.transport_of_job import rank_of_this_process

_RING_SPANS = 4096
#: Of the memory, to copy a data set that nobody said to copy.
_COPY_SHARE = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a loader. Of its threads none runs before `engine.start`.

    front_end: what becomes of the setup's batches; where collate_fn makes them, of what that returns.
    name: of the loader, in lines about it. trace: the file that every span goes to; None for none.
    ended: reports epochs. ahead: copies batches to a device; None where nothing does.
    processes, switching: worker processes, and what may start some; None where there are none.
    own_thread: makes batches in the training's thread where that is faster; None where it never is.
    report: None for silence.
    """

    agreed: Agreed
    setup: Setup
    front_end: FrontEnd
    name: str
    trace: str | os.PathLike[str] | None
    recorder: Recorder
    collector: Collector
    clock: StepClock
    ended: EndedEpochs
    ahead: CopyAhead | None
    staging: StagingBuffer
    processes: Processes | None
    switching: Switching | None
    engine: Engine
    own_thread: OwnThread | None
    report: Callable[[str], None] | None

    @property
    def fetcher(self) -> Fetcher:
        """What brings samples."""
        return self.processes or self.switching or self.setup.fetcher

    def start_lines(self) -> list[str]:
        """Return what rank 0 reports at the start."""
        lines = start_lines(self.setup, self.agreed.uncompared, self.agreed.others)
        if self.front_end.device is not None:
            lines.append(device_line(self.setup, self.front_end.device, self.ahead))
        return [f"{self.name}: {line}" for line in lines]

    def report_start(self) -> None:
        """Report them, if this process reports for its job."""
        if self.agreed.reports and self.report is not None:
            for line in self.start_lines():
                self.report(line)

    def close(self) -> None:
        """End all threads, give up what was made of batches, and end the trace. Twice is harmless."""
        try:
            self.engine.close()
            if self.own_thread is not None:
                self.own_thread.close()
            if isinstance(self.setup.batches, CollatingDecoder):
                self.setup.batches.forget_all()
        finally:
            self.collector.close()


def make_parts(
    agreed: Agreed,
    setup: Setup,
    front_end: FrontEnd,
    trace: str | os.PathLike[str] | None,
    report: Callable[[str], None] | None,
) -> Parts:
    """Make the parts of a loader.

    report: None for silence. Raises: ConfigError where memory or the device does not hold what is staged, or worker
        processes cannot load.
    """
    to_user = report if report is not None else keep_silent
    config, plan = agreed.config, setup.plan
    if config.collate_fn is not None:
        present_made = front_end.present_made
        front_end = replace(front_end, present=lambda batch, dtype: present_made(batch))
    name = setup.data.name if plan.ranks == 1 else f"{setup.data.name}, rank {setup.rank}"
    # Who asks for one batch after the other has shared them out between ranks beforehand.
    is_asked = isinstance(plan.order, Growing)
    recorder = Recorder(_RING_SPANS, rank_of_this_process() if is_asked else setup.rank)
    collector = Collector(
        recorder, None, to_user, setup.fetcher.describe, {recorder.rank: socket.gethostname()}
    )
    clock, ended = StepClock(recorder, collector), EndedEpochs(collector, name, report)
    report_choice = partial(_report_choice, to_user, collector)
    ahead = copy_ahead(setup, front_end, recorder.clock, to_user)
    staging = _new_staging(config, setup, front_end)
    processes, switching = _in_processes(config, setup, front_end, staging, report_choice)
    fetcher = processes or switching or setup.fetcher
    begin_thread = _change_nothing if setup.works_in_own_thread else front_end.begin_thread
    engine = Engine(
        _scheduler_of(setup),
        fetcher,
        processes or switching or setup.decoder,
        staging,
        recorder,
        _settings_of(config, setup, keeps_trace=trace is not None),
        begin=partial(_begin, begin_thread, setup, processes),
        report=to_user,
        progress=partial(progress_lines, collector, plan),
        collect=collector.collect,
        finish=ended.finish,
        samples_of=partial(plan.local_batch, setup.rank),
        compiled=compiled_decisions(),
        ahead=ahead,
        peers=None if setup.sharing is None else setup.sharing.peers,
        is_starting=lambda: processes is not None and processes.is_starting,
        is_computing=front_end.is_computing,
    )
    own_thread = None
    if switching is not None:
        switching.watch(engine)
        if may_be_own(config, setup, front_end):
            own_thread = OwnThread(setup, front_end, engine, switching, report_choice, recorder.clock)
    ended.lines = EpochLines(setup, weakref.proxy(engine))  # which refers to it
    if trace is not None:
        collector.hold()
    return Parts(
        agreed,
        setup,
        front_end,
        name,
        trace,
        recorder,
        collector,
        clock,
        ended,
        ahead,
        staging,
        processes,
        switching,
        engine,
        own_thread,
        report,
    )


def _new_staging(config: LoaderConfig, setup: Setup, front_end: FrontEnd) -> StagingBuffer:
    make = partial(
        StagingBuffer,
        setup.decoder.fields,
        setup.limits.steps * setup.plan.max_local_batch(setup.rank),
        setup.budget.staging_bytes,
        front_end.device_event(),
        beside=setup.beside,
        pinning=front_end.pinning,
    )
    may_switch = config.workers == "auto" and setup.may_switch
    try:
        staging = make(is_shared=setup.processes is not None or may_switch)
    except ConfigError:  # as under `ulimit -v`, which slots that are made one by one may never reach
        if not may_switch:
            raise
        staging = make()
    for _ in range(setup.limits.slots):
        staging.grow()
    return staging


def _in_processes(
    config: LoaderConfig,
    setup: Setup,
    front_end: FrontEnd,
    staging: StagingBuffer,
    report: Callable[[str], None],
) -> tuple[Processes | None, Switching | None]:
    """Return the worker processes of a setup, or what may come to start some where threads are slower."""
    decoder = cast(MovableDecoder, setup.decoder)
    if setup.processes is not None:
        return Processes(setup.processes, setup.fetcher, decoder, staging), None
    if staging.arena is None:
        return None, None
    make, plan = partial(_processes_after_threads, setup, config, front_end, staging), setup.plan
    samples = math.inf if plan.is_endless else plan.epochs * plan.length(0) / plan.ranks
    return None, Switching(setup.fetcher, decoder, make, report, cpus=setup.cpus, samples=samples)


def _settings_of(config: LoaderConfig, setup: Setup, *, keeps_trace: bool) -> EngineSettings:
    asks_for_trace = ASK_FOR_TRACE_SECONDS if keeps_trace else None
    return EngineSettings(
        readers=setup.limits.readers,
        patience_seconds=config.patience_seconds,
        timeout_seconds=config.timeout_seconds,
        works_in_own_thread=setup.works_in_own_thread,
        ask_every_seconds=ASK_EVERY_SECONDS if setup.calls_python else asks_for_trace,
        is_plan_told=is_told(setup.plan),
    )


def _scheduler_of(setup: Setup) -> Scheduler:
    scheduler = Scheduler(
        setup.plan,
        setup.rank,
        setup.sizes_bytes,
        setup.placement,
        setup.machine,
        setup.limits,
        setup.extents,
        setup.held,
        setup.form,
        None if setup.sharing is None else setup.sharing.shared,
        setup.fetcher.sends if isinstance(setup.fetcher, ServedFetcher) else None,
    )
    if isinstance(setup.fetcher, SourceFetcher) and (requests := setup.fetcher.requests) is not None:
        scheduler.follow(requests)
    return scheduler


def _processes_after_threads(
    setup: Setup, config: LoaderConfig, front_end: FrontEnd, staging: StagingBuffer, count: int
) -> Processes:
    """Make worker processes for what threads have done. Raises: ConfigError where what they need cannot be copied."""
    if setup.pipeline is not None:
        plan, what = decoding_processes(config, setup.pipeline, count), "the transforms"
    else:
        most_bytes = memory_limit_bytes() / _COPY_SHARE
        plan = process_plan(cast(MapDataset, setup.source), config, front_end.reducers, count, most_bytes)
        what = kind_of(setup.source)
    processes = Processes(plan, setup.fetcher, cast(MovableDecoder, setup.decoder), staging)
    if reason := processes.repeats_script:
        raise ConfigError(f"{reason}: put what the script does under that line, or {what} into a module")
    return processes


def _begin(begin_thread: Callable[[], None], setup: Setup, processes: Processes | None) -> None:
    """Do what a thread that decodes does first."""
    begin_thread()
    draw_compiled(setup.sizes_bytes.size)
    if processes is not None:
        processes.begin()
    if isinstance(setup.fetcher, SourceFetcher):
        setup.fetcher.prepare()


def _change_nothing() -> None:
    """How the training's own thread is set up for loading."""


def _report_choice(report: Callable[[str], None], collector: Collector, line: str) -> None:
    """Report what was chosen while the training runs; the trace has it, too."""
    collector.note_choice(line)
    report(line)


def keep_silent(_: str) -> None:
    """Where a user wants no reports."""
