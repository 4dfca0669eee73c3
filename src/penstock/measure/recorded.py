"""The recorded run of a job: as one trace, or piece by piece where a day of it should not be in memory at once."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.plan.recorded import RecordedPlan, join_ids, read_trace, with_planned_ids
from penstock.trace import NO_STEP, Kind, Spans, Trace
from penstock.trace.file import ids_in, read_outline, spans_in
from penstock.trace.schema import AS_PLANNED, NO_EPOCH, NO_FLOW, SPAN, GroupIds, choose_spans, join_spans
from penstock.trace.summary import Summary, joined_epochs
from penstock.units import format_names

#: What is looked at for a wait begins this long before it, at the latest.
ASKED_BEFORE_SECONDS = 0.5
#: Spans that are kept for waits to come, at most: where batches that nobody asks for stay ahead for ever.
_MOST_KEPT = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one file has, or a trace. Each call begins anew.

    outline: all of it but spans and ids. spans, ids: yield these as they were written, but for times, epochs, flows and
        ranks, which are the run's. recorded: returns all of it, with its own.
    rank: of whom it is. name: of the file. first_epoch: what is added to its epochs in the run.
    """

    outline: Trace
    spans: Callable[[], Iterable[Spans]]
    ids: Callable[[], Iterable[GroupIds]]
    recorded: Callable[[], Trace]
    rank: int = 0
    name: str = ""
    first_epoch: int = 0


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
        trace = with_planned_ids(trace)
        outline = replace(trace, spans=np.empty(0, SPAN))
        return cls(outline, (Part(outline, lambda: [trace.spans], lambda: [trace.ids], lambda: trace),))

    def spans(self) -> Iterator[Spans]:
        """Yield the spans of all parts, one part after the other."""
        return chain.from_iterable(part.spans() for part in self.parts)

    def ids(self) -> Iterator[GroupIds]:
        """Yield the ids of all parts."""
        return chain.from_iterable(part.ids() for part in self.parts)

    def trace(self) -> Trace:
        """Return all of it."""
        return _read(self.outline, self.parts)

    def of_ranks(self) -> list[list[Part]]:
        """Return the loaders of each rank, as they began; one part where it has one loader, or none."""
        by_rank: dict[int, list[Part]] = {}
        for part in self.parts:
            if not part.outline.meta.get("snapshots"):
                by_rank.setdefault(part.rank, []).append(part)
        loaders = list(by_rank.values())
        if sum(map(len, loaders)) == 1:
            return [[replace(loaders[0][0], recorded=self.trace)]]
        return loaders or [[Part(self.outline, self.spans, self.ids, self.trace)]]

    @property
    def watched(self) -> list[bool]:
        """Of each loader, whether it is not Penstock's, but another one in `penstock.watch`."""
        return [part.outline.is_watched for of_rank in self.of_ranks() for part in of_rank]

    @property
    def sources(self) -> list[str]:
        """What its loaders read, each once."""
        found = (part.outline.meta.get("source") for part in self.parts)
        return list(dict.fromkeys(str(source) for source in found if source))


def _read(outline: Trace, parts: Sequence[Part]) -> Trace:
    ids = join_ids(some for part in parts for some in part.ids())
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
    if Path(path).is_dir():
        files, notes = _chosen(path, extent_of)
    else:
        outline = read_outline(path)
        files, notes = [_File(_rank_of(Path(path), outline), Path(path), outline)], ()
    moves, loaders, numbered = _numbered_on(files, extent_of)
    notes += numbered
    sessions = [each.path.name for each in files if each.outline.meta.get("graph")]
    if sessions and len(files) < len(list(Path(path).glob("*.trace"))):
        notes += (f"of several sessions of a rank one counts, that with the largest trace: {sessions[0]}",)
    parts = tuple(
        Part(
            _outline_later(each.outline, moved),
            partial(_spans_later, each.path, moved),
            partial(_ids_later, each.path, each.outline, moved),
            partial(read_trace, each.path),
            each.rank,
            each.path.name,
            moved.epochs,
        )
        for each, moved in zip(files, moves, strict=True)
    )
    outline = parts[0].outline if len(parts) == 1 else _joined([(part.rank, part.outline) for part in parts])
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

    They are of batches that were not asked for yet, or ran meanwhile. latest: the last batch of each rank that was.
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


class _File(NamedTuple):
    """A file of a run, and the rank that it is of."""

    rank: int
    path: Path
    outline: Trace

    @property
    def process(self) -> tuple[str, int] | None:
        """Who wrote it, by host and number; None where it does not say."""
        host, process = self.outline.meta.get("host"), self.outline.meta.get("process")
        return (str(host), process) if isinstance(process, int) else None

    @property
    def begun(self) -> float:
        """When it began, in seconds since 1970; inf where it does not say."""
        return math.inf if self.outline.begun is None else self.outline.begun


