"""A recorded run as one page: it opens offline, asks nobody for anything, and has a table behind every picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.files import write_whole
from penstock.measure import charts
from penstock.measure.charts import COLOUR_OF_CAUSE, Colour, Layer, Section, escaped
from penstock.measure.compare import EpochPair, RunComparison, lay_over
from penstock.measure.explain import ADVICE, Explanation, explain, moment_rows, place_name
from penstock.measure.graph_page import sections_of_graph
from penstock.measure.graph_steps import explain_graph
from penstock.measure.recorded import Part, Run
from penstock.measure.replay import refuse_enough
from penstock.recordings.devices import DeviceRecord
from penstock.trace import NO_PLACE, SOURCE, SPAN, Kind, Spans, Trace, batch_waits, stall_causes
from penstock.trace.causes import loaded_with
from penstock.units import format_bytes, format_names, format_rate, format_seconds

#: Bounds what a page takes, whatever the run: points in time, points of a scatter, rows of a table, spans of a step.
_MOST_BINS, _MOST_POINTS, _MOST_ROWS, _MOST_SPANS = 240, 4000, 500, 400
#: Which counters of bytes are drawn over time.
_FLOWS = ":read_bytes", ":written_bytes", ":received_bytes", ":sent_bytes", ":asked_bytes"
_OF_KIND = {
    Kind.WAIT: Colour.RED,
    Kind.STEP: Colour.GREY,
    Kind.READ: Colour.ORANGE,
    Kind.HIT: Colour.SKY,
    Kind.DECODE: Colour.BLUE,
    Kind.SLOT: Colour.PURPLE,
    Kind.RETRY: Colour.YELLOW,
    Kind.LOCK: Colour.INK,
    Kind.START: Colour.GREY,
    Kind.NODE: Colour.GREEN,
}
_OF_SNAPSHOTS = {
    Kind.SAVE: Colour.RED,
    Kind.WRITE: Colour.BLUE,
    Kind.DRAIN: Colour.ORANGE,
    Kind.LOAD: Colour.GREEN,
}
#: Of staging, memory and the tiers below it, over and over.
_OF_PLACES = (Colour.ORANGE, Colour.SKY, Colour.GREEN, Colour.BLUE, Colour.PURPLE)
_STYLE = """
body{margin:0 auto;max-width:60rem;padding:1rem 1.25rem 4rem;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2.2rem 0 .4rem}a{color:var(--link)}
.skip{position:absolute;left:-99rem}.skip:focus{position:static}.verdict{font-size:1.15rem}.quiet{color:var(--quiet)}
section{border-top:1px solid var(--line)}.key{display:inline-block;width:.8rem;height:.8rem;margin-right:.4rem}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;list-style:none;margin:.3rem 0;padding:0;color:var(--quiet);
font-size:.85rem}summary{cursor:pointer;color:var(--link)}
.scroll{overflow:auto;max-height:24rem;background:var(--panel)}
table{border-collapse:collapse;font-size:.85rem}th,td{padding:.2rem .7rem;text-align:right;vertical-align:top}
th:first-child,td:first-child{text-align:left}thead th{border-bottom:1px solid var(--line)}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What a page says. verdict: its first sentence. facts: what was run, as name and value."""

    verdict: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    notes: Sequence[str]

    def html(self) -> str:
        """Return the page. What names files in it cannot be markup."""
        facts = " · ".join(f"{escaped(name)}: {escaped(value)}" for name, value in self.facts)
        notes = "".join(f"<li>{escaped(note)}</li>" for note in self.notes)
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Penstock: report of a run</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            # Nothing may be asked for, whatever a name in the trace tries.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<style>{charts.STYLE}{_STYLE}</style></head><body>"
            '<a class="skip" href="#content">Skip to the pictures</a><header><h1>Report of a run</h1>'
            f'<p class="verdict">{escaped(self.verdict)}</p><p class="quiet">{facts}</p>'
            f"{f'<ul>{notes}</ul>' if notes else ''}</header>"
            f'<main id="content">{"".join(map(_section, self.sections))}</main></body></html>\n'
        )


def report_of(run: Trace | Run | None, devices: DeviceRecord | None = None) -> Report:
    """Return the report of a run, of what a loader recorded and, with it or alone, of what `penstock watch` did.

    Raises: ConfigError if nobody waited for a batch in it, or there is neither.
    """
    if run is None:
        if devices is None:
            raise ConfigError("there is neither a trace nor the record of a watch: record a run first")
        return _report_of_devices(devices)
    run = run if isinstance(run, Run) else Run.of(run)
    trace = run.trace()
    if trace.workers:
        steps = explain_graph(trace)
        parts = [*sections_of_graph(trace, steps), *([] if devices is None else _of_devices(devices))]
        return Report(
            steps.verdict,
            _facts(trace),
            parts,
            [note for note in (steps.advice, *steps.notes, *run.notes) if note],
        )
    explained = explain(run)
    notes = list(explained.notes)
    sections = [_reasons(explained), _moments(explained), _over_time(trace), _traffic(trace), _hits(trace)]
    sections += [_accesses(trace), *_timelines(trace), _snapshots(trace)]
    try:
        sections.append(_against_prediction(run.of_ranks()))
    except ConfigError as error:
        notes.append(f"no prediction to compare with: {error}")
    if devices is not None:
        sections += _of_devices(devices)
    return Report(explained.verdict, _facts(trace), [part for part in sections if part is not None], notes)


def _facts(trace: Trace) -> list[tuple[str, str]]:
    shown = ("source", "started", "host", "policy")
    return [(name, str(trace.meta[name])) for name in shown if trace.meta.get(name)]


def _report_of_devices(devices: DeviceRecord) -> Report:
    """Return the report of a command that has no loader of ours inside."""
    meta, seconds = devices.meta, float(devices.seconds.max(initial=0.0))
    ended = "was cut off" if devices.exit_status is None else f"ended with status {devices.exit_status}"
    command = meta.get("command")
    facts = [("command", " ".join(map(str, command)) if isinstance(command, list) else "")]
    facts += [(name, str(meta[name])) for name in ("started", "host") if meta.get(name)]
    notes = [
        "no Penstock loader recorded in it, so that nothing is known of its waits: wrap its loader in penstock.watch"
    ]
    return Report(f"It ran for {format_seconds(seconds)} and {ended}.", facts, _of_devices(devices), notes)


def _of_devices(devices: DeviceRecord) -> list[Section]:
    """Return a section for each kind of counter that did anything: at the record's rate, bins where it has more."""
    if devices.rows.shape[0] < 2:
        return []
    kinds = {"disk": "Block devices", "net": "Network", "tree": "Bytes of the command's processes"}
    found = []
    for kind, title in kinds.items():
        read = devices.read_at(kind)
        moved = {
            name: growth
            for name in devices.columns
            if name.startswith(f"{kind}:")
            and name.endswith(_FLOWS)
            and (growth := devices.growth(name)[read[1:] - 1]).any()
        }
        if not moved:
            continue
        moments = devices.seconds[read]
        spans = np.zeros(read.size - 1, SPAN)
        spans["start"], spans["end"] = moments[:-1], moments[1:]
        edges = np.linspace(0.0, float(moments[-1]), min(10 * _MOST_BINS, spans.size) + 1)
        layers: list[Layer] = []
        for name, growth in moved.items():
            words = name.partition(":")[2].replace(":", " ").replace("_", " ")
            flow = binned(spans, growth.astype(np.float64), edges) / np.diff(edges)
            layers.append(Layer(words, flow, Colour(len(layers) % len(Colour))))
        picture = charts.lines(title, edges[:-1], layers, charts.seconds, format_rate)
        rows = [
            (f"{moment:.2f} s", *(format_rate(float(layer.values[place])) for layer in layers))
            for place, moment in enumerate(edges[:-1].tolist())
        ]
        found.append(Section(title, picture, ("from", *(layer.name for layer in layers)), rows))
    return found


