"""The recorded run of a job: as one trace, or piece by piece where a day of it should not be in memory at once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.trace import NO_STEP, Kind, Spans, Trace, read_trace
from penstock.trace.file import ids_in, read_outline, spans_in
from penstock.trace.schema import SPAN, GroupIds, choose_spans, join_spans
from penstock.trace.summary import Summary, joined_epochs

#: What is looked at for a wait begins this long before it, at the latest.
ASKED_BEFORE_SECONDS = 0.5
#: Spans that are kept for waits to come, at most: where batches that nobody asks for stay ahead for ever.
_MOST_KEPT = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one file has, or a trace. Each call begins anew.

    outline: all of it but spans and ids. spans, ids: yield these as they were written.
    """

    outline: Trace
    spans: Callable[[], Iterable[Spans]]
    ids: Callable[[], Iterable[GroupIds]]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A run. outline: all of it but spans and ids, which its parts have; of several, with the meta of the first."""

    outline: Trace
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, trace: Trace) -> Run:
        """Return a trace as a run of one piece."""
        outline = replace(trace, spans=np.empty(0, SPAN))
        return cls(outline, (Part(outline, lambda: [trace.spans], lambda: [trace.ids]),))

    def spans(self) -> Iterator[Spans]:
        """Yield the spans of all parts, one part after the other."""
        return chain.from_iterable(part.spans() for part in self.parts)

    def ids(self) -> Iterator[GroupIds]:
        """Yield the ids of all parts."""
        return chain.from_iterable(part.ids() for part in self.parts)

    def trace(self) -> Trace:
        """Return all of it."""
        return _read(self.outline, self.parts)

    def of_ranks(self) -> list[Trace]:
        """Return what the loader of each rank recorded; all of a run of one file."""
        loaders = [part for part in self.parts if not part.outline.meta.get("snapshots")]
        return [_read(part.outline, [part]) for part in loaders] if len(loaders) > 1 else [self.trace()]


def _read(outline: Trace, parts: Sequence[Part]) -> Trace:
    ids = {key: samples for part in parts for some in part.ids() for key, samples in some.items()}
    return replace(outline, spans=join_spans(spans for part in parts for spans in part.spans()), ids=ids)


def read_run(path: str | os.PathLike[str]) -> Trace:
    """Read a trace, or a folder with the traces of a job's ranks (*.trace), as one.

    Of several loaders of one rank, as one for training and one for validation, the one with the largest trace counts,
    and a graph's session where there is none. What snapshot stores recorded apart is added to it.
    Raises: ConfigError if the folder has no trace; what `read_trace` raises.
    """
    if not Path(path).is_dir():
        return read_trace(path)
    return open_run(path).trace()


def open_run(path: str | os.PathLike[str]) -> Run:
    """Return what `read_run` does, to be read piece by piece. What is no file of a disk is read at once."""
    if not Path(path).is_dir() and not Path(path).is_file():
        return Run.of(read_trace(path))
    files = _chosen(path) if Path(path).is_dir() else [(0, Path(path), read_outline(path))]
    begun = [outline.begun for _, _, outline in files]
    origin = min((seconds for seconds in begun if seconds is not None), default=0.0)
    parts = tuple(
        Part(
            each,
            partial(_spans_later, file, 0.0 if seconds is None else seconds - origin),
            partial(ids_in, file),
        )
        for (_, file, each), seconds in zip(files, begun, strict=True)
    )
    return Run(files[0][2] if len(files) == 1 else _joined([(rank, each) for rank, _, each in files]), parts)


def windows(part: Part) -> Iterator[tuple[Spans, Spans]]:
    """Yield all waits, each once, and before them the spans that they may hang on: (spans, waits).

    Threads' spans come in turns: what ended before a wait did may follow it, as far as later pieces have earlier ends.
    """
    first_ends = [float(spans["end"].min(initial=math.inf)) for spans in part.spans()]
    none_before = np.minimum.accumulate(np.array([*first_ends[1:], math.inf])[::-1])[::-1]
    kept, done = np.empty(0, SPAN), -math.inf
    latest: dict[int, int] = {}
    for more, until in zip(part.spans(), none_before.tolist(), strict=False):
        spans = join_spans([kept, more])
        is_wait = spans["kind"] == Kind.WAIT
        waits = choose_spans(spans, is_wait & (spans["end"] >= done) & (spans["end"] < until))
        done = until
        if waits.size:
            yield spans, waits
        if math.isfinite(until):
            kept = _still_needed(spans, waits, until, latest)


def _still_needed(spans: Spans, waits: Spans, until: float, latest: dict[int, int]) -> Spans:
    """Return the spans that waits may hang on which end at `until` or later.

    They are of batches that were not asked for yet, or ran beside them. latest: the last batch of each rank that was.
    """
    of_batch = waits["step"] != NO_STEP
    for rank in np.unique(waits["rank"][of_batch]).tolist():
        latest[rank] = max(
            latest.get(rank, -1), int(batch_keys(waits[of_batch & (waits["rank"] == rank)]).max())
        )
    keys, asked = batch_keys(spans), min(latest.values(), default=-1)
    is_ahead = (spans["step"] != NO_STEP) & (keys > asked)
    # Of a batch of several steps, some may be asked for.
    joint = (spans["kind"] == Kind.DECODE) & (spans["bytes"] > 0)
    is_ahead |= np.isin(keys, keys[joint][keys[joint] + spans["bytes"][joint] > asked])
    is_ahead |= (spans["kind"] == Kind.WAIT) & (spans["end"] >= until)
    since = min(until, float(spans["start"][is_ahead].min(initial=math.inf))) - ASKED_BEFORE_SECONDS
    if (spans["end"] >= since).sum() > _MOST_KEPT:
        since = float(np.partition(spans["end"], -_MOST_KEPT)[-_MOST_KEPT])
    return choose_spans(spans, spans["end"] >= since)


def batch_keys(spans: Spans) -> NDArray[np.int64]:
    """Return epoch and step as a number each, in the order of the run."""
    keys: NDArray[np.int64] = spans["epoch"].astype(np.int64) << 32 | (
        spans["step"].astype(np.int64) & 0xFFFFFFFF
    )
    return keys


def batch_of(key: int) -> tuple[int, int]:
    """Return the epoch and the step of such a number."""
    return key >> 32, key & 0xFFFFFFFF


def _chosen(folder: str | os.PathLike[str]) -> list[tuple[int, Path, Trace]]:
    """Return the files that make a run, by rank: (rank, file, its outline)."""
    files = sorted(Path(folder).glob("*.trace"), key=lambda file: file.stat().st_size)
    if not files:
        raise ConfigError(
            f"{os.fspath(folder)} has no *.trace in it: give a trace, or the folder that ranks wrote to"
        )
    opened = [(_rank_of(file, outline := read_outline(file)), file, outline) for file in files]
    # A session that reads by a loader waits for what the loader waits for: once is enough.
    opened.sort(key=lambda each: not each[2].meta.get("graph"))
    by_rank = {each[0]: each for each in opened if not each[2].meta.get("snapshots")}
    return [by_rank[rank] for rank in sorted(by_rank)] + [
        each for each in opened if each[2].meta.get("snapshots")
    ]


def _rank_of(file: Path, outline: Trace) -> int:
    rank = outline.meta.get("rank")
    if isinstance(rank, int):
        return rank
    first = next(iter(spans_in(file)), np.empty(0, SPAN))
    return int(first["rank"][0]) if first.size else 0


def _spans_later(file: Path, seconds: float) -> Iterator[Spans]:
    """Yield the spans of a file, on the clock of a run that began so much earlier."""
    for spans in spans_in(file):
        if seconds:
            spans = spans.copy()
            for field in ("start", "end"):
                spans[field] += seconds
        yield spans


def _joined(traces: list[tuple[int, Trace]]) -> Trace:
    """Return the outlines of several traces of a job, each with its rank, as one with the meta of the first."""
    left_out = Summary()
    for _, trace in traces:
        slowest = join_spans([left_out.slowest, trace.left_out.slowest])
        epochs = joined_epochs(left_out.epochs, trace.left_out.epochs)
        left_out = Summary(left_out.spans + trace.left_out.spans, tuple(epochs), slowest)
    outlines = [trace for _, trace in traces]
    return Trace(
        np.empty(0, SPAN),
        outlines[0].meta,
        all(trace.is_complete for trace in outlines),
        left_out,
        names={sample: name for trace in outlines for sample, name in trace.names.items()},
        hosts={rank: str(trace.hosts.get(rank, trace.meta.get("host", ""))) for rank, trace in traces},
        choices={rank: line for trace in outlines for rank, line in trace.choices.items()},
    )
