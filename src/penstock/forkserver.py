"""Children that begin with everything imported: a server imports it once, and is forked for each of them.

    parent   fork_child("penstock.loader.worker:serve", ["torch"], stdin=...) -> ForkedChild
               │ the task, the environment; standard files, and a pipe that brings its process id and exit status
    server   imports the modules once ──fork──> child: calls the task

The parent has threads, and perhaps a CUDA context, and is never forked. The server has one thread; where an import
started another, it starts each child as an interpreter of its own. It never calls the modules, and ends with its
parent. A child ends with the server, and imports from where the parent does, as one of `penstock.child` does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.child import NoChild, call, start_child, variables_of_a_child

#: A number in the pipe: first the process id, or minus the errno of a fork that failed; then the exit code.
_NUMBER = struct.Struct("<i")
_LENGTH = struct.Struct("<q")
_POLL_PARENT_SECONDS = 0.3
_END_SECONDS = 1.0
#: pytest sets it for each test. Any other variable may be read by an import, so that a change takes a new server.
_EVER_CHANGING = b"PYTEST_CURRENT_TEST"


class _Request(NamedTuple):
    """A child to start: what it calls, its environment, and the processors that its parent may use."""

    task: str
    environment: dict[bytes, bytes]
    cpus: set[int]


class ForkedChild:
    """A child of the server, used as a `subprocess.Popen` is. Any thread may call it.

    returncode: None until `poll` or `wait` has seen its end; minus a signal if that killed it.
    refusal: why it was never forked, once `poll` or `wait` has returned.
    """

    def __init__(self, pipe: int, server: subprocess.Popen[bytes]) -> None:
        self._pipe, self._server = pipe, server
        self._close = weakref.finalize(self, os.close, pipe)
        self._lock = threading.Lock()
        self._pid = 0
        self.returncode: int | None = None
        self.refusal: str | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 if it was never forked. Waits until the server has done its imports."""
        while not self._pid and self.returncode is None:
            self._look(None)
        return self._pid

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        while self.returncode is None and self._look(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code once it has ended. Raises: TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._look(left):
                raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """Kill it, or have it not forked."""
        if self.poll() is not None:
            return
        with self._lock:
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            else:
                self.returncode = -signal.SIGKILL
                self._close()  # the server sees that nobody reads the pipe

    def _look(self, seconds: float | None) -> bool:
        """Read one number from the pipe. Returns False if none has come in time."""
        if seconds != 0:
            _is_readable(self._pipe, seconds)
        with self._lock:
            if self.returncode is not None:
                return True
            if not _is_readable(self._pipe, 0.0):
                return False
            data = os.read(self._pipe, _NUMBER.size)
            if not data:  # the server is ending, and a child ends with it
                self._server.wait()  # so that the next child is asked of another one
                self.returncode = -signal.SIGKILL
                return True
            (number,) = _NUMBER.unpack(data)
            if self._pid:
                self.returncode = number
            elif number > 0:
                self._pid = number
            else:
                self.refusal, self.returncode = os.strerror(-number), 1
        return True


def _is_readable(pipe: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


# -- The parent's side ---------------------------------------------------------------------------------


class _Server:
    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.modules, self.environment = set(modules), _lasting_environment()
        self.path = list(sys.path)
        self._requests, its = socket.socketpair()
        with its:
            self.process = start_child(
                "penstock.forkserver:_serve",
                modules,
                stdin=its.fileno(),
                stderr=subprocess.DEVNULL,  # a child says itself what its imports have to say
                environment=environment,
                watches_parent=False,
            )

    def serves(self, modules: Sequence[str]) -> bool:
        """Return whether its children have these modules, and what they would import now."""
        return (
            self.process.poll() is None
            and self.modules.issuperset(modules)
            and self.environment == _lasting_environment()
            and self.path == sys.path
        )

    def start(self, request: _Request, stdin: int) -> ForkedChild:
        """Raises: OSError if the server has gone."""
        own, its = os.pipe()
        child = ForkedChild(own, self.process)
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            body = pickle.dumps(request)
            message = _LENGTH.pack(len(body)) + body
            files = [its, stdin, *(number if _is_open(number) else nothing for number in (1, 2))]
            sent = socket.send_fds(self._requests, [message], files)
            self._requests.sendall(message[sent:])
        except BaseException:
            child.kill()
            self.end()  # it may have half a message
            raise
        finally:
            os.close(its)
            os.close(nothing)
        return child

    def end(self) -> None:
        """Have it end once its children have. Twice is harmless."""
        self._requests.close()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _lasting_environment() -> dict[bytes, bytes]:
    return {name: value for name, value in os.environb.items() if name != _EVER_CHANGING}


#: The one that starts children is the last; those before it end with their children.
_servers: list[_Server] = []
_servers_lock = threading.Lock()


def fork_child(
    task: str, modules: Sequence[str], *, stdin: int, environment: Mapping[str, str]
) -> ForkedChild:
    """Start a process that calls a function, and return before it runs. It has this process's output and errors.

    task: "module:function". modules: to have imported by then, of those that neither start threads nor use a device.
    environment: variables that it has besides this process's, those of the server as well.
    Raises: NoChild.
    """
    variables = variables_of_a_child(environment)
    encoded = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
    request = _Request(task, encoded, os.sched_getaffinity(0))
    with _servers_lock:
        _servers[:-1] = [server for server in _servers[:-1] if server.process.poll() is None]
        for _ in range(2):
            if not _servers or not _servers[-1].serves(modules):
                if _servers:
                    _servers[-1].end()
                _servers.append(_Server(modules, environment))
            with contextlib.suppress(OSError):  # the server was killed this moment: another one
                return _servers[-1].start(request, stdin)
    raise NoChild("the process that forks others ends at once")


@atexit.register
def _end_servers() -> None:
    for server in _servers:
        server.end()
    while _servers:
        process = _servers.pop().process
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _forget_servers() -> None:
    """Leave them to the process that this one was forked from."""
    global _servers_lock
    _servers_lock = threading.Lock()
    for server in _servers:
        server.end()
        server.process.returncode = 0  # it is no child of this one
    _servers.clear()


os.register_at_fork(after_in_child=_forget_servers)


# -- The server ----------------------------------------------------------------------------------------


def _serve() -> None:
    """Be the server, whose requests come by its standard input; in a child, do what was requested."""
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for module in sys.argv[1:]:
        with contextlib.suppress(Exception):  # the child that needs it raises it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else each child would go through it, and copy it for that
    server = os.getpid()
    task = _Forks(requests).serve()
    if task is None:
        os._exit(0)
    call(task, server)


class _Forks:
    """The children of the server."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._parent = os.getppid()
        #: The pipe of each child, by its process id.
        self._pipes: dict[int, int] = {}
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the waker has the signal's number written

    def serve(self) -> str | None:
        """Return its task in a child; None in the server, when the parent has gone, or wants no more and all ended."""
        is_open = True
        while is_open or self._pipes:
            waited = [self._woken, *([self._requests] if is_open else [])]
            ready = select.select(waited, [], [], _POLL_PARENT_SECONDS)[0]
            if os.getppid() != self._parent:
                return None
            if self._woken in ready:
                self._woken.recv(1 << 10)
            self._reap()
            if self._requests in ready:
                received = self._receive()
                if received is None:
                    is_open = False
                elif self._has_become(*received):
                    return received[0].task
        return None

    def _receive(self) -> tuple[_Request, list[int]] | None:
        """Return the next request, and its pipe and standard files; None at the end."""
        head, files, _, _ = socket.recv_fds(self._requests, _LENGTH.size, 4)
        if not head:
            return None
        (left,) = _LENGTH.unpack(head)
        body = b""
        while left > len(body):
            part = self._requests.recv(left - len(body))
            if not part:
                return None
            body += part
        return pickle.loads(body), list(files)

    def _reap(self) -> None:
        for pid in list(self._pipes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _write(self._pipes[pid], os.waitstatus_to_exitcode(status))
                os.close(self._pipes.pop(pid))

    def _has_become(self, request: _Request, files: list[int]) -> bool:
        """Start a child, and return whether this is it."""
        pipe = files[0]
        poll = select.poll()
        poll.register(pipe, 0)
        try:
            if poll.poll(0):  # nobody wants it any more
                os.close(pipe)
                return False
            has_threads = len(os.listdir("/proc/self/task")) > 1
            pid = _started(request, files) if has_threads else os.fork()
            if pid == 0:
                self._become(request, files)
                return True
            _write(pipe, pid)
            self._pipes[pid] = pipe
        except (OSError, NoChild) as error:
            _write(pipe, -(getattr(error, "errno", None) or 1))
            os.close(pipe)
        finally:
            for file in files[1:]:
                os.close(file)
        return False

    def _become(self, request: _Request, files: list[int]) -> None:
        """Have of the server nothing but what it has imported."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._requests, self._woken, self._waker):
            each.close()
        for pipe in (files[0], *self._pipes.values()):
            os.close(pipe)
        os.setpgid(0, 0)  # signals to another group do not reach it
        with contextlib.suppress(OSError):  # processors that are no longer there
            os.sched_setaffinity(0, request.cpus)
        for number, file in enumerate(files[1:]):
            os.dup2(file, number)
        # As an interpreter opens them: on a terminal, line by line.
        sys.stdout = open(1, "w", 1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.environb.clear()
        os.environb.update(request.environment)
        del sys.argv[1:]


def _started(request: _Request, files: list[int]) -> int:
    """Start a child that is not forked, and return its process id. Raises: NoChild."""
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in request.environment.items()}
    _, stdin, stdout, stderr = files
    child = start_child(request.task, stdin=stdin, stdout=stdout, stderr=stderr, environment=environment)
    child.returncode = 0  # it is the server that waits for it
    return child.pid


def _write(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, _NUMBER.pack(number))
