"""Compiling kernels ahead, once per machine, in a child process, while a plain form of the same function serves.

A `Part` is the kernels of one module for one set of types. While a `Lease` is open, a child process compiles it, and
`Part.ask` returns None until it has, so that the caller uses its plain form. The children of a host wait for one file
lock: the first compiles, and every process loads the machine code from the cache (`penstock.kernel_cache`):

    rank 0   ask() -> None ... plain form ... ask() -> module       (loaded from the cache)
    child          lock, compile, write, mark, unlock
    rank 1   ask() -> None ... plain form ... ask() -> module
    child          (waits for the lock)       finds the mark, exits

Loading takes half a second, most of it numba's import. Where the plain form is good enough for that long, a thread
loads, and `ask` returns None until it has.

Decided in docs/decisions/0016-compiling-beside-the-training.md.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from penstock.errors import ConfigError
from penstock.kernel_cache import cache_folder, mark_of
from penstock.report import print_report

#: Compiling that lasts longer is reported.
PATIENCE_SECONDS = 2.0
_POLL_SECONDS = 0.05
_POLL_PARENT_SECONDS = 0.3
#: How long to wait for the end of a killed child, or for a thread that polls the cache.
_STOP_SECONDS = 1.0
#: How long to wait for a thread that loads: a second, unless a file system hangs.
_LOAD_SECONDS = 10.0
_PROGRAM = "from penstock.compiling import _serve; _serve()"
#: A job's manager sends these to all processes of the job; the training decides what they mean.
_SIGNALS_OF_THE_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: The line on its standard error by which a child reports that it holds the lock and compiles.
_COMPILES = "penstock compiles"


# -- Parts -------------------------------------------------------------------------------------------------


class Lease:
    """Child processes may compile while one is open; closing the last one ends them."""

    def __init__(self, report: Callable[[str], None] | None) -> None:
        """Open it.

        report: called with one line if compiling takes longer than PATIENCE_SECONDS; None: report nothing.
        """
        self.report = report
        with _LEASES_LOCK:
            _LEASES.add(self)

    def close(self) -> None:
        """End child processes and threads unless another lease is open. Finished kernels are kept. Idempotent."""
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
_plain_forms_are_off = False


@contextlib.contextmanager
def without_plain_forms() -> Iterator[None]:
    """Have `Part.ask` wait for the compiler in this block: for a command that writes what stays, such as an import."""
    global _plain_forms_are_off
    before, _plain_forms_are_off = _plain_forms_are_off, True
    try:
        yield
    finally:
        _plain_forms_are_off = before


class Part:
    """Kernels of a module that are compiled together, once per machine."""

    def __init__(
        self, module: str, name: str, what: str, meanwhile: str = "", *, loads_aside: bool = False
    ) -> None:
        """Compile nothing yet.

        module: full name of a module with `compile_part(name)`, which compiles the kernels of this part, or loads them
            from the cache.
        what, meanwhile: for the report: what is compiled, and what serves until then.
        loads_aside: let a thread load compiled kernels while the plain form serves; else the caller of `ask` loads.
        """
        self._module, self._name, self.what, self._meanwhile = module, name, what, meanwhile
        self._loads_aside = loads_aside
        self._ready: ModuleType | None = None
        #: Held by the thread that loads or compiles.
        self._making = threading.Lock()
        #: Protects the fields below: the child, its standard error, the thread that watches it, the one that loads.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._watch: threading.Thread | None = None
        #: Ends the watch. Not an Event: a Ctrl-C within its methods leaves its lock held.
        self._end_of_watch: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._loading: threading.Thread | None = None
        #: Whether slow compiling was reported; whether no child may start; whether compiling or loading failed.
        self._is_reported = self._is_refused = self._is_broken = False
        #: Whether this process was forked while another thread held numba's locks.
        self._is_lost = False
        PARTS.append(self)

    def ask(self) -> ModuleType | None:
        """Return the module if this part of it is loaded; None while a child compiles it or a thread loads it.

        Without an open lease, within `without_plain_forms`, and where no folder can keep machine code, it is `wait`.
        """
        if self._ready is not None:
            return self._ready
        if _plain_forms_are_off or not _LEASES or self.folder is None:
            return self.wait()
        # One thread at a time polls what may be a slow file system; the others use the plain form.
        if not self._lock.acquire(blocking=False):
            return self._ready
        try:
            line, is_for_this_thread = self._poll()
        finally:
            self._lock.release()
        if line:
            self._report(line)
        if is_for_this_thread:
            self._try()
        return self._ready

    def wait(self) -> ModuleType:
        """Return the module once this part is loaded. This process compiles it unless another one does already.

        Raises: ConfigError in a process that was forked while another thread compiled.
        """
        if self._ready is None:
            if self._is_lost:
                raise ConfigError(
                    f"this process was forked while a thread compiled {self.what}, and cannot do so itself: "
                    'run `penstock compile` before, or start processes by "spawn"'
                )
            with self._making:
                if self._ready is None:
                    with self._reported_late():
                        self._ready = _compile(self._module, self._name, self.folder)
        return self._ready

    @property
    def is_cached(self) -> bool:
        """Return whether it was compiled on this machine before."""
        return self.folder is not None and mark_of(self.folder, self._name).exists()

    @functools.cached_property
    def folder(self) -> Path | None:
        """Return the folder of its machine code; None if no folder can be written."""
        return cache_folder(self._module)

    def _poll(self) -> tuple[str, bool]:
        """Return a line to report, or "", and whether the calling thread has to load or compile the part now."""
        if self._is_broken or self._loading is not None:
            return "", False
        # Before the mark is looked for: a child that has exited has written it.
        code = None if self._process is None else self._process.poll()
        if self.is_cached:
            self.end_process()
            return "", not (self._loads_aside and self._start_loading())
        if self._is_refused:
            return "", False
        if self._process is None:
            return "", not self._start_process()
        if code is None:
            return "", False
        lines = [line for line in self._written() if line != _COMPILES] or [f"code {code}"]
        self.end_process()
        self._is_refused = True
        if code < 0:
            # Out of memory, or the job is ending: not the time to compile in the training itself.
            return f"the process that compiled {self.what} was killed: {self._meanwhile} from here on", False
        return f"the process that compiled {self.what} failed ({lines[-1]}): this process compiles it", True

    def _try(self) -> None:
        """Load or compile the part. If that fails, report it and leave the work to the plain form."""
        try:
            self.wait()
        except Exception as error:
            self._is_broken = True
            self._report(f"{self.what} cannot be compiled: {self._meanwhile} from here on: {error}")

    def _start_loading(self) -> bool:
        """Load in a thread; return False if no thread can be started."""
        thread = threading.Thread(target=self._try, name=f"penstock-load-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._loading = thread
        return True

    def _start_process(self) -> bool:
        """Start the child that compiles; return False if there can be none, so that this process has to compile."""
        if not sys.executable or getattr(sys, "frozen", False):
            return False  # the executable is the program itself
        # Entries of other types are legal there, and nothing is imported from them.
        places = [place for place in sys.path if isinstance(place, str) and place]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
        environment.pop("PYTHONINSPECT", None)
        words = [str(os.getpid()), self._module, self._name, str(self.folder)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # The child inherits the mask: signals stay pending until it ignores them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_JOB)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                process_group=0,  # its own: signals to the training's group do not reach it
            )
            self._end_of_watch = queue.SimpleQueue()
            self._watch = threading.Thread(
                target=self._report_late, args=(self._process, self._end_of_watch), daemon=True
            )
            self._watch.start()
        except (OSError, ValueError):  # no more processes are allowed, or this is no Python interpreter
            self.end_process()
            return False
        except RuntimeError:  # this interpreter is shutting down, or no more threads are allowed
            self.end_process()
            self._is_refused = True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return True

    def _written(self) -> list[str]:
        """Return the lines that the child wrote to standard error. The offset, which it shares, stays where it is."""
        if self._errors is None:
            return []
        number = self._errors.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace").strip().splitlines()

    def _report_late(self, process: subprocess.Popen[bytes], end: queue.SimpleQueue[None]) -> None:
        """Report, once, that this process's child compiles. Children of other ranks only wait for the lock."""
        while True:
            with contextlib.suppress(queue.Empty):
                end.get(timeout=max(PATIENCE_SECONDS, _POLL_SECONDS))
                return
            with self._lock:
                if self._process is not process or process.poll() is not None:
                    return
                is_compiling = _COMPILES in self._written()
            if is_compiling:
                self._report_once(
                    f"compiling {self.what}, once on this machine: {self._meanwhile} until then"
                )
                return

    def stop(self, *, for_good: bool = False) -> None:
        """End the child and wait for the thread that loads. for_good: start no other child."""
        self._is_refused = self._is_refused or for_good
        # A thread that polls may hang in a file system, and starts no child after that anyway.
        has_lock = self._lock.acquire(timeout=_STOP_SECONDS)
        self.end_process()
        if has_lock:
            self._lock.release()
        for thread, seconds in ((self._watch, _STOP_SECONDS), (self._loading, _LOAD_SECONDS)):
            if thread is not None and thread is not threading.current_thread():
                thread.join(seconds)

    def end_process(self) -> None:
        """Kill the child, if there is one."""
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        self._end_of_watch.put(None)
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a file system
                process.wait(_STOP_SECONDS)
        if errors is not None:
            errors.close()

    def after_fork(self, *, is_loading_elsewhere: bool) -> None:
        """Leave child and threads to the parent, whose other threads may have held the locks.

        is_loading_elsewhere: whether a thread of the parent was still loading, so that numba's locks stay held here.
        """
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._watch = self._loading = None
        self._is_lost = is_loading_elsewhere
        self._is_broken = self._is_broken or is_loading_elsewhere
        if self._process is not None:
            self._process.returncode = 0  # else its end is waited for when it is collected
            self._process = None

    @contextlib.contextmanager
    def _reported_late(self) -> Iterator[None]:
        if self.is_cached:  # loading starts no timer: the interpreter may be shutting down
            yield
            return
        line = f"compiling {self.what}, once on this machine: waiting for it"
        timer = threading.Timer(PATIENCE_SECONDS, self._report_once, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _report_once(self, line: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._report(line)

    def _report(self, line: str) -> None:
        """Pass a line to the report of one of the leases; print it if there is no lease. Never fail."""
        with _LEASES_LOCK:
            reports = {lease.report for lease in _LEASES} or {print_report}
        report = next(iter(reports - {None}), None)
        if report is not None:
            with contextlib.suppress(Exception):
                report(line)


#: All parts, in the order of their definition.
PARTS: list[Part] = []


# -- The end of the process, and forks ---------------------------------------------------------------------


@atexit.register
def _at_exit() -> None:
    with _interrupts_ignored():
        for part in PARTS:
            part.stop(for_good=True)
    if _was_loaded_by_a_thread:
        _end_by_interrupt_again()


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C for a wait that is bounded: raised in a function of `atexit`, it would print a traceback."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # this is not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _end_by_interrupt_again() -> None:
    """Let the process end by SIGINT if an unhandled KeyboardInterrupt ends the program.

    CPython remembers that in a flag that is reset whenever a string is executed, and numba's import executes strings.
    The same function sets it again: run_eval_code_obj in CPython 3.11's Python/pythonrun.c. An interactive
    interpreter goes on after an interrupt, and ends as usual.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1"):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt", {})


_forking = threading.local()


def _before_fork() -> None:
    """Wait for a thread that loads: numba's locks, and those of imports, would stay held in the forked process."""
    _forking.has_lock = _LOADING.acquire(timeout=_LOAD_SECONDS)


def _after_fork_in_parent() -> None:
    if _forking.has_lock:
        _LOADING.release()


def _after_fork_in_child() -> None:
    global _LOADING, _LEASES_LOCK
    _LOADING, _LEASES_LOCK = threading.RLock(), threading.RLock()
    for part in PARTS:
        part.after_fork(is_loading_elsewhere=not _forking.has_lock)


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


# -- Compiling ---------------------------------------------------------------------------------------------


def _compile(
    module: str, name: str, folder: Path | None, begin: Callable[[], None] = lambda: None
) -> ModuleType:
    """Compile a part, or load it if another process compiled it; return its module.

    begin: called when it is this process that compiles, with the lock held.
    """
    if folder is None:
        return _loaded(module, name, "")
    mark = mark_of(folder, name)
    with contextlib.ExitStack() as stack:
        if not mark.exists():
            stack.enter_context(_locked(folder / "lock", mark.exists))
            if not mark.exists():
                begin()
        loaded = _loaded(module, name, str(folder))
        if not mark.exists():
            with contextlib.suppress(OSError):  # a full disk: the next process compiles again
                mark.touch()
        return loaded


#: Held while a thread imports numba, loads or compiles. Reentrant: the thread that loads may fork.
_LOADING = threading.RLock()
_was_loaded_by_a_thread = False


def _loaded(module: str, name: str, folder: str) -> ModuleType:
    """Import a module whose kernels are kept in a folder, and compile or load a part of it."""
    global _was_loaded_by_a_thread
    with _LOADING:
        if threading.current_thread() is not threading.main_thread():
            _was_loaded_by_a_thread = True
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
    """Hold a lock that ends with its process, or return without it once the work is done."""
    with path.open("ab") as file:
        while not is_done():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
            except OSError:  # a file system without locks: two may compile, and each replaces complete files
                break
            else:
                break
        yield


def _serve() -> None:
    """Run the child that compiles. It ends with the training that started it, even in the middle of a kernel."""
    for number in _SIGNALS_OF_THE_JOB:
        signal.signal(number, signal.SIG_IGN)
    # Not nice: threads that decode on all processors would starve the compiler that speeds them up.
    parent, module, name, place = sys.argv[1:]
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    folder = Path(place)
    _compile(module, name, folder, begin=lambda: print(_COMPILES, file=sys.stderr, flush=True))
    mark_of(folder, name).touch()  # raises what the disk refuses, which the training reports


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_PARENT_SECONDS)
    os._exit(1)