def write_report(
    run: Trace | Run | None, path: str | os.PathLike[str], devices: DeviceRecord | None = None
) -> Report:
    """Write the report of a run as HTML; the file is replaced at once, when all of it is there.

    Raises: as `report_of`; OSError where the file cannot be written.
    """
    report = report_of(run, devices)
    write_whole(Path(path), report.html().encode())
    return report


def _section(part: Section) -> str:
    head = "".join(f'<th scope="col">{escaped(column)}</th>' for column in part.columns)
    rows = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{escaped(cell)}</th>' if not place else f"<td>{escaped(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in part.rows[:_MOST_ROWS]
    )
    note = f'<p class="quiet">{escaped(part.note)}</p>' if part.note else ""
    more = len(part.rows) - _MOST_ROWS
    cut = f'<p class="quiet">and {more:,} rows more</p>' if more > 0 else ""
    table = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(part.title)}, table"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>{cut}"
    )
    if part.picture:
        table = f"<details><summary>Table: {escaped(part.title)}</summary>{table}</details>"
    return f"<section><h2>{escaped(part.title)}</h2>{note}{part.picture}{table}</section>"


def _reasons(explained: Explanation) -> Section | None:
    lost = [(reason, seconds) for reason, seconds in explained.by_reason.items() if seconds > 0]
    if not lost:
        return None
    title = "What was waited for"
    picture = charts.bars(
        title,
        [(str(reason), [Layer("", np.array([seconds]), Colour.RED)]) for reason, seconds in lost[:8]],
        format_seconds,
    )
    rows = [
        (
            str(reason),
            format_seconds(seconds),
            f"{100 * seconds / explained.lost_seconds:.1f} %",
            f"{explained.batches[reason]:,}",
            ADVICE[reason],
        )
        for reason, seconds in lost
    ]
    return Section(title, picture, ("reason", "lost", "share", "batches", "what to do"), rows)


