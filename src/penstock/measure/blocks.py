"""Recording what a command asks of its files, while it runs: by strace, or by a hook in Python.

| means    | sees                                        | does not see                                     |
|----------|---------------------------------------------|--------------------------------------------------|
| `strace` | each read and write with file and offset    | page faults of mapped files, io_uring            |
| `opens`  | each open of Python's, as its whole file    | offsets; what C and C++ open: torch.save, OpenCV |

strace's log is read from a pipe and becomes rows as it is written: no log grows on the disk, and a recorder
that is killed leaves all but the last moments. strace then continues without it until the command has ended, and
complains: it must not be killed, since the kernel answers ENOSYS to a call that is filtered for a tracer which is
gone. docs/howto/record-references.md has what each means costs.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.measure import opens_hook
from penstock.measure.running import Interrupts, check_command, running, status_of
from penstock.recordings.blocks import Recording, RecordingWriter, read_recording
from penstock.recordings.imports import import_recording
from penstock.recordings.strace import CALLS, StraceReader
from penstock.trace.trace import JSON

#: The means there are.
MEANS = ("strace", "opens")

_READ_BYTES = 1 << 20
_ROWS_AT_ONCE = 16_384
_POLL_SECONDS = 0.1
#: Rows wait at most this long before they are written.
_WRITE_SECONDS = 1.0
_PROBE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording that was made."""

    recording: Recording
    #: Of the command; 128 and the signal's number where a signal ended it, as shells have it.
    exit_status: int
    #: The signal that interrupted the recording, None if none did.
    interrupted_by: int | None
    seconds: float
    #: Processes that used io_uring, whose reads strace does not see.
    rings: int = 0


def record(
    command: Sequence[str],
    out: str | os.PathLike[str],
    *,
    by: str = "strace",
    data: Sequence[str | os.PathLike[str]] = (),
    checkpoints: Sequence[str | os.PathLike[str]] = (),
    stdout: int | None = None,
) -> Recorded:
    """Run a command and write what it asks of its files into a recording.

    command: program and arguments; it inherits the standard streams and the environment.
    out: the recording; an existing file is replaced once the command is found to be one that can run.
    by: one of `MEANS`.
    data, checkpoints: what `PhaseRule` is to count as data set and as checkpoints.
    stdout: a descriptor for the command's output instead of this process's own.

    Called from the main thread. A Ctrl-C or SIGTERM is passed on to the command unless the terminal did so, the
    recording continues until it has ended, and is marked as not complete; a second one kills the command.
    Raises: ConfigError when the command is not found, `by` is unknown, strace is missing or may not trace;
    OSError when the recording cannot be written, after which the command is ended.
    """
    if by not in MEANS:
        raise ConfigError(f"{by!r} is no means of recording: give one of {', '.join(MEANS)}")
    check_command(command)
    if not Path(out).absolute().parent.is_dir():
        raise ConfigError(f"{os.fspath(out)}: there is no folder {Path(out).parent}: make it first")
    meta: dict[str, JSON] = {
        "by": by,
        "command": [os.fsencode(word).decode(errors="replace") for word in command],
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        # As the kernel names them: strace prints such paths.
        "data": [os.path.realpath(path) for path in data],
        "checkpoints": [os.path.realpath(path) for path in checkpoints],
    }
    with tempfile.TemporaryDirectory(prefix="penstock-blocks-") as folder:
        if by == "strace":
            return _record_strace(command, out, meta, Path(folder), stdout)
        return _record_opens(command, out, meta, Path(folder), stdout)


def _record_strace(
    command: Sequence[str],
    out: str | os.PathLike[str],
    meta: dict[str, JSON],
    folder: Path,
    stdout: int | None,
) -> Recorded:
    strace = _usable_strace()
    pipe = folder / "log"
    os.mkfifo(pipe)
    options = [*_options(strace), "-o", str(pipe), "--", *command]
    reader = StraceReader("strace", os.getcwd())
    with RecordingWriter(out, meta) as writer, _open_pipe(pipe) as log, Interrupts() as interrupts:
        begun = time.perf_counter()
        with running(options, None, stdout, interrupts, is_traced=True) as process:
            is_complete = _drain(log, process, reader, writer)
            process.wait()
        seconds = time.perf_counter() - begun
        writer.append(*reader.take())
        writer.close(is_complete=is_complete and interrupts.first is None, unresolved=reader.unresolved)
    return Recorded(
        read_recording(out), status_of(process.returncode), interrupts.first, seconds, len(reader.rings)
    )


