"""Decides whether a snapshot is a baseline or a difference, and to which one; what a rank wrote of it, and its check.

`decide` applies the rules of `penstock.policy.snap_distance` and `retention` to the snapshots of a store, on rank 0. It
does not matter how ranks meet. `penstock.checkpoint.writer` draws how the steps follow each other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from penstock.checkpoint.codecs import codec_named
from penstock.checkpoint.codecs.codec import SLACK_BYTES, Pair
from penstock.checkpoint.files.catalog import Catalog, Link
from penstock.checkpoint.files.manifest import (
    Manifest,
    NewerFormat,
    Reference,
    Stored,
    folder_of,
    read_layout,
    write_layout,
)
from penstock.checkpoint.files.parts import Part, PartReader
from penstock.checkpoint.state.dtypes import DTYPES, DType
from penstock.checkpoint.state.tensors import Layout
from penstock.checkpoint.tiers.local import LocalDraft
from penstock.checkpoint.tiers.tier import Tier
from penstock.errors import ConfigError, DataError, FormatError
from penstock.policy.delta_schemes import Scheme
from penstock.policy.retention import possible_references
from penstock.policy.snap_distance import AutoDistance, SnapDistance, needs_baseline, next_reference
from penstock.trace.trace import JSON
from penstock.units import is_integer

#: The codec that stores blocks as they are; it is not asked.
RAW = "stored"
#: Apart enough to be two numbers as floats.
_TICK_SECONDS = 1e-3
_WARM_UP_VALUES = 4096


@dataclass(frozen=True, slots=True)
class EncodingConfig:
    """How snapshots are stored.

    scheme, snap_dis: see `penstock.policy.delta_schemes` and `snap_distance`. codec: its name.
    kept_mantissa_bits: see `Manifest`.
    """

    scheme: Scheme
    snap_dis: SnapDistance
    codec: str
    kept_mantissa_bits: int | None = None

    @property
    def refers(self) -> bool:
        """Return whether snapshots may be differences to others."""
        return self.scheme != "complete" and self.codec != RAW


def encoding_config(
    scheme: Scheme,
    snap_dis: SnapDistance | Literal["auto"],
    codec: str,
    kept_mantissa_bits: int | None = None,
) -> EncodingConfig:
    """Return how to store snapshots as a user says it. Raises: ConfigError naming the argument."""
    if scheme not in get_args(Scheme):
        raise ConfigError(f"scheme is {scheme!r}; the known ones are {', '.join(get_args(Scheme))}")
    distance = AutoDistance() if snap_dis == "auto" else snap_dis
    if not isinstance(distance, AutoDistance) and not (is_integer(distance) and distance >= 1):
        raise ConfigError(
            f"snap_dis is {snap_dis!r}; the first of at least 1 snapshots is a baseline: give an integer, "
            '"auto", or an AutoDistance'
        )
    codec_named(codec)
    most = max(dtype.mantissa_bits for dtype in DTYPES.values()) - 1
    if kept_mantissa_bits is not None and not (
        is_integer(kept_mantissa_bits) and 0 <= kept_mantissa_bits <= most
    ):
        raise ConfigError(
            f"kept_mantissa_bits is {kept_mantissa_bits!r}; give an integer from 0 to {most}, or None to keep "
            "floats as they are"
        )
    # Of Python: they are written as JSON.
    return EncodingConfig(
        scheme,
        distance if isinstance(distance, AutoDistance) else int(distance),
        codec,
        None if kept_mantissa_bits is None else int(kept_mantissa_bits),
    )


class SnapshotDecision(NamedTuple):
    """What rank 0 decided of a snapshot before anything of it is written.

    created_seconds, clock_seconds: see `Manifest`. reference: to which it is a difference; None: a baseline. chain: the
        copies that the reference is made of, the one that needs none first. why_baseline: where it is a baseline
        and need not be by the scheme, or "".
    """

    step: int
    uid: str
    created_seconds: float
    clock_seconds: float
    since_bytes: tuple[int, ...]
    reference: Reference | None
    chain: tuple[Link, ...] = ()
    why_baseline: str = ""

    def as_baseline(self, why: str = "") -> SnapshotDecision:
        """Return the same snapshot as a baseline. why: it is not the delta that the scheme makes of it."""
        return self._replace(reference=None, since_bytes=(), chain=(), why_baseline=why)

    @classmethod
    def read(cls, written: Any) -> SnapshotDecision:
        """Return a decision from JSON."""
        decision = cls(*written)
        links = tuple(Link(*each) for each in decision.chain)
        reference = decision.reference and Reference(*decision.reference)
        return decision._replace(since_bytes=tuple(decision.since_bytes), reference=reference, chain=links)


def new_baseline(step: int, catalog: Catalog) -> SnapshotDecision:
    """Return a snapshot that is made now, as a baseline."""
    # After all others, also if the clock was set back: their order is that of their times.
    clock_seconds = time.time()
    created_seconds = max(clock_seconds, catalog.newest_seconds() + _TICK_SECONDS)
    return SnapshotDecision(step, secrets.token_hex(16), created_seconds, clock_seconds, (), None)


def decide(
    catalog: Catalog, tier: int, new: SnapshotDecision, encoding: EncodingConfig, layouts: Iterable[Layout]
) -> SnapshotDecision:
    """Return what a snapshot shall be.

    tier: that it is written to. new: it, as a baseline. layouts: of all ranks.
    Raises: ConfigError if there is one of this step; NewerFormat if a later Penstock wrote here.
    """
    newer = catalog.newer_format()
    if newer is not None:
        # What it refers to, and what would have to stay for it, is not known here.
        raise NewerFormat(
            f"step {new.step} is not saved: {newer.found}, so nothing is written there: save to another folder, or "
            "delete that snapshot with the Penstock that wrote it"
        ) from newer
    if catalog.has(tier, new.step):
        raise ConfigError(catalog.there_already(new.step))
    found = _reference(catalog, tier, new, encoding)
    if found is None:
        return new
    before, reference = found
    why_baseline = _changed(reference, set(layouts))
    if why_baseline:
        return new.as_baseline(why_baseline)
    chain = _intact_chain(catalog, reference)
    if chain is None:
        return new.as_baseline(f"step {reference.step} cannot be read")
    since_bytes = (*before.since_bytes, before.stored_bytes)
    made = Reference(reference.step, reference.uid)
    return new._replace(since_bytes=since_bytes, reference=made, chain=chain)


def _intact_chain(catalog: Catalog, reference: Manifest) -> tuple[Link, ...] | None:
    """Return the nearest restore chain of a snapshot on which nothing is known to be damaged; None if there is none."""
    for copy in catalog.copies(reference.step):
        with suppress(FormatError, DataError):
            for links in catalog.chains_of(copy):
                if links[-1].uid == reference.uid and not catalog.is_one_damaged(links):
                    return tuple(links)
    return None


def _changed(reference: Manifest, layouts: set[Layout]) -> str:
    """Return why a snapshot of these tensors is no difference to another one: what changed; "" if it can be."""
    before = set(map(attrgetter("layout"), reference.tensors))
    changed = before ^ layouts
    if not changed or not needs_baseline(
        sum(one.nbytes for one in changed), sum(one.nbytes for one in layouts)
    ):
        return ""
    names = list(dict.fromkeys(layout.name for layout in sorted(changed, key=lambda one: -one.nbytes)))
    was, is_now = ({layout.name for layout in those} for those in (before, layouts))
    how = "has another shape, type or part" if names[0] in was & is_now else "is new"
    if names[0] not in is_now:
        how = "is gone"
    more = f" and {len(names) - 1:,} more changed" if len(names) > 1 else ""
    return f"{names[0]} {how}{more}"


def _reference(
    catalog: Catalog, tier: int, new: SnapshotDecision, encoding: EncodingConfig
) -> tuple[Manifest, Manifest] | None:
    """Return the snapshot before, and the one to be a difference to; None for a baseline."""
    if not encoding.refers:
        return None
    possible = set(possible_references(catalog.stored(tier), new.created_seconds))
    # Where there is a later one of its step on another tier, it may be deleted.
    of_two = catalog.steps_of_two()
    by_uid: dict[str, Manifest] = {}
    before: Manifest | None = None
    for copy in catalog.on_tier(tier):
        if (
            copy.manifest
            and copy.step in possible
            and (copy.step not in of_two or copy in catalog.copies(copy.step))
        ):
            before = by_uid[copy.manifest.uid] = copy.manifest
    if before is None or before.codec != encoding.codec:
        return None
    place = next_reference(encoding.scheme, encoding.snap_dis, (*before.since_bytes, before.stored_bytes))
    reference: Manifest | None = before
    while reference is not None and len(reference.since_bytes) != place:
        reference = by_uid.get(reference.reference.uid) if reference.reference else None
    return None if reference is None else (before, reference)


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A rank's part, as it was written.

    refers: whether a block of it needs the reference. encode_seconds: time of all threads together, for `encoded_bytes`
    of the state. rank_tree: of what the rank has for itself.
    """

    part: Part
    stored: Sequence[Stored]
    refers: bool
    encode_seconds: float
    encoded_bytes: int
    rank_tree: JSON = None

    def write(self) -> list[Any]:
        """Return it as JSON."""
        rows = [[*write_layout(one.layout), one.first_block] for one in self.stored]
        return [self.part, rows, self.refers, self.encode_seconds, self.encoded_bytes, self.rank_tree]

    @classmethod
    def read(cls, written: Any, number: int) -> WrittenPart:
        """Return what `write` wrote of the part of this number."""
        part, rows, *rest = written
        stored = [Stored(read_layout(layout), number, first) for *layout, first in rows]
        return cls(Part(*part), stored, *rest)


