"""Obeys what `penstock.policy.saving` decides about a save, on every rank of a job.

every rank   state ──▶ rank 0: place, delta to which? begins the draft ──▶ every rank: its part, synced ──▶┐
rank 0       ◀── the parts' tables ── one exchange: the manifest, the rename: the snapshot is there ◀──────┘
every rank   reads its part back ──▶ rank 0 deletes what retention gives up
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from penstock.checkpoint.files.catalog import Catalog
from penstock.checkpoint.files.manifest import Manifest, NewerFormat, bytes_beside, folder_of, write_manifest
from penstock.checkpoint.files.parts import Part
from penstock.checkpoint.housekeeping import Housekeeping
from penstock.checkpoint.recipe import (
    RAW,
    EncodingConfig,
    SnapshotDecision,
    WrittenPart,
    check_part,
    decide,
    new_baseline,
)
from penstock.checkpoint.saving import Saved
from penstock.checkpoint.staged import Held, PartProcess, ProcessEnded, Staged, write_staged
from penstock.checkpoint.state.staging import StagingArea
from penstock.checkpoint.state.tensors import Layout, Piece
from penstock.checkpoint.tiers.local import LocalDraft, LocalTier
from penstock.checkpoint.tiers.throttle import Cap
from penstock.checkpoint.tiers.tier import Draft
from penstock.errors import ConfigError, DataError, FormatError, RankError, WaitTimeout
from penstock.flow.ordered import Workers
from penstock.flow.snapshot_spans import SnapshotSpans
from penstock.policy.draining import Speeds
from penstock.policy.saving import (
    Abort,
    Begin,
    Commit,
    Discard,
    Distrust,
    Fault,
    Finish,
    GiveUpTier,
    Hold,
    Instruction,
    Instructions,
    Place,
    Prune,
    Raise,
    Save,
    SaveTerms,
    Stage,
    Suspect,
    Verify,
    WriteHere,
    WritePart,
)
from penstock.ranks import Ranks
from penstock.trace.schema import Kind
from penstock.trace.trace import JSON

#: Block size of file systems.
_DISK_BLOCK_BYTES = 4096
_NOWHERE = Begin(0)


@dataclass(frozen=True, slots=True)
class Content:
    """What a save writes, as far as it is known when it begins.

    layouts: of the tensors of all ranks. tree: of the state. rank_tree: of what this rank has for itself.
    rank_trees: of what every rank has for itself; None: each part comes with its own.
    drained: which snapshot it is, as the faster tier has it; None: a new one.
    """

    layouts: Sequence[Layout]
    tree: JSON
    rank_tree: JSON = None
    rank_trees: Sequence[JSON] | None = None
    drained: SnapshotDecision | None = None


@dataclass(slots=True, eq=False)
class OwnPart:
    """The part that this rank writes: the tensors as they are staged, who encodes them, and what became of it.

    area: where the first wave is staged. number: of the part.
    get_ready: called on every rank before a draft is begun; what it raises on any is raised on all.
    """

    waves: Staged
    area: StagingArea
    number: int = 0
    get_ready: Callable[[], None] = lambda: None
    #: Writes it in place of this process.
    elsewhere: PartProcess | None = None
    #: Encode, once training may continue.
    workers: Workers | None = None
    #: The first wave.
    first: Sequence[Piece] = ()
    written: Part | None = None


@dataclass(slots=True, eq=False)
class Blocked:
    """How long a save stops the training. The rest is set by the training thread before `is_copied`, once the state is.

    begin_seconds: of the monotonic clock. previous_step: of the save that had to end first, if one had to.
    by_previous_seconds: how long that took, of `seconds`.
    """

    begin_seconds: float
    previous_step: int | None = None
    by_previous_seconds: float = 0.0
    seconds: float = 0.0
    is_copied: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Counted:
    """What a committed snapshot took: bytes of the state, bytes of all files, seconds since the save began."""

    raw_bytes: int
    stored_bytes: int
    durable_seconds: float


@dataclass(slots=True, eq=False)
class Job:
    """One save, from the copy of the state to the committed snapshot. life: decides what happens next."""

    step: int
    content: Content
    own: OwnPart
    life: Save
    blocked: Blocked
    #: What was written of each part, where ranks meet elsewhere and `commit` is given it; None: they meet here.
    parts: dict[int, WrittenPart] | None = None
    #: What is to be done next.
    instructions: Instructions = ()
    #: Where it is written, and how it is encoded; what rank 0 decided, its draft, and steps that must stay meanwhile.
    target: Begin = _NOWHERE
    encoding: EncodingConfig = field(init=False)
    decision: SnapshotDecision = field(init=False)
    draft: Draft | None = None
    pinned: list[int] = field(default_factory=list)
    was_aborted: bool = False
    counted: Counted = field(init=False)
    #: What `Saved` says besides: why it is no delta, and why it is not on a nearer tier.
    note: str = ""


class SnapshotWriter:
    """Writes snapshots, one after the other. Used by one thread at a time; on all ranks alike."""

    def __init__(
        self,
        catalog: Catalog,
        encoding: EncodingConfig,
        housekeeping: Housekeeping,
        ranks: Ranks,
        *,
        holds_reference: bool = False,
        cap: Cap | None = None,
        drains: SnapshotWriter | None = None,
        threads: int = 1,
        spans: SnapshotSpans | None = None,
        span: Kind = Kind.WRITE,
    ) -> None:
        """encoding: of the last tier; on a nearer one all snapshots are baselines.

        holds_reference: whether the last snapshot stays in memory. cap: on what is written. drains: writer that drains
            what this one puts on a nearer tier, with so many threads; None where there is no nearer tier, or this one
            drains. spans, span: of what is written.
        """
        self._catalog = catalog
        self._tiers = catalog.tiers
        self._cap = cap
        self._encoding = encoding
        self._housekeeping = housekeeping
        self._ranks = ranks
        #: For the state; the last snapshot may stay in one of them.
        self.areas = (StagingArea(), StagingArea())
        self._drains = drains
        self._threads = threads
        self._spans = spans or SnapshotSpans(None)
        self._span = span
        #: Whether a baseline, and a delta, stay in memory: in a chain all are deltas to the baseline.
        self.holds = (holds_reference, holds_reference and encoding.scheme != "chain")
        self.held: Held | None = None
        #: Of the last snapshot's state, as this rank saw it: from when it began to lie ready until it was durable,
        #: where it was stored as it is; and encoded by one thread. 0 where nothing was.
        self.raw_bytes_per_second = 0.0
        self.encode_bytes_per_second = 0.0
        self._begin_seconds = 0.0

    def free_areas(self) -> list[StagingArea]:
        """Return the areas in which no snapshot lies that the next one refers to."""
        one, other = self.areas
        held = None if self.held is None else self.held.area
        return [other] if held is one else [one] if held is other else [one, other]

    def terms(self, *, can_repeat: bool, ranks: int) -> SaveTerms:
        """Return the terms of a save on any of the tiers."""
        return SaveTerms(range(len(self._tiers)), ranks, can_repeat, holds=self.holds)

    # -- A save ----------------------------------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        """Choose the tier, decide what a snapshot shall be, and begin its draft; `write` has to follow.

        Raises: on all ranks, what failed on any: ConfigError if there is one of this step, or another process writes
            here; DataError; what `job.own.get_ready` raises.
        """
        job.instructions = job.life.offered()
        try:
            self._run(job, until=WritePart)
        except BaseException:
            self._let_go(job)
            raise

    def write(self, job: Job, workers: Workers | None) -> Saved:
        """Write a snapshot that has begun; it is durable, checked, and what it replaces is deleted when this returns.

        Raises: on all ranks, what failed on any.
        """
        job.own.workers = workers
        try:
            self._run(job, until=Finish)
        finally:
            self._let_go(job)
        decision, counted, blocked = job.decision, job.counted, job.blocked
        return Saved(
            decision.step,
            decision.uid,
            decision.reference.step if decision.reference else None,
            counted.raw_bytes,
            counted.stored_bytes,
            blocked.seconds,
            counted.durable_seconds,
            self._tiers[job.target.tier].name,
            job.note,
            blocked.by_previous_seconds,
            blocked.previous_step,
        )

    def join(self, job: Job, decision: SnapshotDecision, target: Begin) -> None:
        """Have a job be part of a snapshot that another rank has begun, where ranks meet elsewhere."""
        job.decision = decision
        self._aim(job, target)

    def write_part(self, job: Job, workers: Workers) -> Any:
        """Write this rank's part, where ranks meet elsewhere: one of them has begun the snapshot, and will `commit` it.

        Returns: what was written, as JSON.
        Raises: FormatError, DataError. A draft to which others may still write stays until `give_up`.
        """
        job.own.workers = workers
        assert job.parts is not None, "ranks meet elsewhere"
        if job.draft is not None and job.life.terms.ranks == 1:
            self._run(job, until=Commit)
        else:
            job.parts[job.own.number] = self._write_part(job)
            if self.holds[job.decision.reference is not None]:
                # Nothing refers to it unless it is committed.
                self.held = Held(job.decision.uid, job.own.first, job.own.area)
        return job.parts[job.own.number].write()

    def commit(self, job: Job, tree: JSON, parts: Mapping[int, Any]) -> Saved:
        """Commit a snapshot that has begun, of parts that ranks wrote which meet elsewhere; as `write` does.

        parts: by their numbers, what `write_part` returned.
        """
        assert job.parts is not None, "ranks meet elsewhere"
        job.content = replace(job.content, tree=tree)
        job.parts = {number: WrittenPart.read(part, number) for number, part in parts.items()} | job.parts
        if job.life.stage is Stage.WRITING:
            refers = [number in parts and job.parts[number].refers for number in range(job.life.terms.ranks)]
            job.instructions = self._durable(job, refers)
        return self.write(job, job.own.workers)

    def give_up(self, job: Job, error: BaseException) -> None:
        """Take back a beginning that nobody will write, unless it is over. error: why."""
        if job.life.stage not in (Stage.SAVED, Stage.FAILED):
            for instruction in job.life.failed(_fault_of(error, job))[:-1]:
                self._settle(job, instruction, error)
        self._let_go(job)

    def _run(self, job: Job, until: type[Instruction]) -> None:
        """Obey until an instruction of this kind comes."""
        failure: BaseException | None = None
        try:
            while True:
                *before, last = job.instructions
                for instruction in before:
                    self._settle(job, instruction, failure)
                if isinstance(last, until):
                    job.instructions = (last,)
                    return
                if isinstance(last, Raise):
                    assert failure is not None, "something failed"
                    raise self._described(job, failure)
                try:
                    job.instructions = self._obey(job, last)
                except BaseException as error:
                    failure = error
                    job.instructions = job.life.failed(_fault_of(error, job))
        finally:
            failure = None  # its traceback has this frame

    def _obey(self, job: Job, instruction: Instruction) -> Instructions:
        """Obey what may fail, and return what is to be done next. Raises: on all ranks, what failed on any."""
        life, together = job.life, self._ranks.gather_then_decide
        match instruction:
            case Place():
                place = functools.partial(self._place, job)
                tier, speeds, why = together(
                    f"the place of step {job.step}", lambda: len(json.dumps(job.content.rank_tree)), place
                )
                if why:
                    self._note_fall(job, tier, why)
                return life.placed(tier, speeds and Speeds(*speeds))
            case Begin(is_baseline=True):
                self._begin_baseline(job)
                return life.begun(is_delta=False)
            case Begin():
                self._aim(job, instruction)
                begin = functools.partial(self._begin, job)
                decision = together(f"the beginning of step {job.step}", job.own.get_ready, begin)
                if not isinstance(decision, SnapshotDecision):
                    decision = SnapshotDecision.read(decision)  # from rank 0
                job.decision = decision
                if decision.why_baseline:
                    job.note = f": {decision.why_baseline}{job.note}"
                return life.begun(is_delta=decision.reference is not None)
            # Ranks that meet elsewhere write parts and commit by two calls, `write_part` and `commit`. For those that
            # meet here the second case of `WritePart` does both in one round: no `Commit` is obeyed.
            case WritePart() if job.parts is not None:
                job.parts[job.own.number] = part = self._write_part(job)
                return self._durable(job, [part.refers])
            case Commit() if job.parts is not None:
                return self._committed(
                    job, *self._commit(job, [part for _, part in sorted(job.parts.items())])
                )
            case WritePart():
                write = functools.partial(self._write_part, job)
                commit = functools.partial(self._commit_all, job)
                refers, *nbytes = together(f"the commit of step {job.step}", write, commit)
                if self._ranks.rank:
                    self._durable(job, refers)
                return self._committed(job, *nbytes)
            case Verify():
                together(f"the check of step {job.step}", functools.partial(self._check, job))
                return life.verified()
            case Prune(tier=tier):
                prune = functools.partial(self._housekeeping.forget, time.time(), tier)
                self._ranks.on_rank_zero(f"what is deleted after step {job.step}", prune)
                life.pruned()
                job.blocked.is_copied.wait()
                return life.staged()
        raise AssertionError(f"{instruction} is settled")

    def _settle(self, job: Job, instruction: Instruction, failure: BaseException | None) -> None:
        """Obey what comes before the next attempt, or the end."""
        match instruction:
            case Hold():
                self.held = Held(job.decision.uid, job.own.first, job.own.area)
            case Abort():
                job.was_aborted = True
                if self._ranks.rank == 0 and job.draft is not None:
                    job.draft.abort()
            case GiveUpTier():
                assert isinstance(failure, DataError), "it refused"
                why = self._housekeeping.give_up_fast(failure) if self._ranks.rank == 0 else str(failure)
                job.note = ""
                self._note_fall(job, instruction.tier + 1, why)
            case Distrust(suspect=Suspect.REFERENCE):
                assert job.decision.reference is not None, "a delta has one"
                self._catalog.mark_damaged(job.decision.reference.step, job.decision.chain[-1].tier)
            case Distrust(suspect=Suspect.NEW):
                self._catalog.mark_damaged(job.step, job.target.tier)
            case Distrust():
                self._catalog.mark_damaged(job.step)
            case Discard():
                self._housekeeping.discard(job.target.tier, job.step)
            case WriteHere():
                assert job.own.elsewhere is not None, "it was written elsewhere"
                assert failure is not None, "the process ended"
                job.own.elsewhere.give_up(failure)
                job.own.elsewhere = None

    # -- What rank 0 does ------------------------------------------------------------------------------------

    def _place(self, job: Job, own_bytes: Sequence[int]) -> list[Any]:
        """Return the tier with space for a snapshot, what was measured, and why it is no nearer one."""
        content = job.content
        self._housekeeping.open_for_writing()
        self._housekeeping.replace_damaged(job.step)
        if self._catalog.copies(job.step):
            raise ConfigError(self._catalog.there_already(job.step))
        # The folder, the manifest and each rank's part fill their last block only in part.
        files_bytes = _DISK_BLOCK_BYTES * (job.life.terms.ranks + 2)
        beside_bytes = bytes_beside(content.tree, content.layouts, own_bytes) + files_bytes
        why = self._housekeeping.why_not_fast(sum(layout.nbytes for layout in content.layouts) + beside_bytes)
        speeds = self._speeds()
        return [1 if why else 0, speeds and astuple(speeds), why]

    def _speeds(self) -> Speeds | None:
        """Return what was measured; None while something was not yet."""
        assert self._drains is not None, "there is a nearer tier"
        raw, encode = self.raw_bytes_per_second, self._drains.encode_bytes_per_second
        share = self._catalog.baseline_share(len(self._tiers) - 1)
        return Speeds(raw, self._threads * encode, share) if raw and encode and share else None

    def _begin(self, job: Job, _: Any) -> SnapshotDecision:
        """Decide what a snapshot is, and begin its draft."""
        tier, housekeeping = job.target.tier, self._housekeeping
        if job.pinned:
            housekeeping.let_go(job.pinned)  # of an attempt on a nearer tier
        housekeeping.open_for_writing()
        if job.content.drained is None:
            housekeeping.replace_damaged(job.step)
        else:
            housekeeping.make_way(tier, job.step)
        new = job.content.drained or new_baseline(job.step, self._catalog)
        with housekeeping.deletions_paused:
            decision = decide(self._catalog, tier, new, job.encoding, job.content.layouts)
            job.pinned = list(map(attrgetter("step"), decision.chain))
            housekeeping.hold(job.pinned)
        # Not under the lock: a slow tier that hangs must not hold up a save to the fast one.
        job.draft = self._tiers[tier].begin(folder_of(decision.step), decision.uid)
        return decision

    def _begin_baseline(self, job: Job) -> None:
        """Begin a draft of the same snapshot once more, as a baseline."""
        assert job.decision.reference is not None, "it was a delta"
        step = job.decision.reference.step
        job.decision = job.decision.as_baseline()
        job.draft = self._tiers[job.target.tier].begin(folder_of(job.step), job.decision.uid)
        job.note += f": step {step}, to which it was to be a difference, is damaged"

    def _commit_all(self, job: Job, parts: Sequence[Any]) -> list[Any]:
        """Commit the parts of all ranks; return of which blocks need the reference, and as `_commit`."""
        made = parts  # from other ranks as JSON
        if self._ranks.size > 1:
            made = [WrittenPart.read(part, number) for number, part in enumerate(parts)]
        refers = list(map(attrgetter("refers"), made))
        self._durable(job, refers)
        return [refers, *self._commit(job, made)]

    def _commit(self, job: Job, made: Sequence[WrittenPart]) -> list[int]:
        """Make parts a snapshot; return the bytes of its state, and of its files."""
        assert job.draft is not None, "it was begun here"
        content, decision, rank_trees = job.content, job.decision, job.content.rank_trees
        manifest = Manifest(
            step=decision.step,
            uid=decision.uid,
            created_seconds=decision.created_seconds,
            clock_seconds=decision.clock_seconds,
            since_bytes=decision.since_bytes,
            codec=job.encoding.codec,
            reference=decision.reference,
            kept_mantissa_bits=job.encoding.kept_mantissa_bits,
            tree=content.tree,
            rank_trees=tuple(map(attrgetter("rank_tree"), made) if rank_trees is None else rank_trees),
            parts=tuple(map(attrgetter("part"), made)),
            tensors=tuple(chain.from_iterable(map(attrgetter("stored"), made))),
        )
        file = write_manifest(manifest)
        manifest = replace(manifest, file_bytes=len(file))
        job.draft.commit(file)
        self._catalog.add(job.target.tier, manifest)
        return [manifest.raw_bytes, manifest.stored_bytes]

    # -- What every rank does --------------------------------------------------------------------------------

    def _write_part(self, job: Job) -> WrittenPart:
        """Write and sync this rank's part; return what the commit has to know of it.

        Raises: FormatError, DataError, ProcessEnded.
        """
        own, decision, tier = job.own, job.decision, job.target.tier

        def began(wave: Sequence[Piece]) -> None:
            own.first, self._begin_seconds = wave, time.monotonic()

        with self._spans.span(self._span, decision.step, tier) as count:
            if own.elsewhere is not None:
                self._begin_seconds = time.monotonic()
                made = own.elsewhere.write(decision)
                count(made.part.nbytes)
            else:
                assert own.workers is not None, "somebody encodes"
                draft = job.draft or self._tiers[tier].begin(
                    folder_of(decision.step), decision.uid, join=True
                )
                made = write_staged(
                    draft,
                    decision,
                    own.number,
                    job.encoding,
                    own.waves,
                    self._catalog,
                    own.workers,
                    cap=self._cap,
                    held=self.held,
                    began=began,
                    written=count,
                )
                if job.parts is not None and isinstance(draft, LocalDraft):
                    # Before the commit: ranks that meet elsewhere do not meet after it.
                    try:
                        check_part(self._tiers[tier], decision, own.number, made.part, draft=draft)
                    except FormatError as error:
                        # Not of the reference, which would be distrusted: the tier did not keep what it was given.
                        raise DataError(str(error)) from error
        own.written = made.part
        if made.encode_seconds:
            self.encode_bytes_per_second = made.encoded_bytes / made.encode_seconds
        rank_tree = job.content.rank_tree
        return made if rank_tree is None else replace(made, rank_tree=rank_tree)

    def _check(self, job: Job) -> None:
        tier = self._tiers[job.target.tier]
        if job.parts is not None:
            for number in sorted(job.parts):
                check_part(tier, job.decision, number, job.parts[number].part, to_its_end=False)
            return
        own = job.own
        assert own.written is not None, "it was written"
        if own.elsewhere is not None:
            own.elsewhere.check(job.decision, own.written)
            return
        # What is on another machine is not fetched back only to be looked at.
        reads_back = isinstance(tier, LocalTier)
        check_part(tier, job.decision, own.number, own.written, to_its_end=reads_back)

    def _note_fall(self, job: Job, tier: int, why: str) -> None:
        job.note = f"; written to {self._catalog.tiers[tier].name} at once: {why}"

    def _durable(self, job: Job, refers: Sequence[bool]) -> Instructions:
        """Report that all parts are durable: from here on the decision is what was written."""
        instructions: Instructions = ()
        for rank, each in enumerate(refers):
            instructions = job.life.part_durable(rank, refers=each)
        if job.decision.reference is not None and not any(refers):
            # As while the codec is compiled, and where a state has nothing in common with the one before.
            job.decision = job.decision.as_baseline("no block is stored as a difference")
            job.note = f": {job.decision.why_baseline}{job.note}"
        return instructions

    def _committed(self, job: Job, raw_bytes: int, stored_bytes: int) -> Instructions:
        instructions = job.life.committed()
        now_seconds = time.monotonic()
        job.counted = Counted(raw_bytes, stored_bytes, now_seconds - job.blocked.begin_seconds)
        if not job.target.is_encoded:
            self.raw_bytes_per_second = raw_bytes / max(now_seconds - self._begin_seconds, 1e-9)
        return instructions

    def _aim(self, job: Job, target: Begin) -> None:
        """Choose how a snapshot is stored: on a nearer tier as a baseline, encoded or as it is."""
        job.target, job.encoding = target, self._encoding
        if target.tier < len(self._tiers) - 1:
            codec = self._encoding.codec if target.is_encoded else RAW
            job.encoding = EncodingConfig("complete", 1, codec, self._encoding.kept_mantissa_bits)

    def _let_go(self, job: Job) -> None:
        job.own.waves.give_up()
        if job.own.workers is not None:
            job.own.workers.close()
        pinned, job.pinned = job.pinned, []
        self._housekeeping.let_go(pinned)

    def _described(self, job: Job, error: BaseException) -> BaseException:
        """Return what to raise: of a tier that refused, that there is no snapshot."""
        if not (isinstance(error, DataError) and job.was_aborted and self._span is Kind.WRITE):
            return error
        try:
            is_there = folder_of(job.step) in self._tiers[job.target.tier].folders()
        except DataError:
            is_there = True  # as nobody can say otherwise
        # As where only the end of its commit failed.
        if is_there:
            return error
        described = type(error)(f"{error}: step {job.step} was not saved")
        described.__cause__ = error
        return described


def _fault_of(error: BaseException, job: Job) -> Fault:
    """Return what failed, as far as it matters for what comes next."""
    if job.own.waves.is_damaged:
        return Fault.STATE
    kinds = (
        (ProcessEnded, Fault.PROCESS),
        (NewerFormat, Fault.NEWER),
        (FormatError, Fault.DAMAGED),
        (DataError, Fault.REFUSED),
        ((RankError, WaitTimeout), Fault.RANK),
    )
    return next((fault for kind, fault in kinds if isinstance(error, kind)), Fault.OTHER)
