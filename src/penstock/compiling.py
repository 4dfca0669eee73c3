"""Compiling kernels ahead: once per machine, by another process, while a plain form of the same function serves.

A `Part` is the kernels of one module for one set of types, compiled ahead of their first call. While a `Lease` is
open, a child process compiles, and `Part.ask` returns None until it has, so that the caller uses its plain form. All
processes of a host wait for the same file lock, so one compiles and the others load its machine code from the cache:

    rank 0   ask() -> None ... serves plain forms ... ask() -> module       (loaded from the cache)
    process        lock, compile, write, mark, unlock
    rank 1   ask() -> None ... serves plain forms ... ask() -> module
    process        (waits for the lock)            finds the mark, ends

The cache is Penstock's own: $PENSTOCK_CACHE, else penstock in $NUMBA_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache, else (not
writable) a folder of the user below the system's temporary one, else one that goes with the process. What is found
in the first and cannot be written there, in a read-only image, is copied to the next. Versions that nobody has used
for thirty days are removed.

Decided in docs/decisions/0016-compiling-beside-the-training.md.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import IO, Any

_UNUSED_SECONDS = 30 * 24 * 3600
#: A wait that lasts longer is reported.
PATIENCE_SECONDS = 2.0
_LOOK_SECONDS = 0.05
#: How long the end of a process, or of a look at the cache, is waited for.
_STOP_SECONDS = 1.0
_LOOK_FOR_PARENT_SECONDS = 0.3
#: A quarter of a processor where training wants all of them: at 19 it would take minutes there.
_NICENESS = 5
_PROGRAM = "from penstock.compiling import _serve; _serve()"
#: A job's manager sends them to all of its processes; what they mean is the training's to say.
_OF_THE_TRAINING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


# -- Parts -------------------------------------------------------------------------------------------------


class Lease:
    """While one is open, what it asks for is compiled by processes beside this one; they end with the last."""

    def __init__(self, report: Callable[[str], None] | None) -> None:
        """report: is called with one line if compiling takes longer than PATIENCE_SECONDS; None: silence."""
        self.report = report
        with _LEASES_LOCK:
            _LEASES.add(self)

    def close(self) -> None:
        """End the processes if nobody else waits for them; what they have compiled by now is kept. Idempotent."""
        if self._is_last():
            for part in PARTS:
                part.stop()

    def __del__(self) -> None:
        """Close it with its owner, without a part's lock: the thread that collects it may hold that."""
        if self._is_last():
            for part in PARTS:
                part.end_process()

    def _is_last(self) -> bool:
        with _LEASES_LOCK:
            _LEASES.discard(self)
            return not _LEASES


_LEASES: weakref.WeakSet[Lease] = weakref.WeakSet()
#: Protects _LEASES. Reentrant: a lease may be collected while its holder changes them.
_LEASES_LOCK = threading.RLock()