def _chosen(
    folder: str | os.PathLike[str], extent_of: Callable[[Path, Trace], _Extent]
) -> tuple[list[_File], tuple[str, ...]]:
    """Return the files that make a run, by rank, and a note where ranks did not know theirs."""
    files = sorted(Path(folder).glob("*.trace"), key=lambda file: file.stat().st_size)
    if not files:
        raise ConfigError(
            f"{os.fspath(folder)} has no *.trace in it: give a trace, or the folder that ranks wrote to"
        )
    opened = [_File(_rank_of(file, outline := read_outline(file)), file, outline) for file in files]
    # A session that reads by a loader waits for what the loader waits for: once is enough.
    opened.sort(key=lambda each: not each.outline.meta.get("graph"))
    opened, notes = _told_apart(opened, extent_of)
    stores = [each for each in opened if each.outline.meta.get("snapshots")]
    by_rank: dict[int, list[_File]] = {}
    for each in opened:
        if not each.outline.meta.get("snapshots"):
            by_rank.setdefault(each.rank, []).append(each)
    return [
        each for rank in sorted(by_rank) for each in _loaders_of(by_rank[rank], extent_of)
    ] + stores, notes


def _told_apart(
    files: list[_File], extent_of: Callable[[Path, Trace], _Extent]
) -> tuple[list[_File], tuple[str, ...]]:
    """Give processes that recorded at once as one rank ranks of their own, in the order in which they began.

    One that knew its rank later, when it made other loaders, has been that rank from the first.
    Those of which one began after the other had ended are that rank, one after the other.
    """
    processes: dict[tuple[int, tuple[str, int]], list[_File]] = {}
    for each in files:
        if each.process is not None and math.isfinite(each.begun):
            processes.setdefault((each.rank, each.process), []).append(each)
    ranks = {each.rank for each in files}
    several = [rank for rank in sorted(ranks) if sum(of == rank for of, _ in processes) > 1]
    unused = (number for number in itertools.count() if number not in ranks)
    taken: dict[tuple[int, tuple[str, int]], int] = {}
    learned: dict[tuple[str, int], int] = {}
    notes = []
    for rank in several:
        times = sorted(
            (
                min(each.begun for each in mine),
                max(each.begun + extent_of(each.path, each.outline).last_seconds for each in mine),
                key,
            )
            for key, mine in processes.items()
            if key[0] == rank
        )
        if rank == 0 and any(begin < end for (_, end, _), (begin, _, _) in itertools.pairwise(times)):
            for *_, (_, who) in times:
                others = {of for of, process in processes if process == who} - {0}
                if len(others) == 1:
                    learned[who] = others.pop()
            times = [each for each in times if each[2][1] not in learned]
        #: Of each rank that they are taken for: when its latest process ended, and its number.
        lanes: list[tuple[float, int]] = []
        names = []
        for begin, end, key in times:
            place = next((place for place, (ended, _) in enumerate(lanes) if ended <= begin), len(lanes))
            if place == len(lanes):
                lanes.append((end, next(unused) if lanes else rank))
                host, process = key[1]
                names.append(f"{lanes[place][1]} process {process} of {host}")
            lanes[place] = max(end, lanes[place][0]), lanes[place][1]
            taken[key] = lanes[place][1]
        if len(lanes) > 1:
            notes.append(
                f"{len(lanes)} processes recorded at once as rank {rank}, which do not know their ranks; they are told "
                f"apart by process, in the order in which they began: rank {format_names(names)}. To have their own, "
                "start them by a launcher such as torchrun, or call torch.distributed.init_process_group first"
            )
    if learned:
        named = [f"{rank} process {process} of {host}" for (host, process), rank in sorted(learned.items())]
        notes.append(
            f"processes that recorded as rank 0 at first are the ranks that they knew later: rank {format_names(named)}"
        )
    taken |= {(0, who): taken.get((rank, who), rank) for who, rank in learned.items()}
    moved = [
        each if each.process is None else each._replace(rank=taken.get((each.rank, each.process), each.rank))
        for each in files
    ]
    return moved, tuple(notes)


def _loaders_of(files: list[_File], extent_of: Callable[[Path, Trace], _Extent]) -> list[_File]:
    """Return those files of a rank that count, as they began. files: of sessions first, the largest last."""
    loaders = [each for each in files if not each.outline.meta.get("graph")] if len(files) > 1 else []
    # One that was made and hardly used has nothing to tell.
    loaders = [each for each in loaders if extent_of(each.path, each.outline).has_waits]
    loaders.sort(key=lambda each: (each.begun, each.path.name))
    return loaders or files[-1:]


def _rank_of(file: Path, outline: Trace) -> int:
    rank = outline.meta.get("rank")
    if isinstance(rank, int):
        return rank
    first = next(iter(spans_in(file)), np.empty(0, SPAN))
    return int(first["rank"][0]) if first.size else 0


class _Extent(NamedTuple):
    """Which epochs a file names, the last flow in it, whether anybody waited, and when it ends."""

    first_epoch: int
    last_epoch: int
    last_flow: int
    has_waits: bool
    last_seconds: float


