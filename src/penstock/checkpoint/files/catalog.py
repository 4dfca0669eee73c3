"""Which snapshots there are, on which tiers, and which of their copies make one whole."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.checkpoint.files.manifest import Manifest, NewerFormat, folder_of, step_of
from penstock.checkpoint.files.parts import TornError
from penstock.checkpoint.files.reading import Chain, OpenSnapshot, load_manifest
from penstock.checkpoint.tiers.local import LocalTier
from penstock.checkpoint.tiers.tier import MANIFEST, Tier
from penstock.errors import ConfigError, DataError, FormatError
from penstock.policy.retention import StoredSnapshot
from penstock.units import format_names

T = TypeVar("T")

#: How many stores below a folder a message names.
_MOST_STORES = 5
#: How many folders are searched for stores when a store is opened.
_MOST_LOOKED_INTO = 50
#: How often one looks again because what was to be read was removed meanwhile: each time, a snapshot came and went.
MOST_LOOKS = 10


class Removed(DataError):
    """What was to be read is there no more, as where a training in another process keeps newer ones in its place."""


def looking_again(attempt: Callable[[bool], T]) -> T:
    """Return what an attempt returns that is made anew where what it read was removed meanwhile.

    attempt: called with whether it was made before.
    Raises: what it raises; `Removed` after ten of them.
    """
    for turn in range(MOST_LOOKS):
        try:
            return attempt(turn > 0)
        except Removed:
            if turn == MOST_LOOKS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


class Link(NamedTuple):
    """A copy that is read for a snapshot, which may be a difference to it.

    uid: of the snapshot that was seen there, or "" where nobody could; another may take its place.
    """

    tier: int
    step: int
    uid: str


@dataclass(frozen=True, slots=True)
class Copy:
    """A snapshot's folder on a tier.

    tier: number of the tier, the nearest is 0. manifest: None where it cannot be read. fault: why not.
    """

    step: int
    tier: int
    manifest: Manifest | None
    fault: FormatError | DataError | None = None

    @property
    def link(self) -> Link:
        """Return it as it is named in a restore chain."""
        return Link(self.tier, self.step, self.manifest.uid if self.manifest else "")


@dataclass(eq=False)
class _Known:
    """The copies that are known at one moment, by step and tier, and what follows from them. Never changed."""

    copies: dict[tuple[int, int], Copy]
    _on_tier: dict[int, list[Copy]] = field(default_factory=dict)
    #: By tier: for which damaged copies, and what retention has to know then.
    stored: dict[int, tuple[frozenset[tuple[int, str]], list[StoredSnapshot]]] = field(default_factory=dict)

    @cached_property
    def created_seconds(self) -> dict[int, float]:
        """When each step was saved, in that order; what cannot be read is taken to be as old as the step before it."""
        created: dict[int, float] = {}
        unread: set[int] = set()
        for copy in self.copies.values():
            if copy.manifest is None:
                unread.add(copy.step)
            else:
                created[copy.step] = max(copy.manifest.created_seconds, created.get(copy.step, 0.0))
        if unread:
            latest = 0.0
            for step in sorted(created.keys() | unread):
                latest = created.setdefault(step, latest)
        return dict(sorted(created.items(), key=itemgetter(1, 0)))

    @cached_property
    def faults(self) -> list[FormatError | DataError]:
        return list(filter(None, map(attrgetter("fault"), self.copies.values())))

    def on_tier(self, tier: int) -> list[Copy]:
        """Return a tier's copies in the order in which they were saved."""
        if tier not in self._on_tier:
            found = []
            for (step, of_tier), copy in self.copies.items():
                if of_tier == tier:
                    seconds = copy.manifest.created_seconds if copy.manifest else self.created_seconds[step]
                    found.append((seconds, step, copy))
            self._on_tier[tier] = list(map(itemgetter(2), sorted(found)))
        return self._on_tier[tier]


