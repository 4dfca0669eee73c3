"""What led to a wait, link by link, and what a step's kernels waited for: the longest chains of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.measure.explain import place_name
from penstock.measure.graph_steps import Doing, Tile, describe_tile, steps_of
from penstock.trace import NO_EPOCH, NO_PEER, Kind, Spans, Trace, batch_waits
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

    Of a graph on workers, those of its workers, each with the tensor or the node that it was for.
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
    """Return the chain of kernels of the longest run of a graph; None for a trace without kernels.

    From the kernel that ended last, each one's predecessor is the kernel that ended last before it began: where
    kernels wait for each other and for threads alone, nothing else can have held it up. Of a graph on workers, the
    chain leads from worker to worker: `penstock.measure.graph_steps`.
    """
    if trace.workers:
        step = max(steps_of(trace), key=lambda each: each.seconds, default=None)
        if step is None:
            return None
        links = [
            Link(f"{describe_tile(trace, tile)} on {trace.workers[tile.rank]}", tile.seconds)
            for tile in step.path
        ]
        return Chain(step.path[-1].rank, NO_EPOCH, step.number, step.begin, step.seconds, tuple(links))
    nodes = trace.spans[trace.spans["kind"] == Kind.NODE]
    if not nodes.size:
        return None
    steps, run = np.unique(nodes[["rank", "step"]], return_inverse=True)
    begins, ends = np.full(steps.size, np.inf), np.full(steps.size, -np.inf)
    np.minimum.at(begins, run, nodes["start"])
    np.maximum.at(ends, run, nodes["end"])
    longest = int((ends - begins).argmax())
    path = _path(nodes[run == longest])
    whole = path[-1].copy()
    whole["start"], whole["end"] = begins[longest], ends[longest]
    links = [Link(trace.name_of(int(path[0]["sample"])), _seconds(path[0]))]
    for before, node in pairwise(path):
        if (idle := float(node["start"] - before["end"])) > 0:
            links.append(Link("idle", idle))
        links.append(Link(trace.name_of(int(node["sample"])), _seconds(node)))
    return _chain(whole, links)


def _path(nodes: Spans) -> list[Any]:
    """Return the kernels of a run from which the last one follows, the first first."""
    by_end = nodes[np.argsort(nodes["end"], kind="stable")]
    place = by_end.size - 1
    path = [by_end[place]]
    while (before := int(np.searchsorted(by_end["end"], by_end["start"][place], "right"))) > 0:
        # A kernel of no duration does not precede itself.
        place = min(before, place) - 1
        if place < 0:
            break
        path.append(by_end[place])
    return path[::-1]


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
