"""What led to a wait, link by link, and to the end of a graph's step: the longest chains of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.measure.explain import place_name
from penstock.measure.graph_steps import Doing, Tile, describe_tile, steps_of
from penstock.trace import NO_EPOCH, NO_PEER, Kind, Trace, batch_waits
from penstock.trace.causes import critical_items
from penstock.units import format_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """A part of a chain. what: "read from the source", or a kernel; name: of the sample, if there is one."""

    what: str
    seconds: float
    name: str = ""

    def __str__(self) -> str:
        return f"{self.what} {format_seconds(self.seconds)}" + (f" ({self.name})" if self.name else "")


@dataclass(frozen=True, slots=True)
class Chain:
    """What happened one after the other, the first first, until a batch was there or a step was over.

    start_seconds: of the wait or the step, since the trace's origin. seconds: that it took. Links may begin before it.
    """

    rank: int
    epoch: int
    step: int
    start_seconds: float
    seconds: float
    links: tuple[Link, ...]

    def __str__(self) -> str:
        return " > ".join(map(str, self.links))


def largest_waits(trace: Trace, most: int = 5) -> list[Chain]:
    """Return the longest waits for a batch, the longest first, each with the chain of its last sample.

    Of a graph, those of its workers, each with the tensor or the node that it was for.
    """
    if trace.workers:
        return _largest_waits_of_workers(trace, most)
    spans = trace.spans
    waits = batch_waits(spans)
    waits = waits[waits["end"] > waits["start"]]
    waits = waits[np.argsort(waits["start"] - waits["end"], kind="stable")[:most]]
    critical = critical_items(spans, waits)
    found = []
    for place, wait in enumerate(waits):
        links = []
        if critical.seen[place]:
            last = critical.decode[place]
            if critical.has_slot[place]:
                links.append(Link("slot", _seconds(critical.slot[place])))
            for has, move in ((critical.was_read, critical.read), (critical.was_hit, critical.hit)):
                if has[place]:
                    links.append(_of_move(trace, move[place]))
            links.append(Link("decode", _seconds(last)))
            begin = max(float(wait["start"]), float(last["end"]))
            links.append(Link("hand-over", max(0.0, float(wait["end"]) - begin)))
        found.append(_chain(wait, links))
    return found


def _largest_waits_of_workers(trace: Trace, most: int) -> list[Chain]:
    waits: list[tuple[int, Tile]] = []
    for step in steps_of(trace):
        tiles = (tile for tiles in step.tiles.values() for tile in tiles)
        waits += [(step.number, each) for each in tiles if each.doing in (Doing.RECEIVING, Doing.WAITING)]
        waits = sorted(waits, key=lambda each: -each[1].seconds)[:most]
    return [
        Chain(
            tile.rank,
            NO_EPOCH,
            number,
            tile.begin,
            tile.seconds,
            (Link(describe_tile(trace, tile), tile.seconds),),
        )
        for number, tile in waits
    ]


def longest_chain(trace: Trace) -> Chain | None:
    """Return the chain of nodes of the longest step of a graph, see `graph_steps`; None for a trace without."""
    step = max(steps_of(trace), key=lambda each: each.seconds, default=None) if trace.workers else None
    if step is None:
        return None
    has_several = len(trace.workers) > 1
    links = [
        Link(
            f"{describe_tile(trace, tile)}{f' on {trace.workers[tile.rank]}' if has_several else ''}",
            tile.seconds,
        )
        for tile in step.path
    ]
    return Chain(step.path[-1].rank, NO_EPOCH, step.number, step.begin, step.seconds, tuple(links))


def _of_move(trace: Trace, move: Any) -> Link:
    name = "read" if move["kind"] == Kind.READ else "hit"
    peer = f" of rank {int(move['peer'])}" if move["peer"] != NO_PEER else ""
    what = f"{name} from {place_name(trace, int(move['place']))}{peer}"
    return Link(what, _seconds(move), trace.name_of(int(move["sample"])))


def _chain(span: Any, links: list[Link]) -> Chain:
    return Chain(
        int(span["rank"]),
        int(span["epoch"]),
        int(span["step"]),
        float(span["start"]),
        _seconds(span),
        tuple(links),
    )


def _seconds(span: Any) -> float:
    return float(span["end"] - span["start"])