class Catalog:
    """What was last seen on the tiers. Used by the threads of saves and drains."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """tiers: the nearest first; of several copies the nearest is read."""
        self.tiers = list(tiers)
        #: Replaced, not changed, so that who reads it needs no lock.
        self._known = _Known({})
        #: Tier and uid of copies of which something was found to be damaged when it was read.
        self._damaged: frozenset[tuple[int, str]] = frozenset()
        #: Copies that are being removed: nobody is to plan on them.
        self._going: frozenset[tuple[int, int]] = frozenset()
        #: Tiers that are not asked any more: they are gone.
        self._given_up: frozenset[int] = frozenset()
        #: What became of copies since a look that is under way began, which may have seen them before; None: none is.
        self._meanwhile: dict[tuple[int, int], Copy | None] | None = None
        #: guards the replacing of all these; tiers are asked outside it, for a slow one must hold up nobody else
        self._replacing = threading.Lock()
        #: held for a look
        self._looking = threading.Lock()

    def look(self) -> None:
        """Look at the tiers anew. Raises: DataError if one cannot be listed."""
        with self._looking:
            with self._replacing:
                self._meanwhile = dict.fromkeys(self._going)
            seen: dict[tuple[int, int], Copy | None] = {}
            try:
                for number, tier in enumerate(self.tiers):
                    if number in self._given_up:
                        continue
                    seen |= {(copy.step, number): copy for copy in _look_at_all(tier, number)}
            except BaseException:
                with self._replacing:
                    self._meanwhile = None
                raise
            with self._replacing:
                seen |= self._meanwhile
                self._meanwhile = None
                self._known = _Known(
                    {
                        key: copy
                        for key, copy in seen.items()
                        if copy is not None and key[1] not in self._given_up
                    }
                )

    def give_up(self, tier: int) -> None:
        """Know of no copies on a tier any more, and look there no more: it is gone."""
        with self._replacing:
            self._given_up = self._given_up | {tier}
            self._known = _Known({key: copy for key, copy in self._known.copies.items() if key[1] != tier})

    def is_damaged(self, tier: int, step: int) -> bool:
        """Return whether a copy is known to be damaged, not only unreadable now or of a later Penstock."""
        copy = self._known.copies.get((step, tier))
        if copy is None:
            return False
        if copy.manifest is None:
            return isinstance(copy.fault, FormatError) and not isinstance(copy.fault, NewerFormat)
        return (tier, copy.manifest.uid) in self._damaged

    def is_one_damaged(self, links: Iterable[Link]) -> bool:
        """Return whether one of these copies is known to be damaged."""
        return not self._damaged.isdisjoint(map(itemgetter(0, 2), links))

    def is_unsure(self) -> bool:
        """Return whether something could not be read that may be whole."""
        faults = self._known.faults
        return bool(faults) and any(isinstance(fault, DataError) for fault in faults)

    def add(self, tier: int, manifest: Manifest) -> None:
        """Enter a snapshot that was just committed to a tier."""
        with self._replacing:
            copy = Copy(manifest.step, tier, manifest)
            # Drained anew, it has the name of the copy that was damaged.
            if (tier, manifest.uid) in self._damaged:
                self._damaged = self._damaged - {(tier, manifest.uid)}
            self._enter((manifest.step, tier), copy)

    def take_out(self, tier: int, steps: Iterable[int]) -> list[Copy]:
        """Know of copies no more, whoever looks, and return them: to be removed, or put back."""
        taken: list[Copy] = []
        with self._replacing:
            for step in steps:
                copy = self._known.copies.get((step, tier))
                if copy is not None:
                    self._going = self._going | {(step, tier)}
                    self._enter((step, tier), None)
                    taken.append(copy)
        return taken

    def remove(self, copy: Copy) -> None:
        """Remove a copy that was taken out from its tier; if it stays there it is known again. Raises: DataError."""
        tier, folder = self.tiers[copy.tier], folder_of(copy.step)
        is_gone = False
        try:
            try:
                tier.delete(folder)
            except FileNotFoundError:
                pass  # somebody removed it, and that is what was to be
            except DataError:
                # Half-way, it is no snapshot any more, and will be swept.
                is_gone = folder not in tier.folders()
                raise
            is_gone = True
        finally:
            self._end_going(copy, is_gone=is_gone)

    def put_back(self, copies: Iterable[Copy]) -> None:
        """Know again of copies that were taken out and are not removed."""
        for copy in copies:
            self._end_going(copy, is_gone=False)

    def is_going(self, *, tier: int | None = None, step: int | None = None) -> bool:
        """Return whether copies are being removed. tier, step: None: of any."""
        going = self._going
        return bool(going) and any(
            tier in (None, of_tier) and step in (None, of_step) for of_step, of_tier in going
        )

    def _end_going(self, copy: Copy, *, is_gone: bool) -> None:
        with self._replacing:
            self._going = self._going - {(copy.step, copy.tier)}
            if not is_gone:
                self._enter((copy.step, copy.tier), copy)

    def _enter(self, key: tuple[int, int], copy: Copy | None) -> None:
        """Replace what is known of a copy. copy: None: it is there no more."""
        copies = self._known.copies.copy()
        copies.pop(key, None)
        if copy is not None:
            copies[key] = copy
        self._known = _Known(copies)
        if self._meanwhile is not None:
            self._meanwhile[key] = copy

    def mark_damaged(self, step: int, tier: int | None = None) -> None:
        """Remember that a copy of a snapshot is damaged. tier: None: it could be read from none."""
        with self._replacing:
            damaged = {
                (copy.tier, copy.manifest.uid)
                for copy in self.copies(step)
                if copy.manifest and tier in (None, copy.tier)
            }
            self._damaged = self._damaged | damaged

    def copies(self, step: int) -> list[Copy]:
        """Return the copies of a step's snapshot, the nearest first; none if there is no such snapshot.

        Where the tiers hold different ones, as after a training began anew with another fast folder, those of the one
        that was saved last.
        """
        if len(self.tiers) == 1:
            copy = self._known.copies.get((step, 0))
            return [] if copy is None else [copy]
        there = self._there(step)
        others = _others(there)
        return [copy for copy in there if copy not in others]

    def others(self, step: int) -> list[Copy]:
        """Return what lies there of other snapshots of a step than `copies` gives; almost always nothing."""
        return _others(self._there(step)) if len(self.tiers) > 1 else []

    def steps_of_two(self) -> list[int]:
        """Return the steps of which the tiers hold different snapshots."""
        return [step for step in self.steps() if self.others(step)] if len(self.tiers) > 1 else []

    def describe_other_versions(self, step: int) -> str:
        """Return what to say where another snapshot of a step lies on another tier; "" where none does."""
        others = self.others(step)
        if not others:
            return ""
        other, this = others[0], next(copy for copy in self.copies(step) if copy.manifest)
        name = self.tiers[other.tier].name
        return (
            f"another snapshot of step {step}, saved {_when(other)}, lies in {name}; the one in "
            f"{self.tiers[this.tier].name}, saved {_when(this)}, is taken, and the other is no copy of it: "
            f"`penstock snapshots delete {name} --step {step}` removes it"
        )

    def _there(self, step: int) -> list[Copy]:
        copies = self._known.copies
        return [copy for number in range(len(self.tiers)) if (copy := copies.get((step, number)))]

    def has(self, tier: int, step: int) -> bool:
        """Return whether a tier holds a snapshot of a step, or what is left of one."""
        return (step, tier) in self._known.copies

    def on_tier(self, tier: int) -> list[Copy]:
        """Return a tier's snapshots, in the order in which they were saved."""
        return self._known.on_tier(tier)

    def steps(self) -> list[int]:
        """Return the steps of all snapshots, in the order in which they were saved."""
        return list(self._known.created_seconds)

    def describe_lower(self, step: int) -> str:
        """Return what to report of a step that is saved now and is lower than that saved last; "" where it is not."""
        last = next(reversed(self._known.created_seconds), step)
        if last <= step:
            return ""
        return (
            f"step {step} is saved after step {last}: restore() returns the snapshot that was saved last, step {step}, "
            f"and restore({last}) the other; a training that went back calls rewind() first"
        )

    def newest_seconds(self) -> float:
        """Return when the last snapshot was saved; 0 if there is none."""
        return max(self._known.created_seconds.values(), default=0.0)

    def baseline_share(self, tier: int) -> float | None:
        """Return what is left of a state in a tier's last snapshot that is no difference; None if there is none."""
        shares = [
            copy.manifest.stored_bytes / copy.manifest.raw_bytes
            for copy in self.on_tier(tier)
            if copy.manifest and copy.manifest.reference is None and copy.manifest.raw_bytes
        ]
        return shares[-1] if shares else None

    def newer_format(self) -> NewerFormat | None:
        """Return why a snapshot was written by a later Penstock, if one was."""
        for fault in self._known.faults:
            if isinstance(fault, NewerFormat):
                return fault
        return None

    def stored(self, tier: int) -> list[StoredSnapshot]:
        """Return what retention has to know of a tier's snapshots, in the order in which they were saved."""
        known, damaged = self._known, self._damaged
        cached = known.stored.get(tier)
        if cached is None or cached[0] is not damaged:
            found = []
            for copy in known.on_tier(tier):
                if (manifest := copy.manifest) is None:
                    seconds = known.created_seconds[copy.step]
                    found.append(StoredSnapshot(copy.step, seconds, 0, None, is_intact=False))
                    continue
                one = StoredSnapshot(
                    copy.step,
                    manifest.created_seconds,
                    manifest.stored_bytes,
                    manifest.reference.step if manifest.reference else None,
                    is_intact=(tier, manifest.uid) not in damaged,
                    clock_seconds=manifest.clock_seconds,
                )
                found.append(one)
            cached = known.stored[tier] = damaged, found
        return cached[1]

    def choose(self, step: int | None, *, was_there: bool = False) -> int:
        """Return the step of a snapshot that was seen.

        step: None: the one that was saved last. was_there: whether it was there at a look before.
        Raises: ConfigError if there is no such, naming the nearest.
        """
        steps = self.steps()
        if step is None:
            if not steps:
                raise ConfigError(f"no snapshot is there: {self.describe_absence()}")
            return steps[-1]
        if step not in steps:
            raise ConfigError(self.missing(step, was_there=was_there))
        return step

    def chains(self, step: int) -> list[list[Link]]:
        """Return how a snapshot can be read: the copies that it is made of, itself the last.

        Returns: the restore chains, the nearest first; of each copy the one with the references that are read soonest,
            then those with the references of each tier, for a copy may turn out to be damaged.
        Raises: ConfigError if there is no such snapshot, naming the nearest; if there is none, FormatError or
            DataError: why not.
        """
        copies = self.copies(step)
        if not copies:
            raise ConfigError(self.missing(step))
        chains: list[list[Link]] = []
        faults: list[FormatError | DataError] = []
        for copy in copies:
            try:
                for links in self.chains_of(copy):
                    if links not in chains:
                        chains.append(links)
            except (FormatError, DataError) as error:
                faults.append(error)
        if not chains:
            raise faults[0]
        return chains

    def chains_of(self, copy: Copy) -> list[list[Link]]:
        """Return the `chains` that end with a copy. Raises: FormatError or DataError if there is none: why not."""
        chains: list[list[Link]] = []
        fault: FormatError | DataError | None = None
        for preferred in (None, *range(len(self.tiers))) if len(self.tiers) > 1 else (None,):
            try:
                links = self._links(copy, preferred)
            except (FormatError, DataError) as error:
                fault = fault or error
            else:
                chains += [links] if links not in chains else []
        if not chains:
            assert fault is not None, "what has no chain has a fault"
            raise fault
        return chains

    def manifest(self, tier: int, step: int) -> Manifest | None:
        """Return what is known of a copy; None if nothing is."""
        copy = self._known.copies.get((step, tier))
        return copy.manifest if copy else None

    def _links(self, copy: Copy, preferred: int | None) -> list[Link]:
        """Return the copies that one is made of, itself the last.

        preferred: tier whose copies are taken where they are there; None: those that are read soonest.
        Raises: what is wrong with one of them.
        """
        links: list[Link] = []
        while True:
            if copy.manifest is None:
                assert copy.fault is not None, "what has no manifest has a fault"
                raise copy.fault
            links.insert(0, Link(copy.tier, copy.step, copy.manifest.uid))
            reference = copy.manifest.reference
            if reference is None:
                return links
            where = self.tiers[copy.tier].where(folder_of(copy.step))
            if any(link.uid == reference.uid for link in links):
                raise FormatError(f"{where} is damaged: it is a difference to itself")
            copy = self._reference(where, reference.step, reference.uid, copy.tier, preferred)

    def _reference(self, where: str, step: int, uid: str, tier: int, preferred: int | None) -> Copy:
        """Return the copy that a difference is to: one that is no difference itself, else of the same tier."""
        # Also of a snapshot that is not the one of its step any more, but never another than the one with this uid.
        found = [copy for copy in self._there(step) if copy.manifest and copy.manifest.uid == uid]
        found.sort(key=lambda copy: (copy.manifest.reference is not None, copy.tier != tier))  # type: ignore[union-attr]
        found.sort(key=lambda copy: preferred is not None and copy.tier != preferred)
        if not found:
            broken = [str(copy.fault) for copy in self.copies(step) if copy.fault]
            why = f": {broken[0]}" if broken else ", which is not there"
            raise FormatError(f"{where} is a difference to step {step}{why}")
        return found[0]

    def there_already(self, step: int) -> str:
        """Return what to say of a step that has a snapshot and is to be saved."""
        where = self.tiers[self.copies(step)[0].tier].name
        return (
            f"there is a snapshot of step {step} in {where} already: delete it first, or save under another step; "
            "if the training went back to an earlier snapshot, rewind the store to that"
        )

    def describe_absence(self) -> str:
        """Return what to say where there is no snapshot at all."""
        last = self.tiers[-1]
        if isinstance(last, LocalTier):
            if not last.path.exists():
                return f"{last.name} does not exist"
            if instead := describe_mistaken_folder(last.path):
                return f"{last.name} {instead}"
        return f"{' and '.join(tier.name for tier in self.tiers)} has none at all: nothing was saved there"

    def was_removed(self, links: Iterable[Link]) -> bool:
        """Return whether one of these copies is there no more, or another in its place; its tier is asked.

        False where nobody can say.
        """
        return any(map(self._was_removed, links))

    def _was_removed(self, link: Link) -> bool:
        tier, folder = self.tiers[link.tier], folder_of(link.step)
        try:
            if not self.has(link.tier, link.step) or folder not in tier.folders():
                return True
            manifest = load_manifest(tier, folder)
        except FileNotFoundError:
            return folder not in tier.folders()
        except (FormatError, DataError):
            return False
        return link.uid not in ("", manifest.uid)

    def missing(self, step: int, *, was_there: bool = False) -> str:
        """Return what to say of a step that has no snapshot. was_there: when one looked before."""
        steps = sorted(self.steps())
        where = " and ".join(tier.name for tier in self.tiers)
        if not steps:
            why = "it was removed meanwhile" if was_there else self.describe_absence()
            return f"there is no snapshot of step {step}: {why}"
        near = sorted(sorted(steps, key=lambda other: abs(other - step))[:2])
        if was_there:
            return (
                f"the snapshot of step {step} in {where} was removed meanwhile, as the training that saves there does "
                f"to keep others; the nearest are of step {' and '.join(map(str, near))}"
            )
        return (
            f"there is no snapshot of step {step} in {where}: it was never saved, or removed to keep others; "
            f"the nearest are of step {' and '.join(map(str, near))}"
        )


