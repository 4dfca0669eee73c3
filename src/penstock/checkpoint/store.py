"""The snapshot store: a training's state saved while it continues, kept safely, and given back bit for bit."""

from __future__ import annotations

import builtins
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Unpack

from penstock.checkpoint.arguments import (
    check_given,
    checked_only,
    checked_step,
    checked_trace,
    made_ranks,
    ranks_or_reader,
    taken_apart,
)
from penstock.checkpoint.config import StoreArguments, StoreConfig, store_config
from penstock.checkpoint.due import DueSaves
from penstock.checkpoint.files.manifest import bytes_beside
from penstock.checkpoint.files.writing import GROUP_BLOCKS, GROUP_BYTES
from penstock.checkpoint.host_copies import HostCopies
from penstock.checkpoint.inspecting import Listed, inspect
from penstock.checkpoint.opened import OpenedStore, quiet
from penstock.checkpoint.recipe import warm_up
from penstock.checkpoint.restoring import Restored, Restorer
from penstock.checkpoint.saving import BackgroundSave, Saved, Saving, Waves
from penstock.checkpoint.shared_state import SharedState
from penstock.checkpoint.state.flatten import Flat
from penstock.checkpoint.state.staging import Cut, StagingArea, space_of, waves_of
from penstock.checkpoint.state.tree import Framework
from penstock.checkpoint.sync.wire import messages
from penstock.checkpoint.writer import Blocked, Content, Job, OwnPart
from penstock.errors import ClosedError, ConfigError, DataError, FormatError, RankError, WaitTimeout
from penstock.flow.ordered import Workers
from penstock.flow.recorder import Recorder
from penstock.flow.snapshot_spans import SnapshotSpans
from penstock.policy.retention import restorable
from penstock.policy.saving import Save
from penstock.policy.space import SpaceNeeded, steps_until_pruned
from penstock.ranks import Ranks, alone, ranks_of_this_job
from penstock.report import checked_report, print_report
from penstock.trace.schema import Kind
from penstock.units import is_integer


