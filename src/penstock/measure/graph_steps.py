"""What the steps of a graph waited for: each step's end is followed back over what held it up.

A worker's part of a step is in tiles: it computes, sends, waits for a tensor, or for a queue, a mutex or a batch. From
the tile in which a step ended, the path goes back on the same worker, from a node to what ended before it began; where
that waited for a tensor that was computed meanwhile, it continues where the tensor was sent. The parts of the path are
what the step waited for. A session on one process is one worker.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.trace import NO_FLOW, NO_PEER, NO_SAMPLE, NO_STEP, Kind, Spans, Trace
from penstock.trace.schema import choose_spans
from penstock.units import format_count, format_seconds

#: Steps and nodes that are listed.
_MOST_LISTED = 5
#: The verdict lists what takes at least this share of the steps.
_LEAST_SHARE = 0.005


class Doing(StrEnum):
    """What a worker does in a part of a step."""

    COMPUTING = "computing"
    SENDING = "sending"
    RECEIVING = "waiting for tensors"
    WAITING = "waiting for a queue, a mutex or a batch"
    BETWEEN = "between nodes"


class Tile(NamedTuple):
    """What a worker did from a time to another, in seconds since the trace's origin.

    node: the trace's number of what it computed, sent or waited for; NO_SAMPLE for none. peer: rank of who sends what
    it waited for. flow: of that tensor. since: when the node began: before `begin` where another did meanwhile.
    """

    rank: int
    begin: float
    end: float
    doing: Doing
    node: int = NO_SAMPLE
    peer: int = NO_PEER
    flow: int = NO_FLOW
    since: float = math.inf

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


class Step(NamedTuple):
    """A step on all workers. tiles: by rank, in order. path: what it waited for, in order, of all workers."""

    number: int
    begin: float
    end: float
    tiles: Mapping[int, Sequence[Tile]]
    path: Sequence[Tile]

    @property
    def seconds(self) -> float:
        """How long it took, from its begin on the first worker to its end on the last."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """What a worker did in all steps, in seconds.

    held_seconds: for which steps waited for it. doing: what it did. received: waiting for tensors, by who sent them.
    live_bytes: of tensors that a step had on it at a time, the most.
    """

    task: str
    held_seconds: float
    doing: Mapping[Doing, float]
    received: Mapping[str, float]
    live_bytes: int


@dataclass(frozen=True, slots=True)
class HeldBy:
    """What steps waited for on their paths. what: a node; a tensor, with who sent it. times: how often."""

    what: str
    task: str
    seconds: float
    times: int


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that took long. task: that it waited for longest, for held_seconds; node: what took longest there."""

    step: int
    start_seconds: float
    seconds: float
    task: str
    held_seconds: float
    node: str