def describe_mistaken_folder(path: Path) -> str:
    """Return why a folder is no store: it is a snapshot, or the parent of stores; else ""."""
    path = path.absolute()
    return describe_snapshot_folder(path) or _describe_stores_below(path)


def describe_snapshot_folder(path: Path) -> str:
    """Return which store's snapshot a folder is; "" if it is none."""
    path = path.absolute()
    step = step_of(path.name)
    if step is None or not (path / MANIFEST).exists():
        return ""
    return f"is one snapshot of the store at {path.parent}: open that folder, where restore(step={step}) returns it"


def _describe_stores_below(path: Path) -> str:
    folders = _folders_in(path)
    if any(step_of(name) is not None for name in folders):
        return ""
    stores = [
        name
        for name in folders[:_MOST_LOOKED_INTO]
        if any(step_of(inner) is not None for inner in _folders_in(path / name))
    ]
    if not stores:
        return ""
    return f"is no store, but contains stores: {format_names(stores, _MOST_STORES)}"


def _folders_in(path: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted; none where they cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []


def _others(copies: Sequence[Copy]) -> list[Copy]:
    """Return those of a step's copies that are of another snapshot than the one that was saved last."""
    known = [(copy.manifest.created_seconds, copy.manifest.uid, copy) for copy in copies if copy.manifest]
    if len({uid for _, uid, _ in known}) < 2:
        return []
    # Of one moment, the nearest.
    latest_uid = max(known, key=lambda one: one[0])[1]
    return [copy for _, uid, copy in known if uid != latest_uid]


def _when(copy: Copy) -> str:
    assert copy.manifest is not None, "it was read"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(copy.manifest.created_seconds))


