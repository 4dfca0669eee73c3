"""Who writes which part of a tensor that is spread over ranks, and where its numbers are found again.

All of it follows from what the ranks hold, so that ranks which know that agree without another word, and the same
ranks write the same parts at every step: a difference finds its reference where it lies.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.checkpoint.state.tensors import Layout
from penstock.errors import ConfigError

_PRIME = 2**61 - 1
#: Pairs of parts times dimensions: so long is looked for the place that is missing or twice, a second or so.
_MOST_LOOKED_AT = 500_000
#: An n-dimensional interval: per dimension the first index and the one after the last.
Extent = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A tensor, or a part of one, which a snapshot keeps once, and who writes it.

    holders: the ranks that hold it, ascending; more than one where it is replicated. writer: the one that writes it.
    """

    layout: Layout
    holders: tuple[int, ...]
    writer: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Numbers to copy from a stored part into a wanted one: wanted[target] = stored[source].

    part: which of the stored parts, as they were given. source, target: one slice per dimension; none for a scalar.
    """

    part: int
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def assign(held: Sequence[Sequence[Layout]]) -> tuple[Assignment, ...]:
    """Return what a snapshot of all ranks holds, sorted by name and place, and who writes it.

    held: per rank, the layouts of its tensors, in any order. Two ranks that hold the same name and box hold the same
        numbers: what differs between ranks needs a name, or a box, of its own.
    Returns: each part once. Replicated ones go, largest first, to the holder with the fewest bytes so far, the lowest
        rank where several have: where all ranks hold all, no writer has more than the mean and one part.

    Raises: ConfigError naming the tensor if two ranks disagree on it, if a rank holds a part twice, or if a tensor's
        parts do not make up the whole.
    Source: greedy assignment in order of falling size is Graham 1969, "Bounds on multiprocessing timing anomalies",
        section 5 (LPT).
    """
    holders: dict[Layout, list[int]] = {}
    for rank, layouts in enumerate(held):
        for layout in layouts:
            ranks = holders.setdefault(layout, [])
            if ranks and ranks[-1] == rank:
                raise ConfigError(f"{_place(layout)} is held twice by rank {rank}; a name may occur once")
            ranks.append(rank)
    ordered = sorted(holders, key=lambda layout: (layout.name, _extent(layout)))
    check_whole(ordered)
    bytes_of_rank = [0] * len(held)
    writers: dict[Layout, int] = {}
    # What has one holder is settled; what could go anywhere then evens it out.
    for layout in sorted(ordered, key=lambda layout: (len(holders[layout]) > 1, -layout.nbytes)):
        writer = min(holders[layout], key=bytes_of_rank.__getitem__)
        writers[layout] = writer
        bytes_of_rank[writer] += layout.nbytes
    return tuple(Assignment(layout, tuple(holders[layout]), writers[layout]) for layout in ordered)


def check_whole(layouts: Iterable[Layout]) -> list[Layout]:
    """Return the layouts of the tensors if the parts of each fill it, each of its numbers once.

    layouts: of parts of any tensors, in any order.
    Raises: ConfigError naming the tensor and the place that is missing, or is there twice, or lies outside.
    """
    parts: dict[str, list[Layout]] = {}
    for layout in layouts:
        parts.setdefault(layout.name, []).append(layout)
    wholes: list[Layout] = []
    for same in parts.values():
        is_part = len(same) > 1 or same[0].box is not None
        if is_part:
            _check_parts(same)
        wholes.append(same[0].whole if is_part else same[0])
    return wholes


def copies_into(wanted: Layout, stored: Sequence[Layout]) -> tuple[Copy, ...]:
    """Return how a tensor, or a part of one, is put together from stored parts of the same tensor.

    stored: parts that do not overlap, of the tensor that `wanted` names. Parts that `wanted` does not touch are fine.
    Returns: in the order of `stored`; together they fill `wanted`, each of its numbers once.

    Raises: ConfigError naming the tensor and the place that no stored part holds, or a part of other type or shape.
    """
    place = _extent(wanted)
    copies, filled = [], []
    for part, layout in enumerate(stored):
        if layout.whole != wanted.whole:
            raise ConfigError(
                f"{wanted.name} is wanted as {_kind(wanted)}, but stored as {_kind(layout)}; a tensor can be laid out "
                "anew over ranks, but keeps its type and shape"
            )
        extent = _extent(layout)
        common = _intersection(place, extent)
        if common is None:
            continue
        filled.append(common)
        copies.append(Copy(part, _slices(common, extent), _slices(common, place)))
    if wanted.values and not _fills(place, filled):
        missing = _first_gap(place, filled)
        raise ConfigError(
            f"{wanted.name} is stored without {_shown(missing or ())}, which {_place(wanted)} needs"
        )
    return tuple(copies)


# -- Parts of one tensor -----------------------------------------------------------------------------------


def _check_parts(parts: Sequence[Layout]) -> None:
    first = parts[0]
    whole = first.whole.shape
    for part in parts:
        if part.whole != first.whole:
            raise ConfigError(
                f"{part.name} is {_kind(first)} on one rank and {_kind(part)} on another; give what differs between "
                "ranks a name of its own"
            )
        if part.box is not None and not part.box.holds(part.shape):
            raise ConfigError(f"{_place(part)} lies outside of the tensor, whose shape is {whole}")
    extents = sorted(_extent(part) for part in parts if part.values)
    place = tuple((0, size) for size in whole)
    if _fills(place, extents):
        return
    _check_apart(first.name, extents)
    if missing := _first_gap(place, extents):
        raise ConfigError(f"{first.name} lacks {_shown(missing)}: no rank holds that part of {whole}")
    raise ConfigError(f"{first.name} has {len(parts):,} parts that do not fill {whole}, each number once")


def _fills(place: Extent, extents: Iterable[Extent]) -> bool:
    """Return whether parts of a place fill it, each number once; wrongly once in 2**54 times, in linear time.

    Each dimension is measured with random lengths, and the volumes so measured are added up modulo a prime. The sum
    less the place's own volume is a polynomial in these lengths, of degree one in each: how often a number is there,
    less one, times its volume. It is zero for all lengths only where each number is there once.
    Source: Schwartz 1980, "Fast probabilistic algorithms for verification of polynomial identities", corollary 1; at
    most 64 dimensions over 2**61 - 1.
    """
    if list(extents) == [place]:
        return True  # as it is: a tensor that was not in parts
    marks: list[dict[int, int]] = [{} for _ in place]

    def volume(extent: Extent) -> int:
        product = 1
        for mark, bounds in zip(marks, extent, strict=True):
            start, stop = (mark.setdefault(bound, secrets.randbelow(_PRIME)) for bound in bounds)
            product = product * (stop - start) % _PRIME
        return product

    return (sum(map(volume, extents)) - volume(place)) % _PRIME == 0


def _check_apart(name: str, extents: Sequence[Extent]) -> None:
    """Raise ConfigError if two of the sorted extents overlap, unless that takes too long to find.

    They are swept along the first dimension: only those that reach beyond the current start are compared. Parts along
    that dimension, as ranks of data parallelism hold them, take O(parts); a grid takes O(parts x its width).
    """
    reaching: list[Extent] = []
    looked_at = 0
    for extent in extents:
        looked_at += len(reaching) * max(1, len(extent))
        if looked_at > _MOST_LOOKED_AT:
            return
        # A scalar has no dimension to sweep: every part of one is the whole.
        reaching = [other for other in reaching if not extent or other[0][1] > extent[0][0]]
        for other in reaching:
            if (common := _intersection(extent, other)) is not None:
                raise ConfigError(
                    f"{name} has {_shown(common)} twice: in {_shown(other)} and in {_shown(extent)}; replicas must be "
                    "of one shape and place"
                )
        reaching.append(extent)


def _first_gap(place: Extent, filled: Iterable[Extent]) -> Extent | None:
    """Return a part of `place` that nothing fills; None if all is filled, or if that takes too long to find."""
    left = [place] if all(stop > start for start, stop in place) else []
    looked_at = 0
    for extent in filled:
        looked_at += len(left) * max(1, len(place))
        if looked_at > _MOST_LOOKED_AT:
            return None
        left = [rest for part in left for rest in _without(part, extent)]
    return min(left, default=None)


def _without(place: Extent, taken: Extent) -> list[Extent]:
    """Return what is left of a place, as at most two parts per dimension."""
    common = _intersection(place, taken)
    if common is None:
        return [place]
    rests = []
    for dimension, ((start, stop), (low, high)) in enumerate(zip(place, common, strict=True)):
        for rest in ((start, low), (high, stop)):
            if rest[1] > rest[0]:
                rests.append((*common[:dimension], rest, *place[dimension + 1 :]))
    return rests


def _intersection(one: Extent, other: Extent) -> Extent | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _slices(part: Extent, within: Extent) -> tuple[slice, ...]:
    return tuple(
        slice(start - base, stop - base) for (start, stop), (base, _) in zip(part, within, strict=True)
    )


def _extent(layout: Layout) -> Extent:
    whole = layout.shape if layout.box is None else layout.box.whole
    offsets = layout.box.offsets if layout.box is not None else (0,) * len(whole)
    if not len(layout.shape) == len(offsets) == len(whole):
        raise ConfigError(
            f"{layout.name} has {len(layout.shape)} dimensions, its box {len(offsets)} offsets in {len(whole)}"
        )
    return tuple((offset, offset + size) for offset, size in zip(offsets, layout.shape, strict=True))


# -- Words -------------------------------------------------------------------------------------------------


def _kind(layout: Layout) -> str:
    return f"{layout.dtype.name}{list(layout.whole.shape)}"


def _place(layout: Layout) -> str:
    return layout.name if layout.box is None else f"{layout.name}{_shown(_extent(layout))}"


def _shown(extent: Extent) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in extent) + "]"