def _moments(explained: Explanation) -> Section | None:
    return Section("The worst moments", "", *moment_rows(explained)) if explained.moments else None


def binned(spans: Spans, amounts: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return float64[bins]: how much of each span's amount falls between edges, if it is spread evenly over the span.

    What has no duration counts where it is. O((n + bins) log n).
    """
    seconds = spans["end"] - spans["start"]
    lasts = seconds > 0
    found = np.histogram(spans["start"][~lasts], edges, weights=amounts[~lasts])[0].astype(np.float64)
    rate = amounts[lasts] / seconds[lasts]
    for field, sign in (("start", 1.0), ("end", -1.0)):
        order = np.argsort(spans[field][lasts], kind="stable")
        times = spans[field][lasts][order]
        until = np.searchsorted(times, edges)
        rates, moments = (
            np.concatenate([[0.0], np.cumsum(each[order])]) for each in (rate, rate * spans[field][lasts])
        )
        found += sign * np.diff(edges * rates[until] - moments[until])
    return np.maximum(found, 0.0)


def _edges(trace: Trace) -> NDArray[np.float64]:
    """Return the edges of at most `_MOST_BINS` times of the run, a twentieth of a second long at least."""
    first, last = float(trace.spans["start"].min()), float(trace.spans["end"].max())
    bins = max(1, min(_MOST_BINS, int((last - first) / 0.05)))
    return np.linspace(first, max(last, first + 1e-6), bins + 1)


def _over_time(trace: Trace) -> Section:
    edges = _edges(trace)
    width = np.diff(edges)
    steps = trace.spans[trace.spans["kind"] == Kind.STEP]
    waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
    ranks = max(1, np.unique(waits["rank"]).size)
    rate = binned(steps, steps["samples"].astype(np.float64), edges) / width
    stalls = [
        Layer(str(cause), 100 * binned(waits, seconds, edges) / width / ranks, COLOUR_OF_CAUSE[cause])
        for cause, seconds in stall_causes(trace.spans, waits).items()
    ]
    title = "Throughput and stall over time"
    picture = charts.stacked_areas(
        "Samples per second over time",
        edges,
        [Layer("samples per second", rate, Colour.GREY)],
        charts.seconds,
        lambda each: f"{each:,.0f}/s",
    ) + charts.stacked_areas(
        "Share of time waited, by cause", edges, stalls, charts.seconds, lambda each: f"{each:.0f} %"
    )
    rows = [
        (
            format_seconds(float(begin)),
            f"{rate[place]:,.1f}",
            *(f"{layer.values[place]:.1f} %" for layer in stalls),
        )
        for place, begin in enumerate(edges[:-1].tolist())
    ]
    note = "Above: samples that steps took. Below: share of the time that the training waited."
    if trace.left_out.spans:
        note += " The last part of a long run; the sums of all of it are above."
    return Section(
        title, picture, ("from", "samples per second", *(layer.name for layer in stalls)), rows, note
    )


def _moves(trace: Trace) -> tuple[Spans, list[int]]:
    moves = trace.spans[np.isin(trace.spans["kind"], (Kind.READ, Kind.HIT))]
    return moves, np.unique(moves["place"]).tolist()


def _colour_of_place(place: int) -> Colour:
    return Colour.RED if place == SOURCE else _OF_PLACES[place % len(_OF_PLACES)]


def _traffic(trace: Trace) -> Section | None:
    moves, places = _moves(trace)
    if not moves["bytes"].any():
        return None
    edges = _edges(trace)
    layers = []
    for place in places:
        own = moves[moves["place"] == place]
        flow = binned(own, own["bytes"].astype(np.float64), edges) / np.diff(edges)
        layers.append(Layer(place_name(trace, place), flow, _colour_of_place(place)))
    title = "Bytes read, by place"
    picture = charts.stacked_areas(title, edges, layers, charts.seconds, format_rate)
    rows = [
        (format_seconds(float(begin)), *(format_rate(float(layer.values[place])) for layer in layers))
        for place, begin in enumerate(edges[:-1].tolist())
    ]
    return Section(title, picture, ("from", *(layer.name for layer in layers)), rows)


def _hits(trace: Trace) -> Section | None:
    epochs = [each for each in trace.epochs() if each.steps]
    taken = []
    for each in epochs:
        by_place = dict(each.reads_by_place)
        for place, samples in each.hits_by_place.items():
            by_place[place] = by_place.get(place, 0) + samples
        taken.append(by_place)
    places = sorted({place for each in taken for place in each if place != NO_PLACE})
    if not places:
        return None
    title = "Where samples came from, by epoch"
    layers = [
        Layer(
            place_name(trace, place),
            np.array([float(each.get(place, 0)) for each in taken]),
            _colour_of_place(place),
        )
        for place in places
    ]
    if len(epochs) <= 20:
        each_row = [
            (epoch.name, [Layer(layer.name, layer.values[row : row + 1], layer.colour) for layer in layers])
            for row, epoch in enumerate(epochs)
        ]
        picture = charts.bars(title, each_row, lambda each: f"{each:,.0f}") + charts.legend(layers)
    else:
        edges = epochs[0].epoch + np.arange(len(epochs) + 1, dtype=np.float64)
        picture = charts.stacked_areas(
            title, edges, layers, lambda each: f"epoch {each:g}", lambda each: f"{each:,.0f}"
        )
    rows = [
        (epoch.name, *(f"{layer.values[row]:,.0f}" for layer in layers)) for row, epoch in enumerate(epochs)
    ]
    note = "Reads that fill a tier in the background count to the epoch that was being staged."
    return Section(title, picture, ("epoch", *(layer.name for layer in layers)), rows, note)


def _accesses(trace: Trace) -> Section | None:
    moves, places = _moves(trace)
    moves = moves[moves["sample"] >= 0]
    if not moves.size:
        return None
    chosen = moves[:: -(-moves.size // _MOST_POINTS)]
    layers = []
    rows = []
    for place in places:
        own = chosen[chosen["place"] == place]
        name = place_name(trace, place)
        layers.append((name, own["start"].copy(), own["sample"].astype(np.float64), _colour_of_place(place)))
        of_place = moves[moves["place"] == place]
        rows.append(
            (
                name,
                f"{of_place.size:,}",
                f"{int(of_place['samples'].sum()):,}",
                f"{np.unique(of_place['sample']).size:,}",
                format_bytes(float(of_place["bytes"].sum())),
            )
        )
    title = "Which samples were read when"
    note = f"The first sample of each read, upwards, over time; {chosen.size:,} of {moves.size:,} are drawn."
    picture = charts.points(title, layers)
    columns = ("from", "calls", "samples", "different first samples", "bytes")
    return Section(title, picture, columns, rows, note)


def _timelines(trace: Trace) -> list[Section]:
    """Return the batch of the median wait and of the longest one, span by span."""
    spans = trace.spans
    waits = batch_waits(spans)
    if not waits.size:
        return []
    order = np.argsort(waits["end"] - waits["start"], kind="stable")
    found = []
    for what, wait in (("median", waits[order[order.size // 2]]), ("longest", waits[order[-1]])):
        (first,) = loaded_with(spans[spans["kind"] == Kind.DECODE], np.array([wait]))["step"]
        is_own = np.isin(spans["kind"], (Kind.WAIT, Kind.STEP))
        own = spans[
            (spans["rank"] == wait["rank"])
            & (spans["epoch"] == wait["epoch"])
            & (spans["step"] == np.where(is_own, wait["step"], first))
        ]
        # Of a step with more spans than are shown, the wait and the step itself are.
        is_less = ~np.isin(own["kind"], (Kind.WAIT, Kind.STEP))
        own = own[np.lexsort((own["start"], is_less))[:_MOST_SPANS]]
        own = own[np.argsort(own["start"], kind="stable")]
        rows, drawn = [], []
        for kind, colour in _OF_KIND.items():
            of_kind = own[own["kind"] == kind]
            for worker in np.unique(of_kind["worker"]).tolist()[:8]:
                lane = of_kind[of_kind["worker"] == worker]
                drawn.append(
                    (
                        f"{kind.name.lower()}, worker {worker}"
                        if kind not in (Kind.WAIT, Kind.STEP)
                        else kind.name.lower(),
                        [(float(span["start"]), float(span["end"]), colour) for span in lane],
                    )
                )
        for span in own:
            if span["kind"] > max(Kind):
                continue
            rows.append(
                (
                    Kind(int(span["kind"])).name.lower(),
                    format_seconds(float(span["start"] - own["start"].min())),
                    format_seconds(float(span["end"] - span["start"])),
                    trace.name_of(int(span["sample"])),
                    f"{int(span['samples']):,}",
                    str(int(span["worker"])),
                )
            )
        title = f"The step with the {what} wait: epoch {int(wait['epoch'])}, step {int(wait['step'])}"
        seconds = format_seconds(float(wait["end"] - wait["start"]))
        columns = ("span", "began", "took", "first sample", "samples", "worker")
        found.append(Section(title, charts.lanes(title, drawn), columns, rows, f"It waited {seconds}."))
    return found


def _snapshots(trace: Trace) -> Section | None:
    spans = trace.spans[np.isin(trace.spans["kind"], list(_OF_SNAPSHOTS))]
    if not spans.size:
        return None
    title = "Saves and drains"
    drawn = [
        (kind.name.lower(), [(float(each["start"]), float(each["end"]), colour) for each in own[:1000]])
        for kind, colour in _OF_SNAPSHOTS.items()
        if (own := spans[spans["kind"] == kind]).size
    ]
    rows = [
        (
            Kind(int(span["kind"])).name.lower(),
            str(int(span["step"])),
            format_seconds(float(span["start"])),
            format_seconds(float(span["end"] - span["start"])),
            format_bytes(float(span["bytes"])),
        )
        for span in spans
    ]
    return Section(title, charts.lanes(title, drawn), ("what", "step", "began", "took", "bytes"), rows)


class _Laid(NamedTuple):
    """What is shown of a loader's run and its prediction.

    first_epoch: in the run. stall_seconds: measured. waits: seconds of each, measured and predicted, in order.
    """

    first_epoch: int
    epochs: list[EpochPair]
    stall_seconds: float
    waits: tuple[NDArray[np.float64], NDArray[np.float64]]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, part: Part, found: RunComparison) -> _Laid:
        waits = _waits_of(found.measured), _waits_of(found.predicted)
        return cls(part.first_epoch, found.epochs, found.stall_seconds[1], waits, found.notes)


def _waits_of(trace: Trace) -> NDArray[np.float64]:
    waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
    waits = waits[np.argsort(waits["start"], kind="stable")]
    seconds: NDArray[np.float64] = waits["end"] - waits["start"]
    return seconds


def _against_prediction(ranks: Sequence[Sequence[Part]]) -> Section:
    """Return the picture of one rank, of several the one that waited longest, and the table of all.

    ranks: their loaders; those that cannot be predicted are left out.
    Raises: ConfigError if none can be.
    """
    laid: dict[int, list[_Laid]] = {}
    refused: dict[str, list[str]] = {}
    reads: dict[int, int] = {}
    for part in (part for of_rank in ranks for part in of_rank):
        try:
            refuse_enough(reads, part.rank)
            found = lay_over(part.recorded())
        except ConfigError as error:
            refused.setdefault(str(error), []).append(part.name)
        else:
            laid.setdefault(part.rank, []).append(_Laid.of(part, found))
            reads[part.rank] = reads.get(part.rank, 0) + found.reads
    if not laid:
        raise ConfigError(next(iter(refused)))
    shown_rank, shown_loaders = max(laid.items(), key=lambda each: sum(one.stall_seconds for one in each[1]))
    grown = [
        np.cumsum(np.concatenate(waits)) for waits in zip(*(one.waits for one in shown_loaders), strict=True)
    ]
    size = min(each.size for each in grown)
    shown = np.unique(np.linspace(0, size - 1, min(size, 2 * _MOST_BINS)).astype(np.int64))
    layers = [
        Layer("measured", grown[0][shown], Colour.BLUE),
        Layer("predicted", grown[1][shown], Colour.RED),
    ]
    title = "Stall so far, predicted and measured"
    picture = charts.lines(title, shown, layers, lambda each: f"step {each:g}", format_seconds)
    several = len(laid) > 1
    rows = [
        (
            f"rank {rank}, epoch {pair.epoch + one.first_epoch}"
            if several
            else f"epoch {pair.epoch + one.first_epoch}",
            format_seconds(pair.predicted.stall_seconds),
            format_seconds(pair.measured.stall_seconds),
        )
        for rank, loaders in laid.items()
        for one in loaders
        for pair in one.epochs
    ]
    notes = [note for one in shown_loaders for note in one.notes]
    if len(shown_loaders) > 1:
        notes.append(
            f"Each of {len(shown_loaders)} loaders is predicted by itself; the picture has one after the other."
        )
    if several:
        notes.append(
            f"Each of the {len(laid)} ranks is predicted by itself; shown is rank {shown_rank}, which waited "
            "longest."
        )
    notes += [f"{format_names(names)} is not predicted: {why}." for why, names in refused.items()]
    return Section(title, picture, ("epoch", "predicted", "measured"), rows, " ".join(dict.fromkeys(notes)))
