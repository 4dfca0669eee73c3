"""What Penstock would make of a run that `penstock.watch` has seen: its steps replayed over its data, on a machine."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.config import LoaderArguments, LoaderConfig
from penstock.loader.prediction import predict
from penstock.loader.setup import read_machine
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Machine
from penstock.measure.calibrate import decode_rate
from penstock.measure.recorded import Run
from penstock.store import Numeric, Source, open_source
from penstock.store.calls import Calls
from penstock.trace import Kind, Trace, batch_waits
from penstock.units import format_names, format_ratio, format_seconds

#: Channels of a batch of images.
_CHANNELS = (1, 3)
_DTYPES = ("float32", "float16", "bfloat16", "uint8")
#: Why nothing is said of a trace.
_NOT_WATCHED = (
    "the trace is not one of a loader in penstock.watch, from which a batch came: for one of a Penstock loader "
    "penstock explain says what a change would bring"
)


@dataclass(frozen=True, slots=True)
class Switch:
    """The run as it was, and as it would be with Penstock's loader. As text: one line.

    measured_seconds, predicted_seconds: waiting and steps together. notes: what to distrust.
    """

    steps: int
    measured_seconds: float
    measured_stall_seconds: float
    predicted_seconds: float
    predicted_stall_seconds: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        times = [format_seconds(self.predicted_seconds), format_seconds(self.measured_seconds)]
        stalls = [format_seconds(self.predicted_stall_seconds), format_seconds(self.measured_stall_seconds)]
        gain = self.measured_seconds / self.predicted_seconds if self.predicted_seconds else 1.0
        return (
            f"with Penstock's loader {times[0]} in place of {times[1]} ({format_ratio(gain)}), "
            f"of it {stalls[0]} waiting in place of {stalls[1]}"
        )


def predict_switch(
    trace: Trace, source: str | os.PathLike[str] | Source, **arguments: Unpack[LoaderArguments]
) -> Switch:
    """Return what Penstock would make of a run of another loader.

    The steps, their times and the batches are those of the run. How fast this host decodes is measured for a second
    where the machine does not say; predict on the host that trains.

    trace: of `penstock.watch`: `Watch.trace`, or a file in the run of `penstock watch`.
    source: the data that the run read.
    arguments: of a `penstock.Loader`: machine=, and what differs from the run: its batch size, ranks and, for images, a
        resize to their size.
    Raises: ConfigError if the trace is of something else, or lacks what is not given; what `penstock.predict` raises.
    """
    return _predicted(trace, _opened(source), arguments)[0]


def predict_switch_of_run(
    run: Run, source: str | os.PathLike[str] | Source, **arguments: Unpack[LoaderArguments]
) -> Switch:
    """Return what `predict_switch` does for a run, whose ranks may have several loaders.

    Of a rank's only loader it is taken for granted that it reads the source. Of several, those count whose epochs have
    as many steps as ones of the source, each replaced by a loader of its own: their times are added. Of several ranks,
    the one that took longest counts. Penstock's own loaders are left out.
    Raises: as `predict_switch`; ConfigError if no loader counts.
    """
    opened, of_ranks = _opened(source), run.of_ranks()
    own = [part.name for of_rank in of_ranks for part in of_rank if not part.outline.is_watched]
    loaders = [part for of_rank in of_ranks for part in of_rank if part.outline.is_watched]
    if not loaders:
        raise ConfigError(_NOT_WATCHED)
    if len(loaders) == 1 and not own:
        return _predicted(loaders[0].recorded(), opened, arguments)[0]
    switches: list[Switch] = []
    given, left_out = arguments, []
    ranks = [of_rank for of_rank in of_ranks if any(part.outline.is_watched for part in of_rank)]
    for of_rank in ranks:
        of_loaders = []
        for part in of_rank:
            if not part.outline.is_watched:
                continue
            trace = part.recorded()
            if _has_steps(trace) and (len(of_rank) == 1 or _is_of(trace, opened)):
                switch, machine = _predicted(trace, opened, given)
                of_loaders.append(switch)
                given = {**arguments, "machine": machine}  # how fast it decodes is measured once
            else:
                left_out.append(part.name)
        if of_loaders:
            switches.append(_added(of_loaders))
    if not switches:
        raise ConfigError(
            f"none of the run's {len(loaders)} loaders has epochs of as many steps as {len(opened):,} samples make, so "
            "it is not known which of them reads this source: give penstock explain the .trace of one"
        )
    found = max(switches, key=lambda each: each.measured_seconds)
    notes = list(found.notes)
    if len(loaders) > len(ranks):
        notes.append(
            f"of {len(loaders)} loaders, {len(loaders) - len(left_out)} are replaced, each by one of its own"
        )
    if left_out:
        notes.append(
            f"{format_names(left_out)} has other epochs than this source, and is left out of both sides"
        )
    if own:
        notes.append(f"{format_names(own)} is Penstock's already, and is left out of both sides")
    if len(ranks) > 1:
        notes.append(f"of {len(ranks)} ranks, this is the one that took longest")
    return replace(found, notes=tuple(notes))


def _added(switches: Sequence[Switch]) -> Switch:
    """Return the sums of a rank's loaders."""
    return Switch(
        sum(each.steps for each in switches),
        sum(each.measured_seconds for each in switches),
        sum(each.measured_stall_seconds for each in switches),
        sum(each.predicted_seconds for each in switches),
        sum(each.predicted_stall_seconds for each in switches),
        tuple(dict.fromkeys(note for each in switches for note in each.notes)),
    )