@dataclass(frozen=True, slots=True)
class GraphExplanation:
    """What the steps of a graph on workers waited for.

    seconds: of all these steps; median_seconds: of one. first_steps, first_seconds: how many steps were the first of
    their fetches, and what they took together: they count in none of the others but slowest. workers: those that steps
    waited for longest first. links: seconds in which steps waited for tensors on their way, by sender and receiver.
    nodes, slowest: the longest first.
    """

    steps: int
    seconds: float
    median_seconds: float
    first_steps: int
    first_seconds: float
    workers: tuple[WorkerTime, ...]
    links: Mapping[tuple[str, str], float]
    nodes: tuple[HeldBy, ...]
    slowest: tuple[SlowStep, ...]
    notes: tuple[str, ...]

    @property
    def waited(self) -> dict[str, float]:
        """How long workers waited in all steps together, by what for."""
        return {
            str(doing): sum(each.doing.get(doing, 0.0) for each in self.workers)
            for doing in (Doing.RECEIVING, Doing.WAITING)
        }

    @property
    def slow_link(self) -> tuple[str, str] | None:
        """The link that steps waited for longer than for any worker; None where there is none."""
        link, seconds = max(self.links.items(), key=lambda each: each[1], default=(None, 0.0))
        return link if seconds > self.workers[0].held_seconds else None

    @property
    def verdict(self) -> str:
        """The sentence that comes first."""
        if not self.steps:
            return "No step of the graph has ended."
        took = f"{format_count(self.steps, 'step')} took {format_seconds(self.seconds)}"
        if self.first_steps:
            took += f", {format_seconds(self.median_seconds)} each at the median"
        if (link := self.slow_link) is not None:
            return (
                f"{took}; {self._part(self.links[link])} they waited for tensors on their way from {link[0]} to "
                f"{link[1]}.{self._apart}"
            )
        first = self.workers[0]
        waited = f"{self._part(first.held_seconds)} they waited for {first.task}: "
        done = {str(doing): seconds for doing, seconds in first.doing.items() if doing != Doing.RECEIVING}
        done |= {f"{Doing.RECEIVING} from {task}": seconds for task, seconds in first.received.items()}
        parts = [
            f"{what} {self.share(seconds)}"
            for what, seconds in _largest_first(done).items()
            if seconds > _LEAST_SHARE * self.seconds
        ]
        return f"{took}{f'; {waited}' if len(self.workers) > 1 else ': '}{', '.join(parts)}.{self._apart}"

    @property
    def _apart(self) -> str:
        if not self.first_steps:
            return ""
        took = f"took {format_seconds(self.first_seconds)} before, and"
        if self.first_steps == 1:
            return f" The first step of its fetches {took} counts apart."
        return f" The first steps of {self.first_steps:,} different fetches {took} count apart."

    @property
    def advice(self) -> str:
        """What a person can change about what steps waited for longest; "" where no step has ended."""
        if not self.steps:
            return ""
        if (link := self.slow_link) is not None:
            return (
                f"the link from {link[0]} to {link[1]}: session.learn() measures it and keeps nodes together that send "
                "much; is_lossy=True halves float32"
            )
        if len(self.workers) == 1 and (first := self.nodes[0] if self.nodes else None) is not None:
            if first.what.startswith("waiting"):
                return f"{first.what} took longest: what fills it is slower than the steps; make that faster first"
            return f"{first.what} took longest: a WorkerSession has parts of a graph run next to each other"
        return (
            f"{self.workers[0].task}: session.learn() measures nodes and moves those without a state to workers that "
            "end them sooner; those with a state, and those that name a device, stay: give some another device"
        )

    def share(self, seconds: float) -> str:
        """Return a part of all steps' time in words."""
        return f"{100 * seconds / self.seconds:.1f} %" if self.seconds else ""

    def _part(self, seconds: float) -> str:
        return f"for {format_seconds(seconds)} of it ({self.share(seconds)})"


class _Sums:
    """What some steps took, and waited for."""

    def __init__(self, trace: Trace) -> None:
        self._trace, tasks = trace, trace.workers
        self.lengths: list[float] = []
        self.held, self.links = dict.fromkeys(tasks, 0.0), defaultdict[tuple[str, str], float](float)
        self.doing: dict[int, defaultdict[Doing, float]] = {rank: defaultdict(float) for rank in tasks}
        self.received: dict[int, defaultdict[str, float]] = {rank: defaultdict(float) for rank in tasks}
        self.nodes = defaultdict[tuple[str, str], list[float]](list)

    def add(self, step: Step) -> None:
        """Count a step."""
        tasks = self._trace.workers
        self.lengths.append(step.seconds)
        for tile in (tile for tiles in step.tiles.values() for tile in tiles):
            self.doing[tile.rank][tile.doing] += tile.seconds
            if tile.doing == Doing.RECEIVING:
                self.received[tile.rank][tasks[tile.peer]] += tile.seconds
        for tile in step.path:
            if tile.doing == Doing.RECEIVING:
                self.links[tasks[tile.peer], tasks[tile.rank]] += tile.seconds
            else:
                self.held[tile.rank] += tile.seconds
            if tile.node != NO_SAMPLE:
                self.nodes[describe_tile(self._trace, tile), tasks[tile.rank]].append(tile.seconds)


