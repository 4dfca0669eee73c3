"""A trace for other programs: Perfetto, anything that reads Parquet, TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.files import replacing
from penstock.measure.chrome import write_chrome
from penstock.recordings.devices import GONE, DeviceRecord
from penstock.trace import JSON, SPAN, Kind, Trace, batch_waits, stall_causes


def export_trace(trace: Trace, form: str, path: str | os.PathLike[str]) -> None:
    """Write a trace in a form of `FORMS`; the file appears when all of it is written.

    Raises: ConfigError if the trace has nothing to show; ImportError without pyarrow, or tensorboard; OSError where
        it cannot be written.
    """
    FORMS[form](trace, Path(path))


def export_path(run: Path, form: str) -> Path:
    """Return where an export is written by default: next to the run, with an ending of its own."""
    return run.with_name(
        run.stem + {"perfetto": ".json.gz", "parquet": ".parquet", "tensorboard": "-tensorboard"}[form]
    )


def write_parquet(trace: Trace, path: Path) -> None:
    """Write every span as a row, its fields as columns, its kind in words, and a name where the trace has one.

    The run's meta, as JSON, is the file's metadata `penstock`.
    """
    import pyarrow as pa

    spans = trace.spans
    kinds = np.array([kind.name.lower() for kind in Kind] + ["unknown"])
    columns = {
        name: pa.array(np.ascontiguousarray(spans[name])) for name in SPAN.names or () if name != "kind"
    }
    columns["kind"] = pa.DictionaryArray.from_arrays(
        pa.array(np.minimum(spans["kind"], len(Kind)).astype(np.int8)), pa.array(kinds)
    )
    names = {
        sample: name.encode("utf-8", "backslashreplace").decode() for sample, name in trace.names.items()
    }
    columns["name"] = pa.array([names.get(sample) for sample in spans["sample"].tolist()], pa.string())
    _write_table(columns, trace.meta, path)


def devices_path(path: Path) -> Path:
    """Return where the counters of `penstock watch` are written next to an export as Parquet."""
    return path.with_name(f"{path.stem}-devices{path.suffix}")


def write_devices(record: DeviceRecord, path: Path) -> None:
    """Write every row of the counters of `penstock watch` as a row; those that are gone as null.

    Seconds count from the first row; the other columns are the record's, as `penstock.recordings.devices` has them.
    Raises: ImportError without pyarrow; OSError where it cannot be written.
    """
    import pyarrow as pa

    columns = {"seconds": pa.array(record.seconds)}
    for number, name in enumerate(record.columns):
        values = record.rows[:, number]
        columns[name] = pa.array(values, mask=values == GONE)
    _write_table(columns, record.meta, path)


def _write_table(columns: Mapping[str, Any], meta: Mapping[str, JSON], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    said = {b"penstock": json.dumps(dict(meta)).encode()}
    table = pa.table(dict(columns)).replace_schema_metadata(said)
    with replacing(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")


def write_events(trace: Trace, folder: Path) -> None:
    """Write scalars by step of the run as an event file into a folder, as TensorBoard reads them; each rank is a run.

    `step/stall_seconds`, its parts as `stall/CAUSE`, `step/seconds`, `step/samples_per_second`; and
    `epoch/stall_seconds` and `epoch/stall_share`. Of several ranks, epochs are of the spans that are there: of those
    that a long run left out, only the sums of all ranks are known.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    begun = trace.begun or 0.0
    ranks = np.unique(trace.spans["rank"][trace.spans["kind"] == Kind.WAIT]).tolist()
    if not ranks:
        raise ConfigError("the trace has no wait, so there is nothing to show: let the run consume a batch")
    # As ranks step together, each left out as many.
    first = sum(each.steps for each in trace.left_out.epochs) // len(ranks)
    for rank in ranks:
        of_rank = trace
        if len(ranks) > 1:
            of_rank = Trace(trace.spans[trace.spans["rank"] == rank])
        into = folder if len(ranks) == 1 else folder / f"rank{rank}"
        into.mkdir(parents=True, exist_ok=True)
        # TensorBoard knows event files by this name; one export replaces the last.
        path = into / "events.out.tfevents.0.penstock"
        unfinished = into / f"{os.getpid()}.unfinished"
        try:
            with unfinished.open("wb") as file:
                writer = RecordWriter(file)
                writer.write(Event(wall_time=begun, file_version="brain.Event:2").SerializeToString())
                for seconds, step, values in _scalars(of_rank, first):
                    shown = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
                    event = Event(wall_time=begun + seconds, step=step, summary=Summary(value=shown))
                    writer.write(event.SerializeToString())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _scalars(trace: Trace, first: int) -> Iterator[tuple[float, int, dict[str, float]]]:
    """Yield (seconds since the origin, number, scalars by tag) of each step of one rank's run, and of each epoch."""
    spans = trace.spans
    waits = batch_waits(spans)
    waits = waits[np.argsort(waits["start"], kind="stable")]
    steps = spans[spans["kind"] == Kind.STEP]
    own = {(int(span["epoch"]), int(span["step"])): float(span["end"] - span["start"]) for span in steps}
    causes = stall_causes(spans, waits)
    for place, wait in enumerate(waits):
        seconds = float(wait["end"] - wait["start"])
        of_step = own.get((int(wait["epoch"]), int(wait["step"])))
        values = {"step/stall_seconds": seconds}
        values |= {f"stall/{cause}": float(part[place]) for cause, part in causes.items() if part.any()}
        if of_step is not None:
            values["step/seconds"] = of_step
            if wait["samples"] and seconds + of_step > 0:
                values["step/samples_per_second"] = float(wait["samples"]) / (seconds + of_step)
        yield float(wait["end"]), first + place, values
    for epoch in trace.epochs():
        total = epoch.stall_seconds + epoch.own_seconds
        values = {
            "epoch/stall_seconds": epoch.stall_seconds,
            "epoch/stall_share": epoch.stall_seconds / (total or 1.0),
        }
        ended = spans["end"][spans["epoch"] == epoch.epoch]
        yield float(ended.max()) if ended.size else 0.0, epoch.epoch, values


FORMS: dict[str, Callable[[Trace, Path], None]] = {
    "perfetto": write_chrome,
    "parquet": write_parquet,
    "tensorboard": write_events,
}
