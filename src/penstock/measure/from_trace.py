"""A machine from what a run recorded: the fourth arrow of the design, traces -> machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.measure.header import form_in
from penstock.plan.orders import ENDLESS
from penstock.plan.recorded import with_planned_ids
from penstock.policy.forms import CropForm
from penstock.trace import NO_FLOW, NO_PEER, NO_STEP, SOURCE, Kind, Spans, Trace, read_trace
from penstock.trace.schema import JOBS_MEMORY, choose_spans
from penstock.units import format_bytes

#: A number of reads in flight counts that moved so many reads' bytes.
_LEAST_READS = 8
_UNKNOWN_CAPACITY_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LearnedMachine:
    """A machine, and what it was learned from: lines for its comment."""

    machine: Machine
    lines: tuple[str, ...]

    def to_toml(self) -> str:
        """Return the machine's TOML under a comment that says what was learned, and what was not."""
        return "".join(f"# {line}\n" for line in self.lines) + "\n" + self.machine.to_toml()


def learn_machine(path: str | os.PathLike[str]) -> LearnedMachine:
    """Return the machine on which a recorded run would have gone as it did.

    path: of a trace that a loader wrote.
    Raises: ConfigError naming the file if it read too little from its source; what `read_trace` raises.
    """
    try:
        return learn(read_trace(path))
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error


def learn(trace: Trace) -> LearnedMachine:
    """Do what `learn_machine` does for a trace that was read.

    The source's curve and those of the tiers that were read from are bytes/s by number of reads in flight, latencies
    included, of one rank on average; what was not used stays as the run's own machine has it.
    """
    written = trace.meta.get("machine")
    known = Machine.from_toml(str(written)) if written else None
    reads = trace.spans[np.isin(trace.spans["kind"], (Kind.READ, Kind.HIT)) & (trace.spans["bytes"] > 0)]
    source = curve_of(reads[reads["place"] == SOURCE])
    if source is None and known is None:
        raise ConfigError(
            f"it has too few reads of its source to learn from (at least {_LEAST_READS}): record a longer run, or "
            "one whose samples were not kept on a disk before"
        )
    lines = [
        f"Learned by penstock calibrate --from a recorded run: {_described(reads[reads['place'] == SOURCE])}."
        if source is not None
        else "Learned by penstock calibrate --from a recorded run, which hardly read its source: that is as it was."
    ]
    storage = list(known.storage) if known is not None else [_class("staging"), _class("memory")]
    learned = []
    for tier in range(1, len(storage)):
        own = reads[reads["place"] == tier]
        if (found := curve_of(own)) is not None:
            storage[tier] = replace(storage[tier], read=found, latency_seconds=0.0)
            learned.append(storage[tier].name)
            lines.append(f"{storage[tier].name}: {_described(own)}")
    left = [each.name for each in storage[1:] if each.name not in learned]
    if left:
        lines.append(f"Not read from, and so not learned: {', '.join(left)}.")
    if trace.left_out.spans:
        lines.append("CAUTION: the run was long; its last steps alone are recorded one by one.")
    compute = _compute(trace.spans)
    if known is None:
        assert source is not None, "it would be an error"
        threads = int(max(users for users, _ in source.points))
        known = Machine(SharedStore(None, source, threads=threads), tuple(storage))
    elif source is not None:
        store = replace(known.source, clients=None, read=source, latency_seconds=0.0, sequential=None)
        known = replace(known, source=store)
    machine = replace(
        decoding_as_in(trace, known),
        storage=tuple(storage),
        compute=known.compute if compute is None else compute,
    )
    if machine.ranks > 1:
        lines.append(
            f"One of {machine.ranks} ranks as it was with all of them reading; other numbers are not known."
        )
    return LearnedMachine(machine, tuple(lines))


def curve_of(spans: Spans) -> Curve | None:
    """Return bytes/s of one rank by number of its reads in flight; None for too few reads.

    Each read's bytes are taken to flow evenly while it lasts. So at each moment so many reads are in flight and so much
    flows, and of all moments with k reads the mean is taken. Of fewer reads at once than there ever were each is taken
    to be no faster.
    """
    seconds, nbytes = np.zeros(1), np.zeros(1)
    for own in _by_rank(spans):
        more_seconds, more_bytes = _flow(own)
        size = max(seconds.size, more_seconds.size)
        seconds = np.pad(seconds, (0, size - seconds.size)) + np.pad(
            more_seconds, (0, size - more_seconds.size)
        )
        nbytes = np.pad(nbytes, (0, size - nbytes.size)) + np.pad(more_bytes, (0, size - more_bytes.size))
    if spans.size < _LEAST_READS:
        return None
    enough = _LEAST_READS * float(spans["bytes"].mean())
    users = [count for count in range(1, seconds.size) if nbytes[count] >= enough and seconds[count] > 0]
    if not users:
        users = [int(np.argmax(nbytes))]
    rates = [(count, nbytes[count] / seconds[count]) for count in users]
    if (least := rates[0])[0] > 1:
        rates.insert(0, (1, least[1] / least[0]))
    return Curve(tuple((float(count), float(f"{rate:.4g}")) for count, rate in rates))


def _by_rank(spans: Spans) -> Iterator[Spans]:
    for rank in np.unique(spans["rank"]).tolist():
        yield spans[spans["rank"] == rank]