class SnapshotStore:
    """Snapshots of a training in a folder.

        with SnapshotStore("runs/a") as store:
            store.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        ...
        state = SnapshotStore("runs/a").restore()

    Saving blocks the training only while the state is copied; it is encoded and written by threads of its own, and
    what fails there is raised by the next `save`, `wait` or `close`. One process writes at a time (of a job of many
    ranks, all together), any number reads.

    A process that was started as one of several, as by torchrun, and opens the store before it knows the others can
    read it, by itself, and not write.

    Not for several threads at once.
    """

    def __init__(
        self,
        folder: StoreConfig | str | os.PathLike[str],
        *,
        ranks: Callable[[], Ranks] | None = None,
        trace: str | os.PathLike[str] | Recorder | None = None,
        report: Callable[[str], None] | None = print_report,
        **arguments: Unpack[StoreArguments],
    ) -> None:
        """Open a store.

        folder, arguments: those of `StoreConfig`; or such a configuration alone.
        ranks: None: all ranks of the job use the store together and write one snapshot, where torch.distributed is
            initialised, or mpi4py.MPI imported in a job of several; `alone`: this process works by itself.
        trace: a file to record saves, drains and restores of this rank in, which is replaced: another one on each rank,
            and none that a loader writes; or `loader.recorder`, for the trace of a loader. None: under `penstock watch`
            a file in the folder of the run, else none.
        report: called with one line for each save; None: reports nothing.

        Raises: ConfigError naming the argument; DataError if the trace cannot be written.
        """
        self._config = store_config(folder, arguments)
        settings = self._config.settings
        checked_trace(trace)
        timing, telling = settings.schedule, checked_report(report)
        self._settings, self._encoding, self._threads = settings, settings.encoding, settings.threads
        #: Why this process cannot write: it does not know the other ranks of its job; else "".
        self._ranks, self._reads_only = ranks_or_reader(ranks)
        deciding = ranks or (alone if self._reads_only else ranks_of_this_job)
        self._due = DueSaves(timing, lambda: made_ranks(deciding))
        # No method of the store: what is reported by threads must not keep a store alive that nobody has any more.
        self._report = quiet(telling if self._ranks.rank == 0 else None)
        self._spans = SnapshotSpans(trace, self._ranks.rank, self._report)
        self._opened = OpenedStore(settings, self._ranks, self._report, self._spans)
        self._catalog, self._housekeeping = self._opened.catalog, self._opened.housekeeping
        self._writer, self._drainer = self._opened.writer, self._opened.drainer
        self._restorer = Restorer(self._catalog, self._ranks, self._threads, self._spans, self._report)
        #: Copies of the newest snapshot in memory of the hosts, and what restores from there.
        self._copies: HostCopies | None = None
        if settings.host_copies is not None:
            self._copies = HostCopies(settings.host_copies, self._catalog, self._ranks, self._report)
            self._copy_restorer = Restorer(
                self._copies.catalog, self._ranks, self._threads, self._spans, self._report
            )
        self._shared = SharedState(self._ranks, self._report)
        self._saving: BackgroundSave | None = None
        self._is_closed = False
        #: Which writes; those that are forked from it do not.
        self._process = os.getpid()

    @property
    def is_alone(self) -> bool:
        """Return whether this process uses the store by itself, not together with other ranks of its job."""
        return self._ranks.size == 1 and not self._reads_only

    # -- Saving ----------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether to save now, as the schedule says; on all ranks alike.

        step: how many steps the training has done.
        Raises: ConfigError if the store has no schedule, or this is no step; what the save before failed with, if that
            is known by now.
        """
        self._check_open()
        saving = self._saving
        if saving is not None and saving.saved is not None:
            self._due.took(saving.saved.blocked_seconds, saving.saved.durable_seconds)
        # What a rank knows already, another does a moment later: on all or on none it is raised here.
        has_failed, is_due = self._due.ask(
            checked_step(step), has_failed=saving is not None and saving.has_failed
        )
        if has_failed:
            self._finish_saving()
        return is_due

    def prepare(self, state: Any, steps: Sequence[int] | None = None) -> SpaceNeeded:
        """Get ready for a training before its first step: check that there is space, take the memory, load the codec.

        The first time on a machine a codec of ours is compiled, which takes half a minute: another process begins to,
        and blocks are stored as they are until it has.

        state: as it will be saved. steps: after which it will be, such as `schedule.steps(until=90_000)`; None: as many
            saves as it takes until old snapshots go.
        Returns: what the folder has to hold at most. That snapshots grow too old is counted where a schedule by time
            says how long saves are apart.
        Raises: ConfigError if there is no space for that.
        """
        self._check_open()
        self._finish_saving()
        flat: builtins.list[Flat] = []
        if steps is None:
            steps = steps_until_pruned(self._settings.keep, self._encoding.snap_dis, self._due.least_seconds)
        elif not isinstance(steps, Sequence) or not all(map(is_integer, steps)):
            raise ConfigError(f"steps is {steps!r:.80}; give a range or a list of steps, or None")

        def check_space(_: Any) -> builtins.list[int]:
            self._opened.raise_of_drain()
            self._housekeeping.open_for_writing()
            state_bytes = sum(layout.whole.nbytes for layout in flat[0].layouts) + bytes_beside(
                flat[0].tree, flat[0].layouts
            )
            if self._drainer is not None:
                self._drainer.get_ready(state_bytes)
            needed = self._housekeeping.check_space(
                state_bytes, steps, self._encoding, self._due.least_seconds
            )
            return [needed.peak_bytes, needed.kept_bytes, needed.largest_bytes]

        needed = SpaceNeeded(
            *self._ranks.gather_then_decide(
                "the check of space", lambda: flat.append(taken_apart(state)), check_space
            )
        )
        self._opened.is_space_checked = True
        sources = flat[0].sources
        cuts = waves_of(sources, self._settings.staging_bytes)
        if self._ranks.size == 1 and len(cuts) == 1:
            for area in self._writer.areas[: 2 if any(self._writer.holds) else 1]:
                area.reserve(space_of(cuts[0]))
        warm_up(self._encoding.codec, {source.layout.dtype for source in sources})
        return needed

    def save(self, step: int, state: Any, *, per_rank: Any = None) -> Saving:
        """Copy a state, and write it in the background.

        step: any but one that is there; a lower one than that saved last is reported, as `restore` then returns it.
        state: nested mappings and lists of torch or NumPy arrays and plain values; equal on all ranks. Plain values
            and small arrays in main memory are compared; floats that differ, such as the running means
            of a batch norm, are reported and kept as rank 0 has them. An object with `state_dict` and
            `load_state_dict` (a model, an optimizer, a loader) stands for what its `state_dict()` returns now.
        per_rank: the same, of what this rank has for itself, such as its random generator.
        Returns: once the state is copied and may change; `wait()` of it returns once the snapshot is durable.

        Raises: ConfigError naming the value of the state that a snapshot does not hold, or that differs between
            ranks, or if the state is no mapping, there is a snapshot of this step, or there is no space for the
            first snapshot of the store; FormatError if the store holds a snapshot of a newer Penstock; what the save
            before failed with.
        """
        self._check_open()
        step = checked_step(step)
        with self._spans.span(Kind.SAVE, step) as count:
            blocked = Blocked(time.monotonic())
            blocked.previous_step = self._finish_saving()
            if blocked.previous_step is not None:
                blocked.by_previous_seconds = time.monotonic() - blocked.begin_seconds
            before = None if self._drainer is None else functools.partial(self._raise_of_drain, step)
            flat, own, layouts, sources = self._shared.take(step, state, per_rank, before)
            if not self._opened.is_space_checked:
                check = functools.partial(
                    self._opened.check_first, step, flat.tree, layouts, self._due.least_seconds
                )
                self._ranks.on_rank_zero(f"the check of space for step {step}", check)
                self._opened.is_space_checked = True
            limit_bytes = self._settings.staging_bytes
            cuts = waves_of(sources, limit_bytes)
            if len(cuts) > 1:
                assert limit_bytes is not None, "without a limit there is one wave"
                cuts = waves_of(sources, limit_bytes // 2)
            areas = self._writer.free_areas()[: min(2, len(cuts))]
            waves = Waves(len(areas), len(cuts), sum(map(attrgetter("layout.nbytes"), sources)))
            get_ready = functools.partial(_reserve, areas, max(map(space_of, cuts)))
            job = Job(
                step,
                Content(layouts, flat.tree, own.tree if own else None),
                OwnPart(waves, areas[0], self._ranks.rank, get_ready),
                Save(self._writer.terms(can_repeat=len(cuts) == 1, ranks=self._ranks.size)),
                blocked,
            )
            self._writer.begin(job)
            if self._ranks.rank == 0 and (warning := self._catalog.describe_lower(step)):
                self._report(warning)
            saving = self._stage(job, cuts, waves, areas)
            count(waves.nbytes)
            blocked.seconds = time.monotonic() - blocked.begin_seconds
            blocked.is_copied.set()
            self._due.go_on(blocked.seconds)
            return saving

    def _stage(
        self, job: Job, cuts: Sequence[Sequence[Cut]], waves: Waves, areas: Sequence[StagingArea]
    ) -> BackgroundSave:
        """Copy a state wave by wave, and return what writes it meanwhile."""
        workers: Workers | None = None
        saving: BackgroundSave | None = None
        try:
            # They begin here: an interpreter that is shutting down starts no more threads.
            # No more than there are groups of blocks for; a single one is encoded by who writes it.
            groups = max(waves.nbytes // GROUP_BYTES, sum(map(len, cuts)) // GROUP_BLOCKS)
            threads = min(self._threads, groups + 1) if groups else 0
            workers = Workers(threads, f"penstock-encode-{job.step}")
            write = functools.partial(self._write, job, workers)
            saving = self._saving = BackgroundSave(job.step, write, self._report)
            if self._drainer is not None and self._ranks.rank == 0:
                saving.at_end(functools.partial(self._drainer.go_on, job.step))
            saving.start()
            for number, wave in enumerate(cuts):
                if not waves.wait_for_area():
                    break
                # In one wave, the threads that will encode have nothing else to do yet.
                waves.put(areas[number % len(areas)].copy(wave, workers if len(cuts) == 1 else None))
        except BaseException as error:
            # Interrupted, no thread to be had, or a device failed: what is half copied is never written.
            waves.leave_off()
            job.blocked.is_copied.set()
            if saving is not None and saving.is_begun:
                saving.forget_failure()
            else:
                self._saving = None
                self._writer.give_up(job, error)
                if workers is not None:
                    workers.close()
            raise
        return saving

    def _write(self, job: Job, workers: Workers) -> Saved:
        """Write a snapshot in the background; it is drained once its save has been reported."""
        if self._drainer is not None and self._ranks.rank == 0:
            self._drainer.hold_back(job.step)
            self._drainer.get_ready(sum(map(attrgetter("nbytes"), job.content.layouts)))
        saved = self._writer.write(job, workers)
        if self._copies is not None:
            self._copies.copy(saved.step, saved.uid)
        for area in self._writer.free_areas() if any(self._writer.holds) else ():
            # Here, lest the next save does it while training waits.
            area.reserve(job.own.area.nbytes)
        return saved

    def _raise_of_drain(self, step: int) -> None:
        try:
            self._opened.raise_of_drain()
        except Exception as error:
            error.add_note(f"step {step} is not saved: save it again, and what failed is tried again, too")
            raise

    def _finish(self) -> None:
        """Wait for the save that is under way, and raise what it or a drain failed with if that was not reported.

        For what one rank may do alone; what all do together has the drain's failure raised on all of them.
        """
        self._finish_saving()
        self._opened.raise_of_drain()

    def _finish_saving(self) -> int | None:
        """Wait for the save that is under way, and raise, on all ranks, what it failed with and did not report.

        Returns: its step, if there was something to wait for.
        """
        saving = self._saving
        if saving is None:
            return None
        if is_waiting := not saving.is_done:
            self._check_process()  # of what was forked from it, no thread ever ends it
        # Forgotten once it has ended: who interrupts this wait finds it under way as before.
        error = saving.joined()
        if saving.saved is not None:
            self._due.took(saving.saved.blocked_seconds, saving.saved.durable_seconds)
        self._saving = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame
        return saving.step if is_waiting else None

    # -- Restoring -------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        into: Any = None,
        only: Iterable[str] | None = None,
        framework: Framework | None = None,
        fallback: bool = False,
        strict: bool = True,
    ) -> Restored:
        """Return the state of a snapshot, bit for bit as it was saved.

        step: of the snapshot; None: the one that was saved last.
        into: a state whose arrays are overwritten in place and whose values are replaced; None: a new one is made.
        only: names or patterns such as "model/*" of what to restore; None: all.
        framework: "numpy" or "torch" for all arrays; None: each as it was saved. NumPy has bfloat16 and 8-bit floats
            only where the package ml_dtypes is installed.
        fallback: whether to take the newest intact snapshot before it where this one is damaged; the report says so.
        strict: whether `into` and the snapshot must have the same names (of those that `only` chooses), as for
            `load_state_dict` of PyTorch; False: what only one of them has is reported and left as it is.

        A closed store can be read, too. Replaced values other than arrays are reported.

        Raises: ConfigError if there is no such snapshot, naming the nearest, or if `into` does not fit, naming what
            is missing and what is unexpected, before anything is changed; FormatError naming file and tensor of what
            is damaged; DataError.
        """
        wanted, names = None if step is None else checked_step(step), checked_only(only)
        rule = "it is 'numpy', 'torch', or None for what was saved"
        check_given("framework", framework, is_one=framework in (None, "numpy", "torch"), rule=rule)
        self._finish_saving()

        def restore_by(restorer: Restorer, step: int | None, *, fallback: bool) -> Restored:
            return restorer.restore(
                step,
                into,
                names,
                framework,
                fallback=fallback,
                strict=strict,
                before_looking=self._opened.raise_of_drain,
            )

        copies = None if self._is_closed else self._copies
        if copies is not None and (copied := copies.gather(wanted)) is not None:
            try:
                return restore_by(self._copy_restorer, copied, fallback=False)
            except (FormatError, DataError) as error:
                if isinstance(error, FormatError):
                    copies.mark_damaged()
                self._report(f"step {copied} is not restored from the hosts' memory: {error}")
        return restore_by(self._restorer, wanted, fallback=fallback)

    def refresh(
        self, from_step: int | None, to_step: int | None = None, *, only: Iterable[str] | None = None
    ) -> Iterator[bytes]:
        """Yield messages that turn the tensors of one snapshot into those of another, for `Refresher.apply`.

        from_step: of the tensors as they are; None: nobody knows. Where no differences lead from there to `to_step`, as
            from a snapshot that was removed, everything is sent.
        to_step: of what they shall be; None: the last. only: names or patterns such as "model/*" of what is sent;
            None: all.

        Raises: ConfigError if there is no snapshot of `to_step`; FormatError, DataError if one is damaged.
        """
        begin = None if from_step is None else checked_step(from_step, "from_step")
        end = None if to_step is None else checked_step(to_step, "to_step")
        self._finish()
        names = checked_only(only)
        chosen = self._restorer.choose(end)

        def look_again() -> int:
            return self._restorer.choose(end, is_again=True)

        return messages(self._catalog, begin, chosen, names, look_again)

    # -- Looking after ---------------------------------------------------------------------------------------

    def list(self) -> list[Listed]:
        """Return what there is, in the order in which it was saved; files are opened, not read to their end.

        Raises: DataError if the folder cannot be listed.
        """
        self._restorer.look()
        listed = (inspect(self._catalog, step) for step in self._catalog.steps())
        return [one for one in listed if one is not None]

    def verify(self, step: int | None = None) -> builtins.list[Listed]:
        """Read every copy of snapshots to its end and decode it, and return what `list` would, with what this found.

        step: of the only one to look at; None: all. One that is a difference to a damaged one is damaged itself where
            it needs what is. What another process removes meanwhile is left out.
        Raises: ConfigError if there is no snapshot of this step.
        """
        wanted = None if step is None else checked_step(step)
        self._finish()
        self._restorer.look()
        steps = self._catalog.steps() if wanted is None else [self._catalog.choose(wanted)]
        with Workers(self._threads, "penstock-verify") as workers:
            found = [inspect(self._catalog, one, workers) for one in steps]
        listed = [one for one in found if one is not None]
        if step is not None and not listed:
            raise ConfigError(self._catalog.missing(step, was_there=True))
        return listed

    def rewind(self, step: int) -> builtins.list[int]:
        """Remove what was saved after a snapshot, for a training that went back to it and will save these steps anew.

        Returns: the steps that were removed, the last first.
        Raises: ConfigError if there is no such snapshot; DataError.
        """
        self._check_open()
        step = checked_step(step)
        self._finish_saving()

        def on_first() -> builtins.list[int]:
            self._opened.raise_of_drain()
            self._housekeeping.open_for_writing()
            self._catalog.choose(step)
            steps = self._catalog.steps()
            if all(
                step not in restorable(self._catalog.stored(tier)) for tier in range(len(self._catalog.tiers))
            ):
                raise ConfigError(
                    f"step {step} cannot be restored, so what came after it stays: restore(fallback=True) takes the "
                    "newest snapshot that can be, and a training continues from there"
                )
            later = steps[: steps.index(step) : -1]
            self._housekeeping.check_one(later)
            for one in later:
                self._housekeeping.delete(one)
            return later

        removed: builtins.list[int] = self._ranks.on_rank_zero(f"going back to step {step}", on_first)
        return removed

    def delete(self, step: int) -> None:
        """Remove a snapshot. Raises: ConfigError if there is none, or others are differences to it; DataError."""
        self._check_open()
        step = checked_step(step)
        self._finish_saving()

        def on_first() -> None:
            self._opened.raise_of_drain()
            self._housekeeping.open_for_writing()
            self._housekeeping.delete(step)

        self._ranks.on_rank_zero(f"the removal of step {step}", on_first)

    def drain(self) -> None:
        """Return once all that is to be is on the slow tier, what a process that died left included.

        Raises: ConfigError if there is no fast tier; what a drain failed with.
        """
        self._check_open()
        self._finish_saving()
        self._ranks.on_rank_zero("the drain", self._opened.drain)

    # -- The end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Return once the save that is under way is durable, and all is drained; twice is harmless.

        Of many ranks all call it. What failed to drain, and was raised, is tried once more. What is interrupted is
        drained by the next store that saves here.
        Raises: what the save or a drain failed with, once the other has ended.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        """error: with which this rank, and perhaps no other, comes here; None: all do."""
        if self._is_closed:
            return
        if self._process != os.getpid():
            # The save, the drain and the lock are the parent's.
            self._is_closed = True
            return
        failures: builtins.list[Exception] = []
        try:
            failures += _failure_of(self._finish_saving)
            # Who was not there, or somewhere else, is not waited for once more.
            together = error is None and not any(
                isinstance(each, (RankError, WaitTimeout)) for each in failures
            )
            if error is not None:
                for ranks in (self._ranks, self._due.ranks):
                    if ranks is not None:
                        ranks.leave(error)
            failures += _failure_of(functools.partial(self._finish_draining, together=together))
        finally:
            self._is_closed = True
            if self._drainer is not None:
                self._drainer.stop()
            if self._saving is None:
                self._opened.close()
            else:
                # Interrupted: the folder stays locked for as long as the save runs.
                self._saving.at_end(self._opened.close)
        if self._copies is not None and error is None and not failures:
            self._copies.remove()
        for other in failures[1:]:
            failures[0].add_note(f"and then {other}")
        if failures:
            raise failures[0]

    def _finish_draining(self, *, together: bool) -> None:
        if self._drainer is None:
            return
        if together:
            self._ranks.on_rank_zero("the end of the drain", self._drainer.finish)
        else:
            self._drainer.wait()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(
                f"the snapshot store {self._catalog.tiers[-1].name} was closed: it can still be read; open another to "
                "write"
            )
        if self._reads_only:
            raise ConfigError(f"the snapshot store can be read here and not written to: {self._reads_only}")
        self._check_process()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ClosedError(
                f"the snapshot store {self._catalog.tiers[-1].name} was opened by process {self._process}, from which "
                f"this one, {os.getpid()}, was forked: open one here to read; to write, once the other is closed"
            )

    def __enter__(self) -> SnapshotStore:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # What one rank fails with, others may not: they are notified, not waited for.
        self._close(error)


def _failure_of(function: Callable[[], object]) -> list[Exception]:
    try:
        function()
    except Exception as failure:
        return [failure]
    return []


def _reserve(areas: Iterable[StagingArea], nbytes: int) -> None:
    for area in areas:
        area.reserve(nbytes)