def _record_opens(
    command: Sequence[str],
    out: str | os.PathLike[str],
    meta: dict[str, JSON],
    folder: Path,
    stdout: int | None,
) -> Recorded:
    log = folder / "opens"
    log.touch()
    hook = folder / "hook"
    hook.mkdir()
    shutil.copyfile(opens_hook.__file__, hook / "sitecustomize.py")
    places = [str(hook), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), opens_hook.LOG: str(log)}
    with RecordingWriter(out, meta) as writer, Interrupts() as interrupts:
        begun = time.perf_counter()
        with running(command, environment, stdout, interrupts, is_traced=False) as process:
            process.wait()
        seconds = time.perf_counter() - begun
        if not log.stat().st_size:
            raise ConfigError(
                f"{command[0]} ran, but no Python in it loaded the hook: 'opens' records Python alone, started without "
                "-I, -E or -S: record by strace"
            )
        found = import_recording([log], "opens")
        writer.append(found.rows, dict(enumerate(found.files)))
        writer.close(is_complete=found.is_complete and interrupts.first is None)
    return Recorded(read_recording(out), status_of(process.returncode), interrupts.first, seconds)


# -- strace ------------------------------------------------------------------------------------------------


def _options(strace: str) -> list[str]:
    # -y although its paths cost a readlink for each call: it saves stopping at close, which costs as much.
    quiet = ["-s", "0", "-e", "signal=none"]
    return [strace, "-f", "--seccomp-bpf", "-ttt", "-y", *quiet, "-e", f"trace={CALLS}"]


def _usable_strace() -> str:
    strace = shutil.which("strace")
    if strace is None:
        raise ConfigError("strace is not found: apt-get install strace, or record by opens (--by opens)")
    probe = [*_options(strace), "-o", os.devnull, "--", shutil.which("true") or sys.executable]
    try:
        tried = subprocess.run(
            probe, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired as late:
        raise ConfigError(f"strace does not answer within {_PROBE_SECONDS:g} s: record by opens") from late
    if tried.returncode:
        said = " ".join(tried.stderr.split())[:300]
        if "not permitted" in said.lower() or "permission" in said.lower():
            raise ConfigError(
                f"strace may not trace here ({said}): allow it (in a container --cap-add SYS_PTRACE; see "
                "/proc/sys/kernel/yama/ptrace_scope; nothing may trace the process already), or record by opens"
            )
        raise ConfigError(
            f"strace cannot record here ({said}): it has to be 5.3 or newer; or record by opens"
        )
    return strace


@contextmanager
def _open_pipe(pipe: Path) -> Iterator[int]:
    # Without waiting for a writer: strace may fail before it opens its log.
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with suppress(
            OSError
        ):  # more space, so that the traced processes wait less often; a limit may forbid it
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _READ_BYTES)
        yield descriptor
    finally:
        os.close(descriptor)


def _drain(log: int, process: subprocess.Popen[bytes], reader: StraceReader, writer: RecordingWriter) -> bool:
    """Take strace's lines until it closes its log; return whether the last one was complete."""
    poller = select.poll()
    poller.register(log, select.POLLIN)
    rest = b""
    written = time.monotonic()
    while True:
        events = poller.poll(_POLL_SECONDS * 1e3)
        if events and events[0][1] & select.POLLIN:
            *lines, rest = (rest + os.read(log, _READ_BYTES)).split(b"\n")
            for line in lines:
                reader.feed(line.decode("utf-8", "surrogateescape"))
        elif events or process.poll() is not None:  # closed, or never opened
            return not rest
        if reader.pending >= _ROWS_AT_ONCE or time.monotonic() - written > _WRITE_SECONDS:
            writer.append(*reader.take())
            written = time.monotonic()