def step_of_fault(error: Exception, steps: Iterable[int], step: int) -> int:
    """Return the step in whose files a fault lies, one of some or else the one that was asked for."""
    # On an object store the name of the attempt follows that of the folder.
    said = [step_of(folder) for folder in re.findall(r"(step-\d+)(?:\.attempt-[A-Za-z0-9]+)?/", str(error))]
    return next((one for one in steps if one != step and one in said), step)


@contextmanager
def naming_dependents(links: Sequence[Link]) -> Iterator[None]:
    """Have what fails in a snapshot that another one needs say so. links: to the other one."""
    try:
        yield
    except (FormatError, DataError) as error:
        step = links[-1].step
        fault_step = step_of_fault(error, [link.step for link in links], step)
        if fault_step == step:
            raise
        raise type(error)(f"step {step} needs step {fault_step}: {error}") from error


def read_first(
    chains: Sequence[Sequence[Link]],
    read: Callable[[Sequence[Link]], T],
    was_removed: Callable[[Sequence[Link]], bool],
    report: Callable[[str], None] = lambda _: None,
) -> T:
    """Return what a function returns for the first restore chain of a snapshot on which it does not fail.

    was_removed: such as `Catalog.was_removed`. report: is called with a line on each chain that is passed over.
    Raises: `Removed` if a copy is there no more; FormatError or DataError: what is wrong with the last chain.
    """
    step = chains[0][-1].step
    for links in chains:
        try:
            with naming_dependents(links):
                return read(links)
        except Removed:
            raise
        except (FormatError, DataError) as error:
            if was_removed(links):
                raise Removed(f"the snapshot of step {step} was removed meanwhile: {error}") from error
            if links is chains[-1]:
                raise
            report(f"step {step} is read from another copy: {error}")
    raise AssertionError("the last chain returns or raises")


