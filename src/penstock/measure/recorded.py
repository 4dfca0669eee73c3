"""The recorded run of a job: as one trace, or piece by piece where a day of it should not be in memory at once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.trace import NO_STEP, Kind, Spans, Trace, read_trace
from penstock.trace.file import ids_in, read_outline, spans_in
from penstock.trace.schema import NO_EPOCH, NO_FLOW, SPAN, GroupIds, choose_spans, join_spans
from penstock.trace.summary import Summary, joined_epochs

#: What is looked at for a wait begins this long before it, at the latest.
ASKED_BEFORE_SECONDS = 0.5
#: Spans that are kept for waits to come, at most: where batches that nobody asks for stay ahead for ever.
_MOST_KEPT = 1 << 16
#: Loaders of a rank that a note names.
_MOST_NAMED = 4


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
    """A run.

    outline: all of it but spans and ids, which its parts have; of several, with the meta of the first.
    loaders: how many one rank had at most. notes: what a reader of its figures has to know.
    """

    outline: Trace
    parts: tuple[Part, ...]
    loaders: int = 1
    notes: tuple[str, ...] = ()

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
        """Return what the loader of each rank recorded; all of a run of one file.

        Raises: ConfigError if a rank had several.
        """
        if self.loaders > 1:
            raise ConfigError(self.only_of_one)
        loaders = [part for part in self.parts if not part.outline.meta.get("snapshots")]
        return [_read(part.outline, [part]) for part in loaders] if len(loaders) > 1 else [self.trace()]

    @property
    def sources(self) -> list[str]:
        """What its loaders read, each once."""
        found = (part.outline.meta.get("source") for part in self.parts)
        return list(dict.fromkeys(str(source) for source in found if source))

    @property
    def only_of_one(self) -> str:
        """Why a run of several loaders is not predicted."""
        return (
            f"a rank had {self.loaders} loaders, and a prediction is of one: give penstock explain a .trace in "
            "the run's folder"
        )


def _read(outline: Trace, parts: Sequence[Part]) -> Trace:
    ids = {key: samples for part in parts for some in part.ids() for key, samples in some.items()}
    return replace(outline, spans=join_spans(spans for part in parts for spans in part.spans()), ids=ids)


def read_run(path: str | os.PathLike[str]) -> Trace:
    """Read a trace, or a folder with the traces of a job's ranks (*.trace), as one.

    Of several loaders of one rank, as one for each epoch or one for training and one for validation, all count: the
    epochs of each are numbered on from those of the one before. Of a graph's sessions, the one with the largest trace
    counts where there is no loader. What snapshot stores recorded apart is added.
    Raises: ConfigError if the folder has no trace; what `read_trace` raises.
    """
    if not Path(path).is_dir():
        return read_trace(path)
    return open_run(path).trace()


def open_run(path: str | os.PathLike[str]) -> Run:
    """Return what `read_run` does, to be read piece by piece. What is no file of a disk is read at once."""
    if not Path(path).is_dir() and not Path(path).is_file():
        return Run.of(read_trace(path))
    extent_of = cache(_extent_of)  # it reads the file
    files = _chosen(path, extent_of) if Path(path).is_dir() else [(0, Path(path), read_outline(path))]
    moves, loaders, notes = _numbered_on(files, extent_of)
    sessions = [file.name for _, file, outline in files if outline.meta.get("graph")]
    if sessions and len(files) < len(list(Path(path).glob("*.trace"))):
        notes += (f"of several sessions of a rank one counts, that with the largest trace: {sessions[0]}",)
    files = [
        (rank, file, _outline_later(outline, moved))
        for (rank, file, outline), moved in zip(files, moves, strict=True)
    ]
    parts = tuple(
        Part(outline, partial(_spans_later, file, moved), partial(_ids_later, file, moved))
        for (_, file, outline), moved in zip(files, moves, strict=True)
    )
    outline = files[0][2] if len(files) == 1 else _joined([(rank, each) for rank, _, each in files])
    return Run(outline, parts, loaders, notes)


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


def _chosen(
    folder: str | os.PathLike[str], extent_of: Callable[[Path, Trace], _Extent]
) -> list[tuple[int, Path, Trace]]:
    """Return the files that make a run, by rank: (rank, file, its outline)."""
    files = sorted(Path(folder).glob("*.trace"), key=lambda file: file.stat().st_size)
    if not files:
        raise ConfigError(
            f"{os.fspath(folder)} has no *.trace in it: give a trace, or the folder that ranks wrote to"
        )
    opened = [(_rank_of(file, outline := read_outline(file)), file, outline) for file in files]
    # A session that reads by a loader waits for what the loader waits for: once is enough.
    opened.sort(key=lambda each: not each[2].meta.get("graph"))
    stores = [each for each in opened if each[2].meta.get("snapshots")]
    by_rank: dict[int, list[tuple[int, Path, Trace]]] = {}
    for each in opened:
        if not each[2].meta.get("snapshots"):
            by_rank.setdefault(each[0], []).append(each)
    return [each for rank in sorted(by_rank) for each in _loaders_of(by_rank[rank], extent_of)] + stores


def _loaders_of(
    files: list[tuple[int, Path, Trace]], extent_of: Callable[[Path, Trace], _Extent]
) -> list[tuple[int, Path, Trace]]:
    """Return those files of a rank that count, as they began. files: of sessions first, the largest last."""
    loaders = [each for each in files if not each[2].meta.get("graph")] if len(files) > 1 else []
    # One that was made and hardly used has nothing to tell.
    loaders = [each for each in loaders if extent_of(*each[1:]).has_waits]
    loaders.sort(key=lambda each: (math.inf if each[2].begun is None else each[2].begun, each[1].name))
    return loaders or files[-1:]


def _rank_of(file: Path, outline: Trace) -> int:
    rank = outline.meta.get("rank")
    if isinstance(rank, int):
        return rank
    first = next(iter(spans_in(file)), np.empty(0, SPAN))
    return int(first["rank"][0]) if first.size else 0


class _Extent(NamedTuple):
    """Which epochs a file names, the last flow in it, and whether anybody waited."""

    first_epoch: int
    last_epoch: int
    last_flow: int
    has_waits: bool


def _extent_of(file: Path, outline: Trace) -> _Extent:
    sums = outline.left_out.epochs
    first = min((each.epoch for each in sums), default=2**31 - 1)
    last = max((each.epoch + each.epochs - 1 for each in sums), default=-1)
    flow, has_waits = 0, any(each.steps for each in sums)
    for spans in spans_in(file):
        epochs = spans["epoch"][spans["epoch"] != NO_EPOCH]
        first, last = min(first, int(epochs.min(initial=2**31 - 1))), max(last, int(epochs.max(initial=-1)))
        flow = max(flow, int(spans["flow"].max(initial=0)))
        has_waits = has_waits or bool((spans["kind"] == Kind.WAIT).any())
    return _Extent(min(first, max(last, 0)), last, flow, has_waits)


class _Moved(NamedTuple):
    """What is added to times, epochs and flows of a file, so that it is part of a run."""

    seconds: float = 0.0
    epochs: int = 0
    flows: int = 0


def _numbered_on(
    files: Sequence[tuple[int, Path, Trace]], extent_of: Callable[[Path, Trace], _Extent]
) -> tuple[list[_Moved], int, tuple[str, ...]]:
    """Return how each file is moved, how many loaders a rank had at most, and a note on their epochs.

    Each begins on the clock of the first. The loaders of a rank are numbered on, the second of every rank alike: ranks
    of a job step together.
    """
    begun = [outline.begun for _, _, outline in files]
    origin = min((seconds for seconds in begun if seconds is not None), default=0.0)
    moves = [_Moved(0.0 if seconds is None else seconds - origin) for seconds in begun]
    by_rank: dict[int, list[int]] = {}
    for place, (rank, _, outline) in enumerate(files):
        if not outline.meta.get("snapshots"):
            by_rank.setdefault(rank, []).append(place)
    most = max(by_rank.values(), key=len, default=[])
    if len(most) < 2:
        return moves, 1, ()
    next_epoch, flows = 0, 0
    names = []
    for number, shown in enumerate(most):
        extents = {
            places[number]: extent_of(*files[places[number]][1:])
            for places in by_rank.values()
            if number < len(places)
        }
        first = min(each.first_epoch for each in extents.values())
        epochs = max(0, next_epoch - first)
        for place in extents:
            moves[place] = moves[place]._replace(epochs=epochs, flows=flows)
        last = max(each.last_epoch for each in extents.values()) + epochs
        span = f"{first + epochs}" if last <= first + epochs else f"{first + epochs} to {last}"
        names.append(f"{span} of {files[shown][1].name}")
        next_epoch = max(next_epoch, last + 1)
        flows += max(each.last_flow for each in extents.values())
    more = [f"{len(names) - _MOST_NAMED:,} more"] if len(names) > _MOST_NAMED else []
    note = (
        f"rank {files[most[0]][0]} had {len(most)} loaders, which all count; their epochs are numbered on: "
        + ", ".join(names[:_MOST_NAMED] + more)
    )
    return moves, len(most), (note,)


def _spans_later(file: Path, moved: _Moved) -> Iterator[Spans]:
    """Yield the spans of a file as those of a run."""
    return (_later(spans, moved) for spans in spans_in(file))


def _later(spans: Spans, moved: _Moved) -> Spans:
    if any(moved):
        spans = spans.copy()
        for field in ("start", "end"):
            spans[field] += moved.seconds
        spans["epoch"][spans["epoch"] != NO_EPOCH] += moved.epochs
        spans["flow"][spans["flow"] != NO_FLOW] += np.uint64(moved.flows)
    return spans


def _ids_later(file: Path, moved: _Moved) -> Iterator[GroupIds]:
    for ids in ids_in(file):
        yield {(rank, flow + moved.flows): samples for (rank, flow), samples in ids.items()}


def _outline_later(outline: Trace, moved: _Moved) -> Trace:
    """Return an outline whose sums are those of a run, as its spans are."""
    left_out = outline.left_out
    epochs = tuple(replace(each, epoch=each.epoch + moved.epochs) for each in left_out.epochs)
    slowest = _later(left_out.slowest, moved)
    return replace(outline, left_out=Summary(left_out.spans, epochs, slowest))


def _joined(traces: list[tuple[int, Trace]]) -> Trace:
    """Return the outlines of several traces of a job, each with its rank, as one with the meta of the first."""
    left_out = Summary()
    for _, trace in traces:
        slowest = join_spans([left_out.slowest, trace.left_out.slowest])
        epochs = joined_epochs(left_out.epochs, trace.left_out.epochs)
        left_out = Summary(left_out.spans + trace.left_out.spans, tuple(epochs), slowest)
    outlines = [trace for _, trace in traces]
    sources = {(rank, str(trace.meta["source"])) for rank, trace in traces if trace.meta.get("source")}
    # Samples of two data sets have the same numbers.
    have_one_source = len(sources) == len({rank for rank, _ in sources})
    return Trace(
        np.empty(0, SPAN),
        outlines[0].meta,
        all(trace.is_complete for trace in outlines),
        left_out,
        names={sample: name for trace in outlines for sample, name in trace.names.items()}
        if have_one_source
        else {},
        hosts={rank: str(trace.hosts.get(rank, trace.meta.get("host", ""))) for rank, trace in traces},
        choices={rank: line for trace in outlines for rank, line in trace.choices.items()},
    )