class Part:
    """Kernels of a module that are compiled together, once per machine."""

    def __init__(self, module: str, name: str, what: str, meanwhile: str = "") -> None:
        """Compile nothing yet.

        module: its full name; it has `compile_part(name)`, which compiles the kernels of this part ahead, or loads
            them. what, meanwhile: for the report: what is compiled, and what serves until then.
        """
        self._module, self._name, self.what, self._meanwhile = module, name, what, meanwhile
        self._ready: ModuleType | None = None
        #: Held by the thread that loads or compiles.
        self._making = threading.Lock()
        #: Protects what follows: the process that compiles, what it wrote to standard error, and when it began.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._began_seconds = 0.0
        self._is_reported = self._is_refused = self._is_broken = False
        PARTS.append(self)

    def ask(self) -> ModuleType | None:
        """Return the module if this part of it runs at once; None while a process beside this one compiles it.

        Without an open lease, and where no folder can keep what is compiled, it is `wait`.
        """
        if self._ready is not None:
            return self._ready
        if not _LEASES or self.folder is None:
            return self.wait()
        # Where another thread looks, nobody waits for what may be a slow file system.
        if not self._lock.acquire(blocking=False):
            return self._ready
        try:
            line, is_for_this_process = self._look()
        finally:
            self._lock.release()
        if line:
            self._say(line)
        if is_for_this_process:
            self._try()
        return self._ready

    def wait(self) -> ModuleType:
        """Return the module once this part of it is compiled: by this process, unless another has begun."""
        if self._ready is None:
            with self._making:
                if self._ready is None:
                    with self._reported_late():
                        self._ready = _compile(self._module, self._name, self.folder)
        return self._ready

    @property
    def is_cached(self) -> bool:
        """Return whether it was compiled on this machine before."""
        return self.folder is not None and _mark(self.folder, self._name).exists()

    @functools.cached_property
    def folder(self) -> Path | None:
        """Return where its machine code is kept; None if no folder can be had."""
        return cache_folder(self._module)

    def _look(self) -> tuple[str, bool]:
        """Return a line to report, or "", and whether this process is to load or compile the part now."""
        if self._is_broken:
            return "", False
        code = None if self._process is None else self._process.poll()
        if self.is_cached:
            self.end_process()
            return "", True
        if self._is_refused:
            return "", False
        if self._process is None:
            return "", not self._begin()
        if code is None:
            if self._is_reported or time.monotonic() - self._began_seconds <= PATIENCE_SECONDS:
                return "", False
            self._is_reported = True
            return f"compiling {self.what}, once on this machine: {self._meanwhile} until then", False
        if code < 0:
            # Out of memory, or somebody's wish: not the time to begin anew in the training itself.
            self.end_process()
            self._is_refused = True
            return f"the process that compiled {self.what} was killed: {self._meanwhile} from here on", False
        assert self._errors is not None, "a process that was begun writes its errors somewhere"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or [f"code {code}"]
        self.end_process()
        return f"the process that compiled {self.what} failed ({lines[-1]}): this process compiles it", True

    def _try(self) -> None:
        """Load or compile the part; where that fails, report it, and let the plain form serve."""
        try:
            self.wait()
        except Exception as error:
            self._is_broken = True
            self._say(f"{self.what} cannot be compiled: {self._meanwhile} from here on: {error}")

    def _begin(self) -> bool:
        """Begin the process that compiles; return False if none can be had, so that this one has to."""
        # Entries of other types are legal there, and nothing is imported from them.
        places = [place for place in sys.path if isinstance(place, str) and place]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
        environment.pop("PYTHONINSPECT", None)
        words = [str(os.getpid()), self._module, self._name, str(self.folder)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # Inherited: until it ignores them, they wait.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TRAINING)
        try:
            self._process = subprocess.Popen(
                [sys.executable or "python3", "-P", "-c", _PROGRAM, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                process_group=0,  # of its own: what is sent to the training's group is not for it
            )
        except (OSError, ValueError):  # no more processes are allowed here, or this is no Python interpreter
            self.end_process()
            return False
        except RuntimeError:  # this one is shutting down
            self.end_process()
            self._is_refused = True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._began_seconds = time.monotonic()
        return True

    def stop(self, *, for_good: bool = False) -> None:
        """End the process that compiles, if there is one. for_good: begin no other."""
        self._is_refused = self._is_refused or for_good
        # A thread that looks may hang in a file system: then no process begins any more all the same.
        has_lock = self._lock.acquire(timeout=_STOP_SECONDS)
        self.end_process()
        if has_lock:
            self._lock.release()

    def end_process(self) -> None:
        """Kill the process that compiles, if there is one."""
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a file system
                process.wait(_STOP_SECONDS)
        if errors is not None:
            errors.close()

    def after_fork(self) -> None:
        """Leave the process to the parent; its lock may have been held by a thread that is not here."""
        self._lock, self._making = threading.Lock(), threading.Lock()
        if self._process is not None:
            self._process.returncode = 0  # else its end is waited for when it is collected
            self._process = None

    @contextlib.contextmanager
    def _reported_late(self) -> Iterator[None]:
        if (
            self.is_cached
        ):  # it is only loaded, perhaps while the interpreter shuts down and starts no more threads
            yield
            return
        line = f"compiling {self.what}, once on this machine: waiting for it"
        timer = threading.Timer(PATIENCE_SECONDS, self._report, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _report(self, line: str) -> None:
        """Say it once."""
        if not self._is_reported:
            self._is_reported = True
            self._say(line)

    def _say(self, line: str) -> None:
        """Report a line to one of those who ask, or print it if nobody has a lease; never fail."""
        with _LEASES_LOCK:
            reports = {lease.report for lease in _LEASES} or {_print}
        report = next(iter(reports - {None}), None)
        if report is not None:
            with contextlib.suppress(Exception):
                report(line)


#: All there are, in the order of their definition.
PARTS: list[Part] = []


def _print(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)


@atexit.register
def _at_exit() -> None:
    for part in PARTS:
        part.stop(for_good=True)


def _after_fork() -> None:
    global _IMPORTING, _LEASES_LOCK
    _IMPORTING, _LEASES_LOCK = threading.Lock(), threading.RLock()
    for part in PARTS:
        part.after_fork()


os.register_at_fork(after_in_child=_after_fork)


# -- Compiling ---------------------------------------------------------------------------------------------


def _compile(module: str, name: str, folder: Path | None) -> ModuleType:
    """Compile a part, or load it where another process compiled it, and return its module."""
    if folder is None:
        return _loaded(module, name, "")
    mark = _mark(folder, name)
    with contextlib.ExitStack() as stack:
        if not mark.exists():
            stack.enter_context(_locked(folder / "lock", mark.exists))
        loaded = _loaded(module, name, str(folder))
        if not mark.exists():
            with contextlib.suppress(OSError):  # a full disk: the next process compiles again
                mark.touch()
        return loaded


_IMPORTING = threading.Lock()


def _loaded(module: str, name: str, folder: str) -> ModuleType:
    """Import a module whose kernels are kept in a folder, and have a part of it compiled or loaded."""
    with _IMPORTING:
        config: Any = importlib.import_module("numba").config
        before = config.CACHE_DIR
        config.CACHE_DIR = folder or before
        try:
            loaded = importlib.import_module(module)
        finally:
            config.CACHE_DIR = before
        loaded.compile_part(name)
        return loaded


@contextlib.contextmanager
def _locked(path: Path, is_done: Callable[[], bool]) -> Iterator[None]:
    """Hold a lock that ends with its process, or go on without it once there is nothing left to do."""
    with path.open("ab") as file:
        while not is_done():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_SECONDS)
            except OSError:  # a file system without locks: two may compile, and each file is replaced whole
                break
            else:
                break
        yield


def _serve() -> None:
    """Be the process that compiles: end with the training that began it, whatever is being compiled."""
    for number in _OF_THE_TRAINING:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    parent, module, name, folder = sys.argv[1:]
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    _compile(module, name, Path(folder))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_FOR_PARENT_SECONDS)
    os._exit(1)


# -- The cache ---------------------------------------------------------------------------------------------


def _mark(folder: Path, name: str) -> Path:
    """Return the file that says that a part was compiled, for processors such as this one."""
    return folder / f"{name}-{_processor()}"


@functools.cache
def _processor() -> str:
    from llvmlite import binding

    features = binding.get_host_cpu_features().flatten()
    return hashlib.sha256(f"{binding.get_host_cpu_name()} {features}".encode()).hexdigest()[:16]


def cache_folder(module: str) -> Path | None:
    """Return where the kernels of a module, and of those beside it, are kept; None if no folder can be had."""
    found = importlib.util.find_spec(module)
    assert found is not None, f"{module} is a part of Penstock"
    return _writable_folder(_version(Path(str(found.origin)).parent))


@functools.cache
def _version(sources: Path) -> str:
    """Return a name for what the kernels in a folder of sources are compiled from, and with."""
    settings = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and name != "NUMBA_CACHE_DIR"
    )
    known = [str(sources), version("numba"), version("llvmlite"), platform.python_version(), *settings]
    digest = hashlib.sha256("\n".join(known).encode())
    for path in sorted(sources.glob("*kernels.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _writable_folder(name: str) -> Path | None:
    base = os.environ.get("PENSTOCK_CACHE")
    if base is None:
        caches = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
        base = os.path.join(caches or os.path.expanduser("~/.cache"), "penstock")
    baked: Path | None = None
    for parent in (Path(base), Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"):
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
    folder.parent.mkdir(parents=True, exist_ok=True)
    copy = Path(tempfile.mkdtemp(dir=folder.parent))
    shutil.copytree(baked, copy, dirs_exist_ok=True)
    with contextlib.suppress(OSError):  # another rank was there first
        copy.rename(folder)
    shutil.rmtree(copy, ignore_errors=True)


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    oldest = time.time() - _UNUSED_SECONDS
    for entry in folder.iterdir():
        if entry.stat().st_mtime < oldest:
            shutil.rmtree(entry, ignore_errors=True)
