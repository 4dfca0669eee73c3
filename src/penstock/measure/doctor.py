"""What this machine allows a training, on one page, and what of it would limit one."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.flow.cpus import cpu_limit, memory_limit_bytes
from penstock.kernel_cache import folders_of
from penstock.loader.transforms.decoders import decoder_versions
from penstock.store.mounts import Mount, is_network, mount_of, mounted
from penstock.units import format_bytes

_VERSIONS = ("penstock", "numpy", "numba", "torch", "jax", "pyarrow", "fsspec", "obstore", "mpi4py")
#: Below these a training is limited, or may break off.
_FEW_FILES, _LITTLE_SHARED_BYTES, _LITTLE_DISK_BYTES = 1024, 1 << 30, 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact, in words. concern: how it would limit a training, and what to do; "" where it does not."""

    what: str
    value: str
    concern: str = ""


def examine(paths: Iterable[str | os.PathLike[str]]) -> list[Finding]:
    """Return what this machine allows. paths: whose file systems to name, as of the data and of the snapshots."""
    (cpus, reason), memory = cpu_limit(), memory_limit_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [judge_processors(cpus, reason, os.cpu_count() or 1), Finding("memory", format_bytes(memory))]
    found.append(judge_open_files(soft, hard))
    mounts = mounted()
    if Path("/dev/shm").is_dir():
        found.append(judge_shared_memory(shutil.disk_usage("/dev/shm").free))
    for path in paths:
        found.append(judge_place(path, mount_of(path, mounts), _free_bytes(path)))
    decoders = decoder_versions()
    named = ", ".join(f"{name} {number}" for name, number in decoders.items())
    concern = "" if decoders else "images cannot be decoded: pip install 'penstock[images]'"
    found.append(Finding("image decoders", named or "none", concern))
    kept = folders_of("penstock.flow.engine")
    concern = kept.note or (
        "" if kept.kept else "kernels are compiled at every start: give a folder as PENSTOCK_CACHE"
    )
    found.append(Finding("compile cache", str(kept.kept or "none"), concern))
    found.append(Finding("versions", f"Python {sys.version.split()[0]}, {', '.join(_installed())}"))
    return found


def judge_processors(cpus: int, reason: str, online: int) -> Finding:
    """Return the processors that this process may use, for a reason in words, of so many that are online."""
    value = f"{cpus} of {online} ({reason})"
    if cpus == 1:
        return Finding("processors", value, "decoding and training share one processor: ask for more")
    if cpus < online:
        return Finding(
            "processors",
            value,
            "this process may not use the others: raise the affinity, quota or share if decoding limits it",
        )
    return Finding("processors", value)


def judge_open_files(soft: int, hard: int) -> Finding:
    """Return how many files may be open at once."""
    value = f"{soft:,}" if soft == hard else f"{soft:,}, up to {hard:,}"
    few = f"shards and many readers need more: ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}"
    return Finding("open files", value, few if 0 <= soft < _FEW_FILES else "")


def judge_shared_memory(free_bytes: int) -> Finding:
    """Return what worker processes and ranks can share."""
    little = "worker processes share batches there: raise it, as docker run --shm-size 8g does"
    return Finding(
        "/dev/shm", f"{format_bytes(free_bytes)} free", little if free_bytes < _LITTLE_SHARED_BYTES else ""
    )


def judge_place(path: str | os.PathLike[str], mount: Mount | None, free_bytes: int | None) -> Finding:
    """Return where a path lies, and what of the file system slows reads or hinders saves there."""
    what = f"file system of {os.fspath(path)}"
    if mount is None or free_bytes is None:
        return Finding(what, "not there", "name a folder that exists")
    value = (
        f"{mount.kind} on {mount.device} at {mount.point} ({mount.options}), {format_bytes(free_bytes)} free"
    )
    options = mount.options.split(",")
    concerns = []
    if is_network(mount.kind):
        concerns.append(
            "a network file system: measure it with penstock calibrate, and keep samples on a local disk"
        )
    if "ro" in options:
        concerns.append("read-only: snapshots and caches cannot lie here")
    if "strictatime" in options:
        concerns.append("each read writes its time: mount it with relatime or noatime")
    if "sync" in options:
        concerns.append("every write waits for the device: saves are slow here")
    if "ro" not in options and free_bytes < _LITTLE_DISK_BYTES:
        concerns.append("nearly full: saves will fail")
    return Finding(what, value, "; ".join(concerns))


def _free_bytes(path: str | os.PathLike[str]) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _installed() -> list[str]:
    found = []
    for name in _VERSIONS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found
