"""What the ranks of a job do in the background to turn staged tensors into a snapshot, and to forget old ones.

every rank   what it holds ──▶┐ rank 0: step free? difference to what?  ┌──▶ plan ──▶ its part, synced ──▶┐
                              └── begins the draft ─────────────────────┘                                 │
rank 0       ◀── the parts' tables ── one collective: the manifest, the rename: the snapshot is there ◀───┘
every rank   reads its part back ──▶ rank 0 removes what nobody wants any more
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.checkpoint.catalog import Catalog
from penstock.checkpoint.local import LocalTier
from penstock.checkpoint.manifest import (
    Manifest,
    Stored,
    folder_of,
    read_layout,
    write_layout,
    write_manifest,
)
from penstock.checkpoint.parts import Part
from penstock.checkpoint.ranks import Ranks
from penstock.checkpoint.recipe import (
    Plan,
    Way,
    WrittenPart,
    check_part,
    decide,
    manifest_of,
    new_plan,
    opened_reference,
)
from penstock.checkpoint.saving import Saved
from penstock.checkpoint.staged import InOneWave, Staged, write_staged
from penstock.checkpoint.staging import StagingArea
from penstock.checkpoint.tensors import Layout
from penstock.checkpoint.tier import Draft, Tier
from penstock.checkpoint.upkeep import Upkeep
from penstock.checkpoint.writing import Piece
from penstock.errors import DataError, FormatError
from penstock.flow.ordered import Workers
from penstock.flow.recorder import Recorder
from penstock.flow.snapshot_spans import SnapshotSpan
from penstock.trace.schema import Kind
from penstock.trace.trace import JSON


class Elsewhere(Protocol):
    """Writes a part into a draft that was begun, and reads it back once it is committed, in another process."""

    def write(self, plan: Plan) -> WrittenPart:
        """Return once the part would outlive a loss of power. Raises: FormatError, DataError."""
        ...

    def check(self, plan: Plan, part: Part) -> None:
        """Compare the part with its checksums. Raises: FormatError, DataError."""
        ...


@dataclass(eq=False)
class Job:
    """One save, from the copy of the state to the committed snapshot.

    begin_seconds: of the monotonic clock. layouts: of the tensors that this rank writes. tree: of the state.
    rank_tree: of what this rank has for itself.
    """

    step: int
    begin_seconds: float
    layouts: Sequence[Layout]
    tree: JSON
    rank_tree: JSON
    #: Where the first wave is staged.
    area: StagingArea
    waves: Staged
    #: Set by the training thread once the whole state is copied; `blocked_seconds` before it.
    is_copied: threading.Event = field(default_factory=threading.Event)
    blocked_seconds: float = 0.0
    #: What the snapshot is, where that is settled; then what rank 0 decided, and its draft.
    plan: Plan | None = None
    draft: Draft | None = None
    #: For which step the training thread waited first, and how long.
    waited_step: int | None = None
    waited_seconds: float = 0.0
    #: What `Saved` says besides.
    note: str = ""
    #: What every rank has for itself, of a snapshot that is copied; None: what `rank_tree` of each says.
    rank_trees: Sequence[JSON] | None = None
    #: Who writes the part in place of this process; None: nobody.
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A snapshot that is still in memory, in the area where it was staged."""

    uid: str
    pieces: Sequence[Piece]
    area: StagingArea


