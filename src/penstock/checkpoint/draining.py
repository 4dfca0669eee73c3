"""Draining: what was committed to the fast tier is copied to the slow one while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np

from penstock.checkpoint.catalog import Catalog, open_way
from penstock.checkpoint.codecs.codec import BLOCK_VALUES, blocks_of
from penstock.checkpoint.manifest import Stored
from penstock.checkpoint.reading import Chain
from penstock.checkpoint.recipe import Plan
from penstock.checkpoint.staging import StagingArea, cut_waves
from penstock.checkpoint.tensors import Bytes
from penstock.checkpoint.upkeep import Upkeep
from penstock.checkpoint.writer import Job, SnapshotWriter
from penstock.checkpoint.writing import Piece, Scratch
from penstock.errors import DataError, FormatError
from penstock.flow.cpus import give_way
from penstock.flow.ordered import Workers

#: Number of the slow tier in the catalog.
_SLOW = 1
#: Read from the fast tier at a time.
_WAVE_BYTES = 16 << 20


class Drainer:
    """Copies snapshots to the slow tier, one after the other, on a thread that is there while something waits.

    It re-encodes them on the way: whole where they were committed, differences where they stay.
    """

    def __init__(
        self,
        catalog: Catalog,
        upkeep: Upkeep,
        writer: SnapshotWriter,
        threads: int,
        report: Callable[[str], None],
        interrupt: threading.Event,
    ) -> None:
        """writer: of the slow tier, used by nobody else. report: is told one line for each snapshot; never fails.

        interrupt: once set, a capped write ends at once.
        """
        self._catalog = catalog
        self._upkeep = upkeep
        self._writer = writer
        self._threads = threads
        self._report = report
        self._interrupt = interrupt
        #: guards what follows
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        #: Whether more may wait than the thread has seen.
        self._is_asked = False
        self._error: BaseException | None = None
        #: Steps whose saves were not told of yet: their drains are told of later.
        self._held_back: set[int] = set()
        #: Called once the thread has ended, where nobody will ask any more.
        self._then: Callable[[], None] | None = None

    @property
    def encode_bytes_per_second(self) -> float:
        """Return at which rate a thread of the last drain encoded; 0 before the first."""
        return self._writer.encode_bytes_per_second

    def hold_back(self, step: int) -> None:
        """Tell nobody of the drain of a step before `go_on` is called with it."""
        with self._changed:
            self._held_back.add(step)

    def go_on(self, step: int | None = None) -> None:
        """Drain what waits, if nobody does already. step: of a save that is over and was told of."""
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

    def stop(self) -> None:
        """Begin no other drain, and return once the one that is under way has ended or was broken off."""
        with self._changed:
            self._is_stopping = True
            self._interrupt.set()
            self._changed.notify_all()
            while self._thread is not None:
                self._changed.wait()

    def leave(self, then: Callable[[], None]) -> None:
        """Have a function called once what waits is drained; nobody asks for anything any more."""
        with self._changed:
            if self._thread is not None:
                self._then = then
                return
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
                step = self._upkeep.next_to_drain(time.time())
                if step is not None:
                    self._drain(step)
            except BaseException as failure:
                if step is not None and self._upkeep.has_lost_fast():
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
                # Under the lock of `go_on`: what is asked for is seen here, or begins another thread.
                if error or self._is_stopping or (step is None and not self._is_asked):
                    self._error = error
                    self._thread = None
                    self._changed.notify_all()
                    then, self._then = self._then, None
                    break
                self._is_asked = False
        if then is not None:
            then()

    def _drain(self, step: int) -> None:
        begin_seconds = time.monotonic()
        try:
            with closing(self._opened(step)) as chain:
                manifest = chain.manifest
                waves = FromChain(chain, self._interrupt)
                job = Job(
                    step,
                    begin_seconds,
                    [stored.layout for stored in manifest.tensors],
                    manifest.tree,
                    None,
                    StagingArea(),
                    waves,
                    plan=Plan(step, manifest.uid, manifest.created_seconds, manifest.clock_seconds, (), None),
                    rank_trees=manifest.rank_trees,
                )
                job.is_copied.set()
                # They begin here, for the writer ends them.
                self._writer.begin(job, job.layouts)
                try:
                    saved = self._writer.write(job, Workers(self._threads, f"penstock-drain-{step}"))
                except FormatError:
                    self._remember_damage(job, waves)
                    raise
            with self._changed:
                while step in self._held_back and not self._is_stopping:
                    self._changed.wait()
            self._report(f"{saved.told('drained')} to {saved.tier}{saved.note}")
        finally:
            self._upkeep.let_go([step])

    def _opened(self, step: int) -> Chain:
        try:
            return open_way(self._catalog, self._catalog.ways(step)[0])
        except FormatError:
            self._catalog.mark_damaged(step)
            raise

    def _remember_damage(self, job: Job, waves: FromChain) -> None:
        """Have the next drain not fail for the same reason."""
        if any(copy.tier == _SLOW for copy in self._catalog.copies(job.step)):
            # It was committed, and is not what was written: else the good copy would make way for it.
            self._upkeep.discard(_SLOW, job.step)
        elif waves.is_damaged:
            # Nothing of it can be drained: others wait.
            self._catalog.mark_damaged(job.step)


class FromChain:
    """The tensors of a stored snapshot in waves, each read when it is asked for."""

    def __init__(self, chain: Chain, interrupt: threading.Event) -> None:
        """interrupt: once set, nothing more is read."""
        self._chain = chain
        self._interrupt = interrupt
        self._scratch = Scratch()
        #: Whether it was found to be damaged.
        self.is_damaged = False

    def take(self) -> Iterator[Sequence[Piece]]:
        """Yield the tensors in pieces, valid until the next are asked for.

        Raises: FormatError, DataError; the latter also if it is interrupted.
        """
        area = np.empty(0, np.uint8)
        tensors = self._chain.manifest.tensors
        for cuts in cut_waves([stored.layout for stored in tensors], _WAVE_BYTES):
            self._check_interrupt()
            needed = sum(place.stop - place.start for _, place in cuts)
            if area.size < needed:
                area = np.empty(needed, np.uint8)
            pieces = []
            used = 0
            for index, place in cuts:
                stored = tensors[index]
                block_bytes = BLOCK_VALUES * stored.layout.dtype.item_bytes
                data = area[used : used + place.stop - place.start]
                for begin in range(0, data.size, block_bytes):
                    number = (place.start + begin) // block_bytes
                    out = data[begin : begin + block_bytes]
                    self._read(stored, number, out)
                pieces.append(Piece(stored.layout, place.start // block_bytes, data))
                used += data.size
            yield pieces

    def again(self) -> Iterator[Piece]:
        """Yield the tensors once more, block by block, each valid until the next. Raises: as `take`."""
        room = Scratch()
        for stored in self._chain.manifest.tensors:
            for number, place in enumerate(blocks_of(stored.layout.nbytes, stored.layout.dtype)):
                self._check_interrupt()
                out = room.room(0, place.stop - place.start)
                self._read(stored, number, out)
                yield Piece(stored.layout, number, out)

    def _check_interrupt(self) -> None:
        if self._interrupt.is_set():
            raise DataError("a drain was broken off: the store is closed")

    def _read(self, stored: Stored, number: int, out: Bytes) -> None:
        try:
            self._chain.read_block(stored, number, out, self._scratch)
        except FormatError:
            self.is_damaged = True
            raise

    def give_up(self) -> None:
        """Nothing is read ahead."""
