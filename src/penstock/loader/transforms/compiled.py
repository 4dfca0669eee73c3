"""Brings the compiled kernels in: from a cache of their machine code where there is one.

The cache belongs to Penstock alone: $PENSTOCK_CACHE, else $XDG_CACHE_HOME/penstock, else ~/.cache/penstock, else (not
writable) a folder of the user below the system's temporary one, else one that goes with the process. Entries of
versions that nobody has used for thirty days are removed.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_UNUSED_SECONDS = 30 * 24 * 3600
_LOCK = threading.Lock()


def load_kernels() -> ModuleType:
    """Import `penstock.loader.transforms.kernels`, ready to run; compiling takes ten seconds, loading 0.2."""
    with _LOCK:
        config: Any = import_module("numba").config
        before = config.CACHE_DIR, config.SLP_VECTORIZE
        config.CACHE_DIR, config.SLP_VECTORIZE = str(_cache_folder()), 1
        try:
            return import_module("penstock.loader.transforms.kernels")
        finally:
            config.CACHE_DIR, config.SLP_VECTORIZE = before


def _cache_folder() -> Path:
    import numba

    source = Path(__file__).with_name("kernels.py").read_bytes()
    version = hashlib.sha256(source + numba.__version__.encode()).hexdigest()[:16]
    base = os.environ.get("PENSTOCK_CACHE")
    if base is None:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "penstock")
    for parent in (Path(base), Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"):
        folder = parent / "kernels" / version
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The effective user, who makes the folder: a server may have put root's rights aside.
            if parent.stat().st_uid != os.geteuid():
                continue  # machine code from a stranger's folder is not run
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
        except OSError:
            continue
        _remove_unused(folder.parent)
        return folder
    folder = Path(tempfile.mkdtemp(prefix="penstock-kernels-"))
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    oldest = time.time() - _UNUSED_SECONDS
    for entry in folder.iterdir():
        if entry.stat().st_mtime < oldest:
            shutil.rmtree(entry, ignore_errors=True)