def _extent_of(file: Path, outline: Trace) -> _Extent:
    sums = outline.left_out.epochs
    first = min((each.epoch for each in sums), default=2**31 - 1)
    last = max((each.epoch + each.epochs - 1 for each in sums), default=-1)
    flow, has_waits, seconds = 0, any(each.steps for each in sums), 0.0
    for spans in spans_in(file):
        epochs = spans["epoch"][spans["epoch"] != NO_EPOCH]
        first, last = min(first, int(epochs.min(initial=2**31 - 1))), max(last, int(epochs.max(initial=-1)))
        flow = max(flow, int((spans["flow"] & np.uint64(AS_PLANNED - 1)).max(initial=0)))
        has_waits = has_waits or bool((spans["kind"] == Kind.WAIT).any())
        seconds = max(seconds, float(spans["end"].max(initial=0.0)))
    return _Extent(min(first, max(last, 0)), last, flow, has_waits, seconds)


class _Moved(NamedTuple):
    """What is added to times, epochs, flows and ranks of a file, so that it is part of a run."""

    seconds: float = 0.0
    epochs: int = 0
    flows: int = 0
    ranks: int = 0


def _numbered_on(
    files: Sequence[_File], extent_of: Callable[[Path, Trace], _Extent]
) -> tuple[list[_Moved], int, tuple[str, ...]]:
    """Return how each file is moved, how many loaders a rank had at most, and a note on their epochs.

    Each begins on the clock of the first. The loaders of a rank are numbered on, the second of every rank alike: ranks
    of a job step together.
    """
    origin = min((each.begun for each in files), default=0.0)
    moves = [
        _Moved(
            each.begun - origin if math.isfinite(each.begun) else 0.0, ranks=each.rank - _recorded_as(each)
        )
        for each in files
    ]
    by_rank: dict[int, list[int]] = {}
    for place, each in enumerate(files):
        if not each.outline.meta.get("snapshots"):
            by_rank.setdefault(each.rank, []).append(place)
    most = max(by_rank.values(), key=len, default=[])
    if len(most) < 2:
        return moves, 1, ()
    next_epoch, flows = 0, 0
    names = []
    for number, shown in enumerate(most):
        extents = {
            places[number]: extent_of(files[places[number]].path, files[places[number]].outline)
            for places in by_rank.values()
            if number < len(places)
        }
        first = min(each.first_epoch for each in extents.values())
        epochs = max(0, next_epoch - first)
        for place in extents:
            moves[place] = moves[place]._replace(epochs=epochs, flows=flows)
        last = max(each.last_epoch for each in extents.values()) + epochs
        span = f"{first + epochs}" if last <= first + epochs else f"{first + epochs} to {last}"
        names.append(f"{span} of {files[shown].path.name}")
        next_epoch = max(next_epoch, last + 1)
        flows += max(each.last_flow for each in extents.values())
    note = (
        f"rank {files[most[0]].rank} had {len(most)} loaders, which all count; their epochs are numbered on: "
        + format_names(names)
    )
    return moves, len(most), (note,)


def _recorded_as(file: _File) -> int:
    """Return the rank in the spans of a file. A watched loader knows its own only when they are made."""
    rank = file.outline.meta.get("rank")
    return 0 if file.outline.is_watched else rank if isinstance(rank, int) else file.rank


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
        spans["rank"] += np.uint32(moved.ranks % 2**32)
    return spans


def _ids_later(file: Path, outline: Trace, moved: _Moved) -> Iterator[GroupIds]:
    """Yield the groups that a file names, and those that its plan gives, as those of a run."""
    plan = RecordedPlan(outline.meta, lambda: _extent_of(file, outline).last_epoch)
    planned = map(plan.ids, spans_in(file))
    return (_IdsLater(ids, moved) for ids in chain(ids_in(file), planned))


@dataclass(frozen=True, slots=True, eq=False)
class _IdsLater(Mapping[tuple[int, int], NDArray[np.int64]]):
    """Groups of a file as those of a run; none is looked up before it is asked for."""

    ids: GroupIds
    moved: _Moved

    def __getitem__(self, key: tuple[int, int]) -> NDArray[np.int64]:
        return self.ids[key[0] - self.moved.ranks, key[1] - self.moved.flows]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((rank + self.moved.ranks, flow + self.moved.flows) for rank, flow in self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def _outline_later(outline: Trace, moved: _Moved) -> Trace:
    """Return an outline whose sums are those of a run, as its spans are."""
    left_out = outline.left_out
    epochs = tuple(replace(each, epoch=each.epoch + moved.epochs) for each in left_out.epochs)
    slowest = _later(left_out.slowest, moved)
    return replace(
        outline,
        left_out=Summary(left_out.spans, epochs, slowest),
        hosts={rank + moved.ranks: host for rank, host in outline.hosts.items()},
        choices={rank + moved.ranks: line for rank, line in outline.choices.items()},
    )


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
    hosts = {rank: str(trace.meta.get("host", "")) for rank, trace in traces}
    for trace in outlines:
        hosts |= trace.hosts  # those of a graph's workers are all in one file, next to those of its saves
    return Trace(
        np.empty(0, SPAN),
        outlines[0].meta,
        all(trace.is_complete for trace in outlines),
        left_out,
        names={sample: name for trace in outlines for sample, name in trace.names.items()}
        if have_one_source
        else {},
        hosts=hosts,
        choices={rank: line for trace in outlines for rank, line in trace.choices.items()},
    )
