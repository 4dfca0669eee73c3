"""Compiling kernels ahead, once per machine, in a child process, while a plain form of the same function serves.

A `Part` is one kernel for one set of types. While a `Lease` is open, a child process compiles it, and `Part.ask`
returns None until it has, so that the caller uses its plain form. The children of a host wait for one file lock: the
first compiles, and every process loads the machine code from the cache (`penstock.kernel_cache`):

    rank 0   ask() -> None ... plain form ... ask() -> loop       (loaded from the cache)
    child          lock, compile, write, unlock
    rank 1   ask() -> None ... plain form ... ask() -> loop
    child          (waits for the lock)  finds the file, exits

Loading takes no numba (`penstock.machine_code`): at a second start `ask` returns the loop at once.

Each part has one thread, which starts the child, watches it and ends it. No other thread touches that child: Python
raises KeyboardInterrupt in the main thread only, so that a Ctrl-C neither loses a child nor leaves a lock held.

Decided in docs/decisions/0016-compiling-beside-the-training.md.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.cache_folders import Folders
from penstock.child import NoChild, has_interpreter, start_child
from penstock.errors import ConfigError
from penstock.files import write_whole
from penstock.kernel_cache import file_of, folders_of, read_code
from penstock.machine_code import Loop, MachineCode, Signature
from penstock.queues import get_within
from penstock.report import print_report

#: Compiling that lasts longer is reported.
PATIENCE_SECONDS = 2.0
#: So is a wait for another process that compiles, if it lasts longer by this.
_PATIENCE_WITH_OTHERS_SECONDS = 8.0
_POLL_SECONDS = 0.05
#: How long to wait for a part's thread, which ends the child; it may hang in a file system.
_STOP_SECONDS = 1.0
#: How long a fork waits for a thread that loads, which takes 0.1 s, or compiles where no child can.
_LOAD_SECONDS = 10.0
#: The line on its standard error by which a child reports that it holds the lock and compiles.
_COMPILES = "penstock compiles"
#: And that it waits for another process that holds it.
_WAITS = "penstock waits"


# -- Parts -------------------------------------------------------------------------------------------------


class Lease:
    """Child processes may compile while one is open; closing the last one ends them."""

    def __init__(self, report: Callable[[str], None] | None) -> None:
        """Open it.

        report: called with one line, for all kernels, if compiling takes longer than PATIENCE_SECONDS; None: report
            nothing.
        """
        self.report = report
        with _LEASES_LOCK:
            _LEASES.add(self)

    def close(self) -> None:
        """End child processes and threads unless another lease is open. Finished kernels are kept. Idempotent.

        A lease that is collected is closed, too; nothing waits for that.
        """
        global _is_told
        with _LEASES_LOCK:
            _LEASES.discard(self)
            is_last = not _LEASES
            _is_told = _is_told and not is_last
        if is_last:
            for part in PARTS:
                part.stop()


#: Those that are open. Without one, the parts' threads end their children.
_LEASES: weakref.WeakSet[Lease] = weakref.WeakSet()
#: Protects _LEASES, `_is_told`, and which thread a part has. Reentrant: a report may close a lease.
_LEASES_LOCK = threading.RLock()
#: Whether a line has reported, since there are leases, that kernels are compiled.
_is_told = False
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
    """A kernel that is compiled once per machine."""

    def __init__(self, module: str, name: str, signature: Signature, what: str, meanwhile: str = "") -> None:
        """Compile nothing yet.

        module: full name of a module with `compile_part(name)`, which returns the machine code.
        what, meanwhile: for the report: what is compiled, and what serves until then.
        """
        self._module, self._name, self._signature = module, name, signature
        self.what, self._meanwhile = what, meanwhile
        self._loop: Loop | None = None
        #: Held by the thread that has it compiled and waits for it.
        self._making = threading.Lock()
        #: The thread that has this part compiled while others use the plain form.
        self._thread: threading.Thread | None = None
        #: Has the thread look at once whether it is still wanted. Not an Event: a Ctrl-C in it leaves its lock held.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: Whether this process compiles, as children cannot; whether slow compiling was reported; whether no child may
        #: start; whether compiling or loading failed.
        self._is_for_this_process = self._is_reported = self._is_refused = self._is_broken = False
        #: Whether this process was forked while another thread loaded or compiled.
        self._is_lost = False
        PARTS.append(self)

    def ask(self) -> Loop | None:
        """Return the loop if it is compiled; None while a child compiles it.

        Without an open lease, within `without_plain_forms`, and where no folder can keep machine code, it is `wait`.
        """
        if self._loop is not None:
            return self._loop
        if _plain_forms_are_off or not _LEASES or self._file is None:
            return self.wait()
        return self._found(waits=True)

    def glance(self) -> Loop | None:
        """Return the loop if it was compiled before; else None, and a child compiles it while a lease is open.

        For what is not worth a wait: this neither waits nor raises.
        """
        return self._loop or self._found(waits=False)

    def _found(self, *, waits: bool) -> Loop | None:
        if self._thread is None and not self._is_broken:
            try:
                if self._load() is None:
                    if not self._compiles_here:
                        self._start()
                    elif waits:
                        self.wait()
            except Exception as error:
                was_broken, self._is_broken = self._is_broken, True
                if not was_broken:
                    _report(f"{self.what} cannot be compiled: {self._meanwhile} from here on: {error}")
        return self._loop

    def wait(self) -> Loop:
        """Return the loop once a child has compiled it, or this process where no child can.

        Raises: ConfigError in a process that was forked while another thread compiled.
        """
        if self._loop is None:
            if self._is_lost:
                raise ConfigError(
                    f"this process was forked while a thread compiled {self.what}, and cannot do so itself: "
                    'run `penstock compile` before, or start processes by "spawn"'
                )
            with self._making:
                if self._load() is None and not self._compiles_here:
                    self._run_child(is_waited_for=True)
                return self._load() or self._compile()
        return self._loop

    @property
    def is_cached(self) -> bool:
        """Return whether it was compiled on this machine before."""
        return any(file.exists() for file in self._files)

    @functools.cached_property
    def folders(self) -> Folders:
        return folders_of(self._module)

    @functools.cached_property
    def _file(self) -> Path | None:
        """Where it is written to; None if no folder can be written."""
        return None if self.folders.kept is None else file_of(self.folders.kept, self._name, self._signature)

    @functools.cached_property
    def _files(self) -> list[Path]:
        """Where it may be."""
        return [file_of(folder, self._name, self._signature) for folder in self.folders.read]

    @property
    def _compiles_here(self) -> bool:
        """Whether this process compiles: no child can, or none could leave what it compiled."""
        return self._is_for_this_process or self._file is None or not has_interpreter()

    def _load(self) -> Loop | None:
        """Return the loop if it was compiled on this machine. Raises: RuntimeError."""
        for file in self._files:
            if self._loop is not None:
                break
            if (code := read_code(file)) is not None:
                with _LOADING:
                    self._loop = self._loop or Loop(code, self._signature)
        return self._loop

    def _compile(self) -> Loop:
        """Compile in this process: no child can, or no folder keeps what it would write."""
        self._report_once(f"compiling {self.what} in this process: waiting for it{self._note()}")
        with _LOADING:
            code = _compiled(self._module, self._name)
            if self._file is not None:
                with contextlib.suppress(OSError):  # a full disk: the next process compiles again
                    write_whole(self._file, code.to_bytes())
            self._loop = Loop(code, self._signature)
        return self._loop

    def _start(self) -> None:
        """Start the part's thread. If no more threads are allowed, the plain form serves until a later call can."""
        with _LEASES_LOCK:
            if self._thread is None and self._loop is None and self._is_wanted():
                thread = threading.Thread(
                    target=self._run, name=f"penstock-compile-{self._name}", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # no more are allowed, or Python is shutting down
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        """Have the part compiled: what its thread does. Whoever asks next loads it."""
        with _LEASES_LOCK:
            self._thread = threading.current_thread()  # also if an interrupt kept `_start` from noting it
        try:
            self._run_child(is_waited_for=False)
        finally:
            with _LEASES_LOCK:
                self._thread = None

    def _note(self) -> str:
        """Say, behind the line that it is compiled, that this is not kept where somebody wanted it."""
        where = self.folders.kept or "no folder, as none can be written"
        return f" ({self.folders.note}: kept in {where})" if self.folders.note else ""

    def _is_wanted(self) -> bool:
        return bool(_LEASES) and not self._is_refused

    def _run_child(self, *, is_waited_for: bool) -> None:
        """Compile in a child until it ends, or until nobody wants it any more; note what follows from how it ended.

        is_waited_for: whether the caller cannot do without.
        """
        if not is_waited_for and not self._is_wanted():
            return
        words = [self._module, self._name, str(self._file)]
        process = None
        try:
            try:
                # A pipe needs no folder for temporary files.
                process = start_child("penstock.compiling:_serve", words, stderr=subprocess.PIPE)
            except NoChild:
                self._is_for_this_process = True
                return
            except RuntimeError:  # this interpreter is shutting down
                return
            code, written = self._watch(process, is_waited_for)
        finally:
            if process is not None:
                process.kill()
                with process:
                    pass
        if code is None or self.is_cached or not (is_waited_for or self._is_wanted()):
            return
        if code < 0 and not is_waited_for:
            # Out of memory, or the job is ending: not the time to compile in the training itself.
            self._is_refused = True
            line = f"the process that compiled {self.what} was killed: {self._meanwhile} from here on"
        else:
            self._is_for_this_process = True
            lines = [line for line in written if line not in (_COMPILES, _WAITS)] or [f"code {code}"]
            where = f"kept in {self.folders.kept}"
            line = f"the process that compiled {self.what} failed ({lines[-1]}; {where}): this process compiles it"
        _report(line)

    def _watch(self, process: subprocess.Popen[bytes], is_waited_for: bool) -> tuple[int | None, list[str]]:
        """Return the child's exit code and what it wrote, by lines; a code of None if nobody wants it any more.

        Report, once, that it compiles. Children of other ranks only wait for the lock.
        """
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        late, written, code = time.monotonic() + PATIENCE_SECONDS, b"", None
        while code is None and (is_waited_for or self._is_wanted()):
            with contextlib.suppress(queue.Empty):
                get_within(self._wake, _POLL_SECONDS)
            code = process.poll()
            written += process.stderr.read() or b""
            now, compiles = time.monotonic(), f"{_COMPILES}\n".encode() in written
            if not is_waited_for and not self._is_wanted():
                break  # nobody waits for it any more
            if now >= late and compiles and is_waited_for:
                self._report_once(
                    f"compiling {self.what}, once on this machine: waiting for it{self._note()}"
                )
            elif now >= late and compiles:
                self._report_compiling()
            elif now >= late + _PATIENCE_WITH_OTHERS_SECONDS and is_waited_for:
                self._report_once(f"another process compiles {self.what}: waiting for it")
        return code, written.decode(errors="replace").strip().splitlines()

    def stop(self, *, for_good: bool = False) -> None:
        """Wait until the part's thread has ended the child. for_good: start no other child.

        The thread ends by itself, too, once no lease is open.
        """
        self._is_refused = self._is_refused or for_good
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.put(None)
            # A thread that hangs in a file system starts no child after that.
            thread.join(_STOP_SECONDS)

    def after_fork(self, *, is_loading_elsewhere: bool) -> None:
        """Leave child and threads to the parent, whose other threads may have held the locks.

        is_loading_elsewhere: whether a thread of the parent was still loading or compiling, whose locks stay held here.
        """
        self._making, self._wake = threading.Lock(), queue.SimpleQueue()
        self._thread = None
        self._is_lost = is_loading_elsewhere
        self._is_broken = self._is_broken or is_loading_elsewhere

    def _report_compiling(self) -> None:
        """Report once, in one line, that plain forms serve; what is compiled later is not reported."""
        global _is_told
        with _LEASES_LOCK:
            if _is_told or _reporter() is None:  # who opens a lease later may want the line
                return
            _is_told = True
            parts = [part for part in PARTS if part is self or part._thread is not None]
        serving = {part._meanwhile for part in parts}
        meanwhile = self._meanwhile if len(serving) == 1 else "slower code does it"
        _report(
            f"compiling {', '.join(part.what for part in parts)}, once on this machine: {meanwhile} until "
            f"then{self._note()}; what else this run needs follows, and `penstock compile` compiles all of it ahead"
        )

    def _report_once(self, line: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            _report(line)


#: All parts, in the order of their definition.
PARTS: list[Part] = []


def _reporter() -> Callable[[str], None] | None:
    """Return the report of one of the leases, `print_report` if there is no lease; None if no lease has one."""
    with _LEASES_LOCK:
        reports = {lease.report for lease in _LEASES} or {print_report}
    return next(iter(reports - {None}), None)


def _report(line: str) -> None:
    """Pass a line to whoever is to have it, see `_reporter`. Never fail."""
    report = _reporter()
    if report is not None:
        with contextlib.suppress(Exception):
            report(line)


# -- The end of the process, and forks ---------------------------------------------------------------------


@atexit.register
def _at_exit() -> None:
    with _interrupts_ignored():
        for part in PARTS:
            part.stop(for_good=True)
    # llvmlite would free loops after its own modules are gone, with a traceback for each, if it was imported as late as
    # this: by a thread that loads one at its first batch. What threads still run stays mapped, too.
    for loop in [part._loop for part in PARTS]:
        if loop is not None:
            loop._engine.detach()


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


_forking = threading.local()


def _before_fork() -> None:
    """Wait for a thread that loads or compiles: its locks would stay held in the forked process.

    What a hook raises is printed and dropped, so an interrupt ends the wait, and is raised after the fork.
    """
    _forking.has_lock = _forking.is_interrupted = False
    try:
        _forking.has_lock = _LOADING.acquire(timeout=_LOAD_SECONDS)
    except KeyboardInterrupt:
        _forking.is_interrupted = True
        _forking.has_lock = _LOADING._is_owned()  # type: ignore[attr-defined]  # raised after acquire, before the name


def _after_fork_in_parent() -> None:
    if getattr(_forking, "has_lock", False):
        _LOADING.release()
    if getattr(_forking, "is_interrupted", False):
        with contextlib.suppress(RuntimeError):  # no more threads are allowed
            threading.Thread(target=_interrupt_soon, name="penstock-interrupt", daemon=True).start()


def _interrupt_soon() -> None:
    """Raise KeyboardInterrupt in the main thread again, once it is through the hook of this module.

    Hooks of other modules that were registered later run after it: in one of those that is written in Python, the
    interrupt is printed and dropped.
    """
    main, is_in_hook = threading.main_thread().ident or 0, True
    while is_in_hook:
        time.sleep(_POLL_SECONDS)
        frames = traceback.walk_stack(sys._current_frames().get(main))
        is_in_hook = any(frame.f_code is _after_fork_in_parent.__code__ for frame, _ in frames)
    # To that thread: a signal to the process would not end a sleep in it.
    signal.pthread_kill(main, signal.SIGINT)


def _after_fork_in_child() -> None:
    global _LOADING, _LEASES_LOCK
    _LOADING, _LEASES_LOCK = threading.RLock(), threading.RLock()
    for part in PARTS:
        part.after_fork(is_loading_elsewhere=not getattr(_forking, "has_lock", False))


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


# -- Compiling ---------------------------------------------------------------------------------------------

#: Held while a thread loads or compiles. Reentrant: that thread may fork.
_LOADING = threading.RLock()


def _compiled(module: str, name: str) -> MachineCode:
    """Compile a part. Its callees are kept when each is finished: a process that takes over need not begin anew."""
    kernels: Any = importlib.import_module(module)
    code: MachineCode = kernels.compile_part(name)
    return code


@contextlib.contextmanager
def _locked(path: Path, is_done: Callable[[], bool]) -> Iterator[None]:
    """Hold a lock that ends with its process, or return without it once the work is done. A wait for it is printed."""
    is_told = False
    with path.open("ab") as file:
        while not is_done():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not is_told:
                    is_told = True
                    print(_WAITS, file=sys.stderr, flush=True)
                time.sleep(_POLL_SECONDS)
            except OSError:  # a file system without locks: two may compile, and each replaces complete files
                break
            else:
                break
        yield


def _serve() -> None:
    """Do what the child does that compiles: of each part it is given the module, the name and the file."""
    # Not nice: threads that decode on all processors would starve the compiler that speeds them up.
    words = iter(sys.argv[1:])
    for module, name, place in zip(words, words, words, strict=True):
        file = Path(place)
        with _locked(file.parent / "lock", file.exists):
            if not file.exists():
                print(_COMPILES, file=sys.stderr, flush=True)
                write_whole(file, _compiled(module, name).to_bytes())


class _Child:
    """A process that compiles parts of one folder, one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Start it. Raises: NoChild."""
        self._parts, self._written, self._waits_since = parts, b"", math.inf
        words = [word for part in parts for word in (part._module, part._name, str(part._file))]
        self._process = start_child("penstock.compiling:_serve", words, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        self._output = self._process.stderr
        os.set_blocking(self._output.fileno(), False)

    def has_ended(self) -> bool:
        """Return whether it has ended; note what it says that it does."""
        has_ended = self._process.poll() is not None
        self._written += self._output.read() or b""
        if self._state != _WAITS.encode():
            self._waits_since = math.inf
        elif self._waits_since == math.inf:
            self._waits_since = time.monotonic()
        return has_ended

    @property
    def compiles(self) -> bool:
        return self._state == _COMPILES.encode()

    @property
    def waits_for(self) -> Part | None:
        """Return the part that another process compiles, if that lasts so long that it is worth a line."""
        if time.monotonic() < self._waits_since + PATIENCE_SECONDS:
            return None
        return next((part for part in self._parts if not part.is_cached), None)

    @property
    def _state(self) -> bytes:
        """The last that it said of itself, by whole lines."""
        lines = self._written.split(b"\n")[:-1]
        return next((line for line in reversed(lines) if line in (_COMPILES.encode(), _WAITS.encode())), b"")

    def close(self) -> None:
        """End it. Idempotent."""
        self._process.kill()
        with self._process:
            pass


def compile_ahead(
    parts: Iterable[Part],
    processes: int,
    report: Callable[[Part], None],
    tell: Callable[[str], None] | None = None,
) -> None:
    """Have parts compiled by several children at once, and report each as it is done.

    Those of one folder, which share callees and a lock, are compiled by one child, one after the other; folders begin
    in the order of their first parts. What a child leaves, because it failed or could not start, is compiled by
    `Part.wait`, which says why it fails.

    tell: called with a line if this takes longer than PATIENCE_SECONDS, and with one for each child that waits as long
    for another process; None: standard error.
    """
    missing = [part for part in parts if not part.is_cached]
    folders: dict[Path, list[Part]] = {}
    for part in missing:
        if part._file is not None:
            folders.setdefault(part._file.parent, []).append(part)
    waiting, running = deque(folders.values()), list[_Child]()
    tell, late = tell or _report, time.monotonic() + PATIENCE_SECONDS
    told = set[_Child | None]()  # of which children that they wait; None: that some compile
    try:
        with contextlib.suppress(NoChild):
            while waiting or running:
                while waiting and len(running) < processes:
                    running.append(_Child(waiting.popleft()))
                time.sleep(_POLL_SECONDS)
                for child in [child for child in running if child.has_ended()]:
                    running.remove(child)
                    child.close()
                for part in [part for part in missing if part.is_cached]:
                    missing.remove(part)
                    report(part)
                is_due = bool(missing) and None not in told and time.monotonic() >= late
                if is_due and any(child.compiles for child in running):
                    told.add(None)
                    plurals = "s" * (len(missing) > 1), "es" * (len(running) > 1)
                    tell(f"compiling {len(missing)} loop{plurals[0]} in {len(running)} process{plurals[1]}")
                for child in running:
                    if child not in told and (part_of_other := child.waits_for) is not None:
                        told.add(child)
                        tell(f"another process compiles {part_of_other.what}: waiting for it")
    finally:
        for child in running:
            child.close()
    for part in missing:
        part.wait()
        report(part)