def check_part(
    tier: Tier,
    decision: SnapshotDecision,
    number: int,
    part: Part,
    *,
    to_its_end: bool = True,
    draft: LocalDraft | None = None,
) -> None:
    """Read a part back and compare it with its checksums.

    number: of the part. to_its_end: not only its table, which comes last. draft: in which it lies before the commit.
    Raises: FormatError, DataError.
    """
    folder = folder_of(decision.step)
    if draft is None:
        reader, where = tier.open(folder, part.file), f"{tier.where(folder)}/{part.file}"
    else:
        reader = draft.open(part.file)
        where = f"{tier.name}, in the part of step {decision.step} that was just written"
    with closing(reader):
        checked = PartReader(reader, where, number, bytes.fromhex(decision.uid), part)
        if to_its_end:
            checked.check_all_stored()


def warm_up(codec: str, dtypes: Iterable[DType]) -> None:
    """Have all that encodes values of these types compiled and loaded."""
    pairs = []
    for dtype in dtypes:
        values = np.arange(_WARM_UP_VALUES * dtype.item_bytes, dtype=np.uint8)
        pairs += [Pair(values, dtype, None), Pair(values, dtype, np.roll(values, 1))]
    if codec != RAW:
        coder = codec_named(codec).coder(lambda: iter(pairs))
        for pair in pairs:
            coder.encode(pair, np.empty(pair.values.size + SLACK_BYTES, np.uint8))
