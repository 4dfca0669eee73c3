"""What the steps of a graph on workers waited for, as tables and as parts of a page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.measure import charts
from penstock.measure.charts import Colour, Layer, Section
from penstock.measure.graph_steps import Doing, GraphExplanation, Step, describe_tile, steps_of
from penstock.trace import Trace
from penstock.units import format_bytes, format_seconds

_Table = tuple[Sequence[str], Sequence[Sequence[str]]]

_COLOUR_OF = {
    Doing.COMPUTING: Colour.GREEN,
    Doing.SENDING: Colour.BLUE,
    Doing.BETWEEN: Colour.GREY,
    Doing.RECEIVING: Colour.RED,
    Doing.WAITING: Colour.ORANGE,
}
#: What a step's timeline draws, the longest, and lists, the first.
_MOST_DRAWN, _MOST_ROWS = 2000, 400


def sections_of_graph(trace: Trace, found: GraphExplanation) -> list[Section]:
    """Return the parts of a page on a graph's steps. found: what `explain_graph` says of the trace."""
    if not found.steps:
        return []
    return [_workers(found), _nodes(found), _slowest(found), *_timelines(trace)]


def worker_rows(found: GraphExplanation) -> _Table:
    """Return columns and rows of what workers did, as parts of all steps' time."""
    columns = (
        "worker",
        "steps waited for it",
        *(str(doing) for doing in Doing),
        "tensors from",
        "not begun or done",
        "live tensors",
    )
    rows = [
        (
            each.task,
            f"{format_seconds(each.held_seconds)}, {found.share(each.held_seconds)}",
            *(found.share(each.doing.get(doing, 0.0)) for doing in Doing),
            ", ".join(f"{task} {found.share(seconds)}" for task, seconds in each.received.items()),
            found.share(max(0.0, found.seconds - sum(each.doing.values()))),
            format_bytes(each.live_bytes),
        )
        for each in found.workers
    ]
    return columns, rows


def node_rows(found: GraphExplanation) -> _Table:
    """Return columns and rows of the nodes and tensors that steps waited for longest."""
    rows = [
        (each.what, each.task, format_seconds(each.seconds), found.share(each.seconds), f"{each.times:,}")
        for each in found.nodes
    ]
    return ("node", "on", "steps waited", "share", "times"), rows


def slow_rows(found: GraphExplanation) -> _Table:
    """Return columns and rows of the slowest steps."""
    rows = [
        (
            f"{each.step:,}",
            format_seconds(each.start_seconds),
            format_seconds(each.seconds),
            each.task,
            format_seconds(each.held_seconds),
            each.node,
        )
        for each in found.slowest
    ]
    return ("step", "at", "took", "waited longest for", "so long", "most of it for"), rows


def _workers(found: GraphExplanation) -> Section:
    title = "What workers did"
    layers_of = {
        each.task: [
            Layer(str(doing), np.array([each.doing.get(doing, 0.0)]), colour)
            for doing, colour in _COLOUR_OF.items()
        ]
        for each in found.workers
    }
    every = [layer for layers in layers_of.values() for layer in layers if layer.values.any()]
    picture = charts.bars(title, list(layers_of.items()), format_seconds)
    picture += charts.legend(list({layer.name: layer for layer in every}.values()))
    return Section(
        title, picture, *worker_rows(found), f"In {format_seconds(found.seconds)} of {found.steps:,} steps."
    )


def _nodes(found: GraphExplanation) -> Section:
    title = "What steps waited for longest"
    rows = [(each.what, [Layer("", np.array([each.seconds]), Colour.RED)]) for each in found.nodes]
    note = (
        "What a step's end followed from, one after the other: nodes that computed, and tensors on their way."
    )
    return Section(title, charts.bars(title, rows, format_seconds) if rows else "", *node_rows(found), note)


def _slowest(found: GraphExplanation) -> Section:
    return Section("The slowest steps", "", *slow_rows(found))


def _timelines(trace: Trace) -> list[Section]:
    """Return the median step and the longest one, worker by worker."""
    lengths = {each.number: each.seconds for each in steps_of(trace)}
    order = sorted(lengths, key=lengths.__getitem__)
    shown = {"median": order[len(order) // 2], "longest": order[-1]}
    steps = {each.number: each for each in steps_of(trace) if each.number in shown.values()}
    return [_timeline(trace, what, steps[number]) for what, number in shown.items()]


def _timeline(trace: Trace, what: str, step: Step) -> Section:
    title = f"The {what} step: {step.number:,}"
    tiles = [each for tiles in step.tiles.values() for each in tiles]
    longest = sorted(tiles, key=lambda each: -each.seconds)[:_MOST_DRAWN]
    drawn = [
        (
            trace.workers[rank],
            [(each.begin, each.end, _COLOUR_OF[each.doing]) for each in longest if each.rank == rank],
        )
        for rank in step.tiles
    ]
    seen = {each.doing for each in tiles}
    picture = charts.lanes(title, drawn)
    picture += charts.legend(
        [Layer(str(doing), np.zeros(0), colour) for doing, colour in _COLOUR_OF.items() if doing in seen]
    )
    rows = [
        (
            trace.workers[each.rank],
            str(each.doing),
            format_seconds(each.begin - step.begin),
            format_seconds(each.seconds),
            describe_tile(trace, each),
        )
        for each in sorted(tiles, key=lambda each: each.begin)[:_MOST_ROWS]
    ]
    note = f"It took {format_seconds(step.seconds)}."
    return Section(title, picture, ("worker", "what", "began", "took", "node"), rows, note)
