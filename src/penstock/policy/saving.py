"""What happens next to one snapshot that is being saved, or drained: a pure state machine.

It is notified of events and answers with instructions. It does no I/O and never asks for the time: a snapshot store and
its drainer obey it over files; a virtual clock can over modelled tiers.

    offered ─▶ Place ─▶ Begin ─▶ WritePart ─▶ Commit ─▶ Verify ─▶ Hold, Prune ─▶ Finish
                          ▲          │ each rank
                          └─ Abort ◀─┘ tier refused, reference damaged: once more elsewhere, or as a baseline

Rules:
1. Nothing is visible before the parts of all ranks are durable; one commit makes it so.
2. Old snapshots are deleted, and the new one is referred to, only once it was read back.
3. Whatever fails before the commit leaves no draft; what is committed is never written once more.
4. A nearer tier that refuses gets no more snapshots, and the next one takes this one, if the state can be read again.
5. A delta whose reference turns out to be damaged becomes a baseline, if the state can be read again.
6. Of many ranks none begins again by itself: all raise, and the next save is written another way.

A drain is a save whose state comes from the nearer tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

from penstock.policy.draining import Speeds, encode_first


class Fault(Enum):
    """What failed, as far as it matters for what comes next."""

    #: The tier refused a read or a write: it is full, gone or broken.
    REFUSED = auto()
    #: A snapshot that was read is damaged: the reference before the commit, the new one after it.
    DAMAGED = auto()
    #: The state itself is damaged where it is read, or was not copied to its end.
    STATE = auto()
    #: The process that writes for this one has ended.
    PROCESS = auto()
    #: A rank did not arrive, or left.
    RANK = auto()
    #: The tier holds a snapshot of a newer format.
    NEWER = auto()
    #: Anything else, such as a wrong argument or an interrupt.
    OTHER = auto()


class Suspect(Enum):
    """Which snapshot is damaged."""

    REFERENCE = auto()
    STATE = auto()
    NEW = auto()


class Place(NamedTuple):
    """Instruction: find the nearest tier with space for the snapshot. Answer with `placed`."""


class Begin(NamedTuple):
    """Instruction: decide what the snapshot is a delta to, and begin a draft. Answer with `begun`.

    tier: number of the tier. is_encoded: whether the codec is asked, or blocks are stored as they are.
    is_baseline: what was decided before stands, but as a baseline.
    """

    tier: int
    is_encoded: bool = True
    is_baseline: bool = False


class WritePart(NamedTuple):
    """Instruction: write and sync a part on each rank. Answer with `part_durable` of each."""


class Commit(NamedTuple):
    """Instruction: write the manifest and make the snapshot visible. Answer with `committed`.

    is_delta: whether a block of it needs the reference.
    """

    is_delta: bool


class Verify(NamedTuple):
    """Instruction: read the parts back. Answer with `verified`."""


class Hold(NamedTuple):
    """Instruction: keep the state in memory, for the next delta refers to it."""


class Prune(NamedTuple):
    """Instruction: delete what retention gives up, up to this tier. Answer with `pruned`."""

    tier: int


class Finish(NamedTuple):
    """Instruction: return. is_to_drain: whether the snapshot is still to be drained to the next tier."""

    is_to_drain: bool


class Abort(NamedTuple):
    """Instruction: delete the draft."""


class GiveUpTier(NamedTuple):
    """Instruction: write no more to this tier, which refused, and none of this snapshot any more."""

    tier: int


class Distrust(NamedTuple):
    """Instruction: remember that a snapshot is damaged, so that none refers to it."""

    suspect: Suspect


class Discard(NamedTuple):
    """Instruction: delete the copy that was committed: the snapshot it was drained from is intact."""


class WriteHere(NamedTuple):
    """Instruction: from here on write with threads of this process."""


class Raise(NamedTuple):
    """Instruction: raise what failed on all ranks."""


Instruction: TypeAlias = (
    Place
    | Begin
    | WritePart
    | Commit
    | Verify
    | Hold
    | Prune
    | Finish
    | Abort
    | GiveUpTier
    | Distrust
    | Discard
    | WriteHere
    | Raise
)
#: To be obeyed in this order; the last is the one whose outcome is the next event.
Instructions: TypeAlias = tuple[Instruction, ...]


class Stage(Enum):
    """How far a save is: which event is expected next, besides `failed` and `staged`."""

    NEW = "offered"
    PLACING = "placed"
    BEGINNING = "begun"
    WRITING = "part_durable"
    COMMITTING = "committed"
    VERIFYING = "verified"
    PRUNING = "pruned"
    COPYING = "staged"
    SAVED = "nothing: it is saved"
    FAILED = "nothing: it failed"


@dataclass(frozen=True, slots=True)
class SaveTerms:
    """What is known of a save before it begins.

    tiers: numbers of those that may hold it, nearest first. ranks: number of those that write parts.
    can_repeat: whether the state can be read more than once. is_drain: whether it comes from another tier.
    holds: whether a baseline, and a delta, stay in memory for the next one.
    """

    tiers: Sequence[int] = (0,)
    ranks: int = 1
    can_repeat: bool = False
    is_drain: bool = False
    holds: tuple[bool, bool] = (False, False)


class Save:
    """One save. Each method is an event and returns instructions; every rank may have its own, notified of the same.

    Raises: AssertionError for an event that is not expected.
    """

    def __init__(self, terms: SaveTerms) -> None:
        self.terms = terms
        self.stage = Stage.NEW
        #: Number of the tier it is written to.
        self.tier = terms.tiers[-1]
        #: Whether it is written as a delta: until the commit as planned, then as it is.
        self.is_delta = False
        #: Ranks whose parts are not durable yet.
        self._awaited: set[int] = set()
        #: Whether a block of any part needs the reference.
        self._refers = False
        self._is_staged = False

    @property
    def is_committed(self) -> bool:
        """Return whether the snapshot is visible."""
        return self.stage in (Stage.VERIFYING, Stage.PRUNING, Stage.COPYING, Stage.SAVED)

    def offered(self) -> Instructions:
        """A state is to be saved; the save before has ended."""
        assert self.stage is Stage.NEW, self._not_expected(Stage.NEW)
        if len(self.terms.tiers) > 1:
            self.stage = Stage.PLACING
            return (Place(),)
        return self._begin(self.tier)

    def placed(self, tier: int, speeds: Speeds | None = None) -> Instructions:
        """There is space on a tier, and none on a nearer one. speeds: measured so far; None: not yet known."""
        assert self.stage is Stage.PLACING, self._not_expected(Stage.PLACING)
        is_last = tier == self.terms.tiers[-1]
        return self._begin(tier, is_encoded=is_last or encode_first(speeds))

    def begun(self, *, is_delta: bool) -> Instructions:
        """A draft was begun."""
        assert self.stage is Stage.BEGINNING, self._not_expected(Stage.BEGINNING)
        self.stage = Stage.WRITING
        self.is_delta = is_delta
        self._awaited = set(range(self.terms.ranks))
        self._refers = False
        return (WritePart(),)

    def part_durable(self, rank: int, *, refers: bool) -> Instructions:
        """A rank's part would outlive a loss of power. refers: whether a block of it needs the reference."""
        assert self.stage is Stage.WRITING, self._not_expected(Stage.WRITING)
        self._awaited.remove(rank)
        self._refers = self._refers or refers
        if self._awaited:
            return ()
        self.stage = Stage.COMMITTING
        return (Commit(self.is_delta and self._refers),)

    def committed(self) -> Instructions:
        """The snapshot is visible."""
        assert self.stage is Stage.COMMITTING, self._not_expected(Stage.COMMITTING)
        self.stage = Stage.VERIFYING
        self.is_delta = self.is_delta and self._refers
        return (Verify(),)

    def verified(self) -> Instructions:
        """All parts were read back, and are what was written."""
        assert self.stage is Stage.VERIFYING, self._not_expected(Stage.VERIFYING)
        self.stage = Stage.PRUNING
        return (*([Hold()] if self.terms.holds[self.is_delta] else []), Prune(self.tier))

    def pruned(self) -> Instructions:
        """What it replaces is deleted."""
        assert self.stage is Stage.PRUNING, self._not_expected(Stage.PRUNING)
        self.stage = Stage.COPYING
        return self._finish() if self._is_staged else ()

    def staged(self) -> Instructions:
        """The state is copied completely, and training continues; a small one may be durable before that."""
        self._is_staged = True
        return self._finish() if self.stage is Stage.COPYING else ()

    def failed(self, fault: Fault) -> Instructions:
        """What was to be done failed, on any rank."""
        stage, terms = self.stage, self.terms
        assert stage not in (Stage.SAVED, Stage.FAILED), f"{fault} after {stage}"
        is_open = stage in (Stage.WRITING, Stage.COMMITTING)
        abort: Instructions = (Abort(),) if is_open else ()
        has_next = self.tier != terms.tiers[-1] and stage not in (Stage.NEW, Stage.PLACING)
        # Nothing was taken of the state before its first part.
        can_repeat = stage is Stage.BEGINNING or (is_open and terms.ranks == 1 and terms.can_repeat)
        match fault:
            case Fault.REFUSED if has_next:
                given_up: Instructions = (*abort, *self._doubt(), GiveUpTier(self.tier))
                if can_repeat:
                    return given_up + self._begin(terms.tiers[terms.tiers.index(self.tier) + 1])
                return given_up + self._fail()
            case Fault.DAMAGED if is_open and self.is_delta:
                found: Instructions = (*abort, Distrust(Suspect.REFERENCE))
                return found + (self._begin(self.tier, is_baseline=True) if can_repeat else self._fail())
            case Fault.PROCESS if is_open and can_repeat:
                return (*abort, WriteHere(), *self._begin(self.tier))
            case Fault.STATE if terms.is_drain and is_open:
                return (*abort, Distrust(Suspect.STATE), *self._fail())
            case Fault.DAMAGED | Fault.REFUSED:
                discard = terms.is_drain and fault is Fault.DAMAGED and self.is_committed
                return (*abort, *self._doubt(), *([Discard()] if discard else []), *self._fail())
            case _:
                return (*abort, *self._fail())

    def _doubt(self) -> Instructions:
        """Return that what could not be read back is damaged."""
        return (Distrust(Suspect.NEW),) if self.stage is Stage.VERIFYING else ()

    def _begin(self, tier: int, *, is_encoded: bool = True, is_baseline: bool = False) -> Instructions:
        self.stage, self.tier = Stage.BEGINNING, tier
        return (Begin(tier, is_encoded, is_baseline),)

    def _finish(self) -> Instructions:
        self.stage = Stage.SAVED
        return (Finish(self.tier != self.terms.tiers[-1]),)

    def _fail(self) -> Instructions:
        self.stage = Stage.FAILED
        return (Raise(),)

    def _not_expected(self, stage: Stage) -> str:
        return f"a save that waits for {self.stage.value} was notified of {stage.value}: events come in order"
