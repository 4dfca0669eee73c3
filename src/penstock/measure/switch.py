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
from penstock.measure.calibrate import decode_rate
from penstock.store import Numeric, Source, open_source
from penstock.store.calls import Calls
from penstock.trace import NO_STEP, Kind, Trace
from penstock.units import format_ratio, format_seconds

#: Channels of a batch of images.
_CHANNELS = (1, 3)
_DTYPES = ("float32", "float16", "bfloat16", "uint8")


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
    trace: Trace,
    source: str | os.PathLike[str] | Source,
    **arguments: Unpack[LoaderArguments],
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
    own, until_next = _steps_of(trace)
    opened = open_source(source) if isinstance(source, str | os.PathLike) else source
    config = LoaderConfig(opened, **{**_as_watched(trace, opened, own.size), **arguments})
    on, notes = read_machine(config.machine, Calls()), []
    if not trace.is_complete:
        notes.append("the trace has not all of the run: these are its last steps")
    if on is not None and config.transforms and math.isinf(on.preprocess_bytes_per_second):
        on = replace(on, preprocess_bytes_per_second=decode_rate(opened, config.transforms))
        config = replace(config, machine=on)
        notes.append("how fast this host decodes was measured now; the machine does not say it")
    predicted = predict(config, step_seconds=until_next.tolist())
    stall = sum(epoch.stall_seconds for epoch in predicted.epochs())
    waits = trace.spans[trace.spans["kind"] == Kind.WAIT]
    waited = float((waits["end"] - waits["start"]).sum())
    return Switch(own.size, waited + float(own.sum()), waited, stall + float(own.sum()), stall, tuple(notes))


def _steps_of(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return float64[steps] twice: the time of each step, and until the training asked for the next batch."""
    spans = trace.spans
    waits = spans[(spans["kind"] == Kind.WAIT) & (spans["step"] != NO_STEP)]
    steps = spans[spans["kind"] == Kind.STEP]
    if "watched" not in trace.meta or not waits.size or waits.size != steps.size:
        raise ConfigError(
            "the trace is not one of a loader in penstock.watch, from which a batch came: for one of a Penstock loader "
            "penstock explain says what a change would bring"
        )
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
