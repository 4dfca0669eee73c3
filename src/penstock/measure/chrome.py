"""A trace as chrome://tracing and Perfetto read it: a lane for each thread, arrows from reads to decodes to steps."""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.files import replacing
from penstock.trace import NO_FLOW, NO_PEER, NO_SAMPLE, Kind, Spans, Trace
from penstock.trace.causes import loaded_with
from penstock.trace.stages import describe_place

_OF_TRAINING, _MOVES = (Kind.WAIT, Kind.STEP), (Kind.READ, Kind.HIT)
_NAMES = {kind.value: kind.name.lower() for kind in Kind}


def write_chrome(trace: Trace, path: str | os.PathLike[str], more: Iterable[dict[str, Any]] = ()) -> None:
    """Write a trace in the Trace Event Format, as JSON, gzipped if the path ends in .gz: both viewers take either.

    An arrow leads from each read to the decoding of what it brought, by their flow or, where none has it, by batch
    and first sample; another from the decode that ended last to the step of its batch; and one from each tensor that a
    worker of a graph sends to the wait for it on another.

    more: events to write behind those of the trace, such as `penstock.measure.gpu_lanes.gpu_lanes`.
    Raises: ConfigError if the trace has no span of a kind that is known; OSError where the file cannot be written.
    Source: "Trace Event Format", Google, 2016; complete (X), metadata (M) and flow events (s, f).
    """
    spans = trace.spans[trace.spans["kind"] <= max(Kind).value]
    spans = spans[np.argsort(spans["start"], kind="stable")]
    if not spans.size:
        raise ConfigError("the trace has no span, so there is nothing to show: let the run read something")
    lanes, names = _lanes(spans)
    with replacing(Path(path)) as unfinished:
        zips = Path(path).suffix == ".gz"
        with gzip.open(unfinished, "wt") if zips else unfinished.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(dict(trace.meta)) + ",\n")
            file.write('"traceEvents": [\n')
            begins = ""
            for event in itertools.chain(_events(trace, spans, lanes, names), more):
                file.write(begins + json.dumps(event))
                begins = ",\n"
            file.write("\n]}\n")


def _events(
    trace: Trace, spans: Spans, lanes: NDArray[np.int64], names: Sequence[tuple[int, int, str]]
) -> Iterator[dict[str, Any]]:
    for rank in np.unique(spans["rank"]).tolist():
        host = f" on {trace.hosts[rank]}" if rank in trace.hosts else ""
        yield _about("process_name", rank, 0, trace.workers.get(rank, f"rank {rank}{host}"))
    for rank, lane, name in names:
        yield _about("thread_name", rank, lane, name)
    for span, lane in zip(spans, lanes.tolist(), strict=True):
        yield {
            "ph": "X",
            "name": _name(trace, span),
            "pid": int(span["rank"]),
            "tid": lane,
            "ts": _micros(span["start"]),
            "dur": _micros(span["end"] - span["start"]),
            "args": _arguments(trace, span),
            **_highlight(span),
        }
    for number, (name, tail, head) in enumerate(_arrows(spans), 1):
        for phase, place in (("s", tail), ("f", head)):
            span = spans[place]
            # In its middle: at an edge, a reader may take the slice before or after for the one that is meant.
            middle = (float(span["start"]) + float(span["end"])) / 2
            event = {"ph": phase, "id": number, "cat": "flow", "name": name}
            event |= {"pid": int(span["rank"]), "tid": int(lanes[place]), "ts": _micros(middle)}
            yield event | ({"bp": "e"} if phase == "f" else {})


def _highlight(span: Any) -> dict[str, str]:
    """Return the colour of waits of a graph: for another worker, and for a queue, a mutex or a batch."""
    if span["kind"] == Kind.NODE and span["peer"] != NO_PEER:
        return {"cname": "terrible", "cat": "wait for communication"}
    return {"cname": "bad", "cat": "wait"} if span["kind"] == Kind.WAIT else {}