class SnapshotWriter:
    """Writes snapshots to a tier, one after the other. Used by one thread at a time; on all ranks alike."""

    def __init__(
        self,
        catalog: Catalog,
        tier: int,
        way: Way,
        upkeep: Upkeep,
        ranks: Ranks,
        *,
        holds_reference: bool,
        through: Tier | None = None,
        recorder: Recorder | None = None,
        span: Kind = Kind.WRITE,
    ) -> None:
        """tier: number of it in the catalog. holds_reference: whether the last snapshot stays in memory.

        through: writes to that tier, at a rate of its own; None: the tier itself. recorder, span: of what is written.
        """
        self._catalog = catalog
        self._number = tier
        self._recorder = recorder
        self._span = span
        self._tier = through or catalog.tiers[tier]
        # What is on another machine is not fetched back only to be looked at.
        self._reads_back = isinstance(catalog.tiers[tier], LocalTier)
        self._way = way
        self._upkeep = upkeep
        self._ranks = ranks
        self.holds_reference = holds_reference
        self.held: Held | None = None
        #: Of the last snapshot's state, as this rank saw it: from when it began to lie ready until it was durable; and
        #: encoded by one thread. 0 where nothing was.
        self.bytes_per_second = 0.0
        self.encode_bytes_per_second = 0.0
        self._begin_seconds = 0.0

    def begin(
        self, job: Job, layouts: Iterable[Layout], get_ready: Callable[[], None] = lambda: None
    ) -> None:
        """Decide what a snapshot shall be, and begin its draft; `write` has to follow.

        layouts: of the tensors of all ranks. get_ready: is called on every rank before.
        Raises: ConfigError if there is one of this step, or another process writes here; DataError; what `get_ready`
            raises on any rank, on all.
        """

        def decide_first(_: Any) -> list[Any]:
            self._upkeep.open_for_writing()
            if job.plan is None:
                self._upkeep.replace_damaged(job.step)
            else:
                self._upkeep.make_way(self._number, job.step)
            new = job.plan or new_plan(job.step, self._catalog)
            with self._upkeep.nothing_goes():
                plan = decide(self._catalog, self._number, new, self._way, layouts)
                # Let go of at the end of `write`.
                self._upkeep.hold(link.step for link in plan.chain)
            # Not under the lock: a slow tier that hangs must not hold up a save to the fast one.
            try:
                job.draft = self._tier.begin(folder_of(plan.step), plan.uid)
            except BaseException:
                self._upkeep.let_go(link.step for link in plan.chain)
                raise
            return plan.write()

        what = f"the beginning of step {job.step}"
        job.plan = Plan.read(self._ranks.together(what, get_ready, decide_first))
        if job.plan.why_baseline:
            job.note = f": {job.plan.why_baseline}{job.note}"

    def give_up(self, job: Job) -> None:
        """Take back a beginning that nobody will write."""
        if self._ranks.rank == 0 and job.plan is not None:
            if job.draft is not None:
                job.draft.abort()
            self._upkeep.let_go(link.step for link in job.plan.chain)

    def write(self, job: Job, workers: Workers) -> Saved:
        """Write a snapshot that has begun; it is durable, checked, and what it replaces is gone when this returns.

        Raises: on all ranks, what failed on any.
        """
        assert job.plan is not None, "it has begun"
        try:
            return self._write(job, job.plan, workers)
        finally:
            job.waves.give_up()
            workers.close()
            if self._ranks.rank == 0:
                self._upkeep.let_go(link.step for link in job.plan.chain)

    def _write(self, job: Job, plan: Plan, workers: Workers) -> Saved:
        ranks = self._ranks
        draft = job.draft or self._tier.begin(folder_of(plan.step), plan.uid, join=True)
        held = self.held
        pieces: list[Sequence[Piece]] = []
        written: list[Part] = []

        def began(wave: Sequence[Piece]) -> None:
            pieces.append(wave)
            self._begin_seconds = time.monotonic()

        def write_here(span: SnapshotSpan) -> WrittenPart:
            with opened_reference(
                self._catalog, plan, held.uid if held else None, held.pieces if held else ()
            ) as references:
                return write_staged(
                    draft,
                    plan,
                    ranks.rank,
                    self._way,
                    job.waves,
                    sum(layout.nbytes for layout in job.layouts),
                    references,
                    workers,
                    began,
                    span.add,
                )

        def write() -> Any:
            with SnapshotSpan(self._recorder, self._span, plan.step, self._number) as span:
                if job.elsewhere is None:
                    made = write_here(span)
                else:
                    self._begin_seconds = time.monotonic()
                    made = job.elsewhere.write(plan)
                    span.add(made.part.nbytes)
            part = made.part
            written.append(part)
            if made.encode_seconds:
                self.encode_bytes_per_second = made.encoded_bytes / made.encode_seconds
            rows = [[*write_layout(one.layout), one.first_block] for one in made.stored]
            return [[part.file, part.nbytes, part.table], rows, job.rank_tree, made.refers]

        def check() -> None:
            if job.elsewhere is None:
                check_part(self._tier, plan, ranks.rank, written[0], to_its_end=self._reads_back)
            else:
                job.elsewhere.check(plan, written[0])

        def commit(parts: Sequence[Any]) -> list[Any]:
            refers = any(part_refers for *_, part_refers in parts)
            manifest = self._manifest(job, plan.as_written(refers=refers), parts)
            file = write_manifest(manifest)
            manifest = replace(manifest, file_bytes=len(file))
            draft.commit(file)
            self._catalog.add(self._number, manifest)
            return [manifest.raw_bytes, manifest.stored_bytes, refers]

        try:
            raw_bytes, stored_bytes, refers = ranks.together(f"the commit of step {plan.step}", write, commit)
        except BaseException as error:
            if ranks.rank == 0:
                draft.abort()
            if isinstance(error, DataError) and self._span is Kind.WRITE and not self._is_there(plan):
                raise type(error)(f"{error}: step {plan.step} was not saved") from error
            if not isinstance(error, FormatError) or plan.reference is None or job.waves.is_damaged:
                raise
            # What else is read meanwhile is the reference: it is damaged, and nothing is to refer to it any more.
            self._catalog.mark_damaged(plan.reference.step, plan.chain[-1].tier)
            if job.elsewhere is None:
                nbytes = sum(layout.nbytes for layout in job.layouts)
                if ranks.size > 1 or not pieces or sum(piece.data.size for piece in pieces[0]) != nbytes:
                    raise
                job.waves = InOneWave(pieces[0])
            job.draft = self._tier.begin(folder_of(plan.step), plan.uid)
            job.note += f": step {plan.reference.step}, to which it was to be a difference, is damaged"
            return self._write(job, plan.as_baseline(), workers)
        made = plan.as_written(refers=refers)
        if made is not plan:
            plan, job.note = made, f": {made.why_baseline}{job.note}"
        now_seconds = time.monotonic()
        durable_seconds = now_seconds - job.begin_seconds
        self.bytes_per_second = raw_bytes / max(now_seconds - self._begin_seconds, 1e-9)
        # In a chain all are differences to the baseline, which stays in memory.
        is_next_reference = self.holds_reference and not (plan.reference and self._way.scheme == "chain")
        if is_next_reference:
            # Held by nobody until it is checked: what comes next must not be a difference to what cannot be read.
            self.held = None
        try:
            ranks.together(f"the check of step {plan.step}", check)
        except (FormatError, DataError):
            self._catalog.mark_damaged(plan.step, self._number)
            raise
        if is_next_reference:
            self.held = Held(plan.uid, pieces[0], job.area)
        ranks.ask_first(
            f"what goes after step {plan.step}", lambda: self._upkeep.forget(time.time(), self._number)
        )
        job.is_copied.wait()
        return Saved(
            plan.step,
            plan.uid,
            plan.reference.step if plan.reference else None,
            raw_bytes,
            stored_bytes,
            job.blocked_seconds,
            durable_seconds,
            self._tier.name,
            job.note,
            job.waited_seconds,
            job.waited_step,
        )

    def _is_there(self, plan: Plan) -> bool:
        """Return whether a snapshot can be seen, as where only the end of its commit failed, or nobody can say."""
        try:
            return folder_of(plan.step) in self._tier.folders()
        except DataError:
            return True

    def _manifest(self, job: Job, plan: Plan, parts: Sequence[Any]) -> Manifest:
        entered = []
        for number, (part, rows, *_) in enumerate(parts):
            stored = [Stored(read_layout(layout), number, first) for *layout, first in rows]
            entered.append((Part(*part), stored))
        rank_trees = [rank_tree for _, _, rank_tree, _ in parts] if job.rank_trees is None else job.rank_trees
        return manifest_of(plan, self._way, job.tree, rank_trees, entered)
