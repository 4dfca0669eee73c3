"""Saves and drains in virtual time: how long they block, when they are durable, whether a burst buffer suffices.

What happens next to a snapshot is decided by `penstock.policy.saving`, and what leaves a tier by
`penstock.policy.draining` and `retention`, as in a snapshot store; here their instructions take the time that the
machine says, and nothing is written.

    training  step step ╎ copy ╎ step step step ...     a save waits for the one before
    save                       ├ write ┤ read back ┤
    drain                                          ├ read, encode, write ┤ read back ┤

Bandwidth is shared fairly: where writes, drains and the training's reads ask a tier for more than it has, those that
ask for less than an equal share get it, and the others share the rest equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.errors import ConfigError
from penstock.machine.machine import Machine
from penstock.policy.delta_schemes import Scheme
from penstock.policy.draining import Speeds, TwoTiers, admit, to_drain, to_forget_fast, to_forget_slow
from penstock.policy.retention import Keep, StoredSnapshot, possible_references, to_forget
from penstock.policy.saving import (
    Begin,
    Commit,
    Finish,
    Instructions,
    Place,
    Prune,
    Save,
    SaveTerms,
    Stage,
    Verify,
    WritePart,
)
from penstock.policy.snap_distance import SnapDistance, with_next
from penstock.units import format_count, format_rate
from penstock.validate import check_count, check_rate, check_seconds

#: Numbers of the tiers where there are two.
_FAST, _SLOW = 0, 1


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The saves of a run.

    steps: training steps after which it saves, ascending, as `SaveSchedule.steps` gives them. last_step: of the run.
    step_seconds: of a step that waits for nothing. state_bytes: on all ranks together.
    scheme, snap_dis, keep: as of `SnapshotStore`. baseline_share, delta_share: what is stored of a state's bytes.
    encode_bytes_per_second: of the state, all threads of a rank together. read_bytes_per_second: that a rank's training
        reads from the store while it runs.
    commit_seconds: that a snapshot takes on the shared store beyond its bytes: for its files, their syncs, its commit.
    Raises: ConfigError naming the field.
    """

    steps: Sequence[int]
    last_step: int
    step_seconds: float
    state_bytes: int
    keep: Keep = field(default_factory=Keep)
    scheme: Scheme = "progressive"
    snap_dis: SnapDistance = 10
    baseline_share: float = 1.0
    delta_share: float = 1.0
    encode_bytes_per_second: float = math.inf
    read_bytes_per_second: float = 0.0
    commit_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_seconds("commit_seconds", self.commit_seconds)
        check_count("state_bytes", self.state_bytes)
        check_seconds("step_seconds", self.step_seconds)
        check_rate("encode_bytes_per_second", self.encode_bytes_per_second)
        check_seconds("read_bytes_per_second", self.read_bytes_per_second)
        steps = [0, *self.steps, self.last_step + 1]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ConfigError(
                f"steps is {self.steps!r:.80}; a run of {self.last_step} steps saves after steps from 1 to "
                f"{self.last_step}, each once and in ascending order"
            )


@dataclass(frozen=True, slots=True)
class FastTier:
    """The tier to which snapshots go first.

    name: of a storage class of the machine. capacity_bytes: for snapshots; None: all of it.
    drain_bytes_per_second: that a drain writes at most.
    drain_start_seconds: until a drain that follows no other begins to write.
    commit_seconds: that a snapshot takes on this tier beyond its bytes.
    """

    name: str
    capacity_bytes: int | None = None
    drain_bytes_per_second: float = math.inf
    drain_start_seconds: float = 0.0
    commit_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_seconds("commit_seconds", self.commit_seconds)
        check_rate("drain_bytes_per_second", self.drain_bytes_per_second)
        check_seconds("drain_start_seconds", self.drain_start_seconds)