def open_links(catalog: Catalog, links: Iterable[Link]) -> Chain:
    """Open the snapshots that one is made of.

    links: one of `Catalog.chains`, perhaps of the catalog of another rank, on which it was seen: what this one knows of
        older snapshots in the same places does not count.
    Raises: FormatError, DataError, `Removed` if others are in their places; nothing stays open then.
    """
    opened: list[OpenSnapshot] = []
    try:
        for number, step, uid in links:
            tier, folder = catalog.tiers[number], folder_of(step)
            manifest = catalog.manifest(number, step)
            if manifest is None or manifest.uid != uid:
                manifest = load_manifest(tier, folder)
            if manifest.uid != uid:
                raise Removed(
                    f"{tier.where(folder)} is not the snapshot that was to be read: it was saved anew"
                )
            opened.append(OpenSnapshot(tier, folder, manifest))
    except BaseException as error:
        for snapshot in opened:
            snapshot.close()
        if isinstance(error, FileNotFoundError):
            raise TornError(f"{error.filename} is missing" if error.filename else str(error)) from None
        raise
    return Chain(opened)


def _look_at_all(tier: Tier, number: int) -> list[Copy]:
    for _ in range(MOST_LOOKS):
        steps = [step for step in map(step_of, tier.folders()) if step is not None]
        copies = [_look_at(tier, number, step) for step in steps]
        if all(copy.manifest for copy in copies):
            return copies
        # What another process removed since it was listed is not damaged, and there may be newer ones.
        there = set(tier.folders())
        seen = [copy for copy in copies if copy.manifest or folder_of(copy.step) in there]
        if len(seen) == len(copies):
            break
    return seen


def _look_at(tier: Tier, number: int, step: int) -> Copy:
    try:
        return Copy(step, number, load_manifest(tier, folder_of(step)))
    except FileNotFoundError:
        fault: FormatError | DataError = TornError(f"{tier.where(folder_of(step))} has no manifest")
    except (FormatError, DataError) as error:
        fault = error
    return Copy(step, number, None, fault)