def _flow(spans: Spans) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return float64[k + 1] twice: how long k reads were in flight, and the bytes that flowed then."""
    spans = spans[spans["end"] > spans["start"]]
    moments = np.concatenate([spans["start"], spans["end"]])
    rates = spans["bytes"] / (spans["end"] - spans["start"])
    order = np.argsort(moments, kind="stable")
    ones = np.ones(spans.size, np.int64)
    flights = np.cumsum(np.concatenate([ones, -ones])[order])[:-1]
    flow = np.cumsum(np.concatenate([rates, -rates])[order])[:-1]
    seconds = np.diff(moments[order])
    if not flights.size:
        return np.zeros(1), np.zeros(1)
    return (
        np.bincount(flights, seconds).astype(np.float64),
        np.bincount(flights, seconds * flow).astype(np.float64),
    )


def as_stored(spans: Spans, form: CropForm | None) -> Spans:
    """Return spans without those of tiers that keep samples in a form, whose bytes are those of pixels."""
    return choose_spans(spans, ~_is_in_form(spans, form))


def _is_in_form(spans: Spans, form: CropForm | None) -> NDArray[np.bool_]:
    places = [place for place in np.unique(spans["place"]).tolist() if form is not None and form.is_in(place)]
    return np.isin(spans["place"], places)


def decoding_as_in(trace: Trace, machine: Machine) -> Machine:
    """Return the machine with decode threads as fast as in a recorded run; unchanged where no decoding was recorded.

    The rate was observed while threads shared the processors, so `processors` no longer limits it.
    Raises: ConfigError if the header says no form in which samples are kept.
    """
    rate = _decode_rate_in(trace)
    return (
        machine if rate is None else replace(machine, preprocess_bytes_per_second=rate, processors=math.inf)
    )


def _decode_rate_in(trace: Trace) -> float | None:
    """Return the bytes as stored that a thread decodes in a second; None where no decoding is linked to its bytes.

    What is made beside the crops of one epoch counts as more bytes, as it does in a prediction.
    """
    form = form_in(trace.meta)
    stored = as_stored(trace.spans, form)
    reads = stored[np.isin(stored["kind"], (Kind.READ, Kind.HIT)) & (stored["bytes"] > 0)]
    # Where jobs of the host had the pixels, nothing was decoded.
    is_decoded = (stored["kind"] == Kind.DECODE) & (stored["place"] != JOBS_MEMORY)
    decodes = stored[is_decoded & (stored["flow"] != NO_FLOW)]
    nbytes = dict(zip(_keys(reads), reads["bytes"].tolist(), strict=True))
    known = decodes[np.array([key in nbytes for key in _keys(decodes)], np.bool_)]
    seconds = float((known["end"] - known["start"]).sum())
    more = [0.0] * known.size if form is None or not form.more_share else _made_beside(trace, form, known)
    decoded = sum(nbytes[key] * (1 + share) for key, share in zip(_keys(known), more, strict=True))
    return float(f"{decoded / seconds:.4g}") if seconds > 0 else None


def _made_beside(trace: Trace, form: CropForm, decodes: Spans) -> list[float]:
    """Return what was made of each group beside its crops of one epoch, as a share of decoding it.

    It was made of samples that the rank had in the form at some time. Of a run that had none, as one of a single epoch,
    it is taken to have been made of all.
    """
    spans, ids = trace.spans, with_planned_ids(trace).ids
    plan: Any = trace.meta.get("plan")
    epochs = (plan.get("epochs") if isinstance(plan, dict) else None) or ENDLESS

    def members(span: Any) -> list[tuple[int, int]]:
        rank, flow = int(span["rank"]), int(span["flow"])
        group = ids.get((rank, flow))
        return [(rank, sample) for sample in ([int(span["sample"])] if group is None else group.tolist())]

    had = (
        np.isin(spans["kind"], (Kind.READ, Kind.HIT)) & (spans["peer"] == NO_PEER) & _is_in_form(spans, form)
    )
    had |= (spans["kind"] == Kind.DECODE) & (spans["place"] == JOBS_MEMORY)
    kept = {member for span in spans[had] for member in members(span)}
    found = []
    for span in decodes:
        group, epoch = members(span), int(span["epoch"])
        shares = [
            form.share_beside(epoch, sample, epochs)
            for rank, sample in group
            if not kept or (rank, sample) in kept
        ]
        found.append(sum(shares) / len(group))
    return found


def _keys(spans: Spans) -> list[tuple[int, int]]:
    return list(zip(spans["rank"].tolist(), spans["flow"].tolist(), strict=True))


def _compute(spans: Spans) -> Rate | None:
    """Return the samples a second that the training got through while it did not wait, by the median of its steps."""
    steps = spans[(spans["kind"] == Kind.STEP) & (spans["step"] != NO_STEP) & (spans["samples"] > 0)]
    seconds = steps["end"] - steps["start"]
    if not (seconds > 0).any():
        return None
    rate = float(np.median(steps["samples"][seconds > 0] / seconds[seconds > 0]))
    return Rate(float(f"{rate:.4g}"), of="samples") if math.isfinite(rate) else None


def _described(reads: Spans) -> str:
    samples, nbytes = int(reads["samples"].sum()), float(reads["bytes"].sum())
    return f"{samples:,} samples, {format_bytes(nbytes)}, in {reads.size:,} reads"


def _class(name: str) -> StorageClass:
    return StorageClass(name, _UNKNOWN_CAPACITY_BYTES, 1, Curve.flat(10e9))