def explain_graph(trace: Trace) -> GraphExplanation:
    """Sum up what the steps of a graph waited for. trace: one that has `workers`.

    A step that computes a node which none before computed is the first of its fetches, and prepares them: it counts
    apart, unless there are no others or the trace has left out the begin of a long run.
    """
    tasks = trace.workers
    firsts, others, computed = _Sums(trace), _Sums(trace), set[int]()
    slowest: list[SlowStep] = []
    for step in steps_of(trace):
        tiles = (tile for tiles in step.tiles.values() for tile in tiles)
        new = {tile.node for tile in tiles if tile.doing == Doing.COMPUTING} - computed
        computed |= new
        (firsts if new and not trace.left_out.spans else others).add(step)
        slowest = sorted([*slowest, _slow(trace, step)], key=lambda each: -each.seconds)[:_MOST_LISTED]
    counted, apart = (others, firsts.lengths) if others.lengths else (firsts, [])
    ends = trace.spans[trace.spans["kind"] == Kind.STEP]
    live = {rank: int(ends["bytes"][ends["rank"] == rank].max(initial=0)) for rank in tasks}
    workers = [
        WorkerTime(
            task,
            counted.held[rank],
            dict(counted.doing[rank]),
            _largest_first(counted.received[rank]),
            live[rank],
        )
        for rank, task in tasks.items()
    ]
    longest = sorted(counted.nodes.items(), key=lambda each: -sum(each[1]))[:_MOST_LISTED]
    count = len(counted.lengths)
    notes = [f"of a long run, the last {format_count(count, 'step')} count"] if trace.left_out.spans else []
    saves = trace.spans[trace.spans["kind"] == Kind.SAVE]
    if saves.size:
        seconds = float((saves["end"] - saves["start"]).sum())
        notes.append(
            f"saves stopped the training for {format_seconds(seconds)}, between steps or within them"
        )
    return GraphExplanation(
        count,
        sum(counted.lengths),
        median(counted.lengths) if count else 0.0,
        len(apart),
        sum(apart),
        tuple(sorted(workers, key=lambda each: -each.held_seconds)),
        _largest_first(counted.links),
        tuple(HeldBy(what, task, sum(each), len(each)) for (what, task), each in longest),
        tuple(slowest),
        tuple(notes),
    )


def describe_tile(trace: Trace, tile: Tile) -> str:
    """Return what a worker did, in words: a node's name, or which tensor it waited for, and from whom."""
    name = str(tile.doing) if tile.node == NO_SAMPLE else trace.name_of(tile.node)
    if tile.doing == Doing.RECEIVING:
        return f"tensor {name} from {trace.workers[tile.peer]}"
    return f"waiting in {name}" if tile.doing == Doing.WAITING and tile.node != NO_SAMPLE else name


def steps_of(trace: Trace) -> Iterator[Step]:
    """Yield the steps of a graph's trace, in order."""
    spans = choose_spans(trace.spans, np.isin(trace.spans["kind"], (Kind.WAIT, Kind.STEP, Kind.NODE)))
    numbers = _numbered(spans)
    order = np.lexsort((spans["start"], numbers))
    first = np.flatnonzero(np.diff(numbers[order], prepend=NO_STEP - 1))
    for places in np.split(order, first[1:]):
        own = spans[places]
        if not places.size or numbers[places[0]] == NO_STEP:
            continue
        tiles, sends = {}, dict[int, Tile]()
        for rank in np.unique(own["rank"]).tolist():
            rows = own[own["rank"] == rank].tolist()
            if made := _tiles(rank, [_Span(*row) for row in rows], sends):
                tiles[rank] = made
        if tiles:
            begin = min(each[0].begin for each in tiles.values())
            end = max(each[-1].end for each in tiles.values())
            yield Step(int(numbers[places[0]]), begin, end, tiles, _path(tiles, sends, begin))


def _numbered(spans: Spans) -> NDArray[np.int64]:
    """Return the step of each span: where it has none, as later waits, that of the one before in its lane."""
    order = np.lexsort((spans["start"], spans["worker"], spans["rank"]))
    step = spans["step"][order].astype(np.int64)
    known = np.maximum.accumulate(np.where(step != NO_STEP, np.arange(step.size), 0))
    found = np.empty(step.size, np.int64)
    found[order] = step[known]
    return found


class _Span(NamedTuple):
    """A row of a trace, by the fields of SPAN."""

    start: float
    end: float
    sample: int
    bytes: int
    flow: int
    epoch: int
    step: int
    samples: int
    peer: int
    kind: int
    place: int
    worker: int
    rank: int

    @property
    def is_received(self) -> bool:
        return self.kind == Kind.NODE and self.peer != NO_PEER

    @property
    def doing(self) -> Doing:
        if self.kind != Kind.NODE:
            return Doing.WAITING if self.kind == Kind.WAIT else Doing.BETWEEN
        return Doing.SENDING if self.flow != NO_FLOW else Doing.COMPUTING


#: Where spans overlap, the first of these counts: a node may ask to wait, and others run meanwhile.
_RANK = {Doing.WAITING: 3, Doing.COMPUTING: 2, Doing.SENDING: 1, Doing.BETWEEN: 0}


