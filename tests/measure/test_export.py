"""Exports are read back by the libraries of the programs that they are for."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.measure.test_chrome import ROWS
from tests.patience import patient
from tests.spans import a_run, spans_of

from penstock.errors import ConfigError
from penstock.measure.export import export_path, export_trace
from penstock.trace import SPAN, Trace


def exported(trace: Trace, form: str, folder: Path) -> Path:
    path = export_path(folder / "run.trace", form)
    export_trace(trace, form, path)
    assert list(folder.rglob("*unfinished*")) == []
    return path


def test_json_for_perfetto_is_gzipped(tmp_path: Path) -> None:
    path = exported(Trace(spans_of(ROWS)), "perfetto", tmp_path)

    assert path.name == "run.json.gz"
    assert (
        len(
            [
                each
                for each in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
                if each["ph"] == "X"
            ]
        )
        == 10
    )


def test_a_table_has_every_field_of_every_span(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    trace = Trace(spans_of(ROWS), {"rank": 0}, names={7: "\n\udcff.jpg"})

    table = pq.read_table(exported(trace, "parquet", tmp_path))

    for name in SPAN.names or ():
        if name != "kind":
            assert table[name].to_pylist() == trace.spans[name].tolist()
    assert table["kind"].to_pylist()[:4] == ["read", "decode", "decode", "slot"]
    assert set(table["name"].to_pylist()) == {None, "\n\\udcff.jpg"}
    assert json.loads(table.schema.metadata[b"penstock"]) == {"rank": 0}


def scalars(path: Path) -> dict[str, list[tuple[float, int, float]]]:
    """What TensorBoard's own reader finds: (wall time, step, value) by tag."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.errors import OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    found: dict[str, list[tuple[float, int, float]]] = {}
    reader = PyRecordReader_New(str(path))
    with suppress(OutOfRangeError):
        while True:
            reader.GetNext()
            event = Event.FromString(reader.record())
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.wall_time, event.step, value.simple_value))
    return found


def test_tensorboard_s_own_reader_finds_the_stall_of_every_step(tmp_path: Path) -> None:
    trace = Trace(a_run([[0.5, 0.25], [2.0]], decode=0.125).spans, {"started": "1970-01-01T00:01:40+00:00"})
    (path,) = exported(trace, "tensorboard", tmp_path).iterdir()

    found = scalars(path)

    assert path.name.startswith("events.out.tfevents.")
    assert found["step/stall_seconds"] == [(100.5, 0, 0.5), (101.75, 1, 0.25), (104.75, 2, 2.0)]
    assert [value for _, _, value in found["stall/decode"]] == [0.125] * 3
    assert [value for _, _, value in found["epoch/stall_seconds"]] == [0.75, 2.0]
    with pytest.raises(ConfigError, match="no wait"):
        export_trace(Trace(np.empty(0, SPAN)), "tensorboard", tmp_path / "nothing")


#: TensorBoard's server, asked by HTTP until it has loaded the folder. Its import of pkg_resources, which the latest
#: setuptools does not have, is for plugins of others.
SERVER = """
import json, sys, time, types, urllib.request

sys.modules["pkg_resources"] = types.ModuleType("pkg_resources")
from tensorboard import program
from tensorboard.plugins.core import core_plugin
from tensorboard.plugins.scalar import scalars_plugin

board = program.TensorBoard([core_plugin.CorePluginLoader, scalars_plugin.ScalarsPlugin])
board.configure(["tensorboard", "--logdir", sys.argv[1], "--port", "0", "--load_fast", "false"])
scalars = board.launch() + "data/plugin/scalars/"
while "step/stall_seconds" not in json.load(urllib.request.urlopen(scalars + "tags")).get(".", {}):
    time.sleep(0.2)
print(urllib.request.urlopen(scalars + "scalars?run=.&tag=step/stall_seconds").read().decode())
"""


@pytest.mark.slow
def test_tensorboard_s_server_shows_the_stall_of_every_step(tmp_path: Path) -> None:
    trace = Trace(a_run([[0.5, 0.25], [2.0]]).spans, {"started": "1970-01-01T00:01:40+00:00"})
    folder = exported(trace, "tensorboard", tmp_path)

    command = [sys.executable, "-c", SERVER, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[100.5, 0, 0.5], [101.75, 1, 0.25], [104.75, 2, 2.0]]


def test_each_rank_is_a_run_of_its_own_stalls(tmp_path: Path) -> None:
    one, other = (a_run(stalls).spans for stalls in ([[0.5], [2.0]], [[0.25], [4.0]]))
    other["rank"] = 1

    folder = exported(Trace(np.concatenate([one, other])), "tensorboard", tmp_path)

    runs = [scalars(next((folder / f"rank{rank}").iterdir()))["epoch/stall_seconds"] for rank in (0, 1)]
    assert [[value for _, _, value in run] for run in runs] == [[0.5, 2.0], [0.25, 4.0]]
