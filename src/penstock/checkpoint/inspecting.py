"""What is wrong with the copies of a snapshot, and what a listing says of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from penstock.checkpoint.files.catalog import (
    Catalog,
    Copy,
    Link,
    Removed,
    looking_again,
    open_links,
    read_first,
)
from penstock.checkpoint.files.manifest import NewerFormat
from penstock.checkpoint.files.parts import TornError
from penstock.checkpoint.files.reading import decode_all, parts_by_name, tree_of, tree_of_rank
from penstock.errors import DataError, FormatError
from penstock.flow.ordered import Workers

#: A copy, and what is wrong with it; None: nothing is.
Judged = tuple[Copy, FormatError | DataError | None]


@dataclass(frozen=True, slots=True)
class Listed:
    """A snapshot, as `SnapshotStore.list` returns it.

    condition: "intact", "torn" (a file is missing or ends early), "damaged", or "newer" (written by a later Penstock).
    why: what is wrong with it, or with a copy of one that is intact elsewhere, or where another snapshot of its step
        lies; or "". reference_step: of the snapshot that it is the difference to, or None.
    raw_bytes, stored_bytes: of the state, and of all its own files; 0 where nobody can say.
    kept_mantissa_bits: to which its floats were cut, None where nothing was. tiers: where it is. broken_tiers: those
        of them whose copy was found to be damaged, or cannot be read.
    """

    step: int
    condition: Literal["intact", "torn", "damaged", "newer"]
    why: str
    created_seconds: float
    reference_step: int | None
    raw_bytes: int
    stored_bytes: int
    codec: str
    kept_mantissa_bits: int | None
    tiers: tuple[str, ...]
    broken_tiers: tuple[str, ...] = ()


def inspect(catalog: Catalog, step: int, workers: Workers | None = None) -> Listed | None:
    """Return what a listing says of a snapshot; None if another process removed it meanwhile.

    workers: read every copy to its end and decode it, and remember which are damaged; None: they are opened only, and
        no others once one can be.
    """

    def judge(is_again: bool) -> list[Judged]:
        if is_again:
            catalog.look()
        return _judged(catalog, step, workers)

    judged = looking_again(judge)
    if not judged:
        return None
    faults = [fault for _, fault in judged]
    # What is intact somewhere is intact.
    if workers and None not in faults and any(isinstance(fault, FormatError) for fault in faults):
        catalog.mark_damaged(step)
    return _listed(catalog, step, judged)


def can_be_opened(catalog: Catalog, step: int) -> bool:
    try:
        return any(fault is None for _, fault in _judged(catalog, step, None))
    except Removed:
        return False


def _judged(catalog: Catalog, step: int, workers: Workers | None) -> list[Judged]:
    """Return the copies of a snapshot, and what is wrong with each. Raises: `Removed`."""
    judged: list[Judged] = []
    for copy in catalog.copies(step):
        is_one_whole = workers is None and any(fault is None for _, fault in judged)
        judged.append((copy, copy.fault if is_one_whole else _fault_of(catalog, copy, workers)))
    return judged


def _fault_of(catalog: Catalog, copy: Copy, workers: Workers | None) -> FormatError | DataError | None:
    """Return what is wrong with a copy, whichever copies of others it is read with; None if nothing is.

    Raises: `Removed` if something may be wrong only because a copy is there no more.
    """

    def read(links: Sequence[Link]) -> None:
        with closing(open_links(catalog, links)) as chain:
            if workers is not None:
                decode_all(chain, workers)
            tree = tree_of(chain.manifest, parts_by_name(chain.manifest))
            for rank in range(len(chain.manifest.rank_trees)):
                tree_of_rank(chain.manifest, rank, tree)

    try:
        read_first(catalog.chains_of(copy), read, catalog.was_removed)
    except Removed:
        raise
    except (FormatError, DataError) as error:
        if catalog.was_removed([copy.link]):
            raise Removed(f"the snapshot of step {copy.step} was removed meanwhile: {error}") from error
        return error
    return None


def _listed(catalog: Catalog, step: int, judged: Sequence[Judged]) -> Listed:
    manifest = next((copy.manifest for copy, _ in judged if copy.manifest), None)
    condition: Literal["intact", "torn", "damaged", "newer"] = "intact"
    names = {copy.tier: catalog.tiers[copy.tier].name for copy, _ in judged}
    broken = {names[copy.tier]: fault for copy, fault in judged if fault is not None}
    why = ""
    if len(broken) == len(judged):
        fault = tuple(broken.values())[-1]
        is_torn = isinstance(fault, TornError)
        condition = "newer" if isinstance(fault, NewerFormat) else "torn" if is_torn else "damaged"
        why = str(fault)
    elif broken:
        fine = [names[copy.tier] for copy, fault in judged if fault is None]
        faults = "; ".join(f"{name}: {fault}" for name, fault in broken.items())
        why = f"intact on {', '.join(fine)}, damaged on {faults}"
    why = "; ".join(filter(None, (why, catalog.describe_other_versions(step))))
    return Listed(
        step,
        condition,
        why,
        manifest.created_seconds if manifest else 0.0,
        manifest.reference.step if manifest and manifest.reference else None,
        manifest.raw_bytes if manifest else 0,
        manifest.stored_bytes if manifest else 0,
        manifest.codec if manifest else "",
        manifest.kept_mantissa_bits if manifest else None,
        tuple(names.values()),
        tuple(broken),
    )
