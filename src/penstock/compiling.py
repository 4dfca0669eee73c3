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

Each part has one thread, which starts the child, watches it, ends it and loads. No other thread touches the child:
Python raises KeyboardInterrupt in the main thread only, so that a Ctrl-C neither loses a child nor leaves a lock held.

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
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError
from penstock.kernel_cache import cache_folder, mark_of
from penstock.report import print_report

#: Compiling that lasts longer is reported.
PATIENCE_SECONDS = 2.0
_POLL_SECONDS = 0.05
_POLL_PARENT_SECONDS = 0.3
#: How long to wait for a part's thread, which ends the child; it may hang in a file system.
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
        """End child processes and threads unless another lease is open. Finished kernels are kept. Idempotent.

        A lease that is collected is closed, too; nothing waits for that.
        """
        with _LEASES_LOCK:
            _LEASES.discard(self)
            is_last = not _LEASES
        if is_last:
            for part in PARTS:
                part.stop()


#: Those that are open. Without one, the parts' threads end their children.
_LEASES: weakref.WeakSet[Lease] = weakref.WeakSet()
#: Protects _LEASES, and which thread a part has. Reentrant: a report may close a lease.
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
        #: The thread that has this part compiled and loads it, while it runs.
        self._thread: threading.Thread | None = None
        #: Has the thread look at once whether it is still wanted. Not an Event: a Ctrl-C in it leaves its lock held.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_loading = False
        #: Whether the next caller of `ask` compiles or loads; whether slow compiling was reported; whether no child may
        #: start; whether compiling or loading failed.
        self._is_for_caller = self._is_reported = self._is_refused = self._is_broken = False
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
        if self._thread is None and not self._is_broken and (self._is_for_this_thread() or not self._start()):
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
        return self.folder is not None and os.path.exists(mark_of(self.folder, self._name))

    @functools.cached_property
    def folder(self) -> Path | None:
        """Return the folder of its machine code; None if no folder can be written."""
        return cache_folder(self._module)

    def _is_for_this_thread(self) -> bool:
        """Return whether the caller of `ask` has to compile or load. What loads aside asks no file system here."""
        return self._is_for_caller or not _has_interpreter() or (not self._loads_aside and self.is_cached)

    def _start(self) -> bool:
        """Start the part's thread; return False if there can be none, and compiled kernels wait to be loaded."""
        with _LEASES_LOCK:
            if self._thread is not None or self._ready is not None or not self._is_wanted():
                return True
            self._thread = _started(self._run, f"penstock-load-{self._name}", *self._child())
        # No more threads are allowed, or the interpreter is shutting down: loading can do without.
        return self._thread is not None or not self.is_cached

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        """Have the part compiled, and load it where that is done aside: what the part's thread does."""
        with _LEASES_LOCK:
            self._thread = threading.current_thread()  # also if an interrupt kept `_start` from noting it
        try:
            if not self.is_cached:
                self._run_child(command, environment)
            if self._is_for_caller or not self.is_cached:
                return
            # In this order: `stop`, after the last lease, looks whether to wait for loading.
            self._is_loading = self._loads_aside
            if self._is_loading and self._is_wanted():
                self._try()
        finally:
            self._is_loading = False
            with _LEASES_LOCK:
                self._thread = None

    def _is_wanted(self) -> bool:
        return bool(_LEASES) and not self._is_refused

    def _try(self) -> None:
        """Load or compile the part. If that fails, report it and leave the work to the plain form."""
        try:
            self.wait()
        except Exception as error:
            self._is_broken = True
            _report(f"{self.what} cannot be compiled: {self._meanwhile} from here on: {error}")

    def _child(self) -> tuple[list[str], dict[str, str]]:
        """Return command and environment of the child that compiles."""
        # Entries of other types are legal there, and nothing is imported from them.
        places = [place for place in sys.path if isinstance(place, str) and place]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
        environment.pop("PYTHONINSPECT", None)
        words = [str(os.getpid()), self._module, self._name, str(self.folder)]
        return [sys.executable, "-P", "-c", _PROGRAM, *words], environment

    def _run_child(self, command: list[str], environment: dict[str, str]) -> None:
        """Compile in a child until it ends, or until nobody wants it any more; note what follows from how it ended."""
        if not self._is_wanted():
            return
        # The child inherits the mask: signals stay pending until it ignores them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_JOB)
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,  # needs no folder for temporary files
                bufsize=0,
                process_group=0,  # its own: signals to the training's group do not reach it
            )
        except (OSError, ValueError):  # no more processes are allowed, or this is no Python interpreter
            self._is_for_caller = True
            return
        except RuntimeError:  # this interpreter is shutting down
            return
        with process:
            try:
                code, written = self._watch(process)
            finally:
                process.kill()
        if code is None or self.is_cached:
            return
        if code < 0:
            # Out of memory, or the job is ending: not the time to compile in the training itself.
            self._is_refused = True
            line = f"the process that compiled {self.what} was killed: {self._meanwhile} from here on"
        else:
            self._is_for_caller = True
            lines = [line for line in written if line != _COMPILES] or [f"code {code}"]
            line = f"the process that compiled {self.what} failed ({lines[-1]}): this process compiles it"
        _report(line)

    def _watch(self, process: subprocess.Popen[bytes]) -> tuple[int | None, list[str]]:
        """Return the child's exit code and what it wrote, by lines; a code of None if nobody wants it any more.

        Report, once, that it compiles. Children of other ranks only wait for the lock.
        """
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        late, written, code = time.monotonic() + PATIENCE_SECONDS, b"", None
        while code is None and self._is_wanted():
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=_POLL_SECONDS)
            code = process.poll()
            written += process.stderr.read() or b""
            if time.monotonic() >= late and f"{_COMPILES}\n".encode() in written:
                self._report_once(
                    f"compiling {self.what}, once on this machine: {self._meanwhile} until then"
                )
        return code, written.decode(errors="replace").strip().splitlines()

    def stop(self, *, for_good: bool = False) -> None:
        """Wait until the part's thread has ended the child or has loaded. for_good: start no other child.

        The thread ends by itself, too, once no lease is open.
        """
        self._is_refused = self._is_refused or for_good
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.put(None)
            # A thread that hangs in a file system starts no child after that.
            thread.join(_LOAD_SECONDS if self._is_loading else _STOP_SECONDS)

    def after_fork(self, *, is_loading_elsewhere: bool) -> None:
        """Leave child and threads to the parent, whose other threads may have held the locks.

        is_loading_elsewhere: whether a thread of the parent was still loading, so that numba's locks stay held here.
        """
        self._making, self._wake = threading.Lock(), queue.SimpleQueue()
        self._thread, self._is_loading = None, False
        self._is_lost = is_loading_elsewhere
        self._is_broken = self._is_broken or is_loading_elsewhere

    @contextlib.contextmanager
    def _reported_late(self) -> Iterator[None]:
        if self.is_cached:  # loading starts no timer: the interpreter may be shutting down
            yield
            return
        line = f"compiling {self.what}, once on this machine: waiting for it"
        end: queue.SimpleQueue[None] = queue.SimpleQueue()

        def report() -> None:
            try:
                end.get(timeout=PATIENCE_SECONDS)
            except queue.Empty:
                self._report_once(line)

        thread = None
        try:
            thread = _started(report, f"penstock-report-{self._name}")
            yield
        finally:
            end.put(None)
            if thread is not None:
                thread.join()

    def _report_once(self, line: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            _report(line)


#: All parts, in the order of their definition.
PARTS: list[Part] = []


def _report(line: str) -> None:
    """Pass a line to the report of one of the leases; print it if there is no lease. Never fail."""
    with _LEASES_LOCK:
        reports = {lease.report for lease in _LEASES} or {print_report}
    report = next(iter(reports - {None}), None)
    if report is not None:
        with contextlib.suppress(Exception):
            report(line)


def _has_interpreter() -> bool:
    """Return whether there is one for a child: the executable of a frozen program is the program itself."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _started(work: Callable[..., None], name: str, *words: Any) -> threading.Thread | None:
    """Start a thread; return None if there can be none: no more are allowed, or the interpreter is shutting down."""
    thread = threading.Thread(target=work, name=name, args=words, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


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
    interpreter survives an interrupt, and ends as usual.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1"):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt", {})


_forking = threading.local()


def _before_fork() -> None:
    """Wait for a thread that loads: numba's locks, and those of imports, would stay held in the forked process.

    What a hook raises is printed and dropped, so an interrupt ends the wait, and is raised after the fork.
    """
    _forking.has_lock = _forking.is_interrupted = False
    try:
        patience = min(PATIENCE_SECONDS, _LOAD_SECONDS)
        _forking.has_lock = _LOADING.acquire(timeout=patience)
        if not _forking.has_lock and (seconds := _LOAD_SECONDS - patience) > 0:
            _report(f"a fork waits for a thread that compiles or loads kernels, {seconds:.0f} s at most")
            _forking.has_lock = _LOADING.acquire(timeout=seconds)
    except KeyboardInterrupt:
        _forking.is_interrupted = True
        _forking.has_lock = _LOADING._is_owned()  # type: ignore[attr-defined]  # raised after acquire, before the name


def _after_fork_in_parent() -> None:
    if getattr(_forking, "has_lock", False):
        _LOADING.release()
    if getattr(_forking, "is_interrupted", False):
        _started(_interrupt_soon, "penstock-interrupt")


def _interrupt_soon() -> None:
    """Raise KeyboardInterrupt in the main thread again, once it is through the hooks."""
    time.sleep(_POLL_SECONDS)
    # To that thread: a signal to the process would not end a sleep in it.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _after_fork_in_child() -> None:
    global _LOADING, _LEASES_LOCK
    _LOADING, _LEASES_LOCK = threading.RLock(), threading.RLock()
    for part in PARTS:
        part.after_fork(is_loading_elsewhere=not getattr(_forking, "has_lock", False))


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
