"""A folder mounted through FUSE as a slow network file system serves it: a latency per open and per read, and one wire.

Unlike `SlowSource` it is a file system: the kernel caches its pages, any program can read it, and what
opens files beside reading samples waits for them too. Needs /dev/fuse, mfusepy and the Debian package fuse3.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.measure.slow_source import SharedWire

DEVICE = Path("/dev/fuse")
_START_SECONDS = 30.0
# Requests under way at once: more than the most readers that are ever measured.
_MOST_REQUESTS = 256


def is_possible() -> bool:
    """Return whether this process may mount, and has the programs for it."""
    return os.access(DEVICE, os.W_OK) and shutil.which("fusermount3") is not None


@contextmanager
def mounted(
    folder: Path, mountpoint: Path, open_seconds: float, read_seconds: float, bytes_per_second: float
) -> Iterator[Path]:
    """Mount a folder, read-only, and yield the mount point; unmount it at the end, also from under open files.

    The process that serves it ends with this one, however this one ends.
    mountpoint: an empty folder.
    open_seconds, read_seconds: of each open and of each request to read (at most 128 KB); they overlap.
    bytes_per_second: of all reads together.
    Raises: RuntimeError with what the server said if it cannot mount.
    """
    arguments = [str(folder), str(mountpoint), *map(repr, (open_seconds, read_seconds, bytes_per_second))]
    # The pipe to its standard input tells the server when this process ends.
    server = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert server.stdin is not None
    assert server.stderr is not None
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not os.path.ismount(mountpoint):
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                raise RuntimeError(f"{folder} could not be mounted: {server.stderr.read().decode()}")
            time.sleep(0.01)
        yield mountpoint
    finally:
        _unmount(mountpoint)
        server.kill()
        server.wait()
        server.stdin.close()
        server.stderr.close()


def _unmount(mountpoint: Path) -> None:
    """Take a file system from its place at once; it ends when nothing has it open. Harmless where none is."""
    subprocess.run(["fusermount3", "-u", "-z", "-q", str(mountpoint)], stderr=subprocess.DEVNULL)


def _serve(folder: Path, mountpoint: Path, open_seconds: float, read_seconds: float, rate: float) -> None:
    import mfusepy

    wire = SharedWire(rate)

    class SlowFolder:
        use_ns = True

        def init_with_config(self, conn_info: Any, config_3: Any) -> None:
            # The kernel reads ahead in the background, by default twelve requests at once for all readers.
            conn_info.max_background = conn_info.congestion_threshold = _MOST_REQUESTS

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = os.lstat(f"{folder}{path}")
            return {name: getattr(found, name) for name in _ATTRIBUTES} | {
                name: getattr(found, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")
            }

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(f"{folder}{path}")]

        def open(self, path: str, flags: int) -> int:
            time.sleep(open_seconds)
            return os.open(f"{folder}{path}", os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            asked = time.monotonic()
            data = os.pread(fh, size, offset)
            through = wire.reserve(asked + read_seconds, len(data))
            time.sleep(max(0.0, through - time.monotonic()))
            return data

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    threading.Thread(target=_end_with_parent, args=(mountpoint,), daemon=True).start()
    # libfuse serves ten requests at once by default from 3.12 on, and before as many as there are.
    newer = (mfusepy.fuse_version_major, mfusepy.fuse_version_minor) >= (3, 12)
    mfusepy.FUSE(
        SlowFolder(),
        str(mountpoint),
        foreground=True,
        ro=True,
        kernel_cache=True,  # pages outlive a close, as those of a local disk or NFS do
        **({"max_threads": _MOST_REQUESTS} if newer else {}),
    )


_ATTRIBUTES = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")


def _end_with_parent(mountpoint: Path) -> None:
    sys.stdin.read()
    _unmount(mountpoint)
    os._exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("mountpoint", type=Path)
    for name in ("open_seconds", "read_seconds", "bytes_per_second"):
        parser.add_argument(name, type=float)
    _serve(*vars(parser.parse_args()).values())
