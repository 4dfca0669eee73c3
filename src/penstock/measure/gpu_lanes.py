"""What a GPU did, from a profile of `torch.profiler`, as lanes next to those of a trace."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

from penstock.errors import FormatError
from penstock.trace import Trace

#: Categories of what runs on a device, by torch.profiler; the rest of a profile is of the host.
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
#: Devices are processes of the export after all ranks.
_FIRST_PROCESS = 1 << 20
_GZIP = b"\x1f\x8b"


def gpu_lanes(profile: str | os.PathLike[str], trace: Trace) -> list[dict[str, Any]]:
    """Return the events of devices in a profile, a lane for each stream, on the clock of a trace.

    profile: as `torch.profiler.profile.export_chrome_trace` writes it, gzipped or not.
    Returns: events of the Trace Event Format; none if nothing in the profile ran on a device.
    Raises: FormatError if it is no such file; OSError if it cannot be read.
    """
    said = _read(profile)
    try:
        begun = _begun_micros(said, trace)
        ran = [
            each for each in said["traceEvents"] if each.get("ph") == "X" and each.get("cat") in _ON_DEVICE
        ]
        return list(_events(ran, begun))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _no_profile(profile, error) from error


def _read(profile: str | os.PathLike[str]) -> dict[str, Any]:
    with open(profile, "rb") as file:
        data = file.read()
    try:
        said = json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error, RecursionError) as error:
        raise _no_profile(profile, error) from error
    if not isinstance(said, dict):
        raise _no_profile(profile, TypeError("it is no JSON object"))
    return said


def _no_profile(profile: str | os.PathLike[str], error: Exception) -> FormatError:
    return FormatError(
        f"{os.fspath(profile)} is no profile of torch.profiler ({error!r:.100}): give a file that its "
        "export_chrome_trace wrote"
    )


def _begun_micros(said: dict[str, Any], trace: Trace) -> float:
    """Return when the trace began, on the profile's clock: microseconds after `baseTimeNanoseconds` since 1970."""
    if trace.begun is None:
        raise ValueError("the trace does not say when it began")
    return 1e6 * trace.begun - int(said.get("baseTimeNanoseconds", 0)) / 1e3


def _events(ran: list[dict[str, Any]], begun: float) -> Iterator[dict[str, Any]]:
    lanes: set[tuple[int, int]] = set()
    for each in ran:
        arguments = each.get("args", {})
        device, stream = int(arguments.get("device", each["pid"])), int(arguments.get("stream", each["tid"]))
        place = {"pid": _FIRST_PROCESS + device, "tid": stream}
        if (device, -1) not in lanes:
            yield {"ph": "M", "name": "process_name", **place, "args": {"name": f"GPU {device}"}}
        if (device, stream) not in lanes:
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"stream {stream}"}}
        lanes |= {(device, -1), (device, stream)}
        yield {
            "ph": "X",
            "cat": str(each["cat"]),
            "name": str(each["name"]),
            **place,
            "ts": round(float(each["ts"]) - begun, 3),
            "dur": float(each["dur"]),
            "args": {name: arguments[name] for name in ("bytes", "correlation") if name in arguments},
        }
