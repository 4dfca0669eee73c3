"""Where compiled kernels are kept on disk.

The folder is Penstock's own: $PENSTOCK_CACHE, else `penstock` in $NUMBA_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache, else
(not writable, full, or no home) a folder of the user below the system's temporary one, else one that is removed when
the process ends. Kernels in a folder that cannot be written, as in a read-only image, are used where they are.

Each set of sources, numba version and settings has a folder of its own (`_version`). One that nobody has used for 30
days is removed. A file in it holds the machine code of one part for one kind of processor.

Decided in docs/decisions/0016-compiling-beside-the-training.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from penstock.files import write_whole
from penstock.machine_code import Loop, MachineCode, Signature

#: What is plain Python and compiled as well, by folder.
_PLAIN = {
    "policy": ["decisions.py"],
    "transforms": ["geometry.py", "jpeg.py"],
    "simulate": ["_clock.py", "../policy/decisions.py"],
}
_UNUSED_SECONDS = 30 * 24 * 3600
#: All kernels and numba's own files take 5 MB.
_LEAST_BYTES = 16 << 20


class Folders(NamedTuple):
    """Where the kernels of a package are.

    read: looked for in these, the first one first. kept: written to this one; None if no folder can be written.
    note: why $PENSTOCK_CACHE is not the one that is written, or "".
    """

    read: tuple[Path, ...]
    kept: Path | None
    note: str


def folders_of(module: str) -> Folders:
    """Return where the kernels of a module of Penstock, and of those next to it, are kept."""
    # By its name: to search for it asks a disk, which may fail.
    return _folders(_version(Path(__file__).parent.joinpath(*module.split(".")[1:-1])))


def file_of(folder: Path, part: str, signature: Signature) -> Path:
    """Return the file of a part's machine code for a processor such as this one."""
    types = hashlib.sha256(repr(signature).encode()).hexdigest()[:8]
    return folder / f"{part}-{types}-{_processor()}".replace(" ", "-")


def read_code(file: Path) -> MachineCode | None:
    """Return the machine code in a file; None where there is none, or the file is not whole: it is removed."""
    code = None
    with contextlib.suppress(OSError):
        code = MachineCode.from_bytes(file.read_bytes())
        if code is None:  # power was lost, or a disk is failing
            file.unlink()
    return code


def kept_loop(module: str, part: str, signature: Signature, *, compiles: bool) -> Loop | None:
    """Return a compiled loop from disk; None where it is not there, unless this process is to compile it, and keep it.

    module: full name of a module with `compile_part(part)`, as `penstock.compiling.Part` wants it.
    """
    folders = folders_of(module)
    for folder in folders.read:
        if (code := read_code(file_of(folder, part, signature))) is not None:
            return Loop(code, signature)
    if not compiles:
        return None
    code = importlib.import_module(module).compile_part(part)
    if folders.kept is not None:
        with contextlib.suppress(OSError):  # it is compiled anew next time
            write_whole(file_of(folders.kept, part, signature), code.to_bytes())
    return Loop(code, signature)


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
    plain = [sources / name for name in _PLAIN.get(sources.name, ())]
    for path in (*sorted(sources.glob("*kernel*.py")), *plain, Path(__file__).with_name("kernel.py")):
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


def _folders(name: str) -> Folders:
    read: list[Path] = []
    kept: Path | None = None
    asked, note = os.environ.get("PENSTOCK_CACHE"), ""
    for parent in _parents():
        folder = parent / "kernels" / name
        problem = "" if kept is not None else _why_not_written(parent, folder)
        with contextlib.suppress(OSError):  # a disk that fails
            # Machine code from a stranger's folder is not run.
            if _is_own(parent) and folder.is_dir():
                read.append(folder)
        if problem and asked and str(parent) == asked:
            note = f"PENSTOCK_CACHE is {asked!r}, which {problem}"
        if not problem and kept is None:
            kept = folder
            _remove_unused(folder.parent)
    if kept is None:
        with contextlib.suppress(OSError):
            kept = Path(tempfile.mkdtemp(prefix="penstock-kernels-"))
            atexit.register(_remove_own, kept, os.getpid())
            read.append(kept)
    return Folders(tuple(read), kept, note)


def _why_not_written(parent: Path, folder: Path) -> str:
    """Return what keeps kernels from being written to a folder, or "" if nothing does; make the folder."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(parent):
            return "belongs to another user"
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        system = os.statvfs(folder)
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    return "is full" if system.f_bavail * system.f_frsize < _LEAST_BYTES else ""


def _is_own(parent: Path) -> bool:
    # The effective user, who makes the folder: a server may have put root's rights aside.
    with contextlib.suppress(OSError):
        return parent.stat().st_uid in (os.geteuid(), 0)
    return False


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
