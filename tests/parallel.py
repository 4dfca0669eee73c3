"""Tests in several processes, forked from the one that collected them: `--processes=3`.

    collects ──fork──▶ process: runs the tests that it is given ──reports──▶ prints, counts, remembers failures
        └───one test after the other, files in order, each file in one process───▲

To collect takes half a minute, which each process of pytest-xdist does anew. A test whose process dies has failed, and
another process runs the rest of its file. Warnings are errors here, so none is passed on.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import signal
import sys
import traceback
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, help="processes for tests; 0: none but this one")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if not options.processes or options.collectonly or session.testsfailed:
        return None
    _Processes(session).run(options.processes)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


# -- The process that collected ------------------------------------------------------------------------


class _Process:
    """A process that runs tests, by their numbers.

    file: those of its file that it was not given yet. given: that which it runs, and the next; None ends it.
    last: that which has ended last; the first of its file before.
    """

    def __init__(self, pid: int, file: deque[int]) -> None:
        self.pid, self.file = pid, file
        #: Ready once the process has ended, also where what it forked has its connection.
        self.end = os.pidfd_open(pid)
        self.given = deque[int | None]()
        self.last = file[0]


class _Processes:
    """What gives tests to processes and takes their reports."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._hook = session, session.config.hook
        files = itertools.groupby(range(len(session.items)), lambda number: session.items[number].path)
        self._files = deque(deque(file) for _, file in files)
        self._running: dict[Connection, _Process] = {}
        self._started = itertools.count()

    def run(self, processes: int) -> None:
        config: Any = self._session.config
        config._tmp_path_factory.getbasetemp()  # one for all
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        terminal.showfspath = False  # tests of several files are reported in turn
        gc.collect()
        gc.freeze()  # else each process would go through it, and copy it for that
        try:
            while self._files and len(self._running) < processes:
                self._start(self._files.popleft())
            while self._running and not (self._session.shouldfail or self._session.shouldstop):
                ends = {process.end: connection for connection, process in self._running.items()}
                for ready in wait([*self._running, *ends]):
                    if not isinstance(ready, Connection):
                        assert isinstance(ready, int)
                        self._receive_rest(ends[ready])
                    elif ready in self._running:
                        self._receive(ready)
        finally:
            for connection, process in self._running.items():
                connection.close()
                os.kill(process.pid, signal.SIGINT)
            for process in self._running.values():
                os.waitpid(process.pid, 0)

    def _start(self, file: deque[int]) -> None:
        number = next(self._started)
        own, its = Pipe()
        sys.stdout.flush()  # else the process has it, too
        if (pid := os.fork()) == 0:
            for connection in (own, *self._running):
                connection.close()
            _run_tests(self._session, its, number)
        its.close()
        self._running[own] = _Process(pid, file)
        for _ in range(2):
            self._give(own)

    def _give(self, connection: Connection) -> None:
        process = self._running[connection]
        if not process.file and self._files:
            process.file = self._files.popleft()
        process.given.append(process.file.popleft() if process.file else None)
        with contextlib.suppress(ConnectionError):  # it has died, which is seen when its reports are received
            connection.send(process.given[-1])

    def _receive(self, connection: Connection) -> None:
        """Take the reports of one test, or see the end of a process."""
        reports = None
        with contextlib.suppress(EOFError, ConnectionResetError):
            reports = connection.recv()
        if reports is None:
            self._end(connection)
            return
        process = self._running[connection]
        number = process.given.popleft()
        assert number is not None
        process.last = number
        of_data = self._hook.pytest_report_from_serializable
        self._report(number, [of_data(config=self._session.config, data=data) for data in reports])
        self._give(connection)

    def _receive_rest(self, connection: Connection) -> None:
        """Take what a process that has ended had sent."""
        while connection in self._running:
            if connection.poll():
                self._receive(connection)
            else:
                self._end(connection)

    def _end(self, connection: Connection) -> None:
        connection.close()
        process = self._running.pop(connection)
        status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        os.close(process.end)
        left = deque(number for number in (*process.given, *process.file) if number is not None)
        if left or status:
            number = left.popleft() if left else process.last
            item = self._session.items[number]
            error = f"the process of this test ended with status {status}"
            died = pytest.TestReport(item.nodeid, item.location, {}, "failed", error, "call")
            self._report(number, [died])
        if left:
            self._start(left)

    def _report(self, number: int, reports: list[pytest.TestReport]) -> None:
        item = self._session.items[number]
        self._hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


# -- A process that runs tests -------------------------------------------------------------------------


class _Reports:
    """What sends reports, in place of all plugins that look at them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.of_test: list[Any] = []
        plugins, terminal = config.pluginmanager, config.get_terminal_writer()
        for plugin in {each.plugin for each in config.hook.pytest_runtest_logreport.get_hookimpls()}:
            plugins.unregister(plugin)
        plugins.register(SimpleNamespace(_tw=terminal), "terminalreporter")  # pytest-timeout writes to it
        plugins.register(self)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self._config.hook.pytest_report_to_serializable
        self.of_test.append(to_data(config=self._config, report=report))


def _run_tests(session: pytest.Session, connection: Connection, process: int) -> NoReturn:
    """Run the tests whose numbers are received, and end as an interpreter does."""
    status = 1
    config: Any = session.config
    try:
        _have_own_files(config, process)
        _have_own_threads()
        reports = _Reports(config)
        number = connection.recv()
        while number is not None:
            following = connection.recv()
            item, *next_item = (session.items[each] for each in (number, following) if each is not None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=next_item[0] if next_item else None)
            connection.send(reports.of_test)
            reports.of_test.clear()
            number = following
        status = 0
    except (EOFError, KeyboardInterrupt):
        pass  # nobody wants more
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            config.pluginmanager.get_plugin(
                "capturemanager"
            ).resume_global_capture()  # as in a test, for those open
            session._setupstate.teardown_exact(None)
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(status)


def _have_own_threads() -> None:
    """Have the threads that libraries have by default; until here OpenMP had one, as no fork survives its others."""
    os.environ.pop("OMP_NUM_THREADS", None)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))


def _have_own_files(config: Any, process: int) -> None:
    """Share neither the files that output is captured in, nor the folder of temporary folders."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folders = config._tmp_path_factory
    atexit.unregister(folders._exit_stack.close)  # it is for the process that collected to delete old ones
    folders._basetemp = folders.mktemp(f"process-{process}", numbered=False)