def _tiles(rank: int, spans: Sequence[_Span], sends: dict[int, Tile]) -> list[Tile]:
    """Return what a worker did in a step, in order. sends: gets its Sends, by flow."""
    shown = [each for each in spans if not each.is_received and each.end > each.start]
    marks = sorted(
        mark for n, each in enumerate(shown) for mark in ((each.start, True, n), (each.end, False, n))
    )
    ends = _Ends(spans)
    tiles: list[tuple[float, float, int]] = []
    active, at = set[int](), 0.0
    for time, begins, number in marks:
        if time > at and active:
            now = max(active, key=lambda n: (_RANK[shown[n].doing], shown[n].start, shown[n].end))
            if tiles and tiles[-1][1:] == (at, now):
                tiles[-1] = (tiles[-1][0], time, now)
            else:
                tiles.append((at, time, now))
        at = time
        (active.add if begins else active.discard)(number)
    found, waited_until = [], -math.inf
    for begin, end, number in tiles:
        span = shown[number]
        if span.doing == Doing.WAITING:
            found.append(ends.explained(Tile(rank, begin, end, span.doing)))
            waited_until = end
            continue
        is_node = span.kind == Kind.NODE
        # A node that waits is at work again only after that.
        since = max(span.start, waited_until) if is_node else begin
        found.append(Tile(rank, begin, end, span.doing, span.sample if is_node else NO_SAMPLE, since=since))
    for span in spans:
        if span.kind == Kind.NODE and span.flow != NO_FLOW and not span.is_received:
            sends[span.flow] = Tile(rank, span.start, span.end, Doing.SENDING, span.sample)
    return found


class _Ends:
    """Finds what a worker waited for in its part of a step: a wait ends as the node that it was for ends."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        nodes = [
            each
            for each in spans
            if each.kind == Kind.NODE and (each.is_received or each.doing == Doing.COMPUTING)
        ]
        self._nodes = sorted(nodes, key=lambda each: each.end)
        self._ends = [each.end for each in self._nodes]

    def explained(self, wait: Tile) -> Tile:
        """Return a wait with what it was for. What ended with it is recorded after it."""
        for node in self._nodes[bisect_left(self._ends, wait.end) :]:
            if node.is_received:
                return wait._replace(doing=Doing.RECEIVING, node=node.sample, peer=node.peer, flow=node.flow)
            if node.start < wait.end:
                return wait._replace(node=node.sample)
        return wait


def _path(tiles: Mapping[int, Sequence[Tile]], sends: Mapping[int, Tile], begin: float) -> list[Tile]:
    """Return what a step waited for, in order: from its end back, on one worker after the other."""
    rank = max(tiles, key=lambda each: tiles[each][-1].end)
    at, path, seen = tiles[rank][-1].end, list[Tile](), set[tuple[int, float]]()
    while True:
        own = tiles[rank]
        place = bisect_left(own, at, key=lambda each: each.begin) - 1
        if place < 0:
            break
        tile = own[place]
        # A node of which others began meanwhile is followed back to its own begin.
        here = tile._replace(begin=min(tile.begin, tile.since), end=min(tile.end, at))
        send = sends.get(tile.flow)
        # What was to be sent when the wait began took its time on the way; what was not is what the wait was for.
        is_late = send is not None and send.begin > tile.begin and send.rank in tiles
        if send is None or not is_late or (rank, tile.begin) in seen:
            path.append(here)
            at = here.begin
            continue
        seen.add((rank, tile.begin))
        path.append(here._replace(begin=min(max(send.end, here.begin), here.end)))
        path.append(send._replace(begin=min(send.begin, here.end), end=min(send.end, here.end)))
        rank, at = send.rank, min(send.begin, here.end)
    if at > begin:
        path.append(Tile(rank, begin, at, Doing.BETWEEN))
    return [each for each in reversed(path) if each.seconds > 0]


def _slow(trace: Trace, step: Step) -> SlowStep:
    held, nodes = defaultdict[int, float](float), defaultdict[tuple[int, str], float](float)
    for tile in step.path:
        held[tile.rank] += tile.seconds
        nodes[tile.rank, describe_tile(trace, tile)] += tile.seconds
    rank = max(held, key=held.__getitem__)
    node = max((key for key in nodes if key[0] == rank), key=nodes.__getitem__)[1]
    return SlowStep(step.number, step.begin, step.seconds, trace.workers[rank], held[rank], node)


def _largest_first(seconds: Mapping[Any, float]) -> dict[Any, float]:
    return dict(sorted(seconds.items(), key=lambda each: -each[1]))