@dataclass(frozen=True, slots=True)
class PredictedSave:
    """One save; times in seconds, as `penstock.checkpoint.Saved` has them.

    begin_seconds: since the run began. blocked_seconds: that the training stood still;
        blocked_by_previous_seconds: of these, for the save before.
    durable_seconds: from its beginning until it is on a tier. drained_seconds: until it is on the slow one, where it
        was drained; None: it was not. tier: number of the tier it was written to, the nearest is 0.
    reference_step: of the snapshot to which it is a delta where it stays; None: a baseline, or not there.
    deleted_seconds: since the run began, when it was deleted from each tier, the nearest first; None: never.
    """

    step: int
    begin_seconds: float
    blocked_by_previous_seconds: float
    blocked_seconds: float
    durable_seconds: float
    drained_seconds: float | None
    tier: int
    reference_step: int | None
    deleted_seconds: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class PredictedSaves:
    """What saving does to a run.

    run_seconds: until the last step. end_seconds: until all is durable, and drained.
    blocked_seconds: that the training stood still for saves. slowed_seconds: that its reads took longer because the
    store was written to. peak_fast_bytes: that snapshots took on the fast tier at most. is_fast_sufficient: whether
    every save found space there; True without a fast tier. left: steps on each tier at the end, the nearest first.
    """

    saves: tuple[PredictedSave, ...]
    run_seconds: float
    end_seconds: float
    blocked_seconds: float
    slowed_seconds: float
    peak_fast_bytes: int
    is_fast_sufficient: bool
    left: tuple[frozenset[int], ...]


def predict_saves(machine: Machine, plan: SavePlan, fast: FastTier | None = None) -> PredictedSaves:
    """Return what the saves of a run cost on a machine: all ranks save the same share of the state at the same time.

    The state is copied at the write rate of the staging buffer, written to the shared store or, with `fast`, to one of
    the machine's storage classes, and read back. A store is written to at `SharedStore.write`, read consecutively.

    Raises: ConfigError if the machine has no such storage class, or the training reads more than its store gives.

    >>> from penstock.machine import Curve, Machine, SharedStore, StorageClass
    >>> staging = StorageClass("staging", 10**9, 1, Curve.flat(1e9))
    >>> machine = Machine(SharedStore(Curve.flat(1e8)), (staging,))
    >>> predicted = predict_saves(machine, SavePlan((10,), 20, step_seconds=1.0, state_bytes=10**9))
    >>> predicted.saves[0].blocked_seconds, predicted.saves[0].durable_seconds
    (1.0, 11.0)
    """
    most = machine.sequential_rate(machine.ranks)
    if plan.read_bytes_per_second > most:
        raise ConfigError(
            f"read_bytes_per_second is {format_rate(plan.read_bytes_per_second)}, and the shared store gives each of "
            f"{format_count(machine.ranks, 'rank')} {format_rate(most)}, also without saves: give no more, and "
            "step_seconds that such reads allow"
        )
    return _Clock(machine, plan, fast).run()


@dataclass(slots=True)
class _Action:
    """Something that takes time.

    left_seconds: if nobody else asked its tiers for anything. shares: of each tier's bandwidth that it takes then.
    then: what it leads to.
    """

    left_seconds: float
    shares: dict[int, float]
    then: Callable[[], None]


@dataclass(slots=True)
class _Written:
    """A snapshot that is being saved or drained; times as of `PredictedSave`.

    since: what was stored since the last baseline, this one included; the last of them is this one. pinned: steps that
    must stay meanwhile.
    """

    step: int
    life: Save
    begin_seconds: float
    created_seconds: float
    blocked_by_previous_seconds: float = 0.0
    blocked_seconds: float = 0.0
    durable_seconds: float = 0.0
    drained_seconds: float | None = None
    tier: int = 0
    is_encoded: bool = True
    since: tuple[StoredSnapshot, ...] = ()
    pinned: set[int] = field(default_factory=set)

    @property
    def new(self) -> StoredSnapshot:
        return self.since[-1]


