"""Draining: copies what was committed to the fast tier to the slow one during the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from penstock.checkpoint.drain.drain_process import ProcessDrainer
from penstock.checkpoint.files.catalog import Catalog, Link, open_links
from penstock.checkpoint.files.reading import Chain
from penstock.checkpoint.housekeeping import Housekeeping
from penstock.checkpoint.recipe import SnapshotDecision
from penstock.checkpoint.saving import Saved
from penstock.checkpoint.staged import FromChain
from penstock.checkpoint.state.staging import StagingArea
from penstock.checkpoint.writer import Blocked, Content, Job, OwnPart, SnapshotWriter
from penstock.errors import FormatError
from penstock.flow.cpus import give_way
from penstock.flow.ordered import Workers
from penstock.policy.saving import Save, SaveTerms

#: Number of the slow tier in the catalog.
_SLOW = 1
#: A snapshot from that size on is worth a process of its own, which takes half a second of a processor to begin.
_LEAST_APART_BYTES = 64 << 20


class Drainer:
    """Copies snapshots to the slow tier, one after the other, on a thread that is there while something waits.

    It re-encodes them on the way: whole where they were committed, differences where they stay.
    """

    def __init__(
        self,
        catalog: Catalog,
        housekeeping: Housekeeping,
        writer: SnapshotWriter,
        threads: int,
        report: Callable[[str], None],
        interrupt: threading.Event,
        apart: ProcessDrainer | None = None,
    ) -> None:
        """writer: of the slow tier, used by nobody else. report: called with one line for each snapshot; never fails.

        interrupt: once set, a capped write ends at once. apart: begins a process that writes large snapshots; None: all
            are written by threads of this one.
        """
        self._catalog = catalog
        self._housekeeping = housekeeping
        self._writer = writer
        self._threads = threads
        self._report = report
        self._interrupt = interrupt
        self._apart = apart
        #: guards what follows
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        #: Whether more may wait than the thread has seen.
        self._is_asked = False
        self._error: BaseException | None = None
        #: Whether the last drain failed.
        self._has_failed = False
        #: Steps whose saves were not reported yet: their drains are reported later.
        self._held_back: set[int] = set()
        #: Called once the thread has ended, where nobody will ask any more.
        self._then: Callable[[], None] | None = None

    def get_ready(self, nbytes: int) -> None:
        """Begin the process that will drain a state of so many bytes, while that is being saved."""
        if self._apart is not None and nbytes >= _LEAST_APART_BYTES:
            self._apart.start()

    def hold_back(self, step: int) -> None:
        """Tell nobody of the drain of a step before `go_on` is called with it."""
        with self._changed:
            self._held_back.add(step)

    def go_on(self, step: int | None = None) -> None:
        """Drain what waits, if nobody does already. step: of a save that is over and was reported."""
        with self._changed:
            self._held_back.discard(step)
            self._changed.notify_all()
            self._is_asked = True
            if self._thread is None and not self._is_stopping and self._error is None:
                thread = threading.Thread(target=self._run, name="penstock-drain")
                try:
                    thread.start()
                except RuntimeError:
                    # The interpreter is shutting down: the next process that saves here drains what is left.
                    return
                self._thread = thread

    def wait(self) -> None:
        """Return once nothing waits any more. Raises: what a drain failed with."""
        with self._changed:
            while self._thread is not None:
                self._changed.wait()
        self.raise_error()

    def finish(self) -> None:
        """Return once nothing waits any more, where what failed, and was raised, was tried again. Raises: as `wait`."""
        with self._changed:
            is_to_try = self._has_failed and self._error is None
        if is_to_try:
            self.go_on()
        self.wait()

    def stop(self) -> None:
        """Begin no other drain, and return once the one that is under way has ended or was broken off."""
        with self._changed:
            self._is_stopping = True
            self._interrupt.set()
            self._changed.notify_all()
            while self._thread is not None:
                self._changed.wait()
        self._end_process()

    def leave(self, then: Callable[[], None]) -> None:
        """Have a function called once what waits is drained; nobody asks for anything any more."""
        with self._changed:
            if self._thread is not None:
                self._then = then
                return
        self._end_process()
        then()

    def raise_error(self) -> None:
        """Raise what a drain failed with, once; the next `go_on` tries again."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        give_way()
        while True:
            error: BaseException | None = None
            step: int | None = None
            try:
                step = self._housekeeping.next_to_drain(time.time())
                if step is not None:
                    self._drain(step)
            except BaseException as failure:
                if step is not None and self._housekeeping.has_lost_fast():
                    # What is not there any more cannot be drained: each save says so.
                    self._report(f"step {step}: NOT drained: the fast tier is gone")
                    continue
                if step is not None:
                    failure.add_note(
                        f"while step {step} was drained to the slow tier; it is on the fast one as before"
                    )
                error = failure
                # It is raised, too, but only where somebody asks again.
                self._report(f"{'what waits' if step is None else f'step {step}'}: NOT drained: {error}")
            with self._changed:
                self._has_failed = error is not None
                # Under the lock of `go_on`: what is asked for is seen here, or begins another thread.
                if error or self._is_stopping or (step is None and not self._is_asked):
                    self._error = error
                    self._thread = None
                    self._changed.notify_all()
                    then, self._then = self._then, None
                    break
                self._is_asked = False
        if then is not None:
            self._end_process()
            then()

    def _end_process(self) -> None:
        if self._apart is not None:
            self._apart.close()

    def _drain(self, step: int) -> None:
        begin_seconds = time.monotonic()
        try:
            try:
                links = self._catalog.chains(step)[0]
                chain = open_links(self._catalog, links)
            except FormatError:
                self._catalog.mark_damaged(step)
                raise
            with closing(chain):
                saved = self._copy(step, begin_seconds, chain, links)
        finally:
            self._housekeeping.let_go([step])
        with self._changed:
            while step in self._held_back and not self._is_stopping:
                self._changed.wait()
        self._report(f"{saved.line('drained')} to {saved.tier}{saved.note}")

    def _copy(self, step: int, begin_seconds: float, chain: Chain, links: Sequence[Link]) -> Saved:
        manifest = chain.manifest
        waves = FromChain(chain, self._interrupt)
        same = SnapshotDecision(
            step, manifest.uid, manifest.created_seconds, manifest.clock_seconds, (), None
        )
        layouts = [stored.layout for stored in manifest.tensors]
        job = Job(
            step,
            Content(layouts, manifest.tree, rank_trees=manifest.rank_trees, drained=same),
            OwnPart(waves, StagingArea()),
            Save(SaveTerms((_SLOW,), can_repeat=True, is_drain=True)),
            Blocked(begin_seconds),
        )
        if self._apart is not None and manifest.raw_bytes >= _LEAST_APART_BYTES:
            job.own.elsewhere = self._apart if self._apart.begin(links, waves) else None
        job.blocked.is_copied.set()
        self._writer.begin(job)
        # They begin here, for the writer ends them.
        return self._writer.write(job, Workers(self._threads, f"penstock-drain-{step}"))
