"""Where compiled kernels are kept on disk.

In the first folder of `penstock.cache_folders` that can be written, else in one that is removed when the process ends.

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
from importlib.metadata import version
from pathlib import Path

from penstock.cache_folders import Folders, find_folders, remove_unused
from penstock.files import write_whole
from penstock.machine_code import Loop, MachineCode, Signature

#: What kernels import from other files and have compiled in, by folder: functions, constants, the order of fields.
_PLAIN = {
    "codecs": ["codec.py"],
    "flow": ["_sums.py", "../trace/schema.py"],
    "loader": ["transforms/_group_kernels.py"],
    "papers": ["../uncounted.py"],
    "policy": ["decisions.py"],
    "ranks": ["mpi_calls.py"],
    "ssd": ["flash.py", "../../uncounted.py"],
    "store": ["examples.py"],
    "transforms": ["geometry.py", "jpeg.py"],
    "simulate": ["_clock.py", "../policy/decisions.py"],
}
_UNUSED_DAYS = 30
#: All kernels and numba's own files take 5 MB.
_LEAST_BYTES = 16 << 20


def folders_of(module: str) -> Folders:
    """Return where the kernels of a module of Penstock, and of those next to it, are kept."""
    return _folders(_version(_sources_of(module)))


def lasting_folder_of(module: str) -> Path | None:
    """Return where kernels of a module are kept that numba loads; None where no folder outlives this process."""
    return _lasting_folders(_version(_sources_of(module))).kept


def file_of(folder: Path, part: str, signature: Signature) -> Path:
    """Return the file of a part's machine code for a processor such as this one."""
    types = hashlib.sha256(repr(signature).encode()).hexdigest()[:8]
    return folder / f"{part}-{types}-{_processor()}".replace(" ", "-")


def read_code(file: Path) -> MachineCode | None:
    """Return the machine code in a file; None where there is none, or the file is damaged: it is removed."""
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
    # Not where they lie: another checkout or environment of the same sources has the same machine code.
    known = [
        str(sources.relative_to(Path(__file__).parent)),
        version("numba"),
        version("llvmlite"),
        platform.python_version(),
        *settings,
    ]
    digest = hashlib.sha256("\n".join(known).encode())
    for path in _compiled_from(sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _sources_of(module: str) -> Path:
    # By its name: to search for it asks a disk, which may fail.
    return Path(__file__).parent.joinpath(*module.split(".")[1:-1])


def _compiled_from(sources: Path) -> list[Path]:
    """Return the files that the kernels of a folder are compiled from, and by."""
    plain = [sources / name for name in _PLAIN.get(sources.name, ())]
    by = [Path(__file__).with_name(name) for name in ("kernel.py", "machine_code.py")]
    return [*sorted(sources.glob("*kernel*.py")), *plain, *by]


def _lasting_folders(name: str) -> Folders:
    folders = find_folders("kernels", name, least_bytes=_LEAST_BYTES)
    if folders.kept is not None:
        remove_unused(folders.kept.parent, _UNUSED_DAYS)
    return folders


def _folders(name: str) -> Folders:
    folders = _lasting_folders(name)
    if folders.kept is not None:
        return folders
    with contextlib.suppress(OSError):
        kept = Path(tempfile.mkdtemp(prefix="penstock-kernels-"))
        atexit.register(_remove_own, kept, os.getpid())
        return Folders((*folders.read, kept), kept, folders.note)
    return folders


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)
