"""Where compiled kernels are kept on disk.

The folder is Penstock's own: $PENSTOCK_CACHE, else `penstock` in $NUMBA_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache, else
(not writable, or there is no home) a folder of the user below the system's temporary one, else one that is removed when
the process ends. Kernels found in a folder that cannot be written, as in a read-only image, are copied to the next one.

Each set of sources, numba version and settings has a folder of its own (`_version`). One that nobody has used for 30
days is removed. A file in it holds the machine code of one part for one kind of processor.

Decided in docs/decisions/0016-compiling-beside-the-training.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from penstock.machine_code import Signature

_UNUSED_SECONDS = 30 * 24 * 3600


def cache_folder(module: str) -> Path | None:
    """Return the folder for the kernels of a module and of those next to it; None if no folder can be written."""
    found = importlib.util.find_spec(module)
    assert found is not None, f"{module} is a part of Penstock"
    return _writable_folder(_version(Path(str(found.origin)).parent))


def file_of(folder: Path, part: str, signature: Signature) -> Path:
    """Return the file of a part's machine code for a processor such as this one."""
    types = hashlib.sha256(repr(signature).encode()).hexdigest()[:8]
    return folder / f"{part}-{types}-{_processor()}".replace(" ", "-")


@functools.cache
def _processor() -> str:
    from llvmlite import binding

    features = binding.get_host_cpu_features().flatten()
    return hashlib.sha256(f"{binding.get_host_cpu_name()} {features}".encode()).hexdigest()[:16]


@functools.cache
def _version(sources: Path) -> str:
    """Return a digest of the sources in a folder and of what compiles them: numba alone misses changed callees."""
    settings = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and name != "NUMBA_CACHE_DIR"
    )
    known = [str(sources), version("numba"), version("llvmlite"), platform.python_version(), *settings]
    digest = hashlib.sha256("\n".join(known).encode())
    for path in (*sorted(sources.glob("*kernel*.py")), Path(__file__).with_name("kernel.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _parents() -> list[Path]:
    """Return the folders to try, the preferred one first."""
    own = os.environ.get("PENSTOCK_CACHE")
    if not own:
        caches = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
        own = os.path.join(caches or os.path.expanduser("~/.cache"), "penstock")
    # Without $HOME, a user whom the system does not know has no home: the tilde stays.
    parents = [] if own.startswith("~") else [Path(own)]
    with contextlib.suppress(OSError):  # there is no temporary folder that can be written
        parents.append(Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}")
    return parents


def _writable_folder(name: str) -> Path | None:
    baked: Path | None = None
    for parent in _parents():
        folder = parent / "kernels" / name
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The effective user, who makes the folder: a server may have put root's rights aside.
            if parent.stat().st_uid not in (os.geteuid(), 0):
                continue  # machine code from a stranger's folder is not run
            if baked is not None and not folder.exists():
                _copy(baked, folder)
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
        except OSError:
            baked = folder if folder.is_dir() else baked
            continue
        _remove_unused(folder.parent)
        return folder
    try:
        folder = Path(tempfile.mkdtemp(prefix="penstock-kernels-"))
    except OSError:
        return None
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _copy(baked: Path, folder: Path) -> None:
    """Copy a folder under its final name at once. Other ranks may do the same: the first one wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    # One level down: a copy has its original's age, and another rank removes what looks unused.
    copy = draft / folder.name
    try:
        shutil.copytree(baked, copy)
        os.utime(copy)
        with contextlib.suppress(OSError):
            copy.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    oldest = time.time() - _UNUSED_SECONDS
    entries: list[Path] = []
    with contextlib.suppress(OSError):  # a folder that may be written but not read
        entries = list(folder.iterdir())
    for entry in entries:
        with contextlib.suppress(OSError):  # another process removes it, too
            if entry.stat().st_mtime < oldest:
                shutil.rmtree(entry, ignore_errors=True)