def _arrows(spans: Spans) -> Iterator[tuple[str, int, int]]:
    """Name, tail and head of each arrow, as places in `spans`."""
    moves: dict[tuple[int, ...], int] = {}
    last: dict[tuple[int, int, int], int] = {}
    for place in np.flatnonzero(np.isin(spans["kind"], [kind.value for kind in _MOVES])).tolist():
        for key in _keys_of(spans[place]):
            moves[key] = place
    sent = np.flatnonzero((spans["kind"] == Kind.NODE.value) & (spans["flow"] != NO_FLOW))
    tails = {int(spans[place]["flow"]): place for place in sent.tolist() if spans[place]["peer"] == NO_PEER}
    for place in sent.tolist():
        if spans[place]["peer"] != NO_PEER and int(spans[place]["flow"]) in tails:
            yield "tensor", tails[int(spans[place]["flow"])], place
    for place in np.flatnonzero(spans["kind"] == Kind.DECODE.value).tolist():
        span = spans[place]
        tail = next((moves[key] for key in _keys_of(span) if key in moves), None)
        if tail is not None:
            yield "bytes", tail, place
        batch = int(span["rank"]), int(span["epoch"]), int(span["step"])
        if batch not in last or spans[last[batch]]["end"] <= span["end"]:
            last[batch] = place
    steps = np.flatnonzero(spans["kind"] == Kind.STEP.value)
    loaded = loaded_with(spans[spans["kind"] == Kind.DECODE.value], spans[steps])
    for place, span in zip(steps.tolist(), loaded, strict=True):
        batch = int(span["rank"]), int(span["epoch"]), int(span["step"])
        if batch in last:
            yield "batch", last[batch], place


def _keys_of(span: Any) -> Iterator[tuple[int, ...]]:
    """By what a move and a decode of the same bytes agree, the best first."""
    rank = int(span["rank"])
    if span["flow"] != NO_FLOW:
        yield rank, int(span["flow"])
    yield rank, int(span["epoch"]), int(span["step"]), int(span["sample"])


def _lanes(spans: Spans) -> tuple[NDArray[np.int64], list[tuple[int, int, str]]]:
    """Return the lane of each span, and (rank, lane, name) of all lanes.

    A thread has one, or several where its spans overlap: batches that wait for a slot, reads in virtual time.
    """
    lanes = np.zeros(spans.size, np.int64)
    names: list[tuple[int, int, str]] = []
    for thread in np.unique(spans[["rank", "worker"]]):
        places = np.flatnonzero((spans["rank"] == thread["rank"]) & (spans["worker"] == thread["worker"]))
        name = _thread_name(set(spans["kind"][places].tolist()), int(thread["worker"]))
        #: When each lane of the thread is free again, and its number.
        free: list[tuple[float, int]] = []
        for place in places.tolist():
            if free and free[0][0] <= spans["start"][place]:
                _, lane = heapq.heappop(free)
            else:
                lane = len(names)
                names.append((int(thread["rank"]), lane, name))
            heapq.heappush(free, (float(spans["end"][place]), lane))
            lanes[place] = lane
    return lanes, names


def _thread_name(kinds: set[int], worker: int) -> str:
    if Kind.NODE in kinds:
        return f"runs of the graph, lane {worker}"
    if kinds & set(_OF_TRAINING):
        return "training"
    if kinds == {Kind.SLOT}:
        return "batches waiting for a slot"
    if kinds <= {Kind.SAVE, Kind.WRITE, Kind.DRAIN, Kind.LOAD}:
        return " and ".join(sorted(_NAMES[kind] for kind in kinds)) + " of snapshots"
    return f"{'decode' if Kind.DECODE in kinds else 'read'} worker {worker}"


def _name(trace: Trace, span: Any) -> str:
    name = _NAMES[int(span["kind"])]
    if span["kind"] == Kind.NODE:
        peer = int(span["peer"])
        received = "" if peer == NO_PEER else f" received from {trace.workers.get(peer, f'rank {peer}')}"
        return trace.name_of(int(span["sample"])) + received
    if span["kind"] not in _MOVES:
        return name
    return f"{name} from {describe_place(int(span['place']))}" + (
        f" of rank {span['peer']}" if span["peer"] != NO_PEER else ""
    )


def _arguments(trace: Trace, span: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"epoch": int(span["epoch"]), "step": int(span["step"])}
    for field in ("samples", "bytes", "flow"):
        if span[field]:
            is_steps = field == "bytes" and span["kind"] == Kind.DECODE
            arguments["further_steps" if is_steps else field] = int(span[field])
    sample = int(span["sample"])
    if sample != NO_SAMPLE:
        arguments["sample"] = sample
        if sample in trace.names:
            arguments["name"] = trace.names[sample]
    return arguments


def _about(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


def _micros(seconds: Any) -> float:
    return round(1e6 * float(seconds), 3)
