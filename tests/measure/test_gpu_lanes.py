"""A profile's device events are lanes of the export, at the moments when they ran."""

from __future__ import annotations

import gzip
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.spans import spans_of

from penstock.cli.main import main
from penstock.errors import FormatError
from penstock.measure.gpu_lanes import gpu_lanes
from penstock.trace import NO_PLACE, Kind, Trace, TraceWriter

BEGUN = 1_800_000_000.0
META = {"started": datetime.fromtimestamp(BEGUN, UTC).isoformat()}
SPANS = spans_of([(0.0, 1.0, -1, 0, 0, 0, Kind.STEP, NO_PLACE, 0, 0)])


def event(cat: str, name: str, after_seconds: float, stream: int, **more: Any) -> dict[str, Any]:
    """What torch.profiler writes: microseconds after baseTimeNanoseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": 1e6 * (100 + after_seconds),
        "dur": 250.5,
        "args": {"device": 0, "stream": stream, "correlation": 9, **more},
    }


PROFILE = {
    "schemaVersion": 1,
    "baseTimeNanoseconds": int((BEGUN - 100) * 1e9),
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        event("cpu_op", "aten::mm", 0.1, 4711),
        event("cuda_runtime", "cudaLaunchKernel", 0.1, 4711),
        event("kernel", "gemm", 0.25, 7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.5, 13, bytes=4096),
    ],
}


def test_kernels_and_copies_are_lanes_of_their_streams_on_the_clock_of_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, profile, out = tmp_path / "run.trace", tmp_path / "gpu.json.gz", tmp_path / "out.json"
    with TraceWriter(trace, META) as writer:
        writer.append(SPANS)
    profile.write_bytes(gzip.compress(json.dumps(PROFILE).encode()))

    words = ["trace", str(trace), "--export", "perfetto", "--out", str(out), "--profile", str(profile)]
    assert main(words) == 0

    events = json.loads(out.read_text())["traceEvents"]
    ran = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy")]
    assert [(each["name"], each["tid"], each["ts"], each["dur"]) for each in ran] == [
        ("gemm", 7, 250_000.0, 250.5),
        ("Memcpy HtoD (Pinned -> Device)", 13, 500_000.0, 250.5),
    ]
    assert ran[1]["args"] == {"bytes": 4096, "correlation": 9}
    of_gpu = [each for each in events if each["pid"] == ran[0]["pid"] and each["ph"] == "M"]
    assert [each["args"]["name"] for each in of_gpu] == ["GPU 0", "stream 7", "stream 13"]
    assert {each["pid"] for each in events} == {0, ran[0]["pid"]}
    assert not any(each["name"] in ("aten::mm", "cudaLaunchKernel") for each in events)

    host_alone = {**PROFILE, "traceEvents": PROFILE["traceEvents"][:3]}  # type: ignore[index]
    profile.write_bytes(json.dumps(host_alone).encode())
    assert main(words) == 0
    assert "has no device events" in capsys.readouterr().out
    assert main(["trace", str(trace), "--profile", str(profile)]) == 1
    assert "give --export perfetto" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1]",
        b"{}",
        b"\x1f\x8bcut",
        gzip.compress(b"{}", mtime=0)[:-4],
        b'{"traceEvents": [3]}',
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x", "pid": 0, "tid": "a"}]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_profile_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_bytes(data)

    with pytest.raises(FormatError, match=r"gpu\.json is no profile of torch\.profiler"):
        gpu_lanes(tmp_path / "gpu.json", Trace(SPANS, META))


@pytest.mark.slow
def test_a_profile_of_torch_counts_from_its_base_time(tmp_path: Path) -> None:
    import torch

    begin = time.time()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(100, 100).matmul(torch.ones(100, 100))
    end = time.time()
    profile.export_chrome_trace(str(tmp_path / "cpu.json"))

    said = json.loads((tmp_path / "cpu.json").read_text())
    at = [each["ts"] for each in said["traceEvents"] if each.get("cat") == "cpu_op"]
    moments = [said["baseTimeNanoseconds"] / 1e9 + micros / 1e6 for micros in at]
    assert begin - 0.01 < min(moments) <= max(moments) < end + 0.01
    assert gpu_lanes(tmp_path / "cpu.json", Trace(SPANS, META)) == []