def _has_steps(trace: Trace) -> bool:
    """Whether a trace is of a loader in `penstock.watch` from which a batch came."""
    return trace.is_watched and bool(batch_waits(trace.spans).size)


def _is_of(trace: Trace, source: Source) -> bool:
    """Whether a loader's longest epoch has as many steps as one of a source would."""
    size, ranks = trace.meta.get("batch_size"), int(str(trace.meta.get("ranks", 1)))
    if not isinstance(size, int):
        return False
    waits = batch_waits(trace.spans)
    # Ranks share what is over, or leave it out: samplers fill up, or cut off.
    shares = {len(source) // ranks, math.ceil(len(source) / ranks)}
    rounded = math.floor if trace.meta.get("drop_last") else math.ceil
    return int(waits["step"].max()) + 1 in {rounded(share / size) for share in shares}


def _opened(source: str | os.PathLike[str] | Source) -> Source:
    return open_source(source) if isinstance(source, str | os.PathLike) else source


def _predicted(trace: Trace, opened: Source, arguments: LoaderArguments) -> tuple[Switch, Machine | None]:
    """Return what would come of a run, and the machine with how fast it decodes."""
    own, until_next = _steps_of(trace)
    config = LoaderConfig(opened, **{**_as_watched(trace, opened, own.size), **arguments})
    on, notes = read_machine(config.machine, Calls()), []
    if not trace.is_complete:
        notes.append("the trace has not all of the run: these are its last steps")
    if on is not None and config.transforms and not on.knows_decoding:
        on = replace(on, preprocess_bytes_per_second=decode_rate(opened, config.transforms))
        config = replace(config, machine=on)
        notes.append("how fast this host decodes was measured now; the machine does not say it")
    predicted = predict(config, step_seconds=until_next.tolist())
    stall = sum(epoch.stall_seconds for epoch in predicted.epochs())
    waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
    waited = float((waits["end"] - waits["start"]).sum())
    seconds = waited + float(own.sum()), waited, stall + float(own.sum()), stall
    return Switch(own.size, *seconds, tuple(notes)), on


def _steps_of(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return float64[steps] twice: the time of each step, and until the training asked for the next batch."""
    spans = trace.spans
    waits = batch_waits(spans)
    steps = spans[spans["kind"] == Kind.STEP]
    if not trace.is_watched or not waits.size or waits.size != steps.size:
        raise ConfigError(_NOT_WATCHED)
    waits, steps = (each[np.argsort(each["start"], kind="stable")] for each in (waits, steps))
    own: NDArray[np.float64] = steps["end"] - steps["start"]
    # A pause between epochs, an evaluation say, is time in which a loader reads ahead.
    pauses = np.maximum(0.0, waits["start"][1:] - steps["end"][:-1])
    return own, own + np.append(pauses, 0.0)


def _as_watched(trace: Trace, source: Source, steps: int) -> dict[str, Any]:
    """Return the arguments of a loader that hands out such batches."""
    meta, ranks = trace.meta, int(str(trace.meta.get("ranks", 1)))
    found: dict[str, Any] = {"steps": steps, "drop_last": bool(meta.get("drop_last", False))}
    if isinstance(size := meta.get("batch_size"), int):
        found["batch_size"] = size * ranks
    if ranks > 1:
        found |= {"rank": meta.get("rank"), "world_size": ranks}
    shape = meta.get("shape")
    if not isinstance(source, Numeric) and isinstance(shape, list):
        found |= _as_images([int(str(size)) for size in shape], str(meta.get("dtype")))
    return found


def _as_images(shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """Return transforms that make images of a batch's shape; none for a shape that is not one of images."""
    if len(shape) != 4:
        return {}
    layout = "NCHW" if shape[1] in _CHANNELS else "NHWC"
    size = (shape[2], shape[3]) if layout == "NCHW" else (shape[1], shape[2])
    return {
        "transforms": (Resize(size), ToTensor()),
        "layout": layout,
        "dtype": dtype if dtype in _DTYPES else None,
    }