class _Clock:
    """One run. The training, a save and a drain are actors, each with one action at most."""

    def __init__(self, machine: Machine, plan: SavePlan, fast: FastTier | None) -> None:
        self._machine, self._plan, self._fast = machine, plan, fast
        names = [each.name for each in machine.storage[1:]]
        if fast is not None and fast.name not in names:
            raise ConfigError(
                f"fast is {fast.name!r}; the machine has {', '.join(names) or 'no storage class'} besides its staging "
                "buffer"
            )
        self._class = 0 if fast is None else 1 + names.index(fast.name)
        self._tiers = range(1 if fast is None else 2)
        self._now = 0.0
        self._actions: dict[str, _Action] = {}
        #: What is written by a save, and by a drain.
        self._writing: dict[str, _Written] = {}
        self._saves: dict[int, _Written] = {}
        #: What lies on each tier, in the order of commits; and `_Written.since` of what was committed to the last one.
        self._stored: list[dict[int, StoredSnapshot]] = [{} for _ in self._tiers]
        self._since: dict[int, tuple[StoredSnapshot, ...]] = {}
        #: When each step was deleted from each tier.
        self._deleted: list[dict[int, float]] = [{} for _ in self._tiers]
        self._has_saved_raw = False
        self._run_seconds = self._slowed_seconds = 0.0
        self._peak_fast_bytes = 0

    def run(self) -> PredictedSaves:
        self._train(0, 0)
        while self._actions:
            rates = {actor: self._rate(action) for actor, action in self._actions.items()}
            first = min(rates, key=lambda actor: self._actions[actor].left_seconds / rates[actor])
            passed = self._actions[first].left_seconds / rates[first]
            self._now += passed
            self._slowed_seconds += passed * (1.0 - rates.get("training", 1.0))
            for actor, action in self._actions.items():
                action.left_seconds -= passed * rates[actor]
            self._actions.pop(first).then()
        return PredictedSaves(
            tuple(map(self._predicted, self._saves.values())),
            self._run_seconds,
            self._now,
            sum(save.blocked_seconds for save in self._saves.values()),
            self._slowed_seconds,
            self._peak_fast_bytes,
            self._fast is None or all(save.tier == _FAST for save in self._saves.values()),
            tuple(map(frozenset, self._stored)),
        )

    def _predicted(self, save: _Written) -> PredictedSave:
        since = self._since.get(save.step)
        return PredictedSave(
            save.step,
            save.begin_seconds,
            save.blocked_by_previous_seconds,
            save.blocked_seconds,
            save.durable_seconds,
            save.drained_seconds,
            save.tier,
            since[-1].reference_step if since else None,
            tuple(deleted.get(save.step) for deleted in self._deleted),
        )

    def _rate(self, action: _Action) -> float:
        """Return how fast an action runs next to the others, at most 1."""
        rate = 1.0
        for tier, share in action.shares.items():
            if share:
                asked = [other.shares.get(tier, 0.0) for other in self._actions.values()]
                rate = min(rate, _fair_share(asked) / share)
        return rate

    def _do(self, actor: str, seconds: float, shares: dict[int, float], then: Callable[[], None]) -> None:
        assert actor not in self._actions, f"the {actor} does one thing at a time"
        self._actions[actor] = _Action(seconds, shares, then)

    # -- The training --------------------------------------------------------------------------------------------

    def _train(self, step: int, number: int) -> None:
        """Go on from a step until the next save, or the end. number: of the next save."""
        plan = self._plan
        until = plan.steps[number] if number < len(plan.steps) else plan.last_step
        share = plan.read_bytes_per_second / self._machine.sequential_rate(self._machine.ranks)

        def then() -> None:
            if number == len(plan.steps):
                self._run_seconds = self._now
                return
            life = Save(SaveTerms(self._tiers, self._machine.ranks))
            save = self._saves[until] = _Written(until, life, self._now, self._now)
            if "save" not in self._writing:
                self._begin(save)

        self._do("training", (until - step) * plan.step_seconds, {self._tiers[-1]: share}, then)

    def _begin(self, save: _Written) -> None:
        """Begin a save, and copy the state."""
        save.blocked_by_previous_seconds = self._now - save.begin_seconds
        save.created_seconds = self._now
        self._writing["save"] = save
        self._obey("save", save.life.offered())

        def then() -> None:
            save.blocked_seconds = self._now - save.begin_seconds
            save.life.staged()
            self._write("save")
            self._train(save.step, len(self._saves))

        self._do("training", self._state_bytes / self._machine.write_rate(0, 1), {}, then)

    # -- A save, or a drain --------------------------------------------------------------------------------------

    def _obey(self, actor: str, instructions: Instructions) -> None:
        """Obey until something takes time. Nothing fails, so the last instruction is all there is to do."""
        save = self._writing[actor]
        life = save.life
        while True:
            last = instructions[-1]
            match last:
                case Place():
                    instructions = life.placed(self._place(), self._speeds())
                case Begin():
                    save.tier, save.is_encoded = last.tier, last.is_encoded
                    save.since = self._decided(save)
                    save.pinned = self._chain(save.new.reference_step)
                    instructions = life.begun(is_delta=save.new.reference_step is not None)
                case WritePart():
                    if actor == "drain":  # of a save, once the state is copied
                        self._write(actor)
                    return
                case Commit():
                    self._do(actor, self._commit_seconds(save.tier), {}, lambda: self._commit(actor))
                    return
                case Verify():
                    seconds = save.new.stored_bytes / self._machine.ranks / self._read_rate(save.tier)
                    self._do(actor, seconds, {save.tier: 1.0}, lambda: self._obey(actor, life.verified()))
                    return
                case Prune():
                    self._prune(last.tier)
                    instructions = life.pruned() or life.staged()
                case Finish():
                    self._end(actor)
                    return
                case _:
                    raise AssertionError(f"{last}: nothing fails here")

    def _write(self, actor: str) -> None:
        """Write the parts of all ranks. Reading, encoding and writing overlap: the slowest of them counts."""
        save = self._writing[actor]
        wire_seconds = save.new.stored_bytes / self._machine.ranks / self._write_rate(save.tier)
        seconds, read_seconds = wire_seconds, 0.0
        if save.is_encoded:
            seconds = max(seconds, self._state_bytes / self._plan.encode_bytes_per_second)
        if actor == "drain":
            assert self._fast is not None, "it is drained from there"
            read_seconds = self._state_bytes / self._read_rate(_FAST)
            capped_seconds = save.new.stored_bytes / self._fast.drain_bytes_per_second
            seconds = max(seconds, read_seconds, capped_seconds)
        refers = save.new.reference_step is not None

        def then() -> None:
            instructions: Instructions = ()
            for rank in range(save.life.terms.ranks):
                instructions = save.life.part_durable(rank, refers=refers)
            self._obey(actor, instructions)

        self._do(actor, seconds, {_FAST: read_seconds / seconds, save.tier: wire_seconds / seconds}, then)

    def _end(self, actor: str) -> None:
        """Go on with what waited for the end of a save, or of a drain."""
        del self._writing[actor]
        newest = next(reversed(self._saves.values()))
        if newest.life.stage is Stage.NEW and "save" not in self._writing:
            self._begin(newest)
        if len(self._tiers) == 1 or "drain" in self._writing:
            return
        waiting = to_drain(self._both(_FAST), self._plan.keep, self._now)
        if waiting:
            life = Save(SaveTerms((_SLOW,), can_repeat=True, is_drain=True))
            begun = self._saves[waiting[0]]
            self._writing["drain"] = _Written(begun.step, life, begun.begin_seconds, begun.created_seconds)
            assert self._fast is not None, "it is drained from there"
            start_seconds = 0.0 if actor == "drain" else self._fast.drain_start_seconds
            self._do("drain", start_seconds, {}, lambda: self._obey("drain", life.offered()))

    # -- What is where -------------------------------------------------------------------------------------------

    def _place(self) -> int:
        """Return the tier with space for a snapshot."""
        assert self._fast is not None, "there is another tier"
        capacity = self._fast.capacity_bytes or self._machine.storage[self._class].capacity_bytes
        admission = admit(self._both(_FAST), capacity, self._plan.state_bytes, in_use=self._in_use)
        self._delete(_FAST, admission.forget)
        return _FAST if admission.to_fast else _SLOW

    def _speeds(self) -> Speeds | None:
        """Return what a store would have measured by now."""
        if not self._has_saved_raw or all(save.drained_seconds is None for save in self._saves.values()):
            return None
        rates = self._write_rate(_FAST), self._plan.encode_bytes_per_second
        return Speeds(*rates, self._plan.baseline_share)

    def _decided(self, save: _Written) -> tuple[StoredSnapshot, ...]:
        """Return what is stored since the last baseline, with a new snapshot as the last."""
        plan, since = self._plan, tuple[StoredSnapshot, ...]()
        if save.tier == self._tiers[-1]:
            possible = possible_references(list(self._stored[-1].values()), save.created_seconds)
            since = self._since[possible[-1]] if possible else ()
        shares = (plan.baseline_share, plan.delta_share) if save.is_encoded else (1.0, 1.0)
        sizes = (math.ceil(plan.state_bytes * share) for share in shares)
        return with_next(since, plan.scheme, plan.snap_dis, save.step, save.created_seconds, *sizes)

    def _commit(self, actor: str) -> None:
        """Make a snapshot visible, and begin what comes next."""
        save, first = self._writing[actor], self._saves[self._writing[actor].step]
        seconds = self._now - save.begin_seconds
        if actor == "save":
            save.durable_seconds = seconds
            self._has_saved_raw |= not save.is_encoded
        else:
            first.drained_seconds = seconds
        if save.tier == self._tiers[-1]:
            self._since[save.step] = save.since
        there = {**self._stored[save.tier], save.step: save.new}
        self._stored[save.tier] = dict(sorted(there.items(), key=lambda item: item[1].created_seconds))
        if self._fast is not None:
            taken = sum(one.stored_bytes for one in self._stored[_FAST].values())
            self._peak_fast_bytes = max(self._peak_fast_bytes, taken)
        self._obey(actor, save.life.committed())

    def _prune(self, tier: int) -> None:
        """Delete what retention gives up, up to a tier."""
        rules, in_use = (self._plan.keep, self._now), self._in_use
        if len(self._tiers) == 1:
            self._delete(0, to_forget(list(self._stored[0].values()), *rules))
        else:
            gone = to_forget_slow(self._both(_SLOW), *rules, in_use=in_use) if tier == _SLOW else []
            self._delete(_FAST, to_forget_fast(self._both(_FAST), *rules, in_use=in_use))
            self._delete(_SLOW, gone)

    def _delete(self, tier: int, steps: Iterable[int]) -> None:
        for step in steps:
            del self._stored[tier][step]
            self._deleted[tier][step] = self._now

    def _both(self, nearest: int) -> TwoTiers:
        """Return what lies on both tiers. nearest: the tier whose copy counts where there are two."""
        fast, slow = self._stored
        both = {**slow, **fast} if nearest == _FAST else {**fast, **slow}
        snapshots = sorted(both.values(), key=lambda one: one.created_seconds)
        return TwoTiers(
            tuple(snapshots), {step: one.stored_bytes for step, one in fast.items()}, frozenset(slow)
        )

    @property
    def _in_use(self) -> set[int]:
        """Return what must stay: what is drained, and what something that is written refers to."""
        needed = {save.step for actor, save in self._writing.items() if actor == "drain"}
        return needed.union(*(save.pinned for save in self._writing.values()))

    def _chain(self, step: int | None) -> set[int]:
        """Return the steps that are read for a reference: the nearest copies, which are baselines on the fast tier."""
        chain = set()
        while step is not None:
            chain.add(step)
            copy = next(stored[step] for stored in self._stored if step in stored)
            step = copy.reference_step
        return chain

    # -- The machine ---------------------------------------------------------------------------------------------

    @property
    def _state_bytes(self) -> float:
        """Return the bytes of a rank's part of the state."""
        return self._plan.state_bytes / self._machine.ranks

    def _commit_seconds(self, tier: int) -> float:
        """Return what a snapshot takes on a tier beyond its bytes."""
        if self._fast is None or tier == _SLOW:
            return self._plan.commit_seconds
        return self._fast.commit_seconds

    def _write_rate(self, tier: int) -> float:
        """Return the bytes/s at which each rank writes to a tier while all do."""
        if tier == self._tiers[-1]:
            return self._machine.source_write_rate(self._machine.ranks)
        return self._machine.write_rate(self._class, 1)

    def _read_rate(self, tier: int) -> float:
        """Return the bytes/s at which each rank reads from a tier while all do."""
        if tier == self._tiers[-1]:
            return self._machine.sequential_rate(self._machine.ranks)
        return self._machine.local_rate(self._class, 1)


def _fair_share(asked: Sequence[float]) -> float:
    """Return the most that any of several users of a tier gets, where each asks for a share of its bandwidth.

    Source: max-min fairness, Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2.
    """
    left, users = 1.0, len(asked)
    for share in sorted(asked):
        if share * users >= left:
            return left / users
        left -= share
        users -= 1
    return 1.0
