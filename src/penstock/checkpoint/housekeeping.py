"""Do what retention and the burst buffer decide: which copies are deleted, and where a new snapshot is written."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from penstock.checkpoint.files.catalog import Catalog, Copy
from penstock.checkpoint.files.fast_folders import remember
from penstock.checkpoint.files.manifest import step_of
from penstock.checkpoint.files.reading import load_manifest
from penstock.checkpoint.recipe import EncodingConfig
from penstock.checkpoint.tiers.local import LocalTier
from penstock.checkpoint.tiers.lock import WriterLock
from penstock.checkpoint.tiers.tier import Tier
from penstock.errors import ConfigError, DataError, FormatError, PenstockError
from penstock.policy.draining import TwoTiers, admit, to_drain, to_forget_fast, to_forget_slow
from penstock.policy.retention import Keep, StoredSnapshot, dependents, to_forget
from penstock.policy.space import MOST_SHARE, SpaceNeeded, check_space, space_needed, steps_until_pruned
from penstock.units import format_bytes

#: The smallest snapshot takes about as much, whatever its state.
_LEAST_BYTES = 16 << 10


def describe_little_space(tier: Tier) -> str:
    """Return a warning where a snapshot as large as the last one does not fit on a tier, or "".

    A tier or manifest that cannot be read gives no warning: the save that needs it raises.
    """
    if not isinstance(tier, LocalTier):
        return ""
    try:
        free_bytes = tier.free_bytes()
        folders = [folder for folder in tier.folders() if step_of(folder) is not None]
        last_bytes = load_manifest(tier, folders[-1]).stored_bytes if folders else 0
    except (DataError, FormatError, FileNotFoundError):
        return ""
    if free_bytes is None or free_bytes >= max(last_bytes, _LEAST_BYTES):
        return ""
    last = f", and the last snapshot there takes {format_bytes(last_bytes)}" if last_bytes else ""
    return f"{tier.name} has {format_bytes(free_bytes)} free{last}: free some space before the next save"


class Housekeeping:
    """The tiers of one store, on rank 0: one tier, or a fast one (0) and a slow one (1).

    Used by the threads of saves and drains. What one of them needs it names (`hold`), and no other removes it.
    """

    def __init__(
        self,
        catalog: Catalog,
        keep: Keep,
        fast_bytes: int | None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """fast_bytes: for snapshots on the fast tier; None: what is free there.

        report: called with a line on what is deleted unasked.
        """
        self._report = report
        self._catalog = catalog
        self._keep = keep
        self._fast_bytes = fast_bytes
        #: Guards all below, and what is decided by it. No tier that may be slow is asked for anything under it: what
        #: is to go leaves the catalog under it, and its folder after that.
        self._deciding = threading.RLock()
        #: Nothing is removed while it is held: for as long as what is looked at is not yet named by `hold`.
        self.deletions_paused = self._deciding
        #: Told whenever something has gone.
        self._gone = threading.Condition(self._deciding)
        self._locks: list[WriterLock] = []
        self._is_open = False
        #: Why nothing is written to the fast tier any more, once it refused something; "" before that.
        self._refusal = ""
        self._has_lost_fast = False
        #: Reported as not drained, because other snapshots of their steps lie there.
        self._reported_undrained: set[int] = set()
        #: How many times each step is held.
        self._held: Counter[int] = Counter()

    def open_for_writing(self) -> None:
        """Take the folders' locks, remove what unfinished saves left, and look at what there is; once.

        Raises: ConfigError if another process writes there; DataError.
        """
        with self._deciding:
            if self._is_open:
                return
            try:
                for tier in self._catalog.tiers:
                    with self._falling_through(tier):
                        if isinstance(tier, LocalTier):
                            tier.make()
                            self._locks.append(WriterLock(tier.path))
                for tier in self._catalog.tiers:
                    with self._falling_through(tier):
                        tier.sweep()
                self._look()
                lines = remember(self._catalog)
            except BaseException:
                self.close()
                raise
            self._is_open = True
        for line in lines:
            self._report(line)
        # Different snapshots of one step on the two tiers: nothing is done about them unasked.
        if steps := self._catalog.steps_of_two():
            more = f"; the same of step {', '.join(map(str, steps[1:]))}" if steps[1:] else ""
            self._report(f"{self._catalog.describe_other_versions(steps[0])}{more}")

    @contextmanager
    def _falling_through(self, tier: Tier) -> Iterator[None]:
        """Do without a fast tier that refuses something: where snapshots stay counts. Raises: DataError of that."""
        try:
            yield
        except DataError as error:
            if tier is self._catalog.tiers[-1]:
                raise
            self.give_up_fast(error)

    def give_up_fast(self, error: DataError) -> str:
        """Write to the fast tier no more, which refused; where it is gone, know of nothing there any more.

        Until the store is opened anew. Returns: what to say of it.
        """
        with self._deciding:
            if not self.has_lost_fast():
                self._refusal = self._refusal or str(error)
            return self._refusal

    @property
    def fast_refuses(self) -> bool:
        """Return whether the fast tier refused something, and is done without."""
        return bool(self._refusal)

    def has_lost_fast(self) -> bool:
        """Return whether the fast tier is gone, with all that was there."""
        fast = self._catalog.tiers[0]
        if len(self._catalog.tiers) == 1 or not isinstance(fast, LocalTier) or not fast.is_gone():
            return False
        with self._deciding:
            if not self._has_lost_fast:
                drained = {copy.link.uid for copy in self._catalog.on_tier(1)}
                lost = [str(copy.step) for copy in self._catalog.on_tier(0) if copy.link.uid not in drained]
                undrained = f", and with it what was not drained, of step {', '.join(lost)}" if lost else ""
                self._refusal = f"{fast.name} is gone{undrained}"
                self._has_lost_fast = True
                self._catalog.give_up(0)
        return True

    def _look(self) -> None:
        """Look at the tiers, at the fast one only if it lets itself be looked at. Raises: DataError of the slow one."""
        try:
            self._catalog.look()
        except DataError:
            with self._falling_through(self._catalog.tiers[0]):
                self._catalog.tiers[0].folders()
            if not self._refusal:
                raise
            self._catalog.give_up(0)
            self._catalog.look()

    def hold(self, steps: Iterable[int]) -> None:
        """Keep the snapshots of these steps until `let_go` gets them."""
        with self._deciding:
            self._held.update(steps)

    def let_go(self, steps: Iterable[int]) -> None:
        with self._deciding:
            self._held -= Counter(steps)  # what nobody holds any more is not in it

    def check_space(
        self,
        state_bytes: int,
        steps: Sequence[int],
        encoding: EncodingConfig,
        seconds_between_saves: float = 0.0,
    ) -> SpaceNeeded:
        """Return what the tier where snapshots stay has to hold.

        seconds_between_saves: at least; 0 where that is not known.
        Raises: ConfigError if it cannot; DataError.
        """
        number = len(self._catalog.tiers) - 1
        tier = self._catalog.tiers[number]
        free_bytes = tier.free_bytes()
        with self._deciding:
            stored = self._catalog.stored(number)
            shares = self._shares(encoding)
            needed = space_needed(
                state_bytes,
                steps,
                self._keep,
                encoding.scheme,
                encoding.snap_dis,
                baseline_share=shares.get(True, MOST_SHARE),
                delta_share=shares.get(False, shares.get(True, MOST_SHARE)),
                seconds_between_saves=seconds_between_saves,
                stored=stored,
                now_seconds=time.time(),
            )
            held_bytes = sum(one.stored_bytes for one in stored)
            counts_age = self._keep.max_age_seconds is None or seconds_between_saves > 0.0
            check_space(needed, held_bytes, free_bytes, tier.name, counts_age=counts_age)
        return needed

    def _shares(self, encoding: EncodingConfig) -> dict[bool, float]:
        """Return the stored share of the last baseline (True) and of the last delta (False), where there is one."""
        shares: dict[bool, float] = {}
        for copy in self._catalog.on_tier(len(self._catalog.tiers) - 1):
            if (
                copy.manifest is not None
                and copy.manifest.raw_bytes
                and copy.manifest.codec == encoding.codec
            ):
                # Tiny snapshots take more than their tensors.
                share = min(MOST_SHARE, copy.manifest.stored_bytes / copy.manifest.raw_bytes)
                shares[copy.manifest.reference is None] = share
        return shares

    def check_first(
        self, step: int, state_bytes: int, encoding: EncodingConfig, seconds_between_saves: float
    ) -> str:
        """Return a warning where the snapshots to come may not fit on the last tier, or "".

        step: training step of the first save.
        Raises: ConfigError if there is one tier, and this snapshot does not fit on it; DataError.
        """
        tier = self._catalog.tiers[-1]
        free_bytes = tier.free_bytes()
        steps = steps_until_pruned(self._keep, encoding.snap_dis, seconds_between_saves)
        if free_bytes is None or state_bytes * MOST_SHARE * (len(steps) + 1) <= free_bytes:
            return ""
        with self._deciding:
            one_bytes = math.ceil(state_bytes * self._shares(encoding).get(True, MOST_SHARE))
        if one_bytes > free_bytes and len(self._catalog.tiers) == 1:
            raise ConfigError(
                f"{tier.name} has {format_bytes(free_bytes)} free, and the snapshot of step {step} takes up to "
                f"{format_bytes(one_bytes)}: free some space, or save to another folder"
            )
        try:
            self.check_space(state_bytes, steps, encoding, seconds_between_saves)
        except ConfigError as error:
            return f"step {step} is saved, but space may run out later: {error}"
        return ""

    def why_not_fast(self, new_bytes: int) -> str:
        """Make space on the fast tier for so many bytes; return why the snapshot does not go there, or ""."""
        if len(self._catalog.tiers) == 1:
            return ""
        fast, why = self._catalog.tiers[0], ""
        with self._falling_through(fast):
            if not self._refusal:
                why = self._make_space(fast, new_bytes)
        return self._refusal or why

    def _make_space(self, fast: Tier, new_bytes: int) -> str:
        with self._deciding:
            # What is out of the catalog and not gone yet takes space of which nobody would know.
            self._gone.wait_for(lambda: not self._catalog.is_going(tier=0))
            tiers = self._tiers(nearest=0)
            # What others put there counts, too: a tier that is full refuses, whatever was meant for snapshots.
            free_bytes = fast.free_bytes()
            capacity_bytes = sum(tiers.fast_bytes.values()) + (
                new_bytes if free_bytes is None else free_bytes
            )
            if self._fast_bytes is not None:
                capacity_bytes = min(capacity_bytes, self._fast_bytes)
            admission = admit(tiers, capacity_bytes, new_bytes, in_use=self._staying())
            if not admission.to_fast:
                undrained_bytes = sum(
                    nbytes for step, nbytes in tiers.fast_bytes.items() if step not in tiers.on_slow
                )
                capacity = format_bytes(capacity_bytes)
                if undrained_bytes:
                    capacity += (
                        f", of which snapshots that are not drained yet take {format_bytes(undrained_bytes)}"
                    )
                return f"the snapshot takes up to {format_bytes(new_bytes)}, and {fast.name} has space for {capacity}"
            going = self._catalog.take_out(0, admission.forget)
        self._remove(going)
        return ""

    def forget(self, now_seconds: float, tier: int) -> None:
        """Remove the copies that nobody wants any more once a snapshot was written to a tier.

        From the tiers up to that one: what is farther away is removed by who writes there, and holds up no other.
        Raises: DataError if one cannot be removed.
        """
        if self._catalog.is_unsure():
            self._look()
        with self._deciding:
            if self._catalog.is_unsure():
                return  # what cannot be read now may be whole, and need others of which nobody knows
            if len(self._catalog.tiers) == 1:
                stored = self._catalog.stored(0)
                gone = to_forget(stored, self._keep, now_seconds, in_use=self._held)
                going = self._catalog.take_out(0, gone) if gone else []
            else:
                # Each tier by what its own copies need: a difference on the slow one is whole on the fast one.
                staying = self._staying()
                slow = to_forget_slow(self._tiers(nearest=1), self._keep, now_seconds, in_use=staying)
                fast = to_forget_fast(self._tiers(nearest=0), self._keep, now_seconds, in_use=staying)
                # A tier that refuses holds up no other.
                leaving = [] if self._refusal else self._catalog.take_out(0, fast)
                going = self._catalog.take_out(1, slow) if tier else []
                if leaving:
                    try:
                        with self._falling_through(self._catalog.tiers[0]):
                            self._remove(leaving)
                    except BaseException:
                        self._catalog.put_back(going)
                        raise
        if going:
            self._remove(going)

    def next_to_drain(self, now_seconds: float) -> int | None:
        """Return the step to copy to the slow tier next, held from here on; None where nothing waits."""
        if len(self._catalog.tiers) == 1:
            return None
        with self._deciding:
            waiting = to_drain(self._tiers(nearest=0), self._keep, now_seconds)
            # In its place lies another snapshot, which nobody said may go.
            apart = [step for step in waiting if self._catalog.others(step)]
            step = next((step for step in waiting if step not in apart), None)
            self.hold([] if step is None else [step])
            new = [step for step in apart if step not in self._reported_undrained]
            self._reported_undrained.update(new)
        for other in new:
            self._report(
                f"step {other}: NOT drained: {self._catalog.describe_other_versions(other)}, "
                "or give the folder that it came from as fast="
            )
        return step

    def delete(self, step: int) -> None:
        """Remove all copies of a snapshot.

        Raises: ConfigError if there is none, if others need it, or if it is being drained or a drain is a difference
            to it; DataError.
        """
        with self._deciding:
            copies = self._catalog.copies(step)
            if not copies:
                raise ConfigError(self._catalog.missing(step))
            self.check_one([step])
            if step in self._held:
                raise ConfigError(
                    f"step {step} cannot be deleted while it is drained, or another as a difference to it: wait for "
                    "drain() first"
                )
            for copy in copies:
                needing = dependents(self._catalog.stored(copy.tier), step)
                if needing:
                    raise ConfigError(
                        f"step {step} cannot be deleted: step {', '.join(map(str, needing))} "
                        f"{'is' if len(needing) == 1 else 'are'} stored as differences to it; delete them first"
                    )
            going = [one for copy in copies for one in self._catalog.take_out(copy.tier, [step])]
        self._remove(going)

    def check_one(self, steps: Iterable[int]) -> None:
        """Raise ConfigError if the tiers hold different snapshots of a step: nobody said which is to go."""
        for step in steps:
            others = self._catalog.others(step)
            if others:
                names = [
                    self._catalog.tiers[copy.tier].name for copy in (*self._catalog.copies(step), *others)
                ]
                ways = " or ".join(f"`penstock snapshots delete {name} --step {step}`" for name in names)
                raise ConfigError(
                    f"{' and '.join(names)} hold different snapshots of step {step}, and neither is deleted with the "
                    f"other: delete the one that is to go from its own folder, with {ways}"
                )

    def replace_damaged(self, step: int) -> None:
        """Remove the snapshot of a step, and those that are differences to it, if all its copies are known damaged.

        So a training that fell back to an earlier snapshot can save the step anew. Raises: DataError.
        """
        with self._deciding:
            # Else its name would be taken.
            while self._catalog.is_going(step=step):
                self._gone.wait()
            copies = self._catalog.copies(step)
            if not copies:
                return
            damaged = [copy.tier for copy in copies]
            # With a good copy, what is a difference to it can be restored, wherever that is.
            if not all(self._catalog.is_damaged(tier, step) for tier in damaged):
                return
            steps_of = {tier: [*dependents(self._catalog.stored(tier), step), step] for tier in damaged}
            going = [copy for tier, steps in steps_of.items() for copy in self._catalog.take_out(tier, steps)]
        self._remove(going)
        for tier, steps in steps_of.items():
            self._tell_damaged(tier, steps, f"step {step} is saved anew")

    def make_way(self, tier: int, step: int) -> None:
        """Remove a copy that is known to be damaged, for the snapshot is drained there anew. Raises: DataError.

        Differences to it stay: they are that to what comes.
        """
        with self._deciding:
            self._gone.wait_for(lambda: not self._catalog.is_going(tier=tier, step=step))
            if not self._catalog.is_damaged(tier, step):
                return
            going = self._catalog.take_out(tier, [step])
        self._remove(going)
        self._tell_damaged(tier, [step], "it is drained there anew")

    def _tell_damaged(self, tier: int, steps: Sequence[int], why: str) -> None:
        named = " and ".join(
            [", ".join(map(str, steps[:-1])), str(steps[-1])] if steps[1:] else [str(steps[0])]
        )
        self._report(
            f"step{'s' if steps[1:] else ''} {named}, damaged, {'are' if steps[1:] else 'is'} removed from "
            f"{self._catalog.tiers[tier].name}, for {why}"
        )

    def discard(self, tier: int, step: int) -> None:
        """Remove a copy that is not what was written, whoever wants it. Raises: DataError."""
        self._remove(self._catalog.take_out(tier, [step]))

    def _staying(self) -> set[int]:
        """Return the steps whose copies stay whatever the rules say: who would go by number may be another snapshot."""
        staying = set(self._held)
        for step in self._catalog.steps_of_two():
            staying.add(step)
            for tier in range(len(self._catalog.tiers)):
                staying.update(dependents(self._catalog.stored(tier), step))
        return staying

    def _remove(self, going: Sequence[Copy]) -> None:
        """Remove the folders of copies that were taken out, in this order; not under the lock.

        Raises: DataError if one stays: it is known again, as are those after it, which it may need.
        """
        if not going:
            return
        left = deque(going)
        try:
            while left:
                self._catalog.remove(left.popleft())
                self._tell_gone()
        except PenstockError as error:
            raise type(error)(f"a snapshot that is to go could not be removed: {error}") from error
        finally:
            self._catalog.put_back(left)
            self._tell_gone()

    def _tell_gone(self) -> None:
        with self._gone:
            self._gone.notify_all()

    def _tiers(self, nearest: int) -> TwoTiers:
        """Return what is on both tiers. nearest: the tier whose copy counts where there are two good ones."""
        fast = {one.step: one for one in self._catalog.stored(0)}
        slow = {one.step: one for one in self._catalog.stored(1)}
        first, second = (fast, slow) if nearest == 0 else (slow, fast)
        #: Where another snapshot of the step lies on one of the two: the tier of the one that counts.
        taken = {step: self._catalog.copies(step)[0].tier for step in self._catalog.steps_of_two()}

        def counting(step: int) -> StoredSnapshot:
            if step in taken and step in fast and step in slow:
                return (fast, slow)[taken[step]][step]
            return (
                first[step]
                if step in first and (first[step].is_intact or step not in second)
                else second[step]
            )

        merged = [
            counting(step)
            for step in self._catalog.steps()
            if step in first or step in second  # else it was committed just now
        ]
        return TwoTiers(
            tuple(merged),
            {step: one.stored_bytes for step, one in fast.items()},
            frozenset(
                step
                for step, one in slow.items()
                if taken.get(step, 1) == 1 and (one.is_intact or step not in fast)
            ),
        )

    def close(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks = []
        self._is_open = False
