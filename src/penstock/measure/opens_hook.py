"""What a recorded Python runs at its start, as `sitecustomize`: it notes each file that is opened.

This file is copied into a folder that PYTHONPATH names, and imports nothing of Penstock, nor anything that a
bare Python does not load anyway. A note that cannot be written is left out: the recorded program must not be
the one to suffer.

A line is: seconds since 1970, process, `R`, `W` or `begin`, size in bytes, path as JSON; between them tabs.
"""

import os
import sys
import time

LOG = "PENSTOCK_OPENS_LOG"


def _install(log: str) -> None:
    from _json import encode_basestring_ascii as quoted
    from stat import S_ISREG

    now, pid_of, stat, fstat, write = time.time, os.getpid, os.stat, os.fstat, os.write
    written = os.O_WRONLY | os.O_RDWR
    flags_of_log = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(log, flags_of_log)
    state = fstat(descriptor)
    log_identity = (state.st_dev, state.st_ino)
    log_path = os.path.abspath(log)

    def note(line: str) -> None:
        nonlocal descriptor
        try:
            # A program may close descriptors that are not its own, and the number then be another file's.
            state = fstat(descriptor)
            is_ours = (state.st_dev, state.st_ino) == log_identity
        except OSError:
            is_ours = False
        if not is_ours:
            descriptor = os.open(log_path, flags_of_log)
        write(descriptor, line.encode())

    def opened(event: str, args: tuple[object, ...]) -> None:
        if event != "open":
            return
        try:
            path, mode, flags = args
            if isinstance(path, int) or not isinstance(path, str | bytes) or path == log_path:
                return
            name = os.fsdecode(path)
            if isinstance(mode, str):
                writes = not mode.startswith("r") or "+" in mode
            else:
                writes = isinstance(flags, int) and bool(flags & written)
            size = 0
            if not writes:
                state = stat(name)
                if not S_ISREG(state.st_mode):
                    return
                size = state.st_size
            kind = "W" if writes else "R"
            note(f"{now():.6f}\t{pid_of()}\t{kind}\t{size}\t{quoted(os.path.abspath(name))}\n")
        except (OSError, ValueError):
            return

    note(f'{now():.6f}\t{pid_of()}\tbegin\t0\t""\n')
    sys.addaudithook(opened)


def _run_the_next(here: str) -> None:
    """Run the `sitecustomize` that this one hides, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if LOG in os.environ:
        try:
            _install(os.environ[LOG])
        except OSError:  # (not contextlib.suppress: a bare Python has not loaded that)
            LOG = ""
    _run_the_next(os.path.dirname(os.path.abspath(__file__)))
